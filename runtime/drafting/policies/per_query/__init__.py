"""Policies that choose anew for every query and KV head; one file each.

Not here: policies that choose once a round for all layers (ranked.py), or before a pass begins (retrieval_head.py).
"""

from __future__ import annotations

from torch import Tensor

from ridgeplan.runtime.drafting.policies.sparse import SparsePolicy, TokenIndex


class PerQueryPolicy(SparsePolicy):
    """A subclass scores pages of `page` tokens by the query.

    What it scores by is made of whole groups, so that old tokens are those that the rule of codes would quantize, also
    in a full-precision cache.
    """

    page = 1

    def old_of(self, lengths: Tensor) -> Tensor:
        return self.cache.quantized(lengths)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        """Scores of pages by a query [rows, 1, q_heads, head_dim] -> float32 [rows, kv_heads, pages]."""
        raise NotImplementedError

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        return TokenIndex(*self.best(self.query_scores(layer, query), self.page), self.page)
