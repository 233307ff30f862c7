"""DapQ (section 4): the attention of pseudo tokens at the positions of the coming tokens.

The pseudo tokens run through prefill after the prompt, at positions L_p to L_p + N - 1. No token of the prompt sees
them and their keys and values are dropped, so decoding starts at position L_p as if they had never been. Eq 4 sums
softmax probabilities over prompt and pseudo tokens; see docs/papers.md for what it leaves open.

Where a prompt goes through in chunks, they run after each chunk that evicts and see what the layer has kept and the
chunk. They are the first and last tokens of the whole prompt, as what is decoded follows these, and stand right after
the chunk, as the next tokens that read what stays do. After the last chunk that is L_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.planner.policies.eviction.dapq import DapQSettings
from ridgeplan.runtime.kv.eviction.attention_scores import pooled
from ridgeplan.runtime.kv.eviction.base import PromptLayer, protect


@dataclass(frozen=True)
class DapQ:
    """See `EvictionPolicy`."""

    settings: DapQSettings

    def appended(self, prompt: Tensor) -> Tensor:
        """The prompt's first and last tokens (section 5.1), of which a short prompt has fewer."""
        return torch.cat([prompt[: self.settings.prefix], prompt[-self.settings.suffix :]])

    def scores(self, layer: PromptLayer) -> Tensor:
        """Eq 4; the latest tokens are protected if the settings say so."""
        mass = layer.mass(layer.tokens, layer.held + len(layer.queries), layer.tokens)
        return protect(pooled(mass, self.settings.pooling), last=min(self.settings.recent, layer.budget))
