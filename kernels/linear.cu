/* linear on the device: choice of kernel, prepared activations, and the kernels on plain FMA.
 *
 *   small   quantized weights, generated rows: tensor cores (linear_small.cu)
 *   prompt  quantized weights, and 16-bit ones in BF16 precision, prompt rows: tensor cores (linear_prompt.cu)
 *   rows    plain weights otherwise: a warp reads four rows, f32 FMA
 *   any     slices that are no multiple of what the others take: element by element
 *
 * The choice depends on format, phase, precision and the slice's length, which are the same at any lane count and for
 * any number of rows; so is each kernel's order of additions.
 */
#include "kernels/cuda/linear.cuh"

/* ---- prepared activations ---------------------------------------------------------------------------------------- */

/* Where column kk of a tile of kt columns stands in the order of the matrix instruction's steps (layout.h). */
__device__ __forceinline__ int step_order(int kk, int kt) {
    int per_lane = kt / 4, c = kk / per_lane, i = kk % per_lane;
    return 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * c + i % 2;
}

/* Block (slice, row). kt: 0 leaves columns in their order, else the tile width of step_order. unit: what the weights in
 * registers are multiplied with to be themselves. */
__global__ void __launch_bounds__(256) prepare_x(const float *x, int64_t ldx, int k, int ks, enum x_mode mode, int kt,
                                                 float unit, uint16_t *xs, float *xscale) {
    __shared__ float part[8];
    int slice = blockIdx.x, row = blockIdx.y;
    const float *from = x + row * ldx + (int64_t)slice * ks;
    float most = 0.0f, up = 1.0f;
    if (mode != X_BF16) {
        for (int i = threadIdx.x; i < ks; i += 256) {
            float v = fabsf(from[i]);
            /* FP8 saturates with its scale; a power of two must fit the finite elements */
            most = v > most && (mode == X_E4M3_AS_F16 || v < __uint_as_float(0x7f800000u)) ? v : most;
        }
        most = warp_max(most);
        if ((threadIdx.x & 31) == 0) {
            part[threadIdx.x >> 5] = most;
        }
        __syncthreads();
        most = part[0];
        for (int i = 1; i < 8; i++) {
            most = fmaxf(most, part[i]);
        }
        float back;
        if (mode == X_E4M3_AS_F16) {
            back = up = fmaxf(most, 0x1p-126f) / 448.0f;
        } else {
            int e = min(14 - ((int)(__float_as_uint(most) >> 23) - 127), 126);
            e = most > 0.0f ? e : 0;
            up = __uint_as_float((uint32_t)(e + 127) << 23);
            back = __uint_as_float((uint32_t)(127 - e) << 23);
        }
        if (threadIdx.x == 0) {
            xscale[row * gridDim.x + slice] = back * unit;
        }
    }
    int cols = mode == X_F16X2 ? 2 : 1;
    uint16_t *to = xs + (int64_t)row * cols * k + (int64_t)slice * ks;
    for (int i = threadIdx.x; i < ks; i += 256) {
        float v = from[i];
        int at = kt ? i / kt * kt + step_order(i % kt, kt) : i;
        if (mode == X_BF16) {
            to[at] = (uint16_t)(__float_as_uint(round_bf16(v)) >> 16);
        } else if (mode == X_E4M3_AS_F16) {
            to[at] = __half_as_ushort(__float2half_rn(f32_of_e4m3(e4m3_of_f32(v / up))));
        } else {
            v = (mode == X_BF16_AS_F16 ? round_bf16(v) : v) * up;
            __half hi = __float2half_rn(v);
            to[at] = __half_as_ushort(hi);
            if (mode == X_F16X2) {
                float rest = (v - __half2float(hi)) * 2048.0f;
                to[k + at] = __half_as_ushort(__float2half_rn(fabsf(v) <= 65504.0f ? rest : 0.0f)); /* infinity, NaN: hi */
            }
        }
    }
}

/* ---- plain weights, FMA ------------------------------------------------------------------------------------------ */

enum { ROWS = 4, MAX_PARTS = 4 };

template <int FMT> struct plain {
    static constexpr int E = FMT == QL_FORMAT_F32 ? 4 : 8; /* numbers in 16 bytes */
    static __device__ __forceinline__ void decode(uint4 v, float w[E]) {
        const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (FMT == QL_FORMAT_F32) {
                w[i] = __uint_as_float(u[i]);
            } else if (FMT == QL_FORMAT_BF16) {
                w[2 * i % E] = __uint_as_float(u[i] << 16);
                w[(2 * i + 1) % E] = __uint_as_float(u[i] & 0xffff0000u);
            } else {
                w[2 * i % E] = f32_of_f16((uint16_t)u[i]);
                w[(2 * i + 1) % E] = f32_of_f16((uint16_t)(u[i] >> 16));
            }
        }
    }
};

/* Block: ROWS weight rows and TOK rows of x, its warps each a part of every slice: chunks of 32 lanes x 16 bytes, a lane's
 * products added in rising column, lanes by the xor tree, parts in rising order. */
template <int FMT, int TOK>
__global__ void __launch_bounds__(32 * MAX_PARTS) rows_kernel(const uint8_t *__restrict__ weight, int n, int k, int n_slice,
                                                              const float *__restrict__ x, int64_t ldx, int n_row, bool round,
                                                              float *y, int64_t ldy) {
    constexpr int E = plain<FMT>::E, CHUNK = 32 * E, BYTES = FMT == QL_FORMAT_F32 ? 4 : 2;
    __shared__ float sums[MAX_SLICES][MAX_PARTS][ROWS][TOK];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = blockDim.x >> 5, ks = k / n_slice;
    int r0 = blockIdx.x * ROWS, t0 = blockIdx.y * TOK;
    const uint8_t *w[ROWS];
    const float *xr[TOK];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        w[r] = weight + (int64_t)min(r0 + r, n - 1) * k * BYTES;
    }
#pragma unroll
    for (int t = 0; t < TOK; t++) {
        xr[t] = x + (int64_t)min(t0 + t, n_row - 1) * ldx;
    }
    int chunks = (ks + CHUNK - 1) / CHUNK;
    for (int s = 0; s < n_slice; s++) {
        float acc[ROWS][TOK] = {};
#pragma unroll 2
        for (int ch = chunks * warp / parts; ch < chunks * (warp + 1) / parts; ch++) {
            int i = ch * CHUNK + lane * E;
            if (i < ks) {
                int64_t at = (int64_t)s * ks + i;
                uint4 raw[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    raw[r] = load_stream(w[r] + at * BYTES);
                }
                float xv[TOK][E];
#pragma unroll
                for (int t = 0; t < TOK; t++) {
#pragma unroll
                    for (int e = 0; e < E; e++) {
                        xv[t][e] = xr[t][at + e];
                        xv[t][e] = round ? round_bf16(xv[t][e]) : xv[t][e];
                    }
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float v[E];
                    plain<FMT>::decode(raw[r], v);
#pragma unroll
                    for (int t = 0; t < TOK; t++) {
#pragma unroll
                        for (int e = 0; e < E; e++) {
                            acc[r][t] = fmaf(v[e], xv[t][e], acc[r][t]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int t = 0; t < TOK; t++) {
                float v = warp_sum(acc[r][t]);
                if (lane == 0) {
                    sums[s][warp][r][t] = v;
                }
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * TOK; i += blockDim.x) {
        int r = i % ROWS, t = i / ROWS;
        float part[MAX_SLICES];
#pragma unroll
        for (int s = 0; s < MAX_SLICES; s++) {
            part[s] = 0.0f;
            if (s < n_slice) {
                part[s] = sums[s][0][r][t];
                for (int p = 1; p < parts; p++) {
                    part[s] += sums[s][p][r][t];
                }
            }
        }
        if (r0 + r < n && t0 + t < n_row) {
            y[(t0 + t) * ldy + r0 + r] = slice_tree(part, n_slice);
        }
    }
}

template <int FMT> static ql_status run_rows(ql_dev *dev, const ql_linear_args *a) {
    const ql_weight *w = a->w;
    int chunks = (int)ceil_div(w->k / a->n_slice, 32 * plain<FMT>::E), parts = chunks >= 16 ? 4 : chunks >= 8 ? 2 : 1;
    bool round = a->precision != QL_PREC_EXACT;
    unsigned gx = (unsigned)ceil_div(w->n, ROWS);
    if (a->n_row == 1) {
        rows_kernel<FMT, 1><<<dim3(gx, 1), 32 * parts, 0, cuda(dev)->stream>>>(
            (const uint8_t *)w->data, w->n, w->k, a->n_slice, a->x, a->ldx, 1, round, a->y, a->ldy);
        return launched(dev, "linear");
    }
    const int step = 4 * 16384; /* rows in one launch: the grid's second dimension has 16 bits */
    for (int t = 0; t < a->n_row; t += step) {
        int rows = a->n_row - t < step ? a->n_row - t : step;
        rows_kernel<FMT, 4><<<dim3(gx, (unsigned)ceil_div(rows, 4)), 32 * parts, 0, cuda(dev)->stream>>>(
            (const uint8_t *)w->data, w->n, w->k, a->n_slice, a->x + t * a->ldx, a->ldx, rows, round, a->y + t * a->ldy, a->ldy);
        QL_TRY(launched(dev, "linear"));
    }
    return QL_OK;
}

/* ---- any slice length -------------------------------------------------------------------------------------------- */

/* Weight (r, c) without the scales that the sum takes; an FP8_BLOCK weight with its scale. */
__device__ float weight_at(const struct product &p, int r, int c) {
    if (p.fmt == QL_FORMAT_F32) {
        return ((const float *)p.w)[(int64_t)r * p.k + c];
    }
    if (p.fmt == QL_FORMAT_F16 || p.fmt == QL_FORMAT_BF16) {
        uint16_t h = ((const uint16_t *)p.w)[(int64_t)r * p.k + c];
        return p.fmt == QL_FORMAT_F16 ? f32_of_f16(h) : f32_of_bf16(h);
    }
    int kt = tile_k((ql_qformat)p.fmt), per_lane = kt / 4, tiles = (p.k + kt - 1) / kt;
    int64_t tile = (int64_t)(r / TILE_ROWS) * tiles + c / kt;
    int kk = c % kt, lane = (r % 8) * 4 + kk / per_lane, i = kk % per_lane, half = r % TILE_ROWS / 8;
    int per_word = per_lane / 2;
    uint32_t word = ((const uint32_t *)(p.w + tile * TILE_BYTES))[lane * 4 + half * 2 + i / per_word];
    if (p.fmt == QL_FORMAT_NVFP4) {
        uint32_t code = unpack_e2m1(word) >> 4 * (i % 8) & 15, scale = ((const uint8_t *)p.scale)[tile * 64 + lane * 2 + half];
        float v = f32_of_f16((uint16_t)((code & 7) << 9)) * 16384.0f;
        return (code & 8 ? -v : v) * f32_of_e4m3(scale);
    }
    float v = f32_of_e4m3(unpack_e4m3(word) >> 8 * (i % 4) & 255);
    if (p.fmt == QL_FORMAT_FP8_BLOCK) {
        int blocks = (p.col_off + p.k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
        v *= ((const float *)p.scale)[(int64_t)((p.row_off + r) / QL_FP8_BLOCK) * blocks + (p.col_off + c) / QL_FP8_BLOCK];
    }
    return v;
}

/* A warp a result. Lane l takes elements l, l + 32, .. of each slice. */
__global__ void __launch_bounds__(256) any_kernel(struct product p, const float *x, int64_t ldx, int precision) {
    int r = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (r >= p.n) {
        return;
    }
    for (int t = blockIdx.y; t < p.n_row; t += gridDim.y) {
        float part[MAX_SLICES];
#pragma unroll
        for (int s = 0; s < MAX_SLICES; s++) {
            part[s] = 0.0f;
            if (s >= p.n_slice) {
                continue;
            }
            const float *xr = x + t * ldx + (int64_t)s * p.ks;
            float scale = 1.0f, acc = 0.0f;
            if (precision == QL_PREC_FP8) {
                float most = 0x1p-126f;
                for (int i = lane; i < p.ks; i += 32) {
                    most = fmaxf(most, fabsf(xr[i]));
                }
                scale = warp_max(most) / 448.0f;
            }
            for (int i = lane; i < p.ks; i += 32) {
                float v = xr[i];
                if (precision == QL_PREC_FP8) {
                    v = f32_of_e4m3(e4m3_of_f32(v / scale));
                } else if (precision == QL_PREC_BF16) {
                    v = round_bf16(v);
                }
                acc = fmaf(weight_at(p, r, s * p.ks + i), v, acc);
            }
            part[s] = warp_sum(acc) * scale * row_factor(p, r);
        }
        if (lane == 0) {
            p.y[t * p.ldy + r] = slice_tree(part, p.n_slice);
        }
    }
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

/* Longest row of x that a shape leads to: mtp.fc takes two hidden states. */
static int64_t longest_k(const ql_shape *s) {
    int64_t k = 2 * (int64_t)s->hidden;
    const int64_t more[] = {256 * (int64_t)s->n_head, 128 * (int64_t)s->n_value_head, s->mlp};
    for (int64_t m : more) {
        k = m > k ? m : k;
    }
    return k;
}

static size_t x_bytes(int64_t rows, int64_t cols, int64_t k) {
    return round_256((size_t)(rows * cols * k * 2)) + round_256((size_t)(rows * MAX_SLICES * 4));
}

size_t ql_linear_cuda_scratch(const ql_dev *dev, const ql_shape *shape) {
    (void)dev;
    const int64_t max_blocks = 192;
    /* EXACT prompts, with two columns a row, go in two parts where a step is long. */
    int64_t rows = shape->max_row > 2 * SMALL_MAX_ROWS ? shape->max_row : 2 * SMALL_MAX_ROWS;
    int64_t blocks = ceil_div(shape->hidden, 128) * ceil_div(2 * (int64_t)shape->max_row, 128);
    blocks = blocks < max_blocks ? blocks : max_blocks;
    return x_bytes(rows, 1, longest_k(shape)) + (size_t)(blocks > 1 ? blocks : 1) * PROMPT_STACK_BYTES;
}

static ql_status run_tensor(ql_dev *dev, const ql_linear_args *a, struct product *p, enum x_mode mode) {
    bool gen = a->phase == QL_PHASE_GEN;
    int kt = gen ? 0 : tile_k(a->w->format);
    p->x_cols = mode == X_F16X2 ? 2 : 1;
    size_t stack = gen || a->n_slice == 1 ? 0 : PROMPT_STACK_BYTES;
    int64_t fit = dev->scratch_bytes > stack + 512
                      ? (int64_t)((dev->scratch_bytes - stack - 512) / (size_t)(p->x_cols * (int64_t)p->k * 2 + MAX_SLICES * 4))
                      : 0;
    if (fit < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes does not hold a row of %d", dev->scratch_bytes, p->k);
    }
    int most = gen && fit > SMALL_MAX_ROWS ? SMALL_MAX_ROWS : fit > 65535 ? 65535 : (int)fit;
    float *y = p->y;
    for (int t = 0; t < a->n_row; t += most) {
        int rows = a->n_row - t < most ? a->n_row - t : most;
        size_t xs_bytes = round_256((size_t)rows * p->x_cols * p->k * 2);
        uint8_t *scratch = (uint8_t *)dev->scratch;
        float *xscale = (float *)(scratch + xs_bytes);
        prepare_x<<<dim3((unsigned)a->n_slice, (unsigned)rows), 256, 0, cuda(dev)->stream>>>(
            a->x + t * a->ldx, a->ldx, p->k, p->ks, mode, kt, is_plain(a->w->format) ? 1.0f : WEIGHT_UNIT, (uint16_t *)scratch, xscale);
        QL_TRY(launched(dev, "linear: activations"));
        p->xs = (const uint16_t *)scratch;
        p->xscale = mode == X_BF16 ? NULL : xscale;
        p->n_row = rows;
        p->y = y + t * p->ldy;
        size_t used = xs_bytes + round_256((size_t)rows * MAX_SLICES * 4);
        p->stack = (float *)(scratch + used);
        QL_TRY(gen ? ql_linear_small_cuda(dev, p) : ql_linear_prompt_cuda(dev, p, dev->scratch_bytes - used));
    }
    return QL_OK;
}

ql_status ql_linear_cuda(ql_dev *dev, const ql_linear_args *a) {
    const ql_weight *w = a->w;
    int n_slice = a->n_slice;
    if ((n_slice != 1 && n_slice != 2 && n_slice != 4 && n_slice != 8) || w->k % n_slice || a->ldx < w->k || a->ldy < w->n ||
        a->n_row < 0 || a->precision < QL_PREC_EXACT || a->precision > QL_PREC_FP8) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: %d rows, weight %d x %d, %d slices, ldx %lld, ldy %lld, precision %d",
                       a->n_row, w->n, w->k, n_slice, (long long)a->ldx, (long long)a->ldy, (int)a->precision);
    }
    if (a->n_row == 0) {
        return QL_OK;
    }
    struct product p{};
    p.w = (const uint8_t *)w->data;
    p.scale = w->scale;
    p.fmt = w->format;
    p.n = w->n;
    p.k = w->k;
    p.n_slice = n_slice;
    p.ks = w->k / n_slice;
    p.row_off = w->row_off;
    p.col_off = w->col_off;
    p.factor = w->factor;
    p.y = a->y;
    p.ldy = a->ldy;
    ql_precision precision = a->precision == QL_PREC_FP8 && !is_fp8(w->format) ? QL_PREC_BF16 : a->precision;
    bool whole = p.ks % 64 == 0 && (w->format != QL_FORMAT_FP8_BLOCK || w->col_off % 64 == 0);
    if (whole && !is_plain(w->format)) {
        return run_tensor(dev, a, &p, precision == QL_PREC_EXACT ? X_F16X2 : precision == QL_PREC_FP8 ? X_E4M3_AS_F16 : X_BF16_AS_F16);
    }
    if (whole && a->phase == QL_PHASE_PROMPT && precision != QL_PREC_EXACT) {
        if (w->format == QL_FORMAT_F16) {
            return run_tensor(dev, a, &p, X_BF16_AS_F16);
        }
        if (w->format == QL_FORMAT_BF16 && cuda(dev)->cc >= 80) {
            return run_tensor(dev, a, &p, X_BF16);
        }
    }
    if (w->format == QL_FORMAT_BF16 && p.ks % 8 == 0) {
        return run_rows<QL_FORMAT_BF16>(dev, a);
    }
    if (w->format == QL_FORMAT_F16 && p.ks % 8 == 0) {
        return run_rows<QL_FORMAT_F16>(dev, a);
    }
    if (w->format == QL_FORMAT_F32 && p.ks % 4 == 0) {
        return run_rows<QL_FORMAT_F32>(dev, a);
    }
    p.n_row = a->n_row;
    unsigned gy = a->n_row < 65535 ? (unsigned)a->n_row : 65535;
    any_kernel<<<dim3((unsigned)ceil_div(p.n, 8), gy), 256, 0, cuda(dev)->stream>>>(p, a->x, a->ldx, precision);
    return launched(dev, "linear");
}
