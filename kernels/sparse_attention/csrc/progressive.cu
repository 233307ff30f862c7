// Progressive attention of one query per sequence, for Hopper and newer: the query scores all tokens of the quantized
// groups by their 2-bit keys, and attends to the 4-bit codes of the best and to the recent tokens.
//
// A row is a (batch row, KV head). Its `parts` CTAs take its groups in turn, so each has an even sample of the row, and
// chooses its share of k on its own: no CTA waits for another. First its warps scan the groups and leave each token's
// score as the bin of a histogram; then the chosen tokens, listed in tiles, are dealt evenly to the warps. The last CTA
// of a row joins the partial results.

#include "choice.cuh"

using Config = SparseConfig;

// Of a warp, in dynamic shared memory. The buffers of the CTA's WARPS warps are followed by the bins of its groups:
//
//     | stages, later tiles of warp 0 | ... | of warp WARPS - 1 | GroupBins of group 0 | of group 1 | ...
//
// and at the end the first part is overwritten by the warps' sums over values.
union WarpBuffers {
    ScanStage<Config> stages[Config::STAGES];
    TokenTile<Config> tiles[Config::TILES];
};

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    progressive(const __grid_constant__ SparseParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Shared<Config> shared;
    __shared__ Choice<Config> choice;
    const int warp = threadIdx.x / 32;
    WarpBuffers* const buffers = reinterpret_cast<WarpBuffers*>(dynamic);
    GroupBins<Config>* const groups = reinterpret_cast<GroupBins<Config>*>(buffers + Config::WARPS);
    pdl_launch_dependents();
    const DealtGroups<Config> dealt(p);
    const ScannedKeys keys{p.two_bit, p.key_codes.scale, p.key_codes.minimum};
    GroupScan scanned(dealt, keys, buffers[warp].stages);
    choice.clear();
    pdl_wait();

    if (threadIdx.x == Config::THREADS - 1) choice.k = __ldcg(p.k + dealt.row / p.kv_heads);
    shared.copy_inputs(p, dealt.row / p.kv_heads, dealt.row % p.kv_heads);
    __syncthreads();
    const Query<Config> query(shared.queries);
    shared.lane_queries.store<Scan<Config>::PLANES>(query);
    __syncthreads();
    shared.recent.prefetch(p, dealt.row, dealt.part);
    Scan<Config> scan(p.scale, query, shared.lane_queries);
    scanned.sample(scan, choice.samples);
    scanned.run(
        scan, [&](int i) { return groups[i].bins; }, choice.histogram, p.sinks,
        [&](int i, const float (&x)[2]) {
            const int lane = threadIdx.x % 32;
            float* const to = p.middles + dealt.stored(dealt.in_row(i)) * Config::COLUMN_HEADS + 2 * lane;
            if (2 * lane < Config::COLUMN_HEADS) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
        }
    );
    __syncthreads();
    using Chosen = ChosenTokens<Config, true>;
    shared.lane_queries.store<Chosen::PLANES>(query, Chosen::OF_UPPER);
    const int tiles = choose(choice, dealt, groups);

    const TileCopy<Config, true> copy(p, dealt.stored(dealt.in_row(0)));
    ChosenTiles<Config> source{choice, groups, copy, warp, tiles};
    TilePipeline pipeline(source, buffers[warp].tiles);
    Partial<Config> partial;
    shared.recent.attend(partial, p, query, dealt.row, dealt.part);
    pipeline.attend(partial, Chosen(p, query, shared.lane_queries));

    __syncthreads();  // all have read their buffers, which `out` overwrites
    float* const out = reinterpret_cast<float*>(dynamic);  // the warps' sums over values
    store_partial(partial, shared, out);
    __syncthreads();
    store_part(p, shared, out);
    if (is_last_part(p, shared, dealt.row)) join_parts<Config>(p, out, dealt.row);
}
