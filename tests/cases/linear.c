/* Cases of linear: every format, precision and row count; cuts that begin inside blocks; extreme codes; the 27B's slices.
 *
 * The oracle decodes the file's bytes itself, from the tables of the formats' descriptions, and adds in double.
 */
#include "tests/kcheck.h"

#if QL_CUDA
#include "kernels/cuda.h"
#endif

#include <math.h>
#include <string.h>
#include <zlib.h>

/* ---- parameters -------------------------------------------------------------------------------------------------- */

typedef enum regime {
    NORMAL,  /* codes and x as in a model */
    CODES,   /* every code there is, NaN excepted; NVFP4: every code with every scale */
    SMALL,   /* subnormal and boundary codes and scales */
    OUTLIER, /* one x in each row a million times the others */
    ZERO,    /* x all zero */
    NAN_ROW, /* NaN in row 1 of x, infinity in row 2 */
    N_REGIME
} regime;

typedef enum breakage {
    SOUND,
    NIBBLES,
    FACTOR,
    GROUP_SCALE,
    COLUMN,
    ROW_SCALE,
    BLOCK_ROW,
    ROUNDING,
    N_BREAKAGE
} breakage;

enum {
    P_FORMAT,
    P_PRECISION,
    P_PHASE,
    P_T,
    P_N,
    P_K,
    P_SLICES,
    P_RANGES,
    P_ROW0,
    P_ROW1 = P_ROW0 + 3,
    P_COL0 = P_ROW1 + 3,
    P_FULL_N,
    P_FULL_K,
    P_SCALE_DTYPE,
    P_REGIME,
    P_BREAK,
    P_PAD_X,
    P_PAD_Y
};

/* A cut of a matrix. */
typedef struct shape {
    const char *name;
    int32_t full_n, full_k, slices, col0, k, n_range, row[6];
} shape;

static const char *const precision_name[] = {"auto", "exact", "bf16", "fp8", "q8"};
static const char *const regime_name[N_REGIME] = {"normal", "codes", "small", "outlier", "zero", "nan"};
static const char *const break_name[N_BREAKAGE] = {"",       "nibbles",  "factor",   "groupscale",
                                                   "column", "rowscale", "blockrow", "rounding"};

static bool has_factor(int32_t f) { return f == QL_FORMAT_FP8_TENSOR || f == QL_FORMAT_NVFP4; }
static bool is_fp8(int32_t f) { return f >= QL_FORMAT_FP8_CHANNEL && f <= QL_FORMAT_FP8_BLOCK; }

static kc_case *add_phase(kc_list *l, const shape *s, int32_t format, int32_t precision, int32_t phase, int32_t t,
                          regime reg, breakage broken) {
    int32_t n = 0, col0 = s->col0, k = s->k, full_k = s->full_k;
    for (int32_t i = 0; i < s->n_range; i++) {
        n += s->row[2 * i + 1] - s->row[2 * i];
    }
    if (format == QL_FORMAT_NVFP4) { /* groups of 16 columns */
        col0 = col0 / 16 * 16;
        k = (k + 15) / 16 * 16;
        full_k = (full_k + 15) / 16 * 16 < col0 + k ? col0 + k : (full_k + 15) / 16 * 16;
    }
    static const ql_dtype scale_dtypes[] = {QL_DTYPE_BF16, QL_DTYPE_F32, QL_DTYPE_F16};
    ql_dtype scale_dtype = format == QL_FORMAT_NVFP4 ? QL_DTYPE_F8_E4M3 : scale_dtypes[(t + format + s->slices) % 3];
    kc_case *c = kc_add(l, "linear.%s.%s.%s.t%d.%s.%s%s%s", ql_qformat_name((ql_qformat)format),
                        precision_name[precision], phase == QL_PHASE_GEN ? "gen" : "prompt", t, s->name,
                        regime_name[reg], broken ? ".broken-" : "", break_name[broken]);
    int32_t p[] = {format,       precision,       phase,     t,         n,         k,
                   s->slices,    s->n_range,      s->row[0], s->row[2], s->row[4], s->row[1],
                   s->row[3],    s->row[5],       col0,      s->full_n, full_k,    (int32_t)scale_dtype,
                   (int32_t)reg, (int32_t)broken, 5,         3};
    memcpy(c->p, p, sizeof p);
    c->must_fail = broken != SOUND;
    c->rows = t;
    c->by_rows = precision == QL_PREC_Q8 && format == QL_FORMAT_NVFP4;
    c->shape.mlp = k;
    uint64_t weight_bytes, scale_bytes;
    ql_host_ops()->weight_bytes((ql_qformat)format, n, k, s->row[0] % 128, col0 % 128, &weight_bytes, &scale_bytes);
    c->bytes = (double)weight_bytes + (double)scale_bytes + 4.0 * t * (k + n);
    c->flops = 2.0 * t * n * k;
    return c;
}

/* Few rows are generated ones. */
static kc_case *add(kc_list *l, const shape *s, int32_t format, int32_t precision, int32_t t, regime reg,
                    breakage broken) {
    return add_phase(l, s, format, precision, t > 4 ? QL_PHASE_PROMPT : QL_PHASE_GEN, t, reg, broken);
}

/* The projections of the 27B as one lane of several holds them. */
static const shape model_shapes[] = {
    {"gate.n17408.k5120", 17408, 5120, 1, 0, 5120, 1, {0, 17408}},
    {"down.n5120.k17408.s8", 5120, 17408, 8, 0, 17408, 1, {0, 5120}},
    {"down.n5120.k2176.s1", 5120, 17408, 1, 3 * 2176, 2176, 1, {0, 5120}}, /* 2176 = 17 * 128 */
    {"out.n5120.k3072.s4", 5120, 6144, 4, 3072, 3072, 1, {0, 5120}},
    {"qkv.n5120.k5120", 10240, 5120, 1, 0, 5120, 3, {1024, 2048, 3072, 4096, 7168, 10240}},
};

/* Few rows of the 27B's widest matrices: many rows of x in bearable time. */
static const shape prompt_shapes[] = {
    {"gate.n512.k5120", 17408, 5120, 1, 0, 5120, 1, {512, 1024}},
    {"down.n512.k17408.s8", 5120, 17408, 8, 0, 17408, 1, {512, 1024}},
    {"down.n512.k17408.s1", 5120, 17408, 1, 0, 17408, 1, {512, 1024}},
};

/* As an engine calls it: rows without padding. */
static void add_long(kc_list *l, const shape *s, int32_t format, int32_t precision, int32_t t) {
    kc_case *c = add(l, s, format, precision, t, NORMAL, SOUND);
    c->is_long = true;
    c->p[P_PAD_X] = c->p[P_PAD_Y] = 0;
}

/* A CUDA kernel of precision Q8, by name: whatever the number of rows. */
static kc_case *add_q8(kc_list *l, const shape *s, const char *kernel, int32_t t, regime reg) {
    kc_case *c = add(l, s, QL_FORMAT_NVFP4, QL_PREC_Q8, t, reg, SOUND);
    size_t len = strlen(c->name);
    snprintf(c->name + len, sizeof c->name - len, ".%s", kernel);
    snprintf(c->cuda_kernels, sizeof c->cuda_kernels, "nvfp4=%s", kernel);
    c->by_rows = false;
    return c;
}

static void list(kc_list *l) {
    static const int32_t rows[] = {1, 2, 3, 16, 65};
    static const shape shapes[] = {
        {"n1.k1", 1, 1, 1, 0, 1, 1, {0, 1}},
        {"n7.k37", 7, 37, 1, 0, 37, 1, {0, 7}},
        {"n33.k256.s4", 33, 256, 4, 0, 256, 1, {0, 33}},
        {"n10.k640.s8", 10, 640, 8, 0, 640, 1, {0, 10}},          /* slices of 80: inside blocks */
        {"n64.k400.s2.cut", 300, 700, 2, 80, 400, 1, {100, 164}}, /* slices of 200: no whole vectors */
        {"n64.k480.s2.cut", 300, 704, 2, 80, 480, 1, {100, 164}}, /* blocks ragged on all four sides */
        {"n344.k272.s1.ranges", 600, 272, 1, 0, 272, 3, {0, 128, 256, 384, 512, 600}},
        {"n9.k203.cut", 20, 211, 1, 3, 203, 1, {7, 16}},
    };
    for (int32_t f = 0; f < QL_FORMAT_COUNT; f++) {
        for (int32_t p = QL_PREC_EXACT; p <= QL_PREC_Q8; p++) {
            for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
                for (size_t t = 0; t < sizeof rows / sizeof *rows; t++) {
                    add(l, &shapes[s], f, p, rows[t], NORMAL, SOUND);
                }
            }
            for (int32_t r = CODES; r < N_REGIME; r++) {
                add(l, &shapes[3], f, p, 3, (regime)r, SOUND);
                add(l, &shapes[5], f, p, 16, (regime)r, SOUND);
            }
        }
        add(l, &shapes[2], f, QL_PREC_EXACT, 0, NORMAL, SOUND);
        add(l, &shapes[5], f, QL_PREC_EXACT, 3, NORMAL, COLUMN);
        add(l, &shapes[5], f, QL_PREC_BF16, 3, NORMAL, ROUNDING);
    }
    /* Several tiles of a tensor-core kernel in each direction, ragged; slices of whole 128-blocks. */
    static const shape tiles = {"n300.k1024.s8", 300, 1024, 8, 0, 1024, 1, {0, 300}};
    for (int32_t f = QL_FORMAT_F16; f < QL_FORMAT_COUNT; f++) {
        add(l, &tiles, f, QL_PREC_BF16, 270, NORMAL, SOUND);
        add(l, &tiles, f, QL_PREC_BF16, 65, OUTLIER, SOUND);
        add(l, &tiles, f, QL_PREC_FP8, 65, NORMAL, SOUND);
        add(l, &tiles, f, QL_PREC_EXACT, 65, NORMAL, SOUND);
    }
    /* A slice longer than what activations keep in registers while their largest is looked for, which is also many steps of every
     * kernel's pipeline. */
    static const shape long_slice = {"n20.k5632", 20, 5632, 1, 0, 5632, 1, {0, 20}};
    for (int32_t f = QL_FORMAT_F16; f < QL_FORMAT_COUNT; f++) {
        add(l, &long_slice, f, QL_PREC_EXACT, 2, NORMAL, SOUND);
        add(l, &long_slice, f, QL_PREC_BF16, 16, NORMAL, SOUND);
        add(l, &long_slice, f, QL_PREC_FP8, 16, NORMAL, SOUND);
    }
    /* FP8 matrix instructions, which want slices of 128, in few enough steps that no stage of their ring is used twice. */
    static const shape few_steps = {"n33.k512.s4", 33, 512, 4, 0, 512, 1, {0, 33}};
    for (int32_t f = QL_FORMAT_FP8_CHANNEL; f <= QL_FORMAT_FP8_BLOCK; f++) {
        add(l, &few_steps, f, QL_PREC_FP8, 16, NORMAL, SOUND);
    }
    /* Many generated rows: more columns of x than one matrix instruction takes, and more rows than one launch does; odd numbers
     * of row tiles, weights cut into units of several lengths. */
    static const shape many_rows[] = {
        {"n33.k512.s4", 33, 512, 4, 0, 512, 1, {0, 33}},
        {"n52.k2176", 52, 2176, 1, 0, 2176, 1, {0, 52}},
        {"n21.k1280", 21, 1280, 1, 0, 1280, 1, {0, 21}},
    };
    for (int32_t f = QL_FORMAT_FP8_CHANNEL; f < QL_FORMAT_COUNT; f++) {
        for (size_t s = 0; s < sizeof many_rows / sizeof *many_rows; s++) {
            static const int32_t exact[] = {5, 8, 11, 16, 19}, one_column[] = {9, 16};
            for (size_t t = 0; t < sizeof exact / sizeof *exact; t++) {
                add_phase(l, &many_rows[s], f, QL_PREC_EXACT, QL_PHASE_GEN, exact[t], NORMAL, SOUND);
            }
            for (size_t t = 0; t < sizeof one_column / sizeof *one_column; t++) {
                add_phase(l, &many_rows[s], f, QL_PREC_BF16, QL_PHASE_GEN, one_column[t], NORMAL, SOUND);
            }
        }
    }
    static const shape all_codes = {"n127.k256", 127, 256, 1, 0, 256, 1, {0, 127}};
    for (int32_t f = QL_FORMAT_FP8_CHANNEL; f < QL_FORMAT_COUNT; f++) {
        add(l, &all_codes, f, QL_PREC_EXACT, 1, CODES, SOUND);
        add(l, &all_codes, f, QL_PREC_EXACT, 7, CODES, SOUND);
    }
    add(l, &shapes[3], QL_FORMAT_NVFP4, QL_PREC_EXACT, 3, NORMAL, NIBBLES);
    add(l, &shapes[3], QL_FORMAT_NVFP4, QL_PREC_EXACT, 3, NORMAL, FACTOR);
    add(l, &shapes[3], QL_FORMAT_NVFP4, QL_PREC_EXACT, 3, NORMAL, GROUP_SCALE);
    add(l, &shapes[3], QL_FORMAT_FP8_TENSOR, QL_PREC_EXACT, 3, NORMAL, FACTOR);
    add(l, &shapes[3], QL_FORMAT_FP8_CHANNEL, QL_PREC_EXACT, 3, NORMAL, ROW_SCALE);
    add(l, &shapes[5], QL_FORMAT_FP8_BLOCK, QL_PREC_EXACT, 3, NORMAL, BLOCK_ROW);
    add(l, &shapes[5], QL_FORMAT_FP8_CHANNEL, QL_PREC_FP8, 3, NORMAL, ROUNDING);
    add(l, &shapes[5], QL_FORMAT_FP8_CHANNEL, QL_PREC_Q8, 3, NORMAL, ROUNDING);
    add(l, &shapes[5], QL_FORMAT_NVFP4, QL_PREC_Q8, 3, NORMAL, ROUNDING);
    add(l, &shapes[5], QL_FORMAT_NVFP4, QL_PREC_Q8, 3, NORMAL, COLUMN);
    add(l, &shapes[3], QL_FORMAT_NVFP4, QL_PREC_Q8, 3, NORMAL, NIBBLES);
    add(l, &shapes[3], QL_FORMAT_NVFP4, QL_PREC_Q8, 3, NORMAL, GROUP_SCALE);

    /* Slices of whole groups, some of them odd: a block of 16; partial tiles of every kernel in both directions. */
    static const shape q8_shapes[] = {
        {"n67.k320", 67, 320, 1, 0, 320, 1, {0, 67}},
        {"n10.k640.s8", 10, 640, 8, 0, 640, 1, {0, 10}},
        {"n130.k1024.s8.cut", 200, 1200, 8, 48, 1024, 1, {50, 180}},
        {"n127.k256", 127, 256, 1, 0, 256, 1, {0, 127}},
    };
    static const char *const q8_kernels[] = {"reference", "dp4a", "wmma", "wide"};
    static const int32_t q8_rows[] = {1, 2, 5, 17, 64, 129, 300};
    for (size_t s = 0; s < sizeof q8_shapes / sizeof *q8_shapes; s++) {
        bool odd = q8_shapes[s].k / q8_shapes[s].slices % 32 != 0;
        for (size_t i = 0; i < sizeof q8_kernels / sizeof *q8_kernels; i++) {
            for (size_t t = 0; t < sizeof q8_rows / sizeof *q8_rows && !(odd && i == 3); t++) {
                add_q8(l, &q8_shapes[s], q8_kernels[i], q8_rows[t], NORMAL);
            }
            for (int32_t r = CODES; r < N_REGIME && !(odd && i == 3); r++) {
                add_q8(l, &q8_shapes[s], q8_kernels[i], 33, (regime)r);
            }
        }
        add(l, &q8_shapes[s], QL_FORMAT_NVFP4, QL_PREC_Q8, 1, NORMAL, SOUND);
        add(l, &q8_shapes[s], QL_FORMAT_NVFP4, QL_PREC_Q8, 129, NORMAL, SOUND);
    }
    add(l, &q8_shapes[3], QL_FORMAT_NVFP4, QL_PREC_Q8, 7, CODES, SOUND);
    /* Rows long enough for copies ahead of dp4a: slices that end inside a chunk of 512 columns, parts of a row that begin
     * between two pieces of 16 bytes. */
    static const shape long_rows[] = {
        {"n70.k4096", 70, 4096, 1, 0, 4096, 1, {0, 70}},
        {"n21.k4352.s2", 21, 4352, 2, 0, 4352, 1, {0, 21}},
        {"n37.k8704.s4", 37, 8704, 4, 0, 8704, 1, {0, 37}},
        {"n19.k17408.s8", 19, 17408, 8, 0, 17408, 1, {0, 19}},
    };
    for (size_t s = 0; s < sizeof long_rows / sizeof *long_rows; s++) {
        add_q8(l, &long_rows[s], "dp4a", 1, NORMAL);
        add_q8(l, &long_rows[s], "dp4a", 3, CODES);
        add_q8(l, &long_rows[s], "wide", 130, NORMAL);
    }
    add_q8(l, &q8_shapes[1], "wide", 3, NORMAL)->must_fail = true; /* slices of 80: refused */
    for (int32_t f = QL_FORMAT_FP8_CHANNEL; f <= QL_FORMAT_FP8_BLOCK; f++) {
        add(l, &tiles, f, QL_PREC_Q8, 65, NORMAL, SOUND);
        add(l, &tiles, f, QL_PREC_Q8, 65, OUTLIER, SOUND);
    }

    for (int32_t f = QL_FORMAT_F16; f < QL_FORMAT_COUNT; f++) {
        for (size_t s = 0; s < sizeof model_shapes / sizeof *model_shapes; s++) {
            add_long(l, &model_shapes[s], f, QL_PREC_EXACT, 1);
        }
        add_long(l, &model_shapes[0], f, QL_PREC_EXACT, 4);
        for (int32_t p = QL_PREC_EXACT; p <= QL_PREC_FP8; p++) {
            add_long(l, &prompt_shapes[0], f, p, 64);
        }
        add_long(l, &prompt_shapes[1], f, QL_PREC_EXACT, 64);
        add_long(l, &prompt_shapes[2], f, QL_PREC_EXACT, 64);
        add_long(l, &prompt_shapes[2], f, QL_PREC_BF16, 64);
    }
}

/* ---- a matrix as a file holds it --------------------------------------------------------------------------------- */

/* The file's bytes, and what the oracle multiplies. One block: run->user. */
typedef struct matrix {
    ql_weight_src src; /* the bytes as they should be */
    uint64_t data_bytes, scale_bytes;
} matrix;

/* A number as bytes of a plain dtype, little endian. The values made here are chosen to be exact in each. */
static void put_plain(uint8_t *p, int32_t dtype, float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if (dtype == QL_DTYPE_F32) {
        memcpy(p, &u, 4);
    } else if (dtype == QL_DTYPE_BF16) {
        p[0] = (uint8_t)(u >> 16);
        p[1] = (uint8_t)(u >> 24);
    } else { /* F16, normal range, truncated */
        uint32_t e = (u >> 23) & 255, h = (u >> 16 & 0x8000) | (e < 113 ? 0 : (e - 112) << 10 | (u >> 13 & 1023));
        p[0] = (uint8_t)h;
        p[1] = (uint8_t)(h >> 8);
    }
}

static double get_plain(const uint8_t *p, int32_t dtype) {
    uint32_t u = 0;
    if (dtype == QL_DTYPE_F32 || dtype == QL_DTYPE_BF16) {
        float f;
        memcpy((uint8_t *)&u + (dtype == QL_DTYPE_BF16 ? 2 : 0), p, dtype == QL_DTYPE_BF16 ? 2 : 4);
        memcpy(&f, &u, 4);
        return f;
    }
    memcpy(&u, p, 2);
    int32_t e = u >> 10 & 31, m = u & 1023;
    double v = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return u & 0x8000 ? -v : v;
}

static double e4m3(uint8_t b) { /* s eeee mmm, bias 7; no infinities */
    int32_t e = b >> 3 & 15, m = b & 7;
    double v = e ? (1 + m / 8.0) * ldexp(1, e - 7) : m * ldexp(1, -9);
    return b & 0x80 ? -v : v;
}

static double e2m1(uint8_t code) {
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}

static int32_t plain_dtype(int32_t format) {
    return format == QL_FORMAT_F32 ? QL_DTYPE_F32 : format == QL_FORMAT_F16 ? QL_DTYPE_F16 : QL_DTYPE_BF16;
}

/* Nearest E4M3 code of a number, ties to the even code, by looking at all of them. */
static uint8_t nearest_e4m3(double v) {
    uint8_t best = 0;
    double a = fabs(v) > 448 ? 448 : fabs(v);
    for (int32_t c = 1; c < 0x7f; c++) {
        double d = fabs(e4m3((uint8_t)c) - a), least = fabs(e4m3(best) - a);
        if (d < least || (d == least && c % 2 == 0)) {
            best = (uint8_t)c;
        }
    }
    return (uint8_t)(best | (v < 0 ? 0x80 : 0));
}

static void fill_codes(kc_run *run, uint8_t *p, uint64_t bytes, int32_t format, int32_t reg) {
    static const uint8_t small[] = {0x00, 0x01, 0x07, 0x08, 0x7e, 0x80, 0x81, 0xfe};
    if (format <= QL_FORMAT_BF16) {
        int32_t dtype = plain_dtype(format), width = format == QL_FORMAT_F32 ? 4 : 2;
        for (uint64_t i = 0; i < bytes; i += (uint64_t)width) {
            float v = 0.02f * kc_normal(run);
            put_plain(p + i, dtype, v);
            if (reg == CODES && width == 2) { /* any bits that are a finite number */
                do {
                    uint64_t u = kc_u64(run);
                    p[i] = (uint8_t)u;
                    p[i + 1] = (uint8_t)(format == QL_FORMAT_BF16 ? (u >> 8 & 0xbf) : u >> 8);
                } while (format == QL_FORMAT_F16 && (p[i + 1] & 0x7c) == 0x7c);
            } else if (reg == SMALL) { /* subnormals of F16, small numbers of the others */
                put_plain(p + i, dtype, 0);
                p[i + (uint64_t)(width == 4 ? 1 : 0)] = (uint8_t)kc_u64(run);
                p[i + (uint64_t)width - 1] = (uint8_t)(kc_u64(run) & 0x80);
            }
        }
        return;
    }
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t u = kc_u64(run);
        for (uint64_t j = i; j < i + 8 && j < bytes; j++, u >>= 8) {
            uint8_t b = (uint8_t)u;
            if (format == QL_FORMAT_NVFP4) {
                p[j] = reg == CODES ? (uint8_t)j : b;
                continue;
            }
            b = reg == CODES ? (uint8_t)j : reg == SMALL ? small[b % 8] : b;
            p[j] = (b & 0x7f) == 0x7f ? (uint8_t)(b ^ 0x40) : b;
        }
    }
}

static void fill_scales(kc_run *run, matrix *m, uint8_t *p) {
    int32_t reg = run->c->p[P_REGIME];
    if (m->src.format == QL_FORMAT_NVFP4) {
        static const uint8_t small[] = {0x00, 0x01, 0x07, 0x08, 0x7e};
        for (uint64_t i = 0; i < m->scale_bytes; i++) {
            p[i] = reg == CODES   ? (uint8_t)(i / (uint64_t)(m->src.full_k / 16) % 127)
                   : reg == SMALL ? small[kc_below(run, 5)]
                                  : (uint8_t)(0x20 + kc_below(run, 0x58));
        }
        return;
    }
    uint64_t size = m->src.scale_dtype == QL_DTYPE_F32 ? 4 : 2;
    for (uint64_t i = 0; i < m->scale_bytes; i += size) { /* 7 bits of mantissa: exact in each dtype; 100 times apart */
        float v = ldexpf((float)(128 + kc_below(run, 128)), -15 - kc_below(run, 7));
        put_plain(p + i, m->src.scale_dtype, v);
    }
}

/* ---- make -------------------------------------------------------------------------------------------------------- */

/* The matrix that the device is given: broken on purpose, its own copy of the bytes. */
static void break_matrix(kc_run *run, const matrix *m, ql_weight_src *src, uint8_t *data, uint8_t *scale) {
    memcpy(data, src->data, m->data_bytes);
    memcpy(scale, src->scale ? src->scale : src->data, m->scale_bytes);
    src->data = data;
    src->scale = src->scale ? scale : NULL;
    int64_t row = ql_qformat_row_bytes(src->format, src->full_k), width = ql_qformat_row_bytes(src->format, 2) / 2;
    switch (run->c->p[P_BREAK]) {
    case NIBBLES:
        for (uint64_t i = 0; i < m->data_bytes; i++) {
            data[i] = (uint8_t)(data[i] << 4 | data[i] >> 4);
        }
        break;
    case FACTOR: src->factor = 1 / src->factor; break;
    case GROUP_SCALE: memset(scale, 0x38, m->scale_bytes); break; /* E4M3 one */
    case COLUMN: /* the last column of the cut is its neighbour's; for NVFP4 the last pair */
        width = width ? width : 1;
        for (int32_t r = 0; r < src->full_n; r++) {
            uint8_t *end = data + r * row + ql_qformat_row_bytes(src->format, src->col0 + src->k);
            memcpy(end - width, end - 2 * width, (size_t)width);
        }
        break;
    case ROW_SCALE: src->scale += ql_dtype_bits(src->scale_dtype) / 8 * (src->row1[0] < src->full_n ? 1 : -1); break;
    case BLOCK_ROW: /* as if the cut began with its block: row offset dropped */
        src->row1[0] -= src->row0[0] % 128;
        src->data += row * (src->row0[0] % 128);
        src->row0[0] -= src->row0[0] % 128;
        break;
    default: break;
    }
}

enum { X, Y };

static void make(kc_run *run) {
    const int32_t *p = run->c->p;
    int64_t t = p[P_T], n = p[P_N], k = p[P_K], ldx = k + p[P_PAD_X], ldy = n + p[P_PAD_Y];
    ql_qformat format = (ql_qformat)p[P_FORMAT];
    ql_weight_src src = {
        .module = run->c->name,
        .format = format,
        .n = p[P_N],
        .k = p[P_K],
        .n_range = p[P_RANGES],
        .col0 = p[P_COL0],
        .full_n = p[P_FULL_N],
        .full_k = p[P_FULL_K],
        .scale_dtype = (ql_dtype)p[P_SCALE_DTYPE],
        .factor = 1,
        .records = format == QL_FORMAT_NVFP4 && p[P_PRECISION] == QL_PREC_Q8 && p[P_BREAK] != ROUNDING,
    };
    memcpy(src.row0, p + P_ROW0, sizeof src.row0);
    memcpy(src.row1, p + P_ROW1, sizeof src.row1);
    if (has_factor(format)) {
        src.factor = 1 / kc_uniform(run, 700, 9500);
    }
    uint64_t data_bytes = (uint64_t)(src.full_n * ql_qformat_row_bytes(format, src.full_k)), scale_bytes = 0;
    uint64_t scale_size = src.scale_dtype == QL_DTYPE_F32 ? 4 : 2;
    if (format == QL_FORMAT_FP8_CHANNEL) {
        scale_bytes = (uint64_t)src.full_n * scale_size;
    } else if (format == QL_FORMAT_FP8_BLOCK) {
        scale_bytes = (uint64_t)((src.full_n + 127) / 128) * (uint64_t)((src.full_k + 127) / 128) * scale_size;
    } else if (format == QL_FORMAT_NVFP4) {
        scale_bytes = (uint64_t)src.full_n * (uint64_t)(src.full_k / 16);
    }
    int32_t copies = run->c->must_fail ? 2 : 1;
    matrix *m = malloc(sizeof *m + (uint64_t)copies * (data_bytes + scale_bytes) + 16);
    if (!m) {
        kc_fail(run, "out of memory");
        return;
    }
    run->user = m;
    uint8_t *data = (uint8_t *)(m + 1) + 1, *scale = data + data_bytes; /* odd addresses, as in a file */
    src.data = data;
    src.scale = scale_bytes ? scale : NULL;
    *m = (matrix){.src = src, .data_bytes = data_bytes, .scale_bytes = scale_bytes};
    fill_codes(run, data, data_bytes, format, p[P_REGIME]);
    fill_scales(run, m, scale);
    if (run->c->must_fail) {
        break_matrix(run, m, &src, scale + scale_bytes, scale + scale_bytes + data_bytes);
    }
    kc_weight(run, &src);

    kc_buf *x = kc_buffer(run, "x", KC_IN, KC_F32, t * ldx);
    kc_buf *y = kc_buffer(run, "y", KC_INOUT, KC_F32, t * ldy); /* the padding keeps its content */
    y->row_len = ldy;
    float *xs = x->host;
    kc_fill_normal(run, xs, x->n, p[P_REGIME] == ZERO ? 0.0f : 1.0f);
    for (int64_t i = 0; i < t; i++) {
        for (int64_t j = k; j < ldx; j++) {
            xs[i * ldx + j] = NAN; /* never to be read */
        }
        if (p[P_REGIME] == OUTLIER) {
            xs[i * ldx + kc_below(run, p[P_K])] = 1e6f;
        }
    }
    if (p[P_REGIME] == NAN_ROW) {
        xs[1 * ldx + k / 2] = NAN;
        xs[2 * ldx + k - 1] = INFINITY;
    }
    kc_fill_normal(run, y->host, y->n, 1.0f);
}

static ql_status call(kc_run *run, int32_t row0, int32_t n_row) {
    const int32_t *p = run->c->p;
    int64_t ldx = p[P_K] + p[P_PAD_X], ldy = p[P_N] + p[P_PAD_Y];
    ql_linear_args a = {
        .w = &run->weight[0],
        .x = (const float *)run->buf[X].dev + row0 * ldx,
        .y = (float *)run->buf[Y].dev + row0 * ldy,
        .ldx = ldx,
        .ldy = ldy,
        .n_row = n_row < 0 ? p[P_T] : n_row,
        .n_slice = p[P_SLICES],
        .phase = (ql_phase)p[P_PHASE],
        .precision = p[P_BREAK] == ROUNDING ? QL_PREC_EXACT : (ql_precision)p[P_PRECISION],
    };
    return run->dev->ops->linear(run->dev, &a);
}

/* ---- oracle ------------------------------------------------------------------------------------------------------ */

static double weight_at(const matrix *m, int64_t row, int64_t col) {
    const ql_weight_src *s = &m->src;
    int64_t at = row * s->full_k + col, scale_size = s->scale_dtype == QL_DTYPE_F32 ? 4 : 2;
    switch (s->format) {
    case QL_FORMAT_F32: return get_plain(s->data + 4 * at, QL_DTYPE_F32);
    case QL_FORMAT_F16: return get_plain(s->data + 2 * at, QL_DTYPE_F16);
    case QL_FORMAT_BF16: return get_plain(s->data + 2 * at, QL_DTYPE_BF16);
    case QL_FORMAT_FP8_CHANNEL: return e4m3(s->data[at]) * get_plain(s->scale + scale_size * row, s->scale_dtype);
    case QL_FORMAT_FP8_TENSOR: return e4m3(s->data[at]) * (double)s->factor;
    case QL_FORMAT_FP8_BLOCK:
        return e4m3(s->data[at]) *
               get_plain(s->scale + scale_size * (row / 128 * ((s->full_k + 127) / 128) + col / 128), s->scale_dtype);
    default: {
        uint8_t byte = s->data[row * (s->full_k / 2) + col / 2], code = col % 2 ? byte >> 4 : byte & 15;
        return e2m1(code) * e4m3(s->scale[row * (s->full_k / 16) + col / 16]) * (double)s->factor;
    }
    }
}

static double to_bf16(double v) {
    int e;
    if (!isfinite(v) || v == 0) {
        return v;
    }
    frexp(v, &e);
    e = e < -125 ? -125 : e; /* subnormals share the smallest exponent */
    return ldexp(nearbyint(ldexp(v, 8 - e)), e - 8);
}

static double to_f16(double v) {
    int e;
    if (!isfinite(v) || v == 0) {
        return v;
    }
    frexp(v, &e);
    e = e < -13 ? -13 : e;
    return ldexp(nearbyint(ldexp(v, 11 - e)), e - 11);
}

/* A slice in INT8: blocks of 32 channels. */
static void oracle_int8(const float *x, int32_t n, double *out) {
    for (int32_t b = 0; b < n; b += 32) {
        int32_t end = b + 32 < n ? b + 32 : n;
        bool sound = true;
        float amax = 0;
        for (int32_t c = b; c < end; c++) {
            amax = fabsf(x[c]) > amax ? fabsf(x[c]) : amax;
            sound = sound && isfinite(x[c]);
        }
        float d = amax / 127.0f > 1e-8f ? amax / 127.0f : 1e-8f;
        for (int32_t c = b; c < end; c++) {
            out[c] = sound ? nearbyint((double)(x[c] / d)) * (double)d : NAN;
        }
    }
}

/* A slice in 11 bits, scaled by a power of two for the rounding. */
static void oracle_f16(const float *x, int32_t n, double *out) {
    double most = 0;
    int e;
    for (int32_t c = 0; c < n; c++) {
        most = isfinite(x[c]) ? fmax(most, fabs((double)x[c])) : most;
    }
    frexp(most, &e); /* most in [2^(e-1), 2^e) */
    e = most > 0 ? 15 - e : 0;
    for (int32_t c = 0; c < n; c++) {
        out[c] = ldexp(to_f16(ldexp(x[c], e)), -e);
    }
}

/* Row t of x as it meets the weight. */
static void oracle_x(const int32_t *p, const float *x, double *out) {
    int32_t ks = p[P_K] / p[P_SLICES];
    for (int32_t s = 0; s < p[P_SLICES]; s++) {
        if (p[P_PRECISION] == QL_PREC_Q8 && p[P_FORMAT] == QL_FORMAT_NVFP4) {
            oracle_int8(x + s * ks, ks, out + s * ks);
            continue;
        }
        if (p[P_PRECISION] == QL_PREC_Q8 && is_fp8(p[P_FORMAT])) {
            oracle_f16(x + s * ks, ks, out + s * ks);
            continue;
        }
        float amax = 0x1p-126f, scale;
        for (int32_t c = s * ks; c < (s + 1) * ks; c++) {
            amax = fabsf(x[c]) > amax ? fabsf(x[c]) : amax;
        }
        scale = amax / 448.0f;
        for (int32_t c = s * ks; c < (s + 1) * ks; c++) {
            if (p[P_PRECISION] == QL_PREC_EXACT || p[P_PRECISION] == QL_PREC_Q8) {
                out[c] = x[c];
            } else if (p[P_PRECISION] == QL_PREC_BF16 || !is_fp8(p[P_FORMAT])) {
                out[c] = to_bf16(x[c]);
            } else {
                float q = x[c] / scale;
                out[c] = q != q ? NAN : e4m3(nearest_e4m3(q)) * (double)scale;
            }
        }
    }
}

/* Whether prompt rows go through F16 matrix instructions in code for 7.5: twice as many sums as of 16 products, each cut off. */
static bool cuts_by_8(const kc_run *run) {
#if QL_CUDA
    const int32_t *p = run->c->p;
    bool f16 = p[P_FORMAT] == QL_FORMAT_F16 && (p[P_PRECISION] == QL_PREC_BF16 || p[P_PRECISION] == QL_PREC_FP8);
    bool packed = is_fp8(p[P_FORMAT]) || (p[P_FORMAT] == QL_FORMAT_NVFP4 && p[P_PRECISION] != QL_PREC_Q8);
    ql_cuda_device info;
    ql_error err = {0};
    return strcmp(run->dev->ops->name, "cuda") == 0 && p[P_PHASE] == QL_PHASE_PROMPT && (f16 || packed) &&
           p[P_K] / p[P_SLICES] % 64 == 0 && ql_cuda_info(0, &info, &err) == QL_OK && info.code == 75;
#else
    (void)run;
    return false;
#endif
}

/* Bound: with u = 2^-24, a sum of m = k_slice / 16 products in an accumulator, 4 additions of accumulators, up to 3 of
 * slices, up to 3 scalings and, block by block, one multiply and add for each block of at most 128 / 16 = 8 products:
 * (m + m / 8 + 12) u of the sum of magnitudes. Results and products below the normal range lose 2^-149 each.
 *
 * Prompts in code for 7.5: for each of the 8 instructions of a step of 64 columns 10 u of its largest addend (linear.h), in place
 * of m u; 4 u for x in two parts of 11 bits, in place of the 4 additions. No addend of a step is larger than the sum before the
 * step and the step's magnitudes together. */
static void oracle(kc_run *run) {
    const int32_t *p = run->c->p;
    const matrix *m = run->user;
    int64_t n = p[P_N], k = p[P_K], ldx = k + p[P_PAD_X], ldy = n + p[P_PAD_Y];
    double *want = kc_want(&run->buf[Y]), *tol = kc_tol(&run->buf[Y]);
    double *x = malloc(sizeof(double) * (size_t)(p[P_T] * k + 1)), *w = malloc(sizeof(double) * (size_t)k);
    bool by_8 = cuts_by_8(run), block = p[P_FORMAT] == QL_FORMAT_FP8_BLOCK; /* whose blocks are summed by themselves */
    int64_t ks = k / p[P_SLICES];
    double products = (double)ks / 16 + 1, bound = ((by_8 ? 0 : products) + products / 8 + 12) * 0x1p-24;
    if (strcmp(run->dev->ops->name, "cuda") == 0 && p[P_PHASE] == QL_PHASE_PROMPT && p[P_PRECISION] == QL_PREC_FP8 &&
        is_fp8(p[P_FORMAT]) && k / p[P_SLICES] % 128 == 0) {
        bound = 0x1p-11; /* sums of FP8 tensor cores (linear.h) */
    }
    for (int32_t t = 0; t < p[P_T]; t++) {
        oracle_x(p, (const float *)run->buf[X].host + t * ldx, x + t * k);
        for (int64_t i = n; i < ldy; i++) {
            want[t * ldy + i] = (double)((const float *)run->buf[Y].host)[t * ldy + i];
        }
    }
    int64_t r = 0;
    for (int32_t range = 0; range < p[P_RANGES]; range++) {
        for (int32_t row = p[P_ROW0 + range]; row < p[P_ROW1 + range]; row++, r++) {
            for (int64_t c = 0; c < k; c++) {
                w[c] = weight_at(m, row, p[P_COL0] + c);
            }
            for (int32_t t = 0; t < p[P_T]; t++) {
                double sum = 0, magnitude = 0, part = 0, before = 0;
                for (int64_t c = 0; c < k; c++) {
                    double v = x[t * k + c] * w[c];
                    part = c % ks == 0 || (block && (p[P_COL0] + c) % 128 == 0) ? 0 : part;
                    before += c % 64 == 0 ? fabs(part) : 0;
                    part += v;
                    sum += v;
                    magnitude += fabs(v);
                }
                /* An infinite x and a zero weight, or infinities of both signs, are a NaN; a lone infinity may stay. */
                want[t * ldy + r] = sum;
                tol[t * ldy + r] = bound * magnitude + (double)k * 0x1p-149;
                tol[t * ldy + r] += by_8 ? 80 * 0x1p-24 * (before + magnitude) : 0;
            }
        }
    }
    free(x);
    free(w);
}

/* ---- equivalences ------------------------------------------------------------------------------------------------ */

/* Codes of the cut in the file's order. */
static uint32_t cut_crc(const ql_weight_src *s) {
    uint32_t crc = (uint32_t)crc32_z(0, NULL, 0);
    int64_t row = ql_qformat_row_bytes(s->format, s->full_k), col = ql_qformat_row_bytes(s->format, s->col0);
    for (int32_t i = 0; i < s->n_range; i++) {
        for (int32_t r = s->row0[i]; r < s->row1[i]; r++) {
            crc = (uint32_t)crc32_z(crc, s->data + r * row + col, (size_t)ql_qformat_row_bytes(s->format, s->k));
        }
    }
    return crc;
}

/* What n_lane lanes with a part of the slices each add up to has the bits of one lane with all of them. */
static bool check_lanes(kc_run *run, int32_t n_lane) {
    const int32_t *p = run->c->p;
    const matrix *m = run->user;
    const ql_ops *ops = run->dev->ops;
    int64_t ldx = p[P_K] + p[P_PAD_X], count = (int64_t)p[P_T] * p[P_N];
    int32_t k = p[P_K] / n_lane;
    float *sum[8] = {NULL};
    void *y = NULL;
    bool good = ops->alloc(run->dev, (size_t)count * 4, "lane", &y) == QL_OK;
    for (int32_t lane = 0; lane < n_lane && good; lane++) {
        ql_weight_src src = m->src;
        ql_weight w;
        src.col0 += lane * k;
        src.k = k;
        sum[lane] = malloc((size_t)count * 4);
        good = ops->weight_load(run->dev, &src, &w) == QL_OK;
        if (good) {
            ql_linear_args a = {
                .w = &w,
                .x = (const float *)run->buf[X].dev + lane * k,
                .y = y,
                .ldx = ldx,
                .ldy = p[P_N],
                .n_row = p[P_T],
                .n_slice = p[P_SLICES] / n_lane,
                .phase = (ql_phase)p[P_PHASE],
                .precision = (ql_precision)p[P_PRECISION],
            };
            good = ops->linear(run->dev, &a) == QL_OK && ops->d2h(run->dev, sum[lane], y, (size_t)count * 4) == QL_OK &&
                   ops->sync(run->dev) == QL_OK;
            ops->weight_free(run->dev, &w);
        }
    }
    if (!good) {
        kc_fail(run, "%d lanes: %s", n_lane, run->dev->err->text);
    }
    for (int32_t step = 1; step < n_lane && good; step *= 2) {
        for (int32_t lane = 0; lane < n_lane; lane += 2 * step) {
            for (int64_t i = 0; i < count; i++) {
                sum[lane][i] += sum[lane + step][i];
            }
        }
    }
    const float *whole = run->buf[Y].got;
    for (int64_t i = 0; i < count && good; i++) {
        float a = sum[0][i], b = whole[i / p[P_N] * (p[P_N] + p[P_PAD_Y]) + i % p[P_N]];
        if (memcmp(&a, &b, 4) != 0 && (a == a || b == b)) {
            kc_fail(run, "%d lanes add up to y[%lld] = %.9g, one lane has %.9g", n_lane, (long long)i, (double)a,
                    (double)b);
            good = false;
        }
    }
    for (int32_t lane = 0; lane < 8; lane++) {
        free(sum[lane]);
    }
    ops->free(run->dev, y);
    return good;
}

/* The slice is that of the file, and not that of a file with one other bit in its last code or last scale. */
static void check_same(kc_run *run, const matrix *m, const ql_weight *w) {
    const ql_weight_src *src = &m->src;
    int64_t row = src->row1[src->n_range - 1] - 1, width = ql_qformat_row_bytes(src->format, src->full_k);
    int64_t last = row * width + ql_qformat_row_bytes(src->format, src->col0 + src->k) - 1;
    uint8_t *changed = malloc((size_t)(width * src->full_n));
    const char *differs = "nothing yet";
    ql_status status = run->dev->ops->weight_same(run->dev, w, src, &differs);
    if (status != QL_OK || differs) {
        kc_fail(run, "the slice is not found to be the file's: %s", status == QL_OK ? differs : run->dev->err->text);
    }
    if (!changed) {
        kc_fail(run, "no memory for a copy of the weight");
        return;
    }
    memcpy(changed, src->data, (size_t)(width * src->full_n));
    changed[last] ^= 0x10;
    ql_weight_src other = *src;
    other.data = changed;
    status = run->dev->ops->weight_same(run->dev, w, &other, &differs);
    if (status != QL_OK || !differs || strcmp(differs, "codes") != 0) {
        kc_fail(run, "a changed code is not seen");
    }
    free(changed);
    if (src->format == QL_FORMAT_NVFP4) {
        int64_t groups = src->full_k / 16;
        uint8_t *scale = malloc((size_t)(groups * src->full_n));
        other = *src;
        other.scale = scale ? memcpy(scale, src->scale, (size_t)(groups * src->full_n)) : src->scale;
        if (scale) {
            scale[row * groups + (src->col0 + src->k) / 16 - 1] ^= 0x10;
        }
        status = run->dev->ops->weight_same(run->dev, w, &other, &differs);
        if (status != QL_OK || !differs || strcmp(differs, "scales") != 0) {
            kc_fail(run, "a changed group scale is not seen");
        }
        free(scale);
    }
}

/* Against the oracle as a whole, where the bounds of single elements leave room for errors that all have one sign. */
static void check_norm(kc_run *run) {
    const int32_t *p = run->c->p;
    const kc_buf *y = &run->buf[Y];
    const float *got = y->got;
    double want2 = 0, diff2 = 0;
    for (int64_t i = 0; i < y->n; i++) {
        if (i % y->row_len < p[P_N]) {
            want2 += y->want[i] * y->want[i];
            diff2 += ((double)got[i] - y->want[i]) * ((double)got[i] - y->want[i]);
        }
    }
    if (p[P_REGIME] == NORMAL && !(want2 >= 1 && diff2 <= 1e-10 * want2)) {
        kc_fail(run, "the result's norm is %.3g, its error %.3g of it; allowed are at least 1 and at most 1e-5",
                sqrt(want2), sqrt(diff2 / want2));
    }
}

static void check(kc_run *run) {
    const int32_t *p = run->c->p;
    const matrix *m = run->user;
    const ql_weight *w = &run->weight[0];
    uint32_t crc = 0;
    if (run->dev->ops->weight_crc(run->dev, w, &crc) != QL_OK || crc != cut_crc(&m->src)) {
        kc_fail(run, "resident codes have CRC %08x, the file's cut %08x", crc, cut_crc(&m->src));
    }
    check_same(run, m, w);
    double most = 0;
    for (int32_t range = 0; range < p[P_RANGES]; range++) {
        for (int32_t row = p[P_ROW0 + range]; row < p[P_ROW1 + range]; row++) {
            for (int32_t c = 0; c < p[P_K]; c++) {
                most = fmax(most, fabs(weight_at(m, row, p[P_COL0] + c)));
            }
        }
    }
    /* Plain weights are looked at one by one, of others the scales only. */
    if (!((double)w->max_abs >= most * (1 - 1e-6)) || (p[P_FORMAT] <= QL_FORMAT_BF16 && (double)w->max_abs != most)) {
        kc_fail(run, "max_abs is %g, a weight has %g", (double)w->max_abs, most);
    }
    uint64_t weight_bytes, scale_bytes;
    run->dev->ops->weight_bytes(w->format, w->n, w->k, w->row_off, w->col_off, &weight_bytes, &scale_bytes);
    if (weight_bytes != w->weight_bytes || scale_bytes != w->scale_bytes) {
        kc_fail(run, "holds %llu + %llu bytes, weight_bytes says %llu + %llu", (unsigned long long)w->weight_bytes,
                (unsigned long long)w->scale_bytes, (unsigned long long)weight_bytes, (unsigned long long)scale_bytes);
    }
    if (!kc_once(run, 0, -1)) {
        return;
    }
    if (run->buf[Y].want && p[P_PRECISION] == QL_PREC_Q8 && p[P_FORMAT] == QL_FORMAT_NVFP4 && p[P_K] >= 256) {
        check_norm(run);
    }
    for (int32_t n_lane = 2; n_lane <= p[P_SLICES]; n_lane *= 2) {
        if ((p[P_FORMAT] != QL_FORMAT_NVFP4 || p[P_K] / n_lane % 16 == 0) && !check_lanes(run, n_lane)) {
            return;
        }
    }
}

const kc_family kc_linear = {"linear", list, make, call, oracle, check};
