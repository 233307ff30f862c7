"""Adaptive placement: layers move to the host while tokens are generated (SpeContext, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeplan.runtime.kv.cache import Cache


class LayerMover:
    """Moves layers of an adaptive cache to the host.

    moved_at: for each layer that left during this generation, tokens of the longest sequence when it did.
    """

    def __init__(self, cache: Cache) -> None:
        assert cache.movable is not None, "the placement adapts"
        self._cache, self._movable = cache, cache.movable
        self.moved_at: list[int] = []

    def start(self, longest: int) -> None:
        """Starts a generation with prompts of up to `longest` tokens: as many layers as fit stay on the device."""
        self.moved_at, resident = [], self._movable.layers
        while longest >= self.threshold(resident):
            resident -= 1
        self._cache.place(resident)

    def threshold(self, resident: int) -> float:
        """The length from which on one of `resident` layers must leave before the next pass (S_i of Algorithm 1).

        A pass writes the row's next token and its drafts. Infinite where no layer has to leave anymore.
        """
        if resident == self._movable.staying:
            return float("inf")
        return self._movable.max_tokens(resident) - self._cache.config.gamma

    def has_room(self, longest: int) -> bool:
        """Whether the next pass fits rows of up to `longest` tokens, with the layers that are on the device now."""
        return longest < self.threshold(self._cache.first_on_host)

    def offload(self, lengths: Sequence[int]) -> None:
        """Moves layers until the next pass fits rows of these lengths. No pass may be in flight."""
        while not self.has_room(max(lengths)):
            resident = self._cache.first_on_host
            self._movable.leave(resident, lengths)
            self._cache.place(resident - 1)
            self.moved_at.append(max(lengths))


def layer_mover(cache: Cache) -> LayerMover | None:
    """The mover of a cache whose placement adapts; None for any other."""
    return None if cache.movable is None else LayerMover(cache)
