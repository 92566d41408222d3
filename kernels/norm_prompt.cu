/* rmsnorm of prompt rows that leaves its result as the products behind it read it (prompt.cuh). The row meets in shared memory
 * on its way from the order of the norm's sum, which is that of norm.cu, to that of the chunks.
 */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/prepare.cuh"

/* Where number i of the row lies in shared memory: chunks side by side are read from different banks. */
__device__ __forceinline__ int spread(int i) { return i + i / 32 * 8; }

template <int N, enum x_mode MODE>
__global__ void __launch_bounds__(THREADS)
    norm_prepare_kernel(struct ql_rmsnorm_args a, const __grid_constant__ struct push p, struct prepared_x to,
                        bool stored) {
    using chunk_t = x_chunk<MODE>;
    extern __shared__ float row[];
    __shared__ float part[THREADS / 32];
    after_previous();
    if (N > 1) {
        await_row(p, (int)blockIdx.x, a.n);
    }
    float *x = a.x + (int64_t)blockIdx.x * a.n;
    const float *delta = a.delta ? a.delta + (int64_t)blockIdx.x * a.n : NULL,
                *inbox = N > 1 ? p.inbox + (int64_t)blockIdx.x * a.n : NULL;
    float kept[KEEP], w[KEEP], most = 0.0f;
    float sum = take_row<N>(x, delta, inbox, p, a.w, true, a.n, kept, w);
    float scale = 1.0f / sqrtf(block_sum(sum, part, THREADS / 32) / (float)a.n + a.eps);
    float *y = a.y + blockIdx.x * a.ldy;
#pragma unroll
    for (int j = 0; j < KEEP; j++) {
        int i = j * THREADS + threadIdx.x;
        if (i < a.n) {
            float v = (kept[j] * scale) * (1.0f + w[j]);
            row[spread(i)] = v;
            most = larger_x(most, v, MODE);
            if (stored) {
                y[i] = v;
            }
        }
    }
    most = warp_max(most);
    __syncthreads(); /* the sum's parts have been read */
    if ((threadIdx.x & 31) == 0) {
        part[threadIdx.x >> 5] = most;
    }
    __syncthreads();
    float up = 1.0f;
    if (MODE != X_BF16) {
        float back;
        up = x_factor(warp_max(part[threadIdx.x & 31]), MODE, &back);
        if (threadIdx.x == 0) {
            to.scale[blockIdx.x] = back * to.unit;
        }
    }
    for (int q = threadIdx.x; q < a.n / chunk_t::N; q += THREADS) {
        chunk_t v;
        v.load([&](int i) { return row + spread(i); }, q, to.kt);
        v.put(up, to.xs, to.n_col, 0, (int)blockIdx.x, q);
    }
}

template <enum x_mode MODE> static auto kernel_of(int n_lane) {
    return n_lane == 2   ? norm_prepare_kernel<2, MODE>
           : n_lane == 4 ? norm_prepare_kernel<4, MODE>
           : n_lane == 8 ? norm_prepare_kernel<8, MODE>
                         : norm_prepare_kernel<1, MODE>;
}

ql_status ql_rmsnorm_prepare_cuda(ql_dev *dev, const ql_rmsnorm_args *a, const float *own, const struct push *to,
                                  const struct prepared_x &x, bool stored, bool *served) {
    const int n_lane = to ? to->n_lane : 1;
    auto kernel = x.mode == X_F16X2         ? kernel_of<X_F16X2>(n_lane)
                  : x.mode == X_BF16        ? kernel_of<X_BF16>(n_lane)
                  : x.mode == X_E4M3        ? kernel_of<X_E4M3>(n_lane)
                  : x.mode == X_BF16_AS_F16 ? kernel_of<X_BF16_AS_F16>(n_lane)
                                            : NULL;
    *served = kernel && a->y && a->n <= THREADS * KEEP && a->n % 128 == 0;
    if (!*served) {
        return QL_OK;
    }
    ql_rmsnorm_args here = *a;
    here.delta = to ? own : a->delta;
    return launch(dev, "rmsnorm", kernel, (unsigned)a->n_row, THREADS, (size_t)a->n / 32 * 40 * sizeof(float), here,
                  to ? *to : push{}, x, stored);
}
