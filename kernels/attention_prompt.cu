/* attention of prompt rows: contract in attention.h.
 *
 *   flash       F16 caches: a block 128 (row, head) pairs of a kv head, keys in blocks of 64, tensor cores with q and the
 *               weights as two f16 parts of 11 bits each
 *   whole_fma   other caches: a block a row and kv head, chunks of attention_gen.cu in turn
 */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

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

/* ---- prompt rows on tensor cores --------------------------------------------------------------------------------- */

enum { PAIRS = 128, KEYS = 64, ROW_BYTES = D * 2 };

/* 16-byte chunks of a shared row of 256 f16, swizzled by row. */
__device__ __forceinline__ uint8_t *flash_at(uint8_t *base, int row, int chunk) {
    return base + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
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
    if (nh <= 0 || !find_pairs(b, gridDim.x - 1 - blockIdx.x, nh, PAIRS, &t)) {
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

static ql_status run_flash(ql_dev *dev, const ql_attention_args *a) {
    const ql_batch *b = a->batch;
    int nh = a->group < a->n_head ? a->group : a->n_head; /* most query heads of a kv head */
    unsigned tiles = (unsigned)((int64_t)b->n_row * nh / PAIRS + b->n_seg);
    return launch(dev, "attention", flash_kernel, dim3(tiles, (unsigned)a->cache->n_kv_head), 256,
                  (8 * 2 * 16 + 2 * KEYS) * ROW_BYTES, *b, *a, *a->cache);
}

template <int TYPE> static ql_status run_fma(ql_dev *dev, const ql_attention_args *a) {
    return launch(dev, "attention", whole_fma<TYPE>, dim3((unsigned)a->batch->n_row, (unsigned)a->cache->n_kv_head),
                  256, sizeof(struct work_shared), *a->batch, *a, *a->cache);
}

ql_status ql_attention_prompt_cuda(ql_dev *dev, const ql_attention_args *a) {
    int cc = cuda(dev)->cc;
    if (cc == 90 && (a->precision == QL_PREC_BF16 || a->precision == QL_PREC_FP8)) {
        return ql_attention_group_cuda(dev, a);
    }
    /* 192 KiB of shared memory a block: compute capability 9.0, 10.0 and the like */
    if (a->cache->type == QL_KV_F16 && (cc == 90 || cc == 100 || cc == 103)) {
        return run_flash(dev, a);
    }
    switch (a->cache->type) {
    case QL_KV_F32: return run_fma<QL_KV_F32>(dev, a);
    case QL_KV_BF16: return run_fma<QL_KV_BF16>(dev, a);
    case QL_KV_FP8: return run_fma<QL_KV_FP8>(dev, a);
    default: return run_fma<QL_KV_F16>(dev, a);
    }
}
