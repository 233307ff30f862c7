"""Drafts read the tokens that the prompt's last queries attended to most (Li et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.selection.top_k import top_k
from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.ranked import prompt_scores
from ridgeplan.runtime.drafting.policies.sparse import SparsePolicy, TokenIndex
from ridgeplan.runtime.kv.cache import Cache

MAX_JOINED = 4096  # generated tokens that join the sets


class SnapKV(SparsePolicy):
    """A set for each KV head, chosen in prefill; what is generated later joins it as it grows old.

    index: int32 [layers, batch, kv_heads, K], a prompt's set and then the tokens from its end on. chosen, first: int32
    [batch], entries of the prompt's set, and the first token that was not old then.
    """

    selection: selections.SnapKV

    def __init__(self, selection: selections.SnapKV, cache: Cache) -> None:
        super().__init__(selection, cache)
        self.window = selection.window
        width = min(self.candidates, self.max_budget + MAX_JOINED)
        sizes = (cache.layers, cache.config.batch, cache.kv_heads, width)
        self.index = torch.zeros(sizes, dtype=torch.int32, device=cache.lengths.device)
        self.chosen, self.first = (torch.zeros_like(cache.lengths) for _ in "ab")
        self._count = self.chosen

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        scores = prompt_scores(queries, keys, positions, "probabilities")
        pooled = functional.max_pool1d(scores, self.selection.pool, 1, self.selection.pool // 2)
        pooled[:, : self.selection.sinks] = torch.inf
        lengths = torch.full_like(self.cache.lengths[:1], keys.shape[1])
        old, budget = self.old_of(lengths), self.budget_of(lengths)
        sets = len(pooled)
        index, _ = top_k(pooled, old.expand(sets).contiguous(), budget.expand(sets).contiguous(), self.max_budget)
        width = self.index.shape[3]
        later = torch.arange(width, dtype=torch.int32, device=keys.device) - budget + old
        self.index[layer, row] = later
        self.index[layer, row, :, : index.shape[1]] = torch.where(
            torch.arange(index.shape[1], device=keys.device) < budget, index, later[: index.shape[1]]
        )
        self.chosen[row], self.first[row] = budget[0], old[0]

    def before_round(self) -> None:
        joined = (self.old() - self.first).clamp_min(0)
        self._count = (self.chosen + joined).clamp_max(self.index.shape[3])

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        rows = self.cache.rows
        index = self.index[layer, :rows]
        count = self._count[:rows, None].expand(index.shape[:2]).contiguous()
        return TokenIndex(index, count)
