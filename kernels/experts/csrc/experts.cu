// Products of routed experts for few rows, y = W x + bias of each pair's expert, and with GATED the activation of gates
// and ups; for Hopper and newer. docs/kernels/experts.md explains how.
//
// Pairs come in blocks by expert. A block's work is its expert's items of TILES output tiles each, and each CTA takes a
// contiguous range of the items of all blocks, so that none has more than one item more than another, and few change
// blocks. Warps hand over as those of dense products do (linear/csrc/linear.cu): one produces stages of the weight,
// SLOTS x MMA_WARPS multiply, each a part of the inputs of one of an item's tiles, and one fetches x, adds up, activates
// and stores.

#include "../../linear/csrc/handover.cuh"
#include "mxfp4.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_WEIGHT_BITS 4
#define CONFIG_WEIGHT_GROUP 128
#define CONFIG_MXFP4 0
#define CONFIG_BF16 1
#define CONFIG_INPUTS 2048
#define CONFIG_STAGE_INPUTS 2048
#define CONFIG_TILES 2
#define CONFIG_MMA_WARPS 4
#define CONFIG_MAX_STAGES 16
#define CONFIG_GATED 1
#define CONFIG_CTAS_PER_SM 1
#endif

struct ExpertsConfig {
    // Compiled variant: ExpertsSchedule.options passes the value of each as -DCONFIG_NAME.
    static constexpr int WEIGHT_BITS = CONFIG_WEIGHT_BITS;    // 4 or 8
    static constexpr int WEIGHT_GROUP = CONFIG_WEIGHT_GROUP;  // inputs that share a scale
    static constexpr bool MXFP4 = CONFIG_MXFP4 != 0;          // the format of 4 bits and groups of 32 of this name
    static constexpr bool BF16 = CONFIG_BF16 != 0;            // dtype of x, bias and y; else float16
    static constexpr int INPUTS = CONFIG_INPUTS;
    static constexpr int STAGE_INPUTS = CONFIG_STAGE_INPUTS;  // inputs of each of an item's tiles in a stage
    static constexpr int TILES = CONFIG_TILES;                // output tiles of an item; with GATED half are of gates
    static constexpr int MMA_WARPS = CONFIG_MMA_WARPS;        // warps that split an output tile's inputs
    static constexpr int MAX_STAGES = CONFIG_MAX_STAGES;      // of the pipeline
    static constexpr bool GATED = CONFIG_GATED != 0;  // the first half of an expert's outputs gates the second
    static constexpr int CTAS_PER_SM = CONFIG_CTAS_PER_SM;

    using Elem = Element<BF16>;
    static constexpr int X_TILES = 1, COLUMNS = 8;  // pairs of a block, at most
    static constexpr int TILE_OUTPUTS = 16, TILE_SUMS = TILE_OUTPUTS * COLUMNS;
    static constexpr int SUM_BUFFERS = 2;  // items whose sums are on their way to the epilogue warp
    static constexpr int MAX_X_BUFFERS = 2;
    static constexpr int Y_TILES = GATED ? TILES / 2 : TILES;  // tiles of y of an item
    static constexpr int ALL_MMA_WARPS = TILES * MMA_WARPS;
    static constexpr int PRODUCER_WARP = ALL_MMA_WARPS, EPILOGUE_WARP = ALL_MMA_WARPS + 1;
    static constexpr int WARPS = ALL_MMA_WARPS + 2, THREADS = 32 * WARPS;

    static_assert(!GATED || TILES % 2 == 0, "a gate and what it multiplies are in one item");
};
using Config = ExpertsConfig;
using Format = ExpertWeights<Config>;
constexpr int K_TILES = Config::INPUTS / Format::K_TILE;
constexpr int ITEM_STAGES = (K_TILES + Format::STAGE_K_TILES - 1) / Format::STAGE_K_TILES;
constexpr int STAGE_BYTES = Config::TILES * Format::STAGE_BYTES;
constexpr int X_SUMS = K_TILES * Format::X_SUM_COLUMNS;  // of a block, for one of an item's tiles
constexpr int X_ROW_BYTES = 2 * Config::INPUTS;

// ExpertsParams in experts/cuda.py has the same layout.
struct ExpertsParams {
    const u8 *x, *weight;  // [rows, inputs]: of pair p the row p / per_row; codes of all experts
    const u8* lower;       // the second plane of 8-bit weights, the scales of MXFP4, or null
    const u16* bias;       // [experts, outputs], or null
    u16* y;                // [pairs, outputs], with GATED [pairs, outputs / 2]
    const int* experts;      // [blocks], -1 behind the last
    const int* block_pairs;  // [blocks, block_rows], padded with `pairs`
    int pairs, per_row, blocks, block_rows;
    int inputs;       // Config::INPUTS
    int tiles;        // output tiles of an expert
    int stages;       // pipeline stages
    int x_buffers;    // blocks whose x is in shared memory
    int stages_before_x, stages_after_x;  // in flight at once before and after the first block's x has arrived
    int early_blocks;  // blocks were written by a kernel that had ended before the previous one let this one start
    float alpha, limit, offset;  // of the activation
};

// Adjacent items of one block: `count` from `item` on; `left` follow in later blocks.
struct Span {
    int block, item, count, left;

    __device__ __forceinline__ static Span first(int begin, int end, int per_block) {
        const int item = begin % per_block, count = min(per_block - item, end - begin);
        return {begin / per_block, item, count, end - begin - count};
    }
    __device__ __forceinline__ Span next(int per_block) const {
        const int more = min(per_block, left);
        return {block + 1, 0, more, left - more};
    }
};

// A block in shared memory.
struct Block {
    int expert, rows, pairs[Config::COLUMNS];
};

struct Barriers {
    u64 full[Config::MAX_STAGES], empty[Config::MAX_STAGES];             // stages of the pipeline
    u64 sums_full[Config::SUM_BUFFERS], sums_empty[Config::SUM_BUFFERS];  // buffers of an item's sums
    u64 x[Config::MAX_X_BUFFERS];  // a buffer is free when all sums of its block's last item are there

    // For one lane of each warp, as setting one up takes 75 cycles.
    __device__ __forceinline__ void init(int warp, int stages) {
        for (int i = warp; i < stages; i += Config::WARPS)
            mbarrier_init(full + i, Config::TILES), mbarrier_init(empty + i, Config::ALL_MMA_WARPS);
        for (int i = warp; i < Config::SUM_BUFFERS + Config::MAX_X_BUFFERS; i += Config::WARPS)
            if (i < Config::SUM_BUFFERS)
                mbarrier_init(sums_full + i, 32 * Config::ALL_MMA_WARPS), mbarrier_init(sums_empty + i, 32);
            else mbarrier_init(x + i - Config::SUM_BUFFERS, 1);
        fence_mbarrier_init();
    }
};

// Where things lie in dynamic shared memory, in this order.
struct SharedLayout {
    u8* buffers;    // stages of the pipeline, each TILES parts of output tiles
    float* sums;    // [SUM_BUFFERS, TILES, MMA_WARPS, TILE_SUMS]
    float* x_sums;  // [2, TILES, X_SUMS]: of this block and the next, as warps may be ahead
    u8* x;          // [x_buffers, block_rows, X_PITCH]
    Block* blocks;

    __device__ __forceinline__ SharedLayout(u8* shared, const ExpertsParams& p)
        : buffers(shared),
          sums(reinterpret_cast<float*>(shared + p.stages * STAGE_BYTES)),
          x_sums(sums + Config::SUM_BUFFERS * Config::ALL_MMA_WARPS * Config::TILE_SUMS),
          x(reinterpret_cast<u8*>(x_sums + 2 * Config::TILES * X_SUMS)),
          blocks(reinterpret_cast<Block*>(x + p.x_buffers * p.block_rows * Format::X_PITCH)) {}
};

// By all threads: brings the blocks to shared memory, and counts those that hold pairs. They come first.
__device__ __forceinline__ int load_blocks(Block* blocks, const ExpertsParams& p) {
    int count = 0;
    for (int first = 0; first < p.blocks; first += Config::THREADS) {
        const int i = first + threadIdx.x;
        Block block = {-1, 0, {}};
        if (i < p.blocks) {
            block.expert = __ldcg(p.experts + i);
#pragma unroll
            for (int row = 0; row < Config::COLUMNS; row++)
                block.pairs[row] = row < p.block_rows ? __ldcg(p.block_pairs + i * p.block_rows + row) : p.pairs;
#pragma unroll
            for (int row = 0; row < Config::COLUMNS; row++) block.rows += block.pairs[row] < p.pairs;
            blocks[i] = block;
        }
        count += __syncthreads_count(block.expert >= 0);
    }
    return count;
}

// By one lane: copies every stage of the CTA's items as buffers become empty. Few are in flight before the first x has
// arrived, which a flood of copies would delay.
__device__ __forceinline__ void load_weights(
    Span span, int per_block, const SharedLayout& at, Barriers& barriers, const ExpertsParams& p
) {
    const Format weights(p);
    PipelineState write = {0, 1}, arrived = {0, 0};  // the phase before the first counts as complete
    int limit = p.stages_before_x, in_flight = 0;
#pragma unroll 1
    for (; span.count > 0; span = span.next(per_block)) {
        const int expert_tile = at.blocks[span.block].expert * p.tiles;
#pragma unroll 1
        for (int item = span.item; item < span.item + span.count; item++)
#pragma unroll 1
            for (int k_tile = 0; k_tile < K_TILES; k_tile += Format::STAGE_K_TILES) {
                while (in_flight >= limit) {
                    mbarrier_wait(barriers.full + arrived.index, arrived.parity);
                    arrived.advance(p.stages);
                    in_flight--;
                    if (limit != p.stages_after_x && mbarrier_test(barriers.x, 0)) limit = p.stages_after_x;
                }
                mbarrier_wait(barriers.empty + write.index, write.parity);
                u8* const stage = at.buffers + write.index * STAGE_BYTES;
                const int count = min(Format::STAGE_K_TILES, K_TILES - k_tile);
#pragma unroll
                for (int t = 0; t < Config::TILES; t++) {
                    const int half = t / Config::Y_TILES * (p.tiles / 2);  // of ups, with GATED
                    const int tile = expert_tile + half + item * Config::Y_TILES + t % Config::Y_TILES;
                    weights.copy(stage + t * Format::STAGE_BYTES, tile, k_tile, count, barriers.full + write.index);
                }
                in_flight++;
                write.advance(p.stages);
            }
    }
    pdl_launch_dependents();
}

// By a warp: copies a block's rows of x, a lane each.
__device__ __forceinline__ void load_x(u8* to, const Block& block, const ExpertsParams& p, u64* full, int lane) {
    if (lane == 0) mbarrier_arrive_expect_tx(full, block.rows * X_ROW_BYTES);
    __syncwarp();
    if (lane < block.rows)
        bulk_copy(to + lane * Format::X_PITCH, p.x + i64(block.pairs[lane] / p.per_row) * X_ROW_BYTES, X_ROW_BYTES, full);
    __syncwarp();
}

// This warp's K tiles of a stage of `count`: `offset`, offset + MMA_WARPS and so on. `k_tile`: the stage's first.
template <bool SUM_X> __device__ __forceinline__ void multiply_stage(
    float (&acc)[1][4], const u8* stage, const u8* const (&x)[1], float* x_sums, int k_tile, int count, int offset,
    int lane
) {
#pragma unroll 1
    for (; offset + Config::MMA_WARPS < count; offset += 2 * Config::MMA_WARPS)
        Format::template multiply<2, SUM_X>(acc, stage, x, x_sums, offset, k_tile + offset, lane);
    if (offset < count) Format::template multiply<1, SUM_X>(acc, stage, x, x_sums, offset, k_tile + offset, lane);
}

__device__ __forceinline__ void multiply(
    Span span, int per_block, const SharedLayout& at, Barriers& barriers, const ExpertsParams& p, int lane
) {
    const int warp = threadIdx.x / 32, slot = warp / Config::MMA_WARPS;  // the warp's tile of an item
    PipelineState read = {0, 0}, buffer = {0, 1}, x_buffer = {0, 0};
    int offset = warp % Config::MMA_WARPS;  // this warp's first K tile of a stage, rotated by shorter stages
    float *x_sums = at.x_sums + slot * X_SUMS, *next_x_sums = x_sums + Config::TILES * X_SUMS;
#pragma unroll 1
    for (; span.count > 0; span = span.next(per_block)) {
        const int row = min(lane / 4, at.blocks[span.block].rows - 1);  // behind the last its products are dropped
        const u8* const x[1] = {at.x + (x_buffer.index * p.block_rows + row) * Format::X_PITCH +
                                lane % 4 * Format::LANE_X_BYTES};
        bool needs_x_sums = X_SUMS > 0;  // the block's first item's products compute them
        mbarrier_wait(barriers.x + x_buffer.index, x_buffer.parity);
#pragma unroll 1
        for (int left = span.count; left; left--) {
            float acc[1][4] = {};
#pragma unroll 1
            for (int k_tile = 0; k_tile < K_TILES; k_tile += Format::STAGE_K_TILES) {
                const int count = min(Format::STAGE_K_TILES, K_TILES - k_tile);
                mbarrier_wait(barriers.full + read.index, read.parity);
                const u8* const stage = at.buffers + read.index * STAGE_BYTES + slot * Format::STAGE_BYTES;
                if (needs_x_sums) multiply_stage<true>(acc, stage, x, x_sums, k_tile, count, offset, lane);
                else multiply_stage<false>(acc, stage, x, x_sums, k_tile, count, offset, lane);
                offset = (offset + Config::MMA_WARPS * Format::STAGE_K_TILES - count) % Config::MMA_WARPS;
                __syncwarp();
                if (lane == 0) mbarrier_arrive(barriers.empty + read.index);
                read.advance(p.stages);
            }
            mbarrier_wait(barriers.sums_empty + buffer.index, buffer.parity);
            store_sums<Config>(
                acc, at.sums + (buffer.index * Config::ALL_MMA_WARPS + warp) * Config::TILE_SUMS, lane
            );
            mbarrier_arrive(barriers.sums_full + buffer.index);
            buffer.advance(Config::SUM_BUFFERS);
            if (needs_x_sums) {  // from now on every warp needs the sums of all warps of its slot
                __syncwarp();
                named_barrier_sync<1, 32 * Config::ALL_MMA_WARPS>();
                needs_x_sums = false;
            }
        }
        x_buffer.advance(p.x_buffers);
        float* const previous = x_sums;  // a warp at the block after the next has passed the next one's barrier
        x_sums = next_x_sums, next_x_sums = previous;
    }
}

__device__ __forceinline__ float activated(float gate, float up, const ExpertsParams& p) {
    gate = fminf(gate, p.limit), up = fminf(fmaxf(up, -p.limit), p.limit);
    return gate / (1.0f + __expf(-p.alpha * gate)) * (up + p.offset);
}

// By the epilogue warp: x of the CTA's blocks ahead of their items, and y of every item.
__device__ __forceinline__ void store_items(
    Span span, int per_block, const SharedLayout& at, Barriers& barriers, const ExpertsParams& p, int lane
) {
    const int x_bytes = p.block_rows * Format::X_PITCH, outputs = Config::TILE_OUTPUTS * p.tiles;
    const int width = Config::GATED ? outputs / 2 : outputs;
    const int end_block = span.block + 1 + (span.left + per_block - 1) / per_block;
    int x_block = span.block, x_buffer = 0;  // the next to copy, and where
    const auto copy_x = [&]() {
        load_x(at.x + x_buffer * x_bytes, at.blocks[x_block++], p, barriers.x + x_buffer, lane);
        if (++x_buffer == p.x_buffers) x_buffer = 0;
    };
    if (span.count > 0)
        for (int i = 0; i < p.x_buffers && x_block < end_block; i++) copy_x();
    PipelineState buffer = {0, 0};
#pragma unroll 1
    for (; span.count > 0; span = span.next(per_block)) {
        const Block& block = at.blocks[span.block];
        const int sums_count = Config::TILE_OUTPUTS * block.rows;
        const u16* const bias = p.bias ? p.bias + i64(block.expert) * outputs : nullptr;
#pragma unroll 1
        for (int item = span.item; item < span.item + span.count; item++) {
            const int first = item * Config::Y_TILES * Config::TILE_OUTPUTS + lane % Config::TILE_OUTPUTS;
            float biases[Config::TILES], y[Config::Y_TILES][Config::COLUMNS / 2];
#pragma unroll
            for (int t = 0; t < Config::TILES; t++) {
                const int output = first + t % Config::Y_TILES * Config::TILE_OUTPUTS + t / Config::Y_TILES * width;
                biases[t] = bias ? Config::Elem::to_float(bias[output]) : 0.0f;
            }
            mbarrier_wait(barriers.sums_full + buffer.index, buffer.parity);
            // All MMA warps are through with the block's x, so its buffer takes that of a later block.
            if (item + 1 == span.item + span.count && x_block < end_block) copy_x();
            const float* const sums = at.sums + buffer.index * Config::ALL_MMA_WARPS * Config::TILE_SUMS;
            const auto sum = [&](int t, int i) {
                return biases[t] + add_up<Config, Config::MMA_WARPS>(
                                       sums + t * Config::MMA_WARPS * Config::TILE_SUMS + sum_index(i));
            };
#pragma unroll
            for (int j = 0; j < Config::COLUMNS / 2; j++) {  // pairs 2 j and 2 j + 1
                if (32 * j >= sums_count) break;
#pragma unroll
                for (int t = 0; t < Config::Y_TILES; t++) {
                    y[t][j] = sum(t, 32 * j + lane);
                    if (Config::GATED) y[t][j] = activated(y[t][j], sum(Config::Y_TILES + t, 32 * j + lane), p);
                }
            }
            mbarrier_arrive(barriers.sums_empty + buffer.index);
            buffer.advance(Config::SUM_BUFFERS);
#pragma unroll
            for (int j = 0; j < Config::COLUMNS / 2; j++) {
                if (32 * j + lane >= sums_count) break;
                u16* const to = p.y + i64(block.pairs[2 * j + lane / 16]) * width + first;
#pragma unroll
                for (int t = 0; t < Config::Y_TILES; t++)
                    to[t * Config::TILE_OUTPUTS] = Config::Elem::from_float(y[t][j]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
experts(const __grid_constant__ ExpertsParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Barriers barriers;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, per_block = p.tiles / Config::TILES;
    const SharedLayout at(shared, p);
    if (elect_one()) barriers.init(warp, p.stages);
    __syncwarp();
    if (!p.early_blocks) pdl_wait();
    const int items = load_blocks(at.blocks, p) * per_block, cta = blockIdx.x, ctas = gridDim.x;
    const Span span = Span::first(cta * items / ctas, (cta + 1) * items / ctas, per_block);
    if (warp == Config::PRODUCER_WARP) {
        if (elect_one()) load_weights(span, per_block, at, barriers, p);
        return;
    }
    pdl_wait();  // MMA warps too: polling for x, they would slow down small kernels beside this one
    if (warp == Config::EPILOGUE_WARP) store_items(span, per_block, at, barriers, p, lane);
    else multiply(span, per_block, at, barriers, p, lane);
}
