"""An oracle: every query scores all the keys that it may read, and reads the best. A bound, never the fastest."""

from ridgeplan.planner.axes.draft_selection import Oracle
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, selecting


def cost(_: Oracle) -> SelectionCost:
    """All keys are scanned in every layer, and a score a token and KV head is ranked."""
    return SelectionCost(scored_keys=1, score_rows=1, run_tokens=1)


ORACLE = TokenSelection(
    name="oracle",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    searched=False,
    presets={"oracle-target": selecting(Oracle())},
)
