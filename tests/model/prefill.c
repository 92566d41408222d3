/* Decode equals prefill: the logits of generated steps, teacher-forced, against those of the same ids as one prompt.
 *
 * Prompt rows and generated rows use different kernels (chunked against recurrent GatedDeltaNet among them), so they
 * agree to rounding; rows of prompts of different lengths use the same and agree in every bit.
 */
#include "runtime/engine/test_hooks.h"
#include "tests/model/common.h"

enum { N = 131 };
#define BOUND 1e-4

/* Logits [n + max_new - 1][vocab] of a prompt of n ids and its continuation; those of the whole sequence with
 * max_new 1. Also gives the generated ids where `out` is not NULL. */
static ql_test_rows logits_of(ql_engine *engine, const int32_t *ids, int32_t n, int32_t max_new, int32_t *out) {
    ql_test_probe probe = {0};
    ql_request r = ql_test_request(ids, n, max_new);
    r.ignore_eos = 1;
    r.probe = ql_test_probe_fn;
    r.probe_user = &probe;
    ql_result *res = ql_test_generate(engine, &r);
    assert_false(probe.bad);
    assert_int_equal(res->n_ids, max_new);
    assert_int_equal(probe.logits.n, n + max_new - 1);
    if (out) {
        memcpy(out, res->ids, (size_t)max_new * sizeof *out);
    }
    ql_result_free(res);
    ql_test_rows rows = probe.logits;
    probe.logits = (ql_test_rows){0};
    ql_test_probe_free(&probe);
    return rows;
}

static void forced(void **state) {
    const ql_test_model *model = *state;
    int32_t seq[N], force[N + 1];
    ql_test_ids(77, model->vocab < 1300 ? model->vocab : 1300, seq, N);
    ql_test_hooks hooks = {.force_ids = force, .n_force = N};
    ql_options o = ql_test_options(model, model->lanes[1]);
    o.chunk = 64;
    ql_engine *engine = ql_test_open_hooked(&o, &hooks);
    memset(force, 0, sizeof force);
    ql_test_rows whole = logits_of(engine, seq, N, 1, NULL);
    double worst = 0;
    for (int32_t n = 1; n < N; n++) {
        /* the engine reads the list when it chooses an id; between requests it is ours */
        memset(force, 0, sizeof force);
        memcpy(force, seq + n, (size_t)(N - n) * sizeof *force);
        int32_t max_new = n == 1 || n == 64 || n == 65 ? N - n + 1 : N - n < 2 ? N - n + 1 : 3;
        int32_t got[N];
        ql_test_rows rows = logits_of(engine, seq, n, max_new, got);
        assert_memory_equal(got, force, (size_t)(max_new - 1) * sizeof *got);
        assert_int_equal(rows.width, whole.width);
        if (memcmp(rows.values, whole.values, (size_t)n * (size_t)rows.width * sizeof *rows.values) != 0) {
            fail_msg("prompt of %d ids: logits of its rows differ from those of the longer prompt", n);
        }
        int64_t at = (int64_t)n * rows.width, bad = 0;
        double rel = ql_test_worst_rel(rows.values + at, whole.values + at, max_new - 1, rows.width, &bad);
        if (rel > BOUND) {
            fail_msg("prompt of %d ids: step %d decoded differs from prefill by %.2e", n, (int)bad + 1, rel);
        }
        worst = rel > worst ? rel : worst;
        free(rows.values);
    }
    free(whole.values);
    ql_engine_close(&engine);
    printf("  %-20s teacher-forced, prompts of 1..130 ids: worst relative L2 %.2e\n", model->name, worst);
    fflush(stdout);
    assert_true(worst > 0); /* the two phases use different orders of addition */
}

/* Without forcing: what the model itself says after one id, scored again as a prompt. */
static void own_ids(void **state) {
    const ql_test_model *model = *state;
    ql_options o = ql_test_options(model, 1);
    ql_engine *engine = ql_test_open(&o);
    int32_t seq[N] = {261};
    ql_test_rows steps = logits_of(engine, seq, 1, N - 1, seq + 1);
    ql_test_rows whole = logits_of(engine, seq, N - 1, 1, NULL);
    assert_int_equal(steps.n, whole.n);
    double worst = ql_test_worst_rel(steps.values, whole.values, steps.n, steps.width, NULL);
    free(steps.values);
    free(whole.values);
    ql_engine_close(&engine);
    printf("  %-20s own ids, 129 steps: worst relative L2 %.2e\n", model->name, worst);
    fflush(stdout);
    assert_true(worst <= BOUND);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest each[] = {{"forced", forced, NULL, NULL, NULL}, {"own ids", own_ids, NULL, NULL, NULL}};
    return ql_test_run_each("prefill", each, 2);
}
