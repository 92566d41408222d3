#include "kernels/q8.h"

#include "runtime/base/num.h"

#include <string.h>

enum { SCALES = QL_Q8_RECORD / 16, CODES = QL_Q8_RECORD / 2 };

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

void ql_q8_pack(const uint8_t *codes, const uint8_t *scales, int32_t k, uint8_t *records) {
    for (int32_t c = 0; c < k; c += QL_Q8_RECORD, records += QL_Q8_RECORD_BYTES) {
        int32_t n = least(k - c, QL_Q8_RECORD);
        memset(records, 0, QL_Q8_RECORD_BYTES);
        memcpy(records, scales + c / 16, (size_t)n / 16);
        memcpy(records + SCALES, codes + c / 2, (size_t)n / 2);
    }
}

void ql_q8_unpack(const uint8_t *records, int32_t k, uint8_t *codes, uint8_t *scales) {
    for (int32_t c = 0; c < k; c += QL_Q8_RECORD, records += QL_Q8_RECORD_BYTES) {
        int32_t n = least(k - c, QL_Q8_RECORD);
        memcpy(scales + c / 16, records, (size_t)n / 16);
        memcpy(codes + c / 2, records + SCALES, (size_t)n / 2);
    }
}

/* 8 bytes of a group of 16: pairs (j, j + 8) to pairs (2j, 2j + 1). */
static void group_of_ggml(const uint8_t *in, uint8_t *out) {
    for (int32_t j = 0; j < 4; j++) {
        out[j] = (uint8_t)((in[2 * j] & 15) | (in[2 * j + 1] & 15) << 4);
        out[j + 4] = (uint8_t)(in[2 * j] >> 4 | (in[2 * j + 1] >> 4) << 4);
    }
}

static void group_to_ggml(const uint8_t *in, uint8_t *out) {
    for (int32_t j = 0; j < 4; j++) {
        out[2 * j] = (uint8_t)((in[j] & 15) | (in[j + 4] & 15) << 4);
        out[2 * j + 1] = (uint8_t)(in[j] >> 4 | (in[j + 4] >> 4) << 4);
    }
}

static void convert(const uint8_t *in, int64_t n, uint8_t *out, void (*group)(const uint8_t *, uint8_t *)) {
    for (; n > 0; n--, in += QL_Q8_RECORD_BYTES, out += QL_Q8_RECORD_BYTES) {
        memcpy(out, in, SCALES);
        for (int32_t b = SCALES; b < SCALES + CODES; b += 8) {
            group(in + b, out + b);
        }
    }
}

void ql_q8_of_ggml(const uint8_t *blocks, int64_t n, uint8_t *records) { convert(blocks, n, records, group_of_ggml); }
void ql_q8_to_ggml(const uint8_t *records, int64_t n, uint8_t *blocks) { convert(records, n, blocks, group_to_ggml); }

float ql_q8_quantize(const float *x, int32_t n, int8_t *code) {
    uint32_t most = 0; /* magnitudes rise with their bits, a NaN above all */
    for (int32_t i = 0; i < n; i++) {
        uint32_t u = ql_bits_of_f32(x[i]) & 0x7fffffffu;
        most = u > most ? u : most;
    }
    float d = ql_f32_of_bits(most) / 127.0f;
    d = d < 1e-8f ? 1e-8f : d;
    for (int32_t i = 0; i < n; i++) {
        float q = most < 0x7f800000u ? x[i] / d : 0.0f;
        code[i] = (int8_t)lrintf(q);
    }
    return d;
}
