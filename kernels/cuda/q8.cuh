/* What the kernels of precision Q8 share: prepared activations, records in registers, the integer matrix instruction.
 *
 * Weights are whole numbers in halves (0 1 2 3 4 6 8 12 and their negatives), activations INT8 codes, so the sum of a group of
 * 16 is a whole number below 2^15, and times its group scale (4 bits) still exact in f32. A group scale is decoded as its
 * value times 2^-8 (its code moved into an f16), so what a slice's sum is multiplied with is 128 times the tensor scale.
 */
#ifndef QL_KERNELS_CUDA_Q8_CUH
#define QL_KERNELS_CUDA_Q8_CUH

#include "kernels/cuda/linear.cuh"
#include "kernels/q8.h"

struct q8_target {
    const uint8_t *w; /* records */
    float *y;
    int64_t ldy;
    float factor; /* 128 times the tensor scale */
    int n;
};

/* Products of one x, by value to the kernels. */
struct q8_products {
    int k, n_slice, ks, blocks; /* blocks: of a slice */
    int64_t row_bytes;          /* of a row of records */
    const int8_t *x;            /* [row][k] codes */
    const float *d;             /* [block of all slices][n_row] */
    int n_row;
    float *stack; /* wide: what waits in the tree, and behind it parts of tiles */
    float *part;
    unsigned *count; /* wide: WIDE_COUNTS zeros, of a tile's parts that are complete; NULL: tiles are whole */
    int n_target;
    struct q8_target target[MAX_TARGETS];
};

/* kernels/linear_q8_wide.cu: a tile of 128 rows of x and 64 of the weights; slices are multiples of 32 columns. p->stack has
 * `room` bytes, at least ql_q8_wide_stack(p). */
enum { WIDE_X = 128, WIDE_W = 64, WIDE_COUNTS = 1024 };
ql_status ql_linear_q8_wide_cuda(ql_dev *dev, struct q8_products *p, size_t room);

/* Pieces of a slice: a long one has four, so that a few tiles can be work for more blocks. It is the slice's length alone that
 * decides, so a row's bits do not depend on lanes. */
static inline int ql_q8_wide_pieces(const struct q8_products *p) {
    return p->blocks >= 128 && p->blocks % 8 == 0 ? 4 : 1;
}

/* Bytes of one block's stack. */
static inline size_t ql_q8_wide_stack(const struct q8_products *p) {
    size_t levels = 0;
    while (1 << levels < p->n_slice * ql_q8_wide_pieces(p)) {
        levels++;
    }
    return levels * WIDE_X * WIDE_W * sizeof(float);
}

/* ---- device ---- */

/* The target of the unit *u of all, `rows` weight rows each, which becomes the unit within it. */
__device__ __forceinline__ const struct q8_target &q8_target_of(const struct q8_products &p, int rows, int *u) {
    int which = 0;
    while (which + 1 < p.n_target && *u >= (p.target[which].n + rows - 1) / rows) {
        *u -= (p.target[which++].n + rows - 1) / rows;
    }
    return p.target[which];
}

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

/* Magnitudes of the eight codes in halves. */
#define Q8_LOW 0x03020100u
#define Q8_HIGH 0x0c080604u

/* The four codes in the low half of q, as signed bytes. Magnitudes and their negatives by permute, which looks at the low 16
 * bits of its selector; a third takes the one or the other. */
__device__ __forceinline__ uint32_t q8_decode4(uint32_t q) {
    uint32_t m = q & 0x7777u, up = prmt(Q8_LOW, Q8_HIGH, m), down = prmt(0xfdfeff00u, 0xf4f8fafcu, m);
    return prmt(up, down, 0x3210u | (q >> 1 & 0x4444u));
}

/* A table's half in each lane's registers: as a constant, which is the same in all lanes, the compiler would keep it where
 * permutes cannot reach it, and copy it for each. */
__device__ __forceinline__ uint32_t q8_low(void) {
    return __shfl_sync(0xffffffffu, (threadIdx.x & 31) == 0 ? Q8_LOW : threadIdx.x, 0);
}

/* Sum of 16 weights, codes in q0 and q1, times 16 codes of x. A selector's top bit asks for the sign of a byte, which is 0 in
 * all of the table: codes with a sign give 0, and with all signs turned the others do. low: q8_low(). */
__device__ __forceinline__ int q8_dot16(uint32_t low, uint32_t q0, uint32_t q1, int4 x) {
    int up = 0, down = 0;
    uint32_t t0 = q0 ^ 0x88888888u, t1 = q1 ^ 0x88888888u;
    up = __dp4a((int)prmt(low, Q8_HIGH, q0), x.x, up);
    down = __dp4a((int)prmt(low, Q8_HIGH, t0), x.x, down);
    up = __dp4a((int)prmt(low, Q8_HIGH, q0 >> 16), x.y, up);
    down = __dp4a((int)prmt(low, Q8_HIGH, t0 >> 16), x.y, down);
    up = __dp4a((int)prmt(low, Q8_HIGH, q1), x.z, up);
    down = __dp4a((int)prmt(low, Q8_HIGH, t1), x.z, down);
    up = __dp4a((int)prmt(low, Q8_HIGH, q1 >> 16), x.w, up);
    down = __dp4a((int)prmt(low, Q8_HIGH, t1 >> 16), x.w, down);
    return up - down;
}

/* The same as f32, by the bits of 1.5 2^23 + sum. */
__device__ __forceinline__ float q8_dot16f(uint32_t low, uint32_t q0, uint32_t q1, int4 x) {
    return __int_as_float(q8_dot16(low, q0, q1, x) + 0x4b400000) - 12582912.0f;
}

/* A group scale times 2^-8; it has no sign. */
__device__ __forceinline__ float q8_scale(uint32_t byte) { return f32_of_f16((uint16_t)(byte << 7)); }

/* Sums begin at the bits of 1.5 2^23, so that they are f32 numbers 1.5 2^23 + sum without a conversion: one fma with the
 * scale s and q8_unbias(s) gives sum times s, exactly. */
#define Q8_BIAS 0x4b400000
__device__ __forceinline__ float q8_unbias(float s) { return s * -12582912.0f; }

/* 16 x 8 sums of 16 products, signed bytes, from the bias on: a0 row g, a1 row g + 8, b column g, k 4c .. 4c + 3 in lane
 * 4 g + c; d as of m16n8k16 in mma.cuh. */
__device__ __forceinline__ void mma_s8(int d[4], uint32_t a0, uint32_t a1, uint32_t b, int bias = Q8_BIAS) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a0), "r"(a1), "r"(b), "r"(bias));
#else
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%4,%4};"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(a0), "r"(b), "r"(bias));
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%4,%4};"
                 : "=r"(d[2]), "=r"(d[3])
                 : "r"(a1), "r"(b), "r"(bias));
#endif
}

#endif
