/* What a kernel needs that waits for another lane: words of GPUs that reach each other's memory, and a clock for its deadline.
 *
 * Such a wait polls a word that the other lane stores with release; once in so many polls it looks at what is slow to read: words of
 * the host's, one of which tells it to let go, and the clock. Then it gives up by returning, with its reason in host memory, so that
 * nothing hangs on the device.
 */
#ifndef QL_KERNELS_CUDA_WAIT_CUH
#define QL_KERNELS_CUDA_WAIT_CUH

#include <stdint.h>

/* At system scope: what a thread of another GPU stored before its release is there after the acquire that sees it. */
__device__ __forceinline__ void store_release_system(uint32_t *at, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t *at) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

/* A wait counts its deadline from its first look, so that one that ends soon never asks. */
__device__ __forceinline__ unsigned long long clock_ns(void) {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

#endif
