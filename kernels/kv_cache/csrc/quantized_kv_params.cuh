// Pointers to a layer's quantized keys or values, as kernels take them; layout.py has the shapes.
#pragma once

#include "../../device/csrc/ptx.cuh"

struct QuantizedPlanes {
    u8 *upper, *lower;  // 4-bit codes, two a byte
    u16 *scale, *minimum;
};
