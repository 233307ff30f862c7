// What the kernel of filter.cu is made of: a row in the shared memory of a cluster, keys of logits, sums over blocks.
//
// Compiled with -D: ELEMENT (0 float, 1 bfloat16, 2 float16), CLUSTER (blocks that share a row), WIDE (1 where rows
// are aligned, so that a copy moves 16 bytes, else 0).

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 512;
constexpr int BINS = 2048;
constexpr int OWN = BINS / THREADS;  // bins that a thread adds up
constexpr int WARPS = THREADS / 32;
constexpr int FINEST = ELEMENT == 0 ? 0 : ELEMENT == 1 ? 16 : 13;  // lowest bit of a key that tells logits apart
constexpr int ELEMENT_BYTES = ELEMENT == 0 ? 4 : 2;
constexpr int PACK = 16 / ELEMENT_BYTES;  // logits that are read together
constexpr u32 PADDING = ELEMENT == 0 ? 0xFF800000u : ELEMENT == 1 ? 0xFF80FF80u : 0xFC00FC00u;  // minus infinity
constexpr u32 ALL = 0xFFFFFFFFu;
constexpr float ONE = 2147483648.0f;  // the weight of a whole row
#define LOWEST __int_as_float(0xFF800000)  // minus infinity

extern __shared__ uint4 packs[];  // the block's part of the row: thread t reads packs t, t + THREADS, ...

struct Found {
    u32 bin, above, here;  // where the wanted weight is reached, the weight of the bins above, and of this one
};

struct Part {
    float peak, floor, mass;  // of a block's logits; below the floor none is among the row's top k
};

struct Shared {
    u32 own[BINS];     // the block's own histogram
    u32 merged[BINS];  // the row's, in the first block
    Found found;       // in the first block
    Part part;
    u32 sums[WARPS];
    float floats[WARPS];
};

// ---------------------------------------------------------------- the cluster

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 address_in(const void* shared, int rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(u32(__cvta_generic_to_shared(shared))), "r"(rank));
    return address;
}
__device__ __forceinline__ u32 load_from(const void* shared, int rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in(shared, rank)) : "memory");
    return value;
}
__device__ __forceinline__ void add_to(u32* shared, int rank, u32 value) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address_in(shared, rank)), "r"(value)
                 : "memory");
}

// ---------------------------------------------------------------- logits and their keys

__device__ __forceinline__ float value_of(u32 word, int half) {
    if (ELEMENT == 0) return __uint_as_float(word);
    if (ELEMENT == 1) return __uint_as_float(half ? word & 0xFFFF0000u : word << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(half ? word >> 16 : word)));
    return value;
}
// Keys order as the values do; adding zero makes -0 a +0, as equal values must share a key.
__device__ __forceinline__ u32 key_of(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits ^ (int(bits) < 0 ? ALL : 0x80000000u);
}
__device__ __forceinline__ float value_of_key(u32 key) {
    return __uint_as_float(key ^ (int(key) < 0 ? 0x80000000u : ALL));
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The least value of a key or above; keys of no number are below -inf.
__device__ __forceinline__ float edge(u32 key) { return fmaxf(value_of_key(key), LOWEST); }
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 larger;
    if (ELEMENT == 1) asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
__device__ __forceinline__ float largest(const uint4& pack) {
    if (ELEMENT == 0)
        return fmaxf(fmaxf(value_of(pack.x, 0), value_of(pack.y, 0)), fmaxf(value_of(pack.z, 0), value_of(pack.w, 0)));
    const u32 pair = larger_pair(larger_pair(pack.x, pack.y), larger_pair(pack.z, pack.w));
    return fmaxf(value_of(pair, 0), value_of(pair, 1));
}

// Calls `body` with the thread's logits of `low` or more. Most packs have none and cost little.
template <class Body>
__device__ __forceinline__ void for_each(int loads, float low, const Body& body) {
#pragma unroll 1
    for (int i = 0; i < loads; ++i) {
        const uint4 pack = packs[i * THREADS + threadIdx.x];
        if (!(largest(pack) >= low)) continue;
        const u32 words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            const float value = value_of(words[j * ELEMENT_BYTES / 4], j % (PACK / 4));
            if (value >= low) body(value);
        }
    }
}

// Copies the block's part of a row to shared memory, padded with minus infinity.
__device__ __forceinline__ void load(const char* row, int vocab, int rank, int loads) {
    const int begin = rank * loads * THREADS * PACK;
    u16* halves = reinterpret_cast<u16*>(packs);
    const u16* from = reinterpret_cast<const u16*>(row);
    for (int pack = threadIdx.x; WIDE && pack < loads * THREADS; pack += THREADS) {
        if (begin + pack * PACK < vocab)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(packs + pack))),
                         "l"(row + (i64(begin) + pack * PACK) * ELEMENT_BYTES) : "memory");
        else packs[pack] = {PADDING, PADDING, PADDING, PADDING};
    }
    constexpr int HALVES = ELEMENT_BYTES / 2;  // 16-bit words of a logit; the second of float32 is the upper one
    for (int i = threadIdx.x; !WIDE && i < loads * THREADS * 8; i += THREADS)
        halves[i] = begin + i / HALVES < vocab ? from[begin * HALVES + i]
                                               : u16(i % HALVES || HALVES == 1 ? PADDING >> 16 : 0);
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---------------------------------------------------------------- sums over a block

template <class Join>
__device__ __forceinline__ float join(float value, float* scratch, const Join& join_two) {
    for (int step = 16; step; step /= 2) value = join_two(value, __shfl_xor_sync(ALL, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < WARPS; ++warp) value = join_two(value, scratch[warp]);
    return value;
}

// The sum of what the threads after this one hold.
__device__ __forceinline__ u32 sum_after(u32 own, u32* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = own;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(ALL, sum, step);
        if (lane + step < 32) sum += other;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = sum;
    __syncthreads();
    u32 later = 0;
    for (int other = warp + 1; other < WARPS; ++other) later += scratch[other];
    return sum - own + later;
}

// Where the weight of a table, summed from the top, reaches `needed`, or all there is where rounding left less.
// Clears the table. All threads of a block call this.
__device__ __forceinline__ void descend(u32* table, u32 needed, u32* scratch, Found& found) {
    u32 weight[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own += weight[i] = table[threadIdx.x * OWN + i];
        table[threadIdx.x * OWN + i] = 0;
    }
    u32 above = sum_after(own, scratch), total = 0;
    for (int warp = 0; warp < WARPS; ++warp) total += scratch[warp];
    needed = min(needed, total);
    if (needed <= above || needed > above + own) return;
    bool reached = false;
#pragma unroll
    for (int i = OWN - 1; i >= 0; --i) {
        if (reached) continue;
        reached = above + weight[i] >= needed;
        if (reached) found = {threadIdx.x * OWN + i, above, weight[i]};
        above += weight[i];
    }
}
