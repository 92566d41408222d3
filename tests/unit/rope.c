/* The rotary table against independent values.
 *
 * Those of YaRN are what `_compute_yarn_parameters` of Hugging Face transformers 5.24.0 (modeling_rope_utils.py) returns when its
 * torch calls are carried out by numpy in float64: frequencies of every pair, and the factor of cosine and sine. The first is
 * how this family's longer context is configured (theta 1e7, 64 rotary dimensions, factor 4 over 262,144); in the second the
 * ramp covers other pairs; in the third it would begin before the first pair. Without YaRN the frequencies are powers of
 * theta.
 */
#include "runtime/model/model_impl.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static const double f_qwen27b[] = {1,
                                   0.60429639023813275,
                                   0.36517412725483767,
                                   0.22067340690845899,
                                   0.1333521432163324,
                                   0.080584218776148187,
                                   0.048696752516586311,
                                   0.029427271762092817,
                                   0.017782794100389229,
                                   0.010746078283213174,
                                   0.0064938163157621138,
                                   0.0039241897584845363,
                                   0.0023713737056616549,
                                   0.0014330125702369627,
                                   0.00086596432336006539,
                                   0.00047423982268010459,
                                   0.00025693505988868084,
                                   0.0001373497450760004,
                                   7.2173874043091133e-05,
                                   3.7072249820680398e-05,
                                   1.8449222025000475e-05,
                                   8.7597700711790042e-06,
                                   3.8498163151487305e-06,
                                   2.3264301023242476e-06,
                                   1.4058533129758728e-06,
                                   8.4955208223563982e-07,
                                   5.1338125661428652e-07,
                                   3.1023444018792988e-07,
                                   1.8747355233311396e-07,
                                   1.1328959094002045e-07,
                                   6.8460490856609035e-08,
                                   4.137042749857954e-08};
static const double f_short_ctx[] = {1,
                                     0.56234132519034907,
                                     0.31622776601683794,
                                     0.17782794100389226,
                                     0.10000000000000001,
                                     0.049204865954155547,
                                     0.023717082451262844,
                                     0.011114246312743268,
                                     0.0050000000000000001,
                                     0.002108779969463809,
                                     0.00079056941504209496,
                                     0.00022228492625486537,
                                     0.000125,
                                     7.0292665648793637e-05,
                                     3.9528470752104742e-05,
                                     2.2228492625486534e-05};
static const double f_no_low[] = {1,
                                  0.45690232671715864,
                                  0.19764235376052369,
                                  0.077799724189202862,
                                  0.024999999999999998,
                                  0.0035146332824396815,
                                  0.001976423537605237,
                                  0.0011114246312743268,
                                  0.00062500000000000001,
                                  0.00035146332824396819,
                                  0.00019764235376052369,
                                  0.00011114246312743269,
                                  6.2500000000000001e-05,
                                  3.5146332824396819e-05,
                                  1.9764235376052371e-05,
                                  1.1114246312743267e-05};

typedef struct scaled {
    int32_t rotary_dim, original_ctx;
    double theta, factor, attention;
    const double *f;
} scaled;

static const scaled cases[] = {
    {64, 262144, 1e+07, 4, 1.1386294361119891, f_qwen27b},
    {32, 2048, 10000, 8, 1.2079441541679836, f_short_ctx},
    {32, 64, 10000, 16, 1.2772588722239782, f_no_low},
};

static const int64_t positions[] = {0, 1, 2, 63, 1000, 262143, 1048575};
enum { N_POS = sizeof positions / sizeof *positions };

/* The rows of some positions, each filled alone: rows beside it must stay as they are. */
static void check(const ql_config *c, const double *f, double attention) {
    const int32_t half = c->rotary_dim / 2, width = 2 * half;
    for (int32_t k = 0; k < N_POS; k++) {
        const int64_t p = positions[k];
        float *rows = malloc(3 * (size_t)width * sizeof(float));
        assert_non_null(rows);
        for (int32_t i = 0; i < 3 * width; i++) {
            rows[i] = 77;
        }
        ql_rope_fill(c, p, p + 1, rows + width);
        for (int32_t i = 0; i < width; i++) {
            assert_true(rows[i] == 77 && rows[2 * width + i] == 77);
            const double angle = (double)p * f[i / 2], want = attention * (i % 2 ? sin(angle) : cos(angle));
            const double got = (double)rows[width + i];
            if (!(fabs(got - want) <= 1e-7 * attention)) {
                fail_msg("theta %g, factor %g, position %lld, pair %d, %s: %.9g, not %.9g", c->rope_theta,
                         c->yarn_factor, (long long)p, i / 2, i % 2 ? "sine" : "cosine", got, want);
            }
        }
        free(rows);
    }
}

static void yarn(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const scaled *s = &cases[k];
        const ql_config c = {.rotary_dim = s->rotary_dim,
                             .rope_theta = s->theta,
                             .yarn_factor = s->factor,
                             .yarn_original_ctx = s->original_ctx};
        check(&c, s->f, s->attention);
    }
}

static void plain(void **state) {
    (void)state;
    const ql_config c = {.rotary_dim = 64, .rope_theta = 1e7, .yarn_factor = 1};
    double f[32];
    for (int32_t i = 0; i < 32; i++) {
        f[i] = exp(-i / 32.0 * 7 * log(10));
    }
    assert_true(fabs(f[16] - 3.1622776601683795e-4) < 1e-18); /* the root of 1e-7 */
    check(&c, f, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yarn),
        cmocka_unit_test(plain),
    };
    return cmocka_run_group_tests_name("rope", tests, NULL, NULL);
}
