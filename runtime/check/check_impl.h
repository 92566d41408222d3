/* Inside of the self-checks: what their files share. check.c settles devices and names and reports, each other file is
 * one check or several of a kind.
 *
 * A check walks all its cases in the same order each time and asks of each whether it is to run; listing, filtering and
 * counting what was skipped are decided there, in one place. Cases are deterministic: inputs come from their name and
 * place alone.
 */
#ifndef QL_RUNTIME_CHECK_CHECK_IMPL_H
#define QL_RUNTIME_CHECK_CHECK_IMPL_H

#include "runtime/base/log.h"
#include "runtime/engine/engine_impl.h"

typedef struct ql_check {
    ql_options options;
    ql_allocator allocator;
    const ql_allocator *mem; /* NULL or &allocator */
    ql_device_kind kind;
    int32_t cc;       /* of the first GPU: compute capability of the code that runs there, 75 for 7.5 */
    int32_t n_device; /* GPUs; host lanes: as many as any model allows */
    int32_t ordinal[QL_MAX_LANES];
    ql_log log;
    bool run_long, listing;
    const char *const *names;
    int32_t n_names;
    bool *met; /* [n_names] a case begins with it */
    ql_check_fn fn;
    void *user;
    char name[112]; /* of the case under way */
    bool lost;      /* a lane did not come back: all that it can reach stays allocated, this too */
} ql_check;

/* Lane counts are asked for as `for (n = ql_check_lanes(c, 0); n; n = ql_check_lanes(c, n))`. */
int32_t ql_check_lanes(const ql_check *c, int32_t after);

/* Begins the case NAME.lanesN. Returns whether to run it; a case that is only listed or skipped is reported here. Every
 * case begun with true is ended with ql_check_end. */
bool ql_check_begin(ql_check *c, int32_t n_lane, const char *fmt, ...) QL_PRINTF(3, 4);

/* `outcome`'s name is filled in here. */
void ql_check_end(ql_check *c, const ql_check_case *outcome);

/* ---- made-up checkpoints of one layer (synth.c) --------------------------------------------------------------------- */

/* The part of a layer that is checked; all else in it adds nothing. HEAD: the layer adds nothing at all. */
typedef enum ql_block_part { QL_BLOCK_MLP, QL_BLOCK_GDN, QL_BLOCK_ATTENTION, QL_BLOCK_HEAD } ql_block_part;

/* A wrong decode, imitated in what the device is given. */
typedef enum ql_breakage {
    QL_BREAK_NONE,
    QL_BREAK_NIBBLES,     /* NVFP4: the other order within a byte */
    QL_BREAK_FACTOR,      /* the tensor's factor inverted */
    QL_BREAK_GROUP_SCALE, /* NVFP4: left out */
    QL_BREAK_SCALE,       /* FP8 per channel or block: the next row's */
    QL_BREAK_COLUMN,      /* one wrong column of one slice */
} ql_breakage;

enum { QL_CHECK_IDS = 176 /* rows of the embedding that are not zero, one for each row that runs */ };

typedef struct ql_check_ckpt {
    ql_checkpoint ckpt; /* what a model reads of one: configuration, tensors, memory in place of a file */
    const ql_allocator *mem;
    ql_safetensors file;
    ql_layer layer;
    ql_tensor tensor[64];
    uint8_t *memory[64]; /* of each tensor */
    int32_t n_tensor;
} ql_check_ckpt;

/* `large`: shapes of the 27B, else the smallest with 8 slices. */
ql_status ql_check_ckpt_make(ql_check_ckpt **ckpt, const ql_allocator *mem, ql_block_part part, ql_qformat format,
                             bool large, ql_breakage broken, ql_error *err);
/* The same with every quantized weight's f32 values in its place. Borrows the rest: `of` has to outlive it. */
ql_status ql_check_ckpt_decode(ql_check_ckpt **ckpt, const ql_check_ckpt *of, ql_error *err);
void ql_check_ckpt_free(ql_check_ckpt **ckpt); /* accepts NULL */

/* ---- comparing (block.c) -------------------------------------------------------------------------------------------- */

/* Error of results against expected values, channel by channel: relative L2 over the channel's rows, so that channels of
 * very different size count alike. Infinite where a NaN or infinity came, or something where nothing was expected. */
typedef struct ql_check_error {
    uint64_t compared;
    double worst;     /* of any channel */
    int32_t channel;  /* that one */
    double overall;   /* root mean square over channels */
    double magnitude; /* median over channels of their root mean square */
    double nothing;   /* part of the channels in which nothing is expected */
} ql_check_error;

/* got, want: [n_row][ld], the first `width` columns of each. */
ql_status ql_check_compare(const float *got, const float *want, int32_t n_row, int32_t width, int64_t ld,
                           const ql_allocator *mem, ql_check_error *out, ql_error *err);

/* Values of an independent program for the small shapes (golden.c): results of sequence 0, positions 0 to n_row - 1. */
typedef struct ql_check_golden {
    const char *check, *variant;
    int32_t n_row, width;
    const float *value; /* [n_row][width] */
} ql_check_golden;

/* NULL where there are none. */
const ql_check_golden *ql_check_golden_of(const char *check, const char *variant);

/* ---- the checks: run all cases of the check called so. Whatever fails is a case's outcome -------------------------- */

void ql_check_blocks(ql_check *c, const char *check);
void ql_check_collectives(ql_check *c, const char *check);
void ql_check_precision(ql_check *c, const char *check);

#endif
