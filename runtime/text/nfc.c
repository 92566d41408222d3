/* utf8proc knows the characters; the walk over the text is ours, for two reasons. Nearly all text is in normal form
 * already and should cost a look, not a copy. And utf8proc_map orders combining marks by exchanging neighbours, which
 * takes quadratic time on a long run of them.
 *
 * The text falls into segments: a plain character, then everything up to the next plain one. A plain character keeps
 * its form when it stands alone and never changes because of what stands before it, so segments normalize
 * independently, and a segment of one plain character needs no work.
 *
 * utf8proc 2.8 knows the marks of Unicode 15. The normalizer of the reference implementation (the `tokenizers`
 * package, 0.23) knows those up to Unicode 9; a mark added since is to it a character that blocks reordering. The two
 * differ only on text that has such a mark out of canonical order or between a letter and a mark that composes. */
#include "runtime/text/nfc.h"

#include "runtime/text/utf8.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { MAX_DECOMPOSED = 4 }; /* code points of the longest canonical decomposition, U+1F82 among others */

void ql_nfc_deinit(ql_nfc *nfc) {
    free(nfc->cp);
    free(nfc->key);
    ql_buf_deinit(&nfc->out);
}

static bool is_plain(uint32_t cp) {
    if (cp < 0x300 || (cp >= 0x3400 && cp < 0xA000) || (cp >= 0xAC00 && cp < 0xD7A4)) {
        return true; /* Latin, ideographs, Hangul syllables */
    }
    if (cp >= 0x1160 && cp < 0x1200) {
        /* Hangul vowels and finals join the syllable before them. U+11A7 stands just before the finals and is none, but
         * utf8proc 2.8 joins it, to nothing: it vanishes. As the start of a segment it is safe. */
        return cp == 0x11A7;
    }
    /* Everything else that composes with what stands before it is a mark. */
    const utf8proc_property_t *property = utf8proc_get_property((int32_t)cp);
    if (property->combining_class || property->category == UTF8PROC_CATEGORY_MN ||
        property->category == UTF8PROC_CATEGORY_MC) {
        return false;
    }
    int32_t part[MAX_DECOMPOSED];
    int last = 0;
    return utf8proc_decompose_char((int32_t)cp, part, MAX_DECOMPOSED, UTF8PROC_DECOMPOSE, &last) == 1 &&
           part[0] == (int32_t)cp;
}

static ql_status room(ql_nfc *nfc, size_t n, ql_error *err) {
    if (n <= nfc->cap) {
        return QL_OK;
    }
    size_t cap = 64;
    while (cap < n) {
        cap *= 2;
    }
    int32_t *cp = ql_realloc(NULL, nfc->cp, cap * sizeof *cp);
    nfc->cp = cp ? cp : nfc->cp;
    uint64_t *key = ql_realloc(NULL, nfc->key, cap * sizeof *key);
    nfc->key = key ? key : nfc->key;
    if (!cp || !key) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot allocate host memory to normalize %zu code points", n);
    }
    nfc->cap = cap;
    return QL_OK;
}

static int by_key(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int combining_class(int32_t cp) { return utf8proc_get_property(cp)->combining_class; }

/* Canonical ordering: every run of combining marks sorted by class, equal classes kept in order. The key holds class,
 * position and code point in 8, 35 and 21 bits. */
static void order_marks(ql_nfc *nfc, size_t n) {
    for (size_t i = 0; i < n;) {
        size_t first = i;
        int class_before = 0;
        bool ordered = true;
        for (; i < n; i++) {
            int class_here = combining_class(nfc->cp[i]);
            if (class_here == 0) {
                break;
            }
            ordered = ordered && class_here >= class_before;
            class_before = class_here;
            nfc->key[i] = (uint64_t)class_here << 56 | (uint64_t)i << 21 | (uint32_t)nfc->cp[i];
        }
        if (!ordered) {
            qsort(nfc->key + first, i - first, sizeof *nfc->key, by_key);
            for (size_t k = first; k < i; k++) {
                nfc->cp[k] = (int32_t)(nfc->key[k] & 0x1FFFFF);
            }
        }
        i += i < n; /* the character of class 0 that ended the run */
    }
}

/* Decomposes, orders and composes text[0..n) into nfc->cp; *count is the code points that came out. */
static ql_status normalize_segment(ql_nfc *nfc, const char *text, size_t n, size_t *count, ql_error *err) {
    size_t len = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp = 0;
        i += (size_t)ql_utf8_step((const unsigned char *)text + i, n - i, &cp);
        QL_TRY(room(nfc, len + MAX_DECOMPOSED, err));
        int last = 0;
        len += (size_t)utf8proc_decompose_char((int32_t)cp, nfc->cp + len, MAX_DECOMPOSED, UTF8PROC_DECOMPOSE, &last);
    }
    order_marks(nfc, len);
    *count = (size_t)utf8proc_normalize_utf32(nfc->cp, (utf8proc_ssize_t)len, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    return QL_OK;
}

static bool is_same(const char *text, size_t n, const int32_t *want, size_t count) {
    size_t i = 0, k = 0;
    while (i < n && k < count) {
        uint32_t cp = 0;
        i += (size_t)ql_utf8_step((const unsigned char *)text + i, n - i, &cp);
        if (want[k++] != (int32_t)cp) {
            return false;
        }
    }
    return i == n && k == count;
}

ql_status ql_nfc_apply(ql_nfc *nfc, const char *text, size_t n, const char **out, size_t *out_n, ql_error *err) {
    ql_buf *buf = &nfc->out;
    ql_buf_deinit(buf);
    ql_buf_init(buf, NULL, SIZE_MAX / 2);
    size_t copied = 0; /* text before this is in `buf`, normalized; nothing is copied before the first change */
    size_t start = 0;  /* of the segment at hand */
    for (size_t i = 0; i < n;) {
        size_t ascii = ql_utf8_ascii_run(text, i, n);
        if (ascii) {
            i += ascii;
            start = i - 1;
            continue;
        }
        uint32_t cp = 0;
        size_t step = (size_t)ql_utf8_step((const unsigned char *)text + i, n - i, &cp);
        if (is_plain(cp)) {
            start = i;
            i += step;
            continue;
        }
        do {
            i += step;
            step = i < n ? (size_t)ql_utf8_step((const unsigned char *)text + i, n - i, &cp) : 0;
        } while (step && !is_plain(cp));
        size_t count;
        QL_TRY(normalize_segment(nfc, text + start, i - start, &count, err));
        if (is_same(text + start, i - start, nfc->cp, count)) {
            continue;
        }
        QL_TRY(ql_buf_add(buf, text + copied, start - copied, err));
        for (size_t k = 0; k < count; k++) {
            unsigned char bytes[4];
            QL_TRY(ql_buf_add(buf, bytes, (size_t)utf8proc_encode_char(nfc->cp[k], bytes), err));
        }
        copied = i;
    }
    if (copied == 0) {
        *out = text;
        *out_n = n;
        return QL_OK;
    }
    QL_TRY(ql_buf_add(buf, text + copied, n - copied, err));
    *out = buf->data;
    *out_n = buf->len;
    return QL_OK;
}
