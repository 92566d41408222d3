/* Chains of several lanes, which add across lanes inside, give every lane the bits that one lane has op by op: on one GPU, which
 * the lanes share by taking a part of its SMs each. Two recurrent layers, over and over, plainly and as a recorded step; then a
 * lane that never comes, which the others must survive.
 *
 *     lanes [ROUNDS]
 */
#include "tests/gpu/rig.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HIDDEN = 960,
    MLP = 4096,
    KEYS = 8,
    VALUES = 16,
    CHANNELS = (2 * KEYS + VALUES) * 128,
    LAYERS = 2,
    ROWS = 4,
    SLICES = 8,
    MOST_LANES = 8,
    OPS = LAYERS * 12,
    DEADLINE_MS = 500
};

static void cuda_must(cudaError_t e) {
    if (e != cudaSuccess) {
        fprintf(stderr, "lanes: %s\n", cudaGetErrorString(e));
        exit(1);
    }
}

/* ---- weights on the host, whole ------------------------------------------------------------------------------------- */

/* Rows of up to three ranges, or columns from col0 on. */
static ql_weight cut(ql_dev *dev, const rig_codes *w, int32_t n_range, const int32_t (*range)[2], int32_t col0,
                     int32_t k) {
    ql_weight_src src = rig_src(w);
    src.n = 0;
    src.k = k;
    src.col0 = col0;
    src.n_range = n_range;
    for (int32_t i = 0; i < n_range; i++) {
        src.row0[i] = range[i][0];
        src.row1[i] = range[i][1];
        src.n += range[i][1] - range[i][0];
    }
    return rig_load(dev, &src);
}

static rig_codes w_qkv, w_z, w_b, w_a, w_out, w_gate, w_up, w_down;
static float *norm_in, *norm_post, *conv, *a_log, *dt_bias, *norm_gdn, *x0, *state0[LAYERS], *tail0[LAYERS];

/* ---- a lane ----------------------------------------------------------------------------------------------------------- */

struct lane {
    ql_dev dev;
    int32_t index, n_lane, keys, values, mlp, channels;
    ql_weight qkv, z, b, a, out, gate, up, down;
    float *norm_in, *norm_post, *conv, *a_log, *dt_bias, *norm_gdn;
    float *x, *xn, *part, *delta, *m, *u, *zz, *bb, *aa, *o, *g, *uu, *state[LAYERS], *tail[LAYERS];
    int32_t *seg;
    ql_batch batch;
    ql_op op[OPS];
};

static float *memory(struct lane *l, size_t n) { return rig_room(&l->dev, n * sizeof(float)); }

static float *copy_of(struct lane *l, const float *from, size_t n) {
    return rig_copy(&l->dev, from, n * sizeof(float));
}

/* Where this lane's channels are among all: q, k and v. */
static void channel_ranges(const struct lane *l, int32_t range[3][2]) {
    for (int32_t i = 0; i < 3; i++) {
        int32_t n = (i < 2 ? l->keys : l->values) * 128, first = (i < 2 ? i * KEYS : 2 * KEYS) * 128 + l->index * n;
        range[i][0] = first;
        range[i][1] = first + n;
    }
}

/* Rows [rows][CHANNELS] to the lane's [rows][channels], or back. */
static void lane_channels(const struct lane *l, float *all, float *own, int32_t rows, int32_t width, bool back) {
    int32_t range[3][2];
    channel_ranges(l, range);
    for (int32_t r = 0; r < rows; r++) {
        float *to = own + (size_t)r * (size_t)(l->channels * width);
        for (int32_t i = 0; i < 3; i++) {
            size_t n = (size_t)(range[i][1] - range[i][0]) * (size_t)width;
            float *from = all + ((size_t)r * CHANNELS + (size_t)range[i][0]) * (size_t)width;
            memcpy(back ? from : to, back ? to : from, n * sizeof(float));
            to += n;
        }
    }
}

static void restart(struct lane *l) {
    const ql_ops *ops = l->dev.ops;
    rig_must(ops->h2d(&l->dev, l->x, x0, ROWS * HIDDEN * sizeof(float)));
    size_t n = (size_t)l->values * 128 * 128;
    float *own = malloc(ROWS * 3 * CHANNELS * sizeof(float));
    for (int i = 0; i < LAYERS; i++) {
        for (int s = 0; s < ROWS; s++) {
            rig_must(ops->h2d(&l->dev, l->state[i] + (size_t)s * n,
                              state0[i] + ((size_t)s * VALUES + (size_t)(l->index * l->values)) * 128 * 128,
                              n * sizeof(float)));
        }
        lane_channels(l, tail0[i], own, ROWS * 3, 1, false);
        rig_must(ops->h2d(&l->dev, l->tail[i], own, (size_t)(ROWS * 3 * l->channels) * sizeof(float)));
    }
    rig_must(ops->sync(&l->dev));
    free(own);
}

static void open_lane(struct lane *l, int32_t index, int32_t n_lane) {
    *l = (struct lane){.index = index,
                       .n_lane = n_lane,
                       .keys = KEYS / n_lane,
                       .values = VALUES / n_lane,
                       .mlp = MLP / n_lane,
                       .channels = CHANNELS / n_lane};
    ql_shape shape = {.hidden = HIDDEN,
                      .vocab = 1024,
                      .vocab_local = 1024,
                      .n_head = 8,
                      .n_kv_head = 4,
                      .n_key_head = l->keys,
                      .n_value_head = l->values,
                      .mlp = l->mlp,
                      .max_row = 64,
                      .max_seg = ROWS,
                      .max_out = ROWS,
                      .max_ctx = 4096};
    ql_dev *dev = &l->dev;
    rig_open(dev, NULL, &shape);
    int32_t range[3][2], v = l->values, f = l->mlp;
    channel_ranges(l, range);
    l->qkv = cut(dev, &w_qkv, 3, (const int32_t(*)[2])range, 0, HIDDEN);
    l->z = cut(dev, &w_z, 1, (const int32_t[][2]){{index * v * 128, (index + 1) * v * 128}}, 0, HIDDEN);
    l->b = cut(dev, &w_b, 1, (const int32_t[][2]){{index * v, (index + 1) * v}}, 0, HIDDEN);
    l->a = cut(dev, &w_a, 1, (const int32_t[][2]){{index * v, (index + 1) * v}}, 0, HIDDEN);
    l->out = cut(dev, &w_out, 1, (const int32_t[][2]){{0, HIDDEN}}, index * v * 128, v * 128);
    l->gate = cut(dev, &w_gate, 1, (const int32_t[][2]){{index * f, (index + 1) * f}}, 0, HIDDEN);
    l->up = cut(dev, &w_up, 1, (const int32_t[][2]){{index * f, (index + 1) * f}}, 0, HIDDEN);
    l->down = cut(dev, &w_down, 1, (const int32_t[][2]){{0, HIDDEN}}, index * f, f);
    float *own = malloc(4 * CHANNELS * sizeof(float));
    lane_channels(l, conv, own, 1, 4, false);
    l->conv = copy_of(l, own, 4 * (size_t)l->channels);
    free(own);
    l->norm_in = copy_of(l, norm_in, HIDDEN);
    l->norm_post = copy_of(l, norm_post, HIDDEN);
    l->norm_gdn = copy_of(l, norm_gdn, 128);
    l->a_log = copy_of(l, a_log + index * v, (size_t)v);
    l->dt_bias = copy_of(l, dt_bias + index * v, (size_t)v);
    float **const row[] = {&l->x,  &l->xn, &l->part, &l->delta, &l->m, &l->u,
                           &l->zz, &l->bb, &l->aa,   &l->o,     &l->g, &l->uu};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        *row[i] = memory(l, ROWS * (size_t)CHANNELS);
    }
    for (int i = 0; i < LAYERS; i++) {
        l->state[i] = memory(l, (size_t)ROWS * (size_t)v * 128 * 128);
        l->tail[i] = memory(l, ROWS * 3 * (size_t)l->channels);
    }
    /* rows of segments, positions, slots */
    static const int32_t index_of[] = {0, 1, 2, 3, 4, 7, 0, 9, 70, 1, 0, 3, 2};
    l->seg = rig_copy(dev, index_of, sizeof index_of);
}

static ql_linear_args product(const struct lane *l, const ql_weight *w, const float *from, float *to, int32_t slices) {
    return (ql_linear_args){.w = w,
                            .x = from,
                            .y = to,
                            .ldx = w->k,
                            .ldy = w->n,
                            .n_row = l->batch.n_row,
                            .n_slice = slices,
                            .phase = QL_PHASE_GEN,
                            .precision = QL_PREC_EXACT};
}

static ql_op norm(const struct lane *l, const float *delta, const float *w) {
    return (ql_op){.kind = QL_OP_RMSNORM,
                   .u.rmsnorm = {.x = l->x,
                                 .delta = delta,
                                 .w = w,
                                 .y = l->xn,
                                 .ldy = HIDDEN,
                                 .n_row = l->batch.n_row,
                                 .n = HIDDEN,
                                 .eps = 1e-6f}};
}

/* A row-parallel product, with its exchange where there are other lanes. */
static int row_parallel(struct lane *l, int n, const ql_weight *w, const float *from) {
    bool alone = l->n_lane == 1;
    l->op[n++] =
        (ql_op){.kind = QL_OP_LINEAR,
                .u.linear = {.n = 1, .a = {product(l, w, from, alone ? l->delta : l->part, SLICES / l->n_lane)}}};
    if (!alone) {
        l->op[n++] = (ql_op){.kind = QL_OP_EXCHANGE,
                             .u.exchange = {.src = l->part, .dst = l->delta, .n = (int64_t)l->batch.n_row * HIDDEN}};
    }
    return n;
}

/* The ops of all layers, or all but the last one's second half. */
static int fill(struct lane *l, int32_t rows, bool half) {
    l->batch = (ql_batch){.phase = QL_PHASE_GEN,
                          .n_row = rows,
                          .n_seg = rows,
                          .row_seg = l->seg,
                          .row_pos = l->seg + ROWS + 1,
                          .seg_row = l->seg,
                          .seg_pos = l->seg + ROWS + 1,
                          .seg_slot = l->seg + 2 * ROWS + 1};
    int n = 0;
    for (int i = 0; i < LAYERS; i++) {
        l->op[n++] = norm(l, i > 0 ? l->delta : NULL, l->norm_in);
        l->op[n++] =
            (ql_op){.kind = QL_OP_LINEAR,
                    .u.linear = {.n = 4,
                                 .a = {product(l, &l->qkv, l->xn, l->m, 1), product(l, &l->z, l->xn, l->zz, 1),
                                       product(l, &l->b, l->xn, l->bb, 1), product(l, &l->a, l->xn, l->aa, 1)}}};
        l->op[n++] = (ql_op){
            .kind = QL_OP_CONV,
            .u.conv = {
                .batch = &l->batch, .m = l->m, .w = l->conv, .tail = l->tail[i], .y = l->u, .channels = l->channels}};
        l->op[n++] = (ql_op){.kind = QL_OP_GDN,
                             .u.gdn = {.batch = &l->batch,
                                       .u = l->u,
                                       .a = l->aa,
                                       .b = l->bb,
                                       .a_log = l->a_log,
                                       .dt_bias = l->dt_bias,
                                       .state = l->state[i],
                                       .o = l->o,
                                       .n_key_head = l->keys,
                                       .n_value_head = l->values,
                                       .group = VALUES / KEYS}};
        l->op[n++] = (ql_op){
            .kind = QL_OP_GATED_NORM,
            .u.gated_norm = {
                .o = l->o, .z = l->zz, .w = l->norm_gdn, .y = l->o, .n_row = rows, .n_head = l->values, .eps = 1e-6f}};
        n = row_parallel(l, n, &l->out, l->o);
        if (half && i + 1 == LAYERS) {
            break;
        }
        l->op[n++] = norm(l, l->delta, l->norm_post);
        l->op[n++] = (ql_op){
            .kind = QL_OP_LINEAR,
            .u.linear = {.n = 2, .a = {product(l, &l->gate, l->xn, l->g, 1), product(l, &l->up, l->xn, l->uu, 1)}}};
        l->op[n++] =
            (ql_op){.kind = QL_OP_SWIGLU, .u.swiglu = {.g = l->g, .u = l->uu, .y = l->g, .n_row = rows, .n = l->mlp}};
        n = row_parallel(l, n, &l->down, l->g);
    }
    return n;
}

static void chained(struct lane *l, int n) { rig_chained(&l->dev, l->op, n); }

/* ---- what lanes share --------------------------------------------------------------------------------------------- */

struct words {
    uint32_t let_go, gave_up;
};
static struct words *words;

static void connect(struct lane *lane, int32_t n) {
    ql_cuda_exchange x = {.n_lane = n, .n_sm = rig_info().n_sm / n, .wait_ns = DEADLINE_MS * 1000000ull};
    for (int32_t i = 0; i < n; i++) {
        x.room[i] = rig_room(&lane[i].dev, QL_CUDA_EXCHANGE_BYTES);
        rig_must(lane[i].dev.ops->sync(&lane[i].dev));
    }
    for (int32_t i = 0; i < n; i++) {
        struct words *device_words;
        cuda_must(cudaHostGetDevicePointer((void **)&device_words, &words[i], 0));
        words[i] = (struct words){0, 0};
        x.lane = i;
        x.let_go = &device_words->let_go;
        x.gave_up = &device_words->gave_up;
        ql_cuda_connect_chains(&lane[i].dev, &x);
    }
}

static void sync_all(struct lane *lane, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        rig_must(lane[i].dev.ops->sync(&lane[i].dev));
    }
}

/* Everything that a step leaves behind, in the order of one lane. */
struct result {
    float x[ROWS * HIDDEN], delta[ROWS * HIDDEN], state[LAYERS][ROWS * VALUES * 128 * 128],
        tail[LAYERS][ROWS * 3 * CHANNELS];
};

static void fetch(struct lane *l, struct result *r) {
    const ql_ops *ops = l->dev.ops;
    size_t rows = (size_t)l->batch.n_row, n = (size_t)l->values * 128 * 128;
    rig_must(ops->d2h(&l->dev, r->x, l->x, rows * HIDDEN * sizeof(float)));
    rig_must(ops->d2h(&l->dev, r->delta, l->delta, rows * HIDDEN * sizeof(float)));
    float *own = malloc(ROWS * 3 * CHANNELS * sizeof(float));
    for (int i = 0; i < LAYERS; i++) {
        for (int s = 0; s < ROWS; s++) {
            rig_must(ops->d2h(&l->dev, r->state[i] + ((size_t)s * VALUES + (size_t)(l->index * l->values)) * 128 * 128,
                              l->state[i] + (size_t)s * n, n * sizeof(float)));
        }
        rig_must(ops->d2h(&l->dev, own, l->tail[i], (size_t)(ROWS * 3 * l->channels) * sizeof(float)));
        rig_must(ops->sync(&l->dev));
        lane_channels(l, r->tail[i], own, ROWS * 3, 1, true);
    }
    free(own);
}

static struct result want, got;

/* Lanes whose numbers are not those of one lane. Rows that the step has not got stay as they are in both. */
static int differing(struct lane *lane, int32_t n_lane, int round) {
    int bad = 0;
    for (int32_t i = 0; i < n_lane; i++) {
        got = want;
        fetch(&lane[i], &got);
        if (memcmp(&got, &want, sizeof got) != 0) {
            const float *a = (const float *)&got, *b = (const float *)&want;
            size_t at = 0, count = 0;
            for (size_t j = sizeof got / sizeof *a; j-- > 0;) {
                if (memcmp(&a[j], &b[j], sizeof *a) != 0) {
                    at = j;
                    count++;
                }
            }
            printf("FAIL round %d: lane %d of %d: %zu numbers differ, first number %zu: %g, one lane has %g\n", round,
                   i, n_lane, count, at, (double)a[at], (double)b[at]);
            bad++;
        }
    }
    return bad;
}

static int passed, failed;

static void verdict(bool ok, const char *name, int32_t n_lane, int32_t rows, const char *more) {
    printf("%s lanes%d.rows%d.%s%s\n", ok ? "ok  " : "FAIL", n_lane, rows, name, more);
    ok ? passed++ : failed++;
}

static void test_bits(struct lane *one, struct lane *lane, int32_t n_lane, int32_t rows, bool half, int rounds) {
    char more[64];
    restart(one);
    rig_one_by_one(&one->dev, one->op, fill(one, rows, half));
    rig_must(one->dev.ops->sync(&one->dev));
    memset(&want, 0, sizeof want);
    fetch(one, &want);
    int bad = 0, n = 0;
    for (int round = 0; round < rounds; round++) {
        for (int32_t i = 0; i < n_lane; i++) {
            restart(&lane[i]);
            n = fill(&lane[i], rows, half);
        }
        for (int32_t i = 0; i < n_lane; i++) {
            chained(&lane[i], n);
        }
        sync_all(lane, n_lane);
        bad += differing(lane, n_lane, round) > 0;
    }
    snprintf(more, sizeof more, ": %d of %d rounds differ, %zu numbers each", bad, rounds, sizeof want / sizeof(float));
    verdict(bad == 0, half ? "half" : "all", n_lane, rows, more);
    void *graph[MOST_LANES];
    bad = 0;
    for (int32_t i = 0; i < n_lane; i++) {
        rig_must(ql_cuda_capture_begin(&lane[i].dev));
        chained(&lane[i], n);
        rig_must(ql_cuda_capture_end(&lane[i].dev, &graph[i]));
    }
    for (int round = 0; round < rounds; round++) {
        for (int32_t i = 0; i < n_lane; i++) {
            restart(&lane[i]);
        }
        for (int32_t i = n_lane; i-- > 0;) { /* who comes last differs from who came last above */
            rig_must(ql_cuda_graph_launch(&lane[i].dev, graph[i]));
        }
        sync_all(lane, n_lane);
        bad += differing(lane, n_lane, round) > 0;
    }
    for (int32_t i = 0; i < n_lane; i++) {
        ql_cuda_graph_free(&lane[i].dev, graph[i]);
    }
    snprintf(more, sizeof more, ": %d of %d replays differ", bad, rounds);
    verdict(bad == 0, half ? "half.recorded" : "all.recorded", n_lane, rows, more);
}

/* The last lane stays away: the others give up at the deadline, or at once when told to let go; and they say why. */
static void test_absence(struct lane *lane, int32_t n_lane, bool told) {
    int n = 0;
    bool ok = true;
    for (int32_t i = 0; i + 1 < n_lane; i++) {
        n = fill(&lane[i], 1, false);
        words[i].let_go = told;
    }
    double t = rig_now();
    for (int32_t i = 0; i + 1 < n_lane; i++) {
        chained(&lane[i], n);
    }
    sync_all(lane, n_lane);
    t = rig_now() - t;
    for (int32_t i = 0; i + 1 < n_lane; i++) {
        ok = ok && (told ? words[i].gave_up == QL_CUDA_LET_GO
                         : words[i].gave_up >= 1 && words[i].gave_up <= (uint32_t)n_lane);
    }
    double least = told ? 0 : DEADLINE_MS * 1e-3;
    char more[96];
    snprintf(more, sizeof more, ": over after %.3f s, reason %x", t, words[0].gave_up);
    verdict(ok && t >= least && t < least + 0.3, told ? "told_to_let_go" : "absent", n_lane, 1, more);
}

static void close_lane(struct lane *l) { l->dev.ops->close(&l->dev); }

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 50;
    ql_cuda_device info = rig_info();
    if (info.major != 9) {
        printf("lanes: 0 passed, 0 failed, 1 skipped (compute capability %d.%d has no chains)\n", info.major,
               info.minor);
        return 0;
    }
    w_qkv = rig_codes_of(QL_FORMAT_FP8_CHANNEL, CHANNELS, HIDDEN);
    w_z = rig_codes_of(QL_FORMAT_FP8_CHANNEL, VALUES * 128, HIDDEN);
    w_b = rig_codes_of(QL_FORMAT_BF16, VALUES, HIDDEN);
    w_a = rig_codes_of(QL_FORMAT_BF16, VALUES, HIDDEN);
    w_out = rig_codes_of(QL_FORMAT_FP8_CHANNEL, HIDDEN, VALUES * 128);
    w_gate = rig_codes_of(QL_FORMAT_NVFP4, MLP, HIDDEN);
    w_up = rig_codes_of(QL_FORMAT_NVFP4, MLP, HIDDEN);
    w_down = rig_codes_of(QL_FORMAT_NVFP4, HIDDEN, MLP);
    norm_in = rig_numbers(HIDDEN, 0.1f, 0.0f);
    norm_post = rig_numbers(HIDDEN, 0.1f, 0.0f);
    norm_gdn = rig_numbers(128, 0.2f, 1.0f);
    conv = rig_numbers(4 * CHANNELS, 0.5f, 0.0f);
    a_log = rig_numbers(VALUES, 0.5f, 0.0f);
    dt_bias = rig_numbers(VALUES, 0.5f, 0.0f);
    x0 = rig_numbers(ROWS * HIDDEN, 1.0f, 0.0f);
    for (int i = 0; i < LAYERS; i++) {
        state0[i] = rig_numbers((size_t)ROWS * VALUES * 128 * 128, 0.1f, 0.0f);
        tail0[i] = rig_numbers(ROWS * 3 * CHANNELS, 1.0f, 0.0f);
    }
    static struct lane one, lane[MOST_LANES];
    open_lane(&one, 0, 1);
    cuda_must(cudaHostAlloc((void **)&words, MOST_LANES * sizeof *words, cudaHostAllocMapped));
    for (int32_t n_lane = 2; n_lane <= MOST_LANES; n_lane *= 2) {
        for (int i = 0; i < 2; i++) { /* a lane that has given up is of no use any more */
            for (int32_t j = 0; j < n_lane; j++) {
                open_lane(&lane[j], j, n_lane);
            }
            connect(lane, n_lane);
            for (int32_t rows = 1; i == 0 && rows <= ROWS; rows++) {
                test_bits(&one, lane, n_lane, rows, false, rounds);
                test_bits(&one, lane, n_lane, rows, true, rounds);
            }
            test_absence(lane, n_lane, i > 0);
            for (int32_t j = 0; j < n_lane; j++) {
                close_lane(&lane[j]);
            }
        }
    }
    close_lane(&one);
    printf("lanes: %d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
