/* The host device: memory, op table, choice of variants. A CPU lane runs every op at once on its own thread; "device
 * memory" is host memory from the engine's allocator.
 *
 * Dispatch as in a codec: a lane's functions start as the twins, then each instruction-set level that the CPU has
 * overwrites the ops that it improves. `kernels` caps the level for each family. Counting calls and checking scratch
 * happens here, once for all variants.
 */
#include "kernels/host/host_ops.h"

#include "runtime/base/mem.h"
#include "runtime/base/thread.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* ---- levels and families ---------------------------------------------------------------------------------------- */

/* Ops of one level; NULL where it has nothing better than the level below. */
typedef struct host_level {
    const char *name;
    bool (*supported)(void);
    ql_status (*embed)(ql_dev *dev, const ql_embed_args *a);
    ql_status (*linear)(ql_dev *dev, const ql_linear_args *a);
    ql_status (*rmsnorm)(ql_dev *dev, const ql_rmsnorm_args *a);
    ql_status (*gated_norm)(ql_dev *dev, const ql_gated_norm_args *a);
    ql_status (*conv)(ql_dev *dev, const ql_conv_args *a);
    ql_status (*gdn)(ql_dev *dev, const ql_gdn_args *a);
    ql_status (*attn_prep)(ql_dev *dev, const ql_attn_prep_args *a);
    ql_status (*attention)(ql_dev *dev, const ql_attention_args *a);
    ql_status (*swiglu)(ql_dev *dev, const ql_swiglu_args *a);
    ql_status (*topk)(ql_dev *dev, const ql_topk_args *a);
    ql_status (*sample)(ql_dev *dev, const ql_sample_args *a);
} host_level;

static bool has_twin(void) { return true; }

#if defined(__x86_64__)
/* Every CPU with AVX2 has F16C; clang 14 cannot ask for it by name. */
static bool has_avx2(void) { return __builtin_cpu_supports("avx2"); }

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

/* Rising order. */
static const host_level levels[] = {
    {
        .name = "twin",
        .supported = has_twin,
        .embed = ql_embed_host,
        .linear = ql_linear_host,
        .rmsnorm = ql_rmsnorm_host,
        .gated_norm = ql_gated_norm_host,
        .conv = ql_conv_host,
        .gdn = ql_gdn_host,
        .attn_prep = ql_attn_prep_host,
        .attention = ql_attention_host,
        .swiglu = ql_swiglu_host,
        .topk = ql_topk_host,
        .sample = ql_sample_host,
    },
#if defined(__x86_64__)
    {
        .name = "avx2",
        .supported = has_avx2,
        .linear = ql_linear_avx2,
        .gdn = ql_gdn_avx2,
        .attention = ql_attention_avx2,
    },
    {
        .name = "avx512",
        .supported = has_avx512,
        .linear = ql_linear_avx512,
        .gdn = ql_gdn_avx512,
        .attention = ql_attention_avx512,
    },
#endif
};

enum { N_LEVEL = sizeof levels / sizeof *levels };

/* A family is what `kernels` names; its ops take their level together. */
typedef enum family { EMBED, LINEAR, NORM, GDN, ATTENTION, MLP, SAMPLE, N_FAMILY } family;

static const char *const family_names[N_FAMILY] = {
    [EMBED] = "embed",         [LINEAR] = "linear", [NORM] = "norm",     [GDN] = "gdn",
    [ATTENTION] = "attention", [MLP] = "mlp",       [SAMPLE] = "sample",
};

static bool level_serves(const host_level *level, family f) {
    switch (f) {
    case EMBED: return level->embed;
    case LINEAR: return level->linear;
    case NORM: return level->rmsnorm || level->gated_norm;
    case GDN: return level->conv || level->gdn;
    case ATTENTION: return level->attn_prep || level->attention;
    case MLP: return level->swiglu;
    case SAMPLE: return level->topk || level->sample;
    default: return false;
    }
}

typedef struct host_dev {
    host_level fn; /* what serves each op */
    struct {
        const char *embed, *linear, *rmsnorm, *gated_norm, *conv, *gdn, *attn_prep, *attention, *swiglu, *topk, *sample;
    } by; /* name of the level that it came from */
} host_dev;

static host_dev *host(const ql_dev *dev) { return dev->impl; }

/* Takes the ops of `f` that `level` has. */
static void take(host_dev *h, const host_level *level, family f) {
#define TAKE(op)                                                                                                       \
    if (level->op) {                                                                                                   \
        h->fn.op = level->op;                                                                                          \
        h->by.op = level->name;                                                                                        \
    }
    switch (f) {
    case EMBED: TAKE(embed) break;
    case LINEAR: TAKE(linear) break;
    case NORM: TAKE(rmsnorm) TAKE(gated_norm) break;
    case GDN: TAKE(conv) TAKE(gdn) break;
    case ATTENTION: TAKE(attn_prep) TAKE(attention) break;
    case MLP: TAKE(swiglu) break;
    case SAMPLE: TAKE(topk) TAKE(sample) break;
    default: break;
    }
#undef TAKE
}

/* "twin, avx2": what this CPU has for the family. */
static void level_list(family f, char *out, size_t size) {
    size_t n = 0;
    out[0] = 0;
    for (int i = 0; i < N_LEVEL; i++) {
        if (level_serves(&levels[i], f) && levels[i].supported()) {
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "", levels[i].name);
        }
    }
}

/* Reads "family=variant,..." into the highest level of each family. */
static ql_status parse_kernels(const char *text, int32_t cap[N_FAMILY], ql_error *err) {
    bool given[N_FAMILY] = {false};
    for (const char *p = text; p && *p;) {
        size_t len = strcspn(p, ","), key = strcspn(p, "=,");
        if (key >= len) {
            return ql_fail(err, QL_ERR_USAGE, "kernel choice '%.*s' is not of the form FAMILY=VARIANT", (int)len, p);
        }
        int32_t f = 0, level = 0;
        while (f < N_FAMILY && (strlen(family_names[f]) != key || memcmp(family_names[f], p, key) != 0)) {
            f++;
        }
        if (f == N_FAMILY) {
            return ql_fail(err, QL_ERR_USAGE,
                           "unknown kernel family '%.*s'; families are embed, linear, norm, gdn, attention, mlp, "
                           "sample on host lanes",
                           (int)key, p);
        }
        if (given[f]) {
            return ql_fail(err, QL_ERR_USAGE, "kernel family '%s' is given twice", family_names[f]);
        }
        const char *name = p + key + 1;
        size_t name_len = len - key - 1;
        while (level < N_LEVEL &&
               (strlen(levels[level].name) != name_len || memcmp(levels[level].name, name, name_len) != 0)) {
            level++;
        }
        if (level == N_LEVEL || !level_serves(&levels[level], (family)f) || !levels[level].supported()) {
            char have[64];
            level_list((family)f, have, sizeof have);
            return ql_fail(err, QL_ERR_USAGE, "no host variant '%.*s' of kernel family '%s' on this CPU; it has %s",
                           (int)name_len, name, family_names[f], have);
        }
        given[f] = true;
        cap[f] = level;
        p += len + (p[len] == ',');
    }
    return QL_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

enum { ALIGN = 64 };

ql_status ql_host_alloc(ql_dev *dev, size_t bytes, const char *what, void **out) {
    size_t room;
    void *block;
    if (!ql_add_size(bytes, ALIGN + sizeof(void *), &room)) {
        return ql_fail(dev->err, QL_ERR_MEMORY, "%s would need more than the address space", what);
    }
    QL_TRY(ql_alloc(dev->mem, room, 1, what, &block, dev->err));
    unsigned char *p = block;
    p += sizeof(void *);
    p += -(uintptr_t)p % ALIGN;
    memcpy(p - sizeof(void *), &block, sizeof block);
    *out = p;
    return QL_OK;
}

void ql_host_free(ql_dev *dev, void *ptr) {
    if (ptr) {
        void *block;
        memcpy(&block, (unsigned char *)ptr - sizeof(void *), sizeof block);
        ql_free(dev->mem, block);
    }
}

static ql_status host_h2d(ql_dev *dev, void *dst, const void *src, size_t bytes) {
    if (bytes) {
        memcpy(dst, src, bytes);
    }
    ql_dev_count(&dev->h2d_bytes, bytes);
    return QL_OK;
}

static ql_status host_d2h(ql_dev *dev, void *dst, const void *src, size_t bytes) {
    if (bytes) {
        memcpy(dst, src, bytes);
    }
    ql_dev_count(&dev->d2h_bytes, bytes);
    return QL_OK;
}

static ql_status host_zero(ql_dev *dev, void *dst, size_t bytes) {
    (void)dev;
    if (bytes) {
        memset(dst, 0, bytes);
    }
    return QL_OK;
}

static ql_status host_sync(ql_dev *dev) {
    (void)dev;
    return QL_OK;
}

static size_t host_scratch_bytes(const ql_dev *dev, const ql_shape *shape) {
    (void)dev;
    size_t need[] = {ql_linear_host_scratch(shape), ql_gdn_host_scratch(shape), ql_attention_host_scratch(shape)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof need / sizeof *need; i++) {
        most = need[i] > most ? need[i] : most;
    }
    return most;
}

/* ---- ops --------------------------------------------------------------------------------------------------------- */

static void begin(ql_dev *dev, int32_t path) {
    ql_dev_count(&dev->progress, 1);
    ql_dev_count(&dev->n_path[path], 1);
}

static ql_status host_embed(ql_dev *dev, const ql_embed_args *a) {
    begin(dev, QL_PATH_EMBED);
    return host(dev)->fn.embed(dev, a);
}

static ql_status host_linear(ql_dev *dev, const ql_linear_args *a) {
    begin(dev, ql_path_linear(a->w->format, a->phase));
    return host(dev)->fn.linear(dev, a);
}

static ql_status host_linear_group(ql_dev *dev, const ql_linear_args *a, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        ql_status status = host_linear(dev, &a[i]);
        if (status != QL_OK) {
            return status;
        }
    }
    return QL_OK;
}

static ql_status host_rmsnorm(ql_dev *dev, const ql_rmsnorm_args *a) {
    begin(dev, QL_PATH_NORM);
    return host(dev)->fn.rmsnorm(dev, a);
}

static ql_status host_gated_norm(ql_dev *dev, const ql_gated_norm_args *a) {
    begin(dev, QL_PATH_GATED_NORM);
    return host(dev)->fn.gated_norm(dev, a);
}

static ql_status host_conv(ql_dev *dev, const ql_conv_args *a) {
    begin(dev, QL_PATH_CONV);
    return host(dev)->fn.conv(dev, a);
}

static ql_status host_gdn(ql_dev *dev, const ql_gdn_args *a) {
    begin(dev, a->batch->phase == QL_PHASE_GEN ? QL_PATH_GDN_STEP : QL_PATH_GDN_CHUNK);
    return host(dev)->fn.gdn(dev, a);
}

static ql_status host_attn_prep(ql_dev *dev, const ql_attn_prep_args *a) {
    begin(dev, QL_PATH_ATTN_PREP);
    return host(dev)->fn.attn_prep(dev, a);
}

static ql_status host_attention(ql_dev *dev, const ql_attention_args *a) {
    begin(dev, a->batch->phase == QL_PHASE_GEN ? QL_PATH_ATTN_GEN : QL_PATH_ATTN_PROMPT);
    return host(dev)->fn.attention(dev, a);
}

static ql_status host_swiglu(ql_dev *dev, const ql_swiglu_args *a) {
    begin(dev, QL_PATH_SWIGLU);
    return host(dev)->fn.swiglu(dev, a);
}

static ql_status host_add(ql_dev *dev, const ql_add_args *a) {
    ql_dev_count(&dev->progress, 1);
    return ql_add_host(dev, a);
}

static ql_status host_gather_rows(ql_dev *dev, const ql_gather_rows_args *a) {
    ql_dev_count(&dev->progress, 1);
    return ql_gather_rows_host(dev, a);
}

static ql_status host_topk(ql_dev *dev, const ql_topk_args *a) {
    begin(dev, QL_PATH_TOPK);
    return host(dev)->fn.topk(dev, a);
}

static ql_status host_sample(ql_dev *dev, const ql_sample_args *a) {
    begin(dev, QL_PATH_SAMPLE);
    return host(dev)->fn.sample(dev, a);
}

static const char *host_variant(const ql_dev *dev, int32_t path) {
    const host_dev *h = host(dev);
    switch (path) {
    case QL_PATH_EMBED: return h->by.embed;
    case QL_PATH_NORM: return h->by.rmsnorm;
    case QL_PATH_GATED_NORM: return h->by.gated_norm;
    case QL_PATH_CONV: return h->by.conv;
    case QL_PATH_GDN_CHUNK:
    case QL_PATH_GDN_STEP: return h->by.gdn;
    case QL_PATH_ATTN_PREP: return h->by.attn_prep;
    case QL_PATH_ATTN_PROMPT:
    case QL_PATH_ATTN_GEN: return h->by.attention;
    case QL_PATH_SWIGLU: return h->by.swiglu;
    case QL_PATH_TOPK: return h->by.topk;
    case QL_PATH_SAMPLE: return h->by.sample;
    default: return h->by.linear;
    }
}

static void host_describe(const ql_dev *dev, ql_lane_info *info) {
    (void)dev;
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        const char *name = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
        if (name) {
            snprintf(info->name, sizeof info->name, "%.*s", (int)strcspn(name + 2, "\n"), name + 2);
            break;
        }
    }
    if (f) {
        fclose(f);
    }
}

/* Reads more than caches hold, the best of a few times. */
static ql_status host_measure(ql_dev *dev, double *bytes_per_s) {
    enum { BYTES = 128 << 20, READS = 4 };
    void *p;
    *bytes_per_s = 0;
    QL_TRY(ql_host_alloc(dev, BYTES, "a measurement", &p));
    memset(p, 1, BYTES); /* pages that were never written are all the same one */
    volatile uint64_t sink = 0;
    for (int32_t i = 0; i < READS; i++) {
        const uint64_t *v = p;
        uint64_t sum[4] = {0};
        int64_t t0 = ql_now_ns();
        for (size_t j = 0; j < BYTES / sizeof *v; j += 4) {
            sum[0] += v[j];
            sum[1] += v[j + 1];
            sum[2] += v[j + 2];
            sum[3] += v[j + 3];
        }
        double rate = BYTES / ql_seconds_since(t0);
        sink += sum[0] + sum[1] + sum[2] + sum[3];
        *bytes_per_s = rate > *bytes_per_s ? rate : *bytes_per_s;
        ql_dev_count(&dev->progress, 1);
    }
    (void)sink;
    ql_host_free(dev, p);
    return QL_OK;
}

/* ---- open and close ---------------------------------------------------------------------------------------------- */

static void host_close(ql_dev *dev) {
    ql_free(dev->mem, dev->impl);
    dev->impl = NULL;
}

static const ql_ops table = {
    .name = "host",
    .alloc = ql_host_alloc,
    .free = ql_host_free,
    .h2d = host_h2d,
    .d2h = host_d2h,
    .zero = host_zero,
    .sync = host_sync,
    .scratch_bytes = host_scratch_bytes,
    .weight_bytes = ql_host_weight_bytes,
    .weight_load = ql_host_weight_load,
    .weight_same = ql_host_weight_same,
    .weight_crc = ql_host_weight_crc,
    .weight_free = ql_host_weight_free,
    .embed = host_embed,
    .linear = host_linear,
    .linear_group = host_linear_group,
    .rmsnorm = host_rmsnorm,
    .gated_norm = host_gated_norm,
    .conv = host_conv,
    .gdn = host_gdn,
    .attn_prep = host_attn_prep,
    .attention = host_attention,
    .swiglu = host_swiglu,
    .add = host_add,
    .gather_rows = host_gather_rows,
    .topk = host_topk,
    .sample = host_sample,
    .describe = host_describe,
    .measure = host_measure,
    .variant = host_variant,
    .close = host_close,
};

const ql_ops *ql_host_ops(void) { return &table; }

ql_status ql_host_dev_open(ql_dev *dev, const char *kernels, const ql_allocator *mem, ql_error *err) {
    int32_t cap[N_FAMILY];
    for (int32_t f = 0; f < N_FAMILY; f++) {
        cap[f] = N_LEVEL - 1;
    }
    QL_TRY(parse_kernels(kernels, cap, err));
    void *impl;
    QL_TRY(ql_alloc(mem, 1, sizeof(host_dev), "a host lane", &impl, err));
    host_dev *h = impl;
    for (int32_t f = 0; f < N_FAMILY; f++) {
        for (int32_t i = 0; i <= cap[f]; i++) {
            if (levels[i].supported()) {
                take(h, &levels[i], (family)f);
            }
        }
    }
    ql_dev_init(dev, &table, mem, err, h);
    snprintf(dev->device, sizeof dev->device, "host");
    return QL_OK;
}
