/* What the twin and the variants of attention share: the walk over segments, heads, tiles and pages. A variant brings
 * its own decoding of cache rows and its own block.
 */
#ifndef QL_KERNELS_HOST_ATTENTION_COMMON_H
#define QL_KERNELS_HOST_ATTENTION_COMMON_H

#include "kernels/host/host_ops.h"

#include <stdbool.h>

enum { QL_ATTENTION_D = 256, QL_KV_SCALE_GROUP = 64 };

/* Running softmax of one row and head. */
typedef struct ql_attention_fold {
    float o[QL_ATTENTION_D], max, sum;
} ql_attention_fold;

typedef struct ql_attention_variant {
    /* x = n elements of the cache from element `at` on; both are multiples of 256. `scale` is NULL but for FP8. */
    void (*load)(ql_kv_type type, const void *cache, const void *scale, int64_t at, int32_t n, float *x);
    /* Folds a block of n >= 1 positions, k and v [n][256], into f; `first` where f holds nothing yet. */
    void (*block)(const float *q, const float *k, const float *v, int32_t n, bool first, ql_attention_fold *f);
} ql_attention_variant;

ql_status ql_attention_host_walk(ql_dev *dev, const ql_attention_args *a, const ql_attention_variant *variant);

/* The end of a block, once its weights w = exp(s - max), their sum and o = sum w v are known. */
void ql_attention_host_fold(ql_attention_fold *f, bool first, float max, float sum, const float *o);

#endif
