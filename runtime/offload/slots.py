"""Slots on the device: chosen tokens of offloaded layers are loaded into them ahead of attention.

A choice that is known before the first layer (SpeContext, section 5.1) is loaded on a stream of its own while earlier
layers are computed. One that a layer makes by its own query is loaded where it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.offload import SlotLoads
from ridgeplan.runtime.offload.host_store import ALL_LAYERS, HostKVStore
from ridgeplan.runtime.offload.side_stream import SideStream

Choice = tuple[Tensor, Tensor, int]  # index, count and page, as `sparse_decode_attention` takes them


class SlotLoader:
    """Of one store. prefetch: layers that are loaded ahead of the one that is read."""

    def __init__(self, store: HostKVStore, prefetch: int, device: torch.device) -> None:
        self.store, self.prefetch = store, prefetch
        self.side = SideStream(device)

    def ahead(self, choose: Callable[[int], Choice], alike: bool) -> LoadsAhead:
        """A query's pass begins whose choice in every layer of the store is known; the first ones are loaded."""
        return LoadsAhead(self, choose, alike)

    def load(self, layer: int, choice: Choice) -> Tensor:
        """The slots that hold the chosen units of a layer, once what they lack has been loaded."""
        loads = self.store.resolve(layer, *choice)
        self.store.gather(layer, loads, choice[2])
        return loads.slots


class LoadsAhead:
    """The loads of one query in all layers of a store, in their order.

    The queries of a pass have such loads each, and slots for all of them: what one loads evicts nothing that another
    of the same pass has yet to read. Where layers choose alike their slots hold the same tokens, found once.
    """

    def __init__(self, loader: SlotLoader, choose: Callable[[int], Choice], alike: bool) -> None:
        self._loader, self._choose = loader, choose
        self._begun: dict[int, tuple[Choice, SlotLoads, Any]] = {}  # choices are kept while they are read
        self._next = 0
        self._common: tuple[Choice, SlotLoads] | None = None
        if alike:
            choice = choose(0)
            with loader.side.after_current():
                self._common = choice, loader.store.resolve(ALL_LAYERS, *choice)
        for _ in range(loader.prefetch + 1):
            self._begin_next()

    def slots(self, layer: int) -> Tensor:
        """The slots that hold the chosen units of a layer, each layer in turn."""
        _, loads, event = self._begun.pop(layer)
        self._loader.side.wait_event(event)
        self._begin_next()
        return loads.slots

    def _begin_next(self) -> None:
        store, layer = self._loader.store, self._next
        if layer == store.layers:
            return
        choice = self._common[0] if self._common else self._choose(layer)
        with self._loader.side.after_current():
            loads = self._common[1] if self._common else store.resolve(layer, *choice)
            store.gather(layer, loads, choice[2], concurrent=True)
            self._begun[layer] = choice, loads, self._loader.side.record_event()
        self._next += 1
