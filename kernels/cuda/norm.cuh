/* What the kernels of rmsnorm share: how a block takes a row, and so the order of its sum. */
#ifndef QL_KERNELS_CUDA_NORM_CUH
#define QL_KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/push.cuh"

/* Threads of a block; rows of up to THREADS * KEEP numbers stay in registers between sum and result. */
enum { THREADS = 1024, KEEP = 6 };

/* Of the row x, n numbers: numbers j * THREADS + thread with `delta` (of all lanes, as sum_of_lanes) added, where there is one, and
 * stored; the norm's weights beside them, where `weighted`. Returns the thread's part of the sum of squares of those. */
template <int N>
__device__ __forceinline__ float take_row(float *x, const float *delta, const float *inbox, const struct push &p,
                                          const float *weight, bool weighted, int n, float (&kept)[KEEP],
                                          float (&w)[KEEP]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEEP; j++) { /* all loads before the first use */
        int i = j * THREADS + threadIdx.x;
        kept[j] = i < n ? x[i] : 0.0f;
        w[j] = i < n && weighted ? weight[i] : 0.0f;
    }
    if (delta) {
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            int i = j * THREADS + threadIdx.x;
            kept[j] += i < n ? sum_of_lanes<N>(delta, inbox, p, i) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < KEEP; j++) {
            int i = j * THREADS + threadIdx.x;
            if (i < n) {
                x[i] = kept[j];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < KEEP; j++) {
        sum = fmaf(kept[j], kept[j], sum);
    }
    return sum;
}

#endif
