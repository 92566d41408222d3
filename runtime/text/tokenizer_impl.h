/* What a tokenizer holds. Seen by its loader and by encoding and decoding, nobody else. */
#ifndef QL_RUNTIME_TEXT_TOKENIZER_IMPL_H
#define QL_RUNTIME_TEXT_TOKENIZER_IMPL_H

#include "runtime/text/added.h"
#include "runtime/text/bpe.h"
#include "runtime/text/pattern.h"

struct ql_tokenizer {
    bool nfc;           /* normalize spans between added tokens */
    ql_pattern pattern; /* code NULL: a span is one piece */
    ql_bpe bpe;         /* added tokens are in its table of bytes too */
    ql_added added;
    unsigned char *special; /* by id, bpe.n_token of them */
};

#endif
