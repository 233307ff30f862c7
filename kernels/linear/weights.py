"""Quantized weights in the order of the tensor cores' operands: 4-bit codes, and 8 bits as two planes of 4.

Outputs are split into tiles of 16, zero-padded if needed, and each tile into K tiles of one group of inputs. A K tile
holds the operands of one mma.m16n8k16 after another, then the group's scales:

    codes  [chunk, g 8, c 4, piece, step 2, half 2, slot 2] bytes   row g in the low nibble, row g + 8 in the high one
    pairs  [g 8, row half 2] of (scale, zero) in bfloat16

A chunk is 64 inputs (32 in groups of 32), in the order [piece, c 4, step 2, slot 2, half 2]. So lane 4 g + c reads 16
contiguous bytes of codes, and each 32-bit word of them gives one step's four operand registers by shifts of 0, 4, 8
and 12 bits under one mask. Of x it reads, for each piece, the 16 bytes of 8 adjacent inputs.

Pairs are bfloat16, so they never overflow. Rounding them costs less than 1/30 of a step if codes are chosen for the
rounded pair; rounding the codes costs 0.29 steps.

Both planes are whole 4-bit weights, and the weight is their sum. What codes they hold is up to the quantizer:

    plain         the upper and lower halves of one 8-bit code (`Int8Weight.pack`)
    hierarchical  a 4-bit weight that serves drafts, and what it lacks, with a scale of its own

Hierarchical codes are QuantSpec's for keys and values (section 4.2), here for weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.execution import QUANTIZATION_GROUPS, TILE_OUTPUTS

CHUNK = 64  # inputs that a warp processes at once
PAIR_BYTES = 4 * TILE_OUTPUTS  # per K tile: scale and zero of each output


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """w = (code - 8) * scale + zero, one bfloat16 scale and zero per row and `group` inputs.

    packed: uint8 [output tiles, inputs / group, 8 * group + 64], in this module's order. Storage is
    0.5 + 4 / group bytes per parameter, of `outputs` rounded up to a multiple of 16.
    """

    packed: Tensor
    group: int
    inputs: int
    outputs: int

    def __post_init__(self) -> None:
        """Raises ValueError for another `packed` than kernels read by its address."""
        tiles = -(-self.outputs // TILE_OUTPUTS)
        shape = tiles, self.inputs // self.group, 8 * self.group + PAIR_BYTES
        if self.inputs % self.group or self.packed.shape != shape or self.packed.dtype != torch.uint8:
            given, size = f"{self.packed.dtype} {list(self.packed.shape)}", f"{self.outputs} x {self.inputs}"
            raise ValueError(f"packed is {given} for {size} in groups of {self.group}; allowed: uint8 {list(shape)}")
        if not self.packed.is_contiguous():
            raise ValueError(f"packed has strides {self.packed.stride()}; allowed: contiguous")

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Int4Weight:
        """codes: [outputs, inputs] integers of 0..15; scale, zero: [outputs, inputs / group], rounded to bfloat16.

        Raises ValueError for groups of other than 32, 64, 128 or 256 inputs, for shapes that disagree, and for codes
        out of range.
        """
        _require_codes(codes, 16)
        outputs, inputs = codes.shape
        if scale.shape != zero.shape or scale.shape[0] != outputs:
            raise ValueError(f"scale {list(scale.shape)}, zero {list(zero.shape)} do not fit codes {[outputs, inputs]}")
        group = inputs // max(1, scale.shape[1])
        if group not in QUANTIZATION_GROUPS or group * scale.shape[1] != inputs:
            allowed = ", ".join(map(str, QUANTIZATION_GROUPS))
            raise ValueError(f"{inputs} inputs with {scale.shape[1]} scales a row; allowed are groups of {allowed}")
        packed = torch.cat([_code_bytes(codes, group), _pair_bytes(scale, zero)], dim=2)
        return cls(packed, group, inputs, outputs)

    @property
    def planes(self) -> tuple[Int4Weight, ...]:
        """What a product reads: itself, or both planes of an 8-bit weight."""
        return (self,)

    def unpack(self) -> Tensor:
        """Codes, uint8 [outputs, inputs]."""
        chunk = min(self.group, CHUNK)
        groups = self.inputs // self.group
        lanes = self.packed[:, :, :-PAIR_BYTES].reshape(-1, groups, self.group // chunk, 8, 4, chunk // 32, 2, 2, 2)
        nibbles = torch.stack([lanes & 15, lanes >> 4], dim=1)
        # [tile, row half, group, chunk, g, c, piece, step, half, slot] to the order of rows and inputs
        ordered = nibbles.permute(0, 1, 4, 2, 3, 6, 5, 7, 9, 8)
        return ordered.reshape(-1, self.inputs)[: self.outputs]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Scale and zero, bfloat16 [outputs, inputs / group]."""
        values = self.packed[:, :, -PAIR_BYTES:].contiguous().view(torch.bfloat16)
        ordered = values.unflatten(2, (8, 2, 2)).permute(4, 0, 3, 2, 1)
        scale, zero = ordered.reshape(2, -1, self.inputs // self.group)[:, : self.outputs]
        return scale, zero

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [outputs, inputs], computed in float32."""
        scale, zero = (pair.float().unsqueeze(2) for pair in self.pairs())
        codes = self.unpack().unflatten(1, (-1, self.group))
        return ((codes.float() - 8) * scale + zero).flatten(1).to(dtype)

    @property
    def bytes(self) -> int:
        """Storage of codes, scales and zeros."""
        return self.packed.nbytes


def _require_codes(codes: Tensor, levels: int) -> None:
    low, high = (int(bound) for bound in codes.aminmax())
    if low < 0 or high >= levels:
        raise ValueError(f"codes are {low} to {high}; allowed: 0 to {levels - 1}")


def _code_bytes(codes: Tensor, group: int) -> Tensor:
    """Reorders [outputs, inputs] to [output tiles, groups, 8 * group] bytes."""
    chunk = min(group, CHUNK)
    narrow = functional.pad(codes.to(torch.uint8), (0, 0, 0, -codes.shape[0] % TILE_OUTPUTS))
    tiles = narrow.view(-1, 2, 8, codes.shape[1] // chunk, chunk // 32, 4, 2, 2, 2)
    # [tile, g, chunk, piece, c, step, slot, half] to the order of the module's docstring
    both = (tiles[:, 0] | tiles[:, 1] << 4).permute(0, 2, 1, 4, 3, 5, 7, 6)
    return both.reshape(len(tiles), -1, 8 * group)


def _pair_bytes(scale: Tensor, zero: Tensor) -> Tensor:
    """Reorders two [outputs, groups] to [output tiles, groups, 64] bytes."""
    pairs = torch.stack([scale, zero], dim=2).bfloat16()
    tiles = functional.pad(pairs, (0, 0, 0, 0, 0, -len(pairs) % TILE_OUTPUTS)).unflatten(0, (-1, 2, 8))
    return tiles.permute(0, 3, 2, 1, 4).flatten(2).contiguous().view(torch.uint8)


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """w = upper + lower, of the same shape and group. Storage is 1 + 8 / group bytes per parameter."""

    upper: Int4Weight
    lower: Int4Weight

    def __post_init__(self) -> None:
        """Raises ValueError for planes of different shapes, groups or devices."""
        planes = self.upper, self.lower
        upper, lower = ((plane.outputs, plane.inputs, plane.group, plane.packed.device) for plane in planes)
        if upper != lower:
            raise ValueError(f"planes of (outputs, inputs, group, device) {upper} and {lower}; allowed: equal ones")

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Int8Weight:
        """The plain weight w = (code - 128) * scale + zero; as `Int4Weight.pack`, with codes of 0..255."""
        _require_codes(codes, 256)
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


MXFP4_GROUP = 32  # inputs per scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of 4 bits; the highest bit is their sign


@dataclass(frozen=True, eq=False)
class Mxfp4Weight:
    """A weight in MXFP4 (OCP Microscaling Formats, section 5.3): numbers of 4 bits times 2^(scale - 127).

    codes: uint8 [outputs, inputs / 2], the even input in the low nibble; scales: uint8 [outputs, inputs / 32]. This is
    how gpt-oss is published (blocks and scales; `transformers.integrations.mxfp4`).
    """

    codes: Tensor
    scales: Tensor

    @property
    def inputs(self) -> int:
        """Columns of the weight."""
        return 2 * self.codes.shape[1]

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @cached_property
    def max_scale(self) -> int:
        """The largest byte of the scales; its first use waits for the device."""
        return int(self.scales.max())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [outputs, inputs], exact in bfloat16."""
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=self.codes.device)
        both = torch.stack([self.codes & 15, self.codes >> 4], dim=2).flatten(1)
        exponents = self.scales.int().unsqueeze(2) - 127
        return torch.ldexp(numbers[both.int()].unflatten(1, (-1, MXFP4_GROUP)), exponents).flatten(1).to(dtype)

    @property
    def bytes(self) -> int:
        """Storage of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


Plane = tuple[Tensor, Tensor, Tensor]  # codes, scale and zero


def split_codes(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Plane, Plane]:
    """The planes whose sum is (code - 128) * scale + zero, with code = 16 * upper + lower.

    Upper codes are centred at 8 and so stand for code - 128, lower ones for code - 8, which its zero adds back. Both
    scales and that zero are the scale times a power of two, so they are as exact in bfloat16 as the scale is.
    """
    codes = codes.to(torch.uint8)
    return (codes >> 4, 16 * scale, zero), (codes & 15, scale, 8 * scale)
