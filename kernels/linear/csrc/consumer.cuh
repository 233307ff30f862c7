// The MMA warps, which split the K tiles of every stage between them.
#pragma once

#include "pipeline.cuh"

// `x`: the CTA's rows of x, `pitch` bytes apart; `sums`: [SUM_BUFFERS, MMA_WARPS, TILE_SUMS].
template <class Config> __device__ __forceinline__ void multiply(
    const CtaWork<Config>& work, Barriers<Config>& barriers, const u8* buffers, int stages, const u8* x, u32 pitch,
    float* x_sums, float* sums, int lane
) {
    const int warp = threadIdx.x / 32;
    // A lane loads row 8 t + g. Past the last row it loads the last row again, whose products are dropped.
    const u8* lane_x[Config::X_TILES];
#pragma unroll
    for (int t = 0; t < Config::X_TILES; t++)
        lane_x[t] = x + min(8 * t + lane / 4, work.rows - 1) * pitch + lane % 4 * 16;
    PipelineState read = {0, 0}, buffer = {0, 1};
    const int x_part_k_tiles = work.k_tiles_per_x_part();
    u64* next_x_part = barriers.x;
    int x_k_tiles = 0;  // K tiles of x that have arrived
    int offset = warp;  // this warp's first K tile of a stage, rotated by shorter stages
    bool needs_x_sums = Weights<Config>::X_SUM_COLUMNS > 0;  // the first output tile's products compute them
#pragma unroll 1
    for (int left = work.num_tiles(); left; left--) {
        float acc[Config::X_TILES][4] = {};
#pragma unroll 1
        for (int k_tile = 0; k_tile < work.k_tiles; k_tile += Weights<Config>::STAGE_K_TILES) {
            const int count = min(Weights<Config>::STAGE_K_TILES, work.k_tiles - k_tile);
            if (k_tile == x_k_tiles) Barriers<Config>::wait_for_x(next_x_part++), x_k_tiles += x_part_k_tiles;
            mbarrier_wait(barriers.full + read.index, read.parity);
            const u8* const data = buffers + read.index * Weights<Config>::STAGE_BYTES;
            if (needs_x_sums)
                Weights<Config>::template multiply_stage<true>(acc, data, lane_x, x_sums, k_tile, count, offset, lane);
            else
                Weights<Config>::template multiply_stage<false>(acc, data, lane_x, x_sums, k_tile, count, offset, lane);
            offset = (offset + Config::MMA_WARPS * Weights<Config>::STAGE_K_TILES - count) % Config::MMA_WARPS;
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barriers.empty + read.index);
            read.advance(stages);
        }
        mbarrier_wait(barriers.sums_empty + buffer.index, buffer.parity);
        store_sums<Config>(acc, sums + (buffer.index * Config::MMA_WARPS + warp) * Config::TILE_SUMS, lane);
        mbarrier_arrive(barriers.sums_full + buffer.index);
        buffer.advance(Config::SUM_BUFFERS);
        if (needs_x_sums) {  // from now on every warp needs the sums of all MMA warps
            __syncwarp();
            named_barrier_sync<1, 32 * Config::MMA_WARPS>();
            needs_x_sums = false;
        }
    }
}
