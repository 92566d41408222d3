#include "tests/model/bits.h"

#include "runtime/engine/test_hooks.h"

ql_test_answer ql_test_take(ql_result *res) {
    ql_test_answer a = {.crc = res->logits_crc32, .n = res->n_ids};
    assert_int_equal(res->has_crc, 1);
    assert_in_range(res->n_ids, 1, QL_TEST_ANSWER);
    memcpy(a.ids, res->ids, (size_t)a.n * sizeof *a.ids);
    memcpy(a.logprobs, res->logprobs, (size_t)a.n * sizeof *a.logprobs);
    ql_result_free(res);
    return a;
}

void ql_test_same(const ql_test_answer *got, const ql_test_answer *want, const ql_options *o, const char *company,
                  int32_t request) {
    char what[160];
    snprintf(what, sizeof what, "%s lanes %d chunk %d kv %d precision %d %s: request %d", o->model, o->lanes, o->chunk,
             (int)o->kv, (int)o->gen_precision, company, request);
    if (got->n != want->n) {
        fail_msg("%s: %d ids, the reference has %d", what, got->n, want->n);
    }
    for (int32_t i = 0; i < want->n; i++) {
        if (got->ids[i] != want->ids[i] || memcmp(&got->logprobs[i], &want->logprobs[i], sizeof(float)) != 0) {
            fail_msg("%s: id %d of %d is %d at %.9g, the reference has %d at %.9g", what, i, want->n, got->ids[i],
                     (double)got->logprobs[i], want->ids[i], (double)want->logprobs[i]);
        }
    }
    if (got->crc != want->crc) {
        fail_msg("%s: crc %08x, the reference has %08x", what, got->crc, want->crc);
    }
}

uint32_t ql_test_crc(ql_engine *engine) {
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 6);
    r.ignore_eos = 1;
    ql_test_answer a = ql_test_take(ql_test_generate(engine, &r));
    assert_int_equal(a.n, 6);
    return a.crc;
}

void ql_test_eight_init(ql_test_eight *eight, const ql_test_model *model, int32_t first) {
    const int32_t lengths[QL_TEST_EIGHT] = {first, 1, 63, 64, 65, 200, 20, 7};
    for (int32_t i = 0; i < QL_TEST_EIGHT; i++) {
        /* ids past 1300 are control tokens in tiny; they are as good as any, but keep clear of untrained ones */
        ql_test_ids((uint64_t)i + 1, model->vocab < 1300 ? model->vocab : 1300, eight->ids[i], lengths[i]);
        eight->r[i] = ql_test_request(eight->ids[i], lengths[i], QL_TEST_EIGHT_NEW);
        eight->r[i].ignore_eos = 1;
    }
    eight->r[6].sampling.temperature = 0.8f; /* the whole vocabulary */
    eight->r[6].sampling.seed = 5;
    eight->r[7].sampling = (ql_sampling){.temperature = 0.8f,
                                         .top_k = 40,
                                         .top_p = 0.9f,
                                         .min_p = 0.02f,
                                         .repetition_penalty = 1.2f,
                                         .presence_penalty = 0.5f,
                                         .frequency_penalty = 0.25f,
                                         .seed = 6};
}

void ql_test_eight_alone(const ql_options *o, const ql_test_eight *eight, ql_test_answer want[QL_TEST_EIGHT]) {
    enum { WHOLE = 512 };
    ql_options one = *o;
    one.lanes = 1;
    one.chunk = WHOLE;
    ql_engine *engine = ql_test_open(&one);
    for (int32_t i = 0; i < QL_TEST_EIGHT; i++) {
        want[i] = ql_test_take(ql_test_generate(engine, &eight->r[i]));
        assert_int_equal(want[i].n, QL_TEST_EIGHT_NEW);
    }
    ql_engine_close(&engine);
}

void ql_test_eight_together(const ql_options *o, const ql_test_eight *eight, const ql_test_answer want[QL_TEST_EIGHT]) {
    ql_engine *engine = ql_test_open(o);
    ql_test_answer got = ql_test_take(ql_test_generate(engine, &eight->r[0]));
    ql_test_same(&got, &want[0], o, "alone", 0);
    ql_request_id id[QL_TEST_EIGHT];
    for (int32_t i = QL_TEST_EIGHT; i-- > 0;) {
        id[i] = ql_test_submit(engine, &eight->r[i]);
    }
    for (int32_t i = 0; i < QL_TEST_EIGHT; i++) {
        got = ql_test_take(ql_test_wait(engine, id[i]));
        ql_test_same(&got, &want[i], o, "in a batch of 8", i);
    }
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}

void ql_test_steps_of_rows(const ql_options *o, const ql_request *r, const int32_t *forced, int32_t n) {
    enum { MOST = 5 };
    const ql_test_hooks hooks = {.force_ids = forced, .n_force = n};
    ql_options wide = *o;
    wide.max_seqs = MOST;
    ql_engine *engine = ql_test_open_hooked(&wide, &hooks);
    ql_request rows = *r;
    rows.crc = 1;
    rows.sampling.temperature = 1; /* drawn, so that log probabilities tell at which place an id was */
    rows.sampling.seed = 7;
    ql_test_answer want = ql_test_take(ql_test_generate(engine, &rows));
    assert_memory_equal(want.ids, forced, (size_t)(want.n < n ? want.n : n) * sizeof *forced);
    for (rows.step_rows = 2; rows.step_rows <= MOST; rows.step_rows++) {
        for (int company = 0; company < 2; company++) {
            ql_request_id id[2];
            for (int i = 0; i <= company; i++) {
                id[i] = ql_test_submit(engine, &rows);
            }
            for (int i = 0; i <= company; i++) {
                ql_test_answer got = ql_test_take(ql_test_wait(engine, id[i]));
                ql_test_same(&got, &want, &wide, company ? "as rows beside rows" : "as rows", rows.step_rows);
            }
        }
    }
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}
