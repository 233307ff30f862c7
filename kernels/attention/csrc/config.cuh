// Configuration and parameters of the attention kernels. The headers beside this one are templates on such a struct.
#pragma once

#include "../../kv_cache/csrc/quantized_planes.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_HEAD_DIM 128
#define CONFIG_BITS 8
#define CONFIG_BF16 1
#define CONFIG_Q_TILES 1
#define CONFIG_CTAS_PER_SM 4
#define CONFIG_STAGES 4
#define CONFIG_DENSE_TILE 64
#define CONFIG_SCORES 0
#define CONFIG_PAGED 0
#define CONFIG_SINKS 0
#define CONFIG_WARPGROUP 0
#define CONFIG_MERGE_PARTS 16
#endif

struct AttentionConfig {
    // Compiled variant: AttentionVariant.options passes the value of each as -DCONFIG_NAME.
    static constexpr int HEAD_DIM = CONFIG_HEAD_DIM;        // 64 or 128
    static constexpr int BITS = CONFIG_BITS;                // of quantized groups: 0 none, 4 upper codes, 8 both planes
    static constexpr bool BF16 = CONFIG_BF16 != 0;          // dtype of q, keys, values and out: bfloat16 or float16
    static constexpr int Q_TILES = CONFIG_Q_TILES;          // 8-row tiles of query rows: a query of a query head each
    static constexpr int CTAS_PER_SM = CONFIG_CTAS_PER_SM;  // resident at once
    static constexpr int STAGES = CONFIG_STAGES;            // of the pipeline: the keys or the values of a KV tile each
    static constexpr int DENSE_TILE = CONFIG_DENSE_TILE;    // full-precision tokens of a KV tile: 32 or 64
    static constexpr int SCORES = CONFIG_SCORES;            // per token: 0 none, 1 a sum of logits, 2 of probabilities,
                                                            // 3 a sum of probabilities for each query
    static constexpr bool PAGED = CONFIG_PAGED != 0;        // whether a table has the page of each group
    static constexpr bool SINKS = CONFIG_SINKS != 0;        // whether a logit of each head joins its softmax
    static constexpr bool WARPGROUP = CONFIG_WARPGROUP != 0;  // whether warps multiply codes together (Hopper)
    static constexpr int MERGE_PARTS = CONFIG_MERGE_PARTS;  // groups of threads of `merge` per query row: 1, 4 or 16

    using Elem = Element<BF16>;
    static constexpr bool SUMS_LOGITS = SCORES == 1, SUMS_PROBABILITIES = SCORES >= 2;
    static constexpr bool SCORES_BY_QUERY = SCORES == 3;
    static constexpr int SCORED_QUERIES = SCORES_BY_QUERY ? 8 : 1;  // at most
    static constexpr int GROUP = KV_GROUP;
    static constexpr int WARPS = 4, THREADS = 32 * WARPS;
    static constexpr int ROWS = 8 * Q_TILES;
    static constexpr int WORDS = HEAD_DIM / 32;      // 32-bit words of codes that a lane holds of one token
    static constexpr int K_STEPS = HEAD_DIM / 16;    // mma steps over all channels
    static constexpr int OUT_TILES = HEAD_DIM / 64;  // 16-channel tiles of the output that a warp accumulates
    static constexpr int PLANE_BYTES = GROUP * HEAD_DIM / 2;
    static constexpr int CODE_BYTES = PLANE_BYTES * (BITS / 4);
    static constexpr int TOKEN_BYTES = 2 * HEAD_DIM;  // of a full-precision token

    // A dense tile lies in eight pieces, each of which one bulk copy may fill. A warp reads one place of several pieces
    // together, so pieces are padded: 64 bytes make 16-byte reads of keys free of bank conflicts, ldmatrix of values
    // needs 16 bytes. But copies that cross lines are slow: without codes, where copies are all there is, values keep
    // 64 bytes and bear the conflicts.
    static constexpr int PIECE = DENSE_TILE / 8;
    static constexpr int KEY_PITCH = PIECE * TOKEN_BYTES + 64, VALUE_PITCH = PIECE * TOKEN_BYTES + (BITS ? 16 : 64);
    static constexpr int STAGE_BYTES = DENSE_TILE * TOKEN_BYTES + 512;
    static constexpr int Q_BYTES = ROWS * HEAD_DIM * 2;  // staged queries
    static constexpr int P_BYTES = 8 * 2 * GROUP;        // staged probabilities of a query tile

    // Warps that share the scaling of a query tile by key scales; query tiles, and words of each, that a warp scales.
    static constexpr int SCALE_WARPS = Q_TILES >= 4 ? 1 : 4 / Q_TILES < WORDS ? 4 / Q_TILES : WORDS;
    static constexpr int SCALED_TILES = Q_TILES > 4 ? Q_TILES / 4 : 1;
    static constexpr int SCALED_WORDS = WORDS / SCALE_WARPS;

    static constexpr float LOG2_P_SCALE = 5.0f;  // probabilities are stored times 2^5, so that fp16 resolves small ones
    // A score may exceed the row's reference by 2^8 before sums are rescaled: probabilities up to 2^13, in either
    // dtype.
    static constexpr u32 MAX_P_HALF = 0x7000, MAX_P_BF16 = 0x4600;

    static constexpr int MERGE_GROUPS = 16;  // of threads in a CTA of `merge`, each with some splits of a query row
    static constexpr int LANE_CHANNELS = 4;  // of a row that a thread reduces
    static constexpr int ROW_LANES = HEAD_DIM / LANE_CHANNELS;

    static_assert(STAGES >= 2, "one is read while all others are being filled");
    static_assert(BITS == 0 || CODE_BYTES + 512 <= STAGE_BYTES, "codes and their scales fit a stage");
    static_assert(8 * KEY_PITCH <= STAGE_BYTES, "full-precision tokens fit a stage");
};

// AttentionParams in attention/cuda.py has the same layout. A query row is a query of a query head of the KV head.
struct AttentionParams {
    const u16* q;                     // [batch, queries, q_heads, HEAD_DIM], by the strides below
    const u16 *keys, *values;         // [batch, kv_heads, capacity, HEAD_DIM]: full-precision slots
    const int *begin, *end, *groups;  // [batch]: first slot, one past the first query's token, visible quantized groups
    float *partial, *lse;  // [split, query row, HEAD_DIM], and base-2 log-sum-exps [split, query row]
    int2* row_ctas;        // [batch, kv_heads]: first and last CTA, if the reduction is not fused
    u16* out;              // [batch, queries, q_heads, HEAD_DIM]
    u32* arrivals;         // [batch, kv_heads]: counters, zero before and after the call
    const int* pages;      // [batch, group_capacity] in rows of `page_stride`: of a paged cache, each group's page
    const int* buffers;    // [batch]: of a paged cache, the row of `keys` and `values` that a batch row has
    float* scores;         // [batch, kv_heads, score_queries, score_capacity], if the variant writes any
    float* score_lse;      // [batch, q_heads]: log-sum-exps of the last query: of the call before, then of this one
    const float* sinks;    // [q_heads], if the variant has any
    QuantizedPlanes key_codes, value_codes;
    int batch, kv_heads, q_heads_per_kv, queries, capacity, group_capacity;
    // Strides in units of 8 elements, so that they fit 32 bits.
    int q_batch_stride, q_query_stride, q_head_stride;
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
    int fuse_reduction;  // whether a row's last CTA reduces its splits; else the kernel `merge` does
    float scale;         // softmax scale
    int score_queries, score_capacity;
    int score_step;  // of the last query, and of each `score_step` before it, scores are summed
    int page_stride;

    // Log-sum-exps of the query heads of a (batch row, KV head).
    __device__ __forceinline__ float* row_score_lse(int kv_row) const {
        return score_lse + i64(kv_row) * q_heads_per_kv;
    }
};
