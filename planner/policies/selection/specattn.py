"""SpecAttn: the tokens that the first draft's and the bonus token's verification attended to most (Eq 3)."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.axes.draft_selection import SpecAttn
from ridgeplan.planner.plan import DraftCodes, Plan, Speculation, Workload
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, drafting
from ridgeplan.planner.policies.selection.quantspec import quantspec


def cost(selection: SpecAttn) -> SelectionCost:
    """Verification adds up queries and the query heads of a KV head before it writes their scores."""
    return SelectionCost(score_rows=1, run_tokens=1, shared_by_heads=not selection.per_kv_head)


def specattn_int4(workload: Workload) -> Plan:
    """Upper codes of the selected tokens only: SpecAttn on QuantSpec's cache; not published."""
    return replace(quantspec(workload), speculation=Speculation(4, DraftCodes.UPPER, SpecAttn()))


SPECATTN = TokenSelection(
    name="specattn",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    cost=cost,
    from_verification=True,
    presets={"specattn": drafting(SpecAttn(), 7), "specattn-int4": specattn_int4},
)
