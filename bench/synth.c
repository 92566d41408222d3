/* synth: writes a synthetic checkpoint. The writer itself is tests/synth.c, so that tests can use it. */
#include "tests/synth.h"
#include "runtime/base/thread.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char help[] =
    "usage: synth [--shape 27b|9b|4b|micro] [--scheme mixed|fp8-block|fp8-channel|bf16|modelopt] [--sparse] [--seed "
    "S]\n"
    "             [--layers N] [--hidden N] [--intermediate N] [--vocab N] [--heads N] [--kv-heads N] [--key-heads N]\n"
    "             [--value-heads N] [--ctx N] [--mtp 0|1] [--prefix TEXT] [--shard-bytes N] [--threads N] DIR\n"
    "Writes a checkpoint with random weights into DIR, or with --sparse its headers alone over sparse files.\n";

typedef struct number_option {
    const char *name;
    int64_t min, max;
    size_t offset; /* in ql_config; SIZE_MAX: handled by name */
} number_option;

static const number_option numbers[] = {
    {"--layers", 1, QL_MAX_LAYERS, SIZE_MAX},
    {"--seed", 0, INT64_MAX, SIZE_MAX},
    {"--shard-bytes", 1, INT64_MAX, SIZE_MAX},
    {"--threads", 1, 64, SIZE_MAX},
    {"--hidden", 16, 1 << 20, offsetof(ql_config, hidden)},
    {"--intermediate", 16, 1 << 20, offsetof(ql_config, intermediate)},
    {"--vocab", 8, 1 << 24, offsetof(ql_config, vocab)},
    {"--heads", 1, 4096, offsetof(ql_config, n_head)},
    {"--kv-heads", 1, 4096, offsetof(ql_config, n_kv_head)},
    {"--key-heads", 1, 4096, offsetof(ql_config, n_key_head)},
    {"--value-heads", 1, 4096, offsetof(ql_config, n_value_head)},
    {"--ctx", 1, 1 << 30, offsetof(ql_config, max_ctx)},
    {"--mtp", 0, 1, offsetof(ql_config, n_mtp_layer)},
};

/* Prints why and gives the exit code of a usage error. */
static int usage(const char *what, const char *value) {
    fprintf(stderr, "synth: %s%s%s\n%s", what, value ? " " : "", value ? value : "", help);
    return 2;
}

static bool set_number(ql_synth *o, const number_option *n, int64_t v) {
    if (v < n->min || v > n->max) {
        return false;
    }
    if (n->offset != SIZE_MAX) {
        *(int32_t *)((char *)&o->config + n->offset) = (int32_t)v;
    } else if (strcmp(n->name, "--layers") == 0) {
        ql_synth_set_layers(&o->config, (int32_t)v);
    } else if (strcmp(n->name, "--seed") == 0) {
        o->seed = (uint64_t)v;
    } else if (strcmp(n->name, "--threads") == 0) {
        o->threads = (int32_t)v;
    } else {
        o->shard_bytes = (uint64_t)v;
    }
    return true;
}

/* One option with its value. Returns 0, or the exit code. */
static int set_option(ql_synth *o, const char *name, const char *value) {
    if (strcmp(name, "--shape") == 0) {
        return ql_synth_shape(&o->config, value) ? 0 : usage("unknown shape", value);
    }
    if (strcmp(name, "--scheme") == 0) {
        o->scheme = ql_synth_scheme_of(value);
        return o->scheme != QL_SYNTH_SCHEMES ? 0 : usage("unknown scheme", value);
    }
    if (strcmp(name, "--prefix") == 0) {
        o->prefix = value;
        return 0;
    }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (strcmp(name, numbers[i].name) == 0) {
            char *end;
            errno = 0;
            const int64_t v = strtoll(value, &end, 10);
            return errno == 0 && end != value && *end == 0 && set_number(o, &numbers[i], v) ? 0 : usage(name, value);
        }
    }
    return usage("unknown option", name);
}

int main(int argc, char **argv) {
    ql_synth o = {.scheme = QL_SYNTH_MIXED, .prefix = "model.language_model.", .seed = 1};
    ql_synth_shape(&o.config, "27b");
    const char *dir = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(help, stdout);
            return 0;
        }
        if (strcmp(argv[i], "--sparse") == 0) {
            o.sparse = true;
        } else if (argv[i][0] == '-') {
            if (i + 1 == argc) {
                return usage(argv[i], "needs a value");
            }
            const int rc = set_option(&o, argv[i], argv[i + 1]);
            if (rc) {
                return rc;
            }
            i++;
        } else if (dir) {
            return usage("a second directory", argv[i]);
        } else {
            dir = argv[i];
        }
    }
    if (!dir) {
        return usage("no directory is named", NULL);
    }
    if (mkdir(dir, 0777) != 0 && errno != EEXIST) {
        fprintf(stderr, "synth: cannot make %s: %s\n", dir, strerror(errno));
        return 3;
    }
    ql_error err = {0};
    uint64_t bytes = 0;
    const int64_t t0 = ql_now_ns();
    if (ql_synth_write(&o, dir, &bytes, &err) != QL_OK) {
        fprintf(stderr, "synth: %s\n", err.text);
        return 3;
    }
    const double s = ql_seconds_since(t0);
    fprintf(stderr, "synth: %llu bytes%s in %.2f s (%.2f GB/s)\n", (unsigned long long)bytes,
            o.sparse ? ", sparse" : "", s, (double)bytes / s * 1e-9);
    return 0;
}
