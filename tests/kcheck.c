/* kcheck: every kernel case on a device, against the double-precision oracle and against the twin.
 *
 *     kcheck [--device host|cuda] [--variant NAME]... [--seed N] [--long] [--list] [-v] [FILTER]...
 *
 * FILTER is a part of a case name. Each family runs in a child process, so that a crash is one family's failure and names
 * its case. Prints one line a family and one for each failure; exit code 1 when anything failed or nothing ran.
 */
#include "tests/kcheck.h"

#include "runtime/base/num.h"
#if QL_CUDA
#include "kernels/cuda.h"
#endif

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_FILTER = 32, MAX_VARIANT = 4 };

typedef struct options {
    const char *device;
    const char *filter[MAX_FILTER], *variant[MAX_VARIANT];
    int32_t n_filter, n_variant;
    uint64_t seed;
    bool is_long, list, verbose;
} options;

/* Shared with the child. */
typedef struct report {
    char current[160]; /* case and variant that is running */
    int32_t n_case, n_run, n_fail;
    double worst; /* largest part of a tolerance that was used */
    char worst_case[112];
} report;

/* ---- devices ----------------------------------------------------------------------------------------------------- */

/* Variants above the twin that the host may have, in rising order. */
static const char *const host_levels[] = {"avx2", "avx512"};

static bool is_cuda(const options *opt) { return strcmp(opt->device, "cuda") == 0; }

static bool open_device(const options *opt, ql_dev *dev, const char *family, const char *variant, const char *more,
                        ql_error *err) {
    char kernels[64];
    snprintf(kernels, sizeof kernels, "%s=%s%s%s", family, variant, more[0] ? "," : "", more);
    *err = (ql_error){0};
#if QL_CUDA
    if (is_cuda(opt)) {
        return ql_cuda_dev_open(dev, 0, kernels, NULL, err) == QL_OK;
    }
#endif
    (void)opt;
    return ql_host_dev_open(dev, kernels, NULL, err) == QL_OK;
}

/* ---- comparisons ------------------------------------------------------------------------------------------------- */

static bool same_bits(kc_type type, const void *a, const void *b, int64_t i) {
    if (type == KC_U8) {
        return ((const uint8_t *)a)[i] == ((const uint8_t *)b)[i];
    }
    if (type == KC_I32) {
        return ((const int32_t *)a)[i] == ((const int32_t *)b)[i];
    }
    float x = ((const float *)a)[i], y = ((const float *)b)[i];
    return (x != x && y != y) || ql_bits_of_f32(x) == ql_bits_of_f32(y);
}

static void describe(char out[64], kc_type type, const void *p, int64_t i) {
    if (type == KC_F32) {
        float f = ((const float *)p)[i];
        snprintf(out, 64, "%.9g (%08x)", (double)f, ql_bits_of_f32(f));
    } else {
        snprintf(out, 64, "%d", type == KC_I32 ? ((const int32_t *)p)[i] : ((const uint8_t *)p)[i]);
    }
}

/* Elements [begin, end) of a buffer's result against `want`. */
static bool compare_bits(kc_run *run, const kc_buf *b, const void *want, int64_t begin, int64_t end, const char *with) {
    for (int64_t i = begin; i < end; i++) {
        if (!same_bits(b->type, b->got, want, i)) {
            char x[64], y[64];
            describe(x, b->type, b->got, i);
            describe(y, b->type, want, i);
            kc_fail(run, "%s[%lld] is %s, %s has %s", b->name, (long long)i, x, with, y);
            return false;
        }
    }
    return true;
}

static bool is_result(const kc_buf *b) { return b->role == KC_OUT || b->role == KC_INOUT; }

static void compare_oracle(kc_run *run, report *rep) {
    for (int32_t i = 0; i < run->n_buf; i++) {
        const kc_buf *b = &run->buf[i];
        const float *got = b->got;
        for (int64_t j = 0; b->want && j < b->n; j++) {
            double want = b->want[j], tol = b->tol ? b->tol[j] : 0, diff = fabs((double)got[j] - want);
            bool good = want != want ? got[j] != got[j] : (double)got[j] == want || (!isinf(want) && diff <= tol);
            if (!good) {
                kc_fail(run, "%s[%lld] is %.9g, oracle %.9g, off by %.3g of %.3g allowed", b->name, (long long)j,
                        (double)got[j], want, diff, tol);
                return;
            }
            if (tol > 0 && diff / tol > rep->worst) {
                rep->worst = diff / tol;
                snprintf(rep->worst_case, sizeof rep->worst_case, "%s", run->c->name);
            }
        }
    }
}

/* Copies of all results, one block for each buffer. */
static void **save(const kc_run *run) {
    void **copy = calloc(KC_MAX_BUF, sizeof *copy);
    for (int32_t i = 0; i < run->n_buf; i++) {
        copy[i] = malloc(kc_bytes(&run->buf[i]) + 1);
        memcpy(copy[i], run->buf[i].got, kc_bytes(&run->buf[i]));
    }
    return copy;
}

static void drop(void **copy) {
    for (int32_t i = 0; copy && i < KC_MAX_BUF; i++) {
        free(copy[i]);
    }
    free(copy);
}

static bool compare_all(kc_run *run, void **want, const char *with) {
    for (int32_t i = 0; i < run->n_buf; i++) {
        const kc_buf *b = &run->buf[i];
        if (is_result(b) && !compare_bits(run, b, want[i], 0, b->n, with)) {
            return false;
        }
    }
    return true;
}

/* One row alone: its bits as in the batch, every other row untouched. */
static bool check_row(kc_run *run, int32_t row, void **full) {
    if (!kc_once(run, row, 1)) {
        return false;
    }
    bool good = true;
    for (int32_t i = 0; i < run->n_buf && good; i++) {
        const kc_buf *b = &run->buf[i];
        if (!is_result(b) || !b->row_len) {
            continue;
        }
        int64_t begin = row * b->row_len, end = begin + b->row_len;
        void *initial = malloc(kc_bytes(b) + 1);
        kc_initial(b, initial);
        good = compare_bits(run, b, full[i], begin, end, "the row in its batch") &&
               compare_bits(run, b, initial, 0, begin, "another row, which is not to be written,") &&
               compare_bits(run, b, initial, end, b->n, "another row, which is not to be written,");
        free(initial);
    }
    return good;
}

/* ---- one case ---------------------------------------------------------------------------------------------------- */

/* Runs a case on an open device. `twin` is NULL on the twin itself, where the oracle is asked, and on the first call
 * *saved becomes its results. */
static bool run_case(const options *opt, report *rep, ql_dev *dev, const kc_family *family, const kc_case *c,
                     void **twin, void ***saved, char why[512]) {
    kc_run run;
    void **full = NULL;
    if (kc_begin(&run, dev, family, c, opt->seed) && kc_once(&run, 0, -1)) {
        full = save(&run);
        if (twin) {
            compare_all(&run, twin, "the twin");
        } else if (family->oracle) {
            family->oracle(&run);
            compare_oracle(&run, rep);
        }
        if (!run.failed && kc_once(&run, 0, -1)) {
            compare_all(&run, full, "the first run");
        }
        bool alone = !(c->by_rows && is_cuda(opt));
        for (int32_t i = 0; i < 4 && i < c->rows && alone && !run.failed; i++) {
            check_row(&run, i == 0 ? 0 : i == 1 ? c->rows - 1 : kc_below(&run, c->rows), full);
        }
        if (!run.failed && !c->must_fail && family->check) {
            family->check(&run);
        }
    }
    bool good = run.failed == c->must_fail;
    snprintf(why, 512, "%s", run.failed ? run.why : "the oracle did not notice the broken input");
    if (saved) {
        *saved = full;
    } else {
        drop(full);
    }
    kc_end(&run);
    return good;
}

static bool wanted(const options *opt, const kc_case *c) {
    if ((c->is_long && !opt->is_long) || (c->cuda_kernels[0] && !is_cuda(opt))) {
        return false;
    }
    bool hit = opt->n_filter == 0;
    for (int32_t i = 0; i < opt->n_filter; i++) {
        hit = hit || strstr(c->name, opt->filter[i]);
    }
    return hit;
}

static bool variant_wanted(const options *opt, const char *name) {
    bool hit = opt->n_variant == 0;
    for (int32_t i = 0; i < opt->n_variant; i++) {
        hit = hit || strcmp(opt->variant[i], name) == 0;
    }
    return hit;
}

static bool run_on(const options *opt, report *rep, const kc_family *family, const kc_case *c, const char *variant,
                   void **twin, void ***saved) {
    ql_dev dev;
    ql_error err;
    char why[512];
    snprintf(rep->current, sizeof rep->current, "%s/%s", c->name, variant);
    if (!open_device(opt, &dev, family->name, variant, c->cuda_kernels, &err)) {
        printf("FAIL %s: %s\n", rep->current, err.text);
        rep->n_fail++;
        return false;
    }
    bool good = run_case(opt, rep, &dev, family, c, twin, saved, why);
    rep->n_run++;
    rep->n_fail += !good;
    if (!good) {
        printf("FAIL %s: %s\n", rep->current, why);
    } else if (opt->verbose) {
        printf("ok   %s%s%s\n", rep->current, c->must_fail ? ": noticed: " : "", c->must_fail ? why : "");
    }
    fflush(stdout);
    dev.ops->close(&dev);
    return good;
}

static void run_family(const options *opt, report *rep, const kc_family *family) {
    kc_list list = {0};
    const char *level[MAX_VARIANT];
    int32_t n_level = 0;
    ql_dev dev;
    ql_error err;
    const char *base = is_cuda(opt) ? "cuda" : "twin";
    for (size_t i = 0; i < sizeof host_levels / sizeof *host_levels && !is_cuda(opt); i++) {
        if (variant_wanted(opt, host_levels[i]) && open_device(opt, &dev, family->name, host_levels[i], "", &err)) {
            level[n_level++] = host_levels[i];
            dev.ops->close(&dev);
        }
    }
    family->list(&list);
    for (int32_t i = 0; i < list.n; i++) {
        const kc_case *c = &list.item[i];
        if (!wanted(opt, c)) {
            continue;
        }
        void **twin = NULL;
        rep->n_case++;
        bool good = run_on(opt, rep, family, c, base, NULL, &twin);
        for (int32_t v = 0; v < n_level && good && !c->must_fail; v++) {
            good = run_on(opt, rep, family, c, level[v], twin, NULL);
        }
        drop(twin);
    }
    printf("%-10s %5d cases, %5d runs (%s", family->name, rep->n_case, rep->n_run, base);
    for (int32_t v = 0; v < n_level; v++) {
        printf(" %s", level[v]);
    }
    printf("), %d failed; most of a tolerance used %.2f%s%s\n", rep->n_fail, rep->worst,
           rep->worst_case[0] ? " by " : "", rep->worst_case);
    fflush(stdout);
    free(list.item);
}

/* ---- program ----------------------------------------------------------------------------------------------------- */

static int usage(void) {
    fprintf(stderr,
            "usage: kcheck [--device host|cuda] [--variant twin|avx2|avx512]... [--seed N] [--long] [--list] [-v] "
            "[FILTER]...\n");
    return 2;
}

static int list_all(const options *opt) {
    for (int32_t f = 0; f < kc_n_family; f++) {
        kc_list list = {0};
        kc_families[f]->list(&list);
        for (int32_t i = 0; i < list.n; i++) {
            if (wanted(opt, &list.item[i])) {
                printf("%s\n", list.item[i].name);
            }
        }
        free(list.item);
    }
    return 0;
}

static bool family_wanted(const options *opt, const kc_family *family) {
    kc_list list = {0};
    bool hit = false;
    family->list(&list);
    for (int32_t i = 0; i < list.n; i++) {
        hit = hit || wanted(opt, &list.item[i]);
    }
    free(list.item);
    return hit;
}

int main(int argc, char **argv) {
    options opt = {.device = "host", .seed = 1};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(arg, "--long") == 0) {
            opt.is_long = true;
        } else if (strcmp(arg, "--list") == 0) {
            opt.list = true;
        } else if (strcmp(arg, "-v") == 0) {
            opt.verbose = true;
        } else if (strcmp(arg, "--device") == 0 && value) {
            opt.device = argv[++i];
        } else if (strcmp(arg, "--seed") == 0 && value) {
            char *end;
            opt.seed = strtoull(argv[++i], &end, 0);
            if (*end || end == value) {
                return usage();
            }
        } else if (strcmp(arg, "--variant") == 0 && value && opt.n_variant < MAX_VARIANT) {
            opt.variant[opt.n_variant++] = argv[++i];
        } else if (arg[0] != '-' && opt.n_filter < MAX_FILTER) {
            opt.filter[opt.n_filter++] = arg;
        } else {
            return usage();
        }
    }
#if QL_CUDA
    static const char has[] = "host and cuda";
    bool known_device = strcmp(opt.device, "host") == 0 || is_cuda(&opt);
#else
    static const char has[] = "host";
    bool known_device = strcmp(opt.device, "host") == 0;
#endif
    if (!known_device) {
        fprintf(stderr, "kcheck: no device '%s'; this build has %s\n", opt.device, has);
        return 2;
    }
    for (int32_t i = 0; i < opt.n_variant; i++) {
        bool known = strcmp(opt.variant[i], "twin") == 0;
        for (size_t j = 0; j < sizeof host_levels / sizeof *host_levels; j++) {
            known = known || strcmp(opt.variant[i], host_levels[j]) == 0;
        }
        if (!known) {
            return usage();
        }
    }
    if (opt.list) {
        return list_all(&opt);
    }
    report *rep = mmap(NULL, sizeof *rep, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (rep == MAP_FAILED) {
        perror("kcheck: mmap");
        return 2;
    }
    printf("kcheck: device %s, seed %llu\n", opt.device, (unsigned long long)opt.seed);
    int32_t n_run = 0, n_fail = 0;
    for (int32_t f = 0; f < kc_n_family; f++) {
        if (!family_wanted(&opt, kc_families[f])) {
            continue;
        }
        *rep = (report){0};
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            run_family(&opt, rep, kc_families[f]);
            exit(0);
        }
        int status = 0;
        if (pid < 0 || waitpid(pid, &status, 0) != pid) {
            perror("kcheck: fork");
            return 2;
        }
        if (status != 0) {
            printf("FAIL %s: the process ended with %s %d\n", rep->current,
                   WIFSIGNALED(status) ? "signal" : "exit code",
                   WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            rep->n_fail++;
        }
        n_run += rep->n_run;
        n_fail += rep->n_fail;
    }
    printf("kcheck: %d passed, %d failed, 0 skipped\n", n_run - n_fail, n_fail);
    return n_fail || !n_run ? 1 : 0;
}
