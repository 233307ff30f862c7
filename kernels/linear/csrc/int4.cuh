// Part 2 of 4 of the CUDA linear kernels, for 4-bit weights (int4_weight.py); see linear_int4_cuda.py for the story.
//
// Weights are the 16-row A operand of mma.m16n8k16, x is the 8-column B operand. `g` = lane / 4 and `c` = lane % 4;
// a unit is one group of inputs of a row tile, which is 16 outputs.

constexpr int UNIT_INPUTS = GROUP;
constexpr int CHUNK = GROUP < 64 ? GROUP : 64;  // inputs whose codes a lane holds in one load
constexpr int CHUNKS = GROUP / CHUNK;
constexpr int STEPS = CHUNK / 16;
constexpr int PIECES = CHUNK / 32;  // 16-byte pieces of a row of x that a lane needs for a chunk
constexpr int CODE_BYTES = 8 * GROUP;
constexpr int UNIT_BYTES = CODE_BYTES + 64;
constexpr int ITEM_UNITS = ITEM_INPUTS / GROUP;
constexpr int ITEM_BYTES = ITEM_UNITS * UNIT_BYTES;
constexpr int COLUMNS = 8 * TILES;
constexpr int SUM_COLUMNS = COLUMNS;  // of the sums that a unit needs beside x
constexpr int TOGETHER = 2;           // units that a warp multiplies at once
constexpr u32 MASK = 0x000F000Fu;
constexpr u32 BASE = BF16 ? 0x43004300u : 0x64006400u;    // 128 or 1024, to whose mantissa a code is ORed
constexpr u32 OFFSET = BF16 ? 0xC308C308u : 0xE408E408u;  // minus that and 8, so that centred codes remain
constexpr float OFFSET_INVERSE = BF16 ? -1.0f / 136 : -1.0f / 1032;

// Items are contiguous.
struct Weights {
    const u8* packed;
    i64 tile_bytes;

    __device__ Weights(const u8* w, int inputs, int) : packed(w), tile_bytes(i64(inputs / GROUP) * UNIT_BYTES) {}
    __device__ __forceinline__ void copy(u8* slot, int tile, int unit, int count, u64* full) const {
        barrier_expect(full, count * UNIT_BYTES);
        const u8* const from = packed + tile * tile_bytes + unit * UNIT_BYTES;
        bulk_copy(shared_address(slot), from, count * UNIT_BYTES, full);
    }
};

__device__ __forceinline__ void load_x(u32 (&b)[PIECES][4], const u8* row, int chunk) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) load_words(b[piece], row + (chunk * PIECES + piece) * 64);
}

// Two columns of sums[unit][column] = OFFSET * (sum of x over the unit's inputs): where a unit's product starts, and
// its zero's share.
__device__ __forceinline__ float2* sums_of(float* sums, int unit, int t, int lane) {
    return reinterpret_cast<float2*>(sums + unit * COLUMNS + 8 * t + lane % 4 * 2);
}

// acc += scale * (codes - 8) x + zero * sum of x, for U units: the `unit`-th of this block's inputs, which is at
// `data`, and WARPS further on each. Their products depend on nothing of each other and so hide each other's latency.
// SUMS: the sums are found on the way, by products that cost nothing, as unpacking takes longer than multiplying.
template <int U, bool SUMS> __device__ __forceinline__ void add_units(
    float (&acc)[TILES][4], const u8* data, const u8* const (&x)[TILES], float* sums, int unit, int lane
) {
    float d[U][TILES][4], sum[U][TILES][4];
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const float2 known = SUMS ? make_float2(0, 0) : *sums_of(sums, unit + u * WARPS, t, lane);
            sum[u][t][0] = sum[u][t][2] = d[u][t][0] = d[u][t][2] = known.x;
            sum[u][t][1] = sum[u][t][3] = d[u][t][1] = d[u][t][3] = known.y;
        }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 words[U][STEPS], b[U][TILES][PIECES][4];
#pragma unroll
        for (int u = 0; u < U; u++) {
            load_words(words[u], data + u * WARPS * UNIT_BYTES + i * (8 * CHUNK) + lane * (4 * STEPS));
#pragma unroll
            for (int t = 0; t < TILES; t++) load_x(b[u][t], x[t], (unit + u * WARPS) * CHUNKS + i);
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int u = 0; u < U; u++) {
                const u32 word = words[u][s];
                const u32 a0 = masked_or(word, MASK, BASE), a1 = masked_or(word >> 4, MASK, BASE);
                const u32 a2 = masked_or(word >> 8, MASK, BASE), a3 = masked_or(word >> 12, MASK, BASE);
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const u32 b0 = b[u][t][s / 2][s % 2 * 2], b1 = b[u][t][s / 2][s % 2 * 2 + 1];
                    multiply_add(d[u][t], a0, a1, a2, a3, b0, b1);
                    if (SUMS) multiply_add(sum[u][t], OFFSET, OFFSET, OFFSET, OFFSET, b0, b1);
                }
            }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int t = 0; t < TILES && SUMS; t++) {
            if (lane < 4) *sums_of(sums, unit + u * WARPS, t, lane) = make_float2(sum[u][t][0], sum[u][t][1]);
#pragma unroll
            for (int i = 0; i < 4; i++) d[u][t][i] += sum[u][t][i];
        }
        const u8* const pair_at = data + u * WARPS * UNIT_BYTES + CODE_BYTES + lane / 4 * 8;
        const uint2 pairs = *reinterpret_cast<const uint2*>(pair_at);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 pair = half ? pairs.y : pairs.x;
            const float scale = __uint_as_float(pair << 16);
            const float zero = __uint_as_float(pair & 0xFFFF0000u) * OFFSET_INVERSE;
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float& to = acc[t][2 * half + j];
                    to = fmaf(scale, d[u][t][2 * half + j], fmaf(zero, sum[u][t][j], to));
                }
        }
    }
}

// This warp's units of an item of `count` units: every WARPS-th from the `own`-th on.
template <bool SUMS> __device__ __forceinline__ void add_item(
    float (&acc)[TILES][4], const u8* data, const u8* const (&x)[TILES], float* sums, int unit, int count,
    int own, int lane
) {
    if (ITEM_UNITS % (WARPS * TOGETHER) == 0 && count >= ITEM_UNITS) {
        data += own * UNIT_BYTES;
#pragma unroll 2
        for (int i = 0; i < ITEM_UNITS / WARPS; i += TOGETHER)
            add_units<TOGETHER, SUMS>(acc, data + i * WARPS * UNIT_BYTES, x, sums, unit + own + i * WARPS, lane);
        return;
    }
#pragma unroll 1
    for (; own < count; own += WARPS) add_units<1, SUMS>(acc, data + own * UNIT_BYTES, x, sums, unit + own, lane);
}
