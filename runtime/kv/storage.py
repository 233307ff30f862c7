"""Storage of keys and values on the device: full precision and codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize, shift_slots
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import HostPart
from ridgeplan.runtime.buffers import HostMemory, split_bytes
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.offload.host_codes import HostCodes
from ridgeplan.runtime.offload.streaming import Window

LOWER = ("key_lower", "value_lower")
LATENT_CHANNELS = 128  # at most, of a head of a latent's codes: what the kernels that quantize take


@dataclass(frozen=True, eq=False)
class CodedLayers:
    """Quantized groups of `layers` layers.

    codes: concatenated along the batch; the device can address tensors that lie on the host. planes: the same groups by
    token, if drafts need them. on_host: names of the tensors of `codes` that lie on the host. window: groups that stay
    on the device for drafts, if drafts read any and all codes lie on the host.
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
        sizes = _sizes(model, config, layers, tokens)
        codes = QuantizedKV.allocate(*sizes, device, lower=config.buffered, values=not model.is_mla)
        return cls(config, layers, codes, DraftPlanes.allocate(codes) if config.draft_planes else None)

    @classmethod
    def offloaded(cls, model: ModelShape, config: KVCacheConfig, tokens: int, device: torch.device) -> CodedLayers:
        """One layer with its `config.host_part` on the host. Raises WorkloadError if the host lacks memory."""
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
        """The places of `count` rows of a layer along the batch dimension."""
        start = layer * self.config.batch + first
        return slice(start, start + count)

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Quantizes whole groups of a row's prompt, [kv_heads, tokens, head_dim], from its first token on."""
        rows, first = self.rows(layer, row, 1), torch.zeros(1, dtype=torch.int32, device=keys.device)
        codes = self.codes.rows(rows)
        quantize(*self._coded_parts(keys[None], values[None]), codes, first)
        if self.planes:
            pack_draft_planes(codes, self.planes.rows(rows), first, keys.shape[1] // self.config.group)
        if self.window:
            self.window.store_prompt(row, keys, values)

    def flush(self, keys: Tensor, values: Tensor, index: Tensor, first_slot: Tensor, mask: Tensor) -> None:
        """Quantizes one group of the rows in `mask`, bool [batch], in all of these layers at once.

        keys, values: [layers, batch, kv_heads, slots, head_dim]. index, first_slot: int32 [batch], of the group.
        """
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        rows_index, rows_slot, rows_mask = (x.repeat(self.layers) for x in (index, first_slot, mask))
        parts = self._coded_parts(keys, values)
        quantize(*parts, self.codes, rows_index, rows_mask, first_slot=rows_slot)
        if self.planes:
            pack_draft_planes(self.codes, self.planes, rows_index, mask=rows_mask)
        if self.window:
            self.window.flush(keys, values, index, first_slot, mask)

    def _coded_parts(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """What becomes codes: keys and values, or latents [rows, 1, tokens, latent] alone, as the codes' heads.

        Latents get a scale per channel and group, as keys do. RMSNorm leaves tokens alike and channels not, so a
        range over tokens is narrower than one over channels, and as sums over a group share its scales, they serve
        scores and values. Rotated keys, whose values spread widely (SnapMLA, arXiv:2602.10718), stay as they are.
        """
        if self.codes.has_values:
            return keys, values
        return keys.squeeze(1).unflatten(-1, (self.codes.kv_heads, -1)).transpose(1, 2), None

    def staged(self, layer: int, rows: int, parts: Sequence[Tensor]) -> QuantizedKV:
        """Codes of a layer's first rows; `parts` replaces the tensors on the host by their copies."""
        copies = {name: part[:rows] for name, part in zip(self.on_host, parts, strict=True)}
        return replace(self.codes.rows(self.rows(layer, 0, rows)), **copies)


def _sizes(model: ModelShape, config: KVCacheConfig, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
    """rows, kv_heads, groups, group and head_dim of a QuantizedKV."""
    heads, channels = model.kv_heads, model.head_dim
    if model.is_mla:
        latent = model.cache_sizes[1]
        channels = math.gcd(latent, LATENT_CHANNELS)
        heads = latent // channels
    return layers * config.batch, heads, config.groups(tokens), config.group, channels


@dataclass(frozen=True, eq=False)
class KVStore:
    """KV of layers whose full-precision part is on the device.

    keys, values: [layers, batch, kv_heads, slots, head_dim]. Under MLA keys are latents of a single head, and values
    are the rotated keys beside them, in the slots of their positions, as these are never codes. coded: codes of all its
    layers, in order; empty if nothing is quantized. Each offloaded layer has its own entry. loaded: the last layers
    instead, if steps load what they choose of their codes.
    """

    config: KVCacheConfig
    keys: Tensor
    values: Tensor
    coded: tuple[CodedLayers, ...] = ()
    loaded: HostCodes | None = None

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
        heads, *widths = model.cache_sizes
        slots = config.slots(tokens), tokens + config.round_slots if model.is_mla else config.slots(tokens)
        keys, values = (
            torch.zeros(layers, config.batch, heads, *sizes, dtype=dtype, device=device)
            for sizes in zip(slots, widths, strict=True)
        )
        if not config.format.quantized:
            return cls(config, keys, values)
        # Full-precision layers on the host are elsewhere (offload/host_store.py).
        on_host = config.host_layers if config.buffered else 0
        resident = layers - on_host
        coded = [CodedLayers.on_device(model, config, resident, tokens, device)] if resident else []
        if on_host and config.target_loads:
            return cls(config, keys, values, tuple(coded), HostCodes.allocate(model, config, on_host, tokens, device))
        coded += [CodedLayers.offloaded(model, config, tokens, device) for _ in range(on_host)]
        return cls(config, keys, values, tuple(coded))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def bytes(self) -> int:
        """Storage on the device of keys, values, codes and planes."""
        loaded_bytes = self.loaded.bytes if self.loaded else 0
        return self.keys.nbytes + self.values.nbytes + sum(coded.bytes for coded in self.coded) + loaded_bytes

    @property
    def _values_leave(self) -> bool:
        """Whether values leave the buffer with the keys: not rotated keys of latents."""
        return not self.coded or self.coded[0].codes.has_values

    @property
    def flushes(self) -> bool:
        """Whether its layers quantize groups that grow old."""
        return self.config.format.quantized

    def drop_oldest(self, crossed: Tensor) -> None:
        """Drops the oldest group of the rows in `crossed`, bool [batch], of all layers."""
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        shift_slots(keys, values, self.config.group, crossed.repeat(self.layers))

    def reset(self) -> None:
        """Forgets what slots hold. The cache's lengths say which tokens are valid."""
        if self.loaded:
            self.loaded.reset()

    def coded_layer(self, layer: int) -> tuple[CodedLayers, int]:
        """The `CodedLayers` with a layer's codes, and the layer's index in it."""
        assert self.coded, "this KV format holds no codes"
        for coded in self.coded:
            if layer < coded.layers:
                break
            layer -= coded.layers
        return coded, layer

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Stores the tokens that a layer keeps of a row's prompt, [kv_heads, tokens, head_dim]."""
        tokens = keys.shape[1]
        quantized = self.config.quantized_groups(tokens) * self.config.group
        near = sum(coded.layers for coded in self.coded)
        if quantized and self.loaded and layer >= near:
            self.loaded.store_prompt(layer - near, row, keys[:, :quantized], values[:, :quantized])
        elif quantized:
            coded, index = self.coded_layer(layer)
            coded.store_prompt(index, row, keys[:, :quantized], values[:, :quantized])
        start = quantized if self.config.buffered else 0
        self.keys[layer, row, :, : tokens - start] = keys[:, start:]
        start = start if self._values_leave else 0
        self.values[layer, row, :, : tokens - start] = values[:, start:]

    def flush(self, before: Tensor, crossed: Tensor) -> None:
        """Quantizes the oldest full-precision group of the rows in `crossed`, bool [batch], of all layers at once.

        before: int32 [batch], tokens that were codes until now.
        """
        assert self.coded or self.loaded, "this KV format holds no codes"
        first_slot = torch.zeros_like(before) if self.config.buffered else before
        index, start = before // self.config.group, 0
        for coded in self.coded:
            layers = slice(start, start + coded.layers)
            coded.flush(self.keys[layers], self.values[layers], index, first_slot, crossed)
            start += coded.layers
        if self.loaded:
            self.loaded.flush(self.keys[start:], self.values[start:], before, crossed)
        if self.config.buffered:
            values = self.values.flatten(0, 1) if self._values_leave else None
            shift_slots(self.keys.flatten(0, 1), values, self.config.group, crossed.repeat(self.layers))
