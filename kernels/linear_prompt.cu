/* linear for prompt rows on tensor cores: weights are decoded from their packed form into the A operand by the warp that
 * multiplies with them; x comes through shared memory as B, in blocks that prepare_x left in the order and swizzle that
 * the instructions read, so that a stage is one run of bytes.
 *
 *   step    64 columns of K
 *   slices  each canonical slice's sum is finished and scaled, then added as the tree; what waits in the tree lies in
 *           scratch, thread by thread, so that it costs no barrier
 *
 * Blocks are persistent: a block walks over tiles, neighbours share weight rows. The number of columns of a tile depends on
 * how many there are; a column's bits do not.
 *
 *   group   compute capability 9.0a: a warpgroup that fetches x and packed weights by bulk copies, two that multiply 64 or
 *           128 weight rows each by wgmma with A in registers; 256 rows because x is the larger traffic
 *   warp    otherwise: eight warps of 32 weight rows, mma.m16n8k16, x by cp.async
 */
#include "kernels/cuda/linear.cuh"

enum { BM = 128, BK = 64, STAGES = 4, GROUP_STAGE_BYTES = 216 * 1024 };

/* ---- weights of a warp ------------------------------------------------------------------------------------------- */

/* Weight rows row0 .. row0 + 16 M - 1 for one step, as loaded. */
template <int FMT, int M> struct weights {
    static constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, PLAIN = FMT == QL_FORMAT_F16 || FMT == QL_FORMAT_BF16;
    static constexpr int N = FP4 ? 1 : PLAIN ? 4 : 2; /* 16-byte words for 16 rows */
    uint4 v[M][N];
    uint32_t s[M];

    __device__ __forceinline__ void load(const struct target &t, int k, int row0, int step, int lane) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (PLAIN) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int r = min(row0 + 16 * m + (lane >> 2) + 8 * h, t.n - 1);
                    const uint8_t *w = t.w + ((int64_t)r * k + step * BK + 8 * (lane & 3)) * 2;
                    v[m][h % N] = load_stream(w);
                    v[m][(2 + h) % N] = load_stream(w + 64);
                }
            } else {
                constexpr int PER_STEP = BK / tile_k(FMT);
                int row_tile = min(row0 / TILE_ROWS + m, t.row_tiles - 1);
                int64_t tile = (int64_t)row_tile * (k / tile_k(FMT)) + step * PER_STEP;
#pragma unroll
                for (int i = 0; i < PER_STEP; i++) {
                    v[m][i % N] = load_stream(t.w + (tile + i) * TILE_BYTES + lane * 16);
                }
                if (FP4) {
                    s[m] = load_stream_u16((const uint8_t *)t.scale + tile * TILE_SCALE_BYTES + lane * 2);
                }
            }
        }
    }

    /* From a stage of shared memory: the tiles of 16 rows, and their scales. */
    __device__ __forceinline__ void take(int m, const uint8_t *tiles, const uint8_t *scales, int lane) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[m][i] = *(const uint4 *)(tiles + i * TILE_BYTES + lane * 16);
        }
        if (FP4) {
            s[m] = *(const uint16_t *)(scales + lane * 2);
        }
    }

    /* A fragment of rows 16 m .. and K step j of 4; sg, sg8: group scales of NVFP4. */
    __device__ __forceinline__ void fragment(int m, int j, uint32_t sg, uint32_t sg8, uint32_t a[4]) const {
        if (FP4) {
            uint4 q = v[m][0];
            uint32_t lo[4], hi[4];
            e2m1_pairs(j < 2 ? q.x : q.y, lo);
            e2m1_pairs(j < 2 ? q.z : q.w, hi);
            int at = 2 * (j & 1);
            a[0] = mul_f16x2(lo[at], sg);
            a[1] = mul_f16x2(hi[at], sg8);
            a[2] = mul_f16x2(lo[at + 1], sg);
            a[3] = mul_f16x2(hi[at + 1], sg8);
        } else if (PLAIN) {
            uint4 g = v[m][j / 2 * 2 % N], g8 = v[m][(j / 2 * 2 + 1) % N];
            a[0] = j & 1 ? g.z : g.x;
            a[1] = j & 1 ? g8.z : g8.x;
            a[2] = j & 1 ? g.w : g.y;
            a[3] = j & 1 ? g8.w : g8.y;
        } else {
            uint4 q = v[m][j / 2 % N];
            uint32_t lo = j & 1 ? q.y : q.x, hi = j & 1 ? q.w : q.z;
            a[0] = e4m3_pair0(lo);
            a[1] = e4m3_pair0(hi);
            a[2] = e4m3_pair1(lo);
            a[3] = e4m3_pair1(hi);
        }
    }
};

/* Sums of 16 weight rows and 8 NT columns of x in a warp; FP8_BLOCK keeps finished blocks apart. */
template <int FMT, int NT, int COLS> struct sums {
    static constexpr bool BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    float acc[NT][4], total[BLOCK ? NT : 1][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
            float *t = total[BLOCK ? n : 0];
            t[0] = t[1] = t[2] = t[3] = 0.0f;
        }
    }

    /* The end of a 128-block: f and f8 are the block scales of rows g and g + 8. */
    __device__ __forceinline__ void end_block(float f, float f8) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *t = total[BLOCK ? n : 0];
            t[0] = fmaf(acc[n][0], f, t[0]);
            t[1] = fmaf(acc[n][1], f, t[1]);
            t[2] = fmaf(acc[n][2], f8, t[2]);
            t[3] = fmaf(acc[n][3], f8, t[3]);
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
        }
    }

    /* A slice is complete: scales it, adds what the tree has waiting, and keeps or writes it. r: row g of the weight; col:
     * first column; stack: this thread's place, `step` floats from one number to the next, `level` from one level. Loads
     * go ahead of stores, four column tiles at a time: the compiler must think that they meet. */
    __device__ __forceinline__ void end_slice(const struct products &p, const struct target &t, int slice, int r,
                                              int col, int c, float *stack, int step, int level) {
        constexpr int GROUP = NT < 4 ? NT : 4, PER = 4 / COLS;
        bool last = slice + 1 == p.n_slice;
        float f = t.row_scale ? ((const float *)t.scale)[min(r, t.n - 1)] : t.factor;
        float f8 = t.row_scale ? ((const float *)t.scale)[min(r + 8, t.n - 1)] : t.factor;
#pragma unroll
        for (int n0 = 0; n0 < NT; n0 += GROUP) {
            float sum[GROUP][PER];
            float *wait = stack + n0 * 4 * step;
#pragma unroll
            for (int n = 0; n < GROUP; n++) {
                float *v = BLOCK ? total[(n0 + n) % (BLOCK ? NT : 1)] : acc[n0 + n];
#pragma unroll
                for (int e = 0; e < PER; e++) {
                    int row = (col + (n0 + n) * 8 + 2 * c) / COLS + (COLS == 1 ? e & 1 : 0);
                    float x = COLS == 2 ? fmaf(v[2 * e + 1], 1.0f / 2048.0f, v[2 * e]) : v[e];
                    if (p.xscale) {
                        x *= p.xscale[min(row, p.n_row - 1) * p.n_slice + slice];
                    }
                    sum[n][e] = x * ((COLS == 2 ? e == 0 : e < 2) ? f : f8);
                }
                v[0] = v[1] = v[2] = v[3] = 0.0f;
            }
            for (int b = slice; b & 1; b >>= 1, wait += level) {
#pragma unroll
                for (int n = 0; n < GROUP; n++) {
#pragma unroll
                    for (int e = 0; e < PER; e++) {
                        sum[n][e] = wait[(n * PER + e) * step] + sum[n][e];
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < GROUP; n++) {
#pragma unroll
                for (int e = 0; e < PER; e++) {
                    int row = (col + (n0 + n) * 8 + 2 * c) / COLS + (COLS == 1 ? e & 1 : 0);
                    int out = r + ((COLS == 2 ? e == 0 : e < 2) ? 0 : 8);
                    if (!last) {
                        wait[(n * PER + e) * step] = sum[n][e];
                    } else if (row < p.n_row && out < t.n) {
                        t.y[row * t.ldy + out] = sum[n][e];
                    }
                }
            }
        }
    }
};

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

/* Tiles of `rows` weight rows of a target. */
static __host__ __device__ __forceinline__ int m_tiles_of(const struct target &t, int rows) {
    return (t.n + rows - 1) / rows;
}

/* The target of tile *m of all, which becomes the tile within it. */
__device__ __forceinline__ const struct target &target_of(const struct products &p, int rows, int *m) {
    int which = 0;
    while (which + 1 < p.n_target && *m >= m_tiles_of(p.target[which], rows)) {
        *m -= m_tiles_of(p.target[which++], rows);
    }
    return p.target[which];
}

/* ---- warp -------------------------------------------------------------------------------------------------------- */

/* NT: column tiles of 8 of a warp. WN: warps side by side in the columns. */
template <int FMT, int NT, int WN, int COLS>
__global__ void __launch_bounds__(128 * WN, 1) warp_kernel(struct products p, int m_tiles, int n_tiles, int n_col) {
    constexpr int BN = 8 * NT * WN, THREADS = 128 * WN;
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    extern __shared__ __align__(128) uint8_t stages[]; /* [STAGES][BN][128 bytes] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    after_previous();
    int wm = warp & 3, wn = warp >> 2, steps = p.k / BK, slice_steps = p.ks / BK;
    float *stack = p.stack + (int64_t)blockIdx.x * (TREE_LEVELS * BM * BN) + threadIdx.x;

    for (int tile = blockIdx.x; tile < m_tiles * n_tiles; tile += gridDim.x) {
        int m_tile = tile / n_tiles, col0 = tile % n_tiles * BN;
        const struct target &t = target_of(p, BM, &m_tile);
        int row0 = m_tile * BM + wm * 32;
        auto fetch = [&](int step) {
            uint8_t *to = stages + step % STAGES * (BN * 128);
            const uint8_t *from = (const uint8_t *)p.xs + ((int64_t)step * n_col + col0) * 128;
            for (int i = threadIdx.x; i < BN * 8; i += THREADS) {
                copy_async16(to + i * 16, from + i * 16);
            }
        };
        sums<FMT, NT, COLS> sum[2];
        struct block_scales bs[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            sum[m].clear();
            if (BLOCK) {
                bs[m] = block_scales_of(t, p.k, row0 + 16 * m + g);
            }
        }
        weights<FMT, 2> now, next;
        now.load(t, p.k, row0, 0, lane);
        __syncthreads(); /* the stages may still be read for the last tile */
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < steps) {
                fetch(i);
            }
            commit_async();
        }
        int slice = 0, left = slice_steps;
        for (int step = 0; step < steps; step++) {
            wait_async<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) {
                fetch(step + STAGES - 1);
            }
            commit_async();
            if (step + 1 < steps) {
                next.load(t, p.k, row0, step + 1, lane);
            }
            uint32_t sg[2] = {}, sg8[2] = {};
            if (FP4) {
                group_scales(now.s[0], &sg[0], &sg8[0]);
                group_scales(now.s[1], &sg[1], &sg8[1]);
            }
            const uint8_t *stage = stages + step % STAGES * (BN * 128);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t a[2][4], b[NT][2];
                now.fragment(0, j, sg[0], sg8[0], a[0]);
                now.fragment(1, j, sg[1], sg8[1], a[1]);
#pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    int col = wn * 8 * NT + n * 8 + (lane & 7) + (lane >> 4) * 8, chunk = 2 * j + (lane >> 3 & 1);
                    uint32_t r[4];
                    load_matrix4(r, stage + col * 128 + ((chunk ^ (col & 7)) << 4));
                    b[n][0] = r[0];
                    b[n][1] = r[1];
                    b[n + 1][0] = r[2];
                    b[n + 1][1] = r[3];
                }
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        if (FMT == QL_FORMAT_BF16) {
                            mma_bf16(sum[m].acc[n], a[m], b[n][0], b[n][1]);
                        } else {
                            mma_f16(sum[m].acc[n], a[m], b[n][0], b[n][1]);
                        }
                    }
                }
            }
            now = next;
            left--;
            int end = t.col_off / BK + step + 1;
            if (BLOCK && (end % (QL_FP8_BLOCK / BK) == 0 || left == 0)) {
                int b = (end - 1) / (QL_FP8_BLOCK / BK);
                sum[0].end_block(bs[0].g[b], bs[0].g8[b]);
                sum[1].end_block(bs[1].g[b], bs[1].g8[b]);
            }
            if (left == 0) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    sum[m].end_slice(p, t, slice, row0 + 16 * m + g, col0 + wn * 8 * NT, c,
                                     stack + m * NT * 4 * THREADS, THREADS, BM * BN);
                }
                slice++;
                left = slice_steps;
            }
        }
    }
}

/* ---- group ------------------------------------------------------------------------------------------------------- */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

/* The one arrival of a barrier that n bytes of copies complete. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t n, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(n), "r"(barrier)
                 : "memory");
}

/* Matrix descriptor of 64-column blocks of x, 128 bytes a row, 128-byte swizzle, 8 rows every 1024 bytes. */
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait(void) { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define ACC4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define ACC16(i) ACC4(i), ACC4(i + 1), ACC4(i + 2), ACC4(i + 3)

/* d += a x: 64 weight rows of the warpgroup, 8 NT columns. */
template <bool BF16, int NT> __device__ __forceinline__ void wgmma(float (&d)[NT][4], const uint32_t a[4], uint64_t x);

#define WGMMA_64(TYPE)                                                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                   \
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"                                                              \
                 : ACC16(0), ACC16(4)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x))

#define WGMMA_128(TYPE)                                                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                   \
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"                                                              \
                 : ACC16(0), ACC16(4), ACC16(8), ACC16(12)                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x))

#define WGMMA_256(TYPE)                                                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                    \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                    \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                    \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "        \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "   \
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 0;"                                                         \
                 : ACC16(0), ACC16(4), ACC16(8), ACC16(12), ACC16(16), ACC16(20), ACC16(24), ACC16(28)                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x))

template <> __device__ __forceinline__ void wgmma<false, 8>(float (&d)[8][4], const uint32_t a[4], uint64_t x) {
    WGMMA_64("f16");
}
template <> __device__ __forceinline__ void wgmma<true, 8>(float (&d)[8][4], const uint32_t a[4], uint64_t x) {
    WGMMA_64("bf16");
}
template <> __device__ __forceinline__ void wgmma<false, 16>(float (&d)[16][4], const uint32_t a[4], uint64_t x) {
    WGMMA_128("f16");
}
template <> __device__ __forceinline__ void wgmma<true, 16>(float (&d)[16][4], const uint32_t a[4], uint64_t x) {
    WGMMA_128("bf16");
}
template <> __device__ __forceinline__ void wgmma<false, 32>(float (&d)[32][4], const uint32_t a[4], uint64_t x) {
    WGMMA_256("f16");
}
template <> __device__ __forceinline__ void wgmma<true, 32>(float (&d)[32][4], const uint32_t a[4], uint64_t x) {
    WGMMA_256("bf16");
}
#endif

/* A stage: x, then the packed weights of 8 MT row tiles, then the scales of NVFP4. As many stages as shared memory holds,
 * at most 8. */
template <int FMT, int MT, int NT> struct stage_of {
    static constexpr bool PLAIN = weights<FMT, 1>::PLAIN;
    static constexpr int X = NT * 8 * 128, TILES = PLAIN ? 0 : BK / tile_k(FMT) * TILE_BYTES;
    static constexpr int SCALES = FMT == QL_FORMAT_NVFP4 ? TILE_SCALE_BYTES : 0;
    static constexpr int USED = X + 8 * MT * (TILES + SCALES), BYTES = (USED + 1023) / 1024 * 1024;
    static constexpr int COUNT = GROUP_STAGE_BYTES / BYTES < 8 ? GROUP_STAGE_BYTES / BYTES : 8;
};

/* One block of three warpgroups: the first fetches, the others have 64 MT weight rows each. BN = 8 NT columns. Plain weights
 * go straight to the registers of those who use them, one step ahead. */
template <int FMT, int MT, int NT, int COLS>
__global__ void __launch_bounds__(384, 1) group_kernel(struct products p, int m_tiles, int n_tiles, int n_col) {
#if HAVE_WGMMA
    using stage_t = stage_of<FMT, MT, NT>;
    constexpr int BN = 8 * NT, STAGE = stage_t::BYTES, COUNT = stage_t::COUNT, TILES = stage_t::TILES,
                  SCALES = stage_t::SCALES;
    constexpr int ROW_TILES = 8 * MT, ROWS = 128 * MT;
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK, PLAIN = stage_t::PLAIN;
    extern __shared__ __align__(1024) uint8_t raw[]; /* [COUNT][STAGE], then full and empty barriers */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    uint32_t base = (shared_address(raw) + 1023) & ~1023u, full = base + COUNT * STAGE, empty = full + COUNT * 8;
    const uint8_t *stages = raw + (base - shared_address(raw));
    if (threadIdx.x == 0) {
        for (int i = 0; i < COUNT; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    after_previous();
    int steps = p.k / BK, slice_steps = p.ks / BK, stage = 0, phase = 0;

    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 0) {
            for (int tile = blockIdx.x; tile < m_tiles * n_tiles; tile += gridDim.x) {
                int m = tile / n_tiles;
                const struct target &t = target_of(p, ROWS, &m);
                const uint8_t *x = (const uint8_t *)p.xs + (int64_t)(tile % n_tiles * BN) * 128;
                int64_t row_tile = min(m * ROW_TILES + lane % ROW_TILES, t.row_tiles - 1);
                const uint8_t *codes = t.w + row_tile * steps * TILES,
                              *scales = (const uint8_t *)t.scale + row_tile * steps * SCALES;
                for (int step = 0; step < steps; step++) {
                    uint32_t to = base + stage * STAGE, bar = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    if (lane == 0) {
                        barrier_expect(bar, stage_t::USED);
                        bulk_copy(to, x + (int64_t)step * n_col * 128, BN * 128, bar);
                    }
                    __syncwarp();
                    if (!PLAIN && lane < ROW_TILES) {
                        bulk_copy(to + BN * 128 + lane * TILES, codes + (int64_t)step * TILES, TILES, bar);
                        if (FP4) {
                            bulk_copy(to + BN * 128 + ROW_TILES * TILES + lane * SCALES,
                                      scales + (int64_t)step * SCALES, SCALES, bar);
                        }
                    }
                    if (++stage == COUNT) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int me = warp - 4; /* row tiles 4 MT (me / 4) + 4 m + me % 4 of the block */
        float *stack = p.stack + (int64_t)blockIdx.x * (TREE_LEVELS * ROWS * BN) + threadIdx.x - 128;
        for (int tile = blockIdx.x; tile < m_tiles * n_tiles; tile += gridDim.x) {
            int m_tile = tile / n_tiles, col0 = tile % n_tiles * BN;
            const struct target &t = target_of(p, ROWS, &m_tile);
            int tile0 = 4 * MT * (me >> 2) + (me & 3), row0 = m_tile * ROWS + tile0 * TILE_ROWS;
            sums<FMT, NT, COLS> sum[MT];
            struct block_scales bs[MT] = {};
#pragma unroll
            for (int m = 0; m < MT; m++) {
                sum[m].clear();
                if (BLOCK) {
                    bs[m] = block_scales_of(t, p.k, row0 + 64 * m + g);
                }
            }
            weights<FMT, MT> now;
            weights<FMT, PLAIN ? MT : 1> next;
            if (PLAIN) {
                next.load(t, p.k, row0, 0, lane);
            }
            int slice = 0, left = slice_steps;
            for (int step = 0; step < steps; step++) {
                if (PLAIN) {
#pragma unroll
                    for (int i = 0; i < now.N; i++) {
                        now.v[0][i] = next.v[0][i];
                    }
                    if (step + 1 < steps) {
                        next.load(t, p.k, row0, step + 1, lane);
                    }
                }
                barrier_wait(full + 8 * stage, phase);
                if (!PLAIN) {
                    const uint8_t *tiles = stages + stage * STAGE + BN * 128;
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        now.take(m, tiles + (tile0 + 4 * m) * TILES,
                                 tiles + ROW_TILES * TILES + (tile0 + 4 * m) * SCALES, lane);
                    }
                }
                uint32_t a[MT][4][4];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    uint32_t sg = 0, sg8 = 0;
                    if (FP4) {
                        group_scales(now.s[m], &sg, &sg8);
                    }
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        now.fragment(m, j, sg, sg8, a[m][j]);
                    }
                }
                uint64_t x = descriptor(base + stage * STAGE);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        wgmma<FMT == QL_FORMAT_BF16, NT>(sum[m].acc, a[m][j], x + 2 * j);
                    }
                }
                wgmma_commit();
                wgmma_wait();
                if (lane == 0) {
                    barrier_arrive(empty + 8 * stage);
                }
                if (++stage == COUNT) {
                    stage = 0;
                    phase ^= 1;
                }
                left--;
                int end = t.col_off / BK + step + 1;
                if (BLOCK && (end % (QL_FP8_BLOCK / BK) == 0 || left == 0)) {
                    int b = (end - 1) / (QL_FP8_BLOCK / BK);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        sum[m].end_block(bs[m].g[b], bs[m].g8[b]);
                    }
                }
                if (left == 0) {
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        sum[m].end_slice(p, t, slice, row0 + 64 * m + g, col0, c, stack + m * NT * 4 * 256, 256,
                                         ROWS * BN);
                    }
                    slice++;
                    left = slice_steps;
                }
            }
        }
    }
#else
    __trap(); /* compute capability 9.0 is built as 90a */
#endif
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

struct tiling {
    void (*kernel)(struct products, int, int, int);
    int bm, bn, threads;
    size_t shared;
};

template <int FMT, int MT, int NT, int COLS> static struct tiling group_tiling(void) {
    using stage_t = stage_of<FMT, MT, NT>;
    return tiling{group_kernel<FMT, MT, NT, COLS>, 128 * MT, 8 * NT, 384,
                  (size_t)stage_t::COUNT * (stage_t::BYTES + 16) + 1024};
}

template <int FMT, int NT, int WN, int COLS> static struct tiling warp_tiling(void) {
    return tiling{warp_kernel<FMT, NT, WN, COLS>, BM, 8 * NT * WN, 128 * WN, (size_t)STAGES * NT * WN * 8 * 128};
}

static int64_t m_tiles_of_all(const struct products *p, int rows) {
    int64_t n = 0;
    for (int i = 0; i < p->n_target; i++) {
        n += m_tiles_of(p->target[i], rows);
    }
    return n;
}

/* The tiling that is done first: rounds over the SMs, times what a tile takes (its area, and the same again for every tile). */
template <int FMT, int COLS> static struct tiling choose(const ql_dev *dev, const struct products *p, int64_t cols) {
    if (cuda(dev)->cc != 90) {
        return cols <= 64 ? warp_tiling<FMT, 4, 1, COLS>() : warp_tiling<FMT, 8, 2, COLS>();
    }
    constexpr bool WIDE = !weights<FMT, 1>::PLAIN && FMT != QL_FORMAT_FP8_BLOCK; /* registers for 256 weight rows */
    const struct tiling some[] = {group_tiling<FMT, 1, 8, COLS>(),
                                  group_tiling<FMT, 1, 16, COLS>(),
                                  group_tiling < FMT,
                                  WIDE ? 2 : 1,
                                  16,
                                  COLS > ()};
    int best = 0;
    int64_t least = INT64_MAX;
    for (int i = 0; i < 3; i++) {
        int64_t tiles = ceil_div(cols, some[i].bn) * m_tiles_of_all(p, some[i].bm);
        int64_t cost = ceil_div(tiles, cuda(dev)->n_sm) * (some[i].bm * some[i].bn + 8192);
        if (cost <= least) {
            least = cost;
            best = i;
        }
    }
    return some[best];
}

template <int FMT, int COLS> static ql_status run(ql_dev *dev, const struct products *p, size_t stack_bytes) {
    int64_t cols = (int64_t)p->n_row * COLS;
    struct tiling t = choose<FMT, COLS>(dev, p, cols);
    int n_tiles = (int)ceil_div(cols, t.bn), n_col = (int)(ceil_div(cols, 256) * 256);
    int64_t m_tiles = m_tiles_of_all(p, t.bm), grid = m_tiles * n_tiles, most = cuda(dev)->n_sm;
    if (p->n_slice > 1) {
        int64_t room = (int64_t)(stack_bytes / (TREE_LEVELS * (size_t)t.bm * (size_t)t.bn * sizeof(float)));
        most = room < most ? room : most;
    }
    if (most < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes leaves no room for one block",
                       dev->scratch_bytes);
    }
    return launch(dev, "linear", t.kernel, (unsigned)(grid < most ? grid : most), (unsigned)t.threads, t.shared, *p,
                  (int)m_tiles, n_tiles, n_col);
}

ql_status ql_linear_prompt_cuda(ql_dev *dev, const struct products *p, ql_qformat format, size_t stack_bytes) {
    bool two = p->x_cols == 2;
    switch (format) {
    case QL_FORMAT_NVFP4:
        return two ? run<QL_FORMAT_NVFP4, 2>(dev, p, stack_bytes) : run<QL_FORMAT_NVFP4, 1>(dev, p, stack_bytes);
    case QL_FORMAT_FP8_BLOCK:
        return two ? run<QL_FORMAT_FP8_BLOCK, 2>(dev, p, stack_bytes)
                   : run<QL_FORMAT_FP8_BLOCK, 1>(dev, p, stack_bytes);
    case QL_FORMAT_F16: return run<QL_FORMAT_F16, 1>(dev, p, stack_bytes);
    case QL_FORMAT_BF16: return run<QL_FORMAT_BF16, 1>(dev, p, stack_bytes);
    default:
        return two ? run<QL_FORMAT_FP8_CHANNEL, 2>(dev, p, stack_bytes)
                   : run<QL_FORMAT_FP8_CHANNEL, 1>(dev, p, stack_bytes);
    }
}
