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

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.layer import add_rms_norm_reference

GROUP = 128  # inputs that share a scale
LARGEST = 256 * 127 + 127
SMALLEST = 1e-30  # a group whose largest magnitude is not above counts as zero
ROW_BYTES = 2 * GROUP  # planes of a row of a group
PAIR_BYTES = 8  # scale and sum
SPLIT = (ROW_BYTES, PAIR_BYTES)


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
        planes, pairs = self.views()
        both = planes.view(groups, self.rows, 2, 4, 4, 2, 2, 2).permute(2, 1, 0, 4, 3, 5, 7, 6)
        integers = (256 * both[0].int() + both[1].int()).reshape(self.rows, groups, GROUP)
        scale = pairs.view(groups, self.rows, 2)[:, :, :1].transpose(0, 1)
        return (integers * scale).flatten(1)

    def views(self) -> tuple[Tensor, Tensor]:
        """Planes as int8, and pairs as float32, both flat."""
        planes, pairs = self.data.split([self.data.numel() // (ROW_BYTES + PAIR_BYTES) * part for part in SPLIT])
        return planes.view(torch.int8), pairs.view(torch.float32)


def add_rms_norm_planes(
    hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, RowPlanes]:
    """`add_rms_norm` of hidden [rows, H], whose norm, rounded to hidden's dtype, is quantized in the same kernel.

    Raises ValueError for an H that is no multiple of 128.
    """
    if not uses_gpu_kernel(backend, hidden):
        total, normed = add_rms_norm_reference(hidden, update, weight, eps)
        return total, RowPlanes.quantize(normed)
    from ridgeplan.kernels.layer.triton import add_rms_norm_triton

    planes = RowPlanes.empty(*hidden.shape, hidden.dtype, hidden.device)
    total, _ = add_rms_norm_triton(hidden, update, weight, eps, planes.views())
    return total, planes
