"""Codes of a layer stored token by token, so that single tokens can be loaded from the host.

A row holds one token of one KV head: of its key the upper codes, then the lower ones; of its value the same, then
scale and minimum in float16. Channel j is in the low nibble of a byte, channel j + D/2 in the high one. Rows end at a
multiple of 16 bytes. Scales and minima of keys belong to a channel and a group, so they are kept apart, for all groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.kv_cache.layout import Planes, QuantizedKV
from ridgeplan.roofline.execution import token_row_bytes

WORD_BYTES = 8


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of a layer in slots. keys, values: int64 [B, Hkv, slots, words], contiguous. key_scale, key_min: float16
    [B, Hkv, groups, D], contiguous, of the groups that the tokens belong to, which have `group` tokens.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    key_min: Tensor
    group: int

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """Slots of a row of the batch."""
        return self.keys.shape[2]

    @property
    def groups(self) -> int:
        """Capacity of a row of the batch, in groups."""
        return self.key_scale.shape[2]

    @property
    def planes(self) -> int:
        """Upper and lower codes."""
        return 2

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.key_scale.shape[3]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.keys.shape[3] * WORD_BYTES

    @property
    def key_planes(self) -> Planes:
        """Upper and lower codes by row, scale and minimum by group."""
        codes = self.keys.view(torch.uint8)
        return codes, codes[..., self.head_dim // 2 :], self.key_scale, self.key_min

    @property
    def value_planes(self) -> Planes:
        """Upper and lower codes, scale and minimum by row."""
        codes, pairs = self.values.view(torch.uint8), self.values.view(torch.float16)[..., self.head_dim // 2 :]
        return codes, codes[..., self.head_dim // 2 :], pairs, pairs[..., 1:]


def pack_token_rows(codes: QuantizedKV) -> tuple[Tensor, Tensor]:
    """Rows of keys and values, int64 [B, Hkv, groups * G, words], of codes with both planes."""
    assert codes.key_lower is not None and codes.value_lower is not None, "both planes are stored"
    values = torch.cat([token_major(codes.value_upper), token_major(codes.value_lower)], dim=-1)
    pairs = torch.stack([codes.value_scale, codes.value_min], dim=-1).view(torch.uint8)
    keys, values = torch.cat([codes.key_upper, codes.key_lower], dim=-1), torch.cat([values, pairs], dim=-1)
    width = token_row_bytes(codes.head_dim)
    padded = (functional.pad(rows.flatten(2, 3), (0, width - rows.shape[-1])) for rows in (keys, values))
    packed_keys, packed_values = (rows.contiguous().view(torch.int64) for rows in padded)
    return packed_keys, packed_values


def token_major(value_upper: Tensor) -> Tensor:
    """Transposed codes of values [..., D, G/2] by token: [..., G, D/2]."""
    tokens = torch.cat([value_upper & 15, value_upper >> 4], dim=-1).mT
    first, second = tokens.chunk(2, dim=-1)
    return first | (second << 4)
