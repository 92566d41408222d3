/* What the model tests share: the bundled models, opening and generating with checks, goldens, collected probes. What
 * compares bits is in bits.h, what makes lanes fail in plant.h.
 *
 * Every helper fails the running cmocka test itself; callers check values only. Tests run from the repository's root.
 */
#ifndef QL_TESTS_MODEL_COMMON_H
#define QL_TESTS_MODEL_COMMON_H

#include "runtime/base/thread.h"
#include "runtime/qlane.h"
#include "tests/npz.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* How much longer things may take under this build's sanitizer. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { QL_TEST_SLOWER = 15 };
#else
enum { QL_TEST_SLOWER = 1 };
#endif

typedef struct ql_test_model {
    const char *name, *dir;
    int32_t slices, vocab;
    int32_t n_lanes, lanes[4]; /* lane counts that the model allows */
    bool mtp, tokenizer;
} ql_test_model;

enum { QL_TEST_MODELS = 6 };
extern const ql_test_model ql_test_models[QL_TEST_MODELS];
const ql_test_model *ql_test_model_named(const char *name);

/* First call of main. An argument picks tests by name, with * for any text. Ends the program with a message if it still
 * runs after `seconds`: a hang must be a failure. Longer under sanitizers. */
void ql_test_begin(int argc, char **argv, int32_t seconds);

/* An entry of a list of tests: `test` with the model of that name as its state, called "<test> <model>". */
#define QL_TEST_ON(test, model)                                                                                        \
    { #test " " model, test, ql_test_find_model, NULL, (void *)(uintptr_t)(model) }
int ql_test_find_model(void **state);
/* Runs each of n tests (4 at most) on every model, which is the test's state, as "<model> <name>". Returns how many
 * failed. */
int ql_test_run_each(const char *group, const struct CMUnitTest *each, int32_t n);

/* Host lanes, EXACT, f32 KV, context 512, lanes as given. */
ql_options ql_test_options(const ql_test_model *model, int32_t lanes);
ql_engine *ql_test_open(const ql_options *options);
struct ql_test_hooks; /* runtime/engine/test_hooks.h */
ql_engine *ql_test_open_hooked(const ql_options *options, const struct ql_test_hooks *hooks);
/* The open must fail with `status`; every part (NULL-terminated list) must occur in the message. */
void ql_test_open_fails(const ql_options *options, ql_status status, const char *part, ...);

/* Greedy, settings not from the model, CRC on. */
ql_request ql_test_request(const int32_t *ids, int32_t n_ids, int32_t max_new);
ql_request ql_test_ask(const char *text, int32_t max_new);
ql_result *ql_test_generate(ql_engine *engine, const ql_request *request);
ql_request_id ql_test_submit(ql_engine *engine, const ql_request *request);
ql_result *ql_test_wait(ql_engine *engine, ql_request_id id);
ql_stats ql_test_stats(ql_engine *engine);
/* All slots and pages come back within a second. */
void ql_test_assert_idle(ql_engine *engine);
/* Entries of a folder, such as /proc/self/task. */
int32_t ql_test_entries(const char *dir);
/* `text` contains `part`. */
void ql_test_assert_has(const char *text, const char *part);

/* Nine ids that every model knows. */
enum { QL_TEST_PROMPT = 9 };
extern const int32_t ql_test_prompt[QL_TEST_PROMPT];
/* n ids in [0, vocab), the same for the same seed. */
void ql_test_ids(uint64_t seed, int32_t vocab, int32_t *ids, int32_t n);

/* golden.json and golden.npz. */
typedef struct ql_test_case {
    int32_t n_prompt, n_ids;
    int32_t *prompt_ids, *ids;
    double *margin, *logprob;
    char *prompt, *text; /* NULL where the model has no tokenizer */
} ql_test_case;

typedef struct ql_test_golden {
    int32_t n;
    ql_test_case *cases;
    ql_npz npz;
} ql_test_golden;

void ql_test_golden_load(ql_test_golden *golden, const ql_test_model *model);
void ql_test_golden_free(ql_test_golden *golden);

/* Rows that a probe delivered, of each kind and layer, in order. */
enum { QL_TEST_LAYERS = 65 };
typedef struct ql_test_rows {
    int32_t n, width;
    float *values;
} ql_test_rows;

typedef struct ql_test_probe {
    ql_test_rows hidden[QL_TEST_LAYERS], final_hidden, logits, mtp_logits;
    bool bad; /* rows out of order, of changing width, or of an unknown kind */
} ql_test_probe;

void ql_test_probe_fn(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                      const float *values);
void ql_test_probe_free(ql_test_probe *probe); /* empties it for the next request */

/* |got - want| / |want| of each row; the worst. NaN counts as infinite. */
double ql_test_worst_rel(const float *got, const float *want, int64_t n_row, int32_t width, int64_t *worst_row);
/* *to becomes v where v is larger, or NaN. */
void ql_test_raise(double *to, double v);

/* How far an engine is from the golden values. */
typedef struct ql_test_errors {
    double hidden, final_hidden, logits, mtp_logits; /* relative L2 of the worst row */
    double logit;                                    /* largest difference of one value */
} ql_test_errors;

/* Runs the golden prompt, and the long one where the model has it, and raises `e` to what is found. */
void ql_test_golden_probe(ql_engine *engine, const ql_test_model *model, const ql_test_golden *golden,
                          ql_test_errors *e);

/* An allocator that counts, keeps what is live in a list, and can fail one call. */
typedef struct ql_test_block ql_test_block;
typedef struct ql_test_heap {
    ql_allocator mem;
    int64_t calls;   /* malloc and realloc so far; atomic */
    int64_t fail_at; /* the call with this number fails; -1: none; atomic */
    int64_t failed;  /* how many were refused; atomic */

    ql_mutex mutex; /* guards the fields below */
    ql_test_block *first;
    int64_t live_bytes, live_blocks, peak_bytes;
} ql_test_heap;

void ql_test_heap_init(ql_test_heap *heap);

#endif
