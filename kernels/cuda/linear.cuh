/* What the CUDA linear kernels share: prepared activations, matrix instructions, decoding of fragments.
 *
 * Quantized weights meet the activation on tensor cores in f16: a weight (code, or code times group scale) is exact there,
 * and x is scaled by a power of two for each row and canonical slice so that its largest element lies in [2^14, 2^15).
 * EXACT gives x two columns, f16(x) and f16(2^11 (x - f16(x))): 22 bits, at no memory traffic. BF16 gives it one: a bf16
 * number has 8 bits, so the f16 of the scaled one is exact down to 2^-28 of the slice's largest. FP8 likewise holds the
 * E4M3 value. Q8 gives FP8 weights f16(x) and no more; what it does with NVFP4 weights is in q8.cuh. A column of the
 * instruction's result depends on its own column of x alone, so a row's bits do not depend on which rows share the call.
 */
#ifndef QL_KERNELS_CUDA_LINEAR_CUH
#define QL_KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/dev.cuh"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/mma.cuh"

enum { MAX_SLICES = 8, TREE_LEVELS = 3 };

/* How x is prepared. */
enum x_mode { X_F16X2, X_F16, X_BF16_AS_F16, X_E4M3_AS_F16, X_BF16, X_E4M3 };

static __host__ __device__ __forceinline__ bool is_e4m3(enum x_mode mode) {
    return mode == X_E4M3 || mode == X_E4M3_AS_F16;
}

/* One weight and where its result goes. */
struct target {
    const uint8_t *w;
    const void *scale;
    float *y;
    int64_t ldy;
    float factor;
    bool row_scale; /* FP8_CHANNEL: scale[row] takes the place of factor */
    int n, row_tiles, row_off, col_off;
};

/* Products of the same x with weights of one format, by value to the kernels. */
enum { MAX_TARGETS = 4 };

struct products {
    int k, n_slice, ks;
    const uint16_t *xs;  /* [column][k]: columns of row 0, then of row 1, ... */
    const float *xscale; /* [row][n_slice], prompts [slice][xscale_ld]: multiplies a slice's sum; NULL: 1 */
    int n_row, x_cols;   /* x_cols: columns of a row, 1 or 2 */
    int xscale_ld;
    float *stack;   /* prompts: TREE_LEVELS sets of accumulators a block */
    uint32_t *flag; /* prompts: zeros */
    int n_target;
    struct target target[MAX_TARGETS];
};

/* kernels/linear_small.cu: up to 16 rows. */
enum { SMALL_MAX_ROWS = 16 };
ql_status ql_linear_small_cuda(ql_dev *dev, const struct products *p, ql_qformat format);

/* What prompt rows of x are before they are prepared: numbers in memory, or the result of an op that is computed where it is
 * prepared and need not be stored. With the bits of that op. */
enum x_source_kind { X_STORED, X_SWIGLU, X_GATED_NORM, X_PREPARED /* it is prepared already */ };

struct x_source {
    enum x_source_kind kind;
    const float *x;    /* [row][ld]: x itself, g of swiglu, o of gated_norm */
    const float *with; /* likewise: u of swiglu, z of gated_norm */
    const float *w;    /* gated_norm: [128] */
    int64_t ld;
    float eps;
};

struct push; /* push.cuh */

/* kernels/linear_prompt.cu: prompt rows of a[0], with the targets of *p. from: what a[0].x would hold; to: other lanes that get the
 * result as well, or NULL. The scratch is for rows up to max_row and k. */
ql_status ql_linear_prompt_cuda(ql_dev *dev, const ql_linear_args *a, enum x_mode mode, const struct x_source &from,
                                const struct push *to, struct products *p);
size_t ql_linear_prompt_scratch(int64_t hidden, int64_t max_row, int64_t k);

/* n products of the same x, n_row, n_slice, phase and precision: each gives the bits that it gives alone. */
ql_status ql_linear_group_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n);

/* A product of prompt rows with what is next to it: x may be the result of another op (from; NULL: stored), and the lane's part of a
 * sum may go to other lanes as it is made (to, or NULL). *taken false, and nothing done: it is none that can be had so. */
ql_status ql_linear_fused_cuda(ql_dev *dev, const ql_linear_args *a, const struct x_source *from, const struct push *to,
                               bool *taken);

/* Products of one x, of which the op before them may prepare x for the first ones (prompt.cuh): *x says where and how, *stored whether
 * some need x itself as well. False: it may not. Then the products with x as it was left there. */
struct prepared_x;
bool ql_linear_group_place(ql_dev *dev, const ql_linear_args *a, int32_t n, struct prepared_x *x, bool *stored);
ql_status ql_linear_group_prepared_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n);

/* kernels/linear_q8.cu: n products of precision Q8 with NVFP4 weights, one x. */
ql_status ql_linear_q8_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n);

/* Whether a product is one of those. */
static inline bool is_q8(const ql_linear_args *a) {
    return a->precision == QL_PREC_Q8 && a->w->format == QL_FORMAT_NVFP4;
}

/* Formats that a launch may mix: FP8 with one factor is FP8 with a factor for each row. */
static inline bool same_family(ql_qformat a, ql_qformat b) {
    return a == b || (is_fp8(a) && is_fp8(b) && a != QL_FORMAT_FP8_BLOCK && b != QL_FORMAT_FP8_BLOCK);
}

/* Slices are whole tiles of every tensor-core kernel, and begin at the same place in their 128-block. */
static inline bool has_tiles(const ql_linear_args *a) {
    const ql_weight *w = a->w;
    return w->k / a->n_slice % 64 == 0 && (w->format != QL_FORMAT_FP8_BLOCK || w->col_off % 64 == 0);
}

/* How x meets a quantized weight. */
static inline enum x_mode quantized_mode(const ql_linear_args *a) {
    return a->precision == QL_PREC_EXACT                         ? X_F16X2
           : a->precision == QL_PREC_Q8                          ? X_F16
           : a->precision == QL_PREC_FP8 && is_fp8(a->w->format) ? X_E4M3_AS_F16
                                                                 : X_BF16_AS_F16;
}

/* ---- device ---- */

/* The larger of `most` and |v|. FP8 saturates with its scale; a power of two must fit the finite elements. */
__device__ __forceinline__ float larger_x(float most, float v, enum x_mode mode) {
    v = fabsf(v);
    return v > most && (is_e4m3(mode) || v < __uint_as_float(0x7f800000u)) ? v : most;
}

/* What a slice of x whose largest element is `most` is multiplied with (divided by, for E4M3), and what undoes it. */
__device__ __forceinline__ float x_factor(float most, enum x_mode mode, float *back) {
    if (is_e4m3(mode)) {
        return *back = fmaxf(most, 0x1p-126f) / 448.0f;
    }
    return scale_to_f16(most, back);
}

/* A half of an f16 pair, twice: what f16 instructions take as part of an operand. */
__device__ __forceinline__ uint32_t low_twice(uint32_t two) {
    uint32_t d;
    asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n mov.b32 %0, {lo, lo};}" : "=r"(d) : "r"(two));
    return d;
}
__device__ __forceinline__ uint32_t high_twice(uint32_t two) {
    uint32_t d;
    asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n mov.b32 %0, {hi, hi};}" : "=r"(d) : "r"(two));
    return d;
}

/* The two E4M3 numbers of the low half as an f16 pair. */
__device__ __forceinline__ uint32_t e4m3_two(uint32_t two) {
    uint32_t s;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(s) : "h"((uint16_t)two));
#else
    s = __byte_perm(two, 0, 0x1404);
    s = mul_f16x2((s & 0x80008000u) | ((s >> 1) & 0x3f803f80u), 0x5c005c00u);
#endif
    return s;
}

/* Pairs 0..3 of an NVFP4 word, times 2^-14. */
__device__ __forceinline__ void e2m1_pairs(uint32_t w, uint32_t h[4]) {
    constexpr uint32_t KEPT = 0x8e008e00u;
    uint32_t r = __brev(w); /* by a unit that nothing else here uses */
    h[0] = w & KEPT;
    h[1] = (w << 8) & KEPT;
    h[2] = r & KEPT;
    h[3] = (r << 8) & KEPT;
}

/* Pairs 0 and 1 of an FP8 word. */
__device__ __forceinline__ void e4m3_pairs(uint32_t w, uint32_t h[2]) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.rn.f16x2.e4m3x2 %0, lo;\n cvt.rn.f16x2.e4m3x2 %1, hi;}"
        : "=r"(h[0]), "=r"(h[1])
        : "r"(w));
#else
    h[0] = e4m3_two(w);
    h[1] = e4m3_two(w >> 16);
#endif
}

/* Undoes the factor that all quantized weights carry in registers; NVFP4 of generated rows takes its own share (unit.cuh). */
#define WEIGHT_UNIT 256.0f

/* Weights are read once: past the first-level cache. */
__device__ __forceinline__ uint4 load_stream(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ uint32_t load_stream_u16(const void *p) {
    unsigned short v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0,[%1];" : "=h"(v) : "l"(p));
    return v;
}

/* The balanced binary tree over n slices (a power of two). */
__device__ __forceinline__ float slice_tree(float part[MAX_SLICES], int n) {
#pragma unroll
    for (int d = 1; d < MAX_SLICES; d *= 2) {
#pragma unroll
        for (int i = 0; i + d < MAX_SLICES; i += 2 * d) {
            if (i + d < n) {
                part[i] += part[i + d];
            }
        }
    }
    return part[0];
}

#endif
