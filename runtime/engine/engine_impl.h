/* Inside of the engine: one conductor thread owns every sequence and is the only one to command the lanes.
 *
 * Other threads touch only what the mutex guards: the list of requests, the flags, and each request's cancel mark. So a
 * step's state has one writer and needs no lock. Lock order: engine mutex, then nothing; the log's mutex is a leaf.
 */
#ifndef QL_RUNTIME_ENGINE_ENGINE_IMPL_H
#define QL_RUNTIME_ENGINE_ENGINE_IMPL_H

#include "loader/checkpoint.h"
#include "runtime/base/buf.h"
#include "runtime/engine/device.h"
#include "runtime/engine/test_hooks.h"
#include "runtime/lane/lane.h"
#include "runtime/model/model.h"
#include "runtime/text/text.h"

enum { QL_MAX_LANES = QL_MAX_SLICES, QL_MAX_SEQS = 256, QL_MAX_STOP = 16 };

/* ---- plan (plan.c) ------------------------------------------------------------------------------------------- */

/* Checks the fields of `options` that need no device; messages name field and range. */
ql_status ql_options_check(const ql_options *options, const ql_config *config, bool has_mtp, ql_error *err);

/* Limits of a context length under these options. */
ql_model_limits ql_limits_of(const ql_options *options, const ql_devices *devices, int32_t ctx);

/* The longest vector that lanes add: a chunk's rows of the residual stream. */
size_t ql_plan_reduce_bytes(const ql_checkpoint *ckpt, const ql_options *options);

/* Bytes of the lane that holds most, its collectives and about what its device's context takes included. */
uint64_t ql_plan_largest_lane(const ql_checkpoint *ckpt, const ql_options *options, const ql_devices *devices,
                              int32_t ctx);

/* The largest context, a multiple of 64 or the model's limit, whose largest lane fits in `mem`; 0: none. */
int32_t ql_plan_max_ctx(const ql_checkpoint *ckpt, const ql_options *options, const ql_devices *devices, uint64_t mem);

/* ---- a request and its sequence (seq.c) ---------------------------------------------------------------------- */

typedef enum ql_seq_state { QL_SEQ_QUEUED, QL_SEQ_PROMPT, QL_SEQ_GEN, QL_SEQ_ENDED } ql_seq_state;

typedef struct ql_seq ql_seq;
struct ql_seq {
    ql_request_id id;
    ql_event_fn callback;
    void *user;
    uint32_t cancel; /* atomic; set by any thread */

    /* guarded by the engine's mutex */
    ql_seq *next; /* all requests not yet collected */
    bool waited, ended;

    /* set at submit, then read-only */
    int32_t *prompt;
    int32_t n_prompt, max_new, step_rows;
    ql_sampling sampling;
    bool ignore_eos, crc, detach;
    ql_probe_fn probe;
    void *probe_user;
    int64_t submit_ns;

    /* the conductor's */
    ql_seq *next_run; /* queue or active list */
    ql_seq_state state;
    int32_t slot;
    int32_t *page; /* KV pages in order of position */
    int32_t n_page;
    int32_t n_done; /* prompt ids through the model */
    int32_t *ids;
    float *logprobs;
    int32_t n_ids;
    ql_penalty *seen; /* ids rising; NULL without penalties */
    int32_t n_seen;
    ql_detok detok;
    ql_stop stop;
    bool has_text;
    ql_buf piece, text, out; /* new text; text so far; text safe to hand out now */
    uint32_t logits_crc32;
    int64_t start_ns, first_ns, last_ns;
    double prompt_s;
    ql_finish finish;
    ql_error error;
};

/* Checks and copies a request. */
ql_status ql_seq_create(ql_seq **seq, const ql_engine *engine, const ql_request *request, ql_error *err);
void ql_seq_free(ql_seq *seq);

/* What the sampler needs to know for the next id, or for the one behind n_draft ids of a draft. */
void ql_seq_sample_row(const ql_seq *seq, int32_t n_draft, int32_t k_full, ql_sample_row *row);

/* Takes the next id; sets seq->finish when it is the last. `out` gets the text that may be shown now. */
ql_status ql_seq_accept(ql_seq *seq, const ql_engine *engine, int32_t id, float logprob, ql_error *err);

/* Flushes held text into seq->out. */
ql_status ql_seq_flush(ql_seq *seq, ql_error *err);

/* The result of an ended sequence, which loses what it hands over. */
ql_status ql_seq_result(ql_seq *seq, ql_result **result, ql_error *err);

/* Parts of opening, in their order. */
typedef enum ql_open_part {
    QL_OPEN_FILES,
    QL_OPEN_DEVICES,
    QL_OPEN_COLLECTIVES,
    QL_OPEN_MEMORY,
    QL_OPEN_WEIGHTS,
    QL_OPEN_COUNT
} ql_open_part;

/* ---- engine --------------------------------------------------------------------------------------------------- */

struct ql_engine {
    ql_allocator allocator;
    const ql_allocator *mem; /* NULL or &allocator */
    ql_log log;
    ql_options options; /* strings owned */
    ql_test_hooks hooks;
    ql_checkpoint *ckpt;
    ql_tokenizer *tokenizer; /* NULL: ids only */
    ql_thread tokenizing;    /* opens it while lanes load */
    bool is_tokenizing;
    int32_t tokenized; /* atomic: the thread is done */
    ql_error tokenizer_err;
    ql_devices devices;
    int32_t n_lane, ctx;
    ql_model_limits limits;
    ql_shard shard[QL_MAX_LANES];
    uint32_t *allowed;
    ql_lane_group lanes;
    ql_model *model[QL_MAX_LANES];
    uint64_t comm_bytes;                  /* of each lane's collectives */
    uint64_t context_bytes[QL_MAX_LANES]; /* in use on the lane's device beside what the lane asked for */
    ql_pool *pool;                        /* while models load */
    double load_s, stream[QL_MAX_LANES];  /* bytes a second; 0: not measured */
    int64_t opened_ns[QL_OPEN_COUNT];     /* when each part of opening was done */
    int64_t open_start_ns;

    ql_mutex progress_mutex; /* guards the two below and calls of options.progress */
    uint64_t resident_bytes, total_bytes;

    ql_thread conductor;
    bool conducting; /* the conductor runs */

    ql_mutex mutex; /* guards the fields below */
    ql_cond work, done;
    ql_seq *all;                      /* every request not yet collected */
    ql_seq *incoming, **incoming_end; /* submitted, not yet seen by the conductor; linked by next_run */
    ql_request_id last_id;
    bool closing;
    ql_error failed; /* why the engine refuses work */

    /* the conductor's */
    ql_seq *queue, **queue_end; /* waiting for a slot */
    ql_seq *active;             /* in order of admission */
    int32_t *free_slot, n_free_slot;
    int32_t *free_page, n_free_page;
    int32_t n_active;
    ql_step step;
    ql_step_layout layout;
    uint8_t *block;
    ql_seq *out_seq[QL_MAX_SEQS]; /* the sequence of each row with logits */
    ql_seq *seg_seq[QL_MAX_SEQS]; /* the sequence of each segment */
    int32_t out_id[QL_MAX_SEQS];
    float out_logprob[QL_MAX_SEQS];
    float *logits; /* [max_seq][vocab] */

    /* read by ql_engine_stats; relaxed atomics */
    uint64_t n_prompt_tokens, n_generated, n_steps;
    int32_t live, free_slots, free_pages;
};

/* The conductor's thread (conductor.c). */
void *ql_conductor_main(void *engine);

/* Builds the next prompt or generation step from the active sequences (step.c). Returns false when there is none. */
bool ql_step_build_prompt(ql_engine *engine);
bool ql_step_build_gen(ql_engine *engine);

/* Runs engine->step on all lanes (engine.c). */
ql_status ql_engine_run_step(ql_engine *engine, ql_error *err);

#endif
