/* Stop strings in streamed text: the same cut wherever the text is cut into pushes, and nothing held longer than it may
 * still begin a stop string. */
#include "runtime/text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

enum { MAX = 3 };

static const struct {
    const char *text, *stop[MAX];
    const char *want; /* what comes out */
    bool hit;
} cases[] = {
    {"hello world", {"o w"}, "hell", true},
    {"hello world", {"worlds"}, "hello world", false},
    {"hello", {"hello"}, "", true},
    {"hello", {"hello there"}, "hello", false}, /* longer than the output */
    {"", {"x"}, "", false},
    {"aaab", {"aab"}, "a", true}, /* begins inside a beginning of itself */
    {"abababac", {"ababac"}, "ab", true},
    {"aabaabaaab", {"aabaaab"}, "aab", true},
    {"xabcabdy", {"abcabc", "abd"}, "xabc", true}, /* beginnings overlap */
    {"the end.\n\nUser: hi", {"\n\nUser:", "\n\nSystem:"}, "the end.", true},
    {"abcd", {"abcd", "bc"}, "a", true}, /* the one that ends first */
    {"abcx", {"abcd", "bc"}, "a", true},
    {"xabc", {"bc", "abc"}, "x", true}, /* of two that end together the one that begins first */
    {"xabc", {"abc", "bc"}, "x", true},
    {"abc", {"ab", "abc"}, "", true}, /* of two that begin together the shorter */
    {"one two three", {"three", "two"}, "one ", true},
    {"\xE4\xB8\xAD\xE6\x96\x87\xE3\x80\x82", {"\xE6\x96\x87"}, "\xE4\xB8\xAD", true},
    {"\xE4\xB8\xAD\xE4\xB8\xAE", {"\xE4\xB8\xAE"}, "\xE4\xB8\xAD", true}, /* shares bytes with what stands before */
    {"\xF0\x9F\x98\x80\xF0\x9F\x98\x81", {"\xF0\x9F\x98\x81!"}, "\xF0\x9F\x98\x80\xF0\x9F\x98\x81", false},
    {"no stops at all", {NULL}, "no stops at all", false},
};

static int32_t count(const char *const stop[MAX]) {
    int32_t n = 0;
    while (n < MAX && stop[n]) {
        n++;
    }
    return n;
}

/* Whether a character begins at text[i]: pushes are whole characters. */
static bool at_boundary(const char *text, size_t i) { return (text[i] & 0xC0) != 0x80; }

/* Pushes text in parts that end at the offsets in `cut`, flushes, and compares. */
static void check_cuts(size_t k, const size_t *cut, size_t n_cut) {
    ql_stop stop;
    ql_buf out;
    const char *text = cases[k].text;
    assert_int_equal(ql_stop_init(&stop, NULL, cases[k].stop, count(cases[k].stop), NULL), QL_OK);
    ql_buf_init(&out, NULL, 1000);
    size_t from = 0;
    for (size_t i = 0; i <= n_cut; i++) {
        size_t to = i < n_cut ? cut[i] : strlen(text);
        assert_int_equal(ql_stop_push(&stop, text + from, to - from, &out, NULL), QL_OK);
        assert_int_equal(ql_utf8_invalid_at(out.data, out.len), out.len);
        from = to;
    }
    assert_int_equal(stop.hit, cases[k].hit);
    assert_int_equal(ql_stop_flush(&stop, &out, NULL), QL_OK);
    assert_string_equal(out.data ? out.data : "", cases[k].want);
    assert_int_equal(ql_stop_flush(&stop, &out, NULL), QL_OK);
    assert_int_equal(out.len, strlen(cases[k].want));
    ql_stop_deinit(&stop);
    ql_buf_deinit(&out);
}

static void in_one_push(void **state) {
    (void)state;
    for (size_t k = 0; k < LEN(cases); k++) {
        check_cuts(k, NULL, 0);
    }
}

static void across_pushes_at_every_pair_of_splits(void **state) {
    (void)state;
    for (size_t k = 0; k < LEN(cases); k++) {
        const char *text = cases[k].text;
        for (size_t a = 0; a <= strlen(text); a++) {
            for (size_t b = a; b <= strlen(text); b++) {
                if (at_boundary(text, a) && at_boundary(text, b)) {
                    check_cuts(k, (const size_t[]){a, b}, 2);
                }
            }
        }
    }
}

static void a_character_at_a_time(void **state) {
    (void)state;
    for (size_t k = 0; k < LEN(cases); k++) {
        size_t cut[64], n = 0;
        for (size_t i = 1; i < strlen(cases[k].text); i++) {
            if (at_boundary(cases[k].text, i)) {
                cut[n++] = i;
            }
        }
        check_cuts(k, cut, n);
    }
}

/* What is pushed, and what must come out with it: all that can no longer be part of a stop string. */
static void holds_back_no_more_than_it_must(void **state) {
    (void)state;
    static const char *const stops[] = {"abcabd", "<end>"};
    static const char *const step[][2] = {{"x", "x"},   {"a", ""},     {"bca", ""},     {"b", ""},
                                          {"c", "abc"}, {"z", "abcz"}, {"<en", ""},     {"<", "<en"},
                                          {"e", ""},    {"n", ""},     {"d!", "<end!"}, {"<", ""}};
    ql_stop stop;
    ql_buf out;
    assert_int_equal(ql_stop_init(&stop, NULL, stops, 2, NULL), QL_OK);
    ql_buf_init(&out, NULL, 1000);
    for (size_t i = 0; i < LEN(step); i++) {
        size_t before = out.len;
        assert_int_equal(ql_stop_push(&stop, step[i][0], strlen(step[i][0]), &out, NULL), QL_OK);
        assert_string_equal(out.data + before, step[i][1]);
    }
    assert_int_equal(ql_stop_flush(&stop, &out, NULL), QL_OK);
    assert_string_equal(out.data, "xabcabcz<en<end!<");
    assert_false(stop.hit);
    ql_stop_deinit(&stop);
    ql_buf_deinit(&out);
}

static void nothing_after_a_hit(void **state) {
    (void)state;
    static const char *const stops[] = {"END"};
    ql_stop stop;
    ql_buf out;
    assert_int_equal(ql_stop_init(&stop, NULL, stops, 1, NULL), QL_OK);
    ql_buf_init(&out, NULL, 1000);
    assert_int_equal(ql_stop_push(&stop, "textENDmore E", 13, &out, NULL), QL_OK);
    assert_true(stop.hit);
    assert_int_equal(ql_stop_push(&stop, "further", 7, &out, NULL), QL_OK);
    assert_int_equal(ql_stop_flush(&stop, &out, NULL), QL_OK);
    assert_string_equal(out.data, "text");
    ql_stop_deinit(&stop);
    ql_buf_deinit(&out);
}

static void strings_are_copied(void **state) {
    (void)state;
    char text[] = "stop";
    const char *list[] = {text};
    ql_stop stop;
    ql_buf out;
    assert_int_equal(ql_stop_init(&stop, NULL, list, 1, NULL), QL_OK);
    memset(text, 'x', 4);
    ql_buf_init(&out, NULL, 1000);
    assert_int_equal(ql_stop_push(&stop, "a stop", 6, &out, NULL), QL_OK);
    assert_true(stop.hit);
    assert_string_equal(out.data, "a ");
    ql_stop_deinit(&stop);
    ql_buf_deinit(&out);
}

static void refused_strings(void **state) {
    (void)state;
    char longest[1026];
    memset(longest, 'a', sizeof longest);
    longest[1025] = 0;
    const char *many[17];
    for (size_t i = 0; i < LEN(many); i++) {
        many[i] = "x";
    }
    const char *const too_long[] = {"ok", longest}, *const empty[] = {""}, *const invalid[] = {"a\xE4\xB8"};
    const struct {
        const char *const *text;
        int32_t n;
        const char *message;
    } refused[] = {
        {many, 17, "17 stop strings given; accepted are 0 to 16"},
        {many, -1, "-1 stop strings given; accepted are 0 to 16"},
        {too_long, 2, "stop string 1 has 1025 bytes; accepted are 1 to 1024"},
        {empty, 1, "stop string 0 has 0 bytes; accepted are 1 to 1024"},
        {invalid, 1, "stop string 0 is not UTF-8: byte 0xE4 at offset 1"},
    };
    for (size_t i = 0; i < LEN(refused); i++) {
        ql_stop stop;
        ql_error err = {0};
        assert_int_equal(ql_stop_init(&stop, NULL, refused[i].text, refused[i].n, &err), QL_ERR_USAGE);
        assert_string_equal(err.text, refused[i].message);
    }
    longest[1024] = 0;
    ql_stop stop;
    assert_int_equal(ql_stop_init(&stop, NULL, too_long, 2, NULL), QL_OK);
    ql_stop_deinit(&stop);
    assert_int_equal(ql_stop_init(&stop, NULL, many, 16, NULL), QL_OK);
    ql_stop_deinit(&stop);
}

/* An allocator that fails at the n-th call from now. */
typedef struct failing {
    int left, live;
} failing;

static void *failing_malloc(void *user, size_t bytes) {
    failing *f = user;
    if (f->left-- == 0) {
        return NULL;
    }
    f->live++;
    return malloc(bytes);
}

static void *failing_realloc(void *user, void *old, size_t bytes) {
    failing *f = user;
    if (f->left-- == 0) {
        return NULL;
    }
    f->live += !old;
    return realloc(old, bytes);
}

static void failing_free(void *user, void *ptr) {
    ((failing *)user)->live -= ptr != NULL;
    free(ptr);
}

static void memory_that_ends(void **state) {
    (void)state;
    static const char *const stops[] = {"END", "STOP"};
    for (int at = 0;; at++) {
        failing f = {.left = at};
        const ql_allocator mem = {failing_malloc, failing_realloc, failing_free, &f};
        ql_stop stop;
        ql_error err = {0};
        ql_buf out;
        ql_buf_init(&out, NULL, 1000);
        ql_status status = ql_stop_init(&stop, &mem, stops, 2, &err);
        if (status == QL_OK) {
            status = ql_stop_push(&stop, "some STO", 8, &out, &err);
            ql_stop_deinit(&stop);
        }
        ql_buf_deinit(&out);
        assert_int_equal(f.live, 0);
        if (status == QL_OK) {
            assert_true(at > 4); /* five allocations in all */
            break;
        }
        assert_int_equal(status, QL_ERR_MEMORY);
        assert_int_equal(err.status, QL_ERR_MEMORY);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_one_push),           cmocka_unit_test(across_pushes_at_every_pair_of_splits),
        cmocka_unit_test(a_character_at_a_time), cmocka_unit_test(holds_back_no_more_than_it_must),
        cmocka_unit_test(nothing_after_a_hit),   cmocka_unit_test(strings_are_copied),
        cmocka_unit_test(refused_strings),       cmocka_unit_test(memory_that_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
