"""Policies that choose tokens: which a step reads (selection), and which are evicted from the cache for good.

Not here: their execution (runtime/drafting/policies).
"""

from ridgeplan.planner.plan import EvictionPolicy, Plan
from ridgeplan.planner.policies.eviction.budgets import aligned_budgets
from ridgeplan.planner.policies.eviction.dapq import DAPQ
from ridgeplan.planner.policies.eviction.expected_attention import EXPECTED_ATTENTION
from ridgeplan.planner.policies.eviction.h2o import H2O
from ridgeplan.planner.policies.eviction.lacache import LACACHE
from ridgeplan.planner.policies.eviction.oracle import ORACLE as ORACLE_EVICTION
from ridgeplan.planner.policies.eviction.pyramidkv import PYRAMIDKV
from ridgeplan.planner.policies.eviction.random import RANDOM
from ridgeplan.planner.policies.eviction.snapkv import SNAPKV as SNAPKV_EVICTION
from ridgeplan.planner.policies.eviction.streamingllm import STREAMINGLLM as STREAMINGLLM_EVICTION
from ridgeplan.planner.policies.policy import EvictionSettings, Policy, Role, TokenEviction, TokenSelection
from ridgeplan.planner.policies.selection.all import ALL
from ridgeplan.planner.policies.selection.clusterkv import CLUSTERKV
from ridgeplan.planner.policies.selection.oracle import ORACLE
from ridgeplan.planner.policies.selection.progressive import PROGRESSIVE
from ridgeplan.planner.policies.selection.quest import QUEST
from ridgeplan.planner.policies.selection.retrieval_head import RETRIEVAL_HEAD
from ridgeplan.planner.policies.selection.shadowkv import SHADOWKV
from ridgeplan.planner.policies.selection.snapkv import SNAPKV
from ridgeplan.planner.policies.selection.specattn import SPECATTN
from ridgeplan.planner.policies.selection.specextend import SPECEXTEND
from ridgeplan.planner.policies.selection.streamingllm import STREAMINGLLM

# By name in plans, in the order in which presets are listed.
SELECTIONS: dict[str, TokenSelection] = {
    policy.name: policy
    for policy in (
        ALL,
        STREAMINGLLM,
        SNAPKV,
        QUEST,
        SPECEXTEND,
        SPECATTN,
        PROGRESSIVE,
        ORACLE,
        RETRIEVAL_HEAD,
        CLUSTERKV,
        SHADOWKV,
    )
}
EVICTIONS: dict[str, TokenEviction] = {
    policy.name: policy
    for policy in (
        DAPQ,
        SNAPKV_EVICTION,
        H2O,
        PYRAMIDKV,
        STREAMINGLLM_EVICTION,
        LACACHE,
        EXPECTED_ATTENTION,
        RANDOM,
        ORACLE_EVICTION,
    )
}
POLICIES: tuple[Policy, ...] = (*SELECTIONS.values(), *EVICTIONS.values())


def selections(role: Role) -> tuple[TokenSelection, ...]:
    """Policies that plans may use in this role."""
    return tuple(policy for policy in SELECTIONS.values() if role in policy.roles)


def draft_selection(plan: Plan) -> TokenSelection:
    """The policy that chooses the tokens that the plan's drafts read."""
    return SELECTIONS[plan.speculation.selection.name]


def target_selection(plan: Plan) -> TokenSelection | None:
    """The policy that chooses the tokens that the plan's target reads; None if it reads all."""
    return SELECTIONS[plan.attention.selection.name] if plan.attention.active else None


def eviction(plan: Plan) -> TokenEviction | None:
    """The policy that evicts tokens after prefill, if the plan has one."""
    policy = plan.eviction.policy
    return None if policy is EvictionPolicy.NONE else EVICTIONS[policy.value]


def eviction_settings(plan: Plan) -> EvictionSettings | None:
    """The hyperparameters of the plan's eviction, if it has one. Raises PlanError for unknown or wrong ones."""
    policy = eviction(plan)
    return None if policy is None else policy.settings_of(plan)


def evicted_to(plan: Plan, layers: int) -> tuple[int, ...]:
    """The most prompt tokens that each layer keeps; empty without eviction. Raises PlanError for unknown settings.

    A budget of the whole context is every layer's.
    """
    context, settings = plan.workload.context, eviction_settings(plan)
    if settings is None:
        return ()
    budget = plan.eviction.tokens(context)
    if budget >= context:
        return (context,) * layers
    return aligned_budgets(settings.budgets(budget, layers), budget, plan.kv.step)
