/* How prompt rows add across lanes while the product that gives the parts still runs.
 *
 * A lane has an inbox in which every other lane has room for one part of a sum, and flags. A row-parallel product writes its
 * part as always; two warps of each block that have nothing else to do read a finished tile back out of the second-level
 * cache and store it in the inboxes of the other lanes, then raise the tile's flags there (release, system scope). The norm
 * that comes next waits for the flags of its rows, and adds own part and inbox in tree order (docs/design.md).
 *
 * A lane that begins such a product says so to all others, who send it nothing before that: its norm has then read what the sum
 * before this one left in its inbox. Every sum has a number, the same on all lanes, that its flags carry; 32 bits compared by
 * difference. Nobody who waits keeps those from running that are waited for: what is sent needs no wait but for a product that has begun
 * elsewhere, and a norm waits for products only. A wait that sees another thread want this lane to let go, or its deadline pass,
 * gives up, leaves the reason in host memory and runs on; the results are then good for nothing.
 */
#ifndef QL_KERNELS_CUDA_PUSH_CUH
#define QL_KERNELS_CUDA_PUSH_CUH

#include "kernels/cuda/dev.cuh"
#include "kernels/cuda/wait.cuh"

enum { PUSH_ROWS = 64, PUSH_COLS = 128, PUSHERS = 2 }; /* of a flag: rows, columns; warps that have one each */

struct push {
    int lane, n_lane; /* n_lane 0: nothing is sent */
    uint32_t number;
    int64_t stride;     /* floats between the parts of two lanes in an inbox */
    const float *inbox; /* this lane's: [n_lane - 1][stride], the next lane's part, of the one after that, ... */
    const uint32_t *inbox_flag; /* [of lane][QL_CUDA_INBOX_FLAGS]: begun, then [row / 64][column / 128][warp] */
    float
        *peer[QL_CUDA_MAX_LANES - 1]; /* this lane's place in the inbox of the next lane, of the one after that, ... */
    uint32_t *peer_flag[QL_CUDA_MAX_LANES - 1];
    uint32_t *let_go, *gave_up;
    unsigned long long wait_ns;
};

/* norm.cu: rmsnorm whose delta is the sum of all lanes' parts: this lane's `own` and what its inbox gets. n % 128 == 0. */
ql_status ql_rmsnorm_of_lanes_cuda(ql_dev *dev, const ql_rmsnorm_args *a, const float *own, const struct push &p);

/* ---- device ---- */

/* Raises flag number `at` of this lane in the inboxes of all others. */
__device__ __forceinline__ void raise_flags(const struct push &p, int64_t at) {
#pragma unroll
    for (int i = 0; i < QL_CUDA_MAX_LANES - 1; i++) {
        if (i < p.n_lane - 1) {
            store_release_system(p.peer_flag[i] + at, p.number);
        }
    }
}

/* Until flag number `at` of lane `of` has this sum's number. */
__device__ __forceinline__ void await_flag(const struct push &p, int of, int64_t at) {
    const uint32_t *flag = p.inbox_flag + (int64_t)of * QL_CUDA_INBOX_FLAGS + at;
    unsigned long long began = 0;
    for (uint32_t spin = 1;; spin++) {
        if ((int32_t)(load_acquire_system(flag) - p.number) >= 0) {
            return;
        }
        if (spin % 256 == 0) { /* host memory is slow to read */
            unsigned long long t = clock_ns();
            began = began ? began : t;
            bool told = *(volatile uint32_t *)p.let_go != 0;
            if (*(volatile uint32_t *)p.gave_up) {
                return;
            }
            if (told || t - began > p.wait_ns) {
                *(volatile uint32_t *)p.gave_up = told ? QL_CUDA_LET_GO : 1 + (uint32_t)of;
                return;
            }
        }
    }
}

/* Until row `row` of n numbers has come from all lanes but this one; all threads of the block. */
__device__ __forceinline__ void await_row(const struct push &p, int row, int n) {
    int count = n / PUSH_COLS * PUSHERS;
    for (int i = threadIdx.x; i < p.n_lane * count; i += blockDim.x) {
        int of = i / count;
        if (of != p.lane) {
            await_flag(p, of, 1 + row / PUSH_ROWS * count + i % count);
        }
    }
    __syncthreads();
}

/* Number i of a sum: `own`, or the tree sum of N lanes' parts. */
template <int N>
__device__ __forceinline__ float sum_of_lanes(const float *own, const float *inbox, const struct push &p, int64_t i) {
    if constexpr (N == 1) {
        return own[i];
    } else {
        float v[N];
#pragma unroll
        for (int l = 0; l < N; l++) {
            v[l] = l == p.lane ? own[i] : __ldcg(inbox + ((l - p.lane - 1) & (N - 1)) * p.stride + i);
        }
#pragma unroll
        for (int d = 1; d < N; d *= 2) {
#pragma unroll
            for (int l = 0; l < N; l += 2 * d) {
                v[l] += v[l + d];
            }
        }
        return v[0];
    }
}

#endif
