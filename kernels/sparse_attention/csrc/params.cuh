// Arguments of progressive attention; ProgressiveParams in progressive_cuda.py has the same layout.
#pragma once

#include "../../kv_cache/csrc/quantized_kv_params.cuh"

struct ProgressiveParams {
    const u16 *q, *keys, *values;
    // Per batch row: visible full-precision slots, visible quantized groups, tokens to choose of these.
    const int *begin, *end, *groups, *k;
    float* lse;      // [batch, q_heads], natural logarithms, of the scan before; this scan's at the end
    u32* histogram;  // [row, BINS], zero before and after the call; a row is a (batch row, KV head)
    u32* arrivals;   // [row, 2], likewise
    float* partial;  // [row, part, HEADS, HEAD_DIM], relative to part_max
    float *part_max, *part_sum, *scan_sum;  // [row, part, HEADS]
    u16* out;                               // [batch, q_heads, HEAD_DIM]
    const u8 *two_bit, *value_rows;
    QuantizedPlanes key_codes, value_codes;
    int batch, kv_heads, capacity, group_capacity;
    int parts;  // CTAs of a row
    int sinks;  // first tokens, which are always chosen
    // Strides in units of 8 elements, so that they fit 32 bits.
    int q_batch_stride, q_head_stride;
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
    float scale;  // softmax scale
};
