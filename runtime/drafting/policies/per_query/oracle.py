"""The tokens that the query scores highest by the keys themselves: a bound for the other policies."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.planner.axes.draft_selection import SparseSelection
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.kv.cache import Cache


class Oracle(PerQueryPolicy):
    """The scores that attention to every token leaves; its output is not used.

    Of two calls, the first leaves the log-sum-exps to which the second one's probabilities refer.
    """

    def __init__(self, selection: SparseSelection, cache: Cache) -> None:
        super().__init__(selection, cache)
        sizes = (cache.config.batch, cache.kv_heads, self.candidates)
        self._scores = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)
        self._lse = torch.zeros(cache.config.batch, cache.q_heads, dtype=torch.float32, device=cache.lengths.device)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        every = self.cache.draft_metadata(0)
        rows = slice(self.cache.rows)
        scores = ScoreRequest(self._scores[rows], "last", "probabilities", self._lse[rows])
        codes = None if every.groups is None else self.cache.codes(layer)
        keys, values = self.cache.full(layer)
        arguments = (query, keys, values, every.begin, every.end, codes, every.groups)
        for _ in range(2):
            decode_attention(*arguments, lower=every.lower, scores=scores)
        return scores.out
