/* Sizes of everything a lane holds, and its allocation in the same terms. */
#include "runtime/model/model_impl.h"

#include "runtime/base/thread.h"

#include <math.h>
#include <string.h>

static int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

/* ---- shapes ------------------------------------------------------------------------------------------------- */

static int32_t vocab_at(const ql_config *c, int32_t range) {
    return (int32_t)((int64_t)c->vocab * range / QL_VOCAB_SLICES);
}

int32_t ql_model_k_full(const ql_config *c, int32_t n_lane) {
    int32_t per = QL_VOCAB_SLICES / n_lane, k = 0;
    for (int32_t l = 0; l < n_lane; l++) {
        k = max_i32(k, vocab_at(c, (l + 1) * per) - vocab_at(c, l * per));
    }
    return k;
}

ql_shape ql_model_shape(const ql_config *c, const ql_shard *s, const ql_model_limits *l) {
    return (ql_shape){
        .hidden = c->hidden,
        .vocab = c->vocab,
        .vocab_local = s->vocab1 - s->vocab0,
        .n_head = s->q1 - s->q0,
        .n_kv_head = s->kv1 - s->kv0,
        .n_key_head = s->k1 - s->k0,
        .n_value_head = s->v1 - s->v0,
        .mlp = s->m1 - s->m0,
        .max_row = l->max_row,
        .max_seg = l->max_seq,
        .max_out = l->max_seq,
        .max_ctx = l->max_ctx,
    };
}

/* ---- workspace ---------------------------------------------------------------------------------------------- */

/* Hands out consecutive 256-byte aligned pieces; with base NULL it only counts. */
typedef struct carver {
    uint8_t *base;
    size_t at;
} carver;

static void *carve(carver *c, int64_t n, size_t size) {
    void *p = c->base ? c->base + c->at : NULL;
    c->at += ((size_t)n * size + 255) & ~(size_t)255;
    return p;
}

static float *carve_f32(carver *c, int64_t n) { return carve(c, n, sizeof(float)); }

int64_t ql_step_max_penalty(const ql_model_limits *l) { return (int64_t)l->max_seq * l->max_ctx; }

void ql_step_layout_of(const ql_model_limits *l, ql_step_layout *o) {
    carver c = {NULL, 0};
    int64_t rows = l->max_row, segs = l->max_seq;
#define PLACE(field, n, size) (o->field = c.at, (void)carve(&c, (n), (size)))
    PLACE(id, rows, 4);
    PLACE(row_seg, rows, 4);
    PLACE(row_pos, rows, 4);
    PLACE(seg_row, segs + 1, 4);
    PLACE(seg_pos, segs, 4);
    PLACE(seg_slot, segs, 4);
    PLACE(page, segs * ql_model_max_page(l), 4);
    PLACE(out_row, segs, 4);
    PLACE(next_id, rows, 4);
    PLACE(mtp_seg_row, 2, 4);
    PLACE(sample, segs, sizeof(ql_sample_row));
    /* Last: a step uploads only as many penalties as it has. */
    PLACE(penalty, ql_step_max_penalty(l), sizeof(ql_penalty));
#undef PLACE
    o->bytes = c.at;
}

void ql_workspace_place(ql_workspace *ws, const ql_config *cfg, const ql_shard *s, const ql_model_limits *l,
                        uint8_t *base) {
    carver c = {base, 0};
    ql_step_layout layout;
    ql_step_layout_of(l, &layout);
    int64_t rows = l->max_row, outs = l->max_seq, hidden = cfg->hidden;
    int64_t channels = ql_model_channels(s), values = (s->v1 - s->v0), heads = s->q1 - s->q0,
            kv_heads = s->kv1 - s->kv0;

    ws->block = carve(&c, (int64_t)layout.bytes, 1);
    ws->x = carve_f32(&c, rows * hidden);
    ws->xn = carve_f32(&c, rows * hidden);
    ws->part = s->n_lane > 1 ? carve_f32(&c, rows * hidden) : NULL;
    ws->delta = carve_f32(&c, rows * hidden);

    /* One region for whichever of GatedDeltaNet, attention and MLP is at work. */
    carver gdn = c, attn = c, mlp = c;
    ws->m = carve_f32(&gdn, rows * channels);
    ws->u = carve_f32(&gdn, rows * channels);
    ws->z = carve_f32(&gdn, rows * values * QL_GDN_DIM);
    ws->a = carve_f32(&gdn, rows * values);
    ws->b = carve_f32(&gdn, rows * values);
    ws->o = carve_f32(&gdn, rows * values * QL_GDN_DIM);
    ws->qg = carve_f32(&attn, rows * heads * 2 * QL_HEAD_DIM);
    ws->k = carve_f32(&attn, rows * kv_heads * QL_HEAD_DIM);
    ws->v = carve_f32(&attn, rows * kv_heads * QL_HEAD_DIM);
    ws->q = carve_f32(&attn, rows * heads * QL_HEAD_DIM);
    ws->gate = carve_f32(&mlp, rows * (s->m1 - s->m0));
    ws->up = carve_f32(&mlp, rows * (s->m1 - s->m0));
    c.at = gdn.at > attn.at ? gdn.at : attn.at;
    c.at = mlp.at > c.at ? mlp.at : c.at;

    int64_t k_full = ql_model_k_full(cfg, s->n_lane), ranges = QL_STAT_RANGES / s->n_lane;
    ws->out_x = carve_f32(&c, outs * hidden);
    ws->logits = carve_f32(&c, outs * (s->vocab1 - s->vocab0));
    ws->cand = carve(&c, outs * k_full, sizeof(ql_candidate));
    ws->cand_all = carve(&c, outs * k_full * s->n_lane, sizeof(ql_candidate));
    ws->stat = carve(&c, outs * ranges, sizeof(ql_vocab_stat));
    ws->stat_all = carve(&c, outs * QL_STAT_RANGES, sizeof(ql_vocab_stat));
    ws->id = carve(&c, outs, sizeof(int32_t));
    ws->logprob = carve_f32(&c, outs);
    ws->mtp_cat = l->mtp ? carve_f32(&c, rows * 2 * hidden) : NULL;
    ws->mtp_x = l->mtp ? carve_f32(&c, rows * hidden) : NULL;
    ws->bytes = c.at;
}

static uint64_t rope_bytes(const ql_config *c, const ql_model_limits *l) {
    return (uint64_t)l->max_ctx * (uint64_t)c->rotary_dim * sizeof(float);
}

/* ---- plan --------------------------------------------------------------------------------------------------- */

uint64_t ql_model_page_bytes(const ql_checkpoint *ckpt, const ql_shard *s, const ql_model_limits *l) {
    int32_t n = l->mtp ? 1 : 0;
    for (int32_t i = 0; i < ckpt->config.n_layer; i++) {
        n += ckpt->config.full_attention[i];
    }
    return (uint64_t)n * ql_kv_page_bytes(l->kv, s->kv1 - s->kv0);
}

static uint64_t layer_state_bytes(const ql_shard *s) {
    return sizeof(float) *
           ((uint64_t)(s->v1 - s->v0) * QL_GDN_DIM * QL_GDN_DIM + (QL_CONV_TAPS - 1) * (uint64_t)ql_model_channels(s));
}

uint64_t ql_model_slot_bytes(const ql_checkpoint *ckpt, const ql_shard *s) {
    uint64_t n = 0;
    for (int32_t i = 0; i < ckpt->config.n_layer; i++) {
        n += !ckpt->config.full_attention[i];
    }
    return n * layer_state_bytes(s);
}

typedef struct sizer {
    const ql_shard *shard;
    const ql_config *config;
    const ql_ops *ops;
    ql_model_bytes *out;
} sizer;

static ql_status size_item(void *user, const ql_visit *item, ql_error *err) {
    (void)err;
    sizer *z = user;
    ql_cut cut = ql_shard_cut(z->config, z->shard, item->part);
    if (item->linear) {
        const ql_linear *lin = item->linear;
        uint64_t w, s;
        ql_linear_stored_bytes(lin, &cut, &w, &s);
        z->out->stored_weight += w;
        z->out->stored_scale += s;
        int32_t n = cut.axis == 0 ? ql_cut_len(&cut) : lin->n, k = cut.axis == 1 ? ql_cut_len(&cut) : lin->k;
        z->ops->weight_bytes(lin->format, n, k, cut.axis == 0 ? cut.begin[0] % QL_FP8_BLOCK : 0,
                             cut.axis == 1 ? cut.begin[0] % QL_FP8_BLOCK : 0, &w, &s);
        z->out->weight += w;
        z->out->scale += s;
        return QL_OK;
    }
    uint64_t stored = ql_tensor_stored_bytes(item->tensor, &cut);
    uint64_t width = (uint64_t)ql_dtype_bits(item->tensor->dtype) / 8;
    z->out->stored_weight += stored;
    /* The embedding stays as stored, and serves as the head too where the two are tied; vectors are held as f32. */
    z->out->weight += item->role == QL_ROLE_EMBED ? stored : stored / width * sizeof(float);
    return QL_OK;
}

void ql_model_size(const ql_checkpoint *ckpt, const ql_shard *shard, const ql_model_limits *limits, const ql_ops *ops,
                   ql_model_bytes *out) {
    memset(out, 0, sizeof *out);
    sizer z = {shard, &ckpt->config, ops, out};
    ql_checkpoint_each(ckpt, limits->mtp, size_item, &z, NULL);
    out->kv = ql_model_page_bytes(ckpt, shard, limits) * (uint64_t)limits->n_page;
    out->state = ql_model_slot_bytes(ckpt, shard) * (uint64_t)limits->max_seq;
    ql_workspace ws;
    ql_workspace_place(&ws, &ckpt->config, shard, limits, NULL);
    ql_shape shape = ql_model_shape(&ckpt->config, shard, limits);
    out->workspace = ws.bytes + rope_bytes(&ckpt->config, limits) + ops->scratch_bytes(NULL, &shape) +
                     ((uint64_t)ckpt->config.vocab + 31) / 32 * 4;
}

/* ---- allocation --------------------------------------------------------------------------------------------- */

/* The frequencies of rotary pair i, with YaRN's interpolation (Peng et al. 2023, equations 17 to 23) where configured. */
static double rope_frequency(const ql_config *c, int32_t i) {
    double dim = c->rotary_dim, f = pow(c->rope_theta, -2.0 * i / dim);
    if (c->yarn_factor <= 1) {
        return f;
    }
    const double beta_fast = 32, beta_slow = 1;
    double span = log(c->yarn_original_ctx / (beta_fast * 2 * M_PI)),
           slow = log(c->yarn_original_ctx / (beta_slow * 2 * M_PI));
    double low = floor(dim * span / (2 * log(c->rope_theta))), high = ceil(dim * slow / (2 * log(c->rope_theta)));
    low = low < 0 ? 0 : low;
    high = high > dim - 1 ? dim - 1 : high;
    double ramp = (i - low) / (high > low ? high - low : 0.001);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return f * (1 - ramp) + f / c->yarn_factor * ramp;
}

/* Sines and cosines of some positions, on a thread of the pool. */
typedef struct rope_job {
    ql_job job; /* first */
    const ql_config *config;
    float *table;
    int64_t p0, p1;
} rope_job;

void ql_rope_fill(const ql_config *c, int64_t p0, int64_t p1, float *rows) {
    int32_t half = c->rotary_dim / 2;
    double scale = c->yarn_factor > 1 ? 0.1 * log(c->yarn_factor) + 1 : 1;
    for (int32_t i = 0; i < half; i++) {
        double f = rope_frequency(c, i);
        for (int64_t p = p0; p < p1; p++) {
            float *pair = rows + ((p - p0) * half + i) * 2;
            pair[0] = (float)(cos((double)p * f) * scale);
            pair[1] = (float)(sin((double)p * f) * scale);
        }
    }
}

static void fill_rope(ql_job *job) {
    const rope_job *j = (const rope_job *)job;
    ql_rope_fill(j->config, j->p0, j->p1, j->table + j->p0 * j->config->rotary_dim);
}

static ql_status make_rope(ql_model *m, ql_pool *pool) {
    enum { JOBS = 64 };
    rope_job job[JOBS];
    size_t bytes = (size_t)rope_bytes(m->config, &m->limits);
    float *table = NULL;
    QL_TRY(m->dev->ops->alloc(m->dev, bytes, "the rotary table", (void **)&m->rope));
    QL_TRY(ql_alloc(m->dev->mem, bytes, 1, "the rotary table", (void **)&table, m->dev->err));
    for (int64_t i = 0; i < JOBS; i++) {
        int64_t n = m->limits.max_ctx;
        job[i] = (rope_job){
            .job.run = fill_rope, .config = m->config, .table = table, .p0 = n * i / JOBS, .p1 = n * (i + 1) / JOBS};
        ql_pool_post(pool, &job[i].job);
    }
    for (int32_t i = 0; i < JOBS; i++) {
        ql_pool_wait(pool, &job[i].job);
    }
    ql_status status = m->dev->ops->h2d(m->dev, m->rope, table, bytes);
    ql_free(m->dev->mem, table);
    return status;
}

static ql_status alloc_cache(ql_model *m, ql_kv_cache *cache) {
    *cache = (ql_kv_cache){.type = m->limits.kv, .n_page = m->limits.n_page, .n_kv_head = m->shape.n_kv_head};
    uint64_t entries = (uint64_t)cache->n_page * (uint64_t)cache->n_kv_head * QL_PAGE;
    size_t elem = m->limits.kv == QL_KV_F32 ? 4 : m->limits.kv == QL_KV_FP8 ? 1 : 2;
    QL_TRY(m->dev->ops->alloc(m->dev, entries * QL_HEAD_DIM * elem, "the key cache", &cache->k));
    QL_TRY(m->dev->ops->alloc(m->dev, entries * QL_HEAD_DIM * elem, "the value cache", &cache->v));
    if (m->limits.kv == QL_KV_FP8) {
        QL_TRY(m->dev->ops->alloc(m->dev, entries * 4 * 2, "the key cache's scales", &cache->k_scale));
        QL_TRY(m->dev->ops->alloc(m->dev, entries * 4 * 2, "the value cache's scales", &cache->v_scale));
    }
    m->held.kv += (uint64_t)cache->n_page * ql_kv_page_bytes(cache->type, cache->n_kv_head);
    return QL_OK;
}

static ql_status alloc_state(ql_model *m) {
    size_t slots = (size_t)m->limits.max_seq;
    for (int32_t i = 0; i < m->config->n_layer; i++) {
        ql_layer_weights *w = &m->layer[i];
        if (w->full_attention) {
            QL_TRY(alloc_cache(m, &w->cache));
            continue;
        }
        size_t s = slots * (size_t)m->shape.n_value_head * QL_GDN_DIM * QL_GDN_DIM * sizeof(float);
        size_t t = slots * (QL_CONV_TAPS - 1) * (size_t)ql_model_channels(&m->shard) * sizeof(float);
        QL_TRY(m->dev->ops->alloc(m->dev, s, "the recurrent state", (void **)&w->state));
        QL_TRY(m->dev->ops->alloc(m->dev, t, "the convolution tail", (void **)&w->tail));
        m->held.state += s + t;
    }
    if (m->has_mtp) {
        QL_TRY(alloc_cache(m, &m->mtp.layer.cache));
    }
    return QL_OK;
}

static size_t allowed_bytes(const ql_config *c) { return ((size_t)c->vocab + 31) / 32 * 4; }

ql_status ql_model_allow(ql_model *m, const uint32_t *allowed) {
    QL_TRY(m->dev->ops->h2d(m->dev, m->allowed, allowed, allowed_bytes(m->config)));
    return m->dev->ops->sync(m->dev);
}

static ql_status alloc_workspace(ql_model *m, const uint32_t *allowed, ql_pool *pool) {
    ql_dev *dev = m->dev;
    ql_workspace_place(&m->ws, m->config, &m->shard, &m->limits, NULL);
    QL_TRY(dev->ops->alloc(dev, m->ws.bytes, "the workspace", &m->ws_memory));
    ql_workspace_place(&m->ws, m->config, &m->shard, &m->limits, m->ws_memory);
    dev->scratch_bytes = dev->ops->scratch_bytes(dev, &m->shape);
    QL_TRY(dev->ops->alloc(dev, dev->scratch_bytes, "the kernels' scratch", &dev->scratch));
    size_t set_bytes = allowed_bytes(m->config);
    QL_TRY(dev->ops->alloc(dev, set_bytes, "the set of allowed ids", (void **)&m->allowed));
    if (allowed) {
        QL_TRY(ql_model_allow(m, allowed));
    }
    QL_TRY(make_rope(m, pool));
    m->held.workspace = m->ws.bytes + dev->scratch_bytes + set_bytes + rope_bytes(m->config, &m->limits);
    return QL_OK;
}

static void free_layer_state(ql_dev *dev, ql_layer_weights *w) {
    dev->ops->free(dev, w->cache.k);
    dev->ops->free(dev, w->cache.v);
    dev->ops->free(dev, w->cache.k_scale);
    dev->ops->free(dev, w->cache.v_scale);
    dev->ops->free(dev, w->state);
    dev->ops->free(dev, w->tail);
}

/* All of the plan in one piece where the device cares, each allocation rounded up to 256 bytes. */
static ql_status load_begin(ql_model *m, ql_pool *pool) {
    if (!m->dev->ops->load_begin) {
        return QL_OK;
    }
    ql_model_bytes b;
    ql_model_size(m->ckpt, &m->shard, &m->limits, m->dev->ops, &b);
    uint64_t n_alloc = 32 * ((uint64_t)m->config->n_layer + 2);
    return m->dev->ops->load_begin(m->dev, b.weight + b.scale + b.kv + b.state + b.workspace + 256 * n_alloc, pool);
}

ql_status ql_model_open(ql_model **model, const ql_checkpoint *ckpt, const ql_shard *shard,
                        const ql_model_limits *limits, ql_dev *dev, ql_comm *comm, ql_log *log, const uint32_t *allowed,
                        ql_pool *pool, ql_resident_fn resident, void *user, ql_error *err) {
    ql_model *m = NULL;
    QL_TRY(ql_alloc(dev->mem, 1, sizeof *m, "a lane's model", (void **)&m, err));
    m->ckpt = ckpt;
    m->config = &ckpt->config;
    m->shard = *shard;
    m->limits = *limits;
    m->shape = ql_model_shape(m->config, shard, limits);
    m->dev = dev;
    m->comm = comm;
    m->log = log;
    m->resident = resident;
    m->resident_user = user;
    m->has_mtp = limits->mtp;
    ql_step_layout_of(limits, &m->layout);
    ql_status status;
    QL_TRY_GOTO(ql_alloc(dev->mem, (size_t)m->config->n_layer, sizeof *m->layer, "the layers of a lane",
                         (void **)&m->layer, err),
                fail);
    for (int32_t i = 0; i < m->config->n_layer; i++) {
        m->layer[i].full_attention = m->config->full_attention[i];
    }
    if (dev->ops->chain && limits->gen_precision != QL_PREC_Q8) {
        QL_TRY_GOTO(ql_alloc(dev->mem, QL_CHAIN_MAX, sizeof *m->chain, "a chain of ops", (void **)&m->chain, err),
                    fail);
    }
    QL_TRY_GOTO(load_begin(m, pool), fail);
    QL_TRY_GOTO(alloc_state(m), fail);
    QL_TRY_GOTO(alloc_workspace(m, allowed, pool), fail);
    m->sized_ns = ql_now_ns();
    QL_TRY_GOTO(ql_model_load_weights(m), fail);
    QL_TRY_GOTO(dev->ops->sync(dev), fail);
    if (dev->ops->load_end) {
        dev->ops->load_end(dev);
    }
    *model = m;
    return QL_OK;

fail:
    if (dev->ops->load_end) {
        dev->ops->load_end(dev);
    }
    ql_model_close(&m);
    return status;
}

void ql_model_close(ql_model **model) {
    ql_model *m = *model;
    if (!m) {
        return;
    }
    ql_dev *dev = m->dev;
    for (int32_t i = 0; i < m->n_recording; i++) {
        dev->ops->graph_free(dev, m->recording[i].graph);
    }
    if (m->layer) {
        for (int32_t i = 0; i < m->config->n_layer; i++) {
            free_layer_state(dev, &m->layer[i]);
        }
        free_layer_state(dev, &m->mtp.layer);
        ql_model_free_weights(m);
    }
    dev->ops->free(dev, m->rope);
    dev->ops->free(dev, m->allowed);
    dev->ops->free(dev, m->ws_memory);
    dev->ops->free(dev, dev->scratch);
    dev->scratch = NULL;
    ql_free(dev->mem, m->layer);
    ql_free(dev->mem, m->chain);
    ql_free(dev->mem, m);
    *model = NULL;
}

int64_t ql_model_sized_ns(const ql_model *model) { return model->sized_ns; }
const ql_model_bytes *ql_model_held(const ql_model *model) { return &model->held; }
