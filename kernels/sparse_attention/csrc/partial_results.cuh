// Partial results: of warps, joined by their CTA, and of the CTAs of a row, joined by the last one of them.
#pragma once

#include "attend.cuh"

// What the warps of a CTA share.
template <class Config> struct Shared {
    Queries<Config> queries;
    LaneQueries<Config> lane_queries;  // as the scan or the attention to chosen tokens takes them
    RecentTokens<Config> recent;
    float row_max[Config::WARPS][8], row_sum[Config::WARPS][8];  // [warp, query head]
    bool last;  // whether this CTA is the last of its row to arrive

    // Of a batch row and KV head, by two warps.
    __device__ __forceinline__ void copy_inputs(const SparseParams& p, int b, int kv_head) {
        const i64 first_head = i64(b) * p.q_batch_stride + i64(kv_head) * Config::HEADS * p.q_head_stride;
        if (threadIdx.x < 32) queries.copy(p.q + first_head * 8, p.q_head_stride);
        if (threadIdx.x == 32) recent = RecentTokens<Config>(p, b);
    }
};

// Sums over values are stored in the order of registers and lanes, whose banks differ: entry [i, j, g, c] is
// Partial::out[i][j] of lane 4 g + c, for the COLUMNS values of c that have heads.
template <class Config> struct PartialEntry {
    static constexpr int COLUMNS = (Config::HEADS + 1) / 2, COUNT = 4 * Config::OUT_TILES * 8 * COLUMNS;
    int head, channel;

    __device__ __forceinline__ PartialEntry(int entry) {
        const int c = entry % COLUMNS, g = entry / COLUMNS % 8, j = entry / COLUMNS / 8 % 4, i = entry / COLUMNS / 32;
        head = 2 * c + j % 2, channel = Config::HALF_DIM / 8 * g + i + j / 2 * Config::HALF_DIM;
    }
    __device__ __forceinline__ static int index(int i, int j, int g, int c) {
        return ((i * 4 + j) * 8 + g) * COLUMNS + c;
    }
};

// Stores a warp's partial result for its CTA. out: [warp, entry] in shared memory.
template <class Config>
__device__ __forceinline__ void store_partial(Partial<Config>& partial, Shared<Config>& shared, float* out) {
    using Entry = PartialEntry<Config>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    column_sum(partial.row_sum[0], partial.row_sum[1], partial.zero_sum[0], partial.zero_sum[1]);
    if (g == 0) {
#pragma unroll
        for (int e = 0; e < 2; e++)
            shared.row_max[warp][2 * c + e] = partial.row_max[e], shared.row_sum[warp][2 * c + e] = partial.row_sum[e];
    }
    if (c >= Entry::COLUMNS) return;
    out += warp * Entry::COUNT;
#pragma unroll
    for (int i = 0; i < Config::OUT_TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) out[Entry::index(i, j, g, c)] = partial.out[i][j] + partial.zero_sum[j % 2];
}

// Joins the warps' partial results, relative to each warp's maximum in `out` [warp, entry], and leaves them in global
// memory for the last CTA of the row.
template <class Config>
__device__ __forceinline__ void store_part(const SparseParams& p, const Shared<Config>& shared, const float* out) {
    using Entry = PartialEntry<Config>;
    constexpr int WARPS = Config::WARPS, HEADS = Config::HEADS;
    const i64 part = blockIdx.x;
    for (int i = threadIdx.x; i < Entry::COUNT; i += Config::THREADS) {
        const int head = Entry(i).head;
        float row_max = negative_infinity(), row_sum = 0, value = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) row_max = fmaxf(row_max, shared.row_max[warp][head]);
        const float reference = finite_reference(row_max);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float weight = exp2_approx(shared.row_max[warp][head] - reference);
            row_sum += weight * shared.row_sum[warp][head];
            value += weight * out[warp * Entry::COUNT + i];
        }
        p.partial[part * Entry::COUNT + i] = value;
        if (Entry(i).channel || head >= HEADS) continue;
        p.part_max[part * HEADS + head] = row_max;
        p.part_sum[part * HEADS + head] = row_sum;
    }
}

// Whether this is the last CTA of its row; what the others wrote before is then visible.
template <class Config>
__device__ __forceinline__ bool is_last_part(const SparseParams& p, Shared<Config>& shared, int row) {
    __syncthreads();  // the release below is of all threads' writes before
    if (threadIdx.x == 0) shared.last = atomic_inc_acq_rel(p.arrivals + row, p.parts - 1) == u32(p.parts - 1);
    __syncthreads();
    return shared.last;
}

// Joins the partial results of the row's CTAs into its output. scratch: shared memory for two floats per part and head.
template <class Config> __device__ __forceinline__ void join_parts(const SparseParams& p, float* scratch, int row) {
    using Entry = PartialEntry<Config>;
    constexpr int AHEAD = 16;  // loads in flight
    constexpr int HEADS = Config::HEADS, THREADS = Config::THREADS;
    const i64 first = i64(row) * p.parts;
    float *const maxima = scratch, *const sums = scratch + p.parts * HEADS;
    for (int i = threadIdx.x; i < p.parts * HEADS; i += THREADS) {
        maxima[i] = __ldcg(p.part_max + first * HEADS + i);
        sums[i] = __ldcg(p.part_sum + first * HEADS + i);
    }
    float x[AHEAD];
    const auto load_parts = [&](int entry, int from) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (from + j < p.parts) x[j] = __ldcg(p.partial + (first + from + j) * Entry::COUNT + entry);
    };
    if (threadIdx.x < Entry::COUNT) load_parts(threadIdx.x, 0);  // does not wait for the maxima
    __syncthreads();
    for (int i = threadIdx.x; i < Entry::COUNT; i += THREADS) {
        const Entry entry(i);
        if (entry.head >= HEADS) continue;
        float row_max = negative_infinity(), row_sum = 0, value = 0;
        for (int part = 0; part < p.parts; part++) row_max = fmaxf(row_max, maxima[part * HEADS + entry.head]);
        const float reference = finite_reference(row_max);
        for (int from = 0; from < p.parts; from += AHEAD) {
            if (from > 0 || i >= THREADS) load_parts(i, from);
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (from + j >= p.parts) break;
                const float weight = exp2_approx(maxima[(from + j) * HEADS + entry.head] - reference);
                row_sum += weight * sums[(from + j) * HEADS + entry.head];
                value += weight * x[j];
            }
        }
        p.out[(i64(row) * HEADS + entry.head) * Config::HEAD_DIM + entry.channel] =
            Config::Elem::from_float(row_sum > 0 ? value / row_sum : 0);
    }
}
