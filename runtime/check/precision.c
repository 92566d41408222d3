/* What rounding the activations of a prompt does to a model's predictions: each precision against exact, on the model of
 * the options, position by position over the whole vocabulary. Written on qlane.h, as any program could.
 *
 * The limits find a precision that is broken, not one that is a little worse. For the bundled model they are some 50 times what
 * was measured. How much another model forgives is not known beforehand (random weights forgive least: nothing in them was
 * trained to be robust), so its limits are parts of the divergence of predictions that have nothing to do with each other.
 */
#include "runtime/check/check_impl.h"

#include "runtime/base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_ID = 192 /* of a prompt that is not text */, CTX = 512 };

static const char text[] =
    "The capital of France is Paris.\nThe capital of Germany is Berlin.\nThe capital of Italy is Rome.\n"
    "The capital of Spain is Madrid.\nThe capital of Norway is Oslo.\nThe days go Monday, Tuesday, "
    "Wednesday, Thursday, Friday.\nCount: one two three four five six seven.\n3 + 4 = 7\n9 + 8 = 17\n"
    "Grass is green.\nSnow is white.\nThe months go March, April, May, June, July, August.\n"
    "The capital of Japan is Tokyo.\nThe capital of China is Beijing.\nThe capital of Egypt is Cairo.\n";

typedef struct logits {
    const ql_allocator *mem;
    float *v; /* [n_row][vocab] */
    int32_t n_row, vocab;
    bool failed;
} logits;

static void on_probe(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                     const float *values) {
    logits *l = user;
    (void)layer;
    if (kind != QL_PROBE_LOGITS || l->failed) {
        return;
    }
    float *grown = ql_realloc(l->mem, l->v, (size_t)(row0 + n_row) * (size_t)width * sizeof *grown);
    if (!grown) {
        l->failed = true;
        return;
    }
    l->v = grown;
    l->n_row = row0 + n_row;
    l->vocab = width;
    memcpy(grown + (int64_t)row0 * width, values, (size_t)n_row * (size_t)width * sizeof *values);
}

static ql_status generate(ql_engine *engine, logits *out, ql_error *err) {
    int32_t id[N_ID];
    ql_request request = ql_request_default();
    if (ql_engine_tokenizer(engine)) {
        request.text = text;
    } else {
        for (uint32_t i = 0; i < N_ID; i++) {
            id[i] = (int32_t)(i * 2654435761u >> 8) % engine->ckpt->config.vocab;
        }
        request.ids = id;
        request.n_ids = N_ID;
    }
    request.max_new = 1;
    request.ignore_eos = 1;
    request.probe = on_probe;
    request.probe_user = out;
    ql_result *result = NULL;
    ql_status status = ql_generate(engine, &request, &result, err);
    ql_result_free(result);
    return status == QL_OK && out->failed ? ql_fail(err, QL_ERR_MEMORY, "out of memory for the logits") : status;
}

/* Logits of every position of the prompt. */
static ql_status run(const ql_check *c, int32_t n_lane, ql_precision precision, logits *out, ql_error *err) {
    ql_options opt = c->options;
    ql_engine *engine = NULL;
    *out = (logits){.mem = c->mem};
    opt.device = c->kind;
    opt.devices = c->kind == QL_DEVICE_CUDA ? c->ordinal : NULL;
    opt.lanes = n_lane;
    opt.ctx = CTX;
    opt.max_seqs = 1;
    opt.prompt_precision = precision;
    opt.log = NULL;
    opt.progress = NULL;
    QL_TRY(ql_engine_open(&engine, &opt, err));
    ql_status status = generate(engine, out, err);
    ql_engine_close(&engine);
    return status;
}

/* ---- comparing ------------------------------------------------------------------------------------------------------- */

typedef struct difference {
    double mean_kl, most_kl;     /* nats */
    double square, variance;     /* of the exact logits: sum, and mean of the rows' */
    int32_t n_row, n_same;       /* rows, and those with the same likeliest id */
    int32_t n_sure, n_sure_same; /* the same of rows where exact gives one id more than half */
} difference;

static int32_t likeliest(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

static double log_sum_exp(const float *x, int32_t n) {
    double most = x[likeliest(x, n)], sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += exp(x[i] - most);
    }
    return most + log(sum);
}

static difference compare(const logits *exact, const logits *other) {
    difference d = {.n_row = exact->n_row};
    int32_t n = exact->vocab;
    for (int32_t t = 0; t < exact->n_row; t++) {
        const float *x = exact->v + (int64_t)t * n, *y = other->v + (int64_t)t * n;
        double zx = log_sum_exp(x, n), zy = log_sum_exp(y, n), kl = 0, sum = 0, square = 0;
        for (int32_t i = 0; i < n; i++) {
            kl += exp(x[i] - zx) * ((x[i] - zx) - (y[i] - zy));
            sum += x[i];
            square += (double)x[i] * x[i];
        }
        d.square += square;
        d.variance += (square - sum * sum / n) / n / d.n_row;
        d.mean_kl += kl / d.n_row;
        d.most_kl = kl <= d.most_kl ? d.most_kl : kl; /* a NaN stays */
        int32_t best = likeliest(x, n);
        bool sure = x[best] - zx > log(0.5), same = likeliest(y, n) == best;
        d.n_same += same;
        d.n_sure += sure;
        d.n_sure_same += sure && same;
    }
    return d;
}

/* ---- cases ----------------------------------------------------------------------------------------------------------- */

typedef struct kind {
    const char *name;
    ql_precision precision;
    double limit;           /* of the bundled model's mean divergence */
    double same;            /* least part of its sure rows with the same likeliest id */
    double part, part_same; /* for other models: the limit as a part of unrelated predictions' divergence; least part */
} kind;

static void run_case(ql_check *c, int32_t n_lane, const kind *k, bool bundled, logits *exact) {
    ql_error err = {0};
    logits other = {.mem = c->mem};
    ql_check_case end = {.outcome = QL_CHECK_FAILED, .limit = k->limit};
    char note[640];
    ql_status status = exact->v ? QL_OK : run(c, n_lane, QL_PREC_EXACT, exact, &err);
    status = status == QL_OK ? run(c, n_lane, k->precision, &other, &err) : status;
    snprintf(note, sizeof note, "%s", err.text);
    if (status == QL_OK) {
        difference d = compare(exact, &other);
        end.compared = (uint64_t)d.n_row * (uint64_t)exact->vocab;
        end.worst = d.mean_kl;
        end.magnitude = sqrt(d.square / (double)end.compared);
        bool differs = memcmp(exact->v, other.v, (size_t)end.compared * sizeof(float)) != 0;
        /* Two rows of independent normal logits of variance s are s nats apart. */
        end.limit = bundled ? k->limit : k->part * d.variance;
        bool ok = end.compared > 0 && differs && d.mean_kl <= end.limit && d.most_kl <= 100 * end.limit &&
                  d.n_sure_same >= (bundled ? k->same : k->part_same) * d.n_sure;
        end.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED;
        snprintf(
            note, sizeof note,
            "divergence: mean %.1e, largest %.1e nats; likeliest id: same at %d of %d positions, %d of %d where it "
            "has more than half%s",
            d.mean_kl, d.most_kl, d.n_same, d.n_row, d.n_sure_same, d.n_sure,
            differs ? "" : "; the logits are those of exact, bit for bit");
    }
    end.note = note;
    ql_check_end(c, &end);
    ql_free(c->mem, other.v);
}

typedef struct subject {
    int32_t slices; /* canonical ones, of which the lane count is a divisor; 0: not looked at yet */
    bool bundled;   /* it has the bundled model's sizes */
    bool plain;     /* none of its weights is quantized */
} subject;

static ql_status look_at(const char *model, subject *out, ql_error *err) {
    ql_checkpoint *ckpt = NULL;
    if (!model) {
        return ql_fail(err, QL_ERR_USAGE, "options.model is empty; a checkpoint directory or Hub id is needed");
    }
    QL_TRY(ql_checkpoint_open(&ckpt, model, err));
    out->slices = ckpt->config.slices;
    out->bundled = ckpt->config.hidden == 256 && ckpt->config.n_layer == 4 && ckpt->config.vocab == 1344;
    out->plain = ckpt->summary.scale_bytes == 0;
    ql_checkpoint_close(&ckpt);
    return QL_OK;
}

void ql_check_precision(ql_check *c, const char *check) {
    static const kind kinds[] = {{"bf16", QL_PREC_BF16, 5e-5, 0.98, 0.01, 0.9},
                                 {"fp8", QL_PREC_FP8, 5e-3, 0.95, 0.25, 0.5},
                                 {"q8", QL_PREC_Q8, 6e-4, 0.95, 0.05, 0.7}};
    logits exact = {.mem = c->mem}; /* the same at any lane count */
    subject m = {0};
    for (int32_t n = ql_check_lanes(c, 0); n; n = ql_check_lanes(c, n)) {
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            if (!ql_check_begin(c, n, "%s.%s", check, kinds[i].name)) {
                continue;
            }
            ql_error err = {0};
            if (!m.slices && look_at(c->options.model, &m, &err) != QL_OK) {
                ql_check_end(c, &(ql_check_case){.outcome = QL_CHECK_FAILED, .note = err.text});
            } else if (m.plain && kinds[i].precision == QL_PREC_Q8) {
                ql_check_end(c, &(ql_check_case){.outcome = QL_CHECK_SKIPPED, .note = "no weight is quantized"});
            } else if (m.slices % n != 0) {
                char note[64];
                snprintf(note, sizeof note, "the model has %d slices", m.slices);
                ql_check_end(c, &(ql_check_case){.outcome = QL_CHECK_SKIPPED, .note = note});
            } else {
                run_case(c, n, &kinds[i], m.bundled, &exact);
            }
        }
    }
    ql_free(c->mem, exact.v);
}
