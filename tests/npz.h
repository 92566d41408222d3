/* Reads .npz archives (zip of .npy) and .npy files, for comparing with arrays that other programs wrote.
 *
 * What NumPy writes and no more: stored or deflated entries, zip64 sizes, npy 1.0 and 2.0, little-endian f32, f64, i32,
 * i64, C order. Sizes come from the central directory, since savez leaves them out of the local headers. Each entry's
 * CRC-32 is checked.
 */
#ifndef QL_TESTS_NPZ_H
#define QL_TESTS_NPZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ql_npy {
    char name[64]; /* without ".npy" */
    char dtype[8]; /* "f4", "f8", "i4", "i8" */
    int32_t rank;
    int64_t shape[8];
    int64_t n;  /* elements */
    void *data; /* owned by the archive */
} ql_npy;

typedef struct ql_npz {
    ql_npy *array;
    int32_t n_array;
    char error[160]; /* why open failed */
} ql_npz;

/* Returns false with `error` set when the file is missing or not as above; nothing to close then. */
bool ql_npz_open(ql_npz *npz, const char *path);
/* The same from memory; the bytes are only read during the call. */
bool ql_npz_parse(ql_npz *npz, const unsigned char *bytes, size_t n);
void ql_npz_close(ql_npz *npz);

/* NULL where there is no such array. */
const ql_npy *ql_npz_get(const ql_npz *npz, const char *name);

/* A lone .npy from memory; free(out->data). Returns false when it is not one. */
bool ql_npy_parse(ql_npy *out, const unsigned char *bytes, size_t n);
/* A lone .npy file. */
bool ql_npy_open(ql_npy *out, const char *path);

#endif
