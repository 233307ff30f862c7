// The scan: logits of a group's tokens from 2-bit keys, and of each token the score, the sum over the query heads of
// exp(logit - lse). A operands are 16 tokens, B the query heads, times the group's scales and rounded to 8 bits.
//
// What a head's log-sum-exp over all tokens is, is known at the end only. A sample of groups says it well enough.
#pragma once

#include "queries.cuh"
#include "scan_stage.cuh"

// Bin of a sum of probabilities: its float's exponent and first bits, so equal steps for every power of two. The last
// bin is left to sinks.
__device__ __forceinline__ int bin_of(float sum) { return __float_as_uint(sum) >> (23 - STEPS_LOG2); }

struct Scan {
    static constexpr int PLANES = 4, WORDS = Runs<PLANES>::WORDS, COUNT = Runs<PLANES>::COUNT;
    static constexpr int ZERO_BITS = 0x4B400000;  // of the float 3 * 2**22: adding a small integer to either adds it
    static constexpr float ZERO = 12582912;
    const LaneQueries& queries;
    float logit_scale[2], norm[2];  // of the query heads 2c and 2c + 1; other heads' scores become zero

    __device__ __forceinline__ Scan(float softmax_scale, const Query& query, const LaneQueries& queries)
        : queries(queries) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int head = 2 * (threadIdx.x % 4) + e, exponent = __shfl_sync(FULL_MASK, query.exponent, 4 * head);
            logit_scale[e] = head < HEADS ? softmax_scale * LOG2_E * power_of_two(exponent) : 0;
            norm[e] = head < HEADS ? 0 : -negative_infinity();
        }
    }
    // Queries times scales as signed bytes, and the base-2 logit less norm of a sum of products x with the codes:
    // slope * x + start, x as the float whose bits are ZERO_BITS + sum. A code c stands for scale * (4 c + 3/2) +
    // minimum; those of odd parts of the channels arrive as 4 c.
    __device__ __forceinline__ void scale_queries(
        u32 (&bytes)[COUNT], float (&slope)[2], float (&start)[2], const ScanStage& stage
    ) const {
        const int c = threadIdx.x % 4;
        u32 own[COUNT][2], scaled[COUNT][2], largest = 0;
        queries.load(own);
        u32 middle[COUNT][2];
        float rest[2][4] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int channel = Runs<PLANES>::channel(i, c);
            u32 s[2], z[2];
            load_shared(s, stage.scale + channel);
            load_shared(z, stage.minimum + channel);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scaled[i][h] = mul_half2(own[i][h], s[h]);
                largest = max_abs_half2(largest, scaled[i][h]);
                middle[i][h] = fma_half2(s[h], 0x3E003E00u, z[h]);  // 3/2
            }
        }
        // All rows of a product are alike: rows 0 to 7 take the first words of two runs, the others the second ones.
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
#pragma unroll
            for (int h = 0; h < 2; h++)
                mma_half(rest[h], middle[i][0], middle[i][1], middle[i + 1][0], middle[i + 1][1], own[i][h],
                         own[i + 1][h]);
        float most = fmaxf(fabsf(half_to_float(u16(largest))), fabsf(half_to_float(u16(largest >> 16))));
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
        // As a half, so that the products' unit is exactly its inverse.
        const u16 factor = float_to_half(fminf(__fdividef(127, most), 32768.0f));
        const u32 full = factor * 0x10001u, quarter = mul_half2(full, 0x34003400u);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const u32 by = i / WORDS % 2 ? quarter : full;
            // 1536 + n ends in the byte n.
            bytes[i] = __byte_perm(fma_half2(scaled[i][0], by, 0x66006600u), fma_half2(scaled[i][1], by, 0x66006600u),
                                   0x6420);
        }
        const float unit = __fdividef(4, half_to_float(factor));
#pragma unroll
        for (int e = 0; e < 2; e++) {
            slope[e] = __shfl_sync(FULL_MASK, unit, 4 * (2 * c + e)) * logit_scale[e];
            start[e] = fmaf(rest[0][e] + rest[1][2 + e], logit_scale[e], -norm[e]) - ZERO * slope[e];
        }
    }
    // Products of a pair of tiles of 16 tokens, as the floats whose bits start from ZERO_BITS: rows g and g + 8 of each,
    // of the query heads 2c and 2c + 1. Two tiles, as products of one depend on each other.
    __device__ __forceinline__ static void products(
        int (&x)[2][4], const ScanStage& stage, int pair, const u32 (&bytes)[COUNT]
    ) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        u32 words[4][WORDS];
#pragma unroll
        for (int r = 0; r < 4; r++) load_shared(words[r], &stage.codes[32 * pair + 8 * r + g][4 * WORDS * c]);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = ZERO_BITS;
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
#pragma unroll
            for (int t = 0; t < 2; t++)
                mma_bytes(x[t], part(words[2 * t], i), part(words[2 * t + 1], i), part(words[2 * t], i + 1),
                          part(words[2 * t + 1], i + 1), bytes[i], bytes[i + 1]);
    }
    // Leaves the bins of a group's tokens, and counts them. Its first `sinks` tokens are sinks.
    __device__ __forceinline__ void group(const ScanStage& stage, u16* bins, u32* histogram, int sinks) const {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        u32 bytes[COUNT];
        float slope[2], start[2];
        scale_queries(bytes, slope, start, stage);
        int bin[GROUP / 32];  // stored at the end, as loads of shared memory do not pass stores to it
#pragma unroll
        for (int pair = 0; pair < GROUP / 32; pair++) {
            int x[2][4];
            products(x, stage, pair, bytes);
            bin[pair] = bin_of(score(x, slope, start));
        }
#pragma unroll
        for (int pair = 0; pair < GROUP / 32; pair++) {
            const int token = 32 * pair + 16 * (c / 2) + 8 * (c % 2) + g;
            if (token < sinks) bin[pair] = BINS - 1;
            bins[token] = bin[pair];
            atomicAdd(histogram + bin[pair], 1u);
        }
    }
    // The score of one of 32 tokens: lane 4 g + c returns that of tile c / 2, row 8 * (c % 2) + g.
    __device__ __forceinline__ static float score(
        const int (&x)[2][4], const float (&slope)[2], const float (&start)[2]
    ) {
        const bool second_row = threadIdx.x & 1, second_tile = threadIdx.x & 2;
        float of_tile[2];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float of_token[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float even = exp2_approx(fmaf(__int_as_float(x[t][2 * r]), slope[0], start[0]));
                const float odd = exp2_approx(fmaf(__int_as_float(x[t][2 * r + 1]), slope[1], start[1]));
                of_token[r] = even + odd;
            }
            of_tile[t] = add_other(of_token, second_row, 1);
        }
        return add_other(of_tile, second_tile, 2);
    }
    // Of two values one for this lane and one for the lane `distance` away: both lanes' of this one's.
    __device__ __forceinline__ static float add_other(const float (&x)[2], bool own, int distance) {
        return (own ? x[1] : x[0]) + __shfl_xor_sync(FULL_MASK, own ? x[0] : x[1], distance);
    }
    // Codes of run i, in bytes; those of odd parts of the channels times 4.
    __device__ __forceinline__ static u32 part(const u32 (&words)[WORDS], int i) {
        const u32 word = words[i % WORDS];
        return (i / WORDS < 2 ? word : word >> 4) & (i / WORDS % 2 ? 0x0C0C0C0Cu : 0x03030303u);
    }
    // Leaves the largest base-2 logit of a group's tokens and the sum of exp2(logit - largest), by query head.
    __device__ __forceinline__ void sample(const ScanStage& stage, float (&largest)[8], float (&sum)[8]) const {
        u32 bytes[COUNT];
        float slope[2], start[2], logits[GROUP / 32][2][4];
        scale_queries(bytes, slope, start, stage);
#pragma unroll
        for (int pair = 0; pair < GROUP / 32; pair++) {
            int x[2][4];
            products(x, stage, pair, bytes);
#pragma unroll
            for (int i = 0; i < 8; i++)
                logits[pair][i / 4][i % 4] = fmaf(__int_as_float(x[i / 4][i % 4]), slope[i % 2], start[i % 2]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = negative_infinity(), total = 0;
#pragma unroll
            for (int i = e; i < GROUP / 4; i += 2) most = fmaxf(most, logits[i / 8][i / 4 % 2][i % 4]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, step));
#pragma unroll
            for (int i = e; i < GROUP / 4; i += 2) total += exp2_approx(logits[i / 8][i / 4 % 2][i % 4] - most);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(FULL_MASK, total, step);
            const int head = 2 * (threadIdx.x % 4) + e;
            if (threadIdx.x % 32 < 4) largest[head] = most, sum[head] = total;
        }
    }
    // Takes the log-sum-exps of `count` samples for those of all tokens, up to their share.
    __device__ __forceinline__ void weigh_heads(
        const float (&largest)[SAMPLES][8], const float (&sum)[SAMPLES][8], int count
    ) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int head = 2 * (threadIdx.x % 4) + e;
            if (head >= HEADS) continue;
            float most = negative_infinity(), total = 0;
            for (int i = 0; i < count; i++) most = fmaxf(most, largest[i][head]);
            for (int i = 0; i < count; i++) total += sum[i][head] * exp2_approx(largest[i][head] - most);
            norm[e] = most + log2f(total);
        }
    }
};
