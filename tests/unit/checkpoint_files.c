/* Opening whole checkpoints: every way in which files, index and names of models can be wrong. */
#include "tests/unit/ckpt.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- files and index ------------------------------------------------------------------------------------------- */

static void test_three_ways_to_lack_a_tensor(void **state) {
    (void)state;
    /* nobody names it */
    ck_model m = ck_load(ck_mixed);
    ck_drop(&m, P "layers.5.linear_attn.out_proj.weight");
    ck_drop(&m, P "layers.5.linear_attn.out_proj.weight_scale");
    ck_refused(&m, "never had \"" P "layers.5.linear_attn.out_proj.weight\"", "neither the index nor any shard");
    m = ck_load(ck_bf16);
    ck_drop(&m, P "norm.weight");
    ck_refused(&m, "never had \"" P "norm.weight\"", "model.safetensors does not name it");
    /* its shard is missing */
    m = ck_load(ck_mixed);
    ck_write(&m);
    ck_free(&m);
    char path[256];
    snprintf(path, sizeof path, "%s/model-00002-of-00003.safetensors", ck_folder);
    assert_int_equal(unlink(path), 0);
    ck_folder_refused("shard model-00002-of-00003.safetensors is missing", "71 tensors in it");
    /* the shard is there, its header lacks it */
    m = ck_load(ck_mixed);
    ck_map(&m, "mtp.fc.weight", "model-00001-of-00003.safetensors");
    ck_refused(&m, "places \"mtp.fc.weight\" in model-00001-of-00003.safetensors", "header lacks it");
    /* it is in a shard where the index does not place it */
    m = ck_load(ck_mixed);
    json_object_del(m.map, P "norm.weight");
    ck_refused(&m, P "norm.weight", "model-00001-of-00003.safetensors has it, but the index does not place it there");
}

static void test_truncated_shard(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_write(&m);
    ck_free(&m);
    char path[256];
    struct stat info;
    snprintf(path, sizeof path, "%s/model-00003-of-00003.safetensors", ck_folder);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(truncate(path, info.st_size - 4096), 0);
    ck_folder_refused("model-00003-of-00003.safetensors is truncated or incomplete", "bytes");
}

static void test_no_model_at_all(void **state) {
    (void)state;
    ck_model m = ck_load(ck_bf16);
    ck_write(&m);
    ck_free(&m);
    char path[256];
    snprintf(path, sizeof path, "%s/model.safetensors", ck_folder);
    assert_int_equal(unlink(path), 0);
    ck_folder_refused("neither model.safetensors.index.json nor model.safetensors", ck_folder);
    ck_clear_folder();
    ck_folder_refused("cannot open", "config.json");
}

static void test_index_takes_plain_file_names(void **state) {
    (void)state;
    static const char *const names[] = {
        "../model-00001-of-00003.safetensors", "/etc/passwd", "..", ".", "", "a\\b", "sub/model.safetensors"};
    for (size_t i = 0; i < LEN(names); i++) {
        ck_model m = ck_load(ck_mixed);
        ck_map(&m, "lm_head.weight", names[i]);
        ck_refused(&m, "\"lm_head.weight\" is placed in", "plain file names");
    }
    ck_model m = ck_load(ck_mixed);
    json_object_set_new(m.map, "lm_head.weight", json_integer(3));
    ck_refused(&m, "\"lm_head.weight\" is placed in", "plain file names");
    m = ck_load(ck_mixed);
    json_object_clear(m.map);
    ck_refused(&m, "weight_map", "places tensors in files");
}

static void test_index_is_an_allow_list(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_add(&m, P "layers.0.mlp.up_proj.scale_weight", QL_DTYPE_F32, 1, 1, 0); /* would be refused if it counted */
    json_object_del(m.map, P "layers.0.mlp.up_proj.scale_weight");
    ql_checkpoint *c = ck_opened(&m);
    ck_has_note(c, "model-00001-of-00003.safetensors holds 1 tensor that the index does not list", "scale_weight");
    assert_string_equal(ck_info(c, P "layers.0.mlp.up_proj.scale_weight").role, "ignored");
    ql_checkpoint_close(&c);
    /* the same name in two shards: the index says which counts */
    m = ck_load(ck_mixed);
    const int64_t shape[1] = {128};
    ql_error err = {0};
    ck_must(ql_stfile_add(&m.file[1], P "norm.weight", QL_DTYPE_BF16, 1, shape, &err), &err);
    c = ck_opened(&m);
    assert_string_equal(c->file[c->norm->file].base, "model-00001-of-00003.safetensors");
    ck_has_note(c, "model-00002-of-00003.safetensors holds 1 tensor", "norm.weight");
    ql_checkpoint_close(&c);
}

static void test_index_wins_over_a_single_file(void **state) {
    (void)state;
    ck_model m = ck_load(ck_mixed);
    ck_write(&m);
    ck_free(&m);
    char path[256];
    ql_error err = {0};
    snprintf(path, sizeof path, "%s/model.safetensors", ck_folder);
    ck_must(ql_write_file(path, "not read", 8, &err), &err);
    ql_checkpoint *c = ck_folder_opened();
    assert_int_equal(c->n_file, 3);
    ck_has_note(c, "model.safetensors is there", "index does not list it");
    ql_checkpoint_close(&c);
}

static void test_mtp_file_outside_the_index_is_named(void **state) {
    (void)state;
    static const char *const names[] = {"mtp.safetensors", "model_mtp.safetensors",
                                        "model-mtp-00001-of-00001.safetensors"};
    for (size_t i = 0; i < LEN(names); i++) {
        ck_model m = ck_load(i == 0 ? ck_modelopt : ck_mixed);
        ck_write(&m);
        ck_free(&m);
        char path[256];
        ql_error err = {0};
        snprintf(path, sizeof path, "%s/%s", ck_folder, names[i]);
        ck_must(ql_write_file(path, "not read", 8, &err), &err);
        ql_checkpoint *c = ck_folder_opened();
        ck_has_note(c, names[i], "MTP weights");
        ck_has_note(c, names[i], i == 0 ? "no index to list it" : "index does not list it");
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
    ck_contains(err.text, part);
}

static void test_model_names(void **state) {
    (void)state;
    ck_clear_folder();
    char *dir = NULL, path[512];
    ql_error err = {0};
    ck_must(ql_model_dir(ck_bf16, &dir, &err), &err);
    assert_string_equal(dir, ck_bf16);
    free(dir);
    dir_refused("", QL_ERR_USAGE, "no model is named");
    dir_refused("/no/such/place", QL_ERR_MODEL, "no directory /no/such/place");
    dir_refused("tests/data/micro-bf16/config.json", QL_ERR_MODEL, "is a file");

    unsetenv("HF_HUB_CACHE");
    unsetenv("HF_HOME");
    setenv("HOME", ck_folder, 1);
    dir_refused("org/name", QL_ERR_MODEL, "neither a directory nor in the local Hub cache");
    dir_refused("../name", QL_ERR_MODEL, "no directory ../name");
    static const char *const roots[] = {".cache/huggingface/hub", "home/hub", "cache"};
    for (size_t i = 0; i < LEN(roots); i++) {
        if (i >= 1) {
            snprintf(path, sizeof path, "%s/home", ck_folder);
            setenv("HF_HOME", path, 1);
        }
        if (i == 2) {
            snprintf(path, sizeof path, "%s/cache", ck_folder);
            setenv("HF_HUB_CACHE", path, 1);
        }
        make_dir("%s/%s/models--org--name.%zu/refs", ck_folder, roots[i], i);
        char id[32], want[512];
        snprintf(id, sizeof id, "org/name.%zu", i);
        dir_refused(id, QL_ERR_MODEL, "refs/main");
        snprintf(path, sizeof path, "%s/%s/models--org--name.%zu/refs/main", ck_folder, roots[i], i);
        ck_must(ql_write_file(path, "../../x", 7, &err), &err);
        dir_refused(id, QL_ERR_MODEL, "does not name a revision");
        ck_must(ql_write_file(path, "0123abc\n", 8, &err), &err);
        dir_refused(id, QL_ERR_MODEL, "snapshot 0123abc is not in the cache");
        make_dir("%s/%s/models--org--name.%zu/snapshots/0123abc", ck_folder, roots[i], i);
        ck_must(ql_model_dir(id, &dir, &err), &err);
        snprintf(want, sizeof want, "%s/%s/models--org--name.%zu/snapshots/0123abc", ck_folder, roots[i], i);
        assert_string_equal(dir, want);
        free(dir);
        dir = NULL;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_three_ways_to_lack_a_tensor),
        cmocka_unit_test(test_truncated_shard),
        cmocka_unit_test(test_no_model_at_all),
        cmocka_unit_test(test_index_takes_plain_file_names),
        cmocka_unit_test(test_index_is_an_allow_list),
        cmocka_unit_test(test_index_wins_over_a_single_file),
        cmocka_unit_test(test_mtp_file_outside_the_index_is_named),
        cmocka_unit_test(test_model_names),
    };
    return cmocka_run_group_tests_name("checkpoint_files", tests, ck_set_up, ck_tear_down);
}
