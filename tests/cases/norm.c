/* Cases of rmsnorm and gated_norm. */
#include "tests/kcheck.h"

#include <math.h>
#include <string.h>

enum { P_OP, P_ROW, P_N, P_DELTA, P_Y, P_PAD, P_REGIME }; /* P_N: entries, or heads of gated_norm */
enum { OP_RMS, OP_GATED, OP_GATED_ALIAS };
enum { NORMAL, LARGE, TINY, ZERO, OUTLIER, N_REGIME };

static const char *const regime_name[] = {"normal", "large", "tiny", "zero", "outlier"};
static const double eps = 1e-6;

static void add_rms(kc_list *l, int32_t t, int32_t n, int32_t delta, int32_t y, int32_t pad, int32_t regime) {
    kc_case *c = kc_add(l, "norm.rms.t%d.n%d%s%s.ld%d.%s", t, n, delta ? ".delta" : "", y ? "" : ".noy", n + pad,
                        regime_name[regime]);
    c->rows = t;
    c->bytes = 4.0 * t * n * (1 + y + 2 * delta);
    c->p[P_OP] = OP_RMS;
    c->p[P_ROW] = t;
    c->p[P_N] = n;
    c->p[P_DELTA] = delta;
    c->p[P_Y] = y;
    c->p[P_PAD] = pad;
    c->p[P_REGIME] = regime;
}

static void list(kc_list *l) {
    static const int32_t n[] = {1, 15, 16, 17, 128, 256, 5120};
    add_rms(l, 0, 16, 1, 1, 0, NORMAL);
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        add_rms(l, 1, n[i], 0, 1, 0, NORMAL);
        add_rms(l, 3, n[i], 1, 1, 5, NORMAL);
        add_rms(l, 2, n[i], 1, 0, 0, NORMAL);
    }
    for (int32_t r = 1; r < N_REGIME; r++) {
        add_rms(l, 4, 256, 0, 1, 0, r);
        add_rms(l, 4, 5120, 1, 1, 0, r);
    }
    add_rms(l, 65, 256, 1, 1, 0, NORMAL);
    for (int32_t r = 0; r < N_REGIME; r++) {
        static const int32_t shape[][2] = {{0, 1}, {1, 1}, {3, 6}, {65, 8}};
        for (size_t i = 0; i < 4; i++) {
            for (int32_t op = OP_GATED; op <= OP_GATED_ALIAS; op++) {
                int32_t t = shape[i][0], h = shape[i][1];
                kc_case *c = kc_add(l, "norm.gated.t%d.h%d%s.%s", t, h, op == OP_GATED ? "" : ".alias", regime_name[r]);
                c->rows = op == OP_GATED ? t : 0;
                c->bytes = 12.0 * t * h * 128;
                c->p[P_OP] = op;
                c->p[P_ROW] = t;
                c->p[P_N] = h;
                c->p[P_REGIME] = r;
            }
        }
    }
}

static void fill(kc_run *run, float *x, int64_t n) {
    int32_t regime = run->c->p[P_REGIME];
    kc_fill_normal(run, x, n, regime == LARGE ? 1e12f : regime == TINY ? 1e-15f : regime == ZERO ? 0.0f : 1.0f);
    if (regime == OUTLIER && n) {
        x[kc_below(run, (int32_t)n)] = 1e6f;
    }
}

static void make(kc_run *run) {
    const int32_t *p = run->c->p;
    int64_t t = p[P_ROW];
    if (p[P_OP] == OP_RMS) {
        int64_t n = p[P_N];
        kc_buf *x = kc_buffer(run, "x", p[P_DELTA] ? KC_INOUT : KC_IN, KC_F32, t * n);
        kc_buf *w = kc_buffer(run, "w", KC_IN, KC_F32, n), *delta = kc_buffer(run, "delta", KC_IN, KC_F32, t * n);
        kc_buf *y = kc_buffer(run, "y", KC_INOUT, KC_F32, t * (n + p[P_PAD])); /* the padding keeps its content */
        x->row_len = p[P_DELTA] ? n : 0;
        y->row_len = n + p[P_PAD];
        fill(run, x->host, x->n);
        kc_fill_normal(run, w->host, n, 0.5f);
        fill(run, delta->host, delta->n);
        kc_fill_normal(run, y->host, y->n, 1.0f);
        return;
    }
    int64_t n = t * p[P_N] * 128;
    kc_buf *o = kc_buffer(run, "o", p[P_OP] == OP_GATED ? KC_IN : KC_INOUT, KC_F32, n);
    kc_buf *w = kc_buffer(run, "w", KC_IN, KC_F32, 128), *z = kc_buffer(run, "z", KC_IN, KC_F32, n);
    fill(run, o->host, n);
    kc_fill_normal(run, w->host, 128, 1.0f);
    kc_fill_normal(run, z->host, n, 4.0f);
    if (n) {
        ((float *)z->host)[0] = -100.0f;
        ((float *)z->host)[n - 1] = 100.0f;
    }
    if (p[P_OP] == OP_GATED) {
        kc_buffer(run, "y", KC_OUT, KC_F32, n)->row_len = p[P_N] * 128;
    }
}

enum { X, W, DELTA, Y }; /* gated_norm: o, w, z, y */

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    const int32_t *p = run->c->p;
    n_row = n_row < 0 ? p[P_ROW] : n_row;
    if (p[P_OP] == OP_RMS) {
        int64_t n = p[P_N], ldy = n + p[P_PAD];
        ql_rmsnorm_args a = {
            .x = (float *)run->buf[X].dev + row0 * n,
            .delta = p[P_DELTA] ? (float *)run->buf[DELTA].dev + row0 * n : NULL,
            .w = run->buf[W].dev,
            .y = p[P_Y] ? (float *)run->buf[Y].dev + row0 * ldy : NULL,
            .ldy = ldy,
            .n_row = n_row,
            .n = p[P_N],
            .eps = (float)eps,
        };
        return run->dev->ops->rmsnorm(run->dev, &a);
    }
    int64_t at = (int64_t)row0 * p[P_N] * 128;
    ql_gated_norm_args a = {
        .o = (float *)run->buf[X].dev + at,
        .z = (float *)run->buf[DELTA].dev + at,
        .w = run->buf[W].dev,
        .y = (float *)run->buf[p[P_OP] == OP_GATED ? Y : X].dev + at,
        .n_row = n_row,
        .n_head = p[P_N],
        .eps = (float)eps,
    };
    return run->dev->ops->gated_norm(run->dev, &a);
}

/* The squares are all positive, so that the sum is good to a few roundings; x + delta is rounded once and enters as it
 * is, hence f32. */
static void oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    const float *w = run->buf[W].host;
    if (p[P_OP] == OP_RMS) {
        int64_t n = p[P_N], ldy = n + p[P_PAD];
        const float *x = run->buf[X].host, *delta = run->buf[DELTA].host, *pad = run->buf[Y].host;
        double *y = kc_want(&run->buf[Y]), *tol = kc_tol(&run->buf[Y]);
        double *sum = p[P_DELTA] ? kc_want(&run->buf[X]) : NULL;
        for (int64_t t = 0; t < p[P_ROW]; t++) {
            double square = 0.0;
            for (int64_t i = 0; i < n; i++) {
                float v = p[P_DELTA] ? x[t * n + i] + delta[t * n + i] : x[t * n + i];
                square += (double)v * v;
                if (sum) {
                    sum[t * n + i] = v;
                }
            }
            double r = 1.0 / sqrt(square / (double)n + (double)(float)eps);
            for (int64_t i = 0; i < ldy; i++) {
                if (i >= n || !p[P_Y]) {
                    y[t * ldy + i] = pad[t * ldy + i];
                    continue;
                }
                double v = sum ? sum[t * n + i] : x[t * n + i];
                y[t * ldy + i] = v * r * (1.0 + (double)w[i]);
                /* 1 + w is rounded too, which is relative to 1 + w unless w is near -1 */
                tol[t * ldy + i] = fabs(v * r) * (1e-6 * fabs(1.0 + (double)w[i]) + 1.2e-7);
            }
        }
        return;
    }
    kc_buf *out = &run->buf[p[P_OP] == OP_GATED ? Y : X];
    const float *o = run->buf[X].host, *z = run->buf[DELTA].host;
    double *y = kc_want(out), *tol = kc_tol(out);
    for (int64_t h = 0; h < out->n; h += 128) {
        double square = 0.0;
        for (int64_t i = h; i < h + 128; i++) {
            square += (double)o[i] * o[i];
        }
        double r = 1.0 / sqrt(square / 128.0 + (double)(float)eps);
        for (int64_t i = h; i < h + 128; i++) {
            double gate = (double)z[i] / (1.0 + exp(-(double)z[i]));
            y[i] = o[i] * r * (double)w[i - h] * gate;
            tol[i] = 1e-6 * fabs(y[i]) + 1e-37;
        }
    }
}

const kc_family kc_norm = {"norm", list, make, call, oracle, NULL};
