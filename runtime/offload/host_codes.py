"""INT8 codes of offloaded layers, token by token on the host, of which a target's steps load what they choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import WORD_BYTES, TokenRows, pack_token_rows
from ridgeplan.kernels.offload import flush_codes_to_host
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import token_row_bytes
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.offload.slot_store import SlotStore, SlotTables, pair_on_host

PACKED_GROUPS = 32  # groups of a row that are packed at once


@dataclass(frozen=True, eq=False)
class HostCodes(SlotStore):
    """Codes of layers whose recent tokens are in the cache's buffer.

    keys, values: slots on the device, [layers, batch, kv_heads, slots, words]. on_host: all old tokens. Both hold
    `TokenRows`. key_scale, key_min: [layers * batch, kv_heads, groups, head_dim], on the device. staged: one group of
    every row and layer, while it is flushed.
    """

    key_scale: Tensor
    key_min: Tensor
    staged: QuantizedKV

    @classmethod
    def allocate(
        cls, model: ModelShape, config: KVCacheConfig, layers: int, tokens: int, device: torch.device
    ) -> HostCodes:
        """Zero-filled storage of `layers` layers for rows of up to `tokens` tokens. Raises WorkloadError."""
        rows, groups, words = (
            layers * config.batch,
            config.groups(tokens),
            token_row_bytes(model.head_dim) // WORD_BYTES,
        )
        sizes = (layers, config.batch, model.kv_heads, config.window_slots, words)
        keys, values = (torch.zeros(sizes, dtype=torch.int64, device=device) for _ in "kv")
        shape = torch.Size((config.batch, model.kv_heads, groups * config.group, words))
        held = tuple(pair_on_host(shape, torch.int64, device, by_token=True) for _ in range(layers))
        pairs = (rows, model.kv_heads, groups, model.head_dim)
        scale, minimum = (torch.zeros(pairs, dtype=torch.float16, device=device) for _ in "sm")
        staged = QuantizedKV.allocate(rows, model.kv_heads, 1, config.group, model.head_dim, device, lower=True)
        return cls(config, keys, values, held, SlotTables(), model.kv_layers - layers, scale, minimum, staged)

    @property
    def bytes(self) -> int:
        """Storage on the device."""
        held = sum(part.nbytes for part in (self.keys, self.values, self.key_scale, self.key_min))
        return held + self.staged.bytes + self.tables.bytes

    def from_layer(self, first: int) -> Self:
        """The same layers without those before the model's layer `first`."""
        skipped = first - self.first
        rows = slice(skipped * self.config.batch, None)
        return replace(
            self,
            keys=self.keys[skipped:],
            values=self.values[skipped:],
            on_host=self.on_host[skipped:],
            first=first,
            key_scale=self.key_scale[rows],
            key_min=self.key_min[rows],
            staged=self.staged.rows(rows),
        )

    def codes(self, layer: int, rows: int) -> TokenRows:
        """What the slots of a layer's first rows hold."""
        places = slice(layer * self.config.batch, layer * self.config.batch + rows)
        slots = self.keys[layer, :rows], self.values[layer, :rows]
        return TokenRows(*slots, self.key_scale[places], self.key_min[places], self.config.group)

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Quantizes the whole groups of a row's prompt, [kv_heads, tokens, head_dim], from its first token on."""
        group, (kv_heads, tokens, head_dim) = self.config.group, keys.shape
        codes = QuantizedKV.allocate(1, kv_heads, PACKED_GROUPS, group, head_dim, keys.device, lower=True)
        first = torch.zeros(1, dtype=torch.int32, device=keys.device)
        for start in range(0, tokens // group, PACKED_GROUPS):
            count = min(PACKED_GROUPS, tokens // group - start)
            part = slice(start * group, (start + count) * group)
            quantize(keys[None, :, part], values[None, :, part], codes, first)
            self._store(layer, row, start, _groups(codes, 0, count))

    def take(self, layer: int, row: int, codes: QuantizedKV, groups: int) -> None:
        """Stores the first `groups` groups of a row's codes, those of one row."""
        for start in range(0, groups, PACKED_GROUPS):
            self._store(layer, row, start, _groups(codes, start, min(start + PACKED_GROUPS, groups)))

    def _store(self, layer: int, row: int, first: int, codes: QuantizedKV) -> None:
        tokens, place = (
            slice(first * codes.group, (first + codes.groups) * codes.group),
            layer * self.config.batch + row,
        )
        for held, rows in zip(self.on_host[layer], pack_token_rows(codes), strict=True):
            held[row, :, tokens] = rows[0]
        for held, pairs in zip((self.key_scale, self.key_min), (codes.key_scale, codes.key_min), strict=True):
            held[place, :, first : first + codes.groups] = pairs[0]

    def flush(self, keys: Tensor, values: Tensor, before: Tensor, crossed: Tensor) -> None:
        """Moves one group of each row in `crossed`, bool [batch], to the host, in all layers.

        keys, values: the buffers of these layers, [layers, batch, kv_heads, slots, head_dim]. before: int32 [batch],
        old tokens until now.
        """
        group, batch = self.config.group, self.config.batch
        first = torch.zeros(self.layers * batch, dtype=torch.int32, device=before.device)
        mask, index = crossed.repeat(self.layers), (before // group).repeat(self.layers)
        quantize(keys.flatten(0, 1), values.flatten(0, 1), self.staged, first, mask, first_slot=first)
        for layer, on_host in enumerate(self.on_host):
            rows = slice(layer * batch, (layer + 1) * batch)
            flush_codes_to_host(self.staged.rows(rows), on_host, before, crossed)
        place = torch.arange(len(index), device=index.device), index.clamp_max(self.key_scale.shape[2] - 1).long()
        for pairs, new in ((self.key_scale, self.staged.key_scale), (self.key_min, self.staged.key_min)):
            at = (place[0], slice(None), place[1])
            pairs[at] = torch.where(mask[:, None, None], new[:, :, 0], pairs[at])


def _groups(codes: QuantizedKV, first: int, last: int) -> QuantizedKV:
    """Some groups of codes."""
    parts = {name: getattr(codes, name)[:, :, first:last].contiguous() for name in vars(codes)}
    return QuantizedKV(**parts)
