/* Twin of linear (linear.h): plain loops, one weight row decoded at a time. */
#include "kernels/host/acc16.h"
#include "kernels/host/linear_common.h"

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
        a->ldy < w->n || a->n_row < 0 || a->precision < QL_PREC_EXACT || a->precision > QL_PREC_FP8) {
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

const float *ql_linear_host_x(const ql_linear_host_plan *plan, int32_t t0, int32_t n_row, int64_t *ld) {
    const ql_linear_args *a = plan->a;
    const float *x = a->x + (int64_t)t0 * a->ldx;
    if (a->precision == QL_PREC_EXACT) {
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

ql_status ql_linear_host(ql_dev *dev, const ql_linear_args *a) {
    ql_linear_host_plan plan;
    code_values values;
    QL_TRY(ql_linear_host_begin(dev, a, &plan));
    fill_values(&values);
    const ql_weight *w = a->w;
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
