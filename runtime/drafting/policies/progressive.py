"""Drafts read the tokens that their query scores highest by 2-bit keys; not published."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.selection.two_bit import two_bit_scores
from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.kv.cache import Cache


class Progressive(PerQueryPolicy):
    """The 2-bit keys are the upper bits of the upper codes, so the cache must hold codes.

    lse: float32 [layers, batch, q_heads], the log-sum-exps of the last draft's scores, which weigh the query heads of a
    KV head in the next.
    """

    def __init__(self, selection: selections.Progressive, cache: Cache) -> None:
        super().__init__(selection, cache)
        sizes = (cache.layers, cache.config.batch, cache.q_heads)
        self.lse = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)

    def start(self) -> None:
        self.lse.zero_()

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        rows = self.cache.rows
        planes = self.cache.planes(layer)
        assert planes is not None, "plans that choose by 2-bit keys hold codes"
        groups = self.old()[:rows] // self.cache.config.group
        return two_bit_scores(query, self.cache.codes(layer), planes, groups, self.lse[layer, :rows])
