/* Every scheme becomes one ordered list of entries; the first that matches a module decides. compressed-tensors: the
 * ignore list, then each group's targets in group order. ModelOpt: the exclusions, the layers named one by one, then the
 * whole-model algorithm. Block FP8: the modules not to convert, then everything. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "loader/quant.h"

#include <fnmatch.h>
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ENTRIES = 1 << 16, MAX_PATTERN = 1024, MATCH_LIMIT = 1000000, MAX_FORMS = 4, MAX_MODULE = 256 };

typedef enum entry_kind { ENTRY_NAME, ENTRY_PARENT, ENTRY_CLASS_LINEAR, ENTRY_REGEX, ENTRY_GLOB, ENTRY_ALL } entry_kind;

typedef struct entry {
    entry_kind kind;
    ql_expect expect;
    char *pattern;
    pcre2_code *regex;
    char *rule; /* for messages */
} entry;

struct ql_quant {
    char text[64];
    entry *entry;
    int32_t n_entry, cap;
    pcre2_match_context *limits;
    pcre2_match_data *match;
};

const char *const ql_decoder_prefixes[] = {"model.language_model.", "language_model.model.", "model.", NULL};

/* ---- building the list ---------------------------------------------------------------------------------------- */

static ql_status add(ql_quant *q, entry_kind kind, ql_expect expect, const char *list, const char *pattern,
                     ql_error *err) {
    if (strlen(pattern) > MAX_PATTERN) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: an entry of %zu bytes in %s; at most %d are accepted",
                       strlen(pattern), list, MAX_PATTERN);
    }
    if (q->n_entry == MAX_ENTRIES) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: more than %d entries", MAX_ENTRIES);
    }
    if (q->n_entry == q->cap) {
        int32_t cap = q->cap ? 2 * q->cap : 64;
        entry *grown = ql_realloc(NULL, q->entry, (size_t)cap * sizeof *grown);
        if (!grown) {
            return ql_fail(err, QL_ERR_MEMORY, "no host memory for %d quantization entries", cap);
        }
        q->entry = grown;
        q->cap = cap;
    }
    entry *e = &q->entry[q->n_entry++];
    *e = (entry){.kind = kind, .expect = expect, .pattern = ql_strdup(NULL, pattern)};
    size_t rule_bytes = strlen(list) + strlen(pattern) + 4;
    QL_TRY(ql_alloc(NULL, rule_bytes, 1, "a quantization entry", (void **)&e->rule, err));
    snprintf(e->rule, rule_bytes, *pattern ? "%s \"%s\"" : "%s", list, pattern);
    if (!e->pattern) {
        return ql_fail(err, QL_ERR_MEMORY, "no host memory for a quantization entry");
    }
    if (kind != ENTRY_REGEX) {
        return QL_OK;
    }
    int code;
    PCRE2_SIZE at;
    const uint32_t options = PCRE2_ANCHORED | PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C;
    e->regex = pcre2_compile((PCRE2_SPTR)pattern + strlen("re:"), PCRE2_ZERO_TERMINATED, options, &code, &at, NULL);
    if (!e->regex) {
        char text[128] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        return ql_fail(err, QL_ERR_MODEL,
                       "quantization_config: %s: the regular expression \"%.128s\" is wrong at %zu: %s", list, pattern,
                       (size_t)at, text);
    }
    pcre2_jit_compile(e->regex, PCRE2_JIT_COMPLETE); /* where it cannot, matching interprets */
    return QL_OK;
}

typedef ql_status (*add_fn)(ql_quant *q, ql_expect expect, const char *list, const char *pattern, ql_error *err);

static ql_status add_target(ql_quant *q, ql_expect expect, const char *list, const char *pattern, ql_error *err) {
    if (strncmp(pattern, "re:", 3) == 0) {
        return add(q, ENTRY_REGEX, expect, list, pattern, err);
    }
    return add(q, strcmp(pattern, "Linear") == 0 ? ENTRY_CLASS_LINEAR : ENTRY_NAME, expect, list, pattern, err);
}

static ql_status add_glob(ql_quant *q, ql_expect expect, const char *list, const char *pattern, ql_error *err) {
    return add(q, ENTRY_GLOB, expect, list, pattern, err);
}

static ql_status add_parent(ql_quant *q, ql_expect expect, const char *list, const char *pattern, ql_error *err) {
    return add(q, ENTRY_PARENT, expect, list, pattern, err);
}

/* Adds each string of obj[key]; an absent list is empty. */
static ql_status add_list(ql_quant *q, const json_t *obj, const char *key, const char *list, ql_expect expect,
                          add_fn fn, ql_error *err) {
    const json_t *v = json_object_get(obj, key);
    if (!v || json_is_null(v)) {
        return QL_OK;
    }
    char text[QL_JSON_TEXT];
    if (!json_is_array(v)) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: %s of %s must be a list, not %s", key, list,
                       ql_json_text(v, text));
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const char *pattern = json_string_value(json_array_get(v, i));
        if (!pattern || !*pattern) {
            return ql_fail(err, QL_ERR_MODEL, "quantization_config: %s[%zu] of %s must be a name, not %s", key, i, list,
                           ql_json_text(json_array_get(v, i), text));
        }
        QL_TRY(fn(q, expect, list, pattern, err));
    }
    return QL_OK;
}

static bool is_empty(const json_t *v) {
    return !v || json_is_null(v) || (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

/* ---- compressed-tensors --------------------------------------------------------------------------------------- */

/* The weight arguments of one group as an expectation. */
static ql_status group_expect(const json_t *group, const char *name, ql_expect *expect, ql_error *err) {
    const json_t *w = json_object_get(group, "weights");
    if (!w || json_is_null(w)) { /* quantizes activations only */
        *expect = QL_EXPECT_PLAIN;
        return QL_OK;
    }
    char what[128];
    snprintf(what, sizeof what, "quantization_config: %.64s.weights", name);
    if (!json_is_object(w)) {
        return ql_fail(err, QL_ERR_MODEL, "%s must be an object", what);
    }
    const char *type = "int", *strategy = "tensor";
    int32_t bits = 8, group_size = 0;
    bool symmetric = true;
    QL_TRY(ql_json_str(w, what, "type", &type, err));
    QL_TRY(ql_json_str(w, what, "strategy", &strategy, err));
    QL_TRY(ql_json_i32(w, what, "num_bits", 1, 64, &bits, err));
    QL_TRY(ql_json_i32(w, what, "group_size", INT32_MIN, INT32_MAX, &group_size, err));
    QL_TRY(ql_json_bool(w, what, "symmetric", &symmetric, err));
    if (strcmp(type, "float") == 0 && symmetric && bits == 8 &&
        (strcmp(strategy, "channel") == 0 || strcmp(strategy, "tensor") == 0 || strcmp(strategy, "block") == 0)) {
        *expect = QL_EXPECT_FP8;
        return QL_OK;
    }
    if (strcmp(type, "float") == 0 && symmetric && bits == 4 && group_size == QL_NVFP4_GROUP &&
        strcmp(strategy, "tensor_group") == 0) {
        *expect = QL_EXPECT_NVFP4;
        return QL_OK;
    }
    return ql_fail(
        err, QL_ERR_MODEL,
        "%s: %d-bit %s, strategy %.32s, group_size %d, %s is not supported; supported are symmetric 8-bit float "
        "by channel, tensor or block, and symmetric 4-bit float by tensor_group of 16",
        what, bits, type, strategy, group_size, symmetric ? "symmetric" : "asymmetric");
}

static ql_status open_compressed_tensors(ql_quant *q, const json_t *cfg, ql_error *err) {
    const json_t *sparsity = json_object_get(cfg, "sparsity_config");
    const char *sparse_format = json_string_value(json_object_get(sparsity, "format"));
    if (!is_empty(sparsity) && (!sparse_format || strcmp(sparse_format, "dense") != 0)) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: sparsity_config with format \"%.64s\" is not supported",
                       sparse_format ? sparse_format : "none");
    }
    const json_t *transform = json_object_get(cfg, "transform_config");
    if (!is_empty(transform) && !is_empty(json_object_get(transform, "config_groups"))) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL,
                       "quantization_config: transform_config with config_groups %s is not supported; accepted is one "
                       "without groups",
                       ql_json_text(json_object_get(transform, "config_groups"), text));
    }
    QL_TRY(add_list(q, cfg, "ignore", "ignore", QL_EXPECT_PLAIN, add_target, err));
    const json_t *groups = json_object_get(cfg, "config_groups");
    if (!json_is_object(groups) || json_object_size(groups) == 0) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: config_groups must name at least one group");
    }
    const char *name;
    json_t *group;
    json_object_foreach((json_t *)groups, name, group) {
        ql_expect expect = QL_EXPECT_PLAIN;
        QL_TRY(group_expect(group, name, &expect, err));
        char list[72];
        snprintf(list, sizeof list, "%.64s", name);
        QL_TRY(add_list(q, group, "targets", list, expect, add_target, err));
    }
    int n = (int)json_object_size(groups);
    snprintf(q->text, sizeof q->text, "compressed-tensors (%d group%s)", n, n == 1 ? "" : "s");
    return QL_OK;
}

/* ---- ModelOpt ------------------------------------------------------------------------------------------------- */

#define ALGORITHMS "NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN and, for a whole model, MIXED_PRECISION"

static ql_status algorithm_expect(const char *algo, const char *where, ql_expect *expect, ql_error *err) {
    static const struct {
        const char *name;
        ql_expect expect;
    } known[] = {
        {"NVFP4", QL_EXPECT_NVFP4},
        {"W4A16_NVFP4", QL_EXPECT_NVFP4},
        {"FP8", QL_EXPECT_FP8},
        {"FP8_PER_CHANNEL_PER_TOKEN", QL_EXPECT_FP8},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(algo, known[i].name) == 0) {
            *expect = known[i].expect;
            return QL_OK;
        }
    }
    return ql_fail(err, QL_ERR_MODEL,
                   "quantization_config: quant_algo \"%.64s\" of %.128s is not supported; supported are " ALGORITHMS,
                   algo, where);
}

static ql_status check_group_size(const json_t *obj, const char *where, ql_expect expect, ql_error *err) {
    int32_t size = QL_NVFP4_GROUP;
    QL_TRY(ql_json_i32(obj, where, "group_size", INT32_MIN, INT32_MAX, &size, err));
    if (expect == QL_EXPECT_NVFP4 && size != QL_NVFP4_GROUP) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: group_size of %.128s is %d; accepted is %d", where,
                       size, QL_NVFP4_GROUP);
    }
    return QL_OK;
}

static ql_status open_modelopt(ql_quant *q, const json_t *cfg, ql_error *err) {
    const json_t *inner = json_object_get(cfg, "quantization"); /* as in hf_quant_config.json */
    if (json_is_object(inner)) {
        cfg = inner;
    }
    const char *algo = NULL;
    QL_TRY(ql_json_str(cfg, "quantization_config", "quant_algo", &algo, err));
    const json_t *layers = json_object_get(cfg, "quantized_layers");
    if (!algo && is_empty(layers)) {
        return ql_fail(
            err, QL_ERR_MODEL,
            "quantization_config: modelopt without quant_algo and quantized_layers; quant_algo may be " ALGORITHMS);
    }
    QL_TRY(add_list(q, cfg, "ignore", "ignore", QL_EXPECT_PLAIN, add_glob, err));
    QL_TRY(add_list(q, cfg, "exclude_modules", "exclude_modules", QL_EXPECT_PLAIN, add_glob, err));
    const char *name;
    json_t *layer;
    json_object_foreach((json_t *)layers, name, layer) {
        const char *layer_algo = json_string_value(json_object_get(layer, "quant_algo"));
        ql_expect expect = QL_EXPECT_PLAIN;
        QL_TRY(algorithm_expect(layer_algo ? layer_algo : "", name, &expect, err));
        QL_TRY(check_group_size(layer, name, expect, err));
        QL_TRY(add(q, ENTRY_NAME, expect, "quantized_layers", name, err));
    }
    if (algo && strcmp(algo, "MIXED_PRECISION") != 0) {
        ql_expect expect = QL_EXPECT_PLAIN;
        QL_TRY(algorithm_expect(algo, "the whole model", &expect, err));
        QL_TRY(check_group_size(cfg, "the whole model", expect, err));
        char rule[80];
        snprintf(rule, sizeof rule, "quant_algo %s", algo);
        QL_TRY(add(q, ENTRY_ALL, expect, rule, "", err));
    }
    snprintf(q->text, sizeof q->text, "modelopt %.40s", algo ? algo : "MIXED_PRECISION");
    return QL_OK;
}

/* ---- block FP8 ------------------------------------------------------------------------------------------------ */

static ql_status open_fp8(ql_quant *q, const json_t *cfg, ql_error *err) {
    const char *fmt = "e4m3";
    QL_TRY(ql_json_str(cfg, "quantization_config", "fmt", &fmt, err));
    if (strcmp(fmt, "e4m3") != 0) {
        return ql_fail(err, QL_ERR_MODEL, "quantization_config: fmt \"%.64s\" is not supported; supported is \"e4m3\"",
                       fmt);
    }
    const json_t *block = json_object_get(cfg, "weight_block_size");
    const bool has_block = block && !json_is_null(block);
    if (has_block && (json_array_size(block) != 2 || json_integer_value(json_array_get(block, 0)) != QL_FP8_BLOCK ||
                      json_integer_value(json_array_get(block, 1)) != QL_FP8_BLOCK)) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL,
                       "quantization_config: weight_block_size %s is not supported; supported is [%d,%d]",
                       ql_json_text(block, text), QL_FP8_BLOCK, QL_FP8_BLOCK);
    }
    QL_TRY(add_list(q, cfg, "modules_to_not_convert", "modules_to_not_convert", QL_EXPECT_PLAIN, add_parent, err));
    QL_TRY(add(q, ENTRY_ALL, QL_EXPECT_FP8, "quant_method fp8", "", err));
    snprintf(q->text, sizeof q->text, has_block ? "fp8 128x128" : "fp8");
    return QL_OK;
}

/* ---- open, ask ------------------------------------------------------------------------------------------------ */

static ql_status open_scheme(ql_quant *q, const json_t *cfg, ql_error *err) {
    if (!cfg) {
        snprintf(q->text, sizeof q->text, "none");
        return QL_OK;
    }
    const char *method = NULL;
    QL_TRY(ql_json_str(cfg, "quantization_config", "quant_method", &method, err));
    if (!method && json_is_object(json_object_get(cfg, "quantization"))) {
        method = "modelopt";
    }
    if (method && strcmp(method, "compressed-tensors") == 0) {
        return open_compressed_tensors(q, cfg, err);
    }
    if (method && strncmp(method, "modelopt", 8) == 0) {
        return open_modelopt(q, cfg, err);
    }
    if (method && strcmp(method, "fp8") == 0) {
        return open_fp8(q, cfg, err);
    }
    return ql_fail(
        err, QL_ERR_MODEL,
        "quantization_config: quant_method \"%.64s\" is not supported; supported are compressed-tensors, modelopt "
        "and fp8",
        method ? method : "");
}

ql_status ql_quant_open(ql_quant **quant, const json_t *quantization, ql_error *err) {
    ql_quant *q = NULL;
    QL_TRY(ql_alloc(NULL, 1, sizeof *q, "the quantization scheme", (void **)&q, err));
    q->limits = pcre2_match_context_create(NULL);
    q->match = pcre2_match_data_create(1, NULL);
    ql_status status;
    if (!q->limits || !q->match) {
        status = ql_fail(err, QL_ERR_MEMORY, "no host memory for regular expressions");
    } else {
        pcre2_set_match_limit(q->limits, MATCH_LIMIT);
        status = open_scheme(q, quantization, err);
    }
    if (status != QL_OK) {
        ql_quant_close(&q);
        return status;
    }
    *quant = q;
    return QL_OK;
}

void ql_quant_close(ql_quant **quant) {
    ql_quant *q = *quant;
    if (!q) {
        return;
    }
    for (int32_t i = 0; i < q->n_entry; i++) {
        pcre2_code_free(q->entry[i].regex);
        ql_free(NULL, q->entry[i].pattern);
        ql_free(NULL, q->entry[i].rule);
    }
    ql_free(NULL, q->entry);
    pcre2_match_context_free(q->limits);
    pcre2_match_data_free(q->match);
    ql_free(NULL, q);
    *quant = NULL;
}

/* Whether `name` is `parent` or lies below it. */
static bool is_below(const char *name, const char *parent) {
    size_t len = strlen(parent);
    return strncmp(name, parent, len) == 0 && (name[len] == 0 || name[len] == '.');
}

static ql_status matches(const ql_quant *q, const entry *e, const char *name, bool *yes, ql_error *err) {
    switch (e->kind) {
    case ENTRY_NAME: *yes = strcmp(name, e->pattern) == 0; break;
    case ENTRY_PARENT: *yes = is_below(name, e->pattern); break;
    case ENTRY_GLOB: *yes = fnmatch(e->pattern, name, 0) == 0; break;
    case ENTRY_CLASS_LINEAR:
    case ENTRY_ALL: *yes = true; break;
    case ENTRY_REGEX: {
        int rc = pcre2_match(e->regex, (PCRE2_SPTR)name, strlen(name), 0, 0, q->match, q->limits);
        *yes = rc >= 0;
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
            char text[128] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)text, sizeof text);
            return ql_fail(err, QL_ERR_MODEL, "quantization_config: %.160s cannot be matched with %.160s: %s", e->rule,
                           name, text);
        }
        break;
    }
    }
    return QL_OK;
}

/* The module's name under every prefix. */
static int name_forms(const char *module, char form[MAX_FORMS][MAX_MODULE]) {
    int n = 0;
    if (strncmp(module, "layers.", 7) == 0) {
        for (int i = 0; ql_decoder_prefixes[i]; i++) {
            snprintf(form[n++], MAX_MODULE, "%s%s", ql_decoder_prefixes[i], module);
        }
        return n;
    }
    snprintf(form[n++], MAX_MODULE, "%s", module);
    if (strcmp(module, "lm_head") == 0) {
        snprintf(form[n++], MAX_MODULE, "language_model.%s", module);
    }
    return n;
}

ql_status ql_quant_expect(const ql_quant *q, const char *module, ql_expect *expect, const char **rule, ql_error *err) {
    char form[MAX_FORMS][MAX_MODULE];
    const int n = name_forms(module, form);
    for (int32_t i = 0; i < q->n_entry; i++) {
        const entry *e = &q->entry[i];
        for (int f = 0; f < n; f++) {
            bool yes = false;
            QL_TRY(matches(q, e, form[f], &yes, err));
            if (yes) {
                *expect = e->expect;
                *rule = e->rule;
                return QL_OK;
            }
        }
    }
    *expect = QL_EXPECT_PLAIN;
    *rule = "no entry";
    return QL_OK;
}

const char *ql_quant_text(const ql_quant *q) { return q->text; }
