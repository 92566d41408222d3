/* The boundary between the model and a device: handle, memory, op table.
 *
 * A ql_dev is one lane's device: a GPU with its stream, or a CPU thread. Only the lane's own thread calls it. The model
 * above sees no CUDA and no instruction set; it fills args structs and calls through the table, so that a lane can be
 * run, recorded and tested on any machine. Host twins (<family>_host.c) define every op's result; faster host variants
 * give the twin's bits, CUDA kernels the contract's.
 *
 * Pointers in args are device pointers unless a comment says host. Ops are asynchronous in order on the device's
 * stream; copies to the host complete after `sync`. No op allocates, creates or synchronises anything.
 */
#ifndef QL_KERNELS_KERNELS_H
#define QL_KERNELS_KERNELS_H

#include "kernels/attention.h"
#include "kernels/chain.h"
#include "kernels/embed.h"
#include "kernels/gdn.h"
#include "kernels/linear.h"
#include "kernels/mlp.h"
#include "kernels/norm.h"
#include "kernels/sample.h"
#include "runtime/base/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Families with a counter of their own: which kernels served a run. Linear paths are format x phase. */
typedef enum ql_path {
    QL_PATH_LINEAR = 0,
    QL_PATH_EMBED = QL_PATH_LINEAR + 2 * QL_FORMAT_COUNT,
    QL_PATH_NORM,
    QL_PATH_GATED_NORM,
    QL_PATH_CONV,
    QL_PATH_GDN_CHUNK,
    QL_PATH_GDN_STEP,
    QL_PATH_ATTN_PREP,
    QL_PATH_ATTN_PROMPT,
    QL_PATH_ATTN_GEN,
    QL_PATH_SWIGLU,
    QL_PATH_TOPK,
    QL_PATH_SAMPLE,
    QL_PATH_ATTN_FEW, /* attn_prep and attention at short context in one launch; both count as well */
    QL_PATH_CHAIN,    /* runs of ops in one launch; the ops count as well */
    QL_PATH_EXCHANGE, /* sums across lanes inside them */
    QL_PATH_COUNT
} ql_path;

static inline int32_t ql_path_linear(ql_qformat format, ql_phase phase) {
    return QL_PATH_LINEAR + 2 * (int32_t)format + (int32_t)phase;
}

typedef struct ql_ops {
    const char *name; /* "host" or "cuda" */

    /* memory: the plan's allocations, made while opening */
    ql_status (*alloc)(ql_dev *dev, size_t bytes, const char *what, void **out); /* zeroed */
    void (*free)(ql_dev *dev, void *ptr);
    ql_status (*h2d)(ql_dev *dev, void *dst, const void *src, size_t bytes); /* src may be reused after the call */
    ql_status (*d2h)(ql_dev *dev, void *dst, const void *src, size_t bytes); /* complete after sync */
    ql_status (*zero)(ql_dev *dev, void *dst, size_t bytes);
    ql_status (*sync)(ql_dev *dev);
    /* Scratch that the ops of this device need for the shape; becomes dev->scratch before the first op. */
    size_t (*scratch_bytes)(const ql_dev *dev, const ql_shape *shape);

    /* Recording: ops called between begin and end are recorded instead of run; end ends it in any case. A recording is
     * launched on the device's stream and may be launched again and again; free accepts NULL. All four are NULL for a
     * device that has none. */
    ql_status (*graph_begin)(ql_dev *dev);
    ql_status (*graph_end)(ql_dev *dev, void **graph);
    ql_status (*graph_launch)(ql_dev *dev, void *graph);
    void (*graph_free)(ql_dev *dev, void *graph);

    /* Phase times by the device's own clock, for devices whose lane only enqueues; NULL for the others. `profile` turns
     * them on before the first op, and recording off. `lap` adds the time since the last lap, or since the first copy after
     * a sync, to *ns, at the next sync at the latest; without profile it does nothing. */
    ql_status (*profile)(ql_dev *dev);
    void (*lap)(ql_dev *dev, uint64_t *ns);

    /* Around the opening of a model: `bytes` is about what alloc and weight_load will be asked for between the two, and the
     * threads of `pool` read files. A load without the pair is only slower. NULL for a device that has
     * no use for them; end may be called without begin. */
    ql_status (*load_begin)(ql_dev *dev, uint64_t bytes, ql_pool *pool);
    void (*load_end)(ql_dev *dev);

    /* weights */
    void (*weight_bytes)(ql_qformat format, int32_t n, int32_t k, int32_t row_off, int32_t col_off,
                         uint64_t *weight_bytes, uint64_t *scale_bytes); /* resident bytes of a slice */
    ql_status (*weight_load)(ql_dev *dev, const ql_weight_src *src, ql_weight *out);
    /* Compares codes and scales with the file's; *differs: NULL, "codes" or "scales". */
    ql_status (*weight_same)(ql_dev *dev, const ql_weight *w, const ql_weight_src *src, const char **differs);
    /* CRC-32 of the resident codes, in the file's order: rows of the cut, each its columns of the cut. */
    ql_status (*weight_crc)(ql_dev *dev, const ql_weight *w, uint32_t *crc);
    void (*weight_free)(ql_dev *dev, ql_weight *w);

    /* ops */
    ql_status (*embed)(ql_dev *dev, const ql_embed_args *a);
    ql_status (*linear)(ql_dev *dev, const ql_linear_args *a);
    /* n products of one x (equal but for w, y and ldy), with the bits of one after another. */
    ql_status (*linear_group)(ql_dev *dev, const ql_linear_args *a, int32_t n);
    ql_status (*rmsnorm)(ql_dev *dev, const ql_rmsnorm_args *a);
    ql_status (*gated_norm)(ql_dev *dev, const ql_gated_norm_args *a);
    ql_status (*conv)(ql_dev *dev, const ql_conv_args *a);
    ql_status (*gdn)(ql_dev *dev, const ql_gdn_args *a);
    ql_status (*attn_prep)(ql_dev *dev, const ql_attn_prep_args *a);
    ql_status (*attention)(ql_dev *dev, const ql_attention_args *a);
    ql_status (*swiglu)(ql_dev *dev, const ql_swiglu_args *a);
    ql_status (*add)(ql_dev *dev, const ql_add_args *a);
    ql_status (*gather_rows)(ql_dev *dev, const ql_gather_rows_args *a);
    /* Runs the first *taken of n ops as one, perhaps none (chain.h). NULL for a device that runs each by itself. */
    ql_status (*chain)(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken);
    ql_status (*topk)(ql_dev *dev, const ql_topk_args *a);
    ql_status (*sample)(ql_dev *dev, const ql_sample_args *a);

    /* For the record of a measurement: what the lane runs on, and how fast it reads memory, in bytes a second. measure takes
     * memory and time. `describe` may be called from any thread; what it does not know it leaves alone. */
    void (*describe)(const ql_dev *dev, ql_lane_info *info);
    ql_status (*measure)(ql_dev *dev, double *bytes_per_s);

    /* Variant that serves a path, such as "twin" or "avx512". */
    const char *(*variant)(const ql_dev *dev, int32_t path);
    void (*close)(ql_dev *dev);
} ql_ops;

struct ql_dev {
    const ql_ops *ops;
    ql_error *err;           /* where this lane's first error is written */
    const ql_allocator *mem; /* host memory */
    void *scratch;
    size_t scratch_bytes;
    uint64_t n_path[QL_PATH_COUNT]; /* calls, written by the lane with relaxed atomics, read by anyone */
    uint64_t h2d_bytes, d2h_bytes;  /* likewise */
    uint64_t progress;              /* bumped before each op: a waiting peer's proof of life; likewise */
    char device[64];
    void *impl;
};

/* For a device kind's open, before anything else. The counters are stored one by one: others may be looking already. */
static inline void ql_dev_init(ql_dev *dev, const ql_ops *ops, const ql_allocator *mem, ql_error *err, void *impl) {
    dev->ops = ops;
    dev->err = err;
    dev->mem = mem;
    dev->scratch = NULL;
    dev->scratch_bytes = 0;
    dev->device[0] = 0;
    dev->impl = impl;
    for (int32_t i = 0; i < QL_PATH_COUNT; i++) {
        __atomic_store_n(&dev->n_path[i], 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&dev->h2d_bytes, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&dev->d2h_bytes, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&dev->progress, 0, __ATOMIC_RELAXED);
}

static inline void ql_dev_count(uint64_t *counter, uint64_t n) { __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }

/* "linear.nvfp4.gen/avx512" and the like; `out` holds 48 bytes. */
void ql_path_name(const ql_dev *dev, int32_t path, char *out);

/* A CPU lane. `kernels` forces variants ("linear=twin"): NULL picks the best that this CPU has. Unknown names and
 * variants that the CPU lacks are QL_ERR_USAGE, with those that it has. */
ql_status ql_host_dev_open(ql_dev *dev, const char *kernels, const ql_allocator *mem, ql_error *err);

/* The host table itself, for plans that have no device. */
const ql_ops *ql_host_ops(void);

#ifdef __cplusplus
}
#endif
#endif
