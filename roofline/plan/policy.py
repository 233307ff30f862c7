"""What a policy is: base classes of token selections and evictions, their costs, and the registry.

A policy is one class in roofline/plan/policies: a frozen dataclass whose fields are its hyperparameters with their
ranges. It states its cost, presets, quality, and what is known of its drafts' acceptance. `@policy` registers it under
its name; a class in runtime/policies executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import numpy as np

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import Checked, flag, number, one_of, whole
from ridgeplan.roofline.execution import MAX_TOKENS
from ridgeplan.roofline.ops import SCORE_BYTES, SELECTED_INDEX_BYTES, TOP_K_PASSES
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS

Preset = Callable[[Any], Any]  # from a Workload to a Plan, which are defined above policies

MIN_RATIO = 1e-6  # one token in a million
SPARSE_RATIO = 0.07  # SpecAttn, appendix: near-optimal for all its designs
RECENT = 128  # tokens that are always read
SINKS = 4  # StreamingLLM, section 3.2: four initial tokens suffice
MAX_KEPT = 4096  # sinks or recent tokens
KV_BUDGET = 2048  # tokens that a target reads; SpeContext, section 7.3
EVICTION_BUDGET = 1024  # tokens that an eviction keeps
FULL_RULER = 96.65  # average with every token; see `TokenEviction.ruler`


class PlanError(ValueError):
    """A malformed or contradictory plan; the message names the value and what is allowed."""


class PlanPart(Checked):
    """Raises PlanError for values that are not allowed."""

    error = PlanError


@dataclass(frozen=True, kw_only=True)
class SelectionCost:
    """The memory traffic and memory of a selection.

    scored_keys: the keys that a step reads to score the cached tokens, as a share of one layer's keys.
    scored_once: one pass scores keys for all layers; otherwise each layer scores its own.
    set_per_layer: that one pass computes scores for every layer, and they are ranked together.
    has_projections: the policy projects queries and keys of its own, of the model's sizes.
    held_keys: what the policy keeps beside the cache, as a share of one layer's keys.
    scores_per_token: fp32 scores per cached token and KV head.
    normalizes_logits: the scores are probabilities. The logits of all query heads are written, and read again once
    their sums are known.
    page_tokens: tokens that are contiguous and therefore read together: 1 for single tokens, the page size, or
    unlimited if the selected tokens form one run.
    shared_by_kv_heads: all KV heads of a layer share one set, and their keys of a token are contiguous on the host.
    scored_by_query: each query of a verification writes a score for every token, and one of these scores is read later.
    overlap: share of KV_BUDGET selected tokens, without those read beside the budget, that the previous step selected
    too (SpeContext, Fig 6b), measured at 16k tokens (docs/quality.md). The default is that of models' own attention.
    """

    scored_keys: float = 0.0
    scored_once: bool = False
    set_per_layer: bool = False
    has_projections: bool = False
    held_keys: float = 0.0
    scores_per_token: float = 0.0
    normalizes_logits: bool = False
    page_tokens: float = UNLIMITED_TOKENS
    shared_by_kv_heads: bool = False
    scored_by_query: bool = False
    small_kernels: int = 0
    overlap: float = 0.74

    def overlap_at(self, budget: float, unbudgeted: float = 0.0) -> float:
        """The overlap of `budget` tokens, of which fewer are new the more they are, as the fourth root of the budget.

        unbudgeted: tokens that are read beside them, at every step the same.
        """
        new = min(1.0, (1 - self.overlap) * (KV_BUDGET / budget) ** 0.25)
        return 1 - new * budget / (budget + unbudgeted)

    def contiguous_on_host(self, kv_heads: int) -> float:
        """Tokens of one KV head that are contiguous on the host, or as many tokens' keys of several heads."""
        return self.page_tokens * (kv_heads if self.shared_by_kv_heads else 1)

    def slot_table_bytes(self, kv_heads: int) -> float:
        """Bytes per token of a table of the slots that hold it: an entry for each set, and page of a set."""
        if self.page_tokens == UNLIMITED_TOKENS:
            return SELECTED_INDEX_BYTES
        return SELECTED_INDEX_BYTES * (1 if self.shared_by_kv_heads else kv_heads) / self.page_tokens

    def scored_keys_per_step(self, layers: int) -> float:
        """Keys scored at a step of a model with `layers` layers, in multiples of one layer's keys."""
        return self.scored_keys * self.selections_per_step(layers)

    def selections_per_step(self, layers: int) -> int:
        """How often a step scores and selects."""
        return 1 if self.scored_once else layers

    def selected_layers(self, layers: int) -> int:
        """Layers that a step selects for."""
        return 1 if self.chosen_once else layers

    @property
    def chosen_once(self) -> bool:
        """Whether all layers read the same tokens."""
        return self.scored_once and not self.set_per_layer

    def projected_params(self, shape: ModelShape) -> int:
        """Parameters of its own projections: keys, and queries of the model's heads or of each layer's KV heads."""
        queries = shape.layers * shape.kv_heads if self.set_per_layer else shape.q_heads
        return self.has_projections * shape.hidden * shape.head_dim * (queries + shape.kv_heads)

    def ranked_scores(self, kv_heads: int) -> float:
        """Scores of one layer that top-k ranks per cached token."""
        return self.scores_per_token * (1 if self.shared_by_kv_heads else kv_heads)

    def logit_bytes(self, q_heads: int) -> float:
        """Bytes of logits per cached token, of the one pass that makes them probabilities."""
        return SCORE_BYTES * self.normalizes_logits * q_heads

    def held_score_bytes(self, kv_heads: int) -> float:
        """Bytes of one layer's scores per cached token."""
        return SCORE_BYTES * self.scores_per_token * kv_heads

    def query_score_bytes(self, kv_heads: int) -> float:
        """Bytes of one layer's scores per cached token that each drafted token adds."""
        return self.held_score_bytes(kv_heads) * self.scored_by_query

    def scores_at_once(self, layers: int) -> int:
        """Layers whose scores exist at a time."""
        return layers if self.set_per_layer else 1

    def moved_score_bytes(self, kv_heads: int) -> float:
        """Bytes that selecting moves for one layer per cached token: scores are written, and read by top-k.

        For one set of all heads they are read once to be added up, and only their sums are ranked.
        """
        ranked = (1 + TOP_K_PASSES) * SCORE_BYTES * self.ranked_scores(kv_heads)
        return 2 * self.held_score_bytes(kv_heads) + ranked if self.shared_by_kv_heads else ranked


@dataclass(frozen=True, kw_only=True)
class TokenSelection(PlanPart):
    """Base of the policies that select the tokens a step reads.

    name: the policy's own. ratio: share of the cached tokens that a draft may read; a target has a budget instead
    (`TargetAttention`).
    """

    name: str
    ratio: float

    for_target: ClassVar[bool] = False  # a target may read by it too; not what only a verification of all can score
    executable: ClassVar[bool] = True  # by the runtime; if not, plans with it are only estimated
    # Whether `recommend` considers drafts of the policy, presets included. Without rows of it in planner/acceptance
    # they compete at the low end of their acceptance's band, so that no plan wins by what nobody measured.
    searched: ClassVar[bool] = False
    per_query: ClassVar[bool] = False  # selected anew by every draft's query, else once a round
    selected_before_pass: ClassVar[bool] = False  # for all of its layers
    from_verification: ClassVar[bool] = False  # by the last verification's scores, which age from draft to draft
    needs_codes: ClassVar[bool] = False  # in the cache, whether drafts read them or not
    needs_head: ClassVar[bool] = False  # a retrieval head, which is trained for the model
    needs_all_keys: ClassVar[bool] = False  # in full precision on the device
    supports_mla: ClassVar[bool] = False  # has a cost model for latent attention
    attention_class: ClassVar[str | None] = None  # of kernels of its own that attend to what it selects
    # What is known of its drafts' disagreement before any row of acceptance is: log of the factor by which it exceeds
    # that of other selections.
    log_disagreement_prior: ClassVar[float] = 0.0

    @property
    def min_tokens(self) -> int:
        """Tokens that a draft reads at least, if the cache has as many."""
        return 0

    @property
    def unbudgeted_tokens(self) -> int:
        """Tokens that every query reads beside its budget, if the cache has as many."""
        return 0

    @property
    def among_all(self) -> Self:
        """The same selection among all cached tokens, prompt and generated ones, as drafts make it."""
        return self

    def share_of(self, tokens: float, ratio: Any) -> Any:
        """The share of a cache of `tokens` that a draft reads with `ratio`, one or an array, instead of its own."""
        share = np.maximum(ratio, self.min_tokens / tokens) + self.unbudgeted_tokens / tokens
        return np.minimum(share, 1.0)

    def cost(self) -> SelectionCost:
        """What selecting costs with these hyperparameters. Every policy states its own (`policy`)."""
        raise NotImplementedError(self.name)

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """Named plans that use the policy."""
        return {}


@dataclass(frozen=True, kw_only=True)
class SparseSelection(TokenSelection):
    """A share `ratio` of the cached tokens, at least `floor` of them (SpecAttn, section 3.3).

    Always among them are the first `sinks` tokens and the latest: those in full precision if old tokens are read as
    codes, else the last `recent` ones.
    """

    ratio: float = number(MIN_RATIO, 1, default=SPARSE_RATIO)
    floor: int = whole(0, MAX_TOKENS, default=256)
    sinks: int = whole(0, MAX_KEPT, default=SINKS)
    recent: int = whole(1, MAX_KEPT, default=RECENT)

    @property
    def min_tokens(self) -> int:
        """The floor."""
        return self.floor


@dataclass(frozen=True, kw_only=True)
class PromptSelection(SparseSelection):
    """A selection by what is computed from a prompt's keys after prefill.

    keep_generated: a target selects its budget among the prompt's tokens and reads all generated ones beside it, as
    published (SpeContext, sections 2.2 and 7.2.2). If false, generated tokens are preprocessed in turn and compete for
    the budget. Drafts, whose ratio is of all cached tokens, always select among all.
    """

    keep_generated: bool = flag(True)

    @property
    def among_all(self) -> Self:
        """With generated tokens among the candidates."""
        return replace(self, keep_generated=False)


@dataclass(frozen=True, kw_only=True)
class TokenEviction(PlanPart):
    """Base of the policies that evict tokens from the cache once, after prefill.

    Fields are hyperparameters beside the budget.
    """

    name: ClassVar[str]
    executable: ClassVar[bool] = True  # by the runtime; if not, plans with it are only estimated
    # Its scores make sense of what earlier chunks of a prompt left and of the present one, so that it may evict after
    # each chunk.
    chunked: ClassVar[bool] = False
    supports_mla: ClassVar[bool] = False  # has a cost model for latent attention
    # Average of RULER's tasks with EVICTION_BUDGET tokens kept (Llama-3-8B; DapQ, Table 11), which ranks policies that
    # are equally fast; None if it is not published.
    ruler: ClassVar[float | None] = None

    @property
    def scored_queries(self) -> float:
        """Queries whose attention scores a prompt's tokens, or UNLIMITED_TOKENS if all the prompt's own do."""
        return 0

    @property
    def appended_tokens(self) -> int:
        """Most tokens that prefill runs after a prompt to score it, and then drops."""
        return 0

    def budgets(self, budget: int, layers: int) -> tuple[int, ...]:
        """Tokens that each layer keeps; `budget` on average."""
        return (budget,) * layers

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """Named plans that use the policy."""
        return {}


# Policies by name, in the order in which they are listed.
SELECTIONS: dict[str, type[TokenSelection]] = {}
TARGET_SELECTIONS: dict[str, type[TokenSelection]] = {}  # those that a target may read by
EVICTIONS: dict[str, type[TokenEviction]] = {}

Policy = TypeVar("Policy", bound=TokenSelection | TokenEviction)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def policy(kind: type[Policy]) -> type[Policy]:
    """Makes the class a frozen dataclass with keyword arguments, and registers it under its name.

    Raises TypeError for a selection without a cost, which would look free.
    """
    if issubclass(kind, TokenSelection) and kind.cost is TokenSelection.cost:
        raise TypeError(f"the selection {kind.__name__} has no cost(); allowed: one that returns a SelectionCost")
    registered = dataclass(frozen=True, kw_only=True)(kind)
    if issubclass(registered, TokenEviction):
        EVICTIONS[registered.name] = registered
    elif issubclass(registered, TokenSelection):
        name = registered().name  # type: ignore[call-arg]
        SELECTIONS[name] = registered
        if registered.for_target:
            TARGET_SELECTIONS[name] = registered
    return registered


def policy_name(name: str) -> Any:
    """The field `name` of a selection."""
    return one_of((name,), default=name)


@policy
class AllTokens(TokenSelection):
    """Every token (QuantSpec, section 4.1). Its presets are in policies/dense.py."""

    name: str = policy_name("all")
    ratio: float = number(1, 1, default=1.0)

    def cost(self) -> SelectionCost:
        """Nothing is selected."""
        return SelectionCost()

    for_target: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    supports_mla: ClassVar[bool] = True


def make_selection(name: str, **hyperparameters: Any) -> TokenSelection:
    """The selection of this name. Raises PlanError for an unknown name, and for hyperparameters out of range."""
    if name not in SELECTIONS:
        raise PlanError(f"draft selection is {name!r}; allowed: {', '.join(SELECTIONS)}")
    return SELECTIONS[name](**hyperparameters)
