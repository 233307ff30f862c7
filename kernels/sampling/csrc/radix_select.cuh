// Radix selection over a cluster that holds a row of logits in its shared memory: order-preserving keys of logits,
// histograms of keys, and the bin in which a needed weight is reached.
#pragma once

#include "../../device/csrc/ptx.cuh"

// This CTA's part of the row, in packs of 16 bytes: thread t reads packs t, t + THREADS, ...
//
//     CTA rank           0                                         1               ...
//     logits of the row  0 .. loads * THREADS * PACK - 1           ...                       padded with -inf
//     pack               | 0 | 1 | .. | THREADS - 1 | THREADS | .. |
//     read by thread       0   1          511           0
extern __shared__ uint4 packs[];

// The logit of a word; of 16-bit logits the lower (0) or upper (1) half.
template <class Config> __device__ __forceinline__ float value_of(u32 word, int half) {
    using Elem = typename Config::Elem;
    if (Config::IS_FLOAT) return __uint_as_float(word);
    return half ? Elem::high_to_float(word) : Elem::low_to_float(word);
}
// Keys are unsigned integers in the order of the values: all bits of a negative number are flipped, of others the sign.
// Adding zero makes -0 a +0, as equal values must share a key.
constexpr u32 ALL_BITS = 0xFFFFFFFFu, SIGN_BIT = 0x80000000u;
__device__ __forceinline__ u32 key_of(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits ^ (int(bits) < 0 ? ALL_BITS : SIGN_BIT);
}
__device__ __forceinline__ float value_of_key(u32 key) {
    return __uint_as_float(key ^ (int(key) < 0 ? SIGN_BIT : ALL_BITS));
}
// The smallest value with this key or a larger one; keys that belong to no number are below that of minus infinity.
__device__ __forceinline__ float min_value(u32 key) { return fmaxf(value_of_key(key), negative_infinity()); }

template <class Config> __device__ __forceinline__ float largest(const uint4& pack) {
    using Elem = typename Config::Elem;
    if (Config::IS_FLOAT)
        return fmaxf(fmaxf(value_of<Config>(pack.x, 0), value_of<Config>(pack.y, 0)),
                     fmaxf(value_of<Config>(pack.z, 0), value_of<Config>(pack.w, 0)));
    const u32 pair = Elem::max_pair(Elem::max_pair(pack.x, pack.y), Elem::max_pair(pack.z, pack.w));
    return fmaxf(value_of<Config>(pair, 0), value_of<Config>(pair, 1));
}

// Calls `body` with the thread's logits of `low` or more. Few packs have any; the others cost little.
template <class Config, class Body>
__device__ __forceinline__ void for_each(int loads, float low, const Body& body) {
#pragma unroll 1
    for (int i = 0; i < loads; ++i) {
        const uint4 pack = packs[i * Config::THREADS + threadIdx.x];
        if (!(largest<Config>(pack) >= low)) continue;
        const u32 words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
        for (int j = 0; j < Config::PACK; ++j) {
            const float value = value_of<Config>(words[j * Config::ELEMENT_BYTES / 4], j % (Config::PACK / 4));
            if (value >= low) body(value);
        }
    }
}

// Copies this CTA's part of a row to shared memory, padded with minus infinity.
template <class Config>
__device__ __forceinline__ void load_row(const char* row, int vocab, int rank, int loads) {
    constexpr int THREADS = Config::THREADS, PACK = Config::PACK, ELEMENT_BYTES = Config::ELEMENT_BYTES;
    constexpr u32 PADDING = Config::PADDING;
    const int begin = rank * loads * THREADS * PACK;
    u16* halves = reinterpret_cast<u16*>(packs);
    const u16* from = reinterpret_cast<const u16*>(row);
    for (int pack = threadIdx.x; Config::ALIGNED && pack < loads * THREADS; pack += THREADS) {
        if (begin + pack * PACK < vocab) cp_async_16(packs + pack, row + (i64(begin) + pack * PACK) * ELEMENT_BYTES);
        else packs[pack] = {PADDING, PADDING, PADDING, PADDING};
    }
    constexpr int HALVES = ELEMENT_BYTES / 2;  // 16-bit words of a logit; the second of float32 is the upper one
    for (int i = threadIdx.x; !Config::ALIGNED && i < loads * THREADS * 8; i += THREADS)
        halves[i] = begin + i / HALVES < vocab ? from[begin * HALVES + i]
                                               : u16(i % HALVES || HALVES == 1 ? PADDING >> 16 : 0);
    cp_async_wait_all();
}

// A bin of the histogram: the weight of the bins above it, and of the bin.
struct Bin {
    u32 index, above, weight;
};

struct PartStatistics {
    float peak, floor, mass;  // peak and mass of a CTA's logits; none of the row's top k is below the floor
};

template <class Config> struct SharedState {
    u32 histogram[Config::BINS];  // this CTA's
    u32 merged[Config::BINS];     // the row's, in the cluster's first CTA
    Bin reached;                  // the bin in which the needed weight is reached, in the first CTA
    PartStatistics part;
    u32 sums[Config::WARPS];      // scratch
    float floats[Config::WARPS];  // scratch
};

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Joins a value of every thread of the CTA by `join_two`. scratch: [WARPS].
template <class Config, class Join>
__device__ __forceinline__ float cta_reduce(float value, float* scratch, const Join& join_two) {
    for (int step = 16; step; step /= 2) value = join_two(value, __shfl_xor_sync(FULL_MASK, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < Config::WARPS; ++warp) value = join_two(value, scratch[warp]);
    return value;
}

// The sum of `x` over the threads after this one. scratch: [WARPS].
template <class Config> __device__ __forceinline__ u32 suffix_sum(u32 x, u32* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = x;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(FULL_MASK, sum, step);
        if (lane + step < 32) sum += other;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = sum;
    __syncthreads();
    u32 later = 0;
    for (int other = warp + 1; other < Config::WARPS; ++other) later += scratch[other];
    return sum - x + later;
}

// Sets `reached` to the bin in which the weight of a histogram [BINS], summed from the top, reaches `needed`, or the
// total if rounding left less. Clears the histogram. All threads of a CTA call this.
template <class Config>
__device__ __forceinline__ void find_bin(u32* histogram, u32 needed, u32* scratch, Bin& reached) {
    constexpr int BINS_PER_THREAD = Config::BINS / Config::THREADS;
    u32 weight[BINS_PER_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        sum += weight[i] = histogram[threadIdx.x * BINS_PER_THREAD + i];
        histogram[threadIdx.x * BINS_PER_THREAD + i] = 0;
    }
    u32 above = suffix_sum<Config>(sum, scratch), total = 0;
    for (int warp = 0; warp < Config::WARPS; ++warp) total += scratch[warp];
    needed = min(needed, total);
    if (needed <= above || needed > above + sum) return;
    bool done = false;
#pragma unroll
    for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
        if (done) continue;
        done = above + weight[i] >= needed;
        if (done) reached = {threadIdx.x * BINS_PER_THREAD + i, above, weight[i]};
        above += weight[i];
    }
}

struct Cutoff {
    float value;  // smallest kept logit
    u32 weight;   // weight of all kept logits
};

// The cutoff at which the weight of the row's largest logits, from `floor` to `peak`, reaches `needed`. The first
// level's bins just cover these; for 16-bit logits that mostly is fine enough, so that no other level follows.
// Passes of up to 11 bits over the keys, as of float32 logits from `floor` to `peak`:
//
//     key - base    | 11 bits: the bin of this pass | 11 bits: the bin of the next pass | ... |
//                                                   ^ shift; base becomes the start of the bin that is reached
template <class Config, class Weigh>
__device__ __forceinline__ Cutoff select(
    int loads, SharedState<Config>& shared, int rank, u32 needed, float floor, float peak, const Weigh& weigh
) {
    constexpr int BINS = Config::BINS, LOWEST_BIT = Config::LOWEST_BIT;
    u32 base = key_of(floor) >> LOWEST_BIT << LOWEST_BIT, above = 0, bins = BINS;
    int shift = max(LOWEST_BIT, 21 - __clz(key_of(peak) - base));
#pragma unroll 1
    for (;;) {
        for_each<Config>(loads, fmaxf(floor, min_value(base)), [&](float value) {
            const u32 bin = (key_of(value) - base) >> shift;
            if (bin < bins) atomicAdd(shared.histogram + bin, weigh(value));
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += Config::THREADS) {
            if (const u32 weight = shared.histogram[bin]) red_add_shared_cluster(mapa(shared.merged + bin, 0), weight);
            shared.histogram[bin] = 0;
        }
        cluster_sync();
        if (rank == 0) find_bin<Config>(shared.merged, needed - above, shared.sums, shared.reached);
        cluster_sync();
        const Bin reached = {ld_shared_cluster(mapa(&shared.reached.index, 0)),
                           ld_shared_cluster(mapa(&shared.reached.above, 0)),
                           ld_shared_cluster(mapa(&shared.reached.weight, 0))};
        base += reached.index << shift;
        above += reached.above;
        if (shift == LOWEST_BIT) return {min_value(base), above + reached.weight};
        const int finer = max(LOWEST_BIT, shift - 11);
        bins = 1 << (shift - finer);
        shift = finer;
    }
}
