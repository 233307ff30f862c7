// A warp's attention to a list of tiles, several of which are being copied while it attends to one.
#pragma once

#include "attend.cuh"

constexpr int TILES = 3;  // of a warp, TILES - 1 of them in flight

// Source::copy_next(tile) starts copying the next tile; false at the end.
template <class Source> struct TilePipeline {
    Source& source;
    TokenTile* tiles;  // [TILES]
    int copied;

    __device__ __forceinline__ TilePipeline(Source& source, TokenTile* tiles) : source(source), tiles(tiles), copied(0) {
#pragma unroll
        for (int i = 0; i < TILES - 1; i++) copy_next(i);
    }
    __device__ __forceinline__ void copy_next(int to) {
        copied += source.copy_next(tiles[to]);
        cp_async_commit();
    }
    __device__ __forceinline__ void attend(Partial& partial, const ChosenTokens& chosen) {
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
