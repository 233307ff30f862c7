"""Drafts read the tokens that their query scores highest by 2-bit keys; not published."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.selection.two_bit import two_bit_scores
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class Progressive(PerQueryPolicy):
    """The 2-bit keys are the upper bits of the upper codes, so the cache must hold codes.

    lse: float32 [layers, batch, q_heads], the log-sum-exps of the last draft's scores, which weigh the query heads of a
    KV head in the next. threshold: float32 [layers, batch, kv_heads], see `progressive_attention`.
    """

    def __init__(self, selection: selections.Progressive, cache: Cache) -> None:
        super().__init__(selection, cache)
        sizes = (cache.layers, cache.config.batch, cache.q_heads)
        self.lse = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)
        self.threshold = torch.empty(*sizes[:2], cache.kv_heads, dtype=torch.float32, device=self.lse.device)

    def start(self) -> None:
        self.lse.zero_()
        self.threshold.fill_(-torch.inf)

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(ahead, queries)
        self.groups = self.old_tokens // self.cache.config.group
        return metadata

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        return two_bit_scores(query, self.cache.codes(layer), *self._scanned(layer))

    def attend(self, layer: int, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Where upper codes are read, one operation scans, chooses and reads."""
        if not self.cache.config.drafts_read_upper:
            return super().attend(layer, query, metadata)
        (planes, groups, lse), rows = self._scanned(layer), self.cache.rows
        return progressive_attention(
            query, *self.cache.full(layer), metadata.begin, metadata.end, self.cache.codes(layer), planes, groups,
            self.budgets, lse, self.threshold[layer, :rows], max_k=self.max_budget,
            sinks=self.selection.sinks,
        )  # fmt: skip

    def _scanned(self, layer: int) -> tuple[DraftPlanes, Tensor, Tensor]:
        """The 2-bit keys of a layer, the groups of each row that are scanned, and the weights of the query heads."""
        rows, planes = self.cache.rows, self.cache.planes(layer)
        assert planes is not None, "plans that choose by 2-bit keys hold codes"
        return planes, self.groups, self.lse[layer, :rows]
