/* For the project's own tests: an engine with a lane's device or collectives replaced, or with its choices forced. Not
 * installed, not exported by the shared library. */
#ifndef QL_RUNTIME_ENGINE_TEST_HOOKS_H
#define QL_RUNTIME_ENGINE_TEST_HOOKS_H

#include "kernels/kernels.h"
#include "runtime/lane/comm.h"

typedef struct ql_test_hooks {
    /* On the lane's thread after it opened its device: may point dev->ops to a changed copy of the table. */
    void (*dev_opened)(void *user, int32_t lane, ql_dev *dev);
    /* On the lane's thread after its communicator is bound: may replace comm->reduce. */
    void (*comm_opened)(void *user, int32_t lane, ql_comm *comm);
    const int32_t *force_ids; /* the i-th generated id of every request is replaced by force_ids[i], i < n_force */
    int32_t n_force;
    void *user;
} ql_test_hooks;

/* Like ql_engine_open. Hooks are copied; what they point to outlives the engine. */
ql_status ql_engine_open_hooked(ql_engine **engine, const ql_options *options, const ql_test_hooks *hooks,
                                ql_error *err);

#endif
