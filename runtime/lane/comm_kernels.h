/* The kernels of CUDA lanes' collectives (comm_kernels.cu), each behind a function that enqueues it. Private to the
 * communicator's files; no CUDA type crosses this header.
 *
 * `stream` is a cudaStream_t of the calling thread's current device. A launch that fails is the runtime's last error, which the
 * caller asks for. Pointers are device pointers, multiples of 4.
 */
#ifndef QL_RUNTIME_LANE_COMM_KERNELS_H
#define QL_RUNTIME_LANE_COMM_KERNELS_H

#include "kernels/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QL_PEER_CHUNK = 4096, /* bytes with a flag of their own */
    QL_PEER_VECTOR = 16   /* bytes that a thread moves at once */
};

/* In pinned host memory that a lane's kernels see. */
typedef struct ql_peer_words {
    uint32_t abort; /* written by ql_abort_raise */
    uint32_t error; /* written by a kernel that gave up: 1 + peer, or QL_CUDA_LET_GO */
} ql_peer_words;

/* One collective over peer memory, as one lane sees it. Arrays over lanes lie on that lane's GPU. */
typedef struct ql_peer_exchange {
    const uint8_t *src;
    uint8_t *dst;
    size_t bytes, cap; /* of the vector; of a slot, whole chunks */
    size_t stride;     /* between the parts of a gathered vector in dst */
    int lane, n_lane, n_chunk_max;
    bool sum;                          /* add in tree order, or gather */
    bool whole;                        /* everything is a multiple of QL_PEER_VECTOR bytes */
    uint8_t *slot[QL_CUDA_MAX_LANES];  /* [2][n_lane][cap] */
    uint32_t *flag[QL_CUDA_MAX_LANES]; /* [n_lane][n_chunk_max] */
    uint32_t *epoch;                   /* [n_chunk_max], the lane's own */
    ql_peer_words *words;              /* as the device sees them */
    unsigned long long wait_ns;
} ql_peer_exchange;

/* Sum or gather, on all lanes with the same bytes and most_blocks: at most that many blocks, all of which fit on any lane's GPU at
 * once. */
void ql_peer_launch(void *stream, const ql_peer_exchange *exchange, int most_blocks);

/* Blocks of it that fit on one SM of the current device; 0, with the runtime's last error, where that cannot be told. */
int ql_peer_blocks_of_sm(void);

/* dst[i] = the tree sum over lanes of part[lane * stride + i], i < n: what a gather by NCCL leaves to be added. */
void ql_comm_tree_add(void *stream, const float *part, float *dst, int64_t n, int64_t stride, int n_lane);

/* ---- proof: vectors of proof_value (kernels/cuda/proof.cuh) ---- */

/* Rounds first to first + rounds - 1 of a sum of exchange->bytes, a multiple of QL_PEER_VECTOR and at most as many chunks as blocks fit
 * at once: as ql_peer_launch would do them, with nothing read from src or written to dst. Elements that are not the sum are
 * counted in *wrong. */
void ql_peer_prove(void *stream, const ql_peer_exchange *exchange, uint32_t first, int rounds,
                   unsigned long long *wrong);

/* This lane's part of a round, n elements. */
void ql_proof_fill(void *stream, float *src, int64_t n, int lane, uint32_t round);

/* Adds to *wrong how many elements of sum[rounds][n] are not the sum over lanes of rounds `first` and on. */
void ql_proof_check(void *stream, const float *sum, int64_t n, int rounds, int n_lane, uint32_t first,
                    unsigned long long *wrong);

#ifdef __cplusplus
}
#endif
#endif
