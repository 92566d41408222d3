/* Cases of topk and sample, and of the two in a row over any number of lanes.
 *
 * The oracle sorts everything and applies the filters one after the other, in double.
 */
#include "tests/kcheck.h"

#include <math.h>
#include <string.h>

typedef enum op {
    OP_TOPK,  /* candidates and statistics of a lane's slice */
    OP_CHAIN, /* topk and sample of one lane; check: the same from 2, 4 and 8 lanes */
    OP_DRAWS, /* as CHAIN, many rows of equal logits: their ids are distributed as they should */
} op;

typedef enum regime { NORMAL, TIES, EQUAL, WITH_NAN, INFINITE, HUGE_SPREAD, N_REGIME } regime;
typedef enum mask { MASK_NONE, MASK_SOME, MASK_ONE, MASK_EMPTY, N_MASK } mask;

enum { P_OP, P_ROW, P_VOCAB, P_LANE, P_N_LANE, P_K, P_K_CAP, P_VALID, P_MASK, P_PENALTY, P_REGIME, P_FILTER };

enum { PAD = 3 };

/* Sampling filters; -1 in P_FILTER takes them in turn, one a row. */
static const struct {
    float temperature, top_p, min_p;
    int32_t top_k;
} filters[] = {
    {0, 1, 0, 0}, {1, 1, 0, 0}, {0.7f, 0.9f, 0, 0}, {1, 1, 0, 5},   {1, 1, 0.1f, 0},     {1, 1e-6f, 0, 0},
    {1, 1, 1, 0}, {1, 1, 0, 1}, {1e-3f, 1, 0, 0},   {100, 1, 0, 0}, {2, 0.5f, 0.05f, 8}, {1, 0.999f, 0, 1000000},
};
enum { N_FILTER = sizeof filters / sizeof *filters };

static const char *const op_name[] = {"topk", "chain", "draws"};
static const char *const regime_name[N_REGIME] = {"normal", "ties", "equal", "nan", "infinite", "spread"};
static const char *const mask_name[N_MASK] = {"", ".some", ".one", ".empty"};

static int32_t range_begin(int32_t vocab, int32_t lane, int32_t n_lane) {
    return (int32_t)((int64_t)vocab * (lane * (8 / n_lane)) / 8);
}

static kc_case *add(kc_list *l, op o, int32_t t, int32_t vocab, int32_t lane, int32_t n_lane, int32_t k, int32_t k_cap,
                    regime reg, mask m, int32_t penalty, int32_t filter) {
    kc_case *c = kc_add(l, "sample.%s.t%d.v%d.lane%dof%d.k%d.cap%d.%s%s%s.f%d", op_name[o], t, vocab, lane, n_lane, k,
                        k_cap, regime_name[reg], mask_name[m], penalty ? ".penalty" : "", filter);
    int32_t valid = vocab > 40 ? vocab - 5 : vocab;
    int32_t p[] = {(int32_t)o, t, vocab, lane, n_lane, k, k_cap, valid, (int32_t)m, penalty, (int32_t)reg, filter};
    memcpy(c->p, p, sizeof p);
    c->rows = t;
    c->shape = (ql_shape){.vocab = vocab, .vocab_local = vocab / n_lane, .max_out = t};
    c->bytes = 4.0 * t * vocab / n_lane;
    return c;
}

static void list(kc_list *l) {
    static const int32_t vocabs[] = {8, 9, 41, 1000};
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++) {
        for (int32_t n_lane = 1; n_lane <= 8; n_lane *= 2) {
            for (int32_t reg = 0; reg < N_REGIME; reg++) {
                add(l, OP_TOPK, 3, vocabs[v], n_lane - 1, n_lane, 5, 8, (regime)reg, MASK_NONE, reg % 2, 0);
            }
        }
        for (int32_t reg = 0; reg < N_REGIME; reg++) {
            for (int32_t m = 0; m < N_MASK; m++) {
                add(l, OP_CHAIN, N_FILTER, vocabs[v], 0, 1, vocabs[v], vocabs[v], (regime)reg, (mask)m, 1, -1);
                add(l, OP_CHAIN, N_FILTER, vocabs[v], 0, 1, 7, 7, (regime)reg, (mask)m, 0, -1);
            }
        }
    }
    add(l, OP_TOPK, 0, 1000, 0, 1, 4, 4, NORMAL, MASK_NONE, 0, 0);
    add(l, OP_TOPK, 2, 1000, 0, 1, 1, 1, TIES, MASK_SOME, 1, 0);
    add(l, OP_TOPK, 2, 1000, 1, 2, 500, 600, TIES, MASK_SOME, 1, 0);
    add(l, OP_TOPK, 2, 1000, 1, 8, 600, 600, NORMAL, MASK_NONE, 1, 0); /* more than there are */
    for (int32_t f = 1; f < N_FILTER; f++) {
        add(l, OP_DRAWS, 4000, 41, 0, 1, 41, 41, NORMAL, MASK_NONE, 0, f);
    }
    add(l, OP_CHAIN, N_FILTER, 4000, 0, 1, 4000, 4000, NORMAL, MASK_SOME, 1, -1);
    add(l, OP_CHAIN, 2, 248320, 0, 1, 64, 64, NORMAL, MASK_NONE, 1, 2);
    add(l, OP_TOPK, 1, 248320, 0, 1, 1, 64, NORMAL, MASK_NONE, 0, 0);
    add(l, OP_TOPK, 1, 248320, 0, 1, 64, 64, NORMAL, MASK_NONE, 0, 0)->is_long = true;
    add(l, OP_TOPK, 1, 248320, 0, 1, 1024, 1024, NORMAL, MASK_NONE, 0, 0)->is_long = true;
}

/* ---- make -------------------------------------------------------------------------------------------------------- */

enum { LOGITS, ALLOWED, ROWS, PENALTY, CAND, STAT, ID, LOGPROB };

static void fill_logits(kc_run *run, float *x, int64_t n) {
    int32_t reg = run->c->p[P_REGIME];
    for (int64_t i = 0; i < n; i++) {
        x[i] = reg == EQUAL ? 1.25f : 3 * kc_normal(run);
        x[i] = reg == TIES ? nearbyintf(x[i]) : reg == HUGE_SPREAD ? 1e4f * x[i] : x[i];
        if (reg == WITH_NAN && kc_below(run, 7) == 0) {
            x[i] = NAN;
        } else if (reg == INFINITE && kc_below(run, 3) == 0) {
            x[i] = -INFINITY;
        } else if (reg == TIES && x[i] == 0 && kc_below(run, 2)) {
            x[i] = -0.0f;
        }
    }
}

static int32_t n_held(const int32_t *p) {
    return range_begin(p[P_VOCAB], p[P_LANE] + 1, p[P_N_LANE]) - range_begin(p[P_VOCAB], p[P_LANE], p[P_N_LANE]);
}

static void make(kc_run *run) {
    const int32_t *p = run->c->p;
    int32_t t = p[P_ROW], n = n_held(p), ld = n + PAD, words = (p[P_VOCAB] + 31) / 32;
    float *logits = kc_buffer(run, "logits", KC_IN, KC_F32, (int64_t)t * ld)->host;
    fill_logits(run, logits, (int64_t)t * ld);
    for (int32_t r = 0; r < t; r++) {
        if (p[P_OP] == OP_DRAWS) {
            memcpy(logits + (int64_t)r * ld, logits, (size_t)n * sizeof *logits);
        }
        for (int32_t i = n; i < ld; i++) {
            logits[(int64_t)r * ld + i] = 1e30f; /* another lane's: never to be read */
        }
    }
    uint32_t *allowed = kc_buffer(run, "allowed", KC_IN, KC_I32, words)->host;
    for (int32_t i = 0; i < words; i++) {
        allowed[i] = p[P_MASK] == MASK_SOME ? (uint32_t)kc_u64(run) : 0;
    }
    if (p[P_MASK] == MASK_ONE) {
        allowed[3 / 32] = 1u << 3;
    }
    int32_t each = p[P_PENALTY] ? p[P_VOCAB] / 3 : 0;
    ql_sample_row *row = kc_buffer(run, "row", KC_IN, KC_U8, (int64_t)t * (int64_t)sizeof *row)->host;
    ql_penalty *pen = kc_buffer(run, "penalty", KC_IN, KC_U8, (int64_t)t * each * (int64_t)sizeof *pen)->host;
    for (int32_t r = 0; r < t; r++) {
        int32_t f = p[P_FILTER] < 0 ? r % N_FILTER : p[P_FILTER], top_k = filters[f].top_k;
        /* fewer candidates than the vocabulary are enough for as large a top_k only */
        top_k = p[P_K] < p[P_VOCAB] && (top_k == 0 || top_k > p[P_K]) ? p[P_K] : top_k;
        row[r] = (ql_sample_row){
            .temperature = filters[f].temperature,
            .top_p = filters[f].top_p,
            .min_p = filters[f].min_p,
            .top_k = top_k,
            .repetition = each && r % 3 ? 1.3f : 1.0f,
            .presence = r % 2 ? 0.5f : 0.0f,
            .frequency = r % 3 == 1 ? 0.25f : 0.0f,
            .k = p[P_K],
            .penalty0 = r * each,
            .n_penalty = each,
            .seed = 0x123456789abcdefu,
            .counter = (uint64_t)r,
        };
        for (int32_t i = 0; i < each; i++) {
            pen[r * each + i] = (ql_penalty){3 * i + kc_below(run, 3), kc_below(run, 4)};
        }
    }
    int32_t ranges = 8 / p[P_N_LANE];
    kc_buffer(run, "cand", KC_OUT, KC_U8, (int64_t)t * p[P_K_CAP] * (int64_t)sizeof(ql_candidate))->row_len =
        p[P_K_CAP] * (int64_t)sizeof(ql_candidate);
    kc_buffer(run, "stat", KC_OUT, KC_F32, (int64_t)t * 2 * ranges)->row_len = 2 * ranges;
    if (p[P_OP] != OP_TOPK) {
        kc_buffer(run, "id", KC_OUT, KC_I32, t)->row_len = 1;
        kc_buffer(run, "logprob", KC_OUT, KC_F32, t)->row_len = 1;
    }
}

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    const int32_t *p = run->c->p;
    const ql_ops *ops = run->dev->ops;
    int32_t n = n_held(p), ranges = 8 / p[P_N_LANE];
    n_row = n_row < 0 ? p[P_ROW] : n_row;
    ql_topk_args a = {
        .logits = (const float *)run->buf[LOGITS].dev + (int64_t)row0 * (n + PAD),
        .ld = n + PAD,
        .n_row = n_row,
        .n = n,
        .vocab0 = range_begin(p[P_VOCAB], p[P_LANE], p[P_N_LANE]),
        .vocab = p[P_VOCAB],
        .n_valid = p[P_VALID],
        .allowed = p[P_MASK] == MASK_NONE ? NULL : run->buf[ALLOWED].dev,
        .row = (const ql_sample_row *)run->buf[ROWS].dev + row0,
        .penalty = run->buf[PENALTY].dev,
        .cand = (ql_candidate *)run->buf[CAND].dev + (int64_t)row0 * p[P_K_CAP],
        .stat = (ql_vocab_stat *)run->buf[STAT].dev + (int64_t)row0 * ranges,
        .k_cap = p[P_K_CAP],
    };
    QL_TRY(ops->topk(run->dev, &a));
    if (p[P_OP] == OP_TOPK) {
        return QL_OK;
    }
    ql_sample_args s = {
        .cand = a.cand,
        .stat = a.stat,
        .row = a.row,
        .n_lane = 1,
        .n_row = n_row,
        .k_cap = p[P_K_CAP],
        .id = (int32_t *)run->buf[ID].dev + row0,
        .logprob = (float *)run->buf[LOGPROB].dev + row0,
    };
    return ops->sample(run->dev, &s);
}

/* ---- oracle ------------------------------------------------------------------------------------------------------ */

static int by_rank(const void *a, const void *b) {
    const ql_candidate *x = a, *y = b;
    return x->key > y->key ? -1 : x->key < y->key ? 1 : (x->id > y->id) - (x->id < y->id);
}

/* All candidates of a row, best first; returns how many. */
static int32_t rank_all(const kc_run *run, int32_t r, ql_candidate *out) {
    const int32_t *p = run->c->p;
    int32_t n = n_held(p), vocab0 = range_begin(p[P_VOCAB], p[P_LANE], p[P_N_LANE]), count = 0;
    const float *logits = (const float *)run->buf[LOGITS].host + (int64_t)r * (n + PAD);
    const uint32_t *allowed = run->buf[ALLOWED].host;
    const ql_sample_row *row = (const ql_sample_row *)run->buf[ROWS].host + r;
    const ql_penalty *pen = (const ql_penalty *)run->buf[PENALTY].host + row->penalty0;
    for (int32_t i = 0; i < n; i++) {
        int32_t id = vocab0 + i;
        float key = logits[i];
        if (id >= p[P_VALID] || key != key || (p[P_MASK] != MASK_NONE && !(allowed[id / 32] >> id % 32 & 1))) {
            continue;
        }
        for (int32_t j = 0; j < row->n_penalty; j++) {
            if (pen[j].id == id) {
                key = key > 0 ? key / row->repetition : key * row->repetition;
                if (pen[j].count > 0) {
                    float f = row->frequency * (float)pen[j].count;
                    key = key - row->presence;
                    key = key - f;
                }
            }
        }
        out[count++] = (ql_candidate){key, logits[i], id};
    }
    qsort(out, (size_t)count, sizeof *out, by_rank);
    return count;
}

/* Probabilities of a sorted list after all filters; 0 for what is dropped. */
static void probabilities(const ql_sample_row *row, const ql_candidate *c, int32_t n, double *w) {
    double total = 0, sum = 0, kept = 0;
    n = row->k < n ? row->k : n;
    for (int32_t i = 0; i < n; i++) {
        w[i] = row->top_k > 0 && i >= row->top_k
                   ? 0
                   : exp(((double)c[i].key - (double)c[0].key) / (double)row->temperature);
        total += w[i];
    }
    for (int32_t i = 0; i < n; i++) {
        double before = sum;
        sum += w[i];
        if ((row->top_p < 1 && i > 0 && before >= (double)row->top_p * total) || w[i] < (double)row->min_p) {
            w[i] = 0;
        }
        kept += w[i];
    }
    for (int32_t i = 0; i < n; i++) {
        w[i] /= kept;
    }
}

static void oracle_topk(kc_run *run, int32_t r, const ql_candidate *best, int32_t count) {
    const int32_t *p = run->c->p;
    int32_t n = n_held(p), vocab0 = range_begin(p[P_VOCAB], p[P_LANE], p[P_N_LANE]), ranges = 8 / p[P_N_LANE];
    const float *logits = (const float *)run->buf[LOGITS].host + (int64_t)r * (n + PAD);
    const ql_candidate *got = (const ql_candidate *)run->buf[CAND].got + (int64_t)r * p[P_K_CAP];
    for (int32_t i = 0; i < p[P_K]; i++) {
        if (i >= count ? got[i].id != -1
                       : got[i].id != best[i].id || got[i].key != best[i].key || got[i].raw != best[i].raw) {
            kc_fail(run, "row %d, candidate %d is id %d with key %.9g, oracle %d with %.9g", r, i, got[i].id,
                    (double)got[i].key, i < count ? best[i].id : -1, i < count ? (double)best[i].key : 0.0);
            return;
        }
    }
    double *want = kc_want(&run->buf[STAT]) + (int64_t)r * 2 * ranges,
           *tol = kc_tol(&run->buf[STAT]) + (int64_t)r * 2 * ranges;
    for (int32_t i = 0; i < ranges; i++) {
        int32_t b = range_begin(p[P_VOCAB], p[P_LANE] * ranges + i, 8) - vocab0;
        int32_t e = range_begin(p[P_VOCAB], p[P_LANE] * ranges + i + 1, 8) - vocab0;
        double max = -INFINITY, sum = 0, slack = 0;
        for (int32_t j = b; j < e; j++) {
            max = (double)logits[j] > max ? (double)logits[j] : max;
        }
        for (int32_t j = b; j < e; j++) {
            /* The argument's rounding counts |a| 2^-24 of the term, exp and the sum a few more. */
            double a = (double)logits[j] - (max > -INFINITY ? max : 0), term = exp(a);
            sum += term;
            slack += term > 0 ? term * (fabs(a) + 36) * 0x1p-24 : 0;
        }
        want[2 * i] = max;
        want[2 * i + 1] = sum;
        tol[2 * i + 1] = slack;
    }
}

/* The id that a draw leads to, and its log probability. */
static void oracle_sample(kc_run *run, int32_t r, const ql_candidate *best, int32_t count, double *w) {
    const int32_t *p = run->c->p;
    const ql_sample_row *row = (const ql_sample_row *)run->buf[ROWS].host + r;
    const float *logits = (const float *)run->buf[LOGITS].host + (int64_t)r * (n_held(p) + PAD);
    int32_t id = ((const int32_t *)run->buf[ID].got)[r], pick = 0;
    double *want = &kc_want(&run->buf[LOGPROB])[r], *tol = &kc_tol(&run->buf[LOGPROB])[r];
    if (!count) {
        *want = -INFINITY;
        if (id != -1) {
            kc_fail(run, "row %d has no candidate and gives id %d", r, id);
        }
        return;
    }
    if (row->temperature > 0 && best[0].key > -INFINITY) {
        double run_sum = 0, u = (double)ql_uniform(row->seed, row->counter);
        int32_t n = row->k < count ? row->k : count;
        probabilities(row, best, count, w);
        for (pick = 0; pick < n - 1; pick++) {
            run_sum += w[pick];
            if (run_sum > u + 1e-12) {
                break;
            }
            if (run_sum > u - 1e-12) { /* on the edge of rounding: either neighbour is right */
                pick += id == best[pick + 1].id;
                break;
            }
        }
    }
    if (id != best[pick].id) {
        kc_fail(run, "row %d gives id %d, oracle %d", r, id, best[pick].id);
        return;
    }
    double max = -INFINITY, sum = 0, slack = 0;
    for (int32_t j = 0; j < p[P_VOCAB]; j++) {
        max = (double)logits[j] > max ? (double)logits[j] : max;
    }
    for (int32_t j = 0; j < p[P_VOCAB]; j++) {
        double a = (double)logits[j] - max, term = exp(a);
        sum += term;
        slack += term > 0 ? term * (fabs(a) + 36) * 0x1p-24 : 0;
    }
    *want = (double)best[pick].raw - (max + log(sum));
    *tol = slack / sum + fabs(*want) * 0x1p-23;
}

static void oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    ql_candidate *best = malloc(sizeof *best * (size_t)p[P_VOCAB]);
    double *w = malloc(sizeof *w * (size_t)p[P_VOCAB]);
    for (int32_t r = 0; r < p[P_ROW] && !run->failed; r++) {
        int32_t count = rank_all(run, r, best);
        oracle_topk(run, r, best, count);
        if (p[P_OP] != OP_TOPK) {
            oracle_sample(run, r, best, count, w);
        }
    }
    free(best);
    free(w);
}

/* ---- equivalences ------------------------------------------------------------------------------------------------ */

/* topk on each of n_lane lanes, then sample: ids and log probabilities of one lane, bit for bit. A lane gives no more
 * candidates than the largest has rows, as a model asks for. */
static void check_lanes(kc_run *run, int32_t n_lane) {
    const int32_t *p = run->c->p;
    const ql_ops *ops = run->dev->ops;
    int32_t t = p[P_ROW], ranges = 8 / n_lane, k_cap = 0;
    for (int32_t lane = 0; lane < n_lane; lane++) {
        int32_t held = range_begin(p[P_VOCAB], lane + 1, n_lane) - range_begin(p[P_VOCAB], lane, n_lane);
        k_cap = held > k_cap ? held : k_cap;
    }
    k_cap = p[P_K_CAP] < k_cap ? p[P_K_CAP] : k_cap;
    size_t bytes[5] = {sizeof(ql_candidate) * (size_t)n_lane * (size_t)t * (size_t)k_cap,
                       sizeof(ql_vocab_stat) * 8 * (size_t)t, 4 * (size_t)t, 4 * (size_t)t,
                       sizeof(ql_sample_row) * (size_t)t};
    void *mem[5] = {NULL};
    ql_status status = QL_OK;
    for (int32_t i = 0; i < 5; i++) {
        status = status == QL_OK ? ops->alloc(run->dev, bytes[i], "lanes", &mem[i]) : status;
    }
    ql_candidate *cand = mem[0];
    ql_vocab_stat *stat = mem[1];
    ql_sample_row *row = calloc((size_t)t + 1, sizeof *row);
    memcpy(row, run->buf[ROWS].host, bytes[4]);
    for (int32_t r = 0; r < t; r++) {
        row[r].k = row[r].k < k_cap ? row[r].k : k_cap;
    }
    status = status == QL_OK ? ops->h2d(run->dev, mem[4], row, bytes[4]) : status;
    for (int32_t lane = 0; lane < n_lane && status == QL_OK; lane++) {
        int32_t vocab0 = range_begin(p[P_VOCAB], lane, n_lane);
        ql_topk_args a = {
            .logits = (const float *)run->buf[LOGITS].dev + vocab0,
            .ld = p[P_VOCAB] + PAD,
            .n_row = t,
            .n = range_begin(p[P_VOCAB], lane + 1, n_lane) - vocab0,
            .vocab0 = vocab0,
            .vocab = p[P_VOCAB],
            .n_valid = p[P_VALID],
            .allowed = p[P_MASK] == MASK_NONE ? NULL : run->buf[ALLOWED].dev,
            .row = mem[4],
            .penalty = run->buf[PENALTY].dev,
            .cand = cand + (int64_t)lane * t * k_cap,
            .stat = stat + (int64_t)lane * t * ranges,
            .k_cap = k_cap,
        };
        status = ops->topk(run->dev, &a);
    }
    int32_t *id = calloc((size_t)t + 1, sizeof *id);
    float *logprob = calloc((size_t)t + 1, sizeof *logprob);
    if (status == QL_OK) {
        ql_sample_args s = {cand, stat, mem[4], n_lane, t, k_cap, mem[2], mem[3]};
        status = ops->sample(run->dev, &s);
    }
    if (status == QL_OK && ops->d2h(run->dev, id, mem[2], bytes[2]) == QL_OK &&
        ops->d2h(run->dev, logprob, mem[3], bytes[3]) == QL_OK && ops->sync(run->dev) == QL_OK) {
        const int32_t *id1 = run->buf[ID].got;
        const float *logprob1 = run->buf[LOGPROB].got;
        for (int32_t r = 0; r < t; r++) {
            bool same =
                memcmp(&logprob[r], &logprob1[r], 4) == 0 || (logprob[r] != logprob[r] && logprob1[r] != logprob1[r]);
            if (id[r] != id1[r] || !same) {
                kc_fail(run, "row %d: %d lanes give id %d (%.9g), one gives %d (%.9g)", r, n_lane, id[r],
                        (double)logprob[r], id1[r], (double)logprob1[r]);
                break;
            }
        }
    } else {
        kc_fail(run, "%d lanes: %s", n_lane, run->dev->err->text);
    }
    free(id);
    free(logprob);
    free(row);
    for (int32_t i = 0; i < 5; i++) {
        ops->free(run->dev, mem[i]);
    }
}

/* Pearson's chi-square of the drawn ids; bins with few expected draws are put together. */
static void check_draws(kc_run *run) {
    const int32_t *p = run->c->p;
    const ql_sample_row *row = run->buf[ROWS].host;
    ql_candidate best[64];
    double w[64] = {0}, chi = 0, rest_want = 0, rest_got = 0, df = -1;
    int32_t count = rank_all(run, 0, best), n = row->k < count ? row->k : count;
    probabilities(row, best, count, w);
    for (int32_t i = 0; i < n; i++) {
        double want = w[i] * p[P_ROW], got = 0;
        for (int32_t r = 0; r < p[P_ROW]; r++) {
            got += ((const int32_t *)run->buf[ID].got)[r] == best[i].id;
        }
        if (w[i] == 0 && got > 0) {
            kc_fail(run, "id %d was dropped by a filter and drawn %g times", best[i].id, got);
        } else if (want < 8) {
            rest_want += want;
            rest_got += got;
        } else {
            chi += (got - want) * (got - want) / want;
            df++;
        }
    }
    if (rest_want > 0) {
        chi += (rest_got - rest_want) * (rest_got - rest_want) / rest_want;
        df++;
    }
    /* Wilson and Hilferty's cube root: exceeded once in ten thousand. */
    double z = 3.72, limit = df > 0 ? df * pow(1 - 2 / (9 * df) + z * sqrt(2 / (9 * df)), 3) : 1e-9;
    if (chi > limit) {
        kc_fail(run, "chi-square of %d draws is %.1f with %.0f degrees of freedom", p[P_ROW], chi, df);
    }
}

static void check(kc_run *run) {
    const int32_t *p = run->c->p;
    if (p[P_OP] == OP_TOPK || !kc_once(run, 0, -1)) {
        return;
    }
    for (int32_t n_lane = 2; n_lane <= 8 && !run->failed; n_lane *= 2) {
        check_lanes(run, n_lane);
    }
    if (p[P_OP] == OP_DRAWS && !run->failed) {
        check_draws(run);
    }
}

const kc_family kc_sample = {"sample", list, make, call, oracle, check};
