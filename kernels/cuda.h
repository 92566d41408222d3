/* CUDA devices behind the op table: enumeration and opening. No CUDA type crosses this header.
 *
 * A lane's thread opens its device and is the only one that calls it; it stays that thread's current CUDA device.
 * Enumeration may be called from any thread, creates no context and leaves the caller's current device as it was.
 */
#ifndef QL_KERNELS_CUDA_H
#define QL_KERNELS_CUDA_H

#include "kernels/kernels.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_cuda_device {
    char name[64];        /* "NVIDIA H200" */
    uint64_t total_bytes; /* of device memory */
    int32_t major, minor; /* compute capability */
    int32_t code; /* that of the code that this build runs there, 75 for 7.5: what kernels are chosen by; 0: none */
    int32_t n_sm;
    int32_t block_shared; /* bytes of shared memory that a block may have; 64 KiB where code for 7.5 runs */
    int32_t pci_domain, pci_bus, pci_device;
} ql_cuda_device;

/* Devices that the driver shows; 0 with *why filled (96 bytes, may be NULL) where there is no driver or it is too old. */
int32_t ql_cuda_count(char *why);

ql_status ql_cuda_info(int32_t ordinal, ql_cuda_device *out, ql_error *err);

/* Opens device `ordinal` on the calling thread. `kernels` forces variants as for host lanes ("linear=cuda"); NULL picks
 * the best. Refuses a GPU that this build has no code for, and a driver older than the runtime, by name. */
ql_status ql_cuda_dev_open(ql_dev *dev, int32_t ordinal, const char *kernels, const ql_allocator *mem, ql_error *err);

/* The CUDA table itself, for plans that have no device. */
const ql_ops *ql_cuda_ops(void);

/* Free and total bytes of an open device, as the driver sees them now. */
ql_status ql_cuda_mem(ql_dev *dev, uint64_t *free_bytes, uint64_t *total_bytes);

/* The device's ordinal and its compute stream (a cudaStream_t), for the lane's collectives. */
int32_t ql_cuda_ordinal(const ql_dev *dev);
void *ql_cuda_stream(const ql_dev *dev);

/* What the chains of all lanes of an engine share, so that they can add across lanes (chain.h); pointers as this lane's kernels
 * use them. A kernel that waits for another lane looks at `let_go`, and after wait_ns gives up: it writes 1 + that lane, or
 * QL_CUDA_LET_GO, to `gave_up` and runs on without waiting, its results good for nothing. */
enum { QL_CUDA_MAX_LANES = 8, QL_CUDA_EXCHANGE_BYTES = (3 << 19) + 256, QL_CUDA_INBOX_FLAGS = 16384 };
#define QL_CUDA_LET_GO 0xffffffffu
typedef struct ql_cuda_exchange {
    int32_t lane, n_lane;
    int32_t n_sm;                  /* of the GPU that has the fewest: all lanes cut their work alike */
    void *room[QL_CUDA_MAX_LANES]; /* of each lane, on its GPU: QL_CUDA_EXCHANGE_BYTES, zeros */
    /* Prompt rows (cuda/push.cuh): of each lane, on its GPU, room for a part of every other lane, inbox_bytes each, the next lane's
     * first; and flags that begin as zeros: [n_lane][QL_CUDA_INBOX_FLAGS]. */
    void *inbox[QL_CUDA_MAX_LANES];
    uint32_t *inbox_flag[QL_CUDA_MAX_LANES];
    uint64_t inbox_bytes;
    uint32_t *let_go, *gave_up; /* in host memory */
    uint64_t wait_ns;
    uint32_t n_pushed; /* sums of prompt rows so far */
} ql_cuda_exchange;

/* On the lane's thread, for all lanes or none, between ops: from now on chains add across lanes by themselves; n_lane 0: no more.
 * False where the device has no chains or was told not to (chain=off, chain=lane). */
bool ql_cuda_connect_chains(ql_dev *dev, const ql_cuda_exchange *exchange);

/* `rounds` sums across lanes in one chain, all lanes at once: sum[r][i], i < n, of the lanes' proof_value (cuda/proof.cuh) of round
 * first + r. rounds at most QL_CUDA_CHAIN_ROUNDS, n at most QL_CUDA_CHAIN_ELEMENTS. */
enum { QL_CUDA_CHAIN_ROUNDS = 8, QL_CUDA_CHAIN_ELEMENTS = 8192 };
ql_status ql_cuda_prove_chains(ql_dev *dev, float *sum, int32_t n, int32_t rounds, uint32_t first);

/* One sum of prompt rows, sent and added as products and norms do it (cuda/push.cuh), on all lanes at once: x[i] += the sum of all lanes'
 * own[i], i < rows * QL_CUDA_PUSH_WIDTH. rows at most 16,384, and what an inbox holds. */
enum { QL_CUDA_PUSH_WIDTH = 1024 };
ql_status ql_cuda_prove_push(ql_dev *dev, const float *own, float *x, int32_t rows);

/* A decode step as a graph: everything called between begin and end is recorded instead of run. Capture is local to
 * the thread, so that other threads of the program may use CUDA meanwhile. `graph` is an executable graph, launched on
 * the device's stream; freeing accepts NULL. */
ql_status ql_cuda_capture_begin(ql_dev *dev);
ql_status ql_cuda_capture_end(ql_dev *dev, void **graph);
ql_status ql_cuda_graph_launch(ql_dev *dev, void *graph);
void ql_cuda_graph_free(ql_dev *dev, void *graph);

/* Enqueues a read of `bytes` bytes at p on a stream (a cudaStream_t) and nothing else: what speeds are compared with. */
void ql_cuda_read(void *stream, int32_t n_sm, const void *p, size_t bytes);

/* Enqueues integer matrix products on registers and nothing else, and returns how many multiplications and additions of
 * INT8 they are: k columns an instruction, 16, or 32 from compute capability 8.0 on. `sink`: 16 bytes on the device. */
double ql_cuda_int8(void *stream, int32_t n_sm, int32_t k, void *sink);

/* "7.5, 9.0": the compute capabilities that this build has code for. */
void ql_cuda_build_archs(char *out, size_t cap);

/* "13.0": the CUDA runtime that this build was made with. */
const char *ql_cuda_build_version(void);

#ifdef __cplusplus
}
#endif
#endif
