// Decode attention over hierarchical 4-bit codes and full-precision tokens, for Hopper and newer: the kernel `attend`,
// which also reduces the splits of a row where these are few; merge.cu reduces them where they are many.
// docs/kernels/attention.md explains how, and why it is built this way.

#include "dense_kv.cuh"
#include "epilogue.cuh"
#include "quantized_kv.cuh"

using Config = AttentionConfig;

// Batch rows that see nothing have no tiles, so no CTA comes across them.
__device__ __forceinline__ void clear_empty_rows(const SequenceLengths<Config>& lengths, u16* out, int row_elements) {
    for (int b = blockIdx.x; b < lengths.batch; b += gridDim.x)
        if (lengths.num_tiles(b) == 0) {
            pdl_wait();
            for (int i = threadIdx.x; i < row_elements; i += Config::THREADS) out[i64(b) * row_elements + i] = 0;
        }
}

// What a warp copies of each group: half of the codes (INT8: a plane), the scales or the minima.
__device__ __forceinline__ const u8* warp_part(int warp, const QuantizedPlanes& codes) {
    return warp == 0   ? codes.upper
           : warp == 1 ? (Config::BITS == 8 ? codes.lower : codes.upper + Config::CODE_BYTES / 2)
                       : reinterpret_cast<const u8*>(warp == 2 ? codes.scale : codes.minimum);
}

__device__ __forceinline__ DenseKV dense_kv(
    const AttentionParams& p, const SequenceLengths<Config>& lengths, int b, int kv_head
) {
    const i64 buffer = Config::PAGED ? __ldcg(p.buffers + b) : b;
    return {{p.keys + (buffer * p.key_batch_stride + i64(kv_head) * p.key_head_stride) * 8,
             p.values + (buffer * p.value_batch_stride + i64(kv_head) * p.value_head_stride) * 8},
            {p.key_stride * 8, p.value_stride * 8}, lengths.dense_begin(b), lengths.dense_end(b)};
}

// By one thread for each query row.
__device__ __forceinline__ void set_query_row(
    QueryRows<Config>& rows, int row, const AttentionParams& p, const SequenceLengths<Config>& lengths, int b
) {
    const int query = row % p.queries, head = row / p.queries;
    rows.q_offset[row] = query * p.q_query_stride + head * p.q_head_stride;
    rows.out_offset[row] = (query * p.kv_heads * p.q_heads_per_kv + head) * Config::HEAD_DIM;
    rows.row_max[row] = 0;
    rows.dense_end[row] = min(lengths.first_query_end(b) + query, p.capacity);
}

// The same, after earlier kernels have ended: how much the row counts in scores, of a (batch row, KV head) `kv_row`.
__device__ __forceinline__ void set_score_row(QueryRows<Config>& rows, int row, const AttentionParams& p, int kv_row) {
    const bool counts = row < p.q_heads_per_kv * p.queries && (p.queries - 1 - row % p.queries) % p.score_step == 0;
    rows.set(row, counts, row % p.queries, p.row_score_lse(kv_row) + row / p.queries);
}

// Reduces the `count` splits of a row from `first` on, in the CTA that finished the last of them.
__device__ __forceinline__ void reduce_row(
    const QueryRows<Config>& rows, const Results<Config>& results, i64 first, int count
) {
    for (int i = threadIdx.x; i < results.num_rows * Config::ROW_LANES; i += Config::THREADS)
        SplitReduction<Config>(results, first, i / Config::ROW_LANES, 0, 1, count, i % Config::ROW_LANES)
            .store(results, results.out + rows.out_offset[i / Config::ROW_LANES], i / Config::ROW_LANES,
                   i % Config::ROW_LANES);
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    attend(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ QueryRows<Config> rows;
    __shared__ DenseKV dense;  // in shared memory to save registers
    __shared__ int2 row_ctas;  // the row's first and last CTA
    __shared__ i64 barriers[Config::STAGES];
    const float scale = p.scale;  // both stay in registers: loaded again in every loop, the compiler spills more
    const bool fuse_reduction = p.fuse_reduction;
    pdl_launch_dependents();
    const ThreadLayout<Config> thread(SharedAddress(shared).value + Config::STAGES * Config::STAGE_BYTES);

    const SequenceLengths<Config> lengths(p);
    const TileScheduler<Config> scheduler(lengths, gridDim.x, thread.lane);
    if (fuse_reduction) clear_empty_rows(lengths, p.out, p.queries * p.kv_heads * p.q_heads_per_kv * Config::HEAD_DIM);
    if (blockIdx.x >= scheduler.ctas) return pdl_wait();  // no kernel may end before those that came before it
    const u32 stages = ThreadLayout<Config>::opaque(SharedAddress(shared).value);
    const u32 full = ThreadLayout<Config>::opaque(SharedAddress(barriers).value);
    KVPipeline<Config> pipeline{stages, full, thread.warp, thread.lane, 0, 0, 0, 0, 0, 0, {}};
    pipeline.init();

    int tile = scheduler.first_tile(blockIdx.x), batch_row_begin;
    const int end = scheduler.first_tile(blockIdx.x + 1);
    int b = find_row(lengths, tile, thread.lane, batch_row_begin);
    while (tile < end) {  // a (batch row, KV head), of whose tiles this CTA takes those from `first` to `last`
        const int row_tiles = lengths.num_tiles(b), kv_head = (tile - batch_row_begin) / row_tiles;
        const int row_begin = batch_row_begin + kv_head * row_tiles, row = b * p.kv_heads + kv_head;
        const int first = tile - row_begin, last = min(row_tiles, end - row_begin);
        const int num_groups = lengths.num_groups(b), dense_begin = lengths.dense_begin(b);
        const int num_rows = p.q_heads_per_kv * p.queries;
        const i64 first_group = Config::PAGED ? kv_head : i64(row) * p.group_capacity;
        if (threadIdx.x == 0) {
            dense = dense_kv(p, lengths, b, kv_head);
            rows.set_scores(p.scores + i64(row) * p.score_queries * p.score_capacity, p.score_capacity, p.queries);
        }
        if (threadIdx.x >= Config::THREADS - Config::ROWS)
            set_query_row(rows, threadIdx.x - (Config::THREADS - Config::ROWS), p, lengths, b);
        __syncthreads();
        if constexpr (Config::PAGED)
            pipeline.pages = p.pages + i64(b) * p.page_stride, pipeline.page_heads = p.kv_heads;
        pipeline.start(
            dense,
            warp_part(thread.warp, p.key_codes) + first_group * KVPipeline<Config>::group_stride(thread.warp, false),
            warp_part(thread.warp, p.value_codes) + first_group * KVPipeline<Config>::group_stride(thread.warp, true),
            num_groups, first, last
        );
        if (threadIdx.x == 0 && fuse_reduction)  // while the first copies are in flight
            row_ctas = make_int2(scheduler.cta_of(row_begin), scheduler.cta_of(row_begin + row_tiles - 1));
        pdl_wait();
        if (Config::SCORES && threadIdx.x >= Config::THREADS - Config::ROWS)
            set_score_row(rows, threadIdx.x - (Config::THREADS - Config::ROWS), p, row);

        const u16* q = p.q + (i64(b) * p.q_batch_stride + i64(kv_head) * p.q_heads_per_kv * p.q_head_stride) * 8;
        Accumulator<Config> sums;
        sums.clear();
        if (Config::BITS && first < num_groups)
            attend_quantized(sums, pipeline, rows, dense, q, num_rows, scale, first, min(last, num_groups), thread);
        sums.normalize_out();
        const int first_dense = max(first, num_groups);
        if (first_dense < last)
            attend_dense(sums, pipeline, rows, dense, q, num_rows, scale * LOG2_E,
                         dense_begin + (first_dense - num_groups) * Config::DENSE_TILE, last - first_dense,
                         first >= num_groups, thread);

        // Splits are visited in the order of (CTA, row), of which one grows at each step, so indices are unique.
        u16* const out = p.out + (i64(b) * p.queries * p.kv_heads + kv_head) * p.q_heads_per_kv * Config::HEAD_DIM;
        const Results<Config> results{p.partial, p.lse, out, num_rows, p.queries, p.row_score_lse(row),
                                      p.sinks + kv_head * p.q_heads_per_kv};
        const int count = fuse_reduction ? row_ctas.y - row_ctas.x + 1 : 0;
        store_split(sums, rows, results, count == 1 ? -1 : int(blockIdx.x) + row, thread);
        if (!fuse_reduction && threadIdx.x == 0) {
            if (tile == row_begin) p.row_ctas[row].x = blockIdx.x;
            if (last == row_tiles) p.row_ctas[row].y = blockIdx.x;
        }
        if (count > 1 && arrives_last(p.arrivals + row, count)) reduce_row(rows, results, row_ctas.x + row, count);
        __syncthreads();
        tile = row_begin + last;
        if (tile < end && tile - batch_row_begin == row_tiles * p.kv_heads) {  // the batch row's last KV head is done
            batch_row_begin = tile;
            do b++;
            while (lengths.num_tiles(b) == 0);
        }
    }
}
