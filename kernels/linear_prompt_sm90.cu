/* linear for prompt rows on Hopper (compute capability 9.0a). A pair of blocks (a cluster) works on 256 weight rows and up
 * to 256 columns of x:
 *
 *   x        64 columns of K a stage, one run of bytes as prepare_prompt_x left them; each block fetches one half of a stage
 *            and sends it to both, because x at 2 bytes, not the weight at 0.56, is the traffic
 *   weights  in packed form into the same stage, by the second warp
 *   product  two warpgroups of 64 weight rows each: wgmma with A in registers. The fragments of a step are decoded while
 *            the step before is being multiplied
 *   slices   what waits in the tree goes to scratch, thread by thread, and comes back through the stages, so that nobody
 *            waits for it
 *   sending  a sum across lanes goes to the other lanes tile by tile, by two warps that have nothing else to do (push.cuh)
 *   parts    where there are few tiles, the slices of a tile are dealt to 2, 4 or 8 units of work, each a subtree. Whoever
 *            ends a node of the tree second adds both sides: addition commutes, so the bits do not depend on who
 *
 * The columns of a tile and the parts depend on how many columns there are; a column's bits do not.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/prompt.cuh"

enum { PAIR = 2, M_ROWS = 128, GROUP_THREADS = 384, RING_BYTES = 225 * 1024, MAX_STAGES = 8 };

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define IN_PAIRS __cluster_dims__(PAIR, 1, 1)
#else
#define IN_PAIRS
#endif

/* What a launch does: units of work, each one part of the slices of a tile of 256 weight rows and 8 NT columns. */
struct units {
    int m_tiles, n_tiles, n_col, n_part, count;
    int levels;       /* of a unit's slices in the tree */
    float *node;      /* [tile][n_part - 1][rank] sums of the side that came first */
    uint32_t *flag;   /* [tile][n_part - 1][rank][8] 0: nobody, 1: first side is writing, 2: first side is there */
    struct push push; /* where else the result goes */
};

/* What warps that multiply and warps that send tell each other, in shared memory. */
enum { SENDING = 4 }; /* tiles written and not yet sent */
struct sending {
    uint32_t first;         /* whether another unit had ended its side of a node */
    uint32_t written[8];    /* tiles, by each warp that multiplies */
    uint32_t sent[PUSHERS]; /* tiles */
    int tile[SENDING];      /* -1: no more */
};

/* A stage: x in one place; in another the packed weights of 8 row tiles, the scales of NVFP4, and where a slice ends the
 * scales of x. */
template <int FMT, int NT, int COLS, bool X8> struct stage_of {
    static constexpr bool PLAIN = FMT == QL_FORMAT_F16 || FMT == QL_FORMAT_BF16;
    static constexpr int K = X8 ? 128 : 64; /* columns of K */
    static constexpr int X = NT * 8 * 128, TILES = PLAIN ? TILE_ROWS * K * 2 : K / tile_k(FMT) * TILE_BYTES;
    static constexpr int SCALES = FMT == QL_FORMAT_NVFP4 ? TILE_SCALE_BYTES : 0;
    static constexpr int X_SCALES = NT * 8 / COLS * 4, W = 8 * (TILES + SCALES), REST = W + X_SCALES;
    static constexpr int COUNT = RING_BYTES / (X + REST) < MAX_STAGES ? RING_BYTES / (X + REST) : MAX_STAGES;
    static constexpr size_t SHARED = (size_t)COUNT * (X + REST) + 1024 + 256;
    static_assert((2 * MAX_STAGES + 1) * 8 + sizeof(struct sending) <= 256, "barriers and what is behind them");
};

#if HAVE_WGMMA

/* Sums of 16 weight rows and 8 NT columns in a warp. PROMOTE: what wgmma has added is added to `total` now and then. */
template <int NT, int COLS, bool PROMOTE> struct tile_sums {
    static constexpr int VECTORS = NT / COLS; /* finished sums by four */
    float acc[NT][4], total[PROMOTE ? NT : 1][4];

    __device__ __forceinline__ float *finished(int n) {
        if constexpr (PROMOTE) {
            return total[n];
        }
        return acc[n];
    }

    /* Number e of vector i of the finished sums. */
    __device__ __forceinline__ float &at(int i, int e) {
        return COLS == 1 ? finished(i)[e] : finished(2 * i + e / 2)[2 * (e % 2)];
    }

    __device__ __forceinline__ void clear_total() {
        if constexpr (PROMOTE) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                total[n][0] = total[n][1] = total[n][2] = total[n][3] = 0.0f;
            }
        }
    }

    /* f, f8: scales of rows g and g + 8. */
    __device__ __forceinline__ void promote(float f, float f8) {
        if constexpr (PROMOTE) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                total[n][0] = fmaf(acc[n][0], f, total[n][0]);
                total[n][1] = fmaf(acc[n][1], f, total[n][1]);
                total[n][2] = fmaf(acc[n][2], f8, total[n][2]);
                total[n][3] = fmaf(acc[n][3], f8, total[n][3]);
            }
        }
    }

    /* Scales a slice's sums. xscale: of column 2 c of the first column tile. */
    __device__ __forceinline__ void finish(const float *xscale, float f, float f8) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *v = finished(n);
            if (COLS == 1) {
                float2 x = xscale ? *(const float2 *)(xscale + 8 * n) : make_float2(1.0f, 1.0f);
                v[0] = v[0] * x.x * f;
                v[1] = v[1] * x.y * f;
                v[2] = v[2] * x.x * f8;
                v[3] = v[3] * x.y * f8;
            } else {
                float x = xscale[4 * n];
                v[0] = fmaf(v[1], 1.0f / 2048.0f, v[0]) * x * f;
                v[2] = fmaf(v[3], 1.0f / 2048.0f, v[2]) * x * f8;
            }
        }
    }

    template <int FIRST, int N> __device__ __forceinline__ void add(const float4 *from) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float4 w = from[i * 32];
            at(FIRST + i, 0) = w.x + at(FIRST + i, 0);
            at(FIRST + i, 1) = w.y + at(FIRST + i, 1);
            at(FIRST + i, 2) = w.z + at(FIRST + i, 2);
            at(FIRST + i, 3) = w.w + at(FIRST + i, 3);
        }
    }

    template <int FIRST, int N> __device__ __forceinline__ void put(float4 *to) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            to[i * 32] = make_float4(at(FIRST + i, 0), at(FIRST + i, 1), at(FIRST + i, 2), at(FIRST + i, 3));
        }
    }

    /* To y, where this lane's first row of x lies; n_row rows are left from there. */
    __device__ __forceinline__ void write(float *y, int64_t ldy, int n_row, bool in, bool in8, bool whole) {
        if (whole) {
#pragma unroll
            for (int n = 0; n < NT; n++, y += 8 / COLS * ldy) {
                float *v = finished(n);
                y[0] = v[0];
                y[8] = v[2];
                if (COLS == 1) {
                    y[ldy] = v[1];
                    y[ldy + 8] = v[3];
                }
            }
            return;
        }
#pragma unroll
        for (int n = 0; n < NT; n++, y += 8 / COLS * ldy) {
            float *v = finished(n);
#pragma unroll
            for (int e = 0; e < 4 / COLS; e++) {
                int r = COLS == 1 ? e & 1 : 0, up = COLS == 1 ? e >> 1 : e;
                if (8 / COLS * n + r < n_row && (up ? in8 : in)) {
                    y[r * ldy + 8 * up] = v[COLS == 1 ? e : 2 * e];
                }
            }
        }
    }
};

/* The two warpgroups that multiply take turns at issuing wgmma, so that one decodes while the other multiplies. */
__device__ __forceinline__ void turn_wait(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void turn_pass(int group) { /* to the other group */
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}

__device__ __forceinline__ void store_release(uint32_t *p, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* The warps that multiply meet. */
__device__ __forceinline__ void multipliers_meet(void) { asm volatile("bar.sync 3, 256;" ::: "memory"); }

/* By a warp that multiplies, when its part of a tile is in memory, or with -1 after its last. n: tiles that it said so of before. */
__device__ __forceinline__ void hand_over(volatile struct sending *s, uint32_t n, int tile, int me, int lane) {
    __syncwarp();
    if (lane == 0) {
        for (int i = 0; i < PUSHERS; i++) {
            while (n - s->sent[i] >= SENDING) {
            }
        }
        if (me == 0) {
            s->tile[n % SENDING] = tile;
        }
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        s->written[me] = n + 1;
    }
}

/* Warp `me` of PUSHERS: sends this block's finished tiles of ROWS rows of y and 128 columns to all other lanes. */
template <int ROWS>
__device__ __forceinline__ void send_tiles(const struct products &p, const struct units &u, volatile struct sending *s,
                                           int rank, int me, int lane) {
    constexpr int AHEAD = 6; /* rows on their way, 512 bytes each */
    const struct push &to = u.push;
    const int ld = (int)p.target[0].ldy;
    if (blockIdx.x == 0 && me == 0 && lane == 0) {
        raise_flags(to, 0); /* begun */
    }
    for (uint32_t n = 0;; n++) {
        while (!__all_sync(0xffffffffu, s->written[lane & 7] > n)) {
            __nanosleep(200);
        }
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        __syncwarp();
        int tile = s->tile[n % SENDING];
        if (tile < 0) {
            return;
        }
        if (n == 0) {
            if (lane < to.n_lane && lane != to.lane) {
                await_flag(to, lane, 0);
            }
            __syncwarp();
        }
        int m = tile / u.n_tiles * PAIR + rank, row0 = tile % u.n_tiles * ROWS, rows = min(ROWS, p.n_row - row0);
        const float *y = p.target[0].y;
        for (int r = me * AHEAD; r < rows; r += PUSHERS * AHEAD) {
            int at = (row0 + r) * ld + m * M_ROWS + lane * 4;
            float4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (r + i < rows) {
                    v[i] = __ldcg((const float4 *)(y + at + i * ld));
                }
            }
#pragma unroll
            for (int l = 0; l < QL_CUDA_MAX_LANES - 1; l++) {
                if (l < to.n_lane - 1) {
#pragma unroll
                    for (int i = 0; i < AHEAD; i++) {
                        if (r + i < rows) {
                            *(float4 *)(to.peer[l] + at + i * ld) = v[i];
                        }
                    }
                }
            }
        }
        __syncwarp();
        if (lane < ROWS / PUSH_ROWS && lane * PUSH_ROWS < rows) {
            raise_flags(to, 1 + ((row0 / PUSH_ROWS + lane) * (ld / PUSH_COLS) + m) * PUSHERS + me);
        }
        __syncwarp();
        if (lane == 0) {
            s->sent[me] = n + 1;
        }
    }
}
#endif

template <int FMT, int NT, int COLS, bool X8>
__global__ void IN_PAIRS __launch_bounds__(GROUP_THREADS, 1)
    group_kernel(const __grid_constant__ struct products p, const __grid_constant__ struct units u) {
#if HAVE_WGMMA
    using stage_t = stage_of<FMT, NT, COLS, X8>;
    constexpr int BN = 8 * NT, X = stage_t::X, W = stage_t::W, REST = stage_t::REST, COUNT = stage_t::COUNT,
                  TILES = stage_t::TILES, SCALES = stage_t::SCALES, X_SCALES = stage_t::X_SCALES, K = stage_t::K;
    constexpr bool FP4 = FMT == QL_FORMAT_NVFP4, BLOCK = FMT == QL_FORMAT_FP8_BLOCK, PLAIN = stage_t::PLAIN,
                   PROMOTE = BLOCK;
    constexpr int TYPE = X8 ? WGMMA_E4M3 : FMT == QL_FORMAT_BF16 ? WGMMA_BF16 : WGMMA_F16;
    using sums_t = tile_sums<NT, COLS, PROMOTE>;
    /* What waits in the tree: [level][chunk, as long as a stage's x][warp][vector][lane] */
    constexpr int LEVEL = 256 * NT * 4 / COLS, CHUNKS = 4 / COLS, CHUNK_VECTORS = sums_t::VECTORS / CHUNKS,
                  PART = CHUNK_VECTORS * 32;         /* of a warp, in vectors */
    constexpr bool TURNS = !X8;                      /* FP8 numbers need little decoding */
    constexpr int COPIERS = PLAIN ? 3 : 1;           /* warps that fetch weights */
    extern __shared__ __align__(1024) uint8_t raw[]; /* [COUNT][X], [COUNT][REST], barriers */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint32_t base = (shared_address(raw) + 1023) & ~1023u, rest = base + COUNT * X, full = rest + COUNT * REST,
             empty = full + COUNT * 8, pushed = empty + COUNT * 8, rank = cluster_rank();
    volatile struct sending *sending = (struct sending *)(raw + (pushed + 8 - shared_address(raw)));
    const bool sends = COPIERS == 1 && u.push.n_lane > 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 8; i++) {
            sending->written[i] = 0;
        }
        sending->sent[0] = sending->sent[1] = 0;
        for (int i = 0; i < COUNT; i++) {
            barrier_init(full + 8 * i, 1 + 32 * COPIERS);
            barrier_init(empty + 8 * i, 8 * PAIR);
        }
        barrier_init(pushed, 8 * 32); /* every lane for its own writes to the stages */
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    after_previous();
    const int tiles = (u.m_tiles + PAIR - 1) / PAIR * u.n_tiles, slice_steps = p.ks / K,
              part_slices = p.n_slice / u.n_part, n_cluster = gridDim.x / PAIR;
    float4 *stack = (float4 *)(p.stack + (int64_t)blockIdx.x * (u.levels * LEVEL));
    int stage = 0, phase = 0;
    auto advance = [&]() {
        if (++stage == COUNT) {
            stage = 0;
            phase ^= 1;
        }
    };

    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        /* The stages in their order: for each unit begin(part, tile), for each step fetch(step of K, whether a slice ends),
         * and at a slice's end pass(level, chunk) for what comes from the tree, or pass(-1, chunk) for an empty stage that
         * a sum is written to. */
        auto walk = [&](auto begin, auto fetch, auto pass) {
            for (int unit = blockIdx.x / PAIR; unit < u.count; unit += n_cluster) {
                int part = unit / tiles, step = part * part_slices * slice_steps;
                begin(unit % tiles);
                for (int slice = 0; slice < part_slices; slice++) {
                    for (int i = 0; i < slice_steps; i++, step++) {
                        barrier_wait(empty + 8 * stage, phase ^ 1);
                        fetch(step, i + 1 == slice_steps ? part * part_slices + slice : -1);
                        __syncwarp();
                        advance();
                    }
                    int level = slice % 2 ? 0 : -1;
                    for (int b = slice; level < 0 ? slice + 1 < part_slices : b & 1; b >>= 1, level++) {
                        for (int ch = 0; ch < CHUNKS; ch++) {
                            barrier_wait(empty + 8 * stage, phase ^ 1);
                            pass(level, ch);
                            __syncwarp();
                            advance();
                        }
                        if (level < 0) {
                            break;
                        }
                    }
                }
            }
        };
        if (warp == 0) {
            int push_phase = 0, col0 = 0;
            walk([&](int tile) { col0 = tile % u.n_tiles * BN; },
                 [&](int step, int ending) {
                     if (lane == 0) {
                         bool scales = ending >= 0 && p.xscale;
                         const uint8_t *x =
                             (const uint8_t *)p.xs + ((int64_t)step * u.n_col + col0 + rank * (BN / 2)) * 128;
                         barrier_expect(full + 8 * stage, X + (scales ? X_SCALES : 0));
                         bulk_copy_to_all(base + stage * X + rank * (X / 2), x, X / 2, full + 8 * stage,
                                          (1 << PAIR) - 1);
                         if (scales) {
                             bulk_copy(rest + stage * REST + W, p.xscale + (int64_t)ending * p.xscale_ld + col0 / COLS,
                                       X_SCALES, full + 8 * stage);
                         }
                     }
                 },
                 [&](int level, int ch) {
                     if (level == 0 && ch == 0) {
                         barrier_wait(pushed, push_phase);
                         push_phase ^= 1;
                     }
                     if (lane == 0 && level < 0) {
                         barrier_arrive(full + 8 * stage);
                     } else if (lane == 0) {
                         barrier_expect(full + 8 * stage, X);
                         bulk_copy(base + stage * X, stack + level * (LEVEL / 4) + ch * (X / 16), X, full + 8 * stage);
                     }
                 });
        } else if (warp <= COPIERS) {
            const struct target *t = NULL;
            int m = 0;
            walk(
                [&](int tile) {
                    m = min(tile / u.n_tiles * PAIR + (int)rank, u.m_tiles - 1);
                    t = &target_of(p, M_ROWS, &m);
                },
                [&](int step, int) {
                    uint32_t to = rest + stage * REST;
                    if (PLAIN) { /* rows of 128 bytes, chunks swizzled by row */
#pragma unroll 4
                        for (int r = (warp - 1) * 4 + (lane >> 3); r < M_ROWS; r += 4 * COPIERS) {
                            int row = min(m * M_ROWS + r, t->n - 1);
                            copy_async16_at(to + r * 128 + (((lane ^ r) & 7) << 4),
                                            t->w + ((int64_t)row * p.k + step * K) * 2 + (lane & 7) * 16);
                        }
                    } else {
                        const int64_t row_bytes = (int64_t)(p.k / K) * TILES;
                        const uint8_t *codes = t->w + (int64_t)step * TILES + lane * 16;
#pragma unroll
                        for (int r = 0; r < 8; r++) {
                            const uint8_t *from = codes + min(m * 8 + r, t->row_tiles - 1) * row_bytes;
#pragma unroll
                            for (int b = 0; b < TILES; b += 512) {
                                copy_async16_at(to + r * TILES + b + lane * 16, from + b);
                            }
                        }
                        if (FP4) {
                            int64_t row_tile = min(m * 8 + (lane >> 2), t->row_tiles - 1);
                            copy_async16_at(to + 8 * TILES + lane * 16, (const uint8_t *)t->scale +
                                                                            (row_tile * (p.k / K) + step) * SCALES +
                                                                            (lane & 3) * 16);
                        }
                    }
                    barrier_arrive_copies(full + 8 * stage);
                },
                [&](int, int) { barrier_arrive(full + 8 * stage); });
        } else if (sends) {
            send_tiles<BN / COLS>(p, u, sending, (int)rank, warp - 2, lane);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        if (TURNS && warp >= 8) {
            turn_pass(1);
        }
        const int me = warp - 4, g = lane >> 2, c = lane & 3;
        uint8_t *stages = raw + (base - shared_address(raw)), *rests = stages + COUNT * X;
        int owed = 0, owed_stage = 0; /* stages that stores still read, from owed_stage on */
        uint32_t n_written = 0;       /* tiles whose whole sum this block had */
        bool announce = false;        /* a sum was pushed that the producer waits for */
        sums_t sum;
        uint32_t a0[4][4], a1[4][4];
        auto release = [&](int s) {
            if (lane < PAIR) {
                barrier_arrive_at(empty + 8 * s, (uint32_t)lane);
            }
        };
        auto repay = [&]() {
            if (lane == 0) {
                bulk_wait_read(owed - 1);
                for (int r = 0; r < PAIR; r++) {
                    barrier_arrive_at(empty + 8 * owed_stage, r);
                }
            }
            owed--;
            owed_stage = owed_stage + 1 == COUNT ? 0 : owed_stage + 1;
        };
        auto fetch = [&](uint32_t(&a)[4][4], int &s) {
            barrier_wait(full + 8 * stage, phase);
            const uint8_t *tile = rests + stage * REST;
            operand<FMT, X8> w;
            w.take(tile + me * TILES, tile + 8 * TILES + me * SCALES, lane);
            w.fragments(a);
            s = stage;
            advance();
        };
        for (int unit = blockIdx.x / PAIR; unit < u.count; unit += n_cluster) {
            int part = unit / tiles, tile = unit % tiles, col0 = tile % u.n_tiles * BN;
            int m = min(tile / u.n_tiles * PAIR + (int)rank, u.m_tiles - 1);
            const struct target &t = target_of(p, M_ROWS, &m);
            int row = m * M_ROWS + me * TILE_ROWS + g; /* and row + 8 */
            struct block_scales bs = {};
            if (BLOCK) {
                bs = block_scales_of(t, p.k, row);
            }
            float f = t.factor, f8 = t.factor;
            if (t.row_scale) {
                f = ((const float *)t.scale)[min(row, t.n - 1)];
                f8 = ((const float *)t.scale)[min(row + 8, t.n - 1)];
            }
            for (int slice = 0; slice < part_slices; slice++) {
                int at = part * part_slices + slice, left = slice_steps, add = 0, s0, s1 = 0;
                int k_end = t.col_off / K + at * slice_steps; /* steps of the whole matrix, for its blocks */
                sum.clear_total();
                fetch(a0, s0);
                auto step = [&](const uint32_t(&now)[4][4], int s, uint32_t(&next)[4][4], int &s_next) {
                    float scale = 1.0f, scale8 = 1.0f;
                    bool promote = false;
                    if (PROMOTE) {
                        k_end++;
                        promote = k_end % (QL_FP8_BLOCK / K) == 0 || left == 1;
                        if (BLOCK && promote) {
                            scale = bs.g[(k_end - 1) / (QL_FP8_BLOCK / K)];
                            scale8 = bs.g8[(k_end - 1) / (QL_FP8_BLOCK / K)];
                        }
                    }
                    uint64_t x = descriptor_of_rows(base + s * X);
                    if (TURNS) {
                        turn_wait(me >> 2);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        wgmma<TYPE, NT>(sum.acc, now[j], x + 2 * j, j ? 1 : add);
                    }
                    wgmma_commit();
                    if (TURNS) {
                        turn_pass(me >> 2);
                    }
                    wgmma_wait<1>();
                    if (left < slice_steps) {
                        release(s_next); /* of the step before */
                    }
                    if (owed) {
                        repay();
                    }
                    if (announce && left == max(slice_steps - 8, 1)) {
                        if (lane == 0) {
                            bulk_wait();
                        }
                        barrier_arrive(pushed);
                        announce = false;
                    }
                    left--;
                    if (left > 0) {
                        fetch(next, s_next);
                    }
                    add = 1;
                    if (PROMOTE && promote) {
                        wgmma_wait<0>();
                        sum.promote(scale, scale8);
                        add = 0;
                    }
                    return left > 0;
                };
                int last;
                while (true) {
                    if (!step(a0, s0, a1, s1)) {
                        last = s0;
                        break;
                    }
                    if (!step(a1, s1, a0, s0)) {
                        last = s1;
                        break;
                    }
                }
                wgmma_wait<0>();
                sum.finish(p.xscale ? (const float *)(rests + last * REST + W) + (COLS == 1 ? 2 * c : c) : NULL, f, f8);
                __syncwarp();
                release(last);
                while (owed) {
                    repay();
                }
                bool push = slice + 1 < part_slices;
                float4 *level = stack;
                /* Adds what a chunk brings (not the first time), and writes the sum back where it goes up. */
                auto chunk = [&](auto index, bool add_it, bool put_it, float4 *to) {
                    constexpr int I = decltype(index)::value;
                    barrier_wait(full + 8 * stage, phase);
                    float4 *here = (float4 *)(stages + stage * X) + me * PART + lane;
                    if (add_it) {
                        sum.template add<I * CHUNK_VECTORS, CHUNK_VECTORS>(here);
                    }
                    if (put_it) {
                        sum.template put<I * CHUNK_VECTORS, CHUNK_VECTORS>(here);
                        fence_for_copies();
                        __syncwarp();
                        if (lane == 0) {
                            bulk_store(to + I * (X / 16) + me * PART, base + stage * X + me * PART * 16, PART * 16);
                        }
                        if (owed++ == 0) {
                            owed_stage = stage;
                        }
                        if (COUNT <= CHUNKS) {
                            repay();
                        }
                    } else {
                        __syncwarp();
                        release(stage);
                    }
                    advance();
                };
                auto chunks = [&](bool add_it, bool put_it, float4 *to) {
                    chunk(constant<0>(), add_it, put_it, to);
                    chunk(constant<1>(), add_it, put_it, to);
                    if constexpr (CHUNKS == 4) {
                        chunk(constant<2>(), add_it, put_it, to);
                        chunk(constant<3>(), add_it, put_it, to);
                    }
                };
                int b = slice;
                do {
                    bool add_it = b & 1;
                    b >>= 1;
                    level += add_it ? LEVEL / 4 : 0;
                    bool put_it = push && (!add_it || !(b & 1));
                    if (add_it || put_it) {
                        chunks(add_it, put_it, level);
                    }
                    if (!add_it) {
                        break;
                    }
                } while (b & 1);
                announce = push && slice % 2 == 0;
            }
            /* up the tree of parts, as long as the other side is there */
            bool top = true;
            for (int width = u.n_part, first = 0, side = part; top && width > 1; side >>= 1) {
                width >>= 1;
                int64_t node = ((int64_t)tile * (u.n_part - 1) + first + (side >> 1)) * PAIR + rank;
                first += width;
                uint32_t *flag = u.flag + node * 8;
                float4 *place = (float4 *)(u.node + node * LEVEL) + me * (sums_t::VECTORS * 32) + lane;
                if (me == 0 && lane == 0) {
                    sending->first = atomicCAS(flag, 0u, 1u) == 0;
                }
                multipliers_meet();
                top = !sending->first;
                if (!top) {
                    sum.template put<0, sums_t::VECTORS>(place);
                    multipliers_meet();
                    if (me == 0 && lane == 0) {
                        store_release(flag, 2);
                    }
                } else {
                    while (load_acquire(flag) != 2) {
                    }
                    __syncwarp();
#pragma unroll
                    for (int i = 0; i < sums_t::VECTORS; i++) {
                        float4 w = __ldcg(place + i * 32);
                        sum.at(i, 0) = w.x + sum.at(i, 0);
                        sum.at(i, 1) = w.y + sum.at(i, 1);
                        sum.at(i, 2) = w.z + sum.at(i, 2);
                        sum.at(i, 3) = w.w + sum.at(i, 3);
                    }
                    multipliers_meet(); /* all have read what `first` was */
                }
            }
            if (top) {
                int x_row = col0 / COLS + (COLS == 1 ? 2 * c : c);
                sum.write(t.y + (int64_t)x_row * t.ldy + row, t.ldy, p.n_row - x_row, row < t.n, row + 8 < t.n,
                          col0 / COLS + BN / COLS <= p.n_row && (m + 1) * M_ROWS <= t.n);
                if (sends) {
                    hand_over(sending, n_written++, tile, me, lane);
                }
            }
        }
        if (sends) {
            hand_over(sending, n_written, -1, me, lane);
        }
    }
    if (TURNS && warp >= 4 && warp < 8) {
        turn_wait(0);
    }
    cluster_sync(); /* nobody leaves while the other block may still reach its barriers */
#else
    __trap(); /* compute capability 9.0 is built as 90a */
#endif
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

struct tiling {
    void (*kernel)(struct products, struct units);
    int bn, k;
    size_t shared;
};

template <int FMT, int NT, int COLS, bool X8> static struct tiling tiling_of(void) {
    using stage_t = stage_of<FMT, NT, COLS, X8>;
    return tiling{group_kernel<FMT, NT, COLS, X8>, 8 * NT, stage_t::K, stage_t::SHARED};
}

/* The tiling that is done first: rounds of units over the pairs of SMs, times what a unit takes. */
template <int FMT, int COLS, bool X8>
static ql_status run(ql_dev *dev, struct products *p, uint8_t *work, size_t work_bytes, const struct push *to) {
    constexpr int WIDE = FMT == QL_FORMAT_FP8_BLOCK ? 16 : 32; /* no registers for 256 columns of blocks */
    const struct tiling some[] = {tiling_of<FMT, 8, COLS, X8>(), tiling_of<FMT, 16, COLS, X8>(),
                                  tiling_of<FMT, WIDE, COLS, X8>()};
    int64_t cols = (int64_t)p->n_row * COLS, m_tiles = 0, pairs = cuda(dev)->n_sm / PAIR;
    for (int i = 0; i < p->n_target; i++) {
        m_tiles += m_tiles_of(p->target[i], M_ROWS);
    }
    struct tiling best = {};
    struct units u {};
    int64_t least = INT64_MAX, grid = 0;
    for (const struct tiling &t : some) {
        int64_t n_tiles = ceil_div(cols, t.bn), tiles = ceil_div(m_tiles, PAIR) * n_tiles;
        size_t level = (size_t)M_ROWS * (size_t)t.bn * 4 / COLS;
        for (int parts = 1; parts <= p->n_slice; parts *= 2) {
            int64_t count = tiles * parts, clusters = count < pairs ? count : pairs, n_flag = 0;
            int levels = 0;
            while (parts << levels < p->n_slice) {
                levels++;
            }
            size_t nodes = (size_t)tiles * (size_t)(parts - 1) * PAIR * level;
            n_flag = tiles * (parts - 1) * PAIR * 8;
            if (n_flag > PROMPT_FLAGS || nodes > work_bytes) {
                continue;
            }
            if (levels > 0) {
                int64_t room = (int64_t)((work_bytes - nodes) / ((size_t)levels * PAIR * level));
                clusters = room < clusters ? room : clusters;
            }
            if (clusters < 1) {
                continue;
            }
            /* cycles, as measured on an H200: of a step, of a slice's end, of a unit's end */
            int64_t unit = p->k / parts / t.k * (680 + t.bn * 5 / 2) +
                           (p->n_slice > 1 ? p->n_slice / parts * 14 * t.bn : 0) + (parts > 1 ? 50 : 18) * t.bn,
                    cost = ceil_div(count, clusters) * unit;
            if (cost < least) {
                least = cost;
                best = t;
                u.m_tiles = (int)m_tiles;
                u.n_tiles = (int)n_tiles;
                u.n_part = parts;
                u.levels = levels;
                u.count = (int)count;
                u.node = (float *)work;
                p->stack = (float *)(work + nodes);
                grid = clusters * PAIR;
            }
        }
    }
    if (grid == 0) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes leaves no room for one block",
                       dev->scratch_bytes);
    }
    u.n_col = (int)(ceil_div(cols, COL_PAD) * COL_PAD);
    u.flag = p->flag;
    u.push = to ? *to : push{};
    return launch(dev, "linear", best.kernel, (unsigned)grid, GROUP_THREADS, best.shared, *p, u);
}

ql_status ql_linear_prompt_sm90(ql_dev *dev, struct products *p, ql_qformat format, bool e4m3, uint8_t *work,
                                size_t work_bytes, const struct push *to) {
    bool two = p->x_cols == 2;
    switch (format) {
    case QL_FORMAT_NVFP4:
        return two ? run<QL_FORMAT_NVFP4, 2, false>(dev, p, work, work_bytes, to)
                   : run<QL_FORMAT_NVFP4, 1, false>(dev, p, work, work_bytes, to);
    case QL_FORMAT_FP8_BLOCK:
        return e4m3  ? run<QL_FORMAT_FP8_BLOCK, 1, true>(dev, p, work, work_bytes, to)
               : two ? run<QL_FORMAT_FP8_BLOCK, 2, false>(dev, p, work, work_bytes, to)
                     : run<QL_FORMAT_FP8_BLOCK, 1, false>(dev, p, work, work_bytes, to);
    case QL_FORMAT_F16: return run<QL_FORMAT_F16, 1, false>(dev, p, work, work_bytes, to);
    case QL_FORMAT_BF16: return run<QL_FORMAT_BF16, 1, false>(dev, p, work, work_bytes, to);
    default:
        return e4m3  ? run<QL_FORMAT_FP8_CHANNEL, 1, true>(dev, p, work, work_bytes, to)
               : two ? run<QL_FORMAT_FP8_CHANNEL, 2, false>(dev, p, work, work_bytes, to)
                     : run<QL_FORMAT_FP8_CHANNEL, 1, false>(dev, p, work, work_bytes, to);
    }
}
