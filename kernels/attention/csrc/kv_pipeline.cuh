// The pipeline of bulk copies that brings KV tiles into shared memory: keys of a tile in one stage, its values in the
// next. All warps copy, each a part of every stage, so that none is late for the next barrier; all warps read.
#pragma once

#include "tile_scheduler.cuh"

// The full-precision tokens of a (batch row, KV head); [0] keys, [1] values.
struct DenseKV {
    const u16* slots[2];  // slot 0 of the buffers
    int stride[2];
    int begin, end;  // visible slots, half-open
};

struct KVPipeline {
    u32 stages, full;  // shared addresses of the stages and of their mbarriers
    int warp, lane;
    int write_stage, read_stage;
    u32 parity;
    int tile, tile_end, groups;  // tile of the next copy; end of the copies; number of a row's tiles that are groups
    const u8* next_group[2];     // this warp's part of the next group's keys, values

    __device__ __forceinline__ void init() const {
        if (threadIdx.x < STAGES) mbarrier_init(full + 8 * threadIdx.x, WARPS);
        fence_proxy_async();
    }
    // Address of the next stage to read, once it is full.
    __device__ __forceinline__ u32 wait() const {
        mbarrier_wait(full + 8 * read_stage, parity);
        return stages + read_stage * STAGE_BYTES;
    }
    __device__ __forceinline__ void advance() {
        if (++read_stage == STAGES) read_stage = 0, parity ^= 1;
    }
    // Bytes from one group to the next in the planes that a warp copies.
    __device__ __forceinline__ static int group_stride(int warp, bool value) {
        return warp < 2 ? PLANE_BYTES : 2 * (value ? GROUP : HEAD_DIM);
    }
    // Starts on tiles `first` to `end` of a row with all stages but one in flight; `keys`, `values`: this warp's parts
    // of the row's groups. Codes are copied before earlier kernels have ended, full-precision tokens after.
    __device__ __forceinline__ void start(
        const DenseKV& dense, const u8* keys, const u8* values, int num_groups, int first, int end
    ) {
        tile = first, tile_end = end, groups = num_groups;
        next_group[0] = keys + i64(first) * group_stride(warp, false);
        next_group[1] = values + i64(first) * group_stride(warp, true);
#pragma unroll 1
        for (int i = 0; i < STAGES / 2; i++) {
            if (tile >= groups) pdl_wait();
            load_next<false>(dense);
            if (2 * i + 2 < STAGES) load_next<true>(dense);
        }
    }
    // Within a tile, what to load after the barrier that follows reading the previous values, then the tile's keys.
    __device__ __forceinline__ void refill_after_values(const DenseKV& dense) { load_next<STAGES % 2 == 0>(dense); }
    __device__ __forceinline__ void refill_after_keys(const DenseKV& dense) { load_next<STAGES % 2 == 1>(dense); }

    template <bool VALUE> __device__ __forceinline__ void load_next(const DenseKV& dense) {
        if (tile < tile_end) {
            const u32 to = stages + write_stage * STAGE_BYTES, barrier = full + 8 * write_stage;
            if (BITS && tile < groups) load_group<VALUE>(to, barrier);
            else load_dense<VALUE>(to, barrier, dense);
            if (++write_stage == STAGES) write_stage = 0;
        }
        tile += VALUE;
    }
    // Two warps copy half of the codes each (INT8: a plane each), one the scales and one the minima.
    template <bool VALUE> __device__ __forceinline__ void load_group(u32 to, u32 barrier) {
        constexpr int SCALE_BYTES = 2 * (VALUE ? GROUP : HEAD_DIM);
        const int bytes = warp < 2 ? CODE_BYTES / 2 : SCALE_BYTES;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, bytes);
            bulk_copy(to + (warp < 2 ? warp * (CODE_BYTES / 2) : CODE_BYTES + (warp - 2) * SCALE_BYTES),
                      next_group[VALUE], bytes, barrier);
        }
        next_group[VALUE] += group_stride(warp, VALUE);
    }
    // Adjacent tokens are copied a piece at a time, as bulk copies take long to issue. Slots past the last repeat it:
    // their probability is zero, and what is multiplied by it must be a number.
    template <bool VALUE> __device__ __forceinline__ void load_dense(u32 to, u32 barrier, const DenseKV& dense) const {
        constexpr int OWN = DENSE_TILE / WARPS;
        const int first = dense.begin + (tile - groups) * DENSE_TILE + warp * OWN;
        const int step = dense.stride[VALUE] == HEAD_DIM && first + OWN <= dense.end ? PIECE : 1, row = lane * step;
        if (lane == 0) mbarrier_arrive_expect_tx(barrier, OWN * TOKEN_BYTES);
        __syncwarp();
        if (row >= OWN) return;
        const int slot = min(first + row, dense.end - 1), piece = warp * OWN / PIECE + row / PIECE;
        bulk_copy(to + piece * (VALUE ? VALUE_PITCH : KEY_PITCH) + row % PIECE * TOKEN_BYTES,
                  dense.slots[VALUE] + i64(slot) * dense.stride[VALUE], step * TOKEN_BYTES, barrier);
    }
};
