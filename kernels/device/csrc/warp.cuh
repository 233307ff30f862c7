// Sums and maxima over the lanes of a warp. In the tiles of tensor cores lane 4 g + c holds row or column g (ptx.cuh):
// a quad is the four lanes of one g, a column the eight lanes of one c.
//
//     lane   0  1  2  3 |  4  5  6  7 | ... | 28 29 30 31
//     g      0  0  0  0 |  1  1  1  1 | ... |  7  7  7  7     quad_*    joins the lanes of one g
//     c      0  1  2  3 |  0  1  2  3 | ... |  0  1  2  3     column_*  joins the lanes of one c
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}
// In place, of several numbers at once, whose latencies overlap.
template <class... Floats> __device__ __forceinline__ void quad_sum(Floats&... x) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) ((x += __shfl_xor_sync(FULL_MASK, x, step)), ...);
}
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}
template <class... Floats> __device__ __forceinline__ void column_sum(Floats&... x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) ((x += __shfl_xor_sync(FULL_MASK, x, step)), ...);
}

// The sum of `x` over this lane and all lanes before it.
template <class T> __device__ __forceinline__ T inclusive_sum(T x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T before = __shfl_up_sync(FULL_MASK, x, step);
        if (lane >= step) x += before;
    }
    return x;
}
