"""Reads a decoder's configuration from a config.json: shape, RoPE frequencies, and what the runtime supports."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeplan.kernels.experts import Activation
from ridgeplan.kernels.state import MAX_TAPS
from ridgeplan.roofline.catalog.config_json import routing_of, shape_from_config
from ridgeplan.roofline.catalog.families import Family, executable_architectures, families
from ridgeplan.roofline.catalog.layers import Attention
from ridgeplan.roofline.catalog.model_shape import LOADED_FORMATS, ModelShape, loaded_formats, trained_context
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.support import as_loaded, missing_architecture
from ridgeplan.runtime.errors import ModelError, failures_as
from ridgeplan.runtime.model.checkpoint_layout import CheckpointLayout, HeadLayout
from ridgeplan.runtime.model.decoder import DecoderConfig, Rotary, frequencies_of, layer_settings

FULL, SLIDING = "full_attention", "sliding_attention"  # as rope_parameters name types of layers
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# "dynamic" stretches sequences beyond the trained context alone; other types depend on their length within it, too.
ROTARY_TYPES = ("default", "linear", "yarn", "llama3", "dynamic", "proportional")


def decoder_config(hub: Any, source: str, yarn_factor: float = 1.0) -> DecoderConfig:
    """The decoder of a transformers configuration, with RoPE scaled by YaRN if `yarn_factor` > 1.

    source: where the model was read from. Raises ModelError for families, activations, sizes or rotary embeddings
    that the decoder does not support.
    """
    quantized = getattr(hub, "quantization_config", None)  # a model of images has it beside its text_config
    hub = hub.get_text_config()
    _require(hub.model_type in executable_architectures(), "model_type", hub.model_type, executable_architectures())
    hub = _stretched(hub, yarn_factor)
    family = families()[hub.model_type]
    keys: dict[str, Any] = {**family.defaults, **hub.to_dict()}
    keys |= {} if quantized is None else {"quantization_config": quantized}
    activation = str(keys.get("hidden_activation") or keys.get("hidden_act"))
    _require(activation in ACTIVATIONS, "hidden_act", activation, tuple(ACTIVATIONS))
    causal = keys.get("use_bidirectional_attention") != "all"  # of embedding models
    _require(causal, "use_bidirectional_attention", "all", ("null", "'vision'"))
    eps_key = "layer_norm_eps" if family.layer_norm else "rms_norm_eps"
    eps = keys.get(eps_key)
    if not isinstance(eps, float) or not 0 < eps <= 1:
        raise ModelError(f"the model's {eps_key} is {brief(eps)}; allowed: above 0 up to 1")
    try:
        stored, routing = shape_from_config(keys, source, source), routing_of(keys)
    except ValueError as error:
        raise ModelError(f"cannot load the model {source}: {error}") from error
    shape = as_loaded(stored)
    held = shape.weight_bits.format
    _require(held in LOADED_FORMATS, "weight format", held, loaded_formats())
    missing = missing_architecture(shape)
    if missing:
        raise ModelError(f"cannot load the model {source}: {missing}")
    for state, _ in shape.states:
        _require(activation == "silu", "hidden_act with recurrent states", activation, ("silu",))
        allowed = tuple(map(str, range(1, MAX_TAPS + 1)))
        _require(state.conv_width <= MAX_TAPS, "convolution's width", state.conv_width, allowed)
    layers = list(layer_settings(map(shape.group_of, range(shape.layers))))
    cap = _factor(keys, "attn_logit_softcapping", 0.0)
    rotaries: dict[Rotary, int] = {}  # each with its number
    layouts: set[HeadLayout] = set()
    for index, settings in enumerate(layers):
        if settings.attention is not None:
            head_dim, width = (_rotary_width(each, index) for each in (stored, shape))
            heads = HeadLayout(head_dim, width, _rotary_dim(hub, head_dim), family.interleaved_rope)
            layouts.add(heads)
            rotary = _rotary(hub, keys, family, settings.attention, heads, index)
            number = rotaries.setdefault(rotary, len(rotaries))
            layers[index] = replace(settings, rotary=number, soft_cap=cap)
    changing = [heads for heads in layouts if heads.changes]
    sizes = ", ".join(str(heads.head_dim) for heads in layouts)
    _require(not changing or len(layouts) == 1, "sizes of heads", sizes, ("one", "several of a power of two from 64"))
    layout = CheckpointLayout(
        eps=eps,
        norms=family.norms,
        norm_offset=family.norm_offset,
        layer_norm=family.layer_norm,
        stream_scale=shape.hidden**0.5 if family.scaled_embedding else _factor(keys, "embedding_multiplier"),
        output_scale=_factor(keys, "residual_multiplier"),
        logit_scale=_factor(keys, "logit_scale") / _factor(keys, "logits_scaling"),
        heads=changing[0] if changing else None,
        value_norm=family.value_norm,
        state_norms=family.state_norms or family.norms,
        state_eps=family.state_eps or eps,
        activation=ACTIVATIONS[activation],
        logit_cap=_factor(keys, "final_logit_softcapping", 0.0) or None,
    )
    config = DecoderConfig(shape, layout.stream_eps, tuple(layers), tuple(rotaries), layout, routing)
    if keys.get("swiglu_limit"):  # gpt-oss
        clamped = Activation(_factor(keys, "swiglu_alpha"), _factor(keys, "swiglu_limit"), 1.0)
        config = replace(config, expert_activation=clamped)
    if not shape.is_mla:
        return config
    _require(not keys.get("attention_bias"), "attention_bias", True, ("false with latent attention",))
    return replace(config, score_scale=_score_scale(hub), interleaved_rope=getattr(hub, "rope_interleave", True))


def _factor(keys: dict[str, Any], name: str, default: float = 1.0) -> float:
    """A finite number of 0 or more in a configuration. Raises ModelError for any other value."""
    value = keys.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ModelError(f"the model's {name} is {brief(value)}; allowed: a number of 0 or more")
    return float(value)


def _score_scale(hub: Any) -> float:
    """What YaRN multiplies scores by where `mscale_all_dim` says so (DeepSeek's models)."""
    rope = hub.rope_parameters
    weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    return float((0.1 * weight * math.log(factor) + 1) ** 2) if rope["rope_type"] != "default" and factor > 1 else 1.0


def yarn_frequencies(head_dim: int, theta: float, trained: int, context: int) -> tuple[tuple[float, ...], float]:
    """Rotary frequencies and the factor on cosines and sines, stretched by YaRN from `trained` tokens to `context`.

    Plain RoPE up to `trained` (Peng et al. 2023, section 3.3).
    """
    config = transformers.LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    kind, factor = ("yarn", context / trained) if context > trained else ("linear", 1.0)
    config.rope_parameters = {
        "rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": trained,
    }  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def _require(condition: bool, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not condition:
        raise ModelError(f"the model's {name} is {brief(value)}; supported: {', '.join(allowed)}")


def _stretched(hub: Any, yarn_factor: float) -> Any:
    """A copy of the configuration with YaRN's `yarn_factor`, or the configuration itself for 1."""
    if yarn_factor == 1:
        return hub
    kind = hub.rope_parameters.get("rope_type", "set by layer type")
    if kind != "default":
        raise ModelError(f"yarn_factor is {yarn_factor}, but the model's own rope_type is {brief(kind)}; allowed: 1")
    hub = copy.deepcopy(hub)
    hub.rope_parameters |= {
        "rope_type": "yarn",
        "factor": float(yarn_factor),
        "original_max_position_embeddings": trained_context(hub.model_type, hub.max_position_embeddings),
    }
    return hub


def _layer_parameters(hub: Any, layer_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The RoPE parameters of layers of a type, and what names the type where types differ."""
    parameters = hub.rope_parameters or {}
    if layer_type in parameters:
        return parameters[layer_type], {"layer_type": layer_type}
    return parameters, {}


def _rotary_width(shape: ModelShape, index: int) -> int:
    """Channels of a head that RoPE may turn in a layer with attention."""
    attention = shape.group_of(index).attention
    assert attention is not None, "the layer has attention"
    return attention.rotary_dim


def _rotary_dim(hub: Any, head_dim: int) -> int:
    """Channels of a head that RoPE turns. Raises ModelError for a share of them that is none."""
    parameters, _ = _layer_parameters(hub, FULL)
    share = parameters.get("partial_rotary_factor") or getattr(hub, "partial_rotary_factor", None) or 1.0
    if parameters.get("rope_type") == "proportional":  # the others have a frequency of 0
        share = 1.0
    dim = int(head_dim * share) if isinstance(share, (int, float)) and 0 < share <= 1 else 0
    if dim < 2 or dim % 2:
        raise ModelError(f"{dim} of {head_dim} channels turn; allowed: an even number from 2 on")
    return dim


def _rotary(
    hub: Any, keys: dict[str, Any], family: Family, attention: Attention, heads: HeadLayout, index: int
) -> Rotary:
    """A layer's rotary embedding: RoPE, linear, YaRN, Llama 3's, or none at all.

    Its scale holds what the model's softmax is scaled by beside head_dim ** -0.5: queries and keys have its root.
    """
    query_scale = _factor(keys, "attention_multiplier", _factor(keys, "query_pre_attn_scalar", heads.head_dim) ** -0.5)
    softmax = math.sqrt(query_scale * math.sqrt(heads.width)) if query_scale != heads.width**-0.5 else 1.0
    switches = keys.get("no_rope_layers")  # 0: none
    if (switches and not switches[index]) or not (attention.window_tokens or family.full_rope):
        return Rotary(heads.frequencies([]), softmax)
    parameters, layer_type = _layer_parameters(hub, SLIDING if attention.window_tokens else FULL)
    if parameters.get("rope_theta") is None:  # of families that may have no RoPE at all
        return Rotary(heads.frequencies([]), softmax)
    kind = parameters["rope_type"]
    _require(kind in ROTARY_TYPES, "rope_type", kind, ROTARY_TYPES)
    growth = _factor(parameters, "llama_4_scaling_beta", 0.0)
    grown = (growth, float(parameters["original_max_position_embeddings"])) if growth else None
    if kind == "default":
        return Rotary(heads.frequencies(frequencies_of(parameters["rope_theta"], heads.rotary_dim)), softmax, grown)
    what = f"the model's rope_parameters are {brief(parameters)}"
    with failures_as(what):
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](hub, torch.device("cpu"), **layer_type)
        frequencies = (*inverse.tolist(), float(scale))
    if inverse.numel() != heads.rotary_dim // 2 or not all(
        0 < frequency < math.inf or (frequency == 0 and kind == "proportional") for frequency in frequencies
    ):
        raise ModelError(f"{what}; allowed: those that give {heads.rotary_dim // 2} finite frequencies above 0")
    if heads.rotary_dim < heads.head_dim and scale != 1:
        raise ModelError(
            f"{what}, of {heads.rotary_dim} of {heads.head_dim} channels; allowed: an attention factor of 1"
        )
    return Rotary(heads.frequencies(inverse.tolist()), float(scale) * softmax, grown)
