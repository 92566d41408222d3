/* The file's regular expression is obeyed as it stands, by PCRE2 with Unicode properties on and, where the machine
 * allows it, compiled to machine code.
 *
 * PCRE2's tables and those of the reference engine (Oniguruma as built into the `tokenizers` package, 0.23) are not of
 * one Unicode version: PCRE2 10.42 lacks letters, marks and digits that Unicode 15 and 16 added, other distributions
 * have other versions, and PCRE2 takes U+180E for white space. So that token ids do not depend on the library found on
 * a machine, such characters are matched through stand-ins: the expression sees a copy of the text in which each is
 * replaced by a character of the same length in bytes that all versions agree on. Offsets stay what they were. */
#include "runtime/text/pattern.h"

#include "runtime/text/utf8.h"

#include <string.h>

/* ---- stand-ins ------------------------------------------------------------------------------------------------- */

/* Found by asking both engines about every code point. Ranges may contain characters that PCRE2 10.42 knows too, never
 * one that the reference has in another category. */
static const struct {
    uint32_t first, last;
    char category; /* 'L', 'M', 'N': of the reference; 'C': not white space to it */
} differing[] = {
    {0x897, 0x897, 'M'},     {0xcf3, 0xcf3, 'M'},     {0xece, 0xece, 'M'},     {0x180e, 0x180e, 'C'},
    {0x1c89, 0x1c8a, 'L'},   {0xa7cb, 0xa7cd, 'L'},   {0xa7da, 0xa7dc, 'L'},   {0x105c0, 0x105f3, 'L'},
    {0x10d40, 0x10d49, 'N'}, {0x10d4a, 0x10d65, 'L'}, {0x10d69, 0x10d6d, 'M'}, {0x10d6f, 0x10d85, 'L'},
    {0x10ec2, 0x10ec4, 'L'}, {0x10efc, 0x10eff, 'M'}, {0x1123f, 0x11240, 'L'}, {0x11241, 0x11241, 'M'},
    {0x11380, 0x11389, 'L'}, {0x1138b, 0x1138b, 'L'}, {0x1138e, 0x1138e, 'L'}, {0x11390, 0x113b5, 'L'},
    {0x113b7, 0x113b7, 'L'}, {0x113b8, 0x113c0, 'M'}, {0x113c2, 0x113c2, 'M'}, {0x113c5, 0x113c5, 'M'},
    {0x113c7, 0x113ca, 'M'}, {0x113cc, 0x113d0, 'M'}, {0x113d1, 0x113d1, 'L'}, {0x113d2, 0x113d2, 'M'},
    {0x113d3, 0x113d3, 'L'}, {0x113e1, 0x113e2, 'M'}, {0x116d0, 0x116e3, 'N'}, {0x11bc0, 0x11be0, 'L'},
    {0x11bf0, 0x11bf9, 'N'}, {0x11f00, 0x11f01, 'M'}, {0x11f02, 0x11f02, 'L'}, {0x11f03, 0x11f03, 'M'},
    {0x11f04, 0x11f10, 'L'}, {0x11f12, 0x11f33, 'L'}, {0x11f34, 0x11f3a, 'M'}, {0x11f3e, 0x11f42, 'M'},
    {0x11f50, 0x11f59, 'N'}, {0x11f5a, 0x11f5a, 'M'}, {0x1342f, 0x1342f, 'L'}, {0x13440, 0x13440, 'M'},
    {0x13441, 0x13446, 'L'}, {0x13447, 0x13455, 'M'}, {0x13460, 0x143fa, 'L'}, {0x16100, 0x1611d, 'L'},
    {0x1611e, 0x1612f, 'M'}, {0x16130, 0x16139, 'N'}, {0x16d40, 0x16d6c, 'L'}, {0x16d70, 0x16d79, 'N'},
    {0x18cff, 0x18cff, 'L'}, {0x1b132, 0x1b132, 'L'}, {0x1b155, 0x1b155, 'L'}, {0x1ccf0, 0x1ccf9, 'N'},
    {0x1d2c0, 0x1d2d3, 'N'}, {0x1df25, 0x1df2a, 'L'}, {0x1e030, 0x1e06d, 'L'}, {0x1e08f, 0x1e08f, 'M'},
    {0x1e4d0, 0x1e4eb, 'L'}, {0x1e4ec, 0x1e4ef, 'M'}, {0x1e4f0, 0x1e4f9, 'N'}, {0x1e5d0, 0x1e5ed, 'L'},
    {0x1e5ee, 0x1e5ef, 'M'}, {0x1e5f0, 0x1e5f0, 'L'}, {0x1e5f1, 0x1e5fa, 'N'}, {0x2b739, 0x2b739, 'L'},
    {0x2ebf0, 0x2ee5d, 'L'}, {0x31350, 0x323af, 'L'},
};

enum { N_DIFFERING = sizeof differing / sizeof *differing };

/* The character to match instead of cp, in as many bytes; NULL for cp itself. */
static const char *stand_in(uint32_t cp) {
    if (cp < differing[0].first || (cp >= 0x3000 && cp < 0xA7CB) || (cp >= 0xAC00 && cp < 0x105C0)) {
        return NULL; /* most scripts: no need to search */
    }
    size_t low = 0, high = N_DIFFERING;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (cp > differing[mid].last) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    if (low == N_DIFFERING || cp < differing[low].first) {
        return NULL;
    }
    bool four = cp >= 0x10000;
    switch (differing[low].category) {
    case 'L': return four ? "\xF0\xA0\x80\x80" : "\xE4\xB8\x80"; /* U+20000, U+4E00 */
    case 'M': return four ? "\xF0\x9D\x85\xA5" : "\xE0\xA4\x80"; /* U+1D165, U+0900 */
    case 'N': return four ? "\xF0\x9D\x9F\x8E" : "\xE2\x85\xA0"; /* U+1D7CE, U+2160 */
    default: return "\xE2\x80\x8B";                              /* U+200B */
    }
}

/* ---- what an expression may hold --------------------------------------------------------------------------------- */

static ql_status refuse(const char *regex, size_t at, const char *why, ql_error *err) {
    return ql_fail(err, QL_ERR_MODEL, "Split regex at offset %zu, near \"%.12s\": %s", at, regex + at, why);
}

/* Checks the escape at regex[at]; *len is its length. */
static ql_status check_escape(const char *regex, size_t at, size_t *len, ql_error *err) {
    char c = regex[at + 1];
    *len = 2;
    if (c == 'p' || c == 'P') {
        const char *name = regex + at + 2;
        if (name[0] != '{' || !name[1] || !strchr("LMN", name[1]) || name[2] != '}') {
            return refuse(regex, at, "accepted properties are {L}, {M} and {N}", err);
        }
        *len = 5;
        return QL_OK;
    }
    if (c && strchr("rntfsS\\!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~", c)) {
        return QL_OK;
    }
    return refuse(regex, at, "accepted escapes are \\r \\n \\t \\f \\s \\S \\p \\P and punctuation", err);
}

/* Checks the class that begins at regex[at]; *len is its length. */
static ql_status check_class(const char *regex, size_t at, size_t *len, ql_error *err) {
    size_t i = at + 1;
    i += regex[i] == '^';
    if (regex[i] == ']') {
        return refuse(regex, at, "a class may not begin with ]", err);
    }
    while (regex[i] != ']') {
        size_t step = 1;
        if (!regex[i]) {
            return refuse(regex, at, "the class has no end", err);
        }
        if (regex[i] == '[' || (regex[i] == '&' && regex[i + 1] == '&')) {
            return refuse(regex, i, "classes inside classes and && are not supported", err);
        }
        if (regex[i] == '\\') {
            QL_TRY(check_escape(regex, i, &step, err));
        }
        i += step;
    }
    *len = i + 1 - at;
    return QL_OK;
}

static ql_status check_group(const char *regex, size_t at, size_t *len, ql_error *err) {
    static const char *const accepted[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!"};
    if (regex[at + 1] != '?') {
        *len = 1;
        return QL_OK;
    }
    for (size_t k = 0; k < sizeof accepted / sizeof *accepted; k++) {
        *len = strlen(accepted[k]);
        if (strncmp(regex + at, accepted[k], *len) == 0) {
            return QL_OK;
        }
    }
    return refuse(regex, at, "accepted groups are ( (?: (?i: (?= (?! (?<= (?<!", err);
}

/* A {n}, {n,} or {n,m} at regex[at]. A + behind it is possessive to PCRE2 and a second quantifier to Oniguruma. */
static ql_status check_count(const char *regex, size_t at, size_t *len, ql_error *err) {
    size_t first = strspn(regex + at + 1, "0123456789"), i = at + 1 + first;
    if (regex[i] == ',') {
        i += 1 + strspn(regex + i + 1, "0123456789");
    }
    if (first == 0 || regex[i] != '}' || regex[i + 1] == '+') {
        return refuse(regex, at, "accepted counts are {n}, {n,} and {n,m}, without + behind", err);
    }
    *len = i + 1 - at;
    return QL_OK;
}

static ql_status check(const char *regex, ql_error *err) {
    for (size_t i = 0, step; regex[i]; i += step) {
        step = 1;
        if ((unsigned char)regex[i] >= 0x80) {
            return refuse(regex, i, "literals outside ASCII are not supported", err);
        }
        switch (regex[i]) {
        case '\\': QL_TRY(check_escape(regex, i, &step, err)); break;
        case '[': QL_TRY(check_class(regex, i, &step, err)); break;
        case '(': QL_TRY(check_group(regex, i, &step, err)); break;
        case '{': QL_TRY(check_count(regex, i, &step, err)); break;
        case '^':
        case '$':
        case '.': return refuse(regex, i, "^ $ and . are not supported", err);
        default: break;
        }
    }
    return QL_OK;
}

ql_status ql_pattern_compile(ql_pattern *pattern, const char *regex, ql_error *err) {
    QL_TRY(check(regex, err));
    int code = 0;
    size_t at = 0;
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)regex, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    if (!compiled) {
        char text[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        return refuse(regex, at, text, err);
    }
    uint32_t empty = 0;
    pcre2_pattern_info(compiled, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty) {
        pcre2_code_free(compiled);
        return refuse(regex, 0, "it matches empty text", err);
    }
    /* Fails where PCRE2 has no compiler for the processor or memory may not be made executable; matching then
     * interprets, about four times slower. */
    pattern->jit = pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE) == 0;
    pattern->code = compiled;
    return QL_OK;
}

void ql_pattern_free(ql_pattern *pattern) {
    pcre2_code_free(pattern->code);
    pattern->code = NULL;
}

/* ---- matching ---------------------------------------------------------------------------------------------------- */

/* Makes split->subject: the text itself, or a copy with stand-ins. */
static ql_status make_subject(ql_split *split, const char *text, size_t n, ql_error *err) {
    split->subject = text;
    for (size_t i = 0; i < n;) {
        i += ql_utf8_ascii_run(text, i, n);
        if (i == n) {
            break;
        }
        uint32_t cp = 0;
        int step = ql_utf8_step((const unsigned char *)text + i, n - i, &cp);
        const char *other = stand_in(cp);
        if (other) {
            if (split->subject == text) {
                ql_buf_drop(&split->view, split->view.len);
                QL_TRY(ql_buf_add(&split->view, text, n, err));
                split->subject = split->view.data;
            }
            memcpy(split->view.data + i, other, (size_t)step);
        }
        i += (size_t)step;
    }
    return QL_OK;
}

ql_status ql_split_start(ql_split *split, const ql_pattern *pattern, const char *text, size_t n, ql_error *err) {
    if (!split->match) {
        ql_buf_init(&split->view, NULL, SIZE_MAX / 2);
        split->match = pcre2_match_data_create(1, NULL);
        split->limits = pcre2_match_context_create(NULL);
        if (!split->match || !split->limits) {
            return ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory to match the Split regex");
        }
    }
    /* The library's own limit of ten million steps is meant to end matching that has run away. Giving back a run of
     * white space, character by character, is no such thing. */
    uint32_t steps = n < UINT32_MAX / 16 ? (uint32_t)n * 8 + 10000000 : UINT32_MAX;
    pcre2_set_match_limit(split->limits, steps);
    QL_TRY(make_subject(split, text, n, err));
    split->pattern = pattern;
    split->n = n;
    split->at = 0;
    split->match_end = 0;
    return QL_OK;
}

ql_status ql_split_next(ql_split *split, size_t *start, size_t *len, ql_error *err) {
    *start = split->at;
    if (split->match_end) {
        split->at = split->match_end;
        split->match_end = 0;
        *len = split->at - *start;
        return QL_OK;
    }
    if (split->at == split->n) {
        *len = 0;
        return QL_OK;
    }
    const pcre2_code *code = split->pattern->code;
    PCRE2_SPTR subject = (PCRE2_SPTR)split->subject;
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (split->pattern->jit) {
        rc = pcre2_jit_match(code, subject, split->n, split->at, PCRE2_NO_UTF_CHECK, split->match, split->limits);
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) { /* the interpreter keeps its state on the heap */
        uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT;
        rc = pcre2_match(code, subject, split->n, split->at, options, split->match, split->limits);
    }
    if (rc == PCRE2_ERROR_NOMATCH) {
        split->at = split->n;
        *len = split->at - *start;
        return QL_OK;
    }
    if (rc < 0) {
        char text[128];
        pcre2_get_error_message(rc, (PCRE2_UCHAR *)text, sizeof text);
        return ql_fail(err, rc == PCRE2_ERROR_NOMEMORY ? QL_ERR_MEMORY : QL_ERR_MODEL,
                       "the tokenizer's Split regex failed at offset %zu of a text of %zu bytes: %s", split->at,
                       split->n, text);
    }
    const size_t *span = pcre2_get_ovector_pointer(split->match);
    if (span[0] > split->at) { /* a gap first, the match in the next call */
        split->at = span[0];
        split->match_end = span[1];
    } else {
        split->at = span[1];
    }
    *len = split->at - *start;
    return QL_OK;
}

void ql_split_deinit(ql_split *split) {
    pcre2_match_data_free(split->match);
    pcre2_match_context_free(split->limits);
    if (split->match) {
        ql_buf_deinit(&split->view);
    }
    split->match = NULL;
    split->limits = NULL;
}
