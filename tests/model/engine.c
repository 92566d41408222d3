/* The engine as a host program sees it: events, cancellation, many threads, what is given back, finish reasons and stop
 * strings.
 *
 * cmocka's checks leave a test by longjmp, so threads and callbacks only record; the main thread judges.
 */
#include "runtime/engine/test_hooks.h"
#include "runtime/text/text.h"
#include "tests/model/bits.h"

#include <malloc.h>

static const ql_test_model *micro(void) { return ql_test_model_named("micro-bf16"); }
static const ql_test_model *tiny(void) { return ql_test_model_named("tiny"); }

/* ---- events ------------------------------------------------------------------------------------------------------ */

enum { MAX_IDS = 256, MAX_TEXT = 2048 };

typedef struct seen {
    int32_t inside; /* atomic: callbacks running now, shared by an engine's requests */
    int32_t overlaps;
    int64_t thread; /* of the first callback; -1 after another */
    ql_engine *engine;
    int32_t cancel_at; /* cancel once this many ids came; 0: never */
    int32_t n_prompt, prompt_done, prompt_total;
    int32_t n_ids, ids[MAX_IDS];
    float logprobs[MAX_IDS];
    char text[MAX_TEXT];
    size_t n_text;
    int32_t n_end; /* atomic */
    ql_finish finish;
    bool failed;   /* END carried an error */
    int32_t split; /* events whose text is no UTF-8 on its own */
    bool disorder; /* an event that may not come where it came */
    ql_request_id request;
} seen;

static void add_text(seen *s, const ql_event *e) {
    if (!e->text || strlen(e->text) != e->text_bytes || s->n_text + e->text_bytes >= MAX_TEXT) {
        s->disorder = true;
        return;
    }
    s->split += ql_utf8_invalid_at(e->text, e->text_bytes) != e->text_bytes;
    memcpy(s->text + s->n_text, e->text, e->text_bytes);
    s->n_text += e->text_bytes;
}

static void on_event(void *user, const ql_event *e) {
    seen *s = user;
    s->overlaps += __atomic_fetch_add(&s->inside, 1, __ATOMIC_ACQ_REL) != 0;
    int64_t self = (int64_t)(uintptr_t)pthread_self();
    s->thread = s->thread == 0 || s->thread == self ? self : -1;
    s->disorder |= s->n_end > 0 || e->request == 0 || (s->request != 0 && e->request != s->request);
    s->request = e->request;
    switch (e->kind) {
    case QL_EVENT_PROMPT:
        s->disorder |= s->n_ids > 0 || e->done <= s->prompt_done || e->done > e->total;
        s->n_prompt++;
        s->prompt_done = e->done;
        s->prompt_total = e->total;
        break;
    case QL_EVENT_TOKEN:
        s->disorder |= s->prompt_done != s->prompt_total || s->prompt_total == 0 || s->n_ids == MAX_IDS;
        s->ids[s->n_ids % MAX_IDS] = e->id;
        s->logprobs[s->n_ids % MAX_IDS] = e->logprob;
        s->n_ids++;
        add_text(s, e);
        if (s->n_ids == s->cancel_at) {
            ql_cancel(s->engine, e->request);
        }
        break;
    case QL_EVENT_END:
        add_text(s, e);
        s->finish = e->finish;
        s->failed = e->error != NULL;
        __atomic_fetch_add(&s->n_end, 1, __ATOMIC_RELEASE);
        break;
    }
    __atomic_fetch_sub(&s->inside, 1, __ATOMIC_ACQ_REL);
}

static ql_request_id submit_seen(ql_engine *engine, const ql_request *r, seen *s) {
    s->engine = engine;
    ql_request_id id = 0;
    ql_error err = {0};
    if (ql_submit(engine, r, on_event, s, &id, &err) != QL_OK) {
        fail_msg("submit: %s", err.text);
    }
    return id;
}

static void check_seen(const seen *s, const ql_result *res) {
    assert_int_equal(s->disorder, false);
    assert_int_equal(s->overlaps, 0);
    assert_int_equal(s->n_end, 1);
    assert_true(s->request == res->request);
    assert_int_equal(s->finish, res->finish);
    assert_int_equal(s->n_ids, res->n_ids);
    assert_memory_equal(s->ids, res->ids, (size_t)res->n_ids * sizeof *s->ids);
    assert_memory_equal(s->logprobs, res->logprobs, (size_t)res->n_ids * sizeof *s->logprobs);
    if (res->text) {
        assert_int_equal(s->n_text, res->text_bytes);
        assert_memory_equal(s->text, res->text, res->text_bytes);
    }
}

static void events_in_order(void **state) {
    (void)state;
    ql_options o = ql_test_options(tiny(), 2);
    o.chunk = 64;
    ql_engine *engine = ql_test_open(&o);
    seen s = {0};
    ql_request r = ql_test_ask("The capital of France is", 16);
    ql_result *res = ql_test_wait(engine, submit_seen(engine, &r, &s));
    check_seen(&s, res);
    assert_int_equal(s.prompt_total, 5);
    assert_true(s.thread != -1 && s.thread != (int64_t)(uintptr_t)pthread_self());
    assert_true(res->prompt_s > 0 && res->first_token_s >= res->prompt_s && res->decode_s > 0);
    assert_string_equal(ql_finish_text(res->finish), "length");
    ql_result_free(res);

    /* three chunks: one event for each step of the prompt */
    int32_t ids[150];
    ql_test_ids(3, 1000, ids, 150);
    seen s3 = {0};
    r = ql_test_request(ids, 150, 2);
    r.ignore_eos = 1;
    res = ql_test_wait(engine, submit_seen(engine, &r, &s3));
    check_seen(&s3, res);
    assert_int_equal(s3.n_prompt, 3);
    assert_int_equal(s3.prompt_total, 150);
    ql_result_free(res);

    ql_stats stats = ql_test_stats(engine);
    assert_int_equal(stats.prompt_tokens, 155);
    assert_int_equal(stats.generated_tokens, 18);
    assert_true(stats.steps >= 3 + 1 + 15 + 1);
    ql_engine_close(&engine);
}

/* A request that submits the next from its END, four deep. */
typedef struct chain {
    ql_engine *engine;
    int32_t left;
    int32_t n_failed, done; /* atomic */
} chain;

static void on_chain(void *user, const ql_event *e) {
    chain *c = user;
    if (e->kind != QL_EVENT_END) {
        return;
    }
    c->n_failed += e->error != NULL;
    if (c->left-- > 0) {
        ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 3);
        r.detach = 1;
        ql_request_id id;
        c->n_failed += ql_submit(c->engine, &r, on_chain, c, &id, NULL) != QL_OK;
    } else {
        __atomic_store_n(&c->done, 1, __ATOMIC_RELEASE);
    }
}

static void callbacks_may_submit(void **state) {
    (void)state;
    ql_options o = ql_test_options(micro(), 2);
    o.max_seqs = 1;
    ql_engine *engine = ql_test_open(&o);
    chain c = {.engine = engine, .left = 4};
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 3);
    r.detach = 1;
    ql_request_id id = 0;
    assert_int_equal(ql_submit(engine, &r, on_chain, &c, &id, NULL), QL_OK);
    while (!__atomic_load_n(&c.done, __ATOMIC_ACQUIRE)) {
        ql_sleep_ms(1);
    }
    assert_int_equal(c.n_failed, 0);
    ql_test_assert_idle(engine);
    assert_int_equal(ql_test_stats(engine).generated_tokens, 15);

    /* a detached request cannot be waited for, nor one that never was */
    ql_result *res = (ql_result *)(uintptr_t)1;
    ql_error err = {0};
    assert_int_equal(ql_wait(engine, id, &res, &err), QL_ERR_USAGE);
    assert_null(res);
    memset(&err, 0, sizeof err);
    assert_int_equal(ql_wait(engine, 999999, &res, &err), QL_ERR_USAGE);
    assert_null(res);
    ql_test_assert_has(err.text, "999999");
    ql_cancel(engine, 999999);

    r.detach = 0;
    id = ql_test_submit(engine, &r);
    ql_result_free(ql_test_wait(engine, id));
    assert_int_equal(ql_wait(engine, id, &res, NULL), QL_ERR_USAGE); /* each can be waited for once */
    assert_null(res);
    ql_result_free(NULL);
    ql_engine_close(&engine);
    ql_engine_close(&engine); /* NULL is accepted */
}

/* ---- cancellation, threads --------------------------------------------------------------------------------------- */

static void cancel_within_a_step(void **state) {
    (void)state;
    ql_options o = ql_test_options(tiny(), 2);
    ql_engine *engine = ql_test_open(&o);
    for (int32_t at = 1; at <= 9; at += 4) {
        seen s = {.cancel_at = at};
        ql_request r = ql_test_ask("The capital of France is", 100);
        r.ignore_eos = 1;
        ql_result *res = ql_test_wait(engine, submit_seen(engine, &r, &s));
        check_seen(&s, res);
        assert_int_equal(res->finish, QL_FINISH_CANCEL);
        assert_true(res->n_ids >= at && res->n_ids <= at + 1);
        ql_result_free(res);
    }
    /* a request that waits for a slot, and one inside its prompt */
    ql_engine_close(&engine);
    o.max_seqs = 1;
    o.chunk = 64;
    engine = ql_test_open(&o);
    int32_t ids[400];
    ql_test_ids(4, 1000, ids, 400);
    ql_request r = ql_test_request(ids, 400, 50);
    ql_request_id first = ql_test_submit(engine, &r), queued = ql_test_submit(engine, &r);
    ql_cancel(engine, queued);
    ql_result *res = ql_test_wait(engine, queued);
    assert_int_equal(res->finish, QL_FINISH_CANCEL);
    assert_int_equal(res->n_ids, 0);
    ql_result_free(res);
    ql_cancel(engine, first);
    res = ql_test_wait(engine, first);
    assert_int_equal(res->finish, QL_FINISH_CANCEL);
    assert_true(res->n_ids < 50);
    ql_result_free(res);
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}

/* Slots and pages return from every way to end; what they held does not show in who gets them next. */
static void cancelled_requests_give_everything_back(void **state) {
    (void)state;
    ql_options o = ql_test_options(micro(), 2);
    o.max_seqs = 4;
    o.chunk = 64;
    ql_engine *engine = ql_test_open(&o);
    ql_test_assert_idle(engine);
    int32_t ids[200], numbers[100];
    ql_test_ids(8, 512, ids, 200);
    ql_test_ids(9, 1000, numbers, 100);
    static seen s[100];
    memset(s, 0, sizeof s);
    ql_request_id id[100];
    for (int32_t i = 0; i < 100; i++) {
        s[i].cancel_at = numbers[i] % 12; /* 0: cancelled from here */
        ql_request r = ql_test_request(ids, 1 + numbers[i] % 200, 20);
        id[i] = submit_seen(engine, &r, &s[i]);
    }
    for (int32_t i = 0; i < 100; i++) {
        if (s[i].cancel_at == 0) {
            ql_cancel(engine, id[i]);
        }
    }
    int32_t n_cancelled = 0;
    for (int32_t i = 0; i < 100; i++) {
        ql_result *res = ql_test_wait(engine, id[i]);
        check_seen(&s[i], res);
        n_cancelled += res->finish == QL_FINISH_CANCEL;
        assert_true(s[i].cancel_at == 0 || (res->finish == QL_FINISH_CANCEL && res->n_ids <= s[i].cancel_at + 1));
        ql_result_free(res);
    }
    assert_true(n_cancelled > 80);
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}

static void no_state_survives_a_request(void **state) {
    (void)state;
    const ql_test_model *model = ql_test_model_named("micro-mixed");
    int32_t ids[8][100];
    ql_request r[8];
    uint32_t fresh[8];
    ql_options o = ql_test_options(model, 2);
    o.max_seqs = 2;
    o.chunk = 64;
    for (int32_t i = 0; i < 8; i++) {
        ql_test_ids((uint64_t)(20 + i), 512, ids[i], 100);
        r[i] = ql_test_request(ids[i], 1 + 13 * i, 8);
        ql_engine *engine = ql_test_open(&o);
        fresh[i] = ql_test_take(ql_test_generate(engine, &r[i])).crc;
        ql_engine_close(&engine);
    }
    ql_engine *engine = ql_test_open(&o);
    for (int32_t round = 0; round < 3; round++) {
        for (int32_t i = 0; i < 8; i++) {
            /* aborted: in the queue, in the prompt, or while generating */
            ql_request long_one = ql_test_request(ids[7], 100, 60);
            seen s = {.cancel_at = 1 + (i + round) % 5};
            ql_request_id aborted = submit_seen(engine, &long_one, &s), abort_now = ql_test_submit(engine, &long_one);
            ql_cancel(engine, abort_now);
            ql_result *res = ql_test_generate(engine, &r[i]);
            if (res->logits_crc32 != fresh[i]) {
                fail_msg("round %d: request %d differs from that of a fresh engine", round, i);
            }
            ql_result_free(res);
            ql_result_free(ql_test_wait(engine, aborted));
            ql_result_free(ql_test_wait(engine, abort_now));
        }
    }
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}

typedef struct worker {
    ql_engine *engine;
    const ql_request *request;
    const uint32_t *want;
    int32_t rounds, n_wrong, n_failed;
    ql_request_id current; /* atomic: what the canceller may hit; 0: none */
    int32_t n_cancelled;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    for (int32_t i = 0; i < w->rounds; i++) {
        ql_request_id id = 0;
        ql_result *res = NULL;
        if (ql_submit(w->engine, w->request, NULL, NULL, &id, NULL) != QL_OK) {
            w->n_failed++;
            continue;
        }
        __atomic_store_n(&w->current, id, __ATOMIC_RELEASE);
        w->n_failed += ql_wait(w->engine, id, &res, NULL) != QL_OK;
        if (res && res->finish == QL_FINISH_CANCEL) {
            w->n_cancelled++;
        } else if (!res || res->logits_crc32 != *w->want) {
            w->n_wrong++;
        }
        ql_result_free(res);
    }
    __atomic_store_n(&w->current, 0, __ATOMIC_RELEASE);
    return NULL;
}

static void eight_threads_and_a_canceller(void **state) {
    (void)state;
    ql_options o = ql_test_options(micro(), 2);
    o.max_seqs = 4;
    ql_engine *engine = ql_test_open(&o);
    int32_t ids[8][70];
    ql_request r[8];
    uint32_t want[8];
    worker w[8];
    pthread_t t[8];
    for (int32_t i = 0; i < 8; i++) {
        ql_test_ids((uint64_t)(40 + i), 512, ids[i], 70);
        r[i] = ql_test_request(ids[i], 1 + 9 * i, 6 + i);
        want[i] = ql_test_take(ql_test_generate(engine, &r[i])).crc;
    }
    for (int32_t i = 0; i < 8; i++) {
        w[i] = (worker){.engine = engine, .request = &r[i], .want = &want[i], .rounds = 6};
        assert_int_equal(pthread_create(&t[i], NULL, work, &w[i]), 0);
    }
    for (int32_t k = 0; k < 60; k++) { /* threads 6 and 7 are cancelled at random times; the others must not notice */
        ql_cancel(engine, __atomic_load_n(&w[6 + k % 2].current, __ATOMIC_ACQUIRE));
        ql_sleep_ms(2);
    }
    for (int32_t i = 0; i < 8; i++) {
        pthread_join(t[i], NULL);
        assert_int_equal(w[i].n_failed, 0);
        assert_int_equal(w[i].n_wrong, 0);
        assert_true(i >= 6 || w[i].n_cancelled == 0);
    }
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}

static void several_engines(void **state) {
    (void)state;
    static const char *const names[] = {"micro-lanes8", "micro-bf16", "micro-fp8-block"};
    ql_engine *engine[3];
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 8);
    uint32_t want[3];
    worker w[3];
    pthread_t t[3];
    for (int32_t i = 0; i < 3; i++) {
        ql_options o = ql_test_options(ql_test_model_named(names[i]), 2);
        engine[i] = ql_test_open(&o);
        want[i] = ql_test_take(ql_test_generate(engine[i], &r)).crc;
    }
    for (int32_t i = 0; i < 3; i++) {
        w[i] = (worker){.engine = engine[i], .request = &r, .want = &want[i], .rounds = 5};
        assert_int_equal(pthread_create(&t[i], NULL, work, &w[i]), 0);
    }
    for (int32_t i = 0; i < 3; i++) {
        pthread_join(t[i], NULL);
        assert_int_equal(w[i].n_failed + w[i].n_wrong, 0);
    }
    ql_engine_close(&engine[1]); /* the others live on */
    for (int32_t i = 0; i < 3; i += 2) {
        assert_int_equal(ql_test_take(ql_test_generate(engine[i], &r)).crc, want[i]);
        ql_engine_close(&engine[i]);
    }
}

/* ---- what is given back ------------------------------------------------------------------------------------------- */

static void open_and_close_a_hundred_times(void **state) {
    (void)state;
    ql_test_heap heap;
    ql_test_heap_init(&heap);
    ql_options o = ql_test_options(micro(), 2);
    o.ctx = 64;
    o.max_seqs = 1;
    o.allocator = &heap.mem;
    size_t used = 0;
    int32_t fds = 0, threads = 0;
    int64_t peak = 0;
    for (int32_t i = 0; i < 100; i++) {
        heap.peak_bytes = 0;
        ql_engine *engine = ql_test_open(&o);
        if (i % 10 == 0) {
            ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 2);
            ql_result *res = ql_test_generate(engine, &r);
            ql_request more = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 40);
            ql_request_id unfinished = ql_test_submit(engine, &more); /* close cancels it and frees its result */
            assert_true(unfinished > res->request);
            ql_result_free(res);
        }
        ql_engine_close(&engine);
        assert_null(engine);
        assert_int_equal(heap.live_blocks, 0);
        assert_int_equal(heap.live_bytes, 0);
        if (i == 11) {
            used = mallinfo2().uordblks;
            fds = ql_test_entries("/proc/self/fd");
            threads = ql_test_entries("/proc/self/task");
            peak = heap.peak_bytes;
        }
        if (i == 91 || i == 99) { /* as 11: without and with nothing more than an open */
            assert_int_equal(ql_test_entries("/proc/self/fd"), fds);
            assert_int_equal(ql_test_entries("/proc/self/task"), threads);
            assert_true(mallinfo2().uordblks <= used + 4096);
            assert_true(heap.peak_bytes <= peak + 4096);
        }
    }
}

static void close_cancels_and_tells(void **state) {
    (void)state;
    ql_options o = ql_test_options(micro(), 2);
    ql_engine *engine = ql_test_open(&o);
    seen s[3] = {{0}, {0}, {0}};
    for (int32_t i = 0; i < 3; i++) {
        ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 400);
        r.detach = i == 2;
        submit_seen(engine, &r, &s[i]);
    }
    ql_engine_close(&engine);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(s[i].n_end, 1);
        assert_int_equal(s[i].finish, QL_FINISH_CANCEL);
        assert_false(s[i].disorder || s[i].failed);
    }
}

typedef struct lines {
    int32_t n, n_broken, inside;
} lines;

static void on_line(void *user, ql_log_level level, const char *line) {
    lines *l = user;
    l->n_broken += __atomic_fetch_add(&l->inside, 1, __ATOMIC_ACQ_REL) != 0;
    l->n_broken += level < QL_LOG_ERROR || level > QL_LOG_DEBUG || !line[0] || strchr(line, '\n') != NULL;
    l->n++;
    __atomic_fetch_sub(&l->inside, 1, __ATOMIC_ACQ_REL);
}

typedef struct progress {
    uint64_t last, total;
    int32_t n, n_broken;
} progress;

static void on_progress(void *user, uint64_t done, uint64_t total) {
    progress *p = user;
    p->n_broken += done < p->last || done > total || (p->n > 0 && total != p->total);
    p->last = done;
    p->total = total;
    p->n++;
}

static void log_progress_and_stats(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("micro-lanes8"), 4);
    lines l = {0};
    progress p = {0};
    o.log = on_line;
    o.log_user = &l;
    o.progress = on_progress;
    o.progress_user = &p;
    o.verify = 1;
    ql_engine *engine = ql_test_open(&o);
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 4);
    ql_result_free(ql_test_generate(engine, &r));
    ql_stats s = ql_test_stats(engine);
    ql_engine_close(&engine);
    assert_true(l.n > 0);
    assert_int_equal(l.n_broken, 0);
    assert_true(p.n > 1);
    assert_int_equal(p.n_broken, 0);
    assert_true(p.last == p.total);

    uint64_t stored = 0;
    for (int32_t i = 0; i < s.n_lanes; i++) {
        assert_string_equal(s.lane[i].device, "host");
        stored += s.lane[i].stored_weight_bytes + s.lane[i].stored_scale_bytes;
        assert_true(s.lane[i].weight_bytes > 0 && s.lane[i].scale_bytes > 0 && s.lane[i].kv_bytes > 0 &&
                    s.lane[i].state_bytes > 0 && s.lane[i].workspace_bytes > 0);
        assert_true(s.lane[i].weight_bytes == s.lane[0].weight_bytes);
    }
    assert_true(stored == p.total);
    uint64_t calls = 0;
    for (int32_t i = 0; i < s.n_paths; i++) {
        assert_true(strchr(s.path[i].name, '/') != NULL);
        calls += strncmp(s.path[i].name, "linear.nvfp4.", 13) == 0 ? s.path[i].calls : 0;
    }
    assert_true(calls > 0);
    assert_int_equal(s.chunk, o.chunk);
    assert_int_equal(s.ctx, o.ctx);
    assert_true(s.load_s > 0);
}

/* What a record of a measurement asks for. */
static void times_and_lane_info(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("micro-lanes8"), 2);
    o.measure = 1;
    o.profile = 1;
    ql_engine *engine = ql_test_open(&o);
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 4);
    ql_result_free(ql_test_generate(engine, &r));
    ql_stats s = ql_test_stats(engine);
    static const char *const parts[] = {"files", "devices", "collectives", "memory", "weights"};
    double sum = 0;
    assert_int_equal(s.n_open, 5);
    for (int32_t i = 0; i < s.n_open; i++) {
        assert_string_equal(s.open[i].name, parts[i]);
        assert_true(s.open[i].ms >= 0);
        sum += s.open[i].ms;
    }
    assert_true(sum > 0 && sum <= s.load_s * 1e3);
    double phases = 0;
    for (int32_t i = 0; i < s.n_phases; i++) {
        phases += s.phase[i].ms;
    }
    assert_true(phases > 0);
    for (int32_t i = 0; i < 2; i++) {
        ql_lane_info info = {.size = sizeof info};
        assert_int_equal(ql_engine_lane_info(engine, i, &info), QL_OK);
        assert_true(info.stream_bytes_per_s > 1e7);
        assert_string_equal(info.link, "host");
        assert_true(info.bus[0] == 0 && info.driver[0] == 0 && info.nccl[0] == 0);
        assert_true(info.sm_mhz == -1 && info.power_w < 0 && info.power_limit_w < 0);
    }
    ql_lane_info info = {.size = sizeof info};
    assert_int_equal(ql_engine_lane_info(engine, 2, &info), QL_ERR_USAGE);
    assert_int_equal(ql_engine_lane_info(engine, -1, &info), QL_ERR_USAGE);
    info.size = 0;
    assert_int_equal(ql_engine_lane_info(engine, 0, &info), QL_ERR_USAGE);
    ql_engine_close(&engine);
    o.measure = 0;
    engine = ql_test_open(&o);
    info.size = sizeof info;
    assert_int_equal(ql_engine_lane_info(engine, 0, &info), QL_OK);
    assert_true(info.stream_bytes_per_s < 0);
    ql_engine_close(&engine);
}

/* ---- ends of generation ------------------------------------------------------------------------------------------- */

static void finish_reasons(void **state) {
    (void)state;
    ql_options o = ql_test_options(tiny(), 1);
    ql_engine *engine = ql_test_open(&o);
    ql_request r = ql_test_ask(
        "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", 0);
    ql_result *res = ql_test_generate(engine, &r);
    assert_int_equal(res->finish, QL_FINISH_EOS);
    assert_string_equal(res->text, "The capital of Italy is Rome.");
    int32_t n = res->n_ids, eos = res->ids[n - 1];
    assert_int_equal(eos, 1315);
    ql_result_free(res);

    r.max_new = n - 1;
    res = ql_test_generate(engine, &r);
    assert_int_equal(res->finish, QL_FINISH_LENGTH);
    assert_int_equal(res->n_ids, n - 1);
    ql_result_free(res);

    r.max_new = n + 6;
    r.ignore_eos = 1;
    res = ql_test_generate(engine, &r);
    assert_int_equal(res->finish, QL_FINISH_LENGTH);
    assert_int_equal(res->n_ids, n + 6);
    assert_int_equal(res->ids[n - 1], eos);
    ql_result_free(res);
    ql_engine_close(&engine);

    /* until the context is full: prompt and generated ids together */
    o = ql_test_options(micro(), 2);
    o.ctx = 64;
    engine = ql_test_open(&o);
    int32_t ids[65];
    ql_test_ids(6, 512, ids, 65);
    for (int32_t k = 40; k <= 63; k += 23) {
        r = ql_test_request(ids, k, 0);
        res = ql_test_generate(engine, &r);
        assert_int_equal(res->finish, QL_FINISH_LENGTH);
        assert_int_equal(res->n_prompt + res->n_ids, 64);
        assert_null(res->text); /* no tokenizer */
        ql_result_free(res);
    }
    r = ql_test_request(ids, 40, 1000); /* more than fits is not an error */
    res = ql_test_generate(engine, &r);
    assert_int_equal(res->n_ids, 24);
    assert_int_equal(res->finish, QL_FINISH_LENGTH);
    ql_result_free(res);
    ql_engine_close(&engine);
}

static void stop_strings(void **state) {
    (void)state;
    /* greedy: " Paris.\nThe capital of Germany is Berlin.\n..." */
    static const struct {
        const char *stop[3];
        int32_t n;
        const char *text;
    } cases[] = {
        {{".\nThe"}, 1, " Paris"},     /* across tokens */
        {{"ari"}, 1, " P"},            /* inside one */
        {{" "}, 1, ""},                /* at once */
        {{"Berlin", "Paris"}, 2, " "}, /* the first in the text, not in the list */
        {{"is Berlin.\n", "Germany is B"}, 2, " Paris.\nThe capital of "},
        {{"Parisian", ".\nThe capital of Spain", "Germany is Bern"},
         3,
         NULL}, /* only beginnings come: nothing is lost */
    };
    ql_options o = ql_test_options(tiny(), 2);
    ql_engine *engine = ql_test_open(&o);
    ql_request plain = ql_test_ask("The capital of France is", 16);
    ql_result *whole = ql_test_generate(engine, &plain);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ql_request r = plain;
        r.stop = cases[i].stop;
        r.n_stop = cases[i].n;
        seen s = {0};
        ql_result *res = ql_test_wait(engine, submit_seen(engine, &r, &s));
        check_seen(&s, res);
        assert_string_equal(res->text, cases[i].text ? cases[i].text : whole->text);
        assert_int_equal(res->finish, cases[i].text ? QL_FINISH_STOP : QL_FINISH_LENGTH);
        assert_true(res->n_ids <= whole->n_ids);
        assert_memory_equal(res->ids, whole->ids, (size_t)res->n_ids * sizeof *res->ids);
        char *decoded = NULL;
        size_t n = 0;
        assert_int_equal(ql_tokenizer_decode(ql_engine_tokenizer(engine), res->ids, res->n_ids, 0, &decoded, &n, NULL),
                         QL_OK);
        assert_true(n >= res->text_bytes && memcmp(decoded, res->text, res->text_bytes) == 0);
        free(decoded);
        ql_result_free(res);
    }
    ql_result_free(whole);
    ql_engine_close(&engine);
}

/* Characters that take several ids, forced upon the model: no event may carry a part of one, and what a cut leaves of
 * one comes out once, as U+FFFD. */
static void split_characters(void **state) {
    (void)state;
    static const char text[] = "x\xf0\x9f\x98\x80\xed\x95\x9c\xea\xb5\xad y\xc4\x8f";
    static const size_t ends[] = {1, 5, 8, 11, 12, 13, 15}; /* of the characters */
    ql_options o = ql_test_options(tiny(), 1);
    ql_engine *engine = ql_test_open(&o);
    int32_t *ids = NULL, n = 0;
    assert_int_equal(ql_tokenizer_encode(ql_engine_tokenizer(engine), text, sizeof text - 1, &ids, &n, NULL), QL_OK);
    ql_engine_close(&engine);
    assert_true(n > 10);
    const ql_test_hooks hooks = {.force_ids = ids, .n_force = n};
    engine = ql_test_open_hooked(&o, &hooks);
    int32_t n_cut = 0;
    for (int32_t k = 1; k <= n; k++) {
        char *raw = NULL;
        size_t raw_bytes = 0, whole = 0;
        assert_int_equal(ql_tokenizer_decode(ql_engine_tokenizer(engine), ids, k, 0, &raw, &raw_bytes, NULL), QL_OK);
        seen s = {0};
        ql_request r = ql_test_ask("The", k);
        ql_result *res = ql_test_wait(engine, submit_seen(engine, &r, &s));
        check_seen(&s, res);
        assert_int_equal(s.split, 0);
        assert_string_equal(res->text, raw);
        while (whole < res->text_bytes && whole < sizeof text - 1 && res->text[whole] == text[whole]) {
            whole++;
        }
        if (whole < res->text_bytes) { /* ends inside a character */
            assert_string_equal(res->text + whole, "\xef\xbf\xbd");
            n_cut++;
        }
        bool at_end = false;
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
            at_end |= whole == ends[i];
        }
        assert_true(whole == 0 || at_end);
        free(raw);
        ql_result_free(res);
    }
    assert_true(n_cut >= 4);
    ql_engine_close(&engine);
    free(ids);
}

/* Where logits end that came row by row; -1 where one was missing or came twice. */
static void follow_logits(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                          const float *values) {
    (void)layer, (void)width, (void)values;
    int32_t *end = user;
    if (kind == QL_PROBE_LOGITS) {
        *end = *end == row0 ? row0 + n_row : -1;
    }
}

/* Steps of several rows, up to an end inside a draft; without ids to force, a draft is copies of the id before it. Events and probed
 * logits come for every id. Penalties, which would have to count a draft's ids, are refused. */
static void steps_of_several_rows(void **state) {
    (void)state;
    enum { EOS = 1315 };
    static const int32_t forced[] = {5, 900, 77, 77, 12, 3, 1000, 41, 8, 650, 99, 21, EOS, 7, 300};
    ql_options o = ql_test_options(tiny(), 1);
    ql_request r = ql_test_ask("Once upon a time", 15);
    ql_test_steps_of_rows(&o, &r, forced, 15); /* ends at EOS */
    r.ignore_eos = 1;
    ql_test_steps_of_rows(&o, &r, forced, 15);
    o.max_seqs = 5;
    ql_engine *engine = ql_test_open(&o);
    ql_error err = {0};
    ql_request_id id;
    r.max_new = 14; /* one of the prompt, three steps of four rows, one of one */
    r.step_rows = 4;
    seen s = {0};
    int32_t end = 0;
    r.probe = follow_logits;
    r.probe_user = &end;
    ql_result *res = ql_test_wait(engine, submit_seen(engine, &r, &s));
    check_seen(&s, res);
    assert_int_equal(res->n_ids, 14);
    assert_int_equal(end, res->n_prompt + 13);
    for (int i = 1; i < 13; i++) {
        assert_true(i % 4 == 0 || res->ids[i] == res->ids[i - 1]);
    }
    ql_result_free(res);
    r.step_rows = 6;
    assert_int_equal(ql_submit(engine, &r, NULL, NULL, &id, &err), QL_ERR_USAGE);
    assert_string_equal(err.text, "step_rows is 6; accepted are 0 to 5, the engine's max_seqs");
    r.step_rows = 4;
    r.sampling.presence_penalty = 0.5f;
    assert_int_equal(ql_submit(engine, &r, NULL, NULL, &id, &err), QL_ERR_USAGE);
    assert_string_equal(err.text,
                        "step_rows is 4 in a request with penalties, which count no draft; accepted are 0 and 1");
    ql_engine_close(&engine);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_in_order),
        cmocka_unit_test(callbacks_may_submit),
        cmocka_unit_test(cancel_within_a_step),
        cmocka_unit_test(cancelled_requests_give_everything_back),
        cmocka_unit_test(no_state_survives_a_request),
        cmocka_unit_test(eight_threads_and_a_canceller),
        cmocka_unit_test(several_engines),
        cmocka_unit_test(open_and_close_a_hundred_times),
        cmocka_unit_test(close_cancels_and_tells),
        cmocka_unit_test(log_progress_and_stats),
        cmocka_unit_test(times_and_lane_info),
        cmocka_unit_test(finish_reasons),
        cmocka_unit_test(stop_strings),
        cmocka_unit_test(split_characters),
        cmocka_unit_test(steps_of_several_rows),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
