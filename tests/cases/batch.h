/* Batches of kernel cases: the whole batch that a case is about, and pieces of it, so that a case can ask for the same
 * bits from its segments alone, in parts or row by row. All arrays lie in one I32 buffer "batch".
 */
#ifndef QL_TESTS_CASES_BATCH_H
#define QL_TESTS_CASES_BATCH_H

#include "tests/kcheck.h"

#include <string.h>

enum { KB_MAX_SEG = 8 };

/* Segments of a case as two arguments, count and {rows, first position} pairs. */
#define KB_SEGS(...)                                                                                                   \
    (int32_t)(sizeof((const int32_t[][2]){__VA_ARGS__}) / 8), (const int32_t[][2]) { __VA_ARGS__ }

typedef struct kb_batch {
    int32_t n_seg, n_row, max_page;
    int32_t row[KB_MAX_SEG + 1], pos[KB_MAX_SEG], len[KB_MAX_SEG], slot[KB_MAX_SEG];
    kc_buf *buf;
    int32_t row_seg, row_pos, seg_row, seg_pos, seg_slot, page, zero, pair; /* offsets in buf */
} kb_batch;

/* Declares the batch of `n_seg` segments; slots count down from n_seg, so that slot 0 is nobody's. Page tables start as
 * -1: fill them through kb_page. */
static inline void kb_make(kc_run *run, kb_batch *b, int32_t n_seg, const int32_t *len, const int32_t *pos) {
    memset(b, 0, sizeof *b);
    b->n_seg = n_seg;
    for (int32_t s = 0; s < n_seg; s++) {
        b->len[s] = len[s];
        b->pos[s] = pos[s];
        b->slot[s] = n_seg - s;
        b->row[s] = b->n_row;
        b->n_row += len[s];
        int32_t n_page = (pos[s] + len[s] + QL_PAGE - 1) / QL_PAGE;
        b->max_page = n_page > b->max_page ? n_page : b->max_page;
    }
    b->row[n_seg] = b->n_row;
    int32_t at = 0;
    b->row_seg = at, at += b->n_row;
    b->row_pos = at, at += b->n_row;
    b->seg_row = at, at += n_seg + 1;
    b->seg_pos = at, at += n_seg;
    b->seg_slot = at, at += n_seg;
    b->page = at, at += n_seg * b->max_page;
    b->zero = at, at += b->n_row;
    b->pair = at, at += 2 * (b->n_row + 1); /* {0, n} for each n: seg_row of a piece */
    b->buf = kc_buffer(run, "batch", KC_IN, KC_I32, at);
    int32_t *v = b->buf->host;
    for (int32_t s = 0; s < n_seg; s++) {
        for (int32_t i = 0; i < len[s]; i++) {
            v[b->row_seg + b->row[s] + i] = s;
            v[b->row_pos + b->row[s] + i] = pos[s] + i;
        }
        v[b->seg_pos + s] = pos[s];
        v[b->seg_slot + s] = b->slot[s];
    }
    memcpy(v + b->seg_row, b->row, (size_t)(n_seg + 1) * sizeof *v);
    for (int32_t i = 0; i < n_seg * b->max_page; i++) {
        v[b->page + i] = -1;
    }
    for (int32_t i = 0; i <= b->n_row; i++) {
        v[b->pair + 2 * i + 1] = i;
    }
}

/* Host entry of the page that holds positions 64 * i and on of segment s. */
static inline int32_t *kb_page(const kb_batch *b, int32_t s, int32_t i) {
    return (int32_t *)b->buf->host + b->page + s * b->max_page + i;
}

static inline ql_batch kb_whole(const kb_batch *b, ql_phase phase) {
    const int32_t *v = b->buf->dev;
    return (ql_batch){
        .phase = phase,
        .n_row = b->n_row,
        .n_seg = b->n_seg,
        .max_page = b->max_page,
        .row_seg = v + b->row_seg,
        .row_pos = v + b->row_pos,
        .seg_row = v + b->seg_row,
        .seg_pos = v + b->seg_pos,
        .seg_slot = v + b->seg_slot,
        .page = v + b->page,
    };
}

/* Rows [off, off + n) of segment s as a batch of their own: row 0 of it is row b->row[s] + off of the whole. */
static inline ql_batch kb_piece(const kb_batch *b, ql_phase phase, int32_t s, int32_t off, int32_t n) {
    const int32_t *v = b->buf->dev;
    const int32_t *pos = v + b->row_pos + b->row[s] + off;
    return (ql_batch){
        .phase = phase,
        .n_row = n,
        .n_seg = 1,
        .max_page = b->max_page,
        .row_seg = v + b->zero,
        .row_pos = pos,
        .seg_row = v + b->pair + 2 * n,
        .seg_pos = pos,
        .seg_slot = v + b->seg_slot + s,
        .page = v + b->page + s * b->max_page,
    };
}

/* The bytes of got, for comparing with a later run. NULL only when memory ends. */
static inline void *kb_copy(const kc_buf *buf) {
    size_t bytes = (size_t)buf->n * (buf->type == KC_U8 ? 1 : 4);
    void *copy = malloc(bytes ? bytes : 1);
    if (copy) {
        memcpy(copy, buf->got, bytes);
    }
    return copy;
}

/* Fails the case where got differs from a copy. */
static inline void kb_same(kc_run *run, const kc_buf *buf, const void *copy, const char *what) {
    int32_t size = buf->type == KC_U8 ? 1 : 4;
    for (int64_t i = 0; copy && i < buf->n; i++) {
        if (memcmp((const char *)copy + i * size, (const char *)buf->got + i * size, (size_t)size) != 0) {
            kc_fail(run, "%s: %s differs at element %lld", what, buf->name, (long long)i);
            return;
        }
    }
}

#endif
