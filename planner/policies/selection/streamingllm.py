"""StreamingLLM (Xiao et al. 2024): attention sinks and the most recent tokens. Nothing is scored."""

from ridgeplan.planner.axes.draft_selection import StreamingLLM
from ridgeplan.planner.policies.policy import MAGICDEC_RATIO, Role, SelectionCost, TokenSelection, drafting, selecting


def cost(_: StreamingLLM) -> SelectionCost:
    """Nothing is scored, and all but one token were there before."""
    return SelectionCost(overlap=1.0)


STREAMINGLLM = TokenSelection(
    name="streamingllm",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    cost=cost,
    presets={
        "magicdec-streaming": drafting(StreamingLLM(ratio=MAGICDEC_RATIO), 2),
        "streamingllm-target": selecting(StreamingLLM()),
    },
)
