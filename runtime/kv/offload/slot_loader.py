"""Loads of chosen tokens into the slots of layers on the host, ahead of the layers that read them.

A choice that is known before the first layer (SpeContext, section 5.1) is loaded on a stream of its own while earlier
layers are computed. One that a layer makes by its own query is loaded where it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeplan.runtime.kv.offload.host_store import HostKVStore

Choice = tuple[Tensor, Tensor, int]  # index, count and page, as `sparse_decode_attention` takes them


class SlotLoader:
    """Of one store. prefetch: layers that are loaded ahead of the one that is read."""

    def __init__(self, store: HostKVStore, prefetch: int, device: torch.device) -> None:
        self._store, self._ahead = store, prefetch + 1
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._joined = torch.zeros(1, device=device)
        self._choose: Callable[[int], Choice] | None = None
        self._loaded: dict[int, tuple[Tensor, Any]] = {}
        self._next = 0

    def reset(self) -> None:
        """Forgets a pass that was not finished."""
        self._choose, self._next = None, 0
        self._loaded.clear()

    def begin(self, choose: Callable[[int], Choice]) -> None:
        """A pass begins whose choice in every layer of the store is known; the first ones are loaded."""
        self.reset()
        self._choose = choose
        for _ in range(min(self._ahead, self._store.layers)):
            self._load_next()

    def slots(self, layer: int, choice: Choice) -> Tensor:
        """The slots that hold the chosen units of a layer; what is launched from now on reads them after the loads."""
        if layer not in self._loaded:
            return self._store.load(layer, *choice).slots
        slots, arrived = self._loaded.pop(layer)
        if self._side is not None:
            torch.cuda.current_stream().wait_event(arrived)
            self._joined.zero_()  # as in `LayerStream.fetch`
        if self._next < self._store.layers:
            self._load_next()
        return slots

    def _load_next(self) -> None:
        assert self._choose is not None, "a pass has begun"
        layer, self._next = self._next, self._next + 1
        with self._beside():
            slots = self._store.load(layer, *self._choose(layer)).slots
            self._loaded[layer] = slots, self._side.record_event() if self._side is not None else None

    def _beside(self) -> Any:
        if self._side is None:
            return contextlib.nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)
