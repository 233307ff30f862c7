// Part 2 of 4 of the CUDA linear kernels, for dense 16-bit weights; see linear_dense_cuda.py for the story.
//
// Weights are the 16-row A operand of mma.m16n8k16, x is the 8-column B operand. `g` = lane / 4 and `c` = lane % 4.
// A unit is 32 inputs of a row tile, which is 16 outputs. Lane c takes 16 bytes, 8 adjacent inputs, of a row of either
// operand: both see the inputs of a unit in the order [step 2, pair 2, c 4, 2] instead of [c 4, step 2, pair 2, 2].

constexpr int UNIT_INPUTS = 32;
constexpr int UNIT_BYTES = 64;  // of a row
constexpr int ITEM_UNITS = ITEM_INPUTS / UNIT_INPUTS;
// Rows start an odd number of 64 bytes apart, so that a quarter warp's loads, 64 bytes of two rows, meet every bank.
constexpr int ROW_BYTES = 2 * ITEM_INPUTS + 64;
constexpr int ITEM_BYTES = 16 * ROW_BYTES;
constexpr int COLUMNS = 8 * TILES;
constexpr int SUM_COLUMNS = 0;
static_assert(ITEM_INPUTS % 64 == 0, "an odd number of 64 bytes is a row and its padding");

// An item is 16 pieces of rows. Rows past the last output keep what was there: whatever they multiply to, the products
// of other rows do not see it.
struct Weights {
    const u8* rows;
    i64 row_bytes;
    int outputs;

    __device__ Weights(const u8* w, int inputs, int outputs) : rows(w), row_bytes(2 * i64(inputs)), outputs(outputs) {}
    __device__ __forceinline__ void copy(u8* slot, int tile, int unit, int count, u64* full) const {
        const int bytes = count * UNIT_BYTES, valid = min(16, outputs - 16 * tile);
        const u8* from = rows + 16 * tile * row_bytes + unit * UNIT_BYTES;
        u32 to = shared_address(slot);
        barrier_expect(full, valid * bytes);
        if (valid == 16) {
#pragma unroll
            for (int row = 0; row < 16; row++, to += ROW_BYTES, from += row_bytes) bulk_copy(to, from, bytes, full);
        } else {
#pragma unroll 1
            for (int row = 0; row < valid; row++, to += ROW_BYTES, from += row_bytes) bulk_copy(to, from, bytes, full);
        }
    }
};

// acc += W x for one unit; `data` is where this lane's piece of row g of the slot is, x[t] that of its rows of x.
__device__ __forceinline__ void add_unit(float (&acc)[2][TILES][4], const u8* data, const u8* const (&x)[TILES],
                                         int unit) {
    u32 upper[4], lower[4];
    load_words(upper, data);
    load_words(lower, data + 8 * ROW_BYTES);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        u32 b[4];
        load_words(b, x[t] + unit * UNIT_BYTES);
#pragma unroll
        for (int s = 0; s < 2; s++)
            multiply_add(acc[s][t], upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1], b[2 * s],
                         b[2 * s + 1]);
    }
}

// This warp's units of an item of `count` units: every WARPS-th from the `own`-th on.
template <bool SUMS> __device__ __forceinline__ void add_item(
    float (&acc)[TILES][4], const u8* data, const u8* const (&x)[TILES], float*, int unit, int count, int own,
    int lane
) {
    float d[2][TILES][4] = {};
    data += lane / 4 * ROW_BYTES + lane % 4 * 16;
    if (ITEM_UNITS % WARPS == 0 && count >= ITEM_UNITS) {
#pragma unroll
        for (int i = 0; i < ITEM_UNITS / WARPS; i++)
            add_unit(d, data + (own + i * WARPS) * UNIT_BYTES, x, unit + own + i * WARPS);
    } else {
#pragma unroll 4
        for (; own < count; own += WARPS) add_unit(d, data + own * UNIT_BYTES, x, unit + own);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[t][i] += d[0][t][i] + d[1][t][i];
}
