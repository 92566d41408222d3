/* A safetensors header. What is accepted must be laid out as the format says, must not be accepted of a file that is a
 * byte shorter or longer, and must come back the same when written again.
 *
 * Input: a byte; 0: the rest is the start of a file, whose data section has the length that the last two bytes say;
 * otherwise the rest is header text alone, and the data section is as long as the refusal of a file without one says. */
#include "loader/safetensors.h"
#include "tests/stfile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool ok) {
    if (!ok) {
        abort();
    }
}

/* Tensors are in name order; walk them in offset order by looking for the next begin. */
static void check_layout(const ql_safetensors *st, uint64_t data_offset, uint64_t file_bytes) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < st->n_tensor; i++) {
        const ql_tensor *t = &st->tensor[i];
        check(i == 0 || strcmp(st->tensor[i - 1].name, t->name) < 0);
        check(ql_safetensors_find(st, t->name) == t);
        check(t->offset >= data_offset && t->offset <= file_bytes && t->bytes <= file_bytes - t->offset);
        check((uint64_t)t->n_elem * (uint64_t)ql_dtype_bits(t->dtype) == 8 * t->bytes);
        check(t->rank >= 0 && t->rank <= QL_MAX_RANK && t->data == NULL);
        char text[192];
        check(strlen(ql_tensor_shape_text(t, text)) < sizeof text);
        sum += t->bytes;
        for (int32_t k = 0; k < i; k++) { /* no two share a byte */
            const ql_tensor *o = &st->tensor[k];
            check(t->bytes == 0 || o->bytes == 0 || t->offset >= o->offset + o->bytes ||
                  o->offset >= t->offset + t->bytes);
        }
    }
    check(sum == file_bytes - data_offset);
}

static int by_offset(const void *a, const void *b) {
    const ql_tensor *x = *(const ql_tensor *const *)a, *y = *(const ql_tensor *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset ? 1 : x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static bool is_plain_text(const char *name) {
    for (; *name; name++) {
        if (*name < 0x20 || *name == '"' || *name == '\\' || *name == 0x7f) {
            return false;
        }
    }
    return true;
}

static void check_round_trip(const ql_safetensors *st) {
    const ql_tensor **order = calloc((size_t)st->n_tensor + 1, sizeof *order);
    check(order != NULL);
    for (int32_t i = 0; i < st->n_tensor; i++) {
        order[i] = &st->tensor[i];
        if (strlen(st->tensor[i].name) > 300 || !is_plain_text(st->tensor[i].name)) {
            free(order); /* more than the test writer writes */
            return;
        }
    }
    qsort(order, (size_t)st->n_tensor, sizeof *order, by_offset);
    ql_stfile file = {0};
    ql_buf head;
    ql_buf_init(&head, NULL, 1 << 24);
    for (int32_t i = 0; i < st->n_tensor; i++) {
        check(ql_stfile_add(&file, order[i]->name, order[i]->dtype, order[i]->rank, order[i]->shape, NULL) == QL_OK);
    }
    check(ql_stfile_header(&file, &head, NULL) == QL_OK);
    ql_safetensors again;
    ql_error err = {0};
    check(ql_safetensors_parse(&again, "again", (const uint8_t *)head.data, head.len, head.len + file.data_bytes, 0,
                               &err) == QL_OK);
    check(again.n_tensor == st->n_tensor);
    for (int32_t i = 0; i < st->n_tensor; i++) {
        const ql_tensor *a = &st->tensor[i], *b = &again.tensor[i];
        check(strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->bytes == b->bytes && a->rank == b->rank &&
              memcmp(a->shape, b->shape, sizeof a->shape) == 0);
    }
    ql_safetensors_close(&again);
    ql_buf_deinit(&head);
    ql_stfile_deinit(&file);
    free(order);
}

static bool parses(const uint8_t *head, uint64_t head_bytes, uint64_t file_bytes) {
    ql_safetensors st;
    ql_error err = {0};
    ql_status status = ql_safetensors_parse(&st, "fuzz", head, head_bytes, file_bytes, 0, &err);
    if (status != QL_OK) {
        check(err.status == status && err.text[0] && !strchr(err.text, '\n') && !st.tensor && !st.names);
        return false;
    }
    check(err.status == QL_OK);
    uint64_t len = 0;
    memcpy(&len, head, 8);
    check_layout(&st, 8 + len, file_bytes);
    check_round_trip(&st);
    ql_safetensors_close(&st);
    return true;
}

/* What the refusal of a file without data says that it lacks. */
static uint64_t needed_bytes(const uint8_t *head, uint64_t head_bytes) {
    ql_safetensors st;
    ql_error err = {0};
    unsigned long long bytes = 0;
    if (ql_safetensors_parse(&st, "fuzz", head, head_bytes, head_bytes, 0, &err) == QL_OK) {
        ql_safetensors_close(&st);
    } else {
        sscanf(err.text, "fuzz is truncated or incomplete: its tensors need %llu", &bytes);
    }
    return bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) {
        return 0;
    }
    uint64_t data_bytes = 0;
    uint8_t *head;
    uint64_t head_bytes;
    if (data[0] == 0) {
        head_bytes = size - 1;
        head = malloc((size_t)head_bytes + 1);
        check(head != NULL);
        memcpy(head, data + 1, (size_t)head_bytes);
        if (head_bytes >= 2) {
            data_bytes = (uint64_t)data[size - 2] | (uint64_t)data[size - 1] << 8;
        }
    } else {
        const uint64_t len = size - 1;
        head_bytes = 8 + len;
        head = malloc((size_t)head_bytes);
        check(head != NULL);
        memcpy(head, &len, 8);
        memcpy(head + 8, data + 1, (size_t)len);
        data_bytes = needed_bytes(head, head_bytes);
    }
    if (parses(head, head_bytes, head_bytes + data_bytes)) {
        check(!parses(head, head_bytes, head_bytes + data_bytes + 1));
        check(data_bytes == 0 || !parses(head, head_bytes, head_bytes + data_bytes - 1));
    }
    free(head);
    return 0;
}
