/* Text in and out: streaming detokenizer and stop strings. The tokenizer's calls are in qlane.h. */
#ifndef QL_RUNTIME_TEXT_TEXT_H
#define QL_RUNTIME_TEXT_TEXT_H

#include "runtime/base/buf.h"

#include <stdbool.h>

/* The bytes an id stands for, borrowed from the tokenizer; `special` may be NULL. Returns false for an unknown id. */
bool ql_tokenizer_token(const ql_tokenizer *tokenizer, int32_t id, const char **bytes, size_t *n, bool *special);

/* Whether an id may be sampled: it has an entry in the tokenizer. */
bool ql_tokenizer_has(const ql_tokenizer *tokenizer, int32_t id);

/* Parses tokenizer.json (and, where not NULL, tokenizer_config.json for added tokens that the former lacks). The fuzz
 * entry; ql_tokenizer_open reads the files and calls this. */
ql_status ql_tokenizer_parse(ql_tokenizer **tokenizer, const char *json, size_t n, const char *config_json,
                             size_t config_n, const char *what, ql_error *err);

/* Finds the first byte of `text` that is not valid UTF-8 (overlong forms, surrogates and > U+10FFFF are not valid).
 * Returns n when all is valid. */
size_t ql_utf8_invalid_at(const char *text, size_t n);

/* Turns ids into UTF-8 as they come. Complete characters are handed out at once; up to 3 bytes of one that may still
 * complete are held back; bytes that cannot become valid come out as U+FFFD, one per maximal invalid part. */
typedef struct ql_detok {
    const ql_tokenizer *tokenizer;
    unsigned char held[4];
    int32_t n_held;
    bool skip_special;
} ql_detok;

void ql_detok_init(ql_detok *detok, const ql_tokenizer *tokenizer, bool skip_special);

/* Appends what became printable to `out`. */
ql_status ql_detok_push(ql_detok *detok, int32_t id, ql_buf *out, ql_error *err);

/* Appends U+FFFD for what is still held, once. */
ql_status ql_detok_flush(ql_detok *detok, ql_buf *out, ql_error *err);

/* Finds stop strings in streamed text: holds back the longest end of the text that begins a stop string. */
typedef struct ql_stop {
    char **text;
    size_t *len;
    int32_t n;
    ql_buf held;
    bool hit;
} ql_stop;

/* Copies the strings, at most 16. Each must be non-empty valid UTF-8 of at most 1024 bytes. On failure there is nothing
 * to deinit. */
ql_status ql_stop_init(ql_stop *stop, const ql_allocator *mem, const char *const *text, int32_t n, ql_error *err);
void ql_stop_deinit(ql_stop *stop);

/* Takes new text (whole characters), appends to `out` what is certainly before any stop string. Sets stop->hit as soon
 * as one is complete (the one that ends first; of two that end together the one that begins first); it and the rest
 * are dropped and later calls add nothing. The result does not depend on how the text is cut into calls. */
ql_status ql_stop_push(ql_stop *stop, const char *text, size_t n, ql_buf *out, ql_error *err);

/* End of text: appends what was held back, unless a stop string hit. */
ql_status ql_stop_flush(ql_stop *stop, ql_buf *out, ql_error *err);

#endif
