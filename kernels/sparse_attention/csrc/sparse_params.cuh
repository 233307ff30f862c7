// Arguments of attention to chosen tokens; SparseParams in cuda_launch.py has the same layout.
#pragma once

#include "../../kv_cache/csrc/quantized_kv_params.cuh"

struct SparseParams {
    const u16 *q, *keys, *values;
    const int *begin, *end, *groups;  // per batch row: visible full-precision slots, visible quantized groups
    u32* arrivals;                    // [row], zero before and after the call; a row is a (batch row, KV head)
    float* partial;                   // [row, part, entry], see partial_results.cuh; relative to part_max
    float *part_max, *part_sum;       // [row, part, HEADS]
    u16* out;                         // [batch, q_heads, HEAD_DIM]
    const u8* value_rows;
    QuantizedPlanes key_codes, value_codes;
    // Of an index list: pages of `page` tokens [batch, sets, index_capacity], and how many are listed [batch, sets].
    const int *index, *count;
    // Of progressive attention: how many tokens to choose, per batch row; 2-bit keys.
    const int* k;
    const u8* two_bit;
    int batch, kv_heads, capacity, group_capacity;
    int parts;  // CTAs of a row
    int sinks;  // first tokens, which progressive attention always chooses
    int sets, index_capacity, page;
    // Strides in units of 8 elements, so that they fit 32 bits.
    int q_batch_stride, q_head_stride;
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
    float scale;  // softmax scale
};
