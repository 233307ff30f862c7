// Compile-time configuration of attention to chosen tokens, beside that of the scan.
#pragma once

#include "../../selection/csrc/config.cuh"

// Set with -D by SparseVariant.options in cuda_launch.py:
//   TILE_BYTES  size of a TokenTile (stages.cuh)
#ifndef __CUDACC_RTC__  // editors show one variant
#define TILE_BYTES 3104
#endif

constexpr int TILE = 16;  // tokens that a warp attends to at a time

__device__ __forceinline__ void mma_elem(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_m16n8k16<BF16 != 0>(d, a0, a1, a2, a3, b0, b1);
}

__device__ __forceinline__ void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}
