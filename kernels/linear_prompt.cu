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
#include "kernels/cuda/prepare.cuh"

enum { BM = 128, BK = 64, STAGES = 4 };

/* ---- prepared activations ---------------------------------------------------------------------------------------- */

/* Block (slice, row). A thread makes 16-byte chunks. kt: columns of a weight tile; n_col: columns of x in all; unit: what
 * the weights in registers are multiplied with to be themselves. Clears n_flag flags for the product. */
enum { X_THREADS = 128 };

/* Chunks of a slice that stay in registers between their largest and the result. */
template <bool X8, enum x_source_kind KIND>
constexpr int x_keep = KIND == X_STORED   ? (X8 ? 3 : 5)
                       : KIND == X_SWIGLU ? (X8 ? 2 : 3)
                                          : 1;

/* Blocks an SM: those of a gated norm have little work and much to wait for. An SM of 7.5 has room for 1,024 threads. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
enum { X_BLOCKS = 8 };
#else
enum { X_BLOCKS = 12 };
#endif
template <bool X8, enum x_source_kind KIND>
constexpr int x_blocks = KIND == X_GATED_NORM ? (X8 ? 8 : X_BLOCKS) : (X8 ? 5 : 8);

template <enum x_mode MODE, enum x_source_kind KIND>
__global__ void __launch_bounds__(X_THREADS, x_blocks<MODE == X_E4M3, KIND>)
    prepare_prompt_x(struct x_source src, int ks, int kt, int n_col, float unit, uint8_t *xs, float *xscale,
                     int xscale_ld, uint32_t *flag, int n_flag) {
    using chunk_t = x_chunk<MODE>;
    constexpr int N = chunk_t::N, KEEP = x_keep<chunk_t::X8, KIND>;
    constexpr bool MADE = KIND != X_STORED;
    __shared__ float part[X_THREADS / 32];
    extern __shared__ float head_scale[]; /* GATED_NORM: of each head of the slice */
    after_previous();
    int slice = blockIdx.x, row = blockIdx.y;
    for (int i = (row * gridDim.x + slice) * X_THREADS + threadIdx.x; i < n_flag;
         i += gridDim.x * gridDim.y * X_THREADS) {
        flag[i] = 0;
    }
    int64_t first = row * src.ld + (int64_t)slice * ks, step = (int64_t)slice * (ks / chunk_t::STEP);
    bool aligned = src.ld % 4 == 0 && ((uintptr_t)src.x | (uintptr_t)src.with | (uintptr_t)src.w) % 16 == 0;
    auto load = [&](const float *from, int q, chunk_t &v) { v.load([&](int i) { return from + i; }, q, kt, aligned); };
    /* v = the op's result for chunk q, of its two operands. */
    auto make = [&](int q, chunk_t &v, const chunk_t &u) {
        chunk_t w;
        float scale = 1.0f;
        if (KIND == X_GATED_NORM) {
            w.load([&](int i) { return src.w + i % 128; }, q, kt, aligned);
            scale = head_scale[chunk_t::begin(q, kt) / 128];
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            v.v[i] = KIND == X_SWIGLU ? silu(v.v[i]) * u.v[i] : ((v.v[i] * scale) * w.v[i]) * silu(u.v[i]);
        }
    };
    auto whole = [&](int q, chunk_t &v) {
        load(src.x + first, q, v);
        if (MADE) {
            chunk_t u;
            load(src.with + first, q, u);
            make(q, v, u);
        }
    };
    int chunks = ks / N;
    chunk_t kept[KEEP], other[MADE ? KEEP : 1];
    float most = 0.0f, up = 1.0f;
#pragma unroll
    for (int j = 0; j < KEEP; j++) { /* all loads before the first use */
        int q = j * X_THREADS + threadIdx.x;
        if (q < chunks) {
            load(src.x + first, q, kept[j]);
            if (MADE) {
                load(src.with + first, q, other[MADE ? j : 0]);
            }
        }
    }
    if (KIND == X_GATED_NORM) { /* as gated_norm_kernel */
        int lane = threadIdx.x & 31;
        for (int h = threadIdx.x >> 5; h < ks / 128; h += X_THREADS / 32) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float v = src.x[first + h * 128 + lane + 32 * j];
                sum = fmaf(v, v, sum);
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                head_scale[h] = 1.0f / sqrtf(sum / 128.0f + src.eps);
            }
        }
        __syncthreads();
    }
    if (MADE) {
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            int q = j * X_THREADS + threadIdx.x;
            if (q < chunks) {
                make(q, kept[j], other[MADE ? j : 0]);
            }
        }
    }
    if (MODE != X_BF16) {
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            if (j * X_THREADS + threadIdx.x < chunks) {
                most = kept[j].larger(most);
            }
        }
        for (int q = KEEP * X_THREADS + threadIdx.x; q < chunks; q += X_THREADS) {
            chunk_t v;
            whole(q, v);
            most = v.larger(most);
        }
        most = warp_max(most);
        if ((threadIdx.x & 31) == 0) {
            part[threadIdx.x >> 5] = most;
        }
        __syncthreads();
        most = warp_max(part[threadIdx.x & (X_THREADS / 32 - 1)]);
        float back;
        up = x_factor(most, MODE, &back);
        if (threadIdx.x == 0) {
            xscale[(int64_t)slice * xscale_ld + row] = back * unit;
        }
    }
#pragma unroll
    for (int j = 0; j < KEEP; j++) {
        int q = j * X_THREADS + threadIdx.x;
        if (q < chunks) {
            kept[j].put(up, xs, n_col, step, row, q);
        }
    }
    for (int q = KEEP * X_THREADS + threadIdx.x; q < chunks; q += X_THREADS) {
        chunk_t v;
        whole(q, v);
        v.put(up, xs, n_col, step, row, q);
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

/* Where x lies in scratch, prepared, and what is behind it. */
struct x_place {
    struct prepared_x x;
    uint32_t *flag;
    int64_t used;
};

static struct x_place place_of(ql_dev *dev, int64_t rows, int x_cols, int k, enum x_mode mode, ql_qformat format) {
    struct x_place p;
    p.x.mode = mode;
    p.x.kt = tile_k(format);
    p.x.n_col = (int)(ceil_div(rows * x_cols, COL_PAD) * COL_PAD);
    p.x.scale_ld = (int)(ceil_div(rows, COL_PAD) * COL_PAD);
    p.x.unit = is_plain(format) || mode == X_E4M3 ? 1.0f : WEIGHT_UNIT;
    p.x.xs = (uint8_t *)dev->scratch;
    p.x.scale = (float *)(p.x.xs + round_256((size_t)p.x.n_col * (size_t)k * 2));
    p.used = (int64_t)x_bytes(rows, x_cols, k);
    p.flag = (uint32_t *)(p.x.xs + p.used - PROMPT_FLAGS * 4);
    return p;
}

template <enum x_mode MODE, enum x_source_kind KIND>
static ql_status prepare(ql_dev *dev, struct x_source from, const struct products *p, const struct prepared_x &x,
                         int n_flag) {
    size_t shared = KIND == X_GATED_NORM ? (size_t)p->ks / 128 * sizeof(float) : 0;
    return launch(dev, "linear: activations", prepare_prompt_x<MODE, KIND>,
                  dim3((unsigned)p->n_slice, (unsigned)p->n_row), X_THREADS, shared, from, p->ks, x.kt, x.n_col, x.unit,
                  x.xs, x.scale, x.scale_ld, p->flag, n_flag);
}

template <enum x_source_kind KIND>
static ql_status prepare_as(ql_dev *dev, struct x_source from, const struct products *p, const struct prepared_x &x,
                            int n_flag) {
    auto with = x.mode == X_F16X2         ? prepare<X_F16X2, KIND>
                : x.mode == X_F16         ? prepare<X_F16, KIND>
                : x.mode == X_E4M3_AS_F16 ? prepare<X_E4M3_AS_F16, KIND>
                : x.mode == X_BF16        ? prepare<X_BF16, KIND>
                : x.mode == X_E4M3        ? prepare<X_E4M3, KIND>
                                          : prepare<X_BF16_AS_F16, KIND>;
    return with(dev, from, p, x, n_flag);
}

/* As many rows at a time as leave the tree its room. */
static int64_t rows_at_a_time(const ql_dev *dev, int x_cols, int k, int n_slice) {
    size_t tree = n_slice > 1 ? work_bytes_of(1, 1) : 0;
    tree = n_slice > 1 && dev->scratch_bytes / 2 > tree ? dev->scratch_bytes / 2 : tree;
    int64_t most = 32768, pad = COL_PAD / x_cols;
    while (most > pad && x_bytes(most, x_cols, k) + tree > dev->scratch_bytes) {
        most -= pad;
    }
    return most;
}

/* FP8 numbers on both sides where there are instructions for that and slices are whole blocks. */
static enum x_mode prompt_mode(const ql_dev *dev, const ql_linear_args *a, enum x_mode mode) {
    bool e4m3 =
        mode == X_E4M3_AS_F16 && cuda(dev)->cc == 90 && a->w->k / a->n_slice % 128 == 0 && a->w->col_off % 128 == 0;
    return e4m3 ? X_E4M3 : mode;
}

static bool at_once(const ql_dev *dev, const ql_linear_args *a, enum x_mode mode) {
    return a->n_row <= rows_at_a_time(dev, mode == X_F16X2 ? 2 : 1, a->w->k, a->n_slice);
}

bool ql_linear_prompt_can_push(const ql_dev *dev, const ql_linear_args *a, enum x_mode mode) {
    const ql_weight *w = a->w;
    int64_t flags = ceil_div(a->n_row, PUSH_ROWS) * (w->n / PUSH_COLS) * PUSHERS;
    return cuda(dev)->cc == 90 && !is_plain(w->format) && w->n % (2 * PUSH_COLS) == 0 && a->ldy == w->n &&
           (uintptr_t)a->y % 16 == 0 && flags < QL_CUDA_INBOX_FLAGS && at_once(dev, a, mode);
}

bool ql_linear_prompt_place(ql_dev *dev, const ql_linear_args *a, enum x_mode mode, struct prepared_x *x) {
    mode = prompt_mode(dev, a, mode);
    *x = place_of(dev, a->n_row, mode == X_F16X2 ? 2 : 1, a->w->k, mode, a->w->format).x;
    return a->n_slice == 1 && at_once(dev, a, mode);
}

ql_status ql_linear_prompt_cuda(ql_dev *dev, const ql_linear_args *a, enum x_mode mode, const struct x_source &from,
                                const struct push *to, struct products *p) {
    ql_qformat format = a->w->format;
    bool hopper = cuda(dev)->cc == 90;
    mode = prompt_mode(dev, a, mode);
    int64_t most = rows_at_a_time(dev, p->x_cols, p->k, p->n_slice);
    if (x_bytes(most, p->x_cols, p->k) > dev->scratch_bytes) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes does not hold a row of %d",
                       dev->scratch_bytes, p->k);
    }
    for (int t = 0; t < a->n_row; t += (int)most) {
        int rows = a->n_row - t < most ? a->n_row - t : (int)most;
        struct x_place at = place_of(dev, rows, p->x_cols, p->k, mode, format);
        uint8_t *work = at.x.xs + at.used;
        size_t work_bytes = dev->scratch_bytes - (size_t)at.used;
        p->flag = at.flag;
        p->xs = (const uint16_t *)at.x.xs;
        p->xscale = mode == X_BF16 ? NULL : at.x.scale;
        p->xscale_ld = at.x.scale_ld;
        p->n_row = rows;
        struct x_source here = from;
        here.x += t * from.ld;
        here.with += from.with ? t * from.ld : 0;
        int n_flag = hopper && p->n_slice > 1 ? PROMPT_FLAGS : 0;
        auto prepare_of = from.kind == X_SWIGLU       ? prepare_as<X_SWIGLU>
                          : from.kind == X_GATED_NORM ? prepare_as<X_GATED_NORM>
                                                      : prepare_as<X_STORED>;
        if (from.kind != X_PREPARED) {
            QL_TRY(prepare_of(dev, here, p, at.x, n_flag));
        }
        if (hopper) {
            QL_TRY(ql_linear_prompt_sm90(dev, p, format, mode == X_E4M3, work, work_bytes, to));
        } else {
            p->stack = (float *)work;
            QL_TRY(run_format(dev, p, format, work_bytes));
        }
        for (int i = 0; i < p->n_target; i++) {
            p->target[i].y += rows * p->target[i].ldy;
        }
    }
    return QL_OK;
}
