// Progressive attention of one query per sequence, for Hopper and newer: the query scores all tokens of the quantized
// groups by their 2-bit keys, and attends to the 4-bit codes of the best and to the recent tokens.
//
// A row is a (batch row, KV head). Its `parts` CTAs take its groups in turn, so that tokens that are chosen together are
// spread. A warp scores a group and starts copying those tokens whose score reaches the row's threshold, which the call
// before has left: no CTA waits for another. It attends to them after the next group's scan. The last CTA of a row joins
// the partial results and finds the next threshold in a histogram of the scores.

#include "choice.cuh"

struct Buffers {
    ScanStage stages[2];
    TokenTile tile;
};

// A warp's pass over groups: scan, choose, copy, attend.
struct Pass {
    const SparseParams& p;
    Choice& choice;
    Buffers& buffers;
    const ChosenTokens chosen;
    const float threshold;
    u32 masks[GROUP / 32];  // tokens of the scanned group that are still to be copied

    // Counts the scores of a group and marks its chosen tokens.
    __device__ __forceinline__ void choose(int first_token) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const float counted = threshold / (1 << COUNTED_LOG2);
#pragma unroll
        for (int r = 0; r < GROUP / 32; r++) {
            const float score = choice.scores[warp][32 * r + lane];
            const bool is_sink = first_token + 32 * r + lane < p.sinks;
            if (!is_sink && score >= counted) atomicAdd(choice.histogram + bin_of(score), 1u);
            masks[r] = __ballot_sync(FULL_MASK, is_sink || score >= threshold);
        }
    }
    // Starts copying the first tokens that are marked, and unmarks them.
    __device__ __forceinline__ void copy_chosen(i64 group) {
        const int lane = threadIdx.x % 32;
        int count = 0;
#pragma unroll
        for (int r = 0; r < GROUP / 32; r++) {
            const int place = count + __popc(masks[r] & ((1u << lane) - 1));
            const bool taken = (masks[r] >> lane & 1) && place < TILE;
            if (taken) buffers.tile.places[place] = 32 * r + lane;
            count += __popc(masks[r]);
            masks[r] &= ~__ballot_sync(FULL_MASK, taken);
        }
        if (lane == 0) buffers.tile.count = min(count, TILE);
        __syncwarp();
        start_copy(buffers.tile, p, group);
    }
    __device__ __forceinline__ bool has_marked() const {
        u32 any = 0;
#pragma unroll
        for (int r = 0; r < GROUP / 32; r++) any |= masks[r];
        return any;
    }
    // Attends to the tokens whose copy was started before the last `PENDING` ones, then to the rest of their group.
    template <int PENDING> __device__ __forceinline__ void attend(Partial& partial, i64 group) {
        cp_async_wait<PENDING>();
        __syncwarp();
        chosen.attend(partial, buffers.tile);
        __syncwarp();
        while (has_marked()) {
            copy_chosen(group);
            cp_async_commit();
            cp_async_wait<0>();
            __syncwarp();
            chosen.attend(partial, buffers.tile);
            __syncwarp();
        }
    }
};

// Scores the CTA's groups and attends to the best of their tokens.
__device__ __forceinline__ void scan_and_attend(
    Partial& partial, Shared& shared, Choice& choice, const SparseParams& p, const Query& query, Buffers& buffers,
    int row, int part, int own_groups
) {
    const int warp = threadIdx.x / 32;
    const auto group_of = [&](int i) { return i64(row) * p.group_capacity + part + (warp + i * WARPS) * p.parts; };
    const int count = own_groups > warp ? (own_groups - warp + WARPS - 1) / WARPS : 0;
    if (count) start_copy(buffers.stages[0], p, group_of(0));
    cp_async_commit();
    cp_async_commit();  // of no chosen tokens, so that all groups have the same copies before them
    const float threshold = exp2_approx(__ldcg(p.threshold + row) * LOG2_E);
    Scan scan(p, query, choice.scanning, row / p.kv_heads, row % p.kv_heads);
    Pass pass{p, choice, buffers, ChosenTokens(p, query, shared.attending), threshold, {}};
    bool waiting = false;  // whether chosen tokens of the group before are being copied
    for (int i = 0; i < count; i++) {
        if (i + 1 < count) start_copy(buffers.stages[(i + 1) % 2], p, group_of(i + 1));
        cp_async_commit();
        cp_async_wait<2>();
        __syncwarp();
        scan.group(buffers.stages[i % 2], choice.scores[warp]);
        if (waiting) pass.attend<1>(partial, group_of(i - 1));
        __syncwarp();
        pass.choose((part + (warp + i * WARPS) * p.parts) * GROUP);
        waiting = pass.has_marked();
        if (waiting) pass.copy_chosen(group_of(i));
        cp_async_commit();
    }
    if (waiting) pass.attend<0>(partial, group_of(count - 1));
    scan.store_sums(choice.scan_sums[warp]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) progressive(const __grid_constant__ SparseParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared shared;
    __shared__ Choice choice;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, warp = threadIdx.x / 32;
    pdl_launch_dependents();
    for (int i = threadIdx.x; i < BINS; i += THREADS) choice.histogram[i] = 0;
    pdl_wait();

    const int num_groups = min(__ldcg(p.groups + row / p.kv_heads), p.group_capacity);
    const int own_groups = num_groups > part ? (num_groups - part + p.parts - 1) / p.parts : 0;
    if (warp == 0) shared.queries.copy(p, row / p.kv_heads, row % p.kv_heads);
    __syncthreads();
    const Query query(shared.queries);
    if (warp == 0) choice.scanning.store<Scan::PLANES, false>(query);
    if (warp == 1) shared.attending.store<ChosenTokens::PLANES, true>(query);
    __syncthreads();
    Partial partial;
    attend_recent(partial, p, query, row, part);
    scan_and_attend(partial, shared, choice, p, query, reinterpret_cast<Buffers*>(dynamic)[warp], row, part, own_groups);

    __syncthreads();  // all have read their buffers, which `out` overwrites
    float* const out = reinterpret_cast<float*>(dynamic);  // the warps' sums over values
    store_partial(partial, shared, out);
    store_counts(p, choice, row);
    __syncthreads();
    store_part(p, shared, out);
    if (!is_last_part(p, shared, row)) return;
    join_parts(p, out, row);
    update_choice(p, choice, row, num_groups * GROUP);
}
