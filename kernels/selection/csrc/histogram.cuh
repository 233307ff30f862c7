// Ranks in a histogram of scores, by all threads of a CTA: each has BINS / THREADS adjacent bins, the first thread the
// highest ones.
#pragma once

#include "config.cuh"

constexpr int OWN_BINS = BINS / THREADS;
__device__ __forceinline__ int first_own_bin() { return BINS - OWN_BINS * (int(threadIdx.x) + 1); }

// Sums over the CTA's threads: of those before this one, and of all.
struct BlockSum {
    u32 before, all;

    __device__ __forceinline__ BlockSum(u32 own, u32 (&warp_sums)[WARPS]) : before(0), all(0) {
        const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
        u32 sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(FULL_MASK, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) warp_sums[own_warp] = sum;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            before += warp < own_warp ? warp_sums[warp] : 0;
            all += warp_sums[warp];
        }
        before += sum - own;
    }
};

// Finds the bin of the token of rank `rank` from the top, counted from 1, by the counts of the thread's own bins.
// found(i, ties): called by at most one thread, which has the bin as its i-th; it and `ties` of its tokens are chosen.
template <class Found>
__device__ __forceinline__ void find_rank(
    const u32 (&counts)[OWN_BINS], u32 rank, u32 (&warp_sums)[WARPS], const Found& found
) {
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < OWN_BINS; i++) own += counts[i];
    u32 above = BlockSum(own, warp_sums).before;
#pragma unroll
    for (int i = OWN_BINS - 1; i >= 0; i--) {
        if (above < rank && rank <= above + counts[i]) found(i, rank - above);
        above += counts[i];
    }
}
