/* qlane run: one prompt, one answer, streamed.
 *
 * Text is written by the engine's callback as it appears. Ctrl-C is a flag that the callback looks at on each event:
 * the first one cancels the request, after which everything ends as usual; the second kills, because the handler is
 * installed for one signal only. While weights load the signal keeps its default action.
 */
#include "runtime/cli/cli.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct stream {
    ql_engine *engine;
    bool silent, ids; /* --json; no tokenizer: ids in place of text */
    bool ended_line;  /* what was written ends with a newline */
    int64_t n_id;
    int write_errno; /* why standard output failed, or 0 */
} stream;

typedef struct run {
    const ql_cli_args *args;
    char model[4096];
    ql_checkpoint_info info;
    char *prompt, *kernels;
    size_t prompt_bytes;
    ql_cli_ints ids;     /* of --ids and --ids-file; the former's are borrowed */
    int32_t *prompt_ids; /* of a --dump run */
    ql_engine *engine;
    ql_cli_dump *dump;
    ql_result *result;
    ql_stats *stats;
    ql_request request;
    ql_cli_logger logger;
    ql_cli_bar bar;
    stream out;
} run;

/* Written by the signal handler, so it must be a global. */
static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig) {
    (void)sig;
    interrupted = 1;
}

/* ---- output as it appears --------------------------------------------------------------------------------------- */

static void on_event(void *user, const ql_event *event) {
    stream *s = user;
    if (interrupted) {
        ql_cancel(s->engine, event->request);
    }
    if (s->silent || s->write_errno) {
        return;
    }
    if (s->ids) {
        if (event->kind != QL_EVENT_TOKEN) {
            return;
        }
        printf("%s%d", s->n_id++ ? "," : "", event->id);
    } else if (event->kind != QL_EVENT_PROMPT && event->text_bytes) {
        fwrite(event->text, 1, event->text_bytes, stdout);
        s->ended_line = event->text[event->text_bytes - 1] == '\n';
    }
    if (fflush(stdout) != 0) {
        s->write_errno = errno ? errno : EIO;
        ql_cancel(s->engine, event->request);
    }
}

/* ---- arguments ------------------------------------------------------------------------------------------------------ */

static int check_args(const ql_cli_args *args) {
    int n_prompt = (args->prompt != NULL) + (args->file != NULL) + args->has_ids + (args->ids_file != NULL);
    if (n_prompt != 1) {
        return ql_cli_fail(QL_EXIT_USAGE,
                           n_prompt ? "-p, -f, --ids and --ids-file exclude each other"
                                    : "no prompt: give -p TEXT, -f FILE (- is standard input), --ids or --ids-file");
    }
    if (args->has_ids ? args->ids.n == 0 : args->prompt && !args->prompt[0]) {
        return ql_cli_fail(QL_EXIT_USAGE, "the prompt is empty");
    }
    if (args->mtp) {
        return ql_cli_fail(QL_EXIT_USAGE,
                           "--spec mtp:%lld: speculation is not part of this version; accepted is no --spec, and plan "
                           "takes it to count the layer",
                           (long long)args->mtp);
    }
    return args->dump ? ql_cli_folder("--dump", args->dump) : 0;
}

/* The model's own defaults for what the command line leaves open. The library takes either all three of the model's
 * values or none, so a partial override needs them here. */
static void model_sampling(const char *dir, ql_sampling *s) {
    char path[1024];
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    json_t *sample = json_object_get(root, "do_sample");
    json_t *temp = json_object_get(root, "temperature"), *top_k = json_object_get(root, "top_k"),
           *top_p = json_object_get(root, "top_p");
    if (json_is_number(temp) && !json_is_false(sample)) {
        s->temperature = (float)json_number_value(temp);
    }
    if (json_is_integer(top_k)) {
        s->top_k = (int32_t)json_integer_value(top_k);
    }
    if (json_is_number(top_p)) {
        s->top_p = (float)json_number_value(top_p);
    }
    json_decref(root);
}

static void fill_sampling(const ql_cli_args *args, const char *dir, ql_request *req) {
    ql_sampling *s = &req->sampling;
    if (!isnan(args->temp) || args->top_k >= 0 || !isnan(args->top_p)) {
        req->model_sampling = 0;
        model_sampling(dir, s);
        s->temperature = isnan(args->temp) ? s->temperature : (float)args->temp;
        s->top_k = args->top_k < 0 ? s->top_k : (int32_t)args->top_k;
        s->top_p = isnan(args->top_p) ? s->top_p : (float)args->top_p;
    }
    s->min_p = isnan(args->min_p) ? s->min_p : (float)args->min_p;
    s->repetition_penalty = isnan(args->rep_pen) ? s->repetition_penalty : (float)args->rep_pen;
    s->presence_penalty = isnan(args->presence) ? s->presence_penalty : (float)args->presence;
    s->frequency_penalty = isnan(args->frequency) ? s->frequency_penalty : (float)args->frequency;
    if (args->seed >= 0) {
        s->seed = (uint64_t)args->seed;
    } else {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        s->seed = ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) & 0x7fffffff;
    }
}

/* ---- steps of a run --------------------------------------------------------------------------------------------------- */

/* Which lanes, and which context, where the command line left the choice open. */
static void say_choices(const run *r) {
    const ql_stats *st = r->stats;
    const char *plural = st->n_lanes == 1 ? "" : "s";
    if (r->args->device < 0 && !r->args->has_devices) {
        if (st->device == QL_DEVICE_HOST) {
            ql_cli_say("%d host lane%s (%s)", st->n_lanes, plural,
                       strstr(ql_version(), "host only") ? "this build has no CUDA" : "no usable GPU");
        } else {
            ql_cli_say("%d CUDA lane%s (%s)", st->n_lanes, plural,
                       r->args->lanes < 0 ? "every usable GPU that the model allows" : "usable GPUs were found");
        }
    }
    if (r->args->ctx < 0) {
        ql_cli_say("context %d tokens (%s)", st->ctx,
                   st->ctx == r->info.max_ctx ? "the model's limit" : "what fits; the model allows more");
    }
}

static int open_engine(run *r) {
    ql_error err = {0};
    ql_options opt = ql_options_default();
    int rc = ql_cli_fill_options(r->args, &opt, &r->kernels);
    if (rc) {
        return rc;
    }
    ql_checkpoint *checkpoint = NULL;
    if (ql_checkpoint_open(&checkpoint, r->model, &err) != QL_OK) {
        return ql_cli_fail_err(&err);
    }
    ql_checkpoint_get_info(checkpoint, &r->info);
    ql_checkpoint_close(&checkpoint);
    r->logger.info = r->args->stats || r->args->profile;
    opt.model = r->model;
    opt.mtp = r->args->dump && r->info.has_mtp;
    opt.log = ql_cli_log;
    opt.log_user = &r->logger;
    opt.progress = ql_cli_bar_progress;
    opt.progress_user = &r->bar;
    ql_cli_bar_init(&r->bar);
    ql_status status = ql_engine_open(&r->engine, &opt, &err);
    ql_cli_bar_clear(&r->bar);
    if (status != QL_OK) {
        return ql_cli_fail_err(&err);
    }
    r->stats->size = sizeof *r->stats;
    if (ql_engine_stats(r->engine, r->stats) != QL_OK) {
        return ql_cli_fail(QL_EXIT_FAILED, "the engine gives no statistics");
    }
    say_choices(r);
    return 0;
}

/* The prompt as text or ids; always ids with --dump, whose files need the length first. */
static int fill_prompt(run *r) {
    ql_error err = {0};
    ql_request *req = &r->request;
    if (r->ids.n) {
        req->ids = r->ids.v;
        req->n_ids = r->ids.n;
    } else if (r->args->dump && ql_engine_tokenizer(r->engine)) {
        if (ql_tokenizer_encode(ql_engine_tokenizer(r->engine), r->prompt, r->prompt_bytes, &r->prompt_ids, &req->n_ids,
                                &err) != QL_OK) {
            return ql_cli_fail_err(&err);
        }
        req->ids = r->prompt_ids;
    } else {
        req->text = r->prompt;
        req->text_bytes = r->prompt_bytes;
    }
    if (r->args->dump && req->ids) {
        int rc = ql_cli_dump_open(&r->dump, r->args->dump, req->n_ids);
        if (rc) {
            return rc;
        }
        req->probe = ql_cli_dump_probe;
        req->probe_user = r->dump;
    }
    return 0;
}

static int generate(run *r) {
    ql_error err = {0};
    ql_request *req = &r->request;
    ql_request_id id = 0;
    fill_sampling(r->args, r->info.dir, req);
    req->max_new = r->args->n > 0 ? (int32_t)r->args->n : 0;
    req->stop = r->args->stop.v;
    req->n_stop = r->args->stop.n;
    req->crc = r->args->crc;
    req->ignore_eos = r->args->ignore_eos;
    r->out = (stream){.engine = r->engine, .silent = r->args->json, .ids = !ql_engine_tokenizer(r->engine)};
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    if (ql_submit(r->engine, req, on_event, &r->out, &id, &err) != QL_OK ||
        ql_wait(r->engine, id, &r->result, &err) != QL_OK) {
        if (!r->out.silent && !r->out.write_errno && r->out.n_id) {
            putchar('\n'); /* the error line starts on a line of its own */
            fflush(stdout);
        }
        return ql_cli_fail_err(&err);
    }
    return 0;
}

/* ---- what a run tells afterwards ----------------------------------------------------------------------------------- */

static double per_second(double n, double seconds) { return n > 0 && seconds > 0 ? n / seconds : 0; }

static void print_stats(const run *r) {
    const ql_result *res = r->result;
    const ql_stats *st = r->stats;
    int32_t decoded = res->n_ids > 1 ? res->n_ids - 1 : 0;
    char a[32], b[32], c[32], d[32], e[32];
    fprintf(stderr, "load       %10.3f s\n", st->load_s);
    for (int32_t i = 0; i < st->n_open; i++) {
        fprintf(stderr, "%s%s %.3f s%s", i ? "" : "           ", st->open[i].name, st->open[i].ms * 1e-3,
                i + 1 < st->n_open ? ", " : "\n");
    }
    fprintf(stderr, "prompt     %10d tokens  %10.1f tok/s\n", res->n_prompt, per_second(res->n_prompt, res->prompt_s));
    fprintf(stderr, "first id   %10.3f s\n", res->first_token_s);
    fprintf(stderr, "generated  %10d tokens  %10.1f tok/s after the first\n", res->n_ids,
            per_second(decoded, res->decode_s));
    fprintf(stderr, "precision  prompt %s, generated %s\n", ql_cli_precision_name(st->prompt_precision),
            ql_cli_precision_name(st->gen_precision));
    fprintf(stderr, "finish     %10s   seed %llu\n", ql_finish_text(res->finish),
            (unsigned long long)r->request.sampling.seed);
    for (int32_t i = 0; i < st->n_lanes; i++) {
        const ql_lane_stats *l = &st->lane[i];
        fprintf(stderr, "lane %d     %s: weights %s, scales %s, kv %s, state %s, workspace %s", i, l->device,
                ql_cli_bytes(l->weight_bytes, a), ql_cli_bytes(l->scale_bytes, b), ql_cli_bytes(l->kv_bytes, c),
                ql_cli_bytes(l->state_bytes, d), ql_cli_bytes(l->workspace_bytes, e));
        fprintf(stderr, ", context %s; moved in %s, out %s\n", ql_cli_bytes(l->context_bytes, a),
                ql_cli_bytes(l->h2d_bytes, b), ql_cli_bytes(l->d2h_bytes, c));
    }
    for (int32_t i = 0; i < st->n_paths; i++) {
        fprintf(stderr, "path       %-40s %12s calls\n", st->path[i].name, ql_cli_commas(st->path[i].calls, a));
    }
    for (int32_t i = 0; i < st->n_phases && r->args->profile; i++) {
        fprintf(stderr, "phase      %-40s %12.3f ms\n", st->phase[i].name, st->phase[i].ms);
    }
}

static json_t *json_ids(const int32_t *ids, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) {
        json_array_append_new(list, json_integer(ids[i]));
    }
    return list;
}

static json_t *json_lane(const ql_lane_stats *l) {
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "device", l->device, "weight_bytes",
                     (json_int_t)l->weight_bytes, "scale_bytes", (json_int_t)l->scale_bytes, "stored_weight_bytes",
                     (json_int_t)l->stored_weight_bytes, "stored_scale_bytes", (json_int_t)l->stored_scale_bytes,
                     "kv_bytes", (json_int_t)l->kv_bytes, "state_bytes", (json_int_t)l->state_bytes, "workspace_bytes",
                     (json_int_t)l->workspace_bytes, "context_bytes", (json_int_t)l->context_bytes, "h2d_bytes",
                     (json_int_t)l->h2d_bytes, "d2h_bytes", (json_int_t)l->d2h_bytes);
}

static int print_json(const run *r) {
    const ql_result *res = r->result;
    const ql_stats *st = r->stats;
    int32_t decoded = res->n_ids > 1 ? res->n_ids - 1 : 0;
    json_t *logprobs = json_array(), *lanes = json_array(), *paths = json_object(), *phases = json_object(),
           *open = json_object();
    for (int32_t i = 0; i < res->n_ids; i++) {
        json_t *value = json_real((double)res->logprobs[i]); /* NULL where it is not finite */
        json_array_append_new(logprobs, value ? value : json_null());
    }
    for (int32_t i = 0; i < st->n_lanes; i++) {
        json_array_append_new(lanes, json_lane(&st->lane[i]));
    }
    for (int32_t i = 0; i < st->n_paths; i++) {
        json_object_set_new(paths, st->path[i].name, json_integer((json_int_t)st->path[i].calls));
    }
    for (int32_t i = 0; i < st->n_phases; i++) {
        json_object_set_new(phases, st->phase[i].name, json_real(st->phase[i].ms));
    }
    for (int32_t i = 0; i < st->n_open; i++) {
        json_object_set_new(open, st->open[i].name, json_real(st->open[i].ms));
    }
    json_t *root = json_pack(
        "{s:o, s:o, s:o, s:s, s:o, s:I, s:{s:s, s:s}, s:o, s:o, s:{s:f, s:o, s:i, s:f, s:f, s:i, s:f, s:o}, s:{}, "
        "s:{}}",
        "prompt_ids", json_ids(res->prompt_ids, res->n_prompt), "ids", json_ids(res->ids, res->n_ids), "text",
        res->text ? json_stringn(res->text, res->text_bytes) : json_null(), "finish", ql_finish_text(res->finish),
        "logprobs", logprobs, "seed", (json_int_t)r->request.sampling.seed, "precision", "prompt",
        ql_cli_precision_name(st->prompt_precision), "gen", ql_cli_precision_name(st->gen_precision), "lanes", lanes,
        "paths", paths, "timing", "load_s", st->load_s, "load_ms", open, "prefill_tokens", res->n_prompt,
        "prefill_tok_s", per_second(res->n_prompt, res->prompt_s), "first_token_s", res->first_token_s, "decode_tokens",
        decoded, "decode_tok_s", per_second(decoded, res->decode_s), "phase_ms", phases, "spec", "prefix");
    if (root && res->has_crc) {
        char hex[9];
        snprintf(hex, sizeof hex, "%08x", res->logits_crc32);
        json_object_set_new(root, "logits_crc32", json_string(hex));
    }
    return ql_cli_print_json(root);
}

/* Ends the streamed line where nothing else does: after ids always, after text for a person at a terminal. */
static int end_output(run *r) {
    if (r->out.write_errno) {
        return r->out.write_errno == EPIPE
                   ? 0
                   : ql_cli_fail(QL_EXIT_FAILED, "cannot write to standard output: %s", strerror(r->out.write_errno));
    }
    if (r->out.ids ? r->out.n_id > 0 : ql_cli_is_terminal() && r->result->n_ids && !r->out.ended_line) {
        putchar('\n');
    }
    return ql_cli_flush();
}

static int report(run *r) {
    int rc = r->args->json ? print_json(r) : end_output(r);
    if (r->args->stats || r->args->profile || interrupted) {
        print_stats(r);
    }
    if (r->args->crc && !r->args->json && r->result->has_crc) {
        ql_cli_say("logits_crc32 %08x", r->result->logits_crc32);
    }
    return interrupted ? QL_EXIT_INTERRUPT : rc;
}

static int read_prompt(run *r) {
    const ql_cli_args *args = r->args;
    if (args->has_ids) {
        r->ids = args->ids;
        return 0;
    }
    int rc = args->ids_file ? ql_cli_read(args->ids_file, &r->prompt, &r->prompt_bytes)
                            : ql_cli_input(args, &r->prompt, &r->prompt_bytes);
    size_t bad;
    if (rc == 0 && args->ids_file && !ql_cli_parse_ints(r->prompt, r->prompt_bytes, &r->ids, &bad)) {
        return ql_cli_fail(QL_EXIT_MODEL, "%s: token ids are integers such as 1,2,3; it is something else at byte %zu",
                           args->ids_file, bad);
    }
    if (rc == 0 && (args->ids_file ? r->ids.n == 0 : r->prompt_bytes == 0)) {
        return ql_cli_fail(QL_EXIT_USAGE, "the prompt is empty");
    }
    return rc;
}

int ql_cli_run(const ql_cli_args *args) {
    run r = {.args = args, .request = ql_request_default()};
    int rc = check_args(args);
    rc = rc ? rc : ql_cli_model(args, r.model, sizeof r.model);
    rc = rc ? rc : read_prompt(&r);
    r.stats = calloc(1, sizeof *r.stats);
    if (rc == 0 && !r.stats) {
        rc = ql_cli_fail(QL_EXIT_MEMORY, "out of memory for statistics");
    }
    rc = rc ? rc : open_engine(&r);
    rc = rc ? rc : fill_prompt(&r);
    rc = rc ? rc : generate(&r);
    int dump_rc = ql_cli_dump_close(&r.dump, rc == 0 && !interrupted);
    if (rc == 0) {
        r.stats->size = sizeof *r.stats;
        ql_engine_stats(r.engine, r.stats);
        rc = report(&r);
        rc = rc ? rc : dump_rc;
    }
    __atomic_store_n(&r.logger.closing, true, __ATOMIC_RELAXED);
    ql_result_free(r.result);
    ql_engine_close(&r.engine);
    if (args->ids_file) {
        free(r.ids.v);
    }
    free(r.prompt_ids);
    free(r.prompt);
    free(r.kernels);
    free(r.stats);
    return rc;
}
