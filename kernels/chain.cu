/* chain on the device: a run of a generation step's ops in one persistent kernel, contract in chain.h.
 *
 * One block an SM. One warp only fetches: it walks over the run's products and keeps a ring of shared memory filled with the
 * codes and scales that this block will multiply, in order, across the edges between ops. Weights do not depend on what the
 * ops compute, so memory need not wait for an edge. One warp only finishes what the others have multiplied.
 *
 *   product     all blocks: x is prepared by every block for itself (residual addition, norm, largest element, f16 parts) into
 *               shared memory; where more than two rows are normed, a block each does so for all, which copy them behind an edge.
 *               Then units of 16 weight rows in the order of cuda/unit.cuh, dealt to the warps in turn. A task is the units of a
 *               tile of weight rows; the finishing warp takes one after another: units are added up, scaled, slices added as a
 *               tree, and what follows elementwise is applied (convolution, gated activation)
 *   recurrence  a block a head and segment: delta rule and gated norm. The blocks with fewer heads take most of z's tasks
 *               meanwhile; where the output product follows, it multiplies with silu(z), which who makes z leaves
 *   edge        a counter in device memory that every block raises when its part of an op is written, and waits for before it
 *               reads what others wrote; where lanes add, one of every lane's. Parts of a sum that all blocks add are only on
 *               their way then: each number takes the place of a mark, for which its readers look. An early edge is one inside
 *               a product: all blocks have read x, so that x + delta may take its place, and the tasks are done that the next
 *               op begins with. The recurrence needs z, the product's last tasks, only at its end, or not at all where the
 *               product behind it multiplies with silu(z). A block may then arrive at the recurrence's edge while others have
 *               not at the product's: only the sum of both is known to be complete. `down` of two parts needs the first half
 *               of gate and up for one of them, which the last blocks have: they look whether gate and up are complete before
 *               they arrive
 *
 * A row-parallel product of few row tiles is cut into parts of whole slices, subtrees of the tree, so that all SMs have work;
 * who reads it adds the parts. Other sums have the order of the kernels that run alone, so a step may go either way.
 *
 * What shapes this code (bench/NOTES.md): a load that misses the first-level cache waits behind all that the rings of the GPU have
 * asked for, so nothing on the way of a unit may touch device memory, spilled registers included (but for the scales of
 * 128-blocks); code that runs once an op waits for its own instructions, so it is short rather than unrolled; and the ring is
 * full after 5 us of an edge, so what counts is the time from a block's last unit to the next op's first.
 */
#include "kernels/cuda/chain_finish.cuh"
#include "kernels/cuda/chain_recur.cuh"
#include "kernels/cuda/chain_x.cuh"

#if HAVE_WGMMA
/* ---- fetching ---------------------------------------------------------------------------------------------------- */

/* By one thread, which is on the way of every byte: what it needs of a product it keeps in registers. */
template <int R> __device__ void fetch(const struct run &r, struct shared *sh, uint8_t *room) {
    uint8_t *extras = room + r.extras_at;
    uint32_t ring = shared_address(room + RING_AT), full0 = shared_address(sh->full),
             empty0 = shared_address(sh->empty);
    uint64_t policy = read_once();
    const volatile int *at_product = &sh->at_product;
    int stage = 0, n_task = 0;            /* asked for so far */
    int finished = 0;                     /* tasks that are known to be */
    int come = 0;                         /* stages that are known to have come */
    int slot = 0, next = 0;               /* of this stage, and of the one that comes next */
    uint32_t parity = 0, next_parity = 0; /* of the uses of these slots */
    for (int i = 0; i < r.n_op; i++) {
        if (sh->op[i].kind == RECURRENCE) {
            const ql_gdn_args &g = sh->op[i].gdn.a;
            for (int task = blockIdx.x; task < r.n_seg * g.n_value_head; task += gridDim.x) {
                int s = task / g.n_value_head, j = task % g.n_value_head;
                prefetch(g.state + ((int64_t)sh->seg_slot[s] * g.n_value_head + j) * D * D, D * D * 4);
            }
        }
        if (sh->op[i].kind != PRODUCT) {
            continue;
        }
        const struct product &p = sh->op[i].product;
        bool fp4 = p.format == QL_FORMAT_NVFP4;
        int pieces = p.epilogue == GATED ? 2 : 1, units = p.units, by_slice = p.by_slice, n_tasks = p.tasks;
        const struct deal deal = p.deal;
        struct cut cut = p.cut;
        uint32_t tile_bytes = fp4 ? TILE_BYTES + TILE_SCALE_BYTES : TILE_BYTES;
        auto tile_at = [&](int u) { /* as tile_of */
                                    int slice = u * by_slice >> 16;
                                    return slice * cut.tiles + cut.begin(u - slice * cut.per_slice);
        };
        int piece_tiles = tile_at(units);
        if (p.norm && blockIdx.x < 4) {
            prefetch(p.norm + p.k / 4 * blockIdx.x, p.k);
        }
        for (int j = 0, row = (int)gridDim.x - 1 - (int)blockIdx.x; j < p.n_plain; row -= p.plain[j++].n) {
            if (row >= 0 && row < p.plain[j].n) {
                prefetch(p.plain[j].w + (int64_t)row * p.k * 2, p.k * 2);
            }
        }
        for (int k = 0; k < n_tasks; k++, n_task++) {
            int task = task_of(deal, k);
            struct extra *x = (struct extra *)(extras + n_task % ahead_of(R) * r.extra_bytes);
            finished = wait_count(&sh->finished, finished, n_task - ahead_of(R)); /* whose data and sums were there */
            bool single = R == 1 && task >= p.singles;
            for (int piece = 0; piece < (single ? 1 : pieces); piece++) {
                struct piece_of at = find_piece_of(p, task, single ? piece_of_single(p, task) : piece);
                const struct chain_target &t = *at.t;
                int64_t tile0 = ((int64_t)at.row_tile * p.parts + at.part) * piece_tiles;
                const uint8_t *codes = t.w + tile0 * TILE_BYTES,
                              *scales = (const uint8_t *)t.scale + tile0 * TILE_SCALE_BYTES;
                bool conv = p.epilogue == CONV && at.t == &p.target[0];
                int more = (t.row_scale ? 64 : 0) + (conv ? 256 + r.n_seg * 192 : 0);
                for (int j = 0, first = 0; j < units; j += STAGE_UNITS, stage++) {
                    int n = min((int)STAGE_UNITS, units - j), last = tile_at(j + n);
                    uint32_t full = full0 + slot * 8, to = ring + slot * SLOT_BYTES;
                    const uint8_t *codes_at = codes + first * TILE_BYTES,
                                  *scales_at = scales + first * TILE_SCALE_BYTES;
                    uint32_t code_bytes = (last - first) * TILE_BYTES, scale_bytes = (last - first) * TILE_SCALE_BYTES;
                    /* What is fetched for the op after an edge is in the way of what the edge waits for. */
                    int must_come = stage - (i > *at_product ? ACROSS_EDGE : IN_FLIGHT);
                    if (stage >= r.n_slot) {
                        barrier_wait(empty0 + slot * 8, parity ^ 1);
                    }
                    barrier_expect(full, (last - first) * tile_bytes + more);
                    while (come <= must_come) {
                        barrier_wait(full0 + next * 8, next_parity);
                        come++;
                        next++;
                        if (next == r.n_slot) {
                            next = 0;
                            next_parity ^= 1;
                        }
                    }
                    bulk_copy_as(policy, to, codes_at, code_bytes, full);
                    if (fp4) {
                        bulk_copy_as(policy, to + SCALES_AT, scales_at, scale_bytes, full);
                    }
                    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&sh->come)), "r"(come)
                                 : "memory"); /* behind the copies, for which nobody waits longer then */
                    if (more) {
                        if (t.row_scale) {
                            bulk_copy(shared_address(x->scale[piece]), (const float *)t.scale + at.row_tile * TILE_ROWS,
                                      64, full);
                        }
                        if (conv) {
                            bulk_copy(shared_address(x->conv), p.conv + at.row_tile * TILE_ROWS * 4, 256, full);
                            for (int q = 0; q < r.n_seg * 3; q++) {
                                bulk_copy(shared_address(x->tail[q / 3][q % 3]),
                                          p.tail + ((int64_t)sh->seg_slot[q / 3] * 3 + q % 3) * t.n +
                                              at.row_tile * TILE_ROWS,
                                          64, full);
                            }
                        }
                        more = 0;
                    }
                    if (n < STAGE_UNITS) { /* a slot is free when all of them have been computed */
                        barrier_arrive(empty0 + slot * 8, STAGE_UNITS - n);
                    }
                    first = last;
                    slot++;
                    if (slot == r.n_slot) {
                        slot = 0;
                        parity ^= 1;
                    }
                }
            }
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* A unit of n tiles: codes, scales and x are shared addresses of this lane's first, and x of the next tile is x_tile bytes further;
 * into [16][set_rows]. t, row0 and first tell block scales apart. */
template <int FMT, int COLS>
__device__ __forceinline__ void compute(const struct chain_target &t, int row0, int first, int n, uint32_t codes,
                                        uint32_t scales, uint32_t x, int x_tile, int n_row, int set_rows, int k,
                                        float *out, int lane) {
    constexpr int KT = tile_k(FMT);
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    const float *bs = NULL, *bs8 = NULL;
    if (BLOCK) {
        int64_t blocks = (t.col_off + k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
        int r = row0 + (lane >> 2);
        bs = (const float *)t.scale + (t.row_off + min(r, t.n - 1)) / QL_FP8_BLOCK * blocks;
        bs8 = (const float *)t.scale + (t.row_off + min(r + 8, t.n - 1)) / QL_FP8_BLOCK * blocks;
    }
    sums<FMT, 1, COLS> sum;
    sum.clear();
    int i = 0;
    /* N tiles: loads of weights before the first use, those of x a tile ahead. */
    auto tiles = [&](auto count) {
        constexpr int N = decltype(count)::value;
        static_assert(N * KT * 2 * COLS <= ZEROS, "as many zeros as are read from one place");
        uint4 w[N], b[2][KT / 32];
        uint32_t s[N];
        auto load_x = [&](int m) {
#pragma unroll
            for (int j = 0; j < KT / 32; j++) {
                b[m & 1][j] = load_shared4(x + m * KT * 2 * COLS + (COLS == 2 ? 128 : 16) * j);
            }
        };
        load_x(0);
#pragma unroll
        for (int m = 0; m < N; m++) {
            w[m] = load_shared4(codes + m * TILE_BYTES);
            s[m] = FP4 ? load_shared_u16(scales + m * TILE_SCALE_BYTES) : 0;
        }
#pragma unroll
        for (int m = 0; m < N; m++) {
            uint32_t a[KT / 16][4];
            if (m + 1 < N) {
                load_x(m + 1);
            }
            sum.decode(w[m], s[m], a);
            sum.multiply(0, a, b[m & 1]);
            int end = t.col_off / KT + first + i + m + 1;
            if (BLOCK && (end % (QL_FP8_BLOCK / KT) == 0 || i + m + 1 == n)) {
                int at = (end - 1) / (QL_FP8_BLOCK / KT);
                sum.end_block(bs[at], bs8[at]);
            }
        }
        i += N;
        x += N * x_tile;
        codes += N * TILE_BYTES;
        scales += N * TILE_SCALE_BYTES;
    };
    /* 10 are 5 and 5, 9 are 5 and 4, 8 are 4 and 4. */
#pragma unroll 1
    while (n - i == 5 || n - i > 8) {
        tiles(constant<5>{});
    }
#pragma unroll 1
    while (n - i >= 4) {
        tiles(constant<4>{});
    }
#pragma unroll 1
    while (i < n) {
        tiles(constant<1>{});
    }
#pragma unroll
    for (int e = 0; e < 2; e++) { /* weight rows g and g + 8 */
        const float *t = sum.total[0], *even = sum.acc[0][0], *odd = sum.acc[0][1];
        float v0 = (BLOCK ? t[2 * e] : even[2 * e] + odd[2 * e]) * sum.BACK,
              v1 = (BLOCK ? t[2 * e + 1] : even[2 * e + 1] + odd[2 * e + 1]) * sum.BACK;
        int row = COLS == 2 ? lane & 3 : 2 * (lane & 3);
        float *to = out + ((lane >> 2) + 8 * e) * set_rows + row;
        if (COLS == 2 && row < n_row) {
            to[0] = fmaf(v1, 1.0f / 2048.0f, v0);
        }
        if (COLS == 1 && row < n_row) {
            to[0] = v0;
        }
        if (COLS == 1 && row + 1 < n_row) {
            to[1] = v1;
        }
    }
}

/* How far a warp's units are from each other, four distances in turn. Dealt to 16 places, two more than there are warps: the
 * last two go in turn to the warps of those schedulers that have one computing warp less, so that all have the same work. */
__device__ __forceinline__ uint32_t distances(int warp) {
    uint32_t all = 0x01010101u * PLACES;
    if ((warp & 2) == 0 || warp >= 12) {
        return all;
    }
    int at = 8 * (warp >> 2), first = 14 + (warp & 1) - warp;
    return (all & ~(0xffffu << at)) | (first | (PLACES - first) << 8) << at;
}

/* The units of a product are dealt to the warps in turn, from the first warp and the block's first task on. A warp walks over
 * its own; it says of each that its sums are in, and at the end once more that it is done. */
template <int FMT, int COLS, int R>
__device__ __forceinline__ void multiply(const struct run &r, const struct product &p, uint8_t *room,
                                         struct shared *sh) {
    constexpr int KT = tile_k(FMT);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, units = p.units, all = all_units(p), by_task = p.by_task;
    int stages = p.epilogue == GATED ? 2 * p.stages : p.stages, end = p.task0 + p.tasks;
    uint32_t steps = distances(warp);
    /* Results of the columns that there are not depend on them alone. One row leaves most; zeros there take less power. */
    int column = min(lane >> 2, r.n_row * COLS - 1), x_tile = KT * 2 * COLS;
    uint32_t x = shared_address(room + r.x_at) + column / COLS * (x_stride<COLS>(p.k >> p.log_parts, FMT) * 2) +
                 (COLS == 2 ? (lane & 3) * 32 + column % 2 * 16 : (lane & 3) * (KT / 2));
    if (R == 1 && column < lane >> 2) {
        x = shared_address(room + r.zeros_at);
        x_tile = 0;
    }
    if (threadIdx.x == 0) {
        *(volatile int *)&sh->at_product = sh->at_op[0];
    }
    int u = warp, task = p.task0, stage = p.stage0, come = 0;
    unsigned last = ~0u;
    int first = 0, tiles = 0,
        skip = 0; /* of the last unit: column tile of its piece, how many, from its stage's first */
#pragma unroll 1
    for (;; u += steps & 0xff, steps = __funnelshift_r(steps, steps, 8)) {
        int on = u * by_task >> 16; /* tasks further */
        u -= on * all;
        task += on;
        stage += on * stages;
        if (task >= end || (p.single && task + 1 == end && u >= units)) {
            break;
        }
        int piece = u >= units;
        unsigned unit = u - (piece ? units : 0);
        if (unit != last) {
            last = unit;
            first = tile_of(p, unit);
            tiles = tile_of(p, unit + 1) - first;
            skip = first - tile_of(p, unit / STAGE_UNITS * STAGE_UNITS);
        }
        int set = (unsigned)task % ahead_of(R), in = stage + unit / STAGE_UNITS + (piece ? p.stages : 0),
            turn = in * r.by_slot >> 16, slot = in - turn * r.n_slot;
        int fresh_lane = lane; /* so that nothing made of it takes a register outside the loop */
        asm volatile("" : "+r"(fresh_lane));
        uint32_t slot_at = shared_address(room + RING_AT) + slot * SLOT_BYTES;
        struct piece_of q = {};
        if (FMT == QL_FORMAT_FP8_BLOCK) {
            int at = task_of(p.deal, task - p.task0);
            q = find_piece_of(p, at, at >= p.singles ? piece_of_single(p, at) : piece);
        }
        /* What the slot held before has come: a wait by parity is for at most a turn of the ring. */
        come = wait_count(&sh->come, come, in - r.n_slot);
        barrier_wait(shared_address(&sh->full[slot]), turn & 1);
        compute<FMT, COLS>(q.t ? *q.t : p.target[0], q.row_tile * TILE_ROWS, q.part * tile_of(p, units) + first, tiles,
                           slot_at + skip * TILE_BYTES + fresh_lane * 16,
                           slot_at + SCALES_AT + skip * TILE_SCALE_BYTES + fresh_lane * 2, x + first * x_tile, x_tile,
                           r.n_row, r.set_rows, p.k,
                           (float *)(room + r.sets_at) + set * r.set_floats + u * r.set_rows * 16, fresh_lane);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(shared_address(&sh->empty[slot]), 1);
            barrier_arrive(shared_address(&sh->summed[set]), 1);
        }
    }
    if (p.tasks > 0) {
        wait_count(&sh->finished, 0, end - 1 - ahead_of(R));
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(shared_address(&sh->summed[(end - 1) % ahead_of(R)]), 1);
        }
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* Whether the finishing warp or the recurrence says that this block's part of an op is written. */
__device__ __forceinline__ bool told_by_others(const struct chain_op &op, int n_seg) {
    return op.kind == PRODUCT      ? op.product.tasks > 0
           : op.kind == RECURRENCE ? (int)blockIdx.x < n_seg * op.gdn.a.n_value_head
                                   : false;
}

template <int COLS, int R> __device__ void compute_all(const struct run &r, struct shared *sh, uint8_t *room) {
    uint16_t *xs = (uint16_t *)(room + r.x_at);
    volatile int *at_op = &sh->at_op[threadIdx.x >> 5]; /* not in a register, which would be one too many */
    *at_op = 0;
    __syncwarp();
#pragma unroll 1
    while (*at_op < r.n_op) {
        const int i = *at_op;
        const enum chain_op_kind kind = sh->op[i].kind;
        auto cross = [&]() {
            if (*at_op > 0) { /* nothing is kept in registers across what follows */
                wait_lanes(r, sh, *at_op);
                wait_before(r, sh, *at_op);
            }
        };
        if (kind == PRODUCT) {
            const struct product &p = sh->op[i].product;
            if (R > NORMED_BY_ALL && p.norm) {
                int row = (int)(gridDim.x - 1 - blockIdx.x);
                if (row < r.n_row) {
                    norm_row<COLS>(r, p, row, (float *)xs, sh, [&]() {
                        if (*at_op > 0) {
                            wait_lanes(r, sh, *at_op);
                            wait_edge(r, sh, sh->op[*at_op].edges - 1);
                        }
                    });
                }
                copy_x<COLS>(r, p, sh->op[*at_op].edges, xs, sh);
            } else if (R <= NORMED_BY_ALL && p.norm) {
                float4 w[NORM_SHARE]; /* on their way during the wait */
#pragma unroll
                for (int j = 0; j < NORM_SHARE; j++) {
                    int at = 4 * (j * N_THREAD + threadIdx.x);
                    w[j] = at < p.k ? load_fresh4(p.norm + at) : make_float4(0, 0, 0, 0);
                }
                if (i > 0 && p.ahead &&
                    sh->op[i - 1].early) { /* nobody of these warps has asked for what that began before */
                    wait_edge(r, sh, sh->op[i - 1].edges);
                }
                for (int row = 0; row < r.n_row; row++) {
                    int stride = x_stride<COLS>(p.k, p.format);
                    float *y = (float *)(xs + r.n_row * stride);
                    norm_x<COLS>(p, row, w, xs + row * stride, y, sh, [&]() {
                        if (row == 0) {
                            cross();
                        }
                    });
                    if (p.n_plain > 0 && threadIdx.x >= N_THREAD - 128) {
                        plain_rows(p, y, row, sh);
                    }
                }
            } else {
                slices_x<COLS, R>(r, p, xs, sh, sh->op[i].early > 0, cross);
            }
            switch (p.format) {
            case QL_FORMAT_NVFP4: multiply<QL_FORMAT_NVFP4, COLS, R>(r, p, room, sh); break;
            case QL_FORMAT_FP8_BLOCK: multiply<QL_FORMAT_FP8_BLOCK, COLS, R>(r, p, room, sh); break;
            default: multiply<QL_FORMAT_FP8_CHANNEL, COLS, R>(r, p, room, sh); break;
            }
        } else if (kind == RECURRENCE) {
            const struct recurrence &g = sh->op[i].gdn;
            volatile int *at_task = &sh->at_task[threadIdx.x >> 5]; /* as at_op */
            *at_task = blockIdx.x;
            __syncwarp();
#pragma unroll 1
            while (*at_task < r.n_seg * g.a.n_value_head) {
                recur<R>(r, sh, g, *at_task, (struct recurrence_room *)xs, *at_task == (int)blockIdx.x && *at_op > 0);
                int next = *at_task + (int)gridDim.x;
                __syncwarp();
                *at_task = next;
                __syncwarp();
            }
            if (*at_task == (int)blockIdx.x && *at_op > 0) {
                wait_edge(r, sh, sh->op[*at_op].edges);
            }
        } else {
            cross();
            if (kind == PROOF) {
                share_proof(r.lanes, sh, sh->op[*at_op].proof, blockIdx.x * N_THREAD + threadIdx.x,
                            gridDim.x * N_THREAD);
            }
            const struct combine c = kind == COMBINE ? sh->op[*at_op].combine : combine{};
            for (int e = blockIdx.x * N_THREAD + threadIdx.x; e < c.n; e += gridDim.x * N_THREAD) {
                c.to[e] = add_parts(c.from + e, c.parts, c.stride);
            }
        }
        const struct chain_op &op = sh->op[*at_op];
        if (!told_by_others(op, r.n_seg)) {
            sync_warps();
            if (threadIdx.x < 32) {
                if (R <= NORMED_BY_ALL && op.kind == PRODUCT && op.product.residual) { /* a block without tasks */
                    if (threadIdx.x == 0) {
                        arrive_early(r);
                    }
                    put_residual(r, sh, op.product);
                }
                arrive(r, sh, op);
            }
        }
        int next = *at_op + 1;
        __syncwarp();
        *at_op = next;
        __syncwarp();
    }
}
#endif

/* R: rows of x, or the next power of two. */
template <int COLS, int R>
__global__ void __launch_bounds__(N_THREAD + 64, 1) chain_kernel(const __grid_constant__ struct run args) {
#if HAVE_WGMMA
    extern __shared__ __align__(128) uint8_t room[];
    struct shared *sh = (struct shared *)room;
    wait_previous();
    /* As ordinary memory: constants that differ between lanes are read one after another. */
    const uint4 *ops = (const uint4 *)args.op;
    asm volatile("" : "+l"(ops));
    constexpr int EACH = (MAX_OPS * (int)(sizeof(struct chain_op) / 16) + N_THREAD + 63) / (N_THREAD + 64);
    uint4 part[EACH]; /* all loads before the first store */
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        int i = j * (N_THREAD + 64) + threadIdx.x;
        part[j] = i < args.n_op * (int)(sizeof(struct chain_op) / 16) ? ops[i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        int i = j * (N_THREAD + 64) + threadIdx.x;
        if (i < MAX_OPS * (int)(sizeof(struct chain_op) / 16)) {
            ((uint4 *)sh->op)[i] = part[j];
        }
    }
    if (args.n_seg > 0 && threadIdx.x <= args.n_seg) {
        int i = threadIdx.x;
        sh->seg_row[i] = args.seg_row[i];
        if (i < args.n_seg) {
            sh->seg_pos[i] = args.seg_pos[i];
            sh->seg_slot[i] = args.seg_slot[i];
        }
    }
    if (args.n_row == 1 && threadIdx.x < ZEROS / 16) {
        ((uint4 *)(room + args.zeros_at))[threadIdx.x] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < args.n_slot; i++) {
            barrier_init(shared_address(&sh->full[i]), 1);
            barrier_init(shared_address(&sh->empty[i]), STAGE_UNITS);
        }
        for (int i = 0; i < AHEAD; i++) {
            barrier_init(shared_address(&sh->summed[i]), SUM_ARRIVALS);
        }
        sh->come = sh->finished = sh->at_product = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 32) { /* this block's way through the products, a lane an op */
        static_assert(MAX_OPS <= 32, "a lane an op");
        int i = threadIdx.x, task = 0, stage = 0;
        struct chain_op &op = sh->op[min(i, args.n_op - 1)];
        struct product &p = op.product;
        bool there = i < args.n_op && op.kind == PRODUCT;
        if (there) {
            struct deal &d = p.deal;
            d.first = blockIdx.x;
            d.step = gridDim.x;
            if (d.half > 0) {
                bool second = d.first < d.half;
                d.first = 2 * (d.first - (second ? 0 : d.half)) + second;
                d.step = 2 * (second ? d.half : d.step - d.half);
                op.early = second ? 0 : op.early;
            }
            d.mine = count_of(d.all, d.first, d.step);
            p.tasks = task = d.mine + count_of(d.n - d.all, gridDim.x - 1 - blockIdx.x, d.late);
            p.single = task > 0 && task_of(d, task - 1) >= p.singles;
            stage = task * p.stages * (p.epilogue == GATED ? 2 : 1) - (p.single ? p.stages : 0);
        }
        int tasks = task, stages = stage;
#pragma unroll
        for (int distance = 1; distance < 32; distance <<= 1) {
            int t = __shfl_up_sync(0xffffffffu, task, distance), s = __shfl_up_sync(0xffffffffu, stage, distance);
            task += i >= distance ? t : 0;
            stage += i >= distance ? s : 0;
        }
        if (there) {
            p.task0 = task - tasks;
            p.stage0 = stage - stages;
        }
    }
    __syncthreads();
    if (threadIdx.x >= N_THREAD && threadIdx.x < N_THREAD + 32) {
        if (threadIdx.x == N_THREAD) { /* which needs none of what follows */
            fetch<R>(args, sh, room);
        }
        return;
    }
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            sh->base = *(volatile unsigned *)&args.edges->base;
            sh->base_early = *(volatile unsigned *)&args.edges->base_early;
            sh->exchanged = *(volatile unsigned *)&args.edges->exchanged;
        }
        __syncwarp();
        if ((int)threadIdx.x < args.n_op) {
            place_sums(sh, sh->op[threadIdx.x]);
        }
    }
    sync_but_fetching();
    if (threadIdx.x >= N_THREAD) {
        finish_all<R>(args, sh, room);
    } else {
        compute_all<COLS, R>(args, sh, room);
    }
#else
    __trap(); /* never launched on anything but compute capability 9.0 */
#endif
}

ql_status ql_chain_launch_cuda(ql_dev *dev, const struct run *r, int cols, int blocks) {
    cudaLaunchAttribute together; /* blocks wait for each other: all of them must run */
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(N_THREAD + 64);
    config.dynamicSmemBytes = (size_t)r->room_bytes;
    config.stream = cuda(dev)->stream;
    config.attrs = &together;
    config.numAttrs = 1;
    cuda(dev)->last_op = "chain";
    auto kernel = cols == 2 ? (r->n_row > 2    ? chain_kernel<2, 4>
                               : r->n_row == 2 ? chain_kernel<2, 2>
                                               : chain_kernel<2, 1>)
                            : (r->n_row > 2    ? chain_kernel<1, 4>
                               : r->n_row == 2 ? chain_kernel<1, 2>
                                               : chain_kernel<1, 1>);
    CU_TRY(dev, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX),
           "chain");
    CU_TRY(dev, cudaLaunchKernelEx(&config, kernel, *r), "chain");
    return QL_OK;
}
