/* linear with AVX2 and F16C: the 16 accumulators are two registers.
 *
 * Decoding as in linear_avx512.c; the E2M1 permute looks up the magnitude, the sign bit is moved into place.
 */
#if defined(__x86_64__)

#include "kernels/host/linear_common.h"
#include "kernels/host/v16_avx2.h"

#include <string.h>

enum { TILE_W = 2 };
#define TILE_X 3
#define FEW_X 2
#define LINEAR ql_linear_avx2

/* Eight E4M3 codes in the upper bytes of 16-bit elements. A weight is no NaN: see weight_load. */
static inline __m256 e4m3x8(__m128i h) {
    h = _mm_and_si128(_mm_srai_epi16(h, 1), _mm_set1_epi16((short)0xbfff));
    return _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f));
}

static inline V16 v16_e4m3(const uint8_t *p) {
    __m128i b = _mm_loadu_si128((const __m128i *)p), zero = _mm_setzero_si128();
    return (V16){e4m3x8(_mm_unpacklo_epi8(zero, b)), e4m3x8(_mm_unpackhi_epi8(zero, b))};
}

/* Eight E2M1 codes, the first in the low nibble. */
static inline __m256 e2m1x8(uint32_t codes) {
    const __m256 magnitude = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    /* Code in the low nibble, other codes above: the permute looks at three bits, the shift keeps the sign's. */
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32((int)codes), shift);
    __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28));
    return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitude, code), sign);
}

static inline V16 v16_nvfp4(const uint8_t *p, uint8_t scale) {
    uint32_t lo, hi;
    memcpy(&lo, p, 4);
    memcpy(&hi, p + 4, 4);
    __m256 s = _mm256_set1_ps(ql_e4m3_scale[scale]);
    return (V16){_mm256_mul_ps(e2m1x8(lo), s), _mm256_mul_ps(e2m1x8(hi), s)};
}

#include "kernels/host/linear_simd.h"

#endif
