"""Drafts read the attention sinks and the latest tokens (Xiao et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.planner.axes.draft_selection import SparseSelection
from ridgeplan.runtime.drafting.policies.sparse import SparsePolicy, TokenIndex
from ridgeplan.runtime.kv.cache import Cache


class StreamingLLM(SparsePolicy):
    """In a full-precision cache the latest tokens are one run, so that only the sinks are gathered."""

    known_ahead = True
    alike = True

    def __init__(self, selection: SparseSelection, cache: Cache) -> None:
        super().__init__(selection, cache)
        self._chosen: tuple[Tensor, Tensor] | None = None

    def old_of(self, lengths: Tensor) -> Tensor:
        if self.whole_groups:
            return super().old_of(lengths)
        run = (self.total_of(lengths) - self.selection.sinks).clamp_min(self.selection.recent)
        return (lengths - run).clamp_min(0)

    def before_round(self) -> None:
        old, budget = self.old()[:, None], self.budget()[:, None]
        places = torch.arange(self.max_budget, dtype=torch.int32, device=old.device)
        index = torch.where(places < self.selection.sinks, places, old - budget + places)
        self._chosen = index[:, None].contiguous(), budget

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        assert self._chosen is not None, "a round has begun"
        index, count = (chosen[: self.cache.rows] for chosen in self._chosen)
        return TokenIndex(index, count)
