// Quantization of a group: the number format, and the tiles of keys and of values that a CTA's threads hold.
#pragma once

#include "../../device/csrc/dequant.cuh"
#include "quantized_planes.cuh"

// The stored pair of a range of numbers, and what encoding needs of it. These and the operations of `PackedCodes` are
// the float32 operations of `encode` in kv_cache/reference.py, bit by bit.
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
    return pack_low_halves(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040));
}

// The group that is written, which only the device knows; a group past the end must not be written into the next row.
// The index is read after the elements, which need not wait for it.
struct GroupIndex {
    const int* group_index;
    int batch, group_capacity;
    int page_heads, kv_head;  // KV heads of a page, 0 if the cache has no pages

    __device__ __forceinline__ int group() const {
        return page_heads ? group_index[batch * int(gridDim.y) + int(blockIdx.y)] : group_index[batch] + int(blockIdx.y);
    }
    __device__ __forceinline__ bool outside(int group) const { return u32(group) >= u32(group_capacity); }
    __device__ __forceinline__ i64 flat(int group) const {
        return page_heads ? i64(group) * page_heads + kv_head : i64(blockIdx.x) * group_capacity + group;
    }
};

// The planes of one group, with `pairs` scales.
template <class Config>
__device__ __forceinline__ QuantizedPlanes planes_at(const QuantizedPlanes& planes, i64 flat, int pairs) {
    const i64 codes = flat * (Config::GROUP * Config::HEAD_DIM / 2);
    return {planes.upper + codes, planes.lower + codes, planes.scale + flat * pairs, planes.minimum + flat * pairs};
}

// A group of keys: one scale and minimum per channel. Thread stream * LANES + lane holds channels 4 lane .. 4 lane + 3
// of both halves, whose codes share bytes, of the tokens stream, stream + STREAMS, ...
//
//     HEAD_DIM = 128, 16 lanes, 16 streams
//     channel      0 .. 3    4 .. 7   ...   60 .. 63 |  64 .. 67   68 .. 71   ...   124 .. 127
//     token 0      lane 0    lane 1   ...   lane 15  |  lane 0     lane 1     ...   lane 15        stream 0
//     token 1                                                                                      stream 1
//     ...
//     token 16                                                                                     stream 0
template <class Config> struct KeyTile {
    static constexpr int HEAD_DIM = Config::HEAD_DIM, LANES = Config::LANES, TOKENS = Config::TOKENS;
    using Elem = typename Config::Elem;
    uint2 words[TOKENS][2];

    __device__ __forceinline__ KeyTile(const u16* x, i64 stride, int lane, int stream) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                words[i][half] =
                    *(const uint2*)(x + (stream + i * Config::STREAMS) * stride + 4 * lane + half * (HEAD_DIM / 2));
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

template <class Config> __device__ __forceinline__ void quantize_keys(
    const u16* x, i64 stride, const GroupIndex& index, const QuantizedPlanes& planes
) {
    using Elem = typename Config::Elem;
    constexpr int HEAD_DIM = Config::HEAD_DIM, LANES = Config::LANES, WARPS = Config::WARPS;
    __shared__ uint2 lows[WARPS][HEAD_DIM / 4], highs[WARPS][HEAD_DIM / 4];
    __shared__ float2 affine[HEAD_DIM];
    const int lane = threadIdx.x % LANES, stream = threadIdx.x / LANES, warp = threadIdx.x / 32;
    const KeyTile<Config> tile(x, stride, lane, stream);
    const int group = index.group();
    tile.ranges(lows[warp] + lane, highs[warp] + lane);
    if (index.outside(group)) return;
    const QuantizedPlanes out = planes_at<Config>(planes, index.flat(group), HEAD_DIM);
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
        float smallest = Elem::to_float(((const u16*)lows[0])[threadIdx.x]);
        float largest = Elem::to_float(((const u16*)highs[0])[threadIdx.x]);
#pragma unroll
        for (int other = 1; other < WARPS; other++) {
            smallest = fminf(smallest, Elem::to_float(((const u16*)lows[other])[threadIdx.x]));
            largest = fmaxf(largest, Elem::to_float(((const u16*)highs[other])[threadIdx.x]));
        }
        const Affine channel(smallest, largest);
        out.scale[threadIdx.x] = channel.scale, out.minimum[threadIdx.x] = channel.minimum;
        affine[threadIdx.x] = make_float2(channel.inverse, channel.low);
    }
    __syncthreads();
    float2 lane_affine[8];
#pragma unroll
    for (int c = 0; c < 8; c++) lane_affine[c] = affine[4 * lane + c % 4 + c / 4 * (HEAD_DIM / 2)];
#pragma unroll
    for (int i = 0; i < Config::TOKENS; i++) {
        u32 coarse[4], fine[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const PackedCodes codes(tile.element(i, c), tile.element(i, 4 + c), lane_affine[c],
                                    lane_affine[4 + c]);
            coarse[c] = codes.upper, fine[c] = codes.lower;
        }
        const int at = (stream + i * Config::STREAMS) * (HEAD_DIM / 2) + 4 * lane;
        *(u32*)(out.upper + at) = low_bytes(coarse[0], coarse[1], coarse[2], coarse[3]);
        if (Config::PLANES == 2) *(u32*)(out.lower + at) = low_bytes(fine[0], fine[1], fine[2], fine[3]);
    }
}

// A group of values: one scale and minimum per token. Thread stream * LANES + lane holds channels 8 lane .. 8 lane + 7
// of TOKENS / 2 = 4 consecutive tokens of either half of the group, which share bytes.
//
//     channel          0 .. 7    8 .. 15   ...   HEAD_DIM - 8 .. HEAD_DIM - 1
//     token 0 .. 3     lane 0    lane 1    ...   lane LANES - 1                  stream 0, i = 0 .. 3
//     token 4 .. 7                                                               stream 1, i = 0 .. 3
//     ...
//     token 64 .. 67                                                             stream 0, i = 4 .. 7
template <class Config> struct ValueTile {
    static constexpr int LANES = Config::LANES, TOKENS = Config::TOKENS;
    using Elem = typename Config::Elem;
    uint4 words[TOKENS];

    // Token i of the tile, within the group.
    __device__ __forceinline__ static int token(int stream, int i) {
        return stream * (TOKENS / 2) + i % (TOKENS / 2) + i / (TOKENS / 2) * (Config::GROUP / 2);
    }

    __device__ __forceinline__ ValueTile(const u16* x, i64 stride, int lane, int stream) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++) words[i] = *(const uint4*)(x + token(stream, i) * stride + 8 * lane);
    }

    // {minimum, -maximum} of token i's channels in this lane: a minimum of pairs then joins both.
    __device__ __forceinline__ u32 lane_range(int i) const {
        constexpr u32 SIGNS = 0x80008000u;
        const uint4 w = words[i];
        const u32 low = Elem::min_pair(Elem::min_pair(w.x, w.y), Elem::min_pair(w.z, w.w));
        const u32 high = Elem::max_pair(Elem::max_pair(w.x, w.y), Elem::max_pair(w.z, w.w)) ^ SIGNS;
        return Elem::min_pair(pack_low_halves(low, high), pack_high_halves(low, high));
    }

    // The range of token `lane % TOKENS` of the tile: lanes exchange halves of their tokens until one is left.
    __device__ __forceinline__ u32 range(int lane) const {
        u32 ranges[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; i++) ranges[i] = lane_range(i);
#pragma unroll
        for (int count = TOKENS / 2; count > 0; count /= 2)
#pragma unroll
            for (int i = 0; i < count; i++) {
                const bool later = lane & count;
                const u32 sent = later ? ranges[i] : ranges[i + count], kept = later ? ranges[i + count] : ranges[i];
                ranges[i] = Elem::min_pair(kept, __shfl_xor_sync(FULL_MASK, sent, count));
            }
#pragma unroll
        for (int distance = TOKENS; distance < LANES; distance *= 2)
            ranges[0] = Elem::min_pair(ranges[0], __shfl_xor_sync(FULL_MASK, ranges[0], distance));
        return ranges[0];
    }

    __device__ __forceinline__ float element(int i, int channel) const {
        const uint4 w = words[i];
        const u32 pair = channel < 4 ? (channel < 2 ? w.x : w.y) : (channel < 6 ? w.z : w.w);
        return channel % 2 ? Elem::high_to_float(pair) : Elem::low_to_float(pair);
    }
};

// Codes are transposed in shared memory: each lane's 8 channels of ROW_BYTES bytes, and PAD_BYTES that keep the banks
// of a warp's lanes apart.
template <class Config> __device__ __forceinline__ void quantize_values(
    const u16* x, i64 stride, const GroupIndex& index, const QuantizedPlanes& planes
) {
    using Tile = ValueTile<Config>;
    using Elem = typename Config::Elem;
    constexpr int LANES = Config::LANES, TOKENS = Config::TOKENS, PLANES = Config::PLANES;
    constexpr int ROW_BYTES = Config::GROUP / 2, PAD_BYTES = 16;
    __shared__ __align__(16) u8 transposed[PLANES][LANES * (8 * ROW_BYTES + PAD_BYTES)];
    const int lane = threadIdx.x % LANES, stream = threadIdx.x / LANES;
    const Tile tile(x, stride, lane, stream);
    const int group = index.group();
    const u32 range = tile.range(lane);
    if (index.outside(group)) return;
    const QuantizedPlanes out = planes_at<Config>(planes, index.flat(group), Config::GROUP);
    const Affine token(Elem::low_to_float(range), -Elem::high_to_float(range));
    if (lane < TOKENS) {
        out.scale[Tile::token(stream, lane)] = token.scale;
        out.minimum[Tile::token(stream, lane)] = token.minimum;
    }
    float2 affine[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        affine[i].x = __shfl_sync(FULL_MASK, token.inverse, i, LANES);
        affine[i].y = __shfl_sync(FULL_MASK, token.low, i, LANES);
    }
#pragma unroll
    for (int channel = 0; channel < 8; channel++) {
        u32 coarse[4], fine[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const PackedCodes codes(tile.element(i, channel), tile.element(4 + i, channel), affine[i], affine[4 + i]);
            coarse[i] = codes.upper, fine[i] = codes.lower;
        }
        const int at = lane * (8 * ROW_BYTES + PAD_BYTES) + channel * ROW_BYTES + Tile::token(stream, 0);
        *(u32*)(transposed[0] + at) = low_bytes(coarse[0], coarse[1], coarse[2], coarse[3]);
        if (PLANES == 2) *(u32*)(transposed[PLANES - 1] + at) = low_bytes(fine[0], fine[1], fine[2], fine[3]);
    }
    __syncthreads();
#pragma unroll
    for (int at = 16 * threadIdx.x; at < Config::HEAD_DIM * ROW_BYTES; at += 16 * Config::THREADS) {
        const int padded = at + at / (8 * ROW_BYTES) * PAD_BYTES;
        *(uint4*)(out.upper + at) = *(const uint4*)(transposed[0] + padded);
        if (PLANES == 2) *(uint4*)(out.lower + at) = *(const uint4*)(transposed[PLANES - 1] + padded);
    }
}
