/* attn_prep and attention as a list, plainly and replayed, give the bits of the two one by one: results, and the pages that they write,
 * at positions around every edge of the kernels, of one to four rows, with all heads and with a lane's; nothing of the cache changes but
 * the rows' own positions. And the time of both.
 *
 *     attend [ROUNDS [HEADS]]         HEADS: only the shape of so many query heads
 */
#include "tests/gpu/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 256, MAX_ROW = 4, MAX_CTX = 131072, PAGES = MAX_CTX / 64, ROTARY = 64, MAX_HEAD = 24, REPLAYS = 2 };

static ql_dev dev;
static ql_op op[2];
static bool as_list;

static int n_taken;    /* lists that were run as one */
static uint64_t n_few; /* of them in one launch */

static void call(int i) {
    (void)i;
    int32_t taken = 0;
    uint64_t before = dev.n_path[QL_PATH_ATTN_FEW];
    if (as_list) {
        rig_must(dev.ops->chain(&dev, op, 2, &taken));
        n_taken += taken == 2;
    }
    rig_one_by_one(&dev, op + taken, 2 - taken);
    n_few += dev.n_path[QL_PATH_ATTN_FEW] - before;
}

/* Keys, values and the scales of each: where they are, and the bytes of one position of one head; 0: the cache has none. */
struct side {
    uint8_t *at;
    size_t row;
};

static struct side side_of(const ql_kv_cache *c, int s) {
    void *const at[4] = {c->k, c->v, c->k_scale, c->v_scale};
    return (struct side){at[s], !at[s] ? 0 : s > 1 ? 8 : c->type == QL_KV_FP8 ? D : 2 * D};
}

/* The pages of a segment's rows. */
struct pages {
    uint8_t *bytes;
    size_t n;
};

/* Copies the pages of positions first .. last of every side to the host, or back. */
static void move_pages(const ql_kv_cache *c, const int32_t *page, int32_t first, int32_t last, struct pages *p,
                       bool back) {
    p->n = 0;
    for (int32_t i = first / 64; i <= last / 64; i++) {
        for (int s = 0; s < 4; s++) {
            struct side side = side_of(c, s);
            size_t bytes = side.row * (size_t)c->n_kv_head * 64;
            if (bytes) {
                uint8_t *at = side.at + (size_t)page[i] * bytes;
                if (back) {
                    rig_put(&dev, at, p->bytes + p->n, bytes);
                } else {
                    rig_fetch(&dev, p->bytes + p->n, at, bytes);
                }
                p->n += bytes;
            }
        }
    }
}

/* Those pages are as they were, but for positions first .. last. */
static bool others_same(const ql_kv_cache *c, int32_t first, int32_t last, const uint8_t *was, const uint8_t *is) {
    bool same = true;
    for (int32_t i = first / 64; i <= last / 64; i++) {
        for (int s = 0; s < 4; s++) {
            size_t row = side_of(c, s).row;
            for (int32_t r = 0; row && r < c->n_kv_head * 64; r++, was += row, is += row) {
                int32_t pos = i * 64 + r % 64;
                same &= (pos >= first && pos <= last) || memcmp(was, is, row) == 0;
            }
        }
    }
    return same;
}

/* The whole cache is what was copied there at first; if not, says where it is not and mends it. */
static bool untouched(const ql_kv_cache *c, const void *const first[4]) {
    enum { ROOM = 1 << 22 };
    static uint8_t is[ROOM];
    bool same = true;
    for (int s = 0; s < 4; s++) {
        struct side side = side_of(c, s);
        size_t bytes = side.row * (size_t)c->n_kv_head * 64 * PAGES;
        for (size_t done = 0, n; done < bytes; done += n) {
            const uint8_t *was = (const uint8_t *)first[s] + done;
            n = bytes - done < ROOM ? bytes - done : ROOM;
            rig_fetch(&dev, is, side.at + done, n);
            if (memcmp(was, is, n) != 0) {
                size_t i = 0;
                while (was[i] == is[i]) {
                    i++;
                }
                size_t row = (done + i) / side.row;
                printf("differs: side %d, page %zu, head %zu, position %zu\n", s, row / 64 / (size_t)c->n_kv_head,
                       row / 64 % (size_t)c->n_kv_head, row % 64);
                rig_put(&dev, side.at + done, was, n);
                same = false;
            }
        }
    }
    return same;
}

static uint64_t *sound_bytes(size_t n, uint64_t mask) { /* small numbers of f16 or E4M3 */
    uint64_t *p = malloc(n);
    for (size_t i = 0; i < n / 8; i++) {
        p[i] = rig_next() & mask;
    }
    return p;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 3, only = argc > 2 ? atoi(argv[2]) : 0, bad = 0, passed = 0;
    ql_cuda_device info = rig_info();
    if (info.major != 9) {
        printf("attend: 0 passed, 0 failed, 1 skipped (compute capability %d.%d has no such lists)\n", info.major,
               info.minor);
        return 0;
    }
    ql_shape shape = {.hidden = 512,
                      .vocab = 1024,
                      .vocab_local = 1024,
                      .n_head = MAX_HEAD,
                      .n_kv_head = 4,
                      .n_key_head = 1,
                      .n_value_head = 1,
                      .mlp = 512,
                      .max_row = 64,
                      .max_seg = MAX_ROW,
                      .max_out = MAX_ROW,
                      .max_ctx = MAX_CTX};
    rig_open(&dev, NULL, &shape);
    /* a lane's heads: of two lanes the second; such as share their kv heads with other lanes; none for a kv head; of eight the last */
    static const struct {
        int32_t head, kv, group, head0, kv0;
    } heads[] = {{24, 4, 6, 0, 0},  {4, 2, 2, 0, 0}, {8, 1, 8, 0, 0}, {1, 1, 1, 0, 0},
                 {12, 2, 6, 12, 2}, {5, 2, 6, 4, 0}, {2, 2, 6, 4, 0}, {3, 1, 6, 21, 3}};
    /* rows: of each segment, and its first position */
    static const struct {
        int32_t segs, len[MAX_ROW], pos[MAX_ROW];
    } batches[] = {{1, {1}, {0}},
                   {1, {1}, {63}},
                   {1, {1}, {64}},
                   {1, {1}, {127}},
                   {1, {1}, {200}},
                   {1, {1}, {511}},
                   {1, {1}, {512}},
                   {1, {1}, {575}},
                   {1, {1}, {1023}},
                   {1, {1}, {1024}},
                   {2, {1, 1}, {7, 1000}},
                   {1, {1}, {1100}},
                   {1, {1}, {8191}},
                   {1, {1}, {8192}},
                   {1, {1}, {16383}},
                   {1, {1}, {16384}},
                   {1, {1}, {MAX_CTX - 1}},
                   {2, {1, 1}, {7, 8192}},
                   {4, {1, 1, 1, 1}, {8191, 8192, 9000, 100}},
                   {1, {3}, {8190}},
                   {1, {4}, {16382}},
                   {3, {1, 1, 1}, {600, 0, 1023}},
                   {4, {1, 1, 1, 1}, {511, 1010, 64, 3}},
                   {1, {2}, {0}},
                   {1, {2}, {575}},
                   {1, {4}, {62}},
                   {1, {4}, {126}},
                   {1, {4}, {1020}},
                   {1, {4}, {1022}},
                   {2, {3, 1}, {510, 1023}},
                   {1, {1}, {63}},
                   {1, {1}, {64}},
                   {2, {1, 1}, {7, 200}},
                   {1, {1}, {950}},
                   {1, {1}, {1087}},
                   {1, {4}, {126}},
                   {4, {1, 1, 1, 1}, {511, 60, 64, 3}}};
    /* pages that the last of these have room for; the others for all */
    static const int32_t few[] = {1, 2, 4, 15, 17, 3, 8};
    enum { BATCHES = sizeof batches / sizeof *batches, FULL = BATCHES - sizeof few / sizeof *few };
    size_t side = (size_t)PAGES * 4 * 64 * D * 2;
    uint64_t *random = sound_bytes(side + 1024, 0xb7b7b7b7b7b7b7b7u),
             *scales = sound_bytes((size_t)PAGES * 4 * 64 * 8, 0x2fff2fff2fff2fffu);
    void *k = rig_copy(&dev, random, side), *v = rig_copy(&dev, random + 77, side),
         *ks = rig_copy(&dev, scales, (size_t)PAGES * 4 * 64 * 8),
         *vs = rig_copy(&dev, scales, (size_t)PAGES * 4 * 64 * 8);
    const void *const at_first[4] = {random, random + 77, scales, scales};
    float *qg = rig_floats(&dev, MAX_ROW * MAX_HEAD * 2 * D, 2.0f, 0.0f),
          *kk = rig_floats(&dev, (MAX_ROW * 4 + BATCHES) * D, 1.0f, 0.0f),
          *vv = rig_floats(&dev, (MAX_ROW * 4 + BATCHES) * D, 1.0f, 0.0f), *norm = rig_floats(&dev, 2 * D, 0.5f, 0.0f),
          *rope = rig_floats(&dev, (size_t)MAX_CTX * ROTARY, 1.0f, 0.0f),
          *q = rig_room(&dev, MAX_ROW * MAX_HEAD * D * 4);
    static int32_t page[MAX_ROW][PAGES], row_seg[MAX_ROW], row_pos[MAX_ROW], seg_row[MAX_ROW + 1];
    int32_t *all_pages_at = rig_room(&dev, sizeof page), *row_seg_at = rig_room(&dev, sizeof row_seg),
            *row_pos_at = rig_room(&dev, sizeof row_pos), *seg_row_at = rig_room(&dev, sizeof seg_row),
            *seg_pos_at = rig_room(&dev, sizeof row_pos);
    size_t o_bytes = MAX_ROW * MAX_HEAD * D * 4, page_bytes = (size_t)4 * 64 * D * 2 * 2 * 3;
    uint8_t *want = malloc(o_bytes), *got = malloc(o_bytes);
    struct pages before[MAX_ROW], after[MAX_ROW], after_list[MAX_ROW];
    for (int s = 0; s < MAX_ROW; s++) {
        before[s].bytes = malloc(page_bytes);
        after[s].bytes = malloc(page_bytes);
        after_list[s].bytes = malloc(page_bytes);
        for (int32_t i = 0; i < PAGES;
             i++) { /* in no order; several sequences go nowhere where two would share a page */
            int32_t n = i < PAGES / 4 ? 4 * i + s : (i - PAGES / 4) / 3 * 4 + 1 + (i - PAGES / 4) % 3;
            page[s][i] = n * 769 % PAGES;
        }
    }
    rig_put(&dev, all_pages_at, page, sizeof page);
    for (int type = QL_KV_F16; type <= QL_KV_FP8; type += QL_KV_FP8 - QL_KV_F16) {
        for (size_t h = 0; h < sizeof heads / sizeof *heads; h++) {
            if (only && heads[h].head != only) {
                continue;
            }
            ql_kv_cache cache = {.type = (ql_kv_type)type, .n_page = PAGES, .n_kv_head = heads[h].kv, .k = k, .v = v};
            if (type == QL_KV_FP8) {
                cache.k_scale = ks;
                cache.v_scale = vs;
            }
            for (size_t i = 0; i < BATCHES; i++) {
                int32_t rows = 0, segs = batches[i].segs, pages = i < FULL ? PAGES : few[i - FULL], ctx = QL_SHORT_CTX;
                for (int32_t s = 0; s < segs; s++) {
                    seg_row[s] = rows;
                    for (int32_t r = 0; r < batches[i].len[s]; r++) {
                        row_seg[rows] = s;
                        ctx = batches[i].pos[s] + r < QL_SHORT_CTX ? ctx : 0;
                        row_pos[rows++] = batches[i].pos[s] + r;
                    }
                }
                seg_row[segs] = rows;
                rig_put(&dev, row_seg_at, row_seg, sizeof row_seg);
                rig_put(&dev, row_pos_at, row_pos, sizeof row_pos);
                rig_put(&dev, seg_row_at, seg_row, sizeof seg_row);
                rig_put(&dev, seg_pos_at, batches[i].pos, sizeof row_pos);
                int32_t *page_at = all_pages_at;
                if (i >= FULL) { /* nothing behind them */
                    static int32_t table[MAX_ROW * PAGES];
                    for (int32_t j = 0; j < segs * pages; j++) {
                        table[j] = page[j / pages][j % pages];
                    }
                    page_at = rig_copy(&dev, table, (size_t)(segs * pages) * sizeof *table);
                }
                ql_batch batch = {.phase = QL_PHASE_GEN,
                                  .n_row = rows,
                                  .n_seg = segs,
                                  .max_page = pages,
                                  .ctx = ctx,
                                  .row_seg = row_seg_at,
                                  .row_pos = row_pos_at,
                                  .seg_row = seg_row_at,
                                  .seg_pos = seg_pos_at,
                                  .page = page_at};
                op[0] = (ql_op){.kind = QL_OP_ATTN_PREP,
                                .u.attn_prep = {.batch = &batch,
                                                .qg = qg,
                                                .k = kk + i * D, /* other numbers each time */
                                                .v = vv + i * D,
                                                .q_norm = norm,
                                                .k_norm = norm + D,
                                                .rope = rope,
                                                .q = q,
                                                .cache = &cache,
                                                .n_head = heads[h].head,
                                                .rotary = ROTARY,
                                                .eps = 1e-6f}};
                op[1] = (ql_op){.kind = QL_OP_ATTENTION,
                                .u.attention = {.batch = &batch,
                                                .q = q,
                                                .qg = qg,
                                                .cache = &cache,
                                                .o = q,
                                                .n_head = heads[h].head,
                                                .head0 = heads[h].head0,
                                                .kv_head0 = heads[h].kv0,
                                                .group = heads[h].group,
                                                .precision = QL_PREC_EXACT}};
                int wrong = 0;
                void *graph = NULL;
                n_taken = 0;
                n_few = 0;
                for (int round = 0; round <= rounds + REPLAYS; round++) {
                    as_list = round > 0;
                    for (int32_t s = 0; s < segs; s++) {
                        int32_t last = batches[i].pos[s] + batches[i].len[s] - 1;
                        move_pages(&cache, page[s], batches[i].pos[s], last, &before[s], round > 0);
                    }
                    memset(got, 0xff, o_bytes);
                    rig_put(&dev, q, got, o_bytes);
                    if (round <= rounds) {
                        call(0);
                    } else {
                        if (!graph) {
                            rig_must(ql_cuda_capture_begin(&dev));
                            call(0);
                            rig_must(ql_cuda_capture_end(&dev, &graph));
                        }
                        rig_must(ql_cuda_graph_launch(&dev, graph));
                    }
                    rig_fetch(&dev, as_list ? got : want, q, o_bytes);
                    int differs = as_list && memcmp(want, got, o_bytes) != 0;
                    for (int32_t s = 0; s < segs; s++) {
                        int32_t first = batches[i].pos[s], last = first + batches[i].len[s] - 1;
                        struct pages *to = as_list ? &after_list[s] : &after[s];
                        move_pages(&cache, page[s], first, last, to, false);
                        differs |= as_list && memcmp(after[s].bytes, to->bytes, to->n) != 0 ? 2 : 0;
                        differs |= others_same(&cache, first, last, before[s].bytes, to->bytes) ? 0 : 4;
                    }
                    wrong += differs != 0;
                    if (differs) {
                        printf("differs: %d (1: results, 2: pages, 4: pages where no row is), round %d%s\n", differs,
                               round, round > rounds ? ", replayed" : "");
                    }
                }
                ql_cuda_graph_free(&dev, graph);
                /* All short contexts and nothing else, but where 16 clusters may be more than there is room for at once. */
                uint64_t few_due = ctx > 0 ? (uint64_t)rounds + 1 : 0;
                bool room = heads[h].kv * rows < 16;
                if (n_taken != rounds + 1 || (n_few != few_due && (room || n_few != 0))) {
                    printf("differs: %d lists of %d ran as one, %llu of %llu in one launch\n", n_taken, rounds + 1,
                           (unsigned long long)n_few, (unsigned long long)few_due);
                    wrong++;
                }
                if (wrong) {
                    printf("FAIL attend.%s.h%dat%d.g%d.rows%d.segs%d.at%d.pages%d: %d of %d rounds differ\n",
                           type == QL_KV_F16 ? "f16" : "fp8", heads[h].head, heads[h].head0, heads[h].group, rows, segs,
                           batches[i].pos[0], pages, wrong, rounds + REPLAYS);
                }
                wrong ? bad++ : passed++;
                bool timed = heads[h].head == 24 && i < FULL &&
                             (rows > 1 || batches[i].pos[0] == 512 || batches[i].pos[0] > 1023);
                if (timed) {
                    char name[32] = "";
                    if (type != QL_KV_F16 || rows > 1 || batches[i].pos[0] != 512) {
                        snprintf(name, sizeof name, ".segs%d.at%d", segs, batches[i].pos[0]);
                    }
                    as_list = false;
                    double apart = rig_time(&dev, call, 32).median;
                    as_list = true;
                    double list = rig_time(&dev, call, 32).median;
                    printf("# %s%d%s: %.1f us one by one, %.1f us as a list\n",
                           !*name              ? "rows"
                           : type == QL_KV_F16 ? "f16.rows"
                                               : "fp8.rows",
                           rows, name, apart * 1e6, list * 1e6);
                }
                for (int32_t s = 0; s < segs; s++) {
                    int32_t last = batches[i].pos[s] + batches[i].len[s] - 1;
                    move_pages(&cache, page[s], batches[i].pos[s], last, &before[s], true);
                }
                if (i >= FULL) {
                    dev.ops->free(&dev, page_at);
                }
            }
            bool same = untouched(&cache, at_first);
            if (!same) {
                printf("FAIL attend.%s.h%dat%d.g%d.cache: changed elsewhere\n", type == QL_KV_F16 ? "f16" : "fp8",
                       heads[h].head, heads[h].head0, heads[h].group);
            }
            same ? passed++ : bad++;
        }
    }
    printf("attend: %d passed, %d failed, 0 skipped\n", passed, bad);
    dev.ops->close(&dev);
    return bad > 0;
}
