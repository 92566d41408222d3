/* Checkpoints of one layer in memory, whose weights meet every kind of code.
 *
 * Numbers are integer hashes of their place, so that tools/make_check_golden.py makes the same ones; both follow these
 * rules:
 *
 *   hash(seed, i)   h = i + seed * 0x9e3779b1, then MurmurHash3's finalizer (Appleby), all mod 2^32; a tensor's seed is
 *                   the FNV-1a hash of its path, that of its scales the seed + 1
 *   small(h)        ((h mod 255) - 127) / 128
 *   codes           byte j of word w of the matrix in row order is bits 8j.. of hash(seed, w); then by row mod 4, its class:
 *                   0 any code, 1 subnormal and smallest normal, 2 the middle, 3 saturated. E4M3 keeps sign and mantissa
 *                   and gets the class's exponents, NaN becomes 448; of NVFP4 the class is the group scale's, its codes
 *                   are any
 *   factors         powers of two (channel scales: times (128 + t) / 128, t < 128) that make a row of class 0 or 3, with
 *                   channel scales a row of any class, as large as 1 / sqrt(columns)
 *   extremes        every 16th row's channel scale is 2^100 times larger in one and smaller in the other of gate and up,
 *                   whose product stays of order one, and 2^-108 of its usual size in what the block puts out
 *
 * What the block puts out is seen as logits: the head is the identity on the final norm, except where it is itself what
 * is checked. x is 0 in the channels of class 1 and in every 16th, so that small results are not lost in it.
 */
#include "runtime/check/check_impl.h"

#include "runtime/base/mem.h"
#include "runtime/base/num.h"

#include <stdio.h>
#include <string.h>

/* ---- numbers --------------------------------------------------------------------------------------------------------- */

static uint32_t hash(uint32_t seed, uint32_t i) {
    uint32_t h = i + seed * 0x9e3779b1u;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ h >> 16;
}

static uint32_t seed_of(const char *path) {
    uint32_t h = 2166136261u;
    for (; *path; path++) {
        h = (h ^ (unsigned char)*path) * 16777619u;
    }
    return h;
}

static float small(uint32_t h) { return (float)((int32_t)(h % 255) - 127) / 128; }

enum { N_CLASS = 4, EXTREME = 16 /* every 16th row */ };
static const int32_t class_exponent[N_CLASS] = {7, -6, 0, 8}; /* log2 of a code's typical size */

/* The least h with 4^h >= k. */
static int32_t half_log2(int64_t k) {
    int32_t h = 0;
    while ((int64_t)1 << (2 * h) < k) {
        h++;
    }
    return h;
}

/* One E4M3 code of a class; the byte's sign and mantissa stay. */
static uint8_t e4m3_of_class(uint8_t b, int32_t class) {
    b = class == 1 ? b & 0x8f : class == 2 ? (b & 0x9f) | 0x20 : class == 3 ? b | 0x78 : b;
    return ql_e4m3_is_nan(b) ? b ^ 1 : b;
}

/* ---- tensors --------------------------------------------------------------------------------------------------------- */

static ql_status add_tensor(ql_check_ckpt *s, const char *name, ql_dtype dtype, int32_t rank, const int64_t *shape,
                            ql_tensor **out, ql_error *err) {
    ql_tensor *t = &s->tensor[s->n_tensor];
    *t = (ql_tensor){.name = name, .dtype = dtype, .rank = rank, .n_elem = 1};
    for (int32_t i = 0; i < rank; i++) {
        t->shape[i] = shape[i];
        t->n_elem *= shape[i];
    }
    t->bytes = (uint64_t)t->n_elem * (uint64_t)ql_dtype_bits(dtype) / 8;
    QL_TRY(ql_alloc(s->mem, (size_t)t->bytes, 1, name, (void **)&s->memory[s->n_tensor], err));
    t->data = s->memory[s->n_tensor++];
    *out = t;
    return QL_OK;
}

static uint8_t *bytes_of(const ql_check_ckpt *s, const ql_tensor *t) { return s->memory[t - s->tensor]; }

static void put(const ql_check_ckpt *s, const ql_tensor *t, int64_t i, float v) {
    uint8_t *p = bytes_of(s, t);
    if (t->dtype == QL_DTYPE_F32) {
        memcpy(p + 4 * i, &v, 4);
    } else { /* every value made here is exact in BF16 */
        uint16_t h = ql_bf16_of_f32(v);
        memcpy(p + 2 * i, &h, 2);
    }
}

static ql_status add_vector(ql_check_ckpt *s, ql_role role, const ql_tensor **out, ql_error *err) {
    const char *path = ql_role_get(role)->path;
    uint32_t seed = seed_of(path);
    int64_t shape[3];
    int32_t rank = ql_role_shape(&s->ckpt.config, role, shape);
    ql_tensor *t;
    QL_TRY(add_tensor(s, path, role == QL_ROLE_CONV ? QL_DTYPE_BF16 : QL_DTYPE_F32, rank, shape, &t, err));
    for (int64_t i = 0; i < t->n_elem; i++) {
        uint32_t h = hash(seed, (uint32_t)i);
        float v = role == QL_ROLE_CONV       ? small(h)
                  : role == QL_ROLE_A_LOG    ? -3 + (float)(h % 256) / 64
                  : role == QL_ROLE_DT_BIAS  ? 2 * small(h)
                  : role == QL_ROLE_GDN_NORM ? 1 + small(h) / 8
                                             : small(h) / 8;
        put(s, t, i, v);
    }
    *out = t;
    return QL_OK;
}

static ql_status add_embedding(ql_check_ckpt *s, ql_error *err) {
    const char *path = ql_role_get(QL_ROLE_EMBED)->path;
    int64_t shape[3], hidden = s->ckpt.config.hidden;
    ql_tensor *t;
    ql_role_shape(&s->ckpt.config, QL_ROLE_EMBED, shape);
    QL_TRY(add_tensor(s, path, QL_DTYPE_BF16, 2, shape, &t, err));
    for (int64_t i = 0; i < QL_CHECK_IDS * hidden; i++) { /* the other rows are never looked up */
        int64_t c = i % hidden;
        if (c % N_CLASS != 1 && c % EXTREME != EXTREME - 1) {
            put(s, t, i, small(hash(seed_of(path), (uint32_t)i)) / 4);
        }
    }
    s->ckpt.embed = t;
    return QL_OK;
}

/* ---- linear weights -------------------------------------------------------------------------------------------------- */

/* Whether the block's result comes out of this weight. */
static bool is_output(ql_role role) {
    return role == QL_ROLE_DOWN || role == QL_ROLE_O || role == QL_ROLE_OUT || role == QL_ROLE_LM_HEAD;
}

static void fill_codes(uint8_t *p, const ql_linear *l, uint32_t seed) {
    int64_t row = ql_qformat_row_bytes(l->format, l->k);
    for (int64_t i = 0; i < row * l->n; i += 4) { /* rows are whole words */
        uint32_t h = hash(seed, (uint32_t)(i / 4));
        int32_t class = (int32_t)(i / row % N_CLASS);
        for (int32_t j = 0; j < 4; j++, h >>= 8) {
            p[i + j] = l->format == QL_FORMAT_NVFP4 ? (uint8_t)h : e4m3_of_class((uint8_t)h, class);
        }
    }
}

static void fill_group_scales(uint8_t *p, int64_t n, int64_t groups, uint32_t seed) {
    for (int64_t i = 0; i < n * groups; i++) {
        uint32_t h = hash(seed, (uint32_t)i);
        switch (i / groups % N_CLASS) {
        case 0: p[i] = (uint8_t)(h % 127); break;
        case 1: p[i] = (uint8_t)(h % 16); break;
        case 2: p[i] = (uint8_t)(0x20 + h % 32); break;
        default: p[i] = (uint8_t)(0x78 + h % 7); break;
        }
    }
}

/* log2 of a row's scale. */
static int32_t channel_exponent(ql_role role, int64_t row, int32_t exponent) {
    int32_t usual = exponent - class_exponent[row % N_CLASS];
    if (row % EXTREME != EXTREME - 1) {
        return usual;
    }
    if (role == QL_ROLE_GATE || role == QL_ROLE_UP) {
        return usual + ((role == QL_ROLE_GATE) == (row / EXTREME % 2 == 0) ? 100 : -100);
    }
    return is_output(role) ? usual - 108 : usual;
}

static ql_status add_scales(ql_check_ckpt *s, ql_role role, ql_linear *l, ql_error *err) {
    const char *path = ql_role_get(role)->path;
    uint32_t seed = seed_of(path) + 1;
    int32_t exponent = -half_log2(l->k);
    /* Scales come in more than one type. */
    ql_dtype dtype = role == QL_ROLE_UP || role == QL_ROLE_K || role == QL_ROLE_IN_Z ? QL_DTYPE_F32 : QL_DTYPE_BF16;
    ql_tensor *t = NULL;
    switch (l->format) {
    case QL_FORMAT_FP8_CHANNEL:
        QL_TRY(add_tensor(s, path, dtype, 2, (const int64_t[]){l->n, 1}, &t, err));
        for (int32_t r = 0; r < l->n; r++) {
            float m = (float)(128 + hash(seed, (uint32_t)r) % 128) / 128;
            put(s, t, r, ldexpf(m, channel_exponent(role, r, exponent)));
        }
        break;
    case QL_FORMAT_FP8_BLOCK: {
        int64_t blocks[] = {(l->n + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK, (l->k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK};
        QL_TRY(add_tensor(s, path, dtype, 2, blocks, &t, err));
        for (int64_t i = 0; i < t->n_elem; i++) {
            float m = (float)(128 + hash(seed, (uint32_t)i) % 128) / 128;
            put(s, t, i, ldexpf(m, exponent - class_exponent[0] - (int32_t)(i % 3)));
        }
        break;
    }
    case QL_FORMAT_NVFP4:
        QL_TRY(add_tensor(s, path, QL_DTYPE_F8_E4M3, 2, (const int64_t[]){l->n, l->k / QL_NVFP4_GROUP}, &t, err));
        fill_group_scales(bytes_of(s, t), l->n, l->k / QL_NVFP4_GROUP, seed);
        break;
    default: break;
    }
    l->scale = t;
    if (l->format == QL_FORMAT_NVFP4 || l->format == QL_FORMAT_FP8_TENSOR) {
        float factor = ldexpf(1, exponent - class_exponent[0] - (l->format == QL_FORMAT_NVFP4));
        QL_TRY(add_tensor(s, path, QL_DTYPE_F32, 0, NULL, &t, err));
        l->factor_divides = l->format == QL_FORMAT_NVFP4 && role != QL_ROLE_UP; /* as either family of exports has it */
        put(s, t, 0, l->factor_divides ? 1 / factor : factor);
        l->factor = t;
    }
    return QL_OK;
}

/* The damage that a wrong decode would do, done to what the device is given. */
static void break_linear(const ql_check_ckpt *s, ql_linear *l, ql_role role, ql_breakage broken) {
    uint8_t *data = bytes_of(s, l->weight), *scale = l->scale ? bytes_of(s, l->scale) : NULL;
    size_t row = (size_t)ql_qformat_row_bytes(l->format, l->k);
    switch (broken) {
    case QL_BREAK_NIBBLES:
        for (uint64_t i = 0; i < l->weight->bytes; i++) {
            data[i] = (uint8_t)(data[i] << 4 | data[i] >> 4);
        }
        break;
    case QL_BREAK_FACTOR: l->factor_divides = !l->factor_divides; break;
    case QL_BREAK_GROUP_SCALE: memset(scale, 0x38, (size_t)l->scale->bytes); break; /* E4M3's one */
    case QL_BREAK_SCALE: { /* every row, or row of blocks, has its neighbour's */
        size_t width = (size_t)(l->scale->bytes / (uint64_t)l->scale->shape[0]);
        memmove(scale, scale + width, (size_t)l->scale->bytes - width);
        break;
    }
    case QL_BREAK_COLUMN: /* the middle one, with which a slice begins, is its neighbour; of NVFP4 two are */
        for (size_t r = 0; r < (size_t)l->n && is_output(role); r++) {
            data[r * row + row / 2] = data[r * row + row / 2 + 1];
        }
        break;
    default: break;
    }
}

static ql_status add_linear(ql_check_ckpt *s, ql_role role, ql_qformat format, bool zero, ql_breakage broken,
                            ql_linear *l, ql_error *err) {
    const char *path = ql_role_get(role)->path;
    const ql_config *c = &s->ckpt.config;
    int64_t shape[3];
    ql_role_shape(c, role, shape);
    snprintf(l->module, sizeof l->module, "%s", path);
    l->format = format;
    l->n = (int32_t)shape[0];
    l->k = (int32_t)shape[1];
    ql_dtype dtype = format == QL_FORMAT_BF16    ? QL_DTYPE_BF16
                     : format == QL_FORMAT_NVFP4 ? QL_DTYPE_U8
                                                 : QL_DTYPE_F8_E4M3;
    shape[1] /= format == QL_FORMAT_NVFP4 ? 2 : 1;
    ql_tensor *t;
    QL_TRY(add_tensor(s, path, dtype, 2, shape, &t, err));
    l->weight = t;
    if (zero) {
        for (int32_t i = 0; role == QL_ROLE_LM_HEAD && i < c->hidden; i++) { /* not zero but the identity */
            put(s, t, (int64_t)i * c->hidden + i, 1);
        }
        return QL_OK;
    }
    if (format == QL_FORMAT_BF16) {
        for (int64_t i = 0; i < t->n_elem; i++) {
            put(s, t, i, ldexpf(small(hash(seed_of(path), (uint32_t)i)), -half_log2(l->k)));
        }
        return QL_OK;
    }
    fill_codes(bytes_of(s, t), l, seed_of(path));
    QL_TRY(add_scales(s, role, l, err));
    break_linear(s, l, role, broken);
    return QL_OK;
}

/* ---- the checkpoint -------------------------------------------------------------------------------------------------- */

static bool is_attention(ql_role role) { return role >= QL_ROLE_Q && role <= QL_ROLE_Q_NORM - 1; }

/* Whether a linear belongs to the block; the others are zero. */
static bool in_block(ql_block_part part, ql_role role) {
    switch (part) {
    case QL_BLOCK_MLP: return role == QL_ROLE_GATE || role == QL_ROLE_UP || role == QL_ROLE_DOWN;
    case QL_BLOCK_GDN: return role >= QL_ROLE_IN_QKV && role <= QL_ROLE_OUT;
    case QL_BLOCK_ATTENTION: return is_attention(role);
    default: return role == QL_ROLE_LM_HEAD;
    }
}

static void shape_config(ql_config *c, ql_block_part part, bool large) {
    *c = (ql_config){.architecture = "Qwen3_5ForCausalLM",
                     .n_layer = 1,
                     .hidden = large ? 5120 : 160,
                     .intermediate = 128,
                     .n_head = 8,
                     .n_kv_head = 2,
                     .n_key_head = 4,
                     .n_value_head = 8,
                     .rotary_dim = QL_HEAD_DIM / 4,
                     .rope_theta = 1e7,
                     .yarn_factor = 1,
                     .rms_eps = 1e-6f,
                     .max_ctx = 128};
    c->vocab = c->hidden > QL_CHECK_IDS ? c->hidden : QL_CHECK_IDS;
    c->full_attention[0] = part != QL_BLOCK_GDN;
    switch (part) {
    case QL_BLOCK_MLP: c->intermediate = large ? 17408 : 384; break;
    case QL_BLOCK_GDN:
        c->n_key_head = large ? 16 : 4;
        c->n_value_head = large ? 48 : 8;
        break;
    case QL_BLOCK_ATTENTION:
        c->n_head = large ? 24 : 8;
        c->n_kv_head = large ? 4 : 2;
        break;
    default: c->vocab = large ? 248320 : 200; break;
    }
    c->slices = ql_config_slices(c->n_head, c->n_value_head, c->intermediate);
}

static ql_status fill_layer(ql_check_ckpt *s, ql_block_part part, ql_qformat format, ql_breakage broken,
                            ql_error *err) {
    ql_layer *layer = &s->layer;
    layer->full_attention = s->ckpt.config.full_attention[0];
    for (int32_t i = 0; i < QL_ROLE_COUNT; i++) {
        ql_role role = (ql_role)i;
        const ql_role_info *info = ql_role_get(role);
        bool here =
            info->place == QL_PLACE_LAYER || info->place == (layer->full_attention ? QL_PLACE_FULL : QL_PLACE_GDN);
        void *member = (char *)layer + info->offset;
        if (here && info->linear) {
            bool plain = role == QL_ROLE_IN_A || role == QL_ROLE_IN_B; /* exports leave them so */
            bool own = in_block(part, role);
            QL_TRY(add_linear(s, role, own && !plain ? format : QL_FORMAT_BF16, !own, broken, member, err));
        } else if (here) {
            QL_TRY(add_vector(s, role, member, err));
        }
    }
    return QL_OK;
}

ql_status ql_check_ckpt_make(ql_check_ckpt **out, const ql_allocator *mem, ql_block_part part, ql_qformat format,
                             bool large, ql_breakage broken, ql_error *err) {
    ql_check_ckpt *s = NULL;
    ql_status status;
    QL_TRY(ql_alloc(mem, 1, sizeof *s, "a made-up checkpoint", (void **)&s, err));
    s->mem = mem;
    shape_config(&s->ckpt.config, part, large);
    s->ckpt.file = &s->file;
    s->ckpt.n_file = 1;
    s->ckpt.layer = &s->layer;
    bool head = part == QL_BLOCK_HEAD;
    QL_TRY_GOTO(add_embedding(s, err), fail);
    QL_TRY_GOTO(add_vector(s, QL_ROLE_NORM, &s->ckpt.norm, err), fail);
    QL_TRY_GOTO(fill_layer(s, part, format, broken, err), fail);
    QL_TRY_GOTO(add_linear(s, QL_ROLE_LM_HEAD, head ? format : QL_FORMAT_BF16, !head, broken, &s->ckpt.lm_head, err),
                fail);
    *out = s;
    return QL_OK;

fail:
    ql_check_ckpt_free(&s);
    return status;
}

void ql_check_ckpt_free(ql_check_ckpt **ckpt) {
    ql_check_ckpt *s = *ckpt;
    if (s) {
        for (int32_t i = 0; i < s->n_tensor; i++) {
            ql_free(s->mem, s->memory[i]);
        }
        ql_free(s->mem, s);
        *ckpt = NULL;
    }
}

/* ---- decoding -------------------------------------------------------------------------------------------------------- */

/* The FP8 scale of 128 columns from c in row r. */
static float scale_at(const ql_linear *l, int64_t r, int64_t c) {
    int64_t i = l->format == QL_FORMAT_FP8_BLOCK ? r / QL_FP8_BLOCK * l->scale->shape[1] + c / QL_FP8_BLOCK : r;
    float v = 1;
    if (l->scale) {
        ql_dtype_to_f32(l->scale->dtype, l->scale->data + i * (ql_dtype_bits(l->scale->dtype) / 8), 1, &v);
    }
    return v;
}

static void decode_fp8(const ql_linear *l, const float *value, int64_t r, float factor, float *out) {
    const uint8_t *p = l->weight->data + r * l->k;
    for (int32_t c = 0; c < l->k;) {
        float scale = scale_at(l, r, c) * factor;
        for (int32_t end = c + QL_FP8_BLOCK < l->k ? c + QL_FP8_BLOCK : l->k; c < end; c++) {
            out[c] = value[p[c]] * scale;
        }
    }
}

static void decode_nvfp4(const ql_linear *l, const float *value, int64_t r, float factor, float *out) {
    const uint8_t *p = l->weight->data + r * (l->k / 2), *group = l->scale->data + r * (l->k / QL_NVFP4_GROUP);
    for (int32_t c = 0; c < l->k; c++) {
        float v = ql_f32_of_e2m1(c % 2 ? p[c / 2] >> 4 : p[c / 2] & 15);
        out[c] = v * value[group[c / QL_NVFP4_GROUP]] * factor;
    }
}

static void decode(const ql_linear *l, float *out) {
    float factor = 1, e4m3[256];
    for (int32_t i = 0; i < 256; i++) {
        e4m3[i] = ql_f32_of_e4m3((uint8_t)i);
    }
    if (l->factor) {
        ql_dtype_to_f32(l->factor->dtype, l->factor->data, 1, &factor);
        factor = l->factor_divides ? 1 / factor : factor;
    }
    for (int64_t r = 0; r < l->n; r++, out += l->k) {
        (l->format == QL_FORMAT_NVFP4 ? decode_nvfp4 : decode_fp8)(l, e4m3, r, factor, out);
    }
}

static ql_status decode_all(ql_check_ckpt *s, ql_error *err) {
    ql_layer *y = &s->layer;
    ql_linear *const all[] = {&y->gate, &y->up,     &y->down, &y->q,   &y->k,           &y->v,
                              &y->o,    &y->in_qkv, &y->in_z, &y->out, &s->ckpt.lm_head};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ql_linear *l = all[i];
        if (!l->weight || l->format == QL_FORMAT_BF16) {
            continue;
        }
        ql_tensor *t;
        QL_TRY(add_tensor(s, l->weight->name, QL_DTYPE_F32, 2, (const int64_t[]){l->n, l->k}, &t, err));
        decode(l, (float *)(void *)bytes_of(s, t));
        l->weight = t;
        l->scale = l->factor = NULL;
        l->format = QL_FORMAT_F32;
    }
    return QL_OK;
}

ql_status ql_check_ckpt_decode(ql_check_ckpt **out, const ql_check_ckpt *of, ql_error *err) {
    ql_check_ckpt *s = NULL;
    QL_TRY(ql_alloc(of->mem, 1, sizeof *s, "a decoded checkpoint", (void **)&s, err));
    s->mem = of->mem;
    s->ckpt = of->ckpt;
    s->layer = of->layer;
    s->ckpt.file = &s->file;
    s->ckpt.layer = &s->layer;
    ql_status status = decode_all(s, err);
    if (status != QL_OK) {
        ql_check_ckpt_free(&s);
        return status;
    }
    *out = s;
    return QL_OK;
}
