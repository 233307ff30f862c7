"""StreamingLLM (Xiao et al. 2024): attention sinks and the most recent tokens. Nothing is scored."""

from ridgeplan.planner.axes.draft_selection import StreamingLLM
from ridgeplan.planner.policies.policy import MAGICDEC_RATIO, Role, TokenSelection, drafting, selecting

STREAMINGLLM = TokenSelection(
    name="streamingllm",
    roles=frozenset({Role.DRAFT, Role.TARGET}),
    executable=frozenset({Role.DRAFT, Role.TARGET}),
    presets={
        "magicdec-streaming": drafting(StreamingLLM(ratio=MAGICDEC_RATIO), 2),
        "streamingllm-target": selecting(StreamingLLM()),
    },
)
