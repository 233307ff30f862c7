// The reduction of the splits of rows that attention.cu has cut into many.

#include "epilogue.cuh"
#include "kv_pipeline.cuh"

using Config = AttentionConfig;

// Grid: ROWS_PER_CTA query rows; (batch row, KV head) pairs. Each query row is merged by MERGE_PARTS groups of
// ROW_LANES threads, which take its splits in turn:
//
//     MERGE_PARTS = 4        group 0              1              2              3              4 ...
//     query row              0                    0              0              0              1 ...
//     splits                 0, 4, 8, ..          1, 5, 9, ..    2, 6, 10, ..   3, 7, 11, ..   0, 4, 8, ..
extern "C" __global__ void __launch_bounds__(Config::MERGE_GROUPS * Config::ROW_LANES, 1)
    merge(const __grid_constant__ AttentionParams p) {
    constexpr int ROWS_PER_CTA = Config::MERGE_GROUPS / Config::MERGE_PARTS;
    __shared__ SplitReduction<Config> reductions[Config::MERGE_GROUPS][Config::ROW_LANES];
    const int lane = threadIdx.x % Config::ROW_LANES, group = threadIdx.x / Config::ROW_LANES,
              part = group % Config::MERGE_PARTS;
    const int query_row = blockIdx.x * ROWS_PER_CTA + group / Config::MERGE_PARTS,
              num_rows = p.q_heads_per_kv * p.queries;
    const int row = blockIdx.y, b = row / p.kv_heads, kv_head = row % p.kv_heads;
    pdl_launch_dependents();
    pdl_wait();
    const SequenceLengths<Config> lengths(p);
    const int2 ctas = p.row_ctas[row];  // unwritten where the row sees nothing
    const int count = lengths.num_tiles(b) ? ctas.y - ctas.x + 1 : 0, first = count ? ctas.x : 0;
    const Results<Config> results{p.partial, p.lse, p.out, num_rows, p.queries, p.row_score_lse(row),
                                  p.sinks + kv_head * p.q_heads_per_kv};
    const int read_row = ROWS_PER_CTA == 1 ? query_row : min(query_row, num_rows - 1);
    SplitReduction<Config> state(results, first + row, read_row, part, Config::MERGE_PARTS, count, lane);
    reductions[group][lane] = state;
    __syncthreads();
    if (part > 0 || (ROWS_PER_CTA > 1 && query_row >= num_rows)) return;
#pragma unroll
    for (int i = 1; i < Config::MERGE_PARTS; i++) state.merge(reductions[group + i][lane]);
    const int query = query_row % p.queries, head = kv_head * p.q_heads_per_kv + query_row / p.queries;
    const i64 at = (i64(b) * p.queries + query) * p.kv_heads * p.q_heads_per_kv + head;
    state.store(results, p.out + at * Config::HEAD_DIM, query_row, lane);
}
