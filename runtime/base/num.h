/* Number formats of checkpoints and caches, one value at a time. Shared by C and CUDA host code; the definition that
 * faster decoders are compared with.
 *
 *   E2M1  s eem            magnitudes 0 .5 1 1.5 2 3 4 6
 *   E4M3  s eeee mmm       bias 7, e=0 subnormal m*2^-9, 0x7f and 0xff NaN, no infinity, largest 448 ("FN")
 *   BF16  upper half of f32         F16  IEEE binary16
 */
#ifndef QL_RUNTIME_BASE_NUM_H
#define QL_RUNTIME_BASE_NUM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline float ql_f32_of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t ql_bits_of_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float ql_f32_of_bf16(uint16_t h) { return ql_f32_of_bits((uint32_t)h << 16); }

/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t ql_bf16_of_f32(float f) {
    uint32_t u = ql_bits_of_f32(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 16) | 0x40);
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static inline float ql_f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    if (e == 31) {
        return ql_f32_of_bits(sign | 0x7f800000u | (m << 13));
    }
    if (e == 0) { /* zero and subnormals: m * 2^-24 is exact in f32 */
        float v = (float)m * 0x1p-24f;
        return sign ? -v : v;
    }
    return ql_f32_of_bits(sign | ((e + 112) << 23) | (m << 13));
}

/* Round to nearest, ties to even; overflow gives infinity, NaN stays NaN. */
static inline uint16_t ql_f16_of_f32(float f) {
    uint32_t u = ql_bits_of_f32(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00);
    }
    if (a >= 0x477ff000u) { /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    }
    if (a < 0x38800000u) { /* below 2^-14: adding 0.5 aligns the mantissa so that the FPU rounds at 2^-24 */
        float v = ql_f32_of_bits(a) + 0.5f;
        return (uint16_t)(sign | (ql_bits_of_f32(v) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13));
}

static inline bool ql_e4m3_is_nan(uint8_t b) { return (b & 0x7f) == 0x7f; }

static inline float ql_f32_of_e4m3(uint8_t b) {
    uint32_t e = (b >> 3) & 15, m = b & 7;
    float v = e ? ql_f32_of_bits(((e + 120) << 23) | (m << 20)) : (float)m * 0x1p-9f;
    if (ql_e4m3_is_nan(b)) {
        v = ql_f32_of_bits(0x7fc00000u);
    }
    return b & 0x80 ? -v : v;
}

/* Round to nearest, ties to even, saturating at 448; NaN gives 0x7f. */
static inline uint8_t ql_e4m3_of_f32(float f) {
    uint8_t sign = (uint8_t)((ql_bits_of_f32(f) >> 24) & 0x80);
    float a = fabsf(f);
    if (!(a == a)) {
        return 0x7f;
    }
    if (a >= 448.0f) {
        return (uint8_t)(sign | 0x7e);
    }
    if (a < 0x1p-6f) { /* subnormal: units of 2^-9; 8 units is the smallest normal and has the same code */
        return (uint8_t)(sign | (uint8_t)lrintf(a * 512.0f));
    }
    uint32_t u = ql_bits_of_f32(a);
    u += 0x7ffffu + ((u >> 20) & 1);
    return (uint8_t)(sign | ((u >> 20) - (120u << 3)));
}

static inline float ql_f32_of_e2m1(uint8_t code) {
    uint32_t e = (code >> 1) & 3, m = code & 1;
    float v = e ? ql_f32_of_bits(((e + 126) << 23) | (m << 22)) : 0.5f * (float)m;
    return code & 8 ? -v : v;
}

/* Nearest of clamp(f, +-6), ties to the even code. */
static inline uint8_t ql_e2m1_of_f32(float f) {
    float a = fabsf(f);
    uint8_t code = a <= 0.25f   ? 0
                   : a < 0.75f  ? 1
                   : a <= 1.25f ? 2
                   : a < 1.75f  ? 3
                   : a <= 2.5f  ? 4
                   : a < 3.5f   ? 5
                   : a <= 5.0f  ? 6
                                : 7;
    return (uint8_t)(code | (ql_bits_of_f32(f) >> 31 ? 8 : 0));
}

#endif
