/* Text through the bundled tokenizer. Asserts: what is valid UTF-8 to utf8proc is encoded, anything else refused at the
 * byte where utf8proc stops; decoding gives back the text, in normal form as utf8proc makes it where no added token
 * splits it; encoding that again gives the same ids; streamed decoding equals decoding at once. */
#include "runtime/text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "violated: %s\n", what);
        abort();
    }
}

static size_t invalid_at(const uint8_t *data, size_t size) {
    size_t i = 0;
    while (i < size) {
        utf8proc_int32_t cp;
        utf8proc_ssize_t n = utf8proc_iterate(data + i, (utf8proc_ssize_t)(size - i), &cp);
        if (n < 1) {
            break;
        }
        i += (size_t)n;
    }
    return i;
}

static void check_stream(const ql_tokenizer *t, const int32_t *ids, int32_t n, const char *text, size_t len) {
    ql_detok detok;
    ql_buf out;
    ql_detok_init(&detok, t, false);
    ql_buf_init(&out, NULL, SIZE_MAX / 2);
    for (int32_t i = 0; i < n; i++) {
        require(ql_detok_push(&detok, ids[i], &out, NULL) == QL_OK, "streamed ids decode");
    }
    require(ql_detok_flush(&detok, &out, NULL) == QL_OK, "the stream ends");
    require(out.len == len && (len == 0 || memcmp(out.data, text, len) == 0),
            "streamed decoding equals decoding at once");
    ql_buf_deinit(&out);
}

static void check_text(const uint8_t *data, size_t size, const char *text, size_t len) {
    /* Added tokens begin with '<', and utf8proc 2.8 loses U+11A7 after a Hangul syllable. */
    if (memchr(data, '<', size) || memmem(data, size, "\xE1\x86\xA7", 3)) {
        return;
    }
    utf8proc_uint8_t *nfc = NULL;
    utf8proc_ssize_t n = utf8proc_map(data, (utf8proc_ssize_t)size, &nfc, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    require(n >= 0 && (size_t)n == len && memcmp(nfc, text, len) == 0, "decoded text is the normal form of the input");
    free(nfc);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static ql_tokenizer *t;
    ql_error err = {0};
    if (!t) {
        require(ql_tokenizer_open(&t, "models/tiny/tokenizer.json", &err) == QL_OK, "the bundled tokenizer opens");
    }
    size_t bad = invalid_at(data, size);
    require(ql_utf8_invalid_at((const char *)data, size) == bad, "the first invalid byte is found");
    int32_t *ids = NULL, *again = NULL, n = 0, n_again = 0;
    ql_status status = ql_tokenizer_encode(t, (const char *)data, size, &ids, &n, &err);
    if (bad < size) {
        char want[80];
        snprintf(want, sizeof want, "text is not UTF-8: byte 0x%02X at offset %zu", (unsigned)data[bad], bad);
        require(status == QL_ERR_USAGE && strcmp(err.text, want) == 0, "invalid UTF-8 is refused, naming the byte");
        return 0;
    }
    char *text = NULL;
    size_t len = 0;
    require(status == QL_OK, "valid UTF-8 is encoded");
    require(ql_tokenizer_decode(t, ids, n, 0, &text, &len, NULL) == QL_OK, "ids decode");
    check_text(data, size, text, len);
    check_stream(t, ids, n, text, len);
    require(ql_tokenizer_encode(t, text, len, &again, &n_again, NULL) == QL_OK && n_again == n &&
                (n == 0 || memcmp(ids, again, (size_t)n * sizeof *ids) == 0),
            "encoding the decoded text gives the same ids");
    free(ids);
    free(again);
    free(text);
    return 0;
}
