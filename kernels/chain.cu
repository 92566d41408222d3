/* chain on the device: a run of a generation step's ops in one persistent kernel, contract in chain.h.
 *
 * One block an SM. One warp only fetches: it walks over the run's products and keeps a ring of shared memory filled with the
 * codes and scales that this block will multiply, in order, across the edges between ops. Weights do not depend on what the
 * ops compute, so memory need not wait for an edge. One warp only finishes what the others have multiplied.
 *
 *   product     all blocks: x is prepared by every block for itself (residual addition, norm, largest element, f16 parts) into
 *               shared memory; then units of 16 weight rows in the order of cuda/unit.cuh, dealt to the warps in turn. A task is
 *               the units of a tile of weight rows; the finishing warp takes one after another: units are added up, scaled,
 *               slices added as a tree, and what follows elementwise is applied (convolution, gated activation)
 *   recurrence  a block a head and segment: delta rule and gated norm
 *   edge        a counter in device memory that every block raises when its part of an op is written, and waits for before
 *               it reads what others wrote; where lanes add, one of every lane's
 *
 * A row-parallel product of few row tiles is cut into parts of whole slices, subtrees of the tree, so that all SMs have work;
 * who reads it adds the parts. Other sums have the order of the kernels that run alone, so a step may go either way.
 *
 * What shapes this code (bench/NOTES.md): a load that misses the first-level cache waits behind all that the ring has asked
 * for, so nothing on the way of a unit may touch device memory, spilled registers included; and code that runs once an op
 * waits for its own instructions, so it is short rather than unrolled.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/chain_exchange.cuh"
#include "kernels/cuda/unit.cuh"

#if HAVE_WGMMA
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int n) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}
/* Weights are read once a step: what else the second-level cache holds is to outlive them. */
__device__ __forceinline__ uint64_t read_once(void) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_copy_as(uint64_t policy, uint32_t to, const void *from, uint32_t n,
                                             uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(n), "r"(barrier), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void prefetch(const void *from, uint32_t n) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n) : "memory");
}

/* What other blocks wrote during the run: from the second-level cache, and never before the edge that the code is behind. */
__device__ __forceinline__ float load_fresh(const float *p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ float4 load_fresh4(const float *p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

/* Loads that stay where they are written. */
__device__ __forceinline__ uint4 load_shared4(uint32_t p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t p) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p));
    return v;
}

/* Of the computing warps. */
__device__ __forceinline__ void sync_warps(void) { asm volatile("bar.sync 1, 448;" ::: "memory"); }
__device__ __forceinline__ void sync_four(void) { asm volatile("bar.sync 2, 128;" ::: "memory"); }

/* ---- walking over a product, the same for the fetching and the computing warps ------------------------------------- */

/* A task is a tile of 16 weight rows and a part of its slices; GATED: of gate and up, two pieces. */
struct piece_of {
    int row_tile, part;
    const struct chain_target *t;
};

/* How often a stage's slot was used before. */
__device__ __forceinline__ int use_of(const struct run &r, int stage) { return stage * r.by_slot >> 16; }

/* First column tile of a unit of a piece. */
__device__ __forceinline__ int tile_of(const struct product &p, int unit) {
    int slice = unit * p.by_slice >> 16;
    return slice * p.tiles + (unit - slice * p.per_slice) * (p.format == QL_FORMAT_NVFP4 ? 5 : 10);
}

__device__ __forceinline__ struct piece_of find_piece_of(const struct product &p, int task, int piece) {
    struct piece_of at;
    at.part = task & (p.parts - 1);
    at.row_tile = task >> p.log_parts;
    int which = p.epilogue == GATED ? piece : 0;
    while (p.epilogue != GATED && which + 1 < p.n_target && at.row_tile >= p.target[which].row_tiles) {
        at.row_tile -= p.target[which++].row_tiles;
    }
    at.t = &p.target[which];
    return at;
}

/* Units of a task. */
__device__ __forceinline__ int all_units(const struct product &p) {
    return p.epilogue == GATED ? 2 * p.units : p.units;
}

/* Unit u of a task, counted over its pieces, and with `pair` the one behind it. */
__device__ __forceinline__ struct unit_at locate_unit(const struct product &p, int u) {
    int piece = u >= p.units, unit = u - piece * p.units, per_stage = stage_units(p.format);
    int first = tile_of(p, unit), skip = first - tile_of(p, unit / per_stage * per_stage), next = tile_of(p, unit + 1);
    int second = p.pair ? tile_of(p, unit + 2) - next : 0;
    return unit_at{(uint16_t)(skip * TILE_BYTES),
                   (uint16_t)(SCALES_AT + skip * TILE_SCALE_BYTES),
                   (uint32_t)(first * tile_k(p.format) * 2),
                   (uint16_t)(piece * p.stages + unit / per_stage),
                   (uint8_t)(next - first),
                   (uint8_t)second,
                   (uint32_t)first};
}

/* Until task n of the block has been finished. */
__device__ __forceinline__ void wait_finished(const struct shared *sh, int n) {
    int done;
    do {
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                     : "=r"(done)
                     : "r"(shared_address(&sh->finished[n % SUM_SETS]))
                     : "memory");
    } while (done <= n / SUM_SETS);
}

/* ---- fetching ---------------------------------------------------------------------------------------------------- */

__device__ void fetch(const struct run &r, const struct shared *sh, uint8_t *room) {
    uint8_t *ring = room + RING_AT, *extras = room + r.extras_at;
    uint64_t policy = read_once();
    int stage = 0, n_task = 0;
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
        int per_stage = stage_units(p.format), pieces = p.epilogue == GATED ? 2 : 1;
        if (p.norm && blockIdx.x < 4) {
            prefetch(p.norm + p.k / 4 * blockIdx.x, p.k);
        }
        for (int j = 0, row = (int)gridDim.x - 1 - (int)blockIdx.x; j < p.n_plain; row -= p.plain[j++].n) {
            if (row >= 0 && row < p.plain[j].n) {
                prefetch(p.plain[j].w + (int64_t)row * p.k * 2, p.k * 2);
            }
        }
        for (int task = blockIdx.x; task < p.n_task; task += gridDim.x, n_task++) {
            struct extra *x = (struct extra *)(extras + n_task % AHEAD * r.extra_bytes);
            if (n_task >=
                AHEAD) { /* whose data was there; tasks of one stage leave the ring before they are finished */
                wait_finished(sh, n_task - AHEAD);
            }
            for (int piece = 0; piece < pieces; piece++) {
                struct piece_of at = find_piece_of(p, task, piece);
                const struct chain_target &t = *at.t;
                int64_t tile0 = ((int64_t)at.row_tile * p.parts + at.part) * tile_of(p, p.units);
                const uint8_t *codes = t.w + tile0 * TILE_BYTES,
                              *scales = (const uint8_t *)t.scale + tile0 * TILE_SCALE_BYTES;
                bool conv = p.epilogue == CONV && at.t == &p.target[0];
                int more = (t.row_scale ? 64 : 0) + (conv ? 256 + r.n_seg * 192 : 0);
                for (int j = 0, first = 0; j < p.units; j += per_stage, stage++) {
                    int n = min(per_stage, p.units - j), use = use_of(r, stage), slot = stage - use * r.n_slot;
                    int last = tile_of(p, j + n);
                    uint32_t full = shared_address(&sh->full[slot]);
                    uint8_t *to = ring + slot * SLOT_BYTES;
                    if (use > 0) {
                        barrier_wait(shared_address(&sh->empty[slot]), use - 1 & 1);
                    }
                    if (stage >= r.in_flight) {
                        int old = stage - r.in_flight, old_use = use_of(r, old);
                        barrier_wait(shared_address(&sh->full[old - old_use * r.n_slot]), old_use & 1);
                    }
                    barrier_expect(full, (last - first) * (fp4 ? TILE_BYTES + TILE_SCALE_BYTES : TILE_BYTES) + more);
                    bulk_copy_as(policy, shared_address(to), codes + first * TILE_BYTES, (last - first) * TILE_BYTES,
                                 full);
                    if (fp4) {
                        bulk_copy_as(policy, shared_address(to + SCALES_AT), scales + first * TILE_SCALE_BYTES,
                                     (last - first) * TILE_SCALE_BYTES, full);
                    }
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
                    if (n < 8) { /* a slot is free when eight units have been computed */
                        barrier_arrive(shared_address(&sh->empty[slot]), 8 - n);
                    }
                    first = last;
                }
            }
        }
    }
    uint32_t from = r.soon_bytes / gridDim.x * blockIdx.x & ~15u,
             to = r.soon_bytes / gridDim.x * (blockIdx.x + 1) & ~15u;
    for (; from < to; from += min(to - from, 1u << 14)) {
        prefetch(r.soon + from, min(to - from, 1u << 14));
    }
}

/* ---- edges ------------------------------------------------------------------------------------------------------- */

/* A warp that knows of it: this block's part of an op is written. */
__device__ __forceinline__ void arrive(const struct run &r, const struct chain_op &op, bool at_end, unsigned last) {
    int lane = threadIdx.x & 31;
    if (exchange_of(op) >= 0) { /* never the last op: somebody has to add */
        if (lane < r.lanes.n_lane) {
            arrive_at_lane(r, lane);
        }
    } else if (lane == 0 && !at_end) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&r.edges->count) : "memory");
    } else if (lane == 0) {
        __threadfence();
        if (atomicAdd(&r.edges->count, 1) + 1 == last) {
            r.edges->base = last;
            r.edges->exchanged += r.lanes.n_exchange;
        }
    }
}

/* All blocks' parts up to `target` arrivals are. */
__device__ __forceinline__ void wait_edge(const struct run &r, unsigned target) {
    if (threadIdx.x == 0) {
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&r.edges->count) : "memory");
        } while ((int)(now - target) < 0);
    }
    sync_warps();
}

/* The other lanes' blocks too, where op i needs them. Before wait_edge. */
__device__ __forceinline__ void wait_lanes(const struct run &r, const struct shared *sh, int i) {
    if (r.lanes.n_exchange > 0 && threadIdx.x - 32 < (unsigned)r.lanes.n_lane) {
        int exchange = exchange_of(sh->op[i - 1]);
        if (exchange >= 0) {
            wait_lane(r, sh, threadIdx.x - 32, exchange);
        }
    }
}

/* The columns of the residual that a block writes begin here. */
__device__ __forceinline__ int share_begin(int k, int block) { return (int)((unsigned)k * block / gridDim.x); }

/* ---- x ----------------------------------------------------------------------------------------------------------- */

/* How x is prepared: known at compile time where it has two columns. */
template <int COLS> __device__ __forceinline__ enum x_mode mode_of(const struct product &p) {
    return COLS == 2 ? X_F16X2 : p.mode;
}

/* The larger of `most` and four |v|, NaN left out: as larger_x unless one is infinite. */
__device__ __forceinline__ float largest4(float most, float4 v) {
    return fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
}
__device__ __forceinline__ float larger_x4(float most, float4 v, enum x_mode mode) {
    return larger_x(larger_x(larger_x(larger_x(most, v.x, mode), v.y, mode), v.z, mode), v.w, mode);
}

/* Four neighbours of a row, as f16: COLS 2 is X_F16X2, with `to_lo` numbers between the two parts; the second part of what is
 * infinite in the first would have to be 0 (zero_beside_infinity). */
template <int COLS>
__device__ __forceinline__ void put_x(uint16_t *hi, int to_lo, float4 in, float up, enum x_mode mode) {
    float v[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (COLS == 1 && mode == X_E4M3_AS_F16) {
            v[i] = f32_of_e4m3(e4m3_of_f32(v[i] / up));
        } else {
            v[i] = (COLS == 1 ? round_bf16(v[i]) : v[i]) * up;
        }
    }
    uint2 h = make_uint2(pack_f16x2(v[0], v[1]), pack_f16x2(v[2], v[3]));
    *(uint2 *)hi = h;
    if (COLS == 2) {
        float2 h01 = __half22float2(*(__half2 *)&h.x), h23 = __half22float2(*(__half2 *)&h.y);
        *(uint2 *)(hi + to_lo) = make_uint2(pack_f16x2((v[0] - h01.x) * 2048.0f, (v[1] - h01.y) * 2048.0f),
                                            pack_f16x2((v[2] - h23.x) * 2048.0f, (v[3] - h23.y) * 2048.0f));
    }
}

/* Seldom: x holds infinities. All computing warps, behind a barrier. */
template <int COLS> __device__ __noinline__ void zero_beside_infinity(uint16_t *hi, int to_lo, int k) {
    for (int i = threadIdx.x; i < k && COLS == 2; i += N_THREAD) {
        if ((hi[i] & 0x7c00) == 0x7c00) {
            hi[to_lo + i] = 0;
        }
    }
    sync_warps();
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* The subtree of parts at p. */
__device__ __forceinline__ float add_parts(const float *p, int parts, int stride) {
    float v = load_fresh(p);
    if (parts >= 2) {
        v += load_fresh(p + stride);
    }
    if (parts >= 4) {
        v += load_fresh(p + 2 * stride) + load_fresh(p + 3 * stride);
    }
    if (parts == 8) {
        v += (load_fresh(p + 4 * stride) + load_fresh(p + 5 * stride)) +
             (load_fresh(p + 6 * stride) + load_fresh(p + 7 * stride));
    }
    return v;
}

/* Products of a normed row in f32, y, with the rows of plain weights that fall to this block: by the last four warps, in the
 * order of linear.cu's rows_kernel. The blocks with the fewest tasks are the last. */
__device__ __forceinline__ void plain_rows(const struct product &p, const float *y, int row, struct shared *sh) {
    int warp = (threadIdx.x >> 5) - (N_WARP - 4), lane = threadIdx.x & 31, chunks = (p.k + 255) / 256;
    int parts = chunks >= 16  ? 4
                : chunks >= 8 ? 2
                              : 1,
        c0 = chunks * warp / parts, c1 = warp < parts ? chunks * (warp + 1) / parts : c0;
    bool exact = p.mode == X_F16X2;
    for (int j = 0, row0 = 0; j < p.n_plain; row0 += p.plain[j++].n) {
        const struct plain_target &t = p.plain[j];
        bool bf16 = t.format == QL_FORMAT_BF16;
        for (int i = gridDim.x - 1 - blockIdx.x; i < row0 + t.n; i += gridDim.x) {
            if (i < row0) {
                continue;
            }
            const uint8_t *w = t.w + (int64_t)(i - row0) * p.k * 2;
            float acc = 0.0f;
            for (int first = c0; first < c1; first += 5) {
                uint4 raw[5]; /* all loads before the first use */
#pragma unroll
                for (int c = 0; c < 5; c++) {
                    int at = (first + c) * 256 + lane * 8;
                    raw[c] = first + c < c1 && at < p.k ? load_stream(w + (int64_t)at * 2) : make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int c = 0; c < 5; c++) {
                    int at = (first + c) * 256 + lane * 8;
                    if (first + c < c1 && at < p.k) {
                        const uint32_t u[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
                        for (int e = 0; e < 8; e++) {
                            uint32_t h = e & 1 ? u[e / 2] >> 16 : u[e / 2] & 0xffff;
                            acc = fmaf(bf16 ? f32_of_bf16(h) : f32_of_f16((uint16_t)h),
                                       exact ? y[at + e] : round_bf16(y[at + e]), acc);
                        }
                    }
                }
            }
            acc = warp_sum(acc);
            if (lane == 0) {
                sh->plain[warp] = acc;
            }
            sync_four();
            if (warp == 0 && lane == 0) {
                float v = sh->plain[0];
                for (int q = 1; q < parts; q++) {
                    v += sh->plain[q];
                }
                t.y[row * t.ldy + i - row0] = v;
            }
            sync_four();
        }
    }
}

/* Residual addition and norm of a row, its columns to xs, for plain weights in f32 to y; the sums are those of norm.cu. This
 * block's share of x + delta waits in `pend` until all blocks have read x. `wait` returns when x and delta are there: all that
 * can be known before is. */
template <int COLS, typename F>
__device__ __forceinline__ void norm_x(const struct product &p, int row, const float4 w[NORM_KEEP], uint16_t *xs,
                                       float *y, struct shared *sh, F wait) {
    /* Eight warps, a lane the work of four neighbouring threads of the norm kernel: columns 4 t .. 4 t + 3 of each 1,024. */
    constexpr int WARPS = NORM_THREADS / 128;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, stride = x_stride(p.k, p.format), parts = p.delta_parts;
    int k = warp < WARPS ? p.k : 0, at = 4 * threadIdx.x;
    bool plain = p.n_plain > 0;
    const float *x = p.x + row * p.ldx, *delta = p.delta + row * p.k;
    const float4 none = make_float4(0, 0, 0, 0);
    const float *x_at = x + at, *delta_at = delta + at, *second_at = delta_at + p.delta_stride;
    int lo = share_begin(p.k, blockIdx.x), share = share_begin(p.k, blockIdx.x + 1) - lo;
    asm volatile("" : "+l"(x_at), "+l"(delta_at), "+l"(second_at), "+r"(lo), "+r"(share), "+r"(k), "+r"(parts));
    wait();
    float4 v[NORM_KEEP];
    if (warp < WARPS) {
        float4 d[2][NORM_KEEP]; /* all loads before the first use */
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            int i = j * NORM_THREADS;
            bool there = i + at < k;
            v[j] = there ? load_fresh4(x_at + i) : none;
            d[0][j] = there && parts >= 1 ? load_fresh4(delta_at + i) : none;
            d[1][j] = there && parts >= 2 ? load_fresh4(second_at + i) : none;
        }
        float sum[4] = {};
        if (parts >= 2) {
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                d[0][j] = add4(d[0][j], d[1][j]);
            }
        }
        if (parts == 4) {
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                int i = j * NORM_THREADS + at;
                if (i < k) {
                    d[0][j] = add4(d[0][j], add4(load_fresh4(delta + 2 * p.delta_stride + i),
                                                 load_fresh4(delta + 3 * p.delta_stride + i)));
                }
            }
        }
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            if (parts > 0) {
                v[j] = add4(v[j], d[0][j]);
            }
            sum[0] = fmaf(v[j].x, v[j].x, sum[0]);
            sum[1] = fmaf(v[j].y, v[j].y, sum[1]);
            sum[2] = fmaf(v[j].z, v[j].z, sum[2]);
            sum[3] = fmaf(v[j].w, v[j].w, sum[3]);
        }
        /* A warp of the norm kernel is eight lanes here; it adds lanes 16, 8, 4, 2, 1 apart. */
#pragma unroll
        for (int distance = 4; distance; distance >>= 1) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], distance);
            }
        }
        if ((lane & 7) == 0) {
            sh->part[warp * 4 + (lane >> 3)] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
        }
    } else if (parts > 0) {
        for (int i = threadIdx.x - 32 * WARPS; i < share; i += N_THREAD - 32 * WARPS) {
            sh->pend[row][i] = load_fresh(x + lo + i) + add_parts(delta + lo + i, parts, p.delta_stride);
        }
    }
    sync_warps();
    float scale = 1.0f / sqrtf(warp_sum(sh->part[lane]) / (float)p.k + p.eps), most = 0.0f, back;
    if (warp < WARPS) {
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            v[j] = make_float4((v[j].x * scale) * (1.0f + w[j].x), (v[j].y * scale) * (1.0f + w[j].y),
                               (v[j].z * scale) * (1.0f + w[j].z), (v[j].w * scale) * (1.0f + w[j].w));
            most = largest4(most, v[j]);
            int i = j * NORM_THREADS + at;
            if (plain && i < k) {
                *(float4 *)(y + i) = v[j];
            }
        }
        most = warp_max(most);
    }
    if (lane == 0) {
        sh->most[warp] = most;
    }
    sync_warps();
    most = warp_max(lane < N_WARP ? sh->most[lane] : 0.0f);
    bool infinite = COLS == 2 && most > 0x1.fffffep127f;
    if (infinite || (COLS == 1 && p.mode != X_E4M3_AS_F16 && most > 0x1.fffffep127f)) {
        most = 0.0f;
        if (warp < WARPS) {
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                most = larger_x4(most, v[j], mode_of<COLS>(p));
            }
            most = warp_max(most);
        }
        sync_warps();
        if (lane == 0) {
            sh->most[warp] = most;
        }
        sync_warps();
        most = warp_max(lane < N_WARP ? sh->most[lane] : 0.0f);
    }
    float up = x_factor(most, mode_of<COLS>(p), &back);
    if (threadIdx.x == 0) {
        sh->xscale[row] = back * WEIGHT_UNIT;
    }
    if (warp < WARPS) {
#pragma unroll
        for (int j = 0; j < NORM_KEEP; j++) {
            int i = j * NORM_THREADS + at;
            if (i < k) {
                put_x<COLS>(xs + i, stride, v[j], up, p.mode);
            }
        }
    }
    sync_warps(); /* the row is there, part and most have been read */
    if (infinite) {
        zero_beside_infinity<COLS>(xs, stride, p.k);
    }
}

/* The block's part of the rows at p.x, once `wait` has returned. */
template <int COLS, typename F>
__device__ __forceinline__ void slices_x(const struct run &r, const struct product &p, uint16_t *xs, struct shared *sh,
                                         F wait) {
    int slices = p.n_slice >> p.log_parts, per = warps_of_slice(slices), each = 32 * per;
    int k = slices * p.ks, stride = x_stride(k, p.format), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int slice = warp / per, t = threadIdx.x - slice * each, at = slice * p.ks;
    int n = slice < slices ? p.ks : 0; /* of this thread's slice */
    const float *x = p.x + (blockIdx.x & (p.parts - 1)) * k + at + 4 * t;
    asm volatile("" : "+l"(x), "+r"(each), "+r"(n), "+r"(t));
    wait();
    for (int row = 0; row < r.n_row; row++, x += p.ldx) {
        float4 v[X_KEEP / 4];
        float most = 0.0f, back;
#pragma unroll
        for (int j = 0; j < X_KEEP / 4; j++) {
            int i = 4 * (j * each + t);
            v[j] = i < n ? load_fresh4(x + 4 * j * each) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < X_KEEP / 4; j++) {
            most = largest4(most, v[j]);
        }
        most = warp_max(most);
        if (lane == 0) {
            sh->most[warp] = most;
        }
        sync_warps();
        auto of_slice = [&]() { return warp_max(lane < per && slice < slices ? sh->most[slice * per + lane] : 0.0f); };
        most = of_slice();
        bool infinite = warp_max(lane < N_WARP ? sh->most[lane] : 0.0f) > 0x1.fffffep127f;
        if (infinite) {
            most = 0.0f;
#pragma unroll
            for (int j = 0; j < X_KEEP / 4; j++) {
                most = larger_x4(most, v[j], mode_of<COLS>(p));
            }
            most = warp_max(most);
            sync_warps();
            if (lane == 0) {
                sh->most[warp] = most;
            }
            sync_warps();
            most = of_slice();
        }
        float up = x_factor(most, mode_of<COLS>(p), &back);
        if (t == 0 && n > 0) {
            sh->xscale[row * slices + slice] = back * WEIGHT_UNIT;
        }
#pragma unroll
        for (int j = 0; j < X_KEEP / 4; j++) {
            int i = 4 * (j * each + t);
            if (i < n) {
                put_x<COLS>(xs + row * COLS * stride + at + i, stride, v[j], up, p.mode);
            }
        }
        sync_warps();
        if (infinite) {
            zero_beside_infinity<COLS>(xs + row * COLS * stride, stride, k);
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

template <int N> struct constant { static constexpr int value = N; };

/* A unit of n tiles: codes, scales and x are shared addresses of this lane's first; into [row][16]. t, row0 and first tell
 * block scales apart. */
template <int FMT, int COLS>
__device__ __forceinline__ void compute(const struct chain_target &t, int row0, int first, int n, uint32_t codes,
                                        uint32_t scales, uint32_t x, int n_row, int k, float *out, int lane) {
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
        uint4 w[N], b[2][KT / 32];
        uint32_t s[N];
        auto load_x = [&](int m) {
#pragma unroll
            for (int j = 0; j < KT / 32; j++) {
                b[m & 1][j] = load_shared4(x + m * KT * 2 + 16 * j);
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
        x += N * KT * 2;
        codes += N * TILE_BYTES;
        scales += N * TILE_SCALE_BYTES;
    };
#pragma unroll 1
    while (i + 5 <= n) {
        tiles(constant<5>{});
    }
#pragma unroll 1
    while (i + 2 <= n) {
        tiles(constant<2>{});
    }
    if (i < n) {
        tiles(constant<1>{});
    }
    sum.store(out, n_row, lane);
}

/* The tree over N slices of a weight row: u is the first slice's first unit, whose neighbours are `step` away. */
template <int N>
__device__ __forceinline__ float add_slices(const float *u, int step, int per_slice, const float *xscale, float f) {
    constexpr int AT_ONCE = N <= 2 ? 8 : N == 4 ? 4 : 2;
    float v[MAX_SLICES], scale[N];
#pragma unroll
    for (int q = 0; q < N; q++) {
        scale[q] = xscale[q];
    }
#pragma unroll 1
    for (int j = 0; j < per_slice; j += AT_ONCE) {
        float l[N][AT_ONCE]; /* all loads before the first use */
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (j + i < per_slice) {
                    l[q][i] = u[(q * per_slice + j + i) * step];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int q = 0; q < N; q++) {
                if (j + i < per_slice) {
                    v[q] = i == 0 && j == 0 ? l[q][i] : v[q] + l[q][i];
                }
            }
        }
    }
#pragma unroll
    for (int q = 0; q < N; q++) {
        v[q] = __fmul_rn(v[q], scale[q] * f);
    }
    return slice_tree(v, N);
}

/* The finishing warp, all products of the run: a task when its units are in, in order; after the last of a product it says
 * that the block's part is written. Half a warp has a tile's rows: of GATED one half adds up gate, the other up; slices of a
 * row-parallel product are shared by the halves. */
__device__ void finish_all(const struct run &r, struct shared *sh, const uint8_t *room) {
    int n = 0, lane = threadIdx.x & 31, in_tile = lane & 15, half = lane >> 4;
#pragma unroll 1
    for (int i = 0; i < r.n_op; i++) {
        if (sh->op[i].kind != PRODUCT) {
            continue;
        }
        const struct product &p = sh->op[i].product;
        int slices = p.n_slice >> p.log_parts, step = r.n_row * 16;
        bool gated = p.epilogue == GATED, split = !gated && slices > 1;
        int count = split ? slices / 2 : slices, q0 = split ? half * count : 0;
        int from = in_tile + ((gated ? half * p.units : 0) + q0 * p.per_slice) * step;
#pragma unroll 1
        for (int left = p.tasks - 1, task = blockIdx.x; left >= 0; left--, task += gridDim.x, n++) {
            int set = n % SUM_SETS, row_tile = task >> p.log_parts, which = 0;
            while (!gated && which + 1 < p.n_target && row_tile >= p.target[which].row_tiles) {
                row_tile -= p.target[which++].row_tiles;
            }
            const struct chain_target &t = p.target[which], &mine = p.target[gated ? half : which];
            const struct extra *x = (const struct extra *)(room + r.extras_at + n % AHEAD * r.extra_bytes);
            const float *u = (const float *)(room + r.sets_at) + set * r.set_floats + from,
                        *scale = mine.row_scale ? x->scale[gated ? half : 0] + in_tile : &mine.factor;
            bool conv = p.epilogue == CONV && which == 0;
            int wr = row_tile * TILE_ROWS + in_tile, ldy = conv ? t.n : t.ldy, s = -1;
            float *y = (conv ? p.u : t.y + (task & (p.parts - 1)) * p.part_stride) + wr, *tail = NULL;
            if (lane == 0) { /* for the arrivals that there are not */
                barrier_arrive(shared_address(&sh->summed[set]),
                               SUM_ARRIVALS - all_units(p) - (left == 0 ? N_WARP : 0));
            }
            barrier_wait(shared_address(&sh->summed[set]), n / SUM_SETS & 1);
            float f = *scale, x0 = 0.0f, x1 = 0.0f, x2 = 0.0f;
            float4 w = conv ? x->conv[in_tile] : make_float4(0, 0, 0, 0);
#pragma unroll 1
            for (int row = 0; row < r.n_row; row++) {
                const float *xscale = sh->xscale + row * slices + q0;
                float v;
                switch (count) {
                case 1: v = add_slices<1>(u + row * 16, step, p.per_slice, xscale, f); break;
                case 2: v = add_slices<2>(u + row * 16, step, p.per_slice, xscale, f); break;
                case 4: v = add_slices<4>(u + row * 16, step, p.per_slice, xscale, f); break;
                default: v = add_slices<8>(u + row * 16, step, p.per_slice, xscale, f); break;
                }
                float other = __shfl_down_sync(0xffffffffu, v, 16);
                v = split ? v + other : v;
                if (conv) {
                    if (s < 0 || row == sh->seg_row[s + 1]) {
                        s++;
                        bool fresh = sh->seg_pos[s] == 0;
                        x0 = fresh ? 0.0f : x->tail[s][0][in_tile];
                        x1 = fresh ? 0.0f : x->tail[s][1][in_tile];
                        x2 = fresh ? 0.0f : x->tail[s][2][in_tile];
                        tail = p.tail + (int64_t)sh->seg_slot[s] * 3 * t.n + wr;
                    }
                    if (half == 0 && row + 1 == sh->seg_row[s + 1]) {
                        tail[0] = x1;
                        tail[t.n] = x2;
                        tail[2 * t.n] = v;
                    }
                    float now = v;
                    v = fmaf(w.w, v, fmaf(w.z, x2, fmaf(w.y, x1, w.x * x0)));
                    x0 = x1;
                    x1 = x2;
                    x2 = now;
                }
                if (conv || gated) {
                    v = silu(v);
                }
                if (half == 0 && p.exchange < 0) {
                    y[row * ldy] = gated ? v * other : v;
                } else if (half == 0) {
                    share_sum(r.lanes, sh, p.exchange,
                              (r.lanes.lane * p.parts + (task & (p.parts - 1))) * p.part_stride + row * ldy + wr, v);
                }
            }
            __syncwarp();
            if (lane == 0) {
                asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&sh->finished[set])),
                             "r"(n / SUM_SETS + 1)
                             : "memory");
            }
            if (left == 0) {
                arrive(r, sh->op[i], i + 1 == r.n_op, sh->base + gridDim.x * r.n_op);
            }
        }
    }
}

/* How far a warp's units are from each other, four distances in turn. Dealt to 16 places, two more than there are warps: the
 * last two go in turn to the warps of those schedulers that have one computing warp less, so that all have the same work. */
__device__ __forceinline__ uint32_t distances(int warp, int dealt) {
    uint32_t all = 0x01010101u * dealt;
    if (dealt <= N_WARP || (warp & 2) == 0 || warp >= 12) {
        return all;
    }
    int at = 8 * (warp >> 2), first = 14 + (warp & 1) - warp;
    return (all & ~(0xffffu << at)) | (first | (dealt - first) << 8) << at;
}

/* The units of a product are dealt to the warps in turn, from the first warp and the block's first task on. A warp walks over
 * its own; it says of each that its sums are in, and at the end once more that it is done. */
template <int FMT, int COLS>
__device__ __forceinline__ void multiply(const struct run &r, const struct product &p, const struct unit_at *unit,
                                         uint8_t *room, struct shared *sh) {
    constexpr int KT = tile_k(FMT);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int pair = FMT == QL_FORMAT_NVFP4 ? p.pair : 0, all = all_units(p) >> pair;
    int stages = p.epilogue == GATED ? 2 * p.stages : p.stages, task0 = p.task0, end = task0 + p.tasks;
    uint32_t steps = distances(warp, p.dealt);
    int column =
        min(lane >> 2, r.n_row * COLS - 1); /* results of the columns that there are not depend on them alone */
    uint32_t x = shared_address(room + r.x_at) + column * x_stride(p.k >> p.log_parts, FMT) * 2 + (lane & 3) * (KT / 2),
             full = shared_address(sh->full);
    int u = warp, task = warp < p.dealt ? task0 : end, stage = p.stage0;
#pragma unroll 1
    for (;; u += steps & 0xff, steps = __funnelshift_r(steps, steps, 8)) {
        for (; u >= all; u -= all, task++) {
            stage += stages;
        }
        if (task >= end) {
            break;
        }
        uint4 raw = load_shared4(shared_address(unit + u));
        const struct unit_at w = {(uint16_t)raw.x,        (uint16_t)(raw.x >> 16), raw.y, (uint16_t)raw.z,
                                  (uint8_t)(raw.z >> 16), (uint8_t)(raw.z >> 24),  raw.w};
        int set = (unsigned)task % SUM_SETS, in = stage + w.stage, turn = in * r.by_slot >> 16,
            slot = in - turn * r.n_slot;
        int fresh_lane = lane; /* so that nothing made of it takes a register outside the loop */
        asm volatile("" : "+r"(fresh_lane));
        uint32_t slot_at = shared_address(room + RING_AT) + slot * SLOT_BYTES;
        struct piece_of q = {};
        if (FMT == QL_FORMAT_FP8_BLOCK) {
            q = find_piece_of(p, (int)blockIdx.x + (task - task0) * (int)gridDim.x, u >= p.units);
        }
        if (task >= SUM_SETS) { /* whose sums were there */
            wait_finished(sh, task - SUM_SETS);
        }
        barrier_wait(full + slot * 8, turn & 1);
        uint32_t codes = slot_at + w.codes + fresh_lane * 16, scales = slot_at + w.scales + fresh_lane * 2,
                 x_at = x + w.x;
        float *out = (float *)(room + r.sets_at) + set * r.set_floats + (u << pair) * r.n_row * 16;
        int tiles = w.tiles, second = w.second;
#pragma unroll 1
        for (;;) {
            compute<FMT, COLS>(q.t ? *q.t : p.target[0], q.row_tile * TILE_ROWS, q.part * tile_of(p, p.units) + w.first,
                               tiles, codes, scales, x_at, r.n_row, p.k, out, fresh_lane);
            if (FMT != QL_FORMAT_NVFP4 || second == 0) {
                break;
            }
            codes += tiles * TILE_BYTES;
            scales += tiles * TILE_SCALE_BYTES;
            x_at += tiles * KT * 2;
            out += r.n_row * 16;
            tiles = second;
            second = 0;
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(full + (uint32_t)sizeof sh->full + slot * 8, 1 << pair);
            barrier_arrive(shared_address(&sh->summed[set]), 1 << pair);
        }
    }
    if (end > task0) {
        if (end > SUM_SETS) {
            wait_finished(sh, end - 1 - SUM_SETS);
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(shared_address(&sh->summed[(end - 1) % SUM_SETS]), 1);
        }
    }
}

/* ---- recurrence -------------------------------------------------------------------------------------------------- */

/* The rows of a segment and head, its state loaded ahead of the edge at `target` where there is one to wait for. After the
 * block's last task it says that the result is written; the state, which nobody waits for, is stored after that. Sums in the
 * order of gdn.cu's step_kernel and norm.cu's gated_norm. */
__device__ __forceinline__ void recur(const struct run &r, const struct shared *sh, const struct recurrence &g,
                                      int task, float *room, bool edge, unsigned target, bool at_end) {
    const ql_gdn_args &a = g.a;
    int s = task / a.n_value_head, j = task - s * a.n_value_head;
    float *q = room, *k = q + D, *z = k + D, *norm = z + D, *part = norm + D; /* part: [8][D] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int key = (a.value_head0 + j) / a.group - a.key_head0, width = (2 * a.n_key_head + a.n_value_head) * D;
    bool active = warp < 8, fresh = sh->seg_pos[s] == 0; /* a warp holds 16 rows of the state, a lane four columns */
    float *state = a.state + (((int64_t)sh->seg_slot[s] * a.n_value_head + j) * D + warp * 16) * D + 4 * lane,
          st[4][16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float4 v = active && !fresh ? load_fresh4(state + i * D) : make_float4(0, 0, 0, 0);
        st[0][i] = v.x;
        st[1][i] = v.y;
        st[2][i] = v.z;
        st[3][i] = v.w;
    }
    float a_log = __ldg(a.a_log + j), dt_bias = __ldg(a.dt_bias + j);
    if (edge) {
        wait_edge(r, target);
    }
    for (int row = sh->seg_row[s]; row < sh->seg_row[s + 1]; row++) {
        const float *u = a.u + (int64_t)row * width, *v = u + (2 * a.n_key_head + j) * D + 4 * lane;
        const float *x = warp == 3   ? g.norm
                         : warp == 2 ? g.z + (row * a.n_value_head + j) * D
                                     : u + ((warp ? a.n_key_head : 0) + key) * D;
        float4 v4 = active ? load_fresh4(v) : make_float4(0, 0, 0, 0);
        float value[4] = {v4.x, v4.y, v4.z, v4.w}, h[4];
        float y = load_fresh(a.a + row * a.n_value_head + j), b = load_fresh(a.b + row * a.n_value_head + j);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            h[c] = warp < 4 ? load_fresh(x + lane + 32 * c) : 0.0f;
        }
        sync_warps(); /* the last row's numbers have been read */
        if (warp < 4) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = fmaf(h[i], h[i], sum);
            }
            float scale = 1.0f / sqrtf(warp_sum(sum) + 1e-6f), factor = warp ? 1.0f : 0.08838834764831845f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                room[warp * D + lane + 32 * i] = warp == 3 ? h[i] : warp == 2 ? silu(h[i]) : (h[i] * scale) * factor;
            }
        }
        y += dt_bias;
        float keep = expf(-expf(a_log) * (y > 20.0f ? y : log1pf(expf(y))));
        float beta = sigmoid(b), sum[4] = {}, out[4] = {};
        sync_warps();
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
                g.y[(row * a.n_value_head + j) * D + at] = ((h[i] * scale) * norm[at]) * z[at];
            }
        }
    }
    if (warp == 0 && task + (int)gridDim.x >= r.n_seg * a.n_value_head) {
        __syncwarp();
        arrive(r, sh->op[sh->at_op[0]], at_end, sh->base + gridDim.x * r.n_op);
    }
    if (active) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            *(float4 *)(state + i * D) = make_float4(st[0][i], st[1][i], st[2][i], st[3][i]);
        }
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* What op i - 1 left in `pend`, if it did: all blocks have read x since. */
__device__ __noinline__ void write_residual(const struct shared *sh, int n_row, int i) {
    const struct product &p = sh->op[i > 0 ? i - 1 : 0].product;
    if (i > 0 && sh->op[i - 1].kind == PRODUCT && p.residual) {
        int lo = share_begin(p.k, blockIdx.x), n = share_begin(p.k, blockIdx.x + 1) - lo;
        int row = threadIdx.x / PEND, e = threadIdx.x % PEND;
        if (row < n_row && e < n) {
            p.residual[row * p.ldx + lo + e] = sh->pend[row][e];
        }
    }
}

template <int COLS> __device__ void compute_all(const struct run &r, struct shared *sh, uint8_t *room) {
    uint16_t *xs = (uint16_t *)(room + r.x_at);
    volatile int *at_op = &sh->at_op[threadIdx.x >> 5]; /* not in a register, which would be one too many */
    *at_op = 0;
    __syncwarp();
#pragma unroll 1
    while (*at_op < r.n_op) {
        int i = *at_op;
        bool edge = i > 0, arrived = false; /* by the finishing warp */
        unsigned target = sh->base + gridDim.x * i;
        enum chain_op_kind kind = sh->op[i].kind;
        if (kind == PRODUCT) {
            const struct product &p = sh->op[i].product;
            for (int u = threadIdx.x; u < all_units(p) >> p.pair; u += N_THREAD) {
                sh->unit[i & 1][u] = locate_unit(p, u << p.pair);
            }
        }
        auto cross = [&]() {
            if (edge) {
                wait_lanes(r, sh, *at_op);
                wait_edge(r, target);
            }
        };
        if (kind == PRODUCT) {
            const struct product &p = sh->op[i].product;
            if (p.norm) {
                float4 w[NORM_KEEP]; /* on their way during the wait */
#pragma unroll
                for (int j = 0; j < NORM_KEEP; j++) {
                    int at = j * NORM_THREADS + 4 * threadIdx.x;
                    w[j] =
                        threadIdx.x < NORM_THREADS / 4 && at < p.k ? load_fresh4(p.norm + at) : make_float4(0, 0, 0, 0);
                }
                bool full = edge && sh->op[i - 1].kind == PRODUCT && sh->op[i - 1].product.residual;
                for (int row = 0; row < r.n_row; row++) {
                    int stride = x_stride(p.k, p.format) * COLS;
                    float *y = (float *)(xs + r.n_row * stride);
                    norm_x<COLS>(p, row, w, xs + row * stride, y, sh, [&]() {
                        if (row == 0) {
                            cross();
                            if (full) { /* seldom: pend is wanted at once */
                                write_residual(sh, r.n_row, *at_op);
                                sync_warps();
                            }
                        }
                    });
                    if (p.n_plain > 0 && threadIdx.x >= N_THREAD - 128) {
                        plain_rows(p, y, row, sh);
                    }
                }
            } else {
                slices_x<COLS>(r, p, xs, sh, cross);
                write_residual(sh, r.n_row, *at_op);
            }
            const struct unit_at *unit = sh->unit[*at_op & 1];
            switch (p.format) {
            case QL_FORMAT_NVFP4: multiply<QL_FORMAT_NVFP4, COLS>(r, p, unit, room, sh); break;
            case QL_FORMAT_FP8_BLOCK: multiply<QL_FORMAT_FP8_BLOCK, COLS>(r, p, unit, room, sh); break;
            default: multiply<QL_FORMAT_FP8_CHANNEL, COLS>(r, p, unit, room, sh); break;
            }
            arrived = p.tasks > 0;
        } else if (kind == RECURRENCE) {
            const struct recurrence &g = sh->op[i].gdn;
            for (int task = blockIdx.x; task < r.n_seg * g.a.n_value_head; task += gridDim.x) {
                recur(r, sh, g, task, (float *)xs, edge, target, i + 1 == r.n_op);
                edge = false;
                arrived = true;
            }
            if (edge) {
                wait_edge(r, target);
            }
            write_residual(sh, r.n_row, *at_op);
        } else {
            cross();
            write_residual(sh, r.n_row, *at_op);
            if (kind == PROOF) {
                share_proof(r.lanes, sh, sh->op[*at_op].proof, blockIdx.x * N_THREAD + threadIdx.x,
                            gridDim.x * N_THREAD);
            }
            const struct combine c = kind == COMBINE ? sh->op[*at_op].combine : combine{};
            for (int e = blockIdx.x * N_THREAD + threadIdx.x; e < c.n; e += gridDim.x * N_THREAD) {
                c.to[e] = add_parts(c.from + e, c.parts, c.stride);
            }
        }
        if (!arrived) {
            sync_warps();
            if (threadIdx.x < 32) {
                arrive(r, sh->op[*at_op], *at_op + 1 == r.n_op, sh->base + gridDim.x * r.n_op);
            }
        }
        i = *at_op + 1;
        __syncwarp();
        *at_op = i;
        __syncwarp();
    }
    if (sh->op[r.n_op - 1].kind == PRODUCT && sh->op[r.n_op - 1].product.residual) {
        wait_edge(r, sh->base + gridDim.x * r.n_op);
        write_residual(sh, r.n_row, r.n_op);
    }
}
#endif

template <int COLS>
__global__ void __launch_bounds__(N_THREAD + 64, 1) chain_kernel(const __grid_constant__ struct run args) {
#if HAVE_WGMMA
    extern __shared__ __align__(128) uint8_t room[];
    struct shared *sh = (struct shared *)room;
    wait_previous();
    /* Sixteen bytes at a time: constants that differ between lanes are read one after another. */
    for (int i = threadIdx.x; i < args.n_op * (int)(sizeof(struct chain_op) / 16); i += N_THREAD + 64) {
        ((uint4 *)sh->op)[i] = ((const uint4 *)args.op)[i];
    }
    if (args.n_seg > 0 && threadIdx.x <= args.n_seg) {
        int i = threadIdx.x;
        sh->seg_row[i] = args.seg_row[i];
        if (i < args.n_seg) {
            sh->seg_pos[i] = args.seg_pos[i];
            sh->seg_slot[i] = args.seg_slot[i];
        }
    }
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < args.n_slot; i++) {
            barrier_init(shared_address(&sh->full[i]), 1);
            barrier_init(shared_address(&sh->empty[i]), 8);
        }
        for (int i = 0; i < SUM_SETS; i++) {
            barrier_init(shared_address(&sh->summed[i]), SUM_ARRIVALS);
            sh->finished[i] = 0;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) { /* this block's way through the products */
        int task = 0, stage = 0;
        sh->base = *(volatile unsigned *)&args.edges->base;
        sh->exchanged = *(volatile unsigned *)&args.edges->exchanged;
        for (int i = 0; i < args.n_op; i++) {
            place_sums(sh, sh->op[i]);
            if (sh->op[i].kind == PRODUCT) {
                struct product &p = sh->op[i].product;
                p.tasks = p.n_task > (int)blockIdx.x ? (p.n_task - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
                p.task0 = task;
                p.stage0 = stage;
                task += p.tasks;
                stage += p.tasks * p.stages * (p.epilogue == GATED ? 2 : 1);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x >= N_THREAD + 32) {
        finish_all(args, sh, room);
    } else if (threadIdx.x < N_THREAD) {
        compute_all<COLS>(args, sh, room);
    } else if (threadIdx.x == N_THREAD) {
        fetch(args, sh, room);
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
    auto kernel = cols == 2 ? chain_kernel<2> : chain_kernel<1>;
    CU_TRY(dev, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX),
           "chain");
    CU_TRY(dev, cudaLaunchKernelEx(&config, kernel, *r), "chain");
    return QL_OK;
}
