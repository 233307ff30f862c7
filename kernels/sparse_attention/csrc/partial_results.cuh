// Partial results: of warps, joined by their CTA, and of the CTAs of a row, joined by the last one of them.
#pragma once

#include "attend.cuh"

struct Shared {
    LaneQueries attending;  // queries as the attention to chosen tokens takes them
    float row_max[WARPS][8], row_sum[WARPS][8];
    bool last;  // whether this CTA is the last of its row to arrive
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
__device__ __forceinline__ void store_part(const SparseParams& p, const Shared& shared, const float* out) {
    const i64 part = blockIdx.x;
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
        const JoinedWarps joined(shared, out, i);
        p.partial[part * HEADS * HEAD_DIM + i] = joined.value;
        if (i % HEAD_DIM) continue;
        p.part_max[part * HEADS + i / HEAD_DIM] = joined.row_max;
        p.part_sum[part * HEADS + i / HEAD_DIM] = joined.row_sum;
    }
}

// Whether this is the last CTA of its row; what the others wrote before is then visible.
__device__ __forceinline__ bool is_last_part(const SparseParams& p, Shared& shared, int row) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.last = atomic_inc_acq_rel(p.arrivals + row, p.parts - 1) == u32(p.parts - 1);
    __syncthreads();
    return shared.last;
}

// Joins the partial results of the row's CTAs into its output. scratch: shared memory for two floats per part and head.
__device__ __forceinline__ void join_parts(const SparseParams& p, float* scratch, int row) {
    const i64 first = i64(row) * p.parts;
    float *const maxima = scratch, *const sums = scratch + p.parts * HEADS;
    for (int i = threadIdx.x; i < p.parts * HEADS; i += THREADS) {
        maxima[i] = __ldcg(p.part_max + first * HEADS + i);
        sums[i] = __ldcg(p.part_sum + first * HEADS + i);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM;
        float row_max = negative_infinity(), row_sum = 0, value = 0;
        for (int part = 0; part < p.parts; part++) row_max = fmaxf(row_max, maxima[part * HEADS + head]);
        const float shift = row_max == negative_infinity() ? 0 : row_max;
#pragma unroll 16
        for (int part = 0; part < p.parts; part++) {
            const float weight = exp2_approx(maxima[part * HEADS + head] - shift);
            row_sum += weight * sums[part * HEADS + head];
            value += weight * __ldcg(p.partial + (first + part) * HEADS * HEAD_DIM + i);
        }
        p.out[i64(row) * HEADS * HEAD_DIM + i] = Elem::from_float(row_sum > 0 ? value / row_sum : 0);
    }
}
