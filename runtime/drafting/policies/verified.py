"""Policies that choose once a round by the scores that the last verification left."""

from __future__ import annotations

from torch import Tensor

from ridgeplan.kernels.attention.scores import Rows, ScoreRequest, What
from ridgeplan.runtime.drafting.policies.ranked import RankedPolicy, prompt_scores
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class VerifiedPolicy(RankedPolicy):
    """Of these query rows of a verification, these scores; the first round has those of the prompt's last token."""

    window = 1
    rows: Rows = "last"
    what: What = "probabilities"

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        scores = prompt_scores(queries, keys, positions, self.what)
        kept = min(self.candidates, scores.shape[1])
        self.scores[layer, row, :, :kept] = scores[:, :kept]

    def target_metadata(self, queries: int) -> AttentionMetadata:
        return super().target_metadata(queries).changed(scores=self.request)

    def request(self, layer: int) -> ScoreRequest:
        """Where verification writes a layer's scores."""
        return ScoreRequest(self.scores[layer, : self.cache.rows], self.rows, self.what)
