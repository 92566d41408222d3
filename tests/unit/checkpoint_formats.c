/* Opening whole checkpoints: which format each weight is decided to have, and every way in which scales, shapes, dtypes and names can
 * contradict each other or the configuration. */
#include "tests/unit/ckpt.h"

#include <stdio.h>

/* ---- scales --------------------------------------------------------------------------------------------------- */

static void test_a_missing_scale_is_never_assumed(void **state) {
    (void)state;
    static const struct {
        const char *dir, *name, *a;
    } cases[] = {
        {ck_mixed, "lm_head.weight_scale",
         "\"lm_head.weight\" is F8_E4M3 but has neither weight_scale nor weight_scale_inv"},
        {ck_mixed, P "layers.0.mlp.up_proj.weight_scale", "its weight_scale is missing"},
        {ck_mixed, P "layers.0.mlp.up_proj.weight_global_scale", "its weight_global_scale is missing"},
        {ck_block, P "layers.0.mlp.up_proj.weight_scale_inv", "has neither weight_scale nor weight_scale_inv"},
        {ck_block, "mtp.layers.0.mlp.up_proj.weight_scale_inv", "has neither weight_scale nor weight_scale_inv"},
        {ck_modelopt, "lm_head.weight_scale", "its weight_scale is missing"},
        {ck_modelopt, "lm_head.weight_scale_2", "its weight_scale_2 is missing"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        ck_model m = ck_load(cases[i].dir);
        ck_drop(&m, cases[i].name);
        ck_refused(&m, cases[i].a, "never assumed");
    }
}

static void test_every_scale_is_consumed_or_refused(void **state) {
    (void)state;
    /* another spelling */
    ck_model m = ck_load(ck_mixed);
    ck_rename(&m, "lm_head.weight_scale", "lm_head.scale_weight");
    ck_refused(&m, "lm_head.scale_weight", "belongs to no weight");
    m = ck_load(ck_block);
    ck_rename(&m, P "layers.0.mlp.up_proj.weight_scale_inv", P "layers.0.mlp.up_proj.weight_scale_invers");
    ck_refused(&m, "weight_scale_invers", "belongs to no weight");
    /* scales beside a plain weight */
    static const char *const scales[] = {"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"};
    for (size_t i = 0; i < LEN(scales); i++) {
        char name[128];
        m = ck_load(ck_bf16);
        snprintf(name, sizeof name, P "layers.0.mlp.gate_proj.%s", scales[i]);
        ck_add(&m, name, QL_DTYPE_F32, 1, 1, 0);
        ck_refused(&m, name, "belongs to no weight");
    }
    /* one scale too many */
    m = ck_load(ck_mixed);
    ck_add(&m, "lm_head.weight_scale_inv", QL_DTYPE_BF16, 2, 4, 1);
    ck_refused(&m, "\"lm_head.weight_scale\" belongs to no weight", "F8_E4M3");
    m = ck_load(ck_mixed);
    ck_add(&m, P "layers.0.mlp.up_proj.weight_scale_2", QL_DTYPE_F32, 0, 0, 0);
    ck_refused(&m, "weight_scale_2\" belongs to no weight", "U8");
    m = ck_load(ck_mixed);
    ck_add(&m, P "layers.0.mlp.up_proj.weight", QL_DTYPE_BF16, 2, 256, 128);
    ck_refused(&m, "up_proj.weight\" belongs to no weight", "weight_packed");
    /* a scale without its weight */
    m = ck_load(ck_mixed);
    ck_drop(&m, "lm_head.weight");
    ck_refused(&m, "\"lm_head.weight_scale\" belongs to no weight", "neither lm_head.weight nor");
}

static void test_scale_dtypes(void **state) {
    (void)state;
    static const ql_dtype plain[] = {QL_DTYPE_BF16, QL_DTYPE_F16, QL_DTYPE_F32};
    for (size_t i = 0; i < LEN(plain); i++) {
        ck_model m = ck_load(ck_mixed);
        ck_reshape(&m, "lm_head.weight_scale", plain[i], i == 1 ? 1 : 2, 512, 1); /* [512] and [512, 1] */
        ck_reshape(&m, P "layers.0.mlp.up_proj.weight_global_scale", plain[i], i == 2 ? 0 : 1, 1, 0);
        ql_checkpoint *c = ck_opened(&m);
        assert_int_equal(c->lm_head.format, QL_FORMAT_FP8_CHANNEL);
        assert_int_equal(c->lm_head.scale->dtype, plain[i]);
        ql_checkpoint_close(&c);
        m = ck_load(ck_block);
        ck_reshape(&m, P "layers.0.mlp.up_proj.weight_scale_inv", plain[i], 2, 3, 2);
        c = ck_opened(&m);
        assert_int_equal(c->layer[0].up.format, QL_FORMAT_FP8_BLOCK);
        ql_checkpoint_close(&c);
    }
    ck_reshaped_refused(ck_mixed, "lm_head.weight_scale", QL_DTYPE_F8_E8M0, 2, 512, 1,
                        "\"lm_head.weight_scale\" is F8_E8M0", "BF16, F16 and F32");
    ck_reshaped_refused(ck_mixed, P "layers.0.mlp.up_proj.weight_scale", QL_DTYPE_U8, 2, 256, 8,
                        "up_proj.weight_scale\" is U8", "F8_E4M3");
    ck_reshaped_refused(ck_mixed, P "layers.0.mlp.up_proj.weight_global_scale", QL_DTYPE_F32, 1, 2, 0,
                        "weight_global_scale\" is F32 [2]", "one number");
}

/* FP8 per tensor, per row and per block, NVFP4 of both namings and plain weights in one file. */
static void test_formats_mix_freely(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    json_array_append_new(ck_targets(&m, "group_1"), json_string("re:.*o_proj$"));
    ck_reshape(&m, P "layers.3.self_attn.q_proj.weight_scale", QL_DTYPE_F32, 0, 0, 0);
    ck_drop(&m, P "layers.3.self_attn.k_proj.weight_scale");
    ck_add(&m, P "layers.3.self_attn.k_proj.weight_scale_inv", QL_DTYPE_BF16, 2, 4, 1);
    ck_reshape(&m, P "layers.3.self_attn.v_proj.weight_scale", QL_DTYPE_BF16, 2, 4,
               1); /* blocks under the other name */
    ck_make_plain(&m, P "layers.3.mlp.up_proj", 256, 128);
    ck_make_plain(&m, P "layers.3.mlp.gate_proj", 256, 128);
    ck_add(&m, P "layers.3.mlp.gate_proj.weight_scale", QL_DTYPE_F8_E4M3, 2, 256, 8);
    ck_add(&m, P "layers.3.mlp.gate_proj.weight_scale_2", QL_DTYPE_F32, 0, 0, 0);
    ck_reshape(&m, P "layers.3.mlp.gate_proj.weight", QL_DTYPE_U8, 2, 256, 64);
    ql_checkpoint *c = ck_opened(&m);
    assert_int_equal(c->layer[3].q.format, QL_FORMAT_FP8_TENSOR);
    assert_null(c->layer[3].q.scale);
    assert_non_null(c->layer[3].q.factor);
    assert_int_equal(c->layer[3].k.format, QL_FORMAT_FP8_BLOCK);
    assert_int_equal(c->layer[3].v.format, QL_FORMAT_FP8_BLOCK);
    assert_int_equal(c->layer[3].o.format, QL_FORMAT_FP8_CHANNEL);
    assert_int_equal(c->layer[3].up.format, QL_FORMAT_BF16);
    assert_int_equal(c->layer[3].gate.format, QL_FORMAT_NVFP4);
    assert_false(c->layer[3].gate.factor_divides);
    assert_int_equal(c->layer[3].down.format, QL_FORMAT_NVFP4);
    assert_true(c->layer[3].down.factor_divides);
    ql_checkpoint_close(&c);
}

static void test_known_scales_of_no_weight(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_add(&m, P "layers.3.self_attn.k_scale", QL_DTYPE_BF16, 1, 1, 0);
    ck_add(&m, P "layers.3.self_attn.v_scale", QL_DTYPE_BF16, 1, 1, 0);
    ck_add(&m, P "layers.7.self_attn.k_proj.k_scale", QL_DTYPE_F32, 0, 0, 0);
    ck_add(&m, P "layers.7.self_attn.v_proj.v_scale", QL_DTYPE_F32, 0, 0, 0);
    ck_add(&m, "lm_head.input_scale", QL_DTYPE_F32, 0, 0, 0);
    ck_add(&m, P "rotary_emb.inv_freq", QL_DTYPE_F32, 1, 32, 0);
    ql_checkpoint *c = ck_opened(&m);
    ck_has_note(c, "4 scales of an FP8 KV cache", "not used");
    ck_has_note(c, "19 scales of quantized activations", "not used");
    assert_string_equal(ck_info(c, P "layers.3.self_attn.k_scale").role, "ignored");
    assert_string_equal(ck_info(c, P "rotary_emb.inv_freq").role, "ignored");
    ql_checkpoint_info s;
    ql_checkpoint_get_info(c, &s);
    assert_int_equal(s.n_ignored, 1 + 18 + 4 + 1 + 1);
    assert_int_equal(s.ignored_bytes, 128 + 18 * 4 + 2 + 2 + 4 + 4 + 4 + 32 * 4);
    ql_checkpoint_close(&c);
    m = ck_load(ck_mixed);
    ck_add(&m, P "layers.0.self_attn.k_scale", QL_DTYPE_BF16, 1, 1, 0); /* a layer without attention */
    ck_refused(&m, "layers.0.self_attn.k_scale", "belongs to no weight");
}

/* ---- comparison with the configuration -------------------------------------------------------------------------- */

static void test_quantized_where_configuration_says_plain(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    json_array_append_new(json_object_get(ck_quantization(&m), "ignore"), json_string("lm_head"));
    ck_refused(&m, "\"lm_head.weight\" is stored as fp8-channel", "plain for lm_head (ignore \"lm_head\")");
    m = ck_load(ck_mixed);
    json_object_del(m.config, "quantization_config");
    ck_refused(&m, "is stored as", "configuration says plain");
    m = ck_load(ck_modelopt);
    json_array_append_new(json_object_get(ck_quantization(&m), "ignore"), json_string("*mlp.down*"));
    ck_refused(&m, "\"model.layers.0.mlp.down_proj.weight\" is stored as nvfp4", "ignore \"*mlp.down*\"");
    m = ck_load(ck_block);
    json_array_append_new(json_object_get(ck_quantization(&m), "modules_to_not_convert"), json_string("mtp"));
    ck_refused(&m, "mtp.layers.0", "modules_to_not_convert");
}

static void test_plain_where_configuration_says_quantized(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_make_plain(&m, "lm_head", 512, 128);
    ck_make_plain(&m, P "layers.2.mlp.down_proj", 128, 256);
    ql_checkpoint *c = ck_opened(&m);
    assert_int_equal(c->lm_head.format, QL_FORMAT_BF16);
    ck_has_note(c, "2 linears are stored plain", "layers.2.mlp.down_proj, where group_1");
    ck_contains(ck_info(c, "lm_head.weight").reason, "stored plain although group_0");
    ql_checkpoint_info s;
    ql_checkpoint_get_info(c, &s);
    assert_int_equal(s.n_plain, 14);
    ql_checkpoint_close(&c);
}

static void test_another_format_than_the_configuration_says(void **state) {
    (void)state;
    /* a lost group: the tail's FP8 MLP falls to the NVFP4 group */
    ck_model m = ck_load(ck_mixed);
    json_t *fp8 = ck_targets(&m, "group_0");
    json_array_remove(fp8, json_array_size(fp8) - 1);
    ck_refused(&m, "layers.7.mlp.gate_proj.weight\" is stored as fp8-channel", "says nvfp4");
    m = ck_load(ck_modelopt);
    json_object_set_new(ck_quantization(&m), "quant_algo", json_string("FP8"));
    ck_refused(&m, "is stored as nvfp4", "says fp8");
}

static void test_head_in_every_format(void **state) {
    (void)state;
    for (int format = 0; format < QL_FORMAT_COUNT; format++) {
        ck_model m = ck_load(ck_mixed);
        const bool nvfp4 = format == QL_FORMAT_NVFP4;
        if (nvfp4) {
            json_array_set_new(ck_targets(&m, "group_0"), 2, json_string("re:nothing"));
            json_array_append_new(ck_targets(&m, "group_1"), json_string("lm_head"));
        }
        ck_make_plain(&m, "lm_head", 512, 128);
        const ql_dtype dtype = nvfp4                      ? QL_DTYPE_U8
                               : format == QL_FORMAT_F32  ? QL_DTYPE_F32
                               : format == QL_FORMAT_F16  ? QL_DTYPE_F16
                               : format == QL_FORMAT_BF16 ? QL_DTYPE_BF16
                                                          : QL_DTYPE_F8_E4M3;
        ck_reshape(&m, "lm_head.weight", dtype, 2, 512, nvfp4 ? 64 : 128);
        if (nvfp4) {
            ck_rename(&m, "lm_head.weight", "lm_head.weight_packed");
            ck_add(&m, "lm_head.weight_scale", QL_DTYPE_F8_E4M3, 2, 512, 8);
            ck_add(&m, "lm_head.weight_global_scale", QL_DTYPE_F32, 1, 1, 0);
        } else if (format == QL_FORMAT_FP8_CHANNEL) {
            ck_add(&m, "lm_head.weight_scale", QL_DTYPE_BF16, 2, 512, 1);
        } else if (format == QL_FORMAT_FP8_TENSOR) {
            ck_add(&m, "lm_head.weight_scale", QL_DTYPE_F32, 1, 1, 0);
        } else if (format == QL_FORMAT_FP8_BLOCK) {
            ck_add(&m, "lm_head.weight_scale_inv", QL_DTYPE_F32, 2, 4, 1);
        }
        ql_checkpoint *c = ck_opened(&m);
        assert_int_equal(c->lm_head.format, format);
        ql_checkpoint_close(&c);
    }
}

/* ---- shapes and dtypes ------------------------------------------------------------------------------------------ */

static void test_shapes_are_told_twice(void **state) {
    (void)state;
    static const struct {
        const char *dir, *name;
        ql_dtype dtype;
        int rank;
        int64_t n, k;
        const char *a, *b;
    } cases[] = {
        {ck_bf16, P "norm.weight", QL_DTYPE_BF16, 1, 127, 0, "has shape [127]", "needs [128]"},
        {ck_bf16, P "layers.0.mlp.up_proj.weight", QL_DTYPE_BF16, 2, 128, 256, "has shape [128, 256]",
         "needs [256, 128]"},
        {ck_bf16, P "layers.0.linear_attn.conv1d.weight", QL_DTYPE_BF16, 2, 1024, 4, "[1024, 4]", "needs [1024, 1, 4]"},
        {ck_bf16, P "layers.3.self_attn.q_proj.weight", QL_DTYPE_BF16, 2, 1024, 128, "[1024, 128]",
         "needs [2048, 128]"},
        {ck_bf16, P "embed_tokens.weight", QL_DTYPE_BF16, 2, 500, 128, "[500, 128]", "needs [512, 128]"},
        {ck_bf16, "mtp.fc.weight", QL_DTYPE_BF16, 2, 128, 128, "[128, 128]", "needs [128, 256]"},
        {ck_mixed, P "layers.0.mlp.up_proj.weight_packed", QL_DTYPE_U8, 2, 256, 128, "[256, 128]", "needs [256, 64]"},
        {ck_mixed, P "layers.0.mlp.up_proj.weight_scale", QL_DTYPE_F8_E4M3, 2, 256, 4, "[256, 4]", "needs [256, 8]"},
        {ck_mixed, "lm_head.weight_scale", QL_DTYPE_BF16, 2, 511, 1, "[511, 1]", "[512, 1] or [512] (rows)"},
        {ck_mixed, "lm_head.weight_scale", QL_DTYPE_BF16, 2, 1, 512, "[1, 512]", "[] or [1] (tensor), [4, 1] (blocks)"},
        {ck_block, P "layers.0.mlp.up_proj.weight_scale_inv", QL_DTYPE_BF16, 2, 2, 3, "[2, 3]", "needs [3, 2]"},
        {ck_mixed, "lm_head.weight", QL_DTYPE_F8_E4M3, 2, 512, 64, "[512, 64]", "needs [512, 128]"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        ck_reshaped_refused(cases[i].dir, cases[i].name, cases[i].dtype, cases[i].rank, cases[i].n, cases[i].k,
                            cases[i].a, cases[i].b);
    }
}

static void test_dtypes(void **state) {
    (void)state;
    static const char *const small[] = {P "layers.0.linear_attn.A_log", P "layers.0.linear_attn.dt_bias"};
    static const ql_dtype plain[] = {QL_DTYPE_BF16, QL_DTYPE_F16, QL_DTYPE_F32};
    for (size_t i = 0; i < LEN(plain); i++) {
        ck_model m = ck_load(ck_bf16);
        ck_reshape(&m, small[0], plain[i], 1, 4, 0);
        ck_reshape(&m, small[1], plain[(i + 1) % 3], 1, 4, 0);
        ck_reshape(&m, P "layers.0.linear_attn.norm.weight", plain[i], 1, 128, 0);
        ck_reshape(&m, P "layers.0.linear_attn.in_proj_a.weight", plain[i], 2, 4, 128);
        ck_reshape(&m, P "layers.0.linear_attn.in_proj_b.weight", plain[(i + 1) % 3], 2, 4, 128);
        ql_checkpoint *c = ck_opened(&m);
        assert_int_equal(c->layer[0].a_log->dtype, plain[i]);
        assert_int_equal(c->layer[0].in_a.weight->dtype, plain[i]);
        assert_int_equal(c->layer[0].in_b.weight->dtype, plain[(i + 1) % 3]);
        ql_checkpoint_close(&c);
    }
    ck_reshaped_refused(ck_bf16, small[0], QL_DTYPE_I32, 1, 4, 0, "A_log\" is I32", "BF16, F16 and F32");
    ck_reshaped_refused(ck_bf16, P "layers.0.mlp.up_proj.weight", QL_DTYPE_F8_E5M2, 2, 256, 128,
                        "up_proj.weight\" is F8_E5M2", "F8_E4M3 and U8 (nvfp4)");
    ck_reshaped_refused(ck_mixed, P "layers.0.mlp.up_proj.weight_packed", QL_DTYPE_I32, 2, 256, 16,
                        "weight_packed\" is I32", "accepted is U8");
}

static void test_embedding_must_be_plain(void **state) {
    (void)state;
    ck_reshaped_refused(ck_mixed, P "embed_tokens.weight", QL_DTYPE_F8_E4M3, 2, 512, 128,
                        "embed_tokens.weight\" is F8_E4M3", "BF16, F16 and F32");
    ck_model m = ck_load(ck_mixed);
    ck_rename(&m, P "embed_tokens.weight", P "embed_tokens.weight_packed");
    ck_refused(&m, "quantized embedding", "plain one");
}

/* ---- names ---------------------------------------------------------------------------------------------------- */

static void test_unknown_names(void **state) {
    (void)state;
    static const struct {
        const char *name, *part;
    } cases[] = {
        {P "layers.0.linear_attn.in_proj_qkvz.weight", "is unknown"},
        {P "layers.0.linear_attn.in_proj_ba.weight", "is unknown"},
        {P "layers.0.mlp.up_proj.bias", "is a bias"},
        {P "layers.0.mlp.up_proj.weight_g_idx", "is unknown"},
        {P "layers.0.mlp.up_proj.weight_zero_point", "is unknown"},
        {P "layers.0.mlp.up_proj.output_scale", "belongs to no weight"},
        {P "layers.8.input_layernorm.weight", "num_hidden_layers is 8"},
        {P "layers.00.input_layernorm.weight", "is unknown"},
        {P "layers.-1.input_layernorm.weight", "is unknown"},
        {P "layers.4294967296.input_layernorm.weight", "is unknown"},
        {P "layers.0.self_attn.q_proj.weight", "stands in a linear_attention layer"},
        {P "layers.3.linear_attn.A_log", "stands in a full_attention layer"},
        {P "lm_head.weight", "is unknown"},
        {"mtp.layers.1.input_layernorm.weight", "second MTP layer"},
        {"mtp.embed_tokens.weight", "is unknown"},
        {"transformer.h.0.weight", "is unknown"},
        {"lm_head.weight.extra", "is unknown"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        ck_model m = ck_load(ck_mixed);
        ck_add(&m, cases[i].name, QL_DTYPE_BF16, 1, 8, 0);
        ck_refused(&m, cases[i].name, cases[i].part);
    }
}

static void test_split_projections_are_required(void **state) {
    (void)state;
    ck_model m = ck_load(ck_bf16);
    ck_drop(&m, P "layers.1.linear_attn.in_proj_z.weight");
    ck_refused(&m, "never had", "layers.1.linear_attn.in_proj_z.weight");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_missing_scale_is_never_assumed),
        cmocka_unit_test(test_every_scale_is_consumed_or_refused),
        cmocka_unit_test(test_scale_dtypes),
        cmocka_unit_test(test_formats_mix_freely),
        cmocka_unit_test(test_known_scales_of_no_weight),
        cmocka_unit_test(test_quantized_where_configuration_says_plain),
        cmocka_unit_test(test_plain_where_configuration_says_quantized),
        cmocka_unit_test(test_another_format_than_the_configuration_says),
        cmocka_unit_test(test_head_in_every_format),
        cmocka_unit_test(test_shapes_are_told_twice),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_embedding_must_be_plain),
        cmocka_unit_test(test_unknown_names),
        cmocka_unit_test(test_split_projections_are_required),
    };
    return cmocka_run_group_tests_name("checkpoint_formats", tests, ck_set_up, ck_tear_down);
}
