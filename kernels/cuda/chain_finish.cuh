/* What the finishing warp of a chain's block does (chain.cu): sums of a task's units, and what follows elementwise. */
#ifndef QL_KERNELS_CUDA_CHAIN_FINISH_CUH
#define QL_KERNELS_CUDA_CHAIN_FINISH_CUH

#include "kernels/cuda/chain_walk.cuh"

#if HAVE_WGMMA
/* Rows of x that a lane finishes of R: half a warp has a tile's weight rows, and the halves share the rows of x, or with one row what
 * has to be added. */
__device__ constexpr int own_of(int rows) { return rows > 1 ? rows / 2 : 1; }

/* Numbers of N rows of x that lie side by side. */
template <int N> __device__ __forceinline__ void load_rows(const float *u, float v[N]) {
    static_assert(N <= 2, "half of MAX_ROWS");
    if (N == 2) {
        float2 both = *(const float2 *)u;
        v[0] = both.x;
        v[N - 1] = both.y;
    } else {
        v[0] = u[0];
    }
}

/* Sums over units of a weight row, of N slices (or pieces) with `each` units and ROWS rows of x: u is the first one's first
 * unit, whose neighbours are `step` away. */
template <int N, int ROWS>
__device__ __forceinline__ void add_units(float v[ROWS][N], const float *u, int step, int each) {
    constexpr int AT_ONCE = (N <= 2 ? 8 : 16 / N) / ROWS;
#pragma unroll
    for (int i = 0; i < N * ROWS; i++) {
        v[i / N][i % N] = 0.0f; /* or registers are kept for what it might hold before, all through the run */
    }
#pragma unroll 1
    for (int j = 0; j < each; j += AT_ONCE) {
        float l[N][AT_ONCE][ROWS]; /* all loads before the first use */
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (j + i < each) {
                    load_rows<ROWS>(u + (q * each + j + i) * step, l[q][i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (j + i < each) {
#pragma unroll
                    for (int row = 0; row < ROWS; row++) {
                        v[row][q] = i == 0 && j == 0 ? l[q][i][row] : v[row][q] + l[q][i][row];
                    }
                }
            }
        }
    }
}

/* The trees over N slices of a weight row for ROWS rows of x: u as above; xscale the first row's, the next one's `per_row` further. */
template <int N, int ROWS>
__device__ __forceinline__ void add_slices(float sum[ROWS], const float *u, int step, int per_slice,
                                           const float *xscale, int per_row, float f) {
    float v[ROWS][N];
    add_units<N, ROWS>(v, u, step, per_slice);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int q = 0; q < N; q++) {
            v[row][q] = __fmul_rn(v[row][q], xscale[row * per_row + q] * f);
        }
        sum[row] = slice_tree(v[row], N);
    }
}

/* A warp: this block's share of x + delta, and marks where delta was, once all blocks have read both. */
__device__ __forceinline__ void put_residual(const struct run &r, const struct shared *sh, const struct product &p) {
    int lane = threadIdx.x & 31, lo = share_begin(p.k, blockIdx.x), n = share_begin(p.k, blockIdx.x + 1) - lo;
    if (lane == 0) {
        await_arrivals(&r.edges->early, sh->base_early + gridDim.x * p.early_edge);
    }
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < r.n_row; row++) {
#pragma unroll 1
        for (int e = lane; e < n; e += 32) {
            p.residual[row * p.ldx + lo + e] = sh->pend[row][e];
            if (p.marks) {
                float *first = p.marks + row * p.k + lo + e;
                first[0] = first[p.delta_stride] = __uint_as_float(MARK);
            }
        }
    }
    __syncwarp();
}

/* A lane's task: a weight row of a tile. */
struct row_of_task {
    int task, which;        /* which target the tile is of; of gate and up 0 where both are made */
    bool single, conv;      /* one piece of GATED; rows that a convolution follows */
    int in_tile, half, row; /* row: of the target */
    float *y;               /* the first row's result, if it stays on this lane, the next one's ldy further */
    int ldy;
    const float *u; /* the task's sums: [unit][weight row][row of x] */
    const struct extra *x;
};

/* Row `row` of x of a task's result, v. */
__device__ __forceinline__ void store_result(const struct run &r, const struct shared *sh, const struct product &p,
                                             const struct row_of_task &t, int row, float v) {
    if (p.exchange < 0) {
        store_fresh(t.y + row * t.ldy, v);
    } else {
        int part = r.lanes.lane * p.parts + (t.task & (p.parts - 1));
        share_sum(r.lanes, sh, p.exchange, part * p.part_stride + row * t.ldy + t.row, v);
    }
}

/* A lane's rows of u, or of what the convolution makes of it: v are its rows' numbers, `others` the other half's. Who has a
 * segment's last row leaves the last three for the next step. */
template <int R>
__device__ __forceinline__ void convolve(const struct run &r, const struct shared *sh, const struct product &p,
                                         const struct row_of_task &t, float v[own_of(R)],
                                         const float others[own_of(R)]) {
    constexpr int OWN = own_of(R);
    int channels = p.target[0].n;
    float4 w = t.x->conv[t.in_tile];
    float out[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = R == 1 ? 0 : OWN * t.half + i, s = 0;
#pragma unroll
        for (int j = 1; j < R; j++) {
            s += j < r.n_seg && row >= sh->seg_row[j];
        }
        int behind = R == 1 ? 0 : row - sh->seg_row[s]; /* rows of the segment before this one */
        bool fresh = sh->seg_pos[s] == 0;
        float before[3]; /* the last is the nearest */
#pragma unroll
        for (int d = 1; d <= 3; d++) {
            float in_rows = i >= d         ? v[i >= d ? i - d : 0]
                            : OWN + i >= d ? others[OWN + i >= d ? OWN + i - d : 0]
                                           : 0.0f;
            before[3 - d] = d <= behind ? in_rows : fresh ? 0.0f : t.x->tail[s][3 - d + behind][t.in_tile];
        }
        if ((R > 1 || t.half == 0) && row + 1 == sh->seg_row[s + 1]) {
            float *tail = p.tail + (int64_t)sh->seg_slot[s] * 3 * channels + t.row;
            tail[0] = before[1];
            tail[channels] = before[2];
            tail[2 * channels] = v[i];
        }
        out[i] = fmaf(w.w, v[i], fmaf(w.z, before[2], fmaf(w.y, before[1], w.x * before[0])));
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = out[i];
    }
}

/* One row of x: of GATED one half of the warp adds up gate, the other up, unless the task is one of these alone, which both do; slices of
 * a row-parallel product are shared by the halves. */
__device__ __forceinline__ void finish_row(const struct run &r, const struct shared *sh, const struct product &p,
                                           const struct row_of_task &t) {
    int slices = p.n_slice >> p.log_parts, step = TILE_ROWS;
    bool gated = p.epilogue == GATED, by_half = gated && !t.single, split = !gated && slices > 1;
    int count = split ? slices / 2 : slices, q0 = split ? t.half * count : 0;
    const struct chain_target &mine = p.target[by_half ? t.half : t.which];
    const float *u = t.u + t.in_tile + ((by_half ? t.half * p.units : 0) + q0 * p.cut.per_slice) * step,
                *scale = mine.row_scale ? t.x->scale[by_half ? t.half : 0] + t.in_tile : &mine.factor;
    float f = *scale, v[1];
    switch (count) {
    case 1: add_slices<1, 1>(v, u, step, p.cut.per_slice, sh->xscale + q0, 0, f); break;
    case 2: add_slices<2, 1>(v, u, step, p.cut.per_slice, sh->xscale + q0, 0, f); break;
    default: add_slices<4, 1>(v, u, step, p.cut.per_slice, sh->xscale + q0, 0, f); break; /* half of 8 */
    }
    float other = __shfl_down_sync(0xffffffffu, v[0], 16);
    v[0] = split ? v[0] + other : v[0];
    if (t.conv) {
        convolve<1>(r, sh, p, t, v, v);
    }
    if (t.conv || (gated && t.which == 0) || t.which == p.silu) {
        v[0] = silu(v[0]);
    }
    if (t.half == 0) {
        store_result(r, sh, p, t, 0, by_half ? v[0] * other : v[0]);
    }
}

/* More rows of x: the halves of the warp have half of them each. */
template <int R>
__device__ __forceinline__ void finish_rows(const struct run &r, const struct shared *sh, const struct product &p,
                                            const struct row_of_task &t) {
    constexpr int OWN = own_of(R);
    int slices = p.n_slice >> p.log_parts, step = R * TILE_ROWS, first = OWN * t.half;
    bool gated = p.epilogue == GATED;
    const struct chain_target &mine = p.target[t.which], &up = p.target[1];
    const float *u = t.u + t.in_tile * R + first, *xscale = sh->xscale + first * slices,
                *scale = mine.row_scale ? t.x->scale[0] + t.in_tile : &mine.factor;
    float f = *scale, v[OWN], other[OWN]; /* other: of the other half's rows, or up */
    if (gated) {
        float both[OWN][2], f_up = up.row_scale ? t.x->scale[1][t.in_tile] : up.factor;
        add_units<2, OWN>(both, u, step, p.units);
#pragma unroll
        for (int q = 0; q < OWN; q++) {
            v[q] = __fmul_rn(both[q][0], xscale[q] * f);
            other[q] = __fmul_rn(both[q][1], xscale[q] * f_up);
        }
    } else {
        switch (slices) {
        case 1: add_slices<1, OWN>(v, u, step, p.cut.per_slice, xscale, slices, f); break;
        case 2: add_slices<2, OWN>(v, u, step, p.cut.per_slice, xscale, slices, f); break;
        case 4: add_slices<4, OWN>(v, u, step, p.cut.per_slice, xscale, slices, f); break;
        default: add_slices<8, OWN>(v, u, step, p.cut.per_slice, xscale, slices, f); break;
        }
        if (t.conv) {
#pragma unroll
            for (int q = 0; q < OWN; q++) {
                other[q] = __shfl_xor_sync(0xffffffffu, v[q], 16);
            }
            convolve<R>(r, sh, p, t, v, other);
        }
    }
#pragma unroll
    for (int q = 0; q < OWN; q++) {
        if (t.conv || gated || t.which == p.silu) {
            v[q] = silu(v[q]);
        }
        if (first + q < r.n_row) {
            store_result(r, sh, p, t, first + q, gated ? v[q] * other[q] : v[q]);
        }
    }
}

/* The finishing warp, all products of the run: a task when its units are in, in order; after the last of a product it says
 * that the block's part is written. */
template <int R> __device__ void finish_all(const struct run &r, struct shared *sh, const uint8_t *room) {
    int n = 0;
#pragma unroll 1
    for (int i = 0; i < r.n_op; i++) {
        if (sh->op[i].kind != PRODUCT) {
            continue;
        }
        const struct product &p = sh->op[i].product;
        int lane = threadIdx.x & 31;
        asm volatile("" : "+r"(lane)); /* what is made of it is not kept from op to op, in memory at last */
#pragma unroll 1
        for (int k = 0; k < p.tasks; k++, n++) {
            bool last = k + 1 == p.tasks;
            int set = n % ahead_of(R), row_tile;
            struct row_of_task t;
            t.task = task_of(p.deal, k);
            t.single = R == 1 && t.task >= p.singles;
            t.which = t.single ? piece_of_single(p, t.task) : 0;
            row_tile = row_tile_of(p, t.task);
            while (p.epilogue != GATED && t.which + 1 < p.n_target && row_tile >= p.target[t.which].row_tiles) {
                row_tile -= p.target[t.which++].row_tiles;
            }
            t.conv = p.epilogue == CONV && t.which == 0;
            t.in_tile = lane & 15;
            t.half = lane >> 4;
            t.row = row_tile * TILE_ROWS + t.in_tile;
            const struct chain_target &to = p.target[t.which];
            t.y = (t.conv ? p.u : to.y + (t.task & (p.parts - 1)) * p.part_stride) + t.row;
            t.ldy = t.conv ? to.n : to.ldy;
            t.u = (const float *)(room + r.sets_at) + set * r.set_floats;
            t.x = (const struct extra *)(room + r.extras_at + set * r.extra_bytes);
            if (lane == 0) { /* for the arrivals that there are not */
                barrier_arrive(shared_address(&sh->summed[set]),
                               SUM_ARRIVALS - (t.single ? p.units : all_units(p)) - (last ? N_WARP : 0));
            }
            if (R <= NORMED_BY_ALL && last && p.residual && t.task >= p.early) { /* while the last task is computed */
                put_residual(r, sh, p);
            }
            if (last && lane == 0 && sh->op[i].early) { /* or this arrival would pass for one at the edge before */
                await_arrivals(&r.edges->count, sh->base + gridDim.x * sh->op[i].edges);
            }
            __syncwarp();
            barrier_wait(shared_address(&sh->summed[set]), n / ahead_of(R) & 1);
            if (R == 1) {
                finish_row(r, sh, p, t);
            } else {
                finish_rows<(R > 1 ? R : 2)>(r, sh, p, t);
            }
            __syncwarp();
            if (lane == 0) {
                asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&sh->finished)), "r"(n + 1)
                             : "memory");
            }
            if (lane == 0 && t.task < p.early && task_of(p.deal, k + 1) >= p.early) {
                arrive_early(r);
            }
            if (R <= NORMED_BY_ALL && last && p.residual && t.task < p.early) {
                put_residual(r, sh, p);
            }
            if (last) {
                arrive(r, sh, sh->op[i]);
            }
        }
    }
}
#endif

#endif
