// Compile-time configuration of the quantization kernel, and what follows from it.
#pragma once

#include "../../device/csrc/ptx.cuh"

// Set with -D by `options` in quantize_cuda.py:
//   HEAD_DIM  64 or 128
//   PLANES    1 upper codes, 2 upper and lower codes
//   BF16      dtype of keys and values: 1 bfloat16, 0 float16
#ifndef __CUDACC_RTC__  // editors show one variant
#define HEAD_DIM 128
#define PLANES 2
#define BF16 1
#endif

constexpr int GROUP = 128;              // tokens
constexpr int LANES = HEAD_DIM / 8;     // lanes per token; each holds 8 of its channels
constexpr int STREAMS = 16;             // tokens that a CTA reads at once
constexpr int TOKENS = GROUP / STREAMS;  // tokens per lane
constexpr int THREADS = STREAMS * LANES;
constexpr int WARPS = THREADS / 32;
constexpr int RESIDENT_THREADS = 768;  // per SM

using Elem = Element<BF16 != 0>;
