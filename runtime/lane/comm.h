/* Sums and gathers across lanes. One ql_comm a lane; every lane makes the same calls in the same order.
 *
 * reduce adds the lanes' vectors in the one tree order of docs/design.md: with 8 lanes
 * ((0+1)+(2+3))+((4+5)+(6+7)), so that with each lane's own subtree inside, the whole sum has the same bits at any
 * lane count. A wait that sees the abort flag, or a peer that makes no progress until the deadline, returns an error.
 */
#ifndef QL_RUNTIME_LANE_COMM_H
#define QL_RUNTIME_LANE_COMM_H

#include "kernels/kernels.h"
#include "runtime/base/thread.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first failure of an engine, seen by every wait. */
typedef struct ql_abort {
    uint32_t flag;  /* atomic; set once, after `first` is complete */
    ql_mutex mutex; /* guards the fields below */
    ql_error first;
    uint32_t *mirror[64]; /* words that devices watch, set to 1 with the flag; NULL: none */
} ql_abort;

ql_status ql_abort_init(ql_abort *abort, ql_error *err);
void ql_abort_deinit(ql_abort *abort);
/* Keeps the first error; later ones are dropped. */
void ql_abort_raise(ql_abort *abort, const ql_error *error);
/* From now on `word` is set when the flag is, at once if it is already; NULL ends that. */
void ql_abort_mirror(ql_abort *abort, int32_t index, uint32_t *word);
static inline bool ql_abort_raised(const ql_abort *abort) {
    return __atomic_load_n(&abort->flag, __ATOMIC_ACQUIRE) != 0;
}
/* Copies the first error to err and returns its status. QL_OK when none was raised. */
ql_status ql_abort_error(ql_abort *abort, ql_error *err);

typedef struct ql_comm ql_comm;
typedef struct ql_comm_group ql_comm_group; /* what the lanes of one engine share */

struct ql_comm {
    int32_t lane, n_lane;
    ql_dev *dev;
    ql_comm_group *group;
    /* dst[i] = sum over lanes of src[i], f32; src and dst do not overlap. */
    ql_status (*reduce)(ql_comm *comm, const float *src, float *dst, int64_t n);
    /* dst[lane][bytes] = each lane's src. */
    ql_status (*gather)(ql_comm *comm, const void *src, void *dst, size_t bytes);
    /* After dev->ops->sync: the failure of a collective that runs on the device; NULL where they run on the host. */
    ql_status (*check)(ql_comm *comm);
    /* This lane failed or saw a peer fail: gives up collectives under way. May be NULL. */
    void (*let_go)(ql_comm *comm);
};

/* Host lanes. The group outlives its comms; devs[i] is lane i's device (its progress counter is watched). */
ql_status ql_comm_host_open(ql_comm_group **group, int32_t n_lane, ql_abort *abort, int32_t wait_ms,
                            const ql_allocator *mem, ql_error *err);
void ql_comm_host_bind(ql_comm_group *group, int32_t lane, ql_dev *dev, ql_comm *comm);
void ql_comm_host_close(ql_comm_group **group);

#ifdef __cplusplus
}
#endif

#endif
