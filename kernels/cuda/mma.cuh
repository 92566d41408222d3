/* Matrix instructions of 16 x 8 x 16 and what feeds them.
 *
 *   A 16 x 16: lane 4 g + c holds a[0] (row g, k 2c, 2c+1), a[1] (row g + 8), a[2] (row g, k 2c + 8, 2c + 9), a[3] (row g + 8)
 *   B 16 x 8:  b0 (k 2c, 2c+1, column g), b1 (k 2c + 8, 2c + 9)
 *   D 16 x 8:  d[0], d[1] (row g, columns 2c, 2c+1), d[2], d[3] (row g + 8)
 *
 * The order of k is free as long as A and B agree.
 */
#ifndef QL_KERNELS_CUDA_MMA_CUH
#define QL_KERNELS_CUDA_MMA_CUH

#include "kernels/cuda/dev.cuh"

__device__ __forceinline__ void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

/* Not there before compute capability 8.0: the dispatcher sends BF16 weights elsewhere. */
__device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ void copy_async16(void *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(global) : "memory");
#else
    *(uint4 *)shared = *(const uint4 *)global;
#endif
}

/* The same to an address in shared memory, or nothing. */
__device__ __forceinline__ void copy_async16_if(bool real, uint32_t shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared),
        "l"(global), "r"((int)real)
        : "memory");
#endif
}

/* The same for 4 bytes. */
__device__ __forceinline__ void copy_async4(void *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(s), "l"(global) : "memory");
#else
    *(uint32_t *)shared = *(const uint32_t *)global;
#endif
}

/* The same for 8. */
__device__ __forceinline__ void copy_async8(void *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(s), "l"(global) : "memory");
#else
    *(uint2 *)shared = *(const uint2 *)global;
#endif
}

/* The same for 16, or zeros. */
__device__ __forceinline__ void copy_async16_or_zero(void *shared, const void *global, bool real) {
#if __CUDA_ARCH__ >= 800
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s), "l"(global), "r"(real ? 16 : 0) : "memory");
#else
    *(uint4 *)shared = real ? *(const uint4 *)global : make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ void commit_async(void) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void wait_async(void) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

__device__ __forceinline__ void load_matrix4(uint32_t r[4], const void *shared) {
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(s));
}

__device__ __forceinline__ void load_matrix4_transposed(uint32_t r[4], const void *shared) {
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(s));
}

__device__ __forceinline__ uint32_t pack_f16x2(float lo, float hi) {
    __half2 h = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&h;
}

/* The power of two that brings `most` > 0 into [2^14, 2^15), and its inverse; 1 for 0. */
__device__ __forceinline__ float scale_to_f16(float most, float *back) {
    int e = min(14 - ((int)(__float_as_uint(most) >> 23) - 127), 126);
    e = most > 0.0f ? e : 0;
    *back = __uint_as_float((uint32_t)(127 - e) << 23);
    return __uint_as_float((uint32_t)(e + 127) << 23);
}

#endif
