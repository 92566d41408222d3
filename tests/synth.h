/* Writes checkpoints of any size of the family with random weights, or headers alone over sparse files.
 *
 * The tensors come from the loader's role table; formats, file layout, quantization_config and the tensors that are
 * known and ignored follow public exports (docs/formats.md). Weights are scaled so that activations stay of order one
 * through any number of layers. The same options give the same bytes.
 */
#ifndef QL_TESTS_SYNTH_H
#define QL_TESTS_SYNTH_H

#include "loader/config.h"

typedef enum ql_synth_scheme {
    QL_SYNTH_BF16,
    QL_SYNTH_FP8_CHANNEL, /* every linear but in_proj_a/b and MTP */
    QL_SYNTH_FP8_BLOCK,   /* the same and MTP's projections; head plain */
    QL_SYNTH_MIXED,    /* NVFP4 MLP, FP8 per channel elsewhere and in the last eighth of the layers' MLP, plain MTP in
                             a file of its own, vision and KV scales */
    QL_SYNTH_MODELOPT, /* NVFP4 MLP and head, FP8 per tensor elsewhere, plain MTP */
    QL_SYNTH_SCHEMES
} ql_synth_scheme;

typedef struct ql_synth {
    ql_config config; /* sizes, layer kinds, n_mtp_layer; ql_synth_shape fills it */
    ql_synth_scheme scheme;
    const char *prefix; /* of the decoder's tensors */
    bool sparse;        /* headers only */
    uint64_t seed;
    uint64_t shard_bytes; /* data of one file at most; 0: 5e9 */
    int32_t threads;      /* 0: one for each processor */
} ql_synth;

/* "bf16", "fp8-channel", "fp8-block", "mixed", "modelopt"; QL_SYNTH_SCHEMES for another name. */
ql_synth_scheme ql_synth_scheme_of(const char *name);

/* Fills config for "27b", "9b", "4b" or "micro"; false for another name. */
bool ql_synth_shape(ql_config *config, const char *name);

/* Sets the layer count and the kinds that follow from it: every fourth layer full attention. */
void ql_synth_set_layers(ql_config *config, int32_t n_layer);

/* Writes into an existing directory. *bytes is what all files together hold. */
ql_status ql_synth_write(const ql_synth *synth, const char *dir, uint64_t *bytes, ql_error *err);

#endif
