"""A linear layer's 8-bit weight: two planes of 4-bit codes, of which drafts may read the upper one alone.

Both planes are whole 4-bit weights, and the weight is their sum. What codes they hold is up to the quantizer:

    plain         the upper and lower halves of one 8-bit code (`Int8Weight.pack`)
    hierarchical  a 4-bit weight that serves drafts, and what it lacks, with a scale of its own

Hierarchical codes are QuantSpec's for keys and values (section 4.2), here for weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.linear.quantized.int4_weight import Int4Weight


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """w = upper + lower, of the same shape and group. Storage is 1 + 8 / group bytes per parameter."""

    upper: Int4Weight
    lower: Int4Weight

    def __post_init__(self) -> None:
        """Raises ValueError for planes of different shapes or groups."""
        upper, lower = ((plane.outputs, plane.inputs, plane.group) for plane in (self.upper, self.lower))
        if upper != lower:
            raise ValueError(f"planes of (outputs, inputs, group) {upper} and {lower}; allowed: equal ones")

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Int8Weight:
        """The plain weight w = (code - 128) * scale + zero; arguments of `Int4Weight.pack`, with codes of 0..255."""
        planes = split_codes(codes, scale, zero)
        return cls(*(Int4Weight.pack(*plane) for plane in planes))

    @property
    def planes(self) -> tuple[Int4Weight, ...]:
        """What a product reads: both."""
        return self.upper, self.lower

    @property
    def group(self) -> int:
        """Inputs per scale."""
        return self.upper.group

    @property
    def inputs(self) -> int:
        """Columns of the weight."""
        return self.upper.inputs

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.upper.outputs

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [outputs, inputs], added up in float32."""
        return (self.upper.dequantize() + self.lower.dequantize()).to(dtype)

    @property
    def bytes(self) -> int:
        """Storage of codes, scales and zeros of both planes."""
        return self.upper.bytes + self.lower.bytes


Plane = tuple[Tensor, Tensor, Tensor]  # codes, scale and zero


def split_codes(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Plane, Plane]:
    """The planes whose sum is (code - 128) * scale + zero, with code = 16 * upper + lower.

    Upper codes are centred at 8 and so stand for code - 128, lower ones for code - 8, which its zero adds back. Both
    scales and that zero are the scale times a power of two, so they are as exact in bfloat16 as the scale is.
    """
    codes = codes.to(torch.uint8)
    return (codes >> 4, 16 * scale, zero), (codes & 15, scale, 8 * scale)
