/* A quantization_config. Whatever it says, it says the same twice, names a rule, and an entry that ignores a module by its
 * exact name makes that module plain under every prefix. */
#include "loader/quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool ok) {
    if (!ok) {
        abort();
    }
}

static const char *const modules[] = {"lm_head",
                                      "mtp.fc",
                                      "mtp.layers.0.mlp.up_proj",
                                      "layers.0.linear_attn.in_proj_qkv",
                                      "layers.12.mlp.down_proj",
                                      "layers.3.self_attn.q_proj"};
enum { N_MODULES = sizeof modules / sizeof *modules };

static ql_expect ask(const ql_quant *q, const char *module, const char **rule, bool *ok) {
    ql_expect expect = QL_EXPECT_PLAIN;
    ql_error err = {0};
    *rule = "";
    const ql_status status = ql_quant_expect(q, module, &expect, rule, &err);
    *ok = status == QL_OK;
    check(*ok ? **rule != 0 && err.status == QL_OK : status == QL_ERR_MODEL && err.text[0] != 0);
    check(expect == QL_EXPECT_PLAIN || expect == QL_EXPECT_NVFP4 || expect == QL_EXPECT_FP8);
    return expect;
}

/* Puts an exact name first in the list that makes modules plain. */
static void check_exact_ignore(json_t *cfg, const char *key, const char *prefix) {
    json_t *list = json_object_get(cfg, key);
    if (!json_is_array(list)) {
        return;
    }
    char name[128];
    snprintf(name, sizeof name, "%slayers.12.mlp.down_proj", prefix);
    json_array_insert_new(list, 0, json_string(name));
    ql_quant *q = NULL;
    if (ql_quant_open(&q, cfg, NULL) == QL_OK) {
        const char *rule;
        bool ok;
        const ql_expect expect = ask(q, "layers.12.mlp.down_proj", &rule, &ok);
        check(ok && expect == QL_EXPECT_PLAIN && strstr(rule, name));
        ql_quant_close(&q);
    }
    json_array_remove(list, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_t *cfg = NULL;
    if (ql_json_parse((const char *)data, size, "fuzz", &cfg, NULL) != QL_OK) {
        return 0;
    }
    ql_quant *q = NULL;
    ql_error err = {0};
    const ql_status status = ql_quant_open(&q, cfg, &err);
    if (status != QL_OK) {
        check(!q && err.status == status && err.text[0]);
        json_decref(cfg);
        return 0;
    }
    check(strlen(ql_quant_text(q)) > 0 && strlen(ql_quant_text(q)) < 64);
    for (int i = 0; i < N_MODULES; i++) {
        const char *rule, *again;
        bool ok, ok_again;
        const ql_expect expect = ask(q, modules[i], &rule, &ok);
        check(ask(q, modules[i], &again, &ok_again) == expect && ok == ok_again && strcmp(rule, again) == 0);
    }
    ql_quant_close(&q);
    check(q == NULL);
    const char *method = json_string_value(json_object_get(cfg, "quant_method"));
    const char *key = method && strcmp(method, "fp8") == 0 ? "modules_to_not_convert" : "ignore";
    check_exact_ignore(cfg, key, "model.");
    check_exact_ignore(cfg, key, "model.language_model.");
    check_exact_ignore(cfg, key, "language_model.model.");
    json_decref(cfg);
    return 0;
}
