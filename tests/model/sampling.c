/* Sampling on whole models against a plain second implementation of the settings, fed with the logits that a probe
 * delivers: what each step chose under penalties, how first ids are distributed over thousands of seeds, log
 * probabilities; and seeds, limits of the vocabulary, settings from generation_config.json.
 */
#include "tests/model/common.h"

#include <math.h>

static const ql_sampling neutral = {.top_p = 1, .repetition_penalty = 1};

static ql_result *sample(ql_engine *engine, const int32_t *ids, int32_t n_ids, int32_t max_new, ql_sampling how) {
    ql_request r = ql_test_request(ids, n_ids, max_new);
    r.ignore_eos = 1;
    r.sampling = how;
    return ql_test_generate(engine, &r);
}

static void same_ids(const ql_result *a, const ql_result *b) {
    assert_int_equal(a->n_ids, b->n_ids);
    assert_memory_equal(a->ids, b->ids, (size_t)a->n_ids * sizeof *a->ids);
}

/* ---- the second implementation ------------------------------------------------------------------------------------ */

typedef struct chance {
    int32_t id;
    double key, p;
} chance;

static int by_key(const void *a, const void *b) {
    const chance *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? 1 : -1) : x->id - y->id;
}

/* The ids that may be drawn, likeliest first, with their probabilities. Returns how many. */
static int32_t distribution(const float *logits, int32_t vocab, ql_sampling how, chance *c) {
    for (int32_t i = 0; i < vocab; i++) {
        c[i] = (chance){i, (double)logits[i], 0};
    }
    qsort(c, (size_t)vocab, sizeof *c, by_key);
    int32_t n = how.top_k > 0 && how.top_k < vocab ? how.top_k : vocab;
    double total = 0, sum = 0;
    for (int32_t i = 0; i < n; i++) {
        c[i].p = exp((c[i].key - c[0].key) / (double)how.temperature);
        total += c[i].p;
    }
    int32_t kept = 0;
    while (kept < n && sum < (double)how.top_p * total) {
        sum += c[kept++].p;
    }
    while (kept > 1 && c[kept - 1].p < (double)how.min_p * c[0].p) {
        kept--;
    }
    total = 0;
    for (int32_t i = 0; i < kept; i++) {
        total += c[i].p;
    }
    for (int32_t i = 0; i < kept; i++) {
        c[i].p /= total;
    }
    return kept;
}

static double log_softmax(const float *logits, int32_t vocab, int32_t id) {
    double max = -INFINITY, sum = 0;
    for (int32_t i = 0; i < vocab; i++) {
        max = (double)logits[i] > max ? (double)logits[i] : max;
    }
    for (int32_t i = 0; i < vocab; i++) {
        sum += exp((double)logits[i] - max);
    }
    return (double)logits[id] - max - log(sum);
}

/* Chi-square's value that one in a million exceeds, after Wilson and Hilferty. */
static double chi_square_limit(int32_t freedom) {
    double f = 2.0 / (9.0 * freedom), z = 4.753;
    return freedom * pow(1 - f + z * sqrt(f), 3);
}

/* ---- tests ----------------------------------------------------------------------------------------------------------- */

static void narrowest_settings_are_greedy(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("micro-mixed"), 2);
    ql_engine *engine = ql_test_open(&o);
    int32_t ids[20];
    ql_test_ids(11, 512, ids, 20);
    ql_result *greedy = sample(engine, ids, 20, 24, neutral);
    for (int32_t i = 0; i < 3; i++) {
        ql_sampling how = neutral;
        how.temperature = 1.5f;
        how.seed = 100 + (uint64_t)i;
        how.top_k = i == 0 ? 1 : 0;
        how.top_p = i == 1 ? 1e-5f : 1;
        how.min_p = i == 2 ? 1 : 0;
        ql_result *res = sample(engine, ids, 20, 24, how);
        same_ids(res, greedy);
        ql_result_free(res);
    }
    ql_result_free(greedy);
    ql_engine_close(&engine);
}

static void seeds(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("micro-bf16"), 2);
    ql_engine *engine = ql_test_open(&o);
    int32_t ids[20];
    ql_test_ids(12, 512, ids, 20);
    ql_result *res[12];
    for (int32_t i = 0; i < 12; i++) {
        ql_sampling how = neutral;
        how.temperature = 0.8f;
        how.top_k = 50;
        how.seed = (uint64_t)(i % 11); /* the last repeats the first */
        res[i] = sample(engine, ids, 20, 16, how);
    }
    same_ids(res[0], res[11]);
    assert_int_equal(res[0]->logits_crc32, res[11]->logits_crc32);
    for (int32_t i = 0; i < 11; i++) {
        for (int32_t j = 0; j < i; j++) {
            assert_true(memcmp(res[i]->ids, res[j]->ids, 16 * sizeof(int32_t)) != 0);
        }
    }
    for (int32_t i = 0; i < 12; i++) {
        ql_result_free(res[i]);
    }
    ql_engine_close(&engine);
}

/* Every step's choice, recomputed from the step's logits and what came before. */
static void penalties_step_by_step(void **state) {
    (void)state;
    static const ql_sampling cases[] = {
        {.top_p = 1, .repetition_penalty = 1.3f},
        {.top_p = 1, .repetition_penalty = 0.8f},
        {.top_p = 1, .repetition_penalty = 1, .presence_penalty = 1.5f},
        {.top_p = 1, .repetition_penalty = 1, .frequency_penalty = 0.7f},
        {.top_p = 1, .repetition_penalty = 1, .frequency_penalty = -0.5f},
        {.top_p = 1, .repetition_penalty = 1.1f, .presence_penalty = 0.4f, .frequency_penalty = 0.3f},
    };
    enum { NEW = 60 };
    const ql_test_model *model = ql_test_model_named("tiny");
    ql_options o = ql_test_options(model, 2);
    ql_engine *engine = ql_test_open(&o);
    ql_request plain = ql_test_ask("The capital of France is", NEW);
    plain.ignore_eos = 1;
    ql_result *greedy = ql_test_generate(engine, &plain);
    int32_t most_greedy = 0, n_changed = 0;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        ql_sampling how = cases[k];
        ql_test_probe probe = {0};
        ql_request r = plain;
        r.sampling = how;
        r.probe = ql_test_probe_fn;
        r.probe_user = &probe;
        ql_result *res = ql_test_generate(engine, &r);
        assert_false(probe.bad);
        assert_int_equal(probe.logits.n, res->n_prompt + NEW - 1);
        int32_t vocab = probe.logits.width, valid = ql_tokenizer_size(ql_engine_tokenizer(engine));
        int32_t count[2048] = {0};
        bool in_prompt[2048] = {false};
        for (int32_t i = 0; i < res->n_prompt; i++) {
            in_prompt[res->prompt_ids[i]] = true;
        }
        int32_t most = 0;
        for (int32_t i = 0; i < NEW; i++) {
            const float *logits = probe.logits.values + (int64_t)(res->n_prompt - 1 + i) * vocab;
            int32_t best = -1;
            float best_key = 0;
            for (int32_t id = 0; id < valid; id++) {
                float key = logits[id];
                if (in_prompt[id] || count[id]) {
                    key = key > 0 ? key / how.repetition_penalty : key * how.repetition_penalty;
                }
                key -= count[id] ? how.presence_penalty : 0;
                key -= how.frequency_penalty * (float)count[id];
                if (best < 0 || key > best_key) {
                    best = id;
                    best_key = key;
                }
            }
            if (res->ids[i] != best) {
                fail_msg("case %d: step %d chose %d, expected %d", (int)k, i, res->ids[i], best);
            }
            assert_true(fabs((double)res->logprobs[i] - log_softmax(logits, vocab, best)) < 1e-5);
            count[best]++;
            most = count[best] > most ? count[best] : most;
        }
        n_changed += memcmp(res->ids, greedy->ids, sizeof(int32_t) * NEW) != 0;
        if (k == 0) {
            memset(count, 0, sizeof count);
            for (int32_t i = 0; i < NEW; i++) {
                int32_t c = ++count[greedy->ids[i]];
                most_greedy = c > most_greedy ? c : most_greedy;
            }
        }
        if (how.frequency_penalty >= 0.7f && most >= most_greedy) {
            fail_msg("frequency penalty: an id came %d times, without it %d", most, most_greedy);
        }
        ql_test_probe_free(&probe);
        ql_result_free(res);
    }
    assert_true(n_changed >= 3); /* else the penalties were too weak to be seen */
    ql_result_free(greedy);
    ql_engine_close(&engine);
}

enum { VOCAB = 512, DRAWS = 3000, BATCH = 50 };

static void first_ids_follow_the_distribution(void **state) {
    (void)state;
    static const ql_sampling cases[] = {
        {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
        {.temperature = 0.5f, .top_k = 8, .top_p = 1, .repetition_penalty = 1},
        {.temperature = 1.3f, .top_p = 0.6f, .repetition_penalty = 1},
        {.temperature = 1.2f, .top_p = 1, .min_p = 0.15f, .repetition_penalty = 1},
        {.temperature = 1.4f, .top_k = 40, .top_p = 0.8f, .min_p = 0.1f, .repetition_penalty = 1},
    };
    ql_options o = ql_test_options(ql_test_model_named("micro-bf16"), 2);
    o.ctx = 64;
    o.max_seqs = BATCH;
    ql_engine *engine = ql_test_open(&o);
    const int32_t prompt[1] = {200};
    ql_test_probe probe = {0};
    ql_request r = ql_test_request(prompt, 1, 1);
    r.probe = ql_test_probe_fn;
    r.probe_user = &probe;
    ql_result_free(ql_test_generate(engine, &r));
    assert_int_equal(probe.logits.n, 1);
    assert_int_equal(probe.logits.width, VOCAB);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        static chance c[VOCAB];
        int32_t n = distribution(probe.logits.values, VOCAB, cases[k], c), place[VOCAB], hits[VOCAB] = {0};
        for (int32_t i = 0; i < VOCAB; i++) {
            place[i] = -1;
        }
        for (int32_t i = 0; i < n; i++) {
            place[c[i].id] = i;
        }
        /* neighbouring seeds, in four bins of about equal mass: a draw must not tell the next */
        double below = 0;
        int32_t quarter[VOCAB], pairs[4][4] = {{0}}, last = -1;
        double mass[4] = {0};
        for (int32_t i = 0; i < n; i++) {
            quarter[i] = (int32_t)fmin(3, 4 * (below + c[i].p / 2));
            below += c[i].p;
            mass[quarter[i]] += c[i].p;
        }
        for (int32_t first = 0; first < DRAWS; first += BATCH) {
            ql_request_id id[BATCH];
            for (int32_t i = 0; i < BATCH; i++) {
                ql_request q = ql_test_request(prompt, 1, 1);
                q.crc = 0;
                q.sampling = cases[k];
                q.sampling.seed = (uint64_t)(first + i);
                id[i] = ql_test_submit(engine, &q);
            }
            for (int32_t i = 0; i < BATCH; i++) {
                ql_result *res = ql_test_wait(engine, id[i]);
                int32_t at = place[res->ids[0]];
                if (at < 0) {
                    fail_msg("case %d seed %d drew %d, which the settings exclude", (int)k, first + i, res->ids[0]);
                }
                hits[at]++;
                if (last >= 0) {
                    pairs[last][quarter[at]]++;
                }
                last = quarter[at];
                ql_result_free(res);
            }
        }
        double chi = 0, expected = 0, got = 0;
        int32_t bins = 0;
        for (int32_t i = 0; i < n; i++) { /* ids that are too rare on their own are counted together */
            expected += c[i].p * DRAWS;
            got += hits[i];
            if (expected >= 8 || i == n - 1) {
                chi += expected > 0 ? (got - expected) * (got - expected) / expected : 0;
                bins++;
                expected = got = 0;
            }
        }
        double chi_pairs = 0;
        for (int32_t i = 0; i < 4; i++) {
            for (int32_t j = 0; j < 4; j++) {
                double want = mass[i] * mass[j] * (DRAWS - 1);
                chi_pairs += want > 0 ? (pairs[i][j] - want) * (pairs[i][j] - want) / want : 0;
            }
        }
        printf("  case %d: %3d ids may be drawn; chi-square %.1f over %d bins (limit %.1f); neighbours %.1f (limit "
               "%.1f)\n",
               (int)k, n, chi, bins, chi_square_limit(bins - 1), chi_pairs, chi_square_limit(15));
        fflush(stdout);
        assert_true(bins >= 5);
        assert_true(chi < chi_square_limit(bins - 1));
        assert_true(chi_pairs < chi_square_limit(15));
    }
    ql_test_probe_free(&probe);
    ql_test_assert_idle(engine);
    ql_engine_close(&engine);
}

/* Rows of the vocabulary that are padding have logits too. At temperature 100 all ids are about equally likely. */
static void padding_is_never_drawn(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("tiny"), 4);
    ql_engine *engine = ql_test_open(&o);
    int32_t valid = ql_tokenizer_size(ql_engine_tokenizer(engine)), n_high = 0;
    assert_true(valid < 1344);
    const int32_t prompt[1] = {261};
    ql_sampling how = neutral;
    how.temperature = 100;
    for (int32_t i = 0; i < 4; i++) {
        how.seed = (uint64_t)i;
        ql_result *res = sample(engine, prompt, 1, 400, how);
        for (int32_t j = 0; j < res->n_ids; j++) {
            assert_true(res->ids[j] < valid);
            n_high += res->ids[j] >= valid - 22;
        }
        ql_result_free(res);
    }
    assert_true(n_high > 5); /* as many ids as are padding, just below it: 26 expected */
    ql_engine_close(&engine);
}

static void settings_of_the_model(void **state) {
    (void)state;
    ql_options o = ql_test_options(ql_test_model_named("tiny"), 1);
    ql_engine *engine = ql_test_open(&o);
    ql_request r = ql_request_default();
    r.text = "One Monday,";
    r.max_new = 40;
    r.ignore_eos = 1;
    r.sampling.seed = 9;
    assert_true(r.model_sampling);
    ql_result *own = ql_test_generate(engine, &r);
    r.model_sampling = 0;
    r.sampling.temperature = 0.6f;
    r.sampling.top_k = 20;
    r.sampling.top_p = 0.95f;
    ql_result *given = ql_test_generate(engine, &r);
    same_ids(own, given);
    r.sampling.temperature = 0;
    ql_result *greedy = ql_test_generate(engine, &r);
    assert_true(memcmp(own->ids, greedy->ids, 40 * sizeof(int32_t)) != 0);
    ql_result_free(own);
    ql_result_free(given);
    ql_result_free(greedy);
    ql_engine_close(&engine);

    o = ql_test_options(ql_test_model_named("micro-bf16"), 1); /* no generation_config.json: greedy */
    engine = ql_test_open(&o);
    const int32_t prompt[2] = {7, 9};
    ql_request q = ql_test_request(prompt, 2, 10);
    ql_result *a = ql_test_generate(engine, &q);
    q.model_sampling = 1;
    q.sampling = (ql_sampling){.temperature = 2, .top_p = 1, .repetition_penalty = 1, .seed = 3};
    ql_result *b = ql_test_generate(engine, &q);
    same_ids(a, b);
    ql_result_free(a);
    ql_result_free(b);
    ql_engine_close(&engine);
}

int main(int argc, char **argv) {
    ql_test_begin(argc, argv, 600);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(narrowest_settings_are_greedy), cmocka_unit_test(seeds),
        cmocka_unit_test(penalties_step_by_step),        cmocka_unit_test(first_ids_follow_the_distribution),
        cmocka_unit_test(padding_is_never_drawn),        cmocka_unit_test(settings_of_the_model),
    };
    return cmocka_run_group_tests_name("sampling", tests, NULL, NULL);
}
