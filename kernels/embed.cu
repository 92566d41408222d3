/* embed, gather_rows and add on the device: contracts in embed.h. */
#include "kernels/cuda/dev.cuh"

__global__ void __launch_bounds__(256) embed_kernel(struct ql_embed_args a) {
    after_previous();
    int t = blockIdx.y, id = a.id[t];
    bool held = id >= a.row0 && id < a.row1;
    int64_t from = (int64_t)(id - a.row0) * a.hidden;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < a.hidden; i += 256 * gridDim.x) {
        float v = 0.0f;
        if (held) {
            v = a.dtype == QL_DTYPE_F32   ? ((const float *)a.table)[from + i]
                : a.dtype == QL_DTYPE_F16 ? f32_of_f16(((const uint16_t *)a.table)[from + i])
                                          : f32_of_bf16(((const uint16_t *)a.table)[from + i]);
        }
        a.y[(int64_t)t * a.hidden + i] = v + 0.0f; /* -0 becomes +0: the contract says why */
    }
}

ql_status ql_embed_cuda(ql_dev *dev, const ql_embed_args *a) {
    if (!ql_dtype_is_plain(a->dtype)) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "embed: dtype %s is not F32, F16 or BF16", ql_dtype_name(a->dtype));
    }
    for (int t = 0; t < a->n_row; t += 65535) {
        ql_embed_args part = *a;
        part.n_row = a->n_row - t < 65535 ? a->n_row - t : 65535;
        part.id += t;
        part.y += (int64_t)t * a->hidden;
        unsigned gx = (unsigned)(ceil_div(a->hidden, 256) < 8 ? ceil_div(a->hidden, 256) : 8);
        QL_TRY(launch(dev, "embed", embed_kernel, dim3(gx, (unsigned)part.n_row), 256, 0, part));
    }
    return QL_OK;
}

__global__ void __launch_bounds__(256) gather_rows_kernel(struct ql_gather_rows_args a) {
    after_previous();
    const float *x = a.x + (int64_t)a.row[blockIdx.y] * a.width;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < a.width; i += 256 * gridDim.x) {
        a.y[(int64_t)blockIdx.y * a.width + i] = x[i];
    }
}

ql_status ql_gather_rows_cuda(ql_dev *dev, const ql_gather_rows_args *a) {
    for (int j = 0; j < a->n; j += 65535) {
        ql_gather_rows_args part = *a;
        part.n = a->n - j < 65535 ? a->n - j : 65535;
        part.row += j;
        part.y += (int64_t)j * a->width;
        unsigned gx = (unsigned)(ceil_div(a->width, 256) < 8 ? ceil_div(a->width, 256) : 8);
        QL_TRY(launch(dev, "gather_rows", gather_rows_kernel, dim3(gx, (unsigned)part.n), 256, 0, part));
    }
    return QL_OK;
}

__global__ void __launch_bounds__(256) add_kernel(float *x, const float *y, int64_t n) {
    after_previous();
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) {
        x[i] += y[i];
    }
}

ql_status ql_add_cuda(ql_dev *dev, const ql_add_args *a) {
    if (a->n > 0) {
        int64_t blocks = ceil_div(a->n, 256), most = 8 * (int64_t)cuda(dev)->n_sm;
        return launch(dev, "add", add_kernel, (unsigned)(blocks < most ? blocks : most), 256, 0, a->x, a->y, a->n);
    }
    return QL_OK;
}
