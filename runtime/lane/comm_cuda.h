/* Collectives of CUDA lanes. No CUDA or NCCL type crosses this header.
 *
 * Two paths, and a third inside the device's chains (kernels/chain.h), each proved when an engine opens, before it serves, and
 * switched off, loudly, if it is wrong:
 *   peer   one kernel per collective: every lane pushes its data into its peers' memory, waits for their flags, and adds
 *          in tree order. For lanes whose GPUs can all reach each other's memory.
 *   chain  sums of a generation step, where the peer path is right and GPUs can add to each other's memory.
 *   nccl   NCCL's sum for two lanes (one exact addition), gather and tree addition for more: where the peer path is not right.
 * More than one lane needs NCCL to be there, so that there is a path on any machine. Its communicators, which take most of a
 * gigabyte of each GPU and most of a second, are made once, and only where it serves.
 */
#ifndef QL_RUNTIME_LANE_COMM_CUDA_H
#define QL_RUNTIME_LANE_COMM_CUDA_H

#include "runtime/base/log.h"
#include "runtime/lane/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_comm_cuda_options {
    int32_t n_lane;
    const int32_t *ordinal; /* [n_lane] CUDA devices */
    size_t max_bytes;       /* largest vector of a reduction */
    int32_t wait_ms, init_ms;
    int32_t proof_times; /* the proof has so many times its usual rounds; 0: 1 */
    bool no_peer;        /* leave the peer path out: what GPUs get that cannot reach each other's memory */
    ql_abort *abort;
    ql_log *log;
    const ql_allocator *mem;
} ql_comm_cuda_options;

/* Device memory that a lane's collectives take, once they have been proved. */
uint64_t ql_comm_cuda_bytes(int32_t n_lane, size_t max_bytes);

/* Whether the driver says that n GPUs can reach each other's memory. Any thread, before anything is opened: no context is made, and the
 * current device stays as it was. Where it says so, the peer path may still turn out to be wrong. */
bool ql_comm_cuda_peers(const int32_t *ordinal, int32_t n);

/* Finds NCCL where n_lane > 1, and refuses one that cannot serve. Any thread; its current device stays as it was. */
ql_status ql_comm_cuda_open(ql_comm_group **group, const ql_comm_cuda_options *options, ql_error *err);

/* The lane's part, on its thread, in this order with all lanes done between: own memory; peers' memory; the proof of each path
 * that is open and not proved yet. Bind refuses a device other than the one that the group was opened for. */
ql_status ql_comm_cuda_bind(ql_comm_group *group, int32_t lane, ql_dev *dev, ql_comm *comm);
ql_status ql_comm_cuda_connect(ql_comm *comm);
ql_status ql_comm_cuda_prove(ql_comm *comm);

/* On the caller's thread after all lanes proved: settles which paths are used, refuses when none is right. Where the peer path is
 * not, it makes NCCL's communicators, within init_ms, and sets *again: all lanes prove and the caller settles once more. The
 * thread's current device stays as it was. */
ql_status ql_comm_cuda_settle(ql_comm_group *group, bool *again, ql_error *err);

/* On the lane's thread after that: gives the proof's memory back. The device's chains go on adding across lanes by themselves where
 * that was proved on all lanes. */
void ql_comm_cuda_begin(ql_comm *comm);

/* On the lane's thread, once every lane is idle. Accepts a comm that was never bound. */
void ql_comm_cuda_unbind(ql_comm *comm);
void ql_comm_cuda_close(ql_comm_group **group);

/* "peer" or "nccl" or "none" (one lane), and the version of the NCCL that is there as 22803, 0 with one lane. */
const char *ql_comm_cuda_path(const ql_comm_group *group);
int32_t ql_comm_cuda_nccl_version(const ql_comm_group *group);

/* Over all lanes: collectives that each path has served so far, those of the proof left out, and elements that the proof
 * compared. Any thread. */
void ql_comm_cuda_calls(const ql_comm_group *group, uint64_t *peer, uint64_t *nccl);
uint64_t ql_comm_cuda_proved(const ql_comm_group *group);

#ifdef __cplusplus
}
#endif
#endif
