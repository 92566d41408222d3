/* linear for generated rows, quantized weights: 1 to 16 rows of x at the price of one.
 *
 * Weights are the A operand of mma.m16n8k16, rows of x its columns, so a weight is decoded once for all rows. A warp computes
 * a unit of cuda/unit.cuh, which fixes the order of additions.
 *
 * A block owns a row tile. Its warps load the codes of a unit before they use the first of them, and the first unit before
 * the kernel before this one is complete: what is in flight, not arithmetic, sets the speed. Many small blocks, because
 * those of the next product then fill the places that the last ones of this product leave; for one product by itself a
 * persistent kernel with bulk copies was slower at every shape (bench/NOTES.md), chain.cu has one for many ops. Products of
 * the same x share a launch.
 */
#include "kernels/cuda/unit.cuh"

/* The codes and scales of a unit, as loaded. */
template <int FMT> struct unit {
    static constexpr int TILES = UNIT_TILES;
    uint4 w[TILES];
    uint32_t s[TILES];
    int first, n; /* column tiles */

    __device__ __forceinline__ void load(const uint8_t *codes, const uint8_t *scales, const struct cut &c, int j,
                                         int lane) {
        int part = j % c.per_slice;
        first = j / c.per_slice * c.tiles + c.begin(part);
        n = c.shortest + (part < c.longer);
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
    for (int j = warp; j < c.per_slice * p.n_slice; j += n_warp) {
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
                slice[q] = __fmul_rn(v0, f);
            }
        }
        if (r < t.n) {
            t.y[row * t.ldy + r] = slice_tree(slice, p.n_slice);
        }
    }
}

template <int FMT, int NT, int COLS> static ql_status run(ql_dev *dev, const struct products *p) {
    struct cut c = cut_of(p->ks / tile_k(FMT));
    int units = c.per_slice * p->n_slice; /* of a row tile */
    int64_t blocks = 0;
    for (int i = 0; i < p->n_target; i++) {
        blocks += p->target[i].row_tiles;
    }
    size_t shared = (size_t)units * (NT * 8 / COLS) * 16 * sizeof(float);
    /* A unit a warp where that comes out even saves FP8 a tenth; NVFP4 decodes too much for the fewer registers. */
    constexpr int MANY = FMT == QL_FORMAT_FP8_CHANNEL && NT == 1 ? 16 : 8;
    if (MANY == 16 && units % MANY == 0) {
        return launch(dev, "linear", small_kernel<FMT, NT, COLS, MANY>, (unsigned)blocks, 32 * MANY, shared, *p, c);
    }
    unsigned warps = units < 8 ? (unsigned)units : 8;
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
