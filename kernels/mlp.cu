/* swiglu on the device: contract in mlp.h. */
#include "kernels/cuda/dev.cuh"

__global__ void __launch_bounds__(256) swiglu_kernel(const float *g, const float *u, float *y, int64_t n) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) {
        y[i] = silu(g[i]) * u[i];
    }
}

ql_status ql_swiglu_cuda(ql_dev *dev, const ql_swiglu_args *a) {
    int64_t n = (int64_t)a->n_row * a->n, blocks = ceil_div(n, 256), most = 16 * (int64_t)cuda(dev)->n_sm;
    if (n > 0) {
        swiglu_kernel<<<(unsigned)(blocks < most ? blocks : most), 256, 0, cuda(dev)->stream>>>(a->g, a->u, a->y, n);
        return launched(dev, "swiglu");
    }
    return QL_OK;
}
