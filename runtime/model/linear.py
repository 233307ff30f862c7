"""Linear layers: dense and 4-bit weights, on the package's CUDA kernels or torch's CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer.swiglu import swiglu
from ridgeplan.kernels.linear.dense import linear_dense
from ridgeplan.kernels.linear.int4 import linear_int4
from ridgeplan.kernels.linear.int4_weight import Int4Weight
from ridgeplan.roofline.execution import CPU_SKINNY_GEMM_ROWS

ROW_MULTIPLE = 16  # torch's int4 kernel needs multiples of this many outputs


class Linear(Protocol):
    """A linear layer with weights in any format."""

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        """x [..., inputs] to [..., outputs]; gated, `swiglu` of that, [..., outputs / 2]."""


@dataclass(frozen=True, eq=False)
class Dense:
    """y = x W^T + bias; weight [outputs, inputs] in full precision."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > CPU_SKINNY_GEMM_ROWS or x.is_cuda or x.dtype != torch.float32:
            return linear_dense(x, self.weight, self.bias, gated=gated)
        out = _thin_product(x.reshape(rows, -1), self.weight).view(*x.shape[:-1], -1)
        out = out if self.bias is None else out + self.bias
        return swiglu(out) if gated else out

    @property
    def bytes(self) -> int:
        """Storage of the weight and its bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class LibraryInt4Weight:
    """A 4-bit weight in the layout of torch's CPU kernel; w = (code - 8) * scale + zero as in `Int4Weight`.

    Inputs and outputs are rounded to bfloat16: with float32 ones the kernel takes 20 to 70 times as long.
    packed: torch's own layout; scales: bfloat16 [inputs / group, padded outputs, (scale, zero)].
    """

    packed: Tensor
    scales: Tensor
    group: int
    outputs: int

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> LibraryInt4Weight:
        """Takes the arguments of `Int4Weight.pack`, on the CPU."""
        outputs, inputs = codes.shape
        padded = (0, 0, 0, -outputs % ROW_MULTIPLE)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(functional.pad(codes.int(), padded), 1)
        pairs = torch.stack([functional.pad(pair, padded) for pair in (scale, zero)], dim=2)
        return cls(packed, pairs.transpose(0, 1).bfloat16().contiguous(), inputs // scale.shape[1], outputs)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scales)
        return out[:, : self.outputs].to(x.dtype).view(*x.shape[:-1], self.outputs)

    @property
    def bytes(self) -> int:
        """Storage of codes, scales and zeros."""
        return self.packed.nbytes + self.scales.nbytes


@dataclass(frozen=True, eq=False)
class Int4:
    """y = x W^T + bias with a 4-bit weight."""

    weight: Int4Weight | LibraryInt4Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        if isinstance(self.weight, Int4Weight):
            return linear_int4(x, self.weight, self.bias, gated=gated)
        out = self.weight(x)
        out = out if self.bias is None else out + self.bias
        return swiglu(out) if gated else out

    @property
    def bytes(self) -> int:
        """Storage of codes, scales, zeros and the bias."""
        return self.weight.bytes + (0 if self.bias is None else self.bias.nbytes)


def _thin_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for a few float32 rows on a CPU, at memory bandwidth.

    MKL uses one core for a product with one row, and threads few-row products only with the weight on the left.
    Measured on two EPYC cores, duplicating a single row takes a third of the time.
    """
    left = x if len(x) > 1 else x.expand(2, -1).contiguous()
    return (weight @ left.t()).t()[: len(x)].contiguous()
