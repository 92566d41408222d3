/* Which part of each tensor one lane holds (docs/design.md, "Only slices are resident").
 *
 * The model is cut into S canonical slices of query heads, value heads and MLP channels; a lane owns S / n_lane
 * consecutive ones. Key/value heads and GatedDeltaNet key heads follow the heads that use them and are held by every
 * lane that needs them. Vocabulary rows are cut into 8 canonical ranges [vocab*i/8, vocab*(i+1)/8).
 */
#ifndef QL_LOADER_SHARD_H
#define QL_LOADER_SHARD_H

#include "loader/checkpoint.h"

enum { QL_VOCAB_SLICES = 8 };

typedef struct ql_shard {
    int32_t lane, n_lane;
    int32_t slice0, slice1; /* canonical slices */
    int32_t q0, q1;         /* query heads */
    int32_t kv0, kv1;       /* key/value heads; query head h uses h / (n_head / n_kv_head) */
    int32_t v0, v1;         /* GatedDeltaNet value heads */
    int32_t k0, k1;         /* GatedDeltaNet key heads; value head j uses j / (n_value_head / n_key_head) */
    int32_t m0, m1;         /* MLP channels */
    int32_t vocab0, vocab1; /* vocabulary rows */
} ql_shard;

/* Refuses a lane count that does not divide S, naming those that do. */
ql_status ql_shard_init(ql_shard *shard, const ql_config *config, int32_t n_lane, int32_t lane, ql_error *err);

typedef struct ql_cut {
    int32_t axis;    /* 0: rows, 1: columns, -1: whole */
    int32_t n_range; /* row cuts: 1 to 3; column cuts: 1 */
    int32_t begin[3], end[3];
} ql_cut;

/* For a whole tensor n_range is 0. */
ql_cut ql_shard_cut(const ql_config *config, const ql_shard *shard, ql_part part);

/* Rows (axis 0) or columns (axis 1) in the cut; 0 for whole. */
int32_t ql_cut_len(const ql_cut *cut);

/* Bytes of a linear's slice at the width of the file. Row scales of column cuts are whole; a 128-block scale goes with
 * every slice that touches its block; single factors are not counted. */
void ql_linear_stored_bytes(const ql_linear *linear, const ql_cut *cut, uint64_t *weight_bytes, uint64_t *scale_bytes);

/* Bytes of a plain tensor's slice at the width of the file. */
uint64_t ql_tensor_stored_bytes(const ql_tensor *tensor, const ql_cut *cut);

#endif
