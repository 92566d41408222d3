/* A chain of ops gives the bits of the same ops one by one, on three recurrent layers of the 27B's shape, over and over: up
 * to several ops, from several on, more than a launch takes, with NaN (which it gives where they do), and with a norm of what
 * the op before makes. And the time of both.
 *
 *     chain [ROUNDS]
 */
#include "tests/gpu/rig.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HIDDEN = 5120,
    MLP = 17408,
    KEYS = 16,
    VALUES = 48,
    CHANNELS = (2 * KEYS + VALUES) * 128,
    LAYERS = 3,
    MAX_ROW = 4,
    SLOTS = 4,
    WITHOUT_OUT = 5, /* ops that end with the recurrence, which then makes its whole result */
    WITHOUT_DOWN = 9 /* with gate and up, likewise */
};

static ql_dev dev;

/* A device array, what it holds at the start of a round, and after the ops one by one and as a chain. most_ops: longer chains need not
 * write it, as it is what an op hands to the next, and such of handed_in ops neither. */
struct array {
    const char *name;
    int most_ops, handed_in;
    float *dev, *start, *want, *got;
    size_t n;
};
static struct array arrays[32];
static int n_array;

static float *make(const char *name, size_t n, float scale, float mean) {
    struct array *a = &arrays[n_array++];
    *a = (struct array){.name = name,
                        .n = n,
                        .most_ops = INT_MAX,
                        .dev = rig_room(&dev, n * 4),
                        .start = rig_numbers(n, scale, mean),
                        .want = malloc(n * 4),
                        .got = malloc(n * 4)};
    return a->dev;
}

/* What is compared in chains of so many ops at most. */
static float *between(const char *name, size_t n, int most_ops) {
    float *p = make(name, n, 0.0f, 0.0f);
    arrays[n_array - 1].most_ops = most_ops;
    return p;
}

/* From now on p is compared in chains of so many ops at most. */
static void compare_up_to(int most_ops, const float *p) {
    for (int i = 0; i < n_array; i++) {
        arrays[i].most_ops = arrays[i].dev == p ? most_ops : arrays[i].most_ops;
    }
}

/* What chains of so many ops hand from an op to the next. */
static float *handed(const char *name, size_t n, int n_op) {
    float *p = make(name, n, 0.0f, 0.0f);
    arrays[n_array - 1].handed_in = n_op;
    return p;
}

static ql_op op[2 * LAYERS * 10];

static void restart(void) {
    for (int i = 0; i < n_array; i++) {
        rig_must(dev.ops->h2d(&dev, arrays[i].dev, arrays[i].start, arrays[i].n * 4));
    }
    rig_must(dev.ops->sync(&dev));
}

static void fetch(bool want) {
    for (int i = 0; i < n_array; i++) {
        rig_fetch(&dev, want ? arrays[i].want : arrays[i].got, arrays[i].dev, arrays[i].n * 4);
    }
}

/* Arrays that differ; says where. nan: one NaN is as good as another. */
static int compare(int round, int n_op, bool nan, size_t *compared) {
    int bad = 0;
    for (int i = 0; i < n_array; i++) {
        const struct array *a = &arrays[i];
        if (n_op > a->most_ops || n_op == a->handed_in) {
            continue;
        }
        *compared += a->n;
        for (size_t j = 0; j < a->n; j++) {
            if (memcmp(&a->want[j], &a->got[j], 4) != 0 && !(nan && isnan(a->want[j]) && isnan(a->got[j]))) {
                printf("FAIL round %d: %s[%zu] is %g, one by one %g\n", round, a->name, j, (double)a->got[j],
                       (double)a->want[j]);
                bad++;
                break;
            }
        }
    }
    return bad;
}

static int passed, failed;

/* Of n ops those from `from` on as chains, `rounds` times; x may begin with NaN. */
static void check(const char *rows, const char *what, const ql_op *list, int from, int n, int rounds) {
    size_t compared = 0;
    int wrong = 0;
    bool nan = isnan(arrays[0].start[3]);
    restart();
    rig_one_by_one(&dev, list, n);
    rig_must(dev.ops->sync(&dev));
    fetch(true);
    for (int i = 0; i < rounds; i++) {
        restart();
        rig_one_by_one(&dev, list, from);
        rig_chained(&dev, list + from, n - from);
        rig_must(dev.ops->sync(&dev));
        fetch(false);
        wrong += compare(i, n, nan, &compared) > 0;
    }
    printf("%s chain.%s.%s%d: %d of %d rounds differ, %zu numbers compared\n", wrong ? "FAIL" : "ok  ", rows, what,
           from > 0 ? from : n, wrong, rounds, compared);
    wrong ? failed++ : passed++;
}

static int n_op;

static void all_apart(int i) {
    (void)i;
    rig_one_by_one(&dev, op, n_op);
}

static void all_chained(int i) {
    (void)i;
    rig_chained(&dev, op, n_op);
}

/* Microseconds of a layer, at best. */
static double time_of(void (*call)(int i)) {
    restart();
    return rig_time(&dev, call, 10).best / LAYERS * 1e6;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 20;
    ql_cuda_device info = rig_info();
    if (info.major != 9) {
        printf("chain: 0 passed, 0 failed, 1 skipped (compute capability %d.%d has no chains)\n", info.major,
               info.minor);
        return 0;
    }
    ql_shape shape = {.hidden = HIDDEN,
                      .vocab = 1024,
                      .vocab_local = 1024,
                      .n_head = 24,
                      .n_kv_head = 4,
                      .n_key_head = KEYS,
                      .n_value_head = VALUES,
                      .mlp = MLP,
                      .max_row = 64,
                      .max_seg = MAX_ROW,
                      .max_out = MAX_ROW,
                      .max_ctx = 4096};
    rig_open(&dev, NULL, &shape);
    ql_weight qkv = rig_weight(&dev, QL_FORMAT_FP8_CHANNEL, CHANNELS, HIDDEN),
              z = rig_weight(&dev, QL_FORMAT_FP8_CHANNEL, VALUES * 128, HIDDEN),
              b = rig_weight(&dev, QL_FORMAT_BF16, VALUES, HIDDEN),
              a = rig_weight(&dev, QL_FORMAT_BF16, VALUES, HIDDEN),
              out = rig_weight(&dev, QL_FORMAT_FP8_CHANNEL, HIDDEN, VALUES * 128),
              gate = rig_weight(&dev, QL_FORMAT_NVFP4, MLP, HIDDEN),
              up = rig_weight(&dev, QL_FORMAT_NVFP4, MLP, HIDDEN),
              down = rig_weight(&dev, QL_FORMAT_NVFP4, HIDDEN, MLP);
    float *x = make("x", MAX_ROW * HIDDEN, 1.0f, 0.0f), *xn = between("normed", MAX_ROW * HIDDEN, 0),
          *delta = handed("delta", MAX_ROW * HIDDEN, WITHOUT_DOWN), *m = between("m", MAX_ROW * CHANNELS, 0),
          *u = make("u", MAX_ROW * CHANNELS, 0.0f, 0.0f), *zz = between("z", MAX_ROW * VALUES * 128, WITHOUT_OUT),
          *bb = make("b", MAX_ROW * VALUES, 0.0f, 0.0f), *aa = make("a", MAX_ROW * VALUES, 0.0f, 0.0f),
          *o = between("o", MAX_ROW * VALUES * 128, WITHOUT_OUT), *g = between("gated", MAX_ROW * MLP, WITHOUT_DOWN),
          *uu = between("up", MAX_ROW * MLP, 0), *w_in = make("w", HIDDEN, 0.1f, 0.0f),
          *w_post = make("w", HIDDEN, 0.1f, 0.0f), *w_conv = make("w", 4 * CHANNELS, 0.5f, 0.0f),
          *a_log = make("w", VALUES, 0.5f, 0.0f), *dt = make("w", VALUES, 0.5f, 0.0f),
          *w_norm = make("w", 128, 0.2f, 1.0f), *mixed = make("mixed", MAX_ROW * VALUES * 128, 1.0f, 0.0f),
          *conv_in = make("conv_in", MAX_ROW * CHANNELS, 0.0f, 0.0f);
    float *state[LAYERS], *tail[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        state[i] = make("state", (size_t)SLOTS * VALUES * 128 * 128, 0.1f, 0.0f);
        tail[i] = make("tail", (size_t)SLOTS * 3 * CHANNELS, 1.0f, 0.0f);
    }
    /* Rows of as many sequences, the last of more than one at its start; and rows of one sequence, as a check of a draft has. */
    static const struct shape_of_batch {
        const char *name;
        int32_t rows, segs, row_seg[MAX_ROW], row_pos[MAX_ROW], seg_row[MAX_ROW + 1], seg_pos[MAX_ROW], slot[MAX_ROW];
    } shapes[] = {{"rows1", 1, 1, {0}, {7}, {0, 1}, {7}, {1}},
                  {"rows2", 2, 2, {0, 1}, {7, 0}, {0, 1, 2}, {7, 0}, {1, 0}},
                  {"rows3", 3, 3, {0, 1, 2}, {7, 9, 0}, {0, 1, 2, 3}, {7, 9, 0}, {1, 3, 0}},
                  {"rows4", 4, 4, {0, 1, 2, 3}, {7, 9, 70, 0}, {0, 1, 2, 3, 4}, {7, 9, 70, 0}, {1, 3, 0, 2}},
                  {"rows2of1", 2, 1, {0, 0}, {7, 8}, {0, 2}, {7}, {1}},
                  {"rows4of1", 4, 1, {0, 0, 0, 0}, {0, 1, 2, 3}, {0, 4}, {0}, {2}},
                  {"rows4of2", 4, 2, {0, 0, 0, 1}, {5, 6, 7, 9}, {0, 3, 4}, {5, 9}, {3, 1}}};
    int32_t *seg = rig_room(&dev, sizeof shapes[0]);
    double one_row = 0.0;
    for (size_t shape_i = 0; shape_i < sizeof shapes / sizeof *shapes; shape_i++) {
        const int32_t rows = shapes[shape_i].rows;
        rig_put(&dev, seg, shapes[shape_i].row_seg, sizeof shapes[0] - offsetof(struct shape_of_batch, row_seg));
        ql_batch batch = {.phase = QL_PHASE_GEN,
                          .n_row = rows,
                          .n_seg = shapes[shape_i].segs,
                          .row_seg = seg,
                          .row_pos = seg + MAX_ROW,
                          .seg_row = seg + 2 * MAX_ROW,
                          .seg_pos = seg + 3 * MAX_ROW + 1,
                          .seg_slot = seg + 4 * MAX_ROW + 1};
        compare_up_to(rows > 2 ? 0 : INT_MAX, aa); /* of more rows than two in parts, which the recurrence adds */
        compare_up_to(rows > 2 ? 0 : INT_MAX, bb);
        int n = 0;
#define PRODUCT(weight, from, to, slices)                                                                              \
    {                                                                                                                  \
        .w = &(weight), .x = (from), .y = (to), .ldx = (weight).k, .ldy = (weight).n, .n_row = rows,                   \
        .n_slice = (slices), .phase = QL_PHASE_GEN, .precision = QL_PREC_EXACT                                         \
    }
#define NORM(add, weight)                                                                                              \
    (ql_op) {                                                                                                          \
        .kind = QL_OP_RMSNORM, .u.rmsnorm = {                                                                          \
            .x = x,                                                                                                    \
            .delta = (add),                                                                                            \
            .w = (weight),                                                                                             \
            .y = xn,                                                                                                   \
            .ldy = HIDDEN,                                                                                             \
            .n_row = rows,                                                                                             \
            .n = HIDDEN,                                                                                               \
            .eps = 1e-6f                                                                                               \
        }                                                                                                              \
    }
        for (int i = 0; i < LAYERS; i++) {
            op[n++] = NORM(i > 0 ? delta : NULL, w_in);
            op[n++] = (ql_op){.kind = QL_OP_LINEAR,
                              .u.linear = {.n = 4,
                                           .a = {PRODUCT(qkv, xn, m, 1), PRODUCT(z, xn, zz, 1), PRODUCT(b, xn, bb, 1),
                                                 PRODUCT(a, xn, aa, 1)}}};
            op[n++] = (ql_op){
                .kind = QL_OP_CONV,
                .u.conv = {.batch = &batch, .m = m, .w = w_conv, .tail = tail[i], .y = u, .channels = CHANNELS}};
            op[n++] = (ql_op){.kind = QL_OP_GDN,
                              .u.gdn = {.batch = &batch,
                                        .u = u,
                                        .a = aa,
                                        .b = bb,
                                        .a_log = a_log,
                                        .dt_bias = dt,
                                        .state = state[i],
                                        .o = o,
                                        .n_key_head = KEYS,
                                        .n_value_head = VALUES,
                                        .group = VALUES / KEYS}};
            op[n++] = (ql_op){
                .kind = QL_OP_GATED_NORM,
                .u.gated_norm = {.o = o, .z = zz, .w = w_norm, .y = o, .n_row = rows, .n_head = VALUES, .eps = 1e-6f}};
            op[n++] = (ql_op){.kind = QL_OP_LINEAR, .u.linear = {.n = 1, .a = {PRODUCT(out, o, delta, 8)}}};
            op[n++] = NORM(delta, w_post);
            op[n++] = (ql_op){.kind = QL_OP_LINEAR,
                              .u.linear = {.n = 2, .a = {PRODUCT(gate, xn, g, 1), PRODUCT(up, xn, uu, 1)}}};
            op[n++] = (ql_op){.kind = QL_OP_SWIGLU, .u.swiglu = {.g = g, .u = uu, .y = g, .n_row = rows, .n = MLP}};
            op[n++] = (ql_op){.kind = QL_OP_LINEAR, .u.linear = {.n = 1, .a = {PRODUCT(down, g, delta, 8)}}};
        }
        const int lengths[] = {WITHOUT_OUT, 6, WITHOUT_DOWN, 10, n};
        const int starts[] = {5, 6, 9}; /* at out, at a norm that adds, at down */
        const char *name = shapes[shape_i].name;
        for (int l = 0; l < 5; l++) {
            check(name, "ops", op, 0, lengths[l], lengths[l] == n ? rounds : rounds / 4 + 1);
        }
        for (int l = 0; l < 3; l++) {
            check(name, "from", op, starts[l], n, rounds / 8 + 1);
        }
        for (int i = 0; i < n; i++) { /* the layers once more, which add to what the first time left */
            op[n + i] = op[i];
        }
        op[n].u.rmsnorm.delta = delta;
        check(name, "ops", op, 0, 2 * n, rounds / 8 + 1);
        const float was = arrays[0].start[3];
        arrays[0].start[3] = NAN; /* of x: nothing may wait for a number for good */
        check(name, "nan", op, 0, n, 2);
        arrays[0].start[3] = was;
        const ql_op made[] = {{.kind = QL_OP_LINEAR, .u.linear = {.n = 1, .a = {PRODUCT(out, mixed, x, 1)}}},
                              NORM(NULL, w_in),
                              {.kind = QL_OP_LINEAR, .u.linear = {.n = 1, .a = {PRODUCT(qkv, xn, conv_in, 1)}}}};
        if (rows <= 2) { /* of more the first is run by itself */
            check(name, "made", made, 0, 3, rounds / 8 + 1);
        }
        n_op = n;
        double apart = time_of(all_apart), as_chain = time_of(all_chained);
        one_row = rows == 1 ? as_chain : one_row;
        printf("# %s: a layer takes %.1f us one by one, %.1f us as a chain, %.2f of one row\n", shapes[shape_i].name,
               apart, as_chain, as_chain / one_row);
    }
    printf("chain: %d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
