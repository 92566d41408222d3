/* linear with AVX-512 (F, BW, VL, DQ): the 16 accumulators are one register.
 *
 * E4M3 by way of F16: moved into the place of an F16's exponent and mantissa, a code reads as its value times 2^-8,
 * subnormals included, and the conversion of F16 subnormals costs nothing, which a subnormal operand of a multiply would.
 * E2M1 by permute: the code is the index into a register of its 16 values.
 */
#if defined(__x86_64__)

#include "kernels/host/linear_common.h"

#include <immintrin.h>
#include <string.h>

typedef __m512 V16;

enum { TILE_W = 4 };
#define TILE_X 6
#define LINEAR ql_linear_avx512

static inline V16 v16_zero(void) { return _mm512_setzero_ps(); }
static inline V16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, V16 v) { _mm512_storeu_ps(p, v); }
static inline V16 v16_set1(float f) { return _mm512_set1_ps(f); }
static inline V16 v16_mul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
static inline V16 v16_add(V16 a, V16 b) { return _mm512_add_ps(a, b); }

static inline float v16_sum(V16 v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline V16 v16_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

static inline V16 v16_bf16(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline V16 v16_e4m3(const uint8_t *p) {
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7); /* sign twice: bits 15, 14 */
    h = _mm256_and_si256(h, _mm256_set1_epi16((short)0xbfff));
    return _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
}

static inline V16 v16_nvfp4(const uint8_t *p, uint8_t scale) {
    const __m512 value = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    uint32_t lo, hi;
    memcpy(&lo, p, 4);
    memcpy(&hi, p + 4, 4);
    __m512i code = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)lo), 0xff00, (int)hi);
    /* The permute looks at the low four bits of its index alone. */
    __m512 v = _mm512_permutexvar_ps(_mm512_srlv_epi32(code, shift), value);
    /* The scale has no sign: see weight_load. */
    __m512 s = _mm512_cvtph_ps(_mm256_set1_epi16((short)(scale << 7)));
    return _mm512_mul_ps(v, _mm512_mul_ps(s, _mm512_set1_ps(256.0f)));
}

#include "kernels/host/linear_simd.h"

#endif
