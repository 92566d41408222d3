/* Enqueues a read of `bytes` bytes at p. */
#ifndef QL_TESTS_GPU_STREAM_H
#define QL_TESTS_GPU_STREAM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void gpu_read(void *stream, int n_sm, const void *p, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
