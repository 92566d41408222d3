/* Inside of a lane's model, shared by its three files: sizes and memory (memory.c), weights (weights.c), the forward
 * pass (forward.c). */
#ifndef QL_RUNTIME_MODEL_MODEL_IMPL_H
#define QL_RUNTIME_MODEL_MODEL_IMPL_H

#include "runtime/base/mem.h"
#include "runtime/model/model.h"

typedef struct ql_layer_weights {
    bool full_attention;
    float *input_norm, *post_norm;
    ql_weight gate, up, down;
    ql_weight q, k, v, o;
    float *q_norm, *k_norm;
    ql_kv_cache cache;
    ql_weight in_qkv, in_z, in_b, in_a, out;
    float *conv, *a_log, *dt_bias, *gdn_norm;
    float *state; /* [slot][n_value_head][128][128] */
    float *tail;  /* [slot][3][channels] */
} ql_layer_weights;

/* Activations of one step. Buffers of the mixer and the MLP share memory: one of them runs at a time. */
typedef struct ql_workspace {
    uint8_t *block;               /* the step's inputs */
    float *x;                     /* [T][H] residual stream */
    float *xn;                    /* [T][H] normed */
    float *part, *delta;          /* [T][H] own part (NULL for one lane) and whole of a row-parallel product */
    float *m, *u, *z, *a, *b, *o; /* GatedDeltaNet */
    float *qg, *k, *v, *q;        /* attention */
    float *gate, *up;             /* MLP */
    float *out_x;                 /* [n_out][H] rows that get logits */
    float *logits;                /* [n_out][vocab_local] */
    ql_candidate *cand, *cand_all;
    ql_vocab_stat *stat, *stat_all;
    int32_t *id;
    float *logprob;
    float *mtp_cat, *mtp_x; /* [T][2H], [T][H] */
    size_t bytes;
} ql_workspace;

/* A generation step as the device recorded it (docs/design.md). */
enum { QL_MAX_RECORDINGS = 32 };

typedef struct ql_recording {
    int32_t n_row, n_seg, k_cap, ctx; /* its shape; ctx as in ql_batch */
    void *graph;                      /* NULL: seen once, not recorded yet */
    uint64_t calls[QL_PATH_COUNT];
} ql_recording;

/* Ops of a step that wait to run as one. */
enum { QL_CHAIN_MAX = 64 };

struct ql_model {
    const ql_checkpoint *ckpt;
    const ql_config *config;
    ql_shard shard;
    ql_model_limits limits;
    ql_shape shape;
    ql_dev *dev;
    ql_comm *comm;
    ql_log *log;
    ql_resident_fn resident;
    void *resident_user;

    ql_layer_weights *layer; /* config->n_layer */
    void *embed;
    float *norm;
    ql_weight lm_head;
    bool has_mtp;
    struct {
        ql_weight fc;
        float *norm_embedding, *norm_hidden, *norm;
        ql_layer_weights layer;
    } mtp;

    float *rope; /* [max_ctx][rotary/2][2] */
    uint32_t *allowed;
    ql_workspace ws;
    void *ws_memory;
    ql_step_layout layout;
    ql_model_bytes held;
    int32_t n_beyond; /* weights beyond what trained ones reach */
    int64_t sized_ns;
    uint64_t time_ns[QL_TIME_COUNT];
    ql_recording recording[QL_MAX_RECORDINGS];
    int32_t n_recording, next_recording;
    ql_op *chain; /* QL_CHAIN_MAX; NULL: the device runs each op by itself */
    int32_t n_chain;
    bool chaining; /* this step's ops go there */
};

ql_shape ql_model_shape(const ql_config *config, const ql_shard *shard, const ql_model_limits *limits);

/* GatedDeltaNet channels of the lane: q, k and v. */
static inline int32_t ql_model_channels(const ql_shard *s) {
    return (2 * (s->k1 - s->k0) + (s->v1 - s->v0)) * QL_GDN_DIM;
}

/* Places the workspace at `base`, or only sizes it where base is NULL. */
void ql_workspace_place(ql_workspace *ws, const ql_config *config, const ql_shard *shard, const ql_model_limits *limits,
                        uint8_t *base);

/* The rotary table's rows of positions [p0, p1): cosine and sine of each pair, [p1 - p0][rotary_dim / 2][2], scaled as YaRN scales
 * attention where the configuration has it. */
void ql_rope_fill(const ql_config *config, int64_t p0, int64_t p1, float *rows);

ql_status ql_model_load_weights(ql_model *model);
void ql_model_free_weights(ql_model *model);

#endif
