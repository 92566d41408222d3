/* qlane inspect: what is in a checkpoint and what each tensor was taken for. */
#include "runtime/cli/cli.h"

#include <string.h>

/* "[6144, 5120]" */
static void shape_text(const ql_tensor_info *t, char *out, size_t cap) {
    size_t len = (size_t)snprintf(out, cap, "[");
    for (int32_t i = 0; i < t->rank && i < 8; i++) {
        len += (size_t)snprintf(out + len, cap - len, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    }
    snprintf(out + len, cap - len, "]");
}

static void print_summary(const ql_checkpoint_info *info) {
    char a[32], b[32];
    printf("model        %s\n", info->dir);
    printf("             %s, %d layers, hidden %d, intermediate %d, vocabulary %d%s\n", info->architecture,
           info->n_layers, info->hidden, info->intermediate, info->vocab,
           info->tied_embeddings ? ", tied embeddings" : "");
    printf("             attention heads %d, KV heads %d, GDN key heads %d, value heads %d, context %d\n",
           info->n_heads, info->n_kv_heads, info->n_key_heads, info->n_value_heads, info->max_ctx);
    printf("scheme       %s\n", info->scheme);
    printf("projections  %d: %d NVFP4, %d FP8, %d plain\n", info->n_linears, info->n_nvfp4, info->n_fp8, info->n_plain);
    printf("slices       %d\n", info->slices);
    printf("tensors      %d in %d file%s: weights %s bytes, scales %s bytes\n", info->n_tensors, info->n_files,
           info->n_files == 1 ? "" : "s", ql_cli_commas(info->weight_bytes, a), ql_cli_commas(info->scale_bytes, b));
    printf("MTP          %s", info->has_mtp ? "" : "none\n");
    if (info->has_mtp) {
        printf("%s bytes\n", ql_cli_commas(info->mtp_bytes, a));
    }
    printf("left out     %d tensors, %s bytes\n", info->n_ignored, ql_cli_commas(info->ignored_bytes, a));
    printf("tokenizer    %s\n", info->has_tokenizer ? "yes" : "none");
}

static int print_text(const ql_checkpoint *checkpoint, const ql_checkpoint_info *info, bool crc) {
    ql_error err = {0};
    const char *note;
    int32_t name_width = 6;
    ql_tensor_info t;
    print_summary(info);
    for (int32_t i = 0; (note = ql_checkpoint_note(checkpoint, i)); i++) {
        printf("note         %s\n", note);
    }
    for (int32_t i = 0; i < info->n_tensors; i++) {
        if (ql_checkpoint_get_tensor(checkpoint, i, &t) == QL_OK && (int32_t)strlen(t.name) > name_width) {
            name_width = (int32_t)strlen(t.name);
        }
    }
    printf("\n%-*s  %-8s %-18s %-8s %-12s%s  %s\n", name_width, "tensor", "dtype", "shape", "role", "format",
           crc ? " crc32   " : "", "reason");
    for (int32_t i = 0; i < info->n_tensors; i++) {
        char shape[192], sum[16] = "";
        if (ql_checkpoint_get_tensor(checkpoint, i, &t) != QL_OK) {
            return ql_cli_fail(QL_EXIT_FAILED, "tensor %d of %d is missing from the table", i, info->n_tensors);
        }
        if (crc) {
            uint32_t value = 0;
            if (ql_checkpoint_tensor_crc(checkpoint, i, &value, &err) != QL_OK) {
                return ql_cli_fail_err(&err);
            }
            snprintf(sum, sizeof sum, " %08x", value);
        }
        shape_text(&t, shape, sizeof shape);
        printf("%-*s  %-8s %-18s %-8s %-12s%s  %s\n", name_width, t.name, t.dtype, shape, t.role, t.format, sum,
               t.reason);
    }
    return ql_cli_flush();
}

static json_t *json_tensor(const ql_tensor_info *t) {
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->rank && i < 8; i++) {
        json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    }
    return json_pack("{s:s, s:s, s:s, s:o, s:I, s:I, s:s, s:s, s:s}", "name", t->name, "file", t->file, "dtype",
                     t->dtype, "shape", shape, "offset", (json_int_t)t->offset, "bytes", (json_int_t)t->bytes, "role",
                     t->role, "format", t->format, "reason", t->reason);
}

static json_t *json_summary(const ql_checkpoint_info *i) {
    return json_pack(
        "{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:b, s:b, s:i, s:i, s:i, s:i, s:i, s:i,"
        " s:i, s:I, s:I, s:I, s:I}",
        "model", i->dir, "architecture", i->architecture, "scheme", i->scheme, "n_layers", i->n_layers, "hidden",
        i->hidden, "intermediate", i->intermediate, "vocab", i->vocab, "n_heads", i->n_heads, "n_kv_heads",
        i->n_kv_heads, "n_key_heads", i->n_key_heads, "n_value_heads", i->n_value_heads, "max_ctx", i->max_ctx,
        "slices", i->slices, "has_mtp", i->has_mtp, "tied_embeddings", i->tied_embeddings, "has_tokenizer",
        i->has_tokenizer, "n_files", i->n_files, "n_tensors", i->n_tensors, "n_linears", i->n_linears, "n_nvfp4",
        i->n_nvfp4, "n_fp8", i->n_fp8, "n_plain", i->n_plain, "n_ignored", i->n_ignored, "ignored_bytes",
        (json_int_t)i->ignored_bytes, "weight_bytes", (json_int_t)i->weight_bytes, "scale_bytes",
        (json_int_t)i->scale_bytes, "mtp_bytes", (json_int_t)i->mtp_bytes);
}

static int print_json(const ql_checkpoint *checkpoint, const ql_checkpoint_info *info, bool crc) {
    ql_error err = {0};
    json_t *root = json_summary(info), *tensors = json_array(), *notes = json_array();
    const char *note;
    for (int32_t i = 0; (note = ql_checkpoint_note(checkpoint, i)); i++) {
        json_array_append_new(notes, json_string(note));
    }
    for (int32_t i = 0; i < info->n_tensors; i++) {
        ql_tensor_info t;
        uint32_t value = 0;
        if (ql_checkpoint_get_tensor(checkpoint, i, &t) != QL_OK) {
            break;
        }
        json_t *entry = json_tensor(&t);
        if (crc && ql_checkpoint_tensor_crc(checkpoint, i, &value, &err) != QL_OK) {
            json_decref(entry);
            json_decref(root);
            json_decref(tensors);
            json_decref(notes);
            return ql_cli_fail_err(&err);
        }
        if (crc) {
            char hex[9];
            snprintf(hex, sizeof hex, "%08x", value);
            json_object_set_new(entry, "crc32", json_string(hex));
        }
        json_array_append_new(tensors, entry);
    }
    json_object_set_new(root, "notes", notes);
    json_object_set_new(root, "tensors", tensors);
    return ql_cli_print_json(root);
}

int ql_cli_inspect(const ql_cli_args *args) {
    char model[4096];
    ql_error err = {0};
    ql_checkpoint *checkpoint = NULL;
    ql_checkpoint_info info;
    int rc = ql_cli_model(args, model, sizeof model);
    if (rc) {
        return rc;
    }
    if (ql_checkpoint_open(&checkpoint, model, &err) != QL_OK) {
        return ql_cli_fail_err(&err);
    }
    ql_checkpoint_get_info(checkpoint, &info);
    rc = args->json ? print_json(checkpoint, &info, args->crc) : print_text(checkpoint, &info, args->crc);
    ql_checkpoint_close(&checkpoint);
    return rc;
}
