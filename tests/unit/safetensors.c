/* Every rule of the safetensors container, each by a file that breaks it and the text of the refusal. */
#include "loader/safetensors.h"

#include "tests/stfile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))

/* The first bytes of a file: length prefix and header. */
typedef struct head {
    uint8_t *bytes;
    uint64_t n;
} head;

static head make_head(const char *json, size_t len, uint64_t claimed) {
    head h = {.bytes = malloc(len + 8), .n = len + 8};
    assert_non_null(h.bytes);
    for (int i = 0; i < 8; i++) {
        h.bytes[i] = (uint8_t)(claimed >> (8 * i));
    }
    memcpy(h.bytes + 8, json, len);
    return h;
}

static void assert_contains(const ql_error *err, const char *part) {
    if (!strstr(err->text, part)) {
        fail_msg("\"%s\" does not contain \"%s\"", err->text, part);
    }
}

static ql_status parse(ql_safetensors *st, const char *json, uint64_t data_bytes, ql_error *err) {
    head h = make_head(json, strlen(json), strlen(json));
    *err = (ql_error){0};
    ql_status status = ql_safetensors_parse(st, "shard.safetensors", h.bytes, h.n, h.n + data_bytes, 3, err);
    free(h.bytes);
    return status;
}

static void refuse(const char *json, uint64_t data_bytes, const char *a, const char *b) {
    ql_safetensors st;
    ql_error err;
    assert_int_equal(parse(&st, json, data_bytes, &err), QL_ERR_MODEL);
    assert_contains(&err, "shard.safetensors");
    assert_contains(&err, a);
    assert_contains(&err, b);
    assert_null(st.tensor);
}

static void accept(ql_safetensors *st, const char *json, uint64_t data_bytes) {
    ql_error err;
    if (parse(st, json, data_bytes, &err) != QL_OK) {
        fail_msg("refused: %s", err.text);
    }
}

/* ---- accepted ------------------------------------------------------------------------------------------------- */

static void test_reads_names_shapes_and_offsets(void **state) {
    (void)state;
    static const char json[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                               "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                               "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}";
    ql_safetensors st;
    accept(&st, json, 16);
    assert_int_equal(st.n_tensor, 2);
    const ql_tensor *a = ql_safetensors_find(&st, "a"), *b = ql_safetensors_find(&st, "b");
    assert_ptr_equal(a, &st.tensor[0]); /* name order */
    assert_int_equal(a->rank, 0);
    assert_int_equal(a->n_elem, 1);
    assert_int_equal(a->offset, 8 + strlen(json));
    assert_int_equal(b->dtype, QL_DTYPE_BF16);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_int_equal(b->offset, 8 + strlen(json) + 4);
    assert_int_equal(b->file, 3);
    assert_null(b->data);
    assert_null(ql_safetensors_find(&st, "c"));
    ql_safetensors_close(&st);
}

static void test_header_order_may_differ_from_offset_order(void **state) {
    (void)state;
    ql_safetensors st;
    accept(&st,
           "{\"z\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]},"
           "\"m\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
           "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[12,13]}}",
           13);
    assert_int_equal(st.n_tensor, 3);
    ql_safetensors_close(&st);
}

static void test_padding_and_empty_things_are_legal(void **state) {
    (void)state;
    ql_safetensors st;
    accept(&st, "{}      ", 0);
    assert_int_equal(st.n_tensor, 0);
    assert_null(ql_safetensors_find(&st, "a"));
    ql_safetensors_close(&st);
    accept(&st,
           "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
           "\"none\":{\"dtype\":\"F32\",\"shape\":[1000,0,9223372036854775807],\"data_offsets\":[4,4]},"
           "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}  ",
           8);
    assert_int_equal(ql_safetensors_find(&st, "none")->n_elem, 0);
    ql_safetensors_close(&st);
}

static void test_every_dtype_has_its_size(void **state) {
    (void)state;
    for (int d = 0; d < QL_DTYPE_COUNT; d++) {
        char json[256];
        const int bytes = ql_dtype_bits((ql_dtype)d); /* of 8 elements */
        snprintf(json, sizeof json, "{\"t\":{\"dtype\":\"%s\",\"shape\":[2,4],\"data_offsets\":[0,%d]}}",
                 ql_dtype_name((ql_dtype)d), bytes);
        ql_safetensors st;
        accept(&st, json, (uint64_t)bytes);
        assert_int_equal(st.tensor[0].dtype, d);
        ql_safetensors_close(&st);
    }
}

/* ---- refused: the JSON ---------------------------------------------------------------------------------------- */

static void test_duplicate_names(void **state) {
    (void)state;
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
           "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
           8, "twice", "duplicate");
    refuse("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "twice",
           "duplicate");
}

static void test_header_must_be_one_json_object(void **state) {
    (void)state;
    refuse("[]", 0, "JSON object", "{");
    refuse(" {}", 0, "JSON object", "{");
    refuse("", 0, "JSON object", "{");
    refuse("{\"a\":", 0, "not valid JSON", "byte");
    refuse("{} {}", 0, "not valid JSON", "byte");
    refuse("{\"\xff\":1}", 0, "not valid UTF-8", "0xff");
    refuse("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "NUL", "name");
    refuse("{\"a\":3}", 0, "\"a\"", "must be an object");
}

static void test_entry_schema(void **state) {
    (void)state;
    refuse("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"a\"", "dtype must be a string, not nothing");
    refuse("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "\"a\"", "shape must be an array, not nothing");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "\"a\"", "data_offsets must be");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "\"a\"",
           "two numbers, not [0,4,8]");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"strides\":[1]}}", 4, "unknown field",
           "strides");
    refuse("{\"__metadata__\":{\"format\":1}}", 0, "__metadata__", "format");
    refuse("{\"__metadata__\":[]}", 0, "__metadata__", "object of strings");
}

static void test_numbers_must_be_natural(void **state) {
    (void)state;
    static const char *const shapes[] = {"1.0", "1e0", "\"1\"", "null", "true", "[1]"};
    static const char *const shown[] = {"1.0", "1.0", "\"1\"", "null", "true", "[1]"};
    for (size_t i = 0; i < LEN(shapes); i++) {
        char json[256];
        snprintf(json, sizeof json, "{\"a\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[0,4]}}", shapes[i]);
        char part[64];
        snprintf(part, sizeof part, "shape holds %s; accepted are whole numbers", shown[i]);
        refuse(json, 4, "tensor \"a\"", part);
        snprintf(json, sizeof json, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,%s]}}", shapes[i]);
        snprintf(part, sizeof part, "data_offsets holds %s; accepted are whole numbers", shown[i]);
        refuse(json, 4, "tensor \"a\"", part);
    }
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "shape holds -1", "negative");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "data_offsets holds -4", "negative");
}

static void test_own_limits(void **state) {
    (void)state;
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "rank 9", "at most 8");
    refuse("{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "name of 0 bytes", "1 to 512");
    char json[1024], name[514];
    memset(name, 'n', 513);
    name[513] = 0;
    snprintf(json, sizeof json, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", name);
    refuse(json, 1, "name of 513 bytes", "1 to 512");
    snprintf(json, sizeof json, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", name + 1);
    ql_safetensors st;
    accept(&st, json, 1);
    ql_safetensors_close(&st);
}

/* ---- refused: sizes and layout --------------------------------------------------------------------------------- */

static void test_unknown_dtype_names_tensor_and_dtype(void **state) {
    (void)state;
    refuse("{\"w\":{\"dtype\":\"Q4_K\",\"shape\":[8],\"data_offsets\":[0,8]}}", 8, "\"w\"",
           "unknown dtype \"Q4_K\"; accepted are BOOL, U8");
    refuse("{\"w\":{\"dtype\":\"bf16\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8, "\"w\"", "F8_E4M3FNUZ, F8_E5M2FNUZ");
}

static void test_offsets_past_64_bits_name_tensor_and_dtype(void **state) {
    (void)state;
    /* 2^64 - 8: adding the data section's start to it would wrap */
    refuse("{\"ok\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
           "\"w\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[18446744073709551608,18446744073709551611]}}",
           8, "\"w\" (F6_E2M3)", "data_offsets holds 18446744073709551");
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,0]}}", 0, "\"w\" (U8)",
           "shape holds");
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[9223372036854775800,9223372036854775807]}}", 8,
           "\"w\"", "needs 8 bytes");
}

static void test_shape_must_give_the_bytes(void **state) {
    (void)state;
    refuse("{\"w\":{\"dtype\":\"F32\",\"shape\":[1000,1000],\"data_offsets\":[0,4]}}", 4, "[1000, 1000]",
           "needs 4000000 bytes");
    refuse("{\"w\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,8]}}", 8, "F32 []", "needs 4 bytes");
    refuse("{\"w\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "\"w\"",
           "overflows");
    refuse("{\"w\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0, "\"w\"",
           "overflows");
    refuse("{\"w\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "F4 [3]", "whole number of bytes");
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,4]}}", 8, "[8, 4]", "end before they begin");
}

static void test_overlap(void **state) {
    (void)state;
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
           "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
           4, "\"a\" and \"b\"", "overlap");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
           "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
           12, "\"a\" and \"b\"", "overlap");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
           "\"b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}",
           8, "\"a\" and \"b\"", "overlap");
}

static void test_hole(void **state) {
    (void)state;
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
           "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}",
           16, "hole of 8 bytes", "\"b\"");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "hole of 4 bytes", "\"a\"");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 12, "8 bytes after the last tensor",
           "no tensor");
}

static void test_header_length(void **state) {
    (void)state;
    static const char json[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    const uint64_t n = strlen(json), file = n + 8 + 4;
    const struct {
        uint64_t claimed;
        const char *part;
    } cases[] = {
        {(uint64_t)1 << 63, "at most 100000000"},
        {UINT64_MAX, "at most 100000000"},
        {101000000, "at most 100000000"},
        {100000000, "truncated or incomplete"},
        {file, "truncated or incomplete"},
        {file - 8 + 1, "truncated or incomplete"},
        {0, "JSON object"},
        {n - 1, "not valid JSON"},
    };
    for (size_t i = 0; i < LEN(cases); i++) {
        head h = make_head(json, n, cases[i].claimed);
        ql_safetensors st;
        ql_error err = {0};
        assert_int_equal(ql_safetensors_parse(&st, "shard", h.bytes, h.n, file, 0, &err), QL_ERR_MODEL);
        assert_contains(&err, cases[i].part);
        free(h.bytes);
    }
    ql_safetensors st;
    ql_error err = {0};
    assert_int_equal(ql_safetensors_parse(&st, "shard", (const uint8_t *)"1234567", 7, 7, 0, &err), QL_ERR_MODEL);
    assert_contains(&err, "truncated or incomplete");
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

static char folder[] = "/tmp/ql-safetensors-XXXXXX";

static int set_up(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    char path[128];
    snprintf(path, sizeof path, "%s/model-00002-of-00003.safetensors", folder);
    unlink(path);
    return rmdir(folder);
}

/* A valid file of one tensor of three pages and one small one. */
static uint64_t write_file(char *path, size_t cap) {
    ql_stfile file = {0};
    ql_error err = {0};
    uint64_t offset;
    const int64_t big[2] = {3, 4096}, small = 3;
    assert_int_equal(ql_stfile_add(&file, "big", QL_DTYPE_U8, 2, big, &err), QL_OK);
    assert_int_equal(ql_stfile_add(&file, "small", QL_DTYPE_BF16, 1, &small, &err), QL_OK);
    snprintf(path, cap, "%s/model-00002-of-00003.safetensors", folder);
    assert_int_equal(ql_stfile_create(&file, path, &offset, &err), QL_OK);
    ql_stfile_deinit(&file);
    return offset;
}

static void test_open_maps_the_data(void **state) {
    (void)state;
    char path[128];
    const uint64_t offset = write_file(path, sizeof path);
    ql_safetensors st;
    ql_error err = {0};
    assert_int_equal(ql_safetensors_open(&st, path, 1, &err), QL_OK);
    assert_string_equal(st.base, "model-00002-of-00003.safetensors");
    assert_int_equal(st.n_tensor, 2);
    assert_ptr_equal(st.tensor[0].data, st.map + offset);
    assert_int_equal(st.tensor[1].data[5], 0);
    ql_safetensors_close(&st);
    ql_safetensors_close(&st);
}

static void test_truncated_download_names_the_shard(void **state) {
    (void)state;
    char path[128];
    const uint64_t offset = write_file(path, sizeof path), full = offset + 3 * 4096 + 6;
    const uint64_t lengths[] = {full - 1, full - 4096, offset, offset - 1, 8, 7, 0};
    for (size_t i = 0; i < LEN(lengths); i++) {
        write_file(path, sizeof path);
        assert_int_equal(truncate(path, (off_t)lengths[i]), 0);
        ql_safetensors st;
        ql_error err = {0};
        assert_int_equal(ql_safetensors_open(&st, path, 0, &err), QL_ERR_MODEL);
        assert_contains(&err, "truncated or incomplete");
        assert_contains(&err, "model-00002-of-00003.safetensors");
        assert_null(st.map);
    }
}

static void test_what_is_no_file(void **state) {
    (void)state;
    ql_safetensors st;
    ql_error err = {0};
    assert_int_equal(ql_safetensors_open(&st, "/nonexistent/model.safetensors", 0, &err), QL_ERR_MODEL);
    assert_contains(&err, "cannot open /nonexistent/model.safetensors");
    err = (ql_error){0};
    assert_int_equal(ql_safetensors_open(&st, folder, 0, &err), QL_ERR_MODEL);
    assert_contains(&err, "not a regular file");
    char path[128];
    write_file(path, sizeof path);
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
    assert_int_equal(ql_write_file(path, pointer, strlen(pointer), &err), QL_OK);
    err = (ql_error){0};
    assert_int_equal(ql_safetensors_open(&st, path, 0, &err), QL_ERR_MODEL);
    assert_contains(&err, "git-lfs pointer");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_names_shapes_and_offsets),
        cmocka_unit_test(test_header_order_may_differ_from_offset_order),
        cmocka_unit_test(test_padding_and_empty_things_are_legal),
        cmocka_unit_test(test_every_dtype_has_its_size),
        cmocka_unit_test(test_duplicate_names),
        cmocka_unit_test(test_header_must_be_one_json_object),
        cmocka_unit_test(test_entry_schema),
        cmocka_unit_test(test_numbers_must_be_natural),
        cmocka_unit_test(test_own_limits),
        cmocka_unit_test(test_unknown_dtype_names_tensor_and_dtype),
        cmocka_unit_test(test_offsets_past_64_bits_name_tensor_and_dtype),
        cmocka_unit_test(test_shape_must_give_the_bytes),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_hole),
        cmocka_unit_test(test_header_length),
        cmocka_unit_test(test_open_maps_the_data),
        cmocka_unit_test(test_truncated_download_names_the_shard),
        cmocka_unit_test(test_what_is_no_file),
    };
    return cmocka_run_group_tests_name("safetensors", tests, set_up, tear_down);
}
