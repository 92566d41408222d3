/* Host twins of conv and gdn.
 *
 * gdn walks one head's state at a time: 64 KiB, which stays in the second-level cache. Every sum over the key dimension
 * or over the rows of a chunk is one accumulator per value channel in rising order, so that the 128 channels can be
 * taken in vectors of any width with the same bits.
 */
#include "kernels/host/acc16.h"
#include "kernels/host/gdn_common.h"

#include <string.h>

enum { D = QL_GDN_D, CHUNK = QL_GDN_CHUNK };

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

static void step(float *state, const float *q, const float *k, const float *v, float beta, float keep, float *o) {
    float u[D] = {0};
    for (int32_t d = 0; d < D; d++) {
        scale(keep, state + d * D);
        add_scaled(k[d], state + d * D, u);
    }
    for (int32_t c = 0; c < D; c++) {
        u[c] = beta * (v[c] - u[c]);
    }
    memset(o, 0, D * sizeof *o);
    for (int32_t d = 0; d < D; d++) {
        add_scaled(k[d], u, state + d * D);
        add_scaled(q[d], state + d * D, o);
    }
}

/* y[j] = sum_d x[d] m[d][j] for the 64 columns of a transposed chunk. */
static void dot_rows(const float *restrict x, const float (*restrict m)[CHUNK], float *restrict y) {
    memset(y, 0, CHUNK * sizeof *y);
    for (int32_t d = 0; d < D; d++) {
        for (int32_t j = 0; j < CHUNK; j++) {
            y[j] += x[d] * m[d][j];
        }
    }
}

static void products(ql_gdn_chunk_key *key, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        dot_rows(key->k[i], key->kt, key->kk[i]);
        dot_rows(key->q[i], key->kt, key->qk[i]);
    }
}

/* y = S^T x */
static void read_state(const float *state, const float *x, float *y) {
    memset(y, 0, D * sizeof *y);
    for (int32_t d = 0; d < D; d++) {
        add_scaled(x[d], state + d * D, y);
    }
}

static void chunk(const ql_gdn_head *h, int64_t row0, int32_t n, ql_gdn_scratch *x) {
    const ql_gdn_chunk_gate *gate = &x->gate;
    for (int32_t i = 0; i < n; i++) {
        const float *v = ql_gdn_v(h, row0 + i);
        float *u = x->vn[i];
        read_state(h->state, x->key.k[i], u);
        for (int32_t c = 0; c < D; c++) {
            u[c] = gate->beta[i] * (v[c] - gate->from_start[i] * u[c]);
        }
        for (int32_t j = 0; j < i; j++) {
            add_scaled(-((gate->beta[i] * x->key.kk[i][j]) * gate->decay[i][j]), x->vn[j], u);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        float *o = ql_gdn_o(h, row0 + i);
        read_state(h->state, x->key.q[i], o);
        scale(gate->from_start[i], o);
        for (int32_t j = 0; j <= i; j++) {
            add_scaled(x->key.qk[i][j] * gate->decay[i][j], x->vn[j], o);
        }
    }
    for (int32_t d = 0; d < D; d++) {
        scale(gate->from_start[n - 1], h->state + d * D);
        for (int32_t i = 0; i < n; i++) {
            add_scaled(gate->decay[n - 1][i] * x->key.k[i][d], x->vn[i], h->state + d * D);
        }
    }
}

/* l2(x) * factor */
static void l2_norm(const float *x, float factor, float *y) {
    float r = 1.0f / sqrtf(ql_dot16(x, x, D) + 1e-6f);
    for (int32_t i = 0; i < D; i++) {
        y[i] = (x[i] * r) * factor;
    }
}

static void load_qk(const ql_gdn_head *h, int64_t row, float *q, float *k) {
    int32_t n_key = h->a->n_key_head;
    const float *u = h->a->u + row * (2 * n_key + h->a->n_value_head) * D;
    l2_norm(u + h->key * D, QL_GDN_Q_FACTOR, q);
    l2_norm(u + (n_key + h->key) * D, 1.0f, k);
}

static float beta_of(const ql_gdn_head *h, int64_t row) {
    return 1.0f / (1.0f + expf(-h->a->b[row * h->a->n_value_head + h->j]));
}

static float g_of(const ql_gdn_head *h, int64_t row) {
    float y = h->a->a[row * h->a->n_value_head + h->j] + h->a->dt_bias[h->j];
    return h->rate * (y > 20.0f ? y : log1pf(expf(y)));
}

/* Missing rows of a short chunk would only add zeros: they are zeros where whole vectors need them and left out
 * elsewhere. */
static void load_key(const ql_gdn_head *h, int64_t row0, int32_t n, const ql_gdn_variant *variant,
                     ql_gdn_chunk_key *key) {
    for (int32_t i = 0; i < n; i++) {
        load_qk(h, row0 + i, key->q[i], key->k[i]);
    }
    for (int32_t i = n; i < CHUNK; i++) {
        memset(key->q[i], 0, sizeof key->q[i]);
        memset(key->k[i], 0, sizeof key->k[i]);
    }
    for (int32_t d = 0; d < D; d++) {
        for (int32_t i = 0; i < CHUNK; i++) {
            key->kt[d][i] = key->k[i][d];
        }
    }
    variant->products(key, n);
}

static void load_gate(const ql_gdn_head *h, int64_t row0, int32_t n, ql_gdn_chunk_gate *gate) {
    double sum = 0.0, g[CHUNK];
    for (int32_t i = 0; i < n; i++) {
        sum += (double)g_of(h, row0 + i);
        g[i] = sum;
        gate->beta[i] = beta_of(h, row0 + i);
        gate->from_start[i] = expf((float)sum);
        for (int32_t j = 0; j <= i; j++) {
            gate->decay[i][j] = expf((float)(sum - g[j]));
        }
    }
}

size_t ql_gdn_host_scratch(const ql_shape *shape) {
    (void)shape;
    return sizeof(ql_gdn_scratch);
}

ql_status ql_gdn_host_walk(ql_dev *dev, const ql_gdn_args *a, const ql_gdn_variant *variant) {
    const ql_batch *batch = a->batch;
    ql_gdn_scratch *x = dev->scratch;
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
                ql_gdn_head h = {a, j, (a->value_head0 + j) / a->group - a->key_head0, -expf(a->a_log[j]),
                                 state + (int64_t)j * D * D};
                if (batch->phase == QL_PHASE_GEN) {
                    for (int64_t row = row0 + t; row < row0 + t + m; row++) {
                        float q[D], k[D];
                        load_qk(&h, row, q, k);
                        variant->step(h.state, q, k, ql_gdn_v(&h, row), beta_of(&h, row), expf(g_of(&h, row)),
                                      ql_gdn_o(&h, row));
                    }
                    continue;
                }
                if (h.key != key) {
                    load_key(&h, row0 + t, m, variant, &x->key);
                    key = h.key;
                }
                load_gate(&h, row0 + t, m, &x->gate);
                variant->chunk(&h, row0 + t, m, x);
            }
        }
    }
    return QL_OK;
}

ql_status ql_gdn_host(ql_dev *dev, const ql_gdn_args *a) {
    static const ql_gdn_variant twin = {step, products, chunk};
    return ql_gdn_host_walk(dev, a, &twin);
}
