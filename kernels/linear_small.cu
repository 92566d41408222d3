/* linear for generated rows, quantized weights: 1 to 16 rows of x at the price of one.
 *
 * Weights are the A operand of mma.m16n8k16, rows of x its columns, so a weight is decoded once for all rows. A warp computes
 * units of cuda/unit.cuh, which fixes the order of additions.
 *
 * A block owns a row tile, or two where x has so many columns that reading them is what costs. Each warp fetches its weights
 * by asynchronous copies into a ring of its own, which takes no registers: the first unit before the kernel before this one is
 * complete, later ones as the ring empties. Many small blocks, because those of the next product then fill the places that
 * the last ones of this product leave; for one product by itself a persistent kernel with bulk copies was slower at every
 * shape (bench/NOTES.md), chain.cu has one for many ops. Products of the same x share a launch.
 */
#include "kernels/cuda/unit.cuh"

/* How a kernel for NT column tiles of x is made: row tiles of a block, and blocks that an SM is to hold. With more
 * weights on their way x was slower to come, likely for want of room in the first-level cache. */
template <int NT> struct form { static constexpr int RT = NT == 1 ? 1 : 2, BLOCKS = NT == 1 ? 3 : NT == 2 ? 2 : 1; };

enum { WARPS = 8 }; /* of a block, at most */

/* A warp's ring: the halves of a unit, the first of which is not the smaller one, each for all row tiles of the block. */
template <int FMT, int RT> struct ring {
    static constexpr bool SCALES = FMT == QL_FORMAT_NVFP4;
    static constexpr int HALF = UNIT_TILES / 2, SCALES_AT = HALF * TILE_BYTES,
                         ROW_TILE = SCALES_AT + (SCALES ? HALF * TILE_SCALE_BYTES : 0), SLOT = RT * ROW_TILE,
                         BYTES = 2 * SLOT;
};

/* Column tiles of a unit, counted over all slices. */
struct span {
    int first, n;

    __device__ __forceinline__ int first_half(void) const { return (n + 1) / 2; }
};

__device__ __forceinline__ struct span unit_at(const struct cut &c, int n_slice, int j) {
    unsigned slice = 0, in = (unsigned)j;
    if (n_slice > 1) {
        slice = in / (unsigned)c.per_slice;
        in -= slice * (unsigned)c.per_slice;
    }
    return {(int)slice * c.tiles + c.begin((int)in), c.shortest + ((int)in < c.longer)};
}

/* Shared memory: the warps' rings | sums of units [RT][unit][TOK][16] | factors of weight rows [RT][16] | of x [row][slice] */
template <int FMT, int NT, int COLS>
__global__ void __launch_bounds__(32 * WARPS, form<NT>::BLOCKS) small_kernel(struct products p, struct cut c) {
    constexpr int KT = tile_k(FMT), TOK = NT * 8 / COLS, RT = form<NT>::RT;
    constexpr bool BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    using R = ring<FMT, RT>;
    using S = sums<FMT, NT, COLS>;
    extern __shared__ __align__(16) uint8_t shared[];
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = kept(threadIdx.x & 31), n_warp = blockDim.x >> 5;
    int units = c.per_slice * p.n_slice, tiles_of_row = c.tiles * p.n_slice, which = 0, group = blockIdx.x;
    float *unit_sums = (float *)(shared + n_warp * R::BYTES), *row_factor = unit_sums + RT * units * TOK * 16,
          *x_factor = row_factor + RT * TILE_ROWS;
    while (which + 1 < p.n_target && group >= (p.target[which].row_tiles + RT - 1) / RT) {
        group -= (p.target[which++].row_tiles + RT - 1) / RT;
    }
    const struct target &t = p.target[which];
    int row_tile = group * RT, row0 = row_tile * TILE_ROWS;
    int64_t tile0 = (int64_t)row_tile * tiles_of_row;
    /* From a row tile to the next; beyond the last one there is that once more, and nothing stored. */
    int stride = row_tile + 1 < t.row_tiles ? tiles_of_row : 0;
    const uint8_t *codes = t.w + tile0 * TILE_BYTES + lane * 16;
    const uint8_t *scales = (const uint8_t *)t.scale + tile0 * TILE_SCALE_BYTES + lane * 16; /* NVFP4 */
    uint8_t *mine = shared + kept(warp * R::BYTES + lane * 16);

    /* Tiles first .. first + n - 1 into a slot: codes as this lane uses them, scales by the piece. */
    auto fetch = [&](int slot, int first, int n) {
#pragma unroll
        for (int q = 0; q < RT; q++) {
            const uint8_t *from = codes + (int64_t)(first + q * stride) * TILE_BYTES;
            uint8_t *to = mine + slot * R::SLOT + q * R::ROW_TILE;
            auto copy = [&](auto many) {
#pragma unroll
                for (int i = 0; i < decltype(many)::value; i++) {
                    copy_async16(to + i * TILE_BYTES, from + i * TILE_BYTES);
                }
            };
            if (n == 5) {
                copy(constant<5>{});
            } else if (n == 4) {
                copy(constant<4>{});
            } else {
#pragma unroll 1
                for (int i = 0; i < n; i++) {
                    copy_async16(to + i * TILE_BYTES, from + i * TILE_BYTES);
                }
            }
            if (R::SCALES && lane < n * (TILE_SCALE_BYTES / 16)) {
                copy_async16(to + R::SCALES_AT, scales + (int64_t)(first + q * stride) * TILE_SCALE_BYTES);
            }
        }
    };
    allow_next();
    struct span unit = unit_at(c, p.n_slice, warp);
#pragma unroll 1
    for (int half = 0, first = unit.first, n = unit.first_half(); half < 2; half++) {
        fetch(half, first, n);
        commit_async();
        first += n;
        n = unit.n - n;
    }
    wait_previous();

    for (int i = threadIdx.x; i < RT * TILE_ROWS; i += blockDim.x) {
        if (t.row_scale) {
            copy_async4(row_factor + i, (const float *)t.scale + min(row0 + i, t.n - 1));
        } else {
            row_factor[i] = t.factor;
        }
    }
    for (int i = threadIdx.x; i < p.n_row * p.n_slice; i += blockDim.x) {
        copy_async4(x_factor + i, p.xscale + i);
    }
    /* Columns that x does not have repeat its last one: their results are not stored. */
    const uint16_t *xs[NT];
#pragma unroll
    for (int m = 0; m < NT; m++) {
        xs[m] = kept(p.xs + min(m * 8 + (lane >> 2), p.n_row * COLS - 1) * p.k + (lane & 3) * (KT / 4));
    }
    const float *bs[RT], *bs8[RT];
    if (BLOCK) { /* scales of the 128-blocks of rows g and g + 8 */
        int64_t blocks = (t.col_off + p.k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
#pragma unroll
        for (int q = 0; q < RT; q++) {
            int r = row0 + q * TILE_ROWS + (lane >> 2);
            bs[q] = (const float *)t.scale + (t.row_off + min(r, t.n - 1)) / QL_FP8_BLOCK * blocks;
            bs8[q] = (const float *)t.scale + (t.row_off + min(r + 8, t.n - 1)) / QL_FP8_BLOCK * blocks;
        }
    }
    for (int j = warp; j < units; j += n_warp) {
        struct span next = {0, 0};
        if (j + n_warp < units) {
            next = unit_at(c, p.n_slice, j + n_warp);
        }
        S sum[RT];
#pragma unroll
        for (int q = 0; q < RT; q++) {
            sum[q].clear();
        }
        int first = unit.first, n = unit.first_half(), next_first = next.first, next_n = next.first_half();
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            constexpr bool AHEAD = NT == 1; /* x is loaded a tile ahead */
            const uint8_t *w = mine + half * R::SLOT, *s = w + R::SCALES_AT - lane * 14;
            const uint16_t *x[NT];
            uint4 b[2][S::STEPS / 2];
#pragma unroll
            for (int m = 0; m < NT; m++) {
                x[m] = kept(xs[m] + first * KT);
            }
            auto load_x = [&](int m, int i) {
                const uint4 *from = (const uint4 *)(x[m] + i * KT);
#pragma unroll
                for (int k = 0; k < S::STEPS / 2; k++) {
                    b[AHEAD ? i & 1 : 0][k] = __ldg(from + k);
                }
            };
            auto tiles = [&](auto count) {
                constexpr int N = decltype(count)::value;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    if (AHEAD && i + 1 < N) {
                        load_x(0, i + 1);
                    }
                    uint32_t a[RT][S::STEPS][4];
#pragma unroll
                    for (int q = 0; q < RT; q++) {
                        const uint8_t *at = w + q * R::ROW_TILE + i * TILE_BYTES,
                                      *s_at = s + q * R::ROW_TILE + i * TILE_SCALE_BYTES;
                        S::decode(*(const uint4 *)at, R::SCALES ? *(const uint16_t *)s_at : 0, a[q]);
                    }
#pragma unroll
                    for (int m = 0; m < NT; m++) {
                        if (!AHEAD) {
                            load_x(m, i);
                        }
#pragma unroll
                        for (int q = 0; q < RT; q++) {
                            sum[q].multiply(m, a[q], b[AHEAD ? i & 1 : 0]);
                        }
                    }
                    int end = t.col_off / KT + first + i + 1;
                    if (BLOCK && (end % (QL_FP8_BLOCK / KT) == 0 || first + i + 1 == unit.first + unit.n)) {
                        int at = (end - 1) / (QL_FP8_BLOCK / KT);
#pragma unroll
                        for (int q = 0; q < RT; q++) {
                            sum[q].end_block(bs[q][at], bs8[q][at]);
                        }
                    }
                }
            };
            if (AHEAD && n > 0) {
                load_x(0, 0);
            }
            wait_async<1>();
            __syncwarp();
            int end = first + n;
            if (n == 5) {
                tiles(constant<5>{});
            } else if (n == 4) {
                tiles(constant<4>{});
            } else {
#pragma unroll 1
                for (; first < end; first++) {
                    if (AHEAD) {
                        load_x(0, 0);
                    }
                    tiles(constant<1>{});
                    w += TILE_BYTES;
                    s += TILE_SCALE_BYTES;
#pragma unroll
                    for (int m = 0; m < NT; m++) {
                        x[m] += KT;
                    }
                }
            }
            if (next_n > 0) {
                __syncwarp();
                fetch(half, next_first, next_n);
            }
            commit_async();
            first = end;
            n = unit.n - n;
            next_first += next_n;
            next_n = next.n - next_n;
        }
        unit = next;
#pragma unroll
        for (int q = 0; q < RT; q++) {
            sum[q].store(unit_sums + (q * units + j) * TOK * 16, p.n_row, lane);
        }
    }
    wait_async<0>(); /* factors */
    __syncthreads();
    for (int i = threadIdx.x; i < RT * 16 * p.n_row; i += blockDim.x) {
        int in = i & 15, row = i >> 4, tile = 0;
        if (RT > 1 && row >= p.n_row) {
            row -= p.n_row;
            tile = 1;
        }
        float slice[MAX_SLICES], f = row_factor[tile * TILE_ROWS + in];
#pragma unroll
        for (int q = 0; q < MAX_SLICES; q++) {
            slice[q] = 0.0f;
            if (q < p.n_slice) {
                const float *v = unit_sums + ((tile * units + q * c.per_slice) * TOK + row) * 16 + in;
                float v0 = v[0];
                for (int j = 1; j < c.per_slice; j++) {
                    v0 += v[j * TOK * 16];
                }
                slice[q] = __fmul_rn(v0, x_factor[row * p.n_slice + q] * f);
            }
        }
        int r = row0 + tile * TILE_ROWS + in;
        if (r < t.n) {
            t.y[row * t.ldy + r] = slice_tree(slice, p.n_slice);
        }
    }
}

/* Rows [row, row + n) of *p, n <= NT 8 / COLS. *fits false: the sums of so many rows leave no room for the ring of a warp. */
template <int FMT, int NT, int COLS>
static ql_status run(ql_dev *dev, const struct products *p, int row, int n, bool *fits) {
    constexpr int RT = form<NT>::RT;
    struct products part = *p;
    struct cut c = cut_of(p->ks / tile_k(FMT));
    int units = c.per_slice * p->n_slice, warps = units < WARPS ? units : WARPS;
    size_t one = ring<FMT, RT>::BYTES, limit = (size_t)cuda(dev)->block_shared,
           rest = ((size_t)RT * TILE_ROWS * (units * (NT * 8 / COLS) + 1) + (size_t)n * p->n_slice) * sizeof(float);
    while (warps > 1 && warps * one + rest > limit) {
        warps /= 2;
    }
    *fits = warps * one + rest <= limit;
    if (!*fits) {
        return QL_OK;
    }
    int64_t blocks = 0;
    part.xs += (int64_t)row * COLS * p->k;
    part.xscale += row * p->n_slice;
    part.n_row = n;
    for (int i = 0; i < p->n_target; i++) {
        part.target[i].y += row * p->target[i].ldy;
        blocks += ceil_div(p->target[i].row_tiles, RT);
    }
    return launch(dev, "linear", small_kernel<FMT, NT, COLS>, (unsigned)blocks, 32 * (unsigned)warps,
                  warps * one + rest, part, c);
}

/* As many rows at once as the GPU has room for. */
template <int FMT> static ql_status by_rows(ql_dev *dev, const struct products *p) {
    int row = 0, most = SMALL_MAX_ROWS;
    while (row < p->n_row) {
        int n = p->n_row - row < most ? p->n_row - row : most, columns = n * p->x_cols;
        bool fits;
        if (p->x_cols == 2) {
            QL_TRY(columns <= 8    ? (run<FMT, 1, 2>(dev, p, row, n, &fits))
                   : columns <= 16 ? (run<FMT, 2, 2>(dev, p, row, n, &fits))
                                   : (run<FMT, 4, 2>(dev, p, row, n, &fits)));
        } else {
            QL_TRY(columns <= 8 ? (run<FMT, 1, 1>(dev, p, row, n, &fits)) : (run<FMT, 2, 1>(dev, p, row, n, &fits)));
        }
        if (fits) {
            row += n;
        } else if (n == 1) {
            return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: no room for a slice of %d columns", p->ks);
        } else {
            most = (n + 1) / 2;
        }
    }
    return QL_OK;
}

ql_status ql_linear_small_cuda(ql_dev *dev, const struct products *p, ql_qformat format) {
    switch (format) {
    case QL_FORMAT_NVFP4: return by_rows<QL_FORMAT_NVFP4>(dev, p);
    case QL_FORMAT_FP8_BLOCK: return by_rows<QL_FORMAT_FP8_BLOCK>(dev, p);
    default: return by_rows<QL_FORMAT_FP8_CHANNEL>(dev, p);
    }
}
