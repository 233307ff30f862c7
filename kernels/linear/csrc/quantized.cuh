// 4-bit weights in the layout of int4_weight.py, and 8-bit ones, which are the sum of two of these (int8_weight.py);
// docs/kernels/linear.md explains the choices.
//
// Weights are the 16-row A operand of mma.m16n8k16, x is the 8-column B operand. `g` = lane / 4 and `c` = lane % 4;
// a K tile is one group of inputs of an output tile.
#pragma once

#include "config.cuh"
#include "params.cuh"

constexpr int K_TILE = GROUP;                   // inputs
constexpr int CHUNK = GROUP < 64 ? GROUP : 64;  // inputs whose codes a lane holds in one load
constexpr int CHUNKS = GROUP / CHUNK;
constexpr int STEPS = CHUNK / 16;
constexpr int PIECES = CHUNK / 32;  // 16-byte pieces of a row of x that a lane needs for a chunk
constexpr int CODE_BYTES = 8 * GROUP;
constexpr int K_TILE_BYTES = CODE_BYTES + 64;
constexpr int STAGE_K_TILES = STAGE_INPUTS / GROUP;
constexpr int PLANES = WEIGHT_BITS / 4;
constexpr int PLANE_BYTES = STAGE_K_TILES * K_TILE_BYTES;  // of a stage
constexpr int STAGE_BYTES = PLANES * PLANE_BYTES;
constexpr int X_SUM_COLUMNS = COLUMNS;  // columns of the sums of x that a K tile needs
constexpr int AT_ONCE = STAGE_K_TILES % (2 * MMA_WARPS) ? 1 : 2;  // K tiles that a warp multiplies together
constexpr u32 MASK = 0x000F000Fu;
constexpr u32 BASE = BF16 ? 0x43004300u : 0x64006400u;    // 128 or 1024, into whose mantissa a code is ORed
constexpr u32 OFFSET = BF16 ? 0xC308C308u : 0xE408E408u;  // minus that and 8, so that centred codes remain
constexpr float OFFSET_INVERSE = BF16 ? -1.0f / 136 : -1.0f / 1032;

// A stage holds K tiles of each plane, which are contiguous in memory.
struct Weights {
    const u8* planes[PLANES];
    i64 tile_bytes;

    __device__ Weights(const LinearParams& p) : tile_bytes(i64(p.inputs / GROUP) * K_TILE_BYTES) {
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
};

__device__ __forceinline__ void load_x(u32 (&b)[PIECES][4], const u8* row, int chunk) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) load_words(b[piece], row + (chunk * PIECES + piece) * 64);
}

// Two columns of x_sums[k_tile][column] = OFFSET * (sum of x over the K tile's inputs): where a K tile's product
// starts, and what its zero is multiplied by.
__device__ __forceinline__ float2* x_sums_of(float* x_sums, int k_tile, int t, int lane) {
    return reinterpret_cast<float2*>(x_sums + k_tile * COLUMNS + 8 * t + lane % 4 * 2);
}

// d += codes x for a chunk of N K tiles of one plane, whose codes are at `data`; `b`: x, as `load_x` loads it.
template <int N, bool SUM_X> __device__ __forceinline__ void multiply_chunk(
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
            const u32 a0 = lop3_and_or(word, MASK, BASE), a1 = lop3_and_or(word >> 4, MASK, BASE);
            const u32 a2 = lop3_and_or(word >> 8, MASK, BASE), a3 = lop3_and_or(word >> 12, MASK, BASE);
#pragma unroll
            for (int t = 0; t < X_TILES; t++) {
                const u32 b0 = b[n][t][s / 2][s % 2 * 2], b1 = b[n][t][s / 2][s % 2 * 2 + 1];
                mma(d[n][t], a0, a1, a2, a3, b0, b1);
                if (SUM_X) mma(sum[n][t], OFFSET, OFFSET, OFFSET, OFFSET, b0, b1);
            }
        }
}

// acc += sum over planes of scale * (codes - 8) x + zero * sum of x, for N K tiles: `k_tile` of this CTA's inputs, whose
// weights are at `data`, and each MMA_WARPS further on. Their products do not depend on each other and so hide each
// other's latency. SUM_X: the sums are computed on the way, by products that cost nothing, as unpacking takes longer
// than multiplying.
template <int N, bool SUM_X> __device__ __forceinline__ void multiply_k_tiles(
    float (&acc)[X_TILES][4], const u8* data, const u8* const (&x)[X_TILES], float* x_sums, int k_tile, int lane
) {
    float d[PLANES][N][X_TILES][4], sum[N][X_TILES][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int t = 0; t < X_TILES; t++) {
            const float2 known = SUM_X ? make_float2(0, 0) : *x_sums_of(x_sums, k_tile + n * MMA_WARPS, t, lane);
            sum[n][t][0] = sum[n][t][2] = known.x;
            sum[n][t][1] = sum[n][t][3] = known.y;
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
            const u8* const pair_at = data + p * PLANE_BYTES + n * MMA_WARPS * K_TILE_BYTES + CODE_BYTES + lane / 4 * 8;
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

// This warp's K tiles of a stage of `count`: every MMA_WARPS-th from the `own`-th on. `k_tile`: the stage's first.
template <bool SUM_X> __device__ __forceinline__ void multiply_stage(
    float (&acc)[X_TILES][4], const u8* data, const u8* const (&x)[X_TILES], float* x_sums, int k_tile, int count,
    int own, int lane
) {
    if (STAGE_K_TILES % (MMA_WARPS * AT_ONCE) == 0 && count >= STAGE_K_TILES) {
        data += own * K_TILE_BYTES;
#pragma unroll 2
        for (int i = 0; i < STAGE_K_TILES / MMA_WARPS; i += AT_ONCE)
            multiply_k_tiles<AT_ONCE, SUM_X>(
                acc, data + i * MMA_WARPS * K_TILE_BYTES, x, x_sums, k_tile + own + i * MMA_WARPS, lane);
        return;
    }
#pragma unroll 1
    for (; own < count; own += MMA_WARPS)
        multiply_k_tiles<1, SUM_X>(acc, data + own * K_TILE_BYTES, x, x_sums, k_tile + own, lane);
}
