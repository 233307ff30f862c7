// The epilogue warp, which adds up the sums of the MMA warps and stores y; and the sum over a cluster that splits K.
#pragma once

#include "pipeline.cuh"

template <int COUNT> __device__ __forceinline__ float add_up(const float* sums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += sums[i * TILE_SUMS];
    return sum;
}

struct Output {
    u16* y;
    const u16* bias;     // may be null
    int outputs, width;  // outputs of the weight; columns of y, half as many with FUSE_SWIGLU

    // Position of sum `i` of a tile, i = 16 * column + output, in the order that `store_sums` writes:
    // [column / 8, output / 8, output % 8, column % 8], as lane 4 * (output % 8) + column % 8 / 2 holds two columns.
    __device__ static __forceinline__ int sum_index(int i) {
        return i / 128 * 128 + i / 8 % 2 * 64 + i % 8 * 8 + i / 16 % 8;
    }
    // The bias of all of a thread's sums, whose indices differ by multiples of 32 and so have the same output.
    __device__ __forceinline__ float thread_bias(int tile) const {
        const int own = TILE_OUTPUTS * tile + threadIdx.x % TILE_OUTPUTS;
        return bias && own < outputs ? Elem::to_float(bias[own]) : 0.0f;
    }
    __device__ __forceinline__ void put(int tile, int i, float value) const {
        y[i64(i / TILE_OUTPUTS) * width + TILE_OUTPUTS * tile + i % TILE_OUTPUTS] = Elem::from_float(value);
    }
    __device__ __forceinline__ void store(int tile, int i, float value) const {
        if (TILE_OUTPUTS * tile + i % TILE_OUTPUTS < outputs) put(tile, i, value);
    }
};

// Fused SwiGLU in the epilogue warp: activated gates of an output tile are kept until the tile that they multiply.
struct SwigluEpilogue {
    float gates[COLUMNS / 2];  // sums lane, lane + 32, ... of the tile, activated

    __device__ __forceinline__ void add_tile(
        const CtaWork& work, const Output& output, const float* sums, float bias, int tile, int lane
    ) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j++) {
            const int i = 32 * j + lane;
            if (i >= TILE_OUTPUTS * work.rows) continue;
            const float sum = bias + add_up<MMA_WARPS>(sums + Output::sum_index(i));
            if (tile < work.half()) gates[j] = sum / (1.0f + __expf(-sum));
            else output.put(tile - work.half(), i, gates[j] * sum);
        }
    }
};

// Sums of an output tile, COUNT per lane. All are read before the first is stored, so that no load waits for a store.
template <int COUNT> __device__ __forceinline__ void add_tile(
    const CtaWork& work, Barriers& barriers, const Output& output, const float* sums, float bias, float* cluster_sums,
    int own_tile, int tile, int rank, int lane
) {
    const int owner = own_tile % SPLIT_K;
    float sum[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; j++) sum[j] = add_up<MMA_WARPS>(sums + Output::sum_index(32 * j + lane));
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const int i = 32 * j + lane;
        if (i >= TILE_OUTPUTS * work.rows) continue;
        float* const received = cluster_sums + (own_tile - owner + rank) * TILE_SUMS + Output::sum_index(i);
        if (SPLIT_K == 1) output.store(tile, i, bias + sum[j]);
        else st_async(mapa(received, owner), sum[j], mapa(&barriers.cluster_sums, owner));
    }
}

// Adds up the sums of this CTA's warps, output tile by output tile. In clusters they are sent to one CTA of the
// cluster, which keeps them in `cluster_sums` [own output tile, CTA of the cluster, sum].
__device__ __forceinline__ void add_tiles(
    const CtaWork& work, Barriers& barriers, const Output& output, const float* sums, float* cluster_sums, int rank,
    int lane
) {
    PipelineState buffer = {0, 0};
    SwigluEpilogue swiglu;
    const int count = work.num_tiles();
    int tile = work.first_tile;
#pragma unroll 1
    for (int own_tile = 0; own_tile < count; own_tile++, tile = work.next_tile(tile)) {
        const float bias = SPLIT_K == 1 ? output.thread_bias(tile) : 0.0f;
        mbarrier_wait(barriers.sums_full + buffer.index, buffer.parity);
        const float* const tile_sums = sums + buffer.index * MMA_WARPS * TILE_SUMS;
        if (FUSE_SWIGLU) swiglu.add_tile(work, output, tile_sums, bias, tile, lane);
        else if (work.rows <= 2)
            add_tile<1>(work, barriers, output, tile_sums, bias, cluster_sums, own_tile, tile, rank, lane);
        else add_tile<COLUMNS / 2>(work, barriers, output, tile_sums, bias, cluster_sums, own_tile, tile, rank, lane);
        mbarrier_arrive(barriers.sums_empty + buffer.index);
        buffer.advance(SUM_BUFFERS);
    }
}

// By one lane, before any sums can arrive: sets the bytes that `store_cluster_sums` waits for.
__device__ __forceinline__ void expect_cluster_sums(const CtaWork& work, Barriers& barriers, int rank) {
    const int owned = (work.num_tiles() - rank + SPLIT_K - 1) / SPLIT_K;  // output tiles
    mbarrier_arrive_expect_tx(
        &barriers.cluster_sums, owned * SPLIT_K * TILE_OUTPUTS * work.rows * int(sizeof(float)));
}

// Adds up the sums that the cluster's CTAs have sent to this one, and stores the results, with all threads.
__device__ __forceinline__ void store_cluster_sums(
    const CtaWork& work, Barriers& barriers, const Output& output, const float* cluster_sums, int rank
) {
    mbarrier_wait_cluster(&barriers.cluster_sums, 0);
    for (int own_tile = rank; own_tile < work.num_tiles(); own_tile += SPLIT_K) {
        const int tile = work.first_tile + own_tile * work.stride;
        const float bias = output.thread_bias(tile);
        for (int i = threadIdx.x; i < TILE_OUTPUTS * work.rows; i += THREADS) {
            const float* const sums = cluster_sums + own_tile / SPLIT_K * SPLIT_K * TILE_SUMS + Output::sum_index(i);
            output.store(tile, i, bias + add_up<SPLIT_K>(sums));
        }
    }
}
