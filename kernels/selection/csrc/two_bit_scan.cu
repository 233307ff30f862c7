// First half of the choice by 2-bit keys, for Hopper and newer: every token's score as the bin of a histogram, and each
// CTA's histogram. two_bit_choose.cu is the second half.

#include "histogram.cuh"
#include "scan.cuh"
#include "two_bit.cuh"

using Config = ScanConfig;

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    two_bit_scan(const __grid_constant__ TwoBitParams p) {
    extern __shared__ __align__(16) u8 dynamic[];  // ScanStage [WARPS, STAGES]
    __shared__ Queries<Config> queries;
    __shared__ LaneQueries<Config> lane_queries;
    __shared__ __align__(16) u32 histogram[Config::BINS];
    __shared__ SampleSums<Config> sums;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, warp = threadIdx.x / 32;
    pdl_launch_dependents();
    const GroupRange range(p, row, part);
    const ScannedKeys keys{p.codes, p.scales, p.minima};
    GroupScan groups(range, keys, reinterpret_cast<ScanStage<Config>*>(dynamic) + warp * Config::STAGES);
    for (int i = threadIdx.x; i < Config::BINS; i += Config::THREADS) histogram[i] = 0;
    pdl_wait();

    const int b = row / p.kv_heads, kv_head = row % p.kv_heads;
    const i64 first_head = i64(b) * p.q_batch_stride + i64(kv_head) * Config::HEADS * p.q_head_stride;
    if (warp == 0) queries.copy(p.q + first_head * 8, p.q_head_stride);
    __syncthreads();
    const Query<Config> query(queries);
    lane_queries.store<Scan<Config>::PLANES>(query);
    __syncthreads();
    Scan<Config> scan(p.scale, query, lane_queries);
    groups.sample(scan, sums);
    const auto bins = [&](int i) { return p.bins + range.stored(range.in_row(i)) * KV_GROUP; };
    groups.run(scan, bins, histogram, p.sinks, [](int, const float (&)[2]) {});
    __syncthreads();
    constexpr int COUNT = BINS_PER_THREAD<Config>;
    u32 counts[COUNT];
    ld_shared(counts, histogram + COUNT * threadIdx.x);
    u32* const to = p.histograms + i64(blockIdx.x) * Config::BINS + COUNT * threadIdx.x;
    *reinterpret_cast<uint4*>(to) = make_uint4(counts[0], counts[1], counts[2], counts[3]);
}
