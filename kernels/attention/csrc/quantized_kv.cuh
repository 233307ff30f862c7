// Attention to quantized groups: unpacking codes, and the products with them.
#pragma once

#include "kv_pipeline.cuh"
#include "softmax.cuh"

// Four consecutive bytes of codes to four pairs of halves: [0], [1] hold the low nibbles' elements (0,2) (1,3), as
// masks leave them, [2], [3] the high ones'. INT8 as 1024 + 16 U + (L + 8); INT4 as 1024 + U in [0], [1] and 1024 + 16
// U in [2], [3]. A code ORed into the mantissa of a power of two is that power plus the code: no conversion.
__device__ __forceinline__ void unpack(u32 (&pairs)[4], u32 upper, u32 lower) {
    constexpr u32 HALF_1024 = 0x64006400u;
    if (BITS == 8) {
        const u32 low = ((upper << 4) & 0xF0F0F0F0u) | (lower & 0x0F0F0F0Fu);
        const u32 high = (upper & 0xF0F0F0F0u) | ((lower >> 4) & 0x0F0F0F0Fu);
        pairs[0] = __byte_perm(low, 0x64646464u, 0x4240);
        pairs[1] = __byte_perm(low, 0x64646464u, 0x4341);
        pairs[2] = __byte_perm(high, 0x64646464u, 0x4240);
        pairs[3] = __byte_perm(high, 0x64646464u, 0x4341);
    } else {
        pairs[0] = lop3_and_or(upper, 0x000F000Fu, HALF_1024);
        pairs[1] = lop3_and_or(upper >> 8, 0x000F000Fu, HALF_1024);
        pairs[2] = lop3_and_or(upper, 0x00F000F0u, HALF_1024);
        pairs[3] = lop3_and_or(upper >> 8, 0x00F000F0u, HALF_1024);
    }
}
// Unpacked codes of values less their offset, exactly: INT8 16 (U - 8) + L; INT4 U - 8, in [2] and [3] times 16.
// Offsets left in would have to cancel in sums over all tokens, which tensor cores truncate.
__device__ __forceinline__ void center(u32 (&pairs)[4]) {
    constexpr u32 LOW = BITS == 8 ? 0xE488E488u : 0xE408E408u;  // - 1160, - 1032
    constexpr u32 HIGH = BITS == 8 ? LOW : 0xE480E480u;         // - 1160, - 1152
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = add_half2(pairs[i], i < 2 ? LOW : HIGH);
}
// The offset of key codes is cancelled within a group, in sums over the channels: by a product of the same scaled
// queries with this constant.
constexpr u32 KEY_OFFSET = BITS == 8 ? 0xD408D408u : 0xE400E400u;  // - 1032 / 16 (16 U + L remains), - 1024
// From two words of adjacent halves (0,1) (2,3) to the order in which `unpack` leaves the codes.
__device__ __forceinline__ u32 first_pair(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x5410); }
__device__ __forceinline__ u32 second_pair(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x7632); }

// A warp's queries as B operands in the codes' order, in halves. Each row is divided by a power of two that brings it
// to [-1, 1], so that q S of finite scales cannot overflow; the power goes into the row's score scale.
__device__ __forceinline__ void load_queries(
    u32 (&own)[OWN_TILES][OWN_WORDS][4], QueryRows& rows, const u16* q, int num_rows, float scale,
    const ThreadLayout& thread
) {
    const int g = thread.lane / 4, c = thread.lane % 4, part = thread.warp % SCALE_WARPS;
#pragma unroll
    for (int j = 0; j < OWN_TILES; j++) {
        const int row = 8 * (thread.warp / SCALE_WARPS * OWN_TILES + j) + g;
        const bool exists = row < num_rows;
        const u32* from = reinterpret_cast<const u32*>(q + 8ll * rows.q_offset[exists ? row : 0]) + 2 * WORDS * c;
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++) {
            const u32 pair = from[HEAD_DIM / 4 * (i / (2 * WORDS)) + i % (2 * WORDS)];
            largest = fmaxf(largest, fmaxf(fabsf(Elem::to_float(u16(pair))), fabsf(Elem::to_float(u16(pair >> 16)))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
        const int exponent = max((__float_as_int(largest) >> 23) - 126, -60);
        const float shrink = exists ? power_of_two(-exponent) : 0;
#pragma unroll
        for (int i = 0; i < 2 * OWN_WORDS; i++) {
            const int w = i / 2, h = i % 2;
            const u32* pairs = from + HEAD_DIM / 4 * h + 2 * (part * OWN_WORDS + w);
            const u32 p0 = pairs[0], p1 = pairs[1];
            const u32 x0 = floats_to_half2(Elem::to_float(u16(p0)) * shrink, Elem::to_float(u16(p0 >> 16)) * shrink);
            const u32 x1 = floats_to_half2(Elem::to_float(u16(p1)) * shrink, Elem::to_float(u16(p1 >> 16)) * shrink);
            own[j][w][2 * h] = first_pair(x0, x1);
            own[j][w][2 * h + 1] = second_pair(x0, x1);
        }
        if (row < ROWS && c == 0)
            rows.score_scale[row] = scale * LOG2_E * power_of_two(exponent) / (BITS == 8 ? 16 : 1);
    }
}

// Stages queries times the group's key scales as B operands, and starts the scores at q . Z less what the codes'
// offsets will add. `stage`: the group's keys.
__device__ __forceinline__ void scale_queries(
    QueryRows& rows, const u32 (&own)[OWN_TILES][OWN_WORDS][4], u32 stage, const ThreadLayout& thread
) {
    const int part = thread.warp % SCALE_WARPS, first_tile = thread.warp / SCALE_WARPS * OWN_TILES;
    if (first_tile >= Q_TILES) return;
    // Eight of each product's sixteen rows are the same. Rows of minima: channels of low nibbles, then of high ones; so
    // of [0] (queries of low nibbles) the first rows count, of [1] the last.
    float minima[OWN_TILES][2][4] = {}, offsets[OWN_TILES][2][4] = {};
#pragma unroll
    for (int w = 0; w < OWN_WORDS; w++) {
        u32 scale[2][2], low[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ld_shared(scale[h], stage + thread.key_scales + 8 * w + HEAD_DIM * h);
            ld_shared(low[h], stage + thread.key_scales + 2 * HEAD_DIM + 8 * w + HEAD_DIM * h);
#pragma unroll
            for (int i = 0; i < 2 && BITS == 4 && h == 1; i++)
                scale[h][i] = mul_half2(scale[h][i], 0x2C002C00u);  // / 16
        }
        const u32 z0 = first_pair(low[0][0], low[0][1]), z1 = second_pair(low[0][0], low[0][1]);
        const u32 z2 = first_pair(low[1][0], low[1][1]), z3 = second_pair(low[1][0], low[1][1]);
#pragma unroll
        for (int j = 0; j < OWN_TILES; j++) {
            const u32(&q)[4] = own[j][w];
            u32 scaled[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scaled[2 * h] = mul_half2(q[2 * h], first_pair(scale[h][0], scale[h][1]));
                scaled[2 * h + 1] = mul_half2(q[2 * h + 1], second_pair(scale[h][0], scale[h][1]));
                mma_half(minima[j][h], z0, z2, z1, z3, q[2 * h], q[2 * h + 1]);
                mma_half(offsets[j][h], KEY_OFFSET, KEY_OFFSET, KEY_OFFSET, KEY_OFFSET, scaled[2 * h],
                         scaled[2 * h + 1]);
            }
            st_shared(thread.q_fragments + ((first_tile + j) * WORDS + part * OWN_WORDS + w) * 512, scaled);
        }
    }
    if (thread.lane >= 4) return;
#pragma unroll
    for (int j = 0; j < OWN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * (first_tile + j) + 2 * thread.lane + e;
            const float origin = (minima[j][0][e] + minima[j][1][2 + e]) + (offsets[j][0][e] + offsets[j][1][e]);
            const float bias = origin * (BITS == 8 ? 16 : 1) * rows.score_scale[row];  // INT8 codes count sixteenths
            rows.score_bias[part][row] = part == 0 ? bias + LOG2_P_SCALE - rows.row_max[row] : bias;
        }
}

// A lane's codes of two rows of some 16-row tiles, a few words of each row.
template <int NUM_TILES, int NUM_WORDS> struct CodeFragments {
    u32 upper[NUM_TILES][2][NUM_WORDS], lower[NUM_TILES][2][NUM_WORDS];

    __device__ __forceinline__ void load(u32 first, int row_bytes, int tile_bytes) {
#pragma unroll
        for (int i = 0; i < 2 * NUM_TILES; i++) {
            const u32 at = first + i / 2 * tile_bytes + i % 2 * row_bytes;
            ld_shared(upper[i / 2][i % 2], at);
            if (BITS == 8) ld_shared(lower[i / 2][i % 2], at + PLANE_BYTES);
        }
    }
    __device__ __forceinline__ void unpack_word(u32 (&pairs)[NUM_TILES][2][4], int w) const {
#pragma unroll
        for (int i = 0; i < 2 * NUM_TILES; i++)
            unpack(pairs[i / 2][i % 2], upper[i / 2][i % 2][w], BITS == 8 ? lower[i / 2][i % 2][w] : 0);
    }
};

// Products of the warp's 32 tokens of a group with all query rows.
__device__ __forceinline__ void multiply_keys(float (&x)[2][Q_TILES][4], u32 stage, const ThreadLayout& thread) {
    constexpr int AT_ONCE = Q_TILES < 4 ? 2 : 1;  // 16-token tiles whose codes registers hold
#pragma unroll
    for (int i = 0; i < 8 * Q_TILES; i++) x[i / (4 * Q_TILES)][i / 4 % Q_TILES][i % 4] = 0;
#pragma unroll
    for (int tile = 0; tile < 2; tile += AT_ONCE) {
        CodeFragments<AT_ONCE, WORDS> codes;
        codes.load(stage + thread.key_codes + tile * 64 * HEAD_DIM / 2, HEAD_DIM / 2, 64 * HEAD_DIM / 2);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 a[AT_ONCE][2][4];
            codes.unpack_word(a, w);
#pragma unroll
            for (int t = 0; t < Q_TILES; t++) {
                u32 b[4];
                ld_shared(b, thread.q_fragments + (t * WORDS + w) * 512);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int h = 0; h < AT_ONCE; h++)
                        mma_half(x[tile + h][t], a[h][0][2 * n], a[h][1][2 * n], a[h][0][2 * n + 1],
                                 a[h][1][2 * n + 1], b[2 * n], b[2 * n + 1]);
            }
        }
    }
}

// From products to base-2 scores relative to the rows' references.
__device__ __forceinline__ void scale_scores(
    float (&x)[2][Q_TILES][4], const QueryRows& rows, const ThreadLayout& thread
) {
#pragma unroll
    for (int t = 0; t < Q_TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (thread.lane % 4) + e;
            const float scale = rows.score_scale[row];
            float bias = rows.score_bias[0][row];
#pragma unroll
            for (int part = 1; part < SCALE_WARPS; part++) bias += rows.score_bias[part][row];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i / 2][t][i % 2 * 2 + e] = fmaf(x[i / 2][t][i % 2 * 2 + e], scale, bias);
        }
}

// Adds a group's values times probabilities, for the warp's channels.
__device__ __forceinline__ void add_values(Accumulator& sums, u32 stage, const ThreadLayout& thread) {
    CodeFragments<OUT_TILES, 4> codes;
    codes.load(stage + thread.value_codes, 8 * GROUP / 2, 16 * GROUP / 2);
    // Where a warp has one tile, its products form two chains, as each waits for the one before.
    constexpr bool TWO_CHAINS = OUT_TILES * Q_TILES == 1;
    float other[OUT_TILES][Q_TILES][4] = {};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 a[OUT_TILES][2][4];
        codes.unpack_word(a, w);
#pragma unroll
        for (int i = 0; i < 2 * OUT_TILES; i++) center(a[i / 2][i % 2]);
#pragma unroll
        for (int t = 0; t < Q_TILES; t++) {
            u32 b[4];
            ldmatrix(b, thread.p_fragments() + t * P_BYTES + w * 512);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int m = 0; m < OUT_TILES; m++)
                    mma_half(TWO_CHAINS && h ? other[m][t] : sums.out[m][t], a[m][0][2 * h], a[m][1][2 * h],
                             a[m][0][2 * h + 1], a[m][1][2 * h + 1], b[2 * h], b[2 * h + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4 && TWO_CHAINS; i++) sums.out[0][0][i] += other[0][0][i];
}

// Attends to groups `group` to `end` of a row, whose queries are the `num_rows` from `q` on.
__device__ __forceinline__ void attend_quantized(
    Accumulator& sums, KVPipeline& pipeline, QueryRows& rows, const DenseKV& dense, const u16* q, int num_rows,
    float scale, int group, int end, const ThreadLayout& thread
) {
    u32 own[OWN_TILES][OWN_WORDS][4];
    load_queries(own, rows, q, num_rows, scale, thread);
    __syncthreads();
    bool first = true;
#pragma unroll 1
    for (; group < end; group++) {
        float x[2][Q_TILES][4];
        u32 stage = pipeline.wait();
        scale_queries(rows, own, stage, thread);
        __syncthreads();  // queries and the last tile's scores are staged, and its values were read
        if (SCORES && !first) rows.store((group - 1) * GROUP, 32 * thread.warp + thread.lane);
        pipeline.refill_after_values(dense);
        multiply_keys(x, stage, thread);
        pipeline.advance();
        scale_scores(x, rows, thread);
        stage = pipeline.wait();
        ValueScales values;
        values.load(stage, thread);
        stage_probabilities(sums, x, rows, &values, thread.scored_token(), first, thread);
        pipeline.refill_after_keys(dense);
        add_values(sums, stage, thread);
        pipeline.advance();
        first = false;
    }
    if (!SCORES) return;
    __syncthreads();
    rows.store((end - 1) * GROUP, 32 * thread.warp + thread.lane);
}
