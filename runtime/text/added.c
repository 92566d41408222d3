#include "runtime/text/added.h"

#include <stdlib.h>
#include <string.h>

void ql_added_free(ql_added *added) {
    free(added->token);
    memset(added, 0, sizeof *added);
}

ql_status ql_added_add(ql_added *added, int32_t id, bool special, ql_error *err) {
    if (added->n == added->cap) {
        size_t cap = added->cap ? 2 * added->cap : 32;
        ql_added_token *token = ql_realloc(NULL, added->token, cap * sizeof *token);
        if (!token) {
            return ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory for %zu added tokens", cap);
        }
        added->token = token;
        added->cap = cap;
    }
    added->token[added->n++] = (ql_added_token){.id = id, .special = special};
    return QL_OK;
}

static int by_text(const void *a, const void *b) {
    const ql_added_token *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

ql_status ql_added_sort(ql_added *added, const ql_bpe *bpe, ql_error *err) {
    for (size_t i = 0; i < added->n; i++) {
        ql_bpe_token at = bpe->token[added->token[i].id];
        added->token[i].text = bpe->bytes + at.offset;
        added->token[i].len = at.len;
        added->starts[(unsigned char)added->token[i].text[0]] = true;
    }
    if (added->n) {
        qsort(added->token, added->n, sizeof *added->token, by_text);
    }
    for (size_t i = 1; i < added->n; i++) {
        if (by_text(&added->token[i - 1], &added->token[i]) == 0) {
            return ql_fail(err, QL_ERR_MODEL, "added tokens %d and %d are the same text", (int)added->token[i - 1].id,
                           (int)added->token[i].id);
        }
    }
    return QL_OK;
}

/* The first token of [low, high) whose byte at `depth` is at least `byte`; all of them are longer than depth. */
static size_t lower_bound(const ql_added *added, size_t low, size_t high, size_t depth, int byte) {
    while (low < high) {
        size_t mid = (low + high) / 2;
        if ((unsigned char)added->token[mid].text[depth] < byte) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

/* The longest token that text[0..n) begins with. The sorted tokens are walked as a trie: those that share the first
 * `depth` bytes with the text are token[low..high), the one that ends there, if any, first. */
static const ql_added_token *longest_at(const ql_added *added, const char *text, size_t n) {
    const ql_added_token *found = NULL;
    size_t low = 0, high = added->n;
    for (size_t depth = 0; depth < n && low < high; depth++) {
        int byte = (unsigned char)text[depth];
        low = lower_bound(added, low, high, depth, byte);
        high = lower_bound(added, low, high, depth, byte + 1);
        if (low < high && added->token[low].len == depth + 1) {
            found = &added->token[low++];
        }
    }
    return found;
}

const ql_added_token *ql_added_next(const ql_added *added, const char *text, size_t from, size_t n, size_t *at) {
    for (size_t i = from; i < n; i++) {
        if (!added->starts[(unsigned char)text[i]]) {
            continue;
        }
        const ql_added_token *token = longest_at(added, text + i, n - i);
        if (token) {
            *at = i;
            return token;
        }
    }
    return NULL;
}
