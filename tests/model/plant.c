#include "tests/model/plant.h"

#include "runtime/base/qformat.h"

const char *const ql_site_names[QL_AT_COUNT] = {"nothing", "linear", "gdn",         "attention",    "topk",
                                                "sample",  "h2d",    "sync",        "graph launch", "reduce",
                                                "gather",  "alloc",  "weight_load", "weight data"};

static ql_planted pool[64];
static int32_t n_pool;

static bool load_flag(const int32_t *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0; }
static void set_flag(int32_t *flag, int32_t v) { __atomic_store_n(flag, v, __ATOMIC_RELEASE); }
static ql_planted *of(ql_dev *dev) { return (ql_planted *)(uintptr_t)dev->ops; }

static ql_status trip(ql_dev *dev) {
    ql_planted *f = of(dev);
    if (!load_flag(&f->armed) || __atomic_fetch_add(&f->calls, 1, __ATOMIC_RELAXED) != f->after) {
        return QL_OK;
    }
    __atomic_store_n(&f->fired_ns, ql_now_ns(), __ATOMIC_RELEASE);
    if (!f->hang) {
        return ql_fail(dev->err, QL_ERR_DEVICE, "lane %d: injected fault in %s", f->lane, ql_site_names[f->site]);
    }
    set_flag(&f->in_fault, 1);
    while (!load_flag(&f->released)) {
        ql_sleep_ms(2);
    }
    set_flag(&f->in_fault, 0);
    return QL_OK;
}

#define WRAP(op, args)                                                                                                 \
    static ql_status bad_##op(ql_dev *dev, const args *a) {                                                            \
        QL_TRY(trip(dev));                                                                                             \
        return of(dev)->ops->op(dev, a);                                                                               \
    }
WRAP(linear, ql_linear_args)
WRAP(gdn, ql_gdn_args)
WRAP(attention, ql_attention_args)
WRAP(topk, ql_topk_args)
WRAP(sample, ql_sample_args)

static ql_status bad_h2d(ql_dev *dev, void *dst, const void *src, size_t bytes) {
    QL_TRY(trip(dev));
    return of(dev)->ops->h2d(dev, dst, src, bytes);
}

static ql_status bad_sync(ql_dev *dev) {
    QL_TRY(trip(dev));
    return of(dev)->ops->sync(dev);
}

static ql_status bad_graph_launch(ql_dev *dev, void *graph) {
    QL_TRY(trip(dev));
    return of(dev)->ops->graph_launch(dev, graph);
}

static ql_status bad_alloc(ql_dev *dev, size_t bytes, const char *what, void **out) {
    QL_TRY(trip(dev));
    return of(dev)->ops->alloc(dev, bytes, what, out);
}

static ql_status bad_weight_load(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    QL_TRY(trip(dev));
    return of(dev)->ops->weight_load(dev, src, out);
}

/* Loads other codes than the file's: one sign, or one mantissa bit of a plain format, at the slice's first element. */
static ql_status bad_weight_data(ql_dev *dev, const ql_weight_src *src, ql_weight *out) {
    ql_planted *f = of(dev);
    if (__atomic_fetch_add(&f->calls, 1, __ATOMIC_RELAXED) != f->after) {
        return f->ops->weight_load(dev, src, out);
    }
    size_t row = (size_t)ql_qformat_row_bytes(src->format, src->full_k), bytes = row * (size_t)src->full_n;
    uint8_t *data = malloc(bytes);
    if (!data) {
        return ql_fail(dev->err, QL_ERR_MEMORY, "test");
    }
    memcpy(data, src->data, bytes);
    data[(size_t)src->row0[0] * row + (size_t)ql_qformat_row_bytes(src->format, src->col0)] ^= 0x80;
    ql_weight_src changed = *src;
    changed.data = data;
    changed.data_file = (ql_file_place){0};
    ql_status status = f->ops->weight_load(dev, &changed, out);
    status = status == QL_OK ? f->ops->sync(dev) : status;
    free(data);
    __atomic_store_n(&f->fired_ns, ql_now_ns(), __ATOMIC_RELEASE);
    return status;
}

static ql_status bad_reduce(ql_comm *comm, const float *src, float *dst, int64_t n) {
    QL_TRY(trip(comm->dev));
    return of(comm->dev)->reduce(comm, src, dst, n);
}

static ql_status bad_gather(ql_comm *comm, const void *src, void *dst, size_t bytes) {
    QL_TRY(trip(comm->dev));
    return of(comm->dev)->gather(comm, src, dst, bytes);
}

static void dev_opened(void *user, int32_t lane, ql_dev *dev) {
    ql_planted *f = user;
    if (f->dev_opened) {
        f->dev_opened(lane, dev);
    }
    if (lane != f->lane || f->site == QL_AT_NONE) {
        return;
    }
    f->ops = dev->ops;
    f->table = *dev->ops;
    switch (f->site) {
    case QL_AT_LINEAR: f->table.linear = bad_linear; break;
    case QL_AT_GDN: f->table.gdn = bad_gdn; break;
    case QL_AT_ATTENTION: f->table.attention = bad_attention; break;
    case QL_AT_TOPK: f->table.topk = bad_topk; break;
    case QL_AT_SAMPLE: f->table.sample = bad_sample; break;
    case QL_AT_H2D: f->table.h2d = bad_h2d; break;
    case QL_AT_SYNC: f->table.sync = bad_sync; break;
    case QL_AT_GRAPH: f->table.graph_launch = bad_graph_launch; break;
    case QL_AT_ALLOC: f->table.alloc = bad_alloc; break;
    case QL_AT_WEIGHT_LOAD: f->table.weight_load = bad_weight_load; break;
    case QL_AT_WEIGHT_DATA: f->table.weight_load = bad_weight_data; break;
    case QL_AT_NONE:
    case QL_AT_REDUCE:
    case QL_AT_GATHER:
    case QL_AT_COUNT: break;
    }
    dev->ops = &f->table;
}

static void comm_opened(void *user, int32_t lane, ql_comm *comm) {
    ql_planted *f = user;
    if (lane != f->lane) {
        return;
    }
    f->reduce = comm->reduce;
    f->gather = comm->gather;
    if (f->site == QL_AT_REDUCE) {
        comm->reduce = bad_reduce;
    } else if (f->site == QL_AT_GATHER) {
        comm->gather = bad_gather;
    }
}

static void on_log(void *user, ql_log_level level, const char *line) {
    ql_planted *f = user;
    if (level <= QL_LOG_WARN && strstr(line, "did not come back")) {
        __atomic_fetch_add(&f->left_behind, 1, __ATOMIC_RELAXED);
    }
}

ql_planted *ql_plant(ql_site site, int32_t lane, bool hang, int64_t after) {
    assert_true(n_pool < (int32_t)(sizeof pool / sizeof *pool));
    ql_planted *f = &pool[n_pool++];
    f->site = site;
    f->lane = lane;
    f->hang = hang;
    f->after = after;
    ql_test_heap_init(&f->heap);
    return f;
}

void ql_plant_return(ql_planted *f) {
    assert_ptr_equal(f, &pool[n_pool - 1]);
    n_pool--;
    *f = (ql_planted){0};
}

ql_status ql_plant_open(ql_engine **engine, const ql_options *options, ql_planted *f, ql_error *err) {
    const ql_test_hooks hooks = {.dev_opened = dev_opened, .comm_opened = comm_opened, .user = f};
    ql_options o = *options;
    o.log = on_log;
    o.log_user = f;
    return ql_engine_open_hooked(engine, &o, &hooks, err);
}

void ql_plant_arm(ql_planted *f) { set_flag(&f->armed, 1); }
int64_t ql_plant_fired(ql_planted *f) { return __atomic_load_n(&f->fired_ns, __ATOMIC_ACQUIRE); }
void ql_plant_release(ql_planted *f) { set_flag(&f->released, 1); }

void ql_plant_release_wait(ql_planted *f) {
    ql_plant_release(f);
    while (load_flag(&f->in_fault)) {
        ql_sleep_ms(1);
    }
    ql_sleep_ms(100);
}
