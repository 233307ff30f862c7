"""StreamingLLM (Xiao et al. 2024): keeps attention sinks and the most recent tokens."""

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import TokenEviction, evicting

STREAMINGLLM = TokenEviction(name="streamingllm", presets={"streamingllm": evicting(EvictionPolicy.STREAMING)})
