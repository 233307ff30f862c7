"""SpecExtend (Cha et al. 2025): the pages that the last verified token attended to most, chosen once a round."""

from ridgeplan.planner.axes.draft_selection import SpecExtend
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, drafting


def cost(selection: SpecExtend) -> SelectionCost:
    """As for SpecAttn; the means of pages are ranked."""
    return SelectionCost(score_rows=1, run_tokens=selection.page, shared_by_heads=True)


SPECEXTEND = TokenSelection(
    name="specextend",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    cost=cost,
    from_verification=True,
    presets={"specextend": drafting(SpecExtend(), 4)},
)
