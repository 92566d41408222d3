/* Host memory: the caller's allocator, and arenas by lifetime.
 *
 * A `const ql_allocator *` is passed down from the engine's options; NULL means malloc. Code that runs per step takes
 * from arenas that were sized when the engine opened, never from here.
 */
#ifndef QL_RUNTIME_BASE_MEM_H
#define QL_RUNTIME_BASE_MEM_H

#include "runtime/base/status.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sizes and counts come from files: multiply and add through these. They return false on overflow. */
static inline bool ql_mul_size(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }
static inline bool ql_add_size(size_t a, size_t b, size_t *out) { return !__builtin_add_overflow(a, b, out); }
static inline bool ql_mul_u64(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_mul_overflow(a, b, out); }
static inline bool ql_add_u64(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_add_overflow(a, b, out); }

/* n elements of `size` bytes, zeroed; NULL on overflow or exhaustion. n = 0 gives a pointer that may be freed. */
void *ql_calloc(const ql_allocator *mem, size_t n, size_t size);

/* Like ql_calloc, with the error written: names `what` and the bytes asked for. */
ql_status ql_alloc(const ql_allocator *mem, size_t n, size_t size, const char *what, void **out, ql_error *err);

void *ql_realloc(const ql_allocator *mem, void *old, size_t bytes);
void ql_free(const ql_allocator *mem, void *ptr);

/* A copy of the string, or NULL on exhaustion. */
char *ql_strdup(const ql_allocator *mem, const char *text);
char *ql_strndup(const ql_allocator *mem, const char *text, size_t n);

/* A bump arena over one block. Not thread safe: one owner. Everything in it is 64-byte aligned. */
typedef struct ql_arena {
    unsigned char *base;
    size_t cap, len, peak;
    void *block; /* what the allocator gave; base is aligned inside it */
} ql_arena;

ql_status ql_arena_init(ql_arena *arena, const ql_allocator *mem, size_t cap, const char *what, ql_error *err);
void ql_arena_deinit(ql_arena *arena, const ql_allocator *mem);

/* Uninitialised bytes, or NULL when the arena is full: a mistake in its owner's sizing, never a caller's input. */
void *ql_arena_take(ql_arena *arena, size_t bytes);

/* Forgets everything taken; under AddressSanitizer it is poisoned. */
void ql_arena_reset(ql_arena *arena);

/* What `bytes` occupies in an arena. */
static inline size_t ql_arena_round(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#ifdef __cplusplus
}
#endif
#endif
