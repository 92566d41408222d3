/* Stop strings, then text, NUL-separated; the first byte gives the number of stop strings, the second how the text is cut
 * into pushes. Asserts: the output equals a search over the whole text, whatever the cuts; what was handed out never has
 * to be taken back; a string that is not accepted is refused. */
#include "runtime/text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "violated: %s\n", what);
        abort();
    }
}

/* Where the text is cut: before the stop string that ends first and, of those that end there, begins first. */
static size_t cut_at(const char *const *stop, int32_t n, const char *text, size_t len, bool *hit) {
    for (size_t end = 0; end <= len; end++) {
        size_t first = SIZE_MAX;
        for (int32_t i = 0; i < n; i++) {
            size_t k = strlen(stop[i]);
            if (k <= end && end - k < first && memcmp(text + end - k, stop[i], k) == 0) {
                first = end - k;
            }
        }
        if (first != SIZE_MAX) {
            *hit = true;
            return first;
        }
    }
    *hit = false;
    return len;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) {
        return 0;
    }
    char *copy = malloc(size - 1);
    require(copy != NULL, "memory");
    memcpy(copy, data + 2, size - 2);
    copy[size - 2] = 0;
    const char *text = copy, *end = copy + size - 2, *stops[16];
    int32_t n = 0, want_n = data[0] % 16;
    bool acceptable = true;
    while (n < want_n && text + strlen(text) < end) {
        size_t len = strlen(text);
        acceptable = acceptable && len >= 1 && len <= 1024 && ql_utf8_invalid_at(text, len) == len;
        stops[n++] = text;
        text += len + 1;
    }
    size_t len = (size_t)(end - text);
    ql_stop stop;
    ql_status status = ql_stop_init(&stop, NULL, stops, n, NULL);
    require((status == QL_OK) == acceptable, "exactly the acceptable strings are accepted");
    if (status != QL_OK || ql_utf8_invalid_at(text, len) < len) {
        if (status == QL_OK) {
            ql_stop_deinit(&stop);
        }
        free(copy);
        return 0;
    }
    bool hit;
    size_t want = cut_at(stops, n, text, len, &hit);
    ql_buf out;
    ql_buf_init(&out, NULL, SIZE_MAX / 2);
    size_t part = data[1] % 9 + 1;
    for (size_t from = 0, to; from < len; from = to) {
        to = from + part < len ? from + part : len;
        while (to < len && ((unsigned char)text[to] & 0xC0) == 0x80) {
            to++;
        }
        require(ql_stop_push(&stop, text + from, to - from, &out, NULL) == QL_OK, "text is taken");
        require(out.len <= want && (out.len == 0 || memcmp(out.data, text, out.len) == 0),
                "what was handed out stands before the cut");
        require(ql_utf8_invalid_at(out.data, out.len) == out.len, "output is whole characters");
    }
    require(stop.hit == hit, "a stop string is found exactly when there is one");
    require(ql_stop_flush(&stop, &out, NULL) == QL_OK, "the text ends");
    require(out.len == want, "the output ends at the cut");
    require(ql_stop_push(&stop, "x", hit, &out, NULL) == QL_OK && out.len == want, "nothing comes after a hit");
    ql_stop_deinit(&stop);
    ql_buf_deinit(&out);
    free(copy);
    return 0;
}
