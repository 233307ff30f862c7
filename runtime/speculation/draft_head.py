"""Draft heads in EAGLE-3's form: one decoder layer that predicts tokens from the target's hidden states.

Li et al. 2025, "EAGLE-3", section 3: the target's stream at three depths is fused by one product. The layer reads the
embedding of a token beside the fused feature of the token before it, and its output is the next token's feature. Its
output head has a vocabulary of its own. EAGLE-3.1 (arXiv 2605.09992) adds norms of the three streams (`fc_norm`) and
feeds back the last norm's output (`norm_output`).

A folder has config.json and model.safetensors as SGLang, AngelSlim and vLLM read them. Names of tensors: fc.weight,
midlayer.{input_layernorm, hidden_norm, post_attention_layernorm, self_attn.*_proj, mlp.*_proj}.weight, norm.weight,
lm_head.weight and d2t, the distance from each draft token's id to the target's (vLLM, models/llama_eagle3.py). Those of
vllm-project/speculators have layers.0 for midlayer, and the layer's configuration apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.catalog.families import draft_head_keys
from ridgeplan.roofline.catalog.files import parse_json, read_document, replacing
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime.errors import ModelError, failures_as
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, KVAccess
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig
from ridgeplan.runtime.model.linear import Dense, GatedMLP
from ridgeplan.runtime.model.norms import RMSNorm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, LayerWeights
from ridgeplan.runtime.retrieval.head import read_tensors, require_tensor

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING = "embed_tokens.weight"  # of heads that do not read the target's
OF_TARGET = "verifier_norm.weight", "verifier_lm_head.weight"  # which some trainers leave in a head's file
UNKNOWN_LOGIT = -1e4  # of tokens that a head does not predict: far below all others, and finite
STREAMS = 3  # depths of the target that are fused


def default_depths(layers: int) -> tuple[int, ...]:
    """The depths that heads fuse unless they say otherwise: 2, the middle, and 3 before the last (SGLang, vLLM)."""
    return (2, layers // 2, layers - 3) if layers > 5 else (0, layers // 2, layers)


def windowed(config: DecoderConfig, window: int) -> DecoderConfig:
    """A head's decoder of one layer, which reads the latest `window` tokens; 0 for all."""
    (settings,) = config.layers
    assert settings.attention is not None, "a head has attention"
    attention = replace(settings.attention, window_tokens=window or None)
    return replace(config, layers=(replace(settings, attention=attention),))


@dataclass(frozen=True)
class DraftHeadConfig:
    """The configuration of a head's folder.

    layer: of its decoder layer, as a decoder of one. depths: layers of the target after which its stream is fused.
    draft_vocab: tokens that it predicts. fc_norm, norm_output: EAGLE-3.1's. window: latest tokens that it was trained
    to read, 0 for all.
    """

    layer: DecoderConfig
    depths: tuple[int, ...]
    draft_vocab: int
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int = 0

    @classmethod
    def of(cls, keys: Mapping[str, Any], target: ModelShape, source: str) -> DraftHeadConfig:
        """From config.json. Raises ValueError for values that do not fit the target or that are not executed."""
        keys = draft_head_keys(keys)
        executed = {"num_hidden_layers": 1, "hidden_act": "silu", "norm_before_fc": False}
        required = {"hidden_size": target.hidden, "vocab_size": target.vocab}
        for name, allowed in (executed | required).items():
            if (value := keys.get(name, executed.get(name))) != allowed:
                raise ValueError(f"{name} is {brief(value)}; allowed for a head of {target.name}: {allowed}")
        known = {name: value for name, value in keys.items() if name not in ("architectures", "model_type")}
        layer = decoder_config(transformers.LlamaConfig(**{**known, "num_hidden_layers": 1}), source)
        nested = (keys.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        ids = [index + 1 for index in nested] if nested else keys.get("eagle_aux_hidden_state_layer_ids")
        depths = tuple(ids) if ids else default_depths(target.layers)
        if len(depths) != STREAMS or not all(isinstance(at, int) and 0 <= at <= target.layers for at in depths):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids are {brief(ids)}; allowed: {STREAMS} of the layers")
        draft_vocab = keys.get("draft_vocab_size") or target.vocab
        if not isinstance(draft_vocab, int) or not 0 < draft_vocab <= target.vocab:
            raise ValueError(f"draft_vocab_size is {brief(draft_vocab)}; allowed: 1 to {target.vocab}")
        flags = {name: bool(keys.get(name)) for name in ("norm_before_residual", "fc_norm", "norm_output")}
        return cls(layer, depths, draft_vocab, window=keys.get("sliding_window") or 0, **flags)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The tensors that a checkpoint must have, without d2t."""
        shape = self.layer.shape
        hidden, inner = shape.hidden, shape.intermediate
        layer = {
            "self_attn.q_proj": [shape.q_width, 2 * hidden], "self_attn.k_proj": [shape.kv_width, 2 * hidden],
            "self_attn.v_proj": [shape.kv_width, 2 * hidden], "self_attn.o_proj": [hidden, shape.q_width],
            "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
            "input_layernorm": [hidden], "hidden_norm": [hidden], "post_attention_layernorm": [hidden],
        }  # fmt: skip
        whole = {"fc": [hidden, STREAMS * hidden], "norm": [hidden], "lm_head": [self.draft_vocab, hidden]}
        norms = {f"fc_norm.{index}": [hidden] for index in range(STREAMS * self.fc_norm)}
        return {f"{name}.weight": size for name, size in {**whole, **norms}.items()} | {
            f"midlayer.{name}.weight": size for name, size in layer.items()
        }


@dataclass(frozen=True, eq=False)
class HeadCheckpoint:
    """A head's configuration and its tensors on the host, checked against the target's shape.

    keys: of config.json. targets: int64 [draft_vocab], the target's ids of the head's tokens.
    """

    keys: Mapping[str, Any]
    config: DraftHeadConfig
    tensors: Mapping[str, Tensor]
    targets: Tensor

    @classmethod
    def of(
        cls, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelShape, source: str
    ) -> HeadCheckpoint:
        """Raises ValueError for tensors that are missing or misshapen, and as `DraftHeadConfig.of`."""
        config = DraftHeadConfig.of(keys, target, source)
        named = {name.removeprefix("model.").replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
        for name, size in config.sizes.items():
            if name not in named:
                raise ValueError(f"it lacks {name}")
            require_tensor(name, named[name], size)
        biases = {f"midlayer.self_attn.{name}_proj.bias" for name in "qkv"}
        if EMBEDDING in named:
            require_tensor(EMBEDDING, named[EMBEDDING], [target.vocab, target.hidden])
        for name in named.keys() - config.sizes.keys() - biases - {EMBEDDING, "d2t", "t2d", *OF_TARGET}:
            raise ValueError(f"it has the unknown tensor {brief(name)}")
        distances = named.get("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
        if list(distances.shape) != [config.draft_vocab]:
            raise ValueError(f"d2t is {list(distances.shape)}; allowed: {[config.draft_vocab]}")
        targets = torch.arange(config.draft_vocab) + distances.long()
        if len(targets.unique()) < len(targets) or targets.min() < 0 or targets.max() >= target.vocab:
            raise ValueError(f"d2t maps draft tokens outside 0 to {target.vocab - 1}, or two to one token")
        return cls(keys, config, named, targets)

    @classmethod
    def load(cls, path: str | Path, target: ModelShape) -> HeadCheckpoint:
        """Of a folder. Raises ModelError, one line that names it, for anything that is wrong with it."""
        folder = Path(path)
        with failures_as(f"cannot load the draft head {brief(str(path))}"):
            keys = parse_json(read_document(folder / CONFIG))
            if not isinstance(keys, dict):
                raise ValueError(f"{CONFIG} is not a JSON object")
            if not (folder / WEIGHTS).exists():
                raise ValueError(f"it has no {WEIGHTS}; pickles are not opened")
            return cls.of(keys, read_tensors(folder / WEIGHTS)[1], target, str(path))

    def head(self, target: DecoderWeights, window: int = 0) -> DraftHead:
        """On the device and in the dtype of the target's embedding. window: as for `DraftHead.of`."""
        return DraftHead.of(self, target.embedding, window)

    def save(self, folder: Path) -> None:
        """Writes the folder's two files, each completely or not at all. Raises ModelError."""
        targets = self.targets.cpu()
        known = torch.zeros(self.config.layer.shape.vocab, dtype=torch.bool).index_fill_(0, targets, True)
        maps = {"d2t": targets - torch.arange(len(targets)), "t2d": known}
        tensors = {name: x.detach().cpu().contiguous() for name, x in self.tensors.items()} | maps
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in ((WEIGHTS, save(tensors)), (CONFIG, json.dumps(self.keys, indent=2).encode())):
                with replacing(folder / name) as staging:
                    staging.write_bytes(content)
        except OSError as error:
            raise ModelError(f"cannot write {brief(str(folder))}: {error.strerror}") from error


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A head on the device and in the dtype of the target's embedding, which it reads unless it has its own.

    weights: one layer, whose first norm is of embeddings. hidden_norm: of features. stream_norms: EAGLE-3.1's.
    """

    config: DraftHeadConfig
    decoder: Decoder
    weights: DecoderWeights
    fc: Dense
    hidden_norm: RMSNorm
    stream_norms: tuple[RMSNorm, ...]
    targets: Tensor

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint, embedding: Tensor, window: int = 0) -> DraftHead:
        """window: latest tokens that its attention reads; 0 for all."""
        config, eps = checkpoint.config, checkpoint.config.layer.norm_eps
        tensors = {name: x.to(embedding) for name, x in checkpoint.tensors.items() if x.is_floating_point()}

        def taken(*names: str) -> Tensor:
            parts = [tensors[f"{name}.weight"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def stacked(prefix: str, *names: str) -> Dense:
            named = [f"midlayer.{prefix}.{name}_proj" for name in names]
            biases = [tensors[f"{name}.bias"] for name in named if f"{name}.bias" in tensors]
            return Dense(taken(*named), torch.cat(biases) if biases else None)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(taken(name), eps)

        layer = LayerWeights(
            norm("midlayer.input_layernorm"),
            AttentionWeights(stacked("self_attn", "q", "k", "v"), stacked("self_attn", "o")),
            norm("midlayer.post_attention_layernorm"),
            GatedMLP(stacked("mlp", "gate", "up"), stacked("mlp", "down")),
        )
        table = tensors.get(EMBEDDING, embedding)
        weights = DecoderWeights(table, (layer,), norm("norm"), Dense(taken("lm_head")))
        decoder = Decoder(windowed(config.layer, window), embedding.device)
        norms = tuple(norm(f"fc_norm.{index}") for index in range(STREAMS * config.fc_norm))
        targets = checkpoint.targets.to(embedding.device)
        return cls(config, decoder, weights, Dense(taken("fc")), norm("midlayer.hidden_norm"), norms, targets)

    def normed_stream(self, index: int, stream: Tensor) -> Tensor:
        """One of the target's streams [..., hidden] as `fc` takes it."""
        return self.stream_norms[index](stream, None)[1] if self.stream_norms else stream

    def fused(self, streams: Tensor) -> Tensor:
        """Features [..., hidden] of the target's streams [STREAMS, ..., hidden]."""
        return self.fc(torch.cat([self.normed_stream(index, each) for index, each in enumerate(streams)], dim=-1))

    def fuse_part(self, index: int, stream: Tensor) -> Tensor:
        """What one stream [tokens, hidden] adds to the features [tokens, hidden] of a prompt."""
        hidden = stream.shape[-1]
        weight = self.fc.weight[:, index * hidden : (index + 1) * hidden]
        return functional.linear(self.normed_stream(index, stream), weight)

    def project(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual [rows, n, hidden] and queries of tokens [rows, n], whose keys and values go to `slots`.

        features: of the token before each, [rows, n, hidden].
        """
        (layer,) = self.weights.layers
        assert isinstance(layer.mixer, AttentionWeights), "a head has attention"
        embedded = layer.mixer_norm(functional.embedding(tokens, self.weights.embedding), None)[1]
        normed = self.hidden_norm(features, None)[1]
        tables = self.decoder.layer_rotary(0, positions)
        inputs = torch.cat([embedded, normed], dim=-1)
        queries = self.decoder.project(0, layer.mixer, inputs, tables, positions, keys, values, slots)
        return normed if self.config.norm_before_residual else features, queries

    def finish(
        self, residual: Tensor, queries: Tensor, cache: KVAccess, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """The next feature [rows, 1, hidden] and logits [rows, 1, draft_vocab], of the last of the projected tokens."""
        (layer,) = self.weights.layers
        assert isinstance(layer.mixer, AttentionWeights), "a head has attention"
        attended = self.decoder.attend(0, layer.mixer, cache, metadata, queries)
        hidden, normed = layer.after_mixer(residual, layer.mixer.output(attended.flatten(2)))
        hidden, normed = self.weights.norm(hidden, layer.after_mlp(normed))
        return normed if self.config.norm_output else hidden, self.weights.logits(normed)

    def in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab] over the target's tokens, of [rows, draft_vocab]; others are never drawn."""
        spread = logits.new_full((len(logits), self.config.layer.shape.vocab), UNKNOWN_LOGIT)
        return spread.index_copy_(1, self.targets, logits)
