"""The pages whose keys may score highest for the query (Quest, Tang et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.selection.pages import page_bounds, page_scores
from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.planner.axes.draft_selection import SparseSelection
from ridgeplan.runtime.drafting.policies.per_query import PerQueryPolicy
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata


class Bounded(PerQueryPolicy):
    """Bounds [layers, batch, kv_heads, pages, 2, head_dim] of the keys in full precision, by pages of `page` tokens.

    Every round computes those of the group that will grow old next, while its keys are still in full precision.
    """

    def __init__(self, selection: SparseSelection, cache: Cache, page: int) -> None:
        self.page = page
        super().__init__(selection, cache)
        groups = -(-self.candidates // cache.config.group) + 1  # one more, which is not old yet
        keys, pages = cache.stores[0].keys, groups * cache.config.group // page
        sizes = (cache.layers, *keys.shape[1:3], pages, 2, keys.shape[4])
        self.bounds = torch.zeros(sizes, dtype=keys.dtype, device=keys.device)

    def bounds_of(self, keys: Tensor) -> Tensor:
        """Bounds [..., pages, 2, head_dim] of keys [rows, kv_heads, tokens, head_dim], whole pages."""
        raise NotImplementedError

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        whole = min(keys.shape[1] // self.page, self.bounds.shape[3])
        self.bounds[layer, row, :, :whole] = self.bounds_of(keys[None, :, : whole * self.page])[0]

    def before_round(self) -> None:
        keys, first = self.cache.oldest_group()
        pages = first[:, None] // self.page + torch.arange(keys.shape[3] // self.page, device=keys.device)
        at = pages.long()[None, :, None, :, None, None].expand(*keys.shape[:3], -1, 2, keys.shape[4])
        bounds = self.bounds_of(keys.flatten(0, 1))
        self.bounds.scatter_(3, at, bounds.unflatten(0, keys.shape[:2]))

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(ahead, queries)
        self.pages = self.old_tokens // self.page
        return metadata

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        return page_scores(query, self.bounds[layer, : self.cache.rows], self.pages)


class Quest(Bounded):
    """The smallest and the largest key of each page and channel."""

    def __init__(self, selection: selections.Quest, cache: Cache) -> None:
        super().__init__(selection, cache, selection.page)

    def bounds_of(self, keys: Tensor) -> Tensor:
        return page_bounds(keys, self.page)
