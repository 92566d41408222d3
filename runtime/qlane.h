/* qlane.h - run Qwen3.5 / 3.6 / 3.8 dense text models on the GPUs (or CPU lanes) of one machine.
 *
 * The only public header. A whole program:
 *
 *     #include <qlane.h>
 *     #include <stdio.h>
 *
 *     int main(void) {
 *         ql_error err = {0};
 *         ql_engine *engine = NULL;
 *         ql_options opt = ql_options_default();
 *         opt.model = "models/tiny";
 *         opt.lanes = 2;
 *         ql_request req = ql_request_default();
 *         req.text = "The capital of France is";
 *         req.max_new = 16;
 *         ql_result *res = NULL;
 *         if (ql_engine_open(&engine, &opt, &err) == QL_OK &&
 *             ql_generate(engine, &req, &res, &err) == QL_OK)
 *             printf("%s\n", res->text);
 *         else
 *             fprintf(stderr, "%s: %s\n", ql_status_text(err.status), err.text);
 *         ql_result_free(res);
 *         ql_engine_close(&engine);
 *         return err.status ? 1 : 0;
 *     }
 *
 * Conventions
 *   Errors    Every fallible call returns a ql_status and, when `err` is not NULL, leaves one line of text there.
 *             On failure outputs are untouched unless the call says otherwise.
 *   Handles   open / close own threads and devices; close takes the address of the handle, clears it, accepts NULL.
 *   Threads   An engine may be used from any number of threads at once. Calls that block say so. A checkpoint and a
 *             tokenizer are immutable after open and may be shared freely.
 *   Process   The library installs no signal handler, never exits, never writes to stdout or stderr, keeps no mutable
 *             global state, and leaves the calling thread's current CUDA device as it found it.
 *   Growth    Structs that callers fill start with `size`; get them from their _default function, which sets it. Fields may
 *             be added from version to version: a struct of another size is refused, and the program wants compiling again.
 */
#ifndef QLANE_H
#define QLANE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define QL_API __attribute__((visibility("default")))
#else
#define QL_API
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

/* Values are fixed for ever; new ones are added at the end. */
typedef enum ql_status {
    QL_OK = 0,
    QL_ERR_USAGE = -1,    /* an argument or option is not acceptable; the text names the value and what is */
    QL_ERR_MODEL = -2,    /* a model or input file is missing, damaged or of an unsupported kind */
    QL_ERR_DEVICE = -3,   /* a lane's device or a collective failed, or there are fewer devices than lanes */
    QL_ERR_MEMORY = -4,   /* host or device memory does not suffice; the text says what would fit */
    QL_ERR_STATE = -5,    /* the call does not fit the object's state: the engine failed earlier or is closing */
    QL_ERR_INTERNAL = -6, /* a broken invariant of ours */
} ql_status;

typedef struct ql_error {
    ql_status status;
    char text[512]; /* one line, no newline, no trailing full stop; empty when status is QL_OK */
} ql_error;

/* Short constant name of a status, such as "bad model". Never NULL. */
QL_API const char *ql_status_text(ql_status status);

/* "0.1.0 (commit, host only)" or with the CUDA and NCCL versions it was built with. Static storage. */
QL_API const char *ql_version(void);

/* ---- options ------------------------------------------------------------------------------------------------ */

typedef enum ql_device_kind { QL_DEVICE_AUTO = 0, QL_DEVICE_HOST = 1, QL_DEVICE_CUDA = 2 } ql_device_kind;

typedef enum ql_kv_type { QL_KV_F16 = 0, QL_KV_F32 = 1, QL_KV_BF16 = 2, QL_KV_FP8 = 3 } ql_kv_type;

/* Precision of the activation that meets a weight; weights are always exact.
 *   EXACT  enters as f32.   BF16  rounded once to BF16.
 *   FP8    dynamic E4M3, one scale per token and canonical slice, for matrices stored as FP8; all others as BF16.
 *   Q8     dynamic INT8, one scale per token and 32 channels, for matrices stored as NVFP4; for those stored as FP8 rounded
 *          once to 11 bits; all others as EXACT. Of both phases or of neither, since a GPU keeps weights in another order for
 *          it. CUDA lanes pick its kernels by the number of rows: bits are those of any lane count, not of any chunk.
 *   AUTO   EXACT on host lanes; on CUDA lanes BF16 for prompt rows and EXACT for generated rows, Q8 where the GPU has
 *          neither BF16 nor FP8 units (compute capability 7.5); Q8 for a phase whose other phase is Q8. */
typedef enum ql_precision {
    QL_PREC_AUTO = 0,
    QL_PREC_EXACT = 1,
    QL_PREC_BF16 = 2,
    QL_PREC_FP8 = 3,
    QL_PREC_Q8 = 4
} ql_precision;

/* Order of the sums over input channels that lanes share.
 *   TREE  the model's canonical slices as one tree: the same bits at any lane count.
 *   FAST  in prompt rows each lane adds its channels in one go, which saves the seams between slices. Bits then depend on
 *         the lane count, and still on nothing else. Generated rows, which it costs nothing, and precision Q8 keep the
 *         tree. */
typedef enum ql_order { QL_ORDER_TREE = 0, QL_ORDER_FAST = 1 } ql_order;

typedef enum ql_log_level { QL_LOG_ERROR = 0, QL_LOG_WARN = 1, QL_LOG_INFO = 2, QL_LOG_DEBUG = 3 } ql_log_level;

/* Receives one line without newline. May be called from any thread of the engine, never concurrently for one engine. */
typedef void (*ql_log_fn)(void *user, ql_log_level level, const char *line);

/* Bytes of weights resident so far and in all, over all lanes. Called from lane threads while an engine opens, never
 * concurrently for one engine. */
typedef void (*ql_progress_fn)(void *user, uint64_t done_bytes, uint64_t total_bytes);

/* Where an engine takes the memory that it holds from open to close: host lanes' weights, KV, state and workspaces,
 * staging, step buffers. All three functions or none. Requests, results, parsed files and the third-party libraries keep
 * to malloc. Must be thread safe; `free` is called with NULL too. */
typedef struct ql_allocator {
    void *(*malloc)(void *user, size_t bytes);
    void *(*realloc)(void *user, void *old, size_t bytes);
    void (*free)(void *user, void *ptr);
    void *user;
} ql_allocator;

typedef struct ql_options {
    size_t size;       /* sizeof(ql_options), set by ql_options_default */
    const char *model; /* checkpoint directory, or a Hub id found in the local Hugging Face cache; required */
    ql_device_kind device;
    int32_t lanes;          /* 0: every usable GPU that the model's slices allow, or 1 host lane */
    const int32_t *devices; /* `lanes` CUDA ordinals, or NULL for 0, 1, ... ; only with QL_DEVICE_CUDA */
    int32_t ctx;      /* context of one sequence in tokens; 0: the model's limit or what fits, whichever is less */
    int32_t max_seqs; /* sequences that may be live at once, 1..256; default 8 */
    int32_t chunk;    /* prompt rows of one step, a positive multiple of 64; default 1536 */
    ql_kv_type kv;
    ql_precision prompt_precision, gen_precision;
    const char *kernels; /* "family=name,family=name" to force variants, or NULL; unknown names are an error */
    int32_t mtp;         /* nonzero: load the multi-token-prediction layer; refused where the checkpoint has none */
    int32_t verify;      /* nonzero: read every resident slice back and compare it with the file */
    uint64_t mem_bytes;  /* memory one lane may use for everything it holds, its GPU's context included; 0: what the
                          * device has */
    int32_t wait_ms;     /* deadline of any wait on a lane or peer that makes no progress; default 10000 */
    int32_t init_ms;     /* deadline of communicator set-up; default 20000 */
    ql_log_fn log;
    void *log_user;
    ql_progress_fn progress;
    void *progress_user;
    const ql_allocator *allocator; /* copied; NULL: malloc */
    int32_t measure; /* nonzero: measure each lane's memory bandwidth once weights are there; see ql_engine_lane_info */
    int32_t profile; /* nonzero: time the phases on CUDA lanes too; generation steps then run unrecorded, slower */
    ql_order order;
} ql_options;

QL_API ql_options ql_options_default(void);

/* ---- engine ------------------------------------------------------------------------------------------------- */

typedef struct ql_engine ql_engine;

/* Opens the checkpoint, starts one thread per lane and one conductor, and makes each lane's slices resident. A few more
 * threads read files meanwhile and have ended when it returns. Blocks until all lanes are ready. Strings and arrays in `options` are copied. On failure *engine is NULL, everything is
 * released and `err` holds the first error of any lane. */
QL_API ql_status ql_engine_open(ql_engine **engine, const ql_options *options, ql_error *err);

/* Cancels what is unfinished (finish QL_FINISH_CANCEL), joins every thread and frees everything. Blocks; a lane that
 * does not come back within wait_ms is reported through the log hook and left behind. No other call on the engine may
 * be running or follow. Sets *engine to NULL. */
QL_API void ql_engine_close(ql_engine **engine);

/* ---- requests ----------------------------------------------------------------------------------------------- */

/* A sampler's settings. temperature 0 is greedy: the highest logit, lowest id on a tie. Order: penalties, temperature,
 * top-k, top-p, min-p, draw. */
typedef struct ql_sampling {
    float temperature; /* >= 0 */
    int32_t top_k;     /* keep the k likeliest ids; 0: all */
    float top_p;       /* keep the smallest likeliest set with mass >= top_p, in (0,1]; 1: all */
    float min_p;       /* drop ids less likely than min_p times the likeliest, in [0,1]; 0: none */
    float
        repetition_penalty; /* > 0; ids in prompt or output: positive logits divided by it, others multiplied; 1: off */
    float presence_penalty; /* subtracted once from ids already generated; in [-2,2]; 0: off */
    float frequency_penalty; /* subtracted for each time an id was generated; in [-2,2]; 0: off */
    uint64_t seed;           /* equal seed, prompt and settings give equal output at any lane count */
} ql_sampling;

/* Rows of intermediate values of a prompt, for comparison with other implementations. */
typedef enum ql_probe_kind {
    QL_PROBE_HIDDEN = 0, /* residual stream after the embedding (layer 0) and after layer i (layer i+1); width H */
    QL_PROBE_FINAL_HIDDEN = 1, /* after the final norm; width H */
    QL_PROBE_LOGITS = 2,       /* width: vocabulary with padding rows */
    QL_PROBE_MTP_LOGITS = 3,   /* row t predicts token t+2; only prompt rows with a known next token */
} ql_probe_kind;

/* Called on the conductor thread, in row order for each kind and layer. `values` is row-major [n_row][width] and valid
 * during the call only. */
typedef void (*ql_probe_fn)(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                            const float *values);

typedef enum ql_finish {
    QL_FINISH_NONE = 0,   /* not ended, or ended by an error */
    QL_FINISH_EOS = 1,    /* the model produced an end-of-sequence id */
    QL_FINISH_STOP = 2,   /* a stop string appeared in the text */
    QL_FINISH_LENGTH = 3, /* max_new ids, or the context is full */
    QL_FINISH_CANCEL = 4,
} ql_finish;

/* "eos", "stop", "length", "cancel" or "none". */
QL_API const char *ql_finish_text(ql_finish finish);

typedef struct ql_request {
    size_t size;
    const char *text;   /* prompt as UTF-8, or NULL when `ids` is given; exactly one of the two */
    size_t text_bytes;  /* 0: strlen(text) */
    const int32_t *ids; /* prompt as token ids */
    int32_t n_ids;
    int32_t max_new; /* ids to generate at most; 0: until an end-of-sequence id or the context is full */
    ql_sampling sampling;
    int32_t model_sampling;  /* nonzero (default): temperature, top_k and top_p come from generation_config.json */
    const char *const *stop; /* stop strings, matched on text; need a tokenizer */
    int32_t n_stop;          /* up to 16, each 1..1024 bytes */
    int32_t ignore_eos;      /* nonzero: end-of-sequence ids do not end generation */
    int32_t crc;             /* nonzero: compute ql_result.logits_crc32 (copies logits to the host) */
    ql_probe_fn probe;       /* NULL: none. Slow; keeps the prompt's intermediate rows */
    void *probe_user;
    int32_t detach;    /* nonzero: nobody will ql_wait; the result is dropped after the last callback */
    int32_t step_rows; /* for measuring: rows of a generation step, 1 (default, as 0) to max_seqs; above 1 no penalties.
                        * Those behind the first are a draft, copies of the last id, and taken whatever the model chooses,
                        * whose log probability is still reported: the text means nothing, a step costs what the check of
                        * a draft does. Fewer where other sequences leave no room */
} ql_request;

QL_API ql_request ql_request_default(void);

typedef enum ql_event_kind {
    QL_EVENT_PROMPT = 0, /* `done` of `total` prompt ids are through the model */
    QL_EVENT_TOKEN = 1,  /* one id was chosen; `text` is what became printable with it */
    QL_EVENT_END = 2,    /* last event of a request; `text` is the flushed rest */
} ql_event_kind;

typedef uint64_t ql_request_id; /* never 0, never reused within an engine */

typedef struct ql_event {
    ql_event_kind kind;
    ql_request_id request;
    int32_t done, total; /* QL_EVENT_PROMPT */
    int32_t id;          /* QL_EVENT_TOKEN */
    float logprob;       /* QL_EVENT_TOKEN: natural log, of the raw distribution over the whole vocabulary */
    const char *text;    /* valid UTF-8, NUL-terminated, "" without a tokenizer; valid during the call */
    size_t text_bytes;
    ql_finish finish;      /* QL_EVENT_END */
    const ql_error *error; /* QL_EVENT_END: NULL, or why the request failed */
} ql_event;

/* All events of an engine come one at a time from its conductor thread, in order for each request. The callback may
 * call ql_submit and ql_cancel; it must not block on the engine (ql_wait, ql_generate, ql_engine_close). */
typedef void (*ql_event_fn)(void *user, const ql_event *event);

typedef struct ql_result {
    ql_request_id request;
    ql_status status; /* QL_OK, or why the request failed; the fields below hold what had been generated */
    ql_finish finish;
    int32_t n_prompt, n_ids;
    const int32_t *prompt_ids;
    const int32_t *ids;    /* generated, with the end-of-sequence id if one came */
    const float *logprobs; /* one for each id */
    const char *text;      /* without end-of-sequence and stop string; NULL without a tokenizer */
    size_t text_bytes;
    int32_t has_crc;
    uint32_t logits_crc32; /* CRC-32 over the raw little-endian f32 logits of each step that chose an id, in order */
    double prompt_s;       /* from the start of its first step to the first logits */
    double first_token_s;  /* from submit to the first id */
    double decode_s;       /* from the first id to the last */
    ql_error error;
} ql_result;

/* Queues a request and returns at once. Everything in `request` is copied. When the call fails no callback comes. */
QL_API ql_status ql_submit(ql_engine *engine, const ql_request *request, ql_event_fn callback, void *user,
                           ql_request_id *id, ql_error *err);

/* Blocks until the request has ended and hands its result to the caller, who frees it with ql_result_free. Each request
 * can be waited for once. Returns the request's status; *result is set on failure of the request too, and NULL only
 * when the id is unknown. */
QL_API ql_status ql_wait(ql_engine *engine, ql_request_id id, ql_result **result, ql_error *err);

/* Ends a request at the next step. Unknown and ended ids are ignored. Never blocks. */
QL_API void ql_cancel(ql_engine *engine, ql_request_id id);

/* ql_submit and ql_wait in one call. */
QL_API ql_status ql_generate(ql_engine *engine, const ql_request *request, ql_result **result, ql_error *err);

QL_API void ql_result_free(ql_result *result);

/* ---- what an engine holds and did --------------------------------------------------------------------------- */

typedef struct ql_lane_stats {
    char device[64];                                  /* "host", or the GPU's ordinal and name */
    uint64_t weight_bytes, scale_bytes;               /* resident, as the runtime holds them */
    uint64_t stored_weight_bytes, stored_scale_bytes; /* the same tensors at the width of the file */
    uint64_t kv_bytes, state_bytes, workspace_bytes;
    uint64_t context_bytes; /* in use on the lane's GPU beside these when opening was done: the driver's context, code,
                             * NCCL, and what other programs hold */
    uint64_t h2d_bytes, d2h_bytes; /* copied since open; equal weights count once */
} ql_lane_stats;

typedef struct ql_path_count {
    char name[48];  /* kernel family, format and variant, such as "linear.nvfp4.gen/avx512" */
    uint64_t calls; /* summed over lanes */
} ql_path_count;

typedef struct ql_phase_time {
    char name[32];
    double ms; /* lane 0 */
} ql_phase_time;

typedef struct ql_stats {
    size_t size;
    int32_t n_lanes, slices; /* lane count and the model's canonical slice count S */
    ql_device_kind device;
    ql_precision prompt_precision, gen_precision; /* in use, never AUTO */
    int32_t ctx, max_seqs, chunk, kv_pages;
    int32_t live_seqs, free_slots, free_pages; /* at the time of the call */
    double load_s;                             /* from open to ready */
    uint64_t prompt_tokens, generated_tokens, steps;
    ql_lane_stats lane[64];
    int32_t n_paths;
    ql_path_count path[64];
    int32_t n_phases;
    ql_phase_time phase[16]; /* of steps, summed; CUDA lanes have them with options.profile only */
    int32_t n_open;
    ql_phase_time open[8]; /* parts of load_s, one after another */
} ql_stats;

/* Fills `stats` (set stats->size first). May be called from any thread at any time. */
QL_API ql_status ql_engine_stats(ql_engine *engine, ql_stats *stats);

/* What a lane runs on, for the record of a measurement. "" and -1: nothing tells. */
typedef struct ql_lane_info {
    size_t size;
    char name[64];                          /* of the GPU or CPU */
    char bus[32];                           /* PCI address */
    char driver[32];                        /* "580.95.05" */
    char cuda_driver[16], cuda_runtime[16]; /* "13.0": what the driver supports; what the build was made with */
    char nccl[16];                          /* "2.28.3", where it is open */
    char link[16];                          /* how lanes add: "peer", "nccl", "none" (one lane) or "host" */
    int32_t n_sm, sm_mhz, sm_max_mhz, memory_mhz, temperature_c; /* clocks at the time of the call */
    double power_w, power_limit_w;
    double stream_bytes_per_s; /* reading memory and nothing else, all lanes at once; with options.measure */
    uint64_t memory_bytes;     /* of the GPU */
} ql_lane_info;

/* Fills `info` (set info->size first). May be called from any thread at any time. */
QL_API ql_status ql_engine_lane_info(ql_engine *engine, int32_t lane, ql_lane_info *info);

/* ---- tokenizer ---------------------------------------------------------------------------------------------- */

typedef struct ql_tokenizer ql_tokenizer;

/* `path` is a tokenizer.json or a directory (or Hub id) that holds one. */
QL_API ql_status ql_tokenizer_open(ql_tokenizer **tokenizer, const char *path, ql_error *err);
QL_API void ql_tokenizer_close(ql_tokenizer **tokenizer);

/* The engine's own, borrowed until ql_engine_close; NULL where the checkpoint has none. */
QL_API const ql_tokenizer *ql_engine_tokenizer(const ql_engine *engine);

/* Encodes UTF-8 text, added tokens (control tokens among them) recognised. *ids comes from malloc and is the caller's;
 * NULL and 0 for empty text. Text that is not UTF-8 is refused; the error names the byte and its offset. */
QL_API ql_status ql_tokenizer_encode(const ql_tokenizer *tokenizer, const char *text, size_t text_bytes, int32_t **ids,
                                     int32_t *n_ids, ql_error *err);

/* Decodes ids to UTF-8, invalid sequences as U+FFFD. *text comes from malloc, NUL-terminated, and is the caller's.
 * skip_special leaves out ids that the tokenizer marks special. Ids outside the vocabulary are an error. */
QL_API ql_status ql_tokenizer_decode(const ql_tokenizer *tokenizer, const int32_t *ids, int32_t n_ids,
                                     int32_t skip_special, char **text, size_t *text_bytes, ql_error *err);

/* Highest id that text can be made of, plus one. */
QL_API int32_t ql_tokenizer_size(const ql_tokenizer *tokenizer);

/* ---- checkpoint: what is in it, what a lane would hold ------------------------------------------------------- */

typedef struct ql_checkpoint ql_checkpoint;

/* Maps the checkpoint and decides each tensor's format from headers and configuration; reads no tensor data. */
QL_API ql_status ql_checkpoint_open(ql_checkpoint **checkpoint, const char *model, ql_error *err);
QL_API void ql_checkpoint_close(ql_checkpoint **checkpoint);

typedef struct ql_checkpoint_info {
    char dir[512];
    char architecture[64];
    int32_t n_layers, hidden, intermediate, vocab;
    int32_t n_heads, n_kv_heads, n_key_heads, n_value_heads; /* attention q and kv, GatedDeltaNet k and v */
    int32_t max_ctx;
    int32_t slices; /* canonical slice count S; lane counts are its divisors */
    int32_t has_mtp, tied_embeddings, has_tokenizer;
    int32_t n_tensors, n_files;
    int32_t n_linears; /* projections of the text decoder and lm_head, MTP excluded */
    int32_t n_nvfp4, n_fp8, n_plain;
    int32_t n_ignored; /* tensors known and left out, vision among them */
    uint64_t ignored_bytes;
    uint64_t weight_bytes, scale_bytes; /* text decoder, as stored, MTP excluded */
    uint64_t mtp_bytes;
    char scheme[64]; /* "compressed-tensors (2 groups)", "fp8 128x128", "modelopt NVFP4", "none" */
} ql_checkpoint_info;

QL_API void ql_checkpoint_get_info(const ql_checkpoint *checkpoint, ql_checkpoint_info *info);

typedef struct ql_tensor_info {
    const char *name;  /* borrowed until close */
    const char *file;  /* base name of its shard */
    const char *dtype; /* as in the file: "BF16", "F8_E4M3", ... */
    int32_t rank;
    int64_t shape[8];
    uint64_t offset; /* of the first byte in its file */
    uint64_t bytes;
    const char *role;   /* "weight", "scale", "norm", ..., or "ignored" */
    const char *format; /* of the module it belongs to: "nvfp4", "fp8-channel", ..., "" where none applies */
    const char *reason; /* why: the rule and the configuration entry that agree, or why it is left out */
} ql_tensor_info;

/* i counts from 0 to n_tensors - 1, in name order. Returns QL_ERR_USAGE past the end. */
QL_API ql_status ql_checkpoint_get_tensor(const ql_checkpoint *checkpoint, int32_t i, ql_tensor_info *info);

/* CRC-32 of a tensor's bytes; reads them all. */
QL_API ql_status ql_checkpoint_tensor_crc(const ql_checkpoint *checkpoint, int32_t i, uint32_t *crc, ql_error *err);

/* Notes of the load: plain where the configuration says quantized, files not in the index, and the like. NULL past the
 * end; borrowed until close. */
QL_API const char *ql_checkpoint_note(const ql_checkpoint *checkpoint, int32_t i);

/* What one lane would hold. Bytes "held" are as the runtime keeps a tensor, "stored" the same at the file's width. */
typedef struct ql_lane_plan {
    uint64_t weight_bytes, scale_bytes, stored_weight_bytes, stored_scale_bytes;
    uint64_t state_bytes; /* recurrent state and conv tails of max_seqs sequences */
    uint64_t kv_bytes;    /* for max_seqs sequences of ctx tokens */
    uint64_t workspace_bytes;
    uint64_t context_bytes; /* of the GPU's driver and NCCL: an estimate */
    uint64_t nccl_bytes;    /* NCCL's part of these; 0 where GPUs reach each other's memory */
    uint64_t total_bytes;
    int32_t q_head0, q_head1, kv_head0, kv_head1, key_head0, key_head1, value_head0, value_head1;
    int32_t mlp0, mlp1, vocab0, vocab1;
} ql_lane_plan;

typedef struct ql_plan {
    size_t size;
    int32_t n_lanes, slices, ctx, max_seqs, chunk;
    ql_kv_type kv;
    uint64_t kv_bytes_per_token;  /* one lane */
    uint64_t state_bytes_per_seq; /* one lane */
    uint64_t mem_bytes;           /* the limit that was planned for; 0: none was given */
    int32_t max_ctx_that_fits;    /* within mem_bytes and the model's limit, at this max_seqs; 0: none */
    ql_lane_plan lane[64];
} ql_plan;

/* Plans from headers alone; needs no device. Uses model-independent fields of `options` (lanes, ctx, max_seqs, chunk,
 * kv, mtp, mem_bytes; device and devices, where lanes are to be GPUs). GPUs are taken to reach each other's memory unless
 * this machine has them and its driver says otherwise. Set plan->size first. A lane count that the model does not allow
 * is refused with those that it does. A plan over mem_bytes is not an error here: compare total_bytes, or see
 * max_ctx_that_fits. */
QL_API ql_status ql_checkpoint_plan(const ql_checkpoint *checkpoint, const ql_options *options, ql_plan *plan,
                                    ql_error *err);

/* ---- self-checks: does this build compute rightly on this machine -------------------------------------------- */

typedef enum ql_check_outcome {
    QL_CHECK_PASSED = 0,
    QL_CHECK_FAILED = 1,
    QL_CHECK_SKIPPED = 2, /* needs more GPUs than there are; the note says so */
    QL_CHECK_LISTED = 3,  /* only its name was asked for */
} ql_check_outcome;

typedef struct ql_check_case {
    const char *name; /* "mlp_shard_nvfp4.small.exact.lanes2": check, inputs, lane count */
    ql_check_outcome outcome;
    uint64_t compared; /* elements, each with its expected value */
    double worst;      /* largest error: relative L2 over the rows of one channel, or what the note says; 0: bits */
    double limit;      /* what it may be; 0: the bits have to be equal */
    double magnitude;  /* root mean square of the expected values; 0 where bits are compared */
    const char *note;  /* why it failed or was skipped, or what else was measured; may be "" */
} ql_check_case;

/* Strings are valid during the call. Comes from the thread that called ql_check_run. */
typedef void (*ql_check_fn)(void *user, const ql_check_case *result);

enum { QL_CHECK_LIST = 1 /* name the cases, run none */, QL_CHECK_LONG = 2 /* shapes of the 27B too */ };

/* Name and one line about check i; NULL past the end. */
QL_API const char *ql_check_name(int32_t i);
QL_API const char *ql_check_about(int32_t i);

/* Runs self-checks on the options' devices, one after another, and blocks until all are done. `names` are checks or
 * beginnings of the names of cases, `n_names` of them; none: everything. A name that no case begins with is
 * QL_ERR_USAGE, and nothing has run then. lanes 0 runs every lane count that the devices allow, another count only
 * that. Of the other options device, devices, kernels, wait_ms, init_ms, log and allocator are used; `model` is for
 * "precision" alone. A case that fails is no error of the call: `fn` counts them. */
QL_API ql_status ql_check_run(const ql_options *options, const char *const *names, int32_t n_names, int32_t flags,
                              ql_check_fn fn, void *user, ql_error *err);

#ifdef __cplusplus
}
#endif
#endif
