/* linear in precision Q8 for many rows: a block multiplies 128 rows of x by 64 weight rows in steps of 32 columns.
 *
 * A step is one block of the activations and two groups of the weights. Its x codes serve 64 weight rows; its weights, unpacked
 * once, serve 128 rows of x. Four warps of 64 x 32 results: 16 x 8 of them take two integer matrix instructions, one for each
 * group; each sum is multiplied by its group scale, the two are added, and their sum times the block's scale is added to the
 * result. These operations are what the kernel's time is made of, the matrix instructions run beside them.
 *
 * Two steps, the columns of a record, are brought at a time: through registers, while the two before are computed, with one
 * barrier. Rows beyond the last repeat it and are not written.
 *
 * The columns of x are pieces whose sums a tree adds: slices, and quarters of a long slice. What waits in the tree lies in scratch
 * thread by thread, so there are as many blocks as run at a time, which take one tile after another. The tiles left for a last
 * round, where they are few, are shared out in parts of two or four, subtrees of pieces: more blocks for the same sums.
 */
#include "kernels/cuda/q8.cuh"

enum {
    THREADS = 128,
    BLOCKS = 2, /* an SM */
    MAX_PARTS = 4,
    STEP = QL_Q8_BLOCK,
    STAGE = QL_Q8_RECORD, /* columns of a stage: bytes of its rows */
    WARP_X = 64,
    WARP_W = 32,
    PER_THREAD = WIDE_X * WIDE_W / THREADS,
    X_LOADS = WIDE_X * STAGE / 16 / THREADS,
    W_WORDS = WIDE_W * STAGE / 8 / THREADS /* of codes: half a record */
};

struct wide_stage {
    uint8_t x[WIDE_X * STAGE], w[WIDE_W * STAGE];
    float4 scale[2][WIDE_W]; /* of a step: the first group's, what removes both offsets, the second group's */
    float d[2][WIDE_X];
};

/* 16 bytes of a row: chunks change places so that eight rows of one chunk lie in different banks. */
__device__ __forceinline__ int chunk_at(int row, int chunk) { return row * STAGE + ((chunk ^ (row >> 1 & 3)) << 4); }

/* A stage's share of this thread on its way to shared memory. */
struct wide_load {
    uint4 x[X_LOADS];
    uint32_t w[W_WORDS], s;
    float d[2];
};

/* Where a thread's share comes from, for the stage at hand. */
struct wide_source {
    const int8_t *x[X_LOADS];
    const uint32_t *w; /* codes */
    const uint16_t *s; /* the two scales of the same step */
    const float *d;    /* of its row of x, n_row floats from block to block */
};

__device__ __forceinline__ void load_stage(struct wide_load &l, const struct wide_source &from, int64_t d_next) {
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        l.x[i] = *(const uint4 *)from.x[i];
    }
#pragma unroll
    for (int i = 0; i < W_WORDS; i++) {
        l.w[i] = __ldg(from.w + i);
    }
    l.s = __ldg(from.s);
    l.d[0] = from.d[0];
    l.d[1] = from.d[d_next];
}

/* Where a thread puts its share in a stage, and where it finds its operands: offsets that no loop computes again. */
struct wide_places {
    int x_to, w_to, x_of, w_of;
};

/* A sum of integers, at most 24384 in magnitude, begins at 2^15 and is then positive: its bits are those of an f32 number, sum
 * times 2^-149, without a conversion. Scales carry UNIT, so a result carries UNIT 2^-149. Both groups of a step: with a scale
 * s1 of at most 32 s0 the first fma has l s0 - 2^15 s1, which is exact (at most 2^24 of the last place of s0), and the second
 * rounds l s0 + h s1 once, as the sum of two exact products does, which takes one operation more. */
#define OFFSET 32768
#define UNIT 0x1p112f
#define UNOFFSET -0x1p-22f /* -2^15 UNIT 2^-149 */
#define RESULT 0x1p37f

__device__ __forceinline__ bool place_stage(struct wide_stage &to, const struct wide_load &l,
                                            const struct wide_places &at, int tid) {
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        *(uint4 *)(to.x + at.x_to + 32 * i * STAGE) = l.x[i];
    }
#pragma unroll
    for (int i = 0; i < W_WORDS; i += 2) {
        *(uint4 *)(to.w + (at.w_to ^ 8 * i)) = make_uint4(q8_decode4(l.w[i]), q8_decode4(l.w[i] >> 16),
                                                          q8_decode4(l.w[i + 1]), q8_decode4(l.w[i + 1] >> 16));
    }
    float s0 = q8_scale(l.s & 255), s1 = q8_scale(l.s >> 8);
    to.scale[tid & 1][tid >> 1] = make_float4(s0 * UNIT, (s0 + s1) * UNOFFSET, s1 * UNIT, 0.0f);
    to.d[0][tid] = l.d[0];
    to.d[1][tid] = l.d[1];
    return s1 <= 32.0f * s0;
}

/* Results of a warp: m 16 rows of x, n 8 weight rows, as of m16n8k16. */
typedef float wide_sums[WARP_X / 16][WARP_W / 8][4];

/* Step `half` of a stage. */
template <bool PLAIN>
__device__ __forceinline__ void compute_step(wide_sums acc, const struct wide_stage &from, int half,
                                             const struct wide_places &at, int x_warp, int w_warp, int lane) {
    int g = lane >> 2, c = lane & 3;
    uint32_t a[WARP_X / 16][4], b[WARP_W / 16][4];
    float d[WARP_X / 16][2];
#pragma unroll
    for (int m = 0; m < WARP_X / 16; m++) {
        load_matrix4(a[m], from.x + (at.x_of ^ 32 * half) + m * 16 * STAGE);
        d[m][0] = from.d[half][x_warp + m * 16 + g];
        d[m][1] = from.d[half][x_warp + m * 16 + g + 8];
    }
#pragma unroll
    for (int n = 0; n < WARP_W / 16; n++) {
        load_matrix4(b[n], from.w + (at.w_of ^ 32 * half) + n * 16 * STAGE);
    }
#pragma unroll
    for (int n = 0; n < WARP_W / 8; n++) {
        const float4 *s = &from.scale[half][w_warp + n * 8 + 2 * c], s0 = s[0], s1 = s[1];
#pragma unroll
        for (int m = 0; m < WARP_X / 16; m++) {
            int lo[4], hi[4];
            mma_s8(lo, a[m][0], a[m][1], b[n >> 1][(n & 1) * 2], OFFSET);
            mma_s8(hi, a[m][2], a[m][3], b[n >> 1][(n & 1) * 2 + 1], OFFSET);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float4 f = e & 1 ? s1 : s0;
                float l = __int_as_float(lo[e]), h = __int_as_float(hi[e]),
                      both = PLAIN ? fmaf(h, f.z, fmaf(l, f.x, f.y))
                                   : fmaf(l, f.x, f.x * (UNOFFSET / UNIT)) + fmaf(h, f.z, f.z * (UNOFFSET / UNIT));
                acc[m][n][e] = fmaf(both, d[m][e >> 1], acc[m][n][e]);
            }
        }
    }
}

/* The sum of piece `piece` is complete: scaled, it takes what waits for it in the tree, and waits itself unless it is the last. */
__device__ __forceinline__ void end_piece(wide_sums acc, float factor, int piece, bool last, float4 *stack) {
    float *v = &acc[0][0][0];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        v[i] *= factor;
    }
    for (int b = piece; b & 1; b >>= 1, stack += WIDE_X * WIDE_W / 4) {
#pragma unroll
        for (int i = 0; i < PER_THREAD / 4; i++) {
            float4 u = stack[i * THREADS];
            v[4 * i] = u.x + v[4 * i];
            v[4 * i + 1] = u.y + v[4 * i + 1];
            v[4 * i + 2] = u.z + v[4 * i + 2];
            v[4 * i + 3] = u.w + v[4 * i + 3];
        }
    }
    if (last) {
        return;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD / 4; i++) {
        stack[i * THREADS] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        v[4 * i] = v[4 * i + 1] = v[4 * i + 2] = v[4 * i + 3] = 0.0f;
    }
}

/* Units of work, dealt to blocks in turn: whole tiles, and of the last tiles, too few for all blocks, parts of their columns.
 * Columns are `pieces` of piece_steps steps, a power of two, added by a tree, whether or not a tile is in parts. */
struct wide_plan {
    int w_tiles, x_tiles, whole, parts, pieces, piece_steps, levels;
};

/* The part `unit` of a tile is in scratch; the last of a tile's blocks to come adds all of them and returns true. */
__device__ __forceinline__ bool join_parts(wide_sums acc, float4 *part, unsigned *count, int parts, int mine) {
    __shared__ bool last;
    float *v = &acc[0][0][0];
    constexpr int SIZE = WIDE_X * WIDE_W / 4;
#pragma unroll
    for (int i = 0; i < PER_THREAD / 4; i++) {
        part[mine * SIZE + i * THREADS] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(count, 1u) + 1 == (unsigned)parts;
    }
    __syncthreads();
    if (!last) {
        return false;
    }
    __threadfence();
#pragma unroll
    for (int i = 0; i < PER_THREAD / 4; i++) {
        float4 u[MAX_PARTS];
#pragma unroll
        for (int j = 0; j < MAX_PARTS; j++) {
            u[j] = __ldcg(part + (j < parts ? j : 0) * SIZE + i * THREADS);
        }
        bool all = parts > 2;
        v[4 * i] = all ? (u[0].x + u[1].x) + (u[2].x + u[3].x) : u[0].x + u[1].x;
        v[4 * i + 1] = all ? (u[0].y + u[1].y) + (u[2].y + u[3].y) : u[0].y + u[1].y;
        v[4 * i + 2] = all ? (u[0].z + u[1].z) + (u[2].z + u[3].z) : u[0].z + u[1].z;
        v[4 * i + 3] = all ? (u[0].w + u[1].w) + (u[2].w + u[3].w) : u[0].w + u[1].w;
    }
    return true;
}

__global__ void __launch_bounds__(THREADS, BLOCKS) wide_kernel(struct q8_products p, struct wide_plan plan) {
    __shared__ __align__(128) struct wide_stage stages[2];
    after_previous();
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    int x_warp = (warp & 1) * WARP_X, w_warp = (warp >> 1) * WARP_W;
    float4 *stack = (float4 *)p.stack + (int64_t)blockIdx.x * plan.levels * (WIDE_X * WIDE_W / 4) + tid;
    struct wide_places at;
    at.x_to = kept(chunk_at(tid >> 2, tid & 3));
    at.w_to = kept(chunk_at(tid >> 1, 2 * (tid & 1)));
    at.x_of = kept(chunk_at(x_warp + (lane & 15), lane >> 4));
    at.w_of = kept(chunk_at(w_warp + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1));

    int units = plan.whole + (plan.w_tiles * plan.x_tiles - plan.whole) * plan.parts;
    for (int i = blockIdx.x; i < units; i += gridDim.x) {
        bool whole = i < plan.whole;
        int split = i - plan.whole, tile = whole ? i : plan.whole + split / plan.parts,
            part = whole ? 0 : split % plan.parts, pieces = whole ? plan.pieces : plan.pieces / plan.parts,
            steps = pieces * plan.piece_steps, begin = part * steps;
        int unit = tile / plan.x_tiles, t0 = tile % plan.x_tiles * WIDE_X;
        const struct q8_target &t = q8_target_of(p, WIDE_W, &unit);
        int r0 = unit * WIDE_W;
        struct wide_source from;
#pragma unroll
        for (int i = 0; i < X_LOADS; i++) {
            from.x[i] = p.x + (int64_t)min(t0 + (tid >> 2) + 32 * i, p.n_row - 1) * p.k + begin * STEP + (tid & 3) * 16;
        }
        const uint8_t *w = t.w + min(r0 + (tid >> 1), t.n - 1) * p.row_bytes + begin / 2 * QL_Q8_RECORD_BYTES;
        from.w = (const uint32_t *)(w + 4) + (tid & 1) * W_WORDS;
        from.s = (const uint16_t *)w + (tid & 1);
        from.d = p.d + (int64_t)begin * p.n_row + min(t0 + tid, p.n_row - 1);

        wide_sums acc = {};
        struct wide_load next;
        load_stage(next, from, steps > 1 ? p.n_row : 0);
        __syncthreads(); /* the last tile's stages are read */
        bool plain = __syncthreads_and(place_stage(stages[0], next, at, tid));
        int piece = 0, left = plan.piece_steps, now = 0;
        for (int step = 0; step < steps; step += 2, now ^= 1) {
            bool more = step + 2 < steps;
            if (more) {
#pragma unroll
                for (int i = 0; i < X_LOADS; i++) {
                    from.x[i] += STAGE;
                }
                from.w += QL_Q8_RECORD_BYTES / 4;
                from.s += QL_Q8_RECORD_BYTES / 2;
                from.d += 2 * (int64_t)p.n_row;
                load_stage(next, from, step + 3 < steps ? p.n_row : 0);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (step + half < steps) { /* k may end with half a record */
                    if (plain) {
                        compute_step<true>(acc, stages[now], half, at, x_warp, w_warp, lane);
                    } else {
                        compute_step<false>(acc, stages[now], half, at, x_warp, w_warp, lane);
                    }
                    if (--left == 0) {
                        end_piece(acc, t.factor * RESULT, piece, piece + 1 == pieces, stack);
                        piece++;
                        left = plan.piece_steps;
                    }
                }
            }
            plain = __syncthreads_and(!more || place_stage(stages[now ^ 1], next, at, tid));
        }
        if (!whole && !join_parts(acc, (float4 *)p.part + (int64_t)(split - part) * (WIDE_X * WIDE_W / 4) + tid,
                                  p.count + (tile - plan.whole), plan.parts, part)) {
            continue;
        }
#pragma unroll
        for (int m = 0; m < WARP_X / 16; m++) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                int row = t0 + x_warp + m * 16 + (lane >> 2) + (e >> 1) * 8, r = r0 + w_warp + 2 * (lane & 3);
                float *y = t.y + row * t.ldy + r;
#pragma unroll
                for (int n = 0; n < WARP_W / 8 && row < p.n_row; n++) {
                    if (r + n * 8 < t.n) {
                        y[n * 8] = acc[m][n][e];
                    }
                    if (r + n * 8 + 1 < t.n) {
                        y[n * 8 + 1] = acc[m][n][e + 1];
                    }
                }
            }
        }
    }
}

ql_status ql_linear_q8_wide_cuda(ql_dev *dev, struct q8_products *p, size_t room) {
    constexpr int64_t TILE_BYTES = WIDE_X * WIDE_W * sizeof(float);
    struct wide_plan plan = {};
    plan.x_tiles = (int)ceil_div(p->n_row, WIDE_X);
    for (int i = 0; i < p->n_target; i++) {
        plan.w_tiles += (int)ceil_div(p->target[i].n, WIDE_W);
    }
    int per_slice = ql_q8_wide_pieces(p), tiles = plan.w_tiles * plan.x_tiles, slots = cuda(dev)->n_sm * BLOCKS;
    plan.pieces = p->n_slice * per_slice;
    plan.piece_steps = p->blocks / per_slice;
    while (1 << plan.levels < plan.pieces) {
        plan.levels++;
    }
    int64_t stacks = plan.levels * TILE_BYTES, grid = slots;
    grid = stacks && (int64_t)room / stacks < grid ? (int64_t)room / stacks : grid;
    room -= (size_t)(grid * stacks);
    p->part = p->stack + grid * stacks / (int64_t)sizeof(float);
    plan.whole = tiles / slots * slots;
    plan.parts = 1;
    int tail = tiles - plan.whole, best = MAX_PARTS;
    for (int n = 2; n <= MAX_PARTS && p->count && tail <= WIDE_COUNTS; n *= 2) {
        int cost = (int)ceil_div(tail * n, slots) * MAX_PARTS / n; /* of a tile's time, in MAX_PARTS */
        bool can = plan.pieces % n == 0 && plan.pieces / n * plan.piece_steps % 2 == 0 &&
                   (int64_t)tail * n * TILE_BYTES <= (int64_t)room;
        if (can && cost < best) {
            best = cost;
            plan.parts = n;
        }
    }
    plan.whole = plan.parts == 1 ? tiles : plan.whole;
    int64_t units = plan.whole + (int64_t)(tiles - plan.whole) * plan.parts;
    return launch(dev, "linear", wide_kernel, (unsigned)(units < grid ? units : grid), THREADS, 0, *p, plan);
}
