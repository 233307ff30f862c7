"""Chunked prefill: a prompt goes through all layers chunk by chunk, and each layer evicts after every chunk.

A chunk's queries attend to the chunk and to the tokens that their layer has kept of earlier chunks, at their original
positions. The policy then selects from both, so that after each chunk a layer holds as many tokens as if the prompt
ended there. Memory does not grow with the prompt: besides the cache there are only the buffers of one chunk and, if the
cache stores codes alone, the kept tokens of each layer in full precision. No sliding window hides any token, as
sequences that evict fit into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ridgeplan.roofline.execution import prompt_chunks
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.eviction.base import compact, largest
from ridgeplan.runtime.eviction.prompt import prompt_layer
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill import Destination, LayerBuffers, Parts, attend_layer, finish_layer, project_layer
from ridgeplan.runtime.model.weights import DecoderWeights


def chunk_bounds(tokens: int, chunk: int) -> list[int]:
    """The starts of chunks of up to `chunk` tokens, and the end. Chunks are of nearly equal size, so none is short."""
    count = int(prompt_chunks(tokens, chunk))
    return [tokens * index // count for index in range(count + 1)]


def chunked_prefill(
    decoder: Decoder,
    weights: DecoderWeights,
    to: Destination,
    prompt: Tensor,
    chunk: int,
    arena: Arena | None = None,
) -> Tensor:
    """`prefill` of a prompt [tokens] in chunks of up to `chunk` tokens; returns the logits [vocab] that follow it."""
    arena = arena or Arena.without_memory(prompt.device)
    arena.clear()
    if to.observer is not None:
        to.observer.before_prefill(to.row, prompt)
    bounds = chunk_bounds(len(prompt), chunk)
    prompt_in_chunks = _ChunkedPrompt(decoder, weights, to, prompt, bounds, arena)
    for start, stop in pairwise(bounds):
        hidden = prompt_in_chunks.process(start, stop, to.cache.config.kept(stop))
    to.cache.finish_prompt(to.row, len(prompt))
    return weights.head(decoder.norm(hidden[stop - start - 1 : stop - start], None, weights.norm)[1])[0]


class _ChunkedPrompt:
    """A prompt on its way through the layers: a chunk's buffers, and what each layer holds of the chunks before."""

    def __init__(
        self,
        decoder: Decoder,
        weights: DecoderWeights,
        to: Destination,
        prompt: Tensor,
        bounds: Sequence[int],
        arena: Arena,
    ) -> None:
        assert to.scorer is not None, "what layers hold is bounded by an eviction"
        self._decoder, self._weights, self._to, self._scorer, self._prompt = decoder, weights, to, to.scorer, prompt
        self._appended = to.scorer.appended(prompt)
        max_rows = max(stop - start for start, stop in pairwise(bounds)) + len(self._appended)
        shape, dtype = decoder.config.shape, weights.embedding.dtype
        rooms = [max(counts) for counts in zip(*map(to.cache.config.kept, bounds[1:-1]), strict=True)]
        self._hidden = arena.empty((max_rows, shape.hidden), dtype)
        self._buffers = LayerBuffers.take(arena, shape, self._hidden, max(rooms))
        for buffer in self._buffers.padded:
            buffer.zero_()  # short chunks leave a part of it unwritten, which is masked but must be finite
        self._held = _rooms(to.cache, to.row, rooms, arena, dtype)

    def process(self, start: int, stop: int, kept: Sequence[int]) -> Tensor:
        """Runs the tokens from `start` to `stop`, after which layers hold `kept`; returns their hidden states."""
        last, chunk = stop == len(self._prompt), self._prompt[start:stop]
        evicts = any(held.count + len(chunk) > count for held, count in zip(self._held, kept, strict=True))
        text = torch.cat([chunk, self._appended]) if evicts else chunk
        positions = torch.arange(start, stop, dtype=torch.int32, device=text.device)
        hidden, parts = self._hidden[: len(text)], Parts(len(chunk), len(text))
        torch.index_select(self._weights.embedding, 0, text, out=hidden)
        for index, layer in enumerate(self._weights.layers):
            held = self._held[index]
            buffers = replace(self._buffers, tokens=len(text), held=held.count)
            held.load(buffers)
            project_layer(self._decoder, layer, hidden, buffers, parts, start)
            places = self._chosen(index, buffers, len(chunk), kept[index], start)
            queries = self._last_queries(buffers, len(chunk)) if last else None
            attend_layer(buffers, parts, None)
            finish_layer(self._decoder, layer, hidden, buffers, parts)
            keys, values = compact(places, buffers.keys, buffers.values)
            held.positions = torch.cat([held.positions, positions.expand(len(keys), -1)], dim=1)
            held.positions = held.positions.gather(1, places.expand(len(keys), -1))
            if queries is None:
                held.keep(keys, values)
            else:
                self._store(index, keys, values, queries)
        return hidden

    def _chosen(self, index: int, buffers: LayerBuffers, chunk: int, kept: int, start: int) -> Tensor:
        """Places int64 [kv_heads or 1, kept] of the tokens to keep, among those a layer holds and `chunk` new ones."""
        tokens = buffers.held + chunk
        if kept == tokens:
            return torch.arange(tokens, device=buffers.keys.device)[None]
        layer = prompt_layer(
            self._decoder,
            index=index,
            tokens=tokens,
            budget=kept,
            queries=buffers.queries,
            keys=buffers.keys,
            values=buffers.values,
            held=buffers.held,
            start=start,
        )
        return largest(self._scorer.scores(layer), kept)

    def _last_queries(self, buffers: LayerBuffers, chunk: int) -> Tensor:
        """The prompt's last queries, as many as the observer needs and the last chunk has."""
        window = self._to.observer.window if self._to.observer is not None else 0
        return buffers.queries[max(0, chunk - window) : chunk].clone()

    def _store(self, index: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Stores the tokens that a layer has kept of the whole prompt, and passes them to the observer."""
        to = self._to
        to.cache.store_prompt(index, to.row, keys, values)
        if to.observer is not None:
            positions = self._held[index].positions.long() - len(self._prompt)
            to.observer.after_prefill(index, to.row, queries, keys, positions)


class _Held:
    """What one layer has kept of the chunks so far: positions int32 [kv_heads, count], and where its KV lies."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """keys, values: room for [kv_heads, tokens, head_dim]."""
        self._keys, self._values = keys, values
        self.positions = torch.empty(len(keys), 0, dtype=torch.int32, device=keys.device)

    @property
    def count(self) -> int:
        """Tokens of each KV head."""
        return self.positions.shape[1]

    def load(self, buffers: LayerBuffers) -> None:
        """Copies its keys and values ahead of a chunk's."""
        buffers.keys[:, : self.count] = self._keys[:, : self.count]
        buffers.values[:, : self.count] = self._values[:, : self.count]

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """Replaces its keys and values by those [kv_heads, count, head_dim] of its positions."""
        self._keys[:, : self.count] = keys
        self._values[:, : self.count] = values


def _rooms(cache: Cache, row: int, tokens: Sequence[int], arena: Arena, dtype: torch.dtype) -> list[_Held]:
    """Room for so many tokens of each layer: in the cache, where that keeps all of them in full precision."""
    if not cache.config.buffered:
        return [_Held(*(store[row] for store in cache.full(layer))) for layer in range(cache.layers)]
    _, kv_heads, _, head_dim = cache.full(0)[0].shape
    memory = arena.empty((2 * sum(tokens) * kv_heads * head_dim,), dtype)
    parts = memory.split([count * kv_heads * head_dim for count in tokens for _ in "kv"])
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [_Held(*(part.view(kv_heads, -1, head_dim) for part in pair)) for pair in pairs]
