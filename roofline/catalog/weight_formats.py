"""Bits per weight of a quantized checkpoint, read from the dtype and quantization_config of its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ridgeplan.roofline.catalog.layers import MLP, LayerGroup
from ridgeplan.roofline.catalog.model_shape import (
    FULL_BITS,
    MAX_BITS,
    PARTS,
    ModelShape,
    WeightBits,
    format_of,
    mean_bits,
)
from ridgeplan.roofline.catalog.validation import brief

Config = Mapping[str, Any]
SCALE_BITS = 16  # an fp16 or bf16 scale
FLOAT_SCALE_BITS = 32
MXFP4_BITS = 4 + 8 / 32  # 4 bits, and an 8-bit scale per 32 weights
DTYPE_BITS = {None: FULL_BITS, "float16": FULL_BITS, "bfloat16": FULL_BITS, "float32": 32.0}
# Of compressed-tensors: those that say no more than bits, groups and symmetry do.
USUAL_LAYOUTS = (None, "pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
MAX_MODULE_PATTERNS = 10_000
MAX_WILDCARDS = 16


@dataclass(frozen=True)
class Scheme:
    """How a method stores weights: bits of each quantized one, scales and zeros included.

    ignored: modules that are not quantized. head: whether the output head is quantized, too. experts_only: whether
    nothing but routed experts is. format: its name in `FORMATS`, by default the method's.
    """

    bits: float
    ignored: Sequence[str] = ()
    head: bool = False
    experts_only: bool = False
    format: str | None = None


def weight_bits_of_config(config: Config, shape: ModelShape) -> WeightBits:
    """The bits that the checkpoint of `shape` holds. Raises ValueError for a format that is not known."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    if not isinstance(dtype, str | None) or dtype not in DTYPE_BITS:
        allowed = ", ".join(name for name in DTYPE_BITS if name)
        raise ValueError(f"dtype {brief(dtype)} is not supported; supported: {allowed}")
    full_bits, quantization = DTYPE_BITS[dtype], config.get("quantization_config")
    if quantization is None:
        parts: dict[str, Any] = dict.fromkeys(PARTS, full_bits)
        return WeightBits(**parts, format="float32" if dtype == "float32" else "bf16")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "gguf":  # as its conversion wrote it
        return WeightBits(format="gguf").with_stored(quantization.get("bits"))
    method = _method(quantization)
    scheme = _METHODS[method](quantization)
    ignored = _Patterns(scheme.ignored)
    tensors = (
        (part, elements, full_bits if _skips(scheme, part) or ignored.match(name) else scheme.bits)
        for name, part, elements in _modules(shape)
    )
    bits = mean_bits(tensors, scheme.format or method)
    return bits.tied() if shape.tied_embeddings else bits


def _method(quantization: object) -> str:
    if not isinstance(quantization, dict):
        raise ValueError(f"quantization_config must be an object, not {brief(quantization)}")
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        return "bitsandbytes"  # as transformers reads configurations without a method
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"quant_method {brief(method)} is not supported; supported: {', '.join(_METHODS)}")
    return method


def _modules(shape: ModelShape) -> Iterator[tuple[str, str, float]]:
    """Name, part and elements of every matrix that a method may quantize."""
    hidden = shape.hidden
    for layer, group in enumerate(_ordered(shape)):
        start = f"model.layers.{layer}"
        for name, elements in _mixer(shape, group):
            yield f"{start}.{name}", "attention", elements
        for name, part, elements in _mlp(group.mlp, hidden):
            yield f"{start}.mlp.{name}", part, elements
    yield "model.embed_tokens", "embedding", shape.embedding_params
    yield "lm_head", "head", shape.embedding_params


def _ordered(shape: ModelShape) -> Iterator[LayerGroup]:
    """The group of every layer, in the model's order where the shape says it."""
    groups = shape.layer_groups
    if all(group.indices for group in groups):
        by_layer = {index: group for group in groups for index in group.indices}
        groups_in_order = (by_layer[layer] for layer in sorted(by_layer))
    else:
        groups_in_order = (group for group in groups for _ in range(group.count))
    yield from groups_in_order


def _mixer(shape: ModelShape, group: LayerGroup) -> Iterator[tuple[str, float]]:
    attention, state = group.attention, group.state
    if state:
        yield "linear_attn", state.params(shape.hidden)
    elif attention and (attention.is_latent or attention.gate_width or attention.shares_cache):
        yield "self_attn.mla", attention.params(shape.hidden)  # the chain of factors counts as one matrix
    elif attention:
        widths = attention.q_width, attention.kv_width, attention.cached_elements - attention.kv_width
        for name, width in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True):
            yield f"self_attn.{name}", shape.hidden * width
        yield "self_attn.o_proj", attention.output_params(shape.hidden)


def _mlp(mlp: MLP | None, hidden: int) -> Iterator[tuple[str, str, float]]:
    """Name, part and elements of the matrices of a layer's MLP."""
    if mlp and mlp.experts:
        yield "experts", "experts", mlp.experts * mlp.expert_params(hidden)
    if mlp and mlp.shared_params(hidden):
        yield "shared_experts", "mlp", mlp.shared_params(hidden)
    if mlp and mlp.intermediate:
        for name in ("gate_proj", "up_proj", "down_proj")[3 - mlp.matrices :]:
            yield name, "mlp", mlp.dense_params(hidden) / mlp.matrices


def _skips(scheme: Scheme, part: str) -> bool:
    """Whether the method leaves a part alone, whatever the configuration ignores."""
    if part == "embedding" or (scheme.experts_only and part != "experts"):
        return True
    return part == "head" and not scheme.head


class _Patterns:
    """Names of modules as configurations write them: whole, a dotted part, with `*`, or "re:" and a simple regex."""

    def __init__(self, patterns: Sequence[str]) -> None:
        simple = [_wildcards(pattern) for pattern in patterns]
        self._exact = {pattern for pattern in simple if "*" not in pattern}
        self._wild = [pattern for pattern in simple if "*" in pattern]
        if len(self._wild) > MAX_WILDCARDS:
            raise ValueError(f"it ignores {len(self._wild)} patterns of modules; allowed: up to {MAX_WILDCARDS}")

    def match(self, name: str) -> bool:
        """Whether a module is among them, or inside one of them."""
        if any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in self._wild):
            return True
        words = name.split(".") if self._exact else []
        ends = range(1, len(words) + 1)
        return any(".".join(words[start:end]) in self._exact for end in ends for start in range(end))


def _wildcards(pattern: str) -> str:
    """A pattern with `*` only. Raises ValueError for a regular expression of which more is needed."""
    if not pattern.startswith("re:"):
        return pattern
    simple = pattern[3:].removeprefix("^").removesuffix("$").replace(".*", "*").replace(r"\.", ".")
    if re.search(r"[\\\[\](){}|+?^$]", simple):
        raise ValueError(f"it ignores modules by {brief(pattern)}; supported: names, and regexes of .* alone")
    return simple


def _names(config: Config, key: str) -> Sequence[str]:
    """A list of names of modules; none where it is missing or null."""
    value = config.get(key) or []
    if not isinstance(value, list) or len(value) > MAX_MODULE_PATTERNS or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{key} must be a list of up to {MAX_MODULE_PATTERNS} names, not {brief(value)}")
    return value


def _whole(config: Config, key: str, low: int, high: int, default: int | None = None) -> int:
    value = config.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} must be a whole number from {low} to {high}, not {brief(value)}")
    return value


def _per_group(config: Config, key: str, default: int | None = None) -> float:
    """1 / the size of a group; 0 for -1, where a whole row or column shares a scale."""
    size = config.get(key, default)
    return 0 if size == -1 else 1 / _whole({key: size}, key, 1, 1 << 20)


def _refuse(config: Config, *keys: str) -> None:
    """Raises ValueError for settings that change what is stored and that are not modelled."""
    key = next((key for key in keys if config.get(key)), None)
    if key:
        raise ValueError(f"{key} {brief(config[key])} is not supported; allowed: none")


def _gptq(config: Config) -> Scheme:
    _refuse(config, "modules_in_block_to_quantize", "dynamic")
    bits = _whole(config, "bits", 2, 8)
    per_group = _per_group(config, "group_size", 128)
    layout = format_of("gptq", bits, usual=config.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2"))
    return Scheme(bits + (SCALE_BITS + bits) * per_group, head=bool(config.get("lm_head")), format=layout)


def _awq(config: Config) -> Scheme:
    bits = _whole(config, "bits", 2, 8, config.get("w_bit"))
    per_group = _per_group(config, "group_size", config.get("q_group_size", 128))
    zero_bits = bits if config.get("zero_point", True) else 0
    layout = format_of("awq", bits, usual=str(config.get("version", "gemm")).lower() == "gemm")
    return Scheme(bits + (SCALE_BITS + zero_bits) * per_group, _names(config, "modules_to_not_convert"), format=layout)


def _bitsandbytes(config: Config) -> Scheme:
    """4 bits with an fp32 maximum per block of 64, itself in 8 bits with an fp32 per 256 if quantized twice (QLoRA)."""
    ignored = _names(config, "llm_int8_skip_modules")
    if config.get("load_in_8bit"):
        return Scheme(8, ignored)  # one fp32 scale per row
    if not config.get("load_in_4bit"):
        raise ValueError("bitsandbytes needs load_in_4bit or load_in_8bit")
    twice = config.get("bnb_4bit_use_double_quant")
    scale_bits = 8 + FLOAT_SCALE_BITS / 256 if twice else FLOAT_SCALE_BITS
    return Scheme(4 + scale_bits / 64, ignored)


def _fp8(config: Config) -> Scheme:
    """8 bits, and an fp32 scale per block, or per tensor without blocks."""
    block = config.get("weight_block_size")
    ignored = _names(config, "modules_to_not_convert")
    return Scheme(8 if block is None else 8 + FLOAT_SCALE_BITS / _block_weights(block), ignored)


def _block_weights(block: object) -> int:
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(f"a block of weights must be two sizes, not {brief(block)}")
    rows, columns = (_whole({"block": size}, "block", 1, 1 << 16) for size in block)
    return rows * columns


def _fbgemm_fp8(config: Config) -> Scheme:
    return Scheme(8, _names(config, "modules_to_not_convert"))  # one fp32 scale per row


def _mxfp4(config: Config) -> Scheme:
    return Scheme(MXFP4_BITS, experts_only=True)


def _compressed_tensors(config: Config) -> Scheme:
    """Every group must store the same bits: targets of several groups are not told apart."""
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config {brief(sparsity)} is not supported; allowed: dense")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"config_groups must be an object with a group, not {brief(groups)}")
    usual = config.get("format") in USUAL_LAYOUTS
    formats = {
        (_group_bits(weights), _group_format(weights, usual)) for weights in map(_group_weights, groups.values())
    }
    if len(formats) > 1:
        raise ValueError(f"config_groups hold weights of {len(formats)} sizes; supported: one")
    ((bits, layout),) = formats
    return Scheme(bits, _names(config, "ignore"), head=True, format=layout)


def _group_weights(group: object) -> Config:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise ValueError(f"the group {brief(group)} is not supported; supported: weights of targets ['Linear']")
    return weights


def _group_format(weights: Config, usual: bool) -> str:
    """The name in `FORMATS` of a group of modules; `usual`: whether the layout is."""
    bits = _whole(weights, "num_bits", 2, MAX_BITS)
    if weights.get("strategy") == "tensor_group":
        return "nvfp4"
    return format_of("compressed-tensors", bits, usual=usual and not (weights.get("type") == "float" and bits < 8))


def _group_bits(weights: Config) -> float:
    bits, strategy = _whole(weights, "num_bits", 2, MAX_BITS), weights.get("strategy")
    zero_bits = 0 if weights.get("symmetric", True) else bits
    if strategy in ("channel", "tensor"):
        return bits
    if strategy == "group":
        return bits + (SCALE_BITS + zero_bits) * _per_group(weights, "group_size")
    if strategy == "tensor_group":  # NVFP4: an fp8 scale per 16 weights
        return bits + 8 * _per_group(weights, "group_size")
    if strategy == "block":
        return bits + SCALE_BITS / _block_weights(weights.get("block_structure"))
    raise ValueError(f"strategy {brief(strategy)} is not supported")


_METHODS: dict[str, Callable[[Config], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
}
