// What the CTAs of a row share through global memory: the histogram of scores, and the partial results.
#pragma once

#include "attend.cuh"

struct Shared {
    u32 histogram[BINS];
    float scan_sums[WARPS][8];
    float row_max[WARPS][8], row_sum[WARPS][8];
    u32 later[WARPS];
    int threshold;  // bin of the last chosen score
    bool last;      // whether this CTA is the last of its row to arrive
    u8 places[WARPS][GROUP];
};

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(from)) : "memory");
    return x;
}
__device__ __forceinline__ void add_release(u32* to, u32 x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}

// Waits until all CTAs of the row have come here; what they wrote before is then visible. All of a row's CTAs are
// resident, as the host launches no more than fit.
__device__ __forceinline__ void wait_for_row(u32* arrivals, int parts) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        add_release(arrivals, 1);
        while (load_acquire(arrivals) < u32(parts)) {}
    }
    __syncthreads();
}

// The bin that the score of rank `k` (from 1) falls into, counted from the top; BINS for k = 0.
__device__ __forceinline__ int find_threshold(Shared& shared, const u32* histogram, int k) {
    constexpr int OWN = BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 counts[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) own += counts[i] = __ldcg(histogram + threadIdx.x * OWN + i);
    u32 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(FULL_MASK, sum, step);
        if (lane + step < 32) sum += other;
    }
    if (lane == 0) shared.later[warp] = sum;
    if (threadIdx.x == 0) shared.threshold = BINS;
    __syncthreads();
    u32 above = sum - own;
    for (int other = warp + 1; other < WARPS; other++) above += shared.later[other];
    if (above < u32(k) && u32(k) <= above + own) {
        int bin = OWN - 1;
        for (; above + counts[bin] < u32(k); bin--) above += counts[bin];
        shared.threshold = threadIdx.x * OWN + bin;
    }
    __syncthreads();
    return shared.threshold;
}

// Sums of exp(logit - lse) of the row so far become the next call's log-sum-exps. Far from the last ones they are
// brought nearer only, as sums of floats may have overflown or vanished.
__device__ __forceinline__ void update_lse(float* lse, const float* sums, int parts) {
    float sum = 0;
    for (int part = 0; part < parts; part++) sum += __ldcg(sums + part * HEADS);
    *lse = __ldcg(lse) + LN_2 * log2f(fminf(fmaxf(sum, 1e-30f), 1e30f));
}

// Joins the warps' partial results: the maxima and sums in shared memory, and the sums over values, which `out`
// [warp, HEADS, HEAD_DIM] has relative to each warp's maximum. Element `i` is of head i / HEAD_DIM.
struct JoinedWarps {
    float row_max, row_sum, value;

    __device__ __forceinline__ JoinedWarps(const Shared& shared, const float* out, int i) {
        const int head = i / HEAD_DIM;
        row_max = negative_infinity(), row_sum = value = 0;
        for (int warp = 0; warp < WARPS; warp++) row_max = fmaxf(row_max, shared.row_max[warp][head]);
        for (int warp = 0; warp < WARPS && row_max > negative_infinity(); warp++) {
            const float weight = exp2_approx(shared.row_max[warp][head] - row_max);
            row_sum += weight * shared.row_sum[warp][head];
            value += weight * out[warp * HEADS * HEAD_DIM + i];
        }
    }
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
