"""The fields of a policy: its name in plans, its cost, its quality, and its presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ridgeplan.planner.plan import (
    DraftSelection,
    Eviction,
    EvictionPolicy,
    Plan,
    PlanError,
    Speculation,
    TargetAttention,
    TargetSelection,
    Workload,
)
from ridgeplan.roofline.catalog.checks import Checked, build
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS

Preset = Callable[[Workload], Plan]
SPARSE_RATIO = 0.07  # SpecAttn, appendix: near-optimal for all its designs
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
class TokenSelection(Policy):
    """A policy that chooses the tokens a step reads.

    roles: who may use it in a plan. executable: the roles that the runtime supports; the others are only estimated.
    scored_keys: keys read at every step to score the cached tokens, as a share of one layer's keys. scores_one_layer:
    scoring runs once for all layers, not in each. round_score_bytes: bytes of scores written and read once a round, per
    cached token and layer. run_tokens: tokens that are read together because they lie together: 1 where single ones are
    chosen, a page, or without a limit where the chosen ones are a run or are kept in a copy. shared_by_heads: one set
    for all KV heads of a layer, whose keys of a token then lie together.
    What is known of its drafts' acceptance is in planner/acceptance; of a new policy nothing needs to be.
    """

    roles: frozenset[Role]
    executable: frozenset[Role] = frozenset()
    scored_keys: float = 0.0
    scores_one_layer: bool = False
    round_score_bytes: float = 0.0
    run_tokens: float = UNLIMITED_TOKENS
    shared_by_heads: bool = False

    def run_of(self, kv_heads: int) -> float:
        """Tokens of one KV head that lie together, or as many tokens' keys of several heads."""
        return self.run_tokens * (kv_heads if self.shared_by_heads else 1)

    def scored_keys_of(self, layers: int) -> float:
        """Keys scored at a step of a model with `layers` layers, in multiples of one layer's keys."""
        return self.scored_keys * (1 if self.scores_one_layer else layers)

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

    settings: the type of its hyperparameters. executable: if not, it is only estimated. ruler: the average of RULER's
    tasks with 1024 tokens kept (Llama-3-8B; DapQ, Table 11), which ranks policies that are equally fast; None where it
    is not published.
    """

    settings: type[EvictionSettings] = EvictionSettings
    executable: bool = False
    ruler: float | None = None

    def settings_of(self, plan: Plan) -> EvictionSettings:
        """The plan's hyperparameters. Raises PlanError for one that the policy does not have or allow."""
        return build(self.settings, dict(plan.eviction.settings), f"{self.name} settings: ")

    def loss(self, plan: Plan) -> str:
        """What the plan's target gives up by it."""
        budget = plan.eviction.tokens(plan.workload.context)
        kept = f"{self.name} keeps {budget} of {plan.workload.context} prompt tokens"
        if self.ruler is None:
            return kept
        return f"{kept}: RULER {self.ruler:g} of {FULL_RULER:g} with {EVICTION_BUDGET} tokens (DapQ, Table 11)"


def drafting(selection: DraftSelection, gamma: int, ratio: float) -> Preset:
    """Full-precision drafts that read `ratio` of the tokens."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, speculation=Speculation(gamma, selection=selection, ratio=ratio))

    return preset


def selecting(selection: TargetSelection) -> Preset:
    """Plain decoding whose target reads up to KV_BUDGET tokens a step."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, attention=TargetAttention(selection, min(KV_BUDGET, workload.context)))

    return preset


def evicting(policy: EvictionPolicy) -> Preset:
    """Plain decoding on up to EVICTION_BUDGET tokens of the prompt."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, eviction=Eviction(policy, min(EVICTION_BUDGET, workload.context)))

    return preset
