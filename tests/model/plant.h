/* One lane made to fail: an error or a hang in one of its ops or collectives, or a weight that is not the file's.
 *
 * A fault is planted by replacing one entry of one lane's op table (or its comm) through the engine's test hooks; it
 * sleeps until it is armed.
 */
#ifndef QL_TESTS_MODEL_PLANT_H
#define QL_TESTS_MODEL_PLANT_H

#include "runtime/engine/test_hooks.h"
#include "tests/model/common.h"

typedef enum ql_site {
    QL_AT_NONE,
    QL_AT_LINEAR,
    QL_AT_GDN,
    QL_AT_ATTENTION,
    QL_AT_TOPK,
    QL_AT_SAMPLE,
    QL_AT_H2D,
    QL_AT_SYNC,
    QL_AT_GRAPH,
    QL_AT_REDUCE,
    QL_AT_GATHER,
    QL_AT_ALLOC,
    QL_AT_WEIGHT_LOAD,
    QL_AT_WEIGHT_DATA, /* no failure: one bit of the weight's first element is turned; needs no arming */
    QL_AT_COUNT
} ql_site;
extern const char *const ql_site_names[QL_AT_COUNT];

/* One for each engine that is made to fail: a lane that was left behind may still read its own. */
typedef struct ql_planted {
    ql_ops table;      /* first, so that dev->ops leads here */
    const ql_ops *ops; /* the lane's own */
    ql_status (*reduce)(ql_comm *comm, const float *src, float *dst, int64_t n);
    ql_status (*gather)(ql_comm *comm, const void *src, void *dst, size_t bytes);
    ql_site site;
    bool hang; /* until released; else an error */
    int32_t lane;
    int64_t after;                                 /* calls to let pass once armed */
    int64_t calls;                                 /* atomic */
    int32_t armed, released, in_fault;             /* atomic */
    int64_t fired_ns;                              /* atomic; 0: not yet */
    int32_t left_behind;                           /* atomic: log lines about lanes that did not come back */
    void (*dev_opened)(int32_t lane, ql_dev *dev); /* called for every lane, where set */
    ql_test_heap heap; /* for the engine to use; what a lane left behind can reach stays in its list */
} ql_planted;

ql_planted *ql_plant(ql_site site, int32_t lane, bool hang, int64_t after);
/* Returns the latest, where nothing was left behind that could read it. */
void ql_plant_return(ql_planted *f);
ql_status ql_plant_open(ql_engine **engine, const ql_options *options, ql_planted *f, ql_error *err);
void ql_plant_arm(ql_planted *f);
/* When it fired, or 0. */
int64_t ql_plant_fired(ql_planted *f);
/* Lets a hanging lane go. */
void ql_plant_release(ql_planted *f);
/* Likewise, and waits until it has left the fault; what it does then touches nothing that was freed. */
void ql_plant_release_wait(ql_planted *f);

#endif
