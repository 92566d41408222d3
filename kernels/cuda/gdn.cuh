/* What the two forms of gdn on the device share: args by value, gates, normalisation. */
#ifndef QL_KERNELS_CUDA_GDN_CUH
#define QL_KERNELS_CUDA_GDN_CUH

#include "kernels/cuda/dev.cuh"

enum { D = 128, CHUNK = QL_GDN_CHUNK };

/* gdn's args by value; head j of the lane. */
struct heads {
    const float *u, *a, *b, *a_log, *dt_bias;
    float *state, *o;
    int n_key, n_value, key0, value0, group;
};

__device__ __forceinline__ int key_head(const struct heads &h, int j) { return (h.value0 + j) / h.group - h.key0; }
__device__ __forceinline__ int64_t width(const struct heads &h) { return (2 * h.n_key + h.n_value) * (int64_t)D; }
__device__ __forceinline__ const float *q_row(const struct heads &h, int64_t row, int j) {
    return h.u + row * width(h) + key_head(h, j) * D;
}
__device__ __forceinline__ const float *k_row(const struct heads &h, int64_t row, int j) {
    return h.u + row * width(h) + (h.n_key + key_head(h, j)) * D;
}
__device__ __forceinline__ const float *v_row(const struct heads &h, int64_t row, int j) {
    return h.u + row * width(h) + (2 * h.n_key + j) * D;
}
__device__ __forceinline__ float beta_of(const struct heads &h, int64_t row, int j) {
    return sigmoid(h.b[row * h.n_value + j]);
}
__device__ __forceinline__ float g_of(const struct heads &h, int64_t row, int j) {
    float y = h.a[row * h.n_value + j] + h.dt_bias[j];
    return -expf(h.a_log[j]) * (y > 20.0f ? y : log1pf(expf(y)));
}

#define Q_FACTOR 0.08838834764831845f /* 1 / sqrt(128) */

/* 1 / sqrt(sum x^2 + 1e-6) by a warp. */
__device__ __forceinline__ float l2_scale(const float *x, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        sum = fmaf(x[lane + 32 * i], x[lane + 32 * i], sum);
    }
    return 1.0f / sqrtf(warp_sum(sum) + 1e-6f);
}

/* Prompt rows in chunks; compute capability 8.0 or more. */
ql_status ql_gdn_prompt_cuda(ql_dev *dev, const ql_batch &b, const struct heads &h);

#endif
