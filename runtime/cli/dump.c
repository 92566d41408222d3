/* --dump: the rows that the probe hands out, as .npy files (version 1.0, little-endian f32, C order).
 *
 * Rows of a layer come chunk by chunk while the file holds layer after layer, so each block of rows is written at its
 * place; the header, whose layer count is known only at the end, is written last.
 */
#include "runtime/cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_BYTES = 128, N_KIND = 4, PATH_BYTES = 4096 };

typedef struct npy {
    const char *name;
    bool layered;  /* [layers][rows][width], else [rows][width] */
    int32_t n_row; /* rows of a layer */
    int fd;        /* -1: nothing came yet */
    int32_t width, n_layer;
    int64_t n_seen; /* rows written, over all layers */
} npy;

struct ql_cli_dump {
    char dir[QL_CLI_FOLDER_BYTES];
    npy file[N_KIND];             /* by ql_probe_kind */
    char error[PATH_BYTES + 256]; /* the first failure */
};

static bool write_at(int fd, const void *data, size_t bytes, off_t at) {
    const char *p = data;
    while (bytes) {
        ssize_t n = pwrite(fd, p, bytes, at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        p += n;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static void fail(ql_cli_dump *dump, const npy *f) {
    if (!dump->error[0]) {
        snprintf(dump->error, sizeof dump->error, "cannot write %s/%s: %s", dump->dir, f->name,
                 errno ? strerror(errno) : "short write");
    }
}

int ql_cli_dump_open(ql_cli_dump **dump, const char *dir, int32_t n_tok) {
    ql_cli_dump *d = calloc(1, sizeof *d);
    if (!d) {
        return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for --dump");
    }
    memcpy(d->dir, dir, strlen(dir) + 1);
    d->file[QL_PROBE_HIDDEN] = (npy){.name = "hidden.npy", .layered = true, .n_row = n_tok, .fd = -1};
    d->file[QL_PROBE_FINAL_HIDDEN] = (npy){.name = "final_hidden.npy", .n_row = n_tok, .fd = -1};
    d->file[QL_PROBE_LOGITS] = (npy){.name = "logits.npy", .n_row = n_tok, .fd = -1};
    d->file[QL_PROBE_MTP_LOGITS] = (npy){.name = "mtp_logits.npy", .n_row = n_tok - 1, .fd = -1};
    *dump = d;
    return 0;
}

static int open_file(ql_cli_dump *dump, npy *f) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", dump->dir, f->name);
    return open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
}

void ql_cli_dump_probe(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                       const float *values) {
    ql_cli_dump *dump = user;
    if ((unsigned)kind >= N_KIND || dump->error[0]) {
        return;
    }
    npy *f = &dump->file[kind];
    if (n_row > f->n_row - row0) { /* rows after the prompt: logits of generated ids */
        n_row = f->n_row - row0;
    }
    if (n_row <= 0) {
        return;
    }
    if (f->fd < 0) {
        f->fd = open_file(dump, f);
        f->width = width;
        if (f->fd < 0) {
            fail(dump, f);
            return;
        }
    }
    layer = f->layered ? layer : 0;
    f->n_layer = layer + 1 > f->n_layer ? layer + 1 : f->n_layer;
    off_t row = (off_t)layer * f->n_row + row0;
    size_t row_bytes = (size_t)f->width * sizeof *values;
    errno = 0;
    if (!write_at(f->fd, values, (size_t)n_row * row_bytes, HEADER_BYTES + row * (off_t)row_bytes)) {
        fail(dump, f);
    }
    f->n_seen += n_row;
}

/* The header's length is a multiple of 64 bytes, padded with blanks before its newline. */
static bool write_header(const npy *f) {
    char shape[64], text[HEADER_BYTES + 1];
    if (f->layered) {
        snprintf(shape, sizeof shape, "(%d, %d, %d)", f->n_layer, f->n_row, f->width);
    } else {
        snprintf(shape, sizeof shape, "(%d, %d)", f->n_row, f->width);
    }
    unsigned char header[HEADER_BYTES] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, HEADER_BYTES - 10, 0};
    snprintf(text, sizeof text, "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }", shape);
    memset(header + 10, ' ', HEADER_BYTES - 11);
    memcpy(header + 10, text, strlen(text));
    header[HEADER_BYTES - 1] = '\n';
    return write_at(f->fd, header, sizeof header, 0);
}

int ql_cli_dump_close(ql_cli_dump **dump, bool keep) {
    ql_cli_dump *d = *dump;
    int rc = 0;
    if (!d) {
        return 0;
    }
    for (int i = 0; i < N_KIND; i++) {
        npy *f = &d->file[i];
        if (f->fd < 0) {
            continue;
        }
        errno = 0;
        if (keep && !d->error[0]) {
            if (f->n_seen != (int64_t)f->n_layer * f->n_row) {
                snprintf(d->error, sizeof d->error, "%s/%s: %lld rows came, %lld were expected", d->dir, f->name,
                         (long long)f->n_seen, (long long)f->n_layer * f->n_row);
            } else if (!write_header(f)) {
                fail(d, f);
            }
        }
        if (close(f->fd) != 0 && keep) {
            fail(d, f);
        }
    }
    keep = keep && !d->error[0];
    for (int i = 0; i < N_KIND && !keep; i++) {
        if (d->file[i].fd >= 0) {
            char path[PATH_BYTES];
            snprintf(path, sizeof path, "%s/%s", d->dir, d->file[i].name);
            unlink(path);
        }
    }
    if (d->error[0]) {
        rc = ql_cli_fail(QL_EXIT_MODEL, "%s", d->error);
    }
    free(d);
    *dump = NULL;
    return rc;
}
