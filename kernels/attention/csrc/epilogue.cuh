// What a CTA writes of its split of a row, and the reduction of a row's splits by their log-sum-exps.
#pragma once

#include "softmax.cuh"

// Where results of one KV head go.
template <class Config> struct Results {
    float *partial, *lse;  // of all splits [split, row, HEAD_DIM]; base-2 log-sum-exps [split, row]
    u16* out;              // output of the KV head's first query head and the first query
    int num_rows, queries;
    float* score_lse;      // [q_heads_per_kv], of the KV head
    const float* sinks;    // the same

    // Leaves a row's log-sum-exp, given in base 2, for the next call's scores, if it is the last query's.
    __device__ __forceinline__ void keep_lse(int row, float lse) const {
        if (!Config::SUMS_PROBABILITIES || row % queries != queries - 1) return;
        if (lse > negative_infinity()) score_lse[row / queries] = lse * LN_2;
    }
    // What a row's sum of 2^(base-2 score - reference) is divided by: with its sink, which has no value. A sink far above
    // the reference makes it infinite, and the result zero.
    __device__ __forceinline__ float inverse(int row, float row_sum, float reference) const {
        if (!(row_sum > 0)) return 0;
        if constexpr (Config::SINKS) row_sum += exp2_approx(__ldcg(sinks + row / queries) * LOG2_E - reference);
        return 1 / row_sum;
    }
};

// The warps' sums as normalized outputs: partials of split `split`, or the final result where split < 0.
template <class Config> __device__ __forceinline__ void store_split(
    Accumulator<Config>& sums, QueryRows<Config>& rows, const Results<Config>& results, i64 split,
    const ThreadLayout<Config>& thread
) {
    const int c = thread.lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * Config::Q_TILES; i++) {
        float row_sum = sums.row_sum[i / 2][i % 2], zero_sum = sums.zero_sum[i / 2][i % 2];
        column_sum(row_sum, zero_sum);
        if (thread.lane < 4) {
            rows.exchange[0][thread.warp][4 * i - 3 * (i % 2) + 2 * c] = row_sum;
            rows.exchange[1][thread.warp][4 * i - 3 * (i % 2) + 2 * c] = zero_sum;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * Config::Q_TILES; i++) {
        const int row = 8 * (i / 2) + 2 * c + i % 2;
        if (row >= results.num_rows) continue;
        float row_sum = 0, zero_sum = 0;
#pragma unroll
        for (int w = 0; w < Config::WARPS; w++)
            row_sum += rows.exchange[0][w][row], zero_sum += rows.exchange[1][w][row];
        const float inverse = split < 0 ? results.inverse(row, row_sum, rows.row_max[row] - Config::LOG2_P_SCALE)
                              : row_sum > 0 ? 1 / row_sum : 0;
        const int channel = 16 * Config::OUT_TILES * thread.warp + thread.lane / 4;
        float* partial = results.partial + (split * results.num_rows + row) * Config::HEAD_DIM + channel;
        u16* out = results.out + rows.out_offset[row] + channel;
#pragma unroll
        for (int k = 0; k < 2 * Config::OUT_TILES; k++) {
            const float x = (sums.out[k / 2][i / 2][k % 2 * 2 + i % 2] + zero_sum) * inverse;
            if (split < 0) out[8 * k] = u16(Config::Elem::pair_from_floats(x, 0));
            else partial[8 * k] = x;
        }
        if (thread.warp == 0 && thread.lane < 4 && (split >= 0 || Config::SUMS_PROBABILITIES)) {
            const float lse =
                row_sum > 0 ? rows.row_max[row] + log2f(row_sum) - Config::LOG2_P_SCALE : negative_infinity();
            if (split >= 0) results.lse[split * results.num_rows + row] = lse;
            else results.keep_lse(row, lse);
        }
    }
}

// The reduction of some of a row's splits by ROW_LANES threads, of which each holds CHANNELS adjacent channels.
template <class Config> struct SplitReduction : SoftmaxState<Config::LANE_CHANNELS> {
    static constexpr int CHANNELS = Config::LANE_CHANNELS;
    static constexpr int BATCH = 8;  // partials in flight together: reducing is all latency

    SplitReduction() = default;
    // Splits at, at + step, ... below `count` of the row whose first split is `first`.
    __device__ __forceinline__ SplitReduction(
        const Results<Config>& results, i64 first, int row, int at, int step, int count, int lane
    )
        : SoftmaxState<CHANNELS>(-1e30f) {
        const float* lse = results.lse + first * results.num_rows + row;
        const float* partial = results.partial + (first * results.num_rows + row) * Config::HEAD_DIM + CHANNELS * lane;
#pragma unroll 1
        for (; at < count; at += step * BATCH) {
            float split_lse[BATCH], part[BATCH][CHANNELS], new_max = this->row_max;
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const i64 from = at + step * k < count ? i64(at + step * k) * results.num_rows : 0;
                split_lse[k] = at + step * k < count ? __ldcg(lse + from) : negative_infinity();
                load(part[k], partial + from * Config::HEAD_DIM);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) new_max = fmaxf(new_max, split_lse[k]);
            this->rescale(new_max);
#pragma unroll
            for (int k = 0; k < BATCH; k++) this->add(exp2_approx(split_lse[k] - this->row_max), 1, part[k]);
        }
    }
    // From the L2 cache, as other CTAs wrote it.
    __device__ __forceinline__ static void load(float (&x)[CHANNELS], const float* from) {
        const float4 y = __ldcg(reinterpret_cast<const float4*>(from));
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
    __device__ __forceinline__ void store(const Results<Config>& results, u16* to, int row, int lane) const {
        using Elem = typename Config::Elem;
        if (lane == 0) results.keep_lse(row, this->row_max + log2f(this->row_sum));
        const float inverse = results.inverse(row, this->row_sum, this->row_max);
        const float(&x)[CHANNELS] = this->out;
        *reinterpret_cast<uint2*>(to + CHANNELS * lane) =
            make_uint2(Elem::pair_from_floats(x[0] * inverse, x[1] * inverse),
                       Elem::pair_from_floats(x[2] * inverse, x[3] * inverse));
    }
};

// True in the CTA that arrives last of `count`, which then sees what the others wrote. The counter wraps to zero.
__device__ __forceinline__ bool arrives_last(u32* arrivals, int count) {
    __syncthreads();
    u32 before = 0;
    if (threadIdx.x == 0) before = atomic_inc_acq_rel(arrivals, count - 1);
    return __syncthreads_or(before == u32(count - 1));
}
