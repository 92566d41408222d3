/* rmsnorm and gated_norm on the device: contracts in norm.h. A block a row, so that a row's sum has one order. */
#include "kernels/cuda/norm.cuh"

template <int N>
__global__ void __launch_bounds__(THREADS)
    rmsnorm_kernel(struct ql_rmsnorm_args a, const __grid_constant__ struct push p) {
    __shared__ float part[THREADS / 32];
    after_previous();
    if (N > 1) {
        await_row(p, (int)blockIdx.x, a.n);
    }
    float *x = a.x + (int64_t)blockIdx.x * a.n;
    const float *delta = a.delta ? a.delta + (int64_t)blockIdx.x * a.n : NULL,
                *inbox = N > 1 ? p.inbox + (int64_t)blockIdx.x * a.n : NULL;
    float kept[KEEP], w[KEEP];
    float sum = take_row<N>(x, delta, inbox, p, a.w, a.y != NULL, a.n, kept, w);
    for (int i = KEEP * THREADS + threadIdx.x; i < a.n; i += THREADS) {
        float v = x[i];
        if (delta) {
            v += sum_of_lanes<N>(delta, inbox, p, i);
            x[i] = v;
        }
        sum = fmaf(v, v, sum);
    }
    if (!a.y) {
        return;
    }
    float scale = 1.0f / sqrtf(block_sum(sum, part, THREADS / 32) / (float)a.n + a.eps);
    float *y = a.y + blockIdx.x * a.ldy;
#pragma unroll
    for (int j = 0; j < KEEP; j++) {
        int i = j * THREADS + threadIdx.x;
        if (i < a.n) {
            y[i] = (kept[j] * scale) * (1.0f + w[j]);
        }
    }
    for (int i = KEEP * THREADS + threadIdx.x; i < a.n; i += THREADS) {
        y[i] = (x[i] * scale) * (1.0f + a.w[i]);
    }
}

ql_status ql_rmsnorm_cuda(ql_dev *dev, const ql_rmsnorm_args *a) {
    if (a->n_row > 0) {
        return launch(dev, "rmsnorm", rmsnorm_kernel<1>, (unsigned)a->n_row, THREADS, 0, *a, push{});
    }
    return QL_OK;
}

ql_status ql_rmsnorm_of_lanes_cuda(ql_dev *dev, const ql_rmsnorm_args *a, const float *own, const struct push &p) {
    ql_rmsnorm_args here = *a;
    here.delta = own;
    auto kernel = p.n_lane == 2 ? rmsnorm_kernel<2> : p.n_lane == 4 ? rmsnorm_kernel<4> : rmsnorm_kernel<8>;
    return launch(dev, "sum across lanes and rmsnorm", kernel, (unsigned)a->n_row, THREADS, 0, here, p);
}

/* A warp a row and head. */
__global__ void __launch_bounds__(256) gated_norm_kernel(struct ql_gated_norm_args a, int64_t n) {
    after_previous();
    int64_t h = blockIdx.x * 8ll + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (h >= n) {
        return;
    }
    const float *o = a.o + h * 128, *z = a.z + h * 128;
    float v[4], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j] = o[lane + 32 * j];
        sum = fmaf(v[j], v[j], sum);
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / 128.0f + a.eps);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int i = lane + 32 * j;
        a.y[h * 128 + i] = ((v[j] * scale) * a.w[i]) * silu(z[i]);
    }
}

ql_status ql_gated_norm_cuda(ql_dev *dev, const ql_gated_norm_args *a) {
    int64_t n = (int64_t)a->n_row * a->n_head;
    if (n > 0) {
        return launch(dev, "gated_norm", gated_norm_kernel, (unsigned)ceil_div(n, 8), 256, 0, *a, n);
    }
    return QL_OK;
}
