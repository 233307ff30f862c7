"""Storage of consecutive layers that hold equally many tokens: full-precision slots, and groups of codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.shift import shift_slots
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.codes import CodedLayers
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.offload.movable import MovableCodes


@dataclass(frozen=True, eq=False)
class KVStore:
    """keys, values: [layers, batch, kv_heads, slots, head_dim]. coded: codes of all its layers, in order; empty if
    nothing is quantized. Layers that are offloaded are apart from the others, and from each other. movable: where their
    places change.
    """

    config: KVCacheConfig
    keys: Tensor
    values: Tensor
    coded: tuple[CodedLayers, ...] = ()
    movable: MovableCodes | None = None

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
        sizes = (layers, config.batch, model.kv_heads, config.slots(tokens), model.head_dim)
        keys, values = (torch.zeros(sizes, dtype=dtype, device=device) for _ in "kv")
        if not config.format.quantized:
            return cls(config, keys, values)
        if config.adaptive:
            movable = MovableCodes.allocate(model, config, tokens, device)
            return cls(config, keys, values, movable.coded(movable.staying), movable)
        # Full-precision layers on the host are elsewhere (offload/host_store.py).
        on_host = config.host_layers if config.buffered else 0
        resident = layers - on_host
        coded = [CodedLayers.on_device(model, config, resident, tokens, device)] if resident else []
        coded += [CodedLayers.offloaded(model, config, tokens, device) for _ in range(on_host)]
        return cls(config, keys, values, tuple(coded))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def all_codes(self) -> QuantizedKV | None:
        """Codes of all layers, concatenated along the batch, where none is offloaded; None if nothing is quantized."""
        if not self.coded:
            return None
        (whole,) = self.coded
        return whole.codes

    @property
    def bytes(self) -> int:
        """Storage on the device of keys, values, codes and planes."""
        if self.movable:
            codes = self.movable.bytes + sum(coded.bytes for coded in self.movable.away)
        else:
            codes = sum(coded.bytes for coded in self.coded)
        return self.keys.nbytes + self.values.nbytes + codes

    def placed(self, resident: int) -> KVStore:
        """The same storage with the first `resident` layers on the device."""
        assert self.movable is not None, "only adaptive placements change"
        return replace(self, coded=self.movable.coded(resident))

    def reset(self) -> None:
        """Nothing to forget: lengths say what is held."""

    def coded_layer(self, layer: int) -> tuple[CodedLayers, int]:
        """Where a layer's codes are, and its number there."""
        assert self.coded, "this KV format holds no codes"
        for coded in self.coded:
            if layer < coded.layers:
                break
            layer -= coded.layers
        return coded, layer

    def codes(self, layer: int, first: int, count: int) -> QuantizedKV:
        """Quantized groups of `count` rows of a layer."""
        coded, index = self.coded_layer(layer)
        return coded.codes.rows(coded.rows(index, first, count))

    def planes(self, layer: int, first: int, count: int) -> DraftPlanes | None:
        """The same groups by token, if they are kept."""
        coded, index = self.coded_layer(layer)
        return coded.planes.rows(coded.rows(index, first, count)) if coded.planes else None

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Stores what a layer keeps of a row's prompt, [kv_heads, tokens, head_dim]."""
        tokens = keys.shape[1]
        whole = self.config.quantized_groups(tokens) * self.config.group
        if whole:
            coded, index = self.coded_layer(layer)
            coded.store_prompt(index, row, keys[:, :whole], values[:, :whole])
        start = whole if self.config.buffered else 0
        self.keys[layer, row, :, : tokens - start] = keys[:, start:]
        self.values[layer, row, :, : tokens - start] = values[:, start:]

    def flush(self, before: Tensor, crossed: Tensor) -> None:
        """Quantizes the oldest full-precision group of the rows in `crossed`, bool [batch], of all layers at once.

        before: int32 [batch], tokens that were codes until now.
        """
        assert self.coded, "this KV format holds no codes"
        first_slot = torch.zeros_like(before) if self.config.buffered else before
        index, start = before // self.config.group, 0
        for coded in self.coded:
            own = slice(start, start + coded.layers)
            coded.flush(self.keys[own], self.values[own], index, first_slot, crossed)
            start += coded.layers
        if self.config.buffered:
            keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
            shift_slots(keys, values, self.config.group, crossed.repeat(self.layers))
