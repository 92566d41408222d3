/* conv and gdn on the device: contracts in gdn.h. Generated rows take the recurrence here, a block for 32 value channels
 * of a head with its part of the state in registers; prompt rows go in chunks, gdn_prompt.cu.
 */
#include "kernels/cuda/gdn.cuh"

enum { COLS = 32, CONV_ROWS = 16 };

/* ---- conv -------------------------------------------------------------------------------------------------------- */

/* A thread a channel and piece of CONV_ROWS rows. Only a segment's first piece reads the tail, so it may also write it. */
__global__ void __launch_bounds__(128)
    conv_kernel(ql_batch b, const float *m, const float *w, float *tail, float *y, int n_ch) {
    after_previous();
    struct piece p;
    int c = blockIdx.x * 128 + threadIdx.x;
    if (!find_piece(b, blockIdx.y, CONV_ROWS, &p) || c >= n_ch) {
        return;
    }
    float w0 = w[4 * c], w1 = w[4 * c + 1], w2 = w[4 * c + 2], w3 = w[4 * c + 3];
    const float *in = m + (int64_t)p.row0 * n_ch + c;
    float *out = y + (int64_t)p.row0 * n_ch + c;
    float x0 = 0.0f, x1 = 0.0f, x2 = 0.0f;
    if (p.index > 0) {
        x0 = in[-3 * (int64_t)n_ch];
        x1 = in[-2 * (int64_t)n_ch];
        x2 = in[-(int64_t)n_ch];
    } else {
        float *t = tail + (int64_t)b.seg_slot[p.seg] * 3 * n_ch + c;
        if (b.seg_pos[p.seg] != 0) {
            x0 = t[0];
            x1 = t[n_ch];
            x2 = t[2 * (int64_t)n_ch];
        }
        int n = b.seg_row[p.seg + 1] - p.row0; /* rows of the segment */
        const float *last = in + (int64_t)n * n_ch;
        t[0] = n >= 3 ? last[-3 * (int64_t)n_ch] : n == 2 ? x2 : x1;
        t[n_ch] = n >= 2 ? last[-2 * (int64_t)n_ch] : x2;
        t[2 * (int64_t)n_ch] = last[-(int64_t)n_ch];
    }
    for (int i = 0; i < p.n; i++) {
        float x3 = in[(int64_t)i * n_ch];
        out[(int64_t)i * n_ch] = silu(fmaf(w3, x3, fmaf(w2, x2, fmaf(w1, x1, w0 * x0))));
        x0 = x1;
        x1 = x2;
        x2 = x3;
    }
}

ql_status ql_conv_cuda(ql_dev *dev, const ql_conv_args *a) {
    if (a->batch->n_row == 0 || a->channels == 0) {
        return QL_OK;
    }
    return launch(dev, "conv", conv_kernel,
                  dim3((unsigned)ceil_div(a->channels, 128), n_piece_slots(a->batch, CONV_ROWS)), 128, 0, *a->batch,
                  a->m, a->w, a->tail, a->y, a->channels);
}

/* ---- generated rows ---------------------------------------------------------------------------------------------- */

/* Block (column group, segment). Warp w holds rows 16 w .. 16 w + 15 of the state, lane l column 32 group + l. */
__global__ void __launch_bounds__(256) step_kernel(ql_batch b, struct heads h) {
    __shared__ float q[D], k[D], part[8][COLS];
    after_previous();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, s = blockIdx.y;
    int j = blockIdx.x / (D / COLS), col = blockIdx.x % (D / COLS) * COLS + lane;
    int row0 = b.seg_row[s], n = b.seg_row[s + 1] - row0;
    float *state = h.state + (((int64_t)b.seg_slot[s] * h.n_value + j) * D + warp * 16) * D + col;
    float st[16];
    bool fresh = b.seg_pos[s] == 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        st[i] = fresh ? 0.0f : state[i * D];
    }
    for (int64_t row = row0; row < row0 + n; row++) {
        __syncthreads(); /* q, k and part of the last row have been read */
        if (warp < 2) {
            const float *x = warp ? k_row(h, row, j) : q_row(h, row, j);
            float scale = l2_scale(x, lane), factor = warp ? 1.0f : Q_FACTOR;
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
                (warp ? k : q)[lane + 32 * i] = (x[lane + 32 * i] * scale) * factor;
            }
        }
        float keep = expf(g_of(h, row, j)), beta = beta_of(h, row, j), v = v_row(h, row, j)[col], sum = 0.0f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            st[i] *= keep;
            sum = fmaf(k[warp * 16 + i], st[i], sum);
        }
        part[warp][lane] = sum;
        __syncthreads();
        sum = part[0][lane];
#pragma unroll
        for (int i = 1; i < 8; i++) {
            sum += part[i][lane];
        }
        float u = beta * (v - sum), o = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            st[i] = fmaf(k[warp * 16 + i], u, st[i]);
            o = fmaf(q[warp * 16 + i], st[i], o);
        }
        __syncthreads();
        part[warp][lane] = o;
        __syncthreads();
        if (warp == 0) {
            o = part[0][lane];
#pragma unroll
            for (int i = 1; i < 8; i++) {
                o += part[i][lane];
            }
            h.o[(row * h.n_value + j) * D + col] = o;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        state[i * D] = st[i];
    }
}

ql_status ql_gdn_cuda(ql_dev *dev, const ql_gdn_args *a) {
    const ql_batch *b = a->batch;
    if (b->n_row == 0 || a->n_value_head == 0) {
        return QL_OK;
    }
    struct heads h = {a->u,           a->a,    a->b,          a->a_log,        a->dt_bias,
                      a->state,       a->o,    a->n_key_head, a->n_value_head, a->key_head0,
                      a->value_head0, a->group};
    /* Before compute capability 8.0 a block has too little shared memory for a chunk: the recurrence serves both phases. */
    if (b->phase == QL_PHASE_PROMPT && cuda(dev)->cc >= 80) {
        return ql_gdn_prompt_cuda(dev, *b, h);
    }
    return launch(dev, "gdn", step_kernel, dim3((unsigned)(a->n_value_head * (D / COLS)), (unsigned)b->n_seg), 256, 0,
                  *b, h);
}
