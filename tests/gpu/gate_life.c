/* The second half of the gate: what reading weights back finds, one lane that fails, engines that come and go. */
#include "kernels/cuda.h"
#include "tests/gpu/gate.h"
#include "tests/model/plant.h"

#include <cuda_runtime.h>
#include <math.h>
#include <unistd.h>

enum { OPENS = 20 };
#define LIMIT_S 2.0

/* ---- verify ---------------------------------------------------------------------------------------------------------- */

void ql_gate_verify(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    ql_options o = ql_gate_options(j);
    o.mtp = j->model->mtp;
    o.verify = 1;
    ql_engine *engine = ql_test_open(&o);
    ql_stats s = ql_test_stats(engine);
    for (int32_t i = 0; i < j->lanes && ql_gate.device == QL_DEVICE_CUDA; i++) {
        assert_true(s.lane[i].d2h_bytes >= s.lane[i].stored_weight_bytes / 2);
    }
    ql_engine_close(&engine);
    for (int64_t k = 0; k < 12; k += 3) { /* one changed bit of one weight on the last lane is found */
        ql_planted *f = ql_plant(QL_AT_WEIGHT_DATA, j->lanes - 1, false, k);
        ql_error err = {0};
        ql_status status = ql_plant_open(&engine, &o, f, &err);
        assert_true(ql_plant_fired(f) != 0);
        if (status == QL_OK) {
            ql_engine_close(&engine);
            fail_msg("weight %d of lane %d is not the file's and --verify does not see it", (int)k, j->lanes - 1);
        }
        ql_test_assert_has(err.text, "CRC");
        assert_int_equal(f->left_behind, 0);
        ql_plant_return(f);
    }
}

/* ---- a file that shrinks ------------------------------------------------------------------------------------------- */

static char shrinking[96]; /* the copy's model.safetensors */

static void copy_file(const char *from, const char *to) {
    char buf[1 << 16];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    for (size_t n; (n = fread(buf, 1, sizeof buf, in)) > 0;) {
        assert_int_equal(fwrite(buf, 1, n, out), n);
    }
    assert_int_equal(fclose(in) | fclose(out), 0);
}

static void shrink(int32_t lane, ql_dev *dev) {
    (void)lane, (void)dev;
    FILE *f = fopen(shrinking, "rb");
    uint64_t header = 0;
    if (f && fread(&header, 8, 1, f) == 1 && truncate(shrinking, (off_t)header + 8 + 1000) != 0) {
        shrinking[0] = 0;
    }
    if (f) {
        fclose(f);
    }
}

/* A file that lost its end between open and load is an error with tensor and cause, not a signal. */
void ql_gate_file_shrinks(void **state) {
    const ql_gate_job *j = *state;
    if (ql_gate.device == QL_DEVICE_HOST) {
        skip(); /* host lanes copy from the mapping */
    }
    char dir[] = "/tmp/gate-XXXXXX", from[512], to[96];
    assert_non_null(mkdtemp(dir));
    static const char *const files[] = {"config.json", "model.safetensors"};
    for (size_t i = 0; i < 2; i++) {
        snprintf(from, sizeof from, "%s/%s", j->model->dir, files[i]);
        snprintf(i ? shrinking : to, sizeof to, "%s/%s", dir, files[i]);
        copy_file(from, i ? shrinking : to);
    }
    ql_options o = ql_gate_options(j);
    o.model = dir;
    ql_planted *f = ql_plant(QL_AT_NONE, 0, false, 0);
    f->dev_opened = shrink;
    ql_engine *engine = NULL;
    ql_error err = {0};
    assert_int_equal(ql_plant_open(&engine, &o, f, &err), QL_ERR_MODEL);
    ql_test_assert_has(err.text, "lane 0: ");
    ql_test_assert_has(err.text, "embed_tokens.weight: cannot read its file at byte ");
    ql_test_assert_has(err.text, "the file has become shorter");
    assert_int_equal(f->left_behind, 0);
    ql_plant_return(f);
    unlink(shrinking);
    unlink(to);
    rmdir(dir);
}

/* ---- memory ---------------------------------------------------------------------------------------------------------- */

static void use(ql_engine *engine, const ql_test_model *m) {
    int32_t ids[130];
    ql_test_ids(5, m->vocab, ids, 130);
    ql_request r = ql_test_request(ids, 130, 16);
    r.ignore_eos = 1;
    ql_result_free(ql_test_generate(engine, &r));
}

/* What a lane says it holds, its context included, is what the driver reports used, also after code was loaded on first use
 * and steps were recorded. */
void ql_gate_memory(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    if (ql_gate.device == QL_DEVICE_HOST) {
        skip();
    }
    int before = 0;
    assert_int_equal(cudaGetDevice(&before), cudaSuccess);
    ql_options o = ql_gate_options(j);
    ql_engine *engine = ql_test_open(&o);
    use(engine, j->model);
    ql_stats s = ql_test_stats(engine);
    for (int32_t i = 0; i < j->lanes; i++) {
        const ql_lane_stats *l = &s.lane[i];
        size_t free_bytes = 0, total = 0;
        assert_int_equal(cudaSetDevice(i), cudaSuccess);
        assert_int_equal(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
        double used = (double)(total - free_bytes), context = (double)l->context_bytes,
               planned = (double)(l->weight_bytes + l->scale_bytes + l->kv_bytes + l->state_bytes + l->workspace_bytes);
        printf("# measured %-20s lane %d of %d: planned %.1f MiB, context %.1f, used %.1f\n", j->model->name, i,
               j->lanes, planned / 0x1p20, context / 0x1p20, used / 0x1p20);
        fflush(stdout);
        assert_true(context > 64 * 0x1p20); /* no driver makes do with less */
        if (fabs(planned + context - used) > 0.02 * used) {
            fail_msg("lane %d: planned %.0f bytes and context %.0f; the driver reports %.0f used", i, planned, context,
                     used);
        }
    }
    ql_engine_close(&engine);
    assert_int_equal(cudaSetDevice(before), cudaSuccess);
}

/* ---- faults ------------------------------------------------------------------------------------------------------- */

static uint64_t free_now[QL_GATE_LANES];

static void note_free(int32_t lane, ql_dev *dev) {
    uint64_t total;
    if (ql_gate.device == QL_DEVICE_CUDA && ql_cuda_mem(dev, &free_now[lane], &total) != QL_OK) {
        free_now[lane] = 0;
    }
}

static uint32_t crc_fresh(const ql_options *o, uint64_t *free_bytes) {
    ql_planted *f = ql_plant(QL_AT_NONE, 0, false, 0);
    f->dev_opened = note_free;
    memset(free_now, 0, sizeof free_now);
    ql_engine *engine = NULL;
    ql_error err = {0};
    if (ql_plant_open(&engine, o, f, &err) != QL_OK) {
        fail_msg("a fresh engine does not open: %s", err.text);
    }
    uint32_t crc = ql_test_crc(engine);
    ql_engine_close(&engine);
    assert_int_equal(f->left_behind, 0);
    memcpy(free_bytes, free_now, sizeof free_now);
    ql_plant_return(f);
    return crc;
}

/* The same, with memory as it is once the driver has loaded what a process loads once. */
static uint32_t crc_settled(const ql_options *o, uint64_t *free_bytes) {
    static int32_t settled; /* lanes */
    if (settled < o->lanes) {
        crc_fresh(o, free_bytes);
        settled = o->lanes;
    }
    return crc_fresh(o, free_bytes);
}

/* The driver's and NCCL's own pools may keep this much. */
static void assert_memory_back(const uint64_t *before, const uint64_t *after, int32_t lanes, const char *what) {
    for (int32_t i = 0; i < lanes && ql_gate.device == QL_DEVICE_CUDA; i++) {
        assert_true(before[i] > 0);
        if (after[i] + (16u << 20) < before[i]) {
            fail_msg("%s: lane %d has %llu bytes free, %llu before", what, i, (unsigned long long)after[i],
                     (unsigned long long)before[i]);
        }
    }
}

static int32_t n_token; /* atomic */

static void count_tokens(void *user, const ql_event *event) {
    int64_t *end_ns = user;
    if (event->kind == QL_EVENT_TOKEN) {
        __atomic_fetch_add(&n_token, 1, __ATOMIC_RELAXED);
    } else if (event->kind == QL_EVENT_END) {
        __atomic_store_n(end_ns, ql_now_ns(), __ATOMIC_RELEASE);
    }
}

/* One sequence generates; once armed, a second one's prompt comes, so that ops outside recorded steps are reached too. */
static void fault(const ql_gate_job *j, ql_site at, int32_t lane, bool hang) {
    enum { WAIT_MS = 3000 };
    char what[96];
    snprintf(what, sizeof what, "%s in %s on lane %d of %d", hang ? "hang" : "error", ql_site_names[at], lane,
             j->lanes);
    ql_options o = ql_gate_options(j);
    o.wait_ms = WAIT_MS;
    uint64_t before[QL_GATE_LANES], after[QL_GATE_LANES];
    uint32_t want = crc_settled(&o, before);
    ql_planted *f = ql_plant(at, lane, hang, 1);
    ql_engine *engine = NULL;
    ql_error err = {0};
    if (ql_plant_open(&engine, &o, f, &err) != QL_OK) {
        fail_msg("%s: open: %s", what, err.text);
    }
    __atomic_store_n(&n_token, 0, __ATOMIC_RELAXED);
    int64_t end_ns = 0;
    ql_request r = ql_test_request(ql_test_prompt, QL_TEST_PROMPT, 480);
    r.ignore_eos = 1;
    r.crc = 0;
    ql_request_id first, second = 0;
    assert_int_equal(ql_submit(engine, &r, count_tokens, &end_ns, &first, &err), QL_OK);
    while (__atomic_load_n(&n_token, __ATOMIC_RELAXED) < 8) {
        ql_sleep_ms(1);
    }
    ql_plant_arm(f);
    ql_status submitted = ql_submit(engine, &r, NULL, NULL, &second, &err);
    assert_true(submitted == QL_OK || submitted == QL_ERR_STATE);
    ql_result *res = NULL;
    ql_status status = ql_wait(engine, first, &res, &err);
    int64_t fired = ql_plant_fired(f);
    if (!fired) {
        fail_msg("%s: never reached", what);
    }
    if (status != QL_ERR_DEVICE) {
        fail_msg("%s: status %s: %s", what, ql_status_text(status), err.text);
    }
    char named[32];
    snprintf(named, sizeof named, "lane %d", lane);
    ql_test_assert_has(err.text, hang ? named : "injected fault");
    ql_result_free(res);
    if (submitted == QL_OK) {
        assert_int_equal(ql_wait(engine, second, &res, NULL), QL_ERR_DEVICE);
        ql_result_free(res);
    }
    double took = (double)(__atomic_load_n(&end_ns, __ATOMIC_ACQUIRE) - fired) * 1e-9;
    if (took > LIMIT_S + (hang ? WAIT_MS * 1e-3 : 0)) {
        fail_msg("%s: the caller got its error after %.2f s", what, took);
    }
    ql_plant_release(f);
    int64_t t0 = ql_now_ns();
    ql_engine_close(&engine);
    double close_s = ql_seconds_since(t0);
    if (f->left_behind || close_s > LIMIT_S) {
        fail_msg("%s: close took %.2f s, %d lanes left behind; the error was: %s", what, close_s, f->left_behind,
                 err.text);
    }
    assert_int_equal(crc_fresh(&o, after), want);
    assert_memory_back(before, after, j->lanes, what);
    printf("# measured %-44s error after %.3f s, closed in %.3f s: %s\n", what, took, close_s, err.text);
    fflush(stdout);
}

void ql_gate_faults(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    static const ql_site sites[] = {QL_AT_LINEAR, QL_AT_ATTENTION, QL_AT_H2D,   QL_AT_SYNC,
                                    QL_AT_GRAPH,  QL_AT_REDUCE,    QL_AT_GATHER};
    for (size_t i = 0; i < sizeof sites / sizeof *sites; i++) {
        bool is_comm = sites[i] == QL_AT_REDUCE || sites[i] == QL_AT_GATHER;
        if ((is_comm && j->lanes == 1) || (sites[i] == QL_AT_GRAPH && ql_gate.device == QL_DEVICE_HOST)) {
            continue;
        }
        fault(j, sites[i], j->lanes - 1, false);
    }
}

void ql_gate_hangs(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    fault(j, QL_AT_SYNC, j->lanes - 1, true);
    fault(j, QL_AT_LINEAR, j->lanes - 1, true);
    if (ql_gate.device == QL_DEVICE_CUDA) {
        fault(j, QL_AT_GRAPH, j->lanes - 1, true);
    }
    if (j->lanes > 1) {
        fault(j, QL_AT_GATHER, 1, true);
        fault(j, QL_AT_REDUCE, 0, true);
    }
}

void ql_gate_faults_while_opening(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    ql_options o = ql_gate_options(j);
    uint64_t before[QL_GATE_LANES], after[QL_GATE_LANES];
    uint32_t want = crc_settled(&o, before);
    static const struct {
        ql_site at;
        int64_t after;
    } trials[] = {{QL_AT_ALLOC, 0}, {QL_AT_ALLOC, 5}, {QL_AT_WEIGHT_LOAD, 0}, {QL_AT_WEIGHT_LOAD, 7}, {QL_AT_H2D, 2}};
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) {
        ql_planted *f = ql_plant(trials[i].at, j->lanes - 1, false, trials[i].after);
        ql_plant_arm(f);
        ql_engine *engine = NULL;
        ql_error err = {0};
        ql_status status = ql_plant_open(&engine, &o, f, &err);
        double took = ql_seconds_since(ql_plant_fired(f));
        assert_true(ql_plant_fired(f) != 0);
        assert_null(engine);
        assert_int_equal(status, QL_ERR_DEVICE);
        ql_test_assert_has(err.text, "injected fault");
        if (took > LIMIT_S || f->left_behind) {
            fail_msg("error in %s: open took %.2f s more, %d lanes left behind", ql_site_names[trials[i].at], took,
                     f->left_behind);
        }
    }
    assert_int_equal(crc_fresh(&o, after), want);
    assert_memory_back(before, after, j->lanes, "opens that failed");
}

/* ---- life of engines ----------------------------------------------------------------------------------------------- */

void ql_gate_open_and_close(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    ql_options o = ql_gate_options(j);
    uint64_t first[QL_GATE_LANES] = {0}, now[QL_GATE_LANES];
    int32_t threads = 0;
    uint32_t want = 0;
    int64_t t0 = ql_now_ns();
    for (int32_t i = 0; i < OPENS; i++) {
        uint32_t crc = crc_fresh(&o, now);
        want = i ? want : crc;
        assert_int_equal(crc, want);
        if (i == 1) { /* the first open pays for contexts and libraries that stay */
            memcpy(first, now, sizeof first);
            threads = ql_test_entries("/proc/self/task");
        }
    }
    printf("# measured %-20s lanes %d %d opens, %.2f s each; free on lane 0 %.0f MiB, then %.0f; threads %d, then %d\n",
           j->model->name, j->lanes, OPENS, ql_seconds_since(t0) / OPENS, (double)first[0] / 0x1p20,
           (double)now[0] / 0x1p20, threads, ql_test_entries("/proc/self/task"));
    fflush(stdout);
    assert_memory_back(first, now, j->lanes, "open and close");
    assert_true(ql_test_entries("/proc/self/task") <= threads);
}

void ql_gate_two_engines(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    enum { N_EACH = 4 };
    const ql_gate_job jobs[2] = {*j, {ql_test_model_named("micro-mixed"), j->lanes, NULL}};
    ql_engine *engine[2] = {NULL, NULL};
    ql_test_answer want[2][N_EACH];
    ql_request r[N_EACH];
    for (int32_t i = 0; i < N_EACH; i++) {
        r[i] = ql_test_request(ql_test_prompt, QL_TEST_PROMPT - i, 64);
        r[i].ignore_eos = 1;
    }
    for (int32_t k = 0; k < 2; k++) {
        ql_options o = ql_gate_options(&jobs[k]);
        engine[k] = ql_test_open(&o);
        for (int32_t i = 0; i < N_EACH; i++) {
            want[k][i] = ql_test_take(ql_test_generate(engine[k], &r[i]));
        }
    }
    for (int32_t round = 0; round < 3; round++) {
        ql_request_id id[2][N_EACH];
        for (int32_t i = 0; i < 2 * N_EACH; i++) {
            id[i % 2][i / 2] = ql_test_submit(engine[i % 2], &r[i / 2]);
        }
        for (int32_t i = 0; i < 2 * N_EACH; i++) {
            ql_options o = ql_gate_options(&jobs[i % 2]);
            ql_test_answer got = ql_test_take(ql_test_wait(engine[i % 2], id[i % 2][i / 2]));
            ql_test_same(&got, &want[i % 2][i / 2], &o, "beside another engine", i / 2);
        }
    }
    ql_engine_close(&engine[0]);
    ql_test_answer got = ql_test_take(ql_test_generate(engine[1], &r[0])); /* one ends, the other goes on */
    ql_options o = ql_gate_options(&jobs[1]);
    ql_test_same(&got, &want[1][0], &o, "after another engine", 0);
    ql_engine_close(&engine[1]);
}

void ql_gate_callers_device_stays(void **state) {
    const ql_gate_job *j = *state;
    ql_gate_need_gpus(j);
    if (ql_gate.device == QL_DEVICE_HOST) {
        skip();
    }
    int device = -1;
    assert_int_equal(cudaSetDevice(ql_gate.n_gpu - 1), cudaSuccess);
    ql_options o = ql_gate_options(j);
    ql_engine *engine = ql_test_open(&o);
    assert_int_equal(cudaGetDevice(&device), cudaSuccess);
    assert_int_equal(device, ql_gate.n_gpu - 1);
    ql_test_crc(engine);
    ql_test_stats(engine);
    ql_engine_close(&engine);
    assert_int_equal(cudaGetDevice(&device), cudaSuccess);
    assert_int_equal(device, ql_gate.n_gpu - 1);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
}

void ql_gate_refusals(void **state) {
    const ql_gate_job *j = *state;
    if (ql_gate.device == QL_DEVICE_HOST) {
        skip();
    }
    ql_options o = ql_gate_options(j);
    char text[32];
    if (ql_gate.n_gpu < 8) {
        o = ql_gate_options(&(ql_gate_job){ql_test_model_named("micro-lanes8"), 8, NULL});
        snprintf(text, sizeof text, "this machine has %d", ql_gate.n_gpu);
        ql_test_open_fails(&o, QL_ERR_DEVICE, "8 lanes", text, NULL);
    }
    o = ql_gate_options(j);
    o.lanes = 3;
    ql_test_open_fails(&o, QL_ERR_USAGE, "1, 2 or 4", NULL);
    o = ql_gate_options(j);
    const int32_t none[1] = {99}, twice[2] = {0, 0};
    o.devices = none;
    o.lanes = 1;
    ql_test_open_fails(&o, QL_ERR_DEVICE, "99", NULL);
    o.devices = twice;
    o.lanes = 2;
    ql_test_open_fails(&o, QL_ERR_USAGE, "GPU 0", "two lanes", NULL);
    o = ql_gate_options(j);
    o.mem_bytes = 1 << 20;
    ql_test_open_fails(&o, QL_ERR_MEMORY, "weights alone", NULL);
}
