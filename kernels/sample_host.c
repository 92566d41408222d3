/* topk and sample (sample.h). The candidates of a row are kept as a heap with the worst at its root while the logits are
 * read once: an id enters only where its key beats the root's, so nearly all of a large vocabulary costs one compare.
 */
#include "kernels/host/host_ops.h"

#include <math.h>
#include <stdbool.h>

/* ---- topk -------------------------------------------------------------------------------------------------------- */

static bool is_better(const ql_candidate *a, const ql_candidate *b) {
    return a->key > b->key || (a->key == b->key && a->id < b->id);
}

static void swap(ql_candidate *a, ql_candidate *b) {
    ql_candidate c = *a;
    *a = *b;
    *b = c;
}

/* Restores the heap (no parent better than a child) below node i of n. */
static void sink(ql_candidate *heap, int32_t n, int32_t i) {
    for (;;) {
        int32_t left = 2 * i + 1, worst = i;
        for (int32_t child = left; child < left + 2 && child < n; child++) {
            worst = is_better(&heap[worst], &heap[child]) ? child : worst;
        }
        if (worst == i) {
            return;
        }
        swap(&heap[i], &heap[worst]);
        i = worst;
    }
}

static void rise(ql_candidate *heap, int32_t i) {
    for (; i > 0 && is_better(&heap[(i - 1) / 2], &heap[i]); i = (i - 1) / 2) {
        swap(&heap[(i - 1) / 2], &heap[i]);
    }
}

typedef struct top {
    ql_candidate *heap;
    int32_t n, k;
} top;

/* Ids come in rising order, so an equal key never displaces one that is in. A NaN is no key. */
static inline void offer(top *t, float key, float raw, int32_t id) {
    if (t->n == t->k) {
        if (key > t->heap[0].key) {
            t->heap[0] = (ql_candidate){key, raw, id};
            sink(t->heap, t->n, 0);
        }
    } else if (key == key) {
        t->heap[t->n] = (ql_candidate){key, raw, id};
        rise(t->heap, t->n++);
    }
}

/* The heap becomes a list, best first. */
static void sort(top *t) {
    for (int32_t n = t->n; n > 1; n--) {
        swap(&t->heap[0], &t->heap[n - 1]);
        sink(t->heap, n - 1, 0);
    }
}

static bool is_allowed(const ql_topk_args *a, int32_t id) {
    return id < a->n_valid && (!a->allowed || (a->allowed[id / 32] >> (id % 32) & 1));
}

static float penalised(const ql_sample_row *row, const ql_penalty *p, float raw) {
    float key = raw > 0 ? raw / row->repetition : raw * row->repetition;
    if (p->count > 0) {
        key -= row->presence;
        key -= row->frequency * (float)p->count;
    }
    return key;
}

/* Offers ids [id, end), none of which is in the penalty list. */
static void offer_plain(top *t, const ql_topk_args *a, const float *logits, int32_t id, int32_t end) {
    end = end < a->n_valid ? end : a->n_valid;
    for (; id < end; id++) {
        float key = logits[id - a->vocab0];
        if (t->n == t->k && !(key > t->heap[0].key)) {
            continue;
        }
        if (is_allowed(a, id)) {
            offer(t, key, key, id);
        }
    }
}

static void top_of_row(const ql_topk_args *a, const float *logits, const ql_sample_row *row, ql_candidate *cand) {
    top t = {.heap = cand, .k = row->k};
    const ql_penalty *p = a->penalty + row->penalty0, *p_end = p + row->n_penalty;
    int32_t id = a->vocab0, end = a->vocab0 + a->n;
    for (; row->n_penalty > 0 && p < p_end; p++) {
        if (p->id < id || p->id >= end) {
            continue;
        }
        offer_plain(&t, a, logits, id, p->id);
        if (is_allowed(a, p->id)) {
            float raw = logits[p->id - a->vocab0];
            offer(&t, penalised(row, p, raw), raw, p->id);
        }
        id = p->id + 1;
    }
    offer_plain(&t, a, logits, id, end);
    sort(&t);
    for (int32_t i = t.n; i < t.k; i++) {
        cand[i] = (ql_candidate){.id = -1};
    }
}

static ql_vocab_stat stat_of(const float *logits, int32_t n) {
    float max = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        max = logits[i] > max ? logits[i] : max;
    }
    double sum = 0;
    float base = max > -INFINITY ? max : 0;
    for (int32_t i = 0; i < n; i++) {
        sum += (double)expf(logits[i] - base);
    }
    return (ql_vocab_stat){max, (float)sum};
}

static int32_t range_begin(int32_t vocab, int32_t i) { return (int32_t)((int64_t)vocab * i / QL_STAT_RANGES); }

ql_status ql_topk_host(ql_dev *dev, const ql_topk_args *a) {
    int32_t first = 0, last;
    while (first < QL_STAT_RANGES && range_begin(a->vocab, first) != a->vocab0) {
        first++;
    }
    for (last = first; last < QL_STAT_RANGES && range_begin(a->vocab, last) != a->vocab0 + a->n; last++) {
    }
    if (a->vocab < QL_STAT_RANGES || last == first || range_begin(a->vocab, last) != a->vocab0 + a->n) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "topk: ids %d to %d are no whole ranges of a vocabulary of %d",
                       a->vocab0, a->vocab0 + a->n - 1, a->vocab);
    }
    for (int32_t r = 0; r < a->n_row; r++) {
        const ql_sample_row *row = &a->row[r];
        const float *logits = a->logits + r * a->ld;
        if (row->k < 1 || row->k > a->k_cap) {
            return ql_fail(dev->err, QL_ERR_INTERNAL, "topk: row %d wants %d candidates of at most %d", r, row->k,
                           a->k_cap);
        }
        for (int32_t i = first; i < last; i++) {
            int32_t b = range_begin(a->vocab, i), e = range_begin(a->vocab, i + 1);
            a->stat[(int64_t)r * (last - first) + i - first] = stat_of(logits + b - a->vocab0, e - b);
        }
        top_of_row(a, logits, row, a->cand + (int64_t)r * a->k_cap);
    }
    return QL_OK;
}

/* ---- sample ------------------------------------------------------------------------------------------------------ */

/* All lanes' candidates of one row in one order, without copying them. */
typedef struct merge {
    const ql_sample_args *a;
    int32_t row, left; /* candidates still to come at most */
    int32_t at[QL_STAT_RANGES];
} merge;

static merge merge_begin(const ql_sample_args *a, int32_t row) {
    int32_t top_k = a->row[row].top_k;
    return (merge){.a = a, .row = row, .left = top_k > 0 ? top_k : INT32_MAX};
}

static const ql_candidate *merge_next(merge *m) {
    const ql_sample_args *a = m->a;
    const ql_candidate *best = NULL;
    int32_t lane = 0;
    for (int32_t i = 0; i < a->n_lane && m->left > 0; i++) {
        if (m->at[i] == a->row[m->row].k) {
            continue;
        }
        const ql_candidate *c = &a->cand[((int64_t)i * a->n_row + m->row) * a->k_cap + m->at[i]];
        if (c->id >= 0 && (!best || is_better(c, best))) {
            best = c;
            lane = i;
        }
    }
    if (best) {
        m->at[lane]++;
        m->left--;
    }
    return best;
}

static double weight_of(const ql_candidate *c, float best_key, float temperature) {
    return exp(((double)c->key - (double)best_key) / (double)temperature);
}

static const ql_candidate *choose(const ql_sample_args *a, int32_t r) {
    const ql_sample_row *row = &a->row[r];
    merge m = merge_begin(a, r);
    const ql_candidate *best = merge_next(&m), *c;
    if (!best || row->temperature <= 0) {
        return best;
    }
    /* Weights fall with rank: top_p and min_p both keep a prefix. */
    double total = 0, kept = 0, run = 0;
    for (c = best; c; c = merge_next(&m)) {
        total += weight_of(c, best->key, row->temperature);
    }
    int32_t n_kept = 0;
    m = merge_begin(a, r);
    while ((c = merge_next(&m))) {
        double w = weight_of(c, best->key, row->temperature);
        if (n_kept > 0 && ((row->top_p < 1 && kept >= (double)row->top_p * total) || w < (double)row->min_p)) {
            break;
        }
        kept += w;
        n_kept++;
    }
    double limit = (double)ql_uniform(row->seed, row->counter) * kept;
    m = merge_begin(a, r);
    for (int32_t i = 0; i < n_kept && (c = merge_next(&m)); i++) {
        run += weight_of(c, best->key, row->temperature);
        if (run > limit) {
            return c;
        }
    }
    return best; /* keys that are no numbers: greedy */
}

static float logprob(const ql_sample_args *a, int32_t r, float raw) {
    int32_t n_range = QL_STAT_RANGES / a->n_lane;
    double max = -INFINITY, sum = 0;
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t lane = 0; lane < a->n_lane; lane++) {
            for (int32_t i = 0; i < n_range; i++) {
                ql_vocab_stat s = a->stat[((int64_t)lane * a->n_row + r) * n_range + i];
                if (pass == 0) {
                    max = (double)s.max > max ? (double)s.max : max;
                } else {
                    sum += (double)s.sum_exp * exp((double)s.max - max);
                }
            }
        }
    }
    return (float)((double)raw - (max + log(sum)));
}

ql_status ql_sample_host(ql_dev *dev, const ql_sample_args *a) {
    if (a->n_lane < 1 || QL_STAT_RANGES % a->n_lane) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "sample: %d lanes do not divide %d ranges", a->n_lane,
                       QL_STAT_RANGES);
    }
    for (int32_t r = 0; r < a->n_row; r++) {
        const ql_candidate *c = choose(a, r);
        a->id[r] = c ? c->id : -1;
        a->logprob[r] = c ? logprob(a, r, c->raw) : -INFINITY;
    }
    return QL_OK;
}
