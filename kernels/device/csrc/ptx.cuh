// PTX instructions that CUDA C++ has no expression for, each wrapped once and named after the instruction.
// Reference: PTX ISA 8.x, sm_90. Nothing here knows about a kernel.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 FULL_MASK = 0xFFFFFFFFu;  // all lanes of a warp

// An address in this CTA's shared memory, from a pointer or from an address that was computed before.
struct SharedAddress {
    u32 value;

    __device__ __forceinline__ SharedAddress(u32 address) : value(address) {}
    __device__ __forceinline__ SharedAddress(const void* pointer) : value(u32(__cvta_generic_to_shared(pointer))) {}
};

// ---------------------------------------------------------------- arithmetic and conversions

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xFF800000); }
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// (x & mask) | bits in one instruction; the compiler needs two where both constants are immediates.
__device__ __forceinline__ u32 lop3_and_or(u32 x, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}

// (x & mask) | (y & ~mask) in one instruction; the compiler takes two.
__device__ __forceinline__ u32 lop3_select(u32 x, u32 y, u32 mask) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(d) : "r"(x), "r"(y), "r"(mask));
    return d;
}

__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 add_half2(u32 a, u32 b) {
    u32 d;
    asm("add.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// The operand of larger magnitude, with the exclusive or of both signs.
__device__ __forceinline__ u32 max_abs_half2(u32 a, u32 b) {
    u32 d;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ float half_to_float(u16 x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
__device__ __forceinline__ u16 float_to_half(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
__device__ __forceinline__ u32 floats_to_half2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// ---------------------------------------------------------------- tensor cores

// d += a b on 16-bit elements in float32: a is 16 x 16, b 16 x 8, d 16 x 8. Lane 4 g + c (g = 0..7, c = 0..3) holds the
// elements below; a register is two elements of adjacent k, a0 for example a[g][2c] and a[g][2c + 1].
//
//     a        k  2c, 2c+1   2c+8, 2c+9          b        column  g          d          column  2c    2c+1
//     row g          a0          a2              k = 2c, 2c+1     b0         row g              d0    d1
//     row g + 8      a1          a3              k = 2c+8, 2c+9   b1         row g + 8          d2    d3
//
//     lanes of a, by row and k:                  lanes of d, by row and column:
//              0 1   2 3   4 5   6 7                      0 1   2 3   4 5   6 7
//     row 0     0     1     2     3              row 0     0     1     2     3
//     row 1     4     5     6     7              row 1     4     5     6     7
//     ...                                        ...
//     row 7    28    29    30    31              row 7    28    29    30    31
//
// So the d of one product, converted to pairs, is the b of a next one that sums over d's columns.
template <bool IS_BF16>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (IS_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a b of unsigned by signed bytes in int32: a is 16 x 32, b 32 x 8. A register is four elements of adjacent k.
//
//     a        k  4c .. 4c+3   4c+16 .. 4c+19    b            column  g      d as above
//     row g           a0             a2          k = 4c .. 4c+3       b0
//     row g + 8       a1             a3          k = 4c+16 .. 4c+19   b1
__device__ __forceinline__ void mma_m16n8k32_u8_s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a b in TF32, of which the lower 13 bits are ignored: a is 16 x 8, b 8 x 8. A register is one element.
//
//     a        k  c    c+4     b        column  g      d as above
//     row g       a0   a2      k = c            b0
//     row g + 8   a1   a3      k = c + 4        b1
__device__ __forceinline__ void mma_m16n8k8_tf32(
    float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1
) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---------------------------------------------------------------- tensor cores of a warpgroup (sm_90a: Hopper only)

// B in shared memory as these products read it: matrices of 8 columns x 16 bytes of k, 128 bytes each, from `first` on;
// adjacent ones in k follow each other, and the next eight columns are `column_bytes` further on.
struct WarpgroupOperand {
    u64 descriptor;

    __device__ __forceinline__ WarpgroupOperand(u32 first, u32 column_bytes)
        : descriptor(u64(column_bytes / 16) << 32 | (128 / 16 << 16) | first / 16) {}
    __device__ __forceinline__ u64 at(u32 offset) const { return descriptor + offset / 16; }
};
// Orders what registers hold before products that follow; and shared memory, after `fence_proxy_async` and a barrier.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING committed groups of products are still in flight, whose operands must not change.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define WGMMA_SUMS(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define WGMMA_OPERANDS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(add))
// d = a b, plus d if `add`, on float16 in float32, asynchronously: a warp has 16 of the 64 rows of a and d, and of each
// TILES of eight columns the registers of mma_m16n8k16.
template <int TILES>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[TILES][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
    static_assert(TILES == 3 || TILES == 4 || TILES == 8, "24, 32 or 64 columns");
    if constexpr (TILES == 3)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %17, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, p, 1, 1, 0; }"
                     : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2) : WGMMA_OPERANDS);
    else if constexpr (TILES == 4)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
                     : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3) : WGMMA_OPERANDS);
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
                     "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
                     : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5),
                       WGMMA_SUMS(6), WGMMA_SUMS(7) : WGMMA_OPERANDS);
}
#undef WGMMA_SUMS
#undef WGMMA_OPERANDS

// ---------------------------------------------------------------- 16-bit elements

// Elements of a tensor: bfloat16 where IS_BF16, else float16. A pair is two of them in a word.
template <bool IS_BF16> struct Element {
    static __device__ __forceinline__ float to_float(u16 x) {
        if (IS_BF16) return __uint_as_float(u32(x) << 16);
        return half_to_float(x);
    }
    static __device__ __forceinline__ float low_to_float(u32 pair) { return to_float(u16(pair)); }
    static __device__ __forceinline__ float high_to_float(u32 pair) {
        if (IS_BF16) return __uint_as_float(pair & 0xFFFF0000u);
        return half_to_float(u16(pair >> 16));
    }
    static __device__ __forceinline__ u16 from_float(float x) {
        u16 d;
        if (IS_BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
        else d = float_to_half(x);
        return d;
    }
    static __device__ __forceinline__ u32 pair_from_floats(float low, float high) {
        u32 d;
        if (IS_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
        else d = floats_to_half2(low, high);
        return d;
    }
    static __device__ __forceinline__ u32 min_pair(u32 a, u32 b) {
        u32 d;
        if (IS_BF16) asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        else asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
        u32 d;
        if (IS_BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        else asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        mma_m16n8k16<IS_BF16>(d, a0, a1, a2, a3, b0, b1);
    }
};
using Half = Element<false>;

// ---------------------------------------------------------------- shared memory

__device__ __forceinline__ u32 ld_shared(SharedAddress from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from.value));
    return x;
}
template <int N> __device__ __forceinline__ void ld_shared(u32 (&x)[N], SharedAddress from) {
    if constexpr (N == 1) {
        x[0] = ld_shared(from);
    } else if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3])
                         : "r"(from.value + 4 * i));
    } else {
        static_assert(N == 2, "one, two or a multiple of four words");
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from.value));
    }
}
__device__ __forceinline__ void st_shared(SharedAddress to, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
                 ::"r"(to.value), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Matrices of 8 x 8 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8 (x2: the first sixteen
// lanes); lane 4 g + c receives in x[j] elements 2c and 2c + 1 of row g of matrix j, with `trans` rows 2c and 2c + 1 of
// column g.
__device__ __forceinline__ void ldmatrix(u32 (&x)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row.value));
}
__device__ __forceinline__ void ldmatrix(u32 (&x)[2], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1]) : "r"(row.value));
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&x)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row.value));
}
__device__ __forceinline__ void stmatrix(SharedAddress row, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(row.value), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(SharedAddress row, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(row.value), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(SharedAddress row, const u32 (&x)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};"
                 ::"r"(row.value), "r"(x[0]), "r"(x[1]) : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements: lane 4 g + c passes elements 2c and 2c + 1 of row g, and receives those
// of column g.
__device__ __forceinline__ u32 movmatrix_trans(u32 x) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
    return d;
}

// ---------------------------------------------------------------- mbarriers

__device__ __forceinline__ void mbarrier_init(SharedAddress barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.value), "r"(arrivals) : "memory");
}
// Makes initialized barriers visible to the cluster and to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}
// Arrives once, and makes the phase wait for `bytes` of bulk copies or asynchronous stores as well.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier.value), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has completed. Sees what threads of this CTA wrote before they arrived, and what
// bulk copies issued by this CTA brought.
__device__ __forceinline__ void mbarrier_wait(SharedAddress barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier.value), "r"(parity) : "memory");
    } while (!done);
}
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208  // PTX 8.6
#define CLUSTER_WAIT "relaxed"
#define CLUSTER_FENCE "fence.acquire.sync_restrict::shared::cluster.cluster;"
#else
#define CLUSTER_WAIT "acquire"
#define CLUSTER_FENCE ""
#endif
// The same for what other CTAs of the cluster wrote or copied into this CTA's shared memory. A plain acquire at the
// cluster's scope would also invalidate the L1 cache (5% of a short product); the fence concerns shared memory only.
__device__ __forceinline__ void mbarrier_wait_cluster(SharedAddress barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity." CLUSTER_WAIT ".cluster.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier.value), "r"(parity) : "memory");
    } while (!done);
    asm volatile(CLUSTER_FENCE ::: "memory");
}
__device__ __forceinline__ bool mbarrier_test(SharedAddress barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier.value), "r"(parity) : "memory");
    return done;
}

// ---------------------------------------------------------------- global memory

// N adjacent words from the L2 cache: what other kernels may have just written, the SM's L1 cache may hold as it was
// before.
template <int N> __device__ __forceinline__ void load_words_l2(u32 (&x)[N], const void* from) {
    if constexpr (N == 4) {
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if constexpr (N == 2) {
        const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
        x[0] = v.x, x[1] = v.y;
    } else {
        static_assert(N == 1, "one, two or four words");
        x[0] = __ldcg(reinterpret_cast<const u32*>(from));
    }
}
__device__ __forceinline__ void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// ---------------------------------------------------------------- asynchronous copies

// Orders ordinary accesses of shared memory before bulk copies that follow.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Global to shared memory, 16 bytes aligned and a multiple of 16 long; `barrier` counts the bytes.
__device__ __forceinline__ void bulk_copy(SharedAddress to, const void* from, int bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to.value), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier.value) : "memory");
}
// The same to one place in each of the first `ctas` CTAs of the cluster, each of which counts on its own barrier.
__device__ __forceinline__ void bulk_copy_multicast(
    SharedAddress to, const void* from, int bytes, SharedAddress barrier, int ctas
) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;"
                 ::"r"(to.value), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier.value),
                 "h"(u16((1 << ctas) - 1)) : "memory");
}
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to.value), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the committed groups are still in flight.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---------------------------------------------------------------- warps, CTAs and clusters

// True in one lane of a converged warp; the compiler then needs no loop over lanes around instructions with uniform
// operands.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}
// Barrier `ID` (1..15; 0 is __syncthreads) of THREADS threads in whole warps.
template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Without the release, which fences all of the GPU's memory and takes long while copies are in flight.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of `local` in the shared memory of the cluster's CTA `rank`.
__device__ __forceinline__ u32 mapa(SharedAddress local, int rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local.value), "r"(rank));
    return remote;
}
__device__ __forceinline__ u32 ld_shared_cluster(u32 remote) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(remote) : "memory");
    return x;
}
__device__ __forceinline__ void red_add_shared_cluster(u32 remote, u32 x) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(remote), "r"(x) : "memory");
}
// Stores to another CTA's shared memory; its barrier at `remote_barrier` counts the four bytes.
__device__ __forceinline__ void st_async(u32 remote, float x, u32 remote_barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 ::"r"(remote), "r"(__float_as_uint(x)), "r"(remote_barrier) : "memory");
}

// Adds one with acquire and release over the GPU; wraps to zero after `last`. Returns the count before.
__device__ __forceinline__ u32 atomic_inc_acq_rel(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(__cvta_generic_to_global(counter)), "r"(last) : "memory");
    return before;
}

// ---------------------------------------------------------------- programmatic dependent launch (see device/cuda.py)

// The next kernel's CTAs may start as soon as there is room for them.
__device__ __forceinline__ void pdl_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Kernels before this one have ended, and what they wrote is visible.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
