/* Storage types of checkpoint tensors and storage formats of linear weights, as loader and kernels both see them.
 *
 * A linear weight is W[n][k] (out, in), y = x W^T. Formats (docs/formats.md has the pictures):
 *
 *   F32 F16 BF16   plain
 *   FP8_CHANNEL    E4M3 codes [n][k]; w = code * scale[row]
 *   FP8_TENSOR     E4M3 codes [n][k]; w = code * factor
 *   FP8_BLOCK      E4M3 codes [n][k]; w = code * scale[row/128][col/128], ragged at both ends
 *   NVFP4          E2M1 codes [n][k/2], column 2c in the low nibble of byte c, 2c+1 in the high one; E4M3 group scale
 *                  [n][k/16]; w = code * group scale * factor. k is a multiple of 16.
 *
 * `factor` is a multiplier. compressed-tensors stores its reciprocal (weight_global_scale), ModelOpt the factor itself
 * (weight_scale_2): the loader says which, so that the division happens once, where the scalar is read.
 */
#ifndef QL_RUNTIME_BASE_QFORMAT_H
#define QL_RUNTIME_BASE_QFORMAT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ql_dtype {
    QL_DTYPE_BOOL,
    QL_DTYPE_U8,
    QL_DTYPE_I8,
    QL_DTYPE_I16,
    QL_DTYPE_U16,
    QL_DTYPE_I32,
    QL_DTYPE_U32,
    QL_DTYPE_I64,
    QL_DTYPE_U64,
    QL_DTYPE_F16,
    QL_DTYPE_BF16,
    QL_DTYPE_F32,
    QL_DTYPE_F64,
    QL_DTYPE_C64,
    QL_DTYPE_F4,
    QL_DTYPE_F6_E2M3,
    QL_DTYPE_F6_E3M2,
    QL_DTYPE_F8_E4M3,
    QL_DTYPE_F8_E5M2,
    QL_DTYPE_F8_E8M0,
    QL_DTYPE_F8_E4M3FNUZ,
    QL_DTYPE_F8_E5M2FNUZ,
    QL_DTYPE_COUNT
} ql_dtype;

/* Name as in a safetensors header, such as "BF16". */
const char *ql_dtype_name(ql_dtype dtype);
/* Bits of one element: 4, 6, 8, 16, 32 or 64. */
int32_t ql_dtype_bits(ql_dtype dtype);
/* The dtype called so, or QL_DTYPE_COUNT. */
ql_dtype ql_dtype_of_name(const char *name, size_t len);
/* Whether values can be read as numbers by ql_dtype_to_f32: F16, BF16, F32. */
int ql_dtype_is_plain(ql_dtype dtype);
/* Converts n elements of a plain dtype; src may be unaligned. */
void ql_dtype_to_f32(ql_dtype dtype, const void *src, int64_t n, float *dst);

typedef enum ql_qformat {
    QL_FORMAT_F32,
    QL_FORMAT_F16,
    QL_FORMAT_BF16,
    QL_FORMAT_FP8_CHANNEL,
    QL_FORMAT_FP8_TENSOR,
    QL_FORMAT_FP8_BLOCK,
    QL_FORMAT_NVFP4,
    QL_FORMAT_COUNT
} ql_qformat;

/* "f32", "f16", "bf16", "fp8-channel", "fp8-tensor", "fp8-block", "nvfp4". */
const char *ql_qformat_name(ql_qformat format);

enum { QL_NVFP4_GROUP = 16, QL_FP8_BLOCK = 128 };

/* Bytes of one row of k codes. */
static inline int64_t ql_qformat_row_bytes(ql_qformat format, int64_t k) {
    switch (format) {
    case QL_FORMAT_F32: return 4 * k;
    case QL_FORMAT_F16:
    case QL_FORMAT_BF16: return 2 * k;
    case QL_FORMAT_NVFP4: return k / 2;
    default: return k;
    }
}

#ifdef __cplusplus
}
#endif
#endif
