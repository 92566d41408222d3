/* In three steps: list every tensor with how to fill it, cut the list into files and write headers and JSON, then fill
 * chunks from a pool of threads. Values come from tables of 4096 equally likely values, so that a chunk costs one table
 * look-up an element whatever its distribution; the generator of a chunk is seeded by its place alone. */
#include "tests/synth.h"

#include "loader/role.h"
#include "runtime/base/num.h"
#include "tests/stfile.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TABLE = 4096, CHUNK_BYTES = 4 << 20, MAX_THREADS = 64 };

static const char mtp_file[] = "model_mtp.safetensors";

/* ---- shapes --------------------------------------------------------------------------------------------------- */

ql_synth_scheme ql_synth_scheme_of(const char *name) {
    static const char *const names[QL_SYNTH_SCHEMES] = {"bf16", "fp8-channel", "fp8-block", "mixed", "modelopt"};
    int i = 0;
    while (i < QL_SYNTH_SCHEMES && strcmp(name, names[i]) != 0) {
        i++;
    }
    return (ql_synth_scheme)i;
}

void ql_synth_set_layers(ql_config *c, int32_t n_layer) {
    c->n_layer = n_layer;
    for (int32_t i = 0; i < n_layer; i++) {
        c->full_attention[i] = i % 4 == 3;
    }
}

bool ql_synth_shape(ql_config *c, const char *name) {
    static const struct {
        const char *name;
        int32_t n_layer, hidden, intermediate, vocab, n_head, n_kv_head, n_key_head, n_value_head, max_ctx;
    } shapes[] = {
        {"27b", 64, 5120, 17408, 248320, 24, 4, 16, 48, 262144},
        {"9b", 32, 4096, 12288, 248320, 16, 4, 16, 32, 262144},
        {"4b", 32, 2560, 9216, 248320, 16, 4, 16, 32, 262144},
        {"micro", 8, 256, 512, 512, 8, 2, 4, 8, 4096},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (strcmp(name, shapes[i].name) == 0) {
            *c = (ql_config){.hidden = shapes[i].hidden,
                             .intermediate = shapes[i].intermediate,
                             .vocab = shapes[i].vocab,
                             .n_head = shapes[i].n_head,
                             .n_kv_head = shapes[i].n_kv_head,
                             .n_key_head = shapes[i].n_key_head,
                             .n_value_head = shapes[i].n_value_head,
                             .max_ctx = shapes[i].max_ctx,
                             .n_mtp_layer = 1};
            ql_synth_set_layers(c, shapes[i].n_layer);
            return true;
        }
    }
    return false;
}

/* ---- how a tensor is filled ------------------------------------------------------------------------------------ */

typedef enum fill_kind {
    FILL_NORMAL,      /* mean + spread * N(0,1), plain dtype */
    FILL_UNIFORM,     /* mean +- spread, plain dtype */
    FILL_E4M3,        /* codes of a normal variable */
    FILL_E2M1,        /* pairs of codes of a normal variable */
    FILL_GROUP_SCALE, /* E4M3, uniform over a decade */
} fill_kind;

typedef struct fill {
    fill_kind kind;
    float mean, spread;
} fill;

typedef struct item {
    int32_t file, entry;
    fill fill;
    int64_t first_chunk;
} item;

typedef struct job {
    const ql_synth *o;
    ql_stfile *file;
    int32_t n_file;
    item *item;
    int32_t n_item, cap_item;
    bool own_file;  /* the next tensor opens a file */
    float z[TABLE]; /* quantiles of the normal distribution */
    float rms_e4m3, rms_e2m1, rms_group;
    /* filling */
    int fd[4096];
    uint64_t data_offset[4096];
    int64_t n_chunk;
    atomic_llong next_chunk;
    atomic_int failed_errno;
} job;

static void make_quantiles(float *z, int n) {
    for (int i = 0; i < n; i++) {
        const double p = (i + 0.5) / n;
        double lo = -8, hi = 8;
        for (int step = 0; step < 60; step++) {
            double mid = (lo + hi) / 2;
            if (0.5 * erfc(-mid / sqrt(2)) < p) {
                lo = mid;
            } else {
                hi = mid;
            }
        }
        z[i] = (float)lo;
    }
}

/* The spread of codes is chosen so that the outermost quantiles come close to the largest code. */
static uint8_t e4m3_code(const job *j, int i) { return ql_e4m3_of_f32(j->z[i] * 120.0f); }
static uint8_t e2m1_code(const job *j, int i) { return ql_e2m1_of_f32(j->z[i] * 2.0f); }
static uint8_t group_scale_code(int i) { return ql_e4m3_of_f32(40.0f + 360.0f * (float)i / TABLE); }

static void measure_codes(job *j) {
    double e4m3 = 0, e2m1 = 0, group = 0;
    for (int i = 0; i < TABLE; i++) {
        const double a = ql_f32_of_e4m3(e4m3_code(j, i)), b = ql_f32_of_e2m1(e2m1_code(j, i)),
                     c = ql_f32_of_e4m3(group_scale_code(i));
        e4m3 += a * a;
        e2m1 += b * b;
        group += c * c;
    }
    j->rms_e4m3 = (float)sqrt(e4m3 / TABLE);
    j->rms_e2m1 = (float)sqrt(e2m1 / TABLE);
    j->rms_group = (float)sqrt(group / TABLE);
}

/* ---- listing tensors ------------------------------------------------------------------------------------------ */

static ql_status open_next_file(job *j, ql_error *err) {
    ql_stfile *grown = ql_realloc(NULL, j->file, ((size_t)j->n_file + 1) * sizeof *grown);
    if (!grown) {
        return ql_fail(err, QL_ERR_MEMORY, "no host memory for a file table");
    }
    j->file = grown;
    memset(&j->file[j->n_file++], 0, sizeof *grown);
    return QL_OK;
}

static ql_status add(job *j, const char *name, ql_dtype dtype, int32_t rank, const int64_t *shape, fill how,
                     ql_error *err) {
    const uint64_t limit = j->o->shard_bytes ? j->o->shard_bytes : 5000000000u;
    if (j->n_file == 0 || j->own_file ||
        (j->o->scheme != QL_SYNTH_MIXED && j->file[j->n_file - 1].data_bytes >= limit)) {
        QL_TRY(open_next_file(j, err));
        j->own_file = false;
    }
    if (j->n_item == j->cap_item) {
        const int32_t cap = j->cap_item ? 2 * j->cap_item : 1024;
        item *grown = ql_realloc(NULL, j->item, (size_t)cap * sizeof *grown);
        if (!grown) {
            return ql_fail(err, QL_ERR_MEMORY, "no host memory for %d tensors", cap);
        }
        j->item = grown;
        j->cap_item = cap;
    }
    ql_stfile *file = &j->file[j->n_file - 1];
    j->item[j->n_item++] = (item){.file = j->n_file - 1, .entry = file->n, .fill = how};
    return ql_stfile_add(file, name, dtype, rank, shape, err);
}

static ql_status add_component(job *j, const char *module, const char *component, ql_dtype dtype, int32_t rank,
                               int64_t n, int64_t k, fill how, ql_error *err) {
    char name[384];
    const int64_t shape[2] = {n, k};
    snprintf(name, sizeof name, "%s.%s", module, component);
    return add(j, name, dtype, rank, shape, how, err);
}

/* A linear of root mean square `sigma` in the given format. */
static ql_status add_linear(job *j, const char *module, ql_qformat format, int64_t n, int64_t k, float sigma,
                            ql_error *err) {
    const fill codes8 = {FILL_E4M3, 0, 0}, codes4 = {FILL_E2M1, 0, 0}, groups = {FILL_GROUP_SCALE, 0, 0};
    const float unit = sigma / j->rms_e4m3;
    const fill scales = {FILL_UNIFORM, unit, unit / 2}, one_scale = {FILL_UNIFORM, unit, 0};
    const float factor = sigma / (j->rms_e2m1 * j->rms_group);
    const bool modelopt = j->o->scheme == QL_SYNTH_MODELOPT;
    switch (format) {
    case QL_FORMAT_FP8_CHANNEL:
        QL_TRY(add_component(j, module, "weight", QL_DTYPE_F8_E4M3, 2, n, k, codes8, err));
        return add_component(j, module, "weight_scale", QL_DTYPE_BF16, 2, n, 1, scales, err);
    case QL_FORMAT_FP8_BLOCK:
        QL_TRY(add_component(j, module, "weight", QL_DTYPE_F8_E4M3, 2, n, k, codes8, err));
        return add_component(j, module, "weight_scale_inv", QL_DTYPE_BF16, 2, (n + 127) / 128, (k + 127) / 128, scales,
                             err);
    case QL_FORMAT_FP8_TENSOR:
        QL_TRY(add_component(j, module, "input_scale", QL_DTYPE_F32, 0, 0, 0, (fill){FILL_UNIFORM, 0.01f, 0}, err));
        QL_TRY(add_component(j, module, "weight", QL_DTYPE_F8_E4M3, 2, n, k, codes8, err));
        return add_component(j, module, "weight_scale", QL_DTYPE_F32, 0, 0, 0, one_scale, err);
    case QL_FORMAT_NVFP4:
        QL_TRY(add_component(j, module, modelopt ? "input_scale" : "input_global_scale", QL_DTYPE_F32, !modelopt, 1, 0,
                             (fill){FILL_UNIFORM, modelopt ? 0.002f : 500.0f, 0}, err));
        QL_TRY(add_component(j, module, modelopt ? "weight_scale_2" : "weight_global_scale", QL_DTYPE_F32, !modelopt, 1,
                             0, (fill){FILL_UNIFORM, modelopt ? factor : 1 / factor, 0}, err));
        QL_TRY(add_component(j, module, modelopt ? "weight" : "weight_packed", QL_DTYPE_U8, 2, n, k / 2, codes4, err));
        return add_component(j, module, "weight_scale", QL_DTYPE_F8_E4M3, 2, n, k / QL_NVFP4_GROUP, groups, err);
    default: return add_component(j, module, "weight", QL_DTYPE_BF16, 2, n, k, (fill){FILL_NORMAL, 0, sigma}, err);
    }
}

/* First layer whose MLP is FP8 in the mixed scheme. */
static int32_t mixed_tail(const ql_config *c) { return c->n_layer - (c->n_layer + 7) / 8; }

static bool is_mlp(ql_role role) { return role == QL_ROLE_GATE || role == QL_ROLE_UP || role == QL_ROLE_DOWN; }

static ql_qformat format_of(const ql_synth *o, ql_role role, int32_t layer, bool mtp) {
    if (role == QL_ROLE_IN_A || role == QL_ROLE_IN_B || role == QL_ROLE_MTP_FC ||
        (mtp && o->scheme != QL_SYNTH_FP8_BLOCK) || (role == QL_ROLE_LM_HEAD && o->scheme == QL_SYNTH_FP8_BLOCK)) {
        return QL_FORMAT_BF16;
    }
    switch (o->scheme) {
    case QL_SYNTH_FP8_CHANNEL: return QL_FORMAT_FP8_CHANNEL;
    case QL_SYNTH_FP8_BLOCK: return QL_FORMAT_FP8_BLOCK;
    case QL_SYNTH_MIXED:
        return is_mlp(role) && layer < mixed_tail(&o->config) ? QL_FORMAT_NVFP4 : QL_FORMAT_FP8_CHANNEL;
    case QL_SYNTH_MODELOPT: return is_mlp(role) || role == QL_ROLE_LM_HEAD ? QL_FORMAT_NVFP4 : QL_FORMAT_FP8_TENSOR;
    default: return QL_FORMAT_BF16;
    }
}

static fill plain_fill(ql_role role) {
    switch (role) {
    case QL_ROLE_EMBED: return (fill){FILL_NORMAL, 0, 1};
    case QL_ROLE_CONV: return (fill){FILL_UNIFORM, 0, 0.8f};
    case QL_ROLE_A_LOG: return (fill){FILL_UNIFORM, -0.5f, 1.5f};
    case QL_ROLE_DT_BIAS: return (fill){FILL_UNIFORM, -0.5f, 1.5f};
    case QL_ROLE_GDN_NORM: return (fill){FILL_UNIFORM, 1, 0.5f};
    default: return (fill){FILL_UNIFORM, 0, 0.25f}; /* norms that add one */
    }
}

static ql_status add_role(job *j, const char *path, ql_role role, int32_t layer, bool mtp, ql_error *err) {
    const ql_role_info *info = ql_role_get(role);
    int64_t shape[3];
    const int32_t rank = ql_role_shape(&j->o->config, role, shape);
    char name[320];
    snprintf(name, sizeof name, "%s%s", path, info->path);
    if (!info->linear) {
        return add(j, name, QL_DTYPE_BF16, rank, shape, plain_fill(role), err);
    }
    /* A wider head keeps the likeliest ids apart. */
    const float sigma = (role == QL_ROLE_LM_HEAD ? 3.0f : 1.0f) / sqrtf((float)shape[1]);
    return add_linear(j, name, format_of(j->o, role, layer, mtp), shape[0], shape[1], sigma, err);
}

static ql_status add_layer(job *j, const char *path, int32_t layer, bool full, bool mtp, ql_error *err) {
    for (int role = 0; role < QL_ROLE_COUNT; role++) {
        const ql_place place = ql_role_get((ql_role)role)->place;
        if (place == QL_PLACE_LAYER || place == (full ? QL_PLACE_FULL : QL_PLACE_GDN)) {
            QL_TRY(add_role(j, path, (ql_role)role, layer, mtp, err));
        }
    }
    if (full && !mtp && j->o->scheme == QL_SYNTH_MIXED) {
        static const char *const scales[] = {"self_attn.k_scale", "self_attn.v_scale"};
        const int64_t one = 1;
        for (int i = 0; i < 2; i++) {
            char name[256];
            snprintf(name, sizeof name, "%s%s", path, scales[i]);
            QL_TRY(add(j, name, QL_DTYPE_BF16, 1, &one, (fill){FILL_UNIFORM, 0.05f, 0}, err));
        }
    }
    return QL_OK;
}

enum { VISION_BLOCKS = 27 };

/* Names and number of the vision tower's tensors are the real ones; its width is only where nothing is written. */
static ql_status add_vision(job *j, ql_error *err) {
    const int64_t d = j->o->sparse ? 1152 : 16, wide = j->o->sparse ? 4304 : 32, merged = 4 * d,
                  out = j->o->config.hidden;
    const fill how = {FILL_NORMAL, 0, 0.02f};
    const struct {
        const char *name;
        int64_t n, k; /* k = 0: rank 1 */
    } block[] = {{"attn.proj.bias", d, 0},
                 {"attn.proj.weight", d, d},
                 {"attn.qkv.bias", 3 * d, 0},
                 {"attn.qkv.weight", 3 * d, d},
                 {"mlp.linear_fc1.bias", wide, 0},
                 {"mlp.linear_fc1.weight", wide, d},
                 {"mlp.linear_fc2.bias", d, 0},
                 {"mlp.linear_fc2.weight", d, wide},
                 {"norm1.bias", d, 0},
                 {"norm1.weight", d, 0},
                 {"norm2.bias", d, 0},
                 {"norm2.weight", d, 0}},
      rest[] = {{"merger.linear_fc1.bias", merged, 0},
                {"merger.linear_fc1.weight", merged, merged},
                {"merger.linear_fc2.bias", out, 0},
                {"merger.linear_fc2.weight", out, merged},
                {"merger.norm.bias", d, 0},
                {"merger.norm.weight", d, 0},
                {"patch_embed.proj.bias", d, 0},
                {"pos_embed.weight", 2304, d}};
    char name[320];
    for (int b = 0; b < VISION_BLOCKS; b++) {
        for (size_t i = 0; i < sizeof block / sizeof *block; i++) {
            const int64_t shape[2] = {block[i].n, block[i].k};
            snprintf(name, sizeof name, "model.visual.blocks.%d.%s", b, block[i].name);
            QL_TRY(add(j, name, QL_DTYPE_BF16, block[i].k ? 2 : 1, shape, how, err));
        }
    }
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) {
        const int64_t shape[2] = {rest[i].n, rest[i].k};
        snprintf(name, sizeof name, "model.visual.%s", rest[i].name);
        QL_TRY(add(j, name, QL_DTYPE_BF16, rest[i].k ? 2 : 1, shape, how, err));
    }
    const int64_t patch[5] = {d, 3, 2, 16, 16};
    return add(j, "model.visual.patch_embed.proj.weight", QL_DTYPE_BF16, 5, patch, how, err);
}

static ql_status list_tensors(job *j, ql_error *err) {
    const ql_synth *o = j->o;
    char path[160];
    QL_TRY(add_role(j, "", QL_ROLE_LM_HEAD, -1, false, err));
    QL_TRY(add_role(j, o->prefix, QL_ROLE_EMBED, -1, false, err));
    for (int32_t i = 0; i < o->config.n_layer; i++) {
        snprintf(path, sizeof path, "%slayers.%d.", o->prefix, i);
        QL_TRY(add_layer(j, path, i, o->config.full_attention[i], false, err));
    }
    QL_TRY(add_role(j, o->prefix, QL_ROLE_NORM, -1, false, err));
    if (o->scheme == QL_SYNTH_MIXED) {
        QL_TRY(add_vision(j, err));
        j->own_file = true;
    }
    if (o->config.n_mtp_layer) {
        for (int role = QL_ROLE_MTP_FC; role <= QL_ROLE_MTP_NORM; role++) {
            QL_TRY(add_role(j, "mtp.", (ql_role)role, -1, true, err));
        }
        QL_TRY(add_layer(j, "mtp.layers.0.", -1, true, true, err));
    }
    return QL_OK;
}

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

static void append_text(json_t *list, const char *fmt, ...) QL_PRINTF(2, 3);
static void append_text(json_t *list, const char *fmt, ...) {
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    json_array_append_new(list, json_string(text));
}

static json_t *fp8_channel_group(json_t *targets) {
    return json_pack("{s:s, s:o, s:{s:i, s:s, s:s, s:b, s:b}, s:{s:i, s:s, s:s, s:b, s:b}, s:n}", "format",
                     "float-quantized", "targets", targets, "weights", "num_bits", 8, "type", "float", "strategy",
                     "channel", "symmetric", 1, "dynamic", 0, "input_activations", "num_bits", 8, "type", "float",
                     "strategy", "token", "symmetric", 1, "dynamic", 1, "output_activations");
}

static json_t *nvfp4_group(json_t *targets) {
    return json_pack(
        "{s:s, s:o, s:{s:i, s:s, s:s, s:i, s:b, s:b, s:s, s:s}, s:{s:i, s:s, s:s, s:i, s:b, s:s, s:s}, s:n}", "format",
        "nvfp4-pack-quantized", "targets", targets, "weights", "num_bits", 4, "type", "float", "strategy",
        "tensor_group", "group_size", 16, "symmetric", 1, "dynamic", 0, "scale_dtype", "torch.float8_e4m3fn",
        "actorder", "static", "input_activations", "num_bits", 4, "type", "float", "strategy", "tensor_group",
        "group_size", 16, "symmetric", 1, "dynamic", "local", "scale_dtype", "torch.float8_e4m3fn",
        "output_activations");
}

static json_t *compressed_tensors(json_t *groups, json_t *ignore, const char *format) {
    return json_pack("{s:s, s:s, s:s, s:s, s:n, s:{}, s:{}, s:o, s:o, s:{s:i, s:s, s:s, s:b, s:b}}", "quant_method",
                     "compressed-tensors", "format", format, "quantization_status", "compressed", "version", "0.17.2",
                     "global_compression_ratio", "sparsity_config", "transform_config", "config_groups", groups,
                     "ignore", ignore, "kv_cache_scheme", "num_bits", 8, "type", "float", "strategy", "tensor",
                     "symmetric", 1, "dynamic", 0);
}

static json_t *mixed_config(const ql_synth *o) {
    const ql_config *c = &o->config;
    json_t *fp8 = json_array(), *nvfp4 = json_array(), *ignore = json_array();
    append_text(fp8, "re:.*self_attn\\.(q|k|v|o)_proj$");
    append_text(fp8, "re:.*linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$");
    append_text(fp8, "re:.*lm_head");
    char layers[1024];
    size_t len = 0;
    for (int32_t i = mixed_tail(c); i < c->n_layer; i++) {
        len += (size_t)snprintf(layers + len, sizeof layers - len, len ? "|%d" : "%d", i);
    }
    append_text(fp8, "re:.*layers\\.(%s)\\.mlp\\.(gate|up|down)_proj$", layers);
    append_text(nvfp4, "re:.*mlp\\.(gate|up|down)_proj$");
    static const char *const gdn[] = {"", ".norm", ".in_proj_b", ".in_proj_a"};
    for (int32_t i = 0; i < c->n_layer; i++) {
        for (int k = 0; k < 4 && !c->full_attention[i]; k++) {
            append_text(ignore, "%slayers.%d.linear_attn%s", o->prefix, i, gdn[k]);
        }
    }
    static const char *const vision[] = {"attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"};
    for (int b = 0; b < VISION_BLOCKS; b++) {
        for (int k = 0; k < 4; k++) {
            append_text(ignore, "model.visual.blocks.%d.%s", b, vision[k]);
        }
    }
    append_text(ignore, "model.visual.merger.linear_fc1");
    append_text(ignore, "model.visual.merger.linear_fc2");
    append_text(ignore, "re:^mtp.*");
    json_t *groups = json_pack("{s:o, s:o}", "group_0", fp8_channel_group(fp8), "group_1", nvfp4_group(nvfp4));
    return compressed_tensors(groups, ignore, "mixed-precision");
}

static json_t *fp8_channel_config(void) {
    json_t *targets = json_array(), *ignore = json_array();
    append_text(targets, "Linear");
    append_text(ignore, "re:.*linear_attn\\.in_proj_(a|b)$");
    append_text(ignore, "re:^mtp.*");
    return compressed_tensors(json_pack("{s:o}", "group_0", fp8_channel_group(targets)), ignore, "float-quantized");
}

static json_t *fp8_block_config(const ql_synth *o) {
    json_t *plain = json_array();
    append_text(plain, "lm_head");
    append_text(plain, "%sembed_tokens", o->prefix);
    append_text(plain, "mtp.fc");
    for (int32_t i = 0; i < o->config.n_layer; i++) {
        if (!o->config.full_attention[i]) {
            append_text(plain, "%slayers.%d.linear_attn.in_proj_a", o->prefix, i);
            append_text(plain, "%slayers.%d.linear_attn.in_proj_b", o->prefix, i);
            append_text(plain, "%slayers.%d.linear_attn.conv1d", o->prefix, i);
        }
    }
    return json_pack("{s:s, s:s, s:s, s:[i, i], s:o}", "quant_method", "fp8", "fmt", "e4m3", "activation_scheme",
                     "dynamic", "weight_block_size", 128, 128, "modules_to_not_convert", plain);
}

static void name_layer(json_t *layers, const ql_synth *o, int32_t layer, ql_role role) {
    char name[320];
    if (layer >= 0) {
        snprintf(name, sizeof name, "%slayers.%d.%s", o->prefix, layer, ql_role_get(role)->path);
    } else {
        snprintf(name, sizeof name, "%s", ql_role_get(role)->path);
    }
    switch (format_of(o, role, layer, false)) {
    case QL_FORMAT_NVFP4:
        json_object_set_new(layers, name, json_pack("{s:s, s:i}", "quant_algo", "W4A16_NVFP4", "group_size", 16));
        break;
    case QL_FORMAT_FP8_TENSOR: json_object_set_new(layers, name, json_pack("{s:s}", "quant_algo", "FP8")); break;
    default: break;
    }
}

static json_t *modelopt_config(const ql_synth *o) {
    json_t *layers = json_object(), *exclude = json_array();
    append_text(exclude, "mtp*");
    append_text(exclude, "*linear_attn.in_proj_a");
    append_text(exclude, "*linear_attn.in_proj_b");
    name_layer(layers, o, -1, QL_ROLE_LM_HEAD);
    for (int32_t i = 0; i < o->config.n_layer; i++) {
        for (int role = 0; role < QL_ROLE_COUNT; role++) {
            const ql_role_info *info = ql_role_get((ql_role)role);
            if (info->linear && (info->place == QL_PLACE_LAYER ||
                                 info->place == (o->config.full_attention[i] ? QL_PLACE_FULL : QL_PLACE_GDN))) {
                name_layer(layers, o, i, (ql_role)role);
            }
        }
    }
    return json_pack("{s:s, s:s, s:n, s:o, s:o}", "quant_method", "modelopt", "quant_algo", "MIXED_PRECISION",
                     "kv_cache_quant_algo", "exclude_modules", exclude, "quantized_layers", layers);
}

static json_t *config_json(const ql_synth *o) {
    const ql_config *c = &o->config;
    json_t *types = json_array();
    for (int32_t i = 0; i < c->n_layer; i++) {
        append_text(types, "%s", c->full_attention[i] ? "full_attention" : "linear_attention");
    }
    json_t *text = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:b, s:s, s:s, s:f, s:i, s:o, s:i, s:i, s:i, s:i, s:i, s:s, "
        "s:i}",
        "model_type", "qwen3_5_text", "hidden_size", c->hidden, "num_hidden_layers", c->n_layer, "intermediate_size",
        c->intermediate, "vocab_size", c->vocab, "num_attention_heads", c->n_head, "num_key_value_heads", c->n_kv_head,
        "head_dim", QL_HEAD_DIM, "attn_output_gate", 1, "attention_bias", 0, "hidden_act", "silu", "output_gate_type",
        "swish", "rms_norm_eps", 1e-6, "full_attention_interval", 4, "layer_types", types, "linear_num_key_heads",
        c->n_key_head, "linear_num_value_heads", c->n_value_head, "linear_key_head_dim", QL_GDN_DIM,
        "linear_value_head_dim", QL_GDN_DIM, "linear_conv_kernel_dim", QL_CONV_TAPS, "mamba_ssm_dtype", "float32",
        "max_position_embeddings", c->max_ctx);
    json_object_set_new(text, "rope_parameters",
                        json_pack("{s:s, s:i, s:f, s:b, s:[i, i, i]}", "rope_type", "default", "rope_theta", 10000000,
                                  "partial_rotary_factor", 0.25, "mrope_interleaved", 1, "mrope_section", 11, 11, 10));
    json_object_set_new(text, "partial_rotary_factor", json_real(0.25));
    json_object_set_new(text, "mtp_num_hidden_layers", json_integer(c->n_mtp_layer));
    json_object_set_new(text, "mtp_use_dedicated_embeddings", json_false());
    json_t *root = json_pack("{s:[s], s:s, s:b, s:o}", "architectures", "Qwen3_5ForConditionalGeneration", "model_type",
                             "qwen3_5", "tie_word_embeddings", 0, "text_config", text);
    json_t *q = NULL;
    switch (o->scheme) {
    case QL_SYNTH_FP8_CHANNEL: q = fp8_channel_config(); break;
    case QL_SYNTH_FP8_BLOCK: q = fp8_block_config(o); break;
    case QL_SYNTH_MIXED: q = mixed_config(o); break;
    case QL_SYNTH_MODELOPT: q = modelopt_config(o); break;
    default: break;
    }
    if (q) {
        json_object_set_new(root, "quantization_config", q);
    }
    return root;
}

static ql_status dump_json(const char *dir, const char *name, json_t *root, ql_error *err) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const bool ok = root && json_dump_file(root, path, JSON_INDENT(1)) == 0;
    json_decref(root);
    return ok ? QL_OK : ql_fail(err, QL_ERR_MODEL, "cannot write %s", path);
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

static const char *file_name(const job *j, int32_t f, char *out, size_t cap) {
    if (j->o->scheme == QL_SYNTH_MIXED) {
        snprintf(out, cap, "%s", f == 0 ? "model.safetensors" : mtp_file);
    } else {
        snprintf(out, cap, "model-%05d-of-%05d.safetensors", f + 1, j->n_file);
    }
    return out;
}

static ql_status write_headers(job *j, const char *dir, uint64_t *bytes, ql_error *err) {
    json_t *map = json_object();
    uint64_t total = 0;
    *bytes = 0;
    for (int32_t f = 0; f < j->n_file; f++) {
        char base[64], path[4096];
        snprintf(path, sizeof path, "%s/%s", dir, file_name(j, f, base, sizeof base));
        ql_status status = ql_stfile_create(&j->file[f], path, &j->data_offset[f], err);
        if (status != QL_OK) {
            json_decref(map);
            return status;
        }
        for (int32_t i = 0; i < j->file[f].n; i++) {
            json_object_set_new(map, j->file[f].entry[i].name, json_string(base));
        }
        total += j->file[f].data_bytes;
        *bytes += j->data_offset[f] + j->file[f].data_bytes;
    }
    return dump_json(dir, "model.safetensors.index.json",
                     json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map), err);
}

/* ---- data ----------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The values one element can take, as bytes of the file. */
static int make_table(const job *j, const fill *f, ql_dtype dtype, unsigned char *table) {
    const int width = f->kind == FILL_NORMAL || f->kind == FILL_UNIFORM ? (dtype == QL_DTYPE_F32 ? 4 : 2) : 1;
    for (int i = 0; i < TABLE; i++) {
        const float u = 2 * ((float)i + 0.5f) / TABLE - 1;
        switch (f->kind) {
        case FILL_E4M3: table[i] = e4m3_code(j, i); break;
        case FILL_E2M1: /* 64 quantiles for each half */
            table[i] = (uint8_t)(e2m1_code(j, (i & 63) * 64 + 32) | e2m1_code(j, (i >> 6) * 64 + 32) << 4);
            break;
        case FILL_GROUP_SCALE: table[i] = group_scale_code(i); break;
        default: {
            const float v = f->mean + f->spread * (f->kind == FILL_NORMAL ? j->z[i] : u);
            const uint16_t h = ql_bf16_of_f32(v);
            memcpy(table + i * width, width == 4 ? (const void *)&v : (const void *)&h, (size_t)width);
            break;
        }
        }
    }
    return width;
}

#define FILL_LOOP(type)                                                                                                \
    do {                                                                                                               \
        const type *values = (const type *)table;                                                                      \
        type *to = (type *)out;                                                                                        \
        for (size_t i = 0; i < n; i += 4) {                                                                            \
            const uint64_t r = x * 0x2545f4914f6cdd1du; /* xorshift64* */                                              \
            x ^= x >> 12, x ^= x << 25, x ^= x >> 27;                                                                  \
            to[i] = values[r >> 52];                                                                                   \
            to[i + 1] = values[(r >> 40) & (TABLE - 1)];                                                               \
            to[i + 2] = values[(r >> 28) & (TABLE - 1)];                                                               \
            to[i + 3] = values[(r >> 16) & (TABLE - 1)];                                                               \
        }                                                                                                              \
    } while (0)

/* Fills n elements, rounded up to a multiple of 4; `out` has the room. */
static void fill_values(void *out, size_t n, int width, const void *table, uint64_t seed) {
    uint64_t x = mix(seed) | 1;
    switch (width) {
    case 1: FILL_LOOP(uint8_t); break;
    case 2: FILL_LOOP(uint16_t); break;
    default: FILL_LOOP(uint32_t); break;
    }
}

static const item *item_of_chunk(const job *j, int64_t chunk) {
    int32_t lo = 0, hi = j->n_item - 1;
    while (lo < hi) {
        const int32_t mid = (lo + hi + 1) / 2;
        if (j->item[mid].first_chunk <= chunk) {
            lo = mid;
        } else {
            hi = mid - 1;
        }
    }
    return &j->item[lo];
}

static void *fill_thread(void *arg) {
    job *j = arg;
    unsigned char *buffer = malloc(CHUNK_BYTES + 16), *table = malloc(4 * TABLE);
    const item *last = NULL;
    int width = 1;
    while (buffer && table && atomic_load(&j->failed_errno) == 0) {
        const int64_t chunk = atomic_fetch_add(&j->next_chunk, 1);
        if (chunk >= j->n_chunk) {
            break;
        }
        const item *it = item_of_chunk(j, chunk);
        const ql_stentry *e = &j->file[it->file].entry[it->entry];
        if (it != last) {
            width = make_table(j, &it->fill, e->dtype, table);
            last = it;
        }
        const uint64_t at = (uint64_t)(chunk - it->first_chunk) * CHUNK_BYTES, left = e->end - e->begin - at;
        const size_t bytes = left < CHUNK_BYTES ? (size_t)left : CHUNK_BYTES;
        fill_values(buffer, bytes / (size_t)width, width, table, mix(j->o->seed) ^ (uint64_t)chunk);
        for (size_t done = 0; done < bytes;) {
            ssize_t n = pwrite(j->fd[it->file], buffer + done, bytes - done,
                               (off_t)(j->data_offset[it->file] + e->begin + at + done));
            if (n < 0 && errno != EINTR) {
                atomic_store(&j->failed_errno, errno);
                break;
            }
            done += n > 0 ? (size_t)n : 0;
        }
    }
    if (!buffer || !table) {
        atomic_store(&j->failed_errno, ENOMEM);
    }
    free(buffer);
    free(table);
    return NULL;
}

static ql_status fill_files(job *j, const char *dir, ql_error *err) {
    for (int32_t i = 0; i < j->n_item; i++) {
        const ql_stentry *e = &j->file[j->item[i].file].entry[j->item[i].entry];
        j->item[i].first_chunk = j->n_chunk;
        j->n_chunk += (int64_t)((e->end - e->begin + CHUNK_BYTES - 1) / CHUNK_BYTES);
    }
    int32_t opened = 0;
    for (; opened < j->n_file; opened++) {
        char base[64], path[4096];
        snprintf(path, sizeof path, "%s/%s", dir, file_name(j, opened, base, sizeof base));
        j->fd[opened] = open(path, O_WRONLY | O_CLOEXEC);
        if (j->fd[opened] < 0) {
            atomic_store(&j->failed_errno, errno);
            break;
        }
    }
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t n = j->o->threads > 0 ? j->o->threads : (int32_t)(processors > 0 ? processors : 1);
    n = n < MAX_THREADS ? n : MAX_THREADS;
    pthread_t thread[MAX_THREADS];
    int32_t started = 0;
    while (started < n - 1 && pthread_create(&thread[started], NULL, fill_thread, j) == 0) {
        started++;
    }
    fill_thread(j); /* this thread works too, so that a refused pthread_create only costs speed */
    for (int32_t i = 0; i < started; i++) {
        pthread_join(thread[i], NULL);
    }
    for (int32_t f = 0; f < opened; f++) {
        if (close(j->fd[f]) != 0) {
            atomic_store(&j->failed_errno, errno);
        }
    }
    const int failed = atomic_load(&j->failed_errno);
    return failed ? ql_fail(err, QL_ERR_MODEL, "cannot write weights into %s: %s", dir, strerror(failed)) : QL_OK;
}

ql_status ql_synth_write(const ql_synth *o, const char *dir, uint64_t *bytes, ql_error *err) {
    job *j = NULL;
    QL_TRY(ql_alloc(NULL, 1, sizeof *j, "the writer", (void **)&j, err));
    j->o = o;
    make_quantiles(j->z, TABLE);
    measure_codes(j);
    ql_status status;
    QL_TRY_GOTO(list_tensors(j, err), done);
    if (j->n_file > (int32_t)(sizeof j->fd / sizeof *j->fd)) {
        status = ql_fail(err, QL_ERR_USAGE, "shards of %llu bytes make %d files; at most %zu are written",
                         (unsigned long long)o->shard_bytes, j->n_file, sizeof j->fd / sizeof *j->fd);
        goto done;
    }
    QL_TRY_GOTO(write_headers(j, dir, bytes, err), done);
    QL_TRY_GOTO(dump_json(dir, "config.json", config_json(o), err), done);
    if (!o->sparse) {
        status = fill_files(j, dir, err);
    }
done:
    for (int32_t f = 0; f < j->n_file; f++) {
        ql_stfile_deinit(&j->file[f]);
    }
    ql_free(NULL, j->file);
    ql_free(NULL, j->item);
    ql_free(NULL, j);
    return status;
}
