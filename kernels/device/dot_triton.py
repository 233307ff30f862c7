"""A matrix product that is right in Triton's interpreter too."""

import triton
import triton.language as tl

from ridgeplan.kernels.device.nibbles_triton import INTERPRETED


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, with products in full precision."""
    # The interpreter multiplies the bit patterns of bf16 (triton-lang/triton#11584). Float32 products of 16-bit
    # operands are exact, so widening them there changes nothing else.
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
