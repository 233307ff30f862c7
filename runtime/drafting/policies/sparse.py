"""What policies that read a share of the tokens have in common: the budget, and the recent tokens, which all read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ridgeplan.kernels.selection.top_k import top_k
from ridgeplan.kernels.sparse_attention import sparse_decode_attention
from ridgeplan.planner.axes.draft_selection import SparseSelection
from ridgeplan.runtime.drafting.policies.base import DraftPolicy
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata
from ridgeplan.runtime.kv.offload.slot_loader import Choice, LoadsAhead


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Old tokens of a layer that a draft or a target's query reads, as `sparse_decode_attention` takes them.

    index: int32 [rows, 1 or kv_heads, K], numbers of tokens, or of pages of `page` tokens. count: int32 [rows, 1 or
    kv_heads], the entries that hold.
    """

    index: Tensor
    count: Tensor
    page: int = 1

    @property
    def choice(self) -> Choice:
        """As loads take it."""
        return self.index, self.count, self.page


class SparsePolicy(DraftPolicy):
    """A policy that chooses among a row's first `old` tokens; drafts also read all later ones, in full precision.

    candidates: most old tokens that a row can have.
    """

    selection: SparseSelection
    known_ahead: ClassVar[bool] = False  # a query's choice, in all layers, before the first one
    alike: bool = False  # it is then the same in all layers

    def __init__(self, selection: SparseSelection, cache: Cache) -> None:
        super().__init__(selection, cache)
        config = cache.config
        self._ahead: LoadsAhead | None = None
        self.reads_codes = config.drafts_read_codes
        # What is offloaded leaves in whole groups, so that tokens are old as they are in formats with codes.
        self.whole_groups = self.reads_codes or config.offload
        coded = config.groups(config.longest) * config.group
        copied = 2 * config.group if config.offload else 0  # behind copies of layers from the host
        self.candidates = coded if config.buffered else max(coded, config.slots(config.longest) + copied)

    def old_of(self, lengths: Tensor) -> Tensor:
        """Tokens that may be chosen at these lengths, int32 [n]: those in codes, or all but the recent ones."""
        return self.cache.quantized(lengths) if self.whole_groups else (lengths - self.selection.recent).clamp_min(0)

    def total_of(self, lengths: Tensor) -> Tensor:
        """Tokens that drafts read at these lengths, recent ones included, int32 [n]: clamp(ceil(ratio n), floor, n)."""
        shared = (lengths.double() * self.selection.ratio).ceil().int().clamp_min(self.selection.floor)
        return torch.minimum(shared, lengths)

    def budget_of(self, lengths: Tensor) -> Tensor:
        """Old tokens to choose at these lengths, int32 [n]: what recent ones leave of the total, at least the sinks."""
        old = self.old_of(lengths)
        left = self.total_of(lengths) - (lengths - old)
        return torch.minimum(left.clamp_min(self.selection.sinks), old)

    def old(self) -> Tensor:
        """`old_of` the cached tokens, int32 [batch]."""
        return self.old_of(self.cache.lengths)

    def budget(self) -> Tensor:
        """`budget_of` the cached tokens, int32 [batch]."""
        return self.budget_of(self.cache.lengths)

    @property
    def max_budget(self) -> int:
        """The largest budget at any length of a row."""
        selection = self.selection
        total = max(math.ceil(selection.ratio * self.cache.config.longest), selection.floor, selection.sinks, 1)
        return min(total, self.candidates)

    def best(self, scores: Tensor, page: int) -> tuple[Tensor, Tensor]:
        """The best pages within the budget, sinks always among them: index and count, as `top_k` has them.

        scores: float32 [..., rows, sets, pages], of the cache's first rows; they are written to.
        """
        return self.best_of(scores, page, *self.limits(page, scores.shape[:-1]))

    def limits(self, page: int, sets: torch.Size) -> tuple[Tensor, Tensor]:
        """Old pages and how many of them to choose, int32, of every set of sizes [..., rows, sets], flattened."""
        pages, wanted = self.old()[: sets[-2]] // page, -(-self.budget()[: sets[-2]] // page)
        lengths, k = (x[:, None].expand(sets).flatten().int() for x in (pages, wanted))
        return lengths, k

    def best_of(self, scores: Tensor, page: int, lengths: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`best` within these limits."""
        scores[..., : -(-self.selection.sinks // page)] = torch.inf
        index, count = top_k(scores.flatten(0, -2), lengths, k, -(-self.max_budget // page))
        return index.unflatten(0, scores.shape[:-1]), count.unflatten(0, scores.shape[:-1])

    def draft_metadata(self, ahead: int, queries: int = 1) -> AttentionMetadata:
        every = super().draft_metadata(ahead, queries)
        if self.known_ahead:
            self._ahead = self.cache.begin_loading(self._known_choice, self.alike)
        begin = every.begin if self.reads_codes else self.old()[: self.cache.rows]
        by_layer = every.by_layer
        if self.cache.config.elastic:
            by_layer = {layer: replace(reads, attend=self.attend) for layer, reads in by_layer.items()}
        return replace(every, begin=begin, attend=self.attend, by_layer=by_layer)

    def _known_choice(self, layer: int) -> Choice:
        return self.select(layer, self.cache.lengths).choice  # any tensor: no query is asked

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        """The old tokens that a draft's queries [rows, queries, q_heads, head_dim] read in a layer."""
        raise NotImplementedError

    def attend(self, layer: int, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attention of a draft's queries in a layer, to the selected and to the recent tokens; same shape."""
        return self.read(layer, query, metadata, self.select(layer, query))

    def read(self, layer: int, query: Tensor, metadata: AttentionMetadata, chosen: TokenIndex) -> Tensor:
        """Attention of queries in a layer to `chosen` and to the recent tokens; same shape."""
        cache = self.cache
        index = cache.load_chosen(layer, chosen.choice, self._ahead)
        codes = None if metadata.groups is None else cache.codes(layer)
        planes = cache.planes(layer) if cache.config.drafts_read_upper else None
        return sparse_decode_attention(
            query, *cache.full(layer), metadata.begin, metadata.end, index, chosen.count, codes, metadata.groups,
            value_rows=planes.value_rows if planes else None, page=chosen.page, lower=metadata.lower,
        )  # fmt: skip
