"""SnapKV (Li et al. 2024): chosen once, in prefill, by the last window's queries, for each KV head."""

from ridgeplan.planner.axes.draft_selection import SnapKV
from ridgeplan.planner.policies.policy import MAGICDEC_RATIO, Role, SelectionCost, TokenSelection, drafting


def cost(_: SnapKV) -> SelectionCost:
    """Steps score nothing; the tokens that they read lie apart."""
    return SelectionCost(run_tokens=1)


SNAPKV = TokenSelection(
    name="snapkv",
    roles=frozenset({Role.DRAFT}),
    executable=frozenset({Role.DRAFT}),
    cost=cost,
    presets={"magicdec-snapkv": drafting(SnapKV(ratio=MAGICDEC_RATIO), 2)},
)
