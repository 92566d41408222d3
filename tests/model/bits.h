/* Answers compared bit for bit, and eight requests that reach every way a prompt is cut: the same bits are promised at
 * any lane count, chunking and company.
 */
#ifndef QL_TESTS_MODEL_BITS_H
#define QL_TESTS_MODEL_BITS_H

#include "tests/model/common.h"

enum { QL_TEST_ANSWER = 64, QL_TEST_EIGHT = 8, QL_TEST_LONGEST = 300, QL_TEST_EIGHT_NEW = 12 };

typedef struct ql_test_answer {
    uint32_t crc;
    int32_t n, ids[QL_TEST_ANSWER];
    float logprobs[QL_TEST_ANSWER];
} ql_test_answer;

/* Frees the result; it must have a CRC and 1 to QL_TEST_ANSWER ids. */
ql_test_answer ql_test_take(ql_result *res);
/* `o`, `company` and `request` are what a failure names. */
void ql_test_same(const ql_test_answer *got, const ql_test_answer *want, const ql_options *o, const char *company,
                  int32_t request);

/* Prompts of ql_test_prompt through one request: its CRC tells whether an engine still works. */
uint32_t ql_test_crc(ql_engine *engine);

/* Lengths sit around the 64-token block; the first has `first` ids. The last two are sampled, the others greedy. */
typedef struct ql_test_eight {
    int32_t ids[QL_TEST_EIGHT][QL_TEST_LONGEST];
    ql_request r[QL_TEST_EIGHT];
} ql_test_eight;

void ql_test_eight_init(ql_test_eight *eight, const ql_test_model *model, int32_t first);
/* The reference: one lane, each prompt as one chunk, each request alone; otherwise `o`. */
void ql_test_eight_alone(const ql_options *o, const ql_test_eight *eight, ql_test_answer want[QL_TEST_EIGHT]);
/* On an engine of `o`: the first request alone, then all eight together, must give the answers in `want`. */
void ql_test_eight_together(const ql_options *o, const ql_test_eight *eight, const ql_test_answer want[QL_TEST_EIGHT]);

/* With `forced` as the first n generated ids, steps of two to five rows of one sequence, alone and beside another such, must give the
 * answers of steps of one row. `r` has no step_rows yet. */
void ql_test_steps_of_rows(const ql_options *o, const ql_request *r, const int32_t *forced, int32_t n);

#endif
