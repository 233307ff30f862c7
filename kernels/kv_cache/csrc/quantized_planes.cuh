// A layer's quantized keys or values, as kernels take them; kv_cache/layout.py has the tensors.
#pragma once

#include "../../device/csrc/ptx.cuh"

constexpr int KV_GROUP = 128;  // tokens of a quantized group

// Pointers to all groups of all rows; QuantizedPlanes in kv_cache/cuda.py has the same layout. D is HEAD_DIM.
//
//              upper, lower                       scale, minimum (float16)
//     keys     [row, group, token, D / 2 bytes]   [row, group, channel]
//     values   [row, group, channel, 64 bytes]    [row, group, token]
//
//     byte b of a key's token                      byte t of a value's channel
//       bits  7 .. 4            3 .. 0               bits  7 .. 4         3 .. 0
//             channel b + D/2   channel b                  token t + 64   token t
struct QuantizedPlanes {
    u8 *upper, *lower;
    u16 *scale, *minimum;
};
