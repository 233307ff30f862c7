// A warp's buffers in shared memory, filled by cp.async: groups to scan, and chosen tokens to attend to.
#pragma once

#include "config.cuh"
#include "sparse_params.cuh"

// 2-bit keys of a group, and the scales and minima of its keys.
struct __align__(16) ScanStage {
    u8 codes[GROUP][QUARTER];
    u16 scale[HEAD_DIM], minimum[HEAD_DIM];
};

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

static_assert(sizeof(TokenTile) == TILE_BYTES && sizeof(ScanStage) == STAGE_BYTES, "as the launch takes them");

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Halves [N] of two arrays, by one piece of 16 bytes per lane.
template <int N> __device__ __forceinline__ void copy_pairs(u16* to0, u16* to1, const u16* from0, const u16* from1) {
    const int lane = threadIdx.x % 32, piece = lane % 16 * 8;
    if (piece < N) cp_async_16((lane < 16 ? to0 : to1) + piece, (lane < 16 ? from0 : from1) + piece);
}

// Starts copying what the scan of group `group` (of all rows) reads.
__device__ __forceinline__ void start_copy(ScanStage& stage, const SparseParams& p, i64 group) {
    const int lane = threadIdx.x % 32;
    const u8* codes = p.two_bit + group * GROUP * QUARTER;
#pragma unroll
    for (int i = 0; i < GROUP * QUARTER / 16; i += 32)
        cp_async_16(&stage.codes[0][0] + 16 * (i + lane), codes + 16 * (i + lane));
    copy_pairs<HEAD_DIM>(stage.scale, stage.minimum, p.key_codes.scale + group * HEAD_DIM,
                         p.key_codes.minimum + group * HEAD_DIM);
}
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

template <int N> __device__ __forceinline__ void load_shared(u32 (&x)[N], SharedAddress from) {
    if constexpr (N == 1)
        x[0] = ld_shared(from);
    else
        ld_shared(x, from);
}
