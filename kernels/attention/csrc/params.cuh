// Arguments of both attention kernels; AttentionParams in attention/cuda.py has the same layout.
#pragma once

#include "../../kv_cache/csrc/quantized_planes.cuh"

struct AttentionParams {
    const u16 *q, *keys, *values;
    // Per batch row: first full-precision slot, one past the first query's own token, visible quantized groups.
    const int *begin, *end, *groups;
    float *partial, *lse;  // partials [split, query row, HEAD_DIM], and base-2 log-sum-exps [split, query row]
    int2* row_ctas;        // first and last CTA of each (batch row, KV head), if the reduction is not fused
    u16* out;              // [batch, queries, q_heads, HEAD_DIM]
    u32* arrivals;         // counter of each (batch row, KV head), zero before and after the call
    float* scores;         // [batch, kv_heads, score_capacity], if any are left
    float* score_lse;      // [batch, q_heads], log-sum-exps of the last query: of the call before, then of this one
    QuantizedPlanes key_codes, value_codes;
    int batch, kv_heads, q_heads_per_kv, queries, capacity, group_capacity;
    int score_capacity, score_step;  // of the last query, and of each `score_step` before it, scores are summed
    // Strides in units of 8 elements, so that they fit 32 bits.
    int q_batch_stride, q_query_stride, q_head_stride;
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
    int fuse_reduction;  // whether a row's last CTA reduces its splits; else the kernel `merge` does
    float scale;         // softmax scale
};
