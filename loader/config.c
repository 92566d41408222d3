/* A config is read through one merged object: the members of text_config over those of the root, since some exports
 * repeat a few keys above. The rope settings are the exception: a copy at the root of a nested config has no effect in
 * the reference implementation, so one that differs from the nested settings is refused instead of being dropped. */
#include "loader/config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_CONFIG_BYTES = 16 << 20, MAX_DIM = 1 << 20, MAX_HEADS = 4096, MAX_VOCAB = 1 << 24 };

static const char *const architectures[] = {"Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"};

int32_t ql_config_slices(int32_t n_head, int32_t n_value_head, int32_t intermediate) {
    int32_t slices = 8;
    while (slices > 1 && (n_head % slices || n_value_head % slices || intermediate % (16 * slices))) {
        slices /= 2;
    }
    return slices;
}

/* ---- architecture --------------------------------------------------------------------------------------------- */

static ql_status parse_architecture(const json_t *root, const char *what, ql_config *c, ql_error *err) {
    const json_t *list = json_object_get(root, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    if (!name) { /* some re-exports drop the list */
        QL_TRY(ql_json_str(root, what, "model_type", &name, err));
        if (name && strcmp(name, "qwen3_5") == 0) {
            name = architectures[0];
        } else if (name && strcmp(name, "qwen3_5_text") == 0) {
            name = architectures[1];
        }
    }
    for (size_t i = 0; name && i < sizeof architectures / sizeof *architectures; i++) {
        if (strcmp(name, architectures[i]) == 0) {
            snprintf(c->architecture, sizeof c->architecture, "%s", name);
            return QL_OK;
        }
    }
    return ql_fail(err, QL_ERR_MODEL,
                   "%s: the architecture \"%.64s\" is not supported; supported are %s and %s (dense text)", what,
                   name ? name : "", architectures[0], architectures[1]);
}

/* ---- rope ----------------------------------------------------------------------------------------------------- */

/* Everything that configures rotary positions in any generation of the format. */
static bool is_rope_key(const char *key) {
    static const char *const others[] = {"partial_rotary_factor", "mrope_section", "mrope_interleaved",
                                         "original_max_position_embeddings", "factor"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (strcmp(key, others[i]) == 0) {
            return true;
        }
    }
    return strncmp(key, "rope", 4) == 0 || strncmp(key, "yarn", 4) == 0;
}

/* rope_theta, partial_rotary_factor, rope_scaling and rope_parameters may stand beside the model's sizes; all else about
 * rope belongs inside rope_parameters. */
static ql_status check_rope_keys(const json_t *text, const char *what, const char *where, ql_error *err) {
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)text, key, v) {
        if (is_rope_key(key) && strcmp(key, "rope_parameters") != 0 && strcmp(key, "rope_scaling") != 0 &&
            strcmp(key, "rope_theta") != 0 && strcmp(key, "partial_rotary_factor") != 0) {
            return ql_fail(err, QL_ERR_MODEL,
                           "%s: %s%.64s is misplaced or unknown; rope settings belong into %srope_parameters", what,
                           where, key, where);
        }
    }
    return QL_OK;
}

static bool same_value(const json_t *a, const json_t *b) {
    return json_equal(a, b) || (json_is_number(a) && json_is_number(b) && json_number_value(a) == json_number_value(b));
}

static ql_status check_rope_at_root(const json_t *root, const json_t *text, const char *what, ql_error *err) {
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)root, key, v) {
        if (is_rope_key(key) && !json_is_null(v) && !same_value(v, json_object_get(text, key)) &&
            !same_value(v, json_object_get(json_object_get(text, "rope_parameters"), key))) {
            return ql_fail(err, QL_ERR_MODEL,
                           "%s: %.64s at the top level has no effect beside text_config; it belongs into "
                           "text_config.rope_parameters",
                           what, key);
        }
    }
    return QL_OK;
}

static ql_status rope_type(const json_t *rope, const char *what, const char **type, ql_error *err) {
    *type = "default";
    QL_TRY(ql_json_str(rope, what, "type", type, err)); /* the older spelling */
    QL_TRY(ql_json_str(rope, what, "rope_type", type, err));
    if (strcmp(*type, "mrope") == 0) { /* for text the three position streams are equal: ordinary rope */
        *type = "default";
    }
    return QL_OK;
}

/* A yarn parameter that this runtime only knows at its usual value. */
static ql_status only_value(const json_t *rope, const char *what, const char *key, double accepted, ql_error *err) {
    double v = accepted;
    QL_TRY(ql_json_real(rope, what, key, &v, err));
    if (v != accepted) {
        return ql_fail(err, QL_ERR_MODEL, "%s: %s is %g; accepted is %g", what, key, v, accepted);
    }
    return QL_OK;
}

static ql_status parse_yarn(const json_t *rope, const char *what, ql_config *c, ql_error *err) {
    static const char *const needed[] = {"factor", "original_max_position_embeddings"};
    for (int i = 0; i < 2; i++) {
        const json_t *v = json_object_get(rope, needed[i]);
        if (!v || json_is_null(v)) {
            return ql_fail(err, QL_ERR_MODEL, "%s: rope_type \"yarn\" needs %s", what, needed[i]);
        }
    }
    QL_TRY(ql_json_real(rope, what, "factor", &c->yarn_factor, err));
    if (!(c->yarn_factor >= 1 && c->yarn_factor <= 1024)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: factor is %g; accepted are 1 to 1024", what, c->yarn_factor);
    }
    QL_TRY(ql_json_i32(rope, what, "original_max_position_embeddings", 1, 1 << 24, &c->yarn_original_ctx, err));
    QL_TRY(only_value(rope, what, "beta_fast", 32, err));
    QL_TRY(only_value(rope, what, "beta_slow", 1, err));
    const double stretched = floor(c->yarn_factor * c->yarn_original_ctx);
    if (stretched > c->max_ctx) {
        c->max_ctx = stretched < (1 << 30) ? (int32_t)stretched : 1 << 30;
    }
    return QL_OK;
}

static ql_status parse_rope_object(const json_t *rope, const char *what, bool yarn_allowed, ql_config *c,
                                   double *rotary_factor, ql_error *err) {
    if (!json_is_object(rope)) {
        return ql_fail(err, QL_ERR_MODEL, "%s must be an object", what);
    }
    static const char *const plain[] = {
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"};
    static const char *const yarn[] = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"};
    const char *type;
    QL_TRY(rope_type(rope, what, &type, err));
    const bool is_yarn = strcmp(type, "yarn") == 0;
    if (!is_yarn && strcmp(type, "default") != 0) {
        return ql_fail(err, QL_ERR_MODEL,
                       "%s: rope_type \"%.64s\" is not supported; supported are \"default\" and \"yarn\"", what, type);
    }
    if (is_yarn && !yarn_allowed) {
        return ql_fail(err, QL_ERR_MODEL, "%s: yarn is accepted in rope_parameters only", what);
    }
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)rope, key, v) {
        bool known = json_is_null(v);
        for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
            known = known || strcmp(key, plain[i]) == 0;
        }
        for (size_t i = 0; is_yarn && i < sizeof yarn / sizeof *yarn; i++) {
            known = known || strcmp(key, yarn[i]) == 0;
        }
        if (!known) {
            char value[QL_JSON_TEXT];
            return ql_fail(
                err, QL_ERR_MODEL,
                "%s: the setting %.64s (%s) is not supported with rope_type \"%s\"; accepted are rope_theta, "
                "partial_rotary_factor, mrope_section and mrope_interleaved%s",
                what, key, ql_json_text(v, value), type,
                is_yarn ? ", factor, original_max_position_embeddings, beta_fast and beta_slow"
                        : ", and for rope_type \"yarn\" its own");
        }
    }
    QL_TRY(ql_json_real(rope, what, "rope_theta", &c->rope_theta, err));
    QL_TRY(ql_json_real(rope, what, "partial_rotary_factor", rotary_factor, err));
    return is_yarn ? parse_yarn(rope, what, c, err) : QL_OK;
}

static ql_status check_mrope(const json_t *rope, const char *what, int32_t rotary_dim, ql_error *err) {
    const json_t *section = json_object_get(rope, "mrope_section");
    if (!section || json_is_null(section)) {
        return QL_OK;
    }
    int64_t sum = 0;
    for (size_t i = 0; i < json_array_size(section); i++) {
        int64_t v = json_integer_value(json_array_get(section, i));
        if (v < 0 || v > QL_HEAD_DIM) {
            return ql_fail(err, QL_ERR_MODEL, "%s: mrope_section holds %lld; accepted are 0 to %d", what, (long long)v,
                           QL_HEAD_DIM);
        }
        sum += v;
    }
    if (sum != rotary_dim / 2) {
        return ql_fail(err, QL_ERR_MODEL,
                       "%s: mrope_section must be a list that adds up to %d (half the rotary dimensions), not %lld",
                       what, rotary_dim / 2, (long long)sum);
    }
    return QL_OK;
}

/* `text` is the object that holds the model's sizes: text_config, or the root of a flat config. */
static ql_status parse_rope(const json_t *text, const char *what, const char *where, ql_config *c, ql_error *err) {
    QL_TRY(check_rope_keys(text, what, where, err));
    c->rope_theta = 10000000;
    c->yarn_factor = 1;
    double flat_factor = 0.25, factor;
    QL_TRY(ql_json_real(text, what, "rope_theta", &c->rope_theta, err));
    QL_TRY(ql_json_real(text, what, "partial_rotary_factor", &flat_factor, err));
    factor = flat_factor;
    const double flat_theta = c->rope_theta;

    static const char *const objects[] = {"rope_scaling", "rope_parameters"};
    char name[512];
    for (int i = 0; i < 2; i++) {
        const json_t *rope = json_object_get(text, objects[i]);
        if (rope && !json_is_null(rope)) {
            snprintf(name, sizeof name, "%s: %s%s", what, where, objects[i]);
            QL_TRY(parse_rope_object(rope, name, i == 1, c, &factor, err));
        }
    }
    if (json_is_number(json_object_get(text, "rope_theta")) && c->rope_theta != flat_theta) {
        return ql_fail(err, QL_ERR_MODEL, "%s: %srope_theta is %g but %srope_parameters says %g", what, where,
                       flat_theta, where, c->rope_theta);
    }
    if (json_is_number(json_object_get(text, "partial_rotary_factor")) && factor != flat_factor) {
        return ql_fail(err, QL_ERR_MODEL, "%s: %spartial_rotary_factor is %g but %srope_parameters says %g", what,
                       where, flat_factor, where, factor);
    }
    if (!(c->rope_theta > 1 && c->rope_theta <= 1e12)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: rope_theta is %g; accepted are values over 1 up to 1e12", what,
                       c->rope_theta);
    }
    const double dim = factor * QL_HEAD_DIM;
    if (!(dim >= 2 && dim <= QL_HEAD_DIM) || fmod(dim, 2) != 0) {
        return ql_fail(
            err, QL_ERR_MODEL,
            "%s: partial_rotary_factor %g of head_dim %d gives %g rotary dimensions; accepted are even numbers "
            "from 2 to %d",
            what, factor, QL_HEAD_DIM, dim, QL_HEAD_DIM);
    }
    c->rotary_dim = (int32_t)dim;
    for (int i = 0; i < 2; i++) {
        QL_TRY(check_mrope(json_object_get(text, objects[i]), what, c->rotary_dim, err));
    }
    return QL_OK;
}

/* ---- sizes ---------------------------------------------------------------------------------------------------- */

typedef struct int_key {
    const char *key;
    int32_t min, max;
    size_t offset; /* in ql_config */
} int_key;

static ql_status parse_sizes(const json_t *text, const char *what, ql_config *c, ql_error *err) {
    static const int_key keys[] = {
        {"hidden_size", 16, MAX_DIM, offsetof(ql_config, hidden)},
        {"num_hidden_layers", 1, QL_MAX_LAYERS, offsetof(ql_config, n_layer)},
        {"intermediate_size", 16, MAX_DIM, offsetof(ql_config, intermediate)},
        {"vocab_size", QL_MAX_SLICES, MAX_VOCAB, offsetof(ql_config, vocab)},
        {"num_attention_heads", 1, MAX_HEADS, offsetof(ql_config, n_head)},
        {"num_key_value_heads", 1, MAX_HEADS, offsetof(ql_config, n_kv_head)},
        {"linear_num_key_heads", 1, MAX_HEADS, offsetof(ql_config, n_key_head)},
        {"linear_num_value_heads", 1, MAX_HEADS, offsetof(ql_config, n_value_head)},
        {"max_position_embeddings", 1, 1 << 30, offsetof(ql_config, max_ctx)},
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        int32_t *out = (int32_t *)((char *)c + keys[i].offset);
        *out = -1;
        QL_TRY(ql_json_i32(text, what, keys[i].key, keys[i].min, keys[i].max, out, err));
        if (*out < 0) {
            return ql_fail(err, QL_ERR_MODEL, "%s: %s is missing", what, keys[i].key);
        }
    }
    if (c->hidden % 16 || c->intermediate % 16) {
        return ql_fail(err, QL_ERR_MODEL, "%s: hidden_size %d and intermediate_size %d must be multiples of 16", what,
                       c->hidden, c->intermediate);
    }
    if (c->n_head % c->n_kv_head) {
        return ql_fail(err, QL_ERR_MODEL, "%s: num_attention_heads %d is not a multiple of num_key_value_heads %d",
                       what, c->n_head, c->n_kv_head);
    }
    if (c->n_value_head % c->n_key_head) {
        return ql_fail(err, QL_ERR_MODEL, "%s: linear_num_value_heads %d is not a multiple of linear_num_key_heads %d",
                       what, c->n_value_head, c->n_key_head);
    }
    double eps = 1e-6;
    QL_TRY(ql_json_real(text, what, "rms_norm_eps", &eps, err));
    if (!(eps > 0 && eps < 1)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: rms_norm_eps is %g; accepted are values between 0 and 1", what, eps);
    }
    c->rms_eps = (float)eps;
    c->slices = ql_config_slices(c->n_head, c->n_value_head, c->intermediate);
    return QL_OK;
}

/* What the kernels are written for. The defaults are the architecture's, for exports that leave them out. */
static ql_status check_fixed(const json_t *text, const char *what, ql_error *err) {
    static const struct {
        const char *key;
        int32_t accepted;
    } ints[] = {
        {"head_dim", QL_HEAD_DIM},
        {"linear_key_head_dim", QL_GDN_DIM},
        {"linear_value_head_dim", QL_GDN_DIM},
        {"linear_conv_kernel_dim", QL_CONV_TAPS},
    };
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        int64_t v = ints[i].accepted;
        QL_TRY(ql_json_int(text, what, ints[i].key, INT64_MIN, INT64_MAX, &v, err));
        if (v != ints[i].accepted) {
            return ql_fail(err, QL_ERR_MODEL, "%s: %s is %lld; accepted is %d", what, ints[i].key, (long long)v,
                           ints[i].accepted);
        }
    }
    static const struct {
        const char *key;
        bool accepted;
    } bools[] = {
        {"attention_bias", false},
        {"attn_output_gate", true},
        {"mtp_use_dedicated_embeddings", false},
    };
    for (size_t i = 0; i < sizeof bools / sizeof *bools; i++) {
        bool v = bools[i].accepted;
        QL_TRY(ql_json_bool(text, what, bools[i].key, &v, err));
        if (v != bools[i].accepted) {
            return ql_fail(err, QL_ERR_MODEL, "%s: %s is %s; accepted is %s", what, bools[i].key, v ? "true" : "false",
                           v ? "false" : "true");
        }
    }
    const char *act = "silu", *gate = "swish";
    QL_TRY(ql_json_str(text, what, "hidden_act", &act, err));
    if (strcmp(act, "silu") != 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s: hidden_act is \"%.64s\"; accepted is \"silu\"", what, act);
    }
    QL_TRY(ql_json_str(text, what, "output_gate_type", &gate, err));
    if (strcmp(gate, "swish") != 0 && strcmp(gate, "silu") != 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s: output_gate_type is \"%.64s\"; accepted are \"swish\" and \"silu\"",
                       what, gate);
    }
    const json_t *mlp_only = json_object_get(text, "mlp_only_layers");
    if (mlp_only && !json_is_null(mlp_only) && !(json_is_array(mlp_only) && json_array_size(mlp_only) == 0)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: mlp_only_layers must be empty", what);
    }
    int32_t experts = 0;
    QL_TRY(ql_json_i32(text, what, "num_experts", INT32_MIN, INT32_MAX, &experts, err));
    if (experts != 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s: num_experts is %d; only dense models are supported", what, experts);
    }
    return QL_OK;
}

static ql_status parse_layers(const json_t *text, const char *what, ql_config *c, ql_error *err) {
    int32_t interval = 0;
    QL_TRY(ql_json_i32(text, what, "full_attention_interval", 1, QL_MAX_LAYERS, &interval, err));
    const json_t *types = json_object_get(text, "layer_types");
    if (!types || json_is_null(types)) {
        if (interval == 0) {
            return ql_fail(err, QL_ERR_MODEL, "%s: neither layer_types nor full_attention_interval is there", what);
        }
        for (int32_t i = 0; i < c->n_layer; i++) {
            c->full_attention[i] = (i + 1) % interval == 0;
        }
        return QL_OK;
    }
    if (!json_is_array(types) || json_array_size(types) != (size_t)c->n_layer) {
        return ql_fail(err, QL_ERR_MODEL, "%s: layer_types must list %d layers (num_hidden_layers), not %zu", what,
                       c->n_layer, json_array_size(types));
    }
    for (int32_t i = 0; i < c->n_layer; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        if (!type || (strcmp(type, "linear_attention") != 0 && strcmp(type, "full_attention") != 0)) {
            return ql_fail(err, QL_ERR_MODEL,
                           "%s: layer_types[%d] is \"%.64s\"; accepted are \"linear_attention\" and \"full_attention\"",
                           what, i, type ? type : "no string");
        }
        c->full_attention[i] = type[0] == 'f';
    }
    return QL_OK;
}

/* ---- end of sequence, sampling defaults ------------------------------------------------------------------------ */

static ql_status add_eos(const json_t *v, const char *what, ql_config *c, ql_error *err) {
    if (!json_is_integer(v)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: eos_token_id must be an id or a list of ids", what);
    }
    int64_t id = json_integer_value(v);
    if (id < 0 || id >= c->vocab) {
        return ql_fail(err, QL_ERR_MODEL, "%s: eos_token_id %lld is outside the vocabulary of %d", what, (long long)id,
                       c->vocab);
    }
    if (c->n_eos == QL_MAX_EOS) {
        return ql_fail(err, QL_ERR_MODEL, "%s: more than %d ids in eos_token_id", what, QL_MAX_EOS);
    }
    c->eos[c->n_eos++] = (int32_t)id;
    return QL_OK;
}

/* Replaces the ids when the key is there. */
static ql_status parse_eos(const json_t *obj, const char *what, ql_config *c, ql_error *err) {
    const json_t *v = json_object_get(obj, "eos_token_id");
    if (!v || json_is_null(v)) {
        return QL_OK;
    }
    c->n_eos = 0;
    if (!json_is_array(v)) {
        return add_eos(v, what, c, err);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        QL_TRY(add_eos(json_array_get(v, i), what, c, err));
    }
    return QL_OK;
}

ql_status ql_config_parse_generation(const json_t *root, const char *what, ql_config *c, ql_error *err) {
    QL_TRY(parse_eos(root, what, c, err));
    double temperature = c->temperature, top_p = c->top_p;
    QL_TRY(ql_json_bool(root, what, "do_sample", &c->do_sample, err));
    QL_TRY(ql_json_real(root, what, "temperature", &temperature, err));
    QL_TRY(ql_json_i32(root, what, "top_k", 0, INT32_MAX, &c->top_k, err));
    QL_TRY(ql_json_real(root, what, "top_p", &top_p, err));
    if (!(temperature >= 0 && temperature <= 100)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: temperature is %g; accepted are 0 to 100", what, temperature);
    }
    if (!(top_p > 0 && top_p <= 1)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: top_p is %g; accepted are values over 0 up to 1", what, top_p);
    }
    c->temperature = (float)temperature;
    c->top_p = (float)top_p;
    return QL_OK;
}

/* ---- whole files ---------------------------------------------------------------------------------------------- */

static ql_status parse_merged(const json_t *root, const json_t *text, const json_t *merged, const char *what,
                              ql_config *c, ql_error *err) {
    QL_TRY(parse_architecture(root, what, c, err));
    QL_TRY(check_fixed(merged, what, err));
    QL_TRY(parse_sizes(merged, what, c, err));
    QL_TRY(parse_layers(merged, what, c, err));
    if (text) {
        QL_TRY(check_rope_at_root(root, text, what, err));
    }
    QL_TRY(parse_rope(text ? text : root, what, text ? "text_config." : "", c, err));
    QL_TRY(ql_json_i32(merged, what, "mtp_num_hidden_layers", 0, 1, &c->n_mtp_layer, err));
    QL_TRY(ql_json_bool(merged, what, "tie_word_embeddings", &c->tied, err));
    c->temperature = 1;
    c->top_p = 1;
    return parse_eos(merged, what, c, err);
}

ql_status ql_config_parse(const json_t *root, const char *what, ql_config *config, ql_error *err) {
    const json_t *text = json_object_get(root, "text_config");
    if (json_is_null(text)) {
        text = NULL;
    }
    if (text && !json_is_object(text)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: text_config must be an object", what);
    }
    ql_config c = {0};
    json_t *merged = json_copy((json_t *)root);
    if (!merged || json_object_size(merged) != json_object_size(root)) { /* a copy drops keys when memory ends */
        json_decref(merged);
        return ql_fail(err, QL_ERR_MEMORY, "%s: no host memory to read it", what);
    }
    ql_status status = QL_OK;
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)text, key, v) {
        if (!json_is_null(v) && json_object_set(merged, key, v) != 0) {
            status = ql_fail(err, QL_ERR_MEMORY, "%s: no host memory to read it", what);
            goto done;
        }
    }
    status = parse_merged(root, text, merged, what, &c, err);
    if (status == QL_OK) {
        *config = c;
    }
done:
    json_decref(merged);
    return status;
}

/* quantization_config of the root, or of text_config, where some exports put it. */
static const json_t *quantization_of(const json_t *root) {
    const json_t *q = json_object_get(root, "quantization_config");
    if (!q || json_is_null(q)) {
        q = json_object_get(json_object_get(root, "text_config"), "quantization_config");
    }
    return json_is_null(q) ? NULL : q;
}

static ql_status load_quantization(const char *dir, const json_t *root, const char *what, json_t **out, ql_error *err) {
    const json_t *q = quantization_of(root);
    if (q) {
        if (!json_is_object(q)) {
            return ql_fail(err, QL_ERR_MODEL, "%s: quantization_config must be an object", what);
        }
        *out = json_incref((json_t *)q);
        return QL_OK;
    }
    char path[4096];
    snprintf(path, sizeof path, "%s/hf_quant_config.json", dir);
    return ql_file_exists(path) ? ql_json_load(path, MAX_CONFIG_BYTES, out, err) : QL_OK;
}

ql_status ql_config_load(const char *dir, ql_config *config, json_t **quantization, ql_error *err) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/generation_config.json", dir) >= (int)sizeof path) {
        return ql_fail(err, QL_ERR_MODEL, "the directory name is longer than %zu bytes", sizeof path - 32);
    }
    ql_config c;
    json_t *root = NULL, *generation = NULL, *q = NULL;
    ql_status status;
    if (ql_file_exists(path)) {
        QL_TRY_GOTO(ql_json_load(path, MAX_CONFIG_BYTES, &generation, err), done);
    }
    char config_path[4096];
    snprintf(config_path, sizeof config_path, "%s/config.json", dir);
    QL_TRY_GOTO(ql_json_load(config_path, MAX_CONFIG_BYTES, &root, err), done);
    QL_TRY_GOTO(ql_config_parse(root, config_path, &c, err), done);
    if (generation) {
        QL_TRY_GOTO(ql_config_parse_generation(generation, path, &c, err), done);
    }
    QL_TRY_GOTO(load_quantization(dir, root, config_path, &q, err), done);
    *config = c;
    *quantization = q;
done:
    json_decref(generation);
    json_decref(root);
    return status;
}
