#include "tests/unit/token.h"

#include <stdlib.h>
#include <string.h>

ql_tokenizer *tk_open(const char *path) {
    ql_error err = {0};
    ql_tokenizer *t = NULL;
    if (ql_tokenizer_open(&t, path, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return t;
}

int32_t *tk_encode(const ql_tokenizer *t, const char *text, size_t n, int32_t *n_ids) {
    ql_error err = {0};
    int32_t *ids = NULL;
    *n_ids = -1;
    if (ql_tokenizer_encode(t, text, n, &ids, n_ids, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return ids;
}

void tk_expect(const ql_tokenizer *t, const char *text, size_t n, const int32_t *want, int32_t n_want) {
    int32_t n_got;
    int32_t *got = tk_encode(t, text, n, &n_got);
    bool same = n_got == n_want && (n_want == 0 || memcmp(got, want, (size_t)n_want * sizeof *got) == 0);
    if (!same) {
        int32_t i = 0;
        while (i < n_got && i < n_want && got[i] == want[i]) {
            i++;
        }
        fail_msg("\"%.200s\": id %d of %d is %d, want %d of %d", text, (int)i, (int)n_got, i < n_got ? (int)got[i] : -1,
                 i < n_want ? (int)want[i] : -1, (int)n_want);
    }
    free(got);
}

size_t tk_put_char(char *out, uint32_t cp) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    size_t n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t i = n; --i > 0; cp >>= 6) {
        out[i] = (char)(0x80 | (cp & 0x3F));
    }
    out[0] = (char)((0xF00 >> n) | cp);
    return n;
}
