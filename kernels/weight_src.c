#include "kernels/weight_src.h"

#include "runtime/base/num.h"

#include <math.h>
#include <string.h>

/* Facts that the loader has established; a violation is a mistake of ours. */
static ql_status check_src(const ql_weight_src *src, ql_error *err) {
    int64_t n = 0;
    bool ok = src->n > 0 && src->k > 0 && src->n_range >= 1 && src->n_range <= 3 && src->col0 >= 0 &&
              (int64_t)src->col0 + src->k <= src->full_k && src->data && src->format >= 0 &&
              src->format < QL_FORMAT_COUNT;
    for (int32_t i = 0; ok && i < src->n_range; i++) {
        int32_t a = src->row0[i], b = src->row1[i];
        ok = a >= (i ? src->row1[i - 1] : 0) && b > a && b <= src->full_n;
        if (ok && src->format == QL_FORMAT_FP8_BLOCK && src->n_range > 1) {
            ok = a % QL_FP8_BLOCK == 0 && (b % QL_FP8_BLOCK == 0 || b == src->full_n);
        }
        n += b - a;
    }
    ok = ok && n == src->n;
    if (ok && src->format == QL_FORMAT_NVFP4) {
        ok = src->scale && src->scale_dtype == QL_DTYPE_F8_E4M3 && src->col0 % QL_NVFP4_GROUP == 0 &&
             src->k % QL_NVFP4_GROUP == 0 && src->full_k % QL_NVFP4_GROUP == 0;
    } else if (ok && (src->format == QL_FORMAT_FP8_CHANNEL || src->format == QL_FORMAT_FP8_BLOCK)) {
        ok = src->scale && ql_dtype_is_plain(src->scale_dtype);
    }
    return ok ? QL_OK
              : ql_fail(err, QL_ERR_INTERNAL, "%s: a cut of %d x %d from column %d does not fit a %s matrix of %d x %d",
                        src->module, src->n, src->k, src->col0, ql_qformat_name(src->format), src->full_n, src->full_k);
}

ql_status ql_weight_src_begin(const ql_weight_src *src, ql_weight *w, ql_error *err) {
    QL_TRY(check_src(src, err));
    bool has_factor = src->format == QL_FORMAT_FP8_TENSOR || src->format == QL_FORMAT_NVFP4;
    if (has_factor && !(isfinite(src->factor) && src->factor > 0)) {
        return ql_fail(err, QL_ERR_MODEL, "%s: tensor scale is %g; scales must be finite and above 0", src->module,
                       (double)src->factor);
    }
    *w = (ql_weight){.format = src->format,
                     .n = src->n,
                     .k = src->k,
                     .full_n = src->full_n,
                     .full_k = src->full_k,
                     .factor = has_factor ? src->factor : 1.0f};
    if (src->format == QL_FORMAT_FP8_BLOCK) {
        w->row_off = src->row0[0] % QL_FP8_BLOCK;
        w->col_off = src->col0 % QL_FP8_BLOCK;
    }
    if (src->format == QL_FORMAT_FP8_TENSOR) {
        w->max_abs = 448.0f * w->factor;
    }
    return QL_OK;
}

static ql_status check_scale(const ql_weight_src *src, float v, int64_t row, int64_t col, ql_error *err) {
    if (isfinite(v) && v > 0) {
        return QL_OK;
    }
    return ql_fail(err, QL_ERR_MODEL, "%s: scale at row %lld, column %lld is %g; scales must be finite and above 0",
                   src->module, (long long)row, (long long)col, (double)v);
}

ql_status ql_weight_src_f32_scales(const ql_weight_src *src, ql_weight *w, float *out, ql_error *err) {
    bool blocks = src->format == QL_FORMAT_FP8_BLOCK;
    int64_t size = ql_dtype_bits(src->scale_dtype) / 8, unit = blocks ? QL_FP8_BLOCK : 1;
    int64_t n_col = blocks ? ql_fp8_blocks(w->col_off, w->k) : 1, full = blocks ? ql_fp8_blocks(0, src->full_k) : 1;
    int64_t col = blocks ? src->col0 / QL_FP8_BLOCK : 0;
    float most = 0;
    for (int32_t i = 0; i < src->n_range; i++) {
        int64_t row = src->row0[i] / unit, end = (src->row1[i] + unit - 1) / unit;
        for (; row < end; row++, out += n_col) {
            ql_dtype_to_f32(src->scale_dtype, src->scale + size * (row * full + col), n_col, out);
            for (int64_t j = 0; j < n_col; j++) {
                QL_TRY(check_scale(src, out[j], row, col + j, err));
                most = fmaxf(most, out[j]);
            }
        }
    }
    w->max_abs = 448.0f * most;
    return QL_OK;
}

ql_status ql_weight_src_group_scales(const ql_weight_src *src, ql_weight *w, uint8_t *out, ql_error *err) {
    int64_t n_group = src->k / QL_NVFP4_GROUP, full = src->full_k / QL_NVFP4_GROUP, group0 = src->col0 / QL_NVFP4_GROUP;
    uint8_t most = 0;
    for (int32_t i = 0; i < src->n_range; i++) {
        for (int64_t row = src->row0[i]; row < src->row1[i]; row++) {
            const uint8_t *s = src->scale + row * full + group0;
            if (out) {
                s = memcpy(out, s, (size_t)n_group);
                out += n_group;
            }
            for (int64_t j = 0; j < n_group; j++) {
                if (s[j] > 0x7e) { /* a sign bit or NaN; zero is legal: an all-zero group */
                    return ql_fail(err, QL_ERR_MODEL,
                                   "%s: group scale at row %lld, columns %lld to %lld is %s (0x%02x); it must be an "
                                   "E4M3 number without sign",
                                   src->module, (long long)row, (long long)(16 * (group0 + j)),
                                   (long long)(16 * (group0 + j) + 15), ql_e4m3_is_nan(s[j]) ? "NaN" : "negative",
                                   s[j]);
                }
                most = s[j] > most ? s[j] : most; /* codes without sign rise with their value */
            }
        }
    }
    w->max_abs = 6.0f * ql_f32_of_e4m3(most) * src->factor;
    return QL_OK;
}

ql_status ql_weight_src_group_max(const ql_weight_src *src, ql_weight *w, uint8_t most, ql_error *err) {
    if (most > 0x7e) {
        QL_TRY(ql_weight_src_group_scales(src, w, NULL, err));
        return ql_fail(err, QL_ERR_DEVICE, "%s: a group scale arrived as 0x%02x and is not so in the file", src->module,
                       most);
    }
    w->max_abs = 6.0f * ql_f32_of_e4m3(most) * src->factor;
    return QL_OK;
}

void ql_weight_src_plain_max(ql_weight *w, uint32_t most) {
    ql_dtype dtype = w->format == QL_FORMAT_F32   ? QL_DTYPE_F32
                     : w->format == QL_FORMAT_F16 ? QL_DTYPE_F16
                                                  : QL_DTYPE_BF16;
    ql_dtype_to_f32(dtype, &most, 1, &w->max_abs); /* little endian: two bytes are the lower two */
}

ql_status ql_weight_src_bad_code(const ql_weight_src *src, int64_t row, int64_t col, ql_error *err) {
    bool plain = src->format == QL_FORMAT_F32 || src->format == QL_FORMAT_F16 || src->format == QL_FORMAT_BF16;
    int64_t width = ql_qformat_row_bytes(src->format, 1);
    uint32_t code = 0;
    memcpy(&code, src->data + row * ql_qformat_row_bytes(src->format, src->full_k) + col * width, (size_t)width);
    return ql_fail(err, QL_ERR_MODEL, "%s: weight at row %lld, column %lld is %s (0x%0*x)", src->module, (long long)row,
                   (long long)col, plain ? "not a finite number" : "an E4M3 NaN", (int)(2 * width), code);
}
