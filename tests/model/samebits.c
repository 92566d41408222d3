/* Promise: the same bits at any lane count, chunking and company. logits_crc32 and ids of eight requests, greedy and
 * sampled, are compared with one reference: one lane, the whole prompt as one chunk, each request alone.
 *
 * The last tests change the order in which lanes are added and demand that the CRC notices.
 */
#include "runtime/engine/test_hooks.h"
#include "tests/model/bits.h"

enum { FIRST = 130 }; /* ids of the request that also runs alone */

static void lanes_and_chunks(void **state) {
    const ql_test_model *model = *state;
    static const int32_t chunks[] = {64, 128, 256};
    ql_test_eight eight;
    ql_test_answer want[QL_TEST_EIGHT];
    ql_test_eight_init(&eight, model, FIRST);
    ql_options o = ql_test_options(model, 1);
    o.kv = QL_KV_F16;
    ql_test_eight_alone(&o, &eight, want);
    for (int32_t i = 0; i < model->n_lanes; i++) {
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            o.lanes = model->lanes[i];
            o.chunk = chunks[c];
            ql_test_eight_together(&o, &eight, want);
        }
    }
}

/* Each KV type with each precision: fewest lanes and whole prompts against most lanes and smallest chunks. */
static void types(void **state) {
    const ql_test_model *model = *state;
    static const ql_kv_type kvs[] = {QL_KV_F32, QL_KV_F16, QL_KV_BF16, QL_KV_FP8};
    static const ql_precision precisions[] = {QL_PREC_EXACT, QL_PREC_BF16, QL_PREC_FP8, QL_PREC_Q8};
    ql_test_eight eight;
    ql_test_eight_init(&eight, model, FIRST);
    uint32_t crc[16];
    for (int32_t i = 0; i < 16; i++) {
        ql_test_answer want[QL_TEST_EIGHT];
        ql_options o = ql_test_options(model, model->lanes[model->n_lanes - 1]);
        o.kv = kvs[i % 4];
        o.prompt_precision = o.gen_precision = precisions[i / 4];
        o.chunk = 64;
        ql_test_eight_alone(&o, &eight, want);
        ql_test_eight_together(&o, &eight, want);
        crc[i] = want[0].crc;
    }
    for (int32_t i = 0; i < 16; i++) { /* an option that changes nothing would pass everything above */
        for (int32_t j = 0; j < i; j++) {
            bool has_fp8 = strcmp(model->name, "micro-bf16") != 0 && strcmp(model->name, "micro-nvfp4-modelopt") != 0;
            bool plain = strcmp(model->name, "micro-bf16") == 0; /* Q8 is EXACT there */
            if ((has_fp8 || i / 4 != 2 || j / 4 != 1) && !(plain && i / 4 == 3 && j / 4 == 0)) {
                if (crc[i] == crc[j]) {
                    fail_msg("%s: combinations %d and %d of kv and precision give the same logits", model->name, i, j);
                }
            }
        }
    }
}

/* One phase's precision leaves the other phase alone: the first logits come from the prompt, the rest from both. */
static void phases_apart(void **state) {
    const ql_test_model *model = *state;
    ql_test_eight eight;
    ql_test_answer exact, mixed;
    uint32_t crc1[2];
    ql_test_eight_init(&eight, model, FIRST);
    for (int32_t i = 0; i < 2; i++) {
        ql_options o = ql_test_options(model, 2);
        o.gen_precision = i ? QL_PREC_BF16 : QL_PREC_EXACT;
        ql_engine *engine = ql_test_open(&o);
        ql_test_answer *a = i ? &mixed : &exact;
        *a = ql_test_take(ql_test_generate(engine, &eight.r[0]));
        ql_request one = eight.r[0];
        one.max_new = 1;
        ql_result *res = ql_test_generate(engine, &one);
        crc1[i] = res->logits_crc32;
        ql_result_free(res);
        ql_engine_close(&engine);
    }
    assert_int_equal(crc1[0], crc1[1]);
    assert_true(exact.crc != mixed.crc);
}

/* QL_ORDER_FAST depends on the lane count alone. Where every lane has one slice anyway it is the tree. */
static void fast_order(void **state) {
    const ql_test_model *model = *state;
    ql_test_eight eight;
    ql_test_answer tree[QL_TEST_EIGHT], want[QL_TEST_EIGHT];
    ql_test_eight_init(&eight, model, FIRST);
    ql_options o = ql_test_options(model, 1);
    ql_test_eight_alone(&o, &eight, tree);
    o.order = QL_ORDER_FAST;
    for (int32_t i = 0; i < model->n_lanes; i++) {
        o.lanes = model->lanes[i];
        o.chunk = 512;
        ql_engine *engine = ql_test_open(&o);
        for (int32_t r = 0; r < QL_TEST_EIGHT; r++) {
            want[r] = ql_test_take(ql_test_generate(engine, &eight.r[r]));
        }
        ql_engine_close(&engine);
        o.chunk = 64;
        ql_test_eight_together(&o, &eight, want);
        if ((want[0].crc == tree[0].crc) != (o.lanes == model->slices)) {
            fail_msg("%s: %d lanes, %d slices, CRC %08x in fast order, %08x as a tree", model->name, o.lanes,
                     model->slices, want[0].crc, tree[0].crc);
        }
    }
}

/* ---- the order of addition matters ------------------------------------------------------------------------------- */

typedef enum order { TREE, LINEAR } order;

static struct {
    order order;
    float *all[8]; /* of each lane: [n_lane][n] gathered */
    int64_t calls;
} swapped;

static ql_status swapped_reduce(ql_comm *comm, const float *src, float *dst, int64_t n) {
    int32_t n_lane = comm->n_lane;
    float *all = realloc(swapped.all[comm->lane], (size_t)n * (size_t)n_lane * sizeof *all);
    if (!all) {
        return ql_fail(comm->dev->err, QL_ERR_MEMORY, "test");
    }
    swapped.all[comm->lane] = all;
    QL_TRY(comm->gather(comm, src, all, (size_t)n * sizeof *all));
    for (int64_t i = 0; i < n; i++) {
        float v[8] = {0};
        for (int32_t l = 0; l < n_lane; l++) {
            v[l] = all[l * n + i];
        }
        if (swapped.order == LINEAR) {
            for (int32_t l = 1; l < n_lane; l++) {
                v[0] += v[l];
            }
        } else {
            for (int32_t step = 1; step < n_lane; step *= 2) {
                for (int32_t l = 0; l < n_lane; l += 2 * step) {
                    v[l] += v[l + step];
                }
            }
        }
        dst[i] = v[0];
    }
    __atomic_fetch_add(&swapped.calls, 1, __ATOMIC_RELAXED);
    return QL_OK;
}

static void swap_reduce(void *user, int32_t lane, ql_comm *comm) {
    (void)user;
    (void)lane;
    comm->reduce = swapped_reduce;
}

static ql_test_answer run_swapped(const ql_test_model *model, int32_t lanes, order how, const ql_request *r) {
    const ql_test_hooks hooks = {.comm_opened = swap_reduce};
    ql_options o = ql_test_options(model, lanes);
    swapped.order = how;
    swapped.calls = 0;
    ql_engine *engine = ql_test_open_hooked(&o, &hooks);
    ql_test_answer a = ql_test_take(ql_test_generate(engine, r));
    ql_engine_close(&engine);
    assert_true(swapped.calls > 0);
    for (int32_t i = 0; i < 8; i++) {
        free(swapped.all[i]);
        swapped.all[i] = NULL;
    }
    return a;
}

static void another_order_is_noticed(void **state) {
    const ql_test_model *model = *state;
    ql_test_eight eight;
    ql_test_eight_init(&eight, model, FIRST);
    ql_options o = ql_test_options(model, 1);
    ql_engine *engine = ql_test_open(&o);
    ql_test_answer want = ql_test_take(ql_test_generate(engine, &eight.r[0]));
    ql_engine_close(&engine);
    for (int32_t i = 1; i < model->n_lanes; i++) {
        int32_t lanes = model->lanes[i];
        assert_int_equal(run_swapped(model, lanes, TREE, &eight.r[0]).crc, want.crc);
        uint32_t linear = run_swapped(model, lanes, LINEAR, &eight.r[0]).crc;
        if (lanes == 2) { /* the tree of two is the line */
            assert_int_equal(linear, want.crc);
        } else if (linear == want.crc) {
            fail_msg("%s: %d lanes added in a line give the CRC of the tree", model->name, lanes);
        }
    }
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        QL_TEST_ON(lanes_and_chunks, "tiny"),
        QL_TEST_ON(lanes_and_chunks, "micro-bf16"),
        QL_TEST_ON(lanes_and_chunks, "micro-mixed"),
        QL_TEST_ON(lanes_and_chunks, "micro-fp8-block"),
        QL_TEST_ON(lanes_and_chunks, "micro-nvfp4-modelopt"),
        QL_TEST_ON(lanes_and_chunks, "micro-lanes8"),
        QL_TEST_ON(types, "micro-bf16"),
        QL_TEST_ON(types, "micro-mixed"),
        QL_TEST_ON(types, "micro-fp8-block"),
        QL_TEST_ON(types, "micro-lanes8"),
        QL_TEST_ON(phases_apart, "micro-mixed"),
        QL_TEST_ON(fast_order, "tiny"),
        QL_TEST_ON(fast_order, "micro-mixed"),
        QL_TEST_ON(fast_order, "micro-fp8-block"),
        QL_TEST_ON(fast_order, "micro-lanes8"),
        QL_TEST_ON(another_order_is_noticed, "tiny"),
        QL_TEST_ON(another_order_is_noticed, "micro-lanes8"),
    };
    return cmocka_run_group_tests_name("samebits", tests, NULL, NULL);
}
