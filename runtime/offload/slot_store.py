"""Slots on the device that hold chosen units of offloaded layers, whose old tokens all lie on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.offload import EMPTY, KeysAndValues, SlotLoads, SlotTable, allocate_slots, gather_into_slots
from ridgeplan.runtime.buffers import HostMemory, split_bytes
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.kv.config import KVCacheConfig

ALL_LAYERS = -1  # the layer of a selection that all layers share


class SlotTables:
    """What slots hold: the table of each layer by its number in the model, or one of ALL_LAYERS.

    They outlive a change of the placement, which may add a layer.
    """

    def __init__(self) -> None:
        self.by_layer: dict[int, SlotTable] = {}
        self._earlier = [0, 0]  # units requested and loaded by steps with fewer layers, of the table of ALL_LAYERS

    @property
    def bytes(self) -> int:
        """Device memory."""
        return sum(table.bytes for table in self.by_layer.values())

    def reset(self) -> None:
        """Forgets what slots hold, and the counts."""
        self._earlier = [0, 0]
        for table in self.by_layer.values():
            table.reset()

    def counts(self, layers: int) -> tuple[int, int]:
        """Units requested and units loaded, over all layers and KV heads, by steps with `layers` layers on the host."""
        requested, loaded = self._earlier
        for layer, table in self.by_layer.items():
            times = layers if layer == ALL_LAYERS else 1
            requested += times * int(table.requested.sum())
            loaded += times * int(table.loaded.sum())
        return requested, loaded

    def start_layer(self, layers: int) -> None:
        """From now on one layer more than `layers` shares the table of ALL_LAYERS, if there is one."""
        table = self.by_layer.get(ALL_LAYERS)
        if table is not None:
            for place, counts in enumerate((table.requested, table.loaded)):
                self._earlier[place] += layers * int(counts.sum())
                counts.zero_()


@dataclass(frozen=True, eq=False)
class SlotStore:
    """Offloaded layers, and the slots that their units are loaded into.

    keys, values: on the device, [layers, batch, kv_heads, slots, ...], of which the first `config.window_slots` hold
    units. on_host: old tokens of every layer, keys and values [batch, kv_heads, tokens, ...]. tables: what slots hold.
    first: the number in the model of the first layer.
    """

    config: KVCacheConfig
    keys: Tensor
    values: Tensor
    on_host: tuple[KeysAndValues, ...]
    tables: SlotTables
    first: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.on_host)

    def reset(self) -> None:
        """Forgets what slots hold."""
        self.tables.reset()

    def fill_slots(self, layer: int) -> None:
        """Loads what the slots of all layers hold into those of a layer that has just joined them."""
        table = self.tables.by_layer.get(ALL_LAYERS)
        if table is not None:
            held = table.unit_of != EMPTY
            into = (~held).int().argsort(dim=-1, stable=True)
            units = table.unit_of.gather(2, into)
            loads = SlotLoads(into.int(), units, into.int(), held.sum(-1, dtype=torch.int32))
            self.gather(layer, loads, self.config.window_slots // into.shape[2])

    def resolve(self, layer: int, index: Tensor, count: Tensor, page: int) -> SlotLoads:
        """Allocates slots to the units that a step selects; the result lists those that must be loaded.

        index, count: as for `sparse_decode_attention`. layer: ALL_LAYERS for a selection that all layers share. Raises
        WorkloadError if a step may select more units than there are slots.
        """
        table = self._table(layer, index, page).first(len(index))
        if not self.config.reuses_slots:
            table.forget()
        return allocate_slots(table, index, count)

    def gather(self, layer: int, loads: SlotLoads, page: int, concurrent: bool = False) -> None:
        """Loads a layer's missing units into their slots. concurrent: while other layers are computed."""
        rows, (keys, values) = len(loads.count), self.on_host[layer]
        slots = self.keys[layer, :rows], self.values[layer, :rows]
        gather_into_slots((keys[:rows], values[:rows]), slots, loads, page, concurrent=concurrent)

    def loads(self) -> tuple[int, int]:
        """Units that steps have requested, and units that had to be loaded, over all layers and KV heads."""
        return self.tables.counts(self.layers)

    def _table(self, layer: int, index: Tensor, page: int) -> SlotTable:
        number, tables = layer if layer == ALL_LAYERS else self.first + layer, self.tables.by_layer
        if number not in tables:
            slots, chosen = self.config.window_slots // page, index.shape[2]
            if chosen > slots:
                raise WorkloadError(
                    f"the placement's budget is {self.config.window_slots} tokens and a step may choose "
                    f"{chosen * page}; allowed: a budget of that many"
                )
            units = self.on_host[0][0].shape[2] // page
            with torch.inference_mode(False):  # it outlives this pass, and is emptied outside of one
                tables[number] = SlotTable.allocate(self.config.batch, index.shape[1], units, slots, index.device)
        return tables[number]


def pair_on_host(shape: torch.Size, dtype: torch.dtype, device: torch.device, by_token: bool) -> KeysAndValues:
    """Keys and values [batch, kv_heads, tokens, head_dim] on the host: separate, or interleaved if `by_token`.

    Interleaving puts a token's key and value side by side. Tokens that are read one by one lie in different pages of
    memory, and every page costs a walk of the device's page table. Over tens of gigabytes these walks, not the bytes,
    limit the link.
    """
    if not by_token:
        keys, values = HostMemory.allocate(split_bytes([(shape, dtype)] * 2), device).split([(shape, dtype)] * 2)
        return keys, values
    batch, heads, tokens, channels = shape
    both = [(torch.Size((batch, tokens, heads, 2, channels)), dtype)]
    (held,) = HostMemory.allocate(split_bytes(both), device).split(both)
    return held[:, :, :, 0].transpose(1, 2), held[:, :, :, 1].transpose(1, 2)
