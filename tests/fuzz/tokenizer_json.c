/* tokenizer.json and, behind a line of its own with "----", tokenizer_config.json. Asserts: a refusal says why and leaves
 * no tokenizer; a tokenizer that opens encodes all bytes of the alphabet's text, gives ids that it has, and decodes them to
 * text that encodes again. */
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

static void use(const ql_tokenizer *t) {
    static const char sample[] = "abc abcabc  it's\n\n 12 <x>y<x> e\xCC\x81\xE4\xB8\xAD\xF0\x9F\x98\x80\t.";
    ql_error err = {0};
    int32_t *ids = NULL, n = 0;
    if (ql_tokenizer_encode(t, sample, sizeof sample - 1, &ids, &n, &err) != QL_OK) {
        require(strstr(err.text, "Split regex failed") != NULL, "only the file's own expression can fail");
        return;
    }
    require(n > 0, "text has ids");
    for (int32_t i = 0; i < n; i++) {
        require(ql_tokenizer_has(t, ids[i]) && ids[i] < ql_tokenizer_size(t), "encoding gives ids that exist");
    }
    char *text = NULL;
    size_t len = 0;
    require(ql_tokenizer_decode(t, ids, n, 0, &text, &len, NULL) == QL_OK, "ids decode");
    require(ql_utf8_invalid_at(text, len) == len, "decoded text is UTF-8");
    /* Equal to the sample but for NFC, which makes one character of e and U+0301. */
    require(len == sizeof sample - 1 || len == sizeof sample - 2, "decoding gives back the text");
    free(text);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char line[] = "\n----\n";
    const char *json = (const char *)data, *config = NULL;
    size_t n = size, config_n = 0;
    const char *cut = memmem(json, size, line, sizeof line - 1);
    if (cut) {
        n = (size_t)(cut - json);
        config = cut + sizeof line - 1;
        config_n = size - n - (sizeof line - 1);
    }
    ql_error err = {0};
    ql_tokenizer *t = NULL;
    ql_status status = ql_tokenizer_parse(&t, json, n, config, config_n, "file", &err);
    require((status == QL_OK) == (t != NULL), "a tokenizer or a refusal");
    require((status == QL_OK) == (err.text[0] == 0), "a refusal says why");
    if (t) {
        use(t);
        ql_tokenizer_close(&t);
        require(t == NULL, "closing clears the handle");
    }
    return 0;
}
