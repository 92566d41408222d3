/* Kernels of CUDA lanes' collectives: sums and gathers over peer memory, the tree addition behind NCCL's gather, and the proof's.
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
 * Blocks wait for blocks of the other GPUs. All run the same grid, at most as many blocks as fit at once, so the block
 * waited for is running or will be. Every wait watches the abort word in host memory and a deadline; a wait that gives up
 * leaves its reason in host memory and the kernel returns, so nothing can hang on the device.
 */
#include "runtime/lane/comm_kernels.h"

#include "kernels/cuda/proof.cuh"
#include "kernels/cuda/wait.cuh"

#include <cuda_runtime.h>

constexpr int MAX_LANES = QL_CUDA_MAX_LANES, THREADS = 256, CHUNK = QL_PEER_CHUNK, VECTOR = QL_PEER_VECTOR;

static __host__ __device__ __forceinline__ int chunks_of(size_t bytes) { return (int)((bytes + CHUNK - 1) / CHUNK); }
static unsigned blocks_of(int64_t n) { return (unsigned)((n + THREADS - 1) / THREADS); }

/* ---- sums and gathers over peer memory --------------------------------------------------------------------------- */

/* Waits for a flag to reach an epoch. */
__device__ bool wait_flag(const uint32_t *flag, uint32_t epoch, int peer, const ql_peer_exchange &a) {
    volatile uint32_t *abort = &a.words->abort, *error = &a.words->error;
    unsigned long long began = 0;
    for (uint32_t spin = 0; (int32_t)(load_acquire_system(flag) - epoch) < 0; spin++) {
        if ((spin & 255) != 255) {
            continue; /* host memory is slow to read */
        }
        unsigned long long t = clock_ns();
        began = began ? began : t;
        if (*abort) {
            *error = QL_CUDA_LET_GO;
            return false;
        }
        if (*error) { /* an earlier wait was in vain */
            return false;
        }
        if (t - began > a.wait_ns) {
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
__device__ __forceinline__ void load_parts(const ql_peer_exchange &a, size_t at, size_t parity, uint4 own,
                                           uint4 (&part)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        /* past L1, which may hold the slot's content of two epochs ago */
        part[i] = i == a.lane ? own : __ldcg((const uint4 *)(a.slot[a.lane] + parity + (size_t)i * a.cap + at));
    }
}

/* Adds the parts of 16 bytes at `at`, or hands them on. */
template <int N>
__device__ __forceinline__ void finish_vector(const ql_peer_exchange &a, size_t at, size_t parity, uint4 own) {
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

__device__ __forceinline__ uint4 load_own(const ql_peer_exchange &a, size_t at) {
    return a.whole ? *(const uint4 *)(a.src + at) : load_words(a.src + at, a.bytes - at);
}

template <int N>
__device__ __forceinline__ void push_vector(const ql_peer_exchange &a, size_t at, size_t parity, uint4 own) {
#pragma unroll
    for (int i = 1; i < N; i++) {
        int peer = (a.lane + i) % N;
        *(uint4 *)(a.slot[peer] + parity + (size_t)a.lane * a.cap + at) = own;
    }
}

/* Behind a barrier after push_vector. */
__device__ __forceinline__ void send_flag(const ql_peer_exchange &a, int c, int peer, uint32_t epoch) {
    __threadfence_system(); /* the block's stores, ordered by the barrier, before the flag */
    store_release_system(a.flag[peer] + (size_t)a.lane * a.n_chunk_max + c, epoch);
}

__device__ __forceinline__ bool await_flag(const ql_peer_exchange &a, int c, int peer, uint32_t epoch) {
    return wait_flag(a.flag[a.lane] + (size_t)peer * a.n_chunk_max + c, epoch, peer, a);
}

/* Of a chunk, by its block: `own` is this thread's 16 bytes at `at`; `finish` is called once all lanes' are there. False on all
 * threads when a wait gave up. */
template <int N, typename F>
__device__ __forceinline__ bool exchange_chunk(const ql_peer_exchange &a, int c, size_t at, uint32_t epoch, uint4 own,
                                               F finish) {
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
template <int N> __global__ void __launch_bounds__(THREADS) exchange(ql_peer_exchange a) {
    int c = blockIdx.x;
    size_t at = (size_t)c * CHUNK + threadIdx.x * VECTOR;
    uint4 own = at < a.bytes ? load_own(a, at) : make_uint4(0, 0, 0, 0);
    exchange_chunk<N>(a, c, at, a.epoch[c] + 1, own, [&](size_t parity) { finish_vector<N>(a, at, parity, own); });
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
template <int N> __global__ void __launch_bounds__(2 * THREADS, 2) exchange_many(ql_peer_exchange a) {
    constexpr int GROUP = N == 8 ? 2 : 4;
    int n_chunk = chunks_of(a.bytes), half = threadIdx.x / THREADS, t = threadIdx.x % THREADS;
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

template <int N> static void launch_exchange(cudaStream_t stream, const ql_peer_exchange &a, int most_blocks) {
    int n_chunk = chunks_of(a.bytes);
    if (n_chunk > most_blocks) {
        exchange_many<N><<<(unsigned)most_blocks, 2 * THREADS, 0, stream>>>(a);
    } else {
        exchange<N><<<(unsigned)n_chunk, THREADS, 0, stream>>>(a);
    }
}

void ql_peer_launch(void *stream, const ql_peer_exchange *a, int most_blocks) {
    switch (a->n_lane) {
    case 2: launch_exchange<2>((cudaStream_t)stream, *a, most_blocks); break;
    case 4: launch_exchange<4>((cudaStream_t)stream, *a, most_blocks); break;
    default: launch_exchange<8>((cudaStream_t)stream, *a, most_blocks); break;
    }
}

/* Of the kernel that waits with a grid as large as fits: the one for most lanes, which takes the most. */
int ql_peer_blocks_of_sm(void) {
    int n = 0;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, exchange_many<8>, 2 * THREADS, 0) == cudaSuccess ? n : 0;
}

/* ---- the addition behind a gather by NCCL ------------------------------------------------------------------------ */

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

void ql_comm_tree_add(void *stream, const float *part, float *dst, int64_t n, int64_t stride, int n_lane) {
    tree_add<<<blocks_of(n), THREADS, 0, (cudaStream_t)stream>>>(part, dst, n, stride, n_lane);
}

/* ---- proof ------------------------------------------------------------------------------------------------------- */

/* Rounds of the proof, as `exchange` would do them: what it loads is known here (proof.cuh), what it would store is counted in
 * *wrong when it is not the sum. `bytes` is a multiple of 16. */
template <int N>
__global__ void __launch_bounds__(THREADS)
    prove_exchange(ql_peer_exchange a, uint32_t first, int rounds, unsigned long long *wrong) {
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

void ql_peer_prove(void *stream, const ql_peer_exchange *a, uint32_t first, int rounds, unsigned long long *wrong) {
    unsigned grid = (unsigned)chunks_of(a->bytes);
    cudaStream_t s = (cudaStream_t)stream;
    switch (a->n_lane) {
    case 2: prove_exchange<2><<<grid, THREADS, 0, s>>>(*a, first, rounds, wrong); break;
    case 4: prove_exchange<4><<<grid, THREADS, 0, s>>>(*a, first, rounds, wrong); break;
    default: prove_exchange<8><<<grid, THREADS, 0, s>>>(*a, first, rounds, wrong); break;
    }
}

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

/* The kernels of the proof stride over what is left. */
static unsigned at_most_512(unsigned blocks) { return blocks < 512 ? blocks : 512; }

void ql_proof_fill(void *stream, float *src, int64_t n, int lane, uint32_t round) {
    proof_fill<<<at_most_512(blocks_of(n)), THREADS, 0, (cudaStream_t)stream>>>(src, n, lane, round);
}

void ql_proof_check(void *stream, const float *sum, int64_t n, int rounds, int n_lane, uint32_t first,
                    unsigned long long *wrong) {
    dim3 grid(at_most_512(blocks_of(n)), (unsigned)rounds);
    proof_check<<<grid, THREADS, 0, (cudaStream_t)stream>>>(sum, n, n_lane, first, wrong);
}
