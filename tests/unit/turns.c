/* Turns on shared GPUs: one engine at a time on each, in the order in which they came. */
#include "runtime/engine/turns.h"

#include "runtime/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include <cmocka.h>

enum { THREADS = 4, ROUNDS = 500, LIMIT_S = 60 };

typedef struct engine {
    uint64_t gpus;
    ql_thread thread;
    bool came;           /* atomic */
    int32_t place, both; /* in the order of turns; turns in which another was on one of its GPUs */
} engine;

static int32_t on_gpu[64]; /* engines, atomic */
static int32_t n_turns;    /* atomic */

static void take_one_turn(engine *e) {
    ql_turns_take(e->gpus);
    bool alone = true;
    for (int32_t i = 0; i < 64; i++) {
        alone = !(e->gpus >> i & 1 && __atomic_fetch_add(&on_gpu[i], 1, __ATOMIC_RELAXED) != 0) && alone;
    }
    e->both += !alone;
    e->place = __atomic_fetch_add(&n_turns, 1, __ATOMIC_RELAXED);
    for (int32_t i = 0; i < 64; i++) {
        if (e->gpus >> i & 1) {
            __atomic_fetch_sub(&on_gpu[i], 1, __ATOMIC_RELAXED);
        }
    }
    ql_turns_end(e->gpus);
}

static void *many_turns(void *arg) {
    for (int32_t i = 0; i < ROUNDS; i++) {
        take_one_turn(arg);
    }
    return NULL;
}

static void *one_turn(void *arg) {
    engine *e = arg;
    __atomic_store_n(&e->came, true, __ATOMIC_RELEASE);
    take_one_turn(e);
    return NULL;
}

static void start(engine *e, void *(*run)(void *)) {
    ql_error err = {0};
    assert_int_equal(ql_thread_start(&e->thread, "turns", run, e, &err), QL_OK);
}

/* Pairs of GPUs in a ring: each engine shares one with either neighbour, and none may wait for ever. */
static void test_one_at_a_time(void **state) {
    (void)state;
    engine e[THREADS] = {{.gpus = 3}, {.gpus = 6}, {.gpus = 12}, {.gpus = 9}};
    n_turns = 0;
    for (int32_t i = 0; i < THREADS; i++) {
        start(&e[i], many_turns);
    }
    for (int32_t i = 0; i < THREADS; i++) {
        ql_thread_join(e[i].thread);
        assert_int_equal(e[i].both, 0);
    }
    assert_int_equal(n_turns, THREADS * ROUNDS);
}

static void test_first_come_first_served(void **state) {
    (void)state;
    engine e[THREADS] = {{.gpus = 1}, {.gpus = 1}, {.gpus = 1}, {.gpus = 1}};
    n_turns = 0;
    ql_turns_take(1);
    for (int32_t i = 0; i < THREADS; i++) {
        start(&e[i], one_turn);
        while (!__atomic_load_n(&e[i].came, __ATOMIC_ACQUIRE)) {
            ql_sleep_ms(1);
        }
        ql_sleep_ms(100); /* from there to its number */
    }
    assert_int_equal(__atomic_load_n(&n_turns, __ATOMIC_RELAXED), 0);
    ql_turns_end(1);
    for (int32_t i = 0; i < THREADS; i++) {
        ql_thread_join(e[i].thread);
        assert_int_equal(e[i].place, i);
    }
}

static void test_other_gpus_are_free(void **state) {
    (void)state;
    engine e = {.gpus = 2 | (uint64_t)1 << 63}, none = {.gpus = 0};
    ql_turns_take(1);
    start(&e, one_turn);
    ql_thread_join(e.thread);
    start(&none, one_turn);
    ql_thread_join(none.thread);
    ql_turns_end(1);
}

int main(void) {
    alarm(LIMIT_S); /* waits have no deadline */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_at_a_time),
        cmocka_unit_test(test_first_come_first_served),
        cmocka_unit_test(test_other_gpus_are_free),
    };
    return cmocka_run_group_tests_name("turns", tests, NULL, NULL);
}
