/* attention of generated rows: contract in attention.h.
 *
 * Keys and values are taken in chunks whose boundaries are fixed positions: 128 long up to position 16,384, then 512, from
 * 131,072 on 1024, so that generation at any context has enough independent work and partial results stay small. Chunks
 * are spread over blocks; a second kernel folds them in rising order.
 *
 * F16 and FP8 caches meet q on tensor cores: keys and values (without the FP8 scales) are exact in f16, q and the weights
 * enter as two f16 parts of 11 bits each, so that the products are those of f32 to 2^-22. Other caches use f32 FMA.
 *
 *   split_mma, split_fma   a block a kv head and chunk, 8 query heads at a time
 */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

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
    int n_chunk = chunk_of(b->max_page * QL_PAGE - 1) + 1;
    int64_t fit = (int64_t)(dev->scratch_bytes / part_bytes(1, a->n_head, n_chunk));
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
        if constexpr (TYPE == QL_KV_F16 || TYPE == QL_KV_FP8) {
            QL_TRY(
                launch(dev, "attention", split_mma<TYPE>, grid, 256, 0, *b, *a, *c, r, n_chunk, (float *)dev->scratch));
        } else {
            QL_TRY(launch(dev, "attention", split_fma<TYPE>, grid, 256, sizeof(struct work_shared), *b, *a, *c, r,
                          n_chunk, (float *)dev->scratch));
        }
        QL_TRY(launch(dev, "attention: fold", fold_kernel, dim3((unsigned)a->n_head, (unsigned)rows), 128, 0, *b, *a, r,
                      n_chunk, (const float *)dev->scratch));
    }
    return QL_OK;
}

ql_status ql_attention_gen_cuda(ql_dev *dev, const ql_attention_args *a) {
    switch (a->cache->type) {
    case QL_KV_F32: return run<QL_KV_F32>(dev, a);
    case QL_KV_BF16: return run<QL_KV_BF16>(dev, a);
    case QL_KV_FP8: return run<QL_KV_FP8>(dev, a);
    default: return run<QL_KV_F16>(dev, a);
    }
}
