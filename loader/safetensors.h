/* One safetensors file: header parsed and checked, bytes mapped read-only.
 *
 * Every rule of the format is enforced before any tensor is handed out: header length, UTF-8, a JSON object without
 * duplicate names, known dtypes, shapes whose checked product gives exactly the tensor's bytes, data that the tensors
 * cover from first to last byte without hole or overlap. Tensor data is never read here.
 */
#ifndef QL_LOADER_SAFETENSORS_H
#define QL_LOADER_SAFETENSORS_H

#include "runtime/base/mem.h"
#include "runtime/base/qformat.h"

enum { QL_MAX_RANK = 8 };

typedef struct ql_tensor {
    const char *name; /* owned by its file object */
    ql_dtype dtype;
    int32_t rank; /* 0: a scalar */
    int64_t shape[QL_MAX_RANK];
    int64_t n_elem;
    const uint8_t *data;    /* in the mapping; any alignment; NULL when only a header was parsed */
    uint64_t offset, bytes; /* place in the file */
    int32_t file;           /* index of the file within its checkpoint */
} ql_tensor;

typedef struct ql_safetensors {
    char *path;
    const char *base; /* base name, inside path */
    uint8_t *map;     /* the whole file; NULL when only a header was parsed */
    uint64_t map_bytes;
    int32_t fd;        /* the same file, above 0; 0 when only a header was parsed */
    ql_tensor *tensor; /* in name order */
    int32_t n_tensor;
    char *names; /* storage behind tensor[].name */
} ql_safetensors;

/* Maps `path` read-only. `file` is stored in each tensor. */
ql_status ql_safetensors_open(ql_safetensors *st, const char *path, int32_t file, ql_error *err);

/* Parses a header alone: `head` is the first `head_bytes` bytes of a file of `file_bytes` bytes and must hold the whole
 * header. This is what open calls after mapping, and what the fuzzer drives. */
ql_status ql_safetensors_parse(ql_safetensors *st, const char *what, const uint8_t *head, uint64_t head_bytes,
                               uint64_t file_bytes, int32_t file, ql_error *err);

/* Accepts a zeroed or failed object. */
void ql_safetensors_close(ql_safetensors *st);

/* The tensor called so, or NULL. */
const ql_tensor *ql_safetensors_find(const ql_safetensors *st, const char *name);

/* "[5120, 17408]", for messages; `out` holds at least 192 bytes. Returns out. */
const char *ql_tensor_shape_text(const ql_tensor *t, char *out);

#endif
