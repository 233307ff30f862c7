"""LaCache (Shi et al. 2025, section 3): a ladder of spans. Shallow layers keep the early part of each span, deep layers
the late part, so that all layers together reach further than one.

The ladder is laid over the prompt once, at the end of prefill; the paper repeats it as the text grows. So do prompts
that go through in chunks: each time over what a layer has kept and the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.planner.policies.eviction.lacache import LaCacheSettings
from ridgeplan.runtime.kv.eviction.base import PromptLayer, nothing_appended, protect


@dataclass(frozen=True)
class LaCache:
    """See `EvictionPolicy`."""

    settings: LaCacheSettings

    def appended(self, prompt: Tensor) -> Tensor:
        return nothing_appended(prompt)

    def scores(self, layer: PromptLayer) -> Tensor:
        """The nearer a token to this layer's rung of its ladder, the more it counts."""
        sinks = min(self.settings.sinks, layer.budget)
        recent = min(round(self.settings.recent_share * layer.budget), layer.budget - sinks)
        middle = layer.tokens - sinks - recent
        rung = (layer.budget - sinks - recent) / middle  # the part of a ladder that one layer keeps
        depth = layer.index / max(layer.layers - 1, 1)
        places = torch.arange(layer.tokens, dtype=torch.float64, device=layer.keys.device) + 0.5 - sinks
        phase = (places * self.settings.ladders / middle) % 1
        distance = (phase - (rung / 2 + depth * (1 - rung))).abs()
        return protect(-distance.float()[None], first=sinks, last=recent)
