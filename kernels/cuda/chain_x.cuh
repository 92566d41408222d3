/* How a block of the chain kernel (chain.cu) prepares x of a product, into shared memory: the norm of a row or two, with what is to be
 * added to it before, or slices as they are, each for itself; the norm of more rows, a block a row, for all. And the products of normed
 * rows with rows of plain weights.
 */
#ifndef QL_KERNELS_CUDA_CHAIN_X_CUH
#define QL_KERNELS_CUDA_CHAIN_X_CUH

#include "kernels/cuda/chain_dev.cuh"

#if HAVE_WGMMA
/* How x is prepared: known at compile time where it has two columns. */
template <int COLS> __device__ __forceinline__ enum x_mode mode_of(const struct product &p) {
    return COLS == 2 ? X_F16X2 : p.mode;
}

/* The largest of a warp's numbers, none of which is below 0 or NaN: their order is that of their bits. */
__device__ __forceinline__ float warp_most(float v) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v)));
}

/* The larger of `most` and four |v|, NaN left out: as larger_x unless one is infinite. */
__device__ __forceinline__ float largest4(float most, float4 v) {
    return fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
}
__device__ __forceinline__ float larger_x4(float most, float4 v, enum x_mode mode) {
    return larger_x(larger_x(larger_x(larger_x(most, v.x, mode), v.y, mode), v.z, mode), v.w, mode);
}

/* Four neighbours of a row, as f16: COLS 2 is X_F16X2. The second part of what is infinite in the first would have to be 0
 * (zero_beside_infinity). */
template <int COLS>
__device__ __forceinline__ void x_parts(float4 in, float up, enum x_mode mode, uint2 *hi, uint2 *lo) {
    float v[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (COLS == 1 && mode == X_E4M3_AS_F16) {
            v[i] = f32_of_e4m3(e4m3_of_f32(v[i] / up));
        } else {
            v[i] = (COLS == 1 ? round_bf16(v[i]) : v[i]) * up;
        }
    }
    uint2 h = make_uint2(pack_f16x2(v[0], v[1]), pack_f16x2(v[2], v[3]));
    *hi = h;
    if (COLS == 2) {
        float2 h01 = __half22float2(*(__half2 *)&h.x), h23 = __half22float2(*(__half2 *)&h.y);
        *lo = make_uint2(pack_f16x2((v[0] - h01.x) * 2048.0f, (v[1] - h01.y) * 2048.0f),
                         pack_f16x2((v[2] - h23.x) * 2048.0f, (v[3] - h23.y) * 2048.0f));
    }
}
template <int COLS> __device__ __forceinline__ void put_x(uint16_t *to, float4 in, float up, enum x_mode mode) {
    uint2 hi, lo;
    x_parts<COLS>(in, up, mode, &hi, &lo);
    *(uint2 *)to = hi;
    if (COLS == 2) {
        *(uint2 *)(to + SECOND_PART) = lo;
    }
}

/* Seldom: a row of x holds infinities. All computing warps, behind a barrier. */
template <int COLS> __device__ __noinline__ void zero_beside_infinity(uint16_t *x, int k) {
    for (int i = threadIdx.x; i < k && COLS == 2; i += N_THREAD) {
        uint16_t *at = x + 16 * (i >> 3) + (i & 7);
        if ((*at & 0x7c00) == 0x7c00) {
            at[SECOND_PART] = 0;
        }
    }
    sync_warps();
}

/* A row's numbers normed. */
__device__ __forceinline__ float4 normed4(float4 v, float scale, float4 w) {
    return make_float4((v.x * scale) * (1.0f + w.x), (v.y * scale) * (1.0f + w.y), (v.z * scale) * (1.0f + w.z),
                       (v.w * scale) * (1.0f + w.w));
}

/* Of four columns of each NORM_THREADS, the sum of a warp of the norm kernel, which is eight lanes here; it adds lanes 16, 8, 4, 2, 1
 * apart, of which two are a lane's own. */
__device__ __forceinline__ float sum_of_squares(const float4 v[NORM_KEEP]) {
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < NORM_KEEP; j++) {
        sum[0] = fmaf(v[j].x, v[j].x, sum[0]);
        sum[1] = fmaf(v[j].y, v[j].y, sum[1]);
        sum[2] = fmaf(v[j].z, v[j].z, sum[2]);
        sum[3] = fmaf(v[j].w, v[j].w, sum[3]);
    }
#pragma unroll
    for (int distance = 4; distance; distance >>= 1) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], distance);
        }
    }
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Some of both parts' numbers are not there yet. */
__device__ __forceinline__ bool has_mark(const float4 (&d)[2][NORM_KEEP]) {
    uint32_t most = 0; /* no bits are larger than a mark's */
#pragma unroll
    for (int i = 0; i < 2 * NORM_KEEP; i++) {
        float4 v = d[i / NORM_KEEP][i % NORM_KEEP];
        most = max(max(most, max(__float_as_uint(v.x), __float_as_uint(v.y))),
                   max(__float_as_uint(v.z), __float_as_uint(v.w)));
    }
    return most == MARK;
}

/* A number of a part of delta, once it is there. */
__device__ __forceinline__ float load_part(const struct product &p, const float *at) {
    float v;
    do {
        v = load_fresh(at);
    } while (p.marks && __float_as_uint(v) == MARK);
    return v;
}

/* The subtree of parts at p. */
__device__ __forceinline__ float add_parts(const float *p, int parts, int stride) {
    float v = load_fresh(p);
    if (parts >= 2) {
        v += load_fresh(p + stride);
    }
    if (parts >= 4) {
        v += load_fresh(p + 2 * stride) + load_fresh(p + 3 * stride);
    }
    if (parts == 8) {
        v += (load_fresh(p + 4 * stride) + load_fresh(p + 5 * stride)) +
             (load_fresh(p + 6 * stride) + load_fresh(p + 7 * stride));
    }
    return v;
}

/* Eight weights of each of five chunks from `first` on; all loads before the first use. */
__device__ __forceinline__ void load_plain(const uint8_t *w, int first, int end, int k, int lane, uint4 (&raw)[5]) {
#pragma unroll
    for (int c = 0; c < 5; c++) {
        int at = (first + c) * 256 + lane * 8;
        raw[c] = first + c < end && at < k ? load_stream(w + (int64_t)at * 2) : make_uint4(0, 0, 0, 0);
    }
}
__device__ __forceinline__ float plain_weight(const uint32_t u[4], int e, bool bf16) {
    uint32_t h = e & 1 ? u[e / 2] >> 16 : u[e / 2] & 0xffff;
    return bf16 ? f32_of_bf16(h) : f32_of_f16((uint16_t)h);
}

/* Products of a normed row in f32, y, with the rows of plain weights that fall to this block: by the last four warps. Of
 * the tasks that are dealt to all blocks in turn the last blocks have the fewest. */
__device__ __forceinline__ void plain_rows(const struct product &p, const float *y, int row, struct shared *sh) {
    int warp = (threadIdx.x >> 5) - (N_WARP - 4), lane = threadIdx.x & 31;
    const auto [parts, c0, c1] = part_of_plain(p.k, warp);
    bool exact = p.mode == X_F16X2;
    for (int j = 0, row0 = 0; j < p.n_plain; row0 += p.plain[j++].n) {
        const struct plain_target &t = p.plain[j];
        bool bf16 = t.format == QL_FORMAT_BF16;
        for (int i = gridDim.x - 1 - blockIdx.x; i < row0 + t.n; i += gridDim.x) {
            if (i < row0) {
                continue;
            }
            const uint8_t *w = t.w + (int64_t)(i - row0) * p.k * 2;
            float acc = 0.0f;
            for (int first = c0; first < c1; first += 5) {
                uint4 raw[5];
                load_plain(w, first, c1, p.k, lane, raw);
#pragma unroll
                for (int c = 0; c < 5; c++) {
                    int at = (first + c) * 256 + lane * 8;
                    if (first + c < c1 && at < p.k) {
                        const uint32_t u[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
                        for (int e = 0; e < 8; e++) {
                            acc = fmaf(plain_weight(u, e, bf16), exact ? y[at + e] : round_bf16(y[at + e]), acc);
                        }
                    }
                }
            }
            acc = warp_sum(acc);
            if (lane == 0) {
                sh->plain[warp] = acc;
            }
            sync_four();
            if (warp == 0 && lane == 0) {
                float v = sh->plain[0];
                for (int q = 1; q < parts; q++) {
                    v += sh->plain[q];
                }
                t.y[row * t.ldy + i - row0] = v;
            }
            sync_four();
        }
    }
}

/* Residual addition and norm of a row, its columns to xs and in f32 to y; the sums are those of norm.cu. Eight warps add,
 * since that order is theirs; what is left is shared by all, a thread four columns of each 4 N_THREAD, whose weights it has
 * in w. This block's share of x + delta waits in `pend` until all blocks have read x. `wait` returns when x and delta are
 * there, or a marked delta about to be: what can be known before is, and x is on its way where it is there before that. */
template <int COLS, typename F>
__device__ __forceinline__ void norm_x(const struct product &p, int row, const float4 w[NORM_SHARE], uint16_t *xs,
                                       float *y, struct shared *sh, F wait) {
    /* A lane of the eight has the work of four neighbouring threads of the norm kernel: columns 4 t .. 4 t + 3 of each 1,024. */
    constexpr int WARPS = NORM_THREADS / 128;
    static_assert((int)NORM_SHARE <= (int)NORM_KEEP, "what a thread has afterwards fits where it had x");
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = p.delta_parts, k = p.k, at = 4 * threadIdx.x;
    const float *x = p.x + row * p.ldx, *delta = p.delta + row * p.k;
    const float4 none = make_float4(0, 0, 0, 0);
    const float *x_at = x + at, *delta_at = delta + at, *second_at = delta_at + p.delta_stride;
    int lo = share_begin(k, blockIdx.x), share = share_begin(k, blockIdx.x + 1) - lo;
    asm volatile("" : "+l"(x_at), "+l"(delta_at), "+l"(second_at), "+r"(lo), "+r"(share), "+r"(k), "+r"(parts));
    float4 v[NORM_KEEP];
    auto load_x = [&](bool now) {
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            if (now && j * NORM_THREADS + at < k) {
                v[j] = load_fresh4(x_at + j * NORM_THREADS);
            }
        }
    };
#pragma unroll
    for (int j = 0; j < NORM_KEEP; j++) {
        v[j] = none;
    }
    load_x(warp < WARPS && p.ahead);
    wait();
    if (row > 0) {
        sync_warps(); /* the plain rows have read the last row's y */
    }
    if (warp < WARPS) {
        float4 d[2][NORM_KEEP]; /* all loads before the first use */
        load_x(!p.ahead);
        if (parts > 0) {
            do { /* seldom more than once */
#pragma unroll
                for (int j = 0; j < NORM_KEEP; j++) {
                    d[0][j] = j * NORM_THREADS + at < k ? load_fresh4(delta_at + j * NORM_THREADS) : none;
                }
                if (parts > 1) {
#pragma unroll
                    for (int j = 0; j < NORM_KEEP; j++) {
                        d[1][j] = j * NORM_THREADS + at < k ? load_fresh4(second_at + j * NORM_THREADS) : none;
                    }
                }
            } while (p.marks && __builtin_expect(has_mark(d), 0));
            if (parts > 1) {
#pragma unroll
                for (int j = 0; j < NORM_KEEP; j++) {
                    d[0][j] = add4(d[0][j], d[1][j]);
                }
            }
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                v[j] = add4(v[j], d[0][j]);
            }
        }
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            if (j * NORM_THREADS + at < k) {
                *(float4 *)(y + j * NORM_THREADS + at) = v[j];
            }
        }
        float sum = sum_of_squares(v);
        if ((lane & 7) == 0) {
            sh->part[warp * 4 + (lane >> 3)] = sum;
        }
    } else if (parts > 0) {
        for (int i = threadIdx.x - 32 * WARPS; i < share; i += N_THREAD - 32 * WARPS) {
            float d = load_part(p, delta + lo + i);
            d = parts > 1 ? d + load_part(p, delta + p.delta_stride + lo + i) : d;
            sh->pend[row][i] = load_fresh(x + lo + i) + d;
        }
    }
    sync_warps();
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        v[j] = 4 * j * N_THREAD + at < k ? *(const float4 *)(y + 4 * j * N_THREAD + at) : none;
    }
    float scale = 1.0f / sqrtf(warp_sum(sh->part[lane]) / (float)k + p.eps), most = 0.0f, back;
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        v[j] = normed4(v[j], scale, w[j]);
        most = largest4(most, v[j]);
        if (p.n_plain > 0 && 4 * j * N_THREAD + at < k) {
            *(float4 *)(y + 4 * j * N_THREAD + at) = v[j];
        }
    }
    most = warp_most(most);
    if (lane == 0) {
        sh->most[0][warp] = most;
    }
    sync_warps();
    most = warp_most(lane < N_WARP ? sh->most[0][lane] : 0.0f);
    bool infinite = COLS == 2 && most > 0x1.fffffep127f;
    if (__builtin_expect(infinite || (COLS == 1 && p.mode != X_E4M3_AS_F16 && most > 0x1.fffffep127f), 0)) {
        most = 0.0f;
#pragma unroll
        for (int j = 0; j < NORM_SHARE; j++) {
            most = larger_x4(most, v[j], mode_of<COLS>(p));
        }
        most = warp_most(most);
        sync_warps();
        if (lane == 0) {
            sh->most[0][warp] = most;
        }
        sync_warps();
        most = warp_most(lane < N_WARP ? sh->most[0][lane] : 0.0f);
    }
    float up = x_factor(most, mode_of<COLS>(p), &back);
    if (threadIdx.x == 0) {
        sh->xscale[row] = back * WEIGHT_UNIT;
    }
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        int i = 4 * j * N_THREAD + at;
        if (i < k) {
            put_x<COLS>(xs + x_place<COLS>(i, p.format), v[j], up, p.mode);
        }
    }
    sync_warps(); /* the row is there, part and most have been read */
    if (__builtin_expect(infinite, 0)) {
        zero_beside_infinity<COLS>(xs, k);
    }
}

/* Residual addition and norm of one of many rows, for all blocks (struct normed); a thread has four columns of each 4 N_THREAD.
 * Sums are those of norm.cu: eight warps add, since that order is theirs, from `stage`, k numbers in shared memory. `wait` returns
 * when delta is there; from then until the edge behind the norm nobody else reads or writes this row of x. */
template <int COLS, typename F>
__device__ __forceinline__ void norm_row(const struct run &r, const struct product &p, int row, float *stage,
                                         struct shared *sh, F wait) {
    constexpr int WARPS = NORM_THREADS / 128; /* that add: a lane has columns 4 t .. 4 t + 3 of each 1,024 */
    const enum x_mode mode = mode_of<COLS>(p);
    const float4 none = make_float4(0, 0, 0, 0);
    int tid = threadIdx.x;
    asm volatile("" : "+r"(tid)); /* what is made of it is not kept from op to op, in memory at last */
    int warp = tid >> 5, lane = tid & 31, k = p.k, at = 4 * tid;
    auto there = [&](int j) { return 4 * j * N_THREAD + at < k; };
    const float *x = p.x + row * p.ldx + at;
    float4 v[NORM_SHARE], w[NORM_SHARE];
    auto load_x = [&](bool now) {
#pragma unroll
        for (int j = 0; j < NORM_SHARE; j++) {
            if (now && there(j)) {
                v[j] = load_fresh4(x + 4 * j * N_THREAD);
            }
        }
    };
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        v[j] = none;
    }
    load_x(p.ahead);
    wait();
    load_x(!p.ahead);
    if (p.delta_parts > 0) {
        float4 d[MOST_ADDED][NORM_SHARE]; /* all loads before the first use */
        const float *from = p.delta + row * k + at;
#pragma unroll
        for (int q = 0; q < MOST_ADDED; q++) {
            bool part = q < p.delta_parts;
            static_assert(NORM_SHARE == 3 && MOST_ADDED == 4, "as these lines have it");
            d[q][0] = load_fresh4_if<0>(part && there(0), from + q * p.delta_stride);
            d[q][1] = load_fresh4_if<16 * N_THREAD>(part && there(1), from + q * p.delta_stride);
            d[q][2] = load_fresh4_if<32 * N_THREAD>(part && there(2), from + q * p.delta_stride);
        }
#pragma unroll
        for (int j = 0; j < NORM_SHARE; j++) {
            float4 sum = p.delta_parts > 1 ? add4(d[0][j], d[1][j]) : d[0][j];
            sum = p.delta_parts > 2 ? add4(sum, add4(d[2][j], d[3][j])) : sum;
            v[j] = add4(v[j], sum);
        }
    }
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        w[j] = there(j) ? load_fresh4(p.norm + at + 4 * j * N_THREAD) : none; /* on their way meanwhile */
        if (there(j)) {
            *(float4 *)(stage + at + 4 * j * N_THREAD) = v[j];
        }
    }
    sync_warps();
    if (warp < WARPS) {
        float4 c[NORM_KEEP];
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            c[j] = j * NORM_THREADS + at < k ? *(const float4 *)(stage + j * NORM_THREADS + at) : none;
        }
        float sum = sum_of_squares(c);
        if ((lane & 7) == 0) {
            sh->part[warp * 4 + (lane >> 3)] = sum;
        }
    }
    if (p.residual) {
#pragma unroll
        for (int j = 0; j < NORM_SHARE; j++) {
            if (there(j)) {
                *(float4 *)(p.residual + row * p.ldx + at + 4 * j * N_THREAD) = v[j];
            }
        }
    }
    sync_warps();
    float scale = 1.0f / sqrtf(warp_sum(sh->part[lane]) / (float)k + p.eps), most = 0.0f, back;
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        v[j] = normed4(v[j], scale, w[j]);
        most = largest4(most, v[j]);
        if (p.n_plain > 0 && there(j)) {
            *(float4 *)(r.normed->y + row * k + at + 4 * j * N_THREAD) = v[j];
        }
    }
    auto of_block = [&](float of_thread) {
        of_thread = warp_most(of_thread);
        if (lane == 0) {
            sh->most[0][warp] = of_thread;
        }
        sync_warps();
        return warp_most(lane < N_WARP ? sh->most[0][lane] : 0.0f);
    };
    most = of_block(most);
    bool infinite = most > 0x1.fffffep127f;
    if (__builtin_expect(infinite, 0)) {
        most = 0.0f;
#pragma unroll
        for (int j = 0; j < NORM_SHARE; j++) {
            most = larger_x4(most, v[j], mode);
        }
        sync_warps();
        most = of_block(most);
    }
    float up = x_factor(most, mode, &back);
    uint16_t *to = r.normed->x + row * x_stride<COLS>(k, p.format);
#pragma unroll
    for (int j = 0; j < NORM_SHARE; j++) {
        if (there(j)) {
            put_x<COLS>(to + x_place<COLS>(at + 4 * j * N_THREAD, p.format), v[j], up, mode);
        }
    }
    if (tid == 0) {
        r.normed->scale[row] = back * WEIGHT_UNIT;
    }
    sync_warps();
    if (__builtin_expect(infinite, 0)) {
        zero_beside_infinity<COLS>(to, k);
    }
    if (tid == 0) {
        arrive_with_row(r, row);
    }
}

/* What a block has of the products of many normed rows with plain weights: a part of the columns of four weight rows. Who reads the
 * products adds the parts. */
struct plain_share {
    int part, row0, begin, columns; /* row0: of all targets' rows; columns 0: nothing */
};
__device__ __forceinline__ struct plain_share share_of_plain(const struct product &p) {
    int i = (int)(gridDim.x - 1 - blockIdx.x), n = p.n_plain > 0 ? p.plain[0].n + p.plain[1].n : 0;
    int parts = part_of_plain(p.k, 0).parts, part = i % parts, row0 = i / parts * 4;
    const struct plain_part at = part_of_plain(p.k, part);
    return plain_share{part, row0, 256 * at.begin, row0 < n ? min(256 * at.end, p.k) - 256 * at.begin : 0};
}

/* The normed rows that blocks have left for all, behind so many edges, and this block's share of products with plain weights: of its
 * last eight warps each has a weight row and two rows of x. */
template <int COLS>
__device__ __forceinline__ void copy_x(const struct run &r, const struct product &p, int edges, uint16_t *xs,
                                       struct shared *sh) {
    constexpr int EACH = 12;
    static_assert(sizeof r.normed->x <= EACH * N_THREAD * 16, "a thread holds so much of it");
    int tid = threadIdx.x;
    asm volatile("" : "+r"(tid)); /* as in norm_row */
    const struct plain_share share = share_of_plain(p);
    int warp = (tid >> 5) - (N_WARP - 8), lane = tid & 31, of_all = share.row0 + warp / 2, x0 = warp % 2 * 2;
    bool second = of_all >= p.plain[0].n;
    const struct plain_target &t = p.plain[second];
    int mine = of_all - (second ? p.plain[0].n : 0);
    bool multiplies = share.columns > 0 && warp >= 0 && mine < t.n;
    uint4 w[PLAIN_CHUNKS]; /* on their way during the wait */
    load_plain(t.w + (int64_t)mine * p.k * 2, share.begin / 256, multiplies ? share.begin / 256 + PLAIN_CHUNKS : 0, p.k,
               lane, w);
    wait_edge(r, sh, edges);
    float4 y[MAX_ROWS], v[EACH];
#pragma unroll
    for (int row = 0; row < MAX_ROWS; row++) {
        y[row] = load_fresh4_if<0>(row < r.n_row && 4 * tid < share.columns,
                                   r.normed->y + row * p.k + share.begin + 4 * tid);
    }
    const float *from = (const float *)r.normed->x + 4 * tid;
    int left = r.n_row * x_stride<COLS>(p.k, p.format) / 8 - tid;
#pragma unroll
    for (int j = 0; j < EACH; j += 4) {
        v[j] = load_fresh4_if<0>(left > j * N_THREAD, from + 4 * j * N_THREAD);
        v[j + 1] = load_fresh4_if<16 * N_THREAD>(left > (j + 1) * N_THREAD, from + 4 * j * N_THREAD);
        v[j + 2] = load_fresh4_if<32 * N_THREAD>(left > (j + 2) * N_THREAD, from + 4 * j * N_THREAD);
        v[j + 3] = load_fresh4_if<48 * N_THREAD>(left > (j + 3) * N_THREAD, from + 4 * j * N_THREAD);
    }
    if (tid < MAX_ROWS) {
        sh->xscale[tid] = load_fresh(r.normed->scale + tid);
    }
    if (share.columns > 0) { /* y is where x will be: x in registers meanwhile */
        float *ys = (float *)xs;
#pragma unroll
        for (int row = 0; row < MAX_ROWS; row++) {
            if (4 * tid < share.columns) {
                *(float4 *)(ys + row * share.columns + 4 * tid) = y[row];
            }
        }
        sync_warps();
        if (multiplies) {
            float sum[2] = {};
            bool bf16 = t.format == QL_FORMAT_BF16;
#pragma unroll
            for (int c = 0; c < PLAIN_CHUNKS; c++) {
                int at = c * 256 + lane * 8;
                const uint32_t u[4] = {w[c].x, w[c].y, w[c].z, w[c].w};
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    if (at < share.columns && x0 + q < r.n_row) {
                        const float4 *of = (const float4 *)(ys + (x0 + q) * share.columns + at), y0 = of[0], y1 = of[1];
                        const float f[8] = {y0.x, y0.y, y0.z, y0.w, y1.x, y1.y, y1.z, y1.w};
#pragma unroll
                        for (int e = 0; e < 8; e++) {
                            sum[q] = fmaf(plain_weight(u, e, bf16), COLS == 2 ? f[e] : round_bf16(f[e]), sum[q]);
                        }
                    }
                }
            }
#pragma unroll
            for (int q = 0; q < 2; q++) {
                sum[q] = warp_sum(sum[q]);
                if (lane == 0) {
                    r.normed->plain[share.part][x0 + q][of_all] = sum[q];
                }
            }
        }
        sync_warps();
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        if (left > j * N_THREAD) {
            ((float4 *)xs)[j * N_THREAD + tid] = v[j];
        }
    }
    sync_warps();
}

/* The block's part of the rows at p.x, ROWS of them at a time, once `wait` has returned. */
template <int COLS, int ROWS, typename F>
__device__ __forceinline__ void slices_x(const struct run &r, const struct product &p, uint16_t *xs, struct shared *sh,
                                         bool early, F wait) {
    constexpr int KEEP = x_keep(ROWS) / 4;
    int slices = p.n_slice >> p.log_parts, per = warps_of_slice(slices), each = 32 * per;
    int k = slices * p.ks, stride = x_stride<COLS>(k, p.format), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int slice = warp / per, t = threadIdx.x - slice * each, at = slice * p.ks;
    int n = slice < slices ? p.ks : 0; /* of this thread's slice */
    const float *x = p.x + (p.deal.first & (p.parts - 1)) * k + at + 4 * t;
    asm volatile("" : "+l"(x), "+r"(each), "+r"(n), "+r"(t));
    wait();
    float4 v[ROWS][KEEP];
    float most[ROWS], all = 0.0f;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            int i = 4 * (j * each + t);
            v[row][j] = row < r.n_row && i < n ? load_fresh4(x + row * p.ldx + 4 * j * each) : make_float4(0, 0, 0, 0);
        }
    }
    if (p.times) {
        constexpr int SOME = ROWS == 1 ? KEEP : TIMES_KEEP / 4;
        const float *times = p.times + (x - p.x);
        int from = p.times_from - (int)(x - p.x);
        float4 f[ROWS][SOME];
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
#pragma unroll
            for (int j = 0; j < SOME; j++) {
                bool there = row < r.n_row && 4 * (j * each + t) < n && 4 * j * each >= from;
                f[row][j] =
                    there ? load_fresh4(times + row * p.ldx + 4 * j * each) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
#pragma unroll
            for (int j = 0; j < SOME; j++) {
                v[row][j] = multiply4(v[row][j], f[row][j]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        most[row] = 0.0f;
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            most[row] = largest4(most[row], v[row][j]);
        }
        most[row] = warp_most(most[row]);
        if (lane == 0) {
            sh->most[row][warp] = most[row];
        }
    }
    if (early) { /* this block's sums of the op before have used its scales */
        wait_count(&sh->finished, 0, p.task0 - 1);
    }
    sync_warps();
    auto of_slice = [&](int row) {
        return warp_most(lane < per && slice < slices ? sh->most[row][slice * per + lane] : 0.0f);
    };
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        most[row] = of_slice(row);
        all = fmaxf(all, lane < N_WARP ? sh->most[row][lane] : 0.0f);
    }
    bool infinite = warp_most(all) > 0x1.fffffep127f;
    if (__builtin_expect(infinite, 0)) {
        sync_warps();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            most[row] = 0.0f;
#pragma unroll
            for (int j = 0; j < KEEP; j++) {
                most[row] = larger_x4(most[row], v[row][j], mode_of<COLS>(p));
            }
            most[row] = warp_most(most[row]);
            if (lane == 0) {
                sh->most[row][warp] = most[row];
            }
        }
        sync_warps();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            most[row] = of_slice(row);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float back, up = x_factor(most[row], mode_of<COLS>(p), &back);
        if (t == 0 && n > 0 && row < r.n_row) {
            sh->xscale[row * slices + slice] = back * WEIGHT_UNIT;
        }
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            int i = 4 * (j * each + t);
            if (i < n && row < r.n_row) {
                put_x<COLS>(xs + row * stride + x_place<COLS>(at + i, p.format), v[row][j], up, p.mode);
            }
        }
    }
    sync_warps();
    for (int row = 0; row < r.n_row && infinite; row++) {
        zero_beside_infinity<COLS>(xs + row * stride, k);
    }
}
#endif

#endif
