/* Names of the dispatch paths, the same on every device. */
#include "kernels/kernels.h"

#include <stdio.h>

void ql_path_name(const ql_dev *dev, int32_t path, char *out) {
    enum { NAME_BYTES = 48 };
    static const char *const names[QL_PATH_COUNT] = {
        [QL_PATH_EMBED] = "embed",
        [QL_PATH_NORM] = "norm",
        [QL_PATH_GATED_NORM] = "gated_norm",
        [QL_PATH_CONV] = "conv",
        [QL_PATH_GDN_CHUNK] = "gdn.prompt",
        [QL_PATH_GDN_STEP] = "gdn.gen",
        [QL_PATH_ATTN_PREP] = "attn_prep",
        [QL_PATH_ATTN_PROMPT] = "attention.prompt",
        [QL_PATH_ATTN_GEN] = "attention.gen",
        [QL_PATH_SWIGLU] = "swiglu",
        [QL_PATH_TOPK] = "topk",
        [QL_PATH_SAMPLE] = "sample",
        [QL_PATH_ATTN_FEW] = "attention.few",
        [QL_PATH_CHAIN] = "chain",
        [QL_PATH_EXCHANGE] = "exchange",
    };
    const char *variant = dev->ops->variant(dev, path);
    if (path >= QL_PATH_LINEAR && path < QL_PATH_LINEAR + 2 * QL_FORMAT_COUNT) {
        int32_t i = path - QL_PATH_LINEAR;
        snprintf(out, NAME_BYTES, "linear.%s.%s/%s", ql_qformat_name((ql_qformat)(i / 2)),
                 i % 2 == QL_PHASE_GEN ? "gen" : "prompt", variant);
    } else {
        snprintf(out, NAME_BYTES, "%s/%s", names[path], variant);
    }
}
