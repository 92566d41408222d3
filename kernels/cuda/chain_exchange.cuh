/* How the chains of several lanes add across lanes, inside the run: no launch, no copy, no host.
 *
 * A row-parallel product ends in sums that are parts of the tree of docs/design.md: the finishing warp stores each at the same
 * place in every lane's memory. After a block's last one it raises its lane's counter in each of them (release, system scope). A
 * block of the next op waits until its own GPU's blocks and those of every other lane have arrived, and reads the parts of all
 * lanes as it would read the parts of one: their order is the tree's, so the bits are those of one lane. Where a block each norms a
 * row for all, those blocks do so, and the others know it by the edge behind the norm, which none may pass by.
 *
 * Counters only rise, so a recorded step can be replayed; how many exchanges there were is kept on the device. Parts of two
 * exchanges in a row lie apart. A lane writes those of exchange e + 2 after all blocks of all lanes have arrived at e + 1, and
 * each of those had read e by then, or has passed an edge behind who did: so nothing is overwritten that is still needed.
 *
 * Blocks wait for blocks of other GPUs: every lane runs the same chain, all of whose blocks are on their SMs. A wait sees when
 * another thread wants this lane to let go, and knows a deadline. Giving up is for good: the block and all blocks of this GPU
 * run on without waiting, so that the kernel ends, and the lane's next check finds the reason.
 */
#ifndef QL_KERNELS_CUDA_CHAIN_EXCHANGE_CUH
#define QL_KERNELS_CUDA_CHAIN_EXCHANGE_CUH

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/proof.cuh"
#include "kernels/cuda/wait.cuh"

/* The exchange that an op's sums are for; -1: none. */
__device__ __forceinline__ int exchange_of(const struct chain_op &op) {
    return op.kind == PRODUCT ? op.product.exchange : op.kind == PROOF ? op.proof.exchange : -1;
}

__device__ __forceinline__ unsigned *arrivals(const struct lanes &l, int at_lane, int of_lane) {
    return (unsigned *)(l.room[at_lane] + of_lane * ROOM_COUNTER);
}

/* Bytes to add to the place of a sum: exchanges take turns. */
__device__ __forceinline__ int turn_of(const struct shared *sh, int exchange) {
    return (sh->exchanged + (unsigned)exchange & 1) * ROOM_TURN;
}

/* Stores a sum at element `at` of the parts of an exchange, on every lane. */
__device__ __forceinline__ void share_sum(const struct lanes &l, const struct shared *sh, int exchange, int at,
                                          float v) {
    int offset = ROOM_SUMS + turn_of(sh, exchange) + at * (int)sizeof(float);
    for (int i = 0; i < l.n_lane; i++) {
        *(float *)(l.room[i] + offset) = v;
    }
}

/* This lane's part of a proof's round, by `many` threads of which this is number `first`. */
__device__ __forceinline__ void share_proof(const struct lanes &l, const struct shared *sh, const struct proof &p,
                                            int first, int many) {
    for (int e = first; e < p.n; e += many) {
        share_sum(l, sh, p.exchange, l.lane * p.n + e, proof_value(l.lane, p.round, e));
    }
}

/* By threads 0 <= i < n_lane of a warp that knows of all the block's share_sum: at this GPU's edge, and at the other lanes'. */
__device__ __forceinline__ void arrive_at_lane(const struct run &r, int i) {
    const struct lanes &l = r.lanes;
    unsigned *at = i == l.lane ? &r.edges->count : arrivals(l, i, l.lane);
    asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

/* Until all blocks of lane i have arrived at an exchange of this run. */
__device__ __noinline__ void wait_lane(const struct run &r, const struct shared *sh, int i, int exchange) {
    constexpr unsigned SPINS = 256, /* between two looks at what is slow to read */
        NEVER_WAIT = 1u << 30;      /* arrivals that no edge of this run or the next ones is waiting for */
    const struct lanes &l = r.lanes;
    unsigned target = (sh->exchanged + (unsigned)exchange + 1) * gridDim.x;
    unsigned long long began = 0;
    for (unsigned spin = 1; i != l.lane; spin++) {
        if ((int)(load_acquire_system(arrivals(l, l.lane, i)) - target) >= 0) {
            return;
        }
        if (spin % SPINS == 0) {
            unsigned long long t = clock_ns();
            began = began ? began : t;
            bool told = *(volatile uint32_t *)l.let_go != 0;
            if (*(volatile unsigned *)&r.edges->gone) {
                return;
            }
            if (told || t - began > l.wait_ns) {
                *(volatile uint32_t *)l.gave_up = told ? QL_CUDA_LET_GO : 1 + (uint32_t)i;
                __threadfence_system();
                if (atomicExch(&r.edges->gone, 1) == 0) {
                    atomicAdd(&r.edges->count, NEVER_WAIT);
                }
                return;
            }
        }
    }
}

/* Before the block's first op: where the parts of this run's sums lie. */
__device__ __forceinline__ void place_sums(const struct shared *sh, struct chain_op &op) {
    if (op.kind == PRODUCT && op.product.delta_exchange >= 0) {
        op.product.delta += turn_of(sh, op.product.delta_exchange) / (int)sizeof(float);
    } else if (op.kind == COMBINE && op.combine.exchange >= 0) {
        op.combine.from += turn_of(sh, op.combine.exchange) / (int)sizeof(float);
    }
}

#endif
