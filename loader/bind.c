/* From names to roles. First every tensor of the files is put into a slot (layer, role, kind of component) or known to be
 * ignorable or refused; then every role takes what its slot holds and refuses what is missing or left over. Because a
 * slot's components are all consumed or refused by one function, no scale can stay behind unnoticed. */
#include "loader/bind.h"

#include <stdio.h>
#include <string.h>

/* What a module's tensors are called after its path. */
typedef enum component {
    C_WEIGHT,
    C_PACKED,
    C_SCALE,
    C_SCALE_INV,
    C_GLOBAL,
    C_SCALE_2,
    C_INPUT_SCALE,
    C_INPUT_GLOBAL,
    C_COUNT
} component;

static const char *const component_name[C_COUNT] = {
    [C_WEIGHT] = "weight",
    [C_PACKED] = "weight_packed",
    [C_SCALE] = "weight_scale",
    [C_SCALE_INV] = "weight_scale_inv",
    [C_GLOBAL] = "weight_global_scale",
    [C_SCALE_2] = "weight_scale_2",
    [C_INPUT_SCALE] = "input_scale",
    [C_INPUT_GLOBAL] = "input_global_scale",
};

typedef struct slot {
    int32_t at[C_COUNT]; /* index into the checkpoint's tensors, plus one; 0: none */
} slot;

typedef struct binder {
    ql_checkpoint *c;
    slot *slot;         /* [n_layer + 2][QL_ROLE_COUNT]: layers, the MTP layer, roles outside layers */
    const char *prefix; /* of the first decoder tensor, for messages about missing ones */
    int32_t n_plain_unexpected;
    bool warns; /* some of them are such that no export leaves plain without listing it */
    char first_unexpected[512];
    int32_t n_vision, n_input_scale, n_kv_scale;
    uint64_t vision_bytes;
} binder;

static int32_t mtp_row(const binder *b) { return b->c->config.n_layer; }
static int32_t outside_row(const binder *b) { return b->c->config.n_layer + 1; }

static slot *slot_of(const binder *b, int32_t row, ql_role role) {
    return &b->slot[(size_t)row * QL_ROLE_COUNT + role];
}

static const ql_tensor *tensor_at(const binder *b, const slot *s, component k) {
    return s->at[k] ? b->c->tensor[s->at[k] - 1] : NULL;
}

static bool starts_with(const char *text, const char *prefix) { return strncmp(text, prefix, strlen(prefix)) == 0; }

static bool ends_with(const char *text, const char *suffix) {
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

/* ---- names to slots ------------------------------------------------------------------------------------------- */

static ql_status fail_tensor(const binder *b, const ql_tensor *t, ql_error *err, const char *why) {
    char shape[192];
    return ql_fail(err, QL_ERR_MODEL, "tensor \"%s\" (%s %s in %s) %s", t->name, ql_dtype_name(t->dtype),
                   ql_tensor_shape_text(t, shape), b->c->file[t->file].base, why);
}

static ql_status fail_unknown(const binder *b, const ql_tensor *t, ql_error *err) {
    if (ends_with(t->name, ".bias")) {
        return fail_tensor(b, t, err, "is a bias; the linears of this architecture have none");
    }
    if (strstr(t->name, "scale")) {
        return fail_tensor(b, t, err, "is a scale that belongs to no weight in a format that is supported");
    }
    return fail_tensor(b, t, err, "is unknown: neither part of this architecture nor known to be ignorable");
}

/* Whether `rest` names the role's tensor, and as which component of its module. */
static bool names_role(const char *rest, ql_role role, component *k) {
    const ql_role_info *info = ql_role_get(role);
    if (!info->linear) {
        *k = C_WEIGHT;
        return strcmp(rest, info->path) == 0;
    }
    size_t len = strlen(info->path);
    if (strncmp(rest, info->path, len) != 0 || rest[len] != '.') {
        return false;
    }
    for (int i = 0; i < C_COUNT; i++) {
        if (strcmp(rest + len + 1, component_name[i]) == 0) {
            *k = (component)i;
            return true;
        }
    }
    return false;
}

static ql_status put(binder *b, int32_t row, ql_role role, component k, int32_t i, ql_error *err) {
    slot *s = slot_of(b, row, role);
    if (s->at[k]) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" and \"%s\" are the same tensor under two prefixes",
                       b->c->tensor[s->at[k] - 1]->name, b->c->tensor[i]->name);
    }
    s->at[k] = i + 1;
    return QL_OK;
}

/* k_scale and v_scale, as compressed-tensors (on the attention) and ModelOpt (on the projection) place them. */
static bool is_kv_scale(const char *rest) {
    static const char *const names[] = {"self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale",
                                        "self_attn.v_proj.v_scale"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(rest, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* `rest` is what follows "layers.N." of decoder or MTP. */
static ql_status place_in_layer(binder *b, int32_t row, const char *rest, int32_t i, ql_error *err) {
    const bool full = row == mtp_row(b) || b->c->config.full_attention[row];
    if (full && is_kv_scale(rest)) {
        b->n_kv_scale++;
        ql_checkpoint_leave_out(b->c, i, "scale of an FP8 KV cache; this cache has its own");
        return QL_OK;
    }
    for (int role = 0; role < QL_ROLE_COUNT; role++) {
        const ql_place place = ql_role_get((ql_role)role)->place;
        component k;
        if (place == QL_PLACE_GLOBAL || place == QL_PLACE_MTP || !names_role(rest, (ql_role)role, &k)) {
            continue;
        }
        if (place == (full ? QL_PLACE_GDN : QL_PLACE_FULL)) {
            return fail_tensor(b, b->c->tensor[i], err,
                               full ? "stands in a full_attention layer" : "stands in a linear_attention layer");
        }
        return put(b, row, (ql_role)role, k, i, err);
    }
    return fail_unknown(b, b->c->tensor[i], err);
}

/* Reads "N." without sign or leading zero. */
static bool layer_number(const char *text, int32_t *n, const char **rest) {
    int32_t v = 0, digits = 0;
    for (; text[digits] >= '0' && text[digits] <= '9' && digits < 6; digits++) {
        v = 10 * v + (text[digits] - '0');
    }
    *n = v;
    *rest = text + digits + 1;
    return digits > 0 && text[digits] == '.' && (digits == 1 || text[0] != '0');
}

static ql_status place_outside(binder *b, ql_place place, const char *rest, int32_t i, ql_error *err) {
    for (int role = 0; role < QL_ROLE_COUNT; role++) {
        component k;
        if (ql_role_get((ql_role)role)->place == place && names_role(rest, (ql_role)role, &k)) {
            return put(b, outside_row(b), (ql_role)role, k, i, err);
        }
    }
    return fail_unknown(b, b->c->tensor[i], err);
}

static ql_status place_mtp(binder *b, const char *rest, int32_t i, ql_error *err) {
    int32_t n;
    const char *below;
    if (starts_with(rest, "layers.") && layer_number(rest + 7, &n, &below)) {
        return n == 0 ? place_in_layer(b, mtp_row(b), below, i, err)
                      : fail_tensor(b, b->c->tensor[i], err, "belongs to a second MTP layer; accepted is one");
    }
    return place_outside(b, QL_PLACE_MTP, rest, i, err);
}

static ql_status place_decoder(binder *b, const char *rest, int32_t i, ql_error *err) {
    int32_t n;
    const char *below;
    if (starts_with(rest, "layers.") && layer_number(rest + 7, &n, &below)) {
        if (n < b->c->config.n_layer) {
            return place_in_layer(b, n, below, i, err);
        }
        char why[128];
        snprintf(why, sizeof why, "lies beyond the last layer; num_hidden_layers is %d", b->c->config.n_layer);
        return fail_tensor(b, b->c->tensor[i], err, why);
    }
    if (starts_with(rest, "embed_tokens.") && strcmp(rest, "embed_tokens.weight") != 0) {
        return fail_tensor(b, b->c->tensor[i], err,
                           "is part of a quantized embedding; accepted is a plain one (BF16, F16 or F32)");
    }
    if (starts_with(rest, "lm_head.")) {
        return fail_unknown(b, b->c->tensor[i], err);
    }
    return place_outside(b, QL_PLACE_GLOBAL, rest, i, err);
}

static ql_status place_tensor(binder *b, int32_t i, ql_error *err) {
    ql_checkpoint *c = b->c;
    const char *name = c->tensor[i]->name;
    if (starts_with(name, "model.visual.") || starts_with(name, "visual.")) {
        b->n_vision++;
        b->vision_bytes += c->tensor[i]->bytes;
        ql_checkpoint_leave_out(c, i, "vision tower");
        return QL_OK;
    }
    if (ends_with(name, "rotary_emb.inv_freq")) {
        ql_checkpoint_leave_out(c, i, "rotary table; computed from the configuration");
        return QL_OK;
    }
    if (starts_with(name, "mtp.")) {
        return place_mtp(b, name + 4, i, err);
    }
    if (starts_with(name, "lm_head.")) {
        return place_outside(b, QL_PLACE_GLOBAL, name, i, err);
    }
    if (starts_with(name, "language_model.lm_head.")) {
        return place_outside(b, QL_PLACE_GLOBAL, name + strlen("language_model."), i, err);
    }
    for (int p = 0; ql_decoder_prefixes[p]; p++) {
        if (starts_with(name, ql_decoder_prefixes[p])) {
            b->prefix = b->prefix ? b->prefix : ql_decoder_prefixes[p];
            return place_decoder(b, name + strlen(ql_decoder_prefixes[p]), i, err);
        }
    }
    return fail_unknown(b, c->tensor[i], err);
}

/* ---- slots to roles ------------------------------------------------------------------------------------------- */

/* "layers.3.", "mtp.layers.0.", "mtp." or "". */
static const char *row_path(const binder *b, int32_t row, ql_role role, char *out, size_t cap) {
    if (row < b->c->config.n_layer) {
        snprintf(out, cap, "layers.%d.", row);
    } else if (row == mtp_row(b)) {
        snprintf(out, cap, "mtp.layers.0.");
    } else {
        snprintf(out, cap, "%s", ql_role_get(role)->place == QL_PLACE_MTP ? "mtp." : "");
    }
    return out;
}

static ql_status fail_missing(const binder *b, int32_t row, ql_role role, ql_error *err) {
    const ql_checkpoint *c = b->c;
    const ql_role_info *info = ql_role_get(role);
    char path[64], name[320];
    row_path(b, row, role, path, sizeof path);
    const bool prefixed = role != QL_ROLE_LM_HEAD && !starts_with(path, "mtp.");
    snprintf(name, sizeof name, "%s%s%s%s", prefixed ? (b->prefix ? b->prefix : ql_decoder_prefixes[0]) : "", path,
             info->path, info->linear ? ".weight" : "");
    for (int32_t i = 0; i < c->n_tensor; i++) {
        if (strcmp(c->tensor[i]->name, name) == 0) { /* only a left out one can be here */
            return ql_fail(err, QL_ERR_MODEL,
                           "the model needs \"%s\"; %s has it, but the index does not place it there", name,
                           c->file[c->tensor[i]->file].base);
        }
    }
    return ql_fail(err, QL_ERR_MODEL, "the checkpoint never had \"%s\", which the model needs: %s", name,
                   c->owned->index ? "neither the index nor any shard names it" : "model.safetensors does not name it");
}

static ql_status fail_shape(const ql_tensor *t, int32_t rank, const int64_t *needed, ql_error *err) {
    ql_tensor want = {.rank = rank};
    memcpy(want.shape, needed, (size_t)rank * sizeof *needed);
    char have_text[192], want_text[192];
    return ql_fail(err, QL_ERR_MODEL, "\"%s\" has shape %s; the configuration needs %s", t->name,
                   ql_tensor_shape_text(t, have_text), ql_tensor_shape_text(&want, want_text));
}

static bool has_shape(const ql_tensor *t, int32_t rank, const int64_t *shape) {
    return t->rank == rank && memcmp(t->shape, shape, (size_t)rank * sizeof *shape) == 0;
}

static ql_status bind_plain(binder *b, int32_t row, ql_role role, void *base, ql_error *err) {
    const ql_role_info *info = ql_role_get(role);
    const slot *s = slot_of(b, row, role);
    const ql_tensor *t = tensor_at(b, s, C_WEIGHT);
    if (!t) {
        return fail_missing(b, row, role, err);
    }
    if (!ql_dtype_is_plain(t->dtype)) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %s; accepted are BF16, F16 and F32", t->name,
                       ql_dtype_name(t->dtype));
    }
    int64_t shape[3];
    int32_t rank = ql_role_shape(&b->c->config, role, shape);
    if (!has_shape(t, rank, shape)) {
        return fail_shape(t, rank, shape, err);
    }
    *(const ql_tensor **)((char *)base + info->offset) = t;
    ql_tensor_info *row_info = &b->c->info[s->at[C_WEIGHT] - 1];
    row_info->role = info->kind;
    row_info->reason = "by name";
    return QL_OK;
}

/* ---- linears -------------------------------------------------------------------------------------------------- */

/* Components that the chosen format does not consume must not exist. */
static ql_status check_leftover(const binder *b, const slot *s, const ql_tensor *weight, unsigned consumed,
                                ql_error *err) {
    for (int k = 0; k < C_INPUT_SCALE; k++) {
        const ql_tensor *t = tensor_at(b, s, (component)k);
        if (t && !(consumed & (1u << k))) {
            return ql_fail(err, QL_ERR_MODEL, "\"%s\" belongs to no weight: \"%s\" is %s and does not take it", t->name,
                           weight->name, ql_dtype_name(weight->dtype));
        }
    }
    return QL_OK;
}

static ql_status need(const binder *b, const slot *s, component k, const ql_tensor *weight, const char *format,
                      const ql_tensor **out, ql_error *err) {
    *out = tensor_at(b, s, k);
    if (!*out) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %s (%s) but its %s is missing; a scale is never assumed",
                       weight->name, ql_dtype_name(weight->dtype), format, component_name[k]);
    }
    return QL_OK;
}

static ql_status check_weight_shape(const ql_tensor *t, int64_t rows, int64_t cols, ql_error *err) {
    const int64_t shape[2] = {rows, cols};
    return has_shape(t, 2, shape) ? QL_OK : fail_shape(t, 2, shape, err);
}

/* One number, as [] or [1], in a plain dtype. */
static ql_status check_factor(const ql_tensor *t, ql_error *err) {
    char shape[192];
    if (t->n_elem != 1 || t->rank > 1 || !ql_dtype_is_plain(t->dtype)) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %s %s; accepted is one number in F32, BF16 or F16", t->name,
                       ql_dtype_name(t->dtype), ql_tensor_shape_text(t, shape));
    }
    return QL_OK;
}

static ql_status bind_nvfp4(const binder *b, const slot *s, ql_linear *l, component weight, component factor,
                            ql_error *err) {
    l->weight = tensor_at(b, s, weight);
    l->format = QL_FORMAT_NVFP4;
    l->factor_divides = factor == C_GLOBAL;
    if (l->weight->dtype != QL_DTYPE_U8) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %s; accepted is U8 (two NVFP4 codes a byte)", l->weight->name,
                       ql_dtype_name(l->weight->dtype));
    }
    QL_TRY(need(b, s, C_SCALE, l->weight, "nvfp4", &l->scale, err));
    QL_TRY(need(b, s, factor, l->weight, "nvfp4", &l->factor, err));
    QL_TRY(check_leftover(b, s, l->weight, 1u << weight | 1u << C_SCALE | 1u << factor, err));
    if (l->k % QL_NVFP4_GROUP) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" has %d columns; nvfp4 needs a multiple of %d", l->weight->name, l->k,
                       QL_NVFP4_GROUP);
    }
    QL_TRY(check_weight_shape(l->weight, l->n, l->k / 2, err));
    if (l->scale->dtype != QL_DTYPE_F8_E4M3) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %s; accepted is F8_E4M3 for nvfp4 group scales", l->scale->name,
                       ql_dtype_name(l->scale->dtype));
    }
    QL_TRY(check_weight_shape(l->scale, l->n, l->k / QL_NVFP4_GROUP, err));
    return check_factor(l->factor, err);
}

/* The shape of an FP8 weight's scale tells rows, blocks and whole tensor apart. */
static ql_status bind_fp8(const binder *b, const slot *s, ql_linear *l, ql_error *err) {
    const bool inverse = s->at[C_SCALE_INV] != 0;
    const ql_tensor *scale = tensor_at(b, s, inverse ? C_SCALE_INV : C_SCALE);
    if (!scale) {
        return ql_fail(err, QL_ERR_MODEL,
                       "\"%s\" is F8_E4M3 but has neither weight_scale nor weight_scale_inv; a scale is never assumed",
                       l->weight->name);
    }
    QL_TRY(check_leftover(b, s, l->weight, 1u << C_WEIGHT | 1u << (inverse ? C_SCALE_INV : C_SCALE), err));
    QL_TRY(check_weight_shape(l->weight, l->n, l->k, err));
    if (!ql_dtype_is_plain(scale->dtype)) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is %s; accepted are BF16, F16 and F32 for FP8 scales", scale->name,
                       ql_dtype_name(scale->dtype));
    }
    const int64_t row[2] = {l->n, 1}, block[2] = {((int64_t)l->n + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK,
                                                  ((int64_t)l->k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK};
    if (!inverse && (has_shape(scale, 2, row) || has_shape(scale, 1, row))) {
        l->format = QL_FORMAT_FP8_CHANNEL;
        l->scale = scale;
    } else if (!inverse && scale->n_elem == 1 && scale->rank <= 1) {
        l->format = QL_FORMAT_FP8_TENSOR;
        l->factor = scale;
    } else if (has_shape(scale, 2, block)) {
        l->format = QL_FORMAT_FP8_BLOCK;
        l->scale = scale;
    } else if (inverse) {
        return fail_shape(scale, 2, block, err);
    } else {
        char text[192];
        return ql_fail(
            err, QL_ERR_MODEL,
            "\"%s\" has shape %s; accepted are [%d, 1] or [%d] (rows), [] or [1] (tensor), [%lld, %lld] (blocks)",
            scale->name, ql_tensor_shape_text(scale, text), l->n, l->n, (long long)block[0], (long long)block[1]);
    }
    return QL_OK;
}

static ql_status decide_format(const binder *b, int32_t row, ql_role role, ql_linear *l, ql_error *err) {
    const slot *s = slot_of(b, row, role);
    l->weight = tensor_at(b, s, C_WEIGHT);
    if (s->at[C_PACKED]) {
        return bind_nvfp4(b, s, l, C_PACKED, C_GLOBAL, err);
    }
    if (!l->weight) {
        for (int k = 0; k < C_COUNT; k++) {
            const ql_tensor *t = tensor_at(b, s, (component)k);
            if (t) {
                return ql_fail(err, QL_ERR_MODEL,
                               "\"%s\" belongs to no weight: the checkpoint has neither %s.weight nor "
                               "%s.weight_packed",
                               t->name, l->module, l->module);
            }
        }
        return fail_missing(b, row, role, err);
    }
    switch (l->weight->dtype) {
    case QL_DTYPE_U8: return bind_nvfp4(b, s, l, C_WEIGHT, C_SCALE_2, err);
    case QL_DTYPE_F8_E4M3: return bind_fp8(b, s, l, err);
    case QL_DTYPE_BF16: l->format = QL_FORMAT_BF16; break;
    case QL_DTYPE_F16: l->format = QL_FORMAT_F16; break;
    case QL_DTYPE_F32: l->format = QL_FORMAT_F32; break;
    default:
        return ql_fail(err, QL_ERR_MODEL,
                       "\"%s\" is %s; accepted for weights are BF16, F16, F32, F8_E4M3 and U8 (nvfp4)", l->weight->name,
                       ql_dtype_name(l->weight->dtype));
    }
    QL_TRY(check_leftover(b, s, l->weight, 1u << C_WEIGHT, err));
    return check_weight_shape(l->weight, l->n, l->k, err);
}

static bool is_plain_format(ql_qformat format) { return format <= QL_FORMAT_BF16; }

/* Compares what is stored with what the configuration says; *reason becomes a line for people. */
static ql_status cross_check(binder *b, ql_linear *l, bool may_warn, const char **reason, ql_error *err) {
    static const char *const expect_name[] = {
        [QL_EXPECT_PLAIN] = "plain", [QL_EXPECT_NVFP4] = "nvfp4", [QL_EXPECT_FP8] = "fp8"};
    ql_expect expect, stored = QL_EXPECT_FP8;
    const char *rule;
    QL_TRY(ql_quant_expect(b->c->owned->quant, l->module, &expect, &rule, err));
    if (is_plain_format(l->format)) {
        stored = QL_EXPECT_PLAIN;
    } else if (l->format == QL_FORMAT_NVFP4) {
        stored = QL_EXPECT_NVFP4;
    }
    if (stored != expect && stored != QL_EXPECT_PLAIN) {
        return ql_fail(err, QL_ERR_MODEL, "\"%s\" is stored as %s, but the configuration says %s for %s (%.160s)",
                       l->weight->name, ql_qformat_name(l->format), expect_name[expect], l->module, rule);
    }
    if (stored != expect) {
        if (b->n_plain_unexpected++ == 0) {
            snprintf(b->first_unexpected, sizeof b->first_unexpected, "%s, where %.160s says %s", l->module, rule,
                     expect_name[expect]);
        }
        *reason = ql_checkpoint_text(b->c, "stored plain although %s says %s", rule, expect_name[expect]);
        l->unexpected = *reason;
        b->warns = b->warns || may_warn;
    } else {
        *reason = ql_checkpoint_text(b->c, "as stored; %s agrees", rule);
    }
    return *reason ? QL_OK : ql_fail(err, QL_ERR_MEMORY, "no host memory for the decision table");
}

static ql_status bind_linear(binder *b, int32_t row, ql_role role, void *base, ql_error *err) {
    const ql_role_info *info = ql_role_get(role);
    ql_checkpoint *c = b->c;
    ql_linear *l = (ql_linear *)((char *)base + info->offset);
    char path[64];
    int64_t shape[3];
    ql_role_shape(&c->config, role, shape);
    l->n = (int32_t)shape[0];
    l->k = (int32_t)shape[1];
    snprintf(l->module, sizeof l->module, "%s%s", row_path(b, row, role, path, sizeof path), info->path);
    QL_TRY(decide_format(b, row, role, l, err));
    const char *reason;
    /* Sound exports leave the gates' few rows and the MTP module plain and do not say so. */
    const bool may_warn = role != QL_ROLE_IN_A && role != QL_ROLE_IN_B && role != QL_ROLE_MTP_FC && row != mtp_row(b);
    QL_TRY(cross_check(b, l, may_warn, &reason, err));

    const slot *s = slot_of(b, row, role);
    for (int k = 0; k < C_COUNT; k++) {
        if (!s->at[k]) {
            continue;
        }
        ql_tensor_info *t = &c->info[s->at[k] - 1];
        if (k >= C_INPUT_SCALE) {
            b->n_input_scale++;
            ql_checkpoint_leave_out(c, s->at[k] - 1,
                                    "scale of quantized activations; not needed, activations stay wide");
        } else {
            const ql_tensor *tensor = c->tensor[s->at[k] - 1];
            t->role = tensor == l->weight ? info->kind : tensor == l->factor ? "factor" : "scale";
            t->reason = reason;
        }
        t->format = ql_qformat_name(l->format);
    }
    return QL_OK;
}

static ql_status bind_role(binder *b, int32_t row, ql_role role, void *base, ql_error *err) {
    return ql_role_get(role)->linear ? bind_linear(b, row, role, base, err) : bind_plain(b, row, role, base, err);
}

static ql_status bind_layer(binder *b, int32_t row, ql_layer *layer, ql_error *err) {
    const ql_place mixer = layer->full_attention ? QL_PLACE_FULL : QL_PLACE_GDN;
    for (int role = 0; role < QL_ROLE_COUNT; role++) {
        const ql_place place = ql_role_get((ql_role)role)->place;
        if (place == QL_PLACE_LAYER || place == mixer) {
            QL_TRY(bind_role(b, row, (ql_role)role, layer, err));
        }
    }
    return QL_OK;
}

/* ---- head and MTP --------------------------------------------------------------------------------------------- */

static bool is_empty(const slot *s) {
    static const slot none;
    return memcmp(s, &none, sizeof none) == 0;
}

/* A stored head is used even where the configuration ties it to the embedding: the file is the fact. */
static ql_status bind_head(binder *b, ql_error *err) {
    ql_checkpoint *c = b->c;
    if (!is_empty(slot_of(b, outside_row(b), QL_ROLE_LM_HEAD))) {
        if (c->config.tied) {
            QL_TRY(ql_checkpoint_add_note(
                c, err, "tie_word_embeddings is true, yet lm_head is stored; the stored head is used"));
        }
        c->config.tied = false;
        return bind_role(b, outside_row(b), QL_ROLE_LM_HEAD, c, err);
    }
    if (!c->config.tied) {
        return fail_missing(b, outside_row(b), QL_ROLE_LM_HEAD, err);
    }
    ql_linear *l = &c->lm_head;
    snprintf(l->module, sizeof l->module, "lm_head");
    l->n = c->config.vocab;
    l->k = c->config.hidden;
    l->weight = c->embed;
    l->format = c->embed->dtype == QL_DTYPE_F32   ? QL_FORMAT_F32
                : c->embed->dtype == QL_DTYPE_F16 ? QL_FORMAT_F16
                                                  : QL_FORMAT_BF16;
    return QL_OK;
}

/* The rows that hold MTP roles, for counting and binding. */
static int32_t mtp_row_of(const binder *b, ql_role role) {
    switch (ql_role_get(role)->place) {
    case QL_PLACE_MTP: return outside_row(b);
    case QL_PLACE_LAYER:
    case QL_PLACE_FULL: return mtp_row(b);
    default: return -1;
    }
}

static ql_status bind_mtp(binder *b, ql_error *err) {
    ql_checkpoint *c = b->c;
    int32_t there = 0, missing = 0;
    char list[320] = "";
    size_t len = 0;
    for (int role = 0; role < QL_ROLE_COUNT; role++) {
        const int32_t row = mtp_row_of(b, (ql_role)role);
        if (row < 0) {
            continue;
        }
        if (!is_empty(slot_of(b, row, (ql_role)role))) {
            there++;
            continue;
        }
        char path[64];
        missing++;
        if (len < sizeof list) {
            len +=
                (size_t)snprintf(list + len, sizeof list - len, "%s%s%s", len ? ", " : "",
                                 row_path(b, row, (ql_role)role, path, sizeof path), ql_role_get((ql_role)role)->path);
        }
    }
    if (there == 0) {
        return c->config.n_mtp_layer ? ql_checkpoint_add_note(c, err,
                                                              "mtp_num_hidden_layers is 1, but there are no mtp.* "
                                                              "tensors; multi-token prediction is not available")
                                     : QL_OK;
    }
    if (missing) {
        return ql_fail(err, QL_ERR_MODEL, "the MTP module is incomplete: %d of %d parts are there; missing: %s", there,
                       there + missing, list);
    }
    if (c->config.n_mtp_layer == 0) {
        QL_TRY(ql_checkpoint_add_note(c, err,
                                      "mtp_num_hidden_layers is 0, yet the mtp.* tensors are there; they can be used"));
    }
    c->has_mtp = true;
    c->mtp.layer.full_attention = true;
    for (int role = QL_ROLE_MTP_FC; role <= QL_ROLE_MTP_NORM; role++) {
        QL_TRY(bind_role(b, outside_row(b), (ql_role)role, c, err));
    }
    return bind_layer(b, mtp_row(b), &c->mtp.layer, err);
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

static ql_status add_notes(binder *b, ql_error *err) {
    ql_checkpoint *c = b->c;
    if (b->n_plain_unexpected) {
        QL_TRY(ql_checkpoint_add_note(c, err,
                                      "%d linears are stored plain where the configuration says quantized (first: %s); "
                                      "loaded as stored",
                                      b->n_plain_unexpected, b->first_unexpected));
        c->warning = b->warns ? c->note[c->n_note - 1] : NULL;
    }
    if (b->n_vision) {
        QL_TRY(ql_checkpoint_add_note(c, err, "%d vision tensor%s (%llu bytes) not loaded", b->n_vision,
                                      b->n_vision == 1 ? "" : "s", (unsigned long long)b->vision_bytes));
    }
    if (b->n_input_scale) {
        QL_TRY(ql_checkpoint_add_note(
            c, err, "%d scales of quantized activations (input_scale, input_global_scale) are not used",
            b->n_input_scale));
    }
    if (b->n_kv_scale) {
        QL_TRY(ql_checkpoint_add_note(c, err, "%d scales of an FP8 KV cache (k_scale, v_scale) are not used",
                                      b->n_kv_scale));
    }
    return QL_OK;
}

static ql_status bind_all(binder *b, ql_error *err) {
    ql_checkpoint *c = b->c;
    for (int32_t i = 0; i < c->n_tensor; i++) {
        if (!ql_checkpoint_is_left_out(c, i)) {
            QL_TRY(place_tensor(b, i, err));
        }
    }
    QL_TRY(bind_role(b, outside_row(b), QL_ROLE_EMBED, c, err));
    for (int32_t i = 0; i < c->config.n_layer; i++) {
        c->layer[i].full_attention = c->config.full_attention[i];
        QL_TRY(bind_layer(b, i, &c->layer[i], err));
    }
    QL_TRY(bind_role(b, outside_row(b), QL_ROLE_NORM, c, err));
    QL_TRY(bind_head(b, err));
    QL_TRY(bind_mtp(b, err));
    return add_notes(b, err);
}

ql_status ql_checkpoint_bind(ql_checkpoint *c, ql_error *err) {
    binder b = {.c = c};
    const size_t rows = (size_t)c->config.n_layer + 2;
    QL_TRY(ql_alloc(NULL, (size_t)c->config.n_layer, sizeof *c->layer, "the layers", (void **)&c->layer, err));
    QL_TRY(ql_alloc(NULL, rows * QL_ROLE_COUNT, sizeof *b.slot, "the binding table", (void **)&b.slot, err));
    ql_status status = bind_all(&b, err);
    ql_free(NULL, b.slot);
    return status;
}
