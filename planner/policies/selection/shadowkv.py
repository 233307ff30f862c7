"""ShadowKV (Sun et al. 2024): chunks of tokens, scored at every step by the mean of their keys, a landmark."""

from ridgeplan.planner.axes.draft_selection import ShadowKV
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, selecting


def cost(selection: ShadowKV) -> SelectionCost:
    """Landmarks are kept twice, as Quest's kernel reads bounds: two that are equal."""
    landmarks, chunks = 2 / selection.chunk, 1 / selection.chunk
    return SelectionCost(
        scored_keys=landmarks, held_keys=landmarks, score_rows=chunks, run_tokens=selection.chunk, overlap=0.79
    )


SHADOWKV = TokenSelection(
    name="shadowkv",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    searched=False,
    presets={"shadowkv": selecting(ShadowKV())},
)
