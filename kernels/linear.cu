/* linear on the device: choice of kernel, prepared activations, and the kernels on plain FMA.
 *
 *   small   quantized weights, generated rows: tensor cores (linear_small.cu)
 *   prompt  quantized weights, and 16-bit ones in BF16 precision, prompt rows: tensor cores (linear_prompt.cu)
 *   rows    plain weights otherwise: a warp reads four rows, f32 FMA
 *   q8      NVFP4 weights in precision Q8: whole numbers (linear_q8.cu), which alone choose by the number of rows
 *   any     slices that are no multiple of what the others take: element by element
 *
 * The choice depends on format, phase, precision and the slice's length, which are the same at any lane count and for
 * any number of rows; so is each kernel's order of additions.
 */
#include "kernels/cuda/prompt.cuh"

/* ---- prepared activations ---------------------------------------------------------------------------------------- */

/* Block (slice, row). Columns in their order, [column][k]. unit: what the weights in registers are multiplied with to be
 * themselves. */
enum {
    X_THREADS = 512,
    X_KEEP = 10
}; /* numbers of a slice that stay in registers between their largest and the result */

__global__ void __launch_bounds__(X_THREADS)
    prepare_x(const float *x, int64_t ldx, int k, int ks, enum x_mode mode, float unit, uint16_t *xs, float *xscale) {
    __shared__ float part[X_THREADS / 32];
    after_previous();
    int slice = blockIdx.x, row = blockIdx.y;
    const float *from = x + row * ldx + (int64_t)slice * ks;
    float kept[X_KEEP], most = 0.0f, back;
#pragma unroll
    for (int j = 0; j < X_KEEP; j++) {
        int i = j * X_THREADS + threadIdx.x;
        kept[j] = i < ks ? from[i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < X_KEEP; j++) {
        most = larger_x(most, kept[j], mode);
    }
    for (int i = X_KEEP * X_THREADS + threadIdx.x; i < ks; i += X_THREADS) {
        most = larger_x(most, from[i], mode);
    }
    most = warp_max(most);
    if ((threadIdx.x & 31) == 0) {
        part[threadIdx.x >> 5] = most;
    }
    __syncthreads();
    most = warp_max(part[threadIdx.x & (X_THREADS / 32 - 1)]);
    float up = x_factor(most, mode, &back);
    if (threadIdx.x == 0) {
        xscale[row * gridDim.x + slice] = back * unit;
    }
    int col = row * (mode == X_F16X2 ? 2 : 1);
    auto place = [&](int c, int i) -> uint16_t * { return xs + (int64_t)c * k + slice * ks + i; };
    auto put = [&](int i, float v) {
        if (mode == X_E4M3_AS_F16) {
            *place(col, i) = __half_as_ushort(__float2half_rn(f32_of_e4m3(e4m3_of_f32(v / up))));
        } else {
            v = (mode == X_BF16_AS_F16 ? round_bf16(v) : v) * up;
            __half hi = __float2half_rn(v);
            *place(col, i) = __half_as_ushort(hi);
            if (mode == X_F16X2) {
                float rest = (v - __half2float(hi)) * 2048.0f;
                *place(col + 1, i) =
                    __half_as_ushort(__float2half_rn(fabsf(v) <= 65504.0f ? rest : 0.0f)); /* infinity, NaN: hi */
            }
        }
    };
#pragma unroll
    for (int j = 0; j < X_KEEP; j++) {
        int i = j * X_THREADS + threadIdx.x;
        if (i < ks) {
            put(i, kept[j]);
        }
    }
    for (int i = X_KEEP * X_THREADS + threadIdx.x; i < ks; i += X_THREADS) {
        put(i, from[i]);
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
__global__ void __launch_bounds__(32 * MAX_PARTS)
    rows_kernel(const uint8_t *__restrict__ weight, int n, int k, int n_slice, const float *__restrict__ x, int64_t ldx,
                int n_row, bool round, float *y, int64_t ldy) {
    constexpr int E = plain<FMT>::E, CHUNK = 32 * E, BYTES = FMT == QL_FORMAT_F32 ? 4 : 2;
    __shared__ float sums[MAX_SLICES][MAX_PARTS][ROWS][TOK];
    after_previous();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = blockDim.x >> 5, ks = k / n_slice;
    bool aligned = ldx % 4 == 0 && (uintptr_t)x % 16 == 0;
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
                    if (aligned) {
#pragma unroll
                        for (int e = 0; e < E; e += 4) {
                            float4 v = *(const float4 *)(xr[t] + at + e);
                            xv[t][e] = v.x;
                            xv[t][e + 1] = v.y;
                            xv[t][e + 2] = v.z;
                            xv[t][e + 3] = v.w;
                        }
                    } else {
#pragma unroll
                        for (int e = 0; e < E; e++) {
                            xv[t][e] = xr[t][at + e];
                        }
                    }
                    if (round) {
#pragma unroll
                        for (int e = 0; e < E; e++) {
                            xv[t][e] = round_bf16(xv[t][e]);
                        }
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
    bool round = a->precision != QL_PREC_EXACT && a->precision != QL_PREC_Q8;
    unsigned gx = (unsigned)ceil_div(w->n, ROWS);
    if (a->n_row == 1) {
        return launch(dev, "linear", rows_kernel<FMT, 1>, dim3(gx, 1), 32 * parts, 0, (const uint8_t *)w->data, w->n,
                      w->k, a->n_slice, a->x, a->ldx, 1, round, a->y, a->ldy);
    }
    const int step = 4 * 16384; /* rows in one launch: the grid's second dimension has 16 bits */
    for (int t = 0; t < a->n_row; t += step) {
        int rows = a->n_row - t < step ? a->n_row - t : step;
        QL_TRY(launch(dev, "linear", rows_kernel<FMT, 4>, dim3(gx, (unsigned)ceil_div(rows, 4)), 32 * parts, 0,
                      (const uint8_t *)w->data, w->n, w->k, a->n_slice, a->x + t * a->ldx, a->ldx, rows, round,
                      a->y + t * a->ldy, a->ldy));
    }
    return QL_OK;
}

/* ---- any slice length -------------------------------------------------------------------------------------------- */

struct any {
    const uint8_t *w;
    const void *scale;
    int fmt, n, k, n_slice, ks, row_off, col_off, n_row;
    float factor;
    const float *x;
    float *y;
    int64_t ldx, ldy;
};

/* Weight (r, c) without the scales that the sum takes; an FP8_BLOCK weight with its scale. */
__device__ float weight_at(const struct any &p, int r, int c) {
    if (p.fmt == QL_FORMAT_F32) {
        return ((const float *)p.w)[(int64_t)r * p.k + c];
    }
    if (p.fmt == QL_FORMAT_F16 || p.fmt == QL_FORMAT_BF16) {
        uint16_t h = ((const uint16_t *)p.w)[(int64_t)r * p.k + c];
        return p.fmt == QL_FORMAT_F16 ? f32_of_f16(h) : f32_of_bf16(h);
    }
    int kt = tile_k(p.fmt), per_lane = kt / 4, tiles = (p.k + kt - 1) / kt;
    int64_t tile = (int64_t)(r / TILE_ROWS) * tiles + c / kt;
    int kk = c % kt, lane = (r % 8) * 4 + kk / per_lane, i = kk % per_lane, half = r % TILE_ROWS / 8;
    int per_word = per_lane / 2;
    uint32_t word = ((const uint32_t *)(p.w + tile * TILE_BYTES))[lane * 4 + half * 2 + i / per_word];
    if (p.fmt == QL_FORMAT_NVFP4) {
        uint32_t code = unpack_e2m1(word) >> 4 * (i % 8) & 15,
                 scale = ((const uint8_t *)p.scale)[tile * TILE_SCALE_BYTES + lane * 2 + half];
        float v = f32_of_f16((uint16_t)((code & 7) << 9)) * 16384.0f;
        return (code & 8 ? -v : v) * f32_of_e4m3(scale);
    }
    float v = f32_of_e4m3(word >> 8 * (i % 4) & 255);
    if (p.fmt == QL_FORMAT_FP8_BLOCK) {
        int blocks = (p.col_off + p.k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
        v *= ((const float *)
                  p.scale)[(int64_t)((p.row_off + r) / QL_FP8_BLOCK) * blocks + (p.col_off + c) / QL_FP8_BLOCK];
    }
    return v;
}

/* A warp a result. Lane l takes elements l, l + 32, .. of each slice. */
__global__ void __launch_bounds__(256) any_kernel(struct any p, int precision) {
    after_previous();
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
            const float *xr = p.x + t * p.ldx + (int64_t)s * p.ks;
            float scale = 1.0f, up = 1.0f, acc = 0.0f;
            if (precision == QL_PREC_FP8) {
                float most = 0x1p-126f;
                for (int i = lane; i < p.ks; i += 32) {
                    most = fmaxf(most, fabsf(xr[i]));
                }
                scale = warp_max(most) / 448.0f;
            } else if (precision == QL_PREC_Q8) {
                float most = 0.0f;
                for (int i = lane; i < p.ks; i += 32) {
                    most = larger_x(most, xr[i], X_F16);
                }
                up = x_factor(warp_max(most), X_F16, &scale);
            }
            for (int i = lane; i < p.ks; i += 32) {
                float v = xr[i];
                if (precision == QL_PREC_FP8) {
                    v = f32_of_e4m3(e4m3_of_f32(v / scale));
                } else if (precision == QL_PREC_BF16) {
                    v = round_bf16(v);
                } else if (precision == QL_PREC_Q8) {
                    v = __half2float(__float2half_rn(v * up));
                }
                acc = fmaf(weight_at(p, r, s * p.ks + i), v, acc);
            }
            part[s] = warp_sum(acc) * scale * (p.fmt == QL_FORMAT_FP8_CHANNEL ? ((const float *)p.scale)[r] : p.factor);
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

size_t ql_linear_cuda_scratch(const ql_dev *dev, const ql_shape *shape) {
    (void)dev;
    return ql_linear_prompt_scratch(shape->hidden, shape->max_row, longest_k(shape));
}

static bool has_tensor_path(const ql_dev *dev, const ql_linear_args *a, enum x_mode *mode) {
    const ql_weight *w = a->w;
    if (!has_tiles(a)) {
        return false;
    }
    if (!is_plain(w->format)) {
        *mode = quantized_mode(a);
        return true;
    }
    *mode = w->format == QL_FORMAT_BF16 ? X_BF16 : X_BF16_AS_F16;
    return a->phase == QL_PHASE_PROMPT && a->precision != QL_PREC_EXACT && a->precision != QL_PREC_Q8 &&
           (w->format == QL_FORMAT_F16 || (w->format == QL_FORMAT_BF16 && cuda(dev)->cc >= 80));
}

static struct x_source stored(const ql_linear_args *a) { return x_source{X_STORED, a->x, NULL, NULL, a->ldx, 0.0f}; }

/* n products of one format and x; from, to: as ql_linear_prompt_cuda. */
static ql_status run_tensor(ql_dev *dev, const ql_linear_args *a, int32_t n, enum x_mode mode,
                            const struct x_source &from, const struct push *to) {
    const ql_weight *w = a->w;
    struct products p {};
    p.k = w->k;
    p.n_slice = a->n_slice;
    p.ks = w->k / a->n_slice;
    p.x_cols = mode == X_F16X2 ? 2 : 1;
    p.n_target = n;
    for (int i = 0; i < n; i++) {
        const ql_weight *one = a[i].w;
        p.target[i] = target{(const uint8_t *)one->data,
                             one->scale,
                             a[i].y,
                             a[i].ldy,
                             one->factor,
                             one->format == QL_FORMAT_FP8_CHANNEL,
                             one->n,
                             (int)ceil_div(one->n, TILE_ROWS),
                             one->row_off,
                             one->col_off};
    }
    if (a->phase == QL_PHASE_PROMPT && ql_linear_is_narrow(dev, a)) {
        return ql_linear_narrow_cuda(dev, a, &p);
    }
    if (a->phase == QL_PHASE_PROMPT) {
        return ql_linear_prompt_cuda(dev, a, mode, from, to, &p);
    }
    for (int t = 0; t < a->n_row; t += SMALL_MAX_ROWS) {
        int rows = a->n_row - t < SMALL_MAX_ROWS ? a->n_row - t : SMALL_MAX_ROWS;
        uint8_t *scratch = (uint8_t *)dev->scratch;
        float *xscale = (float *)(scratch + round_256((size_t)rows * p.x_cols * p.k * 2));
        QL_TRY(launch(dev, "linear: activations", prepare_x, dim3((unsigned)a->n_slice, (unsigned)rows), X_THREADS, 0,
                      a->x + t * a->ldx, a->ldx, p.k, p.ks, mode, WEIGHT_UNIT, (uint16_t *)scratch, xscale));
        p.xs = (const uint16_t *)scratch;
        p.xscale = xscale;
        p.n_row = rows;
        QL_TRY(ql_linear_small_cuda(dev, &p, w->format));
        for (int i = 0; i < n; i++) {
            p.target[i].y += rows * p.target[i].ldy;
        }
    }
    return QL_OK;
}

static ql_status check_args(ql_dev *dev, const ql_linear_args *a) {
    const ql_weight *w = a->w;
    int n_slice = a->n_slice;
    if ((n_slice != 1 && n_slice != 2 && n_slice != 4 && n_slice != 8) || w->k % n_slice || a->ldx < w->k ||
        a->ldy < w->n || a->n_row < 0 || a->precision < QL_PREC_EXACT || a->precision > QL_PREC_Q8 ||
        w->records != is_q8(a)) {
        return ql_fail(dev->err, QL_ERR_INTERNAL,
                       "linear: %d rows, weight %d x %d, %d slices, ldx %lld, ldy %lld, precision %d", a->n_row, w->n,
                       w->k, n_slice, (long long)a->ldx, (long long)a->ldy, (int)a->precision);
    }
    return QL_OK;
}

static ql_status run_one(ql_dev *dev, const ql_linear_args *a) {
    const ql_weight *w = a->w;
    int ks = w->k / a->n_slice;
    if (w->format == QL_FORMAT_BF16 && ks % 8 == 0) {
        return run_rows<QL_FORMAT_BF16>(dev, a);
    }
    if (w->format == QL_FORMAT_F16 && ks % 8 == 0) {
        return run_rows<QL_FORMAT_F16>(dev, a);
    }
    if (w->format == QL_FORMAT_F32 && ks % 4 == 0) {
        return run_rows<QL_FORMAT_F32>(dev, a);
    }
    struct any p = {(const uint8_t *)w->data,
                    w->scale,
                    w->format,
                    w->n,
                    w->k,
                    a->n_slice,
                    ks,
                    w->row_off,
                    w->col_off,
                    a->n_row,
                    w->factor,
                    a->x,
                    a->y,
                    a->ldx,
                    a->ldy};
    unsigned gy = a->n_row < 65535 ? (unsigned)a->n_row : 65535;
    ql_precision precision = a->precision;
    if (!is_fp8(w->format)) {
        precision = precision == QL_PREC_FP8 ? QL_PREC_BF16 : precision == QL_PREC_Q8 ? QL_PREC_EXACT : precision;
    }
    return launch(dev, "linear", any_kernel, dim3((unsigned)ceil_div(w->n, 8), gy), 256, 0, p, (int)precision);
}

/* How many products from a[0] on one launch takes as those of tensor cores. */
static int32_t tensor_group(const ql_dev *dev, const ql_linear_args *a, int32_t n) {
    int32_t m = 1;
    while (m < MAX_TARGETS && m < n && same_family(a[0].w->format, a[m].w->format) &&
           a[0].w->col_off == a[m].w->col_off && ql_linear_is_narrow(dev, &a[0]) == ql_linear_is_narrow(dev, &a[m])) {
        m++;
    }
    return m;
}

/* prepared: of the first launch. */
static ql_status run_group(ql_dev *dev, const ql_linear_args *a, int32_t n, bool prepared) {
    for (int32_t i = 0; i < n; i++) {
        QL_TRY(check_args(dev, &a[i]));
    }
    for (int32_t i = 0; i < n && a->n_row > 0;) {
        enum x_mode mode;
        int32_t m = 1;
        if (is_q8(&a[i])) {
            while (m < MAX_TARGETS && i + m < n && is_q8(&a[i + m])) {
                m++;
            }
            QL_TRY(ql_linear_q8_cuda(dev, &a[i], m));
        } else if (has_tensor_path(dev, &a[i], &mode)) {
            struct x_source from = stored(&a[i]);
            from.kind = prepared && i == 0 ? X_PREPARED : X_STORED;
            m = tensor_group(dev, &a[i], n - i);
            QL_TRY(run_tensor(dev, &a[i], m, mode, from, NULL));
        } else {
            QL_TRY(run_one(dev, &a[i]));
        }
        i += m;
    }
    return QL_OK;
}

ql_status ql_linear_group_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n) { return run_group(dev, a, n, false); }

ql_status ql_linear_group_prepared_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n) {
    return run_group(dev, a, n, true);
}

bool ql_linear_group_place(ql_dev *dev, const ql_linear_args *a, int32_t n, struct prepared_x *x, bool *stored) {
    enum x_mode mode;
    *stored = tensor_group(dev, a, n) < n;
    return a->phase == QL_PHASE_PROMPT && a->n_row > 0 && a->n_slice == 1 && !is_q8(a) &&
           has_tensor_path(dev, a, &mode) && !ql_linear_is_narrow(dev, a) && ql_linear_prompt_place(dev, a, mode, x);
}

ql_status ql_linear_fused_cuda(ql_dev *dev, const ql_linear_args *a, const struct x_source *from, const struct push *to,
                               bool *taken) {
    enum x_mode mode;
    QL_TRY(check_args(dev, a));
    *taken = a->phase == QL_PHASE_PROMPT && a->n_row > 0 && !is_q8(a) && has_tensor_path(dev, a, &mode) &&
             (!from || from->kind != X_GATED_NORM || a->w->k / a->n_slice % 128 == 0) &&
             (!to || ql_linear_prompt_can_push(dev, a, mode));
    return *taken ? run_tensor(dev, a, 1, mode, from ? *from : stored(a), to) : QL_OK;
}

ql_status ql_linear_cuda(ql_dev *dev, const ql_linear_args *a) { return ql_linear_group_cuda(dev, a, 1); }
