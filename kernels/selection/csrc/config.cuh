// Configuration of the kernels that scan 2-bit keys. The headers beside this one are templates on such a struct.
#pragma once

#include "../../kv_cache/csrc/quantized_planes.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_HEAD_DIM 128
#define CONFIG_BF16 1
#define CONFIG_HEADS 4
#define CONFIG_STAGE_BYTES 4608
#endif

struct ScanConfig {
    // Compiled variant: ScanVariant.options passes the value of each as -DCONFIG_NAME.
    static constexpr int HEAD_DIM = CONFIG_HEAD_DIM;        // 64 or 128
    static constexpr int HEADS = CONFIG_HEADS;              // query heads of a KV head, 1 to 8
    static constexpr int STAGE_BYTES = CONFIG_STAGE_BYTES;  // size of a ScanStage, as the launch computes it
    using Elem = Element<CONFIG_BF16 != 0>;                 // dtype of q, keys, values and out

    static constexpr int GROUP = KV_GROUP;
    static constexpr int WARPS = 16, THREADS = 32 * WARPS;
    static constexpr int HALF_DIM = HEAD_DIM / 2, QUARTER_DIM = HEAD_DIM / 4;
    static constexpr int COLUMN_HEADS = HEADS <= 4 ? 4 : 8;  // column g of a product has the query head g % COLUMN_HEADS
    static constexpr int STAGES = 2;            // of a warp: groups that are being scanned or copied
    static constexpr int SAMPLES = 8;           // groups of a row whose scores estimate each query head's log-sum-exp
    static constexpr int LOG2_STEPS = 3;        // bins of a score per power of two: 8, over all positive floats
    static constexpr int BINS = 256 << LOG2_STEPS;
    static constexpr int MAX_GROUPS = 320;      // of a CTA of two_bit_choose.cu

    static_assert(HEADS >= 1 && HEADS <= 8, "query heads are the columns of one product");
};
