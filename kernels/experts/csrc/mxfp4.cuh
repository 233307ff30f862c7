// How the kernel of routed experts reads weights: codes as dense products do (linear/csrc/quantized.cuh), and MXFP4 as
// it is stored. Beside what `Weights` defines, of one output tile:
//   X_PITCH      bytes between rows of x, with which a quarter warp's 16-byte loads use every bank
//   LANE_X_BYTES  adjacent bytes of a K tile's x that a lane takes
//   multiply     acc += W x for N K tiles, `place` of the stage, which is `k_tile` of the inputs, and each MMA_WARPS on
#pragma once

#include "../../linear/csrc/quantized.cuh"

template <class Config, bool MXFP4 = Config::MXFP4> struct ExpertWeights : Weights<Config> {
    using Base = Weights<Config>;
    using Base::Base;
    static constexpr int X_PITCH = 2 * Config::INPUTS | 64, LANE_X_BYTES = 16;

    template <int N, bool SUM_X> __device__ __forceinline__ static void multiply(
        float (&acc)[1][4], const u8* stage, const u8* const (&x)[1], float* x_sums, int place, int k_tile, int lane
    ) {
        Base::template multiply_k_tiles<N, SUM_X>(acc, stage + place * Base::K_TILE_BYTES, x, x_sums, k_tile, lane);
    }
};

// Codes [outputs, inputs / 2] of two numbers a byte, s e e m each, and scales [outputs, inputs / 32]. A stage is a whole
// output tile, 16 rows of either. Lane c of a row takes 16 adjacent inputs of a K tile of 64.
template <class Config> struct ExpertWeights<Config, true> {
    static constexpr int K_TILE = 64, K_TILE_ROW_BYTES = 32, GROUP = 32;
    static constexpr int STAGE_K_TILES = Config::STAGE_INPUTS / K_TILE;
    static constexpr int ROW_BYTES = Config::INPUTS / 2, SCALE_ROW_BYTES = Config::INPUTS / GROUP;
    static constexpr int CODE_BYTES = Config::TILE_OUTPUTS * ROW_BYTES;
    static constexpr int SCALE_BYTES = Config::TILE_OUTPUTS * SCALE_ROW_BYTES;
    static constexpr int STAGE_BYTES = CODE_BYTES + SCALE_BYTES;
    static constexpr int X_SUM_COLUMNS = 0;
    static constexpr int X_PITCH = 2 * Config::INPUTS + 16, LANE_X_BYTES = 32;
    static_assert(Config::STAGE_INPUTS == Config::INPUTS && Config::INPUTS % K_TILE == 0, "a stage is a tile");
    static_assert(Config::BF16, "numbers and scales are exact in bfloat16");

    const u8 *codes, *scales;

    template <class Params> __device__ ExpertWeights(const Params& p) : codes(p.weight), scales(p.lower) {}
    __device__ __forceinline__ void copy(u8* stage, int tile, int, int, u64* full) const {
        mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        bulk_copy(stage, codes + i64(tile) * CODE_BYTES, CODE_BYTES, full);
        bulk_copy(stage + CODE_BYTES, scales + i64(tile) * SCALE_BYTES, SCALE_BYTES, full);
    }

    // Numbers I and I + 4 of a word's eight as bfloat16 times 2^-126: the sign to bit 15, and e e m to bits 8 to 6, by
    // one multiplication, as integer units are busier than multipliers.
    template <int I> __device__ __forceinline__ static u32 numbers(u32 word) {
        const u32 nibbles = (I < 2 ? word : word >> 8) & (I % 2 ? 0x00F000F0u : 0x000F000Fu);
        return nibbles * (I % 2 ? 0x0104u : 0x1040u) & 0x81C081C0u;
    }
    // 2^(scale - 127) as a pair of bfloat16, times the 2^126 that `numbers` lack; for scales up to 128.
    __device__ __forceinline__ static u32 scale_pair(u32 scale) { return scale * 0x00800080u + 126 * 0x00800080u; }

    template <int STEP> __device__ __forceinline__ static void multiply_step(
        float (&d)[4], u32 upper, u32 lower, u32 upper_scale, u32 lower_scale, u32 x0, u32 x1
    ) {
        constexpr int I = 2 * STEP;
        Config::Elem::mma(
            d, mul_bf16x2(numbers<I>(upper), upper_scale), mul_bf16x2(numbers<I>(lower), lower_scale),
            mul_bf16x2(numbers<I + 1>(upper), upper_scale), mul_bf16x2(numbers<I + 1>(lower), lower_scale),
            pack_low_halves(x0, x1), pack_high_halves(x0, x1)
        );
    }
    template <int N, bool SUM_X> __device__ __forceinline__ static void multiply(
        float (&acc)[1][4], const u8* stage, const u8* const (&x)[1], float*, int place, int k_tile, int lane
    ) {
        u32 upper[N][2], lower[N][2], scale[N][2], b[N][2][4];
        const int c = lane % 4;
        const u8* const codes = stage + lane / 4 * ROW_BYTES + c * 8;
        const u8* const scales = stage + CODE_BYTES + lane / 4 * SCALE_ROW_BYTES + c / 2;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int at = place + n * Config::MMA_WARPS;
            load_words(upper[n], codes + at * K_TILE_ROW_BYTES);
            load_words(lower[n], codes + at * K_TILE_ROW_BYTES + 8 * ROW_BYTES);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                scale[n][half] = scale_pair(scales[at * (K_TILE / GROUP) + half * 8 * SCALE_ROW_BYTES]);
                load_words(b[n][half], x[0] + (k_tile + n * Config::MMA_WARPS) * 2 * K_TILE + half * 16);
            }
        }
        float d[N][4] = {};
#pragma unroll
        for (int word = 0; word < 2; word++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const u32(&w)[4] = b[n][word];
                multiply_step<0>(d[n], upper[n][word], lower[n][word], scale[n][0], scale[n][1], w[0], w[2]);
                multiply_step<1>(d[n], upper[n][word], lower[n][word], scale[n][0], scale[n][1], w[1], w[3]);
            }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[0][i] += d[n][i];
    }
};
