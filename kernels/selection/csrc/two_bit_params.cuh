// Arguments of the choice by 2-bit keys; TwoBitParams in two_bit_top_k_cuda.py has the same layout.
#pragma once

#include "config.cuh"

constexpr int MOST_GROUPS = 320;  // of a CTA

// A row is a (batch row, KV head); its `parts` CTAs take adjacent ranges of its groups.
struct TwoBitParams {
    const u16* q;
    const int *groups, *k;       // per batch row
    const u8* codes;
    const u16 *scales, *minima;  // of the keys
    u16* bins;                   // [row, group_capacity * GROUP], of every token
    u32* histograms;             // [row, part, BINS]
    int *index, *count;          // [row, max_k], [row]
    int kv_heads, group_capacity, parts, sinks, max_k;
    int q_batch_stride, q_head_stride;  // in units of 8 elements
    float scale;                        // softmax scale

    __device__ __forceinline__ int row_groups(int row) const {
        return min(__ldcg(groups + row / kv_heads), group_capacity);
    }
};

// The groups of a CTA, a range of its row's.
struct OwnGroups {
    i64 first_stored;  // the row's first group, among all rows'
    int row_groups, first, last;

    __device__ __forceinline__ OwnGroups(const TwoBitParams& p, int row, int part)
        : first_stored(i64(row) * p.group_capacity), row_groups(p.row_groups(row)),
          first(i64(row_groups) * part / p.parts), last(i64(row_groups) * (part + 1) / p.parts) {}
    __device__ __forceinline__ int count() const { return last - first; }
    __device__ __forceinline__ int in_row(int i) const { return first + i; }
    __device__ __forceinline__ i64 stored(int number) const { return first_stored + number; }
};
