// Arguments of the choice by 2-bit keys; TwoBitParams in two_bit_top_k_cuda.py has the same layout.
#pragma once

#include "config.cuh"

// A row is a (batch row, KV head); its `parts` CTAs take adjacent ranges of its groups.
struct TwoBitParams {
    const u16* q;
    const int *groups, *k, *positions;  // per batch row; positions may be null: zero
    const u8* codes;
    const u16 *scales, *minima;  // of the keys
    float* lse;                  // [places, batch, q_heads], natural logarithms; places are lse_stride apart
    u16* bins;                   // [row, group_capacity * GROUP], of every token
    u32* histograms;             // [row, part, BINS]
    float* scan_sum;             // [row, part, HEADS]
    int *index, *count;          // [row, max_k], [row]
    int kv_heads, group_capacity, parts, sinks, max_k, places, lse_stride;
    int q_batch_stride, q_head_stride;  // in units of 8 elements
    float scale;                        // softmax scale

    // Log-sum-exps of the row's query heads, of the position `ahead` of its query's.
    __device__ __forceinline__ float* row_lse(int row, int ahead) const {
        const int position = positions ? __ldcg(positions + row / kv_heads) : 0;
        return lse + i64((position + ahead + places) % places) * lse_stride + i64(row) * HEADS;
    }
    __device__ __forceinline__ int row_groups(int row) const {
        return min(__ldcg(groups + row / kv_heads), group_capacity);
    }
};

// The groups of a CTA.
struct OwnGroups {
    i64 first_stored;  // the row's first group, among all rows'
    int first, last;   // in the row

    __device__ __forceinline__ OwnGroups(const TwoBitParams& p, int row, int part) {
        const int groups = p.row_groups(row);
        first_stored = i64(row) * p.group_capacity;
        first = i64(groups) * part / p.parts, last = i64(groups) * (part + 1) / p.parts;
    }
    __device__ __forceinline__ int count() const { return last - first; }
    __device__ __forceinline__ int in_row(int i) const { return first + i; }
    __device__ __forceinline__ i64 stored(int i) const { return first_stored + in_row(i); }
};
