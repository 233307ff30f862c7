// Attention of a warp to 16 tokens at a time: scores with the query heads as rows of the first product, which leaves
// probabilities where the second one, of values' channels by query heads, takes its B operand.
#pragma once

#include "../../selection/csrc/queries.cuh"
#include "sparse_params.cuh"
#include "stages.cuh"

constexpr int OUT_TILES = HEAD_DIM / 16;  // of 16 channels: eight of the lower half, eight of the upper

// What a warp has of its row. Lane 4 g + c: row_max, row_sum and zero_sum of query head g (sums over its own tokens
// only); out of query heads 2c, 2c + 1 and channels channel(i), as of codes less 8 times the values' scales.
struct Partial {
    float row_max, row_sum, zero_sum;
    float out[OUT_TILES][4];

    __device__ __forceinline__ Partial() : row_max(negative_infinity()), row_sum(0), zero_sum(0) {
#pragma unroll
        for (int i = 0; i < 4 * OUT_TILES; i++) out[i / 4][i % 4] = 0;
    }
    // Channel of out[i][0] and out[i][1]; those of [2] and [3] are HALF_DIM further.
    __device__ __forceinline__ static int channel(int i) { return HALF_DIM / 8 * (threadIdx.x % 32 / 4) + i; }

    // Base-2 scores of head g and tokens 2c, 2c + 1, 2c + 8, 2c + 9 to probabilities relative to the new row_max.
    __device__ __forceinline__ void probabilities(float (&x)[4]) {
        float tile_max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_MASK, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_MASK, tile_max, 2));
        const float new_max = fmaxf(row_max, tile_max), shift = new_max == negative_infinity() ? 0 : new_max;
        const float rescale = exp2_approx(row_max - shift);
        row_max = new_max;
        row_sum *= rescale, zero_sum *= rescale;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = exp2_approx(x[i] - shift);
            row_sum += x[i];
        }
        if (!__any_sync(FULL_MASK, rescale != 1)) return;
        const int c = threadIdx.x % 4;
        const float even = __shfl_sync(FULL_MASK, rescale, 8 * c), odd = __shfl_sync(FULL_MASK, rescale, 8 * c + 4);
#pragma unroll
        for (int i = 0; i < 4 * OUT_TILES; i++) out[i / 4][i % 4] *= i % 2 ? odd : even;
    }
};

// Attention to a tile of chosen tokens, read as INT4.
struct ChosenTokens {
    static constexpr int PLANES = 2, COUNT = Runs<PLANES>::COUNT, WORDS = Runs<PLANES>::WORDS;
    static constexpr int VALUE_WORDS = HALF_DIM / 32;  // of a token's values that a lane reads
    const LaneQueries& queries;  // in pairs
    float logit_scale;

    __device__ __forceinline__ ChosenTokens(
        const SparseParams& p, const Query& query, const LaneQueries& queries
    ) : queries(queries), logit_scale(p.scale * LOG2_E * power_of_two(query.exponent)) {}
    // Scaled queries of a group, and what its products start from; a code arrives as 1024 + U or 1024 + 16 U.
    __device__ __forceinline__ float scale_queries(u32 (&scaled)[COUNT][2], const TokenTile& tile) const {
        u32 own[COUNT][2], z[COUNT][2];
        queries.load(own);
        float bias[4] = {}, rest[2][4] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int channel = Runs<PLANES>::channel(i, threadIdx.x % 4);
            u32 s[2], m[2];
            load_shared(s, tile.key_scale + channel);
            load_shared(m, tile.key_minimum + channel);
            z[i][0] = first_pair(m[0], m[1]), z[i][1] = second_pair(m[0], m[1]);
            scaled[i][0] = mul_half2(own[i][0], first_pair(s[0], s[1]));
            scaled[i][1] = mul_half2(own[i][1], second_pair(s[0], s[1]));
            if (i >= WORDS) scaled[i][0] = mul_half2(scaled[i][0], 0x2C002C00u);  // / 16
            if (i >= WORDS) scaled[i][1] = mul_half2(scaled[i][1], 0x2C002C00u);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            mma_half(bias, scaled[i][0], scaled[i][1], scaled[i + 1][0], scaled[i + 1][1], 0xE400E400u, 0xE400E400u);
            mma_two_runs(rest, own, i, z[i][0], z[i + 1][0], z[i][1], z[i + 1][1]);
        }
        return bias[0] + bias[2] + rest[0][0] + rest[1][2];  // bias: times - 1024
    }
    // d[0][0..1] + d[1][2..3] += two runs of queries by their first and second pairs of channels. The first pairs are
    // the operand's rows 0 to 7 and the second ones the others, so that none is empty; half of each d is not used.
    __device__ __forceinline__ static void mma_two_runs(
        float (&d)[2][4], const u32 (&q)[COUNT][2], int i, u32 first, u32 next_first, u32 second, u32 next_second
    ) {
        mma_half(d[0], q[i][0], q[i][1], q[i + 1][0], q[i + 1][1], first, next_first);
        mma_half(d[1], q[i][0], q[i][1], q[i + 1][0], q[i + 1][1], second, next_second);
    }
    __device__ __forceinline__ void attend(Partial& partial, const TokenTile& tile) const {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        u32 scaled[COUNT][2];
        const float start = scale_queries(scaled, tile);
        u32 k[2][WORDS], v[4][VALUE_WORDS];
#pragma unroll
        for (int r = 0; r < 2; r++) load_shared(k[r], tile.keys[8 * r + g] + 4 * WORDS * c);
        float x[4];
        scores(x, k, scaled, start);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 2 * c + i % 2 + i / 2 * 8, byte = 4 * VALUE_WORDS * g;
            if (token >= tile.count) x[i] = negative_infinity();
            load_shared(v[i], tile.values[token] + 16 * TokenTile::swapped(token, byte / 16) + byte % 16);
        }
        float scale[4], zero[4];  // read before the maxima are known, as that takes long
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Of a token that is not there, anything of this group: its probability is zero.
            const int place = tile.places[2 * c + i % 2 + i / 2 * 8] % GROUP;
            scale[i] = half_to_float(tile.value_scale[place]);
            zero[i] = half_to_float(tile.value_minimum[place]) + 8 * scale[i];
        }
        partial.probabilities(x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            partial.zero_sum = fmaf(x[i], zero[i], partial.zero_sum);
            x[i] *= scale[i];
        }
        add_values(partial, v, floats_to_half2(x[0], x[1]), floats_to_half2(x[2], x[3]));
    }
    // Base-2 scores of head g and tokens 2c, 2c + 1, 2c + 8, 2c + 9.
    __device__ __forceinline__ void scores(
        float (&x)[4], const u32 (&k)[2][WORDS], const u32 (&scaled)[COUNT][2], float start
    ) const {
        float d[2][2][4] = {};
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                u32 pairs[2][2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u32 word = k[r][(i + j) % WORDS], mask = i + j < WORDS ? 0x000F000Fu : 0x00F000F0u;
                    pairs[j][0] = lop3_and_or(word, mask, 0x64006400u);
                    pairs[j][1] = lop3_and_or(word >> 8, mask, 0x64006400u);
                }
                mma_two_runs(d[r], scaled, i, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = (d[i / 2][0][i % 2] + d[i / 2][1][2 + i % 2] + start) * logit_scale;
    }
    // Adds values times probabilities; codes less 8 of a byte's low and high nibbles, of two tokens each.
    __device__ __forceinline__ static void add_values(
        Partial& partial, const u32 (&v)[4][VALUE_WORDS], u32 p0, u32 p1
    ) {
#pragma unroll
        for (int i = 0; i < OUT_TILES; i++) {
            const int w = i / 4, b = i % 4;
            u32 a[4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u32 pair = b < 2 ? first_pair(v[2 * r][w], v[2 * r + 1][w]) : second_pair(v[2 * r][w], v[2 * r + 1][w]);
                if (b % 2) pair >>= 8;
                a[2 * r] = add_half2(lop3_and_or(pair, 0x000F000Fu, 0x64006400u), 0xE408E408u);  // - 1032
                a[2 * r + 1] = fma_half2(lop3_and_or(pair, 0x00F000F0u, 0x64006400u), 0x2C002C00u, 0xD480D480u);  // - 72
            }
            mma_half(partial.out[i], a[0], a[1], a[2], a[3], p0, p1);
        }
    }
};

// Attention to 16 full-precision slots from `slot` on, of those below `end`.
__device__ __forceinline__ void attend_slots(
    Partial& partial, const SparseParams& p, const Query& query, const u16* keys, const u16* values, int slot,
    int end
) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
        u32 q[4], k[4];
        ld_shared(q, query.q + 32 * i + 8 * c);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            load_words<true>(k, keys + i64(min(slot + 8 * r + g, end - 1)) * p.key_stride * 8 + 32 * i + 8 * c);
#pragma unroll
            for (int h = 0; h < 4; h += 2)
                mma_elem(d[r], query.exists ? q[h] : 0, 0, query.exists ? q[h + 1] : 0, 0, k[h], k[h + 1]);
        }
    }
    float x[4];
    u32 v[4][2][HALF_DIM / 16];  // tokens 2c, 2c + 1, 2c + 8, 2c + 9; channels of the lower and the upper half
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int own = slot + 2 * c + i % 2 + i / 2 * 8;
        x[i] = own < end ? d[i / 2][i % 2] * p.scale * LOG2_E : negative_infinity();
        const u16* from = values + i64(min(own, end - 1)) * p.value_stride * 8 + Partial::channel(0);
        load_words<true>(v[i][0], from);
        load_words<true>(v[i][1], from + HALF_DIM);
    }
    partial.probabilities(x);
    const u32 p0 = Elem::pair_from_floats(x[0], x[1]), p1 = Elem::pair_from_floats(x[2], x[3]);
#pragma unroll
    for (int i = 0; i < OUT_TILES; i++) {
        u32 a[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 one = v[r / 2 * 2][r % 2][i / 2], other = v[r / 2 * 2 + 1][r % 2][i / 2];
            a[r] = i % 2 ? second_pair(one, other) : first_pair(one, other);
        }
        mma_elem(partial.out[i], a[0], a[1], a[2], a[3], p0, p1);
    }
}

// The recent tokens of a row, of which each warp of its CTAs takes some tiles.
struct RecentTokens {
    int begin, end;  // slots

    RecentTokens() = default;
    __device__ __forceinline__ RecentTokens(const SparseParams& p, int b)
        : begin(__ldcg(p.begin + b)), end(min(__ldcg(p.end + b), p.capacity)) {}
    __device__ __forceinline__ static const u16* keys(const SparseParams& p, int row) {
        return p.keys + (i64(row / p.kv_heads) * p.key_batch_stride + i64(row % p.kv_heads) * p.key_head_stride) * 8;
    }
    __device__ __forceinline__ static const u16* values(const SparseParams& p, int row) {
        return p.values +
               (i64(row / p.kv_heads) * p.value_batch_stride + i64(row % p.kv_heads) * p.value_head_stride) * 8;
    }
    // From the last warp on: the first ones have a tile of chosen tokens more, if any.
    __device__ __forceinline__ int first_slot(const SparseParams& p, int part) const {
        return begin + ((WARPS - 1 - int(threadIdx.x) / 32) * p.parts + part) * TILE;
    }
    // Has the warp's first tile brought to the L2 cache.
    __device__ __forceinline__ void prefetch(const SparseParams& p, int row, int part) const {
        const int lane = threadIdx.x % 32, slot = first_slot(p, part) + lane / 2, channel = lane % 2 * HALF_DIM;
        if (slot >= end) return;
        prefetch_l2(keys(p, row) + i64(slot) * p.key_stride * 8 + channel);
        prefetch_l2(values(p, row) + i64(slot) * p.value_stride * 8 + channel);
    }
    __device__ __forceinline__ void attend(
        Partial& partial, const SparseParams& p, const Query& query, int row, int part
    ) const {
        const int own_end = end;
        for (int slot = first_slot(p, part); slot < own_end; slot += WARPS * p.parts * TILE)
            attend_slots(partial, p, query, keys(p, row), values(p, row), slot, own_end);
    }
};
