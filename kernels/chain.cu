/* chain on the device: a run of a generation step's ops in one persistent kernel, contract in chain.h.
 *
 * One block an SM. Its last warp only fetches: it walks over the run's products and keeps a ring of shared memory filled with
 * the codes and scales that this block will multiply, in order, across the edges between ops. Weights do not depend on what
 * the ops compute, so memory need not wait for an edge. The other warps compute.
 *
 *   product     all blocks: x is prepared by every block for itself (residual addition, norm, largest element, f16 parts) into
 *               shared memory; then units of 16 weight rows in the order of cuda/unit.cuh, dealt to the warps in turn. A task is
 *               the units of a tile of weight rows; the warps take turns at finishing tasks: units are added up, scaled,
 *               slices added as a tree, and what follows elementwise is applied (convolution, gated activation)
 *   recurrence  a block a head and segment: delta rule and gated norm
 *   edge        a counter in device memory that every block raises when its part of an op is written, and waits for before
 *               it reads what others wrote
 *
 * A row-parallel product of few row tiles is cut into parts of whole slices, subtrees of the tree, so that all SMs have work;
 * who reads it adds the parts. Other sums have the order of the kernels that run alone, so a step may go either way.
 *
 * What shapes this code (bench/NOTES.md): a load that misses the first-level cache waits behind all that the ring has asked
 * for, so nothing on the way of a unit may touch device memory, spilled registers included.
 */
#include "kernels/chain.h"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/unit.cuh"

#include <stddef.h>

enum {
    N_WARP = 12,
    N_THREAD = 32 * N_WARP,
    SCALES_AT = 8 * 5 * TILE_BYTES, /* in a slot: of 8 units of NVFP4; 4 of FP8 have none */
    SLOT_BYTES = SCALES_AT + 8 * 5 * TILE_SCALE_BYTES,
    MAX_SLOTS = 8,
    IN_FLIGHT = 3, /* stages asked for and not there: more only makes every other load wait longer */
    MAX_ROWS = 2,  /* the x of more would take the ring's room: one by one they are faster */
    SUM_SETS = 4,  /* tasks whose units wait for their sum */
    AHEAD = 8,     /* tasks whose finishing data has been fetched; more than a ring holds */
    MAX_OPS = 24,
    MAX_UNITS = 64,      /* of a piece */
    NORM_THREADS = 1024, /* of the norm kernel, whose order of sums this one keeps */
    NORM_KEEP = 6,
    X_KEEP = 24,
    X_MOST = 72 * 1024, /* bytes of x in shared memory that are worth fewer parts */
    PEND = 64,          /* residual numbers of a row that a block writes */
    D = 128,
    SHARED_MAX = 227 * 1024
};

/* ---- the run, by value to the kernel ----------------------------------------------------------------------------- */

enum op_kind { PRODUCT, RECURRENCE, COMBINE };
enum epilogue { STORE, CONV, GATED };

struct plain_target { /* BF16 or F16 weights */
    const uint8_t *w;
    float *y;
    int ldy, n, format;
};

/* As linear.cuh's, without what the common shape makes superfluous. */
struct chain_target {
    const uint8_t *w;
    const void *scale;
    float *y;
    int ldy, n, row_tiles;
    float factor;
    int16_t row_off, col_off;
    bool row_scale;
};

struct product {
    struct chain_target target[3];
    struct plain_target plain[2];
    int n_target, n_plain;
    int format, epilogue; /* epilogue of target 0; CONV or GATED */
    enum x_mode mode;
    int k, ks, n_slice, parts;
    int tiles, per_slice; /* of a slice: column tiles, units */
    int units, stages;    /* of a piece */
    int dealt;            /* warps that share the units */
    int n_task, log_parts;
    int by_slice;    /* 2^16 / per_slice, rounded up */
    int part_stride; /* between parts of y */
    /* x: rows of ldx, or the norm of x + delta */
    const float *x;
    const float *norm, *delta;
    int ldx, delta_parts, delta_stride;
    float *residual; /* where x + delta goes; NULL without delta */
    float eps;
    /* CONV */
    const float *conv;
    float *tail, *u;
};

struct recurrence {
    struct ql_gdn_args a;
    const float *z, *norm;
    float *y;
    float eps;
};

struct combine {
    const float *from;
    float *to;
    int parts, n, stride;
};

struct chain_op {
    enum op_kind kind;
    union {
        struct product product;
        struct recurrence gdn;
        struct combine combine;
    };
};

/* Arrivals at the edges, in device memory: `count` only rises, `base` is what it was when the run began. */
struct edges {
    unsigned count, base;
};

struct run {
    int n_op, n_row, n_seg, n_slot, by_slot, in_flight, /* by_slot: 2^16 / n_slot, rounded up */
        x_bytes, set_floats, extra_bytes;
    const int32_t *seg_row, *seg_pos, *seg_slot; /* as ql_batch's */
    struct edges *edges;
    struct chain_op op[MAX_OPS];
};

/* What finishes a task beyond its sums, fetched with its weights. */
struct extra {
    float scale[2][TILE_ROWS]; /* of a piece's rows */
    float4 conv[TILE_ROWS];
    float tail[][3][TILE_ROWS]; /* of each segment */
};

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

struct shared {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS];
    float part[32], most[N_WARP];
    float xscale[MAX_ROWS * MAX_SLICES];
    float norm_scale[MAX_ROWS];
    float pend[MAX_ROWS][PEND];
    float plain[4];            /* of each warp */
    uint64_t summed[SUM_SETS]; /* a task's units are in their set: as many arrivals as computing warps */
    int finished[SUM_SETS];    /* tasks that have left the set */
    uint32_t unit[MAX_UNITS];  /* of the op: see pack_unit */
    int seg_row[MAX_ROWS + 1], seg_pos[MAX_ROWS], seg_slot[MAX_ROWS];
    struct run run; /* as much of it as there are ops */
};

/* Units that are fetched together. */
__device__ __host__ __forceinline__ int stage_units(int format) { return format == QL_FORMAT_NVFP4 ? 8 : 4; }

/* Warps that prepare a slice of x. */
__device__ __host__ __forceinline__ int warps_of_slice(int slices) { return slices < N_WARP ? N_WARP / slices : 1; }

/* Stride of a column of prepared x in shared memory: the padding keeps the columns' loads in different banks. */
__device__ __host__ __forceinline__ int x_stride(int k, int format) { return k + (format == QL_FORMAT_NVFP4 ? 8 : 32); }

#if HAVE_WGMMA
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int n) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
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
__device__ __forceinline__ uint4 load_shared4(const uint4 *p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared_address(p)));
    return v;
}
__device__ __forceinline__ uint32_t load_shared_u16(const void *p) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared_address(p)));
    return v;
}

/* Of the computing warps. */
__device__ __forceinline__ void sync_warps(void) { asm volatile("bar.sync 1, 384;" ::: "memory"); }
__device__ __forceinline__ void sync_four(void) { asm volatile("bar.sync 2, 128;" ::: "memory"); }

/* ---- walking over a product, the same for the fetching and the computing warps ------------------------------------- */

struct walk {
    int stage, unit, task; /* so far in the run; unit: the warp whose turn it is; stages lie in slots in turn */
};

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

/* Where a unit lies: first column tile of its piece, tiles before it in its stage, its tiles, its stage in the piece. */
__device__ __forceinline__ uint32_t pack_unit(const struct product &p, int unit) {
    int per_stage = stage_units(p.format), first = tile_of(p, unit);
    return (uint32_t)(first | (first - tile_of(p, unit / per_stage * per_stage)) << 12 |
                      (tile_of(p, unit + 1) - first) << 20 | unit / per_stage << 24);
}

/* ---- fetching ---------------------------------------------------------------------------------------------------- */

__device__ void fetch(const struct run &r, const struct shared *sh, uint8_t *ring, uint8_t *extras) {
    int stage = 0, n_task = 0;
    for (int i = 0; i < r.n_op; i++) {
        if (r.op[i].kind == RECURRENCE) {
            const ql_gdn_args &a = r.op[i].gdn.a;
            for (int task = blockIdx.x; task < r.n_seg * a.n_value_head; task += gridDim.x) {
                int s = task / a.n_value_head, j = task % a.n_value_head;
                prefetch(a.state + ((int64_t)sh->seg_slot[s] * a.n_value_head + j) * D * D, D * D * 4);
            }
        }
        if (r.op[i].kind != PRODUCT) {
            continue;
        }
        const struct product &p = r.op[i].product;
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
                    bulk_copy(shared_address(to), codes + first * TILE_BYTES, (last - first) * TILE_BYTES, full);
                    if (fp4) {
                        bulk_copy(shared_address(to + SCALES_AT), scales + first * TILE_SCALE_BYTES,
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
}

/* ---- edges ------------------------------------------------------------------------------------------------------- */

/* This block's part of an op is written. */
__device__ __forceinline__ void arrive(const struct run &r, bool at_end, unsigned last) {
    sync_warps();
    if (threadIdx.x == 0) {
        if (!at_end) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&r.edges->count) : "memory");
        } else {
            __threadfence();
            if (atomicAdd(&r.edges->count, 1) + 1 == last) {
                r.edges->base = last;
            }
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

/* ---- x ----------------------------------------------------------------------------------------------------------- */

template <int COLS> __device__ __forceinline__ float larger(float most, float v, enum x_mode mode) {
    v = fabsf(v);
    return v > most && ((COLS == 1 && mode == X_E4M3_AS_F16) || v < __uint_as_float(0x7f800000u)) ? v : most;
}

/* The factor of a row and slice, and what undoes it (linear.cu's prepare_x). */
template <int COLS> __device__ __forceinline__ float x_factor(float most, enum x_mode mode, float *back) {
    if (COLS == 1 && mode == X_E4M3_AS_F16) {
        *back = fmaxf(most, 0x1p-126f) / 448.0f;
        return *back;
    }
    return scale_to_f16(most, back);
}

/* COLS 2: X_F16X2, `to_lo` numbers between the two. */
template <int COLS>
__device__ __forceinline__ void put_x(uint16_t *hi, int to_lo, float v, float up, enum x_mode mode) {
    if (COLS == 2) {
        v *= up;
        __half h = __float2half_rn(v);
        *hi = __half_as_ushort(h);
        float rest = (v - __half2float(h)) * 2048.0f;
        hi[to_lo] = __half_as_ushort(__float2half_rn(fabsf(v) <= 65504.0f ? rest : 0.0f));
    } else if (mode == X_E4M3_AS_F16) {
        *hi = __half_as_ushort(__float2half_rn(f32_of_e4m3(e4m3_of_f32(v / up))));
    } else {
        *hi = __half_as_ushort(__float2half_rn(round_bf16(v) * up));
    }
}

/* The subtree of parts at p. */
__device__ __forceinline__ float add_parts(const float *p, int parts, int stride) {
    float v = load_fresh(p);
    if (parts >= 2) {
        v += load_fresh(p + stride);
    }
    if (parts == 4) {
        v += load_fresh(p + 2 * stride) + load_fresh(p + 3 * stride);
    }
    return v;
}

/* Residual addition and norm of all rows; the sums are those of norm.cu. This block's share of x + delta waits in `pend`
 * until all blocks have read x. */
template <int COLS> __device__ __noinline__ void norm_x(const struct product &p, uint16_t *xs, struct shared *sh) {
    constexpr int VIRTUAL = NORM_THREADS / 32,
                  Q = (VIRTUAL + N_WARP - 1) / N_WARP; /* the norm kernel's warps, several to one */
    const struct run &r = sh->run;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, stride = x_stride(p.k, p.format), k = p.k,
        parts = p.delta_parts;
    int lo = (int)((int64_t)k * blockIdx.x / gridDim.x), hi = (int)((int64_t)k * (blockIdx.x + 1) / gridDim.x);
    auto index = [&](int q, int j) { /* k or more: none */
                                     int v = warp + q * N_WARP;
                                     return v < VIRTUAL ? j * NORM_THREADS + v * 32 + lane : k;
    };
    for (int row = 0; row < r.n_row; row++) {
        const float *x = p.x + row * p.ldx, *delta = p.delta + row * k;
        float v[Q][NORM_KEEP], w[Q][NORM_KEEP], d[2][Q][NORM_KEEP]; /* all loads before the first use */
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                int i = index(q, j);
                v[q][j] = i < k ? load_fresh(x + i) : 0.0f;
                d[0][q][j] = i < k && parts >= 1 ? load_fresh(delta + i) : 0.0f;
                d[1][q][j] = i < k && parts >= 2 ? load_fresh(delta + p.delta_stride + i) : 0.0f;
            }
        }
        float sums[Q];
#pragma unroll
        for (int q = 0; q < Q; q++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                int i = index(q, j);
                if (parts > 0 && i < k) {
                    float add = parts >= 2 ? d[0][q][j] + d[1][q][j] : d[0][q][j];
                    if (parts == 4) {
                        add += load_fresh(delta + 2 * p.delta_stride + i) + load_fresh(delta + 3 * p.delta_stride + i);
                    }
                    v[q][j] += add;
                    if (i >= lo && i < hi) {
                        sh->pend[row][i - lo] = v[q][j];
                    }
                }
                sum = fmaf(v[q][j], v[q][j], sum);
            }
            sums[q] = sum;
        }
#pragma unroll
        for (int q = 0; q < Q; q++) { /* on their way during the sum */
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                int i = index(q, j);
                w[q][j] = i < k ? load_fresh(p.norm + i) : 0.0f;
            }
        }
#pragma unroll
        for (int q = 0; q < Q; q++) {
            float sum = warp_sum(sums[q]);
            if (lane == 0 && warp + q * N_WARP < VIRTUAL) {
                sh->part[warp + q * N_WARP] = sum;
            }
        }
        sync_warps();
        float scale = 1.0f / sqrtf(warp_sum(sh->part[lane]) / (float)k + p.eps), most = 0.0f, back;
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                v[q][j] = (v[q][j] * scale) * (1.0f + w[q][j]);
                most = larger<COLS>(most, v[q][j], p.mode);
            }
        }
        most = warp_max(most);
        if (lane == 0) {
            sh->most[warp] = most;
        }
        sync_warps();
        float up = x_factor<COLS>(warp_max(lane < N_WARP ? sh->most[lane] : 0.0f), p.mode, &back);
        if (threadIdx.x == 0) {
            sh->xscale[row] = back * WEIGHT_UNIT;
            sh->norm_scale[row] = scale;
        }
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < NORM_KEEP; j++) {
                int i = index(q, j);
                if (i < k) {
                    put_x<COLS>(xs + row * COLS * stride + i, stride, v[q][j], up, p.mode);
                }
            }
        }
        sync_warps(); /* the row is there, part and most have been read */
    }
}

/* The block's part of the rows at p.x. */
template <int COLS> __device__ __noinline__ void slices_x(const struct product &p, uint16_t *xs, struct shared *sh) {
    const struct run &r = sh->run;
    int slices = p.n_slice >> p.log_parts, per = warps_of_slice(slices), each = 32 * per;
    int k = slices * p.ks, stride = x_stride(k, p.format), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int slice = warp / per, t = threadIdx.x - slice * each, at = slice * p.ks;
    int n = slice < slices ? p.ks : 0; /* of this thread's slice */
    for (int row = 0; row < r.n_row; row++) {
        const float *x = p.x + row * p.ldx + (blockIdx.x & (p.parts - 1)) * k + at;
        float v[X_KEEP], most = 0.0f, back;
#pragma unroll
        for (int j = 0; j < X_KEEP; j++) {
            int i = j * each + t;
            v[j] = i < n ? load_fresh(x + i) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < X_KEEP; j++) {
            most = larger<COLS>(most, v[j], p.mode);
        }
        most = warp_max(most);
        if (lane == 0) {
            sh->most[warp] = most;
        }
        sync_warps();
        most = warp_max(lane < per ? sh->most[slice * per + lane] : 0.0f);
        float up = x_factor<COLS>(most, p.mode, &back);
        if (t == 0 && n > 0) {
            sh->xscale[row * slices + slice] = back * WEIGHT_UNIT;
        }
#pragma unroll
        for (int j = 0; j < X_KEEP; j++) {
            int i = j * each + t;
            if (i < n) {
                put_x<COLS>(xs + row * COLS * stride + at + i, stride, v[j], up, p.mode);
            }
        }
        sync_warps();
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

template <int N> struct constant { static constexpr int value = N; };

/* A unit of n tiles whose codes and scales begin at this lane's first; into [row][16]. */
template <int FMT, int COLS>
__device__ __forceinline__ void compute(const struct chain_target &t, int first, int n, const uint8_t *codes,
                                        const uint8_t *scales, const uint16_t *x, int n_row, int row0, int k,
                                        float *out, int lane) {
    constexpr int KT = tile_k(FMT);
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK;
    const float *bs = (const float *)t.scale, *bs8 = bs;
    if (BLOCK) {
        int64_t blocks = (t.col_off + k + QL_FP8_BLOCK - 1) / QL_FP8_BLOCK;
        int r = row0 + (lane >> 2);
        bs += (t.row_off + min(r, t.n - 1)) / QL_FP8_BLOCK * blocks;
        bs8 += (t.row_off + min(r + 8, t.n - 1)) / QL_FP8_BLOCK * blocks;
    }
    constexpr int LOADS = KT / 32; /* of x by a lane, 16 bytes each */
    bool has_x = (lane >> 2) < n_row * COLS;
    sums<FMT, 1, COLS> sum;
    sum.clear();
    /* N tiles from i on: all loads of weights before the first use, those of x a tile ahead. */
    auto tiles = [&](int i, auto count) {
        constexpr int N = decltype(count)::value;
        uint4 w[N], b[2][LOADS] = {};
        uint32_t s[N];
        auto load_x = [&](int m) {
            if (has_x) {
#pragma unroll
                for (int j = 0; j < LOADS; j++) {
                    b[m & 1][j] = load_shared4((const uint4 *)(x + (i + m) * KT) + j);
                }
            }
        };
        load_x(0);
#pragma unroll
        for (int m = 0; m < N; m++) {
            w[m] = load_shared4((const uint4 *)(codes + (i + m) * TILE_BYTES));
            s[m] = FP4 ? load_shared_u16(scales + (i + m) * TILE_SCALE_BYTES) : 0;
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
    };
    int i = 0;
#pragma unroll 1
    for (; i + 5 <= n; i += 5) {
        tiles(i, constant<5>{});
    }
#pragma unroll 1
    for (; i < n; i++) {
        tiles(i, constant<1>{});
    }
    sum.store(out, n_row, lane);
}

/* The finished sum of a weight row (0..15 of its tile) and row of x, from the units of its piece. */
__device__ __noinline__ float finish(const struct run &r, const struct product &p, float f, int row, int in_tile,
                                     const float *units, const struct shared *sh) {
    int slices = p.n_slice >> p.log_parts;
    float slice[MAX_SLICES];
#pragma unroll
    for (int q = 0; q < MAX_SLICES; q++) {
        slice[q] = 0.0f;
        if (q < slices) {
            const float *u = units + (q * p.per_slice * r.n_row + row) * 16 + in_tile;
            float v = u[0];
#pragma unroll 4
            for (int j = 1; j < p.per_slice; j++) {
                v += u[j * r.n_row * 16];
            }
            slice[q] = __fmul_rn(v, sh->xscale[row * slices + q] * f);
        }
    }
    return slice_tree(slice, slices);
}

/* All rows of a task, by one warp. */
__device__ __noinline__ void finish_task(const struct shared *sh, const struct product &p, int task, const float *units,
                                         const struct extra *x) {
    const struct run &r = sh->run;
    int lane = threadIdx.x & 31, in_tile = lane & 15, half = lane >> 4;
    struct piece_of at = find_piece_of(p, task, 0);
    const struct chain_target &t = *at.t;
    int wr = at.row_tile * TILE_ROWS + in_tile;
    if (p.epilogue == GATED) {
        const struct chain_target &mine = p.target[half];
        float f = mine.row_scale ? x->scale[half][in_tile] : mine.factor;
        for (int row = 0; row < r.n_row; row++) {
            float v = finish(r, p, f, row, in_tile, units + half * p.units * r.n_row * 16, sh);
            float up = __shfl_down_sync(0xffffffffu, v, 16);
            if (half == 0) {
                t.y[row * t.ldy + wr] = silu(v) * up;
            }
        }
        return;
    }
    float f = t.row_scale ? x->scale[0][in_tile] : t.factor;
    if (p.epilogue == CONV && at.t == &p.target[0]) {
        float4 w = x->conv[in_tile];
        for (int s = 0; s < r.n_seg; s++) {
            bool fresh = sh->seg_pos[s] == 0;
            float x0 = fresh ? 0.0f : x->tail[s][0][in_tile], x1 = fresh ? 0.0f : x->tail[s][1][in_tile],
                  x2 = fresh ? 0.0f : x->tail[s][2][in_tile];
            for (int row = sh->seg_row[s]; row < sh->seg_row[s + 1]; row++) {
                float x3 = finish(r, p, f, row, in_tile, units, sh);
                if (half == 0) {
                    p.u[row * t.n + wr] = silu(fmaf(w.w, x3, fmaf(w.z, x2, fmaf(w.y, x1, w.x * x0))));
                }
                x0 = x1;
                x1 = x2;
                x2 = x3;
            }
            if (half == 0) {
                float *tail = p.tail + (int64_t)sh->seg_slot[s] * 3 * t.n + wr;
                tail[0] = x0;
                tail[t.n] = x1;
                tail[2 * t.n] = x2;
            }
        }
        return;
    }
    for (int row = half; row < r.n_row; row += 2) {
        t.y[at.part * p.part_stride + row * t.ldy + wr] = finish(r, p, f, row, in_tile, units, sh);
    }
}

/* The warps take turns at finishing tasks, each when it has computed its part of the next one: by then all units are in.
 * n counts the block's tasks. */
__device__ __noinline__ void finish_turn(struct shared *sh, const struct product &p, int n, int task, const float *sets,
                                         const uint8_t *extras) {
    int set = n % SUM_SETS;
    if (n % N_WARP == (int)threadIdx.x >> 5) {
        barrier_wait(shared_address(&sh->summed[set]), n / SUM_SETS & 1);
        finish_task(sh, p, task, sets + set * sh->run.set_floats,
                    (const struct extra *)(extras + n % AHEAD * sh->run.extra_bytes));
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&sh->finished[set])),
                         "r"(n / SUM_SETS + 1)
                         : "memory");
        }
    }
}

/* A row of a plain weight by four warps, in the order of linear.cu's rows_kernel: x is the norm again, in f32. */
__device__ __noinline__ void plain_row(const struct product &p, const struct plain_target &t, int wr,
                                       struct shared *sh) {
    int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, chunks = (p.k + 255) / 256;
    int parts = chunks >= 16 ? 4 : chunks >= 8 ? 2 : 1, c0 = chunks * warp / parts, c1 = chunks * (warp + 1) / parts;
    bool bf16 = t.format == QL_FORMAT_BF16, exact = p.mode == X_F16X2;
    for (int row = 0; row < sh->run.n_row; row++) {
        float acc = 0.0f, scale = sh->norm_scale[row];
        const float *x = p.x + row * p.ldx, *delta = p.delta + row * p.k;
#pragma unroll 2
        for (int c = c0; c < c1 && warp < parts; c++) {
            int i = c * 256 + lane * 8;
            if (i < p.k) {
                uint4 raw = load_stream(t.w + ((int64_t)wr * p.k + i) * 2);
                float4 v[2], d[2][4], g[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    v[h] = load_fresh4(x + i + 4 * h);
                    g[h] = __ldg((const float4 *)(p.norm + i + 4 * h));
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        d[h][q] = q < p.delta_parts ? load_fresh4(delta + q * p.delta_stride + i + 4 * h)
                                                    : make_float4(0, 0, 0, 0);
                    }
                }
                const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    auto at = [&](const float4 f[2]) {
                        const float4 &h = f[e / 4];
                        return e % 4 == 0 ? h.x : e % 4 == 1 ? h.y : e % 4 == 2 ? h.z : h.w;
                    };
                    auto part = [&](int q) {
                        const float4 &h = d[e / 4][q];
                        return e % 4 == 0 ? h.x : e % 4 == 1 ? h.y : e % 4 == 2 ? h.z : h.w;
                    };
                    float y = at(v);
                    if (p.delta_parts > 0) {
                        float sum = part(0);
                        sum = p.delta_parts >= 2 ? sum + part(1) : sum;
                        sum = p.delta_parts == 4 ? sum + (part(2) + part(3)) : sum;
                        y += sum;
                    }
                    y = (y * scale) * (1.0f + at(g));
                    uint32_t h = e & 1 ? u[e / 2] >> 16 : u[e / 2] & 0xffff;
                    acc = fmaf(bf16 ? f32_of_bf16(h) : f32_of_f16((uint16_t)h), exact ? y : round_bf16(y), acc);
                }
            }
        }
        acc = warp_sum(acc);
        if (lane == 0) {
            sh->plain[warp] = acc;
        }
        sync_four();
        if ((threadIdx.x & 127) == 0) {
            float v = sh->plain[0];
            for (int q = 1; q < parts; q++) {
                v += sh->plain[q];
            }
            t.y[row * t.ldy + wr] = v;
        }
        sync_four();
    }
}

template <int FMT, int COLS>
__device__ __forceinline__ struct walk multiply(const struct product &p, const uint8_t *ring, const uint16_t *xs,
                                                float *sets, const uint8_t *extras, struct shared *sh, struct walk at) {
    const struct run &r = sh->run;
    constexpr int KT = tile_k(FMT);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, units = p.units,
        all = p.epilogue == GATED ? 2 * units : units;
    int n_row = r.n_row, k = p.k, n_slot = r.n_slot, by_slot = r.by_slot, stages = p.stages, dealt = p.dealt;
    int n_task = p.n_task, part_tiles = tile_of(p, units), set_floats = r.set_floats;
    const uint16_t *x = xs + (lane >> 2) * x_stride(p.k >> p.log_parts, FMT) + (lane & 3) * (KT / 4);
    int task0 = at.task;
    at.unit = 0; /* dealt from the first warp on in each product */
    ring += lane * 16;
    if (warp < 4) { /* the blocks with the fewest tasks are the last */
        for (int j = 0, row0 = 0; j < p.n_plain; row0 += p.plain[j++].n) {
            for (int i = gridDim.x - 1 - blockIdx.x; i < row0 + p.plain[j].n; i += gridDim.x) {
                if (i >= row0) {
                    plain_row(p, p.plain[j], i - row0, sh);
                }
            }
        }
    }
    for (int task = blockIdx.x; task < n_task; task += gridDim.x) {
        int set = at.task % SUM_SETS, use = at.task / SUM_SETS, freed;
        float *out = sets + set * set_floats;
        do { /* the sums that were there */
            asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                         : "=r"(freed)
                         : "r"(shared_address(&sh->finished[set]))
                         : "memory");
        } while (freed < use);
        int u = warp < at.unit ? warp + dealt - at.unit : warp - at.unit;
        for (u = warp < dealt ? u : all; u < all; u += dealt) {
            int piece = u >= units;
            uint32_t at_unit = sh->unit[u - piece * units];
            int stage = at.stage + piece * stages + (int)(at_unit >> 24), turn = stage * by_slot >> 16,
                slot = stage - turn * n_slot;
            int first = at_unit & 0xfff, skip = at_unit >> 12 & 0xff, tiles = at_unit >> 20 & 15;
            const uint8_t *codes = ring + slot * SLOT_BYTES + skip * TILE_BYTES,
                          *scales = ring + slot * SLOT_BYTES + SCALES_AT - lane * 14 + skip * TILE_SCALE_BYTES;
            struct piece_of q = {};
            if (FMT == QL_FORMAT_FP8_BLOCK) {
                q = find_piece_of(p, task, piece);
            }
            barrier_wait(shared_address(&sh->full[slot]), turn & 1);
            compute<FMT, COLS>(q.t ? *q.t : p.target[0], q.part * part_tiles + first, tiles, codes, scales,
                               x + first * KT, n_row, q.row_tile * TILE_ROWS, k, out + u * n_row * 16, lane);
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(shared_address(&sh->empty[slot]), 1);
            }
        }
        if (lane == 0) {
            barrier_arrive(shared_address(&sh->summed[set]), 1);
        }
        if (at.task > task0) {
            finish_turn(sh, p, at.task - 1, task - gridDim.x, sets, extras);
        }
        at.stage += (all == units ? 1 : 2) * stages;
        at.unit = (at.unit + all) % dealt;
        at.task++;
    }
    if (at.task > task0) {
        finish_turn(sh, p, at.task - 1, blockIdx.x + (at.task - 1 - task0) * gridDim.x, sets, extras);
    }
    return at;
}

/* ---- recurrence -------------------------------------------------------------------------------------------------- */

/* The rows of a segment and head. Sums in the order of gdn.cu's step_kernel and norm.cu's gated_norm. */
__device__ __noinline__ void recur(const struct shared *sh, const struct recurrence &g, int task, float *room) {
    const ql_gdn_args &a = g.a;
    int s = task / a.n_value_head, j = task - s * a.n_value_head;
    float *q = room, *k = q + D, *z = k + D, *part = z + D; /* part: [8][D] */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int key = (a.value_head0 + j) / a.group - a.key_head0, width = (2 * a.n_key_head + a.n_value_head) * D;
    bool active = warp < 8,
         fresh = sh->seg_pos[s] == 0; /* a warp holds 16 rows of the state, a lane every 32nd column */
    float *state = a.state + (((int64_t)sh->seg_slot[s] * a.n_value_head + j) * D + warp * 16) * D + lane, st[4][16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            st[c][i] = active && !fresh ? load_fresh(state + i * D + 32 * c) : 0.0f;
        }
    }
    float a_log = __ldg(a.a_log + j), dt_bias = __ldg(a.dt_bias + j);
    for (int row = sh->seg_row[s]; row < sh->seg_row[s + 1]; row++) {
        const float *u = a.u + (int64_t)row * width, *v = u + (2 * a.n_key_head + j) * D + lane;
        const float *x = warp == 2 ? g.z + (row * a.n_value_head + j) * D : u + ((warp ? a.n_key_head : 0) + key) * D;
        float value[4] = {}, h[4] = {};
        float y = load_fresh(a.a + row * a.n_value_head + j), b = load_fresh(a.b + row * a.n_value_head + j);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            value[c] = active ? load_fresh(v + 32 * c) : 0.0f;
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
                (warp == 2 ? z : warp ? k : q)[lane + 32 * i] = warp == 2 ? h[i] : (h[i] * scale) * factor;
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
#pragma unroll
            for (int c = 0; c < 4; c++) {
                part[warp * D + lane + 32 * c] = sum[c];
            }
        }
        sync_warps();
        if (active) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sum[c] = part[lane + 32 * c];
#pragma unroll
                for (int i = 1; i < 8; i++) {
                    sum[c] += part[i * D + lane + 32 * c];
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
#pragma unroll
            for (int c = 0; c < 4; c++) {
                part[warp * D + lane + 32 * c] = out[c];
            }
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
                g.y[(row * a.n_value_head + j) * D + at] = ((h[i] * scale) * g.norm[at]) * silu(z[at]);
            }
        }
    }
    if (active) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                state[i * D + 32 * c] = st[c][i];
            }
        }
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

template <int COLS>
__device__ void compute_all(const struct run &r, struct shared *sh, uint8_t *ring, uint16_t *xs, float *sets,
                            const uint8_t *extras) {
    unsigned base = *(volatile unsigned *)&r.edges->base, nb = gridDim.x, last = base + nb * r.n_op;
    const struct product *pending = NULL; /* whose residual waits in sh->pend */
    struct walk at = {0, 0, 0};
    auto write_residual = [&]() {
        if (pending) {
            int lo = (int)((int64_t)pending->k * blockIdx.x / gridDim.x),
                hi = (int)((int64_t)pending->k * (blockIdx.x + 1) / gridDim.x);
            int row = threadIdx.x / PEND, i = threadIdx.x % PEND;
            if (row < r.n_row && lo + i < hi) {
                pending->residual[row * pending->ldx + lo + i] = sh->pend[row][i];
            }
            pending = NULL;
            sync_warps(); /* pend has been read */
        }
    };
    for (int i = 0; i < r.n_op; i++) {
        if (i > 0) {
            wait_edge(r, base + nb * i);
        }
        write_residual();
        if (r.op[i].kind == PRODUCT) {
            const struct product &p = r.op[i].product;
            if (threadIdx.x < p.units) {
                sh->unit[threadIdx.x] = pack_unit(p, threadIdx.x);
            }
            if (p.norm) {
                norm_x<COLS>(p, xs, sh);
                pending = p.delta ? &p : NULL;
            } else {
                slices_x<COLS>(p, xs, sh);
            }
            switch (p.format) {
            case QL_FORMAT_NVFP4: at = multiply<QL_FORMAT_NVFP4, COLS>(p, ring, xs, sets, extras, sh, at); break;
            case QL_FORMAT_FP8_BLOCK:
                at = multiply<QL_FORMAT_FP8_BLOCK, COLS>(p, ring, xs, sets, extras, sh, at);
                break;
            default: at = multiply<QL_FORMAT_FP8_CHANNEL, COLS>(p, ring, xs, sets, extras, sh, at); break;
            }
        } else if (r.op[i].kind == RECURRENCE) {
            const struct recurrence &g = r.op[i].gdn;
            for (int task = blockIdx.x; task < r.n_seg * g.a.n_value_head; task += gridDim.x) {
                recur(sh, g, task, (float *)xs);
            }
        } else {
            const struct combine &c = r.op[i].combine;
            for (int e = blockIdx.x * N_THREAD + threadIdx.x; e < c.n; e += gridDim.x * N_THREAD) {
                c.to[e] = add_parts(c.from + e, c.parts, c.stride);
            }
        }
        arrive(r, i + 1 == r.n_op, last);
    }
    if (pending) {
        wait_edge(r, last);
        write_residual();
    }
}
#endif

template <int COLS>
__global__ void __launch_bounds__(N_THREAD + 32, 1) chain_kernel(const __grid_constant__ struct run args) {
#if HAVE_WGMMA
    extern __shared__ __align__(128) uint8_t room[];
    uint8_t *ring = room, *x = ring + args.n_slot * SLOT_BYTES, *extras = x + args.x_bytes;
    float *sets = (float *)(extras + AHEAD * args.extra_bytes);
    struct shared *sh = (struct shared *)(sets + SUM_SETS * args.set_floats);
    wait_previous();
    int words = (int)(offsetof(struct run, op) + args.n_op * sizeof(struct chain_op)) / 4;
    for (int i = threadIdx.x; i < words; i += N_THREAD + 32) {
        ((uint32_t *)&sh->run)[i] = ((const uint32_t *)&args)[i];
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
        for (int i = 0; i < args.n_slot; i++) {
            barrier_init(shared_address(&sh->full[i]), 1);
            barrier_init(shared_address(&sh->empty[i]), 8);
        }
        for (int i = 0; i < SUM_SETS; i++) {
            barrier_init(shared_address(&sh->summed[i]), N_WARP);
            sh->finished[i] = 0;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= N_THREAD) {
        if (threadIdx.x == N_THREAD) {
            fetch(sh->run, sh, ring, extras);
        }
    } else {
        compute_all<COLS>(sh->run, sh, ring, (uint16_t *)x, sets, extras);
    }
#else
    __trap(); /* never launched on anything but compute capability 9.0 */
#endif
}

/* ---- choice of what runs here ------------------------------------------------------------------------------------ */

/* The run as it grows. */
struct builder {
    const ql_dev *dev;
    struct run *run;
    int cols, blocks;
    float *parts;          /* scratch: parts of row-parallel products */
    const float *parts_of; /* the product that waits there in parts, or NULL */
    int n_parts;
};

static bool same_formats(ql_qformat a, ql_qformat b) {
    return a == b || (is_fp8(a) && is_fp8(b) && a != QL_FORMAT_FP8_BLOCK && b != QL_FORMAT_FP8_BLOCK);
}

static bool has_units(const ql_linear_args *a) {
    return !is_plain(a->w->format) && a->w->k / a->n_slice % 64 == 0 &&
           (a->w->format != QL_FORMAT_FP8_BLOCK || a->w->col_off % 64 == 0);
}

/* Parts of a row-parallel product: what spreads its row tiles best, and leaves x short enough for registers. 0: none. */
static int choose_parts(const struct builder *b, int row_tiles, int n_slice, int k, int columns) {
    int best = 0;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= 4 && parts <= n_slice; parts *= 2) {
        int64_t cost = ceil_div((int64_t)row_tiles * parts, b->blocks) * (4 / parts);
        int slices = n_slice / parts;
        if (k / n_slice <= X_KEEP * 32 * warps_of_slice(slices) && columns * 2 * k / parts <= X_MOST && cost < least) {
            least = cost;
            best = parts;
        }
    }
    return best;
}

static void use_batch(struct run *r, const ql_batch *b) {
    r->n_seg = b->n_seg;
    r->seg_row = b->seg_row;
    r->seg_pos = b->seg_pos;
    r->seg_slot = b->seg_slot;
}

/* [rmsnorm] linear [conv | swiglu] */
static int take_product(struct builder *b, const ql_op *op, int n) {
    struct run *r = b->run;
    const ql_rmsnorm_args *norm = op->kind == QL_OP_RMSNORM ? &op->u.rmsnorm : NULL;
    int used = norm ? 1 : 0;
    if (used >= n || op[used].kind != QL_OP_LINEAR) {
        return 0;
    }
    const ql_linear_args *a = op[used].u.linear.a;
    int group = op[used++].u.linear.n, cols = a->precision == QL_PREC_EXACT ? 2 : 1;
    struct product p = {};
    int extra = 128;
    p.k = a->w->k;
    p.n_slice = a->n_slice;
    p.ks = p.k / p.n_slice;
    p.format = a->w->format;
    p.mode = a->precision == QL_PREC_EXACT                         ? X_F16X2
             : a->precision == QL_PREC_FP8 && is_fp8(a->w->format) ? X_E4M3_AS_F16
                                                                   : X_BF16_AS_F16;
    p.x = a->x;
    p.ldx = (int)a->ldx;
    p.epilogue = STORE;
    if (a->phase != QL_PHASE_GEN || a->n_row < 1 || a->n_row > MAX_ROWS || (r->n_row && a->n_row != r->n_row) ||
        (b->cols && b->cols != cols)) {
        return 0;
    }
    for (int i = 0; i < group; i++) {
        const ql_weight *w = a[i].w;
        if (has_units(&a[i]) && w->n % TILE_ROWS == 0 && p.n_plain == 0 && p.n_target < 3 &&
            same_formats(w->format, a->w->format) && w->col_off == a->w->col_off) {
            p.target[p.n_target++] = chain_target{(const uint8_t *)w->data,
                                                  w->scale,
                                                  a[i].y,
                                                  (int)a[i].ldy,
                                                  w->n,
                                                  w->n / TILE_ROWS,
                                                  w->factor,
                                                  (int16_t)w->row_off,
                                                  (int16_t)w->col_off,
                                                  w->format == QL_FORMAT_FP8_CHANNEL};
        } else if ((w->format == QL_FORMAT_BF16 || w->format == QL_FORMAT_F16) && norm && w->k % 8 == 0 &&
                   p.n_target > 0 && p.n_plain < 2) {
            p.plain[p.n_plain++] = plain_target{(const uint8_t *)w->data, a[i].y, (int)a[i].ldy, w->n, (int)w->format};
        } else {
            return 0;
        }
    }
    if (norm) {
        if (norm->y != a->x || norm->ldy != a->ldx || norm->n != p.k || norm->n_row != a->n_row || p.n_slice != 1 ||
            p.k > NORM_KEEP * NORM_THREADS || p.k / b->blocks >= PEND) {
            return 0;
        }
        p.x = norm->x;
        p.ldx = norm->n;
        p.norm = norm->w;
        p.eps = norm->eps;
        if (norm->delta) {
            bool split = norm->delta == b->parts_of;
            p.delta = split ? b->parts : norm->delta;
            p.delta_parts = split ? b->n_parts : 1;
            p.delta_stride = a->n_row * norm->n;
            p.residual = norm->x;
        }
    }
    if (b->parts_of && !(norm && norm->delta == b->parts_of)) {
        return 0; /* the parts must be added first */
    }
    int row_tiles = 0;
    for (int i = 0; i < p.n_target; i++) {
        row_tiles += p.target[i].row_tiles;
    }
    p.parts = 1;
    if (used < n && op[used].kind == QL_OP_SWIGLU && op[used].u.swiglu.g == a[0].y && group == 2 && p.n_target == 2 &&
        op[used].u.swiglu.u == a[1].y && op[used].u.swiglu.n == a[0].w->n && a[1].w->n == a[0].w->n &&
        op[used].u.swiglu.n_row == a->n_row && a[0].ldy == a[0].w->n) {
        p.epilogue = GATED;
        p.target[0].y = op[used++].u.swiglu.y;
        row_tiles = p.target[0].row_tiles;
    } else if (used < n && op[used].kind == QL_OP_CONV && op[used].u.conv.m == a[0].y &&
               op[used].u.conv.channels == a[0].w->n && a[0].ldy == a[0].w->n &&
               (uintptr_t)op[used].u.conv.w % 16 == 0) {
        const ql_conv_args *c = &op[used++].u.conv;
        p.epilogue = CONV;
        p.conv = c->w;
        p.tail = c->tail;
        p.u = c->y;
        use_batch(r, c->batch);
        extra += 256 + r->n_seg * 192;
    } else if (!norm) {
        p.parts =
            p.n_target == 1 && a->ldy == a->w->n ? choose_parts(b, row_tiles, p.n_slice, p.k, a->n_row * cols) : 0;
        if (p.parts == 0) {
            return 0;
        }
    }
    p.tiles = p.ks / tile_k(p.format);
    p.per_slice = (int)ceil_div(p.tiles, unit_tiles(p.format));
    p.n_task = row_tiles * p.parts;
    p.log_parts = p.parts == 4 ? 2 : p.parts - 1;
    p.units = p.per_slice * (p.n_slice / p.parts);
    p.by_slice = (int)ceil_div(1 << 16, p.per_slice);
    if (p.units > MAX_UNITS) {
        return 0;
    }
    p.stages = (int)ceil_div(p.units, stage_units(p.format));
    p.part_stride = p.parts > 1 ? a->n_row * a->w->n : 0;
    b->parts_of = NULL;
    if (p.parts > 1) {
        if (b->dev->scratch_bytes < (size_t)p.parts * (size_t)p.part_stride * sizeof(float)) {
            return 0;
        }
        p.target[0].y = b->parts;
        b->parts_of = a->y;
        b->n_parts = p.parts;
    }
    int x_bytes = a->n_row * cols * x_stride(p.k / p.parts, p.format) * 2,
        set = (p.epilogue == GATED ? 2 : 1) * p.units * a->n_row * 16;
    r->x_bytes = x_bytes > r->x_bytes ? x_bytes : r->x_bytes;
    r->set_floats = set > r->set_floats ? set : r->set_floats;
    r->n_row = a->n_row;
    r->extra_bytes = extra > r->extra_bytes ? extra : r->extra_bytes;
    b->cols = cols;
    r->op[r->n_op].kind = PRODUCT;
    r->op[r->n_op++].product = p;
    return used;
}

/* gdn gated_norm */
static int take_recurrence(struct builder *b, const ql_op *op, int n) {
    struct run *r = b->run;
    if (n < 2 || op[0].kind != QL_OP_GDN || op[1].kind != QL_OP_GATED_NORM || b->parts_of || r->n_row == 0) {
        return 0;
    }
    const ql_gdn_args *a = &op[0].u.gdn;
    const ql_gated_norm_args *g = &op[1].u.gated_norm;
    if (a->batch->phase != QL_PHASE_GEN || a->batch->n_row != r->n_row || g->o != a->o || g->n_row != r->n_row ||
        g->n_head != a->n_value_head) {
        return 0;
    }
    use_batch(r, a->batch);
    r->op[r->n_op].kind = RECURRENCE;
    r->op[r->n_op++].gdn = recurrence{*a, g->z, g->w, g->y, g->eps};
    int room = (3 + 8) * D * (int)sizeof(float);
    r->x_bytes = room > r->x_bytes ? room : r->x_bytes;
    return 2;
}

/* Chooses how many warps share the units. A barrier tells a warp that waits for a stage only whether it is one phase further
 * than that: the stage that was in the slot before must have come by then. It has if it is the warp's last one, or in_flight
 * stages older: no stage is asked for before the in_flight-th before it has come. */
static void deal(struct product *p, int n_slot, int in_flight) {
    int most = n_slot - in_flight;
    int all = p->units * (p->epilogue == GATED ? 2 : 1), per_stage = stage_units(p->format);
    auto stage = [&](int unit) {
        int task = unit / all, in = unit % all, piece = in / p->units;
        return (task * (all / p->units) + piece) * p->stages + (in - piece * p->units) / per_stage;
    };
    for (p->dealt = N_WARP; p->dealt > 1; p->dealt--) {
        bool fits = stage(p->dealt - 1) + 1 <= most;
        for (int u = 0; u < all && fits; u++) {
            int gap = stage(u + p->dealt) - stage(u);
            fits = gap <= most || gap == n_slot;
        }
        if (fits) {
            break;
        }
    }
}

/* What a product leaves in parts, added where the ops have it. */
static void add_combine(struct builder *b) {
    struct run *r = b->run;
    if (b->parts_of) {
        int n = (int)(r->op[r->n_op - 1].product.part_stride);
        r->op[r->n_op].kind = COMBINE;
        r->op[r->n_op++].combine = combine{b->parts, (float *)b->parts_of, b->n_parts, n, n};
    }
}

ql_status ql_chain_cuda(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken) {
    *taken = 0;
    struct cuda_dev *d = cuda(dev);
    if (d->cc / 10 != 9 || d->n_sm < 4 || d->no_chain) { /* tuned for, and tried on, compute capability 9.0 */
        return QL_OK;
    }
    struct run r;
    r.n_op = r.n_row = r.n_seg = r.x_bytes = r.set_floats = r.extra_bytes = 0;
    r.edges = (struct edges *)d->edges;
    struct builder b = {dev, &r, 0, d->n_sm / 4 * 4, (float *)dev->scratch, NULL, 0};
    int products = 0;
    while (*taken < n && r.n_op < MAX_OPS - 1) {
        int used = take_product(&b, op + *taken, n - *taken);
        products += used > 0;
        if (used == 0) {
            used = take_recurrence(&b, op + *taken, n - *taken);
        }
        if (used == 0) {
            break;
        }
        *taken += used;
    }
    r.x_bytes = (r.x_bytes + 127) / 128 * 128;
    int fixed = r.x_bytes + AHEAD * r.extra_bytes + SUM_SETS * r.set_floats * (int)sizeof(float) +
                (int)(offsetof(struct shared, run) + offsetof(struct run, op)) +
                (r.n_op + 1) * (int)sizeof(struct chain_op);
    r.n_slot = (SHARED_MAX - fixed) / SLOT_BYTES;
    r.n_slot = r.n_slot < MAX_SLOTS ? r.n_slot : MAX_SLOTS;
    if (products == 0 || r.n_slot < 2) {
        *taken = 0;
        return QL_OK;
    }
    r.by_slot = (int)ceil_div(1 << 16, r.n_slot);
    r.in_flight = IN_FLIGHT < r.n_slot / 2 ? IN_FLIGHT : r.n_slot / 2;
    for (int i = 0; i < r.n_op; i++) {
        if (r.op[i].kind == PRODUCT) {
            deal(&r.op[i].product, r.n_slot, r.in_flight);
        }
    }
    add_combine(&b);
    cudaLaunchAttribute together; /* blocks wait for each other: all of them must run */
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)b.blocks);
    config.blockDim = dim3(N_THREAD + 32);
    config.dynamicSmemBytes = (size_t)(r.n_slot * SLOT_BYTES + fixed);
    config.stream = d->stream;
    config.attrs = &together;
    config.numAttrs = 1;
    d->last_op = "chain";
    auto kernel = b.cols == 2 ? chain_kernel<2> : chain_kernel<1>;
    CU_TRY(dev, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX),
           "chain");
    CU_TRY(dev, cudaLaunchKernelEx(&config, kernel, r), "chain");
    return QL_OK;
}
