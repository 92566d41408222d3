#include "tests/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

json_t *ql_test_json(const char *text) {
    char buffer[8192];
    assert_true(strlen(text) < sizeof buffer);
    size_t i = 0;
    for (; text[i]; i++) {
        buffer[i] = text[i] == '\'' ? '"' : text[i];
    }
    json_t *v = json_loadb(buffer, i, JSON_DECODE_ANY, NULL);
    if (!v) {
        fail_msg("test JSON is wrong: %s", text);
    }
    return v;
}
