/* The recurrence of a chain (chain.cu): a head and segment by a block. */
#ifndef QL_KERNELS_CUDA_CHAIN_RECUR_CUH
#define QL_KERNELS_CUDA_CHAIN_RECUR_CUH

#include "kernels/cuda/chain_dev.cuh"

#if HAVE_WGMMA
/* The rows of a segment and head, its state loaded ahead of the edge where there is one to wait for; z, unless the next product
 * multiplies with it, when what the state needs is computed, as z may come after that. After the block's last task it says that the
 * result is written; the state, which nobody waits for, is stored after that. MANY: the state of the block's next task is copied to
 * shared memory meanwhile. Sums in the order of gdn.cu's step_kernel and norm.cu's gated_norm. */
template <bool MANY>
__device__ __forceinline__ void recur(const struct run &r, struct shared *sh, const struct recurrence &g, int task,
                                      float *room, bool edge) {
    const ql_gdn_args &a = g.a;
    int s = task / a.n_value_head, j = task - s * a.n_value_head;
    float *q = room, *k = q + D, *norm = k + D, *z = norm + D, *part = z + D; /* part: [8][D] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int key = (a.value_head0 + j) / a.group - a.key_head0, width = (2 * a.n_key_head + a.n_value_head) * D;
    bool active = warp < 8, fresh = sh->seg_pos[s] == 0; /* a warp holds 16 rows of the state, a lane four columns */
    auto state_of = [&](int segment, int head) {
        return a.state + (((int64_t)sh->seg_slot[segment] * a.n_value_head + head) * D + warp * 16) * D + 4 * lane;
    };
    float *state = state_of(s, j), st[4][16];
    uint32_t staged = shared_address(part + 8 * D) + threadIdx.x * 16; /* a thread reads what it copied */
    constexpr int APART = 8 * 32 * 16;
    bool copied = MANY && task >= (int)gridDim.x;
    if (copied) {
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float4 v = !active || fresh ? make_float4(0, 0, 0, 0)
                   : copied         ? load_shared_f4(staged + i * APART)
                                    : load_fresh4(state + i * D);
        st[0][i] = v.x;
        st[1][i] = v.y;
        st[2][i] = v.z;
        st[3][i] = v.w;
    }
    bool gates = warp == 4; /* beside the warps that prepare q and k */
    float a_log = gates ? __ldg(a.a_log + j) : 0.0f, dt_bias = gates ? __ldg(a.dt_bias + j) : 0.0f;
    if (edge) {
        wait_before(r, sh, sh->at_op[0]);
    }
    int next = task + (int)gridDim.x;
    if (MANY && active && next < r.n_seg * a.n_value_head) {
        const float *from = state_of(next / a.n_value_head, next % a.n_value_head);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            copy_16(staged + i * APART, from + i * D);
        }
    }
    for (int row = sh->seg_row[s]; row < sh->seg_row[s + 1]; row++) {
        const float *u = a.u + (int64_t)row * width, *v = u + (2 * a.n_key_head + j) * D + 4 * lane;
        const float *x = warp == 2 ? g.norm : u + ((warp ? a.n_key_head : 0) + key) * D;
        float4 v4 = active ? load_fresh4(v) : make_float4(0, 0, 0, 0);
        float value[4] = {v4.x, v4.y, v4.z, v4.w}, h[4];
        float y = gates ? load_fresh(a.a + row * a.n_value_head + j) : 0.0f,
              b = gates ? load_fresh(a.b + row * a.n_value_head + j) : 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            h[c] = warp < 3 ? load_fresh(x + lane + 32 * c) : 0.0f;
        }
        sync_warps(); /* the last row's numbers have been read */
        if (warp < 3) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = fmaf(h[i], h[i], sum);
            }
            float scale = 1.0f / sqrtf(warp_sum(sum) + 1e-6f), factor = warp ? 1.0f : 0.08838834764831845f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                room[warp * D + lane + 32 * i] = warp == 2 ? h[i] : (h[i] * scale) * factor;
            }
        }
        if (gates) {
            y += dt_bias;
            sh->gate[0] = expf(-expf(a_log) * (y > 20.0f ? y : log1pf(expf(y))));
            sh->gate[1] = sigmoid(b);
        }
        sync_warps();
        float keep = sh->gate[0], beta = sh->gate[1], sum[4] = {}, out[4] = {};
        if (warp == 8 && g.z) { /* it has no part of the state */
            if (edge && lane == 0) {
                await_arrivals(&r.edges->count, sh->base + gridDim.x * sh->op[sh->at_op[8]].edges);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                z[lane + 32 * i] = silu(load_fresh(g.z + (row * a.n_value_head + j) * D + lane + 32 * i));
            }
        }
        if (active) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    st[c][i] *= keep;
                    sum[c] = fmaf(k[warp * 16 + i], st[c][i], sum[c]);
                }
            }
            *(float4 *)(part + warp * D + 4 * lane) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        sync_warps();
        if (active) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sum[c] = part[4 * lane + c];
#pragma unroll
                for (int i = 1; i < 8; i++) {
                    sum[c] += part[i * D + 4 * lane + c];
                }
                float d = beta * (value[c] - sum[c]);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    st[c][i] = fmaf(k[warp * 16 + i], d, st[c][i]);
                    out[c] = fmaf(q[warp * 16 + i], st[c][i], out[c]);
                }
            }
        }
        sync_warps();
        if (active) {
            *(float4 *)(part + warp * D + 4 * lane) = make_float4(out[0], out[1], out[2], out[3]);
        }
        sync_warps();
        if (warp == 0) {
            float squares = 0.0f;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                h[c] = part[lane + 32 * c];
#pragma unroll
                for (int i = 1; i < 8; i++) {
                    h[c] += part[i * D + lane + 32 * c];
                }
                squares = fmaf(h[c], h[c], squares);
            }
            float scale = 1.0f / sqrtf(warp_sum(squares) / 128.0f + g.eps);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = lane + 32 * i;
                float y = (h[i] * scale) * norm[at];
                g.y[(row * a.n_value_head + j) * D + at] = g.z ? y * z[at] : y;
            }
        }
    }
    if (warp == 0 && sh->at_task[0] + (int)gridDim.x >= r.n_seg * a.n_value_head) {
        __syncwarp();
        arrive(r, sh, sh->op[sh->at_op[0]]);
    }
    if (active) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            *(float4 *)(state + i * D) = make_float4(st[0][i], st[1][i], st[2][i], st[3][i]);
        }
    }
}
#endif

#endif
