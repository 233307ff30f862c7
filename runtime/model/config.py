"""Reads a decoder's configuration from a config.json: shape, RoPE frequencies, and what the runtime supports."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeplan.roofline.catalog.config_json import routing_of, shape_from_config
from ridgeplan.roofline.catalog.families import FAMILIES
from ridgeplan.roofline.catalog.model_shape import CONVERTED_FORMATS, ModelShape, loaded_formats, trained_context
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.execution import EXECUTABLE_ARCHITECTURES
from ridgeplan.roofline.plan.support import as_loaded
from ridgeplan.runtime.errors import ModelError, failures_as
from ridgeplan.runtime.model.decoder import DecoderConfig, LayerSettings, Rotary, plain_frequencies

ROTARY_TYPES = ("default", "linear", "yarn", "llama3")  # other types depend on the sequence length


def decoder_config(hub: Any, source: str, yarn_factor: float = 1.0) -> DecoderConfig:
    """The decoder of a transformers configuration, with RoPE scaled by YaRN if `yarn_factor` > 1.

    source: where the model was read from. Raises ModelError for families, activations, sizes or rotary embeddings
    that the decoder does not support.
    """
    hub = hub.get_text_config()
    _require(hub.model_type in EXECUTABLE_ARCHITECTURES, "model_type", hub.model_type, EXECUTABLE_ARCHITECTURES)
    _require(hub.hidden_act == "silu", "hidden_act", hub.hidden_act, ("silu",))
    hub = _stretched(hub, yarn_factor)
    keys = hub.to_dict()
    try:
        shape, routing = as_loaded(shape_from_config(keys, source, source)), routing_of(keys)
    except ValueError as error:
        raise ModelError(f"cannot load the model {source}: {error}") from error
    held = shape.weight_bits.format
    _require(held in CONVERTED_FORMATS, "weight format", held, loaded_formats())
    if not 0 < hub.rms_norm_eps <= 1:
        raise ModelError(f"the model's rms_norm_eps is {brief(hub.rms_norm_eps)}; allowed: above 0 up to 1")
    family = FAMILIES[hub.model_type]
    layers = _layer_settings(shape)
    config = DecoderConfig(shape, hub.rms_norm_eps, layers, (_rotary(hub, shape),), routing, family.norm_offset)
    if not shape.is_mla:
        return config
    _require(not keys.get("attention_bias"), "attention_bias", True, ("false with latent attention",))
    return replace(config, score_scale=_score_scale(hub), interleaved_rope=getattr(hub, "rope_interleave", True))


def _score_scale(hub: Any) -> float:
    """What YaRN multiplies scores by where `mscale_all_dim` says so (DeepSeek's models)."""
    rope = hub.rope_parameters
    weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    return float((0.1 * weight * math.log(factor) + 1) ** 2) if rope["rope_type"] != "default" and factor > 1 else 1.0


def _layer_settings(shape: ModelShape) -> tuple[LayerSettings, ...]:
    """The settings of every layer, numbered by kind: those with attention, and those with a state."""
    counts = {False: 0, True: 0}
    layers = []
    for index in range(shape.layers):
        group = shape.group_of(index)
        has_state = group.state is not None
        layers.append(LayerSettings(group.attention, group.state, place=counts[has_state]))
        counts[has_state] += 1
    return tuple(layers)


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
    kind = hub.rope_parameters["rope_type"]
    if kind != "default":
        raise ModelError(f"yarn_factor is {yarn_factor}, but the model's own rope_type is {brief(kind)}; allowed: 1")
    hub = copy.deepcopy(hub)
    hub.rope_parameters |= {
        "rope_type": "yarn",
        "factor": float(yarn_factor),
        "original_max_position_embeddings": trained_context(hub.model_type, hub.max_position_embeddings),
    }
    return hub


def _rotary(hub: Any, shape: ModelShape) -> Rotary:
    """Rotary frequencies and the factor on cosines and sines (RoPE, linear, YaRN, or Llama 3's)."""
    kind = hub.rope_parameters["rope_type"]
    _require(kind in ROTARY_TYPES, "rope_type", kind, ROTARY_TYPES)
    head_dim, width = shape.rope_head_dim or shape.head_dim, rotary_width(hub, shape)
    if kind == "default" and shape.is_mla:
        return Rotary(plain_frequencies(shape, width)[: width // 2])
    if kind == "default":
        return Rotary(plain_frequencies(shape, width), width=width if width < shape.head_dim else None)
    what = f"the model's rope_parameters are {brief(hub.rope_parameters)}"
    with failures_as(what):
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](hub, torch.device("cpu"))
        frequencies = (*inverse.tolist(), float(scale))
    if inverse.numel() != width // 2 or not all(0 < frequency < math.inf for frequency in frequencies):
        raise ModelError(f"{what}; allowed: those that give {width // 2} finite frequencies above 0")
    if width < head_dim and scale != 1:  # it would scale channels that do not turn
        raise ModelError(f"{what}, of {width} of {head_dim} channels; allowed: an attention factor of 1")
    staying = (0.0,) * ((head_dim - width) // 2)
    return Rotary(frequencies[:-1] + staying, frequencies[-1], width if staying else None)


def rotary_width(hub: Any, shape: ModelShape) -> int:
    """Channels of a head that turn; the others of partial rotary embeddings stay."""
    head_dim = shape.rope_head_dim or shape.head_dim
    width = int(head_dim * hub.rope_parameters.get("partial_rotary_factor", 1.0))
    if not 2 <= width <= head_dim or width % 2:
        raise ModelError(f"{width} of {head_dim} channels turn; allowed: an even number from 2 on")
    return width
