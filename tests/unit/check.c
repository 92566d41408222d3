/* Codes and scales that are no numbers: found wherever they lie in a slice, not outside it, and named. */
#include "loader/shard.h"

#include "runtime/base/num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

enum { N = 300, K = 208 }; /* ragged blocks in both directions; K a multiple of 16 */

static const ql_cut whole = {.axis = -1};

/* A matrix with harmless content in any format. */
typedef struct matrix {
    ql_linear l;
    ql_tensor weight, scale, factor;
    uint8_t *codes, *scales;
    float one;
} matrix;

static void fill_scales(matrix *m, int64_t n, ql_dtype dtype) {
    const uint16_t half = ql_bf16_of_f32(0.5f);
    m->scale = (ql_tensor){.name = "m.weight_scale", .dtype = dtype};
    m->scales = calloc((size_t)n, 4);
    assert_non_null(m->scales);
    for (int64_t i = 0; i < n; i++) {
        if (dtype == QL_DTYPE_F8_E4M3) {
            m->scales[i] = 0x38; /* 1.0 */
        } else {
            memcpy(m->scales + 2 * i, &half, 2);
        }
    }
    m->scale.data = m->scales;
    m->l.scale = &m->scale;
}

static void make(matrix *m, ql_qformat format) {
    static const ql_dtype dtypes[QL_FORMAT_COUNT] = {[QL_FORMAT_F32] = QL_DTYPE_F32,
                                                     [QL_FORMAT_F16] = QL_DTYPE_F16,
                                                     [QL_FORMAT_BF16] = QL_DTYPE_BF16,
                                                     [QL_FORMAT_FP8_CHANNEL] = QL_DTYPE_F8_E4M3,
                                                     [QL_FORMAT_FP8_TENSOR] = QL_DTYPE_F8_E4M3,
                                                     [QL_FORMAT_FP8_BLOCK] = QL_DTYPE_F8_E4M3,
                                                     [QL_FORMAT_NVFP4] = QL_DTYPE_U8};
    memset(m, 0, sizeof *m);
    m->l = (ql_linear){.format = format, .n = N, .k = K, .weight = &m->weight};
    const size_t bytes = (size_t)(N * ql_qformat_row_bytes(format, K));
    m->codes = calloc(bytes, 1);
    assert_non_null(m->codes);
    memset(m->codes, 0x3a, bytes); /* an ordinary number in every format */
    m->weight = (ql_tensor){.name = "m.weight", .dtype = dtypes[format], .data = m->codes, .bytes = bytes};
    if (format == QL_FORMAT_FP8_CHANNEL) {
        fill_scales(m, N, QL_DTYPE_BF16);
    } else if (format == QL_FORMAT_FP8_BLOCK) {
        fill_scales(m, 3 * 2, QL_DTYPE_BF16);
    } else if (format == QL_FORMAT_NVFP4) {
        fill_scales(m, N * K / 16, QL_DTYPE_F8_E4M3);
    }
    if (format == QL_FORMAT_NVFP4 || format == QL_FORMAT_FP8_TENSOR) {
        m->one = 1;
        m->factor =
            (ql_tensor){.name = "m.factor", .dtype = QL_DTYPE_F32, .data = (const uint8_t *)&m->one, .bytes = 4};
        m->l.factor = &m->factor;
    }
}

static void destroy(matrix *m) {
    free(m->codes);
    free(m->scales);
}

static void accept(const matrix *m, const ql_cut *cut) {
    ql_error err = {0};
    if (ql_linear_check(&m->l, cut, &err) != QL_OK) {
        fail_msg("refused: %s", err.text);
    }
}

static void refuse(const matrix *m, const ql_cut *cut, const char *a, const char *b) {
    ql_error err = {0};
    assert_int_equal(ql_linear_check(&m->l, cut, &err), QL_ERR_MODEL);
    if (!strstr(err.text, a) || !strstr(err.text, b)) {
        fail_msg("\"%s\" does not contain \"%s\" and \"%s\"", err.text, a, b);
    }
}

static ql_cut rows(int32_t begin, int32_t end) {
    return (ql_cut){.axis = 0, .n_range = 1, .begin = {begin}, .end = {end}};
}
static ql_cut cols(int32_t begin, int32_t end) {
    return (ql_cut){.axis = 1, .n_range = 1, .begin = {begin}, .end = {end}};
}

static void test_ordinary_weights(void **state) {
    (void)state;
    for (int f = 0; f < QL_FORMAT_COUNT; f++) {
        matrix m;
        make(&m, (ql_qformat)f);
        const ql_cut parts[] = {whole,
                                rows(100, 200),
                                cols(48, 160),
                                {.axis = 0, .n_range = 3, .begin = {0, 128, 256}, .end = {10, 140, 300}}};
        for (size_t i = 0; i < LEN(parts); i++) {
            accept(&m, &parts[i]);
        }
        destroy(&m);
    }
}

static void test_every_e4m3_code(void **state) {
    (void)state;
    for (int code = 0; code < 256; code++) {
        matrix m;
        make(&m, QL_FORMAT_FP8_CHANNEL);
        m.codes[17 * K + 5] = (uint8_t)code;
        char hex[16];
        snprintf(hex, sizeof hex, "(0x%02x)", code);
        if (ql_e4m3_is_nan((uint8_t)code)) {
            refuse(&m, &whole, hex, "\"m.weight\" holds a NaN code");
        } else {
            accept(&m, &whole);
        }
        destroy(&m);
    }
}

/* A NaN at every place of a row, seen by the slices that hold it and by no other. */
static void test_place(void **state) {
    (void)state;
    static const ql_qformat formats[] = {QL_FORMAT_FP8_CHANNEL, QL_FORMAT_FP8_TENSOR, QL_FORMAT_FP8_BLOCK};
    for (size_t f = 0; f < LEN(formats); f++) {
        matrix m;
        make(&m, formats[f]);
        for (int32_t c = 0; c < K; c++) {
            uint8_t *code = m.codes + 150 * K + c;
            *code = 0xff;
            char place[64];
            snprintf(place, sizeof place, "row 150, column %d", c);
            refuse(&m, &whole, place, "0xff");
            ql_cut cut = rows(150, 151);
            refuse(&m, &cut, place, "NaN");
            cut = rows(151, 300);
            accept(&m, &cut);
            cut = rows(0, 150);
            accept(&m, &cut);
            cut = cols(0, 112);
            c < 112 ? refuse(&m, &cut, place, "NaN") : accept(&m, &cut);
            cut = cols(112, K);
            c < 112 ? accept(&m, &cut) : refuse(&m, &cut, place, "NaN");
            *code = 0x3a;
        }
        destroy(&m);
    }
}

static void test_plain_values(void **state) {
    (void)state;
    static const struct {
        ql_qformat format;
        uint32_t bad[3], good;
        const char *hex;
    } cases[] = {
        {QL_FORMAT_BF16, {0x7f80, 0xff80, 0x7fc0}, 0x7f7f, "(0x7fc0)"},
        {QL_FORMAT_F16, {0x7c00, 0xfc00, 0x7e01}, 0x7bff, "(0x7e01)"},
        {QL_FORMAT_F32, {0x7f800000, 0xff800000, 0x7fc00000}, 0x7f7fffff, "(0x7fc00000)"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        matrix m;
        make(&m, cases[i].format);
        const int64_t width = ql_qformat_row_bytes(cases[i].format, 1);
        for (int32_t c = 0; c < K; c++) {
            uint8_t *at = m.codes + (7 * K + c) * width;
            for (int k = 0; k < 3; k++) {
                memcpy(at, &cases[i].bad[k], (size_t)width);
                char place[64];
                snprintf(place, sizeof place, "row 7, column %d", c);
                refuse(&m, &whole, place, k == 2 ? cases[i].hex : "not finite");
            }
            memcpy(at, &cases[i].good, (size_t)width);
            accept(&m, &whole);
        }
        destroy(&m);
    }
}

static void test_group_scales(void **state) {
    (void)state;
    static const uint8_t good[] = {0x00, 0x01, 0x07, 0x08, 0x7e};
    matrix m;
    make(&m, QL_FORMAT_NVFP4);
    uint8_t *scale = m.scales + 20 * (K / 16) + 3; /* columns 48..63 of row 20 */
    for (size_t i = 0; i < LEN(good); i++) {
        *scale = good[i];
        accept(&m, &whole);
    }
    *scale = 0x7f;
    refuse(&m, &whole, "\"m.weight_scale\" holds a NaN group scale (0x7f)", "row 20, column 3");
    ql_cut cut = cols(64, K);
    accept(&m, &cut);
    cut = cols(48, 64);
    refuse(&m, &cut, "NaN group scale", "column 3");
    *scale = 0x81;
    refuse(&m, &whole, "negative group scale (0x81)", "row 20, column 3");
    memset(m.codes, 0xff, (size_t)m.weight.bytes); /* every E2M1 code is a number */
    *scale = 0x38;
    accept(&m, &whole);
    destroy(&m);
}

static void test_row_and_block_scales(void **state) {
    (void)state;
    static const float bad[] = {-1, INFINITY, NAN};
    static const ql_qformat formats[] = {QL_FORMAT_FP8_CHANNEL, QL_FORMAT_FP8_BLOCK};
    for (size_t f = 0; f < LEN(formats); f++) {
        matrix m;
        make(&m, formats[f]);
        const bool block = formats[f] == QL_FORMAT_FP8_BLOCK;
        const int64_t i = block ? 3 : 130; /* rows 128..255, columns 128..207, or row 130 */
        for (size_t k = 0; k < LEN(bad); k++) {
            const uint16_t h = ql_bf16_of_f32(bad[k]);
            memcpy(m.scales + 2 * i, &h, 2);
            refuse(&m, &whole, "\"m.weight_scale\" holds the scale", block ? "element 3" : "element 130");
            ql_cut cut = rows(0, 128);
            accept(&m, &cut);
        }
        memset(m.scales + 2 * i, 0, 2);
        refuse(&m, &whole, "holds the scale 0", "0 where all codes are 0");
        for (int32_t r = block ? 128 : 130; r < (block ? 256 : 131); r++) {
            for (int32_t c = block ? 128 : 0; c < K; c++) {
                m.codes[r * K + c] = c % 2 ? 0x80 : 0;
            }
        }
        accept(&m, &whole);
        destroy(&m);
    }
}

static void test_factors(void **state) {
    (void)state;
    static const float bad[] = {0, -1, INFINITY, NAN, 1e-45f};
    static const ql_qformat formats[] = {QL_FORMAT_FP8_TENSOR, QL_FORMAT_NVFP4};
    for (size_t f = 0; f < LEN(formats); f++) {
        for (size_t i = 0; i < LEN(bad); i++) {
            matrix m;
            make(&m, formats[f]);
            m.one = bad[i];
            refuse(&m, &whole, "\"m.factor\" is", "over 0");
            destroy(&m);
        }
    }
}

static void test_tensors(void **state) {
    (void)state;
    uint16_t values[3 * 5];
    for (size_t i = 0; i < LEN(values); i++) {
        values[i] = ql_bf16_of_f32((float)i - 3);
    }
    const ql_tensor t = {.name = "norm",
                         .dtype = QL_DTYPE_BF16,
                         .rank = 2,
                         .shape = {5, 3},
                         .data = (const uint8_t *)values,
                         .bytes = sizeof values};
    ql_error err = {0};
    assert_int_equal(ql_tensor_check(&t, &whole, &err), QL_OK);
    values[7] = 0x7f80;
    assert_int_equal(ql_tensor_check(&t, &whole, &err), QL_ERR_MODEL);
    assert_non_null(strstr(err.text, "\"norm\" holds a value that is not finite (0x7f80)"));
    ql_cut cut = rows(3, 5);
    err = (ql_error){0};
    assert_int_equal(ql_tensor_check(&t, &cut, &err), QL_OK);
    cut = rows(2, 3);
    assert_int_equal(ql_tensor_check(&t, &cut, &err), QL_ERR_MODEL);
    assert_non_null(strstr(err.text, "row 2, column 1"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ordinary_weights),
        cmocka_unit_test(test_every_e4m3_code),
        cmocka_unit_test(test_place),
        cmocka_unit_test(test_plain_values),
        cmocka_unit_test(test_group_scales),
        cmocka_unit_test(test_row_and_block_scales),
        cmocka_unit_test(test_factors),
        cmocka_unit_test(test_tensors),
    };
    return cmocka_run_group_tests_name("check", tests, NULL, NULL);
}
