// Parameters of the top-k by 2-bit keys, and the groups of a CTA.
#pragma once

#include "config.cuh"

// TwoBitParams in selection/cuda.py has the same layout. A row is a (batch row, KV head); its `parts` CTAs take
// adjacent ranges of its groups.
struct TwoBitParams {
    const u16* q;                // [batch, q_heads, HEAD_DIM], by the strides below
    const int *groups, *k;       // [batch]: visible groups; tokens to choose
    const u8* codes;             // [row, group_capacity, GROUP, HEAD_DIM / 4], four 2-bit codes a byte
    const u16 *scales, *minima;  // [row, group_capacity, HEAD_DIM], float16
    u16* bins;                   // [row, group_capacity * GROUP]: each token's bin
    u32* histograms;             // [row, part, BINS]
    int *index, *count;          // [row, max_k]: chosen tokens, ascending; [row]: how many
    int kv_heads, group_capacity, parts, sinks, max_k;
    int q_batch_stride, q_head_stride;  // in units of 8 elements
    float scale;                        // softmax scale

    __device__ __forceinline__ int row_groups(int row) const {
        return min(__ldcg(groups + row / kv_heads), group_capacity);
    }
};

// The groups of a CTA, a range of its row's.
struct GroupRange {
    i64 first_stored;  // the row's first group, among all rows'
    int row_groups, first, last;

    __device__ __forceinline__ GroupRange(const TwoBitParams& p, int row, int part)
        : first_stored(i64(row) * p.group_capacity), row_groups(p.row_groups(row)),
          first(i64(row_groups) * part / p.parts), last(i64(row_groups) * (part + 1) / p.parts) {}
    __device__ __forceinline__ int count() const { return last - first; }
    __device__ __forceinline__ int in_row(int i) const { return first + i; }
    __device__ __forceinline__ i64 stored(int number) const { return first_stored + number; }
};
