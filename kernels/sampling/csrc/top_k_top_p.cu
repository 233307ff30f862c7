// Peak, cutoff and mass of rows of logits under top-k and top-p, for Hopper and newer; docs/kernels/sampling.md
// explains how it works.

#include "radix_select.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_ELEMENT 1
#define CONFIG_CLUSTER 4
#define CONFIG_ALIGNED 1
#endif

struct Config {
    // Compiled variant: TopKVariant.options in sampling/cuda.py passes the value of each as -DCONFIG_NAME.
    static constexpr int ELEMENT = CONFIG_ELEMENT;        // dtype of the logits: 0 float32, 1 bfloat16, 2 float16
    static constexpr int CLUSTER = CONFIG_CLUSTER;        // CTAs that share a row
    static constexpr bool ALIGNED = CONFIG_ALIGNED != 0;  // to 16 bytes: cp.async copies rows

    using Elem = Element<ELEMENT == 1>;
    static constexpr bool IS_FLOAT = ELEMENT == 0;
    static constexpr int THREADS = 512, WARPS = THREADS / 32;
    static constexpr int BINS = 2048;
    static constexpr int LOWEST_BIT = IS_FLOAT ? 0 : ELEMENT == 1 ? 16 : 13;  // of a key that distinguishes logits
    static constexpr int ELEMENT_BYTES = IS_FLOAT ? 4 : 2;
    static constexpr int PACK = 16 / ELEMENT_BYTES;  // logits that are read together
    static constexpr u32 PADDING = IS_FLOAT ? 0xFF800000u : ELEMENT == 1 ? 0xFF80FF80u : 0xFC00FC00u;  // minus infinity
};
constexpr float ROW_WEIGHT = 2147483648.0f;  // weight of a whole row in top-p's units

// FilterParams in sampling/cuda.py has the same layout.
struct FilterParams {
    const char* logits;               // [rows, vocab]
    // [rows]: the largest logit, the smallest kept one, and the sum over kept ones of exp2((logit - peak) * scale).
    float *peaks, *cutoffs, *masses;
    int vocab;
    int loads;     // 16-byte packs of a row that each thread holds
    float scale;   // log2(e) / temperature
    int top_k;     // 0 keeps all
    double top_p;  // 1 keeps all
};

// A value that the k largest logits reach, from the peaks of k threads.
__device__ __forceinline__ float floor_of_top_k(float thread_peak, SharedState<Config>& shared, u32 k) {
    if (k > Config::THREADS) return negative_infinity();
    atomicAdd(shared.histogram + (key_of(thread_peak) >> 21), 1);
    __syncthreads();
    find_bin<Config>(shared.histogram, k, shared.sums, shared.reached);
    __syncthreads();
    return min_value(shared.reached.index << 21);
}

// Peak of the row, and the highest floor of its CTAs.
__device__ __forceinline__ PartStatistics row_statistics(SharedState<Config>& shared, float thread_peak, float floor) {
    const float peak = cta_reduce<Config>(thread_peak, shared.floats, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x == 0) shared.part = {peak, floor, 0};
    cluster_sync();
    PartStatistics row = {negative_infinity(), negative_infinity(), 0};
#pragma unroll
    for (int i = 0; i < Config::CLUSTER; ++i) {
        row.peak = fmaxf(row.peak, __uint_as_float(ld_shared_cluster(mapa(&shared.part.peak, i))));
        row.floor = fmaxf(row.floor, __uint_as_float(ld_shared_cluster(mapa(&shared.part.floor, i))));
    }
    return row;
}

// Mass of the row's logits that reach `cutoff`, relative to its peak.
__device__ __forceinline__ float row_mass(
    int loads, SharedState<Config>& shared, float peak, float cutoff, float scale
) {
    float mass = 0;
    for_each<Config>(loads, cutoff, [&](float value) { mass += exp2_approx((value - peak) * scale); });
    mass = cta_reduce<Config>(mass, shared.floats, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) shared.part.mass = mass;
    cluster_sync();
    mass = 0;
#pragma unroll
    for (int i = 0; i < Config::CLUSTER; ++i) mass += __uint_as_float(ld_shared_cluster(mapa(&shared.part.mass, i)));
    return mass;
}

// Grid: CLUSTER CTAs for each row.
extern "C" __global__ void __cluster_dims__(Config::CLUSTER, 1, 1)
    __launch_bounds__(Config::THREADS, Config::CLUSTER == 4 ? 2 : 3) filter(const __grid_constant__ FilterParams p) {
    __shared__ SharedState<Config> shared;
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.x / Config::CLUSTER, rank = blockIdx.x % Config::CLUSTER;
    load_row<Config>(p.logits + i64(row) * p.vocab * Config::ELEMENT_BYTES, p.vocab, rank, p.loads);
    for (int bin = threadIdx.x; bin < Config::BINS; bin += Config::THREADS)
        shared.histogram[bin] = shared.merged[bin] = 0;
    cluster_sync();

    float thread_peak = negative_infinity(), cutoff = negative_infinity();
    for (int i = 0; i < p.loads; ++i)
        thread_peak = fmaxf(thread_peak, largest<Config>(packs[i * Config::THREADS + threadIdx.x]));
    const float floor = p.top_k ? floor_of_top_k(thread_peak, shared, p.top_k) : negative_infinity();
    const PartStatistics all = row_statistics(shared, thread_peak, floor);
    const float peak = all.peak, scale = p.scale;
    if (p.top_k)
        cutoff = select<Config>(p.loads, shared, rank, p.top_k, all.floor, peak, [](float) { return 1u; }).value;
    float mass = row_mass(p.loads, shared, peak, cutoff, scale);
    if (p.top_p < 1) {
        const u32 needed = max(u32(ceil(p.top_p * ROW_WEIGHT)), 1u);
        const float unit = ROW_WEIGHT / mass;
        // Logits that are certainly cut off: were all as small, they would weigh less than half of what may go.
        const float certain = peak + log2f(float(1 - p.top_p) / 2 * mass / p.vocab) / scale;
        const auto weigh = [&](float value) { return __float2uint_rn(exp2_approx((value - peak) * scale) * unit); };
        const Cutoff last = select<Config>(p.loads, shared, rank, needed, fmaxf(cutoff, certain), peak, weigh);
        cutoff = last.value;
        mass *= last.weight / ROW_WEIGHT;
    }
    if (rank == 0 && threadIdx.x == 0) p.peaks[row] = peak, p.cutoffs[row] = cutoff, p.masses[row] = mass;
    cluster_sync();  // others may still read this CTA's memory
}
