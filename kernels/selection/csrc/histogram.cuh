// Ranks in a histogram of scores, by all threads of a CTA. Each thread has BINS / THREADS adjacent bins, the first
// thread the highest ones:
//
//     bin      0 .. 3     4 .. 7     ...    BINS - 8 .. BINS - 5    BINS - 4 .. BINS - 1
//     thread    511        510       ...             1                       0
#pragma once

#include "../../device/csrc/warp.cuh"

template <class Config> constexpr int BINS_PER_THREAD = Config::BINS / Config::THREADS;
template <class Config> __device__ __forceinline__ int first_bin_of_thread() {
    return Config::BINS - BINS_PER_THREAD<Config> * (int(threadIdx.x) + 1);
}

// Sums over the CTA's threads: of those before this one, and of all. warp_sums: scratch in shared memory.
template <int WARPS> struct BlockSum {
    u32 before, all;

    __device__ __forceinline__ BlockSum(u32 x, u32 (&warp_sums)[WARPS]) : before(0), all(0) {
        const int lane = threadIdx.x % 32, this_warp = threadIdx.x / 32;
        const u32 sum = inclusive_sum(x, lane);
        if (lane == 31) warp_sums[this_warp] = sum;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            before += warp < this_warp ? warp_sums[warp] : 0;
            all += warp_sums[warp];
        }
        before += sum - x;
    }
};

// Finds the bin of the token of rank `rank` from the top, counted from 1. counts: of this thread's bins.
// visit(i, ties): called by at most one thread, whose i-th bin that is; `ties` of the bin's tokens reach the rank.
template <int COUNT, int WARPS, class Visit>
__device__ __forceinline__ void find_rank(
    const u32 (&counts)[COUNT], u32 rank, u32 (&warp_sums)[WARPS], const Visit& visit
) {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += counts[i];
    u32 above = BlockSum(sum, warp_sums).before;
#pragma unroll
    for (int i = COUNT - 1; i >= 0; i--) {
        if (above < rank && rank <= above + counts[i]) visit(i, rank - above);
        above += counts[i];
    }
}
