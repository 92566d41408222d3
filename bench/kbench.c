/* kbench: times kernel cases on a device, with the bytes and operations that the case states.
 *
 *     kbench [--device host|cuda] [--variant NAME] [--ms N] [--short] [--csv] [--cpu] [FILTER]...
 *
 * Takes the cases of kcheck; without --short only those marked long, which are the shapes of real models. Each case is
 * warmed up once and repeated for about N milliseconds (300); the line gives the median, the spread between the tenth and
 * ninetieth percentile, GB/s, GFLOP/s and the part of this machine's ceilings, both measured here: a sum over memory far
 * larger than any cache, and multiplies and adds on registers. One thread, as a lane is.
 */
#include "tests/kcheck.h"

#if QL_CUDA
#include "kernels/cuda.h"
#endif

#include <string.h>
#include <time.h>

enum { MAX_FILTER = 32, MAX_TIMES = 10000 };

typedef struct options {
    const char *filter[MAX_FILTER], *variant;
    int32_t n_filter;
    double ms;
    bool is_short, csv, is_cuda;
} options;

static clockid_t clock_id = CLOCK_MONOTONIC;

static double now(void) {
    struct timespec t;
    clock_gettime(clock_id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- ceilings ---------------------------------------------------------------------------------------------------- */

/* Bytes per second of one thread that adds up a block of memory, four streams at a time. */
static double read_ceiling(void) {
    typedef uint64_t vec __attribute__((vector_size(64)));
    enum { N = 1 << 20 }; /* vectors of each stream */
    vec *p = aligned_alloc(64, 4 * N * sizeof *p), sum[4] = {{0}};
    double best = 0;
    if (!p) {
        return 0;
    }
    memset(p, 1, 4 * N * sizeof *p);
    for (int32_t round = 0; round < 5; round++) {
        double t0 = now();
        for (size_t j = 0; j < N; j++) {
            for (size_t i = 0; i < 4; i++) {
                sum[i] += p[i * N + j];
            }
        }
        double rate = 4.0 * N * sizeof *p / (now() - t0);
        best = rate > best ? rate : best;
    }
    volatile vec keep = sum[0] + sum[1] + sum[2] + sum[3];
    (void)keep;
    free(p);
    return best;
}

/* Operations per second of one thread: sixteen chains of separate multiplies and adds on registers of `bytes` bytes. */
#define CHAINS(name, features, bytes)                                                                                  \
    __attribute__((target(features), noinline)) static double name(void) {                                             \
        typedef float vec __attribute__((vector_size(bytes)));                                                         \
        enum { N = 16, ROUNDS = 10000000 };                                                                            \
        vec x[N];                                                                                                      \
        for (int32_t i = 0; i < N; i++) {                                                                              \
            x[i] = (vec){(float)i};                                                                                    \
        }                                                                                                              \
        double t0 = now();                                                                                             \
        for (int32_t r = 0; r < ROUNDS; r++) {                                                                         \
            _Pragma("GCC unroll 16") for (int32_t i = 0; i < N; i++) { x[i] = x[i] * 0.999f + 0.5f; }                  \
        }                                                                                                              \
        double s = (now() - t0);                                                                                       \
        volatile vec keep = x[0];                                                                                      \
        for (int32_t i = 1; i < N; i++) {                                                                              \
            keep += x[i];                                                                                              \
        }                                                                                                              \
        (void)keep;                                                                                                    \
        return 2.0 * (bytes / 4) * N * ROUNDS / s;                                                                     \
    }

#if defined(__x86_64__)
CHAINS(chains_sse2, "sse2", 16)
CHAINS(chains_avx2, "avx2", 32)
CHAINS(chains_avx512, "avx512f", 64)

static const char *best_level(void) {
    return __builtin_cpu_supports("avx512f") ? "avx512" : __builtin_cpu_supports("avx2") ? "avx2" : "twin";
}

/* Of a host variant that this CPU has; 0 for others. */
static double compute_ceiling(const char *variant) {
    return strcmp(variant, "avx512") == 0 ? chains_avx512()
           : strcmp(variant, "avx2") == 0 ? chains_avx2()
           : strcmp(variant, "twin") == 0 ? chains_sse2()
                                          : 0;
}
#else
static const char *best_level(void) { return "twin"; }

static double compute_ceiling(const char *variant) {
    (void)variant;
    return 0;
}
#endif

/* ---- one case ---------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool open_device(const options *opt, ql_dev *dev, const char *kernels, ql_error *err) {
#if QL_CUDA
    if (opt->is_cuda) {
        return ql_cuda_dev_open(dev, 0, kernels, NULL, err) == QL_OK;
    }
#endif
    (void)opt;
    return ql_host_dev_open(dev, kernels, NULL, err) == QL_OK;
}

static bool bench_case(const options *opt, const kc_family *family, const kc_case *c, double read_rate) {
    char kernels[64];
    ql_error err = {0};
    ql_dev dev;
    kc_run run;
    if (opt->variant) {
        snprintf(kernels, sizeof kernels, "%s=%s", family->name, opt->variant);
    }
    if (!open_device(opt, &dev, opt->variant ? kernels : NULL, &err)) {
        fprintf(stderr, "kbench: %s\n", err.text);
        return false;
    }
    bool good = kc_begin(&run, &dev, family, c, 1) && kc_once(&run, 0, -1);
    static double times[MAX_TIMES];
    /* Calls in a row on a stream: what starting one costs is hidden by the one before. */
    int32_t burst = opt->is_cuda ? 20 : 1;
    int32_t n = 0;
    for (double t0 = now(); good && n < MAX_TIMES && (n < 3 || (now() - t0) * 1e3 < opt->ms); n++) {
        double t = now();
        for (int32_t i = 0; i < burst && good; i++) {
            good = family->call(&run, 0, -1) == QL_OK;
        }
        good = good && dev.ops->sync(&dev) == QL_OK;
        times[n] = (now() - t) / burst;
    }
    if (!good) {
        fprintf(stderr, "kbench: %s: %s\n", c->name, run.failed ? run.why : err.text);
    } else {
        qsort(times, (size_t)n, sizeof *times, by_value);
        double median = times[n / 2], low = times[n / 10], high = times[n - 1 - n / 10];
        const char *variant = "twin";
        for (int32_t p = 0; p < QL_PATH_COUNT; p++) {
            variant = dev.n_path[p] ? dev.ops->variant(&dev, p) : variant;
        }
        double flop_rate = compute_ceiling(variant), gbs = c->bytes / median * 1e-9, gflops = c->flops / median * 1e-9;
        if (opt->csv) {
            printf("%s,%s,%d,%.6g,%.6g,%.6g,%.4g,%.4g,%.4g,%.4g\n", c->name, variant, n, median, low, high, gbs,
                   1e11 * gbs / read_rate, gflops, flop_rate > 0 ? 1e11 * gflops / flop_rate : 0);
        } else {
            printf("%-62s %-7s %10.1f us %3.0f%% %8.2f GB/s %3.0f%% %8.2f GFLOP/s %3.0f%%\n", c->name, variant,
                   median * 1e6, 100 * (high - low) / median, gbs, 1e11 * gbs / read_rate, gflops,
                   flop_rate > 0 ? 1e11 * gflops / flop_rate : 0);
        }
        fflush(stdout);
    }
    kc_end(&run);
    dev.ops->close(&dev);
    return good;
}

/* ---- program ----------------------------------------------------------------------------------------------------- */

static bool wanted(const options *opt, const kc_case *c) {
    if (c->must_fail || c->bytes <= 0 || c->is_long == opt->is_short) {
        return false;
    }
    bool hit = opt->n_filter == 0;
    for (int32_t i = 0; i < opt->n_filter; i++) {
        hit = hit || strstr(c->name, opt->filter[i]);
    }
    return hit;
}

int main(int argc, char **argv) {
    options opt = {.ms = 300};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(arg, "--short") == 0) {
            opt.is_short = true;
        } else if (strcmp(arg, "--csv") == 0) {
            opt.csv = true;
        } else if (strcmp(arg, "--cpu") == 0) {
            clock_id = CLOCK_THREAD_CPUTIME_ID;
        } else if (strcmp(arg, "--device") == 0 && value && strcmp(value, "host") == 0) {
            i++;
#if QL_CUDA
        } else if (strcmp(arg, "--device") == 0 && value && strcmp(value, "cuda") == 0) {
            opt.is_cuda = true;
            i++;
#endif
        } else if (strcmp(arg, "--variant") == 0 && value) {
            opt.variant = argv[++i];
        } else if (strcmp(arg, "--ms") == 0 && value && atof(value) > 0) {
            opt.ms = atof(argv[++i]);
        } else if (arg[0] != '-' && opt.n_filter < MAX_FILTER) {
            opt.filter[opt.n_filter++] = arg;
        } else {
            fprintf(stderr, "usage: kbench [--device host|cuda] [--variant NAME] [--ms N] [--short] [--csv] "
                            "[--cpu] [FILTER]...\n");
            return 2;
        }
    }
    double read_rate = read_ceiling();
    bool good = true;
    if (opt.csv) {
        printf("case,variant,calls,median_s,p10_s,p90_s,gb_s,percent_of_read,gflop_s,percent_of_multiply_add\n");
    } else {
        printf("ceilings of one thread: %.2f GB/s read, %.1f (%s) and %.1f (twin) GFLOP/s multiply and add\n",
               read_rate * 1e-9, compute_ceiling(best_level()) * 1e-9, best_level(), compute_ceiling("twin") * 1e-9);
    }
    for (int32_t f = 0; f < kc_n_family; f++) {
        kc_list list = {0};
        kc_families[f]->list(&list);
        for (int32_t i = 0; i < list.n; i++) {
            good = (!wanted(&opt, &list.item[i]) || bench_case(&opt, kc_families[f], &list.item[i], read_rate)) && good;
        }
        free(list.item);
    }
    return good ? 0 : 1;
}
