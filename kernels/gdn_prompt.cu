/* gdn of prompt rows: contract in gdn.h, in the form  R = beta (v - exp(G) k S)   Vn = T R   S = exp(G_last) S + ..
 * without U and W.
 *
 *   chunk   every 64-token chunk and key head at once, with its value heads: normalised q and k, T = (I + A)^-1, P = (q k^T exp(G_i - G_j))
 *   scan    the state through a segment's chunks. Two warps hold 16 value channels of a head's state, transposed, as sums
 *           of matrix instructions; value channels never meet
 *
 * All products run on tensor cores as if in f32: a number enters as two f16 parts of 11 bits each after a scaling by a
 * power of two, and first x second, second x first and first x first are added, the first two apart from the last. |q|,
 * |k|, |T| and |P| are at most 1, so their scale is fixed; each value channel of S, R and Vn has its own. Matrix
 * instructions cut sums off instead of rounding them: a product never continues a value that lives longer than it.
 */
#include "kernels/cuda/gdn.cuh"
#include "kernels/cuda/mma.cuh"

/* Lower triangular 64 x 64 in blocks of 16 x 16, row by row of blocks. A block is four 8 x 8 matrices of 128 bytes, in the
 * order in which one ldmatrix reads them as B: (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15). */
enum { TRI = 10, BLOCK_BYTES = 512, ROW_BYTES = D * 2, SIDE_BYTES = CHUNK * ROW_BYTES };
#define PART_SCALE 16384.0f

/* One a chunk and key head: rows of 16-byte pieces, swizzled by row. */
struct key_chunk {
    uint8_t k[2][SIDE_BYTES], q[2][SIDE_BYTES]; /* first parts, second parts */
};

/* One a chunk and value head. */
struct value_chunk {
    uint8_t t[TRI][2][BLOCK_BYTES], p[TRI][2][BLOCK_BYTES];
    float beta[CHUNK], beta_decay[CHUNK]; /* beta, beta exp(G) */
    float q_decay[CHUNK];                 /* exp(G) / sqrt(128) */
    float k_decay[CHUNK];                 /* exp(G_last - G) */
    float keep, pad[63];                  /* exp(G_last) */
};

__device__ __forceinline__ uint32_t row_at(int row, int piece) { return row * ROW_BYTES + ((piece ^ (row & 7)) << 4); }
__device__ __forceinline__ int tri_block(int i, int j) { return i * (i + 1) / 2 + j; }

/* x and y times `up` as f16 pairs: the nearest, and the nearest to what that lost. */
__device__ __forceinline__ void two_parts(float x, float y, float up, uint32_t *first, uint32_t *second) {
    x *= up;
    y *= up;
    __half2 h = __floats2half2_rn(x, y);
    float2 f = __half22float2(h);
    *first = *(uint32_t *)&h;
    *second = pack_f16x2(x - f.x, y - f.y);
}

/* Sums of a product: first parts with each other, and the rest. */
struct sums {
    float big[4], small[4];

    __device__ __forceinline__ void add(const uint32_t a1[4], const uint32_t a2[4], uint32_t b1, uint32_t b1_8,
                                        uint32_t b2, uint32_t b2_8) {
        mma_f16(small, a2, b1, b1_8);
        mma_f16(small, a1, b2, b2_8);
        mma_f16(big, a1, b1, b1_8);
    }
};

/* ---- chunk ------------------------------------------------------------------------------------------------------- */

enum { GATED = 8 };      /* value heads that a block makes gates for at a time */
enum { LA = CHUNK + 4 }; /* row stride in shared memory: 16-byte aligned, banks shifted by 4 a row */

/* G as two numbers of f32: differences of near rows stay exact where a strong decay has made all of them large. */
struct gates {
    float2 sum[CHUNK];
    float beta[CHUNK];
};

struct inverse {
    float a[CHUNK][LA], t[CHUNK][LA], m[CHUNK / 16][16][20];
};

struct chunk_shared {
    union {
        struct key_chunk key;
        struct inverse inv; /* once the products of q and k are done */
    };
    struct gates gates[GATED];
};

__device__ __forceinline__ float decay_of(float2 to, float2 from) { return expf((to.x - from.x) + (to.y - from.y)); }

/* Gates of value head j by a warp; what scan needs of them goes to `out`. */
__device__ __forceinline__ void make_gates(const struct heads &h, const struct piece &p, int j, int lane,
                                           struct gates &x, struct value_chunk *out) {
    float gate[2], beta[2]; /* rows 2 lane and 2 lane + 1 */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        bool real = row < p.n;
        beta[i] = real ? beta_of(h, p.row0 + row, j) : 0.0f;
        gate[i] = real ? g_of(h, p.row0 + row, j) : 0.0f;
    }
    double two = (double)gate[0] + (double)gate[1], sum = two;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        double below = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? below : 0.0;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1), last = __shfl_sync(0xffffffffu, sum, 31);
    before = lane ? before : 0.0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        double here = before + (i ? two : (double)gate[0]);
        float first = (float)here, decay = expf(first);
        x.sum[row] = make_float2(first, (float)(here - (double)first));
        x.beta[row] = beta[i];
        out->beta[row] = beta[i];
        out->beta_decay[row] = beta[i] * decay;
        out->q_decay[row] = decay * Q_FACTOR;
        out->k_decay[row] = expf((float)(last - here));
        if (row == CHUNK - 1) {
            out->keep = decay;
        }
    }
}

/* T below the diagonal blocks: T_ij = -T_ii sum of A_ik T_kj over k = j .. i - 1, nearest diagonal first. All threads. */
__device__ __forceinline__ void invert_blocks(struct inverse &x) {
    int r = threadIdx.x >> 4, c = threadIdx.x & 15;
#pragma unroll
    for (int d = 1; d < CHUNK / 16; d++) {
#pragma unroll
        for (int j = 0; j + d < CHUNK / 16; j++) {
            const float *row = &x.a[16 * (j + d) + r][16 * j];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < 16 * d; k += 4) {
                float4 v = *(const float4 *)(row + k);
                sum = fmaf(v.x, x.t[16 * j + k][16 * j + c], sum);
                sum = fmaf(v.y, x.t[16 * j + k + 1][16 * j + c], sum);
                sum = fmaf(v.z, x.t[16 * j + k + 2][16 * j + c], sum);
                sum = fmaf(v.w, x.t[16 * j + k + 3][16 * j + c], sum);
            }
            x.m[j][r][c] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j + d < CHUNK / 16; j++) {
            const float *row = &x.t[16 * (j + d) + r][16 * (j + d)];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < 16; k += 4) {
                float4 v = *(const float4 *)(row + k);
                sum = fmaf(v.x, x.m[j][k][c], sum);
                sum = fmaf(v.y, x.m[j][k + 1][c], sum);
                sum = fmaf(v.z, x.m[j][k + 2][c], sum);
                sum = fmaf(v.w, x.m[j][k + 3][c], sum);
            }
            x.t[16 * (j + d) + r][16 * j + c] = -sum;
        }
        __syncthreads();
    }
}

/* Block (key head, chunk), for all value heads of the key head. Warps 0 .. 3 have 16 rows of k k^T each, warps 4 .. 7 of
 * q k^T. */
__global__ void __launch_bounds__(256, 2)
    chunk_kernel(ql_batch b, struct heads h, struct value_chunk *values, struct key_chunk *keys) {
    extern __shared__ __align__(128) unsigned char raw[];
    struct chunk_shared &x = *(struct chunk_shared *)raw;
    after_previous();
    struct piece p;
    int key = blockIdx.x, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
    if (!find_piece(b, blockIdx.y, CHUNK, &p)) {
        return;
    }
    int j0 = max((h.key0 + key) * h.group - h.value0, 0), j1 = min((h.key0 + key + 1) * h.group - h.value0, h.n_value);
    struct value_chunk *out = values + (int64_t)blockIdx.y * h.n_value;

    /* q and k normalised, in two parts; missing rows are zero */
#pragma unroll 4
    for (int i = warp; i < 2 * CHUNK; i += 8) {
        int row = i >> 1;
        bool is_q = i & 1, real = row < p.n;
        int64_t from = p.row0 + (real ? row : 0);
        float4 v = ((const float4 *)(is_q ? q_row(h, from, j0) : k_row(h, from, j0)))[lane];
        float sum = warp_sum(fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x))));
        float scale = real ? 1.0f / sqrtf(sum + 1e-6f) : 0.0f;
        uint2 first, second;
        v = real ? v : make_float4(0, 0, 0, 0);
        two_parts(v.x * scale, v.y * scale, PART_SCALE, &first.x, &second.x);
        two_parts(v.z * scale, v.w * scale, PART_SCALE, &first.y, &second.y);
        uint8_t(*to)[SIDE_BYTES] = is_q ? x.key.q : x.key.k;
        uint32_t at = row_at(row, lane >> 1) + 8 * (lane & 1);
        *(uint2 *)(to[0] + at) = first;
        *(uint2 *)(to[1] + at) = second;
    }
    if (j0 + warp < j1) {
        make_gates(h, p, j0 + warp, lane, x.gates[warp], out + j0 + warp);
    }
    __syncthreads();
    uint4 *copy = (uint4 *)(keys + (int64_t)blockIdx.y * h.n_key + key);
    for (int i = tid; i < (int)sizeof(struct key_chunk) / 16; i += 256) {
        copy[i] = ((const uint4 *)&x.key)[i];
    }

    int block = warp & 3;
    bool is_q = warp >= 4;
    const uint8_t(*left)[SIDE_BYTES] = is_q ? x.key.q : x.key.k;
    float dot[8][4]; /* rows 16 block + g (+ 8), columns 8 n + 2 c (+ 1) */
    {
        struct sums sum[8] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a1[4], a2[4];
            uint32_t at = row_at(16 * block + (lane & 15), 2 * i + (lane >> 4));
            load_matrix4(a1, left[0] + at);
            load_matrix4(a2, left[1] + at);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (n <= block) {
                    uint32_t b1[4], b2[4];
                    at = row_at(16 * n + (lane & 7) + (lane >> 4) * 8, 2 * i + (lane >> 3 & 1));
                    load_matrix4(b1, x.key.k[0] + at);
                    load_matrix4(b2, x.key.k[1] + at);
                    sum[2 * n].add(a1, a2, b1[0], b1[1], b2[0], b2[1]);
                    sum[2 * n + 1].add(a1, a2, b1[2], b1[3], b2[2], b2[3]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dot[n][e] = (sum[n].big[e] + sum[n].small[e]) *
                            (is_q ? Q_FACTOR / (PART_SCALE * PART_SCALE) : 1.0f / (PART_SCALE * PART_SCALE));
            }
        }
    }
    __syncthreads(); /* q and k have been read: A and T come in their place */

    for (int j = j0; j < j1; j++) {
        struct value_chunk *to = out + j;
        const struct gates &gate = x.gates[(j - j0) % GATED];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (n / 2 <= block) {
                float v[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int row = 16 * block + g + 8 * (e >> 1), col = 8 * n + 2 * c + (e & 1);
                    float decay = col <= row ? decay_of(gate.sum[row], gate.sum[col]) : 0.0f;
                    v[e] = is_q ? dot[n][e] * decay : col < row ? (gate.beta[row] * dot[n][e]) * decay : 0.0f;
                }
                if (is_q) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        uint32_t first, second;
                        int at = (2 * e + (n & 1)) * 128 + lane * 4;
                        two_parts(v[2 * e], v[2 * e + 1], PART_SCALE, &first, &second);
                        *(uint32_t *)(to->p[tri_block(block, n / 2)][0] + at) = first;
                        *(uint32_t *)(to->p[tri_block(block, n / 2)][1] + at) = second;
                    }
                } else {
                    *(float2 *)&x.inv.a[16 * block + g][8 * n + 2 * c] = make_float2(v[0], v[1]);
                    *(float2 *)&x.inv.a[16 * block + g + 8][8 * n + 2 * c] = make_float2(v[2], v[3]);
                }
            }
        }
        __syncthreads();
        if (warp < 2) { /* diagonal blocks, a column a thread; every solved row is taken from those below */
            int base = 16 * (tid >> 4), col = tid & 15;
            float t[16];
#pragma unroll
            for (int r = 0; r < 16; r++) {
                t[r] = r == col ? 1.0f : 0.0f;
            }
#pragma unroll
            for (int n = 0; n < 16; n++) {
                x.inv.t[base + n][base + col] = t[n];
#pragma unroll
                for (int r = n + 1; r < 16; r++) {
                    t[r] = fmaf(-x.inv.a[base + r][base + n], t[n], t[r]);
                }
            }
        }
        __syncthreads();
        invert_blocks(x.inv);
        for (int i = tid; i < TRI * 32; i += 256) { /* eight numbers of a row of an 8 x 8 matrix */
            int tri = i >> 5, part = i >> 3 & 3,
                bi = tri < 1   ? 0
                     : tri < 3 ? 1
                     : tri < 6 ? 2
                               : 3,
                bj = tri - tri_block(bi, 0);
            const float *from = &x.inv.t[16 * bi + 8 * (part >> 1) + (i & 7)][16 * bj + 8 * (part & 1)];
            uint32_t first[4], second[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                two_parts(from[2 * e], from[2 * e + 1], PART_SCALE, &first[e], &second[e]);
            }
            *(uint4 *)(to->t[tri][0] + (i & 31) * 16) = make_uint4(first[0], first[1], first[2], first[3]);
            *(uint4 *)(to->t[tri][1] + (i & 31) * 16) = make_uint4(second[0], second[1], second[2], second[3]);
        }
        if (j + 1 < j1 && (j + 1 - j0) % GATED == 0 && j + 1 + warp < j1) {
            make_gates(h, p, j + 1 + warp, lane, x.gates[warp], out + j + 1 + warp);
        }
        __syncthreads(); /* T has been read; gates are there */
    }
}

/* ---- scan -------------------------------------------------------------------------------------------------------- */

/* Shared memory of a block with TILES x 16 value channels. AHEAD: the next chunk comes while one is worked on; its q only
 * once this one's has been read, for want of room. */
template <int TILES, bool AHEAD> struct scan_shared {
    enum { COLS = 16 * TILES, STAGES = AHEAD ? 2 : 1 };
    uint8_t k[STAGES][2][SIDE_BYTES];
    union {
        uint8_t q[2][SIDE_BYTES];
        float4 late[AHEAD ? 1 : 2 * TILES][12][32]; /* what a warp has for its partner, where q was */
    };
    struct value_chunk value[STAGES];
    float v[STAGES][CHUNK][COLS + 4];            /* the lanes of a warp read different banks */
    float4 early[AHEAD ? 2 * TILES : 0][12][32]; /* the same, in a place of its own */
};
static_assert(sizeof(scan_shared<4, true>) <= 227 * 1024 && sizeof(scan_shared<2, false>) <= 99 * 1024,
              "what a block may have on GPUs of 9.0, and of 8.6");

/* A 16-row operand from 2 x 4 sums: rows g and g + 8 are value channels, `up` their scales. */
__device__ __forceinline__ void operand(const float lower[4], const float upper[4], const float up[2], uint32_t a1[4],
                                        uint32_t a2[4]) {
    two_parts(lower[0], lower[1], up[0], &a1[0], &a2[0]);
    two_parts(lower[2], lower[3], up[1], &a1[1], &a2[1]);
    two_parts(upper[0], upper[1], up[0], &a1[2], &a2[2]);
    two_parts(upper[2], upper[3], up[1], &a1[3], &a2[3]);
}

/* Scales of value channels g and g + 8 from N tiles; `back` takes that and PART_SCALE from a product. */
template <int N> __device__ __forceinline__ void channel_scales(const float (&v)[N][4], float up[2], float back[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            most = fmaxf(most, fmaxf(fabsf(v[n][2 * i]), fabsf(v[n][2 * i + 1])));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        up[i] = scale_to_f16(most, &back[i]);
        back[i] *= 1.0f / PART_SCALE;
    }
}

/* y = m x for a lower triangular m of value_chunk, 16 value channels by 64 rows. HALF: only blocks of rows 0 and 3 (side 0)
 * or 1 and 2 (side 1), which are the same work, as y[0 .. 3]. */
template <bool HALF>
__device__ __forceinline__ void times_tri(const uint8_t (*m)[2][BLOCK_BYTES], const float (&x)[8][4], int side,
                                          int lane, float (&y)[8][4]) {
    constexpr int N = HALF ? 2 : 4;
    float up[2], back[2];
    struct sums sum[2 * N] = {};
    channel_scales(x, up, back);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a1[4], a2[4];
        operand(x[2 * j], x[2 * j + 1], up, a1, a2);
#pragma unroll
        for (int n = 0; n < N; n++) {
            int i = HALF ? (n ? 3 - side : side) : n;
            if (j <= i) {
                uint32_t b1[4], b2[4];
                load_matrix4(b1, m[tri_block(i, j)][0] + lane * 16);
                load_matrix4(b2, m[tri_block(i, j)][1] + lane * 16);
                sum[2 * n].add(a1, a2, b1[0], b1[1], b2[0], b2[1]);
                sum[2 * n + 1].add(a1, a2, b1[2], b1[3], b2[2], b2[3]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 2 * N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            y[n][e] = (sum[n].big[e] + sum[n].small[e]) * back[e >> 1];
        }
    }
}

/* Block (head and 16 TILES value channels, segment). Two warps share 16 value channels: each has half of the key channels,
 * adds up its part of k S and q S for all rows, and gives the other what it lacks; both then have R and Vn, and each the
 * output of half of the rows. Lane 4 g + c holds value channels g and g + 8, and of every tile of 8 key channels or rows
 * numbers 2 c and 2 c + 1. */
template <int TILES, bool AHEAD>
__global__ void __launch_bounds__(64 * TILES, 1)
    scan_kernel(ql_batch b, struct heads h, const struct value_chunk *values, const struct key_chunk *keys) {
    typedef scan_shared<TILES, AHEAD> shared;
    constexpr int COLS = 16 * TILES, THREADS = 64 * TILES;
    extern __shared__ __align__(128) unsigned char raw[];
    shared &x = *(shared *)raw;
    after_previous();
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3, s = blockIdx.y;
    int j = blockIdx.x / (D / COLS), col0 = blockIdx.x % (D / COLS) * COLS, slot = 0, side = warp & 1;
    for (int i = 0; i < s; i++) {
        slot += (b.seg_row[i + 1] - b.seg_row[i] + CHUNK - 1) / CHUNK;
    }
    int row0 = b.seg_row[s], n_row = b.seg_row[s + 1] - row0, n_chunk = (n_row + CHUNK - 1) / CHUNK;
    values += (int64_t)slot * h.n_value + j;
    keys += (int64_t)slot * h.n_key + key_head(h, j);
    auto copy = [&](void *to, const void *from, int bytes) {
        for (int e = tid; e < bytes / 16; e += THREADS) {
            copy_async16((uint8_t *)to + 16 * e, (const uint8_t *)from + 16 * e);
        }
    };
    auto fetch_q = [&](int i) {
        copy(x.q, (keys + (int64_t)i * h.n_key)->q, sizeof x.q);
        commit_async();
    };
    auto fetch = [&](int i) { /* all but q */
                              int at = i % shared::STAGES;
                              copy(x.k[at], (keys + (int64_t)i * h.n_key)->k, sizeof x.k[at]);
                              copy(&x.value[at], values + (int64_t)i * h.n_value, sizeof x.value[at]);
                              for (int e = tid; e < CHUNK * COLS / 4; e += THREADS) {
                                  int r = e / (COLS / 4), col = e % (COLS / 4) * 4;
                                  bool real = i * CHUNK + r < n_row;
                                  copy_async16_or_zero(&x.v[at][r][col],
                                                       v_row(h, row0 + (real ? i * CHUNK + r : 0), j) + col0 + col,
                                                       real);
                              }
                              commit_async();
    };
    fetch(0);
    fetch_q(0);

    float *state = h.state + ((int64_t)b.seg_slot[s] * h.n_value + j) * D * D + (int64_t)(D / 2 * side) * D + col0 +
                   16 * (warp >> 1) + g;
    float st[D / 16][4];
    bool fresh = b.seg_pos[s] == 0;
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            st[n][e] = fresh ? 0.0f : state[(8 * n + 2 * c + (e & 1)) * D + 8 * (e >> 1)];
        }
    }
    for (int i = 0; i < n_chunk; i++) {
        wait_async<0>();
        __syncthreads();
        if (AHEAD && i + 1 < n_chunk) {
            fetch(i + 1);
        }
        const uint8_t(*k)[SIDE_BYTES] = x.k[i % shared::STAGES];
        const struct value_chunk &value = x.value[i % shared::STAGES];
        float up[2], back[2], r[8][4], o[4][4], y[8][4];
        float4(*swap)[12][32] = AHEAD ? x.early : x.late;
        {
            struct sums sk[8] = {}, sq[8] = {};
            channel_scales(st, up, back);
#pragma unroll
            for (int d = 0; d < D / 32; d++) {
                uint32_t a1[4], a2[4], b1[4], b2[4];
                operand(st[2 * d], st[2 * d + 1], up, a1, a2);
#pragma unroll
                for (int n = 0; n < 8; n += 2) {
                    uint32_t at = row_at(8 * n + (lane & 7) + (lane >> 4) * 8, 8 * side + 2 * d + (lane >> 3 & 1));
                    load_matrix4(b1, k[0] + at);
                    load_matrix4(b2, k[1] + at);
                    sk[n].add(a1, a2, b1[0], b1[1], b2[0], b2[1]);
                    sk[n + 1].add(a1, a2, b1[2], b1[3], b2[2], b2[3]);
                    load_matrix4(b1, x.q[0] + at);
                    load_matrix4(b2, x.q[1] + at);
                    sq[n].add(a1, a2, b1[0], b1[1], b2[0], b2[1]);
                    sq[n + 1].add(a1, a2, b1[2], b1[3], b2[2], b2[3]);
                }
            }
            if (!AHEAD) {
                __syncthreads(); /* q has been read */
            }
#pragma unroll
            for (int n = 0; n < 8;
                 n++) { /* rows 16 m .. 16 m + 15 are the output of side 0 for m = 0, 3, else of side 1 */
                float q[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    r[n][e] = (sk[n].big[e] + sk[n].small[e]) * back[e >> 1];
                    q[e] = (sq[n].big[e] + sq[n].small[e]) * back[e >> 1];
                }
                swap[warp][n][lane] = make_float4(r[n][0], r[n][1], r[n][2], r[n][3]);
                bool second = n / 2 == 1 || n / 2 == 2;
                int at = 2 * (n / 4) + (n & 1);
                if (second == (side == 1)) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        o[at][e] = q[e];
                    }
                } else {
                    swap[warp][8 + at][lane] = make_float4(q[0], q[1], q[2], q[3]);
                }
            }
        }
        __syncthreads(); /* partners have what they need; q has been read */
        if (AHEAD && i + 1 < n_chunk) {
            fetch_q(i + 1);
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            int row = 8 * n + 2 * c;
            float2 beta = *(const float2 *)&value.beta[row], bd = *(const float2 *)&value.beta_decay[row];
            float4 f = swap[warp ^ 1][n][lane];
            const float other[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float v = x.v[i % shared::STAGES][row + (e & 1)][16 * (warp >> 1) + g + 8 * (e >> 1)];
                r[n][e] = fmaf(-(e & 1 ? bd.y : bd.x), r[n][e] + other[e], (e & 1 ? beta.y : beta.x) * v);
            }
        }
        times_tri<0>(value.t, r, side, lane, r);
        times_tri<1>(value.p, r, side, lane, y);
        float *to = h.o + ((int64_t)(row0 + i * CHUNK) * h.n_value + j) * D + col0 + 16 * (warp >> 1) + g;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            int row = 16 * (n / 2 ? 3 - side : side) + 8 * (n & 1) + 2 * c;
            float2 qd = *(const float2 *)&value.q_decay[row];
            float4 f = swap[warp ^ 1][8 + n][lane];
            const float other[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (i * CHUNK + row + (e & 1) < n_row) {
                    to[(int64_t)(row + (e & 1)) * h.n_value * D + 8 * (e >> 1)] =
                        fmaf(o[n][e] + other[e], e & 1 ? qd.y : qd.x, y[n][e]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 kd = *(const float2 *)&value.k_decay[8 * n + 2 * c];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                r[n][e] *= e & 1 ? kd.y : kd.x;
            }
        }
        float keep = value.keep;
        channel_scales(r, up, back);
        struct sums sum[8] = {};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t a1[4], a2[4];
            operand(r[2 * m], r[2 * m + 1], up, a1, a2);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t b1[4], b2[4], at = row_at(16 * m + (lane & 15), 8 * side + n + (lane >> 4));
                load_matrix4_transposed(b1, k[0] + at);
                load_matrix4_transposed(b2, k[1] + at);
                sum[n].add(a1, a2, b1[0], b1[1], b2[0], b2[1]);
                sum[n + 1].add(a1, a2, b1[2], b1[3], b2[2], b2[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                st[n][e] = fmaf(keep, st[n][e], (sum[n].big[e] + sum[n].small[e]) * back[e >> 1]);
            }
        }
        if (!AHEAD && i + 1 < n_chunk) {
            __syncthreads();
            fetch(i + 1);
            fetch_q(i + 1);
        }
    }
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            state[(8 * n + 2 * c + (e & 1)) * D + 8 * (e >> 1)] = st[n][e];
        }
    }
}

/* ---- launch ------------------------------------------------------------------------------------------------------ */

static size_t value_bytes(int64_t slots, int64_t n_value) { return (size_t)(slots * n_value) * sizeof(value_chunk); }

size_t ql_gdn_cuda_scratch(const ql_shape *shape) {
    int64_t slots = shape->max_row / CHUNK + shape->max_seg;
    return value_bytes(slots, shape->n_value_head) + (size_t)(slots * shape->n_key_head) * sizeof(struct key_chunk);
}

template <int TILES, bool AHEAD>
static ql_status scan(ql_dev *dev, const ql_batch &b, const struct heads &h, const struct value_chunk *values,
                      const struct key_chunk *keys) {
    return launch(dev, "gdn", scan_kernel<TILES, AHEAD>,
                  dim3((unsigned)(h.n_value * (D / (16 * TILES))), (unsigned)b.n_seg), 64 * TILES,
                  sizeof(scan_shared<TILES, AHEAD>), b, h, values, keys);
}

ql_status ql_gdn_prompt_cuda(ql_dev *dev, const ql_batch &b, const struct heads &h) {
    unsigned slots = n_piece_slots(&b, CHUNK);
    size_t values_bytes = value_bytes(slots, h.n_value),
           need = values_bytes + (size_t)slots * (size_t)h.n_key * sizeof(struct key_chunk);
    if (need > dev->scratch_bytes) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "gdn: scratch is %zu bytes, %d rows need %zu", dev->scratch_bytes,
                       b.n_row, need);
    }
    struct value_chunk *values = (struct value_chunk *)dev->scratch;
    struct key_chunk *keys = (struct key_chunk *)((uint8_t *)dev->scratch + values_bytes);
    QL_TRY(launch(dev, "gdn chunks", chunk_kernel, dim3((unsigned)h.n_key, slots), 256, sizeof(struct chunk_shared), b,
                  h, values, keys));
    /* 221 KB of shared memory a block (187 of half the channels); elsewhere half the channels and one chunk at a time, 95 KB. */
    int cc = cuda(dev)->cc;
    if (cc != 90 && cc != 100 && cc != 103) {
        return scan<2, false>(dev, b, h, values, keys);
    }
    /* Few heads leave SMs idle: blocks of half the channels, each warp with a scheduler for itself. */
    return (int64_t)h.n_value * b.n_seg * (D / 32) <= cuda(dev)->n_sm ? scan<2, true>(dev, b, h, values, keys)
                                                                      : scan<4, true>(dev, b, h, values, keys);
}
