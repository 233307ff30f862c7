// Peak, cutoff and mass of rows of logits under top-k and top-p, for Hopper and newer; filter_cuda.py has the story.
// Compiled after filter_steps.cu, which says with which macros.

struct Cut {
    float value;  // what the kept logits reach
    u32 weight;   // theirs together
};

// The cut at which the weight of the row's largest logits, from `floor` to `peak`, reaches `needed`. The first level's
// bins just cover these; for 16-bit logits that mostly is fine enough, so that no other level follows.
template <class Weigh>
__device__ __forceinline__ Cut cut(int loads, Shared& shared, int rank, u32 needed, float floor, float peak,
                                   const Weigh& weigh) {
    u32 least = key_of(floor) >> FINEST << FINEST, above = 0, bins = BINS;
    int shift = max(FINEST, 21 - __clz(key_of(peak) - least));
#pragma unroll 1
    for (;;) {
        for_each(loads, fmaxf(floor, edge(least)), [&](float value) {
            const u32 bin = (key_of(value) - least) >> shift;
            if (bin < bins) atomicAdd(shared.own + bin, weigh(value));
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
            if (const u32 weight = shared.own[bin]) add_to(shared.merged + bin, 0, weight);
            shared.own[bin] = 0;
        }
        sync_cluster();
        if (rank == 0) descend(shared.merged, needed - above, shared.sums, shared.found);
        sync_cluster();
        const Found found = {load_from(&shared.found.bin, 0), load_from(&shared.found.above, 0),
                             load_from(&shared.found.here, 0)};
        least += found.bin << shift;
        above += found.above;
        if (shift == FINEST) return {edge(least), above + found.here};
        const int finer = max(FINEST, shift - 11);
        bins = 1 << (shift - finer);
        shift = finer;
    }
}

// What the k largest logits surely reach, as the peaks of k threads do.
__device__ __forceinline__ float least_of_top(float thread_peak, Shared& shared, u32 k) {
    if (k > THREADS) return LOWEST;
    atomicAdd(shared.own + (key_of(thread_peak) >> 21), 1);
    __syncthreads();
    descend(shared.own, k, shared.sums, shared.found);
    __syncthreads();
    return edge(shared.found.bin << 21);
}

// Peak of the row, and the highest floor of its blocks.
__device__ __forceinline__ Part survey(Shared& shared, float thread_peak, float floor) {
    const float peak = join(thread_peak, shared.floats, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x == 0) shared.part = {peak, floor, 0};
    sync_cluster();
    Part all = {LOWEST, LOWEST, 0};
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
        all.peak = fmaxf(all.peak, __uint_as_float(load_from(&shared.part.peak, i)));
        all.floor = fmaxf(all.floor, __uint_as_float(load_from(&shared.part.floor, i)));
    }
    return all;
}

// Mass of the row's logits that reach `cutoff`, relative to its peak.
__device__ __forceinline__ float mass_of(int loads, Shared& shared, float peak, float cutoff, float scale) {
    float mass = 0;
    for_each(loads, cutoff, [&](float value) { mass += exp2_of((value - peak) * scale); });
    mass = join(mass, shared.floats, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) shared.part.mass = mass;
    sync_cluster();
    mass = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) mass += __uint_as_float(load_from(&shared.part.mass, i));
    return mass;
}

// Grid: CLUSTER blocks for each row, each of `loads` packs per thread. top_k: 0 keeps all; top_p: 1 keeps all. Writes
// one figure of each kind per row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, CLUSTER == 4 ? 2 : 3)
    filter(const char* logits, float* peaks, float* cutoffs, float* masses, int vocab, int loads, double scale_,
           int top_k, double top_p) {
    __shared__ Shared shared;
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const float scale = float(scale_);
    load(logits + i64(row) * vocab * ELEMENT_BYTES, vocab, rank, loads);
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.own[bin] = shared.merged[bin] = 0;
    sync_cluster();

    float thread_peak = LOWEST, cutoff = LOWEST;
    for (int i = 0; i < loads; ++i) thread_peak = fmaxf(thread_peak, largest(packs[i * THREADS + threadIdx.x]));
    const Part all = survey(shared, thread_peak, top_k ? least_of_top(thread_peak, shared, top_k) : LOWEST);
    const float peak = all.peak;
    if (top_k) cutoff = cut(loads, shared, rank, top_k, all.floor, peak, [](float) { return 1u; }).value;
    float mass = mass_of(loads, shared, peak, cutoff, scale);
    if (top_p < 1) {
        const u32 needed = max(u32(ceil(top_p * ONE)), 1u);
        const float unit = ONE / mass;
        // Logits that are certainly cut off: all as small as that weigh less than half of what may go.
        const float surely = peak + log2f(float(1 - top_p) / 2 * mass / vocab) / scale;
        const Cut last = cut(loads, shared, rank, needed, fmaxf(cutoff, surely), peak,
                             [&](float value) { return __float2uint_rn(exp2_of((value - peak) * scale) * unit); });
        cutoff = last.value;
        mass *= last.weight / ONE;
    }
    if (rank == 0 && threadIdx.x == 0) peaks[row] = peak, cutoffs[row] = cutoff, masses[row] = mass;
    sync_cluster();  // others may still read this block's memory
}
