"""Triton functions that several kernels share: products, unpacking of 4-bit codes, PDL, the device clock.

Centred codes (U - 8, or 16 (U - 8) + L) are exact in bf16 and nearly cancel in a sum. Otherwise the result would be the
difference of two large sums.
"""

import os
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ridgeplan.roofline.cost import Cost

# Read when the kernels are decorated, as Triton itself does.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Four packed bytes -> four low and four high nibbles in bf16, minus 8. The bytes 0x43, n are the bf16 number 128 + n,
# so one byte permutation converts two codes; adding -136 (0xC308) centres them exactly. Integer-to-float conversions
# would more than double the instructions of the whole kernel.
NIBBLES_TO_BF16 = tl.constexpr("""{
.reg .b32 low, high, one, centre;
mov.b32 one, 0x3F803F80;
mov.b32 centre, 0xC308C308;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, 0x43434343, 0x4140;
prmt.b32 $1, low, 0x43434343, 0x4342;
prmt.b32 $2, high, 0x43434343, 0x4140;
prmt.b32 $3, high, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, $0, one, centre;
fma.rn.bf16x2 $1, $1, one, centre;
fma.rn.bf16x2 $2, $2, one, centre;
fma.rn.bf16x2 $3, $3, one, centre;
}""")

# 16 * upper + lower on pairs of bf16 (0x4180 is 16); integers up to 256 are exact.
SIXTEEN_UPPER_PLUS_LOWER = tl.constexpr("""{
.reg .b32 sixteen;
mov.b32 sixteen, 0x41804180;
fma.rn.bf16x2 $0, $1, sixteen, $2;
}""")


@triton.jit
def _nibbles(codes, dtype: tl.constexpr):
    """Low and high nibbles of bytes, minus 8, in `dtype`."""
    if dtype == tl.bfloat16 and not INTERPRETED:
        first, second = tl.inline_asm_elementwise(
            NIBBLES_TO_BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        first = ((codes & 15).to(tl.float32) - 8).to(dtype)
        second = ((codes >> 4).to(tl.float32) - 8).to(dtype)
    return first, second


@triton.jit
def _combine(upper, lower, dtype: tl.constexpr):
    if dtype == tl.bfloat16 and not INTERPRETED:
        codes = tl.inline_asm_elementwise(
            SIXTEEN_UPPER_PLUS_LOWER, "=r,r,r", [upper, lower], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        codes = (16 * upper.to(tl.float32) + lower.to(tl.float32)).to(dtype)
    return codes


@triton.jit
def centred_codes(upper, lower, at, BITS: tl.constexpr, dtype: tl.constexpr):
    """Both halves of the packed axis of the bytes at `at`: U - 8, or 16 (U - 8) + L when BITS is 8."""
    first, second = _nibbles(tl.load(upper + at), dtype)
    if BITS == 8:
        low_first, low_second = _nibbles(tl.load(lower + at), dtype)
        first, second = _combine(first, low_first, dtype), _combine(second, low_second, dtype)
    return first, second


@triton.jit
def centred_affine(scale, minimum, BITS: tl.constexpr):
    """(step, zero) in float32 so that x = step * code + zero with the codes of `centred_codes`.

    S * (U + L/16) + Z = S/16 * (16 (U - 8) + L) + (Z + 8 S).
    """
    scale = scale.to(tl.float32)
    return scale / (16 if BITS == 8 else 1), minimum.to(tl.float32) + 8 * scale


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, with products in full precision."""
    # The interpreter multiplies the bit patterns of bf16 (triton-lang/triton#11584). Float32 products of 16-bit
    # operands are exact, so widening them there changes nothing else.
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def pdl_launch_dependents_and_wait(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until earlier ones have ended; called first in a kernel.

    `ridgeplan.kernels.device.cuda.pdl_options` sets PDL and the option launch_pdl.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_metadata(name: str, cost: Cost, element_bytes: int = 4) -> dict[str, Any]:
    """What `triton.profiler` reads of a launch: name, bytes, and FLOPs under a key with the operands' bits."""
    return {"name": name, f"flops{8 * element_bytes}": cost.flops, "bytes": cost.bytes}


# Every second int64 is aligned to 16 bytes; specializing on alignment would compile the kernel twice.
@triton.jit(do_not_specialize_on_alignment=["out"])
def _record_timestamp_kernel(out):
    tl.store(out, globaltimer())


def record_timestamp_triton(out: Tensor, index: int) -> None:
    """See `ridgeplan.kernels.device.clock.record_timestamp`."""
    _record_timestamp_kernel[(1,)](out[index:], num_warps=1)
