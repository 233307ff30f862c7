"""ClusterKV (Liu et al. 2024): clusters of keys, scored at every step by their centroids."""

from ridgeplan.planner.axes.draft_selection import ClusterKV
from ridgeplan.planner.policies.policy import Role, SelectionCost, TokenSelection, selecting

LABELS = 1 / 64  # of the keys: an int32 beside 128 channels of 16 bits


def cost(selection: ClusterKV) -> SelectionCost:
    """A centroid a cluster, and for each token its cluster's number, by which its score is looked up and ranked."""
    read = 1 / selection.cluster + LABELS
    return SelectionCost(scored_keys=read, held_keys=read, score_rows=1, run_tokens=1, overlap=0.78)


CLUSTERKV = TokenSelection(
    name="clusterkv",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    searched=False,
    presets={"clusterkv": selecting(ClusterKV())},
)
