#include "runtime/engine/device.h"

#include "loader/shard.h"
#include "runtime/engine/turns.h"

#include <stdio.h>
#include <string.h>

#if QL_CUDA
#include "kernels/cuda.h"
#include "runtime/lane/comm_cuda.h"
#endif

/* ---- choice -------------------------------------------------------------------------------------------------------- */

#if QL_CUDA
static ql_status choose_cuda(ql_devices *d, const ql_options *o, const ql_config *config, int32_t count,
                             ql_error *err) {
    int32_t n = o->lanes;
    if (n == 0) { /* every GPU that the slices allow */
        for (n = config->slices; n > count; n /= 2) {
        }
    }
    if (n > count && !o->devices) {
        return ql_fail(err, QL_ERR_DEVICE, "%d lanes need %d GPUs; this machine has %d", n, n, count);
    }
    d->kind = QL_DEVICE_CUDA;
    d->n_lane = n;
    d->ops = ql_cuda_ops();
    ql_cuda_device first = {0}, other;
    for (int32_t i = 0; i < n; i++) {
        d->ordinal[i] = o->devices ? o->devices[i] : i;
        for (int32_t j = 0; j < i; j++) {
            if (d->ordinal[j] == d->ordinal[i]) {
                return ql_fail(err, QL_ERR_USAGE, "GPU %d is named for two lanes; each lane needs one of its own",
                               d->ordinal[i]);
            }
        }
        QL_TRY(ql_cuda_info(d->ordinal[i], i ? &other : &first, err));
        if (i && (other.major != first.major || other.minor != first.minor)) {
            return ql_fail(
                err, QL_ERR_DEVICE,
                "GPU %d is an %s and GPU %d an %s: their kernels differ, and so would the bits; use GPUs of one kind",
                d->ordinal[0], first.name, d->ordinal[i], other.name);
        }
    }
    d->cc = first.code;
    return QL_OK;
}
#endif

ql_status ql_devices_choose(ql_devices *d, const ql_options *o, const ql_config *config, ql_error *err) {
    memset(d, 0, sizeof *d);
    if (o->devices && o->lanes == 0) {
        return ql_fail(err, QL_ERR_USAGE, "options.devices needs options.lanes, the number of its entries");
    }
    if (o->lanes != 0) { /* what the model does not allow is no question of devices */
        ql_shard shard;
        QL_TRY(ql_shard_init(&shard, config, o->lanes, 0, err));
    }
#if QL_CUDA
    char why[96] = "";
    int32_t count = o->device == QL_DEVICE_HOST ? 0 : ql_cuda_count(why);
    if (count > 0) {
        return choose_cuda(d, o, config, count, err);
    }
    if (o->device == QL_DEVICE_CUDA) {
        return ql_fail(err, QL_ERR_DEVICE, "no usable GPU%s%s", why[0] ? ": " : "", why);
    }
#else
    if (o->device == QL_DEVICE_CUDA) {
        return ql_fail(err, QL_ERR_DEVICE, "this build has no CUDA lanes; accepted is the host device");
    }
#endif
    if (o->devices) {
        return ql_fail(err, QL_ERR_USAGE, "options.devices names GPUs and the lanes are on the host");
    }
    d->kind = QL_DEVICE_HOST;
    d->n_lane = o->lanes ? o->lanes : 1;
    d->ops = ql_host_ops();
    return QL_OK;
}

#if QL_CUDA
/* That the GPUs of a plan are there and cannot reach each other's memory. */
static bool lacks_peers(ql_devices *d, const ql_options *o) {
    if (d->n_lane == 1 || d->n_lane > QL_MAX_SLICES) { /* too many are refused later */
        return false;
    }
    int32_t count = ql_cuda_count(NULL);
    for (int32_t i = 0; i < d->n_lane; i++) {
        d->ordinal[i] = o->devices ? o->devices[i] : i;
        if (d->ordinal[i] < 0 || d->ordinal[i] >= count) {
            return false;
        }
    }
    return !ql_comm_cuda_peers(d->ordinal, d->n_lane);
}
#endif

ql_status ql_devices_of_plan(ql_devices *d, const ql_options *o, ql_error *err) {
    memset(d, 0, sizeof *d);
    d->n_lane = o->lanes ? o->lanes : 1;
    d->kind = o->device == QL_DEVICE_CUDA ? QL_DEVICE_CUDA : QL_DEVICE_HOST;
    d->ops = ql_host_ops();
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        d->ops = ql_cuda_ops();
        d->nccl = lacks_peers(d, o);
    }
    (void)err;
    return QL_OK;
#else
    return d->kind == QL_DEVICE_HOST
               ? QL_OK
               : ql_fail(err, QL_ERR_DEVICE, "this build has no CUDA lanes; accepted is the host device");
#endif
}

uint64_t ql_devices_comm_bytes(const ql_devices *d, size_t max_bytes) {
#if QL_CUDA
    return d->kind == QL_DEVICE_CUDA ? ql_comm_cuda_bytes(d->n_lane, max_bytes) : 0;
#else
    (void)d, (void)max_bytes;
    return 0;
#endif
}

/* Measured on H200 (driver 580, CUDA 13.0) with this code for one architecture; NCCL 2.28.3 on two of them, its communicators and its
 * first collectives. */
enum { CONTEXT_BYTES = 560 << 20, NCCL_BYTES = 862 << 20, LATER_BYTES = 192 << 20 };

uint64_t ql_devices_nccl_bytes(const ql_devices *d) {
    return d->kind == QL_DEVICE_CUDA && d->n_lane > 1 && d->nccl ? NCCL_BYTES : 0;
}

uint64_t ql_devices_context_bytes(const ql_devices *d) {
    return d->kind == QL_DEVICE_HOST ? 0 : CONTEXT_BYTES + ql_devices_nccl_bytes(d);
}

/* ---- open ---------------------------------------------------------------------------------------------------------- */

ql_status ql_devices_open(ql_devices *d, const ql_options *o, ql_lane_group *lanes, size_t max_bytes, ql_error *err) {
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        ql_comm_cuda_options co = {.n_lane = d->n_lane,
                                   .ordinal = d->ordinal,
                                   .max_bytes = max_bytes,
                                   .wait_ms = o->wait_ms,
                                   .init_ms = o->init_ms,
                                   .abort = &lanes->abort,
                                   .log = lanes->log,
                                   .mem = lanes->mem};
        lanes->looks = ql_cores() > d->n_lane + 1; /* lanes look for their GPUs; one more looks for them */
        return ql_comm_cuda_open(&d->comm, &co, err);
    }
#endif
    (void)max_bytes;
    return ql_comm_host_open(&d->comm, d->n_lane, &lanes->abort, o->wait_ms, lanes->mem, err);
}

ql_status ql_devices_open_lane(ql_devices *d, const ql_options *o, ql_lane *lane) {
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        QL_TRY(ql_cuda_dev_open(&lane->dev, d->ordinal[lane->index], o->kernels, lane->group->mem, &lane->err));
        if (o->profile) {
            QL_TRY(lane->dev.ops->profile(&lane->dev));
        }
        return ql_comm_cuda_bind(d->comm, lane->index, &lane->dev, &lane->comm);
    }
#endif
    QL_TRY(ql_host_dev_open(&lane->dev, o->kernels, lane->group->mem, &lane->err));
    ql_comm_host_bind(d->comm, lane->index, &lane->dev, &lane->comm);
    return QL_OK;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

/* Where an engine takes turns, a bit a GPU; a machine with more than 64 has some that share one, and wait for nothing. */
static uint64_t shared_gpus(const ql_devices *d) {
    uint64_t gpus = 0;
    for (int32_t i = 0; d->kind == QL_DEVICE_CUDA && d->n_lane > 1 && i < d->n_lane; i++) {
        gpus |= (uint64_t)1 << d->ordinal[i] % QL_TURNS_GPUS;
    }
    return gpus;
}

ql_status ql_devices_run(const ql_devices *d, ql_lane_group *lanes, ql_lane_fn fn, void *arg, ql_error *err) {
    uint64_t gpus = shared_gpus(d);
    ql_turns_take(gpus);
    ql_status status = ql_lanes_run(lanes, fn, arg, err);
    ql_turns_end(gpus);
    return status;
}

/* ---- between open and close ----------------------------------------------------------------------------------------- */

#if QL_CUDA
static ql_status connect_lane(ql_lane *lane, void *arg) {
    (void)arg;
    return ql_comm_cuda_connect(&lane->comm);
}

static ql_status prove_lane(ql_lane *lane, void *arg) {
    (void)arg;
    return ql_comm_cuda_prove(&lane->comm);
}

static ql_status begin_lane(ql_lane *lane, void *arg) {
    (void)arg;
    ql_comm_cuda_begin(&lane->comm);
    return QL_OK;
}

typedef struct gpu_memory {
    uint64_t free_bytes[QL_MAX_SLICES], total[QL_MAX_SLICES];
} gpu_memory;

static ql_status ask_lane(ql_lane *lane, void *arg) {
    gpu_memory *m = arg;
    return ql_cuda_mem(&lane->dev, &m->free_bytes[lane->index], &m->total[lane->index]);
}
#endif

ql_status ql_devices_connect(ql_devices *d, ql_lane_group *lanes, ql_error *err) {
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        QL_TRY(ql_lanes_run(lanes, connect_lane, NULL, err));
        for (bool again = true; again;) {
            QL_TRY(ql_devices_run(d, lanes, prove_lane, NULL, err));
            QL_TRY(ql_comm_cuda_settle(d->comm, &again, err));
        }
        d->nccl = strcmp(ql_comm_cuda_path(d->comm), "nccl") == 0;
        return ql_lanes_run(lanes, begin_lane, NULL, err);
    }
#endif
    (void)d, (void)lanes, (void)err;
    return QL_OK;
}

uint64_t ql_devices_free_bytes(ql_devices *d, ql_lane_group *lanes) {
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        gpu_memory m = {0};
        uint64_t least = UINT64_MAX;
        ql_lanes_run(lanes, ask_lane, &m, NULL);
        for (int32_t i = 0; i < d->n_lane; i++) {
            least = m.free_bytes[i] < least ? m.free_bytes[i] : least;
        }
        return least > LATER_BYTES ? least - LATER_BYTES : 0;
    }
#endif
    (void)lanes;
    FILE *f = fopen("/proc/meminfo", "r");
    uint64_t kib = 0;
    char line[128];
    while (f && fgets(line, sizeof line, f)) {
        unsigned long long v;
        if (sscanf(line, "MemAvailable: %llu kB", &v) == 1) {
            kib = v;
        }
    }
    if (f) {
        fclose(f);
    }
    return kib ? kib * 1024 / (uint64_t)d->n_lane : UINT64_MAX;
}

ql_status ql_devices_used_bytes(ql_devices *d, ql_lane_group *lanes, uint64_t *used, ql_error *err) {
    memset(used, 0, (size_t)d->n_lane * sizeof *used);
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        gpu_memory m;
        QL_TRY(ql_lanes_run(lanes, ask_lane, &m, err));
        for (int32_t i = 0; i < d->n_lane; i++) {
            used[i] = m.total[i] - m.free_bytes[i];
        }
    }
#else
    (void)lanes, (void)err;
#endif
    return QL_OK;
}

void ql_devices_describe(const ql_devices *d, const ql_lane *lane, ql_lane_info *info) {
    snprintf(info->link, sizeof info->link, "host");
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        int32_t v = ql_comm_cuda_nccl_version(d->comm);
        snprintf(info->link, sizeof info->link, "%s", ql_comm_cuda_path(d->comm));
        if (v > 0) {
            snprintf(info->nccl, sizeof info->nccl, "%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
        }
    }
#else
    (void)d;
#endif
    lane->dev.ops->describe(&lane->dev, info);
}

/* ---- close --------------------------------------------------------------------------------------------------------- */

void ql_devices_close_lane(ql_devices *d, ql_lane *lane) {
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        ql_comm_cuda_unbind(&lane->comm);
    }
#else
    (void)d;
#endif
    if (lane->dev.ops) {
        lane->dev.ops->close(&lane->dev);
    }
}

void ql_devices_close(ql_devices *d) {
#if QL_CUDA
    if (d->kind == QL_DEVICE_CUDA) {
        ql_comm_cuda_close(&d->comm);
        return;
    }
#endif
    ql_comm_host_close(&d->comm);
}
