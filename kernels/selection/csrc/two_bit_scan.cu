// First half of the choice by 2-bit keys, for Hopper and newer: every token's score as the bin of a histogram, and each
// CTA's histogram. two_bit_choose.cu is the second half.

#include "group_scan.cuh"
#include "histogram.cuh"
#include "two_bit_params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) two_bit_scan(const __grid_constant__ TwoBitParams p) {
    extern __shared__ __align__(16) u8 dynamic[];  // ScanStage [WARPS][STAGES]
    __shared__ Queries queries;
    __shared__ LaneQueries queries_of_lanes;
    __shared__ __align__(16) u32 histogram[BINS];
    __shared__ SampleSums sums;
    const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts, warp = threadIdx.x / 32;
    pdl_launch_dependents();
    const OwnGroups own(p, row, part);
    const ScannedKeys keys{p.codes, p.scales, p.minima};
    GroupScan groups(own, keys, reinterpret_cast<ScanStage*>(dynamic) + warp * STAGES);
    for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
    pdl_wait();

    const int b = row / p.kv_heads, kv_head = row % p.kv_heads;
    const i64 first_head = i64(b) * p.q_batch_stride + i64(kv_head) * HEADS * p.q_head_stride;
    if (warp == 0) queries.copy(p.q + first_head * 8, p.q_head_stride);
    __syncthreads();
    const Query query(queries);
    if (warp == 0) queries_of_lanes.store<Scan::PLANES, false>(query);
    __syncthreads();
    Scan scan(p.scale, query, queries_of_lanes);
    groups.sample(scan, sums);
    groups.run(scan, [&](int i) { return p.bins + own.stored(own.in_row(i)) * GROUP; }, histogram, p.sinks);
    __syncthreads();
    u32 counts[OWN_BINS];
    ld_shared(counts, histogram + OWN_BINS * threadIdx.x);
    u32* const to = p.histograms + i64(blockIdx.x) * BINS + OWN_BINS * threadIdx.x;
    *reinterpret_cast<uint4*>(to) = make_uint4(counts[0], counts[1], counts[2], counts[3]);
}
