// What the kernels of products share, each a template on its configuration.
#pragma once

#include "../../device/csrc/ptx.cuh"

// How a kernel reads weights and multiplies by them: dense.cuh and quantized.cuh specialize it. Both define
//   K_TILE          inputs of a K tile, the part of an output tile that a warp multiplies at once
//   STAGE_K_TILES   K tiles of a stage of the pipeline
//   STAGE_BYTES     size of a stage
//   X_SUM_COLUMNS   sums of x that a K tile needs
//   copy            starts the copies of a stage
//   multiply_stage  multiplies a warp's K tiles of a stage by x
template <class Config, bool DENSE = Config::WEIGHT_BITS == 16> struct Weights;

// Loads that the compiler may move, unlike ld_shared.
template <int N> __device__ __forceinline__ void load_words(u32 (&x)[N], const u8* from) {
    if constexpr (N == 4) {
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
    } else {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        x[0] = words.x, x[1] = words.y;
    }
}
