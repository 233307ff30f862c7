"""What sparse drafts read beside a layer's codes: 2-bit keys to choose tokens by, and values stored token by token.

    key_two_bit  uint8 [B, Hkv, groups, G, D/4]   channel j in bits 0-1, j + D/4 in 2-3, j + D/2 in 4-5, j + 3D/4 in 6-7
    value_rows   uint8 [B, Hkv, groups, G, D/2]   channel j low nibble, channel j + D/2 high

A 2-bit key is the two upper bits of its upper code, so it needs no scale of its own: with code c in 0..3, it stands for
scale * (4 c + 1.5) + minimum, the middle of the four upper codes that share it. `QuantizedKV` stores values
transposed; read by token, each would touch all of its group's sectors, so chosen tokens are read from value_rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import token_major


@dataclass(frozen=True, eq=False)
class DraftPlanes:
    """2-bit keys and token-major upper codes of values of one layer (shapes above); scales are those of the codes."""

    key_two_bit: Tensor
    value_rows: Tensor

    @classmethod
    def allocate(cls, codes: QuantizedKV) -> DraftPlanes:
        """Zero-filled planes for all groups of `codes`. Raises ValueError for a head_dim that 4 does not divide."""
        if codes.head_dim % 4:
            raise ValueError(f"four 2-bit keys share a byte; head_dim {codes.head_dim} is not a multiple of 4")
        tokens = codes.key_upper.shape[:4]

        def plane(columns: int) -> Tensor:
            return torch.zeros(*tokens, columns, dtype=torch.uint8, device=codes.key_upper.device)

        return cls(plane(codes.head_dim // 4), plane(codes.head_dim // 2))

    def rows(self, rows: slice) -> DraftPlanes:
        """A view of some rows of the batch."""
        return DraftPlanes(self.key_two_bit[rows], self.value_rows[rows])

    @property
    def bytes(self) -> int:
        """Storage of both planes, in bytes."""
        return self.key_two_bit.nbytes + self.value_rows.nbytes


def pack_draft_planes(
    codes: QuantizedKV,
    out: DraftPlanes,
    group_index: Tensor,
    groups: int = 1,
    mask: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> None:
    """Writes `groups` groups of each row from group_index on (int32 [B], on the device) from the codes' upper planes.

    Called after `quantize` has written these groups. mask: bool [B] or None; rows that are False stay as they are.
    Raises ValueError for a wrong dtype or shape of group_index or mask.
    """
    require_rows(codes.batch, torch.int32, codes.key_upper.device, group_index=group_index)
    require_rows(codes.batch, torch.bool, codes.key_upper.device, mask=mask)
    if not uses_gpu_kernel(backend, codes.key_upper):
        pack_draft_planes_reference(codes, out, group_index, groups, mask)
        return
    from ridgeplan.kernels.selection.triton import pack_draft_planes_triton

    pack_draft_planes_triton(codes, (out.key_two_bit, out.value_rows), group_index, groups, mask)


def pack_draft_planes_reference(
    codes: QuantizedKV, out: DraftPlanes, group_index: Tensor, groups: int, mask: Tensor | None
) -> None:
    """The same in plain torch."""
    rows = torch.arange(codes.batch, device=group_index.device) if mask is None else mask.nonzero().squeeze(1)
    written = group_index.long()[rows, None] + torch.arange(groups, device=group_index.device)
    at = (rows[:, None], slice(None), written)
    out.key_two_bit[at] = two_bit_of(codes.key_upper[at])
    out.value_rows[at] = token_major(codes.value_upper[at])


def two_bit_of(key_upper: Tensor) -> Tensor:
    """The 2-bit keys [..., D/4] of upper codes [..., D/2]."""
    first, second = key_upper.chunk(2, dim=-1)  # low nibbles: quarters 0 and 1 of the channels, high: 2 and 3
    low = (first >> 2) & 3 | (second & 12)
    high = (first >> 2) & 48 | (second & 192)
    return low | high


def unpack_two_bit(key_two_bit: Tensor) -> Tensor:
    """Codes 0..3 [..., D] as float32 of packed ones [..., D/4]."""
    return torch.cat([(key_two_bit >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).float()


SAMPLES = 8  # groups of a row that say how much each query head weighs


@dataclass(frozen=True, eq=False)
class TwoBitKeys:
    """codes: uint8 [B, Hkv, groups, G, D/4], see `DraftPlanes.key_two_bit`. scale, minimum: float16 [B, Hkv, groups,
    D], those of the keys' upper codes.

    Raises ValueError for shapes that disagree.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor

    def __post_init__(self) -> None:
        if self.scale.shape != self.minimum.shape or self.codes.shape[:3] != self.scale.shape[:3]:
            raise ValueError(f"2-bit keys of {list(self.codes.shape)} do not fit scales {list(self.scale.shape)}")

    @classmethod
    def of(cls, codes: QuantizedKV, planes: DraftPlanes) -> TwoBitKeys:
        """Views of a layer's codes and planes."""
        return cls(planes.key_two_bit, codes.key_scale, codes.key_min)

    @classmethod
    def allocate(
        cls, batch: int, kv_heads: int, groups: int, group: int, head_dim: int, device: torch.device
    ) -> TwoBitKeys:
        """Zero-filled keys of `groups` groups of `group` tokens per row."""
        codes = torch.zeros(batch, kv_heads, groups, group, head_dim // 4, dtype=torch.uint8, device=device)
        pairs = [torch.zeros(batch, kv_heads, groups, head_dim, dtype=torch.float16, device=device) for _ in range(2)]
        return cls(codes, *pairs)

    def rows(self, rows: slice) -> TwoBitKeys:
        """A view of some rows of the batch."""
        return TwoBitKeys(self.codes[rows], self.scale[rows], self.minimum[rows])

    @property
    def batch(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Capacity of a row, in groups."""
        return self.codes.shape[2]

    @property
    def group(self) -> int:
        """Tokens per group."""
        return self.codes.shape[3]

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.scale.shape[3]

    @property
    def bytes(self) -> int:
        """Storage."""
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes
