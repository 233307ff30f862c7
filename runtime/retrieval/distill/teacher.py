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
TEMPERATURE = 2.0  # of the attention that is taught: a budget holds far more tokens than the few with most of it


def visible_tokens(queries: Tensor, tokens: int) -> Tensor:
    """bool [queries, tokens]: the tokens up to each query, int64 [queries]."""
    return torch.arange(tokens, device=queries.device) <= queries[:, None]


def distant_tokens(queries: Tensor, tokens: int) -> Tensor:
    """Of these, the tokens that a query does not read in any case."""
    places = torch.arange(tokens, device=queries.device)
    return (places >= SINKS) & (queries[:, None] - places >= RECENT)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A model whose logits are made a few tokens at a time, as those of a whole passage are large."""

    decoder: Decoder
    weights: DecoderWeights

    @torch.no_grad()
    def read(self, tokens: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The normed last hidden states [tokens, hidden] of a passage [tokens], and the attention of some queries.

        queries: int64 [queries], places in the passage; each has distant tokens. The attention is float32 [kv_heads,
        layers, queries, tokens], softened: the weights of distant tokens, mean over the query heads of a KV head, to
        the power 1 / TEMPERATURE and as shares of their own sum.
        """
        shape, hidden = self.decoder.config.shape, functional.embedding(tokens, self.weights.embedding)
        buffers = LayerBuffers.take(Arena.without_memory(hidden.device), shape, hidden)
        parts, found = Parts(len(hidden), len(hidden)), []
        for layer, window in zip(self.weights.layers, self.decoder.config.windows, strict=True):
            project_layer(self.decoder, layer, hidden, buffers, parts)
            found.append(softened_attention(buffers.queries[queries], buffers.keys, queries))
            attend_layer(buffers, parts, window)
            finish_layer(self.decoder, layer, hidden, buffers, parts)
        return self.decoder.norm(hidden, None, self.weights.norm)[1], torch.stack(found, dim=1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [tokens, vocab] of some of the hidden states."""
        return self.weights.head(hidden).float()


def softened_attention(asked: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """What is taught of one layer, float32 [kv_heads, queries, tokens], as `Teacher.read` has it.

    asked: [queries, q_heads, head_dim], of the tokens at `queries`; keys: [kv_heads, tokens, head_dim].
    """
    tokens = keys.shape[1]
    heads = asked.float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    logits = heads @ keys.float().mT[:, None] * asked.shape[-1] ** -0.5
    logits.masked_fill_(~visible_tokens(queries, tokens), -torch.inf)
    kept = logits.softmax(-1).mean(1).pow(1 / TEMPERATURE) * distant_tokens(queries, tokens)
    return kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
