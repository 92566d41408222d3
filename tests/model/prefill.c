/* Decode equals prefill: the logits of generated steps, teacher-forced, against those of the same ids as one prompt.
 *
 * Prompt rows and generated rows use different kernels (chunked against recurrent GatedDeltaNet among them), so they
 * agree to rounding; rows of prompts of different lengths use the same and agree in every bit.
 */
#include "tests/model/sense.h"

enum { N = QL_TEST_FORCED };
#define BOUND 1e-4

static void forced(void **state) {
    const ql_test_model *model = *state;
    ql_options o = ql_test_options(model, model->lanes[1]);
    o.chunk = 64;
    double worst;
    ql_test_forced(&o, model, BOUND, &worst);
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
    ql_test_rows steps = ql_test_logits(engine, seq, 1, N - 1, seq + 1);
    ql_test_rows whole = ql_test_logits(engine, seq, N - 1, 1, NULL);
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
