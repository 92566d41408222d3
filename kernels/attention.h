/* Full attention with gate, head size 256, over a paged key/value cache.
 *
 * attn_prep: norm, rotary embedding, cache write. Per row at position p:
 *
 *   q' = rope(rmsnorm1p(q, q_norm), p)  per query head       k' = rope(rmsnorm1p(k, k_norm), p)  per kv head
 *   cache[page of p][head][p % 64] = store(k'), store(v)
 *
 * rmsnorm1p over the 256 entries: x * (1 / sqrt(mean x^2 + eps)) * (1 + w). rope on the first `rotary` entries, half
 * pairing (d, d + rotary/2):  y[d] = x[d] c - x[d+rotary/2] s,  y[d+rotary/2] = x[d+rotary/2] c + x[d] s, with c, s the
 * f32 cosine and sine of p * inv_freq[d] formed in double precision by the host and stored in `rope`.
 *
 * qg f32 [T][n_head][512]: query 256, gate 256 of each head together. k, v f32 [T][n_kv_head][256]. q out f32
 * [T][n_head][256]. rope f32 [max position][rotary/2][2].
 *
 * Cache layout, K and V alike: [page][n_kv_head][64][256] in the stored type. FP8: E4M3 codes and f16 scales
 * [page][n_kv_head][64][4], one for 64 channels: s = f16(max(amax, 2^-14) / 448) rounded up to the next f16 where the
 * rounded value is smaller, code = e4m3(x / s).
 *
 * attention: o[t][h] = (sum_s softmax_s(q'[t][h] . K[s][h / group] / 16) V[s]) * sigmoid(gate[t][h]), s <= p, where h
 * counts query heads of the whole model: kv head = (head0 + h) / group - kv_head0.
 *
 * Keys and values are read back in stored precision, the row's own too. Positions are taken in blocks of 64 from 0:
 * a block's scores, its maximum m_b, weights exp(s - m_b) and sums are finished on their own in rising s; blocks are
 * folded in rising order: the first block as it is, then M_new = max(M, m_b),
 * L = L exp(M - M_new) + l_b exp(m_b - M_new) and the 256 sums alike; at the end o = (sum / L) * (1 / (1 + exp(-gate))).
 * A row's bits depend on its own q and the cache alone: not on the other rows or the number of lanes, on the host in
 * precision EXACT not on the phase either. Dot products use 16 accumulators as in linear.h; scores are the dot product times
 * 1/16. CUDA kernels take generated rows in chunks that end at fixed positions and fold those in order.
 *
 * Precision BF16 or FP8, prompt rows: q' and the weights are rounded once before they are multiplied, to f16 where the cache is
 * F16 or FP8, else to bf16; entries of an F32 or FP8 cache likewise; scores, maxima and sums stay f32. q' is rounded times the
 * power of two that brings the head's largest magnitude to 2^14 .. 2^15, weights relative to the largest score up to their own
 * block and, in f16, times 2^15: both factors cancel. Hosts and CUDA on 9.0 do so; other GPUs do not round.
 * o f32 [T][n_head][256]; o may be q.
 */
#ifndef QL_KERNELS_ATTENTION_H
#define QL_KERNELS_ATTENTION_H

#include "kernels/batch.h"

typedef struct ql_kv_cache {
    ql_kv_type type;
    int32_t n_page, n_kv_head; /* local */
    void *k, *v;               /* [n_page][n_kv_head][64][256] */
    void *k_scale, *v_scale;   /* FP8: f16 [n_page][n_kv_head][64][4]; else NULL */
} ql_kv_cache;

/* Bytes of one page of one layer, K and V with scales. */
static inline uint64_t ql_kv_page_bytes(ql_kv_type type, int32_t n_kv_head) {
    uint64_t elem = type == QL_KV_F32 ? 4 : type == QL_KV_FP8 ? 1 : 2, scale = type == QL_KV_FP8 ? 2 * 4 : 0;
    return 2 * (uint64_t)n_kv_head * 64 * (256 * elem + scale);
}

typedef struct ql_attn_prep_args {
    const ql_batch *batch;
    const float *qg, *k, *v, *q_norm, *k_norm, *rope;
    float *q;
    const ql_kv_cache *cache;
    int32_t n_head, rotary;
    float eps;
} ql_attn_prep_args;

typedef struct ql_attention_args {
    const ql_batch *batch;
    const float *q, *qg; /* the gate is read from qg */
    const ql_kv_cache *cache;
    float *o;
    int32_t n_head;          /* local query heads */
    int32_t head0, kv_head0; /* first local heads in the whole model */
    int32_t group;           /* query heads that share a kv head */
    ql_precision precision;  /* of prompt rows; AUTO is EXACT */
} ql_attention_args;

#endif
