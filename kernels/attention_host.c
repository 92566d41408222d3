/* Host twins of attn_prep and attention.
 *
 * attention takes up to 64 (row, head) pairs of one kv head at a time, so that a block of 64 keys and values is decoded
 * to f32 once for all of them. Each pair folds the blocks on its own, whatever it shares the tile with.
 */
#include "kernels/host/acc16.h"
#include "kernels/host/attention_common.h"
#include "runtime/base/num.h"

#include <math.h>
#include <string.h>

enum { D = QL_ATTENTION_D, TILE = 64, FP8_GROUP = QL_KV_SCALE_GROUP };

/* Index of the first channel of a cache row. */
static int64_t cache_row(const ql_kv_cache *cache, int32_t page, int32_t head, int32_t pos) {
    return (((int64_t)page * cache->n_kv_head + head) * QL_PAGE + pos % QL_PAGE) * D;
}

/* ---- attn_prep ---- */

/* y = rope(rmsnorm1p(x, w)); rope: cosine and sine of `rotary / 2` pairs at this position */
static void norm_rope(const float *x, const float *w, float eps, const float *rope, int32_t rotary, float *y) {
    float scale = 1.0f / sqrtf(ql_dot16(x, x, D) / (float)D + eps);
    for (int32_t i = 0; i < D; i++) {
        y[i] = (x[i] * scale) * (1.0f + w[i]);
    }
    int32_t half = rotary / 2;
    for (int32_t i = 0; i < half; i++) {
        float c = rope[2 * i], s = rope[2 * i + 1], lo = y[i], hi = y[i + half];
        y[i] = lo * c - hi * s;
        y[i + half] = hi * c + lo * s;
    }
}

static void store_fp8(const float *x, uint8_t *code, uint16_t *scale) {
    for (int32_t g = 0; g < D / FP8_GROUP; g++, x += FP8_GROUP, code += FP8_GROUP) {
        float amax = 0x1p-14f;
        for (int32_t i = 0; i < FP8_GROUP; i++) {
            float v = fabsf(x[i]);
            amax = v > amax ? v : amax;
        }
        float s = amax / 448.0f;
        uint16_t h = ql_f16_of_f32(s);
        if (ql_f32_of_f16(h) < s) {
            h++;
        }
        s = ql_f32_of_f16(h);
        scale[g] = h;
        for (int32_t i = 0; i < FP8_GROUP; i++) {
            code[i] = ql_e4m3_of_f32(x[i] / s);
        }
    }
}

static void store(ql_kv_type type, const float *x, void *cache, void *scale, int64_t at) {
    switch (type) {
    case QL_KV_F32: memcpy((float *)cache + at, x, D * sizeof *x); break;
    case QL_KV_F16:
        for (int32_t i = 0; i < D; i++) {
            ((uint16_t *)cache)[at + i] = ql_f16_of_f32(x[i]);
        }
        break;
    case QL_KV_BF16:
        for (int32_t i = 0; i < D; i++) {
            ((uint16_t *)cache)[at + i] = ql_bf16_of_f32(x[i]);
        }
        break;
    case QL_KV_FP8: store_fp8(x, (uint8_t *)cache + at, (uint16_t *)scale + at / FP8_GROUP); break;
    }
}

ql_status ql_attn_prep_host(ql_dev *dev, const ql_attn_prep_args *a) {
    (void)dev;
    const ql_batch *batch = a->batch;
    const ql_kv_cache *cache = a->cache;
    for (int64_t t = 0; t < batch->n_row; t++) {
        int32_t pos = batch->row_pos[t];
        int32_t page = batch->page[(int64_t)batch->row_seg[t] * batch->max_page + pos / QL_PAGE];
        const float *rope = a->rope + (int64_t)pos * a->rotary;
        for (int64_t h = 0; h < a->n_head; h++) {
            norm_rope(a->qg + (t * a->n_head + h) * 2 * D, a->q_norm, a->eps, rope, a->rotary,
                      a->q + (t * a->n_head + h) * D);
        }
        for (int32_t h = 0; h < cache->n_kv_head; h++) {
            int64_t from = (t * cache->n_kv_head + h) * D, at = cache_row(cache, page, h, pos);
            float k[D];
            norm_rope(a->k + from, a->k_norm, a->eps, rope, a->rotary, k);
            store(cache->type, k, cache->k, cache->k_scale, at);
            store(cache->type, a->v + from, cache->v, cache->v_scale, at);
        }
    }
    return QL_OK;
}

/* ---- attention ---- */

static void load(ql_kv_type type, const void *cache, const void *scale, int64_t at, int32_t n, float *x) {
    switch (type) {
    case QL_KV_F32: memcpy(x, (const float *)cache + at, (size_t)n * sizeof *x); break;
    case QL_KV_F16:
        for (int32_t i = 0; i < n; i++) {
            x[i] = ql_f32_of_f16(((const uint16_t *)cache)[at + i]);
        }
        break;
    case QL_KV_BF16:
        for (int32_t i = 0; i < n; i++) {
            x[i] = ql_f32_of_bf16(((const uint16_t *)cache)[at + i]);
        }
        break;
    case QL_KV_FP8:
        for (int32_t i = 0; i < n; i++) {
            float s = ql_f32_of_f16(((const uint16_t *)scale)[(at + i) / FP8_GROUP]);
            x[i] = ql_f32_of_e4m3(((const uint8_t *)cache)[at + i]) * s;
        }
        break;
    }
}

typedef struct scratch {
    float k[QL_PAGE * D], v[QL_PAGE * D];
    ql_attention_fold fold[TILE];
} scratch;

static void add_scaled(float w, const float *restrict x, float *restrict y) {
    for (int32_t c = 0; c < D; c++) {
        y[c] += w * x[c];
    }
}

static void block(const float *q, const float *k, const float *v, int32_t n, bool first, ql_attention_fold *f) {
    float w[QL_PAGE], o[D] = {0}, sum = 0.0f, max = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        w[i] = ql_dot16(q, k + i * D, D) * 0.0625f;
        max = w[i] > max ? w[i] : max;
    }
    for (int32_t i = 0; i < n; i++) {
        w[i] = expf(w[i] - max);
        sum += w[i];
        add_scaled(w[i], v + i * D, o);
    }
    ql_attention_host_fold(f, first, max, sum, o);
}

void ql_attention_host_fold(ql_attention_fold *f, bool first, float max, float sum, const float *o) {
    if (first) {
        f->max = max;
        f->sum = sum;
        memcpy(f->o, o, sizeof f->o);
        return;
    }
    float top = max > f->max ? max : f->max, old = expf(f->max - top), new = expf(max - top);
    f->max = top;
    f->sum = f->sum * old + sum * new;
    for (int32_t c = 0; c < D; c++) {
        f->o[c] = f->o[c] * old + o[c] * new;
    }
}

/* ---- prompt rows in precision bf16 or fp8 ---- */

static bool rounds(const ql_attention_args *a) {
    return a->batch->phase == QL_PHASE_PROMPT && (a->precision == QL_PREC_BF16 || a->precision == QL_PREC_FP8);
}

static bool holds_f16(ql_kv_type type) { return type == QL_KV_F16 || type == QL_KV_FP8; }

static float round_once(float x, bool f16) {
    return f16 ? ql_f32_of_f16(ql_f16_of_f32(x)) : ql_f32_of_bf16(ql_bf16_of_f32(x));
}

static void round_all(float *x, int32_t n, bool f16) {
    for (int32_t i = 0; i < n; i++) {
        x[i] = round_once(x[i], f16);
    }
}

/* The power of two that brings q's largest magnitude to 2^14 .. 2^15. */
static float scale_to_f16(const float *q) {
    float most = 0.0f;
    for (int32_t c = 0; c < D; c++) {
        most = fabsf(q[c]) > most ? fabsf(q[c]) : most;
    }
    return most > 0.0f ? ldexpf(1.0f, 14 - ilogbf(most) < 126 ? 14 - ilogbf(most) : 126) : 1.0f;
}

static void block_rounded(const float *q, const float *k, const float *v, int32_t n, bool first, bool f16,
                          ql_attention_fold *f) {
    const float scale = 0.0625f * 1.4426950408889634f, lift = f16 ? 15.0f : 0.0f;
    float x[D], w[QL_PAGE], o[D] = {0}, sum = 0.0f, top = first ? -INFINITY : f->max, up = f16 ? scale_to_f16(q) : 1.0f;
    for (int32_t c = 0; c < D; c++) {
        x[c] = round_once(q[c] * up, f16) / up;
    }
    for (int32_t i = 0; i < n; i++) {
        w[i] = ql_dot16(x, k + i * D, D);
        top = w[i] * scale > top ? w[i] * scale : top;
    }
    for (int32_t i = 0; i < n; i++) {
        w[i] = exp2f(fmaf(w[i], scale, lift - top));
        sum += w[i];
        add_scaled(round_once(w[i], f16), v + i * D, o);
    }
    float keep = first ? 0.0f : exp2f(f->max - top);
    f->max = top;
    f->sum = first ? sum : f->sum * keep + sum;
    for (int32_t c = 0; c < D; c++) {
        f->o[c] = first ? o[c] : f->o[c] * keep + o[c];
    }
}

/* ---- the walk ---- */

size_t ql_attention_host_scratch(const ql_shape *shape) {
    (void)shape;
    return sizeof(scratch);
}

ql_status ql_attention_host_walk(ql_dev *dev, const ql_attention_args *a, const ql_attention_variant *variant) {
    const ql_batch *batch = a->batch;
    const ql_kv_cache *cache = a->cache;
    scratch *x = dev->scratch;
    bool rounded = rounds(a), f16 = holds_f16(cache->type);
    for (int32_t s = 0; s < batch->n_seg; s++) {
        int32_t row0 = batch->seg_row[s], n_row = batch->seg_row[s + 1] - row0;
        const int32_t *page = batch->page + (int64_t)s * batch->max_page;
        for (int32_t h0 = 0, h1; h0 < a->n_head; h0 = h1) {
            int32_t kv = (a->head0 + h0) / a->group; /* kv head of local heads h0 .. h1-1, counted in the whole model */
            h1 = (kv + 1) * a->group - a->head0;
            h1 = h1 < a->n_head ? h1 : a->n_head;
            int32_t n_head = h1 - h0;
            int64_t n_pair = (int64_t)n_row * n_head;
            for (int64_t p0 = 0; p0 < n_pair; p0 += TILE) {
                int64_t p1 = p0 + TILE < n_pair ? p0 + TILE : n_pair;
                int32_t last = batch->seg_pos[s] + (int32_t)((p1 - 1) / n_head);
                for (int32_t pos = 0; pos <= last; pos += QL_PAGE) {
                    int32_t n = last - pos < QL_PAGE ? last - pos + 1 : QL_PAGE;
                    int64_t at = cache_row(cache, page[pos / QL_PAGE], kv - a->kv_head0, 0);
                    variant->load(cache->type, cache->k, cache->k_scale, at, n * D, x->k);
                    variant->load(cache->type, cache->v, cache->v_scale, at, n * D, x->v);
                    if (rounded && (cache->type == QL_KV_F32 || cache->type == QL_KV_FP8)) {
                        round_all(x->k, n * D, f16);
                        round_all(x->v, n * D, f16);
                    }
                    for (int64_t p = p0; p < p1; p++) {
                        int64_t row = row0 + p / n_head;
                        int32_t n_seen = batch->seg_pos[s] + (int32_t)(p / n_head) - pos + 1;
                        const float *q = a->q + (row * a->n_head + h0 + p % n_head) * D;
                        ql_attention_fold *f = &x->fold[p - p0];
                        n_seen = n_seen < n ? n_seen : n;
                        if (n_seen > 0 && rounded) {
                            block_rounded(q, x->k, x->v, n_seen, pos == 0, f16, f);
                        } else if (n_seen > 0) {
                            variant->block(q, x->k, x->v, n_seen, pos == 0, f);
                        }
                    }
                }
                for (int64_t p = p0; p < p1; p++) {
                    int64_t h = (row0 + p / n_head) * a->n_head + h0 + p % n_head;
                    const ql_attention_fold *f = &x->fold[p - p0];
                    const float *gate = a->qg + h * 2 * D + D;
                    for (int32_t c = 0; c < D; c++) {
                        a->o[h * D + c] = (f->o[c] / f->sum) * (1.0f / (1.0f + expf(-gate[c])));
                    }
                }
            }
        }
    }
    return QL_OK;
}

ql_status ql_attention_host(ql_dev *dev, const ql_attention_args *a) {
    static const ql_attention_variant twin = {load, block};
    return ql_attention_host_walk(dev, a, &twin);
}
