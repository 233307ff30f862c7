"""Codes of consecutive layers: on the device, or in part on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.planner.axes.offload import HostPart
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.offload.host_memory import HostMemory, split_bytes
from ridgeplan.runtime.kv.offload.window import Window

LOWER = ("key_lower", "value_lower")


@dataclass(frozen=True, eq=False)
class CodedLayers:
    """codes: of `layers` layers, concatenated along the batch; tensors on the host are seen from the device. planes:
    the same groups by token, if drafts need them. on_host: names of the tensors of `codes` that lie on the host.
    window: groups that stay on the device for drafts, where there are any and all codes lie on the host.
    """

    config: KVCacheConfig
    layers: int
    codes: QuantizedKV
    planes: DraftPlanes | None = None
    on_host: tuple[str, ...] = ()
    window: Window | None = None

    @classmethod
    def on_device(
        cls, model: ModelShape, config: KVCacheConfig, layers: int, tokens: int, device: torch.device
    ) -> CodedLayers:
        """Zero-filled codes of `layers` layers for rows of up to `tokens` tokens."""
        codes = QuantizedKV.allocate(*_sizes(model, config, layers, tokens), device, lower=config.buffered)
        return cls(config, layers, codes, DraftPlanes.allocate(codes) if config.draft_planes else None)

    @classmethod
    def offloaded(cls, model: ModelShape, config: KVCacheConfig, tokens: int, device: torch.device) -> CodedLayers:
        """One layer, of which `config.host_part` lies on the host. Raises WorkloadError where the host lacks memory."""
        sizes, lower_only = _sizes(model, config, 1, tokens), config.host_part is HostPart.LOWER
        template = QuantizedKV.allocate(*sizes, "meta", lower=True)
        names = LOWER if lower_only else tuple(item.name for item in fields(template))
        shapes = [(part.shape, part.dtype) for part in (getattr(template, name) for name in names)]
        memory = HostMemory.allocate(split_bytes(shapes), device)
        held = dict(zip(names, memory.split(shapes), strict=True))
        if not lower_only:
            window = Window.allocate(model, config, device) if config.keeps_window else None
            return cls(config, 1, QuantizedKV(**held), None, names, window)
        codes = replace(QuantizedKV.allocate(*sizes, device, lower=False), **held)
        return cls(config, 1, codes, DraftPlanes.allocate(codes) if config.draft_planes else None, names)

    @property
    def bytes(self) -> int:
        """Storage on the device."""
        held = sum(x.bytes for x in (self.codes, self.planes, self.window) if x)
        return held - sum(part.nbytes for part in self.host_parts)

    @property
    def host_parts(self) -> list[Tensor]:
        """The tensors that lie on the host."""
        return [getattr(self.codes, name) for name in self.on_host]

    def rows(self, layer: int, first: int, count: int) -> slice:
        """Where `count` rows of a layer are."""
        start = layer * self.config.batch + first
        return slice(start, start + count)

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Quantizes whole groups of a row's prompt, [kv_heads, tokens, head_dim], from its first token on."""
        own, first = self.rows(layer, row, 1), torch.zeros(1, dtype=torch.int32, device=keys.device)
        codes = self.codes.rows(own)
        quantize(keys[None], values[None], codes, first)
        if self.planes:
            pack_draft_planes(codes, self.planes.rows(own), first, keys.shape[1] // self.config.group)
        if self.window:
            self.window.store_prompt(row, keys, values)

    def flush(self, keys: Tensor, values: Tensor, index: Tensor, first_slot: Tensor, mask: Tensor) -> None:
        """Quantizes one group of the rows in `mask`, bool [batch], in all of these layers at once.

        keys, values: [layers, batch, kv_heads, slots, head_dim]. index, first_slot: int32 [batch], of the group.
        """
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        rows_index, rows_slot, rows_mask = (x.repeat(self.layers) for x in (index, first_slot, mask))
        quantize(keys, values, self.codes, rows_index, rows_mask, first_slot=rows_slot)
        if self.planes:
            pack_draft_planes(self.codes, self.planes, rows_index, mask=rows_mask)
        if self.window:
            self.window.flush(keys, values, index, first_slot, mask)

    def staged(self, layer: int, rows: int, parts: Sequence[Tensor]) -> QuantizedKV:
        """Codes of a layer's first rows, with what lies on the host replaced by its copies `parts`."""
        copies = {name: part[:rows] for name, part in zip(self.on_host, parts, strict=True)}
        return replace(self.codes.rows(self.rows(layer, 0, rows)), **copies)


def _sizes(model: ModelShape, config: KVCacheConfig, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
    """rows, kv_heads, groups, group and head_dim of a QuantizedKV."""
    return layers * config.batch, model.kv_heads, config.groups(tokens), config.group, model.head_dim
