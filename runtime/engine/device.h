/* Which devices an engine's lanes run on: the one place above kernels that knows there are two kinds. */
#ifndef QL_RUNTIME_ENGINE_DEVICE_H
#define QL_RUNTIME_ENGINE_DEVICE_H

#include "loader/checkpoint.h"
#include "runtime/lane/lane.h"

typedef struct ql_devices {
    ql_device_kind kind; /* HOST or CUDA */
    int32_t n_lane;
    int32_t ordinal[QL_MAX_SLICES]; /* CUDA */
    int32_t cc;                     /* CUDA: compute capability of the code that runs there, 75 for 7.5; 0: not known */
    bool nccl;                      /* CUDA: NCCL serves; for an engine, known once its lanes are connected */
    const ql_ops *ops;              /* the kind's table, for plans */
    ql_comm_group *comm;
} ql_devices;

/* Settles kind, lane count and GPUs from the options, before anything is opened. */
ql_status ql_devices_choose(ql_devices *devices, const ql_options *options, const ql_config *config, ql_error *err);

/* The same for a plan, which needs no device: host lanes unless the options name CUDA ones. Where this machine has the GPUs of several
 * lanes it asks the driver whether they reach each other's memory, and else takes it that they do. */
ql_status ql_devices_of_plan(ql_devices *devices, const ql_options *options, ql_error *err);

/* Device memory of one lane's collectives, for vectors of at most max_bytes. */
uint64_t ql_devices_comm_bytes(const ql_devices *devices, size_t max_bytes);

/* About what is taken on each GPU beside what a lane asks for: context and code, and NCCL where it serves. 0 for host lanes. */
uint64_t ql_devices_context_bytes(const ql_devices *devices);
uint64_t ql_devices_nccl_bytes(const ql_devices *devices); /* NCCL's part */

/* On the caller's thread: opens what all lanes share. */
ql_status ql_devices_open(ql_devices *devices, const ql_options *options, ql_lane_group *lanes, size_t max_bytes,
                          ql_error *err);

/* On each lane's thread. */
ql_status ql_devices_open_lane(ql_devices *devices, const ql_options *options, ql_lane *lane);

/* With all lanes open: connects them and proves their collectives. `lanes` runs it on every lane. */
ql_status ql_devices_connect(ql_devices *devices, ql_lane_group *lanes, ql_error *err);

/* ql_lanes_run for what makes lanes wait for each other on their GPUs: engines of one process that share a GPU take turns (turns.h).
 * For host lanes and for one lane it is ql_lanes_run. */
ql_status ql_devices_run(const ql_devices *devices, ql_lane_group *lanes, ql_lane_fn fn, void *arg, ql_error *err);

/* Memory that one lane may use: for host lanes its share of what the machine has free, for GPUs what the fullest has, less
 * what opening and the first steps still take for themselves. */
uint64_t ql_devices_free_bytes(ql_devices *devices, ql_lane_group *lanes);

/* Memory in use on each lane's device, by anyone, as its driver tells; 0 for host lanes. */
ql_status ql_devices_used_bytes(ql_devices *devices, ql_lane_group *lanes, uint64_t *used, ql_error *err);

/* Fills what is known about a lane's device and link. */
void ql_devices_describe(const ql_devices *devices, const ql_lane *lane, ql_lane_info *info);

/* On each lane's thread, last. */
void ql_devices_close_lane(ql_devices *devices, ql_lane *lane);
void ql_devices_close(ql_devices *devices);

#endif
