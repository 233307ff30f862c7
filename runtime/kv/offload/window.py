"""What drafts read of a layer whose codes lie on the host: its first group and its latest ones."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.config import KVCacheConfig


@dataclass(frozen=True, eq=False)
class Window:
    """codes: [batch, kv_heads, window_groups, ...] of one layer, on the device (StreamingLLM's choice, by group).

    Group 0 of the text has place 0; later ones take turns in the others. Attention does not depend on their order.
    """

    codes: QuantizedKV

    @classmethod
    def allocate(cls, model: ModelShape, config: KVCacheConfig, device: torch.device) -> Window:
        """An empty window."""
        sizes = config.batch, model.kv_heads, config.window_groups, config.group, model.head_dim
        return cls(QuantizedKV.allocate(*sizes, device, lower=not config.drafts_read_upper))

    @property
    def bytes(self) -> int:
        """Device memory."""
        return self.codes.bytes

    def place(self, group: Tensor) -> Tensor:
        """Where groups of the text lie, of their number's shape and dtype."""
        later = max(self.codes.groups - 1, 1)
        return torch.where(group < self.codes.groups, group, (group - 1) % later + self.codes.groups - later)

    def store_prompt(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Takes the first and the latest of a row's whole groups, [kv_heads, tokens, head_dim]."""
        size, codes = self.codes.group, self.codes.rows(slice(row, row + 1))
        for group in self._kept(keys.shape[1] // size):
            tokens = slice(group * size, (group + 1) * size)
            place = self.place(torch.tensor([group], dtype=torch.int32)).to(keys.device)
            quantize(keys[None, :, tokens], values[None, :, tokens], codes, place)

    def take(self, codes: QuantizedKV, row: int, groups: int) -> None:
        """Takes the first and the latest of a row's `groups` groups from its codes."""
        held = torch.tensor(self._kept(groups), dtype=torch.int64, device=codes.key_upper.device)
        for item in fields(QuantizedKV):
            mine = getattr(self.codes, item.name)
            if mine is not None:
                mine[row, :, self.place(held)] = getattr(codes, item.name)[row, :, held]

    def _kept(self, groups: int) -> list[int]:
        """Of a row's first `groups` groups, those that the window holds."""
        return [*range(min(1, groups)), *range(max(1, groups - self.codes.groups + 1), groups)]

    def flush(self, keys: Tensor, values: Tensor, index: Tensor, first_slot: Tensor, mask: Tensor) -> None:
        """Takes one more group of the rows in `mask`; arguments as for `CodedLayers.flush`, of one layer."""
        quantize(keys, values, self.codes, self.place(index), mask, first_slot=first_slot)
