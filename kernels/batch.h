/* What the contracts of all kernels share: phases, the rows of a step, sizes.
 *
 * Shape letters used in all contracts:
 *   T rows (tokens) of this call   H hidden   V vocabulary   D = 256 head size   P = 64 tokens of a KV page
 *   "local": of this lane's shard
 */
#ifndef QL_KERNELS_BATCH_H
#define QL_KERNELS_BATCH_H

#include "runtime/base/qformat.h"
#include "runtime/base/status.h"

typedef struct ql_dev ql_dev;

/* The phase, not the row count, picks kernel family and precision (docs/design.md, "One reduction order"). */
typedef enum ql_phase { QL_PHASE_PROMPT = 0, QL_PHASE_GEN = 1 } ql_phase;

enum { QL_PAGE = 64, QL_GDN_CHUNK = 64, QL_SHORT_CTX = 1024, QL_SHORT_ROWS = 4 };

/* The rows of one step. Segment s is n consecutive rows of one sequence, positions pos0[s].. in order; in the prompt
 * phase pos0 is a multiple of 64. Arrays live on the device. */
typedef struct ql_batch {
    ql_phase phase;
    int32_t n_row, n_seg;
    int32_t max_page;        /* row stride of `page` */
    int32_t ctx;             /* QL_SHORT_CTX: at most QL_SHORT_ROWS rows, all below that position; 0: any. Launches may
                              * depend on it */
    const int32_t *row_seg;  /* [n_row] segment of a row */
    const int32_t *row_pos;  /* [n_row] position in its sequence */
    const int32_t *seg_row;  /* [n_seg + 1] first row of each segment, then n_row */
    const int32_t *seg_pos;  /* [n_seg] position of the first row */
    const int32_t *seg_slot; /* [n_seg] state slot */
    const int32_t *page;     /* [n_seg][max_page] KV page of positions 64*i .. 64*i+63 */
} ql_batch;

/* Sizes that scratch depends on, all local to the lane. */
typedef struct ql_shape {
    int32_t hidden, vocab, vocab_local;
    int32_t n_head, n_kv_head, n_key_head, n_value_head, mlp;
    int32_t max_row; /* rows of one step */
    int32_t max_seg; /* segments of one step */
    int32_t max_out; /* rows that get logits in one step */
    int32_t max_ctx;
} ql_shape;

#endif
