"""SpeContext's retrieval head: a pruned draft model scores all tokens for all layers, with its own keys (4.3)."""

from __future__ import annotations

from ridgeplan.planner.plan import Placement, Plan, TargetAttention, TargetSelection, Workload
from ridgeplan.planner.policies.policy import KV_BUDGET, Role, SelectionCost, TokenSelection


def specontext(workload: Workload) -> Plan:
    """The retrieval head selects for the target; layers are offloaded at Algorithm 1's thresholds (SpeContext)."""
    budget = min(KV_BUDGET, workload.context)
    attention = TargetAttention(TargetSelection.RETRIEVAL_HEAD, budget)
    return Plan(workload, attention=attention, placement=Placement(True, budget))


RETRIEVAL_HEAD = TokenSelection(
    name="retrieval-head",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    cost=lambda _: SelectionCost(scored_keys=1, scores_one_layer=True, run_tokens=1),
    presets={"specontext": specontext},
)
