"""SpecAttn: the tokens that the first draft's and the bonus token's verification attended to most (Eq 3)."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.plan import DraftCodes, DraftSelection, Plan, Speculation, Workload
from ridgeplan.planner.policies.policy import SPARSE_RATIO, Role, TokenSelection, drafting
from ridgeplan.planner.policies.selection.quantspec import quantspec


def specattn_int4(workload: Workload) -> Plan:
    """Upper codes of the selected tokens only: SpecAttn on QuantSpec's cache; not published."""
    speculation = Speculation(4, DraftCodes.UPPER, DraftSelection.VERIFIED, SPARSE_RATIO)
    return replace(quantspec(workload), speculation=speculation)


SPECATTN = TokenSelection(
    name="specattn",
    roles=frozenset({Role.DRAFT}),
    run_tokens=1,
    shared_by_heads=True,
    round_score_bytes=2 * 3 * 4,  # two fp32 rows of scores: each written once, read twice by top-k
    presets={"specattn": drafting(DraftSelection.VERIFIED, 7, SPARSE_RATIO), "specattn-int4": specattn_int4},
)
