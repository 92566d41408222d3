/* Host lanes: threads of one process that read each other's buffers.
 *
 * A collective is two rendezvous of all lanes around the copying. At the first every lane has published its source and
 * destination; then lane r sums its r-th part of the vector from all sources, in tree order, into every lane's
 * destination; at the second the buffers are free again. Both use one counting barrier under the group's mutex. Lanes are
 * often more than the cores: a waiting lane first yields its core a few times, which is how long a peer of a small model
 * takes, and then sleeps.
 *
 * A lane gives up only when the lanes it waits for have done nothing until the deadline: a peer inside a long product
 * bumps its device's progress counter between ops and is not hung.
 */
#include "runtime/lane/comm.h"

#include "runtime/base/mem.h"

#include <sched.h>
#include <string.h>

enum { MAX_LANES = 64, YIELDS = 64 };

struct ql_comm_group {
    const ql_allocator *mem;
    ql_abort *abort;
    int32_t n_lane, wait_ms;

    ql_mutex mutex; /* guards the fields below */
    ql_cond cond;
    uint64_t epoch; /* rendezvous completed; atomic, so that a yielding lane may look without the mutex */
    int32_t n_arrived;
    bool arrived[MAX_LANES];
    const void *src[MAX_LANES];
    void *dst[MAX_LANES];
    size_t bytes[MAX_LANES];

    ql_dev *dev[MAX_LANES]; /* set by bind, before any collective */
};

/* What the lanes that have not arrived have done so far. Called with the mutex held. */
static uint64_t missing_progress(const ql_comm_group *g, int32_t *first_missing) {
    uint64_t sum = 0;
    *first_missing = -1;
    for (int32_t i = 0; i < g->n_lane; i++) {
        if (!g->arrived[i]) {
            sum += __atomic_load_n(&g->dev[i]->progress, __ATOMIC_RELAXED);
            *first_missing = *first_missing < 0 ? i : *first_missing;
        }
    }
    return sum;
}

static uint64_t epoch_now(const ql_comm_group *g) { return __atomic_load_n(&g->epoch, __ATOMIC_ACQUIRE); }

/* All lanes meet. What a lane wrote before is visible to all after. `src` NULL: nothing new is published, and what was
 * stays readable for a peer that is still copying. */
static ql_status rendezvous(ql_comm *comm, const void *src, void *dst, size_t bytes) {
    ql_comm_group *g = comm->group;
    ql_error *err = comm->dev->err;
    if (ql_abort_raised(g->abort)) {
        return ql_abort_error(g->abort, err);
    }
    ql_lock(&g->mutex);
    if (src) {
        g->src[comm->lane] = src;
        g->dst[comm->lane] = dst;
        g->bytes[comm->lane] = bytes;
    }
    g->arrived[comm->lane] = true;
    uint64_t epoch = epoch_now(g);
    if (++g->n_arrived == g->n_lane) {
        ql_status status = QL_OK;
        for (int32_t i = 0; src && i < g->n_lane; i++) {
            if (g->bytes[i] != bytes) {
                status =
                    ql_fail(err, QL_ERR_INTERNAL, "lane %d: collective of %zu bytes met one of %zu bytes on lane %d",
                            comm->lane, bytes, g->bytes[i], i);
            }
        }
        g->n_arrived = 0;
        memset(g->arrived, 0, sizeof g->arrived);
        __atomic_store_n(&g->epoch, epoch + 1, __ATOMIC_RELEASE); /* pairs with epoch_now */
        ql_cond_broadcast(&g->cond);
        ql_unlock(&g->mutex);
        return status;
    }
    ql_unlock(&g->mutex);
    for (int32_t i = 0; i < YIELDS; i++) {
        if (epoch_now(g) != epoch) {
            return QL_OK;
        }
        sched_yield();
    }
    ql_lock(&g->mutex);
    int32_t missing;
    uint64_t seen = missing_progress(g, &missing);
    int64_t wait_ns = (int64_t)g->wait_ms * 1000000;
    int64_t look_ns = wait_ns / 8 < 20000000 ? wait_ns / 8 : 20000000; /* the abort flag has no condition variable */
    int64_t progress_ns = ql_now_ns();
    ql_status status = QL_OK;
    while (epoch_now(g) == epoch && status == QL_OK) {
        ql_cond_wait_until(&g->cond, &g->mutex, ql_now_ns() + look_ns);
        if (epoch_now(g) != epoch) {
            break;
        }
        uint64_t now = missing_progress(g, &missing);
        if (ql_abort_raised(g->abort)) {
            status = ql_abort_error(g->abort, err);
        } else if (now != seen) {
            seen = now;
            progress_ns = ql_now_ns();
        } else if (ql_now_ns() - progress_ns >= wait_ns) {
            status = ql_fail(err, QL_ERR_DEVICE,
                             "lane %d waited %d ms for lane %d, which made no progress (deadline of a wait)",
                             comm->lane, g->wait_ms, missing);
        }
    }
    ql_unlock(&g->mutex);
    return status;
}

/* (0+1)+(2+3) and so on: the lanes' part of the one reduction tree. */
static float tree_sum(const float *const *src, int32_t n_lane, int64_t i) {
    float v[MAX_LANES];
    for (int32_t l = 0; l < n_lane; l++) {
        v[l] = src[l][i];
    }
    for (int32_t width = n_lane; width > 1; width /= 2) {
        for (int32_t l = 0; l < width / 2; l++) {
            v[l] = v[2 * l] + v[2 * l + 1];
        }
    }
    return v[0];
}

static ql_status reduce(ql_comm *comm, const float *src, float *dst, int64_t n) {
    if (comm->n_lane == 1) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
        return QL_OK;
    }
    ql_comm_group *g = comm->group;
    QL_TRY(rendezvous(comm, src, dst, (size_t)n * sizeof *dst));
    const float *const *from = (const float *const *)g->src;
    int64_t i0 = n * comm->lane / comm->n_lane, i1 = n * (comm->lane + 1) / comm->n_lane;
    for (int64_t i = i0; i < i1; i++) {
        float sum = tree_sum(from, comm->n_lane, i);
        for (int32_t l = 0; l < comm->n_lane; l++) {
            ((float *)g->dst[l])[i] = sum;
        }
    }
    return rendezvous(comm, NULL, NULL, 0);
}

static ql_status gather(ql_comm *comm, const void *src, void *dst, size_t bytes) {
    if (comm->n_lane == 1) {
        memcpy(dst, src, bytes);
        return QL_OK;
    }
    ql_comm_group *g = comm->group;
    QL_TRY(rendezvous(comm, src, dst, bytes));
    for (int32_t l = 0; l < comm->n_lane; l++) {
        memcpy((char *)dst + (size_t)l * bytes, g->src[l], bytes);
    }
    return rendezvous(comm, NULL, NULL, 0);
}

ql_status ql_comm_host_open(ql_comm_group **group, int32_t n_lane, ql_abort *abort, int32_t wait_ms,
                            const ql_allocator *mem, ql_error *err) {
    ql_comm_group *g = NULL;
    QL_TRY(ql_alloc(mem, 1, sizeof *g, "the lanes' shared state", (void **)&g, err));
    g->mem = mem;
    g->abort = abort;
    g->n_lane = n_lane;
    g->wait_ms = wait_ms;
    ql_status status = ql_mutex_init(&g->mutex, err);
    if (status != QL_OK) {
        ql_free(mem, g);
        return status;
    }
    status = ql_cond_init(&g->cond, err);
    if (status != QL_OK) {
        ql_mutex_deinit(&g->mutex);
        ql_free(mem, g);
        return status;
    }
    *group = g;
    return QL_OK;
}

void ql_comm_host_bind(ql_comm_group *group, int32_t lane, ql_dev *dev, ql_comm *comm) {
    *comm = (ql_comm){
        .lane = lane, .n_lane = group->n_lane, .dev = dev, .group = group, .reduce = reduce, .gather = gather};
    group->dev[lane] = dev;
}

void ql_comm_host_close(ql_comm_group **group) {
    if (*group) {
        ql_cond_deinit(&(*group)->cond);
        ql_mutex_deinit(&(*group)->mutex);
        ql_free((*group)->mem, *group);
        *group = NULL;
    }
}
