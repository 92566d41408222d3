/* config.json and generation_config.json as one validated struct. */
#ifndef QL_LOADER_CONFIG_H
#define QL_LOADER_CONFIG_H

#include "runtime/base/json.h"

enum { QL_MAX_LAYERS = 256, QL_MAX_SLICES = 8, QL_MAX_EOS = 8 };

/* What this runtime's kernels are written for; a checkpoint with other values is refused by name and value. */
enum { QL_HEAD_DIM = 256, QL_GDN_DIM = 128, QL_CONV_TAPS = 4 };

typedef struct ql_config {
    char architecture[64]; /* "Qwen3_5ForConditionalGeneration" or "Qwen3_5ForCausalLM" */
    int32_t hidden, n_layer, intermediate, vocab;
    int32_t n_head, n_kv_head;        /* attention: query heads, key/value heads */
    int32_t n_key_head, n_value_head; /* GatedDeltaNet */
    int32_t rotary_dim;               /* head_dim * partial_rotary_factor, even */
    double rope_theta;
    double yarn_factor; /* 1: none */
    int32_t yarn_original_ctx;
    float rms_eps;
    int32_t max_ctx;                    /* max_position_embeddings */
    int32_t n_mtp_layer;                /* 0 or 1 */
    bool tied;                          /* lm_head is the embedding */
    bool full_attention[QL_MAX_LAYERS]; /* per layer; else GatedDeltaNet */
    int32_t slices;                     /* canonical slice count S: docs/design.md, "One reduction order" */

    /* generation_config.json, else config.json */
    int32_t eos[QL_MAX_EOS], n_eos;
    bool do_sample;           /* false: greedy by default */
    float temperature, top_p; /* defaults for requests that ask for the model's sampling */
    int32_t top_k;
} ql_config;

/* Reads both files of `dir`. *quantization is config.json's quantization_config, or hf_quant_config.json's content where
 * only that exists, or NULL; the caller owns it. */
ql_status ql_config_load(const char *dir, ql_config *config, json_t **quantization, ql_error *err);

/* The same from a parsed config.json; used by ql_config_load and by tests. */
ql_status ql_config_parse(const json_t *root, const char *what, ql_config *config, ql_error *err);

/* Takes end-of-sequence ids and sampling defaults from a parsed generation_config.json; `config` comes from
 * ql_config_parse and is undefined after a failure. */
ql_status ql_config_parse_generation(const json_t *root, const char *what, ql_config *config, ql_error *err);

/* The largest power of two up to 8 that divides query heads, value heads and the MLP's groups of 16. */
int32_t ql_config_slices(int32_t n_head, int32_t n_value_head, int32_t intermediate);

#endif
