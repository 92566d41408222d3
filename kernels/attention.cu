/* attn_prep and attention on the device: contracts in attention.h.
 *
 * Keys and values are taken in chunks whose boundaries are fixed positions: 128 long up to position 16,384, then 512, from
 * 131,072 on 1024, so that generation at any context has enough independent work and partial results stay small. A
 * chunk's maximum, sum and weighted values are finished on their own and folded in rising order. Generated rows spread
 * the chunks over blocks and fold in a second kernel; prompt rows fold as they go, with the same operations, so that a
 * row's bits depend on its own q and the cache alone.
 */
#include "kernels/cuda/dev.cuh"

enum { D = 256, HEADS = 8, MAX_CHUNK = 1024, FP8_GROUP = 64 };

/* ---- attn_prep --------------------------------------------------------------------------------------------------- */

/* Index of the first channel of a cache row. */
__device__ __forceinline__ int64_t cache_row(int page, int n_kv, int head, int pos) {
    return (((int64_t)page * n_kv + head) * QL_PAGE + pos % QL_PAGE) * D;
}

/* Lane l holds channels l + 32 i of a row. */
__device__ void store_row(const struct ql_kv_cache &cache, void *to, void *scale, int64_t at, const float v[8], int lane) {
    switch (cache.type) {
    case QL_KV_F32:
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ((float *)to)[at + lane + 32 * i] = v[i];
        }
        break;
    case QL_KV_F16:
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ((uint16_t *)to)[at + lane + 32 * i] = __half_as_ushort(__float2half_rn(v[i]));
        }
        break;
    case QL_KV_BF16:
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ((uint16_t *)to)[at + lane + 32 * i] = (uint16_t)(__float_as_uint(round_bf16(v[i])) >> 16);
        }
        break;
    default:
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
    }
}

/* A warp a row and head: query heads, then key heads, then value heads. */
__global__ void __launch_bounds__(256) prep_kernel(ql_batch b, struct ql_attn_prep_args a, struct ql_kv_cache cache, int64_t n) {
    __shared__ float row[8][D];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = a.n_head + 2 * cache.n_kv_head;
    int64_t item = blockIdx.x * 8ll + warp;
    if (item >= n) {
        return;
    }
    int t = (int)(item / heads), h = (int)(item % heads);
    bool is_q = h < a.n_head, is_v = h >= a.n_head + cache.n_kv_head;
    int kv = is_q ? 0 : (h - a.n_head) % cache.n_kv_head, pos = b.row_pos[t];
    const float *x = is_q ? a.qg + ((int64_t)t * a.n_head + h) * 2 * D : (is_v ? a.v : a.k) + ((int64_t)t * cache.n_kv_head + kv) * D;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = x[lane + 32 * i];
    }
    if (!is_v) {
        const float *w = is_q ? a.q_norm : a.k_norm, *rope = a.rope + (int64_t)pos * a.rotary;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum = fmaf(v[i], v[i], sum);
        }
        float scale = 1.0f / sqrtf(warp_sum(sum) / (float)D + a.eps);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = (v[i] * scale) * (1.0f + w[lane + 32 * i]);
            row[warp][lane + 32 * i] = v[i];
        }
        __syncwarp();
        int half = a.rotary / 2;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int d = lane + 32 * i;
            if (d < half) {
                v[i] = v[i] * rope[2 * d] - row[warp][d + half] * rope[2 * d + 1];
            } else if (d < a.rotary) {
                v[i] = v[i] * rope[2 * (d - half)] + row[warp][d - half] * rope[2 * (d - half) + 1];
            }
        }
    }
    if (is_q) {
        float *y = a.q + ((int64_t)t * a.n_head + h) * D;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            y[lane + 32 * i] = v[i];
        }
        return;
    }
    int page = b.page[(int64_t)b.row_seg[t] * b.max_page + pos / QL_PAGE];
    int64_t at = cache_row(page, cache.n_kv_head, kv, pos);
    store_row(cache, is_v ? cache.v : cache.k, is_v ? cache.v_scale : cache.k_scale, at, v, lane);
}

ql_status ql_attn_prep_cuda(ql_dev *dev, const ql_attn_prep_args *a) {
    int64_t n = (int64_t)a->batch->n_row * (a->n_head + 2 * a->cache->n_kv_head);
    if (n == 0) {
        return QL_OK;
    }
    prep_kernel<<<(unsigned)ceil_div(n, 8), 256, 0, cuda(dev)->stream>>>(*a->batch, *a, *a->cache, n);
    return launched(dev, "attn_prep");
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
template <int TYPE> __device__ __forceinline__ void load8(const void *cache, const void *scale, int64_t at, int c, float v[8]) {
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

__device__ __forceinline__ void load_q(struct work_shared &x, const struct ql_attention_args &a, int64_t row, int h0, int n) {
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
__device__ __forceinline__ void write_o(const struct ql_attention_args &a, int64_t row, int h, int c, const struct fold &f) {
    float2 gate = *(const float2 *)(a.qg + (row * a.n_head + h) * 2 * D + D + 2 * c);
    *(float2 *)(a.o + (row * a.n_head + h) * D + 2 * c) =
        make_float2((f.o[0] / f.sum) * sigmoid(gate.x), (f.o[1] / f.sum) * sigmoid(gate.y));
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* Block (row, kv head): all chunks in turn. */
template <int TYPE> __global__ void __launch_bounds__(256) whole_kernel(ql_batch b, struct ql_attention_args a, struct ql_kv_cache c) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct work_shared &x = *(struct work_shared *)raw;
    int64_t row = blockIdx.x;
    int kv = blockIdx.y, pos = b.row_pos[row], h0, h1;
    const int *page = b.page + (int64_t)b.row_seg[row] * b.max_page;
    heads_of(a, kv, &h0, &h1);
    for (; h0 < h1; h0 += HEADS) {
        int nh = min(HEADS, h1 - h0);
        struct fold f[HEADS];
        load_q(x, a, row, h0, nh);
        for (int i = 0; i <= chunk_of(pos); i++) {
            int begin = chunk_begin(i), n = min(chunk_begin(i + 1), pos + 1) - begin;
            float o[HEADS][2];
            do_chunk<TYPE>(x, c, page, kv, begin, n, o);
            if (threadIdx.x < 128) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    fold_in(&f[h], i == 0, x.max[h], x.sum[h], o[h][0], o[h][1]);
                }
            }
            __syncthreads();
        }
        if (threadIdx.x < 128) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < nh) {
                    write_o(a, row, h0 + h, threadIdx.x, f[h]);
                }
            }
        }
    }
}

/* Partial results: [row][head][chunk] of D + 2 floats (values, maximum, sum). */
enum { PART = D + 4 };

/* Block (x, kv head, row): chunks x, x + gridDim.x, .. */
template <int TYPE>
__global__ void __launch_bounds__(256) split_kernel(ql_batch b, struct ql_attention_args a, struct ql_kv_cache c, int row0,
                                                    int n_chunk, float *part) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct work_shared &x = *(struct work_shared *)raw;
    int64_t row = row0 + blockIdx.z;
    int kv = blockIdx.y, pos = b.row_pos[row], h0, h1;
    if ((int)blockIdx.x > chunk_of(pos)) {
        return;
    }
    const int *page = b.page + (int64_t)b.row_seg[row] * b.max_page;
    heads_of(a, kv, &h0, &h1);
    for (; h0 < h1; h0 += HEADS) {
        int nh = min(HEADS, h1 - h0);
        load_q(x, a, row, h0, nh);
        for (int i = blockIdx.x; i <= chunk_of(pos); i += gridDim.x) {
            int begin = chunk_begin(i), n = min(chunk_begin(i + 1), pos + 1) - begin;
            float o[HEADS][2];
            do_chunk<TYPE>(x, c, page, kv, begin, n, o);
            if (threadIdx.x < 128) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    if (h < nh) {
                        float *to = part + (((int64_t)blockIdx.z * a.n_head + h0 + h) * n_chunk + i) * PART;
                        *(float2 *)(to + 2 * threadIdx.x) = make_float2(o[h][0], o[h][1]);
                        if (threadIdx.x == 0) {
                            *(float2 *)(to + D) = make_float2(x.max[h], x.sum[h]);
                        }
                    }
                }
            }
            __syncthreads();
        }
    }
}

/* Block (head, row): folds the chunks in rising order. */
__global__ void __launch_bounds__(128) fold_kernel(ql_batch b, struct ql_attention_args a, int row0, int n_chunk, const float *part) {
    int64_t row = row0 + blockIdx.y;
    int h = blockIdx.x, last = chunk_of(b.row_pos[row]);
    const float *from = part + ((int64_t)blockIdx.y * a.n_head + h) * n_chunk * PART;
    struct fold f;
#pragma unroll 4
    for (int i = 0; i <= last; i++) {
        float2 o = *(const float2 *)(from + (int64_t)i * PART + 2 * threadIdx.x), ms = *(const float2 *)(from + (int64_t)i * PART + D);
        fold_in(&f, i == 0, ms.x, ms.y, o.x, o.y);
    }
    write_o(a, row, h, threadIdx.x, f);
}

/* Generated rows whose chunks are spread over blocks at a time. */
enum { SPLIT_ROWS = 16 };

static size_t part_bytes(int64_t rows, int64_t n_head, int64_t n_chunk) {
    return (size_t)(rows * n_head * n_chunk) * PART * sizeof(float);
}

size_t ql_attention_cuda_scratch(const ql_shape *shape) {
    int64_t rows = shape->max_row < SPLIT_ROWS ? shape->max_row : SPLIT_ROWS;
    return shape->max_ctx > 0 ? part_bytes(rows, shape->n_head, chunk_of(shape->max_ctx - 1) + 1) : 0;
}

template <int TYPE> static ql_status run(ql_dev *dev, const ql_attention_args *a) {
    const ql_batch *b = a->batch;
    const ql_kv_cache *c = a->cache;
    cudaStream_t stream = cuda(dev)->stream;
    const int shared = (int)sizeof(struct work_shared);
    int n_chunk = chunk_of(b->max_page * QL_PAGE - 1) + 1;
    int64_t fit = (int64_t)(dev->scratch_bytes / part_bytes(1, a->n_head, n_chunk));
    if (b->phase == QL_PHASE_PROMPT || fit < 1) {
        CU_TRY(dev, cudaFuncSetAttribute(whole_kernel<TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attention");
        whole_kernel<TYPE><<<dim3((unsigned)b->n_row, (unsigned)c->n_kv_head), 256, shared, stream>>>(*b, *a, *c);
        return launched(dev, "attention");
    }
    CU_TRY(dev, cudaFuncSetAttribute(split_kernel<TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attention");
    int most = fit < SPLIT_ROWS ? (int)fit : SPLIT_ROWS;
    for (int r = 0; r < b->n_row; r += most) {
        int rows = b->n_row - r < most ? b->n_row - r : most;
        int spread = (int)ceil_div(2 * cuda(dev)->n_sm, (int64_t)rows * c->n_kv_head); /* two waves of blocks at most */
        spread = spread < n_chunk ? spread : n_chunk;
        split_kernel<TYPE><<<dim3((unsigned)spread, (unsigned)c->n_kv_head, (unsigned)rows), 256, shared, stream>>>(
            *b, *a, *c, r, n_chunk, (float *)dev->scratch);
        QL_TRY(launched(dev, "attention"));
        fold_kernel<<<dim3((unsigned)a->n_head, (unsigned)rows), 128, 0, stream>>>(*b, *a, r, n_chunk, (const float *)dev->scratch);
        QL_TRY(launched(dev, "attention: fold"));
    }
    return QL_OK;
}

ql_status ql_attention_cuda(ql_dev *dev, const ql_attention_args *a) {
    if (a->batch->n_row == 0 || a->n_head == 0) {
        return QL_OK;
    }
    switch (a->cache->type) {
    case QL_KV_F32: return run<QL_KV_F32>(dev, a);
    case QL_KV_BF16: return run<QL_KV_BF16>(dev, a);
    case QL_KV_FP8: return run<QL_KV_FP8>(dev, a);
    default: return run<QL_KV_F16>(dev, a);
    }
}
