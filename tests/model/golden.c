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

static void check_case(ql_engine *engine, const ql_test_case *c, bool exact, double *logprob, int32_t *near_ties) {
    ql_request r = ql_test_request(c->prompt_ids, c->n_prompt, c->n_ids);
    ql_result *res = ql_test_generate(engine, &r);
    assert_int_equal(res->n_prompt, c->n_prompt);
    assert_memory_equal(res->prompt_ids, c->prompt_ids, (size_t)c->n_prompt * sizeof *c->prompt_ids);
    int32_t n = 0;
    while (n < c->n_ids && n < res->n_ids && res->ids[n] == c->ids[n]) {
        ql_test_raise(logprob, fabs(res->logprobs[n] - c->logprob[n]));
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
        (*near_ties)++;
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

static void run_model(const ql_test_model *model, int32_t lanes, ql_kv_type kv, ql_order order) {
    ql_test_golden golden;
    ql_test_golden_load(&golden, model);
    ql_options o = ql_test_options(model, lanes);
    o.kv = kv;
    o.order = order;
    o.mtp = model->mtp;
    ql_engine *engine = ql_test_open(&o);
    ql_stats s = ql_test_stats(engine);
    assert_int_equal(s.n_lanes, lanes);
    assert_int_equal(s.slices, model->slices);
    assert_int_equal(s.device, QL_DEVICE_HOST);

    bool exact = kv == QL_KV_F32;
    ql_test_errors e = {0};
    double logprob = 0;
    int32_t near_ties = 0;
    ql_test_golden_probe(engine, model, &golden, &e);
    for (int32_t i = 0; i < golden.n; i++) {
        check_case(engine, &golden.cases[i], exact, &logprob, &near_ties);
    }
    ql_engine_close(&engine);
    ql_test_golden_free(&golden);

    printf(
        "  %-20s lanes %d kv %s%s  worst relative L2: hidden %.2e final %.2e logits %.2e mtp %.2e; logprob %.1e; near "
        "ties %d\n",
        model->name, lanes, exact ? "f32" : "f16", order == QL_ORDER_FAST ? " fast" : "", e.hidden, e.final_hidden,
        e.logits, e.mtp_logits, logprob, near_ties);
    fflush(stdout);
    double bound = exact ? 2e-5 : 3e-4;
    assert_true(e.hidden <= bound);
    assert_true(e.final_hidden <= bound);
    assert_true(e.logits <= bound);
    assert_true(e.mtp_logits <= bound);
    assert_true(e.logits > 0); /* float32 in another order: equal bits would mean that nothing was compared */
    assert_true(logprob <= (exact ? 1e-4 : 5e-3));
}

static void all_lanes_f32(void **state) {
    const ql_test_model *model = *state;
    for (int32_t i = 0; i < model->n_lanes; i++) {
        run_model(model, model->lanes[i], QL_KV_F32, QL_ORDER_TREE);
    }
}

static void fast_order(void **state) {
    const ql_test_model *model = *state;
    for (int32_t i = 0; i < model->n_lanes; i++) {
        run_model(model, model->lanes[i], QL_KV_F32, QL_ORDER_FAST);
    }
}

/* The bits are those of every lane count (samebits.c), so the least and the most suffice. */
static void default_kv(void **state) {
    const ql_test_model *model = *state;
    run_model(model, 1, QL_KV_F16, QL_ORDER_TREE);
    run_model(model, model->lanes[model->n_lanes - 1], QL_KV_F16, QL_ORDER_TREE);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest each[] = {{"f32 kv", all_lanes_f32, NULL, NULL, NULL},
                                      {"f32 kv, fast order", fast_order, NULL, NULL, NULL},
                                      {"f16 kv", default_kv, NULL, NULL, NULL}};
    return ql_test_run_each("golden", each, 3);
}
