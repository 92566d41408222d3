/* Cuts of every part over every lane count, and the published bytes a lane of the 27B holds. */
#include "loader/shard.h"

#include "tests/synth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

static ql_config sizes(int32_t n_head, int32_t n_kv, int32_t n_key, int32_t n_value, int32_t mlp, int32_t vocab) {
    ql_config c = {.hidden = 256,
                   .n_layer = 4,
                   .intermediate = mlp,
                   .vocab = vocab,
                   .n_head = n_head,
                   .n_kv_head = n_kv,
                   .n_key_head = n_key,
                   .n_value_head = n_value};
    c.slices = ql_config_slices(n_head, n_value, mlp);
    return c;
}

static const struct {
    int32_t n_head, n_kv, n_key, n_value, mlp, vocab, slices;
} shapes[] = {
    {24, 4, 16, 48, 17408, 248320, 8}, /* 27B */
    {16, 4, 16, 32, 12288, 248320, 8}, {4, 2, 4, 8, 1024, 1344, 4}, {4, 1, 2, 4, 256, 512, 4},
    {4, 2, 2, 6, 256, 512, 2},         {6, 2, 2, 4, 384, 512, 2},   {8, 4, 8, 16, 512, 512, 8},
    {24, 3, 2, 8, 128, 1001, 8}, /* a slice that spans two KV heads, a vocabulary that 8 does not divide */
};

static ql_shard shard_of(const ql_config *c, int32_t n_lane, int32_t lane) {
    ql_shard s;
    ql_error err = {0};
    if (ql_shard_init(&s, c, n_lane, lane, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return s;
}

static void test_lane_counts_that_do_not_divide(void **state) {
    (void)state;
    static const struct {
        int32_t shape, n_lane;
        const char *accepted;
    } cases[] = {
        {0, 3, "1, 2, 4 or 8"}, {0, 16, "1, 2, 4 or 8"}, {0, 0, "1, 2, 4 or 8"},
        {4, 4, "1 or 2"},       {2, 8, "1, 2 or 4"},     {0, -1, "1, 2, 4 or 8"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        const int32_t k = cases[i].shape;
        ql_config c =
            sizes(shapes[k].n_head, shapes[k].n_kv, shapes[k].n_key, shapes[k].n_value, shapes[k].mlp, shapes[k].vocab);
        ql_shard s;
        ql_error err = {0};
        char given[32];
        snprintf(given, sizeof given, "%d lanes", cases[i].n_lane);
        assert_int_equal(ql_shard_init(&s, &c, cases[i].n_lane, 0, &err), QL_ERR_USAGE);
        assert_non_null(strstr(err.text, given));
        assert_non_null(strstr(err.text, cases[i].accepted));
    }
}

/* Heads, channels and rows that belong to one lane alone are covered once; shared heads are where they are used. */
static void test_lanes_cover_the_model(void **state) {
    (void)state;
    for (size_t k = 0; k < LEN(shapes); k++) {
        ql_config c =
            sizes(shapes[k].n_head, shapes[k].n_kv, shapes[k].n_key, shapes[k].n_value, shapes[k].mlp, shapes[k].vocab);
        assert_int_equal(c.slices, shapes[k].slices);
        for (int32_t n = 1; n <= c.slices; n *= 2) {
            int32_t q = 0, v = 0, m = 0, vocab = 0;
            for (int32_t lane = 0; lane < n; lane++) {
                ql_shard s = shard_of(&c, n, lane);
                assert_int_equal(s.q0, q);
                assert_int_equal(s.v0, v);
                assert_int_equal(s.m0, m);
                assert_int_equal(s.vocab0, vocab);
                q = s.q1, v = s.v1, m = s.m1, vocab = s.vocab1;
                assert_int_equal(s.q1 - s.q0, c.n_head / n);
                assert_int_equal((s.m1 - s.m0) % 16, 0);
                const int32_t per_kv = c.n_head / c.n_kv_head, per_key = c.n_value_head / c.n_key_head;
                assert_int_equal(s.kv0, s.q0 / per_kv);
                assert_int_equal(s.kv1, (s.q1 - 1) / per_kv + 1);
                assert_int_equal(s.k0, s.v0 / per_key);
                assert_int_equal(s.k1, (s.v1 - 1) / per_key + 1);
            }
            assert_int_equal(q, c.n_head);
            assert_int_equal(v, c.n_value_head);
            assert_int_equal(m, c.intermediate);
            assert_int_equal(vocab, c.vocab);
        }
    }
}

/* Each lane's vocabulary is a union of the 8 canonical ranges. */
static void test_vocabulary_follows_canonical_ranges(void **state) {
    (void)state;
    ql_config c = sizes(8, 4, 8, 16, 512, 1001);
    for (int32_t n = 1; n <= 8; n *= 2) {
        for (int32_t lane = 0; lane < n; lane++) {
            ql_shard s = shard_of(&c, n, lane);
            assert_int_equal(s.vocab0, 1001 * (lane * 8 / n) / 8);
            assert_int_equal(s.vocab1, 1001 * ((lane + 1) * 8 / n) / 8);
        }
    }
}

/* in_proj_qkv is three sections; a lane takes its part of each, not one contiguous piece. */
static void test_27b_cuts(void **state) {
    (void)state;
    ql_config c = sizes(24, 4, 16, 48, 17408, 248320);
    ql_shard s = shard_of(&c, 2, 1);
    ql_cut cut = ql_shard_cut(&c, &s, QL_PART_IN_QKV);
    assert_int_equal(cut.axis, 0);
    assert_int_equal(cut.n_range, 3);
    static const int32_t begin[3] = {1024, 2048 + 1024, 4096 + 3072}, end[3] = {2048, 4096, 10240};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(cut.begin[i], begin[i]);
        assert_int_equal(cut.end[i], end[i]);
    }
    assert_int_equal(ql_cut_len(&cut), 5120);
    static const struct {
        ql_part part;
        int32_t axis, begin, end;
    } cases[] = {
        {QL_PART_Q, 0, 6144, 12288},    {QL_PART_KV, 0, 512, 1024},     {QL_PART_O, 1, 3072, 6144},
        {QL_PART_VALUE, 0, 3072, 6144}, {QL_PART_OUT, 1, 3072, 6144},   {QL_PART_VALUE_HEAD, 0, 24, 48},
        {QL_PART_MLP, 0, 8704, 17408},  {QL_PART_DOWN, 1, 8704, 17408}, {QL_PART_VOCAB, 0, 124160, 248320},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        cut = ql_shard_cut(&c, &s, cases[i].part);
        assert_int_equal(cut.axis, cases[i].axis);
        assert_int_equal(cut.n_range, 1);
        assert_int_equal(cut.begin[0], cases[i].begin);
        assert_int_equal(cut.end[0], cases[i].end);
    }
    cut = ql_shard_cut(&c, &s, QL_PART_WHOLE);
    assert_int_equal(cut.axis, -1);
    assert_int_equal(ql_cut_len(&cut), 0);
    s = shard_of(&c, 8, 5); /* KV heads shared by two lanes */
    assert_int_equal(s.q0, 15);
    assert_int_equal(s.kv0, 2);
    assert_int_equal(s.kv1, 3);
    assert_int_equal(s.k1 - s.k0, 2);
}

/* ---- bytes ---------------------------------------------------------------------------------------------------- */

static void stored(ql_qformat format, ql_dtype scale_dtype, int32_t n, int32_t k, ql_cut cut, uint64_t weight,
                   uint64_t scale) {
    ql_tensor s = {.dtype = scale_dtype};
    ql_linear l = {.format = format, .n = n, .k = k, .scale = &s};
    uint64_t w = 1, b = 1;
    ql_linear_stored_bytes(&l, &cut, &w, &b);
    assert_int_equal(w, weight);
    assert_int_equal(b, scale);
}

static void test_stored_bytes_by_format(void **state) {
    (void)state;
    const ql_cut whole = {.axis = -1};
    const ql_cut rows = {.axis = 0, .n_range = 1, .begin = {192}, .end = {384}};
    const ql_cut cols = {.axis = 1, .n_range = 1, .begin = {192}, .end = {384}};
    const ql_cut three = {.axis = 0, .n_range = 3, .begin = {0, 256, 512}, .end = {128, 384, 768}};
    stored(QL_FORMAT_BF16, QL_DTYPE_BF16, 384, 512, whole, 2 * 384 * 512, 0);
    stored(QL_FORMAT_F32, QL_DTYPE_BF16, 384, 512, rows, 4 * 192 * 512, 0);
    /* row scales go with rows and stay whole for columns */
    stored(QL_FORMAT_FP8_CHANNEL, QL_DTYPE_BF16, 384, 512, rows, 192 * 512, 192 * 2);
    stored(QL_FORMAT_FP8_CHANNEL, QL_DTYPE_F32, 256, 384, cols, 256 * 192, 256 * 4);
    /* a single factor is not counted */
    stored(QL_FORMAT_FP8_TENSOR, QL_DTYPE_F32, 384, 512, rows, 192 * 512, 0);
    /* half a block on either side takes the block's scale along: blocks 1 and 2 of 3 */
    stored(QL_FORMAT_FP8_BLOCK, QL_DTYPE_BF16, 384, 512, rows, 192 * 512, 2 * 4 * 2);
    stored(QL_FORMAT_FP8_BLOCK, QL_DTYPE_BF16, 256, 384, cols, 256 * 192, 2 * 2 * 2);
    stored(QL_FORMAT_FP8_BLOCK, QL_DTYPE_BF16, 300, 200, whole, 300 * 200, 3 * 2 * 2);
    stored(QL_FORMAT_FP8_BLOCK, QL_DTYPE_BF16, 768, 128, three, 512 * 128, (1 + 1 + 2) * 2);
    stored(QL_FORMAT_NVFP4, QL_DTYPE_F8_E4M3, 384, 512, rows, 192 * 256, 192 * 32);
    stored(QL_FORMAT_NVFP4, QL_DTYPE_F8_E4M3, 256, 384, cols, 256 * 96, 256 * 12);

    const ql_tensor conv = {.dtype = QL_DTYPE_BF16, .rank = 3, .shape = {768, 1, 4}, .n_elem = 3072, .bytes = 6144};
    assert_int_equal(ql_tensor_stored_bytes(&conv, &three), 512 * 4 * 2);
    assert_int_equal(ql_tensor_stored_bytes(&conv, &whole), 6144);
}

/* ---- a whole checkpoint, from headers alone --------------------------------------------------------------------- */

static char folder[] = "/tmp/ql-shard-XXXXXX";

static int set_up(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

static ql_checkpoint *open_27b(ql_synth_scheme scheme) {
    ql_synth o = {.scheme = scheme, .prefix = "model.language_model.", .sparse = true};
    ql_synth_shape(&o.config, "27b");
    uint64_t bytes;
    ql_error err = {0};
    ql_checkpoint *c = NULL;
    if (ql_synth_write(&o, folder, &bytes, &err) != QL_OK || ql_checkpoint_open(&c, folder, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return c;
}

typedef struct sum {
    const ql_config *config;
    ql_shard shard;
    uint64_t weight, scale;
} sum;

static ql_status add(void *user, const ql_visit *v, ql_error *err) {
    (void)err;
    sum *s = user;
    const ql_cut cut = ql_shard_cut(s->config, &s->shard, v->part);
    uint64_t weight = 0, scale = 0;
    if (v->tensor) {
        weight = ql_tensor_stored_bytes(v->tensor, &cut);
    } else {
        ql_linear_stored_bytes(v->linear, &cut, &weight, &scale);
    }
    s->weight += weight;
    s->scale += scale;
    return QL_OK;
}

static void assert_lane_bytes(const ql_checkpoint *c, int32_t n_lane, uint64_t weight, uint64_t scale) {
    for (int32_t lane = 0; lane < n_lane; lane++) {
        sum s = {.config = &c->config, .shard = shard_of(&c->config, n_lane, lane)};
        ql_error err = {0};
        assert_int_equal(ql_checkpoint_each(c, false, add, &s, &err), QL_OK);
        assert_int_equal(s.weight, weight);
        assert_int_equal(s.scale, scale);
    }
}

static void test_27b_mixed_lane_bytes(void **state) {
    (void)state;
    ql_checkpoint *c = open_27b(QL_SYNTH_MIXED);
    ql_checkpoint_info info;
    ql_checkpoint_get_info(c, &info);
    assert_int_equal(info.n_tensors, 1968);
    assert_int_equal(info.n_linears, 497);
    assert_int_equal(info.n_nvfp4, 168);
    assert_int_equal(info.n_fp8, 233);
    assert_int_equal(info.n_plain, 96);
    assert_int_equal(info.mtp_bytes, 849398784);
    assert_lane_bytes(c, 2, 10354076160u, 470206976u);
    /* one lane holds the model once, and the summary says the same */
    assert_lane_bytes(c, 1, info.weight_bytes, info.scale_bytes);
    ql_checkpoint_close(&c);
}

static void test_27b_block_fp8_lane_bytes(void **state) {
    (void)state;
    ql_checkpoint *c = open_27b(QL_SYNTH_FP8_BLOCK);
    assert_lane_bytes(c, 4, 7367270656u, 742400u);
    ql_checkpoint_close(&c);
}

/* The whole 27B is 26,895,998,464 parameters and its MTP module 424,699,392. */
static void test_27b_parameters(void **state) {
    (void)state;
    ql_checkpoint *c = open_27b(QL_SYNTH_BF16);
    ql_checkpoint_info info;
    ql_checkpoint_get_info(c, &info);
    assert_int_equal(info.weight_bytes, 2 * 26895998464u);
    assert_int_equal(info.mtp_bytes, 2 * 424699392u);
    assert_int_equal(info.n_tensors, 851 + 15);
    ql_checkpoint_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lane_counts_that_do_not_divide),
        cmocka_unit_test(test_lanes_cover_the_model),
        cmocka_unit_test(test_vocabulary_follows_canonical_ranges),
        cmocka_unit_test(test_27b_cuts),
        cmocka_unit_test(test_stored_bytes_by_format),
        cmocka_unit_test(test_27b_mixed_lane_bytes),
        cmocka_unit_test(test_27b_block_fp8_lane_bytes),
        cmocka_unit_test(test_27b_parameters),
    };
    return cmocka_run_group_tests_name("shard", tests, set_up, tear_down);
}
