// A lane's part of the queries: lane 4 g + c takes some channels of query head g, four adjacent ones of each of several
// runs.
#pragma once

#include "config.cuh"

// Places of the runs: PLANES equal parts of the channels (those that share a byte), WORDS adjacent words in each.
template <int PLANES> struct Runs {
    static constexpr int WORDS = HEAD_DIM / PLANES / 16, COUNT = PLANES * WORDS;
    // First channel of run i: lane c's words of codes hold the bytes 4 * WORDS * c + 4 w of each part.
    __device__ __forceinline__ static int channel(int i, int c) {
        return i / WORDS * (HEAD_DIM / PLANES) + 4 * WORDS * c + 4 * (i % WORDS);
    }
};

// The row's queries in shared memory. Rows are apart by a piece of 16 bytes, so that lanes that read one channel of
// several heads use different banks.
struct __align__(16) Queries {
    u16 of_head[HEADS][HEAD_DIM + 8];

    // From the row's first head on, by one warp: each CTA reads them once, as all CTAs of a row read the same few sectors
    // of the L2 cache. head_stride: in units of 8 elements.
    __device__ __forceinline__ void copy(const u16* first, int head_stride) {
        constexpr int PIECES = HEAD_DIM / 8;
        for (int i = threadIdx.x % 32; i < HEADS * PIECES; i += 32) {
            u32 x[4];
            load_words<true>(x, first + (i64(i / PIECES) * head_stride + i % PIECES) * 8);
            st_shared(&of_head[i / PIECES][i % PIECES * 8], x);
        }
    }
};

// 2 ** exponent is at least the largest |q| of the lane's head, so that q / 2 ** exponent times finite scales is finite.
struct Query {
    const u16* q;  // of the lane's head, in shared memory; any other, if the head does not exist
    bool exists;
    int exponent;

    __device__ __forceinline__ Query(const Queries& queries) {
        const int g = threadIdx.x % 32 / 4;
        exists = g < HEADS;
        q = queries.of_head[exists ? g : 0];
        float largest = 0;
#pragma unroll
        for (int i = 0; i < HEAD_DIM; i += 32) {
            u32 x[4];
            ld_shared(x, q + i + threadIdx.x % 4 * 8);
#pragma unroll
            for (int j = 0; j < 4; j++)
                largest = fmaxf(largest, fmaxf(fabsf(Elem::low_to_float(x[j])), fabsf(Elem::high_to_float(x[j]))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
        exponent = max((__float_as_int(largest) >> 23) - 126, -60);
    }
};

// The lanes' channels as halves, relative to 2 ** exponent, in shared memory: all warps need the same.
struct __align__(16) LaneQueries {
    static constexpr int COUNT = HEAD_DIM / 16;  // runs of four channels
    u32 words[COUNT / 2][32][4];

    // Stores this lane's runs: in their order, or as the pairs (0,2) and (1,3), in which masks leave unpacked codes.
    template <int PLANES, bool PAIRS> __device__ __forceinline__ void store(const Query& query) {
        static_assert(Runs<PLANES>::COUNT == COUNT, "the runs are all channels of a lane");
        const float shrink = query.exists ? power_of_two(-query.exponent) : 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            u32 x[2], y[2];
            ld_shared(x, query.q + Runs<PLANES>::channel(i, threadIdx.x % 4));
#pragma unroll
            for (int h = 0; h < 2; h++)
                y[h] = floats_to_half2(Elem::low_to_float(x[h]) * shrink, Elem::high_to_float(x[h]) * shrink);
            u32* const to = words[i / 2][threadIdx.x % 32] + i % 2 * 2;
            to[0] = PAIRS ? first_pair(y[0], y[1]) : y[0], to[1] = PAIRS ? second_pair(y[0], y[1]) : y[1];
        }
    }
    __device__ __forceinline__ void load(u32 (&own)[COUNT][2]) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            u32 x[4];
            ld_shared(x, words[i / 2][threadIdx.x % 32]);
            own[i][0] = x[0], own[i][1] = x[1], own[i + 1][0] = x[2], own[i + 1][1] = x[3];
        }
    }
};
