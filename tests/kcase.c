/* Kernel cases on a device: declaring, filling, placing between guard bands, running, reading back. What kcheck and
 * kbench share; see kcheck.h.
 */
#include "tests/kcheck.h"

#include <math.h>
#include <string.h>

enum { GUARD = 256, PATTERN = 0x7fedfeed }; /* a NaN as f32, no id as int */

const kc_family *const kc_families[] = {&kc_linear, &kc_embed, &kc_norm, &kc_mlp, &kc_gdn, &kc_attention, &kc_sample};
const int32_t kc_n_family = sizeof kc_families / sizeof *kc_families;

static void *must(void *p) {
    if (!p) {
        fprintf(stderr, "kcheck: out of memory\n");
        exit(2);
    }
    return p;
}

/* ---- lists ------------------------------------------------------------------------------------------------------- */

kc_case *kc_add(kc_list *list, const char *fmt, ...) {
    if (list->n == list->cap) {
        list->cap = list->cap ? 2 * list->cap : 64;
        list->item = must(realloc(list->item, (size_t)list->cap * sizeof *list->item));
    }
    kc_case *c = &list->item[list->n++];
    *c = (kc_case){0};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->name, sizeof c->name, fmt, ap);
    va_end(ap);
    return c;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

uint64_t kc_u64(kc_run *run) { /* SplitMix64 */
    uint64_t z = run->rng += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

float kc_uniform(kc_run *run, float lo, float hi) { return lo + (hi - lo) * ((float)(kc_u64(run) >> 40) * 0x1p-24f); }

float kc_normal(kc_run *run) { /* Box-Muller */
    double u = ((double)(kc_u64(run) >> 11) + 0.5) * 0x1p-53, v = (double)(kc_u64(run) >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

int32_t kc_below(kc_run *run, int32_t n) { return (int32_t)(kc_u64(run) % (uint64_t)n); }

void kc_fill_normal(kc_run *run, float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = scale * kc_normal(run);
    }
}

/* ---- buffers ----------------------------------------------------------------------------------------------------- */

void kc_fail(kc_run *run, const char *fmt, ...) {
    if (!run->failed) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(run->why, sizeof run->why, fmt, ap);
        va_end(ap);
        run->failed = true;
    }
}

size_t kc_bytes(const kc_buf *buf) { return (size_t)buf->n * (buf->type == KC_U8 ? 1 : 4); }

kc_buf *kc_buffer(kc_run *run, const char *name, kc_role role, kc_type type, int64_t n) {
    if (run->n_buf == KC_MAX_BUF) {
        fprintf(stderr, "kcheck: %s has more than %d buffers\n", run->c->name, KC_MAX_BUF);
        exit(2);
    }
    kc_buf *b = &run->buf[run->n_buf++];
    *b = (kc_buf){.name = name, .role = role, .type = type, .n = n};
    b->host = must(calloc(1, kc_bytes(b) + 1));
    b->got = must(calloc(1, kc_bytes(b) + 1));
    return b;
}

double *kc_want(kc_buf *buf) {
    if (!buf->want) {
        buf->want = must(calloc((size_t)buf->n + 1, sizeof(double)));
    }
    return buf->want;
}

double *kc_tol(kc_buf *buf) {
    if (!buf->tol) {
        buf->tol = must(calloc((size_t)buf->n + 1, sizeof(double)));
    }
    return buf->tol;
}

static void pattern(void *out, size_t bytes) {
    uint32_t word = PATTERN;
    for (size_t i = 0; i < bytes; i++) {
        ((unsigned char *)out)[i] = ((unsigned char *)&word)[i % 4];
    }
}

void kc_initial(const kc_buf *buf, void *out) {
    if (buf->role == KC_IN || buf->role == KC_INOUT) {
        memcpy(out, buf->host, kc_bytes(buf));
    } else {
        pattern(out, kc_bytes(buf));
    }
}

static bool ok(kc_run *run, ql_status status) {
    if (status != QL_OK) {
        const ql_error *err = run->dev->err;
        kc_fail(run, "%s: %s", ql_status_text(status), err && err->status ? err->text : "no message");
    }
    return status == QL_OK;
}

/* A device block with room for guards before and after, filled with the pattern. Returns the inner address. */
static void *place(kc_run *run, size_t bytes) {
    void *base = NULL;
    unsigned char *fill = must(malloc(bytes + 2 * GUARD));
    pattern(fill, bytes + 2 * GUARD);
    bool good = ok(run, run->dev->ops->alloc(run->dev, bytes + 2 * GUARD, "a kernel case", &base)) &&
                ok(run, run->dev->ops->h2d(run->dev, base, fill, bytes + 2 * GUARD));
    free(fill);
    return good ? (unsigned char *)base + GUARD : NULL;
}

static void unplace(kc_run *run, void *p) {
    if (p) {
        run->dev->ops->free(run->dev, (unsigned char *)p - GUARD);
    }
}

/* Reads a block back; `out` may be NULL. Fails where a guard byte changed. */
static bool read_back(kc_run *run, const char *name, const void *dev, size_t bytes, void *out) {
    unsigned char *all = must(malloc(bytes + 2 * GUARD));
    bool good = ok(run, run->dev->ops->d2h(run->dev, all, (const unsigned char *)dev - GUARD, bytes + 2 * GUARD)) &&
                ok(run, run->dev->ops->sync(run->dev));
    if (good) {
        unsigned char *want = must(malloc(bytes + 2 * GUARD));
        pattern(want, bytes + 2 * GUARD);
        for (size_t i = 0; i < bytes + 2 * GUARD; i++) {
            i = i == GUARD ? GUARD + bytes : i;
            if (i < bytes + 2 * GUARD && all[i] != want[i]) {
                kc_fail(run, "%s: guard byte %lld was overwritten", name, (long long)i - GUARD);
                good = false;
                break;
            }
        }
        free(want);
        if (out && bytes) {
            memcpy(out, all + GUARD, bytes);
        }
    }
    free(all);
    return good;
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

ql_weight *kc_weight(kc_run *run, const ql_weight_src *src) {
    ql_weight *w = &run->weight[run->n_weight++];
    ok(run, run->dev->ops->weight_load(run->dev, src, w));
    return w;
}

bool kc_put(kc_run *run, kc_buf *buf) {
    return ok(run, run->dev->ops->h2d(run->dev, buf->dev, buf->host, kc_bytes(buf)));
}

bool kc_reset(kc_run *run) {
    for (int32_t i = 0; i < run->n_buf && !run->failed; i++) {
        kc_buf *b = &run->buf[i];
        void *content = must(malloc(kc_bytes(b) + 1));
        kc_initial(b, content);
        ok(run, run->dev->ops->h2d(run->dev, b->dev, content, kc_bytes(b)));
        free(content);
    }
    return !run->failed;
}

/* Scratch starts differently for each call: a result that depends on what is left there changes. */
static bool dirty_scratch(kc_run *run) {
    size_t bytes = run->dev->scratch_bytes;
    unsigned char *fill = must(malloc(bytes + 1));
    memset(fill, run->n_call % 2 ? 0x41 : 0xff, bytes);
    bool good = ok(run, run->dev->ops->h2d(run->dev, run->dev->scratch, fill, bytes));
    free(fill);
    return good;
}

static bool call_rows(kc_run *run, int32_t row0, int32_t n_row) {
    if (run->failed || !dirty_scratch(run)) {
        return false;
    }
    run->n_call++;
    return ok(run, run->family->call(run, row0, n_row)) && ok(run, run->dev->ops->sync(run->dev));
}

bool kc_call(kc_run *run) { return call_rows(run, 0, -1); }

bool kc_fetch(kc_run *run) {
    for (int32_t i = 0; i < run->n_buf && !run->failed; i++) {
        kc_buf *b = &run->buf[i];
        if (read_back(run, b->name, b->dev, kc_bytes(b), b->got) && b->role == KC_IN &&
            memcmp(b->got, b->host, kc_bytes(b)) != 0) {
            kc_fail(run, "%s: an input was overwritten", b->name);
        }
    }
    return !run->failed && read_back(run, "scratch", run->scratch, run->dev->scratch_bytes, NULL);
}

bool kc_once(kc_run *run, int32_t row0, int32_t n_row) {
    return kc_reset(run) && call_rows(run, row0, n_row) && kc_fetch(run);
}

bool kc_begin(kc_run *run, ql_dev *dev, const kc_family *family, const kc_case *c, uint64_t seed) {
    *run = (kc_run){.dev = dev, .family = family, .c = c, .rng = seed};
    for (const char *p = c->name; *p; p++) { /* FNV-1a: every case has numbers of its own */
        run->rng = (run->rng ^ (unsigned char)*p) * 0x100000001b3u;
    }
    dev->scratch_bytes = dev->ops->scratch_bytes(dev, &c->shape);
    run->scratch = place(run, dev->scratch_bytes);
    dev->scratch = run->scratch;
    family->make(run);
    for (int32_t i = 0; i < run->n_buf && !run->failed; i++) {
        run->buf[i].dev = place(run, kc_bytes(&run->buf[i]));
    }
    return !run->failed;
}

void kc_end(kc_run *run) {
    for (int32_t i = 0; i < run->n_buf; i++) {
        kc_buf *b = &run->buf[i];
        unplace(run, b->dev);
        free(b->host);
        free(b->got);
        free(b->want);
        free(b->tol);
    }
    for (int32_t i = 0; i < run->n_weight; i++) {
        run->dev->ops->weight_free(run->dev, &run->weight[i]);
    }
    unplace(run, run->scratch);
    run->dev->scratch = NULL;
    run->dev->scratch_bytes = 0;
    free(run->user);
    *run = (kc_run){0};
}
