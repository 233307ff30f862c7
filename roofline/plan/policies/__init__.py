"""Registry of the policies that choose tokens: selections that a step reads, and evictions from the cache.

Not here: their execution (runtime/drafting/policies).
"""

from ridgeplan.roofline.plan.plan import EvictionPolicy, Plan
from ridgeplan.roofline.plan.policies.base import EvictionSettings, Policy, Role, TokenEviction, TokenSelection
from ridgeplan.roofline.plan.policies.evictions import (
    DAPQ,
    EXPECTED_ATTENTION,
    H2O,
    LACACHE,
    PYRAMIDKV,
    RANDOM,
    aligned_budgets,
)
from ridgeplan.roofline.plan.policies.evictions import ORACLE as ORACLE_EVICTION
from ridgeplan.roofline.plan.policies.evictions import SNAPKV as SNAPKV_EVICTION
from ridgeplan.roofline.plan.policies.evictions import STREAMINGLLM as STREAMINGLLM_EVICTION
from ridgeplan.roofline.plan.policies.selections import (
    ALL,
    CLUSTERKV,
    ORACLE,
    PROGRESSIVE,
    QUEST,
    RETRIEVAL_HEAD,
    SHADOWKV,
    SNAPKV,
    SPECATTN,
    SPECEXTEND,
    STREAMINGLLM,
)

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
