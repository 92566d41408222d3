/* Makes a lane's slices resident: cuts each tensor as loader/shard.h says and hands the file's bytes to the device. */
#include "runtime/model/model_impl.h"

#include "runtime/base/num.h"

#include <stdio.h>
#include <string.h>
#include <zlib.h>

/* No trained weight of this family reaches beyond this: a scale is missing, doubled or inverted. */
static const float most_trained = 8.0f;
/* The largest E2M1 code: what FP4 codes reach that were written as numbers, without their scales. */
static const float most_e2m1 = 6.0f;

static void count(ql_model *m, uint64_t weight, uint64_t scale, uint64_t stored_weight, uint64_t stored_scale) {
    m->held.weight += weight;
    m->held.scale += scale;
    m->held.stored_weight += stored_weight;
    m->held.stored_scale += stored_scale;
    if (m->resident) {
        m->resident(m->resident_user, stored_weight + stored_scale);
    }
}

/* Looks at the largest magnitude of a weight, of quantized ones as its scales bound it. Beyond what is trained one line a lane
 * tells of the first, and the load goes on, since a model may be odd. Where the configuration says that there should be scales
 * and there are none, it is known to be damaged. */
static ql_status check_reach(ql_model *m, const char *name, bool plain, const char *unexpected, float most) {
    const bool beyond = most > most_trained;
    if (unexpected && (beyond || most == most_e2m1)) {
        return ql_fail(m->dev->err, QL_ERR_MODEL,
                       "%s: %s, and its weights reach %g%s: codes whose scales are lost; accepted is at most %g", name,
                       unexpected, (double)most, beyond ? "" : ", the largest FP4 code", (double)most_trained);
    }
    if (beyond && m->n_beyond++ == 0) {
        ql_logf(
            m->log, QL_LOG_WARN,
            plain ? "lane %d: %s reaches %g; trained weights of this family stay within %g: these may be codes without "
                    "their scale"
                  : "lane %d: %s reaches up to %g with its scales; trained weights of this family stay within %g: a "
                    "scale may be missing or inverted",
            m->shard.lane, name, (double)most, (double)most_trained);
    }
    return QL_OK;
}

/* ---- linear weights ----------------------------------------------------------------------------------------- */

static ql_status read_factor(ql_model *m, const ql_linear *lin, float *out) {
    *out = 1;
    if (!lin->factor) {
        return QL_OK;
    }
    float f;
    ql_dtype_to_f32(lin->factor->dtype, lin->factor->data, 1, &f);
    if (!(f > 0) || !isfinite(f)) {
        return ql_fail(m->dev->err, QL_ERR_MODEL, "%s is %g; a scale must be finite and above 0", lin->factor->name,
                       (double)f);
    }
    *out = lin->factor_divides ? 1 / f : f;
    return QL_OK;
}

/* CRC-32 of the cut's codes in the file: rows in order, each its columns. */
static uint32_t file_crc(const ql_weight_src *src) {
    size_t stride = (size_t)ql_qformat_row_bytes(src->format, src->full_k);
    size_t from = (size_t)ql_qformat_row_bytes(src->format, src->col0),
           len = (size_t)ql_qformat_row_bytes(src->format, src->k);
    uLong crc = crc32(0, NULL, 0);
    for (int32_t r = 0; r < src->n_range; r++) {
        for (int32_t row = src->row0[r]; row < src->row1[r]; row++) {
            crc = crc32_z(crc, src->data + (size_t)row * stride + from, len);
        }
    }
    return (uint32_t)crc;
}

/* What is resident, codes and scales, against what the file has. */
static ql_status verify(ql_model *m, const ql_weight *w, const ql_weight_src *src) {
    const char *differs;
    QL_TRY(m->dev->ops->weight_same(m->dev, w, src, &differs));
    if (!differs) {
        return QL_OK;
    }
    uint32_t crc;
    QL_TRY(m->dev->ops->weight_crc(m->dev, w, &crc));
    return ql_fail(m->dev->err, QL_ERR_DEVICE,
                   "%s: the %s on lane %d are not the file's; CRC-32 of its codes %08x, in the "
                   "file %08x",
                   src->module, differs, m->shard.lane, crc, file_crc(src));
}

static ql_file_place place_of(const ql_model *m, const ql_tensor *t) {
    return t ? (ql_file_place){m->ckpt->file[t->file].fd, t->offset} : (ql_file_place){0};
}

static ql_status load_slice(ql_model *m, const ql_weight_src *src, ql_weight *out) {
    ql_dev_count(&m->dev->progress, 1);
    if (m->dev->ops->weight_load(m->dev, src, out) != QL_OK) {
        char lane[32];
        snprintf(lane, sizeof lane, "lane %d", m->shard.lane);
        return ql_fail_in(m->dev->err, lane);
    }
    return m->limits.verify ? verify(m, out, src) : QL_OK;
}

static ql_status load_linear(ql_model *m, const ql_linear *lin, ql_part part, ql_weight *out) {
    ql_cut cut = ql_shard_cut(m->config, &m->shard, part);
    ql_weight_src src = {
        .module = lin->module,
        .format = lin->format,
        .n = cut.axis == 0 ? ql_cut_len(&cut) : lin->n,
        .k = cut.axis == 1 ? ql_cut_len(&cut) : lin->k,
        .n_range = 1,
        .row1 = {lin->n},
        .full_n = lin->n,
        .full_k = lin->k,
        .data = lin->weight->data,
        .scale = lin->scale ? lin->scale->data : NULL,
        .scale_dtype = lin->scale ? lin->scale->dtype : QL_DTYPE_F32,
        .data_file = place_of(m, lin->weight),
        .scale_file = place_of(m, lin->scale),
        .records = lin->format == QL_FORMAT_NVFP4 && m->limits.gen_precision == QL_PREC_Q8,
    };
    if (cut.axis == 0) {
        src.n_range = cut.n_range;
        memcpy(src.row0, cut.begin, sizeof src.row0);
        memcpy(src.row1, cut.end, sizeof src.row1);
    } else if (cut.axis == 1) {
        src.col0 = cut.begin[0];
    }
    QL_TRY(read_factor(m, lin, &src.factor));
    QL_TRY(load_slice(m, &src, out));
    QL_TRY(check_reach(m, lin->weight->name, lin->format <= QL_FORMAT_BF16, lin->unexpected, out->max_abs));
    uint64_t w, s;
    ql_linear_stored_bytes(lin, &cut, &w, &s);
    count(m, out->weight_bytes, out->scale_bytes, w, s);
    return QL_OK;
}

/* ---- plain tensors ------------------------------------------------------------------------------------------ */

static ql_status verify_vector(ql_model *m, const char *name, const float *held, const float *want, size_t bytes) {
    ql_dev *dev = m->dev;
    float *back = NULL;
    QL_TRY(ql_alloc(dev->mem, bytes, 1, name, (void **)&back, dev->err));
    ql_status status = dev->ops->d2h(dev, back, held, bytes);
    status = status == QL_OK ? dev->ops->sync(dev) : status;
    if (status == QL_OK && memcmp(back, want, bytes) != 0) {
        status = ql_fail(dev->err, QL_ERR_DEVICE, "%s: what lane %d holds is not the file's", name, m->shard.lane);
    }
    ql_free(dev->mem, back);
    return status;
}

/* The cut's rows as one f32 array on the device. */
static ql_status load_vector(ql_model *m, const ql_tensor *t, ql_part part, float **out) {
    ql_cut cut = ql_shard_cut(m->config, &m->shard, part);
    if (cut.axis != 0) {
        cut = (ql_cut){.axis = 0, .n_range = 1, .end = {(int32_t)t->shape[0]}};
    }
    int64_t width = t->shape[0] ? t->n_elem / t->shape[0] : 1, n = (int64_t)ql_cut_len(&cut) * width;
    float *tmp = NULL;
    ql_dev *dev = m->dev;
    QL_TRY(dev->ops->alloc(dev, (size_t)n * sizeof(float), t->name, (void **)out));
    QL_TRY(ql_alloc(dev->mem, (size_t)n, sizeof(float), t->name, (void **)&tmp, dev->err));
    float *at = tmp;
    size_t elem = (size_t)ql_dtype_bits(t->dtype) / 8;
    for (int32_t r = 0; r < cut.n_range; r++) {
        int64_t count_elem = (int64_t)(cut.end[r] - cut.begin[r]) * width;
        ql_dtype_to_f32(t->dtype, t->data + (size_t)(cut.begin[r] * width) * elem, count_elem, at);
        at += count_elem;
    }
    ql_status status = QL_OK;
    for (int64_t i = 0; i < n && status == QL_OK; i++) {
        if (!isfinite(tmp[i])) {
            status = ql_fail(dev->err, QL_ERR_MODEL, "%s: element %lld is %g; weights must be finite", t->name,
                             (long long)i, (double)tmp[i]);
        }
    }
    ql_dev_count(&dev->progress, 1);
    if (status == QL_OK) {
        status = dev->ops->h2d(dev, *out, tmp, (size_t)n * sizeof(float));
    }
    if (status == QL_OK && m->limits.verify) {
        status = verify_vector(m, t->name, *out, tmp, (size_t)n * sizeof(float));
    }
    ql_free(dev->mem, tmp);
    if (status == QL_OK) {
        count(m, (uint64_t)n * sizeof(float), 0, (uint64_t)n * elem, 0);
    }
    return status;
}

/* The lane's rows, as the file has them. */
static ql_status load_embedding(ql_model *m) {
    const ql_tensor *t = m->ckpt->embed;
    ql_weight_src src = {
        .module = t->name,
        .format = t->dtype == QL_DTYPE_F32   ? QL_FORMAT_F32
                  : t->dtype == QL_DTYPE_F16 ? QL_FORMAT_F16
                                             : QL_FORMAT_BF16,
        .n = m->shard.vocab1 - m->shard.vocab0,
        .k = (int32_t)t->shape[1],
        .n_range = 1,
        .row0 = {m->shard.vocab0},
        .row1 = {m->shard.vocab1},
        .full_n = (int32_t)t->shape[0],
        .full_k = (int32_t)t->shape[1],
        .data = t->data,
        .factor = 1,
        .data_file = place_of(m, t),
    };
    ql_weight w;
    QL_TRY(load_slice(m, &src, &w));
    m->embed = w.data;
    QL_TRY(check_reach(m, t->name, true, NULL, w.max_abs));
    count(m, w.weight_bytes, 0, w.weight_bytes, 0);
    return QL_OK;
}

/* ---- layers ------------------------------------------------------------------------------------------------- */

static ql_status load_layer(ql_model *m, const ql_layer *l, ql_layer_weights *w) {
    w->full_attention = l->full_attention;
    QL_TRY(load_vector(m, l->input_norm, QL_PART_WHOLE, &w->input_norm));
    QL_TRY(load_vector(m, l->post_norm, QL_PART_WHOLE, &w->post_norm));
    if (l->full_attention) {
        QL_TRY(load_linear(m, &l->q, QL_PART_Q, &w->q));
        QL_TRY(load_linear(m, &l->k, QL_PART_KV, &w->k));
        QL_TRY(load_linear(m, &l->v, QL_PART_KV, &w->v));
        QL_TRY(load_linear(m, &l->o, QL_PART_O, &w->o));
        QL_TRY(load_vector(m, l->q_norm, QL_PART_WHOLE, &w->q_norm));
        QL_TRY(load_vector(m, l->k_norm, QL_PART_WHOLE, &w->k_norm));
    } else {
        QL_TRY(load_linear(m, &l->in_qkv, QL_PART_IN_QKV, &w->in_qkv));
        QL_TRY(load_linear(m, &l->in_z, QL_PART_VALUE, &w->in_z));
        QL_TRY(load_linear(m, &l->in_b, QL_PART_VALUE_HEAD, &w->in_b));
        QL_TRY(load_linear(m, &l->in_a, QL_PART_VALUE_HEAD, &w->in_a));
        QL_TRY(load_linear(m, &l->out, QL_PART_OUT, &w->out));
        QL_TRY(load_vector(m, l->conv, QL_PART_IN_QKV, &w->conv));
        QL_TRY(load_vector(m, l->a_log, QL_PART_VALUE_HEAD, &w->a_log));
        QL_TRY(load_vector(m, l->dt_bias, QL_PART_VALUE_HEAD, &w->dt_bias));
        QL_TRY(load_vector(m, l->gdn_norm, QL_PART_WHOLE, &w->gdn_norm));
    }
    QL_TRY(load_linear(m, &l->gate, QL_PART_MLP, &w->gate));
    QL_TRY(load_linear(m, &l->up, QL_PART_MLP, &w->up));
    return load_linear(m, &l->down, QL_PART_DOWN, &w->down);
}

ql_status ql_model_load_weights(ql_model *m) {
    const ql_checkpoint *ckpt = m->ckpt;
    QL_TRY(load_embedding(m));
    for (int32_t i = 0; i < m->config->n_layer; i++) {
        QL_TRY(load_layer(m, &ckpt->layer[i], &m->layer[i]));
    }
    QL_TRY(load_vector(m, ckpt->norm, QL_PART_WHOLE, &m->norm));
    if (m->config->tied) {
        /* Plain weights are resident as the file has them, so that the embedding's rows are the head's. */
        m->lm_head = (ql_weight){.format = ckpt->lm_head.format,
                                 .n = m->shape.vocab_local,
                                 .k = m->config->hidden,
                                 .factor = 1,
                                 .data = m->embed};
    } else {
        QL_TRY(load_linear(m, &ckpt->lm_head, QL_PART_VOCAB, &m->lm_head));
    }
    if (m->has_mtp) {
        QL_TRY(load_linear(m, &ckpt->mtp.fc, QL_PART_WHOLE, &m->mtp.fc));
        QL_TRY(load_vector(m, ckpt->mtp.norm_embedding, QL_PART_WHOLE, &m->mtp.norm_embedding));
        QL_TRY(load_vector(m, ckpt->mtp.norm_hidden, QL_PART_WHOLE, &m->mtp.norm_hidden));
        QL_TRY(load_vector(m, ckpt->mtp.norm, QL_PART_WHOLE, &m->mtp.norm));
        QL_TRY(load_layer(m, &ckpt->mtp.layer, &m->mtp.layer));
    }
    if (m->n_beyond > 1) {
        ql_logf(m->log, QL_LOG_WARN, "lane %d: %d weights in all reach beyond %g", m->shard.lane, m->n_beyond,
                (double)most_trained);
    }
    return QL_OK;
}

static void free_layer(ql_dev *dev, ql_layer_weights *w) {
    ql_weight *const weights[] = {&w->gate, &w->up,     &w->down, &w->q,    &w->k,    &w->v,
                                  &w->o,    &w->in_qkv, &w->in_z, &w->in_b, &w->in_a, &w->out};
    float *const vectors[] = {w->input_norm, w->post_norm, w->q_norm,  w->k_norm,
                              w->conv,       w->a_log,     w->dt_bias, w->gdn_norm};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        dev->ops->weight_free(dev, weights[i]);
    }
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        dev->ops->free(dev, vectors[i]);
    }
}

void ql_model_free_weights(ql_model *m) {
    ql_dev *dev = m->dev;
    for (int32_t i = 0; i < m->config->n_layer; i++) {
        free_layer(dev, &m->layer[i]);
    }
    free_layer(dev, &m->mtp.layer);
    dev->ops->weight_free(dev, &m->mtp.fc);
    if (!m->config->tied) {
        dev->ops->weight_free(dev, &m->lm_head);
    }
    dev->ops->free(dev, m->embed);
    dev->ops->free(dev, m->norm);
    dev->ops->free(dev, m->mtp.norm_embedding);
    dev->ops->free(dev, m->mtp.norm_hidden);
    dev->ops->free(dev, m->mtp.norm);
}
