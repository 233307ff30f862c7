"""Model shapes from a Hugging Face config.json, local or fetched from the hub, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.files import read_document
from ridgeplan.roofline.catalog.model_shape import BadModelFile, ModelShape, UnknownModel
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.catalog.weight_formats import weight_bits_of_config

REACH_S = 3  # for the hub's first answer
CONFIG = "config.json"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads them


def fetched_config(hub_id: str) -> Path:
    """The cached config.json of `hub_id`, downloaded now.

    Raises UnknownModel, one line: at once where an offline variable is set, after REACH_S where the hub does not
    answer, or with the hub's own reason.
    """
    forbidden = next((name for name in OFFLINE if os.environ.get(name, "").upper() in TRUE), None)
    if forbidden:
        raise UnknownModel(
            f"{hub_id} is not in the local Hugging Face cache, and {forbidden} is set; {_advice(hub_id)}"
        )
    from huggingface_hub import constants, get_session, hf_hub_download

    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)  # the download itself would retry for minutes
    except Exception as error:  # whatever the HTTP library of the day raises where there is no network
        raise UnknownModel(
            f"{hub_id} is not in the local Hugging Face cache, and {constants.ENDPOINT} cannot be reached within "
            f"{REACH_S} s; {_advice(hub_id)}"
        ) from error
    try:
        return Path(hf_hub_download(hub_id, CONFIG, etag_timeout=REACH_S))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors are of these kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnknownModel(f"cannot download {CONFIG} of {hub_id}: {reason[:200]}") from error


def _advice(hub_id: str) -> str:
    return f"`hf download {hub_id} {CONFIG}` gets it where the hub is reached"


Config = Mapping[str, Any]
Fields = dict[str, Any]


def shape_from_config_file(path: Path, name: str) -> ModelShape:
    """The shape that a config.json describes. Raises BadModelFile, one line that names the file."""
    try:
        config = json.loads(read_document(path))
        return shape_from_config(config, name, source=str(path))
    except OSError as error:
        raise BadModelFile(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not a usable config.json: {error}") from None


def shape_from_config(config: object, name: str, source: str) -> ModelShape:
    """The shape of a parsed config.json, of transformers 4 or 5. Raises ValueError naming the bad key."""
    if not isinstance(config, dict):
        raise ValueError(f"it must hold an object, not {brief(config)}")
    config = _text_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _OWN_FIELDS:
        supported = ", ".join(_OWN_FIELDS)
        raise ValueError(f"model_type {brief(model_type)} is not supported; supported: {supported}")
    fields = {**_common_fields(config), **_window_fields(config), **_rope_fields(config)}
    fields.update(_OWN_FIELDS[model_type](config))
    shape = ModelShape(name=name, architecture=model_type, source=source, **fields)
    return replace(shape, weight_bits=weight_bits_of_config(config, shape))


def _text_config(config: Config) -> Config:
    """The configuration of the language model inside a model of images and text; else the configuration itself.

    Gemma-3's files leave out what equals the defaults of its class in transformers.
    """
    inner = config.get("text_config")
    if config.get("model_type") == "gemma3" and isinstance(inner, dict):
        config = {**inner, "model_type": "gemma3_text"}
    return {**_GEMMA3_DEFAULTS, **config} if config.get("model_type") == "gemma3_text" else config


def _whole(config: Config, key: str, default: int | None = None) -> int:
    """A whole number small enough to compute with; ModelShape checks its exact range."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{key} is missing")
    if type(value) is not int or not 0 <= value <= 10**9:
        raise ValueError(f"{key} must be a whole number from 0 to 1000000000, not {brief(value)}")
    return value


def _common_fields(config: Config) -> Fields:
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    return {
        "layers": _whole(config, "num_hidden_layers"),
        "hidden": hidden,
        "q_heads": heads,
        "kv_heads": _whole(config, "num_key_value_heads", heads),
        "head_dim": _whole(config, "head_dim", hidden // max(heads, 1)),
        "intermediate": _whole(config, "intermediate_size"),
        "vocab": _whole(config, "vocab_size"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", False),
    }


def _flag(config: Config, key: str, default: bool) -> Any:
    value = config.get(key)
    return default if value is None else value


def _rope_fields(config: Config) -> Fields:
    """`rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (transformers 4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must be an object, not {brief(rope)}")
    context = _whole(config, "max_position_embeddings")
    rope = rope.get("full_attention") or rope  # Gemma-3 has another base in layers with a sliding window
    theta = rope.get("rope_theta", config.get("rope_theta"))
    fields: Fields = {} if theta is None else {"rope_theta": theta}
    if rope.get("original_max_position_embeddings") is not None:
        original = _whole(rope, "original_max_position_embeddings")
        factor = rope.get("factor") or 1
        if not isinstance(factor, (int, float)) or not 1 <= factor <= 10**6:
            raise ValueError(f"RoPE's factor must be a number from 1 to 1000000, not {brief(factor)}")
        fields["rope_original_context"] = original
        # Qwen's YaRN recipe leaves max_position_embeddings at the original context.
        context = max(context, int(original * factor))
    return {**fields, "max_context": context}


def sliding_layers(config: Config) -> Sequence[int]:
    """Indices of the layers that attend within `sliding_window` only. Raises ValueError naming a bad key."""
    layers, family = _whole(config, "num_hidden_layers"), config.get("model_type")
    if config.get("sliding_window") is None:
        return range(0)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    if family in ("mistral", "mixtral"):
        return range(layers)
    if family == "gpt_oss":
        return range(0, layers, 2)
    if family == "gemma3_text":
        pattern = _whole(config, "sliding_window_pattern", 6)
        return [layer for layer in range(layers) if pattern and (layer + 1) % pattern]
    # Qwen: the layers from max_window_layers on
    return range(_whole(config, "max_window_layers", 28), layers) if config.get("use_sliding_window") else range(0)


def _window_fields(config: Config) -> Fields:
    """The sliding window and the number of layers that use it; none unless a layer does."""
    using = len(sliding_layers(config))
    return {"window_tokens": _whole(config, "sliding_window"), "window_layers": using} if using else {}


def _llama_fields(config: Config) -> Fields:
    return {"attention_bias": _flag(config, "attention_bias", False)}


def _mistral_fields(config: Config) -> Fields:
    return {}


def _mixtral_fields(config: Config) -> Fields:
    return {
        "experts": _whole(config, "num_local_experts"),
        "experts_per_token": _whole(config, "num_experts_per_tok"),
        "expert_intermediate": _whole(config, "intermediate_size"),
    }


def _gpt_oss_fields(config: Config) -> Fields:
    return {**_mixtral_fields(config), "attention_bias": _flag(config, "attention_bias", True)}


def _qwen2_fields(config: Config) -> Fields:
    return {"attention_bias": True}  # transformers' class has the biases whatever the config says


def _qwen3_fields(config: Config) -> Fields:
    return {"qk_norm": True, "attention_bias": _flag(config, "attention_bias", False)}


def _phi3_fields(config: Config) -> Fields:
    return {}  # QKV, and gate and up, are one matrix each, which costs what several cost


def _gemma3_fields(config: Config) -> Fields:
    biases = {"attention_bias": _flag(config, "attention_bias", False)}
    return {**biases, "qk_norm": True, "sandwich_norms": True}


def _qwen3_moe_fields(config: Config) -> Fields:
    dense = config.get("mlp_only_layers") or []
    if _whole(config, "decoder_sparse_step", 1) != 1 or not isinstance(dense, list):
        raise ValueError("decoder_sparse_step must be 1 and mlp_only_layers a list")
    return {
        **_qwen3_fields(config),
        "experts": _whole(config, "num_experts"),
        "experts_per_token": _whole(config, "num_experts_per_tok"),
        "expert_intermediate": _whole(config, "moe_intermediate_size"),
        "dense_layers": len(dense),
    }


def _deepseek_fields(config: Config) -> Fields:
    rope, nope = _whole(config, "qk_rope_head_dim"), _whole(config, "qk_nope_head_dim")
    latent = {
        "latent_rank": _whole(config, "kv_lora_rank"),
        "q_lora_rank": _whole(config, "q_lora_rank", 0) or None,  # null in the Lite models
        "rope_head_dim": rope,
        "nope_head_dim": nope,
        "v_head_dim": _whole(config, "v_head_dim"),
        "head_dim": rope + nope,
        "attention_bias": _flag(config, "attention_bias", False),
    }
    if not _whole(config, "n_routed_experts", 0):
        return latent
    width = _whole(config, "moe_intermediate_size")
    return {
        **latent,
        "experts": _whole(config, "n_routed_experts"),
        "experts_per_token": _whole(config, "num_experts_per_tok"),
        "expert_intermediate": width,
        "shared_experts_intermediate": width * _whole(config, "n_shared_experts", 0),
        "dense_layers": _whole(config, "first_k_dense_replace", 0),
    }


# What a family's config.json holds beside the common keys, by `model_type`; docs/add-a-model.md lists what else a new
# family needs.
_OWN_FIELDS: dict[str, Callable[[Config], Fields]] = {
    "llama": _llama_fields,
    "mistral": _mistral_fields,
    "mixtral": _mixtral_fields,
    "qwen2": _qwen2_fields,
    "qwen3": _qwen3_fields,
    "qwen3_moe": _qwen3_moe_fields,
    "gpt_oss": _gpt_oss_fields,
    "deepseek_v2": _deepseek_fields,
    "deepseek_v3": _deepseek_fields,
    "phi3": _phi3_fields,
    "gemma3_text": _gemma3_fields,
}
# Of transformers' Gemma3TextConfig.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
