// Progressive attention of one query per sequence, for Hopper and newer: the query scores all tokens of the quantized
// groups by their 2-bit keys, and attends to the 4-bit codes of the best and to the recent tokens.
//
// A row is a (batch row, KV head). Its `parts` CTAs take its groups in turn, so that tokens that are chosen together are
// spread. A warp scores a group and at once attends to those tokens whose score reaches the row's threshold, which the
// call before has left: no CTA waits for another. The last CTA of a row joins the partial results and finds the next
// threshold in a histogram of all scores.

#include "row_parts.cuh"

// Attends to the tokens of a scored group that reach the threshold, and counts all scores.
__device__ __forceinline__ void attend_best(
    Partial& partial, Shared& shared, const ProgressiveParams& p, const ChosenTokens& chosen, const Stage& stage,
    i64 group, int first_token, float threshold
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u8* const places = shared.places[warp];
    int count = 0;
#pragma unroll
    for (int r = 0; r < GROUP / 32; r++) {
        const float score = shared.scores[warp][32 * r + lane];
        const bool is_sink = first_token + 32 * r + lane < p.sinks, is_chosen = is_sink || score >= threshold;
        if (!is_sink) atomicAdd(shared.histogram + bin_of(score), 1u);
        const u32 mask = __ballot_sync(FULL_MASK, is_chosen);
        if (is_chosen) places[count + __popc(mask & ((1u << lane) - 1))] = 32 * r + lane;
        count += __popc(mask);
    }
    __syncwarp();
    if (count) chosen.attend(partial, p, group, stage, places, count);
}

// Scores the CTA's groups and attends to the best of their tokens.
__device__ __forceinline__ void scan_and_attend(
    Partial& partial, Shared& shared, const ProgressiveParams& p, const Query& query, Stage* stages, int row, int part,
    int own_groups
) {
    const int b = row / p.kv_heads, warp = threadIdx.x / 32;
    const auto number = [&](int i) { return part + (warp + i * WARPS) * p.parts; };  // of the row's groups
    const i64 base = i64(row) * p.group_capacity;
    const int count = own_groups > warp ? (own_groups - warp + WARPS - 1) / WARPS : 0;
    stages += warp * STAGES;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) start_copy(stages[i], p, base + number(i));
        cp_async_commit();
    }
    const float threshold = exp2_approx(__ldcg(p.threshold + row) * LOG2_E);
    Scan scan(p, query, shared.scanning, b, row % p.kv_heads);
    const ChosenTokens chosen(p, query, shared.attending);
    for (int i = 0; i < count; i++) {
        const int ahead = i + STAGES - 1;
        if (ahead < count) start_copy(stages[ahead % STAGES], p, base + number(ahead));
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        const Stage& stage = stages[i % STAGES];
        scan.group(stage, shared.scores[warp]);
        __syncwarp();
        attend_best(partial, shared, p, chosen, stage, base + number(i), number(i) * GROUP, threshold);
        __syncwarp();
    }
    scan.store_sums(shared.scan_sums[warp]);
}

// Attends to the warp's share of the recent tokens.
__device__ __forceinline__ void attend_recent(
    Partial& partial, const ProgressiveParams& p, const Query& query, int row, int part
) {
    const int b = row / p.kv_heads, kv_head = row % p.kv_heads, warp = threadIdx.x / 32;
    const int begin = __ldcg(p.begin + b), end = min(__ldcg(p.end + b), p.capacity);
    const u16* keys = p.keys + (i64(b) * p.key_batch_stride + i64(kv_head) * p.key_head_stride) * 8;
    const u16* values = p.values + (i64(b) * p.value_batch_stride + i64(kv_head) * p.value_head_stride) * 8;
    // From the last warp on: the first ones have a group more, if any.
    for (int slot = begin + ((WARPS - 1 - warp) * p.parts + part) * TILE; slot < end; slot += WARPS * p.parts * TILE)
        attend_slots(partial, p, query, keys, values, slot, end);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) progressive(const __grid_constant__ ProgressiveParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared shared;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, b = row / p.kv_heads;
    pdl_launch_dependents();
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.histogram[i] = 0;
    pdl_wait();

    const int num_groups = min(__ldcg(p.groups + b), p.group_capacity);
    const int own_groups = num_groups > part ? (num_groups - part + p.parts - 1) / p.parts : 0;
    const Query query(p, b, row % p.kv_heads);
    if (threadIdx.x / 32 == 0) shared.scanning.store<Scan::PLANES, false>(query);
    if (threadIdx.x / 32 == 1) shared.attending.store<ChosenTokens::PLANES, true>(query);
    __syncthreads();
    Partial partial;
    attend_recent(partial, p, query, row, part);
    scan_and_attend(partial, shared, p, query, reinterpret_cast<Stage*>(dynamic), row, part, own_groups);

    __syncthreads();  // all have read their stages, which `out` overwrites
    float* const out = reinterpret_cast<float*>(dynamic);  // the warps' sums over values
    store_partial(partial, shared, out);
    __syncthreads();
    store_part(p, shared, out, blockIdx.x);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.last = atomic_inc_acq_rel(p.arrivals + row, p.parts - 1) == u32(p.parts - 1);
    __syncthreads();
    if (!shared.last) return;
    join_parts(p, row);
    update_choice(p, shared, row, num_groups * GROUP);
}
