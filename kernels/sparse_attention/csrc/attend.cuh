// Attention of a warp to 16 tokens at a time: scores with the query heads as rows of the first product, which leaves
// probabilities where the second product, of values' channels by query heads, takes its B operand (ptx.cuh):
//
//     S = Q K^T                                     O^T = V^T P^T
//     a   rows: query heads g (g + 8: see below)    a   rows: channels channel(i) (g + 8: HEAD_DIM / 2 further)
//     b   columns: tokens g (+ 8: a second product) b   k: tokens 2c, 2c + 1 and 2c + 8, 2c + 9; columns: query heads g
//     d   head g, tokens 2c, 2c + 1         ----->  d   channels of row g (g + 8), query heads 2c, 2c + 1
#pragma once

#include "../../device/csrc/softmax_state.cuh"
#include "../../selection/csrc/queries.cuh"
#include "../../selection/csrc/scan.cuh"
#include "config.cuh"

// A warp's buffer of up to TILE chosen tokens of a group in shared memory, filled by cp.async, with the scales and
// minima of the whole group. 16-byte pieces of values are swapped within a row by the token's number, so that lanes
// that read one piece of several tokens use different banks.
//
//     HEAD_DIM = 128: rows of 64 bytes, four pieces
//     token      keys            values               byte b of a row has the codes of channels b (bits 0 .. 3) and
//     0, 1       0  1  2  3      0  1  2  3           b + HEAD_DIM / 2 (bits 4 .. 7)
//     2, 3       0  1  2  3      1  0  3  2
//     4, 5       0  1  2  3      2  3  0  1
//     6, 7       0  1  2  3      3  2  1  0
//     8, 9       ...             0  1  2  3 ...
template <class Config> struct __align__(16) TokenTile {
    static constexpr int TILE = Config::TILE, HALF_DIM = Config::HALF_DIM;
    u8 keys[TILE][HALF_DIM], values[TILE][HALF_DIM];
    u16 key_scale[Config::HEAD_DIM], key_minimum[Config::HEAD_DIM];
    u16 value_scale[Config::GROUP], value_minimum[Config::GROUP];
    u8 places[TILE];  // of the tokens in the group
    int count;

    static constexpr int PIECES = HALF_DIM / 16;
    __device__ __forceinline__ static int swapped(int token, int piece) { return piece ^ token / 2 % PIECES; }
};

// Starts copying the tokens of group `group` whose places and number the tile has.
template <class Config>
__device__ __forceinline__ void start_copy(TokenTile<Config>& tile, const SparseParams& p, i64 group) {
    using Tile = TokenTile<Config>;
    static_assert(sizeof(Tile) == Config::TILE_BYTES, "as the launch computes it");
    constexpr int HEAD_DIM = Config::HEAD_DIM, HALF_DIM = Config::HALF_DIM, GROUP = Config::GROUP;
    constexpr int PIECES = Tile::PIECES, ROWS = 32 / PIECES;  // of one copy by all lanes
    const int lane = threadIdx.x % 32, piece = lane % PIECES, count = tile.count;
    const i64 first = group * GROUP;
#pragma unroll
    for (int i = 0; i < Config::TILE; i += ROWS) {
        const int token = i + lane / PIECES;
        if (token >= count) continue;
        const i64 from = (first + tile.places[token]) * HALF_DIM + 16 * piece;
        cp_async_16(tile.keys[token] + 16 * piece, p.key_codes.upper + from);
        cp_async_16(tile.values[token] + 16 * Tile::swapped(token, piece), p.value_rows + from);
    }
    copy_pairs<HEAD_DIM>(tile.key_scale, tile.key_minimum, p.key_codes.scale + group * HEAD_DIM,
                         p.key_codes.minimum + group * HEAD_DIM);
    copy_pairs<GROUP>(tile.value_scale, tile.value_minimum, p.value_codes.scale + first, p.value_codes.minimum + first);
}

// What a warp has of its row. Lane 4 g + c: row_max, row_sum and zero_sum of query head g (sums over this lane's
// tokens); out of query heads 2c, 2c + 1 and channels channel(i), as of codes less 8 times the values' scales.
template <class Config> struct Partial {
    static constexpr int OUT_TILES = Config::OUT_TILES, HALF_DIM = Config::HALF_DIM;
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
        const float tile_max = quad_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
        const float new_max = fmaxf(row_max, tile_max), reference = finite_reference(new_max);
        const float rescale = exp2_approx(row_max - reference);
        row_max = new_max;
        row_sum *= rescale, zero_sum *= rescale;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = exp2_approx(x[i] - reference);
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
template <class Config> struct ChosenTokens {
    static constexpr int PLANES = 2;  // channels of a byte
    using LaneRuns = Runs<Config, PLANES>;
    using Tile = TokenTile<Config>;
    static constexpr int COUNT = LaneRuns::COUNT, WORDS = LaneRuns::WORDS, GROUP = Config::GROUP;
    static constexpr int VALUE_WORDS = Config::HALF_DIM / 32;  // of a token's values that a lane reads
    const LaneQueries<Config>& queries;  // in pairs
    float logit_scale;

    __device__ __forceinline__ ChosenTokens(
        const SparseParams& p, const Query<Config>& query, const LaneQueries<Config>& queries
    ) : queries(queries), logit_scale(p.scale * LOG2_E * power_of_two(query.exponent)) {}
    // Scaled queries of a group, and what its products start from; a code arrives as 1024 + U or 1024 + 16 U.
    __device__ __forceinline__ float scale_queries(u32 (&scaled)[COUNT][2], const Tile& tile) const {
        constexpr u32 MINUS_1024 = half2_constant(-1024);
        u32 q[COUNT][2], z[COUNT][2];
        queries.load(q);
        float bias[4] = {}, rest[2][4] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int channel = LaneRuns::channel(i, threadIdx.x % 4);
            u32 s[2], m[2];
            ld_shared(s, tile.key_scale + channel);
            ld_shared(m, tile.key_minimum + channel);
            z[i][0] = pack_low_halves(m[0], m[1]), z[i][1] = pack_high_halves(m[0], m[1]);
            scaled[i][0] = mul_half2(q[i][0], pack_low_halves(s[0], s[1]));
            scaled[i][1] = mul_half2(q[i][1], pack_high_halves(s[0], s[1]));
            if (i >= WORDS) scaled[i][0] = mul_half2(scaled[i][0], HALF2_SIXTEENTH);
            if (i >= WORDS) scaled[i][1] = mul_half2(scaled[i][1], HALF2_SIXTEENTH);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            Half::mma(bias, scaled[i][0], scaled[i][1], scaled[i + 1][0], scaled[i + 1][1], MINUS_1024, MINUS_1024);
            mma_two_runs(rest, q, i, z[i][0], z[i + 1][0], z[i][1], z[i + 1][1]);
        }
        return bias[0] + bias[2] + rest[0][0] + rest[1][2];  // bias: times - 1024
    }
    // d[0][0..1] + d[1][2..3] += two runs of queries by their first and second pairs of channels. The first pairs are
    // the operand's rows 0 to 7 and the second ones the others, so that none is empty; half of each d is not used.
    __device__ __forceinline__ static void mma_two_runs(
        float (&d)[2][4], const u32 (&q)[COUNT][2], int i, u32 first, u32 next_first, u32 second, u32 next_second
    ) {
        Half::mma(d[0], q[i][0], q[i][1], q[i + 1][0], q[i + 1][1], first, next_first);
        Half::mma(d[1], q[i][0], q[i][1], q[i + 1][0], q[i + 1][1], second, next_second);
    }
    __device__ __forceinline__ void attend(Partial<Config>& partial, const Tile& tile) const {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        u32 scaled[COUNT][2];
        const float start = scale_queries(scaled, tile);
        u32 k[2][WORDS], v[4][VALUE_WORDS];
#pragma unroll
        for (int r = 0; r < 2; r++) ld_shared(k[r], tile.keys[8 * r + g] + 4 * WORDS * c);
        float x[4];
        scores(x, k, scaled, start);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 2 * c + i % 2 + i / 2 * 8, byte = 4 * VALUE_WORDS * g;
            if (token >= tile.count) x[i] = negative_infinity();
            ld_shared(v[i], tile.values[token] + 16 * Tile::swapped(token, byte / 16) + byte % 16);
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
                    const u32 word = k[r][(i + j) % WORDS];
                    pairs[j][0] = i + j < WORDS ? low_codes(word) : high_codes(word);
                    pairs[j][1] = i + j < WORDS ? low_codes(word >> 8) : high_codes(word >> 8);
                }
                mma_two_runs(d[r], scaled, i, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = (d[i / 2][0][i % 2] + d[i / 2][1][2 + i % 2] + start) * logit_scale;
    }
    // Adds values times probabilities; codes less 8 of a byte's low and high nibbles, of two tokens each.
    __device__ __forceinline__ static void add_values(
        Partial<Config>& partial, const u32 (&v)[4][VALUE_WORDS], u32 p0, u32 p1
    ) {
        constexpr u32 MINUS_1032 = half2_constant(-1032);  // 1024 + code to code - 8
        constexpr u32 MINUS_72 = half2_constant(-72);      // (1024 + 16 code) / 16 to code - 8
#pragma unroll
        for (int i = 0; i < Config::OUT_TILES; i++) {
            const int w = i / 4, b = i % 4;
            u32 a[4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u32 pair = b < 2 ? pack_low_halves(v[2 * r][w], v[2 * r + 1][w])
                                 : pack_high_halves(v[2 * r][w], v[2 * r + 1][w]);
                if (b % 2) pair >>= 8;
                a[2 * r] = add_half2(low_codes(pair), MINUS_1032);
                a[2 * r + 1] = fma_half2(high_codes(pair), HALF2_SIXTEENTH, MINUS_72);
            }
            Half::mma(partial.out[i], a[0], a[1], a[2], a[3], p0, p1);
        }
    }
};

// Attention to 16 full-precision slots from `slot` on, of those below `end`.
template <class Config> __device__ __forceinline__ void attend_slots(
    Partial<Config>& partial, const SparseParams& p, const Query<Config>& query, const u16* keys, const u16* values,
    int slot, int end
) {
    using Elem = typename Config::Elem;
    constexpr int HEAD_DIM = Config::HEAD_DIM, HALF_DIM = Config::HALF_DIM;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
        u32 q[4], k[4];
        ld_shared(q, query.q + 32 * i + 8 * c);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            load_words_l2(k, keys + i64(min(slot + 8 * r + g, end - 1)) * p.key_stride * 8 + 32 * i + 8 * c);
#pragma unroll
            for (int h = 0; h < 4; h += 2)
                Elem::mma(d[r], query.exists ? q[h] : 0, 0, query.exists ? q[h + 1] : 0, 0, k[h], k[h + 1]);
        }
    }
    float x[4];
    u32 v[4][2][HALF_DIM / 16];  // tokens 2c, 2c + 1, 2c + 8, 2c + 9; channels of the lower and the upper half
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token_slot = slot + 2 * c + i % 2 + i / 2 * 8;
        x[i] = token_slot < end ? d[i / 2][i % 2] * p.scale * LOG2_E : negative_infinity();
        const u16* from = values + i64(min(token_slot, end - 1)) * p.value_stride * 8 + Partial<Config>::channel(0);
        load_words_l2(v[i][0], from);
        load_words_l2(v[i][1], from + HALF_DIM);
    }
    partial.probabilities(x);
    const u32 p0 = Elem::pair_from_floats(x[0], x[1]), p1 = Elem::pair_from_floats(x[2], x[3]);
#pragma unroll
    for (int i = 0; i < Config::OUT_TILES; i++) {
        u32 a[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 even = v[r / 2 * 2][r % 2][i / 2], odd = v[r / 2 * 2 + 1][r % 2][i / 2];
            a[r] = i % 2 ? pack_high_halves(even, odd) : pack_low_halves(even, odd);
        }
        Elem::mma(partial.out[i], a[0], a[1], a[2], a[3], p0, p1);
    }
}

// The recent tokens of a row, of which each warp of its CTAs takes some tiles.
template <class Config> struct RecentTokens {
    static constexpr int WARPS = Config::WARPS, TILE = Config::TILE;
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
        const int lane = threadIdx.x % 32, slot = first_slot(p, part) + lane / 2, channel = lane % 2 * Config::HALF_DIM;
        if (slot >= end) return;
        prefetch_l2(keys(p, row) + i64(slot) * p.key_stride * 8 + channel);
        prefetch_l2(values(p, row) + i64(slot) * p.value_stride * 8 + channel);
    }
    __device__ __forceinline__ void attend(
        Partial<Config>& partial, const SparseParams& p, const Query<Config>& query, int row, int part
    ) const {
        const int last = end;
        for (int slot = first_slot(p, part); slot < last; slot += WARPS * p.parts * TILE)
            attend_slots(partial, p, query, keys(p, row), values(p, row), slot, last);
    }
};

// A warp's attention to a list of tiles, several of which are being copied while it attends to one.
// Source::copy_next(tile) starts copying the next tile; false at the end.
template <class Config, class Source> struct TilePipeline {
    static constexpr int TILES = Config::TILES;
    Source& source;
    TokenTile<Config>* tiles;  // [TILES]
    int copied;

    __device__ __forceinline__ TilePipeline(Source& source, TokenTile<Config>* tiles)
        : source(source), tiles(tiles), copied(0) {
#pragma unroll
        for (int i = 0; i < TILES - 1; i++) copy_next(i);
    }
    __device__ __forceinline__ void copy_next(int to) {
        copied += source.copy_next(tiles[to]);
        cp_async_commit();
    }
    __device__ __forceinline__ void attend(Partial<Config>& partial, const ChosenTokens<Config>& chosen) {
        for (int i = 0, from = 0, to = TILES - 1; i < copied; i++) {
            copy_next(to);
            cp_async_wait<TILES - 1>();
            __syncwarp();
            chosen.attend(partial, tiles[from]);
            __syncwarp();
            from = from + 1 == TILES ? 0 : from + 1, to = to + 1 == TILES ? 0 : to + 1;
        }
    }
};
