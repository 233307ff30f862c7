"""Attention that queries pay to a prompt's tokens, summed over the queries, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.execution import EVICTION_SCORE_ELEMENTS


def attention_mass(queries: Tensor, keys: Tensor, first: int, tokens: int) -> Tensor:
    """Softmax probabilities of the first `tokens` keys, summed over queries, float32 [kv_heads, tokens].

    queries: [n, q_heads, head_dim], at positions first to first + n - 1. keys: [kv_heads, at least first + n,
    head_dim]. Query i sees keys up to its own. The query heads of a KV head are averaged. A block holds all keys of
    some queries of one KV head, at most about EVICTION_SCORE_ELEMENTS scores.
    """
    kv_heads, ratio = keys.shape[0], queries.shape[1] // keys.shape[0]
    mass = queries.new_zeros(kv_heads, tokens, dtype=torch.float32)
    block = max(1, EVICTION_SCORE_ELEMENTS // (ratio * (first + len(queries))))
    hidden = hidden_keys(min(block, len(queries)), queries.device)
    for start in range(0, len(queries), block):
        part = queries[start : start + block].unflatten(1, (kv_heads, ratio))
        for head in range(kv_heads):
            probabilities = causal_probabilities(part[:, head], keys[head], first + start, hidden)
            seen = min(tokens, probabilities.shape[2])
            mass[head, :seen] += probabilities[:, :, :seen].sum((0, 1))
    return mass / ratio


def hidden_keys(count: int, device: torch.device) -> Tensor:
    """Which keys of `count` tokens lie in the future of each of these tokens, bool [count, 1, count]."""
    places = torch.arange(count, device=device)
    return (places[:, None] < places)[:, None]


def causal_probabilities(queries: Tensor, keys: Tensor, first: int, hidden: Tensor) -> Tensor:
    """Attention probabilities, float32 [n, heads, first + n], of queries [n, heads, head_dim] to keys [.., head_dim].

    Query i is at position first + i and sees all keys up to it. hidden: `hidden_keys` of n tokens or more.
    """
    count, heads, head_dim = queries.shape
    visible = first + count
    scaled = queries.flatten(0, 1) * head_dim**-0.5
    logits = (scaled @ keys[:visible].mT).view(count, heads, visible)
    # Only the queries' own tokens can be in a query's future.
    logits[:, :, first:].masked_fill_(hidden[:count, :, :count], -torch.inf)
    return logits.softmax(-1, dtype=torch.float32)


def pooled(scores: Tensor, width: int) -> Tensor:
    """The largest score within `width` tokens around each of [rows, tokens]; fewer at the ends."""
    before = width // 2
    padded = functional.pad(scores, (before, width - 1 - before), value=-torch.inf)
    return functional.max_pool1d(padded, width, stride=1)
