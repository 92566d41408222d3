/* The engine's log hook with its lock: lines from many threads reach the host program one at a time. */
#ifndef QL_RUNTIME_BASE_LOG_H
#define QL_RUNTIME_BASE_LOG_H

#include "runtime/base/thread.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_log {
    ql_log_fn fn; /* NULL: silent */
    void *user;
    ql_mutex mutex;
} ql_log;

ql_status ql_log_init(ql_log *log, ql_log_fn fn, void *user, ql_error *err);
void ql_log_deinit(ql_log *log);

/* log may be NULL. */
void ql_logf(ql_log *log, ql_log_level level, const char *fmt, ...) QL_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
#endif
