/* Warpgroup matrix instructions and barriers of compute capability 9.0a, for kernels built around them. HAVE_WGMMA is
 * defined where they exist.
 *
 * Operands in shared memory lie in blocks of 64 numbers, 128 bytes, by any number of rows; the 16-byte pieces of a row are
 * swizzled by its number modulo 8, and a block begins at a multiple of 1024 bytes. A sum of 64 x 8 N has row 16 w + g in
 * lane 4 g + c of warp w, columns 8 n + 2 c and 8 n + 2 c + 1 in d[n][0], d[n][1]; row 16 w + g + 8 in d[n][2], d[n][3].
 */
#ifndef QL_KERNELS_CUDA_WGMMA_CUH
#define QL_KERNELS_CUDA_WGMMA_CUH

#include "kernels/cuda/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

/* What this thread wrote to shared memory may be read by matrix instructions. */
__device__ __forceinline__ void fence_for_wgmma(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A block of 64 numbers of K by rows (of A, or columns of B). */
__device__ __forceinline__ uint64_t descriptor_of_rows(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Blocks of 64 columns by rows of K, `stride` bytes apart. */
__device__ __forceinline__ uint64_t descriptor_of_columns(uint32_t address, int stride) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(stride >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

__device__ __forceinline__ void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving sums past this point. */
template <int N> __device__ __forceinline__ void hold(float (&d)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
    }
}

#define ACC4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define ACC16(i) ACC4(i), ACC4(i + 1), ACC4(i + 2), ACC4(i + 3)

#define WGMMA_ROWS_64(TYPE)                                                                                            \
    asm volatile("{\n.reg .pred go;\nsetp.ne.b32 go, %34, 0;\n"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                   \
                 "%32, %33, go, 1, 1, 0, 0;\n}"                                                                        \
                 : ACC16(0), ACC16(4)                                                                                  \
                 : "l"(a), "l"(b), "r"((int)go_on))

#define WGMMA_COLUMNS_256(TYPE)                                                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                    \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                    \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                    \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "        \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "   \
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"                                                         \
                 : ACC16(0), ACC16(4), ACC16(8), ACC16(12), ACC16(16), ACC16(20), ACC16(24), ACC16(28)                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* d = a b, or d += a b where go_on: 64 rows of a, 64 columns of b, both by rows of K. */
template <bool BF16> __device__ __forceinline__ void wgmma_rows(float (&d)[8][4], uint64_t a, uint64_t b, bool go_on) {
    if (BF16) {
        WGMMA_ROWS_64("bf16");
    } else {
        WGMMA_ROWS_64("f16");
    }
}

/* d += a b: a in registers as of m16n8k16 for each warp's 16 rows, b 256 columns in blocks of 64. */
template <bool BF16> __device__ __forceinline__ void wgmma_columns(float (&d)[32][4], const uint32_t a[4], uint64_t b) {
    if (BF16) {
        WGMMA_COLUMNS_256("bf16");
    } else {
        WGMMA_COLUMNS_256("f16");
    }
}
#endif

#endif
