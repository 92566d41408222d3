/* Sixteen f32 lanes with AVX2 and F16C, two registers; v16_avx512.h has the same names. Lane i of a sum is accumulator
 * i of acc16.h, so that vector code keeps the twin's order.
 */
#ifndef QL_KERNELS_HOST_V16_AVX2_H
#define QL_KERNELS_HOST_V16_AVX2_H

#include <immintrin.h>
#include <stdint.h>

typedef struct V16 {
    __m256 lo, hi;
} V16;

static inline V16 v16_zero(void) { return (V16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 v16_load(const float *p) { return (V16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline V16 v16_set1(float f) { return (V16){_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
static inline V16 v16_mul(V16 a, V16 b) { return (V16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline V16 v16_add(V16 a, V16 b) { return (V16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline V16 v16_sub(V16 a, V16 b) { return (V16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }

static inline void v16_store(float *p, V16 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}

/* Halves of 8, 4, 2, 1. */
static inline float v16_sum(V16 v) {
    __m256 a = _mm256_add_ps(v.lo, v.hi);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline V16 v16_of_f16(const uint16_t *p) {
    return (V16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}

static inline V16 v16_of_bf16(const uint16_t *p) {
    __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (V16){_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}

/* E4M3 as F16: the fraction moved up leaves a value 2^8 too small, subnormals included; code 0x7f becomes NaN. */
static inline V16 v16_of_e4m3(const uint8_t *p) {
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), a = _mm256_slli_epi16(b, 7);
    __m256i top = _mm256_set1_epi16(0x3f80), h = _mm256_and_si256(a, top);
    h = _mm256_or_si256(h, _mm256_and_si256(_mm256_cmpeq_epi16(h, top), _mm256_set1_epi16(0x7e00)));
    h = _mm256_or_si256(h, _mm256_slli_epi16(_mm256_srli_epi16(b, 7), 15));
    __m256 scale = _mm256_set1_ps(256.0f);
    return (V16){_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), scale),
                 _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), scale)};
}

#endif
