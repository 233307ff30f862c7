"""Weights in the quantized types of GGUF files, held exactly: each part of the blocks as a tensor of its own.

A product dequantizes them a tile at a time, w = scale (code - offset) - minimum in float32, as ggml does
(ggml/src/ggml-quants.c). Codes, scales and minima are those of the file, so nothing is rounded before w is, to the type
of the product's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS, BlockFormat

OCTET = 8  # codes of a word
SLAB_ELEMENTS = 1 << 22  # that are dequantized at once on a CPU
PARTS = ("codes", "high", "scales", "minima", "super_scales", "super_minima")


@dataclass(frozen=True, eq=False)
class GgufWeight:
    """A weight [outputs, inputs] of type `kind`, a key of `BLOCK_FORMATS`.

    codes: the lower 4 bits of 8 inputs in each int32 [outputs, inputs / 8], the first in the lowest; or int8
    [outputs, inputs]. high: the other 1 or 2 bits of as many inputs, uint8 or int16 [outputs, inputs / 8]. scales,
    minima: [outputs, inputs / group], int8 if nested, then times super_scales and super_minima, else float16. super_*:
    float16 [outputs, inputs / 256].
    """

    kind: int
    codes: Tensor
    scales: Tensor
    high: Tensor | None = None
    minima: Tensor | None = None
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None

    @property
    def format(self) -> BlockFormat:
        """How the blocks of this type are made."""
        return BLOCK_FORMATS[self.kind]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.outputs, self.inputs

    @property
    def inputs(self) -> int:
        """Columns of the weight."""
        return self.scales.shape[1] * self.format.group

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.scales.shape[0]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by their names in `PARTS`, those that the type has."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}

    @property
    def bytes(self) -> int:
        """Storage of all parts."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    def with_parts(self, change: Callable[[Tensor], Tensor]) -> GgufWeight:
        """The weight with `change` applied to each part, along outputs."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.parts.items()}
        return replace(self, **changed)

    def rows(self, chosen: slice | Tensor) -> GgufWeight:
        """A weight of some of the rows."""
        return self.with_parts(lambda part: part[chosen])

    def slabs(self) -> Iterator[slice]:
        """Rows of which so few are dequantized at once that it takes little memory."""
        rows = max(1, SLAB_ELEMENTS // self.inputs)
        return (slice(first, first + rows) for first in range(0, self.outputs, rows))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs], of which few rows are in float32 at a time."""
        out = self.scales.new_empty(self.shape, dtype=dtype)
        for slab in self.slabs():
            out[slab] = self.rows(slab).dequantize(dtype)
        return out

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [outputs, inputs], computed in float32."""
        described = self.format
        if described.bits == OCTET:
            codes = self.codes.float()
        else:
            codes = _fields(self.codes, 4, 1, described.offset)
            if self.high is not None:
                codes += _fields(self.high, described.bits - 4, 16, 0)
        values = codes.unflatten(1, (-1, described.group)).mul_(_factors(self.scales, self.super_scales))
        if self.minima is not None:
            values -= _factors(self.minima, self.super_minima)
        return values.flatten(1).to(dtype)


def stacked(weights: Iterable[GgufWeight | Tensor]) -> Iterator[GgufWeight | Tensor]:
    """The weights, stacked by outputs, with neighbours of one type as one weight; dense ones [outputs, inputs] too."""
    for kind, group in groupby(weights, lambda weight: weight.kind if isinstance(weight, GgufWeight) else None):
        alike: list[Any] = list(group)
        if len(alike) == 1:
            yield alike[0]
        elif kind is None:
            yield torch.cat(alike)
        else:
            parts = {name: torch.cat([weight.parts[name] for weight in alike]) for name in alike[0].parts}
            yield replace(alike[0], **parts)


def _fields(words: Tensor, bits: int, unit: int, offset: int) -> Tensor:
    """Fields of `bits` bits of words [rows, inputs / 8], times `unit` and less `offset`, in float32 [rows, inputs].

    Looked up by byte, as shifts and conversions take a CPU longer.
    """
    octets, shifts = words.contiguous().view(torch.uint8), torch.arange(0, OCTET, bits, device=words.device)
    table = (torch.arange(256, device=words.device)[:, None] >> shifts & (1 << bits) - 1) * unit - offset
    return functional.embedding(octets.int(), table.float()).flatten(1)


def _factors(factors: Tensor, supers: Tensor | None) -> Tensor:
    """Scales or minima of groups, float32 [rows, groups, 1]."""
    if supers is None:
        return factors.float().unsqueeze(2)
    nested = factors.float().unflatten(1, (supers.shape[1], -1)) * supers.float().unsqueeze(2)
    return nested.flatten(1).unsqueeze(2)


def gguf_weight(kind: int, content: Tensor) -> GgufWeight:
    """A weight from the blocks of a file, uint8 [outputs, bytes of a row], of a type of `BLOCK_FORMATS`.

    Layouts: block_q4_0 to block_q6_K of ggml/src/ggml-common.h.
    """
    described = BLOCK_FORMATS[kind]
    if described.nested:
        return _nested_weight(kind, content)
    scale_bytes, high_bytes = 2 * (1 + described.has_minima), 4 * (described.bits == 5)
    blocks = content.unflatten(1, (-1, scale_bytes + 4 * described.bits))
    halves, stored = blocks[..., :scale_bytes], blocks[..., scale_bytes + high_bytes :]
    factors = _float16(halves)
    scales, minima = factors[..., 0].contiguous(), -factors[..., 1] if described.has_minima else None
    if described.bits == OCTET:
        return GgufWeight(kind, stored.flatten(1).contiguous().view(torch.int8), scales)
    codes = torch.cat([stored & 15, stored >> 4], dim=2)
    if described.bits == 5:
        above = blocks[..., scale_bytes : scale_bytes + high_bytes, None] >> _shifts(1) & 1
        codes = codes | above.flatten(2) << 4
    return GgufWeight(kind, *_packed(codes.flatten(1), described, scales), minima=minima)


def _nested_weight(kind: int, content: Tensor) -> GgufWeight:
    """Q4_K, Q5_K or Q6_K."""
    described = BLOCK_FORMATS[kind]
    if kind == 14:
        blocks = content.unflatten(1, (-1, 210))
        low, high = blocks[..., :128].unflatten(2, (2, 64)), blocks[..., 128:192].unflatten(2, (2, 1, 32))
        lower = torch.cat([low & 15, low >> 4], dim=3)  # [rows, blocks, halves, 128]
        upper = high >> _shifts(2)[:, None] & 3
        codes = (lower | upper.flatten(3) << 4).flatten(1)
        scales = blocks[..., 192:208].flatten(1).contiguous().view(torch.int8)
        supers = _float16(blocks[..., 208:])[..., 0].contiguous()
        return GgufWeight(kind, *_packed(codes, described, scales), super_scales=supers)
    high_bytes = 32 * (described.bits == 5)
    blocks = content.unflatten(1, (-1, 144 + high_bytes))
    supers, sixes, low = _float16(blocks[..., :4]), blocks[..., 4:16], blocks[..., 16 + high_bytes :]
    first, second, third = sixes.unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=2).flatten(1).view(torch.int8)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=2).flatten(1).view(torch.int8)
    pairs = low.unflatten(2, (4, 1, 32))
    codes = torch.cat([pairs & 15, pairs >> 4], dim=3).flatten(2, 3)  # [rows, blocks, 8 groups, 32]
    if high_bytes:
        codes = codes | (blocks[..., 16:48].unsqueeze(2) >> _shifts(1)[:, None] & 1) << 4
    packed = _packed(codes.flatten(1), described, scales)
    both = (supers[..., index].contiguous() for index in range(2))
    return GgufWeight(kind, *packed, minima, *both)


def _shifts(bits: int) -> Tensor:
    """Of the fields of `bits` bits of a byte."""
    return torch.arange(0, 8, bits, dtype=torch.uint8)


def _float16(halves: Tensor) -> Tensor:
    """Bytes [..., 2 n] as n numbers."""
    return halves.contiguous().view(torch.float16)


def _packed(codes: Tensor, described: BlockFormat, scales: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """`codes`, `scales` and `high` of codes uint8 [outputs, inputs]."""
    pairs = codes & 15
    words = (pairs[:, ::2] | pairs[:, 1::2] << 4).contiguous().view(torch.int32)
    if described.bits == 4:
        return words, scales, None
    above, bits = codes >> 4, described.bits - 4
    held = sum(above[:, index::OCTET].int() << bits * index for index in range(OCTET))
    assert isinstance(held, Tensor)
    return words, scales, held.to(torch.uint8 if bits == 1 else torch.int16)
