"""Recordings of a model over a cached prompt: queries, attention, and the features of full-width retrieval heads.

A full-width head reads the target's features of the previous token. A study has them for a whole text, as it runs the
text through the model beforehand. A plan gets them too late to load the chosen tokens before the first layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.kernels.layer import rotate
from ridgeplan.roofline.plan.policies import selections
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, KVAccess
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.prefill_layer import prefill_layer
from ridgeplan.runtime.model.weights import AttentionWeights
from ridgeplan.runtime.policies.eviction_scorer import EvictionScorer, PromptLayer
from ridgeplan.runtime.policies.retrieval_head import RetrievalHeadSelector
from ridgeplan.runtime.retrieval.head import Head

TOGETHER = 16  # queries of one pass, the most that the attention kernels take


@dataclass(frozen=True, eq=False)
class Recording:
    """Queries and attention of some tokens.

    queries: [layers, tokens, q_heads, head_dim], after RoPE. positions: [tokens].
    attention: float32 [layers, tokens, kv_heads, prompt], the softmax weights of each token over the prompt and the
    tokens up to itself, of which the prompt's part is kept; mean over the query heads of a KV head.
    """

    queries: Tensor
    positions: Tensor
    attention: Tensor | None = None

    @property
    def prompt_attention(self) -> Tensor:
        """`attention` of a recording that has it."""
        assert self.attention is not None, "attention was recorded"
        return self.attention

    def before_rope(self, decoder: Decoder) -> Tensor:
        """The queries before their rotation, up to YaRN's factor: rotated back by the angles of their positions."""
        cos, sin = decoder.layer_rotary(0, self.positions)
        return rotate(self.queries.float(), cos, -sin)


class _Recorder(Decoder):
    """A decoder that keeps the queries of its passes."""

    def __init__(self, decoder: Decoder) -> None:
        self.config, self.frequencies = decoder.config, decoder.frequencies
        self.queries: list[Tensor] = []

    def attend(
        self, index: int, weights: AttentionWeights, cache: KVAccess, metadata: AttentionMetadata, q: Tensor
    ) -> Tensor:
        self.queries.append(q[0].clone())
        return super().attend(index, weights, cache, metadata, q)


class RecordedPrompt:
    """A prompt in an engine's full-precision cache, which passes over it leave unchanged."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        """engine: of plain decoding. Raises WorkloadError for a closed one, and for a model with sliding windows."""
        if engine.cache is None:
            raise WorkloadError("the engine is closed; load it again")
        if any(engine.decoder.config.windows):
            raise WorkloadError("the model has sliding windows; allowed: models whose layers read every token")
        self.engine, self.cache, self.length = engine, engine.cache, len(prompt)
        self.cache.reset(1)
        ids = torch.tensor(prompt, device=engine.device)
        with torch.inference_mode():
            prefill(engine.decoder, engine.weights, self.cache, 0, ids)

    @torch.inference_mode()
    def ask(self, tokens: Sequence[int], start: int, *, attention: bool = False) -> Recording:
        """Runs tokens, the first at position `start`, over the whole prompt, with attention if wanted."""
        return self._over(tokens, start, self.length, attention)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [tokens, vocab] after each of the tokens that follow the prompt."""
        ids, logits = torch.tensor(list(tokens), device=self.engine.device), []
        for first in range(0, len(ids), TOGETHER):
            part = ids[None, first : first + TOGETHER]
            self.cache.finish_prompt(0, self.length + first)
            metadata = AttentionMetadataBuilder(self.cache).target_metadata(part.shape[1])
            logits.append(self.engine.decoder.step(self.engine.weights, self.cache, part, metadata)[0])
        self.cache.finish_prompt(0, self.length)
        return torch.cat(logits)

    @torch.inference_mode()
    def last(self, count: int, prompt: Sequence[int]) -> Recording:
        """The prompt's own last `count` tokens, each over those up to itself."""
        first = self.length - count
        # This pass writes the same keys and values once more, and rounds them otherwise than prefill did.
        with self._restored(first, count):
            return self._over(prompt[-count:], first, first, attention=True)

    @torch.inference_mode()
    def eviction_scores(self, scorer: EvictionScorer, prompt: Sequence[int]) -> Tensor:
        """Scores [layers, kv_heads, prompt] of an eviction by appended tokens, as prefill would run it."""
        shape = self.engine.config.shape
        tokens = scorer.appended(torch.tensor(prompt, device=self.engine.device), shape.vocab).tolist()
        position = scorer.position(self.length)
        seen = min(position, self.length)
        with self._restored(seen, len(tokens)):
            queries = self._over(tokens, position, seen, attention=False).queries
            appended = self.cache.keys[:, 0, :, seen : seen + len(tokens)].clone()
        scores = []
        for index, keys in enumerate(appended):
            keys = torch.cat([self.cache.keys[index, 0, :, : self.length], keys], dim=1)
            layer = PromptLayer(
                index, shape.layers, self.length, self.length - 1, queries[index], keys, keys,
                self.engine.decoder.layer_frequencies(index)[0], held=self.length,
            )  # fmt: skip
            scores.append(scorer.scores(layer))
        return torch.stack(scores)

    @contextmanager
    def _restored(self, first: int, count: int) -> Iterator[None]:
        """Keeps the cache's `count` slots from `first` on as they are, whatever runs meanwhile."""
        slots, stores = slice(first, first + count), (self.cache.keys, self.cache.values)
        stored = [store[:, 0, :, slots].clone() for store in stores]
        yield
        for store, kept in zip(stores, stored, strict=True):
            store[:, 0, :, slots] = kept

    def _over(self, tokens: Sequence[int], start: int, cached: int, attention: bool) -> Recording:
        recorder, engine = _Recorder(self.engine.decoder), self.engine
        ids = torch.tensor(list(tokens), device=engine.device)
        positions = torch.arange(start, start + len(ids), device=engine.device)
        chunks = []
        for first in range(0, len(ids), TOGETHER):
            part = slice(first, first + TOGETHER)
            self.cache.finish_prompt(0, cached + first)
            metadata = replace(
                AttentionMetadataBuilder(self.cache).target_metadata(len(ids[part])), positions=positions[None, part]
            )
            recorder.step(engine.weights, self.cache, ids[None, part], metadata)
            chunks.append(torch.stack(recorder.queries))
            recorder.queries.clear()
        queries = torch.cat(chunks, dim=1)
        weights = self._attention(queries, cached) if attention else None
        self.cache.finish_prompt(0, self.length)
        return Recording(queries, positions, weights)

    def _attention(self, queries: Tensor, cached: int) -> Tensor:
        """Of queries whose own tokens lie in the cache from slot `cached` on."""
        weights = []
        for layer, queries_of_layer in enumerate(queries):
            keys = self.cache.full(layer)[0][0, :, : cached + len(queries_of_layer)]
            weights.append(attention_weights(queries_of_layer, keys)[..., : self.length])
        return torch.stack(weights)


def attention_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal softmax weights float32 [tokens, kv_heads, keys]; mean over the query heads of a KV head.

    queries: [tokens, q_heads, head_dim], of the last tokens; keys: [kv_heads, keys, head_dim]. Each token sees the keys
    up to its own.
    """
    tokens, kv_heads, count = len(queries), *keys.shape[:2]
    grouped = queries.float().unflatten(1, (kv_heads, -1))
    scores = torch.einsum("tkgd,knd->tkgn", grouped, keys.float()) * queries.shape[-1] ** -0.5
    places = torch.arange(count - tokens, count, device=keys.device)
    unseen = torch.arange(count, device=keys.device) > places[:, None]
    return scores.masked_fill(unseen[:, None, None], float("-inf")).softmax(-1).mean(2)


class FullHead(RetrievalHeadSelector):
    """features: [tokens, 3 hidden], of the token before each of the text, as `features_before` makes them."""

    inputs = "full"

    def __init__(
        self, selection: selections.RetrievalHead, builder: AttentionMetadataBuilder, head: Head, features: Tensor
    ) -> None:
        super().__init__(selection, builder, head)
        self.features = features

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.project(tokens, positions, self.rotary, self.features[positions])


def fused_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are EAGLE-3's features: low, middle and high, as its engines take them."""
    low, middle, high = 2, layers // 2, layers - 3
    return min(low, layers - 1), middle, max(high, 0)


@torch.inference_mode()
def features_before(engine: Engine, tokens: Tensor) -> Tensor:
    """The target's features of the token before each of a text [tokens], zeros before the first: [tokens, 3 hidden]."""
    decoder, hidden, by_layer = engine.decoder, engine.weights.embedded(tokens), {}
    layers = fused_layers(len(engine.weights.layers))
    for index, layer in enumerate(engine.weights.layers):
        if index in layers:
            by_layer[index] = hidden.clone()
        prefill_layer(decoder, index, layer, hidden)
    features = torch.cat([by_layer[index] for index in layers], dim=-1)
    return torch.cat([torch.zeros_like(features[:1]), features[:-1]])
