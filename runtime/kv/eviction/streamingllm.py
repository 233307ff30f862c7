"""StreamingLLM (Xiao et al. 2024, section 3.2): attention sinks and the most recent tokens.

Tokens keep their positions in the text; the paper counts positions inside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.planner.policies.eviction.streamingllm import StreamingLLMSettings
from ridgeplan.runtime.kv.eviction.base import PromptLayer, nothing_appended, protect


@dataclass(frozen=True)
class StreamingLLM:
    """See `EvictionPolicy`."""

    settings: StreamingLLMSettings

    def appended(self, prompt: Tensor) -> Tensor:
        return nothing_appended(prompt)

    def scores(self, layer: PromptLayer) -> Tensor:
        """The later a token, the more it counts."""
        places = torch.arange(layer.tokens, dtype=torch.float32, device=layer.keys.device)
        return protect(places[None], first=min(self.settings.sinks, layer.budget - 1))
