/* qlane plan: what each lane would hold and which contexts fit, from headers alone. */
#include "runtime/cli/cli.h"

#include <inttypes.h>
#include <stdlib.h>

enum { MAX_CONTEXTS = 32, FIRST_CONTEXT = 4096 };

typedef struct context_row {
    int32_t ctx;
    uint64_t bytes; /* of the fullest lane */
} context_row;

typedef struct plan {
    ql_checkpoint_info info;
    ql_options opt;
    ql_plan of;
    context_row context[MAX_CONTEXTS];
    int32_t n_context;
} plan;

static uint64_t fullest_lane(const ql_plan *p) {
    uint64_t most = 0;
    for (int32_t i = 0; i < p->n_lanes; i++) {
        most = p->lane[i].total_bytes > most ? p->lane[i].total_bytes : most;
    }
    return most;
}

/* Plans doubling contexts up to the model's limit. */
static int plan_contexts(plan *p, const ql_checkpoint *checkpoint) {
    ql_error err = {0};
    ql_plan *at = calloc(1, sizeof *at);
    if (!at) {
        return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for the plan");
    }
    int rc = 0;
    int64_t ctx = p->info.max_ctx < FIRST_CONTEXT ? p->info.max_ctx : FIRST_CONTEXT;
    while (rc == 0 && p->n_context < MAX_CONTEXTS) {
        ql_options opt = p->opt;
        opt.ctx = (int32_t)ctx;
        at->size = sizeof *at;
        if (ql_checkpoint_plan(checkpoint, &opt, at, &err) != QL_OK) {
            rc = ql_cli_fail_err(&err);
        } else {
            p->context[p->n_context++] = (context_row){.ctx = (int32_t)ctx, .bytes = fullest_lane(at)};
        }
        if (ctx == p->info.max_ctx) {
            break;
        }
        ctx = 2 * ctx < p->info.max_ctx ? 2 * ctx : p->info.max_ctx;
    }
    free(at);
    return rc;
}

static bool fits(const plan *p, uint64_t bytes) { return p->opt.mem_bytes == 0 || bytes <= p->opt.mem_bytes; }

/* ---- text ------------------------------------------------------------------------------------------------------------ */

/* One quantity over all lanes; fields are found by their offset in ql_lane_plan. */
static void print_bytes_row(const ql_plan *p, const char *name, size_t field) {
    char text[32];
    printf("%-22s", name);
    for (int32_t i = 0; i < p->n_lanes; i++) {
        printf(" %16s", ql_cli_commas(*(const uint64_t *)((const char *)&p->lane[i] + field), text));
    }
    putchar('\n');
}

static void print_range_row(const ql_plan *p, const char *name, size_t first) {
    char text[32];
    printf("%-22s", name);
    for (int32_t i = 0; i < p->n_lanes; i++) {
        const int32_t *range = (const int32_t *)((const char *)&p->lane[i] + first);
        snprintf(text, sizeof text, "%d-%d", range[0], range[1] - 1);
        printf(" %16s", text);
    }
    putchar('\n');
}

static void print_lane_counts(int32_t slices) {
    for (int32_t n = 1; n <= slices; n++) {
        if (slices % n == 0) {
            printf("%s%d", n == 1 ? "" : ", ", n);
        }
    }
}

#define FIELD(name) offsetof(ql_lane_plan, name)

static bool stored_differs(const ql_plan *p) {
    for (int32_t i = 0; i < p->n_lanes; i++) {
        const ql_lane_plan *l = &p->lane[i];
        if (l->weight_bytes != l->stored_weight_bytes || l->scale_bytes != l->stored_scale_bytes) {
            return true;
        }
    }
    return false;
}

static void print_text(const plan *p) {
    const ql_checkpoint_info *info = &p->info;
    const ql_plan *of = &p->of;
    char a[32], b[32];
    printf("model        %s\n", info->dir);
    printf("             %s, %d layers, hidden %d, vocabulary %d\n", info->architecture, info->n_layers, info->hidden,
           info->vocab);
    printf("projections  %d NVFP4, %d FP8, %d plain; scheme %s\n", info->n_nvfp4, info->n_fp8, info->n_plain,
           info->scheme);
    printf("slices       %d: lane counts ", info->slices);
    print_lane_counts(info->slices);
    printf("\nplanned      %d lane%s, %d sequence%s of %d tokens, chunk %d, %s KV, %s MTP\n", of->n_lanes,
           of->n_lanes == 1 ? "" : "s", of->max_seqs, of->max_seqs == 1 ? "" : "s", of->ctx, of->chunk,
           ql_cli_kv_name(of->kv), p->opt.mtp ? "with" : "without");
    printf("\n%-22s", "bytes");
    for (int32_t i = 0; i < of->n_lanes; i++) {
        printf("%*s%2d", 15, "lane", i);
    }
    putchar('\n');
    print_bytes_row(of, "weights", FIELD(weight_bytes));
    print_bytes_row(of, "scales", FIELD(scale_bytes));
    if (stored_differs(of)) {
        print_bytes_row(of, "  weights as stored", FIELD(stored_weight_bytes));
        print_bytes_row(of, "  scales as stored", FIELD(stored_scale_bytes));
    }
    print_bytes_row(of, "KV cache", FIELD(kv_bytes));
    print_bytes_row(of, "recurrent state", FIELD(state_bytes));
    print_bytes_row(of, "workspace", FIELD(workspace_bytes));
    print_bytes_row(of, "context (estimated)", FIELD(context_bytes));
    if (of->lane[0].nccl_bytes) {
        print_bytes_row(of, "  of it NCCL", FIELD(nccl_bytes));
    }
    print_bytes_row(of, "total", FIELD(total_bytes));
    putchar('\n');
    print_range_row(of, "query heads", FIELD(q_head0));
    print_range_row(of, "KV heads", FIELD(kv_head0));
    print_range_row(of, "GDN key heads", FIELD(key_head0));
    print_range_row(of, "GDN value heads", FIELD(value_head0));
    print_range_row(of, "MLP channels", FIELD(mlp0));
    print_range_row(of, "vocabulary rows", FIELD(vocab0));
    printf("\nKV           %s bytes per token, state %s bytes per sequence, on each lane\n",
           ql_cli_commas(of->kv_bytes_per_token, a), ql_cli_commas(of->state_bytes_per_seq, b));
    printf("\n%-12s %20s\n", "context", "bytes of a lane");
    for (int32_t i = 0; i < p->n_context; i++) {
        const context_row *row = &p->context[i];
        printf("%-12d %20s%s\n", row->ctx, ql_cli_commas(row->bytes, a),
               p->opt.mem_bytes == 0 ? ""
               : fits(p, row->bytes) ? "  fits"
                                     : "  does not fit");
    }
    if (p->opt.mem_bytes) {
        printf("largest context within %s bytes: %d tokens\n", ql_cli_commas(p->opt.mem_bytes, a),
               of->max_ctx_that_fits);
    }
}

/* ---- JSON ------------------------------------------------------------------------------------------------------------ */

static json_t *json_range(int32_t first, int32_t end) { return json_pack("[i, i]", first, end); }

static json_t *json_lane(const ql_lane_plan *l) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "weight_bytes",
                     (json_int_t)l->weight_bytes, "scale_bytes", (json_int_t)l->scale_bytes, "stored_weight_bytes",
                     (json_int_t)l->stored_weight_bytes, "stored_scale_bytes", (json_int_t)l->stored_scale_bytes,
                     "kv_bytes", (json_int_t)l->kv_bytes, "state_bytes", (json_int_t)l->state_bytes, "workspace_bytes",
                     (json_int_t)l->workspace_bytes, "context_bytes", (json_int_t)l->context_bytes, "nccl_bytes",
                     (json_int_t)l->nccl_bytes, "total_bytes", (json_int_t)l->total_bytes, "q_heads",
                     json_range(l->q_head0, l->q_head1), "kv_heads", json_range(l->kv_head0, l->kv_head1), "key_heads",
                     json_range(l->key_head0, l->key_head1), "value_heads", json_range(l->value_head0, l->value_head1),
                     "mlp", json_range(l->mlp0, l->mlp1), "vocab", json_range(l->vocab0, l->vocab1));
}

static int print_json(const plan *p) {
    const ql_checkpoint_info *info = &p->info;
    const ql_plan *of = &p->of;
    json_t *counts = json_array(), *lanes = json_array(), *contexts = json_array();
    for (int32_t n = 1; n <= info->slices; n++) {
        if (info->slices % n == 0) {
            json_array_append_new(counts, json_integer(n));
        }
    }
    for (int32_t i = 0; i < of->n_lanes; i++) {
        json_array_append_new(lanes, json_lane(&of->lane[i]));
    }
    for (int32_t i = 0; i < p->n_context; i++) {
        const context_row *row = &p->context[i];
        json_array_append_new(contexts, json_pack("{s:i, s:I, s:b}", "ctx", row->ctx, "lane_bytes",
                                                  (json_int_t)row->bytes, "fits", fits(p, row->bytes)));
    }
    return ql_cli_print_json(json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:s, s:i, s:o, s:i, s:i, s:i, s:i, s:s, s:b, s:I, s:I, s:I, s:i, s:o, s:o}", "model",
        info->dir, "architecture", info->architecture, "n_nvfp4", info->n_nvfp4, "n_fp8", info->n_fp8, "n_plain",
        info->n_plain, "scheme", info->scheme, "slices", of->slices, "lane_counts", counts, "n_lanes", of->n_lanes,
        "ctx", of->ctx, "max_seqs", of->max_seqs, "chunk", of->chunk, "kv", ql_cli_kv_name(of->kv), "mtp", p->opt.mtp,
        "kv_bytes_per_token", (json_int_t)of->kv_bytes_per_token, "state_bytes_per_seq",
        (json_int_t)of->state_bytes_per_seq, "mem_bytes", (json_int_t)of->mem_bytes, "max_ctx_that_fits",
        of->max_ctx_that_fits, "contexts", contexts, "lanes", lanes));
}

int ql_cli_plan(const ql_cli_args *args) {
    char model[4096], *kernels = NULL;
    ql_error err = {0};
    ql_checkpoint *checkpoint = NULL;
    plan *p = calloc(1, sizeof *p);
    if (!p) {
        return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for the plan");
    }
    p->opt = ql_options_default();
    int rc = ql_cli_fill_options(args, &p->opt, &kernels);
    rc = rc ? rc : ql_cli_model(args, model, sizeof model);
    p->opt.model = model;
    p->opt.mtp = args->mtp > 0;
    p->opt.lanes = p->opt.lanes ? p->opt.lanes : 1;
    p->of.size = sizeof p->of;
    if (rc == 0 && (ql_checkpoint_open(&checkpoint, model, &err) != QL_OK ||
                    ql_checkpoint_plan(checkpoint, &p->opt, &p->of, &err) != QL_OK)) {
        rc = ql_cli_fail_err(&err);
    }
    if (rc == 0) {
        ql_checkpoint_get_info(checkpoint, &p->info);
        rc = plan_contexts(p, checkpoint);
    }
    if (rc == 0) {
        if (args->json) {
            rc = print_json(p);
        } else {
            print_text(p);
            rc = ql_cli_flush();
        }
    }
    ql_checkpoint_close(&checkpoint);
    free(kernels);
    free(p);
    return rc;
}
