/* Promise: the same bits at any lane count, chunking and company. logits_crc32 and ids of eight requests, greedy and
 * sampled, are compared with one reference: one lane, the whole prompt as one chunk, each request alone.
 *
 * The last tests change the order in which lanes are added and demand that the CRC notices.
 */
#include "runtime/engine/test_hooks.h"
#include "tests/model/common.h"

enum { N_REQUEST = 8, MAX_PROMPT = 200, N_NEW = 12, WHOLE = 256 };

/* The first is the subject that also runs alone; lengths sit around the 64-token block. */
static const int32_t lengths[N_REQUEST] = {130, 1, 63, 64, 65, 200, 20, 7};

typedef struct answer {
    uint32_t crc;
    int32_t n, ids[N_NEW];
    float logprobs[N_NEW];
} answer;

static void make_requests(const ql_test_model *model, int32_t ids[N_REQUEST][MAX_PROMPT], ql_request r[N_REQUEST]) {
    for (int32_t i = 0; i < N_REQUEST; i++) {
        /* ids past 1300 are control tokens in tiny; they are as good as any, but keep clear of untrained ones */
        ql_test_ids((uint64_t)i + 1, model->vocab < 1300 ? model->vocab : 1300, ids[i], lengths[i]);
        r[i] = ql_test_request(ids[i], lengths[i], N_NEW);
        r[i].ignore_eos = 1;
    }
    r[6].sampling.temperature = 0.8f; /* the whole vocabulary */
    r[6].sampling.seed = 5;
    r[7].sampling = (ql_sampling){.temperature = 0.8f,
                                  .top_k = 40,
                                  .top_p = 0.9f,
                                  .min_p = 0.02f,
                                  .repetition_penalty = 1.2f,
                                  .presence_penalty = 0.5f,
                                  .frequency_penalty = 0.25f,
                                  .seed = 6};
}

static answer take(ql_result *res) {
    answer a = {.crc = res->logits_crc32, .n = res->n_ids};
    assert_int_equal(res->has_crc, 1);
    assert_int_equal(res->n_ids, N_NEW);
    memcpy(a.ids, res->ids, sizeof a.ids);
    memcpy(a.logprobs, res->logprobs, sizeof a.logprobs);
    ql_result_free(res);
    return a;
}

static void same(const answer *got, const answer *want, int32_t request, const ql_options *o, const char *company) {
    for (int32_t i = 0; i < N_NEW; i++) {
        if (got->ids[i] != want->ids[i] || memcmp(&got->logprobs[i], &want->logprobs[i], sizeof(float)) != 0) {
            fail_msg("%s lanes %d chunk %d kv %d precision %d %s: request %d (%d ids): id %d is %d at %.9g, one lane "
                     "gave %d at %.9g",
                     o->model, o->lanes, o->chunk, (int)o->kv, (int)o->gen_precision, company, request,
                     lengths[request], i, got->ids[i], (double)got->logprobs[i], want->ids[i],
                     (double)want->logprobs[i]);
        }
    }
    if (got->crc != want->crc) {
        fail_msg("%s lanes %d chunk %d kv %d precision %d %s: request %d (%d ids): crc %08x, one lane alone gave %08x",
                 o->model, o->lanes, o->chunk, (int)o->kv, (int)o->gen_precision, company, request, lengths[request],
                 got->crc, want->crc);
    }
}

static void reference(const ql_options *o, ql_request *r, answer *want) {
    ql_options one = *o;
    one.lanes = 1;
    one.chunk = WHOLE;
    ql_engine *engine = ql_test_open(&one);
    for (int32_t i = 0; i < N_REQUEST; i++) {
        want[i] = take(ql_test_generate(engine, &r[i]));
    }
    ql_engine_close(&engine);
}

static void alone_and_together(const ql_options *o, ql_request *r, const answer *want) {
    ql_engine *engine = ql_test_open(o);
    answer got = take(ql_test_generate(engine, &r[0]));
    same(&got, &want[0], 0, o, "alone");
    ql_request_id id[N_REQUEST];
    for (int32_t i = N_REQUEST; i-- > 0;) {
        id[i] = ql_test_submit(engine, &r[i]);
    }
    for (int32_t i = 0; i < N_REQUEST; i++) {
        got = take(ql_test_wait(engine, id[i]));
        same(&got, &want[i], i, o, "in a batch of 8");
    }
    ql_engine_close(&engine);
}

static void lanes_and_chunks(void **state) {
    const ql_test_model *model = *state;
    static const int32_t chunks[] = {64, 128, WHOLE};
    int32_t ids[N_REQUEST][MAX_PROMPT];
    ql_request r[N_REQUEST];
    answer want[N_REQUEST];
    make_requests(model, ids, r);
    ql_options o = ql_test_options(model, 1);
    o.kv = QL_KV_F16;
    reference(&o, r, want);
    for (int32_t i = 0; i < model->n_lanes; i++) {
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            o.lanes = model->lanes[i];
            o.chunk = chunks[c];
            alone_and_together(&o, r, want);
        }
    }
}

/* Each KV type with each precision: fewest lanes and whole prompts against most lanes and smallest chunks. */
static void types(void **state) {
    const ql_test_model *model = *state;
    static const ql_kv_type kvs[] = {QL_KV_F32, QL_KV_F16, QL_KV_BF16, QL_KV_FP8};
    static const ql_precision precisions[] = {QL_PREC_EXACT, QL_PREC_BF16, QL_PREC_FP8};
    int32_t ids[N_REQUEST][MAX_PROMPT];
    ql_request r[N_REQUEST];
    make_requests(model, ids, r);
    uint32_t crc[12];
    for (int32_t i = 0; i < 12; i++) {
        answer want[N_REQUEST];
        ql_options o = ql_test_options(model, model->lanes[model->n_lanes - 1]);
        o.kv = kvs[i % 4];
        o.prompt_precision = o.gen_precision = precisions[i / 4];
        o.chunk = 64;
        reference(&o, r, want);
        alone_and_together(&o, r, want);
        crc[i] = want[0].crc;
    }
    for (int32_t i = 0; i < 12; i++) { /* an option that changes nothing would pass everything above */
        for (int32_t j = 0; j < i; j++) {
            bool has_fp8 = strcmp(model->name, "micro-bf16") != 0 && strcmp(model->name, "micro-nvfp4-modelopt") != 0;
            if (has_fp8 || i / 4 != 2 || j / 4 != 1) {
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
    int32_t ids[N_REQUEST][MAX_PROMPT];
    ql_request r[N_REQUEST];
    answer exact, mixed;
    uint32_t crc1[2];
    make_requests(model, ids, r);
    for (int32_t i = 0; i < 2; i++) {
        ql_options o = ql_test_options(model, 2);
        o.gen_precision = i ? QL_PREC_BF16 : QL_PREC_EXACT;
        ql_engine *engine = ql_test_open(&o);
        answer *a = i ? &mixed : &exact;
        *a = take(ql_test_generate(engine, &r[0]));
        ql_request one = r[0];
        one.max_new = 1;
        ql_result *res = ql_test_generate(engine, &one);
        crc1[i] = res->logits_crc32;
        ql_result_free(res);
        ql_engine_close(&engine);
    }
    assert_int_equal(crc1[0], crc1[1]);
    assert_true(exact.crc != mixed.crc);
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

static answer run_swapped(const ql_test_model *model, int32_t lanes, order how, const ql_request *r) {
    const ql_test_hooks hooks = {.comm_opened = swap_reduce};
    ql_options o = ql_test_options(model, lanes);
    ql_engine *engine = NULL;
    ql_error err = {0};
    swapped.order = how;
    swapped.calls = 0;
    if (ql_engine_open_hooked(&engine, &o, &hooks, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    answer a = take(ql_test_generate(engine, r));
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
    int32_t ids[N_REQUEST][MAX_PROMPT];
    ql_request r[N_REQUEST];
    make_requests(model, ids, r);
    ql_options o = ql_test_options(model, 1);
    ql_engine *engine = ql_test_open(&o);
    answer want = take(ql_test_generate(engine, &r[0]));
    ql_engine_close(&engine);
    for (int32_t i = 1; i < model->n_lanes; i++) {
        int32_t lanes = model->lanes[i];
        assert_int_equal(run_swapped(model, lanes, TREE, &r[0]).crc, want.crc);
        uint32_t linear = run_swapped(model, lanes, LINEAR, &r[0]).crc;
        if (lanes == 2) { /* the tree of two is the line */
            assert_int_equal(linear, want.crc);
        } else if (linear == want.crc) {
            fail_msg("%s: %d lanes added in a line give the CRC of the tree", model->name, lanes);
        }
    }
}

#define FOR(test, model)                                                                                               \
    { #test " " model, test, NULL, NULL, (void *)(uintptr_t)(model) }

static int named(void **state) {
    *state = (void *)(uintptr_t)ql_test_model_named(*state);
    return 0;
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    struct CMUnitTest tests[] = {
        FOR(lanes_and_chunks, "tiny"),
        FOR(lanes_and_chunks, "micro-bf16"),
        FOR(lanes_and_chunks, "micro-mixed"),
        FOR(lanes_and_chunks, "micro-fp8-block"),
        FOR(lanes_and_chunks, "micro-nvfp4-modelopt"),
        FOR(lanes_and_chunks, "micro-lanes8"),
        FOR(types, "micro-bf16"),
        FOR(types, "micro-mixed"),
        FOR(types, "micro-fp8-block"),
        FOR(types, "micro-lanes8"),
        FOR(phases_apart, "micro-mixed"),
        FOR(another_order_is_noticed, "tiny"),
        FOR(another_order_is_noticed, "micro-lanes8"),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        tests[i].setup_func = named;
    }
    return cmocka_run_group_tests_name("samebits", tests, NULL, NULL);
}
