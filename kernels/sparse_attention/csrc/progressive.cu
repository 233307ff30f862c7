// Progressive attention of one query per sequence, for Hopper and newer: the query scores all tokens of the quantized
// groups by their 2-bit keys, and attends to the 4-bit codes of the best and to the recent tokens.
//
// A row is a (batch row, KV head). Its `parts` CTAs take its groups in turn, so each has an even sample of the row, and
// chooses its share of k on its own: no CTA waits for another. First its warps scan the groups and leave each token's
// score as the bin of a histogram; then the chosen tokens, listed in tiles, are dealt evenly to the warps. The last CTA
// of a row joins the partial results.

#include "choice.cuh"

union WarpBuffers {
    ScanStage stages[STAGES];
    TokenTile tiles[TILES];
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
    const ScannedKeys keys{p.two_bit, p.key_codes.scale, p.key_codes.minimum};
    GroupScan scanned(own, keys, buffers[warp].stages);
    choice.clear();
    pdl_wait();

    if (threadIdx.x == THREADS - 1) choice.k = __ldcg(p.k + own.row / p.kv_heads);
    shared.copy_inputs(p, own.row / p.kv_heads, own.row % p.kv_heads);
    __syncthreads();
    const Query query(shared.queries);
    if (warp == 0) shared.queries_of_lanes.store<Scan::PLANES, false>(query);
    __syncthreads();
    shared.recent.prefetch(p, own.row, own.part);
    Scan scan(p.scale, query, shared.queries_of_lanes);
    scanned.sample(scan, choice.samples);
    scanned.run(scan, [&](int i) { return groups[i].bins; }, choice.histogram, p.sinks);
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
    __syncthreads();
    store_part(p, shared, out);
    if (is_last_part(p, shared, own.row)) join_parts(p, out, own.row);
}
