"""Function-preserving inflation: a model of a larger shape that computes the same function as a small real model.

Speed depends on a model's shape, acceptance on what it has learned. Random weights of a large shape only give the
speed; a small model placed inside them, with zeros around it, gives both.

The residual stream is padded with zeros, and norms are rescaled accordingly. Added channels of heads have zero queries
and values; added heads and MLP channels have zero values and gates, so that nothing reaches the projections after them,
whose added weights are zero. Added layers are random up to their outputs, which are zero. A constant channel of the
residual stream, too small to affect the norms, pushes the logits of added tokens below all others.

Quantization is the small model's too: zeros do not widen the range of a group, added inputs are zero, so that GPTQ
cannot use them, and weights that were quantized together have a group to themselves (see `ChannelMap`). Noise fills all
other weights. All of it is read and multiplied as in a real model of that shape; but zeros take less power, so that a
GPU that is limited by power may clock a little higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import QUANTIZATION_GROUPS, fitting_group
from ridgeplan.runtime.model.decoder import DecoderConfig, Rotary
from ridgeplan.runtime.model.linear import Dense, GatedMLP, Linear
from ridgeplan.runtime.model.norms import Norm, RMSNorm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, LayerWeights
from ridgeplan.runtime.speculation.draft_head import STREAMS, HeadCheckpoint

GROUP = 128  # of a plan's weights, unless it says otherwise
LARGEST_GROUP = max(QUANTIZATION_GROUPS)


class InflationError(ValueError):
    """The small model does not fit into the shape."""


@dataclass(frozen=True)
class ChannelMap:
    """A small decoder and the large shape that holds it."""

    config: DecoderConfig
    shape: ModelShape

    def check(self) -> None:
        """Raises InflationError naming what does not fit."""
        config, shape = self.config.shape, self.shape
        if shape.is_moe or shape.is_mla or shape.window_layers or shape.qk_norm:
            raise InflationError(f"model {shape.name!r} is not a plain dense decoder; allowed: shapes like Llama's")
        if config.window_layers:
            raise InflationError("the small model has a sliding window; allowed: full attention")
        sizes = (
            ("layers", config.layers, shape.layers),
            ("hidden channels and a constant", config.hidden + 1, shape.hidden),
            ("head_dim", config.head_dim, shape.head_dim),
            ("MLP channels", config.intermediate, shape.intermediate),
            ("KV heads, as copies for its query heads", len(self.kv_heads), shape.kv_heads),
        )
        for name, small, large in sizes:
            if small > large:
                raise InflationError(f"the small model needs {small} {name}; allowed by {shape.name!r}: up to {large}")

    @property
    def constant_channel(self) -> int:
        """The channel of the residual stream with the constant.

        It comes first, as GPTQ makes up for errors at a channel in those after it, here none of the small model's.
        """
        return 0

    @property
    def hidden_channels(self) -> Tensor:
        """The channel of the residual stream for each of the small model's: with whole groups of their own if they fit,
        else adjacent.
        """
        placed = _placed(self.config.shape.hidden, self.shape.hidden - LARGEST_GROUP)
        return 1 + torch.arange(self.config.shape.hidden) if placed is None else LARGEST_GROUP + placed

    @property
    def quiet_channels(self) -> int:
        """Leading channels of the residual stream that share groups with the small model's or the constant."""
        return -(-(int(self.hidden_channels[-1]) + 1) // LARGEST_GROUP) * LARGEST_GROUP

    @property
    def mlp_channels(self) -> Tensor:
        """The MLP channel for each of the small model's."""
        small = self.config.shape.intermediate
        placed = _placed(small, self.shape.intermediate)
        return torch.arange(small) if placed is None else placed

    @property
    def q_width(self) -> int:
        """Channels of all query heads."""
        return self.shape.q_heads * self.shape.head_dim

    @property
    def qkv_width(self) -> int:
        """Channels of all query, key and value heads."""
        return self.q_width + 2 * self.shape.kv_heads * self.shape.head_dim

    @property
    def frequencies(self) -> tuple[float, ...]:
        """The small head's RoPE pairs come first; the frequencies of the other pairs do not matter."""
        small = self.config.rotary_frequencies
        return small + (small[-1],) * (self.shape.head_dim // 2 - len(small))

    @property
    def kv_heads(self) -> list[int]:
        """The small KV head in each used large one, copied once per group that its query heads need."""
        return [head for head in range(self.config.shape.kv_heads) for _ in range(self._copies)]

    @property
    def q_heads(self) -> list[int]:
        """The large query head of each small one, in a group whose KV head is a copy of the right one."""
        small, large = self._ratios
        groups = [divmod(index, large) for index in range(small)]
        firsts = [head * self._copies for head in range(self.config.shape.kv_heads)]
        return [(first + group) * large + place for first in firsts for group, place in groups]

    @property
    def qkv_heads(self) -> list[int]:
        """The large heads, counted over queries, keys and values, that hold small ones."""
        used = range(len(self.kv_heads))
        keys = [self.shape.q_heads + head for head in used]
        return [*self.q_heads, *keys, *(self.shape.kv_heads + head for head in keys)]

    @property
    def used_q_channels(self) -> Tensor:
        """All channels of the query heads that hold small ones."""
        return (torch.tensor(self.q_heads)[:, None] * self.shape.head_dim + torch.arange(self.shape.head_dim)).flatten()

    @property
    def value_channels(self) -> Tensor:
        """All channels of the values."""
        return torch.arange(self.qkv_width - self.shape.kv_heads * self.shape.head_dim, self.qkv_width)

    @property
    def small_channels(self) -> Tensor:
        """The small model's query, key or value channel for each of `channels(qkv_heads)`."""
        c = self.config.shape
        keys = [c.q_heads + head for head in self.kv_heads]
        heads = [*range(c.q_heads), *keys, *(c.kv_heads + head for head in keys)]
        return (torch.tensor(heads)[:, None] * c.head_dim + torch.arange(c.head_dim)).flatten()

    def channels(self, heads: list[int]) -> Tensor:
        """Channels of large heads that hold small ones; the two halves of a RoPE pair stay half a head apart."""
        half = torch.arange(self.config.shape.head_dim // 2)
        head = torch.cat([half, half + self.shape.head_dim // 2])
        return (torch.tensor(heads)[:, None] * self.shape.head_dim + head).flatten()

    @property
    def _ratios(self) -> tuple[int, int]:
        small, large = self.config.shape, self.shape
        return small.q_heads // small.kv_heads, large.q_heads // large.kv_heads

    @property
    def _copies(self) -> int:
        small, large = self._ratios
        return math.ceil(small / large)


def _placed(small: int, large: int) -> Tensor | None:
    """Where `small` channels go among `large` so that those with one scale in the small model have one to themselves.

    None where they do not fit.
    """
    group = fitting_group(small, GROUP)
    if group is None or small // group * GROUP > large:
        return None
    return (torch.arange(small // group)[:, None] * GROUP + torch.arange(group)).flatten()


CONSTANT = 2.0**-10  # in the residual stream, whose root mean square is about 0.1 to 1000
LIFT = 2.0**10  # weight of the final norm for the constant channel
PUSH = -(2.0**15)  # an added token's logit, per unit of the normalized constant


def inflated_shape(small: ModelShape, shape: ModelShape) -> ModelShape:
    """`shape` with an output head of its own, a vocabulary that holds the small model's, and its context limit."""
    return replace(shape, vocab=max(small.vocab, shape.vocab), max_context=small.max_context, tied_embeddings=False)


def inflated_config(config: DecoderConfig, shape: ModelShape) -> DecoderConfig:
    """The decoder of `inflated_shape(config.shape, shape)` that the weights of `Inflater` are for."""
    shape = inflated_shape(config.shape, shape)
    return replace(
        config,
        shape=shape,
        norm_eps=config.norm_eps * config.shape.hidden / shape.hidden,
        layers=DecoderConfig.plain(shape).layers,
        rotaries=(Rotary(ChannelMap(config, shape).frequencies, config.rotary_scale),),
    )


@dataclass(frozen=True, eq=False)
class Inflater:
    """Builds large weights from small ones; `generator` fills unused weights with noise."""

    channel_map: ChannelMap
    generator: torch.Generator

    @classmethod
    def build(cls, config: DecoderConfig, shape: ModelShape, device: torch.device, seed: int = 0) -> Inflater:
        """For weights of `config` on `device`. Raises InflationError naming what does not fit."""
        channel_map = ChannelMap(config, inflated_shape(config.shape, shape))
        channel_map.check()
        return cls(channel_map, torch.Generator(device).manual_seed(seed))

    def ends(self, small: DecoderWeights) -> DecoderWeights:
        """The embedding, the last norm and the head, without layers."""
        head = Dense(self.head(_dense(small.head).weight))
        return DecoderWeights(self.embedding(small.embedding), (), self.norm(small.norm, LIFT), head)

    def layers(self, small: DecoderWeights) -> Iterator[LayerWeights]:
        """The small model's layers and then the added ones, each built on demand."""
        for layer in small.layers:
            yield self.layer(layer)
        for _ in range(self.channel_map.shape.layers - len(small.layers)):
            yield self.idle(small.layers[0])

    def layer(self, small: LayerWeights) -> LayerWeights:
        """A layer of the small model."""
        attention, mlp = small.mixer, small.mlp
        if not isinstance(attention, AttentionWeights) or not isinstance(mlp, GatedMLP):
            raise InflationError("a layer has no attention or no dense MLP; allowed: plain dense decoders")
        if attention.qk_norm is not None:
            raise InflationError("the model normalizes queries and keys; allowed: families without such norms")
        channel_map, shape = self.channel_map, self.channel_map.shape
        q_channels = channel_map.channels(channel_map.q_heads)
        return LayerWeights(
            mixer_norm=self.norm(small.mixer_norm),
            mixer=AttentionWeights(
                qkv=self._qkv(_dense(attention.qkv)),
                output=self._written(_dense(attention.output), q_channels, channel_map.q_width),
            ),
            mlp_norm=self.norm(small.mlp_norm),
            mlp=GatedMLP(
                self._gate_up(_dense(mlp.gate_up)),
                self._written(_dense(mlp.down), channel_map.mlp_channels, shape.intermediate),
            ),
        )

    def idle(self, like: LayerWeights) -> LayerWeights:
        """A layer of the same sizes with random weights, whose outputs are zero."""
        layer = self.layer(like)
        qkv, output, gate_up, down = (_dense(linear).weight for linear in layer.projections)
        return replace(
            layer,
            mixer=AttentionWeights(Dense(self._noise(qkv)), Dense(torch.zeros_like(output))),
            mlp=GatedMLP(Dense(self._noise(gate_up)), Dense(torch.zeros_like(down))),
        )

    def draft_head(self, small: HeadCheckpoint) -> HeadCheckpoint:
        """A head of the small model as one of the shape's, of the same draft vocabulary.

        Its sizes, and so its cost, are those of a head that was trained for the shape with as many draft tokens. It
        reads the depths of the small model, whose layers come first. Raises InflationError for one of other heads.
        """
        config, shape, tensors = self.channel_map.config.shape, self.channel_map.shape, small.tensors
        sizes = [
            (each.q_heads, each.kv_heads, each.head_dim, each.intermediate)
            for each in (small.config.layer.shape, config)
        ]
        if sizes[0] != sizes[1]:
            raise InflationError(
                f"the draft head has {sizes[0]} heads, channels of one and of the MLP; allowed: {sizes[1]}"
            )
        hidden, q_channels = config.hidden, self.channel_map.channels(self.channel_map.q_heads)

        def taken(*names: str) -> Tensor:
            weights = [tensors[f"{name}.weight"].to(self.generator.device) for name in names]
            return weights[0] if len(weights) == 1 else torch.cat(weights)

        def projected(name: str, *parts: str) -> Dense:
            return Dense(taken(*(f"midlayer.{name}.{part}_proj" for part in parts)))

        def norm(name: str) -> Tensor:
            return self.norm(RMSNorm(taken(name), 0.0)).weight

        qkv = projected("self_attn", "q", "k", "v").weight
        both = [self._qkv(Dense(half)).weight for half in (qkv[:, :hidden], qkv[:, hidden:])]
        widths = [self.channel_map.q_width, *[(self.channel_map.qkv_width - self.channel_map.q_width) // 2] * 2]
        queries, keys, values = torch.cat(both, dim=1).split(widths)
        gate, up = self._gate_up(projected("mlp", "gate", "up")).weight.chunk(2)
        columns = torch.cat([index * shape.hidden + self.channel_map.hidden_channels for index in range(STREAMS)])
        draft_vocab = small.config.draft_vocab
        large = {
            "fc": self._written(Dense(taken("fc")), columns, STREAMS * shape.hidden).weight,
            "lm_head": self._reading(taken("lm_head"), torch.arange(draft_vocab), draft_vocab),
            "midlayer.self_attn.q_proj": queries, "midlayer.self_attn.k_proj": keys,
            "midlayer.self_attn.v_proj": values,
            "midlayer.self_attn.o_proj": self._written(projected("self_attn", "o"), q_channels, widths[0]).weight,
            "midlayer.mlp.gate_proj": gate, "midlayer.mlp.up_proj": up,
            "midlayer.mlp.down_proj": self._written(
                projected("mlp", "down"), self.channel_map.mlp_channels, shape.intermediate
            ).weight,
        }  # fmt: skip
        large |= {name: norm(name) for name in (each.removesuffix(".weight") for each in tensors) if "norm" in name}
        layer = inflated_config(small.config.layer, shape)
        single = replace(layer, shape=replace(layer.shape, layers=1), layers=layer.layers[:1])
        named = {f"{name}.weight": weight for name, weight in large.items()}
        return replace(small, config=replace(small.config, layer=single), tensors=named)

    def norm(self, small: Norm, lift: float = 0.0) -> RMSNorm:
        """A norm, rescaled as zero padding makes the mean square hidden / width of the small model's."""
        assert isinstance(small, RMSNorm), "a plain decoder's"
        width, small_width = self.channel_map.shape.hidden, len(small.weight)
        large = small.weight.new_zeros(width)
        large[self.channel_map.hidden_channels] = small.weight
        large[self.channel_map.constant_channel] = lift
        return RMSNorm(large * math.sqrt(small_width / width), small.eps * small_width / width)

    def embedding(self, small: Tensor) -> Tensor:
        """The embedding, with the constant channel set for every token."""
        large = small.new_zeros(self.channel_map.shape.vocab, self.channel_map.shape.hidden)
        large[: len(small), self.channel_map.hidden_channels] = small
        large[:, self.channel_map.constant_channel] = CONSTANT
        return large

    def head(self, small: Tensor) -> Tensor:
        """The output head; added tokens read the constant channel."""
        large = self._reading(small, torch.arange(len(small)), self.channel_map.shape.vocab)
        large[len(small) :, : self.channel_map.quiet_channels] = 0
        large[len(small) :, self.channel_map.constant_channel] = PUSH
        return large

    def _qkv(self, small: Dense) -> Dense:
        """The QKV projection; queries are scaled, as attention divides scores by the root of the larger head_dim."""
        channel_map, config = self.channel_map, self.channel_map.config.shape
        stretch = math.sqrt(channel_map.shape.head_dim / config.head_dim)
        rows = channel_map.channels(channel_map.qkv_heads)
        source = channel_map.small_channels
        scale = torch.where(source < config.q_width, stretch, 1.0).to(small.weight)
        # Added channels must not contribute to scores or to outputs, so their queries and values are zero.
        zeros = torch.cat([channel_map.used_q_channels, channel_map.value_channels])
        weight = self._reading(small.weight[source] * scale[:, None], rows, channel_map.qkv_width, zeros)
        bias = None if small.bias is None else self._spread(small.bias[source] * scale, rows, channel_map.qkv_width)
        return Dense(weight, bias)

    def _gate_up(self, small: Dense) -> Dense:
        """Gate and up projections, each with added channels, whose gates are zero."""
        width, channels = self.channel_map.shape.intermediate, self.channel_map.mlp_channels
        rows = torch.cat([channels, width + channels])
        weight = self._reading(small.weight, rows, 2 * width, torch.arange(width))
        return Dense(weight, None if small.bias is None else self._spread(small.bias, rows, 2 * width))

    def _reading(self, small: Tensor, rows: Tensor, width: int, zeros: Tensor | None = None) -> Tensor:
        """A projection from the residual stream to `width` outputs: the small one's in `rows`, zeros, and noise.

        zeros: rows without noise, as their outputs matter.
        """
        large = self._noise_like(small, width, self.channel_map.shape.hidden)
        if zeros is not None:
            large[zeros] = 0
        large[rows, : self.channel_map.quiet_channels] = 0
        large[rows[:, None], self.channel_map.hidden_channels] = small
        return large

    def _written(self, small: Dense, columns: Tensor, width: int) -> Dense:
        """A projection of `width` inputs into the residual stream: the small model's from `columns`, and zeros."""
        hidden, rows = self.channel_map.shape.hidden, self.channel_map.hidden_channels
        weight = small.weight.new_zeros(hidden, width)
        weight[rows[:, None], columns] = small.weight
        return Dense(weight, None if small.bias is None else self._spread(small.bias, rows, hidden))

    def _spread(self, small: Tensor, places: Tensor, width: int) -> Tensor:
        """A bias of `width` outputs, the small model's at `places`."""
        large = small.new_zeros(width)
        large[places] = small
        return large

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
