/* Turning ids into text as they come: no character broken, none late, none lost. */
#include "runtime/text/text.h"
#include "tests/textdata.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))
#define FFFD "\xEF\xBF\xBD"

/* Ids of models/tiny. */
enum { END = 1315, THINK = 1320 };

static ql_tokenizer *tiny;
static int32_t byte_id[256]; /* ids of the tokens of one byte */

static int set_up(void **state) {
    (void)state;
    ql_error err = {0};
    if (ql_tokenizer_open(&tiny, "models/tiny/tokenizer.json", &err) != QL_OK) {
        print_error("%s\n", err.text);
        return -1;
    }
    int found = 0;
    for (int32_t id = 0; id < ql_tokenizer_size(tiny); id++) {
        const char *bytes;
        size_t n;
        if (ql_tokenizer_token(tiny, id, &bytes, &n, NULL) && n == 1) {
            byte_id[(unsigned char)bytes[0]] = id;
            found++;
        }
    }
    return found == 256 ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    ql_tokenizer_close(&tiny);
    return 0;
}

/* A stream under test: what came out so far, and what the last push gave. */
typedef struct stream {
    ql_detok detok;
    ql_buf out;
    size_t before;
} stream;

static void start(stream *s, bool skip_special) {
    ql_detok_init(&s->detok, tiny, skip_special);
    ql_buf_init(&s->out, NULL, 1 << 20);
    s->before = 0;
}

static const char *push(stream *s, int32_t id) {
    s->before = s->out.len;
    assert_int_equal(ql_detok_push(&s->detok, id, &s->out, NULL), QL_OK);
    assert_true(s->detok.n_held >= 0 && s->detok.n_held <= 3);
    const char *delta = s->out.data ? s->out.data + s->before : "";
    assert_int_equal(ql_utf8_invalid_at(delta, s->out.len - s->before), s->out.len - s->before);
    return delta;
}

static const char *flush(stream *s) {
    s->before = s->out.len;
    assert_int_equal(ql_detok_flush(&s->detok, &s->out, NULL), QL_OK);
    return s->out.data ? s->out.data + s->before : "";
}

static void finish_bytes(stream *s, const char *want, size_t n) {
    flush(s);
    assert_int_equal(s->out.len, n);
    assert_memory_equal(s->out.data ? s->out.data : "", want, n);
    ql_buf_deinit(&s->out);
}

static void finish(stream *s, const char *want) { finish_bytes(s, want, strlen(want)); }

/* A character comes out with its last byte, nothing before, and the stream goes on after it. */
static void split_characters(void **state) {
    (void)state;
    static const char text[] = "\xF0\x9F\x98\x80\xED\x95\x9C\xEA\xB5\xAD\xEC\x96\xB4\xC4\x8F.";
    static const char *const delta[] = {
        "", "",         "", "\xF0\x9F\x98\x80", "", "", "\xED\x95\x9C", "", "", "\xEA\xB5\xAD", "", "", "\xEC\x96\xB4",
        "", "\xC4\x8F", "."};
    stream s;
    start(&s, true);
    for (size_t i = 0; i < LEN(delta); i++) {
        assert_string_equal(push(&s, byte_id[(unsigned char)text[i]]), delta[i]);
    }
    finish(&s, text);
}

/* Every prefix of such a stream, cut by the length limit: what was complete, then one U+FFFD for the rest, once. */
static void truncated_tail_flushed_once(void **state) {
    (void)state;
    static const char text[] = "a\xC4\x8F\xED\x95\x9C\xF0\x9F\x98\x80";
    for (size_t n = 0; n < sizeof text; n++) {
        stream s;
        start(&s, true);
        for (size_t i = 0; i < n; i++) {
            push(&s, byte_id[(unsigned char)text[i]]);
        }
        bool whole = n == 0 || n == 1 || n == 3 || n == 6 || n == 10;
        assert_string_equal(flush(&s), whole ? "" : FFFD);
        assert_string_equal(flush(&s), "");
        ql_buf_deinit(&s.out);
    }
}

static void end_after_an_incomplete_character(void **state) {
    (void)state;
    stream s;
    start(&s, true); /* the end token is special and left out; the held bytes wait for the flush */
    push(&s, byte_id['x']);
    push(&s, byte_id[0xE4]);
    push(&s, byte_id[0xB8]);
    assert_string_equal(push(&s, END), "");
    assert_string_equal(flush(&s), FFFD);
    finish(&s, "x" FFFD);

    start(&s, false); /* shown, it shows at once that the character will not complete */
    push(&s, byte_id[0xE4]);
    push(&s, byte_id[0xB8]);
    assert_string_equal(push(&s, END), FFFD "<|im_end|>");
    finish(&s, FFFD "<|im_end|>");
}

/* A special token that is left out does not stand between the bytes of a character; one that is shown does, and so does
 * an added token that is not special. */
static void tokens_inside_a_character(void **state) {
    (void)state;
    stream s;
    start(&s, true);
    push(&s, byte_id[0xC4]);
    push(&s, END);
    assert_string_equal(push(&s, byte_id[0x8F]), "\xC4\x8F");
    finish(&s, "\xC4\x8F");

    start(&s, true);
    push(&s, byte_id[0xC4]);
    assert_string_equal(push(&s, THINK), FFFD "<think>");
    assert_string_equal(push(&s, byte_id[0x8F]), FFFD);
    finish(&s, FFFD "<think>" FFFD);
}

/* One U+FFFD for each maximal part that cannot be the beginning of a character (Unicode, section 3.9, table 3-8 and
 * others like it), as early as that is certain. */
static void invalid_parts(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *text;
    } part[] = {
        {"\x80", FFFD},
        {"\xFF\xFE", FFFD FFFD},
        {"\xC0\xAF", FFFD FFFD},
        {"\xE0\x80\xBF", FFFD FFFD FFFD},
        {"\xED\xA0\x80\xED\xB0\x80", FFFD FFFD FFFD FFFD FFFD FFFD},
        {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B"},
        {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", FFFD FFFD FFFD FFFD "A"},
        {"\xF0\x9F\x98\xF0\x9F\x98\x80", FFFD "\xF0\x9F\x98\x80"},
        {"\xE4\xB8\xE4\xB8\xAD\xC3", FFFD "\xE4\xB8\xAD" FFFD},
        {"\xC3\xC3\xA9", FFFD "\xC3\xA9"},
        {"\xF0\x9F\x41", FFFD "A"},
    };
    for (size_t i = 0; i < LEN(part); i++) {
        stream s;
        start(&s, true);
        for (const char *p = part[i].bytes; *p; p++) {
            push(&s, byte_id[(unsigned char)*p]);
        }
        finish(&s, part[i].text);
    }
    stream s;
    start(&s, true);
    push(&s, byte_id[0xE0]);
    assert_string_equal(push(&s, byte_id[0x80]), FFFD FFFD); /* certain at once: nothing is held */
    finish(&s, FFFD FFFD);
}

/* Deltas together are the whole decode, and equal the reference's. */
static void check_stream(void *user, const json_t *line) {
    (void)user;
    int32_t n;
    int32_t *ids = ql_test_ints(line, "ids", &n);
    assert_non_null(ids);
    for (int skip = 0; skip < 2; skip++) {
        stream s;
        start(&s, skip);
        for (int32_t i = 0; i < n; i++) {
            push(&s, ids[i]);
        }
        const json_t *want = json_object_get(line, skip ? "skipped" : "text");
        finish_bytes(&s, json_string_value(want), json_string_length(want));
    }
    free(ids);
}

static void deltas_are_the_whole(void **state) {
    (void)state;
    assert_true(ql_test_rows("tests/data/text/decode.jsonl", check_stream, NULL) >= 200);
}

static void unknown_id(void **state) {
    (void)state;
    stream s;
    start(&s, true);
    push(&s, byte_id[0xC4]);
    ql_error err = {0};
    assert_int_equal(ql_detok_push(&s.detok, 1322, &s.out, &err), QL_ERR_USAGE);
    assert_string_equal(err.text, "token id 1322 is not in the tokenizer; its ids go from 0 to 1321");
    assert_string_equal(push(&s, byte_id[0x8F]), "\xC4\x8F"); /* the stream is as it was */
    finish(&s, "\xC4\x8F");
}

static void full_buffer(void **state) {
    (void)state;
    ql_error err = {0};
    ql_detok detok;
    ql_buf small, large;
    ql_detok_init(&detok, tiny, false);
    ql_buf_init(&small, NULL, 4);
    ql_buf_init(&large, NULL, 100);
    assert_int_equal(ql_detok_push(&detok, byte_id[0xC4], &large, &err), QL_OK);
    assert_int_equal(ql_detok_push(&detok, THINK, &small, &err), QL_ERR_MEMORY);
    assert_int_equal(small.len, 0);
    assert_int_equal(ql_detok_push(&detok, THINK, &large, NULL), QL_OK);
    assert_string_equal(large.data, FFFD "<think>");
    ql_buf_deinit(&small);
    ql_buf_deinit(&large);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(split_characters),
        cmocka_unit_test(truncated_tail_flushed_once),
        cmocka_unit_test(end_after_an_incomplete_character),
        cmocka_unit_test(tokens_inside_a_character),
        cmocka_unit_test(invalid_parts),
        cmocka_unit_test(deltas_are_the_whole),
        cmocka_unit_test(unknown_id),
        cmocka_unit_test(full_buffer),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
