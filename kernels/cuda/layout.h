/* How quantized weights lie in device memory: fragments of a 16-row matrix instruction, in the order a warp reads them.
 *
 *   tile    16 rows x KT columns, 512 bytes; KT = 64 for NVFP4, 32 for FP8
 *   order   [row tile][column tile][lane 0..31][16 bytes]; rows and columns are padded with code 0
 *   lane    4 g + c holds rows g (bytes 0-7) and g + 8 (bytes 8-15), columns c KT/4 .. (c+1) KT/4 - 1 of the tile, so
 *           that an NVFP4 lane owns one whole scale group of each of its two rows
 *   step j  of the instruction's K = 16 takes, from lane c, columns c KT/4 + 4j + {0,1} and + {2,3}
 *   scales  NVFP4: [row tile][column tile][lane] of 2 bytes, rows g and g + 8
 *
 * Inside a 32-bit word the codes are spread so that a pair of f16 numbers falls out by a shift and a mask, or a reversal of all bits:
 *
 *   NVFP4  8 codes, E2M1 bits s eem; four as bytes s...eem., the other four likewise in the word with its bits in reverse:
 *          0x8e8e8e8e of the word: codes 2, 0, 3, 1 from the lowest byte on; of the reversed word: codes 6, 4, 7, 5
 *          (bits s 15, eem 11..9 of an f16 are the value times 2^-14, subnormals included)
 *   FP8    4 codes as in the file
 *
 * Plain formats stay row-major as in the file.
 */
#ifndef QL_KERNELS_CUDA_LAYOUT_H
#define QL_KERNELS_CUDA_LAYOUT_H

#include "runtime/base/qformat.h"

enum { TILE_ROWS = 16, TILE_BYTES = 512, TILE_SCALE_BYTES = 64 };

#define QL_HD __host__ __device__

/* Columns of a tile. */
static inline QL_HD constexpr int tile_k(int format) { return format == QL_FORMAT_NVFP4 ? 64 : 32; }

static inline QL_HD int is_plain(ql_qformat f) {
    return f == QL_FORMAT_F32 || f == QL_FORMAT_F16 || f == QL_FORMAT_BF16;
}
static inline QL_HD int is_fp8(ql_qformat f) {
    return f == QL_FORMAT_FP8_CHANNEL || f == QL_FORMAT_FP8_TENSOR || f == QL_FORMAT_FP8_BLOCK;
}

static inline QL_HD uint32_t reversed_bits(uint32_t v) {
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
    return v >> 24 | (v >> 8 & 0xff00u) | (v & 0xff00u) << 8 | v << 24;
}

/* Codes a, b, c, d of 4 bits, others above them, as bytes s...eem. from the lowest on. */
static inline QL_HD uint32_t spread_e2m1(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t v = (a & 15) | (b & 15) << 8 | (c & 15) << 16 | (d & 15) << 24;
    return (v & 0x08080808u) << 4 | (v & 0x07070707u) << 1;
}

/* n: 8 codes of 4 bits, the first lowest */
static inline QL_HD uint32_t pack_e2m1(uint32_t n) {
    return spread_e2m1(n >> 8, n, n >> 12, n >> 4) | reversed_bits(spread_e2m1(n >> 24, n >> 16, n >> 28, n >> 20));
}

/* The four codes of a word that are bytes s...eem., as the nibbles that they have among four. */
static inline QL_HD uint32_t gather_e2m1(uint32_t v) {
    v = (v >> 4 & 0x08080808u) | (v >> 1 & 0x07070707u);
    return (v >> 8 & 15) | (v >> 20 & 0xf0) | (v << 8 & 0xf00) | (v >> 4 & 0xf000);
}

static inline QL_HD uint32_t unpack_e2m1(uint32_t w) { return gather_e2m1(w) | gather_e2m1(reversed_bits(w)) << 16; }

#endif
