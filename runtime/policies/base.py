"""What selection policies share, and those that need no scores: all tokens, and StreamingLLM."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ridgeplan.kernels.selection import top_k
from ridgeplan.kernels.sparse_attention import sparse_decode_attention
from ridgeplan.roofline.plan.policy import SparseSelection, TokenSelection
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.offload.slots import ChosenTokens, LoadsAhead
from ridgeplan.runtime.policies.registry import SELECTORS


class PromptObserver:
    """Learns from a prompt while it is processed. The hooks of this base class do nothing."""

    window = 0  # number of the prompt's last queries that `after_prefill` receives

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        """A row's prompt, int64 [tokens], is about to be processed."""

    def observe_prompt(self, depth: int, row: int, start: int, stream: Tensor) -> None:
        """stream: [tokens, hidden] of a row's prompt from `start` on, after `depth` layers; layers write over it."""

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        """A layer of a row's prompt is in the cache.

        queries: [window or fewer, q_heads, head_dim], of the last tokens. keys: [kv_heads, tokens, head_dim], of the
        tokens that the layer keeps. positions: int64 [kv_heads or 1, tokens], of the keys, counted from the prompt's
        end: its last token is at -1.
        """


class TokenSelector(PromptObserver):
    """Chooses what each draft of a round reads, or each query of a target, with the hyperparameters of the plan.

    An engine has one for drafts, and one for a target that selects (speculation/sparse_target.py). Between `start` and
    the end of a generation its methods run inside the round that a CUDA graph captures: they work on tensors of fixed
    size and never ask the device for a value. Only `before_prefill` and `after_prefill` run outside.
    """

    uses_head: ClassVar[bool] = False  # whether the constructor takes the model's retrieval head
    follows_cache = False  # whether `before_round` and passes keep its state right where a prompt continues the cache

    def __init__(self, selection: TokenSelection, builder: AttentionMetadataBuilder) -> None:
        self.selection, self.builder, self.cache = selection, builder, builder.cache

    def start(self) -> None:
        """Forgets the last generation; the cache has been emptied."""

    def before_round(self) -> None:
        """A round begins, with or without drafts. State that follows the cache is updated here."""

    def before_drafts(self) -> None:
        """A round's drafts begin. Selections that they share are made here. Plain decoding never calls this."""

    def before_pass(self, tokens: Tensor, offset: int) -> None:
        """A pass over tokens [rows, queries] is about to run, from `offset` positions after the cached ones on."""

    def with_offset(self, offset: int) -> Self:
        """This selector for a target's query at `offset` positions after the cached tokens. State is shared."""
        other = copy.copy(self)
        other.builder = self.builder.with_offset(offset)
        return other

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        """Metadata of a draft that forwards `queries` tokens per row, the first `offset` after the cached tokens.

        offset: of all rows, or int32 [rows] where all tokens are read.
        """
        return self.builder.draft_metadata(offset, queries)

    def target_metadata(self, queries: int) -> AttentionMetadata:
        """Metadata of the verification of `queries` tokens. A policy that selects by its scores requests them here."""
        return self.builder.target_metadata(queries)

    def after_verification(self, accepted: Tensor) -> None:
        """The last verification accepted `accepted` drafts of each row, int64 [rows]; they are not in the cache yet."""


@SELECTORS.register("all")
class AllTokensSelector(TokenSelector):
    """The whole cache; nothing is chosen."""

    follows_cache = True


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
    def choice(self) -> ChosenTokens:
        """As loads take it."""
        return self.index, self.count, self.page


class SparseSelector(TokenSelector):
    """A policy that chooses among the old tokens of each row. Drafts also read all later ones, in full precision.

    candidates: most old tokens that a row can have.
    """

    selection: SparseSelection
    follows_cache = True
    selected_before_pass: ClassVar[bool] = False  # a query's choice, in all layers, before the first one
    shared_across_layers: bool = False  # it is then the same in all layers

    def __init__(self, selection: SparseSelection, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        config = builder.config
        self._ahead: LoadsAhead | None = None
        self.reads_codes = config.buffered or config.drafts_read_upper  # upper codes alone, or both
        # What is offloaded leaves in whole groups, so that tokens are old as they are in formats with codes.
        self.whole_groups = self.reads_codes or config.offload
        coded = config.groups(config.longest) * config.group
        copied = 2 * config.group if config.offload else 0  # behind copies of layers from the host
        self.candidates = coded if config.buffered else max(coded, config.slots(config.longest) + copied)

    def old_tokens_at(self, lengths: Tensor) -> Tensor:
        """Tokens that may be chosen at these lengths, int32 [n]: those in codes, or all but the recent ones."""
        return self.builder.quantized(lengths) if self.whole_groups else (lengths - self.selection.recent).clamp_min(0)

    def total_tokens_at(self, lengths: Tensor) -> Tensor:
        """Tokens that drafts read at these lengths, recent ones included, int32 [n]: clamp(ceil(ratio n), floor, n)."""
        shared = (lengths.double() * self.selection.ratio).ceil().int().clamp_min(self.selection.floor)
        return torch.minimum(shared, lengths)

    def budget_at(self, lengths: Tensor) -> Tensor:
        """Old tokens to choose at these lengths, int32 [n]: what recent ones leave of the total, at least the sinks.

        And those that the policy selects beside its budget.
        """
        old = self.old_tokens_at(lengths)
        left = self.total_tokens_at(lengths) - (lengths - old)
        return torch.minimum(left.clamp_min(self.selection.sinks) + self.selection.unbudgeted_tokens, old)

    def old_tokens(self) -> Tensor:
        """`old_tokens_at` the cached tokens, int32 [batch]."""
        return self.old_tokens_at(self.builder.lengths)

    def budget(self) -> Tensor:
        """`budget_at` the cached tokens, int32 [batch]."""
        return self.budget_at(self.builder.lengths)

    def scored_old_tokens(self) -> Tensor:
        """The old tokens among which scores select, int32 [batch]."""
        return self.old_tokens()

    @property
    def max_budget(self) -> int:
        """The largest budget at any length of a row."""
        selection = self.selection
        total = max(math.ceil(selection.ratio * self.builder.config.longest), selection.floor, selection.sinks, 1)
        return min(total + selection.unbudgeted_tokens, self.candidates)

    def limits(self, page: int, sets: torch.Size) -> tuple[Tensor, Tensor]:
        """Scored pages and how many of them to choose, int32, of every set of sizes [..., rows, sets], flattened."""
        pages, budgets = self.scored_old_tokens()[: sets[-2]] // page, -(-self.budget()[: sets[-2]] // page)
        lengths, k = (x[:, None].expand(sets).flatten().int() for x in (pages, budgets))
        return lengths, k

    def top_pages(
        self, scores: Tensor, page: int, limits: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best pages within the budget, sinks always among them: index and count, as `top_k` has them.

        scores: float32 [..., rows, sets, pages], of the cache's first rows; they are written to. limits: the result of
        `limits` for these scores, if it is known already.
        """
        lengths, k = limits or self.limits(page, scores.shape[:-1])
        scores[..., : -(-self.selection.sinks // page)] = torch.inf
        index, count = top_k(scores.flatten(0, -2), lengths, k, -(-self.max_budget // page))
        return index.unflatten(0, scores.shape[:-1]), count.unflatten(0, scores.shape[:-1])

    def draft_metadata(self, offset: int | Tensor, queries: int = 1) -> AttentionMetadata:
        metadata = super().draft_metadata(offset, queries)
        if self.selected_before_pass:
            self._ahead = self.cache.begin_loading(self._choice_of, self.shared_across_layers)
        begin = metadata.begin if self.reads_codes else self.old_tokens()[: self.cache.rows]
        by_layer = metadata.by_layer
        if self.builder.config.elastic:
            by_layer = {layer: replace(of_layer, attend=self.attend) for layer, of_layer in by_layer.items()}
        return replace(metadata, begin=begin, attend=self.attend, by_layer=by_layer)

    def _choice_of(self, layer: int) -> ChosenTokens:
        return self.select(layer, self.builder.lengths).choice  # any tensor serves: the selection needs no query

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
        loaded = None if metadata.groups is None else cache.loaded_codes(layer)
        if loaded is not None:
            return sparse_decode_attention(
                query, *cache.full(layer), metadata.begin, metadata.end, chosen.index, chosen.count, loaded,
                metadata.groups, slots=index, page=chosen.page, lower=True,
            )  # fmt: skip
        codes = None if metadata.groups is None else cache.codes(layer)
        planes = cache.planes(layer) if self.builder.config.drafts_read_upper else None
        return sparse_decode_attention(
            query, *cache.full(layer), metadata.begin, metadata.end, index, chosen.count, codes, metadata.groups,
            value_rows=planes.value_rows if planes else None, page=chosen.page, lower=metadata.lower,
        )  # fmt: skip


@SELECTORS.register("streamingllm")
class StreamingLLMSelector(SparseSelector):
    """In a full-precision cache the latest tokens are one run, so that only the sinks are gathered."""

    selected_before_pass = True
    shared_across_layers = True

    def __init__(self, selection: SparseSelection, builder: AttentionMetadataBuilder) -> None:
        super().__init__(selection, builder)
        self._chosen: tuple[Tensor, Tensor] | None = None

    def old_tokens_at(self, lengths: Tensor) -> Tensor:
        if self.whole_groups:
            return super().old_tokens_at(lengths)
        run = (self.total_tokens_at(lengths) - self.selection.sinks).clamp_min(self.selection.recent)
        return (lengths - run).clamp_min(0)

    def before_round(self) -> None:
        old, budget = self.old_tokens()[:, None], self.budget()[:, None]
        places = torch.arange(self.max_budget, dtype=torch.int32, device=old.device)
        index = torch.where(places < self.selection.sinks, places, old - budget + places)
        self._chosen = index[:, None].contiguous(), budget

    def select(self, layer: int, query: Tensor) -> TokenIndex:
        assert self._chosen is not None, "a round has begun"
        index, count = (chosen[: self.cache.rows] for chosen in self._chosen)
        return TokenIndex(index, count)
