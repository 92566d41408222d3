/* Cases of attn_prep and attention. The number formats of the cache are encoded and decoded here from their definition,
 * in double, so that the quantizer is checked too. Cache positions that no row may see hold NaN.
 */
#include "tests/cases/batch.h"

#include <math.h>

enum { D = 256, GROUP8 = 64 /* channels of an FP8 scale */ };
enum { P_OP, P_TYPE, P_REGIME, P_HEAD, P_HEAD0, P_GROUP, P_EXTRA, P_PHASE, P_PRECISION, P_SEG }; /* n, then len, pos */
enum { OP_PREP, OP_ATTENTION }; /* P_EXTRA: rotary of prep, o = q of attention */
enum { NORMAL, OUTLIER, EQUAL, RISING, FALLING, HUGE_SCORE, LOW, N_REGIME };

static const char *const regime_name[] = {"normal", "outlier", "equal", "rising", "falling", "huge", "low"};
static const char *const type_name[] = {"f16", "f32", "bf16", "fp8"};
static const double eps = 1e-6, theta = 10000000.0;

static int32_t n_kv_of(const kc_case *c) {
    const int32_t *p = c->p;
    return (p[P_HEAD0] + p[P_HEAD] - 1) / p[P_GROUP] - p[P_HEAD0] / p[P_GROUP] + 1;
}

static kc_case *add(kc_list *l, int32_t op, int32_t type, int32_t regime, int32_t n_head, int32_t head0, int32_t group,
                    int32_t extra, int32_t n_seg, const int32_t (*segs)[2]) {
    kc_case *c = op == OP_PREP
                     ? kc_add(l, "attention.prep.%s.h%dat%d.g%d.r%d", type_name[type], n_head, head0, group, extra)
                     : kc_add(l, "attention.%s.%s.h%dat%d.g%d%s", type_name[type], regime_name[regime], n_head, head0,
                              group, extra ? ".alias" : "");
    const int32_t p[] = {op, type, regime, n_head, head0, group, extra, QL_PHASE_PROMPT, QL_PREC_EXACT, n_seg};
    memcpy(c->p, p, sizeof p);
    size_t used = strlen(c->name);
    double keys = 0.0, seen = 0.0;
    int32_t ctx = 0;
    for (int32_t s = 0; s < n_seg; s++) {
        int32_t n = segs[s][0], pos = segs[s][1];
        ctx = pos + n > ctx ? pos + n : ctx;
        c->p[P_SEG + 1 + 2 * s] = n;
        c->p[P_SEG + 2 + 2 * s] = pos;
        c->rows += n;
        keys += pos + n;
        seen += n * (pos + 0.5 * (n + 1));
        used += (size_t)snprintf(c->name + used, sizeof c->name - used, ".%dat%d", n, pos);
    }
    int32_t n_kv = n_kv_of(c);
    double entry = (double)ql_kv_page_bytes((ql_kv_type)type, n_kv) / 64.0;
    c->shape = (ql_shape){
        .n_head = n_head, .n_kv_head = n_kv, .max_row = c->rows, .max_seg = n_seg, .max_ctx = (ctx + 63) / 64 * 64};
    if (op == OP_PREP) {
        c->bytes = c->rows * (4.0 * D * (3 * n_head + 2 * n_kv) + entry);
    } else {
        c->bytes = keys * entry + c->rows * 4.0 * D * 3 * n_head;
        c->flops = 4.0 * D * n_head * seen;
    }
    return c;
}

static kc_case *add_bf16(kc_list *l, int32_t type, int32_t regime, int32_t n_head, int32_t head0, int32_t group,
                         int32_t n_seg, const int32_t (*segs)[2]) {
    kc_case *c = add(l, OP_ATTENTION, type, regime, n_head, head0, group, 0, n_seg, segs), from = *c;
    snprintf(c->name, sizeof c->name, "attention.prec-bf16%.80s", from.name + strlen("attention"));
    c->p[P_PRECISION] = QL_PREC_BF16;
    return c;
}

static void list(kc_list *l) {
    for (int32_t type = QL_KV_F16; type <= QL_KV_FP8; type++) {
        add(l, OP_PREP, type, 0, 1, 0, 1, 64, KB_SEGS({1, 0}));
        add(l, OP_PREP, type, 0, 4, 0, 2, 64, KB_SEGS({1, 64}, {1, 63}, {1, 1000}));
        add(l, OP_PREP, type, 0, 3, 9, 6, 64, KB_SEGS({70, 64}, {3, 0}));
        add(l, OP_ATTENTION, type, NORMAL, 1, 0, 1, 0, KB_SEGS({1, 0}));
        add(l, OP_ATTENTION, type, NORMAL, 4, 0, 2, 0,
            KB_SEGS({1, 62}, {1, 63}, {1, 64}, {1, 127}, {1, 128}, {1, 129}));
        add(l, OP_ATTENTION, type, NORMAL, 2, 0, 2, 1, KB_SEGS({130, 0}));
        add(l, OP_ATTENTION, type, NORMAL, 1, 0, 1, 0, KB_SEGS({1, 999}));
    }
    add(l, OP_PREP, QL_KV_F32, 0, 2, 0, 2, 256, KB_SEGS({2, 100}));
    add(l, OP_PREP, QL_KV_F32, 0, 2, 0, 2, 2, KB_SEGS({2, 100}));
    add(l, OP_PREP, QL_KV_F32, 0, 1, 0, 1, 64, KB_SEGS({1, 100000}));
    for (int32_t r = 0; r < N_REGIME; r++) {
        add(l, OP_ATTENTION, QL_KV_F32, r, 2, 0, 2, 0, KB_SEGS({1, 200}, {65, 128}));
        add(l, OP_ATTENTION, QL_KV_F16, r, 2, 0, 1, 0, KB_SEGS({3, 61}, {64, 0}));
    }
    /* groups of 1, 3, 6, lanes that begin or end inside a group, more pairs than a tile holds */
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 3, 2, 1, 0, KB_SEGS({5, 100}));
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 6, 3, 3, 0, KB_SEGS({66, 0}, {1, 5}));
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 12, 12, 6, 0, KB_SEGS({20, 0}));
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 3, 21, 6, 0, KB_SEGS({64, 64}));
    add(l, OP_ATTENTION, QL_KV_FP8, NORMAL, 5, 4, 3, 1, KB_SEGS({2, 70}, {4, 129}));
    add(l, OP_ATTENTION, QL_KV_BF16, NORMAL, 70, 0, 70, 0, KB_SEGS({2, 65}));
    /* one lane of the bundled model and of the 27B */
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 4, 0, 2, 0, KB_SEGS({1, 500}));
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 24, 0, 6, 0, KB_SEGS({1, 4000}))->is_long = true;
    add(l, OP_ATTENTION, QL_KV_FP8, NORMAL, 24, 0, 6, 0, KB_SEGS({1, 4000}))->is_long = true;
    add(l, OP_ATTENTION, QL_KV_F16, NORMAL, 24, 0, 6, 0, KB_SEGS({128, 512}))->is_long = true;
    for (int32_t i = 0, n = l->n; i < n; i++) { /* and as generated rows */
        kc_case from = l->item[i];
        if (from.p[P_OP] == OP_ATTENTION) {
            kc_case *c = kc_add(l, "attention.gen%s", from.name + strlen("attention"));
            memcpy(from.name, c->name, sizeof from.name);
            from.p[P_PHASE] = QL_PHASE_GEN;
            *c = from;
        }
    }
    /* prompt rows in precision bf16: more than one block of positions, more pairs than a tile holds, other tiles for others */
    for (int32_t type = QL_KV_F16; type <= QL_KV_FP8; type++) {
        add_bf16(l, type, NORMAL, 1, 0, 1, KB_SEGS({1, 0}));
        add_bf16(l, type, NORMAL, 4, 0, 2, KB_SEGS({1, 62}, {1, 63}, {1, 64}, {1, 127}, {1, 128}, {1, 129}));
        add_bf16(l, type, NORMAL, 2, 0, 2, KB_SEGS({130, 0}));
        add_bf16(l, type, NORMAL, 12, 6, 6, KB_SEGS({20, 320}, {64, 64}));
        add_bf16(l, type, NORMAL, 5, 4, 3, KB_SEGS({66, 0}, {3, 5}));
        add_bf16(l, type, NORMAL, 1, 0, 1, KB_SEGS({1, 999}));
        add_bf16(l, type, NORMAL, 24, 0, 6, KB_SEGS({128, 512}))->is_long = true;
    }
    for (int32_t r = 0; r < N_REGIME; r++) {
        add_bf16(l, QL_KV_F16, r, 2, 0, 1, KB_SEGS({3, 61}, {64, 0}));
        add_bf16(l, QL_KV_BF16, r, 2, 0, 2, KB_SEGS({1, 200}, {65, 128}));
    }
}

/* ---- number formats, from their definition ---- */

/* Binary floating point with `mant` stored fraction bits, exponent bias `bias`, codes at most `top`. */
typedef struct format {
    int mant, bias;
    uint32_t top, sign;
} format;

static const format f16 = {10, 15, 0x7c00, 0x8000}, bf16 = {7, 127, 0x7f80, 0x8000}, e4m3 = {3, 7, 0x7e, 0x80};

static uint32_t encode(const format *f, double x) {
    uint32_t sign = signbit(x) ? f->sign : 0;
    int e;
    frexp(x, &e);
    e = x == 0.0 || e - 1 < 1 - f->bias ? 1 - f->bias : e - 1;
    double units = nearbyint(ldexp(fabs(x), f->mant - e)); /* ties to even */
    double code = units + ldexp(e + f->bias - 1, f->mant);
    return sign | (code > f->top ? f->top : (uint32_t)code);
}

static double decode(const format *f, uint32_t code) {
    uint32_t a = code & (f->sign - 1), m = a & ((1u << f->mant) - 1);
    int e = (int)(a >> f->mant);
    double x = e ? ldexp((double)(m + (1u << f->mant)), e - f->bias - f->mant) : ldexp(m, 1 - f->bias - f->mant);
    return code & f->sign ? -x : x;
}

/* f16 code of the scale of 64 channels. */
static uint32_t fp8_scale(const float *x) {
    double most = 0x1p-14;
    for (int32_t i = 0; i < GROUP8; i++) {
        most = fmax(most, fabs((double)x[i]));
    }
    float s = (float)(most / 448.0);
    uint32_t code = encode(&f16, s);
    return decode(&f16, code) < s ? code + 1 : code;
}

typedef struct user {
    kb_batch batch;
    kc_buf *q, *qg, *k, *v, *q_norm, *k_norm, *rope, *o;
    kc_buf *cache[2], *scale[2]; /* of keys and values */
    int32_t n_page, n_kv;
} user;

/* Index of the first channel of a row of the cache. */
static int64_t cache_at(const user *x, int32_t seg, int32_t pos, int32_t kv) {
    return ((((int64_t)*kb_page(&x->batch, seg, pos / 64) * x->n_kv) + kv) * 64 + pos % 64) * D;
}

static int64_t elem_bytes(int32_t type) { return type == QL_KV_F32 ? 4 : type == QL_KV_FP8 ? 1 : 2; }

/* Stores a row from element `at` on. */
static void put(int32_t type, void *cache, void *scale, int64_t at, const float *row) {
    for (int32_t i = 0; i < D; i++) {
        switch (type) {
        case QL_KV_F32: ((float *)cache)[at + i] = row[i]; break;
        case QL_KV_F16: ((uint16_t *)cache)[at + i] = (uint16_t)encode(&f16, row[i]); break;
        case QL_KV_BF16: ((uint16_t *)cache)[at + i] = (uint16_t)encode(&bf16, row[i]); break;
        default: {
            uint32_t s = fp8_scale(row + i / GROUP8 * GROUP8);
            ((uint16_t *)scale)[(at + i) / GROUP8] = (uint16_t)s;
            ((uint8_t *)cache)[at + i] = (uint8_t)encode(&e4m3, (float)((double)row[i] / decode(&f16, s)));
        }
        }
    }
}

static double take(const user *x, int32_t type, int32_t which, int64_t at, bool got) {
    const void *cache = got ? x->cache[which]->got : x->cache[which]->host;
    switch (type) {
    case QL_KV_F32: return ((const float *)cache)[at];
    case QL_KV_F16: return decode(&f16, ((const uint16_t *)cache)[at]);
    case QL_KV_BF16: return decode(&bf16, ((const uint16_t *)cache)[at]);
    default: {
        const uint16_t *scale = got ? x->scale[which]->got : x->scale[which]->host;
        return decode(&e4m3, ((const uint8_t *)cache)[at]) * decode(&f16, scale[at / GROUP8]);
    }
    }
}

/* ---- inputs ---- */

static void make_cache(kc_run *run, user *x, kc_role role) {
    const int32_t *p = run->c->p;
    kb_batch *b = &x->batch;
    int32_t first[KB_MAX_SEG], n_used = 0;
    for (int32_t s = 0; s < b->n_seg; s++) {
        first[s] = p[P_OP] == OP_PREP ? b->pos[s] / 64 : 0; /* prep touches the pages of its rows only */
        n_used += (b->pos[s] + b->len[s] + 63) / 64 - first[s];
    }
    x->n_page = n_used + 2;
    int32_t *order = calloc((size_t)x->n_page, sizeof *order);
    if (!order) {
        kc_fail(run, "out of memory");
        return;
    }
    for (int32_t i = 0; i < x->n_page; i++) {
        order[i] = i;
    }
    for (int32_t i = x->n_page - 1; i > 0; i--) {
        int32_t j = kc_below(run, i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (int32_t s = 0, n = 0; s < b->n_seg; s++) {
        for (int32_t i = first[s]; i < (b->pos[s] + b->len[s] + 63) / 64; i++) {
            *kb_page(b, s, i) = order[n++];
        }
    }
    free(order);
    int64_t elems = (int64_t)x->n_page * x->n_kv * 64 * D, size = elem_bytes(p[P_TYPE]);
    for (int32_t which = 0; which < 2; which++) {
        x->cache[which] = kc_buffer(run, which ? "cache v" : "cache k", role, KC_U8, elems * size);
        memset(x->cache[which]->host, 0xff, (size_t)(elems * size)); /* a NaN in every type */
        x->scale[which] = NULL;
        if (p[P_TYPE] == QL_KV_FP8) {
            x->scale[which] = kc_buffer(run, which ? "scale v" : "scale k", role, KC_U8, elems / GROUP8 * 2);
            memset(x->scale[which]->host, 0xff, (size_t)(elems / GROUP8 * 2));
        }
    }
}

static void make_prep(kc_run *run, user *x) {
    const int32_t *p = run->c->p;
    const kb_batch *b = &x->batch;
    int64_t t = b->n_row;
    int32_t rotary = p[P_EXTRA], last = 0;
    for (int32_t s = 0; s < b->n_seg; s++) {
        last = b->pos[s] + b->len[s] > last ? b->pos[s] + b->len[s] : last;
    }
    x->qg = kc_buffer(run, "qg", KC_IN, KC_F32, t * p[P_HEAD] * 2 * D);
    x->k = kc_buffer(run, "k", KC_IN, KC_F32, t * x->n_kv * D);
    x->v = kc_buffer(run, "v", KC_IN, KC_F32, t * x->n_kv * D);
    x->q_norm = kc_buffer(run, "q_norm", KC_IN, KC_F32, D);
    x->k_norm = kc_buffer(run, "k_norm", KC_IN, KC_F32, D);
    x->rope = kc_buffer(run, "rope", KC_IN, KC_F32, (int64_t)last * rotary);
    x->q = kc_buffer(run, "q", KC_OUT, KC_F32, t * p[P_HEAD] * D);
    x->q->row_len = (int64_t)p[P_HEAD] * D;
    kc_fill_normal(run, x->qg->host, x->qg->n, 3.0f);
    kc_fill_normal(run, x->k->host, x->k->n, 0.2f);
    kc_fill_normal(run, x->v->host, x->v->n, 1.0f);
    kc_fill_normal(run, x->q_norm->host, D, 0.5f);
    kc_fill_normal(run, x->k_norm->host, D, 0.5f);
    float *v = x->v->host;
    for (int32_t i = 0; i < GROUP8; i++) { /* the first row tries the FP8 scale: nothing, tiny, an outlier */
        v[i] = 0.0f;
        v[GROUP8 + i] *= 1e-7f;
        v[2 * GROUP8 + i] = i == 5 ? 20000.0f : v[2 * GROUP8 + i];
    }
    for (int64_t r = 0; r < t; r++) {
        int32_t pos = ((int32_t *)b->buf->host)[b->row_pos + r];
        for (int32_t i = 0; i < rotary / 2; i++) {
            double angle = pos * pow(theta, -2.0 * i / rotary);
            ((float *)x->rope->host)[(int64_t)pos * rotary + 2 * i] = (float)cos(angle);
            ((float *)x->rope->host)[(int64_t)pos * rotary + 2 * i + 1] = (float)sin(angle);
        }
    }
}

static void make_attention(kc_run *run, user *x) {
    const int32_t *p = run->c->p;
    const kb_batch *b = &x->batch;
    int64_t n = (int64_t)b->n_row * p[P_HEAD];
    int32_t regime = p[P_REGIME];
    x->q = kc_buffer(run, "q", p[P_EXTRA] ? KC_INOUT : KC_IN, KC_F32, n * D);
    x->qg = kc_buffer(run, "qg", KC_IN, KC_F32, n * 2 * D);
    x->o = p[P_EXTRA] ? x->q : kc_buffer(run, "o", KC_OUT, KC_F32, n * D);
    x->o->row_len = (int64_t)p[P_HEAD] * D;
    kc_fill_normal(run, x->qg->host, x->qg->n, 2.0f);
    float *q = x->q->host, row[D];
    kc_fill_normal(run, q, x->q->n, regime == EQUAL ? 0.0f : regime == HUGE_SCORE ? 100.0f : 1.0f);
    for (int64_t i = 0; i < x->q->n && regime >= RISING && regime != HUGE_SCORE; i++) {
        q[i] = 1.0f + 0.1f * q[i];
    }
    for (int32_t s = 0; s < b->n_seg; s++) {
        int32_t end = b->pos[s] + b->len[s], outlier = kc_below(run, end);
        for (int32_t pos = 0; pos < end; pos++) {
            for (int32_t kv = 0; kv < x->n_kv; kv++) {
                int64_t at = cache_at(x, s, pos, kv);
                kc_fill_normal(run, row, D, regime == OUTLIER && pos == outlier ? 500.0f : 1.0f);
                for (int32_t i = 0; i < D && regime >= RISING && regime != HUGE_SCORE; i++) {
                    float step = regime == RISING ? 0.02f : -0.02f;
                    row[i] = 0.02f * row[i] + (regime == LOW ? -30.0f : step * (float)pos);
                }
                put(p[P_TYPE], x->cache[0]->host, x->scale[0] ? x->scale[0]->host : NULL, at, row);
                kc_fill_normal(run, row, D, 1.0f);
                put(p[P_TYPE], x->cache[1]->host, x->scale[1] ? x->scale[1]->host : NULL, at, row);
            }
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
    int32_t len[KB_MAX_SEG], pos[KB_MAX_SEG];
    for (int32_t s = 0; s < p[P_SEG]; s++) {
        len[s] = p[P_SEG + 1 + 2 * s];
        pos[s] = p[P_SEG + 2 + 2 * s];
    }
    x->n_kv = n_kv_of(run->c);
    kb_make(run, &x->batch, p[P_SEG], len, pos);
    make_cache(run, x, p[P_OP] == OP_PREP ? KC_INOUT : KC_IN);
    if (run->failed) {
        return;
    }
    if (p[P_OP] == OP_PREP) {
        make_prep(run, x);
    } else {
        make_attention(run, x);
    }
}

/* ---- calls ---- */

static ql_kv_cache cache_of(const kc_run *run) {
    const user *x = run->user;
    return (ql_kv_cache){
        .type = (ql_kv_type)run->c->p[P_TYPE],
        .n_page = x->n_page,
        .n_kv_head = x->n_kv,
        .k = x->cache[0]->dev,
        .v = x->cache[1]->dev,
        .k_scale = x->scale[0] ? x->scale[0]->dev : NULL,
        .v_scale = x->scale[1] ? x->scale[1]->dev : NULL,
    };
}

/* `batch` holds rows from row0 of the whole on. */
static ql_status call_batch(kc_run *run, const ql_batch *batch, int64_t row0) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    ql_kv_cache cache = cache_of(run);
    if (p[P_OP] == OP_PREP) {
        ql_attn_prep_args a = {
            .batch = batch,
            .qg = (float *)x->qg->dev + row0 * p[P_HEAD] * 2 * D,
            .k = (float *)x->k->dev + row0 * x->n_kv * D,
            .v = (float *)x->v->dev + row0 * x->n_kv * D,
            .q_norm = x->q_norm->dev,
            .k_norm = x->k_norm->dev,
            .rope = x->rope->dev,
            .q = (float *)x->q->dev + row0 * p[P_HEAD] * D,
            .cache = &cache,
            .n_head = p[P_HEAD],
            .rotary = p[P_EXTRA],
            .eps = (float)eps,
        };
        return run->dev->ops->attn_prep(run->dev, &a);
    }
    ql_attention_args a = {
        .batch = batch,
        .q = (float *)x->q->dev + row0 * p[P_HEAD] * D,
        .qg = (float *)x->qg->dev + row0 * p[P_HEAD] * 2 * D,
        .cache = &cache,
        .o = (float *)x->o->dev + row0 * p[P_HEAD] * D,
        .n_head = p[P_HEAD],
        .head0 = p[P_HEAD0],
        .kv_head0 = p[P_HEAD0] / p[P_GROUP],
        .group = p[P_GROUP],
        .precision = (ql_precision)p[P_PRECISION],
    };
    return run->dev->ops->attention(run->dev, &a);
}

/* Whether prompt rows and generated ones give the same bits. */
static bool is_one_phase(const kc_run *run) {
    return strcmp(run->dev->ops->name, "host") == 0 && run->c->p[P_PRECISION] != QL_PREC_BF16;
}

/* Where the phase does not matter, the whole goes in the case's and a row alone in the other one. */
static ql_phase phase_of(const kc_run *run, bool alone) {
    ql_phase phase = (ql_phase)run->c->p[P_PHASE];
    return alone && (is_one_phase(run) || run->c->p[P_OP] == OP_PREP) ? (ql_phase)!phase : phase;
}

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    const user *x = run->user;
    const kb_batch *b = &x->batch;
    if (n_row < 0) {
        ql_batch batch = kb_whole(b, phase_of(run, false));
        return call_batch(run, &batch, 0);
    }
    for (int32_t row = row0; row < row0 + n_row; row++) {
        int32_t s = 0;
        while (b->row[s + 1] <= row) {
            s++;
        }
        ql_batch batch = kb_piece(b, phase_of(run, true), s, row - b->row[s], 1);
        QL_TRY(call_batch(run, &batch, row));
    }
    return QL_OK;
}

/* ---- oracles ---- */

/* norm and rope of one head in double; tol gets the rounding error that f32 may have */
static void norm_rope(const float *x, const float *w, int32_t pos, int32_t rotary, double *y, double *tol) {
    double square = 0.0, lo[D / 2];
    for (int32_t i = 0; i < D; i++) {
        square += (double)x[i] * x[i];
    }
    for (int32_t i = 0; i < D; i++) {
        y[i] = x[i] / sqrt(square / D + (double)(float)eps) * (1.0 + (double)w[i]);
        tol[i] = 1e-6 * fabs(y[i]) + 2e-7 * fabs(x[i] / sqrt(square / D));
    }
    int32_t half = rotary / 2;
    for (int32_t i = 0; i < half; i++) {
        double angle = pos * pow(theta, -2.0 * i / rotary), c = cos(angle), s = sin(angle);
        lo[i] = y[i];
        y[i] = lo[i] * c - y[i + half] * s;
        y[i + half] = y[i + half] * c + lo[i] * s;
        tol[i] = tol[i + half] = tol[i] + tol[i + half];
    }
}

/* Half a step of the stored type at x, for one scale. */
static double half_step(int32_t type, double x, double scale) {
    x = fabs(x);
    switch (type) {
    case QL_KV_F32: return 0.0;
    case QL_KV_F16: return fmax(x * 0x1p-11, 0x1p-25);
    case QL_KV_BF16: return x * 0x1p-8;
    default: return fmax(x * 0x1p-4, scale * 0x1p-10);
    }
}

/* Whether a stored key may stand for `want`, which is known to within `tol`. */
static void check_key(kc_run *run, const double *want, const double *tol, int64_t at) {
    const user *x = run->user;
    int32_t type = run->c->p[P_TYPE];
    double scale = 0.0;
    for (int32_t c = 0; c < D && !run->failed; c++) {
        if (type == QL_KV_FP8 && c % GROUP8 == 0) {
            double most = 0x1p-14;
            for (int32_t j = c; j < c + GROUP8; j++) {
                most = fmax(most, fabs(want[j]));
            }
            scale = decode(&f16, ((uint16_t *)x->scale[0]->got)[(at + c) / GROUP8]);
            if (!(scale >= most / 448.0 * (1.0 - 2e-6) && scale <= most / 448.0 * 1.001 + 0x1p-24)) {
                kc_fail(run, "k, channel %d: scale %g for a largest value of %g", c, scale, most);
            }
        }
        double got = take(x, type, 0, at + c, true);
        if (!(fabs(got - want[c]) <= half_step(type, want[c], scale) + 2.0 * tol[c])) {
            kc_fail(run, "k, channel %d: %.9g is stored for %.9g", c, got, want[c]);
        }
    }
}

/* The cache must come out as `expect`: values exactly the codes of V, keys whatever check_key let pass, every other row
 * as it was. */
static void prep_oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    const kb_batch *b = &x->batch;
    int32_t n_head = p[P_HEAD], type = p[P_TYPE];
    double *q = kc_want(x->q), *q_tol = kc_tol(x->q);
    kc_buf *const buf[4] = {x->cache[0], x->cache[1], x->scale[0], x->scale[1]};
    char *expect[4] = {NULL};
    for (int32_t i = 0; i < 4; i++) {
        expect[i] = malloc(buf[i] ? (size_t)buf[i]->n : 1);
        if (!expect[i]) {
            kc_fail(run, "out of memory");
        } else if (buf[i]) {
            memcpy(expect[i], buf[i]->host, (size_t)buf[i]->n);
        }
    }
    for (int32_t s = 0; s < b->n_seg && !run->failed; s++) {
        for (int32_t i = 0; i < b->len[s]; i++) {
            int64_t row = b->row[s] + i;
            int32_t pos = b->pos[s] + i;
            for (int64_t h = row * n_head; h < (row + 1) * n_head; h++) {
                norm_rope((float *)x->qg->host + h * 2 * D, x->q_norm->host, pos, p[P_EXTRA], q + h * D, q_tol + h * D);
            }
            for (int32_t kv = 0; kv < x->n_kv; kv++) {
                int64_t from = (row * x->n_kv + kv) * D, at = cache_at(x, s, pos, kv), size = elem_bytes(type);
                double want[D], tol[D];
                norm_rope((float *)x->k->host + from, x->k_norm->host, pos, p[P_EXTRA], want, tol);
                check_key(run, want, tol, at);
                memcpy(expect[0] + at * size, (char *)x->cache[0]->got + at * size, (size_t)(D * size));
                if (x->scale[0]) {
                    memcpy(expect[2] + at / GROUP8 * 2, (char *)x->scale[0]->got + at / GROUP8 * 2, D / GROUP8 * 2);
                }
                put(type, expect[1], expect[3], at, (float *)x->v->host + from);
            }
        }
    }
    for (int32_t i = 0; i < 4; i++) {
        for (int64_t j = 0; buf[i] && expect[i] && j < buf[i]->n; j++) {
            if (expect[i][j] != ((char *)buf[i]->got)[j]) {
                kc_fail(run, "%s: byte %lld is %02x, not %02x", buf[i]->name, (long long)j,
                        ((unsigned char *)buf[i]->got)[j], (unsigned char)expect[i][j]);
                break;
            }
        }
        free(expect[i]);
    }
}

static void attention_oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    const kb_batch *b = &x->batch;
    int32_t type = p[P_TYPE], n_head = p[P_HEAD];
    const float *q = x->q->host, *qg = x->qg->host;
    double *want = kc_want(x->o), *tol = kc_tol(x->o);
    /* what one rounding to f16 or bf16 takes of q and the weights, and of entries that are not held as such */
    bool rounded = p[P_PRECISION] == QL_PREC_BF16;
    double half_ulp = type == QL_KV_F16 || type == QL_KV_FP8 ? 0x1p-11 : 0x1p-8;
    double in_q = rounded ? half_ulp : 0.0,
           in_kv = rounded && (type == QL_KV_FP8 || type == QL_KV_F32) ? half_ulp : 0.0;
    int32_t most = b->max_page * 64;
    double *k = malloc((size_t)most * D * sizeof *k), *v = malloc((size_t)most * D * sizeof *v);
    double *score = malloc((size_t)most * sizeof *score);
    for (int32_t s = 0; k && v && score && s < b->n_seg; s++) {
        for (int32_t kv = 0; kv < x->n_kv; kv++) {
            for (int32_t pos = 0; pos < b->pos[s] + b->len[s]; pos++) {
                for (int32_t c = 0; c < D; c++) {
                    int64_t at = cache_at(x, s, pos, kv) + c;
                    k[pos * D + c] = take(x, type, 0, at, false);
                    v[pos * D + c] = take(x, type, 1, at, false);
                }
            }
            for (int64_t i = 0; i < (int64_t)b->len[s] * n_head; i++) {
                int32_t h = (int32_t)(i % n_head), n = b->pos[s] + (int32_t)(i / n_head) + 1;
                if ((p[P_HEAD0] + h) / p[P_GROUP] - p[P_HEAD0] / p[P_GROUP] != kv) {
                    continue;
                }
                int64_t at = b->row[s] * (int64_t)n_head + i;
                double max = -INFINITY, sum = 0.0, size = 0.0, o[D] = {0}, v_size[D] = {0};
                for (int32_t j = 0; j < n; j++) {
                    double dot = 0.0, abs_dot = 0.0;
                    for (int32_t c = 0; c < D; c++) {
                        dot += (double)q[at * D + c] * k[j * D + c];
                        abs_dot += fabs((double)q[at * D + c] * k[j * D + c]);
                    }
                    score[j] = dot / 16.0;
                    max = fmax(max, score[j]);
                    size = fmax(size, abs_dot / 16.0);
                }
                for (int32_t j = 0; j < n; j++) {
                    double w = exp(score[j] - max);
                    sum += w;
                    for (int32_t c = 0; c < D; c++) {
                        o[c] += w * v[j * D + c];
                        v_size[c] += w * fabs(v[j * D + c]);
                    }
                }
                for (int32_t c = 0; c < D; c++) {
                    double gate = 1.0 / (1.0 + exp(-(double)qg[at * 2 * D + D + c]));
                    want[at * D + c] = o[c] / sum * gate;
                    /* a score is wrong by its own rounding, which moves every weight by as much */
                    tol[at * D + c] = (1e-6 + in_q + in_kv + (2e-7 + in_q + in_kv) * size) * v_size[c] / sum * gate;
                }
            }
        }
    }
    if (!k || !v || !score) {
        kc_fail(run, "out of memory");
    }
    free(k);
    free(v);
    free(score);
}

static void oracle(kc_run *run) {
    if (run->c->p[P_OP] == OP_PREP) {
        prep_oracle(run);
    } else {
        attention_oracle(run);
    }
}

/* ---- equivalences ---- */

/* Each head of each row alone, as a lane with one head would have it. */
static ql_status call_heads(kc_run *run) {
    const int32_t *p = run->c->p;
    const user *x = run->user;
    const kb_batch *b = &x->batch;
    ql_kv_cache cache = cache_of(run);
    for (int32_t s = 0; s < b->n_seg; s++) {
        for (int64_t i = 0; i < (int64_t)b->len[s] * p[P_HEAD]; i++) {
            int64_t at = b->row[s] * (int64_t)p[P_HEAD] + i;
            ql_batch batch = kb_piece(b, phase_of(run, true), s, (int32_t)(i / p[P_HEAD]), 1);
            ql_attention_args a = {
                .batch = &batch,
                .q = (float *)x->q->dev + at * D,
                .qg = (float *)x->qg->dev + at * 2 * D,
                .cache = &cache,
                .o = (float *)x->o->dev + at * D,
                .n_head = 1,
                .head0 = p[P_HEAD0] + (int32_t)(i % p[P_HEAD]),
                .kv_head0 = p[P_HEAD0] / p[P_GROUP],
                .group = p[P_GROUP],
                .precision = (ql_precision)p[P_PRECISION],
            };
            QL_TRY(run->dev->ops->attention(run->dev, &a));
        }
    }
    return QL_OK;
}

/* Every segment alone, in parts of at most `part` rows. */
static ql_status call_parts(kc_run *run, int32_t part, ql_phase phase) {
    const kb_batch *b = &((const user *)run->user)->batch;
    for (int32_t s = 0; s < b->n_seg; s++) {
        for (int32_t t = 0; t < b->len[s]; t += part) {
            ql_batch batch = kb_piece(b, phase, s, t, b->len[s] - t < part ? b->len[s] - t : part);
            QL_TRY(call_batch(run, &batch, b->row[s] + t));
        }
    }
    return QL_OK;
}

static void check(kc_run *run) {
    const user *x = run->user;
    bool prep = run->c->p[P_OP] == OP_PREP;
    kc_buf *out[] = {prep ? x->q : x->o, prep ? x->cache[0] : NULL, prep ? x->cache[1] : NULL,
                     prep ? x->scale[0] : NULL, prep ? x->scale[1] : NULL};
    void *copy[5] = {NULL};
    if (!kc_reset(run) || !kc_call(run) || !kc_fetch(run)) {
        return;
    }
    for (int32_t i = 0; i < 5; i++) {
        copy[i] = out[i] ? kb_copy(out[i]) : NULL;
    }
    for (int32_t way = 0; way < (prep ? 3 : 4) && !run->failed; way++) {
        static const char *const what[] = {"segments alone in parts of 64 rows", "segments alone in the other phase",
                                           "rows alone", "heads alone"};
        if (way == 1 && !is_one_phase(run)) {
            continue;
        }
        if (!kc_reset(run)) {
            break;
        }
        ql_phase phase = phase_of(run, false);
        ql_status status = way == 0   ? call_parts(run, 64, phase)
                           : way == 1 ? call_parts(run, 1 << 20, (ql_phase)!phase)
                           : way == 2 ? call_parts(run, 1, phase)
                                      : call_heads(run);
        if (status != QL_OK) {
            kc_fail(run, "%s: %s", what[way], run->dev->err ? run->dev->err->text : "");
            break;
        }
        for (int32_t i = 0; i < 5 && kc_fetch(run); i++) {
            if (copy[i]) {
                kb_same(run, out[i], copy[i], what[way]);
            }
        }
    }
    for (int32_t i = 0; i < 5; i++) {
        free(copy[i]);
    }
}

const kc_family kc_attention = {"attention", list, make, call, oracle, check};
