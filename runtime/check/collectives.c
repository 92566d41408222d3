/* Collectives alone: lanes that have nothing but a device and a communicator. Every element of every result is compared
 * with IEEE addition in tree order; vectors hold both signs, zeros, subnormals and 80 binary orders of magnitude, so that
 * another order gives other bits.
 *
 * Nothing in the engine broadcasts but the embedding, and that by a sum: the lane that has a row adds it to the others'
 * zeros, which is exact (docs/design.md). A broadcast is checked as just that. A gather is every lane's broadcast at once.
 */
#include "runtime/check/check_impl.h"

#include "runtime/base/mem.h"
#include "runtime/base/num.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#if QL_CUDA
#include "kernels/cuda.h"
#include "runtime/lane/comm_cuda.h"
#endif

enum { TAIL = 64 /* bytes behind a result that must stay */, WAIT_MS = 20000, INIT_MS = 20000 };

/* ---- lanes with nothing but devices and collectives ------------------------------------------------------------------ */

typedef struct buffers {
    uint8_t *src, *dst; /* device: [cap], and [n_lane * cap + TAIL] */
    uint8_t *up, *back; /* host: the same sizes */
} buffers;

typedef struct world_options {
    size_t cap;
    size_t reduce_cap; /* largest sum that the collectives are opened for; 0: cap */
    int32_t wait_ms;
    int32_t proof_times;
    bool no_peer;      /* CUDA: NCCL alone */
    bool wrong_device; /* CUDA: lanes open other GPUs than their communicators are for */
    bool one_gpu;      /* CUDA: every communicator is for the first */
} world_options;

typedef struct world world;

typedef enum op { REDUCE, GATHER, BROADCAST, N_OP } op;
static const char *const op_name[N_OP] = {"reduce", "gather", "broadcast"};

/* What the lanes are to do, and what they found. */
typedef struct job {
    world *w;
    op op;
    size_t bytes; /* of one lane's vector, a multiple of 4 */
    int32_t rounds;
    uint32_t seed;
    uint64_t compared[QL_MAX_LANES], wrong[QL_MAX_LANES];
    uint64_t at[QL_MAX_LANES]; /* the first wrong element */
    /* a lane that is lost */
    bool never;       /* lane 1 comes too late instead of failing */
    int32_t released; /* atomic */
    int64_t fired_ns; /* atomic */
} job;

/* Everything that a lane can reach is in here: it stays where a lane does not come back. */
struct world {
    ql_check *check;
    world_options o;
    ql_lane_group lanes;
    ql_comm_group *group;
    int32_t n;
    buffers b[QL_MAX_LANES];
    job job;
};

static ql_status open_device(world *w, ql_lane *lane) {
#if QL_CUDA
    if (w->check->kind == QL_DEVICE_CUDA) {
        QL_TRY(ql_cuda_dev_open(&lane->dev, w->check->ordinal[lane->index], NULL, w->check->mem, &lane->err));
        return ql_comm_cuda_bind(w->group, lane->index, &lane->dev, &lane->comm);
    }
#endif
    QL_TRY(ql_host_dev_open(&lane->dev, NULL, w->check->mem, &lane->err));
    ql_comm_host_bind(w->group, lane->index, &lane->dev, &lane->comm);
    return QL_OK;
}

static ql_status open_lane(ql_lane *lane, void *arg) {
    world *w = arg;
    buffers *b = &w->b[lane->index];
    const ql_allocator *mem = w->check->mem;
    size_t cap = w->o.cap, out = (size_t)w->n * cap + TAIL;
    QL_TRY(open_device(w, lane));
    QL_TRY(lane->dev.ops->alloc(&lane->dev, cap, "a collective's source", (void **)&b->src));
    QL_TRY(lane->dev.ops->alloc(&lane->dev, out, "a collective's result", (void **)&b->dst));
    QL_TRY(ql_alloc(mem, cap, 1, "a collective's source", (void **)&b->up, &lane->err));
    QL_TRY(ql_alloc(mem, out, 1, "a collective's result", (void **)&b->back, &lane->err));
    return lane->dev.ops->sync(&lane->dev);
}

#if QL_CUDA
static ql_status connect_lane(ql_lane *lane, void *arg) {
    (void)arg;
    return ql_comm_cuda_connect(&lane->comm);
}

static ql_status prove_lane(ql_lane *lane, void *arg) {
    (void)arg;
    return ql_comm_cuda_prove(&lane->comm);
}
#endif

static void close_lane(ql_lane *lane) {
    world *w = lane->group->user;
    buffers *b = &w->b[lane->index];
    if (lane->dev.ops) {
        lane->dev.ops->free(&lane->dev, b->src);
        lane->dev.ops->free(&lane->dev, b->dst);
    }
#if QL_CUDA
    if (w->check->kind == QL_DEVICE_CUDA) {
        ql_comm_cuda_unbind(&lane->comm);
    }
#endif
    if (lane->dev.ops) {
        lane->dev.ops->close(&lane->dev);
    }
    ql_free(w->check->mem, b->up);
    ql_free(w->check->mem, b->back);
}

static ql_status open_group(world *w, ql_error *err) {
    ql_check *c = w->check;
#if QL_CUDA
    if (c->kind == QL_DEVICE_CUDA) {
        int32_t ordinal[QL_MAX_LANES];
        for (int32_t i = 0; i < w->n; i++) {
            ordinal[i] = w->o.one_gpu         ? c->ordinal[0]
                         : !w->o.wrong_device ? c->ordinal[i]
                         : w->n == 1          ? c->ordinal[0] + 1
                                              : c->ordinal[(i + 1) % w->n];
        }
        const ql_comm_cuda_options o = {.n_lane = w->n,
                                        .ordinal = ordinal,
                                        .max_bytes = w->o.reduce_cap ? w->o.reduce_cap : w->o.cap,
                                        .wait_ms = w->o.wait_ms,
                                        .init_ms = INIT_MS,
                                        .proof_times = w->o.proof_times,
                                        .no_peer = w->o.no_peer,
                                        .abort = &w->lanes.abort,
                                        .log = &c->log,
                                        .mem = c->mem};
        return ql_comm_cuda_open(&w->group, &o, err);
    }
#endif
    return ql_comm_host_open(&w->group, w->n, &w->lanes.abort, w->o.wait_ms, c->mem, err);
}

static ql_status connect(world *w, ql_error *err) {
#if QL_CUDA
    if (w->check->kind == QL_DEVICE_CUDA) {
        QL_TRY(ql_lanes_run(&w->lanes, connect_lane, w, err));
        for (bool again = true; again;) {
            QL_TRY(ql_lanes_run(&w->lanes, prove_lane, w, err));
            QL_TRY(ql_comm_cuda_settle(w->group, &again, err));
        }
    }
#endif
    (void)w, (void)err;
    return QL_OK;
}

/* False when a lane did not come back; what it can reach is left alone then. Accepts NULL. */
static bool world_close(world *w) {
    if (!w) {
        return true;
    }
    if (!ql_lanes_close(&w->lanes)) {
        w->check->lost = true;
        return false;
    }
#if QL_CUDA
    if (w->check->kind == QL_DEVICE_CUDA) {
        ql_comm_cuda_close(&w->group);
    }
#endif
    if (w->check->kind == QL_DEVICE_HOST) {
        ql_comm_host_close(&w->group);
    }
    ql_free(w->check->mem, w);
    return true;
}

static ql_status world_open(world **out, ql_check *c, int32_t n, const world_options *o, ql_error *err) {
    world *w = NULL;
    ql_status status;
    *out = NULL;
    QL_TRY(ql_alloc(c->mem, 1, sizeof *w, "lanes", (void **)&w, err));
    w->check = c;
    w->o = *o;
    w->n = n;
    status = ql_lanes_open(&w->lanes, n, o->wait_ms, close_lane, w, &c->log, c->mem, err);
    if (status != QL_OK) {
        ql_free(c->mem, w);
        return status;
    }
    QL_TRY_GOTO(open_group(w, err), fail);
    QL_TRY_GOTO(ql_lanes_run(&w->lanes, open_lane, w, err), fail);
    QL_TRY_GOTO(connect(w, err), fail);
    *out = w;
    return QL_OK;

fail:
    world_close(w);
    return status;
}

/* ---- data ------------------------------------------------------------------------------------------------------------ */

static uint32_t mix(uint32_t lane, uint32_t seed, uint32_t i) {
    uint32_t h = i * 2654435761u ^ seed * 2246822519u ^ (lane + 1) * 3266489917u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    h *= 3266489917u;
    return h ^ h >> 16;
}

/* A lane's element i as f32 bits: either sign over 2^-40 to 2^39, some of them zeros of both signs and subnormals, so
 * that sums round, cancel and depend on their order. In a broadcast one lane has a vector, the others zeros. */
static uint32_t element(const job *j, int32_t lane, uint32_t seed, uint32_t i) {
    if (j->op == BROADCAST && lane != (int32_t)(seed % (uint32_t)j->w->n)) {
        return 0;
    }
    uint32_t l = (uint32_t)lane, h = mix(l, seed, i), sign = h & 0x80000000u, mantissa = h & 0x7fffffu;
    uint32_t r = mix(l + 77, seed, i);
    if (r % 61 == 0) {
        return sign | (r / 61 % 2 ? mantissa : 0);
    }
    return sign | (127 - 40 + (r >> 8) % 80) << 23 | mantissa;
}

static uint32_t tree_bits(const job *j, uint32_t seed, uint32_t i) {
    float v[QL_MAX_LANES];
    for (int32_t l = 0; l < j->w->n; l++) {
        v[l] = ql_f32_of_bits(element(j, l, seed, i));
    }
    for (int32_t width = j->w->n; width > 1; width /= 2) {
        for (int32_t l = 0; l < width / 2; l++) {
            v[l] = v[2 * l] + v[2 * l + 1];
        }
    }
    return ql_bits_of_f32(v[0]);
}

static void fill(const job *j, uint8_t *up, int32_t lane, uint32_t seed) {
    for (size_t i = 0; i < j->bytes / 4; i++) {
        uint32_t v = element(j, lane, seed, (uint32_t)i);
        memcpy(up + 4 * i, &v, 4);
    }
}

static void wrong_at(job *j, int32_t lane, uint64_t at) {
    if (j->wrong[lane]++ == 0) {
        j->at[lane] = at;
    }
}

/* One lane's result of one collective. */
static void compare(job *j, int32_t lane, uint32_t seed, const uint8_t *got) {
    size_t n = j->bytes / 4, parts = j->op == GATHER ? (size_t)j->w->n : 1;
    for (size_t p = 0; p < parts; p++) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits,
                want = j->op == GATHER ? element(j, (int32_t)p, seed, (uint32_t)i) : tree_bits(j, seed, (uint32_t)i);
            memcpy(&bits, got + p * j->bytes + 4 * i, 4);
            if (bits != want) {
                wrong_at(j, lane, p * n + i);
            }
        }
    }
    j->compared[lane] += parts * n;
}

/* Bytes after the result, which were zeroed. */
static void compare_tail(job *j, int32_t lane, const uint8_t *tail, uint64_t at) {
    for (size_t i = 0; i < TAIL; i++) {
        if (tail[i] != 0) {
            wrong_at(j, lane, at);
        }
    }
}

static size_t result_bytes(const job *j) { return (j->op == GATHER ? (size_t)j->w->n : 1) * j->bytes; }

static ql_status collective(ql_lane *lane, const job *j, const void *src, void *dst) {
    ql_dev_count(&lane->dev.progress, 1);
    return j->op == GATHER ? lane->comm.gather(&lane->comm, src, dst, j->bytes)
                           : lane->comm.reduce(&lane->comm, src, dst, (int64_t)(j->bytes / 4));
}

static ql_status finish(ql_lane *lane) {
    QL_TRY(lane->dev.ops->sync(&lane->dev));
    return lane->comm.check ? lane->comm.check(&lane->comm) : QL_OK;
}

static ql_status one_round(ql_lane *lane, job *j, uint32_t seed) {
    const ql_ops *ops = lane->dev.ops;
    buffers *b = &j->w->b[lane->index];
    size_t out = result_bytes(j);
    fill(j, b->up, lane->index, seed);
    QL_TRY(ops->zero(&lane->dev, b->dst, out + TAIL));
    QL_TRY(ops->h2d(&lane->dev, b->src, b->up, j->bytes));
    QL_TRY(collective(lane, j, b->src, b->dst));
    QL_TRY(ops->d2h(&lane->dev, b->back, b->dst, out + TAIL));
    QL_TRY(finish(lane));
    compare(j, lane->index, seed, b->back);
    compare_tail(j, lane->index, b->back + out, out / 4);
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

/* Runs fn on all lanes. What they found is in *j afterwards; after a failure, when lanes may still be at it, nothing is. */
static ql_status run_job(world *w, job *j, ql_lane_fn fn, ql_error *err) {
    j->w = w;
    w->job = *j;
    QL_TRY(ql_lanes_run(&w->lanes, fn, &w->job, err));
    *j = w->job;
    return QL_OK;
}

/* ---- a case ---------------------------------------------------------------------------------------------------------- */

static void calls(const world *w, uint64_t *peer, uint64_t *nccl) {
    *peer = *nccl = 0;
#if QL_CUDA
    if (w->check->kind == QL_DEVICE_CUDA) {
        ql_comm_cuda_calls(w->group, peer, nccl);
    }
#else
    (void)w;
#endif
}

/* Reports what a job came to. `more` is the note of a case that passes. */
static void end_job(const job *j, ql_status status, const ql_error *err, const char *more) {
    uint64_t compared = 0, wrong = 0;
    char note[640];
    snprintf(note, sizeof note, "%s", more);
    for (int32_t i = 0; i < j->w->n; i++) {
        if (j->wrong[i] && !wrong) {
            snprintf(note, sizeof note, "lane %d has %llu wrong elements, the first is %llu", i,
                     (unsigned long long)j->wrong[i], (unsigned long long)j->at[i]);
        }
        compared += j->compared[i];
        wrong += j->wrong[i];
    }
    if (status != QL_OK) {
        snprintf(note, sizeof note, "%s", err->text);
    }
    bool ok = status == QL_OK && wrong == 0 && compared > 0;
    ql_check_end(
        j->w->check,
        &(ql_check_case){.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED, .compared = compared, .note = note});
}

static void end_failed(ql_check *c, const char *why) {
    ql_check_end(c, &(ql_check_case){.outcome = QL_CHECK_FAILED, .note = why});
}

/* Lanes that several cases use one after another, opened for the first that runs. */
typedef struct shared {
    ql_check *check;
    int32_t n;
    world_options o;
    world *w;
    bool lost; /* a case failed so that the lanes are of no more use */
} shared;

/* Runs fn on all lanes for the case under way and ends the case. */
static void run_case(shared *s, job *j, ql_lane_fn fn) {
    ql_error err = {0};
    if (s->lost) {
        end_failed(s->check, "not run: the lanes failed in an earlier case");
        return;
    }
    if (!s->w && world_open(&s->w, s->check, s->n, &s->o, &err) != QL_OK) {
        s->lost = true;
        end_failed(s->check, err.text);
        return;
    }
    uint64_t peer0, nccl0, peer, nccl;
    calls(s->w, &peer0, &nccl0);
    ql_status status = run_job(s->w, j, fn, &err);
    calls(s->w, &peer, &nccl);
    s->lost = status != QL_OK;
    if (status == QL_OK && s->n > 1 && s->o.no_peer && (peer != peer0 || nccl == nccl0)) {
        status = ql_fail(&err, QL_ERR_INTERNAL, "%llu collectives were served by peer memory, %llu by NCCL",
                         (unsigned long long)(peer - peer0), (unsigned long long)(nccl - nccl0));
    }
    const char *path = peer > peer0   ? (nccl > nccl0 ? "peer memory and NCCL" : "peer memory")
                       : nccl > nccl0 ? "NCCL"
                                      : "";
    end_job(j, status, &err, path);
}

static void close_shared(shared *s) {
    if (!world_close(s->w)) {
        ql_logf(&s->check->log, QL_LOG_ERROR, "%s: a lane did not come back", s->check->name);
    }
    s->w = NULL;
}

/* "sizes" or "sizes_nccl": a group's name with the path it is held to. */
static const char *path_suffix(bool nccl) { return nccl ? "_nccl" : ""; }

/* ---- sizes ----------------------------------------------------------------------------------------------------------- */

/* One vector at a time, from 4 B to 64 MiB, around the 16 bytes of a vector, the 4 KiB of a chunk, rows of 5120. */
static void sizes(ql_check *c, int32_t n, bool nccl) {
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
    const size_t shorter = (1 << 20) + 16, most = !c->run_long                ? shorter
                                                  : c->kind == QL_DEVICE_HOST ? 512 * 20480 + 4
                                                                              : 64 << 20;
    shared s = {.check = c, .n = n, .o = {.cap = most, .wait_ms = WAIT_MS, .no_peer = nccl}};
    for (size_t i = 0; i < N_OP * sizeof bytes / sizeof *bytes; i++) {
        job j = {.op = (op)(i % N_OP), .bytes = bytes[i / N_OP], .seed = (uint32_t)(1000 * (i + 1))};
        j.rounds = j.bytes <= 65540 ? 16 : j.bytes <= shorter ? 4 : 2;
        if (j.bytes <= most &&
            ql_check_begin(c, n, "collectives.sizes%s.%s.%zuB", path_suffix(nccl), op_name[j.op], j.bytes)) {
            run_case(&s, &j, run_rounds);
        }
    }
    close_shared(&s);
    shared larger = {
        .check = c, .n = n, .o = {.cap = 1 << 20, .reduce_cap = 8192, .wait_ms = WAIT_MS, .no_peer = nccl}};
    static const size_t gathered[] = {8192 + 4, 65536, 1 << 20};
    for (uint32_t i = 0; i < 3; i++) { /* a gather may be larger than any sum */
        job j = {.op = GATHER, .bytes = gathered[i], .rounds = 8, .seed = 77000 + 100 * i};
        if (ql_check_begin(c, n, "collectives.sizes%s.gather.%zuB_of_8192B", path_suffix(nccl), j.bytes)) {
            run_case(&larger, &j, run_rounds);
        }
    }
    close_shared(&larger);
}

/* ---- many on one communicator ---------------------------------------------------------------------------------------- */

/* Sizes change from call to call, so that chunks have counted different numbers of collectives. */
static ql_status run_steps(ql_lane *lane, void *arg) {
    job *j = arg;
    static const size_t bytes[] = {20480, 24, 4096, 12, 65536, 16, 20480, 8};
    static const op ops[] = {REDUCE, REDUCE, BROADCAST, GATHER};
    job mine = {.w = j->w}; /* the others write to theirs */
    for (int32_t r = 0; r < j->rounds; r++) {
        for (int32_t k = 0; k < 4; k++) {
            mine.bytes = bytes[(r + k) % 8];
            mine.op = ops[k];
            QL_TRY(one_round(lane, &mine, j->seed + 4 * (uint32_t)r + (uint32_t)k));
        }
    }
    j->wrong[lane->index] = mine.wrong[lane->index];
    j->at[lane->index] = mine.at[lane->index];
    j->compared[lane->index] = mine.compared[lane->index];
    return QL_OK;
}

/* 64 sums queued at once, one lane late: lanes run ahead of each other as far as the slots let them. */
enum { BURST = 64 };
static ql_status run_burst(ql_lane *lane, void *arg) {
    job *j = arg;
    const ql_ops *ops = lane->dev.ops;
    buffers *b = &j->w->b[lane->index];
    for (int32_t r = 0; r < j->rounds; r++) {
        uint32_t seed = j->seed + (uint32_t)(r * BURST);
        for (uint32_t k = 0; k < BURST; k++) {
            fill(j, b->up + k * j->bytes, lane->index, seed + k);
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
        for (uint32_t k = 0; k < BURST; k++) {
            compare(j, lane->index, seed + k, b->back + k * j->bytes);
        }
        compare_tail(j, lane->index, b->back + BURST * j->bytes, BURST * j->bytes / 4);
        ql_dev_count(&lane->dev.progress, 1);
    }
    return QL_OK;
}

static void steps(ql_check *c, int32_t n, bool nccl) {
    static const size_t burst[] = {16, 20480, 28, 4};
    shared s = {.check = c, .n = n, .o = {.cap = 2 << 20, .wait_ms = WAIT_MS, .no_peer = nccl}};
    if (ql_check_begin(c, n, "collectives.steps%s.1000", path_suffix(nccl))) {
        run_case(&s, &(job){.rounds = 1000, .seed = 7}, run_steps);
    }
    for (uint32_t i = 0; i < 4; i++) {
        if (ql_check_begin(c, n, "collectives.steps%s.burst.%dx%zuB", path_suffix(nccl), BURST, burst[i])) {
            run_case(&s, &(job){.bytes = burst[i], .rounds = 20, .seed = 900000 + i * 10000}, run_burst);
        }
    }
    close_shared(&s);
}

/* ---- recorded -------------------------------------------------------------------------------------------------------- */

/* All lanes record the same collective at once and replay it: with other data each time, then many times on end. */
static ql_status run_recorded(ql_lane *lane, void *arg) {
    job *j = arg;
    const ql_ops *ops = lane->dev.ops;
    buffers *b = &j->w->b[lane->index];
    void *graph = NULL;
    QL_TRY(one_round(lane, j, j->seed)); /* what is loaded on first use is loaded */
    QL_TRY(ops->graph_begin(&lane->dev));
    ql_status status = collective(lane, j, b->src, b->dst);
    ql_status ended = ops->graph_end(&lane->dev, &graph);
    status = status == QL_OK ? ended : status;
    for (int32_t r = 1; r <= j->rounds && status == QL_OK; r++) {
        uint32_t seed = j->seed + (uint32_t)r;
        fill(j, b->up, lane->index, seed);
        status = ops->h2d(&lane->dev, b->src, b->up, j->bytes);
        for (int32_t k = 0; k < (r == j->rounds ? 1000 : 1) && status == QL_OK; k++) {
            status = ops->graph_launch(&lane->dev, graph);
        }
        status = status == QL_OK ? ops->d2h(&lane->dev, b->back, b->dst, result_bytes(j)) : status;
        status = status == QL_OK ? finish(lane) : status;
        if (status == QL_OK) {
            compare(j, lane->index, seed, b->back);
        }
    }
    ops->graph_free(&lane->dev, graph);
    return status;
}

static void recorded(ql_check *c, int32_t n, bool nccl) {
    static const size_t bytes[] = {20480, 65536, 1 << 20, 32, 12, 4};
    shared s = {.check = c, .n = n, .o = {.cap = 2 << 20, .wait_ms = WAIT_MS, .no_peer = nccl}};
    for (uint32_t i = 0; i < 12; i++) {
        job j = {.op = i % 2 ? GATHER : REDUCE, .bytes = bytes[i / 2], .rounds = 50, .seed = 5000 * (i + 1)};
        if (ql_check_begin(c, n, "collectives.recorded%s.%s.%zuB", path_suffix(nccl), op_name[j.op], j.bytes)) {
            run_case(&s, &j, run_recorded);
        }
    }
    close_shared(&s);
}

/* ---- a lane that fails, a lane that never comes ---------------------------------------------------------------------- */

static ql_status run_loss(ql_lane *lane, void *arg) {
    job *j = arg;
    buffers *b = &j->w->b[lane->index];
    if (lane->index == 1) {
        ql_sleep_ms(100);
        __atomic_store_n(&j->fired_ns, ql_now_ns(), __ATOMIC_RELEASE);
        while (j->never && !__atomic_load_n(&j->released, __ATOMIC_ACQUIRE)) {
            ql_sleep_ms(2);
        }
        return j->never ? QL_OK : ql_fail(&lane->err, QL_ERR_DEVICE, "lane 1: injected fault");
    }
    QL_TRY(collective(lane, j, b->src, b->dst));
    return finish(lane);
}

/* The others' error has to come in time and to name the lane, and everything has to close in time. */
static void run_loss_case(ql_check *c, int32_t n, const world_options *o, job *j) {
    const double limit_s = 2 * fmax(1, c->options.wait_ms / 1e4); /* longer where all deadlines are */
    ql_error err = {0};
    world *w = NULL;
    ql_status status = world_open(&w, c, n, o, &err);
    status = status == QL_OK ? run_job(w, j, run_rounds, &err) : status;
    if (status != QL_OK) {
        world_close(w);
        end_failed(c, err.text);
        return;
    }
    uint64_t compared = 0;
    for (int32_t i = 0; i < n; i++) {
        compared += j->wrong[i] == 0 ? j->compared[i] : 0;
    }
    int64_t start = ql_now_ns();
    status = run_job(w, j, run_loss, &err);
    double took = ql_seconds_since(j->never ? start : __atomic_load_n(&w->job.fired_ns, __ATOMIC_ACQUIRE));
    __atomic_store_n(&w->job.released, 1, __ATOMIC_RELEASE);
    start = ql_now_ns();
    bool closed = world_close(w);
    double close_s = ql_seconds_since(start);
    bool named = strstr(err.text, j->never ? "lane" : "lane 1: injected fault") != NULL;
    bool ok = status == QL_ERR_DEVICE && named && compared > 0 && closed && close_s <= limit_s &&
              took <= limit_s + (j->never ? o->wait_ms * 1e-3 : 0);
    char note[640];
    snprintf(note, sizeof note, "error after %.3f s, closed after %.3f s%s: %s", took, close_s,
             closed ? "" : " (a lane did not come back)", err.text);
    ql_check_end(
        c, &(ql_check_case){.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED, .compared = compared, .note = note});
}

static void lose(ql_check *c, int32_t n, bool nccl, bool never) {
    const world_options o = {.cap = 1 << 20, .wait_ms = 1000, .no_peer = nccl};
    const char *group = never ? "deadline" : "abort";
    if (ql_check_begin(c, n, "collectives.%s%s.20480B", group, path_suffix(nccl))) {
        run_loss_case(c, n, &o, &(job){.bytes = 20480, .rounds = 3, .seed = 3, .never = never});
    }
    if (ql_check_begin(c, n, "collectives.%s%s.reopened", group, path_suffix(nccl))) {
        shared s = {.check = c, .n = n, .o = {.cap = 1 << 20, .wait_ms = WAIT_MS, .no_peer = nccl}};
        run_case(&s, &(job){.bytes = 20480, .rounds = 20, .seed = 11}, run_rounds);
        close_shared(&s);
    }
}

static void abort_group(ql_check *c, int32_t n, bool nccl) { lose(c, n, nccl, false); }
static void deadline_group(ql_check *c, int32_t n, bool nccl) { lose(c, n, nccl, true); }

/* ---- two groups, guards ---------------------------------------------------------------------------------------------- */

typedef struct second {
    world *w;
    job job;
    ql_status status;
    ql_error err;
} second;

static void *run_second(void *arg) {
    second *s = arg;
    s->status = run_job(s->w, &s->job, run_steps, &s->err);
    return NULL;
}

static void add_findings(job *to, const job *from, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        to->compared[i] += from->compared[i];
        to->wrong[i] += from->wrong[i];
    }
}

/* Two groups of lanes on the same devices at once; then one closes and the other goes on. */
static void two_groups(ql_check *c, int32_t n, bool nccl) {
    const world_options o = {.cap = 1 << 20, .wait_ms = WAIT_MS, .no_peer = nccl};
    if (!ql_check_begin(c, n, "collectives.two_groups%s", path_suffix(nccl))) {
        return;
    }
    ql_error err = {0};
    world *first = NULL;
    second s = {.job = {.rounds = 100, .seed = 50000}};
    job j = {.rounds = 100, .seed = 90000}, left = {.bytes = 20480, .rounds = 20, .seed = 70000};
    ql_thread thread;
    ql_status status = world_open(&first, c, n, &o, &err);
    status = status == QL_OK ? world_open(&s.w, c, n, &o, &err) : status;
    status = status == QL_OK ? ql_thread_start(&thread, "qlane-check", run_second, &s, &err) : status;
    if (status != QL_OK) {
        world_close(s.w);
        world_close(first);
        end_failed(c, err.text);
        return;
    }
    status = run_job(first, &j, run_steps, &err);
    ql_thread_join(thread);
    if (status == QL_OK && s.status != QL_OK) {
        status = ql_fail(&err, s.status, "the second group: %s", s.err.text);
    }
    if (!world_close(first)) {
        status = ql_fail(&err, QL_ERR_DEVICE, "a lane of the first group did not come back");
    }
    status = status == QL_OK ? run_job(s.w, &left, run_rounds, &err) : status;
    j.w = s.w;
    add_findings(&j, &s.job, n);
    add_findings(&j, &left, n);
    end_job(&j, status, &err, "");
    world_close(s.w);
}

/* The other lanes come with 16 bytes more than lane 0. */
static ql_status run_sizes_differ(ql_lane *lane, void *arg) {
    job mine = *(job *)arg;
    buffers *b = &mine.w->b[lane->index];
    mine.bytes += lane->index ? 16 : 0;
    QL_TRY(collective(lane, &mine, b->src, b->dst));
    return finish(lane);
}

static void guards(ql_check *c, int32_t n, bool nccl) {
    (void)nccl;
    ql_error err = {0};
    world *w = NULL;
    bool cuda = c->kind == QL_DEVICE_CUDA;
    world_options o = {.cap = 4096, .wait_ms = WAIT_MS, .wrong_device = cuda};
    if (cuda && ql_check_begin(c, n, "collectives.guards.wrong_device")) {
        ql_status status = world_open(&w, c, n, &o, &err);
        bool ok = status == QL_ERR_INTERNAL && strstr(err.text, "its collectives are for GPU");
        ql_check_end(c, &(ql_check_case){.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED, .note = err.text});
        world_close(w);
    }
    if (cuda && n > 1 && ql_check_begin(c, n, "collectives.guards.one_gpu_twice")) {
        o = (world_options){.cap = 4096, .wait_ms = WAIT_MS, .one_gpu = true};
        err = (ql_error){0};
        ql_status status = world_open(&w, c, n, &o, &err);
        bool ok = status == QL_ERR_DEVICE && err.text[0];
        ql_check_end(c, &(ql_check_case){.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED, .note = err.text});
        world_close(w);
    }
    if (!cuda && n > 1 && ql_check_begin(c, n, "collectives.guards.sizes_differ")) {
        ql_status status = world_open(&w, c, n, &o, &err);
        status = status == QL_OK ? run_job(w, &(job){.bytes = 16}, run_sizes_differ, &err) : status;
        bool ok = status == QL_ERR_INTERNAL && strstr(err.text, "met one of");
        ql_check_end(c, &(ql_check_case){.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED, .note = err.text});
        world_close(w);
    }
}

/* ---- the proof that lanes begin with ----------------------------------------------------------------------------------- */

/* The path that lanes settle on after `times` the usual rounds; "" where they could not be opened. */
static const char *proven_path(ql_check *c, int32_t n, bool nccl, int32_t times, uint64_t *compared, ql_error *err) {
    const char *path = "";
    world *w = NULL;
    const world_options o = {.cap = 1 << 20, .wait_ms = WAIT_MS, .proof_times = times, .no_peer = nccl};
    *compared = 0;
    if (world_open(&w, c, n, &o, err) == QL_OK) {
#if QL_CUDA
        path = ql_comm_cuda_path(w->group);
        *compared = ql_comm_cuda_proved(w->group);
#endif
        world_close(w);
    }
    return path;
}

/* A path that only long proving finds wrong is switched off by it. */
static void proof(ql_check *c, int32_t n, bool nccl) {
    if (!ql_check_begin(c, n, "collectives.proof%s", path_suffix(nccl))) {
        return;
    }
    ql_error err = {0};
    uint64_t compared, usual;
    char note[640];
    const char *before = proven_path(c, n, nccl, 1, &usual, &err);
    const char *path = proven_path(c, n, nccl, c->run_long ? 50 : 5, &compared, &err);
    bool ok = *path && strcmp(path, before) == 0 && compared > usual;
    snprintf(note, sizeof note, "%s after the usual rounds, then %s%s%s", before, path, err.text[0] ? ": " : "",
             err.text);
    ql_check_end(
        c, &(ql_check_case){.outcome = ok ? QL_CHECK_PASSED : QL_CHECK_FAILED, .compared = compared, .note = note});
}

/* ---- all ------------------------------------------------------------------------------------------------------------- */

void ql_check_collectives(ql_check *c, const char *check) {
    static const struct {
        void (*run)(ql_check *c, int32_t n, bool nccl);
        int32_t least; /* lanes it makes sense for */
        bool cuda;     /* on GPUs alone */
    } groups[] = {{sizes, 1, false},  {steps, 1, false},      {recorded, 1, true},     {proof, 2, true},
                  {guards, 1, false}, {two_groups, 2, false}, {abort_group, 2, false}, {deadline_group, 2, false}};
    (void)check; /* the only one of its kind */
    bool cuda = c->kind == QL_DEVICE_CUDA;
    for (int32_t n = ql_check_lanes(c, 0); n; n = ql_check_lanes(c, n)) {
        for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
            if (n < groups[i].least || (groups[i].cuda && !cuda)) {
                continue;
            }
            groups[i].run(c, n, false);
            if (cuda && n > 1 && groups[i].run != guards) {
                groups[i].run(c, n, true);
            }
        }
    }
}
