#include "tests/stfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

ql_status ql_stfile_add(ql_stfile *file, const char *name, ql_dtype dtype, int32_t rank, const int64_t *shape,
                        ql_error *err) {
    if (file->n == file->cap) {
        int32_t cap = file->cap ? 2 * file->cap : 256;
        ql_stentry *grown = ql_realloc(NULL, file->entry, (size_t)cap * sizeof *grown);
        if (!grown) {
            return ql_fail(err, QL_ERR_MEMORY, "no host memory for %d tensors", cap);
        }
        file->entry = grown;
        file->cap = cap;
    }
    ql_stentry *e = &file->entry[file->n++];
    *e = (ql_stentry){.dtype = dtype, .rank = rank, .begin = file->data_bytes};
    snprintf(e->name, sizeof e->name, "%s", name);
    uint64_t bits = (uint64_t)ql_dtype_bits(dtype);
    for (int32_t i = 0; i < rank; i++) {
        e->shape[i] = shape[i];
        bits *= (uint64_t)shape[i];
    }
    file->data_bytes += bits / 8;
    e->end = file->data_bytes;
    return QL_OK;
}

ql_status ql_stfile_header(const ql_stfile *file, ql_buf *out, ql_error *err) {
    static const char zeros[8] = {0};
    QL_TRY(ql_buf_add(out, zeros, 8, err));
    QL_TRY(ql_buf_adds(out, "{\"__metadata__\":{\"format\":\"pt\"}", err));
    for (int32_t i = 0; i < file->n; i++) {
        const ql_stentry *e = &file->entry[i];
        QL_TRY(ql_buf_printf(out, err, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", e->name, ql_dtype_name(e->dtype)));
        for (int32_t d = 0; d < e->rank; d++) {
            QL_TRY(ql_buf_printf(out, err, d ? ",%lld" : "%lld", (long long)e->shape[d]));
        }
        QL_TRY(ql_buf_printf(out, err, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)e->begin,
                             (unsigned long long)e->end));
    }
    QL_TRY(ql_buf_adds(out, "}", err));
    while (out->len % 8) {
        QL_TRY(ql_buf_adds(out, " ", err));
    }
    uint64_t len = out->len - 8;
    for (int i = 0; i < 8; i++) {
        out->data[i] = (char)(len >> (8 * i));
    }
    return QL_OK;
}

ql_status ql_write_file(const char *path, const void *bytes, size_t n, ql_error *err) {
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(bytes, 1, n, f) == n;
    ok = f && fclose(f) == 0 && ok;
    return ok ? QL_OK : ql_fail(err, QL_ERR_MODEL, "cannot write %zu bytes to %s: %s", n, path, strerror(errno));
}

ql_status ql_stfile_create(const ql_stfile *file, const char *path, uint64_t *data_offset, ql_error *err) {
    ql_buf head;
    ql_buf_init(&head, NULL, (size_t)1 << 30);
    ql_status status;
    QL_TRY_GOTO(ql_stfile_header(file, &head, err), done);
    QL_TRY_GOTO(ql_write_file(path, head.data, head.len, err), done);
    *data_offset = head.len;
    if (truncate(path, (off_t)(head.len + file->data_bytes)) != 0) {
        status = ql_fail(err, QL_ERR_MODEL, "cannot make %s %llu bytes long: %s", path,
                         (unsigned long long)(head.len + file->data_bytes), strerror(errno));
    }
done:
    ql_buf_deinit(&head);
    return status;
}

void ql_stfile_deinit(ql_stfile *file) {
    ql_free(NULL, file->entry);
    memset(file, 0, sizeof *file);
}
