"""Prefill of one prompt, layer by layer.

A layer runs over the whole prompt in chunks with exact attention, hands its KV to the cache and drops it. So
the workspace is the prompt's hidden states, one layer's KV and one chunk; a full-precision copy of all layers
never exists.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from ridgeplan.runtime.cache import Cache
from ridgeplan.runtime.decoder import Decoder
from ridgeplan.runtime.weights import DecoderWeights, LayerWeights

CHUNK_TOKENS = 2048


def prefill(
    decoder: Decoder,
    weights: DecoderWeights,
    cache: Cache,
    row: int,
    prompt: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Fills `row` of the cache from prompt [tokens]; float32 logits [vocab] that follow its last token."""
    hidden = functional.embedding(prompt, weights.embedding)
    for index, layer in enumerate(weights.layers):
        keys, values = _layer(decoder, layer, hidden, decoder.config.windows[index], chunk_tokens)
        cache.store_prompt(index, row, keys, values)
    cache.lengths[row] = len(prompt)
    return decoder.logits(weights, hidden[-1])


def _layer(
    decoder: Decoder, layer: LayerWeights, hidden: Tensor, window: int | None, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Updates hidden [tokens, hidden] in place; keys and values [kv_heads, tokens, head_dim]."""
    config, tokens = decoder.config, len(hidden)
    keys, values = (hidden.new_empty(config.kv_heads, tokens, config.head_dim) for _ in "kv")
    for start in range(0, tokens, chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, tokens))
        positions = torch.arange(chunk.start, chunk.stop, device=hidden.device)
        q, k, v = decoder.project(layer, hidden[chunk], decoder.rotary(positions, hidden.dtype))
        keys[:, chunk], values[:, chunk] = k.transpose(0, 1), v.transpose(0, 1)
        seen = slice(0, chunk.stop)
        attended = causal_attention(q.transpose(0, 1), keys[:, seen], values[:, seen], window)
        hidden[chunk] += layer.output(attended.transpose(0, 1).flatten(1))
        hidden[chunk] += decoder.mlp(layer, hidden[chunk])
    return keys, values


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of the last tokens: q [q_heads, queries, head_dim]; keys, values [kv_heads, tokens, head_dim]."""
    queries, tokens = q.shape[1], keys.shape[1]
    grouped = q.shape[0] != keys.shape[0]
    if window is None or tokens <= window:
        mask: Tensor = causal_lower_right(queries, tokens)
    else:
        distance = torch.arange(tokens - queries, tokens, device=q.device)[:, None] - torch.arange(
            tokens, device=q.device
        )
        mask = (distance >= 0) & (distance < window)
    attend = functional.scaled_dot_product_attention
    return attend(q[None], keys[None], values[None], attn_mask=mask, enable_gqa=grouped)[0]
