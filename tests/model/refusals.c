/* What the engine refuses or warns of: requests, options and weights, each with its message. */
#include "loader/checkpoint.h"
#include "runtime/base/json.h"
#include "runtime/base/num.h"
#include "tests/model/common.h"
#include "tests/stfile.h"

#include <math.h>
#include <unistd.h>

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

/* ---- weights whose scales are lost or wrong --------------------------------------------------------------------- */

/* What becomes of one linear of a model, whose other tensors stay as they are. */
typedef enum damage {
    NONE,
    ONES,       /* each scale is 1 */
    INVERTED,   /* the scale of the whole tensor is its inverse */
    BARE_CODES, /* stored as BF16: the codes as numbers, without scales */
    DECODED,    /* stored as BF16: what FP8 codes and scales say */
} damage;

typedef struct rewriting {
    const ql_checkpoint *from;
    const char *module; /* with its prefix: "lm_head" */
    damage what;
    ql_stfile file;
    uint8_t *data;
    uint64_t bytes, cap;
} rewriting;

static bool is_part(const ql_tensor *t, const char *module, const char *part) {
    size_t len = strlen(module);
    return strncmp(t->name, module, len) == 0 && t->name[len] == '.' && strcmp(t->name + len + 1, part) == 0;
}

static const ql_tensor *part_of(const rewriting *w, const char *part) {
    for (int32_t i = 0; i < w->from->n_tensor; i++) {
        if (is_part(w->from->tensor[i], w->module, part)) {
            return w->from->tensor[i];
        }
    }
    return NULL;
}

static uint8_t *append(rewriting *w, const char *name, ql_dtype dtype, int32_t rank, const int64_t *shape,
                       uint64_t bytes) {
    assert_int_equal(ql_stfile_add(&w->file, name, dtype, rank, shape, NULL), QL_OK);
    assert_true(w->bytes + bytes <= w->cap);
    uint8_t *at = w->data + w->bytes;
    w->bytes += bytes;
    return at;
}

static void put_scale(ql_dtype dtype, uint8_t *at, float v) {
    uint16_t half = ql_bf16_of_f32(v);
    memcpy(at, dtype == QL_DTYPE_F32 ? (const void *)&v : &half, dtype == QL_DTYPE_F32 ? 4 : 2);
}

/* The weight as BF16, from codes of FP4 or FP8, or from BF16 numbers of which each byte becomes an FP8 code's number. */
static void append_plain(rewriting *w, const ql_tensor *t) {
    const bool fp4 = t->dtype == QL_DTYPE_U8;
    const int64_t shape[2] = {t->shape[0], t->shape[1] * (fp4 ? 2 : 1)}, n = shape[0] * shape[1];
    const ql_tensor *scale = part_of(w, "weight_scale");
    char name[320];
    snprintf(name, sizeof name, "%s.weight", w->module);
    uint8_t *at = append(w, name, QL_DTYPE_BF16, 2, shape, 2 * (uint64_t)n);
    for (int64_t i = 0; i < n; i++) {
        float v;
        if (fp4) {
            v = ql_f32_of_e2m1(t->data[i / 2] >> (i % 2 ? 4 : 0) & 15);
        } else {
            uint8_t code = t->data[t->dtype == QL_DTYPE_BF16 ? 2 * i : i];
            v = ql_e4m3_is_nan(code) ? 448.0f : ql_f32_of_e4m3(code);
        }
        if (w->what == DECODED) {
            float s;
            ql_dtype_to_f32(scale->dtype, scale->data + i / shape[1] * ql_dtype_bits(scale->dtype) / 8, 1, &s);
            v *= s;
        }
        put_scale(QL_DTYPE_BF16, at + 2 * i, v);
    }
}

static void append_tensor(rewriting *w, const ql_tensor *t) {
    const bool is_weight = is_part(t, w->module, "weight") || is_part(t, w->module, "weight_packed");
    const size_t len = strlen(w->module);
    const bool ours = strncmp(t->name, w->module, len) == 0 && t->name[len] == '.';
    if (ours && w->what >= BARE_CODES) { /* scales go */
        if (is_weight) {
            append_plain(w, t);
        }
        return;
    }
    uint8_t *at = append(w, t->name, t->dtype, t->rank, t->shape, t->bytes);
    memcpy(at, t->data, t->bytes);
    const bool whole = is_part(t, w->module, "weight_global_scale") || is_part(t, w->module, "weight_scale_2");
    const bool scale = is_part(t, w->module, "weight_scale") || is_part(t, w->module, "weight_scale_inv");
    const int64_t step = ql_dtype_bits(t->dtype) / 8;
    for (int64_t i = 0; i < t->n_elem && ((whole && w->what == INVERTED) || (scale && w->what == ONES)); i++) {
        float v;
        ql_dtype_to_f32(t->dtype, t->data + i * step, 1, &v);
        put_scale(t->dtype, at + i * step, w->what == ONES ? 1 : 1 / v);
    }
}

static char folder[] = "/tmp/qlane-refusals-XXXXXX";

static void write_damaged(const ql_test_model *model, const char *module, damage what) {
    rewriting w = {.module = module, .what = what, .cap = 32 << 20};
    ql_error err = {0};
    ql_checkpoint *from = NULL;
    char path[128], config[4096], *text;
    size_t n;
    if (ql_checkpoint_open(&from, model->dir, &err) != QL_OK) {
        fail_msg("%s", err.text);
    }
    w.from = from;
    w.data = malloc(w.cap);
    assert_non_null(w.data);
    assert_true(part_of(&w, "weight") || part_of(&w, "weight_packed"));
    for (int32_t i = 0; i < from->n_tensor; i++) {
        append_tensor(&w, from->tensor[i]);
    }
    strcpy(folder + sizeof folder - 7, "XXXXXX");
    assert_non_null(mkdtemp(folder));
    ql_buf out;
    ql_buf_init(&out, NULL, w.cap);
    assert_int_equal(ql_stfile_header(&w.file, &out, &err), QL_OK);
    assert_int_equal(ql_buf_add(&out, w.data, w.bytes, &err), QL_OK);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_int_equal(ql_write_file(path, out.data, out.len, &err), QL_OK);
    snprintf(config, sizeof config, "%s/config.json", model->dir);
    assert_int_equal(ql_read_file(config, 1 << 20, &text, &n, &err), QL_OK);
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(ql_write_file(path, text, n, &err), QL_OK);
    free(text);
    ql_buf_deinit(&out);
    ql_stfile_deinit(&w.file);
    free(w.data);
    ql_checkpoint_close(&from);
}

static void remove_damaged(void) {
    static const char *const files[] = {"model.safetensors", "config.json"};
    char path[128];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(folder), 0);
}

/* What a plain `qlane run` shows of an engine's log. */
typedef struct warnings {
    int32_t n;
    char text[2048];
} warnings;

static void take_warning(void *user, ql_log_level level, const char *line) {
    warnings *w = user;
    if (level <= QL_LOG_WARN) {
        w->n++;
        size_t len = strlen(w->text);
        snprintf(w->text + len, sizeof w->text - len, "%s\n", line);
    }
}

static void open_warns(const ql_options *options, int32_t n, const char *const *part, int32_t n_part) {
    warnings w = {0};
    ql_options o = *options;
    o.log = take_warning;
    o.log_user = &w;
    ql_engine *engine = ql_test_open(&o);
    ql_engine_close(&engine);
    if (w.n != n) {
        fail_msg("%s: %d warnings, not %d: %s", o.model, w.n, n, w.text);
    }
    for (int32_t i = 0; i < n_part && part[i]; i++) {
        ql_test_assert_has(w.text, part[i]);
    }
}

static void sound_models_do_not_warn(void **state) {
    (void)state;
    for (int32_t i = 0; i < QL_TEST_MODELS; i++) {
        const ql_options o = ql_test_options(&ql_test_models[i], 1);
        open_warns(&o, 0, NULL, 0);
    }
}

static void wrong_scales(void **state) {
    (void)state;
    static const struct {
        const char *model, *module;
        damage what;
        ql_status status;
        int32_t lanes, n_warn;
        const char *part[5];
    } cases[] = {
        {"micro-mixed", "lm_head", NONE, QL_OK, 1, 0, {NULL}},
        {"micro-mixed", "lm_head", ONES, QL_OK, 1, 1, {"lm_head.weight reaches up to 448", "within 8", "scale"}},
        {"micro-mixed", "lm_head", ONES, QL_OK, 2, 2, {"lane 0: lm_head.weight", "lane 1: lm_head.weight"}},
        {"micro-fp8-block",
         "model.language_model.layers.0.mlp.up_proj",
         ONES,
         QL_OK,
         1,
         1,
         {"layers.0.mlp.up_proj.weight reaches up to 448", "within 8"}},
        {"micro-mixed",
         "model.language_model.layers.0.mlp.up_proj",
         INVERTED,
         QL_OK,
         1,
         1,
         {"layers.0.mlp.up_proj.weight_packed reaches up to ", "within 8", "inverted"}},
        {"micro-nvfp4-modelopt", "lm_head", INVERTED, QL_OK, 1, 1, {"lm_head.weight reaches up to ", "within 8"}},
        {"micro-bf16",
         "model.language_model.layers.0.mlp.up_proj",
         BARE_CODES,
         QL_OK,
         1,
         1,
         {"layers.0.mlp.up_proj.weight reaches 4", "within 8", "codes without their scale"}},
        {"micro-mixed",
         "lm_head",
         DECODED,
         QL_OK,
         1,
         1,
         {"1 linears are stored plain where the configuration says quantized (first: lm_head"}},
        {"micro-mixed",
         "lm_head",
         BARE_CODES,
         QL_ERR_MODEL,
         1,
         0,
         {"lm_head.weight: stored plain although group_0", "says fp8", "reach 448: codes whose scales are lost",
          "at most 8"}},
        {"micro-mixed",
         "model.language_model.layers.0.mlp.up_proj",
         BARE_CODES,
         QL_ERR_MODEL,
         2,
         0,
         {"layers.0.mlp.up_proj.weight: stored plain although group_1", "says nvfp4", "reach 6, the largest FP4 code",
          "at most 8"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_damaged(ql_test_model_named(cases[i].model), cases[i].module, cases[i].what);
        ql_test_model damaged = *ql_test_model_named(cases[i].model);
        damaged.dir = folder;
        const ql_options o = ql_test_options(&damaged, cases[i].lanes);
        const char *const *p = cases[i].part;
        if (cases[i].status == QL_OK) {
            open_warns(&o, cases[i].n_warn, p, 5);
        } else {
            ql_test_open_fails(&o, cases[i].status, p[0], p[1], p[2], p[3], NULL);
        }
        remove_damaged();
    }
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_requests),
        cmocka_unit_test(bad_options),
        cmocka_unit_test(sound_models_do_not_warn),
        cmocka_unit_test(wrong_scales),
    };
    return cmocka_run_group_tests_name("refusals", tests, NULL, NULL);
}
