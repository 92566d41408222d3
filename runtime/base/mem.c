#include "runtime/base/mem.h"

#include <stdlib.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1 /* clang's spelling of gcc's macro */
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(p, n) __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define POISON(p, n) ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

void *ql_calloc(const ql_allocator *mem, size_t n, size_t size) {
    size_t bytes;
    if (!ql_mul_size(n, size, &bytes)) {
        return NULL;
    }
    bytes = bytes ? bytes : 1;
    if (!mem) {
        return calloc(1, bytes);
    }
    void *p = mem->malloc(mem->user, bytes);
    if (p) {
        memset(p, 0, bytes);
    }
    return p;
}

ql_status ql_alloc(const ql_allocator *mem, size_t n, size_t size, const char *what, void **out, ql_error *err) {
    void *p = ql_calloc(mem, n, size);
    if (!p) {
        return ql_fail(err, QL_ERR_MEMORY, "cannot allocate %zu x %zu bytes of host memory for %s", n, size, what);
    }
    *out = p;
    return QL_OK;
}

void *ql_realloc(const ql_allocator *mem, void *old, size_t bytes) {
    bytes = bytes ? bytes : 1;
    return mem ? mem->realloc(mem->user, old, bytes) : realloc(old, bytes);
}

void ql_free(const ql_allocator *mem, void *ptr) {
    if (mem) {
        mem->free(mem->user, ptr);
    } else {
        free(ptr);
    }
}

char *ql_strndup(const ql_allocator *mem, const char *text, size_t n) {
    char *p = ql_calloc(mem, n + 1, 1);
    if (p) {
        memcpy(p, text, n);
    }
    return p;
}

char *ql_strdup(const ql_allocator *mem, const char *text) { return ql_strndup(mem, text, strlen(text)); }

ql_status ql_arena_init(ql_arena *arena, const ql_allocator *mem, size_t cap, const char *what, ql_error *err) {
    memset(arena, 0, sizeof *arena);
    size_t bytes;
    if (!ql_add_size(cap, 64, &bytes)) {
        return ql_fail(err, QL_ERR_MEMORY, "%s would need more than the address space", what);
    }
    QL_TRY(ql_alloc(mem, bytes, 1, what, &arena->block, err));
    arena->base = (unsigned char *)(((uintptr_t)arena->block + 63) & ~(uintptr_t)63);
    arena->cap = cap;
    POISON(arena->base, cap);
    return QL_OK;
}

void ql_arena_deinit(ql_arena *arena, const ql_allocator *mem) {
    if (arena->block) {
        UNPOISON(arena->base, arena->cap);
        ql_free(mem, arena->block);
    }
    memset(arena, 0, sizeof *arena);
}

void *ql_arena_take(ql_arena *arena, size_t bytes) {
    size_t room = ql_arena_round(bytes);
    if (room < bytes || room > arena->cap - arena->len) {
        return NULL;
    }
    void *p = arena->base + arena->len;
    arena->len += room;
    arena->peak = arena->len > arena->peak ? arena->len : arena->peak;
    UNPOISON(p, bytes);
    return p;
}

void ql_arena_reset(ql_arena *arena) {
    arena->len = 0;
    POISON(arena->base, arena->cap);
}
