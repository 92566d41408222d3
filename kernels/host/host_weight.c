/* Weight slices on a CPU lane: rows and columns of the cut copied out of the mapped file, in the file's own order, so
 * that the checksum of what is resident is that of what was read.
 *
 * Every code and scale that is taken is looked at on the way: a NaN or infinity in a weight, or a scale that is not a
 * finite positive number, is a damaged file and is refused with its place.
 */
#include "kernels/host/host_ops.h"

#include "runtime/base/mem.h"
#include "runtime/base/num.h"

#include <string.h>
#include <zlib.h>

static int32_t block_count(int32_t offset, int32_t n) {
    return (int32_t)(((int64_t)offset + n + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK);
}

static bool is_fp8(ql_qformat f) {
    return f == QL_FORMAT_FP8_CHANNEL || f == QL_FORMAT_FP8_TENSOR || f == QL_FORMAT_FP8_BLOCK;
}

void ql_host_weight_bytes(ql_qformat format, int32_t n, int32_t k, int32_t row_off, int32_t col_off,
                          uint64_t *weight_bytes, uint64_t *scale_bytes) {
    *weight_bytes = (uint64_t)n * (uint64_t)ql_qformat_row_bytes(format, k);
    switch (format) {
    case QL_FORMAT_FP8_CHANNEL: *scale_bytes = 4 * (uint64_t)n; break;
    case QL_FORMAT_FP8_BLOCK:
        *scale_bytes = 4 * (uint64_t)block_count(row_off, n) * (uint64_t)block_count(col_off, k);
        break;
    case QL_FORMAT_NVFP4: *scale_bytes = (uint64_t)n * (uint64_t)(k / QL_NVFP4_GROUP); break;
    default: *scale_bytes = 0; break;
    }
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

/* First element of `width` bytes (1, 2, 4) whose bits under `mask` are all ones, or -1. Eight bytes at a time: adding
 * the mask's lowest bit carries into the top bit of the element exactly when all mask bits are set. */
static int64_t find_all_ones(const uint8_t *p, int64_t n, int32_t width, uint32_t mask) {
    uint64_t one = width == 1 ? 0x0101010101010101u : width == 2 ? 0x0001000100010001u : 0x0000000100000001u;
    uint64_t m = one * mask, low = one * (mask & -mask), top = one << (8 * width - 1);
    int64_t bytes = n * width, i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t v;
        memcpy(&v, p + i, 8);
        if (((v & m) + low) & top) {
            break;
        }
    }
    for (i /= width; i < n; i++) {
        uint32_t v = 0;
        memcpy(&v, p + i * width, (size_t)width); /* little endian */
        if ((v & mask) == mask) {
            return i;
        }
    }
    return -1;
}

/* Refuses a number in row `row` of the whole matrix, its columns from col0. */
static ql_status check_codes(ql_dev *dev, const ql_weight_src *src, const uint8_t *p, int32_t row) {
    int64_t at = -1;
    const char *what = "not a finite number";
    switch (src->format) {
    case QL_FORMAT_F32: at = find_all_ones(p, src->k, 4, 0x7f800000u); break;
    case QL_FORMAT_F16: at = find_all_ones(p, src->k, 2, 0x7c00u); break;
    case QL_FORMAT_BF16: at = find_all_ones(p, src->k, 2, 0x7f80u); break;
    case QL_FORMAT_NVFP4: break; /* every code is a number */
    default:
        at = find_all_ones(p, src->k, 1, 0x7fu);
        what = "an E4M3 NaN";
        break;
    }
    if (at < 0) {
        return QL_OK;
    }
    int64_t width = ql_qformat_row_bytes(src->format, 1);
    uint32_t code = 0;
    memcpy(&code, p + at * width, (size_t)width);
    return ql_fail(dev->err, QL_ERR_MODEL, "%s: weight at row %d, column %lld is %s (0x%0*x)", src->module, row,
                   (long long)(src->col0 + at), what, (int)(2 * width), code);
}

static ql_status check_scale(ql_dev *dev, const ql_weight_src *src, float v, int64_t row, int64_t col) {
    if (isfinite(v) && v > 0) {
        return QL_OK;
    }
    return ql_fail(dev->err, QL_ERR_MODEL,
                   "%s: scale at row %lld, column %lld is %g; scales must be finite and above 0", src->module,
                   (long long)row, (long long)col, (double)v);
}

/* Facts that the loader has established; a violation is a mistake of ours. */
static ql_status check_src(ql_dev *dev, const ql_weight_src *src) {
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
              : ql_fail(dev->err, QL_ERR_INTERNAL,
                        "%s: a cut of %d x %d from column %d does not fit a %s matrix of %d x %d", src->module, src->n,
                        src->k, src->col0, ql_qformat_name(src->format), src->full_n, src->full_k);
}

/* ---- scales ------------------------------------------------------------------------------------------------------ */

static ql_status load_row_scales(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    float *out = w->scale, most = 0;
    int64_t size = ql_dtype_bits(src->scale_dtype) / 8, r = 0;
    for (int32_t i = 0; i < src->n_range; i++) {
        int32_t n = src->row1[i] - src->row0[i];
        ql_dtype_to_f32(src->scale_dtype, src->scale + size * src->row0[i], n, out + r);
        for (int32_t j = 0; j < n; j++, r++) {
            QL_TRY(check_scale(dev, src, out[r], src->row0[i] + j, 0));
            most = fmaxf(most, out[r]);
        }
    }
    w->max_abs = 448.0f * most;
    return QL_OK;
}

static ql_status load_block_scales(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    float *out = w->scale, most = 0;
    int64_t size = ql_dtype_bits(src->scale_dtype) / 8;
    int64_t full = block_count(0, src->full_k), col = src->col0 / QL_FP8_BLOCK, n_col = block_count(w->col_off, w->k);
    for (int32_t i = 0; i < src->n_range; i++) {
        int64_t row = src->row0[i] / QL_FP8_BLOCK, end = block_count(0, src->row1[i]);
        for (; row < end; row++, out += n_col) {
            ql_dtype_to_f32(src->scale_dtype, src->scale + size * (row * full + col), n_col, out);
            for (int64_t j = 0; j < n_col; j++) {
                QL_TRY(check_scale(dev, src, out[j], row, col + j));
                most = fmaxf(most, out[j]);
            }
        }
    }
    w->max_abs = 448.0f * most;
    return QL_OK;
}

static ql_status load_group_scales(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    uint8_t *out = w->scale, most = 0;
    int64_t n_group = src->k / QL_NVFP4_GROUP, full = src->full_k / QL_NVFP4_GROUP, group0 = src->col0 / QL_NVFP4_GROUP;
    for (int32_t i = 0; i < src->n_range; i++) {
        for (int64_t row = src->row0[i]; row < src->row1[i]; row++, out += n_group) {
            memcpy(out, src->scale + row * full + group0, (size_t)n_group);
            for (int64_t j = 0; j < n_group; j++) {
                if (out[j] > 0x7e) { /* a sign bit or NaN; zero is legal: an all-zero group */
                    return ql_fail(dev->err, QL_ERR_MODEL,
                                   "%s: group scale at row %lld, columns %lld to %lld is %s (0x%02x); it must be an "
                                   "E4M3 number without sign",
                                   src->module, (long long)row, (long long)(16 * (group0 + j)),
                                   (long long)(16 * (group0 + j) + 15), ql_e4m3_is_nan(out[j]) ? "NaN" : "negative",
                                   out[j]);
                }
                most = out[j] > most ? out[j] : most; /* codes without sign rise with their value */
            }
        }
    }
    w->max_abs = 6.0f * ql_f32_of_e4m3(most) * src->factor;
    return QL_OK;
}

/* ---- load -------------------------------------------------------------------------------------------------------- */

static ql_status load_codes(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    int64_t row_bytes = ql_qformat_row_bytes(src->format, src->k);
    int64_t full = ql_qformat_row_bytes(src->format, src->full_k), col = ql_qformat_row_bytes(src->format, src->col0);
    uint8_t *out = w->data;
    for (int32_t i = 0; i < src->n_range; i++) {
        for (int32_t row = src->row0[i]; row < src->row1[i]; row++, out += row_bytes) {
            memcpy(out, src->data + row * full + col, (size_t)row_bytes);
            QL_TRY(check_codes(dev, src, out, row));
        }
    }
    return QL_OK;
}

ql_status ql_host_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    QL_TRY(check_src(dev, src));
    bool has_factor = src->format == QL_FORMAT_FP8_TENSOR || src->format == QL_FORMAT_NVFP4;
    if (has_factor && !(isfinite(src->factor) && src->factor > 0)) {
        return ql_fail(dev->err, QL_ERR_MODEL, "%s: tensor scale is %g; scales must be finite and above 0", src->module,
                       (double)src->factor);
    }
    ql_weight w = {.format = src->format, .n = src->n, .k = src->k, .factor = has_factor ? src->factor : 1.0f};
    if (src->format == QL_FORMAT_FP8_BLOCK) {
        w.row_off = src->row0[0] % QL_FP8_BLOCK;
        w.col_off = src->col0 % QL_FP8_BLOCK;
    }
    ql_status status;
    ql_host_weight_bytes(w.format, w.n, w.k, w.row_off, w.col_off, &w.weight_bytes, &w.scale_bytes);
    QL_TRY_GOTO(ql_host_alloc(dev, (size_t)w.weight_bytes, src->module, &w.data), fail);
    QL_TRY_GOTO(load_codes(dev, src, &w), fail);
    if (w.scale_bytes) {
        QL_TRY_GOTO(ql_host_alloc(dev, (size_t)w.scale_bytes, src->module, &w.scale), fail);
    }
    switch (src->format) {
    case QL_FORMAT_FP8_CHANNEL: status = load_row_scales(dev, src, &w); break;
    case QL_FORMAT_FP8_BLOCK: status = load_block_scales(dev, src, &w); break;
    case QL_FORMAT_NVFP4: status = load_group_scales(dev, src, &w); break;
    default: w.max_abs = is_fp8(src->format) ? 448.0f * w.factor : 0; break;
    }
    if (status != QL_OK) {
        goto fail;
    }
    ql_dev_count(&dev->h2d_bytes, w.weight_bytes + w.scale_bytes);
    *out = w;
    return QL_OK;
fail:
    ql_host_weight_free(dev, &w);
    return status;
}

ql_status ql_host_weight_crc(ql_dev *dev, const ql_weight *w, uint32_t *crc) {
    ql_dev_count(&dev->progress, 1);
    *crc = (uint32_t)crc32_z(crc32_z(0, NULL, 0), w->data, (size_t)w->weight_bytes);
    return QL_OK;
}

void ql_host_weight_free(ql_dev *dev, ql_weight *w) {
    ql_host_free(dev, w->data);
    ql_host_free(dev, w->scale);
    *w = (ql_weight){0};
}
