"""Random eviction: each KV head of each layer keeps tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.planner.policies.eviction.random import RandomSettings
from ridgeplan.runtime.kv.eviction.base import PromptLayer, nothing_appended


@dataclass(frozen=True)
class Random:
    """See `EvictionPolicy`."""

    settings: RandomSettings

    def appended(self, prompt: Tensor) -> Tensor:
        return nothing_appended(prompt)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Drawn on the host, so that every device keeps the same tokens."""
        generator = torch.Generator().manual_seed(self.settings.seed * layer.layers + layer.index)
        return torch.rand(len(layer.keys), layer.tokens, generator=generator).to(layer.keys.device)
