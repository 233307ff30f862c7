// Dense 16-bit weights [outputs, inputs], as torch's Linear holds them; docs/kernels/linear.md explains the choices.
//
// Weights are the 16-row A operand of mma.m16n8k16, x is the 8-column B operand. `g` = lane / 4 and `c` = lane % 4.
// A K tile is 32 inputs of an output tile. Lane c takes 16 bytes, 8 adjacent inputs, of a row of either operand: both
// see the inputs of a K tile in the order [step 2, pair 2, c 4, 2] instead of [c 4, step 2, pair 2, 2].
#pragma once

#include "config.cuh"
#include "weights.cuh"

// A stage is 16 pieces of rows. Rows past the last output keep their old contents, whose products do not affect other
// rows.
template <class Config> struct Weights<Config, true> {
    static constexpr int MMA_WARPS = Config::MMA_WARPS, X_TILES = Config::X_TILES, TILE_OUTPUTS = Config::TILE_OUTPUTS;
    static constexpr int K_TILE = 32;            // inputs
    static constexpr int K_TILE_ROW_BYTES = 64;  // bytes per output
    static constexpr int STAGE_K_TILES = Config::STAGE_INPUTS / K_TILE;
    // Rows start an odd number of 64 bytes apart, so that a quarter warp's loads, 64 bytes of two rows, use every bank.
    static constexpr int ROW_BYTES = 2 * Config::STAGE_INPUTS + 64;
    static constexpr int STAGE_BYTES = TILE_OUTPUTS * ROW_BYTES;
    static constexpr int X_SUM_COLUMNS = 0;
    static_assert(Config::STAGE_INPUTS % 64 == 0, "a row and its padding are an odd number of 64 bytes");

    const u8* rows;
    i64 row_bytes;
    int outputs;

    __device__ Weights(const LinearParams& p) : rows(p.weight), row_bytes(2 * i64(p.inputs)), outputs(p.outputs) {}
    // Copies `count` K tiles of an output tile from `k_tile` on.
    __device__ __forceinline__ void copy(u8* stage, int tile, int k_tile, int count, u64* full) const {
        const int bytes = count * K_TILE_ROW_BYTES, valid = min(TILE_OUTPUTS, outputs - TILE_OUTPUTS * tile);
        const u8* from = rows + TILE_OUTPUTS * tile * row_bytes + k_tile * K_TILE_ROW_BYTES;
        u32 to = SharedAddress(stage).value;
        mbarrier_arrive_expect_tx(full, valid * bytes);
        if (valid == TILE_OUTPUTS) {
#pragma unroll
            for (int row = 0; row < TILE_OUTPUTS; row++, to += ROW_BYTES, from += row_bytes)
                bulk_copy(to, from, bytes, full);
        } else {
#pragma unroll 1
            for (int row = 0; row < valid; row++, to += ROW_BYTES, from += row_bytes) bulk_copy(to, from, bytes, full);
        }
    }

    // acc += W x for one K tile; `data` is this lane's piece of row g of the stage, x[t] that of its rows of x.
    __device__ __forceinline__ static void multiply_k_tile(
        float (&acc)[2][X_TILES][4], const u8* data, const u8* const (&x)[X_TILES], int k_tile
    ) {
        u32 upper[4], lower[4];
        load_words(upper, data);
        load_words(lower, data + 8 * ROW_BYTES);
#pragma unroll
        for (int t = 0; t < X_TILES; t++) {
            u32 b[4];
            load_words(b, x[t] + k_tile * K_TILE_ROW_BYTES);
#pragma unroll
            for (int s = 0; s < 2; s++)
                Config::Elem::mma(
                    acc[s][t], upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1], b[2 * s], b[2 * s + 1]
                );
        }
    }

    // Multiplies this warp's K tiles of a stage of `count`: `offset`, offset + MMA_WARPS and so on. `k_tile`: the
    // stage's first.
    template <bool SUM_X> __device__ __forceinline__ static void multiply_stage(
        float (&acc)[X_TILES][4], const u8* data, const u8* const (&x)[X_TILES], float*, int k_tile, int count,
        int offset, int lane
    ) {
        float d[2][X_TILES][4] = {};
        data += lane / 4 * ROW_BYTES + lane % 4 * 16;
        if (STAGE_K_TILES % MMA_WARPS == 0 && count >= STAGE_K_TILES) {
#pragma unroll
            for (int i = 0; i < STAGE_K_TILES / MMA_WARPS; i++)
                multiply_k_tile(
                    d, data + (offset + i * MMA_WARPS) * K_TILE_ROW_BYTES, x, k_tile + offset + i * MMA_WARPS
                );
        } else {
#pragma unroll 4
            for (; offset < count; offset += MMA_WARPS)
                multiply_k_tile(d, data + offset * K_TILE_ROW_BYTES, x, k_tile + offset);
        }
#pragma unroll
        for (int t = 0; t < X_TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[t][i] += d[0][t][i] + d[1][t][i];
    }
};
