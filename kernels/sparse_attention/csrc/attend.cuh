// Attention of a warp to 16 tokens at a time. Scores have the tokens as rows and the query heads as columns; transposed
// in registers, probabilities are the B operand of the second product, of values' channels by query heads (ptx.cuh):
//
//     S = K Q^T                                     O^T = V^T P^T
//     a   rows: tokens g, g + 8                     a   rows: channels channel(i) (g + 8: HEAD_DIM / 2 further)
//     b   columns: query heads g                    b   k: tokens 2c, 2c + 1 and 2c + 8, 2c + 9; columns: query heads g
//     d   tokens g, g + 8, query heads 2c, 2c + 1   d   channels of row g (g + 8), query heads 2c, 2c + 1
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
    u16 key_pairs[2][Config::HEAD_DIM];  // scales and minima; or scales, and middles of the query heads (floats)
    u16 value_pairs[2][Config::GROUP];   // scales and minima

    static constexpr int PIECES = HALF_DIM / 16;
    __device__ __forceinline__ static int swapped(int token, int piece) { return piece ^ token / 2 % PIECES; }
};

// Which tokens a tile has, as the lanes 4 g + c know it.
struct TileTokens {
    u32 packed;  // bits 0 .. 6 and 8 .. 14: places of tokens g and g + 8 in the group; from 16 on: how many tokens

    TileTokens() = default;
    __device__ __forceinline__ TileTokens(int count, u32 place, u32 next_place)
        : packed(place | next_place << 8 | u32(count) << 16) {}
    __device__ __forceinline__ u32 place(int r) const { return packed >> 8 * r & 0x7F; }
    __device__ __forceinline__ bool has(int token) const { return token < int(packed >> 16); }
};

// Copies tiles of one row's groups from `first` on. SCANNED: with middles, else with the keys' minima. Few registers are kept from tile to tile.
template <class Config, bool SCANNED> struct TileCopy {
    using Tile = TokenTile<Config>;
    static constexpr int HEAD_DIM = Config::HEAD_DIM, HALF_DIM = Config::HALF_DIM, GROUP = Config::GROUP;
    static constexpr int COPIES = Tile::PIECES / 2;  // of tokens, by 32 pieces
    static constexpr int SCALE_BYTES = 2 * HEAD_DIM, OTHER_BYTES = SCANNED ? 4 * Config::COLUMN_HEADS : SCALE_BYTES;
    static_assert(sizeof(Tile) == Config::TILE_BYTES && GROUP == 128, "as the launch computes it");
    const SparseParams& p;
    u32 first;  // less than MAX_ROWS * 65536

    __device__ __forceinline__ TileCopy(const SparseParams& p, u32 first) : p(p), first(first) {}
    // Starts copying tokens of group first + number.
    __device__ __forceinline__ void start(Tile& tile, u32 number, const TileTokens& tokens) const {
        const int lane = threadIdx.x % 32, piece = lane % Tile::PIECES, pair_piece = lane % 16;
        const u64 group = first + number;
        const u8 *const keys = p.key_codes.upper + group * (GROUP * HALF_DIM);
        const u8 *const values = p.value_rows + group * (GROUP * HALF_DIM);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int r = COPIES == 2 ? i : lane % 4 / 2, token = lane / 4 + 8 * r;
            if (!tokens.has(token)) continue;
            const u32 from = tokens.place(r) * HALF_DIM + 16 * piece;
            cp_async_16(tile.keys[token] + 16 * piece, keys + from);
            cp_async_16(tile.values[token] + 16 * Tile::swapped(token, piece), values + from);
        }
        const bool scales = lane < 16;
        const void* const others = SCANNED ? static_cast<const void*>(p.middles) : p.key_codes.minimum;
        const u8* const of_keys = static_cast<const u8*>(scales ? p.key_codes.scale : others);
        const u32 bytes = scales ? SCALE_BYTES : OTHER_BYTES;
        if (pair_piece * 16 < bytes)
            cp_async_16(tile.key_pairs[lane / 16] + pair_piece * 8, of_keys + group * bytes + pair_piece * 16);
        const u16* const of_values = scales ? p.value_codes.scale : p.value_codes.minimum;
        cp_async_16(tile.value_pairs[lane / 16] + pair_piece * 8, of_values + group * GROUP + pair_piece * 8);
    }
};

// What a warp has of its row. Lane 4 g + c: sums of query heads 2c and 2c + 1 over this lane's tokens, relative to
// 2^row_max, and out of channels channel(i), as of codes less 8 times the values' scales. Products of codes as they
// arrive, 1024 + code, would make sums so large that tensor cores, which truncate them, lose digits of the output.
template <class Config> struct Partial {
    static constexpr int OUT_TILES = Config::OUT_TILES, HALF_DIM = Config::HALF_DIM;
    static constexpr float LOWEST = -1e30f;  // finite, so that a difference of two is a number
    static constexpr float HEADROOM = 2;     // how far scores may exceed row_max; times any scale, a half holds 2^2
    float row_max[2], row_sum[2], zero_sum[2];
    float out[OUT_TILES][4];

    __device__ __forceinline__ Partial() : row_max{LOWEST, LOWEST}, row_sum{}, zero_sum{}, out{} {}
    // Channel of out[i][0] and out[i][1]; those of [2] and [3] are HALF_DIM further.
    __device__ __forceinline__ static int channel(int i) { return HALF_DIM / 8 * (threadIdx.x % 32 / 4) + i; }

    // Base-2 scores of heads 2c and 2c + 1, of token g and then of token g + 8, to probabilities relative to row_max.
    __device__ __forceinline__ void probabilities(float (&x)[4]) {
        const float first = fmaxf(x[0] - row_max[0], x[2] - row_max[0]);
        const float second = fmaxf(x[1] - row_max[1], x[3] - row_max[1]);
        if (__any_sync(FULL_MASK, fmaxf(first, second) > HEADROOM)) raise_maxima(x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = exp2_approx(x[i] - row_max[i % 2]);
            row_sum[i % 2] += x[i];
        }
    }
    __device__ __forceinline__ void raise_maxima(const float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float new_max = fmaxf(row_max[e], column_max(fmaxf(x[e], x[2 + e])));
            const float rescale = exp2_approx(row_max[e] - new_max);
            row_max[e] = new_max;
            row_sum[e] *= rescale, zero_sum[e] *= rescale;
#pragma unroll
            for (int i = 0; i < OUT_TILES; i++) out[i][e] *= rescale, out[i][2 + e] *= rescale;
        }
    }
};

// Attention to a tile of chosen tokens, read as INT4. SCANNED: see TileCopy.
template <class Config, bool SCANNED> struct ChosenTokens {
    static constexpr int PLANES = 2;  // channels of a byte
    using LaneRuns = Runs<Config, PLANES>;
    using Tile = TokenTile<Config>;
    static constexpr int COUNT = LaneRuns::COUNT, WORDS = LaneRuns::WORDS, GROUP = Config::GROUP;
    static constexpr int VALUE_WORDS = Config::HALF_DIM / 32;  // of a token's values that a lane reads
    static constexpr float OF_UPPER = 1.0f / 16;  // queries' factor for upper channels, whose codes arrive as 16 U
    const LaneQueries<Config>& queries;
    float logit_scale[2];  // of the query heads 2c and 2c + 1

    __device__ __forceinline__ ChosenTokens(
        const SparseParams& p, const Query<Config>& query, const LaneQueries<Config>& queries
    ) : queries(queries) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int exponent = __shfl_sync(FULL_MASK, query.exponent, 4 * (2 * (threadIdx.x % 4) + e));
            logit_scale[e] = p.scale * LOG2_E * power_of_two(exponent);
        }
    }
    // Halves of this lane's channels, in the order of runs.
    __device__ __forceinline__ static void load_runs(u32 (&x)[COUNT][2], const u16* of_channels) {
#pragma unroll
        for (int i = 0; i < COUNT; i += WORDS) {
            u32 words[2 * WORDS];
            ld_shared(words, of_channels + LaneRuns::channel(i, threadIdx.x % 4));
#pragma unroll
            for (int j = 0; j < WORDS; j++) x[i + j][0] = words[2 * j], x[i + j][1] = words[2 * j + 1];
        }
    }
    // Queries times the group's scales, and what logits are beside their products with codes, which arrive as 1024 + U
    // or 1024 + 16 U; middles are as of 3/2 for U.
    __device__ __forceinline__ void scale_queries(u32 (&scaled)[COUNT][2], float (&start)[2], const Tile& tile) const {
        if (SCANNED) load_middles(start, tile);
        else minimum_products(start, tile);
        load_runs(scaled, tile.key_pairs[0]);
        float low[4] = {}, high[4] = {};  // - 1024 times the sums of scaled queries, of heads 2c and 2c + 1
        each_run([&](int i, const u32 (&q)[2]) {
            scaled[i][0] = mul_half2(q[0], scaled[i][0]), scaled[i][1] = mul_half2(q[1], scaled[i][1]);
            constexpr u32 A = half2_constant(-1024);
            Half::mma(i < WORDS ? low : high, A, A, A, A, scaled[i][0], scaled[i][1]);
        });
        constexpr float LOW = SCANNED ? 1 + 1.5f / 1024 : 1, HIGH = SCANNED ? 1 + 16 * 1.5f / 1024 : 1;
#pragma unroll
        for (int e = 0; e < 2; e++) start[e] = fmaf(low[e], LOW, fmaf(high[e], HIGH, start[e]));
    }
    // visit(i, run i of the queries)
    template <class Visit> __device__ __forceinline__ void each_run(const Visit& visit) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            u32 run[2], next[2];
            queries.load_two(run, next, i);
            visit(i, run), visit(i + 1, next);
        }
    }
    __device__ __forceinline__ static void load_middles(float (&start)[2], const Tile& tile) {
        u32 words[2];
        ld_shared(words, tile.key_pairs[1] + 2 * (2 * (threadIdx.x % 4) % Config::COLUMN_HEADS));
        start[0] = __uint_as_float(words[0]), start[1] = __uint_as_float(words[1]);
    }
    // Queries times the group's minima.
    __device__ __forceinline__ void minimum_products(float (&start)[2], const Tile& tile) const {
        u32 z[COUNT][2];
        load_runs(z, tile.key_pairs[1]);
        float low[4] = {}, high[4] = {};
        each_run([&](int i, const u32 (&q)[2]) {
            Half::mma(i < WORDS ? low : high, z[i][0], z[i][0], z[i][1], z[i][1], q[0], q[1]);
        });
#pragma unroll
        for (int e = 0; e < 2; e++) start[e] = fmaf(high[e], 16, low[e]);
    }
    __device__ __forceinline__ void attend(
        Partial<Config>& partial, const Tile& tile, const TileTokens& tokens
    ) const {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        u32 scaled[COUNT][2], k[2][WORDS], v[4][VALUE_WORDS];
        float start[2], x[4];
        scale_queries(scaled, start, tile);
#pragma unroll
        for (int r = 0; r < 2; r++) ld_shared(k[r], tile.keys[8 * r + g] + 4 * WORDS * c);
        scores(x, k, scaled, start);
        float scale[2], zero[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!tokens.has(g + 8 * r)) x[2 * r] = x[2 * r + 1] = negative_infinity();
            // Of a token that is not there, anything of this group: its probability is zero.
            const u32 place = tokens.place(r);
            scale[r] = half_to_float(tile.value_pairs[0][place]);
            zero[r] = half_to_float(tile.value_pairs[1][place]) + 8 * scale[r];
        }
        partial.probabilities(x);
        const int byte = 4 * VALUE_WORDS * g;
        const u8* const values = tile.values[2 * c] + 16 * Tile::swapped(2 * c, byte / 16) + byte % 16;
#pragma unroll
        for (int i = 0; i < 4; i++) ld_shared(v[i], values + (i % 2 + i / 2 * 8) * Config::HALF_DIM);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            partial.zero_sum[i % 2] = fmaf(x[i], zero[i / 2], partial.zero_sum[i % 2]);
            x[i] *= scale[i / 2];
        }
        add_values(partial, v, movmatrix_trans(floats_to_half2(x[0], x[1])),
                   movmatrix_trans(floats_to_half2(x[2], x[3])));
    }
    // Base-2 scores of heads 2c and 2c + 1, of token g and then of token g + 8.
    __device__ __forceinline__ void scores(
        float (&x)[4], const u32 (&k)[2][WORDS], const u32 (&scaled)[COUNT][2], const float (&start)[2]
    ) const {
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            u32 pairs[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) unpack_int4_in_order(pairs[r], k[r][i]);
            Half::mma(low, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], scaled[i][0], scaled[i][1]);
            Half::mma(high, pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], scaled[i + WORDS][0],
                      scaled[i + WORDS][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = (low[i] + high[i] + start[i % 2]) * logit_scale[i % 2];
    }
    // Adds codes less 8 of values, a byte's low and high nibbles, times probabilities and scales of two pairs of tokens.
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
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
        u32 q[4], k[2][4];
        ld_shared(q, query.q + 32 * i + 8 * c);
#pragma unroll
        for (int r = 0; r < 2; r++)
            load_words_l2(k[r], keys + i64(min(slot + 8 * r + g, end - 1)) * p.key_stride * 8 + 32 * i + 8 * c);
#pragma unroll
        for (int h = 0; h < 4; h += 2)
            Elem::mma(d, k[0][h], k[1][h], k[0][h + 1], k[1][h + 1], query.exists ? q[h] : 0,
                      query.exists ? q[h + 1] : 0);
    }
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = slot + g + i / 2 * 8 < end ? d[i] * p.scale * LOG2_E : negative_infinity();
    u32 v[4][2][HALF_DIM / 16];  // tokens 2c, 2c + 1, 2c + 8, 2c + 9; channels of the lower and the upper half
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token_slot = slot + 2 * c + i % 2 + i / 2 * 8;
        const u16* from = values + i64(min(token_slot, end - 1)) * p.value_stride * 8 + Partial<Config>::channel(0);
        load_words_l2(v[i][0], from);
        load_words_l2(v[i][1], from + HALF_DIM);
    }
    partial.probabilities(x);
    const u32 p0 = movmatrix_trans(Elem::pair_from_floats(x[0], x[1]));
    const u32 p1 = movmatrix_trans(Elem::pair_from_floats(x[2], x[3]));
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
// Source::copy_next(tile, tokens) starts copying the next tile; false at the end.
template <class Config, class Source> struct TilePipeline {
    static constexpr int TILES = Config::TILES;
    Source& source;
    TokenTile<Config>* tiles;  // [TILES]
    TileTokens tokens[TILES];  // of the tile at hand and the next ones
    int left;                  // tiles that are copied and not attended to

    __device__ __forceinline__ TilePipeline(Source& source, TokenTile<Config>* tiles)
        : source(source), tiles(tiles), left(0) {
#pragma unroll
        for (int i = 0; i < TILES - 1; i++) copy_next(tiles[i], tokens[i]);
    }
    __device__ __forceinline__ void copy_next(TokenTile<Config>& tile, TileTokens& of_tile) {
        left += source.copy_next(tile, of_tile);
        cp_async_commit();
    }
    template <class Chosen> __device__ __forceinline__ void attend(Partial<Config>& partial, const Chosen& chosen) {
        for (int at = 0; left; left--) {
            copy_next(tiles[at == 0 ? TILES - 1 : at - 1], tokens[TILES - 1]);
            cp_async_wait<TILES - 1>();
            __syncwarp();
            chosen.attend(partial, tiles[at], tokens[0]);
            __syncwarp();
#pragma unroll
            for (int j = 0; j < TILES - 1; j++) tokens[j] = tokens[j + 1];
            at = at == TILES - 1 ? 0 : at + 1;
        }
    }
};
