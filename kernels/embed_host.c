/* embed, gather_rows, add: contracts in embed.h. */
#include "kernels/host/host_ops.h"

#include <string.h>

ql_status ql_embed_host(ql_dev *dev, const ql_embed_args *a) {
    if (!ql_dtype_is_plain(a->dtype)) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "embed: dtype %s is not F32, F16 or BF16", ql_dtype_name(a->dtype));
    }
    int64_t row_bytes = (int64_t)a->hidden * ql_dtype_bits(a->dtype) / 8;
    for (int32_t t = 0; t < a->n_row; t++) {
        float *y = a->y + (int64_t)t * a->hidden;
        int32_t id = a->id[t];
        if (id < a->row0 || id >= a->row1) {
            memset(y, 0, (size_t)a->hidden * sizeof *y);
            continue;
        }
        ql_dtype_to_f32(a->dtype, (const unsigned char *)a->table + (id - a->row0) * row_bytes, a->hidden, y);
        for (int32_t i = 0; i < a->hidden; i++) {
            y[i] += 0.0f; /* -0 becomes +0: the contract says why */
        }
    }
    return QL_OK;
}

ql_status ql_gather_rows_host(ql_dev *dev, const ql_gather_rows_args *a) {
    (void)dev;
    for (int32_t j = 0; j < a->n; j++) {
        memcpy(a->y + (int64_t)j * a->width, a->x + (int64_t)a->row[j] * a->width, (size_t)a->width * sizeof *a->y);
    }
    return QL_OK;
}

ql_status ql_add_host(ql_dev *dev, const ql_add_args *a) {
    (void)dev;
    for (int64_t i = 0; i < a->n; i++) {
        a->x[i] += a->y[i];
    }
    return QL_OK;
}
