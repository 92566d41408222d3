/* linear: y = x W^T for quantized and plain weights.
 *
 *   y[t][r] = sum_c x[t][c] * w[r][c]      t < T, r < n, c < k
 *
 * Weights stay packed; each is decoded in registers to the exact value code * E4M3 group scale (or the plain number),
 * which f32 holds exactly. Channel, tensor and factor scales multiply the finished f32 sum; a 128-block scale multiplies
 * its block's sum. base/qformat.h has the formats.
 *
 * Slices. With n_slice > 1 the k columns are n_slice equal canonical slices: each slice's sum is finished on its own,
 * scaled, and the n_slice results are added as the balanced binary tree. n_slice is 1, 2, 4 or 8 and divides k.
 *
 * Order inside a slice, the same for every host variant, row count and lane count: element c of the slice goes to
 * accumulator c % 16 by a separate multiply and add in rising c; the 16 accumulators are added as
 * ((0+8)+(4+12))+((2+10)+(6+14)) + ((1+9)+(5+13))+((3+11)+(7+15)), that is: halves of 8, 4, 2, 1. FP8_BLOCK keeps 16
 * totals: at each block end total[i] += acc[i] * scale, acc[i] = 0; blocks are aligned to the whole matrix, so a slice
 * may begin inside one. CUDA families have an order of their own, fixed by the shape.
 *
 * Precision of x: EXACT as it is; BF16 each element rounded once (nearest even); FP8, for the FP8 formats, each row and
 * slice scaled by s = max(amax, 2^-126) / 448, x / s rounded to E4M3, the slice's sum multiplied by s before its other
 * scale; for other formats as BF16. Q8, for NVFP4: INT8 in blocks of 32 (kernels/q8.h), see below; for the FP8 formats each
 * row and slice times the power of two that brings its largest finite element into [2^14, 2^15), rounded to F16, the slice's
 * sum divided by that power before its other scale; for plain formats as EXACT.
 *
 * Q8 times NVFP4: whole-number products of codes (weights in halves) are summed exactly for each group of 16; the sum times
 * its group scale is exact in f32. A block's two are added, multiplied by the block's scale and added to the slice's sum, in
 * rising order on the host.
 *
 * FP8 on Hopper: prompt rows whose slices are whole 128-blocks (and begin on one) meet the weights as FP8 numbers: exact
 * products, 32 at a time aligned to the largest among them and the sum so far, 13 bits below which are kept. Results are
 * within 2^-11 of the sum of magnitudes, little beside the rounding of x (2^-4 of each element).
 *
 * F16 matrix instructions in code for compute capability 7.5 take 8 products at a time, exact, aligned to the largest among
 * them and the sum so far, 24 bits below which are kept (25 on Hopper); the sum of that is cut to 24 bits (MMA-Sim,
 * arXiv:2511.10909). The eight that are not the largest lose less than 2^-24 of it each and the sum less than 2^-23 of itself,
 * all towards zero: within 10 * 2^-24 of the largest an instruction, 10 k/8 2^-24 of the sum of magnitudes a slice of k columns.
 *
 * Shapes: x f32 [T][ldx], y f32 [T][ldy], strides in elements. x and y do not overlap. NaN in x stays in its own row.
 * Each row of y depends on its row of x alone.
 * Bytes: n * row_bytes(k) + scales + 4 T (k + n). Flops: 2 T n k.
 */
#ifndef QL_KERNELS_LINEAR_H
#define QL_KERNELS_LINEAR_H

#include "kernels/batch.h"

#include <stdbool.h>

/* Where bytes lie in a file, for devices that read them from there; fd 0: they are memory alone. */
typedef struct ql_file_place {
    int32_t fd;
    uint64_t at;
} ql_file_place;

/* A slice in the file: which rows and columns to take, with the strides of the whole matrix. Host pointers. */
typedef struct ql_weight_src {
    const char *module; /* for messages */
    ql_qformat format;
    int32_t n, k;    /* of the slice */
    int32_t n_range; /* row ranges of the whole matrix, in order, together n rows */
    int32_t row0[3], row1[3];
    int32_t col0;           /* first column; multiple of 16 for NVFP4 */
    int32_t full_n, full_k; /* of the whole matrix */
    const uint8_t *data;    /* codes of the whole matrix */
    const uint8_t *scale;   /* scales of the whole matrix, or NULL */
    ql_dtype scale_dtype;   /* F32, F16 or BF16; F8_E4M3 for NVFP4 */
    float factor;           /* FP8_TENSOR, NVFP4: finite and > 0; else 1 */
    ql_file_place data_file, scale_file;
    bool records; /* NVFP4: for products of precision Q8 and no other, which a device may keep another way */
} ql_weight_src;

/* A resident slice. FP8_BLOCK with several ranges needs every range to begin and end on a block (or at the matrix's last
 * row). weight_load refuses, as QL_ERR_MODEL with module and place, what no sound file holds: NaN or infinity among the
 * codes, a row, block or tensor scale that is not finite and above 0, a group scale with a sign bit or NaN. A group scale
 * of 0 is legal. Kernels rely on it. */
typedef struct ql_weight {
    ql_qformat format;
    int32_t n, k;
    int32_t full_n, full_k;   /* of the whole matrix */
    int32_t row_off, col_off; /* FP8_BLOCK: where in its 128-block the first row and column lie */
    bool records; /* NVFP4: what data holds are records of q8.h, scales among them; scale is NULL. Never on the host */
    float factor;
    void *data;  /* codes in the device's layout; plain formats row-major, as in the file */
    void *scale; /* FP8_CHANNEL f32 [n]; FP8_BLOCK f32 [row blocks][col blocks]; NVFP4 E4M3 [n][k/16] */
    uint64_t weight_bytes, scale_bytes; /* held */
    float max_abs;                      /* of plain formats the largest |w|, else its upper bound from the scales */
} ql_weight;

typedef struct ql_linear_args {
    const ql_weight *w;
    const float *x;
    float *y;
    int64_t ldx, ldy;
    int32_t n_row, n_slice;
    ql_phase phase;
    ql_precision precision; /* not AUTO; Q8 if and only if an NVFP4 weight was loaded for it, where the device cares */
} ql_linear_args;

#endif
