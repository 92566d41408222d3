/* Reading JSON files with jansson: duplicates refused, sizes bounded, messages that name file, key and value. */
#ifndef QL_RUNTIME_BASE_JSON_H
#define QL_RUNTIME_BASE_JSON_H

#include "runtime/base/mem.h"

#include <jansson.h>

/* Parses bytes; `what` names them in messages. The root must be an object. The caller owns *root (json_decref). */
ql_status ql_json_parse(const char *bytes, size_t len, const char *what, json_t **root, ql_error *err);

/* Reads and parses a file of at most `max` bytes. A missing file is QL_ERR_MODEL. */
ql_status ql_json_load(const char *path, size_t max, json_t **root, ql_error *err);

/* Reads a whole file; *data is NUL-terminated and the caller's (free). */
ql_status ql_read_file(const char *path, size_t max, char **data, size_t *len, ql_error *err);

bool ql_file_exists(const char *path); /* a regular file, links followed */
bool ql_dir_exists(const char *path);

/* A value for messages, as compact JSON of at most QL_JSON_TEXT - 1 bytes; what is longer ends in "...", and an absent
 * value is "nothing". Returns `out`. */
enum { QL_JSON_TEXT = 64 };
const char *ql_json_text(const json_t *value, char out[QL_JSON_TEXT]);

/* Typed members of an object. An absent key (or null) leaves *out as it is; a key of another type, or a number outside
 * [min, max], is QL_ERR_MODEL. `what` names the object in messages. */
ql_status ql_json_int(const json_t *obj, const char *what, const char *key, int64_t min, int64_t max, int64_t *out,
                      ql_error *err);
ql_status ql_json_i32(const json_t *obj, const char *what, const char *key, int32_t min, int32_t max, int32_t *out,
                      ql_error *err);
ql_status ql_json_real(const json_t *obj, const char *what, const char *key, double *out, ql_error *err);
ql_status ql_json_bool(const json_t *obj, const char *what, const char *key, bool *out, ql_error *err);
ql_status ql_json_str(const json_t *obj, const char *what, const char *key, const char **out, ql_error *err);

#endif
