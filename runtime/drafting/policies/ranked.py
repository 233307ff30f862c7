"""Policies that keep scores of all tokens and read the best: chosen once a round, for all layers at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.planner.axes.draft_selection import SparseSelection
from ridgeplan.runtime.drafting.policies.sparse import SparsePolicy, TokenIndex
from ridgeplan.runtime.kv.cache import Cache

UNSCORED = float(1 << 22)  # above any score; float32 still tells 2^22 positions apart


class RankedPolicy(SparsePolicy):
    """Scores float32 [layers, batch, kv_heads, candidates], which a subclass fills in.

    Tokens without a score were recent when the others were scored. They come first, the latest before others. page:
    tokens that are ranked together, by their mean score. shared: one set for all heads of a layer, by the sum.
    """

    page = 1
    shared = True
    known_ahead = True

    def __init__(self, selection: SparseSelection, cache: Cache) -> None:
        super().__init__(selection, cache)
        sizes = (cache.layers, cache.config.batch, cache.kv_heads, self.candidates)
        self.scores = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)
        self._chosen: tuple[Tensor, Tensor] | None = None

    def start(self) -> None:
        places = torch.arange(self.candidates, dtype=torch.float32, device=self.scores.device)
        self.scores.copy_((places + UNSCORED).expand_as(self.scores))

    def old_of(self, lengths: Tensor) -> Tensor:
        return super().old_of(lengths) // self.page * self.page

    def before_drafts(self) -> None:
        scores = self.scores.sum(2, keepdim=True) if self.shared else self.scores.clone()
        if self.page > 1:
            scores = functional.avg_pool1d(scores.flatten(0, 2), self.page).unflatten(0, scores.shape[:3])
        self._chosen = self.best(scores, self.page)

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        assert self._chosen is not None, "drafts have begun"
        index, count = (chosen[layer, : self.cache.rows] for chosen in self._chosen)
        return TokenIndex(index, count, self.page)


def prompt_scores(queries: Tensor, keys: Tensor, positions: Tensor, what: str) -> Tensor:
    """Scores of a prompt's cached tokens by its last queries -> float32 [kv_heads, tokens].

    queries, keys, positions: as `DraftPolicy.after_prefill` has them. what: "logits" or "probabilities", summed over
    queries and over the query heads of a KV head, which take turns to bound the workspace.
    """
    kv_heads, tokens, head_dim = keys.shape
    heads = (queries.float() * head_dim**-0.5).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    asking = torch.arange(-len(queries), 0, device=keys.device)
    later = (positions[:, None] > asking[:, None]).expand(kv_heads, -1, -1)
    out = torch.empty(kv_heads, tokens, dtype=torch.float32, device=keys.device)
    for head, (q, k, unseen) in enumerate(zip(heads, keys, later, strict=True)):
        weights = q @ k.float().mT
        if what == "probabilities":  # a query may see nothing of what an eviction left
            weights = weights.masked_fill(unseen, -torch.inf).softmax(-1).masked_fill(unseen, 0)
        out[head] = weights.sum((0, 1))
    return out


def prompt_lse(query: Tensor, keys: Tensor) -> Tensor:
    """Log-sum-exps of a prompt's last query [q_heads, head_dim] over its cached tokens -> float32 [q_heads]."""
    heads = (query.float() * keys.shape[2] ** -0.5).unflatten(0, (len(keys), -1))
    return torch.cat([(q @ k.float().mT).logsumexp(-1) for q, k in zip(heads, keys, strict=True)])
