// The online softmax that a CTA shares. All four warps work on one KV tile: a warp computes the scores of its own
// tokens (S^T = K Q^T), all of them exchange probabilities through shared memory, and a warp accumulates its own
// channels over all tokens (O^T = V^T P^T). So each code is unpacked once, for any number of query rows.
// `g` = lane / 4 and `c` = lane % 4 throughout; columns of all products are query rows.
#pragma once

#include "../../device/csrc/dequant.cuh"
#include "scores.cuh"

// What the warps of a CTA share about its query rows.
template <class Config> struct QueryRows : ScoreRows<Config> {
    int q_offset[Config::ROWS];       // from the KV head's first query, in units of 8 elements
    int out_offset[Config::ROWS];     // from the KV head's first result, in elements
    float score_scale[Config::ROWS];  // from a product with codes to a base-2 score
    float row_max[Config::ROWS];      // reference of probabilities: a base-2 score, at times below the maximum
    // Parts of what all scores of a group share, relative to the reference.
    float score_bias[Config::SCALE_WARPS][Config::ROWS];
    int dense_end[Config::ROWS];  // first full-precision slot that the row does not see
    float exchange[2][Config::WARPS][Config::ROWS];
    int scale_exponent[Config::WARPS];
};

// Which lane this is, and where in shared memory it reads and writes: computed once, and hidden from the compiler,
// which would rather compute it again for every tile.
template <class Config> struct ThreadLayout {
    int warp, lane;
    u32 key_scales;    // in a stage of keys: scales of the channels for which it scales queries
    u32 key_codes;     // in a stage of keys: codes of its first token
    u32 value_scales;  // in a stage of values: scale of its first token
    u32 value_codes;   // in a stage of values: codes of its first channel
    u32 q_fragments;   // staged queries: its part of the first fragment
    u32 staged;        // staged queries, the same for all lanes

    __device__ __forceinline__ explicit ThreadLayout(u32 staged)
        : warp(__shfl_sync(FULL_MASK, int(threadIdx.x) / 32, 0)), lane(threadIdx.x % 32), staged(staged) {
        const int g = lane / 4, c = lane % 4;
        key_scales =
            opaque(Config::CODE_BYTES + 8 * (Config::WORDS * c + warp % Config::SCALE_WARPS * Config::SCALED_WORDS));
        key_codes = opaque(first_token() * (Config::HEAD_DIM / 2) + 4 * Config::WORDS * c);
        value_scales = opaque(Config::CODE_BYTES + 2 * first_token());
        value_codes = opaque((16 * Config::OUT_TILES * warp + g) * (Config::GROUP / 2) + 16 * c);
        q_fragments = opaque(staged + 16 * lane);
    }
    // Staged probabilities: its part of the first fragment.
    __device__ __forceinline__ u32 p_fragments() const { return q_fragments + Config::Q_BYTES; }
    // Row g + 8r of a warp's score tile h is token first_token + r + 64h of the group: the tokens whose value codes
    // column c = g / 2 of the lanes holds as 16 consecutive bytes, in the order in which unpacking leaves them.
    __device__ __forceinline__ int first_token() const {
        return 16 * (lane / 8) + 4 * warp + 2 * (lane / 4 % 2);
    }
    // The same, from a register that is there anyway.
    __device__ __forceinline__ int scored_token() const { return int(value_scales - Config::CODE_BYTES) / 2; }
    __device__ __forceinline__ static u32 opaque(u32 x) {
        asm volatile("" : "+r"(x));
        return x;
    }
};

// A lane's tokens of a group of values: scale S (twice in a word) and zero point Z + 8 S, to which code 8 decodes.
template <class Config> struct ValueScales {
    u32 scale[2][2];
    float zero_point[2][2];
    int exponent;  // the largest of the scales', as fp16 stores it

    __device__ __forceinline__ void load(u32 stage, const ThreadLayout<Config>& thread) {
        u32 largest = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 s = ld_shared(stage + thread.value_scales + 128 * h);
            const u32 z = ld_shared(stage + thread.value_scales + 2 * Config::GROUP + 128 * h);
            scale[h][0] = __byte_perm(s, 0, 0x1010), scale[h][1] = __byte_perm(s, 0, 0x3232);
            zero_point[h][0] = fmaf(half_to_float(u16(s)), 8, half_to_float(u16(z)));
            zero_point[h][1] = fmaf(half_to_float(u16(s >> 16)), 8, half_to_float(u16(z >> 16)));
            largest = max(largest, max(s & 0xFFFF, s >> 16));
        }
        exponent = min(28, int(largest >> 10));
    }
};

// Running sums over a CTA's tokens: a warp's channels of the output, and of the rest the part of a lane's tokens.
template <class Config> struct Accumulator {
    // Probabilities times codes, times 2^(14 - exponent) and, for INT8, 16.
    float out[Config::OUT_TILES][Config::Q_TILES][4];
    float row_sum[Config::Q_TILES][2];   // sums of probabilities
    float zero_sum[Config::Q_TILES][2];  // sums of probabilities times zero points
    int exponent;                        // fp16 exponent of the largest value scale so far

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < Config::Q_TILES; t++) {
            row_sum[t][0] = row_sum[t][1] = zero_sum[t][0] = zero_sum[t][1] = 0;
#pragma unroll
            for (int i = 0; i < 4 * Config::OUT_TILES; i++) out[i / 4][t][i % 4] = 0;
        }
        exponent = 0;
    }
    __device__ __forceinline__ void rescale_out(float even, float odd, int t) {
#pragma unroll
        for (int i = 0; i < 4 * Config::OUT_TILES; i++) out[i / 4][t][i % 4] *= i % 2 ? odd : even;
    }
    // Brings `out` to a scale of one, so that products with full-precision values can be added.
    __device__ __forceinline__ void normalize_out() {
        const float scale = power_of_two(exponent - 14 - (Config::BITS == 8 ? 4 : 0));
#pragma unroll
        for (int t = 0; t < Config::Q_TILES; t++) rescale_out(scale, scale, t);
        exponent = 14;
    }
    // Raises the rows' references to the maxima of the tile's scores `x` (sets them, where this is the `first` tile),
    // and the exponent to the largest; rescales sums and scores accordingly.
    template <int HALVES> __device__ __forceinline__ void update_row_max(
        float (&x)[HALVES][Config::Q_TILES][4], QueryRows<Config>& rows, int tile_exponent, bool first,
        const ThreadLayout<Config>& thread
    ) {
        const int c = thread.lane % 4;
#pragma unroll
        for (int i = 0; i < 2 * Config::Q_TILES; i++) {
            float tile_max = negative_infinity();
#pragma unroll
            for (int k = 0; k < 2 * HALVES; k++) tile_max = fmaxf(tile_max, x[k / 2][i / 2][k % 2 * 2 + i % 2]);
            tile_max = column_max(tile_max);
            if (thread.lane < 4) rows.exchange[0][thread.warp][4 * i - 3 * (i % 2) + 2 * c] = tile_max;
        }
        tile_exponent = __reduce_max_sync(FULL_MASK, max(tile_exponent, exponent));
        if (thread.lane == 0) rows.scale_exponent[thread.warp] = tile_exponent;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < Config::WARPS; w++) tile_exponent = max(tile_exponent, rows.scale_exponent[w]);
        const float shrink = power_of_two(exponent - tile_exponent);
        exponent = tile_exponent;
#pragma unroll
        for (int t = 0; t < Config::Q_TILES; t++) {
            float rescale[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 8 * t + 2 * c + e;
                float tile_max = negative_infinity();
#pragma unroll
                for (int w = 0; w < Config::WARPS; w++) tile_max = fmaxf(tile_max, rows.exchange[0][w][row]);
                const float max_delta = tile_max == negative_infinity() ? 0
                                        : first                         ? tile_max - Config::LOG2_P_SCALE
                                                                        : fmaxf(tile_max - Config::LOG2_P_SCALE, 0);
                if (thread.warp == 0 && thread.lane < 4) rows.row_max[row] += max_delta;
                rescale[e] = first ? 1 : exp2_approx(-max_delta);
                row_sum[t][e] *= rescale[e], zero_sum[t][e] *= rescale[e];
#pragma unroll
                for (int k = 0; k < 2 * HALVES; k++) x[k / 2][t][k % 2 * 2 + e] -= max_delta;
            }
            rescale_out(rescale[0] * shrink, rescale[1] * shrink, t);
        }
        if constexpr (Config::SCORES != 0) {
            if (thread.warp == 0 && thread.lane < 4) rows.set_references(rows.row_max, c);
            __syncthreads();
        }
    }
};

// Turns scores into probabilities and stages them as B operands of the output, times the values' scales where these are
// codes; `values` is null for full precision. A warp stages before it knows whether a score exceeds its row's
// reference: one barrier carries that vote. Where it does, or where the `first` tile has no reference yet, all warps
// update the references and stage again. `token`: of the tile, the first that the lane has scored.
template <class Config, int HALVES> __device__ __forceinline__ void stage_probabilities(
    Accumulator<Config>& sums, float (&x)[HALVES][Config::Q_TILES][4], QueryRows<Config>& rows,
    const ValueScales<Config>* values, int token, bool first, const ThreadLayout<Config>& thread
) {
    constexpr u32 HALF2_EXPONENT_ONE = 0x04000400u;  // exponent fields of 1 in both halves
    TokenScores<Config, HALVES> scores;
    float row_sum[Config::Q_TILES][2], zero_sum[Config::Q_TILES][2];
    for (bool may_exceed = true;; may_exceed = first = false) {
        const u32 unit = u32(29 - sums.exponent) * HALF2_EXPONENT_ONE;  // 2^(14 - exponent), twice
        // Of INT4 / 16, as unpacked codes of the second half of the tokens are multiplied by 16.
        const u32 units[2] = {unit, Config::BITS == 4 ? mul_half2(unit, HALF2_SIXTEENTH) : unit};
        u32 largest = 0;
        scores.clear();
#pragma unroll
        for (int t = 0; t < Config::Q_TILES; t++) {
            float summed[HALVES][4];
            row_sum[t][0] = row_sum[t][1] = zero_sum[t][0] = zero_sum[t][1] = 0;
            u32 p[2 * HALVES];
#pragma unroll
            for (int i = 0; i < 2 * HALVES; i++) {
                const float even = exp2_approx(x[i / 2][t][i % 2 * 2]), odd = exp2_approx(x[i / 2][t][i % 2 * 2 + 1]);
                row_sum[t][0] += even, row_sum[t][1] += odd;
#pragma unroll
                for (int e = 0; e < 2; e++)
                    summed[i / 2][i % 2 * 2 + e] = Config::SUMS_LOGITS ? x[i / 2][t][i % 2 * 2 + e] : e ? odd : even;
                p[i] = values ? floats_to_half2(even, odd) : Config::Elem::pair_from_floats(even, odd);
                largest = __vmaxu2(largest, p[i]);  // positive numbers compare like their bits
                if (values) {
                    const float zero_point = values->zero_point[i / 2][i % 2];
                    zero_sum[t][0] = fmaf(even, zero_point, zero_sum[t][0]);
                    zero_sum[t][1] = fmaf(odd, zero_point, zero_sum[t][1]);
                    p[i] = mul_half2(p[i], mul_half2(values->scale[i / 2][i % 2], units[i / 2]));
                }
            }
            stmatrix_trans(thread.p_fragments() + t * Config::P_BYTES + thread.warp * 512, p);
            scores.add(rows, t, summed, thread.lane);
            // Summed up here, or the compiler carries all probabilities across the barrier and spills.
            asm volatile("" : "+f"(row_sum[t][0]), "+f"(row_sum[t][1]), "+f"(zero_sum[t][0]), "+f"(zero_sum[t][1]));
        }
        if (Config::WARPGROUP && values) fence_proxy_async();
        const u32 limit = values || !Config::BF16 ? Config::MAX_P_HALF : Config::MAX_P_BF16;
        bool exceeds = max(largest & 0xFFFF, largest >> 16) > limit;
        if (values) exceeds |= values->exponent > sums.exponent;
        if (!__syncthreads_or(may_exceed && (first || exceeds))) break;
        sums.update_row_max(x, rows, values ? values->exponent : 0, first, thread);
    }
    scores.stage(rows, token, thread.lane % 4);
#pragma unroll
    for (int i = 0; i < 2 * Config::Q_TILES; i++) {
        sums.row_sum[i / 2][i % 2] += row_sum[i / 2][i % 2];
        sums.zero_sum[i / 2][i % 2] += zero_sum[i / 2][i % 2];
    }
}
