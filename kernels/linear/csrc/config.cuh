// Part 1 of 4 of the CUDA linear kernels (see linear_launch.py): instructions that C++ has no word for.
//
// Compiled with -D: BF16 (dtype of x, bias and y: 1 bfloat16, 0 float16), TILES (8-row tiles of x per block), SPLITS
// (blocks of a cluster, which cut the inputs between them: 1, 2, 4, 8), SHARES (blocks of a cluster, which fetch x
// together), X_PARTS (in which x arrives), WARPS (that multiply, per block), ITEM_INPUTS (of 16 outputs, in one slot of
// the ring), MOST_ITEMS (slots), GATED (1 if the outputs are gates, then as many that they let through; 0), and for
// 4-bit weights GROUP (256, 128, 64, 32 inputs per scale).

#define CLUSTER (SPLITS * SHARES)
static_assert(!GATED || SPLITS == 1, "a gate and what it lets through meet in one block");

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// True in one lane of a whole warp; the compiler then needs no loop over lanes around instructions of uniform operands.
__device__ __forceinline__ bool elected() {
    u32 one;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(one));
    return one;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
template <int N> __device__ __forceinline__ void load_words(u32 (&x)[N], const u8* from) {
    if constexpr (N == 4) {
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
    } else {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        x[0] = words.x, x[1] = words.y;
    }
}
// (x & mask) | bits in one instruction; left to itself the compiler takes two, as both constants are immediates.
__device__ __forceinline__ u32 masked_or(u32 x, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}
__device__ __forceinline__ void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float float_of(u16 element) {
    if (BF16) return __uint_as_float(u32(element) << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(element));
    return f;
}
__device__ __forceinline__ u16 element_of(float x) {
    u16 e;
    if (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(e) : "f"(x));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(e) : "f"(x));
    return e;
}
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Before bulk copies may count on the barriers.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
    } while (!done);
}
__device__ __forceinline__ bool barrier_passed(u64* barrier, u32 phase) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
    return done;
}
__device__ __forceinline__ void bulk_copy(u32 to, const u8* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                 "r"(shared_address(barrier)) : "memory");
}
// To the same place in the first `blocks` blocks of a cluster, each of which counts on its own barrier there.
__device__ __forceinline__ void bulk_copy_shared(u32 to, const u8* from, int bytes, u64* barrier, int blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier)),
                 "h"(u16((1 << blocks) - 1)) : "memory");
}
// The block's start, where all barriers are set up.
__device__ __forceinline__ void start_meet() {
    __syncwarp();
    __syncthreads();
}
__device__ __forceinline__ void multipliers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }
// Programmatic dependent launch: what came before has written all it will; what comes next may take free room.
__device__ __forceinline__ void previous_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A barrier of a cluster, in halves: before it is complete its blocks may not have started. Relaxed, as a release is a
// fence of all of the GPU's memory, and long while copies are under way; what barriers need has a fence of its own.
__device__ __forceinline__ void cluster_arrive() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores where `to` is, but in the shared memory of the cluster's block `rank`, whose `barrier` counts the bytes.
__device__ __forceinline__ void store_remote(float* to, int rank, float x, u64* barrier) {
    u32 address, counted;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(to)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 ::"r"(address), "r"(__float_as_uint(x)), "r"(counted) : "memory");
}
