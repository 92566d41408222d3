/* What the finishing warp of a chain's block does (chain.cu): sums of a task's units, and what follows elementwise. */
#ifndef QL_KERNELS_CUDA_CHAIN_FINISH_CUH
#define QL_KERNELS_CUDA_CHAIN_FINISH_CUH

#include "kernels/cuda/chain_walk.cuh"

#if HAVE_WGMMA
/* Numbers of R rows that lie side by side. */
template <int R> __device__ __forceinline__ void load_rows(const float *u, float v[R]) {
    if (R == 4) {
        float4 all = *(const float4 *)u;
        v[0] = all.x;
        v[R > 1 ? 1 : 0] = all.y;
        v[R > 2 ? 2 : 0] = all.z;
        v[R > 3 ? 3 : 0] = all.w;
    } else if (R == 2) {
        float2 all = *(const float2 *)u;
        v[0] = all.x;
        v[R > 1 ? 1 : 0] = all.y;
    } else {
        v[0] = u[0];
    }
}

/* The trees over N slices of a weight row for R rows of x: u is the first slice's first unit, whose neighbours are `step` away;
 * xscale the first row's, the next one's `per_row` further. */
template <int N, int R>
__device__ __forceinline__ void add_slices(float sum[R], const float *u, int step, int per_slice, const float *xscale,
                                           int per_row, float f) {
    constexpr int AT_ONCE = R == 4 ? 4 / N : (N <= 2 ? 8 : 4) / R;
    float v[R][N];
#pragma unroll 1
    for (int j = 0; j < per_slice; j += AT_ONCE) {
        float l[N][AT_ONCE][R]; /* all loads before the first use */
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (j + i < per_slice) {
                    load_rows<R>(u + (q * per_slice + j + i) * step, l[q][i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (j + i < per_slice) {
#pragma unroll
                    for (int row = 0; row < R; row++) {
                        v[row][q] = i == 0 && j == 0 ? l[q][i][row] : v[row][q] + l[q][i][row];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int row = 0; row < R; row++) {
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

/* The finishing warp, all products of the run: a task when its units are in, in order; after the last of a product it says
 * that the block's part is written. Half a warp has a tile's rows: of GATED one half adds up gate, the other up, unless the task is
 * one of these alone; slices of a row-parallel product are shared by the halves. */
template <int R> __device__ void finish_all(const struct run &r, struct shared *sh, const uint8_t *room) {
    int n = 0, lane = threadIdx.x & 31, in_tile = lane & 15, half = lane >> 4;
#pragma unroll 1
    for (int i = 0; i < r.n_op; i++) {
        if (sh->op[i].kind != PRODUCT) {
            continue;
        }
        const struct product &p = sh->op[i].product;
        int slices = p.n_slice >> p.log_parts, step = R * 16;
        bool gated = p.epilogue == GATED, split = !gated && slices > 1;
        int count = split ? slices / 2 : slices, q0 = split ? half * count : 0;
        int from = in_tile * R + ((gated ? half * p.units : 0) + q0 * p.cut.per_slice) * step;
#pragma unroll 1
        for (int k = 0; k < p.tasks; k++, n++) {
            bool last = k + 1 == p.tasks;
            int task = task_of(p.deal, k), set = n % ahead_of(R), row_tile = row_tile_of(p, task);
            bool single = R == 1 && task >= p.singles; /* both halves of the warp have its one tile */
            int which = single ? piece_of_single(p, task) : 0;
            while (!gated && which + 1 < p.n_target && row_tile >= p.target[which].row_tiles) {
                row_tile -= p.target[which++].row_tiles;
            }
            const struct chain_target &t = p.target[which], &mine = p.target[gated && !single ? half : which];
            const struct extra *x = (const struct extra *)(room + r.extras_at + n % ahead_of(R) * r.extra_bytes);
            const float *u = (const float *)(room + r.sets_at) + set * r.set_floats + from -
                             (single ? half * p.units * step : 0),
                        *scale = mine.row_scale ? x->scale[gated && !single ? half : 0] + in_tile : &mine.factor;
            bool conv = p.epilogue == CONV && which == 0;
            int wr = row_tile * TILE_ROWS + in_tile, ldy = conv ? t.n : t.ldy, s = -1;
            float *y = (conv ? p.u : t.y + (task & (p.parts - 1)) * p.part_stride) + wr, *tail = NULL;
            if (lane == 0) { /* for the arrivals that there are not */
                barrier_arrive(shared_address(&sh->summed[set]),
                               SUM_ARRIVALS - (single ? p.units : all_units(p)) - (last ? N_WARP : 0));
            }
            if (last && p.residual && task >= p.early) { /* while the last task is computed */
                put_residual(r, sh, p);
            }
            if (last && lane == 0 && sh->op[i].early) { /* or this arrival would pass for one at the edge before */
                await_arrivals(&r.edges->count, sh->base + gridDim.x * sh->op[i].edges);
            }
            __syncwarp();
            barrier_wait(shared_address(&sh->summed[set]), n / ahead_of(R) & 1);
            float f = *scale, x0 = 0.0f, x1 = 0.0f, x2 = 0.0f;
            float4 w = conv ? x->conv[in_tile] : make_float4(0, 0, 0, 0);
            const float *xscale = sh->xscale + q0;
            float sum[R];
            switch (count) {
            case 1: add_slices<1, R>(sum, u, step, p.cut.per_slice, xscale, slices, f); break;
            case 2: add_slices<2, R>(sum, u, step, p.cut.per_slice, xscale, slices, f); break;
            default: add_slices<4, R>(sum, u, step, p.cut.per_slice, xscale, slices, f); break; /* half of 8 */
            }
#pragma unroll 1
            for (int row = 0; row < r.n_row; row++) {
                float v = sum[0];
#pragma unroll
                for (int q = 0; q + 1 < R; q++) {
                    sum[q] = sum[q + 1];
                }
                float other = __shfl_down_sync(0xffffffffu, v, 16);
                v = split ? v + other : v;
                if (conv) {
                    if (s < 0 || row == sh->seg_row[s + 1]) {
                        s++;
                        bool fresh = sh->seg_pos[s] == 0;
                        x0 = fresh ? 0.0f : x->tail[s][0][in_tile];
                        x1 = fresh ? 0.0f : x->tail[s][1][in_tile];
                        x2 = fresh ? 0.0f : x->tail[s][2][in_tile];
                        tail = p.tail + (int64_t)sh->seg_slot[s] * 3 * t.n + wr;
                    }
                    if (half == 0 && row + 1 == sh->seg_row[s + 1]) {
                        tail[0] = x1;
                        tail[t.n] = x2;
                        tail[2 * t.n] = v;
                    }
                    float now = v;
                    v = fmaf(w.w, v, fmaf(w.z, x2, fmaf(w.y, x1, w.x * x0)));
                    x0 = x1;
                    x1 = x2;
                    x2 = now;
                }
                if (conv || (gated && which == 0) || which == p.silu) {
                    v = silu(v);
                }
                if (half == 0 && p.exchange < 0) {
                    store_fresh(&y[row * ldy], gated && !single ? v * other : v);
                } else if (half == 0) {
                    share_sum(r.lanes, sh, p.exchange,
                              (r.lanes.lane * p.parts + (task & (p.parts - 1))) * p.part_stride + row * ldy + wr, v);
                }
            }
            __syncwarp();
            if (lane == 0) {
                asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&sh->finished)), "r"(n + 1)
                             : "memory");
            }
            if (lane == 0 && task < p.early && task_of(p.deal, k + 1) >= p.early) {
                arrive_early(r);
            }
            if (last && p.residual && task < p.early) {
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
