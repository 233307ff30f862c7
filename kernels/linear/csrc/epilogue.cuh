// The epilogue warp, which adds up the sums of the MMA warps and stores y; and the sum over a cluster that splits K.
#pragma once

#include "pipeline.cuh"

template <class Config> struct Output {
    u16* y;
    const u16* bias;     // may be null
    int outputs, width;  // outputs of the weight; columns of y, half as many with FUSE_SWIGLU

    // The bias of all of a thread's sums, whose indices differ by multiples of 32 and so have the same output.
    __device__ __forceinline__ float thread_bias(int tile) const {
        const int output = Config::TILE_OUTPUTS * tile + threadIdx.x % Config::TILE_OUTPUTS;
        return bias && output < outputs ? Config::Elem::to_float(bias[output]) : 0.0f;
    }
    __device__ __forceinline__ void put(int tile, int i, float value) const {
        y[i64(i / Config::TILE_OUTPUTS) * width + Config::TILE_OUTPUTS * tile + i % Config::TILE_OUTPUTS] =
            Config::Elem::from_float(value);
    }
    __device__ __forceinline__ void store(int tile, int i, float value) const {
        if (Config::TILE_OUTPUTS * tile + i % Config::TILE_OUTPUTS < outputs) put(tile, i, value);
    }
};

// Fused SwiGLU in the epilogue warp: activated gates of an output tile are kept until the tile that they multiply.
template <class Config> struct SwigluEpilogue {
    float gates[Config::COLUMNS / 2];  // sums lane, lane + 32, ... of the tile, activated

    __device__ __forceinline__ void add_tile(
        const CtaWork<Config>& work, const Output<Config>& output, const float* sums, float bias, int tile, int lane
    ) {
#pragma unroll
        for (int j = 0; j < Config::COLUMNS / 2; j++) {
            const int i = 32 * j + lane;
            if (i >= Config::TILE_OUTPUTS * work.rows) continue;
            const float sum = bias + add_up<Config, Config::MMA_WARPS>(sums + sum_index(i));
            if (tile < work.half()) gates[j] = sum / (1.0f + __expf(-sum));
            else output.put(tile - work.half(), i, gates[j] * sum);
        }
    }
};

// Sums of an output tile, COUNT per lane. All are read before the first is stored, so that no load waits for a store.
template <class Config, int COUNT> __device__ __forceinline__ void add_tile(
    const CtaWork<Config>& work, Barriers<Config>& barriers, const Output<Config>& output, const float* sums,
    float bias, float* cluster_sums, int local_tile, int tile, int rank, int lane
) {
    const int owner = local_tile % Config::SPLIT_K;
    float sum[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        sum[j] = add_up<Config, Config::MMA_WARPS>(sums + sum_index(32 * j + lane));
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const int i = 32 * j + lane;
        if (i >= Config::TILE_OUTPUTS * work.rows) continue;
        float* const received =
            cluster_sums + (local_tile - owner + rank) * Config::TILE_SUMS + sum_index(i);
        if (Config::SPLIT_K == 1) output.store(tile, i, bias + sum[j]);
        else st_async(mapa(received, owner), sum[j], mapa(&barriers.cluster_sums, owner));
    }
}

// Adds up the sums of this CTA's warps, output tile by output tile. In clusters they are sent to one CTA of the
// cluster, which keeps them in `cluster_sums` [output tile of this CTA, CTA of the cluster, sum].
template <class Config> __device__ __forceinline__ void add_tiles(
    const CtaWork<Config>& work, Barriers<Config>& barriers, const Output<Config>& output, const float* sums,
    float* cluster_sums, int rank, int lane
) {
    PipelineState buffer = {0, 0};
    SwigluEpilogue<Config> swiglu;
    const int count = work.num_tiles();
    int tile = work.first_tile;
#pragma unroll 1
    for (int local_tile = 0; local_tile < count; local_tile++, tile = work.next_tile(tile)) {
        const float bias = Config::SPLIT_K == 1 ? output.thread_bias(tile) : 0.0f;
        mbarrier_wait(barriers.sums_full + buffer.index, buffer.parity);
        const float* const tile_sums = sums + buffer.index * Config::MMA_WARPS * Config::TILE_SUMS;
        if (Config::FUSE_SWIGLU) swiglu.add_tile(work, output, tile_sums, bias, tile, lane);
        else if (work.rows <= 2)
            add_tile<Config, 1>(work, barriers, output, tile_sums, bias, cluster_sums, local_tile, tile, rank, lane);
        else
            add_tile<Config, Config::COLUMNS / 2>(
                work, barriers, output, tile_sums, bias, cluster_sums, local_tile, tile, rank, lane
            );
        mbarrier_arrive(barriers.sums_empty + buffer.index);
        buffer.advance(Config::SUM_BUFFERS);
    }
}

// By one lane, before any sums can arrive: sets the bytes that `store_cluster_sums` waits for.
template <class Config>
__device__ __forceinline__ void expect_cluster_sums(const CtaWork<Config>& work, Barriers<Config>& barriers, int rank) {
    const int received = (work.num_tiles() - rank + Config::SPLIT_K - 1) / Config::SPLIT_K;  // output tiles
    mbarrier_arrive_expect_tx(
        &barriers.cluster_sums, received * Config::SPLIT_K * Config::TILE_OUTPUTS * work.rows * int(sizeof(float)));
}

// Adds up the sums that the cluster's CTAs have sent to this one, and stores the results, with all threads.
template <class Config> __device__ __forceinline__ void store_cluster_sums(
    const CtaWork<Config>& work, Barriers<Config>& barriers, const Output<Config>& output, const float* cluster_sums,
    int rank
) {
    mbarrier_wait_cluster(&barriers.cluster_sums, 0);
    for (int local_tile = rank; local_tile < work.num_tiles(); local_tile += Config::SPLIT_K) {
        const int tile = work.first_tile + local_tile * work.stride;
        const float bias = output.thread_bias(tile);
        for (int i = threadIdx.x; i < Config::TILE_OUTPUTS * work.rows; i += Config::THREADS) {
            const float* const sums = cluster_sums +
                                      local_tile / Config::SPLIT_K * Config::SPLIT_K * Config::TILE_SUMS +
                                      sum_index(i);
            output.store(tile, i, bias + add_up<Config, Config::SPLIT_K>(sums));
        }
    }
}
