/* Host twin of swiglu: the formula, element by element. */
#include "kernels/host/host_ops.h"

#include <math.h>

ql_status ql_swiglu_host(ql_dev *dev, const ql_swiglu_args *a) {
    (void)dev;
    int64_t n = (int64_t)a->n_row * a->n;
    for (int64_t i = 0; i < n; i++) {
        float g = a->g[i];
        a->y[i] = g / (1.0f + expf(-g)) * a->u[i];
    }
    return QL_OK;
}
