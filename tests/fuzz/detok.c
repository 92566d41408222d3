/* Streams of ids of the bundled model: two bytes of input each. Asserts: every delta is UTF-8; at most 3 bytes are held,
 * and only such as begin a character; deltas together equal an independent decoder's text, with and without special
 * tokens; after the flush nothing more comes. */
#include "runtime/text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "violated: %s\n", what);
        abort();
    }
}

/* Whether n bytes are a whole character, by the definition: decoded and encoded again it is the same. */
static bool is_char(const unsigned char *p, size_t n) {
    uint32_t cp = n == 1 ? p[0] : p[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80) {
            return false;
        }
        cp = cp << 6 | (p[i] & 0x3F);
    }
    switch (n) {
    case 1: return cp < 0x80;
    case 2: return (p[0] & 0xE0) == 0xC0 && cp >= 0x80;
    case 3: return (p[0] & 0xF0) == 0xE0 && cp >= 0x800 && (cp < 0xD800 || cp > 0xDFFF);
    default: return (p[0] & 0xF8) == 0xF0 && cp >= 0x10000 && cp <= 0x10FFFF;
    }
}

/* Whether some bytes behind the n given ones make a character of them. */
static bool may_begin(const unsigned char *p, size_t n) {
    unsigned char whole[4];
    size_t len = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (p[0] < 0xC2 || n >= len) {
        return false;
    }
    /* What follows the second byte may be any continuation; the second itself may be bound by the first. */
    for (unsigned second = 0x80; second < 0xC0; second++) {
        memset(whole, 0x80, sizeof whole);
        whole[1] = (unsigned char)second;
        memcpy(whole, p, n);
        if (is_char(whole, len)) {
            return true;
        }
    }
    return false;
}

/* Appends what `bytes` decode to: characters, and U+FFFD for each maximal part that is none. */
static void decode(const ql_buf *bytes, ql_buf *out) {
    const unsigned char *p = (const unsigned char *)bytes->data;
    for (size_t i = 0; i < bytes->len;) {
        size_t n = 0;
        for (size_t k = 1; k <= 4 && i + k <= bytes->len && n == 0; k++) {
            n = is_char(p + i, k) ? k : 0;
        }
        if (n) {
            require(ql_buf_add(out, p + i, n, NULL) == QL_OK, "memory");
            i += n;
            continue;
        }
        n = 1;
        while (i + n < bytes->len && may_begin(p + i, n + 1)) {
            n++;
        }
        require(ql_buf_adds(out, "\xEF\xBF\xBD", NULL) == QL_OK, "memory");
        i += n;
    }
}

static void check(const ql_tokenizer *t, const uint8_t *data, size_t size, bool skip) {
    ql_detok detok;
    ql_buf out, bytes, want;
    ql_detok_init(&detok, t, skip);
    ql_buf_init(&out, NULL, SIZE_MAX / 2);
    ql_buf_init(&bytes, NULL, SIZE_MAX / 2);
    ql_buf_init(&want, NULL, SIZE_MAX / 2);
    for (size_t i = 0; i + 2 <= size; i += 2) {
        /* An odd first byte gives any token, an even one a token of few bytes: those break characters. */
        int32_t id = data[i] & 1 ? (data[i] >> 1 << 8 | data[i + 1]) % ql_tokenizer_size(t) : data[i + 1];
        const char *token;
        size_t n, before = out.len;
        bool special;
        require(ql_tokenizer_token(t, id, &token, &n, &special), "every id is there");
        if (!special || !skip) {
            require(ql_buf_add(&bytes, token, n, NULL) == QL_OK, "memory");
        }
        require(ql_detok_push(&detok, id, &out, NULL) == QL_OK, "ids are taken");
        size_t n_delta = out.len - before;
        require(n_delta == 0 || ql_utf8_invalid_at(out.data + before, n_delta) == n_delta, "deltas are UTF-8");
        require(detok.n_held >= 0 && detok.n_held <= 3, "at most three bytes are held");
        require(!detok.n_held || may_begin(detok.held, (size_t)detok.n_held), "what is held begins a character");
    }
    require(ql_detok_flush(&detok, &out, NULL) == QL_OK, "the stream ends");
    size_t len = out.len;
    require(ql_detok_flush(&detok, &out, NULL) == QL_OK && out.len == len, "nothing comes after the end");
    decode(&bytes, &want);
    require(len == want.len && (len == 0 || memcmp(out.data, want.data, len) == 0), "deltas together are the text");
    ql_buf_deinit(&out);
    ql_buf_deinit(&bytes);
    ql_buf_deinit(&want);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static ql_tokenizer *t;
    if (!t) {
        require(ql_tokenizer_open(&t, "models/tiny/tokenizer.json", NULL) == QL_OK, "the bundled tokenizer opens");
    }
    check(t, data, size, false);
    check(t, data, size, true);
    return 0;
}
