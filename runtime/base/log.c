#include "runtime/base/log.h"

#include <stdio.h>

ql_status ql_log_init(ql_log *log, ql_log_fn fn, void *user, ql_error *err) {
    log->fn = fn;
    log->user = user;
    return ql_mutex_init(&log->mutex, err);
}

void ql_log_deinit(ql_log *log) { ql_mutex_deinit(&log->mutex); }

void ql_logf(ql_log *log, ql_log_level level, const char *fmt, ...) {
    if (!log || !log->fn) {
        return;
    }
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    ql_lock(&log->mutex);
    log->fn(log->user, level, line);
    ql_unlock(&log->mutex);
}
