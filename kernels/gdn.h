/* GatedDeltaNet: causal convolution with state, then the gated delta rule. Head size 128 for keys and values.
 *
 * conv: depthwise over the last 4 raw inputs of each channel, then SiLU.
 *
 *   y[t][c] = silu(((w[c][0] m[t-3][c] + w[c][1] m[t-2][c]) + w[c][2] m[t-1][c]) + w[c][3] m[t][c])
 *
 * m f32 [T][C] raw projections, w f32 [C][4], y f32 [T][C]; m and y do not overlap. Rows before the segment's first
 * come from tail[slot][3][C] (oldest first), or are 0 where the segment starts at position 0, whatever the slot holds.
 * At the end the slot's tail holds the last 3 raw inputs. Each output depends on 4 inputs in one order: any split of a
 * prompt gives the same bits.
 *
 * gdn: per value head j with key head kh(j) = (value_head0 + j) / group - key_head0, f32 state S[slot][j][128][128]
 * (row = key dimension), zero where the segment starts at position 0:
 *
 *   beta = 1 / (1 + exp(-b))      g = -exp(a_log) * softplus(a + dt_bias)      softplus(y) = y > 20 ? y : log1p(exp(y))
 *   q = l2(q) * (1 / sqrt(128))   k = l2(k)   l2(x) = x * (1 / sqrt(sum x^2 + 1e-6)), sums as in norm.h
 *   S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q
 *
 * GEN phase: exactly this, row by row. PROMPT phase: the 64-token chunk form (equal in exact arithmetic), chunks
 * aligned to position 0, a short last chunk computed as a whole one with q = k = v = 0, beta = 0, g = 0 in the missing
 * rows:
 *
 *   G_i = g_0 + .. + g_i                A_ij = beta_i (k_i . k_j) exp(G_i - G_j), j < i      (I + A) T = I
 *   U = T (beta v)    W = T (beta exp(G) k)    Vn = U - W S      O = (exp(G) q) S + (q k^T exp(G_i - G_j))_{j<=i} Vn
 *   S = exp(G_last) S + (exp(G_last - G) k)^T Vn
 *
 * Vn may be had without U and W by forward substitution, which is how the host does it:
 *   Vn_i = beta_i (v_i - exp(G_i) S^T k_i) - sum_{j<i} A_ij Vn_j
 * Exponents are formed for j <= i only, so none is positive. G is summed in f64 and its differences are rounded to f32:
 * one strong decay makes every later |G| large, and f32 sums would lose the small differences of near rows. The result
 * does not depend on how rows are grouped into steps as long as steps end on multiples of 64 (or at the end of the
 * prompt), nor on the other segments, nor on which heads the lane holds.
 *
 * Host order: every sum over d (key dimension), j or i (rows of the chunk) is one accumulator in rising index, each
 * term a separate multiply and add; sums that continue a value (the S update, O, Vn) start from that value.
 *
 * u f32 [T][C] is conv's output: q [n_key_head][128] | k [n_key_head][128] | v [n_value_head][128]. a, b f32
 * [T][n_value_head]; a_log, dt_bias f32 [n_value_head]; o f32 [T][n_value_head][128].
 * GEN bytes: 2 * 4 * 128 * 128 per row and head. PROMPT flops: about 8 * 64 * 64 * 128 per chunk and head.
 */
#ifndef QL_KERNELS_GDN_H
#define QL_KERNELS_GDN_H

#include "kernels/batch.h"

typedef struct ql_conv_args {
    const ql_batch *batch;
    const float *m, *w;
    float *tail; /* [slot][3][C] */
    float *y;
    int32_t channels;
} ql_conv_args;

typedef struct ql_gdn_args {
    const ql_batch *batch;
    const float *u, *a, *b, *a_log, *dt_bias;
    float *state; /* [slot][n_value_head][128][128] */
    float *o;
    int32_t n_key_head, n_value_head; /* local */
    int32_t key_head0, value_head0;   /* first local head in the whole model */
    int32_t group;                    /* value heads that share a key head */
} ql_gdn_args;

#endif
