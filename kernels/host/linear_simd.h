/* Body of linear's vector variants, included once by each instruction-set file after it has defined:
 *
 *   V16              the 16 accumulators of one sum
 *   v16_zero, v16_load, v16_set1, v16_mul, v16_add, v16_sum (halves of 8, 4, 2, 1), v16_store
 *   v16_f16, v16_bf16, v16_e4m3      16 plain or FP8 weights from memory, converted
 *   v16_nvfp4(p, scale)              a group of 16 NVFP4 weights times its scale
 *   TILE_W, TILE_X   weight rows and x rows that one inner loop keeps in registers
 *   LINEAR           the variant's name
 *
 * Two shapes of work. One x row: TILE_W weight rows are read side by side, decoded in registers and used once; memory is
 * the limit. More rows: TILE_W weight rows are decoded once into scratch (they stay in the nearest cache) and meet all x
 * rows of the block, TILE_W x TILE_X sums at a time; the limit is multiplying and adding. In both, lane i of a vector is
 * accumulator i of the contract, so that the twin's bits come out. What does not divide into whole vectors goes to the
 * twin: no shape of the model family does that.
 */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* x rows of a block share the second-level cache with the tile. */
enum { X_BLOCK_BYTES = 1 << 20 };

/* Where row r of a weight is, for decoding 16 columns at a time. */
typedef struct row_src {
    const uint8_t *code, *scale;
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
    case QL_FORMAT_F32: return v16_load((const float *)(s.code + 4 * (int64_t)c));
    case QL_FORMAT_F16: return v16_f16(s.code + 2 * (int64_t)c);
    case QL_FORMAT_BF16: return v16_bf16(s.code + 2 * (int64_t)c);
    case QL_FORMAT_NVFP4: return v16_nvfp4(s.code + c / 2, s.scale[c / 16]);
    default: return v16_e4m3(s.code + c);
    }
}

/* End of the run of columns from c that share a scale, or of the slice. */
INLINE int32_t run_end(const ql_weight *w, bool is_block, int32_t c, int32_t slice_end) {
    int32_t end = is_block ? c + QL_FP8_BLOCK - (w->col_off + c) % QL_FP8_BLOCK : slice_end;
    return end < slice_end ? end : slice_end;
}

/* ---- one row of x ------------------------------------------------------------------------------------------------ */

INLINE void one_row(const ql_linear_host_plan *p, ql_qformat format, const float *x, int32_t t, float *y) {
    const ql_weight *w = p->a->w;
    const bool is_block = format == QL_FORMAT_FP8_BLOCK;
    for (int32_t r0 = 0; r0 < w->n; r0 += TILE_W) {
        int32_t n_r = w->n - r0 < TILE_W ? w->n - r0 : TILE_W;
        row_src src[TILE_W];
        float part[TILE_W][QL_LINEAR_SLICES];
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            src[i] = row_of(w, r0 + i);
        }
        for (int32_t s = 0; s < p->a->n_slice; s++) {
            V16 total[TILE_W];
            UNROLL
            for (int32_t i = 0; i < TILE_W; i++) {
                total[i] = v16_zero();
            }
            int32_t c = s * p->ks, slice_end = c + p->ks;
            while (c < slice_end) {
                int32_t begin = c, end = run_end(w, is_block, c, slice_end);
                V16 acc[TILE_W];
                UNROLL
                for (int32_t i = 0; i < TILE_W; i++) {
                    acc[i] = v16_zero();
                }
                for (; c < end; c += 16) {
                    V16 xv = v16_load(x + c);
                    UNROLL
                    for (int32_t i = 0; i < TILE_W; i++) {
                        acc[i] = v16_add(acc[i], v16_mul(xv, decode16(format, src[i], c)));
                    }
                }
                UNROLL
                for (int32_t i = 0; i < TILE_W; i++) {
                    total[i] = is_block ? v16_add(total[i], v16_mul(acc[i], v16_set1(ql_linear_block_scale(
                                                                                w, r0 + (i < n_r ? i : 0), begin))))
                                        : acc[i];
                }
            }
            UNROLL
            for (int32_t i = 0; i < TILE_W; i++) {
                if (i < n_r) {
                    part[i][s] = ql_linear_scaled(p, v16_sum(total[i]), t, r0 + i, s);
                }
            }
        }
        for (int32_t i = 0; i < n_r; i++) {
            y[r0 + i] = ql_linear_tree(part[i], p->a->n_slice);
        }
    }
}

/* ---- several rows of x ------------------------------------------------------------------------------------------- */

INLINE void decode_tile(const ql_linear_host_plan *p, ql_qformat format, int32_t r0) {
    const ql_weight *w = p->a->w;
    for (int32_t i = 0; i < TILE_W; i++) {
        row_src src = row_of(w, r0 + i);
        float *out = p->tile + (int64_t)i * w->k;
        for (int32_t c = 0; c < w->k; c += 16) {
            v16_store(out + c, decode16(format, src, c));
        }
    }
}

/* Sums of columns [c, end) for TILE_W rows of the tile and n_x (a constant, up to TILE_X) rows of x. */
INLINE void tile_sums(const float *tile, int64_t tile_ld, const float *x, int64_t ld, int32_t n_x, int32_t c, int32_t end,
                      V16 acc[TILE_X][TILE_W]) {
    V16 sum[TILE_X][TILE_W];
    UNROLL
    for (int32_t t = 0; t < n_x; t++) {
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            sum[t][i] = v16_zero();
        }
    }
    for (; c < end; c += 16) {
        V16 wv[TILE_W];
        UNROLL
        for (int32_t i = 0; i < TILE_W; i++) {
            wv[i] = v16_load(tile + i * tile_ld + c);
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
            acc[t][i] = sum[t][i];
        }
    }
}

static void tile_sums_of(int32_t n_x, const float *tile, int64_t tile_ld, const float *x, int64_t ld, int32_t c,
                         int32_t end, V16 acc[TILE_X][TILE_W]) {
    switch (n_x) {
    case 1: tile_sums(tile, tile_ld, x, ld, 1, c, end, acc); break;
    case 2: tile_sums(tile, tile_ld, x, ld, 2, c, end, acc); break;
#if TILE_X > 3
    case 3: tile_sums(tile, tile_ld, x, ld, 3, c, end, acc); break;
    case 4: tile_sums(tile, tile_ld, x, ld, 4, c, end, acc); break;
    case 5: tile_sums(tile, tile_ld, x, ld, 5, c, end, acc); break;
#endif
    default: tile_sums(tile, tile_ld, x, ld, TILE_X, c, end, acc); break;
    }
}

/* The tile of weight rows from r0 against x rows [0, n_x) of the block, whose first is row t of it. */
static void tile_rows(const ql_linear_host_plan *p, int32_t r0, const float *x, int64_t ld, int32_t t, int32_t n_x,
                      float *y) {
    const ql_weight *w = p->a->w;
    const bool is_block = w->format == QL_FORMAT_FP8_BLOCK;
    int32_t n_r = w->n - r0 < TILE_W ? w->n - r0 : TILE_W;
    float part[TILE_X][TILE_W][QL_LINEAR_SLICES];
    for (int32_t s = 0; s < p->a->n_slice; s++) {
        V16 acc[TILE_X][TILE_W], total[TILE_X][TILE_W];
        int32_t c = s * p->ks, slice_end = c + p->ks;
        if (!is_block) {
            tile_sums_of(n_x, p->tile, w->k, x, ld, c, slice_end, acc);
        } else {
            for (int32_t j = 0; j < n_x; j++) {
                for (int32_t i = 0; i < TILE_W; i++) {
                    total[j][i] = v16_zero();
                }
            }
            while (c < slice_end) {
                int32_t end = run_end(w, true, c, slice_end);
                tile_sums_of(n_x, p->tile, w->k, x, ld, c, end, acc);
                for (int32_t i = 0; i < n_r; i++) {
                    V16 scale = v16_set1(ql_linear_block_scale(w, r0 + i, c));
                    for (int32_t j = 0; j < n_x; j++) {
                        total[j][i] = v16_add(total[j][i], v16_mul(acc[j][i], scale));
                    }
                }
                c = end;
            }
        }
        for (int32_t j = 0; j < n_x; j++) {
            for (int32_t i = 0; i < n_r; i++) {
                float sum = v16_sum(is_block ? total[j][i] : acc[j][i]);
                part[j][i][s] = ql_linear_scaled(p, sum, t + j, r0 + i, s);
            }
        }
    }
    for (int32_t j = 0; j < n_x; j++) {
        for (int32_t i = 0; i < n_r; i++) {
            y[j * p->a->ldy + r0 + i] = ql_linear_tree(part[j][i], p->a->n_slice);
        }
    }
}

/* ---- dispatch by format ------------------------------------------------------------------------------------------ */

INLINE void block_of(const ql_linear_host_plan *p, ql_qformat format, const float *x, int64_t ld, int32_t n_row, float *y) {
    if (n_row == 1) {
        one_row(p, format, x, 0, y);
        return;
    }
    for (int32_t r0 = 0; r0 < p->a->w->n; r0 += TILE_W) {
        decode_tile(p, format, r0);
        for (int32_t t = 0; t < n_row; t += TILE_X) {
            tile_rows(p, r0, x + t * ld, ld, t, n_row - t < TILE_X ? n_row - t : TILE_X, y + t * p->a->ldy);
        }
    }
}

ql_status LINEAR(ql_dev *dev, const ql_linear_args *a) {
    const ql_weight *w = a->w;
    ql_linear_host_plan plan, *p = &plan;
    QL_TRY(ql_linear_host_begin(dev, a, p));
    if (p->ks % 16 || w->col_off % 16) {
        return ql_linear_host(dev, a);
    }
    int64_t fit = X_BLOCK_BYTES / (4 * (int64_t)w->k);
    int32_t most = fit < 2 * TILE_X ? 2 * TILE_X : fit < QL_LINEAR_X_ROWS ? (int32_t)(fit / TILE_X * TILE_X) : QL_LINEAR_X_ROWS;
    for (int32_t t = 0; t < a->n_row; t += most) {
        int32_t n_row = a->n_row - t < most ? a->n_row - t : most;
        int64_t ld;
        const float *x = ql_linear_host_x(p, t, n_row, &ld);
        float *y = a->y + t * a->ldy;
        switch (w->format) {
        case QL_FORMAT_F32: block_of(p, QL_FORMAT_F32, x, ld, n_row, y); break;
        case QL_FORMAT_F16: block_of(p, QL_FORMAT_F16, x, ld, n_row, y); break;
        case QL_FORMAT_BF16: block_of(p, QL_FORMAT_BF16, x, ld, n_row, y); break;
        case QL_FORMAT_NVFP4: block_of(p, QL_FORMAT_NVFP4, x, ld, n_row, y); break;
        case QL_FORMAT_FP8_BLOCK: block_of(p, QL_FORMAT_FP8_BLOCK, x, ld, n_row, y); break;
        default: block_of(p, QL_FORMAT_FP8_CHANNEL, x, ld, n_row, y); break; /* the codes of FP8_TENSOR alike */
        }
    }
    return QL_OK;
}
