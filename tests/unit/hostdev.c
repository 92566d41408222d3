/* The host device: choice of variants, memory, counters, and what weight_load refuses. */
#include "kernels/kernels.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

/* ---- an allocator that counts, and fails on demand --------------------------------------------------------------- */

typedef struct counter {
    int live, calls, fail_at; /* the call, counted from 1, that fails; 0: none */
} counter;

static void *count_malloc(void *user, size_t bytes) {
    counter *c = user;
    if (++c->calls == c->fail_at) {
        return NULL;
    }
    c->live++;
    void *p = malloc(bytes);
    memset(p, 0xa5, bytes);
    return p;
}

static void *count_realloc(void *user, void *old, size_t bytes) {
    (void)user;
    return realloc(old, bytes);
}

static void count_free(void *user, void *p) {
    ((counter *)user)->live -= p != NULL;
    free(p);
}

static ql_allocator counting(counter *c) { return (ql_allocator){count_malloc, count_realloc, count_free, c}; }

/* ---- variants ---------------------------------------------------------------------------------------------------- */

static void refuse(const char *kernels, const char *const *parts, size_t n) {
    ql_dev dev;
    ql_error err = {0};
    assert_int_equal(ql_host_dev_open(&dev, kernels, NULL, &err), QL_ERR_USAGE);
    for (size_t i = 0; i < n; i++) {
        if (!strstr(err.text, parts[i])) {
            fail_msg("'%s' does not say '%s'", err.text, parts[i]);
        }
    }
}

static void test_kernels(void **state) {
    (void)state;
    static const char *const accepted[] = {NULL, "", "linear=twin", "linear=twin,sample=twin,gdn=twin", "embed=twin,"};
    for (size_t i = 0; i < LEN(accepted); i++) {
        ql_dev dev;
        ql_error err = {0};
        assert_int_equal(ql_host_dev_open(&dev, accepted[i], NULL, &err), QL_OK);
        assert_string_equal(dev.ops->name, "host");
        if (accepted[i] && strncmp(accepted[i], "linear=twin", 11) == 0) {
            char name[48];
            ql_path_name(&dev, ql_path_linear(QL_FORMAT_NVFP4, QL_PHASE_GEN), name);
            assert_string_equal(name, "linear.nvfp4.gen/twin");
            ql_path_name(&dev, ql_path_linear(QL_FORMAT_FP8_BLOCK, QL_PHASE_PROMPT), name);
            assert_string_equal(name, "linear.fp8-block.prompt/twin");
        }
        for (int32_t path = 0; path < QL_PATH_COUNT; path++) {
            char name[48];
            ql_path_name(&dev, path, name);
            assert_true(strlen(name) > 4 && strchr(name, '/') && !strstr(name, "null"));
        }
        dev.ops->close(&dev);
    }
    refuse("linar=twin", (const char *[]){"'linar'", "linear", "attention"}, 3);
    refuse("linear=sse9", (const char *[]){"'sse9'", "'linear'", "twin"}, 3);
    refuse("embed=avx2", (const char *[]){"'avx2'", "'embed'", "twin"}, 3);
    refuse("linear", (const char *[]){"'linear'", "FAMILY=VARIANT"}, 2);
    refuse("linear=twin,linear=twin", (const char *[]){"'linear'", "twice"}, 2);
    refuse("linear=twin,gdn", (const char *[]){"'gdn'", "FAMILY=VARIANT"}, 2);
    refuse("=twin", (const char *[]){"''"}, 1);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void test_memory(void **state) {
    (void)state;
    counter count = {0};
    ql_allocator mem = counting(&count);
    ql_dev dev;
    ql_error err = {0};
    assert_int_equal(ql_host_dev_open(&dev, NULL, &mem, &err), QL_OK);
    for (size_t bytes = 0; bytes < 300; bytes += 7) {
        unsigned char *p = NULL;
        assert_int_equal(dev.ops->alloc(&dev, bytes, "test", (void **)&p), QL_OK);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t i = 0; i < bytes; i++) {
            assert_int_equal(p[i], 0);
        }
        char in[300], out[300];
        memset(in, (int)bytes, sizeof in);
        assert_int_equal(dev.ops->h2d(&dev, p, in, bytes), QL_OK);
        assert_int_equal(dev.ops->d2h(&dev, out, p, bytes), QL_OK);
        assert_memory_equal(in, out, bytes);
        assert_int_equal(dev.ops->zero(&dev, p, bytes), QL_OK);
        dev.ops->free(&dev, p);
    }
    dev.ops->free(&dev, NULL);
    assert_true(dev.h2d_bytes > 0 && dev.h2d_bytes == dev.d2h_bytes);
    void *p;
    assert_int_equal(dev.ops->alloc(&dev, SIZE_MAX - 8, "a giant", &p), QL_ERR_MEMORY);
    assert_non_null(strstr(err.text, "a giant"));
    dev.ops->close(&dev);
    assert_int_equal(count.live, 0);
}

/* ---- weight_load ------------------------------------------------------------------------------------------------- */

enum { N = 130, K = 160 };

/* A sound matrix of a format, and the cut of rows 3.. and columns 32.. out of it. */
typedef struct matrix {
    ql_weight_src src;
    uint8_t data[N * K * 4], scale[N * K];
} matrix;

static void sound(matrix *m, ql_qformat format) {
    memset(m, 0, sizeof *m);
    m->src = (ql_weight_src){
        .module = "layers.3.mlp.up_proj",
        .format = format,
        .n = 127,
        .k = 128,
        .n_range = 1,
        .row0 = {3},
        .row1 = {N},
        .col0 = 32,
        .full_n = N,
        .full_k = K,
        .data = m->data,
        .scale = m->scale,
        .scale_dtype = format == QL_FORMAT_NVFP4 ? QL_DTYPE_F8_E4M3 : QL_DTYPE_BF16,
        .factor = 1,
    };
    memset(m->data, 0x31, sizeof m->data);
    for (size_t i = 0; i < sizeof m->scale; i += 2) { /* BF16 0.5; as group scales 0x00 and 0x3f: zero is legal */
        m->scale[i] = 0x00;
        m->scale[i + 1] = 0x3f;
    }
}

static void load(matrix *m, ql_status want, const char *const *parts, size_t n) {
    counter count = {0};
    ql_allocator mem = counting(&count);
    ql_dev dev;
    ql_error err = {0};
    ql_weight w;
    assert_int_equal(ql_host_dev_open(&dev, NULL, &mem, &err), QL_OK);
    ql_status status = dev.ops->weight_load(&dev, &m->src, &w);
    if (status != want) {
        fail_msg("%s: got %d (%s)", ql_qformat_name(m->src.format), status, err.text);
    }
    for (size_t i = 0; i < n; i++) {
        if (!strstr(err.text, parts[i])) {
            fail_msg("'%s' does not say '%s'", err.text, parts[i]);
        }
    }
    if (status == QL_OK) {
        assert_int_equal(dev.h2d_bytes, w.weight_bytes + w.scale_bytes);
        dev.ops->weight_free(&dev, &w);
    }
    dev.ops->close(&dev);
    assert_int_equal(count.live, 0);
}

static void refuse_load(matrix *m, const char *a, const char *b) {
    load(m, QL_ERR_MODEL, (const char *[]){"layers.3.mlp.up_proj", a, b}, 3);
}

static void test_sound_and_outside(void **state) {
    (void)state;
    static matrix m;
    for (int32_t f = 0; f < QL_FORMAT_COUNT; f++) {
        sound(&m, (ql_qformat)f);
        load(&m, QL_OK, NULL, 0);
        /* What another lane takes is that lane's to refuse. */
        size_t row = (size_t)ql_qformat_row_bytes((ql_qformat)f, K),
               col = (size_t)ql_qformat_row_bytes((ql_qformat)f, 32);
        memset(m.data, 0xff, 3 * row);
        for (size_t r = 0; r < N; r++) {
            memset(m.data + r * row, 0xff, col);
        }
        load(&m, QL_OK, NULL, 0);
    }
}

static void test_bad_codes(void **state) {
    (void)state;
    static matrix m;
    static const ql_qformat fp8[] = {QL_FORMAT_FP8_CHANNEL, QL_FORMAT_FP8_TENSOR, QL_FORMAT_FP8_BLOCK};
    static const int32_t cols[] = {32, 33, 39, 40, 100, 158, 159};
    for (size_t c = 0; c < LEN(cols); c++) {
        char column[32];
        snprintf(column, sizeof column, "column %d ", cols[c]);
        for (size_t f = 0; f < LEN(fp8); f++) {
            for (int sign = 0; sign < 2; sign++) {
                sound(&m, fp8[f]);
                m.data[77 * K + cols[c]] = sign ? 0xff : 0x7f;
                refuse_load(&m, "row 77", column);
                refuse_load(&m, "NaN", sign ? "0xff" : "0x7f");
            }
        }
        for (int32_t f = QL_FORMAT_F32; f <= QL_FORMAT_BF16; f++) {
            static const uint32_t inf[] = {0x7f800000, 0x7c00, 0xff80};
            size_t width = f == QL_FORMAT_F32 ? 4 : 2;
            sound(&m, (ql_qformat)f);
            memcpy(m.data + (129 * K + (size_t)cols[c]) * width, &inf[f], width);
            refuse_load(&m, "row 129", column);
        }
    }
    sound(&m, QL_FORMAT_NVFP4); /* all sixteen codes are numbers */
    memset(m.data, 0xff, sizeof m.data);
    load(&m, QL_OK, NULL, 0);
}

static void test_bad_scales(void **state) {
    (void)state;
    static matrix m;
    static const struct {
        uint16_t bf16;
        const char *text;
    } bad[] = {{0x0000, "is 0"}, {0xbf00, "is -0.5"}, {0x7f80, "is inf"}, {0x7fc0, "nan"}, {0x8000, "is -0"}};
    for (size_t i = 0; i < LEN(bad); i++) {
        sound(&m, QL_FORMAT_FP8_CHANNEL);
        memcpy(m.scale + 2 * 50, &bad[i].bf16, 2);
        refuse_load(&m, "row 50", bad[i].text);
        sound(&m, QL_FORMAT_FP8_BLOCK);
        memcpy(m.scale + 2 * 3, &bad[i].bf16, 2); /* block row 1, block column 1 */
        refuse_load(&m, "row 1, column 1", bad[i].text);
    }
    static const float factors[] = {0, -1, INFINITY, NAN};
    for (size_t i = 0; i < LEN(factors); i++) {
        for (int32_t f = QL_FORMAT_FP8_TENSOR; f <= QL_FORMAT_NVFP4; f += QL_FORMAT_NVFP4 - QL_FORMAT_FP8_TENSOR) {
            sound(&m, (ql_qformat)f);
            m.src.factor = factors[i];
            refuse_load(&m, "tensor scale", "above 0");
        }
    }
    static const uint8_t groups[] = {0x7f, 0xff, 0x80, 0xb8};
    for (size_t i = 0; i < LEN(groups); i++) {
        sound(&m, QL_FORMAT_NVFP4);
        m.scale[9 * (K / 16) + 4] = groups[i];
        refuse_load(&m, "row 9, columns 64 to 79", i < 2 ? "NaN" : "negative");
    }
}

/* A scale of another dtype is the same number. */
static void test_scale_dtypes(void **state) {
    (void)state;
    static matrix m;
    static const ql_dtype dtypes[] = {QL_DTYPE_BF16, QL_DTYPE_F16, QL_DTYPE_F32};
    static const uint32_t half[] = {0x3f00, 0x3800, 0x3f000000};
    for (size_t i = 0; i < LEN(dtypes); i++) {
        ql_dev dev;
        ql_error err = {0};
        ql_weight w;
        size_t width = dtypes[i] == QL_DTYPE_F32 ? 4 : 2;
        sound(&m, QL_FORMAT_FP8_CHANNEL);
        m.src.scale_dtype = dtypes[i];
        for (size_t r = 0; r < N; r++) {
            memcpy(m.scale + r * width, &half[i], width);
        }
        assert_int_equal(ql_host_dev_open(&dev, NULL, NULL, &err), QL_OK);
        assert_int_equal(dev.ops->weight_load(&dev, &m.src, &w), QL_OK);
        for (int32_t r = 0; r < w.n; r++) {
            assert_true(((const float *)w.scale)[r] == 0.5f);
        }
        assert_true(w.max_abs == 224.0f);
        dev.ops->weight_free(&dev, &w);
        dev.ops->close(&dev);
    }
}

/* Each allocation failing in turn: an error, nothing left behind. */
static void test_load_without_memory(void **state) {
    (void)state;
    static matrix m;
    sound(&m, QL_FORMAT_FP8_CHANNEL);
    for (int fail_at = 1;; fail_at++) {
        counter count = {.fail_at = fail_at};
        ql_allocator mem = counting(&count);
        ql_dev dev;
        ql_error err = {0};
        ql_weight w;
        ql_status status = ql_host_dev_open(&dev, NULL, &mem, &err);
        if (status == QL_OK) {
            status = dev.ops->weight_load(&dev, &m.src, &w);
            if (status == QL_OK) {
                dev.ops->weight_free(&dev, &w);
            }
            dev.ops->close(&dev);
        }
        assert_int_equal(count.live, 0);
        if (count.calls < fail_at) {
            assert_int_equal(status, QL_OK);
            assert_true(fail_at > 3);
            return;
        }
        assert_int_equal(status, QL_ERR_MEMORY);
    }
}

/* ---- ops --------------------------------------------------------------------------------------------------------- */

static void test_counters_and_misuse(void **state) {
    (void)state;
    static matrix m;
    ql_dev dev;
    ql_error err = {0};
    ql_weight w;
    sound(&m, QL_FORMAT_NVFP4);
    assert_int_equal(ql_host_dev_open(&dev, NULL, NULL, &err), QL_OK);
    assert_int_equal(dev.ops->weight_load(&dev, &m.src, &w), QL_OK);
    float x[128] = {1}, y[127];
    ql_linear_args a = {.w = &w,
                        .x = x,
                        .y = y,
                        .ldx = 128,
                        .ldy = 127,
                        .n_row = 1,
                        .n_slice = 1,
                        .phase = QL_PHASE_GEN,
                        .precision = QL_PREC_EXACT};
    assert_int_equal(dev.ops->linear(&dev, &a), QL_ERR_INTERNAL); /* no scratch */
    assert_non_null(strstr(err.text, "scratch"));
    ql_shape shape = {.hidden = 64};
    dev.scratch_bytes = dev.ops->scratch_bytes(&dev, &shape);
    assert_int_equal(dev.ops->alloc(&dev, dev.scratch_bytes, "scratch", &dev.scratch), QL_OK);
    assert_int_equal(dev.ops->linear(&dev, &a), QL_OK);
    assert_int_equal(dev.n_path[ql_path_linear(QL_FORMAT_NVFP4, QL_PHASE_GEN)], 2);
    assert_int_equal(dev.n_path[ql_path_linear(QL_FORMAT_NVFP4, QL_PHASE_PROMPT)], 0);
    assert_true(dev.progress >= 2);
    static const int32_t slices[] = {0, 3, 16, -1};
    for (size_t i = 0; i < LEN(slices); i++) {
        err = (ql_error){0};
        a.n_slice = slices[i];
        assert_int_equal(dev.ops->linear(&dev, &a), QL_ERR_INTERNAL);
    }
    a.n_slice = 1;
    a.precision = QL_PREC_AUTO;
    assert_int_equal(dev.ops->linear(&dev, &a), QL_ERR_INTERNAL);
    ql_topk_args t = {.logits = x, .ld = 128, .n_row = 1, .n = 100, .vocab0 = 3, .vocab = 128, .k_cap = 1};
    assert_int_equal(dev.ops->topk(&dev, &t), QL_ERR_INTERNAL); /* no whole ranges */
    ql_sample_row row = {.k = 2};
    t = (ql_topk_args){.logits = x, .ld = 128, .n_row = 1, .n = 128, .vocab = 128, .row = &row, .k_cap = 1};
    ql_candidate cand[2];
    ql_vocab_stat stat[8];
    t.cand = cand;
    t.stat = stat;
    assert_int_equal(dev.ops->topk(&dev, &t), QL_ERR_INTERNAL); /* more candidates than room */
    ql_sample_args s = {.n_lane = 3};
    assert_int_equal(dev.ops->sample(&dev, &s), QL_ERR_INTERNAL);
    dev.ops->free(&dev, dev.scratch);
    dev.ops->weight_free(&dev, &w);
    dev.ops->close(&dev);
}

/* Range starts of a file that does not fit are a mistake of the caller: refused, never read. */
static void test_bad_cut(void **state) {
    (void)state;
    static matrix m;
    static const char *const internal[] = {"does not fit"};
    sound(&m, QL_FORMAT_FP8_TENSOR);
    m.src.col0 = 33;
    load(&m, QL_ERR_INTERNAL, internal, 1);
    sound(&m, QL_FORMAT_FP8_TENSOR);
    m.src.row1[0] = N + 1;
    m.src.n = 128;
    load(&m, QL_ERR_INTERNAL, internal, 1);
    sound(&m, QL_FORMAT_NVFP4);
    m.src.col0 = 24;
    load(&m, QL_ERR_INTERNAL, internal, 1);
    sound(&m, QL_FORMAT_FP8_BLOCK); /* two ranges that do not lie on blocks */
    m.src.n_range = 2;
    m.src.row0[1] = 64;
    m.src.row1[0] = 64;
    m.src.row1[1] = N;
    load(&m, QL_ERR_INTERNAL, internal, 1);
    sound(&m, QL_FORMAT_FP8_CHANNEL);
    m.src.scale = NULL;
    load(&m, QL_ERR_INTERNAL, internal, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_sound_and_outside),
        cmocka_unit_test(test_bad_codes),
        cmocka_unit_test(test_bad_scales),
        cmocka_unit_test(test_scale_dtypes),
        cmocka_unit_test(test_load_without_memory),
        cmocka_unit_test(test_counters_and_misuse),
        cmocka_unit_test(test_bad_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
