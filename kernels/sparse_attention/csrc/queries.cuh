// A lane's part of the queries, as halves. Lane 4 g + c holds some channels of query head g: four adjacent ones of each
// of COUNT runs, as the pairs (0,2) and (1,3), in which masks leave unpacked codes.
#pragma once

#include "config.cuh"
#include "params.cuh"

// Places of the runs: PLANES equal parts of the channels (those that share a byte), WORDS adjacent words in each.
template <int PLANES> struct Runs {
    static constexpr int WORDS = HEAD_DIM / PLANES / 16, COUNT = PLANES * WORDS;
    // First channel of run i: lane c's words of codes hold the bytes 4 * WORDS * c + 4 w of each part.
    __device__ __forceinline__ static int channel(int i, int c) {
        return i / WORDS * (HEAD_DIM / PLANES) + 4 * WORDS * c + 4 * (i % WORDS);
    }
};

// 2 ** exponent is at least the largest |q| of the lane's head, so that q / 2 ** exponent times finite scales is finite.
struct Query {
    const u16* q;  // of the lane's head; any other, if the head does not exist
    bool exists;
    int exponent;

    __device__ __forceinline__ Query(const ProgressiveParams& p, int b, int kv_head) {
        const int g = threadIdx.x % 32 / 4;
        exists = g < HEADS;
        const i64 head = i64(kv_head) * HEADS + (exists ? g : 0);
        q = p.q + (i64(b) * p.q_batch_stride + head * p.q_head_stride) * 8;
        float largest = 0;
        for (int i = threadIdx.x % 4 * 2; i < HEAD_DIM; i += 8) {
            const u32 pair = load<true, u32>(q + i);
            largest = fmaxf(largest, fmaxf(fabsf(Elem::low_to_float(pair)), fabsf(Elem::high_to_float(pair))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
        exponent = max((__float_as_int(largest) >> 23) - 126, -60);
    }
    template <int PLANES> __device__ __forceinline__ void scaled(u32 (&own)[Runs<PLANES>::COUNT][2]) const {
        const float shrink = exists ? power_of_two(-exponent) : 0;
#pragma unroll
        for (int i = 0; i < Runs<PLANES>::COUNT; i++) {
            u32 x[2], y[2];
            load_words<true>(x, q + Runs<PLANES>::channel(i, threadIdx.x % 4));
#pragma unroll
            for (int h = 0; h < 2; h++)
                y[h] = floats_to_half2(Elem::low_to_float(x[h]) * shrink, Elem::high_to_float(x[h]) * shrink);
            own[i][0] = first_pair(y[0], y[1]), own[i][1] = second_pair(y[0], y[1]);
        }
    }
};
