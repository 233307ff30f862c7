// Radix selection over a cluster: histograms of keys, and the bin in which a wanted weight is reached.
#pragma once

#include "row.cuh"

struct Bin {
    u32 index, above, weight;  // where the wanted weight is reached, the weight of the bins above, and its own
};

struct PartStatistics {
    float peak, floor, mass;  // peak and mass of a CTA's logits; none of the row's top k is below the floor
};

struct SharedState {
    u32 own[BINS];     // this CTA's histogram
    u32 merged[BINS];  // the row's, in the cluster's first CTA
    Bin found;         // in the first CTA
    PartStatistics part;
    u32 sums[WARPS];
    float floats[WARPS];
};

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Joins a value of every thread of the CTA by `join_two`.
template <class Join>
__device__ __forceinline__ float cta_reduce(float value, float* scratch, const Join& join_two) {
    for (int step = 16; step; step /= 2) value = join_two(value, __shfl_xor_sync(FULL_MASK, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < WARPS; ++warp) value = join_two(value, scratch[warp]);
    return value;
}

// The sum of what the threads after this one hold.
__device__ __forceinline__ u32 suffix_sum(u32 own, u32* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = own;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(FULL_MASK, sum, step);
        if (lane + step < 32) sum += other;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = sum;
    __syncthreads();
    u32 later = 0;
    for (int other = warp + 1; other < WARPS; ++other) later += scratch[other];
    return sum - own + later;
}

// The bin in which the weight of a histogram, summed from the top, reaches `needed`, or all there is where rounding
// left less. Clears the histogram. All threads of a CTA call this.
__device__ __forceinline__ void find_bin(u32* histogram, u32 needed, u32* scratch, Bin& found) {
    u32 weight[BINS_PER_THREAD], own = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        own += weight[i] = histogram[threadIdx.x * BINS_PER_THREAD + i];
        histogram[threadIdx.x * BINS_PER_THREAD + i] = 0;
    }
    u32 above = suffix_sum(own, scratch), total = 0;
    for (int warp = 0; warp < WARPS; ++warp) total += scratch[warp];
    needed = min(needed, total);
    if (needed <= above || needed > above + own) return;
    bool reached = false;
#pragma unroll
    for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
        if (reached) continue;
        reached = above + weight[i] >= needed;
        if (reached) found = {threadIdx.x * BINS_PER_THREAD + i, above, weight[i]};
        above += weight[i];
    }
}

struct Cutoff {
    float value;  // smallest kept logit
    u32 weight;   // weight of all kept logits
};

// The cutoff at which the weight of the row's largest logits, from `floor` to `peak`, reaches `needed`. The first
// level's bins just cover these; for 16-bit logits that mostly is fine enough, so that no other level follows.
template <class Weigh>
__device__ __forceinline__ Cutoff select(
    int loads, SharedState& shared, int rank, u32 needed, float floor, float peak, const Weigh& weigh
) {
    u32 least = key_of(floor) >> LOWEST_BIT << LOWEST_BIT, above = 0, bins = BINS;
    int shift = max(LOWEST_BIT, 21 - __clz(key_of(peak) - least));
#pragma unroll 1
    for (;;) {
        for_each(loads, fmaxf(floor, least_value(least)), [&](float value) {
            const u32 bin = (key_of(value) - least) >> shift;
            if (bin < bins) atomicAdd(shared.own + bin, weigh(value));
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
            if (const u32 weight = shared.own[bin]) red_add_shared_cluster(mapa(shared.merged + bin, 0), weight);
            shared.own[bin] = 0;
        }
        cluster_sync();
        if (rank == 0) find_bin(shared.merged, needed - above, shared.sums, shared.found);
        cluster_sync();
        const Bin found = {ld_shared_cluster(mapa(&shared.found.index, 0)),
                           ld_shared_cluster(mapa(&shared.found.above, 0)),
                           ld_shared_cluster(mapa(&shared.found.weight, 0))};
        least += found.index << shift;
        above += found.above;
        if (shift == LOWEST_BIT) return {least_value(least), above + found.weight};
        const int finer = max(LOWEST_BIT, shift - 11);
        bins = 1 << (shift - finer);
        shift = finer;
    }
}
