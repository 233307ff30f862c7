"""SnapKV (Li et al. 2024): scored once, in prefill, by the last window's queries; steps score nothing."""

from ridgeplan.planner.plan import DraftSelection
from ridgeplan.planner.policies.policy import MAGICDEC_RATIO, Role, TokenSelection, drafting

SNAPKV = TokenSelection(
    name="snapkv",
    roles=frozenset({Role.DRAFT}),
    presets={"magicdec-snapkv": drafting(DraftSelection.SNAPKV, 2, MAGICDEC_RATIO)},
)
