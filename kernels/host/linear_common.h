/* What the twin and the variants of linear share: argument check, the rows of x in the precision that was asked for, and
 * the scaling and adding of slice sums. Order and roundings are those of linear.h.
 */
#ifndef QL_KERNELS_HOST_LINEAR_COMMON_H
#define QL_KERNELS_HOST_LINEAR_COMMON_H

#include "kernels/host/host_ops.h"

#include <stdbool.h>

enum {
    QL_LINEAR_X_ROWS = 48, /* rows of x taken together at most: a multiple of every variant's tile */
    QL_LINEAR_W_ROWS = 32, /* rows and columns of W decoded together at most by the variants */
    QL_LINEAR_COLS = 512,
    QL_LINEAR_SLICES = 8,
    QL_LINEAR_ACC_BYTES = QL_LINEAR_X_ROWS * QL_LINEAR_W_ROWS * 16 * 4,
};

typedef struct ql_linear_host_plan {
    const ql_linear_args *a;
    int32_t ks;     /* columns of a slice */
    bool is_fp8;    /* the format is one of the FP8 ones */
    float *tile;    /* decoded weights: [W_ROWS][COLS], or one row of k */
    float *acc;     /* [X_ROWS][W_ROWS][16] sums under way, in the variant's own order */
    float *part;    /* [X_ROWS][W_ROWS][SLICES] finished slices */
    float *x;       /* [X_ROWS][k] rounded x; unused for EXACT */
    float *x_scale; /* [X_ROWS][SLICES] for FP8 precision */
} ql_linear_host_plan;

/* Checks the arguments and lays out scratch. */
ql_status ql_linear_host_begin(ql_dev *dev, const ql_linear_args *a, ql_linear_host_plan *plan);

/* Rows [t0, t0 + n_row) of x as they meet the weight; *ld is their stride. */
const float *ql_linear_host_x(const ql_linear_host_plan *plan, int32_t t0, int32_t n_row, int64_t *ld);

static inline float ql_linear_block_scale(const ql_weight *w, int32_t row, int32_t col) {
    int32_t n_col = (w->col_off + w->k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
    return ((const float *)
                w->scale)[(int64_t)((w->row_off + row) / QL_FP8_BLOCK) * n_col + (w->col_off + col) / QL_FP8_BLOCK];
}

/* The sum of one slice with its scales: x row t of the block, weight row r. */
static inline float ql_linear_scaled(const ql_linear_host_plan *p, float sum, int32_t t, int32_t r, int32_t slice) {
    const ql_weight *w = p->a->w;
    if (p->a->precision == QL_PREC_FP8 && p->is_fp8) {
        sum *= p->x_scale[t * QL_LINEAR_SLICES + slice];
    }
    if (w->format == QL_FORMAT_FP8_CHANNEL) {
        sum *= ((const float *)w->scale)[r];
    } else if (w->format == QL_FORMAT_FP8_TENSOR || w->format == QL_FORMAT_NVFP4) {
        sum *= w->factor;
    }
    return sum;
}

/* Adds n slice results as the balanced tree; overwrites part. */
static inline float ql_linear_tree(float *part, int32_t n) {
    for (; n > 1; n /= 2) {
        for (int32_t i = 0; i < n / 2; i++) {
            part[i] = part[2 * i] + part[2 * i + 1];
        }
    }
    return part[0];
}

/* Group scales by code: the E4M3 numbers without sign, exact in f32. */
#define QL_E4M3_1(b) ((float)((b) < 8 ? 2 * (b) : (8 + (b) % 8) << (b) / 8) * 0x1p-10f)
#define QL_E4M3_8(b)                                                                                                   \
    QL_E4M3_1(b), QL_E4M3_1(b + 1), QL_E4M3_1(b + 2), QL_E4M3_1(b + 3), QL_E4M3_1(b + 4), QL_E4M3_1(b + 5),            \
        QL_E4M3_1(b + 6), QL_E4M3_1(b + 7)
static const float ql_e4m3_scale[128] = {
    QL_E4M3_8(0),  QL_E4M3_8(8),   QL_E4M3_8(16),  QL_E4M3_8(24),  QL_E4M3_8(32), QL_E4M3_8(40),
    QL_E4M3_8(48), QL_E4M3_8(56),  QL_E4M3_8(64),  QL_E4M3_8(72),  QL_E4M3_8(80), QL_E4M3_8(88),
    QL_E4M3_8(96), QL_E4M3_8(104), QL_E4M3_8(112), QL_E4M3_8(120),
};
#undef QL_E4M3_1
#undef QL_E4M3_8

#endif
