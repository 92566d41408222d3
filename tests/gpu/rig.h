/* What programs that drive a GPU by hand share: a device with scratch, numbers and weights by chance, lists of ops, time.
 *
 * All of it runs on GPU 0 and on one thread. What fails ends the program, with the program's name and the message. Numbers by chance
 * come from one generator with one seed, so a program's are the same in every run.
 */
#ifndef QL_TESTS_GPU_RIG_H
#define QL_TESTS_GPU_RIG_H

#include "kernels/cuda.h"

/* Goes on with QL_OK only; the message is that of a call that was given rig_err, as devices of rig_open are. */
extern ql_error rig_err;
void rig_must(ql_status status);

/* ---- device ---- */

ql_cuda_device rig_info(void);

/* Opens the GPU, with scratch for ops of this shape; `kernels` names variants or is NULL. dev->ops->close(dev) ends it. */
void rig_open(ql_dev *dev, const char *kernels, const ql_shape *shape);

/* Memory of the device. Copies have arrived when these return. */
void *rig_room(ql_dev *dev, size_t bytes);
void rig_put(ql_dev *dev, void *at, const void *host, size_t bytes);
void rig_fetch(ql_dev *dev, void *host, const void *at, size_t bytes);
void *rig_copy(ql_dev *dev, const void *host, size_t bytes);

/* ---- by chance ---- */

uint64_t rig_next(void);

/* n numbers within mean +- scale: on the host, for the caller to free, or on the device. */
float *rig_numbers(size_t n, float scale, float mean);
float *rig_floats(ql_dev *dev, size_t n, float scale, float mean);

/* A weight as in a file: codes of its format without NaN and without outliers, and scales that differ from row to row. */
typedef struct rig_codes {
    ql_qformat format;
    int32_t n, k;
    uint8_t *data, *scale;
} rig_codes;

rig_codes rig_codes_of(ql_qformat format, int32_t n, int32_t k);
void rig_codes_free(rig_codes *codes);

/* All of it, to be cut or changed; borrows `codes`. */
ql_weight_src rig_src(const rig_codes *codes);

/* Loaded to the end. */
ql_weight rig_load(ql_dev *dev, const ql_weight_src *src);
ql_weight rig_weight(ql_dev *dev, ql_qformat format, int32_t n, int32_t k);

/* ---- running ---- */

/* Each op by itself. One lane has no exchanges: they are left out. */
void rig_one_by_one(ql_dev *dev, const ql_op *op, int32_t n);

/* As chains, as long as the device takes them; every op has to be part of one. */
void rig_chained(ql_dev *dev, const ql_op *op, int32_t n);

/* Seconds. */
double rig_now(void);

/* Seconds of one call(i), over seven launches of a graph of `reps` of them, i from 0 on, after one that is not counted. */
typedef struct rig_span {
    double best, median, worst;
} rig_span;

rig_span rig_time(ql_dev *dev, void (*call)(int i), int reps);

#endif
