/* Values that are no numbers, found eight bytes at a time: in every float format NaN and infinity are the codes whose
 * exponent (E4M3: exponent and mantissa) is all ones, and adding one at the lowest of those bits carries into the sign's
 * place. Where something is found, it is looked for again one by one to name it. */
#include "loader/shard.h"

#include "runtime/base/num.h"

#include <math.h>
#include <string.h>

typedef struct pattern {
    uint64_t mask, add, high; /* found where ((x & mask) + add) & high is not 0 */
    int32_t width;            /* bytes of one element */
} pattern;

static const pattern nan_e4m3 = {0x7f7f7f7f7f7f7f7f, 0x0101010101010101, 0x8080808080808080, 1};
static const pattern negative_e4m3 = {0x8080808080808080, 0, 0x8080808080808080, 1};
static const pattern nonzero_e4m3 = {0x7f7f7f7f7f7f7f7f, 0x7f7f7f7f7f7f7f7f, 0x8080808080808080, 1};

static const pattern *not_finite(ql_dtype dtype) {
    static const pattern bf16 = {0x7f807f807f807f80, 0x0080008000800080, 0x8000800080008000, 2},
                         f16 = {0x7c007c007c007c00, 0x0400040004000400, 0x8000800080008000, 2},
                         f32 = {0x7f8000007f800000, 0x0080000000800000, 0x8000000080000000, 4};
    return dtype == QL_DTYPE_BF16 ? &bf16 : dtype == QL_DTYPE_F16 ? &f16 : &f32;
}

/* Offset of the first element that matches, or -1. */
static int64_t find(const pattern *p, const uint8_t *data, int64_t n) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t found = 0;
        for (int k = 0; k < 64; k += 8) {
            uint64_t x;
            memcpy(&x, data + i + k, 8);
            found |= (x & p->mask) + p->add;
        }
        if (found & p->high) {
            break;
        }
    }
    for (; i < n; i += p->width) {
        uint64_t x = 0; /* zeros match nothing */
        memcpy(&x, data + i, (size_t)p->width);
        if (((x & p->mask) + p->add) & p->high & (UINT64_MAX >> (64 - 8 * p->width))) {
            return i;
        }
    }
    return -1;
}

/* Rows [row0, row1) and bytes [b0, b1) of each, in a tensor of `stride` bytes a row. */
typedef struct window {
    int64_t row0, row1, b0, b1, stride;
} window;

static bool find_in(const pattern *p, const ql_tensor *t, const window *w, int64_t *row, int64_t *byte) {
    const bool whole_rows = w->b0 == 0 && w->b1 == w->stride;
    const int64_t step = whole_rows ? w->row1 - w->row0 : 1, bytes = step * (w->b1 - w->b0);
    for (int64_t r = w->row0; r < w->row1; r += step) {
        const int64_t at = find(p, t->data + r * w->stride + w->b0, bytes);
        if (at >= 0) {
            *row = r + (whole_rows ? at / w->stride : 0);
            *byte = whole_rows ? at % w->stride : w->b0 + at;
            return true;
        }
    }
    return false;
}

static ql_status check_window(const pattern *p, const ql_tensor *t, const window *w, const char *what, ql_error *err) {
    int64_t row, byte;
    if (!find_in(p, t, w, &row, &byte)) {
        return QL_OK;
    }
    uint32_t code = 0;
    memcpy(&code, t->data + row * w->stride + byte, (size_t)p->width);
    return ql_fail(err, QL_ERR_MODEL, "\"%s\" holds %s (0x%0*x) at row %lld, column %lld", t->name, what, 2 * p->width,
                   code, (long long)row, (long long)(byte / p->width));
}

static float scale_at(const ql_tensor *t, int64_t i) {
    const int32_t width = ql_dtype_bits(t->dtype) / 8;
    float v;
    ql_dtype_to_f32(t->dtype, t->data + i * width, 1, &v);
    return v;
}

/* The scale of the codes in `w`. */
static ql_status check_scale(const ql_linear *l, int64_t i, const window *w, ql_error *err) {
    const float s = scale_at(l->scale, i);
    int64_t row, byte;
    if (s > 0 && isfinite(s)) {
        return QL_OK;
    }
    if (s == 0 && !find_in(&nonzero_e4m3, l->weight, w, &row, &byte)) {
        return QL_OK;
    }
    return ql_fail(err, QL_ERR_MODEL,
                   "\"%s\" holds the scale %g at element %lld; accepted are finite values over 0, and 0 where all "
                   "codes are 0",
                   l->scale->name, (double)s, (long long)i);
}

static ql_status check_block_scales(const ql_linear *l, const window *w, ql_error *err) {
    const int64_t block = QL_FP8_BLOCK, per_row = ((int64_t)l->k + block - 1) / block;
    for (int64_t r = w->row0 / block; r * block < w->row1; r++) {
        for (int64_t c = w->b0 / block; c * block < w->b1; c++) {
            window part = *w;
            part.row0 = r * block > w->row0 ? r * block : w->row0;
            part.row1 = (r + 1) * block < w->row1 ? (r + 1) * block : w->row1;
            part.b0 = c * block > w->b0 ? c * block : w->b0;
            part.b1 = (c + 1) * block < w->b1 ? (c + 1) * block : w->b1;
            QL_TRY(check_scale(l, r * per_row + c, &part, err));
        }
    }
    return QL_OK;
}

static ql_status check_fp8(const ql_linear *l, const window *w, ql_error *err) {
    QL_TRY(check_window(&nan_e4m3, l->weight, w, "a NaN code", err));
    if (l->format == QL_FORMAT_FP8_BLOCK) {
        return check_block_scales(l, w, err);
    }
    for (int64_t r = w->row0; r < w->row1 && l->format == QL_FORMAT_FP8_CHANNEL; r++) {
        window row = *w;
        row.row0 = r;
        row.row1 = r + 1;
        QL_TRY(check_scale(l, r, &row, err));
    }
    return QL_OK;
}

/* Rows [row0, row1) and columns [c0, c1). */
static ql_status check_rows(const ql_linear *l, int64_t row0, int64_t row1, int64_t c0, int64_t c1, ql_error *err) {
    window w = {row0, row1, 0, 0, ql_qformat_row_bytes(l->format, l->k)};
    if (l->format == QL_FORMAT_NVFP4) { /* every code is a number */
        w.stride = l->k / QL_NVFP4_GROUP;
        w.b0 = c0 / QL_NVFP4_GROUP;
        w.b1 = c1 / QL_NVFP4_GROUP;
        QL_TRY(check_window(&nan_e4m3, l->scale, &w, "a NaN group scale", err));
        return check_window(&negative_e4m3, l->scale, &w, "a negative group scale", err);
    }
    w.b0 = ql_qformat_row_bytes(l->format, c0);
    w.b1 = ql_qformat_row_bytes(l->format, c1);
    if (l->format <= QL_FORMAT_BF16) {
        return check_window(not_finite(l->weight->dtype), l->weight, &w, "a value that is not finite", err);
    }
    return check_fp8(l, &w, err);
}

ql_status ql_linear_check(const ql_linear *l, const ql_cut *cut, ql_error *err) {
    if (l->factor) {
        const float f = scale_at(l->factor, 0);
        if (!(f > 0) || !isfinite(f) || !isfinite(1 / f)) {
            return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %g; accepted are finite values over 0", l->factor->name,
                           (double)f);
        }
    }
    if (cut->axis == 1) {
        return check_rows(l, 0, l->n, cut->begin[0], cut->end[0], err);
    }
    if (cut->axis < 0) {
        return check_rows(l, 0, l->n, 0, l->k, err);
    }
    for (int32_t i = 0; i < cut->n_range; i++) {
        QL_TRY(check_rows(l, cut->begin[i], cut->end[i], 0, l->k, err));
    }
    return QL_OK;
}

ql_status ql_tensor_check(const ql_tensor *t, const ql_cut *cut, ql_error *err) {
    const pattern *p = not_finite(t->dtype);
    if (cut->axis != 0 || t->rank == 0) {
        const window all = {0, 1, 0, (int64_t)t->bytes, (int64_t)t->bytes};
        return check_window(p, t, &all, "a value that is not finite", err);
    }
    const int64_t stride = t->shape[0] ? (int64_t)t->bytes / t->shape[0] : 0;
    for (int32_t i = 0; i < cut->n_range; i++) {
        const window rows = {cut->begin[i], cut->end[i], 0, stride, stride};
        QL_TRY(check_window(p, t, &rows, "a value that is not finite", err));
    }
    return QL_OK;
}
