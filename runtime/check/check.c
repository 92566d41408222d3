/* Self-checks: which devices, which cases, how they are reported. */
#include "runtime/check/check_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if QL_CUDA
#include "kernels/cuda.h"
#endif

static const struct {
    const char *name, *about;
    void (*run)(ql_check *c, const char *check);
} checks[] = {
    {"mlp_shard_fp8", "a layer's MLP in FP8 (per channel, tensor, 128 x 128 block), cut over lanes", ql_check_blocks},
    {"mlp_shard_nvfp4", "a layer's MLP in NVFP4, cut over lanes", ql_check_blocks},
    {"gdn_shard", "a GatedDeltaNet mixer, cut over lanes", ql_check_blocks},
    {"attention_shard", "a full-attention mixer, cut over lanes", ql_check_blocks},
    {"lm_head_shard", "the head's vocabulary rows, cut over lanes", ql_check_blocks},
    {"collectives", "sums, gathers and broadcasts of lanes, recorded, repeated, aborted: every element's bits",
     ql_check_collectives},
    {"precision", "predictions with bf16, fp8 and q8 prompts against exact ones, on the model of -m",
     ql_check_precision},
};

enum { N_CHECK = sizeof checks / sizeof checks[0] };

const char *ql_check_name(int32_t i) { return i >= 0 && i < N_CHECK ? checks[i].name : NULL; }
const char *ql_check_about(int32_t i) { return i >= 0 && i < N_CHECK ? checks[i].about : NULL; }

/* ---- devices --------------------------------------------------------------------------------------------------------- */

static ql_status choose_devices(ql_check *c, ql_error *err) {
    const ql_options *o = &c->options;
    if (o->devices && (o->lanes < 1 || o->lanes > QL_MAX_LANES)) {
        return ql_fail(err, QL_ERR_USAGE, "options.devices needs options.lanes, the number of its entries, 1 to %d",
                       QL_MAX_LANES);
    }
    for (int32_t i = 0; i < QL_MAX_LANES; i++) {
        c->ordinal[i] = o->devices && i < o->lanes ? o->devices[i] : i;
    }
    c->kind = QL_DEVICE_HOST;
    c->n_device = QL_MAX_LANES;
#if QL_CUDA
    char why[96] = "";
    int32_t count = o->device == QL_DEVICE_HOST ? 0 : ql_cuda_count(why);
    if (count > 0) {
        c->kind = QL_DEVICE_CUDA;
        c->n_device = o->devices ? o->lanes : count;
        ql_cuda_device first;
        QL_TRY(ql_cuda_info(c->ordinal[0], &first, err));
        c->cc = first.code;
    } else if (o->device == QL_DEVICE_CUDA) {
        return ql_fail(err, QL_ERR_DEVICE, "no usable GPU%s%s", why[0] ? ": " : "", why);
    }
#else
    if (o->device == QL_DEVICE_CUDA) {
        return ql_fail(err, QL_ERR_DEVICE, "this build has no CUDA lanes; accepted is the host device");
    }
#endif
    if (o->devices && c->kind == QL_DEVICE_HOST) {
        return ql_fail(err, QL_ERR_USAGE, "options.devices names GPUs and the lanes are on the host");
    }
    if (o->lanes != 0 && o->lanes != 1 && o->lanes != 2 && o->lanes != 4 && o->lanes != 8) {
        return ql_fail(err, QL_ERR_USAGE, "lanes is %d; checks run on 1, 2, 4 or 8", o->lanes);
    }
    return QL_OK;
}

int32_t ql_check_lanes(const ql_check *c, int32_t after) {
    int32_t only = c->options.lanes, next = after ? 2 * after : 1;
    if (only) {
        return after ? 0 : only;
    }
    return next <= QL_MAX_LANES ? next : 0;
}

/* ---- cases ----------------------------------------------------------------------------------------------------------- */

static bool wanted(ql_check *c) {
    bool any = c->n_names == 0;
    for (int32_t i = 0; i < c->n_names; i++) {
        if (strncmp(c->name, c->names[i], strlen(c->names[i])) == 0) {
            any = c->met[i] = true;
        }
    }
    return any;
}

bool ql_check_begin(ql_check *c, int32_t n_lane, const char *fmt, ...) {
    char base[96], note[64];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(base, sizeof base, fmt, ap);
    va_end(ap);
    snprintf(c->name, sizeof c->name, "%s.lanes%d", base, n_lane);
    if (!wanted(c)) {
        return false;
    }
    if (c->listing) {
        ql_check_end(c, &(ql_check_case){.outcome = QL_CHECK_LISTED, .note = ""});
        return false;
    }
    if (n_lane > c->n_device) {
        snprintf(note, sizeof note, "%d GPU%s", c->n_device, c->n_device == 1 ? "" : "s");
        ql_check_end(c, &(ql_check_case){.outcome = QL_CHECK_SKIPPED, .note = note});
        return false;
    }
    return true;
}

void ql_check_end(ql_check *c, const ql_check_case *outcome) {
    ql_check_case named = *outcome;
    named.name = c->name;
    c->fn(c->user, &named);
}

/* ---- run ------------------------------------------------------------------------------------------------------------- */

static void ignore_case(void *user, const ql_check_case *result) { (void)user, (void)result; }

static void run_all(ql_check *c) {
    for (int32_t i = 0; i < N_CHECK; i++) {
        checks[i].run(c, checks[i].name);
    }
}

/* Every name has to begin some case: found out by listing, before anything runs. */
static ql_status check_names(ql_check *c, ql_error *err) {
    ql_check dry = *c;
    dry.listing = true;
    dry.fn = ignore_case;
    run_all(&dry);
    for (int32_t i = 0; i < c->n_names; i++) {
        if (!c->met[i]) {
            return ql_fail(err, QL_ERR_USAGE, "no check is called '%.80s', nor begins so%s", c->names[i],
                           c->run_long ? "" : " among the short ones");
        }
    }
    return QL_OK;
}

ql_status ql_check_run(const ql_options *options, const char *const *names, int32_t n_names, int32_t flags,
                       ql_check_fn fn, void *user, ql_error *err) {
    ql_error_clear(err);
    if (options->size != sizeof *options) {
        return ql_fail(err, QL_ERR_USAGE, "options.size is %zu; call ql_options_default (%zu)", options->size,
                       sizeof *options);
    }
    if (options->allocator &&
        (!options->allocator->malloc || !options->allocator->realloc || !options->allocator->free)) {
        return ql_fail(err, QL_ERR_USAGE, "options.allocator must give malloc, realloc and free");
    }
    ql_check *c = calloc(1, sizeof *c);
    if (!c) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot allocate the checks' state");
    }
    *c = (ql_check){.options = *options,
                    .run_long = flags & QL_CHECK_LONG,
                    .listing = flags & QL_CHECK_LIST,
                    .names = names,
                    .n_names = n_names,
                    .fn = fn,
                    .user = user};
    if (options->allocator) {
        c->allocator = *options->allocator;
        c->mem = &c->allocator;
    }
    ql_status status;
    QL_TRY_GOTO(choose_devices(c, err), free_check);
    QL_TRY_GOTO(ql_log_init(&c->log, options->log, options->log_user, err), free_check);
    QL_TRY_GOTO(ql_alloc(c->mem, (size_t)n_names + 1, sizeof *c->met, "names of checks", (void **)&c->met, err),
                close_log);
    QL_TRY_GOTO(check_names(c, err), free_names);
    if (!c->listing && c->kind == QL_DEVICE_CUDA) {
        ql_logf(&c->log, QL_LOG_INFO, "checks run on %d GPU%s", c->n_device, c->n_device == 1 ? "" : "s");
    } else if (!c->listing) {
        ql_logf(&c->log, QL_LOG_INFO, "checks run on host lanes");
    }
    run_all(c);

free_names:
    ql_free(c->mem, c->met);
close_log:
    if (c->lost) {
        return status;
    }
    ql_log_deinit(&c->log);
free_check:
    free(c);
    return status;
}
