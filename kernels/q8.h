/* q8: activations as INT8 with one scale for 32 channels, and NVFP4 weights in records of 64, for cards that have integer
 * matrix units but neither BF16 nor FP8 ones.
 *
 * Record. 64 consecutive weights of a row, 36 bytes; a row of k weights is ceil(k / 64) records, one after another, the last
 * filled up with code 0 and scale 0.
 *
 *   bytes 0..3    four unsigned E4M3 scales, one for 16 weights
 *   bytes 4..35   E2M1 codes: weight 2c in the low nibble of byte 4 + c, weight 2c + 1 in the high one
 *
 * The nibbles are in the order of the checkpoint, whichever way it names its tensors, so a record is two copies of its bytes;
 * compressed-tensors and ModelOpt differ in the tensor scale alone, one the reciprocal of the other, which stays beside the
 * weight. ggml's NVFP4 block has the same scales; its byte 4 + 8 s + j holds weights 16 s + j and 16 s + j + 8.
 *
 * Activations. A block is 32 channels of a row of x, counted from the start of each canonical slice (the last of a slice may
 * be shorter), so that no block depends on how slices are dealt to lanes. Its scale is d = max(amax / 127, 1e-8), a code
 * x / d rounded to the nearest whole number, ties to even: at most 127 in magnitude. A block with a NaN has the scale NaN, one
 * with an infinity the scale infinity and codes 0: either way all that it reaches becomes NaN.
 */
#ifndef QL_KERNELS_Q8_H
#define QL_KERNELS_Q8_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QL_Q8_RECORD = 64, QL_Q8_RECORD_BYTES = 36, QL_Q8_BLOCK = 32 };

/* Blocks of a slice of ks channels. */
static inline int32_t ql_q8_blocks(int32_t ks) { return (ks + QL_Q8_BLOCK - 1) / QL_Q8_BLOCK; }

static inline int64_t ql_q8_row_bytes(int32_t k) {
    return (int64_t)((k + QL_Q8_RECORD - 1) / QL_Q8_RECORD) * QL_Q8_RECORD_BYTES;
}

/* A row of k weights, k a multiple of 16: codes and scales as in a checkpoint to records, and back. */
void ql_q8_pack(const uint8_t *codes, const uint8_t *scales, int32_t k, uint8_t *records);
void ql_q8_unpack(const uint8_t *records, int32_t k, uint8_t *codes, uint8_t *scales);

/* n of ggml's NVFP4 blocks to records, and back. */
void ql_q8_of_ggml(const uint8_t *blocks, int64_t n, uint8_t *records);
void ql_q8_to_ggml(const uint8_t *records, int64_t n, uint8_t *blocks);

/* One block of n <= 32 channels; returns its scale. */
float ql_q8_quantize(const float *x, int32_t n, int8_t *code);

#ifdef __cplusplus
}
#endif
#endif
