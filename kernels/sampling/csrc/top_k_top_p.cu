// Peak, cutoff and mass of rows of logits under top-k and top-p, for Hopper and newer; docs/kernels/sampling.md
// explains how it works.

#include "params.cuh"
#include "radix_select.cuh"

// A value that the k largest logits reach, from the peaks of k threads.
__device__ __forceinline__ float floor_of_top_k(float thread_peak, SharedState& shared, u32 k) {
    if (k > THREADS) return negative_infinity();
    atomicAdd(shared.own + (key_of(thread_peak) >> 21), 1);
    __syncthreads();
    find_bin(shared.own, k, shared.sums, shared.found);
    __syncthreads();
    return least_value(shared.found.index << 21);
}

// Peak of the row, and the highest floor of its CTAs.
__device__ __forceinline__ PartStatistics row_statistics(SharedState& shared, float thread_peak, float floor) {
    const float peak = cta_reduce(thread_peak, shared.floats, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x == 0) shared.part = {peak, floor, 0};
    cluster_sync();
    PartStatistics row = {negative_infinity(), negative_infinity(), 0};
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
        row.peak = fmaxf(row.peak, __uint_as_float(ld_shared_cluster(mapa(&shared.part.peak, i))));
        row.floor = fmaxf(row.floor, __uint_as_float(ld_shared_cluster(mapa(&shared.part.floor, i))));
    }
    return row;
}

// Mass of the row's logits that reach `cutoff`, relative to its peak.
__device__ __forceinline__ float row_mass(int loads, SharedState& shared, float peak, float cutoff, float scale) {
    float mass = 0;
    for_each(loads, cutoff, [&](float value) { mass += exp2_approx((value - peak) * scale); });
    mass = cta_reduce(mass, shared.floats, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) shared.part.mass = mass;
    cluster_sync();
    mass = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) mass += __uint_as_float(ld_shared_cluster(mapa(&shared.part.mass, i)));
    return mass;
}

// Grid: CLUSTER CTAs for each row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, CLUSTER == 4 ? 2 : 3)
    filter(const __grid_constant__ FilterParams p) {
    __shared__ SharedState shared;
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    load_row(p.logits + i64(row) * p.vocab * ELEMENT_BYTES, p.vocab, rank, p.loads);
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.own[bin] = shared.merged[bin] = 0;
    cluster_sync();

    float thread_peak = negative_infinity(), cutoff = negative_infinity();
    for (int i = 0; i < p.loads; ++i) thread_peak = fmaxf(thread_peak, largest(packs[i * THREADS + threadIdx.x]));
    const float floor = p.top_k ? floor_of_top_k(thread_peak, shared, p.top_k) : negative_infinity();
    const PartStatistics all = row_statistics(shared, thread_peak, floor);
    const float peak = all.peak, scale = p.scale;
    if (p.top_k) cutoff = select(p.loads, shared, rank, p.top_k, all.floor, peak, [](float) { return 1u; }).value;
    float mass = row_mass(p.loads, shared, peak, cutoff, scale);
    if (p.top_p < 1) {
        const u32 needed = max(u32(ceil(p.top_p * ROW_WEIGHT)), 1u);
        const float unit = ROW_WEIGHT / mass;
        // Logits that are certainly cut off: were all as small, they would weigh less than half of what may go.
        const float certain = peak + log2f(float(1 - p.top_p) / 2 * mass / p.vocab) / scale;
        const auto weigh = [&](float value) { return __float2uint_rn(exp2_approx((value - peak) * scale) * unit); };
        const Cutoff last = select(p.loads, shared, rank, needed, fmaxf(cutoff, certain), peak, weigh);
        cutoff = last.value;
        mass *= last.weight / ROW_WEIGHT;
    }
    if (rank == 0 && threadIdx.x == 0) p.peaks[row] = peak, p.cutoffs[row] = cutoff, p.masses[row] = mass;
    cluster_sync();  // others may still read this CTA's memory
}
