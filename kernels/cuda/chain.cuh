/* A run of ops as the chain kernel (chain.cu) takes it, between who chooses it (chain_plan.cu) and who runs it. */
#ifndef QL_KERNELS_CUDA_CHAIN_CUH
#define QL_KERNELS_CUDA_CHAIN_CUH

#include "kernels/chain.h"
#include "kernels/cuda/unit.cuh"

#include <stddef.h>

enum {
    N_WARP = 14, /* that compute; with those that fetch and finish 16, of 128 registers a thread */
    N_THREAD = 32 * N_WARP,
    STAGE_UNITS = 4,                                   /* that are fetched together, into a slot */
    SCALES_AT = STAGE_UNITS * UNIT_TILES * TILE_BYTES, /* in a slot, of NVFP4 */
    SLOT_BYTES = SCALES_AT + STAGE_UNITS * UNIT_TILES * TILE_SCALE_BYTES,
    MAX_SLOTS = 8,
    MOST_STAGES = 8192, /* of a block in a run: up to here times 2^16 / slots, rounded up, gives their turn */
    IN_FLIGHT = 3,      /* stages asked for and not there: more only makes every other load wait longer */
    ACROSS_EDGE = 1,    /* of an op whose x is not there yet: they are in the way of what makes it */
    PLACES = 16,        /* that units are dealt to in turn (see distances in chain.cu) */
    MAX_ROWS = 4,       /* with two parts each they fill the columns of a matrix instruction */
    AHEAD = 8,          /* tasks that have been asked for and not been finished, at most */
    MAX_OPS = 24,
    MAX_UNITS = 64,                            /* of a piece */
    SUM_ARRIVALS = 2 * MAX_UNITS + N_WARP + 1, /* at a set: its units, the warps when they are done, and the rest */
    NORM_THREADS = 1024,                       /* of the norm kernel, whose order of sums this one keeps */
    NORM_KEEP = 5,
    NORM_SHARE = (NORM_KEEP * NORM_THREADS / 4 + N_THREAD - 1) / N_THREAD,
    X_MOST = 72 * 1024, /* bytes of x in shared memory that are worth fewer parts */
    PEND = 64,          /* residual numbers of a row that a block writes */
    NORMED_BY_ALL = 2,  /* rows that every block norms for itself; of more a block norms a row for all */
    MOST_ADDED = 4,     /* parts of a sum that such a block adds */
    PLAIN_PARTS = 4,    /* of a row of plain weights, at most */
    PLAIN_CHUNKS = 5,   /* of 256 columns, of a part at most where x is normed so, */
    PLAIN_ROWS = 128,   /* and so many rows of plain weights */
    ZEROS = 5 * 256,    /* bytes: x of the columns that one row leaves, of the tiles that are read behind one another */
    D = 128,
    SHARED_MAX = 227 * 1024
};

/* What a number of a marked sum is before it is there. A sum never has these bits: the NaN of arithmetic is 0x7fffffff. Who
 * adds the sum sets the marks back behind an early edge, when all have read it; blocks of `down` may then have written parts
 * of the next sum, which therefore lies apart. */
enum : uint32_t { MARK = 0xffffffff };

/* ---- the run, by value to the kernel ----------------------------------------------------------------------------- */

enum chain_op_kind { PRODUCT, RECURRENCE, COMBINE, PROOF };
enum epilogue { STORE, CONV, GATED };

struct plain_target { /* BF16 or F16 weights */
    const uint8_t *w;
    float *y;
    int ldy, n, format;
};

/* As linear.cuh's, without what the common shape makes superfluous. */
struct chain_target {
    const uint8_t *w;
    const void *scale;
    float *y;
    int ldy, n, row_tiles;
    float factor;
    int16_t row_off, col_off;
    bool row_scale;
};

/* How a product's tasks are dealt to blocks: those below `all` in turn, the rest likewise to the last `late` blocks, from the last
 * one on. The first blocks then have time for what the next op begins with. */
struct deal {
    int n, all, late;
    int half;              /* of two parts: blocks from here on have the first, those below the second; 0: not so */
    int mine, first, step; /* of a block, known to itself: how many of `all`, from which on, how far apart */
};

struct product {
    struct chain_target target[3];
    struct plain_target plain[2];
    int n_target, n_plain;
    int format, epilogue; /* epilogue of target 0; CONV or GATED */
    enum x_mode mode;
    int k, ks, n_slice, parts;
    struct cut cut;    /* of a slice */
    int units, stages; /* of a piece */
    struct deal deal;  /* of its tasks */
    int log_parts;
    int singles; /* of GATED: tasks from here on are of one tile, gate or up in turn, and leave silu(gate) and up */
    int early, early_edge;    /* tasks after which a block raises edges->early, and early edges up to that; 0: none */
    int tasks, task0, stage0; /* of a block, known to itself: its tasks, and its tasks and stages before those */
    bool single;              /* its last task is of one tile */
    int by_slice, by_task;    /* 2^16 / per_slice, and / the units of a task, rounded up */
    int part_stride;          /* between parts of y */
    /* x: rows of ldx, or the norm of x + delta */
    const float *x;
    const float *norm, *delta;
    int ldx, delta_parts, delta_stride;
    const float *times; /* rows of ldx that x is multiplied with as it is read, from a column on; NULL: nothing */
    int times_from;
    int silu; /* the target whose sums it is applied to, besides what the epilogue does; -1: none */
    int exchange,
        delta_exchange; /* which exchange of the run this product's sums are for; which delta is from; -1: none */
    float *residual;    /* where x + delta goes; NULL without delta */
    bool marked;        /* y's two parts lie where marks were, and it makes nothing else */
    float *marks;       /* delta, whose two parts then lie so: a block sets its share of them back; NULL: they do not */
    bool ahead;         /* x is there before the op before this one has ended */
    float eps;
    /* CONV */
    const float *conv;
    float *tail, *u;
};

struct recurrence {
    struct ql_gdn_args a;
    const float *z, *norm; /* z: NULL where who reads y multiplies with silu(z) */
    int16_t parts;         /* of a and b, in normed->plain from these rows on; 0: they are where `a` has them */
    int16_t a_row, b_row;
    float *y;
    float eps;
};

/* to = the sum of the parts. */
struct combine {
    const float *from;
    float *to;
    int parts, n, stride, exchange; /* as delta, delta_exchange of a product */
};

/* Parts of a sum that everybody knows (proof.cuh). */
struct proof {
    int exchange, n;
    uint32_t round;
};

struct __align__(16) chain_op {
    enum chain_op_kind kind;
    int edges; /* of the run before it; where rows are normed for all, that behind the norm is one */
    int early; /* early edges that the block's part of it begins behind; 0: it begins behind all of `edges` */
    union {
        struct product product;
        struct recurrence gdn;
        struct combine combine;
        struct proof proof;
    };
};

/* Where lanes add (chain_exchange.cuh). */
struct lanes {
    int lane, n_lane, n_exchange; /* n_exchange: of this run; 0: it has none and reads nothing of this */
    uint8_t *room[QL_CUDA_MAX_LANES];
    uint32_t *let_go, *gave_up;
    unsigned long long wait_ns;
};

/* Where a lane's room begins to hold sums: counters of the lanes' arrivals are before them, each in a sector of its own. Sums of
 * one exchange and of the next take turns: [2][parts of all lanes][rows][n]. */
enum {
    ROOM_COUNTER = 32,
    ROOM_SUMS = ROOM_COUNTER * QL_CUDA_MAX_LANES,
    ROOM_TURN = (QL_CUDA_EXCHANGE_BYTES - ROOM_SUMS) / 2,
    MOST_PARTS = 8 /* of a sum, all lanes together */
};
static_assert(QL_CUDA_MAX_LANES * QL_CUDA_CHAIN_ELEMENTS * (int)sizeof(float) <= ROOM_TURN &&
                  2 * QL_CUDA_CHAIN_ROUNDS <= MAX_OPS,
              "a proof fits");

/* Arrivals at the edges, in device memory: `count` only rises, `base` is what it was when the run began; `early` and `base_early`
 * are the same of early edges. `exchanged` counts exchanges before the run; `gone` is set once a block has given up waiting for
 * another lane. */
struct edges {
    unsigned count, base, exchanged, gone, base_early;
    __align__(32) unsigned early; /* in a sector of its own, as others wait for it */
};
static_assert(sizeof(struct edges) == EDGE_WORDS * sizeof(unsigned), "as device.cu allocates them");

/* Rows that a block each has normed for all, in device memory, and parts of their products with plain weights. */
struct normed {
    float scale[MAX_ROWS];                               /* what sums are multiplied with: shared memory's xscale */
    uint16_t x[MAX_ROWS * 2 * NORM_KEEP * NORM_THREADS]; /* as they lie in shared memory */
    float y[MAX_ROWS * NORM_KEEP * NORM_THREADS];        /* in f32, rows of k */
    float plain[PLAIN_PARTS][MAX_ROWS][PLAIN_ROWS];
};
static_assert(sizeof(struct normed) == NORMED_FLOATS * sizeof(float), "as device.cu allocates it");

struct run {
    int n_op, n_edge, n_early;                          /* edges of either kind */
    int n_row, n_seg, n_slot, by_slot,                  /* by_slot: 2^16 / n_slot, rounded up */
        set_floats, set_rows, extra_bytes;              /* set_rows: n_row, or the next power of two */
    int x_at, zeros_at, extras_at, sets_at, room_bytes; /* of shared memory */
    const int32_t *seg_row, *seg_pos, *seg_slot;        /* as ql_batch's */
    struct edges *edges;
    struct normed *normed;
    struct lanes lanes;
    struct chain_op op[MAX_OPS];
};

/* What finishes a task beyond its sums, fetched with its weights. */
struct extra {
    float scale[2][TILE_ROWS]; /* of a piece's rows */
    float4 conv[TILE_ROWS];
    float tail[][3][TILE_ROWS]; /* of each segment */
};

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

struct shared {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS];
    float part[32], most[MAX_ROWS][N_WARP]; /* of warps: sums of a norm, and the largest of a row */
    float xscale[MAX_ROWS * MAX_SLICES];
    float pend[NORMED_BY_ALL][PEND];
    float plain[4];         /* of each warp with a part of a row of plain weights */
    float gate[2][2];       /* of the recurrence, rows in turn: what is kept of the state, beta */
    uint64_t summed[AHEAD]; /* a task's units are in their set */
    int at_op[N_WARP], at_task[N_WARP];
    unsigned base, base_early, exchanged; /* of the edges, as the run began */
    int come;                             /* stages that are known to have come, from the run's first on */
    int finished;                         /* tasks whose sums are written */
    int at_product;                       /* the last op whose products have begun */
    int seg_row[MAX_ROWS + 1], seg_pos[MAX_ROWS], seg_slot[MAX_ROWS];
    struct chain_op op[MAX_OPS]; /* of the run */
};

/* Shared memory of a recurrence; what the rows take turns in is there twice. */
struct recurrence_room {
    float q[2][D], k[2][D], norm[D], z[2][D];
    float sum[8][D], out[2][8][D]; /* of each warp with a part of the state */
    float next[D * D];             /* the state of the block's next task, as it is copied */
};

/* The ring comes behind it, then what the run says. */
enum { RING_AT = (sizeof(struct shared) + 127) / 128 * 128 };

/* Tasks that have been asked for and not been finished, of so many rows of x: each has its set of sums. With
 * more than two rows fewer make room for a fifth slot of the ring. */
__device__ __host__ constexpr int ahead_of(int rows) { return rows > 2 ? 4 : AHEAD; }

static_assert(ahead_of(3) == ahead_of(4), "they have one instance of the kernel");

/* Numbers of a row of a slice that a thread can hold of x, of so many rows. */
__device__ __host__ constexpr int x_keep(int rows) { return rows > 2 ? 12 : 24; }

/* Of those at most so many are multiplied with silu(z) as they are read; with `up`, which only one row is, all of them. */
enum { TIMES_KEEP = 8 };

/* A row of plain weights in parts of whole chunks of 256 columns, in the order of linear.cu's rows_kernel; chunks of part i. */
struct plain_part {
    int parts, begin, end;
};
__device__ __host__ __forceinline__ struct plain_part part_of_plain(int k, int i) {
    int chunks = (k + 255) / 256, parts = chunks >= 16 ? 4 : chunks >= 8 ? 2 : 1;
    return plain_part{parts, chunks * i / parts, i < parts ? chunks * (i + 1) / parts : chunks * i / parts};
}

/* Columns of the widest part. */
__device__ __host__ __forceinline__ int plain_columns(int k) {
    int parts = part_of_plain(k, 0).parts;
    return 256 * ((k + 256 * parts - 1) / (256 * parts));
}

/* Warps that prepare a slice of x. */
__device__ __host__ __forceinline__ int warps_of_slice(int slices) { return slices < N_WARP ? N_WARP / slices : 1; }

/* Prepared x in shared memory, in f16 numbers: of one column the padding keeps the rows' loads in different banks; of two a row
 * has no padding, eight numbers' first parts are followed by their second ones, and these pieces lie so that what a warp loads
 * of a row at a time is 128 bytes. */
template <int COLS> __device__ __host__ __forceinline__ int x_stride(int k, int format) {
    return COLS == 2 ? 2 * k : k + (format == QL_FORMAT_NVFP4 ? 8 : 32);
}
template <int COLS> __device__ __forceinline__ int x_place(int i, int format) {
    int piece = i >> 3;
    if (format == QL_FORMAT_NVFP4) {
        piece = (piece & ~7) | (piece & 1) << 2 | (piece >> 1 & 3);
    }
    return COLS == 2 ? 16 * piece + (i & 7) : i;
}
enum { SECOND_PART = 8 }; /* from a number of a piece to its second part */

/* Launches a run on `blocks` blocks, a multiple of 4 and at most one an SM. cols: columns of a row of x, 1 or 2. */
ql_status ql_chain_launch_cuda(ql_dev *dev, const struct run *r, int cols, int blocks);

#endif
