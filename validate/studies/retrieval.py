"""Selections compared with the model's own attention: hit rates, and overlap of adjacent steps.

A text goes through the model token by token, and the model reads every token. At each step the runtime's policies
choose tokens for the same queries, at equal budgets (SpeContext, Fig 5 and 6b).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.roofline.plan.plan import DraftCodes, KVCache, KVFormat, Plan, Speculation, require, require_within
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.roofline.plan.policy import MIN_RATIO, SparseSelection, make_selection
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.policies import token_selector
from ridgeplan.runtime.policies.base import SparseSelector, TokenIndex, TokenSelector
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.retrieval.head import Head
from ridgeplan.validate.acceptance import Passage, named_shape
from ridgeplan.validate.engines import SharedWeights, bound_head
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.studies.methods import METHODS, RANDOM
from ridgeplan.validate.studies.recorded import FullHead, attention_weights, features_before

MODEL = "model"  # selects the model's top tokens, by which the methods are measured
RECENT = 128  # tokens that every method reads, as the caches' buffers do


@dataclass(frozen=True)
class RetrievalSizes:
    """What is measured. Raises PlanError for values out of range. tokens: steps after each of `passages` contexts."""

    contexts: tuple[int, ...] = (4096,)
    budgets: tuple[int, ...] = (256, 512, 1024)
    methods: tuple[str, ...] = tuple(METHODS)
    tokens: int = 32
    passages: int = 1

    def __post_init__(self) -> None:
        for name in self.methods:
            require(name in METHODS, f"method is {name!r}; allowed: {', '.join(METHODS)}")
        smallest, shortest = 2 * RECENT, min(self.contexts)
        require(shortest > smallest, f"context is {shortest}; allowed: more than {smallest}, the smallest budget")
        for budget in self.budgets:
            require_within(f"budget at a context of {shortest}", budget, smallest, shortest - 1)
        require_within("tokens", self.tokens, 2, 1 << 16)
        require_within("passages", self.passages, 1, 1 << 12)


@dataclass(frozen=True)
class RetrievalRow:
    """Figures of a method, each the mean over steps, layers and KV heads, and of `hit` by layer too.

    hit: share of the `budget` tokens with the most attention that the method reads. distant: the same of those that
    are neither sinks nor among the latest. mass: share of the attention that its tokens have. overlap: share of the
    chosen tokens that were chosen one step before.
    """

    context: int
    budget: int
    method: str
    hit: float
    distant: float
    mass: float
    overlap: float
    by_layer: tuple[float, ...]


def plan_of(plain: Plan) -> Plan:
    """A plan for the same workload whose cache serves every method: in full precision, with codes beside it."""
    drafts = Speculation(1, DraftCodes.FULL, make_selection("progressive"))
    return replace(plain, kv=KVCache(KVFormat.SHADOW), speculation=drafts)


def study(
    model: str,
    text: str,
    sizes: RetrievalSizes,
    head: str | None = None,
    *,
    yarn: bool = False,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> Iterator[RetrievalRow]:
    """Rows of each context.

    head: the file of a retrieval head, for the methods that choose by one; by default the one that ships for the model.
    Raises what `ridgeplan.runtime.load` raises, and PromptError for a text that is too short.
    """
    methods = sizes.methods
    needs_head = any(METHODS[name][0] == "retrieval-head" for name in methods)
    passage = Passage(text, "text", sizes.contexts, -(-sizes.tokens // 8) * 8, yarn=yarn)
    shared = SharedWeights(model, device)
    for plan in map(plan_of, passage.plans(named_shape(model))):
        context, figures = plan.workload.context, _Figures()
        with shared.engine(plan) as engine:
            bound = bound_head(engine, head)
            if needs_head and bound is None:
                raise WorkloadError("methods of a retrieval head need one: give its file, or leave them out")
            batch = prompt_batch(engine.tokenizer, context + sizes.tokens, sizes.passages, text)
            for number, ids in enumerate(batch):
                on_progress(f"{context} tokens", number, sizes.passages)
                _measure(engine, bound, sizes, ids, figures)
        yield from figures.rows(context)


class _Figures:
    """Sums of figures by method and budget."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self.overlaps: dict[tuple[str, int], list[float]] = defaultdict(list)  # of each step and the one before

    def add(self, method: str, budget: int, layers: Tensor) -> None:
        """layers: [layers, 3], of one step: hit, distant and mass, means over KV heads."""
        self._sums[method, budget].append(layers)

    def rows(self, context: int) -> Iterator[RetrievalRow]:
        """A row for each method and budget."""
        for (method, budget), steps in self._sums.items():
            layers = torch.stack(steps).nanmean(0)
            hit, distant, mass = layers.nanmean(0).tolist()
            overlaps = self.overlaps[method, budget]
            overlap = sum(overlaps) / len(overlaps)
            yield RetrievalRow(context, budget, method, hit, distant, mass, overlap, tuple(layers[:, 0].tolist()))


@dataclass(eq=False)
class _Chooser:
    """A method at a budget, and its policy."""

    method: str
    budget: int
    policy: SparseSelector
    sinks: int

    def chosen(self, layer: int, query: Tensor, tokens: int) -> Tensor:
        """The chosen old tokens among `tokens`, bool [kv_heads, tokens]."""
        kv_heads = self.policy.cache.kv_heads
        if self.method == RANDOM:
            return self._random(kv_heads, tokens)
        return mask_of(self.policy.select(layer, query), kv_heads, tokens)

    def first_recent(self, tokens: Tensor) -> Tensor:
        """The first of the tokens that are all read, of `tokens` with the query's own; both int32 [1]."""
        if self.method == MODEL:
            return tokens
        self.policy.before_round()
        begin = self.policy.draft_metadata(0).begin[:1]
        return tokens - RECENT if self.method == RANDOM else begin

    def _random(self, kv_heads: int, tokens: int) -> Tensor:
        old, device = tokens - RECENT, self.policy.cache.lengths.device
        picked = torch.rand(kv_heads, old, device=device).topk(self.budget - RECENT, dim=1).indices
        return torch.zeros(kv_heads, tokens, dtype=torch.bool, device=device).scatter_(1, picked, True)


def mask_of(index: TokenIndex, kv_heads: int, tokens: int) -> Tensor:
    """bool [kv_heads, tokens]: the tokens of the first row's index list."""
    entries = index.index[0].long()
    held = torch.arange(entries.shape[1], device=entries.device) < index.count[0][:, None]
    none = -(-tokens // index.page)  # a page behind all tokens, for entries that the list does not hold
    pages = torch.zeros(len(entries), none + 1, dtype=torch.bool, device=entries.device)
    pages.scatter_(1, entries.masked_fill(~held, none), True)
    wide = pages.repeat_interleave(index.page, 1) if index.page > 1 else pages
    return wide[:, :tokens].expand(kv_heads, -1)


def _choosers(cache: Cache, sizes: RetrievalSizes, head: Head | None, features: Tensor | None) -> list[list[_Chooser]]:
    """For each method a chooser per budget. The policies of a method share their index.

    features: of the token before each, for a head of full width.
    """
    reading = AttentionMetadataBuilder(cache, DraftCodes.FULL)
    choosers = []
    for method in sizes.methods:
        name, options = METHODS[method]
        selection = make_selection(name, recent=RECENT, **options).among_all
        assert isinstance(selection, SparseSelection)
        first: TokenSelector
        if isinstance(selection, RetrievalHead) and head is not None and features is not None:
            first = FullHead(selection, reading, head, features)
        else:
            first = token_selector(selection, reading, head)
        assert isinstance(first, SparseSelector)
        first.start()
        choosers.append([_at_budget(method, first, budget) for budget in sizes.budgets])
    return choosers


def _at_budget(method: str, first: SparseSelector, budget: int) -> _Chooser:
    policy = copy.copy(first)
    policy.selection = replace(first.selection, ratio=MIN_RATIO, floor=budget)
    return _Chooser(method, budget, policy, policy.selection.sinks)


@torch.inference_mode()
def _measure(engine: Engine, head: Head | None, sizes: RetrievalSizes, ids: Sequence[int], figures: _Figures) -> None:
    """Adds the figures of one passage: a context, then `sizes.tokens` steps."""
    cache = engine.cache
    assert cache is not None, "the engine is open"
    text = torch.tensor(ids, device=engine.device)
    cache.reset(1)
    needs_features = head is not None and head.config.inputs == FullHead.inputs
    methods = _choosers(cache, sizes, head, features_before(engine, text) if needs_features else None)
    observers = [choosers[0].policy for choosers in methods]
    prefill(engine.decoder, engine.weights, cache, 0, text[: -sizes.tokens], observers=observers)
    choosers = [chooser for method in methods for chooser in method]
    choosers += [_Chooser(MODEL, budget, methods[0][0].policy, 4) for budget in sizes.budgets]
    before = None
    for token in text[-sizes.tokens :]:
        step = _Step(cache, choosers)
        engine.decoder.step(engine.weights, cache, token.view(1, 1), step.metadata(token.view(1, 1)))
        before = step.add_to(figures, before)
        cache.advance(torch.ones_like(cache.lengths))


class _Step:
    """One step of the model. Its attention also runs every chooser; all figures are read at the end of the step."""

    def __init__(self, cache: Cache, choosers: Sequence[_Chooser]) -> None:
        self._cache, self._choosers, self._tokens = cache, choosers, int(cache.lengths[0]) + 1
        self._sinks = torch.tensor([chooser.sinks for chooser in choosers], device=cache.lengths.device)
        self._step_figures: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def metadata(self, tokens: Tensor) -> AttentionMetadata:
        """Of the target's pass over tokens [1, 1]."""
        for chooser in self._choosers:
            if chooser.method != MODEL:
                chooser.policy.before_pass(tokens, 0)
        counted = self._cache.lengths[:1] + 1
        self._first_recent = torch.cat([chooser.first_recent(counted) for chooser in self._choosers])
        return replace(AttentionMetadataBuilder(self._cache).target_metadata(1), attend=self._attend)

    def add_to(self, figures: _Figures, before: Tensor | None) -> Tensor:
        """Adds the step's figures, and the overlap with the step before; returns what was chosen.

        before, and the result: bool [choosers, layers, kv_heads, tokens].
        """
        chosen = torch.stack(self._chosen, dim=1)
        for chooser, layers in zip(self._choosers, torch.stack(self._step_figures, dim=1).cpu(), strict=True):
            figures.add(chooser.method, chooser.budget, layers)
        if before is not None:
            again = (chosen[..., : before.shape[-1]] & before).flatten(1).sum(1)
            shares = again / chosen.flatten(1).sum(1).clamp_min(1)
            for chooser, share in zip(self._choosers, shares.tolist(), strict=True):
                figures.overlaps[chooser.method, chooser.budget].append(share)
        return chosen

    def _attend(self, layer: int, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        keys, values = self._cache.full(layer)
        weights = attention_weights(query[0], keys[0, :, : self._tokens])[0]
        tops = {budget: _top(weights, budget) for budget in {chooser.budget for chooser in self._choosers}}
        chosen = torch.stack([
            tops[chooser.budget] if chooser.method == MODEL else chooser.chosen(layer, query, self._tokens)
            for chooser in self._choosers
        ])  # fmt: skip
        recent = torch.arange(self._tokens, device=chosen.device) >= self._first_recent[:, None]
        top = torch.stack([tops[chooser.budget] for chooser in self._choosers])
        self._chosen.append(chosen)
        self._step_figures.append(compared(chosen | recent[:, None], top, weights, self._sinks))
        return decode_attention(query, keys, values, metadata.begin, metadata.end)


def _top(weights: Tensor, budget: int) -> Tensor:
    """Where the `budget` largest weights of each row are, bool [kv_heads, tokens]."""
    mask = torch.zeros_like(weights, dtype=torch.bool)
    return mask.scatter_(1, weights.topk(budget, dim=1).indices, True)


def compared(read: Tensor, top: Tensor, weights: Tensor, sinks: Tensor) -> Tensor:
    """hit, distant and mass [choosers, 3], means over KV heads.

    read, top: bool [choosers, kv_heads, tokens]; weights: [kv_heads, tokens]; sinks: int64 [choosers].
    """
    places = torch.arange(top.shape[2], device=top.device)
    distant = top & ((places >= sinks[:, None]) & (places < top.shape[2] - RECENT))[:, None]
    shares = [(read & tokens).sum(2) / tokens.sum(2) for tokens in (top, distant)]  # NaN where none is wanted
    mass = (weights * read).sum(2) / weights.sum(1)
    return torch.stack([*shares, mass], dim=1).nanmean(2)
