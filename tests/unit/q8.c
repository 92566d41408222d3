/* Records of q8 and codes of activations, against the descriptions of the formats: a record says the same 64 weights as the
 * checkpoint's bytes, of compressed-tensors and of ModelOpt, and as ggml's block, and codes are what x / d rounds to.
 */
#include "kernels/q8.h"
#include "loader/checkpoint.h"
#include "runtime/base/num.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint32_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static void fill(uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        p[i] = (uint8_t)next();
    }
}

/* Code of weight c of a row, from a checkpoint: low nibble first. */
static uint8_t file_code(const uint8_t *codes, int32_t c) { return c % 2 ? codes[c / 2] >> 4 : codes[c / 2] & 15; }

static uint8_t record_code(const uint8_t *record, int32_t c) { return file_code(record + 4, c); }

/* ggml: byte 4 + 8 s + j has weight 16 s + j low and 16 s + j + 8 high. */
static uint8_t ggml_code(const uint8_t *block, int32_t c) {
    uint8_t b = block[4 + c / 16 * 8 + c % 8];
    return c % 16 < 8 ? b & 15 : b >> 4;
}

static void records_hold_the_checkpoint(void **unused) {
    (void)unused;
    static const int32_t lengths[] = {16, 48, 64, 80, 320, 5120};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int32_t k = lengths[i];
        size_t bytes = (size_t)ql_q8_row_bytes(k);
        assert_int_equal(bytes, (k + 63) / 64 * 36);
        uint8_t *codes = malloc((size_t)k / 2), *scales = malloc((size_t)k / 16), *record = malloc(bytes);
        uint8_t *codes2 = malloc((size_t)k / 2), *scales2 = malloc((size_t)k / 16);
        fill(codes, (size_t)k / 2);
        fill(scales, (size_t)k / 16);
        memset(record, 0xa5, bytes);
        ql_q8_pack(codes, scales, k, record);
        for (int32_t c = 0; c < (k + 63) / 64 * 64; c++) {
            const uint8_t *r = record + c / 64 * 36;
            assert_int_equal(record_code(r, c % 64), c < k ? file_code(codes, c) : 0);
            assert_int_equal(r[c % 64 / 16], c < k ? scales[c / 16] : 0);
        }
        ql_q8_unpack(record, k, codes2, scales2);
        assert_memory_equal(codes, codes2, (size_t)k / 2);
        assert_memory_equal(scales, scales2, (size_t)k / 16);
        free(codes);
        free(scales);
        free(record);
        free(codes2);
        free(scales2);
    }
}

/* ---- whole checkpoints, one of either naming ---- */

typedef struct tally {
    int32_t n_weight, n_divided, n_row;
} tally;

/* Each row as records: the file's bytes come back, and its numbers are those of docs/formats.md. */
static ql_status rows_as_records(void *user, const ql_visit *v, ql_error *err) {
    (void)err;
    tally *t = user;
    const ql_linear *l = v->linear;
    if (!l || l->format != QL_FORMAT_NVFP4) {
        return QL_OK;
    }
    size_t n_code = (size_t)l->k / 2, n_scale = (size_t)l->k / 16;
    uint8_t *record = malloc((size_t)ql_q8_row_bytes(l->k)), *codes = malloc(n_code), *scales = malloc(n_scale);
    for (int32_t row = 0; row < l->n; row++) {
        const uint8_t *from = l->weight->data + (size_t)row * n_code, *scale = l->scale->data + (size_t)row * n_scale;
        ql_q8_pack(from, scale, l->k, record);
        ql_q8_unpack(record, l->k, codes, scales);
        assert_memory_equal(codes, from, n_code);
        assert_memory_equal(scales, scale, n_scale);
        for (int32_t c = 0; c < l->k; c++) {
            const uint8_t *r = record + c / 64 * 36;
            float want = ql_f32_of_e2m1(file_code(from, c)) * ql_f32_of_e4m3(scale[c / 16]);
            assert_true(ql_f32_of_e2m1(record_code(r, c % 64)) * ql_f32_of_e4m3(r[c % 64 / 16]) == want);
        }
        t->n_row++;
    }
    t->n_weight++;
    t->n_divided += l->factor_divides;
    free(record);
    free(codes);
    free(scales);
    return QL_OK;
}

static void records_of_both_namings(void **unused) {
    (void)unused;
    static const char *const dirs[] = {"tests/data/micro-mixed", "tests/data/micro-nvfp4-modelopt"};
    for (int i = 0; i < 2; i++) {
        ql_error err = {0};
        ql_checkpoint *c = NULL;
        tally t = {0};
        if (ql_checkpoint_open(&c, dirs[i], &err) != QL_OK) {
            fail_msg("%s", err.text);
        }
        assert_int_equal(ql_checkpoint_each(c, c->has_mtp, rows_as_records, &t, &err), QL_OK);
        ql_checkpoint_close(&c);
        assert_true(t.n_weight > 10 && t.n_row > 1000);
        assert_int_equal(t.n_divided, i == 0 ? t.n_weight : 0); /* compressed-tensors divides by its number */
    }
}

static void ggml_blocks_convert(void **unused) {
    (void)unused;
    enum { N = 37 };
    uint8_t block[N * 36], record[N * 36], back[N * 36];
    fill(block, sizeof block);
    ql_q8_of_ggml(block, N, record);
    for (int32_t c = 0; c < 64 * N; c++) {
        assert_int_equal(record_code(record + c / 64 * 36, c % 64), ggml_code(block + c / 64 * 36, c % 64));
        assert_int_equal(record[c / 64 * 36 + c % 64 / 16], block[c / 64 * 36 + c % 64 / 16]);
    }
    ql_q8_to_ggml(record, N, back);
    assert_memory_equal(block, back, sizeof block);
}

static void codes_are_the_nearest(void **unused) {
    (void)unused;
    for (int32_t round = 0; round < 2000; round++) {
        float x[32], most = 0;
        int8_t code[32];
        int32_t n = 1 + (int32_t)(next() % 32);
        for (int32_t i = 0; i < n; i++) {
            x[i] = ldexpf((float)(int32_t)next(), (int32_t)(next() % 12) - 40);
            most = fmaxf(most, fabsf(x[i]));
        }
        float d = ql_q8_quantize(x, n, code);
        assert_true(d == fmaxf(most / 127.0f, 1e-8f));
        for (int32_t i = 0; i < n; i++) {
            float q = x[i] / d, off = q - (float)code[i];
            assert_in_range(code[i] + 127, 0, 254);
            assert_true(fabsf(off) <= 0.5f && (fabsf(off) < 0.5f || code[i] % 2 == 0));
        }
    }
}

static void ends_of_the_range(void **unused) {
    (void)unused;
    int8_t code[4];
    const float ties[] = {127.0f, 2.5f, -3.5f, 0.5f}, tiny[] = {1e-9f, -4e-9f, 6e-9f, 0.0f}, zero[4] = {0};
    assert_true(ql_q8_quantize(ties, 4, code) == 1.0f);
    assert_memory_equal(code, ((int8_t[]){127, 2, -4, 0}), 4);
    assert_true(ql_q8_quantize(tiny, 4, code) == 1e-8f);
    assert_memory_equal(code, ((int8_t[]){0, 0, 1, 0}), 4);
    assert_true(ql_q8_quantize(zero, 4, code) == 1e-8f);
    assert_memory_equal(code, ((int8_t[]){0, 0, 0, 0}), 4);
    const float nan[] = {1.0f, NAN, INFINITY, 2.0f}, inf[] = {1.0f, -INFINITY, 3.0f, 0.0f};
    assert_true(isnan(ql_q8_quantize(nan, 4, code)));
    assert_true(isinf(ql_q8_quantize(inf, 4, code)));
    assert_memory_equal(code, ((int8_t[]){0, 0, 0, 0}), 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_hold_the_checkpoint), cmocka_unit_test(records_of_both_namings),
        cmocka_unit_test(ggml_blocks_convert),         cmocka_unit_test(codes_are_the_nearest),
        cmocka_unit_test(ends_of_the_range),
    };
    return cmocka_run_group_tests_name("q8", tests, NULL, NULL);
}
