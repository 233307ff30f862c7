// Part 1 of 7 of the attention kernel (see attention_cuda.py): constants and the instructions that C++ has no word for.
//
// Compiled with -D: HEAD_DIM (64, 128), BITS (0 no codes, 4 upper codes, 8 upper and lower), BF16 (dtype of q, keys,
// values and out: 1 bfloat16, 0 float16), TILES (8-row tiles of query rows), BLOCKS (resident per multiprocessor),
// ITEMS (depth of the ring), SLOTS (full-precision tokens of a unit, 32 or 64).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int GROUP = 128;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 8 * TILES;
constexpr int WORDS = HEAD_DIM / 32;      // 32-bit words of codes that a lane holds of one token
constexpr int STEPS = HEAD_DIM / 16;      // products that contract all channels
constexpr int OUT_TILES = HEAD_DIM / 64;  // 16-channel tiles of the output that a warp owns
constexpr int PLANE_BYTES = GROUP * HEAD_DIM / 2;
constexpr int CODE_BYTES = PLANE_BYTES * (BITS / 4);
constexpr int SLOT_BYTES = 2 * HEAD_DIM;
// A unit's tokens lie in eight pieces, each of which one bulk copy may fill. What is read together is of one place in
// several pieces, so these are padded: half a line of banks is enough for 16-byte reads of keys to meet no bank twice,
// ldmatrix of values needs 16 bytes. But copies across lines are slow: where copies are all, it has to bear conflicts.
constexpr int PIECE = SLOTS / 8;
constexpr int KEY_PITCH = PIECE * SLOT_BYTES + 64, VALUE_PITCH = PIECE * SLOT_BYTES + (BITS ? 16 : 64);
constexpr int ITEM_BYTES = SLOTS * SLOT_BYTES + 512;
constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 2;
constexpr u32 ALL = 0xFFFFFFFFu;
#define MASKED __int_as_float(0xFF800000)  // minus infinity
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LIFT = 5.0f;  // weights are stored times 2^5, so that fp16 resolves small ones
// A reference may be outgrown by 2^8 before sums are rescaled: to 2^13, as a half and as a bfloat16.
constexpr u32 HEADROOM_HALF = 0x7000, HEADROOM_BF16 = 0x4600;

static_assert(BITS == 0 || CODE_BYTES + 512 <= ITEM_BYTES, "codes and metadata fit an item");
static_assert(8 * KEY_PITCH <= ITEM_BYTES, "full-precision tokens fit an item");

__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) {
    u32 d;
    asm("add.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 half2_of(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float float_of_half(u16 x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
__device__ __forceinline__ u32 element2_of(float low, float high) {  // in the dtype of the buffers
    u32 d;
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else d = half2_of(low, high);
    return d;
}
__device__ __forceinline__ float float_of(u16 element) {
    return BF16 ? __uint_as_float(u32(element) << 16) : float_of_half(element);
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Products of 16 rows, 16 of the contraction and 8 columns. A lane (g = lane / 4, c = lane % 4) holds of d the rows
// g and g + 8 of columns 2c, 2c + 1; of a the same rows of contraction 2c, 2c + 1 (a0, a1) and 8 more (a2, a3); of b
// the same contraction of column g.
__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_element(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
__device__ __forceinline__ u32 load_word(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ void store_words(u32 address, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}
__device__ __forceinline__ void load_matrices(u32 (&x)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&x)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {  // counts as one arrival
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
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
// Programmatic dependent launch (see launch.py): the next kernel's blocks may move in as soon as there is room; kernels
// before this one have ended, and what they wrote is seen.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Ordinary accesses of shared memory before this are ordered before bulk copies after it.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four consecutive bytes of codes to four pairs of halves: [0], [1] hold the low nibbles' elements (0,2) (1,3), as
// masks leave them, [2], [3] the high ones'. INT8 as 1024 + 16 U + (L + 8); INT4 as 1024 + U in [0], [1] and
// 1024 + 16 U in [2], [3]. A code ORed into the mantissa of a power of two is that power plus the code: no conversion.
__device__ __forceinline__ u32 masked_or(u32 x, u32 mask) {  // in one instruction; the compiler takes two
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "r"(mask), "r"(0x64006400u));
    return d;
}
__device__ __forceinline__ void unpack(u32 (&pairs)[4], u32 upper, u32 lower) {
    if (BITS == 8) {
        const u32 low = ((upper << 4) & 0xF0F0F0F0u) | (lower & 0x0F0F0F0Fu);
        const u32 high = (upper & 0xF0F0F0F0u) | ((lower >> 4) & 0x0F0F0F0Fu);
        pairs[0] = __byte_perm(low, 0x64646464u, 0x4240);
        pairs[1] = __byte_perm(low, 0x64646464u, 0x4341);
        pairs[2] = __byte_perm(high, 0x64646464u, 0x4240);
        pairs[3] = __byte_perm(high, 0x64646464u, 0x4341);
    } else {
        pairs[0] = masked_or(upper, 0x000F000Fu);
        pairs[1] = masked_or(upper >> 8, 0x000F000Fu);
        pairs[2] = masked_or(upper, 0x00F000F0u);
        pairs[3] = masked_or(upper >> 8, 0x00F000F0u);
    }
}
// The centred codes of unpacked values, exactly: INT8 16 (U - 8) + L; INT4 U - 8, from [2] on times 16. Offsets left in
// would have to cancel in sums over all tokens, which tensor cores truncate.
__device__ __forceinline__ void centre(u32 (&pairs)[4]) {
    constexpr u32 LOW = BITS == 8 ? 0xE488E488u : 0xE408E408u;  // - 1160, - 1032
    constexpr u32 HIGH = BITS == 8 ? LOW : 0xE480E480u;         // - 1160, - 1152
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = hadd2(pairs[i], i < 2 ? LOW : HIGH);
}
// What codes of keys hold too much is cancelled within a group, in sums over the channels: by a product of the same
// scaled queries with this.
constexpr u32 KEY_OFFSET = BITS == 8 ? 0xD408D408u : 0xE400E400u;  // - 1032 / 16 (16 U + L remains), - 1024
// From two words of adjacent halves (0,1) (2,3) to the order in which `unpack` leaves the codes.
__device__ __forceinline__ u32 pair_first(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x5410); }
__device__ __forceinline__ u32 pair_second(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x7632); }
