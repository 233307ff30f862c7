"""A linear layer's 4-bit weight, in the order of the tensor cores' operands.

Outputs are split into tiles of 16, zero-padded if needed, and each tile into K tiles of one group of inputs. A K tile
holds the operands of one mma.m16n8k16 after another, then the group's scales:

    codes  [chunk, g 8, c 4, piece, step 2, half 2, slot 2] bytes   row g in the low nibble, row g + 8 in the high one
    pairs  [g 8, row half 2] of (scale, zero) in bfloat16

A chunk is 64 inputs (32 in groups of 32), in the order [piece, c 4, step 2, slot 2, half 2]. So lane 4 g + c reads 16
contiguous bytes of codes, and each 32-bit word of them gives one step's four operand registers by shifts of 0, 4, 8
and 12 bits under one mask. Of x it reads, for each piece, the 16 bytes of 8 adjacent inputs.

Pairs are bfloat16, so they never overflow. Rounding them costs less than 1/30 of a step if codes are chosen for the
rounded pair; rounding the codes costs 0.29 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.execution import TILE_OUTPUTS
from ridgeplan.roofline.execution import QUANTIZATION_GROUPS

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

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Int4Weight:
        """codes: [outputs, inputs] integers of 0..15; scale, zero: [outputs, inputs / group], rounded to bfloat16.

        Raises ValueError for groups of other than 32, 64, 128 or 256 inputs, and for shapes that disagree.
        """
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
