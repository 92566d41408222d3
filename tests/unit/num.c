/* Number formats: every code, and every place where rounding could go either way. */
#include "runtime/base/num.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static float next_up(float f) { return nextafterf(f, INFINITY); }
static float next_down(float f) { return nextafterf(f, -INFINITY); }

static void same_bits(float got, double want) {
    if (want != want) {
        assert_true(got != got);
        return;
    }
    assert_true((double)got == want);
    assert_int_equal(signbit(got) != 0, signbit(want) != 0);
}

/* ---- E4M3 -------------------------------------------------------------------------------------------------------- */

static double e4m3(int b) {
    int e = b >> 3 & 15, m = b & 7;
    double v = e ? (1 + m / 8.0) * ldexp(1, e - 7) : ldexp(m, -9);
    v = (b & 0x7f) == 0x7f ? NAN : v;
    return b & 0x80 ? -v : v;
}

static void test_e4m3_decode(void **state) {
    (void)state;
    for (int b = 0; b < 256; b++) {
        same_bits(ql_f32_of_e4m3((uint8_t)b), e4m3(b));
        assert_int_equal(ql_e4m3_is_nan((uint8_t)b), b == 0x7f || b == 0xff);
    }
    assert_true(ql_f32_of_e4m3(0x7e) == 448.0f);
    assert_true(ql_f32_of_e4m3(0x01) == 0x1p-9f);
    assert_true(ql_f32_of_e4m3(0x08) == 0x1p-6f);
}

static void test_e4m3_encode(void **state) {
    (void)state;
    for (int b = 0; b < 256; b++) {
        if (!ql_e4m3_is_nan((uint8_t)b)) {
            assert_int_equal(ql_e4m3_of_f32(ql_f32_of_e4m3((uint8_t)b)), b);
        }
    }
    for (int b = 0; b < 0x7e; b++) {
        float lo = ql_f32_of_e4m3((uint8_t)b), hi = ql_f32_of_e4m3((uint8_t)(b + 1)), mid = 0.5f * (lo + hi);
        int even = b % 2 ? b + 1 : b;
        assert_int_equal(ql_e4m3_of_f32(mid), even);
        assert_int_equal(ql_e4m3_of_f32(-mid), even | 0x80);
        assert_int_equal(ql_e4m3_of_f32(next_down(mid)), b);
        assert_int_equal(ql_e4m3_of_f32(next_up(mid)), b + 1);
    }
    assert_int_equal(ql_e4m3_of_f32(448.001f), 0x7e);
    assert_int_equal(ql_e4m3_of_f32(464.0f), 0x7e);
    assert_int_equal(ql_e4m3_of_f32(INFINITY), 0x7e);
    assert_int_equal(ql_e4m3_of_f32(-INFINITY), 0xfe);
    assert_int_equal(ql_e4m3_of_f32(NAN), 0x7f);
    assert_int_equal(ql_e4m3_of_f32(0x1p-149f), 0);
    assert_int_equal(ql_e4m3_of_f32(-0.0f), 0x80);
}

/* ---- BF16 -------------------------------------------------------------------------------------------------------- */

static void test_bf16(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = ql_f32_of_bf16((uint16_t)h);
        assert_int_equal(ql_bits_of_f32(f), h << 16);
        if (f != f) {
            float back = ql_f32_of_bf16(ql_bf16_of_f32(f));
            assert_true(back != back);
            continue;
        }
        assert_int_equal(ql_bf16_of_f32(f), h);
        if ((h & 0x7fff) < 0x7f80) { /* halfway to the next magnitude, and a hair to each side */
            assert_int_equal(ql_bf16_of_f32(ql_f32_of_bits(h << 16 | 0x8000)), h + h % 2);
            assert_int_equal(ql_bf16_of_f32(ql_f32_of_bits(h << 16 | 0x7fff)), h);
            assert_int_equal(ql_bf16_of_f32(ql_f32_of_bits(h << 16 | 0x8001)), h + 1);
        }
    }
    float quiet = ql_f32_of_bf16(ql_bf16_of_f32(ql_f32_of_bits(0x7f800001))); /* a NaN whose upper half is infinity's */
    assert_true(quiet != quiet);
}

/* ---- F16 --------------------------------------------------------------------------------------------------------- */

static double f16(uint32_t h) {
    uint32_t e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, (int)e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}

static void test_f16(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = ql_f32_of_f16((uint16_t)h);
        same_bits(f, f16(h));
        uint16_t back = ql_f16_of_f32(f);
        if (f != f) {
            assert_true((back & 0x7c00) == 0x7c00 && (back & 1023));
        } else {
            assert_int_equal(back, h);
        }
    }
    for (uint32_t h = 0; h < 0x7c00; h++) { /* the last pair: 65504 and what would be 65536, infinity's code */
        float lo = ql_f32_of_f16((uint16_t)h), hi = h == 0x7bff ? 65536.0f : ql_f32_of_f16((uint16_t)(h + 1));
        float mid = 0.5f * (lo + hi);
        uint32_t even = h + h % 2;
        assert_int_equal(ql_f16_of_f32(mid), even);
        assert_int_equal(ql_f16_of_f32(-mid), even | 0x8000);
        assert_int_equal(ql_f16_of_f32(next_down(mid)), h);
        assert_int_equal(ql_f16_of_f32(next_up(mid)), h + 1);
    }
    assert_int_equal(ql_f16_of_f32(INFINITY), 0x7c00);
    assert_int_equal(ql_f16_of_f32(3e38f), 0x7c00);
    assert_int_equal(ql_f16_of_f32(0x1p-149f), 0);
    assert_int_equal(ql_f16_of_f32(-0.0f), 0x8000);
}

/* ---- E2M1 -------------------------------------------------------------------------------------------------------- */

static void test_e2m1(void **state) {
    (void)state;
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int c = 0; c < 16; c++) {
        same_bits(ql_f32_of_e2m1((uint8_t)c), c & 8 ? -magnitude[c & 7] : magnitude[c & 7]);
        assert_int_equal(ql_e2m1_of_f32(ql_f32_of_e2m1((uint8_t)c)), c);
    }
    for (int c = 0; c < 7; c++) {
        float mid = (float)(0.5 * (magnitude[c] + magnitude[c + 1]));
        assert_int_equal(ql_e2m1_of_f32(mid), c % 2 ? c + 1 : c);
        assert_int_equal(ql_e2m1_of_f32(-mid), (c % 2 ? c + 1 : c) | 8);
        assert_int_equal(ql_e2m1_of_f32(next_down(mid)), c);
        assert_int_equal(ql_e2m1_of_f32(next_up(mid)), c + 1);
    }
    assert_int_equal(ql_e2m1_of_f32(1e30f), 7);
    assert_int_equal(ql_e2m1_of_f32(-1e30f), 15);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e4m3_decode), cmocka_unit_test(test_e4m3_encode), cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),         cmocka_unit_test(test_e2m1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
