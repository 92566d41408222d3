/* Stop strings. Every push looks only at ends of matches that lie in the new bytes, so how the text was cut into
 * pushes changes nothing. `held` is the longest end of the text so far that is a proper beginning of a stop string;
 * pushed text and stop strings are whole characters, therefore so is what is handed out. */
#include "runtime/text/text.h"

#include <string.h>

enum { MAX_STOPS = 16, MAX_STOP_BYTES = 1024 };

ql_status ql_stop_init(ql_stop *stop, const ql_allocator *mem, const char *const *text, int32_t n, ql_error *err) {
    memset(stop, 0, sizeof *stop);
    ql_buf_init(&stop->held, mem, SIZE_MAX / 2);
    if (n < 0 || n > MAX_STOPS) {
        return ql_fail(err, QL_ERR_USAGE, "%d stop strings given; accepted are 0 to %d", (int)n, MAX_STOPS);
    }
    for (int32_t i = 0; i < n; i++) {
        size_t len = text[i] ? strlen(text[i]) : 0;
        if (len < 1 || len > MAX_STOP_BYTES) {
            return ql_fail(err, QL_ERR_USAGE, "stop string %d has %zu bytes; accepted are 1 to %d", (int)i, len,
                           MAX_STOP_BYTES);
        }
        size_t bad = ql_utf8_invalid_at(text[i], len);
        if (bad < len) {
            return ql_fail(err, QL_ERR_USAGE, "stop string %d is not UTF-8: byte 0x%02X at offset %zu", (int)i,
                           (unsigned)(unsigned char)text[i][bad], bad);
        }
    }
    if (n == 0) {
        return QL_OK;
    }
    ql_status status = QL_OK;
    void *block;
    QL_TRY_GOTO(ql_alloc(mem, (size_t)n, sizeof *stop->text, "stop strings", &block, err), fail);
    stop->text = block;
    QL_TRY_GOTO(ql_alloc(mem, (size_t)n, sizeof *stop->len, "stop strings", &block, err), fail);
    stop->len = block;
    for (int32_t i = 0; i < n; i++) {
        stop->len[i] = strlen(text[i]);
        QL_TRY_GOTO(ql_alloc(mem, stop->len[i] + 1, 1, "stop strings", &block, err), fail);
        stop->text[i] = block;
        stop->n = i + 1;
        memcpy(stop->text[i], text[i], stop->len[i]);
    }
    return QL_OK;
fail:
    ql_stop_deinit(stop);
    return status;
}

void ql_stop_deinit(ql_stop *stop) {
    for (int32_t i = 0; i < stop->n; i++) {
        ql_free(stop->held.mem, stop->text[i]);
    }
    ql_free(stop->held.mem, stop->text);
    ql_free(stop->held.mem, stop->len);
    ql_buf_deinit(&stop->held);
    stop->text = NULL;
    stop->len = NULL;
    stop->n = 0;
}

/* Length of the longest stop string that ends just before data[end], 0 when none does. */
static size_t ends_at(const ql_stop *stop, const char *data, size_t end) {
    size_t longest = 0;
    for (int32_t i = 0; i < stop->n; i++) {
        size_t len = stop->len[i];
        if (len > longest && len <= end && data[end - 1] == stop->text[i][len - 1] &&
            memcmp(data + end - len, stop->text[i], len) == 0) {
            longest = len;
        }
    }
    return longest;
}

/* Length of the longest end of data[0..n) that is a proper beginning of a stop string. */
static size_t open_tail(const ql_stop *stop, const char *data, size_t n) {
    size_t longest = 0;
    for (int32_t i = 0; i < stop->n; i++) {
        size_t len = stop->len[i] - 1 < n ? stop->len[i] - 1 : n;
        while (len > longest && memcmp(data + n - len, stop->text[i], len) != 0) {
            len--;
        }
        longest = len > longest ? len : longest;
    }
    return longest;
}

ql_status ql_stop_push(ql_stop *stop, const char *text, size_t n, ql_buf *out, ql_error *err) {
    if (stop->hit || n == 0) {
        return QL_OK;
    }
    size_t seen = stop->held.len;
    QL_TRY(ql_buf_reserve(out, seen + n, err));
    QL_TRY(ql_buf_add(&stop->held, text, n, err));
    const char *data = stop->held.data;
    size_t ready = stop->held.len;
    for (size_t end = seen + 1; end <= stop->held.len && !stop->hit; end++) {
        size_t len = ends_at(stop, data, end);
        if (len) {
            stop->hit = true;
            ready = end - len;
        }
    }
    if (!stop->hit) {
        ready -= open_tail(stop, data, ready);
    }
    QL_TRY(ql_buf_add(out, data, ready, err));
    ql_buf_drop(&stop->held, stop->hit ? stop->held.len : ready);
    return QL_OK;
}

ql_status ql_stop_flush(ql_stop *stop, ql_buf *out, ql_error *err) {
    QL_TRY(ql_buf_add(out, stop->held.data, stop->held.len, err));
    ql_buf_drop(&stop->held, stop->held.len);
    return QL_OK;
}
