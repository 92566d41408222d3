#include "tests/unit/ckpt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char ck_mixed[] = "tests/data/micro-mixed", ck_block[] = "tests/data/micro-fp8-block",
           ck_modelopt[] = "tests/data/micro-nvfp4-modelopt", ck_bf16[] = "tests/data/micro-bf16";

char ck_folder[] = "/tmp/ql-checkpoint-XXXXXX";

void ck_clear_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s && mkdir %s", ck_folder, ck_folder);
    assert_int_equal(system(command), 0);
}

int ck_set_up(void **state) {
    (void)state;
    return mkdtemp(ck_folder) ? 0 : -1;
}

int ck_tear_down(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", ck_folder);
    return system(command);
}

void ck_must(ql_status status, const ql_error *err) {
    if (status != QL_OK) {
        fail_msg("%s", err->text);
    }
}

ck_model ck_load(const char *dir) {
    ck_model m = {0};
    ql_error err = {0};
    char path[256];
    snprintf(path, sizeof path, "%s/config.json", dir);
    ck_must(ql_json_load(path, 1 << 20, &m.config, &err), &err);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (ql_file_exists(path)) {
        json_t *index = NULL;
        ck_must(ql_json_load(path, 1 << 20, &index, &err), &err);
        m.map = json_incref(json_object_get(index, "weight_map"));
        json_decref(index);
    }
    ql_checkpoint *c = NULL;
    ck_must(ql_checkpoint_open(&c, dir, &err), &err);
    m.n_file = c->n_file;
    for (int f = 0; f < c->n_file; f++) {
        snprintf(m.name[f], sizeof m.name[f], "%s", c->file[f].base);
        for (int i = 0; i < c->file[f].n_tensor; i++) {
            const ql_tensor *t = &c->file[f].tensor[i];
            ck_must(ql_stfile_add(&m.file[f], t->name, t->dtype, t->rank, t->shape, &err), &err);
        }
    }
    ql_checkpoint_close(&c);
    return m;
}

static ql_stentry *entry(ck_model *m, const char *name) {
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

void ck_map(ck_model *m, const char *name, const char *file) {
    if (m->map) {
        json_object_set_new(m->map, name, json_string(file));
    }
}

void ck_drop(ck_model *m, const char *name) {
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

void ck_add(ck_model *m, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k) {
    const int64_t shape[2] = {n, k};
    ql_error err = {0};
    ck_must(ql_stfile_add(&m->file[0], name, dtype, rank, shape, &err), &err);
    ck_map(m, name, m->name[0]);
}

void ck_rename(ck_model *m, const char *name, const char *other) {
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

void ck_reshape(ck_model *m, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k) {
    ql_stentry *e = entry(m, name);
    e->dtype = dtype;
    e->rank = rank;
    e->shape[0] = n;
    e->shape[1] = k;
}

void ck_make_plain(ck_model *m, const char *module, int64_t n, int64_t k) {
    static const char *const parts[] = {"weight",         "weight_packed",       "weight_scale", "weight_scale_inv",
                                        "weight_scale_2", "weight_global_scale", "input_scale",  "input_global_scale"};
    char name[256];
    for (size_t p = 0; p < LEN(parts); p++) {
        snprintf(name, sizeof name, "%s.%s", module, parts[p]);
        for (int f = 0; f < m->n_file; f++) {
            for (int i = 0; i < m->file[f].n; i++) {
                if (strcmp(m->file[f].entry[i].name, name) == 0) {
                    ck_drop(m, name);
                    i--;
                }
            }
        }
    }
    snprintf(name, sizeof name, "%s.weight", module);
    ck_add(m, name, QL_DTYPE_BF16, 2, n, k);
}

void ck_set_config(ck_model *m, const char *key, json_t *value) {
    json_t *text = json_object_get(m->config, "text_config");
    json_object_set_new(text ? text : m->config, key, value);
}

json_t *ck_quantization(ck_model *m) { return json_object_get(m->config, "quantization_config"); }
json_t *ck_targets(ck_model *m, const char *group) {
    json_t *groups = json_object_get(ck_quantization(m), "config_groups");
    return json_object_get(json_object_get(groups, group), "targets");
}

void ck_write(ck_model *m) {
    ql_error err = {0};
    char path[256];
    ck_clear_folder();
    for (int f = 0; f < m->n_file; f++) {
        ql_stfile laid_out = {0};
        for (int i = 0; i < m->file[f].n; i++) {
            const ql_stentry *e = &m->file[f].entry[i];
            ck_must(ql_stfile_add(&laid_out, e->name, e->dtype, e->rank, e->shape, &err), &err);
        }
        uint64_t offset;
        snprintf(path, sizeof path, "%s/%s", ck_folder, m->name[f]);
        ck_must(ql_stfile_create(&laid_out, path, &offset, &err), &err);
        ql_stfile_deinit(&laid_out);
    }
    snprintf(path, sizeof path, "%s/config.json", ck_folder);
    assert_int_equal(json_dump_file(m->config, path, 0), 0);
    if (m->map) {
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", ck_folder);
        json_t *index = json_pack("{s:{s:i}, s:O}", "metadata", "total_size", 1, "weight_map", m->map);
        assert_int_equal(json_dump_file(index, path, 0), 0);
        json_decref(index);
    }
}

void ck_free(ck_model *m) {
    for (int f = 0; f < m->n_file; f++) {
        ql_stfile_deinit(&m->file[f]);
    }
    json_decref(m->config);
    json_decref(m->map);
}

void ck_contains(const char *text, const char *part) {
    if (!strstr(text, part)) {
        fail_msg("\"%s\" does not contain \"%s\"", text, part);
    }
}

void ck_folder_refused(const char *a, const char *b) {
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    assert_int_equal(ql_checkpoint_open(&c, ck_folder, &err), QL_ERR_MODEL);
    assert_null(c);
    ck_contains(err.text, a);
    ck_contains(err.text, b);
}

ql_checkpoint *ck_folder_opened(void) {
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    ck_must(ql_checkpoint_open(&c, ck_folder, &err), &err);
    return c;
}

void ck_refused(ck_model *m, const char *a, const char *b) {
    ck_write(m);
    ck_free(m);
    ck_folder_refused(a, b);
}

void ck_reshaped_refused(const char *dir, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k,
                         const char *a, const char *b) {
    ck_model m = ck_load(dir);
    ck_reshape(&m, name, dtype, rank, n, k);
    ck_refused(&m, a, b);
}

ql_checkpoint *ck_opened(ck_model *m) {
    ck_write(m);
    ck_free(m);
    return ck_folder_opened();
}

static const char *find_note(const ql_checkpoint *c, const char *part) {
    for (int32_t i = 0; ql_checkpoint_note(c, i); i++) {
        if (strstr(ql_checkpoint_note(c, i), part)) {
            return ql_checkpoint_note(c, i);
        }
    }
    return NULL;
}

void ck_has_note(const ql_checkpoint *c, const char *a, const char *b) {
    const char *note = find_note(c, a);
    if (!note) {
        fail_msg("no note contains \"%s\"", a);
    }
    ck_contains(note, b);
}

ql_tensor_info ck_info(const ql_checkpoint *c, const char *name) {
    ql_tensor_info t;
    for (int32_t i = 0; ql_checkpoint_get_tensor(c, i, &t) == QL_OK; i++) {
        if (strcmp(t.name, name) == 0) {
            return t;
        }
    }
    fail_msg("the decision table has no %s", name);
    return t;
}
