/* chain: ops in a row that a device may run as one.
 *
 * A generation step is a few hundred small ops, each waiting for the one before it. A device that can keep its weights
 * flowing across the edges between them takes the ops as a list. So does one that can spare prompt rows a way to memory and back
 * between two ops. `chain` runs as many leading ops of the list as it can and says how many; the caller runs the next one by
 * itself and offers the rest again.
 *
 * The result is bit for bit that of the ops one by one, with one difference: what an op of the run hands to a later op of the
 * same run need not reach memory (the normed row, gate and up, raw convolution inputs, a and b of a recurrence, its output before
 * its norm, queries, parts of a sum and what a norm adds). Residual stream, states, caches and the outputs that nothing in the run
 * consumes are always written.
 */
#ifndef QL_KERNELS_CHAIN_H
#define QL_KERNELS_CHAIN_H

#include "kernels/attention.h"
#include "kernels/gdn.h"
#include "kernels/linear.h"
#include "kernels/mlp.h"
#include "kernels/norm.h"

typedef enum ql_op_kind {
    QL_OP_RMSNORM,
    QL_OP_LINEAR, /* a group: n products of one x */
    QL_OP_CONV,
    QL_OP_GDN,
    QL_OP_GATED_NORM,
    QL_OP_SWIGLU,
    QL_OP_ATTN_PREP,
    QL_OP_ATTENTION,
    QL_OP_EXCHANGE
} ql_op_kind;

enum { QL_GROUP_MAX = 4 };

/* dst[i] = sum over lanes of src[i], f32, in the tree order of docs/design.md: what the lanes' collectives do (reduce of
 * runtime/lane/comm.h). It is no op of the table: a device that has been connected to the other lanes' may run it inside a chain,
 * and then every lane runs the same exchanges, in the same order; where it takes none, the caller calls the collective. */
typedef struct ql_exchange_args {
    const float *src;
    float *dst;
    int64_t n;
} ql_exchange_args;

typedef struct ql_op {
    ql_op_kind kind;
    union {
        ql_rmsnorm_args rmsnorm;
        struct {
            ql_linear_args a[QL_GROUP_MAX];
            int32_t n;
        } linear;
        ql_conv_args conv;
        ql_gdn_args gdn;
        ql_gated_norm_args gated_norm;
        ql_swiglu_args swiglu;
        ql_attn_prep_args attn_prep;
        ql_attention_args attention;
        ql_exchange_args exchange;
    } u;
} ql_op;

#endif
