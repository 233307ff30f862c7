// Attention to full-precision tokens.
#pragma once

#include "kv_pipeline.cuh"
#include "softmax.cuh"

// Where a lane finds its part of a dense stage. A warp has two tokens of each piece: row g + 8r of its scores is token
// r of those it has of piece g.
struct DenseLayout {
    u32 keys, values;  // the latter for ldmatrix
    bool has_tokens;   // whether the warp has any

    __device__ __forceinline__ explicit DenseLayout(const ThreadLayout& thread)
        : has_tokens(16 * thread.warp < DENSE_TILE) {
        keys = ThreadLayout::opaque(
            thread.lane / 4 * KEY_PITCH + 2 * thread.warp * TOKEN_BYTES + thread.lane % 4 * 16);
        values = ThreadLayout::opaque(thread.lane % 8 * VALUE_PITCH + thread.lane / 16 * TOKEN_BYTES +
                                      thread.lane / 8 % 2 * 16 + 32 * OUT_TILES * thread.warp);
    }
};

// Stages the queries as B operands for full-precision keys: a lane's four words are of adjacent channels, as keys' are.
__device__ __forceinline__ void stage_queries(
    const QueryRows& rows, const u16* q, int num_rows, const ThreadLayout& thread
) {
#pragma unroll 1
    for (int at = thread.warp; at < Q_TILES * K_STEPS / 2; at += WARPS) {
        const int row = at / (K_STEPS / 2) * 8 + thread.lane / 4;
        u32 x[4] = {};
        if (row < num_rows) {
            const u32* from = reinterpret_cast<const u32*>(q + 8ll * rows.q_offset[row]);
            from += at % (K_STEPS / 2) * 16 + thread.lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = from[i];
        }
        st_shared(thread.q_fragments + at * 512, x);
    }
}

// Products of the warp's 16 tokens with all query rows; none where the tile is shorter.
__device__ __forceinline__ void multiply_dense_keys(
    float (&x)[1][Q_TILES][4], u32 stage, const DenseLayout& own, const ThreadLayout& thread
) {
#pragma unroll
    for (int i = 0; i < 4 * Q_TILES; i++) x[0][i / 4][i % 4] = 0;
    if (!own.has_tokens) return;
    const u32 keys = stage + own.keys;
#pragma unroll
    for (int s = 0; s < K_STEPS; s += 2) {
        u32 k[2][4];
        ld_shared(k[0], keys + 32 * s);
        ld_shared(k[1], keys + 32 * s + TOKEN_BYTES);
#pragma unroll
        for (int t = 0; t < Q_TILES; t++) {
            u32 b[4];
            ld_shared(b, thread.q_fragments + (t * K_STEPS + s) * 256);
            mma_elem(x[0][t], k[0][0], k[1][0], k[0][1], k[1][1], b[0], b[1]);
            mma_elem(x[0][t], k[0][2], k[1][2], k[0][3], k[1][3], b[2], b[3]);
        }
    }
}

// From products to base-2 scores relative to the rows' references, for a lane's tokens from slot `slot` on. What a row
// does not see is masked, and so is all that warps without tokens have.
__device__ __forceinline__ void scale_and_mask(
    float (&x)[1][Q_TILES][4], const QueryRows& rows, float scale, int slot, const DenseLayout& own,
    const ThreadLayout& thread
) {
#pragma unroll
    for (int t = 0; t < Q_TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (thread.lane % 4) + e;
            const int visible = own.has_tokens ? rows.dense_end[row] - slot : 0;
            const float bias = LOG2_P_SCALE - rows.row_max[row];
#pragma unroll
            for (int r = 0; r < 2; r++)
                x[0][t][2 * r + e] = r < visible ? fmaf(x[0][t][2 * r + e], scale, bias) : negative_infinity();
        }
}

// Adds full-precision values times probabilities, for the warp's channels.
__device__ __forceinline__ void add_dense_values(
    Accumulator& sums, u32 stage, const DenseLayout& own, const ThreadLayout& thread
) {
    const u32 values = stage + own.values;
#pragma unroll
    for (int s = 0; s < DENSE_TILE / 16; s++) {
        u32 a[OUT_TILES][4];
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) ldmatrix_trans(a[m], values + 2 * s * TOKEN_BYTES + 32 * m);
#pragma unroll
        for (int t = 0; t < Q_TILES; t++) {
            u32 b[2];
            ldmatrix(b, thread.p_fragments() + t * P_BYTES + s * 512);
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++)
                mma_elem(sums.out[m][t], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
        }
    }
}

// Stores the scores of a tile that begins at `slot`, a token per thread; all queries see what the first one does.
__device__ __forceinline__ void store_dense_scores(const QueryRows& rows, int slot, const ThreadLayout& thread) {
    const int token = 32 * thread.warp + thread.lane;
    if (token < DENSE_TILE && slot + token < rows.dense_end[0]) rows.store(slot, token);
}

// Attends to `tiles` dense tiles from slot `slot` on; `first`: nothing was attended to before. scale: to base 2.
__device__ __forceinline__ void attend_dense(
    Accumulator& sums, KVPipeline& pipeline, QueryRows& rows, const DenseKV& dense, const u16* q, int num_rows,
    float scale, int slot, int tiles, bool first, const ThreadLayout& thread
) {
    stage_queries(rows, q, num_rows, thread);
    const DenseLayout own(thread);
    const int token = thread.lane / 4 * PIECE + 2 * thread.warp;  // of a tile, the lane's first
#pragma unroll 1
    for (; tiles > 0; tiles--, slot += DENSE_TILE) {
        float x[1][Q_TILES][4];
        u32 stage = pipeline.wait();
        __syncthreads();  // queries and the last tile's scores are staged, and its values were read
        if (TokenScores<1>::WANTED && !first) store_dense_scores(rows, slot - DENSE_TILE, thread);
        pipeline.refill_after_values(dense);
        multiply_dense_keys(x, stage, own, thread);
        pipeline.advance();
        scale_and_mask(x, rows, scale, slot + token, own, thread);
        stage_probabilities(sums, x, rows, nullptr, token, first, thread);
        pipeline.refill_after_keys(dense);
        stage = pipeline.wait();
        add_dense_values(sums, stage, own, thread);
        pipeline.advance();
        first = false;
    }
    if (!TokenScores<1>::WANTED) return;
    __syncthreads();
    store_dense_scores(rows, slot - DENSE_TILE, thread);
}
