"""A compact decoder for Llama-like families: its configuration, the parts of a layer, and a step over the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.layer import Tables, add_rms_norm, rope_append, rotary_tables
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, KVAccess
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-like decoder.

    windows: each layer's sliding window in tokens, or None. rotary_frequencies: [head_dim / 2], radians per token.
    rotary_scale: the factor on cosines and sines, which YaRN calls attention factor.
    """

    shape: ModelShape
    norm_eps: float
    windows: tuple[int | None, ...]
    rotary_frequencies: tuple[float, ...]
    rotary_scale: float = 1.0

    @classmethod
    def plain(cls, shape: ModelShape, norm_eps: float = 1e-5) -> DecoderConfig:
        """A decoder with full attention in every layer and unscaled RoPE."""
        return cls(shape, norm_eps, (None,) * shape.layers, plain_frequencies(shape))


def plain_frequencies(shape: ModelShape) -> tuple[float, ...]:
    """Rotary frequencies without scaling, theta^(-2 i / head_dim) (RoFormer, Su et al. 2021, equation 15)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return tuple((1.0 / shape.rope_theta**exponents).tolist())


class Decoder:
    """Runs the layers of `config` on one device. Weights and cache are arguments, so drafts use it too."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies = torch.tensor(config.rotary_frequencies, dtype=torch.float32, device=device)

    def step(self, weights: DecoderWeights, cache: KVAccess, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Logits [rows, queries, vocab] of tokens [rows, queries], whose KV enters the cache."""
        hidden, update = functional.embedding(tokens, weights.embedding), None
        tables = self.rotary(metadata.positions)
        for index, layer in enumerate(weights.layers):
            hidden, normed = self.norm(hidden, update, layer.attention_norm)
            reads = metadata.layer_metadata(index)
            q = self.project(layer, normed, tables, *cache.full(index), reads.slots)
            attended = self._attend(index, cache, reads, q)
            hidden, normed = self.norm(hidden, layer.output(attended.flatten(2)), layer.mlp_norm)
            update = layer.mlp(normed)
        return weights.head(self.norm(hidden, update, weights.norm)[1])

    def rotary(self, positions: Tensor) -> Tables:
        """Cosines and sines [..., head_dim / 2] of positions [...]."""
        return rotary_tables(positions, self.frequencies, self.config.rotary_scale)

    def project(
        self, layer: LayerWeights, normed: Tensor, tables: Tables, keys: Tensor, values: Tensor, slots: Tensor
    ) -> Tensor:
        """Rotated queries [rows, queries, q_heads, head_dim]; the tokens' KV goes to `slots` of keys and values."""
        q_heads, eps = self.config.shape.q_heads, self.config.norm_eps
        return rope_append(layer.qkv(normed), tables, keys, values, slots, q_heads, qk_norm=layer.qk_norm, eps=eps)

    def norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with `update` added, and its norm."""
        return add_rms_norm(hidden, update, weight, self.config.norm_eps)

    def _attend(self, index: int, cache: KVAccess, metadata: AttentionMetadata, q: Tensor) -> Tensor:
        if metadata.attend is not None:  # drafts, which no sliding window limits
            return metadata.attend(index, q, metadata)
        window, scores = self.config.windows[index], metadata.scores(index) if metadata.scores is not None else None
        with cache.layer_kv(index, metadata) as reads:
            begin = reads.begin if window is None else torch.maximum(reads.begin, reads.end - window)
            read = (q, reads.keys, reads.values, begin, reads.end, reads.codes, reads.groups)
            return decode_attention(*read, lower=metadata.lower, scores=scores)
