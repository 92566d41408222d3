#include "runtime/base/status.h"

#include <stdio.h>
#include <string.h>

/* Names of tensors, files and options end up in messages: keep a message one printable line whatever they hold. */
static void one_line(char *text) {
    for (char *p = text; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) {
            *p = '?';
        }
    }
}

ql_status ql_fail(ql_error *err, ql_status status, const char *fmt, ...) {
    if (err && err->status == QL_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
        one_line(err->text);
        err->status = status;
    }
    return status;
}

ql_status ql_fail_in(ql_error *err, const char *what) {
    if (!err) {
        return QL_ERR_INTERNAL;
    }
    char text[sizeof err->text];
    size_t n = (size_t)snprintf(text, sizeof text, "%s: ", what);
    if (n < sizeof text) {
        snprintf(text + n, sizeof text - n, "%s", err->text);
    }
    memcpy(err->text, text, sizeof text);
    one_line(err->text);
    return err->status;
}

void ql_error_clear(ql_error *err) {
    if (err) {
        err->status = QL_OK;
        err->text[0] = 0;
    }
}

const char *ql_status_text(ql_status status) {
    switch (status) {
    case QL_OK: return "ok";
    case QL_ERR_USAGE: return "usage";
    case QL_ERR_MODEL: return "bad model";
    case QL_ERR_DEVICE: return "device failure";
    case QL_ERR_MEMORY: return "out of memory";
    case QL_ERR_STATE: return "wrong state";
    case QL_ERR_INTERNAL: return "internal error";
    }
    return "unknown status";
}
