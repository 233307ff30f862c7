"""ClusterKV (Liu et al. 2024): clusters of about 80 tokens, scored at every step by their centroids."""

from ridgeplan.planner.plan import TargetSelection
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, selecting

CLUSTERKV = TokenSelection(
    name="clusterkv",
    roles=frozenset({Role.TARGET}),
    cost=lambda _: SelectionCost(scored_keys=1 / 80, held_keys=1 / 80, run_tokens=1),
    presets={"clusterkv": selecting(TargetSelection.CLUSTERKV)},
)
