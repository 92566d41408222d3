/* The forward pass of one lane, in the order of docs/design.md: straight calls on the op table.
 *
 *   x = embedding of the ids
 *   for each layer:  x += mixer(norm(x));  x += mlp(norm(x))        mixer: GatedDeltaNet or full attention
 *   logits of the asked rows = head(norm(x));  ids = choice among all lanes' candidates
 *
 * The sum of a row-parallel product is left in `delta` and added to x by the norm that follows.
 */
#include "runtime/model/model_impl.h"

#include <stdio.h>
#include <string.h>

/* The error of an op gets the lane and the op in front. */
static ql_status failed(const ql_model *m, const char *op) {
    char where[64];
    snprintf(where, sizeof where, "lane %d: %s", m->comm->lane, op);
    return ql_fail_in(m->dev->err, where);
}

/* Calls an op of the table, with proof of life for peers that wait. */
#define OP(m, op, ...)                                                                                                 \
    do {                                                                                                               \
        ql_dev_count(&(m)->dev->progress, 1);                                                                          \
        if ((m)->dev->ops->op((m)->dev, &(__VA_ARGS__)) != QL_OK) {                                                    \
            return failed((m), #op);                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- ops in a row ----------------------------------------------------------------------------------------------- */

/* Runs one op by itself. */
static ql_status run_op(ql_model *m, const ql_op *op) {
    const ql_ops *ops = m->dev->ops;
    ql_dev_count(&m->dev->progress, 1);
    switch (op->kind) {
    case QL_OP_RMSNORM: return ops->rmsnorm(m->dev, &op->u.rmsnorm) == QL_OK ? QL_OK : failed(m, "rmsnorm");
    case QL_OP_LINEAR:
        if (op->u.linear.n == 1) {
            return ops->linear(m->dev, op->u.linear.a) == QL_OK ? QL_OK : failed(m, "linear");
        }
        return ops->linear_group(m->dev, op->u.linear.a, op->u.linear.n) == QL_OK ? QL_OK : failed(m, "linear");
    case QL_OP_CONV: return ops->conv(m->dev, &op->u.conv) == QL_OK ? QL_OK : failed(m, "conv");
    case QL_OP_GDN: return ops->gdn(m->dev, &op->u.gdn) == QL_OK ? QL_OK : failed(m, "gdn");
    case QL_OP_GATED_NORM: return ops->gated_norm(m->dev, &op->u.gated_norm) == QL_OK ? QL_OK : failed(m, "gated_norm");
    case QL_OP_SWIGLU: return ops->swiglu(m->dev, &op->u.swiglu) == QL_OK ? QL_OK : failed(m, "swiglu");
    case QL_OP_ATTN_PREP: return ops->attn_prep(m->dev, &op->u.attn_prep) == QL_OK ? QL_OK : failed(m, "attn_prep");
    case QL_OP_ATTENTION: return ops->attention(m->dev, &op->u.attention) == QL_OK ? QL_OK : failed(m, "attention");
    case QL_OP_EXCHANGE: return m->comm->reduce(m->comm, op->u.exchange.src, op->u.exchange.dst, op->u.exchange.n);
    }
    return ql_fail(m->dev->err, QL_ERR_INTERNAL, "lane %d: op kind %d", m->comm->lane, (int)op->kind);
}

/* Runs the ops that wait in m->chain, as many at a time as the device takes. Everything that is not in the chain comes after
 * this. */
static ql_status flush(ql_model *m) {
    int32_t n = m->n_chain;
    m->n_chain = 0;
    for (int32_t i = 0; i < n;) {
        int32_t taken;
        ql_dev_count(&m->dev->progress, 1);
        if (m->dev->ops->chain(m->dev, m->chain + i, n - i, &taken) != QL_OK) {
            return failed(m, "chain");
        }
        if (taken == 0) {
            QL_TRY(run_op(m, &m->chain[i]));
            taken = 1;
        }
        i += taken;
    }
    return QL_OK;
}

/* Runs an op now, or later with its neighbours where the step is one that the device runs as chains. */
static ql_status emit(ql_model *m, ql_op op) {
    if (!m->chaining) {
        return run_op(m, &op);
    }
    if (m->n_chain == QL_CHAIN_MAX) {
        QL_TRY(flush(m));
    }
    m->chain[m->n_chain++] = op;
    return QL_OK;
}

const char *ql_phase_kind_name(ql_phase_kind kind) {
    static const char *const names[QL_TIME_COUNT] = {
        [QL_TIME_EMBED] = "embed",   [QL_TIME_GDN] = "gdn",   [QL_TIME_ATTENTION] = "attention", [QL_TIME_MLP] = "mlp",
        [QL_TIME_REDUCE] = "reduce", [QL_TIME_HEAD] = "head", [QL_TIME_SAMPLE] = "sample",       [QL_TIME_MTP] = "mtp",
    };
    return names[kind];
}

const uint64_t *ql_model_times(const ql_model *m) { return m->time_ns; }

/* Adds the time since *mark to a phase and moves the mark; a device with a clock of its own keeps the marks itself. */
static void lap(ql_model *m, ql_phase_kind kind, int64_t *mark) {
    if (m->dev->ops->lap) {
        m->dev->ops->lap(m->dev, &m->time_ns[kind]);
        return;
    }
    int64_t now = ql_now_ns();
    ql_dev_count(&m->time_ns[kind], (uint64_t)(now - *mark));
    *mark = now;
}

static ql_precision precision_of(const ql_model *m, ql_phase phase) {
    return phase == QL_PHASE_PROMPT ? m->limits.prompt_precision : m->limits.gen_precision;
}

/* Slices that a lane's sums over its channels are cut into. */
static int32_t local_slices(const ql_model *m, ql_phase phase) {
    const bool in_one = m->limits.order == QL_ORDER_FAST && phase == QL_PHASE_PROMPT;
    return in_one && m->limits.prompt_precision != QL_PREC_Q8 ? 1 : m->shard.slice1 - m->shard.slice0;
}

/* ---- pieces ------------------------------------------------------------------------------------------------- */

static ql_linear_args column_product(const ql_model *m, const ql_batch *b, const ql_weight *w, const float *x,
                                     float *y) {
    return (ql_linear_args){.w = w,
                            .x = x,
                            .y = y,
                            .ldx = w->k,
                            .ldy = w->n,
                            .n_row = b->n_row,
                            .n_slice = 1,
                            .phase = b->phase,
                            .precision = precision_of(m, b->phase)};
}

/* y[i] = the lane's rows of w[i], up to 4 weights that meet the same x. */
static ql_status column_parallel(ql_model *m, const ql_batch *b, const float *x, int32_t n, const ql_weight *const *w,
                                 float *const *y) {
    ql_op op = {.kind = QL_OP_LINEAR, .u.linear.n = n};
    for (int32_t i = 0; i < n; i++) {
        op.u.linear.a[i] = column_product(m, b, w[i], x, y[i]);
    }
    return emit(m, op);
}

/* y = the sum over all lanes of the lane's columns: own slices as a subtree, then the lanes' part of the tree. */
static ql_status row_parallel(ql_model *m, const ql_batch *b, const ql_weight *w, const float *x, float *y,
                              int64_t *mark, ql_phase_kind kind) {
    float *own = m->comm->n_lane == 1 ? y : m->ws.part;
    QL_TRY(emit(m, (ql_op){.kind = QL_OP_LINEAR,
                           .u.linear = {.n = 1,
                                        .a[0] = {.w = w,
                                                 .x = x,
                                                 .y = own,
                                                 .ldx = w->k,
                                                 .ldy = w->n,
                                                 .n_row = b->n_row,
                                                 .n_slice = local_slices(m, b->phase),
                                                 .phase = b->phase,
                                                 .precision = precision_of(m, b->phase)}}}));
    lap(m, kind, mark);
    if (own != y) {
        QL_TRY(emit(
            m, (ql_op){.kind = QL_OP_EXCHANGE, .u.exchange = {.src = own, .dst = y, .n = (int64_t)b->n_row * w->n}}));
        lap(m, QL_TIME_REDUCE, mark);
    }
    return QL_OK;
}

/* x += delta (where not NULL), y = norm(x). */
static ql_status norm(ql_model *m, int32_t n_row, float *x, const float *delta, const float *w, float *y, int64_t ldy) {
    return emit(m, (ql_op){.kind = QL_OP_RMSNORM,
                           .u.rmsnorm = {.x = x,
                                         .delta = delta,
                                         .w = w,
                                         .y = y,
                                         .ldy = ldy,
                                         .n_row = n_row,
                                         .n = m->config->hidden,
                                         .eps = m->config->rms_eps}});
}

/* y = embedding rows of the ids, complete on every lane. */
static ql_status embed(ql_model *m, const int32_t *id, int32_t n_row, float *y) {
    float *own = m->comm->n_lane == 1 ? y : m->ws.part;
    OP(m, embed,
       (ql_embed_args){.id = id,
                       .table = m->embed,
                       .dtype = m->ckpt->embed->dtype,
                       .row0 = m->shard.vocab0,
                       .row1 = m->shard.vocab1,
                       .y = own,
                       .n_row = n_row,
                       .hidden = m->config->hidden});
    if (own != y) {
        QL_TRY(m->comm->reduce(m->comm, own, y, (int64_t)n_row * m->config->hidden));
    }
    return QL_OK;
}

/* ---- mixers and MLP: from the normed rows in ws.xn to the whole product in ws.delta ----------------------------- */

static ql_status gdn_mixer(ql_model *m, const ql_batch *b, const ql_layer_weights *w, int64_t *mark) {
    ql_workspace *ws = &m->ws;
    const ql_shape *s = &m->shape;
    QL_TRY(column_parallel(m, b, ws->xn, 4, (const ql_weight *const[]){&w->in_qkv, &w->in_z, &w->in_b, &w->in_a},
                           (float *const[]){ws->m, ws->z, ws->b, ws->a}));
    QL_TRY(emit(m, (ql_op){.kind = QL_OP_CONV,
                           .u.conv = {.batch = b,
                                      .m = ws->m,
                                      .w = w->conv,
                                      .tail = w->tail,
                                      .y = ws->u,
                                      .channels = ql_model_channels(&m->shard)}}));
    QL_TRY(emit(m, (ql_op){.kind = QL_OP_GDN,
                           .u.gdn = {.batch = b,
                                     .u = ws->u,
                                     .a = ws->a,
                                     .b = ws->b,
                                     .a_log = w->a_log,
                                     .dt_bias = w->dt_bias,
                                     .state = w->state,
                                     .o = ws->o,
                                     .n_key_head = s->n_key_head,
                                     .n_value_head = s->n_value_head,
                                     .key_head0 = m->shard.k0,
                                     .value_head0 = m->shard.v0,
                                     .group = m->config->n_value_head / m->config->n_key_head}}));
    QL_TRY(emit(m, (ql_op){.kind = QL_OP_GATED_NORM,
                           .u.gated_norm = {.o = ws->o,
                                            .z = ws->z,
                                            .w = w->gdn_norm,
                                            .y = ws->o,
                                            .n_row = b->n_row,
                                            .n_head = s->n_value_head,
                                            .eps = m->config->rms_eps}}));
    return row_parallel(m, b, &w->out, ws->o, ws->delta, mark, QL_TIME_GDN);
}

static ql_status attention_mixer(ql_model *m, const ql_batch *b, const ql_layer_weights *w, int64_t *mark) {
    ql_workspace *ws = &m->ws;
    QL_TRY(column_parallel(m, b, ws->xn, 3, (const ql_weight *const[]){&w->q, &w->k, &w->v},
                           (float *const[]){ws->qg, ws->k, ws->v}));
    QL_TRY(emit(m, (ql_op){.kind = QL_OP_ATTN_PREP,
                           .u.attn_prep = {.batch = b,
                                           .qg = ws->qg,
                                           .k = ws->k,
                                           .v = ws->v,
                                           .q_norm = w->q_norm,
                                           .k_norm = w->k_norm,
                                           .rope = m->rope,
                                           .q = ws->q,
                                           .cache = &w->cache,
                                           .n_head = m->shape.n_head,
                                           .rotary = m->config->rotary_dim,
                                           .eps = m->config->rms_eps}}));
    QL_TRY(emit(m, (ql_op){.kind = QL_OP_ATTENTION,
                           .u.attention = {.batch = b,
                                           .q = ws->q,
                                           .qg = ws->qg,
                                           .cache = &w->cache,
                                           .o = ws->q,
                                           .n_head = m->shape.n_head,
                                           .head0 = m->shard.q0,
                                           .kv_head0 = m->shard.kv0,
                                           .group = m->config->n_head / m->config->n_kv_head,
                                           .precision = precision_of(m, b->phase)}}));
    QL_TRY(flush(m)); /* what comes behind is a list of its own */
    return row_parallel(m, b, &w->o, ws->q, ws->delta, mark, QL_TIME_ATTENTION);
}

static ql_status mlp(ql_model *m, const ql_batch *b, const ql_layer_weights *w, int64_t *mark) {
    ql_workspace *ws = &m->ws;
    QL_TRY(column_parallel(m, b, ws->xn, 2, (const ql_weight *const[]){&w->gate, &w->up},
                           (float *const[]){ws->gate, ws->up}));
    QL_TRY(emit(
        m, (ql_op){.kind = QL_OP_SWIGLU,
                   .u.swiglu = {.g = ws->gate, .u = ws->up, .y = ws->gate, .n_row = b->n_row, .n = m->shape.mlp}}));
    return row_parallel(m, b, &w->down, ws->gate, ws->delta, mark, QL_TIME_MLP);
}

/* One layer on x. On return the MLP's product waits in ws.delta. `pending`: the last layer's product waits there now. */
static ql_status layer(ql_model *m, const ql_batch *b, const ql_layer_weights *w, float *x, bool pending,
                       int64_t *mark) {
    ql_workspace *ws = &m->ws;
    QL_TRY(norm(m, b->n_row, x, pending ? ws->delta : NULL, w->input_norm, ws->xn, m->config->hidden));
    QL_TRY(w->full_attention ? attention_mixer(m, b, w, mark) : gdn_mixer(m, b, w, mark));
    QL_TRY(norm(m, b->n_row, x, ws->delta, w->post_norm, ws->xn, m->config->hidden));
    return mlp(m, b, w, mark);
}

/* ---- head --------------------------------------------------------------------------------------------------- */

/* Copies the lane's columns of logits rows to their places in a [n][vocab] host array. */
static ql_status copy_columns(ql_model *m, const float *logits, int32_t n, float *host) {
    int32_t local = m->shape.vocab_local;
    for (int32_t i = 0; i < n; i++) {
        QL_TRY(m->dev->ops->d2h(m->dev, host + (int64_t)i * m->config->vocab + m->shard.vocab0,
                                logits + (int64_t)i * local, (size_t)local * sizeof(float)));
    }
    return QL_OK;
}

static ql_status head(ql_model *m, const ql_batch *b, const float *x, int32_t n) {
    OP(m, linear,
       (ql_linear_args){.w = &m->lm_head,
                        .x = x,
                        .y = m->ws.logits,
                        .ldx = m->config->hidden,
                        .ldy = m->shape.vocab_local,
                        .n_row = n,
                        .n_slice = 1,
                        .phase = b->phase,
                        .precision = precision_of(m, b->phase)});
    return QL_OK;
}

/* Logits of all rows of x to the host, a few at a time. */
static ql_status probe_head(ql_model *m, const ql_batch *b, const float *x, int32_t n_row, float *host) {
    for (int32_t r = 0; r < n_row; r += m->shape.max_out) {
        int32_t n = n_row - r < m->shape.max_out ? n_row - r : m->shape.max_out;
        QL_TRY(head(m, b, x + (int64_t)r * m->config->hidden, n));
        QL_TRY(copy_columns(m, m->ws.logits, n, host + (int64_t)r * m->config->vocab));
        QL_TRY(m->dev->ops->sync(m->dev));
    }
    return QL_OK;
}

/* Candidates of the own vocabulary rows, all lanes' candidates, the choice: the same on every lane. */
static ql_status choose(ql_model *m, const ql_step *step, const ql_sample_row *row, const ql_penalty *penalty) {
    ql_workspace *ws = &m->ws;
    int32_t n = step->n_out, ranges = QL_STAT_RANGES / m->comm->n_lane;
    bool alone = m->comm->n_lane == 1;
    OP(m, topk,
       (ql_topk_args){.logits = ws->logits,
                      .ld = m->shape.vocab_local,
                      .n_row = n,
                      .n = m->shape.vocab_local,
                      .vocab0 = m->shard.vocab0,
                      .vocab = m->config->vocab,
                      .n_valid = m->config->vocab,
                      .allowed = m->allowed,
                      .row = row,
                      .penalty = penalty,
                      .cand = ws->cand,
                      .stat = ws->stat,
                      .k_cap = step->k_cap});
    if (!alone) {
        QL_TRY(m->comm->gather(m->comm, ws->cand, ws->cand_all, (size_t)n * (size_t)step->k_cap * sizeof *ws->cand));
        QL_TRY(m->comm->gather(m->comm, ws->stat, ws->stat_all, (size_t)n * (size_t)ranges * sizeof *ws->stat));
    }
    OP(m, sample,
       (ql_sample_args){.cand = alone ? ws->cand : ws->cand_all,
                        .stat = alone ? ws->stat : ws->stat_all,
                        .row = row,
                        .n_lane = m->comm->n_lane,
                        .n_row = n,
                        .k_cap = step->k_cap,
                        .id = ws->id,
                        .logprob = ws->logprob});
    return QL_OK;
}

/* ---- multi-token prediction ---------------------------------------------------------------------------------- */

/* For the first n_mtp_row rows: logits of the token after next from the final hidden rows in ws.xn and the next ids. */
static ql_status mtp(ql_model *m, const ql_step *step, const ql_batch *b, const int32_t *next_id,
                     const int32_t *seg_row) {
    ql_workspace *ws = &m->ws;
    int32_t hidden = m->config->hidden, n = step->n_mtp_row;
    int64_t mark = ql_now_ns(), unused = mark;
    ql_batch mb = *b;
    mb.n_row = n;
    mb.seg_row = seg_row;
    QL_TRY(embed(m, next_id, n, ws->mtp_x));
    QL_TRY(norm(m, n, ws->mtp_x, NULL, m->mtp.norm_embedding, ws->mtp_cat, 2 * (int64_t)hidden));
    QL_TRY(norm(m, n, ws->xn, NULL, m->mtp.norm_hidden, ws->mtp_cat + hidden, 2 * (int64_t)hidden));
    QL_TRY(
        column_parallel(m, &mb, ws->mtp_cat, 1, (const ql_weight *const[]){&m->mtp.fc}, (float *const[]){ws->mtp_x}));
    QL_TRY(layer(m, &mb, &m->mtp.layer, ws->mtp_x, false, &unused));
    QL_TRY(norm(m, n, ws->mtp_x, ws->delta, m->mtp.norm, ws->xn, hidden));
    QL_TRY(probe_head(m, &mb, ws->xn, n, step->probe_mtp));
    lap(m, QL_TIME_MTP, &mark);
    return QL_OK;
}

/* ---- a step ------------------------------------------------------------------------------------------------- */

/* What the step's ops read of the host. No kernel of the step may begin before this copy: some read, before they wait for
 * the kernel in front of them, what only earlier steps have written. */
static ql_status upload(ql_model *m, const ql_step *step) {
    size_t bytes = m->layout.penalty + (size_t)step->n_penalty * sizeof(ql_penalty);
    return m->dev->ops->h2d(m->dev, m->ws.block, step->block, bytes);
}

/* The residual stream after a layer, where a probe wants it. */
static ql_status probe_hidden(ql_model *m, const ql_step *step, int32_t layer_index) {
    if (!step->probe_hidden || m->comm->lane != 0) {
        return QL_OK;
    }
    int64_t n = (int64_t)step->n_row * m->config->hidden;
    return m->dev->ops->d2h(m->dev, step->probe_hidden + layer_index * n, m->ws.x, (size_t)n * sizeof(float));
}

/* Everything a step does on the device between its inputs and its outputs. Without probes it touches no host memory and
 * can be recorded. */
static ql_status compute(ql_model *m, const ql_step *step, const ql_batch *b, int64_t *mark) {
    ql_workspace *ws = &m->ws;
    const uint8_t *in = ws->block;
    const ql_step_layout *at = &m->layout;
    int64_t elems = (int64_t)b->n_row * m->config->hidden;
    QL_TRY(embed(m, (const int32_t *)(in + at->id), b->n_row, ws->x));
    lap(m, QL_TIME_EMBED, mark);
    QL_TRY(probe_hidden(m, step, 0));
    m->chaining = m->chain && m->dev->ops->chain && !step->probe_hidden;
    for (int32_t i = 0; i < m->config->n_layer; i++) {
        QL_TRY(layer(m, b, &m->layer[i], ws->x, i > 0, mark));
        if (step->probe_hidden) {
            /* The next norm adds the product to x; a probe wants the sum now. Adding it twice is avoided by zeroing. */
            OP(m, add, (ql_add_args){.x = ws->x, .y = ws->delta, .n = elems});
            QL_TRY(m->dev->ops->zero(m->dev, ws->delta, (size_t)elems * sizeof(float)));
            QL_TRY(probe_hidden(m, step, i + 1));
        }
    }
    QL_TRY(flush(m));
    m->chaining = false;
    QL_TRY(norm(m, b->n_row, ws->x, ws->delta, m->norm, ws->xn, m->config->hidden));
    if (step->probe_final && m->comm->lane == 0) {
        QL_TRY(m->dev->ops->d2h(m->dev, step->probe_final, ws->xn, (size_t)elems * sizeof(float)));
    }
    if (step->probe_logits) {
        QL_TRY(probe_head(m, b, ws->xn, b->n_row, step->probe_logits));
    }
    if (step->n_out > 0) {
        OP(m, gather_rows,
           (ql_gather_rows_args){.x = ws->xn,
                                 .row = (const int32_t *)(in + at->out_row),
                                 .y = ws->out_x,
                                 .n = step->n_out,
                                 .width = m->config->hidden});
        QL_TRY(head(m, b, ws->out_x, step->n_out));
        lap(m, QL_TIME_HEAD, mark);
        QL_TRY(choose(m, step, (const ql_sample_row *)(in + at->sample), (const ql_penalty *)(in + at->penalty)));
    }
    return QL_OK;
}

/* ---- recorded steps ------------------------------------------------------------------------------------------- */

/* Every row of a generation step has an output, so its launches depend on how many rows and sequences it has, its candidate
 * count and the ctx of its batch alone; how many rows are whose, as all else, is in device memory. So each such shape is
 * recorded once and replayed. It runs plainly the first time, when the device may still load code. */
static ql_status run_recorded(ql_model *m, const ql_step *step, const ql_batch *b, int64_t *mark) {
    const ql_ops *ops = m->dev->ops;
    ql_recording *r = NULL;
    for (int32_t i = 0; i < m->n_recording && !r; i++) {
        r = m->recording[i].n_row == step->n_row && m->recording[i].n_seg == step->n_seg &&
                    m->recording[i].k_cap == step->k_cap && m->recording[i].ctx == b->ctx
                ? &m->recording[i]
                : NULL;
    }
    if (!r) {
        int32_t i = m->n_recording < QL_MAX_RECORDINGS ? m->n_recording++ : m->next_recording++ % QL_MAX_RECORDINGS;
        r = &m->recording[i];
        ops->graph_free(m->dev, r->graph);
        *r = (ql_recording){.n_row = step->n_row, .n_seg = step->n_seg, .k_cap = step->k_cap, .ctx = b->ctx};
        return compute(m, step, b, mark);
    }
    if (!r->graph) {
        uint64_t before[QL_PATH_COUNT];
        memcpy(before, m->dev->n_path, sizeof before);
        QL_TRY(ops->graph_begin(m->dev));
        ql_status status = compute(m, step, b, mark);
        ql_status ended = ops->graph_end(m->dev, &r->graph); /* ends the capture in any case */
        QL_TRY(status);
        QL_TRY(ended);
        for (int32_t p = 0; p < QL_PATH_COUNT; p++) {
            r->calls[p] = m->dev->n_path[p] - before[p];
            ql_dev_count(&m->dev->n_path[p], 0 - r->calls[p]); /* recorded, not run */
        }
    }
    for (int32_t p = 0; p < QL_PATH_COUNT; p++) {
        ql_dev_count(&m->dev->n_path[p], r->calls[p]);
    }
    ql_dev_count(&m->dev->progress, 1);
    return ops->graph_launch(m->dev, r->graph);
}

/* ctx of the step's batch. Steps of more rows launch the same anywhere, and need no recordings of their own. */
static int32_t ctx_of(const ql_model *m, const ql_step *step) {
    if (step->n_row > QL_SHORT_ROWS) {
        return 0;
    }
    const int32_t *pos = (const int32_t *)(const void *)(step->block + m->layout.row_pos);
    bool all_short = true;
    for (int32_t i = 0; i < step->n_row; i++) {
        all_short = all_short && pos[i] < QL_SHORT_CTX;
    }
    return all_short ? QL_SHORT_CTX : 0;
}

ql_status ql_model_step(ql_model *m, const ql_step *step) {
    ql_workspace *ws = &m->ws;
    const ql_step_layout *at = &m->layout;
    const uint8_t *in = ws->block;
    ql_batch b = {
        .phase = step->phase,
        .n_row = step->n_row,
        .n_seg = step->n_seg,
        .max_page = ql_model_max_page(&m->limits),
        .ctx = ctx_of(m, step),
        .row_seg = (const int32_t *)(in + at->row_seg),
        .row_pos = (const int32_t *)(in + at->row_pos),
        .seg_row = (const int32_t *)(in + at->seg_row),
        .seg_pos = (const int32_t *)(in + at->seg_pos),
        .seg_slot = (const int32_t *)(in + at->seg_slot),
        .page = (const int32_t *)(in + at->page),
    };
    int64_t mark = ql_now_ns();
    QL_TRY(upload(m, step));
    bool record = step->phase == QL_PHASE_GEN && m->dev->ops->graph_begin;
    QL_TRY(record ? run_recorded(m, step, &b, &mark) : compute(m, step, &b, &mark));
    if (step->logits) {
        QL_TRY(copy_columns(m, ws->logits, step->n_out, step->logits));
    }
    if (step->n_out > 0 && m->comm->lane == 0) {
        QL_TRY(m->dev->ops->d2h(m->dev, step->id, ws->id, (size_t)step->n_out * sizeof *step->id));
        QL_TRY(m->dev->ops->d2h(m->dev, step->logprob, ws->logprob, (size_t)step->n_out * sizeof *step->logprob));
    }
    if (step->n_mtp_row > 0) {
        QL_TRY(mtp(m, step, &b, (const int32_t *)(in + at->next_id), (const int32_t *)(in + at->mtp_seg_row)));
    }
    QL_TRY(m->dev->ops->sync(m->dev));
    if (m->comm->check) {
        QL_TRY(m->comm->check(m->comm));
    }
    lap(m, QL_TIME_SAMPLE, &mark);
    return QL_OK;
}
