#include "runtime/lane/comm.h"

#include <string.h>

ql_status ql_abort_init(ql_abort *abort, ql_error *err) {
    memset(abort, 0, sizeof *abort);
    return ql_mutex_init(&abort->mutex, err);
}

void ql_abort_deinit(ql_abort *abort) { ql_mutex_deinit(&abort->mutex); }

void ql_abort_raise(ql_abort *abort, const ql_error *error) {
    ql_lock(&abort->mutex);
    if (abort->first.status == QL_OK) {
        abort->first = *error;
        __atomic_store_n(&abort->flag, 1, __ATOMIC_RELEASE); /* pairs with ql_abort_raised */
        for (size_t i = 0; i < sizeof abort->mirror / sizeof *abort->mirror; i++) {
            if (abort->mirror[i]) {
                __atomic_store_n(abort->mirror[i], 1, __ATOMIC_RELEASE);
            }
        }
    }
    ql_unlock(&abort->mutex);
}

void ql_abort_mirror(ql_abort *abort, int32_t index, uint32_t *word) {
    ql_lock(&abort->mutex);
    abort->mirror[index] = word;
    if (word) {
        __atomic_store_n(word, ql_abort_raised(abort) ? 1 : 0, __ATOMIC_RELEASE);
    }
    ql_unlock(&abort->mutex);
}

ql_status ql_abort_error(ql_abort *abort, ql_error *err) {
    if (!ql_abort_raised(abort)) {
        return QL_OK;
    }
    ql_lock(&abort->mutex);
    ql_error first = abort->first;
    ql_unlock(&abort->mutex);
    return ql_fail(err, first.status, "%s", first.text);
}
