"""Quest (Tang et al. 2024): pages of 16 tokens, scored at every step by the minimum and maximum of their keys."""

from ridgeplan.planner.plan import DraftSelection, TargetSelection
from ridgeplan.planner.policies.policy import SPARSE_RATIO, Role, TokenSelection, drafting, selecting

QUEST = TokenSelection(
    name="quest",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    run_tokens=16,
    scored_keys=2 / 16,
    presets={
        "magicdec-quest": drafting(DraftSelection.QUEST, 4, SPARSE_RATIO),
        "quest": selecting(TargetSelection.QUEST),
    },
)
