/* What quantization_config says about each module, for comparison with the tensors that are there.
 *
 * Understands compressed-tensors (config_groups with names, class names and `re:` regexes matched at the start of the
 * module path; first group wins; ignore beats all and is never a prefix test), ModelOpt (config.json or
 * hf_quant_config.json; ignore or exclude_modules are shell globs; quantized_layers per module) and block FP8
 * (modules_to_not_convert: exact names or parents). Module paths are tensor names without their last component.
 */
#ifndef QL_LOADER_QUANT_H
#define QL_LOADER_QUANT_H

#include "runtime/base/json.h"
#include "runtime/base/qformat.h"

typedef struct ql_quant ql_quant;

/* `quantization` is config.json's quantization_config or the whole of hf_quant_config.json, or NULL: everything is plain.
 * Borrowed during the call only. */
ql_status ql_quant_open(ql_quant **quant, const json_t *quantization, ql_error *err);
void ql_quant_close(ql_quant **quant);

typedef enum ql_expect { QL_EXPECT_PLAIN, QL_EXPECT_NVFP4, QL_EXPECT_FP8 } ql_expect;

/* What the configuration says of the linear module `module`, and by which entry (`group_0 "re:.*lm_head"`, `ignore "..."`,
 * "no entry"), a constant owned by quant. The module is named as in ql_linear, without the decoder's prefix; entries are
 * tried on its name under every prefix that files use, so that renaming a checkpoint's tensors changes nothing. Fails
 * when a regular expression exceeds its match limit. */
ql_status ql_quant_expect(const ql_quant *quant, const char *module, ql_expect *expect, const char **rule,
                          ql_error *err);

/* "compressed-tensors (2 groups)", "fp8 128x128", "modelopt NVFP4", "none". */
const char *ql_quant_text(const ql_quant *quant);

/* Prefixes of the decoder's tensors, longest first where one begins another; the end is NULL. */
extern const char *const ql_decoder_prefixes[];

#endif
