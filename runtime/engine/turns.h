/* Turns on GPUs that several engines of one process share.
 *
 * A chain takes all of a GPU and waits there for its peers', so two engines at once could each hold one GPU and wait for the other.
 * Engines of more than one lane therefore take turns on each GPU, first come first served. Any thread; a turn is ended by the
 * thread that took it, and no thread takes one while it has one.
 */
#ifndef QL_RUNTIME_ENGINE_TURNS_H
#define QL_RUNTIME_ENGINE_TURNS_H

#include <stdint.h>

enum { QL_TURNS_GPUS = 64 }; /* of others the ordinal modulo this stands for them */

/* Waits until it is the caller's turn on every GPU of a set, a bit each. An empty set is no turn. */
void ql_turns_take(uint64_t gpus);
void ql_turns_end(uint64_t gpus);

#endif
