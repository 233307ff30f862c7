// What a call of progressive attention leaves for the next one to choose by.
#pragma once

#include "partial_results.cuh"
#include "scan.cuh"

constexpr int COUNTED_LOG2 = 4;  // scores are counted down to the threshold / 2 ** COUNTED_LOG2

struct Choice {
    LaneQueries scanning;  // queries as the scan takes them
    u32 histogram[BINS];
    float scores[WARPS][GROUP];
    float scan_sums[WARPS][8];
    u32 later[WARPS];
    float mean;
};

// Adds up the CTA's counts and sums in global memory.
__device__ __forceinline__ void store_counts(const SparseParams& p, const Choice& choice, int row) {
    u32* const histogram = p.histogram + i64(row) * BINS;
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (choice.histogram[i]) atomicAdd(histogram + i, choice.histogram[i]);
    if (threadIdx.x < HEADS) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += choice.scan_sums[warp][threadIdx.x];
        p.scan_sum[i64(blockIdx.x) * HEADS + threadIdx.x] = sum;
    }
}

// Sums of exp(logit - lse) become the next call's log-sum-exps. Far from the last ones they are brought nearer only, as
// sums of floats may have overflown or vanished. Returns the mean over the query heads: 1 where nothing has changed.
__device__ __forceinline__ float update_lse(const SparseParams& p, int row) {
    const int head = threadIdx.x % 32;
    float sum = 0;
    if (head < HEADS) {
#pragma unroll 8
        for (int part = 0; part < p.parts; part++)
            sum += __ldcg(p.scan_sum + (i64(row) * p.parts + part) * HEADS + head);
        sum = fminf(fmaxf(sum, 1e-30f), 1e30f);
        float* const lse = p.lse + i64(row) * HEADS + head;
        *lse = __ldcg(lse) + LN_2 * log2f(sum);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    return sum / HEADS;
}

// The bin that the score of rank `k` (from 1) falls into, counted from the top, by the thread that finds it; -1 for the
// others. Leaves zeros in the histogram.
__device__ __forceinline__ int find_bin(Choice& choice, u32* histogram, int k) {
    constexpr int OWN = BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 counts[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) own += counts[i] = __ldcg(histogram + threadIdx.x * OWN + i);
#pragma unroll
    for (int i = 0; i < OWN; i++) histogram[threadIdx.x * OWN + i] = 0;
    u32 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(FULL_MASK, sum, step);
        if (lane + step < 32) sum += other;
    }
    if (lane == 0) choice.later[warp] = sum;
    __syncthreads();
    u32 above = sum - own;
    for (int other = warp + 1; other < WARPS; other++) above += choice.later[other];
    if (k < 1 || above >= u32(k) || u32(k) > above + own) return -1;
    int bin = OWN - 1;
    for (; above + counts[bin] < u32(k); bin--) above += counts[bin];
    return threadIdx.x * OWN + bin;
}

// Updates what the next call chooses by: log-sum-exps, and the row's threshold, the k-th best score relative to these.
// Where fewer than k were counted, the threshold was too high. Scores by log-sum-exps that were far off say nothing: the
// next call then reads all tokens.
__device__ __forceinline__ void update_choice(const SparseParams& p, Choice& choice, int row, int tokens) {
    constexpr float MOST = 16;
    if (tokens == 0) return;
    const int sinks = min(p.sinks, tokens), k = __ldcg(p.k + row / p.kv_heads) - sinks;
    const int bin = find_bin(choice, p.histogram + i64(row) * BINS, k);
    if (threadIdx.x < 32) {
        const float mean = update_lse(p, row);
        if (threadIdx.x == 0) {
            const bool settled = 1 / MOST < mean && mean < MOST && k < tokens - sinks;
            choice.mean = settled ? mean : 0;
            p.threshold[row] = k < 1 ? -negative_infinity()
                               : settled ? __ldcg(p.threshold + row) - LN_2 * (COUNTED_LOG2 + log2f(mean))
                                         : negative_infinity();
        }
    }
    __syncthreads();
    if (bin >= 0 && choice.mean > 0) p.threshold[row] = LN_2 * log2f(edge_of(max(bin, 1)) / choice.mean);
}
