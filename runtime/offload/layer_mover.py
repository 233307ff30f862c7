"""Adaptive placement: layers move to the host while tokens are generated.

A layer is copied on a side stream while rounds continue. Once it has arrived, the engine prepares rounds that read it
from the host and switches to them between two rounds: it calls `begin_switch`, and `finish_switch` once no pending
round reads the old location.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.storage import MovableCodes
from ridgeplan.runtime.offload.side_stream import SideStream

LEAD_GROUPS = 2  # a layer's copy starts when rows have fewer free groups than this


class LayerMover:
    """Moves layers of an adaptive cache to the host. `moved`: number of layers moved during this generation."""

    def __init__(self, cache: Cache, movable: MovableCodes) -> None:
        self._cache, self._movable = cache, movable
        self._side = SideStream(cache.lengths.device)
        self._since: list[int] = []  # groups of each row when the copy began; empty if none is under way
        self._arrived: Any = None
        self.moved = 0

    def start(self, longest: int) -> None:
        """Starts a generation with prompts of up to `longest` tokens: as many layers as fit stay on the device."""
        self._since, self.moved = [], 0
        groups = self._cache.config.quantized_groups(longest) + LEAD_GROUPS
        self._cache.place(self._movable.resident(groups))

    def ready(self, lengths: Sequence[int], ahead: int) -> bool:
        """Whether a layer has arrived on the host. Starts a layer's copy if rows of these lengths will soon need room.

        ahead: tokens that rounds in flight may still add. If rows have no room left, the layer counts as arrived:
        `finish_switch` then waits for its copy.
        """
        movable, resident = self._movable, self._cache.first_on_host
        if resident == movable.staying or movable.capacity(resident) == movable.max_groups:
            return False
        held = [self._cache.config.quantized_groups(length) for length in lengths]
        left = movable.capacity(resident) - self._cache.config.quantized_groups(max(lengths) + ahead)
        if not self._since and left < LEAD_GROUPS:
            self._leave(resident, held)
        if not self._since:
            return False
        return left < 1 or self._arrived is None or bool(self._arrived.query())

    @contextlib.contextmanager
    def next_placement(self, longest: int) -> Iterator[None]:
        """Places one layer fewer on the device inside the body, if sequences of up to `longest` tokens will need it.

        No round may run in the body, but rounds can be prepared for later.
        """
        resident = self._cache.first_on_host
        needed = self._movable.resident(self._cache.config.quantized_groups(longest) + LEAD_GROUPS)
        self._cache.place(max(needed, resident - 1))
        yield
        self._cache.place(resident)

    def begin_switch(self) -> None:
        """Makes rounds prepared from now on read the layer from the host; none may run before `finish_switch`."""
        self._cache.place(self._cache.first_on_host - 1)

    def finish_switch(self, lengths: Sequence[int]) -> None:
        """Completes the layer's copy for rows of these lengths and gives its memory to the remaining layers."""
        resident = self._cache.first_on_host + 1
        self._side.wait_all()
        held = [self._cache.config.quantized_groups(length) for length in lengths]
        self._movable.catch_up(resident, self._since, held)
        self._movable.spread(resident)
        self._since, self.moved = [], self.moved + 1

    def _leave(self, resident: int, held: list[int]) -> None:
        """Copies what rows now hold of the last layer, after all rounds in flight."""
        missing = self._cache.config.batch - len(held)
        groups = torch.tensor([*held, *[0] * missing], dtype=torch.int32).to(self._cache.lengths.device)
        self._since = held
        with self._side.after_current():
            self._movable.leave(resident, groups)
            self._arrived = self._side.record_event()


def layer_mover(cache: Cache) -> LayerMover | None:
    """The mover of a cache whose placement adapts; None for any other."""
    movable = cache.movable
    return LayerMover(cache, movable) if movable is not None else None
