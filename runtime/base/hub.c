/* The cache is looked up as the Hub's own client lays it out; nothing is ever downloaded. */
#include "runtime/base/hub.h"

#include "runtime/base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PATH_BYTES = 4096 };

/* "org/name" of Hub characters, one slash. */
static bool is_hub_id(const char *text) {
    const char *slash = strchr(text, '/');
    size_t len = strlen(text);
    return slash && slash != text && slash[1] && !strchr(slash + 1, '/') && text[0] != '.' && slash[1] != '.' &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./") == len && len < 200;
}

static ql_status dup_dir(const char *path, char **dir, ql_error *err) {
    *dir = strdup(path);
    return *dir ? QL_OK : ql_fail(err, QL_ERR_MEMORY, "no host memory for a directory name");
}

/* Looks into one cache root. *found tells whether the model has a folder there. */
static ql_status hub_dir(const char *root, const char *model, bool *found, char **dir, ql_error *err) {
    char repo[MAX_PATH_BYTES], path[MAX_PATH_BYTES + 512];
    const char *slash = strchr(model, '/');
    int n = snprintf(repo, sizeof repo, "%s/models--%.*s--%s", root, (int)(slash - model), model, slash + 1);
    *found = n < (int)sizeof repo && ql_dir_exists(repo);
    if (!*found) {
        return QL_OK;
    }
    snprintf(path, sizeof path, "%s/refs/main", repo);
    char *revision = NULL;
    size_t len = 0;
    QL_TRY(ql_read_file(path, 256, &revision, &len, err));
    revision[strcspn(revision, " \r\n\t")] = 0;
    ql_status status;
    if (!*revision || strchr(revision, '/') || revision[0] == '.') {
        status = ql_fail(err, QL_ERR_MODEL, "%s does not name a revision", path);
    } else {
        snprintf(path, sizeof path, "%s/snapshots/%s", repo, revision);
        status = ql_dir_exists(path) ? dup_dir(path, dir, err)
                                     : ql_fail(err, QL_ERR_MODEL,
                                               "%s: the snapshot %s is not in the cache; the download is "
                                               "incomplete",
                                               repo, revision);
    }
    free(revision);
    return status;
}

ql_status ql_model_dir(const char *model, char **dir, ql_error *err) {
    if (!model || !*model) {
        return ql_fail(err, QL_ERR_USAGE, "no model is named; give a checkpoint directory or a Hub id");
    }
    if (ql_dir_exists(model)) {
        return dup_dir(model, dir, err);
    }
    if (ql_file_exists(model)) {
        return ql_fail(err, QL_ERR_MODEL, "%s is a file; give the directory that holds config.json", model);
    }
    if (!is_hub_id(model)) {
        return ql_fail(err, QL_ERR_MODEL, "there is no directory %s", model);
    }
    char roots[3][MAX_PATH_BYTES], searched[512];
    int n = 0;
    size_t len = 0;
    const char *cache = getenv("HF_HUB_CACHE"), *hf_home = getenv("HF_HOME"), *home = getenv("HOME");
    if (cache && *cache) {
        snprintf(roots[n++], MAX_PATH_BYTES, "%s", cache);
    }
    if (hf_home && *hf_home) {
        snprintf(roots[n++], MAX_PATH_BYTES, "%s/hub", hf_home);
    }
    if (home && *home) {
        snprintf(roots[n++], MAX_PATH_BYTES, "%s/.cache/huggingface/hub", home);
    }
    searched[0] = 0;
    for (int i = 0; i < n; i++) {
        bool found;
        QL_TRY(hub_dir(roots[i], model, &found, dir, err));
        if (found) {
            return QL_OK;
        }
        if (len < sizeof searched) {
            len += (size_t)snprintf(searched + len, sizeof searched - len, "%s%s", i ? ", " : "", roots[i]);
        }
    }
    return ql_fail(err, QL_ERR_MODEL, "%s is neither a directory nor in the local Hub cache (%s)", model,
                   n ? searched : "none is set");
}
