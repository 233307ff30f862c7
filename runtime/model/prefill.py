"""Prefill of a prompt, layer by layer, into one cache or into several that keep different parts of it.

A layer runs over the whole prompt with exact attention, hands its KV to the cache, and its buffers serve the next
layer. A full-precision copy of all layers' KV never exists, so an eviction that works layer by layer never needs more
than one layer's KV beside what stays.

Chunked prefill: the prompt goes through all layers chunk by chunk, and each layer evicts after every chunk. A chunk's
queries attend to the chunk and to the tokens that their layer has kept of earlier chunks, at their original positions.
The policy then selects from both, so that after each chunk a layer holds as many tokens as if the prompt ended there.
Memory does not grow with the prompt: besides the cache there are only the buffers of one chunk and, if the cache stores
codes alone, the kept tokens of each layer in full precision. No sliding window hides any token, as sequences that evict
fit into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.experts import supports_grouped
from ridgeplan.roofline.execution import prefill_chunk_tokens, prompt_chunks
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.states import StateStore
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.latent import LatentAttentionWeights
from ridgeplan.runtime.model.prefill_layer import (
    LayerBuffers,
    Parts,
    attend_layer,
    finish_layer,
    gate_layer,
    project_latent,
    project_layer,
    recur_layer,
)
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, DeltaWeights, LayerWeights
from ridgeplan.runtime.policies.base import PromptObserver
from ridgeplan.runtime.policies.eviction_scorer import EvictionScorer, PromptLayer, compact, largest
from ridgeplan.runtime.sampling import all_finite, require_finite


def prefill(
    decoder: Decoder,
    weights: DecoderWeights,
    cache: Cache,
    row: int,
    prompt: Tensor,
    chunk_tokens: int | None = None,
    arena: Arena | None = None,
    scorer: EvictionScorer | None = None,
    observers: Sequence[PromptObserver] = (),
) -> Tensor:
    """Fills `row` of the cache from prompt [tokens]; returns the logits [vocab] that follow its last token.

    chunk_tokens: tokens that are projected together, by default as many as suit the device. arena: memory for the long
    buffers, cleared first; without one they are allocated. scorer: selects the kept tokens if the cache has room for
    only a part of the prompt.
    Raises ModelError for logits that are NaN or infinite.
    """
    logits = prefill_all(decoder, weights, [Destination(cache, row, scorer, observers)], prompt, chunk_tokens, arena)
    require_finite([bool(all_finite(logits))])
    return logits


@dataclass(frozen=True, eq=False)
class Destination:
    """The destination of a prompt's KV: a row of a cache, with a scorer and observers as for `prefill`."""

    cache: Cache
    row: int
    scorer: EvictionScorer | None = None
    observers: Sequence[PromptObserver] = ()

    @property
    def states(self) -> StateStore:
        """The cache's recurrent states, of models that have any."""
        assert self.cache.states is not None, "the model has recurrent states"
        return self.cache.states


def chunk_bounds(tokens: int, chunk: int) -> list[int]:
    """The starts of chunks of up to `chunk` tokens, and the end. Chunks are of nearly equal size, so none is short."""
    count = int(prompt_chunks(tokens, chunk))
    return [tokens * index // count for index in range(count + 1)]


def prefill_all(
    decoder: Decoder,
    weights: DecoderWeights,
    destinations: Sequence[Destination],
    prompt: Tensor,
    chunk_tokens: int | None = None,
    arena: Arena | None = None,
    evict_every: int = 0,
) -> Tensor:
    """`prefill` into several caches at once, which is exact: the tokens that a cache keeps do not change the prompt.

    evict_every: most tokens that go through all layers before these evict; 0: the whole prompt. With several chunks
    there is one destination, whose kept tokens the next chunk reads. Raises ValueError for policies that append
    different tokens.
    """
    arena = arena or Arena.without_memory(prompt.device)
    arena.clear()
    grouped = decoder.config.shape.is_moe and supports_grouped(weights.embedding)
    chunk_tokens = chunk_tokens or int(prefill_chunk_tokens(prompt.is_cuda, grouped))
    bounds = chunk_bounds(len(prompt), evict_every or len(prompt))
    whole = len(bounds) == 2
    assert whole or len(destinations) == 1, "later chunks read what one destination keeps of earlier ones"
    fills = [_PromptFill(decoder, prompt, destination) for destination in destinations]
    appended = _longest([fill.appended for fill in fills])
    max_rows = max(stop - start for start, stop in pairwise(bounds)) + len(appended)
    hidden_rows = arena.empty((max_rows, decoder.config.shape.hidden), weights.embedding.dtype)
    capacities = [max(counts) for counts in zip(*map(fills[0].kept, bounds[1:-1]), strict=True)]
    chunk_buffers = LayerBuffers.take(arena, decoder.config.shape, hidden_rows, max(capacities, default=0))
    for buffer in () if whole else chunk_buffers.padded:
        buffer.zero_()  # short chunks leave a part of it unwritten, which is masked but must be finite
    for destination in destinations if destinations[0].cache.states else ():
        destination.states.begin_prompt(destination.row)
    kept_layers = _kept_layers(destinations[0], capacities, arena, weights.embedding.dtype) if capacities else []
    for start, stop in pairwise(bounds):
        evicting = [fill.begin(start, stop, kept_layers) for fill in fills]
        text = torch.cat([prompt[start:stop], appended]) if any(evicting) else prompt[start:stop]
        position = _common_position(fills, stop)
        hidden, parts = hidden_rows[: len(text)], Parts(stop - start, len(text), chunk_tokens, position - stop)
        weights.embed(text, hidden)
        buffers = replace(chunk_buffers, tokens=len(text))
        chunk = _ChunkPass(decoder, buffers, parts, start, destinations, fills, kept_layers, whole)
        observing = [(observer, each.row) for each in destinations for observer in each.observers]
        for index, layer in enumerate(weights.layers):
            for observer, row in observing:
                observer.observe_prompt(index, row, start, hidden[: parts.tokens])
            mixed = layer.mixer.prefill(chunk, index, layer, hidden)
            finish_layer(layer, hidden, mixed, parts)
        for observer, row in observing:
            observer.observe_prompt(len(weights.layers), row, start, hidden[: parts.tokens])
    for destination in destinations:
        destination.cache.finish_prompt(destination.row, len(prompt))
    last = hidden[parts.tokens - 1 : parts.tokens]
    return weights.logits(weights.norm(last, None)[1])[0]


@dataclass(frozen=True, eq=False)
class _ChunkPass:
    """A chunk of a prompt, or all of it, on its way through the layers: `prompt` of `TokenMixer.prefill`.

    buffers: of the chunk, with room for what layers hold of earlier ones. start: position of the chunk's first token.
    whole: whether the chunk is the whole prompt.
    """

    decoder: Decoder
    buffers: LayerBuffers
    parts: Parts
    start: int
    destinations: Sequence[Destination]
    fills: Sequence[_PromptFill]
    kept_layers: Sequence[_KeptLayer]
    whole: bool

    def attend(self, index: int, layer: LayerWeights, attention: AttentionWeights, hidden: Tensor) -> Tensor:
        """Attention's output [tokens, q_heads, head_dim] of layer `index`, whose keys and values are stored."""
        parts, settings = self.parts, self.decoder.config.layers[index]
        buffers = self.buffers.of(settings.attention)
        if self.kept_layers:
            buffers = self.kept_layers[settings.place].ahead_of(buffers)
        project_layer(self.decoder, index, layer, attention, hidden, buffers, parts, self.start)
        masses: dict[Any, Tensor] = {}
        for fill in self.fills:
            fill.choose(index, buffers, masses)
        visible = _common_position(self.fills, buffers.held + parts.tokens)
        attend_layer(buffers, parts, settings, attention.sinks, windowed=self.whole, visible=visible)
        for fill in self.fills:
            fill.store(settings.place, buffers, self.kept_layers)
        gate_layer(layer, attention, hidden, buffers, parts)
        return buffers.queries

    def recur(self, index: int, layer: LayerWeights, state: DeltaWeights, hidden: Tensor) -> Tensor:
        """The state's output [tokens, value heads, value_dim] of layer `index`, whose states are stored."""
        place, stop = self.decoder.config.layers[index].place, self.start + self.parts.tokens
        first, *others = self.destinations
        current, earlier = first.states.states[place, first.row], first.states.earlier(place, first.row, self.start)
        sizes = self.buffers, self.parts, earlier, current
        out, last = recur_layer(layer, state, hidden, *sizes)
        for other in others:
            other.states.states[place, other.row] = current
        for destination in self.destinations:
            destination.states.store_inputs(place, destination.row, stop, last)
        return out

    def attend_latent(
        self, index: int, layer: LayerWeights, attention: LatentAttentionWeights, hidden: Tensor
    ) -> Tensor:
        """As `attend`, of a layer with latent attention, of whose prompts nothing is evicted."""
        decoder, buffers = self.decoder, self.buffers
        rows = project_latent(decoder, index, layer, attention, hidden, buffers, self.parts)
        attend_layer(buffers, self.parts, decoder.config.layers[index])
        for fill in self.fills:
            fill.store_rows(decoder.config.layers[index].place, rows, attention.keys.shape[-1])
        return buffers.queries[..., : attention.values.shape[1]]


class _PromptFill:
    """A destination during prefill, with the tokens that it keeps of the current layer; None if it keeps all."""

    _chosen: Tensor | None

    def __init__(self, decoder: Decoder, prompt: Tensor, destination: Destination) -> None:
        self._decoder, self._prompt, self._destination = decoder, prompt, destination
        for observer in destination.observers:
            observer.before_prefill(destination.row, prompt)
        evicts = min(destination.cache.config.chosen(len(prompt)), default=len(prompt)) < len(prompt)
        assert destination.scorer is not None or not evicts, "a cache of evicted prompts needs a scorer"
        self._scorer = destination.scorer if destination.scorer is not None and evicts else None
        vocab = decoder.config.shape.vocab
        self.appended = prompt[:0] if self._scorer is None else self._scorer.appended(prompt, vocab)

    def position(self, tokens: int) -> int:
        """Position of the first appended token after so many tokens."""
        return tokens if self._scorer is None else self._scorer.position(tokens)

    def kept(self, tokens: int) -> tuple[int, ...]:
        """Tokens that each layer keeps of the prompt's first `tokens`."""
        return self._destination.cache.config.kept(tokens) or (tokens,) * self._decoder.config.shape.kv_layers

    def begin(self, start: int, stop: int, kept_layers: Sequence[_KeptLayer]) -> bool:
        """Begins the chunk from `start` to `stop`; returns whether a layer evicts after it."""
        self._start, self._tokens, self._budgets = start, stop - start, self.kept(stop)
        self._continues = stop < len(self._prompt)
        counts = [layer.count for layer in kept_layers] or [0] * len(self._budgets)
        return any(
            count + self._tokens > budget and not self._window(layer)
            for layer, (count, budget) in enumerate(zip(counts, self._budgets, strict=True))
        )

    def _window(self, layer: int) -> int:
        """The window of a layer that keeps it alone, in which no policy chooses; 0 for any other layer."""
        return self._destination.cache.config.window(layer)

    def choose(self, index: int, buffers: LayerBuffers, masses: dict[Any, Tensor]) -> None:
        """Selects the tokens to keep. Runs before the layer's attention, which overwrites the queries."""
        tokens, scorer = buffers.held + self._tokens, self._destination.scorer
        rows = self._tokens + len(self.appended)  # without what others append
        self._chosen = None
        place = self._decoder.config.layers[index].place
        evicts = self._budgets[place] < tokens
        if self._window(place):
            return
        if scorer is not None and (evicts or (scorer.accumulates and self._continues)):
            frequencies, rotary_scale = self._decoder.layer_frequencies(index)
            layer = PromptLayer(
                index=place,
                layers=self._decoder.config.shape.kv_layers,
                tokens=tokens,
                budget=min(self._budgets[place], tokens),
                queries=buffers.queries[:rows],
                keys=buffers.keys[:, : buffers.held + rows],
                values=buffers.values[:, : buffers.held + rows],
                frequencies=frequencies,
                rotary_scale=rotary_scale,
                masses=masses,
                held=buffers.held,
                start=self._start,
            )
            scores = scorer.scores(layer)
            self._chosen = largest(scores, layer.budget) if evicts else None
        if observers := self._destination.observers:
            window = 0 if self._continues else max(observer.window for observer in observers)
            self._queries = buffers.queries[max(0, self._tokens - window) : self._tokens].clone()

    def store(self, index: int, buffers: LayerBuffers, kept_layers: Sequence[_KeptLayer]) -> None:
        """Stores the selected tokens and passes them to the observers, or keeps them for the next chunk."""
        destination, tokens, chosen = self._destination, buffers.held + self._tokens, self._chosen
        stop = self._start + self._tokens
        if self._window(index):
            latest = slice(tokens - self._budgets[index], tokens)
            destination.cache.store_prompt(index, destination.row, buffers.keys[:, latest], buffers.values[:, latest])
            return
        keys, values = buffers.keys[:, :tokens], buffers.values[:, :tokens]
        if chosen is None and stop == len(self._prompt) and not destination.observers:
            destination.cache.store_prompt(index, destination.row, keys, values)  # all of it, and nobody asks where
            return
        positions = torch.arange(self._start, stop, dtype=torch.int32, device=keys.device)[None]
        if kept_layers:
            earlier = kept_layers[index].positions
            positions = torch.cat([earlier, positions.expand(len(earlier), -1)], dim=1)
        if chosen is not None:
            keys, values = compact(chosen, keys, values)
            heads = max(len(positions), len(chosen))
            positions = positions.expand(heads, -1).gather(1, chosen.expand(heads, -1))
        if stop < len(self._prompt):
            kept_layers[index].keep(keys, values, positions)
            return
        destination.cache.store_prompt(index, destination.row, keys, values)
        for observer in destination.observers:
            queries = self._queries[max(0, len(self._queries) - observer.window) :]
            observer.after_prefill(index, destination.row, queries, keys, positions.long() - len(self._prompt))

    def store_rows(self, index: int, rows: Tensor, latent: int) -> None:
        """Stores a layer's latent rows [tokens, latent + rope]: latents as keys, and rotated keys as values."""
        keys, values = rows[None, :, :latent], rows[None, :, latent:]
        self._destination.cache.store_prompt(index, self._destination.row, keys, values)


def _longest(appended: Sequence[Tensor]) -> Tensor:
    """The longest of the tokens that policies append, which the others must begin with; else raises ValueError."""
    longest = max(appended, key=len)
    if any(not torch.equal(tokens, longest[: len(tokens)]) for tokens in appended):
        raise ValueError("the policies append different tokens to the prompt; allowed: the same or none")
    return longest


def _common_position(fills: Sequence[_PromptFill], tokens: int) -> int:
    """Where appended tokens stand after so many tokens. Raises ValueError for policies that disagree on it."""
    positions = {fill.position(tokens) for fill in fills if len(fill.appended)} or {tokens}
    if len(positions) > 1:
        raise ValueError(f"the policies append tokens at positions {sorted(positions)}; allowed: at the same")
    return positions.pop()


class _KeptLayer:
    """What one layer has kept of the chunks so far: positions int32 [1 or kv_heads, count], and where its KV lies."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """keys, values: room for [kv_heads, tokens, head_dim]."""
        self._keys, self._values = keys, values
        self.positions = torch.empty(1, 0, dtype=torch.int32, device=keys.device)

    @property
    def count(self) -> int:
        """Tokens of each KV head."""
        return self.positions.shape[1]

    def ahead_of(self, buffers: LayerBuffers) -> LayerBuffers:
        """The buffers with these keys and values copied ahead of a chunk's."""
        joined = replace(buffers, held=self.count)
        joined.keys[:, : self.count] = self._keys[:, : self.count]
        joined.values[:, : self.count] = self._values[:, : self.count]
        return joined

    def keep(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Replaces what it holds by these tokens, keys and values [kv_heads, count, head_dim]."""
        self.positions = positions
        self._keys[:, : self.count] = keys
        self._values[:, : self.count] = values


def _kept_layers(
    destination: Destination, capacities: Sequence[int], arena: Arena, dtype: torch.dtype
) -> list[_KeptLayer]:
    """Room for so many tokens of each layer: in the cache, where that keeps all of them in full precision."""
    cache = destination.cache
    if not cache.config.buffered:
        return [_KeptLayer(*(store[destination.row] for store in cache.full(layer))) for layer in range(cache.layers)]
    _, kv_heads, _, head_dim = cache.full(0)[0].shape
    memory = arena.empty((2 * sum(capacities) * kv_heads * head_dim,), dtype)
    parts = memory.split([count * kv_heads * head_dim for count in capacities for _ in "kv"])
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [_KeptLayer(*(part.view(kv_heads, -1, head_dim) for part in pair)) for pair in pairs]
