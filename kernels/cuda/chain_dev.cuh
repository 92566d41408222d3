/* What the parts of the chain kernel (chain.cu) share: copies and loads, barriers of its warps, edges between ops. */
#ifndef QL_KERNELS_CUDA_CHAIN_DEV_CUH
#define QL_KERNELS_CUDA_CHAIN_DEV_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/chain_exchange.cuh"

#if HAVE_WGMMA
/* What other blocks wrote during the run: from the second-level cache, and never before the edge that the code is behind. A marked
 * number may still be its mark then. */
__device__ __forceinline__ float load_fresh(const float *p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ float4 load_fresh4(const float *p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p));
    return v;
}

/* The same BYTES further, or zeros. */
template <int BYTES> __device__ __forceinline__ float4 load_fresh4_if(bool there, const float *p) {
    float4 v;
    asm volatile("{.reg .pred there;\n"
                 "setp.ne.s32 there, %6, 0;\n"
                 "mov.f32 %0, 0f00000000;\n"
                 "mov.f32 %1, 0f00000000;\n"
                 "mov.f32 %2, 0f00000000;\n"
                 "mov.f32 %3, 0f00000000;\n"
                 "@there ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4+%5];}"
                 : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
                 : "l"(p), "n"(BYTES), "r"((int)there));
    return v;
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float4 multiply4(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ __forceinline__ void copy_16(uint32_t to, const float *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Of the computing warps. */
__device__ __forceinline__ void sync_warps(void) { asm volatile("bar.sync 1, %0;" ::"n"((int)N_THREAD) : "memory"); }
__device__ __forceinline__ void sync_four(void) { asm volatile("bar.sync 2, 128;" ::: "memory"); }
__device__ __forceinline__ void sync_eight(void) { asm volatile("bar.sync 2, 256;" ::: "memory"); }
/* Of these and the finishing warp. */
__device__ __forceinline__ void sync_but_fetching(void) {
    asm volatile("bar.sync 3, %0;" ::"n"((int)N_THREAD + 32) : "memory");
}

/* Until more than n of what `so_far` counts are there, of which the caller knows `seen`; returns how many are. */
__device__ __forceinline__ int wait_count(const int *so_far, int seen, int n) {
    while (seen <= n) {
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(shared_address(so_far)) : "memory");
    }
    return seen;
}

/* What others may be looking at. */
__device__ __forceinline__ void store_fresh(float *p, float v) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}

/* ---- edges ------------------------------------------------------------------------------------------------------- */

/* A warp that knows of it: this block's part of an op is written; or, where it is marked, on its way. A release waits for
 * all bulk copies of its SM besides, 1,500 cycles with one on its way, so marked sums go without: a number that is there
 * says so itself. What the block has read before is in registers by then, so whoever passes the edge may write over it; and
 * what it has released before stays so, as all arrivals are additions to one counter. */
__device__ __forceinline__ void arrive(const struct run &r, const struct shared *sh, const struct chain_op &op) {
    int lane = threadIdx.x & 31;
    bool at_end = op.edges + 1 == r.n_edge;
    if (exchange_of(op) >= 0) { /* never the last op: somebody has to add */
        if (lane < r.lanes.n_lane) {
            arrive_at_lane(r, lane);
        }
    } else if (lane == 0 && !at_end && op.kind == PRODUCT && op.product.marked) {
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&r.edges->count) : "memory");
    } else if (lane == 0 && !at_end) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&r.edges->count) : "memory");
    } else if (lane == 0) {
        unsigned last = sh->base + gridDim.x * r.n_edge;
        __threadfence();
        if (atomicAdd(&r.edges->count, 1) + 1 == last) {
            r.edges->base = last;
            r.edges->base_early += gridDim.x * r.n_early;
            r.edges->exchanged += r.lanes.n_exchange;
        }
    }
}

/* One thread: a normed row is written. The last block, which has the first row, arrives for those that have none: did they so
 * themselves, nobody would know which edge is complete. */
__device__ __forceinline__ void arrive_with_row(const struct run &r, int row) {
    unsigned n = row > 0 ? 1 : gridDim.x - (unsigned)r.n_row + 1;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(&r.edges->count), "r"(n) : "memory");
}

/* One thread: the block has read x of an op, and its early tasks are written. */
__device__ __forceinline__ void arrive_early(const struct run &r) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&r.edges->early) : "memory");
}

/* One thread, until a counter of arrivals has reached target. */
__device__ __forceinline__ void await_arrivals(const unsigned *counter, unsigned target) {
    unsigned now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while ((int)(now - target) < 0);
}

/* All blocks have arrived behind so many ops. */
__device__ __forceinline__ void wait_edge(const struct run &r, const struct shared *sh, int edges) {
    if (threadIdx.x == 0) {
        await_arrivals(&r.edges->count, sh->base + gridDim.x * edges);
    }
    sync_warps();
}

/* What op i begins behind is written. */
__device__ __forceinline__ void wait_before(const struct run &r, const struct shared *sh, int i) {
    if (threadIdx.x == 0) {
        int early = sh->op[i].early;
        await_arrivals(early ? &r.edges->early : &r.edges->count,
                       early ? sh->base_early + gridDim.x * early : sh->base + gridDim.x * sh->op[i].edges);
    }
    sync_warps();
}

/* The other lanes' blocks too, where op i needs them. Before wait_edge. */
__device__ __forceinline__ void wait_lanes(const struct run &r, const struct shared *sh, int i) {
    if (r.lanes.n_exchange > 0 && threadIdx.x - 32 < (unsigned)r.lanes.n_lane) {
        int exchange = exchange_of(sh->op[i - 1]);
        if (exchange >= 0) {
            wait_lane(r, sh, threadIdx.x - 32, exchange);
        }
    }
}

/* The columns of the residual that a block writes begin here. */
__device__ __forceinline__ int share_begin(int k, int block) { return (int)((unsigned)k * block / gridDim.x); }
#endif

#endif
