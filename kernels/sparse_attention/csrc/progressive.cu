// Progressive attention of one query per sequence, for Hopper and newer: the query scores all tokens of the quantized
// groups by their 2-bit keys, chooses the best, and attends to their 4-bit codes and to the recent tokens.
//
// A row is a (batch row, KV head). Its `parts` CTAs take its groups in turn, so that tokens that are chosen together are
// spread; they keep their tokens' quantized scores in shared memory, add up one histogram of these in global memory, wait
// for each other, and attend to those of their own tokens whose score is at least the k-th's. The last CTA of a row
// joins the partial results.

#include "row_parts.cuh"
#include "scan.cuh"

// Attends to the chosen tokens of the warp's groups and to its share of the recent ones.
__device__ __forceinline__ void attend_chosen(
    Partial& partial, Shared& shared, const ProgressiveParams& p, const Query& query, const u16* bins, int row, int part,
    int own_groups
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const ChosenTokens chosen(p, query);
    u8* const places = shared.places[warp];
    for (int i = warp; i < own_groups; i += WARPS) {
        int count = 0;
#pragma unroll
        for (int r = 0; r < GROUP / 32; r++) {
            const bool is_chosen = bins[i * GROUP + 32 * r + lane] >= shared.threshold;
            const u32 mask = __ballot_sync(FULL_MASK, is_chosen);
            if (is_chosen) places[count + __popc(mask & ((1u << lane) - 1))] = 32 * r + lane;
            count += __popc(mask);
        }
        __syncwarp();
        if (count) chosen.attend(partial, p, i64(row) * p.group_capacity + part + i64(i) * p.parts, places, count);
        __syncwarp();
    }
    const int b = row / p.kv_heads, kv_head = row % p.kv_heads;
    const int begin = __ldcg(p.begin + b), end = min(__ldcg(p.end + b), p.capacity);
    const u16* keys = p.keys + (i64(b) * p.key_batch_stride + i64(kv_head) * p.key_head_stride) * 8;
    const u16* values = p.values + (i64(b) * p.value_batch_stride + i64(kv_head) * p.value_head_stride) * 8;
    for (int slot = begin + (warp * p.parts + part) * TILE; slot < end; slot += WARPS * p.parts * TILE)
        attend_slots(partial, p, query, keys, values, slot, end);
}

// Joins the partial results of the row's CTAs, and leaves the counters as they were. By the last CTA to arrive.
__device__ __forceinline__ void join_parts(const ProgressiveParams& p, int row) {
    const i64 first = i64(row) * p.parts;
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM;
        float row_max = negative_infinity(), row_sum = 0, value = 0;
        for (int part = 0; part < p.parts; part++)
            row_max = fmaxf(row_max, __ldcg(p.part_max + (first + part) * HEADS + head));
        for (int part = 0; part < p.parts && row_max > negative_infinity(); part++) {
            const float weight = exp2_approx(__ldcg(p.part_max + (first + part) * HEADS + head) - row_max);
            row_sum += weight * __ldcg(p.part_sum + (first + part) * HEADS + head);
            value += weight * __ldcg(p.partial + (first + part) * HEADS * HEAD_DIM + i);
        }
        p.out[i64(row) * HEADS * HEAD_DIM + i] = Elem::from_float(row_sum > 0 ? value / row_sum : 0);
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) p.histogram[i64(row) * BINS + i] = 0;
    if (threadIdx.x == 0) p.arrivals[2 * row] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) progressive(const __grid_constant__ ProgressiveParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared shared;
    u16* const bins = reinterpret_cast<u16*>(dynamic);      // of this CTA's tokens
    float* const out = reinterpret_cast<float*>(dynamic);   // later: the warps' sums over values
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const int b = row / p.kv_heads, kv_head = row % p.kv_heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_launch_dependents();
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.histogram[i] = 0;
    __syncthreads();
    pdl_wait();

    const int num_groups = min(__ldcg(p.groups + b), p.group_capacity);
    const int own_groups = num_groups > part ? (num_groups - part + p.parts - 1) / p.parts : 0;
    const Query query(p, b, kv_head);
    {
        Scan scan(p, query, b, kv_head);
        for (int i = warp; i < own_groups; i += WARPS) {
            const int number = part + i * p.parts;
            const i64 group = i64(row) * p.group_capacity + number;
            scan.group(p.two_bit + (group * GROUP + lane / 4) * QUARTER + 4 * Scan::WORDS * (lane % 4),
                       p.key_codes.scale + group * HEAD_DIM, p.key_codes.minimum + group * HEAD_DIM, number * GROUP,
                       p.sinks, bins + i * GROUP, shared.histogram);
        }
        scan.store_sums(shared.scan_sums[warp]);
    }
    __syncthreads();
    const i64 part_heads = (i64(row) * p.parts + part) * HEADS;
    u32* const histogram = p.histogram + i64(row) * BINS;
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (shared.histogram[i]) atomicAdd(histogram + i, shared.histogram[i]);
    if (threadIdx.x < HEADS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += shared.scan_sums[w][threadIdx.x];
        p.scan_sum[part_heads + threadIdx.x] = sum;
    }
    wait_for_row(p.arrivals + 2 * row, p.parts);
    if (part == 0 && threadIdx.x < HEADS && num_groups > 0)
        update_lse(p.lse + i64(row) * HEADS + threadIdx.x, p.scan_sum + part_heads + threadIdx.x, p.parts);
    find_threshold(shared, histogram, min(__ldcg(p.k + b), num_groups * GROUP));

    Partial partial;
    attend_chosen(partial, shared, p, query, bins, row, part, own_groups);
    __syncthreads();  // all have read their bins, which `out` overwrites
    store_partial(partial, shared, out);
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
        const JoinedWarps joined(shared, out, i);
        p.partial[part_heads * HEAD_DIM + i] = joined.value;
        if (i % HEAD_DIM == 0) {
            p.part_max[part_heads + i / HEAD_DIM] = joined.row_max;
            p.part_sum[part_heads + i / HEAD_DIM] = joined.row_sum;
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.last = atomic_inc_acq_rel(p.arrivals + 2 * row + 1, p.parts - 1) == u32(p.parts - 1);
    __syncthreads();
    if (shared.last) join_parts(p, row);
}
