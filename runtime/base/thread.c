#include "runtime/base/thread.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static struct timespec to_timespec(int64_t ns) {
    return (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
}

int32_t ql_cores(void) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

int64_t ql_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void ql_sleep_ms(int32_t ms) {
    struct timespec t = to_timespec((int64_t)ms * 1000000);
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

ql_status ql_mutex_init(ql_mutex *mutex, ql_error *err) {
    int e = pthread_mutex_init(mutex, NULL);
    return e ? ql_fail(err, QL_ERR_MEMORY, "cannot create a mutex: %s", strerror(e)) : QL_OK;
}

void ql_mutex_deinit(ql_mutex *mutex) { pthread_mutex_destroy(mutex); }
void ql_lock(ql_mutex *mutex) { pthread_mutex_lock(mutex); }
void ql_unlock(ql_mutex *mutex) { pthread_mutex_unlock(mutex); }

ql_status ql_cond_init(ql_cond *cond, ql_error *err) {
    pthread_condattr_t attr;
    int e = pthread_condattr_init(&attr);
    if (!e) {
        e = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        e = e ? e : pthread_cond_init(cond, &attr);
        pthread_condattr_destroy(&attr);
    }
    return e ? ql_fail(err, QL_ERR_MEMORY, "cannot create a condition variable: %s", strerror(e)) : QL_OK;
}

void ql_cond_deinit(ql_cond *cond) { pthread_cond_destroy(cond); }
void ql_cond_wait(ql_cond *cond, ql_mutex *mutex) { pthread_cond_wait(cond, mutex); }

bool ql_cond_wait_until(ql_cond *cond, ql_mutex *mutex, int64_t deadline_ns) {
    struct timespec t = to_timespec(deadline_ns);
    return pthread_cond_timedwait(cond, mutex, &t) != ETIMEDOUT;
}

void ql_cond_signal(ql_cond *cond) { pthread_cond_signal(cond); }
void ql_cond_broadcast(ql_cond *cond) { pthread_cond_broadcast(cond); }

ql_status ql_thread_start(ql_thread *thread, const char *name, void *(*run)(void *), void *arg, ql_error *err) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int e = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot start thread %s: %s", name, strerror(e));
    }
    char cut[16];
    snprintf(cut, sizeof cut, "%s", name);
    pthread_setname_np(*thread, cut);
    return QL_OK;
}

void ql_thread_join(ql_thread thread) { pthread_join(thread, NULL); }

bool ql_thread_join_until(ql_thread thread, int64_t deadline_ns) {
    /* Polled: ThreadSanitizer does not know the joins that take a deadline. */
    while (pthread_tryjoin_np(thread, NULL) != 0) {
        if (ql_now_ns() >= deadline_ns) {
            pthread_detach(thread);
            return false;
        }
        ql_sleep_ms(1);
    }
    return true;
}
