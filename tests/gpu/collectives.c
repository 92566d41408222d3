/* Collectives of CUDA lanes, alone: every element of every sum and gather against what IEEE addition in tree order gives.
 *
 *     collectives [FILTER]
 *
 * Each group of cases runs in a child process, so that one that hangs or breaks its device fails alone and cannot hide the
 * others; the parent never touches CUDA. Vectors of a multiple of 16 bytes, up to the planned size, go over peer memory
 * where the GPUs allow; all others through NCCL: sizes pick the path, and each case's name says which it was.
 *
 * There is no broadcast call: a gather is every lane's broadcast at once.
 */
#include "kernels/cuda.h"
#include "runtime/lane/comm_cuda.h"
#include "runtime/lane/lane.h"

#include <cuda_runtime.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_LANES = 8, TAIL = 64, GROUP_S = 90 };
static const size_t CAP = 64u << 20;
#define LIMIT_S 2.0

/* Shared with the children. */
static struct tally {
    int32_t n_gpu, n_pass, n_fail, n_skip;
    char running[96];
    char why[96];
} * tally;

static const char *filter;

static void begin_case(const char *name) { snprintf(tally->running, sizeof tally->running, "%s", name); }

static void end_case(bool ok, uint64_t compared, const char *note) {
    printf("%s %-40s %12llu elements compared%s%s\n", ok ? "ok  " : "FAIL", tally->running,
           (unsigned long long)compared, *note ? "; " : "", note);
    fflush(stdout);
    *(ok ? &tally->n_pass : &tally->n_fail) += 1;
    tally->running[0] = 0;
}

/* ---- a group of lanes with nothing but devices and collectives ------------------------------------------------------ */

typedef struct buffers {
    uint8_t *src, *dst; /* device: [cap] and [n_lane * cap + TAIL] */
    uint8_t *up, *back; /* host: the same sizes */
} buffers;

typedef struct world {
    ql_lane_group lanes;
    ql_log log;
    ql_comm_group *group;
    int32_t n, ordinal[MAX_LANES];
    size_t cap;
    buffers b[MAX_LANES];
    ql_error err;
    int32_t n_left_behind; /* atomic */
} world;

static void on_log(void *user, ql_log_level level, const char *line) {
    world *w = user;
    (void)level;
    printf("# log: %s\n", line);
    if (strstr(line, "did not come back")) {
        __atomic_fetch_add(&w->n_left_behind, 1, __ATOMIC_RELAXED);
    }
}

static ql_status open_lane(ql_lane *lane, void *arg) {
    world *w = arg;
    buffers *b = &w->b[lane->index];
    size_t out = (size_t)w->n * w->cap + TAIL;
    QL_TRY(ql_cuda_dev_open(&lane->dev, w->ordinal[lane->index], NULL, lane->group->mem, &lane->err));
    QL_TRY(ql_comm_cuda_bind(w->group, lane->index, &lane->dev, &lane->comm));
    QL_TRY(lane->dev.ops->alloc(&lane->dev, w->cap, "source", (void **)&b->src));
    QL_TRY(lane->dev.ops->alloc(&lane->dev, out, "result", (void **)&b->dst));
    b->up = malloc(w->cap);
    b->back = malloc(out);
    return b->up && b->back ? lane->dev.ops->sync(&lane->dev)
                            : ql_fail(&lane->err, QL_ERR_MEMORY, "no host memory for %zu bytes", w->cap + out);
}

static ql_status connect_lane(ql_lane *lane, void *arg) {
    (void)arg;
    return ql_comm_cuda_connect(&lane->comm);
}

static ql_status prove_lane(ql_lane *lane, void *arg) {
    (void)arg;
    return ql_comm_cuda_prove(&lane->comm);
}

static void close_lane(ql_lane *lane) {
    world *w = lane->group->user;
    buffers *b = &w->b[lane->index];
    if (lane->dev.ops) {
        lane->dev.ops->free(&lane->dev, b->src);
        lane->dev.ops->free(&lane->dev, b->dst);
    }
    ql_comm_cuda_unbind(&lane->comm);
    if (lane->dev.ops) {
        lane->dev.ops->close(&lane->dev);
    }
    free(b->up);
    free(b->back);
    *b = (buffers){0};
}

/* False when a lane did not come back; nothing may be freed then. */
static bool world_close(world *w) {
    if (!ql_lanes_close(&w->lanes)) {
        return false;
    }
    ql_comm_cuda_close(&w->group);
    ql_log_deinit(&w->log);
    free(w);
    return true;
}

static world *world_open(int32_t n, size_t cap, int32_t wait_ms, ql_error *err) {
    world *w = calloc(1, sizeof *w);
    if (!w || ql_log_init(&w->log, on_log, w, err) != QL_OK) {
        free(w);
        return NULL;
    }
    w->n = n;
    w->cap = cap;
    for (int32_t i = 0; i < n; i++) {
        w->ordinal[i] = i;
    }
    if (ql_lanes_open(&w->lanes, n, wait_ms, close_lane, w, &w->log, NULL, err) != QL_OK) {
        ql_log_deinit(&w->log);
        free(w);
        return NULL;
    }
    const ql_comm_cuda_options o = {.n_lane = n,
                                    .ordinal = w->ordinal,
                                    .max_bytes = cap,
                                    .wait_ms = wait_ms,
                                    .init_ms = 20000,
                                    .abort = &w->lanes.abort,
                                    .log = &w->log};
    if (ql_comm_cuda_open(&w->group, &o, err) != QL_OK || ql_lanes_run(&w->lanes, open_lane, w, err) != QL_OK ||
        ql_lanes_run(&w->lanes, connect_lane, w, err) != QL_OK ||
        ql_lanes_run(&w->lanes, prove_lane, w, err) != QL_OK || ql_comm_cuda_settle(w->group, err) != QL_OK) {
        world_close(w);
        return NULL;
    }
    return w;
}

static world *world_or_fail(int32_t n, size_t cap, int32_t wait_ms) {
    ql_error err = {0};
    world *w = world_open(n, cap, wait_ms, &err);
    if (!w) {
        begin_case("open");
        end_case(false, 0, err.text);
    }
    return w;
}

static void close_or_fail(world *w) {
    int32_t n = w->n;
    if (!world_close(w)) {
        char name[64];
        snprintf(name, sizeof name, "close.lanes%d", n);
        begin_case(name);
        end_case(false, 0, "a lane did not come back");
    }
}

static const char *path_of(const world *w, size_t bytes) {
    return w->n == 1                                                                                ? "copy"
           : strcmp(ql_comm_cuda_path(w->group), "peer") == 0 && bytes % 16 == 0 && bytes <= w->cap ? "peer"
                                                                                                    : "nccl";
}

/* ---- data ------------------------------------------------------------------------------------------------------------- */

static uint32_t mix(uint32_t lane, uint32_t seed, uint32_t i) {
    uint32_t h = i * 2654435761u ^ seed * 2246822519u ^ (lane + 1) * 3266489917u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    h *= 3266489917u;
    return h ^ h >> 16;
}

/* f32 bits of either sign over 2^-40 to 2^39, some of them zeros of both signs and subnormals: sums round, cancel and
 * depend on their order. */
static uint32_t float_bits(uint32_t lane, uint32_t seed, uint32_t i) {
    uint32_t h = mix(lane, seed, i), sign = h & 0x80000000u, mantissa = h & 0x7fffffu, r = mix(lane + 77, seed, i);
    if (r % 61 == 0) {
        return sign | (r / 61 % 2 ? mantissa : 0);
    }
    return sign | (127 - 40 + (r >> 8) % 80) << 23 | mantissa;
}

static float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static uint32_t tree_bits(int32_t n, uint32_t seed, uint32_t i) {
    float v[MAX_LANES];
    for (int32_t l = 0; l < n; l++) {
        v[l] = as_float(float_bits((uint32_t)l, seed, i));
    }
    for (int32_t width = n; width > 1; width /= 2) {
        for (int32_t l = 0; l < width / 2; l++) {
            v[l] = v[2 * l] + v[2 * l + 1];
        }
    }
    return as_bits(v[0]);
}

typedef struct job {
    world *w;
    bool sum;
    size_t bytes; /* of one lane's vector, a multiple of 4 */
    int32_t rounds;
    uint32_t seed;
    uint64_t compared[MAX_LANES], wrong[MAX_LANES];
    uint64_t at[MAX_LANES]; /* of the first wrong element */
} job;

static void fill(uint8_t *up, int32_t lane, uint32_t seed, size_t bytes) {
    for (size_t i = 0; i < bytes / 4; i++) {
        uint32_t v = float_bits((uint32_t)lane, seed, (uint32_t)i);
        memcpy(up + 4 * i, &v, 4);
    }
}

/* What came back in `back`, and that the bytes after it are as they were. */
static void compare(job *j, int32_t lane, uint32_t seed) {
    const world *w = j->w;
    const uint8_t *back = w->b[lane].back;
    size_t n = j->bytes / 4, parts = j->sum ? 1 : (size_t)w->n;
    for (size_t p = 0; p < parts; p++) {
        for (size_t i = 0; i < n; i++) {
            uint32_t got,
                want = j->sum ? tree_bits(w->n, seed, (uint32_t)i) : float_bits((uint32_t)p, seed, (uint32_t)i);
            memcpy(&got, back + p * j->bytes + 4 * i, 4);
            if (got != want && j->wrong[lane]++ == 0) {
                j->at[lane] = p * n + i;
            }
        }
    }
    for (size_t i = 0; i < TAIL; i++) {
        if (back[parts * j->bytes + i] != 0 && j->wrong[lane]++ == 0) {
            j->at[lane] = parts * n;
        }
    }
    j->compared[lane] += parts * n;
}

static ql_status collective(ql_lane *lane, const job *j, const void *src, void *dst) {
    return j->sum ? lane->comm.reduce(&lane->comm, src, dst, (int64_t)(j->bytes / 4))
                  : lane->comm.gather(&lane->comm, src, dst, j->bytes);
}

static ql_status finish(ql_lane *lane) {
    QL_TRY(lane->dev.ops->sync(&lane->dev));
    return lane->comm.check ? lane->comm.check(&lane->comm) : QL_OK;
}

static ql_status one_round(ql_lane *lane, job *j, uint32_t seed) {
    const ql_ops *ops = lane->dev.ops;
    buffers *b = &j->w->b[lane->index];
    size_t out = (j->sum ? 1 : (size_t)j->w->n) * j->bytes + TAIL;
    fill(b->up, lane->index, seed, j->bytes);
    ql_dev_count(&lane->dev.progress, 1);
    QL_TRY(ops->zero(&lane->dev, b->dst, out));
    QL_TRY(ops->h2d(&lane->dev, b->src, b->up, j->bytes));
    QL_TRY(collective(lane, j, b->src, b->dst));
    QL_TRY(ops->d2h(&lane->dev, b->back, b->dst, out));
    QL_TRY(finish(lane));
    compare(j, lane->index, seed);
    ql_dev_count(&lane->dev.progress, 1);
    return QL_OK;
}

static ql_status run_rounds(ql_lane *lane, void *arg) {
    job *j = arg;
    for (int32_t r = 0; r < j->rounds; r++) {
        QL_TRY(one_round(lane, j, j->seed + (uint32_t)r));
    }
    return QL_OK;
}

/* Runs fn on all lanes and reports the case. Returns whether the group can go on. */
static bool report(job *j, ql_lane_fn fn, const char *name) {
    begin_case(name);
    ql_error err = {0};
    ql_status status = ql_lanes_run(&j->w->lanes, fn, j, &err);
    uint64_t compared = 0, wrong = 0;
    char note[600] = "";
    for (int32_t i = 0; i < j->w->n; i++) {
        if (j->wrong[i] && !wrong) {
            snprintf(note, sizeof note, "lane %d has %llu wrong, the first is element %llu", i,
                     (unsigned long long)j->wrong[i], (unsigned long long)j->at[i]);
        }
        compared += j->compared[i];
        wrong += j->wrong[i];
    }
    if (status != QL_OK) {
        snprintf(note, sizeof note, "%s", err.text);
    }
    end_case(status == QL_OK && wrong == 0 && compared > 0, compared, note);
    return status == QL_OK;
}

/* ---- sizes --------------------------------------------------------------------------------------------------------------- */

/* One vector at a time, from 4 B to 64 MiB, around the 16 bytes of a vector, the 4 KiB of a chunk, rows of 5120. */
static void sizes(int32_t n) {
    static const size_t bytes[] = {4,
                                   8,
                                   12,
                                   16,
                                   20,
                                   32,
                                   48,
                                   4080,
                                   4096,
                                   4100,
                                   4112,
                                   8192,
                                   20480,
                                   65536,
                                   65540,
                                   1 << 20,
                                   (1 << 20) + 16,
                                   512 * 20480,
                                   512 * 20480 + 4,
                                   (64 << 20) - 4,
                                   64 << 20};
    world *w = world_or_fail(n, CAP, 20000);
    if (!w) {
        return;
    }
    printf("# %d lanes: path %s, NCCL %d\n", n, ql_comm_cuda_path(w->group), ql_comm_cuda_nccl_version(w->group));
    bool goes = true;
    for (size_t i = 0; i < 2 * sizeof bytes / sizeof *bytes && goes; i++) {
        job j = {.w = w, .sum = i % 2 == 0, .bytes = bytes[i / 2], .seed = (uint32_t)(1000 * (i + 1))};
        j.rounds = j.bytes <= 65540 ? 20 : j.bytes <= 2 << 20 ? 5 : 2;
        char name[96];
        snprintf(name, sizeof name, "%s.%zuB.%s.lanes%d", j.sum ? "reduce" : "gather", j.bytes, path_of(w, j.bytes), n);
        goes = report(&j, run_rounds, name);
    }
    close_or_fail(w);
}

/* ---- many on one communicator ---------------------------------------------------------------------------------------------- */

/* Sizes change from call to call, so chunks have counted different numbers of collectives. */
static ql_status run_steps(ql_lane *lane, void *arg) {
    job *j = arg;
    static const size_t bytes[] = {20480, 24, 4096, 12, 65536, 16, 20480, 8};
    job mine = *j;
    memset(mine.wrong, 0, sizeof mine.wrong);
    memset(mine.compared, 0, sizeof mine.compared);
    for (int32_t r = 0; r < j->rounds; r++) {
        for (int32_t k = 0; k < 4; k++) {
            mine.bytes = bytes[(r + k) % 8];
            mine.sum = k != 3;
            QL_TRY(one_round(lane, &mine, j->seed + 4 * (uint32_t)r + (uint32_t)k));
        }
    }
    j->wrong[lane->index] = mine.wrong[lane->index];
    j->at[lane->index] = mine.at[lane->index];
    j->compared[lane->index] = mine.compared[lane->index];
    return QL_OK;
}

/* 64 sums queued at once, the last lane late: lanes run ahead of each other as far as the slots let them. */
enum { BURST = 64 };
static ql_status run_burst(ql_lane *lane, void *arg) {
    job *j = arg;
    const ql_ops *ops = lane->dev.ops;
    buffers *b = &j->w->b[lane->index];
    for (int32_t r = 0; r < j->rounds; r++) {
        for (int32_t k = 0; k < BURST; k++) {
            fill(b->up + (size_t)k * j->bytes, lane->index, j->seed + (uint32_t)(r * BURST + k), j->bytes);
        }
        QL_TRY(ops->h2d(&lane->dev, b->src, b->up, BURST * j->bytes));
        QL_TRY(ops->zero(&lane->dev, b->dst, BURST * j->bytes + TAIL));
        QL_TRY(ops->sync(&lane->dev));
        if (lane->index == (r % 2 ? 0 : j->w->n - 1)) {
            ql_sleep_ms(10);
        }
        for (size_t k = 0; k < BURST; k++) {
            QL_TRY(collective(lane, j, b->src + k * j->bytes, b->dst + k * j->bytes));
        }
        QL_TRY(ops->d2h(&lane->dev, b->back, b->dst, BURST * j->bytes + TAIL));
        QL_TRY(finish(lane));
        for (size_t k = 0; k < BURST; k++) {
            for (size_t i = 0; i < j->bytes / 4; i++) {
                uint32_t got, want = tree_bits(j->w->n, j->seed + (uint32_t)(r * BURST) + (uint32_t)k, (uint32_t)i);
                memcpy(&got, b->back + k * j->bytes + 4 * i, 4);
                if (got != want && j->wrong[lane->index]++ == 0) {
                    j->at[lane->index] = k * j->bytes / 4 + i;
                }
            }
        }
        j->compared[lane->index] += BURST * j->bytes / 4;
        ql_dev_count(&lane->dev.progress, 1);
    }
    return QL_OK;
}

static void steps(int32_t n) {
    world *w = world_or_fail(n, 2 << 20, 20000);
    if (!w) {
        return;
    }
    char name[96];
    snprintf(name, sizeof name, "steps.1000.lanes%d", n);
    job j = {.w = w, .rounds = 1000, .seed = 7};
    bool goes = report(&j, run_steps, name);
    static const size_t burst[] = {16, 20480, 28, 4};
    for (int32_t i = 0; i < 4 && goes; i++) {
        snprintf(name, sizeof name, "burst.%dx%zuB.%s.lanes%d", BURST, burst[i], path_of(w, burst[i]), n);
        j = (job){.w = w, .sum = true, .bytes = burst[i], .rounds = 20, .seed = 900000 + (uint32_t)i * 10000};
        goes = report(&j, run_burst, name);
    }
    close_or_fail(w);
}

/* ---- recorded ------------------------------------------------------------------------------------------------------------------ */

/* All lanes record the same collective at once and replay it: with other data each time, then many times on end. */
static ql_status run_recorded(ql_lane *lane, void *arg) {
    job *j = arg;
    const ql_ops *ops = lane->dev.ops;
    buffers *b = &j->w->b[lane->index];
    size_t out = (j->sum ? 1 : (size_t)j->w->n) * j->bytes + TAIL;
    void *graph = NULL;
    QL_TRY(one_round(lane, j, j->seed)); /* what is loaded on first use is loaded */
    QL_TRY(ops->graph_begin(&lane->dev));
    ql_status status = collective(lane, j, b->src, b->dst);
    ql_status ended = ops->graph_end(&lane->dev, &graph);
    status = status == QL_OK ? ended : status;
    for (int32_t r = 1; r <= j->rounds && status == QL_OK; r++) {
        uint32_t seed = j->seed + (uint32_t)r;
        fill(b->up, lane->index, seed, j->bytes);
        status = ops->h2d(&lane->dev, b->src, b->up, j->bytes);
        for (int32_t k = 0; k < (r == j->rounds ? 1000 : 1) && status == QL_OK; k++) {
            status = ops->graph_launch(&lane->dev, graph);
        }
        status = status == QL_OK ? ops->d2h(&lane->dev, b->back, b->dst, out) : status;
        status = status == QL_OK ? finish(lane) : status;
        if (status == QL_OK) {
            compare(j, lane->index, seed);
        }
    }
    ops->graph_free(&lane->dev, graph);
    return status;
}

static void recorded(int32_t n) {
    world *w = world_or_fail(n, 2 << 20, 20000);
    if (!w) {
        return;
    }
    static const size_t bytes[] = {20480, 65536, 1 << 20, 32, 12, 4};
    bool goes = true;
    for (int32_t i = 0; i < 12 && goes; i++) {
        job j = {.w = w, .sum = i % 2 == 0, .bytes = bytes[i / 2], .rounds = 50, .seed = 5000 * (uint32_t)(i + 1)};
        char name[96];
        snprintf(name, sizeof name, "graph.%s.%zuB.%s.lanes%d", j.sum ? "reduce" : "gather", j.bytes,
                 path_of(w, j.bytes), n);
        goes = report(&j, run_recorded, name);
    }
    close_or_fail(w);
}

/* ---- a lane that fails, a lane that never comes --------------------------------------------------------------------------------- */

typedef struct loss {
    job job;
    bool never; /* the lane comes too late instead of failing */
    bool in_graph;
    int32_t released; /* atomic */
    int64_t fired_ns; /* atomic */
} loss;

static ql_status run_loss(ql_lane *lane, void *arg) {
    loss *x = arg;
    buffers *b = &x->job.w->b[lane->index];
    if (lane->index == 1) {
        ql_sleep_ms(200);
        __atomic_store_n(&x->fired_ns, ql_now_ns(), __ATOMIC_RELEASE);
        while (x->never && !__atomic_load_n(&x->released, __ATOMIC_ACQUIRE)) {
            ql_sleep_ms(2);
        }
        return x->never ? QL_OK : ql_fail(&lane->err, QL_ERR_DEVICE, "lane 1: injected fault");
    }
    QL_TRY(collective(lane, &x->job, b->src, b->dst));
    return finish(lane);
}

static void lose(int32_t n, bool never, size_t bytes) {
    enum { WAIT_MS = 2000 };
    world *w = world_or_fail(n, 1 << 20, WAIT_MS);
    if (!w) {
        return;
    }
    char name[96], note[700] = "";
    loss x = {.job = {.w = w, .sum = true, .bytes = bytes, .rounds = 3, .seed = 3}, .never = never};
    snprintf(name, sizeof name, "%s.%zuB.%s.lanes%d", never ? "deadline" : "abort", bytes, path_of(w, bytes), n);
    if (!report(&x.job, run_rounds, "before a loss")) {
        close_or_fail(w);
        return;
    }
    begin_case(name);
    ql_error err = {0};
    int64_t start = ql_now_ns();
    ql_status status = ql_lanes_run(&w->lanes, run_loss, &x, &err);
    int64_t from = never ? start : __atomic_load_n(&x.fired_ns, __ATOMIC_ACQUIRE);
    double took = ql_seconds_since(from);
    __atomic_store_n(&x.released, 1, __ATOMIC_RELEASE);
    int64_t t0 = ql_now_ns();
    bool closed = world_close(w);
    double close_s = ql_seconds_since(t0);
    bool named = strstr(err.text, never ? "lane" : "lane 1: injected fault") != NULL;
    bool ok = status == QL_ERR_DEVICE && named && took <= LIMIT_S + (never ? WAIT_MS * 1e-3 : 0) && closed &&
              close_s <= LIMIT_S;
    snprintf(note, sizeof note, "error after %.3f s, close after %.3f s%s: %s", took, close_s,
             closed ? "" : " (a lane did not come back)", err.text);
    end_case(ok, x.job.compared[0], note);
    if (closed) { /* and everything works again in the same process */
        w = world_or_fail(n, 1 << 20, 20000);
        if (w) {
            job j = {.w = w, .sum = true, .bytes = 20480, .rounds = 20, .seed = 11};
            snprintf(name, sizeof name, "reopened.after.%s.%zuB.lanes%d", never ? "deadline" : "abort", bytes, n);
            report(&j, run_rounds, name);
            close_or_fail(w);
        }
    }
}

static void abort_peer(int32_t n) { lose(n, false, 20480); }
static void abort_nccl(int32_t n) { lose(n, false, 12); }
static void deadline_peer(int32_t n) { lose(n, true, 20480); }
static void deadline_nccl(int32_t n) { lose(n, true, 12); }

/* ---- two groups, guards ------------------------------------------------------------------------------------------------------------ */

typedef struct second {
    job job;
    ql_status status;
    ql_error err;
} second;

static void *run_second(void *arg) {
    second *s = arg;
    s->status = ql_lanes_run(&s->job.w->lanes, run_steps, &s->job, &s->err);
    return NULL;
}

static void two_groups(int32_t n) {
    world *a = world_or_fail(n, 1 << 20, 20000), *b = a ? world_or_fail(n, 1 << 20, 20000) : NULL;
    if (!b) {
        return;
    }
    char name[96];
    second s = {.job = {.w = b, .rounds = 300, .seed = 50000}};
    job j = {.w = a, .rounds = 300, .seed = 90000};
    pthread_t thread;
    snprintf(name, sizeof name, "two.groups.lanes%d", n);
    if (pthread_create(&thread, NULL, run_second, &s) != 0) {
        begin_case(name);
        end_case(false, 0, "no thread");
        return;
    }
    report(&j, run_steps, name);
    pthread_join(thread, NULL);
    uint64_t compared = 0, wrong = 0;
    for (int32_t i = 0; i < n; i++) {
        compared += s.job.compared[i];
        wrong += s.job.wrong[i];
    }
    snprintf(name, sizeof name, "two.groups.second.lanes%d", n);
    begin_case(name);
    end_case(s.status == QL_OK && wrong == 0 && compared > 0, compared, s.err.text);
    close_or_fail(a);
    snprintf(name, sizeof name, "two.groups.one.left.lanes%d", n);
    j = (job){.w = b, .sum = true, .bytes = 20480, .rounds = 20, .seed = 70000};
    report(&j, run_rounds, name);
    close_or_fail(b);
}

/* The caller's current device is as it was after every call of the caller's thread. */
static void guards(int32_t n) {
    char name[96];
    int device = -1;
    snprintf(name, sizeof name, "callers.device.lanes%d", n);
    cudaSetDevice(n - 1);
    world *w = world_or_fail(n, 1 << 20, 20000);
    if (!w) {
        return;
    }
    bool ok = cudaGetDevice(&device) == cudaSuccess && device == n - 1;
    job j = {.w = w, .sum = true, .bytes = 4096, .rounds = 2, .seed = 1};
    report(&j, run_rounds, "with a device of the caller's");
    ok = ok && cudaGetDevice(&device) == cudaSuccess && device == n - 1;
    close_or_fail(w);
    ok = ok && cudaGetDevice(&device) == cudaSuccess && device == n - 1;
    begin_case(name);
    end_case(ok, j.compared[0], "");
    if (n > 1) { /* one GPU for two lanes */
        const int32_t twice[MAX_LANES] = {0};
        ql_log log;
        ql_abort flag;
        ql_error err = {0};
        ql_comm_group *group = NULL;
        if (ql_log_init(&log, NULL, NULL, &err) != QL_OK || ql_abort_init(&flag, &err) != QL_OK) {
            return;
        }
        const ql_comm_cuda_options o = {.n_lane = n,
                                        .ordinal = twice,
                                        .max_bytes = 4096,
                                        .wait_ms = 5000,
                                        .init_ms = 20000,
                                        .abort = &flag,
                                        .log = &log};
        snprintf(name, sizeof name, "one.gpu.twice.lanes%d", n);
        begin_case(name);
        ql_status status = ql_comm_cuda_open(&group, &o, &err);
        end_case(status == QL_ERR_DEVICE && !group && err.text[0] && !strchr(err.text, '\n'), 0, err.text);
        ql_abort_deinit(&flag);
        ql_log_deinit(&log);
    }
}

/* ---- main ------------------------------------------------------------------------------------------------------------------------------ */

typedef void (*group_fn)(int32_t n);

static const struct {
    const char *name;
    group_fn run;
    int32_t least; /* lanes it makes sense for */
} groups[] = {
    {"sizes", sizes, 1},
    {"steps", steps, 1},
    {"recorded", recorded, 1},
    {"guards", guards, 1},
    {"two_groups", two_groups, 2},
    {"abort_peer", abort_peer, 2},
    {"deadline_peer", deadline_peer, 2},
    {"abort_nccl", abort_nccl, 2},
    {"deadline_nccl", deadline_nccl, 2},
};

static void count_gpus(int32_t n) {
    (void)n;
    tally->n_gpu = ql_cuda_count(tally->why);
}

/* Runs in a child; false when it had to be ended or ended by itself. */
static bool in_child(group_fn run, int32_t n) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        run(n);
        fflush(stdout);
        _exit(0); /* not exit: a lane left behind may still be in the driver */
    }
    int status = 0;
    for (int64_t t0 = ql_now_ns(); pid > 0; ql_sleep_ms(5)) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got != 0) {
            return got == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        if (ql_seconds_since(t0) > GROUP_S) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return false;
        }
    }
    return false;
}

int main(int argc, char **argv) {
    filter = argc > 1 ? argv[1] : "";
    tally = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED) {
        perror("collectives: mmap");
        return 2;
    }
    if (!in_child(count_gpus, 0) || tally->n_gpu == 0) {
        fprintf(stderr, "collectives: no usable GPU%s%s\n", tally->why[0] ? ": " : "", tally->why);
        return 1;
    }
    for (int32_t n = 1; n <= MAX_LANES; n *= 2) {
        for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
            if (n < groups[i].least || !strstr(groups[i].name, filter)) {
                continue;
            }
            if (n > tally->n_gpu) {
                printf("skip %s.lanes%d: this machine has %d GPUs\n", groups[i].name, n, tally->n_gpu);
                tally->n_skip++;
                continue;
            }
            int64_t t0 = ql_now_ns();
            tally->running[0] = 0;
            if (!in_child(groups[i].run, n)) {
                printf("FAIL %s.lanes%d: the process %s in %s\n", groups[i].name, n,
                       ql_seconds_since(t0) > GROUP_S ? "was ended after its time" : "died",
                       tally->running[0] ? tally->running : "no case");
                tally->n_fail++;
            }
            printf("# %s.lanes%d took %.1f s\n", groups[i].name, n, ql_seconds_since(t0));
        }
    }
    printf("collectives: %d passed, %d failed, %d skipped\n", tally->n_pass, tally->n_fail, tally->n_skip);
    return tally->n_fail || !tally->n_pass ? 1 : 0;
}
