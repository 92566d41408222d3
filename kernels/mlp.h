/* swiglu: y[t][i] = silu(g[t][i]) * u[t][i], silu(a) = a / (1 + exp(-a)).
 *
 * g, u, y f32 [T][n] dense; y may be g. Elementwise, f32. Bytes: 12 T n.
 */
#ifndef QL_KERNELS_MLP_H
#define QL_KERNELS_MLP_H

#include "kernels/batch.h"

typedef struct ql_swiglu_args {
    const float *g, *u;
    float *y;
    int32_t n_row, n;
} ql_swiglu_args;

#endif
