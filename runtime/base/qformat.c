#include "runtime/base/qformat.h"

#include "runtime/base/num.h"

static const struct {
    const char *name;
    int32_t bits;
} dtypes[QL_DTYPE_COUNT] = {
    [QL_DTYPE_BOOL] = {"BOOL", 8},
    [QL_DTYPE_U8] = {"U8", 8},
    [QL_DTYPE_I8] = {"I8", 8},
    [QL_DTYPE_I16] = {"I16", 16},
    [QL_DTYPE_U16] = {"U16", 16},
    [QL_DTYPE_I32] = {"I32", 32},
    [QL_DTYPE_U32] = {"U32", 32},
    [QL_DTYPE_I64] = {"I64", 64},
    [QL_DTYPE_U64] = {"U64", 64},
    [QL_DTYPE_F16] = {"F16", 16},
    [QL_DTYPE_BF16] = {"BF16", 16},
    [QL_DTYPE_F32] = {"F32", 32},
    [QL_DTYPE_F64] = {"F64", 64},
    [QL_DTYPE_C64] = {"C64", 64},
    [QL_DTYPE_F4] = {"F4", 4},
    [QL_DTYPE_F6_E2M3] = {"F6_E2M3", 6},
    [QL_DTYPE_F6_E3M2] = {"F6_E3M2", 6},
    [QL_DTYPE_F8_E4M3] = {"F8_E4M3", 8},
    [QL_DTYPE_F8_E5M2] = {"F8_E5M2", 8},
    [QL_DTYPE_F8_E8M0] = {"F8_E8M0", 8},
    [QL_DTYPE_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [QL_DTYPE_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
};

const char *ql_dtype_name(ql_dtype dtype) { return dtypes[dtype].name; }
int32_t ql_dtype_bits(ql_dtype dtype) { return dtypes[dtype].bits; }

ql_dtype ql_dtype_of_name(const char *name, size_t len) {
    for (int i = 0; i < QL_DTYPE_COUNT; i++) {
        if (strlen(dtypes[i].name) == len && memcmp(dtypes[i].name, name, len) == 0) {
            return (ql_dtype)i;
        }
    }
    return QL_DTYPE_COUNT;
}

int ql_dtype_is_plain(ql_dtype dtype) {
    return dtype == QL_DTYPE_F16 || dtype == QL_DTYPE_BF16 || dtype == QL_DTYPE_F32;
}

void ql_dtype_to_f32(ql_dtype dtype, const void *src, int64_t n, float *dst) {
    const unsigned char *p = src;
    if (dtype == QL_DTYPE_F32) {
        memcpy(dst, p, (size_t)n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        dst[i] = dtype == QL_DTYPE_BF16 ? ql_f32_of_bf16(h) : ql_f32_of_f16(h);
    }
}

const char *ql_qformat_name(ql_qformat format) {
    static const char *const names[QL_FORMAT_COUNT] = {
        [QL_FORMAT_F32] = "f32",
        [QL_FORMAT_F16] = "f16",
        [QL_FORMAT_BF16] = "bf16",
        [QL_FORMAT_FP8_CHANNEL] = "fp8-channel",
        [QL_FORMAT_FP8_TENSOR] = "fp8-tensor",
        [QL_FORMAT_FP8_BLOCK] = "fp8-block",
        [QL_FORMAT_NVFP4] = "nvfp4",
    };
    return names[format];
}
