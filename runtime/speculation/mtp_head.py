"""Layers for multi-token prediction (MTP) as draft heads: DeepSeek-V3 (arXiv 2412.19437), section 2.2.

A model that was trained with such a layer has it in its own checkpoint. One product joins the norms of a token's
embedding and of the feature of the token before it, and one more layer of the model follows. The first feature is the
output of the model's last norm, later ones are the layer's. Embedding and output head are the model's own.

Names of tensors, beside those of a layer: Qwen3.5 and Qwen3-Next have mtp.{fc, pre_fc_norm_embedding,
pre_fc_norm_hidden, norm} and mtp.layers.0, and feed back what `norm` puts out; GLM-4.5 and DeepSeek-V3 have
model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm} beside the layer after their last one, N, and feed back what
enters the norm (vLLM's classes Qwen3NextMTP, Glm4MoeMTP and DeepSeekMTP).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.catalog.families import mtp_layers_of
from ridgeplan.roofline.catalog.files import parse_json, read_document
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime.errors import failures_as
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, KVAccess
from ridgeplan.runtime.model.checkpoint import load_tensors, read_layer, stream_norm
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.norms import Norm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights
from ridgeplan.runtime.retrieval.head import DTYPES, require_tensor
from ridgeplan.runtime.speculation.draft_head import CONFIG, HeadCheckpoint, windowed

LAYER = "model.layers.0."
PARTS = ("fc", "embedding_norm", "hidden_norm", "norm")
# Names of the parts of a layer apart from the model's, after APART, and of one behind them, after its prefix.
APART = "mtp."
APART_NAMES = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
BEHIND_NAMES = ("eh_proj", "enorm", "hnorm", "shared_head.norm")


def load_head(path: str | Path, target: DecoderConfig) -> HeadCheckpoint | MTPCheckpoint:
    """The head of a folder: of the model's own, its MTP layer; else one in EAGLE-3's form.

    Raises ModelError, one line that names the folder, for anything that is wrong with it.
    """
    with failures_as(f"cannot load the draft head {brief(str(path))}"):
        keys = parse_json(read_document(Path(path) / CONFIG))
        layers = mtp_layers_of(keys) if isinstance(keys, dict) else 0
        if layers:
            return MTPCheckpoint.read(path, target, layers)
    return HeadCheckpoint.load(path, target.shape)


@dataclass(frozen=True)
class MTPConfig:
    """layer: the target's decoder with this one layer. depths: after which of the target's layers it reads its stream.

    norm_output: whether the output of the last norm is the next feature.
    """

    layer: DecoderConfig
    depths: tuple[int, ...]
    norm_output: bool


@dataclass(frozen=True, eq=False)
class MTPCheckpoint:
    """An MTP layer's configuration and its tensors on the host: PARTS, and those of a layer after LAYER."""

    path: str
    config: MTPConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: str | Path, target: DecoderConfig, layers: int) -> MTPCheckpoint:
        """Of a folder with so many MTP layers. Raises ValueError for what is not executed, and for missing tensors."""
        settings = next(layer for layer in reversed(target.layers) if layer.attention)
        assert settings.attention is not None, "it was chosen for that"
        if layers != 1 or settings.attention.is_latent:
            kind = "latent attention" if settings.attention.is_latent else f"{layers} layers"
            raise ValueError(f"its multi-token prediction has {kind}; allowed: 1 layer with keys and values of heads")
        last = f"model.layers.{target.shape.layers}."
        held = load_tensors(str(path), (APART, last))
        apart = any(name.startswith(APART) for name in held)
        start, parts, prefix = (APART, APART_NAMES, f"{APART}layers.0.") if apart else (last, BEHIND_NAMES, last)
        names = dict(zip(PARTS, (start + name for name in parts), strict=True))
        tensors = {LAYER + name.removeprefix(prefix): x for name, x in held.items() if name.startswith(prefix)}
        for part, name in names.items():
            if f"{name}.weight" not in held:
                raise ValueError(f"it lacks {name}.weight")
            tensors[f"{part}.weight"] = held[f"{name}.weight"]
        require_tensor(names["fc"], tensors["fc.weight"], [target.shape.hidden, 2 * target.shape.hidden])
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name} is {tensor.dtype}; allowed: floating numbers of 16 or 32 bits")
        layer = replace(target, layers=(replace(settings, place=0),))
        return cls(str(path), MTPConfig(layer, (target.shape.layers,), norm_output=apart), tensors)

    def head(self, target: DecoderWeights, window: int = 0) -> MTPHead:
        """On the device and in the dtype of the target's embedding. window: latest tokens that it reads; 0 for all.

        Raises ModelError, one line that names the folder, for tensors that are missing or misshapen.
        """
        embedding, layout = target.embedding, self.config.layer.checkpoint

        def take(name: str, *default: Any) -> Any:
            if name in self.tensors:
                return self.tensors[name].to(embedding.dtype)
            if default:
                return default[0]
            raise ValueError(f"it lacks {name}")

        with failures_as(f"cannot load the draft head {brief(self.path)}"):
            layer = read_layer(self.config.layer, take, 0, embedding.device)
            shape, mixer = self.config.layer.shape, layer.mixer
            assert isinstance(mixer, AttentionWeights) and isinstance(mixer.output, Dense), "of a checkpoint"
            if mixer.output.weight.shape != (shape.hidden, shape.q_width):
                raise ValueError(f"its attention has other sizes than that of {shape.name}")
            norms = [stream_norm(layout, take, name, embedding.device) for name in PARTS[1:]]
        config = replace(self.config, layer=windowed(self.config.layer, window))
        decoder, fc = Decoder(config.layer, embedding.device), Dense(take("fc.weight").to(embedding.device))
        weights = replace(target, layers=(layer,), norm=norms[2])
        return MTPHead(config, decoder, weights, fc, norms[0], norms[1], target.norm)


@dataclass(frozen=True, eq=False)
class MTPHead:
    """An MTP layer on the device, with the interface of `DraftHead`. weights: the target's, but for layer and norm."""

    config: MTPConfig
    decoder: Decoder
    weights: DecoderWeights
    fc: Dense
    embedding_norm: Norm
    hidden_norm: Norm
    target_norm: Norm

    def fused(self, streams: Tensor) -> Tensor:
        """Features [..., hidden] of the target's stream [1, ..., hidden]."""
        return self.fuse_part(0, streams[0])

    def fuse_part(self, index: int, stream: Tensor) -> Tensor:
        """The features [..., hidden] of the target's stream."""
        return self.target_norm(stream, None)[1]

    def project(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's input [rows, n, hidden] and queries of tokens [rows, n], whose keys and values go to `slots`.

        features: of the token before each, [rows, n, hidden].
        """
        embedded = functional.embedding(tokens, self.weights.embedding)
        joined = torch.cat([self.embedding_norm(embedded, None)[1], self.hidden_norm(features, None)[1]], dim=-1)
        residual, tables = self.fc(joined), self.decoder.layer_rotary(0, positions)
        layer, mixer = self.weights.layers[0], self._mixer
        normed = layer.mixer_norm(residual, None)[1]
        return residual, self.decoder.project(0, mixer, normed, tables, positions, keys, values, slots)

    def finish(
        self, residual: Tensor, queries: Tensor, cache: KVAccess, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """The next feature [rows, 1, hidden] and logits [rows, 1, vocab], of the last of the projected tokens."""
        layer, mixer = self.weights.layers[0], self._mixer
        attended = self.decoder.attend(0, mixer, cache, metadata, queries)
        gated = mixer.gated(attended, layer.mixer_norm(residual, None)[1])
        hidden, normed = layer.after_mixer(residual, mixer.output(gated.flatten(2)))
        hidden, normed = self.weights.norm(hidden, layer.after_mlp(normed))
        return normed if self.config.norm_output else hidden, self.weights.logits(normed)

    def in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab], which are over the target's tokens."""
        return logits

    @property
    def _mixer(self) -> AttentionWeights:
        mixer = self.weights.layers[0].mixer
        assert isinstance(mixer, AttentionWeights), "a head has attention"
        return mixer
