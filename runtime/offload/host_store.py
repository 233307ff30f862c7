"""Host store of offloaded layers: full-precision KV and two-bit keys, gathered into slots on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize, shift_slots
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.offload import KeysAndValues, flush_to_host
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import quantized_groups
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.storage import CodedLayers
from ridgeplan.runtime.offload.slot_store import SlotStore, SlotTables, pair_on_host

PROMPT_GROUPS = 32  # groups of a prompt that are quantized at once


@dataclass(frozen=True, eq=False)
class TwoBitLayers:
    """The 2-bit keys of offloaded layers, on the device. The codes that they come from are not kept.

    keys: of `layers` layers, concatenated along the batch. staged, planes: codes and planes of one group of every row
    and layer, used while it is flushed.
    """

    config: KVCacheConfig
    layers: int
    keys: TwoBitKeys
    staged: QuantizedKV
    planes: DraftPlanes

    @classmethod
    def allocate(
        cls, model: ModelShape, config: KVCacheConfig, layers: int, tokens: int, device: torch.device
    ) -> TwoBitLayers:
        """Zero-filled, for rows of up to `tokens` tokens."""
        rows, heads, group, channels = layers * config.batch, model.kv_heads, config.group, model.head_dim
        keys = TwoBitKeys.allocate(rows, heads, config.groups(tokens), group, channels, device)
        staged = QuantizedKV.allocate(rows, heads, 1, group, channels, device, lower=False)
        return cls(config, layers, keys, staged, DraftPlanes.allocate(staged))

    @property
    def bytes(self) -> int:
        """Device memory."""
        return self.keys.bytes + self.staged.bytes + self.planes.bytes

    def of_layer(self, layer: int, rows: int) -> TwoBitKeys:
        """The keys of a layer's first rows."""
        first = layer * self.config.batch
        return self.keys.rows(slice(first, first + rows))

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Quantizes the whole groups of a row's prompt, [kv_heads, tokens, head_dim], from its first token on."""
        group, at = self.config.group, layer * self.config.batch + row
        for first in range(0, keys.shape[1] // group, PROMPT_GROUPS):
            last = min(first + PROMPT_GROUPS, keys.shape[1] // group)
            tokens = slice(first * group, last * group)
            two_bit_keys = _two_bit_keys(keys[None, :, tokens], values[None, :, tokens], last - first, group)
            for held, new in zip(_tensors(self.keys), _tensors(two_bit_keys), strict=True):
                held[at, :, first:last] = new[0]

    def flush(self, keys: Tensor, values: Tensor, index: Tensor, first_slot: Tensor, crossed: Tensor) -> None:
        """Adds one group of each row in `crossed`; arguments as for `CodedLayers.flush`."""
        index, slot, mask = (x.repeat(self.layers) for x in (index, first_slot, crossed))
        first = torch.zeros_like(index)
        quantize(keys.flatten(0, 1), values.flatten(0, 1), self.staged, first, mask, first_slot=slot)
        pack_draft_planes(self.staged, self.planes, first, mask=mask)
        two_bit_keys = TwoBitKeys.of(self.staged, self.planes)
        row, place = torch.arange(len(index), device=index.device), index.clamp_max(self.keys.groups - 1).long()
        for held, new in zip(_tensors(self.keys), _tensors(two_bit_keys), strict=True):
            kept = mask.view(-1, *[1] * (held.dim() - 2))
            held[row, :, place] = torch.where(kept, new[:, :, 0], held[row, :, place])


def _two_bit_keys(keys: Tensor, values: Tensor, groups: int, group: int) -> TwoBitKeys:
    """The 2-bit keys of whole groups of keys and values [rows, kv_heads, tokens, head_dim]."""
    rows, heads, _, channels = keys.shape
    codes = QuantizedKV.allocate(rows, heads, groups, group, channels, keys.device, lower=False)
    planes, first = DraftPlanes.allocate(codes), torch.zeros(rows, dtype=torch.int32, device=keys.device)
    quantize(keys, values, codes, first)
    pack_draft_planes(codes, planes, first, groups)
    return TwoBitKeys.of(codes, planes)


def _tensors(keys: TwoBitKeys) -> tuple[Tensor, Tensor, Tensor]:
    return keys.codes, keys.scale, keys.minimum


@dataclass(frozen=True, eq=False)
class HostKVStore(SlotStore):
    """KV of offloaded layers: old tokens on the host, slots for some of them and for recent tokens on the device.

    keys, values: on the device, [layers, batch, kv_heads, slots, head_dim]: `config.window_slots` slots for old tokens,
    then the buffer of recent tokens, as in formats with codes. on_host: old tokens of every layer, keys and values
    [batch, kv_heads, tokens, head_dim]. tables: the tokens that slots hold, if each step selects tokens. first: the
    number in the model of the first layer. two_bit: keys of all old tokens, kept on the device for a target that
    selects by them.

    For drafts that select nothing, the slots hold the first group and the latest groups of old tokens. They are filled
    from the end, so that slots and buffer form one contiguous range.
    """

    flushes: ClassVar[bool] = True  # old groups go to the host
    two_bit: TwoBitLayers | None = None
    coded: tuple[CodedLayers, ...] = ()  # always empty: codes are not kept

    @classmethod
    def allocate(
        cls,
        model: ModelShape,
        config: KVCacheConfig,
        layers: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> HostKVStore:
        """Zero-filled storage of `layers` layers for rows of up to `tokens` tokens. Raises WorkloadError."""
        sizes = (layers, config.batch, model.kv_heads, config.host_slots, model.head_dim)
        keys, values = (torch.zeros(sizes, dtype=dtype, device=device) for _ in "kv")
        held = tuple(host_layer(model, config, tokens, device, dtype) for _ in range(layers))
        two_bit = TwoBitLayers.allocate(model, config, layers, tokens, device) if config.format.quantized else None
        return cls(config, keys, values, held, SlotTables(), model.kv_layers - layers, two_bit)

    @property
    def bytes(self) -> int:
        """Storage on the device."""
        two_bit_bytes = self.two_bit.bytes if self.two_bit else 0
        return self.keys.nbytes + self.values.nbytes + self.tables.bytes + two_bit_bytes

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Stores a row's prompt, [kv_heads, tokens, head_dim]."""
        self.store_recent(layer, row, *self.store_old(layer, row, keys, values), keys.shape[1])

    def store_old(self, layer: int, row: int, keys: Tensor, values: Tensor) -> KeysAndValues:
        """Stores the old ones of a row's tokens, [kv_heads, tokens, head_dim]; returns copies of the recent ones."""
        old = quantized_groups(keys.shape[1], self.config.group) * self.config.group
        if self.two_bit:
            self.two_bit.store_prompt(layer, row, keys[:, :old], values[:, :old])
        for new, held in zip((keys, values), self.on_host[layer], strict=True):
            held[row, :, :old] = new[:, :old]
        return keys[:, old:].clone(), values[:, old:].clone()

    def store_recent(self, layer: int, row: int, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Stores the recent ones of a row's `tokens` tokens, and the window of its old ones, which are on the host."""
        group, first_recent = self.config.group, self.config.window_slots
        last = quantized_groups(tokens, group)
        for new, slots, held in zip((keys, values), (self.keys, self.values), self.on_host[layer], strict=True):
            slots[layer, row, :, first_recent : first_recent + new.shape[1]] = new
            if self.config.keeps_window:
                for number in {*range(min(1, last)), *range(max(1, last - self.config.window_groups + 1), last)}:
                    start = int(self.window_slot(torch.tensor(number)))
                    part = slice(number * group, (number + 1) * group)
                    slots[layer, row, :, start : start + group] = held[row, :, part]

    def flush(self, before: Tensor, crossed: Tensor) -> None:
        """Moves the oldest group of recent tokens to the host, of the rows in `crossed`, bool [batch], of all layers.

        before: int32 [batch], old tokens until now.
        """
        group, first_recent = self.config.group, self.config.window_slots
        if self.two_bit:
            first = torch.full_like(before, first_recent)
            self.two_bit.flush(self.keys, self.values, before // group, first, crossed)
        window_slot = self.window_slot(before // group)
        for slots, held in ((self.keys, 0), (self.values, 1)):
            for layer, on_host in enumerate(self.on_host):
                recent = slots[layer, :, :, first_recent:]
                flush_to_host(recent, on_host[held], before, group, crossed)
                if self.config.keeps_window:
                    flush_to_host(recent, slots[layer], window_slot, group, crossed)
        keys, values = (x[:, :, :, first_recent:].flatten(0, 1) for x in (self.keys, self.values))
        shift_slots(keys, values, group, crossed.repeat(self.layers))

    def window_slot(self, group: Tensor) -> Tensor:
        """The first slot of a group of the text: group 0 is last; later groups take turns before it."""
        groups = self.config.window_groups
        place = torch.where(group < groups, group, (group - 1) % (groups - 1) + 1)
        return self.config.window_slots - (place + 1) * self.config.group


def host_layer(
    model: ModelShape, config: KVCacheConfig, tokens: int, device: torch.device, dtype: torch.dtype
) -> KeysAndValues:
    """Keys and values on the host for the old tokens of a layer, of rows of up to `tokens` tokens.

    Raises WorkloadError if the host lacks memory.
    """
    old = max(1, quantized_groups(tokens + config.gamma + 1, config.group)) * config.group
    return pair_on_host(
        torch.Size((config.batch, model.kv_heads, old, model.head_dim)), dtype, device, config.target_loads
    )
