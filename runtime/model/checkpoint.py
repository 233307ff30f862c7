"""Checkpoints in safetensors: configuration, tensors, and the decoder weights assembled from them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from ridgeplan.kernels.linear.gguf import GgufWeight, stacked
from ridgeplan.kernels.linear.weights import Mxfp4Weight
from ridgeplan.kernels.state import DeltaVectors
from ridgeplan.roofline.catalog.families import (
    INNER_TYPES,
    NORM_NAMES,
    PARALLEL,
    executable_architectures,
    executed_instead,
    families,
)
from ridgeplan.roofline.catalog.files import read_document
from ridgeplan.roofline.catalog.layers import Attention, State
from ridgeplan.roofline.catalog.model_shape import MAX_LAYERS, PACKED_FORMATS, ModelShape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import Weights
from ridgeplan.runtime.errors import ModelError, failures_as, quiet_rust
from ridgeplan.runtime.model.checkpoint_layout import CheckpointLayout, HeadLayout
from ridgeplan.runtime.model.decoder import DecoderConfig
from ridgeplan.runtime.model.experts import RoutedMLP, StackedExperts
from ridgeplan.runtime.model.gguf import MANIFEST
from ridgeplan.runtime.model.latent import LatentAttentionWeights
from ridgeplan.runtime.model.linear import Dense, GatedMLP, Linear, Mxfp4, Stored
from ridgeplan.runtime.model.norms import LayerNorm, NoNorm, Norm, ParallelNorm, RMSNorm
from ridgeplan.runtime.model.packed_weights import INNER_NAMES, StoredTensors
from ridgeplan.runtime.model.weights import (
    MLP,
    AttentionWeights,
    DecoderWeights,
    DeltaWeights,
    LayerWeights,
    tensors_of,
)

Part = TypeVar("Part")
Take = Callable[..., Any]  # the tensor of a name, or a default
APART = (
    ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "a_proj", "g_proj"),
)
ALTERNATING = ("in_proj_qkvz", "in_proj_ba")  # Qwen3-Next's projections of a gated delta rule
# Tensors that change no token of the decoder: RoPE's frequencies, scales of a cache in fp8, layers of multi-token
# prediction, and parts beside the language model.
UNUSED = re.compile(
    r"\.rotary_emb\.inv_freq$|\.(k|v|kv)_scale$"
    r"|^(model\.)?(mtp[._]|vision_|visual\.|audio_|multi_modal_|mm_|embed_(vision|audio)\.)"
)


@dataclass(frozen=True, eq=False)
class StateDict:
    """A transformers state dict of a model of `config`. source: where it was read from.

    All methods raise ModelError for weights that are not finite.
    """

    source: str
    config: DecoderConfig
    tensors: dict[str, Tensor] | StoredTensors

    def decoder_weights(self, device: torch.device) -> DecoderWeights:
        """All weights on `device`; they are dropped here layer by layer, so that they are not held twice."""
        ends = self.ends(device)
        return dataclasses.replace(ends, layers=tuple(self.layers(device)))

    def ends(self, device: torch.device) -> DecoderWeights:
        """The embedding, the last norm and the head on `device`, without layers."""
        table = self.tensors.pop("model.embed_tokens.weight")
        head = self.tensors.pop("lm_head.weight", None)
        head = table if self.config.shape.tied_embeddings or head is None else head
        layout = self.config.checkpoint
        norm = stream_norm(layout, self.tensors.pop, "model.norm", device, layout.logit_scale)
        held = _copied(table, device)
        head_weight = held if head is table else _copied(head, device)
        output = Stored((head_weight,)) if isinstance(head_weight, GgufWeight) else Dense(head_weight)
        if not isinstance(held, GgufWeight):
            return self._finite(DecoderWeights(held, (), norm, output, layout.logit_cap))
        assert isinstance(self.tensors, StoredTensors), "a converted folder"
        empty = torch.empty(0, held.inputs, dtype=self.tensors.dtype, device=device)
        return self._finite(DecoderWeights(empty, (), norm, output, layout.logit_cap, held))

    def layers(self, device: torch.device, keep: bool = False) -> Iterator[LayerWeights]:
        """The layers on `device`, one after another, after `ends`; unless `keep`, each is dropped here.

        Raises ModelError after the last one if it leaves tensors that may change tokens, unless `keep`.
        """
        take = self.tensors.get if keep else self.tensors.pop
        for index in range(self.config.shape.layers):
            yield self._finite(read_layer(self.config, take, index, device))
        if not keep:
            unread = self.tensors.unread if isinstance(self.tensors, StoredTensors) else self.tensors
            _require_all_read(self.source, self.config.shape, unread)

    def _finite(self, part: Part) -> Part:
        for tensor in tensors_of(part):
            # The extremes show it without a copy of the tensor.
            if (
                tensor.is_floating_point()
                and tensor.numel()
                and not torch.stack(torch.aminmax(tensor)).isfinite().all()
            ):
                raise ModelError(
                    f"the checkpoint {self.source} holds weights that are NaN or infinite as {tensor.dtype}"
                )
        return part


def _require_all_read(source: str, shape: ModelShape, unread: Iterable[str]) -> None:
    """Raises ModelError for unread tensors that may change tokens: the architecture is not that of its `model_type`."""
    drafting = tuple(f"model.layers.{shape.layers + layer}." for layer in range(shape.mtp_layers))
    names = [name for name in unread if not UNUSED.search(name) and not name.startswith(drafting)]
    if names:
        kinds = ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})[:3])
        raise ModelError(
            f"the checkpoint {source} has {len(names)} weights that {shape.architecture!r} does not read: {kinds}"
        )


def _copied(tensor: Any, device: torch.device) -> Any:
    """A copy, as a single view would keep the whole mapped checkpoint in memory; of a GGUF file's blocks, too."""
    if isinstance(tensor, GgufWeight):
        return tensor.with_parts(lambda part: part.to(device, copy=True))
    return tensor.to(device, copy=True)


def read_layer(config: DecoderConfig, take: Take, index: int, device: torch.device) -> LayerWeights:
    """A layer on `device`. take: the tensor of a name, or a default, if one is given."""
    layout, prefix = config.checkpoint, f"model.layers.{index}."
    place = layout.state_norms if config.layers[index].state else layout.norms
    mixer_norm, mlp_norm, mixer_output_norm, mlp_output_norm = NORM_NAMES[place]

    def norm_of(name: str) -> RMSNorm | LayerNorm:
        return stream_norm(layout, take, f"{prefix}{name}", device)

    scalar = take(f"{prefix}layer_scalar", None)
    scale = 1.0 if scalar is None else float(scalar)
    assert scale == 1 or layout.norms == "sandwich", "norms of outputs hold the layer's scale"

    def output_norm(name: str) -> RMSNorm | None:
        if not name:
            return None
        weight = layout.norm_weight(take(f"{prefix}{name}.weight"), layout.block_scale * scale)
        return RMSNorm(_copied(weight, device), layout.eps)

    def output(linear: Linear, norm: str) -> Linear:
        """A block's last product, which holds the block's scale where no norm follows that does."""
        if norm or layout.block_scale == 1:
            return linear
        assert isinstance(linear, Dense), "a checkpoint's"
        bias = None if linear.bias is None else _scaled(linear.bias, layout.block_scale)
        return Dense(_scaled(linear.weight, layout.block_scale), bias)

    first: Norm = norm_of(mixer_norm) if mixer_norm else NoNorm()
    second: Norm = norm_of(mlp_norm) if mlp_norm else NoNorm()
    if isinstance(second, RMSNorm):
        second = dataclasses.replace(second, eps=second.eps * scale**2)
    if layout.norms == PARALLEL and isinstance(first, (RMSNorm, LayerNorm)):
        second = ParallelNorm(first)
    mixer = _mixer(config, index, take, prefix, device)
    return LayerWeights(
        mixer_norm=first,
        mixer=dataclasses.replace(mixer, output=output(mixer.output, mixer_output_norm)),
        mlp_norm=second,
        mlp=_mlp(config, take, prefix, device, lambda linear: output(linear, mlp_output_norm)),
        mixer_output_norm=output_norm(mixer_output_norm),
        mlp_output_norm=output_norm(mlp_output_norm),
        scale=scale,
    )


def _mlp(
    config: DecoderConfig, take: Take, prefix: str, device: torch.device, output: Callable[[Linear], Linear]
) -> MLP:
    """Routed experts with what is beside them, or a dense MLP."""

    def gated(name: str) -> GatedMLP:
        gate, up, down, whole = (f"{prefix}{name}.{part}_proj" for part in ("gate", "up", "down", "gate_up"))
        gate_up = _fused(take, device, gate, up, whole=whole)
        return GatedMLP(gate_up, output(_fused(take, device, down)), config.checkpoint.activation)

    def present(*names: str) -> Tensor | None:
        """The first of these tensors that the layer has."""
        tensors = (take(prefix + name, None) for name in names)
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        return None if tensor is None else _copied(tensor, device)

    router = present(
        "mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.router.weight", "block_sparse_moe.gate.weight"
    )
    if router is None or config.routing is None:
        return gated("mlp")
    gate_up, down = (
        present(f"mlp.experts.{name}_proj", f"block_sparse_moe.experts.{name}_proj") for name in ("gate_up", "down")
    )
    biases = [present(f"mlp.experts.{name}_proj_bias") for name in ("gate_up", "down")]
    if biases[0] is not None:  # gpt-oss, whose gates and ups alternate
        biases[0] = _halved(biases[0], 1)
    stacks = _mxfp4_experts(present, biases)
    if stacks is None:
        if gate_up is None or down is None:
            gate_up, down = (experts.to(device) for experts in _separate_experts(config.shape, take, prefix))
        elif biases[0] is not None:  # in 16 bits it stores them transposed
            gate_up, down = _halved(gate_up.mT, 1), down.mT.contiguous()
        stacks = StackedExperts.of(gate_up, biases[0]), StackedExperts.of(down, biases[1])
    places = ("mlp.", "mlp.gate.", "mlp.gate.moe_statics.", "block_sparse_moe.")
    bias = present(*(f"{place}e_score_correction_bias" for place in places))
    shared = config.shape.shared_experts_intermediate
    shared_name = (
        "mlp.shared_expert" if (gate := present("mlp.shared_expert_gate.weight")) is not None else "mlp.shared_experts"
    )
    layout = config.checkpoint
    scale = 1.0 if NORM_NAMES[layout.norms][3] else layout.block_scale  # as `output` scales a dense MLP
    return RoutedMLP(
        router,
        dataclasses.replace(config.routing, scale=config.routing.scale * scale),
        *stacks,
        router_bias=present("mlp.router.bias"),
        choice_bias=None if bias is None else bias.flatten().float(),
        shared=gated(shared_name) if shared else None,
        shared_gate=gate,
        activation=config.expert_activation,
    )


def _mxfp4_experts(
    present: Callable[..., Tensor | None], biases: list[Tensor | None]
) -> tuple[StackedExperts, StackedExperts] | None:
    """Experts as gpt-oss is published, in MXFP4; None for a layer without such."""
    names = (f"mlp.experts.{name}_proj_{part}" for name in ("gate_up", "down") for part in ("blocks", "scales"))
    tensors = [tensor for tensor in map(present, names) if tensor is not None]
    if not tensors:
        return None
    blocks, scales, down_blocks, down_scales = tensors
    weights = (_halved(blocks, 1), _halved(scales, 1)), (down_blocks, down_scales)
    gate_up, down = (
        StackedExperts(Mxfp4(Mxfp4Weight(codes.flatten(2).flatten(0, 1), scale.flatten(0, 1))), len(blocks), bias)
        for (codes, scale), bias in zip(weights, biases, strict=True)
    )
    return gate_up, down


def _halved(rows: Tensor, dim: int) -> Tensor:
    """Alternating gates and ups along `dim`, with all gates ahead of the ups."""
    return torch.cat([rows.unflatten(dim, (-1, 2)).select(dim + 1, half) for half in (0, 1)], dim=dim)


def _separate_experts(shape: ModelShape, take: Take, prefix: str) -> tuple[Tensor, Tensor]:
    """Experts that a checkpoint holds one by one, as packed ones do: gates with ups, and downs, each stacked."""
    mixtral = take(f"{prefix}block_sparse_moe.gate.weight", None) is not None
    place, names = (
        ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    gate_up, down = [], []
    for expert in range(shape.experts):
        gates, ups, downs = (take(f"{prefix}{place}.experts.{expert}.{name}.weight") for name in names)
        gate_up.append(torch.cat([gates, ups]))
        down.append(downs)
    return torch.stack(gate_up), torch.stack(down)


def _mixer(
    config: DecoderConfig, index: int, take: Take, prefix: str, device: torch.device
) -> AttentionWeights | LatentAttentionWeights | DeltaWeights:
    """A layer's token mixer, by what its settings describe."""
    settings = config.layers[index]
    if settings.state:
        return _state(config, index, take, prefix, device)
    if settings.attention and settings.attention.is_latent:
        return _latent_attention(config, settings.attention, take, f"{prefix}self_attn.", device)
    return _attention(config, index, take, prefix, device)


def _state(config: DecoderConfig, index: int, take: Take, prefix: str, device: torch.device) -> DeltaWeights:
    """A recurrent state's weights."""
    state, prefix = config.layers[index].state, f"{prefix}linear_attn."
    assert state is not None, "the layer has a state"
    vectors = _delta_vectors(state, take, prefix, device)
    olmo = take(f"{prefix}o_norm.weight", None)
    weight, output = (take(f"{prefix}norm.weight"), "out_proj") if olmo is None else (olmo, "o_proj")
    norm = RMSNorm(_copied(weight, device), config.checkpoint.state_eps)
    inputs = Dense(_delta_inputs(state, take, prefix).to(device))
    return DeltaWeights(inputs, vectors, norm, _fused(take, device, f"{prefix}{output}"))


def _attention(config: DecoderConfig, index: int, take: Take, prefix: str, device: torch.device) -> AttentionWeights:
    """Attention's weights, with the channels of each head in the decoder's order."""
    layout, prefix = config.checkpoint, f"{prefix}self_attn."
    attention, gate, heads = config.layers[index].attention, None, layout.heads
    assert attention is not None, "the layer has attention"
    names = [f"{prefix}{name}_proj" for name in ("qk" if attention.shares_values else "qkv")]
    if attention.gate_width:
        queries, gate = _split_gate(_fused(take, device, names[0]), attention)
        qkv = _joined(queries, _fused(take, device, *names[1:]))
    else:
        qkv = _fused(take, device, *names, whole=f"{prefix}qkv_proj")
    output = _fused(take, device, f"{prefix}o_proj")
    sinks = take(f"{prefix}sinks", None)
    if heads is not None:
        qkv = _placed(qkv, attention, heads)
        output = Dense(heads.padded(output.weight.t()).t().contiguous(), output.bias)
        if gate is not None:
            gate = Dense(heads.padded(gate.weight), None if gate.bias is None else heads.padded(gate.bias))
    norms = _qk_norms(config, take, prefix, device)
    return AttentionWeights(
        qkv=qkv,
        output=output,
        qk_norm=None if config.shape.wide_qk_norm else _stacked(norms, attention),
        wide_norms=norms if config.shape.wide_qk_norm else None,
        value_norm=RMSNorm(torch.ones(attention.head_dim, device=device), layout.eps) if layout.value_norm else None,
        sinks=None if sinks is None else sinks.float().to(device),
        gate=gate,
    )


LATENT_EPS = 1e-6  # of the norms of latents, whatever a model's configuration says


def _latent_attention(
    config: DecoderConfig, attention: Attention, take: Take, prefix: str, device: torch.device
) -> LatentAttentionWeights:
    """Latent attention's weights, with RoPE's channels in the order of the kernels; queries hold `score_scale`."""
    rope, plain = attention.rope_head_dim or 0, attention.nope_head_dim or 0
    order = [*range(0, rope, 2), *range(1, rope, 2)] if config.interleaved_rope else [*range(rope)]

    def turned(rows: Tensor, kept: int) -> Tensor:
        """Rows [..., kept + rope, inputs] with the last ones in order."""
        return torch.cat([rows[..., :kept, :], rows[..., kept:, :][..., order, :]], dim=-2)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(_copied(take(f"{prefix}{name}.weight"), device), LATENT_EPS)

    rank = attention.q_lora_rank
    queries = take(f"{prefix}{'q_b_proj' if rank else 'q_proj'}.weight")
    queries = turned(queries.unflatten(0, (attention.q_heads, -1)), plain).flatten(0, 1)
    if config.score_scale != 1:
        queries = (queries.float() * config.score_scale).to(queries.dtype)
    rows = turned(take(f"{prefix}kv_a_proj_with_mqa.weight"), attention.latent_rank or 0)
    first = take(f"{prefix}q_a_proj.weight") if rank else queries
    keys, values = take(f"{prefix}kv_b_proj.weight").unflatten(0, (attention.q_heads, -1)).tensor_split([plain], dim=1)
    return LatentAttentionWeights(
        down=Dense(torch.cat([first, rows]).to(device)),
        up=Dense(_copied(queries, device)) if rank else None,
        query_norm=norm("q_a_layernorm") if rank else None,
        latent_norm=norm("kv_a_layernorm"),
        keys=_copied(keys.contiguous(), device),
        values=_copied(values.contiguous(), device),
        output=Dense(_copied(take(f"{prefix}o_proj.weight"), device)),
    )


def _split_gate(queries: Dense, attention: Attention) -> tuple[Dense, Dense]:
    """The projections to queries and to the output's gate, whose rows alternate by head."""

    def parts(rows: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in rows.unflatten(0, (attention.q_heads, 2, -1)).unbind(1)]

    biases = [None, None] if queries.bias is None else parts(queries.bias)
    q, gate = (Dense(weight, bias) for weight, bias in zip(parts(queries.weight), biases, strict=True))
    return q, gate


def _joined(first: Dense, second: Dense) -> Dense:
    bias = None if first.bias is None or second.bias is None else torch.cat([first.bias, second.bias])
    return Dense(torch.cat([first.weight, second.weight]), bias)


def _fused(take: Take, device: torch.device, *names: str, whole: str = "") -> Any:
    """One layer of several projections of the same input, which a checkpoint may hold as one by the name `whole`.

    `Dense`, or `Stored` where the weights are as a GGUF file stores them.
    """
    fused = take(f"{whole}.weight", None) if whole else None
    if fused is not None:
        names = (whole,)
    weights = [take(f"{name}.weight") for name in names] if fused is None else [fused]
    biases = [take(f"{name}.bias", None) for name in names]
    present = [bias for bias in biases if bias is not None]
    bias = torch.cat(present).to(device) if present else None
    if any(isinstance(weight, GgufWeight) for weight in weights):
        parts = (_copied(part, device) for part in stacked(weights))
        return Stored(tuple(Dense(part) if isinstance(part, Tensor) else part for part in parts), bias)
    weight = torch.cat(weights) if fused is None else fused
    return Dense(weight.to(device), bias)


def _placed(qkv: Dense, attention: Attention, heads: HeadLayout) -> Dense:
    """Projections to queries, keys and values with the channels of each head where the decoder has them."""

    def placed(rows: Tensor) -> Tensor:
        rotated, values = rows.tensor_split([(attention.q_heads + attention.kv_heads) * heads.head_dim])
        return torch.cat([heads.rotated(rotated), heads.padded(values)])

    return Dense(placed(qkv.weight), None if qkv.bias is None else placed(qkv.bias))


def _qk_norms(config: DecoderConfig, take: Take, prefix: str, device: torch.device) -> tuple[RMSNorm, RMSNorm] | None:
    """Norms of queries and of keys, of one head or of all together."""
    layout, heads = config.checkpoint, config.checkpoint.heads
    weights = [take(f"{prefix}{name}_norm.weight", None) for name in "qk"]
    if weights[0] is None:
        return None
    shrinking = 1.0 if heads is None else heads.shrinking  # zeros between channels make a mean square smaller
    norms = []
    for weight in weights:
        placed = layout.norm_weight(weight if heads is None else heads.rotated(weight), shrinking)
        norms.append(RMSNorm(placed.to(device), layout.eps * shrinking**2))
    return norms[0], norms[1]


def _stacked(norms: tuple[RMSNorm, RMSNorm] | None, attention: Attention) -> RMSNorm | None:
    """Norms of each head, one row per query head and KV head, so that one operation applies both."""
    if norms is None:
        return None
    heads = attention.q_heads, attention.kv_heads
    rows = [norm.weight.expand(count, -1) for norm, count in zip(norms, heads, strict=True)]
    return RMSNorm(torch.cat(rows), norms[0].eps)


def stream_norm(
    layout: CheckpointLayout, take: Take, name: str, device: torch.device, scale: float = 1.0
) -> RMSNorm | LayerNorm:
    """A norm of the stream, whose output is times `scale`."""
    weight, bias = layout.norm_weight(take(f"{name}.weight"), scale), take(f"{name}.bias", None)
    if not layout.layer_norm:
        return RMSNorm(_copied(weight, device), layout.stream_eps)
    return LayerNorm(_copied(weight, device), layout.stream_eps, None if bias is None else _copied(bias, device))


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return (tensor.float() * scale).to(tensor.dtype)


def _delta_inputs(state: State, take: Take, prefix: str) -> Tensor:
    """Rows of a gated delta rule's projections in the order of `DeltaWeights.inputs`.

    Qwen3.5 and OLMo store them apart. Qwen3-Next stores those of each key head together: its query, key, values and
    gates, and its step sizes and decays.
    """
    for names in APART:
        apart = [take(f"{prefix}{name}.weight", None) for name in names]
        if apart[0] is not None:
            return torch.cat(apart)
    values = state.value_heads // state.key_heads
    mixed, steering = (take(f"{prefix}{name}.weight").unflatten(0, (state.key_heads, -1)) for name in ALTERNATING)
    widths = (state.key_dim, state.key_dim, values * state.value_dim, values * state.value_dim)
    q, k, v, gate = mixed.split_with_sizes(widths, dim=1)
    step, decay = steering.split_with_sizes((values, values), dim=1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v, step, decay, gate)])


def _delta_vectors(state: State, take: Take, prefix: str, device: torch.device) -> DeltaVectors:
    taps = _copied(take(f"{prefix}conv1d.weight")[:, 0], device)
    log_decay, step_bias = (_copied(take(f"{prefix}{name}").float(), device) for name in ("A_log", "dt_bias"))
    return DeltaVectors(taps, log_decay, step_bias, state.key_heads, state.key_dim, state.step_limit)


# Left out, transformers asks on stdin whether a checkpoint's own Python may run.
UNTRUSTED = {"trust_remote_code": False}
EAGER = {"attn_implementation": "eager"}  # the configuration may name one whose code is then downloaded
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
PARSED = (".json", ".txt", ".model", ".jinja")  # suffixes of files that readers hold in memory
MAX_PARSED_BYTES = 64 << 20  # the largest tokenizers have about 35 MB
MAX_LABELS = 100_000


def load_config(source: str, *, of_family: bool = False) -> Any:
    """The transformers configuration in the folder `source`. Raises ModelError.

    What a conversion wrote has all keys of its family's class, which imports 650 modules and is needed for
    transformers' models alone: of_family.
    """
    with _reading(source):
        keys = _decoder_keys(read_document(Path(source) / "config.json"))
        if _is_converted(source) and not of_family:
            named: Any = type("Config", (transformers.PreTrainedConfig,), {"model_type": keys["model_type"]})
            return named.from_dict(keys)
        hub_type = families()[keys["model_type"]].hub_type
        if hub_type:  # what `auto_map` names is code of the checkpoint's, which is not needed
            keys = {name: value for name, value in keys.items() if name != "auto_map"} | {"model_type": hub_type}
            return transformers.CONFIG_MAPPING[hub_type].from_dict(keys)
        return transformers.AutoConfig.from_pretrained(source, **UNTRUSTED)


def import_model_code(source: str, shape: ModelShape) -> None:
    """Imports transformers' modules of the model in `source`, if `load_state_dict` needs them. Raises ModelError."""
    if _is_read_directly(source, shape):
        return
    config = load_config(source, of_family=True).get_text_config()
    with _reading(source), torch.device("meta"):
        _require_layers(source, shape.layers)
        transformers.AutoModelForCausalLM.from_config(config, **EAGER, **UNTRUSTED)


def load_weights(source: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """The decoder's weights in `dtype` on `device`. Raises what `load_state_dict` raises."""
    return load_state_dict(source, config, dtype).decoder_weights(device)


def load_state_dict(source: str, decoder: DecoderConfig, dtype: torch.dtype, stored: bool = False) -> StateDict:
    """The checkpoint's weights in `dtype` on the host, from safetensors only: pickles are not opened.

    stored: those in blocks of a GGUF file stay so. Raises ModelError when any is missing or misshapen, or has no place
    in transformers' model.
    """
    shape = decoder.shape
    if _is_read_directly(source, shape):
        heads = decoder.checkpoint.heads
        shape = shape if heads is None else dataclasses.replace(shape, head_dim=heads.head_dim)
        return StateDict(source, decoder, open_tensors(source, shape, dtype, stored=stored))
    config = load_config(source, of_family=True).get_text_config()
    vars(config).pop("transformers_weights", None)  # it may name a pickle
    options = {
        "config": config, "dtype": dtype, "output_loading_info": True, "use_safetensors": True,
        "ignore_mismatched_sizes": True,  # they are reported here
        "key_mapping": INNER_NAMES, **EAGER,
    }  # fmt: skip
    with _reading(source):
        _require_layers(source, shape.layers)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(source, **options, **UNTRUSTED)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"the checkpoint {source} lacks {len(missing)} weights, the first is {missing[0]}")
    for name, actual, needed in sorted(info["mismatched_keys"]):
        sizes = f"{list(actual)}; its config.json needs {list(needed)}"
        raise ModelError(f"in the checkpoint {source} the weight {name} is {sizes}")
    _require_all_read(source, shape, info["unexpected_keys"])
    return StateDict(source, decoder, dict(model.state_dict()))


def _is_read_directly(source: str, shape: ModelShape) -> bool:
    """Whether tensors have the names and sizes that the decoder takes: importing transformers' models takes seconds."""
    is_dense = not shape.is_moe and not shape.states
    return shape.weight_bits.format in PACKED_FORMATS or (is_dense and _is_converted(source))


def _is_converted(source: str) -> bool:
    """Whether the folder is a converted GGUF file's."""
    return (Path(source) / MANIFEST).is_file()


def open_tensors(source: str, shape: ModelShape, dtype: torch.dtype, *, stored: bool = False) -> StoredTensors:
    """A checkpoint's tensors, none of which is read yet; stored: as for `load_state_dict`. Raises ModelError."""
    with _reading(source):
        _require_layers(source, shape.layers)
        settings = json.loads(read_document(Path(source) / "config.json")).get("quantization_config", {})
        files = _weight_files(Path(source))
        return StoredTensors.open(source, shape, dtype, settings, files, keeps_blocks=stored)


def load_tokenizer(source: str) -> Any:
    """The tokenizer in the folder `source`, after a test encode and decode. Raises ModelError."""
    # What a conversion wrote holds the whole tokenizer. The class of its family would be the same, 600 modules later.
    with _reading(source), quiet_rust():
        reader = transformers.PreTrainedTokenizerFast if _is_converted(source) else transformers.AutoTokenizer
        tokenizer = reader.from_pretrained(source, **UNTRUSTED)
        tokenizer.decode(tokenizer.encode("It works."))  # transformers takes settings that fail at their first use
    return tokenizer


def load_tensor(source: str, name: str) -> Tensor:
    """One tensor of the folder's safetensors files in float32, on the host. Raises ModelError."""
    with _reading(source):
        files = _weight_files(Path(source))
    tensor: Tensor = StoredTensors.open(source, None, torch.float32, {}, files).get(name)
    return tensor


def load_tensors(source: str, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of the folder's safetensors files whose names begin so, on the host. Raises ModelError."""
    tensors: dict[str, Tensor] = {}
    with _reading(source):
        for path in _weight_files(Path(source)):
            with safe_open(path, framework="pt") as file:
                names = [name for name in list(file.keys()) if name.startswith(prefixes)]
                tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def checkpoint_elements(source: str) -> int:
    """Elements of all tensors in the folder's safetensors files, from their headers. Raises ModelError."""
    with _reading(source):
        return sum(map(math.prod, _tensor_sizes(source)))


def loaded_bytes(source: str, shape: ModelShape, weights: Weights, dtype: torch.dtype) -> int:
    """Bytes that are held at once while the checkpoint loads in `dtype` for a plan's weights. Raises ModelError.

    A packed checkpoint needs one layer, the embedding and the head in full precision, or the whole model where that
    stays so. Any other checkpoint needs everything that the folder holds, as do blocks of a GGUF file that stay so.
    """
    if weights.stored:
        with _reading(source):
            return sum(path.stat().st_size for path in _weight_files(Path(source)))
    if shape.weight_bits.format not in (*PACKED_FORMATS, "gguf"):
        return checkpoint_elements(source) * dtype.itemsize
    tables = shape.embedding_params * (1 if shape.tied_embeddings else 2)
    return dtype.itemsize * (
        shape.parameters if weights.dense else tables + (shape.parameters - tables) // shape.layers
    )


def _require_layers(source: str, layers: int) -> None:
    """Raises ValueError for a configuration with so many layers that transformers would take minutes to build them."""
    held = len(_tensor_sizes(source))
    if held < layers:
        raise ValueError(f"it has {held} tensors for {layers} layers")


def _tensor_sizes(source: str) -> list[list[int]]:
    """The dimensions of every tensor in the folder."""
    sizes: list[list[int]] = []
    for path in _weight_files(Path(source)):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            sizes += [file.get_slice(name).get_shape() for name in names]
    return sizes


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers takes weights from. Raises ValueError for an index that names any but safetensors
    beside it: transformers would open pickles, and files of other folders.
    """
    if (folder / WHOLE).exists() or not (folder / INDEX).exists():
        return [folder / WHOLE]
    index = json.loads((folder / INDEX).read_bytes())
    for part in ("weight_map", "metadata"):
        if not isinstance(index, dict) or not isinstance(index.get(part), dict):
            raise ValueError(f"{INDEX} has no object called {part}")
    files = sorted(set(map(str, index["weight_map"].values())))
    for name in files:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise ValueError(f"{INDEX} names {brief(name)}; allowed: safetensors files beside it")
    return [folder / name for name in files]


def _decoder_keys(config: bytes) -> dict[str, Any]:
    """The keys of a decoder that is executed, with its own `model_type`.

    Raises ValueError for others, and for what transformers would turn into lists of any length before it is known to
    be wrong.
    """
    keys = json.loads(config)
    kind = keys.get("model_type") if isinstance(keys, dict) else None
    if isinstance(kind, str) and kind in INNER_TYPES:
        kind, keys = INNER_TYPES[kind], keys.get("text_config") or {}
    if kind not in executable_architectures():
        raise ValueError(f"model_type is {brief(kind)}, which is not executed; {executed_instead(kind)}")
    for name, limit in (("num_hidden_layers", MAX_LAYERS), ("num_labels", MAX_LABELS)):
        count = keys.get(name)
        if isinstance(count, (int, float)) and count > limit:
            raise ValueError(f"{name} is {brief(count)}; allowed: up to {limit}")
    return keys | {"model_type": kind}


def _require_plain_files(folder: Path) -> None:
    """Raises ValueError for files that readers would wait for, or that would fill the memory."""
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_dir() or not path.exists():
            continue
        if not path.is_file():
            raise ValueError(f"{brief(path.name)} is a pipe or a device; allowed: files")
        size = path.stat().st_size
        if path.suffix in PARSED and size > MAX_PARSED_BYTES:
            raise ValueError(f"{brief(path.name)} has {size} bytes; allowed: up to {MAX_PARSED_BYTES}")


@contextmanager
def _reading(source: str) -> Iterator[None]:
    with failures_as(f"cannot load the model {source}"):
        _require_plain_files(Path(source))
        yield
