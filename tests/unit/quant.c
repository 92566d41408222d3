/* What each quantization scheme says of each module, and what is refused. */
#include "loader/quant.h"

#include "tests/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

#define FP8_CHANNEL "'weights':{'num_bits':8,'type':'float','strategy':'channel','symmetric':true}"
#define NVFP4 "'weights':{'num_bits':4,'type':'float','strategy':'tensor_group','group_size':16,'symmetric':true}"

static ql_quant *open_quant(const char *text) {
    json_t *cfg = text ? ql_test_json(text) : NULL;
    ql_quant *q = NULL;
    ql_error err = {0};
    if (ql_quant_open(&q, cfg, &err) != QL_OK) {
        fail_msg("refused: %s", err.text);
    }
    json_decref(cfg);
    return q;
}

static void refuse(const char *text, const char *a, const char *b) {
    json_t *cfg = ql_test_json(text);
    ql_quant *q = NULL;
    ql_error err = {0};
    assert_int_equal(ql_quant_open(&q, cfg, &err), QL_ERR_MODEL);
    assert_null(q);
    if (!strstr(err.text, a) || !strstr(err.text, b)) {
        fail_msg("\"%s\" does not contain \"%s\" and \"%s\"", err.text, a, b);
    }
    json_decref(cfg);
}

static void expect(const ql_quant *q, const char *module, ql_expect want, const char *rule_part) {
    ql_expect got;
    const char *rule;
    ql_error err = {0};
    assert_int_equal(ql_quant_expect(q, module, &got, &rule, &err), QL_OK);
    if (got != want || !strstr(rule, rule_part)) {
        fail_msg("%s: %d by %s; expected %d by %s", module, got, rule, want, rule_part);
    }
}

static void test_none(void **state) {
    (void)state;
    ql_quant *q = open_quant(NULL);
    expect(q, "layers.0.mlp.up_proj", QL_EXPECT_PLAIN, "no entry");
    assert_string_equal(ql_quant_text(q), "none");
    ql_quant_close(&q);
    ql_quant_close(&q);
}

/* ---- compressed-tensors ---------------------------------------------------------------------------------------- */

static void test_first_group_wins_where_regexes_overlap(void **state) {
    (void)state;
    ql_quant *q =
        open_quant("{'quant_method':'compressed-tensors','format':'mixed-precision','config_groups':{"
                   "'group_0':{" FP8_CHANNEL ",'targets':['re:.*lm_head','re:.*self_attn\\\\.(q|k|v|o)_proj$',"
                   "'re:.*layers\\\\.(56|57)\\\\.mlp\\\\.(gate|up|down)_proj$']},"
                   "'group_1':{" NVFP4 ",'targets':['re:.*mlp\\\\.(gate|up|down)_proj$']}},"
                   "'ignore':['re:^mtp.*']}");
    expect(q, "lm_head", QL_EXPECT_FP8, "group_0 \"re:.*lm_head\"");
    expect(q, "layers.3.self_attn.q_proj", QL_EXPECT_FP8, "group_0");
    expect(q, "layers.55.mlp.up_proj", QL_EXPECT_NVFP4, "group_1");
    expect(q, "layers.56.mlp.up_proj", QL_EXPECT_FP8, "group_0");
    expect(q, "layers.5.mlp.up_proj", QL_EXPECT_NVFP4, "group_1");
    expect(q, "layers.0.linear_attn.in_proj_a", QL_EXPECT_PLAIN, "no entry");
    expect(q, "mtp.layers.0.mlp.up_proj", QL_EXPECT_PLAIN, "ignore");
    assert_string_equal(ql_quant_text(q), "compressed-tensors (2 groups)");
    ql_quant_close(&q);
}

static void test_ignore_beats_groups_and_is_no_prefix(void **state) {
    (void)state;
    ql_quant *q =
        open_quant("{'quant_method':'compressed-tensors','config_groups':{'group_0':{" FP8_CHANNEL
                   ",'targets':['Linear']}},'ignore':['lm_head','model.language_model.layers.0.linear_attn',"
                   "'model.language_model.layers.0.linear_attn.in_proj_a','model.layers.0.mlp.gate_up_proj']}");
    expect(q, "lm_head", QL_EXPECT_PLAIN, "ignore \"lm_head\"");
    expect(q, "layers.0.linear_attn.in_proj_a", QL_EXPECT_PLAIN, "ignore");
    expect(q, "layers.0.linear_attn.in_proj_qkv", QL_EXPECT_FP8, "group_0"); /* its parent is ignored, it is not */
    expect(q, "layers.0.mlp.gate_proj", QL_EXPECT_FP8, "group_0");           /* a fused name covers nothing */
    expect(q, "mtp.fc", QL_EXPECT_FP8, "group_0");
    ql_quant_close(&q);
}

static void test_regexes_match_at_the_start(void **state) {
    (void)state;
    ql_quant *q = open_quant("{'quant_method':'compressed-tensors','config_groups':{'group_0':{" NVFP4
                             ",'targets':['re:mlp','re:model\\\\.layers\\\\.1\\\\.']}}}");
    expect(q, "layers.0.mlp.up_proj", QL_EXPECT_PLAIN, "no entry"); /* not a search */
    expect(q, "layers.1.mlp.up_proj", QL_EXPECT_NVFP4, "group_0");  /* and not a full match */
    expect(q, "layers.11.mlp.up_proj", QL_EXPECT_PLAIN, "no entry");
    assert_string_equal(ql_quant_text(q), "compressed-tensors (1 group)");
    ql_quant_close(&q);
}

/* Converters rename prefixes of tensors and leave the configuration alone, or the other way round. */
static void test_entries_match_under_any_prefix(void **state) {
    (void)state;
    static const char *const prefixes[] = {"model.", "model.language_model.", "language_model.model."};
    for (size_t i = 0; i < LEN(prefixes); i++) {
        char text[1024];
        snprintf(text, sizeof text,
                 "{'quant_method':'compressed-tensors','config_groups':{'group_0':{" FP8_CHANNEL
                 ",'targets':['%slayers.2.mlp.up_proj','re:^%slayers\\\\.3\\\\.']},"
                 "'group_1':{" NVFP4 ",'targets':['Linear']}},'ignore':['%slayers.4.mlp.up_proj']}",
                 prefixes[i], prefixes[i], prefixes[i]);
        ql_quant *q = open_quant(text);
        expect(q, "layers.2.mlp.up_proj", QL_EXPECT_FP8, "group_0");
        expect(q, "layers.3.mlp.up_proj", QL_EXPECT_FP8, "group_0");
        expect(q, "layers.4.mlp.up_proj", QL_EXPECT_PLAIN, "ignore");
        expect(q, "layers.5.mlp.up_proj", QL_EXPECT_NVFP4, "group_1");
        ql_quant_close(&q);
        snprintf(text, sizeof text,
                 "{'quant_method':'modelopt','quant_algo':'MIXED_PRECISION','exclude_modules':['%slayers.1.*'],"
                 "'quantized_layers':{'%slayers.0.mlp.up_proj':{'quant_algo':'NVFP4','group_size':16},"
                 "'%slayers.1.mlp.up_proj':{'quant_algo':'FP8'},'%slayers.2.mlp.up_proj':{'quant_algo':'FP8'}}}",
                 prefixes[i], prefixes[i], prefixes[i], prefixes[i]);
        q = open_quant(text);
        expect(q, "layers.0.mlp.up_proj", QL_EXPECT_NVFP4, "quantized_layers");
        expect(q, "layers.1.mlp.up_proj", QL_EXPECT_PLAIN, "exclude_modules");
        expect(q, "layers.2.mlp.up_proj", QL_EXPECT_FP8, "quantized_layers");
        expect(q, "layers.3.mlp.up_proj", QL_EXPECT_PLAIN, "no entry"); /* not the whole model's algorithm */
        ql_quant_close(&q);
        snprintf(text, sizeof text,
                 "{'quant_method':'fp8','weight_block_size':[128,128],'modules_to_not_convert':['%slayers.1']}",
                 prefixes[i]);
        q = open_quant(text);
        expect(q, "layers.1.mlp.up_proj", QL_EXPECT_PLAIN, "modules_to_not_convert");
        expect(q, "layers.11.mlp.up_proj", QL_EXPECT_FP8, "quant_method fp8");
        ql_quant_close(&q);
    }
}

static void test_compressed_tensors_refusals(void **state) {
    (void)state;
    static const struct {
        const char *weights, *a, *b;
    } cases[] = {
        {"{'num_bits':4,'type':'int','strategy':'group','group_size':128}", "4-bit int", "group_0.weights"},
        {"{'num_bits':8,'type':'int','strategy':'channel'}", "8-bit int", "supported are"},
        {"{'num_bits':4,'type':'float','strategy':'group','group_size':32}", "group_size 32", "tensor_group of 16"},
        {"{'num_bits':4,'type':'float','strategy':'tensor_group','group_size':32}", "group_size 32",
         "tensor_group of 16"},
        {"{'num_bits':8,'type':'float','strategy':'channel','symmetric':false}", "asymmetric", "supported are"},
        {"{'num_bits':8,'type':'float','strategy':'group','group_size':128}", "strategy group", "supported are"},
        {"7", "group_0.weights", "object"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        char text[512];
        snprintf(
            text, sizeof text,
            "{'quant_method':'compressed-tensors','config_groups':{'group_0':{'weights':%s,'targets':['Linear']}}}",
            cases[i].weights);
        refuse(text, cases[i].a, cases[i].b);
    }
    refuse("{'quant_method':'compressed-tensors','config_groups':{}}", "config_groups", "at least one");
    refuse("{'quant_method':'compressed-tensors','config_groups':{'g':{" NVFP4 ",'targets':['re:(']}}}",
           "regular expression", "re:(");
    refuse("{'quant_method':'compressed-tensors','config_groups':{'g':{" NVFP4 ",'targets':'Linear'}}}", "targets",
           "list");
    refuse("{'quant_method':'compressed-tensors','config_groups':{'g':{" NVFP4 ",'targets':[3]}}}", "targets[0]",
           "name");
    refuse("{'quant_method':'compressed-tensors','sparsity_config':{'format':'sparse-24-bitmask'},'config_groups':{'g':"
           "{" NVFP4 ",'targets':['Linear']}}}",
           "sparsity_config", "sparse-24-bitmask");
    refuse("{'quant_method':'compressed-tensors','transform_config':{'config_groups':{'u':{}}},'config_groups':{'g':"
           "{" NVFP4 ",'targets':['Linear']}}}",
           "transform_config with config_groups {\"u\":{}}", "accepted is");
}

static void test_activation_only_group_is_plain(void **state) {
    (void)state;
    ql_quant *q = open_quant("{'quant_method':'compressed-tensors','config_groups':{'group_0':{'weights':null,"
                             "'input_activations':{'num_bits':8},'targets':['Linear']}},'sparsity_config':{},"
                             "'transform_config':{},'kv_cache_scheme':null}");
    expect(q, "lm_head", QL_EXPECT_PLAIN, "group_0");
    ql_quant_close(&q);
}

static void test_runaway_regex_is_refused_not_endured(void **state) {
    (void)state;
    ql_quant *q = open_quant("{'quant_method':'compressed-tensors','config_groups':{'group_0':{" NVFP4
                             ",'targets':['re:(([a-z.0-9_]+)+)+[!?]']}}}");
    ql_expect got;
    const char *rule;
    ql_error err = {0};
    assert_int_equal(ql_quant_expect(q, "layers.0.linear_attn.in_proj_qkv", &got, &rule, &err), QL_ERR_MODEL);
    assert_non_null(strstr(err.text, "cannot be matched"));
    assert_non_null(strstr(err.text, "match limit"));
    ql_quant_close(&q);
}

/* ---- ModelOpt, block FP8 --------------------------------------------------------------------------------------- */

static void test_modelopt_globs(void **state) {
    (void)state;
    static const char *const spellings[] = {
        "{'quant_method':'modelopt','quant_algo':'NVFP4','group_size':16,'ignore':['*linear_attn*','*self_attn*','mtp*'"
        "]}",
        "{'quant_method':'modelopt','quant_algo':'NVFP4','exclude_modules':['*linear_attn*','*self_attn*','mtp*']}",
        "{'producer':{'name':'modelopt','version':'0.3'},'quantization':{'quant_algo':'NVFP4','kv_cache_quant_algo':"
        "null,"
        "'exclude_modules':['*linear_attn*','*self_attn*','mtp*']}}",
    };
    for (size_t i = 0; i < LEN(spellings); i++) {
        ql_quant *q = open_quant(spellings[i]);
        expect(q, "layers.0.mlp.up_proj", QL_EXPECT_NVFP4, "quant_algo NVFP4");
        expect(q, "lm_head", QL_EXPECT_NVFP4, "quant_algo NVFP4");
        expect(q, "layers.0.linear_attn.out_proj", QL_EXPECT_PLAIN, "*linear_attn*");
        expect(q, "mtp.layers.0.mlp.up_proj", QL_EXPECT_PLAIN, "mtp*");
        assert_string_equal(ql_quant_text(q), "modelopt NVFP4");
        ql_quant_close(&q);
    }
    /* globs, not regexes: the dot is a dot and there is no search */
    ql_quant *q = open_quant("{'quant_method':'modelopt','quant_algo':'FP8','ignore':['lm.head','up_proj']}");
    expect(q, "lm_head", QL_EXPECT_FP8, "quant_algo FP8");
    expect(q, "layers.0.mlp.up_proj", QL_EXPECT_FP8, "quant_algo FP8");
    ql_quant_close(&q);
}

static void test_modelopt_refusals(void **state) {
    (void)state;
    refuse("{'quant_method':'modelopt','quant_algo':'INT4_AWQ'}", "\"INT4_AWQ\"", "supported are NVFP4");
    refuse("{'quant_method':'modelopt'}", "without quant_algo", "may be NVFP4");
    refuse("{'quant_method':'modelopt','quant_algo':'NVFP4','group_size':32}", "group_size", "accepted is 16");
    refuse("{'quant_method':'modelopt','quant_algo':'MIXED_PRECISION','quantized_layers':{'lm_head':{}}}",
           "quant_algo \"\"", "lm_head");
    refuse("{'quant_method':'modelopt','quant_algo':'MIXED_PRECISION',"
           "'quantized_layers':{'lm_head':{'quant_algo':'NVFP4','group_size':32}}}",
           "group_size of lm_head is 32", "accepted is 16");
}

static void test_block_fp8(void **state) {
    (void)state;
    ql_quant *q =
        open_quant("{'quant_method':'fp8','fmt':'e4m3','activation_scheme':'dynamic','weight_block_size':[128,128],"
                   "'modules_to_not_convert':['lm_head','model.visual','mtp.fc',"
                   "'model.language_model.layers.0.linear_attn.in_proj_a']}");
    expect(q, "lm_head", QL_EXPECT_PLAIN, "modules_to_not_convert");
    expect(q, "mtp.fc", QL_EXPECT_PLAIN, "mtp.fc");
    expect(q, "mtp.layers.0.mlp.up_proj", QL_EXPECT_FP8, "quant_method fp8");
    expect(q, "layers.0.linear_attn.in_proj_a", QL_EXPECT_PLAIN, "in_proj_a");
    expect(q, "layers.1.linear_attn.in_proj_a", QL_EXPECT_FP8, "quant_method fp8");
    assert_string_equal(ql_quant_text(q), "fp8 128x128");
    ql_quant_close(&q);
    refuse("{'quant_method':'fp8','weight_block_size':[64,128]}", "[64,128]", "supported is [128,128]");
    refuse("{'quant_method':'fp8','weight_block_size':128}", "weight_block_size 128 is", "supported is [128,128]");
    refuse("{'quant_method':'fp8','fmt':'e5m2'}", "e5m2", "e4m3");
}

static void test_other_methods_are_named(void **state) {
    (void)state;
    refuse("{'quant_method':'gptq','bits':4}", "\"gptq\" is not supported", "compressed-tensors, modelopt and fp8");
    refuse("{'quant_method':'bitsandbytes'}", "\"bitsandbytes\"", "supported are");
    refuse("{'bits':4}", "quant_method \"\"", "supported are");
    refuse("{'quant_method':4}", "quant_method", "string");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_none),
        cmocka_unit_test(test_first_group_wins_where_regexes_overlap),
        cmocka_unit_test(test_ignore_beats_groups_and_is_no_prefix),
        cmocka_unit_test(test_regexes_match_at_the_start),
        cmocka_unit_test(test_entries_match_under_any_prefix),
        cmocka_unit_test(test_compressed_tensors_refusals),
        cmocka_unit_test(test_activation_only_group_is_plain),
        cmocka_unit_test(test_runaway_regex_is_refused_not_endured),
        cmocka_unit_test(test_modelopt_globs),
        cmocka_unit_test(test_modelopt_refusals),
        cmocka_unit_test(test_block_fp8),
        cmocka_unit_test(test_other_methods_are_named),
    };
    return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
