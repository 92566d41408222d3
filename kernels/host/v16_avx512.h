/* Sixteen f32 lanes with AVX-512, one register; see v16_avx2.h. */
#ifndef QL_KERNELS_HOST_V16_AVX512_H
#define QL_KERNELS_HOST_V16_AVX512_H

#include <immintrin.h>
#include <stdint.h>

typedef __m512 V16;

static inline V16 v16_zero(void) { return _mm512_setzero_ps(); }
static inline V16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline V16 v16_set1(float f) { return _mm512_set1_ps(f); }
static inline V16 v16_mul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
static inline V16 v16_add(V16 a, V16 b) { return _mm512_add_ps(a, b); }
static inline V16 v16_sub(V16 a, V16 b) { return _mm512_sub_ps(a, b); }
static inline void v16_store(float *p, V16 v) { _mm512_storeu_ps(p, v); }

/* Halves of 8, 4, 2, 1. */
static inline float v16_sum(V16 v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline V16 v16_of_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

static inline V16 v16_of_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* E4M3 as F16: the fraction moved up leaves a value 2^8 too small, subnormals included; code 0x7f becomes NaN. */
static inline V16 v16_of_e4m3(const uint8_t *p) {
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i top = _mm256_set1_epi16(0x3f80), h = _mm256_and_si256(_mm256_slli_epi16(b, 7), top);
    h = _mm256_mask_mov_epi16(h, _mm256_cmpeq_epi16_mask(h, top), _mm256_set1_epi16(0x7e00));
    h = _mm256_or_si256(h, _mm256_slli_epi16(_mm256_srli_epi16(b, 7), 15));
    return _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
}

#endif
