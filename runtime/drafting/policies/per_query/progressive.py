"""The tokens that the query scores highest by 2-bit keys; not published."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.selection.two_bit import two_bit_scores
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class Progressive(PerQueryPolicy):
    """The 2-bit keys are the upper bits of the upper codes, so the cache must hold codes.

    lse: float32 [places, layers, batch, q_heads], the log-sum-exps of queries' scores, which weigh the query heads of a
    KV head in the next query's. A draft's query has those of the draft before it, in one place. A target's query has
    those of the token before it, so that what it chooses depends on the text alone, not on how rounds fell: the token
    at position p has the place p % places, and places outnumber the queries of a pass.
    own, before: the places of a query's token and of the one before it, with their rows.
    """

    own: tuple[Tensor, Tensor]
    before: tuple[Tensor, Tensor]

    def __init__(self, selection: selections.Progressive, cache: Cache) -> None:
        super().__init__(selection, cache)
        sizes = (1, cache.layers, cache.config.batch, cache.q_heads)
        self.lse = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)

    def start(self) -> None:
        self.lse.zero_()

    def for_target(self, queries: int) -> None:
        self.lse = self.lse.repeat(queries + 1, 1, 1, 1)

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(ahead, queries)
        self.groups = self.old_tokens // self.cache.config.group
        if not self._fused:
            rows, places = self.cache.rows, len(self.lse)
            own = (self.cache.lengths[:rows] % places).long()
            row = torch.arange(rows, device=own.device)
            self.own, self.before = (own, row), ((own - 1) % places, row)
        return metadata

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        lse = self.lse[:, layer]
        weights = lse[self.before]
        scores = two_bit_scores(query, self.cache.two_bit_keys(layer), self.groups, weights)
        lse[self.own] = weights
        return scores

    def attend(self, layer: int, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Where drafts read upper codes, one operation scans, chooses and reads."""
        if not self._fused:
            return super().attend(layer, query, metadata)
        planes, rows = self.cache.planes(layer), self.cache.rows
        assert planes is not None, "plans that choose by 2-bit keys hold codes"
        return progressive_attention(
            query, *self.cache.full(layer), metadata.begin, metadata.end, self.cache.codes(layer), planes, self.groups,
            self.budgets, self.lse[0, layer, :rows], max_k=self.max_budget, sinks=self.selection.sinks,
        )  # fmt: skip

    @property
    def _fused(self) -> bool:
        is_target = len(self.lse) > 1
        return self.cache.config.drafts_read_upper and not is_target
