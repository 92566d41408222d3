/* Encoding and decoding with a loaded tokenizer. All memory that a call writes is the call's own. */
#include "runtime/text/nfc.h"
#include "runtime/text/text.h"
#include "runtime/text/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

void ql_tokenizer_close(ql_tokenizer **tokenizer) {
    if (tokenizer && *tokenizer) {
        ql_pattern_free(&(*tokenizer)->pattern);
        ql_bpe_free(&(*tokenizer)->bpe);
        ql_added_free(&(*tokenizer)->added);
        free((*tokenizer)->special);
        free(*tokenizer);
        *tokenizer = NULL;
    }
}

int32_t ql_tokenizer_size(const ql_tokenizer *tokenizer) { return tokenizer->bpe.n_token; }

bool ql_tokenizer_has(const ql_tokenizer *tokenizer, int32_t id) {
    return id >= 0 && id < tokenizer->bpe.n_token && tokenizer->bpe.token[id].len > 0;
}

bool ql_tokenizer_token(const ql_tokenizer *tokenizer, int32_t id, const char **bytes, size_t *n, bool *special) {
    if (!ql_tokenizer_has(tokenizer, id)) {
        return false;
    }
    ql_bpe_token token = tokenizer->bpe.token[id];
    *bytes = tokenizer->bpe.bytes + token.offset;
    *n = token.len;
    if (special) {
        *special = tokenizer->special[id];
    }
    return true;
}

/* ---- encode ------------------------------------------------------------------------------------------------------ */

typedef struct encoder {
    const ql_tokenizer *tokenizer;
    ql_nfc nfc;
    ql_split split;
    ql_bpe_work work;
    int32_t *id;
    size_t n, cap;
} encoder;

/* Room for n more ids. */
static ql_status reserve(encoder *e, size_t n, ql_error *err) {
    if (n <= e->cap - e->n) {
        return QL_OK;
    }
    size_t cap = e->cap ? e->cap : 64;
    while (cap - e->n < n) {
        cap *= 2;
    }
    int32_t *id = realloc(e->id, cap * sizeof *id);
    if (!id) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory for %zu token ids", cap);
    }
    e->id = id;
    e->cap = cap;
    return QL_OK;
}

static ql_status encode_piece(encoder *e, const char *piece, size_t n, ql_error *err) {
    size_t count;
    QL_TRY(reserve(e, n, err));
    QL_TRY(ql_bpe_encode(&e->tokenizer->bpe, &e->work, piece, n, e->id + e->n, &count, err));
    e->n += count;
    return QL_OK;
}

/* Text between added tokens. */
static ql_status encode_span(encoder *e, const char *text, size_t n, ql_error *err) {
    if (n == 0) {
        return QL_OK;
    }
    if (e->tokenizer->nfc) {
        QL_TRY(ql_nfc_apply(&e->nfc, text, n, &text, &n, err));
        if (n > INT32_MAX) {
            return ql_fail(err, QL_ERR_USAGE, "text has %zu bytes after normalization; at most %d are accepted", n,
                           INT32_MAX);
        }
    }
    if (!e->tokenizer->pattern.code) {
        return encode_piece(e, text, n, err);
    }
    QL_TRY(ql_split_start(&e->split, &e->tokenizer->pattern, text, n, err));
    for (;;) {
        size_t start, len;
        QL_TRY(ql_split_next(&e->split, &start, &len, err));
        if (len == 0) {
            return QL_OK;
        }
        QL_TRY(encode_piece(e, text + start, len, err));
    }
}

static ql_status encode_text(encoder *e, const char *text, size_t n, ql_error *err) {
    size_t at = 0;
    while (at < n) {
        size_t end = n;
        const ql_added_token *token = ql_added_next(&e->tokenizer->added, text, at, n, &end);
        QL_TRY(encode_span(e, text + at, end - at, err));
        at = end;
        if (token) {
            QL_TRY(reserve(e, 1, err));
            e->id[e->n++] = token->id;
            at += token->len;
        }
    }
    return QL_OK;
}

ql_status ql_tokenizer_encode(const ql_tokenizer *tokenizer, const char *text, size_t text_bytes, int32_t **ids,
                              int32_t *n_ids, ql_error *err) {
    if (text_bytes > INT32_MAX) {
        return ql_fail(err, QL_ERR_USAGE, "text has %zu bytes; at most %d are accepted", text_bytes, INT32_MAX);
    }
    size_t bad = ql_utf8_invalid_at(text, text_bytes);
    if (bad < text_bytes) {
        return ql_fail(err, QL_ERR_USAGE, "text is not UTF-8: byte 0x%02X at offset %zu",
                       (unsigned)(unsigned char)text[bad], bad);
    }
    encoder e = {.tokenizer = tokenizer};
    ql_status status = encode_text(&e, text, text_bytes, err);
    if (status == QL_OK && e.n > INT32_MAX) {
        status = ql_fail(err, QL_ERR_USAGE, "text makes %zu token ids; at most %d are accepted", e.n, INT32_MAX);
    }
    if (status == QL_OK) {
        *ids = e.id;
        *n_ids = (int32_t)e.n;
    } else {
        free(e.id);
    }
    ql_nfc_deinit(&e.nfc);
    ql_split_deinit(&e.split);
    ql_bpe_work_free(&e.work);
    return status;
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

ql_status ql_tokenizer_decode(const ql_tokenizer *tokenizer, const int32_t *ids, int32_t n_ids, int32_t skip_special,
                              char **text, size_t *text_bytes, ql_error *err) {
    ql_buf out;
    ql_detok detok;
    ql_buf_init(&out, NULL, SIZE_MAX / 2);
    ql_detok_init(&detok, tokenizer, skip_special != 0);
    ql_status status = QL_OK;
    for (int32_t i = 0; i < n_ids; i++) {
        QL_TRY_GOTO(ql_detok_push(&detok, ids[i], &out, err), done);
    }
    QL_TRY_GOTO(ql_detok_flush(&detok, &out, err), done);
    size_t n;
    char *taken = ql_buf_take(&out, &n);
    if (!taken) {
        status = ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory for decoded text");
        goto done;
    }
    *text = taken;
    *text_bytes = n;
done:
    ql_buf_deinit(&out);
    return status;
}
