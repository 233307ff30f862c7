"""The decoder: its configuration, layer by layer, the parts of a layer, and a step over the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.layer import Tables, rope_append, rotary_tables
from ridgeplan.roofline.catalog.layers import Attention, Routing, State
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, KVAccess
from ridgeplan.runtime.model.norms import Norm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding. frequencies: [head_dim / 2], radians per token, 0 for channels that do not turn.

    scale: the factor on cosines and sines, which YaRN calls attention factor. width: channels that turn of a partial
    one, whose checkpoints have them ahead of the others; None for all.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    width: int | None = None

    @property
    def channels(self) -> list[int] | None:
        """A checkpoint's channels of a head of queries or keys in the order of the kernels, which turn the first half
        with the second: of a partial embedding both halves of what turns come ahead of what stays. None: as they are.
        """
        if self.width is None:
            return None
        turning, staying = self.width // 2, len(self.frequencies) - self.width // 2
        first = [*range(turning), *range(self.width, self.width + staying)]
        return [*first, *range(turning, self.width), *range(self.width + staying, 2 * len(self.frequencies))]


@dataclass(frozen=True)
class LayerSettings:
    """What one layer's token mixer is: attention with its sizes and window, or a recurrent state.

    rotary: which of the decoder's rotary embeddings it uses. place: its number among the layers with attention, which
    the cache has, or among those with a recurrent state.
    """

    attention: Attention | None
    state: State | None = None
    rotary: int = 0
    place: int = 0

    @property
    def window(self) -> int | None:
        """The sliding window in tokens; None for layers that read every token."""
        return self.attention.window_tokens if self.attention else None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: its shape, the settings of each layer, its rotary embeddings, and how its routers choose experts.

    norm_offset: what norms add to their weights as a checkpoint stores them. Of latent attention, score_scale: a factor
    on scores beside head_dim ** -0.5, which loading folds into queries; interleaved_rope: whether RoPE turns each
    channel of a checkpoint with the next one.
    """

    shape: ModelShape
    norm_eps: float
    layers: tuple[LayerSettings, ...]
    rotaries: tuple[Rotary, ...]
    routing: Routing | None = None
    norm_offset: float = 0.0
    score_scale: float = 1.0
    interleaved_rope: bool = False

    @classmethod
    def plain(cls, shape: ModelShape, norm_eps: float = 1e-5) -> DecoderConfig:
        """A decoder with full attention in every layer and unscaled RoPE."""
        attention = replace(shape.attentions[0][0], window_tokens=None)
        layers = tuple(LayerSettings(attention, place=place) for place in range(shape.layers))
        return cls(shape, norm_eps, layers, (Rotary(plain_frequencies(shape)),))

    def layer_rotary(self, index: int) -> Rotary:
        """The rotary embedding of a layer."""
        return self.rotaries[self.layers[index].rotary]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens, or None."""
        return tuple(layer.window for layer in self.layers)

    @property
    def rotary_frequencies(self) -> tuple[float, ...]:
        """Frequencies of the first rotary embedding."""
        return self.rotaries[0].frequencies

    @property
    def rotary_scale(self) -> float:
        """The scale of the first rotary embedding."""
        return self.rotaries[0].scale


def plain_frequencies(shape: ModelShape, width: int | None = None) -> tuple[float, ...]:
    """Rotary frequencies without scaling, theta^(-2 i / width) (RoFormer, Su et al. 2021, equation 15).

    width: channels of a head that turn, by default all of them; the frequencies of others are 0.
    """
    width = width or shape.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    turning = (1.0 / shape.rope_theta**exponents).tolist()
    return (*turning, *[0.0] * ((shape.head_dim - width) // 2))


class Step(NamedTuple):
    """What the layers of one step share. tables: of every rotary embedding, at the tokens' positions.

    accepted: int32 [rows], tokens of each row's text, of models with recurrent states.
    """

    cache: KVAccess
    metadata: AttentionMetadata
    tables: tuple[Tables, ...]
    accepted: Tensor | None = None


class Decoder:
    """Runs the layers of `config` on one device. Weights and cache are arguments, so drafts use it too."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies = tuple(
            torch.tensor(rotary.frequencies, dtype=torch.float32, device=device) for rotary in config.rotaries
        )

    def step(self, weights: DecoderWeights, cache: KVAccess, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Logits [rows, queries, vocab] of tokens [rows, queries], whose KV enters the cache."""
        hidden, update = functional.embedding(tokens, weights.embedding), None
        states = cache.states
        step = Step(cache, metadata, self.rotary(metadata.positions), None if states is None else cache.accepted)
        for index, layer in enumerate(weights.layers):
            hidden, normed = self.norm(hidden, update, layer.mixer_norm)
            hidden, normed = layer.after_mixer(hidden, layer.mixer.step(self, index, normed, step))
            update = layer.after_mlp(normed)
        if states is not None and step.accepted is not None:
            states.commit(step.accepted)
        return weights.logits(self.norm(hidden, update, weights.norm)[1])

    def rotary(self, positions: Tensor) -> tuple[Tables, ...]:
        """Cosines and sines [..., head_dim / 2] of positions [...], by each of the rotary embeddings."""
        scales = [rotary.scale for rotary in self.config.rotaries]
        return tuple(rotary_tables(positions, *pair) for pair in zip(self.frequencies, scales, strict=True))

    def layer_rotary(self, index: int, positions: Tensor) -> Tables:
        """Cosines and sines [..., head_dim / 2] of positions [...], by the rotary embedding of one layer."""
        return rotary_tables(positions, *self.layer_frequencies(index))

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
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Rotated queries [rows, queries, q_heads, head_dim]; the tokens' KV goes to `slots` of keys and values."""
        attention, norm = self.config.layers[index].attention, weights.qk_norm
        assert attention is not None, "the layer has attention"
        qk_norm, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        qkv = weights.qkv(normed)
        return rope_append(qkv, tables, keys, values, slots, attention.q_heads, qk_norm=qk_norm, eps=eps)

    def norm(self, hidden: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The residual stream with `update` added, and its norm."""
        return norm(hidden, update)

    def attend(self, index: int, cache: KVAccess, metadata: AttentionMetadata, q: Tensor) -> Tensor:
        """Attention of queries [rows, queries, q_heads, head_dim] to what the pass reads of layer `index`."""
        settings = self.config.layers[index]
        window, place = settings.window, settings.place
        if metadata.attend is not None:  # drafts, which no sliding window limits
            return metadata.attend(place, q, metadata)
        scores = metadata.scores(place) if metadata.scores is not None else None
        with cache.layer_kv(place, metadata) as reads:
            begin = reads.begin if window is None else torch.maximum(reads.begin, reads.end - window)
            read = (q, reads.keys, reads.values, begin, reads.end, reads.codes, reads.groups)
            return decode_attention(*read, lower=metadata.lower, scores=scores)
