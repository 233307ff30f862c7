// 4-bit weights in the layout of linear/weights.py, and 8-bit ones, which are the sum of two 4-bit planes;
// docs/kernels/linear.md explains the choices.
//
// Weights are the 16-row A operand of mma.m16n8k16, x is the 8-column B operand. `g` = lane / 4 and `c` = lane % 4;
// a K tile is one group of inputs of an output tile.
#pragma once

#include "../../device/csrc/dequant.cuh"
#include "weights.cuh"

// A stage holds K tiles of each plane, which are contiguous in memory.
template <class Config> struct Weights<Config, false> {
    static constexpr int MMA_WARPS = Config::MMA_WARPS, X_TILES = Config::X_TILES, COLUMNS = Config::COLUMNS;
    static constexpr int GROUP = Config::WEIGHT_GROUP;
    static constexpr int K_TILE = GROUP;                   // inputs
    static constexpr int CHUNK = GROUP < 64 ? GROUP : 64;  // inputs whose codes a lane holds in one load
    static constexpr int CHUNKS = GROUP / CHUNK;
    static constexpr int STEPS = CHUNK / 16;
    static constexpr int PIECES = CHUNK / 32;  // 16-byte pieces of a row of x that a lane needs for a chunk
    static constexpr int CODE_BYTES = 8 * GROUP;
    static constexpr int K_TILE_BYTES = CODE_BYTES + 64;
    static constexpr int STAGE_K_TILES = Config::STAGE_INPUTS / GROUP;
    static constexpr int PLANES = Config::WEIGHT_BITS / 4;
    static constexpr int PLANE_BYTES = STAGE_K_TILES * K_TILE_BYTES;  // of a stage
    static constexpr int STAGE_BYTES = PLANES * PLANE_BYTES;
    static constexpr int X_SUM_COLUMNS = COLUMNS;  // columns of the sums of x that a K tile needs
    static constexpr int AT_ONCE = STAGE_K_TILES % (2 * MMA_WARPS) ? 1 : 2;  // K tiles that a warp multiplies together
    // Unpacked codes are P + code (dequant.cuh), and code 8 stands for zero.
    static constexpr int ZERO_VALUE = CODE_BASE_VALUE<Config::BF16> + 8;
    static constexpr u32 OFFSET = pair_constant<Config::BF16>(-ZERO_VALUE);
    static constexpr float OFFSET_INVERSE = -1.0f / ZERO_VALUE;

    const u8* planes[PLANES];
    i64 tile_bytes;

    template <class Params> __device__ Weights(const Params& p) : tile_bytes(i64(p.inputs / GROUP) * K_TILE_BYTES) {
        planes[0] = p.weight;
        if (PLANES > 1) planes[PLANES - 1] = p.lower;
    }
    // Copies `count` K tiles of an output tile from `k_tile` on.
    __device__ __forceinline__ void copy(u8* stage, int tile, int k_tile, int count, u64* full) const {
        mbarrier_arrive_expect_tx(full, PLANES * count * K_TILE_BYTES);
        const i64 from = tile * tile_bytes + k_tile * K_TILE_BYTES;
#pragma unroll
        for (int p = 0; p < PLANES; p++)
            bulk_copy(stage + p * PLANE_BYTES, planes[p] + from, count * K_TILE_BYTES, full);
    }

    __device__ __forceinline__ static void load_x(u32 (&b)[PIECES][4], const u8* row, int chunk) {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) load_words(b[piece], row + (chunk * PIECES + piece) * 64);
    }

    // Two columns of x_sums[k_tile][column] = OFFSET * (sum of x over the K tile's inputs): where a K tile's product
    // starts, and what its zero is multiplied by.
    __device__ __forceinline__ static float2* x_sums_of(float* x_sums, int k_tile, int t, int lane) {
        return reinterpret_cast<float2*>(x_sums + k_tile * COLUMNS + 8 * t + lane % 4 * 2);
    }

    // d += codes x for a chunk of N K tiles of one plane, whose codes are at `data`; `b`: x, as `load_x` loads it.
    template <int N, bool SUM_X> __device__ __forceinline__ static void multiply_chunk(
        float (&d)[N][X_TILES][4], float (&sum)[N][X_TILES][4], const u8* data, const u32 (&b)[N][X_TILES][PIECES][4]
    ) {
        u32 words[N][STEPS];
#pragma unroll
        for (int n = 0; n < N; n++) load_words(words[n], data + n * MMA_WARPS * K_TILE_BYTES);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const u32 word = words[n][s];
                const u32 a0 = low_codes<Config::BF16>(word), a1 = low_codes<Config::BF16>(word >> 4);
                const u32 a2 = low_codes<Config::BF16>(word >> 8), a3 = low_codes<Config::BF16>(word >> 12);
#pragma unroll
                for (int t = 0; t < X_TILES; t++) {
                    const u32 b0 = b[n][t][s / 2][s % 2 * 2], b1 = b[n][t][s / 2][s % 2 * 2 + 1];
                    Config::Elem::mma(d[n][t], a0, a1, a2, a3, b0, b1);
                    if (SUM_X) Config::Elem::mma(sum[n][t], OFFSET, OFFSET, OFFSET, OFFSET, b0, b1);
                }
            }
    }

    // acc += sum over planes of scale * (codes - 8) x + zero * sum of x, for N K tiles: `k_tile` of this CTA's inputs,
    // whose weights are at `data`, and each MMA_WARPS further on. Their products do not depend on each other and so
    // hide each other's latency. SUM_X: the sums are computed on the way, by products that cost nothing, as unpacking
    // takes longer than multiplying.
    template <int N, bool SUM_X> __device__ __forceinline__ static void multiply_k_tiles(
        float (&acc)[X_TILES][4], const u8* data, const u8* const (&x)[X_TILES], float* x_sums, int k_tile, int lane
    ) {
        float d[PLANES][N][X_TILES][4], sum[N][X_TILES][4];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int t = 0; t < X_TILES; t++) {
                const float2 initial = SUM_X ? make_float2(0, 0) : *x_sums_of(x_sums, k_tile + n * MMA_WARPS, t, lane);
                sum[n][t][0] = sum[n][t][2] = initial.x;
                sum[n][t][1] = sum[n][t][3] = initial.y;
#pragma unroll
                for (int p = 0; p < PLANES; p++)
#pragma unroll
                    for (int i = 0; i < 4; i++) d[p][n][t][i] = sum[n][t][i];
            }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 b[N][X_TILES][PIECES][4];
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int t = 0; t < X_TILES; t++) load_x(b[n][t], x[t], (k_tile + n * MMA_WARPS) * CHUNKS + i);
            const u8* const codes = data + i * (8 * CHUNK) + lane * (4 * STEPS);
            multiply_chunk<N, SUM_X>(d[0], sum, codes, b);
            if (PLANES > 1) multiply_chunk<N, false>(d[PLANES - 1], sum, codes + PLANE_BYTES, b);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int t = 0; t < X_TILES && SUM_X; t++) {
                if (lane < 4)
                    *x_sums_of(x_sums, k_tile + n * MMA_WARPS, t, lane) = make_float2(sum[n][t][0], sum[n][t][1]);
#pragma unroll
                for (int p = 0; p < PLANES; p++)
#pragma unroll
                    for (int i = 0; i < 4; i++) d[p][n][t][i] += sum[n][t][i];
            }
#pragma unroll
            for (int p = 0; p < PLANES; p++) {
                const u8* const pair_at =
                    data + p * PLANE_BYTES + n * MMA_WARPS * K_TILE_BYTES + CODE_BYTES + lane / 4 * 8;
                const uint2 pairs = *reinterpret_cast<const uint2*>(pair_at);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 pair = half ? pairs.y : pairs.x;
                    const float scale = __uint_as_float(pair << 16);
                    const float zero = __uint_as_float(pair & 0xFFFF0000u) * OFFSET_INVERSE;
#pragma unroll
                    for (int t = 0; t < X_TILES; t++)
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            float& to = acc[t][2 * half + j];
                            to = fmaf(scale, d[p][n][t][2 * half + j], fmaf(zero, sum[n][t][j], to));
                        }
                }
            }
        }
    }

    // Multiplies this warp's K tiles of a stage of `count`: `offset`, offset + MMA_WARPS and so on. `k_tile`: the
    // stage's first.
    template <bool SUM_X> __device__ __forceinline__ static void multiply_stage(
        float (&acc)[X_TILES][4], const u8* data, const u8* const (&x)[X_TILES], float* x_sums, int k_tile, int count,
        int offset, int lane
    ) {
        if (STAGE_K_TILES % (MMA_WARPS * AT_ONCE) == 0 && count >= STAGE_K_TILES) {
            data += offset * K_TILE_BYTES;
#pragma unroll 2
            for (int i = 0; i < STAGE_K_TILES / MMA_WARPS; i += AT_ONCE)
                multiply_k_tiles<AT_ONCE, SUM_X>(
                    acc, data + i * MMA_WARPS * K_TILE_BYTES, x, x_sums, k_tile + offset + i * MMA_WARPS, lane);
            return;
        }
#pragma unroll 1
        for (; offset < count; offset += MMA_WARPS)
            multiply_k_tiles<1, SUM_X>(acc, data + offset * K_TILE_BYTES, x, x_sums, k_tile + offset, lane);
    }
};
