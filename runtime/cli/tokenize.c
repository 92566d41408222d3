/* qlane tokenize and qlane detokenize. */
#include "runtime/cli/cli.h"

#include <stdlib.h>

static int open_tokenizer(const ql_cli_args *args, ql_tokenizer **tokenizer) {
    char model[4096];
    ql_error err = {0};
    int rc = ql_cli_model(args, model, sizeof model);
    if (rc) {
        return rc;
    }
    return ql_tokenizer_open(tokenizer, model, &err) == QL_OK ? 0 : ql_cli_fail_err(&err);
}

int ql_cli_tokenize(const ql_cli_args *args) {
    ql_error err = {0};
    ql_tokenizer *tokenizer = NULL;
    char *text = NULL;
    int32_t *ids = NULL, n = 0;
    size_t bytes = 0;
    if (args->prompt && args->file) {
        return ql_cli_fail(QL_EXIT_USAGE, "-p and -f exclude each other");
    }
    int rc = open_tokenizer(args, &tokenizer);
    rc = rc ? rc : ql_cli_input(args, &text, &bytes);
    if (rc == 0 && ql_tokenizer_encode(tokenizer, text, bytes, &ids, &n, &err) != QL_OK) {
        rc = ql_cli_fail_err(&err);
    }
    if (rc == 0) {
        for (int32_t i = 0; i < n; i++) {
            printf("%s%d", i ? "," : "", ids[i]);
        }
        putchar('\n');
        rc = ql_cli_flush();
    }
    free(ids);
    free(text);
    ql_tokenizer_close(&tokenizer);
    return rc;
}

/* The ids of --ids, else of the input. */
static int read_ids(const ql_cli_args *args, ql_cli_ints *ids) {
    char *text = NULL;
    size_t bytes = 0, bad = 0;
    int rc = ql_cli_input(args, &text, &bytes);
    if (rc == 0 && !ql_cli_parse_ints(text, bytes, ids, &bad)) {
        rc = ql_cli_fail(QL_EXIT_USAGE, "token ids are integers such as 1,2,3; found '%.20s' at byte %zu", text + bad,
                         bad);
    }
    free(text);
    return rc;
}

int ql_cli_detokenize(const ql_cli_args *args) {
    ql_error err = {0};
    ql_tokenizer *tokenizer = NULL;
    ql_cli_ints read = {0};
    char *text = NULL;
    size_t bytes = 0;
    if ((args->prompt != NULL) + (args->file != NULL) + args->has_ids > 1) {
        return ql_cli_fail(QL_EXIT_USAGE, "-p, -f and --ids exclude each other");
    }
    int rc = open_tokenizer(args, &tokenizer);
    if (rc == 0 && !args->has_ids) {
        rc = read_ids(args, &read);
    }
    const ql_cli_ints *ids = args->has_ids ? &args->ids : &read;
    if (rc == 0 && ql_tokenizer_decode(tokenizer, ids->v, ids->n, 0, &text, &bytes, &err) != QL_OK) {
        rc = ql_cli_fail_err(&err);
    }
    if (rc == 0) {
        fwrite(text, 1, bytes, stdout);
        rc = ql_cli_flush();
    }
    free(text);
    free(read.v);
    ql_tokenizer_close(&tokenizer);
    return rc;
}
