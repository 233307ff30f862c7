// The scan: logits of a row's tokens from 2-bit keys, and of each token the sum over the query heads of
// exp(logit - lse), quantized to a bin. Every warp takes whole groups: A operands are 16 tokens, B the query heads.
#pragma once

#include "queries.cuh"

// Bin of a sum of probabilities: its float's exponent and first bits, so 32 equal steps for every power of two.
__device__ __forceinline__ int bin_of(float sum) {
    return min(max(int(__float_as_uint(sum) >> (23 - STEPS_LOG2)) - ((127 + LOWEST_LOG2) << STEPS_LOG2), 0), BINS - 1);
}

struct Scan {
    static constexpr int PLANES = 4, WORDS = Runs<PLANES>::WORDS, COUNT = Runs<PLANES>::COUNT;
    u32 own[COUNT][2];
    float logit_scale[2], norm[2];  // of the query heads 2c and 2c + 1; other heads' sums become zero
    float sums[2];                  // of exp(logit - lse)

    __device__ __forceinline__ Scan(const ProgressiveParams& p, const Query& query, int b, int kv_head) {
        query.scaled<PLANES>(own);
        const int c = threadIdx.x % 4;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int head = 2 * c + e, exponent = __shfl_sync(FULL_MASK, query.exponent, 4 * head);
            const bool exists = head < HEADS;
            logit_scale[e] = exists ? 4 * p.scale * LOG2_E * power_of_two(exponent) : 0;
            norm[e] = exists ? __ldcg(p.lse + (i64(b) * p.kv_heads + kv_head) * HEADS + head) * LOG2_E
                             : -negative_infinity();
            sums[e] = 0;
        }
    }
    // Scaled queries of a group, and what all its products start from. A code c of channel part `i / WORDS` arrives as
    // 1024 + 4^part c, and stands for scale * 4 (c + 3/8) + minimum.
    __device__ __forceinline__ void scale_queries(
        u32 (&scaled)[COUNT][2], float (&start)[2], const u16* scales, const u16* minima
    ) const {
        float offsets[4] = {}, lows[4] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int part = i / WORDS, channel = Runs<PLANES>::channel(i, threadIdx.x % 4);
            u32 s[2], z[2];
            load_words(s, scales + channel);
            load_words(z, minima + channel);
            const u32 shrink = u32(15 - 2 * part) * 0x04000400u;                // 4^-part, twice
            const u32 middle = u32(((13 + 2 * part) << 10) | 0x200) * 0x10001u;  // 3/8 * 4^part, twice
            scaled[i][0] = mul_half2(mul_half2(own[i][0], first_pair(s[0], s[1])), shrink);
            scaled[i][1] = mul_half2(mul_half2(own[i][1], second_pair(s[0], s[1])), shrink);
            // Rows 0 to 7 take off the 1024, rows 8 to 15 add the middle of the codes that share two bits.
            mma_half(offsets, 0xE400E400u, middle, 0xE400E400u, middle, scaled[i][0], scaled[i][1]);
            const u32 z0 = first_pair(z[0], z[1]), z1 = second_pair(z[0], z[1]);
            mma_half(lows, z0, z0, z1, z1, own[i][0], own[i][1]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) start[e] = offsets[e] + offsets[2 + e] + 0.25f * lows[e];
    }
    // Scores a group: writes its tokens' bins and counts them. first_token: the group's first; codes: the lane's part
    // of the group's token g.
    __device__ __forceinline__ void group(
        const u8* codes, const u16* scales, const u16* minima, int first_token, int sinks, u16* bins, u32* histogram
    ) {
        const int lane = threadIdx.x % 32, c = lane % 4;
        u32 words[GROUP / 8][WORDS];
#pragma unroll
        for (int i = 0; i < GROUP / 8; i++) load_words(words[i], codes + i * 8 * QUARTER);
        u32 scaled[COUNT][2];
        float start[2];
        scale_queries(scaled, start, scales, minima);
#pragma unroll
        for (int tile = 0; tile < GROUP / 16; tile++) {
            float x[4] = {start[0], start[1], start[0], start[1]};
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int w = i % WORDS, part = i / WORDS;
                const u32 top = words[2 * tile][w], bottom = words[2 * tile + 1][w];
                const u32 mask = 0x00030003u << (2 * part);
                mma_half(x, lop3_and_or(top, mask, 0x64006400u), lop3_and_or(bottom, mask, 0x64006400u),
                         lop3_and_or(top >> 8, mask, 0x64006400u), lop3_and_or(bottom >> 8, mask, 0x64006400u),
                         scaled[i][0], scaled[i][1]);
            }
            float of_token[2];  // tokens g and g + 8
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float even = exp2_approx(fmaf(x[2 * r], logit_scale[0], -norm[0]));
                const float odd = exp2_approx(fmaf(x[2 * r + 1], logit_scale[1], -norm[1]));
                sums[0] += even, sums[1] += odd;
                of_token[r] = even + odd;
                of_token[r] += __shfl_xor_sync(FULL_MASK, of_token[r], 1);
                if (HEADS > 4) of_token[r] += __shfl_xor_sync(FULL_MASK, of_token[r], 2);
            }
            if (c < 2) {
                const int token = 16 * tile + 8 * c + lane / 4;
                const int bin = first_token + token < sinks ? BINS - 1 : bin_of(c ? of_token[1] : of_token[0]);
                bins[token] = bin;
                atomicAdd(histogram + bin, 1u);
            }
        }
    }
    // This warp's sums of exp(logit - lse), by query head.
    __device__ __forceinline__ void store_sums(float (&to)[8]) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sums[e] += __shfl_xor_sync(FULL_MASK, sums[e], step);
            if (threadIdx.x % 32 < 4) to[threadIdx.x % 4 * 2 + e] = sums[e];
        }
    }
};
