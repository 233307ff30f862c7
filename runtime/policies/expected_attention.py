"""Expected Attention: keeps the tokens that queries drawn from the distribution of the prompt would attend to.

Queries before rotation are taken for a Gaussian; a coming query is one of them at a later position. With mean m and
covariance S, both rotated by the average of the coming positions' rotations, a key k is expected to get
exp(k m / sqrt(D) + k S k / 2D). The norm of its value weighs it, as in the authors' library. Where a prompt goes
through in chunks, the queries are the chunk's, and the coming positions those after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.layer import rotary_tables
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS
from ridgeplan.roofline.plan.policies.evictions import ExpectedAttentionEviction
from ridgeplan.runtime.policies.eviction_scorer import EvictionScorer, PromptLayer, protect
from ridgeplan.runtime.policies.registry import SCORERS


@SCORERS.register("expected-attention")
class ExpectedAttentionScorer(EvictionScorer):
    settings: ExpectedAttentionEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Expected attention, averaged over the query heads of a KV head, times the norm of the value."""
        sinks = min(self.settings.sinks, layer.budget)
        mean, covariance = self._coming_queries(layer, min(max(sinks - layer.start, 0), layer.query_tokens - 1))
        kv_heads, tokens = len(layer.keys), layer.tokens
        ratio = layer.queries.shape[1] // kv_heads
        scores = torch.empty(kv_heads, tokens, device=layer.keys.device)
        for head in range(kv_heads):
            of_group = slice(head * ratio, (head + 1) * ratio)
            expected = _expected_logits(layer.keys[head, :tokens], mean[of_group], covariance[of_group])
            expected[:, :sinks] = -torch.inf
            norms = layer.values[head, :tokens].float().norm(dim=-1)
            scores[head] = expected.softmax(-1).mean(0) * norms
        return protect(scores, first=sinks)

    def _coming_queries(self, layer: PromptLayer, sinks: int) -> tuple[Tensor, Tensor]:
        """Mean [q_heads, D] and covariance [q_heads, D, D] of queries at the coming positions."""
        mean, covariance = _moments(layer, sinks)
        coming = layer.start + layer.query_tokens + torch.arange(self.settings.future, device=mean.device)
        cos, sin = (table.mean(0) for table in rotary_tables(coming, layer.frequencies, layer.rotary_scale))
        rotation = _rotation(cos, sin)
        return mean @ rotation.mT, rotation @ covariance @ rotation.mT


def _moments(layer: PromptLayer, sinks: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the tokens' queries before rotation, without the first `sinks`, in float32."""
    count = layer.query_tokens - sinks
    heads, dim = layer.queries.shape[1:]
    total = layer.queries.new_zeros(heads, dim, dtype=torch.float32)
    squares = layer.queries.new_zeros(heads, dim, dim, dtype=torch.float32)
    for start in range(sinks, layer.query_tokens, PREFILL_CHUNK_TOKENS):
        part = _unrotated(layer, start, min(start + PREFILL_CHUNK_TOKENS, layer.query_tokens)).transpose(0, 1)
        total += part.sum(1)
        squares += part.mT @ part
    mean = total / count
    return mean, squares / count - mean[:, :, None] * mean[:, None, :]


def _unrotated(layer: PromptLayer, start: int, stop: int) -> Tensor:
    """Queries [tokens, q_heads, head_dim] of some tokens that have one, turned back, in float32."""
    positions = layer.start + torch.arange(start, stop, device=layer.queries.device)
    cos, sin = (table[:, None] for table in rotary_tables(positions, layer.frequencies, 1 / layer.rotary_scale))
    first, second = layer.queries[start:stop].float().chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def _rotation(cos: Tensor, sin: Tensor) -> Tensor:
    """The matrix [D, D] that rotates channel i with channel i + D/2, for cosines and sines [D/2]."""
    cosines, sines = torch.diag(cos), torch.diag(sin)
    return torch.cat([torch.cat([cosines, -sines], dim=1), torch.cat([sines, cosines], dim=1)])


def _expected_logits(keys: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Logarithms [q_heads, tokens] of what keys [tokens, D] are expected to get from queries of this distribution."""
    keys, dim = keys.float(), keys.shape[1]
    spread = torch.stack([(keys @ each).mul_(keys).sum(-1) for each in covariance])
    return mean @ keys.mT * dim**-0.5 + spread / (2 * dim)
