/* qlane bench: prefill and decode over context.
 *
 * Every context is measured in processes of its own, forked before this one has touched a device, so that each run pays for
 * opening, loading and first launches as a user does; medians are of such runs. One process before them measures the
 * phases, which slows it down and is kept out of the speeds; it is also the one to find out what cannot run. Steps of several
 * sequences, or of several rows of one, are timed by others, whose engines are larger. A process hands its numbers over a
 * pipe as JSON.
 */
#include "runtime/cli/cli.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

enum { MAX_CONTEXTS = 32, MAX_TOGETHER = 64, MOST_COUNTS = 16 };
enum { DEFAULT_N = 128, DEFAULT_RUNS = 3, MAX_RUNS = 99, PROFILED_N = 17, WARM_UP_CHUNKS = 2 };

/* Loading code takes tenths of a second. A first request that takes this long shows nothing of it, and is not repeated. */
static const double long_request_s = 10;

/* Numbers asked for, each of which is timed by itself; most: 1 where there are none. */
struct counts {
    int32_t v[MOST_COUNTS], n, most;
};

typedef struct bench {
    const ql_cli_args *args;
    char model[4096];
    char *kernels;
    ql_options opt;
    ql_checkpoint *ckpt;
    ql_checkpoint_info info;
    ql_plan plan;
    int32_t context[MAX_CONTEXTS], runs[MAX_CONTEXTS], n_context;
    struct counts together, rows; /* sequences that generate at once; rows of one in a step */
    int32_t n;
    double embed_bytes;                         /* of one row of the embedding */
    char prompt_precision[8], gen_precision[8]; /* in use */
} bench;

/* ---- one process --------------------------------------------------------------------------------------------------- */

/* Ids of no meaning, the same for every run: the model's cost does not depend on them. */
static int32_t *make_ids(const bench *b, const ql_engine *engine, int32_t n) {
    const ql_tokenizer *tokenizer = ql_engine_tokenizer(engine);
    uint64_t limit = (uint64_t)(tokenizer ? ql_tokenizer_size(tokenizer) : b->info.vocab), x = 88172645463325252u;
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    for (int32_t i = 0; ids && i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        ids[i] = (int32_t)(x % limit);
    }
    return ids;
}

static ql_result *ask(ql_engine *engine, const int32_t *ids, int32_t n_ids, int32_t n, ql_event_fn callback, void *user,
                      ql_error *err) {
    ql_request req = ql_request_default();
    ql_result *res = NULL;
    ql_request_id id;
    req.ids = ids;
    req.n_ids = n_ids;
    req.max_new = n;
    req.model_sampling = 0;
    req.ignore_eos = 1;
    if (ql_submit(engine, &req, callback, user, &id, err) != QL_OK || ql_wait(engine, id, &res, err) != QL_OK) {
        ql_result_free(res);
        return NULL;
    }
    return res;
}

static json_t *number(double v) { return v >= 0 ? json_real(v) : json_null(); }
static json_t *text(const char *s) { return s[0] ? json_string(s) : json_null(); }
static json_t *whole(int64_t v) { return v >= 0 ? json_integer(v) : json_null(); }

static json_t *phases_between(const ql_stats *before, const ql_stats *after, int32_t n_step) {
    json_t *out = json_object();
    for (int32_t i = 0; i < after->n_phases; i++) {
        double ms = after->phase[i].ms - before->phase[i].ms;
        json_object_set_new(out, after->phase[i].name, json_real(ms / n_step));
    }
    return out;
}

static json_t *lane_json(ql_engine *engine, const ql_stats *st, int32_t i) {
    ql_lane_info info = {.size = sizeof info};
    const ql_lane_stats *l = &st->lane[i];
    ql_engine_lane_info(engine, i, &info);
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I, "
                     "s:I, s:I, s:I, "
                     "s:I}",
                     "device", text(l->device), "name", text(info.name), "bus", text(info.bus), "driver",
                     text(info.driver), "cuda_driver", text(info.cuda_driver), "cuda_runtime", text(info.cuda_runtime),
                     "nccl", text(info.nccl), "link", text(info.link), "n_sm", whole(info.n_sm), "sm_mhz",
                     whole(info.sm_mhz), "sm_max_mhz", whole(info.sm_max_mhz), "memory_mhz", whole(info.memory_mhz),
                     "temperature_c", whole(info.temperature_c), "power_w", number(info.power_w), "power_limit_w",
                     number(info.power_limit_w), "stream_bytes_per_s", number(info.stream_bytes_per_s), "memory_bytes",
                     whole(info.memory_bytes ? (int64_t)info.memory_bytes : -1), "weight_bytes",
                     (json_int_t)l->weight_bytes, "scale_bytes", (json_int_t)l->scale_bytes, "kv_bytes",
                     (json_int_t)l->kv_bytes, "state_bytes", (json_int_t)l->state_bytes, "workspace_bytes",
                     (json_int_t)l->workspace_bytes, "context_bytes", (json_int_t)l->context_bytes);
}

static double rate(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

/* Cold and warm request at one context; speeds are the warm one's. */
static json_t *measure_speed(const bench *b, ql_engine *engine, int32_t ctx, const int32_t *ids, ql_error *err) {
    ql_result *cold = ask(engine, ids, ctx, b->n, NULL, NULL, err);
    const bool once = cold && cold->first_token_s > long_request_s;
    ql_result *warm = cold && !once ? ask(engine, ids, ctx, b->n, NULL, NULL, err) : cold;
    ql_stats *st = calloc(1, sizeof *st);
    json_t *out = NULL;
    if (warm && st) {
        st->size = sizeof *st;
        ql_engine_stats(engine, st);
        json_t *lanes = json_array(), *open = json_object();
        for (int32_t i = 0; i < st->n_lanes; i++) {
            json_array_append_new(lanes, lane_json(engine, st, i));
        }
        for (int32_t i = 0; i < st->n_open; i++) {
            json_object_set_new(open, st->open[i].name, json_real(st->open[i].ms));
        }
        out = json_pack("{s:f, s:o, s:f, s:o, s:f, s:f, s:i, s:s, s:o}", "load_s", st->load_s, "load_ms", open,
                        "first_token_cold_s", cold->first_token_s, "first_token_warm_s",
                        number(once ? -1 : warm->first_token_s), "prefill_tok_s", rate(warm->n_prompt, warm->prompt_s),
                        "decode_tok_s", rate(warm->n_ids - 1, warm->decode_s), "n_lanes", st->n_lanes, "device_kind",
                        st->device == QL_DEVICE_CUDA ? "cuda" : "host", "lanes", lanes);
    }
    ql_result_free(once ? NULL : warm);
    ql_result_free(cold);
    free(st);
    return out;
}

/* Statistics at the first generated id. */
typedef struct first_id {
    ql_engine *engine;
    ql_stats *stats;
    bool seen;
} first_id;

static void on_event(void *user, const ql_event *event) {
    first_id *f = user;
    if (event->kind == QL_EVENT_TOKEN && !f->seen) {
        f->seen = true;
        ql_engine_stats(f->engine, f->stats);
    }
}

/* Milliseconds of each phase: of the prompt, and of one generated id. A first, short request is not counted: code is loaded
 * then. */
static json_t *measure_phases(const bench *b, ql_engine *engine, int32_t ctx, const int32_t *ids, int32_t n,
                              ql_error *err) {
    const int32_t some = WARM_UP_CHUNKS * b->opt.chunk;
    ql_stats *st = calloc(3, sizeof *st); /* before, at the first id, at the end */
    first_id first = {.engine = engine, .stats = &st[1]};
    ql_result *res = st ? ask(engine, ids, ctx < some ? ctx : some, 2, NULL, NULL, err) : NULL;
    json_t *out = NULL;
    if (res) {
        st[0].size = st[1].size = st[2].size = sizeof *st;
        ql_result_free(res);
        ql_engine_stats(engine, &st[0]);
        res = ask(engine, ids, ctx, n, on_event, &first, err);
    }
    if (res) {
        ql_engine_stats(engine, &st[2]);
        out = json_pack("{s:o, s:o, s:i, s:s, s:s}", "prefill_ms", phases_between(&st[0], &st[1], 1), "decode_ms",
                        phases_between(&st[1], &st[2], n - 1), "n_lanes", st[2].n_lanes, "prompt_precision",
                        ql_cli_precision_name(st[2].prompt_precision), "gen_precision",
                        ql_cli_precision_name(st[2].gen_precision));
    }
    ql_result_free(res);
    free(st);
    return out;
}

/* ---- sequences that generate together ------------------------------------------------------------------------------ */

/* Requests of one round. Events come from one thread. The last sequence is the last whose prompt is through; from its first id
 * to its last all others generate too. */
typedef struct round {
    int32_t n, n_started, n_ended;
    int32_t n_step; /* between the two times */
    struct timespec first, last;
} round_of;

typedef struct member {
    round_of *round;
    int32_t n_id;
    bool last;
} member;

static void on_member(void *user, const ql_event *event) {
    member *m = user;
    round_of *r = m->round;
    if (event->kind == QL_EVENT_TOKEN && m->n_id++ == 0) {
        m->last = ++r->n_started == r->n;
        clock_gettime(CLOCK_MONOTONIC, &r->first);
    } else if (event->kind == QL_EVENT_TOKEN && m->last && r->n_ended == 0) {
        clock_gettime(CLOCK_MONOTONIC, &r->last);
        r->n_step++;
    } else if (event->kind == QL_EVENT_END && !m->last) {
        r->n_ended++;
    }
}

/* Ids that a sequence may write before the one behind it has its first: a prompt step and a step of generation take turns. */
static int32_t head_start(const bench *b, int32_t ctx) { return ctx / b->opt.chunk + 2; }

static double ms_between(const struct timespec *from, const struct timespec *to) {
    return 1e3 * (double)(to->tv_sec - from->tv_sec) + 1e-6 * (double)(to->tv_nsec - from->tv_nsec);
}

/* Milliseconds of a step in which n sequences generate; below 0 where they did not meet. */
static double step_of(const bench *b, ql_engine *engine, int32_t ctx, const int32_t *ids, int32_t n, ql_error *err) {
    round_of r = {.n = n};
    member m[MAX_TOGETHER];
    ql_request_id id[MAX_TOGETHER];
    int32_t n_asked = 0;
    bool failed = false;
    for (; n_asked < n && !failed; n_asked++) {
        ql_request req = ql_request_default();
        req.ids = ids + (int64_t)n_asked * ctx;
        req.n_ids = ctx;
        req.max_new = b->n + (n - 1 - n_asked) * head_start(b, ctx);
        req.model_sampling = 0;
        req.ignore_eos = 1;
        m[n_asked] = (member){.round = &r};
        failed = ql_submit(engine, &req, on_member, &m[n_asked], &id[n_asked], err) != QL_OK;
    }
    for (int32_t i = 0; i < n_asked - failed; i++) {
        ql_result *res = NULL;
        failed |= ql_wait(engine, id[i], &res, err) != QL_OK;
        ql_result_free(res);
    }
    if (failed) {
        return -1;
    }
    return r.n_step > 0 ? ms_between(&r.first, &r.last) / r.n_step : -1;
}

/* Ids of one sequence whose steps have n rows: one of the prompt, then n a step. */
static int64_t ids_of_rows(const bench *b, int32_t n) { return 1 + (int64_t)n * b->n; }

static void on_row(void *user, const ql_event *event) {
    round_of *r = user;
    if (event->kind == QL_EVENT_TOKEN) {
        clock_gettime(CLOCK_MONOTONIC, r->n_started++ == 0 ? &r->first : &r->last);
    }
}

/* Milliseconds of a step of n rows of one sequence; below 0 on failure. */
static double step_of_rows(const bench *b, ql_engine *engine, int32_t ctx, const int32_t *ids, int32_t n,
                           ql_error *err) {
    round_of r = {0};
    ql_request req = ql_request_default();
    ql_request_id id;
    ql_result *res = NULL;
    req.ids = ids;
    req.n_ids = ctx;
    req.max_new = (int32_t)ids_of_rows(b, n);
    req.model_sampling = 0;
    req.ignore_eos = 1;
    req.step_rows = n;
    bool failed = ql_submit(engine, &req, on_row, &r, &id, err) != QL_OK || ql_wait(engine, id, &res, err) != QL_OK;
    ql_result_free(res);
    return failed ? -1 : ms_between(&r.first, &r.last) / b->n;
}

typedef double (*step_fn)(const bench *b, ql_engine *engine, int32_t ctx, const int32_t *ids, int32_t n, ql_error *err);

/* Each number twice, since steps of a shape are recorded when it comes up first. */
static json_t *measure_steps(const bench *b, ql_engine *engine, int32_t ctx, const int32_t *ids,
                             const struct counts *counts, step_fn step, ql_error *err) {
    json_t *steps = json_array();
    for (int32_t i = 0; i < counts->n; i++) {
        double ms = step(b, engine, ctx, ids, counts->v[i], err);
        ms = ms < 0 ? ms : step(b, engine, ctx, ids, counts->v[i], err);
        if (ms < 0) {
            json_decref(steps);
            return NULL;
        }
        json_array_append_new(steps, json_real(ms));
    }
    return json_pack("{s:o}", "step_ms", steps);
}

/* ---- a process ------------------------------------------------------------------------------------------------------- */

enum what { SPEED, PHASES, TOGETHER, ROWS };

static int measure(const bench *b, int32_t ctx, enum what what, int fd) {
    ql_error err = {0};
    ql_engine *engine = NULL;
    ql_cli_logger logger = {0};
    ql_options opt = b->opt;
    const int32_t n = what == TOGETHER ? b->together.most : 1;
    opt.max_seqs = what == ROWS ? b->rows.most : n;
    opt.ctx = ctx + (what == ROWS ? (int32_t)ids_of_rows(b, b->rows.most) : b->n + (n - 1) * head_start(b, ctx));
    opt.log = ql_cli_log;
    opt.log_user = &logger;
    opt.measure = what == SPEED;
    opt.profile = what == PHASES;
    if (ql_engine_open(&engine, &opt, &err) != QL_OK) {
        return ql_cli_fail_err(&err);
    }
    int32_t *ids = make_ids(b, engine, n * ctx);
    json_t *out = !ids               ? NULL
                  : what == PHASES   ? measure_phases(b, engine, ctx, ids, b->n < PROFILED_N ? b->n : PROFILED_N, &err)
                  : what == TOGETHER ? measure_steps(b, engine, ctx, ids, &b->together, step_of, &err)
                  : what == ROWS     ? measure_steps(b, engine, ctx, ids, &b->rows, step_of_rows, &err)
                                     : measure_speed(b, engine, ctx, ids, &err);
    int rc = 0;
    if (!out) {
        rc = err.status ? ql_cli_fail_err(&err)
             : what == TOGETHER
                 ? ql_cli_fail(QL_EXIT_FAILED, "--together: sequences ended before all of them generated")
                 : ql_cli_fail(QL_EXIT_MEMORY, "out of memory for a measurement");
    } else if (json_dumpfd(out, fd, 0) != 0) {
        rc = ql_cli_fail(QL_EXIT_FAILED, "cannot hand over a measurement");
    }
    json_decref(out);
    free(ids);
    ql_engine_close(&engine);
    return rc;
}

/* Runs one measurement in a process of its own. Returns 0 and its object, or the exit code of the process, which has said
 * why. */
static int in_process(const bench *b, int32_t ctx, enum what what, json_t **out) {
    int fd[2], status = 0;
    if (pipe(fd) != 0) {
        return ql_cli_fail(QL_EXIT_FAILED, "cannot make a pipe: %s", strerror(errno));
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(fd[0]);
        _exit(measure(b, ctx, what, fd[1]));
    }
    close(fd[1]);
    *out = pid > 0 ? json_loadfd(fd[0], JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    close(fd[0]);
    if (pid < 0) {
        return ql_cli_fail(QL_EXIT_FAILED, "cannot start a process: %s", strerror(errno));
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    int rc = WIFEXITED(status) ? WEXITSTATUS(status) : QL_EXIT_FAILED;
    if (WIFSIGNALED(status)) {
        rc = ql_cli_fail(QL_EXIT_FAILED, "a measuring process was killed by signal %d", WTERMSIG(status));
    } else if (rc == 0 && !*out) {
        rc = ql_cli_fail(QL_EXIT_FAILED, "a measuring process handed nothing over");
    }
    if (rc) {
        json_decref(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- all of them ----------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of the runs that have the figure, or -1. */
static double median_of(const json_t *runs, const char *key) {
    double v[MAX_RUNS];
    size_t n = 0, i;
    const json_t *run;
    json_array_foreach(runs, i, run) {
        const json_t *figure = json_object_get(run, key);
        if (json_is_number(figure)) {
            v[n++] = json_number_value(figure);
        }
    }
    qsort(v, n, sizeof *v, by_value);
    return n == 0 ? -1 : n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

/* Bytes that one generated id reads and writes on the fullest lane, halfway through: weights and scales but the embedding's
 * rows, keys and values of the context, and the state twice. */
static double decode_bytes(const bench *b, const json_t *lanes, int32_t ctx) {
    double most = 0;
    size_t i;
    const json_t *l;
    json_array_foreach(lanes, i, l) {
        double v = json_number_value(json_object_get(l, "weight_bytes")) +
                   json_number_value(json_object_get(l, "scale_bytes")) +
                   2 * json_number_value(json_object_get(l, "state_bytes")) +
                   (double)b->plan.kv_bytes_per_token * (ctx + 0.5 * b->n);
        const ql_lane_plan *p = &b->plan.lane[i];
        v -= b->info.tied_embeddings ? 0 : b->embed_bytes * (p->vocab1 - p->vocab0);
        most = v > most ? v : most;
    }
    return most;
}

/* Medians of steps, each beside that of the first number asked for; `what` names the numbers. */
static json_t *steps_of(const struct counts *counts, const char *what, const json_t *rounds) {
    json_t *out = json_array();
    double first = -1;
    for (int32_t i = 0; i < counts->n; i++) {
        json_t *one = json_array(), *r;
        size_t j;
        json_array_foreach((json_t *)rounds, j, r) {
            json_array_append_new(one,
                                  json_pack("{s:O}", "ms", json_array_get(json_object_get(r, "step_ms"), (size_t)i)));
        }
        double ms = median_of(one, "ms");
        first = i == 0 ? ms : first;
        json_array_append_new(out, json_pack("{s:i, s:f, s:f, s:f}", what, counts->v[i], "step_ms", ms, "tok_s",
                                             1e3 * counts->v[i] / ms, "of_first", ms / first));
        json_decref(one);
    }
    return out;
}

/* What all runs at one context give. `runs` and `phases` are taken over. */
static json_t *point(const bench *b, int32_t ctx, json_t *runs, json_t *phases, const json_t *together,
                     const json_t *rows) {
    const json_t *lanes = json_object_get(json_array_get(runs, 0), "lanes");
    double decode = median_of(runs, "decode_tok_s"), bytes = decode_bytes(b, lanes, ctx), stream = -1;
    size_t i;
    const json_t *l;
    json_array_foreach(lanes, i, l) { /* the slowest lane's is the ceiling */
        double s = json_number_value(json_object_get(l, "stream_bytes_per_s"));
        stream = stream < 0 || s < stream ? s : stream;
    }
    return json_pack(
        "{s:i, s:i, s:f, s:f, s:o, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:o, s:o}", "context", ctx, "generated",
        b->n, "load_s", median_of(runs, "load_s"), "first_token_cold_s", median_of(runs, "first_token_cold_s"),
        "first_token_warm_s", number(median_of(runs, "first_token_warm_s")), "prefill_tok_s",
        median_of(runs, "prefill_tok_s"), "decode_tok_s", decode, "decode_bytes", bytes, "decode_bytes_per_s",
        bytes * decode, "stream_bytes_per_s", number(stream), "decode_share_of_stream",
        number(stream > 0 ? bytes * decode / stream : -1), "phases", phases, "together",
        steps_of(&b->together, "sequences", together), "rows", steps_of(&b->rows, "rows", rows), "runs", runs);
}

/* Keys and values of a token, and each lane's rows of the embedding, at the lane count that runs. */
static int plan_lanes(bench *b, int32_t n_lane) {
    ql_error err = {0};
    ql_options opt = b->opt;
    opt.devices = NULL;
    opt.device = QL_DEVICE_HOST;
    opt.lanes = n_lane;
    b->plan.size = sizeof b->plan;
    return ql_checkpoint_plan(b->ckpt, &opt, &b->plan, &err) == QL_OK ? 0 : ql_cli_fail_err(&err);
}

/* Steps of the numbers asked for, if any were, at context c: what each of its runs gives goes behind `rounds`. */
static int time_steps(const bench *b, int32_t c, enum what what, const struct counts *counts, json_t *rounds) {
    int rc = 0;
    json_t *one;
    for (int32_t r = 0; r < b->runs[c] && rc == 0 && counts->n > 0; r++) {
        rc = in_process(b, b->context[c], what, &one);
        if (rc == 0) {
            json_array_append_new(rounds, one);
        }
    }
    return rc;
}

static int measure_all(bench *b, json_t *points) {
    int rc = 0;
    for (int32_t c = 0; c < b->n_context && rc == 0; c++) {
        json_t *runs = json_array(), *together = json_array(), *rows = json_array(), *phases = NULL, *one = NULL;
        rc = in_process(b, b->context[c], PHASES, &phases);
        if (rc == 0 && b->plan.n_lanes == 0) {
            snprintf(b->prompt_precision, sizeof b->prompt_precision, "%s",
                     json_string_value(json_object_get(phases, "prompt_precision")));
            snprintf(b->gen_precision, sizeof b->gen_precision, "%s",
                     json_string_value(json_object_get(phases, "gen_precision")));
            rc = plan_lanes(b, (int32_t)json_integer_value(json_object_get(phases, "n_lanes")));
        }
        for (int32_t r = 0; r < b->runs[c] && rc == 0; r++) {
            rc = in_process(b, b->context[c], SPEED, &one);
            if (rc == 0) {
                ql_cli_say("context %d, run %d of %d: prefill %.1f tok/s, first token %.3f s, decode %.1f tok/s",
                           b->context[c], r + 1, b->runs[c], json_real_value(json_object_get(one, "prefill_tok_s")),
                           json_real_value(json_object_get(one, "first_token_cold_s")),
                           json_real_value(json_object_get(one, "decode_tok_s")));
                json_array_append_new(runs, one);
            }
        }
        rc = rc ? rc : time_steps(b, c, TOGETHER, &b->together, together);
        rc = rc ? rc : time_steps(b, c, ROWS, &b->rows, rows);
        if (rc == 0) {
            json_array_append_new(points, point(b, b->context[c], runs, phases, together, rows));
        } else {
            json_decref(runs);
            json_decref(phases);
        }
        json_decref(together);
        json_decref(rows);
    }
    return rc;
}

/* ---- what was measured --------------------------------------------------------------------------------------------- */

/* CRC-32 of a file, or false. */
static bool file_crc(const char *path, uint32_t *crc, uint64_t *bytes) {
    FILE *f = fopen(path, "rb");
    unsigned char buf[1 << 16];
    uLong sum = crc32(0, NULL, 0);
    size_t n;
    *bytes = 0;
    while (f && (n = fread(buf, 1, sizeof buf, f)) > 0) {
        sum = crc32_z(sum, buf, n);
        *bytes += n;
    }
    *crc = (uint32_t)sum;
    return f && fclose(f) == 0;
}

/* The tensors' checksums, by a thread for every core. */
typedef struct hashing {
    const ql_checkpoint *ckpt;
    int32_t n, next; /* next: atomic */
    uint32_t *crc;
    int32_t failed; /* atomic */
} hashing;

static void *hash_some(void *arg) {
    hashing *h = arg;
    for (int32_t i; (i = __atomic_fetch_add(&h->next, 1, __ATOMIC_RELAXED)) < h->n;) {
        if (ql_checkpoint_tensor_crc(h->ckpt, i, &h->crc[i], NULL) != QL_OK) {
            __atomic_store_n(&h->failed, 1, __ATOMIC_RELAXED);
        }
    }
    return NULL;
}

/* CRC-32 over name and CRC-32 of every tensor in name order, as `qlane inspect --crc` lists them; null where one cannot be
 * read. */
static json_t *checkpoint_hash(const bench *b) {
    enum { MAX_THREADS = 32 };
    pthread_t thread[MAX_THREADS];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    hashing h = {.ckpt = b->ckpt, .n = b->info.n_tensors};
    h.crc = calloc((size_t)h.n + 1, sizeof *h.crc);
    if (!h.crc) {
        return json_null();
    }
    int n = 0;
    while (n + 1 < cores && n < MAX_THREADS && pthread_create(&thread[n], NULL, hash_some, &h) == 0) {
        n++;
    }
    hash_some(&h);
    while (n > 0) {
        pthread_join(thread[--n], NULL);
    }
    uLong sum = crc32(0, NULL, 0);
    for (int32_t i = 0; i < h.n; i++) {
        ql_tensor_info t;
        ql_checkpoint_get_tensor(b->ckpt, i, &t);
        sum = crc32_z(sum, (const unsigned char *)t.name, strlen(t.name));
        sum = crc32_z(sum, (const unsigned char *)&h.crc[i], sizeof h.crc[i]);
    }
    free(h.crc);
    char hex[9];
    snprintf(hex, sizeof hex, "%08lx", sum & 0xffffffff);
    return h.failed ? json_null() : json_string(hex);
}

static json_t *provenance(const bench *b) {
    char host[128] = "", when[32] = "", binary[9] = "";
    uint32_t crc;
    uint64_t bytes = 0;
    time_t now = time(NULL);
    struct tm utc;
    gethostname(host, sizeof host - 1);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    if (file_crc("/proc/self/exe", &crc, &bytes)) {
        snprintf(binary, sizeof binary, "%08x", crc);
    }
    return json_pack("{s:s, s:o, s:I, s:s, s:s, s:o, s:s, s:I, s:i, s:s, s:s, s:s, s:s, s:s, s:s}", "version",
                     ql_version(), "binary_crc32", text(binary), "binary_bytes", (json_int_t)bytes, "checkpoint",
                     b->info.dir, "scheme", b->info.scheme, "checkpoint_crc32", checkpoint_hash(b), "architecture",
                     b->info.architecture, "checkpoint_bytes", (json_int_t)(b->info.weight_bytes + b->info.scale_bytes),
                     "chunk", b->opt.chunk, "kv", ql_cli_kv_name(b->opt.kv), "prompt_precision", b->prompt_precision,
                     "gen_precision", b->gen_precision, "order", ql_cli_order_name(b->opt.order), "date", when,
                     "machine", host);
}

/* ---- the command --------------------------------------------------------------------------------------------------- */

/* Ids generated behind a prompt at most, all measurements taken together. */
static int64_t most_ids(const bench *b, int32_t ctx) {
    int64_t together = b->n + (int64_t)(b->together.most - 1) * head_start(b, ctx);
    int64_t rows = b->rows.n > 0 ? ids_of_rows(b, b->rows.most) : 0;
    return together > rows ? together : rows;
}

/* Contexts asked for, or the usual ones as far as the model goes. */
static int choose_contexts(bench *b) {
    static const int32_t usual[] = {512, 8192, 32768, 131072};
    const ql_cli_ints *asked = &b->args->contexts;
    if (b->args->has_contexts && (asked->n < 1 || asked->n > MAX_CONTEXTS)) {
        return ql_cli_fail(QL_EXIT_USAGE, "--contexts wants 1 to %d lengths, not %d", MAX_CONTEXTS, asked->n);
    }
    for (int32_t i = 0; i < asked->n; i++) {
        const int64_t n = most_ids(b, asked->v[i]);
        if (asked->v[i] < 1 || asked->v[i] > b->info.max_ctx - n) {
            return ql_cli_fail(QL_EXIT_USAGE, "--contexts: %d and %lld generated ids; the model's context is %d",
                               asked->v[i], (long long)n, b->info.max_ctx);
        }
        b->context[b->n_context++] = asked->v[i];
    }
    for (int32_t i = 0; i < 4 && !b->args->has_contexts; i++) {
        if (usual[i] <= b->info.max_ctx - most_ids(b, usual[i])) {
            b->context[b->n_context++] = usual[i];
        } else {
            ql_cli_say("context %d is left out: with %lld generated ids it is longer than the model's %d", usual[i],
                       (long long)most_ids(b, usual[i]), b->info.max_ctx);
        }
    }
    return b->n_context ? 0 : ql_cli_fail(QL_EXIT_USAGE, "no context fits: the model's is %d", b->info.max_ctx);
}

/* The numbers of --together or --rows; has: it was given. */
static int choose_counts(struct counts *out, const char *option, bool has, const ql_cli_ints *asked) {
    if (has && (asked->n < 1 || asked->n > MOST_COUNTS)) {
        return ql_cli_fail(QL_EXIT_USAGE, "%s wants 1 to %d numbers, not %d", option, MOST_COUNTS, asked->n);
    }
    out->most = 1;
    for (int32_t i = 0; i < asked->n; i++) {
        if (asked->v[i] < 1 || asked->v[i] > MAX_TOGETHER) {
            return ql_cli_fail(QL_EXIT_USAGE, "%s wants numbers from 1 to %d, not %d", option, MAX_TOGETHER,
                               asked->v[i]);
        }
        out->v[out->n++] = asked->v[i];
        out->most = asked->v[i] > out->most ? asked->v[i] : out->most;
    }
    return 0;
}

static int choose_runs(bench *b) {
    const ql_cli_ints *asked = &b->args->runs;
    if (b->args->has_runs && asked->n != 1 && asked->n != b->n_context) {
        return ql_cli_fail(QL_EXIT_USAGE, "--runs wants one number, or one for each of %d contexts, not %d",
                           b->n_context, asked->n);
    }
    for (int32_t c = 0; c < b->n_context; c++) {
        b->runs[c] = !b->args->has_runs ? DEFAULT_RUNS : asked->v[asked->n == 1 ? 0 : c];
        if (b->runs[c] < 1 || b->runs[c] > MAX_RUNS) {
            return ql_cli_fail(QL_EXIT_USAGE, "--runs wants numbers from 1 to %d, not %d", MAX_RUNS, b->runs[c]);
        }
    }
    return 0;
}

static void find_embedding(bench *b) {
    ql_tensor_info t;
    for (int32_t i = 0; ql_checkpoint_get_tensor(b->ckpt, i, &t) == QL_OK; i++) {
        const char *end = strstr(t.name, "embed_tokens.weight");
        if (end && strcmp(t.role, "ignored") != 0 && t.shape[0] > 0) {
            b->embed_bytes = (double)t.bytes / (double)t.shape[0];
        }
    }
}

static int run_bench(bench *b, json_t **result) {
    const ql_cli_args *args = b->args;
    ql_error err = {0};
    int rc = ql_cli_fill_options(args, &b->opt, &b->kernels);
    rc = rc ? rc : ql_cli_model(args, b->model, sizeof b->model);
    rc = rc || !args->out ? rc : ql_cli_folder("--out", args->out);
    if (rc) {
        return rc;
    }
    b->opt.model = b->model;
    b->n = args->n > 0 ? (int32_t)args->n : DEFAULT_N;
    if (b->n < 2) {
        return ql_cli_fail(QL_EXIT_USAGE, "-n wants 2 or more here: decode is timed from the first id to the last");
    }
    if (ql_checkpoint_open(&b->ckpt, b->model, &err) != QL_OK) {
        return ql_cli_fail_err(&err);
    }
    ql_checkpoint_get_info(b->ckpt, &b->info);
    find_embedding(b);
    rc = choose_counts(&b->together, "--together", args->has_together, &args->together);
    rc = rc ? rc : choose_counts(&b->rows, "--rows", args->has_rows, &args->rows);
    rc = rc ? rc : choose_contexts(b);
    rc = rc ? rc : choose_runs(b);
    json_t *points = json_array();
    rc = rc ? rc : measure_all(b, points);
    if (rc) {
        json_decref(points);
        return rc;
    }
    *result = json_pack("{s:o, s:o}", "provenance", provenance(b), "points", points);
    return 0;
}

int ql_cli_bench(const ql_cli_args *args) {
    bench *b = calloc(1, sizeof *b);
    json_t *result = NULL;
    if (!b) {
        return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for the bench");
    }
    b->args = args;
    b->opt = ql_options_default();
    int rc = run_bench(b, &result);
    if (rc == 0 && args->out) {
        rc = ql_cli_bench_write(result, args->out);
    }
    if (rc == 0 && !args->json) {
        ql_cli_bench_table(result);
        rc = ql_cli_flush();
    } else if (rc == 0) {
        rc = ql_cli_print_json(json_incref(result));
    }
    json_decref(result);
    ql_checkpoint_close(&b->ckpt);
    free(b->kernels);
    free(b);
    return rc;
}
