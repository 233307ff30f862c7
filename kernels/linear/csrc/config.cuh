// Compile-time configuration of the linear kernels, and what follows from it.
#pragma once

#include "../../device/csrc/ptx.cuh"

// Set with -D by LinearSchedule.options in schedule.py:
//   WEIGHT_BITS   16 (dense.cuh), 4 or 8 (quantized.cuh)
//   GROUP         of 4- and 8-bit weights: inputs that share a scale, 32, 64, 128 or 256
//   BF16          dtype of x, bias and y (and of dense weights): 1 bfloat16, 0 float16
//   X_TILES       8-row tiles of x per CTA
//   SPLIT_K       CTAs of a cluster that split the inputs between them: 1, 2, 4 or 8
//   X_MULTICAST   CTAs of a cluster that fetch x together: 1 or 2
//   X_PARTS       parts in which x arrives
//   MMA_WARPS     warps that multiply, per CTA
//   STAGE_INPUTS  inputs of an output tile in one stage of the pipeline
//   MAX_STAGES    of the pipeline
//   FUSE_SWIGLU   1: the first half of the outputs are gates of the second; 0
#ifndef __CUDACC_RTC__  // editors show one variant
#define WEIGHT_BITS 4
#define GROUP 128
#define BF16 1
#define X_TILES 1
#define SPLIT_K 1
#define X_MULTICAST 1
#define X_PARTS 1
#define MMA_WARPS 8
#define STAGE_INPUTS 4096
#define MAX_STAGES 16
#define FUSE_SWIGLU 0
#endif

#define CLUSTER (SPLIT_K * X_MULTICAST)
static_assert(!FUSE_SWIGLU || SPLIT_K == 1, "a gate and what it multiplies must be in one CTA");

constexpr int TILE_OUTPUTS = 16;          // outputs of an output tile, the rows of an mma
constexpr int COLUMNS = 8 * X_TILES;      // rows of x, the columns of the products
constexpr int TILE_SUMS = TILE_OUTPUTS * COLUMNS;
constexpr int SUM_BUFFERS = 2;            // output tiles whose sums are on their way to the epilogue warp
constexpr int PRODUCER_WARP = MMA_WARPS, EPILOGUE_WARP = MMA_WARPS + 1, WARPS = MMA_WARPS + 2, THREADS = 32 * WARPS;

using Elem = Element<BF16 != 0>;

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_m16n8k16<BF16 != 0>(d, a0, a1, a2, a3, b0, b1);
}
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
