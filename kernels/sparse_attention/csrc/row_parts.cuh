// What the warps of a CTA share, and what the CTAs of a row leave for the last one of them.
#pragma once

#include "attend.cuh"
#include "scan.cuh"

struct Shared {
    LaneQueries scanning, attending;  // queries as the scan and the attention to chosen tokens take them
    u32 histogram[BINS];
    float scores[WARPS][GROUP];
    float scan_sums[WARPS][8];
    float row_max[WARPS][8], row_sum[WARPS][8];
    u32 later[WARPS];
    bool last;  // whether this CTA is the last of its row to arrive
    u8 places[WARPS][GROUP];
};

// Leaves a warp's partial result for its CTA.
__device__ __forceinline__ void store_partial(Partial& partial, Shared& shared, float* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        partial.row_sum += __shfl_xor_sync(FULL_MASK, partial.row_sum, step);
        partial.zero_sum += __shfl_xor_sync(FULL_MASK, partial.zero_sum, step);
    }
    if (c == 0) shared.row_max[warp][g] = partial.row_max, shared.row_sum[warp][g] = partial.row_sum;
    float zero[2];
#pragma unroll
    for (int e = 0; e < 2; e++) zero[e] = __shfl_sync(FULL_MASK, partial.zero_sum, 8 * c + 4 * e);
    out += warp * HEADS * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < OUT_TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int head = 2 * c + j % 2;
            if (head < HEADS)
                out[head * HEAD_DIM + Partial::channel(i) + j / 2 * HALF_DIM] = partial.out[i][j] + zero[j % 2];
        }
}

// Joins the warps' partial results: the maxima and sums in shared memory, and the sums over values, which `out`
// [warp, HEADS, HEAD_DIM] has relative to each warp's maximum. Element `i` is of head i / HEAD_DIM.
struct JoinedWarps {
    float row_max, row_sum, value;

    __device__ __forceinline__ JoinedWarps(const Shared& shared, const float* out, int i) {
        const int head = i / HEAD_DIM;
        row_max = negative_infinity(), row_sum = value = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) row_max = fmaxf(row_max, shared.row_max[warp][head]);
        if (row_max == negative_infinity()) return;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float weight = exp2_approx(shared.row_max[warp][head] - row_max);
            row_sum += weight * shared.row_sum[warp][head];
            value += weight * out[warp * HEADS * HEAD_DIM + i];
        }
    }
};

// Leaves the CTA's results in global memory, for the last CTA of the row.
__device__ __forceinline__ void store_part(const ProgressiveParams& p, const Shared& shared, const float* out, i64 part) {
    u32* const histogram = p.histogram + part / p.parts * BINS;
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (shared.histogram[i]) atomicAdd(histogram + i, shared.histogram[i]);
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
        const JoinedWarps joined(shared, out, i);
        const int head = i / HEAD_DIM;
        p.partial[part * HEADS * HEAD_DIM + i] = joined.value;
        if (i % HEAD_DIM) continue;
        float sum = 0;
        for (int warp = 0; warp < WARPS; warp++) sum += shared.scan_sums[warp][head];
        p.part_max[part * HEADS + head] = joined.row_max;
        p.part_sum[part * HEADS + head] = joined.row_sum;
        p.scan_sum[part * HEADS + head] = sum;
    }
}

// Joins the partial results of the row's CTAs into its output.
__device__ __forceinline__ void join_parts(const ProgressiveParams& p, int row) {
    const i64 first = i64(row) * p.parts;
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM;
        float row_max = negative_infinity(), row_sum = 0, value = 0;
#pragma unroll 8
        for (int part = 0; part < p.parts; part++)
            row_max = fmaxf(row_max, __ldcg(p.part_max + (first + part) * HEADS + head));
        const float shift = row_max == negative_infinity() ? 0 : row_max;
#pragma unroll 8
        for (int part = 0; part < p.parts; part++) {
            const float weight = exp2_approx(__ldcg(p.part_max + (first + part) * HEADS + head) - shift);
            row_sum += weight * __ldcg(p.part_sum + (first + part) * HEADS + head);
            value += weight * __ldcg(p.partial + (first + part) * HEADS * HEAD_DIM + i);
        }
        p.out[i64(row) * HEADS * HEAD_DIM + i] = Elem::from_float(row_sum > 0 ? value / row_sum : 0);
    }
}

// Sums of exp(logit - lse) become the next call's log-sum-exps. Far from the last ones they are brought nearer only, as
// sums of floats may have overflown or vanished. Returns the mean over the query heads: 1 where nothing has changed.
__device__ __forceinline__ float update_lse(const ProgressiveParams& p, int row) {
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
__device__ __forceinline__ int find_bin(Shared& shared, u32* histogram, int k) {
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
    if (lane == 0) shared.later[warp] = sum;
    __syncthreads();
    u32 above = sum - own;
    for (int other = warp + 1; other < WARPS; other++) above += shared.later[other];
    if (k < 1 || above >= u32(k) || u32(k) > above + own) return -1;
    int bin = OWN - 1;
    for (; above + counts[bin] < u32(k); bin--) above += counts[bin];
    return threadIdx.x * OWN + bin;
}

// Updates what the next call chooses by: log-sum-exps, and the row's threshold, the k-th best score relative to these.
// Scores by log-sum-exps that were far off say nothing: the next call then reads all tokens.
__device__ __forceinline__ void update_choice(const ProgressiveParams& p, Shared& shared, int row, int tokens) {
    constexpr float MOST = 16;
    if (tokens == 0) return;
    const int sinks = min(p.sinks, tokens), k = __ldcg(p.k + row / p.kv_heads) - sinks;
    const int bin = find_bin(shared, p.histogram + i64(row) * BINS, k);
    if (threadIdx.x < 32) {
        const float mean = update_lse(p, row);
        if (threadIdx.x == 0) shared.row_sum[0][0] = mean;
    }
    if (threadIdx.x == 0) p.threshold[row] = k < 1 ? -negative_infinity() : negative_infinity();
    __syncthreads();
    const float mean = shared.row_sum[0][0];
    if (bin >= 0 && k < tokens - sinks && 1 / MOST < mean && mean < MOST)
        p.threshold[row] = LN_2 * log2f(edge_of(max(bin, 1)) / mean);
}
