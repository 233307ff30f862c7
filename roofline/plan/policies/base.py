"""Base classes of policies: name in plans, cost, quality, presets, and models that have no cost model for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import Checked, build
from ridgeplan.roofline.ops import SCORE_BYTES, SELECTED_INDEX_BYTES, TOP_K_PASSES
from ridgeplan.roofline.plan.draft_selection import DraftSelection
from ridgeplan.roofline.plan.plan import (
    Eviction,
    EvictionPolicy,
    KVCache,
    KVFormat,
    Plan,
    PlanError,
    Speculation,
    TargetAttention,
    Workload,
    require,
)
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS

Preset = Callable[[Workload], Plan]
MAGICDEC_RATIO = 0.25  # QuantSpec, section 5.1: the baselines' budget is a quarter of the context
KV_BUDGET = 2048  # tokens; SpeContext, section 7.3
EVICTION_BUDGET = 1024  # tokens
FULL_RULER = 96.65  # average with every token; see `TokenEviction.ruler`


class Role(StrEnum):
    """Who reads only the selected tokens."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy: its name in plans, and the presets that use it."""

    name: str
    presets: Mapping[str, Preset] = field(default_factory=dict)

    def loss(self, plan: Plan) -> str:
        """What the plan's target gives up by it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SelectionCost:
    """What choosing tokens moves and holds.

    scored_keys: what is scanned to score the cached tokens at every step, as a share of one layer's keys.
    scores_one_layer: keys are scored in one pass for all layers, not in each. sets_by_layer: that pass makes scores of
    every layer, which are ranked together. projects: it has queries and keys of its own, by projections as the model's.
    held_keys: what is kept beside the cache for it, as a share of one layer's keys. score_rows: scores in fp32 per
    cached token and KV head. run_tokens: tokens that are read together because they lie together: 1 where single
    ones are chosen, a page, or without a limit where the chosen ones are a run. shared_by_heads: one set for all KV
    heads of a layer, whose keys of a token lie together on the host. overlap: share of KV_BUDGET chosen tokens that the
    step before had chosen too (SpeContext, Fig 6b): measured at 16k tokens (docs/quality.md), by default what the
    models' own attention has there.
    """

    scored_keys: float = 0.0
    scores_one_layer: bool = False
    sets_by_layer: bool = False
    projects: bool = False
    held_keys: float = 0.0
    score_rows: float = 0.0
    run_tokens: float = UNLIMITED_TOKENS
    shared_by_heads: bool = False
    overlap: float = 0.74

    def overlap_at(self, budget: float) -> float:
        """The same of `budget` tokens: of more, fewer are new, as the fourth root of the budget."""
        return 1 - min(1.0, (1 - self.overlap) * (KV_BUDGET / budget) ** 0.25)

    def run_of(self, kv_heads: int) -> float:
        """Tokens of one KV head that lie together on the host, or as many tokens' keys of several heads."""
        return self.run_tokens * (kv_heads if self.shared_by_heads else 1)

    def slot_table_bytes(self, kv_heads: int) -> float:
        """Bytes per token of a table of the slots that hold it: an entry for each set, and page of a set."""
        if self.run_tokens == UNLIMITED_TOKENS:
            return SELECTED_INDEX_BYTES
        return SELECTED_INDEX_BYTES * (1 if self.shared_by_heads else kv_heads) / self.run_tokens

    def scored_keys_of(self, layers: int) -> float:
        """Keys scored at a step of a model with `layers` layers, in multiples of one layer's keys."""
        return self.scored_keys * self.times_of(layers)

    def times_of(self, layers: int) -> int:
        """How often a step scores and chooses."""
        return 1 if self.scores_one_layer else layers

    def choices_of(self, layers: int) -> int:
        """Layers that a step chooses for."""
        return 1 if self.chosen_once else layers

    @property
    def chosen_once(self) -> bool:
        """Whether all layers read the same tokens."""
        return self.scores_one_layer and not self.sets_by_layer

    def projected_params(self, shape: ModelShape) -> int:
        """Parameters of its own projections: keys, and queries of the model's heads or of each layer's KV heads."""
        queries = shape.layers * shape.kv_heads if self.sets_by_layer else shape.q_heads
        return self.projects * shape.hidden * shape.head_dim * (queries + shape.kv_heads)

    def ranked_scores(self, kv_heads: int) -> float:
        """Scores of one layer that top-k ranks per cached token."""
        return self.score_rows * (1 if self.shared_by_heads else kv_heads)

    def held_score_bytes(self, kv_heads: int) -> float:
        """Bytes of one layer's scores per cached token."""
        return SCORE_BYTES * self.score_rows * kv_heads

    def scores_at_once(self, layers: int) -> int:
        """Layers whose scores exist at a time."""
        return layers if self.sets_by_layer else 1

    def moved_score_bytes(self, kv_heads: int) -> float:
        """Bytes that choosing moves for one layer per cached token: scores are written, and read by top-k.

        For one set of all heads they are read once to be added up, and only their sums are ranked.
        """
        ranked = (1 + TOP_K_PASSES) * SCORE_BYTES * self.ranked_scores(kv_heads)
        return 2 * self.held_score_bytes(kv_heads) + ranked if self.shared_by_heads else ranked


def _nothing(_: DraftSelection) -> SelectionCost:
    return SelectionCost()


@dataclass(frozen=True, kw_only=True)
class TokenSelection(Policy):
    """A policy that chooses the tokens a step reads.

    roles: who may use it in a plan. executable: the roles that the runtime supports; the others are only estimated.
    cost: of choosing, for a policy's hyperparameters. from_verification: chosen once a round by the scores of the last
    verification, which age from draft to draft. searched: whether `recommend` considers it beyond its presets.
    What is known of its drafts' acceptance is in planner/acceptance; of a new policy nothing needs to be.
    """

    roles: frozenset[Role]
    executable: frozenset[Role] = frozenset()
    cost: Callable[[Any], SelectionCost] = _nothing
    from_verification: bool = False
    searched: bool = True

    def loss(self, plan: Plan) -> str:
        """What the plan's target gives up by it."""
        return f"{self.name} reads {plan.attention.budget} tokens a step"


@dataclass(frozen=True)
class EvictionSettings(Checked):
    """Hyperparameters of an eviction policy beside its budget, and what they cost. Raises PlanError.

    Subclasses add fields.
    """

    error = PlanError

    @property
    def scored_queries(self) -> float:
        """Queries whose attention scores a prompt's tokens, or UNLIMITED_TOKENS where all the prompt's own do."""
        return 0

    @property
    def appended_tokens(self) -> int:
        """Most tokens that prefill runs after a prompt, to score it, and then drops."""
        return 0

    def budgets(self, budget: int, layers: int) -> tuple[int, ...]:
        """Tokens that each layer keeps; `budget` on average."""
        return (budget,) * layers


@dataclass(frozen=True, kw_only=True)
class TokenEviction(Policy):
    """A policy that evicts tokens from the cache once, after prefill.

    settings: the type of its hyperparameters. executable: if not, it is only estimated. chunked: its scores make sense
    of what earlier chunks of a prompt left and of the present one, so that it may evict after each chunk. ruler: the
    average of RULER's tasks with 1024 tokens kept (Llama-3-8B; DapQ, Table 11), which ranks policies that are equally
    fast; None where it is not published.
    """

    settings: type[EvictionSettings] = EvictionSettings
    executable: bool = False
    chunked: bool = False
    ruler: float | None = None

    def settings_of(self, plan: Plan) -> EvictionSettings:
        """The plan's hyperparameters. Raises PlanError for what the policy does not have or allow, chunks too."""
        chunk = plan.eviction.chunk
        require(
            self.chunked or not chunk,
            f"eviction chunk is {chunk}; allowed: 0, as {self.name} scores a whole prompt at once",
        )
        return build(self.settings, dict(plan.eviction.settings), f"{self.name} settings: ")

    def loss(self, plan: Plan) -> str:
        """What the plan's target gives up by it."""
        budget = plan.eviction.tokens(plan.workload.context)
        kept, how = f"{self.name} keeps {budget} of {plan.workload.context} prompt tokens", ""
        if chunk := plan.eviction.chunk_at(plan.workload.context):
            kept, how = f"{kept}, chosen after every {chunk}", " chosen at once"
        if self.ruler is None:
            return kept
        return f"{kept}: RULER {self.ruler:g} of {FULL_RULER:g} with {EVICTION_BUDGET} tokens{how} (DapQ, Table 11)"


def drafting(selection: DraftSelection, gamma: int) -> Preset:
    """Full-precision drafts that read the selected tokens."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, speculation=Speculation(gamma, selection=selection))

    return preset


def selecting(selection: DraftSelection, kv: KVFormat = KVFormat.FULL) -> Preset:
    """Plain decoding whose target reads up to KV_BUDGET tokens a step."""

    def preset(workload: Workload) -> Plan:
        attention = TargetAttention(selection, min(KV_BUDGET, workload.context))
        return Plan(workload, kv=KVCache(kv), attention=attention)

    return preset


def evicting(policy: EvictionPolicy) -> Preset:
    """Plain decoding on up to EVICTION_BUDGET tokens of the prompt."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, eviction=Eviction(policy, min(EVICTION_BUDGET, workload.context)))

    return preset


# Policies that read everything, or choose tokens by position alone.
UNSCORED = {EvictionPolicy.NONE.value, "all", "streamingllm"}


def missing_cost_model(plan: Plan, shape: ModelShape) -> str | None:
    """Why the plan's policies cannot be priced for this model; None if they can."""
    if shape.is_mla and (chosen := _chosen_by(plan)):
        return (
            f"{chosen} chooses tokens for each KV head, and {shape.name} caches one latent row for all heads; allowed: "
            "plans that read every token, and StreamingLLM"
        )
    return None


def _chosen_by(plan: Plan) -> str | None:
    """The policy that scores tokens head by head, to keep or read some of them."""
    policies = (plan.eviction.policy.value, plan.attention.selection.name, plan.speculation.selection.name)
    return next((name for name in policies if name not in UNSCORED), None)
