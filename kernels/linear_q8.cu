/* linear in precision Q8, NVFP4 weights (q8.h): activations to INT8, by a launch of their own for all products of one x where the
 * kernel does not make them itself, then
 *
 *   dp4a        one row of x: four products an instruction, weights unpacked by byte permutes; two kernels, by how weights come, one
 *               of which makes the codes itself
 *   wmma        up to 127 rows: integer matrix instructions on tiles of 16 x 16 x 16, a tile a warp
 *   wide        from 128 rows on (wide_min_rows): tiles of 128 x 64 (linear_q8_wide.cu)
 *   reference   any shape: code by code
 *
 * Each takes any number of rows, so that any can be forced by name and compared; a row's bits do not depend on which rows share
 * the call with it as long as the kernel is the same one. The choice depends on the number of rows and the slice's length, hence
 * not on the number of lanes.
 */
#include "kernels/cuda/q8.cuh"

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* a / b as IEEE division has it; inverse: 1 / b, rounded. The remainder of the first guess is exact, so what it adds rounds to
 * the nearest (Markstein). That does not hold for quotients below the least normal number: as a scale they become 1e-8, as a
 * code 0. */
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
    float q = a * inverse;
    return fmaf(fmaf(-q, b, a), inverse, q);
}

/* Codes of N channels of a block, whose others are with the lanes beside this one, and its scale. The whole warp. */
template <int N>
__device__ __forceinline__ void quantize(const float (&v)[N], uint32_t (&codes)[N / 4], float *block_scale) {
    uint32_t most = 0; /* magnitudes rise with their bits, a NaN above all */
#pragma unroll
    for (int i = 0; i < N; i++) {
        most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
    }
#pragma unroll
    for (int o = QL_Q8_BLOCK / N / 2; o; o >>= 1) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, o));
    }
    float scale = __uint_as_float(most); /* stays what it is when infinite or NaN */
    if (most < 0x7f800000u) {
        scale = quotient(scale, 127.0f, 1.0f / 127.0f);
    }
    scale = scale < 1e-8f ? 1e-8f : scale;
    float inverse = __frcp_rn(scale);
    uint32_t q[N];
#pragma unroll
    for (int i = 0; i < N; i++) { /* 1.5 2^23 + a whole number: its bits end with the number's */
        q[i] = __float_as_uint(quotient(v[i], scale, inverse) + 12582912.0f);
    }
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint32_t *u = &q[4 * i];
        codes[i] = most < 0x7f800000u ? prmt(prmt(u[0], u[1], 0x0040), prmt(u[2], u[3], 0x0040), 0x5410) : 0;
    }
    *block_scale = scale;
}

/* Eight threads a block of 32 channels, four channels each. Grid (blocks of all slices, row). count: NULL, or what begins as
 * WIDE_COUNTS zeros. */
__global__ void __launch_bounds__(128) quantize_kernel(const float *x, int64_t ldx, int k, int ks, int blocks,
                                                       int n_block, int8_t *code, float *d, unsigned *count) {
    after_previous();
    if (count && blockIdx.x == 0 && blockIdx.y == 0) {
        for (int i = threadIdx.x; i < WIDE_COUNTS; i += blockDim.x) {
            count[i] = 0;
        }
    }
    int row = blockIdx.y, block = blockIdx.x * 16 + (threadIdx.x >> 3), in = (threadIdx.x & 7) * 4;
    bool there = block < n_block;
    block = there ? block : n_block - 1;
    int64_t at = (int64_t)block * QL_Q8_BLOCK + in;
    int n = 4; /* in the slice; no more than n of the four are its */
    if (ks % QL_Q8_BLOCK) {
        int c = block % blocks * QL_Q8_BLOCK + in;
        n = min(4, ks - c);
        at = (int64_t)(block / blocks) * ks + c;
    }
    const float *from = x + row * ldx + at;
    int8_t *to = code + (int64_t)row * k + at;
    float v[4] = {}, scale;
    if (n == 4 && (uintptr_t)from % 16 == 0) {
        float4 u = *(const float4 *)from;
        v[0] = u.x, v[1] = u.y, v[2] = u.z, v[3] = u.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = i < n ? from[i] : 0.0f;
        }
    }
    uint32_t word[1];
    quantize<4>(v, word, &scale);
    uint32_t codes = word[0];
    if (!there) {
        return;
    }
    if (n == 4 && (uintptr_t)to % 4 == 0) {
        *(uint32_t *)to = codes;
    } else {
        for (int i = 0; i < n; i++) {
            to[i] = (int8_t)(codes >> 8 * i);
        }
    }
    if (in == 0) {
        d[(int64_t)block * gridDim.y + row] = scale;
    }
}

/* ---- reference --------------------------------------------------------------------------------------------------- */

/* A warp a result, of target 0. Lane l takes blocks l, l + 32, ... of each slice. */
__global__ void __launch_bounds__(256) reference_kernel(struct q8_products p) {
    after_previous();
    const struct q8_target &t = p.target[0];
    int r = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (r >= t.n) {
        return;
    }
    const uint8_t *w = t.w + r * p.row_bytes;
    for (int row = blockIdx.y; row < p.n_row; row += gridDim.y) {
        float part[MAX_SLICES];
#pragma unroll
        for (int s = 0; s < MAX_SLICES; s++) {
            part[s] = 0.0f;
            if (s >= p.n_slice) {
                continue;
            }
            const float *d = p.d + (int64_t)s * p.blocks * p.n_row + row;
            float sum = 0.0f;
            for (int b = lane; b < p.blocks; b += 32) {
                float both = 0.0f;
                int c = s * p.ks + b * QL_Q8_BLOCK, end = min(c + QL_Q8_BLOCK, (s + 1) * p.ks);
                while (c < end) { /* a slice may begin inside a group */
                    int group = c / QL_NVFP4_GROUP, stop = min((group + 1) * QL_NVFP4_GROUP, end), dot = 0;
                    const uint8_t *record = w + group / 4 * QL_Q8_RECORD_BYTES;
                    for (; c < stop; c++) {
                        int in = c % QL_Q8_RECORD, code = record[4 + in / 2] >> 4 * (in & 1) & 15;
                        int m = (int)(((uint64_t)Q8_HIGH << 32 | Q8_LOW) >> 8 * (code & 7) & 255);
                        dot += p.x[(int64_t)row * p.k + c] * (code & 8 ? -m : m);
                    }
                    both = fmaf((float)dot, q8_scale(record[group % 4]), both);
                }
                sum = fmaf(both, d[(int64_t)b * p.n_row], sum);
            }
            part[s] = warp_sum(sum) * t.factor;
        }
        if (lane == 0) {
            t.y[row * t.ldy + r] = slice_tree(part, p.n_slice);
        }
    }
}

/* ---- dp4a -------------------------------------------------------------------------------------------------------- */

/* A warp: DP4A_ROWS weight rows, one row of x, and some of the slices, all or a quarter; in the latter case the block's warps
 * have the same rows. Lane l takes groups l, l + 32, ... of each slice: 32 groups, a chunk, are 288 bytes in a row. DP4A_AHEAD
 * chunks are on their way at any time, the first ones before the kernel in front is complete.
 */
enum {
    DP4A_ROWS = 4,
    DP4A_AHEAD = 2,
    DP4A_WARPS = 4,
    DP4A_BLOCKS = 5, /* an SM */
    DP4A_CHUNK_BYTES = 32 / 4 * QL_Q8_RECORD_BYTES
};

struct dp4a_chunk {
    uint32_t q0[DP4A_ROWS], q1[DP4A_ROWS], s[DP4A_ROWS];
};

template <bool SPLIT>
__global__ void __launch_bounds__(32 * DP4A_WARPS, DP4A_BLOCKS) dp4a_kernel(struct q8_products p) {
    __shared__ float sums[DP4A_WARPS][DP4A_ROWS];
    allow_next();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.y;
    int unit = SPLIT ? blockIdx.x : blockIdx.x * DP4A_WARPS + warp;
    const struct q8_target &t = q8_target_of(p, DP4A_ROWS, &unit);
    int r0 = unit * DP4A_ROWS, groups = p.ks / QL_NVFP4_GROUP, per_slice = (groups + 31) / 32,
        slices = SPLIT ? p.n_slice / DP4A_WARPS : p.n_slice, slice0 = SPLIT ? warp * slices : 0,
        left = per_slice * slices;
    if (r0 >= t.n) {
        return; /* never where warps share their rows */
    }

    /* Where the lane's next chunk is: its scale, and so many bytes further its codes. */
    const uint8_t *at[DP4A_ROWS];
    int of_code = 0, ahead = 0, ahead_slice = slice0; /* ahead: group in the slice */
    auto begin_slice = [&]() {
        int g = ahead_slice * groups + lane, byte = g / 4 * QL_Q8_RECORD_BYTES + g % 4;
#pragma unroll
        for (int i = 0; i < DP4A_ROWS; i++) {
            at[i] = t.w + min(r0 + i, t.n - 1) * p.row_bytes + byte;
        }
        of_code = 4 + 7 * (g % 4);
        ahead = ahead_slice < slice0 + slices ? lane : groups;
    };
    auto load = [&](struct dp4a_chunk &c) {
        bool there = ahead < groups;
#pragma unroll
        for (int i = 0; i < DP4A_ROWS; i++) {
            c.s[i] = 0; /* and codes do not matter */
            if (there) {
                const uint32_t *q = (const uint32_t *)(at[i] + of_code);
                c.s[i] = __ldg(at[i]);
                c.q0[i] = __ldg(q);
                c.q1[i] = __ldg(q + 1);
            }
            at[i] += DP4A_CHUNK_BYTES;
        }
        ahead += 32;
        if (ahead - lane >= groups) {
            ahead_slice++;
            begin_slice();
        }
    };
    struct dp4a_chunk c[DP4A_AHEAD] = {};
    begin_slice();
#pragma unroll
    for (int j = 0; j < DP4A_AHEAD; j++) {
        load(c[j]);
    }
    wait_previous();

    const uint32_t low = q8_low();
    float acc[DP4A_ROWS] = {}, mine[DP4A_ROWS] = {}; /* mine: lane s keeps the sum of the warp's slice s */
    int slice = 0, now = lane;
    const int8_t *x = p.x + (int64_t)row * p.k + (slice0 * groups + lane) * QL_NVFP4_GROUP;
    const float *d = p.d + (int64_t)(slice0 * p.blocks + lane / 2) * p.n_row + row;
    int64_t d_chunk = 16 * (int64_t)p.n_row;
    while (left > 0) {
#pragma unroll
        for (int j = 0; j < DP4A_AHEAD; j++) {
            if (j > 0 && left <= 0) {
                break;
            }
            int4 v = *(const int4 *)x; /* beyond the slice whatever is there: its weights have scale 0 */
            float scale = now < groups ? *d : 0.0f;
#pragma unroll
            for (int i = 0; i < DP4A_ROWS; i++) {
                float dot = (float)q8_dot16(low, c[j].q0[i], c[j].q1[i], v);
                acc[i] = fmaf(dot * q8_scale(c[j].s[i]), scale, acc[i]);
            }
            load(c[j]);
            x += 32 * QL_NVFP4_GROUP;
            d += d_chunk;
            now += 32;
            left--;
            if (now - lane >= groups) {
#pragma unroll
                for (int i = 0; i < DP4A_ROWS; i++) {
                    float sum = warp_sum(acc[i]) * t.factor;
                    mine[i] = lane == slice ? sum : mine[i];
                    acc[i] = 0.0f;
                }
                slice++;
                now = lane;
                x += (groups - 32 * per_slice) * QL_NVFP4_GROUP;
                d += (int64_t)(p.blocks - 16 * per_slice) * p.n_row;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < DP4A_ROWS; i++) {
        for (int o = 1; o < slices; o *= 2) { /* the tree: lanes 0 .. slices - 1 hold its leaves */
            mine[i] += __shfl_xor_sync(0xffffffffu, mine[i], o);
        }
        if (SPLIT && lane == 0) {
            sums[warp][i] = mine[i];
        } else if (lane == 0 && r0 + i < t.n) {
            t.y[row * t.ldy + r0 + i] = mine[i];
        }
    }
    if (SPLIT) {
        __syncthreads();
        int i = threadIdx.x;
        if (i < DP4A_ROWS && r0 + i < t.n) {
            t.y[row * t.ldy + r0 + i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
        }
    }
}

/* ---- dp4a through shared memory ---------------------------------------------------------------------------------- */

/* The same sums in the same order, for rows of whole pieces of 16 bytes, from compute capability 8.0 on, in one launch with the
 * codes of x.
 *
 * A warp's weights come by asynchronous copies through a ring of its own, so that far more of them are on their way than registers
 * would hold, across the ends of rows and before the kernel in front is complete. One block has an SM and stays for many units of
 * RING_ROWS rows, a warp's each; where there are slices, two warps have a unit, half of its slices each. A stage is RING_CHUNKS
 * chunks of each row, a chunk 32 groups, one a lane.
 *
 * Each block makes all codes of x for itself, in shared memory: from global memory they come late, as if an SM's loads and
 * asynchronous copies were answered in their order, x behind weights just asked for. Therefore RING_EARLY.
 *
 * Groups of all slices of a warp follow one another, so a slice may begin with any lane and end inside a chunk. Its sum is the same
 * as if it began with lane 0, since warp_sum adds numbers 16 lanes apart, then 8, 4, 2, 1: which number is in lane 0 is all that a
 * rotation changes.
 */
enum {
    RING_ROWS = 4,
    RING_STAGES = 3,
    RING_EARLY = 1,  /* stages fetched before the kernel in front is complete, and so before x */
    RING_WARPS = 20, /* at most */
    RING_CHUNKS = 3,
    RING_PIECE = RING_CHUNKS * DP4A_CHUNK_BYTES,
    RING_PLACE = RING_PIECE + 16, /* of a piece: copies begin at multiples of 16 bytes */
    RING_LANES = 32 / RING_ROWS,  /* copy a row's piece */
    RING_STAGE = RING_ROWS * RING_PLACE,
    RING_BYTES = RING_STAGES * RING_STAGE,
    RING_X = 4,    /* pieces of eight channels of x that a thread has on their way at a time */
    RING_PAD = 128 /* zeros behind the scales of x: lanes behind the end of x read there, and as codes what they find */
};

/* Sums over a warp of four numbers a lane, each as warp_sum has it; lanes 8 i .. 8 i + 7 get the i-th. */
__device__ __forceinline__ float warp_sum4(const float v[4], int lane) {
    bool up = lane & 16, odd = lane & 8;
    float a = (up ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, up ? v[0] : v[2], 16),
          b = (up ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, up ? v[1] : v[3], 16);
    float sum = (odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 8);
#pragma unroll
    for (int d = 4; d; d >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    }
    return sum;
}

template <bool SPLIT>
__global__ void __launch_bounds__(32 * RING_WARPS, 1)
    ring_kernel(struct q8_products p, int units, const float *x, int64_t ldx) {
    extern __shared__ __align__(16) uint8_t rings[];
    __shared__ float sums[2][RING_WARPS / 2][RING_ROWS];
    allow_next();
    constexpr int MEMBERS = SPLIT ? 2 : 1; /* warps of the same rows */
    int tid = threadIdx.x, warp = tid >> 5, lane = kept(tid & 31), row = blockIdx.y, team = warp / MEMBERS,
        member = warp % MEMBERS;
    int warps = blockDim.x / 32, step = gridDim.x * (warps / MEMBERS), first = team * gridDim.x + blockIdx.x;
    int groups = p.ks / QL_NVFP4_GROUP, slices = p.n_slice / MEMBERS, slice0 = member * slices, all = groups * slices;
    int begin = slice0 * groups / 4 * QL_Q8_RECORD_BYTES, skew = begin & 15; /* of the warp's part of a row */
    uint8_t *x_codes = rings + warps * RING_BYTES;
    float *x_scales = (float *)(x_codes + p.k);
    int ring = (int)__cvta_generic_to_shared(rings) + warp * RING_BYTES;

    /* What is fetched next: this lane's place in a row's piece. */
    int fetch_unit = first, bytes_left = 0, in_piece = kept(lane % RING_LANES * 16),
        to = kept(ring + lane / RING_LANES * RING_PLACE + in_piece);
    const uint8_t *at = NULL;
    auto fetch = [&](int slot) {
        if (bytes_left <= skew) {
            bytes_left = 0;
            if (fetch_unit < units) {
                int u = fetch_unit;
                const struct q8_target &t = q8_target_of(p, RING_ROWS, &u);
                at = t.w + min(u * RING_ROWS + lane / RING_LANES, t.n - 1) * p.row_bytes + begin - skew + in_piece;
                bytes_left = skew + all / 4 * QL_Q8_RECORD_BYTES;
                fetch_unit += step;
            }
        }
        uint32_t place = to + slot;
        int last = min(bytes_left, (int)RING_PLACE) - in_piece; /* bytes of the piece from this lane's place on */
#pragma unroll
        for (int i = 0; i < RING_PLACE; i += RING_LANES * 16) {
            copy_async16_if(i < last, place + i, at + i);
        }
        at += RING_PIECE;
        bytes_left -= RING_PIECE;
        commit_async();
    };
#pragma unroll 1
    for (int i = 0; i < RING_EARLY; i++) {
        fetch(i * RING_STAGE);
    }
    wait_previous();

    const float *from = x + row * ldx;
    for (int c = 0; c < p.k / 8; c += RING_X * blockDim.x) {
        float4 v[RING_X][2];
#pragma unroll
        for (int i = 0; i < RING_X; i++) {
            int j = c + i * blockDim.x + tid;
            if (j < p.k / 8) {
                v[i][0] = *(const float4 *)(from + 8 * j);
                v[i][1] = *(const float4 *)(from + 8 * j + 4);
            }
        }
#pragma unroll 1
        for (int i = RING_EARLY; i < RING_STAGES - 1 && c == 0; i++) {
            fetch(i * RING_STAGE);
        }
#pragma unroll
        for (int i = 0; i < RING_X; i++) {
            int j = c + i * blockDim.x + tid;
            if (j < p.k / 8) { /* all of a warp or none */
                const float4 a = v[i][0], b = v[i][1];
                const float eight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
                uint32_t codes[2];
                float scale;
                quantize<8>(eight, codes, &scale);
                ((uint2 *)x_codes)[j] = make_uint2(codes[0], codes[1]);
                if (j % 4 == 0) {
                    x_scales[j / 4] = scale;
                }
            }
        }
    }
    for (int i = tid; i < RING_PAD; i += blockDim.x) {
        x_scales[p.k / QL_Q8_BLOCK + i] = 0.0f;
    }
    __syncthreads();

    const uint32_t low = q8_low();
    int slot = 0, free_slot = (RING_STAGES - 1) * RING_STAGE, round = 0,
        q_at = kept(ring + (lane >> 2) * QL_Q8_RECORD_BYTES + skew + 4 + 8 * (lane & 3)),
        s_at = kept(ring + (lane >> 2) * QL_Q8_RECORD_BYTES + skew + (lane & 3));
    int x_of = kept((int)__cvta_generic_to_shared(x_codes) + (slice0 * groups + lane) * 16),
        d_of = kept((int)__cvta_generic_to_shared(x_scales) + (slice0 * p.blocks + lane / 2) * 4);
#pragma unroll 1
    for (int unit = first; unit < units; unit += step) {
        int u = unit;
        const struct q8_target &t = q8_target_of(p, RING_ROWS, &u);
        float acc[RING_ROWS] = {}, mine = 0.0f; /* mine: lane 8 i + s keeps the sum of row i, slice s of the warp's */
        int slice = 0, left = groups;           /* of the slice, from the chunk's first group on */
        int x_at = x_of, d_at = d_of;
#pragma unroll 1
        for (int done = 0; done < all; done += 32 * RING_CHUNKS) {
            wait_async<RING_STAGES - 2>();
            __syncwarp(); /* all lanes' pieces are here, and the stage before is read */
            fetch(free_slot);
            free_slot = slot;
            int q = q_at + slot, s = s_at + slot;
            slot = slot == (RING_STAGES - 1) * RING_STAGE ? 0 : slot + RING_STAGE;
#pragma unroll
            for (int h = 0; h < RING_CHUNKS; h++) {
                if (h == 0 || done + 32 * h < all) {
                    uint4 codes = load_shared4(x_at + h * 512);
                    int4 x = make_int4((int)codes.x, (int)codes.y, (int)codes.z, (int)codes.w);
                    float scale = __uint_as_float(load_shared_u32(d_at + h * 64)), part[RING_ROWS];
#pragma unroll
                    for (int i = 0; i < RING_ROWS; i++) {
                        int in = i * RING_PLACE + h * DP4A_CHUNK_BYTES;
                        part[i] = q8_dot16f(low, load_shared_u32(q + in), load_shared_u32(q + in + 4), x) *
                                  q8_scale(load_shared_u8(s + in));
                    }
                    if (left > 32) {
#pragma unroll
                        for (int i = 0; i < RING_ROWS; i++) {
                            acc[i] = fmaf(part[i], scale, acc[i]);
                        }
                    } else { /* the slice's end, with lane left - 1, and perhaps the row's, behind which codes and scales
                              * of weights are whatever there is */
                        bool before = lane < left, there = done + 32 * h + lane < all;
                        float last[RING_ROWS];
#pragma unroll
                        for (int i = 0; i < RING_ROWS; i++) {
                            part[i] = there ? part[i] : 0.0f;
                            last[i] = before ? fmaf(part[i], scale, acc[i]) : acc[i];
                            acc[i] = before ? 0.0f : part[i] * scale;
                        }
                        float sum = warp_sum4(last, lane) * t.factor;
                        mine = (lane & 7) == slice ? sum : mine;
                        slice++;
                        left += groups;
                    }
                    left -= 32;
                }
            }
            x_at += 32 * RING_CHUNKS * QL_NVFP4_GROUP;
            d_at += 16 * RING_CHUNKS * (int)sizeof(float);
        }
        for (int o = 1; o < slices; o *= 2) { /* the tree */
            mine += __shfl_xor_sync(0xffffffffu, mine, o);
        }
        int out = u * RING_ROWS + (lane >> 3);
        bool has = (lane & 7) == 0 && out < t.n;
        if (SPLIT) { /* the tree's last sum; two of them, so that the second warp may be a unit ahead */
            if (member == 1 && has) {
                sums[round][team][lane >> 3] = mine;
            }
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(MEMBERS * 32) : "memory");
            if (member == 0 && has) {
                mine += sums[round][team][lane >> 3];
            }
            round ^= 1;
        }
        if (member == 0 && has) {
            t.y[row * t.ldy + out] = mine;
        }
    }
}

/* ---- wmma -------------------------------------------------------------------------------------------------------- */

/* A warp: 16 weight rows (A) and 16 rows of x (B, two tiles of 8 columns). Each 16 columns of K are one group. */
enum { WMMA_WARPS = 4 };

/* A slice's sum joins the tree: levels wait in `stack`. On the last slice v is the whole sum. */
__device__ __forceinline__ void join_tree(float v[8], float stack[TREE_LEVELS][8], int slice) {
    bool on = true;
#pragma unroll
    for (int l = 0; l < TREE_LEVELS; l++) {
        bool add = on && (slice >> l & 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = add ? stack[l][i] + v[i] : v[i];
            stack[l][i] = on && !add ? v[i] : stack[l][i];
        }
        on = add;
    }
}

__global__ void __launch_bounds__(32 * WMMA_WARPS) wmma_kernel(struct q8_products p) {
    after_previous();
    int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, unit = blockIdx.x * WMMA_WARPS + (threadIdx.x >> 5);
    const struct q8_target &t = q8_target_of(p, 16, &unit);
    int r = unit * 16 + g, t0 = blockIdx.y * 16;
    if (unit * 16 >= t.n) {
        return;
    }
    /* rows beyond the last repeat it; their results are dropped */
    const uint8_t *w = t.w + min(r, t.n - 1) * p.row_bytes, *w8 = t.w + min(r + 8, t.n - 1) * p.row_bytes;
    const int8_t *x = p.x + (int64_t)min(t0 + g, p.n_row - 1) * p.k + 4 * c,
                 *x8 = p.x + (int64_t)min(t0 + g + 8, p.n_row - 1) * p.k + 4 * c;
    const float *d[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        d[i] = p.d + min(t0 + 2 * c + (i & 1) + (i >> 1) * 8, p.n_row - 1);
    }
    float v[8], stack[TREE_LEVELS][8] = {};
    for (int slice = 0; slice < p.n_slice; slice++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = 0.0f;
        }
#pragma unroll 2
        for (int b = 0; b < p.blocks; b++) {
            float both[8] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int in = b * QL_Q8_BLOCK + h * QL_NVFP4_GROUP, group = (slice * p.ks + in) / QL_NVFP4_GROUP;
                if (in >= p.ks) {
                    break;
                }
                int at = group / 4 * QL_Q8_RECORD_BYTES, word = at + 4 + group % 4 * 8 + (c >> 1) * 4,
                    shift = (c & 1) * 16;
                uint32_t a0 = q8_decode4(__ldg((const uint32_t *)(w + word)) >> shift),
                         a1 = q8_decode4(__ldg((const uint32_t *)(w8 + word)) >> shift);
                float s = q8_scale(__ldg(w + at + group % 4)), s8 = q8_scale(__ldg(w8 + at + group % 4));
                float o = q8_unbias(s), o8 = q8_unbias(s8);
                int sum[2][4];
                mma_s8(sum[0], a0, a1, *(const uint32_t *)(x + group * QL_NVFP4_GROUP));
                mma_s8(sum[1], a0, a1, *(const uint32_t *)(x8 + group * QL_NVFP4_GROUP));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float f = __int_as_float(sum[i >> 2][i & 3]);
                    both[i] += fmaf(f, i & 2 ? s8 : s, i & 2 ? o8 : o);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                v[i] = fmaf(both[i], d[(i >> 2) * 2 + (i & 1)][(int64_t)(slice * p.blocks + b) * p.n_row], v[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] *= t.factor;
        }
        join_tree(v, stack, slice);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = t0 + 2 * c + (i & 1) + (i >> 2) * 8, out = r + (i & 2) * 4;
        if (row < p.n_row && out < t.n) {
            t.y[row * t.ldy + out] = v[i];
        }
    }
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

static ql_status choose(ql_dev *dev, const ql_linear_args *a, enum q8_kernel *out) {
    int ks = a->w->k / a->n_slice;
    enum q8_kernel forced = cuda(dev)->q8_kernel;
    int unit = forced == Q8_WIDE ? 32 : forced == Q8_AUTO || forced == Q8_REFERENCE ? 1 : 16;
    if (ks % unit) {
        return ql_fail(dev->err, QL_ERR_USAGE,
                       "nvfp4=%s takes slices of a multiple of %d columns; %d x %d in %d slices has %d",
                       ql_q8_kernel_names[forced], unit, a->w->n, a->w->k, a->n_slice, ks);
    }
    *out = forced != Q8_AUTO                                               ? forced
           : ks % 16                                                       ? Q8_REFERENCE
           : a->n_row == 1                                                 ? Q8_DP4A
           : a->n_row >= cuda(dev)->wide_min_rows && ks % QL_Q8_BLOCK == 0 ? Q8_WIDE
                                                                           : Q8_WMMA;
    return QL_OK;
}

/* Units of `rows` weight rows of all targets. */
static int64_t units_of(const struct q8_products *p, int rows) {
    int64_t n = 0;
    for (int i = 0; i < p->n_target; i++) {
        n += ceil_div(p->target[i].n, rows);
    }
    return n;
}

static ql_status run_reference(ql_dev *dev, const struct q8_products *p) {
    struct q8_products one = *p;
    one.n_target = 1;
    for (int i = 0; i < p->n_target; i++) {
        one.target[0] = p->target[i];
        unsigned rows = p->n_row < 65535 ? (unsigned)p->n_row : 65535;
        QL_TRY(
            launch(dev, "linear", reference_kernel, dim3((unsigned)ceil_div(one.target[0].n, 8), rows), 256, 0, one));
    }
    return QL_OK;
}

/* Warps of a block of ring_kernel, 0: it does not serve. It wants rows that begin at multiples of 16 bytes, a warp's part of one with
 * a whole record, one end of a slice at most in a chunk, and shared memory for x and the rings. */
static int ring_warps(const ql_dev *dev, const struct q8_products *p, size_t *shared) {
    int groups = p->ks / QL_NVFP4_GROUP, slices = p->n_slice % 2 ? p->n_slice : p->n_slice / 2;
    if (cuda(dev)->cc < 80 || p->ks % QL_Q8_BLOCK || groups < 32 || groups * slices % 4 ||
        p->k % (16 * QL_NVFP4_GROUP)) {
        return 0;
    }
    *shared = (size_t)p->k + (size_t)(p->k / QL_Q8_BLOCK + RING_PAD) * sizeof(float);
    int64_t room = cuda(dev)->block_shared - 1024; /* 1024: what the kernel has beside them */
    int64_t warps = (room - (int64_t)*shared) / RING_BYTES;
    warps = warps < 4 ? 0 : warps < RING_WARPS ? warps / 4 * 4 : RING_WARPS;
    *shared += (size_t)(warps * RING_BYTES);
    return (int)warps;
}

static ql_status run_ring(ql_dev *dev, const struct q8_products *p, int warps, size_t shared, const float *x,
                          int64_t ldx) {
    int64_t units = units_of(p, RING_ROWS), blocks = units < cuda(dev)->n_sm ? units : cuda(dev)->n_sm;
    return launch(dev, "linear", p->n_slice % 2 == 0 ? ring_kernel<true> : ring_kernel<false>,
                  dim3((unsigned)blocks, (unsigned)p->n_row), (unsigned)(32 * warps), shared, *p, (int)units, x, ldx);
}

static ql_status run(ql_dev *dev, enum q8_kernel kernel, struct q8_products *p, size_t room) {
    unsigned rows = (unsigned)p->n_row;
    switch (kernel) {
    case Q8_DP4A:
        if (p->n_slice % DP4A_WARPS == 0) {
            return launch(dev, "linear", dp4a_kernel<true>, dim3((unsigned)units_of(p, DP4A_ROWS), rows),
                          32 * DP4A_WARPS, 0, *p);
        }
        return launch(dev, "linear", dp4a_kernel<false>,
                      dim3((unsigned)ceil_div(units_of(p, DP4A_ROWS), DP4A_WARPS), rows), 32 * DP4A_WARPS, 0, *p);
    case Q8_WMMA:
        return launch(dev, "linear", wmma_kernel,
                      dim3((unsigned)ceil_div(units_of(p, 16), WMMA_WARPS), (unsigned)ceil_div(rows, 16)),
                      32 * WMMA_WARPS, 0, *p);
    case Q8_WIDE: return ql_linear_q8_wide_cuda(dev, p, room);
    default: return run_reference(dev, p);
    }
}

/* Scratch: codes, scales, stacks. As many rows at a time as leave the tree its room. */
static ql_status run_shared(ql_dev *dev, const ql_linear_args *a, int32_t n, enum q8_kernel kernel) {
    const ql_weight *w = a->w;
    struct q8_products p {};
    p.k = w->k;
    p.n_slice = a->n_slice;
    p.ks = w->k / a->n_slice;
    p.blocks = ql_q8_blocks(p.ks);
    p.row_bytes = ql_q8_row_bytes(w->k);
    p.n_target = n;
    for (int i = 0; i < n; i++) {
        p.target[i] = q8_target{(const uint8_t *)a[i].w->data, a[i].y, a[i].ldy, a[i].w->factor * 128.0f, a[i].w->n};
    }
    int n_block = p.n_slice * p.blocks;
    auto used = [&](int64_t rows) {
        return round_256((size_t)(rows * p.k)) + round_256((size_t)(rows * n_block) * sizeof(float));
    };
    size_t tree = kernel == Q8_WIDE ? ql_q8_wide_stack(&p) : 0;
    int64_t most = a->n_row < 65535 ? a->n_row : 65535; /* the grid's second dimension has 16 bits */
    while (most > 1 && used(most) + tree > dev->scratch_bytes) {
        most = most > 2 * WIDE_X ? most - WIDE_X : most / 2;
    }
    if (used(most) + tree > dev->scratch_bytes) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "linear: scratch of %zu bytes does not hold a row of %d",
                       dev->scratch_bytes, p.k);
    }
    for (int t = 0; t < a->n_row; t += (int)most) {
        int rows = a->n_row - t < most ? a->n_row - t : (int)most;
        uint8_t *scratch = (uint8_t *)dev->scratch;
        p.n_row = rows;
        p.x = (const int8_t *)scratch;
        p.d = (const float *)(scratch + round_256((size_t)rows * (size_t)p.k));
        size_t room = dev->scratch_bytes - used(rows), counts = WIDE_COUNTS * sizeof *p.count;
        bool counted = kernel == Q8_WIDE && room >= counts + tree;
        p.count = counted ? (unsigned *)(scratch + used(rows)) : NULL;
        room -= counted ? counts : 0;
        const float *x = a->x + t * a->ldx;
        p.stack = (float *)(scratch + dev->scratch_bytes - room);
        size_t shared;
        int warps = kernel == Q8_DP4A && (uintptr_t)x % 16 == 0 && (rows == 1 || a->ldx % 4 == 0)
                        ? ring_warps(dev, &p, &shared)
                        : 0;
        if (warps > 0) {
            QL_TRY(run_ring(dev, &p, warps, shared, x, a->ldx));
        } else {
            QL_TRY(launch(dev, "linear: activations", quantize_kernel,
                          dim3((unsigned)ceil_div(n_block, 16), (unsigned)rows), 128, 0, x, a->ldx, p.k, p.ks, p.blocks,
                          n_block, (int8_t *)p.x, (float *)p.d, p.count));
            QL_TRY(run(dev, kernel, &p, room));
        }
        for (int i = 0; i < n; i++) {
            p.target[i].y += rows * p.target[i].ldy;
        }
    }
    return QL_OK;
}

ql_status ql_linear_q8_cuda(ql_dev *dev, const ql_linear_args *a, int32_t n) {
    enum q8_kernel kernel;
    QL_TRY(choose(dev, a, &kernel));
    int32_t together = cuda(dev)->no_shared_q8 ? 1 : n;
    for (int32_t i = 0; i < n; i += together) {
        QL_TRY(run_shared(dev, a + i, together, kernel));
    }
    return QL_OK;
}
