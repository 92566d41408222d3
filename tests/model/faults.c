/* One lane made to fail: by an allocation, by an error of one of its ops or collectives, by hanging. Every caller must
 * get that error in time, close must return, and an engine opened afterwards must work.
 *
 * Worker threads only record what they saw; the main thread judges it.
 */
#include "tests/model/bits.h"
#include "tests/model/plant.h"

/* The deadline must be far above what a busy machine can keep a thread from running. */
enum { N_CALLER = 8, WAIT_MS = QL_TEST_SLOWER == 1 ? 500 : 4000, LONG_WAIT_MS = 4000 };
#define LIMIT_S 2.0

static uint32_t crc_fresh(const ql_options *options) {
    ql_options o = *options;
    o.allocator = NULL;
    ql_engine *engine = ql_test_open(&o);
    uint32_t crc = ql_test_crc(engine);
    ql_engine_close(&engine);
    return crc;
}

/* ---- a fault while eight threads wait ------------------------------------------------------------------------------
 */

typedef struct caller {
    ql_engine *engine;
    int32_t number;
    ql_status submit_status, wait_status, result_status;
    bool has_result;
    ql_finish finish;
    int32_t n_ids;
    ql_error submit_err, wait_err, result_err;
    int64_t end_ns;
    /* written by the callback */
    int32_t n_end, n_after_end; /* atomic */
    ql_error end_err;           /* before n_end */
} caller;

static int32_t n_submitted, n_tokens; /* atomic */

static void on_event(void *user, const ql_event *event) {
    caller *c = user;
    if (__atomic_load_n(&c->n_end, __ATOMIC_RELAXED)) {
        __atomic_fetch_add(&c->n_after_end, 1, __ATOMIC_RELAXED);
    }
    if (event->kind == QL_EVENT_TOKEN) {
        __atomic_fetch_add(&n_tokens, 1, __ATOMIC_RELAXED);
    } else if (event->kind == QL_EVENT_END) {
        if (event->error) {
            c->end_err = *event->error;
        }
        __atomic_fetch_add(&c->n_end, 1, __ATOMIC_RELEASE);
    }
}

static void *call(void *arg) {
    caller *c = arg;
    int32_t ids[40];
    ql_test_ids((uint64_t)c->number, 500, ids, 40);
    ql_request r = ql_test_request(ids, 1 + 5 * c->number, 400);
    r.ignore_eos = 1;
    ql_request_id id = 0;
    c->submit_status = ql_submit(c->engine, &r, on_event, c, &id, &c->submit_err);
    __atomic_fetch_add(&n_submitted, 1, __ATOMIC_RELEASE);
    if (c->submit_status == QL_OK) {
        ql_result *res = NULL;
        c->wait_status = ql_wait(c->engine, id, &res, &c->wait_err);
        c->end_ns = ql_now_ns();
        if (res) {
            c->has_result = true;
            c->result_status = res->status;
            c->result_err = res->error;
            c->finish = res->finish;
            c->n_ids = res->n_ids;
        }
        ql_result_free(res);
    }
    return NULL;
}

typedef struct trial {
    const char *model;
    int32_t lanes;
    ql_site at;
    int32_t lane;
    int32_t hang_ms; /* 0: an error. Else the lane hangs, and this is the deadline */
    bool leave;      /* it comes back only after close */
} trial;

/* Arms the fault while 8 callers are served, 4 at a time, and judges what they saw. */
static void fail_under_load(trial t) {
    const char *model = t.model;
    int32_t lanes = t.lanes, lane = t.lane;
    ql_site at = t.at;
    bool hang = t.hang_ms > 0;
    char what[120];
    snprintf(what, sizeof what, "%s %d lanes, %s in %s of lane %d", model, lanes, hang ? "hang" : "error",
             ql_site_names[at], lane);
    ql_options o = ql_test_options(ql_test_model_named(model), lanes);
    o.max_seqs = 4;
    o.wait_ms = t.hang_ms ? t.hang_ms : o.wait_ms;
    uint32_t want = crc_fresh(&o);
    ql_planted *f = ql_plant(at, lane, hang, 3);
    o.allocator = &f->heap.mem;
    __atomic_store_n(&n_submitted, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&n_tokens, 0, __ATOMIC_RELAXED);
    ql_engine *engine = NULL;
    ql_error err = {0};
    if (ql_plant_open(&engine, &o, f, &err) != QL_OK) {
        fail_msg("%s: open: %s", what, err.text);
    }
    caller callers[N_CALLER];
    pthread_t threads[N_CALLER];
    memset(callers, 0, sizeof callers);
    for (int32_t i = 0; i < N_CALLER; i++) {
        callers[i].engine = engine;
        callers[i].number = i;
        assert_int_equal(pthread_create(&threads[i], NULL, call, &callers[i]), 0);
    }
    while (__atomic_load_n(&n_submitted, __ATOMIC_ACQUIRE) < N_CALLER ||
           __atomic_load_n(&n_tokens, __ATOMIC_RELAXED) < 8) {
        ql_sleep_ms(1);
    }
    ql_plant_arm(f);
    for (int32_t i = 0; i < N_CALLER; i++) {
        pthread_join(threads[i], NULL);
    }
    int64_t fired = ql_plant_fired(f);
    if (!fired) {
        fail_msg("%s: never reached", what);
    }

    double limit = LIMIT_S + t.hang_ms * 1e-3;
    char injected[64];
    snprintf(injected, sizeof injected, "lane %d", lane);
    double slowest = 0;
    for (int32_t i = 0; i < N_CALLER; i++) {
        caller *c = &callers[i];
        if (c->submit_status != QL_OK || c->wait_status != QL_ERR_DEVICE || !c->has_result ||
            c->result_status != QL_ERR_DEVICE || c->finish != QL_FINISH_NONE) {
            fail_msg("%s: caller %d: submit %d (%s) wait %d (%s) result %d finish %d", what, i, (int)c->submit_status,
                     c->submit_err.text, (int)c->wait_status, c->wait_err.text, (int)c->result_status, (int)c->finish);
        }
        assert_string_equal(c->wait_err.text, c->result_err.text);
        assert_string_equal(c->wait_err.text, callers[0].wait_err.text); /* all get the first */
        ql_test_assert_has(c->wait_err.text, injected);
        if (!hang) {
            ql_test_assert_has(c->wait_err.text, "injected fault");
        }
        assert_int_equal(__atomic_load_n(&c->n_end, __ATOMIC_ACQUIRE), 1);
        assert_int_equal(__atomic_load_n(&c->n_after_end, __ATOMIC_ACQUIRE), 0);
        assert_string_equal(c->end_err.text, c->wait_err.text);
        double took = (double)(c->end_ns - fired) * 1e-9;
        slowest = took > slowest ? took : slowest;
    }
    if (slowest > limit) {
        fail_msg("%s: a caller got its error after %.2f s", what, slowest);
    }

    /* the engine refuses work and says why */
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 2);
    ql_result *res = NULL;
    assert_int_equal(ql_generate(engine, &r, &res, &err), QL_ERR_STATE);
    ql_test_assert_has(err.text, callers[0].wait_err.text);
    ql_result_free(res);
    ql_stats stats = ql_test_stats(engine);
    assert_int_equal(stats.n_lanes, lanes);

    if (hang && !t.leave) {
        ql_plant_release(f);
    }
    int64_t t0 = ql_now_ns();
    ql_engine_close(&engine);
    assert_null(engine);
    double close_s = ql_seconds_since(t0);
    if (close_s > LIMIT_S + t.hang_ms * 1e-3) {
        fail_msg("%s: close took %.2f s", what, close_s);
    }
    assert_int_equal(__atomic_load_n(&f->left_behind, __ATOMIC_RELAXED) > 0, t.leave);
    assert_true(t.leave || f->heap.live_blocks == 0);
    assert_int_equal(crc_fresh(&o), want); /* also while the old lane still hangs */
    if (t.leave) {
        ql_plant_release_wait(f);
    }
    printf("  %-48s error after %.3f s, closed in %.3f s\n", what, slowest, close_s);
    fflush(stdout);
}

static void error_in_an_op(void **state) {
    (void)state;
    static const ql_site sites[] = {QL_AT_LINEAR, QL_AT_GDN,  QL_AT_ATTENTION, QL_AT_TOPK,  QL_AT_SAMPLE,
                                    QL_AT_H2D,    QL_AT_SYNC, QL_AT_REDUCE,    QL_AT_GATHER};
    for (size_t i = 0; i < sizeof sites / sizeof *sites; i++) {
        fail_under_load((trial){"micro-mixed", 2, sites[i], (int32_t)(i % 2), 0, false});
    }
    fail_under_load((trial){"micro-mixed", 1, QL_AT_LINEAR, 0, 0, false});
    fail_under_load((trial){"micro-bf16", 4, QL_AT_LINEAR, 2, 0, false});
    fail_under_load((trial){"micro-bf16", 4, QL_AT_REDUCE, 3, 0, false});
}

static void hang_in_an_op(void **state) {
    (void)state;
    static const ql_site sites[] = {QL_AT_LINEAR, QL_AT_ATTENTION, QL_AT_TOPK, QL_AT_SYNC, QL_AT_REDUCE, QL_AT_GATHER};
    for (size_t i = 0; i < sizeof sites / sizeof *sites; i++) {
        fail_under_load((trial){"micro-mixed", 2, sites[i], (int32_t)(i % 2), WAIT_MS, false});
    }
    fail_under_load((trial){"micro-mixed", 1, QL_AT_LINEAR, 0, WAIT_MS, false});
    fail_under_load((trial){"micro-bf16", 4, QL_AT_GDN, 1, WAIT_MS, false});
}

/* Longer than the two seconds of grace: a deadline that only starts at the next look would be seen here. */
static void long_deadlines_are_kept(void **state) {
    (void)state;
    fail_under_load((trial){"micro-mixed", 1, QL_AT_ATTENTION, 0, LONG_WAIT_MS, false});
    fail_under_load((trial){"micro-mixed", 2, QL_AT_ATTENTION, 1, LONG_WAIT_MS, false});
}

static void hung_lane_is_left_behind(void **state) {
    (void)state;
    fail_under_load((trial){"micro-mixed", 2, QL_AT_LINEAR, 1, WAIT_MS, true});
    fail_under_load((trial){"micro-mixed", 1, QL_AT_GDN, 0, WAIT_MS, true});
}

/* ---- while opening ---------------------------------------------------------------------------------------------- */

static void fail_in_open(int32_t lanes, ql_site at, bool hang, int32_t lane, int64_t after) {
    ql_options o = ql_test_options(ql_test_model_named("micro-mixed"), lanes);
    o.wait_ms = hang ? WAIT_MS : o.wait_ms;
    ql_planted *f = ql_plant(at, lane, hang, after);
    ql_plant_arm(f);
    o.allocator = &f->heap.mem;
    ql_engine *engine = NULL;
    ql_error err = {0};
    ql_status status = ql_plant_open(&engine, &o, f, &err);
    double took = ql_seconds_since(ql_plant_fired(f));
    assert_true(ql_plant_fired(f) != 0);
    assert_int_equal(status, QL_ERR_DEVICE);
    assert_int_equal(err.status, QL_ERR_DEVICE);
    assert_null(engine);
    char text[32];
    snprintf(text, sizeof text, "lane %d", lane);
    ql_test_assert_has(err.text, text);
    if (!hang) {
        ql_test_assert_has(err.text, "injected fault");
        assert_int_equal(f->heap.live_blocks, 0);
    }
    if (took > LIMIT_S + (hang ? 2 * WAIT_MS * 1e-3 : 0)) {
        fail_msg("%s in %s of lane %d: open took %.2f s", hang ? "hang" : "error", ql_site_names[at], lane, took);
    }
    if (hang) {
        ql_plant_release_wait(f);
    }
}

static void error_while_opening(void **state) {
    (void)state;
    for (int32_t lane = 0; lane < 2; lane++) {
        fail_in_open(2, QL_AT_ALLOC, false, lane, 0);
        fail_in_open(2, QL_AT_ALLOC, false, lane, 3);
        fail_in_open(2, QL_AT_WEIGHT_LOAD, false, lane, 0);
        fail_in_open(2, QL_AT_WEIGHT_LOAD, false, lane, 11);
    }
    fail_in_open(1, QL_AT_WEIGHT_LOAD, false, 0, 5);
}

static void hang_while_opening(void **state) {
    (void)state;
    fail_in_open(2, QL_AT_WEIGHT_LOAD, true, 1, 2);
    fail_in_open(1, QL_AT_ALLOC, true, 0, 1);
}

/* The k-th allocation of an open fails, for every k (or, past the first 120, about 60 more of them). */
static void allocation_while_opening(void **state) {
    const ql_test_model *model = *state;
    static ql_test_heap heap;
    ql_test_heap_init(&heap);
    ql_options o = ql_test_options(model, 2);
    o.ctx = 128;
    o.max_seqs = 2;
    uint32_t want = crc_fresh(&o);
    o.allocator = &heap.mem;
    ql_engine *engine = ql_test_open(&o);
    int64_t n = heap.calls;
    ql_engine_close(&engine);
    assert_int_equal(heap.live_blocks, 0);
    assert_int_equal(heap.live_bytes, 0);
    int64_t stride = n > 180 ? (n - 120) / 60 + 1 : 1, tried = 0;
    for (int64_t k = 0; k < n; k += k < 120 ? 1 : stride) {
        ql_test_heap_init(&heap);
        heap.fail_at = k;
        ql_error err = {0};
        ql_status status = ql_engine_open(&engine, &o, &err);
        if (status == QL_OK && heap.failed == 0) { /* threads share the count: another order may need fewer calls */
            ql_engine_close(&engine);
            continue;
        }
        if (status != QL_ERR_MEMORY || engine) {
            fail_msg("%s: allocation %d of %d refused: %s: %s", model->name, (int)k, (int)n, ql_status_text(status),
                     err.text);
        }
        assert_true(err.text[0] != 0);
        if (heap.live_blocks != 0) {
            fail_msg("%s: allocation %d of %d refused: %d blocks leaked", model->name, (int)k, (int)n,
                     (int)heap.live_blocks);
        }
        tried++;
    }
    printf("  %-20s %d of %d allocations refused in turn\n", model->name, (int)tried, (int)n);
    fflush(stdout);
    assert_true(tried > 20);
    assert_int_equal(crc_fresh(&o), want);
}

/* ---- malloc while serving -------------------------------------------------------------------------------------------- */

/* Requests and results outlive the caller's allocator and come from malloc, so malloc itself is made to fail. The
 * sanitizers bring their own. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OWN_MALLOC 1
static int64_t n_malloc, malloc_fails_at = -1, n_malloc_failed; /* atomic */

static bool malloc_refused(void) {
    int64_t call = __atomic_fetch_add(&n_malloc, 1, __ATOMIC_RELAXED);
    if (call != __atomic_load_n(&malloc_fails_at, __ATOMIC_RELAXED)) {
        return false;
    }
    __atomic_fetch_add(&n_malloc_failed, 1, __ATOMIC_RELAXED);
    return true;
}

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
void *malloc(size_t bytes) { return malloc_refused() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t n, size_t bytes) { return malloc_refused() ? NULL : __libc_calloc(n, bytes); }
void *realloc(void *old, size_t bytes) { return malloc_refused() ? NULL : __libc_realloc(old, bytes); }

/* The k-th allocation of a request fails, for every k: the request fails with the right error and nothing else does. */
static void malloc_while_serving(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("tiny"), 2);
    uint32_t want = crc_fresh(&o);
    ql_engine *engine = ql_test_open(&o);
    const char *stop[] = {"never to be seen"};
    ql_request r = ql_test_ask("The capital of France is", 12);
    r.stop = stop;
    r.n_stop = 1;
    r.sampling.repetition_penalty = 1.1f;
    ql_result *whole = ql_test_generate(engine, &r);
    int32_t n_refused = 0;
    bool hit = true;
    for (int64_t k = 0; hit; k++) {
        __atomic_store_n(&n_malloc_failed, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&malloc_fails_at, __atomic_load_n(&n_malloc, __ATOMIC_RELAXED) + k, __ATOMIC_RELAXED);
        ql_result *res = NULL;
        ql_error err = {0};
        ql_status status = ql_generate(engine, &r, &res, &err);
        __atomic_store_n(&malloc_fails_at, -1, __ATOMIC_RELAXED);
        hit = __atomic_load_n(&n_malloc_failed, __ATOMIC_RELAXED) > 0;
        if (status == QL_OK) { /* not reached, or done without */
            assert_int_equal(res->n_ids, whole->n_ids);
            assert_memory_equal(res->ids, whole->ids, (size_t)whole->n_ids * sizeof *res->ids);
            assert_string_equal(res->text, whole->text);
        } else if (status != QL_ERR_MEMORY || err.status != QL_ERR_MEMORY || !err.text[0] || !hit) {
            fail_msg("allocation %d of a request refused: %s: %s", (int)k, ql_status_text(status), err.text);
        }
        n_refused += hit && status != QL_OK;
        ql_result_free(res);
        assert_int_equal(ql_test_crc(engine), want); /* one request's trouble is its own */
        ql_test_assert_idle(engine);
    }
    ql_result_free(whole);
    ql_engine_close(&engine);
    printf("  %d allocations of a request refused in turn\n", (int)n_refused);
    assert_true(n_refused >= 5);
}

typedef struct counted {
    int32_t n_ids;
    int64_t early, late;
} counted;

static void count_mallocs(void *user, const ql_event *event) {
    counted *c = user;
    if (event->kind == QL_EVENT_TOKEN) {
        int64_t n = __atomic_load_n(&n_malloc, __ATOMIC_RELAXED);
        c->n_ids++;
        c->early = c->n_ids == 4 ? n : c->early;
        c->late = c->n_ids == 100 ? n : c->late;
    }
}

/* Promise: the step loop allocates nothing. The text of an answer grows by doubling and is all that may. */
static void decoding_allocates_nothing(void **state) {
    const ql_test_model *model = *state;
    ql_options o = ql_test_options(model, 2);
    ql_engine *engine = ql_test_open(&o);
    counted c = {0};
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 101);
    r.ignore_eos = 1;
    r.sampling.temperature = 0.8f;
    r.sampling.frequency_penalty = 0.1f;
    ql_request_id id = 0;
    assert_int_equal(ql_submit(engine, &r, count_mallocs, &c, &id, NULL), QL_OK);
    ql_result_free(ql_test_wait(engine, id));
    ql_engine_close(&engine);
    assert_int_equal(c.n_ids, 101);
    assert_true(c.early > 0);
    if (c.late - c.early > (model->tokenizer ? 6 : 0)) {
        fail_msg("%s: %d allocations between the 4th and the 100th id", model->name, (int)(c.late - c.early));
    }
}
#endif

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    struct CMUnitTest tests[] = {
        cmocka_unit_test(error_in_an_op),
        cmocka_unit_test(hang_in_an_op),
        cmocka_unit_test(long_deadlines_are_kept),
        cmocka_unit_test(hung_lane_is_left_behind),
        cmocka_unit_test(error_while_opening),
        cmocka_unit_test(hang_while_opening),
        QL_TEST_ON(allocation_while_opening, "micro-bf16"),
        QL_TEST_ON(allocation_while_opening, "tiny"),
#ifdef OWN_MALLOC
        cmocka_unit_test(malloc_while_serving),
        QL_TEST_ON(decoding_allocates_nothing, "micro-mixed"),
        QL_TEST_ON(decoding_allocates_nothing, "tiny"),
#endif
    };
    return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
