/* Weight slices on a CPU lane: rows and columns of the cut copied out of the mapped file, in the file's own order, so
 * that the checksum of what is resident is that of what was read.
 *
 * Every code and scale that is taken is looked at on the way: a NaN or infinity in a weight, or a scale that is not a
 * finite positive number, is a damaged file and is refused with its place. Of plain weights the largest is kept.
 */
#include "kernels/host/host_ops.h"

#include "kernels/weight_src.h"

#include <string.h>
#include <zlib.h>

void ql_host_weight_bytes(ql_qformat format, int32_t n, int32_t k, int32_t row_off, int32_t col_off,
                          uint64_t *weight_bytes, uint64_t *scale_bytes) {
    *weight_bytes = (uint64_t)n * (uint64_t)ql_qformat_row_bytes(format, k);
    switch (format) {
    case QL_FORMAT_FP8_CHANNEL: *scale_bytes = 4 * (uint64_t)n; break;
    case QL_FORMAT_FP8_BLOCK:
        *scale_bytes = 4 * (uint64_t)ql_fp8_blocks(row_off, n) * (uint64_t)ql_fp8_blocks(col_off, k);
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

/* The largest of `most` and n plain codes of 2 or 4 bytes, all without their signs: so they rise with their values. */
static uint32_t largest_code(const uint8_t *p, int64_t n, int32_t width, uint32_t most) {
    enum { WIDE = 16 };
    int16_t max2[WIDE] = {0};
    int32_t max4[WIDE] = {0};
    int64_t i = 0;
    for (; width == 2 && i + WIDE <= n; i += WIDE) { /* signed, which every instruction set has */
        int16_t v[WIDE];
        memcpy(v, p + i * 2, sizeof v);
        for (int j = 0; j < WIDE; j++) {
            int16_t m = (int16_t)(v[j] & 0x7fff);
            max2[j] = m > max2[j] ? m : max2[j];
        }
    }
    for (; width == 4 && i + WIDE <= n; i += WIDE) {
        int32_t v[WIDE];
        memcpy(v, p + i * 4, sizeof v);
        for (int j = 0; j < WIDE; j++) {
            int32_t m = v[j] & 0x7fffffff;
            max4[j] = m > max4[j] ? m : max4[j];
        }
    }
    for (int j = 0; j < WIDE; j++) {
        uint32_t m = width == 2 ? (uint32_t)max2[j] : (uint32_t)max4[j];
        most = m > most ? m : most;
    }
    for (; i < n; i++) {
        uint32_t v = 0;
        memcpy(&v, p + i * width, (size_t)width);
        v &= width == 2 ? 0x7fffu : 0x7fffffffu;
        most = v > most ? v : most;
    }
    return most;
}

/* Row `row` of the whole matrix; p: its columns of the cut. */
static ql_status check_codes(ql_dev *dev, const ql_weight_src *src, const uint8_t *p, int32_t row) {
    int64_t at = -1;
    switch (src->format) {
    case QL_FORMAT_F32: at = find_all_ones(p, src->k, 4, 0x7f800000u); break;
    case QL_FORMAT_F16: at = find_all_ones(p, src->k, 2, 0x7c00u); break;
    case QL_FORMAT_BF16: at = find_all_ones(p, src->k, 2, 0x7f80u); break;
    case QL_FORMAT_NVFP4: break; /* every code is a number */
    default: at = find_all_ones(p, src->k, 1, 0x7fu); break;
    }
    return at < 0 ? QL_OK : ql_weight_src_bad_code(src, row, src->col0 + at, dev->err);
}

/* ---- load -------------------------------------------------------------------------------------------------------- */

static ql_status load_codes(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    int64_t row_bytes = ql_qformat_row_bytes(src->format, src->k);
    int64_t full = ql_qformat_row_bytes(src->format, src->full_k), col = ql_qformat_row_bytes(src->format, src->col0);
    int32_t width = w->format == QL_FORMAT_F32 ? 4 : 2;
    bool plain = w->format == QL_FORMAT_F32 || w->format == QL_FORMAT_F16 || w->format == QL_FORMAT_BF16;
    uint32_t most = 0;
    uint8_t *out = w->data;
    for (int32_t i = 0; i < src->n_range; i++) {
        for (int32_t row = src->row0[i]; row < src->row1[i]; row++, out += row_bytes) {
            memcpy(out, src->data + row * full + col, (size_t)row_bytes);
            QL_TRY(check_codes(dev, src, out, row));
            most = plain ? largest_code(out, src->k, width, most) : 0;
        }
    }
    if (plain) {
        ql_weight_src_plain_max(w, most);
    }
    return QL_OK;
}

ql_status ql_host_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    ql_weight w;
    ql_status status;
    QL_TRY(ql_weight_src_begin(src, &w, dev->err));
    ql_host_weight_bytes(w.format, w.n, w.k, w.row_off, w.col_off, &w.weight_bytes, &w.scale_bytes);
    QL_TRY_GOTO(ql_host_alloc(dev, (size_t)w.weight_bytes, src->module, &w.data), fail);
    QL_TRY_GOTO(load_codes(dev, src, &w), fail);
    if (w.scale_bytes) {
        QL_TRY_GOTO(ql_host_alloc(dev, (size_t)w.scale_bytes, src->module, &w.scale), fail);
        QL_TRY_GOTO(w.format == QL_FORMAT_NVFP4 ? ql_weight_src_group_scales(src, &w, w.scale, dev->err)
                                                : ql_weight_src_f32_scales(src, &w, w.scale, dev->err),
                    fail);
    }
    ql_dev_count(&dev->h2d_bytes, w.weight_bytes + w.scale_bytes);
    *out = w;
    return QL_OK;
fail:
    ql_host_weight_free(dev, &w);
    return status;
}

static bool same_rows(const ql_weight_src *src, const uint8_t *data, int64_t full, int64_t col, int64_t row_bytes,
                      const uint8_t *held) {
    for (int32_t i = 0; i < src->n_range; i++) {
        for (int32_t row = src->row0[i]; row < src->row1[i]; row++, held += row_bytes) {
            if (memcmp(held, data + row * full + col, (size_t)row_bytes) != 0) {
                return false;
            }
        }
    }
    return true;
}

static ql_status same_f32_scales(ql_dev *dev, const ql_weight *w, const ql_weight_src *src, bool *same) {
    ql_weight copy = *w;
    void *want;
    QL_TRY(ql_host_alloc(dev, (size_t)w->scale_bytes, src->module, &want));
    ql_status status = ql_weight_src_f32_scales(src, &copy, want, dev->err);
    *same = status == QL_OK && memcmp(want, w->scale, (size_t)w->scale_bytes) == 0;
    ql_host_free(dev, want);
    return status;
}

ql_status ql_host_weight_same(ql_dev *dev, const ql_weight *w, const ql_weight_src *src, const char **differs) {
    bool same = true;
    ql_dev_count(&dev->progress, 1);
    *differs = "codes";
    if (!same_rows(src, src->data, ql_qformat_row_bytes(src->format, src->full_k),
                   ql_qformat_row_bytes(src->format, src->col0), ql_qformat_row_bytes(src->format, src->k), w->data)) {
        return QL_OK;
    }
    if (w->format == QL_FORMAT_NVFP4) {
        same = same_rows(src, src->scale, src->full_k / QL_NVFP4_GROUP, src->col0 / QL_NVFP4_GROUP,
                         src->k / QL_NVFP4_GROUP, w->scale);
    } else if (w->scale_bytes) {
        QL_TRY(same_f32_scales(dev, w, src, &same));
    }
    *differs = same ? NULL : "scales";
    return QL_OK;
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
