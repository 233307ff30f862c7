// The number format: a range's scale and minimum, and codes relative to them. The same float32 operations as
// `encode` in kv_cache/reference.py, bit by bit.
#pragma once

#include "config.cuh"
#include "params.cuh"

// Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits of a float: conversions between floats
// and integers run at an eighth of the rate of additions.
constexpr float ROUNDER = 12582912.0f;
constexpr u32 ROUNDER_BITS = 0x4B400000u;

// The stored pair of a range, and what encoding needs of it.
struct Affine {
    u16 scale, minimum;
    float inverse, low;

    __device__ __forceinline__ Affine(float smallest, float largest)
        : scale(float_to_half(__fmul_rn(largest - smallest, 1.0f / 15))), minimum(float_to_half(smallest)) {
        const float step = half_to_float(scale);
        inverse = __fdiv_rn(1.0f, step == 0 ? 1.0f : step);
        low = half_to_float(minimum);
    }
};

// Codes of two elements that share a byte, each by the {inverse, low} of its range; only the low byte of each word
// counts.
struct PackedCodes {
    u32 upper, lower;

    __device__ __forceinline__ PackedCodes(float first, float second, float2 first_affine, float2 second_affine) {
        u32 upper0, lower0, upper1, lower1;
        encode(first, first_affine, upper0, lower0);
        encode(second, second_affine, upper1, lower1);
        upper = upper0 + 16 * upper1;
        lower = lower0 + 16 * lower1;
    }

    // Between -8/16 and 15 7/16 nothing clamps but a residual of just 8/16.
    __device__ __forceinline__ static void encode(float x, float2 affine, u32& upper, u32& lower) {
        const float position = fminf(fmaxf(__fmul_rn(__fsub_rn(x, affine.y), affine.x), -0.5f), 15.4375f);
        const u32 coarse = __float_as_uint(__fadd_rn(position, ROUNDER));
        const u32 fine = __float_as_uint(__fmaf_rn(position, 16.0f, ROUNDER));
        upper = coarse;
        lower = min(int(fine - 16 * coarse + 15 * ROUNDER_BITS + 8), 15);
    }
};

// The lowest bytes of four words, in one.
__device__ __forceinline__ u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Which group is written. That is only known on the device: one past the end must not write into the next row. It is
// read after the elements, which need not wait for it.
struct GroupIndex {
    const int* group_index;
    int batch, group_capacity;

    __device__ __forceinline__ int group() const { return group_index[batch] + int(blockIdx.y); }
    __device__ __forceinline__ i64 flat(int group) const { return i64(blockIdx.x) * group_capacity + group; }
};

// The planes of one group, with `pairs` scales.
__device__ __forceinline__ QuantizedPlanes planes_at(const QuantizedPlanes& planes, i64 flat, int pairs) {
    const i64 codes = flat * (GROUP * HEAD_DIM / 2);
    return {planes.upper + codes, planes.lower + codes, planes.scale + flat * pairs, planes.minimum + flat * pairs};
}
