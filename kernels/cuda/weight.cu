/* Weight slices on the device: bytes of the cut go from the file through pinned memory to the device once, where a kernel
 * moves the codes into the fragment layout (layout.h), or into records (q8.h), and looks at each code and group scale.
 *
 * A ring of slots carries them. While a model loads the threads of a pool read the file into slots that lie ahead, and the
 * lane's thread enqueues copy and kernel of one slot after another in the order of the file. Comparing with the file goes
 * the same way backwards: a kernel undoes the layout, and the pool compares bytes with bytes.
 */
#include "kernels/cuda/dev.cuh"
#include "kernels/cuda/layout.h"
#include "kernels/q8.h"
#include "kernels/weight_src.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

static int64_t row_tiles(int64_t n) { return ceil_div(n, TILE_ROWS); }
static int64_t col_tiles(ql_qformat f, int64_t k) { return ceil_div(k, tile_k(f)); }

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
        *scale_bytes = 4 * (uint64_t)ql_fp8_blocks(row_off, n) * (uint64_t)ql_fp8_blocks(col_off, k);
        break;
    case QL_FORMAT_NVFP4: *scale_bytes = tiles * TILE_SCALE_BYTES; break;
    default: break;
    }
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* What a weight's kernels saw; atomics of whole numbers, whose order does not matter. */
struct findings {
    unsigned long long bad; /* index in the cut of the first code that is no number, or all ones */
    unsigned most;          /* the largest group scale as a byte; of plain codes the largest without its sign */
};

__global__ void clear_findings(struct findings *f) { *f = findings{~0ull, 0}; }

/* One thread a lane of a tile. raw: rows of row_bytes bytes; tiles of `n_row` rows, a multiple of 16 but at the end. */
__global__ void repack_codes(const uint8_t *raw, int n_row, int64_t row_bytes, int fp4, int n_col_tile, uint8_t *out,
                             int64_t row0, int64_t k, struct findings *found) {
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
                    atomicMin(&found->bad, (unsigned long long)((row0 + row) * k + byte0 + j));
                }
            }
        }
        for (int j = 0; j < 2; j++) {
            uint32_t v = (uint32_t)b[4 * j] | (uint32_t)b[4 * j + 1] << 8 | (uint32_t)b[4 * j + 2] << 16 |
                         (uint32_t)b[4 * j + 3] << 24;
            w[2 * h + j] = fp4 ? pack_e2m1(v) : v;
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
            uint32_t u = fp4 ? unpack_e2m1(w[2 * h + j / 4]) : w[2 * h + j / 4];
            if (row < n_row && byte0 + j < row_bytes) {
                raw[row * row_bytes + byte0 + j] = (uint8_t)(u >> 8 * (j & 3));
            }
        }
    }
}

/* raw: group scales [n_row][n_group] */
__global__ void repack_scales(const uint8_t *raw, int n_row, int n_group, int n_col_tile, uint8_t *out,
                              struct findings *found) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int lane = (int)(i & 31);
    int64_t tile = i >> 5;
    int64_t rt = tile / n_col_tile, ct = tile % n_col_tile;
    if (rt * TILE_ROWS >= n_row) {
        return;
    }
    int64_t group = ct * 4 + (lane & 3);
    unsigned most = 0;
    for (int h = 0; h < 2; h++) {
        int64_t row = rt * TILE_ROWS + (lane >> 2) + 8 * h;
        uint8_t s = row < n_row && group < n_group ? raw[row * n_group + group] : 0;
        out[2 * i + h] = s;
        most = max(most, (unsigned)s);
    }
    for (int d = 16; d; d >>= 1) { /* tiles are whole warps */
        most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    }
    if (lane == 0 && most > found->most) { /* the plain read only spares atomics */
        atomicMax(&found->most, most);
    }
}

__global__ void unpack_scales(const uint8_t *tiles, int n_row, int n_group, int n_col_tile, uint8_t *raw) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int lane = (int)(i & 31);
    int64_t tile = i >> 5;
    int64_t rt = tile / n_col_tile, ct = tile % n_col_tile, group = ct * 4 + (lane & 3);
    if (rt * TILE_ROWS >= n_row) {
        return;
    }
    for (int h = 0; h < 2; h++) {
        int64_t row = rt * TILE_ROWS + (lane >> 2) + 8 * h;
        if (row < n_row && group < n_group) {
            raw[row * n_group + group] = tiles[2 * i + h];
        }
    }
}

/* Records: one thread a word of 8 codes, in either direction. raw: rows of row_bytes bytes; n_record: of a row. */
template <bool BACK>
__global__ void record_codes(uint8_t *raw, int n_row, int64_t row_bytes, int n_record, uint8_t *records) {
    constexpr int WORDS = QL_Q8_RECORD / 8;
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, row = i / (n_record * WORDS),
            in = i % (n_record * WORDS);
    if (row >= n_row) {
        return;
    }
    uint32_t *word =
        (uint32_t *)(records + (row * n_record + in / WORDS) * QL_Q8_RECORD_BYTES + QL_Q8_RECORD / 16) + in % WORDS;
    uint8_t *from = raw + row * row_bytes;
    uint32_t v = BACK ? *word : 0;
    for (int j = 0; j < 4; j++) {
        if (4 * in + j < row_bytes && BACK) {
            from[4 * in + j] = (uint8_t)(v >> 8 * j);
        } else if (4 * in + j < row_bytes) {
            v |= (uint32_t)from[4 * in + j] << 8 * j;
        }
    }
    if (!BACK) {
        *word = v;
    }
}

/* One thread the four scales of a record; whole warps. */
template <bool BACK>
__global__ void record_scales(uint8_t *raw, int n_row, int n_group, int n_record, uint8_t *records,
                              struct findings *found) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, row = i / n_record;
    unsigned most = 0;
    if (row < n_row) {
        uint8_t *scale = records + i * QL_Q8_RECORD_BYTES;
        int group = (int)(i % n_record) * 4;
        for (int j = 0; j < 4; j++) {
            uint8_t *from = raw + row * n_group + group + j;
            if (group + j < n_group && BACK) {
                *from = scale[j];
            } else if (!BACK) {
                scale[j] = group + j < n_group ? *from : 0;
                most = max(most, (unsigned)scale[j]);
            }
        }
    }
    if (!BACK) {
        for (int d = 16; d; d >>= 1) {
            most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
        }
        if ((threadIdx.x & 31) == 0 && most > found->most) {
            atomicMax(&found->most, most);
        }
    }
}

/* Plain codes: width 2 or 4 bytes; `mask` are the exponent bits, all ones in NaN and infinity. Without signs, codes rise with
 * their values. */
__global__ void check_plain(const uint8_t *codes, int64_t n, int width, uint32_t mask, int64_t index0,
                            struct findings *found) {
    uint32_t magnitude = width == 2 ? 0x7fffu : 0x7fffffffu, most = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t v = width == 2 ? ((const uint16_t *)codes)[i] : ((const uint32_t *)codes)[i];
        if ((v & mask) == mask) {
            atomicMin(&found->bad, (unsigned long long)(index0 + i));
        }
        most = max(most, v & magnitude);
    }
    for (int d = 16; d; d >>= 1) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    }
    if ((threadIdx.x & 31) == 0 && most > found->most) {
        atomicMax(&found->most, most);
    }
}

static unsigned blocks_of(int64_t n) { return (unsigned)ceil_div(n, 256); }

/* ---- the ring ---------------------------------------------------------------------------------------------------- */

/* Rows [r0, r1) of a cut, `row_bytes` bytes of each from byte `col` on, in a matrix of `full` bytes a row. */
struct rows {
    const ql_weight_src *src;
    const uint8_t *data;
    ql_file_place file;
    int64_t full, col, row_bytes, r0, r1;
};

struct load_slot {
    ql_job job; /* first: the pool hands it back */
    struct rows rows;
    uint8_t *pinned, *raw;
    cudaEvent_t copied; /* when the slot's last copy was done */
    int error;          /* errno of a read; END_OF_FILE */
    uint64_t error_at;  /* byte in the file */
    bool same;
};

struct load_ring {
    ql_pool *pool;
    int n_slot;
    size_t slot_bytes;
    uint8_t *pinned, *raw;
    struct findings *found;
    struct load_slot *slot;
};

constexpr int END_OF_FILE = -1;
constexpr int RING_SLOTS = 2, COPIES_IN_FLIGHT = 4; /* RING_SLOTS: without a pool */
constexpr size_t SLOT_BYTES = 2 << 20, SLOT_BYTES_ALONE = 4 << 20;

void ql_cuda_ring_close(ql_dev *dev) {
    struct load_ring *g = cuda(dev)->ring;
    if (!g) {
        return;
    }
    for (int i = 0; i < g->n_slot && g->slot; i++) {
        if (g->slot[i].copied) {
            cudaEventDestroy(g->slot[i].copied);
        }
    }
    cudaFree(g->raw);
    cudaFree(g->found);
    cudaFreeHost(g->pinned);
    cudaGetLastError();
    ql_free(dev->mem, g->slot);
    ql_free(dev->mem, g);
    cuda(dev)->ring = NULL;
}

static ql_status open_ring(ql_dev *dev, struct load_ring *g) {
    void *slots;
    QL_TRY(ql_alloc(dev->mem, (size_t)g->n_slot, sizeof *g->slot, "the ring of a load", &slots, dev->err));
    g->slot = (struct load_slot *)slots;
    size_t bytes = (size_t)g->n_slot * g->slot_bytes;
    CU_TRY(dev, cudaMallocHost((void **)&g->pinned, bytes), "pinned memory of a load");
    CU_TRY(dev, cudaMalloc((void **)&g->raw, bytes), "staging memory of a load");
    CU_TRY(dev, cudaMalloc((void **)&g->found, sizeof *g->found), "staging memory of a load");
    for (int i = 0; i < g->n_slot; i++) {
        g->slot[i].pinned = g->pinned + (size_t)i * g->slot_bytes;
        g->slot[i].raw = g->raw + (size_t)i * g->slot_bytes;
        CU_TRY(dev, cudaEventCreateWithFlags(&g->slot[i].copied, cudaEventDisableTiming), "staging memory of a load");
    }
    return QL_OK;
}

ql_status ql_cuda_ring_open(ql_dev *dev, ql_pool *pool) {
    void *ring;
    ql_cuda_ring_close(dev);
    QL_TRY(ql_alloc(dev->mem, 1, sizeof(struct load_ring), "the ring of a load", &ring, dev->err));
    struct load_ring *g = cuda(dev)->ring = (struct load_ring *)ring;
    g->pool = pool;
    g->n_slot = pool ? 2 * ql_pool_threads(pool) + COPIES_IN_FLIGHT : RING_SLOTS;
    g->slot_bytes = pool ? SLOT_BYTES : SLOT_BYTES_ALONE;
    ql_status status = open_ring(dev, g);
    if (status != QL_OK) {
        ql_cuda_ring_close(dev);
    }
    return status;
}

/* ---- rows of a cut: on the pool's threads -------------------------------------------------------------------------- */

/* Row of the whole matrix that is row r of the cut. */
static int64_t source_row(const ql_weight_src *src, int64_t r) {
    int32_t i = 0;
    while (r >= src->row1[i] - src->row0[i]) {
        r -= src->row1[i] - src->row0[i];
        i++;
    }
    return src->row0[i] + r;
}

static bool read_file(struct load_slot *s, uint8_t *out, int64_t at, int64_t bytes) {
    if (!s->rows.file.fd) {
        memcpy(out, s->rows.data + at, (size_t)bytes);
        return true;
    }
    uint64_t from = s->rows.file.at + (uint64_t)at;
    while (bytes > 0) {
        ssize_t n = pread(s->rows.file.fd, out, (size_t)bytes, (off_t)from);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            s->error = n < 0 ? errno : END_OF_FILE;
            s->error_at = from;
            return false;
        }
        out += n;
        from += (uint64_t)n;
        bytes -= n;
    }
    return true;
}

/* Calls f(place in the file's tensor, place in the piece, bytes) for the longest runs that lie together in both. */
template <typename F> static bool each_run(const struct rows *w, F f) {
    for (int64_t r = w->r0; r < w->r1;) {
        int64_t row = source_row(w->src, r), n = 1;
        while (w->row_bytes == w->full && r + n < w->r1 && source_row(w->src, r + n) == row + n) {
            n++;
        }
        if (!f(row * w->full + w->col, (r - w->r0) * w->row_bytes, n * w->row_bytes)) {
            return false;
        }
        r += n;
    }
    return true;
}

static void read_job(ql_job *job) {
    struct load_slot *s = (struct load_slot *)job;
    each_run(&s->rows,
             [s](int64_t from, int64_t to, int64_t bytes) { return read_file(s, s->pinned + to, from, bytes); });
}

/* Compares the slot with the file, a cache's worth at a time. */
static void compare_job(ql_job *job) {
    struct load_slot *s = (struct load_slot *)job;
    s->same = each_run(&s->rows, [s](int64_t from, int64_t to, int64_t bytes) {
        uint8_t file[32 << 10];
        for (int64_t at = 0; at < bytes;) {
            int64_t n = bytes - at < (int64_t)sizeof file ? bytes - at : (int64_t)sizeof file;
            if (!read_file(s, file, from + at, n) || memcmp(file, s->pinned + to + at, (size_t)n) != 0) {
                return false;
            }
            at += n;
        }
        return true;
    });
}

/* ---- through the ring: on the lane's thread ------------------------------------------------------------------------ */

static ql_status check_read(ql_dev *dev, const struct load_slot *s) {
    if (s->error == 0) {
        return QL_OK;
    }
    return ql_fail(dev->err, QL_ERR_MODEL, "%s: cannot read its file at byte %llu: %s", s->rows.src->module,
                   (unsigned long long)s->error_at,
                   s->error == END_OF_FILE ? "the file has become shorter" : strerror(s->error));
}

/* Jobs read what their poster owns: none may be left. */
static void wait_all(struct load_ring *g) {
    for (int i = 0; i < g->n_slot; i++) {
        ql_pool_wait(g->pool, &g->slot[i].job);
    }
}

static ql_status prepare(ql_dev *dev, const struct rows *all, int64_t *step) {
    if (!cuda(dev)->ring) {
        QL_TRY(ql_cuda_ring_open(dev, NULL));
    }
    size_t slot_bytes = cuda(dev)->ring->slot_bytes;
    *step = (int64_t)slot_bytes / all->row_bytes / TILE_ROWS * TILE_ROWS;
    if (*step == 0) {
        return ql_fail(dev->err, QL_ERR_MODEL, "%s: rows of %lld bytes are longer than %zu", all->src->module,
                       (long long)all->row_bytes, slot_bytes / TILE_ROWS);
    }
    return QL_OK;
}

static void post(struct load_ring *g, struct load_slot *s, const struct rows *all, int64_t r0, int64_t step,
                 void (*run)(ql_job *)) {
    s->rows = *all;
    s->rows.r0 = r0;
    s->rows.r1 = r0 + step < all->r1 ? r0 + step : all->r1;
    s->error = 0;
    s->job.run = run;
    ql_pool_post(g->pool, &s->job);
}

/* Puts file bytes of rows [r0, r1), which lie on the device at `raw`, where they belong; row counts are multiples of 16
 * but the last. */
typedef ql_status (*place_fn)(ql_dev *dev, const ql_weight *w, const uint8_t *raw, int64_t r0, int64_t r1);

static ql_status stream_in(ql_dev *dev, const ql_weight *w, const struct rows *all, place_fn place) {
    struct cuda_dev *d = cuda(dev);
    int64_t step;
    QL_TRY(prepare(dev, all, &step));
    struct load_ring *g = d->ring;
    int64_t n = ceil_div(all->r1, step), ahead = g->pool ? g->n_slot - COPIES_IN_FLIGHT : 1;
    ql_status status = QL_OK;
    for (int64_t posted = 0, i = 0; i < n && status == QL_OK; i++) {
        for (; posted < n && posted < i + ahead; posted++) {
            struct load_slot *s = &g->slot[posted % g->n_slot];
            cudaError_t e = cudaEventSynchronize(s->copied);
            if (e != cudaSuccess) {
                status = ql_cuda_fail(dev, e, all->src->module);
                break;
            }
            post(g, s, all, posted * step, step, read_job);
        }
        struct load_slot *s = &g->slot[i % g->n_slot];
        if (status == QL_OK) {
            ql_pool_wait(g->pool, &s->job);
            ql_dev_count(&dev->progress, 1);
            status = check_read(dev, s);
        }
        if (status == QL_OK) {
            size_t bytes = (size_t)((s->rows.r1 - s->rows.r0) * all->row_bytes);
            cudaError_t e = cudaMemcpyAsync(s->raw, s->pinned, bytes, cudaMemcpyHostToDevice, d->stream);
            e = e == cudaSuccess ? cudaEventRecord(s->copied, d->stream) : e;
            status = e == cudaSuccess ? place(dev, w, s->raw, s->rows.r0, s->rows.r1)
                                      : ql_cuda_fail(dev, e, all->src->module);
            ql_dev_count(&dev->h2d_bytes, bytes);
        }
    }
    wait_all(g);
    return status;
}

/* The other way: `fetch` enqueues what leaves rows [r0, r1) as the file has them, on the device, and says where. */
typedef ql_status (*fetch_fn)(ql_dev *dev, const ql_weight *w, uint8_t *raw, int64_t r0, int64_t r1,
                              const uint8_t **from);

static ql_status fetch_slot(ql_dev *dev, const ql_weight *w, struct load_slot *s, int64_t row_bytes, int64_t r0,
                            int64_t r1, fetch_fn fetch) {
    const uint8_t *from;
    QL_TRY(fetch(dev, w, s->raw, r0, r1, &from));
    size_t bytes = (size_t)((r1 - r0) * row_bytes);
    CU_TRY(dev, cudaMemcpyAsync(s->pinned, from, bytes, cudaMemcpyDeviceToHost, cuda(dev)->stream),
           "reading weights back");
    CU_TRY(dev, cudaEventRecord(s->copied, cuda(dev)->stream), "reading weights back");
    ql_dev_count(&dev->d2h_bytes, bytes);
    return QL_OK;
}

/* Compares a whole cut with the file. */
static ql_status stream_back(ql_dev *dev, const ql_weight *w, const struct rows *all, fetch_fn fetch, bool *same) {
    int64_t step;
    QL_TRY(prepare(dev, all, &step));
    struct load_ring *g = cuda(dev)->ring;
    int64_t n = ceil_div(all->r1, step), ahead = g->pool ? COPIES_IN_FLIGHT : 1;
    ql_status status = QL_OK;
    *same = true;
    for (int64_t fetched = 0, i = 0; i < n && status == QL_OK; i++) {
        for (; fetched < n && fetched < i + ahead && status == QL_OK; fetched++) {
            struct load_slot *s = &g->slot[fetched % g->n_slot];
            int64_t r0 = fetched * step;
            if (fetched >= g->n_slot) {
                ql_pool_wait(g->pool, &s->job);
                *same = *same && s->same;
                status = check_read(dev, s);
            }
            if (status == QL_OK) {
                status = fetch_slot(dev, w, s, all->row_bytes, r0, r0 + step < all->r1 ? r0 + step : all->r1, fetch);
            }
        }
        struct load_slot *s = &g->slot[i % g->n_slot];
        if (status == QL_OK) {
            cudaError_t e = cudaEventSynchronize(s->copied);
            status = e == cudaSuccess ? QL_OK : ql_cuda_fail(dev, e, "reading weights back");
        }
        if (status == QL_OK) {
            ql_dev_count(&dev->progress, 1);
            post(g, s, all, i * step, step, compare_job);
        }
    }
    wait_all(g);
    for (int64_t i = n > g->n_slot ? n - g->n_slot : 0; i < n && status == QL_OK; i++) {
        const struct load_slot *s = &g->slot[i % g->n_slot];
        *same = *same && s->same;
        status = check_read(dev, s);
    }
    return status;
}

/* ---- codes --------------------------------------------------------------------------------------------------------- */

static struct rows code_rows(const ql_weight_src *src) {
    return rows{src,
                src->data,
                src->data_file,
                ql_qformat_row_bytes(src->format, src->full_k),
                ql_qformat_row_bytes(src->format, src->col0),
                ql_qformat_row_bytes(src->format, src->k),
                0,
                src->n};
}

static ql_status place_codes(ql_dev *dev, const ql_weight *w, const uint8_t *raw, int64_t r0, int64_t r1) {
    struct cuda_dev *d = cuda(dev);
    int64_t row_bytes = ql_qformat_row_bytes(w->format, w->k);
    if (is_plain(w->format)) {
        uint8_t *out = (uint8_t *)w->data + r0 * row_bytes;
        CU_TRY(dev, cudaMemcpyAsync(out, raw, (size_t)((r1 - r0) * row_bytes), cudaMemcpyDeviceToDevice, d->stream),
               "placing plain weights");
        int width = w->format == QL_FORMAT_F32 ? 4 : 2;
        uint32_t mask = w->format == QL_FORMAT_F32 ? 0x7f800000u : w->format == QL_FORMAT_F16 ? 0x7c00u : 0x7f80u;
        int64_t n = (r1 - r0) * w->k;
        check_plain<<<blocks_of(n) < 1024 ? blocks_of(n) : 1024, 256, 0, d->stream>>>(out, n, width, mask, r0 * w->k,
                                                                                      d->ring->found);
        return launched(dev, "check of plain weights");
    }
    if (w->records) {
        int64_t per_row = ceil_div(w->k, QL_Q8_RECORD), n = (r1 - r0) * per_row * (QL_Q8_RECORD / 8);
        record_codes<false><<<blocks_of(n), 256, 0, d->stream>>>(
            (uint8_t *)raw, (int)(r1 - r0), row_bytes, (int)per_row, (uint8_t *)w->data + r0 * ql_q8_row_bytes(w->k));
        return launched(dev, "repacking");
    }
    int64_t ct = col_tiles(w->format, w->k), n = row_tiles(r1 - r0) * ct * 32;
    repack_codes<<<blocks_of(n), 256, 0, d->stream>>>(raw, (int)(r1 - r0), row_bytes, w->format == QL_FORMAT_NVFP4,
                                                      (int)ct, (uint8_t *)w->data + r0 / TILE_ROWS * ct * TILE_BYTES,
                                                      r0, w->k, d->ring->found);
    return launched(dev, "repacking");
}

static ql_status fetch_codes(ql_dev *dev, const ql_weight *w, uint8_t *raw, int64_t r0, int64_t r1,
                             const uint8_t **from) {
    int64_t row_bytes = ql_qformat_row_bytes(w->format, w->k);
    if (is_plain(w->format)) {
        *from = (const uint8_t *)w->data + r0 * row_bytes;
        return QL_OK;
    }
    if (w->records) {
        int64_t per_row = ceil_div(w->k, QL_Q8_RECORD), n = (r1 - r0) * per_row * (QL_Q8_RECORD / 8);
        record_codes<true><<<blocks_of(n), 256, 0, cuda(dev)->stream>>>(
            raw, (int)(r1 - r0), row_bytes, (int)per_row, (uint8_t *)w->data + r0 * ql_q8_row_bytes(w->k));
        *from = raw;
        return launched(dev, "reading weights back");
    }
    int64_t ct = col_tiles(w->format, w->k), n = row_tiles(r1 - r0) * ct * 32;
    unpack_codes<<<blocks_of(n), 256, 0, cuda(dev)->stream>>>(
        (const uint8_t *)w->data + r0 / TILE_ROWS * ct * TILE_BYTES, (int)(r1 - r0), row_bytes,
        w->format == QL_FORMAT_NVFP4, (int)ct, raw);
    *from = raw;
    return launched(dev, "reading weights back");
}

/* ---- scales ---------------------------------------------------------------------------------------------------------- */

static struct rows scale_rows(const ql_weight_src *src) {
    return rows{src,
                src->scale,
                src->scale_file,
                src->full_k / QL_NVFP4_GROUP,
                src->col0 / QL_NVFP4_GROUP,
                src->k / QL_NVFP4_GROUP,
                0,
                src->n};
}

static ql_status place_scales(ql_dev *dev, const ql_weight *w, const uint8_t *raw, int64_t r0, int64_t r1) {
    if (w->records) {
        int64_t per_row = ceil_div(w->k, QL_Q8_RECORD), n = (r1 - r0) * per_row;
        record_scales<false><<<blocks_of(n), 256, 0, cuda(dev)->stream>>>(
            (uint8_t *)raw, (int)(r1 - r0), w->k / QL_NVFP4_GROUP, (int)per_row,
            (uint8_t *)w->data + r0 * ql_q8_row_bytes(w->k), cuda(dev)->ring->found);
        return launched(dev, "repacking of scales");
    }
    int64_t ct = col_tiles(w->format, w->k), n = row_tiles(r1 - r0) * ct * 32;
    repack_scales<<<blocks_of(n), 256, 0, cuda(dev)->stream>>>(
        raw, (int)(r1 - r0), w->k / QL_NVFP4_GROUP, (int)ct,
        (uint8_t *)w->scale + r0 / TILE_ROWS * ct * TILE_SCALE_BYTES, cuda(dev)->ring->found);
    return launched(dev, "repacking of scales");
}

static ql_status fetch_scales(ql_dev *dev, const ql_weight *w, uint8_t *raw, int64_t r0, int64_t r1,
                              const uint8_t **from) {
    if (w->records) {
        int64_t per_row = ceil_div(w->k, QL_Q8_RECORD), n = (r1 - r0) * per_row;
        record_scales<true>
            <<<blocks_of(n), 256, 0, cuda(dev)->stream>>>(raw, (int)(r1 - r0), w->k / QL_NVFP4_GROUP, (int)per_row,
                                                          (uint8_t *)w->data + r0 * ql_q8_row_bytes(w->k), NULL);
        *from = raw;
        return launched(dev, "reading scales back");
    }
    int64_t ct = col_tiles(w->format, w->k), n = row_tiles(r1 - r0) * ct * 32;
    unpack_scales<<<blocks_of(n), 256, 0, cuda(dev)->stream>>>((const uint8_t *)w->scale +
                                                                   r0 / TILE_ROWS * ct * TILE_SCALE_BYTES,
                                                               (int)(r1 - r0), w->k / QL_NVFP4_GROUP, (int)ct, raw);
    *from = raw;
    return launched(dev, "reading scales back");
}

static bool has_f32_scales(ql_qformat f) { return f == QL_FORMAT_FP8_CHANNEL || f == QL_FORMAT_FP8_BLOCK; }

/* FP8_CHANNEL and FP8_BLOCK: few; the host converts and checks them. Compares where `same` is not NULL, else loads. */
static ql_status f32_scales(ql_dev *dev, const ql_weight_src *src, ql_weight *w, bool *same) {
    void *want, *got = NULL;
    size_t bytes = (size_t)w->scale_bytes;
    QL_TRY(ql_alloc(dev->mem, bytes, 1, src->module, &want, dev->err));
    ql_status status = ql_weight_src_f32_scales(src, w, (float *)want, dev->err);
    if (status == QL_OK && !same) {
        status = ql_cuda_h2d(dev, w->scale, want, bytes);
    } else if (status == QL_OK) {
        status = ql_alloc(dev->mem, bytes, 1, src->module, &got, dev->err);
        status = status == QL_OK ? dev->ops->d2h(dev, got, w->scale, bytes) : status;
        status = status == QL_OK ? ql_cuda_sync(dev) : status;
        *same = status == QL_OK && memcmp(got, want, bytes) == 0;
    }
    ql_free(dev->mem, want);
    ql_free(dev->mem, got);
    return status;
}

/* ---- load ------------------------------------------------------------------------------------------------------------ */

static ql_status load(ql_dev *dev, const ql_weight_src *src, ql_weight *w) {
    struct cuda_dev *d = cuda(dev);
    if (!d->ring) {
        QL_TRY(ql_cuda_ring_open(dev, NULL));
    }
    clear_findings<<<1, 1, 0, d->stream>>>(d->ring->found);
    QL_TRY(launched(dev, "loading"));
    /* records hold their scales; padded rows and columns make the two layouts equally large */
    QL_TRY(ql_cuda_alloc(dev, (size_t)(w->weight_bytes + (w->records ? w->scale_bytes : 0)), src->module, &w->data));
    if (w->scale_bytes && !w->records) {
        QL_TRY(ql_cuda_alloc(dev, (size_t)w->scale_bytes, src->module, &w->scale));
    }
    struct rows codes = code_rows(src), scales = scale_rows(src);
    if (has_f32_scales(w->format)) {
        QL_TRY(f32_scales(dev, src, w, NULL));
    } else if (w->format == QL_FORMAT_NVFP4) {
        QL_TRY(stream_in(dev, w, &scales, place_scales));
    }
    QL_TRY(stream_in(dev, w, &codes, place_codes));
    struct findings found;
    QL_TRY(dev->ops->d2h(dev, &found, d->ring->found, sizeof found));
    QL_TRY(ql_cuda_sync(dev));
    if (w->format == QL_FORMAT_NVFP4) {
        QL_TRY(ql_weight_src_group_max(src, w, (uint8_t)found.most, dev->err));
    }
    if (found.bad != ~0ull) {
        return ql_weight_src_bad_code(src, source_row(src, (int64_t)(found.bad / (uint64_t)src->k)),
                                      src->col0 + (int64_t)(found.bad % (uint64_t)src->k), dev->err);
    }
    if (is_plain(w->format)) {
        ql_weight_src_plain_max(w, found.most);
    }
    return QL_OK;
}

ql_status ql_cuda_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    ql_weight w;
    QL_TRY(ql_weight_src_begin(src, &w, dev->err));
    w.records = src->records;
    if (w.format == QL_FORMAT_NVFP4 && !w.records && cuda(dev)->q8_kernel != Q8_AUTO) {
        return ql_fail(dev->err, QL_ERR_USAGE, "nvfp4=%s is a kernel of precision q8, and this is another precision",
                       ql_q8_kernel_names[cuda(dev)->q8_kernel]);
    }
    ql_cuda_weight_bytes(w.format, w.n, w.k, w.row_off, w.col_off, &w.weight_bytes, &w.scale_bytes);
    ql_status status = load(dev, src, &w);
    if (status != QL_OK) {
        ql_cuda_weight_free(dev, &w);
        return status;
    }
    *out = w;
    return QL_OK;
}

ql_status ql_cuda_weight_same(ql_dev *dev, const ql_weight *w, const ql_weight_src *src, const char **differs) {
    struct rows codes = code_rows(src), scales = scale_rows(src);
    bool same;
    *differs = NULL;
    QL_TRY(stream_back(dev, w, &codes, fetch_codes, &same));
    if (!same) {
        *differs = "codes";
        return QL_OK;
    }
    if (w->format == QL_FORMAT_NVFP4) {
        QL_TRY(stream_back(dev, w, &scales, fetch_scales, &same));
    } else if (has_f32_scales(w->format)) {
        ql_weight copy = *w;
        QL_TRY(f32_scales(dev, src, &copy, &same));
    }
    *differs = same ? NULL : "scales";
    return QL_OK;
}

ql_status ql_cuda_weight_crc(ql_dev *dev, const ql_weight *w, uint32_t *crc) {
    ql_weight_src src = {}; /* only its shape is asked for */
    src.module = "a weight";
    src.n = w->n;
    struct rows all = code_rows(&src);
    all.row_bytes = ql_qformat_row_bytes(w->format, w->k);
    int64_t step;
    QL_TRY(prepare(dev, &all, &step));
    struct load_slot *s = &cuda(dev)->ring->slot[0];
    uLong sum = crc32_z(0, NULL, 0);
    for (int64_t r = 0; r < w->n; r += step) {
        int64_t end = r + step < w->n ? r + step : w->n;
        ql_dev_count(&dev->progress, 1);
        QL_TRY(fetch_slot(dev, w, s, all.row_bytes, r, end, fetch_codes));
        QL_TRY(ql_cuda_sync(dev));
        sum = crc32_z(sum, s->pinned, (size_t)((end - r) * all.row_bytes));
    }
    *crc = (uint32_t)sum;
    return QL_OK;
}

void ql_cuda_weight_free(ql_dev *dev, ql_weight *w) {
    ql_cuda_free(dev, w->data);
    ql_cuda_free(dev, w->scale);
    *w = ql_weight{};
}
