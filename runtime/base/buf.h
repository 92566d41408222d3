/* A growing byte buffer with a hard maximum. The bytes are always followed by a NUL that `len` does not count. */
#ifndef QL_RUNTIME_BASE_BUF_H
#define QL_RUNTIME_BASE_BUF_H

#include "runtime/base/mem.h"

typedef struct ql_buf {
    char *data; /* NULL until something was added */
    size_t len, cap, max;
    const ql_allocator *mem;
} ql_buf;

void ql_buf_init(ql_buf *buf, const ql_allocator *mem, size_t max);
void ql_buf_deinit(ql_buf *buf);

/* All return QL_ERR_MEMORY past `max` or when memory ends, leaving the content as it was. */
ql_status ql_buf_add(ql_buf *buf, const void *bytes, size_t n, ql_error *err);
ql_status ql_buf_adds(ql_buf *buf, const char *text, ql_error *err);
ql_status ql_buf_printf(ql_buf *buf, ql_error *err, const char *fmt, ...) QL_PRINTF(3, 4);

/* Room for n more bytes, so that adding them cannot fail. */
ql_status ql_buf_reserve(ql_buf *buf, size_t n, ql_error *err);

/* Empties the buffer, keeping its memory. */
void ql_buf_clear(ql_buf *buf);

/* Removes the first n bytes. */
void ql_buf_drop(ql_buf *buf, size_t n);

/* The bytes, malloc'ed through buf->mem, now the caller's; the buffer is empty afterwards. NULL when memory ends. */
char *ql_buf_take(ql_buf *buf, size_t *len);

#endif
