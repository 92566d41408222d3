/* requant: writes a checkpoint's FP8 sibling. The writer itself is tests/requant.c, so that tests can use it. */
#include "tests/requant.h"

#include "runtime/base/thread.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char help[] =
    "usage: requant --to fp8-channel|fp8-block [--threads N] CHECKPOINT DIR\n"
    "Writes into DIR the model of CHECKPOINT with each quantized weight decoded and rounded to one FP8 format.\n";

static int usage(const char *what, const char *value) {
    fprintf(stderr, "requant: %s%s%s\n%s", what, value ? " " : "", value ? value : "", help);
    return 2;
}

static int fail(const ql_error *err) {
    fprintf(stderr, "requant: %s\n", err->text);
    return 3;
}

int main(int argc, char **argv) {
    const char *dir[2];
    int n_dir = 0;
    ql_qformat to = QL_FORMAT_COUNT;
    int32_t threads = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--help") == 0) {
            fputs(help, stdout);
            return 0;
        }
        if (strcmp(argv[i], "--to") == 0) {
            to = strcmp(value, "fp8-channel") == 0 ? QL_FORMAT_FP8_CHANNEL
                 : strcmp(value, "fp8-block") == 0 ? QL_FORMAT_FP8_BLOCK
                                                   : QL_FORMAT_COUNT;
            if (to == QL_FORMAT_COUNT) {
                return usage("--to wants fp8-channel or fp8-block, not", value);
            }
            i++;
        } else if (strcmp(argv[i], "--threads") == 0) {
            char *end;
            const long n = strtol(value, &end, 10);
            if (end == value || *end || n < 1 || n > 64) {
                return usage("--threads wants 1 to 64, not", value);
            }
            threads = (int32_t)n;
            i++;
        } else if (argv[i][0] == '-' || n_dir == 2) {
            return usage("unexpected", argv[i]);
        } else {
            dir[n_dir++] = argv[i];
        }
    }
    if (n_dir != 2 || to == QL_FORMAT_COUNT) {
        return usage("wants --to and two directories", NULL);
    }
    ql_error err = {0};
    ql_checkpoint *from = NULL;
    uint64_t bytes = 0;
    const int64_t t0 = ql_now_ns();
    if (ql_checkpoint_open(&from, dir[0], &err) != QL_OK) {
        return fail(&err);
    }
    if (mkdir(dir[1], 0777) != 0) { /* never into a folder that holds something, such as the source */
        fprintf(stderr, "requant: cannot make %s: %s\n", dir[1], strerror(errno));
        ql_checkpoint_close(&from);
        return 3;
    }
    const ql_status status = ql_requant(from, to, dir[1], threads, &bytes, &err);
    ql_checkpoint_close(&from);
    if (status != QL_OK) {
        return fail(&err);
    }
    const double s = ql_seconds_since(t0);
    fprintf(stderr, "requant: %llu bytes in %.2f s (%.2f GB/s)\n", (unsigned long long)bytes, s,
            (double)bytes / s * 1e-9);
    return 0;
}
