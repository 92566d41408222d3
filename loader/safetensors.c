/* Parses in three passes over jansson's object: each entry alone, then the layout of all of them sorted by offset, then
 * the table in name order. A file that is shorter than its header says is called truncated before anything else about
 * its layout, because that is what an interrupted download looks like. */
#include "loader/safetensors.h"

#include "runtime/base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PREFIX = 8, MAX_HEADER = 100000000, MAX_NAME = 512 };

/* ---- one entry ------------------------------------------------------------------------------------------------ */

/* A dimension or offset: a JSON integer without sign, fraction or exponent. */
static ql_status natural(const json_t *v, const char *what, const char *name, const char *field, uint64_t *out,
                         ql_error *err) {
    if (!json_is_integer(v)) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL,
                       "%s: tensor \"%s\": %s holds %s; accepted are whole numbers without fraction or exponent", what,
                       name, field, ql_json_text(v, text));
    }
    if (json_integer_value(v) < 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": %s holds %lld; negative numbers are not accepted", what,
                       name, field, (long long)json_integer_value(v));
    }
    *out = (uint64_t)json_integer_value(v);
    return QL_OK;
}

static ql_status parse_shape(ql_tensor *t, const json_t *shape, const char *what, ql_error *err) {
    if (!json_is_array(shape)) {
        char text[QL_JSON_TEXT];
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": shape must be an array, not %s", what, t->name,
                       ql_json_text(shape, text));
    }
    size_t rank = json_array_size(shape);
    if (rank > QL_MAX_RANK) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\" has rank %zu; at most %d is accepted", what, t->name, rank,
                       QL_MAX_RANK);
    }
    t->rank = (int32_t)rank;
    /* A zero anywhere makes the tensor empty, however large the rest. */
    bool empty = false;
    for (size_t i = 0; i < rank; i++) {
        uint64_t dim;
        QL_TRY(natural(json_array_get(shape, i), what, t->name, "shape", &dim, err));
        t->shape[i] = (int64_t)dim;
        empty = empty || dim == 0;
    }
    t->n_elem = empty ? 0 : 1;
    for (size_t i = 0; i < rank && !empty; i++) {
        if (__builtin_mul_overflow(t->n_elem, t->shape[i], &t->n_elem)) {
            char text[192];
            return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": the number of elements of shape %s overflows", what,
                           t->name, ql_tensor_shape_text(t, text));
        }
    }
    return QL_OK;
}

/* "BOOL, U8, ..." */
static const char *dtype_names(char *out, size_t cap) {
    size_t len = 0;
    for (int i = 0; i < QL_DTYPE_COUNT && len < cap; i++) {
        len += (size_t)snprintf(out + len, cap - len, "%s%s", i ? ", " : "", ql_dtype_name((ql_dtype)i));
    }
    return out;
}

static ql_status parse_tensor(ql_tensor *t, const json_t *entry, const char *what, ql_error *err) {
    if (!json_is_object(entry)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": its entry must be an object", what, t->name);
    }
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)entry, key, v) {
        if (strcmp(key, "dtype") != 0 && strcmp(key, "shape") != 0 && strcmp(key, "data_offsets") != 0) {
            return ql_fail(err, QL_ERR_MODEL,
                           "%s: tensor \"%s\": unknown field \"%.64s\"; accepted are dtype, shape and data_offsets",
                           what, t->name, key);
        }
    }

    const json_t *dtype = json_object_get(entry, "dtype");
    char value[QL_JSON_TEXT];
    if (!json_is_string(dtype)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": dtype must be a string, not %s", what, t->name,
                       ql_json_text(dtype, value));
    }
    t->dtype = ql_dtype_of_name(json_string_value(dtype), json_string_length(dtype));
    if (t->dtype == QL_DTYPE_COUNT) {
        char names[256];
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\" has the unknown dtype %s; accepted are %s", what, t->name,
                       ql_json_text(dtype, value), dtype_names(names, sizeof names));
    }
    QL_TRY(parse_shape(t, json_object_get(entry, "shape"), what, err));

    const json_t *offsets = json_object_get(entry, "data_offsets");
    if (!json_is_array(offsets) || json_array_size(offsets) != 2) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": data_offsets must be an array of two numbers, not %s",
                       what, t->name, ql_json_text(offsets, value));
    }
    uint64_t begin, end;
    QL_TRY(natural(json_array_get(offsets, 0), what, t->name, "data_offsets", &begin, err));
    QL_TRY(natural(json_array_get(offsets, 1), what, t->name, "data_offsets", &end, err));
    if (end < begin) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": data_offsets [%llu, %llu] end before they begin", what,
                       t->name, (unsigned long long)begin, (unsigned long long)end);
    }

    char text[192];
    uint64_t bits;
    if (!ql_mul_u64((uint64_t)t->n_elem, (uint64_t)ql_dtype_bits(t->dtype), &bits)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": the size of %s %s overflows", what, t->name,
                       ql_dtype_name(t->dtype), ql_tensor_shape_text(t, text));
    }
    if (bits % 8 != 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%s\": %s %s is not a whole number of bytes", what, t->name,
                       ql_dtype_name(t->dtype), ql_tensor_shape_text(t, text));
    }
    if (bits / 8 != end - begin) {
        return ql_fail(err, QL_ERR_MODEL,
                       "%s: tensor \"%s\": %s %s needs %llu bytes, but data_offsets [%llu, %llu] give %llu", what,
                       t->name, ql_dtype_name(t->dtype), ql_tensor_shape_text(t, text), (unsigned long long)(bits / 8),
                       (unsigned long long)begin, (unsigned long long)end, (unsigned long long)(end - begin));
    }
    t->offset = begin; /* relative to the data section until the layout is known to fit */
    t->bytes = end - begin;
    return QL_OK;
}

static ql_status check_metadata(const json_t *meta, const char *what, ql_error *err) {
    if (!json_is_object(meta)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: __metadata__ must be an object of strings", what);
    }
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)meta, key, v) {
        if (!json_is_string(v)) {
            return ql_fail(err, QL_ERR_MODEL, "%s: __metadata__ must be an object of strings; \"%.64s\" is not one",
                           what, key);
        }
    }
    return QL_OK;
}

/* ---- layout of all entries ------------------------------------------------------------------------------------ */

static int by_offset(const void *a, const void *b) {
    const ql_tensor *x = a, *y = b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    /* Empty tensors come before what begins where they lie. */
    return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1) : strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const ql_tensor *)a)->name, ((const ql_tensor *)b)->name);
}

/* Needs the tensors in offset order. `data` bytes follow the header. */
static ql_status check_layout(const ql_tensor *tensor, int32_t n, const char *what, uint64_t data, ql_error *err) {
    uint64_t last = 0;
    for (int32_t i = 0; i < n; i++) {
        uint64_t end = tensor[i].offset + tensor[i].bytes; /* was read as an int64, so it does not wrap */
        last = end > last ? end : last;
    }
    if (last > data) {
        return ql_fail(err, QL_ERR_MODEL,
                       "%s is truncated or incomplete: its tensors need %llu bytes of data, the file has %llu", what,
                       (unsigned long long)last, (unsigned long long)data);
    }
    uint64_t at = 0;
    for (int32_t i = 0; i < n; i++) {
        const ql_tensor *t = &tensor[i];
        if (t->offset < at) {
            return ql_fail(err, QL_ERR_MODEL, "%s: tensors \"%s\" and \"%s\" overlap at data offset %llu", what,
                           tensor[i - 1].name, t->name, (unsigned long long)t->offset);
        }
        if (t->offset > at) {
            return ql_fail(err, QL_ERR_MODEL, "%s: a hole of %llu bytes before tensor \"%s\" belongs to no tensor",
                           what, (unsigned long long)(t->offset - at), t->name);
        }
        at += t->bytes;
    }
    if (at != data) {
        return ql_fail(err, QL_ERR_MODEL, "%s: %llu bytes after the last tensor belong to no tensor", what,
                       (unsigned long long)(data - at));
    }
    return QL_OK;
}

/* ---- header --------------------------------------------------------------------------------------------------- */

/* Of a header that failed because some number passes int64, the entry it belongs to. */
static ql_status fail_huge_number(const char *text, size_t len, const char *what, ql_error *err) {
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, NULL);
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry) {
        static const char *const fields[] = {"shape", "data_offsets"};
        for (int f = 0; f < 2; f++) {
            const json_t *list = json_object_get(entry, fields[f]);
            for (size_t i = 0; i < json_array_size(list); i++) {
                double v = json_number_value(json_array_get(list, i));
                if (v >= 0x1p63 || v < -0x1p63) {
                    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
                    ql_fail(err, QL_ERR_MODEL, "%s: tensor \"%.512s\" (%.64s): %s holds %.0f, which no file can reach",
                            what, name, dtype ? dtype : "no dtype", fields[f], v);
                }
            }
        }
    }
    json_decref(root);
    return ql_fail(err, QL_ERR_MODEL, "%s: the header holds a number that is out of range", what);
}

static ql_status load_header(const char *text, size_t len, const char *what, json_t **root, ql_error *err) {
    json_error_t je;
    *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &je);
    if (*root) {
        return QL_OK; /* it begins with '{', so it is an object */
    }
    switch (json_error_code(&je)) {
    case json_error_numeric_overflow: return fail_huge_number(text, len, what, err);
    case json_error_duplicate_key:
        return ql_fail(err, QL_ERR_MODEL, "%s: the header holds a name twice: %s", what, je.text);
    case json_error_null_character:
    case json_error_null_byte_in_key:
        return ql_fail(err, QL_ERR_MODEL, "%s: the header holds a name with a NUL character", what);
    case json_error_invalid_utf8:
        return ql_fail(err, QL_ERR_MODEL, "%s: the header is not valid UTF-8: %s", what, je.text);
    case json_error_out_of_memory:
        return ql_fail(err, QL_ERR_MEMORY, "%s: no host memory for a header of %zu bytes", what, len);
    default:
        return ql_fail(err, QL_ERR_MODEL, "%s: the header is not valid JSON at byte %d: %s", what, je.position + PREFIX,
                       je.text);
    }
}

static ql_status parse_entries(ql_safetensors *st, const json_t *root, const char *what, int32_t file, ql_error *err) {
    size_t n = 0, name_bytes = 0;
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)root, key, v) {
        size_t len = strlen(key);
        if (len == 0 || len > MAX_NAME) {
            return ql_fail(err, QL_ERR_MODEL, "%s: a tensor name of %zu bytes (\"%.40s...\"); accepted are 1 to %d",
                           what, len, key, MAX_NAME);
        }
        name_bytes += len + 1;
        n++;
    }
    QL_TRY(ql_alloc(NULL, n, sizeof *st->tensor, "a tensor table", (void **)&st->tensor, err));
    QL_TRY(ql_alloc(NULL, name_bytes, 1, "tensor names", (void **)&st->names, err));
    char *name = st->names;
    json_object_foreach((json_t *)root, key, v) {
        if (strcmp(key, "__metadata__") == 0) {
            QL_TRY(check_metadata(v, what, err));
            continue;
        }
        ql_tensor *t = &st->tensor[st->n_tensor];
        size_t len = strlen(key) + 1;
        t->name = memcpy(name, key, len);
        t->file = file;
        QL_TRY(parse_tensor(t, v, what, err));
        name += len;
        st->n_tensor++;
    }
    return QL_OK;
}

ql_status ql_safetensors_parse(ql_safetensors *st, const char *what, const uint8_t *head, uint64_t head_bytes,
                               uint64_t file_bytes, int32_t file, ql_error *err) {
    memset(st, 0, sizeof *st);
    if (file_bytes < PREFIX || head_bytes < PREFIX) {
        return ql_fail(err, QL_ERR_MODEL, "%s is truncated or incomplete: %llu bytes do not hold a header length", what,
                       (unsigned long long)file_bytes);
    }
    static const char pointer[] = "version https://git-lfs";
    if (head_bytes >= sizeof pointer - 1 && memcmp(head, pointer, sizeof pointer - 1) == 0) {
        return ql_fail(err, QL_ERR_MODEL, "%s is a git-lfs pointer, not the file itself; fetch it with git lfs pull",
                       what);
    }
    uint64_t len = 0;
    for (int i = 0; i < PREFIX; i++) {
        len |= (uint64_t)head[i] << (8 * i);
    }
    if (len > MAX_HEADER) {
        return ql_fail(err, QL_ERR_MODEL, "%s: a header length of %llu bytes; at most %d are accepted", what,
                       (unsigned long long)len, MAX_HEADER);
    }
    if (len > file_bytes - PREFIX || len > head_bytes - PREFIX) {
        return ql_fail(err, QL_ERR_MODEL,
                       "%s is truncated or incomplete: a header of %llu bytes does not fit into a file of %llu", what,
                       (unsigned long long)len, (unsigned long long)file_bytes);
    }
    const char *text = (const char *)head + PREFIX;
    if (len == 0 || text[0] != '{') {
        return ql_fail(err, QL_ERR_MODEL, "%s: the header must be a JSON object that starts with '{'", what);
    }

    json_t *root = NULL;
    ql_status status;
    QL_TRY_GOTO(load_header(text, (size_t)len, what, &root, err), done);
    QL_TRY_GOTO(parse_entries(st, root, what, file, err), done);
    qsort(st->tensor, (size_t)st->n_tensor, sizeof *st->tensor, by_offset);
    const uint64_t data = PREFIX + len;
    QL_TRY_GOTO(check_layout(st->tensor, st->n_tensor, what, file_bytes - data, err), done);
    for (int32_t i = 0; i < st->n_tensor; i++) {
        st->tensor[i].offset += data;
    }
    qsort(st->tensor, (size_t)st->n_tensor, sizeof *st->tensor, by_name);
done:
    json_decref(root);
    if (status != QL_OK) {
        ql_safetensors_close(st);
    }
    return status;
}

/* ---- file ----------------------------------------------------------------------------------------------------- */

ql_status ql_safetensors_open(ql_safetensors *st, const char *path, int32_t file, ql_error *err) {
    memset(st, 0, sizeof *st);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == 0) { /* standard input is closed; 0 means no file here */
        fd = fcntl(0, F_DUPFD_CLOEXEC, 1);
        close(0);
    }
    if (fd < 0) {
        return ql_fail(err, QL_ERR_MODEL, "cannot open %s: %s", path, strerror(errno));
    }
    ql_status status = QL_OK;
    struct stat info;
    void *map = NULL;
    size_t bytes = 0;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        status = ql_fail(err, QL_ERR_MODEL, "%s is not a regular file", path);
    } else if (info.st_size > 0) {
        bytes = (size_t)info.st_size;
        map = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            status = ql_fail(err, QL_ERR_MEMORY, "cannot map %zu bytes of %s: %s", bytes, path, strerror(errno));
            map = NULL;
        }
    }
    if (status == QL_OK) {
        status = ql_safetensors_parse(st, path, map, bytes, bytes, file, err);
    }
    if (status == QL_OK) {
        st->path = ql_strdup(NULL, path);
        if (!st->path) {
            status = ql_fail(err, QL_ERR_MEMORY, "no host memory for the name of %s", path);
        }
    }
    if (status != QL_OK) {
        ql_safetensors_close(st);
        if (map) {
            munmap(map, bytes);
        }
        close(fd);
        return status;
    }
    const char *slash = strrchr(st->path, '/');
    st->base = slash ? slash + 1 : st->path;
    st->map = map;
    st->map_bytes = bytes;
    st->fd = fd;
    for (int32_t i = 0; i < st->n_tensor; i++) {
        st->tensor[i].data = st->map + st->tensor[i].offset;
    }
    return QL_OK;
}

void ql_safetensors_close(ql_safetensors *st) {
    ql_free(NULL, st->tensor);
    ql_free(NULL, st->names);
    ql_free(NULL, st->path);
    if (st->map) {
        munmap(st->map, st->map_bytes);
    }
    if (st->fd) {
        close(st->fd);
    }
    memset(st, 0, sizeof *st);
}

static int find_name(const void *name, const void *tensor) { return strcmp(name, ((const ql_tensor *)tensor)->name); }

const ql_tensor *ql_safetensors_find(const ql_safetensors *st, const char *name) {
    return st->n_tensor ? bsearch(name, st->tensor, (size_t)st->n_tensor, sizeof *st->tensor, find_name) : NULL;
}

const char *ql_tensor_shape_text(const ql_tensor *t, char *out) {
    size_t len = 0;
    len += (size_t)snprintf(out, 192, "[");
    for (int32_t i = 0; i < t->rank; i++) { /* 8 numbers of at most 20 characters */
        len += (size_t)snprintf(out + len, 192 - len, i ? ", %lld" : "%lld", (long long)t->shape[i]);
    }
    snprintf(out + len, 192 - len, "]");
    return out;
}
