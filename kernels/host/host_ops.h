/* What serves each op on a CPU lane. host_dev.c starts from the twins; each instruction-set level overwrites what it
 * improves. Counters, progress and scratch size checks are the dispatcher's: the functions here only compute.
 *
 * A twin <op>_host follows its contract by plain loops. A variant ql_<op>_<level> gives the twin's bits for every input.
 * All run on the lane's own thread and may use dev->scratch, all of it, for the time of the call.
 */
#ifndef QL_KERNELS_HOST_HOST_OPS_H
#define QL_KERNELS_HOST_HOST_OPS_H

#include "kernels/kernels.h"

/* twins */
ql_status ql_embed_host(ql_dev *dev, const ql_embed_args *a);
ql_status ql_linear_host(ql_dev *dev, const ql_linear_args *a);
ql_status ql_rmsnorm_host(ql_dev *dev, const ql_rmsnorm_args *a);
ql_status ql_gated_norm_host(ql_dev *dev, const ql_gated_norm_args *a);
ql_status ql_conv_host(ql_dev *dev, const ql_conv_args *a);
ql_status ql_gdn_host(ql_dev *dev, const ql_gdn_args *a);
ql_status ql_attn_prep_host(ql_dev *dev, const ql_attn_prep_args *a);
ql_status ql_attention_host(ql_dev *dev, const ql_attention_args *a);
ql_status ql_swiglu_host(ql_dev *dev, const ql_swiglu_args *a);
ql_status ql_add_host(ql_dev *dev, const ql_add_args *a);
ql_status ql_gather_rows_host(ql_dev *dev, const ql_gather_rows_args *a);
ql_status ql_topk_host(ql_dev *dev, const ql_topk_args *a);
ql_status ql_sample_host(ql_dev *dev, const ql_sample_args *a);

/* Scratch of an op and of its variants, for a shape. Ops without a line here use none. */
size_t ql_linear_host_scratch(const ql_shape *shape);
size_t ql_gdn_host_scratch(const ql_shape *shape);
size_t ql_attention_host_scratch(const ql_shape *shape);

/* variants */
ql_status ql_linear_avx2(ql_dev *dev, const ql_linear_args *a);
ql_status ql_linear_avx512(ql_dev *dev, const ql_linear_args *a);
ql_status ql_gdn_avx2(ql_dev *dev, const ql_gdn_args *a);
ql_status ql_gdn_avx512(ql_dev *dev, const ql_gdn_args *a);
ql_status ql_attention_avx2(ql_dev *dev, const ql_attention_args *a);
ql_status ql_attention_avx512(ql_dev *dev, const ql_attention_args *a);

/* weights, shared by all host levels (host_weight.c) */
void ql_host_weight_bytes(ql_qformat format, int32_t n, int32_t k, int32_t row_off, int32_t col_off,
                          uint64_t *weight_bytes, uint64_t *scale_bytes);
ql_status ql_host_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out);
ql_status ql_host_weight_same(ql_dev *dev, const ql_weight *w, const ql_weight_src *src, const char **differs);
ql_status ql_host_weight_crc(ql_dev *dev, const ql_weight *w, uint32_t *crc);
void ql_host_weight_free(ql_dev *dev, ql_weight *w);

/* Zeroed, 64-byte aligned host memory from dev->mem. */
ql_status ql_host_alloc(ql_dev *dev, size_t bytes, const char *what, void **out);
void ql_host_free(ql_dev *dev, void *ptr);

#endif
