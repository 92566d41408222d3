/* The recurrence of a chain (chain.cu): a head and segment by a block. */
#ifndef QL_KERNELS_CUDA_CHAIN_RECUR_CUH
#define QL_KERNELS_CUDA_CHAIN_RECUR_CUH

#include "kernels/cuda/chain_dev.cuh"

#if HAVE_WGMMA
/* The rows of a segment and head, its state loaded ahead of the edge where there is one to wait for; z, unless the next product
 * multiplies with it, as the last of all, as it may come after that. Eight warps have the state, 16 rows each, a lane four columns;
 * others meanwhile prepare the next row, and finish the last one. After the block's last task the one that finishes says that the
 * result is written; the state, which nobody waits for, is stored after that. The state of the block's next task is copied to shared
 * memory meanwhile, if there is one. Sums in the order of gdn.cu's step_kernel and norm.cu's gated_norm. */
template <int R>
__device__ __forceinline__ void recur(const struct run &r, struct shared *sh, const struct recurrence &g, int task,
                                      struct recurrence_room *room, bool edge) {
    enum { STATES = 8, Z = STATES, Q, K, NORM, GATES, FINISH }; /* warps */
    static_assert(FINISH < N_WARP, "a warp each");
    const ql_gdn_args &a = g.a;
    int s = task / a.n_value_head, j = task - s * a.n_value_head;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int key = (a.value_head0 + j) / a.group - a.key_head0, width = (2 * a.n_key_head + a.n_value_head) * D;
    bool active = warp < STATES, fresh = sh->seg_pos[s] == 0;
    auto state_of = [&](int segment, int head) {
        return a.state + (((int64_t)sh->seg_slot[segment] * a.n_value_head + head) * D + warp * 16) * D + 4 * lane;
    };
    float *state = state_of(s, j), st[4][16];
    uint32_t staged = shared_address(room->next) + threadIdx.x * 16; /* a thread reads what it copied */
    constexpr int APART = 8 * 32 * 16;
    bool copied = R > NORMED_BY_ALL && task >= (int)gridDim.x;
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
    /* What a lane needs of a row: columns of v; of q, k or the norm's weights; a and b, beside what is the same for all rows. */
    float4 in = make_float4(0, 0, warp == GATES ? __ldg(a.a_log + j) : 0, warp == GATES ? __ldg(a.dt_bias + j) : 0);
    if (edge) {
        wait_before(r, sh, sh->at_op[0]);
    }
    int next = task + (int)gridDim.x;
    if (R > NORMED_BY_ALL && active && next < r.n_seg * a.n_value_head) {
        const float *from = state_of(next / a.n_value_head, next % a.n_value_head);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            copy_16(staged + i * APART, from + i * D);
        }
    }
    auto load_row = [&](int row) {
        const float *u = a.u + (int64_t)row * width;
        if (active) {
            in = load_fresh4(u + (2 * a.n_key_head + j) * D + 4 * lane);
        } else if (warp >= Q && warp <= NORM) {
            const float *x = (warp == NORM ? g.norm : u + ((warp == K ? a.n_key_head : 0) + key) * D) + lane;
            in = make_float4(load_fresh(x), load_fresh(x + 32), load_fresh(x + 64), load_fresh(x + 96));
        } else if (warp == GATES && R > NORMED_BY_ALL && g.parts > 0) {
            float of_a[PLAIN_PARTS], of_b[PLAIN_PARTS]; /* all loads before the first use */
#pragma unroll
            for (int i = 0; i < PLAIN_PARTS; i++) {
                of_a[i] = i < g.parts ? load_fresh(&r.normed->plain[i][row][g.a_row + j]) : 0.0f;
                of_b[i] = i < g.parts ? load_fresh(&r.normed->plain[i][row][g.b_row + j]) : 0.0f;
            }
            in.x = of_a[0];
            in.y = of_b[0];
#pragma unroll
            for (int i = 1; i < PLAIN_PARTS; i++) {
                in.x = i < g.parts ? in.x + of_a[i] : in.x;
                in.y = i < g.parts ? in.y + of_b[i] : in.y;
            }
        } else if (warp == GATES) {
            in.x = load_fresh(a.a + row * a.n_value_head + j);
            in.y = load_fresh(a.b + row * a.n_value_head + j);
        }
    };
    auto prepare = [&](int row) {
        float v[4] = {in.x, in.y, in.z, in.w};
        if (warp == Q || warp == K) {
            float sum = 0.0f, *to = warp == K ? room->k[row & 1] : room->q[row & 1];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = fmaf(v[i], v[i], sum);
            }
            float scale = 1.0f / sqrtf(warp_sum(sum) + 1e-6f), factor = warp == K ? 1.0f : 0.08838834764831845f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to[lane + 32 * i] = (v[i] * scale) * factor;
            }
        } else if (warp == NORM && task == (int)blockIdx.x) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                room->norm[lane + 32 * i] = v[i];
            }
        } else if (warp == GATES) {
            float y = v[0] + v[3];
            sh->gate[row & 1][0] = expf(-expf(v[2]) * (y > 20.0f ? y : log1pf(expf(y))));
            sh->gate[row & 1][1] = sigmoid(v[1]);
        }
    };
    int row = R == 1 ? 0 : sh->seg_row[s], end = R == 1 ? 1 : sh->seg_row[s + 1];
    load_row(row);
    prepare(row);
    sync_warps();
    for (; row < end; row++) {
        if (active) {
            const float *k = room->k[row & 1] + warp * 16, *q = room->q[row & 1] + warp * 16;
            float keep = sh->gate[row & 1][0], beta = sh->gate[row & 1][1], sum[4] = {}, out[4] = {};
#pragma unroll
            for (int i = 0; i < 16; i++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    st[c][i] *= keep;
                    sum[c] = fmaf(k[i], st[c][i], sum[c]);
                }
            }
            *(float4 *)(room->sum[warp] + 4 * lane) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            sync_eight();
            float4 all = *(const float4 *)(room->sum[0] + 4 * lane);
#pragma unroll
            for (int i = 1; i < STATES; i++) {
                all = add4(all, *(const float4 *)(room->sum[i] + 4 * lane));
            }
            float d[4] = {beta * (in.x - all.x), beta * (in.y - all.y), beta * (in.z - all.z), beta * (in.w - all.w)};
            if (R > 1 && row + 1 < end) {
                load_row(row + 1);
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    st[c][i] = fmaf(k[i], d[c], st[c][i]);
                    out[c] = fmaf(q[i], st[c][i], out[c]);
                }
            }
            *(float4 *)(room->out[row & 1][warp] + 4 * lane) = make_float4(out[0], out[1], out[2], out[3]);
        } else if (warp == Z && g.z) {
            if (edge && lane == 0) {
                await_arrivals(&r.edges->count, sh->base + gridDim.x * sh->op[sh->at_op[Z]].edges);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                room->z[row & 1][lane + 32 * i] =
                    silu(load_fresh(g.z + (row * a.n_value_head + j) * D + lane + 32 * i));
            }
        } else if (R > 1 && row + 1 < end) {
            load_row(row + 1);
            prepare(row + 1);
        }
        sync_warps();
        if (warp == FINISH) {
            float squares = 0.0f, h[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                h[c] = room->out[row & 1][0][lane + 32 * c];
#pragma unroll
                for (int i = 1; i < STATES; i++) {
                    h[c] += room->out[row & 1][i][lane + 32 * c];
                }
                squares = fmaf(h[c], h[c], squares);
            }
            float scale = 1.0f / sqrtf(warp_sum(squares) / 128.0f + g.eps);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = lane + 32 * i;
                float y = (h[i] * scale) * room->norm[at];
                g.y[(row * a.n_value_head + j) * D + at] = g.z ? y * room->z[row & 1][at] : y;
            }
        }
    }
    if (warp == FINISH && sh->at_task[FINISH] + (int)gridDim.x >= r.n_seg * a.n_value_head) {
        __syncwarp();
        arrive(r, sh, sh->op[sh->at_op[FINISH]]);
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
