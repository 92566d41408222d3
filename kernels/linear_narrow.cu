/* linear for prompt rows whose weight has few rows in all, BF16: the gates of the recurrence, 2 x 48 rows of 5,120 columns. Tiles of
 * 128 weight rows would keep a tenth of the SMs busy with one long sum each, so here a block has 16 rows of x and up to 96
 * weight rows, and its eight warps an eighth of the columns each: mma.m16n8k16 with x, rounded to BF16 on the way, as A and the
 * weight rows as they lie in memory as B. In 32 columns, lane c of four has eight side by side of both; the order of columns
 * in an instruction does not matter as long as it is one. The warps' sums are added as the balanced tree.
 */
#include "kernels/cuda/prompt.cuh"

enum { X_ROWS = 16, W_TILE = 8, W_TILES = 12, SHARES = 8, STEP = 32 };

__global__ void __launch_bounds__(32 * SHARES, 1)
    narrow_kernel(const __grid_constant__ struct products p, const float *x, int64_t ldx) {
    __shared__ float part[SHARES][X_ROWS][W_TILES * W_TILE];
    after_previous();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    int row0 = blockIdx.x * X_ROWS, k0 = p.k / SHARES * warp + 8 * c;
    const float *xg = x + min(row0 + g, p.n_row - 1) * ldx + k0, *xg8 = x + min(row0 + g + 8, p.n_row - 1) * ldx + k0;
    const uint16_t *w[W_TILES];
#pragma unroll
    for (int t = 0; t < W_TILES; t++) {
        int tile = blockIdx.y * W_TILES + t;
        const struct target &to =
            target_of(p, W_TILE, &tile); /* a tile beyond the last is the last target's last row */
        w[t] = (const uint16_t *)to.w + (int64_t)min(tile * W_TILE + g, to.n - 1) * p.k + k0;
    }
    float acc[W_TILES][4] = {};
#pragma unroll 2
    for (int k = 0; k < p.k / SHARES; k += STEP) {
        float4 a = *(const float4 *)(xg + k), a_more = *(const float4 *)(xg + k + 4), b = *(const float4 *)(xg8 + k),
               b_more = *(const float4 *)(xg8 + k + 4);
        uint4 v[W_TILES];
#pragma unroll
        for (int t = 0; t < W_TILES; t++) {
            v[t] = *(const uint4 *)(w[t] + k);
        }
        uint32_t first[4] = {two_bf16(a.x, a.y), two_bf16(b.x, b.y), two_bf16(a.z, a.w), two_bf16(b.z, b.w)},
                 second[4] = {two_bf16(a_more.x, a_more.y), two_bf16(b_more.x, b_more.y), two_bf16(a_more.z, a_more.w),
                              two_bf16(b_more.z, b_more.w)};
#pragma unroll
        for (int t = 0; t < W_TILES; t++) {
            mma_bf16(acc[t], first, v[t].x, v[t].y);
            mma_bf16(acc[t], second, v[t].z, v[t].w);
        }
    }
#pragma unroll
    for (int t = 0; t < W_TILES; t++) {
        *(float2 *)&part[warp][g][t * W_TILE + 2 * c] = make_float2(acc[t][0], acc[t][1]);
        *(float2 *)&part[warp][g + 8][t * W_TILE + 2 * c] = make_float2(acc[t][2], acc[t][3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < X_ROWS * W_TILES * W_TILE; i += 32 * SHARES) {
        int row = i / (W_TILES * W_TILE), col = i % (W_TILES * W_TILE), tile = blockIdx.y * W_TILES + col / W_TILE;
        const struct target &to = target_of(p, W_TILE, &tile);
        int r = tile * W_TILE + col % W_TILE;
        if (row0 + row < p.n_row && r < to.n) {
            float v[MAX_SLICES];
#pragma unroll
            for (int s = 0; s < SHARES; s++) {
                v[s] = part[s][row][col];
            }
            to.y[(row0 + row) * to.ldy + r] = slice_tree(v, SHARES);
        }
    }
}

bool ql_linear_is_narrow(const ql_dev *dev, const ql_linear_args *a) {
    const ql_weight *w = a->w;
    return w->format == QL_FORMAT_BF16 && w->full_n > 0 && w->full_n <= NARROW_MOST && w->k == w->full_k &&
           a->n_slice == 1 && w->k % (SHARES * STEP) == 0 && a->ldx % 4 == 0 && (uintptr_t)a->x % 16 == 0 &&
           cuda(dev)->cc >= 80;
}

ql_status ql_linear_narrow_cuda(ql_dev *dev, const ql_linear_args *a, const struct products *p) {
    struct products here = *p;
    int64_t tiles = 0;
    here.n_row = a->n_row;
    for (int i = 0; i < p->n_target; i++) {
        tiles += m_tiles_of(p->target[i], W_TILE);
    }
    return launch(dev, "linear", narrow_kernel,
                  dim3((unsigned)ceil_div(a->n_row, X_ROWS), (unsigned)ceil_div(tiles, W_TILES)), 32 * SHARES, 0, here,
                  a->x, a->ldx);
}
