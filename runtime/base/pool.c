#include "runtime/base/pool.h"

#include <fenv.h>

enum { MAX_THREADS = 64, MOST_A_LANE = 8 };

struct ql_pool {
    const ql_allocator *mem;
    ql_thread thread[MAX_THREADS];
    int32_t n_thread;
    ql_mutex mutex; /* guards the fields below and the jobs' pending */
    ql_cond posted, finished;
    ql_job *first, **end;
    int32_t n_waiting;
    bool closing;
};

int32_t ql_pool_size(int32_t n_lane) {
    int32_t n = ql_cores() - n_lane, most = n_lane < MAX_THREADS / MOST_A_LANE ? n_lane * MOST_A_LANE : MAX_THREADS;
    return n < 1 ? 1 : n < most ? n : most;
}

static void *pool_main(void *arg) {
    ql_pool *p = arg;
    fesetenv(FE_DFL_ENV); /* as on lanes: what a job computes must not depend on who opened the engine */
    ql_lock(&p->mutex);
    for (;;) {
        while (!p->first && !p->closing) {
            ql_cond_wait(&p->posted, &p->mutex);
        }
        ql_job *job = p->first;
        if (!job) {
            break;
        }
        p->first = job->next;
        p->end = p->first ? p->end : &p->first;
        ql_unlock(&p->mutex);
        job->run(job);
        ql_lock(&p->mutex);
        job->pending = false;
        if (p->n_waiting) {
            ql_cond_broadcast(&p->finished);
        }
    }
    ql_unlock(&p->mutex);
    return NULL;
}

ql_status ql_pool_open(ql_pool **pool, int32_t n_thread, const ql_allocator *mem, ql_error *err) {
    ql_pool *p = NULL;
    ql_status status;
    QL_TRY(ql_alloc(mem, 1, sizeof *p, "the threads that read files", (void **)&p, err));
    p->mem = mem;
    p->end = &p->first;
    QL_TRY_GOTO(ql_mutex_init(&p->mutex, err), fail_mutex);
    QL_TRY_GOTO(ql_cond_init(&p->posted, err), fail_posted);
    QL_TRY_GOTO(ql_cond_init(&p->finished, err), fail_finished);
    *pool = p;
    for (; p->n_thread < n_thread && p->n_thread < MAX_THREADS; p->n_thread++) {
        status = ql_thread_start(&p->thread[p->n_thread], "qlane-load", pool_main, p, err);
        if (status != QL_OK) {
            ql_pool_close(pool);
            return status;
        }
    }
    return QL_OK;

fail_finished:
    ql_cond_deinit(&p->posted);
fail_posted:
    ql_mutex_deinit(&p->mutex);
fail_mutex:
    ql_free(mem, p);
    return status;
}

int32_t ql_pool_threads(const ql_pool *p) { return p ? p->n_thread : 0; }

void ql_pool_post(ql_pool *p, ql_job *job) {
    if (!p) {
        job->run(job);
        return;
    }
    ql_lock(&p->mutex);
    job->next = NULL;
    job->pending = true;
    *p->end = job;
    p->end = &job->next;
    ql_cond_signal(&p->posted);
    ql_unlock(&p->mutex);
}

void ql_pool_wait(ql_pool *p, const ql_job *job) {
    if (!p) {
        return;
    }
    ql_lock(&p->mutex);
    p->n_waiting++;
    while (job->pending) {
        ql_cond_wait(&p->finished, &p->mutex);
    }
    p->n_waiting--;
    ql_unlock(&p->mutex);
}

void ql_pool_close(ql_pool **pool) {
    ql_pool *p = *pool;
    *pool = NULL;
    if (!p) {
        return;
    }
    ql_lock(&p->mutex);
    p->closing = true;
    ql_cond_broadcast(&p->posted);
    ql_unlock(&p->mutex);
    for (int32_t i = 0; i < p->n_thread; i++) {
        ql_thread_join(p->thread[i]);
    }
    ql_cond_deinit(&p->finished);
    ql_cond_deinit(&p->posted);
    ql_mutex_deinit(&p->mutex);
    ql_free(p->mem, p);
}
