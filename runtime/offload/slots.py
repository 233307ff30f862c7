"""Slots on the device, into which the selected tokens of offloaded layers are loaded ahead of attention.

A selection known before the first layer (SpeContext, section 5.1) is loaded on a side stream while earlier layers are
computed. A selection that a layer makes with its own query is loaded at that point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.offload import SlotLoads
from ridgeplan.runtime.offload.side_stream import SideStream
from ridgeplan.runtime.offload.slot_store import ALL_LAYERS, SlotStore

ChosenTokens = tuple[Tensor, Tensor, int]  # index, count and page, as `sparse_decode_attention` takes them


class SlotLoader:
    """Loads the slots of one store. prefetch: number of layers that are loaded ahead of the one being read."""

    def __init__(self, store: SlotStore, prefetch: int, device: torch.device) -> None:
        self.store, self.prefetch = store, prefetch
        self.side = SideStream(device)

    def load(self, layer: int, choice: ChosenTokens) -> Tensor:
        """Loads the chosen units of a layer that no slot holds yet; returns the slots of all chosen units."""
        loads = self.store.resolve(layer, *choice)
        self.store.gather(layer, loads, choice[2])
        return loads.slots


class LoadsAhead:
    """The loads of one query in all layers of a store, in layer order, for selections known before the pass.

    Each query of a pass has its own loads and slots, so loading for one query evicts nothing that another query of the
    pass still has to read. If layers share a selection, their slots hold the same tokens and are resolved once.
    """

    def __init__(self, loader: SlotLoader, choose: Callable[[int], ChosenTokens], shared_across_layers: bool) -> None:
        self._loader, self._choose = loader, choose
        self._begun: dict[int, tuple[ChosenTokens, SlotLoads, Any]] = {}  # choices stay referenced while they are read
        self._next = 0
        self._common: tuple[ChosenTokens, SlotLoads] | None = None
        if shared_across_layers:
            choice = choose(0)
            with loader.side.after_current():
                self._common = choice, loader.store.resolve(ALL_LAYERS, *choice)
        for _ in range(loader.prefetch + 1):
            self._begin_next()

    def slots(self, layer: int) -> Tensor:
        """The slots that hold the chosen units of a layer. Layers must be requested in order."""
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
