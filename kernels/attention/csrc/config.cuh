// Compile-time configuration of the attention kernels, and what follows from it.
#pragma once

#include "../../device/csrc/ptx.cuh"

// Set with -D by AttentionVariant.options in schedule.py:
//   HEAD_DIM     64 or 128
//   BITS         of the quantized groups: 0 none, 4 upper codes, 8 upper and lower codes
//   BF16         dtype of q, keys, values and out: 1 bfloat16, 0 float16
//   Q_TILES      8-row tiles of query rows; a query row is one query of one query head of the KV head
//   CTAS_PER_SM  resident at once
//   STAGES       of the pipeline, each of which holds the keys or the values of a KV tile
//   DENSE_TILE   full-precision tokens of a KV tile: 32 or 64
//   SCORES       left of each token: 0 nothing, 1 a sum of logits, 2 of probabilities (scores.cuh)
//   KERNEL_ATTEND or KERNEL_MERGE: which of the two kernels is compiled
//   MERGE_PARTS  groups of threads of `merge` among which the splits of a query row are divided: 1, 4 or 16
#ifndef __CUDACC_RTC__  // editors show one variant
#define HEAD_DIM 128
#define BITS 8
#define BF16 1
#define Q_TILES 1
#define CTAS_PER_SM 4
#define STAGES 4
#define DENSE_TILE 64
#define SCORES 0
#define KERNEL_ATTEND
#define MERGE_PARTS 16
#endif

constexpr int GROUP = 128;  // tokens of a quantized group
constexpr int SUM_LOGITS = 1, SUM_PROBABILITIES = 2;  // values of SCORES
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int MERGE_GROUPS = 16;  // of threads in a CTA of the kernel `merge`, each with some splits of a query row
struct Config {
    static constexpr int GROUP = ::GROUP, THREADS = ::THREADS, MERGE_GROUPS = ::MERGE_GROUPS;
};
constexpr int ROWS = 8 * Q_TILES;
constexpr int WORDS = HEAD_DIM / 32;      // 32-bit words of codes that a lane holds of one token
constexpr int K_STEPS = HEAD_DIM / 16;    // mma steps over all channels
constexpr int OUT_TILES = HEAD_DIM / 64;  // 16-channel tiles of the output that a warp owns
constexpr int PLANE_BYTES = GROUP * HEAD_DIM / 2;
constexpr int CODE_BYTES = PLANE_BYTES * (BITS / 4);
constexpr int TOKEN_BYTES = 2 * HEAD_DIM;  // of a full-precision token
// A dense tile lies in eight pieces, each of which one bulk copy may fill. A warp reads one place of several pieces
// together, so pieces are padded: 64 bytes make 16-byte reads of keys free of bank conflicts, ldmatrix of values needs
// 16 bytes. But copies that cross lines are slow: without codes, where copies are all there is, values keep 64 bytes
// and bear the conflicts.
constexpr int PIECE = DENSE_TILE / 8;
constexpr int KEY_PITCH = PIECE * TOKEN_BYTES + 64, VALUE_PITCH = PIECE * TOKEN_BYTES + (BITS ? 16 : 64);
constexpr int STAGE_BYTES = DENSE_TILE * TOKEN_BYTES + 512;
constexpr int Q_BYTES = ROWS * HEAD_DIM * 2;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOG2_P_SCALE = 5.0f;  // probabilities are stored times 2^5, so that fp16 resolves small ones
// A score may exceed the row's reference by 2^8 before sums are rescaled: probabilities up to 2^13, in either dtype.
constexpr u32 MAX_P_HALF = 0x7000, MAX_P_BF16 = 0x4600;

static_assert(STAGES >= 2, "one is read while all others are being filled");
static_assert(BITS == 0 || CODE_BYTES + 512 <= STAGE_BYTES, "codes and their scales fit a stage");
static_assert(8 * KEY_PITCH <= STAGE_BYTES, "full-precision tokens fit a stage");

using Elem = Element<BF16 != 0>;

__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_m16n8k16<false>(d, a0, a1, a2, a3, b0, b1);
}
__device__ __forceinline__ void mma_elem(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_m16n8k16<BF16 != 0>(d, a0, a1, a2, a3, b0, b1);
}
