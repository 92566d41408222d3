/* First the list of tensors and with it the header, then the bytes from a pool of threads, band by band. A band's bytes
 * depend on its weight alone and have a place of their own in the file, so the order in which threads take them is free. */
#include "tests/requant.h"

#include "runtime/base/num.h"
#include "runtime/base/thread.h"
#include "tests/stfile.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BAND = QL_FP8_BLOCK, COPY_BYTES = 4 << 20, MAX_THREADS = 64 };

static const float e4m3_max = 448;

typedef struct piece {
    const ql_tensor *copied; /* as it is, or NULL: */
    const ql_linear *linear; /* decoded and encoded again as `to` */
    ql_qformat to;
    int32_t entry; /* of the copy or of the codes; the scales are the next one */
    int64_t first_band;
} piece;

typedef struct job {
    const ql_checkpoint *from;
    ql_qformat to;
    ql_stfile file;
    piece *piece;
    int32_t n_piece, cap_piece;
    json_t *plain; /* modules that stay plain or become it */
    /* writing */
    int fd;
    uint64_t data_offset;
    int64_t n_band;
    float e4m3[256], e2m1[16];
    atomic_llong next_band;
    atomic_int failed_errno;
} job;

/* ---- listing ---------------------------------------------------------------------------------------------------------- */

static ql_status add_piece(job *j, piece p, ql_error *err) {
    if (j->n_piece == j->cap_piece) {
        const int32_t cap = j->cap_piece ? 2 * j->cap_piece : 512;
        piece *grown = ql_realloc(NULL, j->piece, (size_t)cap * sizeof *grown);
        if (!grown) {
            return ql_fail(err, QL_ERR_MEMORY, "no host memory for %d tensors", cap);
        }
        j->piece = grown;
        j->cap_piece = cap;
    }
    p.entry = j->file.n;
    j->piece[j->n_piece++] = p;
    return QL_OK;
}

static ql_status add_copy(job *j, const ql_tensor *t, ql_error *err) {
    QL_TRY(add_piece(j, (piece){.copied = t}, err));
    return ql_stfile_add(&j->file, t->name, t->dtype, t->rank, t->shape, err);
}

static bool is_plain(ql_qformat format) { return format < QL_FORMAT_FP8_CHANNEL; }

static int64_t blocks(int64_t n) { return (n + BAND - 1) / BAND; }

static ql_status add_linear(job *j, const ql_linear *l, bool head, ql_error *err) {
    const ql_qformat to = head && j->to == QL_FORMAT_FP8_BLOCK ? QL_FORMAT_BF16 : j->to;
    const int32_t module = (int32_t)(strrchr(l->weight->name, '.') - l->weight->name);
    const int64_t shape[2] = {l->n, l->k};
    char name[352];
    if (is_plain(l->format) || is_plain(to)) {
        json_array_append_new(j->plain, json_stringn(l->weight->name, (size_t)module));
    }
    if (is_plain(l->format) || l->format == to) {
        QL_TRY(add_copy(j, l->weight, err));
        return l->scale ? add_copy(j, l->scale, err) : QL_OK;
    }
    QL_TRY(add_piece(j, (piece){.linear = l, .to = to}, err));
    snprintf(name, sizeof name, "%.*s.weight", module, l->weight->name);
    QL_TRY(ql_stfile_add(&j->file, name, is_plain(to) ? QL_DTYPE_BF16 : QL_DTYPE_F8_E4M3, 2, shape, err));
    if (is_plain(to)) {
        return QL_OK;
    }
    const bool block = to == QL_FORMAT_FP8_BLOCK;
    const int64_t scales[2] = {block ? blocks(l->n) : l->n, block ? blocks(l->k) : 1};
    snprintf(name, sizeof name, "%.*s.%s", module, l->weight->name, block ? "weight_scale_inv" : "weight_scale");
    return ql_stfile_add(&j->file, name, QL_DTYPE_BF16, 2, scales, err);
}

static ql_status list_weight(void *user, const ql_visit *v, ql_error *err) {
    return v->tensor ? add_copy(user, v->tensor, err) : add_linear(user, v->linear, v->role == QL_ROLE_LM_HEAD, err);
}

/* ---- configuration ----------------------------------------------------------------------------------------------------- */

static json_t *scheme_json(const job *j) {
    if (j->to == QL_FORMAT_FP8_BLOCK) {
        return json_pack("{s:s, s:s, s:s, s:[i, i], s:O}", "quant_method", "fp8", "fmt", "e4m3", "activation_scheme",
                         "dynamic", "weight_block_size", BAND, BAND, "modules_to_not_convert", j->plain);
    }
    return json_pack(
        "{s:s, s:s, s:s, s:{s:{s:[s], s:s, s:{s:i, s:s, s:s, s:b, s:b}, s:{s:i, s:s, s:s, s:b, s:b}}}, s:O}",
        "quant_method", "compressed-tensors", "format", "float-quantized", "quantization_status", "compressed",
        "config_groups", "group_0", "targets", "Linear", "format", "float-quantized", "weights", "num_bits", 8, "type",
        "float", "strategy", "channel", "symmetric", 1, "dynamic", 0, "input_activations", "num_bits", 8, "type",
        "float", "strategy", "token", "symmetric", 1, "dynamic", 1, "ignore", j->plain);
}

static ql_status write_config(const job *j, const char *dir, ql_error *err) {
    char path[4096];
    json_t *root = NULL;
    snprintf(path, sizeof path, "%s/config.json", j->from->dir);
    QL_TRY(ql_json_load(path, 64 << 20, &root, err));
    json_object_set_new(root, "quantization_config", scheme_json(j));
    snprintf(path, sizeof path, "%s/config.json", dir);
    const bool ok = json_dump_file(root, path, JSON_INDENT(1)) == 0;
    json_decref(root);
    return ok ? QL_OK : ql_fail(err, QL_ERR_MODEL, "cannot write %s", path);
}

static ql_status copy_small_files(const job *j, const char *dir, ql_error *err) {
    static const char *const names[] = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[4096], *data = NULL;
        size_t len = 0;
        snprintf(path, sizeof path, "%s/%s", j->from->dir, names[i]);
        if (!ql_file_exists(path)) {
            continue;
        }
        QL_TRY(ql_read_file(path, (size_t)1 << 30, &data, &len, err));
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        ql_status status = ql_write_file(path, data, len, err);
        free(data);
        QL_TRY(status);
    }
    return QL_OK;
}

/* ---- weights ------------------------------------------------------------------------------------------------------------ */

static float number_at(const ql_tensor *t, int64_t i) {
    float v;
    ql_dtype_to_f32(t->dtype, t->data + i * (ql_dtype_bits(t->dtype) / 8), 1, &v);
    return v;
}

static void decode_row(const job *j, const ql_linear *l, int64_t r, float *w) {
    const uint8_t *code = l->weight->data + r * ql_qformat_row_bytes(l->format, l->k);
    if (l->format == QL_FORMAT_NVFP4) {
        const float factor = number_at(l->factor, 0);
        const uint8_t *group = l->scale->data + r * (l->k / QL_NVFP4_GROUP);
        for (int32_t c = 0; c < l->k; c += 2) {
            const float s = j->e4m3[group[c / QL_NVFP4_GROUP]];
            const float lo = j->e2m1[code[c / 2] & 15] * s, hi = j->e2m1[code[c / 2] >> 4] * s; /* exact */
            w[c] = l->factor_divides ? lo / factor : lo * factor;
            w[c + 1] = l->factor_divides ? hi / factor : hi * factor;
        }
        return;
    }
    const bool block = l->format == QL_FORMAT_FP8_BLOCK;
    float s = block ? 0 : l->format == QL_FORMAT_FP8_TENSOR ? number_at(l->factor, 0) : number_at(l->scale, r);
    for (int32_t c = 0; c < l->k; c++) {
        if (block && c % BAND == 0) {
            s = number_at(l->scale, r / BAND * blocks(l->k) + c / BAND);
        }
        w[c] = j->e4m3[code[c]] * s;
    }
}

/* The BF16 number at or above largest / 448; 1 where all weights are zero. */
static uint16_t scale_of(float largest) {
    const float s = largest / e4m3_max;
    uint16_t h = ql_bf16_of_f32(s);
    h += ql_f32_of_bf16(h) < s;
    return ql_f32_of_bf16(h) > 0 ? h : ql_bf16_of_f32(1);
}

static float largest_of(const float *w, int64_t n, float largest) {
    for (int64_t i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(w[i]));
    }
    return largest;
}

static void encode(const float *w, int64_t n, uint16_t scale, uint8_t *out) {
    const float s = ql_f32_of_bf16(scale);
    for (int64_t i = 0; i < n; i++) {
        out[i] = ql_e4m3_of_f32(w[i] / s);
    }
}

static void put(job *j, const void *bytes, size_t n, uint64_t at) {
    for (size_t done = 0; done < n;) {
        const ssize_t k = pwrite(j->fd, (const char *)bytes + done, n - done, (off_t)(j->data_offset + at + done));
        if (k < 0 && errno != EINTR) {
            atomic_store(&j->failed_errno, errno);
            return;
        }
        done += k > 0 ? (size_t)k : 0;
    }
}

/* Room of one thread: a band of the widest weight decoded, encoded, and its scales. */
typedef struct room {
    float *w;
    uint8_t *out;
    uint16_t *scale;
} room;

static void convert_band(job *j, const piece *p, int64_t band, const room *m) {
    const ql_linear *l = p->linear;
    const ql_stentry *e = &j->file.entry[p->entry];
    const int64_t r0 = band * BAND, n = l->n - r0 < BAND ? l->n - r0 : BAND, k = l->k;
    for (int64_t r = 0; r < n; r++) {
        decode_row(j, l, r0 + r, m->w + r * k);
    }
    if (p->to == QL_FORMAT_BF16) {
        uint16_t *out = (uint16_t *)m->out;
        for (int64_t i = 0; i < n * k; i++) {
            out[i] = ql_bf16_of_f32(m->w[i]);
        }
        put(j, out, (size_t)(2 * n * k), e->begin + (uint64_t)(2 * r0 * k));
        return;
    }
    if (p->to == QL_FORMAT_FP8_CHANNEL) {
        for (int64_t r = 0; r < n; r++) {
            m->scale[r] = scale_of(largest_of(m->w + r * k, k, 0));
            encode(m->w + r * k, k, m->scale[r], m->out + r * k);
        }
        put(j, m->scale, (size_t)(2 * n), e[1].begin + (uint64_t)(2 * r0));
    } else {
        for (int64_t b = 0; b < blocks(k); b++) {
            const int64_t c = b * BAND, wide = k - c < BAND ? k - c : BAND;
            float largest = 0;
            for (int64_t r = 0; r < n; r++) {
                largest = largest_of(m->w + r * k + c, wide, largest);
            }
            m->scale[b] = scale_of(largest);
            for (int64_t r = 0; r < n; r++) {
                encode(m->w + r * k + c, wide, m->scale[b], m->out + r * k + c);
            }
        }
        put(j, m->scale, (size_t)(2 * blocks(k)), e[1].begin + (uint64_t)(2 * band * blocks(k)));
    }
    put(j, m->out, (size_t)(n * k), e->begin + (uint64_t)(r0 * k));
}

static int64_t bands_of(const piece *p) {
    return p->copied ? (int64_t)((p->copied->bytes + COPY_BYTES - 1) / COPY_BYTES) : blocks(p->linear->n);
}

static void *write_thread(void *arg) {
    job *j = arg;
    int64_t widest = 1;
    for (int32_t i = 0; i < j->n_piece; i++) {
        const ql_linear *l = j->piece[i].linear;
        widest = l && l->k > widest ? l->k : widest;
    }
    room m = {.w = malloc((size_t)(BAND * widest) * sizeof *m.w),
              .out = malloc((size_t)(BAND * widest) * 2),
              .scale = malloc((size_t)(BAND + blocks(widest)) * sizeof *m.scale)};
    if (!m.w || !m.out || !m.scale) {
        atomic_store(&j->failed_errno, ENOMEM);
    }
    const piece *p = j->piece, *last = p + j->n_piece - 1;
    while (atomic_load(&j->failed_errno) == 0) {
        const int64_t band = atomic_fetch_add(&j->next_band, 1);
        if (band >= j->n_band) {
            break;
        }
        while (p < last && p[1].first_band <= band) { /* bands are handed out in order, so this only goes on */
            p++;
        }
        if (p->copied) {
            const uint64_t at = (uint64_t)(band - p->first_band) * COPY_BYTES, left = p->copied->bytes - at;
            put(j, p->copied->data + at, left < COPY_BYTES ? left : COPY_BYTES, j->file.entry[p->entry].begin + at);
        } else {
            convert_band(j, p, band - p->first_band, &m);
        }
    }
    free(m.w);
    free(m.out);
    free(m.scale);
    return NULL;
}

static ql_status write_weights(job *j, const char *path, int32_t threads, ql_error *err) {
    for (int i = 0; i < 256; i++) {
        j->e4m3[i] = ql_f32_of_e4m3((uint8_t)i);
        j->e2m1[i & 15] = ql_f32_of_e2m1((uint8_t)(i & 15));
    }
    for (int32_t i = 0; i < j->n_piece; i++) {
        j->piece[i].first_band = j->n_band;
        j->n_band += bands_of(&j->piece[i]);
    }
    j->fd = open(path, O_WRONLY | O_CLOEXEC);
    if (j->fd < 0) {
        return ql_fail(err, QL_ERR_MODEL, "cannot open %s: %s", path, strerror(errno));
    }
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t n = threads > 0 ? threads : (int32_t)(processors > 0 ? processors : 1), started = 0;
    n = n < MAX_THREADS ? n : MAX_THREADS;
    pthread_t thread[MAX_THREADS];
    while (started < n - 1 && pthread_create(&thread[started], NULL, write_thread, j) == 0) {
        started++;
    }
    write_thread(j); /* this thread works too, so that a refused pthread_create only costs speed */
    for (int32_t i = 0; i < started; i++) {
        pthread_join(thread[i], NULL);
    }
    if (close(j->fd) != 0) {
        atomic_store(&j->failed_errno, errno);
    }
    const int failed = atomic_load(&j->failed_errno);
    return failed ? ql_fail(err, QL_ERR_MODEL, "cannot write %s: %s", path, strerror(failed)) : QL_OK;
}

ql_status ql_requant(const ql_checkpoint *from, ql_qformat to, const char *dir, int32_t threads, uint64_t *bytes,
                     ql_error *err) {
    if (to != QL_FORMAT_FP8_CHANNEL && to != QL_FORMAT_FP8_BLOCK) {
        return ql_fail(err, QL_ERR_USAGE, "weights cannot be written as %s; fp8-channel and fp8-block can",
                       ql_qformat_name(to));
    }
    job *j = NULL;
    char path[4096];
    ql_status status;
    QL_TRY(ql_alloc(NULL, 1, sizeof *j, "the writer", (void **)&j, err));
    j->from = from;
    j->to = to;
    j->plain = json_array();
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    QL_TRY_GOTO(ql_checkpoint_each(from, from->has_mtp, list_weight, j, err), done);
    QL_TRY_GOTO(write_config(j, dir, err), done);
    QL_TRY_GOTO(copy_small_files(j, dir, err), done);
    QL_TRY_GOTO(ql_stfile_create(&j->file, path, &j->data_offset, err), done);
    QL_TRY_GOTO(write_weights(j, path, threads, err), done);
    *bytes = j->data_offset + j->file.data_bytes;
done:
    json_decref(j->plain);
    ql_stfile_deinit(&j->file);
    ql_free(NULL, j->piece);
    ql_free(NULL, j);
    return status;
}
