// Compile-time configuration of the kernel of top-k and top-p, and what follows from it.
#pragma once

#include "../../device/csrc/ptx.cuh"

// Set with -D by TopKVariant.options in top_k_top_p_cuda.py:
//   ELEMENT  dtype of the logits: 0 float32, 1 bfloat16, 2 float16
//   CLUSTER  CTAs that share a row
//   ALIGNED  1 where rows are aligned to 16 bytes, so that cp.async copies them; else 0
#ifndef __CUDACC_RTC__  // editors show one variant
#define ELEMENT 1
#define CLUSTER 4
#define ALIGNED 1
#endif

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr int BINS_PER_THREAD = BINS / THREADS;
constexpr int LOWEST_BIT = ELEMENT == 0 ? 0 : ELEMENT == 1 ? 16 : 13;  // lowest bit of a key that distinguishes logits
constexpr int ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;
constexpr int PACK = 16 / ELEMENT_BYTES;  // logits that are read together
constexpr u32 PADDING = ELEMENT == 0 ? 0xFF800000u : ELEMENT == 1 ? 0xFF80FF80u : 0xFC00FC00u;  // minus infinity
constexpr float ROW_WEIGHT = 2147483648.0f;  // weight of a whole row in top-p's units

using Elem = Element<ELEMENT == 1>;
