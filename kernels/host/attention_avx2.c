/* attention with AVX2 and F16C. */
#if defined(__x86_64__)

#include "kernels/host/v16_avx2.h"

enum { KEYS = 4, COLS = 4 };
#define ATTENTION ql_attention_avx2

#include "kernels/host/attention_simd.h"

#endif
