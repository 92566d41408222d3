/* attention of generated rows: contract in attention.h.
 *
 * Keys and values are taken in chunks whose boundaries are fixed positions: 128 long up to position 16,384, then 512, from
 * 131,072 on 1024, so that generation at any context has enough independent work and partial results stay small. Chunks
 * are spread over blocks, which fetch the next steps of 64 KB while they work on one; a second kernel folds the chunks in a
 * fixed order.
 *
 * F16 and FP8 caches meet q on tensor cores (cuda/attention_mma.cuh), other caches use f32 FMA.
 *
 *   split_mma, split_fma   a block a kv head and chunk, 8 query heads at a time; split_mma may do attn_prep as well
 */
#include "kernels/cuda/attention_mma.cuh"

/* Floats of the partial result of a row, head and chunk: values, maximum, sum; [row][head][chunk] of them. */
enum { PART = D + 4 };

/* Block (x, kv head, row): chunks x, x + gridDim.x, .. */
template <int TYPE>
__global__ void __launch_bounds__(256)
    split_fma(ql_batch b, struct ql_attention_args a, struct ql_kv_cache c, int row0, int n_chunk, float *part) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct work_shared &x = *(struct work_shared *)raw;
    after_previous();
    int64_t row = row0 + blockIdx.z;
    int kv = blockIdx.y, pos = b.row_pos[row], h0, h1;
    if ((int)blockIdx.x > chunk_of(pos)) {
        return;
    }
    const int *page = b.page + (int64_t)b.row_seg[row] * b.max_page;
    heads_of(a, kv, &h0, &h1);
    for (; h0 < h1; h0 += HEADS) {
        int nh = min(HEADS, h1 - h0);
        load_q(x, a, row, h0, nh);
        for (int i = blockIdx.x; i <= chunk_of(pos); i += gridDim.x) {
            int begin = chunk_begin(i), n = min(chunk_begin(i + 1), pos + 1) - begin;
            float o[HEADS][2];
            do_chunk<TYPE>(x, c, page, kv, begin, n, o);
            if (threadIdx.x < 128) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    if (h < nh) {
                        float *to = part + (((int64_t)blockIdx.z * a.n_head + h0 + h) * n_chunk + i) * PART;
                        *(float2 *)(to + 2 * threadIdx.x) = make_float2(o[h][0], o[h][1]);
                        if (threadIdx.x == 0) {
                            *(float2 *)(to + D) = make_float2(x.max[h], x.sum[h]);
                        }
                    }
                }
            }
            __syncthreads();
        }
    }
}

/* ---- on tensor cores ---------------------------------------------------------------------------------------------- */

/* Running result of head g over the steps of a chunk, in order. */
struct chunk_result {
    float max = 0.0f, sum = 0.0f, o[4][2] = {};

    __device__ __forceinline__ void add(bool first, const struct step_result &r) {
        float top = first ? r.top : fmaxf(max, r.top);
        float old_part = first ? 0.0f : expf(max - top), new_part = expf(r.top - top);
        max = top;
        sum = fmaf(sum, old_part, r.sum * new_part);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                o[i][e] = fmaf(o[i][e], old_part, r.o[i][e] * new_part);
            }
        }
    }

    /* To the partial results of the head and chunk. */
    __device__ __forceinline__ void store(float *to) const {
        int warp = threadIdx.x >> 5, c = threadIdx.x & 3;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            *(float4 *)(to + 32 * warp + 4 * (2 * c + e)) = make_float4(o[0][e], o[1][e], o[2][e], o[3][e]);
        }
        if (warp == 0 && c == 0) {
            *(float2 *)(to + D) = make_float2(max, sum);
        }
    }
};

/* A block's way through its chunks, a step at a time: chunks i, i + stride, .. up to the one of `pos`. */
struct walk {
    int chunk, at, end; /* positions [at, end) of the chunk are left */

    __device__ __forceinline__ void enter(int i, int pos) {
        chunk = i;
        int begin = chunk_begin(i);
        at = begin <= pos ? begin : 0;
        end = begin <= pos ? min(chunk_begin(i + 1), pos + 1) : 0;
    }
    __device__ __forceinline__ bool more() const { return at < end; }
    __device__ __forceinline__ void advance(int step, int stride, int pos) {
        at += step;
        if (at >= end) {
            enter(chunk + stride, pos);
        }
    }
};

/* SLOTS steps are in shared memory. */
template <int TYPE, int SLOTS> struct mma_shared {
    struct step_slot<TYPE> slot[SLOTS];
    struct step_work<TYPE> work;
};
template <int TYPE, int SLOTS> struct prep_shared {
    struct mma_shared<TYPE, SLOTS> all;
    struct own_rows<TYPE> own;
};

/* Block (x, kv head, row): chunks x, x + gridDim.x, .. PREP: of at most QL_SHORT_ROWS rows and HEADS heads, with what attn_prep does. */
template <int TYPE, int SLOTS, bool PREP>
__global__ void __launch_bounds__(256, 1) split_mma(ql_batch b, struct ql_attention_args a, struct ql_kv_cache cache,
                                                    int row0, int n_chunk, float *part, struct ql_attn_prep_args prep) {
    typedef step_form<TYPE> form;
    constexpr int STEP = form::STEP, ROW = form::ROW;
    extern __shared__ __align__(16) unsigned char raw[];
    struct mma_shared<TYPE, SLOTS> &sh = *(struct mma_shared<TYPE, SLOTS> *)raw;
    struct own_rows<TYPE> &own = ((struct prep_shared<TYPE, SLOTS> *)raw)->own; /* PREP alone */
    allow_next();
    int64_t row = row0 + blockIdx.z;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2;
    struct row_place here(b, (int)row);
    int kv = blockIdx.y, pos = here.pos, h0, h1;
    int piece = tid % (ROW / 16), to_k = k_piece<TYPE>(tid / (ROW / 16), piece),
        to_v = v_piece(tid / (ROW / 16), piece);
    auto fetch = [&](int slot, const struct walk &w) {
        auto &to = sh.slot[slot];
#pragma unroll
        for (int j = 0; j < form::PAGES; j++) {
            int at = w.at + j * QL_PAGE;
            if (at < w.end) {
                int64_t base = cache_row(here.page[at / QL_PAGE], cache.n_kv_head, kv, 0);
                const uint8_t *k = (const uint8_t *)cache.k + base * form::BYTES,
                              *v = (const uint8_t *)cache.v + base * form::BYTES;
                int old = PREP ? here.pos0 : w.end; /* from there on own rows */
                fetch_page<TYPE>(to.k[j * QL_PAGE], k, to_k, piece, w.end - at, PREP ? old - at : QL_PAGE);
                fetch_page<TYPE>(to.v[j * QL_PAGE], v, to_v, piece, w.end - at, PREP ? old - at : QL_PAGE);
                fetch_scales<TYPE>(to, j, cache, base, at, min(old, w.end));
            }
        }
    };
    struct walk now, ahead;
    auto begin = [&] {
        now.enter(blockIdx.x, pos);
        ahead = now;
        for (int i = 0; i < SLOTS - 1; i++) {
            if (ahead.more()) {
                fetch(i, ahead);
                ahead.advance(STEP, gridDim.x, pos);
            }
            commit_async();
        }
    };
    if (PREP) {
        begin(); /* keys and values of earlier steps, which no kernel of this one writes */
    }
    wait_previous();
    if ((int)blockIdx.x > chunk_of(pos)) {
        return;
    }
    heads_of(a, kv, &h0, &h1);
    do {
        int nh = max(min(HEADS, h1 - h0), 0), slot = 0;
        if (PREP) {
            struct prep_item it;
            if (warp < n_items(here, nh)) {
                it.load(prep, cache.n_kv_head, here, kv, h0, nh, warp);
            }
            prepare_rows<TYPE>(sh.work, own, it, prep, cache, here, kv, h0, nh,
                               chunk_of(pos) % (int)gridDim.x == (int)blockIdx.x);
        } else {
            __syncthreads(); /* slots and q have been read */
            begin();
            const float4 *from = (const float4 *)(a.q + (row * a.n_head + h0 + warp) * D);
            float4 zero = make_float4(0, 0, 0, 0);
            put_q(sh.work, warp, warp < nh ? from[lane] : zero, warp < nh ? from[32 + lane] : zero, lane);
        }
        __syncthreads();
        uint32_t q[16][4];
        take_q(sh.work, q);
        float back = sh.work.back[g];
        bool first = true;
        struct chunk_result run;
        while (now.more()) {
            int n = now.end - now.at, chunk = now.chunk; /* positions from here on */
            if (SLOTS == 1) {
                __syncthreads();
                fetch(0, now);
                commit_async();
                wait_async<0>();
            } else {
                wait_async<(SLOTS > 1 ? SLOTS - 2 : 0)>();
            }
            if (PREP) {
                put_own<TYPE>(sh.slot[slot], own, here, now.at, now.end);
            }
            __syncthreads(); /* the step is there; the one before it has been used */
            if (SLOTS > 1) {
                if (ahead.more()) {
                    fetch((slot + SLOTS - 1) % SLOTS, ahead);
                    ahead.advance(STEP, gridDim.x, pos);
                }
                commit_async();
            }
            run.add(first, do_step<TYPE>(sh.work, sh.slot[slot], q, back, n, [] {}));
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            now.advance(STEP, gridDim.x, pos);
            first = now.chunk != chunk;
            if (first && g < nh) { /* the chunk is complete */
                run.store(part + (((int64_t)blockIdx.z * a.n_head + h0 + g) * n_chunk + chunk) * PART);
            }
        }
        h0 += HEADS;
    } while (!PREP && h0 < h1);
}

/* ---- folding ------------------------------------------------------------------------------------------------------ */

/* Block (head, row). Folder f adds up chunks f, f + 8, .. in rising order, weighted for the largest maximum; the folders'
 * sums are added in order. Thread 64 f + t has channels 4 t .. 4 t + 3. */
__global__ void __launch_bounds__(64 * FOLDERS)
    fold_kernel(ql_batch b, struct ql_attention_args a, int row0, int n_chunk, const float *part) {
    __shared__ float4 sums[FOLDERS][64];
    __shared__ float max[2 * FOLDERS], total[FOLDERS];
    after_previous();
    int64_t row = row0 + blockIdx.y;
    int h = blockIdx.x, last = chunk_of(b.row_pos[row]), t = threadIdx.x & 63, f = threadIdx.x >> 6;
    const float *from = part + ((int64_t)blockIdx.y * a.n_head + h) * n_chunk * PART;
    float top = -INFINITY;
    for (int i = threadIdx.x; i <= last; i += 64 * FOLDERS) {
        top = fmaxf(top, from[(int64_t)i * PART + D]);
    }
    top = warp_max(top);
    if ((threadIdx.x & 31) == 0) {
        max[threadIdx.x >> 5] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * FOLDERS; i++) {
        top = fmaxf(top, max[i]);
    }
    float4 o = make_float4(0, 0, 0, 0);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = f; i <= last; i += FOLDERS) {
        float4 v = *(const float4 *)(from + (int64_t)i * PART + 4 * t);
        float2 ms = *(const float2 *)(from + (int64_t)i * PART + D);
        float w = expf(ms.x - top);
        sum = fmaf(ms.y, w, sum);
        o.x = fmaf(v.x, w, o.x);
        o.y = fmaf(v.y, w, o.y);
        o.z = fmaf(v.z, w, o.z);
        o.w = fmaf(v.w, w, o.w);
    }
    sums[f][t] = o;
    if (t == 0) {
        total[f] = sum;
    }
    __syncthreads();
    if (f == 0) {
#pragma unroll
        for (int i = 1; i < FOLDERS; i++) {
            float4 v = sums[i][t];
            o.x += v.x;
            o.y += v.y;
            o.z += v.z;
            o.w += v.w;
            sum += total[i];
        }
        float4 gate = *(const float4 *)(a.qg + (row * a.n_head + h) * 2 * D + D + 4 * t);
        *(float4 *)(a.o + (row * a.n_head + h) * D + 4 * t) =
            make_float4((o.x / sum) * sigmoid(gate.x), (o.y / sum) * sigmoid(gate.y), (o.z / sum) * sigmoid(gate.z),
                        (o.w / sum) * sigmoid(gate.w));
    }
}

/* Generated rows whose chunks are spread over blocks at a time. */
enum { SPLIT_ROWS = 16 };

static size_t part_bytes(int64_t rows, int64_t n_head, int64_t n_chunk) {
    return (size_t)(rows * n_head * n_chunk) * PART * sizeof(float);
}

size_t ql_attention_cuda_scratch(const ql_shape *shape) {
    int64_t rows = shape->max_row < SPLIT_ROWS ? shape->max_row : SPLIT_ROWS;
    return shape->max_ctx > 0 ? part_bytes(rows, shape->n_head, chunk_of(shape->max_ctx - 1) + 1) : 0;
}

template <int TYPE, int SLOTS, bool PREP>
static ql_status split_on_tensor_cores(ql_dev *dev, const ql_attention_args *a, const ql_attn_prep_args *prep,
                                       dim3 grid, int row0, int n_chunk) {
    size_t bytes = PREP ? sizeof(prep_shared<TYPE, SLOTS>) : sizeof(mma_shared<TYPE, SLOTS>);
    static_assert(sizeof(prep_shared<TYPE, SLOTS>) <= 227 * 1024, "what a block may have");
    return launch(dev, "attention", split_mma<TYPE, SLOTS, PREP>, grid, 256, bytes, *a->batch, *a, *a->cache, row0,
                  n_chunk, (float *)dev->scratch, PREP ? *prep : ql_attn_prep_args{});
}

/* Three steps of 64 KB where a block may have 227 KB of shared memory, one elsewhere; before compute capability 8.0 not
 * even that. With `prep`: attn_prep too. */
template <int TYPE>
static ql_status split(ql_dev *dev, const ql_attention_args *a, const ql_attn_prep_args *prep, dim3 grid, int row0,
                       int n_chunk) {
    if constexpr (TYPE == QL_KV_F16 || TYPE == QL_KV_FP8) {
        int cc = cuda(dev)->cc;
        if (prep) {
            return split_on_tensor_cores<TYPE, 3, true>(dev, a, prep, grid, row0, n_chunk);
        }
        if (cc == 90 || cc == 100 || cc == 103) {
            return split_on_tensor_cores<TYPE, 3, false>(dev, a, prep, grid, row0, n_chunk);
        }
        if (cc >= 80) {
            return split_on_tensor_cores<TYPE, 1, false>(dev, a, prep, grid, row0, n_chunk);
        }
    }
    return launch(dev, "attention", split_fma<TYPE>, grid, 256, sizeof(struct work_shared), *a->batch, *a, *a->cache,
                  row0, n_chunk, (float *)dev->scratch);
}

template <int TYPE> static ql_status run(ql_dev *dev, const ql_attention_args *a, const ql_attn_prep_args *prep) {
    const ql_batch *b = a->batch;
    const ql_kv_cache *c = a->cache;
    int n_chunk = chunk_of(b->max_page * QL_PAGE - 1) + 1;
    int64_t fit = (int64_t)(dev->scratch_bytes / part_bytes(1, a->n_head, n_chunk));
    if (fit < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "attention: scratch is %zu bytes, %d pages need %zu",
                       dev->scratch_bytes, b->max_page, part_bytes(1, a->n_head, n_chunk));
    }
    int most = fit < SPLIT_ROWS ? (int)fit : SPLIT_ROWS;
    for (int r = 0; r < b->n_row; r += most) {
        int rows = b->n_row - r < most ? b->n_row - r : most;
        int spread = (int)ceil_div(cuda(dev)->n_sm, (int64_t)rows * c->n_kv_head);
        spread = spread < n_chunk ? spread : n_chunk;
        dim3 grid((unsigned)spread, (unsigned)c->n_kv_head, (unsigned)rows);
        QL_TRY(split<TYPE>(dev, a, prep, grid, r, n_chunk));
        QL_TRY(launch(dev, "attention: fold", fold_kernel, dim3((unsigned)a->n_head, (unsigned)rows), 64 * FOLDERS, 0,
                      *b, *a, r, n_chunk, (const float *)dev->scratch));
    }
    return QL_OK;
}

ql_status ql_attention_gen_cuda(ql_dev *dev, const ql_attention_args *a, const ql_attn_prep_args *prep) {
    switch (a->cache->type) {
    case QL_KV_F32: return run<QL_KV_F32>(dev, a, NULL);
    case QL_KV_BF16: return run<QL_KV_BF16>(dev, a, NULL);
    case QL_KV_FP8: return run<QL_KV_FP8>(dev, a, prep);
    default: return run<QL_KV_F16>(dev, a, prep);
    }
}
