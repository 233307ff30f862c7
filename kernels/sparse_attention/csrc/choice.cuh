// The choice of a CTA: the best of its tokens, as a list of tiles for its warps.
#pragma once

#include "../../selection/csrc/histogram.cuh"
#include "partial_results.cuh"

template <class Config> constexpr int GROUP_TILES = Config::GROUP / Config::TILE;  // tiles of a group, at most

// The groups of a CTA: a row's are dealt to its parts in turn, so each part has an even sample of the row.
template <class Config> struct DealtGroups {
    static constexpr int GROUP = Config::GROUP;
    const SparseParams& p;
    int row, part, row_groups;

    __device__ __forceinline__ DealtGroups(const SparseParams& p)
        : p(p), row(blockIdx.x / p.parts), part(blockIdx.x % p.parts),
          row_groups(min(__ldcg(p.groups + row / p.kv_heads), p.group_capacity)) {}
    __device__ __forceinline__ int count() const { return max(row_groups - part + p.parts - 1, 0) / p.parts; }
    // The number in the row of the CTA's i-th group, and where group `number` is among all rows' groups.
    __device__ __forceinline__ int in_row(int i) const { return part + i * p.parts; }
    __device__ __forceinline__ i64 stored(int number) const { return i64(row) * p.group_capacity + number; }
    // This part's of the row's k: the parts' add up to k. Rows have fewer than 65536 groups.
    __device__ __forceinline__ int share(int k) const {
        if (part >= row_groups) return 0;
        const u32 row_k = min(max(k, 0), row_groups * GROUP), all = row_groups, each = row_k / all, rest = row_k % all;
        const u32 before = part * (row_groups / p.parts) + min(part, row_groups % p.parts), end = before + count();
        return each * count() + rest * end / all - rest * before / all;
    }
};

template <class Config> struct __align__(16) Choice {
    static constexpr int BINS = Config::BINS;
    static_assert(Config::MAX_GROUPS * GROUP_TILES<Config> * sizeof(u16) <= BINS * sizeof(u32),
                  "the list lies in the histogram");
    union {
        u32 histogram[BINS];
        u16 tiles[BINS * 2];  // the list: group * GROUP_TILES + number of the tile in its group
    };
    u16 counts[Config::MAX_GROUPS];  // of a group: tokens above the bin, and << 8 those in it; later the chosen ones
    SampleSums<Config> samples;
    u32 warp_sums[3][Config::WARPS];
    int k;          // of the row
    int bin, ties;  // chosen are all tokens above this bin, and this many of those in it

    // Before the scan, by all threads.
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < BINS; i += Config::THREADS) histogram[i] = 0;
        if (threadIdx.x == 0) bin = BINS, ties = 0;
    }
};

// Bins of a group's tokens, and later the places of those that may be chosen, the ones above the bin first.
template <class Config> union GroupBins {
    u16 bins[Config::GROUP];
    u8 places[Config::GROUP];
};

// Finds the bin of the token of rank `share`, from the top. Sinks, which are in the last bin, are chosen anyway.
template <class Config>
__device__ __forceinline__ void find_bin(Choice<Config>& choice, int share, int k) {
    u32 counts[BINS_PER_THREAD<Config>];
    ld_shared(counts, choice.histogram + first_bin_of_thread<Config>());
    const u32 rank = max(share, min(k, int(choice.histogram[Config::BINS - 1])));
    find_rank(counts, rank, choice.warp_sums[0], [&](int i, u32 ties) {
        choice.bin = first_bin_of_thread<Config>() + i, choice.ties = ties;
    });
}

// Appends the places of a group's marked tokens, a bit each, to the `count` that are listed; returns the new count.
template <int WORDS> __device__ __forceinline__ int append(u8* places, int count, const u32 (&marked)[WORDS]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < WORDS; r++) {
        if (marked[r] >> lane & 1) places[count + __popc(marked[r] & ((1u << lane) - 1))] = 32 * r + lane;
        count += __popc(marked[r]);
    }
    return count;
}

// Replaces a group's bins by the places of its tokens above the chosen bin and of those in it, and counts both.
template <class Config>
__device__ __forceinline__ void list_places(Choice<Config>& choice, GroupBins<Config>& group, int i) {
    constexpr int WORDS = Config::GROUP / 32;
    const int lane = threadIdx.x % 32, bin = choice.bin;
    u32 above[WORDS], tied[WORDS], any_tied = 0;
#pragma unroll
    for (int r = 0; r < WORDS; r++) {
        const int token_bin = group.bins[32 * r + lane];
        above[r] = __ballot_sync(FULL_MASK, token_bin > bin);
        any_tied |= tied[r] = __ballot_sync(FULL_MASK, token_bin == bin);
    }
    __syncwarp();  // all have read the bins
    const int num_above = append(group.places, 0, above);
    const int count = any_tied ? append(group.places, num_above, tied) : num_above;
    if (lane == 0) choice.counts[i] = num_above | (count - num_above) << 8;
}

// Lists the tiles of the chosen tokens; returns how many there are. Of ties, the first groups' are chosen.
template <class Config>
__device__ __forceinline__ int list_tiles(Choice<Config>& choice, int groups) {
    constexpr int TILE = Config::TILE;
    const int group = threadIdx.x, counts = group < groups ? choice.counts[group] : 0;
    const int above = counts & 0xFF, tied = counts >> 8;
    const int ties_before = BlockSum(tied, choice.warp_sums[1]).before;
    const int taken = above + min(tied, max(choice.ties - ties_before, 0)), tiles = (taken + TILE - 1) / TILE;
    const BlockSum sum(tiles, choice.warp_sums[2]);
    choice.counts[group] = taken;
    for (int i = 0; i < tiles; i++) choice.tiles[sum.before + i] = group * GROUP_TILES<Config> + i;
    return sum.all;
}

// Chooses among the CTA's tokens, after all its threads have counted their bins; returns the number of tiles to attend
// to.
template <class Config>
__device__ __forceinline__ int choose(
    Choice<Config>& choice, const DealtGroups<Config>& dealt, GroupBins<Config>* groups
) {
    find_bin(choice, dealt.share(choice.k), choice.k);
    __syncthreads();
    const int count = dealt.count();
    for (int i = threadIdx.x / 32; i < count; i += Config::WARPS) list_places(choice, groups[i], i);
    __syncthreads();
    const int tiles = list_tiles(choice, count);
    __syncthreads();
    return tiles;
}

// The tiles of a warp: every WARPS-th of the list.
template <class Config> struct ChosenTiles {
    static constexpr int TILE = Config::TILE, TILES = GROUP_TILES<Config>;
    const Choice<Config>& choice;
    const GroupBins<Config>* groups;     // of the CTA
    const TileCopy<Config, true>& copy;  // from the first of them on
    int next, count;

    __device__ __forceinline__ bool copy_next(TokenTile<Config>& tile, TileTokens& tokens) {
        if (next >= count) return false;
        const int listed = choice.tiles[next], group = listed / TILES, first = listed % TILES * TILE;
        next += Config::WARPS;
        const u8* const places = groups[group].places + first + threadIdx.x % 32 / 4;
        // A place that is not of a token may be any byte.
        tokens = TileTokens(choice.counts[group] - first, places[0], places[8] & 0x7F);
        copy.start(tile, group * copy.p.parts, tokens);
        return true;
    }
};
