/* linear in precision Q8 for many rows: a block multiplies 128 rows of x by 64 weight rows in steps of 32 columns.
 *
 * A step's x codes serve 64 weight rows, its weights, unpacked once, 128 rows of x. One step is one block of the activations
 * and two groups of the weights: eight warps of 32 x 32 results take two integer matrix instructions a tile, one for each
 * group, multiply each sum by its group scale, add the two and add them times the block's scale to the result. What the
 * kernel is made of is these four operations a result and step; the matrix instructions are a quarter of their time or less.
 *
 * Rows beyond the last repeat it and are not written. The next step's bytes come through registers while this one is computed:
 * one barrier a step. Blocks are persistent only so far as the tree's stacks, which lie in scratch thread by thread, limit them.
 */
#include "kernels/cuda/q8.cuh"

enum { THREADS = 256, STEP = 32, PER_THREAD = WIDE_X * WIDE_W / THREADS };

struct wide_stage {
    uint8_t x[WIDE_X * STEP],
        w[WIDE_W * STEP]; /* rows of 32 bytes, the two halves changed about in every other four rows */
    float4 scale[WIDE_W]; /* of both groups, then what removes the bias */
    float d[WIDE_X];
};

/* A step's share of this thread on its way to shared memory. */
struct wide_load {
    uint4 x;
    uint32_t w, s;
    float d;
};

__device__ __forceinline__ int half_at(int row, int half) { return row * STEP + ((half ^ (row >> 2 & 1)) << 4); }

__global__ void __launch_bounds__(THREADS, 2) wide_kernel(struct q8_products p, int w_tiles, int x_tiles) {
    __shared__ __align__(128) struct wide_stage stages[2];
    after_previous();
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
    int x_warp = (warp & 3) * 32, w_warp = (warp >> 2) * 32;
    float4 *stack = (float4 *)(p.stack + (int64_t)blockIdx.x * WIDE_STACK) + tid;

    for (int tile = blockIdx.x; tile < w_tiles * x_tiles; tile += gridDim.x) {
        int unit = tile / x_tiles, t0 = tile % x_tiles * WIDE_X;
        const struct q8_target &t = q8_target_of(p, WIDE_W, &unit);
        int r0 = unit * WIDE_W;
        const int8_t *x = p.x + (int64_t)min(t0 + (tid >> 1), p.n_row - 1) * p.k + (tid & 1) * 16;
        const float *d = p.d + (int64_t)min(t0 + (tid & (WIDE_X - 1)), p.n_row - 1) * p.n_slice * p.blocks;
        const uint8_t *w = t.w + min(r0 + (tid >> 2), t.n - 1) * p.row_bytes;
        int steps = p.n_slice * p.blocks;

        auto load = [&](struct wide_load &l, int step) {
            l.x = *(const uint4 *)(x + step * STEP);
            l.d = d[step];
            const uint8_t *half = w + (step >> 1) * QL_Q8_RECORD_BYTES;
            l.w = __ldg((const uint32_t *)(half + 4 + (step & 1) * 16) + (tid & 3));
            l.s = __ldg(half + (step & 1) * 2 + (tid & 1));
        };
        auto place = [&](struct wide_stage &to, const struct wide_load &l) {
            *(uint4 *)(to.x + half_at(tid >> 1, tid & 1)) = l.x;
            *(uint2 *)(to.w + half_at(tid >> 2, tid >> 1 & 1) + (tid & 1) * 8) =
                make_uint2(q8_decode4(l.w), q8_decode4(l.w >> 16));
            if ((tid & 3) < 2) {
                float s = q8_scale(l.s), *scale = (float *)&to.scale[tid >> 2] + (tid & 1);
                scale[0] = s;
                scale[2] = q8_unbias(s);
            }
            if (tid < WIDE_X) {
                to.d[tid] = l.d;
            }
        };
        float acc[2][4][4] = {}; /* 16 rows of x, 8 weight rows; as of m16n8k16 */
        auto compute = [&](const struct wide_stage &from) {
            uint32_t a[2][4], b[2][4];
            float dx[2][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = x_warp + i * 16 + (lane & 15);
                load_matrix4(a[i], from.x + half_at(row, lane >> 4));
                row = w_warp + i * 16 + (lane & 7) + (lane >> 4) * 8;
                load_matrix4(b[i], from.w + half_at(row, lane >> 3 & 1));
                dx[i][0] = from.d[x_warp + i * 16 + g];
                dx[i][1] = from.d[x_warp + i * 16 + g + 8];
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float4 s[2] = {from.scale[w_warp + n * 8 + 2 * c], from.scale[w_warp + n * 8 + 2 * c + 1]};
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    int lo[4], hi[4];
                    mma_s8(lo, a[m][0], a[m][1], b[n >> 1][(n & 1) * 2]);
                    mma_s8(hi, a[m][2], a[m][3], b[n >> 1][(n & 1) * 2 + 1]);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float4 f = s[e & 1];
                        float both = fmaf(__int_as_float(lo[e]), f.x, f.z) + fmaf(__int_as_float(hi[e]), f.y, f.w);
                        acc[m][n][e] = fmaf(both, dx[m][e >> 1], acc[m][n][e]);
                    }
                }
            }
        };
        struct wide_load next;
        load(next, 0);
        __syncthreads(); /* the last tile's stages are read */
        place(stages[0], next);
        __syncthreads();
        int slice = 0, left = p.blocks;
        for (int step = 0; step < steps; step++) {
            bool more = step + 1 < steps;
            if (more) {
                load(next, step + 1);
            }
            compute(stages[step & 1]);
            if (more) {
                place(stages[step + 1 & 1], next);
            }
            __syncthreads();
            if (--left > 0) {
                continue;
            }
            left = p.blocks;
            float *v = &acc[0][0][0];
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                v[i] *= t.factor;
            }
            float4 *wait = stack;
            for (int b = slice; b & 1; b >>= 1, wait += WIDE_X * WIDE_W / 4) {
#pragma unroll
                for (int i = 0; i < PER_THREAD / 4; i++) {
                    float4 u = wait[i * THREADS];
                    v[4 * i] = u.x + v[4 * i];
                    v[4 * i + 1] = u.y + v[4 * i + 1];
                    v[4 * i + 2] = u.z + v[4 * i + 2];
                    v[4 * i + 3] = u.w + v[4 * i + 3];
                }
            }
            if (++slice == p.n_slice) {
                break;
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD / 4; i++) {
                wait[i * THREADS] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
                v[4 * i] = v[4 * i + 1] = v[4 * i + 2] = v[4 * i + 3] = 0.0f;
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int row = t0 + x_warp + m * 16 + g + (e >> 1) * 8, out = r0 + w_warp + n * 8 + 2 * c + (e & 1);
                    if (row < p.n_row && out < t.n) {
                        t.y[row * t.ldy + out] = acc[m][n][e];
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
