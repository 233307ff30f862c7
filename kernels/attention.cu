// Decode attention over hierarchical 4-bit codes for Hopper and newer; see attention_cuda.py for the story.
//
// Compiled with -D: HEAD_DIM (64, 128), BITS (4 upper codes, 8 upper and lower), BF16 (dtype of q, keys, values
// and out: 1 bfloat16, 0 float16), TILES (8-row tiles of query rows per warp), TEAM (warps that share one
// stream of items because the query rows need several warps), WARPS and BLOCKS (per block, per multiprocessor),
// ITEMS (ring depth of a team), and ENTRY_ATTEND or ENTRY_MERGE (which of the two kernels).
//
// Everything is computed transposed: S^T = K Q^T and O^T = V^T P^T, with codes as the A operand (16 tokens or
// 16 channels) and 8 query rows as the B operand of mma.m16n8k16. `g` = lane / 4 and `c` = lane % 4 throughout.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int GROUP = 128;
constexpr int PIECES = HEAD_DIM * BITS >= 512 ? 2 : 1;  // items that a group's keys (or values) come in
constexpr int PLANE_BYTES = GROUP * HEAD_DIM / 2 / PIECES;
constexpr int CODE_BYTES = PLANE_BYTES * (BITS / 4);
constexpr int ITEM_BYTES = CODE_BYTES + 512;
constexpr int SLOT_BYTES = 2 * HEAD_DIM;
constexpr int SLOT_PITCH = SLOT_BYTES + 16;  // padded: ldmatrix then meets every bank once
constexpr int PIECE_TILES = ITEM_BYTES / SLOT_PITCH >= 32 ? 2 : 1;
constexpr int PIECE_SLOTS = 16 * PIECE_TILES;  // full-precision tokens of an item, each copied by one lane
constexpr int UNIT_SLOTS = PIECE_SLOTS * PIECES;
constexpr int WORDS = HEAD_DIM / 32;  // 32-bit words of codes that a lane holds of one token
constexpr int STEPS = HEAD_DIM / 16;
constexpr int SCORE_TILES = GROUP / 16;
constexpr int OUT_TILES = HEAD_DIM / 16;
constexpr int TEAMS = WARPS / TEAM;
constexpr int LAG = TEAM > 1 ? 2 : 1;  // items read before their space is filled again: what a team may be apart
constexpr int ROWS = 8 * TILES * TEAM;
constexpr int MERGE_PITCH = HEAD_DIM + 4;
constexpr u32 ALL = 0xFFFFFFFFu;
constexpr float NOTHING = -1e30f;  // finite "minus infinity": differences of two stay numbers
#define MASKED __int_as_float(0xFF800000)  // minus infinity
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float HEADROOM = 8.0f;  // a running maximum may be outgrown by 2^8 before sums are rescaled
constexpr float LIFT = 5.0f;      // weights are stored times 2^5, so that fp16 resolves small ones
constexpr u32 ONE = BF16 ? 0x3F803F80u : 0x3C003C00u;

static_assert(PIECE_SLOTS * SLOT_PITCH <= ITEM_BYTES, "a full-precision piece must fit an item");
static_assert(WARPS * 8 * TILES * (MERGE_PITCH + 2) * 4 <= TEAMS * ITEMS * ITEM_BYTES, "merge reuses the ring");

// ---------------------------------------------------------------- instructions

__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 hmax2(u32 a, u32 b) {
    u32 d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 half2_of(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ u32 element2_of(float low, float high) {  // in the dtype of the buffers
    u32 d;
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else d = half2_of(low, high);
    return d;
}
__device__ __forceinline__ float float_of(u16 element) {
    if (BF16) return __uint_as_float(u32(element) << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(element));
    return f;
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// 8x8 matrix of 16-bit elements, lane holding (row g, columns 2c, 2c+1), transposed.
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same with the sum started elsewhere.
__device__ __forceinline__ void mma_half_from(
    float (&d)[4], const float (&start)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1
) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1),
          "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
}
__device__ __forceinline__ void mma_element(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    mma_half(d, a0, a1, a2, a3, b0, b1);
#endif
}

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
template <int N> __device__ __forceinline__ void load_words(u32 (&x)[N], u32 address) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3]) : "r"(address + 4 * i));
    } else {
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address));
    }
}
__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
// Ordinary accesses of shared memory before this are ordered before bulk copies after it.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------- unpacking

// Four consecutive bytes of codes to four pairs of halves: [0], [1] hold the low nibbles' elements, [2], [3] the
// high ones'. The order inside is pair_first, pair_second of the elements 0..3: INT4 as the masks leave them
// (0,2) (1,3), INT8 (0,1) (2,3). A code ORed into the mantissa of a power of two is that power plus the code: no
// conversion. The power is not subtracted here but in the accumulators, by a product of the same rounded operand
// with a constant, so it cancels to fp32 accuracy.

// (x & mask) | bits in one instruction; left to itself the compiler takes two, as both constants are immediates.
__device__ __forceinline__ u32 masked_or(u32 x, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}
__device__ __forceinline__ void unpack_bytes(u32 (&pairs)[4], u32 upper, u32 lower) {  // 1024 + 16 U + (L + 8)
    const u32 low = ((upper << 4) & 0xF0F0F0F0u) | (lower & 0x0F0F0F0Fu);
    const u32 high = (upper & 0xF0F0F0F0u) | ((lower >> 4) & 0x0F0F0F0Fu);
    pairs[0] = __byte_perm(low, 0x64646464u, 0x4140);
    pairs[1] = __byte_perm(low, 0x64646464u, 0x4342);
    pairs[2] = __byte_perm(high, 0x64646464u, 0x4140);
    pairs[3] = __byte_perm(high, 0x64646464u, 0x4342);
}
// Keys: INT4 as 1024 + U and, in [2] and [3], 1024 + 16 U, whose queries are divided by 16.
__device__ __forceinline__ void unpack_keys(u32 (&pairs)[4], u32 upper, u32 lower) {
    if (BITS == 8) return unpack_bytes(pairs, upper, lower);
    pairs[0] = masked_or(upper, 0x000F000Fu, 0x64006400u);
    pairs[1] = masked_or(upper >> 8, 0x000F000Fu, 0x64006400u);
    pairs[2] = masked_or(upper, 0x00F000F0u, 0x64006400u);
    pairs[3] = masked_or(upper >> 8, 0x00F000F0u, 0x64006400u);
}
// Values: INT4 as 64 + U, as what cancels weighs on the output where it would not on a score.
__device__ __forceinline__ void unpack_values(u32 (&pairs)[4], u32 upper, u32 lower) {
    if (BITS == 8) return unpack_bytes(pairs, upper, lower);
    pairs[0] = masked_or(upper << 4, 0x00F000F0u, 0x54005400u);
    pairs[1] = masked_or(upper >> 4, 0x00F000F0u, 0x54005400u);
    pairs[2] = masked_or(upper, 0x00F000F0u, 0x54005400u);
    pairs[3] = masked_or(upper >> 8, 0x00F000F0u, 0x54005400u);
}
constexpr u32 KEY_OFFSET = BITS == 8 ? 0xD408D408u : 0xE400E400u;    // - 1032 / 16 (16 U + L - 8 remains), - 1024
constexpr u32 VALUE_OFFSET = BITS == 8 ? 0xE488E488u : 0xD480D480u;  // - 1160, - 72: centred codes remain
// From two words of adjacent halves (0,1) (2,3) to the order in which `unpack` leaves the codes.
__device__ __forceinline__ u32 pair_first(u32 x0, u32 x1) { return BITS == 4 ? __byte_perm(x0, x1, 0x5410) : x0; }
__device__ __forceinline__ u32 pair_second(u32 x0, u32 x1) { return BITS == 4 ? __byte_perm(x0, x1, 0x7632) : x1; }

// ---------------------------------------------------------------- work

struct Lengths {
    const int *begin, *end, *groups;
    int batch, kv_heads, queries, capacity, group_capacity;

    __device__ int visible_groups(int b) const { return min(groups[b], group_capacity); }
    __device__ int last_slot(int b) const { return min(end[b] + queries - 1, capacity); }
    __device__ int units(int b) const {  // of one KV head: quantized groups, then blocks of full-precision slots
        const int slots = max(last_slot(b) - begin[b], 0);
        return visible_groups(b) + (slots + UNIT_SLOTS - 1) / UNIT_SLOTS;
    }
};

// All units of (batch row, KV head) after (batch row, KV head), cut into shares of consecutive units: share i
// starts at floor(i * total / shares), so rows of one length are cut at their ends when shares divide evenly.
// 32-bit arithmetic: i * (total % shares) stays below shares ** 2, and the launcher keeps shares below 2 ** 16.
struct Work {
    u32 total, shares, whole, rest;

    __device__ Work(const Lengths& lengths, u32 blocks, int lane) : total(0) {
        for (int b = 0; b < lengths.batch; b += 32)
            total += __reduce_add_sync(ALL, b + lane < lengths.batch ? u32(lengths.units(b + lane)) : 0u);
        total *= lengths.kv_heads;
        shares = min(blocks, total);
        whole = shares ? total / shares : 0;
        rest = total - whole * shares;
    }
    __device__ int first_unit(u32 share) const { return share * whole + share * rest / shares; }
    __device__ int share_of(int unit) const {
        int share = min(int(float(unit) / float(total) * float(shares)), int(shares) - 1);  // off by a few at most
        while (first_unit(share) > unit) share--;
        while (first_unit(share + 1) <= unit) share++;
        return share;
    }
};

// The batch row that holds `unit`, and that row's first unit.
__device__ __forceinline__ int find_row(const Lengths& lengths, int unit, int lane, int& start) {
    start = 0;
    for (int b = 0;; b += 32) {
        const int own = b + lane < lengths.batch ? lengths.units(b + lane) * lengths.kv_heads : 0;
        int through = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(ALL, through, step);
            if (lane >= step) through += before;
        }
        const u32 beyond = __ballot_sync(ALL, start + through > unit);
        if (beyond) {
            const int at = __ffs(beyond) - 1;
            start += __shfl_sync(ALL, through - own, at);
            return b + at;
        }
        start += __shfl_sync(ALL, through, 31);
    }
}

// What a row's items are copied from.
struct Source {
    const u8 *key_upper, *key_lower, *value_upper, *value_lower;  // of the row's first group
    const u16 *key_scale, *key_min, *value_scale, *value_min;
    const u16 *keys, *values;  // of the row's first slot of the buffer
    i64 key_stride, value_stride;
    int groups, first, last;   // visible groups; visible slots, half-open
};

// A team's ring of items in shared memory, and where the team stands in filling and in reading it.
struct Ring {
    u32 data, full, empty;  // shared addresses
    int fill, take;
    u32 fill_phase, take_phase;

    __device__ __forceinline__ u32 wait() const {
        barrier_wait(full + 8 * take, take_phase);
        return data + take * ITEM_BYTES;
    }
    __device__ __forceinline__ void release(int lane) {
        if (TEAM > 1) {
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * take);
        }
        if (++take == ITEMS) take = 0, take_phase ^= 1;
    }
};

// The order in which a team copies its units: pieces of keys, then pieces of values; every TEAMS-th unit.
struct Copier {
    int unit, piece, stop;

    __device__ __forceinline__ void next(Ring& ring, const Source& source, int lane) {
        if (unit >= stop) return;
        if (TEAM > 1) barrier_wait(ring.empty + 8 * ring.fill, ring.fill_phase ^ 1);
        else __syncwarp();
        const u32 to = ring.data + ring.fill * ITEM_BYTES, barrier = ring.full + 8 * ring.fill;
        if (unit < source.groups) {
            if (lane == 0) copy_codes(to, barrier, source);
        } else {
            copy_slots(to, barrier, source, lane);
        }
        if (++ring.fill == ITEMS) ring.fill = 0, ring.fill_phase ^= 1;
        if (++piece == 2 * PIECES) piece = 0, unit += TEAMS;
    }
    __device__ __forceinline__ void copy_codes(u32 to, u32 barrier, const Source& source) const {
        const bool value = piece >= PIECES;
        const int part = value ? piece - PIECES : piece;
        const i64 offset = (i64(unit) * PIECES + part) * PLANE_BYTES;
        const int pairs = value ? GROUP : HEAD_DIM;
        barrier_expect(barrier, CODE_BYTES + (part == 0 ? 4 * pairs : 0));
        bulk_copy(to, (value ? source.value_upper : source.key_upper) + offset, PLANE_BYTES, barrier);
        if (BITS == 8)
            bulk_copy(to + PLANE_BYTES, (value ? source.value_lower : source.key_lower) + offset, PLANE_BYTES, barrier);
        if (part == 0) {
            const u32 at = to + CODE_BYTES;
            const i64 first = i64(unit) * pairs;
            bulk_copy(at, (value ? source.value_scale : source.key_scale) + first, 2 * pairs, barrier);
            bulk_copy(at + 2 * pairs, (value ? source.value_min : source.key_min) + first, 2 * pairs, barrier);
        }
    }
    // Slots past the last repeat it: their weight is zero, and what is multiplied by it must be a number.
    __device__ __forceinline__ void copy_slots(u32 to, u32 barrier, const Source& source, int lane) const {
        const bool value = piece >= PIECES;
        const int part = value ? piece - PIECES : piece;
        const int own = source.first + (unit - source.groups) * UNIT_SLOTS + part * PIECE_SLOTS + lane;
        const i64 slot = min(own, source.last - 1);
        if (lane == 0) barrier_expect(barrier, PIECE_SLOTS * SLOT_BYTES);
        __syncwarp();
        const u16* from = value ? source.values + slot * source.value_stride : source.keys + slot * source.key_stride;
        if (lane < PIECE_SLOTS) bulk_copy(to + lane * SLOT_PITCH, from, SLOT_BYTES, barrier);
    }
};

// ---------------------------------------------------------------- attention

// Running sums of a warp's query rows. In accumulators a lane holds rows (channels) g, g + 8 and columns (query
// rows) 2c, 2c + 1 of each tile.
struct State {
    float out[OUT_TILES][TILES][4];  // weights times codes, times 2^(14 - exponent) and, for INT8, 16
    float tail[TILES][4];            // [0], [1] weights times centres, [2], [3] sum of weights
    float top[TILES][2];             // reference of the weights: base-2 scores
    int exponent;                    // fp16 exponent of the largest value scale met

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) tail[t][i] = 0;
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][t][i] = 0;
            top[t][0] = top[t][1] = NOTHING;
        }
        exponent = 0;
    }
    __device__ __forceinline__ void rescale_out(float even, float odd, int t) {
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) {
            out[m][t][0] *= even, out[m][t][2] *= even;
            out[m][t][1] *= odd, out[m][t][3] *= odd;
        }
    }
    // Raises the references to the maxima of the warp (`highest`: this lane's) and the exponent.
    __device__ __forceinline__ void raise(float (&highest)[TILES][2], int next_exponent) {
        const float shrink = power_of_two(exponent - next_exponent);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            float factor[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float best = fmaxf(highest[t][e], top[t][e]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, step));
                factor[e] = exp2_of(top[t][e] - best);
                tail[t][e] *= factor[e], tail[t][2 + e] *= factor[e];
                top[t][e] = best;
            }
            rescale_out(factor[0] * shrink, factor[1] * shrink, t);
        }
        exponent = next_exponent;
    }
    // From here on `out` counts in ones, so that full-precision values can be added.
    __device__ __forceinline__ void settle() {
        const float unit = power_of_two(exponent - 14 - (BITS == 8 ? 4 : 0));
#pragma unroll
        for (int t = 0; t < TILES; t++) rescale_out(unit, unit, t);
        exponent = 14;
    }
};

// Queries times the group's key scales as B operand, and the score that all tokens of the group start from:
// q . Z less what the codes' offsets will add.
__device__ __forceinline__ void scale_queries(
    u32 (&scaled)[TILES][STEPS][2], float (&origin)[TILES][4], u32 pairs, u32 queries, int lane
) {
    const int c = lane % 4;
    u32 scale[2][2 * WORDS], low[2][2 * WORDS];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        load_words(scale[h], pairs + 8 * WORDS * c + HEAD_DIM * h);
        load_words(low[h], pairs + 2 * HEAD_DIM + 8 * WORDS * c + HEAD_DIM * h);
    }
#pragma unroll
    for (int i = 0; i < 2 * WORDS && BITS == 4; i++) scale[1][i] = hmul2(scale[1][i], 0x2C002C00u);  // / 16
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float minima[4] = {0, 0, 0, 0}, offsets[4] = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 q[4];
            load_words(q, queries + ((t * WORDS + w) * 32 + lane) * 16);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 z0 = pair_first(low[h][2 * w], low[h][2 * w + 1]);
                const u32 z1 = pair_second(low[h][2 * w], low[h][2 * w + 1]);
                mma_half(minima, z0, z0, z1, z1, q[2 * h], q[2 * h + 1]);
                u32(&s)[2] = scaled[t][2 * w + h];
                s[0] = hmul2(q[2 * h], pair_first(scale[h][2 * w], scale[h][2 * w + 1]));
                s[1] = hmul2(q[2 * h + 1], pair_second(scale[h][2 * w], scale[h][2 * w + 1]));
                mma_half(offsets, KEY_OFFSET, KEY_OFFSET, KEY_OFFSET, KEY_OFFSET, s[0], s[1]);
            }
        }
        constexpr float UNITS = BITS == 8 ? 16.0f : 1.0f;  // INT8 codes count sixteenths of the scale
#pragma unroll
        for (int e = 0; e < 4; e++) origin[t][e] = (minima[e] + offsets[e]) * UNITS;
    }
}

// Scores of one piece of keys. Score tile 4h + w, row g + 8r is token 64h + 16 (g / 2) + 4w + 2r + g % 2: the
// tokens whose value codes lane column c = g / 2 will hold as 16 consecutive bytes.
__device__ __forceinline__ void key_scores(
    float (&scores)[SCORE_TILES][TILES][4], const u32 (&scaled)[TILES][STEPS][2],
    const float (&origin)[TILES][4], u32 item, int piece, int lane
) {
    const int g = lane / 4, c = lane % 4;
    const u32 codes = item + (16 * (g / 2) + g % 2) * (HEAD_DIM / 2) + 4 * WORDS * c;
#pragma unroll
    for (int i = 0; i < SCORE_TILES / PIECES; i++) {
        const int m = piece * (SCORE_TILES / PIECES) + i;
        u32 upper[2][WORDS], lower[2][WORDS];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 at = codes + (64 * (i / 4) + 4 * (i % 4) + 2 * r) * (HEAD_DIM / 2);
            load_words(upper[r], at);
            if (BITS == 8) load_words(lower[r], at + PLANE_BYTES);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 a[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) unpack_keys(a[r], upper[r][w], BITS == 8 ? lower[r][w] : 0);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 b0 = scaled[t][2 * w + h][0], b1 = scaled[t][2 * w + h][1];
                    if (w + h == 0) mma_half_from(scores[m][t], origin[t], a[0][0], a[1][0], a[0][1], a[1][1], b0, b1);
                    else mma_half(scores[m][t], a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1], b0, b1);
                }
        }
    }
}

// Softmax weights times value scales as B operand of the output, and what cancels the codes' offsets there;
// `pairs`: the group's value scales and minima.
__device__ __forceinline__ void group_weights(
    u32 (&weights)[TILES][SCORE_TILES][2], float (&offsets)[TILES][4], State& state,
    const float (&scores)[SCORE_TILES][TILES][4], const float (&factor)[TILES][2], u32 pairs, int lane
) {
    u32 scale[2 * SCORE_TILES], low[2 * SCORE_TILES];  // of tokens 64h + 16c + {2i, 2i + 1}, word 8h + i
    u32 largest = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        load_words(reinterpret_cast<u32(&)[8]>(scale[8 * h]), pairs + 128 * h + 32 * (lane % 4));
        load_words(reinterpret_cast<u32(&)[8]>(low[8 * h]), pairs + 2 * GROUP + 128 * h + 32 * (lane % 4));
    }
#pragma unroll
    for (int i = 0; i < 2 * SCORE_TILES; i++) largest = hmax2(largest, scale[i]);
    largest = hmax2(largest, __shfl_xor_sync(ALL, largest, 1));
    largest = hmax2(largest, __shfl_xor_sync(ALL, largest, 2));
    const int exponent = min(28, max(state.exponent, int(max((largest >> 10) & 31, (largest >> 26) & 31))));
    float highest[TILES][2];
    bool outgrown = exponent > state.exponent;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            highest[t][e] = fmaxf(scores[0][t][e], scores[0][t][2 + e]);
#pragma unroll
            for (int m = 1; m < SCORE_TILES; m++)
                highest[t][e] = fmaxf(highest[t][e], fmaxf(scores[m][t][e], scores[m][t][2 + e]));
            highest[t][e] *= factor[t][e];
            outgrown |= highest[t][e] > state.top[t][e] + HEADROOM;
        }
    if (__any_sync(ALL, outgrown)) state.raise(highest, exponent);
    const u32 unit = u32(29 - state.exponent) * 0x04000400u;  // the half 2^(14 - exponent), twice
    // Tensor cores truncate their sums, a bias that grows with the number of products: long sums are added here.
    float tail[TILES][4];
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) offsets[i / 4][i % 4] = tail[i / 4][i % 4] = 0;
#pragma unroll
    for (int m = 0; m < SCORE_TILES; m++) {
        const u32 s0 = hmul2(scale[2 * m], unit), s1 = hmul2(scale[2 * m + 1], unit);
        const u32 z0 = hfma2(scale[2 * m], 0x48004800u, low[2 * m]);  // the centre Z + 8 S of a token's values
        const u32 z1 = hfma2(scale[2 * m + 1], 0x48004800u, low[2 * m + 1]);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            float p[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[e] = exp2_of(fmaf(scores[m][t][e], factor[t][e % 2], LIFT - state.top[t][e % 2]));
            const u32 p0 = transpose(half2_of(p[0], p[1])), p1 = transpose(half2_of(p[2], p[3]));
            mma_half(tail[t], z0, 0x3C003C00u, z1, 0x3C003C00u, p0, p1);
            const u32 w0 = hmul2(p0, s0), w1 = hmul2(p1, s1);
            weights[t][m][0] = pair_first(w0, w1);
            weights[t][m][1] = pair_second(w0, w1);
            mma_half(offsets[t], VALUE_OFFSET, VALUE_OFFSET, VALUE_OFFSET, VALUE_OFFSET, w0, w1);
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) state.tail[i / 4][i % 4] += tail[i / 4][i % 4];
}

// Adds one piece of values (some channels, all tokens of the group) to the output.
__device__ __forceinline__ void add_values(
    State& state, const u32 (&weights)[TILES][SCORE_TILES][2], const float (&offsets)[TILES][4],
    u32 item, int piece, int lane
) {
    const u32 origin = item + (lane / 4) * (GROUP / 2) + 16 * (lane % 4);
#pragma unroll
    for (int i = 0; i < OUT_TILES / PIECES; i++) {
        const int m = piece * (OUT_TILES / PIECES) + i;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) state.out[m][t][e] += offsets[t][e];
        u32 upper[2][4], lower[2][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            load_words(upper[r], origin + (16 * i + 8 * r) * (GROUP / 2));
            if (BITS == 8) load_words(lower[r], origin + (16 * i + 8 * r) * (GROUP / 2) + PLANE_BYTES);
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            u32 a[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) unpack_values(a[r], upper[r][w], BITS == 8 ? lower[r][w] : 0);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    mma_half(state.out[m][t], a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1],
                             weights[t][4 * h + w][0], weights[t][4 * h + w][1]);
        }
    }
}

// One unit of full-precision slots, which starts at `slot`; `limit`: first slot that each query may not see.
__device__ __forceinline__ void attend_slots(
    State& state, const u32 (&q)[TILES][STEPS][2], const int (&limit)[TILES][2], int slot, float factor,
    Ring& ring, Copier& copier, const Source& source, bool leads, int lane
) {
    float scores[PIECE_TILES * PIECES][TILES][4];
    float highest[TILES][2];
    bool outgrown = false;
    u32 a[4];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        if (leads) copier.next(ring, source, lane);
        const u32 item = ring.wait() + (lane % 16) * SLOT_PITCH + (lane / 16) * 16;
#pragma unroll
        for (int i = 0; i < PIECE_TILES; i++) {
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) scores[PIECE_TILES * piece + i][t][e] = 0;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                load_matrices(a, item + 16 * i * SLOT_PITCH + 32 * s);
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    mma_element(scores[PIECE_TILES * piece + i][t], a[0], a[1], a[2], a[3], q[t][s][0], q[t][s][1]);
            }
        }
        ring.release(lane);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            highest[t][e] = MASKED;
#pragma unroll
            for (int i = 0; i < 2 * PIECE_TILES * PIECES; i++) {  // i: rows of eight slots
                float& score = scores[i / 2][t][2 * (i % 2) + e];
                score = slot + 8 * i + lane / 4 < limit[t][e] ? score * factor : MASKED;
                highest[t][e] = fmaxf(highest[t][e], score);
            }
            outgrown |= highest[t][e] > state.top[t][e] + HEADROOM;
        }
    if (__any_sync(ALL, outgrown)) state.raise(highest, state.exponent);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        if (leads) copier.next(ring, source, lane);
        const u32 item = ring.wait() + (lane % 8 + lane / 16 * 8) * SLOT_PITCH + (lane / 8) % 2 * 16;
#pragma unroll
        for (int i = 0; i < PIECE_TILES; i++) {
            u32 p[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                float(&s)[4] = scores[PIECE_TILES * piece + i][t];
#pragma unroll
                for (int e = 0; e < 4; e++) s[e] = exp2_of(s[e] + (LIFT - state.top[t][e % 2]));
                p[t][0] = transpose(element2_of(s[0], s[1]));
                p[t][1] = transpose(element2_of(s[2], s[3]));
                mma_element(state.tail[t], 0, ONE, 0, ONE, p[t][0], p[t][1]);
            }
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++) {
                load_matrices_transposed(a, item + 16 * i * SLOT_PITCH + 32 * m);
#pragma unroll
                for (int t = 0; t < TILES; t++) mma_element(state.out[m][t], a[0], a[1], a[2], a[3], p[t][0], p[t][1]);
            }
        }
        ring.release(lane);
    }
}

// Where a KV head's query rows lie: row r is query r % queries of head r / queries.
struct Queries {
    const u16* q;  // of the KV head's first query head
    i64 query_stride, head_stride;
    int queries, rows;

    __device__ const u32* row(int r) const {
        return reinterpret_cast<const u32*>(q + (r % queries) * query_stride + (r / queries) * head_stride);
    }
};

// Stages query rows in shared memory as B operands in the codes' order, in halves: each row divided by a power of
// two that brings it to [-1, 1], so that q S of finite scales cannot overflow. The power goes into `factors`.
__device__ __forceinline__ void stage_queries(
    u32* staged, float* factors, const Queries& queries, int first_row, float scale, int lane
) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const int row = first_row + 8 * t + g;
        const u32* from = queries.row(row);
        float x[2][4 * WORDS];
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++)  // i: words of adjacent channels
            if (row < queries.rows) {
                const u32 pair = from[HEAD_DIM / 4 * (i / (2 * WORDS)) + 2 * WORDS * c + i % (2 * WORDS)];
                x[i / (2 * WORDS)][2 * (i % (2 * WORDS))] = float_of(u16(pair));
                x[i / (2 * WORDS)][2 * (i % (2 * WORDS)) + 1] = float_of(u16(pair >> 16));
            } else {
                x[i / (2 * WORDS)][2 * (i % (2 * WORDS))] = x[i / (2 * WORDS)][2 * (i % (2 * WORDS)) + 1] = 0;
            }
#pragma unroll
        for (int i = 0; i < 8 * WORDS; i++) largest = fmaxf(largest, fabsf(x[i / (4 * WORDS)][i % (4 * WORDS)]));
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
        const int exponent = max((__float_as_int(largest) >> 23) - 126, -60);
        const float shrink = power_of_two(-exponent);
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float* y = x[h] + 4 * w;
                const u32 x0 = half2_of(y[0] * shrink, y[1] * shrink), x1 = half2_of(y[2] * shrink, y[3] * shrink);
                u32* to = staged + (((first_row / 8 + t) * WORDS + w) * 32 + lane) * 4 + 2 * h;
                to[0] = pair_first(x0, x1);
                to[1] = pair_second(x0, x1);
            }
        if (c == 0) factors[row] = scale * LOG2_E * power_of_two(exponent) * (BITS == 8 ? 0.0625f : 1.0f);
    }
}

// Merges the teams of a block through shared memory and stores the segment's partial and base-2 log-sum-exp.
__device__ __forceinline__ void store_segment(
    const State& state, float* space, float* partial, float* sums, i64 slot, int rows, int warp, int lane
) {
    float *tops = space, *totals = space + TEAMS * ROWS, *outs = space + 2 * TEAMS * ROWS;
    const int team = warp / TEAM, first_row = warp % TEAM * 8 * TILES, g = lane / 4, c = lane % 4;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (g == 0) {
                const int at = team * ROWS + first_row + 8 * t + 2 * c + e;
                tops[at] = state.top[t][e];
                totals[at] = state.tail[t][2 + e];
            }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = first_row + 8 * t + 2 * c + e;
            float best = NOTHING;
            for (int i = 0; i < TEAMS; i++) best = fmaxf(best, tops[i * ROWS + row]);
            const float weight = exp2_of(state.top[t][e] - best);
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    outs[(team * ROWS + row) * MERGE_PITCH + 16 * m + 8 * r + g] =
                        (state.out[m][t][2 * r + e] + state.tail[t][e]) * weight;
        }
    __syncthreads();
    for (int i = warp * 32 + lane; i < rows * HEAD_DIM; i += 32 * WARPS) {
        const int row = i / HEAD_DIM, channel = i % HEAD_DIM;
        float best = NOTHING, total = 0, out = 0;
        for (int t = 0; t < TEAMS; t++) best = fmaxf(best, tops[t * ROWS + row]);
        for (int t = 0; t < TEAMS; t++) {
            total += exp2_of(tops[t * ROWS + row] - best) * totals[t * ROWS + row];
            out += outs[(t * ROWS + row) * MERGE_PITCH + channel];
        }
        partial[slot * rows * HEAD_DIM + i] = total > 0 ? out / total : 0;
        if (channel == 0) sums[slot * rows + row] = total > 0 ? best + log2f(total) - LIFT : MASKED;
    }
    fence_for_copies();  // the next segment's copies overwrite this space
    __syncthreads();
}

#ifdef ENTRY_ATTEND
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attend(
    const u16* q, const u16* keys, const u16* values, const int* begin, const int* end, const int* groups,
    float* partial, float* sums, const u8* key_upper, const u8* key_lower, const u16* key_scale, const u16* key_min,
    const u8* value_upper, const u8* value_lower, const u16* value_scale, const u16* value_min,
    int batch, int kv_heads, int ratio, int queries, int capacity, int group_capacity,
    int q_batch_stride, int q_query_stride, int q_head_stride,  // all strides in units of 8 elements
    int key_batch_stride, int key_head_stride, int key_stride,
    int value_batch_stride, int value_head_stride, int value_stride, double scale
) {
    extern __shared__ __align__(128) u8 space[];
    __shared__ Source source;  // here for want of registers
    u32* staged = reinterpret_cast<u32*>(space + TEAMS * ITEMS * ITEM_BYTES);
    float* factors = reinterpret_cast<float*>(staged + ROWS * HEAD_DIM / 2);
    const u32 barriers = shared_address(factors + ROWS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / TEAM, first_row = warp % TEAM * 8 * TILES;
    const bool leads = warp % TEAM == 0;

    const Lengths lengths{begin, end, groups, batch, kv_heads, queries, capacity, group_capacity};
    const Work work(lengths, gridDim.x, lane);
    if (blockIdx.x >= work.shares) return;
    Ring ring{shared_address(space) + team * ITEMS * ITEM_BYTES, barriers + 16 * ITEMS * team,
              barriers + 16 * ITEMS * team + 8 * ITEMS, 0, 0, 0, 0};
    if (leads && lane < ITEMS) {
        barrier_init(ring.full + 8 * lane, 1);
        barrier_init(ring.empty + 8 * lane, TEAM);
        fence_for_copies();
    }
    __syncthreads();

    int unit = work.first_unit(blockIdx.x), start;
    const int stop = work.first_unit(blockIdx.x + 1);
    int b = find_row(lengths, unit, lane, start);
    while (unit < stop) {
        const int row_units = lengths.units(b), kv_head = (unit - start) / row_units;
        const int from = unit - start - kv_head * row_units;
        const int to = min(row_units, from + stop - unit);
        const i64 flat = i64(b) * kv_heads + kv_head, first_group = flat * group_capacity;
        const i64 codes = first_group * GROUP * HEAD_DIM / 2;
        const int visible = lengths.visible_groups(b), first_slot = begin[b];
        if (threadIdx.x == 0) source = Source{
            key_upper + codes, key_lower + codes, value_upper + codes, value_lower + codes,
            key_scale + first_group * HEAD_DIM, key_min + first_group * HEAD_DIM,
            value_scale + first_group * GROUP, value_min + first_group * GROUP,
            keys + (i64(b) * key_batch_stride + i64(kv_head) * key_head_stride) * 8,
            values + (i64(b) * value_batch_stride + i64(kv_head) * value_head_stride) * 8,
            i64(key_stride) * 8, i64(value_stride) * 8, visible, first_slot, lengths.last_slot(b)};
        __syncthreads();
        Copier copier{from + team, 0, to};
        if (leads)
#pragma unroll 1
            for (int i = 0; i < ITEMS - LAG; i++) copier.next(ring, source, lane);
        const Queries rows{q + (i64(b) * q_batch_stride + i64(kv_head) * ratio * q_head_stride) * 8,
                           i64(q_query_stride) * 8, i64(q_head_stride) * 8, queries, ratio * queries};
        if (team == 0) stage_queries(staged, factors, rows, first_row, float(scale), lane);
        __syncthreads();

        State state;
        state.clear();
        float factor[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < 2; e++) factor[t][e] = factors[first_row + 8 * t + 2 * (lane % 4) + e];
        const u32 own_queries = shared_address(staged) + first_row * HEAD_DIM * 2;
        int at = from + team;
        for (; at < min(to, visible); at += TEAMS) {
            float scores[SCORE_TILES][TILES][4];
            u32 weights[TILES][SCORE_TILES][2];
            float offsets[TILES][4];
            {
                u32 scaled[TILES][STEPS][2];
                float origin[TILES][4];
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++) {
                    if (leads) copier.next(ring, source, lane);
                    const u32 item = ring.wait();
                    if (piece == 0) scale_queries(scaled, origin, item + CODE_BYTES, own_queries, lane);
                    key_scores(scores, scaled, origin, item, piece, lane);
                    ring.release(lane);
                }
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                if (leads) copier.next(ring, source, lane);
                const u32 item = ring.wait();
                if (piece == 0) group_weights(weights, offsets, state, scores, factor, item + CODE_BYTES, lane);
                add_values(state, weights, offsets, item, piece, lane);
                ring.release(lane);
            }
        }
        state.settle();
        if (at < to) {
            u32 natural[TILES][STEPS][2];
            int limit[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const int row = first_row + 8 * t + lane / 4;
                const u32* word = rows.row(row) + lane % 4;
#pragma unroll
                for (int i = 0; i < 2 * STEPS; i++) natural[t][i / 2][i % 2] = row < rows.rows ? word[4 * i] : 0;
#pragma unroll
                for (int e = 0; e < 2; e++)
                    limit[t][e] = min(end[b] + (first_row + 8 * t + 2 * (lane % 4) + e) % queries, capacity);
            }
            for (; at < to; at += TEAMS)
                attend_slots(state, natural, limit, first_slot + (at - visible) * UNIT_SLOTS,
                             float(scale) * LOG2_E, ring, copier, source, leads, lane);
        }
        // Segments are met in the order of (share, row), and either grows from one to the next: a slot of its own.
        store_segment(state, reinterpret_cast<float*>(space), partial, sums, blockIdx.x + flat, rows.rows, warp, lane);
        unit += to - from;
        if (unit < stop && unit - start == row_units * kv_heads) {
            start = unit;
            do b++;
            while (lengths.units(b) == 0);
        }
    }
}
#endif

#ifdef ENTRY_MERGE
constexpr int MERGE_WARPS = 4;
constexpr int BATCHED = 8;  // partials that a warp has in flight: the kernel is all latency

// Log-sum-exp merge of the segments of each query row: one block per row and KV head, whose warps take every
// MERGE_WARPS-th segment. out: [batch, queries, heads, HEAD_DIM].
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS) merge(
    const float* partial, const float* sums, const int* begin, const int* end, const int* groups, u32* out,
    int batch, int kv_heads, int ratio, int queries, int capacity, int group_capacity, int blocks
) {
    constexpr int OWN = HEAD_DIM / 32;
    __shared__ float bests[MERGE_WARPS], totals[MERGE_WARPS], outs[MERGE_WARPS][HEAD_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x, rows = ratio * queries;
    const int flat = blockIdx.y, b = flat / kv_heads, kv_head = flat % kv_heads;
    const Lengths lengths{begin, end, groups, batch, kv_heads, queries, capacity, group_capacity};
    const Work work(lengths, blocks, lane);
    const int units = lengths.units(b);
    int start = 0;
    for (int i = 0; i < b; i += 32) start += __reduce_add_sync(ALL, i + lane < b ? lengths.units(i + lane) : 0);
    start = start * kv_heads + kv_head * units;
    const int first = units > 0 ? work.share_of(start) : 0;
    const int count = units > 0 ? work.share_of(start + units - 1) - first + 1 : 0;
    sums += i64(first + flat) * rows + row;
    partial += (i64(first + flat) * rows + row) * HEAD_DIM + OWN * lane;

    float best = NOTHING, total = 0, acc[OWN] = {};
    for (int at = warp; at < count; at += MERGE_WARPS * BATCHED) {
        float sum[BATCHED], part[BATCHED][OWN], next = best;
#pragma unroll
        for (int k = 0; k < BATCHED; k++) {
            const int slot = at + MERGE_WARPS * k;
            sum[k] = slot < count ? sums[slot * rows] : MASKED;
#pragma unroll
            for (int i = 0; i < OWN; i++) part[k][i] = slot < count ? partial[i64(slot) * rows * HEAD_DIM + i] : 0;
        }
#pragma unroll
        for (int k = 0; k < BATCHED; k++) next = fmaxf(next, sum[k]);
        const float shrink = exp2_of(best - next);
        best = next;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < OWN; i++) acc[i] *= shrink;
#pragma unroll
        for (int k = 0; k < BATCHED; k++) {
            const float weight = exp2_of(sum[k] - best);
            total += weight;
#pragma unroll
            for (int i = 0; i < OWN; i++) acc[i] += weight * part[k][i];
        }
    }
    bests[warp] = best;
    totals[warp] = total;
#pragma unroll
    for (int i = 0; i < OWN; i++) outs[warp][OWN * lane + i] = acc[i];
    __syncthreads();
    if (threadIdx.x >= HEAD_DIM / 2) return;
    float even = 0, odd = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) best = fmaxf(best, bests[w]);
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) {
        const float weight = exp2_of(bests[w] - best);
        total += weight * totals[w];
        even += weight * outs[w][2 * threadIdx.x];
        odd += weight * outs[w][2 * threadIdx.x + 1];
    }
    const float norm = total > 0 ? 1 / total : 0;
    const i64 head = (i64(b) * queries + row % queries) * kv_heads * ratio + kv_head * ratio + row / queries;
    out[head * (HEAD_DIM / 2) + threadIdx.x] = element2_of(even * norm, odd * norm);
}
#endif
