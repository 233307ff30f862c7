"""StreamingLLM (Xiao et al. 2024): attention sinks and the most recent tokens. Nothing is scored."""

from ridgeplan.planner.plan import DraftSelection
from ridgeplan.planner.policies.policy import MAGICDEC_RATIO, Role, TokenSelection, drafting

STREAMINGLLM = TokenSelection(
    name="streamingllm",
    roles=frozenset({Role.DRAFT}),
    presets={"magicdec-streaming": drafting(DraftSelection.STREAMING, 2, MAGICDEC_RATIO)},
)
