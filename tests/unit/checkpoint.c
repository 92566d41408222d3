/* Opening whole checkpoints: what each bundled model is decided to be, whatever prefix its names have, with and without a head and an MTP
 * module of its own; visiting what is in it; and that opening reads no data. */
#include "tests/synth.h"
#include "tests/unit/ckpt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

/* ---- bundled models ------------------------------------------------------------------------------------------- */

static void test_bundled_models(void **state) {
    (void)state;
    static const struct {
        const char *dir, *scheme;
        int32_t n_tensors, n_files, n_linears, n_nvfp4, n_fp8, n_plain, slices, has_mtp, has_tokenizer;
    } models[] = {
        {"models/tiny", "compressed-tensors (2 groups)", 115, 1, 32, 9, 17, 6, 4, 1, 1},
        {"tests/data/micro-bf16", "none", 72, 1, 32, 0, 0, 32, 4, 1, 0},
        {"tests/data/micro-mixed", "compressed-tensors (2 groups)", 212, 3, 63, 18, 33, 12, 2, 1, 0},
        {"tests/data/micro-fp8-block", "fp8 128x128", 104, 2, 32, 0, 25, 7, 2, 1, 0},
        {"tests/data/micro-nvfp4-modelopt", "modelopt NVFP4", 95, 1, 32, 13, 0, 19, 4, 0, 0},
        {"tests/data/micro-lanes8", "compressed-tensors (2 groups)", 116, 1, 32, 9, 17, 6, 8, 1, 0},
    };
    for (size_t i = 0; i < LEN(models); i++) {
        ql_checkpoint *c = NULL;
        ql_error err = {0};
        ck_must(ql_checkpoint_open(&c, models[i].dir, &err), &err);
        ql_checkpoint_info s;
        ql_checkpoint_get_info(c, &s);
        assert_string_equal(s.scheme, models[i].scheme);
        assert_string_equal(s.dir, models[i].dir);
        assert_int_equal(s.n_tensors, models[i].n_tensors);
        assert_int_equal(s.n_files, models[i].n_files);
        assert_int_equal(s.n_linears, models[i].n_linears);
        assert_int_equal(s.n_nvfp4, models[i].n_nvfp4);
        assert_int_equal(s.n_fp8, models[i].n_fp8);
        assert_int_equal(s.n_plain, models[i].n_plain);
        assert_int_equal(s.slices, models[i].slices);
        assert_int_equal(s.has_mtp, models[i].has_mtp);
        assert_int_equal(s.has_tokenizer, models[i].has_tokenizer);
        ql_checkpoint_close(&c);
        assert_null(c);
    }
}

static void test_mixed_decision_table(void **state) {
    (void)state;
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    ck_must(ql_checkpoint_open(&c, ck_mixed, &err), &err);
    static const struct {
        const char *name, *role, *format, *reason;
    } rows[] = {
        {"lm_head.weight", "weight", "fp8-channel", "group_0 \"re:.*lm_head$\""},
        {"lm_head.weight_scale", "scale", "fp8-channel", "group_0"},
        {P "embed_tokens.weight", "embedding", "", "by name"},
        {P "layers.0.mlp.up_proj.weight_packed", "weight", "nvfp4", "group_1"},
        {P "layers.0.mlp.up_proj.weight_scale", "scale", "nvfp4", "group_1"},
        {P "layers.0.mlp.up_proj.weight_global_scale", "factor", "nvfp4", "group_1"},
        {P "layers.0.mlp.up_proj.input_global_scale", "ignored", "nvfp4", "activations"},
        {P "layers.7.mlp.up_proj.weight", "weight", "fp8-channel", "group_0"},
        {P "layers.0.linear_attn.in_proj_a.weight", "weight", "bf16", "ignore"},
        {P "layers.0.linear_attn.A_log", "decay", "", "by name"},
        {P "layers.0.linear_attn.conv1d.weight", "conv", "", "by name"},
        {P "norm.weight", "norm", "", "by name"},
        {"mtp.fc.weight", "weight", "bf16", "ignore"},
        {"model.visual.patch_embed.proj.weight", "ignored", "", "vision"},
    };
    for (size_t i = 0; i < LEN(rows); i++) {
        ql_tensor_info t = ck_info(c, rows[i].name);
        assert_string_equal(t.role, rows[i].role);
        assert_string_equal(t.format, rows[i].format);
        ck_contains(t.reason, rows[i].reason);
    }
    ql_tensor_info t;
    const char *last = "";
    for (int32_t i = 0; i < 212; i++) { /* every row decided, in name order */
        assert_int_equal(ql_checkpoint_get_tensor(c, i, &t), QL_OK);
        assert_true(t.role[0] && t.reason[0]);
        assert_true(strcmp(last, t.name) < 0);
        last = t.name;
    }
    assert_int_equal(ql_checkpoint_get_tensor(c, 212, &t), QL_ERR_USAGE);
    assert_int_equal(ql_checkpoint_get_tensor(c, -1, &t), QL_ERR_USAGE);

    const ql_layer *full = &c->layer[3];
    assert_true(full->full_attention);
    assert_string_equal(full->q.module, "layers.3.self_attn.q_proj");
    assert_int_equal(full->q.n, 2048);
    assert_int_equal(full->q.k, 128);
    assert_int_equal(full->q.format, QL_FORMAT_FP8_CHANNEL);
    assert_non_null(full->q.scale);
    assert_null(full->q.factor);
    assert_int_equal(full->up.format, QL_FORMAT_NVFP4);
    assert_true(full->up.factor_divides);
    assert_int_equal(c->layer[0].a_log->dtype, QL_DTYPE_F32);
    assert_string_equal(c->mtp.layer.o.module, "mtp.layers.0.self_attn.o_proj");
    ck_has_note(c, "18 scales of quantized activations", "not used");
    ck_has_note(c, "1 vision tensor", "128 bytes");
    ql_checkpoint_close(&c);
}

static void test_modelopt_factor_multiplies(void **state) {
    (void)state;
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    ck_must(ql_checkpoint_open(&c, ck_modelopt, &err), &err);
    assert_int_equal(c->lm_head.format, QL_FORMAT_NVFP4);
    assert_false(c->lm_head.factor_divides);
    assert_string_equal(c->lm_head.factor->name, "lm_head.weight_scale_2");
    assert_int_equal(c->lm_head.factor->rank, 0);
    assert_false(c->has_mtp);
    ql_checkpoint_close(&c);
}

static void test_crc_is_of_the_tensors_bytes(void **state) {
    (void)state;
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    ck_must(ql_checkpoint_open(&c, ck_bf16, &err), &err);
    char *data = NULL;
    size_t len = 0;
    ck_must(ql_read_file("tests/data/micro-bf16/model.safetensors", 1 << 24, &data, &len, &err), &err);
    for (int32_t i = 0; i < 3; i++) {
        ql_tensor_info t;
        uint32_t crc;
        assert_int_equal(ql_checkpoint_get_tensor(c, i, &t), QL_OK);
        ck_must(ql_checkpoint_tensor_crc(c, i, &crc, &err), &err);
        assert_int_equal(crc, crc32(0, (const Bytef *)data + t.offset, (uInt)t.bytes));
    }
    uint32_t crc;
    assert_int_equal(ql_checkpoint_tensor_crc(c, 10000, &crc, &err), QL_ERR_USAGE);
    free(data);
    ql_checkpoint_close(&c);
}

/* ---- prefixes ------------------------------------------------------------------------------------------------- */

static void set_prefix(ck_model *m, const char *prefix, const char *head) {
    for (int f = 0; f < m->n_file; f++) {
        for (int i = 0; i < m->file[f].n; i++) {
            char old[320], other[512];
            snprintf(old, sizeof old, "%s", m->file[f].entry[i].name);
            if (strncmp(old, P, strlen(P)) == 0) {
                snprintf(other, sizeof other, "%s%s", prefix, old + strlen(P));
                ck_rename(m, old, other);
            } else if (strncmp(old, "lm_head.", 8) == 0) {
                snprintf(other, sizeof other, "%s%s", head, old);
                ck_rename(m, old, other);
            }
        }
    }
}

typedef struct listing {
    int n;
    struct {
        char module[160];
        ql_role role;
        int32_t layer, format;
        uint64_t bytes;
    } row[256];
} listing;

static ql_status list_visit(void *user, const ql_visit *v, ql_error *err) {
    (void)err;
    listing *l = user;
    assert_true(l->n < (int)LEN(l->row));
    assert_true((v->linear != NULL) != (v->tensor != NULL));
    l->row[l->n].role = v->role;
    l->row[l->n].layer = v->layer;
    l->row[l->n].format = v->linear ? (int32_t)v->linear->format : -1;
    l->row[l->n].bytes = v->linear ? v->linear->weight->bytes : v->tensor->bytes;
    snprintf(l->row[l->n].module, sizeof l->row[l->n].module, "%s", v->linear ? v->linear->module : "");
    l->n++;
    return QL_OK;
}

static void test_same_weights_under_any_prefix(void **state) {
    (void)state;
    static const struct {
        const char *prefix, *head;
    } forms[] = {{"model.language_model.", ""},
                 {"model.", ""},
                 {"language_model.model.", ""},
                 {"language_model.model.", "language_model."}};
    static listing first, other; /* large, zeroed */
    for (size_t i = 0; i < LEN(forms); i++) {
        ck_model m = ck_load(ck_mixed);
        set_prefix(&m, forms[i].prefix, forms[i].head);
        ql_checkpoint *c = ck_opened(&m);
        listing *l = i == 0 ? &first : &other;
        memset(l, 0, sizeof *l);
        ql_error err = {0};
        ck_must(ql_checkpoint_each(c, true, list_visit, l, &err), &err);
        assert_memory_equal(l, &first, sizeof first);
        ql_checkpoint_close(&c);
    }
    assert_true(first.n > 100);
}

/* The configuration may spell another prefix than the files. */
static void test_ignore_list_under_another_prefix(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    json_t *ignore = json_object_get(ck_quantization(&m), "ignore");
    json_array_append_new(ignore, json_string("model.layers.0.mlp.up_proj"));
    ck_refused(&m, "layers.0.mlp.up_proj", "configuration says plain");
    m = ck_load(ck_mixed);
    ignore = json_object_get(ck_quantization(&m), "ignore");
    json_array_append_new(ignore, json_string("model.layers.0.mlp")); /* a parent covers nothing */
    ql_checkpoint *c = ck_opened(&m);
    ql_checkpoint_close(&c);
}

static void test_one_tensor_under_two_prefixes(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_add(&m, "model.norm.weight", QL_DTYPE_BF16, 1, 128, 0);
    ck_refused(&m, "model.norm.weight", "same tensor under two prefixes");
}

/* ---- tied head, MTP -------------------------------------------------------------------------------------------- */

static void test_tied_head(void **state) {
    (void)state;
    ck_model m = ck_load(ck_bf16);
    ck_set_config(&m, "tie_word_embeddings", json_true());
    ck_drop(&m, "lm_head.weight");
    ql_checkpoint *c = ck_opened(&m);
    ql_checkpoint_info s;
    ql_checkpoint_get_info(c, &s);
    assert_int_equal(s.tied_embeddings, 1);
    assert_int_equal(s.n_linears, 32);
    assert_int_equal(s.n_plain, 32);
    assert_ptr_equal(c->lm_head.weight, c->embed);
    assert_int_equal(c->lm_head.format, QL_FORMAT_BF16);
    assert_int_equal(c->lm_head.n, 512);
    ql_checkpoint_close(&c);

    m = ck_load(ck_bf16);
    ck_set_config(&m, "tie_word_embeddings", json_true());
    c = ck_opened(&m);
    ck_has_note(c, "tie_word_embeddings is true", "stored head is used");
    assert_string_equal(c->lm_head.weight->name, "lm_head.weight");
    assert_false(c->config.tied);
    ql_checkpoint_close(&c);

    m = ck_load(ck_bf16);
    ck_drop(&m, "lm_head.weight");
    ck_refused(&m, "never had \"lm_head.weight\"", "needs");
}

static void drop_mtp(ck_model *m) {
    for (int f = 0; f < m->n_file; f++) {
        for (int i = 0; i < m->file[f].n;) {
            if (strncmp(m->file[f].entry[i].name, "mtp.", 4) == 0) {
                char name[320];
                snprintf(name, sizeof name, "%s", m->file[f].entry[i].name);
                ck_drop(m, name);
            } else {
                i++;
            }
        }
    }
}

static void test_checkpoint_without_mtp(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    drop_mtp(&m);
    ql_checkpoint *c = ck_opened(&m);
    assert_false(c->has_mtp);
    ck_has_note(c, "no mtp.* tensors", "not available");
    listing l = {0};
    ql_error err = {0};
    assert_int_equal(ql_checkpoint_each(c, true, list_visit, &l, &err), QL_ERR_USAGE);
    ck_contains(err.text, "no MTP module");
    assert_int_equal(l.n, 0);
    ql_checkpoint_close(&c);
    m = ck_load(ck_mixed);
    ck_set_config(&m, "mtp_num_hidden_layers", json_integer(0));
    c = ck_opened(&m);
    assert_true(c->has_mtp);
    ck_has_note(c, "mtp_num_hidden_layers is 0", "can be used");
    ql_checkpoint_close(&c);
}

static void test_partial_mtp_names_what_is_missing(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_drop(&m, "mtp.fc.weight");
    ck_drop(&m, "mtp.layers.0.self_attn.q_norm.weight");
    ck_refused(&m, "MTP module is incomplete: 13 of 15", "self_attn.q_norm.weight, mtp.fc");
    m = ck_load(ck_mixed);
    drop_mtp(&m);
    ck_add(&m, "mtp.norm.weight", QL_DTYPE_BF16, 1, 128, 0);
    ck_refused(&m, "1 of 15", "mtp.layers.0.input_layernorm.weight");
}

static void test_mtp_may_be_quantized(void **state) {
    (void)state;
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    ck_must(ql_checkpoint_open(&c, ck_block, &err), &err);
    assert_true(c->has_mtp);
    assert_int_equal(c->mtp.layer.q.format, QL_FORMAT_FP8_BLOCK);
    assert_int_equal(c->mtp.fc.format, QL_FORMAT_BF16);
    assert_int_equal(c->mtp.fc.k, 512);
    ql_checkpoint_close(&c);
}

/* ---- visiting -------------------------------------------------------------------------------------------------- */

typedef struct seen {
    int64_t tensors;
    int32_t left; /* visits until failure */
} seen;

static ql_status count_visit(void *user, const ql_visit *v, ql_error *err) {
    seen *s = user;
    if (s->left-- == 0) {
        return ql_fail(err, QL_ERR_STATE, "enough");
    }
    s->tensors += v->tensor ? 1 : 1 + (v->linear->scale != NULL) + (v->linear->factor != NULL);
    assert_int_equal(v->part, ql_role_get(v->role)->part);
    return QL_OK;
}

static void test_each_visits_every_tensor_once(void **state) {
    (void)state;
    static const char *const dirs[] = {ck_mixed, ck_block, ck_bf16, "models/tiny", "tests/data/micro-lanes8"};
    for (size_t i = 0; i < LEN(dirs); i++) {
        ql_checkpoint *c = NULL;
        ql_error err = {0};
        ck_must(ql_checkpoint_open(&c, dirs[i], &err), &err);
        seen s = {.left = INT32_MAX};
        ck_must(ql_checkpoint_each(c, true, count_visit, &s, &err), &err);
        assert_int_equal(s.tensors, c->summary.n_tensors - c->summary.n_ignored);
        s = (seen){.left = 5};
        assert_int_equal(ql_checkpoint_each(c, true, count_visit, &s, &err), QL_ERR_STATE);
        ql_checkpoint_close(&c);
    }
}

/* ---- data is not touched --------------------------------------------------------------------------------------- */

static void test_opening_reads_headers_only(void **state) {
    (void)state;
    ck_clear_folder();
    ql_synth o = {.scheme = QL_SYNTH_MIXED, .prefix = "model.", .sparse = true};
    ql_synth_shape(&o.config, "27b");
    uint64_t bytes;
    ql_error err = {0};
    ck_must(ql_synth_write(&o, ck_folder, &bytes, &err), &err);
    ql_checkpoint *c = ck_folder_opened();
    assert_true(bytes > 23000000000u);
    uint64_t resident = 0;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int32_t f = 0; f < c->n_file; f++) {
        const size_t pages = (size_t)(c->file[f].map_bytes + page - 1) / page;
        unsigned char *in_core = malloc(pages);
        assert_non_null(in_core);
        assert_int_equal(mincore(c->file[f].map, (size_t)c->file[f].map_bytes, in_core), 0);
        for (size_t i = 0; i < pages; i++) {
            resident += (in_core[i] & 1) * page;
        }
        free(in_core);
    }
    assert_true(resident < 64 << 20); /* headers and what the system reads ahead */
    ql_checkpoint_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bundled_models),
        cmocka_unit_test(test_mixed_decision_table),
        cmocka_unit_test(test_modelopt_factor_multiplies),
        cmocka_unit_test(test_crc_is_of_the_tensors_bytes),
        cmocka_unit_test(test_same_weights_under_any_prefix),
        cmocka_unit_test(test_ignore_list_under_another_prefix),
        cmocka_unit_test(test_one_tensor_under_two_prefixes),
        cmocka_unit_test(test_tied_head),
        cmocka_unit_test(test_checkpoint_without_mtp),
        cmocka_unit_test(test_partial_mtp_names_what_is_missing),
        cmocka_unit_test(test_mtp_may_be_quantized),
        cmocka_unit_test(test_each_visits_every_tensor_once),
        cmocka_unit_test(test_opening_reads_headers_only),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, ck_set_up, ck_tear_down);
}
