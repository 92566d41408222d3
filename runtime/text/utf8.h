/* UTF-8, one character at a time. */
#ifndef QL_RUNTIME_TEXT_UTF8_H
#define QL_RUNTIME_TEXT_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* What one maximal invalid part of the input becomes in output: U+FFFD. */
#define QL_UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* Reads the character at p; n >= 1 bytes are there. Returns
 *    k > 0  a character of k bytes; *cp is its code point
 *    0      all n bytes begin a character that is cut off by the end
 *    -k     the first k bytes are a maximal invalid part (Unicode's term: a "maximal subpart"); what follows them may
 *           begin a character */
static inline int ql_utf8_step(const unsigned char *p, size_t n, uint32_t *cp) {
    unsigned char lead = p[0];
    if (lead < 0x80) {
        *cp = lead;
        return 1;
    }
    if (lead < 0xC2 || lead > 0xF4) { /* a continuation byte, or a lead of overlong or too large forms only */
        return -1;
    }
    int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    /* The second byte decides overlong forms, surrogates and values above U+10FFFF. */
    unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    uint32_t v = lead & (0x3Fu >> more);
    for (int i = 1; i <= more; i++) {
        if ((size_t)i == n) {
            return 0;
        }
        if (p[i] < low || p[i] > high) {
            return -i;
        }
        v = v << 6 | (p[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *cp = v;
    return more + 1;
}

/* The length of the run of ASCII that begins at text + from. */
size_t ql_utf8_ascii_run(const char *text, size_t from, size_t n);

#endif
