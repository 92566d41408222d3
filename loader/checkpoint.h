/* A checkpoint directory as a model description: which tensor plays which part, in which format.
 *
 * Formats are decided by the tensors that are present and compared with the configuration. Opening reads headers and
 * configuration only. The rules, each with its message:
 *   - every tensor that the architecture needs exists, once, with its shape;
 *   - every weight scale belongs to exactly one weight and is consumed by it; none is invented;
 *   - quantized where the configuration says plain is refused; the opposite is accepted and noted, with a warning where it is
 *     more than exports commonly leave plain, and refused when such weights are loaded and turn out to be bare codes
 *     (runtime/model/weights.c);
 *   - a name that is neither needed nor known to be ignorable is refused.
 */
#ifndef QL_LOADER_CHECKPOINT_H
#define QL_LOADER_CHECKPOINT_H

#include "loader/role.h"
#include "loader/safetensors.h"
#include "runtime/base/hub.h"

/* A linear weight with its scales. */
typedef struct ql_linear {
    char module[160]; /* path without prefix aliases: "layers.3.mlp.up_proj", "lm_head", "mtp.fc" */
    ql_qformat format;
    int32_t n, k; /* rows (out), columns (in) of the whole matrix */
    const ql_tensor *weight;
    const ql_tensor
        *scale; /* FP8_CHANNEL [n,1] or [n]; FP8_BLOCK [ceil n/128, ceil k/128]; NVFP4 E4M3 [n,k/16]; else NULL */
    const ql_tensor *factor; /* FP8_TENSOR and NVFP4: one number; else NULL */
    bool factor_divides;     /* compressed-tensors' weight_global_scale: w = ... / factor */
    const char *unexpected;  /* stored plain although the configuration says quantized: those words; else NULL */
} ql_linear;

typedef struct ql_layer {
    bool full_attention;
    const ql_tensor *input_norm, *post_norm; /* [H] */
    ql_linear gate, up, down;
    /* full attention */
    ql_linear q, k, v, o;             /* q: query and gate interleaved per head, [n_head * 512, H] */
    const ql_tensor *q_norm, *k_norm; /* [256] */
    /* GatedDeltaNet */
    ql_linear in_qkv, in_z, in_b, in_a, out;
    const ql_tensor *conv;            /* [channels, 1, 4] */
    const ql_tensor *a_log, *dt_bias; /* [n_value_head] */
    const ql_tensor *gdn_norm;        /* [128] */
} ql_layer;

struct ql_checkpoint {
    char *dir; /* resolved directory */
    ql_config config;
    ql_safetensors *file;
    int32_t n_file;
    const ql_tensor **tensor; /* all tensors of all files, in name order */
    ql_tensor_info *info;     /* the decision table, parallel to tensor */
    int32_t n_tensor;
    char **note;
    int32_t n_note;
    const char *warning;           /* the note about weights that are stored plain unexpectedly, or NULL */
    const ql_tensor *embed, *norm; /* [vocab, H], [H] */
    ql_linear lm_head;             /* tied: the embedding */
    ql_layer *layer;               /* config.n_layer of them */
    bool has_mtp;
    struct {
        ql_linear fc; /* [H, 2H], columns of the embedding first */
        const ql_tensor *norm_embedding, *norm_hidden, *norm;
        ql_layer layer;
    } mtp;
    ql_checkpoint_info summary;
    struct ql_owned *owned; /* what info and notes point at */
};

/* One weight of the model, as ql_checkpoint_each meets it. */
enum { QL_LAYER_NONE = -1, QL_LAYER_MTP = -2 };

typedef struct ql_visit {
    int32_t layer; /* 0 to n_layer-1, QL_LAYER_MTP, or QL_LAYER_NONE outside layers */
    ql_role role;
    ql_part part;            /* for ql_shard_cut */
    const ql_linear *linear; /* exactly one of these two is set */
    const ql_tensor *tensor;
} ql_visit;

typedef ql_status (*ql_visit_fn)(void *user, const ql_visit *visit, ql_error *err);

/* Visits every weight that a lane loads, once and in load order: embedding, layers, final norm, head and, when
 * `with_mtp`, the MTP module. A tied head is visited as the embedding only. Stops at the first failure of `fn` and
 * returns it. `with_mtp` on a checkpoint without MTP is QL_ERR_USAGE. */
ql_status ql_checkpoint_each(const ql_checkpoint *checkpoint, bool with_mtp, ql_visit_fn fn, void *user, ql_error *err);

/* ql_checkpoint_open, _close, _get_info, _get_tensor, _tensor_crc and _note of qlane.h are defined in checkpoint.c,
 * ql_checkpoint_plan by the engine. */

#endif
