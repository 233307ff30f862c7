// Hierarchical quantization of keys and values, for groups of 128 tokens in 16 bits; quantize_cuda.py has the story.
// Compiled after quantize_steps.cu, which says with which macros. A block takes one group of one KV head, of keys
// (blockIdx.z == 0) or of values.

// Keys: one pair per channel. A lane holds channels 4 i .. 4 i + 3 of both halves, whose codes share bytes.
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
        return channel % 2 ? second_of(word) : first_of(word);
    }

    // Ranges of the warp's tokens, four channels at a time as they lie in memory.
    __device__ __forceinline__ void ranges(uint2* low, uint2* high) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 least_of[2], most_of[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                u32 a = pair(0, 2 * half + k), b = a;
#pragma unroll
                for (int i = 1; i < TOKENS; i++)
                    a = least(a, pair(i, 2 * half + k)), b = most(b, pair(i, 2 * half + k));
#pragma unroll
                for (int distance = LANES; distance < 32; distance *= 2) {
                    a = least(a, __shfl_xor_sync(~0u, a, distance));
                    b = most(b, __shfl_xor_sync(~0u, b, distance));
                }
                least_of[k] = a, most_of[k] = b;
            }
            if (threadIdx.x % 32 < LANES) {
                low[half * LANES] = make_uint2(least_of[0], least_of[1]);
                high[half * LANES] = make_uint2(most_of[0], most_of[1]);
            }
        }
    }
};

__device__ __forceinline__ void quantize_keys(const u16* x, i64 stride, const Place& place, const Planes& planes) {
    __shared__ uint2 lows[WARPS][HEAD_DIM / 4], highs[WARPS][HEAD_DIM / 4];
    __shared__ float2 affine[HEAD_DIM];
    const int lane = threadIdx.x % LANES, stream = threadIdx.x / LANES, warp = threadIdx.x / 32;
    const KeyTile tile(x, stride, lane, stream);
    const int group = place.group();
    tile.ranges(lows[warp] + lane, highs[warp] + lane);
    if (group >= place.group_capacity) return;
    const Planes out = planes.at(place.flat(group), HEAD_DIM);
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
        float smallest = first_of(((const u16*)lows[0])[threadIdx.x]);
        float largest = first_of(((const u16*)highs[0])[threadIdx.x]);
#pragma unroll
        for (int other = 1; other < WARPS; other++) {
            smallest = fminf(smallest, first_of(((const u16*)lows[other])[threadIdx.x]));
            largest = fmaxf(largest, first_of(((const u16*)highs[other])[threadIdx.x]));
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
            const Codes codes(tile.element(i, c), tile.element(i, 4 + c), own[c], own[4 + c]);
            coarse[c] = codes.upper, fine[c] = codes.lower;
        }
        const int at = (stream + i * STREAMS) * (HEAD_DIM / 2) + 4 * lane;
        *(u32*)(out.upper + at) = bytes_of(coarse[0], coarse[1], coarse[2], coarse[3]);
        if (PLANES == 2) *(u32*)(out.lower + at) = bytes_of(fine[0], fine[1], fine[2], fine[3]);
    }
}

// Token i of a lane's tile of values, within the group.
__device__ __forceinline__ int value_token(int stream, int i) {
    return stream * (TOKENS / 2) + i % (TOKENS / 2) + i / (TOKENS / 2) * (GROUP / 2);
}

// Values: one pair per token, codes transposed; token j shares bytes with token j + 64. A lane holds 8 channels of
// TOKENS / 2 consecutive tokens of either half.
struct ValueTile {
    uint4 words[TOKENS];

    __device__ __forceinline__ ValueTile(const u16* x, i64 stride, int lane, int stream) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++) words[i] = *(const uint4*)(x + value_token(stream, i) * stride + 8 * lane);
    }

    // {minimum, -maximum} of a token's channels in this lane: one instruction then does for both.
    __device__ __forceinline__ u32 own_range(int i) const {
        const uint4 w = words[i];
        const u32 low = least(least(w.x, w.y), least(w.z, w.w));
        const u32 high = most(most(w.x, w.y), most(w.z, w.w)) ^ 0x80008000u;
        return least(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
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
                own[i] = least(kept, __shfl_xor_sync(~0u, given, count));
            }
#pragma unroll
        for (int distance = TOKENS; distance < LANES; distance *= 2)
            own[0] = least(own[0], __shfl_xor_sync(~0u, own[0], distance));
        return own[0];
    }

    __device__ __forceinline__ float element(int i, int channel) const {
        const uint4 w = words[i];
        const u32 pair = channel < 4 ? (channel < 2 ? w.x : w.y) : (channel < 6 ? w.z : w.w);
        return channel % 2 ? second_of(pair) : first_of(pair);
    }
};

__device__ __forceinline__ void quantize_values(const u16* x, i64 stride, const Place& place, const Planes& planes) {
    __shared__ __align__(16) u8 plane[PLANES][LANES * (8 * ROW_BYTES + PAD_BYTES)];
    const int lane = threadIdx.x % LANES, stream = threadIdx.x / LANES;
    const ValueTile tile(x, stride, lane, stream);
    const int group = place.group();
    const u32 range = tile.range(lane);
    if (group >= place.group_capacity) return;
    const Planes out = planes.at(place.flat(group), GROUP);
    const Affine own(first_of(range), -second_of(range));
    if (lane < TOKENS) {
        out.scale[value_token(stream, lane)] = own.scale;
        out.minimum[value_token(stream, lane)] = own.minimum;
    }
    float2 affine[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
        affine[i] = make_float2(__shfl_sync(~0u, own.inverse, i, LANES), __shfl_sync(~0u, own.low, i, LANES));
#pragma unroll
    for (int channel = 0; channel < 8; channel++) {
        u32 coarse[4], fine[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Codes codes(tile.element(i, channel), tile.element(4 + i, channel), affine[i], affine[4 + i]);
            coarse[i] = codes.upper, fine[i] = codes.lower;
        }
        const int at = lane * (8 * ROW_BYTES + PAD_BYTES) + channel * ROW_BYTES + value_token(stream, 0);
        *(u32*)(plane[0] + at) = bytes_of(coarse[0], coarse[1], coarse[2], coarse[3]);
        if (PLANES == 2) *(u32*)(plane[PLANES - 1] + at) = bytes_of(fine[0], fine[1], fine[2], fine[3]);
    }
    __syncthreads();
#pragma unroll
    for (int at = 16 * threadIdx.x; at < HEAD_DIM * ROW_BYTES; at += 16 * THREADS) {
        const int padded = at + at / (8 * ROW_BYTES) * PAD_BYTES;
        *(uint4*)(out.upper + at) = *(const uint4*)(plane[0] + padded);
        if (PLANES == 2) *(uint4*)(out.lower + at) = *(const uint4*)(plane[PLANES - 1] + padded);
    }
}

// Strides in units of 8 elements, so that they fit 32 bits. mask counts only where `masked` is not 0, first_slot only
// where `placed` is not 0.
extern "C" __global__ void __launch_bounds__(THREADS, 768 / THREADS) quantize(
    const u16* keys, const u16* values, const int* group_index, const u8* mask, int masked,
    const int* first_slot, int placed,
    u8* key_upper, u8* key_lower, u16* key_scale, u16* key_min,
    u8* value_upper, u8* value_lower, u16* value_scale, u16* value_min,
    int kv_heads, int group_capacity, int key_batch_stride, int key_head_stride, int key_stride,
    int value_batch_stride, int value_head_stride, int value_stride) {
    // Launched early, but it lets no other start early, as attention reads codes before it waits (launch.py).
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
    const i64 slot = placed ? first_slot[batch] : i64(blockIdx.y) * GROUP;
    if (masked && !mask[batch]) return;
    const Place place{group_index, batch, group_capacity};
    if (blockIdx.z == 0) {
        const i64 stride = i64(key_stride) * 8;
        const i64 head = (i64(batch) * key_batch_stride + i64(kv_head) * key_head_stride) * 8;
        quantize_keys(keys + head + slot * stride, stride, place, Planes{key_upper, key_lower, key_scale, key_min});
    } else {
        const i64 stride = i64(value_stride) * 8;
        const i64 head = (i64(batch) * value_batch_stride + i64(kv_head) * value_head_stride) * 8;
        quantize_values(values + head + slot * stride, stride, place,
                        Planes{value_upper, value_lower, value_scale, value_min});
    }
}
