/* attn_prep and attention of a few generated rows at short context as one kernel, on compute capability 9.0: contract in attention.h,
 * bits of the kernels one by one (attention.cu, attention_gen.cu).
 *
 * A step has one attention after another between chains that take all of the GPU, so what counts is how long a launch takes from its first
 * load to its last store. A cluster of blocks works for a row and kv head, its blocks taking the steps of positions in turn:
 *
 *   - Each norms and rotates the queries itself while its keys and values are on their way, and the keys and values of this step's rows,
 *     which nobody else may have written yet. The block that has the row's own position writes them to the cache.
 *   - Each warp sends its 32 channels of a step's sums to one block, which folds these channels: by stores that count themselves at the
 *     receiver's barrier, since a fence would take longer than all of it.
 */
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/bulk.cuh"

static_assert((int)QL_SHORT_CTX == FOLDERS * SHORT, "a chunk a folder");

struct few {
    ql_batch batch;
    struct ql_attn_prep_args prep;
    struct ql_attention_args attn;
    struct ql_kv_cache cache;
};

template <int TYPE> struct few_shared {
    typedef step_form<TYPE> form;
    enum { STEPS = QL_SHORT_CTX / form::STEP, SLOTS = TYPE == QL_KV_FP8 ? 2 : 3 };
    struct step_slot<TYPE> slot[SLOTS];
    struct step_work<TYPE> work;
    struct own_rows<TYPE> own;
    float2 max_sum[STEPS][HEADS]; /* what is sent here: of all steps, 32 channels */
    float o[STEPS][HEADS][32];
    uint64_t sent; /* barrier: all of it has come */
};
static_assert(sizeof(struct few_shared<QL_KV_F16>) <= 227 * 1024 && sizeof(struct few_shared<QL_KV_FP8>) <= 227 * 1024,
              "what a block may have");

#if HAVE_WGMMA
__device__ __forceinline__ uint32_t address_in(uint32_t shared, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}

/* To another block's shared memory, counted by its barrier. */
__device__ __forceinline__ void send4(uint32_t to, float4 v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void send2(uint32_t to, float2 v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
}
#endif

/* Block (rank in the cluster, kv head, row). */
template <int TYPE> __global__ void __launch_bounds__(256, 1) few_kernel(const __grid_constant__ struct few r) {
#if HAVE_WGMMA
    typedef step_form<TYPE> form;
    typedef struct few_shared<TYPE> shared;
    constexpr int STEP = form::STEP, PIECES = form::ROW / 16, SLOTS = shared::SLOTS;
    extern __shared__ __align__(16) unsigned char raw[];
    shared &sh = *(shared *)raw;
    const ql_batch &b = r.batch;
    const struct ql_kv_cache &cache = r.cache;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, c = lane & 3;
    int row = blockIdx.z, kv = blockIdx.y, rank = blockIdx.x, stride = gridDim.x, h0, h1;
    uint32_t sent = shared_address(&sh.sent);
    allow_next();

    /* Nothing of what is read before the wait does this step write: rows' positions and pages, keys and values of earlier steps. */
    struct row_place here(b, row);
    int pos = here.pos;
    int near[form::PAGES]; /* pages of the block's first step, before it is known whether it has one */
#pragma unroll
    for (int i = 0; i < form::PAGES; i++) {
        near[i] = here.page[min(rank * form::PAGES + i, b.max_page - 1)];
    }
    if (tid < 16) { /* wanted soon and long not used */
        const float *norm = (tid < 8 ? r.prep.q_norm : r.prep.k_norm) + 32 * (tid & 7);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(norm));
    }
    /* Keys and values: two groups of copies a step. */
    int piece = tid % PIECES, to_k = k_piece<TYPE>(tid / PIECES, piece), to_v = v_piece(tid / PIECES, piece);
    auto fetch = [&](int slot, int at0) {
        auto &to = sh.slot[slot];
#pragma unroll
        for (int side = 0; side < 2; side++) {
#pragma unroll
            for (int j = 0; j < form::PAGES; j++) {
                int at = at0 + j * QL_PAGE;
                if (at <= pos) {
                    int page = at0 == rank * STEP ? near[j] : here.page[at / QL_PAGE];
                    int64_t base = cache_row(page, cache.n_kv_head, kv, 0);
                    fetch_page<TYPE>(side ? to.v[j * QL_PAGE] : to.k[j * QL_PAGE],
                                     (const uint8_t *)(side ? cache.v : cache.k) + base * form::BYTES,
                                     side ? to_v : to_k, piece, pos + 1 - at, here.pos0 - at);
                    if (side == 0) {
                        fetch_scales<TYPE>(to, j, cache, base, at, here.pos0);
                    }
                }
            }
            commit_async();
        }
    };
    for (int i = 0; i < SLOTS - 1; i++) {
        fetch(i, (rank + i * stride) * STEP);
    }

    heads_of(r.attn, kv, &h0, &h1);
    int nh = max(h1 - h0, 0);
    if (tid == 0) {
        barrier_init(sent, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); /* this block is here, and its barrier */
    wait_previous();
    struct prep_item it;
    if (warp < n_items(here, nh)) {
        it.load(r.prep, cache.n_kv_head, here, kv, h0, nh, warp);
    }
    float gate = 0.0f;
    if (warp < nh && rank < FOLDERS) {
        gate = r.attn.qg[((int64_t)row * r.attn.n_head + h0 + warp) * 2 * D + D + 32 * rank + lane];
    }
    prepare_rows<TYPE>(sh.work, sh.own, it, r.prep, cache, here, kv, h0, nh, pos / STEP % stride == rank);
    int steps = pos / STEP + 1; /* of the row */
    if (tid == 0 && rank < FOLDERS) {
        barrier_expect(sent, (uint32_t)(steps * nh * (sizeof sh.max_sum[0][0] + sizeof sh.o[0][0])));
    }
    __syncthreads();
    uint32_t q[16][4];
    take_q(sh.work, q);
    float back = sh.work.back[g], open = sigmoid(gate);
    bool met = false; /* all of the cluster are here */
    int slot = 0;
#pragma unroll 1
    for (int s = rank; s < steps; s += stride) {
        auto &in = sh.slot[slot];
        wait_async<2 * (SLOTS - 1) - 1>(); /* this step's keys */
        int at = s * STEP;
        put_own<TYPE>(in, sh.own, here, at, pos + 1);
        __syncthreads(); /* they are there; the step before has been used */
        fetch((slot + SLOTS - 1) % SLOTS, (s + (SLOTS - 1) * stride) * STEP);
        struct step_result sum =
            do_step<TYPE>(sh.work, in, q, back, min(pos + 1 - at, (int)STEP), [] { wait_async<2 * (SLOTS - 1)>(); });
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        if (!met) {
            asm volatile("barrier.cluster.wait;" ::: "memory");
            met = true;
        }
        if (g < nh) { /* block `warp` folds this warp's channels */
            uint32_t bar = address_in(sent, warp);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                send4(address_in(shared_address(&sh.o[s][g][4 * (2 * c + e)]), warp),
                      make_float4(sum.o[0][e], sum.o[1][e], sum.o[2][e], sum.o[3][e]), bar);
            }
            if (c == 0) {
                send2(address_in(shared_address(&sh.max_sum[s][g]), warp), make_float2(sum.top, sum.sum), bar);
            }
        }
    }
    if (!met) {
        asm volatile("barrier.cluster.wait;" ::: "memory");
    }
    if (warp >= nh || rank >= FOLDERS) {
        return; /* a block's other warps stay, and with them its shared memory, until all that is sent has come */
    }
    barrier_wait(sent, 0);
    /* Lane i: chunk i % 8, of which steps follow one another; its part of the whole, and what its steps' sums are multiplied with. */
    constexpr int PER = SHORT / STEP;
    int at = PER * (lane & 7);
    bool is = at < steps, two = PER == 2 && at + 2 <= steps;
    float2 a = is ? sh.max_sum[at][warp] : make_float2(-INFINITY, 0.0f);
    float2 z = two ? sh.max_sum[at + PER - 1][warp] : make_float2(0.0f, 0.0f);
    float most = two ? fmaxf(a.x, z.x) : a.x, a_part = 1.0f, z_part = 0.0f;
    if (two) {
        a_part = expf(a.x - most);
        z_part = expf(z.x - most);
        a.y = fmaf(a.y, a_part, z.y * z_part);
    }
    float top = most;
#pragma unroll
    for (int d = 4; d; d >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    }
    float part = is ? expf(most - top) : 0.0f, add = fmaf(a.y, part, 0.0f), o = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < FOLDERS; i++) {
        float u = PER * i < steps ? sh.o[PER * i][warp][lane] : 0.0f;
        if (PER == 2) {
            float u1 = PER * i + 1 < steps ? sh.o[PER * i + PER - 1][warp][lane] : 0.0f;
            u = fmaf(u, __shfl_sync(0xffffffffu, a_part, i), u1 * __shfl_sync(0xffffffffu, z_part, i));
        }
        u = fmaf(u, __shfl_sync(0xffffffffu, part, i), 0.0f);
        float t = __shfl_sync(0xffffffffu, add, i);
        o = i == 0 ? u : o + u;
        sum = i == 0 ? t : sum + t;
    }
    r.attn.o[((int64_t)row * r.attn.n_head + h0 + warp) * D + 32 * rank + lane] = (o / sum) * open;
#else
    __trap(); /* never launched on anything but compute capability 9.0 */
#endif
}

/* On clusters of a size that lets all of them run at once; without one it is not served. */
template <int TYPE> static ql_status run(ql_dev *dev, const struct few &r, bool *served) {
    enum { MOST = few_shared<TYPE>::STEPS, SIZES = MOST / FOLDERS };
    auto kernel = few_kernel<TYPE>;
    struct cluster_room &room = cuda(dev)->few[TYPE == QL_KV_FP8];
    static_assert((int)SIZES == 1 || (int)SIZES == 2, "blocks of a cluster: MOST, MOST / 2");
    int clusters = r.cache.n_kv_head * r.batch.n_row, bytes = sizeof(struct few_shared<TYPE>);
    cudaLaunchAttribute with[2];
    with[0].id = cudaLaunchAttributeClusterDimension;
    with[0].val.clusterDim.y = with[0].val.clusterDim.z = 1;
    with[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    with[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = (size_t)bytes;
    config.stream = cuda(dev)->stream;
    config.attrs = with;
    cuda(dev)->last_op = "attention";
    if (!room.known) {
        CU_TRY(dev, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "attention");
        CU_TRY(dev, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "attention");
        config.numAttrs = 1;
        for (int i = 0; i < SIZES; i++) {
            unsigned size = with[0].val.clusterDim.x = MOST >> i;
            config.gridDim = dim3(size, (unsigned)cuda(dev)->n_sm); /* more than there is room for */
            if (cudaOccupancyMaxActiveClusters(&room.at_once[i], kernel, &config) != cudaSuccess) {
                cudaGetLastError(); /* no clusters of this size */
                room.at_once[i] = 0;
            }
        }
        room.known = true;
    }
    config.numAttrs = 2;
    for (int i = 0; i < SIZES && !*served; i++) {
        if (room.at_once[i] >= clusters) {
            unsigned size = with[0].val.clusterDim.x = MOST >> i;
            config.gridDim = dim3(size, (unsigned)r.cache.n_kv_head, (unsigned)r.batch.n_row);
            begin_op(dev, QL_PATH_ATTN_FEW);
            CU_TRY(dev, cudaLaunchKernelEx(&config, kernel, r), "attention");
            *served = true;
        }
    }
    return QL_OK;
}

ql_status ql_attention_few_cuda(ql_dev *dev, const ql_attn_prep_args *p, const ql_attention_args *a, bool *served) {
    const ql_batch *b = a->batch;
    const ql_kv_cache *c = a->cache;
    *served = false;
    if (cuda(dev)->cc != 90 || b->phase != QL_PHASE_GEN || b->n_row < 1 || b->n_row > QL_SHORT_ROWS || p->batch != b ||
        p->cache != c || p->q != a->q || p->qg != a->qg || p->n_head != a->n_head || p->rotary != ROTARY ||
        a->group > HEADS || a->n_head < 1 || (c->type != QL_KV_F16 && c->type != QL_KV_FP8)) {
        return QL_OK;
    }
    if (b->ctx > 0 && b->ctx <= QL_SHORT_CTX) {
        struct few r = {*b, *p, *a, *c};
        QL_TRY(c->type == QL_KV_FP8 ? run<QL_KV_FP8>(dev, r, served) : run<QL_KV_F16>(dev, r, served));
    }
    if (!*served) {
        QL_TRY(ql_attention_gen_cuda(dev, a, p));
        *served = true;
    }
    return QL_OK;
}
