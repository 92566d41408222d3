/* Body of attention's vector variants, included once by each instruction-set file after its v16 header and:
 *
 *   KEYS        keys that meet a query together: independent sums hide the latency of an addition
 *   COLS        vectors of value channels that are kept in registers
 *   ATTENTION   the variant's name
 */
#include "kernels/host/attention_common.h"

#include "runtime/base/num.h"

#include <math.h>

#define UNROLL _Pragma("GCC unroll 16")

enum { D = QL_ATTENTION_D };

static void load(ql_kv_type type, const void *cache, const void *scale, int64_t at, int32_t n, float *x) {
    const float *f32 = cache;
    const uint16_t *h = cache, *s = scale;
    const uint8_t *b = cache;
    switch (type) {
    case QL_KV_F32:
        for (int32_t i = 0; i < n; i += 16) {
            v16_store(x + i, v16_load(f32 + at + i));
        }
        break;
    case QL_KV_F16:
        for (int32_t i = 0; i < n; i += 16) {
            v16_store(x + i, v16_of_f16(h + at + i));
        }
        break;
    case QL_KV_BF16:
        for (int32_t i = 0; i < n; i += 16) {
            v16_store(x + i, v16_of_bf16(h + at + i));
        }
        break;
    case QL_KV_FP8:
        for (int32_t i = 0; i < n; i += 16) {
            V16 g = v16_set1(ql_f32_of_f16(s[(at + i) / QL_KV_SCALE_GROUP]));
            v16_store(x + i, v16_mul(v16_of_e4m3(b + at + i), g));
        }
        break;
    }
}

static void scores(const float *q, const float *k, int32_t n, float *s) {
    int32_t i = 0;
    for (; i + KEYS <= n; i += KEYS) {
        V16 acc[KEYS];
        UNROLL
        for (int32_t j = 0; j < KEYS; j++) {
            acc[j] = v16_zero();
        }
        for (int32_t c = 0; c < D; c += 16) {
            V16 x = v16_load(q + c);
            UNROLL
            for (int32_t j = 0; j < KEYS; j++) {
                acc[j] = v16_add(acc[j], v16_mul(x, v16_load(k + (i + j) * D + c)));
            }
        }
        UNROLL
        for (int32_t j = 0; j < KEYS; j++) {
            s[i + j] = v16_sum(acc[j]) * 0.0625f;
        }
    }
    for (; i < n; i++) {
        V16 acc = v16_zero();
        for (int32_t c = 0; c < D; c += 16) {
            acc = v16_add(acc, v16_mul(v16_load(q + c), v16_load(k + i * D + c)));
        }
        s[i] = v16_sum(acc) * 0.0625f;
    }
}

static void block(const float *q, const float *k, const float *v, int32_t n, bool first, ql_attention_fold *f) {
    float w[QL_PAGE], o[D], sum = 0.0f, max = -INFINITY;
    scores(q, k, n, w);
    for (int32_t i = 0; i < n; i++) {
        max = w[i] > max ? w[i] : max;
    }
    for (int32_t i = 0; i < n; i++) {
        w[i] = expf(w[i] - max);
        sum += w[i];
    }
    for (int32_t c0 = 0; c0 < D; c0 += 16 * COLS) {
        V16 acc[COLS];
        UNROLL
        for (int32_t j = 0; j < COLS; j++) {
            acc[j] = v16_zero();
        }
        for (int32_t i = 0; i < n; i++) {
            V16 x = v16_set1(w[i]);
            UNROLL
            for (int32_t j = 0; j < COLS; j++) {
                acc[j] = v16_add(acc[j], v16_mul(x, v16_load(v + i * D + c0 + 16 * j)));
            }
        }
        UNROLL
        for (int32_t j = 0; j < COLS; j++) {
            v16_store(o + c0 + 16 * j, acc[j]);
        }
    }
    ql_attention_host_fold(f, first, max, sum, o);
}

ql_status ATTENTION(ql_dev *dev, const ql_attention_args *a) {
    static const ql_attention_variant variant = {load, block};
    return ql_attention_host_walk(dev, a, &variant);
}
