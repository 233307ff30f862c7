"""Prefill of one prompt, layer by layer.

A layer runs over the whole prompt with exact attention, hands its KV to the cache, and its buffers serve the next
layer. So the workspace is the prompt's hidden states and one layer's queries and KV, all of which may lie in a scratch
arena, and either one chunk of the MLP or the attention of a few heads. A full-precision copy of all layers' KV never
exists.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.execution import PREFILL_ATTENDED_TOKENS, PREFILL_CHUNK_TOKENS
from ridgeplan.runtime.arena import Arena
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights

# cuDNN first: on long prompts it is about twice as fast as FlashAttention-2 (H200, 8k to 128k tokens).
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class PromptObserver(Protocol):
    """What learns from a prompt while it is processed. window: of the prompt's last queries."""

    window: int

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor) -> None:
        """A layer of a row's prompt is in the cache.

        queries: [window or fewer, q_heads, head_dim], of the last tokens. keys: [kv_heads, tokens, head_dim].
        """


def prefill(
    decoder: Decoder,
    weights: DecoderWeights,
    cache: Cache,
    row: int,
    prompt: Tensor,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    arena: Arena | None = None,
    observer: PromptObserver | None = None,
) -> Tensor:
    """Fills `row` of the cache from prompt [tokens]; returns the logits [vocab] that follow its last token.

    arena: what the long buffers are taken from, cleared first; without one they are allocated.
    """
    arena = arena or Arena.without_memory(prompt.device)
    arena.clear()
    hidden = arena.empty((len(prompt), decoder.config.shape.hidden), weights.embedding.dtype)
    buffers = LayerBuffers.take(arena, decoder.config.shape, hidden)
    last = torch.empty_like(buffers.queries[-observer.window :] if observer and observer.window else hidden[:0])
    torch.index_select(weights.embedding, 0, prompt, out=hidden)
    for index, layer in enumerate(weights.layers):
        window = decoder.config.windows[index]
        keys, values = prefill_layer(decoder, layer, hidden, window, chunk_tokens, buffers, last)
        cache.store_prompt(index, row, keys, values)
        if observer is not None:
            observer.after_prefill(index, row, last, keys)
    cache.finish_prompt(row, len(prompt))
    return weights.head(decoder.norm(hidden[-1:], None, weights.norm)[1])[0]


class LayerBuffers(NamedTuple):
    """Filled by one layer after another: queries [tokens, q_heads, head_dim]; keys, values [1, kv_heads, tokens,
    head_dim].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def take(cls, arena: Arena, shape: ModelShape, hidden: Tensor) -> LayerBuffers:
        """Buffers for a prompt with these hidden states [tokens, hidden]."""
        tokens = len(hidden)
        kv_sizes = (1, shape.kv_heads, tokens, shape.head_dim)
        q_sizes = (tokens, shape.q_heads, shape.head_dim)
        return cls(*(arena.empty(sizes, hidden.dtype) for sizes in (q_sizes, kv_sizes, kv_sizes)))


def prefill_layer(
    decoder: Decoder,
    layer: LayerWeights,
    hidden: Tensor,
    window: int | None,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    buffers: LayerBuffers | None = None,
    last_queries: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Updates hidden [tokens, hidden] in place; returns keys and values [kv_heads, tokens, head_dim].

    These are views of `buffers`, which are allocated unless given. last_queries: [n, q_heads, head_dim], filled with
    those of the last n tokens if given.
    """
    tokens = len(hidden)
    shape = decoder.config.shape
    queries, keys, values = buffers or LayerBuffers.take(Arena.without_memory(hidden.device), shape, hidden)
    chunks = [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]
    for chunk in chunks:
        positions = torch.arange(chunk.start, chunk.stop, device=hidden.device)[None]
        normed = decoder.norm(hidden[chunk], None, layer.attention_norm)[1][None]
        queries[chunk] = decoder.project(layer, normed, decoder.rotary(positions), keys, values, positions)[0]
    if last_queries is not None and len(last_queries):
        last_queries.copy_(queries[-len(last_queries) :])
    attend_in_place(queries, keys[0], values[0], window)
    for chunk in chunks:
        residual, normed = decoder.norm(hidden[chunk], layer.output(queries[chunk].flatten(1)), layer.mlp_norm)
        torch.add(residual, layer.mlp(normed), out=hidden[chunk])
    return keys[0], values[0]


def attend_in_place(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> None:
    """`causal_attention` of queries [tokens, q_heads, head_dim], which the output overwrites.

    A long prompt's heads attend a few at a time, so that the part of the output beside the queries stays small.
    """
    kv_heads, tokens = keys.shape[:2]
    ratio, together = queries.shape[1] // kv_heads, max(1, PREFILL_ATTENDED_TOKENS // tokens)
    for first in range(0, kv_heads, together):
        heads = slice(first, first + together)
        part = queries[:, first * ratio : (first + together) * ratio].transpose(0, 1)
        part.copy_(causal_attention(part, keys[heads], values[heads], window))


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of a whole prompt: q [q_heads, tokens, head_dim]; keys, values [kv_heads, tokens, head_dim].

    A token attends to itself and to those before it, to at most `window` in all.
    """
    tokens = q.shape[1]
    if window is None or tokens <= window:
        return _attend(q, keys, values, is_causal=True)
    out = torch.empty_like(q)
    for start in range(0, tokens, window):
        stop = min(start + window, tokens)
        first = max(0, start - window + 1)
        places = torch.arange(first, stop, device=q.device)
        distance = places[start - first :, None] - places
        mask = (distance >= 0) & (distance < window)
        out[:, start:stop] = _attend(q[:, start:stop], keys[:, first:stop], values[:, first:stop], attn_mask=mask)
    return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    with sdpa_kernel(BACKENDS, set_priority=True):
        return functional.scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=attn_mask,
            is_causal=is_causal,
            enable_gqa=q.shape[0] != keys.shape[0],
        )[0]
