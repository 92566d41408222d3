/* A few threads that take jobs in the order they were posted: they read and compare files while an engine opens.
 *
 * A job is part of whatever its poster keeps for it; the pool allocates nothing for it. Several threads may post.
 */
#ifndef QL_RUNTIME_BASE_POOL_H
#define QL_RUNTIME_BASE_POOL_H

#include "runtime/base/mem.h"
#include "runtime/base/thread.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_pool ql_pool;

typedef struct ql_job {
    void (*run)(struct ql_job *job); /* on any thread of the pool */
    struct ql_job *next;             /* the pool's */
    bool pending;                    /* the pool's; zero before the first post */
} ql_job;

/* Threads worth starting for n lanes: the cores that the process may use, less one a lane, at most 8 a lane. */
int32_t ql_pool_size(int32_t n_lane);

ql_status ql_pool_open(ql_pool **pool, int32_t n_thread, const ql_allocator *mem, ql_error *err);

/* 0 for NULL. */
int32_t ql_pool_threads(const ql_pool *pool);

/* Queues the job; its memory stays until ql_pool_wait has returned. Where `pool` is NULL it runs here and now. */
void ql_pool_post(ql_pool *pool, ql_job *job);

/* Returns once the job is done; at once when it was never posted. */
void ql_pool_wait(ql_pool *pool, const ql_job *job);

/* Joins the threads, once what is queued is done. Accepts NULL inside, sets it. */
void ql_pool_close(ql_pool **pool);

#ifdef __cplusplus
}
#endif
#endif
