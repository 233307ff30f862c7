"""SnapKV (Li et al. 2024, section 4): the attention of the prompt's last window, pooled; the window stays.

The query heads of a KV head are averaged, as keys of a KV head are stored once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeplan.planner.policies.eviction.snapkv import SnapKVSettings
from ridgeplan.runtime.kv.eviction.attention_scores import pooled
from ridgeplan.runtime.kv.eviction.base import PromptLayer, nothing_appended, protect


@dataclass(frozen=True)
class SnapKV:
    """See `EvictionPolicy`."""

    settings: SnapKVSettings

    def appended(self, prompt: Tensor) -> Tensor:
        return nothing_appended(prompt)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that the window pays to the tokens before it; the window lies within the prompt's last chunk."""
        window = min(self.settings.window, layer.budget, layer.own)
        first = layer.tokens - window
        mass = layer.mass(first, layer.tokens, first)
        scores = mass.new_empty(len(mass), layer.tokens)
        scores[:, :first] = pooled(mass, self.settings.pooling)
        return protect(scores, last=window)
