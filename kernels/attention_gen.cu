/* attention of generated rows: contract in attention.h.
 *
 * Keys and values are taken in chunks whose boundaries are fixed positions: 128 long up to position 16,384, then 512, from
 * 131,072 on 1024, so that generation at any context has enough independent work and partial results stay small. Chunks
 * are spread over blocks, which fetch the next steps of 64 KB while they work on one; a second kernel folds the chunks in a
 * fixed order.
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

/* ---- on tensor cores ---------------------------------------------------------------------------------------------- */

/* Two E4M3 codes, bytes 0 and 1 of b, as f16. */
__device__ __forceinline__ uint32_t f16x2_of_e4m3(uint32_t b) {
    uint32_t d;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(d) : "h"((uint16_t)b));
#else
    uint32_t t = __byte_perm(b, 0, 0x4140), v = ((t & 0x007f007fu) << 7) | ((t & 0x00800080u) << 8);
    asm("mul.f16x2 %0,%1,%2;" : "=r"(d) : "r"(v), "r"(0x5c005c00u)); /* 2^8 */
#endif
    return d;
}

/* 8 and 4 channels as stored, and as f16 pairs without the FP8 scale. */
template <int TYPE> struct stored;

template <> struct stored<QL_KV_F16> {
    typedef uint4 eight;
    typedef uint2 four;
    enum { BYTES = 2, PAGES = 1, GROUPS = 1 };
    static __device__ __forceinline__ uint4 pairs(uint4 v) { return v; }
    static __device__ __forceinline__ uint2 pairs(uint2 v) { return v; }
};

template <> struct stored<QL_KV_FP8> {
    typedef uint2 eight;
    typedef uint32_t four;
    enum { BYTES = 1, PAGES = 2, GROUPS = D / FP8_GROUP };
    static __device__ __forceinline__ uint4 pairs(uint2 v) {
        return make_uint4(f16x2_of_e4m3(v.x), f16x2_of_e4m3(v.x >> 16), f16x2_of_e4m3(v.y), f16x2_of_e4m3(v.y >> 16));
    }
    static __device__ __forceinline__ uint2 pairs(uint32_t v) {
        return make_uint2(f16x2_of_e4m3(v), f16x2_of_e4m3(v >> 16));
    }
};

/* PAGES pages a step: 64 KB, more than a block computes on while as much arrives. SLOTS steps are in shared memory. */
template <int TYPE, int SLOTS> struct mma_shared {
    typedef stored<TYPE> form;
    enum { STEP = form::PAGES * QL_PAGE, ROW = D * form::BYTES };
    struct slot {
        uint8_t k[STEP][ROW], v[STEP][ROW]; /* 16-byte pieces, swizzled by k_piece and v_piece */
        uint2 k_scale[form::GROUPS > 1 ? STEP : 1], v_scale[form::GROUPS > 1 ? STEP : 1]; /* f16 of four groups */
    } slot[SLOTS];
    float q[HEADS][D];
    float p[form::GROUPS][HEADS][STEP + 4]; /* weights; FP8: times the value scale of each group of 64 channels */
    float max[8][HEADS], sum[8][HEADS];     /* of each warp's positions */
};

/* Where a piece of a row lies, so that lanes which read at once read different banks: of keys, lanes 4 g + c read row g and
 * 32 or 64 bytes side by side; of values, row 2 c and 32 bytes. */
template <int TYPE> __device__ __forceinline__ int k_piece(int row, int piece) {
    return piece ^ (TYPE == QL_KV_FP8 ? (row & 3) << 1 : (row & 1) << 2);
}
__device__ __forceinline__ int v_piece(int row, int piece) { return piece ^ (row >> 1 & 3) << 1; }

/* x and y as f16 pairs: the nearest, and 2^11 times what that lost. */
__device__ __forceinline__ void two_parts(float x, float y, uint32_t *hi, uint32_t *lo) {
    __half2 h = __floats2half2_rn(x, y);
    float2 f = __half22float2(h);
    *hi = *(uint32_t *)&h;
    *lo = pack_f16x2((x - f.x) * 2048.0f, (y - f.y) * 2048.0f);
}

/* A block's way through its chunks, a step at a time. */
struct walk {
    int chunk, at, end; /* positions [at, end) of the chunk are left */

    __device__ __forceinline__ void enter(int i, int pos) {
        chunk = i;
        at = i <= chunk_of(pos) ? chunk_begin(i) : 0;
        end = i <= chunk_of(pos) ? min(chunk_begin(i + 1), pos + 1) : 0;
    }
    __device__ __forceinline__ bool more() const { return at < end; }
    __device__ __forceinline__ void advance(int step, int stride, int pos) {
        at += step;
        if (at >= end) {
            enter(chunk + stride, pos);
        }
    }
};

/* Block (x, kv head, row): chunks x, x + gridDim.x, .. In both products the A operand's rows are 8 heads' first parts, then
 * their second parts; lane 4 g + c works for head g. Of a step's positions a warp has an eighth for the scores; for the
 * values it has 32 channels. */
template <int TYPE, int SLOTS>
__global__ void __launch_bounds__(256, 1)
    split_mma(ql_batch b, struct ql_attention_args a, struct ql_kv_cache cache, int row0, int n_chunk, float *part) {
    typedef stored<TYPE> form;
    typedef mma_shared<TYPE, SLOTS> shared;
    constexpr bool FP8 = TYPE == QL_KV_FP8;
    constexpr int STEP = shared::STEP, ROW = shared::ROW, TILES = STEP / 64; /* of 8 positions a warp */
    extern __shared__ __align__(16) unsigned char raw[];
    shared &x = *(shared *)raw;
    after_previous();
    int64_t row = row0 + blockIdx.z;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
    int kv = blockIdx.y, pos = b.row_pos[row], h0, h1;
    if ((int)blockIdx.x > chunk_of(pos)) {
        return;
    }
    const int *page = b.page + (int64_t)b.row_seg[row] * b.max_page;
    heads_of(a, kv, &h0, &h1);
    auto fetch = [&](int slot, const struct walk &w) {
        auto &to = x.slot[slot];
#pragma unroll
        for (int j = 0; j < form::PAGES; j++) {
            int at = w.at + j * QL_PAGE;
            if (at < w.end) {
                int64_t base = cache_row(page[at / QL_PAGE], cache.n_kv_head, kv, 0);
                const uint8_t *k = (const uint8_t *)cache.k + base * form::BYTES,
                              *v = (const uint8_t *)cache.v + base * form::BYTES;
#pragma unroll
                for (int i = 0; i < QL_PAGE * ROW / 16 / 256; i++) {
                    int e = i * 256 + tid, r = e / (ROW / 16), piece = e % (ROW / 16);
                    bool real = at + r < w.end; /* weights of other rows are 0, and so must be the values */
                    copy_async16_or_zero(to.k[j * QL_PAGE + r] + 16 * k_piece<TYPE>(r, piece), k + 16 * e, real);
                    copy_async16_or_zero(to.v[j * QL_PAGE + r] + 16 * v_piece(r, piece), v + 16 * e, real);
                }
                if (FP8 && tid < QL_PAGE) {
                    const uint8_t *scale = (const uint8_t *)(tid < 32 ? cache.k_scale : cache.v_scale);
                    copy_async16((tid < 32 ? to.k_scale : to.v_scale) + j * QL_PAGE + 2 * (tid & 31),
                                 scale + base / FP8_GROUP * 2 + 16 * (tid & 31));
                }
            }
        }
    };
    for (; h0 < h1; h0 += HEADS) {
        int nh = min(HEADS, h1 - h0), slot = 0;
        __syncthreads(); /* slots and q have been read */
        struct walk now, ahead;
        now.enter(blockIdx.x, pos);
        ahead = now;
        for (int i = 0; i < SLOTS - 1; i++) {
            if (ahead.more()) {
                fetch(i, ahead);
                ahead.advance(STEP, gridDim.x, pos);
            }
            commit_async();
        }
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
        bool first = true;
        float run_max = 0.0f, run_sum = 0.0f, o[4][2] = {};
        while (now.more()) {
            int n = now.end - now.at, chunk = now.chunk; /* positions from here on */
            if (SLOTS == 1) {
                __syncthreads();
                fetch(0, now);
                commit_async();
                wait_async<0>();
            } else {
                wait_async<(SLOTS > 1 ? SLOTS - 2 : 0)>();
            }
            __syncthreads(); /* the step is there; the one before it has been used */
            if (SLOTS > 1) {
                if (ahead.more()) {
                    fetch((slot + SLOTS - 1) % SLOTS, ahead);
                    ahead.advance(STEP, gridDim.x, pos);
                }
                commit_async();
            }
            const auto &in = x.slot[slot];
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            /* scores of positions 8 (TILES warp + t) + 2 c + e */
            float s[TILES][2];
            uint2 v_scale[TILES][2] = {};
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const uint8_t *k = in.k[8 * (TILES * warp + t) + g];
                float acc[2][4] = {};
                s[t][0] = s[t][1] = 0.0f;
                int column = 8 * (TILES * warp + t) + 2 * c;
                uint2 k_scale[2] = {};
#pragma unroll
                for (int e = 0; e < 2 && FP8; e++) {
                    if (column + e < n) {
                        k_scale[e] = in.k_scale[column + e];
                        v_scale[t][e] = in.v_scale[column + e];
                    }
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    constexpr int PER = 16 / sizeof(typename form::eight);
                    int at = 16 * k_piece<TYPE>(g, (4 * i + c) / PER) + (4 * i + c) % PER * 8;
                    uint4 kk = form::pairs(*(const typename form::eight *)(k + at));
                    float *to = acc[FP8 ? i >> 1 & 1 : i & 1];
                    mma_f16(to, q[2 * i], kk.x, kk.y);
                    mma_f16(to, q[2 * i + 1], kk.z, kk.w);
                    if (FP8 && (i & 1)) { /* 64 channels: their scale at the column's position */
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            uint32_t two = i < 4 ? k_scale[e].x : k_scale[e].y;
                            float f = f32_of_f16((uint16_t)(i & 2 ? two >> 16 : two));
                            s[t][e] = fmaf(fmaf(to[2 + e], 1.0f / 2048.0f, to[e]), f, s[t][e]);
                            to[e] = to[2 + e] = 0.0f;
                        }
                    }
                }
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float w =
                        FP8 ? s[t][e] : fmaf(acc[0][2 + e] + acc[1][2 + e], 1.0f / 2048.0f, acc[0][e] + acc[1][e]);
                    s[t][e] = column + e < n ? w * back : -INFINITY;
                }
            }
            float top = -INFINITY;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                top = fmaxf(top, fmaxf(s[t][0], s[t][1]));
            }
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
            for (int t = 0; t < TILES; t++) {
                float2 w = make_float2(expf(s[t][0] - top), expf(s[t][1] - top));
                sum += w.x + w.y;
#pragma unroll
                for (int j = 0; j < form::GROUPS; j++) {
                    float2 f = make_float2(1.0f, 1.0f);
                    if (FP8) {
                        uint32_t two0 = j < 2 ? v_scale[t][0].x : v_scale[t][0].y,
                                 two1 = j < 2 ? v_scale[t][1].x : v_scale[t][1].y;
                        f = make_float2(f32_of_f16((uint16_t)(j & 1 ? two0 >> 16 : two0)),
                                        f32_of_f16((uint16_t)(j & 1 ? two1 >> 16 : two1)));
                    }
                    *(float2 *)&x.p[j][g][8 * (TILES * warp + t) + 2 * c] = make_float2(w.x * f.x, w.y * f.y);
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
            for (int i = 0; i < STEP / 16; i++) {
                if (QL_PAGE * (i / 4) < n) {
                    float2 w0 = *(const float2 *)(weight + 16 * i + 2 * c),
                           w1 = *(const float2 *)(weight + 16 * i + 2 * c + 8);
                    uint32_t w[4];
                    two_parts(w0.x, w0.y, &w[0], &w[1]);
                    two_parts(w1.x, w1.y, &w[2], &w[3]);
                    uint2 v[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) { /* positions 2 c, 2 c + 1, 2 c + 8, 2 c + 9 */
                        constexpr int PER = 16 / sizeof(typename form::four);
                        int p = 16 * i + 2 * c + (e & 1) + 8 * (e >> 1), unit = 8 * warp + g;
                        v[e] = form::pairs(*(const typename form::four *)(in.v[p] + 16 * v_piece(p, unit / PER) +
                                                                          unit % PER * (16 / PER)));
                    }
                    mma_f16(acc[0], w, __byte_perm(v[0].x, v[1].x, 0x5410), __byte_perm(v[2].x, v[3].x, 0x5410));
                    mma_f16(acc[1], w, __byte_perm(v[0].x, v[1].x, 0x7632), __byte_perm(v[2].x, v[3].x, 0x7632));
                    mma_f16(acc[2], w, __byte_perm(v[0].y, v[1].y, 0x5410), __byte_perm(v[2].y, v[3].y, 0x5410));
                    mma_f16(acc[3], w, __byte_perm(v[0].y, v[1].y, 0x7632), __byte_perm(v[2].y, v[3].y, 0x7632));
                }
            }
            float new_max = first ? top : fmaxf(run_max, top);
            float old_part = first ? 0.0f : expf(run_max - new_max), new_part = expf(top - new_max);
            run_max = new_max;
            run_sum = fmaf(run_sum, old_part, sum * new_part);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    o[i][e] = fmaf(o[i][e], old_part, fmaf(acc[i][2 + e], 1.0f / 2048.0f, acc[i][e]) * new_part);
                }
            }
            now.advance(STEP, gridDim.x, pos);
            first = now.chunk != chunk;
            if (first && g < nh) { /* the chunk is complete */
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

/* ---- folding ------------------------------------------------------------------------------------------------------ */

enum { FOLDERS = 8 };

/* Block (head, row). Folder f adds up chunks f, f + 8, .. in rising order, weighted for the largest maximum; the folders'
 * sums are added in order. Thread 64 f + t has channels 4 t .. 4 t + 3. */
__global__ void __launch_bounds__(64 * FOLDERS)
    fold_kernel(ql_batch b, struct ql_attention_args a, int row0, int n_chunk, const float *part) {
    __shared__ float4 sums[FOLDERS][64];
    __shared__ float max[2 * FOLDERS], total[FOLDERS];
    after_previous();
    int64_t row = row0 + blockIdx.y;
    int h = blockIdx.x, last = chunk_of(b.row_pos[row]), t = threadIdx.x & 63, f = threadIdx.x >> 6;
    const float *from = part + ((int64_t)blockIdx.y * a.n_head + h) * n_chunk * PART;
    float top = -INFINITY;
    for (int i = threadIdx.x; i <= last; i += 64 * FOLDERS) {
        top = fmaxf(top, from[(int64_t)i * PART + D]);
    }
    top = warp_max(top);
    if ((threadIdx.x & 31) == 0) {
        max[threadIdx.x >> 5] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * FOLDERS; i++) {
        top = fmaxf(top, max[i]);
    }
    float4 o = make_float4(0, 0, 0, 0);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = f; i <= last; i += FOLDERS) {
        float4 v = *(const float4 *)(from + (int64_t)i * PART + 4 * t);
        float2 ms = *(const float2 *)(from + (int64_t)i * PART + D);
        float w = expf(ms.x - top);
        sum = fmaf(ms.y, w, sum);
        o.x = fmaf(v.x, w, o.x);
        o.y = fmaf(v.y, w, o.y);
        o.z = fmaf(v.z, w, o.z);
        o.w = fmaf(v.w, w, o.w);
    }
    sums[f][t] = o;
    if (t == 0) {
        total[f] = sum;
    }
    __syncthreads();
    if (f == 0) {
#pragma unroll
        for (int i = 1; i < FOLDERS; i++) {
            float4 v = sums[i][t];
            o.x += v.x;
            o.y += v.y;
            o.z += v.z;
            o.w += v.w;
            sum += total[i];
        }
        float4 gate = *(const float4 *)(a.qg + (row * a.n_head + h) * 2 * D + D + 4 * t);
        *(float4 *)(a.o + (row * a.n_head + h) * D + 4 * t) =
            make_float4((o.x / sum) * sigmoid(gate.x), (o.y / sum) * sigmoid(gate.y), (o.z / sum) * sigmoid(gate.z),
                        (o.w / sum) * sigmoid(gate.w));
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

template <int TYPE, int SLOTS>
static ql_status split_on_tensor_cores(ql_dev *dev, const ql_attention_args *a, dim3 grid, int row0, int n_chunk) {
    return launch(dev, "attention", split_mma<TYPE, SLOTS>, grid, 256, sizeof(mma_shared<TYPE, SLOTS>), *a->batch, *a,
                  *a->cache, row0, n_chunk, (float *)dev->scratch);
}

/* Three steps of 64 KB where a block may have 227 KB of shared memory, one elsewhere; before compute capability 8.0 not
 * even that. */
template <int TYPE> static ql_status split(ql_dev *dev, const ql_attention_args *a, dim3 grid, int row0, int n_chunk) {
    if constexpr (TYPE == QL_KV_F16 || TYPE == QL_KV_FP8) {
        int cc = cuda(dev)->cc;
        if (cc == 90 || cc == 100 || cc == 103) {
            return split_on_tensor_cores<TYPE, 3>(dev, a, grid, row0, n_chunk);
        }
        if (cc >= 80) {
            return split_on_tensor_cores<TYPE, 1>(dev, a, grid, row0, n_chunk);
        }
    }
    return launch(dev, "attention", split_fma<TYPE>, grid, 256, sizeof(struct work_shared), *a->batch, *a, *a->cache,
                  row0, n_chunk, (float *)dev->scratch);
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
        QL_TRY(split<TYPE>(dev, a, grid, r, n_chunk));
        QL_TRY(launch(dev, "attention: fold", fold_kernel, dim3((unsigned)a->n_head, (unsigned)rows), 64 * FOLDERS, 0,
                      *b, *a, r, n_chunk, (const float *)dev->scratch));
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
