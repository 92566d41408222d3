/* What the twin and the variants of linear share: argument check, the rows of x in the precision that was asked for, and
 * the scaling and adding of slice sums. Order and roundings are those of linear.h.
 */
#ifndef QL_KERNELS_HOST_LINEAR_COMMON_H
#define QL_KERNELS_HOST_LINEAR_COMMON_H

#include "kernels/host/host_ops.h"

#include <stdbool.h>

enum {
    QL_LINEAR_X_ROWS = 48,    /* rows of x taken together at most: a multiple of every variant's tile */
    QL_LINEAR_W_ROWS = 4,     /* rows of W decoded together at most */
    QL_LINEAR_SLICES = 8,
};

typedef struct ql_linear_host_plan {
    const ql_linear_args *a;
    int32_t ks;               /* columns of a slice */
    bool is_fp8;              /* the format is one of the FP8 ones */
    float *tile;              /* [W_ROWS][k] decoded weights */
    float *x;                 /* [X_ROWS][k] rounded x; unused for EXACT */
    float *x_scale;           /* [X_ROWS][SLICES] for FP8 precision */
} ql_linear_host_plan;

/* Checks the arguments and lays out scratch. */
ql_status ql_linear_host_begin(ql_dev *dev, const ql_linear_args *a, ql_linear_host_plan *plan);

/* Rows [t0, t0 + n_row) of x as they meet the weight; *ld is their stride. */
const float *ql_linear_host_x(const ql_linear_host_plan *plan, int32_t t0, int32_t n_row, int64_t *ld);

static inline float ql_linear_block_scale(const ql_weight *w, int32_t row, int32_t col) {
    int32_t n_col = (w->col_off + w->k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
    return ((const float *)w->scale)[(int64_t)((w->row_off + row) / QL_FP8_BLOCK) * n_col + (w->col_off + col) / QL_FP8_BLOCK];
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

#endif
