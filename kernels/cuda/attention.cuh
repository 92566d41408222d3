/* What the CUDA attention kernels share: where a cache row lies, how it is read, chunks of positions, the running result.
 *
 * f32 FMA over one chunk, `do_chunk`, serves caches and GPUs for which there is no tensor-core kernel.
 */
#ifndef QL_KERNELS_CUDA_ATTENTION_CUH
#define QL_KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/dev.cuh"

/* FOLDERS: sums that the chunks of a generated row are dealt to in turn, which are then added in order. */
enum { D = 256, FOLDERS = 8, HEADS = 8, MAX_CHUNK = 1024, FP8_GROUP = 64 };

/* Rows of one phase; n_row and n_head are positive. */
ql_status ql_attention_prompt_cuda(ql_dev *dev, const ql_attention_args *a);
/* prep: NULL, or the op before, done as well: compute capability 9.0, F16 and FP8 caches, at most QL_SHORT_ROWS rows, HEADS heads a group and
 * ROTARY channels rotated. */
ql_status ql_attention_gen_cuda(ql_dev *dev, const ql_attention_args *a, const ql_attn_prep_args *prep);
ql_status ql_attention_group_cuda(ql_dev *dev,
                                  const ql_attention_args *a); /* prompt rows, precision bf16, GPUs of 9.0 */

/* Index of the first channel of a cache row. */
__device__ __forceinline__ int64_t cache_row(int page, int n_kv, int head, int pos) {
    return (((int64_t)page * n_kv + head) * QL_PAGE + pos % QL_PAGE) * D;
}

/* ---- chunks ------------------------------------------------------------------------------------------------------ */

enum { SHORT_END = 16384, MID_END = 131072, SHORT = 128, MID = 512 };
enum { N_SHORT = SHORT_END / SHORT, N_MID = (MID_END - SHORT_END) / MID };

static __host__ __device__ __forceinline__ int chunk_of(int pos) {
    return pos < SHORT_END ? pos / SHORT
           : pos < MID_END ? N_SHORT + (pos - SHORT_END) / MID
                           : N_SHORT + N_MID + (pos - MID_END) / MAX_CHUNK;
}

static __device__ __forceinline__ int chunk_begin(int i) {
    return i < N_SHORT           ? i * SHORT
           : i < N_SHORT + N_MID ? SHORT_END + (i - N_SHORT) * MID
                                 : MID_END + (i - N_SHORT - N_MID) * MAX_CHUNK;
}

/* ---- reading the cache ------------------------------------------------------------------------------------------- */

/* 8 channels from 8 c on of the cache row that begins at element `at`. */
template <int TYPE>
__device__ __forceinline__ void load8(const void *cache, const void *scale, int64_t at, int c, float v[8]) {
    if (TYPE == QL_KV_F32) {
        const float4 *p = (const float4 *)((const float *)cache + at) + 2 * c;
        float4 a = p[0], b = p[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else if (TYPE == QL_KV_FP8) {
        uint2 u = ((const uint2 *)((const uint8_t *)cache + at))[c];
        float s = f32_of_f16(((const uint16_t *)scale)[at / FP8_GROUP + c / 8]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = f32_of_e4m3(u.x >> 8 * i & 255) * s;
            v[4 + i] = f32_of_e4m3(u.y >> 8 * i & 255) * s;
        }
    } else {
        uint4 u = ((const uint4 *)((const uint16_t *)cache + at))[c];
        const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = TYPE == QL_KV_F16 ? f32_of_f16((uint16_t)w[i]) : f32_of_bf16(w[i] & 0xffff);
            v[2 * i + 1] = TYPE == QL_KV_F16 ? f32_of_f16((uint16_t)(w[i] >> 16)) : f32_of_bf16(w[i] >> 16);
        }
    }
}

/* Channels 2 c and 2 c + 1. */
template <int TYPE> __device__ __forceinline__ float2 load2(const void *cache, const void *scale, int64_t at, int c) {
    if (TYPE == QL_KV_F32) {
        return ((const float2 *)((const float *)cache + at))[c];
    }
    if (TYPE == QL_KV_FP8) {
        uint32_t u = ((const uint16_t *)((const uint8_t *)cache + at))[c];
        float s = f32_of_f16(((const uint16_t *)scale)[at / FP8_GROUP + c / 32]);
        return make_float2(f32_of_e4m3(u & 255) * s, f32_of_e4m3(u >> 8) * s);
    }
    uint32_t u = ((const uint32_t *)((const uint16_t *)cache + at))[c];
    return TYPE == QL_KV_F16 ? make_float2(f32_of_f16((uint16_t)u), f32_of_f16((uint16_t)(u >> 16)))
                             : make_float2(f32_of_bf16(u & 0xffff), f32_of_bf16(u >> 16));
}

/* ---- what prep computes ------------------------------------------------------------------------------------------- */

/* A row's norm by a warp; lane l holds channels l + 32 i, w their weights. */
__device__ __forceinline__ void norm_row(float (&v)[8], const float (&w)[8], float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = fmaf(v[i], v[i], sum);
    }
    float scale = 1.0f / sqrtf(fmaf(warp_sum(sum), 1.0f / D, eps));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = (v[i] * scale) * (1.0f + w[i]);
    }
}

/* A channel of the first half with minus its partner, or one of the second half with its partner. */
__device__ __forceinline__ float rotate(float x, float partner, float cosine, float sine) {
    return fmaf(x, cosine, __fmul_rn(partner, sine));
}

/* Element `at` on of keys or values becomes a row; lane l holds channels l + 32 i of it. `to` may be in shared memory. */
template <int TYPE>
__device__ __forceinline__ void store_row(void *to, void *scale, int64_t at, const float (&v)[8], int lane) {
    if constexpr (TYPE == QL_KV_FP8) {
#pragma unroll
        for (int g = 0; g < 4; g++) {
            float s = fmaxf(warp_max(fmaxf(fabsf(v[2 * g]), fabsf(v[2 * g + 1]))), 0x1p-14f) / 448.0f;
            uint16_t h = __half_as_ushort(__float2half_rn(s));
            h += f32_of_f16(h) < s;
            s = f32_of_f16(h);
            ((uint8_t *)to)[at + 64 * g + lane] = (uint8_t)e4m3_of_f32(v[2 * g] / s);
            ((uint8_t *)to)[at + 64 * g + 32 + lane] = (uint8_t)e4m3_of_f32(v[2 * g + 1] / s);
            if (lane == 0) {
                ((uint16_t *)scale)[at / FP8_GROUP + g] = h;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (TYPE == QL_KV_F32) {
                ((float *)to)[at + lane + 32 * i] = v[i];
            } else {
                uint32_t bf16 = __float_as_uint(round_bf16(v[i])) >> 16;
                ((uint16_t *)to)[at + lane + 32 * i] =
                    TYPE == QL_KV_F16 ? __half_as_ushort(__float2half_rn(v[i])) : (uint16_t)bf16;
            }
        }
    }
}

/* ---- one chunk --------------------------------------------------------------------------------------------------- */

struct work_shared {
    float q[HEADS][D];
    float w[MAX_CHUNK][HEADS]; /* scores, then weights */
    float o[HEADS][D];         /* sums of the odd positions */
    float max[HEADS], sum[HEADS];
};

/* Query heads of local kv head `kv`: [*h0, *h1) of this lane. */
__device__ __forceinline__ void heads_of(const struct ql_attention_args &a, int kv, int *h0, int *h1) {
    *h0 = max((kv + a.kv_head0) * a.group - a.head0, 0);
    *h1 = min((kv + a.kv_head0 + 1) * a.group - a.head0, a.n_head);
}

/* `size` (row, head) pairs of a segment, counted row by row over the kv head's query heads. */
struct pair_tile {
    int seg, first, n;
};

__device__ __forceinline__ bool find_pairs(const ql_batch &b, int slot, int n_head, int size, struct pair_tile *t) {
    for (int s = 0; s < b.n_seg; s++) {
        int pairs = (b.seg_row[s + 1] - b.seg_row[s]) * n_head, count = (pairs + size - 1) / size;
        if (slot < count) {
            t->seg = s;
            t->first = slot * size;
            t->n = min(size, pairs - slot * size);
            return true;
        }
        slot -= count;
    }
    return false;
}

/* n positions from `begin` on. Afterwards x.max and x.sum are set and threads 0..127 hold the weighted values of
 * channels 2 tid, 2 tid + 1 in o. All 256 threads. Dependent on q, the cache, begin and n alone. */
template <int TYPE>
__device__ void do_chunk(struct work_shared &x, const struct ql_kv_cache &c, const int *page, int kv, int begin, int n,
                         float o[HEADS][2]) {
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    float q[HEADS][8];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[h][i] = x.q[h][8 * lane + i];
        }
    }
    for (int p = warp; p < n; p += 8) {
        float k[8], s[HEADS];
        load8<TYPE>(c.k, c.k_scale, cache_row(page[(begin + p) / QL_PAGE], c.n_kv_head, kv, begin + p), lane, k);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            s[h] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[h] = fmaf(q[h][i], k[i], s[h]);
            }
        }
        /* halves exchange heads until a lane holds one: head lane / 4 */
#pragma unroll
        for (int d = 16, m = HEADS / 2; m; d >>= 1, m >>= 1) {
            bool upper = lane & d;
#pragma unroll
            for (int h = 0; h < m; h++) {
                float give = upper ? s[h] : s[h + m], keep = upper ? s[h + m] : s[h];
                s[h] = keep + __shfl_xor_sync(0xffffffffu, give, d);
            }
        }
        s[0] += __shfl_xor_sync(0xffffffffu, s[0], 2);
        s[0] += __shfl_xor_sync(0xffffffffu, s[0], 1);
        if ((lane & 3) == 0) {
            x.w[p][lane >> 2] = s[0] * 0.0625f;
        }
    }
    __syncthreads();
    float most = x.w[0][warp], sum = 0.0f; /* warp h: head h */
    for (int p = lane; p < n; p += 32) {
        most = fmaxf(most, x.w[p][warp]);
    }
    most = warp_max(most);
    for (int p = lane; p < n; p += 32) {
        float w = expf(x.w[p][warp] - most);
        x.w[p][warp] = w;
        sum += w;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        x.max[warp] = most;
        x.sum[warp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        o[h][0] = o[h][1] = 0.0f;
    }
    int ch = tid & 127;
#pragma unroll 4
    for (int p = tid >> 7; p < n; p += 2) {
        float2 v = load2<TYPE>(c.v, c.v_scale, cache_row(page[(begin + p) / QL_PAGE], c.n_kv_head, kv, begin + p), ch);
        float4 a = *(const float4 *)&x.w[p][0], b = *(const float4 *)&x.w[p][4];
        const float w[HEADS] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            o[h][0] = fmaf(w[h], v.x, o[h][0]);
            o[h][1] = fmaf(w[h], v.y, o[h][1]);
        }
    }
    if (tid >= 128) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            *(float2 *)&x.o[h][2 * ch] = make_float2(o[h][0], o[h][1]);
        }
    }
    __syncthreads();
    if (tid < 128) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float2 v = *(const float2 *)&x.o[h][2 * ch];
            o[h][0] += v.x;
            o[h][1] += v.y;
        }
    }
}

__device__ __forceinline__ void load_q(struct work_shared &x, const struct ql_attention_args &a, int64_t row, int h0,
                                       int n) {
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * D; i += 256) {
        x.q[i / D][i % D] = i / D < n ? a.q[(row * a.n_head + h0) * D + i] : 0.0f;
    }
    __syncthreads();
}

/* Running result of a row and head. */
struct fold {
    float max, sum, o[2];
};

__device__ __forceinline__ void fold_in(struct fold *f, bool first, float max, float sum, float o0, float o1) {
    if (first) {
        *f = fold{max, sum, {o0, o1}};
        return;
    }
    float top = fmaxf(max, f->max), old_part = expf(f->max - top), new_part = expf(max - top);
    f->max = top;
    f->sum = fmaf(f->sum, old_part, sum * new_part);
    f->o[0] = fmaf(f->o[0], old_part, o0 * new_part);
    f->o[1] = fmaf(f->o[1], old_part, o1 * new_part);
}

/* Channels 2 c, 2 c + 1 of row and head, gated. */
__device__ __forceinline__ void write_o(const struct ql_attention_args &a, int64_t row, int h, int c,
                                        const struct fold &f) {
    float2 gate = *(const float2 *)(a.qg + (row * a.n_head + h) * 2 * D + D + 2 * c);
    *(float2 *)(a.o + (row * a.n_head + h) * D + 2 * c) =
        make_float2((f.o[0] / f.sum) * sigmoid(gate.x), (f.o[1] / f.sum) * sigmoid(gate.y));
}

#endif
