/* Finding and reading the files of a tokenizer. */
#include "loader/checkpoint.h"
#include "runtime/base/json.h"
#include "runtime/text/text.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_FILE_BYTES = 256 << 20 };

/* dir/name as a new string. */
static char *join(const char *dir, const char *name) {
    size_t n = strlen(dir), m = strlen(name);
    char *path = ql_calloc(NULL, n + m + 2, 1);
    if (path) {
        memcpy(path, dir, n);
        path[n] = '/';
        memcpy(path + n + 1, name, m);
    }
    return path;
}

static ql_status open_dir(ql_tokenizer **tokenizer, const char *dir, ql_error *err) {
    char *json_path = join(dir, "tokenizer.json"), *config_path = join(dir, "tokenizer_config.json");
    char *json = NULL, *config = NULL;
    size_t json_n = 0, config_n = 0;
    ql_status status = QL_OK;
    if (!json_path || !config_path) {
        status = ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory for a path");
        goto done;
    }
    QL_TRY_GOTO(ql_read_file(json_path, MAX_FILE_BYTES, &json, &json_n, err), done);
    if (ql_file_exists(config_path)) {
        QL_TRY_GOTO(ql_read_file(config_path, MAX_FILE_BYTES, &config, &config_n, err), done);
    }
    status = ql_tokenizer_parse(tokenizer, json, json_n, config, config_n, json_path, err);
done:
    free(json);
    free(config);
    free(json_path);
    free(config_path);
    return status;
}

ql_status ql_tokenizer_open(ql_tokenizer **tokenizer, const char *path, ql_error *err) {
    if (ql_file_exists(path)) {
        char *json = NULL;
        size_t n = 0;
        QL_TRY(ql_read_file(path, MAX_FILE_BYTES, &json, &n, err));
        ql_status status = ql_tokenizer_parse(tokenizer, json, n, NULL, 0, path, err);
        free(json);
        return status;
    }
    char *dir = NULL;
    QL_TRY(ql_model_dir(path, &dir, err));
    ql_status status = open_dir(tokenizer, dir, err);
    free(dir);
    return status;
}
