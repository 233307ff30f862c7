"""The decoder: its configuration, layer by layer, the parts of a layer, and a step over the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.experts import SWIGLU, Activation
from ridgeplan.kernels.layer import Tables, rope_append, rotary_tables
from ridgeplan.roofline.catalog.layers import Attention, LayerGroup, Routing, State
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, KVAccess
from ridgeplan.runtime.model.checkpoint_layout import CheckpointLayout
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding. frequencies: [head_dim / 2], radians per token, 0 for channels that do not turn.

    scale: the factor on cosines and sines, which YaRN calls attention factor. growth: (beta, tokens) of queries that
    are scaled by 1 + beta ln(1 + floor(position / tokens)), as in Llama 4.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    growth: tuple[float, float] | None = None


@dataclass(frozen=True)
class LayerSettings:
    """What one layer's token mixer is: attention with its sizes and window, or a recurrent state.

    rotary: which of the decoder's rotary embeddings it uses. place: its number among the layers with attention, which
    the cache has, or among those with a recurrent state. soft_cap: c of scores c tanh(score / c); 0 for none.
    """

    attention: Attention | None
    state: State | None = None
    rotary: int = 0
    place: int = 0
    soft_cap: float = 0.0

    @property
    def window(self) -> int | None:
        """The sliding window in tokens; None for layers that read every token."""
        return self.attention.window_tokens if self.attention else None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: its shape, the settings of each layer, its rotary embeddings, how its weights are loaded, and
    how its routers choose experts.

    norm_eps: of norms of the stream. Of latent attention, score_scale: a factor on scores beside
    head_dim ** -0.5, which loading folds into queries; interleaved_rope: whether RoPE turns each channel of a
    checkpoint with the next one.
    """

    shape: ModelShape
    norm_eps: float
    layers: tuple[LayerSettings, ...]
    rotaries: tuple[Rotary, ...]
    checkpoint: CheckpointLayout = field(default_factory=CheckpointLayout)
    routing: Routing | None = None
    expert_activation: Activation = SWIGLU
    score_scale: float = 1.0
    interleaved_rope: bool = False

    @classmethod
    def plain(cls, shape: ModelShape, norm_eps: float = 1e-5) -> DecoderConfig:
        """A decoder with unscaled RoPE and full attention, in every layer or where a hybrid has attention."""
        rotaries = (Rotary(tuple(frequencies_of(shape.rope_theta, shape.rope_head_dim or shape.head_dim))),)
        if shape.states:
            return cls(shape, norm_eps, layer_settings(shape.group_of_each), rotaries)
        attention = replace(shape.attentions[0][0], window_tokens=None)
        layers = tuple(LayerSettings(attention, place=place) for place in range(shape.layers))
        return cls(shape, norm_eps, layers, rotaries)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens, or None."""
        return tuple(layer.window for layer in self.layers)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """`windows` of the layers with attention, as a cache numbers them."""
        return tuple(layer.window for layer in self.layers if layer.attention)

    @property
    def rotary_frequencies(self) -> tuple[float, ...]:
        """Frequencies of the first rotary embedding."""
        return self.rotaries[0].frequencies

    @property
    def rotary_scale(self) -> float:
        """The scale of the first rotary embedding."""
        return self.rotaries[0].scale


def layer_settings(groups: Iterable[LayerGroup]) -> tuple[LayerSettings, ...]:
    """The settings of layers of these `groups`, numbered by kind: those with attention, and those with a state."""
    counts = {False: 0, True: 0}
    layers = []
    for group in groups:
        has_state = group.state is not None
        layers.append(LayerSettings(group.attention, group.state, place=counts[has_state]))
        counts[has_state] += 1
    return tuple(layers)


def frequencies_of(theta: float, channels: int) -> list[float]:
    """Rotary frequencies without scaling, theta^(-2 i / channels) (RoFormer, Su et al. 2021, equation 15)."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies: list[float] = (1.0 / theta**exponents).tolist()
    return frequencies


class Step(NamedTuple):
    """What the layers of one step share. tables: of every rotary embedding, at the tokens' positions.

    accepted: int32 [rows], tokens of each row's text, of models with recurrent states.
    """

    cache: KVAccess
    metadata: AttentionMetadata
    tables: tuple[Tables, ...]
    accepted: Tensor | None = None


class StreamObserver(Protocol):
    """Keeps what a decode pass's stream holds at some depths."""

    def observe(self, depth: int, stream: Tensor) -> None:
        """stream: [rows, queries, hidden], after `depth` layers; not written to later."""


class Decoder:
    """Runs the layers of `config` on one device. Weights and cache are arguments, so drafts use it too."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies = tuple(
            torch.tensor(rotary.frequencies, dtype=torch.float32, device=device) for rotary in config.rotaries
        )

    def step(
        self,
        weights: DecoderWeights,
        cache: KVAccess,
        tokens: Tensor,
        metadata: AttentionMetadata,
        observer: StreamObserver | None = None,
    ) -> Tensor:
        """Logits [rows, queries, vocab] of tokens [rows, queries], whose KV enters the cache."""
        hidden, update = weights.embedded(tokens), None
        states = cache.states
        step = Step(cache, metadata, self.rotary(metadata.positions), None if states is None else cache.accepted)
        for index, layer in enumerate(weights.layers):
            hidden, normed = layer.mixer_norm(hidden, update)
            if observer is not None:
                observer.observe(index, hidden)
            hidden, normed = layer.after_mixer(hidden, layer.mixer.step(self, index, normed, step))
            update = layer.after_mlp(normed)
        if states is not None and step.accepted is not None:
            states.commit(step.accepted)
        hidden, normed = weights.norm(hidden, update)
        if observer is not None:
            observer.observe(len(weights.layers), hidden)
        return weights.logits(normed)

    def rotary(self, positions: Tensor) -> tuple[Tables, ...]:
        """Cosines and sines [..., head_dim / 2] of positions [...], by each of the rotary embeddings."""
        return tuple(self._tables(number, positions) for number in range(len(self.frequencies)))

    def layer_rotary(self, index: int, positions: Tensor) -> Tables:
        """Cosines and sines [..., head_dim / 2] of positions [...], by the rotary embedding of one layer."""
        return self._tables(self.config.layers[index].rotary, positions)

    def _tables(self, number: int, positions: Tensor) -> Tables:
        return rotary_tables(positions, self.frequencies[number], self.config.rotaries[number].scale)

    def layer_frequencies(self, index: int) -> tuple[Tensor, float]:
        """Rotary frequencies [head_dim / 2] and scale of one layer."""
        number = self.config.layers[index].rotary
        return self.frequencies[number], self.config.rotaries[number].scale

    def project(
        self,
        index: int,
        weights: AttentionWeights,
        normed: Tensor,
        tables: Tables,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Rotated queries [rows, queries, q_heads, head_dim]; the tokens' KV goes to `slots` of keys and values."""
        settings, norm = self.config.layers[index], weights.qk_norm
        assert settings.attention is not None, "the layer has attention"
        qk_norm, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        qkv, q_heads = weights.projected(normed, settings.attention), settings.attention.q_heads
        q = rope_append(qkv, tables, keys, values, slots, q_heads, qk_norm=qk_norm, eps=eps)
        growth = self.config.rotaries[settings.rotary].growth
        return q if growth is None else grown(q, positions, *growth)

    def attend(
        self, index: int, weights: AttentionWeights, cache: KVAccess, metadata: AttentionMetadata, q: Tensor
    ) -> Tensor:
        """Attention of queries [rows, queries, q_heads, head_dim] to what the pass reads of layer `index`."""
        settings = self.config.layers[index]
        window, place = settings.window, settings.place
        if metadata.attend is not None:  # drafts, which no sliding window limits
            return metadata.attend(place, q, metadata)
        scores = metadata.scores(place) if metadata.scores is not None else None
        with cache.layer_kv(place, metadata) as reads:
            begin = reads.begin if window is None else torch.maximum(reads.begin, reads.end - window)
            read = (q, reads.keys, reads.values, begin, reads.end, reads.codes, reads.groups)
            return decode_attention(
                *read,
                lower=metadata.lower,
                sinks=weights.sinks,
                soft_cap=settings.soft_cap,
                window=None if q.shape[1] == 1 else window,
                scores=scores,
            )


def grown(q: Tensor, positions: Tensor, beta: float, tokens: float) -> Tensor:
    """Queries [rows, queries, q_heads, head_dim] times 1 + beta ln(1 + floor(position / tokens)), as in Llama 4."""
    growth = 1 + beta * (positions / tokens).floor().log1p()
    return (q * growth[..., None, None]).to(q.dtype)
