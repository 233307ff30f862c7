"""Streaming of offloaded layers: codes are copied to the device ahead of attention; recent tokens stay there.

Two or more slots take turns: while attention reads one, the next layers are copied into the others on a side stream.
A CUDA graph can capture all of this. The copies read host memory by address and their lengths from the device, so one
graph copies what rows hold at its replay, ragged or not, whatever size the cache was allocated for. Copies by the DMA
engines are a tenth faster (55 against 50 GB/s), but their sizes are constants of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.offload import copy_prefix
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.offload.side_stream import SideStream


@dataclass(frozen=True, eq=False)
class Window:
    """The first and the latest groups of one layer on the device: StreamingLLM's selection, by group.

    codes: [batch, kv_heads, window_groups, ...]. Group 0 of the text has place 0; later groups take turns in the other
    places. Attention does not depend on their order.
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
        """The place of each group of the text; same shape and dtype as `group`."""
        later = max(self.codes.groups - 1, 1)
        return torch.where(group < self.codes.groups, group, (group - 1) % later + self.codes.groups - later)

    def store_prompt(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Quantizes the first and the latest whole groups of a row's prompt, [kv_heads, tokens, head_dim]."""
        size, codes = self.codes.group, self.codes.rows(slice(row, row + 1))
        for group in self._kept(keys.shape[1] // size):
            tokens = slice(group * size, (group + 1) * size)
            place = self.place(torch.tensor([group], dtype=torch.int32)).to(keys.device)
            quantize(keys[None, :, tokens], values[None, :, tokens], codes, place)

    def take(self, codes: QuantizedKV, row: int, groups: int) -> None:
        """Copies the first and the latest of a row's `groups` groups from its codes."""
        held = torch.tensor(self._kept(groups), dtype=torch.int64, device=codes.key_upper.device)
        for item in fields(QuantizedKV):
            mine = getattr(self.codes, item.name)
            if mine is not None:
                mine[row, :, self.place(held)] = getattr(codes, item.name)[row, :, held]

    def _kept(self, groups: int) -> list[int]:
        """The groups that the window holds of a row with `groups` groups."""
        return [*range(min(1, groups)), *range(max(1, groups - self.codes.groups + 1), groups)]

    def flush(self, keys: Tensor, values: Tensor, index: Tensor, first_slot: Tensor, mask: Tensor) -> None:
        """Adds one group of each row in `mask`; arguments as for `CodedLayers.flush`, for one layer."""
        quantize(keys, values, self.codes, self.place(index), mask, first_slot=first_slot)


Parts = Sequence[Tensor]  # of one layer, each [batch, kv_heads, entries, ...]


class LayerStream:
    """Copies layers from the host into slots on the device, in order, once per pass of the target.

    layers: the parts of each layer on the host. A pass fetches each layer in turn and releases it once its attention
    has been launched. Copies may `begin` long before the pass, for example while drafts run.
    """

    def __init__(self, layers: Sequence[Parts], slots: int, device: torch.device, spare: int = 0) -> None:
        """slots: number of layers on the device at once, one more than are copied ahead. spare: extra entries per row
        and head behind the copied ones, where other tokens can be appended.
        """
        self.layers = layers
        self.slots = [[_with_spare(part, spare, device) for part in layers[0]] for _ in range(slots)]
        self._side = SideStream(device)
        self._arrived: dict[int, Any] = {}
        self._entries: Tensor | None = None
        self._copied = 0

    @property
    def bytes(self) -> int:
        """Device memory of the slots."""
        return sum(part.nbytes for slot in self.slots for part in slot)

    def reset(self) -> None:
        """Forgets a pass that was not finished."""
        self._entries, self._copied = None, 0
        self._arrived.clear()

    def begin(self, entries: Tensor) -> None:
        """Starts copies of the first layers; entries: int32 [batch] that rows hold on the host."""
        self._entries, self._copied = entries, 0
        for _ in range(min(len(self.slots), len(self.layers))):
            self._copy_next()

    @property
    def begun(self) -> bool:
        """Whether copies have begun for a pass that has not ended."""
        return self._entries is not None

    def fetch(self, layer: int) -> Parts:
        """The parts of a layer on the device. Whatever is launched from now on reads them after the copy."""
        self._side.wait_event(self._arrived.pop(layer))
        return self.slots[layer % len(self.slots)]

    def release(self, layer: int) -> None:
        """Frees the slot of a layer, whose reads have been launched, for another layer."""
        if layer == len(self.layers) - 1:
            self._entries = None
        elif self._copied < len(self.layers):
            self._copy_next()

    def _copy_next(self) -> None:
        """Copies the next layer, after everything launched so far."""
        assert self._entries is not None, "a pass has begun"
        layer, self._copied = self._copied, self._copied + 1
        with self._side.after_current():
            for part, slot in zip(self.layers[layer], self.slots[layer % len(self.slots)], strict=True):
                copy_prefix(part, slot, self._entries)
            self._arrived[layer] = self._side.record_event()


def _with_spare(part: Tensor, spare: int, device: torch.device) -> Tensor:
    batch, heads, entries, *rest = part.shape
    return torch.zeros(batch, heads, entries + spare, *rest, dtype=part.dtype, device=device)
