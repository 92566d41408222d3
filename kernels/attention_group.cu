/* attention of prompt rows on warpgroup matrix instructions, precision bf16: contract in attention.h.
 *
 * A block has 128 (row, query head) pairs of a kv head. One warpgroup brings keys and values, 64 positions at a time, into
 * shared memory as the instructions read them; two multiply, 64 pairs each: while the products with one block's values run,
 * the next block's scores are turned into weights. q and the weights enter as one f16, with an F16 or FP8 cache (entries
 * are then code times scale, rounded to f16), or as one bf16 with a BF16 or F32 cache (entries of F32 rounded to bf16).
 *
 * 384 threads, 193 KB of shared memory: one block an SM.
 */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/wgmma.cuh"

enum { PAIRS = 128, KEYS = QL_PAGE, PANEL = KEYS * 128, SIDE = D / 64 * PANEL, CODES = KEYS * D };

/* Q of both warpgroups, then two blocks of keys and two of values; 64 channels of 64 rows a panel. */
struct group_shared {
    uint8_t q[2][SIDE], k[2][SIDE], v[2][SIDE];
    uint64_t full[2][2], empty[2][2]; /* [keys, values][which of two] */
};                                    /* FP8: then the codes of two sides */

template <int TYPE> struct form {
    static constexpr bool BF16 = TYPE == QL_KV_BF16 || TYPE == QL_KV_F32;
    static constexpr bool CONVERT = TYPE == QL_KV_FP8 || TYPE == QL_KV_F32;
    static constexpr int BYTES = TYPE == QL_KV_F32 ? 4 : TYPE == QL_KV_FP8 ? 1 : 2;
};

#if HAVE_WGMMA

/* Where 16-byte piece 0 .. 31 of a row lies in a side. */
__device__ __forceinline__ uint32_t side_at(int row, int piece) {
    return (piece >> 3) * PANEL + row * 128 + (((piece ^ row) & 7) << 4);
}

template <bool BF16> __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t d;
    if (BF16) {
        asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo));
    }
    return d;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / (1 + exp(-x)) to a few units of the last place; 0 for -inf. */
__device__ __forceinline__ float quick_sigmoid(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(1.0f + exp2_fast(-1.4426950408889634f * x)));
    return y;
}

/* Two E4M3 codes times a scale, as f16. */
__device__ __forceinline__ uint32_t scaled_pair(uint32_t codes, uint32_t scale) {
    uint32_t d;
    asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(d) : "h"((uint16_t)codes));
    return mul_f16x2(d, scale);
}

/* The fetching warpgroup: rows 0 .. n_valid - 1 of each block of positions, zeros after them. */
template <int TYPE>
__device__ __forceinline__ void bring(struct group_shared &x, const struct ql_kv_cache &cache, const int *page, int kv,
                                      int last, int tid) {
    int n_block = last / KEYS + 1, n_side = 0, next = page[0], lane = tid & 31;
    uint32_t full = shared_address(x.full), empty = shared_address(x.empty);
    auto arrive = [&](int side) { /* sides are counted: keys of block 0, values of block 0, keys of block 1, .. */
                                  fence_for_wgmma();
                                  __syncwarp();
                                  if (lane == 0) {
                                      barrier_arrive(full + 8 * (2 * (side & 1) + (side >> 1 & 1)));
                                  }
    };
    for (int j = 0; j < n_block; j++) {
        int64_t base = cache_row(next, cache.n_kv_head, kv, 0);
        int n_valid = last - j * KEYS + 1, stage = j & 1;
        next = j + 1 < n_block ? page[j + 1] : 0;
#pragma unroll
        for (int side = 0; side < 2; side++, n_side++) {
            uint8_t *to = side ? x.v[stage] : x.k[stage];
            const uint8_t *from = (const uint8_t *)(side ? cache.v : cache.k) + base * form<TYPE>::BYTES;
            uint32_t room = empty + 8 * (2 * side + stage), phase = (j >> 1 & 1) ^ 1;
            if (!form<TYPE>::CONVERT) {
                barrier_wait(room, phase);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    int r = (tid >> 5) + 4 * i, piece = lane;
                    copy_async16_or_zero(to + side_at(r, piece), from + r * (D * 2) + piece * 16, r < n_valid);
                }
                commit_async();
                wait_async<2>();
                if (n_side >= 2) {
                    arrive(n_side - 2);
                }
            } else {
#pragma unroll 1
                for (int part = 0; part < 4; part++) {
                    float4 a[4], b[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int r = (tid >> 5) + 4 * (4 * part + i);
                        const float4 *v = (const float4 *)from + r * (D / 4) + 2 * lane;
                        a[i] = r < n_valid ? v[0] : make_float4(0, 0, 0, 0);
                        b[i] = r < n_valid ? v[1] : make_float4(0, 0, 0, 0);
                    }
                    if (part == 0) {
                        barrier_wait(room, phase);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int r = (tid >> 5) + 4 * (4 * part + i);
                        *(uint4 *)(to + side_at(r, lane)) =
                            make_uint4(pack<true>(a[i].x, a[i].y), pack<true>(a[i].z, a[i].w),
                                       pack<true>(b[i].x, b[i].y), pack<true>(b[i].z, b[i].w));
                    }
                }
                arrive(n_side);
            }
        }
    }
    if (!form<TYPE>::CONVERT) {
        wait_async<1>();
        arrive(n_side - 2);
        wait_async<0>();
        arrive(n_side - 1);
    }
}

/* The same from E4M3 codes, which a thread copies for itself a side ahead. */
__device__ __forceinline__ void bring_fp8(struct group_shared &x, uint8_t (*raw)[CODES],
                                          const struct ql_kv_cache &cache, const int *page, int kv, int last, int tid) {
    int n_side = 2 * (last / KEYS + 1), next = page[0], lane = tid & 31, row = tid >> 4, piece = tid & 15;
    uint32_t full = shared_address(x.full), empty = shared_address(x.empty), scale[8];
    int64_t base = 0;
    auto fetch = [&](int n) {
        int block = n >> 1, n_valid = last - block * KEYS + 1;
        if ((n & 1) == 0) {
            base = cache_row(next, cache.n_kv_head, kv, 0);
            next = n + 2 < n_side ? page[block + 1] : 0;
        }
        const uint8_t *code = (const uint8_t *)(n & 1 ? cache.v : cache.k) + base + row * D + piece * 16;
        const uint16_t *s = (const uint16_t *)(n & 1 ? cache.v_scale : cache.k_scale) + base / FP8_GROUP +
                            row * (D / FP8_GROUP) + piece / 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bool real = row + 8 * i < n_valid;
            copy_async16_or_zero(raw[n & 1] + i * 2048 + tid * 16, code + i * 8 * D, real);
            scale[i] = real ? s[i * 8 * (D / FP8_GROUP)] : 0;
        }
    };
    fetch(0);
    commit_async();
    for (int n = 0; n < n_side; n++) {
        uint32_t now[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            now[i] = scale[i] * 0x10001u;
        }
        if (n + 1 < n_side) {
            fetch(n + 1);
        }
        commit_async();
        wait_async<1>();
        int stage = n >> 1 & 1, slot = 2 * (n & 1) + stage;
        uint8_t *to = (n & 1 ? x.v : x.k)[stage];
        barrier_wait(empty + 8 * slot, (n >> 2 & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint4 code = *(const uint4 *)(raw[n & 1] + i * 2048 + tid * 16);
            int r = row + 8 * i;
            *(uint4 *)(to + side_at(r, 2 * piece)) =
                make_uint4(scaled_pair(code.x, now[i]), scaled_pair(code.x >> 16, now[i]), scaled_pair(code.y, now[i]),
                           scaled_pair(code.y >> 16, now[i]));
            *(uint4 *)(to + side_at(r, 2 * piece + 1)) =
                make_uint4(scaled_pair(code.z, now[i]), scaled_pair(code.z >> 16, now[i]), scaled_pair(code.w, now[i]),
                           scaled_pair(code.w >> 16, now[i]));
        }
        fence_for_wgmma();
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(full + 8 * slot);
        }
    }
}

/* Running softmax of rows g and g + 8 of a warp. Scores times `scale` are exponents of 2; weights are 2^LIFT times what
 * they stand for, so that small ones are no subnormals of f16: the factor cancels. */
struct softmax {
    float scale[2], most[2], sum[2], keep[2];
    int pos[2];

    /* Scores of positions `at` .. at + 63 become weights; keep: what earlier sums are multiplied with. */
    template <bool BF16> __device__ __forceinline__ void weigh(float (&s)[KEYS / 8][4], int at, int c) {
        constexpr float LIFT = BF16 ? 0.0f : 15.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (at + KEYS - 1 > pos[i]) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        s[n][2 * i + e] = at + 8 * n + 2 * c + e <= pos[i] ? s[n][2 * i + e] : -INFINITY;
                    }
                }
            }
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            top = fmaxf(most[i], top * scale[i]);
            keep[i] = exp2_fast(most[i] - top);
            most[i] = top;
            float base = LIFT - top, add = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    s[n][2 * i + e] = exp2_fast(fmaf(s[n][2 * i + e], scale[i], base));
                    add += s[n][2 * i + e];
                }
            }
            sum[i] = fmaf(sum[i], keep[i], add);
        }
    }
};
#endif

/* Block (kv head, pair tile, the last first). */
template <int TYPE>
__global__ void __launch_bounds__(384, 1)
    group_kernel(ql_batch b, struct ql_attention_args a, struct ql_kv_cache cache) {
#if HAVE_WGMMA
    constexpr bool BF16 = form<TYPE>::BF16, CONVERT = form<TYPE>::CONVERT;
    extern __shared__ __align__(1024) uint8_t group_raw[];
    struct group_shared &x = *(struct group_shared *)(group_raw + (-shared_address(group_raw) & 1023));
    after_previous();
    int tid = threadIdx.x & 127, group = threadIdx.x >> 7, warp = tid >> 5, lane = tid & 31, g = lane >> 2,
        c = lane & 3;
    int kv = blockIdx.x, h0, h1;
    heads_of(a, kv, &h0, &h1);
    int nh = h1 - h0;
    struct pair_tile t;
    if (nh <= 0 || !find_pairs(b, gridDim.y - 1 - blockIdx.y, nh, PAIRS, &t)) {
        return;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) {
            barrier_init(shared_address(x.full) + 8 * i, 4);
            barrier_init(shared_address(x.empty) + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int row0 = b.seg_row[t.seg], pos0 = b.seg_pos[t.seg];
    int last = pos0 + (t.first + t.n - 1) / nh; /* position of the tile's last row */
    if (group == 0) {
        if (CONVERT) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        }
        const int *page = b.page + (int64_t)t.seg * b.max_page;
        if constexpr (TYPE == QL_KV_FP8) {
            bring_fp8(x, (uint8_t(*)[CODES])(&x + 1), cache, page, kv, last, tid);
        } else {
            bring<TYPE>(x, cache, page, kv, last, tid);
        }
        return;
    }
    if (CONVERT) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    int pair0 = t.first + 64 * (group - 1) + 16 * warp; /* of the warp */
    struct softmax run = {};
    const float *q_of = a.q + ((int64_t)row0 * a.n_head + h0) * D + 8 * lane; /* of pair 0, 8 channels a lane */
    int end = t.first + t.n, row = pair0 / nh, head = pair0 % nh;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float4 u[8], v[8];
#pragma unroll
        for (int r = 0; r < 8; r++) { /* all loads before the first use */
            const float4 *from = (const float4 *)(q_of + ((int64_t)row * a.n_head + head) * D);
            bool real = pair0 + 8 * half + r < end;
            u[r] = real ? from[0] : make_float4(0, 0, 0, 0);
            v[r] = real ? from[1] : make_float4(0, 0, 0, 0);
            head = head + 1 == nh ? 0 : head + 1;
            row += head == 0;
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
            float up = 1.0f, back = 1.0f;
            if (!BF16) {
                float most = fmaxf(fmaxf(fmaxf(fabsf(u[r].x), fabsf(u[r].y)), fmaxf(fabsf(u[r].z), fabsf(u[r].w))),
                                   fmaxf(fmaxf(fabsf(v[r].x), fabsf(v[r].y)), fmaxf(fabsf(v[r].z), fabsf(v[r].w))));
                up = scale_to_f16(warp_max(most), &back);
            }
            *(uint4 *)(x.q[group - 1] + side_at(16 * warp + 8 * half + r, lane)) =
                make_uint4(pack<BF16>(u[r].x * up, u[r].y * up), pack<BF16>(u[r].z * up, u[r].w * up),
                           pack<BF16>(v[r].x * up, v[r].y * up), pack<BF16>(v[r].z * up, v[r].w * up));
            if (r == g) {
                run.scale[half] = back * (0.0625f * 1.4426950408889634f);
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        run.pos[i] = pos0 + (pair0 + g + 8 * i) / nh;
        run.most[i] = -INFINITY;
    }
    fence_for_wgmma();
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");

    float o[D / 8][4] = {}, s[KEYS / 8][4];
    uint32_t full = shared_address(x.full), empty = shared_address(x.empty);
    uint64_t q = descriptor_of_rows(shared_address(x.q[group - 1]));
    auto scores = [&](int j) {
        barrier_wait(full + 8 * (j & 1), j >> 1 & 1);
        uint64_t k = descriptor_of_rows(shared_address(x.k[j & 1]));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            int at = ((i >> 2) * PANEL + (i & 3) * 32) >> 4;
            wgmma_rows<BF16>(s, q + at, k + at, i > 0);
        }
        wgmma_commit();
    };
    uint32_t w[KEYS / 16][4];
    auto values = [&](int j) {
        barrier_wait(full + 8 * (2 + (j & 1)), j >> 1 & 1);
        uint64_t v = descriptor_of_columns(shared_address(x.v[j & 1]), PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            wgmma_columns<BF16>(o, w[i], v + i * (16 * 128 >> 4));
        }
        wgmma_commit();
    };
    auto take_weights = [&]() {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) { /* row g, k 2c ..; row g + 8; row g, k 2c + 8 ..; row g + 8 */
                w[i][e] = pack<BF16>(s[2 * i + (e >> 1)][2 * (e & 1)], s[2 * i + (e >> 1)][2 * (e & 1) + 1]);
            }
        }
    };
    auto free_side = [&](int side, int j) {
        if (lane == 0) {
            barrier_arrive(empty + 8 * (2 * side + (j & 1)));
        }
    };
    int n_block = last / KEYS + 1;
    scores(0);
    wgmma_wait<0>();
    hold(s);
    free_side(0, 0);
    run.weigh<BF16>(s, 0, c);
    take_weights();
    for (int j = 1; j < n_block; j++) {
        scores(j);
        values(j - 1);
        wgmma_wait<1>();
        hold(s);
        free_side(0, j);
        run.weigh<BF16>(s, j * KEYS, c);
        wgmma_wait<0>();
        hold(o);
        free_side(1, j - 1);
        if (__any_sync(0xffffffffu, run.keep[0] != 1.0f || run.keep[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[n][0] *= run.keep[0];
                o[n][1] *= run.keep[0];
                o[n][2] *= run.keep[1];
                o[n][3] *= run.keep[1];
            }
        }
        take_weights();
    }
    values(n_block - 1);
    wgmma_wait<0>();
    hold(o);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int pair = pair0 + g + 8 * i;
        float sum = run.sum[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        sum = 1.0f / sum;
        if (pair < end) {
            int64_t h = (int64_t)(row0 + pair / nh) * a.n_head + h0 + pair % nh;
            const float *gate = a.qg + h * 2 * D + D + 2 * c;
            float *to = a.o + h * D + 2 * c;
#pragma unroll
            for (int n0 = 0; n0 < D / 8; n0 += 16) {
                float2 v[16];
#pragma unroll
                for (int n = 0; n < 16; n++) {
                    v[n] = *(const float2 *)(gate + 8 * (n0 + n));
                }
#pragma unroll
                for (int n = 0; n < 16; n++) {
                    *(float2 *)(to + 8 * (n0 + n)) = make_float2((o[n0 + n][2 * i] * sum) * quick_sigmoid(v[n].x),
                                                                 (o[n0 + n][2 * i + 1] * sum) * quick_sigmoid(v[n].y));
                }
            }
        }
    }
#else
    __trap(); /* compute capability 9.0 is built as 90a */
#endif
}

template <int TYPE> static ql_status run(ql_dev *dev, const ql_attention_args *a) {
    const ql_batch *b = a->batch;
    int nh = a->group < a->n_head ? a->group : a->n_head; /* most query heads of a kv head */
    unsigned tiles = (unsigned)((int64_t)b->n_row * nh / PAIRS + b->n_seg);
    return launch(dev, "attention", group_kernel<TYPE>, dim3((unsigned)a->cache->n_kv_head, tiles), 384,
                  sizeof(struct group_shared) + 1008 + (TYPE == QL_KV_FP8 ? 2 * CODES : 0), *b, *a, *a->cache);
}

ql_status ql_attention_group_cuda(ql_dev *dev, const ql_attention_args *a) {
    switch (a->cache->type) {
    case QL_KV_F32: return run<QL_KV_F32>(dev, a);
    case QL_KV_BF16: return run<QL_KV_BF16>(dev, a);
    case QL_KV_FP8: return run<QL_KV_FP8>(dev, a);
    default: return run<QL_KV_F16>(dev, a);
    }
}
