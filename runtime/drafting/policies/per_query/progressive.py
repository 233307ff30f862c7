"""The tokens that the query scores highest by 2-bit keys; not published."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.selection.two_bit_top_k import two_bit_top_k
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.drafting.policies.sparse import TokenIndex
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class Progressive(PerQueryPolicy):
    """The 2-bit keys are the upper bits of the upper codes, so the cache must hold codes.

    lse: float32 [places, layers, batch, q_heads], the log-sum-exps of queries' scores, which weigh the query heads of a
    KV head in the next query's. A draft's query has those of the draft before it, in one place. A target's query has
    those of the token before it, so that what it chooses depends on the text alone, not on how rounds fell: the token
    at position p has the place p % places, and places outnumber the queries of a pass.
    """

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
        self.positions = self.cache.lengths[: self.cache.rows]
        return metadata

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        rows, keys = self.cache.rows, self.cache.two_bit_keys(layer)
        chosen = two_bit_top_k(
            query, keys, self.groups, self.budgets, self.lse[:, layer, :rows], max_k=self.max_budget,
            sinks=self.selection.sinks, positions=self.positions,
        )  # fmt: skip
        return TokenIndex(*chosen)

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
