/* The tensors of the architecture as one table: how each is called, what shape it has, how lanes cut it.
 *
 * Binding a checkpoint, visiting it, planning lanes and writing synthetic checkpoints all walk this table, so that a
 * tensor cannot be known to one of them and forgotten by another.
 */
#ifndef QL_LOADER_ROLE_H
#define QL_LOADER_ROLE_H

#include "loader/config.h"

/* The part a tensor plays decides how it is cut (loader/shard.h). */
typedef enum ql_part {
    QL_PART_WHOLE, /* norms, mtp.fc */
    QL_PART_Q,
    QL_PART_KV,
    QL_PART_O, /* q_proj rows; k_proj and v_proj rows; o_proj columns */
    QL_PART_IN_QKV,
    QL_PART_VALUE,
    QL_PART_OUT,        /* three row ranges (conv1d too); in_proj_z rows; out_proj columns */
    QL_PART_VALUE_HEAD, /* one row or element a value head: in_proj_a/b, A_log, dt_bias */
    QL_PART_MLP,
    QL_PART_DOWN,  /* gate and up rows; down columns */
    QL_PART_VOCAB, /* embedding and head rows */
} ql_part;

typedef enum ql_role {
    QL_ROLE_EMBED,
    QL_ROLE_NORM,
    QL_ROLE_LM_HEAD,
    QL_ROLE_INPUT_NORM,
    QL_ROLE_POST_NORM,
    QL_ROLE_GATE,
    QL_ROLE_UP,
    QL_ROLE_DOWN,
    QL_ROLE_Q,
    QL_ROLE_K,
    QL_ROLE_V,
    QL_ROLE_O,
    QL_ROLE_Q_NORM,
    QL_ROLE_K_NORM,
    QL_ROLE_IN_QKV,
    QL_ROLE_IN_Z,
    QL_ROLE_IN_B,
    QL_ROLE_IN_A,
    QL_ROLE_OUT,
    QL_ROLE_CONV,
    QL_ROLE_A_LOG,
    QL_ROLE_DT_BIAS,
    QL_ROLE_GDN_NORM,
    QL_ROLE_MTP_FC,
    QL_ROLE_MTP_NORM_EMBEDDING,
    QL_ROLE_MTP_NORM_HIDDEN,
    QL_ROLE_MTP_NORM,
    QL_ROLE_COUNT
} ql_role;

typedef enum ql_place {
    QL_PLACE_GLOBAL, /* once, under the decoder's prefix (lm_head: without it) */
    QL_PLACE_LAYER,  /* in every layer, the MTP layer too */
    QL_PLACE_FULL,   /* in full-attention layers, the MTP layer too */
    QL_PLACE_GDN,    /* in GatedDeltaNet layers */
    QL_PLACE_MTP,    /* once, under "mtp." */
} ql_place;

typedef struct ql_role_info {
    const char *path; /* of a linear its module ("mlp.up_proj"), else the tensor ("linear_attn.A_log") */
    ql_place place;
    bool linear;
    ql_part part;
    const char *kind; /* for people: "weight", "norm", "embedding", ... */
    size_t offset;    /* of its member in ql_layer, or in ql_checkpoint for GLOBAL and MTP places */
} ql_role_info;

const ql_role_info *ql_role_get(ql_role role);

/* Whole, unquantized shape. Returns the rank, 1 to 3. */
int32_t ql_role_shape(const ql_config *config, ql_role role, int64_t shape[3]);

#endif
