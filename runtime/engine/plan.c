/* What lanes hold and which context fits, from headers alone. */
#include "runtime/engine/engine_impl.h"

#include <stdio.h>
#include <string.h>

ql_options ql_options_default(void) {
    return (ql_options){.size = sizeof(ql_options), .max_seqs = 8, .chunk = 1536, .wait_ms = 10000, .init_ms = 20000};
}

static ql_status check_range(const char *what, int64_t v, int64_t min, int64_t max, ql_error *err) {
    if (v < min || v > max) {
        return ql_fail(err, QL_ERR_USAGE, "%s is %lld; accepted are %lld to %lld", what, (long long)v, (long long)min,
                       (long long)max);
    }
    return QL_OK;
}

ql_status ql_options_check(const ql_options *o, const ql_config *config, bool has_mtp, ql_error *err) {
    if (o->size != sizeof *o) {
        return ql_fail(err, QL_ERR_USAGE, "options.size is %zu; call ql_options_default (%zu)", o->size, sizeof *o);
    }
    QL_TRY(
        check_range("lanes", o->lanes, 0, INT32_MAX, err)); /* ql_shard_init names the counts that the model allows */
    QL_TRY(check_range("ctx", o->ctx, 0, config->max_ctx, err));
    QL_TRY(check_range("max_seqs", o->max_seqs, 1, QL_MAX_SEQS, err));
    QL_TRY(check_range("chunk", o->chunk, QL_PAGE, 1 << 16, err));
    if (o->chunk % QL_PAGE != 0) {
        return ql_fail(err, QL_ERR_USAGE, "chunk is %d; accepted are multiples of %d", o->chunk, QL_PAGE);
    }
    QL_TRY(check_range("device", (int32_t)o->device, QL_DEVICE_AUTO, QL_DEVICE_CUDA, err));
    QL_TRY(check_range("kv", (int32_t)o->kv, QL_KV_F16, QL_KV_FP8, err));
    QL_TRY(check_range("prompt_precision", (int32_t)o->prompt_precision, QL_PREC_AUTO, QL_PREC_Q8, err));
    QL_TRY(check_range("gen_precision", (int32_t)o->gen_precision, QL_PREC_AUTO, QL_PREC_Q8, err));
    const ql_precision p = o->prompt_precision, g = o->gen_precision;
    if ((p == QL_PREC_Q8 || g == QL_PREC_Q8) && p != g && p != QL_PREC_AUTO && g != QL_PREC_AUTO) {
        return ql_fail(
            err, QL_ERR_USAGE,
            "precision q8 is that of one phase alone; accepted is q8 for both, because weights are kept for it");
    }
    QL_TRY(check_range("order", (int32_t)o->order, QL_ORDER_TREE, QL_ORDER_FAST, err));
    QL_TRY(check_range("wait_ms", o->wait_ms, 1, 86400000, err));
    QL_TRY(check_range("init_ms", o->init_ms, 1, 86400000, err));
    if (o->mtp && !has_mtp) {
        return ql_fail(err, QL_ERR_USAGE, "this checkpoint has no multi-token-prediction layer (no mtp.* tensors)");
    }
    return QL_OK;
}

/* What AUTO stands for (qlane.h). */
static void settle_precisions(const ql_options *o, const ql_devices *d, ql_precision *prompt, ql_precision *gen) {
    bool cuda = d->kind == QL_DEVICE_CUDA;
    *prompt = o->prompt_precision;
    *gen = o->gen_precision;
    if (*prompt == QL_PREC_Q8 || *gen == QL_PREC_Q8 ||
        (*prompt == QL_PREC_AUTO && *gen == QL_PREC_AUTO && cuda && d->cc == 75)) {
        *prompt = *gen = QL_PREC_Q8;
    }
    if (*prompt == QL_PREC_AUTO) {
        *prompt = cuda ? QL_PREC_BF16 : QL_PREC_EXACT;
    }
    if (*gen == QL_PREC_AUTO) {
        *gen = QL_PREC_EXACT;
    }
}

static int32_t max_row(const ql_options *o) { return o->chunk > o->max_seqs ? o->chunk : o->max_seqs; }

ql_model_limits ql_limits_of(const ql_options *o, const ql_devices *d, int32_t ctx) {
    ql_model_limits limits = {
        .max_row = max_row(o),
        .max_seq = o->max_seqs,
        .max_ctx = ctx,
        .n_page = o->max_seqs * ql_pages_of(ctx),
        .kv = o->kv,
        .mtp = o->mtp != 0,
        .verify = o->verify != 0,
        .order = o->order,
    };
    settle_precisions(o, d, &limits.prompt_precision, &limits.gen_precision);
    return limits;
}

size_t ql_plan_reduce_bytes(const ql_checkpoint *ckpt, const ql_options *o) {
    return (size_t)max_row(o) * (size_t)ckpt->config.hidden * sizeof(float);
}

static uint64_t total_of(const ql_model_bytes *b) { return b->weight + b->scale + b->kv + b->state + b->workspace; }

uint64_t ql_plan_largest_lane(const ql_checkpoint *ckpt, const ql_options *o, const ql_devices *d, int32_t ctx) {
    ql_model_limits limits = ql_limits_of(o, d, ctx);
    uint64_t largest = 0;
    for (int32_t i = 0; i < d->n_lane; i++) {
        ql_shard shard;
        if (ql_shard_init(&shard, &ckpt->config, d->n_lane, i, NULL) != QL_OK) {
            return UINT64_MAX;
        }
        ql_model_bytes b;
        ql_model_size(ckpt, &shard, &limits, d->ops, &b);
        largest = total_of(&b) > largest ? total_of(&b) : largest;
    }
    return largest + ql_devices_comm_bytes(d, ql_plan_reduce_bytes(ckpt, o)) + ql_devices_context_bytes(d);
}

int32_t ql_plan_max_ctx(const ql_checkpoint *ckpt, const ql_options *o, const ql_devices *d, uint64_t mem) {
    int32_t max = ckpt->config.max_ctx;
    if (ql_plan_largest_lane(ckpt, o, d, max) <= mem) {
        return max;
    }
    int32_t lo = 0, hi = ql_pages_of(max); /* lo pages fit (0: nothing), hi do not */
    while (hi - lo > 1) {
        int32_t mid = lo + (hi - lo) / 2;
        if (ql_plan_largest_lane(ckpt, o, d, mid * QL_PAGE) <= mem) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return lo * QL_PAGE;
}

ql_status ql_checkpoint_plan(const ql_checkpoint *ckpt, const ql_options *o, ql_plan *plan, ql_error *err) {
    QL_TRY(ql_options_check(o, &ckpt->config, ckpt->has_mtp, err));
    if (plan->size != sizeof *plan) {
        return ql_fail(err, QL_ERR_USAGE, "plan.size is %zu; set it to sizeof(ql_plan), %zu", plan->size, sizeof *plan);
    }
    ql_devices devices;
    QL_TRY(ql_devices_of_plan(&devices, o, err));
    int32_t n_lane = devices.n_lane;
    ql_shard shard;
    QL_TRY(ql_shard_init(&shard, &ckpt->config, n_lane, 0, err));

    memset(plan, 0, sizeof *plan);
    plan->size = sizeof *plan;
    plan->n_lanes = n_lane;
    plan->slices = ckpt->config.slices;
    plan->max_seqs = o->max_seqs;
    plan->chunk = o->chunk;
    plan->kv = o->kv;
    plan->mem_bytes = o->mem_bytes;
    plan->max_ctx_that_fits = o->mem_bytes ? ql_plan_max_ctx(ckpt, o, &devices, o->mem_bytes) : ckpt->config.max_ctx;
    uint64_t context = ql_devices_context_bytes(&devices), nccl = ql_devices_nccl_bytes(&devices);
    plan->ctx = o->ctx ? o->ctx : plan->max_ctx_that_fits ? plan->max_ctx_that_fits : QL_PAGE;
    ql_model_limits limits = ql_limits_of(o, &devices, plan->ctx);
    plan->state_bytes_per_seq = ql_model_slot_bytes(ckpt, &shard);
    plan->kv_bytes_per_token = ql_model_page_bytes(ckpt, &shard, &limits) / QL_PAGE;
    for (int32_t i = 0; i < n_lane; i++) {
        QL_TRY(ql_shard_init(&shard, &ckpt->config, n_lane, i, err));
        ql_model_bytes b;
        ql_model_size(ckpt, &shard, &limits, devices.ops, &b);
        b.workspace += ql_devices_comm_bytes(&devices, ql_plan_reduce_bytes(ckpt, o));
        plan->lane[i] = (ql_lane_plan){
            .weight_bytes = b.weight,
            .scale_bytes = b.scale,
            .stored_weight_bytes = b.stored_weight,
            .stored_scale_bytes = b.stored_scale,
            .state_bytes = b.state,
            .kv_bytes = b.kv,
            .workspace_bytes = b.workspace,
            .context_bytes = context,
            .nccl_bytes = nccl,
            .total_bytes = total_of(&b) + context,
            .q_head0 = shard.q0,
            .q_head1 = shard.q1,
            .kv_head0 = shard.kv0,
            .kv_head1 = shard.kv1,
            .key_head0 = shard.k0,
            .key_head1 = shard.k1,
            .value_head0 = shard.v0,
            .value_head1 = shard.v1,
            .mlp0 = shard.m0,
            .mlp1 = shard.m1,
            .vocab0 = shard.vocab0,
            .vocab1 = shard.vocab1,
        };
    }
    return QL_OK;
}
