/* A checkpoint with changed tensors. The input is a list of edits to the headers of a small mixed model: 4 bytes each, what
 * to do, to which tensor, and two bytes of argument. If the result opens, each tensor must be used exactly once or be
 * listed as ignored, and no weight may be without its scales. */
#include "loader/checkpoint.h"
#include "loader/shard.h"
#include "tests/stfile.h"
#include "tests/synth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool ok) {
    if (!ok) {
        abort();
    }
}

static char folder[64];
static ql_stfile original;

static void clean_up(void) {
    char path[128];
    static const char *const names[] = {"config.json", "model.safetensors"};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    ql_stfile_deinit(&original);
}

/* One file, no index: a mixed model of two layers, without vision and MTP. */
static void set_up(void) {
    snprintf(folder, sizeof folder, "%s/ql-fuzz-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    check(mkdtemp(folder) != NULL);
    ql_synth o = {.scheme = QL_SYNTH_MIXED, .prefix = "model.language_model.", .sparse = true};
    check(ql_synth_shape(&o.config, "micro"));
    ql_synth_set_layers(&o.config, 2);
    o.config.full_attention[1] = true;
    uint64_t bytes;
    check(ql_synth_write(&o, folder, &bytes, NULL) == QL_OK);
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    check(ql_checkpoint_open(&c, folder, &err) == QL_OK);
    for (int32_t i = 0; i < c->n_tensor; i++) {
        const ql_tensor *t = c->tensor[i];
        if (strncmp(t->name, "model.visual.", 13) != 0 && t->file == 0) {
            check(ql_stfile_add(&original, t->name, t->dtype, t->rank, t->shape, NULL) == QL_OK);
        }
    }
    ql_checkpoint_close(&c);
    char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    unlink(path);
    snprintf(path, sizeof path, "%s/model_mtp.safetensors", folder);
    unlink(path);
    atexit(clean_up);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    set_up();
    return 0;
}

static void edit(ql_stfile *f, const uint8_t *op) {
    static const char *const suffixes[] = {"weight",         "weight_packed",       "weight_scale", "weight_scale_inv",
                                           "weight_scale_2", "weight_global_scale", "input_scale",  "bias"};
    if (f->n == 0) {
        return;
    }
    ql_stentry *e = &f->entry[op[1] % f->n];
    char *dot = strrchr(e->name, '.');
    switch (op[0] % 6) {
    case 0: /* drop */ *e = f->entry[--f->n]; break;
    case 1: /* another dtype */ e->dtype = (ql_dtype)(op[2] % QL_DTYPE_COUNT); break;
    case 2: /* another size */ e->shape[op[2] % QL_MAX_RANK] = op[3] * 16; break;
    case 3: /* another rank */ e->rank = op[2] % 4; break;
    case 4: /* another component */
        if (dot) {
            snprintf(dot + 1, sizeof e->name - (size_t)(dot + 1 - e->name), "%s", suffixes[op[2] % 8]);
        }
        break;
    default: /* another character */ e->name[op[2] % strlen(e->name)] = (char)('0' + op[3] % 75); break;
    }
    for (char *p = e->name; *p; p++) {
        *p = *p == '"' || *p == '\\' ? '_' : *p;
    }
}

typedef struct seen {
    const ql_checkpoint *c;
    int32_t used;
} seen;

static ql_status visit(void *user, const ql_visit *v, ql_error *err) {
    (void)err;
    seen *s = user;
    if (v->tensor) {
        check(ql_dtype_is_plain(v->tensor->dtype));
        s->used++;
        return QL_OK;
    }
    const ql_linear *l = v->linear;
    const bool block =
        l->format == QL_FORMAT_FP8_CHANNEL || l->format == QL_FORMAT_FP8_BLOCK || l->format == QL_FORMAT_NVFP4;
    const bool one = l->format == QL_FORMAT_FP8_TENSOR || l->format == QL_FORMAT_NVFP4;
    check((l->scale != NULL) == block && (l->factor != NULL) == one);
    check(l->weight->bytes == (uint64_t)(l->n * ql_qformat_row_bytes(l->format, l->k)));
    s->used += 1 + block + one;
    for (int32_t n = 1; n <= s->c->config.slices; n *= 2) {
        ql_shard shard;
        check(ql_shard_init(&shard, &s->c->config, n, n - 1, NULL) == QL_OK);
        const ql_cut cut = ql_shard_cut(&s->c->config, &shard, v->part);
        uint64_t weight, scale;
        ql_linear_stored_bytes(l, &cut, &weight, &scale);
        check(weight > 0 && weight <= l->weight->bytes && scale <= (l->scale ? l->scale->bytes : 0));
    }
    return QL_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!folder[0]) {
        set_up(); /* a driver without LLVMFuzzerInitialize */
    }
    ql_stfile changed = {0}, laid_out = {0};
    for (int32_t i = 0; i < original.n; i++) {
        const ql_stentry *e = &original.entry[i];
        check(ql_stfile_add(&changed, e->name, e->dtype, e->rank, e->shape, NULL) == QL_OK);
    }
    for (size_t at = 0; at + 4 <= size && at < 64; at += 4) {
        edit(&changed, data + at);
    }
    for (int32_t i = 0; i < changed.n; i++) {
        const ql_stentry *e = &changed.entry[i];
        check(ql_stfile_add(&laid_out, e->name, e->dtype, e->rank, e->shape, NULL) == QL_OK);
    }
    char path[128];
    uint64_t offset;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    check(ql_stfile_create(&laid_out, path, &offset, NULL) == QL_OK);
    ql_checkpoint *c = NULL;
    ql_error err = {0};
    const ql_status status = ql_checkpoint_open(&c, folder, &err);
    if (status == QL_OK) {
        seen s = {.c = c};
        check(ql_checkpoint_each(c, c->has_mtp, visit, &s, &err) == QL_OK);
        check(s.used + c->summary.n_ignored == c->n_tensor && c->n_tensor == changed.n);
        for (int32_t i = 0; i < c->n_tensor; i++) {
            ql_tensor_info t;
            check(ql_checkpoint_get_tensor(c, i, &t) == QL_OK && t.role[0] && t.reason[0]);
        }
        ql_checkpoint_close(&c);
    } else {
        check(!c && err.status == status && err.text[0] && !strchr(err.text, '\n'));
    }
    ql_stfile_deinit(&changed);
    ql_stfile_deinit(&laid_out);
    return 0;
}
