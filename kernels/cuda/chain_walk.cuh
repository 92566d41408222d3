/* A block's way through a product of a chain (chain.cu), the same for its fetching, computing and finishing warps. */
#ifndef QL_KERNELS_CUDA_CHAIN_WALK_CUH
#define QL_KERNELS_CUDA_CHAIN_WALK_CUH

#include "kernels/cuda/chain_dev.cuh"

#if HAVE_WGMMA
/* A task is a tile of 16 weight rows and a part of its slices; GATED: of gate and up, two pieces, but one from `singles` on. */
struct piece_of {
    int row_tile, part;
    const struct chain_target *t;
};

/* A block's i-th task; i may be one too many. */
__device__ __forceinline__ int task_of(const struct deal &d, int i) {
    int beyond = i - d.mine;
    return beyond < 0 ? d.first + i * d.step : d.all + (int)(gridDim.x - 1 - blockIdx.x) + beyond * d.late;
}

/* How many of 0 .. n - 1 are `first` and multiples of `step` further. */
__device__ __forceinline__ int count_of(int n, int first, int step) {
    return first < min(n, step) ? (n - 1 - first) / step + 1 : 0;
}

/* First column tile of a unit of a piece. */
__device__ __forceinline__ int tile_of(const struct product &p, int unit) {
    int slice = unit * p.by_slice >> 16;
    return slice * p.cut.tiles + p.cut.begin(unit - slice * p.cut.per_slice);
}

/* Gate is 0, up 1. */
__device__ __forceinline__ int piece_of_single(const struct product &p, int task) { return (task - p.singles) & 1; }
__device__ __forceinline__ int row_tile_of(const struct product &p, int task) {
    int beyond = task - p.singles;
    return beyond < 0 ? task >> p.log_parts : p.singles + (beyond >> 1);
}

__device__ __forceinline__ struct piece_of find_piece_of(const struct product &p, int task, int piece) {
    struct piece_of at;
    at.part = task & (p.parts - 1);
    at.row_tile = row_tile_of(p, task);
    int which = p.epilogue == GATED ? piece : 0;
    while (p.epilogue != GATED && which + 1 < p.n_target && at.row_tile >= p.target[which].row_tiles) {
        at.row_tile -= p.target[which++].row_tiles;
    }
    at.t = &p.target[which];
    return at;
}

/* Units of a task, but of one from `singles` on, which has p.units. */
__device__ __forceinline__ int all_units(const struct product &p) {
    return p.epilogue == GATED ? 2 * p.units : p.units;
}
#endif

#endif
