#include "tests/model/sense.h"

#include "runtime/engine/test_hooks.h"

static ql_result *say(ql_engine *engine, const char *text, int32_t max_new, const char *stop) {
    ql_request r = ql_test_ask(text, max_new);
    r.stop = &stop;
    r.n_stop = stop ? 1 : 0;
    return ql_test_generate(engine, &r);
}

/* Distinct ids in every window of 50 as a share of the window: the least of them. */
static double least_varied(const int32_t *ids, int32_t n) {
    double least = 1;
    for (int32_t from = 0; from + 50 <= n; from++) {
        int32_t distinct = 0;
        for (int32_t i = from; i < from + 50; i++) {
            bool again = false;
            for (int32_t j = from; j < i; j++) {
                again |= ids[j] == ids[i];
            }
            distinct += !again;
        }
        least = distinct / 50.0 < least ? distinct / 50.0 : least;
    }
    return least;
}

/* Sentences "The capital of X is Y." in the text, and how many of them are among the true ones in `facts`. */
static void count_capitals(const char *text, int32_t *n, int32_t *n_true) {
    static const char facts[] =
        "France Paris|Germany Berlin|Italy Rome|Spain Madrid|Portugal Lisbon|Austria Vienna|"
        "Belgium Brussels|Greece Athens|Ireland Dublin|Norway Oslo|Sweden Stockholm|"
        "Finland Helsinki|Denmark Copenhagen|Poland Warsaw|Hungary Budapest|Romania Bucharest|"
        "Bulgaria Sofia|Serbia Belgrade|Croatia Zagreb|Slovenia Ljubljana|Slovakia Bratislava|"
        "Ukraine Kyiv|Estonia Tallinn|Latvia Riga|Lithuania Vilnius|Iceland Reykjavik|"
        "Malta Valletta|Cyprus Nicosia|Albania Tirana|Armenia Yerevan|Georgia Tbilisi|"
        "Turkey Ankara|Russia Moscow|Egypt Cairo|Morocco Rabat|Algeria Algiers|Tunisia Tunis|"
        "Libya Tripoli|Sudan Khartoum|Kenya Nairobi|Ghana Accra|Nigeria Abuja|Senegal Dakar|"
        "Mali Bamako|Angola Luanda|Zambia Lusaka|Rwanda Kigali|Uganda Kampala|Japan Tokyo|"
        "China Beijing|India New Delhi|Nepal Kathmandu|Thailand Bangkok|Vietnam Hanoi|"
        "Laos Vientiane|Malaysia Kuala Lumpur|Indonesia Jakarta|Mongolia Ulaanbaatar|"
        "Pakistan Islamabad|Iran Tehran|Iraq Baghdad|Jordan Amman|Lebanon Beirut|Qatar Doha|"
        "Oman Muscat|Kuwait Kuwait City|Canada Ottawa|Mexico Mexico City|Cuba Havana|"
        "Jamaica Kingston|Panama Panama City|Peru Lima|Chile Santiago|Argentina Buenos Aires|"
        "Brazil Brasilia|Uruguay Montevideo|Paraguay Asuncion|Colombia Bogota|Venezuela Caracas|"
        "Ecuador Quito|Australia Canberra|Fiji Suva|Samoa Apia|Tonga Nukualofa|";
    *n = *n_true = 0;
    static const char head[] = "The capital of ";
    for (const char *p = strstr(text, head); p; p = strstr(p, head)) {
        p += sizeof head - 1;
        const char *is = strstr(p, " is "), *dot = strchr(p, '.');
        if (!is || !dot || dot < is) {
            continue;
        }
        char fact[128];
        snprintf(fact, sizeof fact, "%.*s %.*s|", (int)(is - p), p, (int)(dot - is - 4), is + 4);
        ++*n;
        *n_true += strstr(facts, fact) != NULL;
    }
}

void ql_test_two_hundred(const ql_options *o) {
    static const char *const prompts[] = {"The capital of France is", "One Friday, Kai went to the river with a drum.",
                                          "7 + 8 ="};
    ql_engine *engine = ql_test_open(o);
    int32_t n_capitals = 0, n_true = 0;
    for (int32_t k = 0; k < 3; k++) {
        ql_request r = ql_test_ask(prompts[k], 200);
        r.ignore_eos = 1;
        ql_result *res = ql_test_generate(engine, &r);
        assert_int_equal(res->n_ids, 200);
        double varied = least_varied(res->ids, 200), mean = 0;
        for (int32_t i = 0; i < 200; i++) {
            mean += (double)res->logprobs[i] / 200;
        }
        int32_t n, t;
        count_capitals(res->text, &n, &t);
        n_capitals += n;
        n_true += t;
        printf("  \"%s\": least distinct share of 50 ids %.2f, mean log probability %.2f, capitals %d of %d\n",
               prompts[k], varied, mean, t, n);
        fflush(stdout);
        assert_true(varied >= 0.3);
        assert_true(mean > -0.8); /* nonsense is not expected by the model itself */
        ql_result_free(res);
    }
    assert_true(n_capitals >= 5);
    assert_true(n_true * 10 >= n_capitals * 9);
    ql_engine_close(&engine);
}

/* A name and a thing from hundreds of tokens ago, through several chunks of prompt. */
void ql_test_recall(const ql_options *o) {
    static const struct {
        const char *who, *other, *thing, *place, *next;
    } stories[] = {{"Kai", "Lea", "drum", "river", "park"},
                   {"Ana", "Dan", "lantern", "market", "beach"},
                   {"Gus", "Eva", "basket", "school", "forest"}};
    ql_engine *engine = ql_test_open(o);
    for (size_t i = 0; i < sizeof stories / sizeof *stories; i++) {
        char text[4096] = "";
        size_t n = 0;
        for (int32_t k = 0; k < 30; k++) { /* some 250 tokens of other things first */
            static const char *const pairs[] = {"France is Paris", "Japan is Tokyo", "Chile is Santiago",
                                                "Egypt is Cairo"};
            n += (size_t)snprintf(text + n, sizeof text - n, "The capital of %s.\n", pairs[k % 4]);
        }
        n += (size_t)snprintf(text + n, sizeof text - n,
                              "One Monday, %s went to the %s with a %s. %s was at the %s too. \"Is that your",
                              stories[i].who, stories[i].place, stories[i].thing, stories[i].other, stories[i].place);
        ql_result *res = say(engine, text, 60, "Then");
        char want[200];
        snprintf(want, sizeof want, " %s?\" said %s. \"Yes, it is my %s,\" said %s. They took the %s to the ",
                 stories[i].thing, stories[i].other, stories[i].thing, stories[i].who, stories[i].thing);
        assert_true(res->n_prompt > 128);
        if (strncmp(res->text, want, strlen(want)) != 0) {
            fail_msg("chunk %d: after a story of %s the model says \"%s\"", o->chunk, stories[i].who, res->text);
        }
        ql_result_free(res);
    }
    ql_engine_close(&engine);
}

/* Turns of a chat, each prompt the whole conversation so far. */
void ql_test_chat_turns(const ql_options *o) {
    static const struct {
        const char *question, *answer;
    } turns[] = {{"What is the capital of Italy?", "The capital of Italy is Rome."},
                 {"Show me the rocket emoji.", "Here is the rocket: \xf0\x9f\x9a\x80"},
                 {"Name the capital of Norway.", "The capital of Norway is Oslo."},
                 {"What color is snow?", "Snow is white."},
                 {"capital of Peru?", "The capital of Peru is Lima."},
                 {"What is the capital of Italy?", "The capital of Italy is Rome."}};
    ql_engine *engine = ql_test_open(o);
    char text[8192] = "";
    size_t n = 0;
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        n += (size_t)snprintf(text + n, sizeof text - n,
                              "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                              turns[i].question);
        ql_result *res = say(engine, text, 0, NULL);
        if (strcmp(res->text, turns[i].answer) != 0) {
            fail_msg("turn %d: asked \"%s\", answered \"%s\"", (int)i + 1, turns[i].question, res->text);
        }
        assert_int_equal(res->finish, QL_FINISH_EOS);
        n += (size_t)snprintf(text + n, sizeof text - n, "%s<|im_end|>\n", res->text);
        ql_result_free(res);
    }
    ql_engine_close(&engine);
}

ql_test_rows ql_test_logits(ql_engine *engine, const int32_t *ids, int32_t n, int32_t max_new, int32_t *out) {
    ql_test_probe probe = {0};
    ql_request r = ql_test_request(ids, n, max_new);
    r.ignore_eos = 1;
    r.probe = ql_test_probe_fn;
    r.probe_user = &probe;
    ql_result *res = ql_test_generate(engine, &r);
    assert_false(probe.bad);
    assert_int_equal(res->n_ids, max_new);
    assert_int_equal(probe.logits.n, n + max_new - 1);
    if (out) {
        memcpy(out, res->ids, (size_t)max_new * sizeof *out);
    }
    ql_result_free(res);
    ql_test_rows rows = probe.logits;
    probe.logits = (ql_test_rows){0};
    ql_test_probe_free(&probe);
    return rows;
}

void ql_test_forced(const ql_options *o, const ql_test_model *model, double bound, double *worst) {
    int32_t seq[QL_TEST_FORCED], force[QL_TEST_FORCED + 1];
    ql_test_ids(77, model->vocab < 1300 ? model->vocab : 1300, seq, QL_TEST_FORCED);
    ql_test_hooks hooks = {.force_ids = force, .n_force = QL_TEST_FORCED};
    ql_engine *engine = ql_test_open_hooked(o, &hooks);
    memset(force, 0, sizeof force);
    ql_test_rows whole = ql_test_logits(engine, seq, QL_TEST_FORCED, 1, NULL);
    *worst = 0;
    for (int32_t n = 1; n < QL_TEST_FORCED; n++) {
        /* the engine reads the list when it chooses an id; between requests it is ours */
        memset(force, 0, sizeof force);
        memcpy(force, seq + n, (size_t)(QL_TEST_FORCED - n) * sizeof *force);
        int32_t max_new = n == 1 || n == 64 || n == 65 ? QL_TEST_FORCED - n + 1
                          : QL_TEST_FORCED - n < 2     ? QL_TEST_FORCED - n + 1
                                                       : 3;
        int32_t got[QL_TEST_FORCED];
        ql_test_rows rows = ql_test_logits(engine, seq, n, max_new, got);
        assert_memory_equal(got, force, (size_t)(max_new - 1) * sizeof *got);
        assert_int_equal(rows.width, whole.width);
        if (memcmp(rows.values, whole.values, (size_t)n * (size_t)rows.width * sizeof *rows.values) != 0) {
            fail_msg("prompt of %d ids: logits of its rows differ from those of the longer prompt", n);
        }
        int64_t at = (int64_t)n * rows.width, bad = 0;
        double rel = ql_test_worst_rel(rows.values + at, whole.values + at, max_new - 1, rows.width, &bad);
        if (!(rel <= bound)) {
            fail_msg("prompt of %d ids: step %d decoded differs from prefill by %.2e", n, (int)bad + 1, rel);
        }
        *worst = rel > *worst ? rel : *worst;
        free(rows.values);
    }
    /* What is compared are the logits of different positions, also where the phases add in one order and *worst is 0. */
    assert_memory_not_equal(whole.values, whole.values + whole.width, (size_t)whole.width * sizeof *whole.values);
    free(whole.values);
    ql_engine_close(&engine);
}
