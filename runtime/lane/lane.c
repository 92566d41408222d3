#include "runtime/lane/lane.h"

#include "runtime/base/mem.h"

#include <fenv.h>
#include <stdio.h>
#include <string.h>

/* Waking a thread takes longer than what is done between two steps of generation, so both sides look for a while: a lane for its
 * next command, and who waits for the lanes from when they should be about to be done, as they took as long the last time. */
enum { LANE_LOOKS_NS = 200 * 1000, MOST_LOOKS_NS = 1000 * 1000, LOOK_BEFORE = 16 /* that part of the last time */ };

static void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Without the mutex, until there is a command. */
static void look_for_command(const ql_lane *lane) {
    int64_t end = ql_now_ns() + LANE_LOOKS_NS;
    while (!__atomic_load_n(&lane->fn, __ATOMIC_RELAXED) && ql_now_ns() < end) {
        pause_cpu();
    }
}

/* Without the mutex, until all lanes are done. */
static void look_for_end(const ql_lane_group *g, int64_t end) {
    while (__atomic_load_n(&g->n_busy, __ATOMIC_RELAXED) > 0 && ql_now_ns() < end) {
        pause_cpu();
    }
}

static void *lane_main(void *arg) {
    ql_lane *lane = arg;
    ql_lane_group *g = lane->group;
    fesetenv(FE_DFL_ENV); /* a thread inherits its creator's floating-point mode, and flushed subnormals change bits */
    ql_lock(&g->mutex);
    for (;;) {
        while (!lane->fn && !g->closing) {
            ql_cond_wait(&g->posted, &g->mutex);
        }
        if (!lane->fn) {
            break;
        }
        ql_lane_fn fn = lane->fn;
        void *fn_arg = lane->arg;
        ql_unlock(&g->mutex);
        if (fn(lane, fn_arg) != QL_OK) {
            ql_abort_raise(&g->abort, &lane->err);
            if (lane->comm.let_go) {
                lane->comm.let_go(&lane->comm);
            }
        }
        ql_lock(&g->mutex);
        __atomic_store_n(&lane->fn, NULL, __ATOMIC_RELAXED);
        if (__atomic_sub_fetch(&g->n_busy, 1, __ATOMIC_RELAXED) == 0 || ql_abort_raised(&g->abort)) {
            ql_cond_signal(&g->finished);
            ql_cond_broadcast(&g->posted); /* lanes on their way out wait for n_busy == 0 */
        }
        if (g->looks) {
            ql_unlock(&g->mutex);
            look_for_command(lane);
            ql_lock(&g->mutex);
        }
    }
    int64_t deadline = ql_now_ns() + (int64_t)g->wait_ms * 1000000;
    while (g->n_busy > 0 && ql_cond_wait_until(&g->posted, &g->mutex, deadline)) {
    }
    bool idle = g->n_busy == 0;
    ql_unlock(&g->mutex);
    if (idle && g->fini) {
        g->fini(lane);
    }
    return NULL;
}

ql_status ql_lanes_open(ql_lane_group *g, int32_t n_lane, int32_t wait_ms, void (*fini)(ql_lane *lane), void *user,
                        ql_log *log, const ql_allocator *mem, ql_error *err) {
    memset(g, 0, sizeof *g);
    g->mem = mem;
    g->log = log;
    g->wait_ms = wait_ms;
    g->fini = fini;
    g->user = user;
    ql_status status;
    QL_TRY_GOTO(ql_alloc(mem, (size_t)n_lane, sizeof *g->lane, "lanes", (void **)&g->lane, err), fail);
    QL_TRY_GOTO(ql_abort_init(&g->abort, err), fail_abort);
    QL_TRY_GOTO(ql_mutex_init(&g->mutex, err), fail_mutex);
    QL_TRY_GOTO(ql_cond_init(&g->posted, err), fail_posted);
    QL_TRY_GOTO(ql_cond_init(&g->finished, err), fail_finished);
    for (int32_t i = 0; i < n_lane; i++) {
        ql_lane *lane = &g->lane[i];
        char name[32];
        snprintf(name, sizeof name, "qlane-%d", i);
        lane->index = i;
        lane->group = g;
        lane->dev.err = &lane->err;
        g->n_lane = i + 1;
        status = ql_thread_start(&lane->thread, name, lane_main, lane, err);
        if (status != QL_OK) {
            ql_lanes_close(g);
            return status;
        }
        lane->started = true;
    }
    return QL_OK;

fail_finished:
    ql_cond_deinit(&g->posted);
fail_posted:
    ql_mutex_deinit(&g->mutex);
fail_mutex:
    ql_abort_deinit(&g->abort);
fail_abort:
    ql_free(mem, g->lane);
fail:
    memset(g, 0, sizeof *g);
    return status;
}

/* What the lanes still at work have done so far, and which of them has done least: all have the same to do, so the others
 * wait for that one. Called with the mutex held. */
static uint64_t busy_progress(const ql_lane_group *g, int32_t *last) {
    uint64_t sum = 0, least = UINT64_MAX;
    *last = -1;
    for (int32_t i = 0; i < g->n_lane; i++) {
        if (g->lane[i].fn) {
            uint64_t done = __atomic_load_n(&g->lane[i].dev.progress, __ATOMIC_RELAXED);
            sum += done;
            if (done < least) {
                least = done;
                *last = i;
            }
        }
    }
    return sum;
}

ql_status ql_lanes_run(ql_lane_group *g, ql_lane_fn fn, void *arg, ql_error *err) {
    if (ql_abort_raised(&g->abort)) {
        return ql_abort_error(&g->abort, err);
    }
    ql_lock(&g->mutex);
    for (int32_t i = 0; i < g->n_lane; i++) {
        __atomic_store_n(&g->lane[i].fn, fn, __ATOMIC_RELAXED);
        g->lane[i].arg = arg;
    }
    __atomic_store_n(&g->n_busy, g->n_lane, __ATOMIC_RELAXED);
    ql_cond_broadcast(&g->posted);

    /* Lanes report peers in a collective that hang by themselves; this deadline is for the last ones standing, so it is a
     * little later to let the message that names the collective win. */
    int64_t wait_ns = (int64_t)g->wait_ms * 1000000 + 100000000, look_ns = wait_ns / 8;
    int64_t begin_ns = ql_now_ns(), progress_ns = begin_ns;
    ql_comm *hung_comm = NULL;
    int32_t busy;
    uint64_t seen = busy_progress(g, &busy);
    if (g->looks && fn == g->last_fn && g->last_ns < look_ns) {
        int64_t looks_ns = g->last_ns / LOOK_BEFORE < MOST_LOOKS_NS ? g->last_ns / LOOK_BEFORE : MOST_LOOKS_NS;
        int64_t soon_ns = begin_ns + g->last_ns - looks_ns;
        while (g->n_busy > 0 && !ql_abort_raised(&g->abort) && ql_cond_wait_until(&g->finished, &g->mutex, soon_ns)) {
        }
        if (g->n_busy > 0) {
            ql_unlock(&g->mutex);
            look_for_end(g, soon_ns + 2 * looks_ns);
            ql_lock(&g->mutex);
        }
    }
    while (g->n_busy > 0 && !ql_abort_raised(&g->abort)) {
        ql_cond_wait_until(&g->finished, &g->mutex, ql_now_ns() + look_ns);
        uint64_t now = busy_progress(g, &busy);
        if (now != seen) {
            seen = now;
            progress_ns = ql_now_ns();
        } else if (g->n_busy > 0 && ql_now_ns() - progress_ns >= wait_ns) {
            ql_error hung = {QL_OK, ""};
            ql_fail(&hung, QL_ERR_DEVICE, "lane %d made no progress for %d ms (deadline of a wait)", busy, g->wait_ms);
            ql_abort_raise(&g->abort, &hung);
            hung_comm = &g->lane[busy].comm;
        }
    }
    ql_unlock(&g->mutex);
    g->last_fn = fn;
    g->last_ns = ql_now_ns() - begin_ns;
    if (hung_comm && hung_comm->let_go) { /* may take its time: not under the mutex that finishing lanes need */
        hung_comm->let_go(hung_comm);
    }
    return ql_abort_error(&g->abort, err);
}

bool ql_lanes_close(ql_lane_group *g) {
    if (!g->lane) {
        return true;
    }
    ql_lock(&g->mutex);
    g->closing = true;
    ql_cond_broadcast(&g->posted);
    ql_unlock(&g->mutex);
    bool all = true;
    int64_t deadline = ql_now_ns() + (int64_t)g->wait_ms * 1000000 + 1000000000;
    for (int32_t i = 0; i < g->n_lane; i++) {
        if (g->lane[i].started && !ql_thread_join_until(g->lane[i].thread, deadline)) {
            ql_logf(g->log, QL_LOG_ERROR, "lane %d did not come back; its memory stays allocated", i);
            all = false;
        }
    }
    if (!all) {
        return false;
    }
    ql_cond_deinit(&g->finished);
    ql_cond_deinit(&g->posted);
    ql_mutex_deinit(&g->mutex);
    ql_abort_deinit(&g->abort);
    ql_free(g->mem, g->lane);
    memset(g, 0, sizeof *g);
    return true;
}
