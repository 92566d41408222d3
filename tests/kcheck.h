/* Kernel cases: written once, checked by kcheck and timed by kbench on any device behind the op table.
 *
 * A family lists its cases. For each, the runner calls `make`, which declares buffers and fills the inputs on the host
 * from run->rng (the same numbers on every device), places every buffer on the device between guard bands, and calls
 * `call`, which fills the op's args from kc_dev pointers and calls the table once. `oracle` computes what must come out,
 * in double precision from the contract, into kc_want / kc_tol; it shares no code with the kernels. `check` adds
 * equivalences of the family's own. The runner itself checks on every device: oracle within tolerance, inputs untouched,
 * guard bands intact, the same bits on a second run, NaN and infinity where the oracle has them, a row alone equal to the
 * row in its batch where `rows` says so; and on the host, each variant equal to the twin bit for bit.
 */
#ifndef QL_TESTS_KCHECK_H
#define QL_TESTS_KCHECK_H

#include "kernels/kernels.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { KC_MAX_BUF = 24 };

typedef enum kc_role {
    KC_IN,    /* read only: the runner checks that it is untouched */
    KC_OUT,   /* written in whole; starts as a NaN pattern */
    KC_INOUT, /* starts with the host content, compared afterwards */
    KC_WORK,  /* may hold anything afterwards */
} kc_role;

typedef enum kc_type { KC_F32, KC_I32, KC_U8 /* compared as bytes */ } kc_type;

typedef struct kc_buf {
    const char *name; /* for messages: "y" */
    kc_role role;
    kc_type type;
    int64_t n;       /* elements; may be 0 */
    void *host;      /* initial content, to be filled by make (zeroed) */
    void *got;       /* what the device left, after a run */
    void *dev;       /* device pointer */
    double *want;    /* F32: expected values, NULL until kc_want asks for it; NaN: must be NaN */
    double *tol;     /* F32: |got - want| <= tol */
    int64_t row_len; /* elements of a row for the row-alone check; 0: not a row buffer */
} kc_buf;

typedef struct kc_case {
    char name[112];        /* "linear.nvfp4.exact.gen.t3.n64.k256.s2" */
    bool is_long;          /* only with --long */
    bool must_fail;        /* `make` breaks the input on purpose: the comparison with the oracle has to notice */
    double bytes, flops;   /* moved and computed by one call, from the contract; 0: not benched */
    int32_t rows;          /* rows that must be independent: call(row, 1) gives that row's bits; 0: no such check */
    bool by_rows;          /* a CUDA device picks its kernel by the number of rows: no such check there */
    char cuda_kernels[24]; /* kernel choices, "nvfp4=wide", of a case that is for CUDA devices alone; "": for all */
    ql_shape shape;        /* for scratch_bytes */
    int32_t p[24];         /* the family's parameters */
} kc_case;

typedef struct kc_family kc_family;

typedef struct kc_run {
    ql_dev *dev;
    const kc_family *family;
    const kc_case *c;
    uint64_t rng;
    kc_buf buf[KC_MAX_BUF];
    int32_t n_buf;
    ql_weight weight[2]; /* made by `make` through kc_weight; freed by the runner */
    int32_t n_weight;
    void *user;    /* the family's own host data (malloc), freed by the runner */
    void *scratch; /* with guard bands */
    int32_t n_call;
    bool failed;
    char why[512];
} kc_run;

typedef struct kc_list {
    kc_case *item;
    int32_t n, cap;
} kc_list;

struct kc_family {
    const char *name;
    void (*list)(kc_list *list);
    void (*make)(kc_run *run);
    /* All rows: row0 = 0, n_row = -1. Otherwise rows [row0, row0 + n_row), results in their own place. */
    ql_status (*call)(kc_run *run, int32_t row0, int32_t n_row);
    void (*oracle)(kc_run *run); /* fills want and tol; compares KC_I32 and KC_U8 itself and calls kc_fail */
    void (*check)(kc_run *run);  /* more equivalences on run->dev; may be NULL. Runs last, on twin and variants */
};

/* tests/cases/<family>.c */
extern const kc_family kc_linear, kc_sample, kc_embed, kc_norm, kc_mlp, kc_gdn, kc_attention;

/* A new case with its formatted name; fill the rest through the pointer, valid until the next kc_add. */
kc_case *kc_add(kc_list *list, const char *fmt, ...) QL_PRINTF(2, 3);

/* Declares buffer number run->n_buf++ and returns it; pointers stay valid for the run. */
kc_buf *kc_buffer(kc_run *run, const char *name, kc_role role, kc_type type, int64_t n);

/* want and tol arrays of buf->n, allocated on first use (want 0, tol 0). */
double *kc_want(kc_buf *buf);
double *kc_tol(kc_buf *buf);

/* Records the first failure of the run. */
void kc_fail(kc_run *run, const char *fmt, ...) QL_PRINTF(2, 3);

/* For `check`: buffers back to their initial content; run `call` for all rows; read everything back into buf->got.
 * Return false (with kc_fail done) on failure. kc_put writes buf->host, as changed by the caller, to the device. */
bool kc_reset(kc_run *run);
bool kc_call(kc_run *run);
bool kc_fetch(kc_run *run);
bool kc_put(kc_run *run, kc_buf *buf);

/* Loads a weight on the device; failure ends the case. */
ql_weight *kc_weight(kc_run *run, const ql_weight_src *src);

/* Numbers from run->rng. */
uint64_t kc_u64(kc_run *run);
float kc_uniform(kc_run *run, float lo, float hi);
float kc_normal(kc_run *run);             /* mean 0, deviation 1 */
int32_t kc_below(kc_run *run, int32_t n); /* 0 .. n-1 */
void kc_fill_normal(kc_run *run, float *x, int64_t n, float scale);

/* ---- for the programs: kcheck and kbench -------------------------------------------------------------------------- */

extern const kc_family *const kc_families[];
extern const int32_t kc_n_family;

/* Declares, fills and places everything of a case on the device, which must be open. Returns false when it failed; end
 * it all the same. */
bool kc_begin(kc_run *run, ql_dev *dev, const kc_family *family, const kc_case *c, uint64_t seed);
void kc_end(kc_run *run);

/* kc_reset, `call` for the rows, kc_fetch. */
bool kc_once(kc_run *run, int32_t row0, int32_t n_row);

/* What a buffer holds on the device before a call. */
void kc_initial(const kc_buf *buf, void *out);

size_t kc_bytes(const kc_buf *buf);

#endif
