"""Policies that choose once a round by the scores that the last verification left."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.attention.scores import Rows, ScoreRequest, What
from ridgeplan.planner.axes.draft_selection import SparseSelection
from ridgeplan.runtime.drafting.policies.ranked import RankedPolicy, prompt_lse, prompt_scores
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class VerifiedPolicy(RankedPolicy):
    """Of these query rows of a verification, these scores; the first round has those of the prompt's last token.

    lse: float32 [layers, batch, q_heads], log-sum-exps of the last query before the next verification, to which its
    probabilities refer.
    """

    window = 1
    rows: Rows = "last"
    what: What = "probabilities"

    def __init__(self, selection: SparseSelection, cache: Cache) -> None:
        super().__init__(selection, cache)
        sizes = (cache.layers, cache.config.batch, cache.q_heads)
        self.lse = torch.zeros(sizes, dtype=torch.float32, device=self.scores.device)

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        scores = prompt_scores(queries, keys, positions, self.what)
        kept = min(self.candidates, scores.shape[1])
        self.scores[layer, row, :, :kept] = scores[:, :kept]
        self.lse[layer, row] = prompt_lse(queries[-1], keys)

    def target_metadata(self, queries: int) -> AttentionMetadata:
        return super().target_metadata(queries).changed(scores=self.request)

    def request(self, layer: int) -> ScoreRequest:
        """Where verification writes a layer's scores."""
        rows = slice(self.cache.rows)
        return ScoreRequest(self.scores[layer, rows], self.rows, self.what, self.lse[layer, rows])
