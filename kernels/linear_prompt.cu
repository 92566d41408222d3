/* linear for prompt rows: how x is prepared, and the kernel of GPUs without warpgroup instructions; Hopper's is in
 * linear_prompt_sm90.cu. Weights are decoded from their packed form into the A operand by the warp that multiplies with
 * them; x comes through shared memory as B, in blocks that prepare_prompt_x left in the order and swizzle that the
 * instructions read, so that a stage is one run of bytes.
 *
 *   step    64 columns of K
 *   slices  each canonical slice's sum is finished and scaled, then added as the tree; what waits in the tree lies in
 *           scratch, thread by thread, so that it costs no barrier
 *
 * Blocks are persistent: a block walks over tiles, neighbours share weight rows. The number of columns of a tile depends on
 * how many there are; a column's bits do not. Eight warps of 32 weight rows, mma.m16n8k16, x by cp.async.
 */
#include "kernels/cuda/prompt.cuh"

enum { BM = 128, BK = 64, STAGES = 4 };

/* ---- prepared activations ---------------------------------------------------------------------------------------- */

/* Block (slice, row). A thread makes 16-byte chunks. kt: columns of a weight tile; n_col: columns of x in all; unit: what
 * the weights in registers are multiplied with to be themselves. Clears n_flag flags for the product. */
enum {
    X_THREADS = 128,
    X_KEEP = 5
}; /* chunks of a slice that stay in registers between their largest and the result */

template <bool X8>
__global__ void __launch_bounds__(X_THREADS)
    prepare_prompt_x(const float *x, int64_t ldx, int ks, enum x_mode mode, int kt, int n_col, float unit, uint8_t *xs,
                     float *xscale, int xscale_ld, uint32_t *flag, int n_flag) {
    constexpr int N = X8 ? 16 : 8, STEP = 8 * N; /* numbers of a chunk and of a step */
    __shared__ float part[X_THREADS / 32];
    after_previous();
    int slice = blockIdx.x, row = blockIdx.y;
    for (int i = (row * gridDim.x + slice) * X_THREADS + threadIdx.x; i < n_flag;
         i += gridDim.x * gridDim.y * X_THREADS) {
        flag[i] = 0;
    }
    const float *from = x + row * ldx + (int64_t)slice * ks;
    bool aligned = ldx % 4 == 0 && (uintptr_t)x % 16 == 0;
    /* Chunk q: of lane c of the weight layout, for each c, a run of 2 numbers (4 where X8). */
    auto load = [&](int q, float v[N]) {
        int in = q % 8, at = q / 8 * STEP, apart = kt / 4;
        if (X8) {
            at += in / 2 * 32 + in % 2 * 4;
        } else if (kt == 64) {
            at += in * 2;
        } else {
            at += in / 4 * 32 + in % 4 * 2;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float *f = from + at + c * apart;
            if (X8) {
                float4 u = aligned ? *(const float4 *)f : make_float4(f[0], f[1], f[2], f[3]);
                v[c * 4 % N] = u.z; /* the order that e4m3_codes leaves weights in */
                v[(c * 4 + 1) % N] = u.x;
                v[(c * 4 + 2) % N] = u.w;
                v[(c * 4 + 3) % N] = u.y;
            } else {
                float2 u = aligned ? *(const float2 *)f : make_float2(f[0], f[1]);
                v[c * 2 % N] = u.x;
                v[(c * 2 + 1) % N] = u.y;
            }
        }
    };
    int chunks = ks / N;
    float kept[X_KEEP][N], most = 0.0f, up = 1.0f;
    auto larger = [&](const float v[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            most = larger_x(most, v[i], mode);
        }
    };
#pragma unroll
    for (int j = 0; j < X_KEEP; j++) {
        int q = j * X_THREADS + threadIdx.x;
        if (q < chunks) {
            load(q, kept[j]);
        }
    }
    if (mode != X_BF16) {
#pragma unroll
        for (int j = 0; j < X_KEEP; j++) {
            if (j * X_THREADS + threadIdx.x < chunks) {
                larger(kept[j]);
            }
        }
        for (int q = X_KEEP * X_THREADS + threadIdx.x; q < chunks; q += X_THREADS) {
            float v[N];
            load(q, v);
            larger(v);
        }
        most = warp_max(most);
        if ((threadIdx.x & 31) == 0) {
            part[threadIdx.x >> 5] = most;
        }
        __syncthreads();
        most = warp_max(part[threadIdx.x & (X_THREADS / 32 - 1)]);
        float back;
        up = x_factor(most, mode, &back);
        if (threadIdx.x == 0) {
            xscale[(int64_t)slice * xscale_ld + row] = back * unit;
        }
    }
    auto place = [&](int col, int q) {
        int64_t step = (int64_t)slice * (ks / STEP) + q / 8;
        return (uint4 *)(xs + (step * n_col + col) * 128 + ((q ^ col) & 7) * 16);
    };
    auto put = [&](int q, const float v[N]) {
        uint32_t w[4], rest[4];
        if (X8) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[i] = 0;
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    w[i] |= e4m3_of_f32(v[(4 * i + b) % N] / up) << 8 * b;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4 && !X8; i++) {
            float u[2] = {v[2 * i], v[2 * i + 1]};
            if (mode == X_BF16) {
                w[i] = __float_as_uint(round_bf16(u[0])) >> 16 | (__float_as_uint(round_bf16(u[1])) & 0xffff0000u);
                continue;
            }
            float r[2];
            uint16_t h[2];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float f = mode == X_E4M3_AS_F16   ? f32_of_e4m3(e4m3_of_f32(u[b] / up))
                          : mode == X_BF16_AS_F16 ? round_bf16(u[b]) * up
                                                  : u[b] * up;
                __half hi = __float2half_rn(f);
                h[b] = __half_as_ushort(hi);
                r[b] = fabsf(f) <= 65504.0f ? (f - __half2float(hi)) * 2048.0f : 0.0f; /* infinity, NaN: hi */
            }
            w[i] = h[0] | (uint32_t)h[1] << 16;
            rest[i] = pack_f16x2(r[0], r[1]);
        }
        if (mode == X_F16X2) {
            *place(2 * row, q) = make_uint4(w[0], w[1], w[2], w[3]);
            *place(2 * row + 1, q) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
        } else {
            *place(row, q) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    };
#pragma unroll
    for (int j = 0; j < X_KEEP; j++) {
        int q = j * X_THREADS + threadIdx.x;
        if (q < chunks) {
            put(q, kept[j]);
        }
    }
    for (int q = X_KEEP * X_THREADS + threadIdx.x; q < chunks; q += X_THREADS) {
        float v[N];
        load(q, v);
        put(q, v);
    }
}

/* Sums of 16 weight rows and 8 NT columns of x in a warp; FP8_BLOCK keeps finished blocks apart. */
template <int FMT, int NT, int COLS> struct sums {
    static constexpr bool BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    float acc[NT][4], total[BLOCK ? NT : 1][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
            float *t = total[BLOCK ? n : 0];
            t[0] = t[1] = t[2] = t[3] = 0.0f;
        }
    }

    /* The end of a 128-block: f and f8 are the block scales of rows g and g + 8. */
    __device__ __forceinline__ void end_block(float f, float f8) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *t = total[BLOCK ? n : 0];
            t[0] = fmaf(acc[n][0], f, t[0]);
            t[1] = fmaf(acc[n][1], f, t[1]);
            t[2] = fmaf(acc[n][2], f8, t[2]);
            t[3] = fmaf(acc[n][3], f8, t[3]);
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
        }
    }

    /* A slice is complete: scales it, adds what the tree has waiting, and keeps or writes it. r: row g of the weight; col:
     * first column; stack: this thread's place, `step` floats from one number to the next, `level` from one level. Loads
     * go ahead of stores, four column tiles at a time: the compiler must think that they meet. */
    __device__ __forceinline__ void end_slice(const struct products &p, const struct target &t, int slice, int r,
                                              int col, int c, float *stack, int step, int level) {
        constexpr int GROUP = NT < 4 ? NT : 4, PER = 4 / COLS;
        bool last = slice + 1 == p.n_slice;
        float f = t.row_scale ? ((const float *)t.scale)[min(r, t.n - 1)] : t.factor;
        float f8 = t.row_scale ? ((const float *)t.scale)[min(r + 8, t.n - 1)] : t.factor;
#pragma unroll
        for (int n0 = 0; n0 < NT; n0 += GROUP) {
            float sum[GROUP][PER];
            float *wait = stack + n0 * 4 * step;
#pragma unroll
            for (int n = 0; n < GROUP; n++) {
                float *v = BLOCK ? total[(n0 + n) % (BLOCK ? NT : 1)] : acc[n0 + n];
#pragma unroll
                for (int e = 0; e < PER; e++) {
                    int row = (col + (n0 + n) * 8 + 2 * c) / COLS + (COLS == 1 ? e & 1 : 0);
                    float x = COLS == 2 ? fmaf(v[2 * e + 1], 1.0f / 2048.0f, v[2 * e]) : v[e];
                    if (p.xscale) {
                        x *= p.xscale[(int64_t)slice * p.xscale_ld + row];
                    }
                    sum[n][e] = x * ((COLS == 2 ? e == 0 : e < 2) ? f : f8);
                }
                v[0] = v[1] = v[2] = v[3] = 0.0f;
            }
            for (int b = slice; b & 1; b >>= 1, wait += level) {
#pragma unroll
                for (int n = 0; n < GROUP; n++) {
#pragma unroll
                    for (int e = 0; e < PER; e++) {
                        sum[n][e] = wait[(n * PER + e) * step] + sum[n][e];
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < GROUP; n++) {
#pragma unroll
                for (int e = 0; e < PER; e++) {
                    int row = (col + (n0 + n) * 8 + 2 * c) / COLS + (COLS == 1 ? e & 1 : 0);
                    int out = r + ((COLS == 2 ? e == 0 : e < 2) ? 0 : 8);
                    if (!last) {
                        wait[(n * PER + e) * step] = sum[n][e];
                    } else if (row < p.n_row && out < t.n) {
                        t.y[row * t.ldy + out] = sum[n][e];
                    }
                }
            }
        }
    }
};

/* ---- warp -------------------------------------------------------------------------------------------------------- */

/* NT: column tiles of 8 of a warp. WN: warps side by side in the columns. */
template <int FMT, int NT, int WN, int COLS>
__global__ void __launch_bounds__(128 * WN, 1) warp_kernel(struct products p, int m_tiles, int n_tiles, int n_col) {
    constexpr int BN = 8 * NT * WN, THREADS = 128 * WN;
    constexpr bool BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    extern __shared__ __align__(128) uint8_t stages[]; /* [STAGES][BN][128 bytes] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    after_previous();
    int wm = warp & 3, wn = warp >> 2, steps = p.k / BK, slice_steps = p.ks / BK;
    float *stack = p.stack + (int64_t)blockIdx.x * (TREE_LEVELS * BM * BN) + threadIdx.x;

    for (int tile = blockIdx.x; tile < m_tiles * n_tiles; tile += gridDim.x) {
        int m_tile = tile / n_tiles, col0 = tile % n_tiles * BN;
        const struct target &t = target_of(p, BM, &m_tile);
        int row0 = m_tile * BM + wm * 32;
        auto fetch = [&](int step) {
            uint8_t *to = stages + step % STAGES * (BN * 128);
            const uint8_t *from = (const uint8_t *)p.xs + ((int64_t)step * n_col + col0) * 128;
            for (int i = threadIdx.x; i < BN * 8; i += THREADS) {
                copy_async16(to + i * 16, from + i * 16);
            }
        };
        sums<FMT, NT, COLS> sum[2];
        struct block_scales bs[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            sum[m].clear();
            if (BLOCK) {
                bs[m] = block_scales_of(t, p.k, row0 + 16 * m + g);
            }
        }
        operand<FMT> now[2], next[2];
        now[0].load(t, p.k, row0, 0, lane);
        now[1].load(t, p.k, row0 + 16, 0, lane);
        __syncthreads(); /* the stages may still be read for the last tile */
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < steps) {
                fetch(i);
            }
            commit_async();
        }
        int slice = 0, left = slice_steps;
        for (int step = 0; step < steps; step++) {
            wait_async<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) {
                fetch(step + STAGES - 1);
            }
            commit_async();
            if (step + 1 < steps) {
                next[0].load(t, p.k, row0, step + 1, lane);
                next[1].load(t, p.k, row0 + 16, step + 1, lane);
            }
            uint32_t a[2][4][4];
            now[0].fragments(a[0]);
            now[1].fragments(a[1]);
            const uint8_t *stage = stages + step % STAGES * (BN * 128);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t b[NT][2];
#pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    int col = wn * 8 * NT + n * 8 + (lane & 7) + (lane >> 4) * 8, chunk = 2 * j + (lane >> 3 & 1);
                    uint32_t r[4];
                    load_matrix4(r, stage + col * 128 + ((chunk ^ (col & 7)) << 4));
                    b[n][0] = r[0];
                    b[n][1] = r[1];
                    b[n + 1][0] = r[2];
                    b[n + 1][1] = r[3];
                }
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        if (FMT == QL_FORMAT_BF16) {
                            mma_bf16(sum[m].acc[n], a[m][j], b[n][0], b[n][1]);
                        } else {
                            mma_f16(sum[m].acc[n], a[m][j], b[n][0], b[n][1]);
                        }
                    }
                }
            }
            now[0] = next[0];
            now[1] = next[1];
            left--;
            int end = t.col_off / BK + step + 1;
            if (BLOCK && (end % (QL_FP8_BLOCK / BK) == 0 || left == 0)) {
                int b = (end - 1) / (QL_FP8_BLOCK / BK);
                sum[0].end_block(bs[0].g[b], bs[0].g8[b]);
                sum[1].end_block(bs[1].g[b], bs[1].g8[b]);
            }
            if (left == 0) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    sum[m].end_slice(p, t, slice, row0 + 16 * m + g, col0 + wn * 8 * NT, c,
                                     stack + m * NT * 4 * THREADS, THREADS, BM * BN);
                }
                slice++;
                left = slice_steps;
            }
        }
    }
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

template <int FMT, int NT, int WN, int COLS>
static ql_status run_warps(ql_dev *dev, struct products *p, int64_t cols, size_t work_bytes) {
    constexpr int BN = 8 * NT * WN;
    int64_t m_tiles = 0, n_tiles = ceil_div(cols, BN), most = cuda(dev)->n_sm;
    for (int i = 0; i < p->n_target; i++) {
        m_tiles += m_tiles_of(p->target[i], BM);
    }
    if (p->n_slice > 1) {
        int64_t room = (int64_t)(work_bytes / (TREE_LEVELS * BM * BN * sizeof(float)));
        most = room < most ? room : most;
    }
    if (most < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes leaves no room for one block",
                       dev->scratch_bytes);
    }
    int64_t grid = m_tiles * n_tiles < most ? m_tiles * n_tiles : most;
    return launch(dev, "linear", warp_kernel<FMT, NT, WN, COLS>, (unsigned)grid, 128 * WN, (size_t)STAGES * BN * 128,
                  *p, (int)m_tiles, (int)n_tiles, (int)(ceil_div(cols, COL_PAD) * COL_PAD));
}

template <int FMT, int COLS> static ql_status run(ql_dev *dev, struct products *p, size_t work_bytes) {
    int64_t cols = (int64_t)p->n_row * COLS;
    return cols <= 64 ? run_warps<FMT, 4, 1, COLS>(dev, p, cols, work_bytes)
                      : run_warps<FMT, 8, 2, COLS>(dev, p, cols, work_bytes);
}

static ql_status run_format(ql_dev *dev, struct products *p, ql_qformat format, size_t work_bytes) {
    bool two = p->x_cols == 2;
    switch (format) {
    case QL_FORMAT_NVFP4:
        return two ? run<QL_FORMAT_NVFP4, 2>(dev, p, work_bytes) : run<QL_FORMAT_NVFP4, 1>(dev, p, work_bytes);
    case QL_FORMAT_FP8_BLOCK:
        return two ? run<QL_FORMAT_FP8_BLOCK, 2>(dev, p, work_bytes) : run<QL_FORMAT_FP8_BLOCK, 1>(dev, p, work_bytes);
    case QL_FORMAT_F16: return run<QL_FORMAT_F16, 1>(dev, p, work_bytes);
    case QL_FORMAT_BF16: return run<QL_FORMAT_BF16, 1>(dev, p, work_bytes);
    default:
        return two ? run<QL_FORMAT_FP8_CHANNEL, 2>(dev, p, work_bytes)
                   : run<QL_FORMAT_FP8_CHANNEL, 1>(dev, p, work_bytes);
    }
}

/* Scratch of rows x cols columns of x: numbers, scales, flags. */
static size_t x_bytes(int64_t rows, int64_t cols, int64_t k) {
    return round_256((size_t)(ceil_div(rows * cols, COL_PAD) * COL_PAD * k * 2)) +
           round_256((size_t)(ceil_div(rows, COL_PAD) * COL_PAD * MAX_SLICES * 4)) + PROMPT_FLAGS * 4;
}

/* For what waits in the tree: no more than this is of use. */
static size_t work_bytes_of(int64_t hidden, int64_t rows) {
    const int64_t max_blocks = 224;
    int64_t blocks = ceil_div(hidden, BM) * ceil_div(2 * rows, BM);
    blocks = blocks < 2 ? 2 : blocks > max_blocks ? max_blocks : blocks;
    return (size_t)blocks * TREE_LEVELS * BM * 256 * 4;
}

size_t ql_linear_prompt_scratch(int64_t hidden, int64_t max_row, int64_t k) {
    max_row = max_row > COL_PAD ? max_row : COL_PAD;
    return x_bytes(max_row, 1, k) + work_bytes_of(hidden, max_row);
}

ql_status ql_linear_prompt_cuda(ql_dev *dev, const ql_linear_args *a, enum x_mode mode, struct products *p) {
    ql_qformat format = a->w->format;
    bool hopper = cuda(dev)->cc == 90;
    if (mode == X_E4M3_AS_F16 && hopper && p->ks % 128 == 0 && a->w->col_off % 128 == 0) {
        mode = X_E4M3;
    }
    int elem = mode == X_E4M3 ? 1 : 2;
    /* as many rows at a time as leave the tree its room */
    size_t tree = p->n_slice > 1 ? work_bytes_of(1, 1) : 0;
    tree = p->n_slice > 1 && dev->scratch_bytes / 2 > tree ? dev->scratch_bytes / 2 : tree;
    int64_t most = 32768, pad = COL_PAD / p->x_cols;
    while (most > pad && x_bytes(most, p->x_cols, p->k) + tree > dev->scratch_bytes) {
        most -= pad;
    }
    if (x_bytes(most, p->x_cols, p->k) > dev->scratch_bytes) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes does not hold a row of %d",
                       dev->scratch_bytes, p->k);
    }
    for (int t = 0; t < a->n_row; t += (int)most) {
        int rows = a->n_row - t < most ? a->n_row - t : (int)most;
        int64_t n_col = ceil_div((int64_t)rows * p->x_cols, COL_PAD) * COL_PAD, used = 0;
        uint8_t *xs = (uint8_t *)dev->scratch;
        float *xscale = (float *)(xs + round_256((size_t)n_col * (size_t)p->k * 2));
        used = (int64_t)x_bytes(rows, p->x_cols, p->k);
        p->flag = (uint32_t *)(xs + used - PROMPT_FLAGS * 4);
        p->xs = (const uint16_t *)xs;
        p->xscale = mode == X_BF16 ? NULL : xscale;
        p->xscale_ld = (int)(ceil_div(rows, COL_PAD) * COL_PAD);
        p->n_row = rows;
        QL_TRY(launch(dev, "linear: activations", elem == 1 ? prepare_prompt_x<true> : prepare_prompt_x<false>,
                      dim3((unsigned)a->n_slice, (unsigned)rows), X_THREADS, 0, a->x + t * a->ldx, a->ldx, p->ks, mode,
                      tile_k(format), (int)n_col, is_plain(format) || elem == 1 ? 1.0f : WEIGHT_UNIT, xs, xscale,
                      p->xscale_ld, p->flag, hopper && p->n_slice > 1 ? PROMPT_FLAGS : 0));
        if (hopper) {
            QL_TRY(ql_linear_prompt_sm90(dev, p, format, elem == 1, xs + used, dev->scratch_bytes - (size_t)used));
        } else {
            p->stack = (float *)(xs + used);
            QL_TRY(run_format(dev, p, format, dev->scratch_bytes - (size_t)used));
        }
        for (int i = 0; i < p->n_target; i++) {
            p->target[i].y += rows * p->target[i].ldy;
        }
    }
    return QL_OK;
}
