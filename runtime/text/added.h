/* Added tokens: strings that are one token each wherever they occur in the raw text, control tokens among them. */
#ifndef QL_RUNTIME_TEXT_ADDED_H
#define QL_RUNTIME_TEXT_ADDED_H

#include "runtime/text/bpe.h"

typedef struct ql_added_token {
    int32_t id;
    uint32_t len;
    const char *text; /* in the vocabulary's bytes; set by ql_added_sort */
    bool special;
} ql_added_token;

typedef struct ql_added {
    ql_added_token *token;
    size_t n, cap;
    bool starts[256]; /* by byte: whether a token begins with it */
} ql_added;

void ql_added_free(ql_added *added);

/* Notes a token that the vocabulary `bpe` already holds as `id`. */
ql_status ql_added_add(ql_added *added, int32_t id, bool special, ql_error *err);

/* Makes the tokens findable, once all are there and the vocabulary grows no more. Refuses equal ones. */
ql_status ql_added_sort(ql_added *added, const ql_bpe *bpe, ql_error *err);

/* The first token in text[from..n), the longest of those that begin there; NULL for none. *at is where it begins. */
const ql_added_token *ql_added_next(const ql_added *added, const char *text, size_t from, size_t n, size_t *at);

#endif
