"""Function-preserving inflation: a model of a larger shape that computes the same function as a small real model.

Speed depends on a model's shape, acceptance on what it has learned. Random weights of a large shape only give the
speed; a small model placed inside them, with zeros around it, gives both.

The residual stream is padded with zeros, and norms are rescaled accordingly. Added channels of heads have zero queries
and are not read by outputs; added heads, MLP channels and layers are random, with zero output projections. A constant
channel of the residual stream, too small to affect the norms, pushes the logits of added tokens below all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.mlp import GatedMLP
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights
from ridgeplan.runtime.model_config import DecoderConfig
from ridgeplan.validate.decode_bench.channel_map import ChannelMap, InflationError

CONSTANT = 2.0**-10  # in the residual stream, whose root mean square is about 0.1 to 1000
LIFT = 2.0**10  # weight of the final norm for the constant channel
PUSH = -(2.0**15)  # an added token's logit, per unit of the normalized constant


def inflated_shape(config: DecoderConfig, shape: ModelShape) -> ModelShape:
    """`shape` with an output head of its own, a vocabulary that holds the small model's, and its context limit."""
    small = config.shape
    return replace(shape, vocab=max(small.vocab, shape.vocab), max_context=small.max_context, tied_embeddings=False)


def inflated_config(config: DecoderConfig, shape: ModelShape) -> DecoderConfig:
    """The decoder of `inflated_shape(config, shape)` that `inflated_weights` are for."""
    shape = inflated_shape(config, shape)
    return replace(
        config,
        shape=shape,
        norm_eps=config.norm_eps * config.shape.hidden / shape.hidden,
        windows=(None,) * shape.layers,
        rotary_frequencies=ChannelMap(config, shape).frequencies,
    )


def inflated_weights(
    config: DecoderConfig, weights: DecoderWeights, shape: ModelShape, seed: int = 0
) -> DecoderWeights:
    """Weights for `inflated_config(config, shape)` that compute the function of `weights`, on their device.

    They do not depend on RoPE scaling. Raises InflationError naming what does not fit.
    """
    shape = inflated_shape(config, shape)
    channel_map = ChannelMap(config, shape)
    channel_map.check()
    inflater = _Inflater(channel_map, torch.Generator(weights.embedding.device).manual_seed(seed))
    used = [inflater.layer(layer) for layer in weights.layers]
    idle = [inflater.idle(weights.layers[0]) for _ in range(shape.layers - config.shape.layers)]
    return DecoderWeights(
        embedding=inflater.embedding(weights.embedding),
        layers=(*used, *idle),
        norm=inflater.norm(weights.norm, LIFT),
        head=Dense(inflater.head(_dense(weights.head).weight)),
    )


@dataclass(frozen=True, eq=False)
class _Inflater:
    """Builds large weights from small ones; `generator` fills unused weights with noise."""

    channel_map: ChannelMap
    generator: torch.Generator

    def layer(self, small: LayerWeights) -> LayerWeights:
        """A layer of the small model."""
        if small.qk_norm is not None:
            raise InflationError("the model normalizes queries and keys; allowed: families without such norms")
        channel_map = self.channel_map
        return LayerWeights(
            attention_norm=self.norm(small.attention_norm),
            qkv=self._qkv(_dense(small.qkv)),
            qk_norm=None,
            output=self._written(_dense(small.output), channel_map.channels(channel_map.q_heads), channel_map.q_width),
            mlp_norm=self.norm(small.mlp_norm),
            mlp=self._mlp(small.mlp),
        )

    def idle(self, like: LayerWeights) -> LayerWeights:
        """A layer of the same sizes with random weights, whose outputs are zero."""
        layer = self.layer(like)
        return replace(
            layer,
            qkv=Dense(self._noise(_dense(layer.qkv).weight)),
            output=Dense(torch.zeros_like(_dense(layer.output).weight)),
            mlp=GatedMLP(
                Dense(self._noise(_dense(layer.mlp.gate_up).weight)),
                Dense(torch.zeros_like(_dense(layer.mlp.down).weight)),
            ),
        )

    def norm(self, small: Tensor, lift: float = 0.0) -> Tensor:
        """A norm's weight, rescaled as zero padding makes the mean square hidden / width of the small model's."""
        width = self.channel_map.shape.hidden
        large = small.new_zeros(width)
        large[: len(small)] = small
        large[len(small)] = lift
        return large * math.sqrt(len(small) / width)

    def embedding(self, small: Tensor) -> Tensor:
        """The embedding, with the constant channel set for every token."""
        large = small.new_zeros(self.channel_map.shape.vocab, self.channel_map.shape.hidden)
        large[: len(small), : small.shape[1]] = small
        large[:, small.shape[1]] = CONSTANT
        return large

    def head(self, small: Tensor) -> Tensor:
        """The output head; added tokens read the constant channel, and random weights of zero channels."""
        tokens, hidden = small.shape
        large = self._noise_like(small, self.channel_map.shape.vocab, self.channel_map.shape.hidden)
        large[:, : hidden + 1] = 0
        large[:tokens, :hidden] = small
        large[tokens:, hidden] = PUSH
        return large

    def _qkv(self, small: Dense) -> Dense:
        """The QKV projection; queries are scaled, as attention divides scores by the root of the larger head_dim."""
        channel_map, config = self.channel_map, self.channel_map.config.shape
        stretch = math.sqrt(channel_map.shape.head_dim / config.head_dim)
        weight = self._noise_like(small.weight, channel_map.qkv_width, channel_map.shape.hidden)
        # Added channels must not contribute to scores, so their queries are zero.
        weight.unflatten(0, (-1, channel_map.shape.head_dim))[channel_map.q_heads] = 0
        bias = None if small.bias is None else small.bias.new_zeros(channel_map.qkv_width)
        q_width = config.q_heads * config.head_dim
        rows = channel_map.channels(channel_map.qkv_heads).to(weight.device)
        source = channel_map.small_channels.to(weight.device)
        scale = torch.where(source < q_width, stretch, 1.0)
        weight[rows, : config.hidden] = (small.weight[source] * scale[:, None]).to(weight.dtype)
        if bias is not None and small.bias is not None:
            bias[rows] = (small.bias[source] * scale).to(bias.dtype)
        return Dense(weight, bias)

    def _mlp(self, small: GatedMLP) -> GatedMLP:
        shape, used = self.channel_map.shape, range(self.channel_map.config.shape.intermediate)
        return GatedMLP(
            self._gate_up(_dense(small.gate_up)), self._written(_dense(small.down), used, shape.intermediate)
        )

    def _gate_up(self, small: Dense) -> Dense:
        """Gate and up projections, each with added channels."""
        width, half = self.channel_map.shape.intermediate, len(small.weight) // 2
        weight = self._noise_like(small.weight, 2 * width, self.channel_map.shape.hidden)
        bias = None if small.bias is None else small.bias.new_zeros(2 * width)
        for start, rows in ((0, slice(0, half)), (width, slice(half, None))):
            weight[start : start + half, : small.weight.shape[1]] = small.weight[rows]
            if bias is not None and small.bias is not None:
                bias[start : start + half] = small.bias[rows]
        return Dense(weight, bias)

    def _written(self, small: Dense, inputs: Tensor | range, width: int) -> Dense:
        """A projection into the residual stream: the small model's from `inputs`, and zeros."""
        outputs = small.weight.shape[0]
        columns = torch.as_tensor(inputs, device=small.weight.device)
        weight = small.weight.new_zeros(self.channel_map.shape.hidden, width)
        weight[:outputs, columns] = small.weight
        bias = None if small.bias is None else small.bias.new_zeros(self.channel_map.shape.hidden)
        if bias is not None and small.bias is not None:
            bias[:outputs] = small.bias
        return Dense(weight, bias)

    def _noise(self, like: Tensor) -> Tensor:
        return self._noise_like(like, *like.shape)

    def _noise_like(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """Noise with a weight's dtype and scale."""
        noise = torch.empty(rows, columns, dtype=like.dtype, device=like.device)
        return noise.normal_(std=float(like.float().std()), generator=self.generator)


def _dense(linear: Linear) -> Dense:
    if not isinstance(linear, Dense):
        raise InflationError("the model's weights are 4-bit; allowed: full-precision weights")
    return linear
