"""Progressive precision: 2-bit keys choose for every draft query, 4-bit codes are read, 8-bit codes verify.

Not published: a set chosen once a round is stale after a token or two at long context, and 2-bit keys choose nearly as
well as exact ones.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.axes.draft_selection import Progressive
from ridgeplan.planner.plan import DraftCodes, KVCache, KVFormat, Placement, Plan, Speculation, Workload
from ridgeplan.planner.policies.policy import KV_BUDGET, Role, SelectionCost, TokenSelection, selecting
from ridgeplan.planner.policies.selection.quantspec import quantspec, quantspec_int8


def cost(_: Progressive) -> SelectionCost:
    """2-bit keys are scanned in every layer, at what their groups cost; the fused kernel keeps their scores on chip."""
    return SelectionCost(run_tokens=1, overlap=0.72)


def progressive(workload: Workload) -> Plan:
    """2-bit keys choose, INT4 weights and upper codes draft, for QuantSpec's INT8-KV target."""
    return replace(quantspec(workload), speculation=Speculation(4, DraftCodes.UPPER, Progressive()))


def progressive_exact(workload: Workload) -> Plan:
    """The same for a full-precision target: drafts read an INT4 shadow of its cache."""
    return replace(progressive(workload), kv=KVCache(KVFormat.SHADOW))


def progressive_int8(workload: Workload) -> Plan:
    """The same with 8-bit weights, whose upper halves drafts read."""
    return replace(quantspec_int8(workload), speculation=progressive(workload).speculation)


def specontext_two_bit(workload: Workload) -> Plan:
    """SpeContext with 2-bit keys in the place of its head: they stay on the device when their layer leaves it.

    Every layer chooses by its own query, so that its loads wait for it.
    """
    chosen = selecting(Progressive(), KVFormat.SHADOW)(workload)
    return replace(chosen, placement=Placement(True, min(KV_BUDGET, workload.context)))


PROGRESSIVE = TokenSelection(
    name="progressive",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    presets={
        "progressive": progressive,
        "progressive-exact": progressive_exact,
        "progressive-int8": progressive_int8,
        # 2-bit keys choose what the target itself reads, in full precision or as 8-bit codes; nothing is trained.
        "progressive-target": selecting(Progressive(), KVFormat.SHADOW),
        "progressive-target-int8": selecting(Progressive(), KVFormat.INT8),
        "specontext-two-bit": specontext_two_bit,
    },
)
