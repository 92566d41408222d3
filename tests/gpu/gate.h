/* What the two halves of the gate share: the job that a test is given, and what the command line asked for. */
#ifndef QL_TESTS_GPU_GATE_H
#define QL_TESTS_GPU_GATE_H

#include "tests/model/bits.h"

enum { QL_GATE_LANES = 8 };

typedef struct ql_gate_mode {
    const char *name;
    ql_kv_type kv;
    ql_precision prompt, gen;
    double bound;         /* relative L2 of a row */
    double logprob_bound; /* absolute */
} ql_gate_mode;

/* A test's state. */
typedef struct ql_gate_job {
    const ql_test_model *model;
    int32_t lanes;
    const ql_gate_mode *mode; /* NULL: the test does not depend on it */
} ql_gate_job;

typedef struct ql_gate_run {
    int32_t n_gpu, repeats;
    ql_device_kind device;
    const char *variant; /* what path names must end with */
} ql_gate_run;
extern ql_gate_run ql_gate; /* set by main before the first test */

ql_options ql_gate_options(const ql_gate_job *j);
/* Skips the running test if it has more lanes than there are GPUs. */
void ql_gate_need_gpus(const ql_gate_job *j);

/* gate_life.c: verifying, memory, faults, and the life of engines */
void ql_gate_verify(void **state);
void ql_gate_file_shrinks(void **state);
void ql_gate_memory(void **state);
void ql_gate_faults(void **state);
void ql_gate_hangs(void **state);
void ql_gate_faults_while_opening(void **state);
void ql_gate_open_and_close(void **state);
void ql_gate_two_engines(void **state);
void ql_gate_callers_device_stays(void **state);
void ql_gate_refusals(void **state);

#endif
