"""The compact decoder of the Llama-like families: one layer's parts, and a decode step over the cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.runtime.cache import Cache, Reader
from ridgeplan.runtime.config import DecoderConfig
from ridgeplan.runtime.weights import DecoderWeights, LayerWeights


class Decoder:
    """Computes layers of `config` on one device; weights and cache are arguments, so drafts share it."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies = torch.tensor(config.rotary_frequencies, dtype=torch.float32, device=device)

    def step(self, weights: DecoderWeights, cache: Cache, tokens: Tensor, reader: Reader) -> Tensor:
        """Float32 logits [rows, queries, vocab] of tokens [rows, queries], whose KV enters the cache."""
        hidden = functional.embedding(tokens, weights.embedding)
        rotary = self.rotary(reader.positions, hidden.dtype)
        for index, layer in enumerate(weights.layers):
            q, k, v = self.project(layer, hidden, rotary)
            cache.write(index, reader, k, v)
            attended = self._attend(index, cache, reader, q)
            hidden = hidden + layer.output(attended.flatten(2))
            hidden = hidden + self.mlp(layer, hidden)
        return self.logits(weights, hidden)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, head_dim / 2] of positions [...]."""
        angles = positions[..., None, None] * self.frequencies
        scale = self.config.rotary_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def project(
        self, layer: LayerWeights, hidden: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., q_heads, head_dim], rotated keys and values [..., kv_heads, head_dim]."""
        c = self.config
        heads = layer.qkv(self.norm(hidden, layer.attention_norm)).unflatten(-1, (-1, c.head_dim))
        turned, values = heads.split((c.q_heads + c.kv_heads, c.kv_heads), dim=-2)
        if layer.qk_norm is not None:
            turned = functional.rms_norm(turned, (c.head_dim,), eps=c.norm_eps) * layer.qk_norm
        queries, keys = rotate(turned, *rotary).split((c.q_heads, c.kv_heads), dim=-2)
        return queries, keys, values

    def mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self.norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def logits(self, weights: DecoderWeights, hidden: Tensor) -> Tensor:
        return weights.head(self.norm(hidden, weights.norm)).float()

    def _attend(self, index: int, cache: Cache, reader: Reader, q: Tensor) -> Tensor:
        keys, values = cache.full(index)
        window = self.config.windows[index]
        begin = reader.begin if window is None else torch.maximum(reader.begin, reader.end - window)
        codes = None if reader.groups is None else cache.codes(index)
        return decode_attention(q, keys, values, begin, reader.end, codes, reader.groups, lower=reader.lower)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's order: channel i turns with channel i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
