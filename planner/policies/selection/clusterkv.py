"""ClusterKV (Liu et al. 2024): clusters of about 80 tokens, scored at every step by their centroids."""

from ridgeplan.planner.plan import TargetSelection
from ridgeplan.planner.policies.policy import Role, TokenSelection, selecting

CLUSTERKV = TokenSelection(
    name="clusterkv",
    roles=frozenset({Role.TARGET}),
    run_tokens=1,
    scored_keys=1 / 80,
    presets={"clusterkv": selecting(TargetSelection.CLUSTERKV)},
)
