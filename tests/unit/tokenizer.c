/* The tokenizer against the ids that the `tokenizers` package gives (tests/data/text), there and back, on text that is not UTF-8, very
 * long or empty, and shared by threads. */
#include "runtime/base/json.h"
#include "runtime/text/pattern.h"
#include "tests/textdata.h"
#include "tests/unit/token.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define DATA "tests/data/text/"

/* ---- ids of the reference ---------------------------------------------------------------------------------------- */

typedef struct cases {
    ql_tokenizer *tokenizer;
    const char *key; /* of the ids */
    char kind[64][16];
    int n_kind;
} cases;

static void count_kind(cases *c, const char *kind) {
    for (int i = 0; i < c->n_kind; i++) {
        if (strcmp(c->kind[i], kind) == 0) {
            return;
        }
    }
    assert_true(c->n_kind < 64);
    snprintf(c->kind[c->n_kind++], sizeof *c->kind, "%s", kind);
}

static void check_case(void *user, const json_t *line) {
    cases *c = user;
    const json_t *text = json_object_get(line, "text"), *kind = json_object_get(line, "kind");
    int32_t n;
    int32_t *want = ql_test_ints(line, c->key, &n);
    assert_non_null(want);
    tk_expect(c->tokenizer, json_string_value(text), json_string_length(text), want, n);
    free(want);
    if (kind) {
        count_kind(c, json_string_value(kind));
    }
}

static void ids_with_the_bundled_model(void **state) {
    (void)state;
    cases c = {.tokenizer = tk_open(TINY), .key = "tiny"};
    assert_true(ql_test_rows(DATA "cases.jsonl", check_case, &c) >= 2000);
    assert_true(c.n_kind >= 30);
    ql_tokenizer_close(&c.tokenizer);
}

static void ids_with_the_real_vocabulary(void **state) {
    (void)state;
    cases c = {.tokenizer = tk_open(DATA "qwen-tokenizer.json"), .key = "qwen"};
    assert_true(ql_test_rows(DATA "cases.jsonl", check_case, &c) >= 2000);
    assert_int_equal(ql_tokenizer_size(c.tokenizer), 248077);
    assert_true(ql_tokenizer_has(c.tokenizer, 248076));
    assert_false(ql_tokenizer_has(c.tokenizer, 248077));
    /* Ids known from published prompts. */
    const int32_t user[] = {248045, 846, 198};
    tk_expect(c.tokenizer, "<|im_start|>user\n", 17, user, 3);
    ql_tokenizer_close(&c.tokenizer);
}

/* Replaces the only occurrence of `from`; the result is malloc'ed. */
static char *replace(const char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    assert_non_null(at);
    assert_null(strstr(at + 1, from));
    size_t before = (size_t)(at - text);
    char *out = malloc(strlen(text) + strlen(to) + 1);
    assert_non_null(out);
    memcpy(out, text, before);
    strcpy(out + before, to);
    strcat(out + before, at + strlen(from));
    return out;
}

/* The file's own expression counts: some requantized checkpoints carry the older one, without \p{M}. */
static void ids_with_the_pattern_without_marks(void **state) {
    (void)state;
    ql_error err = {0};
    char *json;
    size_t n;
    assert_int_equal(ql_read_file(DATA "qwen-tokenizer.json", 1 << 24, &json, &n, &err), QL_OK);
    char *letters = replace(json, "]?[\\\\p{L}\\\\p{M}]+|", "]?\\\\p{L}+|");
    char *older = replace(letters, "[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]", "[^\\\\s\\\\p{L}\\\\p{N}]");
    cases c = {.key = "ids"};
    assert_int_equal(ql_tokenizer_parse(&c.tokenizer, older, strlen(older), NULL, 0, "older", &err), QL_OK);
    assert_true(ql_test_rows(DATA "no-marks.jsonl", check_case, &c) >= 20);
    ql_tokenizer_close(&c.tokenizer);
    free(json);
    free(letters);
    free(older);
}

typedef struct code_points {
    ql_tokenizer *tokenizer;
    ql_pattern pattern[2];
} code_points;

static bool same_numbers(const json_t *line, const char *count, const char *crc, const int32_t *number, int32_t n) {
    return n == json_integer_value(json_object_get(line, count)) &&
           (json_int_t)crc32(0, (const unsigned char *)number, (unsigned)n * 4) ==
               json_integer_value(json_object_get(line, crc));
}

/* The lengths of the pieces that a pattern cuts. */
static bool same_pieces(const code_points *c, int which, const char *text, size_t n, const json_t *line,
                        const char *count, const char *crc) {
    int32_t *length = malloc(n * sizeof *length), n_piece = 0;
    assert_non_null(length);
    ql_split split = {0};
    size_t start, len;
    assert_int_equal(ql_split_start(&split, &c->pattern[which], text, n, NULL), QL_OK);
    for (;;) {
        assert_int_equal(ql_split_next(&split, &start, &len, NULL), QL_OK);
        if (len == 0) {
            break;
        }
        length[n_piece++] = (int32_t)len;
    }
    bool same = same_numbers(line, count, crc, length, n_piece);
    ql_split_deinit(&split);
    free(length);
    return same;
}

/* Code points in contexts in which it matters whether they are letters, marks, digits, white space or none of these:
 * all of planes 0 to 3 and a part of the others, which are empty or private. */
static void check_code_points(void *user, const json_t *line) {
    uint32_t first = (uint32_t)json_integer_value(json_object_get(line, "first"));
    uint32_t step = (uint32_t)json_integer_value(json_object_get(line, "step"));
    uint32_t count = (uint32_t)json_integer_value(json_object_get(line, "count"));
    static const char *const context[] = {"a", "b ", "'s\n", "", "7!", "  "}; /* before each, the last behind */
    char *text = malloc((size_t)count * 40);
    assert_non_null(text);
    size_t n = 0;
    for (uint32_t i = 0, cp = first; i < count; i++, cp += step) {
        if (cp >= 0xD800 && cp < 0xE000) {
            continue;
        }
        for (size_t k = 0; k < LEN(context); k++) {
            size_t len = strlen(context[k]);
            memcpy(text + n, context[k], len);
            n += len;
            if (k + 1 < LEN(context)) {
                n += tk_put_char(text + n, cp);
            }
        }
    }
    code_points *c = user;
    int32_t n_ids;
    int32_t *ids = tk_encode(c->tokenizer, text, n, &n_ids);
    if (!same_pieces(c, 0, text, n, line, "pieces", "pieces_crc") ||
        !same_pieces(c, 1, text, n, line, "older", "older_crc") || !same_numbers(line, "ids", "ids_crc", ids, n_ids)) {
        fail_msg("differs for a code point in U+%X to U+%X", (unsigned)first, (unsigned)(first + step * (count - 1)));
    }
    free(ids);
    free(text);
}

static void every_code_point(void **state) {
    (void)state;
    /* With and without \\p{M}: the latter tells letters and marks apart. */
    static const char *const regex[] = {
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+"
        "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+"
        "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"};
    code_points c = {.tokenizer = tk_open(TINY)};
    for (size_t i = 0; i < LEN(regex); i++) {
        assert_int_equal(ql_pattern_compile(&c.pattern[i], regex[i], NULL), QL_OK);
    }
    assert_true(ql_test_rows(DATA "codepoints.jsonl", check_code_points, &c) >= 70);
    for (size_t i = 0; i < LEN(regex); i++) {
        ql_pattern_free(&c.pattern[i]);
    }
    ql_tokenizer_close(&c.tokenizer);
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

static void expect_text(const ql_tokenizer *t, const int32_t *ids, int32_t n, int32_t skip_special,
                        const json_t *want) {
    ql_error err = {0};
    char *text = NULL;
    size_t len = 0;
    assert_int_equal(ql_tokenizer_decode(t, ids, n, skip_special, &text, &len, &err), QL_OK);
    assert_int_equal(len, json_string_length(want));
    assert_memory_equal(text, json_string_value(want), len);
    assert_int_equal(text[len], 0);
    free(text);
}

static void check_decode(void *user, const json_t *line) {
    int32_t n;
    int32_t *ids = ql_test_ints(line, "ids", &n);
    assert_non_null(ids);
    expect_text(user, ids, n, 0, json_object_get(line, "text"));
    expect_text(user, ids, n, 1, json_object_get(line, "skipped"));
    free(ids);
}

static void decode_of_the_reference(void **state) {
    (void)state;
    ql_tokenizer *t = tk_open(TINY);
    assert_true(ql_test_rows(DATA "decode.jsonl", check_decode, t) >= 200);
    ql_tokenizer_close(&t);
}

/* Decoding gives back the text, in normal form. */
static void check_round_trip(void *user, const json_t *line) {
    const json_t *text = json_object_get(line, "text"), *nfc = json_object_get(line, "nfc");
    if (strcmp(json_string_value(json_object_get(line, "kind")), "added") == 0) {
        return; /* spans between added tokens are normalized apart: see added_tokens_split_before_normalization */
    }
    int32_t n;
    int32_t *ids = tk_encode(user, json_string_value(text), json_string_length(text), &n);
    expect_text(user, ids, n, 0, nfc ? nfc : text);
    free(ids);
}

static void round_trip(void **state) {
    (void)state;
    const char *const path[] = {TINY, DATA "qwen-tokenizer.json"};
    for (size_t i = 0; i < LEN(path); i++) {
        ql_tokenizer *t = tk_open(path[i]);
        assert_true(ql_test_rows(DATA "cases.jsonl", check_round_trip, t) >= 2000);
        ql_tokenizer_close(&t);
    }
}

static void ids_that_do_not_exist(void **state) {
    (void)state;
    ql_tokenizer *t = tk_open(TINY);
    const int32_t bad[] = {-1, 1322, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < LEN(bad); i++) {
        ql_error err = {0};
        char *text = NULL, want[80];
        size_t n = 7;
        const int32_t ids[] = {64, bad[i]};
        assert_int_equal(ql_tokenizer_decode(t, ids, 2, 0, &text, &n, &err), QL_ERR_USAGE);
        snprintf(want, sizeof want, "token id %d is not in the tokenizer; its ids go from 0 to 1321", (int)bad[i]);
        assert_string_equal(err.text, want);
        assert_null(text);
        assert_int_equal(n, 7);
        assert_false(ql_tokenizer_has(t, bad[i]));
    }
    ql_tokenizer_close(&t);
}

/* ---- text --------------------------------------------------------------------------------------------------------- */

static void text_that_is_not_utf8(void **state) {
    (void)state;
    static const struct {
        const char *text;
        unsigned byte, at;
    } bad[] = {
        {"\x80", 0x80, 0}, /* continuation without a lead */
        {"abc\xFFx", 0xFF, 3},
        {"\xC0\xAF", 0xC0, 0}, /* overlong */
        {"a\xC1\xBF", 0xC1, 1},
        {"\xE0\x9F\xBF", 0xE0, 0},
        {"\xF0\x8F\xBF\xBF", 0xF0, 0},
        {"12345678\xED\xA0\x80", 0xED, 8}, /* surrogate */
        {"\xF4\x90\x80\x80", 0xF4, 0},     /* above U+10FFFF */
        {"\xF5\x80\x80\x80", 0xF5, 0},
        {"ab\xC3", 0xC3, 2}, /* cut off */
        {"\xE4\xB8", 0xE4, 0},
        {"\xF0\x9F\x98", 0xF0, 0},
        {"\xE4\xB8\xAD\xE4\xB8z", 0xE4, 3},
    };
    ql_tokenizer *t = tk_open(TINY);
    for (size_t i = 0; i < LEN(bad); i++) {
        ql_error err = {0};
        int32_t *ids = NULL, n = 7;
        char want[80];
        snprintf(want, sizeof want, "text is not UTF-8: byte 0x%02X at offset %u", bad[i].byte, bad[i].at);
        assert_int_equal(ql_tokenizer_encode(t, bad[i].text, strlen(bad[i].text), &ids, &n, &err), QL_ERR_USAGE);
        assert_string_equal(err.text, want);
        assert_null(ids);
        assert_int_equal(n, 7);
        assert_int_equal(ql_utf8_invalid_at(bad[i].text, strlen(bad[i].text)), bad[i].at);
    }
    ql_tokenizer_close(&t);
    static const char good[] =
        "\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xEF\xBF\xBF\xF0\x90\x80\x80\xF4\x8F\xBF\xBF";
    assert_int_equal(ql_utf8_invalid_at(good, sizeof good), sizeof good); /* the NUL is a character too */
}

static void empty_text_and_nul(void **state) {
    (void)state;
    ql_tokenizer *t = tk_open(TINY);
    ql_error err = {0};
    int32_t n = 7, one = 7;
    int32_t *ids = &one;
    assert_int_equal(ql_tokenizer_encode(t, "", 0, &ids, &n, &err), QL_OK);
    assert_null(ids);
    assert_int_equal(n, 0);
    ids = tk_encode(t, "a\0b", 3, &n);
    char *text;
    size_t len;
    assert_int_equal(ql_tokenizer_decode(t, ids, n, 0, &text, &len, &err), QL_OK);
    assert_int_equal(len, 3);
    assert_memory_equal(text, "a\0b", 3);
    free(text);
    free(ids);
    assert_int_equal(ql_tokenizer_decode(t, NULL, 0, 0, &text, &len, &err), QL_OK);
    assert_string_equal(text, "");
    free(text);
    ql_tokenizer_close(&t);
}

/* Megabytes that a quadratic step anywhere (merging, ordering marks, giving back white space, searching added tokens)
 * would turn into hours. Also more white space than PCRE2's own limit of steps would pass. */
static void long_runs(void **state) {
    (void)state;
    static const struct {
        const char *unit;
        size_t bytes;
    } run[] = {{"a", 2000000},  {"aZ", 2000000},  {"\xE4\xB8\xAD", 2000000}, {"\xCC\x81\xCC\xA3", 1000000},
               {" ", 12000000}, {"\n ", 2000000}, {"<|im_star", 2000000},    {"'", 2000000}};
    ql_tokenizer *t = tk_open(TINY);
    for (size_t i = 0; i < LEN(run); i++) {
        size_t unit = strlen(run[i].unit), n = run[i].bytes / unit * unit;
        char *text = malloc(n + 2);
        assert_non_null(text);
        for (size_t k = 0; k < n; k++) {
            text[k] = run[i].unit[k % unit];
        }
        text[n] = 'x';
        int32_t n_ids;
        int32_t *ids = tk_encode(t, text, n + 1, &n_ids);
        char *back;
        size_t back_n;
        assert_int_equal(ql_tokenizer_decode(t, ids, n_ids, 0, &back, &back_n, NULL), QL_OK);
        assert_int_equal(back_n, n + 1);
        free(back);
        free(ids);
        free(text);
    }
    ql_tokenizer_close(&t);
}

/* ---- threads ------------------------------------------------------------------------------------------------------ */

/* One thread's work. Counts only: an assertion may not leave another thread than the one that runs the test. */
typedef struct worker {
    const ql_tokenizer *tokenizer;
    int n_right;
} worker;

static void count_right(void *user, const json_t *line) {
    worker *w = user;
    const json_t *text = json_object_get(line, "text");
    int32_t n_want = 0, n_got = 0;
    int32_t *want = ql_test_ints(line, "qwen", &n_want), *got = NULL;
    ql_status status =
        ql_tokenizer_encode(w->tokenizer, json_string_value(text), json_string_length(text), &got, &n_got, NULL);
    w->n_right +=
        status == QL_OK && want && n_got == n_want && (!n_got || memcmp(got, want, (size_t)n_got * sizeof *got) == 0);
    free(want);
    free(got);
}

static void *encode_all(void *user) {
    ql_test_rows(DATA "cases.jsonl", count_right, user);
    return NULL;
}

static void shared_by_threads(void **state) {
    (void)state;
    ql_tokenizer *t = tk_open(DATA "qwen-tokenizer.json");
    worker w[4];
    pthread_t thread[LEN(w)];
    for (size_t i = 0; i < LEN(w); i++) {
        w[i] = (worker){.tokenizer = t};
        assert_int_equal(pthread_create(&thread[i], NULL, encode_all, &w[i]), 0);
    }
    for (size_t i = 0; i < LEN(w); i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    }
    for (size_t i = 0; i < LEN(w); i++) {
        assert_int_equal(w[i].n_right, w[0].n_right);
        assert_true(w[i].n_right >= 2000);
    }
    ql_tokenizer_close(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_with_the_bundled_model),
        cmocka_unit_test(ids_with_the_real_vocabulary),
        cmocka_unit_test(ids_with_the_pattern_without_marks),
        cmocka_unit_test(every_code_point),
        cmocka_unit_test(decode_of_the_reference),
        cmocka_unit_test(round_trip),
        cmocka_unit_test(ids_that_do_not_exist),
        cmocka_unit_test(text_that_is_not_utf8),
        cmocka_unit_test(empty_text_and_nul),
        cmocka_unit_test(long_runs),
        cmocka_unit_test(shared_by_threads),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
