/* linear for generated rows, quantized weights: 1 to 16 rows of x at the price of one.
 *
 * Weights are the A operand of mma.m16n8k16, rows of x its columns, so a weight is decoded once for all rows. A block
 * owns one tile of 16 weight rows; each canonical slice is cut into `parts` runs of tiles whose sums are added in rising
 * order, and the runs are dealt to the block's warps. Both cuts depend on the slice's length alone. A warp loads a batch
 * of tiles before it uses the first: what is in flight, not arithmetic, sets the speed.
 */
#include "kernels/cuda/linear.cuh"

enum { MAX_WARPS = 8 };

/* Runs in a slice of `tiles` tiles. */
static int n_parts(int tiles) { return tiles >= 64 ? 8 : tiles >= 32 ? 4 : tiles >= 16 ? 2 : 1; }

/* NT: column tiles of 8. COLS: columns of a row of x. */
template <int FMT, int NT, int COLS>
__global__ void __launch_bounds__(32 * MAX_WARPS, NT == 1 ? 3 : 2) small_kernel(struct product p, int parts) {
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    constexpr int KT = FP4 ? 64 : 32, STEPS = KT / 16, BATCH = 5, TOK = NT * 8 / COLS;
    extern __shared__ float sums[]; /* [run][TOK][16] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_warp = blockDim.x >> 5, g = lane >> 2, c = lane & 3;
    int tiles = p.ks / KT, row0 = blockIdx.x * TILE_ROWS, n_col = p.n_row * COLS;
    const uint8_t *w_row = p.w + (int64_t)blockIdx.x * (p.k / KT) * TILE_BYTES + lane * 16;
    const uint8_t *s_row = (const uint8_t *)p.scale + (int64_t)blockIdx.x * (p.k / KT) * TILE_SCALE_BYTES + lane * 2;
    int blocks = BLOCK ? (p.col_off + p.k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK : 0;
    const float *scale_g = (const float *)p.scale, *scale_g8 = scale_g;
    if (BLOCK) {
        scale_g += (int64_t)((p.row_off + min(row0 + g, p.n - 1)) / QL_FP8_BLOCK) * blocks;
        scale_g8 += (int64_t)((p.row_off + min(row0 + g + 8, p.n - 1)) / QL_FP8_BLOCK) * blocks;
    }
    for (int run = warp; run < p.n_slice * parts; run += n_warp) {
        int slice = run / parts, part = run % parts;
        int first = slice * tiles + tiles * part / parts, end = slice * tiles + tiles * (part + 1) / parts;
        float acc[NT][4] = {}, total[NT][4] = {};
        for (int t = first; t < end; t += BATCH) {
            uint4 w[BATCH];
            uint32_t s[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (t + i < end) {
                    w[i] = load_stream(w_row + (int64_t)(t + i) * TILE_BYTES);
                    if (FP4) {
                        s[i] = load_stream_u16(s_row + (int64_t)(t + i) * TILE_SCALE_BYTES);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (t + i < end) {
                    uint32_t a[STEPS][4];
                    if (FP4) {
                        uint32_t sg, sg8, lo[8], hi[8];
                        group_scales(s[i], &sg, &sg8);
                        e2m1_pairs(w[i].x, lo);
                        e2m1_pairs(w[i].y, lo + 4);
                        e2m1_pairs(w[i].z, hi);
                        e2m1_pairs(w[i].w, hi + 4);
#pragma unroll
                        for (int j = 0; j < STEPS; j++) {
                            a[j][0] = mul_f16x2(lo[2 * j], sg);
                            a[j][1] = mul_f16x2(hi[2 * j], sg8);
                            a[j][2] = mul_f16x2(lo[2 * j + 1], sg);
                            a[j][3] = mul_f16x2(hi[2 * j + 1], sg8);
                        }
                    } else {
                        const uint32_t lo[2] = {w[i].x, w[i].y}, hi[2] = {w[i].z, w[i].w};
#pragma unroll
                        for (int j = 0; j < STEPS; j++) {
                            a[j][0] = e4m3_pair0(lo[j]);
                            a[j][1] = e4m3_pair0(hi[j]);
                            a[j][2] = e4m3_pair1(lo[j]);
                            a[j][3] = e4m3_pair1(hi[j]);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        uint32_t b[2 * STEPS] = {};
                        if (n * 8 + g < n_col) {
                            const uint4 *x = (const uint4 *)(p.xs + (int64_t)(n * 8 + g) * p.k + (t + i) * KT + c * (KT / 4));
#pragma unroll
                            for (int j = 0; j < STEPS / 2; j++) {
                                uint4 v = __ldg(x + j);
                                b[4 * j] = v.x;
                                b[4 * j + 1] = v.y;
                                b[4 * j + 2] = v.z;
                                b[4 * j + 3] = v.w;
                            }
                        }
#pragma unroll
                        for (int j = 0; j < STEPS; j++) {
                            mma_f16(acc[n], a[j], b[2 * j], b[2 * j + 1]);
                        }
                    }
                    int next = p.col_off / KT + t + i + 1; /* tile in the whole matrix's 128-blocks */
                    if (BLOCK && (next % (QL_FP8_BLOCK / KT) == 0 || t + i + 1 == end)) {
                        int block = (next - 1) / (QL_FP8_BLOCK / KT);
                        float f = scale_g[block], f8 = scale_g8[block];
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            total[n][0] = fmaf(acc[n][0], f, total[n][0]);
                            total[n][1] = fmaf(acc[n][1], f, total[n][1]);
                            total[n][2] = fmaf(acc[n][2], f8, total[n][2]);
                            total[n][3] = fmaf(acc[n][3], f8, total[n][3]);
                            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
                        }
                    }
                }
            }
        }
        float *out = sums + (int64_t)run * TOK * 16;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *v = BLOCK ? total[n] : acc[n];
            if (COLS == 2) {
                out[(n * 4 + c) * 16 + g] = fmaf(v[1], 1.0f / 2048.0f, v[0]);
                out[(n * 4 + c) * 16 + g + 8] = fmaf(v[3], 1.0f / 2048.0f, v[2]);
            } else {
                out[(n * 8 + 2 * c) * 16 + g] = v[0];
                out[(n * 8 + 2 * c + 1) * 16 + g] = v[1];
                out[(n * 8 + 2 * c) * 16 + g + 8] = v[2];
                out[(n * 8 + 2 * c + 1) * 16 + g + 8] = v[3];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * p.n_row; i += blockDim.x) {
        int r = i & 15, t = i >> 4;
        if (row0 + r >= p.n) {
            continue;
        }
        float slice[MAX_SLICES], factor = row_factor(p, row0 + r);
#pragma unroll
        for (int s = 0; s < MAX_SLICES; s++) {
            slice[s] = 0.0f;
            if (s < p.n_slice) {
                const float *v = sums + (int64_t)s * parts * TOK * 16 + i;
                float sum = v[0];
                for (int q = 1; q < parts; q++) {
                    sum += v[q * TOK * 16];
                }
                slice[s] = sum * p.xscale[t * p.n_slice + s] * factor;
            }
        }
        p.y[t * p.ldy + row0 + r] = slice_tree(slice, p.n_slice);
    }
}

template <int FMT, int NT, int COLS> static ql_status launch(ql_dev *dev, const struct product *p) {
    int parts = n_parts(p->ks / tile_k((ql_qformat)FMT)), runs = parts * p->n_slice;
    int warps = runs < MAX_WARPS ? runs : MAX_WARPS;
    size_t shared = (size_t)runs * (NT * 8 / COLS) * 16 * sizeof(float);
    if (shared > 48 * 1024) {
        CU_TRY(dev, cudaFuncSetAttribute(small_kernel<FMT, NT, COLS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
               "linear");
    }
    small_kernel<FMT, NT, COLS><<<(unsigned)ceil_div(p->n, TILE_ROWS), 32 * warps, shared, cuda(dev)->stream>>>(*p, parts);
    return launched(dev, "linear");
}

template <int FMT> static ql_status by_rows(ql_dev *dev, const struct product *p) {
    if (p->x_cols == 2) {
        return p->n_row <= 4 ? launch<FMT, 1, 2>(dev, p) : p->n_row <= 8 ? launch<FMT, 2, 2>(dev, p) : launch<FMT, 4, 2>(dev, p);
    }
    return p->n_row <= 8 ? launch<FMT, 1, 1>(dev, p) : launch<FMT, 2, 1>(dev, p);
}

ql_status ql_linear_small_cuda(ql_dev *dev, const struct product *p) {
    switch (p->fmt) {
    case QL_FORMAT_NVFP4: return by_rows<QL_FORMAT_NVFP4>(dev, p);
    case QL_FORMAT_FP8_BLOCK: return by_rows<QL_FORMAT_FP8_BLOCK>(dev, p);
    default: return by_rows<QL_FORMAT_FP8_CHANNEL>(dev, p);
    }
}
