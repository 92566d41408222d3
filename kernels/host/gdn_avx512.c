/* gdn with AVX-512: tiles of 8 rows by 2 registers; all value channels of a step fit in registers. */
#if defined(__x86_64__)

#include "kernels/host/v16_avx512.h"

enum { ROWS = 8, COLS = 2, STEP_COLS = 8 };
#define GDN ql_gdn_avx512

#include "kernels/host/gdn_simd.h"

#endif
