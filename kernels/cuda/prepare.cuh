/* Chunks of prepared x (prompt.cuh): 16 bytes, for each of the four lanes c of the weight layout a run of 2 numbers, 4 of one-byte
 * numbers, that lie a quarter of a weight tile's columns apart.
 */
#ifndef QL_KERNELS_CUDA_PREPARE_CUH
#define QL_KERNELS_CUDA_PREPARE_CUH

#include "kernels/cuda/prompt.cuh"

/* Four E4M3 codes, the first in the lowest byte. */
__device__ __forceinline__ uint32_t four_e4m3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    uint16_t lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
    return lo | (uint32_t)hi << 16;
#else
    return e4m3_of_f32(a) | e4m3_of_f32(b) << 8 | e4m3_of_f32(c) << 16 | e4m3_of_f32(d) << 24;
#endif
}

template <enum x_mode MODE> struct x_chunk {
    static constexpr bool X8 = MODE == X_E4M3;
    static constexpr int N = X8 ? 16 : 8, STEP = 8 * N; /* numbers of a chunk and of a step */
    float v[N];

    /* Where chunk q of a slice begins. kt: columns of a weight tile. */
    static __device__ __forceinline__ int begin(int q, int kt) {
        int in = q % 8;
        return q / 8 * STEP + (X8 ? in / 2 * 32 + in % 2 * 4 : kt == 64 ? in * 2 : in / 4 * 32 + in % 4 * 2);
    }

    /* at(i): where number i of the slice lies, in device or shared memory; a run lies together, aligned to its length. */
    template <typename AT> __device__ __forceinline__ void load(AT at, int q, int kt, bool aligned = true) {
        int first = begin(q, kt);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float *from = at(first + c * (kt / 4));
            if (X8) {
                float4 u = aligned ? *(const float4 *)from : make_float4(from[0], from[1], from[2], from[3]);
                v[c * 4 % N] = u.z; /* the order that e4m3_codes leaves weights in */
                v[(c * 4 + 1) % N] = u.x;
                v[(c * 4 + 2) % N] = u.w;
                v[(c * 4 + 3) % N] = u.y;
            } else {
                float2 u = aligned ? *(const float2 *)from : make_float2(from[0], from[1]);
                v[c * 2 % N] = u.x;
                v[(c * 2 + 1) % N] = u.y;
            }
        }
    }

    __device__ __forceinline__ float larger(float most) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            most = larger_x(most, v[i], MODE);
        }
        return most;
    }

    /* To chunk q of step `step`'s first; up: x_factor of the slice. */
    __device__ __forceinline__ void put(float up, uint8_t *xs, int n_col, int64_t step, int row, int q) const {
        auto place = [&](int col) {
            return (uint4 *)(xs + ((step + q / 8) * n_col + col) * 128 + ((q ^ col) & 7) * 16);
        };
        uint32_t w[4], rest[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (X8) {
                w[i] = four_e4m3(v[4 * i] / up, v[4 * i + 1] / up, v[4 * i + 2] / up, v[4 * i + 3] / up);
            } else if constexpr (MODE == X_BF16) {
                w[i] = two_bf16(v[2 * i], v[2 * i + 1]);
            } else {
                float r[2];
                uint16_t h[2];
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    float u = v[2 * i + b], f = MODE == X_E4M3_AS_F16   ? f32_of_e4m3(e4m3_of_f32(u / up))
                                                : MODE == X_BF16_AS_F16 ? round_bf16(u) * up
                                                                        : u * up;
                    __half hi = __float2half_rn(f);
                    h[b] = __half_as_ushort(hi);
                    r[b] = fabsf(f) <= 65504.0f ? (f - __half2float(hi)) * 2048.0f : 0.0f; /* infinity, NaN: hi */
                }
                w[i] = h[0] | (uint32_t)h[1] << 16;
                rest[i] = pack_f16x2(r[0], r[1]);
            }
        }
        if constexpr (MODE == X_F16X2) {
            *place(2 * row) = make_uint4(w[0], w[1], w[2], w[3]);
            *place(2 * row + 1) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
        } else {
            *place(row) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
};

#endif
