/* Body of linear's vector variants, included once by each instruction-set file after its v16 header and:
 *
 *   v16_e4m3(p)              16 FP8 weights from memory, converted
 *   v16_nvfp4(p, scale)      a group of 16 NVFP4 weights times its scale
 *   TILE_W, TILE_X           weight rows and x rows that one inner loop keeps in registers
 *   LINEAR                   the variant's name
 *   FEW_X                    x rows up to which weights are decoded in registers alone
 *
 * Two shapes of work. A few x rows: TILE_W weight rows are read side by side, decoded in registers and used at once;
 * memory is the limit. More rows: a block of weights, QL_LINEAR_W_ROWS rows by QL_LINEAR_COLS columns, is decoded into
 * scratch, which stays in the second-level cache, and meets TILE_X rows of x at a time, whose columns stay in the first;
 * sums wait in scratch for the next columns. Multiplying and adding is the limit. In both, lane i of a vector is
 * accumulator i of the contract, so that the twin's bits come out. What does not divide into whole vectors goes to the
 * twin: no shape of the model family does that.
 */
#if defined(LINEAR)

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Where row r of a weight is, for decoding 16 columns at a time. */
typedef struct row_src {
    const void *code;
    const uint8_t *scale;
} row_src;

INLINE row_src row_of(const ql_weight *w, int32_t r) {
    r = r < w->n ? r : w->n - 1; /* a short last tile repeats the last row; its sums are dropped */
    return (row_src){
        .code = (const uint8_t *)w->data + r * ql_qformat_row_bytes(w->format, w->k),
        .scale = w->format == QL_FORMAT_NVFP4 ? (const uint8_t *)w->scale + (int64_t)r * (w->k / QL_NVFP4_GROUP) : NULL,
    };
}

/* Columns c .. c+15; `format` is a constant wherever this is inlined. */
INLINE V16 decode16(ql_qformat format, row_src s, int32_t c) {
    switch (format) {
    case QL_FORMAT_F32: return v16_load((const float *)s.code + c);
    case QL_FORMAT_F16: return v16_of_f16((const uint16_t *)s.code + c);
    case QL_FORMAT_BF16: return v16_of_bf16((const uint16_t *)s.code + c);
    case QL_FORMAT_NVFP4: return v16_nvfp4((const uint8_t *)s.code + c / 2, s.scale[c / 16]);
    default: return v16_e4m3((const uint8_t *)s.code + c);
    }
}

/* End of the run of columns from c that share a scale, or of the slice. */
INLINE int32_t run_end(const ql_weight *w, bool is_block, int32_t c, int32_t slice_end) {
    int32_t end = is_block ? c + QL_FP8_BLOCK - (w->col_off + c) % QL_FP8_BLOCK : slice_end;
    return end < slice_end ? end : slice_end;
}

/* ---- few rows of x ----------------------------------------------------------------------------------------------- */

/* x rows [0, n_x) of the block; n_x is a constant wherever this is inlined. */
INLINE void few_rows(const ql_linear_host_plan *p, ql_qformat format, const float *x, int64_t ld, int32_t n_x,
                     float *y) {
    const ql_weight *w = p->a->w;
    const bool is_block = format == QL_FORMAT_FP8_BLOCK;
    for (int32_t r0 = 0; r0 < w->n; r0 += TILE_W) {
        int32_t n_r = w->n - r0 < TILE_W ? w->n - r0 : TILE_W;
        row_src src[TILE_W];
        float part[FEW_X][TILE_W][QL_LINEAR_SLICES];
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            src[i] = row_of(w, r0 + i);
        }
        for (int32_t s = 0; s < p->a->n_slice; s++) {
            V16 total[FEW_X][TILE_W];
            UNROLL
            for (int32_t t = 0; t < n_x; t++) {
                UNROLL
                for (int32_t i = 0; i < TILE_W; i++) {
                    total[t][i] = v16_zero();
                }
            }
            int32_t c = s * p->ks, slice_end = c + p->ks;
            while (c < slice_end) {
                int32_t begin = c, end = run_end(w, is_block, c, slice_end);
                V16 acc[FEW_X][TILE_W];
                UNROLL
                for (int32_t t = 0; t < n_x; t++) {
                    UNROLL
                    for (int32_t i = 0; i < TILE_W; i++) {
                        acc[t][i] = v16_zero();
                    }
                }
                for (; c < end; c += 16) {
                    UNROLL
                    for (int32_t i = 0; i < TILE_W; i++) {
                        V16 wv = decode16(format, src[i], c);
                        UNROLL
                        for (int32_t t = 0; t < n_x; t++) {
                            acc[t][i] = v16_add(acc[t][i], v16_mul(v16_load(x + t * ld + c), wv));
                        }
                    }
                }
                UNROLL
                for (int32_t i = 0; i < TILE_W; i++) {
                    V16 scale =
                        is_block ? v16_set1(ql_linear_block_scale(w, r0 + (i < n_r ? i : 0), begin)) : v16_zero();
                    UNROLL
                    for (int32_t t = 0; t < n_x; t++) {
                        total[t][i] = is_block ? v16_add(total[t][i], v16_mul(acc[t][i], scale)) : acc[t][i];
                    }
                }
            }
            UNROLL
            for (int32_t t = 0; t < n_x; t++) {
                UNROLL
                for (int32_t i = 0; i < TILE_W; i++) {
                    part[t][i][s] = ql_linear_scaled(p, v16_sum(total[t][i]), t, r0 + (i < n_r ? i : 0), s);
                }
            }
        }
        for (int32_t t = 0; t < n_x; t++) {
            for (int32_t i = 0; i < n_r; i++) {
                y[t * p->a->ldy + r0 + i] = ql_linear_tree(part[t][i], p->a->n_slice);
            }
        }
    }
}

/* ---- many rows of x ---------------------------------------------------------------------------------------------- */

enum { LD = QL_LINEAR_COLS }; /* stride of a decoded row */

/* Adds columns [0, n) of TILE_W decoded rows and n_x (a constant, up to TILE_X) rows of x to acc; with `scale`, one
 * number for each weight row, adds the finished sum times it. */
INLINE void tile_sums(const float *tile, const float *x, int64_t ld, int32_t n_x, int32_t n, const float *scale,
                      V16 acc[TILE_X][TILE_W]) {
    V16 sum[TILE_X][TILE_W];
    UNROLL
    for (int32_t t = 0; t < n_x; t++) {
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            sum[t][i] = scale ? v16_zero() : acc[t][i];
        }
    }
    for (int32_t c = 0; c < n; c += 16) {
        V16 wv[TILE_W];
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            wv[i] = v16_load(tile + i * LD + c);
        }
        UNROLL
        for (int32_t t = 0; t < n_x; t++) {
            V16 xv = v16_load(x + t * ld + c);
            UNROLL
            for (int32_t i = 0; i < TILE_W; i++) {
                sum[t][i] = v16_add(sum[t][i], v16_mul(xv, wv[i]));
            }
        }
    }
    UNROLL
    for (int32_t t = 0; t < n_x; t++) {
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            acc[t][i] = scale ? v16_add(acc[t][i], v16_mul(sum[t][i], v16_set1(scale[i]))) : sum[t][i];
        }
    }
}

static void tile_sums_of(int32_t n_x, const float *tile, const float *x, int64_t ld, int32_t n, const float *scale,
                         V16 acc[TILE_X][TILE_W]) {
    switch (n_x) {
    case 1: tile_sums(tile, x, ld, 1, n, scale, acc); break;
    case 2: tile_sums(tile, x, ld, 2, n, scale, acc); break;
#if TILE_X > 3
    case 3: tile_sums(tile, x, ld, 3, n, scale, acc); break;
    case 4: tile_sums(tile, x, ld, 4, n, scale, acc); break;
    case 5: tile_sums(tile, x, ld, 5, n, scale, acc); break;
#endif
    default: tile_sums(tile, x, ld, TILE_X, n, scale, acc); break;
    }
}

/* Decodes columns [c, end) of weight rows [r0, r0 + n_r). */
INLINE void decode_block(const ql_linear_host_plan *p, ql_qformat format, int32_t r0, int32_t n_r, int32_t c,
                         int32_t end) {
    for (int32_t i = 0; i < n_r; i++) {
        row_src src = row_of(p->a->w, r0 + i);
        float *out = p->tile + (int64_t)i * LD;
        for (int32_t j = c; j < end; j += 16) {
            v16_store(out + j - c, decode16(format, src, j));
        }
    }
}

/* Sums of a tile: x rows t.. and weight rows i.. of the block at hand. */
INLINE V16 (*sums_at(const ql_linear_host_plan *p, int32_t t, int32_t i))[TILE_W] {
    return (V16(*)[TILE_W])((V16 *)p->acc + (t / TILE_X * (QL_LINEAR_W_ROWS / TILE_W) + i / TILE_W) * TILE_X * TILE_W);
}

/* Adds columns [c, end) of the decoded block to the sums. */
static void block_sums(const ql_linear_host_plan *p, int32_t r0, int32_t n_r, const float *x, int64_t ld, int32_t n_row,
                       int32_t c, int32_t end) {
    const ql_weight *w = p->a->w;
    const bool is_block = w->format == QL_FORMAT_FP8_BLOCK;
    for (int32_t begin = c; begin < end;) {
        int32_t stop = run_end(w, is_block, begin, end);
        for (int32_t t = 0; t < n_row; t += TILE_X) {
            int32_t n_x = n_row - t < TILE_X ? n_row - t : TILE_X;
            for (int32_t i = 0; i < n_r; i += TILE_W) {
                float scale[TILE_W];
                for (int32_t j = 0; j < TILE_W && is_block; j++) {
                    scale[j] = ql_linear_block_scale(w, r0 + i + (i + j < n_r ? j : 0), begin);
                }
                tile_sums_of(n_x, p->tile + (int64_t)i * LD + begin - c, x + t * ld + begin, ld, stop - begin,
                             is_block ? scale : NULL, sums_at(p, t, i));
            }
        }
        begin = stop;
    }
}

INLINE void many_rows(const ql_linear_host_plan *p, ql_qformat format, const float *x, int64_t ld, int32_t n_row,
                      float *y) {
    const ql_weight *w = p->a->w;
    for (int32_t r0 = 0; r0 < w->n; r0 += QL_LINEAR_W_ROWS) {
        int32_t n_r = w->n - r0 < QL_LINEAR_W_ROWS ? w->n - r0 : QL_LINEAR_W_ROWS;
        for (int32_t s = 0; s < p->a->n_slice; s++) {
            int32_t slice_end = (s + 1) * p->ks;
            memset(p->acc, 0, QL_LINEAR_ACC_BYTES);
            for (int32_t c = s * p->ks; c < slice_end; c += QL_LINEAR_COLS) {
                int32_t end = slice_end - c < QL_LINEAR_COLS ? slice_end : c + QL_LINEAR_COLS;
                decode_block(p, format, r0, n_r, c, end);
                block_sums(p, r0, n_r, x, ld, n_row, c, end);
            }
            for (int32_t t = 0; t < n_row; t++) {
                for (int32_t i = 0; i < n_r; i++) {
                    float sum = v16_sum(sums_at(p, t, i)[t % TILE_X][i % TILE_W]);
                    p->part[(t * QL_LINEAR_W_ROWS + i) * QL_LINEAR_SLICES + s] = ql_linear_scaled(p, sum, t, r0 + i, s);
                }
            }
        }
        for (int32_t t = 0; t < n_row; t++) {
            for (int32_t i = 0; i < n_r; i++) {
                float *part = p->part + (t * QL_LINEAR_W_ROWS + i) * QL_LINEAR_SLICES;
                y[t * p->a->ldy + r0 + i] = ql_linear_tree(part, p->a->n_slice);
            }
        }
    }
}

/* ---- dispatch ---------------------------------------------------------------------------------------------------- */

INLINE void rows_of(const ql_linear_host_plan *p, ql_qformat format, const float *x, int64_t ld, int32_t n_row,
                    float *y) {
    switch (n_row) {
    case 1: few_rows(p, format, x, ld, 1, y); break;
    case 2: few_rows(p, format, x, ld, 2, y); break;
#if FEW_X > 2
    case 3: few_rows(p, format, x, ld, 3, y); break;
    case 4: few_rows(p, format, x, ld, 4, y); break;
#endif
    default: many_rows(p, format, x, ld, n_row, y); break;
    }
}

#define ROWS_OF(name, format)                                                                                          \
    static void name(const ql_linear_host_plan *p, const float *x, int64_t ld, int32_t n_row, float *y) {              \
        rows_of(p, format, x, ld, n_row, y);                                                                           \
    }

ROWS_OF(rows_f32, QL_FORMAT_F32)
ROWS_OF(rows_f16, QL_FORMAT_F16)
ROWS_OF(rows_bf16, QL_FORMAT_BF16)
ROWS_OF(rows_fp8, QL_FORMAT_FP8_CHANNEL) /* the codes of FP8_TENSOR alike */
ROWS_OF(rows_fp8_block, QL_FORMAT_FP8_BLOCK)
ROWS_OF(rows_nvfp4, QL_FORMAT_NVFP4)

ql_status LINEAR(ql_dev *dev, const ql_linear_args *a) {
    static void (*const rows[QL_FORMAT_COUNT])(const ql_linear_host_plan *, const float *, int64_t, int32_t,
                                               float *) = {
        [QL_FORMAT_F32] = rows_f32,         [QL_FORMAT_F16] = rows_f16,        [QL_FORMAT_BF16] = rows_bf16,
        [QL_FORMAT_FP8_CHANNEL] = rows_fp8, [QL_FORMAT_FP8_TENSOR] = rows_fp8, [QL_FORMAT_FP8_BLOCK] = rows_fp8_block,
        [QL_FORMAT_NVFP4] = rows_nvfp4,
    };
    const ql_weight *w = a->w;
    ql_linear_host_plan plan;
    QL_TRY(ql_linear_host_begin(dev, a, &plan));
    bool q8 = a->precision == QL_PREC_Q8 && w->format == QL_FORMAT_NVFP4; /* whole numbers, which the twin adds well */
    if (plan.ks % 16 || w->col_off % 16 || q8) {
        return ql_linear_host(dev, a);
    }
    for (int32_t t = 0; t < a->n_row; t += QL_LINEAR_X_ROWS) {
        int32_t n_row = a->n_row - t < QL_LINEAR_X_ROWS ? a->n_row - t : QL_LINEAR_X_ROWS;
        int64_t ld;
        const float *x = ql_linear_host_x(&plan, t, n_row, &ld);
        rows[w->format](&plan, x, ld, n_row, a->y + t * a->ldy);
    }
    return QL_OK;
}

#endif
