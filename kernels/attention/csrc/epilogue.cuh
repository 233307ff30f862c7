// Part 6 of 7: what a block writes of a segment, and the log-sum-exp merge of a row's segments.

// Results of one KV head: partials of its segments are [slot, row, HEAD_DIM], their base-2 log-sum-exps [slot, row].
struct Results {
    float *partial, *sums;
    u16* out;  // of the KV head's first query head and the first query
    int rows;
};

// Sums of the block's warps to normalized outputs, as a partial in `slot`, or where slot < 0 as the result.
__device__ __forceinline__ void store_segment(
    State& state, Rows& rows, const Results& results, i64 slot, const Lane& me
) {
    const int c = me.lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        float total = state.total[i / 2][i % 2], tail = state.tail[i / 2][i % 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
            total += __shfl_xor_sync(ALL, total, step);
            tail += __shfl_xor_sync(ALL, tail, step);
        }
        if (me.lane < 4) {
            rows.exchange[0][me.warp][4 * i - 3 * (i % 2) + 2 * c] = total;
            rows.exchange[1][me.warp][4 * i - 3 * (i % 2) + 2 * c] = tail;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const int row = 8 * (i / 2) + 2 * c + i % 2;
        if (row >= results.rows) continue;
        float total = 0, tail = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += rows.exchange[0][w][row], tail += rows.exchange[1][w][row];
        const float norm = total > 0 ? 1 / total : 0;
        const int channel = 16 * OUT_TILES * me.warp + me.lane / 4;
        float* partial = results.partial + (slot * results.rows + row) * HEAD_DIM + channel;
        u16* out = results.out + rows.out[row] + channel;
#pragma unroll
        for (int k = 0; k < 2 * OUT_TILES; k++) {
            const float x = (state.out[k / 2][i / 2][k % 2 * 2 + i % 2] + tail) * norm;
            if (slot < 0) out[8 * k] = u16(element2_of(x, 0));
            else partial[8 * k] = x;
        }
        if (slot >= 0 && me.warp == 0 && me.lane < 4)
            results.sums[slot * results.rows + row] = total > 0 ? rows.top[row] + log2f(total) - LIFT : MASKED;
    }
}

// The merge of some of a row's segments by ROW_LANES threads; a lane of them holds OWN adjacent channels.
struct Merged {
    static constexpr int OWN = 4;
    static constexpr int BATCHED = 8;  // partials in flight together: merging is all latency
    float best, total, acc[OWN];

    Merged() = default;
    // Segments at, at + step, ... below `count` of the row whose first segment is in `slot`.
    __device__ __forceinline__ Merged(const Results& results, i64 slot, int row, int at, int step, int count, int lane)
        : best(-1e30f), total(0), acc{} {
        const float* sums = results.sums + slot * results.rows + row;
        const float* partial = results.partial + (slot * results.rows + row) * HEAD_DIM + OWN * lane;
#pragma unroll 1
        for (; at < count; at += step * BATCHED) {
            float sum[BATCHED], part[BATCHED][OWN], next = best;
#pragma unroll
            for (int k = 0; k < BATCHED; k++) {
                const i64 from = at + step * k < count ? i64(at + step * k) * results.rows : 0;
                sum[k] = at + step * k < count ? __ldcg(sums + from) : MASKED;
                load(part[k], partial + from * HEAD_DIM);
            }
#pragma unroll
            for (int k = 0; k < BATCHED; k++) next = fmaxf(next, sum[k]);
            rescale(next);
#pragma unroll
            for (int k = 0; k < BATCHED; k++) add(exp2_of(sum[k] - best), 1, part[k]);
        }
    }
    __device__ __forceinline__ static void load(float (&x)[OWN], const float* from) {  // from L2: others wrote it
        const float4 y = __ldcg(reinterpret_cast<const float4*>(from));
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
    __device__ __forceinline__ void rescale(float next) {
        const float fade = exp2_of(best - next);
        best = next;
        total *= fade;
#pragma unroll
        for (int i = 0; i < OWN; i++) acc[i] *= fade;
    }
    __device__ __forceinline__ void add(float weight, float sum, const float (&part)[OWN]) {
        total = fmaf(weight, sum, total);
#pragma unroll
        for (int i = 0; i < OWN; i++) acc[i] = fmaf(weight, part[i], acc[i]);
    }
    __device__ __forceinline__ void store(u16* out, int lane) const {
        const float norm = total > 0 ? 1 / total : 0;
        *reinterpret_cast<uint2*>(out + OWN * lane) =
            make_uint2(element2_of(acc[0] * norm, acc[1] * norm), element2_of(acc[2] * norm, acc[3] * norm));
    }
};
constexpr int ROW_LANES = HEAD_DIM / Merged::OWN;

// True in the block that arrives last of `count`, which then sees what the others wrote. The counter wraps to zero.
__device__ __forceinline__ bool arrives_last(u32* arrived, int count) {
    __syncthreads();
    u32 before = 0;
    if (threadIdx.x == 0)
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(__cvta_generic_to_global(arrived)), "r"(count - 1) : "memory");
    return __syncthreads_or(before == u32(count - 1));
}
