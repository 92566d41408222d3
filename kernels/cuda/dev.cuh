/* What the CUDA files share: the device behind a ql_dev, error translation, launches, small device helpers.
 *
 * Launchers check nothing but the launch itself: shapes were checked where the args were made. A launch failure is
 * reported at once; a fault inside a kernel shows at the next sync, which names the last op that was launched.
 */
#ifndef QL_KERNELS_CUDA_DEV_CUH
#define QL_KERNELS_CUDA_DEV_CUH

#include "kernels/cuda.h"
#include "runtime/base/mem.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int STAGE_SLOTS = 4, MAX_PENDING = 64, EDGE_WORDS = 16, MARKED_FLOATS = 2 * 2 * 5120,
              NORMED_FLOATS = 4 + 2 * 4 * 5120 + 4 * 4 * 128;
constexpr size_t STAGE_BYTES = 4 << 20;

/* A device-to-host copy whose last leg, pinned to caller, happens at sync. */
struct pending_copy {
    void *dst;
    const void *src;
    size_t bytes;
};

/* Kernels of linear_q8.cu, as --kernel nvfp4= names them. */
enum q8_kernel { Q8_AUTO, Q8_DP4A, Q8_WMMA, Q8_WIDE, Q8_REFERENCE, Q8_KERNELS };
extern const char *const ql_q8_kernel_names[Q8_KERNELS];

/* How many clusters of a kernel the GPU runs at once, of the sizes that it comes in; asked at the first launch. */
struct cluster_room {
    bool known;
    int at_once[2];
};

struct cuda_dev {
    int ordinal, n_sm, cc; /* cc: of the code that runs, 90 for 9.0; the GPU may be newer */
    int block_shared;      /* bytes of shared memory that a block may have */
    cudaStream_t stream;
    uint8_t *pinned;                    /* STAGE_SLOTS of STAGE_BYTES, host to device */
    cudaEvent_t slot_free[STAGE_SLOTS]; /* recorded when a slot's copies were enqueued */
    int slot;
    size_t slot_used;
    uint8_t *back; /* STAGE_BYTES pinned, device to host */
    size_t back_used;
    struct pending_copy pending[MAX_PENDING];
    int n_pending;
    uint8_t *arena; /* what alloc hands out while a model loads; from one allocation, cleared as a whole */
    size_t arena_bytes, arena_used;
    struct load_ring *ring;    /* weight.cu; NULL but while weights load */
    struct lap_clock *clock;   /* device.cu; NULL: phases are not timed */
    unsigned *edges;           /* on the device, EDGE_WORDS: where the blocks of a chain meet */
    float *marked;             /* on the device, two of MARKED_FLOATS: sums between ops of a chain (chain.cuh) */
    float *normed;             /* on the device, NORMED_FLOATS: rows of x between ops of a chain */
    ql_cuda_exchange exchange; /* n_lane 0: chains end where lanes add */
    bool capturing, no_chain, no_exchange;
    enum q8_kernel q8_kernel; /* of NVFP4 weights in precision Q8 */
    int wide_min_rows;        /* from how many rows on AUTO is WIDE */
    bool no_shared_q8;        /* each product of one x makes the INT8 codes of x for itself */
    const char *last_op;
    struct cluster_room few[2]; /* of attention_few.cu, with F16 and FP8 caches */
};

static inline struct cuda_dev *cuda(const ql_dev *dev) { return (struct cuda_dev *)dev->impl; }

/* Writes the error of a CUDA call that was part of `what`; clears the runtime's last error. */
ql_status ql_cuda_fail(ql_dev *dev, cudaError_t e, const char *what);

#define CU_TRY(dev, call, what)                                                                                        \
    do {                                                                                                               \
        cudaError_t cu_try_ = (call);                                                                                  \
        if (cu_try_ != cudaSuccess) {                                                                                  \
            return ql_cuda_fail(dev, cu_try_, what);                                                                   \
        }                                                                                                              \
    } while (0)

/* After a launch. */
static inline ql_status launched(ql_dev *dev, const char *op) {
    cuda(dev)->last_op = op;
    CU_TRY(dev, cudaGetLastError(), op);
    return QL_OK;
}

/* At the start of an op: proof of life and the path counter. */
static inline void begin_op(ql_dev *dev, int32_t path) {
    ql_dev_count(&dev->progress, 1);
    if (path >= 0) {
        ql_dev_count(&dev->n_path[path], 1);
    }
}

/* Launches a kernel that begins with after_previous(): from compute capability 9.0 on its blocks may take their places
 * while the kernel before it still runs. */
template <typename... P, typename... A>
static ql_status launch(ql_dev *dev, const char *op, void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared,
                        A... args) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = cuda(dev)->stream;
    config.attrs = &early;
    config.numAttrs = cuda(dev)->cc >= 90;
    cuda(dev)->last_op = op;
    if (cuda(dev)->cc == 75 && shared > 64 * 1024) { /* a newer GPU that runs this code would not say so */
        return ql_fail(dev->err, QL_ERR_INTERNAL, "%s: %zu bytes of shared memory; compute capability 7.5 has 65536",
                       op, shared);
    }
    if (shared > 48 * 1024) {
        CU_TRY(dev,
               cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
               op);
    }
    CU_TRY(dev, cudaLaunchKernelEx(&config, kernel, P(args)...), op);
    return QL_OK;
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline size_t round_256(size_t n) { return (n + 255) & ~(size_t)255; }

/* ops, one file a family */
ql_status ql_embed_cuda(ql_dev *dev, const ql_embed_args *a);
ql_status ql_gather_rows_cuda(ql_dev *dev, const ql_gather_rows_args *a);
ql_status ql_add_cuda(ql_dev *dev, const ql_add_args *a);
ql_status ql_rmsnorm_cuda(ql_dev *dev, const ql_rmsnorm_args *a);
ql_status ql_gated_norm_cuda(ql_dev *dev, const ql_gated_norm_args *a);
ql_status ql_swiglu_cuda(ql_dev *dev, const ql_swiglu_args *a);
ql_status ql_conv_cuda(ql_dev *dev, const ql_conv_args *a);
ql_status ql_gdn_cuda(ql_dev *dev, const ql_gdn_args *a);
ql_status ql_attn_prep_cuda(ql_dev *dev, const ql_attn_prep_args *a);
ql_status ql_attention_cuda(ql_dev *dev, const ql_attention_args *a);
/* Both ops of a few generated rows in one launch, where there is a kernel for them; else *served is false and nothing done. */
ql_status ql_attention_few_cuda(ql_dev *dev, const ql_attn_prep_args *p, const ql_attention_args *a, bool *served);
ql_status ql_linear_cuda(ql_dev *dev, const ql_linear_args *a);
ql_status ql_linear_group_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n);
ql_status ql_chain_cuda(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken);
ql_status ql_chain_prompt_cuda(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken);
ql_status ql_topk_cuda(ql_dev *dev, const ql_topk_args *a);
ql_status ql_sample_cuda(ql_dev *dev, const ql_sample_args *a);

/* scratch of each op for a shape; ops run one after another and share it */
size_t ql_linear_cuda_scratch(const ql_dev *dev, const ql_shape *shape);
size_t ql_gdn_cuda_scratch(const ql_shape *shape);
size_t ql_attention_cuda_scratch(const ql_shape *shape);
size_t ql_topk_cuda_scratch(const ql_shape *shape);

/* weights (weight.cu) */
void ql_cuda_weight_bytes(ql_qformat format, int32_t n, int32_t k, int32_t row_off, int32_t col_off,
                          uint64_t *weight_bytes, uint64_t *scale_bytes);
ql_status ql_cuda_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out);
ql_status ql_cuda_weight_same(ql_dev *dev, const ql_weight *w, const ql_weight_src *src, const char **differs);
ql_status ql_cuda_weight_crc(ql_dev *dev, const ql_weight *w, uint32_t *crc);
void ql_cuda_weight_free(ql_dev *dev, ql_weight *w);
/* The ring that file bytes pass through; replaces one that is there. pool may be NULL. */
ql_status ql_cuda_ring_open(ql_dev *dev, ql_pool *pool);
void ql_cuda_ring_close(ql_dev *dev);

/* the ceiling (stream.cu) */
ql_status ql_cuda_measure(ql_dev *dev, double *bytes_per_s);

/* memory (device.cu) */
ql_status ql_cuda_alloc(ql_dev *dev, size_t bytes, const char *what, void **out);
void ql_cuda_free(ql_dev *dev, void *ptr);
ql_status ql_cuda_h2d(ql_dev *dev, void *dst, const void *src, size_t bytes);
ql_status ql_cuda_sync(ql_dev *dev);

/* ---- device helpers ---- */

/* In every kernel, before anything is read that another kernel of the step writes (weights, what the host copied and what earlier steps
 * wrote may be read before): lets the next kernel's blocks come, then waits until the kernel before this one is complete. As all
 * kernels do so, everything earlier is complete too. */
__device__ __forceinline__ void allow_next(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_previous(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void after_previous(void) {
    allow_next();
    wait_previous();
}

/* Loads from shared memory that stay where they are written. */
__device__ __forceinline__ uint32_t load_shared_u8(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t load_shared_u32(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint4 load_shared4(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ float2 load_shared_f2(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ float4 load_shared_f4(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
    return v;
}

/* A number that the compiler knows, as an argument. */
template <int N> struct constant { static constexpr int value = N; };

/* What stays in a register instead of being computed again where it is used. */
__device__ __forceinline__ int kept(int v) {
    asm volatile("" : "+r"(v));
    return v;
}
__device__ __forceinline__ const uint16_t *kept(const uint16_t *p) {
    asm volatile("" : "+l"(p));
    return p;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        v += __shfl_xor_sync(0xffffffffu, v, d);
    }
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    }
    return v;
}

/* Sum over a block of 32 * n_warp threads in a fixed order, known to all threads. `part` holds n_warp floats. */
__device__ __forceinline__ float block_sum(float v, float *part, int n_warp) {
    v = warp_sum(v);
    __syncthreads(); /* part may still be read from an earlier sum */
    if ((threadIdx.x & 31) == 0) {
        part[threadIdx.x >> 5] = v;
    }
    __syncthreads();
    int lane = threadIdx.x & 31;
    return warp_sum(lane < n_warp ? part[lane] : 0.0f);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float f32_of_bf16(uint32_t h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ float f32_of_f16(uint16_t h) { return __half2float(__ushort_as_half(h)); }

/* Nearest, ties to even; the value as f32. NaN stays NaN. */
__device__ __forceinline__ float round_bf16(float x) {
    uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return __uint_as_float(u | 0x400000u);
    }
    return __uint_as_float((u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u);
}

__device__ __forceinline__ float f32_of_e4m3(uint32_t b) {
    /* The code's low 7 bits as an f16's bits 13..7 are the value times 2^-8, subnormals included. */
    float v = f32_of_f16((uint16_t)((b & 0x7f) << 7)) * 256.0f;
    v = (b & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : v;
    return b & 0x80 ? -v : v;
}

/* Nearest, ties to even, saturating at 448; NaN gives 0x7f. */
__device__ __forceinline__ uint32_t e4m3_of_f32(float f) {
    uint32_t sign = (__float_as_uint(f) >> 24) & 0x80;
    float a = fabsf(f);
    if (!(a == a)) {
        return 0x7f;
    }
    if (a >= 448.0f) {
        return sign | 0x7e;
    }
    if (a < 0x1p-6f) {
        return sign | (uint32_t)__float2int_rn(a * 512.0f);
    }
    uint32_t u = __float_as_uint(a);
    u += 0x7ffffu + ((u >> 20) & 1);
    return sign | ((u >> 20) - (120u << 3));
}

/* Work is dealt to blocks in pieces of `len` rows of one segment, counted from the segment's first row. n_row / len +
 * n_seg slots are enough for any segmentation; the last ones may stay empty. */
struct piece {
    int seg, row0, n, index; /* rows [row0, row0 + n) of the batch; index: piece number inside the segment */
};

__device__ __forceinline__ bool find_piece(const ql_batch &b, int slot, int len, struct piece *p) {
    for (int s = 0; s < b.n_seg; s++) {
        int r0 = b.seg_row[s], n = b.seg_row[s + 1] - r0, count = (n + len - 1) / len;
        if (slot < count) {
            p->seg = s;
            p->index = slot;
            p->row0 = r0 + slot * len;
            p->n = min(len, n - slot * len);
            return true;
        }
        slot -= count;
    }
    return false;
}

static inline unsigned n_piece_slots(const ql_batch *b, int len) { return (unsigned)(b->n_row / len + b->n_seg); }

#endif
