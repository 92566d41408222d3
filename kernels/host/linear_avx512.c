/* linear with AVX-512 (F, BW, VL, DQ): the 16 accumulators are one register.
 *
 * E4M3 by way of F16: moved into the place of an F16's exponent and mantissa, a code reads as its value times 2^-8,
 * subnormals included, and the conversion of F16 subnormals costs nothing, which a subnormal operand of a multiply would.
 * E2M1 by permute: the code is the index into a register of its 16 values.
 */
#if defined(__x86_64__)

#include "kernels/host/linear_common.h"
#include "kernels/host/v16_avx512.h"

enum { TILE_W = 4 };
#define TILE_X 6
#define FEW_X 4
#define LINEAR ql_linear_avx512

/* A weight is no NaN: see weight_load. */
static inline V16 v16_e4m3(const uint8_t *p) {
    __m256i h =
        _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7); /* sign twice: bits 15, 14 */
    h = _mm256_and_si256(h, _mm256_set1_epi16((short)0xbfff));
    return _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
}

static inline V16 v16_nvfp4(const uint8_t *p, uint8_t scale) {
    const __m512 value = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    __m512i code = _mm512_broadcastd_epi32(_mm_loadu_si32(p));
    code = _mm512_mask_broadcastd_epi32(code, 0xff00, _mm_loadu_si32(p + 4));
    /* The permute looks at the low four bits of its index alone. */
    __m512 v = _mm512_permutexvar_ps(_mm512_srlv_epi32(code, shift), value);
    return _mm512_mul_ps(v, _mm512_set1_ps(ql_e4m3_scale[scale]));
}

#include "kernels/host/linear_simd.h"

#endif
