#include "tests/gpu/rig.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

ql_error rig_err;

static _Noreturn void fail(const char *why) {
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, why);
    exit(1);
}

void rig_must(ql_status status) {
    if (status != QL_OK) {
        fail(rig_err.text);
    }
}

static void *host_room(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) {
        fail("no memory");
    }
    return p;
}

/* ---- device ------------------------------------------------------------------------------------------------------ */

ql_cuda_device rig_info(void) {
    ql_cuda_device info;
    rig_must(ql_cuda_info(0, &info, &rig_err));
    return info;
}

void rig_open(ql_dev *dev, const char *kernels, const ql_shape *shape) {
    rig_must(ql_cuda_dev_open(dev, 0, kernels, NULL, &rig_err));
    dev->scratch_bytes = dev->ops->scratch_bytes(dev, shape);
    dev->scratch = rig_room(dev, dev->scratch_bytes);
}

void *rig_room(ql_dev *dev, size_t bytes) {
    void *p;
    rig_must(dev->ops->alloc(dev, bytes, "the rig", &p));
    return p;
}

void rig_put(ql_dev *dev, void *at, const void *host, size_t bytes) {
    rig_must(dev->ops->h2d(dev, at, host, bytes));
    rig_must(dev->ops->sync(dev));
}

void rig_fetch(ql_dev *dev, void *host, const void *at, size_t bytes) {
    rig_must(dev->ops->d2h(dev, host, at, bytes));
    rig_must(dev->ops->sync(dev));
}

void *rig_copy(ql_dev *dev, const void *host, size_t bytes) {
    void *p = rig_room(dev, bytes);
    rig_put(dev, p, host, bytes);
    return p;
}

/* ---- by chance --------------------------------------------------------------------------------------------------- */

static uint64_t rng = 88172645463325252u;

uint64_t rig_next(void) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    return rng ^= rng << 17;
}

float *rig_numbers(size_t n, float scale, float mean) {
    float *p = host_room(n * sizeof *p);
    for (size_t i = 0; i < n; i++) {
        p[i] = mean + scale * ((float)(rig_next() >> 40) * 0x1p-23f - 1.0f);
    }
    return p;
}

float *rig_floats(ql_dev *dev, size_t n, float scale, float mean) {
    float *host = rig_numbers(n, scale, mean), *p = rig_copy(dev, host, n * sizeof *host);
    free(host);
    return p;
}

/* Eight bytes of codes: BF16 from 2^-7 to 2^-6, E4M3 below 1, both signs; every E2M1 code is sound. */
static uint64_t sound(ql_qformat format, uint64_t v) {
    return format == QL_FORMAT_BF16    ? (v & 0x807f807f807f807fu) | 0x3c003c003c003c00u
           : format == QL_FORMAT_NVFP4 ? v
                                       : v & 0xb7b7b7b7b7b7b7b7u;
}

rig_codes rig_codes_of(ql_qformat format, int32_t n, int32_t k) {
    /* scales for any format: a byte for each group of a row, four for a row, and more than FP8 has blocks */
    size_t bytes = (size_t)ql_qformat_row_bytes(format, k) * (size_t)n, n_scale = (size_t)n * (size_t)(k / 16 + 4);
    rig_codes c = {format, n, k, host_room(bytes + 8), host_room(n_scale)};
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t v = sound(format, rig_next());
        memcpy(c.data + i, &v, 8);
    }
    if (format == QL_FORMAT_NVFP4) {
        for (size_t i = 0; i < n_scale; i++) {
            c.scale[i] = (uint8_t)(0x28 + rig_next() % 16);
        }
    } else {
        float *scale = (float *)(void *)c.scale;
        for (size_t i = 0; i < n_scale / sizeof *scale; i++) {
            scale[i] = 0.01f + 0.001f * (float)(rig_next() % 16);
        }
    }
    return c;
}

void rig_codes_free(rig_codes *c) {
    free(c->data);
    free(c->scale);
    *c = (rig_codes){0};
}

ql_weight_src rig_src(const rig_codes *c) {
    bool nvfp4 = c->format == QL_FORMAT_NVFP4;
    return (ql_weight_src){.module = "rig",
                           .format = c->format,
                           .n = c->n,
                           .k = c->k,
                           .n_range = 1,
                           .row1 = {c->n},
                           .full_n = c->n,
                           .full_k = c->k,
                           .data = c->data,
                           .scale = c->scale,
                           .factor = nvfp4 ? 0.01f : 1.0f,
                           .scale_dtype = nvfp4 ? QL_DTYPE_F8_E4M3 : QL_DTYPE_F32};
}

ql_weight rig_load(ql_dev *dev, const ql_weight_src *src) {
    ql_weight w;
    rig_must(dev->ops->weight_load(dev, src, &w));
    rig_must(dev->ops->sync(dev));
    return w;
}

ql_weight rig_weight(ql_dev *dev, ql_qformat format, int32_t n, int32_t k) {
    rig_codes c = rig_codes_of(format, n, k);
    ql_weight_src src = rig_src(&c);
    ql_weight w = rig_load(dev, &src);
    rig_codes_free(&c);
    return w;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

void rig_one_by_one(ql_dev *dev, const ql_op *op, int32_t n) {
    const ql_ops *ops = dev->ops;
    for (int32_t i = 0; i < n; i++) {
        switch (op[i].kind) {
        case QL_OP_RMSNORM: rig_must(ops->rmsnorm(dev, &op[i].u.rmsnorm)); break;
        case QL_OP_LINEAR: rig_must(ops->linear_group(dev, op[i].u.linear.a, op[i].u.linear.n)); break;
        case QL_OP_CONV: rig_must(ops->conv(dev, &op[i].u.conv)); break;
        case QL_OP_GDN: rig_must(ops->gdn(dev, &op[i].u.gdn)); break;
        case QL_OP_GATED_NORM: rig_must(ops->gated_norm(dev, &op[i].u.gated_norm)); break;
        case QL_OP_SWIGLU: rig_must(ops->swiglu(dev, &op[i].u.swiglu)); break;
        case QL_OP_ATTN_PREP: rig_must(ops->attn_prep(dev, &op[i].u.attn_prep)); break;
        case QL_OP_ATTENTION: rig_must(ops->attention(dev, &op[i].u.attention)); break;
        case QL_OP_EXCHANGE: break;
        }
    }
}

void rig_chained(ql_dev *dev, const ql_op *op, int32_t n) {
    for (int32_t i = 0, taken; i < n; i += taken) {
        rig_must(dev->ops->chain(dev, op + i, n - i, &taken));
        if (taken == 0) {
            char why[64];
            snprintf(why, sizeof why, "op %d of %d was not taken", i, n);
            fail(why);
        }
    }
}

double rig_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

rig_span rig_time(ql_dev *dev, void (*call)(int i), int reps) {
    enum { ROUNDS = 7 };
    double s[ROUNDS];
    void *graph;
    call(0);
    rig_must(dev->ops->sync(dev));
    rig_must(ql_cuda_capture_begin(dev));
    for (int i = 0; i < reps; i++) {
        call(i);
    }
    rig_must(ql_cuda_capture_end(dev, &graph));
    for (int round = -1; round < ROUNDS; round++) {
        rig_must(dev->ops->sync(dev));
        double t = rig_now();
        rig_must(ql_cuda_graph_launch(dev, graph));
        rig_must(dev->ops->sync(dev));
        if (round >= 0) {
            s[round] = (rig_now() - t) / reps;
        }
    }
    ql_cuda_graph_free(dev, graph);
    qsort(s, ROUNDS, sizeof *s, by_value);
    return (rig_span){s[0], s[ROUNDS / 2], s[ROUNDS - 1]};
}
