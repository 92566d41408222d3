/* gdn with AVX2: tiles of 4 rows by 2 registers; a step takes half of the value channels at a time. */
#if defined(__x86_64__)

#include "kernels/host/v16_avx2.h"

enum { ROWS = 4, COLS = 1, STEP_COLS = 4 };
#define GDN ql_gdn_avx2

#include "kernels/host/gdn_simd.h"

#endif
