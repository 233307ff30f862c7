// A group of values: one scale and minimum per token, codes transposed; token j shares bytes with token j + 64.
#pragma once

#include "codes.cuh"

constexpr int ROW_BYTES = GROUP / 2;  // bytes of one channel's codes
constexpr int PAD_BYTES = 16;         // after 8 channels, which keeps the banks of a warp's lanes apart

// Token i of a lane's tile, within the group.
__device__ __forceinline__ int value_token(int stream, int i) {
    return stream * (TOKENS / 2) + i % (TOKENS / 2) + i / (TOKENS / 2) * (GROUP / 2);
}

// A lane holds 8 channels of TOKENS / 2 consecutive tokens of either half.
struct ValueTile {
    uint4 words[TOKENS];

    __device__ __forceinline__ ValueTile(const u16* x, i64 stride, int lane, int stream) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++) words[i] = *(const uint4*)(x + value_token(stream, i) * stride + 8 * lane);
    }

    // {minimum, -maximum} of a token's channels in this lane: one instruction then does for both.
    __device__ __forceinline__ u32 own_range(int i) const {
        const uint4 w = words[i];
        const u32 low = Elem::min_pair(Elem::min_pair(w.x, w.y), Elem::min_pair(w.z, w.w));
        const u32 high = Elem::max_pair(Elem::max_pair(w.x, w.y), Elem::max_pair(w.z, w.w)) ^ 0x80008000u;
        return Elem::min_pair(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }

    // The range of token `lane % TOKENS` of the tile: lanes hand each other the tokens that are not theirs.
    __device__ __forceinline__ u32 range(int lane) const {
        u32 own[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; i++) own[i] = own_range(i);
#pragma unroll
        for (int count = TOKENS / 2; count > 0; count /= 2)
#pragma unroll
            for (int i = 0; i < count; i++) {
                const bool later = lane & count;
                const u32 given = later ? own[i] : own[i + count], kept = later ? own[i + count] : own[i];
                own[i] = Elem::min_pair(kept, __shfl_xor_sync(FULL_MASK, given, count));
            }
#pragma unroll
        for (int distance = TOKENS; distance < LANES; distance *= 2)
            own[0] = Elem::min_pair(own[0], __shfl_xor_sync(FULL_MASK, own[0], distance));
        return own[0];
    }

    __device__ __forceinline__ float element(int i, int channel) const {
        const uint4 w = words[i];
        const u32 pair = channel < 4 ? (channel < 2 ? w.x : w.y) : (channel < 6 ? w.z : w.w);
        return channel % 2 ? Elem::high_to_float(pair) : Elem::low_to_float(pair);
    }
};

__device__ __forceinline__ void quantize_values(
    const u16* x, i64 stride, const GroupIndex& index, const QuantizedPlanes& planes
) {
    __shared__ __align__(16) u8 transposed[PLANES][LANES * (8 * ROW_BYTES + PAD_BYTES)];
    const int lane = threadIdx.x % LANES, stream = threadIdx.x / LANES;
    const ValueTile tile(x, stride, lane, stream);
    const int group = index.group();
    const u32 range = tile.range(lane);
    if (group >= index.group_capacity) return;
    const QuantizedPlanes out = planes_at(planes, index.flat(group), GROUP);
    const Affine own(Elem::low_to_float(range), -Elem::high_to_float(range));
    if (lane < TOKENS) {
        out.scale[value_token(stream, lane)] = own.scale;
        out.minimum[value_token(stream, lane)] = own.minimum;
    }
    float2 affine[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        affine[i].x = __shfl_sync(FULL_MASK, own.inverse, i, LANES);
        affine[i].y = __shfl_sync(FULL_MASK, own.low, i, LANES);
    }
#pragma unroll
    for (int channel = 0; channel < 8; channel++) {
        u32 coarse[4], fine[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const PackedCodes codes(tile.element(i, channel), tile.element(4 + i, channel), affine[i], affine[4 + i]);
            coarse[i] = codes.upper, fine[i] = codes.lower;
        }
        const int at = lane * (8 * ROW_BYTES + PAD_BYTES) + channel * ROW_BYTES + value_token(stream, 0);
        *(u32*)(transposed[0] + at) = low_bytes(coarse[0], coarse[1], coarse[2], coarse[3]);
        if (PLANES == 2) *(u32*)(transposed[PLANES - 1] + at) = low_bytes(fine[0], fine[1], fine[2], fine[3]);
    }
    __syncthreads();
#pragma unroll
    for (int at = 16 * threadIdx.x; at < HEAD_DIM * ROW_BYTES; at += 16 * THREADS) {
        const int padded = at + at / (8 * ROW_BYTES) * PAD_BYTES;
        *(uint4*)(out.upper + at) = *(const uint4*)(transposed[0] + padded);
        if (PLANES == 2) *(uint4*)(out.lower + at) = *(const uint4*)(transposed[PLANES - 1] + padded);
    }
}
