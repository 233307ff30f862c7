// MMA warps that multiply 4-bit codes as unsigned bytes by x as signed ones and add up in int32; docs/kernels/linear.md
// says where this is faster. Codes are those of quantized.cuh, in groups of 128 inputs.
//
// x of a row and group is scale * q with integers q = 256 upper + lower of 16 bits, exact to 1/65278 of the group's
// largest: two planes of signed bytes. Of a word of codes, the low nibbles are the bytes of row g, and the high ones
// under a mask 16 times those of row g + 8, so that unpacking takes no shift. A warp multiplies the same groups of all
// output tiles and holds their x in registers.
//
// Columns of the product: with X_PACKED (up to 4 rows) column 2 r + p is plane p of row r; else column r is row r, and
// each plane has a product of its own.
#pragma once

#include "pipeline.cuh"

template <class Config> struct IntegerProduct {
    using W = Weights<Config>;
    static constexpr int GROUP = 128;
    static constexpr int ROW_BYTES = 256;  // of a group of a row: planes of 128 bytes, each [c 4, 8 words]
    static constexpr int LANE_WORDS = 8;   // of a plane: word 2 p + s holds inputs 32 p + 8 c + 4 s + {0, 2, 1, 3}
    static constexpr int SETS = Config::X_PACKED ? 1 : 2;  // products of a group
    static constexpr int SUMS = Config::X_PACKED ? 1 : 2;  // rows of x whose sums a lane holds: c, or 2 c and 2 c + 1
    static constexpr int ROWS = 4 * SUMS;                  // of x, at most
    static constexpr int STAGE_GROUPS = W::STAGE_K_TILES / Config::MMA_WARPS;  // of a warp
    static constexpr int GROUPS = Config::TILE_STAGES * STAGE_GROUPS;
    static constexpr bool SHARED = Config::X_SHARED;
    static constexpr int HELD = SHARED ? 1 : GROUPS;  // groups of x in registers
    static constexpr int SLOTS = 4;                   // groups on their way between lanes
    static constexpr float LARGEST = 32639.0f;        // q: 256 * 127 + 127
    static constexpr float SMALLEST = 1e-30f;         // a group whose largest x is not above counts as zero
    static constexpr u32 ONES = 0x01010101u;
    static_assert(Config::WEIGHT_BITS < 16 && Config::WEIGHT_GROUP == GROUP, "4 or 8 bits in groups of 128");
    static_assert(Config::X_TILES == 1, "up to 8 rows");
    static_assert(W::STAGE_K_TILES % Config::MMA_WARPS == 0, "a warp has the same groups of every output tile");

    u32 words[HELD][SETS][LANE_WORDS];  // x: column g of the B operands
    u8* planes;                         // x with SHARED: [groups of the CTA, rows, ROW_BYTES]
    float* pairs;                       // [groups of the CTA, ROWS, 2]: scale, and sum of q; a warp has its groups'

    // Group `i` of this warp, among those of the CTA.
    __device__ static __forceinline__ int group_of(int i, int warp) {
        return i / STAGE_GROUPS * W::STAGE_K_TILES + warp * STAGE_GROUPS + i % STAGE_GROUPS;
    }
    __device__ static __forceinline__ bool exists(int i, int warp, int k_tiles) {
        const bool always = Config::WHOLE_STAGES || i / STAGE_GROUPS < Config::TILE_STAGES - 1;
        return always || group_of(i, warp) < k_tiles;
    }
    __device__ static __forceinline__ int row_of_column(int g) { return Config::X_PACKED ? g / 2 : g; }
    __device__ static __forceinline__ int plane_of_column(int g, int set) { return Config::X_PACKED ? g % 2 : set; }

    // From x of the parameters: [groups, rows, ROW_BYTES], then (scale, sum of q) as floats [groups, rows].
    __device__ __forceinline__ void load_planes(const LinearParams& p, int k_begin, int k_tiles) {
        const u8* const x = p.x;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        const u8* const from_pairs = x + i64(p.inputs / GROUP) * p.rows * ROW_BYTES;
        if (SHARED) {
#pragma unroll 8
            for (int n = 0; n < (GROUPS * p.rows + 1) / 2; n++) {  // two rows of groups at once
                const int at = 2 * n + lane / 16, i = at / p.rows, group = group_of(i, warp);
                if (i >= GROUPS || !exists(i, warp, k_tiles)) continue;
                u32 part[4];
                const int offset = at % p.rows * ROW_BYTES + lane % 16 * 16;
                load_words_l2(part, x + (k_begin + group) * p.rows * ROW_BYTES + offset);
                st_shared(planes + group * p.rows * ROW_BYTES + offset, part);
            }
        }
#pragma unroll
        for (int i = 0; i < GROUPS && !SHARED; i++) {
            const int group = group_of(i, warp);
            const int first_row = (k_begin + group) * p.rows;
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                u32 upper[4] = {}, lower[4] = {};
                if (exists(i, warp, k_tiles) && row_of_column(g) < p.rows) {
                    const u8* const from = x + (first_row + row_of_column(g)) * ROW_BYTES +
                                           plane_of_column(g, set) * (ROW_BYTES / 2) + c * (4 * LANE_WORDS);
                    load_words_l2(upper, from), load_words_l2(lower, from + 16);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) words[i % HELD][set][j] = upper[j], words[i % HELD][set][4 + j] = lower[j];
            }
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int group = group_of(i, warp);
            if (!exists(i, warp, k_tiles) || lane >= p.rows) continue;
            u32 pair[2];
            load_words_l2(pair, from_pairs + ((k_begin + group) * p.rows + lane) * 8);
            *pair_of(group, lane) = make_float2(__uint_as_float(pair[0]), __uint_as_float(pair[1]));
        }
        __syncwarp();
    }

    // Quantizes x itself: the warp takes a row of a group at once, 4 inputs per lane, and passes the planes on to the
    // lanes that multiply them.
    __device__ __forceinline__ void quantize(const LinearParams& p, int k_begin, int k_tiles, float* sums) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int i = 0; i < HELD; i++)
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int j = 0; j < LANE_WORDS; j++) words[i][set][j] = 0;
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
                const float inverse = largest > SMALLEST ? LARGEST * reciprocal_approx(largest) : 0.0f;
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
                    *pair_of(group_of(i, warp), row) = make_float2(largest * (1.0f / LARGEST), row_sum);
                u32* const slot = SHARED ? reinterpret_cast<u32*>(planes_of(group_of(i, warp), row, p.rows))
                                         : slot_of(sums, i % SLOTS, warp);
                if (exists(i, warp, k_tiles)) slot[to] = upper, slot[to + 32] = lower;
                if (SHARED) continue;
                if (i % SLOTS < SLOTS - 1 && i < GROUPS - 1) continue;
                __syncwarp();
                if (row == row_of_column(g)) {
#pragma unroll
                    for (int k = i / SLOTS * SLOTS; k <= i; k++)
#pragma unroll
                        for (int set = 0; set < SETS; set++) {
                            const u8* const source = reinterpret_cast<const u8*>(
                                slot_of(sums, k % SLOTS, warp) + plane_of_column(g, set) * 32 + c * LANE_WORDS);
                            u32 half[4];
                            load_words(half, source);
#pragma unroll
                            for (int j = 0; j < 4; j++) words[k % HELD][set][j] = half[j];
                            load_words(half, source + 16);
#pragma unroll
                            for (int j = 0; j < 4; j++) words[k % HELD][set][4 + j] = half[j];
                        }
                }
                __syncwarp();
            }
        }
        __syncwarp();
    }
    __device__ __forceinline__ u8* planes_of(int group, int row, int rows) const {
        return planes + (group * rows + row) * ROW_BYTES;
    }
    __device__ __forceinline__ float2* pair_of(int group, int row) const {
        return reinterpret_cast<float2*>(pairs + (group * ROWS + row) * 2);
    }
    // A row of a group is 64 words; a warp's part of both buffers of sums, empty as yet, holds four.
    __device__ static __forceinline__ u32* slot_of(float* sums, int slot, int warp) {
        return reinterpret_cast<u32*>(sums + (slot / 2 * Config::MMA_WARPS + warp) * Config::TILE_SUMS + slot % 2 * 64);
    }

    // acc[row half][column] += sum over planes of scale * (codes - 8) x + zero * sum of x for group `i`, whose weights
    // are at `data`.
    __device__ __forceinline__ void multiply_group(
        float (&acc)[2][SUMS], const u8* data, int i, int group, int rows, int lane
    ) const {
        u32 x[SETS][LANE_WORDS];
        const int g = lane / 4;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            if (SHARED) {  // columns past the last row repeat it; their sums are dropped
                const u8* const from = planes_of(group, min(row_of_column(g), rows - 1), rows) +
                                       plane_of_column(g, set) * (ROW_BYTES / 2) + lane % 4 * (4 * LANE_WORDS);
                u32 half[2][4];
                load_words(half[0], from), load_words(half[1], from + 16);
#pragma unroll
                for (int j = 0; j < LANE_WORDS; j++) x[set][j] = half[j / 4][j % 4];
            } else {
#pragma unroll
                for (int j = 0; j < LANE_WORDS; j++) x[set][j] = words[i % HELD][set][j];
            }
        }
        float of_x[2 * SUMS];  // scale, and sum of q, of this lane's rows
#pragma unroll
        for (int j = 0; j < SUMS; j++) {
            const float2 pair = *pair_of(group, SUMS * (lane % 4) + j);
            of_x[2 * j] = pair.x, of_x[2 * j + 1] = pair.y;
        }
#pragma unroll
        for (int plane = 0; plane < W::PLANES; plane++, data += W::PLANE_BYTES) {
            u32 codes[2][4];
            load_words(codes[0], data + lane * 16), load_words(codes[1], data + 512 + lane * 16);
            const uint2 affine = *reinterpret_cast<const uint2*>(data + W::CODE_BYTES + lane / 4 * 8);
            int d[SETS][4] = {};
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const u32 first = codes[step / 2][step % 2 * 2], second = codes[step / 2][step % 2 * 2 + 1];
#pragma unroll
                for (int set = 0; set < SETS; set++)
                    mma_m16n8k32_u8_s8(
                        d[set], first & 0x0F0F0F0Fu, first & 0xF0F0F0F0u, second & 0x0F0F0F0Fu, second & 0xF0F0F0F0u,
                        x[set][2 * step], x[set][2 * step + 1]
                    );
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 pair = half ? affine.y : affine.x;
                const float step = __uint_as_float(pair << 16);
                const float zero = fmaf(step, -8.0f, __uint_as_float(pair & 0xFFFF0000u));
                const float unit = half ? step * 0.0625f : step;  // high nibbles count 16
#pragma unroll
                for (int j = 0; j < SUMS; j++) {
                    const int upper = Config::X_PACKED ? d[0][2 * half] : d[0][2 * half + j];
                    const int lower = Config::X_PACKED ? d[0][2 * half + 1] : d[SETS - 1][2 * half + j];
                    const float product = fmaf(unit, float(256 * upper + lower), zero * of_x[2 * j + 1]);
                    acc[half][j] = fmaf(of_x[2 * j], product, acc[half][j]);
                }
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
            float acc[2][SUMS] = {};
#pragma unroll (SHARED ? 1 : Config::TILE_STAGES)
            for (int stage = 0; stage < Config::TILE_STAGES; stage++) {
                mbarrier_wait(barriers.full + read.index, read.parity);
                const u8* const data =
                    buffers + read.index * W::STAGE_BYTES + warp * STAGE_GROUPS * W::K_TILE_BYTES;
#pragma unroll
                for (int j = 0; j < STAGE_GROUPS; j++) {
                    const int i = stage * STAGE_GROUPS + j;
                    if (!exists(i, warp, work.k_tiles)) continue;
                    multiply_group(acc, data + j * W::K_TILE_BYTES, i, group_of(i, warp), work.rows, lane);
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(barriers.empty + read.index);
                read.advance(stages);
            }
            mbarrier_wait(barriers.sums_empty + buffer.index, buffer.parity);
            float* const to = sums + (buffer.index * Config::MMA_WARPS + warp) * Config::TILE_SUMS;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < SUMS; j++)  // in the order of `store_sums`
                    to[half * 64 + lane / 4 * 8 + lane % 4 * SUMS + j] = acc[half][j];
            mbarrier_arrive(barriers.sums_full + buffer.index);
            buffer.advance(Config::SUM_BUFFERS);
        }
    }
};

// The MMA warps with X_PLANES; `planes`, `pairs` and `sums` are theirs in shared memory.
template <class Config> __device__ __forceinline__ void multiply_integers(
    const CtaWork<Config>& work, Barriers<Config>& barriers, const u8* buffers, const LinearParams& p, u8* planes,
    float* pairs, float* sums
) {
    if constexpr (Config::X_PLANES != 0) {
        IntegerProduct<Config> product;
        product.pairs = pairs, product.planes = planes;
        if (Config::X_PLANES == 1) product.quantize(p, work.k_begin, work.k_tiles, sums);
        else product.load_planes(p, work.k_begin, work.k_tiles);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.x);
        if (p.trigger_stages < 0 && threadIdx.x == 0) pdl_launch_dependents();
        __syncwarp();
        product.multiply(work, barriers, buffers, p.stages, sums);
    }
}
