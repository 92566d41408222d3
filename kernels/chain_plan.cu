/* What of a list of ops runs as a chain: ops are matched from the first on, in the shapes that a step has, and become the run
 * that the kernel of chain.cu walks over. The first op that fits no shape ends it.
 */
#include "kernels/cuda/chain.cuh"

static_assert(MARKED_FLOATS == 2 * NORMED_BY_ALL * NORM_KEEP * NORM_THREADS, "two parts of rows that a norm adds");

/* Parts of a sum that a norm reads at most, by all blocks or by one for a row; more cost more than an op that adds them. */
static int most_parts_read(int n_row) { return n_row > NORMED_BY_ALL ? MOST_ADDED : 2; }

/* The run as it grows. */
struct builder {
    const ql_dev *dev;
    struct run *run;
    int cols, blocks;
    float *scratch;        /* for parts of row-parallel products */
    const float *parts_of; /* the sum that waits in parts, or NULL */
    const float *parts;    /* where they are; of an exchange: where they would be were it the first ever */
    int n_parts, parts_stride, exchange; /* exchange: which one they are of, or -1 */
    int n_marked;                        /* sums so far that lie in marked memory */
    int x_bytes;                         /* of the product that needs most */
    int stages;                          /* of the block that has most */
};

/* Parts of a row-parallel product: what spreads its row tiles best, and leaves x short enough for registers. 0: none. */
static int choose_parts(const struct builder *b, int row_tiles, int n_slice, int k, int n_row, int cols, int most) {
    int best = 0;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= most && parts <= n_slice; parts *= 2) {
        int64_t cost = ceil_div((int64_t)row_tiles * parts, b->blocks) * (4 / parts);
        int slices = n_slice / parts;
        if (k / n_slice <= x_keep(n_row) * 32 * warps_of_slice(slices) && n_row * cols * 2 * k / parts <= X_MOST &&
            cost < least) {
            least = cost;
            best = parts;
        }
    }
    return best;
}

static void use_batch(struct run *r, const ql_batch *b) {
    r->n_seg = b->n_seg;
    r->seg_row = b->seg_row;
    r->seg_pos = b->seg_pos;
    r->seg_slot = b->seg_slot;
}

/* How many lanes add the sum of a row-parallel product inside the chain, where `op` is the exchange that follows it; 0: none.
 * What it depends on is the same for every lane: a lane by itself in this would wait for the others in vain. */
static int lanes_that_add(const struct builder *b, const ql_linear_args *a, const ql_op *op) {
    int64_t sum = (int64_t)a->n_row * a->w->n;
    bool even = a->w->format != QL_FORMAT_FP8_BLOCK || a->w->k / a->n_slice % QL_FP8_BLOCK == 0;
    bool can = b->run->lanes.n_lane > 1 && op->kind == QL_OP_EXCHANGE && op->u.exchange.src == a->y &&
               op->u.exchange.n == sum && even && sum * MOST_PARTS * (int64_t)sizeof(float) <= ROOM_TURN;
    return can ? b->run->lanes.n_lane : 0;
}

/* Where all lanes' parts of the first exchange ever are. */
static const float *sums_of(const struct builder *b) {
    const struct lanes *l = &b->run->lanes;
    return (const float *)(l->room[l->lane] + ROOM_SUMS);
}

/* The next op of the run, behind all before it. */
static struct chain_op *add_op(struct builder *b, enum chain_op_kind kind) {
    struct run *r = b->run;
    struct chain_op *op = &r->op[r->n_op++];
    op->kind = kind;
    op->edges = r->n_edge++;
    op->early = 0;
    return op;
}

/* What a product leaves in parts, added where the ops have it. */
static void add_combine(struct builder *b) {
    if (b->parts_of) {
        int n = b->parts_stride;
        add_op(b, COMBINE)->combine = combine{b->parts, (float *)b->parts_of, b->n_parts, n, n, b->exchange};
        b->parts_of = NULL;
    }
}

/* The residual that is written by the time the last product ends, a recurrence behind it or not; NULL: none. */
static const float *residual_behind(const struct run *r) {
    int i = r->n_row > NORMED_BY_ALL ? -1 : r->n_op - 1; /* of more rows it is written before that product */
    i -= i > 0 && r->op[i].kind == RECURRENCE;
    return i >= 0 && r->op[i].kind == PRODUCT ? r->op[i].product.residual : NULL;
}

/* Where a product reads what a recurrence before it makes of the product before that, it multiplies with silu(z): nobody
 * waits for z, the last that product makes, before. */
static void multiply_behind(struct run *r, struct product *p) {
    struct chain_op *recur = r->n_op > 1 ? &r->op[r->n_op - 1] : NULL, *in = recur ? recur - 1 : NULL;
    if (!recur || recur->kind != RECURRENCE || in->kind != PRODUCT || in->product.epilogue != CONV ||
        in->product.n_target != 2) {
        return;
    }
    struct recurrence *g = &recur->gdn;
    int n = g->a.n_value_head * D;
    if (p->ks <= TIMES_KEEP * 32 * warps_of_slice(p->n_slice / p->parts) && p->x == g->y && p->ldx == n &&
        in->product.target[1].y == g->z && in->product.target[1].ldy == n) {
        p->times = g->z;
        in->product.silu = 1;
        g->z = NULL;
    }
}

/* Gate and up of the row tiles that are left over when all blocks have as many tasks: dealt to twice as many blocks, one tile each, so
 * that those which end last have half a task more than the others. The product behind multiplies what they leave. */
static void deal_singles(const struct builder *b, struct product *p) {
    struct chain_op *before = b->run->n_op > 0 ? &b->run->op[b->run->n_op - 1] : NULL;
    if (!before || before->kind != PRODUCT || before->product.epilogue != GATED || b->run->n_row != 1) {
        return;
    }
    struct product *front = &before->product;
    int left = front->deal.n % b->blocks;
    if (front->target[0].y == p->x && front->target[1].y != p->x && front->deal.n > b->blocks && left > 0 &&
        2 * left <= b->blocks) {
        front->singles = front->deal.n - left;
        front->deal.n = front->deal.all = front->deal.n + left;
        p->times = front->target[1].y;
        p->times_from = front->singles * TILE_ROWS;
    }
}

/* Blocks say when so many of a product's tasks are behind them, and that they have read its x. Returns which early edge that is. */
static int tell_early(struct run *r, struct product *p, int tasks) {
    p->early = tasks;
    p->early_edge = p->early_edge ? p->early_edge : ++r->n_early;
    return p->early_edge;
}

/* Two parts of a row-parallel product whose x the product before makes in order: the columns of the first are there long
 * before those of the second. The last blocks have the first part. They begin behind an early edge, which is returned, and
 * have a task more than if all had as many; the others, which wait, the fewer. */
static int begin_with_half(struct builder *b, struct product *p) {
    struct run *r = b->run;
    struct chain_op *before = r->n_op > 0 ? &r->op[r->n_op - 1] : NULL;
    if (!before || before->kind != PRODUCT || before->product.epilogue != GATED || r->n_row > NORMED_BY_ALL ||
        p->parts != 2 || p->exchange >= 0) {
        return 0;
    }
    struct product *front = &before->product;
    int columns = p->k / 2, early = columns / TILE_ROWS, tiles = p->deal.n / 2;
    int most = (int)ceil_div(tiles, b->blocks / 2) + 1, first = (int)ceil_div(tiles, most), second = b->blocks - first;
    if (front->target[0].y != p->x || columns % TILE_ROWS != 0 || early < b->blocks || early > front->singles ||
        ceil_div(tiles, second) >= most || b->stages + p->stages > MOST_STAGES) {
        return 0;
    }
    b->stages += p->stages;
    p->deal.half = second;
    return tell_early(r, front, early);
}

/* All that an op makes is delta, or the parts of it. */
static bool makes_delta(const struct chain_op *op, const float *delta, bool parts) {
    if (op->kind == COMBINE) {
        return op->combine.to == delta;
    }
    const struct product *p = &op->product;
    return op->kind == PRODUCT && !p->norm && p->n_target == 1 && (parts || p->target[0].y == delta);
}

/* Ops that are a recurrence of so many rows. */
static bool is_recurrence(int n_row, const ql_op *op, int n) {
    if (n < 2 || op[0].kind != QL_OP_GDN || op[1].kind != QL_OP_GATED_NORM) {
        return false;
    }
    const ql_gdn_args *a = &op[0].u.gdn;
    const ql_gated_norm_args *g = &op[1].u.gated_norm;
    return a->batch->phase == QL_PHASE_GEN && a->batch->n_row == n_row && g->o == a->o && g->n_row == n_row &&
           g->n_head == a->n_value_head;
}

/* Products of many normed rows with plain weights are left in parts, which the recurrence behind adds: they have to be its a and b.
 * `op` is what follows. Not of widths between 1,280 and 1,793 columns or 2,560 and 3,841, nor where the shares are more than the
 * blocks: such layers run one by one. */
static bool can_be_in_parts(const struct builder *b, const struct product *p, int n_row, const ql_op *op, int n) {
    const struct plain_target *t = p->plain;
    int rows = t[0].n + t[1].n;
    bool size = plain_columns(p->k) <= 256 * PLAIN_CHUNKS && rows <= PLAIN_ROWS &&
                ceil_div(rows, 4) * part_of_plain(p->k, 0).parts <= b->blocks;
    return p->n_plain == 2 && size && b->run->n_op + 2 < MAX_OPS && is_recurrence(n_row, op, n) &&
           ((op->u.gdn.a == t[0].y && op->u.gdn.b == t[1].y) || (op->u.gdn.a == t[1].y && op->u.gdn.b == t[0].y)) &&
           t[0].n == op->u.gdn.n_value_head && t[1].n == t[0].n;
}

/* [rmsnorm] linear [conv | swiglu | exchange] */
static int take_product(struct builder *b, const ql_op *op, int n) {
    struct run *r = b->run;
    const ql_rmsnorm_args *norm = op->kind == QL_OP_RMSNORM ? &op->u.rmsnorm : NULL;
    int used = norm ? 1 : 0;
    if (used >= n || op[used].kind != QL_OP_LINEAR) {
        return 0;
    }
    const ql_linear_args *a = op[used].u.linear.a;
    int group = op[used++].u.linear.n, cols = a->precision == QL_PREC_EXACT ? 2 : 1;
    bool mark = false; /* parts of the op before, which this one reads */
    bool by_row = norm && a->n_row > NORMED_BY_ALL;
    struct product p = {};
    int extra = 128;
    p.k = a->w->k;
    p.n_slice = a->n_slice;
    p.ks = p.k / p.n_slice;
    p.format = a->w->format;
    p.mode = quantized_mode(a);
    p.x = a->x;
    p.ldx = (int)a->ldx;
    p.epilogue = STORE;
    p.exchange = p.delta_exchange = p.silu = -1;
    if (a->phase != QL_PHASE_GEN || a->n_row < 1 || a->n_row > MAX_ROWS || (r->n_row && a->n_row != r->n_row) ||
        (b->cols && b->cols != cols)) {
        return 0;
    }
    for (int i = 0; i < group; i++) {
        const ql_weight *w = a[i].w;
        if (!is_plain(w->format) && has_tiles(&a[i]) && w->n % TILE_ROWS == 0 && p.n_plain == 0 && p.n_target < 3 &&
            same_family(w->format, a->w->format) && w->col_off == a->w->col_off) {
            p.target[p.n_target++] = chain_target{(const uint8_t *)w->data,
                                                  w->scale,
                                                  a[i].y,
                                                  (int)a[i].ldy,
                                                  w->n,
                                                  w->n / TILE_ROWS,
                                                  w->factor,
                                                  (int16_t)w->row_off,
                                                  (int16_t)w->col_off,
                                                  w->format == QL_FORMAT_FP8_CHANNEL};
        } else if ((w->format == QL_FORMAT_BF16 || w->format == QL_FORMAT_F16) && norm && w->k % 8 == 0 &&
                   p.n_target > 0 && p.n_plain < 2) {
            p.plain[p.n_plain++] = plain_target{(const uint8_t *)w->data, a[i].y, (int)a[i].ldy, w->n, (int)w->format};
        } else {
            return 0;
        }
    }
    if (norm) {
        if (norm->y != a->x || norm->ldy != a->ldx || norm->n != p.k || norm->n_row != a->n_row || p.n_slice != 1 ||
            p.k > NORM_KEEP * NORM_THREADS || (!by_row && p.k / b->blocks >= PEND)) {
            return 0;
        }
        p.x = norm->x;
        p.ldx = norm->n;
        p.norm = norm->w;
        p.eps = norm->eps;
        if (norm->delta) {
            bool split = norm->delta == b->parts_of;
            p.delta = split ? b->parts : norm->delta;
            p.delta_parts = split ? b->n_parts : 1;
            p.delta_stride = a->n_row * norm->n;
            p.delta_exchange = split ? b->exchange : -1;
            p.residual = norm->x;
            mark =
                split && !by_row && r->lanes.n_lane <= 1; /* a lane that has been given up must not look for numbers */
            p.ahead = r->n_op > 0 && makes_delta(&r->op[r->n_op - 1], norm->delta, split);
        }
    }
    if (b->parts_of && !(norm && norm->delta == b->parts_of && b->n_parts <= most_parts_read(a->n_row))) {
        return 0; /* the parts must be added first */
    }
    if (norm && norm->x == residual_behind(r)) {
        return 0; /* not known to be there before that product has ended */
    }
    int row_tiles = 0, lanes = 0;
    for (int i = 0; i < p.n_target; i++) {
        row_tiles += p.target[i].row_tiles;
    }
    p.parts = 1;
    if (used < n && op[used].kind == QL_OP_SWIGLU && op[used].u.swiglu.g == a[0].y && group == 2 && p.n_target == 2 &&
        op[used].u.swiglu.u == a[1].y && op[used].u.swiglu.n == a[0].w->n && a[1].w->n == a[0].w->n &&
        op[used].u.swiglu.n_row == a->n_row && a[0].ldy == a[0].w->n) {
        p.epilogue = GATED;
        p.target[0].y = op[used++].u.swiglu.y;
        row_tiles = p.target[0].row_tiles;
    } else if (used < n && op[used].kind == QL_OP_CONV && op[used].u.conv.m == a[0].y &&
               op[used].u.conv.channels == a[0].w->n && a[0].ldy == a[0].w->n &&
               (uintptr_t)op[used].u.conv.w % 16 == 0) {
        const ql_conv_args *c = &op[used++].u.conv;
        p.epilogue = CONV;
        p.conv = c->w;
        p.tail = c->tail;
        p.u = c->y;
        use_batch(r, c->batch);
        extra += 256 + r->n_seg * 192;
    } else if (!norm) {
        if (p.n_target != 1 || a->ldy != a->w->n) {
            return 0;
        }
        lanes = used < n ? lanes_that_add(b, a, &op[used]) : 0;
        p.parts =
            lanes ? choose_parts(b, row_tiles, p.n_slice, p.k, a->n_row, cols, a->n_row > NORMED_BY_ALL ? 2 : 1) : 0;
        lanes = p.parts ? lanes : 0;
        p.parts = p.parts ? p.parts : choose_parts(b, row_tiles, p.n_slice, p.k, a->n_row, cols, 4);
        if (p.parts == 0) {
            return 0;
        }
    }
    if (by_row && p.n_plain > 0 && !can_be_in_parts(b, &p, a->n_row, op + used, n - used)) {
        return 0;
    }
    if (!norm && p.epilogue != STORE &&
        (p.n_slice != 1 || p.k > x_keep(a->n_row) * 32 * warps_of_slice(1) || a->n_row * cols * 2 * p.k > X_MOST)) {
        return 0; /* as choose_parts has it */
    }
    p.cut = cut_of(p.ks / tile_k(p.format));
    p.deal.n = p.deal.all = p.singles = row_tiles * p.parts;
    p.log_parts = p.parts == 4 ? 2 : p.parts - 1;
    p.units = p.cut.per_slice * (p.n_slice / p.parts);
    p.by_slice = (int)ceil_div(1 << 16, p.cut.per_slice);
    if (p.units > MAX_UNITS) {
        return 0;
    }
    p.stages = (int)ceil_div(p.units, STAGE_UNITS);
    b->stages += (int)ceil_div(p.deal.n, b->blocks) * p.stages * (p.epilogue == GATED ? 2 : 1);
    if (b->stages > MOST_STAGES) {
        return 0;
    }
    p.part_stride = p.parts > 1 || lanes ? a->n_row * a->w->n : 0;
    b->parts_of = NULL;
    b->parts_stride = p.part_stride;
    if (lanes) {
        p.exchange = b->exchange = r->lanes.n_exchange++;
        b->parts_of = op[used++].u.exchange.dst;
        b->parts = sums_of(b);
        b->n_parts = lanes * p.parts;
    } else if (p.parts > 1) {
        if (b->dev->scratch_bytes < (size_t)p.parts * (size_t)p.part_stride * sizeof(float)) {
            return 0;
        }
        p.target[0].y = b->scratch;
        b->parts_of = a->y;
        b->parts = b->scratch;
        b->n_parts = p.parts;
        b->exchange = -1;
    }
    int k = p.k / p.parts, x_bytes = a->n_row * (cols == 2 ? x_stride<2>(k, p.format) : x_stride<1>(k, p.format)) * 2 +
                                     (norm && !by_row ? k * 4 : 0);
    int y_bytes = by_row && p.n_plain > 0 ? MAX_ROWS * plain_columns(p.k) * 4 : 0; /* before x is there */
    x_bytes = x_bytes > y_bytes ? x_bytes : y_bytes;
    r->set_rows = a->n_row > 2 ? 4 : a->n_row;
    int all = (p.epilogue == GATED ? 2 : 1) * p.units, set = all * r->set_rows * 16;
    p.by_task = (int)ceil_div(1 << 16, all);
    b->x_bytes = x_bytes > b->x_bytes ? x_bytes : b->x_bytes;
    r->set_floats = set > r->set_floats ? set : r->set_floats;
    r->n_row = a->n_row;
    r->extra_bytes = extra > r->extra_bytes ? extra : r->extra_bytes;
    b->cols = cols;
    int early = 0;
    if (!norm) {
        multiply_behind(r, &p);
        deal_singles(b, &p);
        early = begin_with_half(b, &p);
    }
    if (mark) {
        struct product *from = &r->op[r->n_op - 1].product;
        p.delta = p.marks = from->target[0].y = cuda(b->dev)->marked + b->n_marked++ % 2 * MARKED_FLOATS;
        from->marked = true;
    }
    if (p.residual && !by_row) { /* x, which is written when all have read it */
        tell_early(r, &p, p.deal.n < b->blocks ? p.deal.n : b->blocks);
    }
    if (by_row) { /* behind the norm is an edge as well */
        r->n_edge++;
    }
    struct chain_op *next = add_op(b, PRODUCT);
    next->product = p;
    next->early = early;
    return used;
}

/* Whether a recurrence needs only the first target of the product before it to begin with, u: the other is z. All blocks must
 * have tasks of that and so say when they have written them; and all warps units of the first, as what they have done before
 * (plain rows, reading x) is told by their sums. */
static bool begins_early(const struct builder *b, const struct chain_op *op, const float *u, const float *z) {
    const struct product *p = &op->product;
    return op->kind == PRODUCT && p->epilogue == CONV && p->u == u && p->n_target == 2 && p->target[1].y == z &&
           p->target[0].row_tiles >= b->blocks && p->units >= N_WARP;
}

/* Tasks that a block does while another has a head of a row, or of several, at least. */
enum { TASKS_BESIDE = 2, TASKS_BESIDE_ROWS = 3 };

/* z, of which a recurrence has need at its end alone, goes to the blocks that have no head then, or one head less: as much as does
 * not take longer. */
static void deal_beside(struct builder *b, struct product *p, int heads) {
    struct deal d = p->deal;
    int most = b->run->n_row > b->run->n_seg ? TASKS_BESIDE_ROWS : TASKS_BESIDE;
    d.late = b->blocks - heads % b->blocks;
    d.all = (int)ceil_div(p->early, b->blocks) * b->blocks;
    while (d.all < d.n && ceil_div(d.n - d.all, d.late) > most) {
        d.all += b->blocks;
    }
    if (d.late == b->blocks || d.all >= d.n) {
        return;
    }
    int64_t more = d.all / b->blocks + ceil_div(d.n - d.all, d.late) - ceil_div(d.n, b->blocks);
    if (b->stages + more * p->stages <= MOST_STAGES) {
        b->stages += (int)more * p->stages;
        p->deal = d;
    }
}

/* gdn gated_norm */
static int take_recurrence(struct builder *b, const ql_op *op, int n) {
    struct run *r = b->run;
    if (b->parts_of || r->n_row == 0 || !is_recurrence(r->n_row, op, n)) {
        return 0;
    }
    const ql_gdn_args *a = &op[0].u.gdn;
    const ql_gated_norm_args *g = &op[1].u.gated_norm;
    use_batch(r, a->batch);
    struct chain_op *last = &r->op[r->n_op - 1];
    bool early = begins_early(b, last, a->u, g->z);
    struct chain_op *recur = add_op(b, RECURRENCE);
    const struct plain_target *plain = last->product.plain;
    bool in_parts =
        r->n_row > NORMED_BY_ALL && last->kind == PRODUCT && last->product.norm && last->product.n_plain > 0;
    int parts = in_parts ? part_of_plain(last->product.k, 0).parts : 0;
    auto row_of = [&](const float *y) { return (int16_t)(in_parts && y != plain[0].y ? plain[0].n : 0); };
    recur->gdn = recurrence{*a, g->z, g->w, (int16_t)parts, row_of(a->a), row_of(a->b), g->y, g->eps};
    if (early) {
        recur->early = tell_early(r, &last->product, last->product.target[0].row_tiles);
        deal_beside(b, &last->product, r->n_seg * a->n_value_head);
    }
    bool again = r->n_row > NORMED_BY_ALL && r->n_seg * a->n_value_head > b->blocks;
    int room = (int)(again ? sizeof(struct recurrence_room) : offsetof(struct recurrence_room, next));
    b->x_bytes = room > b->x_bytes ? room : b->x_bytes;
    return 2;
}

/* A run without ops, and what builds it. */
static struct builder begin(ql_dev *dev, struct run *r) {
    const ql_cuda_exchange *x = &cuda(dev)->exchange;
    r->n_op = r->n_edge = r->n_early = r->n_row = r->n_seg = r->set_floats = r->extra_bytes = 0;
    r->edges = (struct edges *)cuda(dev)->edges;
    r->normed = (struct normed *)cuda(dev)->normed;
    r->lanes = {};
    r->lanes.lane = x->lane;
    r->lanes.n_lane = x->n_lane;
    for (int i = 0; i < x->n_lane; i++) {
        r->lanes.room[i] = (uint8_t *)x->room[i];
    }
    r->lanes.let_go = x->let_go;
    r->lanes.gave_up = x->gave_up;
    r->lanes.wait_ns = x->wait_ns;
    int n_sm = x->n_lane > 1 ? x->n_sm : cuda(dev)->n_sm;
    return builder{dev, r, 0, n_sm / 4 * 4, (float *)dev->scratch, NULL, NULL, 0, 0, -1, 0, 0, 0};
}

ql_status ql_cuda_prove_chains(ql_dev *dev, float *sum, int32_t n, int32_t rounds, uint32_t first) {
    struct run r;
    struct builder b = begin(dev, &r);
    r.n_slot = 1; /* nothing is fetched */
    r.by_slot = 1 << 16;
    r.set_rows = 1;
    r.x_at = r.zeros_at = r.extras_at = r.sets_at = r.room_bytes = RING_AT;
    b.parts_stride = n;
    b.n_parts = r.lanes.n_lane;
    b.parts = sums_of(&b);
    for (int32_t i = 0; i < rounds; i++) {
        add_op(&b, PROOF)->proof = proof{i, n, first + (uint32_t)i};
        b.parts_of = sum + (int64_t)i * n;
        b.exchange = i;
        add_combine(&b);
    }
    r.lanes.n_exchange = rounds;
    return ql_chain_launch_cuda(dev, &r, 1, b.blocks);
}

ql_status ql_chain_cuda(ql_dev *dev, const ql_op *op, int32_t n, int32_t *taken) {
    *taken = 0;
    struct cuda_dev *d = cuda(dev);
    if (d->cc / 10 != 9 || d->n_sm < 4 || d->no_chain) { /* tuned for, and tried on, compute capability 9.0 */
        return QL_OK;
    }
    struct run r;
    struct builder b = begin(dev, &r);
    int products = 0;
    while (*taken < n && r.n_op < MAX_OPS - 1) {
        int used = take_product(&b, op + *taken, n - *taken);
        products += used > 0;
        if (used == 0) {
            used = take_recurrence(&b, op + *taken, n - *taken);
        }
        if (used == 0) {
            break;
        }
        *taken += used;
        if (b.n_parts > most_parts_read(r.n_row)) {
            add_combine(&b);
        }
    }
    int x_bytes = (b.x_bytes + 127) / 128 * 128, extra_bytes = ahead_of(r.n_row) * r.extra_bytes,
        set_bytes = ahead_of(r.n_row) * r.set_floats * (int)sizeof(float), zero_bytes = r.n_row == 1 ? ZEROS : 0;
    r.n_slot = (SHARED_MAX - RING_AT - x_bytes - zero_bytes - extra_bytes - set_bytes) / SLOT_BYTES;
    r.n_slot = r.n_slot < MAX_SLOTS ? r.n_slot : MAX_SLOTS;
    if (products == 0 || r.n_slot < IN_FLIGHT) {
        *taken = 0;
        return QL_OK;
    }
    r.x_at = RING_AT + r.n_slot * SLOT_BYTES;
    r.zeros_at = r.x_at + x_bytes;
    r.extras_at = r.zeros_at + zero_bytes;
    r.sets_at = r.extras_at + extra_bytes;
    r.room_bytes = r.sets_at + set_bytes;
    r.by_slot = (int)ceil_div(1 << 16, r.n_slot);
    add_combine(&b);
    return ql_chain_launch_cuda(dev, &r, b.cols, b.blocks);
}
