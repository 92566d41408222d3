#include "runtime/base/buf.h"

#include <stdio.h>
#include <string.h>

void ql_buf_init(ql_buf *buf, const ql_allocator *mem, size_t max) {
    memset(buf, 0, sizeof *buf);
    buf->mem = mem;
    buf->max = max;
}

void ql_buf_deinit(ql_buf *buf) {
    ql_free(buf->mem, buf->data);
    ql_buf_init(buf, buf->mem, buf->max);
}

ql_status ql_buf_reserve(ql_buf *buf, size_t n, ql_error *err) {
    size_t need;
    if (!ql_add_size(buf->len, n, &need) || need > buf->max) {
        return ql_fail(err, QL_ERR_MEMORY, "buffer would pass its limit of %zu bytes", buf->max);
    }
    if (buf->data && need < buf->cap) {
        return QL_OK;
    }
    size_t cap = buf->cap ? buf->cap : 64;
    while (cap <= need) {
        cap *= 2;
    }
    char *data = ql_realloc(buf->mem, buf->data, cap);
    if (!data) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot allocate %zu bytes of host memory for a buffer", cap);
    }
    data[buf->len] = 0;
    buf->data = data;
    buf->cap = cap;
    return QL_OK;
}

ql_status ql_buf_add(ql_buf *buf, const void *bytes, size_t n, ql_error *err) {
    QL_TRY(ql_buf_reserve(buf, n, err));
    if (n) {
        memcpy(buf->data + buf->len, bytes, n);
    }
    buf->len += n;
    buf->data[buf->len] = 0;
    return QL_OK;
}

ql_status ql_buf_adds(ql_buf *buf, const char *text, ql_error *err) { return ql_buf_add(buf, text, strlen(text), err); }

ql_status ql_buf_printf(ql_buf *buf, ql_error *err, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    QL_TRY(ql_buf_reserve(buf, (size_t)n, err));
    va_start(ap, fmt);
    vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    buf->len += (size_t)n;
    return QL_OK;
}

void ql_buf_clear(ql_buf *buf) {
    buf->len = 0;
    if (buf->data) {
        buf->data[0] = 0;
    }
}

void ql_buf_drop(ql_buf *buf, size_t n) {
    if (n) {
        memmove(buf->data, buf->data + n, buf->len - n + 1);
        buf->len -= n;
    }
}

char *ql_buf_take(ql_buf *buf, size_t *len) {
    if (ql_buf_reserve(buf, 0, NULL) != QL_OK) {
        return NULL;
    }
    char *data = buf->data;
    *len = buf->len;
    ql_buf_init(buf, buf->mem, buf->max);
    return data;
}
