#include "runtime/text/bpe.h"

#include <stdlib.h>
#include <string.h>

#define NO_RANK UINT32_MAX

/* Set in a piece's length by ql_bpe_finish where merging does not yield the token: no lookup then equals it. */
#define NOT_WHOLE 0x80000000u

/* Pieces up to this many bytes are merged by scanning a small array, longer ones by heap. */
enum { SHORT_PIECE = 48 };

/* Bits of the filter per slot of the table of pairs. Most pairs that are looked up do not merge. The filter says so from
 * the second-level cache, 256 KiB for 248k merges, where the table of 8 MiB would be read from further away: encoding
 * took 0.75 of the time with it. */
enum { PAIR_BITS = 4 };

/* A symbol of a long piece. `rank` and `merged` tell what merging it with its right neighbour would give. */
struct ql_bpe_symbol {
    uint32_t id, rank, merged;
    int32_t prev, next; /* indices, -1 at the ends */
};

void ql_bpe_free(ql_bpe *bpe) {
    free(bpe->bytes);
    free(bpe->token);
    free(bpe->pair);
    free(bpe->pair_bit);
    free(bpe->piece);
    memset(bpe, 0, sizeof *bpe);
}

void ql_bpe_work_free(ql_bpe_work *work) {
    free(work->symbol);
    free(work->heap);
    memset(work, 0, sizeof *work);
}

/* ---- tokens and pieces ------------------------------------------------------------------------------------------- */

static uint64_t load64(const char *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static uint32_t load32(const char *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* The first 8 of n >= 1 bytes as a little-endian number. */
static uint64_t head_of(const char *p, size_t n) {
    if (n >= 8) {
        return load64(p);
    }
    if (n >= 4) { /* two loads that overlap, with the same bytes where they do */
        return load32(p) | (uint64_t)load32(p + n - 4) << 8 * (n - 4);
    }
    const unsigned char *u = (const unsigned char *)p;
    return u[0] | (uint64_t)u[n / 2] << 8 * (n / 2) | (uint64_t)u[n - 1] << 8 * (n - 1);
}

static size_t hash_piece(uint64_t head, const char *p, size_t n) {
    uint64_t h = (head ^ n << 56) * 0x9E3779B97F4A7C15u;
    for (size_t i = 8; i < n; i += 8) {
        h = (h ^ h >> 29 ^ load64(i + 8 <= n ? p + i : p + n - 8)) * 0x9E3779B97F4A7C15u;
    }
    return (size_t)(h >> 20 ^ h >> 40);
}

/* Slots of a table for n entries, at most half full; a power of two. */
static size_t table_size(size_t n) {
    size_t slots = 16;
    while (slots < 2 * n) {
        slots *= 2;
    }
    return slots;
}

ql_status ql_bpe_add(ql_bpe *bpe, int64_t id, const char *bytes, size_t n, ql_error *err) {
    if (id < 0 || id > QL_BPE_MAX_ID) {
        return ql_fail(err, QL_ERR_MODEL, "token id %lld; accepted are 0 to %d", (long long)id, QL_BPE_MAX_ID);
    }
    if (n == 0 || n > QL_BPE_MAX_TOKEN) {
        return ql_fail(err, QL_ERR_MODEL, "token %lld has %zu bytes; accepted are 1 to %d", (long long)id, n,
                       QL_BPE_MAX_TOKEN);
    }
    if (id < bpe->n_token && bpe->token[id].len) {
        return ql_fail(err, QL_ERR_MODEL, "two tokens have the id %lld", (long long)id);
    }
    if (bpe->n_bytes + n > UINT32_MAX) {
        return ql_fail(err, QL_ERR_MODEL, "the tokens have more than 4 GiB together");
    }
    if (id >= bpe->cap_token) {
        int32_t cap = bpe->cap_token ? bpe->cap_token : 1024;
        while (cap <= id) {
            cap *= 2;
        }
        ql_bpe_token *token = ql_realloc(NULL, bpe->token, (size_t)cap * sizeof *token);
        if (!token) {
            return ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory for %d tokens", (int)cap);
        }
        memset(token + bpe->cap_token, 0, (size_t)(cap - bpe->cap_token) * sizeof *token);
        bpe->token = token;
        bpe->cap_token = cap;
    }
    if (bpe->n_bytes + n > bpe->cap_bytes) {
        size_t cap = bpe->cap_bytes ? bpe->cap_bytes : 1 << 16;
        while (cap < bpe->n_bytes + n) {
            cap *= 2;
        }
        char *grown = ql_realloc(NULL, bpe->bytes, cap);
        if (!grown) {
            return ql_fail(err, QL_ERR_MEMORY, "cannot allocate %zu bytes of host memory for tokens", cap);
        }
        bpe->bytes = grown;
        bpe->cap_bytes = cap;
    }
    memcpy(bpe->bytes + bpe->n_bytes, bytes, n);
    bpe->token[id] = (ql_bpe_token){(uint32_t)bpe->n_bytes, (uint32_t)n};
    bpe->n_bytes += n;
    bpe->n_token = id >= bpe->n_token ? (int32_t)id + 1 : bpe->n_token;
    return QL_OK;
}

/* The slot that holds the piece, or the free one where it would go. */
static ql_bpe_piece *piece_slot(const ql_bpe *bpe, const char *p, size_t n) {
    uint64_t head = head_of(p, n);
    size_t i = hash_piece(head, p, n) & bpe->piece_mask;
    for (;; i = (i + 1) & bpe->piece_mask) {
        ql_bpe_piece *piece = &bpe->piece[i];
        if (piece->len == 0 || (piece->head == head && piece->len == n &&
                                (n <= 8 || memcmp(bpe->bytes + bpe->token[piece->id].offset + 8, p + 8, n - 8) == 0))) {
            return piece;
        }
    }
}

int32_t ql_bpe_find(const ql_bpe *bpe, const char *bytes, size_t n) {
    if (n == 0 || n > QL_BPE_MAX_TOKEN) {
        return -1;
    }
    const ql_bpe_piece *piece = piece_slot(bpe, bytes, n);
    return piece->len ? (int32_t)piece->id : -1;
}

/* ---- pairs ------------------------------------------------------------------------------------------------------- */

static ql_status make_pairs(ql_bpe *bpe, size_t n_merge, ql_error *err) {
    size_t slots = table_size(n_merge);
    void *block;
    QL_TRY(ql_alloc(NULL, slots, sizeof *bpe->pair, "the merges", &block, err));
    bpe->pair = block;
    bpe->pair_mask = slots - 1;
    for (size_t i = 0; i < slots; i++) {
        bpe->pair[i].left = QL_BPE_FREE;
    }
    QL_TRY(ql_alloc(NULL, slots * PAIR_BITS / 64, sizeof *bpe->pair_bit, "the merges", &block, err));
    bpe->pair_bit = block;
    return QL_OK;
}

/* Picks a bit of the filter; the slot is the one that this bit belongs to. */
static size_t hash_pair(const ql_bpe *bpe, uint32_t left, uint32_t right) {
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
    return (size_t)(h >> 24 ^ h >> 44) & (bpe->pair_mask * PAIR_BITS + PAIR_BITS - 1);
}

/* The slot that holds the pair, or the free one where it would go. */
static ql_bpe_pair *pair_slot(const ql_bpe *bpe, size_t hash, uint32_t left, uint32_t right) {
    size_t i = hash / PAIR_BITS;
    for (;; i = (i + 1) & bpe->pair_mask) {
        ql_bpe_pair *pair = &bpe->pair[i];
        if ((pair->left == left && pair->right == right) || pair->left == QL_BPE_FREE) {
            return pair;
        }
    }
}

void ql_bpe_merge(ql_bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t merged) {
    size_t hash = hash_pair(bpe, (uint32_t)left, (uint32_t)right);
    bpe->pair_bit[hash / 64] |= (uint64_t)1 << hash % 64;
    *pair_slot(bpe, hash, (uint32_t)left, (uint32_t)right) =
        (ql_bpe_pair){(uint32_t)left, (uint32_t)right, rank, (uint32_t)merged};
}

/* The pair, or NULL when it does not merge. */
static const ql_bpe_pair *find_pair(const ql_bpe *bpe, uint32_t left, uint32_t right) {
    size_t hash = hash_pair(bpe, left, right);
    if (!(bpe->pair_bit[hash / 64] >> hash % 64 & 1)) {
        return NULL;
    }
    const ql_bpe_pair *pair = pair_slot(bpe, hash, left, right);
    return pair->left == QL_BPE_FREE ? NULL : pair;
}

ql_status ql_bpe_index(ql_bpe *bpe, size_t n_merge, ql_error *err) {
    size_t slots = table_size((size_t)bpe->n_token);
    void *block;
    QL_TRY(ql_alloc(NULL, slots, sizeof *bpe->piece, "the vocabulary", &block, err));
    bpe->piece = block;
    bpe->piece_mask = slots - 1;
    for (int32_t id = 0; id < bpe->n_token; id++) {
        if (bpe->token[id].len == 0) {
            continue;
        }
        const char *bytes = bpe->bytes + bpe->token[id].offset;
        ql_bpe_piece *piece = piece_slot(bpe, bytes, bpe->token[id].len);
        if (piece->len) {
            return ql_fail(err, QL_ERR_MODEL, "tokens %d and %d stand for the same bytes", (int)piece->id, (int)id);
        }
        *piece = (ql_bpe_piece){head_of(bytes, bpe->token[id].len), (uint32_t)id, bpe->token[id].len};
    }
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        int32_t id = ql_bpe_find(bpe, &byte, 1);
        if (id < 0) {
            return ql_fail(err, QL_ERR_MODEL, "the vocabulary has no token for the byte 0x%02X", (unsigned)b);
        }
        bpe->byte_id[b] = (uint32_t)id;
    }
    return make_pairs(bpe, n_merge, err);
}

/* ---- merging ----------------------------------------------------------------------------------------------------- */

/* A symbol with what merging it with its right neighbour would give. */
struct open_symbol {
    uint32_t id, rank, merged;
};

static void look_right(const ql_bpe *bpe, struct open_symbol *symbol) {
    const ql_bpe_pair *pair = find_pair(bpe, symbol[0].id, symbol[1].id);
    symbol->rank = pair ? pair->rank : NO_RANK;
    symbol->merged = pair ? pair->merged : 0;
}

static size_t merge_short(const ql_bpe *bpe, const char *piece, size_t n, int32_t *out) {
    struct open_symbol symbol[SHORT_PIECE];
    for (size_t i = 0; i < n; i++) {
        symbol[i].id = bpe->byte_id[(unsigned char)piece[i]];
    }
    for (size_t i = 0; i + 1 < n; i++) {
        look_right(bpe, &symbol[i]);
    }
    for (;;) {
        symbol[n - 1].rank = NO_RANK;
        size_t best = 0;
        for (size_t i = 1; i < n; i++) {
            best = symbol[i].rank < symbol[best].rank ? i : best;
        }
        if (symbol[best].rank == NO_RANK) {
            break;
        }
        symbol[best].id = symbol[best].merged;
        memmove(symbol + best + 1, symbol + best + 2, (n - best - 2) * sizeof *symbol);
        n--;
        if (best + 1 < n) {
            look_right(bpe, &symbol[best]);
        }
        if (best > 0) {
            look_right(bpe, &symbol[best - 1]);
        }
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = (int32_t)symbol[i].id;
    }
    return n;
}

static void heap_push(uint64_t *heap, size_t *n, uint64_t key) {
    size_t i = (*n)++;
    while (i > 0 && heap[(i - 1) / 2] > key) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n) {
    uint64_t top = heap[0], key = heap[--*n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= *n) {
            break;
        }
        child += child + 1 < *n && heap[child + 1] < heap[child];
        if (heap[child] >= key) {
            break;
        }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
    return top;
}

/* Looks up the pair that begins at symbol i and queues it by rank, then by position. */
static void queue_pair(const ql_bpe *bpe, ql_bpe_work *work, size_t *n_heap, int32_t i) {
    struct ql_bpe_symbol *symbol = &work->symbol[i];
    const ql_bpe_pair *pair = symbol->next < 0 ? NULL : find_pair(bpe, symbol->id, work->symbol[symbol->next].id);
    symbol->rank = pair ? pair->rank : NO_RANK;
    if (pair) {
        symbol->merged = pair->merged;
        heap_push(work->heap, n_heap, (uint64_t)pair->rank << 32 | (uint32_t)i);
    }
}

static ql_status reserve(ql_bpe_work *work, size_t n, ql_error *err) {
    if (n <= work->cap) {
        return QL_OK;
    }
    n = n < 2 * work->cap ? 2 * work->cap : n;
    ql_bpe_work_free(work);
    void *block;
    QL_TRY(ql_alloc(NULL, n, sizeof *work->symbol, "merging a long piece of text", &block, err));
    work->symbol = block;
    /* One entry for each first pair, two for each merge. */
    QL_TRY(ql_alloc(NULL, 3 * n, sizeof *work->heap, "merging a long piece of text", &block, err));
    work->heap = block;
    work->cap = n;
    return QL_OK;
}

static ql_status merge_long(const ql_bpe *bpe, ql_bpe_work *work, const char *piece, size_t n, int32_t *out,
                            size_t *count, ql_error *err) {
    QL_TRY(reserve(work, n, err));
    struct ql_bpe_symbol *symbol = work->symbol;
    size_t n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        symbol[i].id = bpe->byte_id[(unsigned char)piece[i]];
        symbol[i].prev = (int32_t)i - 1;
        symbol[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    for (size_t i = 0; i < n; i++) {
        queue_pair(bpe, work, &n_heap, (int32_t)i);
    }
    while (n_heap) {
        uint64_t key = heap_pop(work->heap, &n_heap);
        int32_t i = (int32_t)(uint32_t)key, next = symbol[i].next;
        /* Entries are never taken back: this one is stale when its symbol is gone or pairs differently now. */
        if (symbol[i].rank != key >> 32) {
            continue;
        }
        symbol[i].id = symbol[i].merged;
        symbol[i].next = symbol[next].next;
        symbol[next].rank = NO_RANK;
        if (symbol[i].next >= 0) {
            symbol[symbol[i].next].prev = i;
        }
        queue_pair(bpe, work, &n_heap, i);
        if (symbol[i].prev >= 0) {
            queue_pair(bpe, work, &n_heap, symbol[i].prev);
        }
    }
    size_t k = 0;
    for (int32_t i = 0; i >= 0; i = symbol[i].next) {
        out[k++] = (int32_t)symbol[i].id;
    }
    *count = k;
    return QL_OK;
}

static ql_status merge(const ql_bpe *bpe, ql_bpe_work *work, const char *piece, size_t n, int32_t *out, size_t *count,
                       ql_error *err) {
    if (n > SHORT_PIECE) {
        return merge_long(bpe, work, piece, n, out, count, err);
    }
    *count = merge_short(bpe, piece, n, out);
    return QL_OK;
}

ql_status ql_bpe_encode(const ql_bpe *bpe, ql_bpe_work *work, const char *piece, size_t n, int32_t *out, size_t *count,
                        ql_error *err) {
    int32_t id = ql_bpe_find(bpe, piece, n);
    if (id >= 0) {
        out[0] = id;
        *count = 1;
        return QL_OK;
    }
    return merge(bpe, work, piece, n, out, count, err);
}

ql_status ql_bpe_finish(ql_bpe *bpe, bool whole, ql_error *err) {
    if (whole) {
        return QL_OK;
    }
    ql_status status = QL_OK;
    ql_bpe_work work = {0};
    int32_t *out = NULL;
    void *block;
    QL_TRY(ql_alloc(NULL, QL_BPE_MAX_TOKEN, sizeof *out, "checking the vocabulary", &block, err));
    out = block;
    for (size_t i = 0; i <= bpe->piece_mask; i++) {
        ql_bpe_piece *piece = &bpe->piece[i];
        if (piece->len < 2) {
            continue;
        }
        size_t count;
        QL_TRY_GOTO(merge(bpe, &work, bpe->bytes + bpe->token[piece->id].offset, piece->len, out, &count, err), done);
        if (count != 1 || out[0] != (int32_t)piece->id) {
            piece->len |= NOT_WHOLE;
        }
    }
done:
    ql_bpe_work_free(&work);
    free(out);
    return status;
}
