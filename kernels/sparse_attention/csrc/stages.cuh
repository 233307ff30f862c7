// A warp's buffers of chosen tokens in shared memory, filled by cp.async.
#pragma once

#include "../../selection/csrc/scan_stage.cuh"
#include "config.cuh"
#include "sparse_params.cuh"

// Up to TILE chosen tokens of a group, with the scales and minima of the whole group. 16-byte pieces of values are
// swapped within a row by the token's number, so that lanes that read one piece of several tokens use different banks.
struct __align__(16) TokenTile {
    u8 keys[TILE][HALF_DIM], values[TILE][HALF_DIM];
    u16 key_scale[HEAD_DIM], key_minimum[HEAD_DIM], value_scale[GROUP], value_minimum[GROUP];
    u8 places[TILE];  // of the tokens in the group
    int count;

    static constexpr int PIECES = HALF_DIM / 16;
    __device__ __forceinline__ static int swapped(int token, int piece) { return piece ^ token / 2 % PIECES; }
};

static_assert(sizeof(TokenTile) == TILE_BYTES, "as the launch takes it");

// Starts copying the tokens of group `group` whose places and number the tile has.
__device__ __forceinline__ void start_copy(TokenTile& tile, const SparseParams& p, i64 group) {
    constexpr int PIECES = TokenTile::PIECES, ROWS = 32 / PIECES;  // of one copy by all lanes
    const int lane = threadIdx.x % 32, piece = lane % PIECES, count = tile.count;
    const i64 first = group * GROUP;
#pragma unroll
    for (int i = 0; i < TILE; i += ROWS) {
        const int token = i + lane / PIECES;
        if (token >= count) continue;
        const i64 from = (first + tile.places[token]) * HALF_DIM + 16 * piece;
        cp_async_16(tile.keys[token] + 16 * piece, p.key_codes.upper + from);
        cp_async_16(tile.values[token] + 16 * TokenTile::swapped(token, piece), p.value_rows + from);
    }
    copy_pairs<HEAD_DIM>(tile.key_scale, tile.key_minimum, p.key_codes.scale + group * HEAD_DIM,
                         p.key_codes.minimum + group * HEAD_DIM);
    copy_pairs<GROUP>(tile.value_scale, tile.value_minimum, p.value_codes.scale + first, p.value_codes.minimum + first);
}
