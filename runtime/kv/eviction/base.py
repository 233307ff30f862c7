"""What an eviction policy sees of a prompt, and what it has to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeplan.runtime.kv.eviction.attention_scores import attention_mass


@dataclass(frozen=True, eq=False)
class PromptLayer:
    """One layer of a prompt whose attention has not run yet, and the tokens appended to it.

    index, layers: which layer of how many. tokens: of the prompt. budget: how many of them stay, fewer than `tokens`.
    queries: [tokens - held + appended, q_heads, head_dim], rotated. keys, values: [kv_heads, tokens + appended,
    head_dim], keys rotated. frequencies: float32 [head_dim / 2], radians per token. rotary_scale: YaRN's factor.
    masses: of `mass`, shared by all that score this layer, for other budgets for example. held: the first of the
    tokens, which earlier chunks of the prompt left and whose queries are gone. start: position in the text of the first
    token that has a query. Without chunks both are 0.
    """

    index: int
    layers: int
    tokens: int
    budget: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    frequencies: Tensor
    rotary_scale: float = 1.0
    masses: dict[Any, Tensor] = field(default_factory=dict)
    held: int = 0
    start: int = 0

    @property
    def own(self) -> int:
        """Tokens of the prompt that have queries."""
        return self.tokens - self.held

    def mass(self, first: int, stop: int, tokens: int) -> Tensor:
        """`attention_mass` of the tokens from `first` to `stop` for the first `tokens` keys, computed once.

        first, stop: places among the layer's tokens, of which they have queries.
        """
        asked = first, stop, tokens
        if asked not in self.masses:
            queries = self.queries[first - self.held : stop - self.held]
            self.masses[asked] = attention_mass(queries, self.keys, first, tokens)
        return self.masses[asked].clone()


class EvictionPolicy(Protocol):
    """Scores the tokens of a prompt, layer by layer; in every KV head the largest scores stay.

    Scoring works in blocks: nothing of the size of tokens x tokens ever exists.
    """

    def appended(self, prompt: Tensor) -> Tensor:
        """Token ids that prefill runs after the prompt [tokens]; they enter no cache, and no prompt token sees them."""

    def scores(self, layer: PromptLayer) -> Tensor:
        """Scores of the prompt's tokens, float32 [kv_heads, tokens], or [1, tokens] for the same in all heads."""


def nothing_appended(prompt: Tensor) -> Tensor:
    """The result of `EvictionPolicy.appended` for policies that need nothing."""
    return prompt[:0]


def protect(scores: Tensor, *, first: int = 0, last: int = 0) -> Tensor:
    """Gives the first and the last tokens, in all at most as many as there are, an infinite score; in place."""
    scores[:, :first] = torch.inf
    scores[:, scores.shape[1] - last :] = torch.inf
    return scores


def largest(scores: Tensor, budget: int) -> Tensor:
    """Places of the `budget` largest scores of each row, int64 [rows, budget], in ascending order.

    Of equal scores the latest stay, so the choice is the same on every device.
    """
    order = scores.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :budget]
    return (scores.shape[1] - 1 - order).sort(dim=1).values


def compact(kept: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, kept, head_dim] of the kept places, int64 [kv_heads or 1, kept]."""
    at = kept[:, :, None].expand(keys.shape[0], -1, keys.shape[2])
    return keys.gather(1, at), values.gather(1, at)
