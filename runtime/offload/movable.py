"""Layers that leave for the host while tokens are generated (SpeContext, Algorithm 2), and the memory they share.

Layers on the device lie at the beginning of one piece of memory: the fewer they are, the longer their rows may grow. So
the thresholds of Algorithm 1 are the lengths up to which one layer more fits. The last layer leaves first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.offload import KeysAndValues, copy_prefix
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import layer_capacity
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.storage import CodedLayers, KVStore
from ridgeplan.runtime.offload.host_codes import HostCodes
from ridgeplan.runtime.offload.host_store import HostKVStore, host_layer
from ridgeplan.runtime.offload.slot_store import SlotTables

NAMES = tuple(item.name for item in fields(QuantizedKV))


class MovableLayers(Protocol):
    """The layers of a cache whose last ones may leave."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def staying(self) -> int:
        """Layers that never leave."""

    @property
    def bytes(self) -> int:
        """Device memory."""

    def max_tokens(self, resident: int) -> int:
        """Tokens of a row, with those of a pass, that fit while `resident` layers are on the device."""

    def stores(self, resident: int) -> list[KVStore | HostKVStore]:
        """The storage of all layers in order, the first `resident` of them on the device."""

    def leave(self, resident: int, lengths: Sequence[int]) -> None:
        """Moves the last of `resident` layers to the host and gives its memory to the others.

        lengths: tokens of each row.
        """


@dataclass(frozen=True, eq=False)
class MovableFullKV:
    """Full-precision layers. keys, values: their memory, [slots * batch * kv_heads * head_dim].

    Slots of the layers on the host lie at its end, the last layer's last, so that they stay where they are when another
    layer follows. on_host: old tokens of each of the layers that may leave, in layer order.
    """

    config: KVCacheConfig
    layers: int
    kv_heads: int
    head_dim: int
    keys: Tensor
    values: Tensor
    on_host: tuple[KeysAndValues, ...]
    tables: SlotTables

    @classmethod
    def allocate(
        cls, model: ModelShape, config: KVCacheConfig, device: torch.device, dtype: torch.dtype
    ) -> MovableFullKV:
        """Memory of all layers with `config.host_layers` of them on the host, plus `config.spare_bytes`.

        Raises WorkloadError if the host lacks memory for the layers that may leave.
        """
        rows, whole = config.batch * model.kv_heads * model.head_dim, config.slots(config.longest)
        host_slots = config.host_layers * config.host_slots + (model.kv_layers - config.host_layers) * whole
        slots = min(model.kv_layers * whole, host_slots + config.spare_bytes // (2 * rows * dtype.itemsize))
        keys, values = (torch.zeros(slots * rows, dtype=dtype, device=device) for _ in "kv")
        on_host = tuple(host_layer(model, config, config.longest, device, dtype) for _ in range(config.host_layers))
        return cls(config, model.kv_layers, model.kv_heads, model.head_dim, keys, values, on_host, SlotTables())

    @property
    def staying(self) -> int:
        """Layers that never leave."""
        return self.layers - len(self.on_host)

    @property
    def bytes(self) -> int:
        """Device memory, tables of slots included."""
        return self.keys.nbytes + self.values.nbytes + self.tables.bytes

    @property
    def slots(self) -> int:
        """Slots of a row in all layers together."""
        return self.keys.numel() // (self.config.batch * self.kv_heads * self.head_dim)

    def max_tokens(self, resident: int) -> int:
        """Tokens of a row, with those of a pass, that fit while `resident` layers are on the device."""
        longest_row = self.config.slots(self.config.longest)
        if not resident:
            return longest_row
        return min(longest_row, layer_capacity(self.slots, self.layers, resident, self.config.host_slots))

    def stores(self, resident: int) -> list[KVStore | HostKVStore]:
        """The storage of all layers in order, the first `resident` of them on the device."""
        config, away, slots = self.config, self.layers - resident, self.config.host_slots
        stores: list[KVStore | HostKVStore] = []
        if resident:
            stores.append(KVStore(config, *self._views(0, resident, self.max_tokens(resident))))
        if away:
            near = self._views(self.slots - away * slots, away, slots)
            stores.append(HostKVStore(config, *near, self.on_host[resident - self.staying :], self.tables, resident))
        return stores

    def _views(self, first_slot: int, layers: int, slots: int) -> KeysAndValues:
        """Keys and values [layers, batch, kv_heads, slots, head_dim] from a slot of the memory on."""
        shape = torch.Size((layers, self.config.batch, self.kv_heads, slots, self.head_dim))
        start = first_slot * self.config.batch * self.kv_heads * self.head_dim
        keys, values = (memory[start : start + shape.numel()].view(shape) for memory in (self.keys, self.values))
        return keys, values

    def leave(self, resident: int, lengths: Sequence[int]) -> None:
        """Moves the last of `resident` layers to the host and gives its memory to the others.

        Its own slots lie within that memory, so its recent tokens are set aside until the others have moved.
        """
        self.tables.start_layer(self.layers - resident)
        before, after = self.stores(resident), self.stores(resident - 1)
        near, host = before[0], after[-1]
        assert isinstance(near, KVStore), "a layer on the device leaves"
        assert isinstance(host, HostKVStore), "a layer has left"
        held = [
            [part[resident - 1, row, :, :tokens] for part in (near.keys, near.values)]
            for row, tokens in enumerate(lengths)
        ]
        recent = [host.store_old(0, row, *each) for row, each in enumerate(held)]
        for old, new in zip(
            (near.keys, near.values), self._views(0, resident - 1, self.max_tokens(resident - 1)), strict=True
        ):
            _spread(old.flatten(0, 1), new.flatten(0, 1), list(lengths), self.config.batch)
        for row, (each, tokens) in enumerate(zip(recent, lengths, strict=True)):
            host.store_recent(0, row, *each, tokens)
        host.fill_slots(0)


@dataclass(frozen=True, eq=False)
class MovableCodes:
    """Codes of layers, and the buffers of their recent tokens, which stay.

    keys, values: the buffers of all layers, [layers, batch, kv_heads, slots, head_dim]. memory: for each tensor of the
    codes, [groups * batch * kv_heads, ...]. away: the host storage of each layer that may leave, in layer order; or
    loaded: that of all of them, if steps load what they choose.
    """

    config: KVCacheConfig
    keys: Tensor
    values: Tensor
    groups: int
    memory: Mapping[str, Tensor]
    away: tuple[CodedLayers, ...] = ()
    loaded: HostCodes | None = None

    @classmethod
    def allocate(
        cls, model: ModelShape, config: KVCacheConfig, device: torch.device, dtype: torch.dtype
    ) -> MovableCodes:
        """Memory for the layers that never leave, plus `config.spare_bytes`.

        Raises WorkloadError if the host lacks memory for the other layers.
        """
        buffers = (model.kv_layers, config.batch, model.kv_heads, config.buffer_slots, model.head_dim)
        keys, values = (torch.zeros(buffers, dtype=dtype, device=device) for _ in "kv")
        away: tuple[CodedLayers, ...] = ()
        loaded = None
        if config.target_loads:
            loaded = HostCodes.allocate(model, config, config.host_layers, config.longest, device)
        else:
            away = tuple(
                CodedLayers.offloaded(model, config, config.longest, device) for _ in range(config.host_layers)
            )
        sizes = config.batch, model.kv_heads, 1, config.group, model.head_dim
        unit, whole = QuantizedKV.allocate(*sizes, "meta", lower=True), config.groups(config.longest)
        spare = config.spare_bytes // unit.bytes
        groups = min(model.kv_layers * whole, (model.kv_layers - config.host_layers) * whole + spare)

        def held(part: Tensor) -> Tensor:
            return torch.zeros(groups * part.numel(), dtype=part.dtype, device=device)

        memory = {name: held(getattr(unit, name)) for name in NAMES}
        return cls(config, keys, values, groups, memory, away, loaded)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def staying(self) -> int:
        """Layers that never leave."""
        return self.layers - self.config.host_layers

    @property
    def bytes(self) -> int:
        """Device memory."""
        held = sum(tensor.nbytes for tensor in self.memory.values()) + sum(coded.bytes for coded in self.away)
        return self.keys.nbytes + self.values.nbytes + held + (self.loaded.bytes if self.loaded else 0)

    def capacity(self, resident: int) -> int:
        """Groups that rows may have while `resident` layers are on the device."""
        longest_row = self.config.groups(self.config.longest)
        if not resident:
            return longest_row
        return min(longest_row, layer_capacity(self.groups, self.layers, resident, 0))

    def max_tokens(self, resident: int) -> int:
        """Tokens of a row, with those of a pass, that fit while `resident` layers are on the device."""
        return (self.capacity(resident) + 2) * self.config.group - 1

    def stores(self, resident: int) -> list[KVStore | HostKVStore]:
        """The storage of all layers in order, the codes of the first `resident` of them on the device."""
        near = [CodedLayers(self.config, resident, self.on_device(resident))] if resident else []
        away = self.away[resident - self.staying :]
        loaded = self.loaded.from_layer(resident) if self.loaded and resident < self.layers else None
        return [KVStore(self.config, self.keys, self.values, (*near, *away), loaded)]

    def on_device(self, resident: int) -> QuantizedKV:
        """The codes of the layers on the device, concatenated along the batch."""
        config, groups = self.config, max(1, self.capacity(resident))
        sizes = resident * config.batch, self.keys.shape[2], groups, config.group, self.keys.shape[4]
        template = QuantizedKV.allocate(*sizes, "meta", lower=True)
        shapes = {name: getattr(template, name).shape for name in NAMES}
        return QuantizedKV(**{name: self.memory[name][: shape.numel()].view(shape) for name, shape in shapes.items()})

    def leave(self, resident: int, lengths: Sequence[int]) -> None:
        """Moves the last of `resident` layers to the host and gives its memory to the others."""
        batch, held = self.config.batch, [self.config.quantized_groups(tokens) for tokens in lengths]
        before, after = self.on_device(resident), self.on_device(resident - 1)
        source = before.rows(slice((resident - 1) * batch, resident * batch))
        if self.loaded:
            self._take(self.loaded, resident, source, held)
        else:
            self._copy(self.away[resident - 1 - self.staying], source, held)
        for name in NAMES:
            _spread(getattr(before, name), getattr(after, name), held, batch)

    def _take(self, loaded: HostCodes, resident: int, source: QuantizedKV, held: Sequence[int]) -> None:
        """Stores a layer's groups token by token, and fills its slots as those of the layers that left before."""
        loaded.tables.start_layer(self.layers - resident)
        host = loaded.from_layer(resident - 1)
        for row, count in enumerate(held):
            host.take(0, row, source.rows(slice(row, row + 1)), count)
        host.fill_slots(0)

    def _copy(self, target: CodedLayers, source: QuantizedKV, held: Sequence[int]) -> None:
        """Copies a layer's groups, and those that stay on the device for drafts."""
        batch = self.config.batch
        groups = torch.tensor([*held, *[0] * (batch - len(held))], dtype=torch.int32).to(self.keys.device)
        for name in NAMES:
            copy_prefix(getattr(source, name), getattr(target.codes, name), groups)
        if target.window:
            for row, count in enumerate(held):
                target.window.take(source, row, count)


def _spread(before: Tensor, after: Tensor, held: Sequence[int], batch: int) -> None:
    """Moves rows to where they have more room in the same memory, of `held` entries in each row of the batch.

    before, after: [layers * batch, kv_heads, entries, ...], of which `after` has fewer layers. Rows move up, the last
    one first, so that none overwrites a row that has not moved yet.
    """
    for row in reversed(range(len(after))):
        entries = held[row % batch] if row % batch < len(held) else 0
        after[row, :, :entries] = before[row, :, :entries].clone()


def movable_layers(
    model: ModelShape, config: KVCacheConfig, device: torch.device, dtype: torch.dtype
) -> MovableLayers | None:
    """The layers of a cache whose placement adapts; None for any other."""
    if not config.adaptive:
        return None
    kind: type[MovableCodes] | type[MovableFullKV] = MovableCodes if config.buffered else MovableFullKV
    return kind.allocate(model, config, device, dtype)
