/* Host twins of rmsnorm and gated_norm. */
#include "kernels/host/acc16.h"
#include "kernels/host/host_ops.h"

#include <math.h>

ql_status ql_rmsnorm_host(ql_dev *dev, const ql_rmsnorm_args *a) {
    (void)dev;
    int32_t n = a->n;
    for (int64_t t = 0; t < a->n_row; t++) {
        float *x = a->x + t * n;
        if (a->delta) {
            const float *delta = a->delta + t * n;
            for (int32_t i = 0; i < n; i++) {
                x[i] += delta[i];
            }
        }
        if (a->y) {
            float *y = a->y + t * a->ldy, scale = 1.0f / sqrtf(ql_dot16(x, x, n) / (float)n + a->eps);
            for (int32_t i = 0; i < n; i++) {
                y[i] = (x[i] * scale) * (1.0f + a->w[i]);
            }
        }
    }
    return QL_OK;
}

ql_status ql_gated_norm_host(ql_dev *dev, const ql_gated_norm_args *a) {
    (void)dev;
    enum { D = 128 };
    int64_t n = (int64_t)a->n_row * a->n_head;
    for (int64_t h = 0; h < n; h++) {
        const float *o = a->o + h * D, *z = a->z + h * D;
        float *y = a->y + h * D, scale = 1.0f / sqrtf(ql_dot16(o, o, D) / (float)D + a->eps);
        for (int32_t i = 0; i < D; i++) {
            y[i] = ((o[i] * scale) * a->w[i]) * (z[i] / (1.0f + expf(-z[i])));
        }
    }
    return QL_OK;
}
