/* Messages, files, standard output and the progress bar. */
#include "runtime/cli/cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Whole line in one write, so that lines of several threads do not mix. */
static void print_line(const char *text) {
    char line[1200];
    int n = snprintf(line, sizeof line, "qlane: %s\n", text);
    if (n >= (int)sizeof line) {
        n = (int)sizeof line - 1;
        line[n - 1] = '\n';
    }
    fwrite(line, 1, (size_t)n, stderr);
}

void ql_cli_say(const char *fmt, ...) {
    char text[1100];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    print_line(text);
}

int ql_cli_fail(int code, const char *fmt, ...) {
    char text[1100];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    print_line(text);
    return code;
}

int ql_cli_fail_err(const ql_error *err) {
    print_line(err->text[0] ? err->text : ql_status_text(err->status));
    switch (err->status) {
    case QL_ERR_USAGE: return QL_EXIT_USAGE;
    case QL_ERR_MODEL: return QL_EXIT_MODEL;
    case QL_ERR_DEVICE:
    case QL_ERR_STATE: return QL_EXIT_DEVICE;
    case QL_ERR_MEMORY: return QL_EXIT_MEMORY;
    case QL_OK:
    case QL_ERR_INTERNAL: break;
    }
    return QL_EXIT_FAILED;
}

void ql_cli_log(void *user, ql_log_level level, const char *line) {
    const ql_cli_logger *logger = user;
    bool show = level == QL_LOG_WARN || (level == QL_LOG_INFO && logger->info) ||
                (level == QL_LOG_ERROR && __atomic_load_n(&logger->closing, __ATOMIC_RELAXED));
    if (show) {
        print_line(line);
    }
}

static bool is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

int ql_cli_model(const ql_cli_args *args, char *path, size_t cap) {
    if (args->model) {
        if (!args->model[0] || strlen(args->model) >= cap) {
            return ql_cli_fail(QL_EXIT_USAGE, "-m wants a directory or a Hub id of 1 to %zu bytes", cap - 1);
        }
        memcpy(path, args->model, strlen(args->model) + 1);
        return 0;
    }
    static const char installed[] = QL_PREFIX "/share/qlane/models/tiny";
    static const char *const beside[] = {"../models/tiny", "../share/qlane/models/tiny"};
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    for (int i = 0; slash && i < 2; i++) {
        int len = snprintf(path, cap, "%.*s/%s", (int)(slash - exe), exe, beside[i]);
        if (len > 0 && (size_t)len < cap && is_dir(path)) {
            return 0;
        }
    }
    if (sizeof installed <= cap && is_dir(installed)) {
        memcpy(path, installed, sizeof installed);
        return 0;
    }
    return ql_cli_fail(QL_EXIT_MODEL, "no -m, and the bundled model is neither in %s nor %s beside %s, nor in %s",
                       beside[0], beside[1], slash ? exe : "the executable", installed);
}

int ql_cli_read(const char *path, char **data, size_t *bytes) {
    bool std = strcmp(path, "-") == 0;
    const char *what = std ? "standard input" : path;
    FILE *f = std ? stdin : fopen(path, "rb");
    size_t len = 0, cap = 1 << 16;
    int rc = 0;
    if (!f) {
        return ql_cli_fail(QL_EXIT_MODEL, "cannot open %s: %s", what, strerror(errno));
    }
    char *buf = malloc(cap);
    while (true) {
        if (!buf) {
            rc = ql_cli_fail(QL_EXIT_MEMORY, "out of memory reading %s", what);
            break;
        }
        if (len + 1 == cap) {
            cap *= 2;
            char *grown = realloc(buf, cap);
            if (!grown) {
                rc = ql_cli_fail(QL_EXIT_MEMORY, "out of memory reading %s after %zu bytes", what, len);
                break;
            }
            buf = grown;
        }
        size_t n = fread(buf + len, 1, cap - 1 - len, f);
        len += n;
        if (n == 0) {
            if (ferror(f)) {
                rc = ql_cli_fail(QL_EXIT_MODEL, "cannot read %s: %s", what, strerror(errno));
            }
            break;
        }
    }
    if (!std) {
        fclose(f);
    }
    if (rc || !buf) {
        free(buf);
        return rc;
    }
    buf[len] = 0;
    *data = buf;
    *bytes = len;
    return 0;
}

int ql_cli_input(const ql_cli_args *args, char **data, size_t *bytes) {
    if (!args->prompt) {
        return ql_cli_read(args->file ? args->file : "-", data, bytes);
    }
    *data = strdup(args->prompt);
    *bytes = strlen(args->prompt);
    return *data ? 0 : ql_cli_fail(QL_EXIT_MEMORY, "out of memory for the text");
}

int ql_cli_folder(const char *option, const char *dir) {
    struct stat st;
    if (!dir[0] || strlen(dir) >= QL_CLI_FOLDER_BYTES) {
        return ql_cli_fail(QL_EXIT_USAGE, "%s wants the path of a folder", option);
    }
    if (mkdir(dir, 0777) != 0 && errno != EEXIST) {
        return ql_cli_fail(QL_EXIT_MODEL, "cannot make %s: %s", dir, strerror(errno));
    }
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode)) {
        return ql_cli_fail(QL_EXIT_USAGE, "%s %s: not a folder", option, dir);
    }
    return 0;
}

int ql_cli_flush(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) {
        return QL_EXIT_OK;
    }
    if (errno == EPIPE) {
        return QL_EXIT_OK;
    }
    return ql_cli_fail(QL_EXIT_FAILED, "cannot write to standard output: %s", strerror(errno));
}

int ql_cli_print_json(json_t *object) {
    if (!object) {
        return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for the JSON output");
    }
    errno = 0;
    json_dumpf(object, stdout, JSON_REAL_PRECISION(9));
    fputc('\n', stdout);
    json_decref(object);
    return ql_cli_flush();
}

char *ql_cli_commas(uint64_t n, char *out) {
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n), at = 0;
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0) {
            out[at++] = ',';
        }
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

char *ql_cli_bytes(uint64_t n, char *out) {
    static const char *const unit[] = {"B", "kB", "MB", "GB", "TB"};
    double v = (double)n;
    int i = 0;
    while (v >= 999.5 && i < 4) {
        v /= 1000;
        i++;
    }
    snprintf(out, 32, i == 0 || v >= 99.95 ? "%.0f %s" : v >= 9.995 ? "%.1f %s" : "%.2f %s", v, unit[i]);
    return out;
}

double ql_cli_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void ql_cli_bar_init(ql_cli_bar *bar) {
    *bar = (ql_cli_bar){.on = isatty(STDERR_FILENO) == 1, .start_s = ql_cli_now()};
}

void ql_cli_bar_progress(void *user, uint64_t done_bytes, uint64_t total_bytes) {
    enum { WIDTH = 30 };
    ql_cli_bar *bar = user;
    double now = ql_cli_now();
    if (!bar->on || total_bytes == 0 || (now - bar->last_s < 0.1 && done_bytes < total_bytes)) {
        return;
    }
    bar->last_s = now;
    bar->drawn = true;
    double part = (double)done_bytes / (double)total_bytes, seconds = now - bar->start_s;
    int full = (int)(part * WIDTH);
    char cells[WIDTH + 1], done[32], total[32], rate[32];
    for (int i = 0; i < WIDTH; i++) {
        cells[i] = i < full ? '#' : '.';
    }
    cells[WIDTH] = 0;
    fprintf(stderr, "\rloading [%s] %3d%%  %s of %s  %s/s\033[K", cells, (int)(100 * part),
            ql_cli_bytes(done_bytes, done), ql_cli_bytes(total_bytes, total),
            ql_cli_bytes(seconds > 0 ? (uint64_t)((double)done_bytes / seconds) : 0, rate));
    fflush(stderr);
}

void ql_cli_bar_clear(ql_cli_bar *bar) {
    if (bar->drawn) {
        fputs("\r\033[K", stderr);
        bar->drawn = false;
    }
}

bool ql_cli_is_terminal(void) { return isatty(STDOUT_FILENO) == 1; }
