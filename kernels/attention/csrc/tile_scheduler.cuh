// How KV is cut into tiles, and tiles are shared between CTAs. A KV tile is a quantized group or DENSE_TILE tokens of
// full precision; those of all (batch row, KV head) pairs form one list, of which every CTA takes an equal range.
#pragma once

#include "config.cuh"
#include "params.cuh"

// Lengths of the batch rows, which live on the device. They are read from the L2 cache: what an SM's own cache holds
// may be older than the kernels that let this one start early.
struct SequenceLengths {
    const int *begin, *end, *groups;
    int batch, kv_heads, queries, capacity, group_capacity;

    __device__ __forceinline__ explicit SequenceLengths(const AttentionParams& p)
        : begin(p.begin), end(p.end), groups(p.groups), batch(p.batch), kv_heads(p.kv_heads), queries(p.queries),
          capacity(p.capacity), group_capacity(p.group_capacity) {}
    __device__ int dense_begin(int b) const { return __ldcg(begin + b); }
    __device__ int first_query_end(int b) const { return __ldcg(end + b); }  // one past the first query's own token
    __device__ int dense_end(int b) const { return min(first_query_end(b) + queries - 1, capacity); }
    __device__ int num_groups(int b) const { return BITS ? min(__ldcg(groups + b), group_capacity) : 0; }
    __device__ int num_tiles(int b) const {  // tiles of one KV head, quantized groups first
        const int tokens = max(dense_end(b) - dense_begin(b), 0);
        return num_groups(b) + (tokens + DENSE_TILE - 1) / DENSE_TILE;
    }
};

// CTA i works from tile floor(i * total / ctas) on, so that rows of one length are cut at their ends where CTAs divide
// evenly. 32-bit arithmetic: i * (total % ctas) stays below ctas ** 2, and the host keeps ctas below 2 ** 16.
struct TileScheduler {
    u32 total, ctas, quotient, remainder;

    __device__ TileScheduler(const SequenceLengths& lengths, u32 grid, int lane) : total(0) {
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
__device__ __forceinline__ int find_row(const SequenceLengths& lengths, int tile, int lane, int& row_begin) {
    row_begin = 0;
    for (int b = 0;; b += 32) {
        const int own = b + lane < lengths.batch ? lengths.num_tiles(b + lane) * lengths.kv_heads : 0;
        int inclusive = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(FULL_MASK, inclusive, step);
            if (lane >= step) inclusive += before;
        }
        const u32 beyond = __ballot_sync(FULL_MASK, row_begin + inclusive > tile);
        if (beyond) {
            const int at = __ffs(beyond) - 1;
            row_begin += __shfl_sync(FULL_MASK, inclusive - own, at);
            return b + at;
        }
        row_begin += __shfl_sync(FULL_MASK, inclusive, 31);
    }
}
