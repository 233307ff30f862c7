// Configuration and parameters of attention to chosen tokens. The headers beside this one are templates on such a
// struct.
#pragma once

#include "../../selection/csrc/config.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_TILE_BYTES 3072
#endif

// Beside the scan of 2-bit keys.
struct SparseConfig : ScanConfig {
    static constexpr int TILE_BYTES = CONFIG_TILE_BYTES;  // size of a TokenTile, as the launch computes it
    static constexpr int TILE = 16;                       // tokens that a warp attends to at a time
    static constexpr int TILES = 3;                       // of a warp, TILES - 1 of them in flight
    static constexpr int OUT_TILES = HEAD_DIM / 16;       // of 16 channels: eight of the lower half, eight of the upper
    static constexpr int MAX_GROUPS = THREADS;            // of a CTA of progressive.cu: each has a thread
};

// SparseParams in sparse_attention/cuda.py has the same layout. A row is a (batch row, KV head); entries are those of
// PartialEntry.
struct SparseParams {
    const u16* q;                     // [batch, q_heads, HEAD_DIM], by the strides below
    const u16 *keys, *values;         // [batch, kv_heads, capacity, HEAD_DIM]: full-precision slots
    const int *begin, *end, *groups;  // [batch]: visible full-precision slots, visible quantized groups
    u32* arrivals;                    // [row], zero before and after the call
    float* partial;                   // [row, part, entry], relative to part_max
    float *part_max, *part_sum;       // [row, part, HEADS]
    u16* out;                         // [batch, q_heads, HEAD_DIM]
    const u8* value_rows;             // [row, group_capacity, GROUP, HEAD_DIM / 2]: 4-bit values by tokens
    QuantizedPlanes key_codes, value_codes;
    // Of an index list: pages of `page` tokens [batch, sets, index_capacity], and how many are listed [batch, sets].
    const int *index, *count;
    // Of progressive attention: how many tokens to choose [batch]; 2-bit keys [row, group_capacity, GROUP, HEAD_DIM /
    // 4].
    const int* k;
    const u8* two_bit;
    float* middles;  // [row, group_capacity, COLUMN_HEADS]: see Scan::scale_queries
    int batch, kv_heads, capacity, group_capacity;
    int parts;  // CTAs of a row
    int sinks;  // first tokens, which progressive attention always chooses
    int sets, index_capacity, page;
    // Strides in units of 8 elements, so that they fit 32 bits.
    int q_batch_stride, q_head_stride;
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
    float scale;  // softmax scale
};
