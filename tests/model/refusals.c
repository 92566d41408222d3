/* What the engine refuses: requests and options, each with its message. */
#include "tests/model/common.h"

#include <math.h>

static const ql_test_model *micro(void) { return ql_test_model_named("micro-bf16"); }
static const ql_test_model *tiny(void) { return ql_test_model_named("tiny"); }

static void refused(ql_engine *engine, const ql_request *r, const char *part) {
    ql_request_id id = 77;
    ql_error err = {0};
    if (ql_submit(engine, r, NULL, NULL, &id, &err) != QL_ERR_USAGE) {
        fail_msg("the request that should say \"%s\" gave %s: %s", part, ql_status_text(err.status), err.text);
    }
    assert_true(id == 77);
    ql_test_assert_has(err.text, part);
    assert_null(strchr(err.text, '\n'));
}

static void bad_requests(void **state) {
    (void)state;
    ql_options o = ql_test_options(tiny(), 1);
    o.ctx = 64;
    ql_engine *engine = ql_test_open(&o);
    int32_t ids[66];
    ql_test_ids(6, 1000, ids, 66);
    ql_request r;

    r = ql_test_request(NULL, 0, 1);
    refused(engine, &r, "empty");
    r = ql_test_ask("", 1);
    refused(engine, &r, "empty");
    r = ql_test_request(ids, 0, 1);
    refused(engine, &r, "empty");
    r = ql_test_ask("both", 1);
    r.ids = ids;
    r.n_ids = 3;
    refused(engine, &r, "ids");
    r = ql_test_request(ids, 65, 1);
    refused(engine, &r, "65");
    refused(engine, &r, "64");
    r = ql_test_request(ids, -1, 1);
    refused(engine, &r, "-1");
    ids[2] = 1344;
    r = ql_test_request(ids, 5, 1);
    refused(engine, &r, "1344");
    ids[2] = -3;
    refused(engine, &r, "-3");
    ids[2] = 7;
    r = ql_test_ask("ab\xff"
                    "cd",
                    1);
    refused(engine, &r, "0xFF");
    refused(engine, &r, "2");      /* its offset */
    r = ql_test_ask("caf\xc3", 1); /* cut in a character */
    refused(engine, &r, "0xC3");
    r = ql_test_ask("a", 1);
    r.max_new = -1;
    refused(engine, &r, "max_new");

    static const struct {
        const char *name;
        size_t at;
        float bad[3];
    } floats[] = {
        {"temperature", offsetof(ql_sampling, temperature), {-0.5f, NAN, INFINITY}},
        {"top_p", offsetof(ql_sampling, top_p), {0, 1.5f, NAN}},
        {"min_p", offsetof(ql_sampling, min_p), {-0.1f, 1.5f, NAN}},
        {"repetition", offsetof(ql_sampling, repetition_penalty), {0, -1, NAN}},
        {"presence", offsetof(ql_sampling, presence_penalty), {-2.5f, 2.5f, NAN}},
        {"frequency", offsetof(ql_sampling, frequency_penalty), {-2.5f, 2.5f, NAN}},
    };
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        for (int k = 0; k < 3; k++) {
            r = ql_test_ask("a", 1);
            r.sampling.temperature = 0.7f;
            memcpy((char *)&r.sampling + floats[i].at, &floats[i].bad[k], sizeof(float));
            refused(engine, &r, floats[i].name);
        }
    }
    r = ql_test_ask("a", 1);
    r.sampling.top_k = -1;
    refused(engine, &r, "top_k");

    char long_stop[1100];
    memset(long_stop, 'x', sizeof long_stop);
    long_stop[1025] = 0;
    const char *stop[17] = {"", long_stop, "a\xff"};
    r = ql_test_ask("a", 1);
    for (int32_t i = 0; i < 3; i++) {
        r.stop = stop + i;
        r.n_stop = 1;
        refused(engine, &r, "stop");
    }
    for (int32_t i = 0; i < 17; i++) {
        stop[i] = "x";
    }
    r.stop = stop;
    r.n_stop = 17;
    refused(engine, &r, "16");
    r = ql_test_ask("a", 1);
    r.size = 8;
    refused(engine, &r, "size");

    long_stop[1024] = 0; /* the longest allowed, and all of them at once */
    for (int32_t i = 0; i < 16; i++) {
        stop[i] = long_stop;
    }
    r = ql_test_ask("a", 2);
    r.stop = stop;
    r.n_stop = 16;
    ql_result_free(ql_test_generate(engine, &r));
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);

    o = ql_test_options(micro(), 1); /* no tokenizer */
    engine = ql_test_open(&o);
    assert_null(ql_engine_tokenizer(engine));
    r = ql_test_ask("text", 1);
    refused(engine, &r, "tokenizer");
    r = ql_test_request(ql_test_prompt, 3, 1);
    r.stop = stop;
    r.n_stop = 1;
    refused(engine, &r, "tokenizer");
    ql_engine_close(&engine);
}

static void free_only(void *user, void *ptr) {
    (void)user;
    free(ptr);
}

static void bad_options(void **state) {
    (void)state;
    ql_options o = ql_test_options(tiny(), 3);
    ql_test_open_fails(&o, QL_ERR_USAGE, "3", "1, 2", "4", NULL); /* and which lane counts do divide */
    o.lanes = 8;
    ql_test_open_fails(&o, QL_ERR_USAGE, "8", "1, 2", "4", NULL);
    o.lanes = 100;
    ql_test_open_fails(&o, QL_ERR_USAGE, "100", "1, 2", "4", NULL);
    o.lanes = -1;
    ql_test_open_fails(&o, QL_ERR_USAGE, "-1", NULL);

    static const struct {
        const char *name;
        size_t at;
        int32_t bad;
        const char *value;
    } fields[] = {
        {"chunk", offsetof(ql_options, chunk), 100, "100"},
        {"chunk", offsetof(ql_options, chunk), 0, "0"},
        {"chunk", offsetof(ql_options, chunk), -64, "-64"},
        {"ctx", offsetof(ql_options, ctx), -1, "-1"},
        {"ctx", offsetof(ql_options, ctx), 4097, "4096"},
        {"max_seqs", offsetof(ql_options, max_seqs), 0, "0"},
        {"max_seqs", offsetof(ql_options, max_seqs), 257, "256"},
        {"wait_ms", offsetof(ql_options, wait_ms), 0, "0"},
        {"init_ms", offsetof(ql_options, init_ms), -5, "-5"},
        {"kv", offsetof(ql_options, kv), 9, "9"},
        {"precision", offsetof(ql_options, prompt_precision), 7, "7"},
        {"precision", offsetof(ql_options, gen_precision), 5, "5"},
        {"device", offsetof(ql_options, device), 5, "5"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        o = ql_test_options(tiny(), 1);
        memcpy((char *)&o + fields[i].at, &fields[i].bad, sizeof(int32_t));
        ql_test_open_fails(&o, QL_ERR_USAGE, fields[i].name, fields[i].value, NULL);
    }
    o = ql_test_options(tiny(), 1);
    o.kernels = "linear=fastest";
    ql_test_open_fails(&o, QL_ERR_USAGE, "fastest", "twin", NULL);
    o.kernels = "lineer=twin";
    ql_test_open_fails(&o, QL_ERR_USAGE, "lineer", NULL);
    o = ql_test_options(ql_test_model_named("micro-nvfp4-modelopt"), 1);
    o.mtp = 1;
    ql_test_open_fails(&o, QL_ERR_USAGE, "mtp", NULL);
    o = ql_test_options(tiny(), 1);
    o.model = "models/none-such";
    ql_test_open_fails(&o, QL_ERR_MODEL, "models/none-such", NULL);
    o.model = NULL;
    ql_test_open_fails(&o, QL_ERR_USAGE, "model", NULL);
    o = ql_test_options(tiny(), 1);
    o.mem_bytes = 1 << 20;
    ql_test_open_fails(&o, QL_ERR_MEMORY, "weights alone", "more lanes", NULL);
    o = ql_test_options(tiny(), 1);
    o.size = 4;
    ql_test_open_fails(&o, QL_ERR_USAGE, "size", NULL);
    const int32_t devices[1] = {0};
    o = ql_test_options(tiny(), 1);
    o.devices = devices;
    ql_test_open_fails(&o, QL_ERR_USAGE, "devices", NULL);
    ql_allocator half = {0};
    half.free = free_only;
    o = ql_test_options(tiny(), 1);
    o.allocator = &half;
    ql_test_open_fails(&o, QL_ERR_USAGE, "allocator", NULL);

    /* memory for some context but not for the model's: ctx 0 takes what fits */
    o = ql_test_options(tiny(), 1);
    o.ctx = 0;
    ql_engine *engine = ql_test_open(&o);
    ql_stats all = ql_test_stats(engine);
    assert_int_equal(all.ctx, 4096);
    ql_engine_close(&engine);
    o.mem_bytes = all.lane[0].weight_bytes + all.lane[0].scale_bytes + all.lane[0].state_bytes +
                  all.lane[0].workspace_bytes + all.lane[0].kv_bytes / 2;
    engine = ql_test_open(&o);
    ql_stats half_ctx = ql_test_stats(engine);
    assert_true(half_ctx.ctx >= 1024 && half_ctx.ctx <= 2560 && half_ctx.ctx % 64 == 0);
    ql_engine_close(&engine);
    o.ctx = 4096; /* asked for by name, it is refused, with what would fit */
    char fits[16];
    snprintf(fits, sizeof fits, "%d", half_ctx.ctx);
    ql_test_open_fails(&o, QL_ERR_MEMORY, fits, NULL);
    o.mem_bytes = all.lane[0].weight_bytes + all.lane[0].scale_bytes + 1024; /* the weights, and nothing to run them */
    ql_test_open_fails(&o, QL_ERR_MEMORY, "no context fits", NULL);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_requests),
        cmocka_unit_test(bad_options),
    };
    return cmocka_run_group_tests_name("refusals", tests, NULL, NULL);
}
