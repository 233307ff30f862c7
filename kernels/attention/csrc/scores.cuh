// What attention leaves of each token for the next selection (ScoreRequest in attention/scores.py): a sum over the
// query rows that count. Tensor cores compute the sums. Scores lie in registers as the 16-row operand of m16n8k8 needs
// them, and the other operand holds the rows' weights, the same in all of its columns; weights of rows that do not
// count are zero.
#pragma once

#include "../../device/csrc/softmax_state.cuh"

constexpr float MAX_LOG2_WEIGHT = 100;  // however far a log-sum-exp of the call before is off, sums stay finite

template <class Config, bool SCORED = Config::SCORES != 0> struct ScoreRows {
    static constexpr int ROWS = Config::ROWS;
    alignas(8) float weight[ROWS];  // of what is summed: scores less the row's reference, or 2^ of these
    float lse[ROWS];                // base-2 log-sum-exp to which probabilities refer; infinite if a row is not summed
    float origin;                   // what references add to a token's sum of logits
    alignas(8) float staged[Config::GROUP];  // sums of a tile's tokens, so that warps store whole lines
    float* scores;                  // of the (batch row, KV head), from token or slot 0 on

    __device__ __forceinline__ void set_scores(float* first) { scores = first; }
    // By one thread for each row, before any tile.
    __device__ __forceinline__ void set(int row, bool counts, const float* head_lse) {
        weight[row] = counts ? LN_2 : 0;
        if (Config::SUMS_PROBABILITIES) lse[row] = counts ? __ldcg(head_lse) * LOG2_E : -negative_infinity();
    }
    // Stores the sum of a token of a tile that begins at `first`, after a barrier that follows its staging.
    __device__ __forceinline__ void store(int first, int token) const {
        scores[first + token] = staged[token] + (Config::SUMS_LOGITS ? origin : 0);
    }
    // By a warp's first four lanes, c = 0 to 3, after the references changed.
    __device__ __forceinline__ void set_references(const float (&row_max)[ROWS], int c) {
        constexpr u32 FOUR_LANES = 0xF;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2 * Config::Q_TILES; i++) {
            const int row = 8 * (i / 2) + 2 * c + i % 2;
            const float reference = row_max[row] - Config::LOG2_P_SCALE;
            if (Config::SUMS_PROBABILITIES) weight[row] = exp2_approx(fminf(reference - lse[row], MAX_LOG2_WEIGHT));
            else sum = fmaf(weight[row], reference, sum);
        }
        sum += __shfl_xor_sync(FOUR_LANES, sum, 1);
        sum += __shfl_xor_sync(FOUR_LANES, sum, 2);
        if (c == 0) origin = sum;
    }
};
template <class Config> struct ScoreRows<Config, false> {
    __device__ __forceinline__ void set_scores(float*) {}
    __device__ __forceinline__ void set(int, bool, const float*) {}
    __device__ __forceinline__ void store(int, int) const {}
};

// Sums of the tokens of a tile that a warp has scored: rows g and g + 8 of each of `HALVES` products. The four lanes of
// a row have the same. Many query tiles form two chains of products, as each waits for the one before.
template <class Config, int HALVES> struct TokenScores {
    // Of KV with codes only the tokens of groups are scored, not full-precision ones.
    static constexpr bool ENABLED = Config::SCORES && (HALVES == 2) == (Config::BITS > 0);
    static constexpr int CHAINS = Config::Q_TILES >= 4 ? 2 : 1;
    float sums[CHAINS][HALVES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * HALVES * CHAINS; i++) sums[i / (4 * HALVES)][i / 4 % HALVES][i % 4] = 0;
    }
    // Adds query tile `t`, of which `a` are the scores or their probabilities.
    __device__ __forceinline__ void add(const ScoreRows<Config>& rows, int t, const float (&a)[HALVES][4], int c) {
        if constexpr (ENABLED) {
            const float2 weight = *reinterpret_cast<const float2*>(rows.weight + 8 * t + 2 * c);
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                mma_m16n8k8_tf32(sums[t % CHAINS][h], a[h][0], a[h][2], a[h][1], a[h][3], weight.x, weight.y);
        }
    }
    // Stages them; `token`: the tile's that row g of the first product has. Row g + 8 has the next, and the second
    // product those half a group after.
    __device__ __forceinline__ void stage(ScoreRows<Config>& rows, int token) const {
        if constexpr (ENABLED)
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                float2 sum = make_float2(sums[0][h][0], sums[0][h][2]);
                if (CHAINS == 2) sum.x += sums[CHAINS - 1][h][0], sum.y += sums[CHAINS - 1][h][2];
                *reinterpret_cast<float2*>(rows.staged + token + h * (Config::GROUP / 2)) = sum;
            }
    }
};
