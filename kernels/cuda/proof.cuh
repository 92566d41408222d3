/* What lanes add when they prove that a way of adding across them is right. */
#ifndef QL_KERNELS_CUDA_PROOF_CUH
#define QL_KERNELS_CUDA_PROOF_CUH

#include <stdint.h>

/* Element i of a lane's part of a round: whole numbers up to 2^20, so that every partial sum is exact and any error is an error
 * of the way. */
__device__ __forceinline__ float proof_value(int lane, uint32_t round, int64_t i) {
    uint32_t h = (uint32_t)i * 2654435761u ^ round * 2246822519u ^ (uint32_t)(lane + 1) * 3266489917u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    return (float)((int32_t)(h >> 11) - (1 << 20));
}

#endif
