/* embed: rows of the embedding that this lane holds, zeros for the others, so that adding lanes gives the row exactly.
 *
 *   y[t][i] = row0 <= id[t] < row1 ? f32(table[id[t] - row0][i]) + 0 : 0
 *
 * The "+ 0" turns -0 into +0, as adding another lane's zero would: the same bits at any lane count. table is [row1 -
 * row0][H] in its stored dtype (F32, F16, BF16); y f32 [T][H] dense. ids are checked by the engine.
 *
 * gather_rows: y[j] = x[row[j]], f32 [n][width] dense.
 * add: x[i] += y[i], f32.
 */
#ifndef QL_KERNELS_EMBED_H
#define QL_KERNELS_EMBED_H

#include "kernels/batch.h"

typedef struct ql_embed_args {
    const int32_t *id;
    const void *table;
    ql_dtype dtype;
    int32_t row0, row1;
    float *y;
    int32_t n_row, hidden;
} ql_embed_args;

typedef struct ql_gather_rows_args {
    const float *x;
    const int32_t *row;
    float *y;
    int32_t n, width;
} ql_gather_rows_args;

typedef struct ql_add_args {
    float *x;
    const float *y;
    int64_t n;
} ql_add_args;

#endif
