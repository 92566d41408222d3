/* Which files a checkpoint is made of. The index is an allow-list: a tensor counts only where the index places it. */
#include "loader/bind.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_INDEX_BYTES = 256 << 20, MAX_FILES = 4096, MAX_PATH_BYTES = 4096 };

static const char index_name[] = "model.safetensors.index.json", single_name[] = "model.safetensors";

/* ---- opening -------------------------------------------------------------------------------------------------- */

static ql_status open_file(ql_checkpoint *c, const char *base, ql_error *err) {
    char path[MAX_PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/%s", c->dir, base) >= (int)sizeof path) {
        return ql_fail(err, QL_ERR_MODEL, "the path of %.256s is longer than %d bytes", base, MAX_PATH_BYTES - 1);
    }
    QL_TRY(ql_safetensors_open(&c->file[c->n_file], path, c->n_file, err));
    c->n_file++;
    return QL_OK;
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static bool is_base_name(const char *name) {
    return *name && !strchr(name, '/') && !strchr(name, '\\') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

/* The distinct files of the map, sorted. *files is the caller's (free); the texts belong to `map`. */
static ql_status mapped_files(const ql_checkpoint *c, const json_t *map, const char ***files, int32_t *n_file,
                              ql_error *err) {
    const size_t n = json_object_size(map);
    const char **list = NULL;
    QL_TRY(ql_alloc(NULL, n, sizeof *list, "the files of the index", (void **)&list, err));
    size_t i = 0;
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)map, name, v) {
        const char *file = json_string_value(v);
        if (!file || !is_base_name(file)) {
            ql_free(NULL, list);
            return ql_fail(err, QL_ERR_MODEL, "%s: \"%.200s\" is placed in \"%.128s\"; accepted are plain file names",
                           c->owned->index, name, file ? file : "no string");
        }
        list[i++] = file;
    }
    qsort(list, n, sizeof *list, by_text);
    int32_t unique = 0;
    for (i = 0; i < n; i++) {
        if (unique == 0 || strcmp(list[unique - 1], list[i]) != 0) {
            list[unique++] = list[i];
        }
    }
    *files = list;
    *n_file = unique;
    return QL_OK;
}

static ql_status fail_missing_shard(const ql_checkpoint *c, const json_t *map, const char *file, ql_error *err) {
    int32_t n = 0;
    const char *first = NULL, *name;
    json_t *v;
    json_object_foreach((json_t *)map, name, v) {
        if (strcmp(json_string_value(v), file) == 0) {
            first = first ? first : name;
            n++;
        }
    }
    return ql_fail(err, QL_ERR_MODEL, "the shard %s is missing from %s; the index places %d tensors in it, %s first",
                   file, c->dir, n, first);
}

static ql_status open_indexed(ql_checkpoint *c, const json_t *map, ql_error *err) {
    const char **files = NULL;
    int32_t n = 0;
    QL_TRY(mapped_files(c, map, &files, &n, err));
    ql_status status = QL_OK;
    if (n > MAX_FILES) {
        status =
            ql_fail(err, QL_ERR_MODEL, "%s names %d files; at most %d are accepted", c->owned->index, n, MAX_FILES);
        goto done;
    }
    QL_TRY_GOTO(ql_alloc(NULL, (size_t)n, sizeof *c->file, "the file table", (void **)&c->file, err), done);
    for (int32_t i = 0; i < n; i++) {
        char path[MAX_PATH_BYTES];
        snprintf(path, sizeof path, "%s/%s", c->dir, files[i]);
        if (!ql_file_exists(path)) {
            status = fail_missing_shard(c, map, files[i], err);
            goto done;
        }
        QL_TRY_GOTO(open_file(c, files[i], err), done);
    }
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)map, name, v) {
        const char *const *at =
            bsearch(&(const char *){json_string_value(v)}, files, (size_t)n, sizeof *files, by_text);
        if (!ql_safetensors_find(&c->file[at - (const char *const *)files], name)) {
            status =
                ql_fail(err, QL_ERR_MODEL, "the index places \"%s\" in %s, but that file's header lacks it", name, *at);
            goto done;
        }
    }
done:
    ql_free(NULL, files);
    return status;
}

static int by_name(const void *a, const void *b) {
    const ql_tensor *x = *(const ql_tensor *const *)a, *y = *(const ql_tensor *const *)b;
    int order = strcmp(x->name, y->name);
    return order ? order : x->file - y->file;
}

static ql_status build_table(ql_checkpoint *c, ql_error *err) {
    int64_t total = 0;
    for (int32_t f = 0; f < c->n_file; f++) {
        total += c->file[f].n_tensor;
    }
    if (total > INT32_MAX) {
        return ql_fail(err, QL_ERR_MODEL, "%s holds %lld tensors; at most %d are accepted", c->dir, (long long)total,
                       INT32_MAX);
    }
    QL_TRY(ql_alloc(NULL, (size_t)total, sizeof *c->tensor, "the tensor list", (void **)&c->tensor, err));
    QL_TRY(ql_alloc(NULL, (size_t)total, sizeof *c->info, "the decision table", (void **)&c->info, err));
    for (int32_t f = 0; f < c->n_file; f++) {
        for (int32_t i = 0; i < c->file[f].n_tensor; i++) {
            c->tensor[c->n_tensor++] = &c->file[f].tensor[i];
        }
    }
    qsort(c->tensor, (size_t)c->n_tensor, sizeof *c->tensor, by_name);
    for (int32_t i = 0; i < c->n_tensor; i++) {
        const ql_tensor *t = c->tensor[i];
        c->info[i] = (ql_tensor_info){.name = t->name,
                                      .file = c->file[t->file].base,
                                      .dtype = ql_dtype_name(t->dtype),
                                      .rank = t->rank,
                                      .offset = t->offset,
                                      .bytes = t->bytes,
                                      .role = "",
                                      .format = "",
                                      .reason = ""};
        memcpy(c->info[i].shape, t->shape, sizeof t->shape);
    }
    return QL_OK;
}

/* Leaves out what stands in a shard without standing in the map, with one note a file. */
static ql_status apply_allow_list(ql_checkpoint *c, const json_t *map, ql_error *err) {
    for (int32_t f = 0; f < c->n_file; f++) {
        int32_t n = 0;
        const char *first = NULL;
        for (int32_t i = 0; i < c->n_tensor; i++) {
            const ql_tensor *t = c->tensor[i];
            const char *placed = json_string_value(json_object_get(map, t->name));
            if (t->file == f && (!placed || strcmp(placed, c->file[f].base) != 0)) {
                ql_checkpoint_leave_out(c, i,
                                        placed ? "the index places this name in another file" : "not in the index");
                first = first ? first : t->name;
                n++;
            }
        }
        if (n) {
            QL_TRY(ql_checkpoint_add_note(c, err,
                                          "%s holds %d tensor%s that the index does not list there (%s%s); not loaded",
                                          c->file[f].base, n, n == 1 ? "" : "s", first, n == 1 ? "" : ", ..."));
        }
    }
    return QL_OK;
}

/* ---- files beside the checkpoint ------------------------------------------------------------------------------ */

static bool has_suffix(const char *text, const char *suffix) {
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

/* Notes .safetensors files that no one reads: an export whose index forgot its MTP file looks complete otherwise. */
static ql_status note_unlisted_files(ql_checkpoint *c, ql_error *err) {
    DIR *d = opendir(c->dir);
    if (!d) {
        return QL_OK; /* a directory may be searchable without being listable */
    }
    char names[64][256];
    const char *sorted[64];
    size_t n = 0;
    for (struct dirent *e; n < 64 && (e = readdir(d));) {
        bool used = !has_suffix(e->d_name, ".safetensors");
        for (int32_t f = 0; f < c->n_file; f++) {
            used = used || strcmp(e->d_name, c->file[f].base) == 0;
        }
        if (!used) {
            snprintf(names[n], sizeof names[n], "%s", e->d_name);
            sorted[n] = names[n];
            n++;
        }
    }
    closedir(d);
    qsort(sorted, n, sizeof *sorted, by_text);
    const char *what = c->owned->index ? "the index does not list it" : "there is no index to list it";
    for (size_t i = 0; i < n; i++) {
        QL_TRY(strstr(sorted[i], "mtp")
                   ? ql_checkpoint_add_note(c, err, "%s looks like MTP weights, but %s; not loaded", sorted[i], what)
                   : ql_checkpoint_add_note(c, err, "%s is there, but %s; not loaded", sorted[i], what));
    }
    return QL_OK;
}

ql_status ql_checkpoint_load_files(ql_checkpoint *c, ql_error *err) {
    char path[MAX_PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/%s", c->dir, index_name) >= (int)sizeof path) {
        return ql_fail(err, QL_ERR_MODEL, "the directory name is longer than %d bytes", MAX_PATH_BYTES);
    }
    json_t *index = NULL;
    ql_status status;
    if (ql_file_exists(path)) {
        c->owned->index = ql_strdup(NULL, path);
        if (!c->owned->index) {
            return ql_fail(err, QL_ERR_MEMORY, "no host memory for the name of the index");
        }
        QL_TRY_GOTO(ql_json_load(path, MAX_INDEX_BYTES, &index, err), done);
        const json_t *map = json_object_get(index, "weight_map");
        if (!json_is_object(map) || json_object_size(map) == 0) {
            status = ql_fail(err, QL_ERR_MODEL, "%s: weight_map must be an object that places tensors in files", path);
            goto done;
        }
        QL_TRY_GOTO(open_indexed(c, map, err), done);
        QL_TRY_GOTO(build_table(c, err), done);
        QL_TRY_GOTO(apply_allow_list(c, map, err), done);
    } else {
        snprintf(path, sizeof path, "%s/%s", c->dir, single_name);
        if (!ql_file_exists(path)) {
            status = ql_fail(err, QL_ERR_MODEL, "%s holds neither %s nor %s", c->dir, index_name, single_name);
            goto done;
        }
        QL_TRY_GOTO(ql_alloc(NULL, 1, sizeof *c->file, "the file table", (void **)&c->file, err), done);
        QL_TRY_GOTO(open_file(c, single_name, err), done);
        QL_TRY_GOTO(build_table(c, err), done);
    }
    status = note_unlisted_files(c, err);
done:
    json_decref(index);
    return status;
}
