#include "tests/npz.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { END_BYTES = 22, CENTRAL_BYTES = 46, LOCAL_BYTES = 30, MAX_BYTES = 1 << 30 };

static uint64_t le(const unsigned char *p, int n) {
    uint64_t v = 0;
    for (int i = n; i-- > 0;) {
        v = v << 8 | p[i];
    }
    return v;
}

static bool fail(ql_npz *npz, const char *text, const char *name) {
    snprintf(npz->error, sizeof npz->error, "%s%s%.80s", text, *name ? ": " : "", name);
    return false;
}

static unsigned char *read_file(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        return NULL;
    }
    unsigned char *bytes = NULL;
    long size = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    if (size > 0 && size <= MAX_BYTES && fseek(f, 0, SEEK_SET) == 0 && (bytes = malloc((size_t)size)) != NULL &&
        fread(bytes, 1, (size_t)size, f) != (size_t)size) {
        free(bytes);
        bytes = NULL;
    }
    fclose(f);
    *n = bytes ? (size_t)size : 0;
    return bytes;
}

/* The text after `key` in the header's Python dictionary. */
static const char *value_of(const char *header, const char *key) {
    const char *p = strstr(header, key);
    return p ? p + strlen(key) : NULL;
}

bool ql_npy_parse(ql_npy *out, const unsigned char *bytes, size_t n) {
    if (n < 12 || memcmp(bytes, "\x93NUMPY", 6) != 0 || (bytes[6] != 1 && bytes[6] != 2)) {
        return false;
    }
    size_t at = bytes[6] == 1 ? 10 : 12, len = (size_t)le(bytes + 8, bytes[6] == 1 ? 2 : 4);
    char header[1024];
    if (len >= sizeof header || len > n - at) {
        return false;
    }
    memcpy(header, bytes + at, len);
    header[len] = 0;
    const char *descr = value_of(header, "'descr': '<"), *order = value_of(header, "'fortran_order': ");
    const char *shape = value_of(header, "'shape': (");
    if (!descr || !order || !shape || strncmp(order, "False", 5) != 0) {
        return false;
    }
    static const char *const dtypes[] = {"f4", "f8", "i4", "i8"};
    out->dtype[0] = 0;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strncmp(descr, dtypes[i], 2) == 0 && descr[2] == '\'') {
            memcpy(out->dtype, dtypes[i], 3);
        }
    }
    if (!out->dtype[0]) {
        return false;
    }
    out->rank = 0;
    out->n = 1;
    while (*shape != ')') {
        char *end;
        long long d = strtoll(shape, &end, 10);
        if (end == shape || d < 0 || d > MAX_BYTES || out->rank == 8 || __builtin_mul_overflow(out->n, d, &out->n)) {
            return false;
        }
        out->shape[out->rank++] = d;
        shape = end + strspn(end, ", ");
    }
    size_t data = at + len;
    int64_t want;
    if (__builtin_mul_overflow(out->n, out->dtype[1] - '0', &want) || want != (int64_t)(n - data)) {
        return false;
    }
    out->data = malloc(want ? (size_t)want : 1);
    if (!out->data) {
        return false;
    }
    memcpy(out->data, bytes + data, (size_t)want);
    return true;
}

bool ql_npy_open(ql_npy *out, const char *path) {
    size_t n;
    unsigned char *bytes = read_file(path, &n);
    bool ok = bytes && ql_npy_parse(out, bytes, n);
    free(bytes);
    return ok;
}

/* Raw deflate of exactly `size` bytes. */
static bool inflate_entry(const unsigned char *src, size_t n, unsigned char *dst, size_t size) {
    z_stream z = {
        .next_in = (unsigned char *)(uintptr_t)src, .avail_in = (uInt)n, .next_out = dst, .avail_out = (uInt)size};
    if (inflateInit2(&z, -MAX_WBITS) != Z_OK) {
        return false;
    }
    bool ok = inflate(&z, Z_FINISH) == Z_STREAM_END && z.total_out == size;
    inflateEnd(&z);
    return ok;
}

static bool read_entry(ql_npz *npz, const unsigned char *bytes, size_t n, const unsigned char *central) {
    unsigned method = (unsigned)le(central + 10, 2);
    uint64_t packed = le(central + 20, 4), size = le(central + 24, 4), local = le(central + 42, 4);
    size_t name_len = (size_t)le(central + 28, 2), extra_len = (size_t)le(central + 30, 2);
    char name[68] = "";
    if (name_len < 5 || name_len >= sizeof name) {
        return fail(npz, "entry name of unexpected length", "");
    }
    memcpy(name, central + CENTRAL_BYTES, name_len);
    /* zip64: 8-byte values, in this order, only for the fields that hold all ones */
    const unsigned char *extra = central + CENTRAL_BYTES + name_len, *extra_end = extra + extra_len;
    while (extra_end - extra >= 4) {
        size_t len = (size_t)le(extra + 2, 2);
        const unsigned char *p = extra + 4;
        if (len > (size_t)(extra_end - p)) {
            return fail(npz, "damaged extra field", name);
        }
        const unsigned char *end = p + len;
        if (le(extra, 2) == 1) {
            uint64_t *field[] = {&size, &packed, &local};
            for (int i = 0; i < 3; i++) {
                if (*field[i] == 0xffffffffu && end - p >= 8) {
                    *field[i] = le(p, 8);
                    p += 8;
                }
            }
        }
        extra = end;
    }
    if (strcmp(name + name_len - 4, ".npy") != 0) {
        return fail(npz, "entry is no .npy", name);
    }
    if (size > MAX_BYTES || packed > n || local > n - LOCAL_BYTES || le(bytes + local, 4) != 0x04034b50u) {
        return fail(npz, "entry outside the file", name);
    }
    uint64_t at = local + LOCAL_BYTES + le(bytes + local + 26, 2) + le(bytes + local + 28, 2);
    if (at > n || packed > n - at || (method == 0 && packed != size) || (method != 0 && method != 8)) {
        return fail(npz, "entry outside the file, or packed in an unknown way", name);
    }
    unsigned char *raw = malloc((size_t)size + 1);
    bool ok = raw != NULL;
    if (ok && method == 8) {
        ok = inflate_entry(bytes + at, (size_t)packed, raw, (size_t)size);
    } else if (ok) {
        memcpy(raw, bytes + at, (size_t)size);
    }
    ok = ok && crc32(0, raw, (uInt)size) == le(central + 16, 4);
    ql_npy *a = &npz->array[npz->n_array];
    ok = ok && ql_npy_parse(a, raw, (size_t)size);
    free(raw);
    if (!ok) {
        return fail(npz, "damaged entry, or an array of an unsupported kind", name);
    }
    memcpy(a->name, name, name_len - 4);
    a->name[name_len - 4] = 0;
    npz->n_array++;
    return true;
}

bool ql_npz_parse(ql_npz *npz, const unsigned char *bytes, size_t n) {
    memset(npz, 0, sizeof *npz);
    if (n < END_BYTES) {
        return fail(npz, "too short for a zip file", "");
    }
    size_t end = n - END_BYTES; /* NumPy writes no archive comment, so the record ends the file */
    if (le(bytes + end, 4) != 0x06054b50u) {
        return fail(npz, "no zip directory at the end", "");
    }
    int32_t n_entry = (int32_t)le(bytes + end + 10, 2);
    uint64_t at = le(bytes + end + 16, 4);
    npz->array = calloc((size_t)n_entry + 1, sizeof *npz->array);
    bool ok = npz->array != NULL;
    for (int32_t i = 0; ok && i < n_entry; i++) {
        uint64_t len = 0;
        ok = at <= end && end - at >= CENTRAL_BYTES && le(bytes + at, 4) == 0x02014b50u;
        if (ok) {
            len = CENTRAL_BYTES + le(bytes + at + 28, 2) + le(bytes + at + 30, 2) + le(bytes + at + 32, 2);
            ok = len <= end - at;
        }
        if (!ok) {
            fail(npz, "damaged zip directory", "");
            break;
        }
        ok = read_entry(npz, bytes, n, bytes + at);
        at += len;
    }
    if (!ok) {
        char why[sizeof npz->error];
        memcpy(why, npz->error, sizeof why);
        ql_npz_close(npz);
        memcpy(npz->error, why, sizeof why);
    }
    return ok;
}

bool ql_npz_open(ql_npz *npz, const char *path) {
    size_t n;
    unsigned char *bytes = read_file(path, &n);
    if (!bytes) {
        memset(npz, 0, sizeof *npz);
        return fail(npz, "cannot read", path);
    }
    bool ok = ql_npz_parse(npz, bytes, n);
    free(bytes);
    return ok;
}

void ql_npz_close(ql_npz *npz) {
    for (int32_t i = 0; i < npz->n_array; i++) {
        free(npz->array[i].data);
    }
    free(npz->array);
    memset(npz, 0, sizeof *npz);
}

const ql_npy *ql_npz_get(const ql_npz *npz, const char *name) {
    for (int32_t i = 0; i < npz->n_array; i++) {
        if (strcmp(npz->array[i].name, name) == 0) {
            return &npz->array[i];
        }
    }
    return NULL;
}
