// The scan: logits of a group's tokens from 2-bit keys, and of each token the score, the sum over the query heads of
// exp(logit - lse). A operands are 16 tokens, B operands the query heads, times the group's scales and rounded to 8
// bits.
//
// A head's log-sum-exp over all tokens is known only at the end, so a sample of the row's groups estimates it.
#pragma once

#include "../../device/csrc/softmax_state.cuh"
#include "queries.cuh"

// 2-bit keys of all rows' groups, with the scales and minima of their upper codes (TwoBitKeys).
struct ScannedKeys {
    const u8* codes;              // [row, group_capacity, GROUP, HEAD_DIM / 4]
    const u16 *scale, *minimum;   // [row, group_capacity, HEAD_DIM]
};

// A warp's buffer of one group in shared memory, filled by cp.async:
//
//     codes    128 tokens x HEAD_DIM / 4 bytes; byte j has   bits  7 6 | 5 4 | 3 2 | 1 0
//              the codes of four channels, Q = HEAD_DIM / 4:       j+3Q  j+2Q  j+Q   j
//     scale    HEAD_DIM halves
//     minimum  HEAD_DIM halves
template <class Config> struct __align__(16) ScanStage {
    u8 codes[Config::GROUP][Config::QUARTER_DIM];
    u16 scale[Config::HEAD_DIM], minimum[Config::HEAD_DIM];
};

// Halves [N] of two arrays, by one piece of 16 bytes per lane.
template <int N> __device__ __forceinline__ void copy_pairs(u16* to0, u16* to1, const u16* from0, const u16* from1) {
    const int lane = threadIdx.x % 32, piece = lane % 16 * 8;
    if (piece < N) cp_async_16((lane < 16 ? to0 : to1) + piece, (lane < 16 ? from0 : from1) + piece);
}

// Starts copying what the scan of group `group` (of all rows) reads.
template <class Config>
__device__ __forceinline__ void start_copy(ScanStage<Config>& stage, const ScannedKeys& keys, i64 group) {
    static_assert(sizeof(ScanStage<Config>) == Config::STAGE_BYTES, "as the launch computes it");
    constexpr int BYTES = Config::GROUP * Config::QUARTER_DIM, HEAD_DIM = Config::HEAD_DIM;
    const int lane = threadIdx.x % 32;
    const u8* codes = keys.codes + group * BYTES;
#pragma unroll
    for (int i = 0; i < BYTES / 16; i += 32) cp_async_16(&stage.codes[0][0] + 16 * (i + lane), codes + 16 * (i + lane));
    copy_pairs<HEAD_DIM>(stage.scale, stage.minimum, keys.scale + group * HEAD_DIM, keys.minimum + group * HEAD_DIM);
}

// Bin of a sum of probabilities: its float's exponent and first bits, so equal steps for every power of two. The last
// bin is left to sinks.
template <class Config> __device__ __forceinline__ int bin_of(float sum) {
    return __float_as_uint(sum) >> (23 - Config::LOG2_STEPS);
}

template <class Config> struct Scan {
    static constexpr int PLANES = 4;  // channels of a byte
    using LaneRuns = Runs<Config, PLANES>;
    static constexpr int WORDS = LaneRuns::WORDS, COUNT = LaneRuns::COUNT;
    static constexpr int GROUP = Config::GROUP, HEADS = Config::HEADS;
    const LaneQueries<Config>& queries;
    float logit_scale[2], norm[2];  // of the query heads 2c and 2c + 1; other heads' scores become zero

    __device__ __forceinline__ Scan(float softmax_scale, const Query<Config>& query, const LaneQueries<Config>& queries)
        : queries(queries) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int head = head_of_column(e), exponent = __shfl_sync(FULL_MASK, query.exponent, 4 * head);
            logit_scale[e] = head < HEADS ? softmax_scale * LOG2_E * power_of_two(exponent) : 0;
            norm[e] = head < HEADS ? 0 : -negative_infinity();
        }
    }
    // Of this lane's column 2c + e.
    __device__ __forceinline__ static int head_of_column(int e) {
        return (2 * (threadIdx.x % 4) + e) % Config::COLUMN_HEADS;
    }
    // Queries times scales as signed bytes, and the base-2 logit less norm of a sum of products x with the codes:
    // slope * x + start, x as the float whose bits are ROUNDER_BITS + sum. A code c stands for scale * (4 c + 3/2) +
    // minimum; those of odd parts of the channels arrive as 4 c. middles: queries times scale * 3/2 + minimum.
    __device__ __forceinline__ void scale_queries(
        u32 (&bytes)[COUNT], float (&slope)[2], float (&start)[2], float (&middles)[2], const ScanStage<Config>& stage
    ) const {
        const int c = threadIdx.x % 4;
        constexpr u32 HALF2_3_2 = half2_constant(1.5), HALF2_1_4 = half2_constant(0.25);
        constexpr u32 HALF2_1536 = half2_constant(1536);
        u32 q[COUNT][2], scaled[COUNT][2], largest = 0;
        queries.load(q);
        u32 middle[COUNT][2];
        float rest[2][4] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int channel = LaneRuns::channel(i, c);
            u32 s[2], z[2];
            ld_shared(s, stage.scale + channel);
            ld_shared(z, stage.minimum + channel);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scaled[i][h] = mul_half2(q[i][h], s[h]);
                largest = max_abs_half2(largest, scaled[i][h]);
                middle[i][h] = fma_half2(s[h], HALF2_3_2, z[h]);
            }
        }
        // Rows 0 to 7 of a product take the first words of two runs, and rows 8 to 15 take the second words.
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
#pragma unroll
            for (int h = 0; h < 2; h++)
                Half::mma(rest[h], middle[i][0], middle[i][1], middle[i + 1][0], middle[i + 1][1], q[i][h],
                          q[i + 1][h]);
        const float head_max =
            quad_max(fmaxf(fabsf(half_to_float(u16(largest))), fabsf(half_to_float(u16(largest >> 16)))));
        // As a half, so that the products' unit is exactly its inverse.
        const u16 factor = float_to_half(fminf(__fdividef(127, head_max), 32768.0f));
        const u32 full = factor * 0x10001u, quarter = mul_half2(full, HALF2_1_4);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const u32 by = i / WORDS % 2 ? quarter : full;
            // 1536 + n ends in the byte n; the low bytes of four halves make a word.
            bytes[i] = __byte_perm(fma_half2(scaled[i][0], by, HALF2_1536), fma_half2(scaled[i][1], by, HALF2_1536),
                                   0x6420);
        }
        const float unit = __fdividef(4, half_to_float(factor));
#pragma unroll
        for (int e = 0; e < 2; e++) {
            slope[e] = __shfl_sync(FULL_MASK, unit, 4 * (2 * c + e)) * logit_scale[e];
            middles[e] = rest[0][e] + rest[1][2 + e];
            start[e] = fmaf(middles[e], logit_scale[e], -norm[e]) - ROUNDER * slope[e];
        }
    }
    // Products of a pair of tiles of 16 tokens, as the floats whose bits start from ROUNDER_BITS: rows g and g + 8 of
    // each, of the query heads 2c and 2c + 1. Two tiles, as products of one depend on each other.
    __device__ __forceinline__ static void products(
        int (&x)[2][4], const ScanStage<Config>& stage, int pair, const u32 (&bytes)[COUNT]
    ) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        u32 words[4][WORDS];
#pragma unroll
        for (int r = 0; r < 4; r++) ld_shared(words[r], &stage.codes[32 * pair + 8 * r + g][4 * WORDS * c]);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = ROUNDER_BITS;
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
#pragma unroll
            for (int t = 0; t < 2; t++)
                mma_m16n8k32_u8_s8(x[t], part(words[2 * t], i), part(words[2 * t + 1], i), part(words[2 * t], i + 1),
                          part(words[2 * t + 1], i + 1), bytes[i], bytes[i + 1]);
    }
    // Leaves the bins of a group's tokens, and counts them. Its first `sinks` tokens are sinks. middles: of the query
    // heads 2c and 2c + 1 (scale_queries).
    __device__ __forceinline__ void group(
        const ScanStage<Config>& stage, u16* bins, u32* histogram, int sinks, float (&middles)[2]
    ) const {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        u32 bytes[COUNT];
        float slope[2], start[2];
        scale_queries(bytes, slope, start, middles, stage);
        int bin[GROUP / 32];  // stored at the end, as loads of shared memory do not pass stores to it
#pragma unroll
        for (int pair = 0; pair < GROUP / 32; pair++) {
            int x[2][4];
            products(x, stage, pair, bytes);
            bin[pair] = bin_of<Config>(score(x, slope, start));
        }
#pragma unroll
        for (int pair = 0; pair < GROUP / 32; pair++) {
            const int token = 32 * pair + 16 * (c / 2) + 8 * (c % 2) + g;
            if (token < sinks) bin[pair] = Config::BINS - 1;
            bins[token] = bin[pair];
            atomicAdd(histogram + bin[pair], 1u);
        }
    }
    // The score of one of 32 tokens: lane 4 g + c returns that of tile c / 2, row 8 * (c % 2) + g. Where columns 4 to 7 have
    // the heads of the first four, the lanes of these add up the second tile.
    __device__ __forceinline__ static float score(
        const int (&x)[2][4], const float (&slope)[2], const float (&start)[2]
    ) {
        constexpr int COPIES = 8 / Config::COLUMN_HEADS;
        const bool second_row = threadIdx.x & 1, second_tile = threadIdx.x & 2;
        float of_tile[2];
#pragma unroll
        for (int t = 0; t < 2 / COPIES; t++) {
            float of_token[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float of_head[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int i = 2 * r + e, sum = COPIES == 2 && second_tile ? x[1][i] : x[t][i];
                    of_head[e] = exp2_approx(fmaf(__int_as_float(sum), slope[e], start[e]));
                }
                of_token[r] = of_head[0] + of_head[1];
            }
            of_tile[t] = exchange_sums(of_token, second_row, 1);
        }
        return COPIES == 2 ? of_tile[0] : exchange_sums(of_tile, second_tile, 2);
    }
    // Two lanes, `distance` apart, each have parts of two sums. Returns sum 1 in the lane with `second`, sum 0 in the
    // other.
    __device__ __forceinline__ static float exchange_sums(const float (&x)[2], bool second, int distance) {
        return (second ? x[1] : x[0]) + __shfl_xor_sync(FULL_MASK, second ? x[0] : x[1], distance);
    }
    // Codes of run i, in bytes; those of odd parts of the channels times 4.
    __device__ __forceinline__ static u32 part(const u32 (&words)[WORDS], int i) {
        constexpr u32 EVEN_PARTS = 0x03030303u, ODD_PARTS = 0x0C0C0C0Cu;
        const u32 word = words[i % WORDS];
        return (i / WORDS < 2 ? word : word >> 4) & (i / WORDS % 2 ? ODD_PARTS : EVEN_PARTS);
    }
    // Leaves the largest base-2 logit of a group's tokens and the sum of exp2(logit - largest), by query head.
    __device__ __forceinline__ void sample(const ScanStage<Config>& stage, float (&largest)[8], float (&sum)[8]) const {
        u32 bytes[COUNT];
        float slope[2], start[2], middles[2], logits[GROUP / 32][2][4];
        scale_queries(bytes, slope, start, middles, stage);
#pragma unroll
        for (int pair = 0; pair < GROUP / 32; pair++) {
            int x[2][4];
            products(x, stage, pair, bytes);
#pragma unroll
            for (int i = 0; i < 8; i++)
                logits[pair][i / 4][i % 4] = fmaf(__int_as_float(x[i / 4][i % 4]), slope[i % 2], start[i % 2]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float head_max = negative_infinity(), head_sum = 0;
#pragma unroll
            for (int i = e; i < GROUP / 4; i += 2) head_max = fmaxf(head_max, logits[i / 8][i / 4 % 2][i % 4]);
            head_max = column_max(head_max);
#pragma unroll
            for (int i = e; i < GROUP / 4; i += 2) head_sum += exp2_approx(logits[i / 8][i / 4 % 2][i % 4] - head_max);
            column_sum(head_sum);
            const int head = 2 * (threadIdx.x % 4) + e;
            if (threadIdx.x % 32 < 4) largest[head] = head_max, sum[head] = head_sum;
        }
    }
    // Uses the log-sum-exps of `count` samples for all tokens. The difference shifts all scores equally.
    __device__ __forceinline__ void weigh_heads(
        const float (&largest)[Config::SAMPLES][8], const float (&sum)[Config::SAMPLES][8], int count
    ) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int head = head_of_column(e);
            if (head >= HEADS) continue;
            float head_max = negative_infinity(), head_sum = 0;
            for (int i = 0; i < count; i++) head_max = fmaxf(head_max, largest[i][head]);
            for (int i = 0; i < count; i++) head_sum += sum[i][head] * exp2_approx(largest[i][head] - head_max);
            norm[e] = head_max + log2f(head_sum);
        }
    }
};

// The groups of a row that are sampled: all of few, else the first, the last, and others evenly between.
template <class Config> struct RowSample {
    int row_groups, count;

    __device__ __forceinline__ RowSample(int row_groups)
        : row_groups(row_groups), count(min(row_groups, Config::SAMPLES)) {}
    __device__ __forceinline__ int group(int i) const { return i * (row_groups - 1) / max(count - 1, 1); }
};

// By sample and query head, in shared memory; see Scan::sample.
template <class Config> struct SampleSums {
    float largest[Config::SAMPLES][8], sum[Config::SAMPLES][8];
};

// A CTA's scan of its groups: first a sample of the row's, then every WARPS-th of the CTA's groups by each warp, of
// which STAGES are copied or scanned at a time.
//
// Groups: those of a CTA, count() of a row's row_groups. The i-th is number in_row(i) of the row, and number n of the
// row is stored(n) among all rows' groups.
template <class Config, class Groups> struct GroupScan {
    static constexpr int STAGES = Config::STAGES, WARPS = Config::WARPS;
    const Groups& groups;
    const ScannedKeys keys;
    const RowSample<Config> samples;
    ScanStage<Config>* stages;  // of the warp
    int count;          // of the CTA's groups

    // Reads codes only, which no kernel writes that may still run. The last stage has a sample first.
    __device__ __forceinline__ GroupScan(
        const Groups& groups, const ScannedKeys& keys, ScanStage<Config>* stages
    ) : groups(groups), keys(keys), samples(groups.row_groups), stages(stages), count(groups.count()) {
        const int warp = threadIdx.x / 32;
        if (warp < samples.count) start_copy(stages[STAGES - 1], keys, groups.stored(samples.group(warp)));
        cp_async_commit();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) copy(warp + i * WARPS, i);
    }
    __device__ __forceinline__ void copy(int i, int stage) {
        if (i < count) start_copy(stages[stage], keys, groups.stored(groups.in_row(i)));
        cp_async_commit();
    }
    // Sets the weights of the scan's query heads. By all threads.
    __device__ __forceinline__ void sample(Scan<Config>& scan, SampleSums<Config>& sums) {
        const int warp = threadIdx.x / 32;
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        if (warp < samples.count) scan.sample(stages[STAGES - 1], sums.largest[warp], sums.sum[warp]);
        __syncwarp();
        copy(warp + (STAGES - 1) * WARPS, STAGES - 1);
        __syncthreads();
        scan.weigh_heads(sums.largest, sums.sum, samples.count);
    }
    // bins(i): where the bins of the i-th group's tokens are left. visit(i, middles): see Scan::group.
    template <class Bins, class Visit>
    __device__ __forceinline__ void run(
        const Scan<Config>& scan, const Bins& bins, u32* histogram, int sinks, const Visit& visit
    ) {
        for (int i = threadIdx.x / 32, stage = 0; i < count; i += WARPS, stage = (stage + 1) % STAGES) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            float middles[2];
            scan.group(stages[stage], bins(i), histogram, sinks - groups.in_row(i) * Config::GROUP, middles);
            visit(i, middles);
            __syncwarp();
            copy(i + STAGES * WARPS, stage);
        }
    }
};
