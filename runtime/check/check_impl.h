/* Inside of the self-checks: what their files share. check.c settles devices and names and reports, each other file is
 * one check or several of a kind.
 *
 * A check walks all its cases in the same order each time and asks of each whether it is to run; listing, filtering and
 * counting what was skipped are decided there, in one place. Cases are deterministic: inputs come from their name and
 * place alone.
 */
#ifndef QL_RUNTIME_CHECK_CHECK_IMPL_H
#define QL_RUNTIME_CHECK_CHECK_IMPL_H

#include "runtime/base/log.h"
#include "runtime/engine/engine_impl.h"

typedef struct ql_check {
    ql_options options;
    const ql_allocator *mem;
    ql_device_kind kind;
    int32_t n_device; /* GPUs; host lanes: as many as any model allows */
    int32_t ordinal[QL_MAX_LANES];
    ql_log log;
    bool run_long, listing;
    const char *const *names;
    int32_t n_names;
    bool *met; /* [n_names] a case begins with it */
    ql_check_fn fn;
    void *user;
    char name[112]; /* of the case under way */
} ql_check;

/* Lane counts are asked for as `for (n = ql_check_lanes(c, 0); n; n = ql_check_lanes(c, n))`. */
int32_t ql_check_lanes(const ql_check *c, int32_t after);

/* Begins the case NAME.lanesN. Returns whether to run it; a case that is only listed or skipped is reported here. Every
 * case begun with true is ended with ql_check_end. */
bool ql_check_begin(ql_check *c, int32_t n_lane, const char *fmt, ...) QL_PRINTF(3, 4);

/* `outcome`'s name is filled in here. */
void ql_check_end(ql_check *c, const ql_check_case *outcome);

/* The checks. Faults of a case are its outcome; what is returned is a failure to go on at all. */
ql_status ql_check_collectives(ql_check *c, ql_error *err);

#endif
