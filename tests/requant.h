/* Writes a checkpoint's FP8 sibling: the same model, each quantized weight decoded and rounded again to one FP8 format, so
 * that formats can be compared on equal weights and not on two models.
 *
 * What is plain stays as it is, MTP included; a weight that has the wanted format already keeps its bytes. In the block
 * format the head becomes plain BF16, as releases of that format have it. A scale is the largest magnitude of its row or
 * block over 448, rounded up to BF16, so that nothing saturates. Left out are the tensors that qlane ignores (vision, scales
 * of quantized activations and KV caches). Weights go through one band of 128 rows a thread.
 */
#ifndef QL_TESTS_REQUANT_H
#define QL_TESTS_REQUANT_H

#include "loader/checkpoint.h"

/* `to` is QL_FORMAT_FP8_CHANNEL or QL_FORMAT_FP8_BLOCK. Writes config.json, model.safetensors and copies of the tokenizer's
 * and generation's files into the existing directory `dir`. threads 0: one for each processor. *bytes is what
 * model.safetensors holds. The same source gives the same bytes at any number of threads. */
ql_status ql_requant(const ql_checkpoint *from, ql_qformat to, const char *dir, int32_t threads, uint64_t *bytes,
                     ql_error *err);

#endif
