/* What the twin and the variants of gdn share: where a head's rows lie, its gates, and the walk over segments, chunks
 * and heads. A variant brings its own arithmetic on the state.
 */
#ifndef QL_KERNELS_HOST_GDN_COMMON_H
#define QL_KERNELS_HOST_GDN_COMMON_H

#include "kernels/host/host_ops.h"

#include <math.h>

enum { QL_GDN_D = 128 };

#define QL_GDN_Q_FACTOR 0.08838834764831845f /* 1 / sqrt(128) */

/* One value head of one segment. */
typedef struct ql_gdn_head {
    const ql_gdn_args *a;
    int32_t j, key; /* local value and key head */
    float rate;     /* -exp(a_log) */
    float *state;
} ql_gdn_head;

/* What the value heads of one key head share in a chunk. Rows past the chunk's end are zeros in q, k and kt. */
typedef struct ql_gdn_chunk_key {
    float q[QL_GDN_CHUNK][QL_GDN_D], k[QL_GDN_CHUNK][QL_GDN_D];           /* normed, q scaled */
    float kt[QL_GDN_D][QL_GDN_CHUNK];                                     /* k transposed */
    float kk[QL_GDN_CHUNK][QL_GDN_CHUNK], qk[QL_GDN_CHUNK][QL_GDN_CHUNK]; /* k_i . k_j and q_i . k_j; good for j <= i */
} ql_gdn_chunk_key;

/* The gates of a value head in a chunk. */
typedef struct ql_gdn_chunk_gate {
    float beta[QL_GDN_CHUNK];
    float from_start[QL_GDN_CHUNK];          /* exp(G_i) */
    float decay[QL_GDN_CHUNK][QL_GDN_CHUNK]; /* exp(G_i - G_j), j <= i */
} ql_gdn_chunk_gate;

typedef struct ql_gdn_scratch {
    ql_gdn_chunk_key key;
    ql_gdn_chunk_gate gate;
    float vn[QL_GDN_CHUNK][QL_GDN_D];
    /* for variants: S^T k and S^T q of the rows, and kt with decay */
    float read_k[QL_GDN_CHUNK][QL_GDN_D], read_q[QL_GDN_CHUNK][QL_GDN_D], write[QL_GDN_D][QL_GDN_CHUNK];
} ql_gdn_scratch;

typedef struct ql_gdn_variant {
    /* One row of the recurrence. q and k are normed, u is room for 128. */
    void (*step)(float *state, const float *q, const float *k, const float *v, float beta, float keep, float *o);
    /* kk and qk of a chunk of n rows from q, k and kt. */
    void (*products)(ql_gdn_chunk_key *key, int32_t n);
    /* One chunk of n rows from row0 on, with key and gate filled. */
    void (*chunk)(const ql_gdn_head *h, int64_t row0, int32_t n, ql_gdn_scratch *x);
} ql_gdn_variant;

ql_status ql_gdn_host_walk(ql_dev *dev, const ql_gdn_args *a, const ql_gdn_variant *variant);

static inline const float *ql_gdn_v(const ql_gdn_head *h, int64_t row) {
    int32_t n_key = h->a->n_key_head, n_value = h->a->n_value_head;
    return h->a->u + (row * (2 * n_key + n_value) + 2 * n_key + h->j) * QL_GDN_D;
}

static inline float *ql_gdn_o(const ql_gdn_head *h, int64_t row) {
    return h->a->o + (row * h->a->n_value_head + h->j) * QL_GDN_D;
}

#endif
