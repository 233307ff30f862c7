// y = x W^T for a few rows of x and 4-bit weights, for Hopper and newer; see linear_int4_cuda.py for the story.
// linear_int4_instructions.cu comes before this in one source.
//
// Compiled with -D: GROUP (256, 128, 64, 32 inputs per scale), BF16 (dtype of x, bias and y: 1 bfloat16, 0 float16),
// TILES (8-row tiles of x per block), SPLITS (blocks of a cluster, which cut the inputs between them: 1, 2, 4),
// WARPS and BLOCKS (per block, per multiprocessor), ITEM_INPUTS (of 16 outputs' codes in one bulk copy), MOST_ITEMS
// (bulk copies in flight).
//
// Weights are the 16-row A operand of mma.m16n8k16, x is the 8-column B operand. `g` = lane / 4 and `c` = lane % 4;
// a unit is one group of inputs of a row tile, which is 16 outputs (int4_weight.py).

constexpr int CHUNK = GROUP < 64 ? GROUP : 64;  // inputs whose codes a lane holds in one load
constexpr int CHUNKS = GROUP / CHUNK;
constexpr int STEPS = CHUNK / 16;
constexpr int PIECES = CHUNK / 32;  // 16-byte pieces of a row of x that a lane needs for a chunk
constexpr int CODE_BYTES = 8 * GROUP;
constexpr int UNIT_BYTES = CODE_BYTES + 64;
constexpr int ITEM_UNITS = ITEM_INPUTS / GROUP;
constexpr int ITEM_BYTES = ITEM_UNITS * UNIT_BYTES;
constexpr int OWN_UNITS = ITEM_UNITS / WARPS;  // of a whole item, for each warp
constexpr int COLUMNS = 8 * TILES;
constexpr int TILE_FLOATS = 16 * COLUMNS;  // outputs of a row tile
constexpr u32 MASK = 0x000F000Fu;
constexpr u32 BASE = BF16 ? 0x43004300u : 0x64006400u;    // 128 or 1024, to whose mantissa a code is ORed
constexpr u32 OFFSET = BF16 ? 0xC308C308u : 0xE408E408u;  // minus that and 8, so that centred codes remain
constexpr float OFFSET_INVERSE = BF16 ? -1.0f / 136 : -1.0f / 1032;

// ---------------------------------------------------------------- weights

// This block's items: of each of its row tiles the units of its inputs, ITEM_UNITS at a time. One thread copies, into
// a ring of `items` slots; a barrier of the block frees a slot, as all warps take their units of every item.
struct Stream {
    const u8* packed;
    i64 tile_bytes;
    u8* slots;
    u64* full;
    int units, items, tiles, stride;  // of this block's inputs; of the ring; of W, of which this block takes some
    int tile, unit;                   // next to be copied
    int take;
    u32 phase;

    __device__ __forceinline__ void copy_next(int slot) {
        if (tile >= tiles) return;
        const int bytes = min(ITEM_UNITS, units - unit) * UNIT_BYTES;
        barrier_expect(full + slot, bytes);
        bulk_copy(slots + slot * ITEM_BYTES, packed + tile * tile_bytes + unit * UNIT_BYTES, bytes, full + slot);
        if ((unit += ITEM_UNITS) >= units) unit = 0, tile += stride;
    }
    __device__ __forceinline__ const u8* wait() const {
        barrier_wait(full + take, phase);
        return slots + take * ITEM_BYTES;
    }
    __device__ __forceinline__ void release() {  // after a barrier of the block
        if (threadIdx.x == 0) copy_next(take);
        if (++take == items) take = 0, phase ^= 1;
    }
};

// ---------------------------------------------------------------- x

// Rows of x in shared memory start an odd number of 64 bytes apart, so that the 16-byte loads of a warp (64 bytes of
// each of 8 rows) meet every bank equally. A lane loads of row 8 * tile + g; past the last row it repeats that, as what
// those columns give is never stored.
__device__ __forceinline__ const u8* lane_row(const u8* x, u32 pitch, int rows, int tile, int lane) {
    return x + min(8 * tile + lane / 4, rows - 1) * pitch + lane % 4 * 16;
}
__device__ __forceinline__ void load_x(u32 (&b)[PIECES][4], const u8* row, int chunk) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) load_words(b[piece], row + (chunk * PIECES + piece) * 64);
}

// sums[unit][column] = OFFSET * (sum of x over the unit's inputs): where a unit's product starts, and its zero's share.
__device__ __forceinline__ void sum_groups(const u8* const (&x)[TILES], float* sums, int units, int lane) {
#pragma unroll 2
    for (int unit = threadIdx.x / 32; unit < units; unit += WARPS) {
        float d[TILES][CHUNKS][4] = {};
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                u32 b[PIECES][4];
                load_x(b, x[t], unit * CHUNKS + i);
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    multiply_add(d[t][i], OFFSET, OFFSET, OFFSET, OFFSET, b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
            }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            float2 sum = make_float2(d[t][0][0], d[t][0][1]);
#pragma unroll
            for (int i = 1; i < CHUNKS; i++) sum.x += d[t][i][0], sum.y += d[t][i][1];
            if (lane < 4) *reinterpret_cast<float2*>(sums + unit * COLUMNS + 8 * t + 2 * lane) = sum;
        }
    }
}

// ---------------------------------------------------------------- products

// acc += scale * (codes - 8) x + zero * sum of x, for one unit at `data`, the `unit`-th of this block's inputs.
__device__ __forceinline__ void add_unit(
    float (&acc)[TILES][4], const u8* data, const u8* const (&x)[TILES], const float* sums, int unit, int lane
) {
    float d[TILES][4], start[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float2 sum = *reinterpret_cast<const float2*>(sums + unit * COLUMNS + 8 * t + lane % 4 * 2);
        start[t][0] = d[t][0] = d[t][2] = sum.x;
        start[t][1] = d[t][1] = d[t][3] = sum.y;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 words[STEPS], b[TILES][PIECES][4];
        load_words(words, data + i * (8 * CHUNK) + lane * (4 * STEPS));
#pragma unroll
        for (int t = 0; t < TILES; t++) load_x(b[t], x[t], unit * CHUNKS + i);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const u32 a0 = masked_or(words[s], MASK, BASE), a1 = masked_or(words[s] >> 4, MASK, BASE);
            const u32 a2 = masked_or(words[s] >> 8, MASK, BASE), a3 = masked_or(words[s] >> 12, MASK, BASE);
#pragma unroll
            for (int t = 0; t < TILES; t++)
                multiply_add(d[t], a0, a1, a2, a3, b[t][s / 2][s % 2 * 2], b[t][s / 2][s % 2 * 2 + 1]);
        }
    }
    const uint2 pairs = *reinterpret_cast<const uint2*>(data + CODE_BYTES + lane / 4 * 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 pair = half ? pairs.y : pairs.x;
        const float scale = __uint_as_float(pair << 16), zero = __uint_as_float(pair & 0xFFFF0000u) * OFFSET_INVERSE;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                acc[t][2 * half + j] = fmaf(scale, d[t][2 * half + j], fmaf(zero, start[t][j], acc[t][2 * half + j]));
    }
}

// This warp's units of an item of `count` units from `unit` on.
__device__ __forceinline__ void add_item(
    float (&acc)[TILES][4], const u8* data, const u8* const (&x)[TILES], const float* sums, int unit, int count,
    int lane
) {
    const int warp = threadIdx.x / 32;
    if (count >= ITEM_UNITS) {
#pragma unroll
        for (int i = 0; i < OWN_UNITS; i++) {
            const int own = warp * OWN_UNITS + i;
            add_unit(acc, data + own * UNIT_BYTES, x, sums, unit + own, lane);
        }
        return;
    }
#pragma unroll 1
    for (int own = count * warp / WARPS; own < count * (warp + 1) / WARPS; own++)
        add_unit(acc, data + own * UNIT_BYTES, x, sums, unit + own, lane);
}

// ---------------------------------------------------------------- outputs

// A warp's sums of a row tile as they lie in its registers: [TILES, row half, lane] pairs.
__device__ __forceinline__ void put_sums(const float (&acc)[TILES][4], float* partials, int lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float2*>(partials + ((2 * t + half) * 32 + lane) * 2) =
                make_float2(acc[t][2 * half], acc[t][2 * half + 1]);
}

__device__ __forceinline__ float add_partials(const float* partials, int count) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < count; p++) sum += partials[p * TILE_FLOATS];
    return sum;
}

struct Output {
    u16* y;
    const u16* bias;  // or null
    int outputs, rows;

    // `at` counts a row tile's outputs in the order of `put_sums`.
    __device__ __forceinline__ void store(int tile, int at, float sum) const {
        const int row = at / 128 * 8 + at % 8, output = 16 * tile + at / 64 % 2 * 8 + at / 8 % 8;
        if (row >= rows || output >= outputs) return;
        if (bias) sum += float_of(bias[output]);
        y[i64(row) * outputs + output] = element_of(sum);
    }
};

// ---------------------------------------------------------------- kernel

// For one warp: the barriers, then copies of `rows` rows of x and as many items as there are slots. What is asked for
// later arrives later: one or two rows go first, more rows only after the first item, which comes from farther away.
__device__ __forceinline__ void start_copies(
    Stream& stream, u64* x_full, u8* own_x, const u8* x, i64 row_bytes, int rows, int x_bytes, u32 pitch, int lane
) {
    if (lane <= stream.items) barrier_init(lane < stream.items ? stream.full + lane : x_full);
    fence_barrier_init();
    __syncwarp();
    if (lane > 0) return;
    int item = 0;
    if (rows > 2) stream.copy_next(item++);
    barrier_expect(x_full, rows * x_bytes);
#pragma unroll 1
    for (int row = 0; row < rows; row++) bulk_copy(own_x + row * pitch, x + row * row_bytes, x_bytes, x_full);
#pragma unroll 1
    for (; item < stream.items; item++) stream.copy_next(item);
}

// Clusters share the row tiles of W, blocks of one blockIdx.y take `chunk_rows` rows of x, and the blocks of a cluster
// cut the inputs: their sums of a row tile meet in one of them, and are added up at the end.
// Shared memory: slots of the ring, partial sums of the warps, those of the cluster, group sums, x.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
#if SPLITS > 1
__cluster_dims__(SPLITS, 1, 1)
#endif
linear(const u8* x, const u8* packed, const u16* bias, u16* y, int biased, int rows, int inputs, int outputs,
       int chunk_rows, int items) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 full[MOST_ITEMS], x_full;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % SPLITS;
    const int groups = inputs / GROUP, begin = groups * rank / SPLITS;
    const int units = groups * (rank + 1) / SPLITS - begin, most_units = (groups + SPLITS - 1) / SPLITS;
    const int tiles = (outputs + 15) / 16, first = blockIdx.x / SPLITS, stride = gridDim.x / SPLITS;
    const int first_row = blockIdx.y * chunk_rows, own_rows = min(chunk_rows, rows - first_row);
    const Output output = {y + i64(first_row) * outputs, biased ? bias : nullptr, outputs, own_rows};

    float* const partials = reinterpret_cast<float*>(shared + items * ITEM_BYTES);
    float* const sums = partials + WARPS * TILE_FLOATS;
    float* const met = sums + most_units * COLUMNS;  // [own row tile, block of the cluster, output]
    const int most_tiles = (tiles + stride - 1) / stride;
    const int met_tiles = SPLITS > 1 ? (most_tiles + SPLITS - 1) / SPLITS * SPLITS : 0;
    u8* const own_x = reinterpret_cast<u8*>(met + met_tiles * TILE_FLOATS);
    const u32 x_bytes = 2 * GROUP * units, pitch = x_bytes | 64;
    Stream stream = {packed + i64(begin) * UNIT_BYTES, i64(groups) * UNIT_BYTES, shared, full, units, items, tiles,
                     stride, first, 0, 0, 0};
    cluster_arrive();
    const u8* const from = x + 2 * (i64(first_row) * inputs + begin * GROUP);
    if (warp == 0) start_copies(stream, &x_full, own_x, from, 2 * i64(inputs), own_rows, x_bytes, pitch, lane);
    __syncthreads();  // the barriers are there

    const u8* lane_x[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) lane_x[t] = lane_row(own_x, pitch, own_rows, t, lane);
    barrier_wait(&x_full, 0);
    sum_groups(lane_x, sums, units, lane);
    __syncthreads();
    cluster_wait();

    int own_tile = 0;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += stride, own_tile++) {
        float acc[TILES][4] = {};
#pragma unroll 1
        for (int unit = 0; unit < units; unit += ITEM_UNITS) {
            add_item(acc, stream.wait(), lane_x, sums, unit, units - unit, lane);
            __syncthreads();
            stream.release();
        }
        put_sums(acc, partials + warp * TILE_FLOATS, lane);
        __syncthreads();
        if (threadIdx.x < TILE_FLOATS) {
            const float sum = add_partials(partials + threadIdx.x, WARPS);
            const int owner = own_tile % SPLITS;
            if (SPLITS == 1) output.store(tile, threadIdx.x, sum);
            else store_remote(met + (own_tile - owner + rank) * TILE_FLOATS + threadIdx.x, owner, sum);
        }
    }
    if (SPLITS == 1) return;
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x >= TILE_FLOATS) return;
    for (int i = rank; i < own_tile; i += SPLITS) {
        const float sum = add_partials(met + i / SPLITS * SPLITS * TILE_FLOATS + threadIdx.x, SPLITS);
        output.store(first + i * stride, threadIdx.x, sum);
    }
}
static_assert(TILE_FLOATS <= 32 * WARPS && MOST_ITEMS < 32, "a thread adds up one output, a lane starts one barrier");
