/* qlane check: self-checks on the devices of this machine, one line a case. */
#include "runtime/cli/cli.h"

#include <stdlib.h>
#include <string.h>

typedef struct tally {
    int32_t n_passed, n_failed, n_skipped;
} tally;

static void print_case(void *user, const ql_check_case *r) {
    static const char *const word[] = {"ok", "FAIL", "skip"};
    tally *t = user;
    switch (r->outcome) {
    case QL_CHECK_PASSED: t->n_passed++; break;
    case QL_CHECK_FAILED: t->n_failed++; break;
    case QL_CHECK_SKIPPED: t->n_skipped++; break;
    case QL_CHECK_LISTED: puts(r->name); return;
    }
    printf("%-4s %-52s", word[r->outcome], r->name);
    if (r->outcome != QL_CHECK_SKIPPED) {
        printf(" %11llu compared", (unsigned long long)r->compared);
    }
    if (r->limit > 0) {
        printf(", worst %.1e of %.0e, magnitude %.2g", r->worst, r->limit, r->magnitude);
    }
    printf("%s%s\n", r->note[0] ? r->outcome == QL_CHECK_SKIPPED ? " " : "; " : "", r->note);
    fflush(stdout); /* a case may take a while, and a crash must not take the lines before it along */
}

/* Whether a name can mean the one check that opens a model. */
static bool wants_model(const ql_cli_args *args) {
    static const char check[] = "precision";
    for (int32_t i = 0; i < args->names.n; i++) {
        size_t n = strlen(args->names.v[i]);
        if (strncmp(args->names.v[i], check, n < sizeof check - 1 ? n : sizeof check - 1) == 0) {
            return true;
        }
    }
    return args->names.n == 0 && !args->list;
}

int ql_cli_check(const ql_cli_args *args) {
    char model[4096];
    char *kernels = NULL;
    ql_cli_logger logger = {.info = true};
    ql_options opt = ql_options_default();
    ql_error err = {0};
    tally t = {0};
    int rc = ql_cli_fill_options(args, &opt, &kernels);
    if (rc == 0 && wants_model(args)) {
        rc = ql_cli_model(args, model, sizeof model);
        opt.model = model;
    }
    if (rc) {
        free(kernels);
        return rc;
    }
    opt.log = ql_cli_log;
    opt.log_user = &logger;
    int32_t flags = (args->list ? QL_CHECK_LIST : 0) | (args->run_long ? QL_CHECK_LONG : 0);
    ql_status status = ql_check_run(&opt, args->names.v, args->names.n, flags, print_case, &t, &err);
    free(kernels);
    if (status != QL_OK) {
        return ql_cli_fail_err(&err);
    }
    if (!args->list) {
        printf("%d passed, %d failed, %d skipped\n", t.n_passed, t.n_failed, t.n_skipped);
    }
    rc = ql_cli_flush();
    return rc                ? rc
           : t.n_failed      ? QL_EXIT_FAILED
           : args->list      ? QL_EXIT_OK
           : t.n_passed == 0 ? QL_EXIT_DEVICE
                             : QL_EXIT_OK;
}
