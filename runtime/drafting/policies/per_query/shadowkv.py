"""Chunks whose mean keys score highest for the query, and the prompt's outlier chunks (ShadowKV, Sun et al. 2024).

The keys and values themselves stay where the cache has them: the paper's low-rank keys save memory, not reads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.per_query.quest import Bounded
from ridgeplan.runtime.kv.cache import Cache


class ShadowKV(Bounded):
    """Landmarks, the means of chunks' keys after RoPE: bounds whose ends are equal, so that they score as one key.

    outlier: bool [layers, batch, kv_heads, chunks], the prompt's chunks with a key that is least like their landmark.
    They come first.
    """

    selection: selections.ShadowKV

    def __init__(self, selection: selections.ShadowKV, cache: Cache) -> None:
        super().__init__(selection, cache, selection.chunk)
        self.outlier = torch.zeros(self.bounds.shape[:4], dtype=torch.bool, device=self.bounds.device)

    def start(self) -> None:
        self.outlier.zero_()

    def bounds_of(self, keys: Tensor) -> Tensor:
        landmarks = keys.unflatten(2, (-1, self.page)).mean(3)
        return torch.stack([landmarks, landmarks], dim=3)

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        super().after_prefill(layer, row, queries, keys, positions)
        chunks = min(keys.shape[1] // self.page, self.bounds.shape[3])
        landmarks = self.bounds[layer, row, :, :chunks, :1]
        members = keys[:, : chunks * self.page].unflatten(1, (-1, self.page))
        alike = functional.cosine_similarity(members.float(), landmarks.float(), dim=-1).amin(-1)
        worst = alike.topk(min(self.selection.outliers, chunks), dim=1, largest=False).indices
        self.outlier[layer, row].scatter_(1, worst, True)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        scores = super().query_scores(layer, query)
        return scores.masked_fill(self.outlier[layer, : self.cache.rows], torch.inf)
