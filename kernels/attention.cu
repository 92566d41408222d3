/* attn_prep and attention on the device: contracts in attention.h.
 *
 * Generated rows: keys and values are taken in chunks whose boundaries are fixed positions: 128 long up to position
 * 16,384, then 512, from 131,072 on 1024, so that generation at any context has enough independent work and partial
 * results stay small. Chunks are spread over blocks; a second kernel folds them in rising order.
 *
 * F16 and FP8 caches meet q on tensor cores: keys and values (without the FP8 scales) are exact in f16, q and the weights
 * enter as two f16 parts of 11 bits each, so that the products are those of f32 to 2^-22. Other caches use f32 FMA.
 *
 *   split_mma, split_fma   generated rows, a block a kv head and chunk, 8 query heads at a time
 *   flash                  prompt rows, F16: a block 128 (row, head) pairs of a kv head, keys in blocks of 64
 *   whole_fma              prompt rows, other caches: a block a row and kv head
 */
#include "kernels/cuda/mma.cuh"

enum { D = 256, HEADS = 8, MAX_CHUNK = 1024, FP8_GROUP = 64 };

/* ---- attn_prep --------------------------------------------------------------------------------------------------- */

/* Index of the first channel of a cache row. */
__device__ __forceinline__ int64_t cache_row(int page, int n_kv, int head, int pos) {
    return (((int64_t)page * n_kv + head) * QL_PAGE + pos % QL_PAGE) * D;
}

/* Lane l holds channels l + 32 i of a row. */
__device__ void store_row(const struct ql_kv_cache &cache, void *to, void *scale, int64_t at, const float v[8],
                          int lane) {
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
__global__ void __launch_bounds__(256)
    prep_kernel(ql_batch b, struct ql_attn_prep_args a, struct ql_kv_cache cache, int64_t n) {
    __shared__ float row[8][D];
    after_previous();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = a.n_head + 2 * cache.n_kv_head;
    int64_t item = blockIdx.x * 8ll + warp;
    if (item >= n) {
        return;
    }
    int t = (int)(item / heads), h = (int)(item % heads);
    bool is_q = h < a.n_head, is_v = h >= a.n_head + cache.n_kv_head;
    int kv = is_q ? 0 : (h - a.n_head) % cache.n_kv_head, pos = b.row_pos[t];
    const float *x = is_q ? a.qg + ((int64_t)t * a.n_head + h) * 2 * D
                          : (is_v ? a.v : a.k) + ((int64_t)t * cache.n_kv_head + kv) * D;
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
    return launch(dev, "attn_prep", prep_kernel, (unsigned)ceil_div(n, 8), 256, 0, *a->batch, *a, *a->cache, n);
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

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* Block (row, kv head): all chunks in turn. */
template <int TYPE>
__global__ void __launch_bounds__(256) whole_fma(ql_batch b, struct ql_attention_args a, struct ql_kv_cache c) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct work_shared &x = *(struct work_shared *)raw;
    after_previous();
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
__global__ void __launch_bounds__(256)
    split_fma(ql_batch b, struct ql_attention_args a, struct ql_kv_cache c, int row0, int n_chunk, float *part) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct work_shared &x = *(struct work_shared *)raw;
    after_previous();
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

/* ---- generated rows on tensor cores ------------------------------------------------------------------------------ */

enum { MMA_BLOCK = 128 }; /* positions at a time: 16 a warp for the scores; for the values 32 channels a warp */

template <int TYPE> struct mma_shared {
    static constexpr int N = TYPE == QL_KV_FP8 ? D / FP8_GROUP : 1;
    float q[HEADS][D];
    float p[N][HEADS][MMA_BLOCK + 4];   /* weights; FP8: times the value scale of each group of 64 channels */
    float max[8][HEADS], sum[8][HEADS]; /* of each warp's positions */
};

/* Two E4M3 codes, bytes 0 and 1 of b, as f16. */
__device__ __forceinline__ uint32_t f16x2_of_e4m3(uint32_t b) {
    uint32_t t = __byte_perm(b, 0, 0x4140), v = ((t & 0x007f007fu) << 7) | ((t & 0x00800080u) << 8), d;
    asm("mul.f16x2 %0,%1,%2;" : "=r"(d) : "r"(v), "r"(0x5c005c00u)); /* 2^8 */
    return d;
}

/* 8 and 4 channels as stored, and as f16 pairs without the FP8 scale. */
template <int TYPE> struct stored;

template <> struct stored<QL_KV_F16> {
    typedef uint4 eight;
    typedef uint2 four;
    static constexpr int BYTES = 2;
    static __device__ __forceinline__ uint4 pairs(uint4 v) { return v; }
    static __device__ __forceinline__ uint2 pairs(uint2 v) { return v; }
};

template <> struct stored<QL_KV_FP8> {
    typedef uint2 eight;
    typedef uint32_t four;
    static constexpr int BYTES = 1;
    static __device__ __forceinline__ uint4 pairs(uint2 v) {
        return make_uint4(f16x2_of_e4m3(v.x), f16x2_of_e4m3(v.x >> 16), f16x2_of_e4m3(v.y), f16x2_of_e4m3(v.y >> 16));
    }
    static __device__ __forceinline__ uint2 pairs(uint32_t v) {
        return make_uint2(f16x2_of_e4m3(v), f16x2_of_e4m3(v >> 16));
    }
};

/* x and y as f16 pairs: the nearest, and 2^11 times what that lost. */
__device__ __forceinline__ void two_parts(float x, float y, uint32_t *hi, uint32_t *lo) {
    __half2 h = __floats2half2_rn(x, y);
    float2 f = __half22float2(h);
    *hi = *(uint32_t *)&h;
    *lo = pack_f16x2((x - f.x) * 2048.0f, (y - f.y) * 2048.0f);
}

/* Block (x, kv head, row): chunks x, x + gridDim.x, .. In both products the A operand's rows are 8 heads' first parts, then
 * their second parts; lane 4 g + c works for head g. */
template <int TYPE>
__global__ void __launch_bounds__(256)
    split_mma(ql_batch b, struct ql_attention_args a, struct ql_kv_cache cache, int row0, int n_chunk, float *part) {
    typedef stored<TYPE> form;
    constexpr bool FP8 = TYPE == QL_KV_FP8;
    __shared__ struct mma_shared<TYPE> x;
    after_previous();
    int64_t row = row0 + blockIdx.z;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
    int kv = blockIdx.y, pos = b.row_pos[row], h0, h1;
    if ((int)blockIdx.x > chunk_of(pos)) {
        return;
    }
    const int *page = b.page + (int64_t)b.row_seg[row] * b.max_page;
    heads_of(a, kv, &h0, &h1);
    for (; h0 < h1; h0 += HEADS) {
        int nh = min(HEADS, h1 - h0);
        __syncthreads();
        for (int i = tid; i < HEADS * D; i += 256) {
            x.q[i / D][i % D] = i / D < nh ? a.q[(row * a.n_head + h0) * D + i] : 0.0f;
        }
        __syncthreads();
        /* q of head g: channels 32 i + 8 c + 4 j .. + 3 are the lane's part of step 2 i + j */
        uint32_t q[16][4];
        float most = 0.0f, back;
        for (int i = 0; i < D; i += 4) {
            most = fmaxf(most, fabsf(x.q[g][i + c]));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        float up = scale_to_f16(most, &back);
        back *= 0.0625f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float4 v = *(const float4 *)&x.q[g][32 * (i / 2) + 8 * c + 4 * (i & 1)];
            two_parts(v.x * up, v.y * up, &q[i][0], &q[i][1]);
            two_parts(v.z * up, v.w * up, &q[i][2], &q[i][3]);
        }
        for (int chunk = blockIdx.x; chunk <= chunk_of(pos); chunk += gridDim.x) {
            int begin = chunk_begin(chunk), end = min(chunk_begin(chunk + 1), pos + 1);
            float run_max = 0.0f, run_sum = 0.0f, o[4][2] = {};
            for (int at = begin; at < end; at += MMA_BLOCK) {
                int n = end - at; /* positions from here on; those past the block do not matter */
                /* Loads go ahead of everything: keys of positions 16 warp + 8 t + g, values of channels 32 warp + 4 g .. + 3 */
                int64_t base0 = cache_row(page[at / QL_PAGE], cache.n_kv_head, kv, 0);
                int64_t base1 = n > QL_PAGE ? cache_row(page[at / QL_PAGE + 1], cache.n_kv_head, kv, 0) : base0;
                auto row_at = [&](int p) { return (p < QL_PAGE ? base0 : base1) + (p % QL_PAGE) * D; };
                typename form::eight k[2][8];
                typename form::four v[MMA_BLOCK / 16][4];
                uint2 k_scale[2][2] = {},
                      v_scale[2][2] = {}; /* of positions 16 warp + 8 t + 2 c + e, four groups each */
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    int p = 16 * warp + 8 * t + g;
                    const uint8_t *from = (const uint8_t *)cache.k + row_at(p) * form::BYTES;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        k[t][i] = p < n ? ((const typename form::eight *)from)[4 * i + c] : typename form::eight{};
                    }
                    for (int e = 0; e < 2 && FP8; e++) {
                        int column = 16 * warp + 8 * t + 2 * c + e;
                        if (column < n) {
                            k_scale[t][e] =
                                *(const uint2 *)((const uint16_t *)cache.k_scale + row_at(column) / FP8_GROUP);
                            v_scale[t][e] =
                                *(const uint2 *)((const uint16_t *)cache.v_scale + row_at(column) / FP8_GROUP);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < MMA_BLOCK / 16; i++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) { /* positions 2 c, 2 c + 1, 2 c + 8, 2 c + 9 */
                        int p = 16 * i + 2 * c + (e & 1) + 8 * (e >> 1);
                        const uint8_t *from = (const uint8_t *)cache.v + row_at(p) * form::BYTES;
                        v[i][e] = p < n ? ((const typename form::four *)from)[8 * warp + g] : typename form::four{};
                    }
                }
                /* scores of positions 16 warp + 8 t + 2 c + e */
                float s[2][2];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    float acc[4] = {};
                    s[t][0] = s[t][1] = 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        uint4 kk = form::pairs(k[t][i]);
                        mma_f16(acc, q[2 * i], kk.x, kk.y);
                        mma_f16(acc, q[2 * i + 1], kk.z, kk.w);
                        if (FP8 && (i & 1)) { /* 64 channels: their scale at the column's position */
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                uint32_t two = i < 4 ? k_scale[t][e].x : k_scale[t][e].y;
                                float f = f32_of_f16((uint16_t)(i & 2 ? two >> 16 : two));
                                s[t][e] = fmaf(fmaf(acc[2 + e], 1.0f / 2048.0f, acc[e]), f, s[t][e]);
                                acc[e] = acc[2 + e] = 0.0f;
                            }
                        }
                    }
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float w = FP8 ? s[t][e] : fmaf(acc[2 + e], 1.0f / 2048.0f, acc[e]);
                        s[t][e] = 16 * warp + 8 * t + 2 * c + e < n ? w * back : -INFINITY;
                    }
                }
                float top = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                if (c == 0) {
                    x.max[warp][g] = top;
                }
                __syncthreads();
                top = x.max[0][g];
#pragma unroll
                for (int w = 1; w < 8; w++) {
                    top = fmaxf(top, x.max[w][g]);
                }
                float sum = 0.0f;
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    float2 w = make_float2(expf(s[t][0] - top), expf(s[t][1] - top));
                    sum += w.x + w.y;
                    for (int j = 0; j < x.N; j++) {
                        float2 f = make_float2(1.0f, 1.0f);
                        if (FP8) {
                            uint32_t two0 = j < 2 ? v_scale[t][0].x : v_scale[t][0].y,
                                     two1 = j < 2 ? v_scale[t][1].x : v_scale[t][1].y;
                            f = make_float2(f32_of_f16((uint16_t)(j & 1 ? two0 >> 16 : two0)),
                                            f32_of_f16((uint16_t)(j & 1 ? two1 >> 16 : two1)));
                        }
                        *(float2 *)&x.p[j][g][16 * warp + 8 * t + 2 * c] = make_float2(w.x * f.x, w.y * f.y);
                    }
                }
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (c == 0) {
                    x.sum[warp][g] = sum;
                }
                __syncthreads();
                sum = x.sum[0][g];
#pragma unroll
                for (int w = 1; w < 8; w++) {
                    sum += x.sum[w][g];
                }
                /* column g of tile i: channel 32 warp + 4 g + i */
                float acc[4][4] = {};
                const float *weight = x.p[FP8 ? warp / 2 : 0][g];
#pragma unroll
                for (int i = 0; i < MMA_BLOCK / 16; i++) {
                    float2 w0 = *(const float2 *)(weight + 16 * i + 2 * c),
                           w1 = *(const float2 *)(weight + 16 * i + 2 * c + 8);
                    uint32_t w[4];
                    two_parts(w0.x, w0.y, &w[0], &w[1]);
                    two_parts(w1.x, w1.y, &w[2], &w[3]);
                    uint2 a0 = form::pairs(v[i][0]), a1 = form::pairs(v[i][1]), a2 = form::pairs(v[i][2]),
                          a3 = form::pairs(v[i][3]);
                    mma_f16(acc[0], w, __byte_perm(a0.x, a1.x, 0x5410), __byte_perm(a2.x, a3.x, 0x5410));
                    mma_f16(acc[1], w, __byte_perm(a0.x, a1.x, 0x7632), __byte_perm(a2.x, a3.x, 0x7632));
                    mma_f16(acc[2], w, __byte_perm(a0.y, a1.y, 0x5410), __byte_perm(a2.y, a3.y, 0x5410));
                    mma_f16(acc[3], w, __byte_perm(a0.y, a1.y, 0x7632), __byte_perm(a2.y, a3.y, 0x7632));
                }
                float new_max = at == begin ? top : fmaxf(run_max, top);
                float old_part = at == begin ? 0.0f : expf(run_max - new_max), new_part = expf(top - new_max);
                run_max = new_max;
                run_sum = fmaf(run_sum, old_part, sum * new_part);
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        o[i][e] = fmaf(o[i][e], old_part, fmaf(acc[i][2 + e], 1.0f / 2048.0f, acc[i][e]) * new_part);
                    }
                }
                __syncthreads(); /* before the next block writes x.max and x.p */
            }
            if (g < nh) {
                float *to = part + (((int64_t)blockIdx.z * a.n_head + h0 + g) * n_chunk + chunk) * PART;
#pragma unroll
                for (int e = 0; e < 2; e++) { /* column 2 c + e: channels 32 warp + 4 (2 c + e) .. + 3 */
                    *(float4 *)(to + 32 * warp + 4 * (2 * c + e)) = make_float4(o[0][e], o[1][e], o[2][e], o[3][e]);
                }
                if (warp == 0 && c == 0) {
                    *(float2 *)(to + D) = make_float2(run_max, run_sum);
                }
            }
        }
    }
}

/* Block (head, row): folds the chunks in rising order. */
__global__ void __launch_bounds__(128)
    fold_kernel(ql_batch b, struct ql_attention_args a, int row0, int n_chunk, const float *part) {
    after_previous();
    int64_t row = row0 + blockIdx.y;
    int h = blockIdx.x, last = chunk_of(b.row_pos[row]);
    const float *from = part + ((int64_t)blockIdx.y * a.n_head + h) * n_chunk * PART;
    struct fold f;
#pragma unroll 4
    for (int i = 0; i <= last; i++) {
        float2 o = *(const float2 *)(from + (int64_t)i * PART + 2 * threadIdx.x),
               ms = *(const float2 *)(from + (int64_t)i * PART + D);
        fold_in(&f, i == 0, ms.x, ms.y, o.x, o.y);
    }
    write_o(a, row, h, threadIdx.x, f);
}

/* ---- prompt rows on tensor cores --------------------------------------------------------------------------------- */

enum { PAIRS = 128, KEYS = 64, ROW_BYTES = D * 2 };

/* 16-byte chunks of a shared row of 256 f16, swizzled by row. */
__device__ __forceinline__ uint8_t *flash_at(uint8_t *base, int row, int chunk) {
    return base + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

/* PAIRS (row, head) pairs of a segment, counted row by row over the kv head's query heads. */
struct pair_tile {
    int seg, first, n;
};

__device__ __forceinline__ bool find_pairs(const ql_batch &b, int slot, int n_head, struct pair_tile *t) {
    for (int s = 0; s < b.n_seg; s++) {
        int pairs = (b.seg_row[s + 1] - b.seg_row[s]) * n_head, count = (pairs + PAIRS - 1) / PAIRS;
        if (slot < count) {
            t->seg = s;
            t->first = slot * PAIRS;
            t->n = min(PAIRS, pairs - slot * PAIRS);
            return true;
        }
        slot -= count;
    }
    return false;
}

/* exp(d) 2^12 for d <= 0: the factor keeps both f16 parts of small weights out of the subnormals, and cancels. */
__device__ __forceinline__ float weight_of(float d) { return exp2f(d * 1.4426950408889634f) * 4096.0f; }

/* Block (pair tile, kv head). Warp w has pairs 16 w .. 16 w + 15. Keys and values of 64 positions at a time lie in shared
 * memory; the next keys come while the values are used and the other way round. */
__global__ void __launch_bounds__(256, 1)
    flash_kernel(ql_batch b, struct ql_attention_args a, struct ql_kv_cache cache) {
    extern __shared__ __align__(128) uint8_t flash_raw[]; /* q [8 warps][2 parts][16 rows], k [64 rows], v [64 rows] */
    after_previous();
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3, kv = blockIdx.y, h0, h1;
    heads_of(a, kv, &h0, &h1);
    int nh = h1 - h0;
    struct pair_tile t;
    if (nh <= 0 || !find_pairs(b, gridDim.x - 1 - blockIdx.x, nh, &t)) {
        return;
    }
    uint8_t *q_sm = flash_raw + warp * (2 * 16 * ROW_BYTES), *k_sm = flash_raw + 8 * 2 * 16 * ROW_BYTES,
            *v_sm = k_sm + KEYS * ROW_BYTES;
    const int *page = b.page + (int64_t)t.seg * b.max_page;
    int row0 = b.seg_row[t.seg], pos0 = b.seg_pos[t.seg];
    int last = pos0 + (t.first + t.n - 1) / nh; /* position of the tile's last row */
    auto fetch = [&](uint8_t *to, const void *from, int at) {
        int64_t base = cache_row(page[at / QL_PAGE], cache.n_kv_head, kv, 0);
        for (int i = tid; i < KEYS * 32; i += 256) {
            int r = i >> 5, chunk = i & 31;
            copy_async16_or_zero(flash_at(to, r, chunk), (const uint16_t *)from + base + r * D + chunk * 8,
                                 at + r <= last);
        }
        commit_async();
    };
    fetch(k_sm, cache.k, 0);
    fetch(v_sm, cache.v, 0);

    /* q of the warp's pairs in two parts; the inverse of the scale of rows g and g + 8 */
    float back[2] = {1.0f, 1.0f};
    int at_row[2];
    for (int r = 0; r < 16; r++) {
        int pair = t.first + warp * 16 + r;
        float v[8], most = 0.0f, inverse;
        const float *from = a.q + ((int64_t)(row0 + pair / nh) * a.n_head + h0 + pair % nh) * D + 8 * lane;
        bool real = pair < t.first + t.n;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = real ? from[i] : 0.0f;
            most = fmaxf(most, fabsf(v[i]));
        }
        float up = scale_to_f16(warp_max(most), &inverse);
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = v[2 * i] * up, y = v[2 * i + 1] * up;
            __half2 h = __floats2half2_rn(x, y);
            float2 f = __half22float2(h);
            hi[i] = *(uint32_t *)&h;
            lo[i] = pack_f16x2(x - f.x, y - f.y);
        }
        *(uint4 *)flash_at(q_sm, r, lane) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        *(uint4 *)flash_at(q_sm + 16 * ROW_BYTES, r, lane) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        back[r >> 3] = (r & 7) == g ? inverse * 0.0625f : back[r >> 3];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        at_row[i] = pos0 + (t.first + warp * 16 + g + 8 * i) / nh;
    }
    float o[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    __syncwarp();

    for (int at = 0; at <= last; at += KEYS) {
        wait_async<1>();
        __syncthreads();
        float s[KEYS / 8][4];
#pragma unroll
        for (int half = 0; half < 2; half++) { /* the two parts of q are added apart: their sums differ by 2^11 */
            float first[KEYS / 16][4] = {}, second[KEYS / 16][4] = {};
#pragma unroll 4
            for (int i = 0; i < D / 16; i++) {
                uint32_t hi[4], lo[4];
                load_matrix4(hi, flash_at(q_sm, lane & 15, 2 * i + (lane >> 4)));
                load_matrix4(lo, flash_at(q_sm + 16 * ROW_BYTES, lane & 15, 2 * i + (lane >> 4)));
#pragma unroll
                for (int n = 0; n < KEYS / 16; n += 2) {
                    uint32_t k[4];
                    load_matrix4(k, flash_at(k_sm, KEYS / 2 * half + 8 * n + (lane & 7) + (lane >> 4) * 8,
                                             2 * i + (lane >> 3 & 1)));
                    mma_f16(first[n], hi, k[0], k[1]);
                    mma_f16(second[n], lo, k[0], k[1]);
                    mma_f16(first[n + 1], hi, k[2], k[3]);
                    mma_f16(second[n + 1], lo, k[2], k[3]);
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[KEYS / 16 * half + n][e] = first[n][e] + second[n][e];
                }
            }
        }
        __syncthreads();
        if (at + KEYS <= last) {
            fetch(k_sm, cache.k, at + KEYS);
        } else {
            commit_async();
        }
        /* rows g (i = 0) and g + 8: scores, running maximum, weights in place of scores */
        float keep[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = most[i];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *v = &s[n][2 * i + e];
                    *v = at + 8 * n + 2 * c + e <= at_row[i] ? *v * back[i] : -INFINITY;
                    top = fmaxf(top, *v);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            keep[i] = exp2f((most[i] - top) * 1.4426950408889634f);
            keep[i] = most[i] == -INFINITY ? 0.0f : keep[i];
            most[i] = top;
            sum[i] *= keep[i];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *v = &s[n][2 * i + e];
                    *v = weight_of(*v - top);
                    sum[i] += *v;
                }
            }
        }
        if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[n][0] *= keep[0];
                o[n][1] *= keep[0];
                o[n][2] *= keep[1];
                o[n][3] *= keep[1];
            }
        }
        wait_async<1>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            uint32_t hi[4], lo[4];
#pragma unroll
            for (int j = 0; j < 4; j++) { /* row g, k 2c ..; row g + 8; row g, k 2c + 8 ..; row g + 8 */
                float x = s[2 * k + (j >> 1)][2 * (j & 1)], y = s[2 * k + (j >> 1)][2 * (j & 1) + 1];
                __half2 h = __floats2half2_rn(x, y);
                float2 f = __half22float2(h);
                hi[j] = *(uint32_t *)&h;
                lo[j] = pack_f16x2(x - f.x, y - f.y);
            }
#pragma unroll
            for (int n = 0; n < D / 8; n += 2) {
                uint32_t v[4];
                load_matrix4_transposed(v, flash_at(v_sm, 16 * k + (lane & 15), n + (lane >> 4)));
                mma_f16(o[n], hi, v[0], v[1]);
                mma_f16(o[n], lo, v[0], v[1]);
                mma_f16(o[n + 1], hi, v[2], v[3]);
                mma_f16(o[n + 1], lo, v[2], v[3]);
            }
        }
        __syncthreads();
        if (at + KEYS <= last) {
            fetch(v_sm, cache.v, at + KEYS);
        } else {
            commit_async();
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int pair = t.first + warp * 16 + g + 8 * i;
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        if (pair < t.first + t.n) {
            int64_t h = (int64_t)(row0 + pair / nh) * a.n_head + h0 + pair % nh;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                float2 gate = *(const float2 *)(a.qg + h * 2 * D + D + 8 * n + 2 * c);
                *(float2 *)(a.o + h * D + 8 * n + 2 * c) =
                    make_float2((o[n][2 * i] / sum[i]) * sigmoid(gate.x), (o[n][2 * i + 1] / sum[i]) * sigmoid(gate.y));
            }
        }
    }
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

static ql_status run_flash(ql_dev *dev, const ql_attention_args *a) {
    const ql_batch *b = a->batch;
    int nh = a->group < a->n_head ? a->group : a->n_head; /* most query heads of a kv head */
    unsigned tiles = (unsigned)((int64_t)b->n_row * nh / PAIRS + b->n_seg);
    return launch(dev, "attention", flash_kernel, dim3(tiles, (unsigned)a->cache->n_kv_head), 256,
                  (8 * 2 * 16 + 2 * KEYS) * ROW_BYTES, *b, *a, *a->cache);
}

template <int TYPE> static ql_status run(ql_dev *dev, const ql_attention_args *a) {
    constexpr bool MMA = TYPE == QL_KV_F16 || TYPE == QL_KV_FP8;
    const ql_batch *b = a->batch;
    const ql_kv_cache *c = a->cache;
    /* 192 KiB of shared memory a block: compute capability 9.0, 10.0 and the like */
    if (b->phase == QL_PHASE_PROMPT && TYPE == QL_KV_F16 &&
        (cuda(dev)->cc == 90 || cuda(dev)->cc == 100 || cuda(dev)->cc == 103)) {
        return run_flash(dev, a);
    }
    int n_chunk = chunk_of(b->max_page * QL_PAGE - 1) + 1;
    int64_t fit = (int64_t)(dev->scratch_bytes / part_bytes(1, a->n_head, n_chunk));
    if (b->phase == QL_PHASE_PROMPT) {
        return launch(dev, "attention", whole_fma<TYPE>, dim3((unsigned)b->n_row, (unsigned)c->n_kv_head), 256,
                      sizeof(struct work_shared), *b, *a, *c);
    }
    if (fit < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "attention: scratch is %zu bytes, %d pages need %zu",
                       dev->scratch_bytes, b->max_page, part_bytes(1, a->n_head, n_chunk));
    }
    int most = fit < SPLIT_ROWS ? (int)fit : SPLIT_ROWS;
    for (int r = 0; r < b->n_row; r += most) {
        int rows = b->n_row - r < most ? b->n_row - r : most;
        int spread = (int)ceil_div(cuda(dev)->n_sm, (int64_t)rows * c->n_kv_head);
        spread = spread < n_chunk ? spread : n_chunk;
        dim3 grid((unsigned)spread, (unsigned)c->n_kv_head, (unsigned)rows);
        if (MMA) {
            QL_TRY(launch(dev, "attention", split_mma < MMA ? TYPE : QL_KV_F16 >, grid, 256, 0, *b, *a, *c, r, n_chunk,
                          (float *)dev->scratch));
        } else {
            QL_TRY(launch(dev, "attention", split_fma<TYPE>, grid, 256, sizeof(struct work_shared), *b, *a, *c, r,
                          n_chunk, (float *)dev->scratch));
        }
        QL_TRY(launch(dev, "attention: fold", fold_kernel, dim3((unsigned)a->n_head, (unsigned)rows), 128, 0, *b, *a, r,
                      n_chunk, (const float *)dev->scratch));
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
