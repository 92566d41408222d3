/* Lanes: one thread each, which owns one device from open to close and runs one command at a time.
 *
 * The conductor posts the same function to all lanes and waits for all. A lane that fails raises the group's abort flag,
 * which releases its peers from collectives; a lane that makes no progress until the deadline is reported as hung. After
 * either the group only accepts close.
 */
#ifndef QL_RUNTIME_LANE_LANE_H
#define QL_RUNTIME_LANE_LANE_H

#include "runtime/base/log.h"
#include "runtime/lane/comm.h"

typedef struct ql_lane ql_lane;
typedef struct ql_lane_group ql_lane_group;

/* Runs on the lane's thread. Fails by writing lane->err. */
typedef ql_status (*ql_lane_fn)(ql_lane *lane, void *arg);

struct ql_lane {
    int32_t index;
    ql_lane_group *group;
    ql_thread thread;
    bool started;
    ql_error err; /* the lane thread's; dev.err points here */
    ql_dev dev;   /* the lane thread's; its counters may be read by anyone with relaxed atomics */
    ql_comm comm;

    ql_lane_fn fn; /* not NULL: posted or running; written under group->mutex, looked at by anyone with atomics */
    void *arg;     /* guarded by group->mutex */
};

struct ql_lane_group {
    const ql_allocator *mem;
    ql_log *log;
    ql_abort abort;
    ql_lane *lane;
    int32_t n_lane, wait_ms;
    ql_mutex mutex; /* guards closing, n_busy and the lanes' fn and arg */
    ql_cond posted, finished;
    void (*fini)(ql_lane *lane);
    void *user; /* the level above's */
    bool closing;
    bool looks;     /* before sleeping, where that leaves cores idle: set before the first command */
    int32_t n_busy; /* looked at by anyone with atomics */

    /* the caller's of ql_lanes_run */
    ql_lane_fn last_fn;
    int64_t last_ns; /* how long that took */
};

/* Starts n threads. `fini` runs on each as its last act, once every lane is idle, so that no peer still reads what it
 * frees. On failure everything is released. */
ql_status ql_lanes_open(ql_lane_group *group, int32_t n_lane, int32_t wait_ms, void (*fini)(ql_lane *lane), void *user,
                        ql_log *log, const ql_allocator *mem, ql_error *err);

/* Runs fn(lane, arg) on every lane and waits. The first error of any lane, or of the deadline, goes to err. One caller
 * at a time. */
ql_status ql_lanes_run(ql_lane_group *group, ql_lane_fn fn, void *arg, ql_error *err);

/* Ends the threads after their current command. Returns false when a lane did not come back within the deadline: the
 * group's memory, and all that the lane can still reach, must then be left alone. No `fini` has run in that case. */
bool ql_lanes_close(ql_lane_group *group);

#endif
