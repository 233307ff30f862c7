// Second half of the choice by 2-bit keys, after two_bit_scan.cu: lists each row's best tokens in ascending order.
//
// The row's histograms say which bin its k-th best token is in, and how many tokens CTAs before this one list. Of those
// in the bin itself the first ones are chosen.

#include "histogram.cuh"
#include "two_bit.cuh"

using Config = ScanConfig;
constexpr int COUNT = BINS_PER_THREAD<Config>;

// Tokens above the chosen bin, and in it.
struct Tally {
    u32 above, tied;

    __device__ __forceinline__ void operator+=(const Tally& other) { above += other.above, tied += other.tied; }
    // Of all lanes.
    __device__ __forceinline__ Tally warp_sum() const {
        return {__reduce_add_sync(FULL_MASK, above), __reduce_add_sync(FULL_MASK, tied)};
    }
    // Of the lanes before this one, where a lane has fewer than 2**11.
    __device__ __forceinline__ Tally lanes_before() const {
        const u32 both = above | tied << 16;
        u32 sum = both;  // not by inclusive_sum: a lane's number kept across the unrolled groups takes a register more
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(FULL_MASK, sum, step);
            if (int(threadIdx.x) % 32 >= step) sum += other;
        }
        sum -= both;
        return {sum & 0xFFFF, sum >> 16};
    }
};

struct Shared {
    u32 warp_sums[2][Config::WARPS];
    Tally of_warps[Config::WARPS];
    int bin;           // chosen are all tokens above this bin, and
    u32 ties;          // this many of those in it,
    u32 ties_before;   // of which CTAs before this one have so many
};

// Finds the bin of the row's k-th best token, and counts what parts before this one have. By all threads.
__device__ __forceinline__ Tally find_bin(const TwoBitParams& p, Shared& shared, int row, int part, u32 k) {
    u32 counts[COUNT] = {}, before[COUNT] = {};
    const u32* const histogram = p.histograms + i64(row) * p.parts * Config::BINS + first_bin_of_thread<Config>();
#pragma unroll 4
    for (int other = 0; other < p.parts; other++) {
        u32 x[COUNT];
        load_words_l2(x, histogram + i64(other) * Config::BINS);
#pragma unroll
        for (int i = 0; i < COUNT; i++) counts[i] += x[i], before[i] += other < part ? x[i] : 0;
    }
    if (threadIdx.x == 0) shared.bin = Config::BINS, shared.ties = shared.ties_before = 0;
    __syncthreads();
    find_rank(counts, k, shared.warp_sums[0], [&](int i, u32 ties) {
        shared.bin = first_bin_of_thread<Config>() + i, shared.ties = ties, shared.ties_before = before[i];
    });
    __syncthreads();
    u32 above = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) above += first_bin_of_thread<Config>() + i > shared.bin ? before[i] : 0;
    return {BlockSum(above, shared.warp_sums[1]).all, shared.ties_before};
}

// A warp's range of the CTA's groups. A lane has four adjacent tokens of each, whose bins it loads at once.
struct WarpGroups {
    static constexpr int MAX_COUNT = Config::MAX_GROUPS / Config::WARPS;
    u32 bins[MAX_COUNT][2];
    int first, last;  // in the row

    __device__ __forceinline__ WarpGroups(const TwoBitParams& p, int row, int part) {
        const GroupRange range(p, row, part);
        const int warp = threadIdx.x / 32;
        first = range.in_row(range.count() * warp / Config::WARPS);
        last = range.in_row(range.count() * (warp + 1) / Config::WARPS);
#pragma unroll
        for (int i = 0; i < MAX_COUNT; i++)
            if (first + i < last) load_words_l2(bins[i], p.bins + range.first_stored * KV_GROUP + token(first + i));
    }
    __device__ __forceinline__ static int token(int group) { return group * KV_GROUP + int(threadIdx.x) % 32 * 4; }
    // visit(the lane's first token of a group, their bins), in order.
    template <class Visit> __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
        for (int i = 0; i < MAX_COUNT; i++)
            if (first + i < last) visit(token(first + i), bins[i]);
    }
};

__device__ __forceinline__ int bin_of_token(const u32 (&bins)[2], int i) { return bins[i / 2] >> i % 2 * 16 & 0xFFFF; }

__device__ __forceinline__ Tally tally(const u32 (&bins)[2], int chosen_bin) {
    Tally sum{0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int bin = bin_of_token(bins, i);
        sum.above += bin > chosen_bin, sum.tied += bin == chosen_bin;
    }
    return sum;
}

// Tokens of all warps before this one. tally: this warp's.
__device__ __forceinline__ Tally warps_before(Shared& shared, const Tally& tally) {
    const int this_warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) shared.of_warps[this_warp] = tally;
    __syncthreads();
    Tally sum{0, 0};
#pragma unroll
    for (int warp = 0; warp < Config::WARPS; warp++)
        if (warp < this_warp) sum += shared.of_warps[warp];
    return sum;
}

// Lists the chosen tokens of a warp; `listed` are those of the row before them.
__device__ __forceinline__ void list(const WarpGroups& groups, int bin, u32 ties, Tally listed, int* index) {
    groups.each([&](int token, const u32 (&bins)[2]) {
        const Tally lane = tally(bins, bin);
        if (!__any_sync(FULL_MASK, lane.above + lane.tied)) return;
        Tally before = lane.lanes_before();
        before += listed;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token_bin = bin_of_token(bins, i);
            const bool above = token_bin > bin, tied = token_bin == bin;
            if (above || (tied && before.tied < ties))
                index[before.above + min(before.tied, ties)] = token + i;
            before += Tally{above, tied};
        }
        listed += lane.warp_sum();
    });
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    two_bit_choose(const __grid_constant__ TwoBitParams p) {
    __shared__ Shared shared;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    pdl_launch_dependents();
    pdl_wait();
    const int available = min(min(__ldcg(p.k + row / p.kv_heads), p.max_k), p.row_groups(row) * KV_GROUP);
    const u32 k = max(available, 0);
    if (part == 0 && threadIdx.x == 0) p.count[row] = k;
    const WarpGroups groups(p, row, part);
    Tally listed = find_bin(p, shared, row, part, k);
    const int bin = shared.bin;
    Tally counted{0, 0};
    groups.each([&](int, const u32 (&bins)[2]) { counted += tally(bins, bin); });
    listed += warps_before(shared, counted.warp_sum());
    list(groups, bin, shared.ties, listed, p.index + i64(row) * p.max_k);
}
