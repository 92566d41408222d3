/* The tokenizer against the ids that the `tokenizers` package gives (tests/data/text), the files that it must refuse,
 * and text that is not UTF-8. */
#include "runtime/base/json.h"
#include "runtime/text/pattern.h"
#include "runtime/text/text.h"
#include "tests/textdata.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))
#define TINY "models/tiny/tokenizer.json"
#define DATA "tests/data/text/"

static ql_tokenizer *open_tokenizer(const char *path) {
    ql_error err = {0};
    ql_tokenizer *t = NULL;
    if (ql_tokenizer_open(&t, path, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return t;
}

static int32_t *encode(const ql_tokenizer *t, const char *text, size_t n, int32_t *n_ids) {
    ql_error err = {0};
    int32_t *ids = NULL;
    *n_ids = -1;
    if (ql_tokenizer_encode(t, text, n, &ids, n_ids, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    return ids;
}

static void expect_ids(const ql_tokenizer *t, const char *text, size_t n, const int32_t *want, int32_t n_want) {
    int32_t n_got;
    int32_t *got = encode(t, text, n, &n_got);
    bool same = n_got == n_want && (n_want == 0 || memcmp(got, want, (size_t)n_want * sizeof *got) == 0);
    if (!same) {
        int32_t i = 0;
        while (i < n_got && i < n_want && got[i] == want[i]) {
            i++;
        }
        fail_msg("\"%.200s\": id %d of %d is %d, want %d of %d", text, (int)i, (int)n_got, i < n_got ? (int)got[i] : -1,
                 i < n_want ? (int)want[i] : -1, (int)n_want);
    }
    free(got);
}

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
    expect_ids(c->tokenizer, json_string_value(text), json_string_length(text), want, n);
    free(want);
    if (kind) {
        count_kind(c, json_string_value(kind));
    }
}

static void ids_with_the_bundled_model(void **state) {
    (void)state;
    cases c = {.tokenizer = open_tokenizer(TINY), .key = "tiny"};
    assert_true(ql_test_rows(DATA "cases.jsonl", check_case, &c) >= 2000);
    assert_true(c.n_kind >= 30);
    ql_tokenizer_close(&c.tokenizer);
}

static void ids_with_the_real_vocabulary(void **state) {
    (void)state;
    cases c = {.tokenizer = open_tokenizer(DATA "qwen-tokenizer.json"), .key = "qwen"};
    assert_true(ql_test_rows(DATA "cases.jsonl", check_case, &c) >= 2000);
    assert_int_equal(ql_tokenizer_size(c.tokenizer), 248077);
    assert_true(ql_tokenizer_has(c.tokenizer, 248076));
    assert_false(ql_tokenizer_has(c.tokenizer, 248077));
    /* Ids known from published prompts. */
    const int32_t user[] = {248045, 846, 198};
    expect_ids(c.tokenizer, "<|im_start|>user\n", 17, user, 3);
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

static size_t put_char(char *out, uint32_t cp) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    size_t n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t i = n; --i > 0; cp >>= 6) {
        out[i] = (char)(0x80 | (cp & 0x3F));
    }
    out[0] = (char)((0xF00 >> n) | cp);
    return n;
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
                n += put_char(text + n, cp);
            }
        }
    }
    code_points *c = user;
    int32_t n_ids;
    int32_t *ids = encode(c->tokenizer, text, n, &n_ids);
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
    code_points c = {.tokenizer = open_tokenizer(TINY)};
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
    ql_tokenizer *t = open_tokenizer(TINY);
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
    int32_t *ids = encode(user, json_string_value(text), json_string_length(text), &n);
    expect_text(user, ids, n, 0, nfc ? nfc : text);
    free(ids);
}

static void round_trip(void **state) {
    (void)state;
    const char *const path[] = {TINY, DATA "qwen-tokenizer.json"};
    for (size_t i = 0; i < LEN(path); i++) {
        ql_tokenizer *t = open_tokenizer(path[i]);
        assert_true(ql_test_rows(DATA "cases.jsonl", check_round_trip, t) >= 2000);
        ql_tokenizer_close(&t);
    }
}

static void ids_that_do_not_exist(void **state) {
    (void)state;
    ql_tokenizer *t = open_tokenizer(TINY);
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

/* ---- a small tokenizer.json to change ----------------------------------------------------------------------------- */

/* Sets `path`, keys and indices separated by '/', to the parsed `json`; NULL removes it. */
static void set(json_t *root, const char *path, const char *json) {
    char key[64];
    json_t *at = root;
    const char *rest = path;
    for (;;) {
        size_t n = strcspn(rest, "/");
        snprintf(key, sizeof key, "%.*s", (int)n, rest);
        if (!rest[n]) {
            break;
        }
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(key)) : json_object_get(at, key);
        assert_non_null(at);
        rest += n + 1;
    }
    if (!json) {
        assert_int_equal(json_object_del(at, key), 0);
        return;
    }
    json_error_t error;
    json_t *value = json_loads(json, JSON_DECODE_ANY, &error);
    if (!value) {
        fail_msg("%s: %s", json, error.text);
    }
    int rc = json_is_array(at) ? json_array_set_new(at, (size_t)atoi(key), value) : json_object_set_new(at, key, value);
    assert_int_equal(rc, 0);
}

/* 256 bytes; "ab" 256, "abc" 257, "bc" 258; merges a+b, b+c, ab+c; added <x> 259 and <xy> 260 (special). */
static json_t *small_tokenizer(void) {
    static const char text[] =
        "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"normalizer\": {\"type\": \"NFC\"},"
        "\"added_tokens\": ["
        "{\"id\": 259, \"content\": \"<x>\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false,"
        " \"normalized\": false, \"special\": false},"
        "{\"id\": 260, \"content\": \"<x>y\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false,"
        " \"normalized\": false, \"special\": true}],"
        "\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": ["
        "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"[^ ]+| \"}, \"behavior\": \"Isolated\", \"invert\": false},"
        "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": false}]},"
        "\"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\"},"
        "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": null,"
        "\"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": false,"
        "\"vocab\": {}, \"merges\": [[\"a\", \"b\"], [\"b\", \"c\"], [\"ab\", \"c\"]]}}";
    json_error_t error;
    json_t *root = json_loads(text, 0, &error);
    if (!root) {
        fail_msg("%s", error.text);
    }
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; b++) {
        char key[5] = {0};
        put_char(key, (b > 32 && b < 127) || (b > 160 && b != 173) ? b : next++);
        json_object_set_new(vocab, key, json_integer(b));
    }
    json_object_set_new(vocab, "ab", json_integer(256));
    json_object_set_new(vocab, "abc", json_integer(257));
    json_object_set_new(vocab, "bc", json_integer(258));
    return root;
}

static ql_status parse(json_t *root, const char *config, ql_tokenizer **t, ql_error *err) {
    char *text = json_dumps(root, 0);
    assert_non_null(text);
    ql_status status = ql_tokenizer_parse(t, text, strlen(text), config, config ? strlen(config) : 0, "file", err);
    free(text);
    return status;
}

static ql_tokenizer *parse_changed(const char *path, const char *json, const char *config) {
    json_t *root = small_tokenizer();
    if (path) {
        set(root, path, json);
    }
    ql_error err = {0};
    ql_tokenizer *t = NULL;
    if (parse(root, config, &t, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    json_decref(root);
    return t;
}

/* Expects ids, which end with -1. */
static void expect(const ql_tokenizer *t, const char *text, const int32_t *want) {
    int32_t n = 0;
    while (want[n] >= 0) {
        n++;
    }
    expect_ids(t, text, strlen(text), want, n);
}

#define EXPECT(t, text, ...) expect(t, text, (const int32_t[]){__VA_ARGS__, -1})

static void merges_in_both_spellings(void **state) {
    (void)state;
    const char *const merges[] = {"[[\"a\",\"b\"],[\"b\",\"c\"],[\"ab\",\"c\"]]", "[\"a b\",\"b c\",\"ab c\"]"};
    for (size_t i = 0; i < LEN(merges); i++) {
        ql_tokenizer *t = parse_changed("model/merges", merges[i], NULL);
        EXPECT(t, "abc", 257);
        EXPECT(t, "bcab", 258, 256);
        EXPECT(t, "aabcc abc", 'a', 257, 'c', ' ', 257);
        ql_tokenizer_close(&t);
    }
}

/* A piece that is a token is still merged from its bytes: with b+c first, "abc" cannot come about. */
static void a_piece_in_the_vocabulary_is_no_shortcut(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed("model/merges", "[\"b c\",\"a b\",\"ab c\"]", NULL);
    EXPECT(t, "abc", 'a', 258);
    ql_tokenizer_close(&t);
    t = parse_changed("model/merges", "[]", NULL);
    EXPECT(t, "abc", 'a', 'b', 'c');
    ql_tokenizer_close(&t);
}

static void ignore_merges(void **state) {
    (void)state;
    json_t *root = small_tokenizer();
    set(root, "model/merges", "[\"b c\",\"a b\"]");
    set(root, "model/ignore_merges", "true");
    ql_error err = {0};
    ql_tokenizer *t = NULL;
    assert_int_equal(parse(root, NULL, &t, &err), QL_OK);
    EXPECT(t, "abc", 257);
    EXPECT(t, "abca", 'a', 258, 'a');
    ql_tokenizer_close(&t);
    json_decref(root);
}

/* The later of two equal merges counts, as in the reference. */
static void a_merge_given_twice(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed("model/merges", "[\"a b\",\"b c\",\"ab c\",\"a b\"]", NULL);
    EXPECT(t, "abc", 'a', 258);
    ql_tokenizer_close(&t);
}

static void byte_level_without_split(void **state) {
    (void)state;
    ql_tokenizer *t =
        parse_changed("pre_tokenizer", "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}", NULL);
    EXPECT(t, "abc ab", 257, ' ', 256);
    ql_tokenizer_close(&t);
}

static void without_normalizer(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed(NULL, NULL, NULL);
    EXPECT(t, "e\xCC\x81", 0xC3, 0xA9);
    ql_tokenizer_close(&t);
    t = parse_changed("normalizer", "null", NULL);
    EXPECT(t, "e\xCC\x81", 'e', 0xCC, 0x81);
    ql_tokenizer_close(&t);
}

static void gaps_between_matches_are_pieces(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed("pre_tokenizer/pretokenizers/0/pattern/Regex", "\"c\"", NULL);
    EXPECT(t, "abcabc", 256, 'c', 256, 'c');
    EXPECT(t, "cab", 'c', 256);
    ql_tokenizer_close(&t);
}

static void post_processors_that_add_nothing(void **state) {
    (void)state;
    const char *const accepted[] = {
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":false,\"use_regex\":true}",
        "{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"pair\":[],"
        "\"special_tokens\":{}}"};
    for (size_t i = 0; i < LEN(accepted); i++) {
        ql_tokenizer *t = parse_changed("post_processor", accepted[i], NULL);
        EXPECT(t, "ab", 256);
        ql_tokenizer_close(&t);
    }
}

/* ---- added tokens ------------------------------------------------------------------------------------------------- */

static void added_tokens_leftmost_then_longest(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed(NULL, NULL, NULL);
    EXPECT(t, "<x>", 259);
    EXPECT(t, "<x>y", 260);
    EXPECT(t, "a<x>yz", 'a', 260, 'z');
    EXPECT(t, "<x><x>y<x", 259, 260, '<', 'x');
    EXPECT(t, "<<x>>", '<', 259, '>');
    EXPECT(t, "ab<x>c", 256, 259, 'c'); /* no merge across */
    ql_tokenizer_close(&t);
}

static void added_tokens_split_before_normalization(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed(NULL, NULL, NULL);
    EXPECT(t, "e<x>\xCC\x81", 'e', 259, 0xCC, 0x81);
    ql_tokenizer_close(&t);
}

static void special_or_not(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed(NULL, NULL, NULL);
    const char *bytes;
    size_t n;
    bool special = true;
    assert_true(ql_tokenizer_token(t, 259, &bytes, &n, &special));
    assert_int_equal(n, 3);
    assert_memory_equal(bytes, "<x>", 3);
    assert_false(special);
    assert_true(ql_tokenizer_token(t, 260, &bytes, &n, &special));
    assert_true(special);
    assert_true(ql_tokenizer_token(t, 257, &bytes, &n, &special));
    assert_memory_equal(bytes, "abc", 3);
    assert_false(special);
    assert_false(ql_tokenizer_token(t, 261, &bytes, &n, NULL));
    ql_tokenizer_close(&t);
}

/* tokenizer_config.json adds what tokenizer.json lacks and changes nothing that it has. */
static void added_tokens_of_the_configuration(void **state) {
    (void)state;
    ql_tokenizer *t =
        parse_changed(NULL, NULL,
                      "{\"added_tokens_decoder\": {\"259\": {\"content\": \"<other>\", \"special\": true},"
                      "\"264\": {\"content\": \"<z>\", \"lstrip\": false, \"special\": true}}}");
    EXPECT(t, "<x><z><other>", 259, 264, '<', 'o', 't', 'h', 'e', 'r', '>');
    assert_int_equal(ql_tokenizer_size(t), 265);
    assert_false(ql_tokenizer_has(t, 262));
    bool special = false;
    const char *bytes;
    size_t n;
    assert_true(ql_tokenizer_token(t, 264, &bytes, &n, &special));
    assert_true(special);
    assert_true(ql_tokenizer_token(t, 259, &bytes, &n, &special));
    assert_false(special);
    ql_tokenizer_close(&t);
}

static void added_token_that_the_vocabulary_has(void **state) {
    (void)state;
    ql_tokenizer *t = parse_changed("added_tokens/0", "{\"id\": 256, \"content\": \"ab\", \"special\": true}", NULL);
    EXPECT(t, "abc", 256, 'c');
    ql_tokenizer_close(&t);
}

/* ---- files that are refused --------------------------------------------------------------------------------------- */

static void refused_files(void **state) {
    (void)state;
    static const struct {
        const char *path, *json, *message; /* the message without "file: " */
    } change[] = {
        {"version", "\"2.0\"", "version is \"2.0\"; accepted: 1.0"},
        {"extra", "1", "the file has a setting \"extra\" that is not supported"},
        {"truncation", "{\"max_length\": 5}", "the file has truncation set; only null is supported"},
        {"padding", "{}", "the file has padding set; only null is supported"},
        {"normalizer", "{\"type\": \"NFKC\"}", "normalizer has type \"NFKC\"; accepted: NFC"},
        {"normalizer", "[]", "normalizer is missing or not an object"},
        {"pre_tokenizer", "null", "pre_tokenizer is missing or not an object"},
        {"pre_tokenizer", "{\"type\": \"Metaspace\"}",
         "pre_tokenizer has type \"Metaspace\"; accepted: ByteLevel, Sequence"},
        {"pre_tokenizer", "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}",
         "pre_tokenizer ByteLevel has use_regex true; only false is supported"},
        {"pre_tokenizer/pretokenizers", "[]",
         "pre_tokenizer Sequence has 0 steps; accepted are two, Split and ByteLevel"},
        {"pre_tokenizer/pretokenizers/0/type", "\"Digits\"",
         "pre_tokenizer Split has type \"Digits\"; accepted: Split"},
        {"pre_tokenizer/pretokenizers/0/invert", "true",
         "pre_tokenizer Split has invert true; only false is supported"},
        {"pre_tokenizer/pretokenizers/0/behavior", "\"Removed\"",
         "pre_tokenizer Split has behavior \"Removed\"; accepted: Isolated"},
        {"pre_tokenizer/pretokenizers/0/pattern", "{\"String\": \" \"}",
         "pre_tokenizer Split has no pattern of the kind Regex; no other is supported"},
        {"pre_tokenizer/pretokenizers/1/add_prefix_space", "true",
         "pre_tokenizer ByteLevel has add_prefix_space true; only false is supported"},
        {"pre_tokenizer/pretokenizers/1/use_regex", NULL,
         "pre_tokenizer ByteLevel has use_regex true; only false is supported"},
        {"post_processor", "{\"type\": \"BertProcessing\"}",
         "post_processor has type \"BertProcessing\"; accepted: ByteLevel, TemplateProcessing"},
        {"post_processor",
         "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<x>\"}},"
         "{\"Sequence\": {\"id\": \"A\"}}]}",
         "post_processor adds tokens to a text; only one that does not is supported"},
        {"decoder", "{\"type\": \"WordPiece\"}", "decoder has type \"WordPiece\"; accepted: ByteLevel"},
        {"decoder", "null", "decoder is missing or not an object"},
        {"model", "null", "model is missing or not an object"},
        {"model/type", "\"Unigram\"", "model has type \"Unigram\"; accepted: BPE"},
        {"model/dropout", "0.1", "model has dropout set; only null is supported"},
        {"model/unk_token", "\"a\"", "model has unk_token set; only null is supported"},
        {"model/continuing_subword_prefix", "\"##\"",
         "model has continuing_subword_prefix \"##\"; accepted are null and \"\""},
        {"model/end_of_word_suffix", "\"</w>\"", "model has end_of_word_suffix \"</w>\"; accepted are null and \"\""},
        {"model/fuse_unk", "true", "model has fuse_unk true; only false is supported"},
        {"model/byte_fallback", "true", "model has byte_fallback true; only false is supported"},
        {"model/byte_fallback", "1", "model: byte_fallback must be true or false, not 1"},
        {"model/cache", "1", "model has a setting \"cache\" that is not supported"},
        {"model/vocab", "[]", "model needs an object \"vocab\" and an array \"merges\""},
        {"model/merges", NULL, "model needs an object \"vocab\" and an array \"merges\""},
        {"model/vocab/q", NULL, "the vocabulary has no token for the byte 0x71"},
        {"model/vocab/ab", "\"x\"", "model.vocab: the id of \"ab\" is not an integer"},
        {"model/vocab/ab", "-1", "token id -1; accepted are 0 to 2097151"},
        {"model/vocab/ab", "2097152", "token id 2097152; accepted are 0 to 2097151"},
        {"model/vocab/ab", "257", "two tokens have the id 257"},
        {"model/vocab/a b", "300", "model.vocab: \"a b\" has a character outside the byte-level alphabet"},
        {"model/vocab/\xE4\xB8\x80", "300",
         "model.vocab: \"\xE4\xB8\x80\" has a character outside the byte-level alphabet"},
        {"model/merges/1", "[\"b\"]", "model.merges: entry 1 is neither two strings nor one with a single space"},
        {"model/merges/1", "\"b  c\"", "model.merges: entry 1 is neither two strings nor one with a single space"},
        {"model/merges/1", "7", "model.merges: entry 1 is neither two strings nor one with a single space"},
        {"model/merges/1", "\"bb c\"", "model.merges: entry 1, \"bb\" and \"c\": the first is not in model.vocab"},
        {"model/merges/1", "\"b cc\"", "model.merges: entry 1, \"b\" and \"cc\": the second is not in model.vocab"},
        {"model/merges/1", "\"c b\"", "model.merges: entry 1, \"c\" and \"b\": their result is not in model.vocab"},
        {"added_tokens", "{}", "added_tokens is not an array"},
        {"added_tokens/0", "7", "added_tokens: entry 0 is not an object"},
        {"added_tokens/0/id", NULL, "token id -1; accepted are 0 to 2097151"},
        {"added_tokens/0/id", "5", "two tokens have the id 5"},
        {"added_tokens/0/content", NULL, "added token 259 has no content"},
        {"added_tokens/0/content", "\"\"", "token 259 has 0 bytes; accepted are 1 to 65536"},
        {"added_tokens/0/content", "\"<x>y\"", "added tokens 259 and 260 are the same text"},
        {"added_tokens/0/content", "\"abc\"", "added token 259 \"abc\" has the id 257 in model.vocab"},
        {"added_tokens/0/lstrip", "true", "added token 259 \"<x>\" has lstrip true; only false is supported"},
        {"added_tokens/0/rstrip", "true", "added token 259 \"<x>\" has rstrip true; only false is supported"},
        {"added_tokens/0/single_word", "true", "added token 259 \"<x>\" has single_word true; only false is supported"},
        {"added_tokens/0/normalized", "true", "added token 259 \"<x>\" has normalized true; only false is supported"},
        {"added_tokens/0/color", "1", "an added token has a setting \"color\" that is not supported"},
    };
    for (size_t i = 0; i < LEN(change); i++) {
        json_t *root = small_tokenizer();
        set(root, change[i].path, change[i].json);
        ql_error err = {0};
        ql_tokenizer *t = NULL;
        char want[300];
        snprintf(want, sizeof want, "file: %s", change[i].message);
        assert_int_equal(parse(root, NULL, &t, &err), QL_ERR_MODEL);
        assert_string_equal(err.text, want);
        assert_null(t);
        json_decref(root);
    }
}

static void refused_configurations(void **state) {
    (void)state;
    static const struct {
        const char *config, *message;
    } change[] = {
        {"{\"added_tokens_decoder\": []}", "file: added_tokens_decoder is not an object"},
        {"{\"added_tokens_decoder\": {\"x\": {}}}",
         "file: added_tokens_decoder: \"x\" is not an id from 0 to 2097151 with an object"},
        {"{\"added_tokens_decoder\": {\"99999999999999999999\": {}}}",
         "file: added_tokens_decoder: \"99999999999999999999\" is not an id from 0 to 2097151 with an object"},
        {"{\"added_tokens_decoder\": {\"264\": {\"content\": \"<z>\", \"rstrip\": true}}}",
         "file: added token 264 \"<z>\" has rstrip true; only false is supported"},
        {"{\"added_tokens_decoder\": {\"264\": {\"content\": \"<x>\"}}}",
         "file: added tokens 259 and 264 are the same text"},
        {"[]", "tokenizer_config.json: the top level must be a JSON object"},
    };
    for (size_t i = 0; i < LEN(change); i++) {
        json_t *root = small_tokenizer();
        ql_error err = {0};
        ql_tokenizer *t = NULL;
        assert_int_equal(parse(root, change[i].config, &t, &err), QL_ERR_MODEL);
        assert_string_equal(err.text, change[i].message);
        json_decref(root);
    }
}

/* Expressions that PCRE2 would read otherwise than the engine they were written for, or not at all. */
static void refused_patterns(void **state) {
    (void)state;
    static const struct {
        const char *regex, *message; /* a part of the message */
    } pattern[] = {
        {"\\d+", "at offset 0, near \"\\d+\": accepted escapes are"},
        {"a\\h", "at offset 1, near \"\\h\": accepted escapes are"},
        {"(a)\\1", "at offset 3, near \"\\1\": accepted escapes are"},
        {"\\p{Lu}", "accepted properties are {L}, {M} and {N}"},
        {"\\pL", "accepted properties are {L}, {M} and {N}"},
        {"[\\p{Han}]", "accepted properties are {L}, {M} and {N}"},
        {"[a[b]]", "classes inside classes and && are not supported"},
        {"[a&&b]", "classes inside classes and && are not supported"},
        {"[]a]", "a class may not begin with ]"},
        {"[ab", "the class has no end"},
        {"[ab\\", "accepted escapes are"},
        {"a\\", "accepted escapes are"},
        {"(?P<n>a)", "accepted groups are"},
        {"(?>a)", "accepted groups are"},
        {"a{2}+", "accepted counts are {n}, {n,} and {n,m}, without + behind"},
        {"a{,2}", "accepted counts are"},
        {"^a", "^ $ and . are not supported"},
        {"a$", "^ $ and . are not supported"},
        {"a.", "^ $ and . are not supported"},
        {"\xC3\xA9", "literals outside ASCII are not supported"},
        {"a*", "it matches empty text"},
        {"", "it matches empty text"},
        {"(a", "missing closing parenthesis"},
        {"*", "quantifier does not follow a repeatable item"},
    };
    for (size_t i = 0; i < LEN(pattern); i++) {
        json_t *root = small_tokenizer(),
               *steps = json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers");
        json_object_set_new(json_object_get(json_array_get(steps, 0), "pattern"), "Regex",
                            json_string(pattern[i].regex));
        ql_error err = {0};
        ql_tokenizer *t = NULL;
        assert_int_equal(parse(root, NULL, &t, &err), QL_ERR_MODEL);
        if (!strstr(err.text, pattern[i].message) || strncmp(err.text, "file: Split regex at offset ", 28) != 0) {
            fail_msg("%s: %s", pattern[i].regex, err.text);
        }
        json_decref(root);
    }
}

static void refused_paths(void **state) {
    (void)state;
    ql_error err = {0};
    ql_tokenizer *t = NULL;
    assert_int_equal(ql_tokenizer_open(&t, "tests/data/micro-mixed", &err), QL_ERR_MODEL);
    assert_string_equal(err.text, "cannot open tests/data/micro-mixed/tokenizer.json: No such file or directory");
    ql_error_clear(&err);
    assert_int_equal(ql_tokenizer_parse(&t, "{", 1, NULL, 0, "file", &err), QL_ERR_MODEL);
    assert_non_null(strstr(err.text, "file: not valid JSON"));
    assert_null(t);
    assert_int_equal(ql_tokenizer_parse(&t, "{", 1, NULL, 0, "file", NULL), QL_ERR_MODEL);
    assert_int_equal(ql_tokenizer_parse(&t, "{}", 2, NULL, 0, "file", NULL), QL_ERR_MODEL);
}

static void a_folder_or_a_file(void **state) {
    (void)state;
    ql_tokenizer *folder = open_tokenizer("models/tiny"), *file = open_tokenizer(TINY);
    assert_int_equal(ql_tokenizer_size(folder), 1322);
    assert_int_equal(ql_tokenizer_size(file), 1322);
    ql_tokenizer_close(&folder);
    ql_tokenizer_close(&file);
    ql_tokenizer_close(&file); /* closed already */
    ql_tokenizer_close(NULL);
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
    ql_tokenizer *t = open_tokenizer(TINY);
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
    ql_tokenizer *t = open_tokenizer(TINY);
    ql_error err = {0};
    int32_t n = 7, one = 7;
    int32_t *ids = &one;
    assert_int_equal(ql_tokenizer_encode(t, "", 0, &ids, &n, &err), QL_OK);
    assert_null(ids);
    assert_int_equal(n, 0);
    ids = encode(t, "a\0b", 3, &n);
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
    ql_tokenizer *t = open_tokenizer(TINY);
    for (size_t i = 0; i < LEN(run); i++) {
        size_t unit = strlen(run[i].unit), n = run[i].bytes / unit * unit;
        char *text = malloc(n + 2);
        assert_non_null(text);
        for (size_t k = 0; k < n; k++) {
            text[k] = run[i].unit[k % unit];
        }
        text[n] = 'x';
        int32_t n_ids;
        int32_t *ids = encode(t, text, n + 1, &n_ids);
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
    ql_tokenizer *t = open_tokenizer(DATA "qwen-tokenizer.json");
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
        cmocka_unit_test(merges_in_both_spellings),
        cmocka_unit_test(a_piece_in_the_vocabulary_is_no_shortcut),
        cmocka_unit_test(ignore_merges),
        cmocka_unit_test(a_merge_given_twice),
        cmocka_unit_test(byte_level_without_split),
        cmocka_unit_test(without_normalizer),
        cmocka_unit_test(gaps_between_matches_are_pieces),
        cmocka_unit_test(post_processors_that_add_nothing),
        cmocka_unit_test(added_tokens_leftmost_then_longest),
        cmocka_unit_test(added_tokens_split_before_normalization),
        cmocka_unit_test(special_or_not),
        cmocka_unit_test(added_tokens_of_the_configuration),
        cmocka_unit_test(added_token_that_the_vocabulary_has),
        cmocka_unit_test(refused_files),
        cmocka_unit_test(refused_configurations),
        cmocka_unit_test(refused_patterns),
        cmocka_unit_test(refused_paths),
        cmocka_unit_test(a_folder_or_a_file),
        cmocka_unit_test(text_that_is_not_utf8),
        cmocka_unit_test(empty_text_and_nul),
        cmocka_unit_test(long_runs),
        cmocka_unit_test(shared_by_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
