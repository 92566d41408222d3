/* The pre-tokenizer's regular expression: cuts text into pieces inside which tokens are merged. */
#ifndef QL_RUNTIME_TEXT_PATTERN_H
#define QL_RUNTIME_TEXT_PATTERN_H

#include "runtime/base/buf.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* Immutable once compiled; may be shared by threads. */
typedef struct ql_pattern {
    pcre2_code *code;
    bool jit; /* compiled to machine code; else interpreted */
} ql_pattern;

/* One walk over a text. Zeroed at first, then reused by one thread for walks with one pattern. */
typedef struct ql_split {
    const ql_pattern *pattern;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    ql_buf view;         /* copy of the text with stand-ins, where it needs any */
    const char *subject; /* what the pattern is matched on, of the text's length */
    size_t n, at;        /* its length, and the end of the last piece */
    size_t match_end;    /* the match after a gap that was handed out; 0 for none */
} ql_split;

/* Compiles a regular expression as found in tokenizer.json. Accepted is what means the same to PCRE2 and to the
 * expression's own engine, Oniguruma: literals of ASCII, \r \n \t \f and escaped punctuation, \s \S, \p{X} and \P{X} with
 * X one of L, M, N, classes of these, groups (?: (?i: (?= (?! (?<= (?<!, alternatives and quantifiers. Anything else,
 * and an expression that matches empty text, is refused. */
ql_status ql_pattern_compile(ql_pattern *pattern, const char *regex, ql_error *err);
void ql_pattern_free(ql_pattern *pattern);

/* Starts on text[0..n), valid UTF-8, which must stay until the walk ends. */
ql_status ql_split_start(ql_split *split, const ql_pattern *pattern, const char *text, size_t n, ql_error *err);

/* The next piece: matches and the gaps between them, which together are the whole text. *len is 0 at the end. */
ql_status ql_split_next(ql_split *split, size_t *start, size_t *len, ql_error *err);

void ql_split_deinit(ql_split *split);

#endif
