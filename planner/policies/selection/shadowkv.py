"""ShadowKV (Sun et al. 2024): chunks of 8 tokens, scored at every step by a landmark each."""

from ridgeplan.planner.plan import TargetSelection
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, selecting

SHADOWKV = TokenSelection(
    name="shadowkv",
    roles=frozenset({Role.TARGET}),
    cost=lambda _: SelectionCost(scored_keys=1 / 8, held_keys=1 / 8, run_tokens=8),
    presets={"shadowkv": selecting(TargetSelection.SHADOWKV)},
)
