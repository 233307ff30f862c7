"""Prefill of one prompt, layer by layer, into one cache or into several that keep different parts of it.

A layer runs over the whole prompt with exact attention, hands its KV to the cache, and its buffers serve the next
layer. So the workspace is the prompt's hidden states and one layer's queries and KV, all of which may lie in a scratch
arena, and either one chunk of the MLP or the attention of a few heads. A full-precision copy of all layers' KV never
exists, so an eviction that works layer by layer never needs more than one layer's KV beside what stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ridgeplan.kernels.attention import MAX_QUERIES, decode_attention
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import (
    PADDED_PROMPT_TOKENS,
    PREFILL_ATTENDED_TOKENS,
    PREFILL_CHUNK_TOKENS,
    padded_prompt,
)
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.eviction.base import EvictionScorer
from ridgeplan.runtime.eviction.prompt import PromptEviction, longest_text
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights
from ridgeplan.runtime.sampling import all_finite, require_finite

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# cuDNN is about twice as fast as FlashAttention-2 on long prompts (H200, 8k to 128k tokens).
LONG_PROMPT_BACKENDS = [SDPBackend.CUDNN_ATTENTION, *BACKENDS]


class PromptObserver:
    """Learns from a prompt while it is processed. The hooks of this base class do nothing."""

    window = 0  # number of the prompt's last queries that `after_prefill` receives

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        """A row's prompt, int64 [tokens], is about to be processed."""

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        """A layer of a row's prompt is in the cache.

        queries: [window or fewer, q_heads, head_dim], of the last tokens. keys: [kv_heads, tokens, head_dim], of the
        tokens that the layer keeps. positions: int64 [kv_heads or 1, tokens], of the keys, counted from the prompt's
        end: its last token is at -1.
        """


class PromptObservers(PromptObserver):
    """Passes a prompt on to several observers, each with as many queries as it asks for."""

    def __init__(self, observers: Sequence[PromptObserver]) -> None:
        self._observers = observers
        self.window = max((observer.window for observer in observers), default=0)

    def before_prefill(self, row: int, prompt: Tensor) -> None:
        for observer in self._observers:
            observer.before_prefill(row, prompt)

    def after_prefill(self, layer: int, row: int, queries: Tensor, keys: Tensor, positions: Tensor) -> None:
        for observer in self._observers:
            observer.after_prefill(layer, row, queries[max(0, len(queries) - observer.window) :], keys, positions)


def prefill(
    decoder: Decoder,
    weights: DecoderWeights,
    cache: Cache,
    row: int,
    prompt: Tensor,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    arena: Arena | None = None,
    scorer: EvictionScorer | None = None,
    observer: PromptObserver | None = None,
) -> Tensor:
    """Fills `row` of the cache from prompt [tokens]; returns the logits [vocab] that follow its last token.

    arena: memory for the long buffers, cleared first; without one they are allocated. scorer: selects the kept tokens
    if the cache has room for only a part of the prompt. Raises ModelError for logits that are NaN or infinite.
    """
    logits = prefill_all(decoder, weights, [Destination(cache, row, scorer, observer)], prompt, chunk_tokens, arena)
    require_finite([bool(all_finite(logits))])
    return logits


@dataclass(frozen=True, eq=False)
class Destination:
    """The destination of a prompt's KV: a row of a cache, with a scorer and an observer as for `prefill`."""

    cache: Cache
    row: int
    scorer: EvictionScorer | None = None
    observer: PromptObserver | None = None


def prefill_all(
    decoder: Decoder,
    weights: DecoderWeights,
    destinations: Sequence[Destination],
    prompt: Tensor,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    arena: Arena | None = None,
) -> Tensor:
    """`prefill` into several caches at once, which is exact: the tokens that a cache keeps do not change the prompt.

    Raises ValueError for policies that append different tokens.
    """
    arena = arena or Arena.without_memory(prompt.device)
    arena.clear()
    filled = [_Filled(decoder, prompt, destination) for destination in destinations]
    text, tokens = longest_text([fill.text for fill in filled]), len(prompt)
    hidden = arena.empty((len(text), decoder.config.shape.hidden), weights.embedding.dtype)
    buffers = LayerBuffers.take(arena, decoder.config.shape, hidden)
    torch.index_select(weights.embedding, 0, text, out=hidden)
    parts = Parts(tokens, len(text), chunk_tokens)
    for index, layer in enumerate(weights.layers):
        project_layer(decoder, layer, hidden, buffers, parts)
        masses: dict[Any, Tensor] = {}
        for fill in filled:
            fill.choose(index, buffers, masses)
        attend_layer(buffers, parts, decoder.config.windows[index])
        finish_layer(decoder, layer, hidden, buffers, parts)
        for fill in filled:
            fill.store(index, buffers)
    for to in destinations:
        to.cache.finish_prompt(to.row, tokens)
    return weights.head(decoder.norm(hidden[tokens - 1 : tokens], None, weights.norm)[1])[0]


class _Filled:
    """A destination during prefill, with the tokens that it keeps of the current layer."""

    def __init__(self, decoder: Decoder, prompt: Tensor, to: Destination) -> None:
        self._to, tokens = to, len(prompt)
        if to.observer is not None:
            to.observer.before_prefill(to.row, prompt)
        self._last = slice(max(0, tokens - to.observer.window) if to.observer else tokens, tokens)
        self._eviction = PromptEviction.of(decoder, to.scorer, prompt, to.cache)
        self.text = self._eviction.text()

    def choose(self, index: int, buffers: LayerBuffers, masses: dict[Any, Tensor]) -> None:
        """Selects the tokens to keep. Runs before the layer's attention, which overwrites the queries."""
        prompt = slice(len(self.text))  # without what others append
        queries, keys, values = buffers.queries[prompt], buffers.keys[:, prompt], buffers.values[:, prompt]
        self._kept = self._eviction.choose(index, queries, keys, values, masses)
        self._queries = queries[self._last].clone()

    def store(self, index: int, buffers: LayerBuffers) -> None:
        """Stores the selected tokens and passes them to the observer."""
        to, kept = self._to, self._kept
        keys, values = self._eviction.remaining(kept, buffers.keys, buffers.values)
        to.cache.store_prompt(index, to.row, keys, values)
        if to.observer is not None:
            to.observer.after_prefill(index, to.row, self._queries, keys, self._eviction.positions(kept))


@dataclass(frozen=True)
class Parts:
    """Splits `total` tokens into a prompt of `tokens` tokens and those appended to it, which it does not see.

    The two are projected and attend separately, so appended tokens do not change a bit of the prompt's results.
    """

    tokens: int
    total: int
    chunk_tokens: int = PREFILL_CHUNK_TOKENS

    @property
    def chunks(self) -> list[slice]:
        """Tokens that are projected together."""
        prompt, rest = (0, self.tokens), (self.tokens, self.total)
        return [
            slice(start, min(start + self.chunk_tokens, last))
            for first, last in (prompt, rest)
            for start in range(first, last, self.chunk_tokens)
        ]


class Padded(NamedTuple):
    """queries: [padded, q_heads, head_dim]; keys, values: [1, kv_heads, padded, head_dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class LayerBuffers:
    """Queries, keys and values of `tokens` tokens, then padding. Every layer of the prompt reuses the buffers.

    The padding is 0, as masked values still enter a product and must be finite. held: number of earlier tokens; their
    keys and values come first, and they have no queries.
    """

    tokens: int
    padded: Padded
    held: int = 0

    @classmethod
    def take(cls, arena: Arena, shape: ModelShape, hidden: Tensor, room: int = 0) -> LayerBuffers:
        """Buffers for tokens with these hidden states [tokens, hidden], and up to `room` earlier ones."""
        tokens, padded = len(hidden), int(padded_prompt(len(hidden)))
        kv_sizes = (1, shape.kv_heads, room + padded, shape.head_dim)
        q_sizes = (padded, shape.q_heads, shape.head_dim)
        buffers = Padded(*(arena.empty(sizes, hidden.dtype) for sizes in (q_sizes, kv_sizes, kv_sizes)))
        buffers.queries[tokens:] = 0
        buffers.keys[:, :, tokens:] = 0
        buffers.values[:, :, tokens:] = 0
        return cls(tokens, buffers)

    @property
    def queries(self) -> Tensor:
        """[tokens, q_heads, head_dim]."""
        return self.padded.queries[: self.tokens]

    @property
    def keys(self) -> Tensor:
        """[kv_heads, held + tokens, head_dim]."""
        return self.padded.keys[0, :, : self.held + self.tokens]

    @property
    def values(self) -> Tensor:
        """[kv_heads, held + tokens, head_dim]."""
        return self.padded.values[0, :, : self.held + self.tokens]


def prefill_layer(
    decoder: Decoder,
    layer: LayerWeights,
    hidden: Tensor,
    window: int | None,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    buffers: LayerBuffers | None = None,
) -> tuple[Tensor, Tensor]:
    """Updates hidden [tokens, hidden] in place; returns keys and values [kv_heads, tokens, head_dim].

    These are views of `buffers`, which are allocated unless given.
    """
    buffers = buffers or LayerBuffers.take(Arena.without_memory(hidden.device), decoder.config.shape, hidden)
    parts = Parts(len(hidden), len(hidden), chunk_tokens)
    project_layer(decoder, layer, hidden, buffers, parts)
    attend_layer(buffers, parts, window)
    finish_layer(decoder, layer, hidden, buffers, parts)
    return buffers.keys, buffers.values


def project_layer(
    decoder: Decoder,
    layer: LayerWeights,
    hidden: Tensor,
    buffers: LayerBuffers,
    parts: Parts,
    start: int = 0,
) -> None:
    """Fills the buffers with the layer's rotated queries and keys, and its values.

    start: position of the first token in the text.
    """
    queries, keys, values = buffers.padded
    for chunk in parts.chunks:
        places = torch.arange(chunk.start, chunk.stop, device=hidden.device)[None]
        normed = decoder.norm(hidden[chunk], None, layer.attention_norm)[1][None]
        tables = decoder.rotary(start + places)
        queries[chunk] = decoder.project(layer, normed, tables, keys, values, buffers.held + places)[0]


def attend_layer(buffers: LayerBuffers, parts: Parts, window: int | None) -> None:
    """Attention of every token to itself and to those before it, held ones too; the output overwrites the queries.

    The prompt attends together with what stands behind it up to its padded length, which none of its tokens sees.
    """
    queries, keys, values = buffers.padded
    held, tokens, padded = buffers.held, parts.tokens, int(padded_prompt(parts.tokens))
    seen = slice(held + padded)
    starts = range(tokens, parts.total, MAX_QUERIES)
    # Made before the prompt's attention: the decode kernel may read them before the kernel ahead of it has ended.
    first = torch.zeros(1, dtype=torch.int32, device=queries.device)
    # Counted there: a copy of the host's would wait for all that runs before.
    seen_first, seen_last = held + tokens + 1, held + parts.total + 1
    ends = torch.arange(seen_first, seen_last, MAX_QUERIES, dtype=torch.int32, device=queries.device)
    attend_in_place(queries[:padded], keys[0, :, seen], values[0, :, seen], window, tokens)
    for index, start in enumerate(starts):
        part = queries[None, start : min(start + MAX_QUERIES, parts.total)]
        part.copy_(decode_attention(part, keys, values, first, ends[index : index + 1]))


def plan_attention(decoder: Decoder, weights: DecoderWeights, arena: Arena, tokens: int, appended: int) -> None:
    """Runs attention once as for a prompt of this length and its appended tokens, so that cuDNN caches its plans.

    arena: memory for the buffers.
    """
    parts = Parts(tokens, tokens + appended)
    hidden = weights.embedding.new_empty(parts.total, 0)
    buffers = LayerBuffers.take(arena, decoder.config.shape, hidden)
    for window in set(decoder.config.windows):
        attend_layer(buffers, parts, window)


def finish_layer(decoder: Decoder, layer: LayerWeights, hidden: Tensor, buffers: LayerBuffers, parts: Parts) -> None:
    """Output projection and MLP, in place of hidden [tokens, hidden]."""
    for chunk in parts.chunks:
        attended = layer.output(buffers.queries[chunk].flatten(1))
        residual, normed = decoder.norm(hidden[chunk], attended, layer.mlp_norm)
        torch.add(residual, layer.mlp(normed), out=hidden[chunk])


def attend_in_place(queries: Tensor, keys: Tensor, values: Tensor, window: int | None, tokens: int) -> None:
    """`causal_attention` of queries [padded, q_heads, head_dim]; the output overwrites the first `tokens`.

    A long prompt's heads attend a few at a time, so that the part of the output beside the queries stays small.
    """
    kv_heads = len(keys)
    ratio, together = queries.shape[1] // kv_heads, max(1, PREFILL_ATTENDED_TOKENS // len(queries))
    for first in range(0, kv_heads, together):
        heads = slice(first, first + together)
        part = queries[:, first * ratio : (first + together) * ratio].transpose(0, 1)
        part[:, :tokens] = causal_attention(part, keys[heads], values[heads], window)[:, :tokens]


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of a text's last tokens, q [q_heads, tokens, head_dim]; keys, values [kv_heads, all tokens, head_dim].

    A token attends to itself and to those before it, to at most `window` in all; with a window q has all tokens.
    """
    tokens, seen = q.shape[1], keys.shape[1]
    if tokens < seen:
        assert window is None, "a window is of consecutive tokens"
        # Masked like this, FlashAttention forms no mask.
        return _attend(q, keys, values, attn_mask=causal_lower_right(tokens, seen))
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
    backends = LONG_PROMPT_BACKENDS if q.shape[1] >= PADDED_PROMPT_TOKENS else BACKENDS
    with sdpa_kernel(backends, set_priority=True):
        return functional.scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=attn_mask,
            is_causal=is_causal,
            enable_gqa=q.shape[0] != keys.shape[0],
        )[0]
