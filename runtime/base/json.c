#include "runtime/base/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

ql_status ql_json_parse(const char *bytes, size_t len, const char *what, json_t **root, ql_error *err) {
    json_error_t je;
    json_t *j = json_loadb(bytes, len, JSON_REJECT_DUPLICATES, &je);
    if (!j) {
        return ql_fail(err, QL_ERR_MODEL, "%s: not valid JSON at line %d column %d: %s", what, je.line, je.column,
                       je.text);
    }
    if (!json_is_object(j)) {
        json_decref(j);
        return ql_fail(err, QL_ERR_MODEL, "%s: the top level must be a JSON object", what);
    }
    *root = j;
    return QL_OK;
}

ql_status ql_read_file(const char *path, size_t max, char **data, size_t *len, ql_error *err) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        return ql_fail(err, QL_ERR_MODEL, "cannot open %s: %s", path, strerror(errno));
    }
    ql_status status = QL_OK;
    struct stat st;
    char *p = NULL;
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        status = ql_fail(err, QL_ERR_MODEL, "%s is not a regular file", path);
        goto done;
    }
    if ((uint64_t)st.st_size > max) {
        status =
            ql_fail(err, QL_ERR_MODEL, "%s has %lld bytes; at most %zu are accepted", path, (long long)st.st_size, max);
        goto done;
    }
    size_t n = (size_t)st.st_size;
    p = malloc(n + 1);
    if (!p) {
        status = ql_fail(err, QL_ERR_MEMORY, "cannot allocate %zu bytes of host memory for %s", n, path);
        goto done;
    }
    if (fread(p, 1, n, f) != n) {
        status = ql_fail(err, QL_ERR_MODEL, "cannot read %zu bytes of %s", n, path);
        goto done;
    }
    p[n] = 0;
    *data = p;
    *len = n;
    p = NULL;
done:
    free(p);
    fclose(f);
    return status;
}

ql_status ql_json_load(const char *path, size_t max, json_t **root, ql_error *err) {
    char *data = NULL;
    size_t len = 0;
    QL_TRY(ql_read_file(path, max, &data, &len, err));
    ql_status status = ql_json_parse(data, len, path, root, err);
    free(data);
    return status;
}

bool ql_file_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

bool ql_dir_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* The member, or NULL when absent or null. */
static const json_t *member(const json_t *obj, const char *key) {
    const json_t *v = json_object_get(obj, key);
    return json_is_null(v) ? NULL : v;
}

const char *ql_json_text(const json_t *value, char out[QL_JSON_TEXT]) {
    static const char more[] = "...";
    if (!value) {
        return strcpy(out, "nothing");
    }
    memset(out, 0, QL_JSON_TEXT);
    /* Parts that do not fit are left out, never cut; a text is one part. */
    if (json_is_string(value)) {
        snprintf(out, QL_JSON_TEXT, "\"%.*s%s\"", QL_JSON_TEXT - 8, json_string_value(value),
                 json_string_length(value) > QL_JSON_TEXT - 8 ? more : "");
    } else if (json_dumpb(value, out, QL_JSON_TEXT - sizeof more, JSON_COMPACT | JSON_ENCODE_ANY) >
               QL_JSON_TEXT - sizeof more) {
        strcat(out, more);
    }
    return out;
}

ql_status ql_json_int(const json_t *obj, const char *what, const char *key, int64_t min, int64_t max, int64_t *out,
                      ql_error *err) {
    const json_t *v = member(obj, key);
    if (!v) {
        return QL_OK;
    }
    if (!json_is_integer(v)) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL, "%s: %s must be an integer, not %s", what, key, ql_json_text(v, text));
    }
    int64_t i = json_integer_value(v);
    if (i < min || i > max) {
        return ql_fail(err, QL_ERR_MODEL, "%s: %s is %lld; accepted are %lld to %lld", what, key, (long long)i,
                       (long long)min, (long long)max);
    }
    *out = i;
    return QL_OK;
}

ql_status ql_json_i32(const json_t *obj, const char *what, const char *key, int32_t min, int32_t max, int32_t *out,
                      ql_error *err) {
    int64_t v = *out;
    QL_TRY(ql_json_int(obj, what, key, min, max, &v, err));
    *out = (int32_t)v;
    return QL_OK;
}

ql_status ql_json_real(const json_t *obj, const char *what, const char *key, double *out, ql_error *err) {
    const json_t *v = member(obj, key);
    if (!v) {
        return QL_OK;
    }
    if (!json_is_number(v) || !isfinite(json_number_value(v))) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL, "%s: %s must be a finite number, not %s", what, key, ql_json_text(v, text));
    }
    *out = json_number_value(v);
    return QL_OK;
}

ql_status ql_json_bool(const json_t *obj, const char *what, const char *key, bool *out, ql_error *err) {
    const json_t *v = member(obj, key);
    if (!v) {
        return QL_OK;
    }
    if (!json_is_boolean(v)) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL, "%s: %s must be true or false, not %s", what, key, ql_json_text(v, text));
    }
    *out = json_is_true(v);
    return QL_OK;
}

ql_status ql_json_str(const json_t *obj, const char *what, const char *key, const char **out, ql_error *err) {
    const json_t *v = member(obj, key);
    if (!v) {
        return QL_OK;
    }
    if (!json_is_string(v)) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL, "%s: %s must be a string, not %s", what, key, ql_json_text(v, text));
    }
    *out = json_string_value(v);
    return QL_OK;
}
