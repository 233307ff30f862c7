// The producer warp, which streams the weight through the pipeline, and the copy of x.
#pragma once

#include "pipeline.cuh"

// The next stage of a CTA's work: `k_tile` counts from the CTA's k_begin.
template <class Config> struct StageCursor {
    int tile, k_tile;

    __device__ __forceinline__ int count(const CtaWork<Config>& work) const {
        return min(Weights<Config>::STAGE_K_TILES, work.k_tiles - k_tile);
    }
    __device__ __forceinline__ void advance(const CtaWork<Config>& work) {
        if ((k_tile += Weights<Config>::STAGE_K_TILES) >= work.k_tiles) k_tile = 0, tile = work.next_tile(tile);
    }
};

// For one lane: copies every stage of the CTA's work as buffers become empty. Weights are constant, so it does not wait
// for earlier kernels. Fewer stages are in flight at once before x has arrived than after: a flood of copies would
// delay x, and all that must happen before it.
template <class Config> __device__ __forceinline__ void load_weights(
    const Weights<Config>& weights, const CtaWork<Config>& work, Barriers<Config>& barriers, u8* buffers,
    const LinearParams& p
) {
    PipelineState write = {0, 1};  // the phase before the first counts as complete
    PipelineState arrived = {0, 0};
    StageCursor<Config> stage = {work.first_tile, 0};
    const int count = work.num_tiles() * work.stages_per_tile();
    int limit = p.stages_before_x, in_flight = 0;
    if (count <= p.trigger_stages) pdl_launch_dependents();
#pragma unroll 1
    for (int i = count - 1; i >= 0; i--) {
        while (in_flight >= limit) {
            mbarrier_wait(barriers.full + arrived.index, arrived.parity);
            arrived.advance(p.stages);
            in_flight--;
            if (limit != p.stages_after_x && mbarrier_test(barriers.x, 0)) limit = p.stages_after_x;
        }
        mbarrier_wait(barriers.empty + write.index, write.parity);
        weights.copy(
            buffers + write.index * Weights<Config>::STAGE_BYTES, stage.tile, work.k_begin + stage.k_tile,
            stage.count(work), barriers.full + write.index
        );
        in_flight++;
        stage.advance(work);
        write.advance(p.stages);
        if (i == p.trigger_stages) pdl_launch_dependents();
    }
}

// For one lane, before any copy of x can arrive: what the barriers will count.
template <class Config>
__device__ __forceinline__ void expect_x(const CtaWork<Config>& work, Barriers<Config>& barriers) {
    const int part_k_tiles = work.k_tiles_per_x_part();
    for (int k_tile = 0, i = 0; k_tile < work.k_tiles; k_tile += part_k_tiles, i++)
        mbarrier_arrive_expect_tx(
            barriers.x + i, work.rows * min(part_k_tiles, work.k_tiles - k_tile) * Weights<Config>::K_TILE * 2
        );
}

// For one lane. Rows of x start an odd number of 64 bytes apart, so that the 16-byte loads of a warp (64 bytes of each
// of 8 rows) use every bank equally. CTAs of a cluster that need the same rows send them to each other.
template <class Config> __device__ __forceinline__ void load_x_rows(
    u8* to, u32 pitch, const u8* x, i64 row_bytes, const CtaWork<Config>& work, Barriers<Config>& barriers
) {
    const int first = blockIdx.x % Config::X_MULTICAST, part_k_tiles = work.k_tiles_per_x_part();
    u64* full = barriers.x;
#pragma unroll 1
    for (int k_tile = 0; k_tile < work.k_tiles; k_tile += part_k_tiles, full++) {
        const int bytes = min(part_k_tiles, work.k_tiles - k_tile) * Weights<Config>::K_TILE * 2,
                  skip = k_tile * Weights<Config>::K_TILE * 2;
        u32 to_row = SharedAddress(to).value + first * pitch + skip;
        const u8* from = x + first * row_bytes + skip;
#pragma unroll 4
        for (int row = first; row < work.rows; row += Config::X_MULTICAST) {
            if (Config::X_MULTICAST == 1) bulk_copy(to_row, from, bytes, full);
            else bulk_copy_multicast(to_row, from, bytes, full, Config::X_MULTICAST);
            to_row += Config::X_MULTICAST * pitch, from += Config::X_MULTICAST * row_bytes;
        }
    }
}
