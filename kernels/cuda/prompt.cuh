/* What the prompt products of linear share: weight fragments, the targets of a launch.
 *
 * Prepared x, as prepare_prompt_x leaves it: [step][column][128 bytes], a step being 64 columns of K, or 128 of one-byte
 * numbers, in the order of the matrix instruction's steps over the layout of the weights (layout.h); 16-byte chunks are
 * swizzled by the column's last three bits. Columns are padded to COL_PAD, what the padding holds does not matter.
 */
#ifndef QL_KERNELS_CUDA_PROMPT_CUH
#define QL_KERNELS_CUDA_PROMPT_CUH

#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/push.cuh"

enum { COL_PAD = 256, PROMPT_FLAGS = 16384 };

/* Prepared x and how to make it. */
struct prepared_x {
    enum x_mode mode;
    int kt, n_col, scale_ld; /* columns of a weight tile; columns of x, padded; between the scales of two slices */
    float unit;              /* what the weights in registers are multiplied with to be themselves */
    uint8_t *xs;
    float *scale;
};

/* Where and how ql_linear_prompt_cuda looks for x with X_PREPARED. False: it takes no prepared x. */
bool ql_linear_prompt_place(ql_dev *dev, const ql_linear_args *a, enum x_mode mode, struct prepared_x *x);

/* norm_prompt.cu: rmsnorm, or with `to` ql_rmsnorm_of_lanes_cuda, whose result is left prepared as `x`, and in y only where `stored`.
 * False in *served, and nothing done, where a row is too long. */
ql_status ql_rmsnorm_prepare_cuda(ql_dev *dev, const ql_rmsnorm_args *a, const float *own, const struct push *to,
                                  const struct prepared_x &x, bool stored, bool *served);

/* Prompt products for compute capability 9.0: `work` for what waits in trees. e4m3: x is E4M3. to: where else the one target's
 * result goes, or NULL. */
ql_status ql_linear_prompt_sm90(ql_dev *dev, struct products *p, ql_qformat format, bool e4m3, uint8_t *work,
                                size_t work_bytes, const struct push *to);

/* linear_narrow.cu: prompt products of BF16 weights that have few rows in the whole matrix. x is read as it is. */
enum { NARROW_MOST = 256 };
bool ql_linear_is_narrow(const ql_dev *dev, const ql_linear_args *a);
ql_status ql_linear_narrow_cuda(ql_dev *dev, const ql_linear_args *a, const struct products *p);

/* Whether a product can send its result to other lanes as it is made. */
bool ql_linear_prompt_can_push(const ql_dev *dev, const ql_linear_args *a, enum x_mode mode);

/* Tiles of `rows` weight rows of a target. */
static __host__ __device__ __forceinline__ int m_tiles_of(const struct target &t, int rows) {
    return (t.n + rows - 1) / rows;
}

/* ---- device ---- */

/* The nearest BF16 numbers, a in the low half. */
__device__ __forceinline__ uint32_t two_bf16(float a, float b) {
    return __float_as_uint(round_bf16(a)) >> 16 | (__float_as_uint(round_bf16(b)) & 0xffff0000u);
}

/* The codes of an FP8 word in the order 2, 0, 3, 1. */
__device__ __forceinline__ uint32_t e4m3_codes(uint32_t w) { return __byte_perm(w, 0, 0x1302); }

__device__ __forceinline__ void copy_async16_at(uint32_t shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#endif
}

/* A lane's share of 16 weight rows for one step. */
template <int FMT, bool X8 = false> struct operand {
    static constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, PLAIN = FMT == QL_FORMAT_F16 || FMT == QL_FORMAT_BF16;
    static constexpr int N = FP4 ? 1 : PLAIN || X8 ? 4 : 2; /* 16-byte words */
    uint4 v[N];
    uint32_t s;

    /* Rows row0 .. row0 + 15 from memory, for step `step` of 64 columns. */
    __device__ __forceinline__ void load(const struct target &t, int k, int row0, int step, int lane) {
        if (PLAIN) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                int r = min(row0 + (lane >> 2) + i % 2 * 8, t.n - 1);
                v[i] = load_stream(t.w + ((int64_t)r * k + step * 64 + i / 2 * 32 + (lane & 3) * 8) * 2);
            }
            return;
        }
        int row_tile = min(row0 / TILE_ROWS, t.row_tiles - 1);
        int64_t tile = (int64_t)row_tile * (k / tile_k(FMT)) + step * N;
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = load_stream(t.w + (tile + i) * TILE_BYTES + lane * 16);
        }
        if (FP4) {
            s = load_stream_u16((const uint8_t *)t.scale + tile * TILE_SCALE_BYTES + lane * 2);
        }
    }

    /* From shared memory: packed tiles and their scales, or 16 rows of 128 bytes with chunks swizzled by row. */
    __device__ __forceinline__ void take(const uint8_t *tiles, const uint8_t *scales, int lane) {
        int g = lane >> 2, c = lane & 3;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int at = PLAIN ? (g + i % 2 * 8) * 128 + (((i / 2 * 4 + c) ^ g) << 4) : i * TILE_BYTES + lane * 16;
            v[i] = *(const uint4 *)(tiles + at);
        }
        if (FP4) {
            s = *(const uint16_t *)(scales + lane * 2);
        }
    }

    /* A fragments of the step's four instructions. */
    __device__ __forceinline__ void fragments(uint32_t (&a)[4][4]) const {
        if constexpr (FP4) {
            uint32_t scales = mul_f16x2(e4m3_two(s), 0x54005400u), /* times 2^6, so a weight is times 2^-8 */
                sg = low_twice(scales), sg8 = high_twice(scales);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t lo[4], hi[4];
                e2m1_pairs(h ? v[0].y : v[0].x, lo);
                e2m1_pairs(h ? v[0].w : v[0].z, hi);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    a[2 * h + j][0] = mul_f16x2(lo[2 * j], sg);
                    a[2 * h + j][1] = mul_f16x2(hi[2 * j], sg8);
                    a[2 * h + j][2] = mul_f16x2(lo[2 * j + 1], sg);
                    a[2 * h + j][3] = mul_f16x2(hi[2 * j + 1], sg8);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4 && !FP4; j++) {
            if (PLAIN) {
                uint4 q = v[j / 2 * 2 % N], q8 = v[(j / 2 * 2 + 1) % N];
                a[j][0] = j & 1 ? q.z : q.x;
                a[j][1] = j & 1 ? q8.z : q8.x;
                a[j][2] = j & 1 ? q.w : q.y;
                a[j][3] = j & 1 ? q8.w : q8.y;
            } else if (X8) {
                uint4 q = v[j % N];
                a[j][0] = e4m3_codes(q.x);
                a[j][1] = e4m3_codes(q.z);
                a[j][2] = e4m3_codes(q.y);
                a[j][3] = e4m3_codes(q.w);
            } else {
                uint4 q = v[j / 2 % N];
                uint32_t lo = j & 1 ? q.y : q.x, hi = j & 1 ? q.w : q.z;
                uint32_t g[2], g8[2];
                e4m3_pairs(lo, g);
                e4m3_pairs(hi, g8);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    a[j][2 * i] = mul_f16x2(g[i], 0x1c001c00u); /* 2^-8 */
                    a[j][2 * i + 1] = mul_f16x2(g8[i], 0x1c001c00u);
                }
            }
        }
    }
};

/* The target of tile *m of all, which becomes the tile within it. */
__device__ __forceinline__ const struct target &target_of(const struct products &p, int rows, int *m) {
    int which = 0;
    while (which + 1 < p.n_target && *m >= m_tiles_of(p.target[which], rows)) {
        *m -= m_tiles_of(p.target[which++], rows);
    }
    return p.target[which];
}

/* Scales of the 128-blocks of rows r and r + 8. */
struct block_scales {
    const float *g, *g8;
};

__device__ __forceinline__ struct block_scales block_scales_of(const struct target &t, int k, int r) {
    int64_t blocks = (t.col_off + k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
    const float *s = (const float *)t.scale;
    return block_scales{s + (t.row_off + min(r, t.n - 1)) / QL_FP8_BLOCK * blocks,
                        s + (t.row_off + min(r + 8, t.n - 1)) / QL_FP8_BLOCK * blocks};
}

#endif
