"""SpecExtend (Cha et al. 2025): the tokens that the last accepted token attended to most, chosen once a round."""

from ridgeplan.planner.plan import DraftSelection
from ridgeplan.planner.policies.policy import SPARSE_RATIO, Role, TokenSelection, drafting

SPECEXTEND = TokenSelection(
    name="specextend",
    roles=frozenset({Role.DRAFT}),
    run_tokens=64,
    shared_by_heads=True,
    round_score_bytes=3 * 4,  # one fp32 row of scores: written once, read twice by top-k
    presets={"specextend": drafting(DraftSelection.LAST_ACCEPTED, 4, SPARSE_RATIO)},
)
