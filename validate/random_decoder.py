"""Small random decoders for timing the runtime."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.mlp import GatedMLP
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights
from ridgeplan.runtime.model_config import DecoderConfig
from ridgeplan.validate.timing import Bench


def llama_like_shape(
    layers: int, hidden: int, intermediate: int, q_heads: int, kv_heads: int, head_dim: int, vocab: int = 128
) -> ModelShape:
    """A small dense shape with tied embeddings and 4096 tokens of context."""
    return ModelShape(
        name="random",
        architecture="llama",
        layers=layers,
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        max_context=4096,
        tied_embeddings=True,
    )


@dataclass(frozen=True, eq=False)
class RandomDecoder:
    """A decoder of `shape` with an empty cache for plain decoding."""

    shape: ModelShape
    decoder: Decoder
    cache: Cache
    bench: Bench

    @classmethod
    def build(cls, bench: Bench, shape: ModelShape, context: int, new_tokens: int, batch: int = 1) -> RandomDecoder:
        """A decoder whose cache holds `context` + `new_tokens` tokens of `batch` sequences."""
        sizes = KVCacheConfig(batch, context + new_tokens)
        cache = Cache(shape, sizes, bench.device, bench.pool.dtype)
        return cls(shape, Decoder(DecoderConfig.plain(shape), bench.device), cache, bench)

    def weights(self) -> DecoderWeights:
        """Random weights, different in every layer, so that a step reads them from memory."""
        hidden = self.shape.hidden
        embedding = self.bench.random(self.shape.vocab, hidden)
        layers = tuple(self._layer() for _ in range(self.shape.layers))
        return DecoderWeights(embedding, layers, self.bench.random(hidden), Dense(embedding))

    def tokens(self, queries: int) -> Tensor:
        """Token ids [batch, queries]."""
        shape = (self.cache.config.batch, queries)
        return torch.randint(self.shape.vocab, shape, device=self.bench.device)

    def _layer(self) -> LayerWeights:
        shape, random = self.shape, self.bench.random

        def dense(outputs: int, inputs: int, bias: Tensor | None = None) -> Dense:
            return Dense(random(outputs, inputs) / inputs**0.5, bias)  # keeps activations near 1

        projected, heads = shape.q_width + 2 * shape.kv_width, shape.q_heads + shape.kv_heads
        return LayerWeights(
            attention_norm=random(shape.hidden),
            qkv=dense(projected, shape.hidden, random(projected).clone() if shape.attention_bias else None),
            qk_norm=random(heads, shape.head_dim) if shape.qk_norm else None,
            output=dense(shape.hidden, shape.q_width),
            mlp_norm=random(shape.hidden),
            mlp=GatedMLP(dense(2 * shape.intermediate, shape.hidden), dense(shape.hidden, shape.intermediate)),
        )
