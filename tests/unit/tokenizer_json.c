/* What a tokenizer.json says, on a small one with one thing changed: merges, added tokens, steps before and after, and the files that
 * must be refused. */
#include "runtime/base/json.h"
#include "tests/unit/token.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
        tk_put_char(key, (b > 32 && b < 127) || (b > 160 && b != 173) ? b : next++);
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
    tk_expect(t, text, strlen(text), want, n);
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
    ql_tokenizer *folder = tk_open("models/tiny"), *file = tk_open(TINY);
    assert_int_equal(ql_tokenizer_size(folder), 1322);
    assert_int_equal(ql_tokenizer_size(file), 1322);
    ql_tokenizer_close(&folder);
    ql_tokenizer_close(&file);
    ql_tokenizer_close(&file); /* closed already */
    ql_tokenizer_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
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
    };
    return cmocka_run_group_tests_name("tokenizer_json", tests, NULL, NULL);
}
