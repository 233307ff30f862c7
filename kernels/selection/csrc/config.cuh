// Compile-time configuration of the scan of 2-bit keys, and what follows from it.
#pragma once

#include "../../device/csrc/ptx.cuh"

// Set with -D by ScanVariant.options in scan_variant.py:
//   HEAD_DIM  64 or 128
//   BF16      dtype of q, keys, values and out: 1 bfloat16, 0 float16
//   HEADS     query heads of a KV head, 1 to 8
//   STAGE_BYTES  size of a ScanStage (scan_stage.cuh)
#ifndef __CUDACC_RTC__  // editors show one variant
#define HEAD_DIM 128
#define BF16 1
#define HEADS 4
#define STAGE_BYTES 4608
#endif

constexpr int GROUP = 128;  // tokens of a quantized group
constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int HALF_DIM = HEAD_DIM / 2, QUARTER = HEAD_DIM / 4;
constexpr int STAGES = 2;           // of a warp: groups that are being scanned or copied
constexpr int SAMPLES = 8;          // groups of a row that say how much each query head weighs
constexpr int STEPS_LOG2 = 3;      // bins of a score per power of two: 8, over all positive floats
constexpr int BINS = 256 << STEPS_LOG2;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

static_assert(HEADS >= 1 && HEADS <= 8, "query heads are the columns of one product");

using Elem = Element<BF16 != 0>;

__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_m16n8k16<false>(d, a0, a1, a2, a3, b0, b1);
}
// d += a * b of unsigned by signed bytes.
__device__ __forceinline__ void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The one of larger magnitude, with either sign.
__device__ __forceinline__ u32 max_abs_half2(u32 a, u32 b) {
    u32 d;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// From two words of adjacent halves (0,1) (2,3): the halves (0,2), and (1,3).
__device__ __forceinline__ u32 first_pair(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x5410); }
__device__ __forceinline__ u32 second_pair(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x7632); }

// N adjacent words. What other kernels may just have written is read from the L2 cache (`LATEST`): the SM's own may be
// older than the kernels that let this one start early.
template <bool LATEST, class T> __device__ __forceinline__ T load(const void* from) {
    const T* typed = reinterpret_cast<const T*>(from);
    return LATEST ? __ldcg(typed) : __ldg(typed);
}
template <bool LATEST = false, int N> __device__ __forceinline__ void load_words(u32 (&x)[N], const void* from) {
    if constexpr (N == 4) {
        const uint4 v = load<LATEST, uint4>(from);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if constexpr (N == 2) {
        const uint2 v = load<LATEST, uint2>(from);
        x[0] = v.x, x[1] = v.y;
    } else {
        static_assert(N == 1, "one, two or four words");
        x[0] = load<LATEST, u32>(from);
    }
}
