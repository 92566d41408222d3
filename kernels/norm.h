/* rmsnorm: y = x * rsqrt(mean(x^2) + eps) * (1 + w), with an optional residual addition before it.
 *
 *   delta given:  x[t][i] += delta[t][i], written back
 *   y[t][i] = (x[t][i] * (1 / sqrt(sum_i x[t][i]^2 / n + eps))) * (1 + w[i])
 *
 * Used for every zero-centred norm (layer norms, final norm, MTP norms). f32 throughout. The sum of squares uses 16
 * accumulators (element i to i % 16) added as halves of 8, 4, 2, 1. Rows are independent. x [T][n] dense; delta [T][n]
 * dense or NULL; y [T][ldy], ldy >= n; y NULL: the addition alone. y may not overlap x.
 * Bytes: 4 T n (2, 3 with y, 4 with delta).
 *
 * gated_norm: the GatedDeltaNet output norm, plain weight, per value head of 128 entries.
 *
 *   y[t][h][i] = ((o * (1 / sqrt(sum_i o^2 / 128 + eps))) * w[i]) * silu(z[t][h][i])      silu(a) = a / (1 + exp(-a))
 *
 * Sum of squares as above. o, z, y f32 [T][n_head][128] dense, w [128]; y may be o.
 */
#ifndef QL_KERNELS_NORM_H
#define QL_KERNELS_NORM_H

#include "kernels/batch.h"

typedef struct ql_rmsnorm_args {
    float *x;
    const float *delta;
    const float *w;
    float *y;
    int64_t ldy;
    int32_t n_row, n;
    float eps;
} ql_rmsnorm_args;

typedef struct ql_gated_norm_args {
    const float *o, *z, *w;
    float *y;
    int32_t n_row, n_head;
    float eps;
} ql_gated_norm_args;

#endif
