"""The tokens that the query scores highest by 2-bit keys; not published."""

from __future__ import annotations

from torch import Tensor

from ridgeplan.kernels.selection.two_bit_top_k import two_bit_top_k
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.drafting.policies.sparse import TokenIndex
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class Progressive(PerQueryPolicy):
    """The 2-bit keys are the upper bits of the upper codes, so the cache must hold codes."""

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(ahead, queries)
        self.groups = self.old_tokens // self.cache.config.group
        return metadata

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        keys, sinks = self.cache.two_bit_keys(layer), self.selection.sinks
        return TokenIndex(*two_bit_top_k(query, keys, self.groups, self.budgets, max_k=self.max_budget, sinks=sinks))

    def attend(self, layer: int, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Where drafts read upper codes, one operation scans, chooses and reads."""
        if not self.cache.config.drafts_read_upper:
            return super().attend(layer, query, metadata)
        planes = self.cache.planes(layer)
        assert planes is not None, "plans that choose by 2-bit keys hold codes"
        return progressive_attention(
            query, *self.cache.full(layer), metadata.begin, metadata.end, self.cache.codes(layer), planes, self.groups,
            self.budgets, max_k=self.max_budget, sinks=self.selection.sinks,
        )  # fmt: skip
