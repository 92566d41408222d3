/* NCCL, opened at run time, so that one binary runs with and without it. Private to the communicator's files. */
#ifndef QL_RUNTIME_LANE_NCCL_API_H
#define QL_RUNTIME_LANE_NCCL_API_H

#include "runtime/base/status.h"

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_nccl {
    void *library;
    int version; /* 22803 for 2.28.3 */
    ncclResult_t (*comm_init_all)(ncclComm_t *comm, int n, const int *devices);
    ncclResult_t (*comm_destroy)(ncclComm_t comm);
    ncclResult_t (*comm_abort)(ncclComm_t comm);
    ncclResult_t (*all_reduce)(const void *src, void *dst, size_t n, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*all_gather)(const void *src, void *dst, size_t n, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream);
    const char *(*error_string)(ncclResult_t result);
} ql_nccl;

/* Finds libnccl.so.2 (QLANE_NCCL: that file instead). Refuses a missing library, one older than 2.27.5 (its large
 * all-reduce could write outside its buffer) and another major version than the header's. */
ql_status ql_nccl_open(ql_nccl *nccl, ql_error *err);
void ql_nccl_close(ql_nccl *nccl);

/* One communicator for each device, within init_ms. On expiry the attempt is left behind: NCCL cannot be interrupted
 * there. */
ql_status ql_nccl_init_all(const ql_nccl *nccl, ncclComm_t *comm, int32_t n, const int32_t *ordinal, int32_t init_ms,
                           ql_error *err);

#ifdef __cplusplus
}
#endif
#endif
