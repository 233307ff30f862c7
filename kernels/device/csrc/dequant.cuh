// Unpacking of 4-bit codes to 16-bit floats without a conversion instruction, as in Kim et al., "Who Says Elephants
// Can't Run" (arXiv:2211.10017): a code ORed into the mantissa of a power of two P is the number P + code, if the
// mantissa's last bit counts 1. That is P = 1024 in float16 and P = 128 in bfloat16.
//
//     float16   s eeeee mmmmmmmmmm          bfloat16   s eeeeeeee mmmmmmm
//     1024      0 11001 0000000000          128        0 10000110 0000000
//     + code    0 11001 000000cccc          + code     0 10000110 000cccc
//     + 16 code 0 11001 00cccc0000
//
// A 32-bit word of codes has eight nibbles. Two of them, four bytes / 2 apart, share one masked OR:
//
//     byte         3       2       1       0
//     nibble     h3 l3   h2 l2   h1 l1   h0 l0
//     low_codes(word)           l2 . l0          low_codes(word >> 8)      l3 . l1       P + code
//     high_codes(word)          h2 . h0          high_codes(word >> 8)     h3 . h1       P + 16 code
#pragma once

#include "ptx.cuh"

// The bits of `value` as a float16 (bfloat16), in both halves of a word. Exact for numbers that the format has; 0 and
// subnormal numbers are not supported.
template <bool IS_BF16> __device__ constexpr u32 pair_constant(double value) {
    const u32 mantissa_bits = IS_BF16 ? 7 : 10, sign = value < 0 ? 0x8000 : 0;
    double magnitude = value < 0 ? -value : value;
    u32 exponent = IS_BF16 ? 127 : 15;
    while (magnitude >= 2) magnitude /= 2, exponent++;
    while (magnitude < 1) magnitude *= 2, exponent--;
    return (sign | exponent << mantissa_bits | u32((magnitude - 1) * (1 << mantissa_bits))) * 0x10001u;
}
__device__ constexpr u32 half2_constant(double value) { return pair_constant<false>(value); }
static_assert(half2_constant(1024) == 0x64006400u && half2_constant(-1.5) == 0xBE00BE00u, "float16");
static_assert(pair_constant<true>(128) == 0x43004300u && pair_constant<true>(-136) == 0xC308C308u, "bfloat16");

template <bool IS_BF16> constexpr u32 CODE_BASE_VALUE = IS_BF16 ? 128 : 1024;  // P
template <bool IS_BF16> constexpr u32 CODE_BASE = pair_constant<IS_BF16>(CODE_BASE_VALUE<IS_BF16>);
constexpr u32 LOW_NIBBLES = 0x000F000Fu, HIGH_NIBBLES = 0x00F000F0u;  // of bytes 0 and 2
constexpr u32 HALF2_SIXTEENTH = half2_constant(1.0 / 16);

// Low nibbles of bytes 0 and 2 as P + code.
template <bool IS_BF16 = false> __device__ __forceinline__ u32 low_codes(u32 word) {
    return lop3_and_or(word, LOW_NIBBLES, CODE_BASE<IS_BF16>);
}
// High nibbles of bytes 0 and 2 as 1024 + 16 code, in float16.
__device__ __forceinline__ u32 high_codes(u32 word) { return lop3_and_or(word, HIGH_NIBBLES, CODE_BASE<false>); }

// Four bytes of 4-bit codes to four pairs of halves. [0], [1]: 1024 + low nibble of bytes (0,2), (1,3); [2], [3]: 1024
// + 16 times the high nibble of the same bytes.
__device__ __forceinline__ void unpack_int4(u32 (&pairs)[4], u32 codes) {
    pairs[0] = low_codes(codes);
    pairs[1] = low_codes(codes >> 8);
    pairs[2] = high_codes(codes);
    pairs[3] = high_codes(codes >> 8);
}
// The same with bytes (0,1) and (2,3) in the pairs, an instruction more.
__device__ __forceinline__ void unpack_int4_in_order(u32 (&pairs)[4], u32 codes) {
    constexpr u32 HIGH_BYTES = 0x64646464u, BYTES_0_1 = 0x4140, BYTES_2_3 = 0x4342;
    const u32 low = codes & 0x0F0F0F0Fu, high = codes & 0xF0F0F0F0u;
    pairs[0] = __byte_perm(low, HIGH_BYTES, BYTES_0_1), pairs[1] = __byte_perm(low, HIGH_BYTES, BYTES_2_3);
    pairs[2] = __byte_perm(high, HIGH_BYTES, BYTES_0_1), pairs[3] = __byte_perm(high, HIGH_BYTES, BYTES_2_3);
}
// Two planes of codes that make 8 bits, upper code U and lower code L + 8: 1024 + 16 U + (L + 8).
__device__ __forceinline__ void unpack_int8(u32 (&pairs)[4], u32 upper, u32 lower) {
    constexpr u32 HIGH_BYTES = 0x64646464u;  // the upper byte of 1024
    constexpr u32 BYTES_0_2 = 0x4240, BYTES_1_3 = 0x4341;  // each below an upper byte of 1024
    const u32 low = lop3_select(upper << 4, lower, 0xF0F0F0F0u);
    const u32 high = lop3_select(upper, lower >> 4, 0xF0F0F0F0u);
    pairs[0] = __byte_perm(low, HIGH_BYTES, BYTES_0_2);
    pairs[1] = __byte_perm(low, HIGH_BYTES, BYTES_1_3);
    pairs[2] = __byte_perm(high, HIGH_BYTES, BYTES_0_2);
    pairs[3] = __byte_perm(high, HIGH_BYTES, BYTES_1_3);
}

// Brings what multiplies codes into their order. Of two words of adjacent elements (0,1) (2,3): the elements (0,2),
// (1,3).
__device__ __forceinline__ u32 pack_low_halves(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x5410); }
__device__ __forceinline__ u32 pack_high_halves(u32 x0, u32 x1) { return __byte_perm(x0, x1, 0x7632); }

// An exponent e, at least -60, with |x| < 2^e for all |x| up to `largest`. Queries are divided by 2^e before they are
// multiplied by float16 scales, so that products of finite scales cannot overflow.
__device__ __forceinline__ int exponent_above(float largest) { return max((__float_as_int(largest) >> 23) - 126, -60); }

// Adding ROUNDER = 1.5 * 2^23 to a float leaves the nearest integer (ties to even) in the low bits of the sum, and
// adding a small integer to ROUNDER_BITS adds it to the float: conversions run at an eighth of the rate of additions.
constexpr float ROUNDER = 12582912.0f;
constexpr u32 ROUNDER_BITS = 0x4B400000u;
