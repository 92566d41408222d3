/* Prompt ops in a list give the bits of the same ops one by one: what a norm, an activation or a gated norm hands to a product is
 * prepared in passing. Shapes of the 27B and small ones, every precision, rows that fill tiles and rows that do not.
 *
 *     fused [REPEATS]
 */
#include "tests/gpu/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROW = 300, MAX_K = 17408, MAX_N = 12288, HEADS = 48 };

static ql_dev dev;
/* Code for 7.5: lists with products of BF16 weights, and some in fp8, are left to the ops one by one. */
static bool old_code;
static int passed, failed, skipped;

/* What an op list writes: results of its products, and the residual stream of a norm. */
struct result {
    float *dev;
    size_t n;
};

/* Runs the list both ways from the same inputs and compares. `x`: the stream that a norm changes, or NULL; x0, on the host: what it is
 * before. A list that the device does not take whole is skipped where old code may leave it, and fails elsewhere. */
static void check(const char *name, const ql_op *op, int32_t n, float *x, const float *x0, size_t x_n,
                  const struct result *result, int n_result, int repeats) {
    bool ok = true, left = false;
    size_t compared = 0;
    for (int r = 0; r < repeats && ok && !left; r++) {
        float *got[2][8] = {{0}};
        for (int way = 0; way < 2; way++) {
            int32_t taken = n;
            if (x) {
                rig_put(&dev, x, x0, x_n * 4);
            }
            for (int i = 0; i < n_result; i++) {
                if (result[i].dev != x) {
                    rig_must(dev.ops->zero(&dev, result[i].dev, result[i].n * 4));
                }
            }
            if (way == 0) {
                rig_one_by_one(&dev, op, n);
            } else {
                rig_must(dev.ops->chain(&dev, op, n, &taken));
            }
            rig_must(dev.ops->sync(&dev));
            left = taken != n && old_code;
            if (taken != n && !left) {
                printf("FAIL %s: %d of %d ops were taken\n", name, taken, n);
                ok = false;
            }
            for (int i = 0; i < n_result; i++) {
                got[way][i] = malloc(result[i].n * 4);
                rig_fetch(&dev, got[way][i], result[i].dev, result[i].n * 4);
            }
        }
        for (int i = 0; i < n_result; i++) {
            double size = 0;
            for (size_t j = 0; j < result[i].n && ok && !left; j++) {
                size += got[0][i][j] * got[0][i][j];
                if (memcmp(&got[0][i][j], &got[1][i][j], 4) != 0) {
                    printf("FAIL %s: result %d [%zu] is %g, one by one %g\n", name, i, j, (double)got[1][i][j],
                           (double)got[0][i][j]);
                    ok = false;
                }
            }
            if (ok && !left && !(size > 0)) {
                printf("FAIL %s: result %d is nothing\n", name, i);
                ok = false;
            }
            compared += result[i].n;
            free(got[0][i]);
            free(got[1][i]);
        }
    }
    if (ok && left) {
        printf("skip %s: not taken whole\n", name);
        skipped++;
    } else if (ok) {
        printf("ok   %s: %zu numbers compared\n", name, compared);
        passed++;
    } else {
        failed++;
    }
}

int main(int argc, char **argv) {
    int repeats = argc > 1 ? atoi(argv[1]) : 2;
    ql_shape shape = {.hidden = 5120,
                      .vocab = 1024,
                      .vocab_local = 1024,
                      .n_head = 24,
                      .n_kv_head = 4,
                      .n_key_head = 16,
                      .n_value_head = HEADS,
                      .mlp = MAX_K,
                      .max_row = MAX_ROW,
                      .max_seg = 1,
                      .max_out = 1,
                      .max_ctx = 512};
    old_code = rig_info().code < 80;
    rig_open(&dev, NULL, &shape);
    const struct {
        const char *name;
        int32_t hidden, in, mlp, heads, slices;
        ql_qformat mixer, wide;
    } models[] = {{"27b", 5120, 10240, 17408, 48, 8, QL_FORMAT_FP8_CHANNEL, QL_FORMAT_NVFP4},
                  {"small", 256, 384, 768, 4, 4, QL_FORMAT_FP8_CHANNEL, QL_FORMAT_NVFP4},
                  {"bf16", 512, 1024, 1024, 8, 2, QL_FORMAT_BF16, QL_FORMAT_BF16}};
    const int32_t all_rows[] = {1, 65, 300};
    const ql_precision all[] = {QL_PREC_BF16, QL_PREC_FP8, QL_PREC_EXACT};
    static const char *const precision_names[] = {"bf16", "fp8", "exact"};
    const size_t stream = (size_t)MAX_ROW * 5120, wide = (size_t)MAX_ROW * MAX_K, most = (size_t)MAX_ROW * MAX_N;
    float *x0 = rig_numbers(stream, 1.0f, 0.0f), *x = rig_room(&dev, stream * 4),
          *delta = rig_floats(&dev, stream, 0.5f, 0.0f), *xn = rig_room(&dev, stream * 4),
          *g = rig_floats(&dev, wide, 3.0f, 0.0f), *u = rig_floats(&dev, wide, 1.0f, 0.0f),
          *made = rig_room(&dev, wide * 4), *w_norm = rig_floats(&dev, 5120, 0.2f, 0.0f),
          *w_head = rig_floats(&dev, 128, 1.0f, 0.0f), *y0 = rig_room(&dev, most * 4), *y1 = rig_room(&dev, most * 4),
          *y2 = rig_room(&dev, most * 4);
    for (int m = 0; m < 3; m++) {
        int32_t hidden = models[m].hidden, in = models[m].in, values = models[m].heads * 128, mlp = models[m].mlp;
        ql_weight w_in = rig_weight(&dev, models[m].mixer, in, hidden),
                  w_z = rig_weight(&dev, models[m].mixer, values, hidden),
                  w_a = rig_weight(&dev, QL_FORMAT_BF16, models[m].heads, hidden),
                  out = rig_weight(&dev, models[m].mixer, hidden, values),
                  down = rig_weight(&dev, models[m].wide, hidden, mlp);
        for (int r = 0; r < 3; r++) {
            for (int p = 0; p < 3; p++) {
                int32_t rows = all_rows[r];
                char name[96];
                if (all[p] == QL_PREC_EXACT && models[m].mixer == QL_FORMAT_BF16) {
                    continue; /* exact products of plain weights read x as it is */
                }
#define PRODUCT(weight, from, to, slices)                                                                              \
    {.w = &(weight),                                                                                                   \
     .x = (from),                                                                                                      \
     .y = (to),                                                                                                        \
     .ldx = (weight).k,                                                                                                \
     .ldy = (weight).n,                                                                                                \
     .n_row = rows,                                                                                                    \
     .n_slice = (slices),                                                                                              \
     .phase = QL_PHASE_PROMPT,                                                                                         \
     .precision = all[p]}
#define CASE(what, list, stream, ...)                                                                                  \
    do {                                                                                                               \
        const struct result result[] = {__VA_ARGS__};                                                                  \
        snprintf(name, sizeof name, "fused.%s.%s.%s.t%d", what, models[m].name, precision_names[p], rows);             \
        check(name, list, (int32_t)(sizeof(list) / sizeof *(list)), stream, x0, (size_t)rows *(size_t)hidden, result,  \
              (int)(sizeof result / sizeof *result), repeats);                                                         \
    } while (0)
                ql_op norm = {.kind = QL_OP_RMSNORM,
                              .u.rmsnorm = {.x = x,
                                            .delta = delta,
                                            .w = w_norm,
                                            .y = xn,
                                            .ldy = hidden,
                                            .n_row = rows,
                                            .n = hidden,
                                            .eps = 1e-6f}};
                const ql_op inputs[] = {
                    norm,
                    {.kind = QL_OP_LINEAR,
                     .u.linear = {.n = 3,
                                  .a = {PRODUCT(w_in, xn, y0, 1), PRODUCT(w_z, xn, y1, 1), PRODUCT(w_a, xn, y2, 1)}}}};
                CASE("norm", inputs, x, {x, (size_t)rows * (size_t)hidden}, {y0, (size_t)rows * (size_t)in},
                     {y1, (size_t)rows * (size_t)values}, {y2, (size_t)rows * (size_t)models[m].heads});
                const ql_op output[] = {
                    {.kind = QL_OP_GATED_NORM,
                     .u.gated_norm = {.o = g,
                                      .z = u,
                                      .w = w_head,
                                      .y = made,
                                      .n_row = rows,
                                      .n_head = models[m].heads,
                                      .eps = 1e-6f}},
                    {.kind = QL_OP_LINEAR, .u.linear = {.n = 1, .a = {PRODUCT(out, made, y0, models[m].slices)}}}};
                CASE("gated", output, NULL, {y0, (size_t)rows * (size_t)hidden});
                const ql_op after[] = {
                    {.kind = QL_OP_SWIGLU, .u.swiglu = {.g = g, .u = u, .y = made, .n_row = rows, .n = mlp}},
                    {.kind = QL_OP_LINEAR, .u.linear = {.n = 1, .a = {PRODUCT(down, made, y0, models[m].slices)}}}};
                CASE("swiglu", after, NULL, {y0, (size_t)rows * (size_t)hidden});
            }
        }
    }
    rig_must(dev.ops->sync(&dev));
    printf("fused: %d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}
