/* The 16 accumulators of every dot product of the host twins: element i goes to accumulator i % 16 in rising i, and the
 * accumulators are added as halves of 8, 4, 2, 1. Vector code of 4, 8 or 16 lanes can keep this order, so that all
 * host variants give the same bits.
 */
#ifndef QL_KERNELS_HOST_ACC16_H
#define QL_KERNELS_HOST_ACC16_H

#include <stdint.h>

static inline float ql_acc16_sum(const float *acc) {
    float a[8], b[4];
    for (int32_t i = 0; i < 8; i++) {
        a[i] = acc[i] + acc[i + 8];
    }
    for (int32_t i = 0; i < 4; i++) {
        b[i] = a[i] + a[i + 4];
    }
    return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline float ql_dot16(const float *x, const float *y, int32_t n) {
    float acc[16] = {0};
    int32_t c = 0;
    for (; c + 16 <= n; c += 16) {
        for (int32_t i = 0; i < 16; i++) {
            acc[i] += x[c + i] * y[c + i];
        }
    }
    for (int32_t i = 0; c + i < n; i++) {
        acc[i] += x[c + i] * y[c + i];
    }
    return ql_acc16_sum(acc);
}

#endif
