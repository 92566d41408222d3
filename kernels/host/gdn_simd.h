/* Body of gdn's vector variants, included once by each instruction-set file after its v16 header and:
 *
 *   ROWS, COLS   a tile of a matrix product: rows times vectors of columns kept in registers; ROWS divides 64
 *   STEP_COLS    vectors of value channels that a step keeps in registers
 *   GDN          the variant's name
 *
 * Almost all of a chunk is products of matrices of 64 or 128 rows and columns, tiled so that an element of the right
 * one is used ROWS times from a register. Each sum is still one accumulator in rising order.
 */
#include "kernels/host/gdn_common.h"

#define UNROLL _Pragma("GCC unroll 16")

enum { D = QL_GDN_D, CHUNK = QL_GDN_CHUNK };

/* One tile of c = keep * c + a b, or of a b where keep is NULL. */
static inline __attribute__((always_inline)) void tile(int32_t n, const float *a, int32_t lda, const float *b,
                                                       int32_t ldb, float *c, int32_t ldc, const float *keep) {
    V16 acc[ROWS][COLS];
    UNROLL
    for (int32_t i = 0; i < ROWS; i++) {
        UNROLL
        for (int32_t j = 0; j < COLS; j++) {
            acc[i][j] = keep ? v16_mul(v16_load(c + i * ldc + 16 * j), v16_set1(*keep)) : v16_zero();
        }
    }
    for (int32_t k = 0; k < n; k++) {
        V16 y[COLS];
        UNROLL
        for (int32_t j = 0; j < COLS; j++) {
            y[j] = v16_load(b + k * ldb + 16 * j);
        }
        UNROLL
        for (int32_t i = 0; i < ROWS; i++) {
            V16 x = v16_set1(a[i * lda + k]);
            UNROLL
            for (int32_t j = 0; j < COLS; j++) {
                acc[i][j] = v16_add(acc[i][j], v16_mul(x, y[j]));
            }
        }
    }
    UNROLL
    for (int32_t i = 0; i < ROWS; i++) {
        UNROLL
        for (int32_t j = 0; j < COLS; j++) {
            v16_store(c + i * ldc + 16 * j, acc[i][j]);
        }
    }
}

/* Both results for j <= i; rows and columns up to whole tiles. */
static void products(ql_gdn_chunk_key *key, int32_t n) {
    for (int32_t i = 0; i < n; i += ROWS) {
        for (int32_t j = 0; j < i + ROWS; j += 16 * COLS) {
            tile(D, key->k[i], D, &key->kt[0][j], CHUNK, &key->kk[i][j], CHUNK, NULL);
            tile(D, key->q[i], D, &key->kt[0][j], CHUNK, &key->qk[i][j], CHUNK, NULL);
        }
    }
}

/* y += sum over j < n of w[j] x[j], for all value channels; y and x may be rows of one array. */
static void add_rows(const float *w, const float (*x)[D], int32_t n, float *y) {
    for (int32_t c = 0; c < D; c += 16 * STEP_COLS) {
        V16 acc[STEP_COLS];
        UNROLL
        for (int32_t i = 0; i < STEP_COLS; i++) {
            acc[i] = v16_load(y + c + 16 * i);
        }
        for (int32_t j = 0; j < n; j++) {
            V16 f = v16_set1(w[j]);
            UNROLL
            for (int32_t i = 0; i < STEP_COLS; i++) {
                acc[i] = v16_add(acc[i], v16_mul(f, v16_load(x[j] + c + 16 * i)));
            }
        }
        UNROLL
        for (int32_t i = 0; i < STEP_COLS; i++) {
            v16_store(y + c + 16 * i, acc[i]);
        }
    }
}

static void chunk(const ql_gdn_head *h, int64_t row0, int32_t n, ql_gdn_scratch *x) {
    const ql_gdn_chunk_gate *gate = &x->gate;
    float w[CHUNK];
    for (int32_t c = 0; c < D; c += 16 * COLS) {
        for (int32_t i = 0; i < n; i += ROWS) {
            tile(D, x->key.k[i], D, h->state + c, D, &x->read_k[i][c], D, NULL);
            tile(D, x->key.q[i], D, h->state + c, D, &x->read_q[i][c], D, NULL);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        const float *v = ql_gdn_v(h, row0 + i);
        V16 beta = v16_set1(gate->beta[i]), from_start = v16_set1(gate->from_start[i]);
        for (int32_t c = 0; c < D; c += 16) {
            V16 seen = v16_mul(from_start, v16_load(&x->read_k[i][c]));
            v16_store(&x->vn[i][c], v16_mul(beta, v16_sub(v16_load(v + c), seen)));
        }
        for (int32_t j = 0; j < i; j++) {
            w[j] = -((gate->beta[i] * x->key.kk[i][j]) * gate->decay[i][j]);
        }
        add_rows(w, x->vn, i, x->vn[i]);
    }
    for (int32_t i = 0; i < n; i++) {
        float *o = ql_gdn_o(h, row0 + i);
        V16 from_start = v16_set1(gate->from_start[i]);
        for (int32_t c = 0; c < D; c += 16) {
            v16_store(o + c, v16_mul(v16_load(&x->read_q[i][c]), from_start));
        }
        for (int32_t j = 0; j <= i; j++) {
            w[j] = x->key.qk[i][j] * gate->decay[i][j];
        }
        add_rows(w, x->vn, i + 1, o);
    }
    for (int32_t d = 0; d < D; d++) {
        for (int32_t i = 0; i < n; i++) {
            x->write[d][i] = gate->decay[n - 1][i] * x->key.kt[d][i];
        }
    }
    for (int32_t c = 0; c < D; c += 16 * COLS) {
        for (int32_t d = 0; d < D; d += ROWS) {
            tile(n, x->write[d], CHUNK, &x->vn[0][c], D, h->state + d * D + c, D, &gate->from_start[n - 1]);
        }
    }
}

/* Two walks over the state: the decayed state is formed in both and stored in the second. */
static void step(float *state, const float *q, const float *k, const float *v, float beta, float keep, float *o) {
    V16 f = v16_set1(keep), b = v16_set1(beta);
    for (int32_t c = 0; c < D; c += 16 * STEP_COLS) {
        V16 u[STEP_COLS], acc[STEP_COLS];
        UNROLL
        for (int32_t i = 0; i < STEP_COLS; i++) {
            u[i] = acc[i] = v16_zero();
        }
        for (int32_t d = 0; d < D; d++) {
            V16 kd = v16_set1(k[d]);
            UNROLL
            for (int32_t i = 0; i < STEP_COLS; i++) {
                u[i] = v16_add(u[i], v16_mul(kd, v16_mul(f, v16_load(state + d * D + c + 16 * i))));
            }
        }
        UNROLL
        for (int32_t i = 0; i < STEP_COLS; i++) {
            u[i] = v16_mul(b, v16_sub(v16_load(v + c + 16 * i), u[i]));
        }
        for (int32_t d = 0; d < D; d++) {
            V16 kd = v16_set1(k[d]), qd = v16_set1(q[d]);
            UNROLL
            for (int32_t i = 0; i < STEP_COLS; i++) {
                float *at = state + d * D + c + 16 * i;
                V16 s = v16_add(v16_mul(f, v16_load(at)), v16_mul(kd, u[i]));
                v16_store(at, s);
                acc[i] = v16_add(acc[i], v16_mul(qd, s));
            }
        }
        UNROLL
        for (int32_t i = 0; i < STEP_COLS; i++) {
            v16_store(o + c + 16 * i, acc[i]);
        }
    }
}

ql_status GDN(ql_dev *dev, const ql_gdn_args *a) {
    static const ql_gdn_variant variant = {step, products, chunk};
    return ql_gdn_host_walk(dev, a, &variant);
}
