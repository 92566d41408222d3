/* Lanes without devices. Whether lanes and who waits for them look for a while or sleep at once: every lane runs each
 * command once and in order, the first error comes back and ends the group, and close is prompt. */
#include "runtime/lane/lane.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* A lane looks for 200 us. Bounds of time are far above what a busy machine can keep a thread from running. */
enum { LANES = 3, COMMANDS = 2000, LOOK_US = 200, WAIT_MS = 300, PROMPT_MS = 4000, LONG_MS = 40000, LIMIT_S = 120 };

static struct { /* of the next command: written by the caller, read by the lane */
    int32_t us;
    bool held, fails; /* held until the gate is open */
} how[LANES];

static struct { /* written by the lane; the sum depends on every command and on their order */
    uint32_t sum;
    int32_t n_fini, n_let_go;
} did[LANES];

static uint32_t number[2]; /* the argument of a command is one of them */
static bool gate;          /* atomic */
static ql_lane_group lanes;

static ql_status work(ql_lane *lane, uint32_t factor, uint32_t term) {
    int32_t i = lane->index;
    for (int64_t end = ql_now_ns() + how[i].us * 1000; ql_now_ns() < end;) {
        usleep(i > 0 ? (useconds_t)how[i].us : 0); /* lane 0 keeps its core */
    }
    while (how[i].held && !__atomic_load_n(&gate, __ATOMIC_ACQUIRE)) {
        ql_sleep_ms(1);
    }
    if (how[i].fails) {
        return ql_fail(&lane->err, QL_ERR_DEVICE, "lane %d fails", i);
    }
    did[i].sum = did[i].sum * factor + term;
    return QL_OK;
}

static ql_status three(ql_lane *lane, void *arg) { return work(lane, 3, *(uint32_t *)arg); }
static ql_status five(ql_lane *lane, void *arg) { return work(lane, 5, *(uint32_t *)arg); }

static void fini(ql_lane *lane) { did[lane->index].n_fini++; }

static void let_go(ql_comm *comm) {
    did[comm->lane].n_let_go++;
    __atomic_store_n(&gate, true, __ATOMIC_RELEASE);
}

static void open_lanes(bool looks, int32_t wait_ms, bool may_let_go) {
    memset(how, 0, sizeof how);
    memset(did, 0, sizeof did);
    __atomic_store_n(&gate, false, __ATOMIC_RELAXED);
    assert_int_equal(ql_lanes_open(&lanes, LANES, wait_ms, fini, NULL, NULL, NULL, NULL), QL_OK);
    lanes.looks = looks;
    for (int32_t i = 0; i < LANES; i++) {
        lanes.lane[i].comm = (ql_comm){.lane = i, .let_go = may_let_go ? let_go : NULL};
    }
}

static void close_lanes(void) {
    int64_t begin_ns = ql_now_ns();
    assert_true(ql_lanes_close(&lanes));
    assert_true(ql_seconds_since(begin_ns) * 1000 < PROMPT_MS);
    for (int32_t i = 0; i < LANES; i++) {
        assert_int_equal(did[i].n_fini, 1);
    }
}

static void assert_sums(uint32_t want) {
    for (int32_t i = 0; i < LANES; i++) {
        assert_int_equal(did[i].sum, want);
    }
}

/* n commands of `us` each. Returns the sum. */
static uint32_t run_same(int32_t n, int32_t us) {
    uint32_t want = 0;
    how[0].us = how[1].us = how[2].us = us;
    for (int32_t k = 0; k < n; k++) {
        number[0] = (uint32_t)k + 1;
        want = want * 3 + number[0];
        assert_int_equal(ql_lanes_run(&lanes, three, &number[0], NULL), QL_OK);
        assert_sums(want);
    }
    return want;
}

/* The next command ends in this error; so does the one behind it, which runs nowhere. Returns the first one's time. */
static double run_to_error(const char *text) {
    ql_error err = {0}, again = {0};
    number[0] = 0;
    int64_t begin_ns = ql_now_ns();
    assert_int_equal(ql_lanes_run(&lanes, three, &number[0], &err), QL_ERR_DEVICE);
    double ms = ql_seconds_since(begin_ns) * 1000;
    assert_true(ms < PROMPT_MS);
    assert_string_equal(err.text, text);
    assert_int_equal(ql_lanes_run(&lanes, three, &number[0], &again), QL_ERR_DEVICE);
    assert_string_equal(again.text, text);
    return ms;
}

static uint32_t draw(uint64_t *rng, uint32_t n) {
    *rng = *rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*rng >> 33) % n;
}

static void test_once_and_in_order(void **state) {
    (void)state;
    for (int32_t looks = 0; looks < 2; looks++) {
        open_lanes(looks, LONG_MS, false);
        uint64_t rng = 1;
        uint32_t want = 0, factor = 3;
        for (int32_t k = 0; k < COMMANDS; k++) {
            if (draw(&rng, 8) == 0) { /* kept for some commands: who waits looks if the last did the same */
                factor = draw(&rng, 4) ? 3 : 5;
                for (int32_t i = 0; i < LANES; i++) {
                    how[i].us = draw(&rng, 6) ? 0 : (int32_t)draw(&rng, 2 * LOOK_US);
                }
            }
            if (draw(&rng, 16) == 0) { /* lanes look, are about to sleep, or sleep */
                usleep(draw(&rng, 2 * LOOK_US));
            }
            number[k % 2] = draw(&rng, 1 << 30);
            want = want * factor + number[k % 2];
            assert_int_equal(ql_lanes_run(&lanes, factor == 3 ? three : five, &number[k % 2], NULL), QL_OK);
            assert_sums(want);
        }
        close_lanes();
        assert_sums(want);
    }
}

static void test_error(void **state) {
    (void)state;
    for (int32_t k = 0; k < 4; k++) {
        bool looks = k & 1, last = k & 2; /* lane 1 fails as the last, or the others come back only afterwards */
        open_lanes(looks, LONG_MS, last);
        uint32_t want = run_same(4, 1000);
        how[0].us = how[2].us = 0;
        how[0].held = how[2].held = !last;
        how[1].fails = true;
        run_to_error("lane 1 fails");
        __atomic_store_n(&gate, true, __ATOMIC_RELEASE);
        close_lanes();
        for (int32_t i = 0; i < LANES; i++) {
            assert_int_equal(did[i].sum, i == 1 ? want : want * 3);
            assert_int_equal(did[i].n_let_go, last && i == 1);
        }
    }
}

static void test_hung(void **state) {
    (void)state;
    for (int32_t looks = 0; looks < 2; looks++) {
        open_lanes(looks, WAIT_MS, true);
        uint32_t want = run_same(4, 1000);
        how[1].held = true;
        assert_true(run_to_error("lane 1 made no progress for 300 ms (deadline of a wait)") >= WAIT_MS);
        close_lanes();
        assert_sums(want * 3);
        assert_int_equal(did[0].n_let_go + 2 * did[1].n_let_go + did[2].n_let_go, 2);
    }
}

static void test_close(void **state) {
    (void)state;
    for (int32_t k = 0; k < 100; k++) { /* unused, in a look, about to sleep, asleep */
        open_lanes(k & 1, LONG_MS, false);
        run_same(k % 3, 0);
        usleep(k % 4 < 2 ? 0 : 4 * (useconds_t)k);
        close_lanes();
    }
    open_lanes(true, LONG_MS, false);
    run_same(2, 0);
    clock_t begin = clock(); /* time of cores */
    ql_sleep_ms(100);
    assert_true(clock() - begin < CLOCKS_PER_SEC / 20); /* a look ends without a command too */
    close_lanes();
}

int main(void) {
    alarm(LIMIT_S);                /* who is never woken waits without end */
    prctl(PR_SET_TIMERSLACK, 1ul); /* who waits wakes in time to look for the end of commands as short as these */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_once_and_in_order),
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_hung),
        cmocka_unit_test(test_close),
    };
    return cmocka_run_group_tests_name("lanes", tests, NULL, NULL);
}
