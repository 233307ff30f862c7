"""SpeContext's retrieval head: a pruned draft model scores all tokens for all layers, with its own keys (4.3)."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.axes.draft_selection import RetrievalHead
from ridgeplan.planner.plan import MAX_PREFETCH, Placement, Plan, Workload
from ridgeplan.planner.policies.policy import KV_BUDGET, Role, SelectionCost, TokenSelection, selecting


def cost(selection: RetrievalHead) -> SelectionCost:
    """The head's own keys, as many as one layer's, are scanned once for all layers.

    A score a token and KV head is ranked, of every layer if these choose for themselves; one set for all heads has
    their mean.
    """
    return SelectionCost(
        scored_keys=1,
        scores_one_layer=True,
        sets_by_layer=selection.by_layer,
        held_keys=1,
        score_rows=1,
        run_tokens=1,
        shared_by_heads=selection.level == "batch",
        projects=True,
        overlap=0.90 if selection.level == "batch" else 0.80,
    )


def specontext(workload: Workload) -> Plan:
    """The head selects for the target; layers are offloaded at Algorithm 1's thresholds (SpeContext).

    Its loads may run as far ahead as they can: their slots are there anyway.
    """
    placement = Placement(True, min(KV_BUDGET, workload.context), prefetch=MAX_PREFETCH)
    return replace(selecting(RetrievalHead())(workload), placement=placement)


RETRIEVAL_HEAD = TokenSelection(
    name="retrieval-head",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    presets={"specontext": specontext, "specontext-resident": selecting(RetrievalHead())},
)
