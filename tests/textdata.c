#include "tests/textdata.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

int ql_test_rows(const char *path, void (*row)(void *user, const json_t *line), void *user) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return -1;
    }
    char *text = NULL;
    size_t cap = 0;
    ssize_t n;
    int count = 0;
    while (count >= 0 && (n = getline(&text, &cap, f)) > 0) {
        json_error_t error;
        json_t *line = json_loadb(text, (size_t)n, JSON_ALLOW_NUL, &error);
        if (!json_is_object(line)) {
            fprintf(stderr, "%s: line %d: %s\n", path, count + 1, line ? "not an object" : error.text);
            count = -1;
        } else {
            row(user, line);
            count++;
        }
        json_decref(line);
    }
    free(text);
    fclose(f);
    return count;
}

int32_t *ql_test_ints(const json_t *line, const char *key, int32_t *n) {
    const json_t *array = json_object_get(line, key);
    if (!json_is_array(array)) {
        return NULL;
    }
    *n = (int32_t)json_array_size(array);
    int32_t *value = malloc((size_t)(*n ? *n : 1) * sizeof *value);
    for (int32_t i = 0; value && i < *n; i++) {
        value[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
    }
    return value;
}
