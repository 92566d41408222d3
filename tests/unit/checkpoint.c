/* Opening whole checkpoints: what each bundled model is decided to be, and every way a directory can be wrong.
 *
 * A case takes the headers and configuration of a bundled model, changes one thing, writes the result as sparse files and
 * asserts the text of the refusal, or what was decided.
 */
#include "loader/checkpoint.h"
#include "loader/shard.h"

#include "tests/stfile.h"
#include "tests/synth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

static const char mixed[] = "tests/data/micro-mixed", block[] = "tests/data/micro-fp8-block",
                  modelopt[] = "tests/data/micro-nvfp4-modelopt", bf16[] = "tests/data/micro-bf16";

/* ---- a checkpoint to change ------------------------------------------------------------------------------------ */

enum { MAX_FILES = 4 };

typedef struct model {
    json_t *config, *map; /* map: NULL without an index */
    int n_file;
    char name[MAX_FILES][64];
    ql_stfile file[MAX_FILES];
} model;

static char folder[] = "/tmp/ql-checkpoint-XXXXXX";

static void clear_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s && mkdir %s", folder, folder);
    assert_int_equal(system(command), 0);
}

static int set_up(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

static void must(ql_status status, const ql_error *err) {
    if (status != QL_OK) {
        fail_msg("%s", err->text);
    }
}

static model load_model(const char *dir) {
    model m = {0};
    ql_error err = {0};
    char path[256];
    snprintf(path, sizeof path, "%s/config.json", dir);
    must(ql_json_load(path, 1 << 20, &m.config, &err), &err);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (ql_file_exists(path)) {
        json_t *index = NULL;
        must(ql_json_load(path, 1 << 20, &index, &err), &err);
        m.map = json_incref(json_object_get(index, "weight_map"));
        json_decref(index);
    }
    ql_checkpoint *c = NULL;
    must(ql_checkpoint_open(&c, dir, &err), &err);
    m.n_file = c->n_file;
    for (int f = 0; f < c->n_file; f++) {
        snprintf(m.name[f], sizeof m.name[f], "%s", c->file[f].base);
        for (int i = 0; i < c->file[f].n_tensor; i++) {
            const ql_tensor *t = &c->file[f].tensor[i];
            must(ql_stfile_add(&m.file[f], t->name, t->dtype, t->rank, t->shape, &err), &err);
        }
    }
    ql_checkpoint_close(&c);
    return m;
}

static ql_stentry *entry(model *m, const char *name) {
    for (int f = 0; f < m->n_file; f++) {
        for (int i = 0; i < m->file[f].n; i++) {
            if (strcmp(m->file[f].entry[i].name, name) == 0) {
                return &m->file[f].entry[i];
            }
        }
    }
    fail_msg("the model has no %s", name);
    return NULL;
}

static void map_set(model *m, const char *name, const char *file) {
    if (m->map) {
        json_object_set_new(m->map, name, json_string(file));
    }
}

static void drop(model *m, const char *name) {
    ql_stentry *e = entry(m, name);
    for (int f = 0; f < m->n_file; f++) {
        ql_stfile *file = &m->file[f];
        if (e >= file->entry && e < file->entry + file->n) {
            memmove(e, e + 1, (size_t)(file->entry + file->n - e - 1) * sizeof *e);
            file->n--;
            break;
        }
    }
    if (m->map) {
        json_object_del(m->map, name);
    }
}

/* Into the first file. rank 0 to 2. */
static void add(model *m, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k) {
    const int64_t shape[2] = {n, k};
    ql_error err = {0};
    must(ql_stfile_add(&m->file[0], name, dtype, rank, shape, &err), &err);
    map_set(m, name, m->name[0]);
}

static void rename_to(model *m, const char *name, const char *other) {
    if (strcmp(name, other) == 0) {
        return;
    }
    ql_stentry *e = entry(m, name);
    snprintf(e->name, sizeof e->name, "%s", other);
    if (m->map) {
        json_object_set(m->map, other, json_object_get(m->map, name));
        json_object_del(m->map, name);
    }
}

static void reshape(model *m, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k) {
    ql_stentry *e = entry(m, name);
    e->dtype = dtype;
    e->rank = rank;
    e->shape[0] = n;
    e->shape[1] = k;
}

/* Replaces a linear's tensors by plain BF16. */
static void make_plain(model *m, const char *module, int64_t n, int64_t k) {
    static const char *const parts[] = {"weight",         "weight_packed",       "weight_scale", "weight_scale_inv",
                                        "weight_scale_2", "weight_global_scale", "input_scale",  "input_global_scale"};
    char name[256];
    for (size_t p = 0; p < LEN(parts); p++) {
        snprintf(name, sizeof name, "%s.%s", module, parts[p]);
        for (int f = 0; f < m->n_file; f++) {
            for (int i = 0; i < m->file[f].n; i++) {
                if (strcmp(m->file[f].entry[i].name, name) == 0) {
                    drop(m, name);
                    i--;
                }
            }
        }
    }
    snprintf(name, sizeof name, "%s.weight", module);
    add(m, name, QL_DTYPE_BF16, 2, n, k);
}

static void set_config(model *m, const char *key, json_t *value) {
    json_t *text = json_object_get(m->config, "text_config");
    json_object_set_new(text ? text : m->config, key, value);
}

static json_t *quantization(model *m) { return json_object_get(m->config, "quantization_config"); }
static json_t *targets(model *m, const char *group) {
    json_t *groups = json_object_get(quantization(m), "config_groups");
    return json_object_get(json_object_get(groups, group), "targets");
}

/* Writes into an empty folder. */
static void write_model(model *m) {
    ql_error err = {0};
    char path[256];
    clear_folder();
    for (int f = 0; f < m->n_file; f++) {
        ql_stfile laid_out = {0};
        for (int i = 0; i < m->file[f].n; i++) {
            const ql_stentry *e = &m->file[f].entry[i];
            must(ql_stfile_add(&laid_out, e->name, e->dtype, e->rank, e->shape, &err), &err);
        }
        uint64_t offset;
        snprintf(path, sizeof path, "%s/%s", folder, m->name[f]);
        must(ql_stfile_create(&laid_out, path, &offset, &err), &err);
        ql_stfile_deinit(&laid_out);
    }
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(json_dump_file(m->config, path, 0), 0);
    if (m->map) {
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
        json_t *index = json_pack("{s:{s:i}, s:O}", "metadata", "total_size", 1, "weight_map", m->map);
        assert_int_equal(json_dump_file(index, path, 0), 0);
        json_decref(index);
    }
}

static void free_model(model *m) {
    for (int f = 0; f < m->n_file; f++) {
        ql_stfile_deinit(&m->file[f]);
    }
    json_decref(m->config);
    json_decref(m->map);
}

static void assert_contains(const char *text, const char *part) {
    if (!strstr(text, part)) {
        fail_msg("\"%s\" does not contain \"%s\"", text, part);
    }
}

/* What is in the folder now. */
static void folder_refused(const char *a, const char *b) {
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    assert_int_equal(ql_checkpoint_open(&c, folder, &err), QL_ERR_MODEL);
    assert_null(c);
    assert_contains(err.text, a);
    assert_contains(err.text, b);
}

static ql_checkpoint *folder_opened(void) {
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    must(ql_checkpoint_open(&c, folder, &err), &err);
    return c;
}

/* These take the model. */
static void refused(model *m, const char *a, const char *b) {
    write_model(m);
    free_model(m);
    folder_refused(a, b);
}

/* One tensor of another shape or dtype is enough to be refused in these words. */
static void reshaped_refused(const char *dir, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k,
                             const char *a, const char *b) {
    model m = load_model(dir);
    reshape(&m, name, dtype, rank, n, k);
    refused(&m, a, b);
}

static ql_checkpoint *opened(model *m) {
    write_model(m);
    free_model(m);
    return folder_opened();
}

static const char *find_note(const ql_checkpoint *c, const char *part) {
    for (int32_t i = 0; ql_checkpoint_note(c, i); i++) {
        if (strstr(ql_checkpoint_note(c, i), part)) {
            return ql_checkpoint_note(c, i);
        }
    }
    return NULL;
}

static void assert_note(const ql_checkpoint *c, const char *a, const char *b) {
    const char *note = find_note(c, a);
    if (!note) {
        fail_msg("no note contains \"%s\"", a);
    }
    assert_contains(note, b);
}

static ql_tensor_info info_of(const ql_checkpoint *c, const char *name) {
    ql_tensor_info t;
    for (int32_t i = 0; ql_checkpoint_get_tensor(c, i, &t) == QL_OK; i++) {
        if (strcmp(t.name, name) == 0) {
            return t;
        }
    }
    fail_msg("the decision table has no %s", name);
    return t;
}

#define P "model.language_model."

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
        must(ql_checkpoint_open(&c, models[i].dir, &err), &err);
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
    must(ql_checkpoint_open(&c, mixed, &err), &err);
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
        ql_tensor_info t = info_of(c, rows[i].name);
        assert_string_equal(t.role, rows[i].role);
        assert_string_equal(t.format, rows[i].format);
        assert_contains(t.reason, rows[i].reason);
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
    assert_note(c, "18 scales of quantized activations", "not used");
    assert_note(c, "1 vision tensor", "128 bytes");
    ql_checkpoint_close(&c);
}

static void test_modelopt_factor_multiplies(void **state) {
    (void)state;
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    must(ql_checkpoint_open(&c, modelopt, &err), &err);
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
    must(ql_checkpoint_open(&c, bf16, &err), &err);
    char *data = NULL;
    size_t len = 0;
    must(ql_read_file("tests/data/micro-bf16/model.safetensors", 1 << 24, &data, &len, &err), &err);
    for (int32_t i = 0; i < 3; i++) {
        ql_tensor_info t;
        uint32_t crc;
        assert_int_equal(ql_checkpoint_get_tensor(c, i, &t), QL_OK);
        must(ql_checkpoint_tensor_crc(c, i, &crc, &err), &err);
        assert_int_equal(crc, crc32(0, (const Bytef *)data + t.offset, (uInt)t.bytes));
    }
    uint32_t crc;
    assert_int_equal(ql_checkpoint_tensor_crc(c, 10000, &crc, &err), QL_ERR_USAGE);
    free(data);
    ql_checkpoint_close(&c);
}

/* ---- prefixes ------------------------------------------------------------------------------------------------- */

static void set_prefix(model *m, const char *prefix, const char *head) {
    for (int f = 0; f < m->n_file; f++) {
        for (int i = 0; i < m->file[f].n; i++) {
            char old[320], other[512];
            snprintf(old, sizeof old, "%s", m->file[f].entry[i].name);
            if (strncmp(old, P, strlen(P)) == 0) {
                snprintf(other, sizeof other, "%s%s", prefix, old + strlen(P));
                rename_to(m, old, other);
            } else if (strncmp(old, "lm_head.", 8) == 0) {
                snprintf(other, sizeof other, "%s%s", head, old);
                rename_to(m, old, other);
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
        model m = load_model(mixed);
        set_prefix(&m, forms[i].prefix, forms[i].head);
        ql_checkpoint *c = opened(&m);
        listing *l = i == 0 ? &first : &other;
        memset(l, 0, sizeof *l);
        ql_error err = {0};
        must(ql_checkpoint_each(c, true, list_visit, l, &err), &err);
        assert_memory_equal(l, &first, sizeof first);
        ql_checkpoint_close(&c);
    }
    assert_true(first.n > 100);
}

/* The configuration may spell another prefix than the files. */
static void test_ignore_list_under_another_prefix(void **state) {
    (void)state;
    model m = load_model(mixed);
    json_t *ignore = json_object_get(quantization(&m), "ignore");
    json_array_append_new(ignore, json_string("model.layers.0.mlp.up_proj"));
    refused(&m, "layers.0.mlp.up_proj", "configuration says plain");
    m = load_model(mixed);
    ignore = json_object_get(quantization(&m), "ignore");
    json_array_append_new(ignore, json_string("model.layers.0.mlp")); /* a parent covers nothing */
    ql_checkpoint *c = opened(&m);
    ql_checkpoint_close(&c);
}

static void test_one_tensor_under_two_prefixes(void **state) {
    (void)state;
    model m = load_model(mixed);
    add(&m, "model.norm.weight", QL_DTYPE_BF16, 1, 128, 0);
    refused(&m, "model.norm.weight", "same tensor under two prefixes");
}

/* ---- files and index ------------------------------------------------------------------------------------------- */

static void test_three_ways_to_lack_a_tensor(void **state) {
    (void)state;
    /* nobody names it */
    model m = load_model(mixed);
    drop(&m, P "layers.5.linear_attn.out_proj.weight");
    drop(&m, P "layers.5.linear_attn.out_proj.weight_scale");
    refused(&m, "never had \"" P "layers.5.linear_attn.out_proj.weight\"", "neither the index nor any shard");
    m = load_model(bf16);
    drop(&m, P "norm.weight");
    refused(&m, "never had \"" P "norm.weight\"", "model.safetensors does not name it");
    /* its shard is missing */
    m = load_model(mixed);
    write_model(&m);
    free_model(&m);
    char path[256];
    snprintf(path, sizeof path, "%s/model-00002-of-00003.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    folder_refused("shard model-00002-of-00003.safetensors is missing", "71 tensors in it");
    /* the shard is there, its header lacks it */
    m = load_model(mixed);
    map_set(&m, "mtp.fc.weight", "model-00001-of-00003.safetensors");
    refused(&m, "places \"mtp.fc.weight\" in model-00001-of-00003.safetensors", "header lacks it");
    /* it is in a shard where the index does not place it */
    m = load_model(mixed);
    json_object_del(m.map, P "norm.weight");
    refused(&m, P "norm.weight", "model-00001-of-00003.safetensors has it, but the index does not place it there");
}

static void test_truncated_shard(void **state) {
    (void)state;
    model m = load_model(mixed);
    write_model(&m);
    free_model(&m);
    char path[256];
    struct stat info;
    snprintf(path, sizeof path, "%s/model-00003-of-00003.safetensors", folder);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(truncate(path, info.st_size - 4096), 0);
    folder_refused("model-00003-of-00003.safetensors is truncated or incomplete", "bytes");
}

static void test_no_model_at_all(void **state) {
    (void)state;
    model m = load_model(bf16);
    write_model(&m);
    free_model(&m);
    char path[256];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    folder_refused("neither model.safetensors.index.json nor model.safetensors", folder);
    clear_folder();
    folder_refused("cannot open", "config.json");
}

static void test_index_takes_plain_file_names(void **state) {
    (void)state;
    static const char *const names[] = {
        "../model-00001-of-00003.safetensors", "/etc/passwd", "..", ".", "", "a\\b", "sub/model.safetensors"};
    for (size_t i = 0; i < LEN(names); i++) {
        model m = load_model(mixed);
        map_set(&m, "lm_head.weight", names[i]);
        refused(&m, "\"lm_head.weight\" is placed in", "plain file names");
    }
    model m = load_model(mixed);
    json_object_set_new(m.map, "lm_head.weight", json_integer(3));
    refused(&m, "\"lm_head.weight\" is placed in", "plain file names");
    m = load_model(mixed);
    json_object_clear(m.map);
    refused(&m, "weight_map", "places tensors in files");
}

static void test_index_is_an_allow_list(void **state) {
    (void)state;
    model m = load_model(mixed);
    add(&m, P "layers.0.mlp.up_proj.scale_weight", QL_DTYPE_F32, 1, 1, 0); /* would be refused if it counted */
    json_object_del(m.map, P "layers.0.mlp.up_proj.scale_weight");
    ql_checkpoint *c = opened(&m);
    assert_note(c, "model-00001-of-00003.safetensors holds 1 tensor that the index does not list", "scale_weight");
    assert_string_equal(info_of(c, P "layers.0.mlp.up_proj.scale_weight").role, "ignored");
    ql_checkpoint_close(&c);
    /* the same name in two shards: the index says which counts */
    m = load_model(mixed);
    const int64_t shape[1] = {128};
    ql_error err = {0};
    must(ql_stfile_add(&m.file[1], P "norm.weight", QL_DTYPE_BF16, 1, shape, &err), &err);
    c = opened(&m);
    assert_string_equal(c->file[c->norm->file].base, "model-00001-of-00003.safetensors");
    assert_note(c, "model-00002-of-00003.safetensors holds 1 tensor", "norm.weight");
    ql_checkpoint_close(&c);
}

static void test_index_wins_over_a_single_file(void **state) {
    (void)state;
    model m = load_model(mixed);
    write_model(&m);
    free_model(&m);
    char path[256];
    ql_error err = {0};
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    must(ql_write_file(path, "not read", 8, &err), &err);
    ql_checkpoint *c = folder_opened();
    assert_int_equal(c->n_file, 3);
    assert_note(c, "model.safetensors is there", "index does not list it");
    ql_checkpoint_close(&c);
}

static void test_mtp_file_outside_the_index_is_named(void **state) {
    (void)state;
    static const char *const names[] = {"mtp.safetensors", "model_mtp.safetensors",
                                        "model-mtp-00001-of-00001.safetensors"};
    for (size_t i = 0; i < LEN(names); i++) {
        model m = load_model(i == 0 ? modelopt : mixed);
        write_model(&m);
        free_model(&m);
        char path[256];
        ql_error err = {0};
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        must(ql_write_file(path, "not read", 8, &err), &err);
        ql_checkpoint *c = folder_opened();
        assert_note(c, names[i], "MTP weights");
        assert_note(c, names[i], i == 0 ? "no index to list it" : "index does not list it");
        ql_checkpoint_close(&c);
    }
}

/* ---- scales --------------------------------------------------------------------------------------------------- */

static void test_a_missing_scale_is_never_assumed(void **state) {
    (void)state;
    static const struct {
        const char *dir, *name, *a;
    } cases[] = {
        {mixed, "lm_head.weight_scale",
         "\"lm_head.weight\" is F8_E4M3 but has neither weight_scale nor weight_scale_inv"},
        {mixed, P "layers.0.mlp.up_proj.weight_scale", "its weight_scale is missing"},
        {mixed, P "layers.0.mlp.up_proj.weight_global_scale", "its weight_global_scale is missing"},
        {block, P "layers.0.mlp.up_proj.weight_scale_inv", "has neither weight_scale nor weight_scale_inv"},
        {block, "mtp.layers.0.mlp.up_proj.weight_scale_inv", "has neither weight_scale nor weight_scale_inv"},
        {modelopt, "lm_head.weight_scale", "its weight_scale is missing"},
        {modelopt, "lm_head.weight_scale_2", "its weight_scale_2 is missing"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        model m = load_model(cases[i].dir);
        drop(&m, cases[i].name);
        refused(&m, cases[i].a, "never assumed");
    }
}

static void test_every_scale_is_consumed_or_refused(void **state) {
    (void)state;
    /* another spelling */
    model m = load_model(mixed);
    rename_to(&m, "lm_head.weight_scale", "lm_head.scale_weight");
    refused(&m, "lm_head.scale_weight", "belongs to no weight");
    m = load_model(block);
    rename_to(&m, P "layers.0.mlp.up_proj.weight_scale_inv", P "layers.0.mlp.up_proj.weight_scale_invers");
    refused(&m, "weight_scale_invers", "belongs to no weight");
    /* scales beside a plain weight */
    static const char *const scales[] = {"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"};
    for (size_t i = 0; i < LEN(scales); i++) {
        char name[128];
        m = load_model(bf16);
        snprintf(name, sizeof name, P "layers.0.mlp.gate_proj.%s", scales[i]);
        add(&m, name, QL_DTYPE_F32, 1, 1, 0);
        refused(&m, name, "belongs to no weight");
    }
    /* one scale too many */
    m = load_model(mixed);
    add(&m, "lm_head.weight_scale_inv", QL_DTYPE_BF16, 2, 4, 1);
    refused(&m, "\"lm_head.weight_scale\" belongs to no weight", "F8_E4M3");
    m = load_model(mixed);
    add(&m, P "layers.0.mlp.up_proj.weight_scale_2", QL_DTYPE_F32, 0, 0, 0);
    refused(&m, "weight_scale_2\" belongs to no weight", "U8");
    m = load_model(mixed);
    add(&m, P "layers.0.mlp.up_proj.weight", QL_DTYPE_BF16, 2, 256, 128);
    refused(&m, "up_proj.weight\" belongs to no weight", "weight_packed");
    /* a scale without its weight */
    m = load_model(mixed);
    drop(&m, "lm_head.weight");
    refused(&m, "\"lm_head.weight_scale\" belongs to no weight", "neither lm_head.weight nor");
}

static void test_scale_dtypes(void **state) {
    (void)state;
    static const ql_dtype plain[] = {QL_DTYPE_BF16, QL_DTYPE_F16, QL_DTYPE_F32};
    for (size_t i = 0; i < LEN(plain); i++) {
        model m = load_model(mixed);
        reshape(&m, "lm_head.weight_scale", plain[i], i == 1 ? 1 : 2, 512, 1); /* [512] and [512, 1] */
        reshape(&m, P "layers.0.mlp.up_proj.weight_global_scale", plain[i], i == 2 ? 0 : 1, 1, 0);
        ql_checkpoint *c = opened(&m);
        assert_int_equal(c->lm_head.format, QL_FORMAT_FP8_CHANNEL);
        assert_int_equal(c->lm_head.scale->dtype, plain[i]);
        ql_checkpoint_close(&c);
        m = load_model(block);
        reshape(&m, P "layers.0.mlp.up_proj.weight_scale_inv", plain[i], 2, 3, 2);
        c = opened(&m);
        assert_int_equal(c->layer[0].up.format, QL_FORMAT_FP8_BLOCK);
        ql_checkpoint_close(&c);
    }
    reshaped_refused(mixed, "lm_head.weight_scale", QL_DTYPE_F8_E8M0, 2, 512, 1, "\"lm_head.weight_scale\" is F8_E8M0",
                     "BF16, F16 and F32");
    reshaped_refused(mixed, P "layers.0.mlp.up_proj.weight_scale", QL_DTYPE_U8, 2, 256, 8,
                     "up_proj.weight_scale\" is U8", "F8_E4M3");
    reshaped_refused(mixed, P "layers.0.mlp.up_proj.weight_global_scale", QL_DTYPE_F32, 1, 2, 0,
                     "weight_global_scale\" is F32 [2]", "one number");
}

/* FP8 per tensor, per row and per block, NVFP4 of both namings and plain weights in one file. */
static void test_formats_mix_freely(void **state) {
    (void)state;
    model m = load_model(mixed);
    json_array_append_new(targets(&m, "group_1"), json_string("re:.*o_proj$"));
    reshape(&m, P "layers.3.self_attn.q_proj.weight_scale", QL_DTYPE_F32, 0, 0, 0);
    drop(&m, P "layers.3.self_attn.k_proj.weight_scale");
    add(&m, P "layers.3.self_attn.k_proj.weight_scale_inv", QL_DTYPE_BF16, 2, 4, 1);
    reshape(&m, P "layers.3.self_attn.v_proj.weight_scale", QL_DTYPE_BF16, 2, 4, 1); /* blocks under the other name */
    make_plain(&m, P "layers.3.mlp.up_proj", 256, 128);
    make_plain(&m, P "layers.3.mlp.gate_proj", 256, 128);
    add(&m, P "layers.3.mlp.gate_proj.weight_scale", QL_DTYPE_F8_E4M3, 2, 256, 8);
    add(&m, P "layers.3.mlp.gate_proj.weight_scale_2", QL_DTYPE_F32, 0, 0, 0);
    reshape(&m, P "layers.3.mlp.gate_proj.weight", QL_DTYPE_U8, 2, 256, 64);
    ql_checkpoint *c = opened(&m);
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
    model m = load_model(mixed);
    add(&m, P "layers.3.self_attn.k_scale", QL_DTYPE_BF16, 1, 1, 0);
    add(&m, P "layers.3.self_attn.v_scale", QL_DTYPE_BF16, 1, 1, 0);
    add(&m, P "layers.7.self_attn.k_proj.k_scale", QL_DTYPE_F32, 0, 0, 0);
    add(&m, P "layers.7.self_attn.v_proj.v_scale", QL_DTYPE_F32, 0, 0, 0);
    add(&m, "lm_head.input_scale", QL_DTYPE_F32, 0, 0, 0);
    add(&m, P "rotary_emb.inv_freq", QL_DTYPE_F32, 1, 32, 0);
    ql_checkpoint *c = opened(&m);
    assert_note(c, "4 scales of an FP8 KV cache", "not used");
    assert_note(c, "19 scales of quantized activations", "not used");
    assert_string_equal(info_of(c, P "layers.3.self_attn.k_scale").role, "ignored");
    assert_string_equal(info_of(c, P "rotary_emb.inv_freq").role, "ignored");
    ql_checkpoint_info s;
    ql_checkpoint_get_info(c, &s);
    assert_int_equal(s.n_ignored, 1 + 18 + 4 + 1 + 1);
    assert_int_equal(s.ignored_bytes, 128 + 18 * 4 + 2 + 2 + 4 + 4 + 4 + 32 * 4);
    ql_checkpoint_close(&c);
    m = load_model(mixed);
    add(&m, P "layers.0.self_attn.k_scale", QL_DTYPE_BF16, 1, 1, 0); /* a layer without attention */
    refused(&m, "layers.0.self_attn.k_scale", "belongs to no weight");
}

/* ---- comparison with the configuration -------------------------------------------------------------------------- */

static void test_quantized_where_configuration_says_plain(void **state) {
    (void)state;
    model m = load_model(mixed);
    json_array_append_new(json_object_get(quantization(&m), "ignore"), json_string("lm_head"));
    refused(&m, "\"lm_head.weight\" is stored as fp8-channel", "plain for lm_head (ignore \"lm_head\")");
    m = load_model(mixed);
    json_object_del(m.config, "quantization_config");
    refused(&m, "is stored as", "configuration says plain");
    m = load_model(modelopt);
    json_array_append_new(json_object_get(quantization(&m), "ignore"), json_string("*mlp.down*"));
    refused(&m, "\"model.layers.0.mlp.down_proj.weight\" is stored as nvfp4", "ignore \"*mlp.down*\"");
    m = load_model(block);
    json_array_append_new(json_object_get(quantization(&m), "modules_to_not_convert"), json_string("mtp"));
    refused(&m, "mtp.layers.0", "modules_to_not_convert");
}

static void test_plain_where_configuration_says_quantized(void **state) {
    (void)state;
    model m = load_model(mixed);
    make_plain(&m, "lm_head", 512, 128);
    make_plain(&m, P "layers.2.mlp.down_proj", 128, 256);
    ql_checkpoint *c = opened(&m);
    assert_int_equal(c->lm_head.format, QL_FORMAT_BF16);
    assert_note(c, "2 linears are stored plain", "layers.2.mlp.down_proj, where group_1");
    assert_contains(info_of(c, "lm_head.weight").reason, "stored plain although group_0");
    ql_checkpoint_info s;
    ql_checkpoint_get_info(c, &s);
    assert_int_equal(s.n_plain, 14);
    ql_checkpoint_close(&c);
}

static void test_another_format_than_the_configuration_says(void **state) {
    (void)state;
    /* a lost group: the tail's FP8 MLP falls to the NVFP4 group */
    model m = load_model(mixed);
    json_t *fp8 = targets(&m, "group_0");
    json_array_remove(fp8, json_array_size(fp8) - 1);
    refused(&m, "layers.7.mlp.gate_proj.weight\" is stored as fp8-channel", "says nvfp4");
    m = load_model(modelopt);
    json_object_set_new(quantization(&m), "quant_algo", json_string("FP8"));
    refused(&m, "is stored as nvfp4", "says fp8");
}

static void test_head_in_every_format(void **state) {
    (void)state;
    for (int format = 0; format < QL_FORMAT_COUNT; format++) {
        model m = load_model(mixed);
        const bool nvfp4 = format == QL_FORMAT_NVFP4;
        if (nvfp4) {
            json_array_set_new(targets(&m, "group_0"), 2, json_string("re:nothing"));
            json_array_append_new(targets(&m, "group_1"), json_string("lm_head"));
        }
        make_plain(&m, "lm_head", 512, 128);
        const ql_dtype dtype = nvfp4                      ? QL_DTYPE_U8
                               : format == QL_FORMAT_F32  ? QL_DTYPE_F32
                               : format == QL_FORMAT_F16  ? QL_DTYPE_F16
                               : format == QL_FORMAT_BF16 ? QL_DTYPE_BF16
                                                          : QL_DTYPE_F8_E4M3;
        reshape(&m, "lm_head.weight", dtype, 2, 512, nvfp4 ? 64 : 128);
        if (nvfp4) {
            rename_to(&m, "lm_head.weight", "lm_head.weight_packed");
            add(&m, "lm_head.weight_scale", QL_DTYPE_F8_E4M3, 2, 512, 8);
            add(&m, "lm_head.weight_global_scale", QL_DTYPE_F32, 1, 1, 0);
        } else if (format == QL_FORMAT_FP8_CHANNEL) {
            add(&m, "lm_head.weight_scale", QL_DTYPE_BF16, 2, 512, 1);
        } else if (format == QL_FORMAT_FP8_TENSOR) {
            add(&m, "lm_head.weight_scale", QL_DTYPE_F32, 1, 1, 0);
        } else if (format == QL_FORMAT_FP8_BLOCK) {
            add(&m, "lm_head.weight_scale_inv", QL_DTYPE_F32, 2, 4, 1);
        }
        ql_checkpoint *c = opened(&m);
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
        {bf16, P "norm.weight", QL_DTYPE_BF16, 1, 127, 0, "has shape [127]", "needs [128]"},
        {bf16, P "layers.0.mlp.up_proj.weight", QL_DTYPE_BF16, 2, 128, 256, "has shape [128, 256]", "needs [256, 128]"},
        {bf16, P "layers.0.linear_attn.conv1d.weight", QL_DTYPE_BF16, 2, 1024, 4, "[1024, 4]", "needs [1024, 1, 4]"},
        {bf16, P "layers.3.self_attn.q_proj.weight", QL_DTYPE_BF16, 2, 1024, 128, "[1024, 128]", "needs [2048, 128]"},
        {bf16, P "embed_tokens.weight", QL_DTYPE_BF16, 2, 500, 128, "[500, 128]", "needs [512, 128]"},
        {bf16, "mtp.fc.weight", QL_DTYPE_BF16, 2, 128, 128, "[128, 128]", "needs [128, 256]"},
        {mixed, P "layers.0.mlp.up_proj.weight_packed", QL_DTYPE_U8, 2, 256, 128, "[256, 128]", "needs [256, 64]"},
        {mixed, P "layers.0.mlp.up_proj.weight_scale", QL_DTYPE_F8_E4M3, 2, 256, 4, "[256, 4]", "needs [256, 8]"},
        {mixed, "lm_head.weight_scale", QL_DTYPE_BF16, 2, 511, 1, "[511, 1]", "[512, 1] or [512] (rows)"},
        {mixed, "lm_head.weight_scale", QL_DTYPE_BF16, 2, 1, 512, "[1, 512]", "[] or [1] (tensor), [4, 1] (blocks)"},
        {block, P "layers.0.mlp.up_proj.weight_scale_inv", QL_DTYPE_BF16, 2, 2, 3, "[2, 3]", "needs [3, 2]"},
        {mixed, "lm_head.weight", QL_DTYPE_F8_E4M3, 2, 512, 64, "[512, 64]", "needs [512, 128]"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        reshaped_refused(cases[i].dir, cases[i].name, cases[i].dtype, cases[i].rank, cases[i].n, cases[i].k, cases[i].a,
                         cases[i].b);
    }
}

static void test_dtypes(void **state) {
    (void)state;
    static const char *const small[] = {P "layers.0.linear_attn.A_log", P "layers.0.linear_attn.dt_bias"};
    static const ql_dtype plain[] = {QL_DTYPE_BF16, QL_DTYPE_F16, QL_DTYPE_F32};
    for (size_t i = 0; i < LEN(plain); i++) {
        model m = load_model(bf16);
        reshape(&m, small[0], plain[i], 1, 4, 0);
        reshape(&m, small[1], plain[(i + 1) % 3], 1, 4, 0);
        reshape(&m, P "layers.0.linear_attn.norm.weight", plain[i], 1, 128, 0);
        reshape(&m, P "layers.0.linear_attn.in_proj_a.weight", plain[i], 2, 4, 128);
        reshape(&m, P "layers.0.linear_attn.in_proj_b.weight", plain[(i + 1) % 3], 2, 4, 128);
        ql_checkpoint *c = opened(&m);
        assert_int_equal(c->layer[0].a_log->dtype, plain[i]);
        assert_int_equal(c->layer[0].in_a.weight->dtype, plain[i]);
        assert_int_equal(c->layer[0].in_b.weight->dtype, plain[(i + 1) % 3]);
        ql_checkpoint_close(&c);
    }
    reshaped_refused(bf16, small[0], QL_DTYPE_I32, 1, 4, 0, "A_log\" is I32", "BF16, F16 and F32");
    reshaped_refused(bf16, P "layers.0.mlp.up_proj.weight", QL_DTYPE_F8_E5M2, 2, 256, 128,
                     "up_proj.weight\" is F8_E5M2", "F8_E4M3 and U8 (nvfp4)");
    reshaped_refused(mixed, P "layers.0.mlp.up_proj.weight_packed", QL_DTYPE_I32, 2, 256, 16, "weight_packed\" is I32",
                     "accepted is U8");
}

static void test_embedding_must_be_plain(void **state) {
    (void)state;
    reshaped_refused(mixed, P "embed_tokens.weight", QL_DTYPE_F8_E4M3, 2, 512, 128, "embed_tokens.weight\" is F8_E4M3",
                     "BF16, F16 and F32");
    model m = load_model(mixed);
    rename_to(&m, P "embed_tokens.weight", P "embed_tokens.weight_packed");
    refused(&m, "quantized embedding", "plain one");
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
        model m = load_model(mixed);
        add(&m, cases[i].name, QL_DTYPE_BF16, 1, 8, 0);
        refused(&m, cases[i].name, cases[i].part);
    }
}

static void test_split_projections_are_required(void **state) {
    (void)state;
    model m = load_model(bf16);
    drop(&m, P "layers.1.linear_attn.in_proj_z.weight");
    refused(&m, "never had", "layers.1.linear_attn.in_proj_z.weight");
}

/* ---- tied head, MTP -------------------------------------------------------------------------------------------- */

static void test_tied_head(void **state) {
    (void)state;
    model m = load_model(bf16);
    set_config(&m, "tie_word_embeddings", json_true());
    drop(&m, "lm_head.weight");
    ql_checkpoint *c = opened(&m);
    ql_checkpoint_info s;
    ql_checkpoint_get_info(c, &s);
    assert_int_equal(s.tied_embeddings, 1);
    assert_int_equal(s.n_linears, 32);
    assert_int_equal(s.n_plain, 32);
    assert_ptr_equal(c->lm_head.weight, c->embed);
    assert_int_equal(c->lm_head.format, QL_FORMAT_BF16);
    assert_int_equal(c->lm_head.n, 512);
    ql_checkpoint_close(&c);

    m = load_model(bf16);
    set_config(&m, "tie_word_embeddings", json_true());
    c = opened(&m);
    assert_note(c, "tie_word_embeddings is true", "stored head is used");
    assert_string_equal(c->lm_head.weight->name, "lm_head.weight");
    assert_false(c->config.tied);
    ql_checkpoint_close(&c);

    m = load_model(bf16);
    drop(&m, "lm_head.weight");
    refused(&m, "never had \"lm_head.weight\"", "needs");
}

static void drop_mtp(model *m) {
    for (int f = 0; f < m->n_file; f++) {
        for (int i = 0; i < m->file[f].n;) {
            if (strncmp(m->file[f].entry[i].name, "mtp.", 4) == 0) {
                char name[320];
                snprintf(name, sizeof name, "%s", m->file[f].entry[i].name);
                drop(m, name);
            } else {
                i++;
            }
        }
    }
}

static void test_checkpoint_without_mtp(void **state) {
    (void)state;
    model m = load_model(mixed);
    drop_mtp(&m);
    ql_checkpoint *c = opened(&m);
    assert_false(c->has_mtp);
    assert_note(c, "no mtp.* tensors", "not available");
    listing l = {0};
    ql_error err = {0};
    assert_int_equal(ql_checkpoint_each(c, true, list_visit, &l, &err), QL_ERR_USAGE);
    assert_contains(err.text, "no MTP module");
    assert_int_equal(l.n, 0);
    ql_checkpoint_close(&c);
    m = load_model(mixed);
    set_config(&m, "mtp_num_hidden_layers", json_integer(0));
    c = opened(&m);
    assert_true(c->has_mtp);
    assert_note(c, "mtp_num_hidden_layers is 0", "can be used");
    ql_checkpoint_close(&c);
}

static void test_partial_mtp_names_what_is_missing(void **state) {
    (void)state;
    model m = load_model(mixed);
    drop(&m, "mtp.fc.weight");
    drop(&m, "mtp.layers.0.self_attn.q_norm.weight");
    refused(&m, "MTP module is incomplete: 13 of 15", "self_attn.q_norm.weight, mtp.fc");
    m = load_model(mixed);
    drop_mtp(&m);
    add(&m, "mtp.norm.weight", QL_DTYPE_BF16, 1, 128, 0);
    refused(&m, "1 of 15", "mtp.layers.0.input_layernorm.weight");
}

static void test_mtp_may_be_quantized(void **state) {
    (void)state;
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    must(ql_checkpoint_open(&c, block, &err), &err);
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
    static const char *const dirs[] = {mixed, block, bf16, "models/tiny", "tests/data/micro-lanes8"};
    for (size_t i = 0; i < LEN(dirs); i++) {
        ql_checkpoint *c = NULL;
        ql_error err = {0};
        must(ql_checkpoint_open(&c, dirs[i], &err), &err);
        seen s = {.left = INT32_MAX};
        must(ql_checkpoint_each(c, true, count_visit, &s, &err), &err);
        assert_int_equal(s.tensors, c->summary.n_tensors - c->summary.n_ignored);
        s = (seen){.left = 5};
        assert_int_equal(ql_checkpoint_each(c, true, count_visit, &s, &err), QL_ERR_STATE);
        ql_checkpoint_close(&c);
    }
}

/* ---- names of models ------------------------------------------------------------------------------------------- */

static void make_dir(const char *fmt, ...) QL_PRINTF(1, 2);
static void make_dir(const char *fmt, ...) {
    char path[512], command[600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(path, sizeof path, fmt, ap);
    va_end(ap);
    snprintf(command, sizeof command, "mkdir -p %s", path);
    assert_int_equal(system(command), 0);
}

static void dir_refused(const char *name, ql_status status, const char *part) {
    char *dir = NULL;
    ql_error err = {0};
    assert_int_equal(ql_model_dir(name, &dir, &err), status);
    assert_null(dir);
    assert_contains(err.text, part);
}

static void test_model_names(void **state) {
    (void)state;
    clear_folder();
    char *dir = NULL, path[512];
    ql_error err = {0};
    must(ql_model_dir(bf16, &dir, &err), &err);
    assert_string_equal(dir, bf16);
    free(dir);
    dir_refused("", QL_ERR_USAGE, "no model is named");
    dir_refused("/no/such/place", QL_ERR_MODEL, "no directory /no/such/place");
    dir_refused("tests/data/micro-bf16/config.json", QL_ERR_MODEL, "is a file");

    unsetenv("HF_HUB_CACHE");
    unsetenv("HF_HOME");
    setenv("HOME", folder, 1);
    dir_refused("org/name", QL_ERR_MODEL, "neither a directory nor in the local Hub cache");
    dir_refused("../name", QL_ERR_MODEL, "no directory ../name");
    static const char *const roots[] = {".cache/huggingface/hub", "home/hub", "cache"};
    for (size_t i = 0; i < LEN(roots); i++) {
        if (i >= 1) {
            snprintf(path, sizeof path, "%s/home", folder);
            setenv("HF_HOME", path, 1);
        }
        if (i == 2) {
            snprintf(path, sizeof path, "%s/cache", folder);
            setenv("HF_HUB_CACHE", path, 1);
        }
        make_dir("%s/%s/models--org--name.%zu/refs", folder, roots[i], i);
        char id[32], want[512];
        snprintf(id, sizeof id, "org/name.%zu", i);
        dir_refused(id, QL_ERR_MODEL, "refs/main");
        snprintf(path, sizeof path, "%s/%s/models--org--name.%zu/refs/main", folder, roots[i], i);
        must(ql_write_file(path, "../../x", 7, &err), &err);
        dir_refused(id, QL_ERR_MODEL, "does not name a revision");
        must(ql_write_file(path, "0123abc\n", 8, &err), &err);
        dir_refused(id, QL_ERR_MODEL, "snapshot 0123abc is not in the cache");
        make_dir("%s/%s/models--org--name.%zu/snapshots/0123abc", folder, roots[i], i);
        must(ql_model_dir(id, &dir, &err), &err);
        snprintf(want, sizeof want, "%s/%s/models--org--name.%zu/snapshots/0123abc", folder, roots[i], i);
        assert_string_equal(dir, want);
        free(dir);
        dir = NULL;
    }
}

/* ---- data is not touched --------------------------------------------------------------------------------------- */

static void test_opening_reads_headers_only(void **state) {
    (void)state;
    clear_folder();
    ql_synth o = {.scheme = QL_SYNTH_MIXED, .prefix = "model.", .sparse = true};
    ql_synth_shape(&o.config, "27b");
    uint64_t bytes;
    ql_error err = {0};
    must(ql_synth_write(&o, folder, &bytes, &err), &err);
    ql_checkpoint *c = folder_opened();
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
        cmocka_unit_test(test_three_ways_to_lack_a_tensor),
        cmocka_unit_test(test_truncated_shard),
        cmocka_unit_test(test_no_model_at_all),
        cmocka_unit_test(test_index_takes_plain_file_names),
        cmocka_unit_test(test_index_is_an_allow_list),
        cmocka_unit_test(test_index_wins_over_a_single_file),
        cmocka_unit_test(test_mtp_file_outside_the_index_is_named),
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
        cmocka_unit_test(test_tied_head),
        cmocka_unit_test(test_checkpoint_without_mtp),
        cmocka_unit_test(test_partial_mtp_names_what_is_missing),
        cmocka_unit_test(test_mtp_may_be_quantized),
        cmocka_unit_test(test_each_visits_every_tensor_once),
        cmocka_unit_test(test_model_names),
        cmocka_unit_test(test_opening_reads_headers_only),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, set_up, tear_down);
}
