// How warps of a CTA hand over stages of the weight and sums of products.
#pragma once

#include "../../device/csrc/ptx.cuh"

// An index into a ring of buffers, and the parity of its barrier's phase.
struct PipelineState {
    int index;
    u32 parity;

    __device__ __forceinline__ void advance(int count) {
        if (++index == count) index = 0, parity ^= 1;
    }
};

// A warp's sums of an output tile as they lie in its registers: [X_TILES, row half, lane] pairs.
template <class Config>
__device__ __forceinline__ void store_sums(const float (&acc)[Config::X_TILES][4], float* sums, int lane) {
#pragma unroll
    for (int t = 0; t < Config::X_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float2*>(sums + ((2 * t + half) * 32 + lane) * 2) =
                make_float2(acc[t][2 * half], acc[t][2 * half + 1]);
}

// Position of sum `i` of a tile, i = 16 * column + output, in the order that `store_sums` writes:
// [column / 8, output / 8, output % 8, column % 8], as lane 4 * (output % 8) + column % 8 / 2 holds two columns.
__device__ __forceinline__ int sum_index(int i) { return i / 128 * 128 + i / 8 % 2 * 64 + i % 8 * 8 + i / 16 % 8; }

// The sum of COUNT warps, of which `sums` is the first's.
template <class Config, int COUNT> __device__ __forceinline__ float add_up(const float* sums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += sums[i * Config::TILE_SUMS];
    return sum;
}
