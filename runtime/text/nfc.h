/* Unicode normalization form C of a span of text. */
#ifndef QL_RUNTIME_TEXT_NFC_H
#define QL_RUNTIME_TEXT_NFC_H

#include "runtime/base/buf.h"

/* Memory that calls reuse; zeroed at first. One thread at a time. */
typedef struct ql_nfc {
    int32_t *cp;   /* decomposed code points of a segment */
    uint64_t *key; /* the same with what they are sorted by */
    size_t cap;    /* elements of both */
    ql_buf out;
} ql_nfc;

void ql_nfc_deinit(ql_nfc *nfc);

/* Points *out at the normal form of text[0..n), valid UTF-8: at `text` itself where it is in that form already, else at
 * memory of `nfc`, valid until the next call. Takes O(n log n). */
ql_status ql_nfc_apply(ql_nfc *nfc, const char *text, size_t n, const char **out, size_t *out_n, ql_error *err);

#endif
