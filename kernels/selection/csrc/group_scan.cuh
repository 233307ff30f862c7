// A warp's scan of its groups: every WARPS-th of the CTA's, of which STAGES are copied or scanned at a time.
#pragma once

#include "scan.cuh"

// Groups: of a CTA, which are count(), the i-th one stored(i) among all rows' and in_row(i) in its own row.
// Bins: where the i-th one's bins are left, `u16* Bins::operator()(int i)`.
template <class Groups> struct GroupScan {
    const Groups& own;
    const ScannedKeys keys;
    ScanStage* stages;
    int count;  // of the CTA's groups

    // Reads codes only, which no kernel writes that may still run.
    __device__ __forceinline__ GroupScan(
        const Groups& own, const ScannedKeys& keys, ScanStage* stages
    ) : own(own), keys(keys), stages(stages), count(own.count()) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) copy(threadIdx.x / 32 + i * WARPS, i);
    }
    __device__ __forceinline__ void copy(int i, int stage) {
        if (i < count) start_copy(stages[stage], keys, own.stored(i));
        cp_async_commit();
    }
    template <class Bins>
    __device__ __forceinline__ void run(Scan& scan, const Bins& bins, u32* histogram, int sinks) {
        for (int i = threadIdx.x / 32, stage = 0; i < count; i += WARPS, stage = (stage + 1) % STAGES) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            scan.group(stages[stage], bins(i), histogram, sinks - own.in_row(i) * GROUP);
            __syncwarp();
            copy(i + STAGES * WARPS, stage);
        }
    }
};
