// Configuration and parameters of the linear kernel. The headers beside this one are templates on such a struct.
#pragma once

#include "../../device/csrc/ptx.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_WEIGHT_BITS 4
#define CONFIG_WEIGHT_GROUP 128
#define CONFIG_BF16 1
#define CONFIG_X_TILES 1
#define CONFIG_SPLIT_K 1
#define CONFIG_X_MULTICAST 1
#define CONFIG_X_PARTS 1
#define CONFIG_MMA_WARPS 8
#define CONFIG_STAGE_INPUTS 4096
#define CONFIG_MAX_STAGES 16
#define CONFIG_FUSE_SWIGLU 0
#define CONFIG_INTEGER 0
#define CONFIG_TILE_STAGES 1
#define CONFIG_WHOLE_STAGES 1
#endif

struct LinearConfig {
    // Compiled variant: LinearSchedule.options passes the value of each as -DCONFIG_NAME.
    static constexpr int WEIGHT_BITS = CONFIG_WEIGHT_BITS;    // 16 (dense.cuh), 4 or 8 (quantized.cuh)
    static constexpr int WEIGHT_GROUP = CONFIG_WEIGHT_GROUP;  // inputs that share a scale: 32, 64, 128, 256; 0 if dense
    static constexpr bool BF16 = CONFIG_BF16 != 0;            // dtype of x, bias, y and dense weights; else float16
    static constexpr int X_TILES = CONFIG_X_TILES;            // 8-row tiles of x per CTA
    static constexpr int SPLIT_K = CONFIG_SPLIT_K;            // CTAs of a cluster that split the inputs: 1, 2, 4 or 8
    static constexpr int X_MULTICAST = CONFIG_X_MULTICAST;    // CTAs of a cluster that fetch x together: 1 or 2
    static constexpr int X_PARTS = CONFIG_X_PARTS;            // parts in which x arrives
    static constexpr int MMA_WARPS = CONFIG_MMA_WARPS;        // warps of a CTA that multiply
    static constexpr int STAGE_INPUTS = CONFIG_STAGE_INPUTS;  // inputs of an output tile in a stage of the pipeline
    static constexpr int MAX_STAGES = CONFIG_MAX_STAGES;      // of the pipeline
    static constexpr bool FUSE_SWIGLU = CONFIG_FUSE_SWIGLU != 0;  // the first half of the outputs gates the second
    static constexpr bool INTEGER = CONFIG_INTEGER != 0;  // products of integers (integer.cuh)
    static constexpr int TILE_STAGES = CONFIG_TILE_STAGES;  // stages of an output tile, with INTEGER
    static constexpr bool WHOLE_STAGES = CONFIG_WHOLE_STAGES != 0;  // none of them is shorter

    using Elem = Element<BF16>;
    static constexpr int CLUSTER = SPLIT_K * X_MULTICAST;
    static constexpr int TILE_OUTPUTS = 16;      // outputs of an output tile, the rows of an mma
    static constexpr int COLUMNS = 8 * X_TILES;  // rows of x, the columns of the products
    static constexpr int TILE_SUMS = TILE_OUTPUTS * COLUMNS;
    static constexpr int SUM_BUFFERS = 2;  // output tiles whose sums are on their way to the epilogue warp
    static constexpr int PRODUCER_WARP = MMA_WARPS, EPILOGUE_WARP = MMA_WARPS + 1;
    static constexpr int WARPS = MMA_WARPS + 2, THREADS = 32 * WARPS;

    static_assert(!FUSE_SWIGLU || SPLIT_K == 1, "a gate and what it multiplies must be in one CTA");
};

// LinearParams in linear/cuda.py has the same layout.
struct LinearParams {
    const u8 *x, *weight;  // [rows, inputs]; as dense.cuh or quantized.cuh takes it
    const u8* lower;       // the second plane of 8-bit weights, or null
    const u16* bias;       // [outputs], or null
    u16* y;                // [rows, outputs], with FUSE_SWIGLU [rows, outputs / 2]
    int rows, inputs, outputs;
    int rows_per_pass;     // rows of x of a CTA; blockIdx.y counts passes over the weight
    int max_tiles;         // output tiles of a CTA, at most
    int stages;            // pipeline stages
    int trigger_stages;    // stages left to be copied when the next kernel may start; -1 for when x has arrived
    int stages_before_x, stages_after_x;  // in flight at once before and after x has arrived
};
