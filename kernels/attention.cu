/* attn_prep and attention on the device: contracts in attention.h. Generated rows are in attention_gen.cu, prompt rows in
 * attention_prompt.cu.
 */
#include "kernels/cuda/attention.cuh"

/* A warp a row and head: query heads, then key heads, then value heads. */
__global__ void __launch_bounds__(256)
    prep_kernel(ql_batch b, struct ql_attn_prep_args a, struct ql_kv_cache cache, int64_t n) {
    __shared__ float row[8][D];
    after_previous();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = a.n_head + 2 * cache.n_kv_head;
    int64_t item = blockIdx.x * 8ll + warp;
    if (item >= n) {
        return;
    }
    int t = (int)(item / heads), h = (int)(item % heads);
    bool is_q = h < a.n_head, is_v = h >= a.n_head + cache.n_kv_head;
    int kv = is_q ? 0 : (h - a.n_head) % cache.n_kv_head, pos = b.row_pos[t];
    const float *x = is_q ? a.qg + ((int64_t)t * a.n_head + h) * 2 * D
                          : (is_v ? a.v : a.k) + ((int64_t)t * cache.n_kv_head + kv) * D;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = x[lane + 32 * i];
    }
    if (!is_v) {
        const float *from = is_q ? a.q_norm : a.k_norm, *rope = a.rope + (int64_t)pos * a.rotary;
        float w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i] = from[lane + 32 * i];
        }
        norm_row(v, w, a.eps);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            row[warp][lane + 32 * i] = v[i];
        }
        __syncwarp();
        int half = a.rotary / 2;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int d = lane + 32 * i;
            if (d < half) {
                v[i] = rotate(v[i], -row[warp][d + half], rope[2 * d], rope[2 * d + 1]);
            } else if (d < a.rotary) {
                v[i] = rotate(v[i], row[warp][d - half], rope[2 * (d - half)], rope[2 * (d - half) + 1]);
            }
        }
    }
    if (is_q) {
        float *y = a.q + ((int64_t)t * a.n_head + h) * D;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            y[lane + 32 * i] = v[i];
        }
        return;
    }
    int page = b.page[(int64_t)b.row_seg[t] * b.max_page + pos / QL_PAGE];
    int64_t at = cache_row(page, cache.n_kv_head, kv, pos);
    void *to = is_v ? cache.v : cache.k, *scale = is_v ? cache.v_scale : cache.k_scale;
    switch (cache.type) {
    case QL_KV_F32: store_row<QL_KV_F32>(to, scale, at, v, lane); break;
    case QL_KV_F16: store_row<QL_KV_F16>(to, scale, at, v, lane); break;
    case QL_KV_BF16: store_row<QL_KV_BF16>(to, scale, at, v, lane); break;
    default: store_row<QL_KV_FP8>(to, scale, at, v, lane);
    }
}

ql_status ql_attn_prep_cuda(ql_dev *dev, const ql_attn_prep_args *a) {
    int64_t n = (int64_t)a->batch->n_row * (a->n_head + 2 * a->cache->n_kv_head);
    if (n == 0) {
        return QL_OK;
    }
    return launch(dev, "attn_prep", prep_kernel, (unsigned)ceil_div(n, 8), 256, 0, *a->batch, *a, *a->cache, n);
}

ql_status ql_attention_cuda(ql_dev *dev, const ql_attention_args *a) {
    if (a->batch->n_row == 0 || a->n_head == 0) {
        return QL_OK;
    }
    return a->batch->phase == QL_PHASE_PROMPT ? ql_attention_prompt_cuda(dev, a) : ql_attention_gen_cuda(dev, a, NULL);
}
