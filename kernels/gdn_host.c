/* Host twins of conv and gdn.
 *
 * gdn walks one head's state at a time: 64 KiB, which stays in the second-level cache. Every sum over the key dimension
 * or over the rows of a chunk is one accumulator per value channel in rising order, so that the 128 channels can be
 * taken in vectors of any width with the same bits.
 */
#include "kernels/host/acc16.h"
#include "kernels/host/host_ops.h"

#include <math.h>
#include <string.h>

enum { D = 128, CHUNK = QL_GDN_CHUNK };

/* ---- conv ---- */

ql_status ql_conv_host(ql_dev *dev, const ql_conv_args *a) {
    (void)dev;
    const ql_batch *batch = a->batch;
    int64_t n_ch = a->channels;
    for (int32_t s = 0; s < batch->n_seg; s++) {
        int32_t row0 = batch->seg_row[s], n = batch->seg_row[s + 1] - row0;
        float *tail = a->tail + batch->seg_slot[s] * 3 * n_ch;
        if (batch->seg_pos[s] == 0) {
            memset(tail, 0, (size_t)(3 * n_ch) * sizeof *tail);
        }
        for (int32_t t = 0; t < n; t++) {
            const float *in[4]; /* the raw inputs of rows t-3 .. t */
            for (int32_t j = 0; j < 4; j++) {
                int64_t r = t - 3 + j;
                in[j] = r < 0 ? tail + (r + 3) * n_ch : a->m + (row0 + r) * n_ch;
            }
            float *y = a->y + (row0 + t) * n_ch;
            for (int64_t c = 0; c < n_ch; c++) {
                const float *w = a->w + 4 * c;
                float x = ((w[0] * in[0][c] + w[1] * in[1][c]) + w[2] * in[2][c]) + w[3] * in[3][c];
                y[c] = x / (1.0f + expf(-x));
            }
        }
        int32_t keep = n < 3 ? 3 - n : 0; /* rows of the old tail that remain */
        memmove(tail, tail + (3 - keep) * n_ch, (size_t)(keep * n_ch) * sizeof *tail);
        memcpy(tail + keep * n_ch, a->m + (row0 + n - 3 + keep) * n_ch, (size_t)((3 - keep) * n_ch) * sizeof *tail);
    }
    return QL_OK;
}

/* ---- gdn ---- */

/* l2(x) * factor */
static void l2_norm(const float *x, float factor, float *y) {
    float r = 1.0f / sqrtf(ql_dot16(x, x, D) + 1e-6f);
    for (int32_t i = 0; i < D; i++) {
        y[i] = (x[i] * r) * factor;
    }
}

static const float q_factor = 0.08838834764831845f; /* 1 / sqrt(128) */

typedef struct head {
    const ql_gdn_args *a;
    int32_t j, key;  /* local value and key head */
    float decay;     /* -exp(a_log) */
    float *state;
} head;

static const float *row_u(const ql_gdn_args *a, int64_t row) {
    return a->u + row * (2 * (int64_t)a->n_key_head + a->n_value_head) * D;
}

static const float *row_q(const head *h, int64_t row) { return row_u(h->a, row) + h->key * D; }
static const float *row_k(const head *h, int64_t row) { return row_u(h->a, row) + (h->a->n_key_head + h->key) * D; }
static const float *row_v(const head *h, int64_t row) { return row_u(h->a, row) + (2 * h->a->n_key_head + h->j) * D; }
static float *row_o(const head *h, int64_t row) { return h->a->o + (row * h->a->n_value_head + h->j) * D; }

static float beta_of(const head *h, int64_t row) {
    return 1.0f / (1.0f + expf(-h->a->b[row * h->a->n_value_head + h->j]));
}

static float g_of(const head *h, int64_t row) {
    float y = h->a->a[row * h->a->n_value_head + h->j] + h->a->dt_bias[h->j];
    return h->decay * (y > 20.0f ? y : log1pf(expf(y)));
}

/* y += w x over the value channels */
static void add_scaled(float w, const float *restrict x, float *restrict y) {
    for (int32_t c = 0; c < D; c++) {
        y[c] += w * x[c];
    }
}

static void scale(float w, float *x) {
    for (int32_t c = 0; c < D; c++) {
        x[c] *= w;
    }
}

/* One row of the recurrence. */
static void step(const head *h, int64_t row) {
    float q[D], k[D], u[D] = {0}, o[D] = {0};
    l2_norm(row_q(h, row), q_factor, q);
    l2_norm(row_k(h, row), 1.0f, k);
    const float *v = row_v(h, row);
    float beta = beta_of(h, row), keep = expf(g_of(h, row)), *s = h->state;
    for (int32_t d = 0; d < D; d++, s += D) {
        scale(keep, s);
        add_scaled(k[d], s, u);
    }
    for (int32_t c = 0; c < D; c++) {
        u[c] = beta * (v[c] - u[c]);
    }
    s = h->state;
    for (int32_t d = 0; d < D; d++, s += D) {
        add_scaled(k[d], u, s);
        add_scaled(q[d], s, o);
    }
    memcpy(row_o(h, row), o, sizeof o);
}

/* What the value heads of one key head share in a chunk. */
typedef struct chunk_key {
    float q[CHUNK][D], k[CHUNK][D];
    float kt[D][CHUNK];                       /* k transposed, zeros for missing rows */
    float kk[CHUNK][CHUNK], qk[CHUNK][CHUNK]; /* k_i . k_j and q_i . k_j, of use for j <= i */
} chunk_key;

typedef struct chunk_scratch {
    chunk_key key;
    float vn[CHUNK][D];
    float decay[CHUNK][CHUNK]; /* exp(G_i - G_j), j <= i */
} chunk_scratch;

/* y[j] = sum_d x[d] m[d][j] for the 64 columns of a transposed chunk. */
static void dot_rows(const float *restrict x, const float (*restrict m)[CHUNK], float *restrict y) {
    memset(y, 0, CHUNK * sizeof *y);
    for (int32_t d = 0; d < D; d++) {
        for (int32_t j = 0; j < CHUNK; j++) {
            y[j] += x[d] * m[d][j];
        }
    }
}

static void load_key(const head *h, int64_t row0, int32_t n, chunk_key *ck) {
    memset(ck->kt, 0, sizeof ck->kt);
    for (int32_t i = 0; i < n; i++) {
        l2_norm(row_q(h, row0 + i), q_factor, ck->q[i]);
        l2_norm(row_k(h, row0 + i), 1.0f, ck->k[i]);
        for (int32_t d = 0; d < D; d++) {
            ck->kt[d][i] = ck->k[i][d];
        }
    }
    for (int32_t i = 0; i < n; i++) {
        dot_rows(ck->k[i], ck->kt, ck->kk[i]);
        dot_rows(ck->q[i], ck->kt, ck->qk[i]);
    }
}

/* y = S^T x */
static void read_state(const float *restrict s, const float *restrict x, float *restrict y) {
    memset(y, 0, D * sizeof *y);
    for (int32_t d = 0; d < D; d++) {
        for (int32_t c = 0; c < D; c++) {
            y[c] += x[d] * s[d * D + c];
        }
    }
}

/* Rows row0 .. row0+n-1 are one chunk. Missing rows of a short chunk would only add zeros, so they are left out. */
static void chunk(const head *h, int64_t row0, int32_t n, chunk_scratch *x) {
    double sum = 0.0, g[CHUNK];
    for (int32_t i = 0; i < n; i++) {
        sum += (double)g_of(h, row0 + i);
        g[i] = sum;
        for (int32_t j = 0; j <= i; j++) {
            x->decay[i][j] = expf((float)(g[i] - g[j]));
        }
    }
    for (int32_t i = 0; i < n; i++) {
        const float *v = row_v(h, row0 + i);
        float beta = beta_of(h, row0 + i), from_start = expf((float)g[i]), *u = x->vn[i];
        read_state(h->state, x->key.k[i], u);
        for (int32_t c = 0; c < D; c++) {
            u[c] = beta * (v[c] - from_start * u[c]);
        }
        for (int32_t j = 0; j < i; j++) {
            float w = (beta * x->key.kk[i][j]) * x->decay[i][j];
            add_scaled(-w, x->vn[j], u);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        float from_start = expf((float)g[i]), *o = row_o(h, row0 + i);
        read_state(h->state, x->key.q[i], o);
        scale(from_start, o);
        for (int32_t j = 0; j <= i; j++) {
            float w = x->key.qk[i][j] * x->decay[i][j];
            add_scaled(w, x->vn[j], o);
        }
    }
    float keep = expf((float)g[n - 1]);
    for (int32_t d = 0; d < D; d++) {
        float *s = h->state + d * D;
        scale(keep, s);
        for (int32_t i = 0; i < n; i++) {
            add_scaled(x->decay[n - 1][i] * x->key.k[i][d], x->vn[i], s);
        }
    }
}

size_t ql_gdn_host_scratch(const ql_shape *shape) {
    (void)shape;
    return sizeof(chunk_scratch);
}

ql_status ql_gdn_host(ql_dev *dev, const ql_gdn_args *a) {
    const ql_batch *batch = a->batch;
    chunk_scratch *x = dev->scratch;
    for (int32_t s = 0; s < batch->n_seg; s++) {
        int32_t row0 = batch->seg_row[s], n = batch->seg_row[s + 1] - row0;
        float *state = a->state + (int64_t)batch->seg_slot[s] * a->n_value_head * D * D;
        if (batch->seg_pos[s] == 0) {
            memset(state, 0, (size_t)a->n_value_head * D * D * sizeof *state);
        }
        int32_t len = batch->phase == QL_PHASE_PROMPT ? CHUNK : n;
        for (int32_t t = 0; t < n; t += len) {
            int32_t m = n - t < len ? n - t : len, key = -1;
            for (int32_t j = 0; j < a->n_value_head; j++) {
                head h = {a, j, (a->value_head0 + j) / a->group - a->key_head0, -expf(a->a_log[j]),
                          state + (int64_t)j * D * D};
                if (batch->phase == QL_PHASE_GEN) {
                    for (int32_t i = 0; i < m; i++) {
                        step(&h, row0 + t + i);
                    }
                    continue;
                }
                if (h.key != key) {
                    load_key(&h, row0 + t, m, &x->key);
                    key = h.key;
                }
                chunk(&h, row0 + t, m, x);
            }
        }
    }
    return QL_OK;
}
