/* Small-row products: the work of a warp, in the order of additions that all kernels for generated rows share.
 *
 * Every canonical slice of a tile of 16 weight rows is cut into units, one run of bytes in memory each: the fewest that have
 * at most UNIT_TILES column tiles, as even as can be. A warp computes a unit, a slice's units are added in rising order. The
 * cut depends on the slice's length alone, so a product has the same bits whichever kernel computes it.
 */
#ifndef QL_KERNELS_CUDA_UNIT_CUH
#define QL_KERNELS_CUDA_UNIT_CUH

#include "kernels/cuda/linear.cuh"

enum { UNIT_TILES = 10 };

/* Cut of a slice of the weights into units. */
struct cut {
    int tiles;     /* column tiles of the slice */
    int per_slice; /* units */
    int shortest;  /* column tiles of a unit; the first `longer` have one more */
    int longer;

    /* First column tile of unit j. */
    __device__ __host__ __forceinline__ int begin(int j) const { return j * shortest + (j < longer ? j : longer); }
};

static inline struct cut cut_of(int tiles) {
    int n = (int)ceil_div(tiles, UNIT_TILES);
    return {tiles, n, tiles / n, tiles % n};
}

/* Sums of a warp: NT column tiles of 8. COLS: columns of a row of x. Even and odd steps are added apart. */
template <int FMT, int NT, int COLS> struct sums {
    static constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    static constexpr int KT = tile_k(FMT), STEPS = KT / 16, TOK = NT * 8 / COLS;
    /* NVFP4 weights are multiplied times 2^-14 (multiples of the least f16, so exact), FP8 weights as they are; other kernels have
     * both times 2^-8, which is what the scale of x undoes. The rest comes at the unit's end. */
    static constexpr float BACK = FP4 ? 0x1p6f : 0x1p-8f;
    float acc[NT][2][4], total[BLOCK ? NT : 1][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[n][0][i] = acc[n][1][i] = 0.0f;
                total[BLOCK ? n : 0][i] = 0.0f;
            }
        }
    }

    /* A tile's weights as fragments: codes w and scales s of this lane. */
    static __device__ __forceinline__ void decode(uint4 w, uint32_t s, uint32_t a[STEPS][4]) {
        if (FP4) {
            uint32_t scales = e4m3_two(s), sg = low_twice(scales), sg8 = high_twice(scales), lo[8], hi[8];
            e2m1_pairs(w.x, lo);
            e2m1_pairs(w.y, lo + 4);
            e2m1_pairs(w.z, hi);
            e2m1_pairs(w.w, hi + 4);
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                a[j][0] = mul_f16x2(lo[2 * j % 8], sg);
                a[j][1] = mul_f16x2(hi[2 * j % 8], sg8);
                a[j][2] = mul_f16x2(lo[(2 * j + 1) % 8], sg);
                a[j][3] = mul_f16x2(hi[(2 * j + 1) % 8], sg8);
            }
        } else {
            uint32_t lo[4], hi[4];
            e4m3_pairs(w.x, lo);
            e4m3_pairs(w.y, lo + 2);
            e4m3_pairs(w.z, hi);
            e4m3_pairs(w.w, hi + 2);
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                a[j][0] = lo[2 * j % 4];
                a[j][1] = hi[2 * j % 4];
                a[j][2] = lo[(2 * j + 1) % 4];
                a[j][3] = hi[(2 * j + 1) % 4];
            }
        }
    }

    /* The tile's fragments times 8 columns of x: b of this lane, in the order of its columns. */
    __device__ __forceinline__ void multiply(int n, const uint32_t a[STEPS][4], const uint4 b[STEPS / 2]) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            const uint4 v = b[j / 2];
            mma_f16(acc[n][j & 1], a[j], j & 1 ? v.z : v.x, j & 1 ? v.w : v.y);
        }
    }

    /* The end of a 128-block or of the unit: f and f8 are the block scales of rows g and g + 8. */
    __device__ __forceinline__ void end_block(float f, float f8) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *t = total[BLOCK ? n : 0];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                t[i] = fmaf(acc[n][0][i] + acc[n][1][i], i < 2 ? f : f8, t[i]);
                acc[n][0][i] = acc[n][1][i] = 0.0f;
            }
        }
    }

    /* Into [TOK][16]: row of x, weight row. Rows of x from n_row on are left out. */
    __device__ __forceinline__ void store(float *out, int n_row, int lane) const {
        int g = lane >> 2, c = lane & 3;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = (BLOCK ? total[n % (BLOCK ? NT : 1)][i] : acc[n][0][i] + acc[n][1][i]) * BACK;
            }
            if (COLS == 2) {
                int t = n * 4 + c;
                if (t < n_row) {
                    out[t * 16 + g] = fmaf(v[1], 1.0f / 2048.0f, v[0]);
                    out[t * 16 + g + 8] = fmaf(v[3], 1.0f / 2048.0f, v[2]);
                }
            } else {
                int t = n * 8 + 2 * c;
                if (t < n_row) {
                    out[t * 16 + g] = v[0];
                    out[t * 16 + g + 8] = v[2];
                }
                if (t + 1 < n_row) {
                    out[(t + 1) * 16 + g] = v[1];
                    out[(t + 1) * 16 + g + 8] = v[3];
                }
            }
        }
    }
};

#endif
