// Part 7 of 7: decode attention over hierarchical 4-bit codes and full-precision tokens, for Hopper and newer; see
// attention_cuda.py for the story. ENTRY_ATTEND or ENTRY_MERGE says which of the two kernels is compiled.

#ifdef ENTRY_ATTEND
// Rows of the batch that see nothing have no units, so no block meets them.
__device__ __forceinline__ void clear_empty_rows(const Lengths& lengths, u16* out, int row_elements) {
    for (int b = blockIdx.x; b < lengths.batch; b += gridDim.x)
        if (lengths.units(b) == 0) {
            wait_for_previous();
            for (int i = threadIdx.x; i < row_elements; i += THREADS) out[i64(b) * row_elements + i] = 0;
        }
}

// What a warp copies of each group: a half of its codes (INT8: a plane), its scales or its minima.
__device__ __forceinline__ const u8* part_of(
    int warp, const u8* upper, const u8* lower, const u8* scale, const u8* low
) {
    return warp == 0 ? upper : warp == 1 ? (BITS == 8 ? lower : upper + CODE_BYTES / 2) : warp == 2 ? scale : low;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(
    const u16* q, const u16* keys, const u16* values, const int* begin, const int* end, const int* groups,
    float* partial, float* sums, int2* shares, u16* out, u32* arrived,
    const u8* key_upper, const u8* key_lower, const u8* key_scale, const u8* key_min,
    const u8* value_upper, const u8* value_lower, const u8* value_scale, const u8* value_min,
    int batch, int kv_heads, int ratio, int queries, int capacity, int group_capacity,
    int q_batch_stride, int q_query_stride, int q_head_stride,  // all strides in units of 8 elements
    int key_batch_stride, int key_head_stride, int key_stride,
    int value_batch_stride, int value_head_stride, int value_stride, int folds, double scale
) {
    extern __shared__ __align__(128) u8 space[];
    __shared__ Rows rows;
    __shared__ Source source;  // here for want of registers
    __shared__ int2 segments;  // the row's first and last share
    __shared__ i64 barriers[ITEMS];
    let_next_start();
    const Lane me(shared_address(space) + ITEMS * ITEM_BYTES);

    const Lengths lengths{begin, end, groups, batch, kv_heads, queries, capacity, group_capacity};
    const Work work(lengths, gridDim.x, me.lane);
    if (folds) clear_empty_rows(lengths, out, queries * kv_heads * ratio * HEAD_DIM);
    if (blockIdx.x >= work.shares) return wait_for_previous();  // no kernel ends before those that came before it
    const u32 items = Lane::opaque(shared_address(space)), full = Lane::opaque(shared_address(barriers));
    Ring ring{items, full, me.warp, me.lane, 0, 0, 0, 0, 0, {}};
    ring.init();

    int unit = work.first_unit(blockIdx.x), start;
    const int stop = work.first_unit(blockIdx.x + 1);
    int b = find_row(lengths, unit, me.lane, start);
    while (unit < stop) {
        const int row_units = lengths.units(b), kv_head = (unit - start) / row_units;
        const int row_start = start + kv_head * row_units, to = min(row_units, stop - row_start);
        const int flat = b * kv_heads + kv_head;
        const i64 first_group = i64(flat) * group_capacity;
        const int visible = lengths.visible_groups(b), first_slot = lengths.first_slot(b), rows_used = ratio * queries;
        if (threadIdx.x == 0)
            source = Source{{keys + (i64(b) * key_batch_stride + i64(kv_head) * key_head_stride) * 8,
                             values + (i64(b) * value_batch_stride + i64(kv_head) * value_head_stride) * 8},
                            {key_stride * 8, value_stride * 8}, first_slot, lengths.last_slot(b)};
        if (threadIdx.x >= THREADS - ROWS) {  // a row is a query of a head
            const int row = threadIdx.x - (THREADS - ROWS), query = row % queries, head = row / queries;
            rows.query[row] = query * q_query_stride + head * q_head_stride;
            rows.out[row] = (query * kv_heads * ratio + head) * HEAD_DIM;
            rows.top[row] = 0;
            rows.limit[row] = min(lengths.own_slot(b) + query, capacity);
        }
        __syncthreads();
        const int at = unit - row_start;
        const u8* key_part = part_of(me.warp, key_upper, key_lower, key_scale, key_min);
        const u8* value_part = part_of(me.warp, value_upper, value_lower, value_scale, value_min);
        ring.start(source, key_part + first_group * Ring::part_step(me.warp, false),
                   value_part + first_group * Ring::part_step(me.warp, true), visible, at, to);
        if (threadIdx.x == 0 && folds)  // while the first copies are under way
            segments = make_int2(work.share_of(row_start), work.share_of(row_start + row_units - 1));
        wait_for_previous();
        const u16* own_q = q + (i64(b) * q_batch_stride + i64(kv_head) * ratio * q_head_stride) * 8;
        State state;
        state.clear();
        if (BITS && at < visible)
            attend_groups(state, ring, rows, source, own_q, rows_used, float(scale), at, min(to, visible), me);
        state.settle();
        const int in_slots = max(at, visible);
        if (in_slots < to)
            attend_slots(state, ring, rows, source, own_q, rows_used, float(scale) * LOG2_E,
                         first_slot + (in_slots - visible) * SLOTS, to - in_slots, at >= visible, me);
        // Segments are met in the order of (share, row), and either grows from one to the next: a slot of its own.
        const Results results{partial, sums, out + (i64(b) * queries * kv_heads + kv_head) * ratio * HEAD_DIM,
                              rows_used};
        const int count = folds ? segments.y - segments.x + 1 : 0;
        store_segment(state, rows, results, count == 1 ? -1 : int(blockIdx.x) + flat, me);
        if (!folds && threadIdx.x == 0) {
            if (unit == row_start) shares[flat].x = blockIdx.x;
            if (to == row_units) shares[flat].y = blockIdx.x;
        }
        if (count > 1 && arrives_last(arrived + flat, count))
            for (int i = threadIdx.x; i < rows_used * ROW_LANES; i += THREADS)
                Merged(results, segments.x + flat, i / ROW_LANES, 0, 1, count, i % ROW_LANES)
                    .store(results.out + rows.out[i / ROW_LANES], i % ROW_LANES);
        __syncthreads();
        unit = row_start + to;
        if (unit < stop && unit - start == row_units * kv_heads) {
            start = unit;
            do b++;
            while (lengths.units(b) == 0);
        }
    }
}
#endif

#ifdef ENTRY_MERGE
constexpr int MERGE_PARTS = 16;

// One block per query row and KV head, parts of which take every sixteenth segment.
// out: [batch, queries, heads, HEAD_DIM].
extern "C" __global__ void __launch_bounds__(MERGE_PARTS * ROW_LANES) merge(
    float* partial, float* sums, const int2* shares, const int* begin, const int* end, const int* groups, u16* out,
    int batch, int kv_heads, int ratio, int queries, int capacity, int group_capacity
) {
    __shared__ Merged merged[MERGE_PARTS][ROW_LANES];
    const int lane = threadIdx.x % ROW_LANES, part = threadIdx.x / ROW_LANES, row = blockIdx.x;
    const int flat = blockIdx.y, b = flat / kv_heads, kv_head = flat % kv_heads;
    let_next_start();
    wait_for_previous();
    const Lengths lengths{begin, end, groups, batch, kv_heads, queries, capacity, group_capacity};
    const int2 met = shares[flat];  // unwritten where the row sees nothing
    const int count = lengths.units(b) ? met.y - met.x + 1 : 0, first = count ? met.x : 0;
    const Results results{partial, sums, out, ratio * queries};
    Merged own(results, first + flat, row, part, MERGE_PARTS, count, lane);
    merged[part][lane] = own;
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int i = 1; i < MERGE_PARTS; i++) {
        const Merged& other = merged[i][lane];
        own.rescale(fmaxf(own.best, other.best));
        own.add(exp2_of(other.best - own.best), other.total, other.acc);
    }
    const i64 at = (i64(b) * queries + row % queries) * kv_heads * ratio + kv_head * ratio + row / queries;
    own.store(out + at * HEAD_DIM, lane);
}
#endif
