/* From logits to an id: candidates of a vocabulary slice, then the choice among all lanes' candidates.
 *
 * topk, per row r over this lane's vocabulary rows [vocab0, vocab0 + n):
 *   1. stats over the raw logits, for each canonical vocabulary range that the lane holds (8 in the whole model, range i
 *      = [V*i/8, V*(i+1)/8), V >= 8): max and sum of exp(logit - max), in an order fixed by the range's length. A
 *      range of nothing but -infinity has sum 0; a NaN makes the sum one.
 *   2. key = raw logit; ids >= n_valid or not allowed get no key, nor does a NaN. For ids in the row's penalty list:
 *      repetition (key > 0 ? key / rep : key * rep), then, once if count > 0, key -= presence, then key -= frequency *
 *      count. Every operation is rounded to f32 on its own.
 *   3. the row's `k` best by key, then by lower id, best first, into cand[r][0..k); fewer valid ids than k leave id = -1.
 *      Entries from k on are left alone.
 *
 * sample, per row over all lanes' candidates [lane][row][k_cap] (each sorted, ids rising with the lane) and stats
 * [lane][row][8 / n_lane]:
 *   temperature 0: the best key, lowest id on a tie. Else, over the best top_k candidates of all lanes together (all where
 *   top_k is 0), in order of key, lower id first:
 *   p_i = exp((key_i - key_0) / temperature), top_p < 1 keeps the shortest prefix with sum >= top_p * total, min_p drops
 *   p_i < min_p * p_0, then the first i with running sum > uniform * total of the kept is chosen; sums in f64 in order.
 *   uniform = ql_uniform(seed, counter). Without any candidate id = -1 and logprob = -infinity.
 *   logprob = raw - (M + log sum_i sum_exp_i * exp(max_i - M)), ranges in rising order, f64.
 * Every lane computes the same choice.
 */
#ifndef QL_KERNELS_SAMPLE_H
#define QL_KERNELS_SAMPLE_H

#include "kernels/batch.h"

enum { QL_STAT_RANGES = 8 };

typedef struct ql_candidate {
    float key, raw;
    int32_t id;
} ql_candidate;

typedef struct ql_vocab_stat {
    float max, sum_exp;
} ql_vocab_stat;

/* Sampling of one row; an array of these lives on the device. */
typedef struct ql_sample_row {
    float temperature, top_p, min_p, repetition, presence, frequency;
    int32_t top_k;
    int32_t k; /* candidates from each lane, 1..k_cap: no fewer than top_k, or than any lane's rows where
                                 top_k is 0 or more than those: so the lane count does not matter */
    int32_t penalty0, n_penalty; /* this row's part of the penalty arrays, ids rising */
    uint64_t seed, counter;
} ql_sample_row;

typedef struct ql_penalty {
    int32_t id, count; /* count: times generated; 0 for ids of the prompt alone */
} ql_penalty;

typedef struct ql_topk_args {
    const float *logits; /* [n_row][ld] */
    int64_t ld;
    int32_t n_row, n;        /* vocabulary rows held */
    int32_t vocab0, vocab;   /* first held, and all */
    int32_t n_valid;         /* ids from here on are never chosen */
    const uint32_t *allowed; /* bit set over the vocabulary, or NULL: all below n_valid */
    const ql_sample_row *row;
    const ql_penalty *penalty;
    ql_candidate *cand;  /* [n_row][k_cap] */
    ql_vocab_stat *stat; /* [n_row][ranges held] */
    int32_t k_cap;
} ql_topk_args;

typedef struct ql_sample_args {
    const ql_candidate *cand;  /* [n_lane][n_row][k_cap] */
    const ql_vocab_stat *stat; /* [n_lane][n_row][8 / n_lane] */
    const ql_sample_row *row;
    int32_t n_lane, n_row, k_cap;
    int32_t *id;    /* [n_row] */
    float *logprob; /* [n_row] */
} ql_sample_args;

/* A uniform number in [0, 1) with 24 bits from (seed, counter): SplitMix64's finalizer (Steele, Lea, Flood 2014) over
 * seed + (counter + 1) * 2^64/phi. Counter-based, so that a draw depends on nothing but its place. */
static inline float ql_uniform(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return (float)(z >> 40) * 0x1p-24f;
}

#endif
