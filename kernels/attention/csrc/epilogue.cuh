// What a CTA writes of its split of a row, and the reduction of a row's splits by their log-sum-exps.
#pragma once

#include "softmax.cuh"

// Where results of one KV head go.
struct Results {
    float *partial, *lse;  // partials of all splits, [split, row, HEAD_DIM]; base-2 log-sum-exps, [split, row]
    u16* out;              // output of the KV head's first query head and the first query
    int num_rows, queries;
    float* score_lse;  // of the KV head's query heads

    // Leaves a row's log-sum-exp, given in base 2, for the next call's scores, if it is the last query's.
    __device__ __forceinline__ void keep_lse(int row, float lse) const {
        if (SCORES != SUM_PROBABILITIES || row % queries != queries - 1) return;
        if (lse > negative_infinity()) score_lse[row / queries] = lse * LN_2;
    }
};

// The warps' sums as normalized outputs: partials of split `split`, or the final result where split < 0.
__device__ __forceinline__ void store_split(
    Accumulator& sums, QueryRows& rows, const Results& results, i64 split, const ThreadLayout& thread
) {
    const int c = thread.lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * Q_TILES; i++) {
        float row_sum = sums.row_sum[i / 2][i % 2], zero_sum = sums.zero_sum[i / 2][i % 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
            row_sum += __shfl_xor_sync(FULL_MASK, row_sum, step);
            zero_sum += __shfl_xor_sync(FULL_MASK, zero_sum, step);
        }
        if (thread.lane < 4) {
            rows.exchange[0][thread.warp][4 * i - 3 * (i % 2) + 2 * c] = row_sum;
            rows.exchange[1][thread.warp][4 * i - 3 * (i % 2) + 2 * c] = zero_sum;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * Q_TILES; i++) {
        const int row = 8 * (i / 2) + 2 * c + i % 2;
        if (row >= results.num_rows) continue;
        float row_sum = 0, zero_sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) row_sum += rows.exchange[0][w][row], zero_sum += rows.exchange[1][w][row];
        const float inverse = row_sum > 0 ? 1 / row_sum : 0;
        const int channel = 16 * OUT_TILES * thread.warp + thread.lane / 4;
        float* partial = results.partial + (split * results.num_rows + row) * HEAD_DIM + channel;
        u16* out = results.out + rows.out_offset[row] + channel;
#pragma unroll
        for (int k = 0; k < 2 * OUT_TILES; k++) {
            const float x = (sums.out[k / 2][i / 2][k % 2 * 2 + i % 2] + zero_sum) * inverse;
            if (split < 0) out[8 * k] = u16(Elem::pair_from_floats(x, 0));
            else partial[8 * k] = x;
        }
        if (thread.warp == 0 && thread.lane < 4 && (split >= 0 || SCORES == SUM_PROBABILITIES)) {
            const float lse = row_sum > 0 ? rows.row_max[row] + log2f(row_sum) - LOG2_P_SCALE : negative_infinity();
            if (split >= 0) results.lse[split * results.num_rows + row] = lse;
            else results.keep_lse(row, lse);
        }
    }
}

// The reduction of some of a row's splits by ROW_LANES threads; each lane holds OWN adjacent channels.
struct SplitReduction {
    static constexpr int OWN = 4;
    static constexpr int BATCH = 8;  // partials in flight together: reducing is all latency
    float row_max, row_sum, acc[OWN];

    SplitReduction() = default;
    // Splits at, at + step, ... below `count` of the row whose first split is `first`.
    __device__ __forceinline__ SplitReduction(
        const Results& results, i64 first, int row, int at, int step, int count, int lane
    )
        : row_max(-1e30f), row_sum(0), acc{} {
        const float* lse = results.lse + first * results.num_rows + row;
        const float* partial = results.partial + (first * results.num_rows + row) * HEAD_DIM + OWN * lane;
#pragma unroll 1
        for (; at < count; at += step * BATCH) {
            float split_lse[BATCH], part[BATCH][OWN], new_max = row_max;
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const i64 from = at + step * k < count ? i64(at + step * k) * results.num_rows : 0;
                split_lse[k] = at + step * k < count ? __ldcg(lse + from) : negative_infinity();
                load(part[k], partial + from * HEAD_DIM);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) new_max = fmaxf(new_max, split_lse[k]);
            rescale(new_max);
#pragma unroll
            for (int k = 0; k < BATCH; k++) add(exp2_approx(split_lse[k] - row_max), 1, part[k]);
        }
    }
    // From the L2 cache, as other CTAs wrote it.
    __device__ __forceinline__ static void load(float (&x)[OWN], const float* from) {
        const float4 y = __ldcg(reinterpret_cast<const float4*>(from));
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
    __device__ __forceinline__ void rescale(float new_max) {
        const float factor = exp2_approx(row_max - new_max);
        row_max = new_max;
        row_sum *= factor;
#pragma unroll
        for (int i = 0; i < OWN; i++) acc[i] *= factor;
    }
    __device__ __forceinline__ void add(float weight, float sum, const float (&part)[OWN]) {
        row_sum = fmaf(weight, sum, row_sum);
#pragma unroll
        for (int i = 0; i < OWN; i++) acc[i] = fmaf(weight, part[i], acc[i]);
    }
    __device__ __forceinline__ void store(const Results& results, u16* out, int row, int lane) const {
        if (lane == 0) results.keep_lse(row, row_max + log2f(row_sum));
        const float inverse = row_sum > 0 ? 1 / row_sum : 0;
        *reinterpret_cast<uint2*>(out + OWN * lane) =
            make_uint2(Elem::pair_from_floats(acc[0] * inverse, acc[1] * inverse),
                       Elem::pair_from_floats(acc[2] * inverse, acc[3] * inverse));
    }
};
constexpr int ROW_LANES = HEAD_DIM / SplitReduction::OWN;

// True in the CTA that arrives last of `count`, which then sees what the others wrote. The counter wraps to zero.
__device__ __forceinline__ bool arrives_last(u32* arrivals, int count) {
    __syncthreads();
    u32 before = 0;
    if (threadIdx.x == 0) before = atomic_inc_acq_rel(arrivals, count - 1);
    return __syncthreads_or(before == u32(count - 1));
}
