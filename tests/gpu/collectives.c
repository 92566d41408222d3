/* `qlane check collectives` on GPUs, each group of cases in a process of its own, so that one that hangs or breaks its
 * device fails alone and cannot hide the others; the parent never touches CUDA. What the cases are is in
 * runtime/check/collectives.c.
 *
 *     collectives [FILTER]
 *
 * FILTER is any part of a group's name. Around each group the calling thread's current CUDA device is set to the last
 * one, and has to be that afterwards.
 */
#include "kernels/cuda.h"
#include "runtime/base/thread.h"

#include <cuda_runtime.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_LANES = 8, GROUP_S = 120 };

/* Shared with the children. */
static struct tally {
    int32_t n_gpu, n_pass, n_fail;
    char why[96];
    char last[112]; /* the case that ended last */
} * tally;

static const struct {
    const char *name;
    int32_t least; /* lanes it has cases for */
} groups[] = {
    {"sizes", 1},      {"steps", 1},         {"recorded", 1},        {"guards", 1},     {"sizes_nccl", 2},
    {"steps_nccl", 2}, {"recorded_nccl", 2}, {"proof", 2},           {"proof_nccl", 2}, {"two_groups", 2},
    {"abort", 2},      {"deadline", 2},      {"two_groups_nccl", 2}, {"abort_nccl", 2}, {"deadline_nccl", 2},
};

static void result(bool ok, const char *name, uint64_t compared, const char *note) {
    printf("%s %-48s %12llu elements compared%s%s\n", ok ? "ok  " : "FAIL", name, (unsigned long long)compared,
           *note ? "; " : "", note);
    fflush(stdout);
    snprintf(tally->last, sizeof tally->last, "%s", name);
    *(ok ? &tally->n_pass : &tally->n_fail) += 1;
}

static void on_case(void *user, const ql_check_case *c) {
    (void)user;
    result(c->outcome == QL_CHECK_PASSED, c->name, c->compared, c->note);
}

static void on_log(void *user, ql_log_level level, const char *line) {
    (void)user, (void)level;
    printf("# log: %s\n", line);
}

static void run_group(const char *group, int32_t n) {
    char prefix[64], name[112];
    const char *names[] = {prefix};
    ql_error err = {0};
    ql_options opt = ql_options_default();
    opt.device = QL_DEVICE_CUDA;
    opt.lanes = n;
    opt.log = on_log;
    snprintf(prefix, sizeof prefix, "collectives.%s.", group);
    int device = -1;
    cudaSetDevice(n - 1);
    if (ql_check_run(&opt, names, 1, QL_CHECK_LONG, on_case, NULL, &err) != QL_OK) {
        result(false, prefix, 0, err.text);
    }
    snprintf(name, sizeof name, "%scallers_device.lanes%d", prefix, n);
    result(cudaGetDevice(&device) == cudaSuccess && device == n - 1, name, 1, "");
}

static void count_gpus(const char *group, int32_t n) {
    (void)group, (void)n;
    tally->n_gpu = ql_cuda_count(tally->why);
}

/* Runs in a child; false when it had to be ended or ended by itself. */
static bool in_child(void (*run)(const char *group, int32_t n), const char *group, int32_t n) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        run(group, n);
        fflush(stdout);
        _exit(0); /* not exit: a lane left behind may still be in the driver */
    }
    int status = 0;
    for (int64_t t0 = ql_now_ns(); pid > 0; ql_sleep_ms(5)) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got != 0) {
            return got == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        if (ql_seconds_since(t0) > GROUP_S) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return false;
        }
    }
    return false;
}

int main(int argc, char **argv) {
    const char *filter = argc > 1 ? argv[1] : "";
    int32_t n_skip = 0;
    tally = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED) {
        perror("collectives: mmap");
        return 2;
    }
    if (!in_child(count_gpus, "", 0) || tally->n_gpu == 0) {
        fprintf(stderr, "collectives: no usable GPU%s%s\n", tally->why[0] ? ": " : "", tally->why);
        return 1;
    }
    for (int32_t n = 1; n <= MAX_LANES; n *= 2) {
        for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
            if (n < groups[i].least || !strstr(groups[i].name, filter)) {
                continue;
            }
            if (n > tally->n_gpu) {
                printf("skip %s.lanes%d: this machine has %d GPU%s\n", groups[i].name, n, tally->n_gpu,
                       tally->n_gpu == 1 ? "" : "s");
                n_skip++;
                continue;
            }
            int64_t t0 = ql_now_ns();
            snprintf(tally->last, sizeof tally->last, "its start");
            if (!in_child(run_group, groups[i].name, n)) {
                printf("FAIL %s.lanes%d: the process %s after %s\n", groups[i].name, n,
                       ql_seconds_since(t0) > GROUP_S ? "was ended after its time" : "died", tally->last);
                tally->n_fail++;
            }
            printf("# %s.lanes%d took %.1f s\n", groups[i].name, n, ql_seconds_since(t0));
        }
    }
    printf("collectives: %d passed, %d failed, %d skipped\n", tally->n_pass, tally->n_fail, n_skip);
    return tally->n_fail || !tally->n_pass ? 1 : 0;
}
