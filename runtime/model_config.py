"""What the decoder needs to know of a model, read from its Hugging Face configuration."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeplan.roofline.execution import EXECUTABLE_ARCHITECTURES
from ridgeplan.runtime.errors import ModelError

ROTARY_TYPES = ("default", "linear", "yarn", "llama3")  # the others change with the length of the sequence


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Llama-like decoder. `windows` holds each layer's sliding window in tokens, or None."""

    family: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    max_context: int
    windows: tuple[int | None, ...]
    rotary_frequencies: tuple[float, ...]  # [head_dim / 2], radians per token
    rotary_scale: float  # YaRN's attention factor on cosines and sines


def decoder_config(hub: Any, yarn_factor: float = 1.0) -> DecoderConfig:
    """The decoder of a transformers configuration, its positions stretched by YaRN when `yarn_factor` > 1.

    Raises ModelError for other families, activations or rotary embeddings than the decoder computes.
    """
    _require(hub.model_type in EXECUTABLE_ARCHITECTURES, "model_type", hub.model_type, EXECUTABLE_ARCHITECTURES)
    _require(hub.hidden_act == "silu", "hidden_act", hub.hidden_act, ("silu",))
    hub = _stretched(hub, yarn_factor)
    frequencies, scale = _rotary(hub)
    return DecoderConfig(
        family=hub.model_type,
        layers=hub.num_hidden_layers,
        hidden=hub.hidden_size,
        q_heads=hub.num_attention_heads,
        kv_heads=hub.num_key_value_heads,
        head_dim=_head_dim(hub),
        vocab=hub.vocab_size,
        norm_eps=hub.rms_norm_eps,
        max_context=int(hub.max_position_embeddings * yarn_factor),
        windows=_windows(hub),
        rotary_frequencies=frequencies,
        rotary_scale=scale,
    )


def _require(condition: bool, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not condition:
        raise ModelError(f"the model's {name} is {value!r}; supported: {', '.join(allowed)}")


def _head_dim(hub: Any) -> int:
    return getattr(hub, "head_dim", None) or hub.hidden_size // hub.num_attention_heads


def _stretched(hub: Any, yarn_factor: float) -> Any:
    """A copy of the configuration with YaRN by `yarn_factor`, or the configuration itself for 1."""
    if yarn_factor == 1:
        return hub
    own = hub.rope_parameters["rope_type"]
    if own != "default":
        raise ModelError(f"yarn_factor is {yarn_factor}, but the model's own rope_type is {own!r}; allowed: 1")
    hub = copy.deepcopy(hub)
    hub.rope_parameters |= {
        "rope_type": "yarn",
        "factor": float(yarn_factor),
        "original_max_position_embeddings": hub.max_position_embeddings,
    }
    return hub


def _rotary(hub: Any) -> tuple[tuple[float, ...], float]:
    """Rotary frequencies and the factor on cosines and sines (RoPE, linear, YaRN, or Llama 3's)."""
    kind = hub.rope_parameters["rope_type"]
    _require(kind in ROTARY_TYPES, "rope_type", kind, ROTARY_TYPES)
    if kind == "default":
        dim = _head_dim(hub)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / hub.rope_parameters["rope_theta"] ** exponents).tolist()), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hub, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def _windows(hub: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window. Mistral slides in all layers, Qwen in those its layer_types name."""
    window = getattr(hub, "sliding_window", None)
    kinds = getattr(hub, "layer_types", None) or ["sliding_attention"] * hub.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
