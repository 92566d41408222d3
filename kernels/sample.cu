/* topk and sample on the device: contracts in sample.h.
 *
 * topk in two kernels. The first takes pieces of 2048 ids that do not cross a canonical range: each piece's maximum and
 * sum of exponentials, and its best ids in order. A candidate is one 64-bit number, key above id, so that all differ and
 * a larger one is better. In the second kernel the rank of a candidate among all pieces is its place in its own piece
 * plus the number of better ones in each other piece, found by bisection; no order of arrival can matter.
 */
#include "kernels/cuda/dev.cuh"

enum { PIECE = 2048, THREADS = 256, HEADS = 512 /* pieces whose best are compared first */ };

/* Scratch of a candidate of sample: 8 bytes of weight and 12 of candidate, rounded so that rows stay aligned. */
enum { SAMPLE_BYTES = 24 };

/* ---- topk -------------------------------------------------------------------------------------------------------- */

/* Pieces of the ids [vocab0, vocab0 + n): ranges first .. first + n_range - 1 of 8, `per_range` pieces each. */
struct pieces {
    int first, n_range, per_range;
};

static __host__ __device__ __forceinline__ int range_begin(int vocab, int i) {
    return (int)((int64_t)vocab * i / QL_STAT_RANGES);
}

/* Falls as the key falls; 0 stands for no candidate. */
__device__ __forceinline__ uint64_t rank_of(float key, int id) {
    uint32_t u = __float_as_uint(key + 0.0f); /* -0 and +0 tie */
    u ^= u >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)u << 32 | (uint32_t)~id;
}

__device__ __forceinline__ bool is_allowed(const struct ql_topk_args &a, int id) {
    return id < a.n_valid && (!a.allowed || (a.allowed[id / 32] >> (id % 32) & 1));
}

/* First entry of the row's penalty list with an id of at least `id`. */
__device__ __forceinline__ int find_penalty(const struct ql_penalty *p, int n, int id) {
    int lo = 0, hi = n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (p[mid].id < id) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

__device__ __forceinline__ float penalised(const struct ql_sample_row &row, const struct ql_penalty &p, float raw) {
    float key = raw > 0 ? raw / row.repetition : raw * row.repetition;
    if (p.count > 0) {
        key = __fsub_rn(key, row.presence);
        key = __fsub_rn(key, __fmul_rn(row.frequency, (float)p.count));
    }
    return key;
}

__device__ __forceinline__ uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Sorts n numbers, a power of two, best first. All threads. */
__device__ void sort_keys(uint64_t *keys, int n) {
    __syncthreads();
    for (int size = 2; size <= n; size *= 2) {
        for (int d = size / 2; d; d /= 2) {
            for (int i = threadIdx.x; i < n / 2; i += THREADS) {
                int lo = 2 * i - (i & (d - 1)), hi = lo + d;
                uint64_t x = keys[lo], y = keys[hi];
                if ((x < y) == ((lo & size) == 0)) {
                    keys[lo] = y;
                    keys[hi] = x;
                }
            }
            __syncthreads();
        }
    }
}

/* Block (piece, row). `stride` entries of `best` a piece. */
__global__ void __launch_bounds__(THREADS)
    pieces_kernel(struct ql_topk_args a, struct pieces ps, int row0, int stride, uint64_t *best, float2 *stat) {
    __shared__ uint64_t keys[PIECE];
    __shared__ float part[THREADS / 32];
    after_previous();
    int tid = threadIdx.x, piece = blockIdx.x, r = row0 + blockIdx.y;
    int range = ps.first + piece / ps.per_range, sub = piece % ps.per_range;
    int begin = range_begin(a.vocab, range) + sub * PIECE, end = min(begin + PIECE, range_begin(a.vocab, range + 1));
    int n = max(end - begin, 0);
    const float *logits = a.logits + r * a.ld + (begin - a.vocab0);
    struct ql_sample_row row = a.row[r];
    const struct ql_penalty *penalty = a.penalty + row.penalty0;

    float v[PIECE / THREADS], most = -INFINITY, sum = 0.0f, base;
#pragma unroll
    for (int i = 0; i < PIECE / THREADS; i++) {
        int at = i * THREADS + tid;
        v[i] = at < n ? logits[at] : -INFINITY;
        most = fmaxf(most, v[i]);
    }
    most = warp_max(most);
    if ((tid & 31) == 0) {
        part[tid >> 5] = most;
    }
    __syncthreads();
    most = part[0];
    for (int i = 1; i < THREADS / 32; i++) {
        most = fmaxf(most, part[i]);
    }
    base = most == -INFINITY ? 0.0f : most; /* a piece of -inf alone counts nothing */
#pragma unroll
    for (int i = 0; i < PIECE / THREADS; i++) {
        int at = i * THREADS + tid;
        sum += at < n ? expf(v[i] - base) : 0.0f;
        keys[at] = at < n && v[i] == v[i] && is_allowed(a, begin + at) ? rank_of(v[i], begin + at) : 0;
    }
    sum = block_sum(sum, part, THREADS / 32);
    if (tid == 0) {
        stat[(int64_t)blockIdx.y * gridDim.x + piece] = make_float2(most, sum);
    }
    __syncthreads();
    if (row.n_penalty > 0) {
        int p0 = find_penalty(penalty, row.n_penalty, begin), p1 = find_penalty(penalty, row.n_penalty, begin + n);
        for (int i = p0 + tid; i < p1; i += THREADS) {
            int at = penalty[i].id - begin;
            if (keys[at]) {
                float key = penalised(row, penalty[i], logits[at]);
                keys[at] = key == key ? rank_of(key, begin + at) : 0;
            }
        }
        __syncthreads();
    }
    uint64_t *to = best + ((int64_t)blockIdx.y * gridDim.x + piece) * stride;
    if (row.k == 1) {
        uint64_t top = 0;
        for (int i = tid; i < PIECE; i += THREADS) {
            top = max_u64(top, keys[i]);
        }
#pragma unroll
        for (int d = 16; d; d >>= 1) {
            top = max_u64(top, __shfl_xor_sync(0xffffffffu, top, d));
        }
        __shared__ uint64_t tops[THREADS / 32];
        if ((tid & 31) == 0) {
            tops[tid >> 5] = top;
        }
        __syncthreads();
        if (tid == 0) {
            for (int i = 0; i < THREADS / 32; i++) {
                top = max_u64(top, tops[i]);
            }
            to[0] = top;
        }
        return;
    }
    int count = PIECE;
    if (row.k <= THREADS) {
        /* The k-th best of the threads' best is a bound: at least k ids reach it, at most 8 k. Those alone are sorted. */
        uint64_t own[PIECE / THREADS], top = 0;
#pragma unroll
        for (int i = 0; i < PIECE / THREADS; i++) {
            own[i] = keys[i * THREADS + tid];
            top = max_u64(top, own[i]);
        }
        __shared__ int n_kept;
        __syncthreads();
        keys[tid] = top;
        if (tid == 0) {
            n_kept = 0;
        }
        sort_keys(keys, THREADS);
        uint64_t bound = max_u64(keys[row.k - 1], 1);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIECE / THREADS; i++) {
            if (own[i] >= bound) {
                keys[atomicAdd(&n_kept, 1)] = own[i];
            }
        }
        __syncthreads();
        for (count = 32; count < n_kept; count *= 2) {
        }
        for (int i = n_kept + tid; i < max(count, row.k); i += THREADS) {
            keys[i] = 0;
        }
    }
    sort_keys(keys, count);
    for (int i = tid; i < min(row.k, stride); i += THREADS) {
        to[i] = keys[i];
    }
}

/* Entries of a sorted list that are better than `key`. */
__device__ __forceinline__ int better(const uint64_t *list, int n, uint64_t key) {
    int lo = 0, hi = n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (list[mid] > key) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* Block (piece, row): places the piece's candidates; the first blocks also finish the ranges' statistics. */
__global__ void __launch_bounds__(THREADS) place_kernel(struct ql_topk_args a, struct pieces ps, int row0, int stride,
                                                        const uint64_t *best, const float2 *stat) {
    __shared__ int rank[THREADS];
    __shared__ uint64_t heads[HEADS];
    after_previous();
    int tid = threadIdx.x, n_piece = gridDim.x, piece = blockIdx.x, r = row0 + blockIdx.y;
    struct ql_sample_row row = a.row[r];
    struct ql_candidate *cand = a.cand + (int64_t)r * a.k_cap;
    const uint64_t *lists = best + (int64_t)blockIdx.y * n_piece * stride, *own = lists + (int64_t)piece * stride;
    int len = min(row.k, stride);
    /* The k-th best of the pieces' best is a bound: what is below it has at least k better ones. */
    uint64_t bound = 1;
    if (row.k > 1 && row.k <= n_piece && n_piece <= HEADS) {
        int size = 32;
        for (; size < n_piece; size *= 2) {
        }
        for (int i = tid; i < size; i += THREADS) {
            heads[i] = i < n_piece ? lists[(int64_t)i * stride] : 0;
        }
        sort_keys(heads, size);
        bound = max_u64(heads[row.k - 1], 1);
    }
    /* a few candidates at a time, each with all pieces spread over the threads */
    int group = max(1, min(THREADS, THREADS / n_piece)), first;
    for (first = 0; first < len && own[first] >= bound; first += group) {
        int count = min(group, len - first);
        if (tid < count) {
            rank[tid] = first + tid;
        }
        __syncthreads();
        for (int i = tid; i < count * n_piece; i += THREADS) {
            int c = i / n_piece, other = i % n_piece;
            uint64_t key = own[first + c];
            if (other != piece && key) {
                int n = better(lists + (int64_t)other * stride, len, key);
                if (n) {
                    atomicAdd(&rank[c], n);
                }
            }
        }
        __syncthreads();
        if (tid < count && own[first + tid] && rank[tid] < row.k) {
            int id = (int)~(uint32_t)own[first + tid];
            float raw = a.logits[r * a.ld + (id - a.vocab0)], key = raw;
            if (row.n_penalty > 0) {
                const struct ql_penalty *penalty = a.penalty + row.penalty0;
                int p = find_penalty(penalty, row.n_penalty, id);
                key = p < row.n_penalty && penalty[p].id == id ? penalised(row, penalty[p], raw) : raw;
            }
            cand[rank[tid]] = ql_candidate{key, raw, id};
        }
        __syncthreads();
    }
    if (piece == 0) { /* places that no candidate takes */
        if (tid == 0) {
            rank[0] = 0;
        }
        __syncthreads();
        for (int i = tid; i < n_piece; i += THREADS) {
            atomicAdd(&rank[0], better(lists + (int64_t)i * stride, len, 0));
        }
        __syncthreads();
        for (int i = rank[0] + tid; i < row.k; i += THREADS) {
            cand[i] = ql_candidate{0.0f, 0.0f, -1};
        }
    }
    if (piece < ps.n_range && tid == 0) {
        const float2 *s = stat + (int64_t)blockIdx.y * n_piece + piece * ps.per_range;
        float most = -INFINITY;
        double sum = 0.0;
        for (int i = 0; i < ps.per_range; i++) {
            most = fmaxf(most, s[i].x);
        }
        for (int i = 0; i < ps.per_range; i++) {
            sum += s[i].y != 0.0f ? (double)s[i].y * (double)expf(s[i].x - most) : 0.0;
        }
        a.stat[(int64_t)r * ps.n_range + piece] = ql_vocab_stat{most, (float)sum};
    }
}

static int pieces_of(int vocab) { return (int)ceil_div(ceil_div(vocab, QL_STAT_RANGES), PIECE); }

/* Scratch of one row. */
static size_t topk_row_bytes(int64_t n_piece, int64_t stride) {
    return round_256((size_t)n_piece * sizeof(float2)) + round_256((size_t)(n_piece * stride) * sizeof(uint64_t));
}

size_t ql_topk_cuda_scratch(const ql_shape *shape) {
    /* Most candidates that are asked for in practice; more go in fewer rows at a time. A row may want all ids. */
    int64_t n_piece = (int64_t)QL_STAT_RANGES * pieces_of(shape->vocab);
    size_t all = topk_row_bytes(n_piece, PIECE), sample = (size_t)(shape->vocab + QL_STAT_RANGES) * SAMPLE_BYTES;
    return (size_t)shape->max_out * topk_row_bytes(n_piece, 256) + (all > sample ? all : sample);
}

ql_status ql_topk_cuda(ql_dev *dev, const ql_topk_args *a) {
    struct pieces ps = {0, 0, pieces_of(a->vocab)};
    while (ps.first < QL_STAT_RANGES && range_begin(a->vocab, ps.first) != a->vocab0) {
        ps.first++;
    }
    while (ps.first + ps.n_range < QL_STAT_RANGES && range_begin(a->vocab, ps.first + ps.n_range) != a->vocab0 + a->n) {
        ps.n_range++;
    }
    if (a->vocab < QL_STAT_RANGES || ps.n_range == 0 ||
        range_begin(a->vocab, ps.first + ps.n_range) != a->vocab0 + a->n) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "topk: ids %d to %d are no whole ranges of a vocabulary of %d",
                       a->vocab0, a->vocab0 + a->n - 1, a->vocab);
    }
    int n_piece = ps.n_range * ps.per_range, stride = a->k_cap < PIECE ? a->k_cap : PIECE;
    size_t row_bytes = topk_row_bytes(n_piece, stride);
    int64_t fit = (int64_t)(dev->scratch_bytes / row_bytes);
    if (fit < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "topk: scratch is %zu bytes, a row needs %zu", dev->scratch_bytes,
                       row_bytes);
    }
    for (int r = 0; r < a->n_row;) {
        int rows = a->n_row - r < fit ? a->n_row - r : (int)fit;
        float2 *stat = (float2 *)dev->scratch;
        uint64_t *best = (uint64_t *)((uint8_t *)dev->scratch + round_256((size_t)rows * n_piece * sizeof(float2)));
        dim3 grid((unsigned)n_piece, (unsigned)rows);
        QL_TRY(launch(dev, "topk", pieces_kernel, grid, THREADS, 0, *a, ps, r, stride, best, stat));
        QL_TRY(launch(dev, "topk: order", place_kernel, grid, THREADS, 0, *a, ps, r, stride, (const uint64_t *)best,
                      (const float2 *)stat));
        r += rows;
    }
    return QL_OK;
}

/* ---- sample ------------------------------------------------------------------------------------------------------ */

/* The draw of ql_uniform. */
__device__ float uniform_of(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return (float)(z >> 40) * 0x1p-24f;
}

enum { SAMPLE_THREADS = 128, KEPT = 1024 }; /* candidates that fit in shared memory; more lie in scratch */

__device__ __forceinline__ const struct ql_candidate *candidates(const struct ql_sample_args &a, int lane, int r) {
    return a.cand + ((int64_t)lane * a.n_row + r) * a.k_cap;
}

__device__ __forceinline__ bool is_better(const struct ql_candidate &a, const struct ql_candidate &b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}

/* Place of a lane's candidate `at` among all lanes'. Lists are sorted and end with id -1. */
__device__ int place_of(const struct ql_sample_args &a, int r, int k, int lane, int at) {
    struct ql_candidate own = candidates(a, lane, r)[at];
    int place = at;
    for (int i = 0; i < a.n_lane; i++) {
        const struct ql_candidate *list = candidates(a, i, r);
        int lo = 0, hi = i == lane ? 0 : k;
        while (lo < hi) {
            int mid = (lo + hi) / 2;
            if (list[mid].id >= 0 && is_better(list[mid], own)) {
                lo = mid + 1;
            } else {
                hi = mid;
            }
        }
        place += lo;
    }
    return place;
}

__device__ double weight_of(const struct ql_candidate &c, float best_key, float temperature) {
    return exp(((double)c.key - (double)best_key) / (double)temperature);
}

/* The choice among candidates w[0 .. n), which weigh as given, best first. */
__device__ int draw(const struct ql_sample_row &row, const double *w, int n) {
    /* Weights fall with rank: top_p and min_p both keep a prefix. */
    double total = 0, kept = 0, sum = 0;
    for (int i = 0; i < n; i++) {
        total += w[i];
    }
    int n_kept = 0;
    for (; n_kept < n; n_kept++) {
        if (n_kept > 0 && ((row.top_p < 1 && kept >= (double)row.top_p * total) || w[n_kept] < (double)row.min_p)) {
            break;
        }
        kept += w[n_kept];
    }
    double limit = (double)uniform_of(row.seed, row.counter) * kept;
    for (int i = 0; i < n_kept; i++) {
        sum += w[i];
        if (sum > limit) {
            return i;
        }
    }
    return 0; /* keys that are no numbers: greedy */
}

__device__ float logprob_of(const struct ql_sample_args &a, int r, float raw) {
    int n_range = QL_STAT_RANGES / a.n_lane;
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < QL_STAT_RANGES; i++) {
        double m = (double)a.stat[((int64_t)(i / n_range) * a.n_row + r) * n_range + i % n_range].max;
        most = m > most ? m : most;
    }
    for (int i = 0; i < QL_STAT_RANGES; i++) {
        struct ql_vocab_stat s = a.stat[((int64_t)(i / n_range) * a.n_row + r) * n_range + i % n_range];
        sum += (double)s.sum_exp * exp((double)s.max - most);
    }
    return (float)((double)raw - (most + log(sum)));
}

/* A block a row. big: room for all lanes' weights and candidates of a row, where they may be more than KEPT. */
__global__ void __launch_bounds__(SAMPLE_THREADS) sample_kernel(struct ql_sample_args a, int row0, uint8_t *big) {
    __shared__ struct ql_candidate some[KEPT];
    __shared__ double some_weights[KEPT];
    __shared__ int total;
    after_previous();
    int r = row0 + blockIdx.x, tid = threadIdx.x;
    struct ql_sample_row row = a.row[r];
    /* Greedy rows need the best alone; the others the best top_k, or all where that is 0 or more. */
    int n_cand = a.n_lane * row.k, want = row.temperature <= 0 ? 1 : row.top_k > 0 ? min(row.top_k, n_cand) : n_cand;
    double *weight = some_weights;
    struct ql_candidate *kept = some;
    if (want > KEPT) {
        weight = (double *)(big + (int64_t)blockIdx.x * a.n_lane * a.k_cap * SAMPLE_BYTES);
        kept = (struct ql_candidate *)(weight + a.n_lane * a.k_cap);
    }
    if (tid == 0) {
        total = 0;
    }
    __syncthreads();
    for (int i = tid; i < n_cand; i += SAMPLE_THREADS) {
        struct ql_candidate c = candidates(a, i / row.k, r)[i % row.k];
        if (c.id >= 0 && i % row.k < want) {
            int at = place_of(a, r, row.k, i / row.k, i % row.k);
            if (at < want) {
                kept[at] = c;
                atomicAdd(&total, 1);
            }
        }
    }
    __syncthreads();
    int n = total;
    for (int i = tid; i < n; i += SAMPLE_THREADS) {
        weight[i] = weight_of(kept[i], kept[0].key, row.temperature);
    }
    __syncthreads();
    if (tid == 0) {
        struct ql_candidate c = {0.0f, 0.0f, -1};
        if (n > 0) {
            c = kept[row.temperature <= 0 ? 0 : draw(row, weight, n)];
        }
        a.id[r] = c.id;
        a.logprob[r] = n > 0 ? logprob_of(a, r, c.raw) : -INFINITY;
    }
}

ql_status ql_sample_cuda(ql_dev *dev, const ql_sample_args *a) {
    if (a->n_lane < 1 || QL_STAT_RANGES % a->n_lane) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "sample: %d lanes do not divide %d ranges", a->n_lane,
                       QL_STAT_RANGES);
    }
    if (a->n_row == 0) {
        return QL_OK;
    }
    int64_t most = (int64_t)a->n_lane * a->k_cap, row_bytes = most > KEPT ? most * SAMPLE_BYTES : 0;
    int64_t fit = row_bytes ? (int64_t)dev->scratch_bytes / row_bytes : a->n_row;
    if (fit < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "sample: scratch is %zu bytes, %lld candidates need %lld",
                       dev->scratch_bytes, (long long)most, (long long)row_bytes);
    }
    for (int r = 0; r < a->n_row;) {
        int rows = a->n_row - r < fit ? a->n_row - r : (int)fit;
        QL_TRY(launch(dev, "sample", sample_kernel, (unsigned)rows, SAMPLE_THREADS, 0, *a, r, (uint8_t *)dev->scratch));
        r += rows;
    }
    return QL_OK;
}
