// A warp's buffers of the scan in shared memory, filled by cp.async.
#pragma once

#include "config.cuh"

// 2-bit keys of all rows' groups, with the scales and minima of their upper codes (TwoBitKeys).
struct ScannedKeys {
    const u8* codes;
    const u16 *scale, *minimum;
};

// 2-bit keys of a group, and the scales and minima of its keys.
struct __align__(16) ScanStage {
    u8 codes[GROUP][QUARTER];
    u16 scale[HEAD_DIM], minimum[HEAD_DIM];
};
static_assert(sizeof(ScanStage) == STAGE_BYTES, "as the launch takes it");

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Halves [N] of two arrays, by one piece of 16 bytes per lane.
template <int N> __device__ __forceinline__ void copy_pairs(u16* to0, u16* to1, const u16* from0, const u16* from1) {
    const int lane = threadIdx.x % 32, piece = lane % 16 * 8;
    if (piece < N) cp_async_16((lane < 16 ? to0 : to1) + piece, (lane < 16 ? from0 : from1) + piece);
}

// Starts copying what the scan of group `group` (of all rows) reads.
__device__ __forceinline__ void start_copy(ScanStage& stage, const ScannedKeys& keys, i64 group) {
    const int lane = threadIdx.x % 32;
    const u8* codes = keys.codes + group * GROUP * QUARTER;
#pragma unroll
    for (int i = 0; i < GROUP * QUARTER / 16; i += 32)
        cp_async_16(&stage.codes[0][0] + 16 * (i + lane), codes + 16 * (i + lane));
    copy_pairs<HEAD_DIM>(stage.scale, stage.minimum, keys.scale + group * HEAD_DIM, keys.minimum + group * HEAD_DIM);
}

template <int N> __device__ __forceinline__ void load_shared(u32 (&x)[N], SharedAddress from) {
    if constexpr (N == 1)
        x[0] = ld_shared(from);
    else
        ld_shared(x, from);
}
