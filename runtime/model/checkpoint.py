"""Checkpoints in safetensors: configuration, tensors, and the decoder weights assembled from them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from ridgeplan.kernels.state import DeltaVectors
from ridgeplan.roofline.catalog.families import INNER_TYPES
from ridgeplan.roofline.catalog.files import read_document
from ridgeplan.roofline.catalog.layers import Attention, State
from ridgeplan.roofline.catalog.model_shape import MAX_LAYERS, PACKED_FORMATS, ModelShape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.execution import EXECUTABLE_ARCHITECTURES
from ridgeplan.runtime.errors import ModelError, failures_as, quiet_rust
from ridgeplan.runtime.model.decoder import DecoderConfig
from ridgeplan.runtime.model.experts import RoutedMLP, StackedExperts
from ridgeplan.runtime.model.latent import LatentAttentionWeights
from ridgeplan.runtime.model.linear import Dense, GatedMLP
from ridgeplan.runtime.model.norms import RMSNorm
from ridgeplan.runtime.model.packed_weights import PackedTensors
from ridgeplan.runtime.model.weights import (
    MLP,
    AttentionWeights,
    DecoderWeights,
    DeltaWeights,
    LayerWeights,
    TokenMixer,
    tensors_of,
)

Part = TypeVar("Part")
Take = Callable[..., Any]  # the tensor of a name, or a default
ALTERNATING = ("in_proj_qkvz", "in_proj_ba")  # Qwen3-Next's projections of a gated delta rule


@dataclass(frozen=True, eq=False)
class StateDict:
    """A transformers state dict of a model of `config`. source: where it was read from.

    All methods raise ModelError for weights that are not finite.
    """

    source: str
    config: DecoderConfig
    tensors: dict[str, Tensor] | PackedTensors

    def decoder_weights(self, device: torch.device) -> DecoderWeights:
        """All weights on `device`; they are dropped here layer by layer, so that they are not held twice."""
        ends = self.ends(device)
        return dataclasses.replace(ends, layers=tuple(self.layers(device)))

    def ends(self, device: torch.device) -> DecoderWeights:
        """The embedding, the last norm and the head on `device`, without layers."""
        embedding = _copied(self.tensors.pop("model.embed_tokens.weight"), device)
        head = self.tensors.pop("lm_head.weight", None)
        head_weight = embedding if self.config.shape.tied_embeddings or head is None else _copied(head, device)
        norm = _norm(self.config, self.tensors.pop("model.norm.weight"), device)
        return self._finite(DecoderWeights(embedding, (), norm, Dense(head_weight)))

    def layers(self, device: torch.device, keep: bool = False) -> Iterator[LayerWeights]:
        """The layers on `device`, one after another; unless `keep`, each is dropped here."""
        take = self.tensors.get if keep else self.tensors.pop
        for index in range(self.config.shape.layers):
            yield self._finite(_layer(self.config, index, take, f"model.layers.{index}.", device))

    def _finite(self, part: Part) -> Part:
        for tensor in tensors_of(part):
            # The extremes show it without a copy of the tensor.
            if tensor.is_floating_point() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise ModelError(
                    f"the checkpoint {self.source} holds weights that are NaN or infinite as {tensor.dtype}"
                )
        return part


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, as a single view would keep the whole mapped checkpoint in memory."""
    return tensor.to(device, copy=True)


def _norm(config: DecoderConfig, weight: Tensor, device: torch.device) -> RMSNorm:
    """A norm by its weight as stored; with an offset in float32, which the model's dtype would round."""
    whole = weight.float() + config.norm_offset if config.norm_offset else weight
    return RMSNorm(_copied(whole, device), config.norm_eps)


def _layer(config: DecoderConfig, index: int, take: Take, prefix: str, device: torch.device) -> LayerWeights:
    def fused(*names: str) -> Dense:
        weight = torch.cat([take(f"{prefix}{name}.weight") for name in names])
        biases = [take(f"{prefix}{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return Dense(weight.to(device), torch.cat(present).to(device) if present else None)

    def norm(name: str) -> RMSNorm:
        return _norm(config, take(f"{prefix}{name}.weight"), device)

    settings = config.layers[index]
    mixer: TokenMixer
    if settings.state:
        vectors = _delta_vectors(settings.state, take, f"{prefix}linear_attn.", device)
        gated_norm = RMSNorm(_copied(take(f"{prefix}linear_attn.norm.weight"), device), config.norm_eps)
        inputs = Dense(_delta_inputs(settings.state, take, f"{prefix}linear_attn.").to(device))
        mixer = DeltaWeights(inputs, vectors, gated_norm, fused("linear_attn.out_proj"))
    elif settings.attention and settings.attention.is_latent:
        mixer = _latent_attention(config, settings.attention, take, f"{prefix}self_attn.", device)
    else:
        (qkv, gate), output = _attention_inputs(config, index, take, prefix, device), fused("self_attn.o_proj")
        mixer = AttentionWeights(qkv, output, _qk_norm(config, index, take, prefix, device), gate)
    return LayerWeights(
        mixer_norm=norm("input_layernorm"),
        mixer=mixer,
        mlp_norm=norm("post_attention_layernorm"),
        mlp=_mlp(config, take, prefix, device, fused),
    )


def _mlp(config: DecoderConfig, take: Take, prefix: str, device: torch.device, fused: Callable[..., Dense]) -> MLP:
    """Routed experts with what is beside them, or a dense MLP."""

    def gated(name: str) -> GatedMLP:
        return GatedMLP(fused(f"{name}.gate_proj", f"{name}.up_proj"), fused(f"{name}.down_proj"))

    def present(*names: str) -> Tensor | None:
        """The first of these tensors that the layer has."""
        tensors = (take(prefix + name, None) for name in names)
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        return None if tensor is None else _copied(tensor, device)

    router = present("mlp.gate.weight", "block_sparse_moe.router.weight", "block_sparse_moe.gate.weight")
    if router is None or config.routing is None:
        return gated("mlp")
    gate_up, down = (
        present(f"mlp.experts.{name}_proj", f"block_sparse_moe.experts.{name}_proj") for name in ("gate_up", "down")
    )
    if gate_up is None or down is None:
        gate_up, down = (experts.to(device) for experts in _separate_experts(config.shape, take, prefix))
    places = ("mlp.", "mlp.gate.", "mlp.gate.moe_statics.", "block_sparse_moe.")
    bias = present(*(f"{place}e_score_correction_bias" for place in places))
    shared = config.shape.shared_experts_intermediate
    shared_name = (
        "mlp.shared_expert" if (gate := present("mlp.shared_expert_gate.weight")) is not None else "mlp.shared_experts"
    )
    return RoutedMLP(
        router,
        config.routing,
        StackedExperts.of(gate_up),
        StackedExperts.of(down),
        choice_bias=None if bias is None else bias.flatten().float(),
        shared=gated(shared_name) if shared else None,
        shared_gate=gate,
    )


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


def _attention_inputs(
    config: DecoderConfig, index: int, take: Take, prefix: str, device: torch.device
) -> tuple[Dense, Dense | None]:
    """The projections to queries, keys and values, and to the output's gate, whose rows alternate with the queries'.

    Channels of a partial rotary embedding are reordered, see `Rotary.channels`.
    """
    attention, channels = config.layers[index].attention, config.layer_rotary(index).channels
    assert attention is not None, "the layer has attention"

    def rows(kind: str) -> tuple[Tensor | None, Tensor | None]:
        q, k, v = (take(f"{prefix}self_attn.{name}_proj.{kind}", None) for name in "qkv")
        if q is None:
            return None, None
        gate = None
        if attention.gate_width:
            q, gate = (part.flatten(0, 1) for part in q.unflatten(0, (attention.q_heads, 2, -1)).unbind(1))
        if channels is not None:
            q, k = (part.unflatten(0, (-1, attention.head_dim))[:, channels].flatten(0, 1) for part in (q, k))
        return torch.cat([q, k, v]).to(device), None if gate is None else _copied(gate, device)

    (qkv, gate), (qkv_bias, gate_bias) = rows("weight"), rows("bias")
    assert qkv is not None, "checked when it was read"
    return Dense(qkv, qkv_bias), None if gate is None else Dense(gate, gate_bias)


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


def _qk_norm(config: DecoderConfig, index: int, take: Take, prefix: str, device: torch.device) -> RMSNorm | None:
    """Norms of each head, one row per query head and KV head, so that one operation applies both."""
    q_norm, k_norm = (take(f"{prefix}self_attn.{name}_norm.weight", None) for name in "qk")
    if q_norm is None:
        return None
    rows = torch.cat([q_norm.expand(config.shape.q_heads, -1), k_norm.expand(config.shape.kv_heads, -1)])
    channels = config.layer_rotary(index).channels
    return _norm(config, rows if channels is None else rows[:, channels], device)


def _delta_inputs(state: State, take: Take, prefix: str) -> Tensor:
    """Rows of a gated delta rule's projections in the order of `DeltaWeights.inputs`.

    Qwen3.5 stores them apart. Qwen3-Next stores those of each key head together: its query, key, values and gates, and
    its step sizes and decays.
    """
    names = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
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
    by_head = (_copied(take(f"{prefix}{name}").float(), device) for name in ("A_log", "dt_bias"))
    return DeltaVectors(taps, *by_head, state.key_heads, state.key_dim)


# Left out, transformers asks on stdin whether a checkpoint's own Python may run.
UNTRUSTED = {"trust_remote_code": False}
EAGER = {"attn_implementation": "eager"}  # the configuration may name one whose code is then downloaded
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
PARSED = (".json", ".txt", ".model", ".jinja")  # suffixes of files that readers hold in memory
MAX_PARSED_BYTES = 64 << 20  # the largest tokenizers have about 35 MB
MAX_LABELS = 100_000


def load_config(source: str) -> Any:
    """The transformers configuration in the folder `source`. Raises ModelError."""
    with _reading(source):
        _require_decoder(read_document(Path(source) / "config.json"))
        return transformers.AutoConfig.from_pretrained(source, **UNTRUSTED)


def import_model_code(source: str, shape: ModelShape) -> None:
    """Imports transformers' modules of the model in `source`, which `load_state_dict` needs. Raises ModelError."""
    if shape.weight_bits.format in PACKED_FORMATS:
        return
    config = load_config(source).get_text_config()
    with _reading(source), torch.device("meta"):
        _require_layers(source, shape.layers)
        transformers.AutoModelForCausalLM.from_config(config, **EAGER, **UNTRUSTED)


def load_weights(source: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """The decoder's weights in `dtype` on `device`. Raises what `load_state_dict` raises."""
    return load_state_dict(source, config, dtype).decoder_weights(device)


def load_state_dict(source: str, decoder: DecoderConfig, dtype: torch.dtype) -> StateDict:
    """The checkpoint's weights in `dtype` on the host, from safetensors only: pickles are not opened.

    Raises ModelError when any is missing or misshapen.
    """
    shape = decoder.shape
    if shape.weight_bits.format in PACKED_FORMATS:
        return StateDict(source, decoder, open_packed(source, shape, dtype))
    config = load_config(source).get_text_config()
    vars(config).pop("transformers_weights", None)  # it may name a pickle
    options = {
        "config": config, "dtype": dtype, "output_loading_info": True, "use_safetensors": True,
        "ignore_mismatched_sizes": True,  # they are reported here
        **EAGER,
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
    return StateDict(source, decoder, dict(model.state_dict()))


def open_packed(source: str, shape: ModelShape, dtype: torch.dtype) -> PackedTensors:
    """A quantized checkpoint's tensors, none of which is read yet. Raises ModelError."""
    with _reading(source):
        _require_layers(source, shape.layers)
        settings = json.loads(read_document(Path(source) / "config.json"))["quantization_config"]
        return PackedTensors.open(source, shape, dtype, settings, _weight_files(Path(source)))


def load_tokenizer(source: str) -> Any:
    """The tokenizer in the folder `source`, after a test encode and decode. Raises ModelError."""
    with _reading(source), quiet_rust():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **UNTRUSTED)
        tokenizer.decode(tokenizer.encode("It works."))  # transformers takes settings that fail at their first use
    return tokenizer


def load_tensor(source: str, name: str) -> Tensor:
    """One tensor of the folder's safetensors files, on the host. Raises ModelError."""
    with _reading(source):
        for path in _weight_files(Path(source)):
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118
                    tensor: Tensor = file.get_tensor(name)
                    return tensor
        raise ValueError(f"it has no tensor {name}")


def checkpoint_elements(source: str) -> int:
    """Elements of all tensors in the folder's safetensors files, from their headers. Raises ModelError."""
    with _reading(source):
        return sum(map(math.prod, _tensor_sizes(source)))


def decoded_elements(source: str, shape: ModelShape, unpacked: bool) -> int:
    """Elements that are held at once while the checkpoint loads. Raises ModelError.

    A packed checkpoint needs one layer, the embedding and the head in full precision, or the whole model if `unpacked`
    is set. Any other checkpoint needs everything that the folder holds.
    """
    if shape.weight_bits.format not in PACKED_FORMATS:
        return checkpoint_elements(source)
    tables = shape.embedding_params * (1 if shape.tied_embeddings else 2)
    return shape.parameters if unpacked else tables + (shape.parameters - tables) // shape.layers


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


def _require_decoder(config: bytes) -> None:
    """Raises ValueError for what transformers would turn into lists of any length before it is known to be wrong."""
    keys = json.loads(config)
    kind = keys.get("model_type") if isinstance(keys, dict) else None
    if isinstance(kind, str) and kind in INNER_TYPES:
        kind, keys = INNER_TYPES[kind], keys.get("text_config") or {}
    if kind not in EXECUTABLE_ARCHITECTURES:
        raise ValueError(f"model_type is {brief(kind)}; supported: {', '.join(EXECUTABLE_ARCHITECTURES)}")
    for name, limit in (("num_hidden_layers", MAX_LAYERS), ("num_labels", MAX_LABELS)):
        count = keys.get(name)
        if isinstance(count, (int, float)) and count > limit:
            raise ValueError(f"{name} is {brief(count)}; allowed: up to {limit}")


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
