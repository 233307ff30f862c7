"""Storage of consecutive layers that hold equally many tokens: full-precision slots, and groups of codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.shift import shift_slots
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.config import KVCacheConfig


@dataclass(frozen=True, eq=False)
class KVStore:
    """keys, values: [layers, batch, kv_heads, slots, head_dim]. codes: of all its layers, concatenated along the batch;
    None if nothing is quantized. all_planes: the same groups by token, if drafts need them.
    """

    config: KVCacheConfig
    keys: Tensor
    values: Tensor
    all_codes: QuantizedKV | None
    all_planes: DraftPlanes | None = None

    @classmethod
    def allocate(
        cls,
        model: ModelShape,
        config: KVCacheConfig,
        layers: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> KVStore:
        """Zero-filled storage of `layers` layers for rows of up to `tokens` tokens."""
        heads, rows = (model.kv_heads, model.head_dim), layers * config.batch
        sizes = (layers, config.batch, heads[0], config.slots(tokens), heads[1])
        keys, values = (torch.zeros(sizes, dtype=dtype, device=device) for _ in "kv")
        if not config.format.quantized:
            return cls(config, keys, values, None)
        groups = config.groups(tokens)
        codes = QuantizedKV.allocate(rows, heads[0], groups, config.group, heads[1], device, lower=config.buffered)
        return cls(config, keys, values, codes, DraftPlanes.allocate(codes) if config.draft_planes else None)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def bytes(self) -> int:
        """Storage of keys, values, codes and planes."""
        return self.keys.nbytes + self.values.nbytes + sum(x.bytes for x in (self.all_codes, self.all_planes) if x)

    def codes(self, layer: int, first: int, count: int) -> QuantizedKV:
        """Quantized groups of `count` rows of a layer."""
        assert self.all_codes is not None, "this KV format holds no codes"
        return self.all_codes.rows(self._rows(layer, first, count))

    def planes(self, layer: int, first: int, count: int) -> DraftPlanes | None:
        """The same groups by token, if they are kept."""
        return self.all_planes.rows(self._rows(layer, first, count)) if self.all_planes else None

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Stores what a layer keeps of a row's prompt, [kv_heads, tokens, head_dim]."""
        tokens = keys.shape[1]
        whole = self.config.quantized_groups(tokens) * self.config.group
        if whole:
            codes, planes = self.codes(layer, row, 1), self.planes(layer, row, 1)
            first = torch.zeros(1, dtype=torch.int32, device=keys.device)
            quantize(keys[None, :, :whole], values[None, :, :whole], codes, first)
            if planes:
                pack_draft_planes(codes, planes, first, whole // self.config.group)
        start = whole if self.config.buffered else 0
        self.keys[layer, row, :, : tokens - start] = keys[:, start:]
        self.values[layer, row, :, : tokens - start] = values[:, start:]

    def flush(self, before: Tensor, crossed: Tensor) -> None:
        """Quantizes the oldest full-precision group of the rows in `crossed`, bool [batch], of all layers at once.

        before: int32 [batch], tokens that were codes until now.
        """
        assert self.all_codes is not None, "this KV format holds no codes"
        mask = crossed.repeat(self.layers)
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        first_slot = torch.zeros_like(before) if self.config.buffered else before
        index = (before // self.config.group).repeat(self.layers)
        quantize(keys, values, self.all_codes, index, mask, first_slot=first_slot.repeat(self.layers))
        if self.all_planes:
            pack_draft_planes(self.all_codes, self.all_planes, index, mask=mask)
        if self.config.buffered:
            shift_slots(keys, values, self.config.group, mask)

    def _rows(self, layer: int, first: int, count: int) -> slice:
        start = layer * self.config.batch + first
        return slice(start, start + count)
