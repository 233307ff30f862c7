// Progressive attention of one query per sequence, for Hopper and newer: the query scores all tokens of the quantized
// groups by their 2-bit keys, and attends to the 4-bit codes of the best and to the recent tokens.
//
// A row is a (batch row, KV head). Its `parts` CTAs take its groups in turn, so each has an even sample of the row, and
// chooses its share of k on its own: no CTA waits for another. First its warps scan the groups and leave each token's
// score as the bin of a histogram; then the chosen tokens, listed in tiles, are dealt evenly to the warps. The last CTA
// of a row joins the partial results.

#include "choice.cuh"

constexpr int STAGES = 2;  // of a warp

union WarpBuffers {
    ScanStage stages[STAGES];
    TokenTile tiles[TILES];
};

// A warp's scan of its groups.
struct GroupScan {
    const OwnGroups& own;
    ScanStage* stages;
    int count;  // of the CTA's groups

    // Reads codes only, which no kernel writes that may still run.
    __device__ __forceinline__ GroupScan(
        const OwnGroups& own, ScanStage* stages
    ) : own(own), stages(stages), count(own.count()) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) copy(threadIdx.x / 32 + i * WARPS, i);
    }
    __device__ __forceinline__ void copy(int i, int stage) {
        if (i < count) start_copy(stages[stage], own.p, own.stored(i));
        cp_async_commit();
    }
    __device__ __forceinline__ void run(
        Choice& choice, GroupBins* groups, const Query& query, const LaneQueries& queries
    ) {
        const SparseParams& p = own.p;
        const int warp = threadIdx.x / 32;
        Scan scan(p, query, queries, own.row / p.kv_heads, own.row % p.kv_heads);
        for (int i = warp, stage = 0; i < count; i += WARPS, stage = (stage + 1) % STAGES) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            scan.group(stages[stage], groups[i].bins, choice.histogram, p.sinks - own.in_row(i) * GROUP);
            __syncwarp();
            copy(i + STAGES * WARPS, stage);
        }
        scan.store_sums(choice.scan_sums[warp]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) progressive(const __grid_constant__ SparseParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared shared;
    __shared__ Choice choice;
    const int warp = threadIdx.x / 32;
    WarpBuffers* const buffers = reinterpret_cast<WarpBuffers*>(dynamic);
    GroupBins* const groups = reinterpret_cast<GroupBins*>(buffers + WARPS);
    pdl_launch_dependents();
    const OwnGroups own(p);
    GroupScan scan(own, buffers[warp].stages);
    choice.clear();
    pdl_wait();

    if (threadIdx.x == THREADS - 1) choice.k = __ldcg(p.k + own.row / p.kv_heads);
    shared.copy_inputs(p, own.row / p.kv_heads, own.row % p.kv_heads);
    __syncthreads();
    const Query query(shared.queries);
    if (warp == 0) shared.queries_of_lanes.store<Scan::PLANES, false>(query);
    __syncthreads();
    shared.recent.prefetch(p, own.row, own.part);
    scan.run(choice, groups, query, shared.queries_of_lanes);
    __syncthreads();
    if (warp == 0) shared.queries_of_lanes.store<ChosenTokens::PLANES, true>(query);
    const int tiles = choose(choice, own, groups);

    ChosenTiles source{choice, own, groups, warp, tiles};
    TilePipeline pipeline(source, buffers[warp].tiles);
    Partial partial;
    shared.recent.attend(partial, p, query, own.row, own.part);
    pipeline.attend(partial, ChosenTokens(p, query, shared.queries_of_lanes));

    __syncthreads();  // all have read their buffers, which `out` overwrites
    float* const out = reinterpret_cast<float*>(dynamic);  // the warps' sums over values
    store_partial(partial, shared, out);
    store_scan_sums(p, choice);
    __syncthreads();
    store_part(p, shared, out);
    if (!is_last_part(p, shared, own.row)) return;
    update_lse(p, own);
    join_parts(p, out, own.row);
}
