// Part 3 of 4 of the CUDA linear kernels: who does what in a block.
//
// WARPS warps multiply, one copies weights, one fetches x, adds up and stores. Once started they meet at barriers in
// shared memory only, so that a warp may run ahead by as many items as the ring holds and by BUFFERS row tiles; but
// with 4-bit weights those that multiply wait for each other after the first row tile, for its sums of x. Where a slot
// becomes free one lane arrives for its warp, after __syncwarp; where sums change hands every lane does, as racecheck
// wants.

constexpr int TILE_FLOATS = 16 * COLUMNS;  // sums of a row tile
constexpr int BUFFERS = 2;                 // of row tiles' sums
constexpr int COPIER = WARPS, ADDER = WARPS + 1, THREADS = 32 * (WARPS + 2);

// What a block takes of the product: row tiles first, first + stride, ... of W, `units` units of the inputs from
// `begin` on, and `rows` rows of x. GATED, they are of the first half of W's tiles, and each is followed by the one
// that lies as far into the second half. No block has more than `most_tiles`, and none less than one (pair) fewer.
struct Part {
    int first, stride, tiles, begin, units, rows, most_tiles;

    __device__ __forceinline__ int half() const { return tiles / 2; }
    __device__ __forceinline__ int own_tiles() const {
        const int step = GATED ? 2 : 1, last = first + (most_tiles / step - 1) * stride;
        return last < tiles / step ? most_tiles : most_tiles - step;
    }
    __device__ __forceinline__ int after(int tile) const {
        if (!GATED) return tile + stride;
        return tile < half() ? tile + half() : tile - half() + stride;
    }
    __device__ __forceinline__ int items_per_tile() const { return (units + ITEM_UNITS - 1) / ITEM_UNITS; }
    // Of each part in which x arrives; whole items.
    __device__ __forceinline__ int units_per_x_part() const {
        return X_PARTS == 1 ? units : (items_per_tile() + X_PARTS - 1) / X_PARTS * ITEM_UNITS;
    }
};

struct Barriers {
    u64 full[MOST_ITEMS], empty[MOST_ITEMS];  // slots of the ring
    u64 summed[BUFFERS], spent[BUFFERS];      // buffers of sums
    u64 x[X_PARTS];
    u64 met;  // sums of a cluster's blocks

    // For one lane of each warp: setting one up takes 75 cycles.
    __device__ __forceinline__ void init(int warp, int items) {
        constexpr int STEP = THREADS / 32;
        for (int i = warp; i < items; i += STEP) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
        for (int i = STEP - 1 - warp; i <= BUFFERS + X_PARTS; i += STEP) {
            if (i < BUFFERS) barrier_init(summed + i, 32 * WARPS), barrier_init(spent + i, 32);
            else if (i < BUFFERS + X_PARTS) barrier_init(x + i - BUFFERS, 1);
            else barrier_init(&met, 1);
        }
        fence_barrier_init();
    }
};

// A place in a ring and the parity of its barrier's phase.
struct Turn {
    int at;
    u32 phase;

    __device__ __forceinline__ void next(int count) {
        if (++at == count) at = 0, phase ^= 1;
    }
};

// An item of a block's part: `unit` counts from the part's begin.
struct Cursor {
    int tile, unit;

    __device__ __forceinline__ int count(const Part& part) const { return min(ITEM_UNITS, part.units - unit); }
    __device__ __forceinline__ void next(const Part& part) {
        if ((unit += ITEM_UNITS) >= part.units) unit = 0, tile = part.after(tile);
    }
};

// ---------------------------------------------------------------- the copier

// For one lane: every item of the part, as slots become free. Weights are constant, so it does not wait for earlier
// kernels. As long as x is awaited only `calm` items are under way at once, then `flight`: a flood of copies would
// delay x and all that happens before it.
__device__ __forceinline__ void copy_items(
    const Weights& weights, const Part& part, Barriers& barriers, u8* slots, int items, int lead, int calm, int flight
) {
    Turn turn = {0, 1};     // the phase before the first counts as complete
    Turn arrived = {0, 0};
    Cursor item = {part.first, 0};
    const int count = part.own_tiles() * part.items_per_tile();
    int limit = calm, under_way = 0;
    if (count <= lead) next_launch();
#pragma unroll 1
    for (int i = count - 1; i >= 0; i--) {
        while (under_way >= limit) {
            barrier_wait(barriers.full + arrived.at, arrived.phase);
            arrived.next(items);
            under_way--;
            if (limit != flight && barrier_passed(barriers.x, 0)) limit = flight;
        }
        barrier_wait(barriers.empty + turn.at, turn.phase);
        weights.copy(slots + turn.at * ITEM_BYTES, item.tile, part.begin + item.unit, item.count(part),
                     barriers.full + turn.at);
        under_way++;
        item.next(part);
        turn.next(items);
        if (i == lead) next_launch();
    }
}

// ---------------------------------------------------------------- the multipliers

// A warp's sums of a row tile as they lie in its registers: [TILES, row half, lane] pairs.
__device__ __forceinline__ void put_sums(const float (&acc)[TILES][4], float* partials, int lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float2*>(partials + ((2 * t + half) * 32 + lane) * 2) =
                make_float2(acc[t][2 * half], acc[t][2 * half + 1]);
}

__device__ __forceinline__ void multiply(
    const Part& part, Barriers& barriers, const u8* slots, int items, const u8* x, u32 pitch, float* sums,
    float* partials, int lane
) {
    const int warp = threadIdx.x / 32;
    const u8* lane_x[TILES];  // a lane loads of row 8 t + g; past the last row it repeats that, for nobody reads those
#pragma unroll
    for (int t = 0; t < TILES; t++)
        lane_x[t] = x + min(8 * t + lane / 4, part.rows - 1) * pitch + lane % 4 * 16;
    Turn turn = {0, 0}, buffer = {0, 1};
    const int x_part = part.units_per_x_part();
    u64* x_full = barriers.x;
    int x_units = 0;  // that have arrived
    int own = warp;   // goes round over a tile's last, shorter items
    bool sums_left = SUM_COLUMNS > 0;  // the first row tile's products find them
#pragma unroll 1
    for (int left = part.own_tiles(); left; left--) {
        float acc[TILES][4] = {};
#pragma unroll 1
        for (int unit = 0; unit < part.units; unit += ITEM_UNITS) {
            const int count = min(ITEM_UNITS, part.units - unit);
            if (unit == x_units) barrier_wait(x_full++, 0), x_units += x_part;
            barrier_wait(barriers.full + turn.at, turn.phase);
            const u8* const data = slots + turn.at * ITEM_BYTES;
            if (sums_left) add_item<true>(acc, data, lane_x, sums, unit, count, own, lane);
            else add_item<false>(acc, data, lane_x, sums, unit, count, own, lane);
            own = (own + WARPS * ITEM_UNITS - count) % WARPS;
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers.empty + turn.at);
            turn.next(items);
        }
        barrier_wait(barriers.spent + buffer.at, buffer.phase);
        put_sums(acc, partials + (buffer.at * WARPS + warp) * TILE_FLOATS, lane);
        barrier_arrive(barriers.summed + buffer.at);
        buffer.next(BUFFERS);
        if (sums_left) multipliers_meet(), sums_left = false;
    }
}

// ---------------------------------------------------------------- the adder

// For one lane, before x is there: what the barriers will count.
__device__ __forceinline__ void expect_x(const Part& part, Barriers& barriers) {
    const int most = part.units_per_x_part();
    for (int unit = 0, i = 0; unit < part.units; unit += most, i++)
        barrier_expect(barriers.x + i, part.rows * min(most, part.units - unit) * UNIT_INPUTS * 2);
}

// For one lane. Rows of x start an odd number of 64 bytes apart, so that the 16-byte loads of a warp (64 bytes of each
// of 8 rows) meet every bank equally. Blocks of a cluster that need the same rows send them to each other.
__device__ __forceinline__ void copy_x(
    u8* to, u32 pitch, const u8* x, i64 row_bytes, const Part& part, Barriers& barriers
) {
    const int first = blockIdx.x % SHARES, most = part.units_per_x_part();
    u64* full = barriers.x;
#pragma unroll 1
    for (int unit = 0; unit < part.units; unit += most, full++) {
        const int bytes = min(most, part.units - unit) * UNIT_INPUTS * 2, skip = unit * UNIT_INPUTS * 2;
        u32 own = shared_address(to) + first * pitch + skip;
        const u8* from = x + first * row_bytes + skip;
#pragma unroll 4
        for (int row = first; row < part.rows; row += SHARES, own += SHARES * pitch, from += SHARES * row_bytes) {
            if (SHARES == 1) bulk_copy(own, from, bytes, full);
            else bulk_copy_shared(own, from, bytes, full, SHARES);
        }
    }
}

template <int COUNT> __device__ __forceinline__ float add_up(const float* sums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += sums[i * TILE_FLOATS];
    return sum;
}

struct Output {
    u16* y;
    const u16* bias;     // or null
    int outputs, width;  // of W and, half as many if GATED, of y

    // Sum `i` of a tile, counted with outputs innermost, in the order of `put_sums`.
    __device__ static __forceinline__ int place(int i) {
        return i / 128 * 128 + i / 8 % 2 * 64 + i % 8 * 8 + i / 16 % 8;
    }
    __device__ __forceinline__ float biased(int tile, int i, float sum) const {
        return bias ? sum + float_of(bias[16 * tile + i % 16]) : sum;
    }
    __device__ __forceinline__ void put(int tile, int i, float value) const {
        y[i64(i / 16) * width + 16 * tile + i % 16] = element_of(value);
    }
    __device__ __forceinline__ void store(int tile, int i, float sum) const {
        if (16 * tile + i % 16 < outputs) put(tile, i, biased(tile, i, sum));
    }
};

// For GATED products, by the adder's lanes: gates of a row tile are kept until what they let through is there.
struct Gates {
    float kept[COLUMNS / 2];  // sums lane, lane + 32, ... of the tile

    __device__ __forceinline__ void meet(
        const Part& part, const Output& output, const float* sums, int tile, int lane
    ) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j++) {
            const int i = 32 * j + lane;
            if (i >= 16 * part.rows) continue;
            const float sum = output.biased(tile, i, add_up<WARPS>(sums + Output::place(i)));
            if (tile < part.half()) kept[j] = sum / (1.0f + __expf(-sum));
            else output.put(tile - part.half(), i, kept[j] * sum);
        }
    }
};

// Sums of a row tile, COUNT a lane: all are read before the first is stored, which would keep the others waiting.
template <int COUNT> __device__ __forceinline__ void add_tile(
    const Part& part, Barriers& barriers, const Output& output, const float* sums, float* met, int own_tile, int tile,
    int rank, int lane
) {
    const int owner = own_tile % SPLITS;
    float sum[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; j++) sum[j] = add_up<WARPS>(sums + Output::place(32 * j + lane));
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const int i = 32 * j + lane;
        if (i >= 16 * part.rows) continue;
        float* const remote = met + (own_tile - owner + rank) * TILE_FLOATS + Output::place(i);
        if (SPLITS == 1) output.store(tile, i, sum[j]);
        else store_remote(remote, owner, sum[j], &barriers.met);
    }
}

// Adds up the sums of this block's warps, row tile by row tile. In clusters they are sent to one block of the cluster,
// which keeps in `met` [own row tile, block of the cluster, sum].
__device__ __forceinline__ void add_tiles(
    const Part& part, Barriers& barriers, const Output& output, const float* partials, float* met, int rank, int lane
) {
    Turn turn = {0, 0};
    Gates gates;
    const int count = part.own_tiles();
    int tile = part.first;
#pragma unroll 1
    for (int own_tile = 0; own_tile < count; own_tile++, tile = part.after(tile)) {
        barrier_wait(barriers.summed + turn.at, turn.phase);
        const float* const sums = partials + turn.at * WARPS * TILE_FLOATS;
        if (GATED) gates.meet(part, output, sums, tile, lane);
        else if (part.rows <= 2) add_tile<1>(part, barriers, output, sums, met, own_tile, tile, rank, lane);
        else add_tile<COLUMNS / 2>(part, barriers, output, sums, met, own_tile, tile, rank, lane);
        barrier_arrive(barriers.spent + turn.at);
        turn.next(BUFFERS);
    }
}

// For one lane: what add_met will wait for.
__device__ __forceinline__ void expect_met(const Part& part, Barriers& barriers, int rank) {
    const int owned = (part.own_tiles() - rank + SPLITS - 1) / SPLITS;  // row tiles
    barrier_expect(&barriers.met, owned * SPLITS * 16 * part.rows * int(sizeof(float)));
}

// What blocks of a cluster have sent to this one, by all its threads.
__device__ __forceinline__ void add_met(
    const Part& part, Barriers& barriers, const Output& output, const float* met, int rank
) {
    barrier_wait(&barriers.met, 0);
    for (int own_tile = rank; own_tile < part.own_tiles(); own_tile += SPLITS)
        for (int i = threadIdx.x; i < 16 * part.rows; i += THREADS)
            output.store(part.first + own_tile * part.stride, i,
                         add_up<SPLITS>(met + own_tile / SPLITS * SPLITS * TILE_FLOATS + Output::place(i)));
}
