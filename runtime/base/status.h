/* Errors: one message, written where the fault was seen, carried up untouched.
 *
 * Fallible functions return ql_status and take a `ql_error *err` last. The function that sees the fault calls
 * ql_fail, which keeps the first error if one is there already; callers forward with QL_TRY or unwind with
 * QL_TRY_GOTO. `err` may be NULL everywhere.
 */
#ifndef QL_RUNTIME_BASE_STATUS_H
#define QL_RUNTIME_BASE_STATUS_H

#include "runtime/qlane.h"

#include <stdarg.h>

#if defined(__GNUC__)
#define QL_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define QL_PRINTF(fmt, args)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the message unless err already holds one; control characters in it become '?'. Returns `status`. */
ql_status ql_fail(ql_error *err, ql_status status, const char *fmt, ...) QL_PRINTF(3, 4);

/* Puts "what: " before err's text. For a caller that knows the name of what failed. Returns err's status. */
ql_status ql_fail_in(ql_error *err, const char *what);

void ql_error_clear(ql_error *err);

#define QL_TRY(call)                                                                                                   \
    do {                                                                                                               \
        ql_status ql_try_ = (call);                                                                                    \
        if (ql_try_ != QL_OK) {                                                                                        \
            return ql_try_;                                                                                            \
        }                                                                                                              \
    } while (0)

/* Assigns the failure to the function's local `status` and jumps. */
#define QL_TRY_GOTO(call, label)                                                                                       \
    do {                                                                                                               \
        status = (call);                                                                                               \
        if (status != QL_OK) {                                                                                         \
            goto label;                                                                                                \
        }                                                                                                              \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
