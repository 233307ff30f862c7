"""Rows of x as the planes of bytes that products of integers take (csrc/integer.cuh).

x of a row and a group of 128 inputs is scale * q, with integers q = 256 upper + lower of 16 bits: the scale is the
group's largest magnitude over 32639 = 256 * 127 + 127, so that both planes are signed bytes.

    planes  [group, row, plane 2, c 4, p 4, step 2] words: inputs 32 p + 8 c + 4 step + {0, 2, 1, 3} of the group
    pairs   [group, row] of (scale, sum of q) in float32, after all planes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128  # inputs that share a scale
LARGEST = 256 * 127 + 127
SMALLEST = 1e-30  # a group whose largest magnitude is not above counts as zero
ROW_BYTES = 2 * GROUP  # planes of a row of a group
PAIR_BYTES = 8  # scale and sum


@dataclass(frozen=True, eq=False)
class RowPlanes:
    """data: uint8 [inputs / 128 * rows * 264], in this module's order; dtype: of the rows that it stands for."""

    data: Tensor
    rows: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def empty(cls, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RowPlanes:
        """Raises ValueError for inputs that are no multiple of 128."""
        if inputs % GROUP:
            raise ValueError(f"{inputs} inputs; allowed: multiples of {GROUP}")
        data = torch.empty(inputs // GROUP * rows * (ROW_BYTES + PAIR_BYTES), dtype=torch.uint8, device=device)
        return cls(data, rows, inputs, dtype)

    @classmethod
    def quantize(cls, x: Tensor) -> RowPlanes:
        """The planes of x [rows, inputs]."""
        rows, inputs = x.shape
        planes = cls.empty(rows, inputs, x.dtype, x.device)
        groups = x.float().view(rows, -1, GROUP).transpose(0, 1)
        largest = groups.abs().amax(2, keepdim=True)
        integers = torch.where(largest > SMALLEST, groups * (LARGEST / largest), 0).round().int()
        upper = integers + 128 >> 8
        both = torch.stack([upper, integers - 256 * upper], dim=2).to(torch.int8)
        # [group, row, plane, p, c, step, high bit, low bit of an input] to the order of the module's docstring
        ordered = both.view(-1, rows, 2, 4, 4, 2, 2, 2).permute(0, 1, 2, 4, 3, 5, 7, 6)
        pairs = torch.cat([largest / LARGEST, integers.sum(2, keepdim=True)], dim=2).float().contiguous()
        torch.cat([ordered.reshape(-1).view(torch.uint8), pairs.view(-1).view(torch.uint8)], out=planes.data)
        return planes

    def dequantize(self) -> Tensor:
        """x, float32 [rows, inputs]."""
        groups = self.inputs // GROUP
        planes, pairs = self.data.split([groups * self.rows * ROW_BYTES, groups * self.rows * PAIR_BYTES])
        both = planes.view(torch.int8).view(groups, self.rows, 2, 4, 4, 2, 2, 2).permute(2, 1, 0, 4, 3, 5, 7, 6)
        integers = (256 * both[0].int() + both[1].int()).reshape(self.rows, groups, GROUP)
        scale = pairs.clone().view(torch.float32).view(groups, self.rows, 2)[:, :, :1].transpose(0, 1)
        return (integers * scale).flatten(1)
