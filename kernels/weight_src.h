/* What every device asks of a weight slice: a cut that fits the matrix, sound scales, and the words in which a damaged
 * file is refused. Where codes and scales are put, and how codes are looked at, is the device's affair.
 */
#ifndef QL_KERNELS_WEIGHT_SRC_H
#define QL_KERNELS_WEIGHT_SRC_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FP8 blocks that n elements touch, the first of them `offset` elements into its block. */
static inline int32_t ql_fp8_blocks(int32_t offset, int32_t n) {
    return (int32_t)(((int64_t)offset + n + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK);
}

/* Checks the cut and the tensor scale, and describes the slice: format, n, k, factor, offsets into blocks and, for
 * FP8_TENSOR, max_abs; the rest of *w is zero. */
ql_status ql_weight_src_begin(const ql_weight_src *src, ql_weight *w, ql_error *err);

/* Scales of the cut, FP8_CHANNEL and FP8_BLOCK, as f32 and row by row; sets w->max_abs. */
ql_status ql_weight_src_f32_scales(const ql_weight_src *src, ql_weight *w, float *out, ql_error *err);

/* Checks the NVFP4 group scales of the cut, copying them row by row into `out` if that is not NULL; sets w->max_abs. */
ql_status ql_weight_src_group_scales(const ql_weight_src *src, ql_weight *w, uint8_t *out, ql_error *err);

/* The same for a device that has looked at the scales itself: `most` is the largest as a byte. Refuses where that is none
 * that a sound file holds, after looking for its place. */
ql_status ql_weight_src_group_max(const ql_weight_src *src, ql_weight *w, uint8_t most, ql_error *err);

/* Of plain codes: `most` is the largest without its sign; sets w->max_abs. */
void ql_weight_src_plain_max(ql_weight *w, uint32_t most);

/* Refuses the code at a place of the whole matrix, which is no number; always an error. */
ql_status ql_weight_src_bad_code(const ql_weight_src *src, int64_t row, int64_t col, ql_error *err);

#ifdef __cplusplus
}
#endif
#endif
