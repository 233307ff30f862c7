// Queries as operands of products with codes. Lane 4 g + c takes some channels of query head g: runs of four adjacent
// channels, whose codes are the bytes of one word.
#pragma once

#include "../../device/csrc/dequant.cuh"
#include "../../device/csrc/warp.cuh"

// Runs of lane c where a byte holds codes of PLANES channels, HEAD_DIM / PLANES apart. A lane reads WORDS adjacent
// words of a token's codes, and each word has the codes of one run in each of the PLANES parts of the channels.
//
//     HEAD_DIM = 128, PLANES = 4 (2-bit codes): 32 bytes per token, WORDS = 2
//       byte of the token   0   4   8   12  16  20  24  28
//       word of lane c      c=0     c=1     c=2     c=3         channels of word w, lane c: part 0    8 c + 4 w + 0..3
//                           w=0 w=1 w=0 w=1 ...                                            part p    the same + 32 p
//     run i: part i / WORDS, word i % WORDS
template <class Config, int PLANES> struct Runs {
    static constexpr int WORDS = Config::HEAD_DIM / PLANES / 16, COUNT = PLANES * WORDS;
    // First channel of run i of lane c.
    __device__ __forceinline__ static int channel(int i, int c) {
        return i / WORDS * (Config::HEAD_DIM / PLANES) + 4 * WORDS * c + 4 * (i % WORDS);
    }
};

// The row's queries in shared memory. Heads are HEAD_DIM elements and 16 bytes apart, so that lanes that read one
// channel of several heads use different banks.
template <class Config> struct __align__(16) Queries {
    u16 of_head[Config::HEADS][Config::HEAD_DIM + 8];

    // From the row's first head on, by one warp: each CTA reads them once, as all CTAs of a row read the same few
    // sectors of the L2 cache. head_stride: in units of 8 elements.
    __device__ __forceinline__ void copy(const u16* first, int head_stride) {
        constexpr int PIECES = Config::HEAD_DIM / 8;
        for (int i = threadIdx.x % 32; i < Config::HEADS * PIECES; i += 32) {
            u32 x[4];
            load_words_l2(x, first + (i64(i / PIECES) * head_stride + i % PIECES) * 8);
            st_shared(&of_head[i / PIECES][i % PIECES * 8], x);
        }
    }
};

// The query head of a lane. 2^exponent is more than any |q|, so that q / 2^exponent times a finite scale is finite.
template <class Config> struct Query {
    const u16* q;  // [HEAD_DIM] in shared memory; of the first head if the lane's does not exist
    bool exists;
    int exponent;

    __device__ __forceinline__ Query(const Queries<Config>& queries) {
        using Elem = typename Config::Elem;
        const int head = threadIdx.x % 32 / 4 % Config::COLUMN_HEADS;
        exists = head < Config::HEADS;
        q = queries.of_head[exists ? head : 0];
        float largest = 0;
#pragma unroll
        for (int i = 0; i < Config::HEAD_DIM; i += 32) {
            u32 x[4];
            ld_shared(x, q + i + threadIdx.x % 4 * 8);
#pragma unroll
            for (int j = 0; j < 4; j++)
                largest = fmaxf(largest, fmaxf(fabsf(Elem::low_to_float(x[j])), fabsf(Elem::high_to_float(x[j]))));
        }
        exponent = exponent_above(quad_max(largest));
    }
};

// The lanes' channels as halves, relative to 2^exponent, in shared memory: all warps need the same.
template <class Config> struct __align__(16) LaneQueries {
    static constexpr int COUNT = Config::HEAD_DIM / 16;  // runs of four channels
    u32 words[COUNT / 2][32][4];                         // [pair of runs, lane, 2 runs of 2 words]

    // Stores the lanes' runs, one by each of the first warps; those of the upper half of the channels times `of_upper`.
    template <int PLANES> __device__ __forceinline__ void store(const Query<Config>& query, float of_upper = 1) {
        using Elem = typename Config::Elem;
        static_assert(Runs<Config, PLANES>::COUNT == COUNT && COUNT <= Config::WARPS, "a warp for each run");
        const int lane = threadIdx.x % 32, i = threadIdx.x / 32;
        if (i >= COUNT) return;
        const float factor = (query.exists ? power_of_two(-query.exponent) : 0) * (i < COUNT / 2 ? 1 : of_upper);
        u32 x[2];
        ld_shared(x, query.q + Runs<Config, PLANES>::channel(i, lane % 4));
#pragma unroll
        for (int h = 0; h < 2; h++)
            words[i / 2][lane][i % 2 * 2 + h] =
                floats_to_half2(Elem::low_to_float(x[h]) * factor, Elem::high_to_float(x[h]) * factor);
    }
    __device__ __forceinline__ void load(u32 (&runs)[COUNT][2]) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) load_two(runs[i], runs[i + 1], i);
    }
    // Runs i and i + 1, for an even i.
    __device__ __forceinline__ void load_two(u32 (&run)[2], u32 (&next)[2], int i) const {
        u32 x[4];
        ld_shared(x, words[i / 2][threadIdx.x % 32]);
        run[0] = x[0], run[1] = x[1], next[0] = x[2], next[1] = x[3];
    }
};
