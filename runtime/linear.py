"""Linear layers: dense, and 4-bit weights on torch's own int4 kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.errors import ModelError

THIN_ROWS = 64  # below, a CPU's float32 product is bound by reading the weight
ROW_MULTIPLE = 16  # torch's int4 kernels take output widths in such steps


@dataclass(frozen=True, eq=False)
class Dense:
    """y = x W^T + bias; weight [outputs, inputs]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > THIN_ROWS or x.is_cuda or x.dtype != torch.float32:
            return functional.linear(x, self.weight, self.bias)
        out = _thin_product(x.reshape(rows, -1), self.weight).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    @property
    def bytes(self) -> int:
        """Storage of the weight and its bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class Int4:
    """4-bit weights for drafts: w = (code - 8) * scale + zero per `group` inputs.

    packed: torch's own layout; scales: bfloat16 [inputs / group, padded outputs, (scale, zero)].
    Activations pass as bfloat16: that is the kernels' only fast path, and a draft need not be exact.
    """

    packed: Tensor
    scales: Tensor
    group: int
    outputs: int
    bias: Tensor | None = None

    @classmethod
    def quantize(cls, dense: Dense, group: int) -> Int4:
        """Rounds dense weights to nearest; a `group` that does not divide the inputs falls to 64 or 32."""
        outputs, inputs = dense.weight.shape
        group = fitting_group(inputs, group)
        weight = functional.pad(dense.weight.float(), (0, 0, 0, -outputs % ROW_MULTIPLE))
        codes, scales = quantize_weight(weight, group)
        return cls(_pack(codes), scales, group, outputs, dense.bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        ops = torch.ops.aten
        multiply = ops._weight_int4pack_mm if x.is_cuda else ops._weight_int4pack_mm_for_cpu
        out = multiply(rows, self.packed, self.group, self.scales)[:, : self.outputs]
        out = out.to(x.dtype).view(*x.shape[:-1], self.outputs)
        return out if self.bias is None else out + self.bias

    @property
    def bytes(self) -> int:
        """Storage of codes, scales, zeros and the bias."""
        return self.packed.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)


Linear = Dense | Int4


def _thin_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of a few float32 rows at memory speed on CPUs.

    MKL uses one core for a product with one row, and threads few-row products only with the weight on the
    left: measured on two EPYC cores, a row doubled this way takes a third of the time that one row takes.
    """
    left = x if len(x) > 1 else x.expand(2, -1).contiguous()
    return (weight @ left.t()).t()[: len(x)].contiguous()


def fitting_group(inputs: int, group: int) -> int:
    """The largest of group, 64 and 32 that divides the input width. Raises ModelError when none does."""
    for candidate in sorted({group, 64, 32}, reverse=True):
        if candidate <= group and inputs % candidate == 0:
            return candidate
    raise ModelError(f"a linear layer has {inputs} inputs; allowed for 4-bit weights: multiples of 32")


def quantize_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Asymmetric round-to-nearest: codes int32 [outputs, inputs] in 0..15, and scales as in `Int4`."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.aminmax(dim=2, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    # Codes are chosen for the stored, rounded pair; a constant group has scale 0 and decodes to its zero.
    step = torch.where(scale == 0, 1.0, scale)
    codes = ((grouped - zero) / step + 8).round().clamp(0, 15).int().flatten(1)
    return codes, torch.cat([scale, zero], dim=2).transpose(0, 1).bfloat16().contiguous()


def _pack(codes: Tensor) -> Tensor:
    if not codes.is_cuda:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # The tile count along the inputs must divide them: 16 inputs a tile, 8 tiles where possible.
    tiles = next(count for count in (8, 4, 2) if codes.shape[1] % (16 * count) == 0)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
