/* swiglu on the device: contract in mlp.h. */
#include "kernels/cuda/dev.cuh"

/* n4: leading numbers that go four at a time */
__global__ void __launch_bounds__(256) swiglu_kernel(const float *g, const float *u, float *y, int64_t n, int64_t n4) {
    after_previous();
    for (int64_t i = 4 * (blockIdx.x * 256ll + threadIdx.x); i < n4; i += 4 * 256ll * gridDim.x) {
        float4 a = *(const float4 *)(g + i), b = *(const float4 *)(u + i);
        *(float4 *)(y + i) = make_float4(silu(a.x) * b.x, silu(a.y) * b.y, silu(a.z) * b.z, silu(a.w) * b.w);
    }
    for (int64_t i = n4 + blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) {
        y[i] = silu(g[i]) * u[i];
    }
}

ql_status ql_swiglu_cuda(ql_dev *dev, const ql_swiglu_args *a) {
    bool aligned = (((uintptr_t)a->g | (uintptr_t)a->u | (uintptr_t)a->y) & 15) == 0;
    int64_t n = (int64_t)a->n_row * a->n, n4 = aligned ? n / 4 * 4 : 0, blocks = ceil_div(n, 256),
            most = 16 * (int64_t)cuda(dev)->n_sm;
    if (n > 0) {
        return launch(dev, "swiglu", swiglu_kernel, (unsigned)(blocks < most ? blocks : most), 256, 0, a->g, a->u, a->y,
                      n, n4);
    }
    return QL_OK;
}
