// What attention leaves of each token for the next selection (ScoreRequest in attention/scores.py): a sum over the
// query rows that count. Tensor cores compute the sums. Scores lie in registers as the 16-row operand of m16n8k8 needs
// them, and the other operand holds the rows' weights, the same in all of its columns; weights of rows that do not
// count are zero. Where each query has a sum of its own, a column has the weights of one query's rows only, so that a
// product gives all sums.
#pragma once

#include "../../device/csrc/softmax_state.cuh"

constexpr float MAX_LOG2_WEIGHT = 100;  // however far a log-sum-exp of the call before is off, sums stay finite

template <class Config, bool SCORED = Config::SCORES != 0> struct ScoreRows {
    static constexpr int ROWS = Config::ROWS;
    alignas(8) float weight[ROWS];  // of what is summed: scores less the row's reference, or 2^ of these
    float lse[ROWS];                // base-2 log-sum-exp to which probabilities refer; infinite if a row is not summed
    float origin;                   // what references add to a token's sum of logits
    alignas(2) u8 query[ROWS];      // number of the row's query
    // Sums of a tile's tokens, so that warps store whole lines. The padding spreads queries over banks.
    alignas(8) float staged[Config::SCORED_QUERIES][Config::GROUP + (Config::SCORES_BY_QUERY ? 4 : 0)];
    float* scores;                  // of the (batch row, KV head), from token or slot 0 on
    int capacity, queries;          // tokens between two queries' scores, and queries that have any

    __device__ __forceinline__ void set_scores(float* first, int score_capacity, int scored_queries) {
        scores = first, capacity = score_capacity, queries = scored_queries;
    }
    // By one thread for each row, before any tile.
    __device__ __forceinline__ void set(int row, bool counts, int number, const float* head_lse) {
        weight[row] = counts ? LN_2 : 0;
        if (Config::SCORES_BY_QUERY) query[row] = number;
        if (Config::SUMS_PROBABILITIES) lse[row] = counts ? __ldcg(head_lse) * LOG2_E : -negative_infinity();
    }
    // Stores the sums of a token of a tile that begins at `first`, after a barrier that follows their staging.
    __device__ __forceinline__ void store(int first, int token) const {
        if constexpr (Config::SCORES_BY_QUERY)
            for (int i = 0; i < queries; i++) scores[i64(i) * capacity + first + token] = staged[i][token];
        else scores[first + token] = staged[0][token] + (Config::SUMS_LOGITS ? origin : 0);
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
    __device__ __forceinline__ void set_scores(float*, int, int) {}
    __device__ __forceinline__ void set(int, bool, int, const float*) {}
    __device__ __forceinline__ void store(int, int) const {}
};

// Sums of the tokens of a tile that a warp has scored: rows g and g + 8 of each of `HALVES` products. The four lanes of
// a row have the same, or columns 2c and 2c + 1, of two queries. Many query tiles form two chains of products, as each
// waits for the one before.
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
    __device__ __forceinline__ void add(const ScoreRows<Config>& rows, int t, const float (&a)[HALVES][4], int lane) {
        if constexpr (ENABLED) {
            const int row = 8 * t + 2 * (lane % 4);
            float2 weight = *reinterpret_cast<const float2*>(rows.weight + row);
            if constexpr (Config::SCORES_BY_QUERY) {  // a lane's column of the weights is lane / 4
                const uchar2 query = *reinterpret_cast<const uchar2*>(rows.query + row);
                if (query.x != lane / 4) weight.x = 0;
                if (query.y != lane / 4) weight.y = 0;
            }
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                mma_m16n8k8_tf32(sums[t % CHAINS][h], a[h][0], a[h][2], a[h][1], a[h][3], weight.x, weight.y);
        }
    }
    // Stages them; `token`: the tile's that row g of the first product has. Row g + 8 has the next, and the second
    // product those half a group after.
    __device__ __forceinline__ void stage(ScoreRows<Config>& rows, int token, int c) const {
        if constexpr (ENABLED)
#pragma unroll
            for (int i = 0; i < HALVES * (Config::SCORES_BY_QUERY ? 2 : 1); i++) {
                const int h = i % HALVES, column = i / HALVES;
                float2 sum = make_float2(sums[0][h][column], sums[0][h][column + 2]);
                if (CHAINS == 2) sum.x += sums[CHAINS - 1][h][column], sum.y += sums[CHAINS - 1][h][column + 2];
                const int query = Config::SCORES_BY_QUERY ? 2 * c + column : 0;
                *reinterpret_cast<float2*>(rows.staged[query] + token + h * (Config::GROUP / 2)) = sum;
            }
    }
};
