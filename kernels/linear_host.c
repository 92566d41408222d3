/* Twin of linear (linear.h): plain loops, one weight row decoded at a time. */
#include "kernels/host/acc16.h"
#include "kernels/host/linear_common.h"
#include "kernels/q8.h"

#include "runtime/base/mem.h"
#include "runtime/base/num.h"

/* ---- shared with the variants ------------------------------------------------------------------------------------ */

/* Longest row of x that a shape leads to: mtp.fc takes two hidden states. */
static int64_t longest_k(const ql_shape *s) {
    int64_t k = 2 * (int64_t)s->hidden;
    int64_t more[] = {256 * (int64_t)s->n_head, 128 * (int64_t)s->n_value_head, s->mlp};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        k = more[i] > k ? more[i] : k;
    }
    return k;
}

/* Lays the parts out from `base` (NULL: to learn the size) and returns their bytes. */
static size_t lay_out(ql_linear_host_plan *plan, unsigned char *base, int64_t k) {
    size_t at = 0, rows = QL_LINEAR_X_ROWS;
    int64_t tile = QL_LINEAR_W_ROWS * QL_LINEAR_COLS > k ? QL_LINEAR_W_ROWS * QL_LINEAR_COLS : k;
    struct {
        float **part;
        size_t bytes;
    } parts[] = {
        {&plan->tile, (size_t)tile * sizeof(float)},
        {&plan->acc, QL_LINEAR_ACC_BYTES},
        {&plan->part, rows * QL_LINEAR_W_ROWS * QL_LINEAR_SLICES * sizeof(float)},
        {&plan->x_scale, rows * QL_LINEAR_SLICES * sizeof(float)},
        {&plan->x, rows * (size_t)k * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].part = base ? (float *)(base + at) : NULL;
        at += ql_arena_round(parts[i].bytes);
    }
    return at;
}

size_t ql_linear_host_scratch(const ql_shape *shape) {
    ql_linear_host_plan plan;
    return lay_out(&plan, NULL, longest_k(shape));
}

ql_status ql_linear_host_begin(ql_dev *dev, const ql_linear_args *a, ql_linear_host_plan *plan) {
    const ql_weight *w = a->w;
    int32_t n_slice = a->n_slice;
    if ((n_slice != 1 && n_slice != 2 && n_slice != 4 && n_slice != 8) || w->k % n_slice || a->ldx < w->k ||
        a->ldy < w->n || a->n_row < 0 || a->precision < QL_PREC_EXACT || a->precision > QL_PREC_Q8) {
        return ql_fail(dev->err, QL_ERR_INTERNAL,
                       "linear: %d rows, weight %d x %d, %d slices, ldx %lld, ldy %lld, precision %d", a->n_row, w->n,
                       w->k, n_slice, (long long)a->ldx, (long long)a->ldy, (int)a->precision);
    }
    *plan = (ql_linear_host_plan){
        .a = a,
        .ks = w->k / n_slice,
        .is_fp8 =
            w->format == QL_FORMAT_FP8_CHANNEL || w->format == QL_FORMAT_FP8_TENSOR || w->format == QL_FORMAT_FP8_BLOCK,
    };
    size_t need = lay_out(plan, dev->scratch, w->k);
    if (need > dev->scratch_bytes) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch is %zu bytes, %d columns need %zu",
                       dev->scratch_bytes, w->k, need);
    }
    return QL_OK;
}

static void round_bf16(const float *x, float *out, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        out[i] = ql_f32_of_bf16(ql_bf16_of_f32(x[i]));
    }
}

/* One slice as E4M3 values; returns its scale. */
static float round_fp8(const float *x, float *out, int32_t n) {
    float amax = 0x1p-126f;
    for (int32_t i = 0; i < n; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    float scale = amax / 448.0f;
    for (int32_t i = 0; i < n; i++) {
        out[i] = ql_f32_of_e4m3(ql_e4m3_of_f32(x[i] / scale));
    }
    return scale;
}

/* One slice in F16's 11 bits and range, its largest finite element brought to [2^14, 2^15) for the rounding. */
static void round_f16(const float *x, float *out, int32_t n) {
    float most = 0;
    for (int32_t i = 0; i < n; i++) {
        most = fabsf(x[i]) > most && fabsf(x[i]) < INFINITY ? fabsf(x[i]) : most;
    }
    int32_t e = most > 0 ? 14 - ((int32_t)(ql_bits_of_f32(most) >> 23) - 127) : 0;
    e = e < 126 ? e : 126;
    float up = ldexpf(1, e), back = ldexpf(1, -e);
    for (int32_t i = 0; i < n; i++) {
        out[i] = ql_f32_of_f16(ql_f16_of_f32(x[i] * up)) * back;
    }
}

const float *ql_linear_host_x(const ql_linear_host_plan *plan, int32_t t0, int32_t n_row, int64_t *ld) {
    const ql_linear_args *a = plan->a;
    const float *x = a->x + (int64_t)t0 * a->ldx;
    if (a->precision == QL_PREC_EXACT || (a->precision == QL_PREC_Q8 && !plan->is_fp8)) {
        *ld = a->ldx;
        return x;
    }
    int32_t k = a->w->k;
    for (int32_t t = 0; t < n_row; t++) {
        const float *from = x + t * a->ldx;
        float *to = plan->x + (int64_t)t * k;
        if (a->precision == QL_PREC_FP8 && plan->is_fp8) {
            for (int32_t s = 0; s < a->n_slice; s++) {
                plan->x_scale[t * QL_LINEAR_SLICES + s] = round_fp8(from + s * plan->ks, to + s * plan->ks, plan->ks);
            }
        } else if (a->precision == QL_PREC_Q8) {
            for (int32_t s = 0; s < a->n_slice; s++) {
                round_f16(from + s * plan->ks, to + s * plan->ks, plan->ks);
            }
        } else {
            round_bf16(from, to, k);
        }
    }
    *ld = k;
    return plan->x;
}

/* ---- the twin ---------------------------------------------------------------------------------------------------- */

/* Every code's value, made once a call. */
typedef struct code_values {
    float e4m3[256], e2m1[16];
} code_values;

static void fill_values(code_values *v) {
    for (int32_t c = 0; c < 256; c++) {
        v->e4m3[c] = ql_f32_of_e4m3((uint8_t)c);
    }
    for (int32_t c = 0; c < 16; c++) {
        v->e2m1[c] = ql_f32_of_e2m1((uint8_t)c);
    }
}

/* Row r of W without the scales that the sum takes. */
static void decode_row(const ql_weight *w, const code_values *v, int32_t r, float *out) {
    const uint8_t *p = (const uint8_t *)w->data + r * ql_qformat_row_bytes(w->format, w->k);
    switch (w->format) {
    case QL_FORMAT_F32: ql_dtype_to_f32(QL_DTYPE_F32, p, w->k, out); break;
    case QL_FORMAT_F16: ql_dtype_to_f32(QL_DTYPE_F16, p, w->k, out); break;
    case QL_FORMAT_BF16: ql_dtype_to_f32(QL_DTYPE_BF16, p, w->k, out); break;
    case QL_FORMAT_NVFP4: {
        const uint8_t *scale = (const uint8_t *)w->scale + (int64_t)r * (w->k / QL_NVFP4_GROUP);
        for (int32_t c = 0; c < w->k; c += 2) {
            float s = v->e4m3[scale[c / QL_NVFP4_GROUP]];
            out[c] = v->e2m1[p[c / 2] & 15] * s;
            out[c + 1] = v->e2m1[p[c / 2] >> 4] * s;
        }
        break;
    }
    default:
        for (int32_t c = 0; c < w->k; c++) {
            out[c] = v->e4m3[p[c]];
        }
        break;
    }
}

/* Slice of n columns from col0 in row r of an FP8_BLOCK weight. */
static float block_slice_sum(const ql_weight *weight, int32_t r, int32_t col0, const float *x, const float *w,
                             int32_t n) {
    float total[16] = {0};
    for (int32_t c = 0; c < n;) {
        int32_t left = QL_FP8_BLOCK - (weight->col_off + col0 + c) % QL_FP8_BLOCK, end = c + left < n ? c + left : n;
        float acc[16] = {0}, scale = ql_linear_block_scale(weight, r, col0 + c);
        for (; c < end; c++) {
            acc[c % 16] += x[c] * w[c];
        }
        for (int32_t i = 0; i < 16; i++) {
            total[i] += acc[i] * scale;
        }
    }
    return ql_acc16_sum(total);
}

/* ---- Q8 times NVFP4 ---------------------------------------------------------------------------------------------- */

/* A row of x or W as whole numbers, weights in halves, and their scales: of x one a block, slice by slice. */
typedef struct q8_row {
    const int8_t *code;
    const float *scale;
} q8_row;

/* Columns [col0, col0 + n) of a slice; x: its first code and its first block. */
static float q8_slice_sum(q8_row x, q8_row w, int32_t col0, int32_t n) {
    float sum = 0;
    for (int32_t c = 0, block = 0; c < n; block++) {
        int32_t end = c + QL_Q8_BLOCK < n ? c + QL_Q8_BLOCK : n;
        float both = 0;
        while (c < end) { /* the groups are the matrix's: a slice may begin inside one */
            int32_t group = (col0 + c) / QL_NVFP4_GROUP, left = (group + 1) * QL_NVFP4_GROUP - (col0 + c),
                    stop = c + left < end ? c + left : end, dot = 0;
            for (; c < stop; c++) {
                dot += x.code[c] * w.code[col0 + c];
            }
            both += (float)dot * w.scale[group];
        }
        sum += both * x.scale[block];
    }
    return 0.5f * sum;
}

static ql_status q8_product(ql_dev *dev, const ql_linear_args *a, const ql_linear_host_plan *plan) {
    static const int8_t halves[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const ql_weight *w = a->w;
    int32_t k = w->k, blocks = ql_q8_blocks(plan->ks), rows = QL_LINEAR_X_ROWS;
    /* of the room for x as f32: codes take a quarter, scales a half at most, slices being no shorter than two channels */
    float *x_scale = plan->x;
    int8_t *x_code = (int8_t *)(x_scale + (int64_t)rows * a->n_slice * blocks),
           *w_code = (int8_t *)(plan->tile + k / 16);
    float *w_scale = plan->tile;
    if (plan->ks < 2) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: slices of %d columns in precision q8", plan->ks);
    }
    for (int32_t t0 = 0; t0 < a->n_row; t0 += rows) {
        int32_t n_row = a->n_row - t0 < rows ? a->n_row - t0 : rows;
        for (int32_t t = 0; t < n_row; t++) {
            for (int32_t s = 0; s < a->n_slice; s++) {
                for (int32_t b = 0; b < blocks; b++) {
                    int32_t c = b * QL_Q8_BLOCK, n = plan->ks - c < QL_Q8_BLOCK ? plan->ks - c : QL_Q8_BLOCK;
                    c += s * plan->ks;
                    x_scale[(t * a->n_slice + s) * blocks + b] =
                        ql_q8_quantize(a->x + (t0 + t) * a->ldx + c, n, x_code + (int64_t)t * k + c);
                }
            }
        }
        for (int32_t r = 0; r < w->n; r++) {
            const uint8_t *code = (const uint8_t *)w->data + (int64_t)r * (k / 2);
            const uint8_t *scale = (const uint8_t *)w->scale + (int64_t)r * (k / QL_NVFP4_GROUP);
            for (int32_t c = 0; c < k; c += 2) {
                w_code[c] = halves[code[c / 2] & 15];
                w_code[c + 1] = halves[code[c / 2] >> 4];
            }
            for (int32_t g = 0; g < k / QL_NVFP4_GROUP; g++) {
                w_scale[g] = ql_e4m3_scale[scale[g]];
            }
            for (int32_t t = 0; t < n_row; t++) {
                float part[QL_LINEAR_SLICES];
                for (int32_t s = 0; s < a->n_slice; s++) {
                    q8_row x = {x_code + (int64_t)t * k + s * plan->ks, x_scale + (t * a->n_slice + s) * blocks};
                    float sum = q8_slice_sum(x, (q8_row){w_code, w_scale}, s * plan->ks, plan->ks);
                    part[s] = ql_linear_scaled(plan, sum, t, r, s);
                }
                a->y[(t0 + t) * a->ldy + r] = ql_linear_tree(part, a->n_slice);
            }
        }
    }
    return QL_OK;
}

/* ---- any product --------------------------------------------------------------------------------------------------- */

ql_status ql_linear_host(ql_dev *dev, const ql_linear_args *a) {
    ql_linear_host_plan plan;
    code_values values;
    QL_TRY(ql_linear_host_begin(dev, a, &plan));
    const ql_weight *w = a->w;
    if (a->precision == QL_PREC_Q8 && w->format == QL_FORMAT_NVFP4) {
        return q8_product(dev, a, &plan);
    }
    fill_values(&values);
    for (int32_t t0 = 0; t0 < a->n_row; t0 += QL_LINEAR_X_ROWS) {
        int32_t n_row = a->n_row - t0 < QL_LINEAR_X_ROWS ? a->n_row - t0 : QL_LINEAR_X_ROWS;
        int64_t ld;
        const float *x = ql_linear_host_x(&plan, t0, n_row, &ld);
        for (int32_t r = 0; r < w->n; r++) {
            decode_row(w, &values, r, plan.tile);
            for (int32_t t = 0; t < n_row; t++) {
                float part[QL_LINEAR_SLICES];
                for (int32_t s = 0; s < a->n_slice; s++) {
                    const float *xs = x + t * ld + s * plan.ks, *ws = plan.tile + s * plan.ks;
                    float sum = w->format == QL_FORMAT_FP8_BLOCK ? block_slice_sum(w, r, s * plan.ks, xs, ws, plan.ks)
                                                                 : ql_dot16(xs, ws, plan.ks);
                    part[s] = ql_linear_scaled(&plan, sum, t, r, s);
                }
                a->y[(t0 + t) * a->ldy + r] = ql_linear_tree(part, a->n_slice);
            }
        }
    }
    return QL_OK;
}
