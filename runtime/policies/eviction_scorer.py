"""What eviction scorers share: their interface, the layer they score, attention mass, protected tokens, compaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.execution import EVICTION_SCORE_ELEMENTS


def attention_mass(queries: Tensor, keys: Tensor, first: int, tokens: int, heads: str = "mean") -> Tensor:
    """Softmax probabilities of the first `tokens` keys, summed over queries, float32 [kv_heads, tokens].

    queries: [n, q_heads, head_dim], at positions first to first + n - 1. keys: [kv_heads, at least first + n,
    head_dim]. Query i sees keys up to its own. heads: the "mean" of the query heads of a KV head, or their "maximum". A
    block holds all keys of some queries of one KV head, at most about EVICTION_SCORE_ELEMENTS scores.
    """
    (count, q_heads, head_dim), kv_heads = queries.shape, keys.shape[0]
    ratio = q_heads // kv_heads
    mass = queries.new_zeros(kv_heads, 1 if heads == "mean" else ratio, tokens, dtype=torch.float32)
    block = max(1, min(EVICTION_SCORE_ELEMENTS // (ratio * (first + count)), count))
    places = torch.arange(block, device=queries.device)
    later = (places[:, None] < places)[:, None]  # keys of a block that are in the future of its queries
    for start in range(0, count, block):
        part = queries[start : start + block].unflatten(1, (kv_heads, ratio))
        size, before = len(part), first + start
        for head in range(kv_heads):
            scaled = part[:, head].flatten(0, 1) * head_dim**-0.5
            logits = (scaled @ keys[head, : before + size].mT).view(size, ratio, before + size)
            # Only the block's own tokens can be in a query's future.
            logits[:, :, before:].masked_fill_(later[:size, :, :size], -torch.inf)
            probabilities = logits.softmax(-1, dtype=torch.float32)[:, :, :tokens]
            by_head = probabilities.sum(0) if heads == "maximum" else probabilities.sum((0, 1))
            mass[head, :, : probabilities.shape[2]] += by_head
    return mass.amax(1) if heads == "maximum" else mass[:, 0] / ratio


def pooled(scores: Tensor, width: int) -> Tensor:
    """The largest score within `width` tokens around each of [rows, tokens]; fewer at the ends."""
    before = width // 2
    padded = functional.pad(scores, (before, width - 1 - before), value=-torch.inf)
    return functional.max_pool1d(padded, width, stride=1)


@dataclass(frozen=True, eq=False)
class PromptLayer:
    """One layer of a prompt whose attention has not run yet, and the tokens appended to it.

    index, layers: the layer's index and the number of layers. tokens: tokens of the prompt. budget: number of tokens to
    keep, fewer than `tokens` but for scorers that accumulate.
    queries: [tokens - held + appended, q_heads, head_dim], rotated. keys, values: [kv_heads, tokens + appended,
    head_dim], keys rotated. frequencies: float32 [head_dim / 2], radians per token. rotary_scale: YaRN's factor.
    masses: results of `mass`, shared by all scorers of this layer, e.g. for other budgets. held: number of tokens
    kept from earlier chunks; they come first and have no queries. start: position in the text of the first token that
    has a query. Without chunks both are 0.
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
    def query_tokens(self) -> int:
        """Tokens of the prompt that have queries."""
        return self.tokens - self.held

    def mass(self, first: int, stop: int, tokens: int, heads: str = "mean") -> Tensor:
        """`attention_mass` of the tokens from `first` to `stop` for the first `tokens` keys, computed once.

        first, stop: places among the layer's tokens; these tokens have queries.
        """
        key = first, stop, tokens, heads
        if key not in self.masses:
            queries = self.queries[first - self.held : stop - self.held]
            self.masses[key] = attention_mass(queries, self.keys, first, tokens, heads)
        return self.masses[key].clone()


class EvictionScorer:
    """Scores the tokens of a prompt, layer by layer; in every KV head those with the largest scores stay.

    Scoring works in blocks: nothing of the size of tokens x tokens ever exists. settings: the plan's hyperparameters,
    of the plan's class for the policy.
    """

    settings: Any
    accumulates = False  # scores build on those of earlier chunks, so it scores every chunk, also before evictions

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def appended(self, prompt: Tensor, vocab: int) -> Tensor:
        """Token ids that prefill runs after the prompt [tokens]; they enter no cache, and no prompt token sees them."""
        return prompt[:0]

    def position(self, tokens: int) -> int:
        """Position of the first appended token where there are so many; it sees the tokens before that position."""
        return tokens

    def scores(self, layer: PromptLayer) -> Tensor:
        """Scores of the prompt's tokens, float32 [kv_heads, tokens], or [1, tokens] for the same in all heads."""
        raise NotImplementedError


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
