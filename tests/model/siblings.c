/* The bundled model against its own FP8 siblings (tests/requant.h): the same weights in another format have to continue the
 * golden prompts with the same ids. Rounding weights again moves logits, so that only clear choices can be asked for:
 * per channel that is every golden id, in 128 x 128 blocks each one that the golden margin puts more than 1 ahead.
 */
#include "tests/model/common.h"
#include "tests/requant.h"

#include "runtime/base/num.h"

#include <math.h>
#include <unistd.h>

#define BLOCK_MARGIN 1.0

static const char *const files[] = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"};
static char folder[] = "/tmp/qlane-siblings-XXXXXX";

static ql_checkpoint *open_dir(const char *dir) {
    ql_error err = {0};
    ql_checkpoint *c = NULL;
    if (ql_checkpoint_open(&c, dir, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return c;
}

static int write_sibling(void **state) {
    const ql_qformat to = (ql_qformat)(uintptr_t)*state;
    ql_error err = {0};
    uint64_t bytes = 0;
    strcpy(folder + sizeof folder - 7, "XXXXXX");
    assert_non_null(mkdtemp(folder));
    ql_checkpoint *from = open_dir(ql_test_model_named("tiny")->dir);
    const ql_status status = ql_requant(from, to, folder, 2, &bytes, &err);
    ql_checkpoint_close(&from);
    if (status != QL_OK) {
        fail_msg("%s", err.text);
    }
    assert_true(bytes > 8 << 20);
    return 0;
}

static int remove_sibling(void **state) {
    (void)state;
    char path[128];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    return rmdir(folder);
}

/* ---- ids ------------------------------------------------------------------------------------------------------------- */

/* Golden ids that were asked for and given, and cases that left them at a choice too close to ask for. */
typedef struct tally {
    int32_t n_same, n_left;
} tally;

static void check_case(ql_engine *engine, const ql_test_case *c, double margin, tally *t) {
    const ql_request r = ql_test_request(c->prompt_ids, c->n_prompt, c->n_ids);
    ql_result *res = ql_test_generate(engine, &r);
    int32_t n = 0;
    while (n < c->n_ids && n < res->n_ids && res->ids[n] == c->ids[n]) {
        n++;
    }
    if (n < c->n_ids && !(c->margin[n] <= margin)) {
        fail_msg("prompt of %d ids: generated id %d is %d, golden %d (margin %g)", c->n_prompt, n,
                 n < res->n_ids ? res->ids[n] : -1, c->ids[n], c->margin[n]);
    }
    t->n_same += n;
    t->n_left += n < c->n_ids;
    ql_result_free(res);
}

static void same_ids(void **state) {
    const ql_qformat to = (ql_qformat)(uintptr_t)*state;
    const ql_test_model *tiny = ql_test_model_named("tiny");
    ql_test_model sibling = *tiny;
    ql_test_golden golden;
    sibling.dir = folder;
    ql_test_golden_load(&golden, tiny);
    for (int32_t i = 0; i < tiny->n_lanes; i++) {
        const ql_options o = ql_test_options(&sibling, tiny->lanes[i]);
        ql_engine *engine = ql_test_open(&o);
        tally t = {0};
        for (int32_t k = 0; k < golden.n; k++) {
            check_case(engine, &golden.cases[k], to == QL_FORMAT_FP8_BLOCK ? BLOCK_MARGIN : -1, &t);
        }
        ql_engine_close(&engine);
        printf("  %s, %d lanes: %d golden ids in %d cases, %d left at a close choice\n", ql_qformat_name(to),
               tiny->lanes[i], t.n_same, golden.n, t.n_left);
        assert_true(t.n_same > 100);
    }
    ql_test_golden_free(&golden);
}

/* ---- weights ----------------------------------------------------------------------------------------------------------- */

static float number_at(const ql_tensor *t, int64_t i) {
    float v;
    ql_dtype_to_f32(t->dtype, t->data + i * (ql_dtype_bits(t->dtype) / 8), 1, &v);
    return v;
}

/* One weight by docs/formats.md's table; *unit is what its code is multiplied by. */
static double weight_at(const ql_linear *l, int64_t r, int64_t c, double *unit) {
    const uint8_t *code = l->weight->data;
    const int64_t at = r * l->k + c;
    switch (l->format) {
    case QL_FORMAT_NVFP4:
        *unit = (double)ql_f32_of_e4m3(l->scale->data[at / 16]) / number_at(l->factor, 0);
        return ql_f32_of_e2m1((uint8_t)(c % 2 ? code[at / 2] >> 4 : code[at / 2] & 15)) * *unit;
    case QL_FORMAT_FP8_CHANNEL: *unit = number_at(l->scale, r); return ql_f32_of_e4m3(code[at]) * *unit;
    case QL_FORMAT_FP8_BLOCK:
        *unit = number_at(l->scale, r / 128 * ((l->k + 127) / 128) + c / 128);
        return ql_f32_of_e4m3(code[at]) * *unit;
    default: *unit = 1; return number_at(l->weight, at);
    }
}

typedef struct pair {
    const ql_checkpoint *sibling;
    ql_qformat to;
    int32_t n_rounded, n_kept;
} pair;

static const ql_linear *found; /* by find, which looks for `wanted` */
static const char *wanted;
static ql_status find(void *user, const ql_visit *v, ql_error *err) {
    (void)user, (void)err;
    found = v->linear && strcmp(v->linear->module, wanted) == 0 ? v->linear : found;
    return QL_OK;
}

static ql_status compare(void *user, const ql_visit *v, ql_error *err) {
    pair *p = user;
    const ql_linear *a = v->linear;
    if (!a) {
        return QL_OK;
    }
    wanted = a->module;
    found = NULL;
    assert_int_equal(ql_checkpoint_each(p->sibling, true, find, NULL, err), QL_OK);
    assert_non_null(found);
    const ql_linear *b = found;
    const bool plain = a->format < QL_FORMAT_FP8_CHANNEL, head = v->role == QL_ROLE_LM_HEAD;
    assert_int_equal(b->format, plain ? a->format : head && p->to == QL_FORMAT_FP8_BLOCK ? QL_FORMAT_BF16 : p->to);
    p->n_kept += a->format == b->format;
    p->n_rounded += a->format != b->format;
    for (int64_t r = 0; r < a->n; r++) {
        for (int64_t c = 0; c < a->k; c++) {
            double ua, ub;
            const double x = weight_at(a, r, c, &ua), y = weight_at(b, r, c, &ub);
            const double half = a->format == b->format        ? 0 /* kept */
                                : b->format == QL_FORMAT_BF16 ? fabs(x) / 256
                                                              : fmax(fabs(x) / 16, ub / 1024);
            if (!(fabs(x - y) <= half * (1 + 1e-6))) {
                fail_msg("%s[%d, %d] is %g, was %g", a->module, (int)r, (int)c, y, x);
            }
        }
    }
    return QL_OK;
}

static void same_weights(void **state) {
    ql_error err = {0};
    ql_checkpoint *tiny = open_dir(ql_test_model_named("tiny")->dir), *sibling = open_dir(folder);
    pair p = {.sibling = sibling, .to = (ql_qformat)(uintptr_t)*state};
    assert_int_equal(ql_checkpoint_each(tiny, true, compare, &p, &err), QL_OK);
    /* NVFP4 in the MLPs of layers 0 to 2; the rest FP8 per channel but for a and b of three layers and MTP. */
    assert_int_equal(p.n_rounded, p.to == QL_FORMAT_FP8_BLOCK ? 26 : 9);
    assert_int_equal(p.n_kept, p.to == QL_FORMAT_FP8_BLOCK ? 14 : 31);
    assert_null(ql_checkpoint_note(sibling, 0)); /* the configuration lists every plain weight */
    ql_checkpoint_close(&tiny);
    ql_checkpoint_close(&sibling);
}

static void other_formats(void **state) {
    (void)state;
    ql_error err = {0};
    uint64_t bytes = 0;
    ql_checkpoint *tiny = open_dir(ql_test_model_named("tiny")->dir);
    assert_int_equal(ql_requant(tiny, QL_FORMAT_NVFP4, "/nowhere", 1, &bytes, &err), QL_ERR_USAGE);
    ql_test_assert_has(err.text, "nvfp4; fp8-channel and fp8-block can");
    err = (ql_error){0};
    assert_int_equal(ql_requant(tiny, QL_FORMAT_FP8_BLOCK, "/nowhere", 1, &bytes, &err), QL_ERR_MODEL);
    ql_test_assert_has(err.text, "/nowhere/config.json");
    ql_checkpoint_close(&tiny);
}

#define SIBLING(test, format)                                                                                          \
    { #test " " #format, test, write_sibling, remove_sibling, (void *)(uintptr_t)QL_FORMAT_##format }

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        SIBLING(same_weights, FP8_CHANNEL), SIBLING(same_weights, FP8_BLOCK), SIBLING(same_ids, FP8_CHANNEL),
        SIBLING(same_ids, FP8_BLOCK),       cmocka_unit_test(other_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
