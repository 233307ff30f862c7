"""The 2-bit keys of one layer with their scales: all that a choice by them reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes

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
