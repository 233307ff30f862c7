// Attention of one query per sequence to an index list of tokens or pages, read as INT4, for Hopper and newer.
//
// A row is a (batch row, KV head). Each warp of its `parts` CTAs takes an equal range of its list. Tokens of one group
// that are near in the list share a tile; several tiles are copied ahead. The last CTA of a row joins the partial
// results.

#include "partial_results.cuh"

using Config = SparseConfig;
constexpr int TILE = Config::TILE, WARPS = Config::WARPS;

// A warp's walk along its range of a list.
struct Walk {
    const SparseParams& p;
    const int* index;
    TileCopy<Config, false> copy;
    int position, stop, limit;
    int token;      // of this lane, of the 32 at hand
    u32 remaining;  // which of them are still to be copied

    __device__ __forceinline__ Walk(const SparseParams& p, int row, int part)
        : p(p), copy(p, row * p.group_capacity), remaining(0) {
        const int b = row / p.kv_heads, list = b * p.sets + row % p.kv_heads % p.sets;
        index = p.index + i64(list) * p.index_capacity;
        limit = min(__ldcg(p.groups + b), p.group_capacity) * Config::GROUP;
        const int tokens = min(__ldcg(p.count + list), p.index_capacity) * p.page;
        const int share = (tokens + p.parts * WARPS - 1) / (p.parts * WARPS);
        position = min((part * WARPS + int(threadIdx.x) / 32) * share, tokens);
        stop = min(position + share, tokens);
    }
    // Starts copying the next tokens of one group into the tile; false at the end of the range.
    __device__ __forceinline__ bool copy_next(TokenTile<Config>& tile, TileTokens& tokens) {
        const int lane = threadIdx.x % 32;
        while (!remaining) {
            if (position >= stop) return false;
            const int at = position + lane;
            token = at < stop ? __ldcg(index + at / p.page) * p.page + at % p.page : limit;
            remaining = __ballot_sync(FULL_MASK, token < limit);
            position += 32;
        }
        const int first = __ffs(remaining) - 1, group = token_of_lane(first) / Config::GROUP;
        const u32 same = (__ballot_sync(FULL_MASK, token / Config::GROUP == group) & remaining) >> first;
        const int count = min(__clz(__brev(~same)), TILE), g = lane / 4;  // adjacent ones in the list
        remaining &= ~(((1u << count) - 1) << first);
        tokens = TileTokens(count, place_of_lane(first + g), place_of_lane(first + g + 8));
        copy.start(tile, group, tokens);
        return true;
    }
    __device__ __forceinline__ int token_of_lane(int lane) const { return __shfl_sync(FULL_MASK, token, lane); }
    __device__ __forceinline__ u32 place_of_lane(int lane) const { return u32(token_of_lane(lane)) % Config::GROUP; }
};

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    index_list(const __grid_constant__ SparseParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared<Config> shared;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, warp = threadIdx.x / 32;
    pdl_launch_dependents();
    pdl_wait();

    shared.copy_inputs(p, row / p.kv_heads, row % p.kv_heads);
    __syncthreads();
    const Query<Config> query(shared.queries);
    using Chosen = ChosenTokens<Config, false>;
    shared.lane_queries.store<Chosen::PLANES>(query, Chosen::OF_UPPER);
    __syncthreads();
    Walk walk(p, row, part);
    TilePipeline pipeline(walk, reinterpret_cast<TokenTile<Config>*>(dynamic) + warp * Config::TILES);
    Partial<Config> partial;
    shared.recent.attend(partial, p, query, row, part);
    pipeline.attend(partial, Chosen(p, query, shared.lane_queries));

    __syncthreads();  // all have read their tiles, which `out` overwrites
    float* const out = reinterpret_cast<float*>(dynamic);  // the warps' sums over values
    store_partial(partial, shared, out);
    __syncthreads();
    store_part(p, shared, out);
    if (is_last_part(p, shared, row)) join_parts<Config>(p, out, row);
}
