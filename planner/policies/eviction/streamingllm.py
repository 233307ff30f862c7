"""StreamingLLM (Xiao et al. 2024): keeps attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction, evicting
from ridgeplan.roofline.catalog.checks import whole


@dataclass(frozen=True)
class StreamingLLMSettings(EvictionSettings):
    """sinks: the first tokens, which always stay (section 3.2)."""

    sinks: int = whole(0, 4096, default=4)


STREAMINGLLM = TokenEviction(
    name="streamingllm",
    settings=StreamingLLMSettings,
    executable=True,
    chunked=True,
    ruler=16.35,
    presets={"streamingllm": evicting(EvictionPolicy.STREAMING)},
)
