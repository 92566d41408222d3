/* What kernels of Hopper (9.0a) add to wgmma.cuh: barriers that count copies, bulk copies and their hints, pairs of blocks,
 * wgmma with A in registers for every type and width. A of one-byte numbers (K = 32): lane 4 g + c holds a[0] (row g, k 4c ..
 * 4c + 3), a[1] (row g + 8), a[2], a[3] (k + 16).
 */
#ifndef QL_KERNELS_CUDA_BULK_CUH
#define QL_KERNELS_CUDA_BULK_CUH

#include "kernels/cuda/wgmma.cuh"

#if HAVE_WGMMA

/* At the barrier of the same place in block `rank` of the cluster: says that this warp has read, nothing of what it wrote
 * (a release of cluster scope is a fence of the whole GPU, a thousand cycles). */
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* One arrival of a lane, when its copy_async16 so far are complete. */
__device__ __forceinline__ void barrier_arrive_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* n arrivals. */
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int n) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}

/* One arrival, and n bytes of copies to come. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t n, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(n), "r"(barrier)
                 : "memory");
}

/* Weights are read once a step: what else the second-level cache holds is to outlive them. */
__device__ __forceinline__ uint64_t read_once(void) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_copy_as(uint64_t policy, uint32_t to, const void *from, uint32_t n,
                                             uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(n), "r"(barrier), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void prefetch(const void *from, uint32_t n) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n) : "memory");
}

/* To the same place in the blocks of the cluster that `mask` names, each completing its own barrier. */
__device__ __forceinline__ void bulk_copy_to_all(uint32_t to, const void *from, uint32_t n, uint32_t barrier,
                                                 uint16_t mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(n), "r"(barrier), "h"(mask)
                 : "memory");
}

/* From shared memory, as a group of its own. What this thread wrote there before fence_for_copies is seen. */
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t n) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(n)
                 : "memory");
}
__device__ __forceinline__ void fence_for_copies(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* Until at most n < 4 groups of this thread still read shared memory; until all are complete. */
__device__ __forceinline__ void bulk_wait_read(int n) {
    if (n == 0) {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    } else if (n == 1) {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    } else if (n == 2) {
        asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
    } else {
        asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
    }
}
__device__ __forceinline__ void bulk_wait(void) { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ uint32_t cluster_rank(void) {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ __forceinline__ void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

enum wgmma_type { WGMMA_F16, WGMMA_BF16, WGMMA_E4M3 };

/* d = a x, or d += a x where `add` is not 0: 64 rows, 8 NT columns, K of 32 bytes. */
template <int TYPE, int NT>
__device__ __forceinline__ void wgmma(float (&d)[NT][4], const uint32_t (&a)[4], uint64_t x, int add);

#define WGMMA_N64(SHAPE, TYPE, END)                                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n64" SHAPE ".f32." TYPE "." TYPE " "                                 \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                   \
                 "{%32, %33, %34, %35}, %36, p, 1, 1" END ";\n}"                                                       \
                 : ACC16(0), ACC16(4)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add))

#define WGMMA_N128(SHAPE, TYPE, END)                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n128" SHAPE ".f32." TYPE "." TYPE " "                                \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                   \
                 "{%64, %65, %66, %67}, %68, p, 1, 1" END ";\n}"                                                       \
                 : ACC16(0), ACC16(4), ACC16(8), ACC16(12)                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add))

#define WGMMA_N256(SHAPE, TYPE, END)                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"                                                         \
                 "wgmma.mma_async.sync.aligned.m64n256" SHAPE ".f32." TYPE "." TYPE " "                                \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                    \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                    \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                    \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "        \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "   \
                 "{%128, %129, %130, %131}, %132, p, 1, 1" END ";\n}"                                                  \
                 : ACC16(0), ACC16(4), ACC16(8), ACC16(12), ACC16(16), ACC16(20), ACC16(24), ACC16(28)                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add))

template <>
__device__ __forceinline__ void wgmma<WGMMA_F16, 8>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N64("k16", "f16", ", 0");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_BF16, 8>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N64("k16", "bf16", ", 0");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_E4M3, 8>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N64("k32", "e4m3", "");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_F16, 16>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N128("k16", "f16", ", 0");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_BF16, 16>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N128("k16", "bf16", ", 0");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_E4M3, 16>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N128("k32", "e4m3", "");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_F16, 32>(float (&d)[32][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N256("k16", "f16", ", 0");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_BF16, 32>(float (&d)[32][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N256("k16", "bf16", ", 0");
}
template <>
__device__ __forceinline__ void wgmma<WGMMA_E4M3, 32>(float (&d)[32][4], const uint32_t (&a)[4], uint64_t x, int add) {
    WGMMA_N256("k32", "e4m3", "");
}
#endif

#endif
