/* Byte pair encoding: the vocabulary, its merges, and merging the bytes of a piece.
 *
 * Three tables, immutable once built: bytes of each id; pairs (left id, right id) -> rank and merged id; and pieces:
 * bytes -> id for those tokens that encoding their own bytes yields. The last one answers for most pieces of real text
 * with one look, and takes the part of a cache without being one: nothing is written while encoding, so threads share
 * it freely. */
#ifndef QL_RUNTIME_TEXT_BPE_H
#define QL_RUNTIME_TEXT_BPE_H

#include "runtime/base/mem.h"

typedef struct ql_bpe_token {
    uint32_t offset, len; /* in ql_bpe.bytes; len 0: no such id */
} ql_bpe_token;

typedef struct ql_bpe_pair {
    uint32_t left, right, rank, merged; /* free slot: left == QL_BPE_FREE */
} ql_bpe_pair;

typedef struct ql_bpe_piece {
    uint64_t head;    /* the first 8 bytes, zeros behind */
    uint32_t id, len; /* free slot: len 0 */
} ql_bpe_piece;

enum { QL_BPE_MAX_ID = (1 << 21) - 1, QL_BPE_MAX_TOKEN = 1 << 16 };
#define QL_BPE_FREE UINT32_MAX

typedef struct ql_bpe {
    char *bytes;
    size_t n_bytes, cap_bytes;
    ql_bpe_token *token;
    int32_t n_token, cap_token; /* highest id + 1 */
    uint32_t byte_id[256];
    ql_bpe_pair *pair;
    size_t pair_mask;
    uint64_t *pair_bit; /* filter, by hash: clear where no pair has that hash */
    ql_bpe_piece *piece;
    size_t piece_mask;
} ql_bpe;

/* Memory that calls reuse; zeroed at first. One thread at a time. */
typedef struct ql_bpe_work {
    struct ql_bpe_symbol *symbol;
    uint64_t *heap;
    size_t cap;
} ql_bpe_work;

void ql_bpe_free(ql_bpe *bpe);
void ql_bpe_work_free(ql_bpe_work *work);

/* Building, in this order: every token with ql_bpe_add; ql_bpe_index; every merge, rank 0 first; ql_bpe_finish.
 * ql_bpe_add refuses ids that are taken or above QL_BPE_MAX_ID and tokens of 0 or more than QL_BPE_MAX_TOKEN bytes. */
ql_status ql_bpe_add(ql_bpe *bpe, int64_t id, const char *bytes, size_t n, ql_error *err);

/* Makes the tokens added so far findable; n_merge is the number of merges to come. Refuses equal tokens and
 * vocabularies that lack a token for one of the 256 bytes. */
ql_status ql_bpe_index(ql_bpe *bpe, size_t n_merge, ql_error *err);

/* The id of a token among those that were there at ql_bpe_index and, after ql_bpe_finish, that stand for a piece whole;
 * -1 for none. */
int32_t ql_bpe_find(const ql_bpe *bpe, const char *bytes, size_t n);

/* A pair that comes again takes the later rank, as in the reference implementation. */
void ql_bpe_merge(ql_bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t merged);

/* Limits the pieces that are answered whole to those that merging yields, unless `whole` says that any token that
 * equals a piece stands for it (the file's "ignore_merges"). */
ql_status ql_bpe_finish(ql_bpe *bpe, bool whole, ql_error *err);

/* Encodes one piece of 1 <= n < 2^31 bytes. `out` has room for n ids; *count is how many came. Takes O(n log n). */
ql_status ql_bpe_encode(const ql_bpe *bpe, ql_bpe_work *work, const char *piece, size_t n, int32_t *out, size_t *count,
                        ql_error *err);

#endif
