/* Collectives of CUDA lanes over peer memory, or by NCCL where GPUs cannot reach each other's.
 *
 * The peer path. A vector is cut into chunks of 4 KiB, and block b of the one kernel works on chunks b, b + grid, ...
 * For a chunk a lane stores its part into its slot in every peer's memory, then stores the chunk's epoch into its flag
 * there with release at system scope; it waits with acquire until every peer's flag in its own memory has that epoch, and
 * adds the slots in tree order. No grid-wide barrier, no atomics: each flag has one writer and one reader.
 *
 * The epoch counts the collectives that had this chunk. It is kept on the device, so that a replayed graph carries on
 * counting, and it is 32 bits compared by difference, so that overflow is harmless. Slots alternate by the epoch's parity:
 * when a lane stores epoch e + 2 it has seen every peer's flag e + 1, which a peer stores after it has read slot e.
 *
 * Blocks wait for blocks of the other GPU. Both run the same grid, at most as many blocks as fit at once, so the block
 * waited for is running or will be. Every wait watches the abort word in host memory and a deadline; a wait that gives up
 * leaves its reason in host memory and the kernel returns, so nothing can hang on the device.
 *
 * NCCL's launch order and this path never mix within one collective; which path is used is settled once.
 */
#include "runtime/lane/comm_cuda.h"

#include "kernels/cuda.h"
#include "kernels/cuda/proof.cuh"
#include "runtime/base/mem.h"
#include "runtime/lane/nccl_api.h"

#include <cuda_runtime.h>
#include <string.h>

constexpr int MAX_LANES = 8, THREADS = 256, CHUNK = 4096 /* bytes */, VECTOR = 16;
constexpr int PROOF_SMALL_ROUNDS = 10000, PROOF_LARGE_ROUNDS = 50;
constexpr size_t PROOF_SMALL_BYTES = 64 << 10;

/* In pinned host memory that the lane's kernels see. */
struct host_words {
    uint32_t abort; /* written by ql_abort_raise */
    uint32_t error; /* written by a kernel that gave up: 1 + peer, or ABORTED */
};
constexpr uint32_t ABORTED = QL_CUDA_LET_GO;

/* One lane's memory that its peers write. */
struct lane_memory {
    uint8_t *slot;             /* [2][n_lane][cap] */
    uint32_t *flag;            /* [n_lane][n_chunk] */
    uint32_t *epoch;           /* [n_chunk], the lane's own */
    uint8_t *proof;            /* [2][cap] source and result of the proof, gone behind it */
    unsigned long long *wrong; /* elements that the proof found wrong */
    uint8_t *room;             /* of sums inside chains */
};

struct ql_comm_group {
    ql_comm_cuda_options o;
    int32_t ordinal[MAX_LANES];
    size_t cap; /* bytes of a slot, whole chunks */
    ql_nccl nccl;
    ncclComm_t nccl_comm[MAX_LANES];
    struct lane_memory lane[MAX_LANES];
    struct host_words *words[MAX_LANES];
    uint32_t *device_words[MAX_LANES];
    uint8_t *gathered[MAX_LANES]; /* NCCL with more than two lanes: [n_lane][cap] */
    bool peer_ok[MAX_LANES], nccl_ok[MAX_LANES], atomics_ok[MAX_LANES];
    bool chain_tried[MAX_LANES], chain_ok[MAX_LANES];
    unsigned long long n_wrong[MAX_LANES];
    bool use_peer, use_chains;
    bool library_stays; /* NCCL's, after the group */
    int n_block[MAX_LANES], n_sm[MAX_LANES];
    uint64_t n_peer, n_nccl; /* collectives served; relaxed atomics */
    uint64_t n_proved;       /* elements; likewise */
};

/* ---- the peer kernel --------------------------------------------------------------------------------------------- */

struct exchange_args {
    const uint8_t *src;
    uint8_t *dst;
    size_t bytes, cap;
    size_t stride; /* between the parts of a gathered vector in dst */
    int lane, n_lane, n_chunk_max;
    bool sum;   /* add in tree order, or gather */
    bool whole; /* everything is a multiple of 16 bytes */
    uint8_t *slot[MAX_LANES];
    uint32_t *flag[MAX_LANES];
    uint32_t *epoch;
    struct host_words *words;
    unsigned long long wait_ns;
};

__device__ __forceinline__ void store_release(uint32_t *at, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *at) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* Waits for a flag to reach an epoch. */
__device__ bool wait_flag(const uint32_t *flag, uint32_t epoch, int peer, const struct exchange_args &a) {
    volatile uint32_t *abort = &a.words->abort, *error = &a.words->error;
    unsigned long long t0 = 0;
    for (uint32_t spin = 0; (int32_t)(load_acquire(flag) - epoch) < 0; spin++) {
        if ((spin & 255) != 255) {
            continue; /* host memory is slow to read */
        }
        unsigned long long t = now_ns();
        t0 = t0 ? t0 : t;
        if (*abort) {
            *error = ABORTED;
            return false;
        }
        if (*error) { /* an earlier wait was in vain */
            return false;
        }
        if (t - t0 > a.wait_ns) {
            *error = 1 + (uint32_t)peer;
            return false;
        }
    }
    return true;
}

__device__ __forceinline__ float tree(float *v, int n) {
    for (int width = n; width > 1; width /= 2) {
        for (int i = 0; i < width / 2; i++) {
            v[i] = v[2 * i] + v[2 * i + 1];
        }
    }
    return v[0];
}

template <int N> __device__ __forceinline__ float4 tree4(const uint4 (&part)[N]) {
    float4 out;
    float x[N], y[N], z[N], w[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = __uint_as_float(part[i].x);
        y[i] = __uint_as_float(part[i].y);
        z[i] = __uint_as_float(part[i].z);
        w[i] = __uint_as_float(part[i].w);
    }
    out.x = tree(x, N);
    out.y = tree(y, N);
    out.z = tree(z, N);
    out.w = tree(w, N);
    return out;
}

/* 16 bytes of a vector whose end and alignment are known to be multiples of 4 only. */
__device__ __forceinline__ uint4 load_words(const uint8_t *p, size_t left) {
    const uint32_t *w = (const uint32_t *)p;
    uint4 v = make_uint4(w[0], 0, 0, 0);
    v.y = left > 4 ? w[1] : 0;
    v.z = left > 8 ? w[2] : 0;
    v.w = left > 12 ? w[3] : 0;
    return v;
}

__device__ __forceinline__ void store_words(uint8_t *p, size_t left, uint4 v) {
    uint32_t *w = (uint32_t *)p;
    w[0] = v.x;
    if (left > 4) {
        w[1] = v.y;
    }
    if (left > 8) {
        w[2] = v.z;
    }
    if (left > 12) {
        w[3] = v.w;
    }
}

/* All lanes' parts of 16 bytes at `at`. */
template <int N>
__device__ __forceinline__ void load_parts(const struct exchange_args &a, size_t at, size_t parity, uint4 own,
                                           uint4 (&part)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        /* past L1, which may hold the slot's content of two epochs ago */
        part[i] = i == a.lane ? own : __ldcg((const uint4 *)(a.slot[a.lane] + parity + (size_t)i * a.cap + at));
    }
}

/* Adds the parts of 16 bytes at `at`, or hands them on. */
template <int N>
__device__ __forceinline__ void finish_vector(const struct exchange_args &a, size_t at, size_t parity, uint4 own) {
    uint4 part[N];
    load_parts<N>(a, at, parity, own, part);
    if (a.sum) {
        float4 sum = tree4<N>(part);
        if (a.whole) {
            *(float4 *)(a.dst + at) = sum;
        } else {
            store_words(a.dst + at, a.bytes - at, *(uint4 *)&sum);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (a.whole) {
            *(uint4 *)(a.dst + (size_t)i * a.stride + at) = part[i];
        } else {
            store_words(a.dst + (size_t)i * a.stride + at, a.bytes - at, part[i]);
        }
    }
}

__device__ __forceinline__ uint4 load_own(const struct exchange_args &a, size_t at) {
    return a.whole ? *(const uint4 *)(a.src + at) : load_words(a.src + at, a.bytes - at);
}

template <int N>
__device__ __forceinline__ void push_vector(const struct exchange_args &a, size_t at, size_t parity, uint4 own) {
#pragma unroll
    for (int i = 1; i < N; i++) {
        int peer = (a.lane + i) % N;
        *(uint4 *)(a.slot[peer] + parity + (size_t)a.lane * a.cap + at) = own;
    }
}

/* Behind a barrier after push_vector. */
__device__ __forceinline__ void send_flag(const struct exchange_args &a, int c, int peer, uint32_t epoch) {
    __threadfence_system(); /* the block's stores, ordered by the barrier, before the flag */
    store_release(a.flag[peer] + (size_t)a.lane * a.n_chunk_max + c, epoch);
}

__device__ __forceinline__ bool await_flag(const struct exchange_args &a, int c, int peer, uint32_t epoch) {
    return wait_flag(a.flag[a.lane] + (size_t)peer * a.n_chunk_max + c, epoch, peer, a);
}

/* Of a chunk, by its block: `own` is this thread's 16 bytes at `at`; `finish` is called once all lanes' are there. False on all
 * threads when a wait gave up. */
template <int N, typename F>
__device__ __forceinline__ bool exchange_chunk(const struct exchange_args &a, int c, size_t at, uint32_t epoch,
                                               uint4 own, F finish) {
    int peer = (int)threadIdx.x;
    size_t parity = (size_t)(epoch & 1) * N * a.cap;
    bool lost = false;
    if (at < a.bytes) {
        push_vector<N>(a, at, parity, own);
    }
    __syncthreads();
    if (peer < N && peer != a.lane) {
        send_flag(a, c, peer, epoch);
        lost = !await_flag(a, c, peer, epoch);
    } else if (peer == a.lane) {
        a.epoch[c] = epoch;
    }
    if (__syncthreads_or(lost)) {
        return false;
    }
    if (at < a.bytes) {
        finish(parity);
    }
    return true;
}

/* Short vectors: a block a chunk, a thread 16 bytes. `bytes` and all pointers are multiples of 4. */
template <int N> __global__ void __launch_bounds__(THREADS) exchange(struct exchange_args a) {
    int c = blockIdx.x;
    size_t at = (size_t)c * CHUNK + threadIdx.x * VECTOR;
    uint4 own = at < a.bytes ? load_own(a, at) : make_uint4(0, 0, 0, 0);
    exchange_chunk<N>(a, c, at, a.epoch[c] + 1, own, [&](size_t parity) { finish_vector<N>(a, at, parity, own); });
}

/* Rounds of the proof, as `exchange` would do them: what it loads is known here (proof.cuh), what it would store is counted in
 * *wrong when it is not the sum. `bytes` is a multiple of 16. */
template <int N>
__global__ void __launch_bounds__(THREADS)
    prove_exchange(struct exchange_args a, uint32_t first, int rounds, unsigned long long *wrong) {
    int c = blockIdx.x;
    size_t at = (size_t)c * CHUNK + threadIdx.x * VECTOR;
    uint32_t epoch = a.epoch[c];
    bool on = true;
    for (int r = 0; r < rounds && on; r++) {
        auto word = [&](int lane, int i) {
            return proof_value(lane, first + (uint32_t)r, (int64_t)(at / sizeof(float)) + i);
        };
        float own[4];
        for (int i = 0; i < 4; i++) {
            own[i] = word(a.lane, i);
        }
        uint4 v = *(uint4 *)own;
        on = exchange_chunk<N>(a, c, at, ++epoch, v, [&](size_t parity) {
            uint4 part[N];
            load_parts<N>(a, at, parity, v, part);
            float4 sum = tree4<N>(part);
            const float got[4] = {sum.x, sum.y, sum.z, sum.w};
            for (int i = 0; i < 4; i++) {
                float want = 0;
                for (int lane = 0; lane < N; lane++) {
                    want += word(lane, i);
                }
                if (!(got[i] == want)) {
                    atomicAdd(wrong, 1ull); /* a count, not a sum that anything rounds */
                }
            }
        });
    }
}

/* Half a block meets; whether any of its threads says so. */
__device__ __forceinline__ bool any_of_half(int half, bool mine) {
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.s32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"((int)mine), "r"(1 + half), "n"(THREADS)
                 : "memory");
    return any != 0;
}

/* Long ones: half a block pushes its chunks and never waits, the other half adds them as they come, so that the link is never
 * idle. GROUP chunks at once in each, since what a wait costs is a round trip, whatever its size. */
template <int N> __global__ void __launch_bounds__(2 * THREADS, 2) exchange_many(struct exchange_args a) {
    constexpr int GROUP = N == 8 ? 2 : 4;
    int n_chunk = (int)((a.bytes + CHUNK - 1) / CHUNK), half = threadIdx.x / THREADS, t = threadIdx.x % THREADS;
    for (int first = blockIdx.x; first < n_chunk; first += GROUP * (int)gridDim.x) {
        auto chunk = [&](int g) { return first + g * (int)gridDim.x; };
        auto place = [&](int g) { return (size_t)chunk(g) * CHUNK + t * VECTOR; };
        int c = chunk(t / N), peer = t % N;
        bool flags = t < N * GROUP && c < n_chunk && peer != a.lane;
        uint4 own[GROUP];
        size_t parity[GROUP];
        if (half == 1 && any_of_half(half, flags && !await_flag(a, c, peer, a.epoch[c] + 1))) {
            break;
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            if (place(g) < a.bytes) {
                own[g] = load_own(a, place(g));
                parity[g] = (size_t)(a.epoch[chunk(g)] + 1 & 1) * N * a.cap;
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            if (place(g) < a.bytes && half == 0) {
                push_vector<N>(a, place(g), parity[g], own[g]);
            } else if (place(g) < a.bytes) {
                finish_vector<N>(a, place(g), parity[g], own[g]);
            }
        }
        if (half == 0) {
            any_of_half(half, false);
            if (flags) {
                send_flag(a, c, peer, a.epoch[c] + 1);
            }
        }
    }
    __syncthreads(); /* both halves have read the epochs */
    for (int c = blockIdx.x + (int)gridDim.x * (int)threadIdx.x; c < n_chunk; c += 2 * THREADS * (int)gridDim.x) {
        a.epoch[c]++;
    }
}

template <int N>
static void launch_exchange(int n_chunk, int most, cudaStream_t stream, const struct exchange_args &a) {
    if (n_chunk > most) {
        exchange_many<N><<<(unsigned)most, 2 * THREADS, 0, stream>>>(a);
    } else {
        exchange<N><<<(unsigned)n_chunk, THREADS, 0, stream>>>(a);
    }
}

/* dst = the tree sum of N gathered vectors: NCCL's path for more than two lanes. */
__global__ void tree_add(const float *part, float *dst, int64_t n, int64_t stride, int n_lane) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float v[MAX_LANES];
        for (int l = 0; l < n_lane; l++) {
            v[l] = part[l * stride + i];
        }
        dst[i] = tree(v, n_lane);
    }
}

/* ---- the lane's side ----------------------------------------------------------------------------------------------- */

static ql_status cu_check(const ql_comm *c, cudaError_t e, const char *what) {
    if (e == cudaSuccess) {
        return QL_OK;
    }
    cudaGetLastError();
    return ql_fail(c->dev->err, QL_ERR_DEVICE, "lane %d: %s: %s", c->lane, what, cudaGetErrorString(e));
}

static cudaStream_t stream_of(const ql_comm *c) { return (cudaStream_t)ql_cuda_stream(c->dev); }

/* A sum, or a gather of parts that are `stride` bytes apart in dst. */
static struct exchange_args exchange_of(const ql_comm *c, const void *src, void *dst, size_t bytes, bool sum,
                                        size_t stride) {
    const struct ql_comm_group *g = c->group;
    struct exchange_args a = {};
    a.src = (const uint8_t *)src;
    a.dst = (uint8_t *)dst;
    a.bytes = bytes;
    a.cap = g->cap;
    a.stride = stride;
    a.lane = c->lane;
    a.n_lane = c->n_lane;
    a.n_chunk_max = (int)(g->cap / CHUNK);
    a.sum = sum;
    a.whole = (bytes | stride | (uintptr_t)src | (uintptr_t)dst) % VECTOR == 0;
    for (int i = 0; i < c->n_lane; i++) {
        a.slot[i] = g->lane[i].slot;
        a.flag[i] = g->lane[i].flag;
    }
    a.epoch = g->lane[c->lane].epoch;
    a.words = (struct host_words *)g->device_words[c->lane];
    a.wait_ns = (unsigned long long)g->o.wait_ms * 1000000ull;
    return a;
}

/* The same grid on every lane: the fewest blocks that fit on any. */
static int most_blocks(const struct ql_comm_group *g) {
    int most = g->n_block[0];
    for (int i = 1; i < g->o.n_lane; i++) {
        most = g->n_block[i] < most ? g->n_block[i] : most;
    }
    return most;
}

static int chunks_of(size_t bytes) { return (int)((bytes + CHUNK - 1) / CHUNK); }

static ql_status peer_exchange(ql_comm *c, const void *src, void *dst, size_t bytes, bool sum, size_t stride) {
    struct exchange_args a = exchange_of(c, src, dst, bytes, sum, stride);
    int n_chunk = chunks_of(bytes), most = most_blocks(c->group);
    switch (c->n_lane) {
    case 2: launch_exchange<2>(n_chunk, most, stream_of(c), a); break;
    case 4: launch_exchange<4>(n_chunk, most, stream_of(c), a); break;
    default: launch_exchange<8>(n_chunk, most, stream_of(c), a); break;
    }
    return cu_check(c, cudaGetLastError(), "reduction over peer memory");
}

static ql_status nccl_check(const ql_comm *c, ncclResult_t r, const char *what) {
    if (r == ncclSuccess) {
        return QL_OK;
    }
    return ql_fail(c->dev->err, QL_ERR_DEVICE, "lane %d: %s: NCCL: %s", c->lane, what, c->group->nccl.error_string(r));
}

/* NULL once somebody let go. */
static ncclComm_t nccl_comm_of(const ql_comm *c) {
    return __atomic_load_n(&c->group->nccl_comm[c->lane], __ATOMIC_ACQUIRE);
}

/* Why there is no communicator: the engine's first error, and never success. */
static ql_status gone(const ql_comm *c) {
    QL_TRY(ql_abort_error(c->group->o.abort, c->dev->err));
    return ql_fail(c->dev->err, QL_ERR_INTERNAL, "lane %d: its NCCL communicator is gone", c->lane);
}

static ql_status nccl_gather(ql_comm *c, const void *src, void *dst, size_t bytes) {
    struct ql_comm_group *g = c->group;
    if (!nccl_comm_of(c)) {
        return gone(c);
    }
    return nccl_check(c, g->nccl.all_gather(src, dst, bytes, ncclUint8, nccl_comm_of(c), stream_of(c)), "gather");
}

static ql_status nccl_reduce(ql_comm *c, const float *src, float *dst, int64_t n) {
    struct ql_comm_group *g = c->group;
    if (!nccl_comm_of(c)) {
        return gone(c);
    }
    if (c->n_lane == 2) { /* a + b has one order */
        return nccl_check(c,
                          g->nccl.all_reduce(src, dst, (size_t)n, ncclFloat32, ncclSum, nccl_comm_of(c), stream_of(c)),
                          "reduction");
    }
    QL_TRY(nccl_gather(c, src, g->gathered[c->lane], (size_t)n * sizeof(float)));
    tree_add<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, stream_of(c)>>>((const float *)g->gathered[c->lane],
                                                                                    dst, n, n, c->n_lane);
    return cu_check(c, cudaGetLastError(), "tree addition");
}

static ql_status reduce(ql_comm *c, const float *src, float *dst, int64_t n) {
    size_t bytes = (size_t)n * sizeof(float);
    if (c->n_lane == 1) {
        return cu_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream_of(c)), "reduction");
    }
    if (bytes > c->group->cap) {
        return ql_fail(c->dev->err, QL_ERR_INTERNAL, "lane %d: reduction of %zu bytes, at most %zu were planned",
                       c->lane, bytes, c->group->cap);
    }
    if (c->group->use_peer) {
        ql_dev_count(&c->group->n_peer, 1);
        return peer_exchange(c, src, dst, bytes, true, 0);
    }
    ql_dev_count(&c->group->n_nccl, 1);
    return nccl_reduce(c, src, dst, n);
}

static ql_status gather(ql_comm *c, const void *src, void *dst, size_t bytes) {
    if (c->n_lane == 1) {
        return cu_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream_of(c)), "gather");
    }
    if (c->group->use_peer) {
        if (bytes % 4 != 0) {
            return ql_fail(c->dev->err, QL_ERR_INTERNAL, "lane %d: gather of %zu bytes, not whole words", c->lane,
                           bytes);
        }
        ql_dev_count(&c->group->n_peer, 1);
        for (size_t at = 0, n; at < bytes; at += n) { /* as much at once as the slots hold */
            n = bytes - at < c->group->cap ? bytes - at : c->group->cap;
            QL_TRY(peer_exchange(c, (const uint8_t *)src + at, (uint8_t *)dst + at, n, false, bytes));
        }
        return QL_OK;
    }
    ql_dev_count(&c->group->n_nccl, 1);
    return nccl_gather(c, src, dst, bytes);
}

/* After a sync: what a kernel that gave up left behind. */
static ql_status check(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    if (c->n_lane == 1) {
        return QL_OK;
    }
    uint32_t error = __atomic_load_n(&g->words[c->lane]->error, __ATOMIC_ACQUIRE);
    if (error == 0) {
        return QL_OK;
    }
    if (error == ABORTED && ql_abort_raised(g->o.abort)) {
        return ql_abort_error(g->o.abort, c->dev->err);
    }
    return ql_fail(c->dev->err, QL_ERR_DEVICE, "lane %d waited %d ms for lane %d in a reduction (deadline of a wait)",
                   c->lane, g->o.wait_ms, (int)error - 1);
}

/* A lane failed or hangs. Kernels of ours see the abort word; NCCL's watch nothing, and a peer that waits for one cannot
 * let go by itself: whoever comes first ends all communicators. */
static void let_go(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    for (int i = 0; i < g->o.n_lane; i++) {
        ncclComm_t comm = __atomic_exchange_n(&g->nccl_comm[i], (ncclComm_t)NULL, __ATOMIC_ACQ_REL);
        if (comm) {
            g->nccl.comm_abort(comm);
        }
    }
}

/* ---- open ---------------------------------------------------------------------------------------------------------- */

static size_t slot_cap(size_t max_bytes) { return (max_bytes + CHUNK - 1) / CHUNK * CHUNK; }

uint64_t ql_comm_cuda_bytes(int32_t n_lane, size_t max_bytes) {
    if (n_lane == 1) {
        return 0;
    }
    uint64_t cap = slot_cap(max_bytes), n = (uint64_t)n_lane, chunks = cap / CHUNK;
    return 2 * n * cap + (n + 1) * chunks * 4 + (n_lane > 2 ? n * cap : 0) + sizeof(unsigned long long) +
           QL_CUDA_EXCHANGE_BYTES;
}

ql_status ql_comm_cuda_open(ql_comm_group **group, const ql_comm_cuda_options *o, ql_error *err) {
    struct ql_comm_group *g = NULL;
    QL_TRY(ql_alloc(o->mem, 1, sizeof *g, "the lanes' shared state", (void **)&g, err));
    g->o = *o;
    memcpy(g->ordinal, o->ordinal, (size_t)o->n_lane * sizeof *g->ordinal);
    g->o.ordinal = g->ordinal;
    g->cap = slot_cap(o->max_bytes);
    ql_status status = QL_OK;
    for (int i = 0; i < o->n_lane && status == QL_OK; i++) {
        for (int j = 0; j < i && status == QL_OK; j++) {
            status = o->ordinal[i] != o->ordinal[j]
                         ? QL_OK
                         : ql_fail(err, QL_ERR_DEVICE, "GPU %d is named for lanes %d and %d", o->ordinal[i], j, i);
        }
    }
    if (o->n_lane > 1 && status == QL_OK) {
        status = ql_nccl_open(&g->nccl, err);
    }
    if (status != QL_OK) {
        ql_free(o->mem, g);
        return status;
    }
    *group = g;
    return QL_OK;
}

/* NCCL's communicators, for the engine's life. */
static ql_status open_nccl(struct ql_comm_group *g, ql_error *err) {
    int before = 0;
    cudaGetDevice(&before);
    ql_status status = ql_nccl_init_all(&g->nccl, g->nccl_comm, g->o.n_lane, g->ordinal, g->o.init_ms, err);
    cudaSetDevice(before);
    g->library_stays = status != QL_OK; /* an attempt left behind may be in it */
    return status;
}

ql_status ql_comm_cuda_bind(ql_comm_group *g, int32_t lane, ql_dev *dev, ql_comm *c) {
    *c = ql_comm{};
    c->lane = lane;
    c->n_lane = g->o.n_lane;
    c->dev = dev;
    c->group = g;
    c->reduce = reduce;
    c->gather = gather;
    c->check = check;
    c->let_go = let_go;
    if (ql_cuda_ordinal(dev) != g->ordinal[lane]) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "lane %d has GPU %d open, its collectives are for GPU %d", lane,
                       ql_cuda_ordinal(dev), g->ordinal[lane]);
    }
    if (c->n_lane == 1) {
        return QL_OK;
    }
    struct lane_memory *m = &g->lane[lane];
    size_t n = (size_t)c->n_lane, chunks = g->cap / CHUNK;
    QL_TRY(dev->ops->alloc(dev, 2 * n * g->cap, "reduction slots", (void **)&m->slot));
    QL_TRY(dev->ops->alloc(dev, n * chunks * 4, "reduction flags", (void **)&m->flag));
    QL_TRY(dev->ops->alloc(dev, chunks * 4, "reduction epochs", (void **)&m->epoch));
    QL_TRY(dev->ops->alloc(dev, 2 * g->cap, "the proof of reductions", (void **)&m->proof));
    QL_TRY(dev->ops->alloc(dev, sizeof *m->wrong, "the proof of reductions", (void **)&m->wrong));
    QL_TRY(dev->ops->alloc(dev, QL_CUDA_EXCHANGE_BYTES, "sums inside chains", (void **)&m->room));
    if (c->n_lane > 2) {
        QL_TRY(dev->ops->alloc(dev, n * g->cap, "gathered vectors", (void **)&g->gathered[lane]));
    }
    QL_TRY(cu_check(c, cudaHostAlloc((void **)&g->words[lane], sizeof(struct host_words), cudaHostAllocMapped),
                    "pinned memory"));
    memset(g->words[lane], 0, sizeof(struct host_words));
    QL_TRY(cu_check(c, cudaHostGetDevicePointer((void **)&g->device_words[lane], g->words[lane], 0), "pinned memory"));
    ql_abort_mirror(g->o.abort, lane, &g->words[lane]->abort);
    int per_sm = 0, n_sm = 0;
    QL_TRY(cu_check(c, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, exchange_many<8>, 2 * THREADS, 0),
                    "occupancy"));
    QL_TRY(cu_check(c, cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, ql_cuda_ordinal(dev)),
                    "device query"));
    g->n_sm[lane] = n_sm;
    g->n_block[lane] = n_sm * (per_sm < 2 ? per_sm : 2);
    return dev->ops->sync(dev);
}

ql_status ql_comm_cuda_connect(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    int own = g->ordinal[c->lane];
    bool ok = c->n_lane > 1 && !g->o.no_peer;
    g->atomics_ok[c->lane] = true;
    for (int i = 0; i < c->n_lane && ok; i++) {
        int can = 1;
        if (i == c->lane || g->ordinal[i] == own) {
            continue;
        }
        if (cudaDeviceCanAccessPeer(&can, own, g->ordinal[i]) != cudaSuccess || !can) {
            ok = false;
            break;
        }
        cudaError_t e = cudaDeviceEnablePeerAccess(g->ordinal[i], 0);
        ok = e == cudaSuccess || e == cudaErrorPeerAccessAlreadyEnabled;
        e = cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrNativeAtomicSupported, own, g->ordinal[i]);
        g->atomics_ok[c->lane] = g->atomics_ok[c->lane] && e == cudaSuccess && can;
    }
    cudaGetLastError();
    g->peer_ok[c->lane] = ok;
    return QL_OK;
}

/* ---- proof --------------------------------------------------------------------------------------------------------- */

__global__ void proof_fill(float *src, int64_t n, int lane, uint32_t round) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        src[i] = proof_value(lane, round, i);
    }
}

/* Sums of gridDim.y rounds, n elements each. */
__global__ void proof_check(const float *sum, int64_t n, int n_lane, uint32_t first, unsigned long long *wrong) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float want = 0;
        for (int l = 0; l < n_lane; l++) {
            want += proof_value(l, first + blockIdx.y, i);
        }
        if (!(sum[blockIdx.y * n + i] == want)) {
            atomicAdd(wrong, 1ull); /* a count, not a sum that anything rounds */
        }
    }
}

static int proof_rounds(const ql_comm *c, int rounds) {
    return rounds * (c->group->o.proof_times > 1 ? c->group->o.proof_times : 1);
}

/* Now and then in the proof: bounds the queue, and sees an abort. */
static ql_status proof_pause(ql_comm *c) {
    ql_dev_count(&c->dev->progress, 1);
    QL_TRY(c->dev->ops->sync(c->dev));
    return check(c);
}

/* Of a path with the kernels that serve. */
static ql_status prove_path(ql_comm *c, bool peer, int64_t n, int rounds, uint32_t seed) {
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    float *src = (float *)m->proof, *dst = (float *)(m->proof + g->cap);
    unsigned grid = (unsigned)((n + THREADS - 1) / THREADS);
    grid = grid > 512 ? 512 : grid;
    rounds = proof_rounds(c, rounds);
    ql_dev_count(&g->n_proved, (uint64_t)n * (uint64_t)rounds);
    for (int r = 0; r < rounds; r++) {
        uint32_t round = seed + (uint32_t)r;
        proof_fill<<<grid, THREADS, 0, stream_of(c)>>>(src, n, c->lane, round);
        QL_TRY(peer ? peer_exchange(c, src, dst, (size_t)n * sizeof(float), true, 0) : nccl_reduce(c, src, dst, n));
        proof_check<<<grid, THREADS, 0, stream_of(c)>>>(dst, n, c->n_lane, round, m->wrong);
        if (r % 256 == 255) {
            QL_TRY(proof_pause(c));
        }
    }
    return proof_pause(c);
}

/* Of short vectors over peer memory, some rounds a launch. */
static ql_status prove_short(ql_comm *c, int64_t n, int rounds, uint32_t seed) {
    constexpr int AT_ONCE = 8;
    struct exchange_args a = exchange_of(c, NULL, NULL, (size_t)n * sizeof(float), true, 0);
    unsigned long long *wrong = c->group->lane[c->lane].wrong;
    unsigned grid = (unsigned)chunks_of(a.bytes);
    rounds = proof_rounds(c, rounds);
    ql_dev_count(&c->group->n_proved, (uint64_t)n * (uint64_t)rounds);
    for (int r = 0; r < rounds; r += AT_ONCE) {
        int many = rounds - r < AT_ONCE ? rounds - r : AT_ONCE;
        uint32_t first = seed + (uint32_t)r;
        switch (c->n_lane) {
        case 2: prove_exchange<2><<<grid, THREADS, 0, stream_of(c)>>>(a, first, many, wrong); break;
        case 4: prove_exchange<4><<<grid, THREADS, 0, stream_of(c)>>>(a, first, many, wrong); break;
        default: prove_exchange<8><<<grid, THREADS, 0, stream_of(c)>>>(a, first, many, wrong); break;
        }
        QL_TRY(cu_check(c, cudaGetLastError(), "proof of peer memory"));
        if (r / AT_ONCE % 256 == 255) {
            QL_TRY(proof_pause(c));
        }
    }
    return proof_pause(c);
}

/* Lets the device's chains add across lanes where all lanes' can. */
static bool connect_chains(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    bool can = true;
    ql_cuda_exchange x = {};
    x.lane = c->lane;
    x.n_lane = c->n_lane;
    x.n_sm = g->n_sm[0];
    for (int i = 0; i < c->n_lane; i++) {
        can = can && g->peer_ok[i] && g->atomics_ok[i];
        x.n_sm = g->n_sm[i] < x.n_sm ? g->n_sm[i] : x.n_sm;
        x.room[i] = g->lane[i].room;
    }
    struct host_words *words = (struct host_words *)g->device_words[c->lane];
    x.let_go = &words->abort;
    x.gave_up = &words->error;
    x.wait_ns = (uint64_t)g->o.wait_ms * 1000000u;
    return can && ql_cuda_connect_chains(c->dev, &x);
}

/* Rounds inside chains, as many in one as the result has room for. */
static ql_status prove_chains(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    float *dst = (float *)(m->proof + g->cap);
    int64_t room = (int64_t)(g->cap / sizeof(float));
    int32_t n = (int32_t)(room < QL_CUDA_CHAIN_ELEMENTS ? room : QL_CUDA_CHAIN_ELEMENTS);
    int32_t many = room / n < QL_CUDA_CHAIN_ROUNDS ? (int32_t)(room / n) : QL_CUDA_CHAIN_ROUNDS;
    int rounds = proof_rounds(c, PROOF_SMALL_ROUNDS);
    ql_dev_count(&g->n_proved, (uint64_t)n * (uint64_t)(rounds / many * many));
    for (int r = 0; r + many <= rounds; r += many) {
        uint32_t round = 300001 + (uint32_t)r;
        QL_TRY(ql_cuda_prove_chains(c->dev, dst, n, many, round));
        proof_check<<<dim3((unsigned)((n + THREADS - 1) / THREADS), (unsigned)many), THREADS, 0, stream_of(c)>>>(
            dst, n, c->n_lane, round, m->wrong);
        if (r / many % 64 == 63) {
            QL_TRY(proof_pause(c));
        }
    }
    return proof_pause(c);
}

/* Every way that is open and not proved yet. Rounds of NCCL are ten times dearer and its code is proved elsewhere. */
ql_status ql_comm_cuda_prove(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    if (c->n_lane == 1) {
        return QL_OK;
    }
    bool peer = true;
    for (int i = 0; i < c->n_lane; i++) {
        peer = peer && g->peer_ok[i];
    }
    int64_t largest = (int64_t)(g->cap / sizeof(float));
    int64_t small =
        (int64_t)(PROOF_SMALL_BYTES / sizeof(float)) < largest ? (int64_t)(PROOF_SMALL_BYTES / sizeof(float)) : largest;
    bool nccl = nccl_comm_of(c) != NULL; /* open, so the others are proved */
    bool chains = !nccl && connect_chains(c);
    g->chain_tried[c->lane] = g->chain_tried[c->lane] || chains;
    enum { PEER, CHAIN, NCCL, WAYS };
    for (int way = 0; way < WAYS; way++) {
        bool is_peer = way == PEER;
        if (way == PEER ? nccl || !peer : way == CHAIN ? !chains : !nccl) {
            continue;
        }
        struct lane_memory *m = &g->lane[c->lane];
        QL_TRY(c->dev->ops->zero(c->dev, m->wrong, sizeof *m->wrong));
        if (way == CHAIN) {
            QL_TRY(prove_chains(c));
        } else {
            if (is_peer) {
                QL_TRY(prove_short(c, 4, PROOF_SMALL_ROUNDS, 1));
                QL_TRY(prove_short(c, small, PROOF_SMALL_ROUNDS, 100001));
            }
            QL_TRY(prove_path(c, is_peer, 4, 100, 1));
            QL_TRY(prove_path(c, is_peer, small, 100, 100001));
            QL_TRY(prove_path(c, is_peer, largest, is_peer ? PROOF_LARGE_ROUNDS : 5, 200001));
        }
        QL_TRY(c->dev->ops->d2h(c->dev, &g->n_wrong[c->lane], m->wrong, sizeof *m->wrong));
        QL_TRY(c->dev->ops->sync(c->dev));
        bool *ok = is_peer ? g->peer_ok : way == CHAIN ? g->chain_ok : g->nccl_ok;
        ok[c->lane] = g->n_wrong[c->lane] == 0;
    }
    return QL_OK;
}

ql_status ql_comm_cuda_settle(ql_comm_group *g, bool *again, ql_error *err) {
    *again = false;
    if (g->o.n_lane == 1) {
        return QL_OK;
    }
    bool peer = true, nccl = true, chains = true, tried = false;
    for (int i = 0; i < g->o.n_lane; i++) {
        peer = peer && g->peer_ok[i];
        nccl = nccl && g->nccl_ok[i];
        chains = chains && g->chain_ok[i];
        tried = tried || g->chain_tried[i];
    }
    if (!peer && !g->nccl_comm[0]) {
        if (!g->o.no_peer) {
            ql_logf(g->o.log, QL_LOG_WARN,
                    "reductions over peer memory are off: the GPUs cannot reach each other's memory, or "
                    "delivered wrong sums; NCCL serves them, slower");
        }
        QL_TRY(open_nccl(g, err));
        *again = true;
        return QL_OK;
    }
    if (!peer && !nccl) {
        return ql_fail(err, QL_ERR_DEVICE,
                       "no way to add across these GPUs gave right sums, NCCL %d neither; use one lane, or another "
                       "NCCL through QLANE_NCCL",
                       g->nccl.version);
    }
    if (peer && tried && !chains) {
        ql_logf(g->o.log, QL_LOG_WARN,
                "sums inside chains are off: they were wrong; sums between chains serve, slower");
    }
    g->use_peer = peer;
    g->use_chains = peer && chains;
    return QL_OK;
}

void ql_comm_cuda_begin(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    if (!g->use_chains) {
        ql_cuda_exchange none = {};
        ql_cuda_connect_chains(c->dev, &none);
    }
    c->dev->ops->free(c->dev, m->proof);
    m->proof = NULL;
}

/* ---- close --------------------------------------------------------------------------------------------------------- */

void ql_comm_cuda_unbind(ql_comm *c) {
    if (!c->group || !c->dev || !c->dev->ops) {
        return;
    }
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    ql_dev *dev = c->dev;
    ncclComm_t comm = __atomic_exchange_n(&g->nccl_comm[c->lane], (ncclComm_t)NULL, __ATOMIC_ACQ_REL);
    if (comm) {
        g->nccl.comm_destroy(comm);
    }
    dev->ops->free(dev, m->slot);
    dev->ops->free(dev, m->flag);
    dev->ops->free(dev, m->epoch);
    dev->ops->free(dev, m->proof);
    dev->ops->free(dev, m->wrong);
    dev->ops->free(dev, m->room);
    dev->ops->free(dev, g->gathered[c->lane]);
    memset(m, 0, sizeof *m);
    g->gathered[c->lane] = NULL;
    if (g->words[c->lane]) {
        ql_abort_mirror(g->o.abort, c->lane, NULL);
        cudaFreeHost(g->words[c->lane]);
        g->words[c->lane] = NULL;
    }
    c->group = NULL;
}

void ql_comm_cuda_close(ql_comm_group **group) {
    struct ql_comm_group *g = *group;
    if (!g) {
        return;
    }
    int before = 0;
    cudaGetDevice(&before);
    for (int i = 0; i < g->o.n_lane; i++) { /* lanes that never got as far as bind */
        if (g->nccl_comm[i]) {
            g->nccl.comm_destroy(g->nccl_comm[i]);
        }
    }
    cudaSetDevice(before);
    cudaGetLastError();
    if (!g->library_stays) {
        ql_nccl_close(&g->nccl);
    }
    ql_free(g->o.mem, g);
    *group = NULL;
}

const char *ql_comm_cuda_path(const ql_comm_group *g) {
    return g->o.n_lane == 1 ? "none" : g->use_peer ? "peer" : "nccl";
}
int32_t ql_comm_cuda_nccl_version(const ql_comm_group *g) { return g->nccl.version; }

void ql_comm_cuda_calls(const ql_comm_group *g, uint64_t *peer, uint64_t *nccl) {
    *peer = __atomic_load_n(&g->n_peer, __ATOMIC_RELAXED);
    *nccl = __atomic_load_n(&g->n_nccl, __ATOMIC_RELAXED);
}

uint64_t ql_comm_cuda_proved(const ql_comm_group *g) { return __atomic_load_n(&g->n_proved, __ATOMIC_RELAXED); }
