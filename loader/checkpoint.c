#include "loader/checkpoint.h"

#include "loader/bind.h"
#include "loader/shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

/* ---- texts, notes --------------------------------------------------------------------------------------------- */

typedef struct ql_text_block {
    struct ql_text_block *next;
    size_t len;
    char text[65536 - 2 * sizeof(size_t)];
} ql_text_block;

const char *ql_checkpoint_text(ql_checkpoint *c, const char *fmt, ...) {
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    size_t bytes = (n < (int)sizeof line ? (size_t)n : sizeof line - 1) + 1;
    ql_text_block *block = c->owned->texts;
    if (!block || sizeof block->text - block->len < bytes) {
        block = ql_calloc(NULL, 1, sizeof *block);
        if (!block) {
            return NULL;
        }
        block->next = c->owned->texts;
        c->owned->texts = block;
    }
    char *text = memcpy(block->text + block->len, line, bytes);
    block->len += bytes;
    return text;
}

ql_status ql_checkpoint_add_note(ql_checkpoint *c, ql_error *err, const char *fmt, ...) {
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    char **grown = ql_realloc(NULL, c->note, ((size_t)c->n_note + 1) * sizeof *grown);
    if (!grown) {
        return ql_fail(err, QL_ERR_MEMORY, "no host memory for notes about the checkpoint");
    }
    c->note = grown;
    const char *text = ql_checkpoint_text(c, "%s", line);
    if (!text) {
        return ql_fail(err, QL_ERR_MEMORY, "no host memory for notes about the checkpoint");
    }
    c->note[c->n_note++] = (char *)text;
    return QL_OK;
}

static const char left_out_role[] = "ignored";

void ql_checkpoint_leave_out(ql_checkpoint *c, int32_t i, const char *reason) {
    c->info[i].role = left_out_role;
    c->info[i].reason = reason;
}

bool ql_checkpoint_is_left_out(const ql_checkpoint *c, int32_t i) { return c->info[i].role == left_out_role; }

/* ---- summary -------------------------------------------------------------------------------------------------- */

typedef struct tally {
    ql_checkpoint_info *info;
    uint64_t bytes; /* weights and scales together */
} tally;

static ql_status count_visit(void *user, const ql_visit *v, ql_error *err) {
    (void)err;
    tally *sum = user;
    const ql_cut whole = {.axis = -1};
    uint64_t weight = 0, scale = 0;
    if (v->tensor) {
        weight = ql_tensor_stored_bytes(v->tensor, &whole);
    } else {
        ql_linear_stored_bytes(v->linear, &whole, &weight, &scale);
        sum->info->n_linears++;
        sum->info->n_nvfp4 += v->linear->format == QL_FORMAT_NVFP4;
        sum->info->n_plain += v->linear->format <= QL_FORMAT_BF16;
    }
    sum->info->weight_bytes += weight;
    sum->info->scale_bytes += scale;
    sum->bytes += weight + scale;
    return QL_OK;
}

static ql_status summarize(ql_checkpoint *c, ql_error *err) {
    const ql_config *cfg = &c->config;
    ql_checkpoint_info *s = &c->summary;
    *s = (ql_checkpoint_info){.n_layers = cfg->n_layer,
                              .hidden = cfg->hidden,
                              .intermediate = cfg->intermediate,
                              .vocab = cfg->vocab,
                              .n_heads = cfg->n_head,
                              .n_kv_heads = cfg->n_kv_head,
                              .n_key_heads = cfg->n_key_head,
                              .n_value_heads = cfg->n_value_head,
                              .max_ctx = cfg->max_ctx,
                              .slices = cfg->slices,
                              .has_mtp = c->has_mtp,
                              .tied_embeddings = cfg->tied,
                              .n_tensors = c->n_tensor,
                              .n_files = c->n_file};
    snprintf(s->dir, sizeof s->dir, "%s", c->dir);
    snprintf(s->architecture, sizeof s->architecture, "%s", cfg->architecture);
    snprintf(s->scheme, sizeof s->scheme, "%s", ql_quant_text(c->owned->quant));
    char path[4096];
    s->has_tokenizer =
        snprintf(path, sizeof path, "%s/tokenizer.json", c->dir) < (int)sizeof path && ql_file_exists(path);
    for (int32_t i = 0; i < c->n_tensor; i++) {
        if (ql_checkpoint_is_left_out(c, i)) {
            s->n_ignored++;
            s->ignored_bytes += c->tensor[i]->bytes;
        }
    }
    tally sum = {.info = s};
    QL_TRY(ql_checkpoint_each(c, false, count_visit, &sum, err));
    if (cfg->tied) { /* visited as the embedding; still a projection */
        s->n_linears++;
        s->n_plain++;
    }
    s->n_fp8 = s->n_linears - s->n_nvfp4 - s->n_plain;
    if (c->has_mtp) {
        ql_checkpoint_info both = {0};
        tally with_mtp = {.info = &both};
        QL_TRY(ql_checkpoint_each(c, true, count_visit, &with_mtp, err));
        s->mtp_bytes = with_mtp.bytes - sum.bytes;
    }
    return QL_OK;
}

/* ---- public --------------------------------------------------------------------------------------------------- */

static ql_status open_parts(ql_checkpoint *c, ql_error *err) {
    json_t *quantization = NULL;
    QL_TRY(ql_config_load(c->dir, &c->config, &quantization, err));
    ql_status status = ql_quant_open(&c->owned->quant, quantization, err);
    json_decref(quantization);
    if (status != QL_OK) {
        return ql_fail_in(err, c->dir);
    }
    QL_TRY(ql_checkpoint_load_files(c, err));
    QL_TRY(ql_checkpoint_bind(c, err));
    return summarize(c, err);
}

ql_status ql_checkpoint_open(ql_checkpoint **checkpoint, const char *model, ql_error *err) {
    ql_checkpoint *c = NULL;
    char *dir = NULL;
    *checkpoint = NULL;
    QL_TRY(ql_model_dir(model, &dir, err));
    ql_status status = ql_alloc(NULL, 1, sizeof *c, "the checkpoint", (void **)&c, err);
    if (status == QL_OK) {
        c->dir = dir;
        dir = NULL;
        status = ql_alloc(NULL, 1, sizeof *c->owned, "the checkpoint", (void **)&c->owned, err);
    }
    free(dir);
    if (status == QL_OK) {
        status = open_parts(c, err);
    }
    if (status != QL_OK) {
        ql_checkpoint_close(&c);
        return status;
    }
    *checkpoint = c;
    return QL_OK;
}

void ql_checkpoint_close(ql_checkpoint **checkpoint) {
    ql_checkpoint *c = checkpoint ? *checkpoint : NULL;
    if (!c) {
        return;
    }
    for (int32_t i = 0; i < c->n_file; i++) {
        ql_safetensors_close(&c->file[i]);
    }
    if (c->owned) {
        for (ql_text_block *block = c->owned->texts, *next; block; block = next) {
            next = block->next;
            ql_free(NULL, block);
        }
        ql_quant_close(&c->owned->quant);
        ql_free(NULL, c->owned->index);
    }
    ql_free(NULL, c->owned);
    ql_free(NULL, c->file);
    ql_free(NULL, c->tensor);
    ql_free(NULL, c->info);
    ql_free(NULL, c->note);
    ql_free(NULL, c->layer);
    free(c->dir);
    ql_free(NULL, c);
    *checkpoint = NULL;
}

void ql_checkpoint_get_info(const ql_checkpoint *checkpoint, ql_checkpoint_info *info) { *info = checkpoint->summary; }

ql_status ql_checkpoint_get_tensor(const ql_checkpoint *checkpoint, int32_t i, ql_tensor_info *info) {
    if (i < 0 || i >= checkpoint->n_tensor) {
        return QL_ERR_USAGE;
    }
    *info = checkpoint->info[i];
    return QL_OK;
}

ql_status ql_checkpoint_tensor_crc(const ql_checkpoint *checkpoint, int32_t i, uint32_t *crc, ql_error *err) {
    if (i < 0 || i >= checkpoint->n_tensor) {
        return ql_fail(err, QL_ERR_USAGE, "tensor %d; the checkpoint has 0 to %d", i, checkpoint->n_tensor - 1);
    }
    const ql_tensor *t = checkpoint->tensor[i];
    *crc = (uint32_t)crc32_z(crc32_z(0, NULL, 0), t->data, (size_t)t->bytes);
    return QL_OK;
}

const char *ql_checkpoint_note(const ql_checkpoint *checkpoint, int32_t i) {
    return i >= 0 && i < checkpoint->n_note ? checkpoint->note[i] : NULL;
}
