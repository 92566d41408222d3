/* Threads, locks and time, over pthreads. Waits take an absolute deadline on the monotonic clock. */
#ifndef QL_RUNTIME_BASE_THREAD_H
#define QL_RUNTIME_BASE_THREAD_H

#include "runtime/base/status.h"

#include <pthread.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef pthread_mutex_t ql_mutex;
typedef pthread_cond_t ql_cond; /* bound to the monotonic clock */
typedef pthread_t ql_thread;

ql_status ql_mutex_init(ql_mutex *mutex, ql_error *err);
void ql_mutex_deinit(ql_mutex *mutex);
void ql_lock(ql_mutex *mutex);
void ql_unlock(ql_mutex *mutex);

ql_status ql_cond_init(ql_cond *cond, ql_error *err);
void ql_cond_deinit(ql_cond *cond);
void ql_cond_wait(ql_cond *cond, ql_mutex *mutex);

/* Returns false when `deadline_ns` has passed; spurious wakes return true. */
bool ql_cond_wait_until(ql_cond *cond, ql_mutex *mutex, int64_t deadline_ns);
void ql_cond_signal(ql_cond *cond);
void ql_cond_broadcast(ql_cond *cond);

/* Starts a thread with all signals blocked, so that the host program's handlers never run on it. `name` is cut to the
 * 15 bytes that the system shows. */
ql_status ql_thread_start(ql_thread *thread, const char *name, void *(*run)(void *), void *arg, ql_error *err);
void ql_thread_join(ql_thread thread);

/* Returns false when the thread has not ended by the deadline; it is then detached and must not be joined. */
bool ql_thread_join_until(ql_thread thread, int64_t deadline_ns);

int32_t ql_cores(void); /* that the process may use */

int64_t ql_now_ns(void); /* monotonic */
static inline double ql_seconds_since(int64_t t0_ns) { return (double)(ql_now_ns() - t0_ns) * 1e-9; }
void ql_sleep_ms(int32_t ms);

#ifdef __cplusplus
}
#endif
#endif
