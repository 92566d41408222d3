/* Times the kernels of a CUDA device at the shapes of the 27B model: each call in a graph of many, over more weights than
 * the second-level cache holds, as a share of what a plain read reaches in the same run. Times are medians of seven graphs, and
 * behind each stands how far the seven lie apart, in percent of it.
 *
 *     kbench [FILTER]...
 */
#include "tests/gpu/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_COPY = 16, MAX_ROW = 2048, PAGES = 2048 + 64 };

static ql_dev dev;
static ql_cuda_device info;
static double stream_rate; /* bytes a second */
static double int8_rate;   /* operations a second */
static int n_filter;
static char **filter;

static void *room(size_t bytes) { return rig_room(&dev, bytes); }
static float *floats(int64_t n, float scale) { return rig_floats(&dev, (size_t)n, scale, 0.0f); }
static int32_t *ints(const int32_t *v, int64_t n) { return rig_copy(&dev, v, (size_t)n * sizeof *v); }

static bool wanted(const char *name) {
    bool hit = n_filter == 0;
    for (int i = 0; i < n_filter; i++) {
        hit = hit || strstr(name, filter[i]);
    }
    return hit;
}

/* The device anew, with kernels by name, and scratch for all of the shapes here. */
static void open_device(const char *kernels) {
    ql_shape shape = {.hidden = 5120,
                      .vocab = 248320,
                      .vocab_local = 248320,
                      .n_head = 24,
                      .n_kv_head = 4,
                      .n_key_head = 16,
                      .n_value_head = 48,
                      .mlp = 17408,
                      .max_row = MAX_ROW,
                      .max_seg = 8,
                      .max_out = 8,
                      .max_ctx = PAGES * 64};
    if (dev.ops) {
        dev.ops->free(&dev, dev.scratch);
        dev.ops->close(&dev);
    }
    rig_open(&dev, kernels, &shape);
}

static void report(const char *name, rig_span span, double bytes, double flops) {
    double s = span.median;
    printf("%-52s %9.2f us %4.1f%%", name, s * 1e6, 100.0 * (span.worst - span.best) / s);
    if (bytes > 0) {
        printf("  %7.0f GB/s %5.1f%%", bytes / s * 1e-9, 100.0 * bytes / s / stream_rate);
    }
    if (flops > 0) {
        printf("  %7.1f TFLOP/s", flops / s * 1e-12);
        if (int8_rate > 0 && strstr(name, ".q8")) {
            printf(" %5.1f%% of INT8", 100 * flops / s / int8_rate);
        }
    }
    printf("\n");
    fflush(stdout);
}

/* ---- stream ---- */

static void *big;
static size_t big_bytes;

static void read_big(int i) {
    (void)i;
    ql_cuda_read(ql_cuda_stream(&dev), info.n_sm, big, big_bytes);
}

/* ---- linear ---- */

static ql_weight weight[MAX_COPY];
static int n_copy;
static ql_linear_args lin;
static const char *q8_kernel = ""; /* of precision q8, for names */
static int together = 1;           /* weights that meet the same x in one call, as gate and up do */
static const char *const precision_names[] = {"auto", "exact", "bf16", "fp8", "q8"};

static void call_linear(int i) {
    ql_linear_args a[2] = {lin, lin};
    for (int j = 0; j < together; j++) {
        a[j].w = &weight[(i * together + j) % n_copy];
        a[j].y = lin.y + (int64_t)j * lin.n_row * lin.ldy;
    }
    rig_must(together == 1 ? dev.ops->linear(&dev, a) : dev.ops->linear_group(&dev, a, together));
}

/* Returns the seconds of the last number of rows, 0 where nothing was wanted. */
static double bench_linear(ql_qformat format, int32_t n, int32_t k, int32_t n_slice, const int32_t *rows, int n_rows,
                           ql_phase phase, ql_precision precision) {
    char name[96];
    bool any = false;
    for (int i = 0; i < n_rows; i++) {
        snprintf(name, sizeof name, "linear.%s.%s.%s%s n%d k%d s%d t%d", ql_qformat_name(format),
                 phase ? "gen" : "prompt", precision_names[precision], q8_kernel, n, k, n_slice, rows[i]);
        any = any || wanted(name);
    }
    if (!any) {
        return 0;
    }
    double last = 0;
    uint64_t wb, sb;
    dev.ops->weight_bytes(format, n, k, 0, 0, &wb, &sb);
    rig_codes codes = rig_codes_of(format, n, k);
    ql_weight_src src = rig_src(&codes);
    src.records = format == QL_FORMAT_NVFP4 && precision == QL_PREC_Q8;
    n_copy = (int)(300000000 / (wb + sb)) + 1;
    n_copy = n_copy < 2 ? 2 : n_copy > MAX_COPY ? MAX_COPY : n_copy;
    for (int i = 0; i < n_copy; i++) {
        weight[i] = rig_load(&dev, &src);
    }
    rig_codes_free(&codes);
    static float *x, *y;
    if (!x) {
        x = floats((int64_t)MAX_ROW * 17408, 1.0f);
        y = room((size_t)MAX_ROW * 34816 * 4);
    }
    for (int i = 0; i < n_rows; i++) {
        int t = rows[i];
        float *out = (int64_t)t * n > (int64_t)MAX_ROW * 34816 ? room((size_t)t * (size_t)n * 4) : y; /* never of two */
        lin = (ql_linear_args){.x = x,
                               .y = out,
                               .ldx = k,
                               .ldy = n,
                               .n_row = t,
                               .n_slice = n_slice,
                               .phase = phase,
                               .precision = precision};
        bool slow = strcmp(q8_kernel, "-reference") == 0; /* a tenth of a second a call */
        rig_span s = rig_time(&dev, call_linear,
                              phase == QL_PHASE_GEN ? 4 * n_copy < 32 ? 32 : 4 * n_copy
                              : slow                ? 1
                                                    : 6);
        last = s.median;
        snprintf(name, sizeof name, "linear.%s.%s.%s%s n%d k%d s%d t%d", ql_qformat_name(format),
                 phase ? "gen" : "prompt", precision_names[precision], q8_kernel, n, k, n_slice, t);
        report(name, s, phase == QL_PHASE_GEN ? together * ((double)(wb + sb) + 4.0 * t * n) + 4.0 * t * k : 0,
               phase == QL_PHASE_GEN ? 0 : 2.0 * together * t * n * k);
        if (out != y) {
            dev.ops->free(&dev, out);
        }
    }
    for (int i = 0; i < n_copy; i++) {
        dev.ops->weight_free(&dev, &weight[i]);
    }
    return last;
}

/* ---- q8 ---- */

static void *sink;
static int32_t int8_k;

static void multiply_int8(int i) {
    (void)i;
    ql_cuda_int8(ql_cuda_stream(&dev), info.n_sm, int8_k, sink);
}

/* How many times as fast one kernel is as another; nothing where one of them was not timed. */
static void print_ratio(const int32_t shape[3], int t, const char *fast, double s, const char *slow, double other) {
    if (s > 0 && other > 0) {
        printf("q8 n%d k%d s%d t%d: %s is %.3g times as fast as %s\n", shape[0], shape[1], shape[2], t, fast, other / s,
               slow);
    }
}

/* MLP products of the 27B on two lanes and on one, one row and 512, by each kernel of precision q8, and gate and up as one call that
 * makes the codes of x once or for each. The ceilings are the stream for one row and the rate of integer matrix products for many. */
static void bench_q8(void) {
    enum { REFERENCE, DP4A, WMMA, WIDE, N };
    static const struct {
        const char *name, *kernels;
    } kernels[N] = {
        {"-reference", "nvfp4=reference"}, {"-dp4a", "nvfp4=dp4a"}, {"-wmma", "nvfp4=wmma"}, {"-wide", "nvfp4=wide"}};
    static const int32_t shapes[][3] = {{8704, 5120, 1}, {5120, 8704, 4}, {17408, 5120, 1}, {5120, 17408, 8}};
    static const int32_t few[] = {1}, some[] = {16, 64}, many[] = {512};
    sink = room(16);
    for (int8_k = 16; int8_k <= 32; int8_k += 16) {
        double s = rig_time(&dev, multiply_int8, 4).median,
               ops = ql_cuda_int8(ql_cuda_stream(&dev), info.n_sm, int8_k, sink);
        printf("INT8 products, k %d: %.1f TOP/s\n", int8_k, ops / s * 1e-12);
        int8_rate = ops / s > int8_rate ? ops / s : int8_rate;
    }
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int32_t *v = shapes[s];
        double row[N], rows[N]; /* seconds of one and of many */
        for (int i = 0; i < N; i++) {
            open_device(kernels[i].kernels);
            q8_kernel = kernels[i].name;
            row[i] = bench_linear(QL_FORMAT_NVFP4, v[0], v[1], v[2], few, 1, QL_PHASE_GEN, QL_PREC_Q8);
            if (i == WMMA) {
                bench_linear(QL_FORMAT_NVFP4, v[0], v[1], v[2], some, 2, QL_PHASE_PROMPT, QL_PREC_Q8);
            }
            rows[i] = bench_linear(QL_FORMAT_NVFP4, v[0], v[1], v[2], many, 1, QL_PHASE_PROMPT, QL_PREC_Q8);
        }
        print_ratio(v, 1, "dp4a", row[DP4A], "wmma", row[WMMA]);
        print_ratio(v, 1, "dp4a", row[DP4A], "reference", row[REFERENCE]);
        print_ratio(v, 512, "wide", rows[WIDE], "wmma", rows[WMMA]);
        print_ratio(v, 512, "wide", rows[WIDE], "reference", rows[REFERENCE]);
    }
    together = 2;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s += 2) {
        const int32_t *v = shapes[s];
        for (int apart = 0; apart < 2; apart++) {
            open_device(apart ? "shared_q8=off" : NULL);
            q8_kernel = apart ? "-pair-apart" : "-pair";
            bench_linear(QL_FORMAT_NVFP4, v[0], v[1], v[2], few, 1, QL_PHASE_GEN, QL_PREC_Q8);
            bench_linear(QL_FORMAT_NVFP4, v[0], v[1], v[2], many, 1, QL_PHASE_PROMPT, QL_PREC_Q8);
        }
    }
    together = 1;
    q8_kernel = "";
    open_device(NULL);
}

/* ---- batches ---- */

static ql_batch make_batch(ql_phase phase, int32_t n_row, int32_t pos) {
    int32_t *v = malloc(sizeof *v * (MAX_ROW + PAGES));
    ql_batch b = {.phase = phase, .n_row = n_row, .n_seg = 1, .max_page = PAGES};
    int32_t seg_row[2] = {0, n_row}, zero[MAX_ROW] = {0};
    b.row_seg = ints(zero, n_row);
    for (int32_t i = 0; i < n_row; i++) {
        v[i] = pos + i;
    }
    b.row_pos = ints(v, n_row);
    b.seg_row = ints(seg_row, 2);
    b.seg_pos = ints(&pos, 1);
    b.seg_slot = ints(zero, 1);
    for (int32_t i = 0; i < PAGES; i++) {
        v[i] = i;
    }
    b.page = ints(v, PAGES);
    free(v);
    return b;
}

static ql_batch batch;
static ql_gdn_args gdn;
static ql_conv_args conv;
static float *state;
static int n_state;
static int64_t state_floats;
static ql_attn_prep_args prep;
static ql_attention_args attn;
static ql_kv_cache cache;
static ql_rmsnorm_args norm;
static ql_gated_norm_args gated;
static ql_swiglu_args swiglu;
static ql_topk_args topk;
static ql_sample_args sample;
static ql_embed_args embed;

static void call_gdn(int i) {
    gdn.state = state + (i % n_state) * state_floats;
    rig_must(dev.ops->gdn(&dev, &gdn));
}
static void call_conv(int i) {
    (void)i;
    rig_must(dev.ops->conv(&dev, &conv));
}
static void call_prep(int i) {
    (void)i;
    rig_must(dev.ops->attn_prep(&dev, &prep));
}
static void call_attn(int i) {
    (void)i;
    rig_must(dev.ops->attention(&dev, &attn));
}
static void call_norm(int i) {
    (void)i;
    rig_must(dev.ops->rmsnorm(&dev, &norm));
}
static void call_gated(int i) {
    (void)i;
    rig_must(dev.ops->gated_norm(&dev, &gated));
}
static void call_swiglu(int i) {
    (void)i;
    rig_must(dev.ops->swiglu(&dev, &swiglu));
}
static void call_topk(int i) {
    (void)i;
    rig_must(dev.ops->topk(&dev, &topk));
}
static void call_sample(int i) {
    (void)i;
    rig_must(dev.ops->sample(&dev, &sample));
}
static void call_embed(int i) {
    (void)i;
    rig_must(dev.ops->embed(&dev, &embed));
}

static void bench_mixers(void) {
    enum { KEY = 16, VALUE = 48, CH = 10240, HEAD = 24, KV = 4 };
    char name[96];
    float *u = floats((int64_t)MAX_ROW * CH, 1.0f), *o = room((size_t)MAX_ROW * 6144 * 4),
          *m = floats((int64_t)MAX_ROW * CH, 1.0f);
    float *ab = floats((int64_t)MAX_ROW * VALUE, 1.0f), *small = floats(65536, 0.5f), *tail = room(3 * CH * 4);
    state_floats = (int64_t)VALUE * 128 * 128;
    n_state = 64;
    state = room((size_t)(n_state * state_floats) * 4);
    static const int32_t rows[] = {1, 4, 512, 2048};
    for (int i = 0; i < 4; i++) {
        ql_phase phase = rows[i] < 64 ? QL_PHASE_GEN : QL_PHASE_PROMPT;
        batch = make_batch(phase, rows[i], 64);
        gdn = (ql_gdn_args){&batch, u, ab, ab, small, small, state, o, KEY, VALUE, 0, 0, 3};
        conv = (ql_conv_args){&batch, m, small, tail, u, CH};
        gated = (ql_gated_norm_args){o, m, small, u, rows[i], VALUE, 1e-6f};
        snprintf(name, sizeof name, "gdn.%s t%d", phase ? "gen" : "prompt", rows[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_gdn, phase ? 256 : 8),
                   phase ? 8.0 * (double)state_floats + 4.0 * rows[i] * (CH + 6144) : 0,
                   phase ? 0 : 2.0 * rows[i] * VALUE * (3.0 * 128 * 128 + 4.0 * 32 * 128));
        }
        snprintf(name, sizeof name, "conv t%d", rows[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_conv, 64), 8.0 * rows[i] * CH, 0);
        }
        snprintf(name, sizeof name, "gated_norm t%d", rows[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_gated, 64), 12.0 * rows[i] * 6144, 0);
        }
        norm = (ql_rmsnorm_args){m, u, small, o, 5120, rows[i], 5120, 1e-6f};
        snprintf(name, sizeof name, "rmsnorm+delta t%d", rows[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_norm, 64), 16.0 * rows[i] * 5120, 0);
        }
    }
    static const int32_t mlp_rows[] = {1, 512, 2048};
    float *gate = room((size_t)MAX_ROW * 17408 * 4), *up = room((size_t)MAX_ROW * 17408 * 4);
    for (int i = 0; i < 3; i++) {
        swiglu = (ql_swiglu_args){gate, up, gate, mlp_rows[i], 17408};
        snprintf(name, sizeof name, "swiglu t%d", mlp_rows[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_swiglu, 64), 12.0 * mlp_rows[i] * 17408, 0);
        }
    }
    float *qg = floats((int64_t)MAX_ROW * HEAD * 512, 1.0f), *q = room((size_t)MAX_ROW * HEAD * 256 * 4);
    float *rope = floats((int64_t)PAGES * 64 * 64, 1.0f);
    static const struct {
        ql_kv_type type;
        const char *name;
    } types[] = {{QL_KV_F16, "f16"}, {QL_KV_FP8, "fp8"}, {QL_KV_BF16, "bf16"}, {QL_KV_F32, "f32"}};
    for (int ty = 0; ty < 4; ty++) {
        uint64_t side = (uint64_t)PAGES * ql_kv_page_bytes(types[ty].type, KV) / 2;
        cache =
            (ql_kv_cache){.type = types[ty].type, .n_page = PAGES, .n_kv_head = KV, .k = room(side), .v = room(side)};
        if (types[ty].type == QL_KV_FP8) {
            cache.k_scale = room((size_t)PAGES * KV * 64 * 4 * 2);
            cache.v_scale = room((size_t)PAGES * KV * 64 * 4 * 2);
        }
        static const int32_t ctx[] = {512, 8192, 32768, 131072};
        for (int i = 0; i < 4; i++) {
            batch = make_batch(QL_PHASE_GEN, 1, ctx[i] - 1);
            attn = (ql_attention_args){&batch, q, qg, &cache, o, HEAD, 0, 0, 6, QL_PREC_EXACT};
            prep = (ql_attn_prep_args){&batch, qg, m, u, small, small, rope, q, &cache, HEAD, 64, 1e-6f};
            snprintf(name, sizeof name, "attention.gen.%s ctx%d", types[ty].name, ctx[i]);
            if (wanted(name)) {
                report(name, rig_time(&dev, call_attn, 16),
                       (double)ctx[i] / 64 * (double)ql_kv_page_bytes(cache.type, KV), 0);
            }
            snprintf(name, sizeof name, "attn_prep.%s t1", types[ty].name);
            if (i == 0 && wanted(name)) {
                report(name, rig_time(&dev, call_prep, 64), 0, 0);
            }
        }
        static const int32_t prompt[][2] = {{512, 0}, {2048, 0}, {2048, 6144}, {2048, 30720}};
        for (int i = 0; i < 4; i++) {
            int32_t n = prompt[i][0], pos = prompt[i][1];
            batch = make_batch(QL_PHASE_PROMPT, n, pos);
            prep = (ql_attn_prep_args){&batch, qg, m, u, small, small, rope, q, &cache, HEAD, 64, 1e-6f};
            snprintf(name, sizeof name, "attn_prep.%s t%d", types[ty].name, n);
            if (i < 2 && wanted(name)) {
                report(name, rig_time(&dev, call_prep, 16),
                       4.0 * 256 * n * (2 * HEAD + 2 * KV) + n / 64 * (double)ql_kv_page_bytes(cache.type, KV), 0);
            }
            for (int exact = 0; exact < 2; exact++) {
                attn =
                    (ql_attention_args){&batch, q, qg, &cache, o, HEAD, 0, 0, 6, exact ? QL_PREC_EXACT : QL_PREC_BF16};
                snprintf(name, sizeof name, "attention.prompt.%s.%s t%d at%d", exact ? "exact" : "bf16", types[ty].name,
                         n, pos);
                if (wanted(name)) {
                    report(name, rig_time(&dev, call_attn, 2), 0, 4.0 * 256 * HEAD * n * (pos + 0.5 * n));
                }
            }
        }
        dev.ops->free(&dev, cache.k);
        dev.ops->free(&dev, cache.v);
    }
}

static void bench_sampling(void) {
    enum { V = 248320, CAP = 64 };
    char name[96];
    float *logits = floats(4 * V, 10.0f);
    ql_sample_row host[4];
    static const int32_t k[] = {1, 20, 64};
    for (int i = 0; i < 3; i++) {
        for (int r = 0; r < 4; r++) {
            host[r] = (ql_sample_row){.temperature = k[i] == 1 ? 0.0f : 0.7f,
                                      .top_p = 0.95f,
                                      .repetition = 1,
                                      .top_k = k[i],
                                      .k = k[i],
                                      .seed = 1,
                                      .counter = 2};
        }
        ql_sample_row *row = rig_copy(&dev, host, sizeof host);
        topk = (ql_topk_args){.logits = logits,
                              .ld = V,
                              .n_row = 1,
                              .n = V,
                              .vocab = V,
                              .n_valid = 248077,
                              .row = row,
                              .cand = room(sizeof(ql_candidate) * 4 * CAP),
                              .stat = room(sizeof(ql_vocab_stat) * 32),
                              .k_cap = CAP};
        sample = (ql_sample_args){topk.cand, topk.stat, row, 1, 1, CAP, room(16), room(16)};
        snprintf(name, sizeof name, "topk k%d", k[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_topk, 64), 4.0 * V, 0);
        }
        snprintf(name, sizeof name, "sample k%d", k[i]);
        if (wanted(name)) {
            report(name, rig_time(&dev, call_sample, 64), 0, 0);
        }
    }
    int32_t id = 17;
    embed = (ql_embed_args){ints(&id, 1), logits, QL_DTYPE_BF16, 0, 64, room(5120 * 4), 1, 5120};
    if (wanted("embed t1")) {
        report("embed t1", rig_time(&dev, call_embed, 64), 0, 0);
    }
}

int main(int argc, char **argv) {
    n_filter = argc - 1;
    filter = argv + 1;
    info = rig_info();
    open_device(NULL);
    printf("%s, %d SMs, compute %d.%d, scratch %.1f MB\n", dev.device, info.n_sm, info.major, info.minor,
           (double)dev.scratch_bytes * 1e-6);
    big_bytes = (size_t)8 << 30;
    big = room(big_bytes);
    rig_span s = rig_time(&dev, read_big, 2);
    stream_rate = (double)big_bytes / s.median;
    report("read 8 GiB", s, (double)big_bytes, 0);
    big_bytes = (size_t)50 << 20;
    report("read 50 MiB (from a graph, second-level cache)", rig_time(&dev, read_big, 64), (double)big_bytes, 0);
    dev.ops->free(&dev, big);

    static const int32_t few[] = {1, 2, 4, 8, 16}, one[] = {1}, prompt[] = {64, 512, 2048}, p512[] = {512};
    const ql_phase gen = QL_PHASE_GEN, pr = QL_PHASE_PROMPT;
    const ql_precision exact = QL_PREC_EXACT, bf16 = QL_PREC_BF16;
    bench_linear(QL_FORMAT_NVFP4, 34816, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_NVFP4, 17408, 5120, 1, few, 5, gen, exact);
    bench_linear(QL_FORMAT_NVFP4, 8704, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_NVFP4, 5120, 17408, 8, few, 5, gen, exact);
    bench_linear(QL_FORMAT_NVFP4, 5120, 8704, 4, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 16384, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 10240, 5120, 1, few, 5, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 6144, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 5120, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 1024, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 5120, 6144, 8, few, 5, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 5120, 3072, 4, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 5120, 17408, 8, one, 1, gen, exact);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 248320, 5120, 1, few, 3, gen, exact);
    bench_linear(QL_FORMAT_FP8_BLOCK, 17408, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_BF16, 48, 5120, 1, one, 1, gen, exact);
    bench_linear(QL_FORMAT_BF16, 17408, 5120, 1, few, 3, gen, exact);
    bench_linear(QL_FORMAT_NVFP4, 17408, 5120, 1, prompt, 3, pr, bf16);
    bench_linear(QL_FORMAT_NVFP4, 5120, 17408, 8, prompt, 3, pr, bf16);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 10240, 5120, 1, prompt, 3, pr, bf16);
    bench_linear(QL_FORMAT_FP8_CHANNEL, 5120, 6144, 8, prompt, 3, pr, bf16);
    bench_linear(QL_FORMAT_FP8_BLOCK, 17408, 5120, 1, prompt, 3, pr, bf16);
    bench_linear(QL_FORMAT_BF16, 17408, 5120, 1, p512, 1, pr, bf16);
    bench_linear(QL_FORMAT_NVFP4, 17408, 5120, 1, p512, 1, pr, exact);
    bench_q8();
    bench_mixers();
    bench_sampling();
    dev.ops->close(&dev);
    return 0;
}
