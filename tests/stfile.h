/* Writes safetensors files: a list of tensors becomes a header, data is laid out in list order.
 *
 * For tools and tests. Nothing is checked beyond memory: tests write broken files with it on purpose.
 */
#ifndef QL_TESTS_STFILE_H
#define QL_TESTS_STFILE_H

#include "loader/safetensors.h"
#include "runtime/base/buf.h"

typedef struct ql_stentry {
    char name[320];
    ql_dtype dtype;
    int32_t rank;
    int64_t shape[QL_MAX_RANK];
    uint64_t begin, end; /* within the data section */
} ql_stentry;

typedef struct ql_stfile {
    ql_stentry *entry;
    int32_t n, cap;
    uint64_t data_bytes;
} ql_stfile;

/* Appends a tensor after the last one. */
ql_status ql_stfile_add(ql_stfile *file, const char *name, ql_dtype dtype, int32_t rank, const int64_t *shape,
                        ql_error *err);

/* Length prefix and JSON header, padded so that the data begins at a multiple of 8. */
ql_status ql_stfile_header(const ql_stfile *file, ql_buf *out, ql_error *err);

/* Creates `path` with the header and a data section that is a hole in the file. *data_offset is where it begins. */
ql_status ql_stfile_create(const ql_stfile *file, const char *path, uint64_t *data_offset, ql_error *err);

void ql_stfile_deinit(ql_stfile *file);

/* Writes a whole file. */
ql_status ql_write_file(const char *path, const void *bytes, size_t n, ql_error *err);

#endif
