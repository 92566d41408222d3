/* linear in precision Q8 for many rows: a block multiplies 128 rows of x by 64 weight rows in steps of 32 columns.
 *
 * A step is one block of the activations and two groups of the weights. Its x codes serve 64 weight rows; its weights, unpacked
 * once, serve 128 rows of x. Four warps of 64 x 32 results: a tile takes two integer matrix instructions, one for each group;
 * each sum is multiplied by its group scale, the two are added, and their sum times the block's scale is added to the result.
 * These four operations a result and step are what the kernel's time is made of, the matrix instructions run beside them.
 *
 * Two steps, the columns of a record, are brought at a time: through registers, while the two before are computed, with one
 * barrier. Rows beyond the last repeat it and are not written. Blocks are persistent only so far as the tree's stacks, which
 * lie in scratch thread by thread, limit them.
 */
#include "kernels/cuda/q8.cuh"

enum {
    THREADS = 128,
    STEP = QL_Q8_BLOCK,
    STAGE = QL_Q8_RECORD, /* columns of a stage: bytes of its rows */
    WARP_X = 64,
    WARP_W = 32,
    PER_THREAD = WIDE_X * WIDE_W / THREADS,
    X_LOADS = WIDE_X * STAGE / 16 / THREADS,
    W_LOADS = WIDE_W * STAGE / 8 / THREADS
};

struct wide_stage {
    uint8_t x[WIDE_X * STAGE], w[WIDE_W * STAGE];
    float4 scale[2][WIDE_W]; /* of a step: both groups, then what removes the bias */
    float d[2][WIDE_X];
};

/* 16 bytes of a row: chunks change places so that eight rows of one chunk lie in different banks. */
__device__ __forceinline__ int chunk_at(int row, int chunk) { return row * STAGE + ((chunk ^ (row >> 1 & 3)) << 4); }

/* A stage's share of this thread on its way to shared memory. */
struct wide_load {
    uint4 x[X_LOADS];
    uint32_t w[W_LOADS], s;
    float d[2];
};

/* Where a thread's share comes from, for the stage at hand. */
struct wide_source {
    const int8_t *x[X_LOADS];
    const uint8_t *w[W_LOADS], *s;
    const float *d; /* of its row of x, n_row floats from block to block */
};

__device__ __forceinline__ void load_stage(struct wide_load &l, const struct wide_source &from, int64_t d_next) {
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        l.x[i] = *(const uint4 *)from.x[i];
    }
#pragma unroll
    for (int i = 0; i < W_LOADS; i++) {
        l.w[i] = __ldg((const uint32_t *)from.w[i]);
    }
    l.s = __ldg((const uint32_t *)from.s);
    l.d[0] = from.d[0];
    l.d[1] = from.d[d_next];
}

__device__ __forceinline__ void place_stage(struct wide_stage &to, const struct wide_load &l, int tid) {
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        *(uint4 *)(to.x + chunk_at((tid >> 2) + 32 * i, tid & 3)) = l.x[i];
    }
#pragma unroll
    for (int i = 0; i < W_LOADS; i++) {
        *(uint2 *)(to.w + chunk_at((tid >> 3) + 16 * i, tid >> 1 & 3) + (tid & 1) * 8) =
            make_uint2(q8_decode4(l.w[i]), q8_decode4(l.w[i] >> 16));
    }
    if (tid < WIDE_W) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float s0 = q8_scale(l.s >> 16 * i & 255), s1 = q8_scale(l.s >> (16 * i + 8) & 255);
            to.scale[i][tid] = make_float4(s0, s1, q8_unbias(s0), q8_unbias(s1));
        }
    }
    to.d[0][tid] = l.d[0];
    to.d[1][tid] = l.d[1];
}

/* Results of a warp: m 16 rows of x, n 8 weight rows, as of m16n8k16. */
typedef float wide_sums[WARP_X / 16][WARP_W / 8][4];

/* Step `half` of a stage. */
__device__ __forceinline__ void compute_step(wide_sums acc, const struct wide_stage &from, int half, int x_warp,
                                             int w_warp, int lane) {
    int g = lane >> 2, c = lane & 3;
    uint32_t a[WARP_X / 16][4], b[WARP_W / 16][4];
    float d[WARP_X / 16][2];
#pragma unroll
    for (int m = 0; m < WARP_X / 16; m++) {
        load_matrix4(a[m], from.x + chunk_at(x_warp + m * 16 + (lane & 15), 2 * half + (lane >> 4)));
        d[m][0] = from.d[half][x_warp + m * 16 + g];
        d[m][1] = from.d[half][x_warp + m * 16 + g + 8];
    }
#pragma unroll
    for (int n = 0; n < WARP_W / 16; n++) {
        int row = w_warp + n * 16 + (lane & 7) + (lane >> 4) * 8;
        load_matrix4(b[n], from.w + chunk_at(row, 2 * half + (lane >> 3 & 1)));
    }
#pragma unroll
    for (int n = 0; n < WARP_W / 8; n++) {
        const float4 *s = &from.scale[half][w_warp + n * 8 + 2 * c], s0 = s[0], s1 = s[1];
#pragma unroll
        for (int m = 0; m < WARP_X / 16; m++) {
            int lo[4], hi[4];
            mma_s8(lo, a[m][0], a[m][1], b[n >> 1][(n & 1) * 2]);
            mma_s8(hi, a[m][2], a[m][3], b[n >> 1][(n & 1) * 2 + 1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float4 f = e & 1 ? s1 : s0;
                float both = fmaf(__int_as_float(lo[e]), f.x, f.z) + fmaf(__int_as_float(hi[e]), f.y, f.w);
                acc[m][n][e] = fmaf(both, d[m][e >> 1], acc[m][n][e]);
            }
        }
    }
}

/* The sum of slice `slice` is complete: scaled, it takes what waits for it in the tree, and waits itself unless it is the last. */
__device__ __forceinline__ void end_slice(wide_sums acc, float factor, int slice, bool last, float4 *stack) {
    float *v = &acc[0][0][0];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        v[i] *= factor;
    }
    for (int b = slice; b & 1; b >>= 1, stack += WIDE_X * WIDE_W / 4) {
#pragma unroll
        for (int i = 0; i < PER_THREAD / 4; i++) {
            float4 u = stack[i * THREADS];
            v[4 * i] = u.x + v[4 * i];
            v[4 * i + 1] = u.y + v[4 * i + 1];
            v[4 * i + 2] = u.z + v[4 * i + 2];
            v[4 * i + 3] = u.w + v[4 * i + 3];
        }
    }
    if (last) {
        return;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD / 4; i++) {
        stack[i * THREADS] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        v[4 * i] = v[4 * i + 1] = v[4 * i + 2] = v[4 * i + 3] = 0.0f;
    }
}

__global__ void __launch_bounds__(THREADS, 2) wide_kernel(struct q8_products p, int w_tiles, int x_tiles) {
    __shared__ __align__(128) struct wide_stage stages[2];
    after_previous();
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    int x_warp = (warp & 1) * WARP_X, w_warp = (warp >> 1) * WARP_W;
    float4 *stack = (float4 *)(p.stack + (int64_t)blockIdx.x * WIDE_STACK) + tid;
    int steps = p.n_slice * p.blocks;

    for (int tile = blockIdx.x; tile < w_tiles * x_tiles; tile += gridDim.x) {
        int unit = tile / x_tiles, t0 = tile % x_tiles * WIDE_X;
        const struct q8_target &t = q8_target_of(p, WIDE_W, &unit);
        int r0 = unit * WIDE_W;
        struct wide_source from;
#pragma unroll
        for (int i = 0; i < X_LOADS; i++) {
            from.x[i] = p.x + (int64_t)min(t0 + (tid >> 2) + 32 * i, p.n_row - 1) * p.k + (tid & 3) * 16;
        }
#pragma unroll
        for (int i = 0; i < W_LOADS; i++) {
            from.w[i] = t.w + min(r0 + (tid >> 3) + 16 * i, t.n - 1) * p.row_bytes + 4 + (tid & 7) * 4;
        }
        from.s = t.w + min(r0 + tid % WIDE_W, t.n - 1) * p.row_bytes;
        from.d = p.d + min(t0 + tid, p.n_row - 1);

        wide_sums acc = {};
        struct wide_load next;
        load_stage(next, from, steps > 1 ? p.n_row : 0);
        __syncthreads(); /* the last tile's stages are read */
        place_stage(stages[0], next, tid);
        __syncthreads();
        int slice = 0, left = p.blocks, now = 0;
        for (int step = 0; step < steps; step += 2, now ^= 1) {
            bool more = step + 2 < steps;
            if (more) {
#pragma unroll
                for (int i = 0; i < X_LOADS; i++) {
                    from.x[i] += STAGE;
                }
#pragma unroll
                for (int i = 0; i < W_LOADS; i++) {
                    from.w[i] += QL_Q8_RECORD_BYTES;
                }
                from.s += QL_Q8_RECORD_BYTES;
                from.d += 2 * (int64_t)p.n_row;
                load_stage(next, from, step + 3 < steps ? p.n_row : 0);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (step + half < steps) { /* k may end with half a record */
                    compute_step(acc, stages[now], half, x_warp, w_warp, lane);
                    if (--left == 0) {
                        end_slice(acc, t.factor, slice, slice + 1 == p.n_slice, stack);
                        slice++;
                        left = p.blocks;
                    }
                }
            }
            if (more) {
                place_stage(stages[now ^ 1], next, tid);
            }
            __syncthreads();
        }
#pragma unroll
        for (int m = 0; m < WARP_X / 16; m++) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                int row = t0 + x_warp + m * 16 + (lane >> 2) + (e >> 1) * 8, r = r0 + w_warp + 2 * (lane & 3);
                float *y = t.y + row * t.ldy + r;
#pragma unroll
                for (int n = 0; n < WARP_W / 8 && row < p.n_row; n++) {
                    if (r + n * 8 < t.n) {
                        y[n * 8] = acc[m][n][e];
                    }
                    if (r + n * 8 + 1 < t.n) {
                        y[n * 8 + 1] = acc[m][n][e + 1];
                    }
                }
            }
        }
    }
}

ql_status ql_linear_q8_wide_cuda(ql_dev *dev, const struct q8_products *p, int64_t room) {
    int64_t w_tiles = 0, x_tiles = ceil_div(p->n_row, WIDE_X);
    for (int i = 0; i < p->n_target; i++) {
        w_tiles += ceil_div(p->target[i].n, WIDE_W);
    }
    int64_t grid = w_tiles * x_tiles;
    grid = p->n_slice > 1 && room < grid ? room : grid;
    return launch(dev, "linear", wide_kernel, (unsigned)grid, THREADS, 0, *p, (int)w_tiles, (int)x_tiles);
}
