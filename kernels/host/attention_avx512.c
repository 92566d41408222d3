/* attention with AVX-512: all 256 value channels of a row fit in registers. */
#if defined(__x86_64__)

#include "kernels/host/v16_avx512.h"

enum { KEYS = 8, COLS = 16 };
#define ATTENTION ql_attention_avx512

#include "kernels/host/attention_simd.h"

#endif
