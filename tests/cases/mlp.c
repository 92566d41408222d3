/* Cases of swiglu. */
#include "tests/kcheck.h"

#include <math.h>
#include <string.h>

enum { P_ROW, P_N, P_ALIAS, P_SCALE };
enum { G, U, Y };

static void list(kc_list *l) {
    static const int32_t shape[][2] = {{0, 16}, {1, 1}, {1, 17}, {3, 48}, {7, 1024}, {64, 2176}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        for (int32_t alias = 0; alias < 2; alias++) {
            for (int32_t scale = 1; scale <= 100; scale *= 100) {
                int32_t t = shape[i][0], n = shape[i][1];
                kc_case *c = kc_add(l, "mlp.swiglu.t%d.n%d.x%d%s", t, n, scale, alias ? ".alias" : "");
                c->rows = alias ? 0 : t;
                c->bytes = 12.0 * t * n;
                c->p[P_ROW] = t;
                c->p[P_N] = n;
                c->p[P_ALIAS] = alias;
                c->p[P_SCALE] = scale;
            }
        }
    }
}

static void make(kc_run *run) {
    const int32_t *p = run->c->p;
    int64_t n = (int64_t)p[P_ROW] * p[P_N];
    kc_buf *g = kc_buffer(run, "g", p[P_ALIAS] ? KC_INOUT : KC_IN, KC_F32, n);
    kc_buf *u = kc_buffer(run, "u", KC_IN, KC_F32, n);
    kc_fill_normal(run, g->host, n, (float)p[P_SCALE]);
    kc_fill_normal(run, u->host, n, 1.0f);
    static const float edge[] = {0.0f, -0.0f, 100.0f, -100.0f, -87.5f, 1e30f, -1e30f, 1e-40f};
    for (int64_t i = 0; i < 8 && i < n; i++) {
        ((float *)g->host)[n - 1 - i] = edge[i];
    }
    if (!p[P_ALIAS]) {
        kc_buffer(run, "y", KC_OUT, KC_F32, n)->row_len = p[P_N];
    }
}

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    const int32_t *p = run->c->p;
    int64_t at = (int64_t)row0 * p[P_N];
    ql_swiglu_args a = {
        .g = (float *)run->buf[G].dev + at,
        .u = (float *)run->buf[U].dev + at,
        .y = (float *)run->buf[p[P_ALIAS] ? G : Y].dev + at,
        .n_row = n_row < 0 ? p[P_ROW] : n_row,
        .n = p[P_N],
    };
    return run->dev->ops->swiglu(run->dev, &a);
}

/* Four roundings and the ulp of the exponential, which overflows where the result is below 1e-36. */
static void oracle(kc_run *run) {
    kc_buf *y = &run->buf[run->c->p[P_ALIAS] ? G : Y];
    const float *g = run->buf[G].host, *u = run->buf[U].host;
    double *want = kc_want(y), *tol = kc_tol(y);
    for (int64_t i = 0; i < y->n; i++) {
        double x = g[i];
        want[i] = x / (1.0 + exp(-x)) * (double)u[i];
        tol[i] = 4e-7 * fabs(want[i]) + 1e-35 * fabs((double)u[i]);
    }
}

const kc_family kc_mlp = {"mlp", list, make, call, oracle, NULL};
