#include "runtime/text/text.h"
#include "runtime/text/utf8.h"

#include <string.h>

void ql_detok_init(ql_detok *detok, const ql_tokenizer *tokenizer, bool skip_special) {
    memset(detok, 0, sizeof *detok);
    detok->tokenizer = tokenizer;
    detok->skip_special = skip_special;
}

ql_status ql_detok_push(ql_detok *detok, int32_t id, ql_buf *out, ql_error *err) {
    const char *bytes;
    size_t n;
    bool special;
    if (!ql_tokenizer_token(detok->tokenizer, id, &bytes, &n, &special)) {
        return ql_fail(err, QL_ERR_USAGE, "token id %d is not in the tokenizer; its ids go from 0 to %d", (int)id,
                       (int)ql_tokenizer_size(detok->tokenizer) - 1);
    }
    if (special && detok->skip_special) {
        return QL_OK;
    }
    /* Each byte becomes at most one U+FFFD of three. Reserved first, so that a failure leaves `held` as it was. */
    QL_TRY(ql_buf_reserve(out, 3 * ((size_t)detok->n_held + n), err));
    unsigned char window[4];
    size_t from = 0; /* bytes[from..n) are not in `window` yet */
    while ((size_t)detok->n_held + (n - from) > 0) {
        /* A character needs at most 4 bytes: the held ones, completed from the token. */
        size_t have = (size_t)detok->n_held;
        memcpy(window, detok->held, have);
        size_t take = n - from < 4 - have ? n - from : 4 - have;
        memcpy(window + have, bytes + from, take);
        uint32_t cp;
        int step = ql_utf8_step(window, have + take, &cp);
        if (step == 0) {
            memcpy(detok->held, window, have + take);
            detok->n_held = (int32_t)(have + take);
            break;
        }
        size_t used = (size_t)(step > 0 ? step : -step);
        if (step > 0) {
            QL_TRY(ql_buf_add(out, window, used, err));
        } else {
            QL_TRY(ql_buf_adds(out, QL_UTF8_REPLACEMENT, err));
        }
        /* Held bytes begin a character, so an invalid part that starts with them covers all of them. */
        from += used - have;
        detok->n_held = 0;
    }
    return QL_OK;
}

ql_status ql_detok_flush(ql_detok *detok, ql_buf *out, ql_error *err) {
    if (detok->n_held) {
        QL_TRY(ql_buf_adds(out, QL_UTF8_REPLACEMENT, err));
        detok->n_held = 0;
    }
    return QL_OK;
}
