"""Linear layers of a decoder in every weight format, and the gated MLP made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear import linear_dense, linear_gguf, linear_quantized
from ridgeplan.kernels.linear.gguf import GgufWeight
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline.execution import CPU_SKINNY_GEMM_ROWS

ROW_MULTIPLE = 16  # torch's int4 kernel needs multiples of this many outputs
PLANE_ROWS = 256  # rows of 8-bit products on a CPU whose planes are added at once


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

    Inputs and outputs are rounded to bfloat16: with float32 ones the kernel takes 20 to 70 times as long. So where two
    tokens are almost as likely, greedy output may depend on how many tokens a pass has, as in bfloat16 on a GPU.
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
        return self.product(x).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        """The product with x [..., inputs] as the kernel returns it: bfloat16 [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scales)
        return out[:, : self.outputs].view(*x.shape[:-1], self.outputs)

    @property
    def bytes(self) -> int:
        """Storage of codes, scales and zeros."""
        return self.packed.nbytes + self.scales.nbytes


@dataclass(frozen=True, eq=False)
class LibraryInt8Weight:
    """An 8-bit weight for torch's CPU kernel, as `Int8Weight` for the package's: the sum of two planes."""

    upper: LibraryInt4Weight
    lower: LibraryInt4Weight

    def __call__(self, x: Tensor) -> Tensor:
        # A few rows at a time: the planes' products of a whole prompt would take as much memory again as the result.
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(rows), self.upper.outputs)
        for some, sums in zip(rows.split(PLANE_ROWS), out.split(PLANE_ROWS), strict=True):
            sums.copy_(self.upper.product(some)).add_(self.lower.product(some))
        return out.view(*x.shape[:-1], -1)

    @property
    def group(self) -> int:
        """Inputs per scale."""
        return self.upper.group

    @property
    def bytes(self) -> int:
        """Storage of codes, scales and zeros of both planes."""
        return self.upper.bytes + self.lower.bytes


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """y = x W^T + bias with a weight stored as codes."""

    weight: Int4Weight | Int8Weight | LibraryInt4Weight | LibraryInt8Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        if isinstance(self.weight, (Int4Weight, Int8Weight)):
            return linear_quantized(x, self.weight, self.bias, gated=gated)
        out = self.weight(x)
        out = out if self.bias is None else out + self.bias
        return swiglu(out) if gated else out

    @property
    def bytes(self) -> int:
        """Storage of codes, scales, zeros and the bias."""
        return self.weight.bytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """y = x W^T + bias with a weight as a checkpoint stores it, which no plan quantizes again."""

    weight: Mxfp4Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        return linear_dense(x, self.weight.dequantize(x.dtype), self.bias, gated=gated)

    @property
    def bytes(self) -> int:
        """Storage of codes, scales and the bias."""
        return self.weight.bytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class Stored:
    """y = x W^T + bias with weights as a GGUF file stores them, which no plan quantizes again.

    weights: one below the other, as projections that are fused may be of several types, some in full precision.
    """

    weights: tuple[GgufWeight | Dense, ...]
    bias: Tensor | None = None

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        first = self.weights[0]
        if len(self.weights) == 1 and isinstance(first, GgufWeight):
            return linear_gguf(x, first, self.bias, gated=gated)
        parts = (weight(x) if isinstance(weight, Dense) else linear_gguf(x, weight) for weight in self.weights)
        out = torch.cat(list(parts), dim=-1)
        out = out if self.bias is None else out.add_(self.bias)
        return swiglu(out) if gated else out

    @property
    def bytes(self) -> int:
        """Storage of codes, scales, minima and the bias."""
        return sum(weight.bytes for weight in self.weights) + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class Int4(QuantizedLinear):
    """A linear layer with a 4-bit weight."""

    weight: Int4Weight | LibraryInt4Weight


@dataclass(frozen=True, eq=False)
class Int8(QuantizedLinear):
    """A linear layer with an 8-bit weight. hierarchical: whether its upper plane was fitted to serve drafts."""

    weight: Int8Weight | LibraryInt8Weight
    hierarchical: bool = False

    @property
    def upper(self) -> Int4:
        """The layer that drafts use, in the same memory."""
        return Int4(self.weight.upper, self.bias)


def _thin_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for a few float32 rows on a CPU, at memory bandwidth.

    MKL uses one core for a product with one row, and threads few-row products only with the weight on the left.
    Measured on two EPYC cores, duplicating a single row takes a third of the time.
    """
    left = x if len(x) > 1 else x.expand(2, -1).contiguous()
    return (weight @ left.t()).t()[: len(x)].contiguous()


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """down(silu(gate(x)) * up(x)) of x [..., hidden]. gate_up: gate and up projections, stacked in this order.

    activation: as `swiglu` takes it; products only fuse silu. Called for a prompt's rows it does as for others.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    def __call__(self, x: Tensor, prompt: bool = False) -> Tensor:
        if self.activation == "silu":
            return self.down(self.gate_up(x, gated=True))
        return self.down(swiglu(self.gate_up(x), activation=self.activation))

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize."""
        return self.gate_up, self.down

    def with_projections(self, change: Callable[[Linear], Linear]) -> GatedMLP:
        """The same MLP with `change` applied to each projection."""
        return GatedMLP(change(self.gate_up), change(self.down), self.activation)
