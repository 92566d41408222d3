/* linear for prompt rows on tensor cores: weights are decoded from their packed form into the A operand by the warp that
 * multiplies with them, rows of x come through shared memory as B.
 *
 *   block   128 weight rows x BN columns of x, BN = 128 or, for few rows, 32; a column's bits are the same in both
 *   step    64 columns of K: x by cp.async, STAGES deep; weights straight to registers, one step ahead
 *   slices  each canonical slice's sum is finished and scaled, then added as the tree; what waits in the tree lies in
 *           scratch, thread by thread, so that it costs no barrier
 *
 * Blocks are persistent: a block walks over tiles, neighbours share weight rows.
 */
#include "kernels/cuda/linear.cuh"

enum { BM = 128, BK = 64, STAGES = 4 };

__device__ __forceinline__ void copy_async16(void *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(global) : "memory");
#else
    *(uint4 *)shared = *(const uint4 *)global;
#endif
}

__device__ __forceinline__ void commit_async(void) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void wait_async(void) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

__device__ __forceinline__ void load_matrix4(uint32_t r[4], const void *shared) {
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s));
}

/* Weights of one warp's 32 rows for one step, as loaded. */
template <int FMT> struct weights {
    static constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, PLAIN = FMT == QL_FORMAT_F16 || FMT == QL_FORMAT_BF16;
    static constexpr int N = FP4 ? 1 : PLAIN ? 4 : 2; /* 16-byte words for 16 rows */
    uint4 v[2][N];
    uint32_t s[2];

    __device__ __forceinline__ void load(const struct product &p, int row0, int step, int lane) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (PLAIN) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int r = min(row0 + 16 * m + (lane >> 2) + 8 * h, p.n - 1);
                    const uint8_t *w = p.w + ((int64_t)r * p.k + step * BK + 8 * (lane & 3)) * 2;
                    v[m][h % N] = load_stream(w);
                    v[m][(2 + h) % N] = load_stream(w + 64);
                }
            } else {
                constexpr int PER_STEP = FP4 ? 1 : 2;
                int row_tile = min(row0 / TILE_ROWS + m, (p.n - 1) / TILE_ROWS);
                int64_t tile = (int64_t)row_tile * (p.k / BK * PER_STEP) + step * PER_STEP;
#pragma unroll
                for (int i = 0; i < PER_STEP; i++) {
                    v[m][i % N] = load_stream(p.w + (tile + i) * TILE_BYTES + lane * 16);
                }
                if (FP4) {
                    s[m] = load_stream_u16((const uint8_t *)p.scale + tile * TILE_SCALE_BYTES + lane * 2);
                }
            }
        }
    }

    /* A fragment of rows 16 m .. and K step j of 4. */
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

/* NT: column tiles of 8 of a warp. WN: warps side by side in the columns. */
template <int FMT, int NT, int WN, int COLS>
__global__ void __launch_bounds__(128 * WN, 1) prompt_kernel(struct product p, int m_tiles, int n_tiles) {
    constexpr int BN = 8 * NT * WN, THREADS = 128 * WN;
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    extern __shared__ __align__(128) uint8_t shared[]; /* [STAGES][BN][128 bytes], 16-byte chunks swizzled by column */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    int wm = warp & 3, wn = warp >> 2, n_col = p.n_row * COLS, steps = p.k / BK, slice_steps = p.ks / BK;
    float *stack = p.stack + (int64_t)blockIdx.x * (TREE_LEVELS * BM * BN) + threadIdx.x;
    int blocks = BLOCK ? (p.col_off + p.k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK : 0;

    for (int tile = blockIdx.x; tile < m_tiles * n_tiles; tile += gridDim.x) {
        int row0 = tile / n_tiles * BM + wm * 32, col0 = tile % n_tiles * BN;
        auto fetch = [&](int step) {
            uint8_t *to = shared + step % STAGES * (BN * 128);
            for (int i = threadIdx.x; i < BN * 8; i += THREADS) {
                int col = i >> 3, chunk = i & 7, from = min(col0 + col, n_col - 1);
                copy_async16(to + col * 128 + ((chunk ^ (col & 7)) << 4), p.xs + (int64_t)from * p.k + step * BK + chunk * 8);
            }
        };
        float acc[2][NT][4] = {}, total[BLOCK ? 2 : 1][BLOCK ? NT : 1][4] = {};
        const float *scale[2][2];
        if (BLOCK) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int r = min(row0 + 16 * m + g + 8 * h, p.n - 1);
                    scale[m][h] = (const float *)p.scale + (int64_t)((p.row_off + r) / QL_FP8_BLOCK) * blocks;
                }
            }
        }
        weights<FMT> now, next;
        now.load(p, row0, 0, lane);
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
                next.load(p, row0, step + 1, lane);
            }
            uint32_t sg[2] = {}, sg8[2] = {};
            if (FP4) {
                group_scales(now.s[0], &sg[0], &sg8[0]);
                group_scales(now.s[1], &sg[1], &sg8[1]);
            }
            const uint8_t *stage = shared + step % STAGES * (BN * 128);
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
                            mma_bf16(acc[m][n], a[m], b[n][0], b[n][1]);
                        } else {
                            mma_f16(acc[m][n], a[m], b[n][0], b[n][1]);
                        }
                    }
                }
            }
            now = next;
            left--;
            if (BLOCK) {
                int end = p.col_off / BK + step + 1;
                if (end % (QL_FP8_BLOCK / BK) == 0 || left == 0) {
                    int block = (end - 1) / (QL_FP8_BLOCK / BK);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        float f = scale[m][0][block], f8 = scale[m][1][block];
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            float *t = total[m % (BLOCK ? 2 : 1)][n % (BLOCK ? NT : 1)];
                            t[0] = fmaf(acc[m][n][0], f, t[0]);
                            t[1] = fmaf(acc[m][n][1], f, t[1]);
                            t[2] = fmaf(acc[m][n][2], f8, t[2]);
                            t[3] = fmaf(acc[m][n][3], f8, t[3]);
                            acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
                        }
                    }
                }
            }
            if (left > 0) {
                continue;
            }
            /* One slice is complete: scale it, add what the tree has waiting, and wait or write. */
            bool last = slice + 1 == p.n_slice;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                int r = row0 + 16 * m + g;
                float f = row_factor(p, min(r, p.n - 1)), f8 = row_factor(p, min(r + 8, p.n - 1));
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float *v = BLOCK ? total[m % (BLOCK ? 2 : 1)][n % (BLOCK ? NT : 1)] : acc[m][n];
                    int col = col0 + wn * 8 * NT + n * 8 + 2 * c;
#pragma unroll
                    for (int e = 0; e < 4; e += COLS) {
                        int t = (col + (e & 1)) / COLS;
                        float sum = COLS == 2 ? fmaf(v[(e + 1) & 3], 1.0f / 2048.0f, v[e]) : v[e];
                        if (p.xscale) {
                            sum *= p.xscale[min(t, p.n_row - 1) * p.n_slice + slice];
                        }
                        sum *= e < 2 ? f : f8;
                        int at = ((m * NT + n) * 4 + e) * THREADS, level = 0;
                        for (int b = slice; b & 1; b >>= 1, level++) {
                            sum = stack[level * (BM * BN) + at] + sum;
                        }
                        if (!last) {
                            stack[level * (BM * BN) + at] = sum;
                        } else if (t < p.n_row && r + (e < 2 ? 0 : 8) < p.n) {
                            p.y[t * p.ldy + r + (e < 2 ? 0 : 8)] = sum;
                        }
                    }
                    v[0] = v[1] = v[2] = v[3] = 0.0f;
                }
            }
            slice++;
            left = slice_steps;
        }
    }
}

template <int FMT, int NT, int WN, int COLS>
static ql_status launch(ql_dev *dev, const struct product *p, size_t stack_bytes) {
    constexpr int BN = 8 * NT * WN;
    int m_tiles = (int)ceil_div(p->n, BM), n_tiles = (int)ceil_div((int64_t)p->n_row * COLS, BN);
    int64_t grid = (int64_t)m_tiles * n_tiles, most = cuda(dev)->n_sm;
    if (p->n_slice > 1) {
        int64_t room = (int64_t)(stack_bytes / (TREE_LEVELS * BM * BN * sizeof(float)));
        most = room < most ? room : most;
    }
    if (most < 1) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes leaves no room for one block", dev->scratch_bytes);
    }
    size_t shared = (size_t)STAGES * BN * 128;
    CU_TRY(dev, cudaFuncSetAttribute(prompt_kernel<FMT, NT, WN, COLS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
           "linear");
    prompt_kernel<FMT, NT, WN, COLS><<<(unsigned)(grid < most ? grid : most), 128 * WN, shared, cuda(dev)->stream>>>(*p, m_tiles, n_tiles);
    return launched(dev, "linear");
}

template <int FMT, int COLS> static ql_status by_rows(ql_dev *dev, const struct product *p, size_t stack_bytes) {
    if ((int64_t)p->n_row * COLS <= 64) {
        return launch<FMT, 4, 1, COLS>(dev, p, stack_bytes);
    }
    return launch<FMT, 8, 2, COLS>(dev, p, stack_bytes);
}

template <int FMT> static ql_status by_cols(ql_dev *dev, const struct product *p, size_t stack_bytes) {
    return p->x_cols == 2 ? by_rows<FMT, 2>(dev, p, stack_bytes) : by_rows<FMT, 1>(dev, p, stack_bytes);
}

ql_status ql_linear_prompt_cuda(ql_dev *dev, const struct product *p, size_t stack_bytes) {
    switch (p->fmt) {
    case QL_FORMAT_NVFP4: return by_cols<QL_FORMAT_NVFP4>(dev, p, stack_bytes);
    case QL_FORMAT_FP8_BLOCK: return by_cols<QL_FORMAT_FP8_BLOCK>(dev, p, stack_bytes);
    case QL_FORMAT_F16: return by_rows<QL_FORMAT_F16, 1>(dev, p, stack_bytes);
    case QL_FORMAT_BF16: return by_rows<QL_FORMAT_BF16, 1>(dev, p, stack_bytes);
    default: return by_cols<QL_FORMAT_FP8_CHANNEL>(dev, p, stack_bytes);
    }
}
