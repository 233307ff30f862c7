// Arguments of the quantization kernel; QuantizeParams in kv_cache/quantize_cuda.py has the same layout.
#pragma once

#include "quantized_kv_params.cuh"

struct QuantizeParams {
    const u16 *keys, *values;
    const int* group_index;  // [batch]: the first group of each row to write
    const u8* mask;          // bool [batch], or null: every row
    const int* first_slot;   // [batch]: where each row's one group begins, or null: groups from slot 0 on
    QuantizedPlanes key_codes, value_codes;
    int kv_heads, group_capacity;
    // Strides in units of 8 elements, so that they fit 32 bits.
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
};
