"""What a student learns from: a model's last hidden states over a whole passage, its head, and its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.runtime.arena import Arena
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill import LayerBuffers, Parts, attend_layer, finish_layer, project_layer
from ridgeplan.runtime.model.weights import DecoderWeights

SINKS, RECENT = 4, 128  # tokens that selections read in any case


def distant_tokens(tokens: int, device: torch.device) -> Tensor:
    """Which keys a query of a passage does not read in any case: bool [tokens, tokens], by query and key."""
    places = torch.arange(tokens, device=device)
    return (places >= SINKS) & (places[:, None] - places >= RECENT)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A model whose logits are made a few tokens at a time, as those of a whole passage are large."""

    decoder: Decoder
    weights: DecoderWeights

    @torch.no_grad()
    def read(self, tokens: Tensor, attention: bool) -> tuple[Tensor, Tensor | None]:
        """The normed last hidden states [tokens, hidden] of a passage [tokens], and its attention if wanted.

        That is float32 [kv_heads, tokens, tokens], by query and key: the attention of the query heads of a KV head to
        distant tokens, as shares of their own sum, mean over the layers.
        """
        shape, hidden = self.decoder.config.shape, functional.embedding(tokens, self.weights.embedding)
        buffers = LayerBuffers.take(Arena.without_memory(hidden.device), shape, hidden)
        parts, distant = Parts(len(hidden), len(hidden)), distant_tokens(len(hidden), hidden.device)
        total = torch.zeros((), device=hidden.device)
        for layer, window in zip(self.weights.layers, self.decoder.config.windows, strict=True):
            project_layer(self.decoder, layer, hidden, buffers, parts)
            if attention:
                total = total + _distant_attention(buffers.queries, buffers.keys[0], distant) / shape.layers
            attend_layer(buffers, parts, window)
            finish_layer(self.decoder, layer, hidden, buffers, parts)
        return self.decoder.norm(hidden, None, self.weights.norm)[1], total if attention else None

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [tokens, vocab] of some of the hidden states."""
        return self.weights.head(hidden).float()


def _distant_attention(queries: Tensor, keys: Tensor, distant: Tensor) -> Tensor:
    """Of one layer: queries [tokens, q_heads, head_dim], keys [kv_heads, tokens, head_dim]."""
    heads = queries.float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    logits = heads @ keys.float().mT[:, None] * queries.shape[-1] ** -0.5
    unseen = torch.ones_like(distant).triu(1)
    return shares(logits.masked_fill_(unseen, -torch.inf).softmax(-1).mean(1), distant)


def shares(weights: Tensor, distant: Tensor) -> Tensor:
    """Attention weights [..., tokens, tokens] to distant tokens over their sum; 0 elsewhere."""
    kept = weights * distant
    return kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
