/* Runs of prompt ops that give each other what need not reach memory (chain.h). Unlike the runs of a generation step, each is
 * the kernels of its ops, of which one does a neighbour's work as well:
 *
 *   swiglu, linear              the product's preparation of x computes the activation
 *   gated_norm, linear          likewise the norm of the recurrence's output
 *   linear, exchange, rmsnorm   the product sends its tiles to the other lanes while it runs, the norm adds all parts;
 *                               where the lanes' inboxes are connected (ql_cuda_exchange)
 *   rmsnorm, linear             the norm prepares x for the products, several of one x
 */
#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/prompt.cuh"

/* Where the x of a product comes from if that is swiglu or gated_norm; *y: what the product must read, *rows of it. */
static bool source_of(const ql_op *op, struct x_source *from, const float **y, int32_t *rows) {
    if (op->kind == QL_OP_SWIGLU) {
        const ql_swiglu_args *s = &op->u.swiglu;
        *from = x_source{X_SWIGLU, s->g, s->u, NULL, s->n, 0.0f};
        *y = s->y;
        *rows = s->n_row;
        return true;
    }
    if (op->kind == QL_OP_GATED_NORM) {
        const ql_gated_norm_args *s = &op->u.gated_norm;
        *from = x_source{X_GATED_NORM, s->o, s->z, s->w, s->n_head * 128, s->eps};
        *y = s->y;
        *rows = s->n_row;
        return true;
    }
    return false;
}

/* The sum after those so far. */
static struct push next_push(const ql_cuda_exchange *x) {
    struct push to = {};
    to.lane = x->lane;
    to.n_lane = x->n_lane;
    to.number = x->n_pushed + 1;
    to.stride = (int64_t)(x->inbox_bytes / sizeof(float));
    to.inbox = (const float *)x->inbox[x->lane];
    to.inbox_flag = x->inbox_flag[x->lane];
    for (int i = 0; i < x->n_lane - 1; i++) {
        int peer = (x->lane + 1 + i) % x->n_lane; /* after whom this lane comes n_lane - 1 - i later */
        to.peer[i] = (float *)x->inbox[peer] + (x->n_lane - 2 - i) * to.stride;
        to.peer_flag[i] = x->inbox_flag[peer] + (int64_t)x->lane * QL_CUDA_INBOX_FLAGS;
    }
    to.let_go = x->let_go;
    to.gave_up = x->gave_up;
    to.wait_ns = x->wait_ns;
    return to;
}

/* Whether the product's part is added across lanes and then to the residual stream by the two ops behind it. */
static bool sum_of(ql_dev *dev, const ql_linear_args *a, const ql_op *op, int32_t n, struct push *to) {
    const ql_cuda_exchange *x = &cuda(dev)->exchange;
    if (n < 2 || op[0].kind != QL_OP_EXCHANGE || op[1].kind != QL_OP_RMSNORM || x->n_lane < 2) {
        return false;
    }
    const ql_exchange_args *e = &op[0].u.exchange;
    const ql_rmsnorm_args *r = &op[1].u.rmsnorm;
    int64_t elements = (int64_t)a->n_row * a->w->n;
    if (e->src != a->y || e->n != elements || r->delta != e->dst || r->n != a->w->n || r->n_row != a->n_row ||
        (uint64_t)elements * sizeof(float) > x->inbox_bytes) {
        return false;
    }
    *to = next_push(x);
    return true;
}

/* A norm, of this lane's delta or (to) of all lanes' parts, of which this lane's is `own`, and the products behind it if there are
 * some that it can prepare x for. *taken: ops. */
static ql_status take_norm(ql_dev *dev, const ql_op *op, int32_t n, const float *own, const struct push *to,
                           int32_t *taken) {
    const ql_rmsnorm_args *r = &op[0].u.rmsnorm;
    struct prepared_x x;
    bool stored, served = false;
    *taken = 0;
    if (n > 1 && op[1].kind == QL_OP_LINEAR) {
        const ql_linear_args *a = op[1].u.linear.a;
        int32_t many = op[1].u.linear.n;
        if (a->x == r->y && a->ldx == r->ldy && a->n_row == r->n_row && a->w->k == r->n &&
            ql_linear_group_place(dev, a, many, &x, &stored)) {
            QL_TRY(ql_rmsnorm_prepare_cuda(dev, r, own, to, x, stored, &served));
        }
        if (served) {
            *taken = 2;
            return ql_linear_group_prepared_cuda(dev, a, many);
        }
    }
    if (to) {
        *taken = 1;
        return ql_rmsnorm_of_lanes_cuda(dev, r, own, *to);
    }
    return QL_OK;
}

ql_status ql_chain_prompt_cuda(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken) {
    struct x_source from;
    struct push to;
    const float *y;
    int32_t rows, at = 0, behind = 0;
    *taken = 0;
    if (op->kind == QL_OP_RMSNORM) {
        return take_norm(dev, op, n, NULL, NULL, taken);
    }
    bool sourced = source_of(op, &from, &y, &rows);
    at += sourced;
    if (at == n || op[at].kind != QL_OP_LINEAR || op[at].u.linear.n != 1) {
        return QL_OK;
    }
    const ql_linear_args *a = op[at++].u.linear.a;
    if (sourced && (a->x != y || a->n_row != rows || a->ldx != from.ld || a->w->k != from.ld)) {
        return QL_OK;
    }
    bool served = false, summed = sum_of(dev, a, op + at, n - at, &to);
    if (!sourced && !summed) {
        return QL_OK;
    }
    QL_TRY(ql_linear_fused_cuda(dev, a, sourced ? &from : NULL, summed ? &to : NULL, &served));
    if (served && summed) {
        cuda(dev)->exchange.n_pushed++;
        at++;
        QL_TRY(take_norm(dev, op + at, n - at, a->y, &to, &behind));
    }
    *taken = served ? at + behind : 0;
    return QL_OK;
}

/* ---- the proof --------------------------------------------------------------------------------------------------- */

/* Block (64 rows, 128 columns), as a product's block sends a tile. */
__global__ void __launch_bounds__(32 * PUSHERS)
    send_kernel(const __grid_constant__ struct push to, const float *own, int rows) {
    constexpr int WIDTH = QL_CUDA_PUSH_WIDTH;
    after_previous();
    int me = threadIdx.x >> 5, lane = threadIdx.x & 31, row0 = blockIdx.x * PUSH_ROWS;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        raise_flags(to, 0);
    }
    if (lane < to.n_lane && lane != to.lane) {
        await_flag(to, lane, 0);
    }
    __syncwarp();
    for (int r = me; r < PUSH_ROWS && row0 + r < rows; r += PUSHERS) {
        int64_t at = (int64_t)(row0 + r) * WIDTH + blockIdx.y * PUSH_COLS + lane * 4;
        float4 v = *(const float4 *)(own + at);
#pragma unroll
        for (int l = 0; l < QL_CUDA_MAX_LANES - 1; l++) {
            if (l < to.n_lane - 1) {
                *(float4 *)(to.peer[l] + at) = v;
            }
        }
    }
    __syncwarp();
    if (lane == 0) {
        raise_flags(to, 1 + (blockIdx.x * (WIDTH / PUSH_COLS) + blockIdx.y) * PUSHERS + me);
    }
}

ql_status ql_cuda_prove_push(ql_dev *dev, const float *own, float *x, int32_t rows) {
    struct push to = next_push(&cuda(dev)->exchange);
    ql_rmsnorm_args a = {};
    a.x = x;
    a.n_row = rows;
    a.n = QL_CUDA_PUSH_WIDTH;
    cuda(dev)->exchange.n_pushed++;
    QL_TRY(launch(dev, "proof of sums of prompt rows", send_kernel,
                  dim3((unsigned)ceil_div(rows, PUSH_ROWS), QL_CUDA_PUSH_WIDTH / PUSH_COLS), 32 * PUSHERS, 0, to, own,
                  rows));
    return ql_rmsnorm_of_lanes_cuda(dev, &a, own, to);
}
