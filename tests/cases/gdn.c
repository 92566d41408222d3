/* Cases of conv and gdn. The oracle of both phases of gdn is the plain recurrence in double precision; beyond it every
 * case asks for the same bits from each segment alone and in parts, and from a lane that holds half of the heads.
 */
#include "tests/cases/batch.h"

#include <math.h>

enum { D = 128 };
enum { P_OP, P_PHASE, P_REGIME, P_KEY, P_VALUE, P_GROUP, P_VALUE0, P_SEG /* n, then len, pos */, P_CHANNELS = P_KEY };
enum { OP_CONV, OP_GDN };
enum { TYPICAL, SLOW, NO_DECAY, STRONG, MIXED, SATURATED, SAME_KEY, N_REGIME };

static const char *const regime_name[] = {"typical", "slow", "nodecay", "strong", "mixed", "saturated", "samekey"};

static int32_t n_row_of(const kc_case *c) {
    int32_t n = 0;
    for (int32_t s = 0; s < c->p[P_SEG]; s++) {
        n += c->p[P_SEG + 1 + 2 * s];
    }
    return n;
}

/* segs: {len, pos} pairs */
static void set_segs(kc_case *c, int32_t n_seg, const int32_t (*segs)[2]) {
    size_t used = strlen(c->name);
    c->p[P_SEG] = n_seg;
    for (int32_t s = 0; s < n_seg; s++) {
        c->p[P_SEG + 1 + 2 * s] = segs[s][0];
        c->p[P_SEG + 2 + 2 * s] = segs[s][1];
        used += (size_t)snprintf(c->name + used, sizeof c->name - used, ".%dat%d", segs[s][0], segs[s][1]);
    }
}

static kc_case *add_conv(kc_list *l, ql_phase phase, int32_t channels, int32_t n_seg, const int32_t (*segs)[2]) {
    kc_case *c = kc_add(l, "gdn.conv.%s.c%d", phase == QL_PHASE_GEN ? "gen" : "prompt", channels);
    c->p[P_OP] = OP_CONV;
    c->p[P_PHASE] = phase;
    c->p[P_CHANNELS] = channels;
    set_segs(c, n_seg, segs);
    c->bytes = 8.0 * n_row_of(c) * channels + 24.0 * n_seg * channels + 16.0 * channels;
    return c;
}

static kc_case *add_gdn(kc_list *l, ql_phase phase, int32_t regime, int32_t n_key, int32_t n_value, int32_t group,
                        int32_t value0, int32_t n_seg, const int32_t (*segs)[2]) {
    kc_case *c = kc_add(l, "gdn.%s.%s.k%d.v%d.g%d.v0_%d", phase == QL_PHASE_GEN ? "gen" : "prompt", regime_name[regime],
                        n_key, n_value, group, value0);
    c->p[P_OP] = OP_GDN;
    c->p[P_PHASE] = phase;
    c->p[P_REGIME] = regime;
    c->p[P_KEY] = n_key;
    c->p[P_VALUE] = n_value;
    c->p[P_GROUP] = group;
    c->p[P_VALUE0] = value0;
    set_segs(c, n_seg, segs);
    c->shape = (ql_shape){.n_key_head = n_key, .n_value_head = n_value, .max_row = n_row_of(c), .max_seg = n_seg};
    double rows = n_row_of(c), heads = n_value;
    c->bytes = 4.0 * rows * (2 * n_key + 2 * n_value) * D + 8.0 * D * D * heads * n_seg;
    c->flops = phase == QL_PHASE_GEN ? 8.0 * D * D * rows * heads : 2.0 * rows * heads * (3.0 * D * D + 4.0 * 32 * D);
    return c;
}

static void list(kc_list *l) {
    const ql_phase gen = QL_PHASE_GEN, prompt = QL_PHASE_PROMPT;
    static const int32_t channels[] = {1, 16, 384, 1000};
    for (size_t i = 0; i < 4; i++) {
        int32_t c = channels[i];
        add_conv(l, gen, c, KB_SEGS({1, 0}));
        add_conv(l, gen, c, KB_SEGS({1, 1}, {2, 2}, {3, 0}, {1, 70000}, {4, 5}));
        add_conv(l, prompt, c, KB_SEGS({1, 0}, {2, 0}, {3, 64}, {65, 0}, {130, 64}));
    }
    add_conv(l, prompt, 2048, KB_SEGS({512, 0}));
    add_conv(l, prompt, 10240, KB_SEGS({64, 64}));

    static const int32_t len[] = {1, 2, 63, 64, 65, 128, 130};
    for (size_t i = 0; i < sizeof len / sizeof *len; i++) {
        add_gdn(l, prompt, TYPICAL, 1, 1, 1, 0, KB_SEGS({len[i], 0}));
        add_gdn(l, prompt, SLOW, 1, 2, 2, 0, KB_SEGS({len[i], 64}));
    }
    for (int32_t r = 0; r < N_REGIME; r++) {
        add_gdn(l, gen, r, 1, 2, 2, 0, KB_SEGS({1, 0}, {1, 77}, {5, 1}));
        add_gdn(l, gen, r, 1, 2, 2, 0, KB_SEGS({130, 0}));
        add_gdn(l, prompt, r, 1, 2, 2, 0, KB_SEGS({130, 0}, {64, 64}, {1, 0}, {70, 128}));
    }
    /* head maps: groups of 1, 2, 3, 6; lanes that begin or end inside a group */
    add_gdn(l, prompt, TYPICAL, 2, 2, 1, 6, KB_SEGS({66, 0}, {3, 64}));
    add_gdn(l, prompt, TYPICAL, 2, 6, 3, 0, KB_SEGS({66, 0}, {3, 64}));
    add_gdn(l, prompt, TYPICAL, 2, 2, 3, 8, KB_SEGS({66, 0}));
    add_gdn(l, prompt, SLOW, 1, 3, 6, 3, KB_SEGS({66, 0}));
    add_gdn(l, prompt, SLOW, 1, 9, 9, 0, KB_SEGS({66, 0})); /* more heads than make their gates at a time */
    add_gdn(l, gen, TYPICAL, 2, 6, 3, 6, KB_SEGS({1, 9}, {3, 0}));
    add_gdn(l, gen, TYPICAL, 2, 2, 3, 8, KB_SEGS({1, 9}, {1, 3}));
    add_gdn(l, gen, SLOW, 1, 3, 6, 3, KB_SEGS({2, 9}));
    add_gdn(l, gen, SLOW, 3, 3, 1, 5, KB_SEGS({2, 9}));
    /* one lane of the bundled model and of the 27B */
    add_gdn(l, gen, SLOW, 4, 8, 2, 0, KB_SEGS({1, 100}));
    add_gdn(l, prompt, SLOW, 4, 8, 2, 0, KB_SEGS({128, 64}));
    add_gdn(l, gen, SLOW, 16, 48, 3, 0, KB_SEGS({1, 100}))->is_long = true;
    add_gdn(l, prompt, SLOW, 16, 48, 3, 0, KB_SEGS({128, 64}))->is_long = true;
    add_gdn(l, prompt, SLOW, 1, 1, 1, 0, KB_SEGS({1000, 0}))->is_long = true;
}

/* ---- inputs ---- */

typedef struct user {
    kb_batch batch;
    kc_buf *m, *w, *tail, *y;                               /* conv */
    kc_buf *u, *a, *b, *a_log, *dt_bias, *state, *o;        /* gdn */
    kc_buf *u2, *a2, *b2, *a_log2, *dt_bias2, *state2, *o2; /* the second half of the value heads */
    int32_t n_key2, key2;                                   /* its key heads: [key2, key2 + n_key2) */
} user;

/* Slots of segments that start at position 0 hold NaN: it must not leak. */
static void fill_slots(kc_run *run, const kb_batch *b, kc_buf *buf, int64_t slot_elems, float scale) {
    float *x = buf->host;
    kc_fill_normal(run, x, buf->n, scale);
    for (int32_t s = 0; s < b->n_seg; s++) {
        for (int64_t i = 0; b->pos[s] == 0 && i < slot_elems; i++) {
            x[b->slot[s] * slot_elems + i] = NAN;
        }
    }
}

static void make_gates(kc_run *run, user *x) {
    const int32_t *p = run->c->p;
    int32_t n_value = p[P_VALUE], regime = p[P_REGIME];
    float *a = x->a->host, *b = x->b->host, *a_log = x->a_log->host, *dt_bias = x->dt_bias->host;
    for (int32_t j = 0; j < n_value; j++) {
        a_log[j] = logf(kc_uniform(run, 0.5f, 16.0f));
        dt_bias[j] = kc_uniform(run, -1.0f, 1.0f);
    }
    for (int64_t i = 0; i < x->a->n; i++) {
        static const float edge[] = {-1e4f, 1e4f, 19.5f, 20.5f, 90.0f, -90.0f, -16.0f, -30.0f};
        a[i] = kc_normal(run);
        b[i] = kc_normal(run);
        switch (regime) {
        case SLOW: a[i] = kc_uniform(run, -8.0f, -4.0f); break;
        case NO_DECAY: a[i] = -200.0f; break;
        case STRONG: a[i] = kc_uniform(run, 5.0f, 200.0f); break;
        case MIXED: a[i] = kc_below(run, 8) == 0 ? 50.0f : -9.0f; break;
        case SATURATED:
            a[i] = edge[kc_below(run, 8)];
            b[i] = kc_below(run, 2) ? kc_uniform(run, 20.0f, 200.0f) : kc_uniform(run, -200.0f, -20.0f);
            break;
        case SAME_KEY:
            a[i] = -200.0f;
            b[i] = 30.0f;
            break;
        default: break;
        }
    }
}

static void make(kc_run *run) {
    const int32_t *p = run->c->p;
    user *x = calloc(1, sizeof *x);
    run->user = x;
    if (!x) {
        kc_fail(run, "out of memory");
        return;
    }
    int32_t len[KB_MAX_SEG], pos[KB_MAX_SEG], n_seg = p[P_SEG];
    for (int32_t s = 0; s < n_seg; s++) {
        len[s] = p[P_SEG + 1 + 2 * s];
        pos[s] = p[P_SEG + 2 + 2 * s];
    }
    kb_make(run, &x->batch, n_seg, len, pos);
    int64_t n_row = x->batch.n_row, n_slot = n_seg + 1;
    if (p[P_OP] == OP_CONV) {
        int64_t c = p[P_CHANNELS];
        x->m = kc_buffer(run, "m", KC_IN, KC_F32, n_row * c);
        x->w = kc_buffer(run, "w", KC_IN, KC_F32, 4 * c);
        x->tail = kc_buffer(run, "tail", KC_INOUT, KC_F32, n_slot * 3 * c);
        x->y = kc_buffer(run, "y", KC_OUT, KC_F32, n_row * c);
        kc_fill_normal(run, x->m->host, x->m->n, 2.0f);
        kc_fill_normal(run, x->w->host, x->w->n, 0.5f);
        fill_slots(run, &x->batch, x->tail, 3 * c, 2.0f);
        return;
    }
    int32_t n_key = p[P_KEY], n_value = p[P_VALUE], half = n_value / 2;
    int64_t width = (2 * n_key + n_value) * D;
    x->u = kc_buffer(run, "u", KC_IN, KC_F32, n_row * width);
    x->a = kc_buffer(run, "a", KC_IN, KC_F32, n_row * n_value);
    x->b = kc_buffer(run, "b", KC_IN, KC_F32, n_row * n_value);
    x->a_log = kc_buffer(run, "a_log", KC_IN, KC_F32, n_value);
    x->dt_bias = kc_buffer(run, "dt_bias", KC_IN, KC_F32, n_value);
    x->state = kc_buffer(run, "state", KC_INOUT, KC_F32, n_slot * n_value * D * D);
    x->o = kc_buffer(run, "o", KC_OUT, KC_F32, n_row * n_value * D);
    float *u = x->u->host;
    kc_fill_normal(run, u, x->u->n, 1.0f);
    for (int64_t t = 0; t < n_row; t++) {
        if (p[P_REGIME] == SAME_KEY && t > 0) {
            memcpy(u + t * width + n_key * D, u + n_key * D, (size_t)(n_key * D) * sizeof *u);
        }
        if (p[P_REGIME] == TYPICAL && t % 7 == 3) { /* a row of zeros, as silu leaves them */
            memset(u + t * width, 0, (size_t)width * sizeof *u);
        }
        for (int64_t i = 0; p[P_REGIME] == TYPICAL && t % 7 == 5 && i < 2 * n_key * D; i++) {
            u[t * width + i] *= 1e-4f; /* a square sum near the 1e-6 that is added to it */
        }
    }
    make_gates(run, x);
    fill_slots(run, &x->batch, x->state, (int64_t)n_value * D * D, 0.3f);
    if (half == 0) {
        return;
    }
    int32_t v2 = p[P_VALUE0] + half, n2 = n_value - half, key0 = p[P_VALUE0] / p[P_GROUP];
    x->key2 = v2 / p[P_GROUP];
    x->n_key2 = (v2 + n2 - 1) / p[P_GROUP] - x->key2 + 1;
    int64_t width2 = (2 * x->n_key2 + n2) * D, key_off = (x->key2 - key0) * D;
    x->u2 = kc_buffer(run, "u of a lane", KC_IN, KC_F32, n_row * width2);
    x->a2 = kc_buffer(run, "a of a lane", KC_IN, KC_F32, n_row * n2);
    x->b2 = kc_buffer(run, "b of a lane", KC_IN, KC_F32, n_row * n2);
    x->a_log2 = kc_buffer(run, "a_log of a lane", KC_IN, KC_F32, n2);
    x->dt_bias2 = kc_buffer(run, "dt_bias of a lane", KC_IN, KC_F32, n2);
    x->state2 = kc_buffer(run, "state of a lane", KC_WORK, KC_F32, n_slot * n2 * D * D);
    x->o2 = kc_buffer(run, "o of a lane", KC_WORK, KC_F32, n_row * n2 * D);
    for (int64_t t = 0; t < n_row; t++) {
        float *to = (float *)x->u2->host + t * width2;
        const float *from = u + t * width;
        size_t keys = (size_t)(x->n_key2 * D) * sizeof *to;
        memcpy(to, from + key_off, keys);
        memcpy(to + x->n_key2 * D, from + n_key * D + key_off, keys);
        memcpy(to + 2 * x->n_key2 * D, from + (2 * n_key + half) * D, (size_t)(n2 * D) * sizeof *to);
        memcpy((float *)x->a2->host + t * n2, (float *)x->a->host + t * n_value + half, (size_t)n2 * sizeof *to);
        memcpy((float *)x->b2->host + t * n2, (float *)x->b->host + t * n_value + half, (size_t)n2 * sizeof *to);
    }
    memcpy(x->a_log2->host, (float *)x->a_log->host + half, (size_t)n2 * sizeof(float));
    memcpy(x->dt_bias2->host, (float *)x->dt_bias->host + half, (size_t)n2 * sizeof(float));
    for (int64_t s = 0; s < n_slot; s++) { /* put before its call, work buffers start with a pattern */
        memcpy((float *)x->state2->host + s * n2 * D * D, (float *)x->state->host + (s * n_value + half) * D * D,
               (size_t)(n2 * D * D) * sizeof(float));
    }
}

/* ---- calls ---- */

/* `batch` holds rows from row0 of the whole on. */
static ql_status call_batch(kc_run *run, const ql_batch *batch, int64_t row0) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    if (p[P_OP] == OP_CONV) {
        ql_conv_args a = {
            .batch = batch,
            .m = (float *)x->m->dev + row0 * p[P_CHANNELS],
            .w = x->w->dev,
            .tail = x->tail->dev,
            .y = (float *)x->y->dev + row0 * p[P_CHANNELS],
            .channels = p[P_CHANNELS],
        };
        return run->dev->ops->conv(run->dev, &a);
    }
    ql_gdn_args a = {
        .batch = batch,
        .u = (float *)x->u->dev + row0 * (2 * p[P_KEY] + p[P_VALUE]) * D,
        .a = (float *)x->a->dev + row0 * p[P_VALUE],
        .b = (float *)x->b->dev + row0 * p[P_VALUE],
        .a_log = x->a_log->dev,
        .dt_bias = x->dt_bias->dev,
        .state = x->state->dev,
        .o = (float *)x->o->dev + row0 * p[P_VALUE] * D,
        .n_key_head = p[P_KEY],
        .n_value_head = p[P_VALUE],
        .key_head0 = p[P_VALUE0] / p[P_GROUP],
        .value_head0 = p[P_VALUE0],
        .group = p[P_GROUP],
    };
    return run->dev->ops->gdn(run->dev, &a);
}

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    (void)row0;
    (void)n_row;
    const user *x = run->user;
    ql_batch batch = kb_whole(&x->batch, (ql_phase)run->c->p[P_PHASE]);
    return call_batch(run, &batch, 0);
}

static ql_status call_lane(kc_run *run) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    int32_t half = p[P_VALUE] / 2;
    ql_batch batch = kb_whole(&x->batch, (ql_phase)p[P_PHASE]);
    ql_gdn_args a = {
        .batch = &batch,
        .u = x->u2->dev,
        .a = x->a2->dev,
        .b = x->b2->dev,
        .a_log = x->a_log2->dev,
        .dt_bias = x->dt_bias2->dev,
        .state = x->state2->dev,
        .o = x->o2->dev,
        .n_key_head = x->n_key2,
        .n_value_head = p[P_VALUE] - half,
        .key_head0 = x->key2,
        .value_head0 = p[P_VALUE0] + half,
        .group = p[P_GROUP],
    };
    return run->dev->ops->gdn(run->dev, &a);
}

/* ---- oracle ---- */

static void conv_oracle(kc_run *run) {
    const user *x = run->user;
    const kb_batch *b = &x->batch;
    int64_t n_ch = run->c->p[P_CHANNELS];
    const float *m = x->m->host, *w = x->w->host, *tail = x->tail->host;
    double *y = kc_want(x->y), *y_tol = kc_tol(x->y), *tail_want = kc_want(x->tail);
    for (int64_t i = 0; i < x->tail->n; i++) {
        tail_want[i] = tail[i];
    }
    for (int32_t s = 0; s < b->n_seg; s++) {
        for (int64_t c = 0; c < n_ch; c++) {
            double past[4] = {0}; /* rows t-3 .. t */
            for (int32_t j = 0; b->pos[s] > 0 && j < 3; j++) {
                past[j + 1] = tail[(b->slot[s] * 3 + j) * n_ch + c];
            }
            for (int32_t t = 0; t < b->len[s]; t++) {
                int64_t at = (b->row[s] + t) * n_ch + c;
                double sum = 0.0, size = 0.0;
                memmove(past, past + 1, 3 * sizeof *past);
                past[3] = m[at];
                for (int32_t j = 0; j < 4; j++) {
                    sum += (double)w[4 * c + j] * past[j];
                    size += fabs((double)w[4 * c + j] * past[j]);
                }
                y[at] = sum / (1.0 + exp(-sum));
                y_tol[at] = 4e-7 * size + 1e-37;
            }
            for (int32_t j = 0; j < 3; j++) {
                tail_want[(b->slot[s] * 3 + j) * n_ch + c] = past[j + 1];
            }
        }
    }
}

/* Errors are relative to the largest state element of the head in the segment, and for the output to the largest sum of
 * its terms' magnitudes: cancellation may make an element as small as it likes. */
static void gdn_oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    const kb_batch *b = &x->batch;
    int32_t n_key = p[P_KEY], n_value = p[P_VALUE];
    const float *u = x->u->host, *a_in = x->a->host, *b_in = x->b->host, *a_log = x->a_log->host;
    const float *dt_bias = x->dt_bias->host, *state = x->state->host;
    double *o = kc_want(x->o), *o_tol = kc_tol(x->o), *want = kc_want(x->state), *tol = kc_tol(x->state);
    for (int64_t i = 0; i < x->state->n; i++) {
        want[i] = state[i];
    }
    for (int32_t seg = 0; seg < b->n_seg; seg++) {
        for (int32_t j = 0; j < n_value; j++) {
            int32_t key = (p[P_VALUE0] + j) / p[P_GROUP] - p[P_VALUE0] / p[P_GROUP];
            double *s = want + ((int64_t)b->slot[seg] * n_value + j) * D * D, o_max = 0.0, s_max = 0.0;
            for (int32_t i = 0; i < D * D; i++) {
                s[i] = b->pos[seg] == 0 ? 0.0 : s[i];
                s_max = fmax(s_max, fabs(s[i]));
            }
            for (int32_t t = 0; t < b->len[seg]; t++) {
                int64_t row = b->row[seg] + t;
                const float *q = u + row * (2 * n_key + n_value) * D + key * D, *k = q + n_key * D;
                const float *v = u + row * (2 * n_key + n_value) * D + (2 * n_key + j) * D;
                double beta = 1.0 / (1.0 + exp(-(double)b_in[row * n_value + j]));
                double y = (double)a_in[row * n_value + j] + (double)dt_bias[j];
                double keep = exp(-exp((double)a_log[j]) * (y > 20.0 ? y : log1p(exp(y)))), qq = 1e-6, kk = 1e-6;
                for (int32_t d = 0; d < D; d++) {
                    qq += (double)q[d] * q[d];
                    kk += (double)k[d] * k[d];
                }
                for (int32_t c = 0; c < D; c++) {
                    double seen = 0.0, sum = 0.0, size = 0.0;
                    for (int32_t d = 0; d < D; d++) {
                        s[d * D + c] *= keep;
                        seen += s[d * D + c] * k[d] / sqrt(kk);
                    }
                    double write = beta * ((double)v[c] - seen);
                    for (int32_t d = 0; d < D; d++) {
                        s[d * D + c] += k[d] / sqrt(kk) * write;
                        double term = s[d * D + c] * q[d] / sqrt(qq) / sqrt(128.0);
                        sum += term;
                        size += fabs(term);
                        s_max = fmax(s_max, fabs(s[d * D + c]));
                    }
                    o[(row * n_value + j) * D + c] = sum;
                    o_max = fmax(o_max, size);
                }
            }
            for (int32_t i = 0; i < D * D; i++) {
                tol[s - want + i] = 4e-6 * s_max + 1e-36;
            }
            for (int32_t t = 0; t < b->len[seg]; t++) {
                for (int32_t c = 0; c < D; c++) {
                    o_tol[((int64_t)(b->row[seg] + t) * n_value + j) * D + c] = 1e-6 * o_max + 1e-36;
                }
            }
        }
    }
}

static void oracle(kc_run *run) {
    if (run->c->p[P_OP] == OP_CONV) {
        conv_oracle(run);
    } else {
        gdn_oracle(run);
    }
}

/* ---- equivalences ---- */

/* Every segment alone, in parts of at most `part` rows. */
static bool call_parts(kc_run *run, int32_t part) {
    const user *x = run->user;
    for (int32_t s = 0; s < x->batch.n_seg; s++) {
        for (int32_t t = 0; t < x->batch.len[s]; t += part) {
            int32_t n = x->batch.len[s] - t < part ? x->batch.len[s] - t : part;
            ql_batch batch = kb_piece(&x->batch, (ql_phase)run->c->p[P_PHASE], s, t, n);
            if (call_batch(run, &batch, x->batch.row[s] + t) != QL_OK) {
                kc_fail(run, "segment %d, rows %d..%d: %s", s, t, t + n - 1, run->dev->err ? run->dev->err->text : "");
                return false;
            }
        }
    }
    return true;
}

static void check_lane(kc_run *run, const float *o, const float *state) {
    const user *x = run->user;
    int32_t n_value = run->c->p[P_VALUE], half = n_value / 2, n2 = n_value - half;
    if (!kc_reset(run) || !kc_put(run, x->state2)) {
        return;
    }
    if (call_lane(run) != QL_OK) {
        kc_fail(run, "half of the heads: %s", run->dev->err ? run->dev->err->text : "");
        return;
    }
    if (!kc_fetch(run)) {
        return;
    }
    for (int64_t t = 0; t < x->batch.n_row; t++) {
        if (memcmp((float *)x->o2->got + t * n2 * D, o + (t * n_value + half) * D, (size_t)(n2 * D) * 4) != 0) {
            kc_fail(run, "a lane with half of the heads gives other bits in row %lld of o", (long long)t);
            return;
        }
    }
    for (int64_t s = 0; s <= x->batch.n_seg; s++) {
        if (memcmp((float *)x->state2->got + s * n2 * D * D, state + (s * n_value + half) * D * D,
                   (size_t)(n2 * D * D) * 4) != 0) {
            kc_fail(run, "a lane with half of the heads gives other bits in slot %lld of the state", (long long)s);
            return;
        }
    }
}

static void check(kc_run *run) {
    const user *x = run->user;
    const int32_t *p = run->c->p;
    kc_buf *out = p[P_OP] == OP_CONV ? x->y : x->o, *state = p[P_OP] == OP_CONV ? x->tail : x->state;
    if (!kc_reset(run) || !kc_call(run) || !kc_fetch(run)) {
        return;
    }
    void *out0 = kb_copy(out), *state0 = kb_copy(state);
    static const int32_t conv_parts[] = {1, 2, 3, 5}, prompt_parts[] = {64, 128}, gen_parts[] = {1, 3};
    const int32_t *parts = p[P_OP] == OP_CONV ? conv_parts : p[P_PHASE] == QL_PHASE_GEN ? gen_parts : prompt_parts;
    for (int32_t i = 0; i < (p[P_OP] == OP_CONV ? 4 : 2) && !run->failed; i++) {
        if (kc_reset(run) && call_parts(run, parts[i]) && kc_fetch(run)) {
            char what[64];
            snprintf(what, sizeof what, "segments alone in parts of %d rows", parts[i]);
            kb_same(run, out, out0, what);
            kb_same(run, state, state0, what);
        }
    }
    if (x->u2 && out0 && state0 && !run->failed) {
        check_lane(run, out0, state0);
    }
    free(out0);
    free(state0);
}

const kc_family kc_gdn = {"gdn", list, make, call, oracle, check};
