/* One lane's model: its slices of the weights, its state, and the forward pass as straight calls on the op table.
 *
 * Every function runs on the lane's thread. All memory is taken when the model opens; a step takes none. The sizes come
 * from one function, ql_model_size, which the plan prints and open obeys.
 */
#ifndef QL_RUNTIME_MODEL_MODEL_H
#define QL_RUNTIME_MODEL_MODEL_H

#include "kernels/kernels.h"
#include "loader/shard.h"
#include "runtime/base/log.h"
#include "runtime/lane/comm.h"

typedef struct ql_model ql_model;

typedef struct ql_model_limits {
    int32_t max_row; /* rows of a step: at least the chunk and the sequences */
    int32_t max_seq; /* live sequences: state slots, segments of a step, rows with logits */
    int32_t max_ctx; /* positions of one sequence */
    int32_t n_page;  /* KV pages of 64 positions, shared by all sequences */
    ql_kv_type kv;
    bool mtp;                                     /* load the multi-token-prediction layer */
    bool verify;                                  /* compare the CRC-32 of resident slices with the file's */
    ql_precision prompt_precision, gen_precision; /* not AUTO */
    ql_order order;
} ql_model_limits;

/* Bytes of a lane. Weights and scales "held" are as the device keeps them, "stored" at the width of the file. */
typedef struct ql_model_bytes {
    uint64_t weight, scale, stored_weight, stored_scale;
    uint64_t kv, state, workspace;
} ql_model_bytes;

/* Candidates a lane can be asked for at most: the same number for every lane. */
int32_t ql_model_k_full(const ql_config *config, int32_t n_lane);

static inline int32_t ql_pages_of(int32_t n_pos) { return (n_pos + QL_PAGE - 1) / QL_PAGE; }
static inline int32_t ql_model_max_page(const ql_model_limits *limits) { return ql_pages_of(limits->max_ctx); }

/* What a lane will hold, from headers alone. `ops` is the device kind's table. */
void ql_model_size(const ql_checkpoint *ckpt, const ql_shard *shard, const ql_model_limits *limits, const ql_ops *ops,
                   ql_model_bytes *out);

/* Bytes of one KV page over all layers of this lane, and of one sequence's state. */
uint64_t ql_model_page_bytes(const ql_checkpoint *ckpt, const ql_shard *shard, const ql_model_limits *limits);
uint64_t ql_model_slot_bytes(const ql_checkpoint *ckpt, const ql_shard *shard);

/* Told after each tensor how many bytes became resident. May be NULL. */
typedef void (*ql_resident_fn)(void *user, uint64_t bytes);

/* Allocates everything and makes the slices resident. `ckpt`, `dev` and `comm` outlive the model. `allowed` is a bit set
 * over the vocabulary of the ids that may be sampled, (vocab + 31) / 32 words; NULL: ql_model_allow will bring it. The threads of `pool`
 * (may be NULL) help and are done when it returns. */
ql_status ql_model_open(ql_model **model, const ql_checkpoint *ckpt, const ql_shard *shard,
                        const ql_model_limits *limits, ql_dev *dev, ql_comm *comm, ql_log *log, const uint32_t *allowed,
                        ql_pool *pool, ql_resident_fn resident, void *user, ql_error *err);
void ql_model_close(ql_model **model);

/* Before the first step, where open was not given the set. */
ql_status ql_model_allow(ql_model *model, const uint32_t *allowed);

/* When everything but the weights was in place, on the clock of ql_now_ns. */
int64_t ql_model_sized_ns(const ql_model *model);

/* What is held, counted while it was allocated. */
const ql_model_bytes *ql_model_held(const ql_model *model);

/* A step's inputs as one block of host memory, so that a lane uploads it with one copy. Offsets are in bytes from the
 * block's start; ql_step_layout fills them for the given counts. */
typedef struct ql_step_layout {
    size_t id, row_seg, row_pos, seg_row, seg_pos, seg_slot, page, out_row; /* int32 */
    size_t next_id, mtp_seg_row;                                            /* int32; multi-token prediction */
    size_t sample, penalty;                                                 /* ql_sample_row, ql_penalty */
    size_t bytes;
} ql_step_layout;

void ql_step_layout_of(const ql_model_limits *limits, ql_step_layout *layout);

/* Penalty entries one step can carry: every id a sequence may have seen, for all sequences. */
int64_t ql_step_max_penalty(const ql_model_limits *limits);

/* One step, the same for every lane. Written by the conductor before it is posted, read-only until all lanes are done,
 * except for the outputs. */
typedef struct ql_step {
    ql_phase phase;
    int32_t n_row, n_seg;
    int32_t n_out; /* rows that get logits and an id */
    int32_t k_cap; /* candidates taken from each lane */
    int32_t n_penalty;
    const uint8_t *block; /* laid out by ql_step_layout_of */

    /* Outputs on the host; NULL where not wanted. Lane l writes the columns of its vocabulary rows. */
    float *logits;  /* [n_out][vocab] raw */
    int32_t *id;    /* [n_out], by lane 0 */
    float *logprob; /* [n_out], by lane 0 */

    /* Intermediate rows for comparison with other implementations, slow; one segment only. */
    float *probe_hidden; /* [n_layer + 1][n_row][hidden], by lane 0 */
    float *probe_final;  /* [n_row][hidden], by lane 0 */
    float *probe_logits; /* [n_row][vocab] */
    float *probe_mtp;    /* [n_mtp_row][vocab] */
    int32_t n_mtp_row;   /* first rows, whose next id is known; 0: the MTP layer does not run */
} ql_step;

/* Runs the step on this lane; every lane of the group must run the same. Outputs are complete on return. */
ql_status ql_model_step(ql_model *model, const ql_step *step);

/* Where the lane's time went, in nanoseconds since open. */
typedef enum ql_phase_kind {
    QL_TIME_EMBED,
    QL_TIME_GDN,
    QL_TIME_ATTENTION,
    QL_TIME_MLP,
    QL_TIME_REDUCE,
    QL_TIME_HEAD,
    QL_TIME_SAMPLE,
    QL_TIME_MTP,
    QL_TIME_COUNT
} ql_phase_kind;
const char *ql_phase_kind_name(ql_phase_kind kind);
/* Read with relaxed atomics by any thread. */
const uint64_t *ql_model_times(const ql_model *model);

#endif
