/* What text and logits must be whichever lanes they come from: long text that stays true, and steps that agree with prompts. Each
 * function opens an engine of `o` and fails the running cmocka test. Texts are for the bundled model, with a context of 2,048.
 */
#ifndef QL_TESTS_MODEL_SENSE_H
#define QL_TESTS_MODEL_SENSE_H

#include "tests/model/common.h"

enum { QL_TEST_FORCED = 131 }; /* ids of ql_test_forced's prompts at most */

/* Two hundred generated tokens stay varied and true to what the model was trained on. */
void ql_test_two_hundred(const ql_options *o);
/* A name and a thing from hundreds of tokens ago are recalled. */
void ql_test_recall(const ql_options *o);
/* Turns of a chat, each prompt the whole conversation so far. */
void ql_test_chat_turns(const ql_options *o);

/* Logits [n + max_new - 1][vocab] of a prompt of n ids and its continuation; those of the whole sequence with
 * max_new 1. Also gives the generated ids where `out` is not NULL. */
ql_test_rows ql_test_logits(ql_engine *engine, const int32_t *ids, int32_t n, int32_t max_new, int32_t *out);

/* Teacher-forced steps after prompts of 1 to 130 ids: relative L2 of each step's logits to those of the same ids as one prompt
 * is at most `bound`, and *worst the largest; rows of prompts of different lengths agree in every bit. *worst is 0 only
 * where both phases multiply by the same kernels; where they have two orders of addition the caller asks for more. */
void ql_test_forced(const ql_options *o, const ql_test_model *model, double bound, double *worst);

#endif
