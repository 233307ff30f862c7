"""Policies that choose anew for every query: Quest, ShadowKV, progressive selection, and the oracle.

The keys and values themselves stay where the cache has them, in full rank: ShadowKV's low-rank keys are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.selection import page_bounds, page_scores, two_bit_top_k
from ridgeplan.kernels.sparse_attention import progressive_attention
from ridgeplan.roofline.execution import quantized_groups
from ridgeplan.roofline.plan.policies import selections
from ridgeplan.roofline.plan.policy import PromptSelection, SparseSelection
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.base import SparseSelector, TokenIndex
from ridgeplan.runtime.policies.registry import SELECTORS


class PerQuerySelector(SparseSelector):
    """A subclass scores pages of `page` tokens by the query.

    What it scores by is made of whole groups, so that old tokens are those that the rule of codes would quantize, also
    in a full-precision cache. What depends on lengths alone is computed once for all layers of a query: scored_tokens
    and budgets int32 [rows], and page_limits, see `SparseSelector.limits`.
    """

    page = 1
    scored_tokens: Tensor
    budgets: Tensor
    page_limits: tuple[Tensor, Tensor]

    def old_tokens_at(self, lengths: Tensor) -> Tensor:
        return self.builder.quantized(lengths)

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        rows = self.cache.rows
        self.scored_tokens, self.budgets = self.scored_old_tokens()[:rows], self.budget()[:rows]
        self.page_limits = self.limits(self.page, torch.Size((rows, self.cache.kv_heads)))
        return super().draft_metadata(offset, queries)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        """Scores of pages by a query [rows, 1, q_heads, head_dim] -> float32 [rows, kv_heads, pages]."""
        raise NotImplementedError

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        scores = self.query_scores(layer, query)
        return TokenIndex(*self.top_pages(scores, self.page, self.page_limits), self.page)


class PromptSelector(PerQuerySelector):
    """A policy that may select among a prompt's tokens alone, and then reads all generated ones (`keep_generated`).

    In full precision on the device these are read as one run from the prompt's old tokens on. As codes, or from layers
    on the host, they are listed behind the selected tokens. A prompt's recent tokens count inside the budget.
    """

    selection: PromptSelection

    @property
    def follows_cache(self) -> bool:  # type: ignore[override]
        """A later prompt's tokens would all be read as generated ones where these are kept."""
        return not self._keeps

    @property
    def _keeps(self) -> bool:
        return self.selection.keep_generated

    def _selectable(self) -> Tensor:
        """Tokens of each row among which the budget is spent, recent ones included, int32 [batch]."""
        lengths = self.builder.lengths
        return torch.minimum(lengths, self.cache.prompt_tokens) if self._keeps else lengths

    def scored_old_tokens(self) -> Tensor:
        return self.old_tokens_at(self._selectable())

    def budget(self) -> Tensor:
        return self.budget_at(self._selectable())

    def old_tokens(self) -> Tensor:
        return super().old_tokens() if self.whole_groups else self.scored_old_tokens()

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        selected = super().select(layer, query)
        return self._with_generated(selected) if self._keeps and self.whole_groups else selected

    def _with_generated(self, selected: TokenIndex) -> TokenIndex:
        """The selected pages, and all generated ones that are old."""
        rows, page = self.cache.rows, self.page
        first, end = ((tokens[:rows] // page)[:, None] for tokens in (self.scored_old_tokens(), self.old_tokens()))
        index, count = selected.index, selected.count
        width = index.shape[2] + self.cache.config.max_generated // page
        places = torch.arange(width, dtype=torch.int32, device=index.device)
        listed = (first - count)[..., None] + places
        known = functional.pad(index, (0, width - index.shape[2]))
        index = torch.where(places < count[..., None], known, listed.clamp_(min=0).minimum(end[..., None]))
        return TokenIndex(index, count + end - first, page)

    def index_generated(self) -> None:
        """Adds the group that grows old next to what this policy scores by."""
        raise NotImplementedError

    def before_round(self) -> None:
        if not self._keeps:
            self.index_generated()


class PageBoundsSelector(PromptSelector):
    """Bounds [layers, batch, kv_heads, pages, 2, head_dim] of the keys in full precision, by pages of `page` tokens.

    Every round computes those of the group that will grow old next, while its keys are still in full precision.
    """

    def __init__(self, selection: PromptSelection, builder: AttentionMetadataBuilder, page: int) -> None:
        self.page = page
        super().__init__(selection, builder)
        cache = self.cache
        groups = -(-self.candidates // cache.config.group) + 1  # one more, which is not old yet
        keys, pages = cache.stores[0].keys, groups * cache.config.group // page
        sizes = (cache.layers, *keys.shape[1:3], pages, 2, keys.shape[4])
        self.bounds = torch.zeros(sizes, dtype=keys.dtype, device=keys.device)

    def bounds_of(self, keys: Tensor) -> Tensor:
        """Bounds [..., pages, 2, head_dim] of keys [rows, kv_heads, tokens, head_dim], whole pages."""
        raise NotImplementedError

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        pages = min(keys.shape[1] // self.page, self.bounds.shape[3])
        self.bounds[layer, row, :, :pages] = self.bounds_of(keys[None, :, : pages * self.page])[0]

    def index_generated(self) -> None:
        first = self.old_tokens()
        keys = self.cache.oldest_group(first)
        pages = first[:, None] // self.page + torch.arange(keys.shape[3] // self.page, device=keys.device)
        at = pages.long()[None, :, None, :, None, None].expand(*keys.shape[:3], -1, 2, keys.shape[4])
        bounds = self.bounds_of(keys.flatten(0, 1))
        self.bounds.scatter_(3, at, bounds.unflatten(0, keys.shape[:2]))

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(offset, queries)
        self.pages = self.scored_tokens // self.page
        return metadata

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        return page_scores(query, self.bounds[layer, : self.cache.rows], self.pages)


@SELECTORS.register("quest")
class QuestSelector(PageBoundsSelector):
    """The smallest and the largest key of each page and channel."""

    def __init__(self, selection: selections.Quest, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder, selection.page)

    def bounds_of(self, keys: Tensor) -> Tensor:
        return page_bounds(keys, self.page)


@SELECTORS.register("shadowkv")
class ShadowKVSelector(PageBoundsSelector):
    """Landmarks, the means of chunks' keys after RoPE: bounds whose ends are equal, so that they score as one key.

    outlier: bool [layers, batch, kv_heads, chunks], the old chunks of a prompt with a key least like their landmark.
    They are selected beside the budget.
    """

    selection: selections.ShadowKV

    def __init__(self, selection: selections.ShadowKV, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder, selection.chunk)
        self.outlier = torch.zeros(self.bounds.shape[:4], dtype=torch.bool, device=self.bounds.device)

    def start(self) -> None:
        self.outlier.zero_()

    def bounds_of(self, keys: Tensor) -> Tensor:
        landmarks = keys.unflatten(2, (-1, self.page)).mean(3)
        return torch.stack([landmarks, landmarks], dim=3)

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        super().after_prefill(layer, row, queries, keys, positions)
        group = self.cache.config.group
        chunks = quantized_groups(keys.shape[1], group) * group // self.page
        if not chunks:
            return
        landmarks = self.bounds[layer, row, :, :chunks, :1]
        members = keys[:, : chunks * self.page].unflatten(1, (-1, self.page))
        alike = functional.cosine_similarity(members.float(), landmarks.float(), dim=-1).amin(-1)
        worst = alike.topk(min(self.selection.outliers, chunks), dim=1, largest=False).indices
        self.outlier[layer, row].scatter_(1, worst, True)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        scores = super().query_scores(layer, query)
        return scores.masked_fill(self.outlier[layer, : self.cache.rows], torch.inf)


@SELECTORS.register("progressive")
class ProgressiveSelector(PerQuerySelector):
    """The 2-bit keys are the upper bits of the upper codes, so the cache must hold codes."""

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(offset, queries)
        self.groups = self.scored_tokens // self.cache.config.group
        return metadata

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        keys, sinks = self.cache.two_bit_keys(layer), self.selection.sinks
        return TokenIndex(*two_bit_top_k(query, keys, self.groups, self.budgets, max_k=self.max_budget, sinks=sinks))

    def attend(self, layer: int, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Where drafts read upper codes, one operation scans, chooses and reads."""
        if not self.builder.config.drafts_read_upper:
            return super().attend(layer, query, metadata)
        planes = self.cache.planes(layer)
        assert planes is not None, "plans that choose by 2-bit keys hold codes"
        return progressive_attention(
            query, *self.cache.full(layer), metadata.begin, metadata.end, self.cache.codes(layer), planes, self.groups,
            self.budgets, max_k=self.max_budget, sinks=self.selection.sinks,
        )  # fmt: skip


@SELECTORS.register("oracle")
class OracleSelector(PerQuerySelector):
    """The scores that attention to every token leaves; its output is not used.

    Of two calls, the first leaves the log-sum-exps to which the second one's probabilities refer.
    """

    def __init__(self, selection: SparseSelection, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        cache = self.cache
        sizes = (cache.config.batch, cache.kv_heads, self.candidates)
        self._scores = torch.zeros(sizes, dtype=torch.float32, device=cache.lengths.device)
        self._lse = torch.zeros(cache.config.batch, cache.q_heads, dtype=torch.float32, device=cache.lengths.device)

    def query_scores(self, layer: int, query: Tensor) -> Tensor:
        every = self.builder.draft_metadata(0)
        rows = slice(self.cache.rows)
        scores = ScoreRequest(self._scores[rows], "last", "probabilities", self._lse[rows])
        codes = None if every.groups is None else self.cache.codes(layer)
        keys, values = self.cache.full(layer)
        arguments = (query, keys, values, every.begin, every.end, codes, every.groups)
        for _ in range(2):
            decode_attention(*arguments, lower=every.lower, scores=scores)
        return scores.out
