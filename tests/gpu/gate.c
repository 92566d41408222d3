/* Whole models on GPUs: goldens, equal bits, what lanes hold and move, faults.
 *
 *     gate [FILTER [REPEATS [host]]]
 *
 * FILTER picks tests by name, * stands for any text. REPEATS is how often the 1,000 ids are generated. `host` runs the
 * same tests on host lanes, which checks the tests themselves. A test of more lanes than there are GPUs is skipped.
 */
#include "kernels/cuda.h"
#include "runtime/base/qformat.h"
#include "runtime/engine/test_hooks.h"
#include "tests/model/common.h"

#include <cuda_runtime.h>
#include <dirent.h>
#include <math.h>
#include <unistd.h>

enum { N_REQUEST = 8, MAX_PROMPT = 300, N_NEW = 12, WHOLE = 512, MAX_LANES = 8, OPENS = 20, LONG_IDS = 1000 };
#define LIMIT_S 2.0

static struct {
    int32_t n_gpu, repeats;
    ql_device_kind device;
    const char *variant; /* what path names must end with */
} on;

typedef struct mode {
    const char *name;
    ql_kv_type kv;
    ql_precision prompt, gen;
    double bound;         /* relative L2 of a row */
    double logprob_bound; /* absolute */
} mode;

/* What bf16 may do to a log probability: 2e-2 of a row of up to 12 in each entry. */
static const mode modes[] = {
    {"exact, f32 kv", QL_KV_F32, QL_PREC_EXACT, QL_PREC_EXACT, 2e-5, 1e-4},
    {"exact, f16 kv", QL_KV_F16, QL_PREC_EXACT, QL_PREC_EXACT, 3e-4, 5e-3},
    {"bf16, f16 kv", QL_KV_F16, QL_PREC_BF16, QL_PREC_BF16, 2e-2, 0.25},
    {"bf16 prompt, exact gen, f16 kv", QL_KV_F16, QL_PREC_BF16, QL_PREC_EXACT, 2e-2, 0.25},
};
enum { N_MODE = sizeof modes / sizeof *modes };

typedef struct job {
    const ql_test_model *model;
    int32_t lanes;
    const mode *mode; /* NULL: the test does not depend on it */
} job;

static ql_options options_of(const job *j) {
    ql_options o = ql_test_options(j->model, j->lanes);
    o.device = on.device;
    if (j->mode) {
        o.kv = j->mode->kv;
        o.prompt_precision = j->mode->prompt;
        o.gen_precision = j->mode->gen;
    }
    return o;
}

static void need_gpus(const job *j) {
    if (j->lanes > on.n_gpu) {
        print_message("%d lanes need %d GPUs; this machine has %d\n", j->lanes, j->lanes, on.n_gpu);
        skip();
    }
}

/* ---- goldens ----------------------------------------------------------------------------------------------------- */

typedef struct errors {
    double hidden, final_hidden, logits, mtp_logits; /* relative L2 of the worst row */
    double logit, logprob;                           /* largest difference of one value */
    int32_t near_ties, ids;
} errors;

static void raise_to(double *to, double v) { *to = v > *to || isnan(v) ? v : *to; }

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
        raise_to(largest, fabs((double)rows->values[i] - (double)from[i]));
    }
    return ql_test_worst_rel(rows->values, from, n_row, (int32_t)width, NULL);
}

static void probe_errors(ql_engine *engine, const ql_test_model *model, const ql_npz *npz, const char *prefix,
                         errors *e) {
    char name[64];
    snprintf(name, sizeof name, "%sids", prefix);
    const ql_npy *ids = ql_npz_get(npz, name);
    if (!ids) { /* tiny has values of one prompt only */
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
    for (int64_t l = 0; l < hidden->shape[0]; l++) {
        raise_to(&e->hidden, row_error(npz, prefix, "hidden", &probe.hidden[l], l, NULL));
    }
    raise_to(&e->final_hidden, row_error(npz, prefix, "final_hidden", &probe.final_hidden, 0, NULL));
    raise_to(&e->logits, row_error(npz, prefix, "logits", &probe.logits, 0, &e->logit));
    if (model->mtp) {
        raise_to(&e->mtp_logits, row_error(npz, prefix, "mtp_logits", &probe.mtp_logits, 0, NULL));
    }
    ql_test_probe_free(&probe);
}

/* Generated ids against the golden ones. The error that decides about near ties is that of the prompt's logits and of all
 * log probabilities up to the first other id, so every case runs before any is judged. */
static void greedy_errors(ql_engine *engine, const ql_test_golden *golden, errors *e) {
    int32_t *same = calloc((size_t)golden->n, sizeof *same), *other = calloc((size_t)golden->n, sizeof *other);
    assert_true(same && other);
    for (int32_t i = 0; i < golden->n; i++) {
        const ql_test_case *c = &golden->cases[i];
        ql_request r = ql_test_request(c->prompt_ids, c->n_prompt, c->n_ids);
        ql_result *res = ql_test_generate(engine, &r);
        while (same[i] < c->n_ids && same[i] < res->n_ids && res->ids[same[i]] == c->ids[same[i]]) {
            raise_to(&e->logprob, fabs((double)res->logprobs[same[i]] - c->logprob[same[i]]));
            same[i]++;
        }
        e->ids += same[i];
        other[i] = same[i] < res->n_ids ? res->ids[same[i]] : -1;
        ql_result_free(res);
    }
    double error = e->logit > e->logprob ? e->logit : e->logprob;
    for (int32_t i = 0; i < golden->n; i++) {
        const ql_test_case *c = &golden->cases[i];
        if (same[i] < c->n_ids) {
            if (c->margin[same[i]] > 10 * error || other[i] < 0) {
                fail_msg("case %d: generated id %d is %d, golden %d; margin %g, measured error %g", i, same[i],
                         other[i], c->ids[same[i]], c->margin[same[i]], error);
            }
            e->near_ties++;
        }
    }
    free(same);
    free(other);
}

static void golden(void **state) {
    const job *j = *state;
    need_gpus(j);
    ql_test_golden gold;
    ql_npz npz;
    char path[256];
    snprintf(path, sizeof path, "%s/golden.npz", j->model->dir);
    ql_test_golden_load(&gold, j->model);
    if (!ql_npz_open(&npz, path)) {
        fail_msg("%s", npz.error);
    }
    ql_options o = options_of(j);
    o.mtp = j->model->mtp;
    ql_engine *engine = ql_test_open(&o);
    errors e = {0};
    probe_errors(engine, j->model, &npz, "", &e);
    probe_errors(engine, j->model, &npz, "long_", &e);
    printf("# measured %-20s lanes %d %-30s relative L2: hidden %.2e final %.2e logits %.2e mtp %.2e; a logit %.1e\n",
           j->model->name, j->lanes, j->mode->name, e.hidden, e.final_hidden, e.logits, e.mtp_logits, e.logit);
    fflush(stdout);
    greedy_errors(engine, &gold, &e);
    printf("# measured %-20s lanes %d %-30s %d ids as golden, log probability %.1e; near ties %d of %d cases\n",
           j->model->name, j->lanes, j->mode->name, e.ids, e.logprob, e.near_ties, gold.n);
    fflush(stdout);
    ql_engine_close(&engine);
    ql_npz_close(&npz);
    ql_test_golden_free(&gold);
    double bound = j->mode->bound;
    if (!(e.hidden <= bound) || !(e.final_hidden <= bound) || !(e.logits <= bound) || !(e.mtp_logits <= bound)) {
        fail_msg("over %g: hidden %.2e final %.2e logits %.2e mtp %.2e", bound, e.hidden, e.final_hidden, e.logits,
                 e.mtp_logits);
    }
    assert_true(e.logits > 0); /* equal bits in another order of addition would mean that nothing was compared */
    assert_true(e.ids > 0);
    if (!(e.logprob <= j->mode->logprob_bound)) {
        fail_msg("a log probability is %.2e off; %g is allowed", e.logprob, j->mode->logprob_bound);
    }
}

/* ---- text -------------------------------------------------------------------------------------------------------- */

static char *capital(const ql_options *o) {
    ql_engine *engine = ql_test_open(o);
    ql_request r = ql_test_request(NULL, 0, 24);
    r.text = "The capital of France is";
    ql_result *res = ql_test_generate(engine, &r);
    assert_non_null(res->text);
    char *text = strdup(res->text);
    assert_non_null(text);
    ql_result_free(res);
    ql_engine_close(&engine);
    return text;
}

static void text_as_on_the_host(void **state) {
    const job *j = *state;
    need_gpus(j);
    ql_options o = ql_test_options(j->model, 1);
    o.kv = QL_KV_F16;
    char *want = capital(&o);
    ql_test_assert_has(want, " Paris.");
    o = options_of(j);
    o.kv = QL_KV_F16;
    for (int32_t i = 0; i < 2; i++) {
        o.prompt_precision = o.gen_precision = i ? QL_PREC_AUTO : QL_PREC_EXACT;
        char *got = capital(&o);
        assert_string_equal(got, want);
        free(got);
    }
    free(want);
}

/* ---- equal bits -------------------------------------------------------------------------------------------------- */

typedef struct answer {
    uint32_t crc;
    int32_t n, ids[64];
    float logprobs[64];
} answer;

static answer take(ql_result *res) {
    answer a = {.crc = res->logits_crc32, .n = res->n_ids};
    assert_int_equal(res->has_crc, 1);
    assert_in_range(res->n_ids, 1, 64);
    memcpy(a.ids, res->ids, (size_t)a.n * sizeof *a.ids);
    memcpy(a.logprobs, res->logprobs, (size_t)a.n * sizeof *a.logprobs);
    ql_result_free(res);
    return a;
}

static void same(const answer *got, const answer *want, const ql_options *o, const char *company, int32_t request) {
    if (got->n != want->n || memcmp(got->ids, want->ids, (size_t)want->n * sizeof *want->ids) != 0 ||
        memcmp(got->logprobs, want->logprobs, (size_t)want->n * sizeof *want->logprobs) != 0 || got->crc != want->crc) {
        int32_t i = 0;
        while (i < want->n && i < got->n && got->ids[i] == want->ids[i] &&
               memcmp(&got->logprobs[i], &want->logprobs[i], sizeof(float)) == 0) {
            i++;
        }
        fail_msg(
            "%s, %d lanes, chunk %d, %s: request %d: crc %08x, reference %08x; ids and log probabilities equal up to "
            "%d of %d",
            o->model, o->lanes, o->chunk, company, request, got->crc, want->crc, i, want->n);
    }
}

/* Lengths around the 64-token block; the first is the one that also runs alone. The last two are sampled. */
static void make_requests(const ql_test_model *model, int32_t ids[N_REQUEST][MAX_PROMPT], ql_request r[N_REQUEST]) {
    static const int32_t lengths[N_REQUEST] = {MAX_PROMPT, 1, 63, 64, 65, 200, 20, 7};
    for (int32_t i = 0; i < N_REQUEST; i++) {
        ql_test_ids((uint64_t)i + 1, model->vocab < 1300 ? model->vocab : 1300, ids[i], lengths[i]);
        r[i] = ql_test_request(ids[i], lengths[i], N_NEW);
        r[i].ignore_eos = 1;
    }
    r[6].sampling.temperature = 0.8f;
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

static void bits(void **state) {
    const job *j = *state;
    need_gpus(j);
    static const int32_t chunks[] = {64, 256, WHOLE};
    static int32_t ids[N_REQUEST][MAX_PROMPT];
    ql_request r[N_REQUEST];
    answer want[N_REQUEST], got;
    make_requests(j->model, ids, r);
    ql_options o = options_of(j);
    o.lanes = 1;
    o.chunk = WHOLE;
    ql_engine *engine = ql_test_open(&o);
    for (int32_t i = 0; i < N_REQUEST; i++) {
        want[i] = take(ql_test_generate(engine, &r[i]));
    }
    ql_engine_close(&engine);
    o.lanes = j->lanes;
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        o.chunk = chunks[c];
        engine = ql_test_open(&o);
        got = take(ql_test_generate(engine, &r[0]));
        same(&got, &want[0], &o, "alone", 0);
        ql_request_id id[N_REQUEST];
        for (int32_t i = N_REQUEST; i-- > 0;) {
            id[i] = ql_test_submit(engine, &r[i]);
        }
        for (int32_t i = 0; i < N_REQUEST; i++) {
            got = take(ql_test_wait(engine, id[i]));
            same(&got, &want[i], &o, "with 7 others", i);
        }
        ql_test_assert_idle(engine);
        ql_engine_close(&engine);
    }
    printf("# measured %-20s lanes %d %-30s crc %08x\n", j->model->name, j->lanes, j->mode->name, want[0].crc);
    fflush(stdout);
}

/* Bits that no setting can change would pass the test above. */
static void precisions_differ(void **state) {
    const job *j = *state;
    uint32_t crc[N_MODE];
    int32_t ids[70];
    ql_test_ids(3, j->model->vocab, ids, 70);
    for (int32_t i = 0; i < N_MODE; i++) {
        job k = {j->model, 1, &modes[i]};
        ql_options o = options_of(&k);
        ql_engine *engine = ql_test_open(&o);
        ql_request r = ql_test_request(ids, 70, 4);
        r.ignore_eos = 1;
        crc[i] = take(ql_test_generate(engine, &r)).crc;
        ql_engine_close(&engine);
        for (int32_t k2 = 0; k2 < i; k2++) {
            if (crc[i] == crc[k2]) {
                fail_msg("%s and %s give the same logits", modes[i].name, modes[k2].name);
            }
        }
    }
}

static void seeds(void **state) {
    const job *j = *state;
    need_gpus(j);
    answer want[8];
    for (int32_t lanes = 1; lanes <= j->lanes; lanes += j->lanes > 1 ? j->lanes - 1 : 1) {
        ql_options o = options_of(j);
        o.lanes = lanes;
        ql_engine *engine = ql_test_open(&o);
        int32_t n_equal = 0;
        for (int32_t i = 0; i < 8; i++) {
            ql_request r = ql_test_request(NULL, 0, 48);
            r.text = "The capital of France is";
            r.ignore_eos = 1;
            r.sampling = (ql_sampling){.temperature = 1.3f,
                                       .top_k = i % 2 ? 50 : 0,
                                       .top_p = 0.95f,
                                       .repetition_penalty = 1,
                                       .seed = (uint64_t)(i / 2)};
            answer got = take(ql_test_generate(engine, &r));
            want[i] = lanes == 1 ? got : want[i];
            same(&got, &want[i], &o, "sampled", i);
            n_equal += i > 1 && memcmp(got.ids, want[i - 2].ids, sizeof(int32_t) * 48) == 0;
        }
        assert_true(n_equal < 6); /* seeds matter */
        ql_engine_close(&engine);
    }
}

/* 1,000 greedy ids, many times, on one engine: an unordered addition or a race shows up as another CRC. */
static void long_greedy(void **state) {
    const job *j = *state;
    need_gpus(j);
    uint32_t crc = 0;
    int32_t *ids = calloc(LONG_IDS, sizeof *ids);
    assert_non_null(ids);
    for (int32_t lanes = 1; lanes <= j->lanes; lanes += j->lanes > 1 ? j->lanes - 1 : 1) {
        ql_options o = options_of(j);
        o.lanes = lanes;
        o.ctx = LONG_IDS + 64;
        ql_engine *engine = ql_test_open(&o);
        int32_t n = lanes == j->lanes ? on.repeats : 1;
        double s = 0;
        for (int32_t i = 0; i < n; i++) {
            ql_request r = ql_test_request(NULL, 0, LONG_IDS);
            r.text = "The capital of France is";
            r.ignore_eos = 1;
            ql_result *res = ql_test_generate(engine, &r);
            assert_int_equal(res->n_ids, LONG_IDS);
            if (lanes == 1 && i == 0) {
                crc = res->logits_crc32;
                memcpy(ids, res->ids, LONG_IDS * sizeof *ids);
            }
            int32_t at = 0;
            while (at < LONG_IDS && res->ids[at] == ids[at]) {
                at++;
            }
            if (at < LONG_IDS || res->logits_crc32 != crc) {
                fail_msg("%d lanes, repeat %d: ids equal up to %d of %d, crc %08x, first was %08x", lanes, i, at,
                         LONG_IDS, res->logits_crc32, crc);
            }
            s += res->decode_s;
            ql_result_free(res);
        }
        printf("# measured %-20s lanes %d %d times %d ids equal, crc %08x, %.0f ids/s with logits copied\n",
               j->model->name, lanes, n, LONG_IDS, crc, n * (LONG_IDS - 1) / s);
        fflush(stdout);
        ql_engine_close(&engine);
    }
    free(ids);
}

/* ---- what lanes hold, move and run ------------------------------------------------------------------------------- */

static ql_plan plan_of(const ql_options *o) {
    ql_checkpoint *ckpt = NULL;
    ql_error err = {0};
    ql_plan plan = {.size = sizeof plan};
    if (ql_checkpoint_open(&ckpt, o->model, &err) != QL_OK || ql_checkpoint_plan(ckpt, o, &plan, &err) != QL_OK) {
        fail_msg("plan of %s: %s", o->model, err.text);
    }
    ql_checkpoint_close(&ckpt);
    return plan;
}

static bool has_path(const ql_stats *s, const char *start, const char *end) {
    for (int32_t i = 0; i < s->n_paths; i++) {
        const char *slash = strchr(s->path[i].name, '/');
        size_t k = slash ? (size_t)(slash - s->path[i].name) : 0, n = strlen(end);
        if (strncmp(s->path[i].name, start, strlen(start)) == 0 && k >= n && memcmp(slash - n, end, n) == 0 &&
            s->path[i].calls > 0) {
            return true;
        }
    }
    return false;
}

static void check_paths(const ql_stats *s) {
    static const char *const must[][2] = {
        {"linear.", ".prompt"}, {"linear.", ".gen"}, {"embed", ""},   {"norm", ""},      {"gated_norm", ""},
        {"conv", ""},           {"gdn.", "prompt"},  {"gdn.", "gen"}, {"attn_prep", ""}, {"attention.", "prompt"},
        {"attention.", "gen"},  {"swiglu", ""},      {"topk", ""},    {"sample", ""}};
    for (size_t i = 0; i < sizeof must / sizeof *must; i++) {
        if (!has_path(s, must[i][0], must[i][1])) {
            fail_msg("no call of %s*%s was counted", must[i][0], must[i][1]);
        }
    }
    for (int32_t i = 0; i < s->n_paths; i++) {
        const char *slash = strchr(s->path[i].name, '/');
        if (!slash || strncmp(slash + 1, on.variant, strlen(on.variant)) != 0) {
            fail_msg("path %s does not run on %s", s->path[i].name, on.variant);
        }
        if (s->path[i].calls % (uint64_t)s->n_lanes != 0) {
            fail_msg("path %s: %llu calls of %d lanes", s->path[i].name, (unsigned long long)s->path[i].calls,
                     s->n_lanes);
        }
    }
}

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

static void held_and_moved(void **state) {
    const job *j = *state;
    need_gpus(j);
    ql_options o = options_of(j);
    o.mtp = j->model->mtp;
    ql_plan plan = plan_of(&o);
    ql_engine *engine = ql_test_open(&o);
    ql_stats s0 = ql_test_stats(engine), s1, s2;
    assert_int_equal(s0.device, on.device);
    assert_int_equal(s0.n_lanes, j->lanes);
    assert_int_equal(s0.slices, j->model->slices);
    for (int32_t i = 0; i < j->lanes; i++) {
        const ql_lane_stats *l = &s0.lane[i];
        const ql_lane_plan *p = &plan.lane[i];
        assert_true(l->weight_bytes > 0 && l->weight_bytes == p->weight_bytes);
        assert_true(l->scale_bytes == p->scale_bytes);
        assert_true(l->stored_weight_bytes == p->stored_weight_bytes && l->stored_scale_bytes == p->stored_scale_bytes);
        assert_true(l->kv_bytes == p->kv_bytes && l->state_bytes == p->state_bytes);
        assert_true(l->workspace_bytes == p->workspace_bytes);
        printf(
            "# measured %-20s lane %d of %d: %llu weight + %llu scale bytes; copied in %llu, out %llu while opening\n",
            j->model->name, i, j->lanes, (unsigned long long)l->weight_bytes, (unsigned long long)l->scale_bytes,
            (unsigned long long)l->h2d_bytes, (unsigned long long)l->d2h_bytes);
        if (on.device == QL_DEVICE_CUDA) {
            /* Every byte of the slice went in once, at the file's width or as held; besides that the rotary table and the
             * set of allowed ids. What came out are verdicts on the values. */
            uint64_t weight = larger(l->stored_weight_bytes, l->weight_bytes),
                     scale = larger(l->stored_scale_bytes, l->scale_bytes);
            uint64_t least = l->stored_weight_bytes + l->stored_scale_bytes;
            uint64_t other = (uint64_t)o.ctx * 256 + (uint64_t)j->model->vocab / 8 + 4096;
            least = least < l->weight_bytes + l->scale_bytes ? least : l->weight_bytes + l->scale_bytes;
            if (l->h2d_bytes < least * 98 / 100 || l->h2d_bytes > weight + scale + other) {
                fail_msg("lane %d copied in %llu bytes; the slice is %llu, tables are %llu", i,
                         (unsigned long long)l->h2d_bytes, (unsigned long long)(weight + scale),
                         (unsigned long long)other);
            }
            assert_true(l->d2h_bytes <= 16384 && l->d2h_bytes < l->weight_bytes / 8);
        }
    }

    /* Generating copies ids and log probabilities from lane 0, nothing from the others; with a CRC each lane's logits. */
    enum { N = 10 };
    int32_t ids[70];
    ql_test_ids(8, j->model->vocab < 1300 ? j->model->vocab : 1300, ids, 70);
    ql_request r = ql_test_request(ids, 70, N);
    r.ignore_eos = 1;
    r.crc = 0;
    ql_result_free(ql_test_generate(engine, &r));
    s1 = ql_test_stats(engine);
    r.crc = 1;
    ql_result_free(ql_test_generate(engine, &r));
    s2 = ql_test_stats(engine);
    for (int32_t i = 0; i < j->lanes && on.device == QL_DEVICE_CUDA; i++) {
        uint64_t chosen = i == 0 ? N * 8 : 0;
        uint64_t logits = (uint64_t)(plan.lane[i].vocab1 - plan.lane[i].vocab0) * 4 * N;
        uint64_t plain = s1.lane[i].d2h_bytes - s0.lane[i].d2h_bytes, crc = s2.lane[i].d2h_bytes - s1.lane[i].d2h_bytes;
        if (plain != chosen || crc != chosen + logits) {
            fail_msg("lane %d copied out %llu bytes for %d ids (expected %llu) and %llu with a CRC (expected %llu)", i,
                     (unsigned long long)plain, N, (unsigned long long)chosen, (unsigned long long)crc,
                     (unsigned long long)(chosen + logits));
        }
        /* A step's inputs go in; no weight goes in again. */
        assert_true(s2.lane[i].h2d_bytes - s0.lane[i].h2d_bytes < s0.lane[i].weight_bytes);
    }
    check_paths(&s2);
    for (int32_t i = 0; i < j->lanes; i++) {
        assert_true(s2.lane[i].weight_bytes == s0.lane[i].weight_bytes);
    }
    ql_engine_close(&engine);
    fflush(stdout);
}

/* ---- hooks into one lane ------------------------------------------------------------------------------------------- */

typedef enum site {
    AT_NONE,
    AT_LINEAR,
    AT_ATTENTION,
    AT_H2D,
    AT_SYNC,
    AT_REDUCE,
    AT_GATHER,
    AT_GRAPH,
    AT_ALLOC,
    AT_WEIGHT_LOAD,
    AT_WEIGHT_DATA
} site;
static const char *const site_names[] = {"nothing", "linear",       "attention", "h2d",         "sync",       "reduce",
                                         "gather",  "graph launch", "alloc",     "weight_load", "weight data"};

/* One for each engine opened with hooks; static, because a lane left behind would still read it. */
typedef struct planted {
    ql_ops table; /* first, so that dev->ops leads here */
    const ql_ops *ops;
    ql_status (*reduce)(ql_comm *comm, const float *src, float *dst, int64_t n);
    ql_status (*gather)(ql_comm *comm, const void *src, void *dst, size_t bytes);
    site site;
    int32_t lane;
    bool hang;
    int64_t after, calls;    /* atomic: calls to let pass once armed */
    int32_t armed, released; /* atomic */
    int64_t fired_ns;        /* atomic; 0: not yet */
    uint64_t free_bytes[MAX_LANES];
    int32_t left_behind; /* atomic: log lines about lanes that did not come back */
} planted;

static planted pool[64];
static int32_t n_pool;

static bool load_flag(const int32_t *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0; }
static planted *of(ql_dev *dev) { return (planted *)(uintptr_t)dev->ops; }

static ql_status trip(ql_dev *dev) {
    planted *f = of(dev);
    if (!load_flag(&f->armed) || __atomic_fetch_add(&f->calls, 1, __ATOMIC_RELAXED) != f->after) {
        return QL_OK;
    }
    __atomic_store_n(&f->fired_ns, ql_now_ns(), __ATOMIC_RELEASE);
    while (f->hang && !load_flag(&f->released)) {
        ql_sleep_ms(2);
    }
    return f->hang ? QL_OK
                   : ql_fail(dev->err, QL_ERR_DEVICE, "lane %d: injected fault in %s", f->lane, site_names[f->site]);
}

static ql_status bad_linear(ql_dev *dev, const ql_linear_args *a) {
    QL_TRY(trip(dev));
    return of(dev)->ops->linear(dev, a);
}

static ql_status bad_attention(ql_dev *dev, const ql_attention_args *a) {
    QL_TRY(trip(dev));
    return of(dev)->ops->attention(dev, a);
}

static ql_status bad_h2d(ql_dev *dev, void *dst, const void *src, size_t bytes) {
    QL_TRY(trip(dev));
    return of(dev)->ops->h2d(dev, dst, src, bytes);
}

static ql_status bad_sync(ql_dev *dev) {
    QL_TRY(trip(dev));
    return of(dev)->ops->sync(dev);
}

static ql_status bad_graph_launch(ql_dev *dev, void *graph) {
    QL_TRY(trip(dev));
    return of(dev)->ops->graph_launch(dev, graph);
}

static ql_status bad_alloc(ql_dev *dev, size_t bytes, const char *what, void **out) {
    QL_TRY(trip(dev));
    return of(dev)->ops->alloc(dev, bytes, what, out);
}

static ql_status bad_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    QL_TRY(trip(dev));
    return of(dev)->ops->weight_load(dev, src, out);
}

/* Loads other codes than the file's: one sign, or one mantissa bit of a plain format, at the slice's first element. */
static ql_status bad_weight_data(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    planted *f = of(dev);
    if (__atomic_fetch_add(&f->calls, 1, __ATOMIC_RELAXED) != f->after) {
        return f->ops->weight_load(dev, src, out);
    }
    size_t row = (size_t)ql_qformat_row_bytes(src->format, src->full_k), bytes = row * (size_t)src->full_n;
    uint8_t *data = malloc(bytes);
    if (!data) {
        return ql_fail(dev->err, QL_ERR_MEMORY, "test");
    }
    memcpy(data, src->data, bytes);
    data[(size_t)src->row0[0] * row + (size_t)ql_qformat_row_bytes(src->format, src->col0)] ^= 0x80;
    ql_weight_src changed = *src;
    changed.data = data;
    ql_status status = f->ops->weight_load(dev, &changed, out);
    status = status == QL_OK ? f->ops->sync(dev) : status;
    free(data);
    __atomic_store_n(&f->fired_ns, ql_now_ns(), __ATOMIC_RELEASE);
    return status;
}

static ql_status bad_reduce(ql_comm *comm, const float *src, float *dst, int64_t n) {
    QL_TRY(trip(comm->dev));
    return of(comm->dev)->reduce(comm, src, dst, n);
}

static ql_status bad_gather(ql_comm *comm, const void *src, void *dst, size_t bytes) {
    QL_TRY(trip(comm->dev));
    return of(comm->dev)->gather(comm, src, dst, bytes);
}

static void dev_opened(void *user, int32_t lane, ql_dev *dev) {
    planted *f = user;
    uint64_t total;
    if (on.device == QL_DEVICE_CUDA && ql_cuda_mem(dev, &f->free_bytes[lane], &total) != QL_OK) {
        f->free_bytes[lane] = 0;
    }
    if (lane != f->lane || f->site == AT_NONE) {
        return;
    }
    f->ops = dev->ops;
    f->table = *dev->ops;
    switch (f->site) {
    case AT_LINEAR: f->table.linear = bad_linear; break;
    case AT_ATTENTION: f->table.attention = bad_attention; break;
    case AT_H2D: f->table.h2d = bad_h2d; break;
    case AT_SYNC: f->table.sync = bad_sync; break;
    case AT_GRAPH: f->table.graph_launch = bad_graph_launch; break;
    case AT_ALLOC: f->table.alloc = bad_alloc; break;
    case AT_WEIGHT_LOAD: f->table.weight_load = bad_weight_load; break;
    case AT_WEIGHT_DATA: f->table.weight_load = bad_weight_data; break;
    case AT_NONE:
    case AT_REDUCE:
    case AT_GATHER: break;
    }
    dev->ops = &f->table;
}

static void comm_opened(void *user, int32_t lane, ql_comm *comm) {
    planted *f = user;
    if (lane != f->lane) {
        return;
    }
    f->reduce = comm->reduce;
    f->gather = comm->gather;
    if (f->site == AT_REDUCE) {
        comm->reduce = bad_reduce;
    } else if (f->site == AT_GATHER) {
        comm->gather = bad_gather;
    }
}

static void on_log(void *user, ql_log_level level, const char *line) {
    planted *f = user;
    (void)level;
    if (strstr(line, "did not come back")) {
        __atomic_fetch_add(&f->left_behind, 1, __ATOMIC_RELAXED);
    }
}

static planted *plant(site at, int32_t lane, bool hang, int64_t after) {
    assert_true(n_pool < (int32_t)(sizeof pool / sizeof *pool));
    planted *f = &pool[n_pool++];
    f->site = at;
    f->lane = lane;
    f->hang = hang;
    f->after = after;
    return f;
}

static ql_status open_planted(ql_engine **engine, const ql_options *options, planted *f, ql_error *err) {
    ql_options o = *options;
    const ql_test_hooks hooks = {.dev_opened = dev_opened, .comm_opened = comm_opened, .user = f};
    o.log = on_log;
    o.log_user = f;
    return ql_engine_open_hooked(engine, &o, &hooks, err);
}

/* ---- verify ---------------------------------------------------------------------------------------------------------- */

static void verify_reads_back(void **state) {
    const job *j = *state;
    need_gpus(j);
    ql_options o = options_of(j);
    o.mtp = j->model->mtp;
    o.verify = 1;
    ql_engine *engine = ql_test_open(&o);
    ql_stats s = ql_test_stats(engine);
    for (int32_t i = 0; i < j->lanes && on.device == QL_DEVICE_CUDA; i++) {
        assert_true(s.lane[i].d2h_bytes >= s.lane[i].stored_weight_bytes / 2);
    }
    ql_engine_close(&engine);
    for (int64_t k = 0; k < 12; k += 3) { /* one changed bit of one weight on the last lane is found */
        planted *f = plant(AT_WEIGHT_DATA, j->lanes - 1, false, k);
        ql_error err = {0};
        ql_status status = open_planted(&engine, &o, f, &err);
        assert_true(f->fired_ns != 0);
        if (status == QL_OK) {
            ql_engine_close(&engine);
            fail_msg("weight %d of lane %d is not the file's and --verify does not see it", (int)k, j->lanes - 1);
        }
        ql_test_assert_has(err.text, "CRC");
        assert_int_equal(f->left_behind, 0);
        n_pool--; /* nothing was left behind that could read it */
        *f = (planted){0};
    }
}

/* ---- faults ------------------------------------------------------------------------------------------------------- */

static const int32_t check_ids[9] = {5, 81, 3, 77, 290, 411, 6, 30, 255};

static uint32_t crc_of(ql_engine *engine) {
    ql_request r = ql_test_request(check_ids, 9, 6);
    r.ignore_eos = 1;
    return take(ql_test_generate(engine, &r)).crc;
}

static uint32_t crc_fresh(const ql_options *o, uint64_t *free_bytes) {
    planted *f = plant(AT_NONE, 0, false, 0);
    ql_engine *engine = NULL;
    ql_error err = {0};
    if (open_planted(&engine, o, f, &err) != QL_OK) {
        fail_msg("a fresh engine does not open: %s", err.text);
    }
    uint32_t crc = crc_of(engine);
    ql_engine_close(&engine);
    assert_int_equal(f->left_behind, 0);
    memcpy(free_bytes, f->free_bytes, sizeof f->free_bytes);
    n_pool--; /* nothing was left behind that could read it */
    *f = (planted){0};
    return crc;
}

/* The driver's and NCCL's own pools may keep this much. */
static void assert_memory_back(const uint64_t *before, const uint64_t *after, int32_t lanes, const char *what) {
    for (int32_t i = 0; i < lanes && on.device == QL_DEVICE_CUDA; i++) {
        assert_true(before[i] > 0);
        if (after[i] + (16u << 20) < before[i]) {
            fail_msg("%s: lane %d has %llu bytes free, %llu before", what, i, (unsigned long long)after[i],
                     (unsigned long long)before[i]);
        }
    }
}

static int32_t n_token; /* atomic */

static void count_tokens(void *user, const ql_event *event) {
    int64_t *end_ns = user;
    if (event->kind == QL_EVENT_TOKEN) {
        __atomic_fetch_add(&n_token, 1, __ATOMIC_RELAXED);
    } else if (event->kind == QL_EVENT_END) {
        __atomic_store_n(end_ns, ql_now_ns(), __ATOMIC_RELEASE);
    }
}

/* One sequence generates; once armed, a second one's prompt comes, so that ops outside recorded steps are reached too. */
static void fault(const job *j, site at, int32_t lane, bool hang) {
    enum { WAIT_MS = 3000 };
    char what[96];
    snprintf(what, sizeof what, "%s in %s on lane %d of %d", hang ? "hang" : "error", site_names[at], lane, j->lanes);
    ql_options o = options_of(j);
    o.wait_ms = WAIT_MS;
    uint64_t before[MAX_LANES], after[MAX_LANES];
    uint32_t want = crc_fresh(&o, before);
    planted *f = plant(at, lane, hang, 1);
    ql_engine *engine = NULL;
    ql_error err = {0};
    if (open_planted(&engine, &o, f, &err) != QL_OK) {
        fail_msg("%s: open: %s", what, err.text);
    }
    __atomic_store_n(&n_token, 0, __ATOMIC_RELAXED);
    int64_t end_ns = 0;
    ql_request r = ql_test_request(check_ids, 9, 480);
    r.ignore_eos = 1;
    r.crc = 0;
    ql_request_id first, second = 0;
    assert_int_equal(ql_submit(engine, &r, count_tokens, &end_ns, &first, &err), QL_OK);
    while (__atomic_load_n(&n_token, __ATOMIC_RELAXED) < 8) {
        ql_sleep_ms(1);
    }
    __atomic_store_n(&f->armed, 1, __ATOMIC_RELEASE);
    ql_status submitted = ql_submit(engine, &r, NULL, NULL, &second, &err);
    assert_true(submitted == QL_OK || submitted == QL_ERR_STATE);
    ql_result *res = NULL;
    ql_status status = ql_wait(engine, first, &res, &err);
    int64_t fired = __atomic_load_n(&f->fired_ns, __ATOMIC_ACQUIRE);
    if (!fired) {
        fail_msg("%s: never reached", what);
    }
    if (status != QL_ERR_DEVICE) {
        fail_msg("%s: status %s: %s", what, ql_status_text(status), err.text);
    }
    char named[32];
    snprintf(named, sizeof named, "lane %d", lane);
    ql_test_assert_has(err.text, hang ? named : "injected fault");
    ql_result_free(res);
    if (submitted == QL_OK) {
        assert_int_equal(ql_wait(engine, second, &res, NULL), QL_ERR_DEVICE);
        ql_result_free(res);
    }
    double took = (double)(__atomic_load_n(&end_ns, __ATOMIC_ACQUIRE) - fired) * 1e-9;
    if (took > LIMIT_S + (hang ? WAIT_MS * 1e-3 : 0)) {
        fail_msg("%s: the caller got its error after %.2f s", what, took);
    }
    __atomic_store_n(&f->released, 1, __ATOMIC_RELEASE);
    int64_t t0 = ql_now_ns();
    ql_engine_close(&engine);
    double close_s = ql_seconds_since(t0);
    if (f->left_behind || close_s > LIMIT_S) {
        fail_msg("%s: close took %.2f s, %d lanes left behind; the error was: %s", what, close_s, f->left_behind,
                 err.text);
    }
    assert_int_equal(crc_fresh(&o, after), want);
    assert_memory_back(before, after, j->lanes, what);
    printf("# measured %-44s error after %.3f s, closed in %.3f s: %s\n", what, took, close_s, err.text);
    fflush(stdout);
}

static void faults(void **state) {
    const job *j = *state;
    need_gpus(j);
    static const site sites[] = {AT_LINEAR, AT_ATTENTION, AT_H2D, AT_SYNC, AT_GRAPH, AT_REDUCE, AT_GATHER};
    for (size_t i = 0; i < sizeof sites / sizeof *sites; i++) {
        bool is_comm = sites[i] == AT_REDUCE || sites[i] == AT_GATHER;
        if ((is_comm && j->lanes == 1) || (sites[i] == AT_GRAPH && on.device == QL_DEVICE_HOST)) {
            continue;
        }
        fault(j, sites[i], j->lanes - 1, false);
    }
}

static void hangs(void **state) {
    const job *j = *state;
    need_gpus(j);
    fault(j, AT_SYNC, j->lanes - 1, true);
    fault(j, AT_LINEAR, j->lanes - 1, true);
    if (on.device == QL_DEVICE_CUDA) {
        fault(j, AT_GRAPH, j->lanes - 1, true);
    }
    if (j->lanes > 1) {
        fault(j, AT_GATHER, 1, true);
        fault(j, AT_REDUCE, 0, true);
    }
}

static void faults_while_opening(void **state) {
    const job *j = *state;
    need_gpus(j);
    ql_options o = options_of(j);
    uint64_t before[MAX_LANES], after[MAX_LANES];
    uint32_t want = crc_fresh(&o, before);
    static const struct {
        site at;
        int64_t after;
    } trials[] = {{AT_ALLOC, 0}, {AT_ALLOC, 5}, {AT_WEIGHT_LOAD, 0}, {AT_WEIGHT_LOAD, 7}, {AT_H2D, 2}};
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) {
        planted *f = plant(trials[i].at, j->lanes - 1, false, trials[i].after);
        f->armed = 1;
        ql_engine *engine = NULL;
        ql_error err = {0};
        ql_status status = open_planted(&engine, &o, f, &err);
        double took = ql_seconds_since(f->fired_ns);
        assert_true(f->fired_ns != 0);
        assert_null(engine);
        assert_int_equal(status, QL_ERR_DEVICE);
        ql_test_assert_has(err.text, "injected fault");
        if (took > LIMIT_S || f->left_behind) {
            fail_msg("error in %s: open took %.2f s more, %d lanes left behind", site_names[trials[i].at], took,
                     f->left_behind);
        }
    }
    assert_int_equal(crc_fresh(&o, after), want);
    assert_memory_back(before, after, j->lanes, "opens that failed");
}

/* ---- life of engines ----------------------------------------------------------------------------------------------- */

static int32_t count_threads(void) {
    int32_t n = 0;
    DIR *dir = opendir("/proc/self/task");
    assert_non_null(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        n += e->d_name[0] != '.';
    }
    closedir(dir);
    return n;
}

static void open_and_close(void **state) {
    const job *j = *state;
    need_gpus(j);
    ql_options o = options_of(j);
    uint64_t first[MAX_LANES] = {0}, now[MAX_LANES];
    int32_t threads = 0;
    uint32_t want = 0;
    int64_t t0 = ql_now_ns();
    for (int32_t i = 0; i < OPENS; i++) {
        uint32_t crc = crc_fresh(&o, now);
        want = i ? want : crc;
        assert_int_equal(crc, want);
        if (i == 1) { /* the first open pays for contexts and libraries that stay */
            memcpy(first, now, sizeof first);
            threads = count_threads();
        }
    }
    printf("# measured %-20s lanes %d %d opens, %.2f s each; free on lane 0 %.0f MiB, then %.0f; threads %d, then %d\n",
           j->model->name, j->lanes, OPENS, ql_seconds_since(t0) / OPENS, (double)first[0] / 0x1p20,
           (double)now[0] / 0x1p20, threads, count_threads());
    fflush(stdout);
    assert_memory_back(first, now, j->lanes, "open and close");
    assert_true(count_threads() <= threads);
}

static void two_engines(void **state) {
    const job *j = *state;
    need_gpus(j);
    enum { N_EACH = 4 };
    const job jobs[2] = {*j, {ql_test_model_named("micro-mixed"), j->lanes, NULL}};
    ql_engine *engine[2] = {NULL, NULL};
    answer want[2][N_EACH];
    ql_request r[N_EACH];
    for (int32_t i = 0; i < N_EACH; i++) {
        r[i] = ql_test_request(check_ids, 9 - i, 64);
        r[i].ignore_eos = 1;
    }
    for (int32_t k = 0; k < 2; k++) {
        ql_options o = options_of(&jobs[k]);
        engine[k] = ql_test_open(&o);
        for (int32_t i = 0; i < N_EACH; i++) {
            want[k][i] = take(ql_test_generate(engine[k], &r[i]));
        }
    }
    for (int32_t round = 0; round < 3; round++) {
        ql_request_id id[2][N_EACH];
        for (int32_t i = 0; i < 2 * N_EACH; i++) {
            id[i % 2][i / 2] = ql_test_submit(engine[i % 2], &r[i / 2]);
        }
        for (int32_t i = 0; i < 2 * N_EACH; i++) {
            ql_options o = options_of(&jobs[i % 2]);
            answer got = take(ql_test_wait(engine[i % 2], id[i % 2][i / 2]));
            same(&got, &want[i % 2][i / 2], &o, "beside another engine", i / 2);
        }
    }
    ql_engine_close(&engine[0]);
    answer got = take(ql_test_generate(engine[1], &r[0])); /* one ends, the other goes on */
    ql_options o = options_of(&jobs[1]);
    same(&got, &want[1][0], &o, "after another engine", 0);
    ql_engine_close(&engine[1]);
}

static void callers_device_stays(void **state) {
    const job *j = *state;
    need_gpus(j);
    if (on.device == QL_DEVICE_HOST) {
        skip();
    }
    int device = -1;
    assert_int_equal(cudaSetDevice(on.n_gpu - 1), cudaSuccess);
    ql_options o = options_of(j);
    ql_engine *engine = ql_test_open(&o);
    assert_int_equal(cudaGetDevice(&device), cudaSuccess);
    assert_int_equal(device, on.n_gpu - 1);
    crc_of(engine);
    ql_test_stats(engine);
    ql_engine_close(&engine);
    assert_int_equal(cudaGetDevice(&device), cudaSuccess);
    assert_int_equal(device, on.n_gpu - 1);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
}

static void refusals(void **state) {
    const job *j = *state;
    if (on.device == QL_DEVICE_HOST) {
        skip();
    }
    ql_options o = options_of(j);
    char text[32];
    if (on.n_gpu < 8) {
        o = options_of(&(job){ql_test_model_named("micro-lanes8"), 8, NULL});
        snprintf(text, sizeof text, "this machine has %d", on.n_gpu);
        ql_test_open_fails(&o, QL_ERR_DEVICE, "8 lanes", text, NULL);
    }
    o = options_of(j);
    o.lanes = 3;
    ql_test_open_fails(&o, QL_ERR_USAGE, "1, 2, 4", NULL);
    o = options_of(j);
    const int32_t none[1] = {99}, twice[2] = {0, 0};
    o.devices = none;
    o.lanes = 1;
    ql_test_open_fails(&o, QL_ERR_DEVICE, "99", NULL);
    o.devices = twice;
    o.lanes = 2;
    ql_test_open_fails(&o, QL_ERR_USAGE, "GPU 0", "two lanes", NULL);
    o = options_of(j);
    o.mem_bytes = 1 << 20;
    ql_test_open_fails(&o, QL_ERR_MEMORY, "largest context", NULL);
}

/* ---- main ----------------------------------------------------------------------------------------------------------- */

enum { MAX_TESTS = 256 };
static struct CMUnitTest tests[MAX_TESTS];
static job jobs[MAX_TESTS];
static char names[MAX_TESTS][96];
static int32_t n_test;

static void add(const char *name, CMUnitTestFunction run, const ql_test_model *model, int32_t lanes, const mode *m) {
    assert_true(n_test < MAX_TESTS);
    jobs[n_test] = (job){model, lanes, m};
    snprintf(names[n_test], sizeof names[0], "%s %s lanes %d%s%s", name, model->name, lanes, m ? " " : "",
             m ? m->name : "");
    tests[n_test] = (struct CMUnitTest){names[n_test], run, NULL, NULL, &jobs[n_test]};
    n_test++;
}

/* Faults last: what they could leave behind must not colour the rest. */
static void list_tests(void) {
    const ql_test_model *tiny = ql_test_model_named("tiny"), *mixed = ql_test_model_named("micro-mixed");
    for (int32_t i = 0; i < QL_TEST_MODELS; i++) {
        const ql_test_model *m = &ql_test_models[i];
        for (int32_t l = 0; l < m->n_lanes; l++) {
            for (int32_t k = 0; k < N_MODE; k++) {
                add("golden", golden, m, m->lanes[l], &modes[k]);
            }
            add("bits", bits, m, m->lanes[l], &modes[1]);
            add("bits", bits, m, m->lanes[l], &modes[2]);
            add("held_and_moved", held_and_moved, m, m->lanes[l], NULL);
            add("verify", verify_reads_back, m, m->lanes[l], NULL);
        }
        add("precisions_differ", precisions_differ, m, 1, NULL);
    }
    add("refusals", refusals, tiny, 1, NULL);
    for (int32_t l = 0; l < tiny->n_lanes; l++) {
        add("text", text_as_on_the_host, tiny, tiny->lanes[l], NULL);
        add("seeds", seeds, tiny, tiny->lanes[l], NULL);
        add("long_greedy", long_greedy, tiny, tiny->lanes[l], NULL);
    }
    for (int32_t l = 0; l < mixed->n_lanes; l++) {
        add("callers_device_stays", callers_device_stays, mixed, mixed->lanes[l], NULL);
        add("two_engines", two_engines, tiny, mixed->lanes[l], NULL);
        add("open_and_close", open_and_close, mixed, mixed->lanes[l], NULL);
    }
    for (int32_t l = 0; l < mixed->n_lanes; l++) {
        add("faults_while_opening", faults_while_opening, mixed, mixed->lanes[l], NULL);
        add("faults", faults, mixed, mixed->lanes[l], NULL);
        add("hangs", hangs, mixed, mixed->lanes[l], NULL);
    }
}

int main(int argc, char **argv) {
    on.device = argc > 3 && strcmp(argv[3], "host") == 0 ? QL_DEVICE_HOST : QL_DEVICE_CUDA;
    on.repeats = argc > 2 ? atoi(argv[2]) : 20;
    on.n_gpu = MAX_LANES;
    on.variant = "";
    if (on.repeats < 1) {
        fprintf(stderr, "gate: REPEATS is %s; it must be 1 or more\n", argv[2]);
        return 2;
    }
    if (on.device == QL_DEVICE_CUDA) {
        char why[96] = "";
        on.n_gpu = ql_cuda_count(why);
        on.variant = "cuda";
        if (on.n_gpu == 0) {
            fprintf(stderr, "gate: no usable GPU%s%s\n", why[0] ? ": " : "", why);
            return 1;
        }
    }
    ql_test_begin(argc, argv, 1200);
    list_tests();
    int n_fail = cmocka_run_group_tests_name("gate", tests, NULL, NULL);
    fflush(NULL);
    _exit(n_fail ? 1 : 0); /* not exit: a lane that a failed test left behind may still be in the driver */
}
