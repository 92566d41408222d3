/* Opening, closing and talking to an engine. */
#include "runtime/engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening: on the caller's thread --------------------------------------------------------------------------- */

static ql_status copy_options(ql_engine *e, const ql_options *o, ql_error *err) {
    if (o->size != sizeof *o) {
        return ql_fail(err, QL_ERR_USAGE, "options.size is %zu; call ql_options_default (%zu)", o->size, sizeof *o);
    }
    if (!o->model || !*o->model) {
        return ql_fail(err, QL_ERR_USAGE, "options.model is empty; a checkpoint directory or Hub id is needed");
    }
    e->options = *o;
    e->options.allocator = NULL;
    e->options.model = ql_strdup(NULL, o->model);
    e->options.kernels = o->kernels ? ql_strdup(NULL, o->kernels) : NULL;
    if (!e->options.model || (o->kernels && !e->options.kernels)) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot copy the options");
    }
    if (o->allocator) {
        if (!o->allocator->malloc || !o->allocator->realloc || !o->allocator->free) {
            return ql_fail(err, QL_ERR_USAGE, "options.allocator must give malloc, realloc and free");
        }
        e->allocator = *o->allocator;
        e->mem = &e->allocator;
    }
    return QL_OK;
}

/* A large vocabulary takes a second or so: that passes while lanes load. */
static void *open_tokenizer(void *arg) {
    ql_engine *e = arg;
    ql_tokenizer_open(&e->tokenizer, e->ckpt->dir, &e->tokenizer_err);
    __atomic_store_n(&e->tokenized, 1, __ATOMIC_RELEASE);
    return NULL;
}

static ql_status join_tokenizer(ql_engine *e, ql_error *err) {
    if (e->is_tokenizing) {
        ql_thread_join(e->tokenizing);
        e->is_tokenizing = false;
    }
    return e->tokenizer_err.status ? ql_fail(err, e->tokenizer_err.status, "%s", e->tokenizer_err.text) : QL_OK;
}

static ql_status open_model_files(ql_engine *e, ql_error *err) {
    QL_TRY(ql_checkpoint_open(&e->ckpt, e->options.model, err));
    if (e->ckpt->summary.has_tokenizer) {
        QL_TRY(ql_thread_start(&e->tokenizing, "qlane-tokenizer", open_tokenizer, e, err));
        e->is_tokenizing = true;
    }
    const char *note;
    for (int32_t i = 0; (note = ql_checkpoint_note(e->ckpt, i)); i++) {
        ql_logf(&e->log, note == e->ckpt->warning ? QL_LOG_WARN : QL_LOG_INFO, "%s", note);
    }
    return QL_OK;
}

/* Devices and shards. */
static ql_status choose(ql_engine *e, ql_error *err) {
    const ql_options *o = &e->options;
    QL_TRY(ql_options_check(o, &e->ckpt->config, e->ckpt->has_mtp, err));
    QL_TRY(ql_devices_choose(&e->devices, o, &e->ckpt->config, err));
    e->n_lane = e->devices.n_lane;
    for (int32_t i = 0; i < e->n_lane; i++) {
        QL_TRY(ql_shard_init(&e->shard[i], &e->ckpt->config, e->n_lane, i, err));
    }
    e->comm_bytes = ql_devices_comm_bytes(&e->devices, ql_plan_reduce_bytes(e->ckpt, o));
    return QL_OK;
}

static double mib(uint64_t bytes) { return (double)bytes / 0x1p20; }

/* What would fit, or why nothing does. `taken` is what a lane holds beside the model. */
static void what_fits(const ql_engine *e, uint64_t mem, uint64_t taken, int32_t fits, char *out, size_t cap) {
    if (fits) {
        snprintf(out, cap, "the largest context that fits is %d", fits);
        return;
    }
    ql_model_limits limits = ql_limits_of(&e->options, &e->devices, QL_PAGE);
    uint64_t weights = 0;
    for (int32_t i = 0; i < e->n_lane; i++) {
        ql_model_bytes b;
        ql_model_size(e->ckpt, &e->shard[i], &limits, e->devices.ops, &b);
        weights = b.weight + b.scale > weights ? b.weight + b.scale : weights;
    }
    if (weights + taken > mem) {
        snprintf(out, cap,
                 "weights alone (%.1f MiB, %.1f MiB of the device's own) do not fit; more lanes hold less each",
                 mib(weights), mib(taken));
    } else {
        snprintf(out, cap, "no context fits; more lanes, smaller chunks or fewer sequences need less");
    }
}

/* Context and limits; refuses what does not fit before anything large is allocated. */
static ql_status plan(ql_engine *e, ql_error *err) {
    const ql_options *o = &e->options;
    /* What the device has free is beside the context and the collectives' memory, and both are part of what is planned. */
    uint64_t taken = e->comm_bytes + ql_devices_context_bytes(&e->devices);
    uint64_t mem = o->mem_bytes ? o->mem_bytes : ql_devices_free_bytes(&e->devices, &e->lanes);
    mem = o->mem_bytes || mem > UINT64_MAX - taken ? mem : mem + taken;
    int32_t fits = ql_plan_max_ctx(e->ckpt, o, &e->devices, mem);
    e->ctx = o->ctx ? o->ctx : fits;
    if (fits == 0 || e->ctx > fits) {
        int32_t wanted = e->ctx ? e->ctx : QL_PAGE;
        uint64_t need = ql_plan_largest_lane(e->ckpt, o, &e->devices, wanted), used[QL_MAX_LANES], most = 0;
        char beside[96] = "", room[128];
        QL_TRY(ql_devices_used_bytes(&e->devices, &e->lanes, used, err));
        for (int32_t i = 0; i < e->n_lane; i++) {
            most = used[i] > most ? used[i] : most;
        }
        if (most) {
            snprintf(beside, sizeof beside, " (%.0f MiB of the device are in use by its context and other programs)",
                     mib(most - e->comm_bytes));
        }
        what_fits(e, mem, taken, fits, room, sizeof room);
        return ql_fail(err, QL_ERR_MEMORY,
                       "a lane needs %.1f MiB for %d sequences of %d tokens and may use %.1f MiB%s: %.1f MiB short; %s",
                       mib(need), o->max_seqs, wanted, mib(mem), beside, mib(need - mem), room);
    }
    e->limits = ql_limits_of(o, &e->devices, e->ctx);
    return QL_OK;
}

static ql_status alloc_conductor(ql_engine *e, ql_error *err) {
    ql_step_layout_of(&e->limits, &e->layout);
    size_t slots = (size_t)e->limits.max_seq, pages = (size_t)e->limits.n_page;
    QL_TRY(ql_alloc(e->mem, e->layout.bytes, 1, "step inputs", (void **)&e->block, err));
    QL_TRY(ql_alloc(e->mem, slots * (size_t)e->ckpt->config.vocab, sizeof(float), "logits", (void **)&e->logits, err));
    QL_TRY(ql_alloc(e->mem, slots, sizeof(int32_t), "the list of slots", (void **)&e->free_slot, err));
    QL_TRY(ql_alloc(e->mem, pages, sizeof(int32_t), "the list of pages", (void **)&e->free_page, err));
    for (int32_t i = e->limits.max_seq; i-- > 0;) {
        e->free_slot[e->n_free_slot++] = i;
    }
    for (int32_t i = e->limits.n_page; i-- > 0;) {
        e->free_page[e->n_free_page++] = i;
    }
    e->free_slots = e->n_free_slot;
    e->free_pages = e->n_free_page;
    return QL_OK;
}

/* ---- on the lanes' threads --------------------------------------------------------------------------------------- */

static ql_status lane_open_device(ql_lane *lane, void *arg) {
    ql_engine *e = arg;
    QL_TRY(ql_devices_open_lane(&e->devices, &e->options, lane));
    if (e->hooks.dev_opened) {
        e->hooks.dev_opened(e->hooks.user, lane->index, &lane->dev);
    }
    if (e->hooks.comm_opened) {
        e->hooks.comm_opened(e->hooks.user, lane->index, &lane->comm);
    }
    return QL_OK;
}

static void count_resident(void *user, uint64_t bytes) {
    ql_engine *e = user;
    ql_lock(&e->progress_mutex);
    e->resident_bytes += bytes;
    if (e->options.progress) {
        e->options.progress(e->options.progress_user, e->resident_bytes, e->total_bytes);
    }
    ql_unlock(&e->progress_mutex);
}

static ql_status lane_open_model(ql_lane *lane, void *arg) {
    ql_engine *e = arg;
    const ql_shard *shard = &e->shard[lane->index];
    QL_TRY(ql_model_open(&e->model[lane->index], e->ckpt, shard, &e->limits, &lane->dev, &lane->comm, &e->log, NULL,
                         e->pool, count_resident, e, &lane->err));
    ql_model_bytes planned;
    ql_model_size(e->ckpt, shard, &e->limits, lane->dev.ops, &planned);
    if (memcmp(&planned, ql_model_held(e->model[lane->index]), sizeof planned) != 0) {
        return ql_fail(&lane->err, QL_ERR_INTERNAL, "lane %d holds other bytes than were planned", lane->index);
    }
    return QL_OK;
}

static ql_status lane_allow(ql_lane *lane, void *arg) {
    const ql_engine *e = arg;
    return ql_model_allow(e->model[lane->index], e->allowed);
}

static ql_status lane_step(ql_lane *lane, void *arg) {
    const ql_engine *e = arg;
    return ql_model_step(e->model[lane->index], &e->step);
}

static ql_status lane_measure(ql_lane *lane, void *arg) {
    ql_engine *e = arg;
    return lane->dev.ops->measure(&lane->dev, &e->stream[lane->index]);
}

static void lane_fini(ql_lane *lane) {
    ql_engine *e = lane->group->user;
    ql_model_close(&e->model[lane->index]);
    ql_devices_close_lane(&e->devices, lane);
}

ql_status ql_engine_run_step(ql_engine *e, ql_error *err) {
    ql_dev_count(&e->n_steps, 1);
    return ql_devices_run(&e->devices, &e->lanes, lane_step, e, err);
}

/* ---- open and close ----------------------------------------------------------------------------------------------- */

/* Lanes with their devices and collectives; what they hold is planned with them at hand. */
static ql_status open_lanes(ql_engine *e, ql_error *err) {
    size_t reduce_bytes = ql_plan_reduce_bytes(e->ckpt, &e->options);
    QL_TRY(ql_lanes_open(&e->lanes, e->n_lane, e->options.wait_ms, lane_fini, e, &e->log, e->mem, err));
    QL_TRY(ql_devices_open(&e->devices, &e->options, &e->lanes, reduce_bytes, err));
    QL_TRY(ql_lanes_run(&e->lanes, lane_open_device, e, err));
    e->opened_ns[QL_OPEN_DEVICES] = ql_now_ns();
    QL_TRY(ql_devices_connect(&e->devices, &e->lanes, err));
    e->opened_ns[QL_OPEN_COLLECTIVES] = ql_now_ns();
    return QL_OK;
}

/* With the tokenizer there: which ids may be sampled. */
static ql_status allow_ids(ql_engine *e, ql_error *err) {
    QL_TRY(join_tokenizer(e, err));
    int32_t vocab = e->ckpt->config.vocab;
    QL_TRY(ql_alloc(e->mem, ((size_t)vocab + 31) / 32, 4, "the set of allowed ids", (void **)&e->allowed, err));
    for (int32_t id = 0; id < vocab; id++) {
        if (!e->tokenizer || ql_tokenizer_has(e->tokenizer, id)) {
            e->allowed[id / 32] |= 1u << (id % 32);
        }
    }
    return ql_lanes_run(&e->lanes, lane_allow, e, err);
}

/* With all that opening takes in place. */
static ql_status measure_context(ql_engine *e, ql_error *err) {
    QL_TRY(ql_devices_used_bytes(&e->devices, &e->lanes, e->context_bytes, err));
    for (int32_t i = 0; i < e->n_lane; i++) {
        const ql_model_bytes *b = ql_model_held(e->model[i]);
        uint64_t own = b->weight + b->scale + b->kv + b->state + b->workspace + e->comm_bytes;
        e->context_bytes[i] -= own < e->context_bytes[i] ? own : e->context_bytes[i];
    }
    return QL_OK;
}

static ql_status open_models(ql_engine *e, ql_error *err) {
    for (int32_t i = 0; i < e->n_lane; i++) {
        ql_model_bytes b;
        ql_model_size(e->ckpt, &e->shard[i], &e->limits, e->devices.ops, &b);
        e->total_bytes += b.stored_weight + b.stored_scale;
    }
    if (__atomic_load_n(&e->tokenized, __ATOMIC_ACQUIRE)) { /* a bad one is better known before a long load */
        QL_TRY(join_tokenizer(e, err));
    }
    QL_TRY(ql_pool_open(&e->pool, ql_pool_size(e->n_lane), e->mem, err));
    QL_TRY(ql_lanes_run(&e->lanes, lane_open_model, e, err));
    ql_pool_close(&e->pool);
    QL_TRY(allow_ids(e, err));
    e->opened_ns[QL_OPEN_MEMORY] = ql_model_sized_ns(e->model[0]);
    e->opened_ns[QL_OPEN_WEIGHTS] = ql_now_ns();
    return measure_context(e, err);
}

ql_status ql_engine_open_hooked(ql_engine **engine, const ql_options *options, const ql_test_hooks *hooks,
                                ql_error *err) {
    ql_error own = {QL_OK, ""};
    err = err ? err : &own;
    ql_error_clear(err);
    *engine = NULL;
    ql_engine *e = calloc(1, sizeof *e);
    if (!e) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot allocate an engine");
    }
    e->open_start_ns = ql_now_ns();
    if (hooks) {
        e->hooks = *hooks;
    }
    e->incoming_end = &e->incoming;
    e->queue_end = &e->queue;
    ql_status status;
    QL_TRY_GOTO(ql_log_init(&e->log, options->log, options->log_user, err), fail_log);
    QL_TRY_GOTO(ql_mutex_init(&e->progress_mutex, err), fail_progress);
    QL_TRY_GOTO(ql_mutex_init(&e->mutex, err), fail_mutex);
    QL_TRY_GOTO(ql_cond_init(&e->work, err), fail_work);
    QL_TRY_GOTO(ql_cond_init(&e->done, err), fail_done);
    QL_TRY_GOTO(copy_options(e, options, err), fail);
    QL_TRY_GOTO(open_model_files(e, err), fail);
    e->opened_ns[QL_OPEN_FILES] = ql_now_ns();
    QL_TRY_GOTO(choose(e, err), fail);
    e->options.devices = NULL; /* the caller's; copied by now */
    QL_TRY_GOTO(open_lanes(e, err), fail);
    QL_TRY_GOTO(plan(e, err), fail);
    QL_TRY_GOTO(alloc_conductor(e, err), fail);
    QL_TRY_GOTO(open_models(e, err), fail);
    e->load_s = ql_seconds_since(e->open_start_ns);
    if (options->measure) {
        QL_TRY_GOTO(ql_lanes_run(&e->lanes, lane_measure, e, err), fail);
    }
    QL_TRY_GOTO(ql_thread_start(&e->conductor, "qlane-conductor", ql_conductor_main, e, err), fail);
    e->conducting = true;
    *engine = e;
    return QL_OK;

fail:
    ql_engine_close(&e);
    return status;
fail_done:
    ql_cond_deinit(&e->work);
fail_work:
    ql_mutex_deinit(&e->mutex);
fail_mutex:
    ql_mutex_deinit(&e->progress_mutex);
fail_progress:
    ql_log_deinit(&e->log);
fail_log:
    free(e);
    return status;
}

ql_status ql_engine_open(ql_engine **engine, const ql_options *options, ql_error *err) {
    return ql_engine_open_hooked(engine, options, NULL, err);
}

void ql_engine_close(ql_engine **engine) {
    ql_engine *e = *engine;
    if (!e) {
        return;
    }
    *engine = NULL;
    if (e->conducting) {
        ql_lock(&e->mutex);
        e->closing = true;
        ql_cond_signal(&e->work);
        ql_unlock(&e->mutex);
        ql_thread_join(e->conductor);
    }
    join_tokenizer(e, NULL);
    if (!ql_lanes_close(&e->lanes)) {
        return; /* a lane is still out there and reads all this */
    }
    ql_pool_close(&e->pool); /* still there when a lane failed to load */
    ql_devices_close(&e->devices);
    free(e->step.probe_hidden);
    free(e->step.probe_final);
    free(e->step.probe_logits);
    free(e->step.probe_mtp);
    while (e->all) {
        ql_seq *seq = e->all;
        e->all = seq->next;
        ql_seq_free(seq);
    }
    ql_free(e->mem, e->block);
    ql_free(e->mem, e->logits);
    ql_free(e->mem, e->free_slot);
    ql_free(e->mem, e->free_page);
    ql_free(e->mem, e->allowed);
    ql_tokenizer_close(&e->tokenizer);
    ql_checkpoint_close(&e->ckpt);
    ql_cond_deinit(&e->done);
    ql_cond_deinit(&e->work);
    ql_mutex_deinit(&e->mutex);
    ql_mutex_deinit(&e->progress_mutex);
    ql_log_deinit(&e->log);
    free((void *)(uintptr_t)e->options.model);
    free((void *)(uintptr_t)e->options.kernels);
    free(e);
}

const ql_tokenizer *ql_engine_tokenizer(const ql_engine *engine) { return engine->tokenizer; }

/* ---- requests: any thread ------------------------------------------------------------------------------------------ */

ql_status ql_submit(ql_engine *e, const ql_request *request, ql_event_fn callback, void *user, ql_request_id *id,
                    ql_error *err) {
    ql_error_clear(err);
    int64_t now = ql_now_ns();
    ql_seq *seq = NULL;
    QL_TRY(ql_seq_create(&seq, e, request, err));
    seq->callback = callback;
    seq->user = user;
    seq->submit_ns = now;
    ql_lock(&e->mutex);
    if (e->failed.status != QL_OK || e->closing) {
        ql_error failed = e->failed;
        ql_unlock(&e->mutex);
        ql_seq_free(seq);
        return failed.status ? ql_fail(err, QL_ERR_STATE, "the engine failed and must be reopened: %s", failed.text)
                             : ql_fail(err, QL_ERR_STATE, "the engine is closing");
    }
    seq->id = ++e->last_id;
    seq->next = e->all;
    e->all = seq;
    *e->incoming_end = seq;
    e->incoming_end = &seq->next_run;
    if (id) {
        *id = seq->id;
    }
    ql_cond_signal(&e->work);
    ql_unlock(&e->mutex);
    return QL_OK;
}

/* Called with the mutex held. */
static ql_seq *find(ql_engine *e, ql_request_id id) {
    ql_seq *seq = e->all;
    while (seq && seq->id != id) {
        seq = seq->next;
    }
    return seq;
}

void ql_cancel(ql_engine *e, ql_request_id id) {
    ql_lock(&e->mutex);
    ql_seq *seq = find(e, id);
    if (seq) {
        __atomic_store_n(&seq->cancel, 1, __ATOMIC_RELAXED);
        ql_cond_signal(&e->work);
    }
    ql_unlock(&e->mutex);
}

ql_status ql_wait(ql_engine *e, ql_request_id id, ql_result **result, ql_error *err) {
    ql_error_clear(err);
    *result = NULL;
    ql_lock(&e->mutex);
    ql_seq *seq = find(e, id);
    if (!seq || seq->waited || seq->detach) {
        ql_unlock(&e->mutex);
        return ql_fail(err, QL_ERR_USAGE,
                       "request %llu is not one to wait for: unknown, detached or already waited for",
                       (unsigned long long)id);
    }
    seq->waited = true;
    while (!seq->ended) {
        ql_cond_wait(&e->done, &e->mutex);
    }
    ql_seq **at = &e->all;
    while (*at != seq) {
        at = &(*at)->next;
    }
    *at = seq->next;
    ql_unlock(&e->mutex);
    ql_error request_error = seq->error;
    ql_status status = ql_seq_result(seq, result, err);
    ql_seq_free(seq);
    if (status == QL_OK && request_error.status != QL_OK) {
        return ql_fail(err, request_error.status, "%s", request_error.text);
    }
    return status;
}

ql_status ql_generate(ql_engine *e, const ql_request *request, ql_result **result, ql_error *err) {
    *result = NULL;
    ql_request_id id;
    QL_TRY(ql_submit(e, request, NULL, NULL, &id, err));
    return ql_wait(e, id, result, err);
}

/* ---- stats ---------------------------------------------------------------------------------------------------------- */

static uint64_t relaxed(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

ql_status ql_engine_stats(ql_engine *e, ql_stats *s) {
    if (s->size != sizeof *s) {
        return QL_ERR_USAGE;
    }
    memset(s, 0, sizeof *s);
    s->size = sizeof *s;
    s->n_lanes = e->n_lane;
    s->slices = e->ckpt->config.slices;
    s->device = e->devices.kind;
    s->prompt_precision = e->limits.prompt_precision;
    s->gen_precision = e->limits.gen_precision;
    s->ctx = e->ctx;
    s->max_seqs = e->limits.max_seq;
    s->chunk = e->options.chunk;
    s->kv_pages = e->limits.n_page;
    s->live_seqs = __atomic_load_n(&e->live, __ATOMIC_RELAXED);
    s->free_slots = __atomic_load_n(&e->free_slots, __ATOMIC_RELAXED);
    s->free_pages = __atomic_load_n(&e->free_pages, __ATOMIC_RELAXED);
    s->load_s = e->load_s;
    s->prompt_tokens = relaxed(&e->n_prompt_tokens);
    s->generated_tokens = relaxed(&e->n_generated);
    s->steps = relaxed(&e->n_steps);
    for (int32_t i = 0; i < e->n_lane; i++) {
        const ql_lane *lane = &e->lanes.lane[i];
        const ql_model_bytes *b = ql_model_held(e->model[i]);
        ql_lane_stats *l = &s->lane[i];
        *l = (ql_lane_stats){
            .weight_bytes = b->weight,
            .scale_bytes = b->scale,
            .stored_weight_bytes = b->stored_weight,
            .stored_scale_bytes = b->stored_scale,
            .kv_bytes = b->kv,
            .state_bytes = b->state,
            .workspace_bytes = b->workspace + e->comm_bytes,
            .context_bytes = e->context_bytes[i],
            .h2d_bytes = relaxed(&lane->dev.h2d_bytes),
            .d2h_bytes = relaxed(&lane->dev.d2h_bytes),
        };
        snprintf(l->device, sizeof l->device, "%s", lane->dev.device);
    }
    const ql_lane *first = &e->lanes.lane[0];
    for (int32_t p = 0; p < QL_PATH_COUNT && s->n_paths < (int32_t)(sizeof s->path / sizeof *s->path); p++) {
        uint64_t calls = 0;
        for (int32_t i = 0; i < e->n_lane; i++) {
            calls += relaxed(&e->lanes.lane[i].dev.n_path[p]);
        }
        if (calls) {
            ql_path_count *out = &s->path[s->n_paths++];
            ql_path_name(&first->dev, p, out->name);
            out->calls = calls;
        }
    }
    /* On a GPU the lane's thread only launches: without the device's own clock no figure is better than a wrong one. */
    bool timed = e->devices.kind == QL_DEVICE_HOST || e->options.profile;
    for (int32_t t = 0; t < QL_TIME_COUNT && timed; t++) {
        ql_phase_time *out = &s->phase[s->n_phases++];
        snprintf(out->name, sizeof out->name, "%s", ql_phase_kind_name(t));
        out->ms = (double)relaxed(&ql_model_times(e->model[0])[t]) * 1e-6;
    }
    static const char *const parts[QL_OPEN_COUNT] = {"files", "devices", "collectives", "memory", "weights"};
    for (int64_t i = 0, from = e->open_start_ns; i < QL_OPEN_COUNT; from = e->opened_ns[i++]) {
        ql_phase_time *out = &s->open[s->n_open++];
        snprintf(out->name, sizeof out->name, "%s", parts[i]);
        out->ms = (double)(e->opened_ns[i] - from) * 1e-6;
    }
    return QL_OK;
}

ql_status ql_engine_lane_info(ql_engine *e, int32_t lane, ql_lane_info *info) {
    if (info->size != sizeof *info || lane < 0 || lane >= e->n_lane) {
        return QL_ERR_USAGE;
    }
    *info = (ql_lane_info){.size = sizeof *info,
                           .n_sm = -1,
                           .sm_mhz = -1,
                           .sm_max_mhz = -1,
                           .memory_mhz = -1,
                           .temperature_c = -1,
                           .power_w = -1,
                           .power_limit_w = -1,
                           .stream_bytes_per_s = e->stream[lane] > 0 ? e->stream[lane] : -1};
    ql_devices_describe(&e->devices, &e->lanes.lane[lane], info);
    return QL_OK;
}
