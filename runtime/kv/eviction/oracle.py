"""The oracle: the attention of the tokens that really come next, where they are known: when a text is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeplan.planner.policies.eviction.oracle import OracleSettings
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.kv.eviction.base import PromptLayer


@dataclass(frozen=True, eq=False)
class Oracle:
    """See `EvictionPolicy`. coming: the tokens after each prompt that it was told of."""

    settings: OracleSettings
    coming: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def tell(self, prompt: Sequence[int], coming: Sequence[int]) -> None:
        """What follows a prompt."""
        self.coming[tuple(prompt)] = tuple(coming)

    def appended(self, prompt: Tensor) -> Tensor:
        """The coming tokens. Raises WorkloadError for a prompt that it was not told of."""
        key = tuple(prompt.tolist())
        if key not in self.coming:
            raise WorkloadError(
                f"the eviction oracle does not know what follows a prompt of {len(key)} tokens; allowed: texts of "
                "`ridgeplan quality`"
            )
        return torch.tensor(self.coming[key][: self.settings.coming], dtype=prompt.dtype, device=prompt.device)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that the coming tokens pay to the prompt."""
        return layer.mass(layer.tokens, len(layer.queries), layer.tokens)
