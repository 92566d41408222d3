/* Weight slices on the device: bytes of the cut go from the mapped file through pinned memory to the device once, where
 * a kernel moves the codes into the fragment layout (layout.h) and looks at each for NaN and infinity.
 *
 * Scales are few: the host converts and checks them on the way. Reading back undoes the layout, so that the checksum is
 * that of the file's bytes.
 */
#include "kernels/cuda/dev.cuh"
#include "kernels/cuda/layout.h"
#include "runtime/base/num.h"

#include <string.h>
#include <zlib.h>

static int64_t row_tiles(int64_t n) { return ceil_div(n, TILE_ROWS); }
static int64_t col_tiles(ql_qformat f, int64_t k) { return ceil_div(k, tile_k(f)); }
static int32_t block_count(int32_t offset, int32_t n) { return (int32_t)ceil_div((int64_t)offset + n, QL_FP8_BLOCK); }

void ql_cuda_weight_bytes(ql_qformat format, int32_t n, int32_t k, int32_t row_off, int32_t col_off,
                          uint64_t *weight_bytes, uint64_t *scale_bytes) {
    *scale_bytes = 0;
    if (is_plain(format)) {
        *weight_bytes = (uint64_t)n * (uint64_t)ql_qformat_row_bytes(format, k);
        return;
    }
    uint64_t tiles = (uint64_t)(row_tiles(n) * col_tiles(format, k));
    *weight_bytes = tiles * TILE_BYTES;
    switch (format) {
    case QL_FORMAT_FP8_CHANNEL: *scale_bytes = 4 * (uint64_t)n; break;
    case QL_FORMAT_FP8_BLOCK:
        *scale_bytes = 4 * (uint64_t)block_count(row_off, n) * (uint64_t)block_count(col_off, k);
        break;
    case QL_FORMAT_NVFP4: *scale_bytes = tiles * TILE_SCALE_BYTES; break;
    default: break;
    }
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* One thread a lane of a tile. raw: rows of row_bytes bytes; tiles of `n_row` rows, a multiple of 16 but at the end. */
__global__ void repack_codes(const uint8_t *raw, int n_row, int64_t row_bytes, int fp4, int n_col_tile, uint8_t *out,
                             int64_t row0, int64_t k, unsigned long long *bad) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int lane = (int)(i & 31);
    int64_t tile = i >> 5;
    int64_t rt = tile / n_col_tile, ct = tile % n_col_tile;
    if (rt * TILE_ROWS >= n_row) {
        return;
    }
    uint32_t w[4];
    for (int h = 0; h < 2; h++) {
        int64_t row = rt * TILE_ROWS + (lane >> 2) + 8 * h,
                byte0 = ct * 32 + (lane & 3) * 8; /* 32 bytes a row and tile */
        uint8_t b[8] = {0};
        for (int j = 0; j < 8; j++) {
            if (row < n_row && byte0 + j < row_bytes) {
                b[j] = raw[row * row_bytes + byte0 + j];
                if (!fp4 && (b[j] & 0x7f) == 0x7f) {
                    atomicMin(bad, (unsigned long long)((row0 + row) * k + byte0 + j));
                }
            }
        }
        for (int j = 0; j < 2; j++) {
            uint32_t v = (uint32_t)b[4 * j] | (uint32_t)b[4 * j + 1] << 8 | (uint32_t)b[4 * j + 2] << 16 |
                         (uint32_t)b[4 * j + 3] << 24;
            w[2 * h + j] = fp4 ? pack_e2m1(v) : pack_e4m3(v);
        }
    }
    ((uint4 *)out)[i] = make_uint4(w[0], w[1], w[2], w[3]);
}

__global__ void unpack_codes(const uint8_t *tiles, int n_row, int64_t row_bytes, int fp4, int n_col_tile,
                             uint8_t *raw) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int lane = (int)(i & 31);
    int64_t tile = i >> 5;
    int64_t rt = tile / n_col_tile, ct = tile % n_col_tile;
    if (rt * TILE_ROWS >= n_row) {
        return;
    }
    uint4 v = ((const uint4 *)tiles)[i];
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
    for (int h = 0; h < 2; h++) {
        int64_t row = rt * TILE_ROWS + (lane >> 2) + 8 * h, byte0 = ct * 32 + (lane & 3) * 8;
        for (int j = 0; j < 8; j++) {
            uint32_t u = fp4 ? unpack_e2m1(w[2 * h + j / 4]) : unpack_e4m3(w[2 * h + j / 4]);
            if (row < n_row && byte0 + j < row_bytes) {
                raw[row * row_bytes + byte0 + j] = (uint8_t)(u >> 8 * (j & 3));
            }
        }
    }
}

/* raw: group scales [n_row][n_group] */
__global__ void repack_scales(const uint8_t *raw, int n_row, int n_group, int n_col_tile, uint8_t *out) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int lane = (int)(i & 31);
    int64_t tile = i >> 5;
    int64_t rt = tile / n_col_tile, ct = tile % n_col_tile;
    if (rt * TILE_ROWS >= n_row) {
        return;
    }
    int64_t group = ct * 4 + (lane & 3);
    for (int h = 0; h < 2; h++) {
        int64_t row = rt * TILE_ROWS + (lane >> 2) + 8 * h;
        out[2 * i + h] = row < n_row && group < n_group ? raw[row * n_group + group] : 0;
    }
}

/* Plain codes: width 2 or 4 bytes; `mask` are the exponent bits, all ones in NaN and infinity. */
__global__ void check_plain(const uint8_t *codes, int64_t n, int width, uint32_t mask, int64_t index0,
                            unsigned long long *bad) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t v = width == 2 ? ((const uint16_t *)codes)[i] : ((const uint32_t *)codes)[i];
        if ((v & mask) == mask) {
            atomicMin(bad, (unsigned long long)(index0 + i));
        }
    }
}

static unsigned blocks_of(int64_t n) { return (unsigned)ceil_div(n, 256); }

/* ---- rows of a cut ----------------------------------------------------------------------------------------------- */

/* Row of the whole matrix that is row r of the cut. */
static int64_t source_row(const ql_weight_src *src, int64_t r) {
    int32_t i = 0;
    while (r >= src->row1[i] - src->row0[i]) {
        r -= src->row1[i] - src->row0[i];
        i++;
    }
    return src->row0[i] + r;
}

/* Copies rows [r0, r1) of the cut, bytes [col, col + row_bytes) of each, from a matrix of `full` bytes a row. */
static void copy_rows(const ql_weight_src *src, const uint8_t *data, int64_t full, int64_t col, int64_t row_bytes,
                      int64_t r0, int64_t r1, uint8_t *out) {
    for (int64_t r = r0; r < r1;) {
        int64_t row = source_row(src, r), n = 1;
        while (r + n < r1 && source_row(src, r + n) == row + n) {
            n++;
        }
        if (row_bytes == full) {
            memcpy(out, data + row * full, (size_t)(n * full));
        } else {
            for (int64_t i = 0; i < n; i++) {
                memcpy(out + i * row_bytes, data + (row + i) * full + col, (size_t)row_bytes);
            }
        }
        out += n * row_bytes;
        r += n;
    }
}

/* Calls `place` with file bytes of rows [r0, r1) on the device at `raw`, a few MiB at a time, in order; row counts are
 * multiples of 16 but the last. */
typedef ql_status (*place_fn)(ql_dev *dev, const ql_weight_src *src, const ql_weight *w, const uint8_t *raw, int64_t r0,
                              int64_t r1);

static ql_status stream_rows(ql_dev *dev, const ql_weight_src *src, const ql_weight *w, const uint8_t *data,
                             int64_t full, int64_t col, int64_t row_bytes, place_fn place) {
    struct cuda_dev *d = cuda(dev);
    int64_t step = (int64_t)STAGE_BYTES / row_bytes / TILE_ROWS * TILE_ROWS;
    if (step == 0) {
        return ql_fail(dev->err, QL_ERR_MODEL, "%s: rows of %lld bytes are longer than %zu", src->module,
                       (long long)row_bytes, STAGE_BYTES / TILE_ROWS);
    }
    for (int64_t r = 0; r < w->n; r += step) {
        int64_t end = r + step < w->n ? r + step : w->n, bytes = (end - r) * row_bytes;
        uint8_t *pinned;
        int slot;
        QL_TRY(ql_cuda_slot_take(dev, &pinned, &slot));
        copy_rows(src, data, full, col, row_bytes, r, end, pinned);
        uint8_t *raw = d->raw + (size_t)slot * STAGE_BYTES;
        CU_TRY(dev, cudaMemcpyAsync(raw, pinned, (size_t)bytes, cudaMemcpyHostToDevice, d->stream), src->module);
        QL_TRY(ql_cuda_slot_done(dev, slot));
        QL_TRY(place(dev, src, w, raw, r, end));
        ql_dev_count(&dev->h2d_bytes, (uint64_t)bytes);
    }
    return QL_OK;
}

static ql_status place_codes(ql_dev *dev, const ql_weight_src *src, const ql_weight *w, const uint8_t *raw, int64_t r0,
                             int64_t r1) {
    struct cuda_dev *d = cuda(dev);
    int64_t row_bytes = ql_qformat_row_bytes(w->format, w->k);
    if (is_plain(w->format)) {
        uint8_t *out = (uint8_t *)w->data + r0 * row_bytes;
        CU_TRY(dev, cudaMemcpyAsync(out, raw, (size_t)((r1 - r0) * row_bytes), cudaMemcpyDeviceToDevice, d->stream),
               src->module);
        int width = w->format == QL_FORMAT_F32 ? 4 : 2;
        uint32_t mask = w->format == QL_FORMAT_F32 ? 0x7f800000u : w->format == QL_FORMAT_F16 ? 0x7c00u : 0x7f80u;
        int64_t n = (r1 - r0) * w->k;
        check_plain<<<blocks_of(n) < 1024 ? blocks_of(n) : 1024, 256, 0, d->stream>>>(out, n, width, mask, r0 * w->k,
                                                                                      d->bad);
        return launched(dev, "check of plain weights");
    }
    int64_t ct = col_tiles(w->format, w->k), n = row_tiles(r1 - r0) * ct * 32;
    repack_codes<<<blocks_of(n), 256, 0, d->stream>>>(raw, (int)(r1 - r0), row_bytes, w->format == QL_FORMAT_NVFP4,
                                                      (int)ct, (uint8_t *)w->data + r0 / TILE_ROWS * ct * TILE_BYTES,
                                                      r0, w->k, d->bad);
    return launched(dev, "repacking");
}

static ql_status place_scales(ql_dev *dev, const ql_weight_src *src, const ql_weight *w, const uint8_t *raw, int64_t r0,
                              int64_t r1) {
    (void)src;
    int64_t ct = col_tiles(w->format, w->k), n = row_tiles(r1 - r0) * ct * 32;
    repack_scales<<<blocks_of(n), 256, 0, cuda(dev)->stream>>>(raw, (int)(r1 - r0), w->k / QL_NVFP4_GROUP, (int)ct,
                                                               (uint8_t *)w->scale +
                                                                   r0 / TILE_ROWS * ct * TILE_SCALE_BYTES);
    return launched(dev, "repacking of scales");
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static ql_status bad_code(ql_dev *dev, const ql_weight_src *src, uint64_t index) {
    int64_t row = source_row(src, (int64_t)(index / (uint64_t)src->k)),
            col = src->col0 + (int64_t)(index % (uint64_t)src->k);
    int64_t width = ql_qformat_row_bytes(src->format, 1);
    uint32_t code = 0;
    memcpy(&code, src->data + row * ql_qformat_row_bytes(src->format, src->full_k) + col * width, (size_t)width);
    return ql_fail(dev->err, QL_ERR_MODEL, "%s: weight at row %lld, column %lld is %s (0x%0*x)", src->module,
                   (long long)row, (long long)col, is_fp8(src->format) ? "an E4M3 NaN" : "not a finite number",
                   (int)(2 * width), code);
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
              (int64_t)src->col0 + src->k <= src->full_k && src->data && src->format < QL_FORMAT_COUNT;
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

/* FP8_CHANNEL and FP8_BLOCK: converted to f32 on the host, then copied. */
static ql_status load_f32_scales(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    bool blocks = src->format == QL_FORMAT_FP8_BLOCK;
    int64_t size = ql_dtype_bits(src->scale_dtype) / 8, unit = blocks ? QL_FP8_BLOCK : 1;
    int64_t n_col = blocks ? block_count(w->col_off, w->k) : 1, full = blocks ? block_count(0, src->full_k) : 1;
    int64_t col = blocks ? src->col0 / QL_FP8_BLOCK : 0;
    float most = 0, *host;
    void *ptr;
    QL_TRY(ql_alloc(dev->mem, w->scale_bytes, 1, src->module, &ptr, dev->err));
    host = (float *)ptr;
    ql_status status = QL_OK;
    float *out = host;
    for (int32_t i = 0; i < src->n_range && status == QL_OK; i++) {
        for (int64_t row = src->row0[i] / unit; row < ceil_div(src->row1[i], unit) && status == QL_OK;
             row++, out += n_col) {
            ql_dtype_to_f32(src->scale_dtype, src->scale + size * (row * full + col), n_col, out);
            for (int64_t j = 0; j < n_col && status == QL_OK; j++) {
                status = check_scale(dev, src, out[j], row, col + j);
                most = fmaxf(most, out[j]);
            }
        }
    }
    if (status == QL_OK) {
        status = ql_cuda_h2d(dev, w->scale, host, w->scale_bytes);
    }
    ql_free(dev->mem, host);
    w->max_abs = 448.0f * most;
    return status;
}

static ql_status load_group_scales(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    int64_t n_group = src->k / QL_NVFP4_GROUP, full = src->full_k / QL_NVFP4_GROUP, group0 = src->col0 / QL_NVFP4_GROUP;
    uint8_t most = 0;
    for (int32_t i = 0; i < src->n_range; i++) {
        for (int64_t row = src->row0[i]; row < src->row1[i]; row++) {
            const uint8_t *s = src->scale + row * full + group0;
            for (int64_t j = 0; j < n_group; j++) {
                if (s[j] > 0x7e) { /* a sign bit or NaN; zero is legal: an all-zero group */
                    return ql_fail(dev->err, QL_ERR_MODEL,
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
    return stream_rows(dev, src, w, src->scale, full, group0, n_group, place_scales);
}

/* ---- load -------------------------------------------------------------------------------------------------------- */

static ql_status load_codes(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    struct cuda_dev *d = cuda(dev);
    CU_TRY(dev, cudaMemsetAsync(d->bad, 0xff, sizeof *d->bad, d->stream), src->module);
    QL_TRY(stream_rows(dev, src, w, src->data, ql_qformat_row_bytes(src->format, src->full_k),
                       ql_qformat_row_bytes(src->format, src->col0), ql_qformat_row_bytes(src->format, src->k),
                       place_codes));
    unsigned long long bad = 0;
    QL_TRY(dev->ops->d2h(dev, &bad, d->bad, sizeof bad));
    QL_TRY(ql_cuda_sync(dev));
    return bad == ~0ull ? QL_OK : bad_code(dev, src, bad);
}

ql_status ql_cuda_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    QL_TRY(check_src(dev, src));
    bool has_factor = src->format == QL_FORMAT_FP8_TENSOR || src->format == QL_FORMAT_NVFP4;
    if (has_factor && !(isfinite(src->factor) && src->factor > 0)) {
        return ql_fail(dev->err, QL_ERR_MODEL, "%s: tensor scale is %g; scales must be finite and above 0", src->module,
                       (double)src->factor);
    }
    ql_weight w{};
    w.format = src->format;
    w.n = src->n;
    w.k = src->k;
    w.factor = has_factor ? src->factor : 1.0f;
    if (src->format == QL_FORMAT_FP8_BLOCK) {
        w.row_off = src->row0[0] % QL_FP8_BLOCK;
        w.col_off = src->col0 % QL_FP8_BLOCK;
    }
    ql_cuda_weight_bytes(w.format, w.n, w.k, w.row_off, w.col_off, &w.weight_bytes, &w.scale_bytes);
    ql_status status = ql_cuda_alloc(dev, (size_t)w.weight_bytes, src->module, &w.data);
    if (status == QL_OK && w.scale_bytes) {
        status = ql_cuda_alloc(dev, (size_t)w.scale_bytes, src->module, &w.scale);
    }
    if (status == QL_OK && (w.format == QL_FORMAT_FP8_CHANNEL || w.format == QL_FORMAT_FP8_BLOCK)) {
        status = load_f32_scales(dev, src, &w);
    } else if (status == QL_OK && w.format == QL_FORMAT_NVFP4) {
        status = load_group_scales(dev, src, &w);
    } else if (w.format == QL_FORMAT_FP8_TENSOR) {
        w.max_abs = 448.0f * w.factor;
    }
    if (status == QL_OK) {
        status = load_codes(dev, src, &w);
    }
    if (status != QL_OK) {
        ql_cuda_weight_free(dev, &w);
        return status;
    }
    *out = w;
    return QL_OK;
}

ql_status ql_cuda_weight_crc(ql_dev *dev, const ql_weight *w, uint32_t *crc) {
    struct cuda_dev *d = cuda(dev);
    int64_t row_bytes = ql_qformat_row_bytes(w->format, w->k),
            step = (int64_t)STAGE_BYTES / row_bytes / TILE_ROWS * TILE_ROWS;
    uLong sum = crc32_z(0, NULL, 0);
    ql_dev_count(&dev->progress, 1);
    for (int64_t r = 0; r < w->n; r += step) {
        int64_t end = r + step < w->n ? r + step : w->n, bytes = (end - r) * row_bytes;
        const uint8_t *from = (const uint8_t *)w->data + r * row_bytes;
        if (!is_plain(w->format)) {
            int64_t ct = col_tiles(w->format, w->k), n = row_tiles(end - r) * ct * 32;
            unpack_codes<<<blocks_of(n), 256, 0, d->stream>>>(
                (const uint8_t *)w->data + r / TILE_ROWS * ct * TILE_BYTES, (int)(end - r), row_bytes,
                w->format == QL_FORMAT_NVFP4, (int)ct, d->raw);
            QL_TRY(launched(dev, "reading weights back"));
            from = d->raw;
        }
        QL_TRY(ql_cuda_sync(dev)); /* the return buffer is ours alone from here to the next sync */
        CU_TRY(dev, cudaMemcpyAsync(d->back, from, (size_t)bytes, cudaMemcpyDeviceToHost, d->stream),
               "reading weights back");
        CU_TRY(dev, cudaStreamSynchronize(d->stream), "reading weights back");
        ql_dev_count(&dev->d2h_bytes, (uint64_t)bytes);
        sum = crc32_z(sum, d->back, (size_t)bytes);
    }
    *crc = (uint32_t)sum;
    return QL_OK;
}

void ql_cuda_weight_free(ql_dev *dev, ql_weight *w) {
    ql_cuda_free(dev, w->data);
    ql_cuda_free(dev, w->scale);
    *w = ql_weight{};
}
