// A row of logits in the shared memory of a cluster, and the order-preserving keys of logits.
#pragma once

#include "config.cuh"

extern __shared__ uint4 packs[];  // this CTA's part of the row: thread t reads packs t, t + THREADS, ...

__device__ __forceinline__ float value_of(u32 word, int half) {
    if (ELEMENT == 0) return __uint_as_float(word);
    return half ? Elem::high_to_float(word) : Elem::low_to_float(word);
}
// Keys order as the values do; adding zero makes -0 a +0, as equal values must share a key.
__device__ __forceinline__ u32 key_of(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits ^ (int(bits) < 0 ? FULL_MASK : 0x80000000u);
}
__device__ __forceinline__ float value_of_key(u32 key) {
    return __uint_as_float(key ^ (int(key) < 0 ? 0x80000000u : FULL_MASK));
}
// The least value with this key or a larger one; keys that belong to no number are below that of minus infinity.
__device__ __forceinline__ float least_value(u32 key) { return fmaxf(value_of_key(key), negative_infinity()); }

__device__ __forceinline__ float largest(const uint4& pack) {
    if (ELEMENT == 0)
        return fmaxf(fmaxf(value_of(pack.x, 0), value_of(pack.y, 0)), fmaxf(value_of(pack.z, 0), value_of(pack.w, 0)));
    const u32 pair = Elem::max_pair(Elem::max_pair(pack.x, pack.y), Elem::max_pair(pack.z, pack.w));
    return fmaxf(value_of(pair, 0), value_of(pair, 1));
}

// Calls `body` with the thread's logits of `low` or more. Most packs have none and cost little.
template <class Body>
__device__ __forceinline__ void for_each(int loads, float low, const Body& body) {
#pragma unroll 1
    for (int i = 0; i < loads; ++i) {
        const uint4 pack = packs[i * THREADS + threadIdx.x];
        if (!(largest(pack) >= low)) continue;
        const u32 words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            const float value = value_of(words[j * ELEMENT_BYTES / 4], j % (PACK / 4));
            if (value >= low) body(value);
        }
    }
}

// Copies this CTA's part of a row to shared memory, padded with minus infinity.
__device__ __forceinline__ void load_row(const char* row, int vocab, int rank, int loads) {
    const int begin = rank * loads * THREADS * PACK;
    u16* halves = reinterpret_cast<u16*>(packs);
    const u16* from = reinterpret_cast<const u16*>(row);
    for (int pack = threadIdx.x; ALIGNED && pack < loads * THREADS; pack += THREADS) {
        if (begin + pack * PACK < vocab) cp_async_16(packs + pack, row + (i64(begin) + pack * PACK) * ELEMENT_BYTES);
        else packs[pack] = {PADDING, PADDING, PADDING, PADDING};
    }
    constexpr int HALVES = ELEMENT_BYTES / 2;  // 16-bit words of a logit; the second of float32 is the upper one
    for (int i = threadIdx.x; !ALIGNED && i < loads * THREADS * 8; i += THREADS)
        halves[i] = begin + i / HALVES < vocab ? from[begin * HALVES + i]
                                               : u16(i % HALVES || HALVES == 1 ? PADDING >> 16 : 0);
    cp_async_wait_all();
}
