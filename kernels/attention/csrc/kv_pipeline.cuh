// KV tiles: how they are shared between CTAs, and the pipeline of bulk copies that brings them into shared memory.
//
// A KV tile is a quantized group or DENSE_TILE full-precision tokens. The tiles of all (batch row, KV head) pairs form
// one list, of which every CTA takes an equal range. A stage of the pipeline holds the keys or the values of a tile:
//
//     stage   0          1            2          3            ...  STAGES - 1
//             keys of    values of    keys of    values of
//             tile t     tile t       tile t+1   tile t+1
//
//     a stage of a group (values: 128 scales)          a stage of a dense tile: eight pieces of PIECE tokens
//     | upper codes | lower codes | scale | minimum |  | tokens 0 .. PIECE - 1, padding | tokens PIECE .. | ... |
//       PLANE_BYTES   INT8 only     D halves D halves    KEY_PITCH or VALUE_PITCH bytes each
#pragma once

#include "../../device/csrc/warp.cuh"
#include "config.cuh"

// Lengths of the batch rows, which live on the device. They are read from the L2 cache: what an SM's own cache holds
// may be older than the kernels that let this one start early.
template <class Config> struct SequenceLengths {
    const int *begin, *end, *groups;
    int batch, kv_heads, queries, capacity, group_capacity;

    __device__ __forceinline__ explicit SequenceLengths(const AttentionParams& p)
        : begin(p.begin), end(p.end), groups(p.groups), batch(p.batch), kv_heads(p.kv_heads), queries(p.queries),
          capacity(p.capacity), group_capacity(p.group_capacity) {}
    __device__ int dense_begin(int b) const { return __ldcg(begin + b); }
    __device__ int first_query_end(int b) const { return __ldcg(end + b); }  // one past the first query's token
    __device__ int dense_end(int b) const { return min(first_query_end(b) + queries - 1, capacity); }
    __device__ int num_groups(int b) const { return Config::BITS ? min(__ldcg(groups + b), group_capacity) : 0; }
    __device__ int num_tiles(int b) const {  // tiles of one KV head, quantized groups first
        const int tokens = max(dense_end(b) - dense_begin(b), 0);
        return num_groups(b) + (tokens + Config::DENSE_TILE - 1) / Config::DENSE_TILE;
    }
};

// CTA i works from tile floor(i * total / ctas) on, so that rows of one length are cut at their ends where CTAs divide
// evenly. 32-bit arithmetic: i * (total % ctas) stays below ctas ** 2, and the host keeps ctas below 2 ** 16.
template <class Config> struct TileScheduler {
    u32 total, ctas, quotient, remainder;

    __device__ TileScheduler(const SequenceLengths<Config>& lengths, u32 grid, int lane) : total(0) {
        for (int b = 0; b < lengths.batch; b += 32)
            total += __reduce_add_sync(FULL_MASK, b + lane < lengths.batch ? u32(lengths.num_tiles(b + lane)) : 0u);
        total *= lengths.kv_heads;
        ctas = min(grid, total);
        quotient = ctas ? total / ctas : 0;
        remainder = total - quotient * ctas;
    }
    __device__ int first_tile(u32 cta) const { return cta * quotient + cta * remainder / ctas; }
    __device__ int cta_of(int tile) const { return ((tile + 1ull) * ctas - 1) / total; }
};

// The batch row that holds `tile`, and that row's first tile.
template <class Config>
__device__ __forceinline__ int find_row(const SequenceLengths<Config>& lengths, int tile, int lane, int& row_begin) {
    row_begin = 0;
    for (int b = 0;; b += 32) {
        const int row_tiles = b + lane < lengths.batch ? lengths.num_tiles(b + lane) * lengths.kv_heads : 0;
        const int inclusive = inclusive_sum(row_tiles, lane);
        const u32 beyond = __ballot_sync(FULL_MASK, row_begin + inclusive > tile);
        if (beyond) {
            const int at = __ffs(beyond) - 1;
            row_begin += __shfl_sync(FULL_MASK, inclusive - row_tiles, at);
            return b + at;
        }
        row_begin += __shfl_sync(FULL_MASK, inclusive, 31);
    }
}

// The full-precision tokens of a (batch row, KV head); [0] keys, [1] values.
struct DenseKV {
    const u16* slots[2];  // slot 0 of the buffers
    int stride[2];
    int begin, end;  // visible slots, half-open
};

template <class Config> struct KVPipeline {
    u32 stages, full;  // shared addresses of the stages and of their mbarriers
    int warp, lane;
    int write_stage, read_stage;
    u32 parity;
    int tile, tile_end, groups;  // tile of the next copy; end of the copies; number of a row's tiles that are groups
    const u8* next_group[2];     // this warp's part of the next group's keys, values; of page 0's if paged
    const int* pages;            // of a paged cache, the row's pages
    int page, page_heads;        // of a paged cache, the next group's page, read a tile ahead; KV heads of a page

    __device__ __forceinline__ void init() const {
        if (threadIdx.x < Config::STAGES) mbarrier_init(full + 8 * threadIdx.x, Config::WARPS);
        fence_proxy_async();
    }
    // Address of the next stage to read, once it is full.
    __device__ __forceinline__ u32 wait() const {
        mbarrier_wait(full + 8 * read_stage, parity);
        return stages + read_stage * Config::STAGE_BYTES;
    }
    __device__ __forceinline__ void advance() {
        if (++read_stage == Config::STAGES) read_stage = 0, parity ^= 1;
    }
    // Bytes from one group to the next in the planes that a warp copies.
    __device__ __forceinline__ static int group_stride(int warp, bool value) {
        return warp < 2 ? Config::PLANE_BYTES : 2 * (value ? Config::GROUP : Config::HEAD_DIM);
    }
    // Starts on tiles `first` to `end` of a row with all stages but one in flight; `keys`, `values`: this warp's parts
    // of the row's groups. Codes are copied before earlier kernels have ended, full-precision tokens after.
    __device__ __forceinline__ void start(
        const DenseKV& dense, const u8* keys, const u8* values, int num_groups, int first, int end
    ) {
        tile = first, tile_end = end, groups = num_groups;
        next_group[0] = keys + (Config::PAGED ? 0 : i64(first) * group_stride(warp, false));
        next_group[1] = values + (Config::PAGED ? 0 : i64(first) * group_stride(warp, true));
        if constexpr (Config::PAGED) read_page();
#pragma unroll 1
        for (int i = 0; i < Config::STAGES / 2; i++) {
            if (tile >= groups) pdl_wait();
            load_next<false>(dense);
            if (2 * i + 2 < Config::STAGES) load_next<true>(dense);
        }
    }
    // Within a tile, what to load after the barrier that follows reading the previous values, then the tile's keys.
    __device__ __forceinline__ void refill_after_values(const DenseKV& dense) {
        load_next<Config::STAGES % 2 == 0>(dense);
    }
    __device__ __forceinline__ void refill_after_keys(const DenseKV& dense) {
        load_next<Config::STAGES % 2 == 1>(dense);
    }

    template <bool VALUE> __device__ __forceinline__ void load_next(const DenseKV& dense) {
        if (tile < tile_end) {
            const u32 to = stages + write_stage * Config::STAGE_BYTES, barrier = full + 8 * write_stage;
            if (Config::BITS && tile < groups) load_group<VALUE>(to, barrier);
            else load_dense<VALUE>(to, barrier, dense);
            if (++write_stage == Config::STAGES) write_stage = 0;
        }
        tile += VALUE;
        if constexpr (Config::PAGED && VALUE) read_page();
    }
    __device__ __forceinline__ void read_page() {
        if (tile < min(tile_end, groups)) page = __ldcg(pages + tile);
    }
    // Two warps copy half of the codes each (INT8: a plane each), one the scales and one the minima.
    template <bool VALUE> __device__ __forceinline__ void load_group(u32 to, u32 barrier) {
        constexpr int SCALE_BYTES = 2 * (VALUE ? Config::GROUP : Config::HEAD_DIM);
        const int bytes = warp < 2 ? Config::CODE_BYTES / 2 : SCALE_BYTES;
        if (lane == 0) {
            mbarrier_arrive_expect_tx(barrier, bytes);
            bulk_copy(to + (warp < 2 ? warp * (Config::CODE_BYTES / 2) : Config::CODE_BYTES + (warp - 2) * SCALE_BYTES),
                      group_address<VALUE>(), bytes, barrier);
        }
        if constexpr (!Config::PAGED) next_group[VALUE] += group_stride(warp, VALUE);
    }
    template <bool VALUE> __device__ __forceinline__ const u8* group_address() const {
        if constexpr (Config::PAGED) return next_group[VALUE] + i64(page) * (page_heads * group_stride(warp, VALUE));
        else return next_group[VALUE];
    }
    // Adjacent tokens are copied a piece at a time, as bulk copies take long to issue. Slots past the last repeat it:
    // their probability is zero, and what is multiplied by it must be a number.
    template <bool VALUE> __device__ __forceinline__ void load_dense(u32 to, u32 barrier, const DenseKV& dense) const {
        constexpr int WARP_TOKENS = Config::DENSE_TILE / Config::WARPS;
        const int first = dense.begin + (tile - groups) * Config::DENSE_TILE + warp * WARP_TOKENS;
        const bool adjacent = dense.stride[VALUE] == Config::HEAD_DIM && first + WARP_TOKENS <= dense.end;
        const int step = adjacent ? Config::PIECE : 1, row = lane * step;
        if (lane == 0) mbarrier_arrive_expect_tx(barrier, WARP_TOKENS * Config::TOKEN_BYTES);
        __syncwarp();
        if (row >= WARP_TOKENS) return;
        const int slot = min(first + row, dense.end - 1),
                  piece = warp * WARP_TOKENS / Config::PIECE + row / Config::PIECE;
        bulk_copy(
            to + piece * (VALUE ? Config::VALUE_PITCH : Config::KEY_PITCH) + row % Config::PIECE * Config::TOKEN_BYTES,
            dense.slots[VALUE] + i64(slot) * dense.stride[VALUE], step * Config::TOKEN_BYTES, barrier
        );
    }
};
