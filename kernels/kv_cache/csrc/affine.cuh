// What the kernel of quantize.cu is made of: ranges, codes, and where they go.
//
// Compiled with -D: HEAD_DIM (64, 128), PLANES (1 upper codes, 2 lower ones too), BF16 (where keys and values are
// bfloat16, else float16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define GROUP 128
#define LANES (HEAD_DIM / 8)         // that share a token; each holds 8 of its channels
#define STREAMS 16                   // tokens that a block reads at once
#define TOKENS (GROUP / STREAMS)     // of a lane
#define THREADS (STREAMS * LANES)
#define WARPS (THREADS / 32)
#define ROW_BYTES (GROUP / 2)        // of one channel's value codes
#define PAD_BYTES 16                 // after 8 channels, which keeps the banks of a warp's lanes apart

// Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits of a float: conversions between floats
// and integers run at an eighth of the rate of additions.
#define ROUNDER 12582912.0f
#define ROUNDER_BITS 0x4B400000u

#ifdef BF16
#define PAIR "bf16x2"
__device__ __forceinline__ float first_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
#else
#define PAIR "f16x2"
__device__ __forceinline__ float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float first_of(u32 pair) { return half_to_float(u16(pair)); }
__device__ __forceinline__ float second_of(u32 pair) { return half_to_float(u16(pair >> 16)); }
#endif

__device__ __forceinline__ u32 least(u32 a, u32 b) {
    u32 y;
    asm("min." PAIR " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ u32 most(u32 a, u32 b) {
    u32 y;
    asm("max." PAIR " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ u16 to_half(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float from_half(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// The stored pair of a range, and what encoding needs of it: the same operations as quantize_twin.encode.
struct Affine {
    u16 scale, minimum;
    float inverse, low;

    __device__ __forceinline__ Affine(float smallest, float largest)
        : scale(to_half(__fmul_rn(largest - smallest, 1.0f / 15))), minimum(to_half(smallest)) {
        const float step = from_half(scale);
        inverse = __fdiv_rn(1.0f, step == 0 ? 1.0f : step);
        low = from_half(minimum);
    }
};

// Codes of two elements that share a byte, each by the {inverse, low} of its range; only the low byte of each word
// counts.
struct Codes {
    u32 upper, lower;

    __device__ __forceinline__ Codes(float first, float second, float2 first_affine, float2 second_affine) {
        u32 upper0, lower0, upper1, lower1;
        encode(first, first_affine, upper0, lower0);
        encode(second, second_affine, upper1, lower1);
        upper = upper0 + 16 * upper1;
        lower = lower0 + 16 * lower1;
    }

    // Between -8/16 and 15 7/16 nothing clamps but a residual of just 8/16.
    __device__ __forceinline__ static void encode(float x, float2 affine, u32& upper, u32& lower) {
        const float position = fminf(fmaxf(__fmul_rn(__fsub_rn(x, affine.y), affine.x), -0.5f), 15.4375f);
        const u32 coarse = __float_as_uint(__fadd_rn(position, ROUNDER));
        const u32 fine = __float_as_uint(__fmaf_rn(position, 16.0f, ROUNDER));
        upper = coarse;
        lower = min(int(fine - 16 * coarse + 15 * ROUNDER_BITS + 8), 15);
    }
};

// The lowest bytes of four words, in one.
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Where the codes go. The group is only known on the device: one past the end must not write into the next row. It is
// read after the elements, which need not wait for it.
struct Place {
    const int* group_index;
    int batch, group_capacity;

    __device__ __forceinline__ int group() const { return group_index[batch] + int(blockIdx.y); }
    __device__ __forceinline__ i64 flat(int group) const { return i64(blockIdx.x) * group_capacity + group; }
};

// The planes and pairs of keys or of values.
struct Planes {
    u8 *upper, *lower;
    u16 *scale, *minimum;

    // Those of one group, with `pairs` scales.
    __device__ __forceinline__ Planes at(i64 flat, int pairs) const {
        const i64 codes = flat * (GROUP * HEAD_DIM / 2);
        return {upper + codes, lower + codes, scale + flat * pairs, minimum + flat * pairs};
    }
};
