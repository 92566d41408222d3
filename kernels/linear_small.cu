/* linear for generated rows, quantized weights: 1 to 16 rows of x at the price of one.
 *
 * Weights are the A operand of mma.m16n8k16, rows of x its columns, so a weight is decoded once for all rows. Every
 * canonical slice of a tile of 16 weight rows is cut into units of UNIT column tiles (the last may be shorter), one run of
 * bytes in memory each; a warp computes a unit, units are added in rising order. The cut depends on the slice's length
 * alone.
 *
 * A block owns a row tile. Its warps load the codes of a unit before they use the first of them, and the first unit before
 * the kernel before this one is complete: what is in flight, not arithmetic, sets the speed. Many small blocks, because
 * those of the next product then fill the places that the last ones of this product leave; a persistent kernel with bulk
 * copies was slower at every shape (bench/NOTES.md). Products of the same x share a launch.
 */
#include "kernels/cuda/linear.cuh"

/* ---- a unit ------------------------------------------------------------------------------------------------------ */

static constexpr __host__ __device__ int unit_tiles(int format) { return format == QL_FORMAT_NVFP4 ? 5 : 10; }

/* Cut of the weights into units. */
struct cut {
    int tiles;        /* column tiles of a slice */
    int per_slice;    /* units of a slice */
    int per_row_tile; /* units of a row tile */
};

/* Sums of a warp: NT column tiles of 8. COLS: columns of a row of x. Even and odd steps are added apart. */
template <int FMT, int NT, int COLS> struct sums {
    static constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    static constexpr int KT = tile_k(FMT), STEPS = KT / 16, TOK = NT * 8 / COLS;
    float acc[NT][2][4], total[BLOCK ? NT : 1][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[n][0][i] = acc[n][1][i] = 0.0f;
                total[BLOCK ? n : 0][i] = 0.0f;
            }
        }
    }

    /* One tile: its codes w and scales s of this lane, and the columns of x at the lane's first element, n_col of them. */
    __device__ __forceinline__ void add(uint4 w, uint32_t s, const uint16_t *x, int k, int n_col, int lane) {
        uint32_t a[STEPS][4];
        if (FP4) {
            uint32_t sg, sg8, lo[8], hi[8];
            group_scales(s, &sg, &sg8);
            e2m1_pairs(w.x, lo);
            e2m1_pairs(w.y, lo + 4);
            e2m1_pairs(w.z, hi);
            e2m1_pairs(w.w, hi + 4);
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                a[j][0] = mul_f16x2(lo[2 * j % 8], sg);
                a[j][1] = mul_f16x2(hi[2 * j % 8], sg8);
                a[j][2] = mul_f16x2(lo[(2 * j + 1) % 8], sg);
                a[j][3] = mul_f16x2(hi[(2 * j + 1) % 8], sg8);
            }
        } else {
            const uint32_t lo[2] = {w.x, w.y}, hi[2] = {w.z, w.w};
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                a[j][0] = e4m3_pair0(lo[j % 2]);
                a[j][1] = e4m3_pair0(hi[j % 2]);
                a[j][2] = e4m3_pair1(lo[j % 2]);
                a[j][3] = e4m3_pair1(hi[j % 2]);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint32_t b[2 * STEPS] = {};
            if (n * 8 + (lane >> 2) < n_col) {
                const uint4 *from = (const uint4 *)(x + (int64_t)(n * 8) * k);
#pragma unroll
                for (int j = 0; j < STEPS / 2; j++) {
                    uint4 v = __ldg(from + j);
                    b[4 * j] = v.x;
                    b[4 * j + 1] = v.y;
                    b[4 * j + 2] = v.z;
                    b[4 * j + 3] = v.w;
                }
            }
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                mma_f16(acc[n][j & 1], a[j], b[2 * j], b[2 * j + 1]);
            }
        }
    }

    /* The end of a 128-block or of the unit: f and f8 are the block scales of rows g and g + 8. */
    __device__ __forceinline__ void end_block(float f, float f8) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *t = total[BLOCK ? n : 0];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                t[i] = fmaf(acc[n][0][i] + acc[n][1][i], i < 2 ? f : f8, t[i]);
                acc[n][0][i] = acc[n][1][i] = 0.0f;
            }
        }
    }

    /* Into [TOK][16]: row of x, weight row. Rows of x from n_row on are left out. */
    __device__ __forceinline__ void store(float *out, int n_row, int lane) const {
        int g = lane >> 2, c = lane & 3;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = BLOCK ? total[n % (BLOCK ? NT : 1)][i] : acc[n][0][i] + acc[n][1][i];
            }
            if (COLS == 2) {
                int t = n * 4 + c;
                if (t < n_row) {
                    out[t * 16 + g] = fmaf(v[1], 1.0f / 2048.0f, v[0]);
                    out[t * 16 + g + 8] = fmaf(v[3], 1.0f / 2048.0f, v[2]);
                }
            } else {
                int t = n * 8 + 2 * c;
                if (t < n_row) {
                    out[t * 16 + g] = v[0];
                    out[t * 16 + g + 8] = v[2];
                }
                if (t + 1 < n_row) {
                    out[(t + 1) * 16 + g] = v[1];
                    out[(t + 1) * 16 + g + 8] = v[3];
                }
            }
        }
    }
};

/* The codes and scales of a unit, as loaded. */
template <int FMT> struct unit {
    static constexpr int TILES = unit_tiles(FMT);
    uint4 w[TILES];
    uint32_t s[TILES];
    int first, n; /* column tiles */

    __device__ __forceinline__ void load(const uint8_t *codes, const uint8_t *scales, const struct cut &c, int j,
                                         int lane) {
        int part = j % c.per_slice;
        first = j / c.per_slice * c.tiles + part * TILES;
        n = min(TILES, c.tiles - part * TILES);
        codes += first * TILE_BYTES;
        scales += first * TILE_SCALE_BYTES;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (i < n) {
                w[i] = load_stream(codes + i * TILE_BYTES);
                s[i] = FMT == QL_FORMAT_NVFP4 ? load_stream_u16(scales + i * TILE_SCALE_BYTES) : 0;
            }
        }
    }
};

/* WARPS at most; the bounds keep 24 or 32 warps on an SM for one to four rows. */
template <int FMT, int NT, int COLS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, WARPS == 8 && NT == 1 ? 3 : 2)
    small_kernel(struct products p, struct cut c) {
    constexpr int KT = tile_k(FMT), TOK = NT * 8 / COLS;
    constexpr bool BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    extern __shared__ float unit_sums[]; /* [unit][TOK][16] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_warp = blockDim.x >> 5, which = 0, row_tile = blockIdx.x;
    while (which + 1 < p.n_target && row_tile >= p.target[which].row_tiles) {
        row_tile -= p.target[which++].row_tiles;
    }
    const struct target &t = p.target[which];
    int64_t tile0 = (int64_t)row_tile * (c.tiles * p.n_slice);
    const uint8_t *codes = t.w + tile0 * TILE_BYTES + lane * 16;
    const uint8_t *scales = (const uint8_t *)t.scale + tile0 * TILE_SCALE_BYTES + lane * 2; /* NVFP4 */
    struct unit<FMT> u;
    allow_next();
    u.load(codes, scales, c, warp, lane);
    wait_previous();

    /* what the results of this thread are multiplied with: here already, for its latency */
    int my_r = row_tile * TILE_ROWS + (threadIdx.x & 15), my_row = threadIdx.x >> 4;
    float my_scale[MAX_SLICES];
    if (my_row < p.n_row) {
        float f = t.row_scale ? ((const float *)t.scale)[min(my_r, t.n - 1)] : t.factor;
#pragma unroll
        for (int q = 0; q < MAX_SLICES; q++) {
            my_scale[q] = q < p.n_slice ? p.xscale[my_row * p.n_slice + q] * f : 0.0f;
        }
    }
    const uint16_t *x = p.xs + (int64_t)(lane >> 2) * p.k + (lane & 3) * (KT / 4);
    const float *bs = (const float *)t.scale, *bs8 = bs;
    if (BLOCK) { /* scales of the 128-blocks of rows g and g + 8 */
        int64_t blocks = (t.col_off + p.k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
        int r = row_tile * TILE_ROWS + (lane >> 2);
        bs += (t.row_off + min(r, t.n - 1)) / QL_FP8_BLOCK * blocks;
        bs8 += (t.row_off + min(r + 8, t.n - 1)) / QL_FP8_BLOCK * blocks;
    }
    auto work = [&](const struct unit<FMT> &v, int j) {
        sums<FMT, NT, COLS> sum;
        sum.clear();
#pragma unroll
        for (int i = 0; i < unit<FMT>::TILES; i++) {
            if (i < v.n) {
                sum.add(v.w[i], v.s[i], x + (v.first + i) * KT, p.k, p.n_row * COLS, lane);
                int next = t.col_off / KT + v.first + i + 1;
                if (BLOCK && (next % (QL_FP8_BLOCK / KT) == 0 || i + 1 == v.n)) {
                    int b = (next - 1) / (QL_FP8_BLOCK / KT);
                    sum.end_block(bs[b], bs8[b]);
                }
            }
        }
        sum.store(unit_sums + j * TOK * 16, p.n_row, lane);
    };
    for (int j = warp; j < c.per_row_tile; j += n_warp) {
        if (j != warp) {
            u.load(codes, scales, c, j, lane);
        }
        work(u, j);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * p.n_row; i += blockDim.x) {
        int r = row_tile * TILE_ROWS + (i & 15), row = i >> 4;
        float slice[MAX_SLICES];
#pragma unroll
        for (int q = 0; q < MAX_SLICES; q++) {
            slice[q] = 0.0f;
            if (q < p.n_slice) {
                const float *v = unit_sums + q * c.per_slice * TOK * 16 + i;
                float v0 = v[0];
                for (int j = 1; j < c.per_slice; j++) {
                    v0 += v[j * TOK * 16];
                }
                float f = my_scale[q];
                if (row != my_row) {
                    f = p.xscale[row * p.n_slice + q] *
                        (t.row_scale ? ((const float *)t.scale)[min(r, t.n - 1)] : t.factor);
                }
                slice[q] = v0 * f;
            }
        }
        if (r < t.n) {
            t.y[row * t.ldy + r] = slice_tree(slice, p.n_slice);
        }
    }
}

template <int FMT, int NT, int COLS> static ql_status run(ql_dev *dev, const struct products *p) {
    struct cut c;
    c.tiles = p->ks / tile_k(FMT);
    c.per_slice = (int)ceil_div(c.tiles, unit_tiles(FMT));
    c.per_row_tile = c.per_slice * p->n_slice;
    int64_t blocks = 0;
    for (int i = 0; i < p->n_target; i++) {
        blocks += p->target[i].row_tiles;
    }
    size_t shared = (size_t)c.per_row_tile * (NT * 8 / COLS) * 16 * sizeof(float);
    /* A unit a warp where that comes out even saves FP8 a tenth; NVFP4 decodes too much for the fewer registers. */
    constexpr int MANY = FMT == QL_FORMAT_FP8_CHANNEL && NT == 1 ? 16 : 8;
    if (MANY == 16 && c.per_row_tile % MANY == 0) {
        return launch(dev, "linear", small_kernel<FMT, NT, COLS, MANY>, (unsigned)blocks, 32 * MANY, shared, *p, c);
    }
    unsigned warps = c.per_row_tile < 8 ? (unsigned)c.per_row_tile : 8;
    return launch(dev, "linear", small_kernel<FMT, NT, COLS, 8>, (unsigned)blocks, 32 * warps, shared, *p, c);
}

template <int FMT> static ql_status by_rows(ql_dev *dev, const struct products *p) {
    if (p->x_cols == 2) {
        return p->n_row <= 4 ? run<FMT, 1, 2>(dev, p) : p->n_row <= 8 ? run<FMT, 2, 2>(dev, p) : run<FMT, 4, 2>(dev, p);
    }
    return p->n_row <= 8 ? run<FMT, 1, 1>(dev, p) : run<FMT, 2, 1>(dev, p);
}

ql_status ql_linear_small_cuda(ql_dev *dev, const struct products *p, ql_qformat format) {
    switch (format) {
    case QL_FORMAT_NVFP4: return by_rows<QL_FORMAT_NVFP4>(dev, p);
    case QL_FORMAT_FP8_BLOCK: return by_rows<QL_FORMAT_FP8_BLOCK>(dev, p);
    default: return by_rows<QL_FORMAT_FP8_CHANNEL>(dev, p);
    }
}
