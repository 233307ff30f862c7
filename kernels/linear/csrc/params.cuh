// Arguments of the linear kernels; LinearParams in linear/cuda_launch.py has the same layout.
#pragma once

#include "../../device/csrc/ptx.cuh"

struct LinearParams {
    const u8 *x, *weight;  // [rows, inputs]; as dense.cuh or quantized.cuh takes it
    const u8* lower;       // the second plane of 8-bit weights, or null
    const u16* bias;       // [outputs], or null
    u16* y;                // [rows, outputs], with FUSE_SWIGLU [rows, outputs / 2]
    int rows, inputs, outputs;
    int rows_per_pass;     // rows of x of a CTA; blockIdx.y counts passes over the weight
    int max_tiles;         // output tiles of a CTA, at most
    int stages;            // pipeline stages
    int trigger_stages;    // stages left to be copied when the next kernel may start
    int stages_before_x, stages_after_x;  // in flight at once before and after x has arrived
};
