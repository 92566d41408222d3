#include "runtime/engine/turns.h"

#include "runtime/base/thread.h"

/* A GPU's queue: who comes takes a number. The only state that engines share, as they share the GPUs. */
typedef struct turnstile {
    ql_mutex mutex; /* guards what follows; held while the number is looked at, not during the turn */
    ql_cond moved;
    uint64_t next, serving;
} turnstile;

static turnstile turnstiles[QL_TURNS_GPUS]; /* zeros are mutexes and conditions at rest */

void ql_turns_take(uint64_t gpus) {
    for (int32_t i = 0; i < QL_TURNS_GPUS; i++) { /* in one order, so that nobody waits in a circle */
        turnstile *t = &turnstiles[i];
        if (gpus >> i & 1) {
            ql_lock(&t->mutex);
            uint64_t number = t->next++;
            while (t->serving != number) {
                ql_cond_wait(&t->moved, &t->mutex);
            }
            ql_unlock(&t->mutex);
        }
    }
}

void ql_turns_end(uint64_t gpus) {
    for (int32_t i = 0; i < QL_TURNS_GPUS; i++) {
        turnstile *t = &turnstiles[i];
        if (gpus >> i & 1) {
            ql_lock(&t->mutex);
            t->serving++;
            ql_cond_broadcast(&t->moved);
            ql_unlock(&t->mutex);
        }
    }
}
