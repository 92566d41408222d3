/* Threads that take jobs: every job runs once, before its wait returns; without threads at once. */
#include "runtime/base/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { N = 500 };

typedef struct counted {
    ql_job job; /* first */
    int32_t calls, index;
    int32_t *order; /* of starts, atomic */
} counted;

static void count(ql_job *job) {
    counted *c = (counted *)job;
    c->index = __atomic_fetch_add(c->order, 1, __ATOMIC_RELAXED);
    c->calls++;
}

static void test_every_job_once(void **state) {
    (void)state;
    for (int32_t n_thread = 0; n_thread <= 8; n_thread += 4) {
        static counted job[N];
        ql_pool *pool = NULL;
        ql_error err = {0};
        int32_t order = 0;
        if (n_thread) {
            assert_int_equal(ql_pool_open(&pool, n_thread, NULL, &err), QL_OK);
        }
        assert_int_equal(ql_pool_threads(pool), n_thread);
        for (int32_t round = 1; round <= 3; round++) { /* a job may be posted again once it is done */
            for (int32_t i = 0; i < N; i++) {
                job[i] = (counted){.job.run = count, .calls = job[i].calls * (round > 1), .order = &order};
                ql_pool_post(pool, &job[i].job);
            }
            for (int32_t i = 0; i < N; i++) {
                ql_pool_wait(pool, &job[i].job);
                assert_int_equal(job[i].calls, round);
            }
        }
        assert_int_equal(order, 3 * N);
        for (int32_t i = 0; i < N && n_thread == 0; i++) {
            assert_int_equal(job[i].index, 2 * N + i);
        }
        ql_pool_close(&pool);
        assert_null(pool);
    }
}

static void test_close_finishes_what_is_queued(void **state) {
    (void)state;
    static counted job[N];
    ql_pool *pool = NULL;
    ql_error err = {0};
    int32_t order = 0;
    assert_int_equal(ql_pool_open(&pool, 2, NULL, &err), QL_OK);
    for (int32_t i = 0; i < N; i++) {
        job[i] = (counted){.job.run = count, .order = &order};
        ql_pool_post(pool, &job[i].job);
    }
    ql_pool_close(&pool);
    assert_int_equal(order, N);
}

static void test_size(void **state) {
    (void)state;
    assert_in_range(ql_pool_size(1), 1, 8);
    assert_in_range(ql_pool_size(8), 1, 64);
    assert_int_equal(ql_pool_size(100000), 1); /* more lanes than cores */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_job_once),
        cmocka_unit_test(test_close_finishes_what_is_queued),
        cmocka_unit_test(test_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
