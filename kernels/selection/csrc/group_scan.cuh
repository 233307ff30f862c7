// A CTA's scan of its groups: first a sample of the row's, then every WARPS-th of the CTA's own by each warp, of which
// STAGES are copied or scanned at a time.
#pragma once

#include "scan.cuh"

// The groups of a row that are sampled: all of few, else the first, the last, and others evenly between.
struct RowSample {
    int row_groups, count;

    __device__ __forceinline__ RowSample(int row_groups) : row_groups(row_groups), count(min(row_groups, SAMPLES)) {}
    __device__ __forceinline__ int group(int i) const { return i * (row_groups - 1) / max(count - 1, 1); }
};

// By sample and query head, in shared memory; see Scan::sample.
struct SampleSums {
    float largest[SAMPLES][8], sum[SAMPLES][8];
};

// Groups: of a CTA, which are count(), of a row of row_groups. The i-th one has the number in_row(i) there; number n is
// stored(n) among all rows' groups.
template <class Groups> struct GroupScan {
    const Groups& own;
    const ScannedKeys keys;
    const RowSample samples;
    ScanStage* stages;  // of the warp
    int count;          // of the CTA's groups

    // Reads codes only, which no kernel writes that may still run. The last stage has a sample first.
    __device__ __forceinline__ GroupScan(
        const Groups& own, const ScannedKeys& keys, ScanStage* stages
    ) : own(own), keys(keys), samples(own.row_groups), stages(stages), count(own.count()) {
        const int warp = threadIdx.x / 32;
        if (warp < samples.count) start_copy(stages[STAGES - 1], keys, own.stored(samples.group(warp)));
        cp_async_commit();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) copy(warp + i * WARPS, i);
    }
    __device__ __forceinline__ void copy(int i, int stage) {
        if (i < count) start_copy(stages[stage], keys, own.stored(own.in_row(i)));
        cp_async_commit();
    }
    // Sets the weights of the scan's query heads. By all threads.
    __device__ __forceinline__ void sample(Scan& scan, SampleSums& sums) {
        const int warp = threadIdx.x / 32;
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        if (warp < samples.count) scan.sample(stages[STAGES - 1], sums.largest[warp], sums.sum[warp]);
        __syncwarp();
        copy(warp + (STAGES - 1) * WARPS, STAGES - 1);
        __syncthreads();
        scan.weigh_heads(sums.largest, sums.sum, samples.count);
    }
    // bins(i): where the bins of the i-th group's tokens are left.
    template <class Bins>
    __device__ __forceinline__ void run(const Scan& scan, const Bins& bins, u32* histogram, int sinks) {
        for (int i = threadIdx.x / 32, stage = 0; i < count; i += WARPS, stage = (stage + 1) % STAGES) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            scan.group(stages[stage], bins(i), histogram, sinks - own.in_row(i) * GROUP);
            __syncwarp();
            copy(i + STAGES * WARPS, stage);
        }
    }
};
