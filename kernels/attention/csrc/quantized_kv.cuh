// Attention to quantized groups: unpacking codes, and the products with them.
#pragma once

#include "kv_pipeline.cuh"
#include "softmax.cuh"

// Unpacked codes of values less their offset, exactly: INT8 16 (U - 8) + L; INT4 U - 8, in [2] and [3] times 16.
// Offsets left in would have to cancel in sums over all tokens, which tensor cores truncate.
template <class Config> __device__ __forceinline__ void center(u32 (&pairs)[4]) {
    constexpr u32 LOW = half2_constant(Config::BITS == 8 ? -1160 : -1032);
    constexpr u32 HIGH = half2_constant(Config::BITS == 8 ? -1160 : -1152);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = add_half2(pairs[i], i < 2 ? LOW : HIGH);
}
// The offset of key codes is cancelled within a group, in sums over the channels: by a product of the same scaled
// queries with this constant. INT8: -1032 / 16, so that 16 U + L remains.
template <class Config> constexpr u32 KEY_OFFSET = half2_constant(Config::BITS == 8 ? -1032.0 / 16 : -1024);

// A warp's queries as B operands in the codes' order, in halves. Each row is divided by a power of two that brings it
// to [-1, 1], so that q S of finite scales cannot overflow; the power goes into the row's score scale.
template <class Config> __device__ __forceinline__ void load_queries(
    u32 (&q_pairs)[Config::SCALED_TILES][Config::SCALED_WORDS][4], QueryRows<Config>& rows, const u16* q, int num_rows,
    float scale, const ThreadLayout<Config>& thread
) {
    const int g = thread.lane / 4, c = thread.lane % 4, part = thread.warp % Config::SCALE_WARPS;
#pragma unroll
    for (int j = 0; j < Config::SCALED_TILES; j++) {
        const int row = 8 * (thread.warp / Config::SCALE_WARPS * Config::SCALED_TILES + j) + g;
        const bool exists = row < num_rows;
        const u32* from =
            reinterpret_cast<const u32*>(q + 8ll * rows.q_offset[exists ? row : 0]) + 2 * Config::WORDS * c;
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * Config::WORDS; i++) {
            const u32 pair = from[Config::HEAD_DIM / 4 * (i / (2 * Config::WORDS)) + i % (2 * Config::WORDS)];
            largest = fmaxf(
                largest, fmaxf(fabsf(Config::Elem::to_float(u16(pair))), fabsf(Config::Elem::to_float(u16(pair >> 16))))
            );
        }
        const int exponent = exponent_above(quad_max(largest));
        const float shrink = exists ? power_of_two(-exponent) : 0;
#pragma unroll
        for (int i = 0; i < 2 * Config::SCALED_WORDS; i++) {
            const int w = i / 2, h = i % 2;
            const u32* pairs = from + Config::HEAD_DIM / 4 * h + 2 * (part * Config::SCALED_WORDS + w);
            const u32 p0 = pairs[0], p1 = pairs[1];
            const u32 x0 = floats_to_half2(
                Config::Elem::to_float(u16(p0)) * shrink, Config::Elem::to_float(u16(p0 >> 16)) * shrink
            );
            const u32 x1 = floats_to_half2(
                Config::Elem::to_float(u16(p1)) * shrink, Config::Elem::to_float(u16(p1 >> 16)) * shrink
            );
            q_pairs[j][w][2 * h] = pack_low_halves(x0, x1);
            q_pairs[j][w][2 * h + 1] = pack_high_halves(x0, x1);
        }
        if (row < Config::ROWS && c == 0)
            rows.score_scale[row] = scale * LOG2_E * power_of_two(exponent) / (Config::BITS == 8 ? 16 : 1);
    }
}

// Stages queries times the group's key scales as B operands, and starts the scores at q . Z less what the codes'
// offsets will add. `stage`: the group's keys.
template <class Config> __device__ __forceinline__ void scale_queries(
    QueryRows<Config>& rows, const u32 (&q_pairs)[Config::SCALED_TILES][Config::SCALED_WORDS][4], u32 stage,
    const ThreadLayout<Config>& thread
) {
    const int part = thread.warp % Config::SCALE_WARPS,
              first_tile = thread.warp / Config::SCALE_WARPS * Config::SCALED_TILES;
    if (first_tile >= Config::Q_TILES) return;
    // Eight of each product's sixteen rows are the same. Rows of minima: channels of low nibbles, then of high ones; so
    // of [0] (queries of low nibbles) the first rows count, of [1] the last.
    constexpr u32 OFFSET = KEY_OFFSET<Config>;
    float minima[Config::SCALED_TILES][2][4] = {}, offsets[Config::SCALED_TILES][2][4] = {};
#pragma unroll
    for (int w = 0; w < Config::SCALED_WORDS; w++) {
        u32 scale[2][2], low[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ld_shared(scale[h], stage + thread.key_scales + 8 * w + Config::HEAD_DIM * h);
            ld_shared(low[h], stage + thread.key_scales + 2 * Config::HEAD_DIM + 8 * w + Config::HEAD_DIM * h);
#pragma unroll
            for (int i = 0; i < 2 && Config::BITS == 4 && h == 1; i++)
                scale[h][i] = mul_half2(scale[h][i], HALF2_SIXTEENTH);
        }
        const u32 z0 = pack_low_halves(low[0][0], low[0][1]), z1 = pack_high_halves(low[0][0], low[0][1]);
        const u32 z2 = pack_low_halves(low[1][0], low[1][1]), z3 = pack_high_halves(low[1][0], low[1][1]);
#pragma unroll
        for (int j = 0; j < Config::SCALED_TILES; j++) {
            const u32(&q)[4] = q_pairs[j][w];
            u32 scaled[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scaled[2 * h] = mul_half2(q[2 * h], pack_low_halves(scale[h][0], scale[h][1]));
                scaled[2 * h + 1] = mul_half2(q[2 * h + 1], pack_high_halves(scale[h][0], scale[h][1]));
                Half::mma(minima[j][h], z0, z2, z1, z3, q[2 * h], q[2 * h + 1]);
                Half::mma(offsets[j][h], OFFSET, OFFSET, OFFSET, OFFSET, scaled[2 * h], scaled[2 * h + 1]);
            }
            const u32 fragment = (first_tile + j) * Config::WORDS + part * Config::SCALED_WORDS + w;
            if constexpr (Config::WARPGROUP) stmatrix(thread.q_fragments + 512 * fragment, scaled);
            else st_shared(thread.q_fragments + 512 * fragment, scaled);
        }
    }
    if constexpr (Config::WARPGROUP) fence_proxy_async();
    if (thread.lane >= 4) return;
#pragma unroll
    for (int j = 0; j < Config::SCALED_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * (first_tile + j) + 2 * thread.lane + e;
            const float origin = (minima[j][0][e] + minima[j][1][2 + e]) + (offsets[j][0][e] + offsets[j][1][e]);
            // INT8 codes count sixteenths.
            const float bias = origin * (Config::BITS == 8 ? 16 : 1) * rows.score_scale[row];
            rows.score_bias[part][row] = part == 0 ? bias + Config::LOG2_P_SCALE - rows.row_max[row] : bias;
        }
}

// A lane's codes of two rows of some 16-row tiles, a few words of each row.
//
//     keys: row = token, HEAD_DIM / 2 bytes; lane c has words WORDS c .. WORDS c + WORDS - 1
//                 bytes  0 .. 4 WORDS - 1  | 4 WORDS ..   |              |
//     token of g         c = 0             | c = 1        | c = 2        | c = 3
//     token of g + 8     c = 0             | ...
//
//     values: row = channel, 64 bytes; lane c has words 4 c .. 4 c + 3: tokens 16 c .. 16 c + 15 in
//     low nibbles, and those 64 further on in high nibbles
template <class Config, int NUM_TILES, int NUM_WORDS> struct CodeFragments {
    u32 upper[NUM_TILES][2][NUM_WORDS], lower[NUM_TILES][2][NUM_WORDS];

    __device__ __forceinline__ void load(u32 first, int row_bytes, int tile_bytes) {
#pragma unroll
        for (int i = 0; i < 2 * NUM_TILES; i++) {
            const u32 at = first + i / 2 * tile_bytes + i % 2 * row_bytes;
            ld_shared(upper[i / 2][i % 2], at);
            if (Config::BITS == 8) ld_shared(lower[i / 2][i % 2], at + Config::PLANE_BYTES);
        }
    }
    __device__ __forceinline__ void unpack_word(u32 (&pairs)[NUM_TILES][2][4], int w) const {
#pragma unroll
        for (int i = 0; i < 2 * NUM_TILES; i++)
            if constexpr (Config::BITS == 8)
                unpack_int8(pairs[i / 2][i % 2], upper[i / 2][i % 2][w], lower[i / 2][i % 2][w]);
            else unpack_int4(pairs[i / 2][i % 2], upper[i / 2][i % 2][w]);
    }
};

// Sets `sums` to the products of word `w` of a 16-row tile of each warp with all query rows, or adds them. Those of one
// word may still be in flight afterwards.
template <int Q_TILES> __device__ __forceinline__ void multiply_together(
    float (&sums)[Q_TILES][4], const u32 (&a)[2][4], const WarpgroupOperand& rows, int w, bool add
) {
    wgmma_fence();
#pragma unroll
    for (int h = 0; h < 2; h++)
        wgmma_m64k16(sums, a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1], rows.at(512 * w + 256 * h),
                     add || h);
    wgmma_commit();
    wgmma_wait<1>();
}

// Products of the warp's 32 tokens of a group with all query rows.
template <class Config> __device__ __forceinline__ void multiply_keys(
    float (&x)[2][Config::Q_TILES][4], u32 stage, const ThreadLayout<Config>& thread
) {
    constexpr int AT_ONCE = Config::WARPGROUP || Config::Q_TILES >= 4 ? 1 : 2;  // 16-token tiles in registers
    const WarpgroupOperand queries(thread.staged, Config::WORDS * 512);
#pragma unroll
    for (int i = 0; i < 8 * Config::Q_TILES && !Config::WARPGROUP; i++)
        x[i / (4 * Config::Q_TILES)][i / 4 % Config::Q_TILES][i % 4] = 0;
#pragma unroll
    for (int tile = 0; tile < 2; tile += AT_ONCE) {
        CodeFragments<Config, AT_ONCE, Config::WORDS> codes;
        codes.load(
            stage + thread.key_codes + tile * 64 * Config::HEAD_DIM / 2, Config::HEAD_DIM / 2, 64 * Config::HEAD_DIM / 2
        );
#pragma unroll
        for (int w = 0; w < Config::WORDS; w++) {
            u32 a[AT_ONCE][2][4];
            codes.unpack_word(a, w);
            if constexpr (Config::WARPGROUP) multiply_together(x[tile], a[0], queries, w, w > 0);
#pragma unroll
            for (int t = 0; t < Config::Q_TILES && !Config::WARPGROUP; t++) {
                u32 b[4];
                ld_shared(b, thread.q_fragments + (t * Config::WORDS + w) * 512);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int h = 0; h < AT_ONCE; h++)
                        Half::mma(x[tile + h][t], a[h][0][2 * n], a[h][1][2 * n], a[h][0][2 * n + 1],
                                 a[h][1][2 * n + 1], b[2 * n], b[2 * n + 1]);
            }
        }
    }
    if constexpr (Config::WARPGROUP) wgmma_wait<0>();
}

// From products to base-2 scores relative to the rows' references.
template <class Config> __device__ __forceinline__ void scale_scores(
    float (&x)[2][Config::Q_TILES][4], const QueryRows<Config>& rows, const ThreadLayout<Config>& thread
) {
#pragma unroll
    for (int t = 0; t < Config::Q_TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (thread.lane % 4) + e;
            const float scale = rows.score_scale[row];
            float bias = rows.score_bias[0][row];
#pragma unroll
            for (int part = 1; part < Config::SCALE_WARPS; part++) bias += rows.score_bias[part][row];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i / 2][t][i % 2 * 2 + e] = fmaf(x[i / 2][t][i % 2 * 2 + e], scale, bias);
        }
}

// Adds a group's values times probabilities, for the warp's channels.
template <class Config>
__device__ __forceinline__ void add_values(Accumulator<Config>& sums, u32 stage, const ThreadLayout<Config>& thread) {
    constexpr int AT_ONCE = Config::WARPGROUP ? 1 : Config::OUT_TILES;  // 16-channel tiles in registers
    // Where a warp has one tile, its products form two chains, as each waits for the one before.
    constexpr bool TWO_CHAINS = Config::OUT_TILES * Config::Q_TILES == 1;
    const WarpgroupOperand probabilities(thread.staged + Config::Q_BYTES, Config::P_BYTES);
    float other[Config::OUT_TILES][Config::Q_TILES][4] = {};
#pragma unroll
    for (int tile = 0; tile < Config::OUT_TILES; tile += AT_ONCE) {
        CodeFragments<Config, AT_ONCE, 4> codes;
        codes.load(
            stage + thread.value_codes + tile * 16 * Config::GROUP / 2, 8 * Config::GROUP / 2, 16 * Config::GROUP / 2
        );
#pragma unroll
        for (int w = 0; w < 4; w++) {
            u32 a[AT_ONCE][2][4];
            codes.unpack_word(a, w);
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; i++) center<Config>(a[i / 2][i % 2]);
            if constexpr (Config::WARPGROUP) multiply_together(sums.out[tile], a[0], probabilities, w, true);
#pragma unroll
            for (int t = 0; t < Config::Q_TILES && !Config::WARPGROUP; t++) {
                u32 b[4];
                ldmatrix(b, thread.p_fragments() + t * Config::P_BYTES + w * 512);
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int m = 0; m < AT_ONCE; m++)
                        Half::mma(TWO_CHAINS && h ? other[m][t] : sums.out[tile + m][t], a[m][0][2 * h], a[m][1][2 * h],
                                 a[m][0][2 * h + 1], a[m][1][2 * h + 1], b[2 * h], b[2 * h + 1]);
            }
        }
    }
    if constexpr (Config::WARPGROUP) wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4 && TWO_CHAINS; i++) sums.out[0][0][i] += other[0][0][i];
}

// Attends to groups `group` to `end` of a row, whose queries are the `num_rows` from `q` on.
template <class Config> __device__ __forceinline__ void attend_quantized(
    Accumulator<Config>& sums, KVPipeline<Config>& pipeline, QueryRows<Config>& rows, const DenseKV& dense,
    const u16* q, int num_rows, float scale, int group, int end, const ThreadLayout<Config>& thread
) {
    u32 q_pairs[Config::SCALED_TILES][Config::SCALED_WORDS][4];
    load_queries(q_pairs, rows, q, num_rows, scale, thread);
    __syncthreads();
    bool first = true;
#pragma unroll 1
    for (; group < end; group++) {
        float x[2][Config::Q_TILES][4];
        u32 stage = pipeline.wait();
        scale_queries(rows, q_pairs, stage, thread);
        __syncthreads();  // queries and the last tile's scores are staged, and its values were read
        if (Config::SCORES && !first) rows.store((group - 1) * Config::GROUP, 32 * thread.warp + thread.lane);
        pipeline.refill_after_values(dense);
        multiply_keys(x, stage, thread);
        pipeline.advance();
        scale_scores(x, rows, thread);
        stage = pipeline.wait();
        ValueScales<Config> values;
        values.load(stage, thread);
        stage_probabilities(sums, x, rows, &values, thread.scored_token(), first, thread);
        pipeline.refill_after_keys(dense);
        add_values(sums, stage, thread);
        pipeline.advance();
        first = false;
    }
    if (!Config::SCORES) return;
    __syncthreads();
    rows.store((end - 1) * Config::GROUP, 32 * thread.warp + thread.lane);
}
