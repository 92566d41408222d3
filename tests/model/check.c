/* The self-checks themselves: what they compare and how they report, and all of them on host lanes. */
#include "runtime/check/check_impl.h"
#include "tests/model/common.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- comparing ------------------------------------------------------------------------------------------------------- */

enum { ROWS = 3, WIDTH = 5, LD = 6 };

static void fill(float *got, float *want) {
    for (int32_t i = 0; i < ROWS * LD; i++) {
        got[i] = want[i] = ldexpf(1 + (float)(i % 7), 40 * (i % LD - 2)); /* channels 2^80 apart */
    }
}

static ql_check_error compare(const float *got, const float *want) {
    ql_check_error e, *out = &e;
    ql_error err = {0};
    assert_int_equal(ql_check_compare(got, want, ROWS, WIDTH, LD, NULL, out, &err), QL_OK);
    return e;
}

static void errors_are_seen(void **state) {
    (void)state;
    float got[ROWS * LD], want[ROWS * LD];
    fill(got, want);
    got[WIDTH] = NAN; /* outside the width */
    ql_check_error e = compare(got, want);
    assert_int_equal(e.compared, ROWS * WIDTH);
    assert_true(e.worst == 0 && e.overall == 0 && e.nothing == 0);
    assert_true(e.magnitude > 1 && e.magnitude < 8); /* the middle channel's */

    got[LD] *= 1.01f; /* in the smallest channel */
    e = compare(got, want);
    assert_int_equal(e.channel, 0);
    assert_true(e.worst > 1e-3 && e.worst < 1e-2);
    assert_true(fabs(e.overall - e.worst / sqrt(WIDTH)) < 1e-9);

    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int32_t i = 0; i < 3; i++) {
        fill(got, want);
        got[2 * LD + 3] = bad[i];
        e = compare(got, want);
        assert_true(isinf(e.worst) && isinf(e.overall));
        assert_int_equal(e.channel, 3);
    }

    fill(got, want);
    for (int32_t t = 0; t < ROWS; t++) { /* nothing is expected in channel 1 */
        got[t * LD + 1] = want[t * LD + 1] = 0;
    }
    e = compare(got, want);
    assert_true(e.worst == 0 && fabs(e.nothing - 1.0 / WIDTH) < 1e-9);
    got[1] = -0.0f;
    assert_true(compare(got, want).worst == 0);
    got[1] = 1e-30f;
    e = compare(got, want);
    assert_true(isinf(e.worst));
    assert_int_equal(e.channel, 1);
}

/* ---- running --------------------------------------------------------------------------------------------------------- */

enum { MAX_CASE = 512 };

typedef struct seen {
    char name[MAX_CASE][112];
    ql_check_outcome outcome[MAX_CASE];
    uint64_t compared;
    int32_t n, n_failed, n_broken;
    char note[512]; /* of the first failure */
} seen;

static void on_case(void *user, const ql_check_case *c) {
    seen *s = user;
    assert_true(s->n < MAX_CASE);
    snprintf(s->name[s->n], sizeof s->name[0], "%s", c->name);
    s->outcome[s->n++] = c->outcome;
    s->compared += c->compared;
    s->n_broken += strstr(c->name, "broken-") != NULL;
    if (c->outcome == QL_CHECK_FAILED && s->n_failed++ == 0) {
        snprintf(s->note, sizeof s->note, "%s: %s", c->name, c->note);
    }
}

static seen *run(int32_t lanes, const char *model, const char *name, int32_t flags) {
    seen *s = calloc(1, sizeof *s);
    ql_options opt = ql_options_default();
    ql_error err = {0};
    assert_non_null(s);
    opt.device = QL_DEVICE_HOST;
    opt.lanes = lanes;
    opt.model = model;
    opt.wait_ms *= QL_TEST_SLOWER;
    assert_int_equal(ql_check_run(&opt, &name, name ? 1 : 0, flags, on_case, s, &err), QL_OK);
    return s;
}

/* Every case of two lane counts passes, the wrong decodes among them, and listing names exactly what runs. */
static void all_on_host_lanes(void **state) {
    (void)state;
    static const int32_t lanes[] = {2, 4};
    for (size_t i = 0; i < (QL_TEST_SLOWER > 1 ? 1 : 2); i++) {
        seen *s = run(lanes[i], "tests/data/micro-lanes8", NULL, 0);
        seen *listed = run(lanes[i], NULL, NULL, QL_CHECK_LIST);
        if (s->n_failed) {
            fail_msg("%d of %d failed; %s", s->n_failed, s->n, s->note);
        }
        assert_true(s->n > 100 && s->compared > 1000000);
        assert_true(s->n_broken >= 20);
        assert_int_equal(s->n, listed->n);
        for (int32_t k = 0; k < s->n; k++) {
            assert_string_equal(s->name[k], listed->name[k]);
            assert_int_equal(s->outcome[k], QL_CHECK_PASSED);
            assert_int_equal(listed->outcome[k], QL_CHECK_LISTED);
            for (int32_t l = 0; l < k; l++) {
                assert_string_not_equal(s->name[k], s->name[l]);
            }
        }
        free(s);
        free(listed);
    }
}

/* A fault is a failed case and no failure of the call. */
static void failures_are_counted(void **state) {
    (void)state;
    seen *s = run(1, "tests/data/no-such-model", "precision", 0);
    assert_int_equal(s->n, 3); /* bf16, fp8, q8 */
    assert_int_equal(s->n_failed, 3);
    assert_non_null(strstr(s->note, "no-such-model"));
    free(s);
    s = run(8, "models/tiny", "precision.bf16", 0);
    assert_int_equal(s->n, 1);
    assert_int_equal(s->outcome[0], QL_CHECK_SKIPPED); /* it has 4 slices */
    free(s);
}

static void refusals(void **state) {
    (void)state;
    ql_options opt = ql_options_default();
    ql_error err = {0};
    const char *unknown = "nothing";
    seen *s = calloc(1, sizeof *s);
    assert_non_null(s);
    opt.device = QL_DEVICE_HOST;
    assert_int_equal(ql_check_run(&opt, &unknown, 1, 0, on_case, s, &err), QL_ERR_USAGE);
    assert_non_null(strstr(err.text, "nothing"));
    opt.lanes = 3;
    assert_int_equal(ql_check_run(&opt, NULL, 0, 0, on_case, s, &err), QL_ERR_USAGE);
    const int32_t gpu = 0;
    opt.lanes = 1;
    opt.devices = &gpu;
    assert_int_equal(ql_check_run(&opt, NULL, 0, 0, on_case, s, &err), QL_ERR_USAGE);
    opt.size = 1;
    assert_int_equal(ql_check_run(&opt, NULL, 0, 0, on_case, s, &err), QL_ERR_USAGE);
    assert_int_equal(s->n, 0);
    assert_null(ql_check_name(-1));
    int32_t n = 0;
    for (; ql_check_name(n); n++) {
        assert_non_null(ql_check_about(n));
    }
    assert_int_equal(n, 7);
    assert_null(ql_check_about(n));
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(errors_are_seen), cmocka_unit_test(refusals),
                                       cmocka_unit_test(failures_are_counted), cmocka_unit_test(all_on_host_lanes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
