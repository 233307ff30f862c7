"""The oracle: the attention of the tokens that really come next. It needs them, so no plan can name it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeplan.runtime.kv.eviction.attention_scores import attention_mass
from ridgeplan.runtime.kv.eviction.base import PromptLayer


@dataclass(frozen=True, eq=False)
class Oracle:
    """See `EvictionPolicy`. coming: int64 [tokens], those that follow the prompt."""

    coming: Tensor

    def appended(self, prompt: Tensor) -> Tensor:
        return self.coming.to(prompt.device)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that the coming tokens pay to the prompt."""
        return attention_mass(layer.queries[layer.tokens :], layer.keys, layer.tokens, layer.tokens)
