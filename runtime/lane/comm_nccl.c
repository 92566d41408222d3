/* NCCL's entry points, and communicator set-up under a deadline. */
#include "runtime/base/mem.h"
#include "runtime/base/thread.h"
#include "runtime/lane/nccl_api.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST = 22705 };

static int major_of(int version) { return version < 10000 ? version / 1000 : version / 10000; }

ql_status ql_nccl_open(ql_nccl *nccl, ql_error *err) {
    memset(nccl, 0, sizeof *nccl);
    const char *path = getenv("QLANE_NCCL");
    path = path && *path ? path : "libnccl.so.2";
    nccl->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!nccl->library) {
        return ql_fail(err, QL_ERR_DEVICE,
                       "more than one CUDA lane needs NCCL 2.27.5 or later (QLANE_NCCL=FILE says where it is): %s",
                       dlerror());
    }
    ncclResult_t (*get_version)(int *) = NULL;
    const struct {
        const char *name;
        void *at;
    } entries[] = {
        {"ncclGetVersion", &get_version},
        {"ncclCommInitAll", &nccl->comm_init_all},
        {"ncclCommDestroy", &nccl->comm_destroy},
        {"ncclCommAbort", &nccl->comm_abort},
        {"ncclAllReduce", &nccl->all_reduce},
        {"ncclAllGather", &nccl->all_gather},
        {"ncclGetErrorString", &nccl->error_string},
    };
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *f = dlsym(nccl->library, entries[i].name);
        if (!f) {
            ql_status status =
                ql_fail(err, QL_ERR_DEVICE, "%s has no %s; NCCL 2.27.5 or later is needed", path, entries[i].name);
            ql_nccl_close(nccl);
            return status;
        }
        memcpy(entries[i].at, &f, sizeof f); /* an object pointer is a function pointer on this system */
    }
    if (get_version(&nccl->version) != ncclSuccess || nccl->version < OLDEST || major_of(nccl->version) != NCCL_MAJOR) {
        ql_status status =
            ql_fail(err, QL_ERR_DEVICE, "%s is NCCL %d.%d.%d; accepted are %d.x from 2.27.5", path,
                    major_of(nccl->version), nccl->version % 10000 / 100, nccl->version % 100, NCCL_MAJOR);
        ql_nccl_close(nccl);
        return status;
    }
    return QL_OK;
}

void ql_nccl_close(ql_nccl *nccl) {
    if (nccl->library) {
        dlclose(nccl->library);
    }
    memset(nccl, 0, sizeof *nccl);
}

/* Shared by the caller and the thread that may outlive it: freed by whoever comes last. */
typedef struct attempt {
    ql_mutex mutex; /* guards done and left */
    ql_cond cond;
    bool done, left;
    const ql_nccl *nccl;
    int n, ordinal[64];
    ncclComm_t comm[64];
    ncclResult_t result;
} attempt;

static void free_attempt(attempt *a) {
    ql_cond_deinit(&a->cond);
    ql_mutex_deinit(&a->mutex);
    free(a);
}

static void *run_attempt(void *arg) {
    attempt *a = arg;
    ncclResult_t (*init)(ncclComm_t *, int, const int *) = a->nccl->comm_init_all;
    ncclResult_t result = init(a->comm, a->n, a->ordinal);
    ql_lock(&a->mutex);
    a->result = result;
    a->done = true;
    bool left = a->left;
    ql_cond_signal(&a->cond);
    ql_unlock(&a->mutex);
    if (left) {
        free_attempt(a);
    }
    return NULL;
}

ql_status ql_nccl_init_all(const ql_nccl *nccl, ncclComm_t *comm, int32_t n, const int32_t *ordinal, int32_t init_ms,
                           ql_error *err) {
    attempt *a = NULL;
    QL_TRY(ql_alloc(NULL, 1, sizeof *a, "communicator set-up", (void **)&a, err));
    a->nccl = nccl;
    a->n = n;
    memcpy(a->ordinal, ordinal, (size_t)n * sizeof *ordinal);
    ql_status status;
    ql_thread thread;
    QL_TRY_GOTO(ql_mutex_init(&a->mutex, err), fail_mutex);
    QL_TRY_GOTO(ql_cond_init(&a->cond, err), fail_cond);
    QL_TRY_GOTO(ql_thread_start(&thread, "qlane-nccl-init", run_attempt, a, err), fail_thread);

    ql_lock(&a->mutex);
    int64_t deadline = ql_now_ns() + (int64_t)init_ms * 1000000;
    while (!a->done && ql_cond_wait_until(&a->cond, &a->mutex, deadline)) {
    }
    bool done = a->done;
    a->left = !done;
    ql_unlock(&a->mutex);
    if (!done) {
        pthread_detach(thread);
        return ql_fail(err, QL_ERR_DEVICE,
                       "NCCL did not connect %d GPUs within %d ms; likely causes: peer-to-peer blocked by IOMMU or ACS "
                       "(try NCCL_P2P_DISABLE=1), a small BAR1, a busy or hung GPU, too little /dev/shm",
                       n, init_ms);
    }
    ql_thread_join(thread);
    if (a->result != ncclSuccess) {
        status = ql_fail(err, QL_ERR_DEVICE, "NCCL cannot connect %d GPUs: %s", n, nccl->error_string(a->result));
    } else {
        memcpy(comm, a->comm, (size_t)n * sizeof *comm);
        status = QL_OK;
    }
fail_thread:
    ql_cond_deinit(&a->cond);
fail_cond:
    ql_mutex_deinit(&a->mutex);
fail_mutex:
    free(a);
    return status;
}
