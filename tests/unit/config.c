/* config.json in its dialects, and every value that is refused, by name, value and what is accepted. */
#include "loader/config.h"

#include "tests/json.h"
#include "tests/stfile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

static const char nested_text[] =
    "{'architectures':['Qwen3_5ForConditionalGeneration'],'model_type':'qwen3_5','tie_word_embeddings':false,"
    "'image_token_id':248056,'vision_config':{'depth':27},"
    "'text_config':{'model_type':'qwen3_5_text','hidden_size':5120,'num_hidden_layers':64,'intermediate_size':17408,"
    "'vocab_size':248320,'num_attention_heads':24,'num_key_value_heads':4,'head_dim':256,'attn_output_gate':true,"
    "'attention_bias':false,'hidden_act':'silu','output_gate_type':'swish','rms_norm_eps':1e-06,"
    "'full_attention_interval':4,'linear_num_key_heads':16,'linear_num_value_heads':48,'linear_key_head_dim':128,"
    "'linear_value_head_dim':128,'linear_conv_kernel_dim':4,'mamba_ssm_dtype':'float32','max_position_embeddings':"
    "262144,"
    "'rope_parameters':{'rope_type':'default','rope_theta':10000000,'partial_rotary_factor':0.25,"
    "'mrope_interleaved':true,'mrope_section':[11,11,10]},'partial_rotary_factor':0.25,'mtp_num_hidden_layers':1,"
    "'mtp_use_dedicated_embeddings':false,'bos_token_id':null,'eos_token_id':248044,'pad_token_id':null,"
    "'mlp_only_layers':[]}}";

static json_t *nested(void) { return ql_test_json(nested_text); }

/* The same model as a text-only export. */
static json_t *flat(void) {
    json_t *root = nested(), *text = json_incref(json_object_get(root, "text_config"));
    json_decref(root);
    json_object_set_new(text, "architectures", ql_test_json("['Qwen3_5ForCausalLM']"));
    return text;
}

/* Sets "a.b" or "a" to a JSON value, or removes it when value is NULL. */
static json_t *with(json_t *root, const char *path, const char *value) {
    const char *dot = strchr(path, '.');
    json_t *obj = root;
    char parent[64];
    while (dot) {
        snprintf(parent, sizeof parent, "%.*s", (int)(dot - path), path);
        obj = json_object_get(obj, parent);
        assert_non_null(obj);
        path = dot + 1;
        dot = strchr(path, '.');
    }
    if (value) {
        json_object_set_new(obj, path, ql_test_json(value));
    } else {
        json_object_del(obj, path);
    }
    return root;
}

static void assert_contains(const ql_error *err, const char *part) {
    if (!strstr(err->text, part)) {
        fail_msg("\"%s\" does not contain \"%s\"", err->text, part);
    }
}

/* Both take the reference to root. */
static ql_config accept(json_t *root) {
    ql_config c;
    ql_error err = {0};
    if (ql_config_parse(root, "config.json", &c, &err) != QL_OK) {
        fail_msg("refused: %s", err.text);
    }
    json_decref(root);
    return c;
}

static void refuse(json_t *root, const char *a, const char *b) {
    ql_config c;
    ql_error err = {0};
    assert_int_equal(ql_config_parse(root, "config.json", &c, &err), QL_ERR_MODEL);
    assert_contains(&err, "config.json");
    assert_contains(&err, a);
    assert_contains(&err, b);
    json_decref(root);
}

/* Changes of the nested model, each of which alone is refused in these words. */
typedef struct refusal {
    const char *path, *value, *a, *b;
} refusal;

static void refuse_each(const refusal *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        refuse(with(nested(), cases[i].path, cases[i].value), cases[i].a, cases[i].b);
    }
}

static void assert_is_27b(const ql_config *c) {
    assert_int_equal(c->hidden, 5120);
    assert_int_equal(c->n_layer, 64);
    assert_int_equal(c->intermediate, 17408);
    assert_int_equal(c->vocab, 248320);
    assert_int_equal(c->n_head, 24);
    assert_int_equal(c->n_kv_head, 4);
    assert_int_equal(c->n_key_head, 16);
    assert_int_equal(c->n_value_head, 48);
    assert_int_equal(c->rotary_dim, 64);
    assert_true(c->rope_theta == 1e7);
    assert_true(c->yarn_factor == 1);
    assert_true(c->rms_eps == 1e-6f);
    assert_int_equal(c->max_ctx, 262144);
    assert_int_equal(c->n_mtp_layer, 1);
    assert_false(c->tied);
    assert_int_equal(c->slices, 8);
    for (int i = 0; i < 64; i++) {
        assert_int_equal(c->full_attention[i], i % 4 == 3);
    }
    assert_int_equal(c->n_eos, 1);
    assert_int_equal(c->eos[0], 248044);
}

/* ---- dialects ------------------------------------------------------------------------------------------------- */

static void test_nested_and_flat_agree(void **state) {
    (void)state;
    ql_config a = accept(nested()), b = accept(flat());
    assert_is_27b(&a);
    assert_is_27b(&b);
    assert_string_equal(a.architecture, "Qwen3_5ForConditionalGeneration");
    assert_string_equal(b.architecture, "Qwen3_5ForCausalLM");
}

static void test_text_config_wins_over_the_root(void **state) {
    (void)state;
    json_t *root = with(with(nested(), "hidden_size", "64"), "num_hidden_layers", "2");
    ql_config c = accept(with(root, "tie_word_embeddings", "true"));
    assert_int_equal(c.hidden, 5120);
    assert_int_equal(c.n_layer, 64);
    assert_true(c.tied); /* only the root has it */
    c = accept(with(with(nested(), "tie_word_embeddings", "true"), "text_config.tie_word_embeddings", "false"));
    assert_false(c.tied);
}

static void test_architecture(void **state) {
    (void)state;
    refuse(with(nested(), "architectures", "['LlamaForCausalLM']"), "\"LlamaForCausalLM\" is not supported",
           "Qwen3_5ForConditionalGeneration and Qwen3_5ForCausalLM");
    refuse(with(nested(), "architectures", "['Qwen3_5MoeForConditionalGeneration']"), "Qwen3_5Moe", "supported");
    json_t *root = with(nested(), "architectures", NULL);
    ql_config c = accept(root);
    assert_string_equal(c.architecture, "Qwen3_5ForConditionalGeneration");
    refuse(with(with(nested(), "architectures", NULL), "model_type", "'llama'"), "\"llama\"", "supported");
    refuse(with(nested(), "text_config.num_experts", "128"), "num_experts is 128", "dense");
}

static void test_layer_kinds(void **state) {
    (void)state;
    json_t *root = with(with(nested(), "text_config.num_hidden_layers", "3"), "text_config.layer_types",
                        "['full_attention','linear_attention','full_attention']");
    ql_config c = accept(root);
    assert_true(c.full_attention[0]);
    assert_false(c.full_attention[1]);
    assert_true(c.full_attention[2]);
    refuse(with(nested(), "text_config.layer_types", "['full_attention']"), "layer_types must list 64", "not 1");
    refuse(
        with(with(nested(), "text_config.num_hidden_layers", "1"), "text_config.layer_types", "['sliding_attention']"),
        "layer_types[0] is \"sliding_attention\"", "accepted");
    refuse(with(nested(), "text_config.full_attention_interval", NULL), "neither layer_types nor",
           "full_attention_interval");
}

/* ---- rope ----------------------------------------------------------------------------------------------------- */

static void test_older_flat_rope(void **state) {
    (void)state;
    json_t *root = with(nested(), "text_config.rope_parameters", NULL);
    root = with(with(root, "text_config.rope_theta", "500000"), "text_config.partial_rotary_factor", "0.5");
    ql_config c = accept(with(root, "text_config.rope_scaling", "{'type':'mrope','mrope_section':[24,20,20]}"));
    assert_true(c.rope_theta == 500000);
    assert_int_equal(c.rotary_dim, 128);
    c = accept(with(nested(), "text_config.rope_scaling", "null"));
    assert_is_27b(&c);
}

static void test_rope_values(void **state) {
    (void)state;
    static const refusal cases[] = {
        {"text_config.rope_parameters.mrope_section", "[11,11,11]", "adds up to 32", "33"},
        {"text_config.rope_parameters.rope_type", "'llama3'", "\"llama3\" is not supported", "\"yarn\""},
        {"text_config.rope_parameters.rope_theta", "0", "rope_theta is 0", "accepted"},
        {"text_config.rope_parameters.low_freq_factor", "1", "low_freq_factor (1) is not supported",
         "accepted are rope_theta"},
        {"text_config.rope_parameters.partial_rotary_factor", "0.5", "partial_rotary_factor is 0.25",
         "rope_parameters says 0.5"},
    };
    refuse_each(cases, LEN(cases));
    json_t *root = with(nested(), "text_config.rope_parameters.partial_rotary_factor", "0.0117");
    refuse(with(root, "text_config.partial_rotary_factor", NULL), "partial_rotary_factor 0.0117", "even");
    refuse(with(nested(), "text_config.rope_theta", "1000"), "rope_theta is 1000", "rope_parameters says 1e+07");
}

static void test_yarn_nested(void **state) {
    (void)state;
    static const char yarn[] = "{'rope_type':'yarn','rope_theta':10000000,'partial_rotary_factor':0.25,'factor':4.0,"
                               "'original_max_position_embeddings':262144,'mrope_section':[11,11,10]}";
    ql_config c = accept(with(nested(), "text_config.rope_parameters", yarn));
    assert_true(c.yarn_factor == 4);
    assert_int_equal(c.yarn_original_ctx, 262144);
    assert_int_equal(c.max_ctx, 1048576);
    json_t *root =
        with(with(nested(), "text_config.rope_parameters", yarn), "text_config.rope_parameters.factor", NULL);
    refuse(root, "yarn", "needs factor");
    root = with(with(nested(), "text_config.rope_parameters", yarn), "text_config.rope_parameters.beta_fast", "16");
    refuse(root, "beta_fast is 16", "accepted is 32");
    root =
        with(with(nested(), "text_config.rope_parameters", yarn), "text_config.rope_parameters.attention_factor", "2");
    refuse(root, "attention_factor", "not supported");
}

/* An override that the reference would drop without a word is refused. */
static void test_misplaced_rope_overrides(void **state) {
    (void)state;
    static const char yarn[] = "{'rope_type':'yarn','factor':4.0,'original_max_position_embeddings':262144}";
    static const refusal cases[] = {
        {"rope_parameters", yarn, "rope_parameters at the top level", "text_config.rope_parameters"},
        {"rope_scaling", yarn, "rope_scaling at the top level", "text_config.rope_parameters"},
        {"rope_theta", "5000000", "rope_theta at the top level", "text_config"},
        {"yarn_factor", "4", "yarn_factor at the top level", "text_config"},
        {"text_config.rope_scaling", yarn, "yarn is accepted in rope_parameters only", "rope_scaling"},
        {"text_config.rope_type", "'yarn'", "text_config.rope_type is misplaced", "rope_parameters"},
        {"text_config.rope_factor", "4", "text_config.rope_factor is misplaced or unknown", "rope_parameters"},
    };
    refuse_each(cases, LEN(cases));
    refuse(with(flat(), "factor", "4"), "factor is misplaced or unknown", "rope_parameters");
    refuse(with(flat(), "original_max_position_embeddings", "4"), "original_max_position_embeddings is misplaced",
           "rope");
    /* copies that say the same are what some exports write */
    ql_config c = accept(with(with(nested(), "rope_theta", "10000000.0"), "partial_rotary_factor", "0.25"));
    assert_is_27b(&c);
}

/* ---- sizes and fixed values ------------------------------------------------------------------------------------ */

static void test_values_the_kernels_are_written_for(void **state) {
    (void)state;
    static const refusal cases[] = {
        {"text_config.head_dim", "128", "head_dim is 128", "accepted is 256"},
        {"text_config.linear_key_head_dim", "64", "linear_key_head_dim is 64", "accepted is 128"},
        {"text_config.linear_value_head_dim", "256", "linear_value_head_dim is 256", "accepted is 128"},
        {"text_config.linear_conv_kernel_dim", "3", "linear_conv_kernel_dim is 3", "accepted is 4"},
        {"text_config.attention_bias", "true", "attention_bias is true", "accepted is false"},
        {"text_config.attn_output_gate", "false", "attn_output_gate is false", "accepted is true"},
        {"text_config.hidden_act", "'gelu'", "hidden_act is \"gelu\"", "accepted is \"silu\""},
        {"text_config.output_gate_type", "'sigmoid'", "output_gate_type is \"sigmoid\"", "\"swish\""},
        {"text_config.mtp_use_dedicated_embeddings", "true", "mtp_use_dedicated_embeddings is true",
         "accepted is false"},
        {"text_config.mtp_num_hidden_layers", "2", "mtp_num_hidden_layers is 2", "0 to 1"},
        {"text_config.mlp_only_layers", "[1]", "mlp_only_layers", "empty"},
        {"text_config.head_dim", "'256'", "head_dim", "integer"},
    };
    refuse_each(cases, LEN(cases));
}

static void test_sizes(void **state) {
    (void)state;
    static const refusal cases[] = {
        {"text_config.hidden_size", NULL, "hidden_size", "missing"},
        {"text_config.vocab_size", NULL, "vocab_size", "missing"},
        {"text_config.num_hidden_layers", "0", "num_hidden_layers is 0", "1 to 256"},
        {"text_config.num_hidden_layers", "257", "num_hidden_layers is 257", "1 to 256"},
        {"text_config.num_hidden_layers", "64.0", "num_hidden_layers", "integer"},
        {"text_config.hidden_size", "5121", "hidden_size 5121", "multiples of 16"},
        {"text_config.hidden_size", "4294967296", "hidden_size is 4294967296", "accepted"},
        {"text_config.intermediate_size", "100", "intermediate_size 100", "multiples of 16"},
        {"text_config.num_key_value_heads", "5", "num_attention_heads 24", "num_key_value_heads 5"},
        {"text_config.linear_num_key_heads", "10", "linear_num_value_heads 48", "linear_num_key_heads 10"},
        {"text_config.rms_norm_eps", "0", "rms_norm_eps is 0", "accepted"},
        {"text_config", "[]", "text_config", "object"},
    };
    refuse_each(cases, LEN(cases));
}

static void test_slices(void **state) {
    (void)state;
    assert_int_equal(ql_config_slices(24, 48, 17408), 8);
    assert_int_equal(ql_config_slices(4, 8, 1024), 4);
    assert_int_equal(ql_config_slices(4, 6, 256), 2);
    assert_int_equal(ql_config_slices(6, 4, 384), 2);
    assert_int_equal(ql_config_slices(8, 16, 512), 8);
    assert_int_equal(ql_config_slices(16, 32, 16 * 12), 4); /* 12 groups of 16 */
    assert_int_equal(ql_config_slices(7, 8, 1024), 1);
    assert_int_equal(ql_config_slices(64, 64, 64 * 16), 8); /* never more */
}

/* ---- end of sequence, sampling, files -------------------------------------------------------------------------- */

static char folder[] = "/tmp/ql-config-XXXXXX";

static int set_up(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static void remove_file(const char *name) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    unlink(path);
}

static int tear_down(void **state) {
    (void)state;
    remove_file("config.json");
    remove_file("generation_config.json");
    remove_file("hf_quant_config.json");
    return rmdir(folder);
}

static void write_json(const char *name, json_t *v) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(json_dump_file(v, path, 0), 0);
    json_decref(v);
}

static ql_config load(json_t **quantization) {
    ql_config c;
    ql_error err = {0};
    if (ql_config_load(folder, &c, quantization, &err) != QL_OK) {
        fail_msg("refused: %s", err.text);
    }
    return c;
}

static void refuse_load(const char *a, const char *b) {
    ql_config c;
    json_t *q = NULL;
    ql_error err = {0};
    assert_int_equal(ql_config_load(folder, &c, &q, &err), QL_ERR_MODEL);
    assert_contains(&err, a);
    assert_contains(&err, b);
    assert_null(q);
}

static void test_generation_config(void **state) {
    (void)state;
    json_t *q = NULL;
    write_json("config.json", nested());
    ql_config c = load(&q);
    assert_null(q);
    assert_int_equal(c.n_eos, 1);
    assert_false(c.do_sample);
    assert_true(c.temperature == 1 && c.top_p == 1 && c.top_k == 0);

    write_json("generation_config.json",
               ql_test_json("{'eos_token_id':[248046,248044],'do_sample':true,'temperature':0.6,"
                            "'top_k':20,'top_p':0.95,'transformers_version':'5'}"));
    c = load(&q);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos[0], 248046);
    assert_int_equal(c.eos[1], 248044);
    assert_true(c.do_sample);
    assert_true(c.temperature == 0.6f && c.top_p == 0.95f && c.top_k == 20);

    write_json("generation_config.json", ql_test_json("{'eos_token_id':7}"));
    c = load(&q);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos[0], 7);

    static const struct {
        const char *json, *a, *b;
    } cases[] = {
        {"{'eos_token_id':248320}", "eos_token_id 248320", "vocabulary of 248320"},
        {"{'eos_token_id':-1}", "eos_token_id -1", "vocabulary"},
        {"{'eos_token_id':'x'}", "eos_token_id", "id or a list"},
        {"{'eos_token_id':[1,2,3,4,5,6,7,8,9]}", "more than 8", "eos_token_id"},
        {"{'temperature':-0.5}", "temperature is -0.5", "accepted"},
        {"{'top_p':0}", "top_p is 0", "accepted"},
        {"{'top_p':1.5}", "top_p is 1.5", "accepted"},
        {"{'top_k':-1}", "top_k is -1", "accepted"},
        {"{'do_sample':1}", "do_sample", "true or false"},
        {"[]", "generation_config.json", "object"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        write_json("generation_config.json", ql_test_json(cases[i].json));
        refuse_load(cases[i].a, cases[i].b);
    }
    remove_file("generation_config.json");
}

static void test_where_quantization_comes_from(void **state) {
    (void)state;
    json_t *q = NULL;
    write_json("config.json", nested());
    write_json("hf_quant_config.json",
               ql_test_json("{'producer':{'name':'modelopt'},'quantization':{'quant_algo':'NVFP4'}}"));
    load(&q);
    assert_non_null(json_object_get(q, "quantization"));
    json_decref(q);
    write_json("config.json", with(nested(), "quantization_config", "{'quant_method':'fp8'}"));
    q = NULL;
    load(&q);
    assert_string_equal(json_string_value(json_object_get(q, "quant_method")), "fp8");
    json_decref(q);
    remove_file("hf_quant_config.json");
    write_json("config.json", with(nested(), "text_config.quantization_config", "{'quant_method':'modelopt'}"));
    q = NULL;
    load(&q);
    assert_string_equal(json_string_value(json_object_get(q, "quant_method")), "modelopt");
    json_decref(q);
    write_json("config.json", with(nested(), "quantization_config", "'fp8'"));
    refuse_load("quantization_config", "object");
}

static void test_missing_and_broken_files(void **state) {
    (void)state;
    remove_file("config.json");
    refuse_load("cannot open", "config.json");
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    static const char broken[] = "{\"hidden_size\": 1, \"hidden_size\": 2}";
    ql_error err = {0};
    assert_int_equal(ql_write_file(path, broken, strlen(broken), &err), QL_OK);
    refuse_load("config.json", "duplicate");
}

static void test_bundled_models(void **state) {
    (void)state;
    static const struct {
        const char *dir;
        int32_t n_layer, slices, n_eos;
    } models[] = {
        {"models/tiny", 4, 4, 2},
        {"tests/data/micro-bf16", 4, 4, 0},
        {"tests/data/micro-mixed", 8, 2, 0},
        {"tests/data/micro-fp8-block", 4, 2, 0},
        {"tests/data/micro-nvfp4-modelopt", 4, 4, 0},
        {"tests/data/micro-lanes8", 4, 8, 0},
    };
    for (size_t i = 0; i < LEN(models); i++) {
        ql_config c;
        json_t *q = NULL;
        ql_error err = {0};
        if (ql_config_load(models[i].dir, &c, &q, &err) != QL_OK) {
            fail_msg("%s", err.text);
        }
        assert_int_equal(c.n_layer, models[i].n_layer);
        assert_int_equal(c.slices, models[i].slices);
        assert_int_equal(c.n_eos, models[i].n_eos);
        json_decref(q);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nested_and_flat_agree),
        cmocka_unit_test(test_text_config_wins_over_the_root),
        cmocka_unit_test(test_architecture),
        cmocka_unit_test(test_layer_kinds),
        cmocka_unit_test(test_older_flat_rope),
        cmocka_unit_test(test_rope_values),
        cmocka_unit_test(test_yarn_nested),
        cmocka_unit_test(test_misplaced_rope_overrides),
        cmocka_unit_test(test_values_the_kernels_are_written_for),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_generation_config),
        cmocka_unit_test(test_where_quantization_comes_from),
        cmocka_unit_test(test_missing_and_broken_files),
        cmocka_unit_test(test_bundled_models),
    };
    return cmocka_run_group_tests_name("config", tests, set_up, tear_down);
}
