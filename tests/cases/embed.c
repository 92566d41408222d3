/* Cases of embed, gather_rows and add: exact, so that the oracle has no tolerance. */
#include "tests/kcheck.h"

#include <math.h>
#include <string.h>

enum { OP_EMBED, OP_GATHER, OP_ADD };
enum { P_OP, P_ROW, P_WIDTH, P_DTYPE, P_ROW0, P_ROW1 };
enum { VOCAB = 40 };

static void list(kc_list *l) {
    static const ql_dtype dtypes[] = {QL_DTYPE_F32, QL_DTYPE_F16, QL_DTYPE_BF16};
    static const int32_t rows[] = {0, 1, 5, 64}, widths[] = {1, 7, 256, 5120},
                         cuts[][2] = {{0, VOCAB}, {10, 20}, {35, VOCAB}};
    for (int32_t t = 0; t < 4; t++) {
        for (int32_t w = 0; w < 4; w++) {
            for (int32_t d = 0; d < 3; d++) {
                for (int32_t i = 0; i < 3; i++) {
                    kc_case *c = kc_add(l, "embed.%s.t%d.h%d.ids%d-%d", ql_dtype_name(dtypes[d]), rows[t], widths[w],
                                        cuts[i][0], cuts[i][1] - 1);
                    int32_t p[] = {OP_EMBED, rows[t], widths[w], (int32_t)dtypes[d], cuts[i][0], cuts[i][1]};
                    memcpy(c->p, p, sizeof p);
                    c->rows = rows[t];
                }
            }
            for (int32_t op = OP_GATHER; op <= OP_ADD; op++) {
                kc_case *c = kc_add(l, "embed.%s.n%d.w%d", op == OP_GATHER ? "gather" : "add", rows[t], widths[w]);
                int32_t p[] = {op, rows[t], widths[w]};
                memcpy(c->p, p, sizeof p);
                c->rows = rows[t];
            }
        }
    }
}

static void make(kc_run *run) {
    const int32_t *p = run->c->p;
    int64_t n = (int64_t)p[P_ROW] * p[P_WIDTH];
    if (p[P_OP] == OP_ADD) {
        kc_buf *x = kc_buffer(run, "x", KC_INOUT, KC_F32, n), *y = kc_buffer(run, "y", KC_IN, KC_F32, n);
        x->row_len = p[P_WIDTH];
        kc_fill_normal(run, x->host, n, 1e3f);
        kc_fill_normal(run, y->host, n, 1.0f);
        return;
    }
    kc_buf *id = kc_buffer(run, "id", KC_IN, KC_I32, p[P_ROW]);
    for (int32_t t = 0; t < p[P_ROW]; t++) {
        ((int32_t *)id->host)[t] = kc_below(run, VOCAB);
    }
    if (p[P_OP] == OP_GATHER) {
        kc_fill_normal(run, kc_buffer(run, "x", KC_IN, KC_F32, (int64_t)VOCAB * p[P_WIDTH])->host,
                       (int64_t)VOCAB * p[P_WIDTH], 1.0f);
    } else {
        int64_t count = (int64_t)(p[P_ROW1] - p[P_ROW0]) * p[P_WIDTH], width = p[P_DTYPE] == QL_DTYPE_F32 ? 4 : 2;
        uint8_t *table = kc_buffer(run, "table", KC_IN, KC_U8, count * width)->host;
        for (int64_t i = 0; i < count; i++) { /* any bits that are a finite number, -0 often */
            uint64_t u = kc_u64(run) & ~0x4000u;
            u = kc_below(run, 4) == 0 ? 0x8000 : u;
            memset(table + i * width, 0, (size_t)width);
            memcpy(table + i * width + width - 2, &u, 2);
        }
    }
    kc_buffer(run, "y", KC_OUT, KC_F32, n)->row_len = p[P_WIDTH];
}

enum { X, Y, OUT, ID = X, TABLE = Y };

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    const int32_t *p = run->c->p;
    const ql_ops *ops = run->dev->ops;
    int64_t at = (int64_t)row0 * p[P_WIDTH];
    n_row = n_row < 0 ? p[P_ROW] : n_row;
    if (p[P_OP] == OP_ADD) {
        ql_add_args a = {(float *)run->buf[X].dev + at, (const float *)run->buf[Y].dev + at,
                         (int64_t)n_row * p[P_WIDTH]};
        return ops->add(run->dev, &a);
    }
    const int32_t *id = (const int32_t *)run->buf[ID].dev + row0;
    float *y = (float *)run->buf[OUT].dev + at;
    if (p[P_OP] == OP_GATHER) {
        ql_gather_rows_args a = {run->buf[TABLE].dev, id, y, n_row, p[P_WIDTH]};
        return ops->gather_rows(run->dev, &a);
    }
    ql_embed_args a = {
        .id = id,
        .table = run->buf[TABLE].dev,
        .dtype = (ql_dtype)p[P_DTYPE],
        .row0 = p[P_ROW0],
        .row1 = p[P_ROW1],
        .y = y,
        .n_row = n_row,
        .hidden = p[P_WIDTH],
    };
    return ops->embed(run->dev, &a);
}

static double plain(const uint8_t *p, int32_t dtype) {
    uint32_t u = 0;
    float f;
    if (dtype == QL_DTYPE_F16) {
        memcpy(&u, p, 2);
        double v = u >> 10 & 31 ? ldexp(1024 + (u & 1023), (int)(u >> 10 & 31) - 25) : ldexp(u & 1023, -24);
        return u & 0x8000 ? -v : v;
    }
    memcpy((uint8_t *)&u + (dtype == QL_DTYPE_F32 ? 0 : 2), p, dtype == QL_DTYPE_F32 ? 4 : 2);
    memcpy(&f, &u, 4);
    return f;
}

static void oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    int64_t width = p[P_WIDTH], size = p[P_DTYPE] == QL_DTYPE_F32 ? 4 : 2;
    double *want = kc_want(&run->buf[p[P_OP] == OP_ADD ? X : OUT]);
    for (int64_t i = 0; i < p[P_ROW] * width; i++) {
        if (p[P_OP] == OP_ADD) {
            want[i] = ((const float *)run->buf[X].host)[i] + ((const float *)run->buf[Y].host)[i];
            continue;
        }
        int64_t id = ((const int32_t *)run->buf[ID].host)[i / width];
        if (p[P_OP] == OP_GATHER) {
            want[i] = ((const float *)run->buf[TABLE].host)[id * width + i % width];
        } else if (id >= p[P_ROW0] && id < p[P_ROW1]) {
            want[i] = plain((const uint8_t *)run->buf[TABLE].host + ((id - p[P_ROW0]) * width + i % width) * size,
                            p[P_DTYPE]);
        }
    }
}

/* No -0 leaves embed, or lanes with and without the row would differ. */
static void check(kc_run *run) {
    const kc_buf *y = &run->buf[OUT];
    if (run->c->p[P_OP] != OP_EMBED || !kc_once(run, 0, -1)) {
        return;
    }
    for (int64_t i = 0; i < y->n; i++) {
        float v = ((const float *)y->got)[i];
        if (v == 0 && signbit(v)) {
            kc_fail(run, "y[%lld] is -0", (long long)i);
            return;
        }
    }
}

const kc_family kc_embed = {"embed", list, make, call, oracle, check};
