"""Policies that choose anew for every draft's query and KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.runtime.drafting.policies.sparse import SparsePolicy, TokenIndex
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class PerQueryPolicy(SparsePolicy):
    """A subclass scores pages of `page` tokens by the query.

    What it scores by is made of whole groups, so that old tokens are those that the rule of codes would quantize, also
    in a full-precision cache. What depends on lengths alone is computed once for all layers of a draft: old_tokens and
    budgets int32 [rows], and page_limits, see `SparsePolicy.limits`.
    """

    page = 1
    old_tokens: Tensor
    budgets: Tensor
    page_limits: tuple[Tensor, Tensor]

    def old_of(self, lengths: Tensor) -> Tensor:
        return self.cache.quantized(lengths)

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        rows = self.cache.rows
        self.old_tokens, self.budgets = self.old()[:rows], self.budget()[:rows]
        self.page_limits = self.limits(self.page, torch.Size((rows, self.cache.kv_heads)))
        return super().draft_metadata(ahead, queries)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        """Scores of pages by a query [rows, 1, q_heads, head_dim] -> float32 [rows, kv_heads, pages]."""
        raise NotImplementedError

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        scores = self.query_scores(layer, query)
        return TokenIndex(*self.best_of(scores, self.page, *self.page_limits), self.page)
