/* Collectives of CUDA lanes, the host's side: what lanes share, which path serves, opening, the proof, closing. The kernels, and how
 * the peer path works, are in comm_kernels.cu.
 *
 * NCCL's launch order and the peer path never mix within one collective; which path is used is settled once.
 */
#include "runtime/lane/comm_cuda.h"

#include "runtime/base/mem.h"
#include "runtime/lane/comm_kernels.h"
#include "runtime/lane/nccl_api.h"

#include <cuda_runtime.h>
#include <string.h>

enum {
    MAX_LANES = QL_CUDA_MAX_LANES,
    CHUNK = QL_PEER_CHUNK,
    PROOF_SMALL_ROUNDS = 10000,
    PROOF_LARGE_ROUNDS = 50,
    PROOF_SMALL_BYTES = 64 << 10
};

/* One lane's memory that its peers write. */
struct lane_memory {
    uint8_t *slot;             /* [2][n_lane][cap] */
    uint32_t *flag;            /* [n_lane][n_chunk] */
    uint32_t *epoch;           /* [n_chunk], the lane's own */
    uint8_t *proof;            /* [2][cap] source and result of the proof, gone behind it */
    unsigned long long *wrong; /* elements that the proof found wrong */
    uint8_t *room;             /* of sums inside chains */
};

struct ql_comm_group {
    ql_comm_cuda_options o;
    int32_t ordinal[MAX_LANES];
    size_t cap; /* bytes of a slot, whole chunks */
    ql_nccl nccl;
    ncclComm_t nccl_comm[MAX_LANES];
    struct lane_memory lane[MAX_LANES];
    ql_peer_words *words[MAX_LANES], *device_words[MAX_LANES]; /* the same ones, as host and device see them */
    uint8_t *gathered[MAX_LANES];                              /* NCCL with more than two lanes: [n_lane][cap] */
    bool peer_ok[MAX_LANES], nccl_ok[MAX_LANES], atomics_ok[MAX_LANES];
    bool chain_tried[MAX_LANES], chain_ok[MAX_LANES];
    unsigned long long n_wrong[MAX_LANES];
    bool use_peer, use_chains;
    bool library_stays; /* NCCL's, after the group */
    int n_block[MAX_LANES], n_sm[MAX_LANES];
    uint64_t n_peer, n_nccl; /* collectives served; relaxed atomics */
    uint64_t n_proved;       /* elements; likewise */
};

/* ---- sums and gathers ---------------------------------------------------------------------------------------------- */

static ql_status cu_check(const ql_comm *c, cudaError_t e, const char *what) {
    if (e == cudaSuccess) {
        return QL_OK;
    }
    cudaGetLastError();
    return ql_fail(c->dev->err, QL_ERR_DEVICE, "lane %d: %s: %s", c->lane, what, cudaGetErrorString(e));
}

static cudaStream_t stream_of(const ql_comm *c) { return (cudaStream_t)ql_cuda_stream(c->dev); }

/* A sum, or a gather of parts that are `stride` bytes apart in dst. */
static ql_peer_exchange exchange_of(const ql_comm *c, const void *src, void *dst, size_t bytes, bool sum,
                                    size_t stride) {
    const struct ql_comm_group *g = c->group;
    ql_peer_exchange a = {.src = src,
                          .dst = dst,
                          .bytes = bytes,
                          .cap = g->cap,
                          .stride = stride,
                          .lane = c->lane,
                          .n_lane = c->n_lane,
                          .n_chunk_max = (int)(g->cap / CHUNK),
                          .sum = sum,
                          .whole = (bytes | stride | (uintptr_t)src | (uintptr_t)dst) % QL_PEER_VECTOR == 0,
                          .epoch = g->lane[c->lane].epoch,
                          .words = g->device_words[c->lane],
                          .wait_ns = (unsigned long long)g->o.wait_ms * 1000000ull};
    for (int i = 0; i < c->n_lane; i++) {
        a.slot[i] = g->lane[i].slot;
        a.flag[i] = g->lane[i].flag;
    }
    return a;
}

/* The same grid on every lane: the fewest blocks that fit on any. */
static int most_blocks(const struct ql_comm_group *g) {
    int most = g->n_block[0];
    for (int i = 1; i < g->o.n_lane; i++) {
        most = g->n_block[i] < most ? g->n_block[i] : most;
    }
    return most;
}

static ql_status peer_exchange(ql_comm *c, const void *src, void *dst, size_t bytes, bool sum, size_t stride) {
    ql_peer_exchange a = exchange_of(c, src, dst, bytes, sum, stride);
    ql_peer_launch(stream_of(c), &a, most_blocks(c->group));
    return cu_check(c, cudaGetLastError(), "reduction over peer memory");
}

static ql_status nccl_check(const ql_comm *c, ncclResult_t r, const char *what) {
    if (r == ncclSuccess) {
        return QL_OK;
    }
    return ql_fail(c->dev->err, QL_ERR_DEVICE, "lane %d: %s: NCCL: %s", c->lane, what, c->group->nccl.error_string(r));
}

/* NULL once somebody let go. */
static ncclComm_t nccl_comm_of(const ql_comm *c) {
    return __atomic_load_n(&c->group->nccl_comm[c->lane], __ATOMIC_ACQUIRE);
}

/* Why there is no communicator: the engine's first error, and never success. */
static ql_status gone(const ql_comm *c) {
    QL_TRY(ql_abort_error(c->group->o.abort, c->dev->err));
    return ql_fail(c->dev->err, QL_ERR_INTERNAL, "lane %d: its NCCL communicator is gone", c->lane);
}

static ql_status nccl_gather(ql_comm *c, const void *src, void *dst, size_t bytes) {
    struct ql_comm_group *g = c->group;
    if (!nccl_comm_of(c)) {
        return gone(c);
    }
    return nccl_check(c, g->nccl.all_gather(src, dst, bytes, ncclUint8, nccl_comm_of(c), stream_of(c)), "gather");
}

static ql_status nccl_reduce(ql_comm *c, const float *src, float *dst, int64_t n) {
    struct ql_comm_group *g = c->group;
    if (!nccl_comm_of(c)) {
        return gone(c);
    }
    if (c->n_lane == 2) { /* a + b has one order */
        return nccl_check(c,
                          g->nccl.all_reduce(src, dst, (size_t)n, ncclFloat32, ncclSum, nccl_comm_of(c), stream_of(c)),
                          "reduction");
    }
    QL_TRY(nccl_gather(c, src, g->gathered[c->lane], (size_t)n * sizeof(float)));
    ql_comm_tree_add(stream_of(c), (const float *)g->gathered[c->lane], dst, n, n, c->n_lane);
    return cu_check(c, cudaGetLastError(), "tree addition");
}

static ql_status reduce(ql_comm *c, const float *src, float *dst, int64_t n) {
    size_t bytes = (size_t)n * sizeof(float);
    if (c->n_lane == 1) {
        return cu_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream_of(c)), "reduction");
    }
    if (bytes > c->group->cap) {
        return ql_fail(c->dev->err, QL_ERR_INTERNAL, "lane %d: reduction of %zu bytes, at most %zu were planned",
                       c->lane, bytes, c->group->cap);
    }
    if (c->group->use_peer) {
        ql_dev_count(&c->group->n_peer, 1);
        return peer_exchange(c, src, dst, bytes, true, 0);
    }
    ql_dev_count(&c->group->n_nccl, 1);
    return nccl_reduce(c, src, dst, n);
}

static ql_status gather(ql_comm *c, const void *src, void *dst, size_t bytes) {
    if (c->n_lane == 1) {
        return cu_check(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream_of(c)), "gather");
    }
    if (c->group->use_peer) {
        if (bytes % 4 != 0) {
            return ql_fail(c->dev->err, QL_ERR_INTERNAL, "lane %d: gather of %zu bytes, not whole words", c->lane,
                           bytes);
        }
        ql_dev_count(&c->group->n_peer, 1);
        for (size_t at = 0, n; at < bytes; at += n) { /* as much at once as the slots hold */
            n = bytes - at < c->group->cap ? bytes - at : c->group->cap;
            QL_TRY(peer_exchange(c, (const uint8_t *)src + at, (uint8_t *)dst + at, n, false, bytes));
        }
        return QL_OK;
    }
    ql_dev_count(&c->group->n_nccl, 1);
    return nccl_gather(c, src, dst, bytes);
}

/* After a sync: what a kernel that gave up left behind. */
static ql_status check(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    if (c->n_lane == 1) {
        return QL_OK;
    }
    uint32_t error = __atomic_load_n(&g->words[c->lane]->error, __ATOMIC_ACQUIRE);
    if (error == 0) {
        return QL_OK;
    }
    if (error == QL_CUDA_LET_GO && ql_abort_raised(g->o.abort)) {
        return ql_abort_error(g->o.abort, c->dev->err);
    }
    return ql_fail(c->dev->err, QL_ERR_DEVICE, "lane %d waited %d ms for lane %d in a reduction (deadline of a wait)",
                   c->lane, g->o.wait_ms, (int)error - 1);
}

/* A lane failed or hangs. Kernels of ours see the abort word; NCCL's watch nothing, and a peer that waits for one cannot
 * let go by itself: whoever comes first ends all communicators. */
static void let_go(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    for (int i = 0; i < g->o.n_lane; i++) {
        ncclComm_t comm = __atomic_exchange_n(&g->nccl_comm[i], (ncclComm_t)NULL, __ATOMIC_ACQ_REL);
        if (comm) {
            g->nccl.comm_abort(comm);
        }
    }
}

/* ---- open ---------------------------------------------------------------------------------------------------------- */

static size_t slot_cap(size_t max_bytes) { return (max_bytes + CHUNK - 1) / CHUNK * CHUNK; }

uint64_t ql_comm_cuda_bytes(int32_t n_lane, size_t max_bytes) {
    if (n_lane == 1) {
        return 0;
    }
    uint64_t cap = slot_cap(max_bytes), n = (uint64_t)n_lane, chunks = cap / CHUNK;
    return 2 * n * cap + (n + 1) * chunks * 4 + (n_lane > 2 ? n * cap : 0) + sizeof(unsigned long long) +
           QL_CUDA_EXCHANGE_BYTES;
}

bool ql_comm_cuda_peers(const int32_t *ordinal, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < n; j++) {
            int can = 0;
            if (ordinal[i] != ordinal[j] &&
                (cudaDeviceCanAccessPeer(&can, ordinal[i], ordinal[j]) != cudaSuccess || !can)) {
                cudaGetLastError();
                return false;
            }
        }
    }
    return true;
}

ql_status ql_comm_cuda_open(ql_comm_group **group, const ql_comm_cuda_options *o, ql_error *err) {
    struct ql_comm_group *g = NULL;
    QL_TRY(ql_alloc(o->mem, 1, sizeof *g, "the lanes' shared state", (void **)&g, err));
    g->o = *o;
    memcpy(g->ordinal, o->ordinal, (size_t)o->n_lane * sizeof *g->ordinal);
    g->o.ordinal = g->ordinal;
    g->cap = slot_cap(o->max_bytes);
    ql_status status = QL_OK;
    for (int i = 0; i < o->n_lane && status == QL_OK; i++) {
        for (int j = 0; j < i && status == QL_OK; j++) {
            status = o->ordinal[i] != o->ordinal[j]
                         ? QL_OK
                         : ql_fail(err, QL_ERR_DEVICE, "GPU %d is named for lanes %d and %d", o->ordinal[i], j, i);
        }
    }
    if (o->n_lane > 1 && status == QL_OK) {
        status = ql_nccl_open(&g->nccl, err);
    }
    if (status != QL_OK) {
        ql_free(o->mem, g);
        return status;
    }
    *group = g;
    return QL_OK;
}

/* NCCL's communicators, for the engine's life. */
static ql_status open_nccl(struct ql_comm_group *g, ql_error *err) {
    int before = 0;
    cudaGetDevice(&before);
    ql_status status = ql_nccl_init_all(&g->nccl, g->nccl_comm, g->o.n_lane, g->ordinal, g->o.init_ms, err);
    cudaSetDevice(before);
    g->library_stays = status != QL_OK; /* an attempt left behind may be in it */
    return status;
}

ql_status ql_comm_cuda_bind(ql_comm_group *g, int32_t lane, ql_dev *dev, ql_comm *c) {
    *c = (ql_comm){.lane = lane,
                   .n_lane = g->o.n_lane,
                   .dev = dev,
                   .group = g,
                   .reduce = reduce,
                   .gather = gather,
                   .check = check,
                   .let_go = let_go};
    if (ql_cuda_ordinal(dev) != g->ordinal[lane]) {
        return ql_fail(dev->err, QL_ERR_INTERNAL, "lane %d has GPU %d open, its collectives are for GPU %d", lane,
                       ql_cuda_ordinal(dev), g->ordinal[lane]);
    }
    if (c->n_lane == 1) {
        return QL_OK;
    }
    struct lane_memory *m = &g->lane[lane];
    size_t n = (size_t)c->n_lane, chunks = g->cap / CHUNK;
    QL_TRY(dev->ops->alloc(dev, 2 * n * g->cap, "reduction slots", (void **)&m->slot));
    QL_TRY(dev->ops->alloc(dev, n * chunks * 4, "reduction flags", (void **)&m->flag));
    QL_TRY(dev->ops->alloc(dev, chunks * 4, "reduction epochs", (void **)&m->epoch));
    QL_TRY(dev->ops->alloc(dev, 2 * g->cap, "the proof of reductions", (void **)&m->proof));
    QL_TRY(dev->ops->alloc(dev, sizeof *m->wrong, "the proof of reductions", (void **)&m->wrong));
    QL_TRY(dev->ops->alloc(dev, QL_CUDA_EXCHANGE_BYTES, "sums inside chains", (void **)&m->room));
    if (c->n_lane > 2) {
        QL_TRY(dev->ops->alloc(dev, n * g->cap, "gathered vectors", (void **)&g->gathered[lane]));
    }
    QL_TRY(cu_check(c, cudaHostAlloc((void **)&g->words[lane], sizeof(ql_peer_words), cudaHostAllocMapped),
                    "pinned memory"));
    memset(g->words[lane], 0, sizeof(ql_peer_words));
    QL_TRY(cu_check(c, cudaHostGetDevicePointer((void **)&g->device_words[lane], g->words[lane], 0), "pinned memory"));
    ql_abort_mirror(g->o.abort, lane, &g->words[lane]->abort);
    int per_sm = ql_peer_blocks_of_sm(), n_sm = 0;
    QL_TRY(cu_check(c, cudaGetLastError(), "occupancy"));
    QL_TRY(cu_check(c, cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, ql_cuda_ordinal(dev)),
                    "device query"));
    g->n_sm[lane] = n_sm;
    g->n_block[lane] = n_sm * (per_sm < 2 ? per_sm : 2);
    return dev->ops->sync(dev);
}

ql_status ql_comm_cuda_connect(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    int own = g->ordinal[c->lane];
    bool ok = c->n_lane > 1 && !g->o.no_peer;
    g->atomics_ok[c->lane] = true;
    for (int i = 0; i < c->n_lane && ok; i++) {
        int can = 1;
        if (i == c->lane || g->ordinal[i] == own) {
            continue;
        }
        if (cudaDeviceCanAccessPeer(&can, own, g->ordinal[i]) != cudaSuccess || !can) {
            ok = false;
            break;
        }
        cudaError_t e = cudaDeviceEnablePeerAccess(g->ordinal[i], 0);
        ok = e == cudaSuccess || e == cudaErrorPeerAccessAlreadyEnabled;
        e = cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrNativeAtomicSupported, own, g->ordinal[i]);
        g->atomics_ok[c->lane] = g->atomics_ok[c->lane] && e == cudaSuccess && can;
    }
    cudaGetLastError();
    g->peer_ok[c->lane] = ok;
    return QL_OK;
}

/* ---- proof --------------------------------------------------------------------------------------------------------- */

static int proof_rounds(const ql_comm *c, int rounds) {
    return rounds * (c->group->o.proof_times > 1 ? c->group->o.proof_times : 1);
}

/* Now and then in the proof: bounds the queue, and sees an abort. */
static ql_status proof_pause(ql_comm *c) {
    ql_dev_count(&c->dev->progress, 1);
    QL_TRY(c->dev->ops->sync(c->dev));
    return check(c);
}

/* Of a path with the kernels that serve. */
static ql_status prove_path(ql_comm *c, bool peer, int64_t n, int rounds, uint32_t seed) {
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    float *src = (float *)m->proof, *dst = (float *)(m->proof + g->cap);
    rounds = proof_rounds(c, rounds);
    ql_dev_count(&g->n_proved, (uint64_t)n * (uint64_t)rounds);
    for (int r = 0; r < rounds; r++) {
        uint32_t round = seed + (uint32_t)r;
        ql_proof_fill(stream_of(c), src, n, c->lane, round);
        QL_TRY(peer ? peer_exchange(c, src, dst, (size_t)n * sizeof(float), true, 0) : nccl_reduce(c, src, dst, n));
        ql_proof_check(stream_of(c), dst, n, 1, c->n_lane, round, m->wrong);
        if (r % 256 == 255) {
            QL_TRY(proof_pause(c));
        }
    }
    return proof_pause(c);
}

/* Of short vectors over peer memory, some rounds a launch. */
static ql_status prove_short(ql_comm *c, int64_t n, int rounds, uint32_t seed) {
    enum { AT_ONCE = 8 };
    ql_peer_exchange a = exchange_of(c, NULL, NULL, (size_t)n * sizeof(float), true, 0);
    unsigned long long *wrong = c->group->lane[c->lane].wrong;
    rounds = proof_rounds(c, rounds);
    ql_dev_count(&c->group->n_proved, (uint64_t)n * (uint64_t)rounds);
    for (int r = 0; r < rounds; r += AT_ONCE) {
        int many = rounds - r < AT_ONCE ? rounds - r : AT_ONCE;
        ql_peer_prove(stream_of(c), &a, seed + (uint32_t)r, many, wrong);
        QL_TRY(cu_check(c, cudaGetLastError(), "proof of peer memory"));
        if (r / AT_ONCE % 256 == 255) {
            QL_TRY(proof_pause(c));
        }
    }
    return proof_pause(c);
}

/* Lets the device's chains add across lanes where all lanes' can. */
static bool connect_chains(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    bool can = true;
    ql_peer_words *words = g->device_words[c->lane];
    ql_cuda_exchange x = {.lane = c->lane,
                          .n_lane = c->n_lane,
                          .n_sm = g->n_sm[0],
                          .let_go = &words->abort,
                          .gave_up = &words->error,
                          .wait_ns = (uint64_t)g->o.wait_ms * 1000000u};
    for (int i = 0; i < c->n_lane; i++) {
        can = can && g->peer_ok[i] && g->atomics_ok[i];
        x.n_sm = g->n_sm[i] < x.n_sm ? g->n_sm[i] : x.n_sm;
        x.room[i] = g->lane[i].room;
    }
    return can && ql_cuda_connect_chains(c->dev, &x);
}

/* Rounds inside chains, as many in one as the result has room for. */
static ql_status prove_chains(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    float *dst = (float *)(m->proof + g->cap);
    int64_t room = (int64_t)(g->cap / sizeof(float));
    int32_t n = (int32_t)(room < QL_CUDA_CHAIN_ELEMENTS ? room : QL_CUDA_CHAIN_ELEMENTS);
    int32_t many = room / n < QL_CUDA_CHAIN_ROUNDS ? (int32_t)(room / n) : QL_CUDA_CHAIN_ROUNDS;
    int rounds = proof_rounds(c, PROOF_SMALL_ROUNDS);
    ql_dev_count(&g->n_proved, (uint64_t)n * (uint64_t)(rounds / many * many));
    for (int r = 0; r + many <= rounds; r += many) {
        uint32_t round = 300001 + (uint32_t)r;
        QL_TRY(ql_cuda_prove_chains(c->dev, dst, n, many, round));
        ql_proof_check(stream_of(c), dst, n, many, c->n_lane, round, m->wrong);
        if (r / many % 64 == 63) {
            QL_TRY(proof_pause(c));
        }
    }
    return proof_pause(c);
}

/* Every way that is open and not proved yet. Rounds of NCCL are ten times dearer and its code is proved elsewhere. */
ql_status ql_comm_cuda_prove(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    if (c->n_lane == 1) {
        return QL_OK;
    }
    bool peer = true;
    for (int i = 0; i < c->n_lane; i++) {
        peer = peer && g->peer_ok[i];
    }
    int64_t largest = (int64_t)(g->cap / sizeof(float));
    int64_t small =
        (int64_t)(PROOF_SMALL_BYTES / sizeof(float)) < largest ? (int64_t)(PROOF_SMALL_BYTES / sizeof(float)) : largest;
    bool nccl = nccl_comm_of(c) != NULL; /* open, so the others are proved */
    bool chains = !nccl && connect_chains(c);
    g->chain_tried[c->lane] = g->chain_tried[c->lane] || chains;
    enum { PEER, CHAIN, NCCL, WAYS };
    for (int way = 0; way < WAYS; way++) {
        bool is_peer = way == PEER;
        if (way == PEER ? nccl || !peer : way == CHAIN ? !chains : !nccl) {
            continue;
        }
        struct lane_memory *m = &g->lane[c->lane];
        QL_TRY(c->dev->ops->zero(c->dev, m->wrong, sizeof *m->wrong));
        if (way == CHAIN) {
            QL_TRY(prove_chains(c));
        } else {
            if (is_peer) {
                QL_TRY(prove_short(c, 4, PROOF_SMALL_ROUNDS, 1));
                QL_TRY(prove_short(c, small, PROOF_SMALL_ROUNDS, 100001));
            }
            QL_TRY(prove_path(c, is_peer, 4, 100, 1));
            QL_TRY(prove_path(c, is_peer, small, 100, 100001));
            QL_TRY(prove_path(c, is_peer, largest, is_peer ? PROOF_LARGE_ROUNDS : 5, 200001));
        }
        QL_TRY(c->dev->ops->d2h(c->dev, &g->n_wrong[c->lane], m->wrong, sizeof *m->wrong));
        QL_TRY(c->dev->ops->sync(c->dev));
        bool *ok = is_peer ? g->peer_ok : way == CHAIN ? g->chain_ok : g->nccl_ok;
        ok[c->lane] = g->n_wrong[c->lane] == 0;
    }
    return QL_OK;
}

ql_status ql_comm_cuda_settle(ql_comm_group *g, bool *again, ql_error *err) {
    *again = false;
    if (g->o.n_lane == 1) {
        return QL_OK;
    }
    bool peer = true, nccl = true, chains = true, tried = false;
    for (int i = 0; i < g->o.n_lane; i++) {
        peer = peer && g->peer_ok[i];
        nccl = nccl && g->nccl_ok[i];
        chains = chains && g->chain_ok[i];
        tried = tried || g->chain_tried[i];
    }
    if (!peer && !g->nccl_comm[0]) {
        if (!g->o.no_peer) {
            ql_logf(g->o.log, QL_LOG_WARN,
                    "reductions over peer memory are off: the GPUs cannot reach each other's memory, or "
                    "delivered wrong sums; NCCL serves them, slower");
        }
        QL_TRY(open_nccl(g, err));
        *again = true;
        return QL_OK;
    }
    if (!peer && !nccl) {
        return ql_fail(err, QL_ERR_DEVICE,
                       "no way to add across these GPUs gave right sums, NCCL %d neither; use one lane, or another "
                       "NCCL through QLANE_NCCL",
                       g->nccl.version);
    }
    if (peer && tried && !chains) {
        ql_logf(g->o.log, QL_LOG_WARN,
                "sums inside chains are off: they were wrong; sums between chains serve, slower");
    }
    g->use_peer = peer;
    g->use_chains = peer && chains;
    return QL_OK;
}

void ql_comm_cuda_begin(ql_comm *c) {
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    if (!g->use_chains) {
        ql_cuda_exchange none = {0};
        ql_cuda_connect_chains(c->dev, &none);
    }
    c->dev->ops->free(c->dev, m->proof);
    m->proof = NULL;
}

/* ---- close --------------------------------------------------------------------------------------------------------- */

void ql_comm_cuda_unbind(ql_comm *c) {
    if (!c->group || !c->dev || !c->dev->ops) {
        return;
    }
    struct ql_comm_group *g = c->group;
    struct lane_memory *m = &g->lane[c->lane];
    ql_dev *dev = c->dev;
    ncclComm_t comm = __atomic_exchange_n(&g->nccl_comm[c->lane], (ncclComm_t)NULL, __ATOMIC_ACQ_REL);
    if (comm) {
        g->nccl.comm_destroy(comm);
    }
    dev->ops->free(dev, m->slot);
    dev->ops->free(dev, m->flag);
    dev->ops->free(dev, m->epoch);
    dev->ops->free(dev, m->proof);
    dev->ops->free(dev, m->wrong);
    dev->ops->free(dev, m->room);
    dev->ops->free(dev, g->gathered[c->lane]);
    memset(m, 0, sizeof *m);
    g->gathered[c->lane] = NULL;
    if (g->words[c->lane]) {
        ql_abort_mirror(g->o.abort, c->lane, NULL);
        cudaFreeHost(g->words[c->lane]);
        g->words[c->lane] = NULL;
    }
    c->group = NULL;
}

void ql_comm_cuda_close(ql_comm_group **group) {
    struct ql_comm_group *g = *group;
    if (!g) {
        return;
    }
    int before = 0;
    cudaGetDevice(&before);
    for (int i = 0; i < g->o.n_lane; i++) { /* lanes that never got as far as bind */
        if (g->nccl_comm[i]) {
            g->nccl.comm_destroy(g->nccl_comm[i]);
        }
    }
    cudaSetDevice(before);
    cudaGetLastError();
    if (!g->library_stays) {
        ql_nccl_close(&g->nccl);
    }
    ql_free(g->o.mem, g);
    *group = NULL;
}

const char *ql_comm_cuda_path(const ql_comm_group *g) {
    return g->o.n_lane == 1 ? "none" : g->use_peer ? "peer" : "nccl";
}
int32_t ql_comm_cuda_nccl_version(const ql_comm_group *g) { return g->nccl.version; }

void ql_comm_cuda_calls(const ql_comm_group *g, uint64_t *peer, uint64_t *nccl) {
    *peer = __atomic_load_n(&g->n_peer, __ATOMIC_RELAXED);
    *nccl = __atomic_load_n(&g->n_nccl, __ATOMIC_RELAXED);
}

uint64_t ql_comm_cuda_proved(const ql_comm_group *g) { return __atomic_load_n(&g->n_proved, __ATOMIC_RELAXED); }
