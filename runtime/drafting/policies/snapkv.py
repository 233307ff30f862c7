"""Drafts read the tokens that the prompt's last queries attended to most (Li et al. 2024)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.ranked import RankedPolicy, prompt_scores
from ridgeplan.runtime.kv.cache import Cache


class SnapKV(RankedPolicy):
    """A set for each KV head, scored in prefill; what is generated later joins it as it grows old."""

    selection: selections.SnapKV
    shared = False

    def __init__(self, selection: selections.SnapKV, cache: Cache) -> None:
        super().__init__(selection, cache)
        self.window = selection.window

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor) -> None:
        super().after_prefill(layer, row, queries, keys)
        scores = prompt_scores(queries, keys, "probabilities")
        pooled = functional.max_pool1d(scores, self.selection.pool, 1, self.selection.pool // 2)
        kept = min(self.candidates, pooled.shape[1])
        self.scores[layer, row, :, :kept] = pooled[:, :kept]
