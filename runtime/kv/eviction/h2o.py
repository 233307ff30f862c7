"""H2O (Zhang et al. 2023, section 4): the attention of all the prompt's tokens, accumulated; the latest tokens stay."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeplan.planner.policies.eviction.h2o import H2OSettings
from ridgeplan.runtime.kv.eviction.base import PromptLayer, nothing_appended, protect


@dataclass(frozen=True)
class H2O:
    """See `EvictionPolicy`."""

    settings: H2OSettings

    def appended(self, prompt: Tensor) -> Tensor:
        return nothing_appended(prompt)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that every token of the prompt pays to those before it and to itself."""
        mass = layer.mass(0, layer.tokens, layer.tokens)
        return protect(mass, last=round(self.settings.recent_share * layer.budget))
