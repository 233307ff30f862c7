// The online softmax (Milakov and Gimelshein, arXiv:1805.02867), in base 2: scores are multiplied by log2(e), and every
// sum is relative to 2^row_max, where row_max is the largest score so far or a reference near it. When the reference
// rises, what was summed before is multiplied by 2^(old - new). Partial results of splits are merged the same way.
//
//     split 0:  row_max 3, row_sum 5, out x        row_max 7
//                                              ->  row_sum 5 * 2^(3 - 7) + 2
//     split 1:  row_max 7, row_sum 2, out y        out     x * 2^(3 - 7) + y,   divided by row_sum at the end
#pragma once

#include "warp.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// What exponents of a row are relative to: its maximum, or 0 if the row sees no token (-inf less -inf is not a number).
__device__ __forceinline__ float finite_reference(float row_max) {
    return row_max == negative_infinity() ? 0 : row_max;
}

// State of a row of which this thread accumulates N output channels.
template <int N> struct SoftmaxState {
    float row_max, row_sum, out[N];

    SoftmaxState() = default;
    __device__ __forceinline__ explicit SoftmaxState(float reference) : row_max(reference), row_sum(0), out{} {}
    __device__ __forceinline__ void rescale(float new_max) {
        const float factor = exp2_approx(row_max - new_max);
        row_max = new_max;
        row_sum *= factor;
#pragma unroll
        for (int i = 0; i < N; i++) out[i] *= factor;
    }
    // Adds a partial result, of which `weight` is 2^(its row_max less this one).
    __device__ __forceinline__ void add(float weight, float sum, const float (&part)[N]) {
        row_sum = fmaf(weight, sum, row_sum);
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = fmaf(weight, part[i], out[i]);
    }
    __device__ __forceinline__ void merge(const SoftmaxState& other) {
        rescale(fmaxf(row_max, other.row_max));
        add(exp2_approx(other.row_max - row_max), other.row_sum, other.out);
    }
};
