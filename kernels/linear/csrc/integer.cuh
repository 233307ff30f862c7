// MMA warps that multiply 4-bit codes as unsigned bytes by x as signed ones and add up in int32; docs/kernels/linear.md
// says where this is faster. Codes are those of quantized.cuh, in groups of 128 inputs.
//
// x of a row and group is scale * q with integers q = 256 upper + lower of 16 bits, each element exact to 1/65278 of
// the group's largest, however small it is itself: two planes of signed bytes. Of a word of codes, the low nibbles are
// the bytes of row g, and the high ones under a mask 16 times those of row g + 8, so that unpacking takes no shift. A
// warp multiplies the same groups of all output tiles and holds their x in registers. Column 2 r + p of the product is
// plane p of row r.
#pragma once

#include "pipeline.cuh"

template <class Config> struct IntegerProduct {
    using W = Weights<Config>;
    static constexpr int GROUP = 128;
    static constexpr int ROWS = 4;        // of x, at most
    static constexpr int LANE_WORDS = 8;  // of a plane: word 2 p + s holds inputs 32 p + 8 c + 4 s + {0, 2, 1, 3}
    static constexpr int STAGE_GROUPS = W::STAGE_K_TILES / Config::MMA_WARPS;  // of a warp
    static constexpr int GROUPS = Config::TILE_STAGES * STAGE_GROUPS;
    static constexpr int SLOTS = 4;             // groups on their way between lanes
    static constexpr float LARGEST = 32639.0f;  // q: 256 * 127 + 127
    static constexpr float SMALLEST = 1e-30f;   // a group whose largest x is not above counts as zero
    static constexpr u32 ONES = 0x01010101u;
    static_assert(Config::WEIGHT_BITS < 16 && Config::WEIGHT_GROUP == GROUP, "4 or 8 bits in groups of 128");
    static_assert(Config::X_TILES == 1 && Config::X_MULTICAST == 1, "x goes to registers");
    static_assert(W::STAGE_K_TILES % Config::MMA_WARPS == 0, "a warp has the same groups of every output tile");

    u32 words[GROUPS][LANE_WORDS];  // x: column g of the B operands
    float2* pairs;                  // [groups of the CTA, ROWS]: scale, and sum of q; a warp has its groups'

    // Group `i` of this warp, among those of the CTA.
    __device__ static __forceinline__ int group_of(int i, int warp) {
        return i / STAGE_GROUPS * W::STAGE_K_TILES + warp * STAGE_GROUPS + i % STAGE_GROUPS;
    }
    __device__ static __forceinline__ bool exists(int i, int warp, int k_tiles) {
        const bool always = Config::WHOLE_STAGES || i / STAGE_GROUPS < Config::TILE_STAGES - 1;
        return always || group_of(i, warp) < k_tiles;
    }

    // The warp takes a row of a group at once, 4 inputs per lane, and passes the planes on to the lanes that multiply
    // them.
    __device__ __forceinline__ void quantize(const LinearParams& p, int k_begin, int k_tiles, float* sums) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int j = 0; j < LANE_WORDS; j++) words[i][j] = 0;
        const int to = lane % 8 / 2 * LANE_WORDS + lane / 8 * 2 + lane % 2;
#pragma unroll 1
        for (int row = 0; row < p.rows; row++) {
            u32 from[GROUPS][2];
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                from[i][0] = from[i][1] = 0;
                const int group = group_of(i, warp);
                if (exists(i, warp, k_tiles))
                    load_words_l2(from[i], p.x + 2 * (i64(row) * p.inputs + (k_begin + group) * GROUP + 4 * lane));
            }
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                const u32 low = from[i][0], high = from[i][1];
                const u32 bits = __vmaxu2(low & 0x7FFF7FFFu, high & 0x7FFF7FFFu);  // ordered as their magnitudes are
                const float largest =
                    Config::Elem::to_float(u16(__reduce_max_sync(FULL_MASK, max(bits & 0xFFFFu, bits >> 16))));
                const float scale = largest * (1.0f / LARGEST);  // of which, unlike of `largest`, no inverse is flushed
                const float inverse = largest > SMALLEST ? reciprocal_approx(scale) : 0.0f;
                // The low 16 bits of these are q + 128, whose upper byte is q's, and the lower one q's plus 128.
                const u32 q0 = __float_as_uint(fmaf(Config::Elem::low_to_float(low), inverse, ROUNDER + 128.0f));
                const u32 q1 = __float_as_uint(fmaf(Config::Elem::high_to_float(low), inverse, ROUNDER + 128.0f));
                const u32 q2 = __float_as_uint(fmaf(Config::Elem::low_to_float(high), inverse, ROUNDER + 128.0f));
                const u32 q3 = __float_as_uint(fmaf(Config::Elem::high_to_float(high), inverse, ROUNDER + 128.0f));
                const u32 even = __byte_perm(q0, q2, 0x5410), odd = __byte_perm(q1, q3, 0x5410);
                const u32 upper = __byte_perm(even, odd, 0x7531), lower = __byte_perm(even, odd, 0x6420) ^ 0x80808080u;
                const int total = 256 * __dp4a(int(upper), int(ONES), 0) + __dp4a(int(lower), int(ONES), 0);
                const float row_sum = float(__reduce_add_sync(FULL_MASK, total));
                if (lane == 0 && exists(i, warp, k_tiles))
                    pairs[group_of(i, warp) * ROWS + row] = make_float2(scale, row_sum);
                u32* const slot = slot_of(sums, i % SLOTS, warp);
                if (exists(i, warp, k_tiles)) slot[to] = upper, slot[to + 32] = lower;
                if (i % SLOTS < SLOTS - 1 && i < GROUPS - 1) continue;
                __syncwarp();
                if (row == g / 2) {
#pragma unroll
                    for (int k = i / SLOTS * SLOTS; k <= i; k++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const u32* const source = slot_of(sums, k % SLOTS, warp) + g % 2 * 32 + c * LANE_WORDS;
                            u32 part[4];
                            load_words(part, reinterpret_cast<const u8*>(source + 4 * half));
#pragma unroll
                            for (int j = 0; j < 4; j++) words[k][4 * half + j] = part[j];
                        }
                }
                __syncwarp();
            }
        }
    }
    // A row of a group is 64 words; a warp's part of both buffers of sums, empty as yet, holds four.
    __device__ static __forceinline__ u32* slot_of(float* sums, int slot, int warp) {
        return reinterpret_cast<u32*>(sums + (slot / 2 * Config::MMA_WARPS + warp) * Config::TILE_SUMS + slot % 2 * 64);
    }

    // acc[row half] += sum over planes of scale * (codes - 8) x + zero * sum of x for group `i` and row c of x; `data`:
    // the group's weights.
    __device__ __forceinline__ void multiply_group(float (&acc)[2], const u8* data, int i, int group, int lane) const {
        const float2 of_x = pairs[group * ROWS + lane % 4];
#pragma unroll
        for (int plane = 0; plane < W::PLANES; plane++, data += W::PLANE_BYTES) {
            u32 codes[2][4];
            load_words(codes[0], data + lane * 16), load_words(codes[1], data + 512 + lane * 16);
            const uint2 affine = *reinterpret_cast<const uint2*>(data + W::CODE_BYTES + lane / 4 * 8);
            int d[4] = {};
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const u32 first = codes[step / 2][step % 2 * 2], second = codes[step / 2][step % 2 * 2 + 1];
                mma_m16n8k32_u8_s8(
                    d, first & 0x0F0F0F0Fu, first & 0xF0F0F0F0u, second & 0x0F0F0F0Fu, second & 0xF0F0F0F0u,
                    words[i][2 * step], words[i][2 * step + 1]
                );
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 pair = half ? affine.y : affine.x;
                const float step = __uint_as_float(pair << 16);
                const float zero = fmaf(step, -8.0f, __uint_as_float(pair & 0xFFFF0000u));
                const float unit = half ? step * 0.0625f : step;  // high nibbles count 16
                const float product = fmaf(unit, float(256 * d[2 * half] + d[2 * half + 1]), zero * of_x.y);
                acc[half] = fmaf(of_x.x, product, acc[half]);
            }
        }
    }

    // All output tiles of the CTA.
    __device__ __forceinline__ void multiply(
        const CtaWork<Config>& work, Barriers<Config>& barriers, const u8* buffers, int stages, float* sums
    ) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        PipelineState read = {0, 0}, buffer = {0, 1};
#pragma unroll 1
        for (int left = work.num_tiles(); left; left--) {
            float acc[2] = {};
#pragma unroll
            for (int stage = 0; stage < Config::TILE_STAGES; stage++) {
                mbarrier_wait(barriers.full + read.index, read.parity);
                const u8* const data = buffers + read.index * W::STAGE_BYTES + warp * STAGE_GROUPS * W::K_TILE_BYTES;
#pragma unroll
                for (int j = 0; j < STAGE_GROUPS; j++) {
                    const int i = stage * STAGE_GROUPS + j;
                    if (!exists(i, warp, work.k_tiles)) continue;
                    multiply_group(acc, data + j * W::K_TILE_BYTES, i, group_of(i, warp), lane);
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(barriers.empty + read.index);
                read.advance(stages);
            }
            mbarrier_wait(barriers.sums_empty + buffer.index, buffer.parity);
            float* const to = sums + (buffer.index * Config::MMA_WARPS + warp) * Config::TILE_SUMS;
#pragma unroll
            for (int half = 0; half < 2; half++)  // in the order of `store_sums`
                to[half * 64 + lane / 4 * 8 + lane % 4] = acc[half];
            mbarrier_arrive(barriers.sums_full + buffer.index);
            buffer.advance(Config::SUM_BUFFERS);
        }
    }
};

// The MMA warps of products of integers. `x_sums` and `sums`: theirs in shared memory.
template <class Config> __device__ __forceinline__ void multiply_integers(
    const CtaWork<Config>& work, Barriers<Config>& barriers, const u8* buffers, const LinearParams& p, float* x_sums,
    float* sums
) {
    if constexpr (Config::INTEGER) {
        IntegerProduct<Config> product;
        product.pairs = reinterpret_cast<float2*>(x_sums);
        product.quantize(p, work.k_begin, work.k_tiles, sums);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.x);
        if (p.trigger_stages < 0 && threadIdx.x == 0) pdl_launch_dependents();
        __syncwarp();
        product.multiply(work, barriers, buffers, p.stages, sums);
    }
}
