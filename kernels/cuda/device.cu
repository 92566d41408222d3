/* The CUDA device: opening, memory, copies, graphs, the op table.
 *
 * One explicit non-blocking stream carries everything, so ops are ordered by being called. Copies from the host go
 * through a ring of pinned slots, because the driver's own staging of pageable memory would block the lane's thread;
 * results wait in pinned memory until sync hands them over. Nothing is allocated after opening but what alloc and
 * weight_load are asked for.
 */
#include "kernels/cuda.h"

#include "kernels/cuda/dev.cuh"
#include "kernels/cuda/nvml.h"

#include <stdio.h>
#include <string.h>

/* ---- errors ------------------------------------------------------------------------------------------------------ */

ql_status ql_cuda_fail(ql_dev *dev, cudaError_t e, const char *what) {
    cudaGetLastError();
    return ql_fail(dev->err, e == cudaErrorMemoryAllocation ? QL_ERR_MEMORY : QL_ERR_DEVICE, "%s: %s: %s", dev->device,
                   what, cudaGetErrorString(e));
}

/* ---- enumeration ------------------------------------------------------------------------------------------------- */

int32_t ql_cuda_count(char *why) {
    enum { WHY_BYTES = 96 };
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess) {
        return n;
    }
    cudaGetLastError();
    if (why) {
        int driver = 0;
        bool asked = e == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess;
        if (asked && driver > 0) {
            snprintf(why, WHY_BYTES, "the driver supports CUDA %d.%d, this build needs %s", driver / 1000,
                     driver % 1000 / 10, ql_cuda_build_version());
        } else if (asked) {
            snprintf(why, WHY_BYTES, "this machine has no NVIDIA driver");
        } else {
            snprintf(why, WHY_BYTES, "%s", cudaGetErrorString(e));
        }
    }
    return 0;
}

static const int build_archs[] = {__CUDA_ARCH_LIST__}; /* 900 is 9.0 */

/* The driver takes the latest code that the GPU can run. */
static int32_t code_for(int32_t cc) {
    int32_t best = 0;
    for (int a : build_archs) {
        best = a / 10 <= cc && a / 10 > best ? a / 10 : best;
    }
    return best;
}

ql_status ql_cuda_info(int32_t ordinal, ql_cuda_device *out, ql_error *err) {
    char why[96] = "";
    int32_t n = ql_cuda_count(why);
    if (ordinal < 0 || ordinal >= n) {
        if (n == 0) {
            return ql_fail(err, QL_ERR_DEVICE, "no CUDA device%s%s", why[0] ? ": " : "", why);
        }
        return ql_fail(err, QL_ERR_DEVICE, "no CUDA device %d; this machine has 0 to %d", ordinal, n - 1);
    }
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, ordinal);
    if (e != cudaSuccess) {
        cudaGetLastError();
        return ql_fail(err, QL_ERR_DEVICE, "CUDA device %d: %s", ordinal, cudaGetErrorString(e));
    }
    *out = ql_cuda_device{};
    snprintf(out->name, sizeof out->name, "%.63s", p.name);
    out->total_bytes = p.totalGlobalMem;
    out->major = p.major;
    out->minor = p.minor;
    out->code = code_for(10 * p.major + p.minor);
    out->n_sm = p.multiProcessorCount;
    out->block_shared = out->code == 75 ? 64 * 1024 : (int32_t)p.sharedMemPerBlockOptin;
    out->pci_domain = p.pciDomainID;
    out->pci_bus = p.pciBusID;
    out->pci_device = p.pciDeviceID;
    return QL_OK;
}

const char *ql_cuda_build_version(void) {
#define QL_TEXT_(x) #x
#define QL_TEXT(x) QL_TEXT_(x)
    return QL_TEXT(__CUDACC_VER_MAJOR__) "." QL_TEXT(__CUDACC_VER_MINOR__);
}

/* ---- phase times ------------------------------------------------------------------------------------------------- */

constexpr int MAX_LAPS = 1024; /* between two syncs; a step of the largest model has fewer */

/* Events of the work since the last sync: at[0] where it began, at[i] the i-th lap. */
struct lap_clock {
    cudaEvent_t at[MAX_LAPS + 1], end;
    uint64_t *ns[MAX_LAPS + 1];
    int n;          /* events recorded; 0: nothing was enqueued */
    uint64_t after; /* nanoseconds from the last lap to the sync that followed: the next lap's */
};

static ql_status start_clock(ql_dev *dev) {
    struct lap_clock *k = cuda(dev)->clock;
    if (k && k->n == 0) {
        CU_TRY(dev, cudaEventRecord(k->at[0], cuda(dev)->stream), "timing");
        k->n = 1;
    }
    return QL_OK;
}

static void lap(ql_dev *dev, uint64_t *ns) {
    struct lap_clock *k = cuda(dev)->clock;
    if (k && k->n == 0) {
        ql_dev_count(ns, k->after);
        k->after = 0;
    } else if (k && k->n <= MAX_LAPS && cudaEventRecord(k->at[k->n], cuda(dev)->stream) == cudaSuccess) {
        k->ns[k->n++] = ns; /* a stream that takes no event fails at the next sync, which reports it */
    }
}

static ql_status stop_clock(ql_dev *dev) {
    struct lap_clock *k = cuda(dev)->clock;
    if (k && k->n) {
        CU_TRY(dev, cudaEventRecord(k->end, cuda(dev)->stream), "timing");
    }
    return QL_OK;
}

static uint64_t ns_between(cudaEvent_t a, cudaEvent_t b) {
    float ms = 0;
    return cudaEventElapsedTime(&ms, a, b) == cudaSuccess ? (uint64_t)((double)ms * 1e6) : 0;
}

/* After a sync. */
static ql_status read_clock(ql_dev *dev) {
    struct lap_clock *k = cuda(dev)->clock;
    if (k && k->n) {
        for (int i = 1; i < k->n; i++) {
            ql_dev_count(k->ns[i], ns_between(k->at[i - 1], k->at[i]));
        }
        k->after = ns_between(k->at[k->n - 1], k->end);
        k->n = 0;
        CU_TRY(dev, cudaGetLastError(), "timing");
    }
    return QL_OK;
}

static void close_clock(ql_dev *dev) {
    struct lap_clock *k = cuda(dev)->clock;
    for (int i = 0; k && i <= MAX_LAPS; i++) {
        if (k->at[i]) {
            cudaEventDestroy(k->at[i]);
        }
    }
    if (k && k->end) {
        cudaEventDestroy(k->end);
    }
    ql_free(dev->mem, k);
    cuda(dev)->clock = NULL;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* From the arena where there is room. One by one the 1,300 pieces of a 27B lane are rounded up by 1% of what they hold, and
 * take a tenth of a second to get and give back. */
static void *from_arena(struct cuda_dev *d, size_t bytes) {
    size_t n = round_256(bytes ? bytes : 1);
    if (!d->ring || n > d->arena_bytes - d->arena_used) {
        return NULL;
    }
    d->arena_used += n;
    return d->arena + d->arena_used - n;
}

static ql_status load_begin(ql_dev *dev, uint64_t bytes, ql_pool *pool) {
    struct cuda_dev *d = cuda(dev);
    if (!d->arena && cudaMalloc((void **)&d->arena, bytes) == cudaSuccess) {
        d->arena_bytes = bytes;
        CU_TRY(dev, cudaMemsetAsync(d->arena, 0, bytes, d->stream), "clearing memory");
    }
    cudaGetLastError(); /* where no one piece is free, many may be */
    return ql_cuda_ring_open(dev, pool);
}

ql_status ql_cuda_alloc(ql_dev *dev, size_t bytes, const char *what, void **out) {
    *out = from_arena(cuda(dev), bytes);
    if (*out) {
        return QL_OK;
    }
    void *ptr = NULL;
    cudaError_t e = cudaMalloc(&ptr, bytes ? bytes : 1);
    if (e != cudaSuccess) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        cudaGetLastError();
        return ql_fail(dev->err, e == cudaErrorMemoryAllocation ? QL_ERR_MEMORY : QL_ERR_DEVICE,
                       "%s: %zu bytes for %s: %s (%zu of %zu bytes free)", dev->device, bytes, what,
                       cudaGetErrorString(e), free_bytes, total);
    }
    if (bytes) {
        e = cudaMemsetAsync(ptr, 0, bytes, cuda(dev)->stream);
        if (e != cudaSuccess) {
            cudaFree(ptr);
            return ql_cuda_fail(dev, e, what);
        }
    }
    *out = ptr;
    return QL_OK;
}

/* The arena's pieces are given back with the device. */
void ql_cuda_free(ql_dev *dev, void *ptr) {
    const struct cuda_dev *d = cuda(dev);
    if (ptr && !((uint8_t *)ptr >= d->arena && (uint8_t *)ptr < d->arena + d->arena_bytes)) {
        cudaFree(ptr);
        cudaGetLastError();
    }
}

/* A pinned slot that no copy is using any more; *index names it. */
static ql_status slot_take(ql_dev *dev, uint8_t **pinned, int *index) {
    struct cuda_dev *d = cuda(dev);
    if (d->slot_used) { /* the slot that small copies share: close it */
        CU_TRY(dev, cudaEventRecord(d->slot_free[d->slot], d->stream), "copy to device");
        d->slot_used = 0;
        d->slot = (d->slot + 1) % STAGE_SLOTS;
    }
    *index = d->slot;
    CU_TRY(dev, cudaEventSynchronize(d->slot_free[d->slot]), "copy to device");
    *pinned = d->pinned + (size_t)d->slot * STAGE_BYTES;
    d->slot = (d->slot + 1) % STAGE_SLOTS;
    return QL_OK;
}

ql_status ql_cuda_h2d(ql_dev *dev, void *dst, const void *src, size_t bytes) {
    struct cuda_dev *d = cuda(dev);
    ql_dev_count(&dev->h2d_bytes, bytes);
    QL_TRY(start_clock(dev));
    if (bytes <= STAGE_BYTES / 8) { /* small copies fill a slot together */
        if (d->slot_used + bytes > STAGE_BYTES) {
            CU_TRY(dev, cudaEventRecord(d->slot_free[d->slot], d->stream), "copy to device");
            d->slot = (d->slot + 1) % STAGE_SLOTS;
            d->slot_used = 0;
        }
        if (d->slot_used == 0) {
            CU_TRY(dev, cudaEventSynchronize(d->slot_free[d->slot]), "copy to device");
        }
        uint8_t *at = d->pinned + (size_t)d->slot * STAGE_BYTES + d->slot_used;
        memcpy(at, src, bytes);
        d->slot_used += (bytes + 63) & ~(size_t)63;
        CU_TRY(dev, cudaMemcpyAsync(dst, at, bytes, cudaMemcpyHostToDevice, d->stream), "copy to device");
        return QL_OK;
    }
    for (size_t done = 0; done < bytes;) {
        size_t n = bytes - done < STAGE_BYTES ? bytes - done : STAGE_BYTES;
        uint8_t *pinned;
        int index;
        QL_TRY(slot_take(dev, &pinned, &index));
        memcpy(pinned, (const uint8_t *)src + done, n);
        CU_TRY(dev, cudaMemcpyAsync((uint8_t *)dst + done, pinned, n, cudaMemcpyHostToDevice, d->stream),
               "copy to device");
        CU_TRY(dev, cudaEventRecord(d->slot_free[index], d->stream), "copy to device");
        done += n;
    }
    return QL_OK;
}

ql_status ql_cuda_sync(ql_dev *dev) {
    struct cuda_dev *d = cuda(dev);
    QL_TRY(stop_clock(dev));
    cudaError_t e = cudaStreamSynchronize(d->stream);
    if (e != cudaSuccess) {
        char what[96];
        snprintf(what, sizeof what, "after %s", d->last_op ? d->last_op : "opening");
        return ql_cuda_fail(dev, e, what);
    }
    QL_TRY(read_clock(dev));
    for (int i = 0; i < d->n_pending; i++) {
        memcpy(d->pending[i].dst, d->pending[i].src, d->pending[i].bytes);
    }
    d->n_pending = 0;
    d->back_used = 0;
    return QL_OK;
}

static ql_status cuda_d2h(ql_dev *dev, void *dst, const void *src, size_t bytes) {
    struct cuda_dev *d = cuda(dev);
    ql_dev_count(&dev->d2h_bytes, bytes);
    for (size_t done = 0; done < bytes;) {
        if (d->back_used == STAGE_BYTES || d->n_pending == MAX_PENDING) {
            QL_TRY(ql_cuda_sync(dev));
        }
        size_t n = bytes - done, room = STAGE_BYTES - d->back_used;
        n = n < room ? n : room;
        uint8_t *at = d->back + d->back_used;
        CU_TRY(dev, cudaMemcpyAsync(at, (const uint8_t *)src + done, n, cudaMemcpyDeviceToHost, d->stream),
               "copy to host");
        d->pending[d->n_pending++] = pending_copy{(uint8_t *)dst + done, at, n};
        d->back_used += (n + 63) & ~(size_t)63;
        done += n;
    }
    return QL_OK;
}

static ql_status cuda_zero(ql_dev *dev, void *dst, size_t bytes) {
    if (bytes) {
        CU_TRY(dev, cudaMemsetAsync(dst, 0, bytes, cuda(dev)->stream), "zero");
    }
    return QL_OK;
}

static size_t cuda_scratch_bytes(const ql_dev *dev, const ql_shape *shape) {
    const size_t each[] = {ql_linear_cuda_scratch(dev, shape), ql_gdn_cuda_scratch(shape),
                           ql_attention_cuda_scratch(shape), ql_topk_cuda_scratch(shape)};
    size_t most = 0;
    for (size_t n : each) {
        most = n > most ? n : most;
    }
    return most;
}

ql_status ql_cuda_mem(ql_dev *dev, uint64_t *free_bytes, uint64_t *total_bytes) {
    size_t f, t;
    CU_TRY(dev, cudaMemGetInfo(&f, &t), "memory query");
    *free_bytes = f;
    *total_bytes = t;
    return QL_OK;
}

bool ql_cuda_connect_chains(ql_dev *dev, const ql_cuda_exchange *x) {
    struct cuda_dev *d = cuda(dev);
    bool can = d->cc / 10 == 9 && !d->no_chain && !d->no_exchange;
    d->exchange = can ? *x : ql_cuda_exchange{};
    return can;
}

int32_t ql_cuda_ordinal(const ql_dev *dev) { return cuda(dev)->ordinal; }
void *ql_cuda_stream(const ql_dev *dev) { return cuda(dev)->stream; }

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

ql_status ql_cuda_capture_begin(ql_dev *dev) {
    CU_TRY(dev, cudaStreamBeginCapture(cuda(dev)->stream, cudaStreamCaptureModeThreadLocal), "begin of a graph");
    cuda(dev)->capturing = true;
    return QL_OK;
}

ql_status ql_cuda_capture_end(ql_dev *dev, void **graph) {
    *graph = NULL;
    cudaGraph_t g = NULL;
    cudaGraphExec_t x = NULL;
    cuda(dev)->capturing = false;
    cudaError_t e = cudaStreamEndCapture(cuda(dev)->stream, &g);
    if (e == cudaSuccess) {
        e = cudaGraphInstantiate(&x, g, 0);
    }
    if (g) {
        cudaGraphDestroy(g);
    }
    if (e == cudaSuccess) {
        e = cudaGraphUpload(x, cuda(dev)->stream);
    }
    if (e != cudaSuccess) {
        if (x) {
            cudaGraphExecDestroy(x);
        }
        return ql_cuda_fail(dev, e, "end of a graph");
    }
    *graph = x;
    return QL_OK;
}

ql_status ql_cuda_graph_launch(ql_dev *dev, void *graph) {
    ql_dev_count(&dev->progress, 1);
    cuda(dev)->last_op = "a decode graph";
    CU_TRY(dev, cudaGraphLaunch((cudaGraphExec_t)graph, cuda(dev)->stream), "launch of a graph");
    return QL_OK;
}

void ql_cuda_graph_free(ql_dev *dev, void *graph) {
    (void)dev;
    if (graph) {
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
        cudaGetLastError();
    }
}

/* ---- ops that have a path of their own --------------------------------------------------------------------------- */

static ql_status op_embed(ql_dev *dev, const ql_embed_args *a) {
    begin_op(dev, QL_PATH_EMBED);
    return ql_embed_cuda(dev, a);
}

static ql_status op_linear(ql_dev *dev, const ql_linear_args *a) {
    begin_op(dev, ql_path_linear(a->w->format, a->phase));
    return ql_linear_cuda(dev, a);
}

static ql_status op_linear_group(ql_dev *dev, const ql_linear_args *a, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        begin_op(dev, ql_path_linear(a[i].w->format, a[i].phase));
    }
    return ql_linear_group_cuda(dev, a, n);
}

static ql_status op_rmsnorm(ql_dev *dev, const ql_rmsnorm_args *a) {
    begin_op(dev, QL_PATH_NORM);
    return ql_rmsnorm_cuda(dev, a);
}

static ql_status op_gated_norm(ql_dev *dev, const ql_gated_norm_args *a) {
    begin_op(dev, QL_PATH_GATED_NORM);
    return ql_gated_norm_cuda(dev, a);
}

static ql_status op_conv(ql_dev *dev, const ql_conv_args *a) {
    begin_op(dev, QL_PATH_CONV);
    return ql_conv_cuda(dev, a);
}

static ql_status op_gdn(ql_dev *dev, const ql_gdn_args *a) {
    begin_op(dev, a->batch->phase == QL_PHASE_PROMPT ? QL_PATH_GDN_CHUNK : QL_PATH_GDN_STEP);
    return ql_gdn_cuda(dev, a);
}

static ql_status op_attn_prep(ql_dev *dev, const ql_attn_prep_args *a) {
    begin_op(dev, QL_PATH_ATTN_PREP);
    return ql_attn_prep_cuda(dev, a);
}

static ql_status op_attention(ql_dev *dev, const ql_attention_args *a) {
    begin_op(dev, a->batch->phase == QL_PHASE_PROMPT ? QL_PATH_ATTN_PROMPT : QL_PATH_ATTN_GEN);
    return ql_attention_cuda(dev, a);
}

static ql_status op_swiglu(ql_dev *dev, const ql_swiglu_args *a) {
    begin_op(dev, QL_PATH_SWIGLU);
    return ql_swiglu_cuda(dev, a);
}

static ql_status op_add(ql_dev *dev, const ql_add_args *a) {
    begin_op(dev, -1);
    return ql_add_cuda(dev, a);
}

static ql_status op_gather_rows(ql_dev *dev, const ql_gather_rows_args *a) {
    begin_op(dev, -1);
    return ql_gather_rows_cuda(dev, a);
}

static ql_status op_topk(ql_dev *dev, const ql_topk_args *a) {
    begin_op(dev, QL_PATH_TOPK);
    return ql_topk_cuda(dev, a);
}

static ql_status op_sample(ql_dev *dev, const ql_sample_args *a) {
    begin_op(dev, QL_PATH_SAMPLE);
    return ql_sample_cuda(dev, a);
}

/* The phase of a list, by its first product; a list without one is no run of either. */
static ql_phase phase_of(const ql_op *op, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (op[i].kind == QL_OP_LINEAR) {
            return op[i].u.linear.a[0].phase;
        }
    }
    return QL_PHASE_GEN;
}

/* attn_prep and the attention behind it. */
static ql_status take_attention(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken) {
    bool served = false;
    *taken = 0;
    if (n > 1 && op[1].kind == QL_OP_ATTENTION && !cuda(dev)->no_chain) {
        QL_TRY(ql_attention_few_cuda(dev, &op[0].u.attn_prep, &op[1].u.attention, &served));
    }
    if (served) {
        begin_op(dev, QL_PATH_ATTN_PREP);
        begin_op(dev, QL_PATH_ATTN_GEN);
        *taken = 2;
    }
    return QL_OK;
}

/* The ops that it takes count as if they had run alone. */
static ql_status op_chain(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken) {
    if (op->kind == QL_OP_ATTN_PREP) {
        return take_attention(dev, op, n, taken);
    }
    ql_phase phase = phase_of(op, n);
    QL_TRY(phase == QL_PHASE_GEN ? ql_chain_cuda(dev, op, n, taken)
           : cuda(dev)->no_chain ? (*taken = 0, QL_OK)
                                 : ql_chain_prompt_cuda(dev, op, n, taken));
    for (int32_t i = 0; i < *taken; i++) {
        switch (op[i].kind) {
        case QL_OP_RMSNORM: begin_op(dev, QL_PATH_NORM); break;
        case QL_OP_LINEAR:
            for (int32_t j = 0; j < op[i].u.linear.n; j++) {
                begin_op(dev, ql_path_linear(op[i].u.linear.a[j].w->format, phase));
            }
            break;
        case QL_OP_CONV: begin_op(dev, QL_PATH_CONV); break;
        case QL_OP_GDN: begin_op(dev, QL_PATH_GDN_STEP); break;
        case QL_OP_GATED_NORM: begin_op(dev, QL_PATH_GATED_NORM); break;
        case QL_OP_SWIGLU: begin_op(dev, QL_PATH_SWIGLU); break;
        case QL_OP_EXCHANGE: begin_op(dev, QL_PATH_EXCHANGE); break;
        case QL_OP_ATTN_PREP:
        case QL_OP_ATTENTION: break; /* of no such run */
        }
    }
    if (*taken > 0 && phase == QL_PHASE_GEN) {
        begin_op(dev, QL_PATH_CHAIN);
    }
    return QL_OK;
}

static const char *cuda_variant(const ql_dev *dev, int32_t path) {
    (void)dev;
    (void)path;
    return "cuda";
}

static void version_text(int v, char *out, size_t cap) { snprintf(out, cap, "%d.%d", v / 1000, v % 1000 / 10); }

static void describe(const ql_dev *dev, ql_lane_info *info) {
    ql_cuda_device d;
    int v = 0;
    if (ql_cuda_info(cuda(dev)->ordinal, &d, NULL) != QL_OK) {
        return;
    }
    snprintf(info->name, sizeof info->name, "%s", d.name);
    snprintf(info->bus, sizeof info->bus, "%08X:%02X:%02X.0", (unsigned)d.pci_domain, (unsigned)d.pci_bus,
             (unsigned)d.pci_device);
    snprintf(info->cuda_runtime, sizeof info->cuda_runtime, "%s", ql_cuda_build_version());
    if (cudaDriverGetVersion(&v) == cudaSuccess) {
        version_text(v, info->cuda_driver, sizeof info->cuda_driver);
    }
    info->memory_bytes = d.total_bytes;
    info->n_sm = d.n_sm;
    ql_nvml_describe(info);
}

/* ---- close ------------------------------------------------------------------------------------------------------- */

static void cuda_close(ql_dev *dev) {
    struct cuda_dev *d = cuda(dev);
    if (!d) {
        return;
    }
    if (d->stream) {
        cudaStreamSynchronize(d->stream);
    }
    close_clock(dev);
    ql_cuda_ring_close(dev);
    cudaFree(d->arena);
    cudaFree(d->edges);
    cudaFree(d->marked);
    cudaFree(d->normed);
    cudaFreeHost(d->pinned);
    cudaFreeHost(d->back);
    for (int i = 0; i < STAGE_SLOTS; i++) {
        if (d->slot_free[i]) {
            cudaEventDestroy(d->slot_free[i]);
        }
    }
    if (d->stream) {
        cudaStreamDestroy(d->stream);
    }
    cudaGetLastError();
    ql_free(dev->mem, d);
    dev->impl = NULL;
}

static ql_status profile(ql_dev *dev);

static constexpr ql_ops make_table(bool timed) {
    ql_ops t{};
    t.name = "cuda";
    t.alloc = ql_cuda_alloc;
    t.free = ql_cuda_free;
    t.h2d = ql_cuda_h2d;
    t.d2h = cuda_d2h;
    t.zero = cuda_zero;
    t.sync = ql_cuda_sync;
    if (!timed) { /* laps inside a recording would not be there when it is replayed */
        t.graph_begin = ql_cuda_capture_begin;
        t.graph_end = ql_cuda_capture_end;
        t.graph_launch = ql_cuda_graph_launch;
        t.graph_free = ql_cuda_graph_free;
    }
    t.profile = profile;
    t.lap = lap;
    t.load_begin = load_begin;
    t.load_end = ql_cuda_ring_close;
    t.scratch_bytes = cuda_scratch_bytes;
    t.weight_bytes = ql_cuda_weight_bytes;
    t.weight_load = ql_cuda_weight_load;
    t.weight_same = ql_cuda_weight_same;
    t.weight_crc = ql_cuda_weight_crc;
    t.weight_free = ql_cuda_weight_free;
    t.embed = op_embed;
    t.linear = op_linear;
    t.linear_group = op_linear_group;
    t.rmsnorm = op_rmsnorm;
    t.gated_norm = op_gated_norm;
    t.conv = op_conv;
    t.gdn = op_gdn;
    t.attn_prep = op_attn_prep;
    t.attention = op_attention;
    t.swiglu = op_swiglu;
    t.add = op_add;
    t.gather_rows = op_gather_rows;
    t.chain = timed ? nullptr : op_chain; /* phases are timed op by op */
    t.topk = op_topk;
    t.sample = op_sample;
    t.describe = describe;
    t.measure = ql_cuda_measure;
    t.variant = cuda_variant;
    t.close = cuda_close;
    return t;
}

static constexpr ql_ops table = make_table(false), timed_table = make_table(true);

const ql_ops *ql_cuda_ops(void) { return &table; }

static ql_status profile(ql_dev *dev) {
    void *clock;
    QL_TRY(ql_alloc(dev->mem, 1, sizeof(struct lap_clock), "the clock of phases", &clock, dev->err));
    struct lap_clock *k = cuda(dev)->clock = (struct lap_clock *)clock;
    for (int i = 0; i <= MAX_LAPS; i++) {
        CU_TRY(dev, cudaEventCreate(&k->at[i]), "timing");
    }
    CU_TRY(dev, cudaEventCreate(&k->end), "timing");
    dev->ops = &timed_table;
    return QL_OK;
}

/* ---- choices by name ---------------------------------------------------------------------------------------------- */

const char *const ql_q8_kernel_names[Q8_KERNELS] = {"auto", "dp4a", "wmma", "wide", "reference"};

static bool is_text(const char *p, size_t len, const char *text) {
    return strlen(text) == len && memcmp(p, text, len) == 0;
}

/* Digits alone, 1 to 1,000,000. */
static bool row_count(const char *p, size_t len, int *out) {
    int v = 0;
    for (size_t i = 0; i < len; i++) {
        if (p[i] < '0' || p[i] > '9' || i > 6) {
            return false;
        }
        v = 10 * v + (p[i] - '0');
    }
    *out = v;
    return v >= 1 && v <= 1000000;
}

/* Takes one choice; *have: what its family has. False where the name is none of that. */
static bool take_choice(struct cuda_dev *d, const char *family, const char *name, size_t len, const char **have) {
    *have = "cuda";
    if (strcmp(family, "nvfp4") == 0) {
        *have = "auto, dp4a, wmma, wide, reference";
        for (int i = 0; i < Q8_KERNELS; i++) {
            if (is_text(name, len, ql_q8_kernel_names[i])) {
                d->q8_kernel = (enum q8_kernel)i;
                return true;
            }
        }
        return false;
    }
    if (strcmp(family, "wide_min_rows") == 0) {
        *have = "numbers of rows from 1 to 1000000";
        return row_count(name, len, &d->wide_min_rows);
    }
    if (strcmp(family, "shared_q8") == 0) {
        *have = "on, off";
        d->no_shared_q8 = is_text(name, len, "off");
        return d->no_shared_q8 || is_text(name, len, "on");
    }
    if (strcmp(family, "chain") == 0) {
        *have = "cuda, lane, off";
        d->no_chain = is_text(name, len, "off");
        d->no_exchange = is_text(name, len, "lane"); /* chains end where lanes add */
        return d->no_chain || d->no_exchange || is_text(name, len, "cuda");
    }
    return is_text(name, len, "cuda");
}

/* "family=name,...". Most families have one variant, cuda. */
static ql_status take_kernels(struct cuda_dev *d, const char *text, ql_error *err) {
    static const char *const families[] = {"embed",  "linear", "norm",  "gdn",           "attention", "mlp",
                                           "sample", "chain",  "nvfp4", "wide_min_rows", "shared_q8"};
    for (const char *p = text; p && *p;) {
        size_t len = strcspn(p, ","), key = strcspn(p, "=,");
        const char *family = NULL, *have;
        for (const char *f : families) {
            family = is_text(p, key, f) ? f : family;
        }
        if (!family) {
            return ql_fail(
                err, QL_ERR_USAGE,
                "unknown kernel family '%.*s'; families are embed, linear, norm, gdn, attention, mlp, sample, "
                "chain, nvfp4, wide_min_rows, shared_q8 on CUDA lanes",
                (int)key, p);
        }
        const char *name = p + key + (len > key);
        size_t name_len = (size_t)(p + len - name);
        if (!take_choice(d, family, name, name_len, &have)) {
            return ql_fail(err, QL_ERR_USAGE, "no CUDA variant '%.*s' of kernel family '%s'; it has %s", (int)name_len,
                           name, family, have);
        }
        p += len + (p[len] == ',');
    }
    return QL_OK;
}

/* ---- open -------------------------------------------------------------------------------------------------------- */

__global__ void probe_kernel(void) {}

void ql_cuda_build_archs(char *out, size_t cap) {
    size_t len = 0;
    out[0] = 0;
    for (int a : build_archs) {
        int n = snprintf(out + len, cap - len, "%s%d.%d", len ? ", " : "", a / 100, a / 10 % 10);
        len += n > 0 && (size_t)n < cap - len ? (size_t)n : 0;
    }
}

/* Makes the context, which is where a GPU that cannot be had shows. */
static ql_status open_context(ql_dev *dev, const ql_cuda_device *info) {
    cudaError_t e = cudaSetDevice(cuda(dev)->ordinal);
    e = e == cudaSuccess ? cudaFree(NULL) : e;
    cudaFuncAttributes attr;
    e = e == cudaSuccess ? cudaFuncGetAttributes(&attr, probe_kernel) : e;
    cudaGetLastError();
    char archs[128];
    switch (e) {
    case cudaSuccess: return QL_OK;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
        ql_cuda_build_archs(archs, sizeof archs);
        return ql_fail(dev->err, QL_ERR_DEVICE,
                       "%s has compute capability %d.%d; this build has code for %s: build it with ARCH=%d%d%s",
                       dev->device, info->major, info->minor, archs, info->major, info->minor,
                       info->major >= 9 ? "a" : "");
    case cudaErrorDevicesUnavailable:
        return ql_fail(dev->err, QL_ERR_DEVICE,
                       "%s is busy or not available: another program holds it in exclusive compute mode, or it needs a "
                       "reset (see nvidia-smi)",
                       dev->device);
    case cudaErrorMemoryAllocation:
        return ql_fail(dev->err, QL_ERR_MEMORY,
                       "%s has no memory left for a context; other programs hold it (see nvidia-smi)", dev->device);
    default: return ql_cuda_fail(dev, e, "open");
    }
}

static ql_status open_device(ql_dev *dev, const ql_cuda_device *info) {
    struct cuda_dev *d = cuda(dev);
    QL_TRY(open_context(dev, info));
    CU_TRY(dev, cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking), "open");
    for (int i = 0; i < STAGE_SLOTS; i++) {
        CU_TRY(dev, cudaEventCreateWithFlags(&d->slot_free[i], cudaEventDisableTiming), "open");
    }
    CU_TRY(dev, cudaMallocHost((void **)&d->pinned, STAGE_SLOTS * STAGE_BYTES), "pinned staging memory");
    CU_TRY(dev, cudaMallocHost((void **)&d->back, STAGE_BYTES), "pinned staging memory");
    CU_TRY(dev, cudaMalloc((void **)&d->edges, EDGE_WORDS * sizeof *d->edges), "a chain's counters");
    CU_TRY(dev, cudaMemsetAsync(d->edges, 0, EDGE_WORDS * sizeof *d->edges, d->stream), "a chain's counters");
    CU_TRY(dev, cudaMalloc((void **)&d->marked, 2 * MARKED_FLOATS * sizeof *d->marked), "a chain's sums");
    CU_TRY(dev, cudaMemsetAsync(d->marked, 0xff, 2 * MARKED_FLOATS * sizeof *d->marked, d->stream), "a chain's sums");
    CU_TRY(dev, cudaMalloc((void **)&d->normed, NORMED_FLOATS * sizeof *d->normed), "a chain's rows");
    CU_TRY(dev, cudaMemsetAsync(d->normed, 0, NORMED_FLOATS * sizeof *d->normed, d->stream), "a chain's rows");
    return QL_OK;
}

ql_status ql_cuda_dev_open(ql_dev *dev, int32_t ordinal, const char *kernels, const ql_allocator *mem, ql_error *err) {
    ql_cuda_device info;
    struct cuda_dev choices = {};
    choices.wide_min_rows = 128;
    QL_TRY(take_kernels(&choices, kernels, err));
    QL_TRY(ql_cuda_info(ordinal, &info, err));
    void *impl;
    QL_TRY(ql_alloc(mem, 1, sizeof(struct cuda_dev), "a CUDA lane", &impl, err));
    ql_dev_init(dev, &table, mem, err, impl);
    struct cuda_dev *d = cuda(dev);
    *d = choices;
    d->ordinal = ordinal;
    d->n_sm = info.n_sm;
    d->cc = info.code;
    d->block_shared = info.block_shared;
    snprintf(dev->device, sizeof dev->device, "cuda:%d %.48s", ordinal, info.name);
    ql_status status = open_device(dev, &info);
    if (status != QL_OK) {
        cuda_close(dev);
    }
    return status;
}
