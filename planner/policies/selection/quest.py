"""Quest (Tang et al. 2024): pages of tokens, scored at every step by the minimum and maximum of their keys."""

from ridgeplan.planner.axes.draft_selection import Quest
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, drafting, selecting


def cost(selection: Quest) -> SelectionCost:
    """Two bounds and a score a page."""
    bounds = 2 / selection.page
    return SelectionCost(
        scored_keys=bounds, held_keys=bounds, score_rows=1 / selection.page, run_tokens=selection.page, overlap=0.71
    )


QUEST = TokenSelection(
    name="quest",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    presets={
        "magicdec-quest": drafting(Quest(), 4),
        "quest": selecting(Quest()),
    },
)
