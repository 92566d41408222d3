/* Generated rows against F16 and FP8 caches on tensor cores: one step of 64 (F16) or 128 positions (FP8), by a block of 256 threads.
 *
 * Keys and values, without the FP8 scales, are exact in f16; q and the weights enter as two f16 parts of 11 bits each, so that the
 * products are those of f32 to 2^-22. In both products the A operand's rows are 8 heads' first parts, then their second parts; lane
 * 4 g + c works for head g. Of a step's positions a warp has an eighth for the scores; for the values it has 32 channels.
 */
#ifndef QL_KERNELS_CUDA_ATTENTION_MMA_CUH
#define QL_KERNELS_CUDA_ATTENTION_MMA_CUH

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

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

/* PAGES pages a step: 64 KB, more than a block computes on while as much arrives. */
template <int TYPE> struct step_form : stored<TYPE> {
    enum {
        STEP = stored<TYPE>::PAGES * QL_PAGE,
        ROW = D * stored<TYPE>::BYTES,
        TILES = STEP / 64
    }; /* tiles of 8 positions a warp */
};

/* A step's keys and values in shared memory. */
template <int TYPE> struct step_slot {
    typedef step_form<TYPE> form;
    uint8_t k[form::STEP][form::ROW], v[form::STEP][form::ROW]; /* 16-byte pieces, swizzled by k_piece and v_piece */
    uint2 k_scale[form::GROUPS > 1 ? form::STEP : 1],
        v_scale[form::GROUPS > 1 ? form::STEP : 1]; /* f16 of four groups */
};

enum { Q_ROW = D / 4 + 1 }; /* pieces of a head, so that lanes which read at once read different banks */

/* What the warps of a step tell each other. */
template <int TYPE> struct step_work {
    typedef step_form<TYPE> form;
    uint4 q[HEADS][Q_ROW]; /* four channels each: first parts, second parts, of two; the same of the other two */
    float back[HEADS];     /* what scores are multiplied with */
    float p[form::GROUPS][HEADS][form::STEP + 4]; /* weights; FP8: times the value scale of each group of 64 channels */
    float max[8][HEADS], sum[8][HEADS];           /* of each warp's positions */
};

/* Where a piece of a row lies, so that lanes which read at once read different banks: of keys, lanes 4 g + c read row g and
 * 32 or 64 bytes side by side; of values, row 2 c and 32 bytes. */
template <int TYPE> __device__ __forceinline__ int k_piece(int row, int piece) {
    return piece ^ (TYPE == QL_KV_FP8 ? (row & 3) << 1 : (row & 1) << 2);
}
__device__ __forceinline__ int v_piece(int row, int piece) { return piece ^ (row >> 1 & 3) << 1; }

/* Copies a page of a head's keys or values from memory, as a block: `place` is where k_piece or v_piece puts the piece `piece` of the
 * thread's rows. Rows before `own` are copied, rows from n on become 0 (their weights are 0, and so must be their values), those
 * between are left. */
template <int TYPE>
__device__ __forceinline__ void fetch_page(uint8_t *to, const uint8_t *from, int place, int piece, int n, int own) {
#if __CUDA_ARCH__ >= 800
    constexpr int ROW = step_form<TYPE>::ROW, ROWS = 256 * 16 / ROW; /* at a time; a thread's rows are swizzled alike */
    int row = threadIdx.x / (ROW / 16);
    uint32_t there = (uint32_t)__cvta_generic_to_shared(to) + row * ROW + 16 * place;
    from += row * ROW + 16 * piece;
    if (min(n, own) >= QL_PAGE) {
#pragma unroll
        for (int i = 0; i < QL_PAGE / ROWS; i++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there + i * ROWS * ROW),
                         "l"(from + i * ROWS * ROW)
                         : "memory");
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < QL_PAGE / ROWS; i++) {
            if (row < own || row >= n) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(there), "l"(from),
                             "r"(row < n ? 16 : 0)
                             : "memory");
            }
            there += ROWS * ROW;
            from += ROWS * ROW;
            row += ROWS;
        }
    }
#endif
}

/* x and y as f16 pairs: the nearest, and 2^11 times what that lost. */
__device__ __forceinline__ void two_parts(float x, float y, uint32_t *hi, uint32_t *lo) {
    __half2 h = __floats2half2_rn(x, y);
    float2 f = __half22float2(h);
    *hi = *(uint32_t *)&h;
    *lo = pack_f16x2((x - f.x) * 2048.0f, (y - f.y) * 2048.0f);
}

/* q of a head, by a warp: lane l has channels 4 l .. 4 l + 3 in a and 128 more in b. */
template <int TYPE>
__device__ __forceinline__ void put_q(struct step_work<TYPE> &x, int head, float4 a, float4 b, int lane) {
    float most = fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w))),
                       fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w))));
    float back, up = scale_to_f16(warp_max(most), &back);
    uint4 v, w;
    two_parts(a.x * up, a.y * up, &v.x, &v.y);
    two_parts(a.z * up, a.w * up, &v.z, &v.w);
    two_parts(b.x * up, b.y * up, &w.x, &w.y);
    two_parts(b.z * up, b.w * up, &w.z, &w.w);
    x.q[head][lane] = v;
    x.q[head][32 + lane] = w;
    if (lane == 0) {
        x.back[head] = back * 0.0625f;
    }
}

/* The lane's part of all of q: channels 32 i + 8 c + 4 j .. + 3 of head g for step 2 i + j of the product. */
template <int TYPE> __device__ __forceinline__ void take_q(const struct step_work<TYPE> &x, uint32_t (&q)[16][4]) {
    int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint4 v = x.q[g][8 * (i / 2) + 2 * c + (i & 1)];
        q[i][0] = v.x, q[i][1] = v.y, q[i][2] = v.z, q[i][3] = v.w;
    }
}

/* ---- rows of this step --------------------------------------------------------------------------------------------- */

/* Kernels that are prep and attention in one make the queries of a kv head in each of its blocks, and the keys and values of the row's
 * sequence of this step, which nobody else may have written yet; the block that has the row's own position writes those of the row. */

enum { ROTARY = 64 };

/* A row: its position, its segment, the segment's first row and that one's position, the segment's pages. */
struct row_place {
    int row, pos, seg, row0, pos0;
    const int *page;

    __device__ __forceinline__ row_place(const ql_batch &b, int i) {
        row = seg = row0 = i;
        pos = pos0 = b.row_pos[i];
        if (b.n_seg != b.n_row) {
            seg = b.row_seg[i];
            row0 = b.seg_row[seg];
            pos0 = b.seg_pos[seg];
        }
        page = b.page + (int64_t)seg * b.max_page;
    }
};

/* Keys and values as stored, of rows row0 .. */
template <int TYPE> struct own_rows {
    uint8_t row[2][QL_SHORT_ROWS][step_form<TYPE>::ROW];
    uint2 scale[2][QL_SHORT_ROWS];
};

/* What a warp makes one of: item i < nh is query head h0 + i, then keys and values of row row0, of the next, .. Lane l has channels
 * l + 32 i. */
struct prep_item {
    float v[8], w[8];
    float2 turn;

    __device__ __forceinline__ void load(const struct ql_attn_prep_args &a, int n_kv, const struct row_place &at,
                                         int kv, int h0, int nh, int item) {
        int own = item - nh, lane = threadIdx.x & 31;
        bool is_q = own < 0;
        const float *from = is_q ? a.qg + ((int64_t)at.row * a.n_head + h0 + item) * 2 * D
                                 : (own & 1 ? a.v : a.k) + ((int64_t)(at.row0 + (own >> 1)) * n_kv + kv) * D;
        const float *norm = is_q ? a.q_norm : a.k_norm;
        int pos = is_q ? at.pos : at.pos0 + (own >> 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = from[lane + 32 * i];
            w[i] = norm[lane + 32 * i];
        }
        turn = ((const float2 *)(a.rope + (int64_t)pos * ROTARY))[lane];
    }
};

__device__ __forceinline__ int n_items(const struct row_place &at, int nh) { return nh + 2 * (at.pos - at.pos0 + 1); }

/* All items, `it` being the warp's first, loaded if there is one; queries of heads from nh on are 0. mine: this block has the row's own
 * position. The block has to meet before anybody reads. */
template <int TYPE>
__device__ __forceinline__ void prepare_rows(struct step_work<TYPE> &x, struct own_rows<TYPE> &own,
                                             struct prep_item &it, const struct ql_attn_prep_args &a,
                                             const struct ql_kv_cache &cache, const struct row_place &at, int kv,
                                             int h0, int nh, bool mine) {
    typedef step_form<TYPE> form;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = n_items(at, nh);
    if (warp >= nh) {
        put_q(x, warp, make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0), lane);
    }
#pragma unroll 1
    for (int item = warp; item < n;) {
        int t = (item - nh) >> 1, side = (item - nh) & 1;
        bool is_q = item < nh;
        if (is_q || side == 0) {
            norm_row(it.v, it.w, a.eps);
            float lower = it.v[0], upper = it.v[1];
            it.v[0] = rotate(lower, -upper, it.turn.x, it.turn.y);
            it.v[1] = rotate(upper, lower, it.turn.x, it.turn.y);
        }
        if (is_q) {
            float *line = (float *)x.q[item];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                line[lane + 32 * i] = it.v[i];
            }
            __syncwarp();
            float4 q0 = ((const float4 *)line)[lane], q1 = ((const float4 *)line)[32 + lane];
            __syncwarp();
            put_q(x, item, q0, q1, lane);
        } else {
            typedef typename form::eight eight;
            store_row<TYPE>(own.row[side][t], &own.scale[side][t], 0, it.v, lane);
            __syncwarp();
            if (mine && at.pos0 + t == at.pos) {
                int64_t to = cache_row(at.page[at.pos / QL_PAGE], cache.n_kv_head, kv, at.pos);
                ((eight *)((uint8_t *)(side ? cache.v : cache.k) + to * form::BYTES))[lane] =
                    ((const eight *)own.row[side][t])[lane];
                if (form::GROUPS > 1 && lane == 0) {
                    ((uint2 *)(side ? cache.v_scale : cache.k_scale))[to / D] = own.scale[side][t];
                }
            }
        }
        item += 8;
        if (item < n) {
            it.load(a, cache.n_kv_head, at, kv, h0, nh, item);
        }
    }
}

/* This step's rows into the slot of positions `begin` on, of which the row sees those up to its own and below `end`. */
template <int TYPE>
__device__ __forceinline__ void put_own(struct step_slot<TYPE> &to, const struct own_rows<TYPE> &own,
                                        const struct row_place &at, int begin, int end) {
    constexpr int STEP = step_form<TYPE>::STEP, PIECES = step_form<TYPE>::ROW / 16;
    int first = max(at.pos0, begin), n = min(end, begin + STEP) - first;
#pragma unroll 1
    for (int e = threadIdx.x; e < n * 2 * PIECES; e += 256) {
        int p = first + e / (2 * PIECES), side = e / PIECES & 1, i = e % PIECES, row = p - begin;
        *(uint4 *)(side ? to.v[row] + 16 * v_piece(row, i) : to.k[row] + 16 * k_piece<TYPE>(row, i)) =
            ((const uint4 *)own.row[side][p - at.pos0])[i];
        if (TYPE == QL_KV_FP8 && i == 0) {
            (side ? to.v_scale : to.k_scale)[row] = own.scale[side][p - at.pos0];
        }
    }
}

/* Scales of a page's positions at .. that are below `end`, of keys by the first 64 threads and of values by the next. */
template <int TYPE>
__device__ __forceinline__ void fetch_scales(struct step_slot<TYPE> &to, int j, const struct ql_kv_cache &cache,
                                             int64_t base, int at, int end) {
    int tid = threadIdx.x;
    if (TYPE == QL_KV_FP8 && tid < 2 * QL_PAGE && at + (tid & 63) < end) {
        const uint2 *scale = (const uint2 *)(tid < 64 ? cache.k_scale : cache.v_scale);
        copy_async8((tid < 64 ? to.k_scale : to.v_scale) + j * QL_PAGE + (tid & 63), scale + base / D + (tid & 63));
    }
}

/* ---- a step ----------------------------------------------------------------------------------------------------------- */

/* Result of a step: of head g its largest score, the sum of weights relative to that, and sums of weighted values, o[i][e] for channel
 * 32 warp + 4 (2 c + e) + i. */
struct step_result {
    float top, sum, o[4][2];
};

/* The first n positions of a slot; n > 0, values behind them are 0. All 256 threads; keys are there for all of them, and values are
 * once each has called values_here() and they have met. */
template <int TYPE, typename HERE>
__device__ __forceinline__ struct step_result do_step(struct step_work<TYPE> &x, const struct step_slot<TYPE> &in,
                                                      const uint32_t (&q)[16][4], float back, int n, HERE values_here) {
    typedef step_form<TYPE> form;
    constexpr bool FP8 = TYPE == QL_KV_FP8;
    constexpr int TILES = form::TILES;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
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
            float w = FP8 ? s[t][e] : fmaf(acc[0][2 + e] + acc[1][2 + e], 1.0f / 2048.0f, acc[0][e] + acc[1][e]);
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
    values_here();
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
    for (int i = 0; i < form::STEP / 16; i++) {
        if (QL_PAGE * (i / 4) < n) {
            float2 w0 = *(const float2 *)(weight + 16 * i + 2 * c), w1 = *(const float2 *)(weight + 16 * i + 2 * c + 8);
            uint32_t w[4];
            two_parts(w0.x, w0.y, &w[0], &w[1]);
            two_parts(w1.x, w1.y, &w[2], &w[3]);
            uint2 v[4];
#pragma unroll
            for (int e = 0; e < 4; e++) { /* positions 2 c, 2 c + 1, 2 c + 8, 2 c + 9 */
                constexpr int PER = 16 / sizeof(typename form::four);
                int p = 16 * i + 2 * c + (e & 1) + 8 * (e >> 1), unit = 8 * warp + g;
                v[e] = form::pairs(
                    *(const typename form::four *)(in.v[p] + 16 * v_piece(p, unit / PER) + unit % PER * (16 / PER)));
            }
            mma_f16(acc[0], w, __byte_perm(v[0].x, v[1].x, 0x5410), __byte_perm(v[2].x, v[3].x, 0x5410));
            mma_f16(acc[1], w, __byte_perm(v[0].x, v[1].x, 0x7632), __byte_perm(v[2].x, v[3].x, 0x7632));
            mma_f16(acc[2], w, __byte_perm(v[0].y, v[1].y, 0x5410), __byte_perm(v[2].y, v[3].y, 0x5410));
            mma_f16(acc[3], w, __byte_perm(v[0].y, v[1].y, 0x7632), __byte_perm(v[2].y, v[3].y, 0x7632));
        }
    }
    struct step_result r = {top, sum, {}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            r.o[i][e] = fmaf(acc[i][2 + e], 1.0f / 2048.0f, acc[i][e]);
        }
    }
    return r;
}

#endif
