// A group of keys: one scale and minimum per channel.
#pragma once

#include "codes.cuh"

// A lane holds channels 4 i .. 4 i + 3 of both halves, whose codes share bytes.
struct KeyTile {
    uint2 words[TOKENS][2];

    __device__ __forceinline__ KeyTile(const u16* x, i64 stride, int lane, int stream) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                words[i][half] =
                    *(const uint2*)(x + (stream + i * STREAMS) * stride + 4 * lane + half * (HEAD_DIM / 2));
    }

    __device__ __forceinline__ u32 pair(int i, int k) const { return k % 2 ? words[i][k / 2].y : words[i][k / 2].x; }

    __device__ __forceinline__ float element(int i, int channel) const {
        const u32 word = pair(i, channel / 2);
        return channel % 2 ? Elem::high_to_float(word) : Elem::low_to_float(word);
    }

    // Ranges of the warp's tokens, four channels at a time as they lie in memory.
    __device__ __forceinline__ void ranges(uint2* low, uint2* high) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 smallest[2], largest[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                u32 a = pair(0, 2 * half + k), b = a;
#pragma unroll
                for (int i = 1; i < TOKENS; i++)
                    a = Elem::min_pair(a, pair(i, 2 * half + k)), b = Elem::max_pair(b, pair(i, 2 * half + k));
#pragma unroll
                for (int distance = LANES; distance < 32; distance *= 2) {
                    a = Elem::min_pair(a, __shfl_xor_sync(FULL_MASK, a, distance));
                    b = Elem::max_pair(b, __shfl_xor_sync(FULL_MASK, b, distance));
                }
                smallest[k] = a, largest[k] = b;
            }
            if (threadIdx.x % 32 < LANES) {
                low[half * LANES] = make_uint2(smallest[0], smallest[1]);
                high[half * LANES] = make_uint2(largest[0], largest[1]);
            }
        }
    }
};

__device__ __forceinline__ void quantize_keys(
    const u16* x, i64 stride, const GroupIndex& index, const QuantizedPlanes& planes
) {
    __shared__ uint2 lows[WARPS][HEAD_DIM / 4], highs[WARPS][HEAD_DIM / 4];
    __shared__ float2 affine[HEAD_DIM];
    const int lane = threadIdx.x % LANES, stream = threadIdx.x / LANES, warp = threadIdx.x / 32;
    const KeyTile tile(x, stride, lane, stream);
    const int group = index.group();
    tile.ranges(lows[warp] + lane, highs[warp] + lane);
    if (group >= index.group_capacity) return;
    const QuantizedPlanes out = planes_at(planes, index.flat(group), HEAD_DIM);
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
        float smallest = Elem::to_float(((const u16*)lows[0])[threadIdx.x]);
        float largest = Elem::to_float(((const u16*)highs[0])[threadIdx.x]);
#pragma unroll
        for (int other = 1; other < WARPS; other++) {
            smallest = fminf(smallest, Elem::to_float(((const u16*)lows[other])[threadIdx.x]));
            largest = fmaxf(largest, Elem::to_float(((const u16*)highs[other])[threadIdx.x]));
        }
        const Affine own(smallest, largest);
        out.scale[threadIdx.x] = own.scale, out.minimum[threadIdx.x] = own.minimum;
        affine[threadIdx.x] = make_float2(own.inverse, own.low);
    }
    __syncthreads();
    float2 own[8];
#pragma unroll
    for (int c = 0; c < 8; c++) own[c] = affine[4 * lane + c % 4 + c / 4 * (HEAD_DIM / 2)];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        u32 coarse[4], fine[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const PackedCodes codes(tile.element(i, c), tile.element(i, 4 + c), own[c], own[4 + c]);
            coarse[c] = codes.upper, fine[c] = codes.lower;
        }
        const int at = (stream + i * STREAMS) * (HEAD_DIM / 2) + 4 * lane;
        *(u32*)(out.upper + at) = low_bytes(coarse[0], coarse[1], coarse[2], coarse[3]);
        if (PLANES == 2) *(u32*)(out.lower + at) = low_bytes(fine[0], fine[1], fine[2], fine[3]);
    }
}
