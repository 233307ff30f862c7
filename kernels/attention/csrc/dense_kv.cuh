// Attention to full-precision tokens.
#pragma once

#include "kv_pipeline.cuh"
#include "softmax.cuh"

// Where a lane finds its part of a dense stage. A warp scores two tokens of each piece: row g + 8r of its scores is
// token r of its two tokens of piece g.
//
//     DENSE_TILE = 64: PIECE = 8 tokens, of which warp w scores tokens 2 w and 2 w + 1
//     piece 0   | w0 w0 w1 w1 w2 w2 w3 w3 | padding      rows 0 and 8 of the warps' score tiles
//     piece 1   | w0 w0 w1 w1 w2 w2 w3 w3 | padding      rows 1 and 9
//     ...
template <class Config> struct DenseLayout {
    u32 keys, values;  // the latter for ldmatrix
    bool has_tokens;   // whether the warp has any

    __device__ __forceinline__ explicit DenseLayout(const ThreadLayout<Config>& thread)
        : has_tokens(16 * thread.warp < Config::DENSE_TILE) {
        keys = ThreadLayout<Config>::opaque(
            thread.lane / 4 * Config::KEY_PITCH + 2 * thread.warp * Config::TOKEN_BYTES + thread.lane % 4 * 16);
        values = ThreadLayout<Config>::opaque(
            thread.lane % 8 * Config::VALUE_PITCH + thread.lane / 16 * Config::TOKEN_BYTES + thread.lane / 8 % 2 * 16 +
            32 * Config::OUT_TILES * thread.warp
        );
    }
};

// Stages the queries as B operands for full-precision keys: a lane's four words are of adjacent channels, as keys' are.
template <class Config> __device__ __forceinline__ void stage_queries(
    const QueryRows<Config>& rows, const u16* q, int num_rows, const ThreadLayout<Config>& thread
) {
#pragma unroll 1
    for (int at = thread.warp; at < Config::Q_TILES * Config::K_STEPS / 2; at += Config::WARPS) {
        const int row = at / (Config::K_STEPS / 2) * 8 + thread.lane / 4;
        u32 x[4] = {};
        if (row < num_rows) {
            const u32* from = reinterpret_cast<const u32*>(q + 8ll * rows.q_offset[row]);
            from += at % (Config::K_STEPS / 2) * 16 + thread.lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = from[i];
        }
        st_shared(thread.q_fragments + at * 512, x);
    }
}

// Products of the warp's 16 tokens with all query rows; none where the tile is shorter.
template <class Config> __device__ __forceinline__ void multiply_dense_keys(
    float (&x)[1][Config::Q_TILES][4], u32 stage, const DenseLayout<Config>& layout, const ThreadLayout<Config>& thread
) {
#pragma unroll
    for (int i = 0; i < 4 * Config::Q_TILES; i++) x[0][i / 4][i % 4] = 0;
    if (!layout.has_tokens) return;
    const u32 keys = stage + layout.keys;
#pragma unroll
    for (int s = 0; s < Config::K_STEPS; s += 2) {
        u32 k[2][4];
        ld_shared(k[0], keys + 32 * s);
        ld_shared(k[1], keys + 32 * s + Config::TOKEN_BYTES);
#pragma unroll
        for (int t = 0; t < Config::Q_TILES; t++) {
            u32 b[4];
            ld_shared(b, thread.q_fragments + (t * Config::K_STEPS + s) * 256);
            Config::Elem::mma(x[0][t], k[0][0], k[1][0], k[0][1], k[1][1], b[0], b[1]);
            Config::Elem::mma(x[0][t], k[0][2], k[1][2], k[0][3], k[1][3], b[2], b[3]);
        }
    }
}

// From products to base-2 scores relative to the rows' references, for a lane's tokens from slot `slot` on. What a row
// does not see is masked, and so is all that warps without tokens have.
template <class Config> __device__ __forceinline__ void scale_and_mask(
    float (&x)[1][Config::Q_TILES][4], const QueryRows<Config>& rows, float scale, int slot,
    const DenseLayout<Config>& layout, const ThreadLayout<Config>& thread
) {
#pragma unroll
    for (int t = 0; t < Config::Q_TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (thread.lane % 4) + e;
            const int visible = layout.has_tokens ? rows.dense_end[row] - slot : 0;
            const float bias = Config::LOG2_P_SCALE - rows.row_max[row];
#pragma unroll
            for (int r = 0; r < 2; r++)
                x[0][t][2 * r + e] = r < visible ? fmaf(x[0][t][2 * r + e], scale, bias) : negative_infinity();
        }
}

// Adds full-precision values times probabilities, for the warp's channels.
template <class Config> __device__ __forceinline__ void add_dense_values(
    Accumulator<Config>& sums, u32 stage, const DenseLayout<Config>& layout, const ThreadLayout<Config>& thread
) {
    const u32 values = stage + layout.values;
#pragma unroll
    for (int s = 0; s < Config::DENSE_TILE / 16; s++) {
        u32 a[Config::OUT_TILES][4];
#pragma unroll
        for (int m = 0; m < Config::OUT_TILES; m++) ldmatrix_trans(a[m], values + 2 * s * Config::TOKEN_BYTES + 32 * m);
#pragma unroll
        for (int t = 0; t < Config::Q_TILES; t++) {
            u32 b[2];
            ldmatrix(b, thread.p_fragments() + t * Config::P_BYTES + s * 512);
#pragma unroll
            for (int m = 0; m < Config::OUT_TILES; m++)
                Config::Elem::mma(sums.out[m][t], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
        }
    }
}

// Stores the scores of a tile that begins at `slot`, a token per thread; all queries see what the first one does.
template <class Config> __device__ __forceinline__ void store_dense_scores(
    const QueryRows<Config>& rows, int slot, const ThreadLayout<Config>& thread
) {
    const int token = 32 * thread.warp + thread.lane;
    if (token < Config::DENSE_TILE && slot + token < rows.dense_end[0]) rows.store(slot, token);
}

// Attends to `tiles` dense tiles from slot `slot` on; `first`: nothing was attended to before. scale: to base 2.
template <class Config> __device__ __forceinline__ void attend_dense(
    Accumulator<Config>& sums, KVPipeline<Config>& pipeline, QueryRows<Config>& rows, const DenseKV& dense,
    const u16* q, int num_rows, float scale, int slot, int tiles, bool first, const ThreadLayout<Config>& thread
) {
    stage_queries(rows, q, num_rows, thread);
    const DenseLayout<Config> layout(thread);
    const int token = thread.lane / 4 * Config::PIECE + 2 * thread.warp;  // of a tile, the lane's first
#pragma unroll 1
    for (; tiles > 0; tiles--, slot += Config::DENSE_TILE) {
        float x[1][Config::Q_TILES][4];
        u32 stage = pipeline.wait();
        __syncthreads();  // queries and the last tile's scores are staged, and its values were read
        if (TokenScores<Config, 1>::ENABLED && !first) store_dense_scores(rows, slot - Config::DENSE_TILE, thread);
        pipeline.refill_after_values(dense);
        multiply_dense_keys(x, stage, layout, thread);
        pipeline.advance();
        scale_and_mask(x, rows, scale, slot + token, layout, thread);
        stage_probabilities<Config>(sums, x, rows, nullptr, token, first, thread);
        pipeline.refill_after_keys(dense);
        stage = pipeline.wait();
        add_dense_values(sums, stage, layout, thread);
        pipeline.advance();
        first = false;
    }
    if (!TokenScores<Config, 1>::ENABLED) return;
    __syncthreads();
    store_dense_scores(rows, slot - Config::DENSE_TILE, thread);
}
