/* Tokenizers in the unit tests: what cannot be opened or encoded fails the running test. */
#ifndef QL_TESTS_UNIT_TOKEN_H
#define QL_TESTS_UNIT_TOKEN_H

#include "runtime/text/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))
#define TINY "models/tiny/tokenizer.json"

ql_tokenizer *tk_open(const char *path);

/* Ids of n bytes of text, for the caller to free. */
int32_t *tk_encode(const ql_tokenizer *t, const char *text, size_t n, int32_t *n_ids);
/* These and no others. */
void tk_expect(const ql_tokenizer *t, const char *text, size_t n, const int32_t *want, int32_t n_want);

/* A code point as UTF-8; returns its bytes, at most 4. */
size_t tk_put_char(char *out, uint32_t cp);

#endif
