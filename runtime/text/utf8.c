#include "runtime/text/utf8.h"

#include "runtime/text/text.h"

#include <string.h>

size_t ql_utf8_ascii_run(const char *text, size_t from, size_t n) {
    size_t i = from;
    while (n - i >= 8) {
        uint64_t eight;
        memcpy(&eight, text + i, 8);
        if (eight & 0x8080808080808080u) {
            break;
        }
        i += 8;
    }
    while (i < n && (unsigned char)text[i] < 0x80) {
        i++;
    }
    return i - from;
}

size_t ql_utf8_invalid_at(const char *text, size_t n) {
    const unsigned char *p = (const unsigned char *)text;
    size_t i = 0;
    while (i < n) {
        i += ql_utf8_ascii_run(text, i, n);
        if (i == n) {
            break;
        }
        uint32_t cp;
        int step = ql_utf8_step(p + i, n - i, &cp);
        if (step <= 0) {
            return i;
        }
        i += (size_t)step;
    }
    return n;
}
