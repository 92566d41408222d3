/* The bundled models against what an independent implementation computed in float32 (golden.json, golden.npz): greedy
 * ids, log probabilities, text, and every intermediate value, at every lane count the model allows.
 *
 * Ids must be equal in `exact` with f32 KV. With rounded KV an id may differ where the two best logits are closer than
 * the rounding can move them; the rest of that case then says nothing and is left out.
 */
#include "tests/model/common.h"

#include <math.h>

/* What f16 KV can move a logit by: 3e-4 of a row of up to 12 in each entry. The smallest golden margin is 1.1e-3. */
#define F16_MARGIN 4e-3

typedef struct worst {
    double hidden, final_hidden, logits, mtp_logits, logprob;
    int32_t near_ties;
} worst;

static void raise_to(double *to, double v) { *to = v > *to ? v : *to; }

/* One kind of rows of the golden archive against what the probe delivered. */
static double compare(const ql_npz *npz, const char *prefix, const char *kind, const ql_test_rows *rows,
                      int64_t layer) {
    char name[64];
    snprintf(name, sizeof name, "%s%s", prefix, kind);
    const ql_npy *want = ql_npz_get(npz, name);
    assert_non_null(want);
    assert_string_equal(want->dtype, "f4");
    int64_t n_row = want->shape[want->rank - 2], width = want->shape[want->rank - 1];
    if (rows->n != n_row || rows->width != width) {
        fail_msg("%s: probe gave [%d][%d], golden has [%d][%d]", name, rows->n, rows->width, (int)n_row, (int)width);
    }
    return ql_test_worst_rel(rows->values, (const float *)want->data + layer * n_row * width, n_row, (int32_t)width,
                             NULL);
}

static void check_probes(ql_engine *engine, const ql_test_model *model, const ql_npz *npz, const char *prefix,
                         worst *w) {
    char name[64];
    snprintf(name, sizeof name, "%sids", prefix);
    const ql_npy *ids = ql_npz_get(npz, name);
    if (!ids) { /* tiny has dumps of one prompt only */
        assert_true(model->tokenizer && *prefix);
        return;
    }
    ql_test_probe probe = {0};
    ql_request r = ql_test_request(ids->data, (int32_t)ids->n, 1);
    r.probe = ql_test_probe_fn;
    r.probe_user = &probe;
    ql_result_free(ql_test_generate(engine, &r));
    assert_false(probe.bad);
    snprintf(name, sizeof name, "%shidden", prefix);
    const ql_npy *hidden = ql_npz_get(npz, name);
    assert_non_null(hidden);
    assert_int_equal(hidden->rank, 3);
    for (int64_t l = 0; l < hidden->shape[0]; l++) {
        raise_to(&w->hidden, compare(npz, prefix, "hidden", &probe.hidden[l], l));
    }
    assert_int_equal(probe.hidden[hidden->shape[0]].n, 0);
    raise_to(&w->final_hidden, compare(npz, prefix, "final_hidden", &probe.final_hidden, 0));
    raise_to(&w->logits, compare(npz, prefix, "logits", &probe.logits, 0));
    if (model->mtp) {
        raise_to(&w->mtp_logits, compare(npz, prefix, "mtp_logits", &probe.mtp_logits, 0));
    }
    ql_test_probe_free(&probe);
}

static void check_text(const ql_test_case *c, const ql_result *res) {
    static const char *const eos[] = {"<|im_end|>", "<|endoftext|>"};
    size_t n = strlen(c->text);
    bool ended = false;
    for (int i = 0; i < 2; i++) { /* golden text shows the end-of-sequence token */
        size_t k = strlen(eos[i]);
        if (n >= k && memcmp(c->text + n - k, eos[i], k) == 0) {
            n -= k;
            ended = true;
        }
    }
    assert_non_null(res->text);
    assert_int_equal(res->text_bytes, n);
    assert_memory_equal(res->text, c->text, n);
    assert_int_equal(res->text[n], 0);
    assert_int_equal(res->finish, ended ? QL_FINISH_EOS : QL_FINISH_LENGTH);
}

static void check_case(ql_engine *engine, const ql_test_case *c, bool exact, worst *w) {
    ql_request r = ql_test_request(c->prompt_ids, c->n_prompt, c->n_ids);
    ql_result *res = ql_test_generate(engine, &r);
    assert_int_equal(res->n_prompt, c->n_prompt);
    assert_memory_equal(res->prompt_ids, c->prompt_ids, (size_t)c->n_prompt * sizeof *c->prompt_ids);
    int32_t n = 0;
    while (n < c->n_ids && n < res->n_ids && res->ids[n] == c->ids[n]) {
        raise_to(&w->logprob, fabs(res->logprobs[n] - c->logprob[n]));
        n++;
    }
    if (n == c->n_ids) {
        assert_int_equal(res->n_ids, c->n_ids);
        if (c->text) {
            check_text(c, res);
        }
    } else if (exact || n == res->n_ids || c->margin[n] > F16_MARGIN) {
        fail_msg("prompt of %d ids: generated id %d is %d, golden %d (margin %g)", c->n_prompt, n,
                 n < res->n_ids ? res->ids[n] : -1, c->ids[n], c->margin[n]);
    } else {
        w->near_ties++;
    }
    ql_result_free(res);
    if (c->prompt && exact) { /* the same prompt as text */
        r.ids = NULL;
        r.n_ids = 0;
        r.text = c->prompt;
        res = ql_test_generate(engine, &r);
        assert_int_equal(res->n_prompt, c->n_prompt);
        assert_memory_equal(res->prompt_ids, c->prompt_ids, (size_t)c->n_prompt * sizeof *c->prompt_ids);
        assert_int_equal(res->n_ids, c->n_ids);
        assert_memory_equal(res->ids, c->ids, (size_t)c->n_ids * sizeof *c->ids);
        check_text(c, res);
        ql_result_free(res);
    }
}

static void run_model(const ql_test_model *model, int32_t lanes, ql_kv_type kv) {
    ql_test_golden golden;
    ql_npz npz;
    char path[256];
    snprintf(path, sizeof path, "%s/golden.npz", model->dir);
    ql_test_golden_load(&golden, model);
    if (!ql_npz_open(&npz, path)) {
        fail_msg("%s", npz.error);
    }
    ql_options o = ql_test_options(model, lanes);
    o.kv = kv;
    o.mtp = model->mtp;
    ql_engine *engine = ql_test_open(&o);
    ql_stats s = ql_test_stats(engine);
    assert_int_equal(s.n_lanes, lanes);
    assert_int_equal(s.slices, model->slices);
    assert_int_equal(s.device, QL_DEVICE_HOST);

    bool exact = kv == QL_KV_F32;
    worst w = {0};
    check_probes(engine, model, &npz, "", &w);
    check_probes(engine, model, &npz, "long_", &w);
    for (int32_t i = 0; i < golden.n; i++) {
        check_case(engine, &golden.cases[i], exact, &w);
    }
    ql_engine_close(&engine);
    ql_npz_close(&npz);
    ql_test_golden_free(&golden);

    printf("  %-20s lanes %d kv %s  worst relative L2: hidden %.2e final %.2e logits %.2e mtp %.2e; logprob %.1e; near "
           "ties %d\n",
           model->name, lanes, exact ? "f32" : "f16", w.hidden, w.final_hidden, w.logits, w.mtp_logits, w.logprob,
           w.near_ties);
    fflush(stdout);
    double bound = exact ? 2e-5 : 3e-4;
    assert_true(w.hidden <= bound);
    assert_true(w.final_hidden <= bound);
    assert_true(w.logits <= bound);
    assert_true(w.mtp_logits <= bound);
    assert_true(w.logits > 0); /* float32 in another order: equal bits would mean that nothing was compared */
    assert_true(w.logprob <= (exact ? 1e-4 : 5e-3));
}

static void all_lanes_f32(void **state) {
    const ql_test_model *model = *state;
    for (int32_t i = 0; i < model->n_lanes; i++) {
        run_model(model, model->lanes[i], QL_KV_F32);
    }
}

/* The bits are those of every lane count (samebits.c), so the least and the most suffice. */
static void default_kv(void **state) {
    const ql_test_model *model = *state;
    run_model(model, 1, QL_KV_F16);
    run_model(model, model->lanes[model->n_lanes - 1], QL_KV_F16);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    struct CMUnitTest tests[2 * QL_TEST_MODELS];
    static char names[2 * QL_TEST_MODELS][64];
    for (int32_t i = 0; i < QL_TEST_MODELS; i++) {
        void *model = (void *)(uintptr_t)&ql_test_models[i];
        snprintf(names[2 * i], sizeof names[0], "%s f32 kv", ql_test_models[i].name);
        snprintf(names[2 * i + 1], sizeof names[0], "%s f16 kv", ql_test_models[i].name);
        tests[2 * i] = (struct CMUnitTest){names[2 * i], all_lanes_f32, NULL, NULL, model};
        tests[2 * i + 1] = (struct CMUnitTest){names[2 * i + 1], default_kv, NULL, NULL, model};
    }
    return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
