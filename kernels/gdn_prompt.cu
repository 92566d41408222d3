/* gdn of prompt rows: contract in gdn.h.
 *
 * Two kernels. `chunk` works on every 64-token chunk and head at once: gates, A, and the triangular solve for U and W, one
 * right-hand side a thread. `scan` then carries the state through a segment's chunks; value channels do not meet in it, so
 * a head is split over four blocks. All in f32 FMA.
 */
#include "kernels/cuda/gdn.cuh"

enum { COLS = 32 };

/* What `chunk` leaves for `scan`, one a chunk and head. */
struct chunk_out {
    float u[CHUNK][D], w[CHUNK][D];
    float p[CHUNK][CHUNK];      /* q_i . k_j exp(G_i - G_j), j <= i, else 0 */
    float fq[CHUNK], fk[CHUNK]; /* what raw q_i and k_i are multiplied with in scan */
    float keep, pad[63];        /* exp(G_last) */
};

enum { LD = D + 4, LA = CHUNK + 4 }; /* shared row strides: 16-byte aligned, banks shifted by 4 a row */

struct chunk_shared {
    float k[CHUNK][LD], q[CHUNK][LD];
    float at[CHUNK][LA]; /* A transposed */
    float kn[CHUNK], qn[CHUNK], beta[CHUNK], g[CHUNK];
    double sum[CHUNK]; /* G */
};

__global__ void __launch_bounds__(256) chunk_kernel(ql_batch b, struct heads h, struct chunk_out *out) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct chunk_shared &x = *(struct chunk_shared *)raw;
    after_previous();
    struct piece p;
    int j = blockIdx.x, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    if (!find_piece(b, blockIdx.y, CHUNK, &p)) {
        return;
    }
    struct chunk_out *o = out + (int64_t)blockIdx.y * h.n_value + j;

    /* q and k normalised; missing rows are zero */
    for (int i = warp; i < CHUNK; i += 8) {
        bool real = i < p.n;
        const float *q = q_row(h, p.row0 + (real ? i : 0), j), *k = k_row(h, p.row0 + (real ? i : 0), j);
        float qs = real ? l2_scale(q, lane) : 0.0f, ks = real ? l2_scale(k, lane) : 0.0f;
#pragma unroll
        for (int e = lane; e < D; e += 32) {
            x.q[i][e] = real ? (q[e] * qs) * Q_FACTOR : 0.0f;
            x.k[i][e] = real ? k[e] * ks : 0.0f;
        }
        if (lane == 0) {
            x.qn[i] = qs * Q_FACTOR;
            x.kn[i] = ks;
            x.beta[i] = real ? beta_of(h, p.row0 + i, j) : 0.0f;
            x.g[i] = real ? g_of(h, p.row0 + i, j) : 0.0f;
        }
    }
    __syncthreads();
    if (tid < CHUNK) {
        double sum = 0.0;
        for (int i = 0; i <= tid; i++) {
            sum += (double)x.g[i];
        }
        x.sum[tid] = sum;
    }
    __syncthreads();
    if (tid < CHUNK) {
        o->fq[tid] = x.qn[tid] * expf((float)x.sum[tid]);
        o->fk[tid] = x.kn[tid] * expf((float)(x.sum[CHUNK - 1] - x.sum[tid]));
        if (tid == 0) {
            o->keep = expf((float)x.sum[CHUNK - 1]);
        }
    }

    /* k k^T and q k^T: rows ty + 16 r, columns tx + 16 c */
    int ty = tid >> 4, tx = tid & 15;
    float kk[4][4] = {}, qk[4][4] = {};
    for (int e = 0; e < D; e += 4) {
        float4 kc[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            kc[c] = *(const float4 *)&x.k[tx + 16 * c][e];
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float4 kr = *(const float4 *)&x.k[ty + 16 * r][e], qr = *(const float4 *)&x.q[ty + 16 * r][e];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                kk[r][c] = fmaf(kr.w, kc[c].w, fmaf(kr.z, kc[c].z, fmaf(kr.y, kc[c].y, fmaf(kr.x, kc[c].x, kk[r][c]))));
                qk[r][c] = fmaf(qr.w, kc[c].w, fmaf(qr.z, kc[c].z, fmaf(qr.y, kc[c].y, fmaf(qr.x, kc[c].x, qk[r][c]))));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int i = ty + 16 * r, n = tx + 16 * c;
            float decay = n <= i ? expf((float)(x.sum[i] - x.sum[n])) : 0.0f;
            x.at[n][i] = n < i ? (x.beta[i] * kk[r][c]) * decay : 0.0f;
            o->p[i][n] = n <= i ? qk[r][c] * decay : 0.0f;
        }
    }
    __syncthreads();

    /* (I + A) [U W] = [beta v, beta exp(G) k]: a thread a column; every solved row is taken from those below */
    int col = tid & (D - 1);
    bool is_w = tid >= D;
    float r[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (is_w) {
            r[i] = (x.beta[i] * expf((float)x.sum[i])) * x.k[i][col];
        } else {
            r[i] = i < p.n ? x.beta[i] * v_row(h, p.row0 + i, j)[col] : 0.0f;
        }
    }
#pragma unroll
    for (int n = 0; n < CHUNK; n++) {
        (is_w ? o->w : o->u)[n][col] = r[n];
#pragma unroll
        for (int i = n & ~3; i < CHUNK; i += 4) {
            float4 a = *(const float4 *)&x.at[n][i]; /* zero for rows that are solved */
            r[i] = fmaf(-a.x, r[n], r[i]);
            r[i + 1] = fmaf(-a.y, r[n], r[i + 1]);
            r[i + 2] = fmaf(-a.z, r[n], r[i + 2]);
            r[i + 3] = fmaf(-a.w, r[n], r[i + 3]);
        }
    }
}

struct scan_shared {
    float x[CHUNK][LD]; /* w, then q, then k of the chunk */
    float p[CHUNK][LA];
    float s[D][COLS]; /* state */
    float vn[CHUNK][COLS];
};

/* acc[r][c] += sum_e x[row + r][e] y[e][4 cx + c]: rows row, row + 1 */
template <int N, int LDX>
__device__ __forceinline__ void times(const float *x, const float (*y)[COLS], int cx, float acc[2][4]) {
#pragma unroll 4
    for (int e = 0; e < N; e += 4) {
        float4 a = *(const float4 *)(x + e), b = *(const float4 *)(x + LDX + e);
        const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 v = *(const float4 *)&y[e + i][4 * cx];
            acc[0][0] = fmaf(av[i], v.x, acc[0][0]);
            acc[0][1] = fmaf(av[i], v.y, acc[0][1]);
            acc[0][2] = fmaf(av[i], v.z, acc[0][2]);
            acc[0][3] = fmaf(av[i], v.w, acc[0][3]);
            acc[1][0] = fmaf(bv[i], v.x, acc[1][0]);
            acc[1][1] = fmaf(bv[i], v.y, acc[1][1]);
            acc[1][2] = fmaf(bv[i], v.z, acc[1][2]);
            acc[1][3] = fmaf(bv[i], v.w, acc[1][3]);
        }
    }
}

/* Block (head and column group, segment). Thread (ry, cx): chunk rows 2 ry, 2 ry + 1, and state rows 4 ry .. 4 ry + 3;
 * columns 4 cx .. 4 cx + 3 of the group. */
__global__ void __launch_bounds__(256, 2) scan_kernel(ql_batch b, struct heads h, const struct chunk_out *in) {
    extern __shared__ __align__(16) unsigned char raw[];
    struct scan_shared &x = *(struct scan_shared *)raw;
    after_previous();
    int tid = threadIdx.x, ry = tid >> 3, cx = tid & 7, s = blockIdx.y;
    int j = blockIdx.x / (D / COLS), col0 = blockIdx.x % (D / COLS) * COLS;
    int slot = 0;
    for (int i = 0; i < s; i++) {
        slot += (b.seg_row[i + 1] - b.seg_row[i] + CHUNK - 1) / CHUNK;
    }
    int row0 = b.seg_row[s], n_row = b.seg_row[s + 1] - row0;
    float *state = h.state + ((int64_t)b.seg_slot[s] * h.n_value + j) * D * D + col0;
    float st[4][4];
    bool fresh = b.seg_pos[s] == 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 v = fresh ? make_float4(0, 0, 0, 0) : *(const float4 *)(state + (int64_t)(4 * ry + i) * D + 4 * cx);
        st[i][0] = v.x;
        st[i][1] = v.y;
        st[i][2] = v.z;
        st[i][3] = v.w;
        *(float4 *)&x.s[4 * ry + i][4 * cx] = v;
    }
    for (int t = 0; t < n_row; t += CHUNK, slot++) {
        const struct chunk_out *c = in + (int64_t)slot * h.n_value + j;
        int n = min(CHUNK, n_row - t);
        for (int i = tid; i < CHUNK * D / 4; i += 256) {
            *(float4 *)&x.x[i / (D / 4)][i % (D / 4) * 4] = *(const float4 *)&c->w[i / (D / 4)][i % (D / 4) * 4];
        }
        for (int i = tid; i < CHUNK * CHUNK / 4; i += 256) {
            *(float4 *)&x.p[i / (CHUNK / 4)][i % (CHUNK / 4) * 4] =
                *(const float4 *)&c->p[i / (CHUNK / 4)][i % (CHUNK / 4) * 4];
        }
        __syncthreads();
        float vn[2][4] = {};
        times<D, LD>(x.x[2 * ry], x.s, cx, vn);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float4 u = *(const float4 *)&c->u[2 * ry + r][col0 + 4 * cx];
            *(float4 *)&x.vn[2 * ry + r][4 * cx] =
                make_float4(u.x - vn[r][0], u.y - vn[r][1], u.z - vn[r][2], u.w - vn[r][3]);
        }
        __syncthreads();
        for (int i = tid; i < CHUNK * D / 4; i += 256) {
            int r = i / (D / 4), e = i % (D / 4) * 4;
            float f = c->fq[r];
            float4 v = r < n ? *(const float4 *)(q_row(h, row0 + t + r, j) + e) : make_float4(0, 0, 0, 0);
            *(float4 *)&x.x[r][e] = make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
        }
        __syncthreads();
        float o[2][4] = {};
        times<D, LD>(x.x[2 * ry], x.s, cx, o);
        times<CHUNK, LA>(x.p[2 * ry], x.vn, cx, o);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (2 * ry + r < n) {
                *(float4 *)(h.o + ((int64_t)(row0 + t + 2 * ry + r) * h.n_value + j) * D + col0 + 4 * cx) =
                    make_float4(o[r][0], o[r][1], o[r][2], o[r][3]);
            }
        }
        __syncthreads();
        for (int i = tid; i < CHUNK * D / 4; i += 256) {
            int r = i / (D / 4), e = i % (D / 4) * 4;
            float f = c->fk[r];
            float4 v = r < n ? *(const float4 *)(k_row(h, row0 + t + r, j) + e) : make_float4(0, 0, 0, 0);
            *(float4 *)&x.x[r][e] = make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
        }
        float keep = c->keep;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                st[i][e] *= keep;
            }
        }
#pragma unroll 4
        for (int i = 0; i < CHUNK; i++) {
            float4 k = *(const float4 *)&x.x[i][4 * ry], v = *(const float4 *)&x.vn[i][4 * cx];
            const float kv[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
            for (int r = 0; r < 4; r++) {
                st[r][0] = fmaf(kv[r], v.x, st[r][0]);
                st[r][1] = fmaf(kv[r], v.y, st[r][1]);
                st[r][2] = fmaf(kv[r], v.z, st[r][2]);
                st[r][3] = fmaf(kv[r], v.w, st[r][3]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            *(float4 *)&x.s[4 * ry + i][4 * cx] = make_float4(st[i][0], st[i][1], st[i][2], st[i][3]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(float4 *)(state + (int64_t)(4 * ry + i) * D + 4 * cx) = make_float4(st[i][0], st[i][1], st[i][2], st[i][3]);
    }
}

size_t ql_gdn_cuda_scratch(const ql_shape *shape) {
    return (size_t)(shape->max_row / CHUNK + shape->max_seg) * (size_t)shape->n_value_head * sizeof(struct chunk_out);
}

ql_status ql_gdn_prompt_cuda(ql_dev *dev, const ql_batch &b, const struct heads &h) {
    unsigned slots = n_piece_slots(&b, CHUNK);
    size_t need = (size_t)slots * (size_t)h.n_value * sizeof(struct chunk_out);
    if (need > dev->scratch_bytes) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "gdn: scratch is %zu bytes, %d rows need %zu", dev->scratch_bytes,
                       b.n_row, need);
    }
    struct chunk_out *mid = (struct chunk_out *)dev->scratch;
    QL_TRY(launch(dev, "gdn chunks", chunk_kernel, dim3((unsigned)h.n_value, slots), 256, sizeof(struct chunk_shared),
                  b, h, mid));
    return launch(dev, "gdn", scan_kernel, dim3((unsigned)(h.n_value * (D / COLS)), (unsigned)b.n_seg), 256,
                  sizeof(struct scan_shared), b, h, (const struct chunk_out *)mid);
}
