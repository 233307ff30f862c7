"""What a student learns from: a model's last hidden states over a whole passage, and its head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.model.weights import DecoderWeights


@dataclass(frozen=True, eq=False)
class Teacher:
    """A model whose logits are made a few tokens at a time, as those of a whole passage are large."""

    decoder: Decoder
    weights: DecoderWeights

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """The normed last hidden states [tokens, hidden] of a passage [tokens]."""
        hidden = functional.embedding(tokens, self.weights.embedding)
        for layer, window in zip(self.weights.layers, self.decoder.config.windows, strict=True):
            prefill_layer(self.decoder, layer, hidden, window)
        return self.decoder.norm(hidden, None, self.weights.norm)[1]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [tokens, vocab] of some of them."""
        return self.weights.head(hidden).float()
