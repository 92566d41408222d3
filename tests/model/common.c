#include "tests/model/common.h"

#include "runtime/base/json.h"
#include "runtime/engine/test_hooks.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <unistd.h>

const ql_test_model ql_test_models[QL_TEST_MODELS] = {
    {"tiny", "models/tiny", 4, 1344, 3, {1, 2, 4}, true, true},
    {"micro-bf16", "tests/data/micro-bf16", 4, 512, 3, {1, 2, 4}, true, false},
    {"micro-mixed", "tests/data/micro-mixed", 2, 512, 2, {1, 2}, true, false},
    {"micro-fp8-block", "tests/data/micro-fp8-block", 2, 512, 2, {1, 2}, true, false},
    {"micro-nvfp4-modelopt", "tests/data/micro-nvfp4-modelopt", 4, 512, 3, {1, 2, 4}, false, false},
    {"micro-lanes8", "tests/data/micro-lanes8", 8, 512, 4, {1, 2, 4, 8}, true, false},
};

const ql_test_model *ql_test_model_named(const char *name) {
    for (int32_t i = 0; i < QL_TEST_MODELS; i++) {
        if (strcmp(ql_test_models[i].name, name) == 0) {
            return &ql_test_models[i];
        }
    }
    fail_msg("no test model is called %s", name);
    return NULL;
}

int ql_test_find_model(void **state) {
    *state = (void *)(uintptr_t)ql_test_model_named(*state);
    return 0;
}

int ql_test_run_each(const char *group, const struct CMUnitTest *each, int32_t n) {
    enum { MOST = 4 };
    struct CMUnitTest tests[MOST * QL_TEST_MODELS] = {0}; /* those without a function are left out */
    static char names[MOST * QL_TEST_MODELS][64];
    assert_true(n <= MOST);
    for (int32_t i = 0; i < n * QL_TEST_MODELS; i++) {
        const ql_test_model *model = &ql_test_models[i / n];
        snprintf(names[i], sizeof names[i], "%s %s", model->name, each[i % n].name);
        tests[i] = (struct CMUnitTest){names[i], each[i % n].test_func, NULL, NULL, (void *)(uintptr_t)model};
    }
    return cmocka_run_group_tests_name(group, tests, NULL, NULL);
}

static void on_alarm(int sig) {
    (void)sig;
    static const char text[] = "watchdog: the test hangs\n";
    if (write(2, text, sizeof text - 1) < 0) {
        _exit(125);
    }
    abort();
}

void ql_test_begin(int argc, char **argv, int32_t seconds) {
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    signal(SIGALRM, on_alarm);
    alarm((unsigned)(seconds * QL_TEST_SLOWER));
}

ql_options ql_test_options(const ql_test_model *model, int32_t lanes) {
    ql_options o = ql_options_default();
    o.model = model->dir;
    o.device = QL_DEVICE_HOST;
    o.lanes = lanes;
    o.ctx = 512;
    o.kv = QL_KV_F32;
    o.prompt_precision = o.gen_precision = QL_PREC_EXACT;
    return o;
}

ql_engine *ql_test_open_hooked(const ql_options *options, const ql_test_hooks *hooks) {
    ql_engine *engine = NULL;
    ql_error err = {0};
    ql_status status =
        hooks ? ql_engine_open_hooked(&engine, options, hooks, &err) : ql_engine_open(&engine, options, &err);
    if (status != QL_OK) {
        fail_msg("%s on %d lanes does not open: %s: %s", options->model, options->lanes, ql_status_text(err.status),
                 err.text);
    }
    assert_non_null(engine);
    return engine;
}

ql_engine *ql_test_open(const ql_options *options) { return ql_test_open_hooked(options, NULL); }

void ql_test_assert_has(const char *text, const char *part) {
    if (!strstr(text, part)) {
        fail_msg("\"%s\" does not say \"%s\"", text, part);
    }
}

void ql_test_open_fails(const ql_options *options, ql_status status, const char *part, ...) {
    ql_engine *engine = NULL;
    ql_error err = {0};
    ql_status got = ql_engine_open(&engine, options, &err);
    if (got == QL_OK) {
        ql_engine_close(&engine);
        fail_msg("the open that should say \"%s\" succeeded", part);
    }
    assert_null(engine);
    if (got != status || err.status != status) {
        fail_msg("status %s (in error: %s) instead of %s: %s", ql_status_text(got), ql_status_text(err.status),
                 ql_status_text(status), err.text);
    }
    assert_null(strchr(err.text, '\n'));
    va_list ap;
    va_start(ap, part);
    for (const char *p = part; p; p = va_arg(ap, const char *)) {
        ql_test_assert_has(err.text, p);
    }
    va_end(ap);
}

ql_request ql_test_request(const int32_t *ids, int32_t n_ids, int32_t max_new) {
    ql_request r = ql_request_default();
    r.ids = ids;
    r.n_ids = n_ids;
    r.max_new = max_new;
    r.model_sampling = 0;
    r.sampling.temperature = 0;
    r.crc = 1;
    return r;
}

ql_request ql_test_ask(const char *text, int32_t max_new) {
    ql_request r = ql_test_request(NULL, 0, max_new);
    r.text = text;
    return r;
}

ql_result *ql_test_generate(ql_engine *engine, const ql_request *request) {
    ql_result *result = NULL;
    ql_error err = {0};
    if (ql_generate(engine, request, &result, &err) != QL_OK) {
        fail_msg("generate: %s: %s", ql_status_text(err.status), err.text);
    }
    assert_non_null(result);
    assert_int_equal(result->status, QL_OK);
    return result;
}

ql_request_id ql_test_submit(ql_engine *engine, const ql_request *request) {
    ql_request_id id = 0;
    ql_error err = {0};
    if (ql_submit(engine, request, NULL, NULL, &id, &err) != QL_OK) {
        fail_msg("submit: %s: %s", ql_status_text(err.status), err.text);
    }
    assert_true(id != 0);
    return id;
}

ql_result *ql_test_wait(ql_engine *engine, ql_request_id id) {
    ql_result *result = NULL;
    ql_error err = {0};
    if (ql_wait(engine, id, &result, &err) != QL_OK) {
        fail_msg("wait: %s: %s", ql_status_text(err.status), err.text);
    }
    assert_non_null(result);
    assert_true(result->request == id);
    return result;
}

ql_stats ql_test_stats(ql_engine *engine) {
    ql_stats stats = {.size = sizeof stats};
    assert_int_equal(ql_engine_stats(engine, &stats), QL_OK);
    return stats;
}

void ql_test_assert_idle(ql_engine *engine) {
    ql_stats s = ql_test_stats(engine);
    int64_t t0 = ql_now_ns();
    while ((s.live_seqs != 0 || s.free_slots != s.max_seqs || s.free_pages != s.kv_pages) &&
           ql_seconds_since(t0) < QL_TEST_SLOWER) {
        ql_sleep_ms(1);
        s = ql_test_stats(engine);
    }
    assert_true(s.max_seqs > 0 && s.kv_pages > 0);
    assert_int_equal(s.live_seqs, 0);
    assert_int_equal(s.free_slots, s.max_seqs);
    assert_int_equal(s.free_pages, s.kv_pages);
}

int32_t ql_test_entries(const char *dir) {
    int32_t n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e = readdir(d); e; e = readdir(d)) {
        n += e->d_name[0] != '.';
    }
    closedir(d);
    return n;
}

const int32_t ql_test_prompt[QL_TEST_PROMPT] = {5, 81, 3, 77, 290, 411, 6, 30, 255};

void ql_test_ids(uint64_t seed, int32_t vocab, int32_t *ids, int32_t n) {
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    for (int32_t i = 0; i < n; i++) { /* xorshift64* */
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        ids[i] = (int32_t)((x * 0x2545f4914f6cdd1dull >> 33) % (uint64_t)vocab);
    }
}

static int32_t *ints_of(const json_t *array, int32_t *n) {
    assert_true(json_is_array(array));
    *n = (int32_t)json_array_size(array);
    int32_t *v = calloc((size_t)*n + 1, sizeof *v);
    assert_non_null(v);
    for (int32_t i = 0; i < *n; i++) {
        v[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
    }
    return v;
}

static double *reals_of(const json_t *array, int32_t n) {
    assert_true(json_is_array(array) && (int32_t)json_array_size(array) == n);
    double *v = calloc((size_t)n + 1, sizeof *v);
    assert_non_null(v);
    for (int32_t i = 0; i < n; i++) {
        v[i] = json_number_value(json_array_get(array, (size_t)i));
    }
    return v;
}

void ql_test_golden_load(ql_test_golden *golden, const ql_test_model *model) {
    char path[256];
    snprintf(path, sizeof path, "%s/golden.json", model->dir);
    json_t *root = json_load_file(path, 0, NULL);
    json_t *cases = json_object_get(root, "cases");
    assert_true(json_is_array(cases) && json_array_size(cases) > 0);
    golden->n = (int32_t)json_array_size(cases);
    golden->cases = calloc((size_t)golden->n, sizeof *golden->cases);
    assert_non_null(golden->cases);
    for (int32_t i = 0; i < golden->n; i++) {
        const json_t *from = json_array_get(cases, (size_t)i);
        ql_test_case *c = &golden->cases[i];
        c->prompt_ids = ints_of(json_object_get(from, "prompt_ids"), &c->n_prompt);
        c->ids = ints_of(json_object_get(from, "greedy_ids"), &c->n_ids);
        c->margin = reals_of(json_object_get(from, "margin"), c->n_ids);
        c->logprob = reals_of(json_object_get(from, "logprob"), c->n_ids);
        const char *prompt = json_string_value(json_object_get(from, "prompt"));
        const char *text = json_string_value(json_object_get(from, "text"));
        assert_true((prompt != NULL) == model->tokenizer && (text != NULL) == model->tokenizer);
        c->prompt = prompt ? strdup(prompt) : NULL;
        c->text = text ? strdup(text) : NULL;
    }
    json_decref(root);
    snprintf(path, sizeof path, "%s/golden.npz", model->dir);
    if (!ql_npz_open(&golden->npz, path)) {
        fail_msg("%s", golden->npz.error);
    }
}

void ql_test_golden_free(ql_test_golden *golden) {
    ql_npz_close(&golden->npz);
    for (int32_t i = 0; i < golden->n; i++) {
        ql_test_case *c = &golden->cases[i];
        free(c->prompt_ids);
        free(c->ids);
        free(c->margin);
        free(c->logprob);
        free(c->prompt);
        free(c->text);
    }
    free(golden->cases);
    *golden = (ql_test_golden){0};
}

void ql_test_probe_fn(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                      const float *values) {
    ql_test_probe *p = user;
    ql_test_rows *rows = kind == QL_PROBE_FINAL_HIDDEN                                     ? &p->final_hidden
                         : kind == QL_PROBE_LOGITS                                         ? &p->logits
                         : kind == QL_PROBE_MTP_LOGITS                                     ? &p->mtp_logits
                         : kind == QL_PROBE_HIDDEN && layer >= 0 && layer < QL_TEST_LAYERS ? &p->hidden[layer]
                                                                                           : NULL;
    if (!rows || row0 != rows->n || n_row < 0 || width <= 0 || (rows->n > 0 && width != rows->width)) {
        p->bad = true;
        return;
    }
    size_t row_bytes = (size_t)width * sizeof *values;
    float *grown = realloc(rows->values, (size_t)(rows->n + n_row) * row_bytes + 1);
    if (!grown) {
        p->bad = true;
        return;
    }
    memcpy((char *)grown + (size_t)rows->n * row_bytes, values, (size_t)n_row * row_bytes);
    *rows = (ql_test_rows){rows->n + n_row, width, grown};
}

void ql_test_probe_free(ql_test_probe *probe) {
    for (int32_t i = 0; i < QL_TEST_LAYERS; i++) {
        free(probe->hidden[i].values);
    }
    free(probe->final_hidden.values);
    free(probe->logits.values);
    free(probe->mtp_logits.values);
    memset(probe, 0, sizeof *probe);
}

double ql_test_worst_rel(const float *got, const float *want, int64_t n_row, int32_t width, int64_t *worst_row) {
    double worst = -1;
    for (int64_t r = 0; r < n_row; r++) {
        double diff = 0, norm = 0;
        for (int64_t i = r * width; i < (r + 1) * width; i++) {
            double d = (double)got[i] - want[i];
            diff += d * d;
            norm += (double)want[i] * want[i];
        }
        double rel = diff == 0 ? 0 : sqrt(diff / norm);
        rel = isnan(rel) ? INFINITY : rel;
        if (rel > worst) {
            worst = rel;
            if (worst_row) {
                *worst_row = r;
            }
        }
    }
    return worst;
}

void ql_test_raise(double *to, double v) { *to = v > *to || isnan(v) ? v : *to; }

/* One kind of rows of the golden archive against what the probe delivered: the worst row; raises *largest, if not NULL,
 * to the largest difference of one value. */
static double row_error(const ql_npz *npz, const char *prefix, const char *kind, const ql_test_rows *rows,
                        int64_t layer, double *largest) {
    char name[64];
    snprintf(name, sizeof name, "%s%s", prefix, kind);
    const ql_npy *want = ql_npz_get(npz, name);
    assert_non_null(want);
    assert_string_equal(want->dtype, "f4");
    int64_t n_row = want->shape[want->rank - 2], width = want->shape[want->rank - 1];
    if (rows->n != n_row || rows->width != width) {
        fail_msg("%s: probe gave [%d][%d], golden has [%d][%d]", name, rows->n, rows->width, (int)n_row, (int)width);
    }
    const float *from = (const float *)want->data + layer * n_row * width;
    for (int64_t i = 0; largest && i < n_row * width; i++) {
        ql_test_raise(largest, fabs((double)rows->values[i] - (double)from[i]));
    }
    return ql_test_worst_rel(rows->values, from, n_row, (int32_t)width, NULL);
}

static void probe_errors(ql_engine *engine, const ql_test_model *model, const ql_npz *npz, const char *prefix,
                         ql_test_errors *e) {
    char name[64];
    snprintf(name, sizeof name, "%sids", prefix);
    const ql_npy *ids = ql_npz_get(npz, name);
    if (!ids) { /* tiny has dumps of one prompt only */
        assert_true(model->tokenizer && *prefix);
        return;
    }
    ql_test_probe probe = {0};
    ql_request r = ql_test_request(ids->data, (int32_t)ids->n, 1);
    r.probe = ql_test_probe_fn;
    r.probe_user = &probe;
    ql_result_free(ql_test_generate(engine, &r));
    assert_false(probe.bad);
    snprintf(name, sizeof name, "%shidden", prefix);
    const ql_npy *hidden = ql_npz_get(npz, name);
    assert_non_null(hidden);
    assert_int_equal(hidden->rank, 3);
    for (int64_t l = 0; l < hidden->shape[0]; l++) {
        ql_test_raise(&e->hidden, row_error(npz, prefix, "hidden", &probe.hidden[l], l, NULL));
    }
    assert_int_equal(probe.hidden[hidden->shape[0]].n, 0);
    ql_test_raise(&e->final_hidden, row_error(npz, prefix, "final_hidden", &probe.final_hidden, 0, NULL));
    ql_test_raise(&e->logits, row_error(npz, prefix, "logits", &probe.logits, 0, &e->logit));
    if (model->mtp) {
        ql_test_raise(&e->mtp_logits, row_error(npz, prefix, "mtp_logits", &probe.mtp_logits, 0, NULL));
    }
    ql_test_probe_free(&probe);
}

void ql_test_golden_probe(ql_engine *engine, const ql_test_model *model, const ql_test_golden *golden,
                          ql_test_errors *e) {
    probe_errors(engine, model, &golden->npz, "", e);
    probe_errors(engine, model, &golden->npz, "long_", e);
}

/* Each block is preceded by its size and its place in the list of live blocks. */
typedef struct ql_test_block {
    ql_test_block *prev, *next;
    size_t bytes;
    char pad[40]; /* to 64 bytes, so that the block keeps malloc's alignment */
} block;

static bool refused(ql_test_heap *h) {
    int64_t call = __atomic_fetch_add(&h->calls, 1, __ATOMIC_RELAXED);
    if (call != __atomic_load_n(&h->fail_at, __ATOMIC_RELAXED)) {
        return false;
    }
    __atomic_fetch_add(&h->failed, 1, __ATOMIC_RELAXED);
    return true;
}

static void link_in(ql_test_heap *h, block *b, size_t bytes) {
    ql_lock(&h->mutex);
    b->bytes = bytes;
    b->prev = NULL;
    b->next = h->first;
    if (h->first) {
        h->first->prev = b;
    }
    h->first = b;
    h->live_blocks++;
    h->live_bytes += (int64_t)bytes;
    h->peak_bytes = h->live_bytes > h->peak_bytes ? h->live_bytes : h->peak_bytes;
    ql_unlock(&h->mutex);
}

static void link_out(ql_test_heap *h, block *b) {
    ql_lock(&h->mutex);
    *(b->prev ? &b->prev->next : &h->first) = b->next;
    if (b->next) {
        b->next->prev = b->prev;
    }
    h->live_blocks--;
    h->live_bytes -= (int64_t)b->bytes;
    ql_unlock(&h->mutex);
}

static void *heap_malloc(void *user, size_t bytes) {
    ql_test_heap *h = user;
    block *b = refused(h) ? NULL : malloc(sizeof *b + bytes);
    if (!b) {
        return NULL;
    }
    link_in(h, b, bytes);
    return b + 1;
}

static void heap_free(void *user, void *ptr) {
    if (ptr) {
        block *b = (block *)ptr - 1;
        link_out(user, b);
        free(b);
    }
}

/* Always moves, so that a pointer kept across a realloc is found. */
static void *heap_realloc(void *user, void *old, size_t bytes) {
    void *fresh = heap_malloc(user, bytes);
    if (fresh && old) {
        size_t had = ((block *)old - 1)->bytes;
        memcpy(fresh, old, had < bytes ? had : bytes);
        heap_free(user, old);
    }
    return fresh;
}

void ql_test_heap_init(ql_test_heap *heap) {
    *heap = (ql_test_heap){.mem = {heap_malloc, heap_realloc, heap_free, heap}, .fail_at = -1};
    assert_int_equal(ql_mutex_init(&heap->mutex, NULL), QL_OK);
}
