#include "loader/shard.h"

/* "1, 2, 4 or 8" up to the slice count, a power of two up to 8. */
static const char *lane_counts(int32_t slices) {
    switch (slices) {
    case 1: return "1";
    case 2: return "1 or 2";
    case 4: return "1, 2 or 4";
    default: return "1, 2, 4 or 8";
    }
}

ql_status ql_shard_init(ql_shard *shard, const ql_config *c, int32_t n_lane, int32_t lane, ql_error *err) {
    if (n_lane < 1 || n_lane > c->slices || c->slices % n_lane != 0) {
        return ql_fail(err, QL_ERR_USAGE,
                       "%d lanes do not divide this model's %d slices (%d query heads, %d value heads, %d MLP "
                       "channels); it can run on %s",
                       n_lane, c->slices, c->n_head, c->n_value_head, c->intermediate, lane_counts(c->slices));
    }
    if (lane < 0 || lane >= n_lane) {
        return ql_fail(err, QL_ERR_USAGE, "lane %d is outside 0 to %d", lane, n_lane - 1);
    }
    const int32_t slices = c->slices / n_lane, q_per_kv = c->n_head / c->n_kv_head,
                  v_per_k = c->n_value_head / c->n_key_head, vocab_slices = QL_VOCAB_SLICES / n_lane;
    ql_shard s = {.lane = lane, .n_lane = n_lane, .slice0 = lane * slices, .slice1 = (lane + 1) * slices};
    s.q0 = c->n_head / c->slices * s.slice0;
    s.q1 = c->n_head / c->slices * s.slice1;
    s.kv0 = s.q0 / q_per_kv;
    s.kv1 = (s.q1 - 1) / q_per_kv + 1;
    s.v0 = c->n_value_head / c->slices * s.slice0;
    s.v1 = c->n_value_head / c->slices * s.slice1;
    s.k0 = s.v0 / v_per_k;
    s.k1 = (s.v1 - 1) / v_per_k + 1;
    s.m0 = c->intermediate / c->slices * s.slice0;
    s.m1 = c->intermediate / c->slices * s.slice1;
    s.vocab0 = (int32_t)((int64_t)c->vocab * (lane * vocab_slices) / QL_VOCAB_SLICES);
    s.vocab1 = (int32_t)((int64_t)c->vocab * ((lane + 1) * vocab_slices) / QL_VOCAB_SLICES);
    *shard = s;
    return QL_OK;
}

static ql_cut one_range(int32_t axis, int32_t begin, int32_t end) {
    return (ql_cut){.axis = axis, .n_range = 1, .begin = {begin}, .end = {end}};
}

ql_cut ql_shard_cut(const ql_config *c, const ql_shard *s, ql_part part) {
    const int32_t head = QL_HEAD_DIM, gdn = QL_GDN_DIM, keys = gdn * c->n_key_head;
    switch (part) {
    case QL_PART_Q: return one_range(0, 2 * head * s->q0, 2 * head * s->q1); /* query and gate of a head together */
    case QL_PART_KV: return one_range(0, head * s->kv0, head * s->kv1);
    case QL_PART_O: return one_range(1, head * s->q0, head * s->q1);
    case QL_PART_IN_QKV: /* [q | k | v], each head-major */
        return (ql_cut){.axis = 0,
                        .n_range = 3,
                        .begin = {gdn * s->k0, keys + gdn * s->k0, 2 * keys + gdn * s->v0},
                        .end = {gdn * s->k1, keys + gdn * s->k1, 2 * keys + gdn * s->v1}};
    case QL_PART_VALUE: return one_range(0, gdn * s->v0, gdn * s->v1);
    case QL_PART_OUT: return one_range(1, gdn * s->v0, gdn * s->v1);
    case QL_PART_VALUE_HEAD: return one_range(0, s->v0, s->v1);
    case QL_PART_MLP: return one_range(0, s->m0, s->m1);
    case QL_PART_DOWN: return one_range(1, s->m0, s->m1);
    case QL_PART_VOCAB: return one_range(0, s->vocab0, s->vocab1);
    case QL_PART_WHOLE: break;
    }
    return (ql_cut){.axis = -1};
}

int32_t ql_cut_len(const ql_cut *cut) {
    int32_t len = 0;
    for (int32_t i = 0; i < cut->n_range; i++) {
        len += cut->end[i] - cut->begin[i];
    }
    return len;
}

/* 128-blocks that the cut touches along its axis. */
static int64_t blocks(const ql_cut *cut) {
    int64_t n = 0;
    for (int32_t i = 0; i < cut->n_range; i++) {
        if (cut->end[i] > cut->begin[i]) {
            n += (cut->end[i] - 1) / QL_FP8_BLOCK - cut->begin[i] / QL_FP8_BLOCK + 1;
        }
    }
    return n;
}

void ql_linear_stored_bytes(const ql_linear *l, const ql_cut *cut, uint64_t *weight_bytes, uint64_t *scale_bytes) {
    const ql_cut rows = cut->axis == 0 ? *cut : one_range(0, 0, l->n);
    const ql_cut cols = cut->axis == 1 ? *cut : one_range(1, 0, l->k);
    const int64_t n = ql_cut_len(&rows), k = ql_cut_len(&cols);
    int64_t scales = 0;
    switch (l->format) {
    case QL_FORMAT_FP8_CHANNEL: scales = n; break;
    case QL_FORMAT_FP8_BLOCK: scales = blocks(&rows) * blocks(&cols); break;
    case QL_FORMAT_NVFP4: scales = n * (k / QL_NVFP4_GROUP); break;
    default: break;
    }
    *weight_bytes = (uint64_t)(n * ql_qformat_row_bytes(l->format, k));
    *scale_bytes = scales ? (uint64_t)scales * (uint64_t)(ql_dtype_bits(l->scale->dtype) / 8) : 0;
}

uint64_t ql_tensor_stored_bytes(const ql_tensor *t, const ql_cut *cut) {
    if (cut->axis != 0 || t->rank == 0 || t->shape[0] == 0) {
        return t->bytes;
    }
    return t->bytes / (uint64_t)t->shape[0] * (uint64_t)ql_cut_len(cut);
}
