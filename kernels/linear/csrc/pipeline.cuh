// A CTA's share of the product, and the barriers by which its warps pass on stages and sums.
#pragma once

#include "dense.cuh"
#include "handover.cuh"
#include "quantized.cuh"

// Output tiles first_tile, first_tile + stride, ... of the weight's `tiles`, `k_tiles` K tiles of the inputs from
// `k_begin` on, and `rows` rows of x. With FUSE_SWIGLU tiles are of the first half of the outputs, the gates, and each
// is followed by the tile that it multiplies, at the same offset in the second half. No CTA has more than `max_tiles`,
// and none has more than one (or one pair) fewer.
template <class Config> struct CtaWork {
    int first_tile, stride, tiles, k_begin, k_tiles, rows, max_tiles;

    __device__ __forceinline__ int half() const { return tiles / 2; }
    __device__ __forceinline__ int num_tiles() const {
        const int step = Config::FUSE_SWIGLU ? 2 : 1, last = first_tile + (max_tiles / step - 1) * stride;
        return last < tiles / step ? max_tiles : max_tiles - step;
    }
    __device__ __forceinline__ int next_tile(int tile) const {
        if (!Config::FUSE_SWIGLU) return tile + stride;
        return tile < half() ? tile + half() : tile - half() + stride;
    }
    __device__ __forceinline__ int stages_per_tile() const {
        return (k_tiles + Weights<Config>::STAGE_K_TILES - 1) / Weights<Config>::STAGE_K_TILES;
    }
    // K tiles of each part in which x arrives, in whole stages.
    __device__ __forceinline__ int k_tiles_per_x_part() const {
        return Config::X_PARTS == 1
                   ? k_tiles
                   : (stages_per_tile() + Config::X_PARTS - 1) / Config::X_PARTS * Weights<Config>::STAGE_K_TILES;
    }
};

template <class Config> struct Barriers {
    u64 full[Config::MAX_STAGES], empty[Config::MAX_STAGES];             // stages of the pipeline
    u64 sums_full[Config::SUM_BUFFERS], sums_empty[Config::SUM_BUFFERS];  // buffers of an output tile's sums
    u64 x[Config::X_PARTS];
    u64 cluster_sums;  // from other CTAs of the cluster

    // For one lane of each warp: setting one up takes 75 cycles.
    __device__ __forceinline__ void init(int warp, int stages) {
        for (int i = warp; i < stages; i += Config::WARPS)
            mbarrier_init(full + i, 1), mbarrier_init(empty + i, Config::MMA_WARPS);
        for (int i = Config::WARPS - 1 - warp; i <= Config::SUM_BUFFERS + Config::X_PARTS; i += Config::WARPS) {
            if (i < Config::SUM_BUFFERS)
                mbarrier_init(sums_full + i, 32 * Config::MMA_WARPS), mbarrier_init(sums_empty + i, 32);
            else if (i < Config::SUM_BUFFERS + Config::X_PARTS)
                mbarrier_init(x + i - Config::SUM_BUFFERS, Config::INTEGER ? Config::MMA_WARPS : 1);
            else mbarrier_init(&cluster_sums, 1);
        }
        fence_mbarrier_init();
    }
    __device__ static __forceinline__ void wait_for_x(u64* part) {  // one of `x`
        if (Config::X_MULTICAST > 1) mbarrier_wait_cluster(part, 0);
        else mbarrier_wait(part, 0);
    }
};
